"""Modules around attention: projections with a scheme, prepared steps of a stream, and what moves checkpoints of them."""

from isopos.nn.attention import Attention
from isopos.nn.checkpoint import absorb, convert_layout
from isopos.nn.steps import Steps

__all__ = ["Attention", "Steps", "absorb", "convert_layout"]
