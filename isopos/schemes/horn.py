"""The two schemes of Translational Equivariance in Kernelizable Attention (Horn et al. 2021)."""

from typing import Unpack

from isopos import biases, couplings, encodings
from isopos.catalog import at_least
from isopos.encodings import rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
    summary="sinusoids in further channels with a constrained projection",
    citation="Horn et al. 2021, scheme 1",
    equation="<q, k> + sum a_m cos w_m t - b_m sin w_m t",
    cost="t m further features",
    extends="grids",
    content=False,
    learns="a and b",
)
def horn_constrained(
    head_dim: int,
    heads: int,
    *,
    axes: int = 1,
    sinusoids: int = 8,
    learned: bool = False,
    outside: int = 0,
    inside: bool = False,
    base: float = 10000.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Horn's scheme 1: sinusoids in further channels, their projection constrained to a relative term (Horn et al. 2021).

    The term may be negative, and so may "encoded" denominators, which contain it.

    Args:
        axes: Of the positions, each with sinusoids of its own.
        sinusoids: Of each axis, with frequencies base^(-i/n), at first where they are learned.
        outside: Number of first tokens outside the grid, such as class tokens: the term does not see them.
        inside: Put the channels ahead of the feature map, as with the random features of the paper: with
            ``feature_map="favor"`` the result is relative in expectation only.
    """
    frequency = rope_frequencies(at_least("sinusoids", sinusoids), base).expand(at_least("axes", axes), -1)
    coupling = couplings.Constrained(head_dim, heads, frequency, learned=learned, outside=outside)
    return compose(coupling, heads, choices, {"denominator": "encoded"}, inside=inside)


@register(
    summary="learned vectors of clipped offsets beside keys, in linear time",
    citation="Horn et al. 2021, scheme 2",
    equation="<q, k + a_clip(t)>",
    cost="t n d",
    extends="grids, with n exponential in axes",
    learns="the vectors a",
)
def horn_clipped(
    head_dim: int,
    heads: int,
    *,
    axes: int = 1,
    reach: int | None = None,
    outside: int = 0,
    mean: float = 0.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Horn's scheme 2: learned vectors of clipped offsets beside keys, in linear time (Horn et al. 2021).

    With softmax attention it is Shaw's scheme without values, each head its own vectors, on any number of axes. Linear
    attention adds weights of positions, which see no content, to those of content: at first they are half of all, most of
    it far away. The authors' code adds them in no head: half of the heads see content alone, the others positions alone.

    Args:
        axes: Of the positions; offsets are clipped on each.
        reach: R: (2 R + 1)^axes vectors; 8 on a line and 2 on a grid by default.
        outside: Number of first tokens outside the grid, such as class tokens, which have vectors of their own.
        mean: Of the numbers in initial vectors; -4 lets linear attention with 1 + elu begin as without positions.
    """
    reach = (8 if at_least("axes", axes) == 1 else 2) if reach is None else reach
    bias = biases.ClippedKeys(heads, head_dim, reach=reach, axes=axes, outside=outside, mean=mean, seed=seed)
    return compose(encodings.Identity(head_dim, bias.group), heads, choices, bias=bias)
