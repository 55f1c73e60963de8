"""Linearized Relative Positional Encoding (Qin et al. 2023): unitary, orthogonal and permutation type in a basis P."""

import math
import typing
from typing import Literal, Unpack

import torch
from torch import Tensor

from isopos import bases, encodings
from isopos.catalog import at_least, expect
from isopos.encodings import Encoding, random_permutations, rope_frequencies
from isopos.exact import normal
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import compose, even, register

Basis = Literal["identity", "householder", "odd-even", "fourier"]
UnitaryBasis = Literal["identity", "householder", "odd-even", "fourier", "dft"]
Theta = Literal["a", "b", "c"]


@register(
    summary="learned phases, direction-blind on real features in a real basis",
    citation="Qin et al. 2023, LRPE, Eq. 22",
    equation="Re q^H P^H diag(e^(i a t)) P k",
    cost="t d, twice the features on real vectors",
    extends="grids, rings, by direct sum",
    learns="angles a",
)
def lrpe_unitary(
    head_dim: int,
    heads: int,
    *,
    basis: UnitaryBasis = "householder",
    complex: bool = False,
    theta: Theta = "a",
    length: int = 512,
    learned: bool = True,
    learned_basis: bool = False,
    base: float = 10000.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's unitary type: learned phases e^{i angle x} of complex features in the basis P (LRPE, Eq. 22 and D.1).

    On real vectors it takes the real part of each score. With a real P it is a sum of cosines: score(i, j) = score(j, i), so
    that without `causal` a model cannot tell left from right; with "dft", a complex one, it can. With `complex` the d
    features are d/2 complex ones, pairs (2i, 2i+1) as in rope: queries, keys and denominator are complex, and the output is
    the real part (Eq. 38); scores are rope's in basis P.

    Args:
        head_dim: d; even if complex.
        basis: P; "fourier" is the real transform on real vectors and the complex one on complex ones, "dft" the complex one
            on real vectors, as in the paper's listing.
        complex: Whether queries and keys are complex.
        length: Reference length of theta "b" and "c".
        learned: Learn the angles, each head its own, as the paper says (Appendix D.1); its listing has "b" and "c" fixed.
    """
    count = even(head_dim) // 2 if complex else head_dim
    angle = rope_frequencies(count, base) if complex else rope_frequencies(count, base).square()
    angle = _thetas(theta, count, length, angle).expand(heads if learned else 1, 1, -1)
    if basis == "dft" and not complex:
        encoding = encodings.InBasis(encodings.Rotary(angle, learned=learned), bases.Spectrum(head_dim))
        return compose(encoding, heads, choices)
    encoding = encodings.Rotary(angle, learned=learned, lift=not complex)
    defaults = {"denominator": "complex"} if complex else {}
    return compose(_in_basis(encoding, basis, heads, learned_basis, seed, complex), heads, choices, defaults)


@register(
    summary="rotation of feature pairs by learned angles in an orthogonal basis",
    citation="Qin et al. 2023, LRPE, Eq. 23",
    equation="<P q, R(a t) P k>",
    cost="t d",
    extends="grids, rings, by direct sum",
    learns="angles a",
)
def lrpe_orthogonal(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    identity: int = 0,
    theta: Theta = "a",
    length: int = 512,
    learned: bool = True,
    learned_basis: bool = False,
    base: float = 10000.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's orthogonal type: rotations by learned angles, at first base^(-2t/d), in the basis P (LRPE, Eq. 23 and D.1).

    With fixed angles and P = I, ``learned=False, basis="identity"``, it is rope.

    Args:
        head_dim: d; d - identity is even.
        basis: P.
        identity: q, features of P's image that do not rotate: the paper's identity block, "mixed" in its listing.
        length: Reference length of theta "b" and "c".
        learned: Learn the angles, each head its own, as the paper says (Appendix D.1); its listing has "b" and "c" fixed.
    """
    if not 0 <= identity < head_dim:
        raise ValueError(f"identity: expected 0 to {head_dim - 1} features that do not rotate, got {identity}")
    count = even(head_dim - identity) // 2
    angle = _thetas(theta, count, length, rope_frequencies(count, base)).expand(heads if learned else 1, 1, -1)
    encoding = encodings.Rotary(angle, learned=learned)
    encoding = encodings.Partial(encoding, head_dim) if identity else encoding
    return compose(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


@register(
    summary="powers of a permutation in an orthogonal basis",
    citation="Qin et al. 2023, LRPE, Eq. 24",
    equation="<P q, pi^t P k>",
    cost="t d",
    extends="grids, by commuting permutations",
)
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
        basis: P. With "identity" or "odd-even" scores of positive features stay and so may "encoded" denominators.
    """
    encoding = encodings.Permutation(random_permutations(head_dim, heads, seed))
    return compose(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def _thetas(theta: str, count: int, length: int, first: Tensor) -> Tensor:
    """LRPE's angles of a type, float64 ``[count]``; `first` are those of type a."""
    expect("theta", theta, typing.get_args(Theta))
    at_least("length", length)
    order = torch.arange(1, count + 1, device="cpu", dtype=torch.float64)
    return {"a": first, "b": math.pi / 2 / length / count * order, "c": math.pi / 2 / length / order}[theta]


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
