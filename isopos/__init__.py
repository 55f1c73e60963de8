"""isopos: positional encodings as isometries.

A position acts on queries and keys as a unitary operator, so attention, softmax or linear, sees relative positions only:

    >>> import torch
    >>> import torch.nn.functional as F
    >>> import isopos
    >>> q, k, v = torch.randn(3, 1, 8, 128, 64)
    >>> scheme = isopos.rope(head_dim=64)
    >>> rho = scheme.encoding(isopos.sequence(128))
    >>> y = F.scaled_dot_product_attention(rho(q), rho(k), v, is_causal=True)
    >>> y = isopos.linear_attention(q, k, v, **scheme.at(isopos.sequence(128)), causal=True)

Names are imported when they are first used.
"""

import importlib
from typing import Any

from isopos.deprecation import renamed

__version__ = "0.1.0"

_NAMES = {
    "attention": ("linear_attention", "softmax_attention"),
    "catalog": ("CATALOG",),
    "models": ("Decoder",),
    "nn": ("Attention",),
    "ops.linear": ("Clamped",),
    "positions": ("forest", "frames", "graph", "grid", "packed", "patches", "product", "ring", "sequence", "tree"),
    "scheme": ("Scheme", "parameter_groups"),
    "state": ("State",),
    "stream": ("Stream",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = (
    *("attention", "audit", "bases", "biases", "catalog", "contragredient", "couplings", "decays", "embeddings"),
    *("encodings", "feature_maps", "generators", "kinds", "laws", "lengths", "maps", "models", "nn", "ops", "parallel"),
    *("paths", "phases", "poses", "positions", "schemes", "state", "stream", "terms", "testing"),
)


def _schemes() -> set[str]:
    """The names of the schemes' functions."""
    from isopos.catalog import CATALOG

    return {name.replace("-", "_") for name in CATALOG}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"isopos.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"isopos.{name}")
    if not name.startswith("_") and name in _schemes():
        return getattr(importlib.import_module("isopos.schemes"), name)
    if name == "Steps":
        return renamed(__name__, {"Steps": "isopos.stream.Stream"})(name)
    raise AttributeError(f"module 'isopos' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES, *_schemes()})
