"""Attention with positions: as functions, as a module, and what moves checkpoints between layouts."""

import importlib
import warnings
from typing import Any

from isopos.attention.checkpoint import absorb, convert_layout
from isopos.attention.linear import explain, linear_attention, naive_linear_attention
from isopos.attention.module import Attention
from isopos.attention.softmax import softmax_attention
from isopos.attention.steps import Steps

__all__ = [
    "Attention",
    "Steps",
    "absorb",
    "convert_layout",
    "explain",
    "linear_attention",
    "naive_linear_attention",
    "softmax_attention",
]


def __getattr__(name: str) -> Any:
    """Names that have moved, for one version."""
    if name == "clustered_attention":
        home = "isopos.lab.tasks.clustered"
        warnings.warn(f"isopos.attention.{name} is {home}.{name}, and its name here ends with 0.2", DeprecationWarning, 2)
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'isopos.attention' has no attribute {name!r}")
