"""Polar coordinates: features are magnitudes, positions are phases."""

from typing import Unpack

from isopos import couplings
from isopos.encodings import rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    summary="magnitudes at phases of positions, keys ahead by learned ones",
    citation="Gopalakrishnan et al. 2025, PoPE, arXiv 2509.10534",
    equation="sum m(q_i) m(k_i) cos(w_i t + phase_i), m = softplus",
    cost="t d, twice the features",
    extends="grids",
    learns="phases",
)
def pope(head_dim: int, heads: int, *, base: float = 10000.0, **choices: Unpack[Choices]) -> Scheme:
    """PoPE: magnitudes softplus(q_i) at phases w_i x, w_i = base^(-i/d) (Gopalakrishnan et al. 2025).

    What a token is and where it is do not mix: content changes no phase. In linear attention, which the paper does not have,
    the feature map takes the place of softplus.
    """
    magnitudes = choices.get("attention") == "softmax"
    return compose(couplings.Polar(rope_frequencies(head_dim, base), heads, magnitudes=magnitudes), heads, choices)
