"""The two schemes of Translational Equivariance in Kernelizable Attention (Horn et al. 2021)."""

from typing import Unpack

from isopos import biases, couplings, encodings
from isopos.catalog import at_least
from isopos.encodings import rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, register


@register(
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
    """Sinusoids in additional channels, with a constrained projection.

    The constraint makes the added term relative. The term may be negative, and so may "encoded" denominators, which contain
    it.

    Args:
        axes: Number of axes of positions; each has separate sinusoids.
        sinusoids: Number per axis; their frequencies are base^(-i/n), initially where they are learned.
        outside: Number of leading tokens without a position, such as class tokens, for which the term is zero.
        inside: Put the channels ahead of the feature map, as the paper does with random features. With
            ``feature_map="favor"`` the result is relative in expectation only.
    """
    frequency = rope_frequencies(at_least("sinusoids", sinusoids), base).expand(at_least("axes", axes), -1)
    coupling = couplings.Constrained(head_dim, heads, frequency, learned=learned, outside=outside)
    return compose(coupling, heads, choices, {"denominator": "encoded"}, inside=inside)


@register(
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
    """Learned vectors of clipped offsets, added to keys, in linear time.

    With softmax attention this is Shaw's scheme without values, with separate vectors per head and any number of axes.
    Linear attention adds weights of positions alone to weights of content; initially they are half of the sum, mostly at far
    keys. The authors' code does not add them: half of its heads use content alone, the other half positions alone.

    Args:
        axes: Number of axes of positions; offsets are clipped on each axis.
        reach: R: (2 R + 1)^axes vectors; by default 8 on a line and 2 on a grid.
        outside: Number of leading tokens without a position, such as class tokens; they have two separate vectors.
        mean: Mean of the initial vectors. With -4, linear attention with 1 + elu starts nearly position-free.
    """
    reach = (8 if at_least("axes", axes) == 1 else 2) if reach is None else reach
    bias = biases.ClippedKeys(heads, head_dim, reach=reach, axes=axes, outside=outside, mean=mean, seed=seed)
    return compose(encodings.Identity(head_dim, bias.group), heads, choices, bias=bias)
