"""Names of before; `isopos.stream` has what they are now."""

from isopos.deprecation import renamed

__getattr__ = renamed(__name__, {"Steps": "isopos.stream.Stream", "_Ahead": "isopos.stream.Tables"})
