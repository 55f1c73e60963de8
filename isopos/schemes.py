"""Presets: named choices of encoding, decay, feature map and denominator, one function each, in `REGISTRY`.

Every function takes ``(head_dim, heads, **options)``. Besides its own options each takes those of `Choices`, so that the
encoding, the decay, the denominator, the feature map and the kind of attention stay independent of one another.
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from isopos import bases, biases, couplings, encodings
from isopos.catalog import CATALOG
from isopos.embeddings import Learned, Sinusoidal, TreeStack
from isopos.encodings import Coupling, Encoding, rope_frequencies
from isopos.exact import normal
from isopos.positions import Ring
from isopos.scheme import Choices, Scheme, expect

__all__ = ["REGISTRY", "Choices", "Scheme", "build"]

Basis = Literal["identity", "householder", "odd-even", "fourier"]
Theta = Literal["a", "b", "c"]
Initial = Literal["rope", "identity"]


def _scheme(
    encoding: Coupling, heads: int | None, choices: Choices, defaults: Mapping[str, str] | None = None, **parts: Any
) -> Scheme:
    """A scheme of these parts with a preset's defaults, where they have a meaning and the user has not chosen."""
    defaults = defaults or {}
    if heads is None and choices.get("decay", "none") != "none":
        raise ValueError("heads: expected their number beside a decay, whose rate is each head's own, got none")
    heads = 1 if heads is None else heads
    if {**defaults, **choices}.get("attention") == "softmax":
        defaults = {name: value for name, value in defaults.items() if name in ("attention", "decay")}
    return Scheme(encoding, heads, **parts, **{**defaults, **choices})


def none(head_dim: int, heads: int | None = None, **choices: Unpack[Choices]) -> Scheme:
    """No position at all: with `causal`, order is seen only through what a query may not see."""
    return _scheme(encodings.Identity(_size(head_dim, heads)), heads, choices)


def sinusoidal(
    head_dim: int, heads: int, *, model_dim: int | None = None, scale: float = 1.0, **choices: Unpack[Choices]
) -> Scheme:
    """Sines and cosines added to the token embeddings (Vaswani et al. 2017, section 3.5).

    Args:
        head_dim: d.
        heads: h.
        model_dim: Width of the token embeddings; head_dim * heads by default.
        scale: Amplitude; 1 beside token embeddings of unit variance, as in the paper, and less beside smaller ones.
        choices: See `Choices`.
    """
    embedding = Sinusoidal(_size(head_dim, heads) * heads if model_dim is None else model_dim, scale=scale)
    return _scheme(encodings.Identity(head_dim), heads, choices, embedding=embedding)


