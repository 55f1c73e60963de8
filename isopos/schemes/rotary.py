"""Rotations of feature pairs by fixed frequencies: RoPE, p-RoPE, RetNet, xPos, Jordan blocks, and cosFormer."""

import math
from typing import Literal, Unpack

import torch

from isopos import encodings
from isopos.catalog import at_least, expect
from isopos.contragredient import ContragredientSum, Jordan
from isopos.encodings import Encoding, rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, compose, even, laid_out, register


@register(
    citation="Su et al. 2021, RoFormer, Eq. 14-16",
    equation="<q, R(w t) k>",
    cost="t d",
    extends="grids, rings, by direct sum",
)
def rope(
    head_dim: int,
    heads: int | None = None,
    *,
    base: float = 10000.0,
    learned: bool = False,
    rotary_dim: int | None = None,
    layout: PairLayout = "interleaved",
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotary position embedding: rotation of feature pairs.

    Pair i rotates by base^(-2i/d) per step. In linear attention the default denominator is Eq. 19's.

    Args:
        heads: h; by default any number of heads, which share learned frequencies.
        rotary_dim: Features that rotate, even; the rest pass unchanged (partial rotary). All by default.
        layout: Input layout of pairs; the rotated features are interleaved, pairs (2i, 2i+1), in both. "interleaved" reads
            pairs (2i, 2i+1), as in the paper; "half" reads pairs (i, i + rotary_dim / 2), as in Llama's checkpoints. With
            "half" scores equal Llama's, but keys that Llama's code rotated and cached do not match our queries, and streams
            of one layout are refused by the other. `isopos.nn.convert_layout` converts weights.
    """
    width = head_dim if rotary_dim is None else rotary_dim
    if not 0 < width <= head_dim:
        raise ValueError(f"rotary_dim: expected an even number up to the head size {head_dim}, got {rotary_dim}")
    rotary = laid_out(_rotary(width, heads, base, learned), layout)
    return compose(rotary if width == head_dim else encodings.Partial(rotary, head_dim), heads, choices)


@register(
    citation="Barbero et al. 2024, arXiv 2410.06205, section 6",
    equation="<q, R(w t) k>, w = 0 except for the fastest",
    cost="t d",
    extends="grids, by direct sum",
)
def p_rope(
    head_dim: int,
    heads: int | None = None,
    *,
    p: float = 0.75,
    base: float = 10000.0,
    layout: PairLayout = "interleaved",
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of feature pairs, except the slowest ones.

    The slowest frequencies of rope are set to zero, so that their features carry content alone. Partial rotary
    (``rope(..., rotary_dim=...)``) instead spreads all of rope's frequencies over the same number of pairs.

    Args:
        p: Fraction of pairs that rotate, above 0 and up to 1, which is rope. At least one pair, int(p d / 2), must rotate.
    """
    if not 0 < p <= 1 or (rotated := int(p * even(head_dim) // 2)) < 1:
        raise ValueError(f"p: expected a share up to 1 that rotates at least one of {head_dim // 2} pairs, got {p}")
    frequency = rope_frequencies(head_dim // 2, base)
    frequency[rotated:] = 0
    return compose(laid_out(encodings.Rotary(frequency[None, None]), layout), heads, choices)


@register(
    citation="Sun et al. 2023, RetNet, Eq. 5 and 8",
    equation="<q, R(w t) k> gamma^|t|",
    cost="t d",
    extends="lines",
)
def retnet(
    head_dim: int,
    heads: int,
    *,
    original: bool = False,
    frequencies: Literal["rope", "torchscale"] = "rope",
    base: float = 10000.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotation of feature pairs, and RetNet's decay per head.

    The decay is gamma = 1 - 2^(-5-h). Feature map and denominator have rope's defaults, so that the two schemes differ
    in the decay alone. TransNormerLLM's LRPE-d belongs to this family. RetNet's swish gate is part of its layer, and
    `isopos.models` do not have it; the norm of heads is a layer norm in `Attention` and an RMS norm in the authors' code.

    Args:
        original: RetNet's retention: identity feature map, no denominator, a norm of each head's output.
        frequencies: "rope", base^(-2i/d), or "torchscale", the frequencies of the authors' code, from 1 to 1/base inclusive.
    """
    expect("frequencies", frequencies, ("rope", "torchscale"))
    defaults = {"feature_map": "identity", "denominator": "none"} if original else {}
    if original and choices.get("attention") == "softmax":
        raise ValueError("original: expected linear attention, for which RetNet is defined, got softmax")
    rotary = _rotary(head_dim, heads, base, False)
    if frequencies == "torchscale":
        share = torch.linspace(0, 1, head_dim // 2, device="cpu", dtype=torch.float64)
        rotary = encodings.Rotary((base**-share)[None, None])
    return compose(rotary, heads, choices, {"decay": "retnet"} | defaults)


@register(
    citation="Sun et al. 2022, arXiv 2212.10554, Algorithm 1",
    equation="<q, zeta^(-t / 512) R(w t) k>",
    cost="t d",
    extends="lines",
)
def xpos(
    head_dim: int, heads: int | None = None, *, base: float = 10000.0, length: float = 512.0, **choices: Unpack[Choices]
) -> Scheme:
    """Rotation of feature pairs that shrink with distance; causal.

    Fast pairs shrink more. Scales are powers of the position relative to a fixed zero, so cached keys stay valid; positions
    are limited to about 16,000 at the default length. The scheme retnet has a decay per head without this limit.

    Args:
        length: Number of steps in which pair i shrinks by (2i/d + 0.4) / 1.4.
    """
    frequency = rope_frequencies(even(head_dim) // 2, base)
    if not length > 0:
        raise ValueError(f"length: expected a positive number of steps, got {length}")
    share = torch.arange(len(frequency), device="cpu", dtype=torch.float64) / len(frequency)  # 2 i / d
    growth = -((share + 0.4) / 1.4).log() / length
    return compose(Jordan(growth, frequency), heads, choices, {"denominator": "encoded"})


@register(
    citation="real Jordan forms, which include Sun et al. 2022 and Press et al. 2022",
    equation="<q, exp(t A) k>, A of Jordan blocks: t^n / n! e^((g + i w) t)",
    cost="t d m for blocks of order m",
    extends="grids, by direct sum",
    fits={"length": "reach"},
)
def jordan(
    head_dim: int,
    heads: int,
    *,
    order: int = 2,
    growth: float = 0.0,
    base: float = 10000.0,
    length: float = 1024.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Jordan blocks: rotations multiplied by powers of the offset.

    exp(t A) for real Jordan blocks of one order, one growth rate and rope's frequencies gives every kind of relative score
    on a line. It is exactly relative, but not an isometry. Order 1 is rope, or xpos with one growth rate per pair; order 2
    without a rotation contains ALiBi's term (see `isopos.contragredient.Jordan`). Scores of a block contain powers of the
    offset up to order - 1, in units of `length`; the default decay, RetNet's, outweighs them. For order 2, float32 is exact
    to 2e-6 up to 8 times the length from zero; positions beyond are refused.

    Args:
        order: m, pairs per block; remaining pairs only rotate.
        growth: Growth rate in nats per `length` steps: weights of earlier keys shrink and weights of later keys grow, so it
            needs causal attention. A decay shrinks weights at any length and in both directions.
        length: Unit of the offset in steps; about the length of the longest sequence.
    """
    count, rest = divmod(even(head_dim) // 2, at_least("order", order))
    if not count:
        raise ValueError(f"order: expected at most the {head_dim // 2} pairs of a head, got {order}")
    if not length > 0:
        raise ValueError(f"length: expected a positive number of steps, got {length}")
    frequency = rope_frequencies(count + rest, base)
    rate = torch.full_like(frequency, growth / length)
    encoding = Jordan(rate[:count], frequency[:count], order=order, length=length)
    if rest:
        encoding = ContragredientSum([encoding, Jordan(rate[count:], frequency[count:])], shared=True)
    return compose(encoding, heads, choices, {"decay": "retnet"})


@register(
    citation="cosFormer (2022); LRPE, Eq. 35",
    equation="cos(pi t / 2 M) <q, k>",
    cost="t d, twice the features",
    extends="lines",
    content=False,
    fits={"length": "reach"},
)
def cosformer(head_dim: int, heads: int | None = None, *, length: int = 2048, **choices: Unpack[Choices]) -> Scheme:
    """Weights multiplied by a cosine of the offset; symmetric in the direction.

    Weights are multiplied by cos(pi / 2 * offset / length), with one angle for all features, as in LRPE's unitary type. They
    are positive for offsets below `length`. The feature map is max(x, 0) + 0.001.

    Args:
        length: M, the offset of weight zero: at least the longest sequence.
    """
    angle = torch.full((1, 1, head_dim), math.pi / 2 / at_least("length", length), device="cpu", dtype=torch.float64)
    encoding = encodings.Rotary(angle, lift=True, max_length=length)
    return compose(encoding, heads, choices, {"feature_map": "relu", "denominator": "encoded"})


def _rotary(width: int, heads: int | None, base: float, learned: bool) -> Encoding:
    frequency = rope_frequencies(even(width) // 2, base)
    return encodings.Rotary(frequency.expand((heads or 1) if learned else 1, 1, -1), learned=learned)
