"""The compiled sums of the C kernel, on a CPU: features, positions, decay, float32 sums and division of a chunk in one go.

Features in closed form are made on the way, with gradients of tables that are learned. Those of `ROWS`, of opaque maps and
of learned normals are made by PyTorch and read as they are.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.feature_maps import COMPILED, FeatureMap
from isopos.ops import library
from isopos.ops.library import KIND, TYPES, Call, Decay, Flags, Input, Sizes, State, View, flat, view, whole
from isopos.ops.linear.autograd import needs, refusal, refuses_step
from isopos.ops.linear.chunks import CHUNKS
from isopos.ops.linear.division import EPS, count, counted
from isopos.ops.linear.features import Buffers, Decays, Features, Sums
from isopos.ops.linear.scan import CHUNK, Groups, Operand, OutputGradient, Plan, Scan, ScanKernel, Span, operands_of
from isopos.ops.slices import Slices

PHI = {phi: n for n, phi in enumerate(COMPILED)}
ROWS = ("favor",)  # feature maps that the C kernel does not know, but whose features it sums up
ONE = slice(0, 1)


class Closed(NamedTuple):
    """Features as the C kernel makes them: phi, a reflection, then a table. All is float32 but an index."""

    phi: int
    kind: str  # of the table
    table: Tensor | None
    normal: Tensor | None
    mask: Tensor | None
    own: bool

    @classmethod
    def of(cls, features: Features, x: Tensor) -> "Closed | None":
        """What makes features of x, if the C kernel knows it and its widths fit; PyTorch says what is wrong with others."""
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
        return cls(phi, last, table, normal, features.mask, features.own)

    @property
    def doubled(self) -> int:
        """How many features it makes of one."""
        return 2 if self.kind == "lift" else 1

    def describe(self, part: Input, x: Tensor) -> tuple[int, list[Tensor]]:
        """Say in `part` what makes features of x; their number up to whole vectors, and the tensors that must live on."""
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


def _closed(operands: Sequence[Operand]) -> list[Closed | None]:
    """What makes the features of operands, of all their tokens."""
    described = ((operand.described(), operand.x) for operand in operands)
    return [None if own is None else Closed.of(own, x) for own, x in described]


def _widths(features: Features, x: Tensor, known: Closed | None) -> tuple[tuple[int, int], list[int]]:
    """How features of x lie, in so many runs of so many numbers; and the widths that the C kernel meets."""
    if known is not None:
        return (known.doubled, x.shape[-1]), [known.doubled * x.shape[-1]]
    if features.ready(x):
        return (1, x.shape[-1]), [x.shape[-1]]
    place = Slices((ONE,) * (x.ndim - 3), ONE, ONE)
    with torch.no_grad():
        found = [rows.shape[-1] for rows in features.part(place)(place.of(x, -3, -2))]
    return (1, found[0]), found


def _padded(rows: Tensor) -> Tensor:
    """Rows ``[*b h t .]`` with zeros up to whole vectors."""
    more = whole(rows.shape[-1]) - rows.shape[-1]
    return F.pad(rows, (0, more)) if more else rows


class Pass:
    """Some tokens of the heads of a scan, described for the library. Tensors that it points to live as long as it does.

    Attributes:
        shapes: Of the states after each of its groups of chunks: of keys and values, and of what a denominator sums up. Of
            one state, where that is of all keys.
    """

    def __init__(self, scan: "CpuWalk", n: int):
        self.operands, self.n, self.span, buffers = scan.operands, n, scan.plan.spans[n], scan.buffers
        self.spans, self.all_keys = (self.span, *[scan.of_keys.spans[n]] * 2), scan.all_keys
        operands, denominator = self.operands, scan.denominator
        self.leading = operands[0].xs[n].shape[:-2]
        self.alive: list[Tensor] = []
        heads, length = self.leading.numel(), self.span.stop - self.span.start
        keys = self.spans[1].stop - self.spans[1].start
        call = self.call = Call(Sizes(heads, self.leading[-1], length, keys), floor=EPS)
        call.flags = Flags(denominator, 0, n == scan.order[0], n == scan.order[-1], scan.reverse)
        size, split = call.size, call.split
        split.threads = torch.get_num_threads()
        self.rows: list[Sequence[Tensor] | None] = []
        closed = scan.notes["closed"] if scan.plan.whole else [None] * len(operands)
        widths = [self._operand(*each) for each in zip(operands, self._parts(), self.spans, closed, strict=True)]
        _, (size.d, size.own), (size.e, _) = widths
        lib = library.libraries()[0][library.lanes()]
        self.library, groups, own = lib, 1 if self.all_keys else lib.isopos_groups(length), size.own or size.d
        split.parts = self._parts_of_all() if self.all_keys else min(groups, -(-split.threads // heads))
        self.shapes = [(groups, size.d, size.e), *[(groups, 1, own)] * denominator]
        split.scratch_size, split.total_size = lib.isopos_scratch_size(size.d, size.e, size.own), size.d * size.e + own + 1
        split.scratch = buffers("cpu scratch", split.threads, split.scratch_size).data_ptr()
        if split.parts > 1:
            split.totals = buffers("cpu totals", heads, split.parts, split.total_size).data_ptr()

    def _parts(self) -> tuple[Input, ...]:
        return self.call.q, self.call.k, self.call.v

    def _parts_of_all(self) -> int:
        """Parts of a head, which cost a sum of states: where heads do not suffice, some for each thread, and as many."""
        size, threads = self.call.size, self.call.split.threads
        heads, chunks = size.all, -(-max(size.length, size.keys) // CHUNK)
        if heads % threads == 0 or heads >= 4 * threads:
            return 1
        even = threads // math.gcd(heads, threads)
        return min(chunks, even * -(-4 * threads // (heads * even)))

    def _operand(self, operand: Operand, part: Input, span: Span, closed: Closed | None) -> tuple[int, int]:
        """Describe an operand; its width, and that of its own features or 0."""
        x = operand.xs[self.n]
        if closed is None:
            features = operand.described(span)
            closed = None if features is None else Closed.of(features, x)
        if closed is None:
            given = operand.read(self.n, span)
            rows = [flat(_padded(x.resolve_neg())) for x in given]
            self.rows.append(given)
            self.alive += rows
            part.x, part.numbers, part.width = view(rows[0]), rows[0].shape[-1], rows[0].shape[-1]
            own = 0
            for x in rows[1:]:
                part.own, own = view(x), x.shape[-1]
            return part.width, own
        self.rows.append(None)
        out, alive = closed.describe(part, x)
        self.alive += alive
        return out, part.width if closed.own else 0

    def _prepare(self, g: Decays, states: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        call = self.call
        if g is not None:
            decays = [x[..., None] for x in g]  # of all tokens: the one before counts, too
            self.alive += decays
            call.decay = Decay(*(view(x) for x in decays))
            for rows in (call.decay.query, call.decay.key):
                rows.first += 8 * rows.token * self.span.start
        call.state = State(states[0].data_ptr(), states[-1].data_ptr())
        if saved:
            call.saved = State(saved[0].data_ptr(), saved[-1].data_ptr())

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
        """Write sums, or quotients, and denominators; states ``[*b h . .]`` become those after, groups' own are saved.

        Returns whether all are finite.
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
        """Write gradients of the operands, and return those of log decays ``[*b h t]`` if they are wanted.

        `saved` are the states of `forward`; `grads` are gradients of those after and become those of the ones before.
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
        call.grad_state = State(grads[0].data_ptr(), grads[-1].data_ptr())
        pulled = [self._grads(*each) for each in zip(self.operands, self._parts(), self.rows, self.spans, strict=True)]
        shape = (*self.leading, self.span.stop - self.span.start)
        grad_g = tuple(grad.new_empty(shape, dtype=torch.float64) for _ in range(2)) if decays else ()
        for part, x in zip(self._parts(), grad_g, strict=False):
            part.grad_decay = x.data_ptr()
        library.run(self.library.isopos_backward_all if self.all_keys else self.library.isopos_backward, call)
        if call.flags.reverse:
            grad_g = tuple(-x.flip(-1) for x in grad_g)
        for operand, own, rows, span in zip(self.operands, pulled, self.rows, self.spans, strict=True):
            if rows is not None:
                operand.pull(self.n, span, own)
            for table in own if rows is None else ():
                operand.pull_table(span, table)
        return grad_g

    def _grads(self, operand: Operand, part: Input, rows: Sequence[Tensor] | None, span: Span) -> list[Tensor]:
        """Say where gradients of an operand go: into its own; of its table, or of its rows, into buffers returned."""
        if rows is None:
            assert operand.grad_xs is not None
            part.grad, part.add = view(operand.grad_xs[self.n]), not operand.first
            if operand.table is None:
                return []
            width = part.numbers * (2 if part.kind == KIND["lift"] else 1)
            table = operand.buffers("cpu grad table", *self.leading, span.stop - span.start, width)
            part.grad_table = view(table)
            return [table]
        own = [operand.buffers(f"cpu grad {m}", *x.shape[:-1], whole(x.shape[-1])) for m, x in enumerate(rows)]
        part.grad, part.grad_own = view(own[0]), view(own[1]) if len(own) > 1 else View()
        return [grad[..., : x.shape[-1]] for grad, x in zip(own, rows, strict=True)]


@dataclass(eq=False)
class CpuWalk(Scan):
    """Causal sums forward, or those over later tokens in reverse, a call of the library for each of the plan's spans.

    Those in reverse are added to sums and denominators that are there. `notes` are of the whole problem. Those over all keys
    (`all_keys`) are one call, of a plan that is not cut.
    """

    notes: dict[str, Any] = field(default_factory=dict)
    all_keys: bool = False

    def plan_of_keys(self) -> Plan:
        return Plan(self.operands[1].x, cut=False) if self.all_keys else self.plan

    def forward(self, outs: Sequence[Tensor], denominators: Sequence[Tensor], *, keep: bool, divide: bool) -> Groups:
        states: list[Tensor] = []
        for n in self.order:
            part = Pass(self, n)
            like = self.operands[0].x.new_empty
            states = states or [like(*self.leading, *shape[1:], dtype=torch.float32).zero_() for shape in part.shapes]
            saved = states if self.all_keys else [like(*self.leading, *shape, dtype=torch.float32) for shape in part.shapes]
            saved = saved if keep else []
            own = denominators[n] if self.denominator else None
            self.notes["finite"] &= part.forward(self.g, states, saved, outs[n], own, divide=divide)
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
    """Steps of a stream in the C kernel, one call of the library each: what holds for one step holds for those after it.

    Args:
        sums: One step, which the C kernel serves.
        after: Where the sums after it go; by default they are written over, by every step.

    Attributes:
        sums: Those of all tokens so far.
        few: Tokens of a chunk that are as many steps sooner than sums of a chunk.
    """

    few = 16

    def __init__(self, sums: Sums, after: tuple[Tensor, ...] = ()):
        assert sums.stream is not None
        lib, (*_, values), self.call = sums.notes["step"]
        call, self.step, self.sums = self.call, lib.isopos_step, after or sums.stream.sums
        self.inputs, self.shapes = tuple(flat(x) for x in sums.inputs), [x.shape for x in sums.inputs]
        call.flags.denominated = sums.denominator is not None
        call.state, call.saved = (State(x[0].data_ptr(), x[-1].data_ptr()) for x in (sums.stream.sums, self.sums))
        self.parts = call.q, call.k, call.v
        self.of_values = values.describe(call.v, self.inputs[2])[1]
        call.out.sums = view(torch.empty_like(sums.v, memory_format=torch.contiguous_format))
        self.firsts = (*(part.x for part in self.parts), call.out.sums)  # of the call's own memory
        self.status, self.reference = ctypes.c_int64(0), ctypes.byref(call)
        call.status = ctypes.pointer(self.status)
        self.denominated = bool(call.flags.denominated)

    @classmethod
    def of(cls, sums: Sums) -> "CpuSteps | None":
        """The steps after this one, if the C kernel serves them."""
        if sums.stream is None:
            return None
        library.warn_if_absent(why := CPU.serves(sums))
        return None if why else cls(sums)

    def look_ahead(self, features: tuple[Features, Features], weights: Tensor | None) -> None:
        """Take the tables of the next n tokens.

        Args:
            features: Those of queries and keys, with tables as the step had, of n tokens.
            weights: What the sums before each of these tokens weigh, float32 ``[n all]``; None where all weigh 1.
        """
        self.take([Closed.of(own, x) for own, x in zip(features, self.inputs, strict=False)], weights)

    def take(self, known: Sequence[Closed | None], weights: Tensor | None) -> None:
        """`look_ahead` to what makes features of queries and keys."""
        self.alive, self.strides = [weights], [x.stride() for x in self.inputs]
        self.parts[2].x = view(self.inputs[2])
        for part, closed, x in zip(self.parts, known, self.inputs, strict=False):
            assert closed is not None
            self.alive += closed.describe(part, x)[1]
        self.call.decay.across = None if weights is None else weights.data_ptr()

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these are what the step had, and nobody watches."""
        for x, shape in zip((q, k, v), self.shapes, strict=True):
            if type(x) is not Tensor or x.shape != shape or x.dtype != torch.float32 or x.stride(-1) != 1:
                return False
        return not library.unreadable(q, k, v)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """The output ``[*b h 1 e]`` of the token that has row n of the tables."""
        call, out = self.call, torch.empty(self.shapes[2], dtype=torch.float32, device="cpu")
        strides = [q.stride(), k.stride(), v.stride()]
        if strides != self.strides:
            self.strides = strides
            for part, x in zip(self.parts, (q, k, v), strict=True):
                part.x = view(x)
        of_q, of_k, of_v, of_out = self.firsts
        of_q.first, of_k.first, of_v.first, of_out.first = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.token, call.split.threads, denominator = n, torch.get_num_threads(), None
        if self.denominated and counted():
            denominator = v.new_empty(*v.shape[:-1], 1)
            call.out.denominator = view(denominator)
        self.step(self.reference)
        if status := self.status.value:
            self.status.value = 0
            library.finite(status)
        if denominator is not None:
            call.out.denominator.first = None
            count(denominator)
        return out


