"""Attention with positions: as functions, as a module, and what moves checkpoints between layouts."""

from isopos.attention.checkpoint import absorb, convert_layout
from isopos.attention.clustered import clustered_attention
from isopos.attention.linear import explain, linear_attention, naive_linear_attention
from isopos.attention.module import Attention
from isopos.attention.softmax import softmax_attention
from isopos.attention.steps import Steps

__all__ = [
    "Attention",
    "Steps",
    "absorb",
    "clustered_attention",
    "convert_layout",
    "explain",
    "linear_attention",
    "naive_linear_attention",
    "softmax_attention",
]
