"""Agents on a plane, by position and heading: directional rotary embedding."""

import math
from typing import Unpack

import torch

from isopos import encodings
from isopos.positions import Ring
from isopos.scheme import Choices, Scheme
from isopos.schemes.axes import Sections, sections_of
from isopos.schemes.registry import axial, compose, even, register


@register(
    citation="Zhao et al. 2025, DRoPE, arXiv 2503.15029",
    equation="<q_1, R(w t1) k_1> + <q_2, R(w t2) k_2> + <q_3, R(a) k_3>, a the angle between headings",
    cost="t d",
    extends="any product, by direct sum",
)
def drope(
    head_dim: int,
    heads: int | None = None,
    *,
    sections: Sections = None,
    base: float = 10000.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of pairs by the coordinates of agents, and by their headings.

    Positions are rows (x, y, heading in degrees), which may be fractional: ``torch.rad2deg`` makes degrees. All pairs of the
    heading turn by the heading itself, so that a whole turn changes nothing, while rope's frequencies would tell 359 degrees
    from -1. Each coordinate has rope on pairs of its own. This is the paper's integration within each head. Scores see the
    differences of x, of y and of headings, each by itself; turning the axes of the plane changes them.

    Args:
        head_dim: d, even, at least 6.
        sections: Pairs of x, y and the heading, with sum d/2: [12, 12, 8], or "12+12+8" as text. Equal shares by default.
        base: Base of the frequencies of coordinates.
    """
    x, y, heading = sections_of(even(head_dim) // 2, 3, sections)
    turn = torch.full((1, 1, heading), 2 * math.pi / 360, device="cpu", dtype=torch.float64)
    frequencies, direction = axial([x, y], base)[None], Ring(360, real=True)
    return compose(
        encodings.DirectSum([encodings.Rotary(frequencies), encodings.Rotary(turn, group=direction)]), heads, choices
    )
