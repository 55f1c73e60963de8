"""Relative terms: the values that relative biases return. A term adds to the score of a query and a key by their offset."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isopos.deprecation import renamed
from isopos.exact import describe, offsets, to_float64
from isopos.ops import clipped

__all__ = ["Clipped", "DistanceKernel", "Indexed", "Numbers", "Offsets", "Term"]

__getattr__ = renamed(__name__, {"Kernel": "isopos.terms.DistanceKernel"})

PairFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # arguments: indices of sample, query and key
SIDES = ("query", "key", "none", "value")


@dataclass(frozen=True, eq=False, repr=False)
class Term(ABC):
    """Rows of a table, one per bucket of offsets; a pair of tokens takes the row of its offset's bucket.

    Args:
        table: ``[h n d]`` for n buckets, or ``[h n]`` if side is "none".
        side: Use of a row: "query" adds <q_i, row> to the score, "key" <k_j, row>, "none" the number itself; "value" adds
            the row to v_j, for this query.
    """

    table: Tensor
    side: str

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ValueError(f"side: expected one of {', '.join(SIDES)}, got {self.side!r}")

    def __repr__(self) -> str:
        return describe(self)

    @property
    def heads(self) -> int:
        """Number of heads with separate tables."""
        return len(self.table)

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Samples, queries and keys: ``[*b t s]``."""

    def index(self) -> Tensor:
        """The bucket of each query and key: int64 ``[*b t s]``."""
        raise TypeError(f"index: expected a term with buckets, got a {type(self).__name__}, which has none")

    def bucket(self, samples: int) -> PairFunction | None:
        """A function for the bucket of one pair of tokens of `samples` samples; None if no such function exists."""
        return None

    @abstractmethod
    def part(self, rows: slice, columns: slice) -> "Term":
        """The term of some queries and keys."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores to add for queries ``[*b h t d]`` and keys ``[*b h s d]``: ``[*b h t s]``."""
        index = self.index().unsqueeze(-3)
        if self.side == "none":
            rows = self.table[:, None]
        elif self.side == "query":
            rows = q @ self.table.mT.to(q.dtype)
        else:
            rows, index = k @ self.table.mT.to(q.dtype), index.mT
        shape = torch.broadcast_shapes(rows.shape[:-1], index.shape[:-1])
        added = rows.expand(*shape, -1).gather(-1, index.expand(*shape, -1))
        return added.mT if self.side == "key" else added

    def values(self, weight: Tensor) -> Tensor:
        """Outputs to add for weights ``[*b h t s]``: ``[*b h t e]``."""
        index = self.index().unsqueeze(-3).expand(weight.shape)
        bucketed = weight.new_zeros(*weight.shape[:-1], self.table.shape[-2]).scatter_add(-1, index, weight)
        return bucketed @ self.table.to(weight.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Indexed(Term):
    """A term with the buckets of all pairs, int64 ``[*b t s]``."""

    buckets: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.buckets.shape

    def index(self) -> Tensor:
        return self.buckets

    def part(self, rows: slice, columns: slice) -> Term:
        return replace(self, buckets=self.buckets[..., rows, columns])

    def bucket(self, samples: int) -> PairFunction:
        buckets = self.buckets.expand(samples, *self.buckets.shape[-2:])
        return lambda b, i, j: buckets[b, i, j]


@dataclass(frozen=True, eq=False, repr=False)
class _OfPositions(Term, ABC):
    """A lazily evaluated term of queries at x ``[*b t c]`` and keys at y ``[*b s c]``."""

    x: Tensor
    y: Tensor

    @property
    def shape(self) -> torch.Size:
        samples = torch.broadcast_shapes(self.x.shape[:-2], self.y.shape[:-2])
        return torch.Size((*samples, self.x.shape[-2], self.y.shape[-2]))

    def part(self, rows: slice, columns: slice) -> Term:
        return replace(self, x=self.x[..., rows, :], y=self.y[..., columns, :])

    def offsets(self) -> Tensor:
        """The key's position minus the query's on a line, for all pairs ``[*b t s]``."""
        return offsets(self.x, self.y)

    def offset(self, samples: int) -> PairFunction:
        """A function for the offset of one pair on a line."""
        wide = (to_float64(a) if a.is_floating_point() else a.long() for a in (self.x, self.y))
        queries, keys = (a[..., 0].expand(samples, -1) for a in wide)
        return lambda b, i, j: keys[b, j] - queries[b, i]


@dataclass(frozen=True, eq=False, repr=False)
class Offsets(_OfPositions):
    """A term of offsets on a line, with lazily evaluated buckets.

    Args:
        table, side: As of `Term`.
        x: Positions of queries ``[*b t 1]``, integers.
        y: Positions of keys ``[*b s 1]``.
        buckets: Buckets of the offsets -m, ..., m, int64 ``[2m+1]``; larger offsets share the outermost ones.
    """

    buckets: Tensor

    def index(self) -> Tensor:
        return self._looked_up(self.offsets())

    def bucket(self, samples: int) -> PairFunction:
        offset = self.offset(samples)
        return lambda b, i, j: self._looked_up(offset(b, i, j))

    def _looked_up(self, offset: Tensor) -> Tensor:
        m = len(self.buckets) // 2
        return self.buckets[offset.long().clamp(-m, m) + m]


@dataclass(frozen=True, eq=False, repr=False)
class DistanceKernel(_OfPositions):
    """A lazily evaluated function of the offset t, with a table ``[h 2]`` of r1 and r2: -r1 log(1 + r2 |t|), or -r1 |t|^r2.

    Args:
        table, side: The table; "none".
        x: Positions of queries ``[*b t 1]``.
        y: Positions of keys ``[*b s 1]``.
        kernel: "log" or "power".
    """

    kernel: str

    def distance(self, samples: int) -> PairFunction:
        """A function for the distance of one pair, rounded once, for tokens of `samples` samples."""
        offset = self.offset(samples)
        return lambda b, i, j: offset(b, i, j).abs().to(self.table.dtype)

    def number(self, distance: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        """The kernel at a distance."""
        return -r1 * (torch.log1p(r2 * distance) if self.kernel == "log" else distance**r2)

    def numbers(self) -> Tensor:
        """The kernel of each pair: ``[*b h t s]``."""
        distance = self.offsets().abs().to(self.table.dtype)
        return self.number(distance.unsqueeze(-3), *(a[:, None, None] for a in self.table.unbind(-1)))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.numbers()


@dataclass(frozen=True, eq=False, repr=False)
class Numbers(Term):
    """A table ``[*b h t s]`` with one number per query and key, of side "none", for functions without buckets."""

    side: str = "none"

    @property
    def heads(self) -> int:
        return self.table.shape[-3]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.table.shape[:-3], *self.table.shape[-2:]))

    def part(self, rows: slice, columns: slice) -> Term:
        return replace(self, table=self.table[..., rows, columns])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.table


@dataclass(frozen=True, eq=False, repr=False)
class Clipped(_OfPositions):
    """A term of offsets clipped to -reach, ..., reach on each axis, which linear attention sums in linear time.

    Args:
        table, side: As of `Term`.
        x: Positions of queries ``[*b t c]``.
        y: Positions of keys ``[*b s c]``.
        reach: R.
        outside: Number of leading tokens without a position, with two separate buckets.
    """

    reach: int
    outside: int = 0

    def index(self) -> Tensor:
        return clipped.buckets(self.x, self.y, self.reach, self.outside)

    def part(self, rows: slice, columns: slice) -> Term:
        if self.outside:  # the first rows and columns
            return Indexed(self.table, self.side, self.index()[..., rows, columns])
        return super().part(rows, columns)

    def bucket(self, samples: int) -> PairFunction | None:
        if self.outside or self.x.shape[-1] > 1:
            return None
        offset, reach, real = self.offset(samples), self.reach, self.x.is_floating_point() or self.y.is_floating_point()

        def bucket(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            nearest = (offset(b, i, j) + 0.5).floor() if real else offset(b, i, j)  # as in `clipped.buckets`
            return nearest.clamp(-reach, reach).long() + reach

        return bucket
