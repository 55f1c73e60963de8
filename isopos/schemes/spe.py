"""Stochastic Positional Encoding (Liutkus et al. 2021): relative in expectation."""

from typing import Unpack

from isopos import couplings
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    summary="random features of sinusoidal covariances, relative in expectation",
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
    """Stochastic encoding by sines, ahead of the feature map: relative in expectation (Liutkus et al. 2021, sineSPE).

    Args:
        sines: Of each feature.
    """
    coupling = couplings.SineSPE(
        head_dim, heads, sines=sines, realizations=realizations, gated=gated, noise_per_head=noise_per_head, seed=seed
    )
    return compose(coupling, heads, choices, inside=choices.get("attention") != "softmax")


@register(
    summary="random features of filtered noise, relative in expectation",
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
    """Stochastic encoding by filtered noise ahead of the feature map, relative in expectation (Liutkus 2021, convSPE).

    Args:
        reach: Steps of the filters; offsets beyond it are not told apart.
    """
    coupling = couplings.ConvSPE(
        head_dim, heads, reach=reach, realizations=realizations, gated=gated, noise_per_head=noise_per_head, seed=seed
    )
    return compose(coupling, heads, choices, inside=choices.get("attention") != "softmax")
