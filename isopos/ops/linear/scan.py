"""Scans over the tokens of some heads: their plan, their operands with gradients, and the base class of scans."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isopos.ops.linear.autograd import Kernel
from isopos.ops.linear.division import EPS, clamp, count
from isopos.ops.linear.features import Buffers, Decays, Features, Sums
from isopos.ops.slices import ALL, Slices

CHUNK = 64  # tokens whose weights are formed explicitly
LEAST, MOST = 4, 16  # chunks per group; the state before each group is saved for the backward pass
MANY = 128  # maximum on GPUs, for few launches; in larger groups carrying states from chunk to chunk is half the work
GROUP, WIDE = 1 << 17, 1 << 24  # features of a group, on a CPU and on GPUs; about fifteen buffers of this size are in use


class Span(NamedTuple):
    """Tokens of a chunk group, in chunks of equal length."""

    start: int
    stop: int
    chunk: int

    @property
    def slices(self) -> Slices:
        """These tokens of all heads and samples."""
        return Slices((), slice(None), slice(self.start, self.stop))


class GroupPlan:
    """How ``[*b h t d]`` is cut into groups of about GROUP features: as many heads as fit, then more tokens.

    With ``cut=False``, for scans without such buffers, all tokens of all heads are one group, one per index of the first
    axes of samples.

    Attributes:
        slices: Heads and samples that scan together, one `Slices` per scan.
        spans: Chunk groups of a scan: whole chunks, then the remaining tokens.
        whole: Whether there is only one scan of one group.
    """

    def __init__(self, x: Tensor, *, cut: bool = True):
        self.whole = not cut and x.ndim <= 4
        if not cut:
            self.spans, self.sizes, self.slices = [Span(0, x.shape[-2], CHUNK)], [x.shape[-2]], [ALL]
            if not self.whole:
                samples = itertools.product(*(_slices(n, 1) for n in x.shape[:-4]))
                self.slices = [Slices((*part, slice(None)), slice(None), slice(None)) for part in samples]
            return
        *batch, heads, length, width = x.shape
        whole, chunk = length - length % CHUNK, CHUNK * width
        features, most = (GROUP, MOST) if x.device.type == "cpu" else (WIDE, MANY)
        size = max(1, features // chunk)  # in chunks
        some = max(1, size // min(LEAST, -(-length // CHUNK)))  # heads of all samples
        per_head = -(-heads // -(-heads // min(heads, some)))
        steps = [*(1 for _ in batch[:-1]), min(batch[-1], max(1, some // per_head)), per_head]
        parts = itertools.product(*(_slices(n, step) for n, step in zip((*batch, heads), steps, strict=True)))
        self.slices = [Slices(part[:-1], part[-1], slice(None)) for part in parts]
        count = min(most, max(LEAST, size // (steps[-1] * steps[-2])))
        self.spans = [Span(part.start, part.stop, CHUNK) for part in _slices(whole, count * CHUNK)]
        self.spans += [Span(whole, length, length - whole)] if whole < length else []
        self.sizes = [span.stop - span.start for span in self.spans]


def split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """x ``[*b h t .]``, split into chunk groups."""
    return x.split(sizes, -2) if len(sizes) > 1 else (x,)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@dataclass(frozen=True)
class ChunkLayout:
    """The shape of a chunk group, stored as ``[n c .]`` with n = samples * heads * chunks per head."""

    leading: tuple[int, ...]  # samples and heads
    count: int  # chunks per head
    chunk: int

    def rows(self, x: Tensor) -> Tensor:
        """x ``[*b h t .]`` as chunks ``[n c .]``."""
        return x.reshape(-1, self.chunk, x.shape[-1])

    def apart(self, rows: Tensor) -> Tensor:
        """Chunks ``[n c .]`` with separate axes: ``[*b h n c .]``."""
        return rows.view(*self.leading, self.count, *rows.shape[1:])

    def tokens(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`."""
        return rows.view(*self.leading, -1, rows.shape[-1])


