"""Rotations of feature pairs with fixed frequencies: RoPE, p-RoPE, RetNet, xPos, Jordan blocks, cosFormer's single angle."""

import math
from typing import Literal, Unpack

import torch

from isopos import encodings
from isopos.catalog import at_least, expect
from isopos.contragredient import Beside, Jordan
from isopos.encodings import Encoding, rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, compose, even, laid_out, register


@register(
    summary="rotation of feature pairs",
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
    """Rotary position embedding: pairs of features rotate by base^(-2i/d) a step (RoFormer, Eq. 14-16; linear: Eq. 19).

    Args:
        heads: h; without it any number of heads is served alike, learned frequencies shared.
        rotary_dim: Features that rotate, even; the others pass unchanged (partial rotary). All by default.
        layout: Where pairs come from; rotated features come out interleaved, as pairs (2i, 2i+1), in either layout.
            "interleaved" takes them from there, as in the paper, "half" from (i, i + rotary_dim / 2), as in Llama's
            checkpoints: scores are Llama's, but keys that Llama's code rotated and cached, in half order, fit no query of
            ours. A stream of one layout is refused by the other. `isopos.nn.convert_layout` converts weights.
    """
    width = head_dim if rotary_dim is None else rotary_dim
    if not 0 < width <= head_dim:
        raise ValueError(f"rotary_dim: expected an even number up to the head size {head_dim}, got {rotary_dim}")
    rotary = laid_out(_rotary(width, heads, base, learned), layout)
    return compose(rotary if width == head_dim else encodings.Partial(rotary, head_dim), heads, choices)


@register(
    summary="rotation of feature pairs, none of the slowest ones",
    citation="Barbero et al. 2024, arXiv 2410.06205, section 6",
    equation="<q, R(w t) k>, w = 0 but for the fastest",
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
    """p-RoPE: the slowest frequencies of rope are zero, so that their features carry content alone (Barbero et al. 2024).

    Partial rotary (``rope(..., rotary_dim=...)``) rotates as many pairs by frequencies down to the slowest instead.

    Args:
        p: Share of pairs that rotate, above 0 and up to 1, which is rope; their number, int(p d / 2), is at least 1.
    """
    if not 0 < p <= 1 or (kept := int(p * even(head_dim) // 2)) < 1:
        raise ValueError(f"p: expected a share up to 1 that rotates at least one of {head_dim // 2} pairs, got {p}")
    frequency = rope_frequencies(head_dim // 2, base)
    frequency[kept:] = 0
    return compose(laid_out(encodings.Rotary(frequency[None, None]), layout), heads, choices)


@register(
    summary="RetNet's rotation of feature pairs and decay a head",
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
    """RetNet's rotary with a decay a head, gamma = 1 - 2^(-5-h) (RetNet, Sun et al. 2023, Eq. 5 and 8).

    By default on the feature map and denominator of its neighbours, so that only the decay differs from rope.
    TransNormerLLM's LRPE-d is of this family. RetNet's swish gate belongs to the layer, not to a scheme, and `isopos.models`
    have none; so does the norm of heads, a layer norm in `Attention` and an RMS norm in the authors' code.

    Args:
        original: RetNet's retention: identity feature map, no denominator, a norm of each head's output.
        frequencies: "rope", base^(-2i/d), or "torchscale", those of the authors' code, from 1 to 1/base with both ends.
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
    summary="rotation of feature pairs that shrink with distance; causal",
    citation="Sun et al. 2022, arXiv 2212.10554, Algorithm 1",
    equation="<q, zeta^(-t / 512) R(w t) k>",
    cost="t d",
    extends="lines",
)
def xpos(
    head_dim: int, heads: int | None = None, *, base: float = 10000.0, length: float = 512.0, **choices: Unpack[Choices]
) -> Scheme:
    """xPos: rotations whose pairs shrink with distance, fast ones more (Sun et al. 2022, Algorithm 1). Causal.

    A scale is a power of the position about a fixed zero, so cached keys stay valid; positions are limited to some 16,000
    at the default length. RetNet's decay a head, without a limit, is the scheme retnet.

    Args:
        length: Steps in which pair i shrinks by (2i/d + 0.4) / 1.4.
    """
    frequency = rope_frequencies(even(head_dim) // 2, base)
    if not length > 0:
        raise ValueError(f"length: expected a positive number of steps, got {length}")
    share = torch.arange(len(frequency), device="cpu", dtype=torch.float64) / len(frequency)  # 2 i / d
    growth = -((share + 0.4) / 1.4).log() / length
    return compose(Jordan(growth, frequency), heads, choices, {"denominator": "encoded"})


@register(
    summary="Jordan blocks: rotations with powers of the offset",
    citation="real Jordan forms, which hold Sun et al. 2022 and Press et al. 2022",
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
    """exp(t A) of real Jordan blocks, of one order, growth and rope's frequencies: every kind of relative score of a line.

    It is relative exactly, and no isometry: rope is order 1, xpos order 1 with a growth of each pair, ALiBi's term order 2
    without a rotation (see `isopos.contragredient.Jordan`). Features of a block see powers of the offset up to order - 1, in
    units of `length`, which RetNet's decay a head outgrows by default. Float32 is exact to 2e-6 up to 8 times the length
    from zero, for order 2; positions beyond are refused.

    Args:
        order: m, pairs of a block; those that are left over only turn.
        growth: Nats in `length` steps by which weights of earlier keys shrink, and those of later ones grow: for causal
            attention. A decay does the first at any length, and either way.
        length: Steps in which the offset counts one: of the longest sequence, about.
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
        encoding = Beside([encoding, Jordan(rate[count:], frequency[count:])], shared=True)
    return compose(encoding, heads, choices, {"decay": "retnet"})


@register(
    summary="weights times a cosine of the offset, direction-blind",
    citation="cosFormer (2022); LRPE, Eq. 35",
    equation="cos(pi t / 2 M) <q, k>",
    cost="t d, twice the features",
    extends="lines",
    content=False,
    fits={"length": "reach"},
)
def cosformer(head_dim: int, heads: int | None = None, *, length: int = 2048, **choices: Unpack[Choices]) -> Scheme:
    """cosFormer: ReLU features, weights times cos(pi / 2 * offset / length) (Qin et al. 2022; LRPE, Eq. 35).

    One angle for all features, as LRPE's unitary type: direction-blind. Weights are positive for offsets below `length`;
    features here are max(x, 0) + 0.001.

    Args:
        length: M, the offset whose weight is zero: at least the longest sequence.
    """
    angle = torch.full((1, 1, head_dim), math.pi / 2 / at_least("length", length), device="cpu", dtype=torch.float64)
    encoding = encodings.Rotary(angle, lift=True, max_length=length)
    return compose(encoding, heads, choices, {"feature_map": "relu", "denominator": "encoded"})


def _rotary(width: int, heads: int | None, base: float, learned: bool) -> Encoding:
    frequency = rope_frequencies(even(width) // 2, base)
    return encodings.Rotary(frequency.expand((heads or 1) if learned else 1, 1, -1), learned=learned)
