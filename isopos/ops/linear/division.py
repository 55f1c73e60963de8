"""Denominators: counted and clamped if they vanish, and the only division."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from isopos.exact import is_exporting

EPS = 1e-6  # smallest magnitude of a denominator


class Clamped:
    """Counts vanishing denominators of linear attention inside a ``with`` block; of compiled code only Triton's kernels.

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
        """Number of clamped denominators, out of `total`."""
        return sum(int(small) for small in self.small)

    def __enter__(self) -> "Clamped":
        self.token = _CLAMPED.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _CLAMPED.reset(self.token)


_CLAMPED: ContextVar[Clamped | None] = ContextVar("clamped", default=None)  # one per thread


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count inside: these sums were counted before."""
    token = _CLAMPED.set(None)
    try:
        yield
    finally:
        _CLAMPED.reset(token)


def counted() -> bool:
    """Whether a counter is active."""
    return not torch.compiler.is_compiling() and _CLAMPED.get() is not None


def count(denominator: Tensor) -> None:
    """Report denominators to the active counter, if any."""
    if not torch.compiler.is_compiling() and (counter := _CLAMPED.get()) is not None:
        counter.small.append((denominator.abs() <= EPS).sum())
        counter.total += denominator.numel()


def clamp(denominator: Tensor) -> Tensor:
    """The denominator, its magnitude clamped to at least 1e-6, its sign kept."""
    count(denominator)
    eager = not torch.compiler.is_compiling() and type(denominator) is Tensor and denominator.device.type == "cpu"
    if eager and not denominator.requires_grad and denominator.amin() >= EPS:
        return denominator  # the common case, in one pass
    if is_exporting():  # ONNX has no copysign
        return torch.where(denominator.abs() < EPS, torch.where(denominator < 0, -EPS, EPS), denominator)
    return torch.where(denominator.abs() < EPS, torch.full_like(denominator, EPS).copysign(denominator), denominator)


def divide(total: Tensor) -> Tensor:
    """Sums ``[... e]`` divided by the clamped denominator in the last column of total ``[... e+1]``."""
    return total[..., :-1] / clamp(total[..., -1:])


def divide_complex(total: Tensor) -> Tensor:
    """The real part of complex sums over the complex denominator: real and imaginary parts ``[2 ... e+1]``, clamped.

    Re(n / d) = Re(n conj(d)) / |d|^2
    """
    (real, x), (imaginary, y) = (part.split((total.shape[-1] - 1, 1), -1) for part in total)
    square = x.square() + y.square()
    if counted():
        count(square.detach().sqrt())
    return (real * x + imaginary * y) / square.clamp_min(EPS**2)
