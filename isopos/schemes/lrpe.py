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
    """Learned phases; symmetric in the direction in a real basis.

    This is LRPE's unitary type: phases e^{i angle x} of complex features in the basis P (Eq. 22 and D.1). On real vectors,
    scores are real parts. With a real P they are sums of cosines, score(i, j) = score(j, i), so without `causal` a model
    cannot distinguish left from right; with the complex basis "dft" it can. With `complex`, the d features are d/2 complex
    ones, pairs (2i, 2i+1) as in rope; queries, keys and denominator are complex, the output is the real part (Eq. 38), and
    scores equal rope's in the basis P.

    Args:
        head_dim: d; even if complex.
        basis: P. "fourier" is the real transform on real vectors and the complex one on complex vectors. "dft" is the
            complex one on real vectors, as in the paper's listing.
        complex: Whether queries and keys are complex.
        length: Reference length of theta "b" and "c".
        learned: Learn the angles, separately per head, as the paper says (Appendix D.1); its listing has "b" and "c" fixed.
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
    """Rotation of feature pairs by learned angles, in an orthogonal basis P.

    Initial angles are base^(-2t/d). With ``learned=False, basis="identity"`` this is rope.

    Args:
        head_dim: d; d - identity is even.
        basis: P.
        identity: q, features of P's image that do not rotate: the paper's identity block, "mixed" in its listing.
        length: Reference length of theta "b" and "c".
        learned: Learn the angles, separately per head, as the paper says (Appendix D.1); its listing has "b" and "c" fixed.
    """
    if not 0 <= identity < head_dim:
        raise ValueError(f"identity: expected 0 to {head_dim - 1} features that do not rotate, got {identity}")
    count = even(head_dim - identity) // 2
    angle = _thetas(theta, count, length, rope_frequencies(count, base)).expand(heads if learned else 1, 1, -1)
    encoding = encodings.Rotary(angle, learned=learned)
    encoding = encodings.Partial(encoding, head_dim) if identity else encoding
    return compose(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


@register(
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
    """Powers of a random permutation per head, in an orthogonal basis P.

    Args:
        basis: P. "identity" and "odd-even" keep positive features positive; other bases may make "encoded" denominators
            negative.
    """
    encoding = encodings.Permutation(random_permutations(head_dim, heads, seed))
    return compose(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def _thetas(theta: str, count: int, length: int, first: Tensor) -> Tensor:
    """LRPE's angles of a type, float64 ``[count]``; `first` are the angles of type a."""
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
        basis_map: bases.Basis = bases.Householder(normal(seed, heads, width), learned=learned)
    elif basis == "odd-even":
        basis_map = bases.OddEven(width)
    elif pairs:
        return encodings.InBasis(encoding, bases.ComplexFourier(encoding.features))
    else:
        basis_map = bases.Fourier(width)
    return encodings.InBasis(encoding, bases.Pairs(basis_map) if pairs else basis_map)
