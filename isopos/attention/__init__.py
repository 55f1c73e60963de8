"""Attention with positions, as functions; `isopos.nn` has the modules around it."""

from isopos.attention.linear import explain, linear_attention, naive_linear_attention
from isopos.attention.softmax import softmax_attention
from isopos.deprecation import renamed

__all__ = ["explain", "linear_attention", "naive_linear_attention", "softmax_attention"]

_MOVED = {name: f"isopos.nn.{name}" for name in ("Attention", "absorb", "convert_layout")}
_MOVED |= {"clustered_attention": "isopos.lab.tasks.clustered.clustered_attention", "Steps": "isopos.stream.Stream"}
__getattr__ = renamed(__name__, _MOVED)
