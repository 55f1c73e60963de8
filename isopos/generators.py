"""Encodings by skew generators of special form, with cheaper exponentials than dense d x d matrices.

Commuting skew matrices rotate the same planes, so the exponential of their sum over the axes of a grid is one rotation in
one basis: rho(x) = exp(sum_c x_c L_c) = P^T R(<w, x>) P.
"""

import torch
from torch import Tensor

from isopos.bases import Fourier
from isopos.encodings import Encoding
from isopos.exact import Weight, cast_down, constant, to_float64
from isopos.lengths import Extension
from isopos.maps import Chain, Isometry, Matrix, Plane, Rotation
from isopos.ops.rotate import rotations
from isopos.ops.spectrum import check_spectrum, spectrum
from isopos.positions import Group, Line, lines

__all__ = ["Circulant", "Commuting", "RankTwo"]


class Circulant(Encoding):
    """exp(sum_c x_c (C_c - C_c^T)) of circulant matrices C, which commute and rotate the planes of the Fourier transform.

    Angles are -2 Im of the fast Fourier transform of a column of C, and zero for the constant and the alternating vector.
    The basis is applied as the matrix of `isopos.bases.Fourier`.

    Args:
        generator: The first columns ``[h c d]`` of C, for heads and coordinates; d is even.
        learned: Whether they are learned.

    References:
        Learning the RoPEs: Better 2D and 3D Position Encodings with STRING (Schenck et al. 2025), Eq. 11 and Theorem 3.5.
        https://arxiv.org/abs/2502.02562
    """

    extensible = True

    def __init__(self, generator: Tensor, *, learned: bool = True):
        super().__init__()
        if generator.ndim != 3 or generator.shape[-1] % 2 or generator.shape[-1] < 4:
            raise ValueError(f"generator: expected [h c d] with even d of at least 4, got {list(generator.shape)}")
        self.group = lines(generator.shape[1])
        self.features = self.out_features = generator.shape[-1]
        self.basis = Fourier(self.features)
        self.parametrise("generator", generator, learned=learned)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        frequency = -2 * torch.fft.fft(to_float64(self.parameter, x.device)).imag[..., : self.features // 2]
        return Chain(self.basis(x.device, dtype), Rotation(rotations(x, self.extended(frequency), dtype)))


class Commuting(Encoding):
    """exp(sum_c x_c w_cn (A_n - A_n^T)) on blocks n of features, with one skew matrix per block.

    In each block, the generators of all axes are multiples of one matrix, so they commute. A block with one nonzero multiple
    belongs to one axis. Each block is diagonalised once per forward pass, as in `isopos.encodings.Exponential`.

    Args:
        generator: A, ``[h n b b]`` for n blocks of b features, b even. The frequencies of each A - A^T must be distinct and
            nonzero.
        direction: w, ``[h c n]`` for c coordinates (h = 1: shared by all heads).
        learned: Whether A is learned.
        learned_direction: Whether w is learned.

    References:
        ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting Angle Matrices (Yu et al.
        2025): axial partition, and linear dependence. https://arxiv.org/abs/2506.03737

    Examples:
        >>> rho = Commuting(torch.randn(2, 3, 4, 4), torch.randn(2, 2, 3))(torch.randn(5, 2))
        >>> rho(torch.randn(1, 2, 5, 12)).shape
        torch.Size([1, 2, 5, 12])
    """

    extensible = True

    def __init__(self, generator: Tensor, direction: Tensor, *, learned: bool = True, learned_direction: bool = False):
        super().__init__()
        if generator.ndim != 4 or generator.shape[-1] != generator.shape[-2] or generator.shape[-1] % 2:
            raise ValueError(f"generator: expected [h n b b] with even b, got {list(generator.shape)}")
        blocks, size = generator.shape[1:3]
        if direction.ndim != 3 or direction.shape[-1] != blocks or not (direction != 0).any(1).all():
            raise ValueError(f"direction: expected [h c {blocks}], not zero in any block, got {list(direction.shape)}")
        check_spectrum(generator)
        self.group = lines(direction.shape[1])
        self.features = self.out_features = blocks * size
        self.parametrise("generator", generator, learned=learned)
        self.initial_direction = constant(direction)
        self.direction = Weight(direction) if learned_direction else None

    def directions(self) -> Tensor:
        """Current w ``[h c n]``."""
        return self.initial_direction if self.direction is None else self.direction.parameter

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        frequency, planes = spectrum(to_float64(self.parameter, x.device))  # [h n b/2] and [h n b b]
        frequency = (to_float64(self.directions(), x.device)[..., None] * frequency[:, None]).flatten(-2)  # [h c d/2]
        unit = torch.eye(planes.shape[1], dtype=torch.float64, device=planes.device)
        basis = (planes[:, :, :, None] * unit[:, None, :, None]).flatten(3).flatten(1, 2)
        return Chain(Matrix(cast_down(basis, dtype, x.device)), Rotation(rotations(x, self.extended(frequency), dtype)))

    def _load_from_state_dict(self, *arguments, **options) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if not self.parameter.is_meta:
            check_spectrum(self.parameter)


class RankTwo(Encoding):
    """exp(x L) with L = a b^T - b a^T, in closed form: a rotation of one plane by s = (|a|^2 |b|^2 - <a, b>^2)^1/2 per step.

    exp(x L) = I + sin(s x) / s L + (1 - cos(s x)) / s^2 L^2. Directions orthogonal to the plane pass unchanged.

    Args:
        a: ``[h d]``.
        b: ``[h d]``, not parallel to a.
        learned: Whether both are learned.

    References:
        Group Representational Position Encoding (Zhang et al. 2025), multiplicative GRAPE. https://arxiv.org/abs/2512.07805

    Examples:
        >>> rho = RankTwo(torch.tensor([[torch.pi, 0.0, 0.0]]), torch.tensor([[0.0, 0.5, 0.0]]), learned=False)
        >>> rho(torch.ones(1, 1))(torch.tensor([[[0.0, 1.0, 2.0]]])).round(decimals=6).abs().tolist()
        [[[1.0, 0.0, 2.0]]]
    """

    extensible = True

    def __init__(self, a: Tensor, b: Tensor, *, learned: bool = True):
        super().__init__()
        if a.ndim != 2 or a.shape != b.shape or not (_frame(a.double(), b.double())[2] > 1e-9 * a.norm() * b.norm()).all():
            raise ValueError(f"a, b: expected [h d], no rows parallel, got {list(a.shape)} and {list(b.shape)}")
        self.group: Group = Line(real=True)
        self.features = self.out_features = a.shape[-1]
        self.parametrise("vectors", torch.stack((a, b), 1), learned=learned)

    @property
    def pairs(self) -> int:
        return 1

    def refusal(self, rule: Extension) -> str:
        if not rule.by_series:
            return ""
        return f"expected linear, llama3 or longrope for a single plane, got {rule.name}, which needs all planes of a head"

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        u, v, speed = _frame(*to_float64(self.parameter, x.device).unbind(1))
        u, v = (cast_down(vector, dtype, x.device)[:, None] for vector in (u, v))
        return Plane(u, v, rotations(x, self.extended(speed[:, None]), dtype))


def _frame(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal vectors u, along a, and v in the plane of a and b ``[h d]``, and the area spanned by a and b ``[h 1]``."""
    length = a.norm(dim=-1, keepdim=True)
    u = a / length
    across = b - (b * u).sum(-1, keepdim=True) * u
    height = across.norm(dim=-1, keepdim=True)
    return u, across / height, length * height
