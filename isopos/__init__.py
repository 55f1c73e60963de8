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
from typing import TYPE_CHECKING, Any

from isopos.catalog import CATALOG

if TYPE_CHECKING:
    from isopos.attention import Attention as Attention
    from isopos.attention import linear_attention as linear_attention
    from isopos.attention import softmax_attention as softmax_attention
    from isopos.models import Decoder as Decoder
    from isopos.ops.linear import Clamped as Clamped
    from isopos.positions import forest as forest
    from isopos.positions import grid as grid
    from isopos.positions import packed as packed
    from isopos.positions import product as product
    from isopos.positions import ring as ring
    from isopos.positions import sequence as sequence
    from isopos.positions import tree as tree
    from isopos.scheme import Scheme as Scheme
    from isopos.schemes import alibi as alibi
    from isopos.schemes import ape_absolute as ape_absolute
    from isopos.schemes import ape_grid as ape_grid
    from isopos.schemes import ape_product as ape_product
    from isopos.schemes import ape_ring as ape_ring
    from isopos.schemes import ape_sequence as ape_sequence
    from isopos.schemes import ape_tree as ape_tree
    from isopos.schemes import cosformer as cosformer
    from isopos.schemes import deberta as deberta
    from isopos.schemes import horn_clipped as horn_clipped
    from isopos.schemes import horn_constrained as horn_constrained
    from isopos.schemes import learned as learned
    from isopos.schemes import lrpe_orthogonal as lrpe_orthogonal
    from isopos.schemes import lrpe_permutation as lrpe_permutation
    from isopos.schemes import lrpe_unitary as lrpe_unitary
    from isopos.schemes import none as none
    from isopos.schemes import permuteformer as permuteformer
    from isopos.schemes import permuteformer_2d as permuteformer_2d
    from isopos.schemes import retnet as retnet
    from isopos.schemes import rope as rope
    from isopos.schemes import shaw as shaw
    from isopos.schemes import shiv_quirk as shiv_quirk
    from isopos.schemes import sinusoidal as sinusoidal
    from isopos.schemes import spe_conv as spe_conv
    from isopos.schemes import spe_sine as spe_sine
    from isopos.schemes import t5 as t5
    from isopos.schemes import transformer_xl as transformer_xl
    from isopos.schemes import xpos as xpos
    from isopos.state import State as State

__version__ = "0.1.0"

_HOME = {
    "linear_attention": "attention",
    "softmax_attention": "attention",
    "sequence": "positions",
    "ring": "positions",
    "grid": "positions",
    "product": "positions",
    "tree": "positions",
    "forest": "positions",
    "packed": "positions",
    "State": "state",
    "Clamped": "ops.linear",
    "Attention": "attention",
    "Decoder": "models",
    "Scheme": "scheme",
    **{name.replace("-", "_"): "schemes" for name in CATALOG},
}
_MODULES = (
    *("attention", "bases", "biases", "catalog", "couplings", "decays", "embeddings", "encodings", "feature_maps"),
    *("laws", "maps", "models", "ops", "positions", "schemes", "state", "terms"),
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"isopos.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"isopos.{name}")
    raise AttributeError(f"module 'isopos' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
