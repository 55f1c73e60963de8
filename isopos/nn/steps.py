"""Deprecated names of `isopos.stream`."""

from isopos.deprecation import renamed

__getattr__ = renamed(__name__, {"Steps": "isopos.stream.Stream", "_Ahead": "isopos.stream.Tables"})
