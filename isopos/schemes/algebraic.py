"""Algebraic Positional Encodings (Kogkalidis et al. 2024): learned orthogonal matrices for lines, grids, rings and trees."""

import math
import typing
from collections.abc import Callable
from typing import Literal, Unpack

import torch
from torch import Tensor

from isopos import bases, couplings, encodings
from isopos.catalog import at_least, expect
from isopos.encodings import Encoding, rope_frequencies
from isopos.exact import normal
from isopos.positions import Ring
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, even, register, split_widths
from isopos.spec import read

Initial = Literal["rope", "identity"]


@register(
    citation="Kogkalidis et al. 2024, APE, section 3.1",
    equation="<q, W^t k>",
    cost="d^3 once, t d^2",
    extends="any product, by direct sum",
    learns="W: planes and angles",
)
def ape_sequence(
    head_dim: int,
    heads: int,
    *,
    initial: Initial = "rope",
    base: float = 10000.0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Powers of one learned orthogonal matrix per head.

    The matrix is exp(A - A^T) with a learned A (sections 3.1 and 4.2). Initial values are in closed form; angles and basis
    are both learned. With softmax attention this equals rope with learned angles in projections that absorb the basis
    (Appendix A; `isopos.nn.absorb`).
    """
    encoding = _line(even(head_dim), heads, initial, base)
    return compose(encoding, heads, choices, locality=locality)


@register(
    citation="Kogkalidis et al. 2024, APE, section 3.4.1",
    equation="<q, W^y k>",
    cost="d^3 once, t d^2",
    extends="any group",
    learns="W: planes and angles",
)
def ape_absolute(
    head_dim: int,
    heads: int,
    *,
    side: Literal["query", "key"] = "key",
    initial: Initial = "rope",
    base: float = 10000.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Powers of one learned orthogonal matrix, on keys only or on queries only.

    Positions are absolute: a shift changes scores.

    Args:
        side: "query" or "key", the side that is encoded.
    """
    encoding = _line(even(head_dim), heads, initial, base)
    return compose(couplings.Absolute(encoding, side), heads, choices)


@register(
    citation="Kogkalidis et al. 2024, APE, section 3.3",
    equation="<q_1, W_1^t1 k_1> + <q_2, W_2^t2 k_2>",
    cost="d^3 once, t d^2",
    extends="any product, by direct sum",
    learns="W of each axis: planes and angles",
)
def ape_grid(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    initial: Initial = "rope",
    base: float = 10000.0,
    locality: float | None = None,
    metric: Literal["steps", "euclidean"] = "steps",
    **choices: Unpack[Choices],
) -> Scheme:
    """Powers of one learned orthogonal matrix per axis and head.

    Args:
        head_dim: d, even, at least 2 for each axis.
        metric: Distance for `locality`: "steps" summed over all axes, as in the paper, or "euclidean", the straight distance
            rounded down, as in the authors' code for images.
    """
    expect("metric", metric, ("steps", "euclidean"))
    widths = split_widths(even(head_dim), axes, 2)
    encoding = encodings.DirectSum([_line(width, heads, initial, base) for width in widths])
    return compose(encoding, heads, choices, locality=locality, metric=None if metric == "steps" else metric)


@register(
    citation="Kogkalidis et al. 2024, APE, section 3.4.2",
    equation="<P q, R(2 pi m t / n) P k>",
    cost="d^3 once, t d^2",
    extends="any product, by direct sum",
    learns="the basis P",
)
def ape_ring(
    head_dim: int,
    heads: int,
    *,
    period: int = 128,
    seed: int = 0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotations by whole turns per period, in a learned basis per head.

    Positions are any integers; positions that differ by the period are equal. Frequencies are multiples of 2 pi / period and
    fixed, because others would not close the ring. They fall geometrically from half a turn per step to one turn per period.

    Args:
        period: n, at least 2.
    """
    encoding = _ring(even(head_dim), heads, period, seed)
    return compose(encoding, heads, choices, locality=locality)


@register(
    citation="Kogkalidis et al. 2024, APE, section 3.2",
    equation="<q, W_path(x, y) k>",
    cost="t d^3 once, t d^2",
    extends="any product, by direct sum",
    learns="W of each branch: planes and angles",
    fits={"branches": "branches"},
)
def ape_tree(
    head_dim: int,
    heads: int,
    *,
    branches: int = 2,
    initial: Initial = "rope",
    base: float = 10000.0,
    seed: int = 0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Products of one learned orthogonal matrix per branch and head.

    Args:
        initial: Initial angles of each branch, as in `ape_sequence`, in random planes.
    """
    encoding = _tree(even(head_dim), heads, branches, initial, base, seed)
    return compose(encoding, heads, choices, locality=locality)


@register(
    citation="Kogkalidis et al. 2024, APE, section 3.4.3",
    equation="sum over parts of <q_p, W_p k_p>",
    cost="of its parts",
    extends="any product",
    learns="what its parts learn",
)
def ape_product(
    head_dim: int,
    heads: int,
    *,
    parts: str = "sequence+tree2",
    initial: Initial = "rope",
    base: float = 10000.0,
    seed: int = 0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Direct sums for products of groups, such as sequences of trees.

    Args:
        head_dim: d, even, at least 2 for each part.
        parts: Joined by "+": "sequence", "ringN" of period N, "treeN" of N branches, "gridN" of N axes. A sequence of trees
            is "sequence+tree2", a tree of images "tree2+grid2".
    """
    makers = _makers(parts, heads, initial, base, seed)
    widths = split_widths(even(head_dim), len(makers), 2)
    encoding = encodings.DirectSum([make(width) for make, width in zip(makers, widths, strict=True)])
    return compose(encoding, heads, choices, locality=locality)


def _generator(width: int, initial: str, base: float) -> Tensor:
    """A ``[d d]`` in float64, where A - A^T has blocks [[0, -w], [w, 0]] with the initial angles w."""
    expect("initial", initial, typing.get_args(Initial))
    count = width // 2
    angle = rope_frequencies(count, base)
    if initial == "identity":  # quantiles of a half-normal distribution of 0.25 radians per step
        share = (torch.arange(count, device="cpu", dtype=torch.float64) + 0.5) / count
        angle = 0.25 * 2**0.5 * torch.erfinv(share)
    lower = torch.zeros(width, device="cpu", dtype=torch.float64)
    lower[::2] = angle
    return torch.diag(lower[:-1], -1)


def _line(width: int, heads: int, initial: str, base: float) -> Encoding:
    return encodings.Exponential(_generator(width, initial, base).expand(heads, -1, -1))


def _tree(width: int, heads: int, branches: int, initial: str, base: float, seed: int) -> Encoding:
    start = _generator(width, initial, base)
    random = normal(seed, heads, at_least("branches", branches), width, width).double()
    planes = torch.linalg.qr(random).Q
    return encodings.TreePath(planes.mT @ start @ planes)


def _ring(width: int, heads: int, period: int, seed: int) -> Encoding:
    turns = (at_least("period", period, 2) / 2) ** torch.linspace(0, 1, width // 2, device="cpu", dtype=torch.float64)
    ring = encodings.Rotary((2 * math.pi / period * turns.floor().flip(0))[None, None], group=Ring(period))
    generator = 0.1 * normal(seed, heads, width, width) / width**0.5  # near the identity
    return encodings.InBasis(ring, bases.Orthogonal(generator, learned=True))


def _makers(parts: str, heads: int, initial: str, base: float, seed: int) -> list[Callable[[int], Encoding]]:
    """Functions that build the encoding of each part from its number of features."""
    makers: list[Callable[[int], Encoding]] = []
    for part in read("parts", parts).split("+"):
        name = part.text.rstrip("0123456789")
        number = part.text[len(name) :]
        if name not in ("sequence", "ring", "tree", "grid") or (name == "sequence") != (number == ""):
            raise part.wrong("sequence, ringN, treeN or gridN joined by +")
        if name == "ring":
            makers.append(lambda width, n=int(number): _ring(width, heads, n, seed))
        elif name == "tree":
            makers.append(lambda width, n=int(number): _tree(width, heads, n, initial, base, seed))
        else:
            makers += [lambda width: _line(width, heads, initial, base)] * at_least("axes", int(number or 1))
    return makers
