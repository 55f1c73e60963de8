"""Clocks: rings for the day and the week, and a line for absolute time."""

import math
from typing import Unpack

import torch

from isopos import encodings
from isopos.encodings import Encoding, rope_frequencies
from isopos.positions import Ring
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, even, register, split_widths


@register(
    citation="composed of RoFormer, Eq. 15, and APE, sections 3.4.2-3",
    equation="<q_1, R(2 pi m t_1 / 24) k_1> + <q_2, R(2 pi m t_2 / 7) k_2> + <q_3, R(w t_3) k_3>",
    cost="t d",
    extends="any product, by direct sum",
)
def clock(head_dim: int, heads: int | None = None, *, base: float = 10000.0, **choices: Unpack[Choices]) -> Scheme:
    """Whole turns per day and per week, and rope of absolute time.

    Positions are rows (hours modulo 24, days modulo 7, hours), which may be fractional; `isopos.positions.timestamps` reads
    them. Pair m of a ring makes m turns per period, so it is the same one day or one week later. The line, which is rope,
    distinguishes such times.

    Args:
        head_dim: d, even, at least 6; divided among the three parts.
        base: Base of the frequencies of absolute time, in steps of one hour.
    """
    day, week, line = (width // 2 for width in split_widths(even(head_dim), 3, 2))
    parts: list[Encoding] = [_turns(day, 24), _turns(week, 7), encodings.Rotary(rope_frequencies(line, base)[None, None])]
    return compose(encodings.DirectSum(parts), heads, choices)


def _turns(count: int, period: int) -> Encoding:
    """A rotation of `count` pairs by 1, 2, ... turns per period."""
    whole = torch.arange(1, count + 1, device="cpu", dtype=torch.float64)
    return encodings.Rotary((2 * math.pi / period * whole)[None, None], group=Ring(period, real=True))
