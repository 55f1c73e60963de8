"""Modules around attention: projections with a scheme, and conversions of their weights."""

from isopos.deprecation import renamed
from isopos.nn.attention import Attention
from isopos.nn.checkpoint import absorb, convert_layout

__all__ = ["Attention", "absorb", "convert_layout"]

__getattr__ = renamed(__name__, {"Steps": "isopos.stream.Stream"})
