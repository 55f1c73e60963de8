"""Attention with positions: as functions, as a module, and what moves checkpoints between layouts."""

from isopos.attention.functional import linear_attention, naive_linear_attention, softmax_attention
from isopos.attention.module import Attention, absorb, convert_layout

__all__ = ["Attention", "absorb", "convert_layout", "linear_attention", "naive_linear_attention", "softmax_attention"]
