"""Absolute positions added to token embeddings, and no positions at all: what the relative schemes are compared with."""

from typing import Unpack

from isopos import encodings
from isopos.embeddings import Learned, Sinusoidal, TreeStack
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    summary="no position at all: the baseline",
    citation="Tsai et al. 2019, arXiv 1908.11775",
    equation="<q, k>",
    cost="none",
    extends="any group",
    content=False,
)
def none(head_dim: int, heads: int | None = None, **choices: Unpack[Choices]) -> Scheme:
    """No position at all: with `causal`, order is seen only through what a query may not see."""
    return compose(encodings.Identity(head_dim), heads, choices)


@register(
    summary="fixed sines and cosines added to the embeddings",
    citation="Vaswani et al. 2017, section 3.5",
    equation="e_x + (sin w_i x, cos w_i x)",
    cost="t d once",
    extends="grids, by concatenation",
    fits={"scale": "scale"},
)
def sinusoidal(
    head_dim: int, heads: int, *, model_dim: int | None = None, scale: float = 1.0, **choices: Unpack[Choices]
) -> Scheme:
    """Sines and cosines added to the token embeddings (Vaswani et al. 2017, section 3.5).

    Args:
        scale: Amplitude; 1 beside token embeddings of unit variance, as in the paper, and less beside smaller ones.
    """
    embedding = Sinusoidal(head_dim * heads if model_dim is None else model_dim, scale=scale)
    return compose(encodings.Identity(head_dim), heads, choices, embedding=embedding)


@register(
    summary="one learned vector a position added to the embeddings",
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
    """One learned vector a position, added to the token embeddings (Gehring et al. 2017).

    Args:
        length: Number of positions; others raise an error.
    """
    embedding = Learned(length, head_dim * heads if model_dim is None else model_dim, seed=seed)
    return compose(encodings.Identity(head_dim), heads, choices, embedding=embedding)


@register(
    summary="the stack of a node's last branches added to the embeddings",
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
    """The stack of a node's last branches, added to the embeddings of trees (Shiv and Quirk 2019).

    Args:
        branches: Children of a node, at most.
        depth: Steps up that are seen; as many as model_dim / branches, and at most 16, by default.
    """
    width = head_dim * heads if model_dim is None else model_dim
    depth = min(16, width // max(branches, 1)) if depth is None else depth
    embedding = TreeStack(branches, width, depth)
    return compose(encodings.Identity(head_dim, embedding.group), heads, choices, embedding=embedding)