class Operand:
    """One input of a scan and its features; in the backward pass also the gradients of both.

    `needs` tells which tensors of the features need a gradient; `grads` are buffers for them, None for the others.
    """

    def __init__(self, x: Tensor, features: Features, needs: Sequence[bool], buffers: Buffers):
        self.x, self.features, self.needs, self.buffers = x, features, needs, buffers
        self.grad: Tensor | None = None
        self.grads: Sequence[Tensor | None] = [None] * len(needs)
        self.first = True  # whether no gradient has been written yet
        self.direct = features.direct and not any(needs)
        self.table = features.table(needs)  # the only tensor that needs a gradient, if kernels compute it in closed form

    def open(self) -> None:
        """Allocate buffers for gradients."""
        self.grad = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        pairs = zip(self.features.tensors, self.needs, strict=True)
        self.grads = [torch.zeros_like(tensor) if need else None for tensor, need in pairs]

    def at(self, slices: Slices) -> "Operand":
        """The operand of some heads and samples."""
        if slices is ALL:
            return self
        part = Operand(slices.of(self.x, -3, -2), self.features.part(slices), self.needs, self.buffers)
        part.grads = self._grads(slices)
        part.grad = None if self.grad is None else slices.of(self.grad, -3, -2)
        return part

    def split(self, sizes: Sequence[int]) -> None:
        """Split tokens into chunk groups."""
        self.xs = split(self.x, sizes)
        self.grad_xs = None if self.grad is None else split(self.grad, sizes)

    def described(self, span: Span | None = None) -> Features | None:
        """The features of these tokens, or of all, if they and needed gradients have a closed form; otherwise None."""
        if not self.features.fused(self.needs):
            return None
        return (self.features if span is None else self.features.part(span.slices)).without_idle_mask()

    def read(self, n: int, span: Span) -> tuple[Tensor, ...]:
        """The features of group n ``[*b h t .]``, contiguous."""
        x, self.here = self.xs[n], self.features.part(span.slices)
        if self.direct:
            self.here = self.here.without_idle_mask()
            return self.here.write(x, self.buffers)
        back = self.grad is not None
        tensors = [tensor.detach() for tensor in self.here.tensors]
        self.leaves = [x.detach(), *(tensor for tensor, need in zip(tensors, self.needs, strict=True) if need)]
        for leaf in self.leaves:
            leaf.requires_grad_(back)
        with torch.set_grad_enabled(back):
            self.outputs = self.here.replace(tensors)(self.leaves[0])
        return tuple(out.detach().contiguous() for out in self.outputs)

    def vjp_table(self, span: Span, grad: Tensor) -> None:
        """Add the gradient ``[*b h t 2f]`` of the table of these tokens, one per sample and head."""
        assert self.table is not None
        buffer = self._grads(span.slices)[self.table]
        assert buffer is not None
        buffer.add_(grad.unflatten(-1, (-1, 2)).sum_to_size(buffer.shape))

    def vjp(self, n: int, span: Span, grads: Sequence[Tensor]) -> None:
        """VJP: add the gradients of group n, which was read last, given gradients of its features."""
        assert self.grad_xs is not None
        derivative = None
        if self.direct:
            grad_x, derivative = self.here.adjoint(self.xs[n], grads, self.buffers)
        else:
            pairs = [(out, grad) for out, grad in zip(self.outputs, grads, strict=True) if out.requires_grad]
            grad_x, *learned = torch.autograd.grad([o for o, _ in pairs], self.leaves, [g for _, g in pairs])
            for buffer, grad in zip([x for x in self._grads(span.slices) if x is not None], learned, strict=True):
                buffer.add_(grad)
        if derivative is not None:
            out = self.grad_xs[n]
            torch.mul(grad_x, derivative, out=out) if self.first else out.addcmul_(grad_x, derivative)
        elif self.first:
            self.grad_xs[n].copy_(grad_x)
        else:
            self.grad_xs[n].add_(grad_x)

    def _grads(self, slices: Slices) -> list[Tensor | None]:
        """Views of `grads` for some tokens, heads and samples."""
        if not any(self.needs):
            return [None] * len(self.needs)
        pairs = zip(self.features.tensors, self.grads, strict=True)
        views = self.features.replace([tensor if grad is None else grad for tensor, grad in pairs]).part(slices).tensors
        return [view if need else None for view, need in zip(views, self.needs, strict=True)]


