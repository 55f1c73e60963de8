"""The C kernel on a CPU: features, positions, decay, float32 sums and division of a chunk in one pass.

The kernel computes features in closed form, and gradients of learned tables. PyTorch computes features of `ROWS`, of opaque
maps and of learned normals beforehand.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import is_exporting
from isopos.feature_maps import COMPILED, FeatureMap
from isopos.ops import library
from isopos.ops.library import (
    KIND,
    TYPES,
    Call,
    DecayArgument,
    Flags,
    Input,
    SizesArgument,
    StateArgument,
    ViewArgument,
    flat,
    view,
    whole,
)
from isopos.ops.linear.autograd import needs, operands, refusal, refuses_step
from isopos.ops.linear.chunks import CHUNKS
from isopos.ops.linear.containment import contained
from isopos.ops.linear.division import EPS, count, counted
from isopos.ops.linear.features import Buffers, Decays, Features, Sums
from isopos.ops.linear.operators import OPERATED, Operator, installed
from isopos.ops.linear.scan import CHUNK, GroupPlan, Groups, Operand, OutputGradient, Scan, ScanKernel, Span, operands_of
from isopos.ops.slices import Slices

PHI = {phi: n for n, phi in enumerate(COMPILED)}
ROWS = ("favor",)  # feature maps whose features PyTorch computes and the C kernel sums up
ONE = slice(0, 1)
TOKENS = 4 * CHUNK  # of a group, before which the state is saved


class CpuFeatures(NamedTuple):
    """Features that the C kernel computes: phi, a reflection, then a table. All tensors are float32 except an index."""

    phi: int
    kind: str  # of the table
    table: Tensor | None
    normal: Tensor | None
    mask: Tensor | None
    unrotated: bool

    @classmethod
    def of(cls, features: Features, x: Tensor) -> "CpuFeatures | None":
        """The closed form of features of x; None if the C kernel lacks it or widths do not fit, which PyTorch reports."""
        phi = PHI.get(features.phi) if isinstance(features.phi, FeatureMap) else None
        if phi is None or (closed := features.closed()) is None:
            return None
        if x.dtype not in TYPES or (features.dtype or x.dtype) != torch.float32:
            return None
        last, table, normal = closed
        for kind, tensor in ((last, table), ("reflection", normal)):
            if tensor is None:
                continue
            pairs = kind in ("rotation", "lift")
            width = (2 if kind == "rotation" else 1) * tensor.shape[-2 if pairs else -1]
            if width != x.shape[-1] or tensor.dtype != (torch.uint8 if kind == "gather" else torch.float32):
                return None
        return cls(phi, last, table, normal, features.mask, features.unrotated)

    @property
    def doubled(self) -> int:
        """Output features per input feature."""
        return 2 if self.kind == "lift" else 1

    def describe(self, part: Input, x: Tensor) -> tuple[int, list[Tensor]]:
        """Fill `part` for features of x; returns their number in whole vectors, and tensors that must stay alive."""
        x = flat(x)
        part.x, part.type, part.numbers, part.width = view(x), TYPES[x.dtype], x.shape[-1], whole(x.shape[-1])
        part.phi, part.kind = self.phi, KIND[self.kind]
        alive = [x]
        if self.normal is not None:
            alive.append(flat(self.normal))
            part.normal = view(alive[-1])
        if self.table is not None:
            alive.append(flat(self.table if self.kind == "gather" else self.table.flatten(-2)))
            part.table = view(alive[-1])
        if self.mask is not None:
            alive.append(self.mask)
            part.mask = view(self.mask)
        return part.width * self.doubled, alive


def _closed(operands: Sequence[Operand]) -> list[CpuFeatures | None]:
    """Closed forms of the features of operands, over all tokens."""
    described = ((operand.described(), operand.x) for operand in operands)
    return [None if features is None else CpuFeatures.of(features, x) for features, x in described]


def _compiled(sums: Sums) -> list[CpuFeatures | None]:
    """The same in code that is compiled, where no mask has numbers."""
    rest, found = iter(needs(sums)[5:]), []
    for features, x in zip(sums.features, sums.inputs, strict=True):
        needed = [next(rest) for _ in features.tensors]
        found.append(CpuFeatures.of(features, x) if features.fused(needed) else None)
    return found


def _kept(sums: Sums) -> int:
    """Number of tensors that a forward pass saves ahead of the states: the output and its denominators of a division."""
    return 2 if sums.denominator == "divide" else 0


def _states(sums: Sums) -> list[tuple[int, ...]]:
    """Shapes of the states that a forward pass saves, after samples and heads. Compiled code has them flat.

    Otherwise it would take another graph for lengths of one group.
    """
    features, width = sums.features[0], whole(sums.q.shape[-1])
    closed, every = features.closed(), not sums.causal and sums.g is None
    d = width * (2 if closed is not None and closed[0] == "lift" else 1)
    shapes = [(d, whole(sums.v.shape[-1]))]
    shapes += [(1, width if features.unrotated else d)] * (sums.denominator is not None)
    groups = () if every else (-(-sums.q.shape[-2] // TOKENS),)
    return [(*groups, *shape) for shape in shapes] * (1 if sums.causal or every else 2)


def _refuses_compiled(sums: Sums, closed: Sequence[CpuFeatures | None]) -> str:
    """Why compiled code does not call the C kernel, or ""."""
    if is_exporting():
        return "an exported program has only PyTorch's operations"
    if not all(x.is_cpu for x in sums.tensors):
        return "it reads tensors on a CPU only"
    if sums.q.ndim > 4 or not all(closed):
        return "compiled code makes features that it does not, and those of several axes of samples"
    return ""


def _widths(features: Features, x: Tensor, known: CpuFeatures | None) -> tuple[tuple[int, int], list[int]]:
    """(number, length) of contiguous runs of features of x in memory, and the widths that the C kernel reads."""
    if known is not None:
        return (known.doubled, x.shape[-1]), [known.doubled * x.shape[-1]]
    if features.ready(x):
        return (1, x.shape[-1]), [x.shape[-1]]
    token = Slices((ONE,) * (x.ndim - 3), ONE, ONE)
    with torch.no_grad():
        sizes = [rows.shape[-1] for rows in features.part(token)(token.of(x, -3, -2))]
    return (1, sizes[0]), sizes


def _padded(rows: Tensor) -> Tensor:
    """Rows ``[*b h t .]``, padded with zeros to whole vectors."""
    more = whole(rows.shape[-1]) - rows.shape[-1]
    return F.pad(rows, (0, more)) if more else rows


class Pass:
    """One chunk group of a scan as a call of the library. It keeps the tensors alive that the call points to.

    Attributes:
        shapes: Shapes of the saved states: sums of k v^T, and sums of keys for a denominator. One state if sums are over all
            keys, otherwise one per group of chunks.
    """

    def __init__(self, scan: "CpuScan", n: int):
        self.operands, self.n, self.span, buffers = scan.operands, n, scan.plan.spans[n], scan.buffers
        self.spans, self.all_keys = (self.span, *[scan.of_keys.spans[n]] * 2), scan.all_keys
        operands, denominator = self.operands, scan.denominator
        self.leading = operands[0].xs[n].shape[:-2]
        self.alive: list[Tensor] = []
        heads, length = self.leading.numel(), self.span.stop - self.span.start
        keys = self.spans[1].stop - self.spans[1].start
        call = self.call = Call(SizesArgument(heads, self.leading[-1], length, keys), floor=EPS)
        call.flags = Flags(denominator, 0, n == scan.order[0], n == scan.order[-1], scan.reverse)
        size, split = call.size, call.split
        split.threads = torch.get_num_threads()
        self.rows: list[Sequence[Tensor] | None] = []
        closed = scan.notes["closed"] if scan.plan.whole else [None] * len(operands)
        widths = [self._operand(*each) for each in zip(operands, self._parts(), self.spans, closed, strict=True)]
        _, (size.d, size.unrotated), (size.e, _) = widths
        lib = library.libraries()[0][library.lanes()]
        self.library, groups = lib, 1 if self.all_keys else lib.isopos_groups(length)
        row = size.unrotated or size.d
        split.parts = self._parts_of_all() if self.all_keys else min(groups, -(-split.threads // heads))
        self.shapes = [(groups, size.d, size.e), *[(groups, 1, row)] * denominator]
        split.scratch_size = lib.isopos_scratch_size(size.d, size.e, size.unrotated)
        split.total_size = size.d * size.e + row + 1
        split.scratch = buffers("cpu scratch", split.threads, split.scratch_size).data_ptr()
        if split.parts > 1:
            split.totals = buffers("cpu totals", heads, split.parts, split.total_size).data_ptr()

    def forward(
        self,
        g: Decays,
        states: Sequence[Tensor],
        saved: Sequence[Tensor],
        out: Tensor,
        denominator: Tensor | None,
        *,
        divide: bool,
    ) -> bool:
        """Write sums or quotients, and denominators. Updates `states` ``[*b h . .]``; states before groups go to `saved`.

        Returns whether all results are finite.
        """
        self._prepare(g, states, saved)
        call = self.call
        call.out.sums, call.size.values, call.flags.divide = view(out), out.shape[-1], divide
        if denominator is not None:
            call.out.denominator = view(denominator)
        run = self.library.isopos_forward_all if self.all_keys else self.library.isopos_forward
        return library.run(run, call)

    def backward(
        self, g: Decays, saved: Sequence[Tensor], grads: Sequence[Tensor], grad_output: OutputGradient, decays: bool
    ) -> Sequence[Tensor]:
        """Write gradients of the operands; returns gradients of log decays ``[*b h t]`` if `decays`, otherwise nothing.

        `saved` are the states of `forward`. `grads` are gradients of the states after the tokens, and become gradients of
        the states before them.
        """
        call = self.call
        self._prepare(g, grads, saved)
        grad, out, denominator = (None if part is None else part[self.n] for part in grad_output.parts)
        assert grad is not None
        grad = flat(grad)
        call.out.grad, call.size.values = view(grad), grad.shape[-1]
        if out is not None and denominator is not None:
            call.out.sums, call.out.denominator, call.flags.divide = view(out), view(denominator), 1
        elif call.flags.denominated:
            call.size.values -= 1  # the last column is the denominator
        call.grad_state = StateArgument(grads[0].data_ptr(), grads[-1].data_ptr())
        grad_features = [
            self._grads(*each) for each in zip(self.operands, self._parts(), self.rows, self.spans, strict=True)
        ]
        shape = (*self.leading, self.span.stop - self.span.start)
        grad_g = tuple(grad.new_empty(shape, dtype=torch.float64) for _ in range(2)) if decays else ()
        for part, x in zip(self._parts(), grad_g, strict=False):
            part.grad_decay = x.data_ptr()
        library.run(self.library.isopos_backward_all if self.all_keys else self.library.isopos_backward, call)
        if call.flags.reverse:
            grad_g = tuple(-x.flip(-1) for x in grad_g)
        for operand, grads_of, rows, span in zip(self.operands, grad_features, self.rows, self.spans, strict=True):
            if rows is not None:
                operand.vjp(self.n, span, grads_of)
            for table in grads_of if rows is None else ():
                operand.vjp_table(span, table)
        return grad_g

    def _parts(self) -> tuple[Input, ...]:
        return self.call.q, self.call.k, self.call.v

    def _parts_of_all(self) -> int:
        """Parts per head: one if heads suffice for all threads, otherwise equally many for each thread."""
        size, threads = self.call.size, self.call.split.threads
        heads, chunks = size.all, -(-max(size.length, size.keys) // CHUNK)
        if heads % threads == 0 or heads >= 4 * threads:
            return 1
        even = threads // math.gcd(heads, threads)
        return min(chunks, even * -(-4 * threads // (heads * even)))

    def _operand(self, operand: Operand, part: Input, span: Span, closed: CpuFeatures | None) -> tuple[int, int]:
        """Describe an operand in `part`; returns the widths of its features and of its unrotated features (or 0)."""
        x = operand.xs[self.n]
        if closed is None:
            features = operand.described(span)
            closed = None if features is None else CpuFeatures.of(features, x)
        if closed is None:
            features = operand.read(self.n, span)
            rows = [flat(_padded(x.resolve_neg())) for x in features]
            self.rows.append(features)
            self.alive += rows
            part.x, part.numbers, part.width = view(rows[0]), rows[0].shape[-1], rows[0].shape[-1]
            unrotated = 0
            for x in rows[1:]:
                part.unrotated, unrotated = view(x), x.shape[-1]
            return part.width, unrotated
        self.rows.append(None)
        out, alive = closed.describe(part, x)
        self.alive += alive
        return out, part.width if closed.unrotated else 0

    def _prepare(self, g: Decays, states: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        call = self.call
        if g is not None:
            decays = [x[..., None] for x in g]  # of all tokens, since the token before the group is read, too
            self.alive += decays
            call.decay = DecayArgument(*(view(x) for x in decays))
            for rows in (call.decay.query, call.decay.key):
                rows.first += 8 * rows.token * self.span.start
        call.state = StateArgument(states[0].data_ptr(), states[-1].data_ptr())
        if saved:
            call.saved = StateArgument(saved[0].data_ptr(), saved[-1].data_ptr())

    def _grads(self, operand: Operand, part: Input, rows: Sequence[Tensor] | None, span: Span) -> list[Tensor]:
        """Set where gradients of an operand go; returns the buffers for gradients of its table or of its features."""
        if rows is None:
            assert operand.grad_xs is not None
            part.grad, part.add = view(operand.grad_xs[self.n]), not operand.first
            if operand.table is None:
                return []
            width = part.numbers * (2 if part.kind == KIND["lift"] else 1)
            table = operand.buffers("cpu grad table", *self.leading, span.stop - span.start, width)
            part.grad_table = view(table)
            return [table]
        buffers = [operand.buffers(f"cpu grad {m}", *x.shape[:-1], whole(x.shape[-1])) for m, x in enumerate(rows)]
        part.grad, part.grad_unrotated = view(buffers[0]), view(buffers[1]) if len(buffers) > 1 else ViewArgument()
        return [grad[..., : x.shape[-1]] for grad, x in zip(buffers, rows, strict=True)]


@dataclass(eq=False)
class CpuScan(Scan):
    """Causal sums, or with `reverse` sums over later tokens, one call of the library per span of the plan.

    Reverse sums are added to existing sums and denominators. `notes` belong to the whole problem. Sums over all keys
    (`all_keys`) are one call with an uncut plan.
    """

    notes: dict[str, Any] = field(default_factory=dict)
    all_keys: bool = False

    def plan_of_keys(self) -> GroupPlan:
        return GroupPlan(self.operands[1].x, cut=False) if self.all_keys else self.plan

    def forward(self, outs: Sequence[Tensor], denominators: Sequence[Tensor], *, keep: bool, divide: bool) -> Groups:
        states: list[Tensor] = []
        for n in self.order:
            part = Pass(self, n)
            like = self.operands[0].x.new_empty
            states = states or [like(*self.leading, *shape[1:], dtype=torch.float32).zero_() for shape in part.shapes]
            saved = states if self.all_keys else [like(*self.leading, *shape, dtype=torch.float32) for shape in part.shapes]
            saved = saved if keep else []
            denominator = denominators[n] if self.denominator else None
            self.notes["finite"] &= part.forward(self.g, states, saved, outs[n], denominator, divide=divide)
            yield n, None, None, saved

    def backward(self, grad_output: OutputGradient, states: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        grad_output.split(self.plan.sizes)
        after = [torch.zeros_like(state if self.all_keys else state[..., 0, :, :]) for state in states[0]]
        for n, saved in zip(reversed(self.order), reversed(states), strict=True):
            span, part = self.plan.spans[n], Pass(self, n)
            for every, scale in zip(
                grad_g, part.backward(self.g, saved, after, grad_output, bool(grad_g)), strict=bool(grad_g)
            ):
                every[..., span.start : span.stop].add_(scale)


class CpuSteps:
    """Steps of a stream in the C kernel, one call of the library each. Checks of the first step hold for later steps.

    Args:
        sums: One step that the C kernel serves.
        after: Destination of the sums after each step; by default they are updated in place.

    Attributes:
        sums: Sums over all tokens so far.
        few: Longest chunk that is faster as separate steps than as a chunk.
    """

    few = 16

    def __init__(self, sums: Sums, after: tuple[Tensor, ...] = ()):
        assert sums.stream is not None
        lib, (*_, values), self.call = sums.notes["step"]
        call, self.step, self.sums = self.call, lib.isopos_step, after or sums.stream.sums
        self.inputs, self.shapes = tuple(flat(x) for x in sums.inputs), [x.shape for x in sums.inputs]
        self.strides = [x.stride() for x in self.inputs]  # which the call describes
        call.flags.denominated = sums.denominator is not None
        call.state, call.saved = (StateArgument(x[0].data_ptr(), x[-1].data_ptr()) for x in (sums.stream.sums, self.sums))
        self.parts = call.q, call.k, call.v
        self.of_values = values.describe(call.v, self.inputs[2])[1]
        self.like = torch.empty_like(sums.v, memory_format=torch.contiguous_format)  # the fastest way to allocate outputs
        call.out.sums = view(self.like)
        self.firsts, self.split = (*(part.x for part in self.parts), call.out.sums), call.split  # views inside the call
        self.status, self.reference = ctypes.c_int64(0), ctypes.byref(call)
        call.status = ctypes.pointer(self.status)
        self.denominated = bool(call.flags.denominated)

    @classmethod
    def of(cls, sums: Sums) -> "CpuSteps | None":
        """The steps after this one; None if the C kernel does not serve them."""
        if sums.stream is None:
            return None
        library.warn_if_absent(why := CPU.serves(sums))
        return None if why else cls(sums)

    def look_ahead(self, features: tuple[Features, Features], weights: Tensor | None) -> None:
        """Set the tables of the next n tokens.

        Args:
            features: Features of queries and keys with tables of n tokens, otherwise as in the first step.
            weights: Weight of past sums at each of these tokens, float32 ``[n all]``; None if all are 1.
        """
        self.take([CpuFeatures.of(each, x) for each, x in zip(features, self.inputs, strict=False)], weights)

    def take(self, known: Sequence[CpuFeatures | None], weights: Tensor | None) -> None:
        """Set the closed forms of features of queries and keys."""
        self.alive = [weights]
        for part, closed, x in zip(self.parts, known, self.inputs, strict=False):
            assert closed is not None
            self.alive += closed.describe(part, x)[1]
        self.call.decay.across = None if weights is None else weights.data_ptr()

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the call serves these tensors: shapes of the first step, float32, outside transforms and traces.

        If so, the call describes their strides from now on.
        """
        if library.watched():
            return False
        for x, shape in zip((q, k, v), self.shapes, strict=True):
            if not library.is_plain(x) or x.dtype is not torch.float32 or x.shape != shape:
                return False
        strides = [q.stride(), k.stride(), v.stride()]
        if strides != self.strides:
            if not strides[0][-1] == strides[1][-1] == strides[2][-1] == 1:
                return False
            self.inputs, self.strides = (q, k, v), strides
            for part, x in zip(self.parts, self.inputs, strict=True):
                part.x = view(x)
        return True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """The output ``[*b h 1 e]`` of the token with row n of the tables; its tensors fit."""
        call, out = self.call, torch.empty_like(self.like)
        of_q, of_k, of_v, of_out = self.firsts
        of_q.first, of_k.first, of_v.first, of_out.first = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.token, self.split.threads, denominator = n, torch.get_num_threads(), None
        if self.denominated and counted():
            denominator = v.new_empty(*v.shape[:-1], 1)
            call.out.denominator = view(denominator)
        self.step(self.reference)
        if status := self.status.value:
            self.status.value = 0
            library.sums_finite(status)
        if denominator is not None:
            call.out.denominator.first = None
            count(denominator)
        return out