def learned(
    head_dim: int,
    heads: int,
    *,
    length: int = 2048,
    model_dim: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """One learned vector a position, added to the token embeddings (Gehring et al. 2017).

    Args:
        head_dim: d.
        heads: h.
        length: Number of positions; others raise an error.
        model_dim: Width of the token embeddings; head_dim * heads by default.
        seed: Of the initial vectors.
        choices: See `Choices`.
    """
    embedding = Learned(length, _size(head_dim, heads) * heads if model_dim is None else model_dim, seed=seed)
    return _scheme(encodings.Identity(head_dim), heads, choices, embedding=embedding)


def rope(
    head_dim: int,
    heads: int | None = None,
    *,
    base: float = 10000.0,
    learned: bool = False,
    rotary_dim: int | None = None,
    layout: Literal["interleaved", "half"] = "interleaved",
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotary position embedding: pairs of features turn by base^(-2i/d) a step (RoFormer, Eq. 14-16; linear: Eq. 19).

    Args:
        head_dim: d, even.
        heads: h; without it any number of heads is served alike, learned frequencies shared.
        base: Of the geometric frequencies.
        learned: Learn the frequencies, each head its own.
        rotary_dim: Features that turn, even; the others pass unchanged (partial rotary). All by default.
        layout: Which features are a pair: "interleaved" (2i, 2i+1) as in the paper, or "half" (i, i + rotary_dim / 2) as in
            Llama's checkpoints: scores are Llama's, the turned features come out interleaved.
            `isopos.attention.convert_layout` converts weights.
        choices: See `Choices`.
    """
    expect("layout", layout, ("interleaved", "half"))
    width = _size(head_dim, heads) if rotary_dim is None else rotary_dim
    if not 0 < width <= head_dim:
        raise ValueError(f"rotary_dim: expected an even number up to the head size {head_dim}, got {rotary_dim}")
    rotary = _rotary(width, heads, base, learned)
    rotary = rotary if layout == "interleaved" else encodings.InBasis(rotary, bases.OddEven(width))
    return _scheme(rotary if width == head_dim else encodings.Partial(rotary, head_dim), heads, choices)


def retnet(
    head_dim: int, heads: int, *, original: bool = False, base: float = 10000.0, **choices: Unpack[Choices]
) -> Scheme:
    """Rotary with per-head decay gamma = 1 - 2^(-5-h) (RetNet, Sun et al. 2023, Eq. 5 and 8).

    By default on the feature map and denominator of its neighbours, so that only the decay differs from rope.
    TransNormerLLM's LRPE-d is of this family.

    Args:
        head_dim: d, even.
        heads: h.
        original: RetNet itself: identity feature map, no denominator, a norm of each head's output.
        base: Of the geometric frequencies.
        choices: See `Choices`.
    """
    defaults = {"feature_map": "identity", "denominator": "none"} if original else {}
    if original and choices.get("attention") == "softmax":
        raise ValueError("original: expected linear attention, for which RetNet is defined, got softmax")
    return _scheme(_rotary(_size(head_dim, heads), heads, base, False), heads, choices, {"decay": "retnet"} | defaults)


def xpos(
    head_dim: int, heads: int | None = None, *, base: float = 10000.0, length: float = 512.0, **choices: Unpack[Choices]
) -> Scheme:
    """xPos: rotations whose pairs shrink with distance, fast ones more (Sun et al. 2022, Algorithm 1). Causal.

    A scale is a power of the position about a fixed zero, so cached keys stay valid; positions are limited to some 16,000
    at the default length. RetNet's decay a head, without a limit, is the scheme retnet.

    Args:
        head_dim: d, even.
        heads: h.
        base: Of the geometric frequencies.
        length: Steps in which pair i shrinks by (2i/d + 0.4) / 1.4.
        choices: See `Choices`.
    """
    frequency = rope_frequencies(_even(_size(head_dim, heads)) // 2, base)
    return _scheme(couplings.XPos(frequency, length=length), heads, choices, {"denominator": "encoded"})


def lrpe_unitary(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    complex: bool = False,
    theta: Theta = "a",
    length: int = 512,
    learned: bool = False,
    learned_basis: bool = False,
    base: float = 10000.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's unitary type: phases e^{i angle x} of complex features in the basis P (LRPE, Eq. 22).

    On real vectors it takes the real part of each score, a sum of cosines: score(i, j) = score(j, i), so that without
    `causal` a model cannot tell left from right. With `complex` the d features are d/2 complex ones, pairs (2i, 2i+1) as in
    rope: queries, keys and denominator are complex, and the output is the real part (Eq. 38); scores are rope's in basis P.

    Args:
        head_dim: d; even if complex.
        heads: h.
        basis: P; "fourier" is the real transform on real vectors and the complex one on complex ones.
        complex: Whether queries and keys are complex.
        theta: Angles of t = 0, 1, ...: "a" base^(-2t/d) (base^(-t/n) for n complex features), "b" pi (t+1) / (2 n length),
            "c" pi / (2 (t+1) length), as in the paper's listing, whose length is that of each input; here it is fixed, so
            that a prefix keeps its outputs.
        length: Reference length of theta "b" and "c".
        learned: Learn the angles, each head its own.
        learned_basis: Learn the normal of the Householder basis.
        base: Of theta "a".
        seed: Of the Householder normal.
        choices: See `Choices`.
    """
    count = _even(_size(head_dim, heads)) // 2 if complex else _size(head_dim, heads)
    angle = rope_frequencies(count, base) if complex else rope_frequencies(count, base).square()
    angle = _thetas(theta, count, length, angle).expand(heads if learned else 1, 1, -1)
    encoding = encodings.Rotary(angle, learned=learned, lift=not complex)
    defaults = {"denominator": "complex"} if complex else {}
    return _scheme(_in_basis(encoding, basis, heads, learned_basis, seed, complex), heads, choices, defaults)


def lrpe_orthogonal(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    identity: int = 0,
    theta: Theta = "a",
    length: int = 512,
    learned: bool = False,
    learned_basis: bool = False,
    base: float = 10000.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's orthogonal type: rotations by angles base^(-2t/d) in the basis P (LRPE, Eq. 23). With P = I it is rope.

    Args:
        head_dim: d; d - identity is even.
        heads: h.
        basis: P.
        identity: q, features of P's image that do not turn: the paper's identity block, "mixed" in its listing.
        theta: Angles of t = 0, 1, ...: "a" base^(-2t/d), "b" pi (t+1) / (d length), "c" pi / (2 (t+1) length), as in the
            paper's listing, whose length is that of each input; here it is fixed, so that a prefix keeps its outputs.
        length: Reference length of theta "b" and "c".
        learned: Learn the angles, each head its own.
        learned_basis: Learn the normal of the Householder basis.
        base: Of theta "a".
        seed: Of the Householder normal.
        choices: See `Choices`.
    """
    if not 0 <= identity < _size(head_dim, heads):
        raise ValueError(f"identity: expected 0 to {head_dim - 1} features that do not turn, got {identity}")
    count = _even(head_dim - identity) // 2
    angle = _thetas(theta, count, length, rope_frequencies(count, base)).expand(heads if learned else 1, 1, -1)
    encoding = encodings.Rotary(angle, learned=learned)
    encoding = encodings.Partial(encoding, head_dim) if identity else encoding
    return _scheme(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def lrpe_permutation(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    learned_basis: bool = False,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's permutation type: powers of a random permutation a head, in the basis P (LRPE, Eq. 24).

    Args:
        head_dim: d.
        heads: h.
        basis: P. With "identity" or "odd-even" scores of positive features stay positive, and so may "encoded" denominators.
        learned_basis: Learn the normal of the Householder basis.
        seed: Of permutations and the Householder normal.
        choices: See `Choices`.
    """
    encoding = encodings.Permutation(_permutations(_size(head_dim, heads), heads, seed))
    return _scheme(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def permuteformer(
    head_dim: int,
    heads: int,
    *,
    width: int = 1,
    matrix: Literal["permutation", "identity", "orthogonal"] = "permutation",
    orders: Literal["random", "long"] = "random",
    length: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """PermuteFormer: powers of a permutation a head, ReLU features, decay r in [0.88, 0.99] (PermuteFormer, Eq. 11).

    The paper has r = 1 in bidirectional models: ``decay="none"``. `scheme.encoding.orders` tells how many positions each
    head tells apart, and `common_order` how many all do.

    Args:
        head_dim: d.
        heads: h.
        width: Features of queries and keys are width * d, by wider projections; 4 in the paper (section 4.1).
        matrix: What takes powers: a permutation, nothing (the ablation without permutation) or a random orthogonal matrix,
            whose "encoded" denominators may be negative.
        orders: Random permutations as in the paper, or ones of large orders, up to 2,042,040 for 64 features.
        length: Longest sequence; a common order below it is warned of.
        seed: Of the permutations.
        choices: See `Choices`.
    """
    expect("matrix", matrix, ("permutation", "identity", "orthogonal"))
    if matrix != "permutation" and (orders, length) != ("random", None):
        name = "orders" if length is None else "length"
        raise ValueError(f"{name}: expected none beside matrix={matrix!r}, which has no orders")
    features = _size(head_dim, heads) * _positive("width", width)
    defaults = {"feature_map": "relu", "denominator": "encoded", "decay": "permuteformer"}
    encoding: Encoding = encodings.Identity(features)
    if matrix == "permutation":
        encoding = encodings.Permutation(_permutations(features, heads, seed, orders), length=length)
    elif matrix == "orthogonal":
        generator = normal(seed, heads, _even(features), features)
        encoding = encodings.Exponential(generator.double(), learned=False)
    return _scheme(encoding, heads, choices, defaults, width=width)


def permuteformer_2d(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    orders: Literal["random", "long"] = "random",
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """PermuteFormer on a grid: a permutation an axis, which act on features of their own and so commute (Eq. 14).

    Args:
        head_dim: d, at least 2 for each axis.
        heads: h.
        axes: Of the grid.
        orders: Random permutations as in the paper, or ones of large orders.
        seed: Of the permutations.
        choices: See `Choices`.
    """
    widths = _split(_size(head_dim, heads), axes, 1)
    own = [_permutations(width, heads, seed + n, orders) for n, width in enumerate(widths)]
    maps = torch.arange(head_dim, device="cpu").expand(heads, axes, -1).clone()
    for n, (axis, first) in enumerate(zip(own, (sum(widths[:n]) for n in range(axes)), strict=True)):
        maps[:, n, first : first + axis.shape[-1]] = axis + first
    defaults = {"feature_map": "relu", "denominator": "encoded"}
    return _scheme(encodings.Permutation(maps), heads, choices, defaults)


def shaw(head_dim: int, heads: int, *, reach: int = 16, seed: int = 0, **choices: Unpack[Choices]) -> Scheme:
    """Learned vectors of clipped offsets, added to keys and values (Shaw et al. 2018; RoFormer, Eq. 5). Softmax.

    Args:
        head_dim: d.
        heads: h, which share the vectors.
        reach: Offsets beyond it share the last vector.
        seed: Of the initial vectors.
        choices: See `Choices`.
    """
    return _with_bias("shaw", biases.Shaw(_size(head_dim, heads), reach=reach, seed=seed), head_dim, heads, choices)


def t5(
    head_dim: int,
    heads: int,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
    **choices: Unpack[Choices],
) -> Scheme:
    """A learned number a head and bucket of offsets, added to logits (Raffel et al. 2020, section 2.1). Softmax.

    T5 itself does not scale its logits by d^-1/2; this scheme does, as its neighbours.

    Args:
        head_dim: d.
        heads: h.
        buckets: Number of buckets.
        max_distance: From there on offsets share the last bucket.
        bidirectional: Whether keys after the query have buckets of their own.
        choices: See `Choices`.
    """
    _size(head_dim, heads)
    bias = biases.T5(heads, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    return _with_bias("t5", bias, head_dim, heads, choices)


def deberta(
    head_dim: int,
    heads: int,
    *,
    buckets: int = 256,
    max_distance: int | None = 512,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Content to position and position to content, scaled by (3 d)^-1/2 (He et al. 2021, Eq. 4; RoFormer, Eq. 10). Softmax.

    Args:
        head_dim: d.
        heads: h.
        buckets: Rows of either direction.
        max_distance: Far offsets share rows by logarithm up to this one; none clips them, as in version 1.
        seed: Of the initial vectors.
        choices: See `Choices`.
    """
    bias = biases.DeBERTa(heads, _size(head_dim, heads), buckets=buckets, max_distance=max_distance, seed=seed)
    return _with_bias("deberta", bias, head_dim, heads, choices, scale=(3 * head_dim) ** -0.5)


def transformer_xl(
    head_dim: int, heads: int, *, model_dim: int | None = None, seed: int = 0, **choices: Unpack[Choices]
) -> Scheme:
    """Content and relative sinusoids with two learned vectors (Dai et al. 2019, section 3.3; RoFormer, Eq. 7). Softmax.

    Args:
        head_dim: d.
        heads: h.
        model_dim: Width of the sinusoids, even; head_dim * heads (and one more if odd) by default.
        seed: Of the initial projection of the sinusoids.
        choices: See `Choices`.
    """
    width = _size(head_dim, heads) * heads if model_dim is None else model_dim
    width = width + width % 2 if model_dim is None else width
    coupling = couplings.TransformerXL(head_dim, heads, width, seed=seed)
    return _scheme(coupling, heads, _softmax_only("transformer-xl", choices), {"attention": "softmax"})


def alibi(head_dim: int, heads: int, **choices: Unpack[Choices]) -> Scheme:
    """ALiBi: no encoding but a decay a head, logits minus slope times distance (Press et al. 2022, section 3).

    With ``attention="softmax"`` it is the paper's; linear attention multiplies its weights by exp(-slope * distance).

    Args:
        head_dim: d.
        heads: h.
        choices: See `Choices`.
    """
    return _scheme(encodings.Identity(_size(head_dim, heads)), heads, choices, {"decay": "alibi"})


def cosformer(head_dim: int, heads: int | None = None, *, length: int = 2048, **choices: Unpack[Choices]) -> Scheme:
    """cosFormer: ReLU features, weights times cos(pi / 2 * offset / length) (Qin et al. 2022; LRPE, Eq. 35).

    One angle for all features, as LRPE's unitary type: direction-blind. Weights are positive for offsets below `length`;
    features here are max(x, 0) + 0.001.

    Args:
        head_dim: d.
        heads: h.
        length: M, the offset whose weight is zero: at least the longest sequence.
        choices: See `Choices`.
    """
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    angle = torch.full((1, 1, _size(head_dim, heads)), math.pi / 2 / length, device="cpu", dtype=torch.float64)
    encoding = encodings.Rotary(angle, lift=True)
    encoding.max_length = length
    return _scheme(encoding, heads, choices, {"feature_map": "relu", "denominator": "encoded"})


def ape_sequence(
    head_dim: int,
    heads: int,
    *,
    initial: Initial = "rope",
    base: float = 10000.0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Algebraic encoding of sequences: exp(x (A - A^T)) with a learned A a head (APE, sections 3.1 and 4.2).

    It starts in closed form and learns both angles and basis. With softmax attention it is rope with learned angles, for
    projections that absorb the basis (APE, Appendix A; `isopos.attention.absorb`).

    Args:
        head_dim: d, even.
        heads: h.
        initial: Angles at the start: "rope", base^(-2i/d), or "identity", many small and progressively fewer large ones.
        base: Of the initial angles.
        locality: Factor of softmax logits for each step of distance; 0.98 in the paper.
        choices: See `Choices`.
    """
    encoding = _power(_even(_size(head_dim, heads)), heads, initial, base)
    return _scheme(encoding, heads, choices, locality=locality)


def ape_absolute(
    head_dim: int,
    heads: int,
    *,
    side: Literal["query", "key"] = "key",
    initial: Initial = "rope",
    base: float = 10000.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Algebraic encoding of absolute positions: exp(x (A - A^T)) on queries or on keys only (APE, section 3.4.1).

    Args:
        head_dim: d, even.
        heads: h.
        side: What it acts on.
        initial: As in `ape_sequence`.
        base: Of the initial angles.
        choices: See `Choices`.
    """
    encoding = _power(_even(_size(head_dim, heads)), heads, initial, base)
    return _scheme(couplings.Absolute(encoding, side), heads, choices)


def ape_grid(
    head_dim: int,
    heads: int,
    *,
    axes: int = 2,
    initial: Initial = "rope",
    base: float = 10000.0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Algebraic encoding of grids: the direct sum of one learned orthogonal matrix' powers an axis (APE, section 3.3).

    Args:
        head_dim: d, even, at least 2 for each axis.
        heads: h.
        axes: Of the grid, any number.
        initial: As in `ape_sequence`.
        base: Of the initial angles.
        locality: Factor of softmax logits for each step of distance (the sum over axes).
        choices: See `Choices`.
    """
    widths = _split(_even(_size(head_dim, heads)), axes, 2)
    encoding = encodings.DirectSum([_power(width, heads, initial, base) for width in widths])
    return _scheme(encoding, heads, choices, locality=locality)


def ape_ring(
    head_dim: int,
    heads: int,
    *,
    period: int = 128,
    seed: int = 0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Algebraic encoding of a ring: rotations by multiples of 2 pi / period in a learned basis a head (APE, section 3.4.2).

    Positions are any integers; those that differ by the period are one. Frequencies are fixed, since others would not close
    the ring, and fall geometrically from half a turn a step to one turn a period.

    Args:
        head_dim: d, even.
        heads: h.
        period: n, at least 2.
        seed: Of the initial basis, near the identity.
        locality: Factor of softmax logits for each step of distance, the shorter way round.
        choices: See `Choices`.
    """
    encoding = _turns(_even(_size(head_dim, heads)), heads, period, seed)
    return _scheme(encoding, heads, choices, locality=locality)


def ape_tree(
    head_dim: int,
    heads: int,
    *,
    branches: int = 2,
    initial: Initial = "rope",
    base: float = 10000.0,
    seed: int = 0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Algebraic encoding of trees: products of one learned orthogonal matrix a branch and head (APE, section 3.2).

    Args:
        head_dim: d, even.
        heads: h.
        branches: Children of a node, at most.
        initial: Angles of each branch at the start, as in `ape_sequence`, in planes of its own.
        base: Of the initial angles.
        seed: Of the initial planes.
        locality: Factor of softmax logits for each step of distance in the tree.
        choices: See `Choices`.
    """
    encoding = _paths(_even(_size(head_dim, heads)), heads, branches, initial, base, seed)
    return _scheme(encoding, heads, choices, locality=locality)


def ape_product(
    head_dim: int,
    heads: int,
    *,
    parts: str = "sequence+tree2",
    initial: Initial = "rope",
    base: float = 10000.0,
    seed: int = 0,
    locality: float | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Algebraic encoding of a product of groups: the direct sum of its parts' encodings (APE, section 3.4.3).

    Args:
        head_dim: d, even, at least 2 for each part.
        heads: h.
        parts: Joined by "+": "sequence", "ringN" of period N, "treeN" of N branches, "gridN" of N axes. A sequence of trees
            is "sequence+tree2", a tree of images "tree2+grid2".
        initial: As in `ape_sequence`.
        base: Of the initial angles.
        seed: Of the initial planes of trees and bases of rings.
        locality: Factor of softmax logits for each step of distance (the sum over parts).
        choices: See `Choices`.
    """
    makers = _makers(parts, heads, initial, base, seed)
    widths = _split(_even(_size(head_dim, heads)), len(makers), 2)
    encoding = encodings.DirectSum([make(width) for make, width in zip(makers, widths, strict=True)])
    return _scheme(encoding, heads, choices, locality=locality)


def horn_constrained(
    head_dim: int,
    heads: int,
    *,
    axes: int = 1,
    sinusoids: int = 8,
    outside: int = 0,
    inside: bool = False,
    base: float = 10000.0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Horn's scheme 1: sinusoids in further channels, their projection constrained to a relative term (Horn et al. 2021).

    The term may be negative, and so may "encoded" denominators, which contain it.

    Args:
        head_dim: d.
        heads: h.
        axes: Of the positions, each with sinusoids of its own.
        sinusoids: Of each axis, with frequencies base^(-i/n).
        outside: Number of first tokens outside the grid, such as class tokens: the term does not see them.
        inside: Put the channels ahead of the feature map, as with the random features of the paper: with
            ``feature_map="favor"`` the result is relative in expectation only.
        base: Of the frequencies.
        choices: See `Choices`.
    """
    frequency = rope_frequencies(_positive("sinusoids", sinusoids), base).expand(_positive("axes", axes), -1)
    coupling = couplings.Constrained(_size(head_dim, heads), heads, frequency, outside=outside)
    return _scheme(coupling, heads, choices, {"denominator": "encoded"}, inside=inside)


def horn_clipped(
    head_dim: int,
    heads: int,
    *,
    axes: int = 1,
    reach: int | None = None,
    outside: int = 0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Horn's scheme 2: learned vectors of clipped offsets beside keys, in linear time (Horn et al. 2021).

    With softmax attention it is Shaw's scheme without values, each head its own vectors, on any number of axes.

    Args:
        head_dim: d.
        heads: h.
        axes: Of the positions; offsets are clipped on each.
        reach: R: (2 R + 1)^axes vectors; 8 on a line and 2 on a grid by default.
        outside: Number of first tokens outside the grid, such as class tokens, which have vectors of their own.
        seed: Of the initial vectors.
        choices: See `Choices`.
    """
    reach = (8 if _positive("axes", axes) == 1 else 2) if reach is None else reach
    bias = biases.ClippedKeys(heads, _size(head_dim, heads), reach=reach, axes=axes, outside=outside, seed=seed)
    return _scheme(encodings.Identity(head_dim, bias.group), heads, choices, bias=bias)


def spe_sine(
    head_dim: int,
    heads: int,
    *,
    sines: int = 5,
    realizations: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Stochastic encoding by sines, ahead of the feature map: relative in expectation (Liutkus et al. 2021, sineSPE).

    Args:
        head_dim: d.
        heads: h.
        sines: Of each feature.
        realizations: Features of queries and keys; d by default.
        seed: Of the draw.
        choices: See `Choices`.
    """
    coupling = couplings.SineSPE(_size(head_dim, heads), heads, sines=sines, realizations=realizations, seed=seed)
    return _scheme(coupling, heads, choices, inside=choices.get("attention") != "softmax")


def spe_conv(
    head_dim: int,
    heads: int,
    *,
    reach: int = 8,
    realizations: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """Stochastic encoding by filtered noise ahead of the feature map, relative in expectation (Liutkus 2021, convSPE).

    Args:
        head_dim: d.
        heads: h.
        reach: Steps of the filters; offsets beyond it are not told apart.
        realizations: Features of queries and keys; d by default.
        seed: Of noise and filters.
        choices: See `Choices`.
    """
    coupling = couplings.ConvSPE(_size(head_dim, heads), heads, reach=reach, realizations=realizations, seed=seed)
    return _scheme(coupling, heads, choices, inside=choices.get("attention") != "softmax")


def shiv_quirk(
    head_dim: int,
    heads: int,
    *,
    branches: int = 2,
    depth: int | None = None,
    model_dim: int | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """The stack of a node's last branches, added to the embeddings of trees (Shiv and Quirk 2019).

    Args:
        head_dim: d.
        heads: h.
        branches: Children of a node, at most.
        depth: Steps up that are seen; as many as model_dim / branches, and at most 16, by default.
        model_dim: Width of the token embeddings; head_dim * heads by default.
        choices: See `Choices`.
    """
    width = _size(head_dim, heads) * heads if model_dim is None else model_dim
    depth = min(16, width // max(branches, 1)) if depth is None else depth
    embedding = TreeStack(branches, width, depth)
    return _scheme(encodings.Identity(head_dim, embedding.group), heads, choices, embedding=embedding)


def _size(head_dim: int, heads: int | None) -> int:
    _positive("heads", 1 if heads is None else heads)
    return _positive("head_dim", head_dim)


def _even(width: int) -> int:
    if width % 2 or width < 2:
        raise ValueError(f"head size: expected an even number of features for a rotation of pairs, got {width}")
    return width


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    return value


def _split(width: int, parts: int, step: int) -> list[int]:
    """Widths of parts, as equal as multiples of `step` allow, larger ones first."""
    if width < step * _positive("axes", parts):
        raise ValueError(f"head size: expected at least {step * parts} features for {parts} parts, got {width}")
    share, rest = divmod(width // step, parts)
    return [step * (share + (n < rest)) for n in range(parts)]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _softmax_only(name: str, choices: Choices) -> Choices:
    if choices.get("attention", "softmax") == "linear":
        raise ValueError(
            f"attention: expected softmax, got linear: {name} adds to logits what depends on both positions at once, "
            "a factor of weights that linear attention cannot split; horn-clipped and horn-constrained add to its weights"
        )
    return choices


def _with_bias(name: str, bias: biases.RelativeBias, head_dim: int, heads: int, choices: Choices, **parts: Any) -> Scheme:
    encoding = encodings.Identity(head_dim, bias.group)
    return _scheme(encoding, heads, _softmax_only(name, choices), {"attention": "softmax"}, bias=bias, **parts)


def _rotary(width: int, heads: int | None, base: float, learned: bool) -> Encoding:
    frequency = rope_frequencies(_even(width) // 2, base)
    return encodings.Rotary(frequency.expand((heads or 1) if learned else 1, 1, -1), learned=learned)


def _thetas(theta: str, count: int, length: int, first: Tensor) -> Tensor:
    """LRPE's angles of a type, float64 ``[count]``; `first` are those of type a."""
    expect("theta", theta, typing.get_args(Theta))
    _positive("length", length)
    order = torch.arange(1, count + 1, device="cpu", dtype=torch.float64)
    return {"a": first, "b": math.pi / 2 / length / count * order, "c": math.pi / 2 / length / order}[theta]


def _permutations(width: int, heads: int, seed: int, orders: str = "random") -> Tensor:
    """A permutation a head, ``[h d]``: random, or random relabellings of ones of large orders."""
    expect("orders", orders, ("random", "long"))
    generator = _seeded(seed)
    rows = [torch.randperm(width, generator=generator, device="cpu") for _ in range(heads)]
    if orders == "long":
        rows = [row[longest[row.argsort()]] for row, longest in zip(rows, encodings.long_orders(width, heads), strict=True)]
    return torch.stack(rows)


def _in_basis(encoding: Encoding, basis: str, heads: int, learned: bool, seed: int, pairs: bool = False) -> Encoding:
    expect("basis", basis, typing.get_args(Basis))
    if learned and basis != "householder":
        raise ValueError(f"learned_basis: expected basis='householder', the only one with parameters, got {basis!r}")
    if basis == "identity":
        return encoding
    width = encoding.features // 2 if pairs else encoding.features
    if basis == "householder":
        made: bases.Basis = bases.Householder(normal(seed, heads, width), learned=learned)
    elif basis == "odd-even":
        made = bases.OddEven(width)
    elif pairs:
        return encodings.InBasis(encoding, bases.ComplexFourier(encoding.features))
    else:
        made = bases.Fourier(width)
    return encodings.InBasis(encoding, bases.Pairs(made) if pairs else made)


def _generator(width: int, initial: str, base: float) -> Tensor:
    """A whose A - A^T has blocks [[0, -w], [w, 0]] with the initial angles w: float64 ``[d d]``."""
    expect("initial", initial, typing.get_args(Initial))
    count = width // 2
    angle = rope_frequencies(count, base)
    if initial == "identity":  # quantiles of a half-normal distribution of 0.25 radians a step
        share = (torch.arange(count, device="cpu", dtype=torch.float64) + 0.5) / count
        angle = 0.25 * 2**0.5 * torch.erfinv(share)
    lower = torch.zeros(width, device="cpu", dtype=torch.float64)
    lower[::2] = angle
    return torch.diag(lower[:-1], -1)


def _power(width: int, heads: int, initial: str, base: float) -> Encoding:
    return encodings.Exponential(_generator(width, initial, base).expand(heads, -1, -1))


def _paths(width: int, heads: int, branches: int, initial: str, base: float, seed: int) -> Encoding:
    start = _generator(width, initial, base)
    random = normal(seed, heads, _positive("branches", branches), width, width).double()
    planes = torch.linalg.qr(random).Q
    return encodings.TreePath(planes.mT @ start @ planes)


def _turns(width: int, heads: int, period: int, seed: int) -> Encoding:
    if not isinstance(period, int) or period < 2:
        raise ValueError(f"period: expected at least 2, got {period!r}")
    turns = (period / 2) ** torch.linspace(0, 1, width // 2, device="cpu", dtype=torch.float64)
    ring = encodings.Rotary((2 * math.pi / period * turns.floor().flip(0))[None, None], group=Ring(period))
    near = 0.1 * normal(seed, heads, width, width) / width**0.5
    return encodings.InBasis(ring, bases.Orthogonal(near, learned=True))


def _makers(parts: str, heads: int, initial: str, base: float, seed: int) -> list[Callable[[int], Encoding]]:
    """What makes each part's encoding of a width."""
    makers: list[Callable[[int], Encoding]] = []
    for text in parts.split("+"):
        name = text.strip().rstrip("0123456789")
        number = text.strip()[len(name) :]
        if name not in ("sequence", "ring", "tree", "grid") or (name == "sequence") != (number == ""):
            raise ValueError(
                f"parts: expected sequence, ringN, treeN or gridN joined by +, got {text.strip()!r} in {parts!r}"
            )
        if name == "ring":
            makers.append(lambda width, n=int(number): _turns(width, heads, n, seed))
        elif name == "tree":
            makers.append(lambda width, n=int(number): _paths(width, heads, n, initial, base, seed))
        else:
            makers += [lambda width: _power(width, heads, initial, base)] * _positive("axes", int(number or 1))
    return makers


REGISTRY: dict[str, Callable[..., Scheme]] = {name: globals()[name.replace("-", "_")] for name in CATALOG}


def build(name: str, head_dim: int, heads: int, options: Mapping[str, str] | None = None) -> Scheme:
    """A scheme from its name and options as text, as the command line has them.

    Raises:
        ValueError: For an unknown scheme, option or value, naming those that exist.

    Example:
        >>> build("rope", 64, 8, {"decay": "retnet", "base": "500000"}).choices["decay"]
        'retnet'
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown scheme {name!r}: {closest(name, REGISTRY)}")
    parameters = options_of(name)
    values = {}
    for option, text in (options or {}).items():
        if option not in parameters:
            raise ValueError(f"{name}: unknown option {option!r}: {closest(option, parameters)}")
        values[option] = _parse(f"{name}: {option}", text, parameters[option])
    return REGISTRY[name](head_dim, heads, **values)


def options_of(name: str) -> dict[str, Any]:
    """The options of a scheme and their types."""
    hints = typing.get_type_hints(REGISTRY[name])
    own = [p.name for p in inspect.signature(REGISTRY[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {option: hints[option] for option in own} | typing.get_type_hints(Choices)


def closest(name: str, names: Mapping[str, Any]) -> str:
    """The known names, or the nearest to a misspelt one."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"


def _parse(what: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        expect(what, text, typing.get_args(kind))
        return text
    kinds = typing.get_args(kind) or (kind,)
    if str in kinds:
        return text
    if type(None) in kinds and text.lower() == "none":
        return None
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}
    for reader in (readers[k] for k in kinds if k in readers):
        try:
            return reader(text.lower())
        except (ValueError, KeyError):
            continue
    names = " or ".join("true or false" if k is bool else k.__name__ for k in kinds if k in readers)
    raise ValueError(f"{what}: expected {names}, got {text!r}")
