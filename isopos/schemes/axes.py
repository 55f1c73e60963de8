"""Rotations of feature pairs over several axes: axial, mixed, golden and adaptive rotary, M-RoPE, and WIRE for graphs."""

import math
from collections.abc import Sequence
from operator import index
from typing import Literal, Unpack

import torch
from torch import Tensor

from isopos import couplings, encodings
from isopos.catalog import at_least, expect
from isopos.encodings import rope_frequencies
from isopos.exact import normal
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, axial, compose, even, laid_out, register, split_widths
from isopos.spec import read

Sections = str | Sequence[int] | None


@register(
    citation="Heo et al. 2024, arXiv 2403.13298, axial frequency",
    equation="<q_1, R(w t1) k_1> + <q_2, R(w t2) k_2>",
    cost="t d",
    extends="any number of axes",
)
def rope_axial(
    head_dim: int,
    heads: int | None = None,
    *,
    axes: int = 2,
    sections: Sections = None,
    base: float = 100.0,
    layout: PairLayout = "interleaved",
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of feature pairs, each pair by one axis.

    Pair i of the n pairs of an axis rotates by base^(-i/n) per step along this axis. Coordinates may be real numbers.

    Args:
        head_dim: d, even, at least 2 for each axis.
        sections: Pairs of each axis, with sum d/2: [6, 2], or "6+2" as text. Equal shares by default; where d/2 does not
            divide, the first axes have one pair more.
        base: 100 in the paper, for images of a few dozen patches per side.
        layout: Input layout of pairs: "interleaved" (2i, 2i+1), or "half" (i, i + d/2), as in DINOv3, which is this scheme
            at `isopos.patches`, positions that do not depend on the resolution.
    """
    frequency = _axial(even(head_dim) // 2, axes, sections, base)
    return compose(laid_out(encodings.Rotary(frequency[None]), layout), heads, choices)


@register(
    citation="Heo et al. 2024, arXiv 2403.13298, mixed learnable frequency",
    equation="<q, R(w1 t1 + w2 t2) k>",
    cost="t d",
    extends="any number of axes",
    learns="w, one vector per pair and head",
)
def rope_mixed(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    base: float = 10.0,
    learned: bool = True,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of feature pairs by learned frequencies over all axes.

    Each pair of each head rotates by <w, x> with a learned vector w, so that diagonals count, too. Initial frequencies
    are `rope_axial`'s, rotated by one random rotation per head. Coordinates may be real numbers.

    Args:
        head_dim: d, even, at least 2 for each axis.
        base: 10 in the paper.
        learned: Learn w; otherwise w keeps its initial values.
    """
    frequency = _axial(even(head_dim) // 2, axes, None, base)
    frame, upper = torch.linalg.qr(normal(seed, heads, axes, axes).double())
    frame = frame * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform; plain QR prefers some signs
    frame[..., 0] *= frame.det()[:, None]  # a rotation, no reflection
    return compose(encodings.Rotary(frame @ frequency, learned=learned), heads, choices)


@register(
    citation="Xiong 2025, On N-dimensional rotary positional embeddings",
    equation="<q, R(w (t1 cos a + t2 sin a)) k>",
    cost="t d",
    extends="any number of axes",
)
def rope_golden(head_dim: int, heads: int, *, axes: int = 2, base: float = 100.0, **choices: Unpack[Choices]) -> Scheme:
    """Rotation of feature pairs along directions that are spread evenly.

    Pair i rotates by base^(-2i/d) per step along its direction. From pair to pair, and from head to head, directions turn by
    pi (5^(1/2) - 1) / 2, so that all heads together cover all directions. On more than two axes, directions are normalised
    normal quantiles of the additive sequence of phi^-1, phi^-2, ... with phi^(axes + 1) = phi + 1. Coordinates may be real.

    Args:
        axes: Number of axes of the grid, at least 2.
    """
    count = even(head_dim) // 2
    direction = _directions(heads * count, at_least("axes", axes, 2)).view(heads, count, axes).mT
    return compose(encodings.Rotary(rope_frequencies(count, base) * direction), heads, choices)


@register(
    citation="Wang et al. 2024, Qwen2-VL, arXiv 2409.12191, section 2.1; Qwen3-VL",
    equation="<q, R(w_i t_a(i)) k>",
    cost="t d",
    extends="any number of axes",
)
def mrope(
    head_dim: int,
    heads: int | None = None,
    *,
    sections: Sections = None,
    interleaved: bool = False,
    time: Literal["fast", "slow", "none"] = "fast",
    base: float = 10000.0,
    layout: PairLayout = "interleaved",
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of feature pairs, divided among time, height and width.

    Each frequency of rope multiplies one coordinate of (time, height, width). If the coordinates are equal, as for text,
    this is rope. Positions are ``[*b t 3]``, and may be real numbers: `isopos.frames` arranges text and videos; position ids
    ``[3 b t]`` of transformers become this by ``ids.movedim(0, -1)``.

    Args:
        sections: Pairs of each axis, with sum d/2: [16, 24, 24], or "16+24+24" as text. By default one quarter for time and
            the rest for height and width, as in Qwen2-VL, or if interleaved [24, 20, 20] of 64, as in Qwen3-VL. An axis with
            0 pairs is ignored, such as time in a head of 4 features. Four equal ones, interleaved, are VRoPE's.
        interleaved: Assign pairs to axes in rotation while an axis has pairs left, and the rest to the first axis, so that
            each axis has fast and slow frequencies. Otherwise time has the fastest frequencies and width the slowest.
        time: "fast": as above. "slow": time has the slowest pairs, and height and width alternate over the others, as in
            VideoRoPE (Wei et al. 2025, arXiv 2502.05173). "none": in addition, the pairs of time do not rotate, as in HoPE
            (Li et al. 2025, arXiv 2505.20444), so that content is compared at any distance; text is then p-rope.
        base: 10^6 in the checkpoints of Qwen2-VL, whose layout is "half".
    """
    count = even(head_dim) // 2
    if sections is None:
        at_least("head_dim", head_dim, 4)
        plane = max(1, count * 5 // 16 if interleaved else count * 3 // 8)
        sections = [count - 2 * plane, plane, plane]
    expect("time", time, ("fast", "slow", "none"))
    shares = _shares(sections, count, 0)
    axis = _slow_time(shares, interleaved) if time != "fast" else _assigned(shares, interleaved)
    selected = torch.eye(len(shares), device="cpu", dtype=torch.float64)[:, axis]
    if time == "none":
        selected[0] = 0
    return compose(laid_out(encodings.Rotary((selected * rope_frequencies(count, base))[None]), layout), heads, choices)


@register(
    citation="Li et al. 2025, HARoPE, arXiv 2510.10489",
    equation="<A q, R(w t) A k>, A = U diag(s) V^T",
    cost="d^3 once, t d^2",
    extends="any number of axes",
    learns="A, one matrix per head",
)
def harope(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    base: float = 10000.0,
    released: bool = False,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of pairs by one axis each, after a learned map per head.

    Queries and keys are multiplied by A, which mixes axes and frequencies, then rotate as in `rope_axial`, which this is at
    the start. Scores are relative; A stretches features, so it is no isometry, unlike the basis of `string`.

    Args:
        head_dim: d, even, at least 2 for each axis.
        released: Multiply keys by the inverse transposed A, as the authors' code does, so that A has no effect on a score at
            equal positions; by default by A, as in the paper.
    """
    encoding = encodings.Rotary(_axial(even(head_dim) // 2, axes, None, base)[None])
    return compose(couplings.Adapted(encoding, heads, dual=released), heads, choices)


@register(
    citation="Reid et al. 2025, WIRE, arXiv 2509.22259",
    equation="<q, R(<w, t>) k>, t = u_y - u_x of eigenvectors u",
    cost="t d, and n^3 once for n nodes",
    extends="any real coordinates",
    learns="w, one vector per pair and head",
)
def wire(
    head_dim: int, heads: int, *, axes: int = 8, learned: bool = True, seed: int = 0, **choices: Unpack[Choices]
) -> Scheme:
    """Rotation by learned angles over the eigenvectors of a graph.

    Positions are `isopos.graph` of edges: the lowest eigenvectors of the Laplacian. Each pair of each head has one frequency
    per eigenvector, drawn from a normal distribution; neighbouring nodes have similar angles. Signs of eigenvectors, and
    rotations among eigenvectors of equal eigenvalues, are arbitrary and change scores: see `isopos.graph`.

    Args:
        axes: Eigenvectors per position.
        learned: Learn the frequencies.
    """
    frequency = normal(seed, heads, at_least("axes", axes), even(head_dim) // 2) / axes**0.5
    return compose(encodings.Rotary(frequency, learned=learned), heads, choices)


def _assigned(shares: Sequence[int], interleaved: bool) -> list[int]:
    """The axis of each pair: axis by axis, or in rotation."""
    if not interleaved:
        return [n for n, share in enumerate(shares) for _ in range(share)]
    count = sum(shares)
    for n, share in enumerate(shares[1:], 1):
        if (available := len(range(n, count, len(shares)))) < share:
            raise ValueError(
                f"sections: expected at most {available} pairs for axis {n}, since {len(shares)} axes alternate over "
                f"{count} pairs, got {_text(shares)}"
            )
    return [pair % len(shares) if pair // len(shares) < shares[pair % len(shares)] else 0 for pair in range(count)]


def _slow_time(shares: Sequence[int], interleaved: bool) -> list[int]:
    """The axis of each pair: height and width in turn, then time."""
    if interleaved:
        raise ValueError(
            "interleaved: expected False where time has the slowest pairs, got True; height and width alternate"
        )
    if len(shares) != 3 or not 0 <= shares[1] - shares[2] <= 1:
        raise ValueError(
            "sections: expected pairs of time, height and width, as many of width as of height or one less, where time has "
            f"the slowest pairs, got {_text(shares)}"
        )
    return [1 + pair % 2 for pair in range(shares[1] + shares[2])] + [0] * shares[0]


def _axial(count: int, axes: int, sections: Sections, base: float) -> Tensor:
    """Frequencies ``[c f]`` of f pairs; each is zero on all axes except one."""
    return axial(sections_of(count, axes, sections), base)


def sections_of(count: int, axes: int, sections: Sections) -> list[int]:
    """Numbers of pairs of each axis, at least 1, with sum `count`: those given, or equal shares."""
    shares = [width // 2 for width in split_widths(2 * count, axes, 2)] if sections is None else _shares(sections, count)
    if len(shares) != axes:
        raise ValueError(f"sections: expected a number of pairs for each of {axes} axes, got {_text(sections)}")
    return shares


def _shares(sections: str | Sequence[int], count: int, least: int = 1) -> list[int]:
    """Numbers of pairs per axis, at least `least` each, with sum `count`; ValueError otherwise."""
    expected = f"numbers of pairs from {least} on that add up to {count}, half of the head size"
    if isinstance(sections, str):
        shares = [part.whole_number(expected) for part in read("sections", sections).split("+")]
    else:
        try:
            shares = [index(share) for share in sections]
        except TypeError:
            shares = []
    if not shares or min(shares) < least or sum(shares) != count:
        raise ValueError(f"sections: expected {expected}, got {_text(sections)}")
    return shares


def _text(sections: Sections) -> str:
    return sections if isinstance(sections, str) else f"{sections}"


def _directions(count: int, axes: int) -> Tensor:
    """Unit vectors spread evenly over all directions: float64 ``[count axes]``."""
    number = torch.arange(count, device="cpu", dtype=torch.float64)
    if axes == 2:
        angle = number * (math.pi * (5**0.5 - 1) / 2)
        return torch.stack((angle.cos(), angle.sin()), -1)
    phi = 2.0
    for _ in range(60):  # a contraction
        phi = (1 + phi) ** (1 / (axes + 1))
    steps = phi ** -torch.arange(1, axes + 1, device="cpu", dtype=torch.float64)
    normals = torch.erfinv(2 * ((number[:, None] + 1) * steps % 1) - 1)
    return normals / normals.norm(dim=-1, keepdim=True)
