"""Rotations by learned generators: STRING, ComRoPE and GRAPE, which commute, and LieRE, which is approximately relative."""

from typing import Literal, Unpack

import torch
from torch import Tensor

from isopos import bases, couplings, encodings, generators
from isopos.catalog import at_least, expect
from isopos.encodings import Encoding, rope_frequencies
from isopos.exact import normal
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import axial, compose, even, register, split_widths


@register(
    citation="Schenck et al. 2025, STRING, Eq. 9-11",
    equation="<P q, R(<w, t>) P k>",
    cost="d^3 once, t d^2",
    extends="grids of any number of axes",
    learns="the basis P and frequencies w; circulant: w",
)
def string(
    head_dim: int,
    heads: int,
    *,
    variant: Literal["cayley", "circulant"] = "cayley",
    axes: int = 1,
    base: float = 10000.0,
    learned: bool = True,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation by learned angles over all axes, in a learned basis.

    Every family of commuting skew generators has this form (Theorem 3.4). It starts as rope on each axis, on separate pairs,
    in the basis I or the Fourier basis; every pair then learns one frequency per axis. Coordinates may be real numbers.

    Args:
        variant: "cayley": P = (I - S) (I + S)^-1 with a learned skew S. "circulant": generators C - C^T with learned
            circulant C; the basis is the Fourier transform, and two features pass unchanged.
        learned: Learn basis and frequencies; otherwise both keep their initial values.
    """
    expect("variant", variant, ("cayley", "circulant"))
    ends = 0 if variant == "cayley" else 2
    if even(head_dim) - ends < 2 * at_least("axes", axes):
        raise ValueError(f"head size: expected at least {2 * axes + ends} features for {axes} axes, got {head_dim}")
    shares = [width // 2 for width in split_widths(head_dim - ends, axes, 2)]
    frequency = axial(shares, base).expand(heads, -1, -1)
    if variant == "circulant":  # columns whose transform is -i w / 2, so that C is skew and C - C^T has the angles w
        spectrum = torch.nn.functional.pad(frequency, (1, 1)) * -0.5j
        return compose(generators.Circulant(torch.fft.irfft(spectrum), learned=learned), heads, choices)
    basis = bases.Cayley(torch.zeros(heads, head_dim, head_dim, device="cpu", dtype=torch.float64), learned=learned)
    encoding = encodings.InBasis(encodings.Rotary(frequency, learned=learned), basis)
    return compose(encoding, heads, choices)


@register(
    citation="Yu et al. 2025, ComRoPE",
    equation="sum over blocks of <q_n, exp(<w_n, t> A_n) k_n>",
    cost="d b^2 once, t d^2 for blocks of b",
    extends="grids of any number of axes",
    learns="skew blocks A and directions w; axial: A",
)
def comrope(
    head_dim: int,
    heads: int,
    *,
    variant: Literal["linear", "axial"] = "linear",
    axes: int = 2,
    block: int | None = None,
    base: float = 10000.0,
    learned: bool = True,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Exponentials of learned skew blocks, which commute over axes.

    Blocks start with rope's frequencies. The paper also adds noise to positions in training; that belongs to the data.

    Args:
        head_dim: d, even, a multiple of `block`; with "axial" of axes * block.
        variant: "linear" (linearly dependent): in each block, the matrices of all axes are learned multiples of one matrix.
            "axial" (axial partition): each block belongs to one axis.
        block: Features per block, even. By default 4 where this divides the features, else 2, which is rope with learned
            frequencies over axes.
        learned: Learn matrices and multiples; otherwise both keep their initial values.
    """
    expect("variant", variant, ("linear", "axial"))
    axes = at_least("axes", axes)
    owners = axes if variant == "axial" else 1
    size = block if block is not None else 2 if even(head_dim) % (4 * owners) else 4
    if size < 2 or size % 2 or head_dim % (size * owners):
        raise ValueError(f"block: expected an even number that divides {head_dim} features on {owners} axes, got {size}")
    count = head_dim // size
    if variant == "linear":
        angle, direction = rope_frequencies(head_dim // 2, base), normal(seed, heads, axes, count)
    else:
        angle = rope_frequencies(head_dim // 2 // axes, base).repeat(axes)
        direction = torch.eye(axes, device="cpu", dtype=torch.float64).repeat_interleave(count // axes, 1)[None]
    lower = torch.stack((angle, torch.zeros_like(angle)), -1).view(count, size)[:, :-1]
    start = torch.diag_embed(lower, -1).expand(heads, -1, -1, -1)
    encoding = generators.Commuting(start, direction, learned=learned, learned_direction=learned and variant == "linear")
    return compose(encoding, heads, choices)


@register(
    citation="Zhang et al. 2025, GRAPE, arXiv 2512.07805",
    equation="<q, exp(t (a b^T - b a^T)) k>",
    cost="t d",
    extends="grids, by direct sum",
    learns="vectors a and b",
)
def grape(
    head_dim: int,
    heads: int,
    *,
    axes: int = 1,
    planes: int = 1,
    base: float = 10000.0,
    learned: bool = True,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of learned planes, one or more per head and axis.

    This is multiplicative GRAPE: exp(t L) of generators L = a b^T - b a^T of rank two, in closed form. Several planes of a
    head act on separate features and so commute; with d/2 planes it is rope with learned frequencies. Initial speeds are
    geometric over all planes of all heads of an axis, from 1 to 1 / base.

    Args:
        head_dim: d, at least 2 for each plane.
        axes: Number of axes of positions; each has separate features.
        planes: Planes per axis and head.
        learned: Learn planes and speeds; otherwise both keep their initial values.
    """
    at_least("planes", planes)
    widths = split_widths(head_dim, at_least("axes", axes) * planes, 2)
    widths[0] += head_dim - sum(widths)  # an odd feature: a plane rotates in any number of features
    speed = rope_frequencies(planes * heads, base).view(planes, heads)
    parts: list[Encoding] = []
    for axis in range(axes):
        rotations = [
            _plane(width, turn, learned, seed + axis * planes + n)
            for n, (width, turn) in enumerate(zip(widths[axis * planes :][:planes], speed, strict=True))
        ]
        parts.append(rotations[0] if planes == 1 else encodings.DirectSum(rotations, shared=True))
    return compose(parts[0] if axes == 1 else encodings.DirectSum(parts), heads, choices)


@register(
    citation="Ostmeier et al. 2024, LieRE, arXiv 2406.10322",
    equation="<exp(sum x_c A_c) q, exp(sum y_c A_c) k>",
    cost="t d^3",
    extends="grids of any number of axes",
    learns="skew matrices A",
)
def liere(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    base: float = 10000.0,
    learned: bool = True,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Exponentials of learned generators that do not commute; approximate.

    Exponents are linear in the coordinates. Scores are relative only along lines through the origin, because generators do
    not commute; `isopos check liere` measures the error. Each head and axis starts with rope's frequencies in random planes.

    Args:
        learned: Learn the matrices; otherwise they keep their initial values.
    """
    angle = rope_frequencies(even(head_dim) // 2, base)
    lower = torch.stack((angle, torch.zeros_like(angle)), -1).flatten()[:-1]
    planes = torch.linalg.qr(normal(seed, heads, at_least("axes", axes), head_dim, head_dim).double()).Q
    return compose(couplings.Lie(planes.mT @ torch.diag(lower, -1) @ planes, learned=learned), heads, choices)


def _plane(width: int, speed: Tensor, learned: bool, seed: int) -> Encoding:
    """A rotation in a random plane per head, by `speed` ``[h]`` radians per step."""
    a, b = torch.linalg.qr(normal(seed, len(speed), width, 2).double()).Q.unbind(-1)
    root = speed.sqrt()[:, None]
    return generators.RankTwo(root * a, root * b, learned=learned)
