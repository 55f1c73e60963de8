"""One sequence over the processes of a group, through PyTorch's distributed package: collectives with their gradients.

Process r of a group holds shard r of the tokens. Shards are contiguous, follow the order of ranks, and may differ in length;
with ``Ring(group, zigzag=True)`` a shard has two pieces, one from each half of the sequence. All processes make the same
calls in the same order, and all of them run the backward pass, whatever their losses are.

A collective starts, and `Pending.wait` returns its result; code between the two overlaps with it. The backward pass runs the
transpose: it starts where `wait` was called and ends where the collective started, so the gradients of that code overlap
with it as well. Tensors of several dtypes travel in one message, as bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isopos.exact import once

__all__ = ["Pending", "Ring", "Shards", "Traffic", "cut", "joined", "shards", "summed"]


class Traffic:
    """Counter of the bytes that this process sends to others inside ``with``, backward passes included.

    Examples:
        >>> with Traffic() as traffic:
        ...     pass  # attention with group=...
        >>> traffic.sent, traffic.messages
        (0, 0)
    """

    def __init__(self) -> None:
        self.sent = self.messages = 0

    def count(self, bytes: int) -> None:
        """Count one message."""
        self.sent += bytes
        self.messages += 1

    def __enter__(self) -> "Traffic":
        self.token = _TRAFFIC.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _TRAFFIC.reset(self.token)


_TRAFFIC: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


@dataclass(frozen=True)
class Ring:
    """A process group for ring attention: softmax attention holds the keys of one other process at a time.

    Args:
        group: A `ProcessGroup`, or a `DeviceMesh` of one dimension.
        zigzag: Whether process r of n holds pieces r and 2n - 1 - r of 2n, as `cut` returns them. All processes then have
            the same work in causal attention. By default shards are contiguous, and the last process has twice the mean.
    """

    group: Any
    zigzag: bool = False


class Shards:
    """The shards of one sequence, seen from this process.

    Args:
        group: A `ProcessGroup`, or a `DeviceMesh` of one dimension, or a `Ring`.
        count: Number of tokens of this process.
        device: Device of the tokens.

    Attributes:
        rank: Rank of this process in the group.
        size: Number of processes.
        ring: Whether softmax attention sees the keys of one other process at a time.
        zigzag: Whether shards have two pieces.
    """

    def __init__(self, group: Any, count: int, device: torch.device):
        self.ring, self.zigzag = isinstance(group, Ring), isinstance(group, Ring) and group.zigzag
        group = group.group if isinstance(group, Ring) else group
        if hasattr(group, "get_group"):
            if group.ndim != 1:
                raise ValueError(
                    f"group: expected a DeviceMesh of one dimension, got one of {group.ndim}; take one, mesh['sequence']"
                )
            group = group.get_group()
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"group: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
        self.group, self.rank, self.size, self.count, self.device = group, group.rank(), group.size(), count, device
        self._lengths: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each process; the first access sends one small message."""
        if not self._lengths:  # no cached_property, whose lock is shared by threads that may be processes of a group
            self._lengths = tuple(self.gather(torch.tensor([self.count], device=self.device)).wait()[0].flatten().tolist())
        return self._lengths

    @property
    def start(self) -> int:
        """Index of this process's first token in the sequence."""
        return self.pieces[self.rank][0][0]

    @property
    def pieces(self) -> list[tuple[tuple[int, int], ...]]:
        """First index and last + 1 of the contiguous pieces of each shard: one, or two with `zigzag`."""
        if not self.zigzag:
            return [(border,) for border in pairwise(accumulate(self.lengths, initial=0))]
        first = list(pairwise(accumulate(((count + 1) // 2 for count in self.lengths), initial=0)))
        second = pairwise(accumulate((count // 2 for count in reversed(self.lengths)), initial=first[-1][1]))
        return list(zip(first, reversed(list(second)), strict=True))

    @property
    def index(self) -> Tensor:
        """Index in the sequence of each token of this process: int64 ``[t]``."""
        return torch.cat([torch.arange(*piece, device=self.device) for piece in self.pieces[self.rank]])

    @property
    def total(self) -> int:
        """Length of the sequence."""
        return sum(self.lengths)

    def gather(self, *tensors: Tensor) -> "Pending":
        """Tensors of one shape on all processes: ``[size ...]`` each."""
        return Pending.start(_Gather(self), tensors)

    def add(self, *tensors: Tensor) -> "Pending":
        """Sums over all processes of tensors of one dtype."""
        return Pending.start(_Add(self), tensors)

    def before(self, x: Tensor) -> Tensor:
        """Sum of x over the processes before this one."""
        (x,) = self.gather(x).wait()
        return x[: self.rank].sum(0)

    def tokens(
        self, tensors: Sequence[Tensor], axes: Sequence[int], reach: Callable[[int, int], tuple[int, int]]
    ) -> "Pending":
        """Fetch the range of tokens that each process needs.

        Args:
            tensors: Tensors of this process's tokens.
            axes: Axis of tokens of each tensor.
            reach: Maps the first index and last index + 1 of a process's tokens to the range that it needs; the same
                function in all processes.
        """
        rows = [x.movedim(axis, 0) for x, axis in zip(tensors, axes, strict=True)]
        return Pending.start(
            _Tokens(self, reach), rows, lambda results: [x.movedim(0, axis) for x, axis in zip(results, axes, strict=True)]
        )

    def ordered(self, x: Tensor, axis: int) -> Tensor:
        """Tokens of all processes, sorted from the order of ranks into the order of the sequence."""
        if not self.zigzag:
            return x
        index = torch.cat([torch.arange(*piece) for pieces in self.pieces for piece in pieces])
        return x.index_select(axis, index.argsort().to(x.device))

    def pass_on(
        self, tensors: Sequence[Tensor], hop: int, incoming: int, traffic: Traffic | None
    ) -> Callable[[], list[Tensor]]:
        """Start to send rows to process rank + hop of the ring and to receive rows from rank - hop, without a graph.

        Args:
            tensors: Rows to send ``[n ...]``.
            hop: Distance in the ring, modulo its size.
            incoming: Number of rows to receive.
            traffic: Counter of the bytes, or None.

        Returns:
            A function that waits for the received rows and returns them.
        """
        like, rows = [(x.shape[1:], x.dtype) for x in tensors], _packed(tensors)
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + hop) % self.size], received[(self.rank - hop) % self.size] = len(rows), incoming
        buffer = rows.new_empty(incoming, rows.shape[1])
        work: Any = dist.all_to_all_single(buffer, rows, received, sent, group=self.group, async_op=True)
        if traffic is not None:
            traffic.count(rows.nbytes)

        def wait() -> list[Tensor]:
            work.wait()
            return _unpacked(buffer, like)

        return wait


def cut(x: Tensor, group: Any, axis: int = 1) -> Tensor:
    """This process's shard of a whole sequence; lengths of shards differ by at most one token.

    Args:
        x: The whole sequence, the same in all processes.
        group: A `ProcessGroup`, a one-dimensional `DeviceMesh`, or a `Ring`, whose `zigzag` decides which tokens are taken.
        axis: Axis of tokens.
    """
    over = Shards(group, x.shape[axis], x.device)
    if not over.zigzag:
        return x.tensor_split(over.size, axis)[over.rank]
    pieces = x.tensor_split(2 * over.size, axis)
    return torch.cat((pieces[over.rank], pieces[-1 - over.rank]), axis)


def joined(x: Tensor, group: Any, axis: int = 1) -> Tensor:
    """The whole sequence, gathered from the shards of all processes: the inverse of `cut`. Returns x without a group."""
    if (over := shards(group, x.shape[axis], x.device)) is None:
        return x
    return over.ordered(over.tokens([x], [axis], lambda start, stop: (0, over.total)).wait()[0], axis)


def summed(group: Any, device: torch.device, *numbers: float) -> list[float]:
    """Sums of numbers over the processes of a group, in float64. Returns the numbers without a group."""
    if (over := shards(group, 1, device)) is None:
        return [*map(float, numbers)]
    local = torch.tensor(numbers, dtype=torch.float64, device=device)
    return over.add(local).wait()[0].tolist()


def traffic_now() -> Traffic | None:
    """The active counter of bytes, or None."""
    return _TRAFFIC.get()


def shards(group: Any, count: int, device: torch.device) -> Shards | None:
    """Shards of a sequence over a group; None without a group, or for a group of one process."""
    if group is None:
        return None
    over = group if isinstance(group, Shards) else Shards(group, count, device)
    return over if over.size > 1 else None


class _Collective(ABC):
    """A collective and its transpose. Each starts and returns a buffer, which is read when its work handle is done."""

    like: list[tuple[torch.Size, torch.dtype]]  # of rows of the results

    def __init__(self, shards: Shards):
        self.shards, self.group = shards, shards.group

    @abstractmethod
    def send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        """Start the collective; return its buffer, its work handle and the number of bytes sent."""

    def receive(self, buffer: Tensor) -> list[Tensor]:
        """Results, read from the buffer."""
        return _unpacked(buffer, self.like)

    @abstractmethod
    def send_back(self, grads: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        """Start the transpose; return as `send`."""

    @abstractmethod
    def receive_back(self, buffer: Tensor) -> list[Tensor]:
        """Gradients of the tensors that `send` took."""

    def _like(self, tensors: Sequence[Tensor], first: int) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes without the first axes, and dtypes."""
        return [(x.shape[first:], x.dtype) for x in tensors]


class _Gather(_Collective):
    def send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        self.like, (row,) = self._like(tensors, 0), _packed([x[None] for x in tensors])
        buffer = row.new_empty(self.shards.size, len(row))
        return buffer, _all_gather(buffer, row, self.group), (self.shards.size - 1) * len(row)

    def send_back(self, grads: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        self.back, rows = self._like(grads, 1), _packed(grads)
        buffer = torch.empty_like(rows)
        work = dist.all_to_all_single(buffer, rows, group=self.group, async_op=True)
        return buffer, work, (self.shards.size - 1) * rows.shape[1]

    def receive_back(self, buffer: Tensor) -> list[Tensor]:
        return [x.sum(0) for x in _unpacked(buffer, self.back)]


class _Add(_Collective):
    def send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        self.shapes, buffer = [x.shape for x in tensors], torch.cat([x.reshape(-1) for x in tensors])
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        return buffer, work, 2 * (self.shards.size - 1) * buffer.nbytes // self.shards.size

    def receive(self, buffer: Tensor) -> list[Tensor]:
        parts = buffer.split([shape.numel() for shape in self.shapes])
        return [x.view(shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def send_back(self, grads: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        return self.send(grads)

    def receive_back(self, buffer: Tensor) -> list[Tensor]:
        return self.receive(buffer)


class _Tokens(_Collective):
    """All-to-all of rows of tensors ``[t ...]``: each process receives the rows that it needs."""

    def __init__(self, shards: Shards, reach: Callable[[int, int], tuple[int, int]]):
        super().__init__(shards)
        ends = list(accumulate(shards.lengths, initial=0))
        borders = list(pairwise(ends))
        needs = [(max(0, first), min(ends[-1], last)) for first, last in (reach(*border) for border in borders)]
        start, stop = borders[shards.rank]
        self.parts = [(max(start, first) - start, max(max(start, first), min(stop, last)) - start) for first, last in needs]
        first, last = needs[shards.rank]
        self.sent = [stop - start for start, stop in self.parts]
        self.received = [max(0, min(stop, last) - max(start, first)) for start, stop in borders]

    def send(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        self.like, rows = self._like(tensors, 1), _packed(tensors)
        return self._swap(torch.cat([rows[slice(*part)] for part in self.parts]), self.sent, self.received)

    def send_back(self, grads: Sequence[Tensor]) -> tuple[Tensor, Any, int]:
        self.back = self._like(grads, 1)
        return self._swap(_packed(grads), self.received, self.sent)

    def receive_back(self, buffer: Tensor) -> list[Tensor]:
        grads = []
        for rows in _unpacked(buffer, self.back):
            grad = rows.new_zeros(self.shards.count, *rows.shape[1:])
            for part, piece in zip(self.parts, rows.split(self.sent), strict=True):
                grad[slice(*part)] += piece
            grads.append(grad)
        return grads

    def _swap(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Any, int]:
        buffer = rows.new_empty(sum(received), rows.shape[1])
        work = dist.all_to_all_single(buffer, rows, received, sent, group=self.group, async_op=True)
        return buffer, work, (sum(sent) - sent[self.shards.rank]) * rows.shape[1]


@dataclass(eq=False)
class Pending:
    """A collective that has started."""

    collective: _Collective
    finish: Callable[[list[Tensor]], list[Tensor]]
    traffic: Traffic | None
    tensors: tuple[Tensor, ...] = ()
    underway: Any = field(default=None, repr=False)

    @classmethod
    def start(
        cls, collective: _Collective, tensors: Sequence[Tensor], finish: Callable[[list[Tensor]], list[Tensor]] = list
    ) -> "Pending":
        """Start a collective of tensors; `finish` changes its results."""
        pending = cls(collective, finish, _TRAFFIC.get())
        pending.tensors = _Start.apply(pending, *tensors)  # pyright: ignore[reportAttributeAccessIssue]
        return pending

    def wait(self) -> list[Tensor]:
        """The result, in the order of the tensors."""
        tensors, self.tensors = self.tensors, ()
        return self.finish(list(_Finish.apply(self, *tensors)))  # pyright: ignore[reportArgumentType]

    def begin(self, started: tuple[Tensor, Any, int]) -> None:
        """Store the buffer and work handle of a started collective, and count its bytes."""
        self.underway = started[:2]
        if self.traffic is not None:
            self.traffic.count(started[2])

    def end(self) -> Tensor:
        """Wait for the work; return the filled buffer."""
        (buffer, work), self.underway = self.underway, None
        work.wait()
        return buffer


class _Start(torch.autograd.Function):
    """Starts a collective; its backward pass ends the transpose."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> Any:
        ctx.pending, ctx.floating = pending, [x.is_floating_point() for x in tensors]
        pending.begin(pending.collective.send([x.detach() for x in tensors]))
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = iter(ctx.pending.collective.receive_back(ctx.pending.end()))
        return None, *(next(received) if floating else None for floating in ctx.floating)


class _Finish(torch.autograd.Function):
    """Ends a collective; its backward pass starts the transpose. The gradients it returns are placeholders."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> Any:
        ctx.pending, ctx.shapes = pending, [x.shape for x in tensors]
        return tuple(pending.collective.receive(pending.end()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("attention over a group", "a single process")
        floating = [x for x in grads if x is not None and x.is_floating_point()]
        ctx.pending.begin(ctx.pending.collective.send_back(floating))
        zeros = (None if x is None else x.new_zeros(()).expand(shape) for x, shape in zip(grads, ctx.shapes, strict=True))
        return None, *zeros


def _all_gather(buffer: Tensor, row: Tensor, group: Any) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before PyTorch 2.13
    return gather(buffer.view(-1), row, group=group, async_op=True)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Bytes ``[n bytes]`` of tensors ``[n ...]``."""
    shapes = [(len(x), x.shape[1:].numel()) for x in tensors]
    rows = [x.reshape(shape).contiguous() for x, shape in zip(tensors, shapes, strict=True)]
    rows = [x.as_strided(x.shape, (x.shape[1], 1)) for x in rows]  # axes of 1 have any stride
    return torch.cat([x.view(torch.uint8) for x in rows], 1)


def _unpacked(rows: Tensor, like: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """Tensors ``[n ...]`` from their bytes ``[n bytes]``, and the shapes and dtypes of their rows."""
    parts = rows.split([shape.numel() * dtype.itemsize for shape, dtype in like], 1)
    columns = zip(parts, like, strict=True)
    return [x.clone(memory_format=torch.contiguous_format).view(dtype).view(len(x), *shape) for x, (shape, dtype) in columns]
