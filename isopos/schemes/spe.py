"""Stochastic Positional Encoding (Liutkus et al. 2021): relative in expectation."""

from typing import Unpack

from isopos import couplings
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    citation="Liutkus et al. 2021, sineSPE",
    equation="E = sum_d q_d k_d sum_k l_dk^2 cos(w_dk t - phi_dk)",
    cost="t d r (2 k + 1) for r realizations",
    extends="grids",
    learns="frequencies w, phases phi, gains l",
)
def spe_sine(
    head_dim: int,
    heads: int,
    *,
    sines: int = 5,
    realizations: int | None = None,
    gated: bool = False,
    noise_per_head: bool = False,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Random features with sinusoidal covariance; relative in expectation.

    The encoding acts ahead of the feature map.

    Args:
        sines: Number of sinusoids per feature.
    """
    coupling = couplings.SineSPE(
        head_dim, heads, sines=sines, realizations=realizations, gated=gated, noise_per_head=noise_per_head, seed=seed
    )
    return compose(coupling, heads, choices, inside=choices.get("attention") != "softmax")


@register(
    citation="Liutkus et al. 2021, convSPE",
    equation="E = sum_d q_d k_d (f_d * g_d)(t)",
    cost="t d r n for n steps of the filters",
    extends="grids",
    learns="the filters f and g",
)
def spe_conv(
    head_dim: int,
    heads: int,
    *,
    reach: int = 8,
    realizations: int | None = None,
    gated: bool = False,
    noise_per_head: bool = False,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Random features of filtered noise; relative in expectation.

    The encoding acts ahead of the feature map.

    Args:
        reach: Length of the filters in steps; larger offsets are not distinguished.
    """
    coupling = couplings.ConvSPE(
        head_dim, heads, reach=reach, realizations=realizations, gated=gated, noise_per_head=noise_per_head, seed=seed
    )
    return compose(coupling, heads, choices, inside=choices.get("attention") != "softmax")
