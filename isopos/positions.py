"""Groups of positions, and the tensors that hold their elements.

A position is one row of an integer tensor ``[*b t c]``: c coordinates, one for a line or a ring, one per axis of a product.
Batch axes make positions per sample; decoding and cross-attention just evaluate an encoding at another tensor.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Group", "Line", "Product", "Ring", "grid", "product", "ring", "sequence"]

REAL_DTYPES = (torch.float32, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32)  # sums of shorter ones wrap


class Group(ABC):
    """A group whose elements are rows of ``columns`` coordinates. Encodings name theirs; nothing guesses geometry."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Coordinates of one element."""

    @abstractmethod
    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        """The product xy of two tensors of elements ``[*b t c]``."""

    @abstractmethod
    def inverse(self, x: Tensor) -> Tensor:
        """The inverse of each element."""

    @abstractmethod
    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Steps between elements: ``[*b t]``, never negative."""

    @abstractmethod
    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Random elements ``[*shape c]``."""

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Raise ValueError where x does not hold elements of this group."""

    def relative(self, x: Tensor, y: Tensor) -> Tensor:
        """The relative position x^-1 y."""
        return self.compose(self.inverse(x), y)

    def origin(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """The identity element, ``[*shape c]``."""
        return torch.zeros(*shape, self.columns, dtype=torch.int64, device=device)

    def _check_columns(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != self.columns:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"positions: expected [*b t {self.columns}] for {self}, got {got}; "
                "isopos.sequence(t), isopos.grid(...) and isopos.product(...) build them"
            )


@dataclass(frozen=True)
class Line(Group):
    """The integers under addition (or, with ``real``, the real numbers: float32 and float64 positions are taken too).

    Example:
        >>> Line().compose(sequence(3), sequence(3)).tolist()
        [[0], [2], [4]]
    """

    real: bool = False

    @property
    def columns(self) -> int:
        """One coordinate."""
        return 1

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""
        return x + y

    def inverse(self, x: Tensor) -> Tensor:
        """-x."""
        return -x

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """|x - y|."""
        return (x - y).abs()[..., 0]

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Integers from -500 to 500."""
        return torch.randint(-500, 501, (*shape, 1), generator=generator)

    def check(self, x: Tensor) -> None:
        """One column of integers (or, with ``real``, of float32 or float64)."""
        self._check_columns(x)
        if x.dtype not in INTEGER_DTYPES and not (self.real and x.dtype in REAL_DTYPES):
            kind = "integers, float32 or float64" if self.real else "integers"
            raise ValueError(f"positions: expected {kind}, got {x.dtype}; isopos.sequence(t) builds integer positions")


@dataclass(frozen=True)
class Ring(Group):
    """The integers modulo ``period``: hours of a day, residues of a cyclic molecule, angles.

    Example:
        >>> Ring(12).compose(torch.tensor([[10]]), torch.tensor([[5]])).tolist()
        [[3]]
    """

    period: int

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period: expected at least 1, got {self.period}")

    @property
    def columns(self) -> int:
        """One coordinate."""
        return 1

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        """(x + y) modulo the period."""
        return (x + y) % self.period

    def inverse(self, x: Tensor) -> Tensor:
        """-x modulo the period."""
        return -x % self.period

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The shorter way round."""
        forward = (y - x)[..., 0] % self.period
        return torch.minimum(forward, self.period - forward)

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Elements 0 to period - 1."""
        return torch.randint(self.period, (*shape, 1), generator=generator)

    def check(self, x: Tensor) -> None:
        """One column of integers; any integer names the element it is congruent to."""
        self._check_columns(x)
        if x.dtype not in INTEGER_DTYPES:
            raise ValueError(f"positions: expected integers for {self}, got {x.dtype}")


@dataclass(frozen=True)
class Product(Group):
    """Tuples of elements, one of each part; coordinates side by side. A grid of n axes is a product of n lines.

    Example:
        >>> Product((Line(), Ring(4))).compose(torch.tensor([[1, 3]]), torch.tensor([[1, 3]])).tolist()
        [[2, 2]]
    """

    parts: tuple[Group, ...]

    @property
    def columns(self) -> int:
        """The sum of the parts' coordinates."""
        return sum(part.columns for part in self.parts)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The coordinates of each part."""
        return x.split([part.columns for part in self.parts], -1)

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        """Part by part."""
        pairs = zip(self.parts, self.split(x), self.split(y), strict=True)
        return torch.cat([part.compose(a, b) for part, a, b in pairs], -1)

    def inverse(self, x: Tensor) -> Tensor:
        """Part by part."""
        return torch.cat([part.inverse(a) for part, a in zip(self.parts, self.split(x), strict=True)], -1)

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of the parts' distances."""
        pairs = zip(self.parts, self.split(x), self.split(y), strict=True)
        return torch.stack([part.distance(a, b) for part, a, b in pairs]).sum(0)

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Random elements of each part."""
        return torch.cat([part.random(*shape, generator=generator) for part in self.parts], -1)

    def check(self, x: Tensor) -> None:
        """Each part's own check."""
        self._check_columns(x)
        for part, a in zip(self.parts, self.split(x), strict=True):
            part.check(a)


def sequence(t: int, *, device: torch.device | str | None = None) -> Tensor:
    """Positions 0 to t - 1 of a sequence: int64 ``[t 1]``. Add an integer to shift them.

    Example:
        >>> sequence(3).tolist()
        [[0], [1], [2]]
    """
    return torch.arange(_count("t", t), device=device)[:, None]


def ring(period: int, *, device: torch.device | str | None = None) -> Tensor:
    """Every element of ``Ring(period)``, once: int64 ``[period 1]``."""
    return sequence(_count("period", period, least=1), device=device)


def grid(*sizes: int, device: torch.device | str | None = None) -> Tensor:
    """Every point of a grid, last axis fastest: int64 ``[prod(sizes) len(sizes)]``.

    Example:
        >>> grid(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    if not sizes:
        raise ValueError("sizes: expected at least one axis, got none")
    return product(*(sequence(_count("size", n), device=device) for n in sizes))


def product(*parts: Tensor) -> Tensor:
    """Every combination of rows of the parts ``[t_i c_i]``, last fastest: ``[prod(t_i) sum(c_i)]``.

    Example:
        >>> product(sequence(2), grid(1, 2)).tolist()
        [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    """
    for part in parts:
        if part.ndim != 2:
            raise ValueError(f"product: expected parts [t c], got {list(part.shape)}")
    lengths = [len(part) for part in parts]
    after = [math.prod(lengths[i + 1 :]) for i in range(len(parts))]
    before = [math.prod(lengths[:i]) for i in range(len(parts))]
    columns = [p.repeat_interleave(a, 0).repeat(b, 1) for p, a, b in zip(parts, after, before, strict=True)]
    return torch.cat(columns, -1)


def _count(name: str, value: int, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value
