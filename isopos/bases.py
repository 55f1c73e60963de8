"""Bases P: constant orthogonal maps applied before an encoding's operator (LRPE, W_s = P^H Lambda^(s) P).

The outer P^H cancels in products of queries and keys (LRPE, Eq. 75), so P is applied once. A basis is a module; calling it
returns an isometry that is constant over tokens.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from isopos.exact import ExactModule, cast_down, to_float64
from isopos.maps import Gather, Isometry, Matrix, OnPairs, Reflection
from isopos.ops.rotate import narrow_index, skew_exponential

__all__ = ["Basis", "Cayley", "ComplexFourier", "Fourier", "Householder", "OddEven", "Orthogonal", "Pairs", "Spectrum"]


class Basis(ExactModule, ABC):
    """A constant orthogonal map of `features` features."""

    features: int
    widening: int = 1  # output features per input feature
    is_complex: bool = False  # whether it maps pairs of features as complex numbers, and so commutes with phases

    @abstractmethod
    def forward(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Isometry:
        """The map as an isometry, on a device and in a dtype."""


class Householder(Basis):
    """The reflection P = I - 2 u u^T with u = v / |v|, one normal per head (LRPE, Appendix D.1).

    Args:
        normal: v, ``[h d]`` (h = 1: shared by all heads), of any nonzero length.
        learned: Whether v is a parameter.

    Examples:
        >>> x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
        >>> y = Householder(torch.ones(2, 8))(dtype=torch.float64)(x)
        >>> torch.allclose(x.norm(dim=-1), y.norm(dim=-1))
        True
    """

    def __init__(self, normal: Tensor, *, learned: bool = False):
        super().__init__()
        if normal.ndim != 2 or not (normal.norm(dim=-1) > 0).all():
            raise ValueError(f"normal: expected [h d] without zero rows, got {list(normal.shape)}")
        self.features = normal.shape[-1]
        self.parametrise("normal", normal, learned=learned)

    def forward(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Isometry:
        device = device or self.parameter.device
        normal = to_float64(self.parameter, device)
        return Reflection(cast_down(normal / normal.norm(dim=-1, keepdim=True), dtype, device)[:, None])


class _Generated(Basis, ABC):
    """A rotation of all features, one per head, computed from a matrix that can be learned."""

    def __init__(self, generator: Tensor, *, learned: bool = False):
        super().__init__()
        if generator.ndim != 3 or generator.shape[-1] != generator.shape[-2]:
            raise ValueError(f"generator: expected [h d d], got {list(generator.shape)}")
        self.features = generator.shape[-1]
        self.parametrise("generator", generator, learned=learned)

    def forward(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Isometry:
        device = device or self.parameter.device
        return Matrix(cast_down(self._matrix(to_float64(self.parameter, device)), dtype, device))

    @abstractmethod
    def _matrix(self, generator: Tensor) -> Tensor:
        """P ``[h d d]`` from A ``[h d d]``, both float64."""


class Orthogonal(_Generated):
    """The rotation P = exp(A - A^T) of all features, one per head (APE, section 4.2).

    Args:
        generator: A, ``[h d d]``; zero makes P the identity.
        learned: Whether A is a parameter.

    Examples:
        >>> P = Orthogonal(torch.randn(1, 4, 4))(dtype=torch.float64).matrix[0]
        >>> torch.allclose(P @ P.T, torch.eye(4, dtype=torch.float64))
        True
    """

    def _matrix(self, generator: Tensor) -> Tensor:
        return skew_exponential(generator)


class Cayley(_Generated):
    """The rotation P = (I - S) (I + S)^-1 of all features with S = A - A^T, one per head (STRING, Eq. 10).

    Every rotation without the angle pi has this form; it needs a linear system instead of the exponential of `Orthogonal`.

    Args:
        generator: A, ``[h d d]``; zero makes P the identity.
        learned: Whether A is a parameter.

    Examples:
        >>> P = Cayley(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]))(dtype=torch.float64).matrix[0]  # a quarter of a turn
        >>> P.round(decimals=6).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """

    def _matrix(self, generator: Tensor) -> Tensor:
        skew, unit = generator - generator.mT, torch.eye(self.features, dtype=torch.float64, device=generator.device)
        return torch.linalg.solve(unit + skew, unit - skew)  # the two commute


class _Fixed(Basis, ABC):
    """A basis without parameters: a matrix ``[e d]`` shared by all heads."""

    matrix: Tensor

    def forward(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Isometry:
        return Matrix(cast_down(self.matrix, dtype, device)[None])


class OddEven(Basis):
    """The permutation (P x)_i = x_{pi(i)} with pi(2k) = k, pi(2k+1) = ceil(d/2) + k (LRPE, Eq. 74).

    This is Eq. 74 zero-based (the paper misprints it), as in the paper's listing. Followed by an interleaved rotation it is
    the half-split layout of rotary embeddings: feature i rotates with feature i + d/2.

    Args:
        features: d.

    Examples:
        >>> OddEven(5)()(torch.arange(5.0)[None, None]).flatten().tolist()
        [0.0, 3.0, 1.0, 4.0, 2.0]
    """

    def __init__(self, features: int):
        super().__init__()
        self.features = features

    def forward(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Isometry:
        i = torch.arange(self.features, device=device)
        index = narrow_index(i // 2 + i % 2 * ((self.features + 1) // 2), self.features)
        return Gather(index[None, None], constant=True, halves=True)


class Fourier(_Fixed):
    """The orthonormal real discrete Fourier transform: rows of scaled cosines and sines, one pair per frequency.

    `rfft` of a real vector does not keep norms. These rows do: the constant, the alternating row if d is even, and the
    pairs.

    Args:
        features: d.

    Examples:
        >>> P = Fourier(6)(dtype=torch.float64).matrix[0]
        >>> torch.allclose(P @ P.T, torch.eye(6, dtype=torch.float64))
        True
    """

    def __init__(self, features: int):
        super().__init__()
        self.features = features
        d = features
        n = torch.arange(d, device="cpu", dtype=torch.float64)
        k = torch.arange(1, (d + 1) // 2, device="cpu", dtype=torch.float64)
        angle = 2 * torch.pi / d * k[:, None] * n
        pairs = torch.stack((angle.cos(), angle.sin()), 1).flatten(0, 1) * (2 / d) ** 0.5
        ends = [torch.ones(1, d, device="cpu", dtype=torch.float64) / d**0.5]
        if d % 2 == 0:
            ends.append((1 - 2 * (n % 2))[None] / d**0.5)
        self.matrix = torch.cat((*ends, pairs))


class ComplexFourier(_Fixed):
    """The unitary discrete Fourier transform of complex features, each stored as a pair (real, imaginary).

    Args:
        features: 2 n for n complex features.

    Examples:
        >>> x = torch.randn(6, dtype=torch.complex128)
        >>> y = ComplexFourier(12)(dtype=torch.float64)(torch.view_as_real(x).flatten()[None, None])
        >>> torch.allclose(torch.view_as_complex(y.view(6, 2)), torch.fft.fft(x, norm="ortho"))
        True
    """

    is_complex = True

    def __init__(self, features: int):
        super().__init__()
        if features % 2 or features < 2:
            raise ValueError(f"features: expected pairs of real and imaginary parts, got {features}")
        self.features = features
        n = torch.arange(features // 2, device="cpu", dtype=torch.float64)
        angle = 4 * torch.pi / features * n[:, None] * n
        cos, sin = angle.cos(), angle.sin()
        rows = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), 1)  # [n 2 n 2]
        self.matrix = rows.flatten(2).flatten(0, 1) * (2 / features) ** 0.5


class Spectrum(_Fixed):
    """The unitary discrete Fourier transform of real features into an equal number of complex ones.

    Each complex feature is a pair (real, imaginary). This is a complex P of LRPE's Eq. 22 for real vectors, as in the
    paper's listing; phases of its features distinguish directions.

    Args:
        features: d; it returns 2 d.

    Examples:
        >>> x = torch.randn(6, dtype=torch.float64)
        >>> y = Spectrum(6)(dtype=torch.float64)(x[None, None])
        >>> torch.allclose(torch.view_as_complex(y.view(6, 2)), torch.fft.fft(x, norm="ortho"))
        True
    """

    widening = 2

    def __init__(self, features: int):
        super().__init__()
        self.features = features
        n = torch.arange(features, device="cpu", dtype=torch.float64)
        angle = 2 * torch.pi / features * n[:, None] * n
        self.matrix = torch.stack((angle.cos(), -angle.sin()), 1).flatten(0, 1) / features**0.5


class Pairs(Basis):
    """A real basis P of complex features: P maps the real parts and the imaginary parts of pairs separately.

    Args:
        basis: P, on n features; the pairs are 2 n.
    """

    is_complex = True

    def __init__(self, basis: Basis):
        super().__init__()
        if basis.widening != 1:
            raise ValueError(f"basis: expected one that returns as many features as it takes, got {type(basis).__name__}")
        self.basis, self.features = basis, 2 * basis.features

    def forward(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Isometry:
        return OnPairs(self.basis(device, dtype))