class Cpu(ScanKernel):
    """The C kernel, chunk by chunk, and a token of a stream at a time."""

    name = "cpu"

    def serves(self, sums: Sums) -> str:
        return self._refuses(sums) or ("" if torch.compiler.is_compiling() else library.absent())

    def _refuses(self, sums: Sums) -> str:
        """Why it would not serve a problem, were it installed."""
        if sums.dtype != torch.float32:
            return f"it sums up float32, not {sums.dtype}"
        if sums.stream is not None:
            return self._refuses_step(sums)
        for phi, *_ in sums.features:
            if isinstance(phi, FeatureMap) and phi not in PHI and phi.name not in ROWS:
                known = ", ".join((*(phi.name for phi in PHI), *ROWS))
                return f"it does not know the feature map {phi.name!r}, only {known} of isopos.feature_maps"
        if why := refusal(sums):
            return why
        if why := library.unreadable(*sums.tensors):
            return why
        operands, _ = sums.notes["operands"] = operands_of(sums, needs(sums))
        closed = sums.notes["closed"] = _closed(operands)
        if not sums.causal and sums.g is None and not all(closed):
            return "features that PyTorch makes go into products of matrices over all keys, which it has, too"
        (queries, _), (keys, _), _ = widths = [
            _widths(*each) for each in zip(sums.features, sums.inputs, closed, strict=True)
        ]
        if math.prod(queries) != math.prod(keys):
            return f"features of queries and keys are {math.prod(queries)} and {math.prod(keys)}"
        if queries != keys and any(width % library.lanes() for _, width in (queries, keys)):
            return f"features of queries and keys lie {queries} and {keys}, and not in whole vectors"
        widest = max(width for _, own in widths for width in own)
        return f"features come up to {library.WIDEST}, not {widest}" if widest > library.WIDEST else ""

    def _refuses_step(self, sums: Sums) -> str:
        if why := refuses_step(sums) or library.unreadable(*sums.tensors):
            return why
        (q, k, v), stream = sums.inputs, sums.stream
        assert stream is not None
        (*leading, _, width), e = q.shape, v.shape[-1]
        if k.shape != q.shape or v.shape[:-1] != q.shape[:-1] or max(leading[:-2], default=1) > 1:
            return "a step has one state a query, and at most two axes of heads and samples"
        known = [own for features, x in zip(sums.features, sums.inputs, strict=True) if (own := Closed.of(features, x))]
        if len(known) < 3 or any(x.dtype != torch.float32 for x in sums.inputs):
            return "a step makes features of float32 in closed form"
        d, own = width * known[0].doubled, width * known[0].own
        shapes = [(*leading, d, e + (sums.denominator is not None and not own)), *[(*leading, own, 1)] * bool(own)]
        fit = [x.shape for x in stream.sums if x.is_contiguous() and x.dtype == torch.float32] == shapes
        if known[0].doubled != known[1].doubled or not fit:
            return f"a step needs contiguous float32 sums {shapes}, for queries and keys alike"
        if max(d, e) > library.WIDEST or (known[0].doubled > 1 and width % library.lanes()):
            return f"features come up to {library.WIDEST}, and twice as many as inputs by {library.lanes()}"
        lib = library.libraries()[0].get(library.lanes())
        sums.notes["step"] = lib, known, Call(Sizes(math.prod(leading), leading[-1], 1, 1, d, e, own), floor=EPS)
        return ""

    def plan(self, sums: Sums, operands: Sequence[Operand]) -> Plan:
        """Not cut, where the C kernel makes all features."""
        if "closed" not in sums.notes:
            sums.notes["closed"] = _closed(operands)
        return Plan(sums.q, cut=not all(sums.notes["closed"]))

    def scans(self, operands: Sequence[Operand], plan: Plan, g: Decays, buffers: Buffers, sums: Sums) -> list[Scan]:
        denominator = sums.denominator is not None
        every = not sums.causal and g is None
        directions = (False,) if sums.causal or every else (False, True)
        return [CpuWalk(operands, plan, g, buffers, denominator, reverse, sums.notes, every) for reverse in directions]

    def forward(self, sums: Sums, needs: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
        sums.notes["finite"] = True
        return super().forward(sums, needs)

    def backward(self, sums: Sums, saved: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        watched = library.unreadable(*sums.tensors, *saved, grad)  # or another hand packed and unpacked what was saved
        if watched:  # what was saved is of other groups
            return CHUNKS.backward(sums, CHUNKS.forward(sums, needs)[1], grad, needs)
        return super().backward(sums, saved, grad, needs)

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        return super().run(sums) if sums.stream is None else self._step(sums)

    def _step(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output ``[*b h 1 e]`` of the next token of a stream, and its sums."""
        assert sums.stream is not None
        steps = CpuSteps(sums, tuple(torch.empty_like(x) for x in sums.stream.sums))
        steps.take(sums.notes["step"][1][:2], sums.across)
        q, k, v = steps.inputs
        return steps(q, k, v, 0), steps.sums


CPU = Cpu()
