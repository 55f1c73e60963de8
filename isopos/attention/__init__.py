"""Attention with positions, as functions; `isopos.nn` has the modules around it."""

from isopos.attention.clustered import clustered_attention
from isopos.attention.linear import explain, linear_attention, naive_linear_attention
from isopos.attention.softmax import softmax_attention
from isopos.deprecation import renamed

__all__ = ["clustered_attention", "explain", "linear_attention", "naive_linear_attention", "softmax_attention"]

__getattr__ = renamed(__name__, {name: f"isopos.nn.{name}" for name in ("Attention", "Steps", "absorb", "convert_layout")})
