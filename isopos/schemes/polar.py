"""Polar coordinates: features are magnitudes, positions are phases."""

from typing import Unpack

from isopos import couplings
from isopos.encodings import rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    citation="Gopalakrishnan et al. 2025, PoPE, arXiv 2509.10534",
    equation="sum m(q_i) m(k_i) cos(w_i t + phase_i), m = softplus",
    cost="t d, twice the features",
    extends="grids",
    learns="phases",
)
def pope(head_dim: int, heads: int, *, base: float = 10000.0, **choices: Unpack[Choices]) -> Scheme:
    """Feature magnitudes at phases of positions; learned offsets of keys.

    Magnitudes are softplus(q_i) and phases w_i x with w_i = base^(-i/d); content changes no phase. The paper has softmax
    attention only; in linear attention the feature map replaces softplus.
    """
    magnitudes = choices.get("attention") == "softmax"
    return compose(couplings.Polar(rope_frequencies(head_dim, base), heads, magnitudes=magnitudes), heads, choices)
