"""Deprecated name of `isopos.ops.slices`."""

from isopos.deprecation import renamed

__getattr__ = renamed(__name__, {"Place": "isopos.ops.slices.Slices", "Axes": "isopos.ops.slices.Axes"})
