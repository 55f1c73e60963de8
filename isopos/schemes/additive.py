"""Absolute positions added to token embeddings, and no positions: the baselines of the relative schemes."""

from typing import Unpack

from isopos import encodings
from isopos.embeddings import Learned, Sinusoidal, TreeStack
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    citation="Tsai et al. 2019, arXiv 1908.11775",
    equation="<q, k>",
    cost="none",
    extends="any group",
    content=False,
)
def none(head_dim: int, heads: int | None = None, **choices: Unpack[Choices]) -> Scheme:
    """No positions; the baseline.

    With `causal`, a model still sees order through the tokens that a query may not see.
    """
    return compose(encodings.Identity(head_dim), heads, choices)


@register(
    citation="Vaswani et al. 2017, section 3.5",
    equation="e_x + (sin w_i x, cos w_i x)",
    cost="t d once",
    extends="grids, by concatenation",
    fits={"scale": "scale"},
)
def sinusoidal(
    head_dim: int, heads: int, *, model_dim: int | None = None, scale: float = 1.0, **choices: Unpack[Choices]
) -> Scheme:
    """Fixed sines and cosines, added to the token embeddings.

    Args:
        scale: Amplitude. 1 fits token embeddings of unit variance, as in the paper; use less for smaller ones.
    """
    embedding = Sinusoidal(head_dim * heads if model_dim is None else model_dim, scale=scale)
    return compose(encodings.Identity(head_dim), heads, choices, embedding=embedding)


@register(
    citation="Gehring et al. 2017, arXiv 1705.03122",
    equation="e_x + p_x",
    cost="t d once",
    extends="any finite set",
    learns="the vectors",
    fits={"length": "length"},
)
def learned(
    head_dim: int,
    heads: int,
    *,
    length: int = 2048,
    model_dim: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """One learned vector per position, added to the token embeddings.

    Args:
        length: Number of positions; others raise an error.
    """
    embedding = Learned(length, head_dim * heads if model_dim is None else model_dim, seed=seed)
    return compose(encodings.Identity(head_dim), heads, choices, embedding=embedding)


@register(
    citation="Shiv and Quirk 2019",
    equation="e_x + (p^i [branch i steps up is b])",
    cost="t d once",
    extends="trees",
    learns="p, several",
    fits={"branches": "branches", "depth": "depth"},
)
def shiv_quirk(
    head_dim: int,
    heads: int,
    *,
    branches: int = 2,
    depth: int | None = None,
    model_dim: int | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """The stack of a tree node's last branches, added to the token embeddings.

    Args:
        depth: Steps towards the root that are encoded; model_dim / branches by default, and at most 16.
    """
    width = head_dim * heads if model_dim is None else model_dim
    depth = min(16, width // max(branches, 1)) if depth is None else depth
    embedding = TreeStack(branches, width, depth)
    return compose(encodings.Identity(head_dim, embedding.group), heads, choices, embedding=embedding)