def operands_of(sums: Sums, needs: Sequence[bool]) -> tuple[list[Operand], Buffers]:
    """The inputs with their features, and shared buffers; `needs` as in `Kernel.forward`."""
    rest, buffers, result = iter(needs[5:]), Buffers(sums.q, sums.dtype), []
    for x, features in zip(sums.inputs, sums.features, strict=True):
        result.append(Operand(x, features, [next(rest) for _ in features.tensors], Buffers(x, buffers.dtype, buffers)))
    return result, buffers


class OutputGradient:
    """The gradient of the output; for a division also the output and its denominator."""

    def __init__(self, grad: Tensor, out: Tensor | None = None, denominator: Tensor | None = None):
        self.all = (grad, out, denominator)

    def at(self, slices: Slices) -> "OutputGradient":
        """The gradient for some heads and samples."""
        grad, *rest = self.all
        return OutputGradient(slices.of(grad, -3, -2), *(None if x is None else slices.of(x, -3, -2) for x in rest))

    def split(self, sizes: Sequence[int]) -> None:
        """Split tokens into chunk groups."""
        self.parts = [x if x is None else split(x, sizes) for x in self.all]

    def rows(self, n: int, layout: ChunkLayout, values: int, buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        """Gradients of the sums of group n ``[n c e]``, and negative gradients of its denominators ``[n c 1]`` or None."""
        grad, out, denominator = (None if x is None else x[n] for x in self.parts)
        assert grad is not None
        sums = buffers("grad", *grad.shape[:-1], values)
        if out is None or denominator is None:
            sums.copy_(grad[..., :values])
            return layout.rows(sums), None if grad.shape[-1] == values else layout.rows(-grad[..., values:])
        torch.div(grad, denominator, out=sums)
        neg_grad = torch.mul(sums, out, out=buffers("product", *sums.shape)).sum(-1, keepdim=True)
        return layout.rows(sums), layout.rows(neg_grad.masked_fill_(denominator.abs() <= EPS, 0))


Groups = Iterator[tuple[int, Tensor | None, Tensor | None, list[Tensor]]]


@dataclass(eq=False)
class Scan(ABC):
    """One scan over the tokens of some heads, forward and backward. Gradients are added to the operands.

    With `reverse` it goes from the last token to the first and leaves out the diagonal.
    """

    operands: Sequence[Operand]
    plan: GroupPlan
    g: Decays
    buffers: Buffers
    denominator: bool
    reverse: bool = False

    def __post_init__(self) -> None:
        self.leading = tuple(self.operands[0].x.shape[:-2])
        self.order = range(len(self.plan.spans))[:: -1 if self.reverse else 1]
        self.of_keys = self.plan_of_keys()
        for operand, plan in zip(self.operands, (self.plan, self.of_keys, self.of_keys), strict=True):
            operand.split(plan.sizes)

    def plan_of_keys(self) -> GroupPlan:
        """The plan of keys and values."""
        return self.plan

    @property
    def states(self) -> int:
        """Number of states that `forward` yields."""
        return len(self.plan.spans)

    @abstractmethod
    def forward(self, outs: Sequence[Tensor], denominators: Sequence[Tensor], *, keep: bool, divide: bool) -> Groups:
        """For each group: index, sums ``[*b h t e]`` and denominators ``[*b h t 1]`` in buffers, and the states before it.

        Sums are None if they are already in `outs` and `denominators`, divided if `divide`.
        """

    @abstractmethod
    def backward(self, grad_output: OutputGradient, states: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        """Add gradients of the operands and of the log decays, given the states that `forward` yielded."""

    def _empty(self, d: int, e: int, width: int) -> list[Tensor]:
        """Initial states: zero sums of k v^T ``[*b h d e]`` and, for a denominator, of k ``[*b h 1 width]``."""
        like, shapes = self.operands[0].x, [(d, e)] + [(1, width)] * self.denominator
        return [like.new_zeros(*self.leading, *shape, dtype=self.buffers.dtype) for shape in shapes]


class ScanKernel(Kernel, ABC):
    """A kernel that scans over chunk groups. It saves one state per group and recomputes everything else."""

    @abstractmethod
    def scans(self, operands: Sequence[Operand], plan: GroupPlan, g: Decays, buffers: Buffers, sums: Sums) -> list[Scan]:
        """Scans over the same heads, whose results are added."""

    def plan(self, sums: Sums, operands: Sequence[Operand]) -> GroupPlan:
        """The plan of the operands."""
        return GroupPlan(sums.q)

    def forward(self, sums: Sums, needs: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        divide, keep, e = sums.denominator == "divide", any(needs), sums.v.shape[-1]
        operands, buffers = sums.notes.get("operands") or operands_of(sums, needs)
        out = sums.q.new_empty(*sums.q.shape[:-1], e + (sums.denominator == "column"), dtype=buffers.dtype)
        denominator = out.new_empty(*sums.q.shape[:-1], 1) if divide else out[..., e:]
        states: list[Tensor] = []
        for slices, scans in self._scans(sums, operands, buffers):
            outs = [slices.of(x, -3, -2) for x in (out[..., :e], denominator)]
            states += _forward(scans, *outs, divide=divide, keep=keep)
        return out, [out, denominator, *states] if divide else states

    def backward(self, sums: Sums, saved: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        operands, buffers = operands_of(sums, needs)
        for operand in operands:
            operand.open()
        first = 2 if sums.denominator == "divide" else 0
        grad_output, states = OutputGradient(grad, *saved[:first]), iter(saved[first:])
        g, shape = sums.g if sums.g is not None and any(needs[3:5]) else (), sums.q.shape[:-2]
        grad_g = [x.new_zeros(*shape, x.shape[-1]) for x in g]
        for slices, scans in self._scans(sums, operands, buffers):
            _backward(scans, grad_output.at(slices), states, [slices.of(x, -2, -1) for x in grad_g])
        of_tensors = [x for operand in operands for x in operand.grads]
        return [*(operand.grad for operand in operands), *(grad_g or (None, None)), *of_tensors]

    def _scans(self, sums: Sums, operands: Sequence[Operand], buffers: Buffers) -> Iterator[tuple[Slices, list[Scan]]]:
        plan = self.plan(sums, operands)
        for slices in plan.slices:
            g = None
            if sums.g is not None:
                keys = slices.of(sums.g[1], -2, -1)
                g = (keys if sums.g[0] is sums.g[1] else slices.of(sums.g[0], -2, -1), keys)
            yield slices, self.scans([operand.at(slices) for operand in operands], plan, g, buffers, sums)


def _forward(scans: Sequence[Scan], out: Tensor, denominator: Tensor, *, divide: bool, keep: bool) -> list[Tensor]:
    """Write sums and denominators of all scans of the same heads, divided after the last; return the states if `keep`."""
    states: list[Tensor] = []
    outs, denominators = (split(x, scans[0].plan.sizes) for x in (out, denominator))
    for scan in scans:
        for n, total, weights, before in scan.forward(outs, denominators, keep=keep, divide=divide and scan is scans[-1]):
            states += before if keep else []
            if total is None:
                if divide and scan is scans[-1]:
                    count(denominators[n])
                continue
            if scan is not scans[0]:
                total = total.add_(outs[n])
                weights = weights if weights is None else weights + denominators[n]
            if weights is not None and divide and scan is scans[-1]:
                weights = clamp(weights)
                torch.div(total, weights, out=outs[n])
            else:
                outs[n].copy_(total)
            if weights is not None:
                denominators[n].copy_(weights)
    return states


def _backward(scans: Sequence[Scan], grad_output: OutputGradient, states: Iterator[Tensor], grad_g: list[Tensor]) -> None:
    """Add the gradients of all scans of the same heads; each scan takes its states from the iterator."""
    for scan in scans:
        scan.backward(grad_output, [[next(states) for _ in range(1 + scan.denominator)] for _ in range(scan.states)], grad_g)
        for operand in scan.operands:
            operand.first = False