class Cpu(ScanKernel, Operator):
    """The C kernel: chunk by chunk, or one token of a stream at a time."""

    name = "cpu"

    def serves(self, sums: Sums) -> str:
        if torch.compiler.is_compiling():
            return self._refuses(sums) or ("" if installed() else "it is not installed")
        return self._refuses(sums) or library.absent()

    def plan(self, sums: Sums, operands: Sequence[Operand]) -> GroupPlan:
        """The plan of the operands, uncut if the C kernel computes all features."""
        if "closed" not in sums.notes:
            sums.notes["closed"] = _closed(operands)
        return GroupPlan(sums.q, cut=not all(sums.notes["closed"]))

    def scans(self, operands: Sequence[Operand], plan: GroupPlan, g: Decays, buffers: Buffers, sums: Sums) -> list[Scan]:
        denominator = sums.denominator is not None
        every = not sums.causal and g is None
        directions = (False,) if sums.causal or every else (False, True)
        return [CpuScan(operands, plan, g, buffers, denominator, reverse, sums.notes, every) for reverse in directions]

    def forward(self, sums: Sums, needs: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        sums.notes["finite"] = True
        return super().forward(sums, needs)

    def backward(self, sums: Sums, saved: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        watched = library.unreadable(*sums.tensors, *saved, grad)  # or hooks have unpacked other saved tensors
        if watched:  # the saved states belong to other groups
            return CHUNKS.backward(sums, CHUNKS.forward(sums, needs)[1], grad, needs)
        return super().backward(sums, saved, grad, needs)

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        return super().run(sums) if sums.stream is None else self._step(sums)

    def packed(self, sums: Sums, learns: bool) -> list[Tensor]:
        needs = [learns and n < 3 for n in range(len(operands(sums)))]
        out, saved = self.forward(sums, needs)
        result, first = contained(sums, out, lambda clean: self.forward(clean, [False] * len(needs))[0]), _kept(sums)
        if not learns:
            return [result]
        return [result, *saved[first - 1 : first], *(x.flatten(sums.q.ndim - 2) for x in saved[first:])]

    def fake(self, sums: Sums, learns: bool) -> list[Tensor]:
        like, leading, e = sums.q.new_empty, sums.q.shape[:-1], sums.v.shape[-1]
        shapes = [(*leading, e + (sums.denominator == "column"))]
        if learns:
            shapes += [(*leading, 1)] * (sums.denominator == "divide")
            shapes += [(*leading[:-1], math.prod(shape)) for shape in _states(sums)]
        return [like(shape, dtype=torch.float32) for shape in shapes]

    def unpacked(self, sums: Sums, packed: Sequence[Tensor]) -> list[Tensor]:
        first = _kept(sums)
        states = zip(packed[max(first, 1) :], _states(sums), strict=True)
        return [*packed[:first], *(x.unflatten(-1, shape) for x, shape in states)]

    def _refuses(self, sums: Sums) -> str:
        """Why it would not serve a problem if it was installed, or ""."""
        if sums.dtype != torch.float32:
            return f"it sums up float32, not {sums.dtype}"
        if sums.stream is not None:
            return self._refuses_step(sums)
        for phi, *_ in sums.features:
            if isinstance(phi, FeatureMap) and phi not in PHI and phi.name not in ROWS:
                known = ", ".join((*(phi.name for phi in PHI), *ROWS))
                return f"it does not know the feature map {phi.name!r}, only {known} of isopos.feature_maps"
        if why := refusal(sums, operator=True):
            return why
        if compiling := torch.compiler.is_compiling():
            closed = _compiled(sums)
            if why := _refuses_compiled(sums, closed):
                return why
        elif why := library.unreadable(*sums.tensors):
            return why
        else:
            inputs, _ = sums.notes["operands"] = operands_of(sums, needs(sums))
            closed = sums.notes["closed"] = _closed(inputs)
        if not sums.causal and sums.g is None and not all(closed):
            return "features that PyTorch makes go into products of matrices over all keys, which it has, too"
        (queries, _), (keys, _), _ = widths = [
            _widths(*each) for each in zip(sums.features, sums.inputs, closed, strict=True)
        ]
        if math.prod(queries) != math.prod(keys):
            return f"features of queries and keys are {math.prod(queries)} and {math.prod(keys)}"
        if queries != keys and (compiling or any(width % library.lanes() for _, width in (queries, keys))):
            return f"features of queries and keys lie {queries} and {keys}, and not in whole vectors"
        widest = max(width for _, read in widths for width in read)
        return f"features come up to {library.WIDEST}, not {widest}" if widest > library.WIDEST else ""

    def _refuses_step(self, sums: Sums) -> str:
        if why := refuses_step(sums) or library.unreadable(*sums.tensors):
            return why
        (q, k, v), stream = sums.inputs, sums.stream
        assert stream is not None
        (*leading, _, width), e = q.shape, v.shape[-1]
        if k.shape != q.shape or v.shape[:-1] != q.shape[:-1] or max(leading[:-2], default=1) > 1:
            return "a step has one state per query, and at most two axes of heads and samples"
        forms = (CpuFeatures.of(features, x) for features, x in zip(sums.features, sums.inputs, strict=True))
        known = [form for form in forms if form is not None]
        if len(known) < 3 or any(x.dtype != torch.float32 for x in sums.inputs):
            return "a step makes features of float32 in closed form"
        d, unrotated = width * known[0].doubled, width * known[0].unrotated
        shapes = [(*leading, d, e + (sums.denominator is not None and not unrotated))]
        shapes += [(*leading, unrotated, 1)] * bool(unrotated)
        fit = [x.shape for x in stream.sums if x.is_contiguous() and x.dtype == torch.float32] == shapes
        if known[0].doubled != known[1].doubled or not fit:
            return f"a step needs contiguous float32 sums {shapes}, for queries and keys alike"
        if max(d, e) > library.WIDEST or (known[0].doubled > 1 and width % library.lanes()):
            return f"features come up to {library.WIDEST}, and twice as many as inputs by {library.lanes()}"
        lib = library.libraries()[0].get(library.lanes())
        sums.notes["step"] = (
            lib,
            known,
            Call(SizesArgument(math.prod(leading), leading[-1], 1, 1, d, e, unrotated), floor=EPS),
        )
        return ""

    def _step(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output ``[*b h 1 e]`` of the next token of a stream, and the sums after it."""
        assert sums.stream is not None
        steps = CpuSteps(sums, tuple(torch.empty_like(x) for x in sums.stream.sums))
        steps.take(sums.notes["step"][1][:2], sums.across)
        q, k, v = steps.inputs
        return steps(q, k, v, 0), steps.sums


CPU = OPERATED["cpu"] = Cpu()
