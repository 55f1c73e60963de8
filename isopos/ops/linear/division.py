"""Denominators: counted and clamped where they vanish, and the one division."""

from contextvars import ContextVar

import torch
from torch import Tensor

EPS = 1e-6  # the least magnitude of a denominator


class Clamped:
    """Counts the denominators that are too small to divide by, of linear attention inside ``with``, outside a compiler.

    Examples:
        >>> with Clamped() as clamped:
        ...     total = divide(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> clamped.count, clamped.total
        (1, 2)
    """

    def __init__(self) -> None:
        self.small: list[Tensor] = []
        self.total = 0

    @property
    def count(self) -> int:
        """Denominators that were clamped, of `total`."""
        return sum(int(small) for small in self.small)

    def __enter__(self) -> "Clamped":
        self.token = _CLAMPED.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _CLAMPED.reset(self.token)


_CLAMPED: ContextVar[Clamped | None] = ContextVar("clamped", default=None)  # of each thread its own


def counted() -> bool:
    """Whether there is a counter."""
    return _CLAMPED.get() is not None and not torch.compiler.is_compiling()


def count(denominator: Tensor) -> None:
    """Tell the counter, if there is one; compiled code has clamped them by then."""
    if not torch.compiler.is_compiling() and (counter := _CLAMPED.get()) is not None:
        counter.small.append((denominator.abs() <= EPS).sum())
        counter.total += denominator.numel()


def clamp(denominator: Tensor) -> Tensor:
    """The denominator with a magnitude of at least 1e-6 and its own sign."""
    count(denominator)
    eager = not torch.compiler.is_compiling() and type(denominator) is Tensor and denominator.device.type == "cpu"
    if eager and not denominator.requires_grad and denominator.amin() >= EPS:
        return denominator  # the usual case, in one pass
    if torch.compiler.is_exporting():  # ONNX has no copysign
        return torch.where(denominator.abs() < EPS, torch.where(denominator < 0, -EPS, EPS), denominator)
    return torch.where(denominator.abs() < EPS, torch.full_like(denominator, EPS).copysign(denominator), denominator)


def divide(total: Tensor) -> Tensor:
    """The one division: sums ``[... e]`` over the denominator in the last column of total ``[... e+1]``, clamped."""
    return total[..., :-1] / clamp(total[..., -1:])


def divide_complex(total: Tensor) -> Tensor:
    """The real part of complex sums over the complex denominator: real and imaginary parts ``[2 ... e+1]``, clamped.

    Re(n / d) = Re(n conj(d)) / |d|^2
    """
    (real, x), (imaginary, y) = (part.split((total.shape[-1] - 1, 1), -1) for part in total)
    return (real * x + imaginary * y) / (x.square() + y.square()).clamp_min(EPS**2)
