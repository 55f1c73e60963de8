"""Linear attention by Triton kernels on CUDA devices: features, positions, decay, sums and division in one pass.

Memory holds only inputs, outputs and one state per segment, with as many segments as fill the device. Each scan computes
features again. Sums have the common dtype of all inputs, or float32 if dtypes differ or sums are not yet divided. Accuracy:
for bfloat16 inputs, features, weights and states are rounded to bfloat16 in products; float16 products use TF32, which has
as many digits, before sm_100; float32 products are three TF32 products, with errors of about 1e-6.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.feature_maps import COMPILED, FeatureMap, identity
from isopos.ops import gpu
from isopos.ops.linear import triton_stream
from isopos.ops.linear.autograd import refusal
from isopos.ops.linear.division import count, counted
from isopos.ops.linear.features import Features, Sums
from isopos.ops.linear.operators import OPERATED, Operator
from isopos.ops.linear.triton_arguments import Grads, Inputs, Rows, Sizes, Values, Varying, columns, padded, rows
from isopos.ops.linear.triton_config import TILE, config
from isopos.ops.triton_plan import PLANS, launch, layouts, planned

DTYPES = torch.bfloat16, torch.float16, torch.float32
WIDEST = 256  # largest number of features and of values
REFLECTED = 128  # the same with a reflection, except bfloat16 on sm_90: more would spill registers
LEAST = 4  # least chunks per segment: with fewer, states would move more bytes than inputs
Pair = Sequence[Tensor | None]  # denominators of the scan before and of this one, or none


class TritonFeatures(NamedTuple):
    """Features that the kernels compute: phi, a reflection, then a table."""

    phi: str
    kind: str  # of the table
    table: Tensor | None
    normal: Tensor | None

    @classmethod
    def of(cls, features: Features) -> "TritonFeatures | None":
        """The closed form of features; None if the kernels do not compute them."""
        if not isinstance(features.phi, FeatureMap) or features.phi not in COMPILED or (closed := features.closed()) is None:
            return None
        return cls(features.phi.name, *closed)

    @property
    def doubled(self) -> int:
        """Output features per input feature."""
        return 2 if self.kind == "lift" else 1

    @property
    def widths(self) -> set[int]:
        """Widths of x that its tensors fit."""
        found = set() if self.normal is None else {self.normal.shape[-1]}
        if self.table is not None:
            doubled = 2 if self.kind == "rotation" else 1
            found.add(self.table.shape[-1] if self.kind == "gather" else doubled * self.table.shape[-2])
        return found


class Direction(NamedTuple):
    """Direction of a scan, and whether it leaves out the diagonal (`strict`), as the second of two directions does."""

    reverse: bool
    strict: bool

    @property
    def back(self) -> "Direction":
        """The direction with targets and sources exchanged."""
        return Direction(not self.reverse, self.strict)

    @property
    def constants(self) -> dict[str, bool]:
        """Constants of the kernels."""
        return {"REVERSE": self.reverse, "STRICT": self.strict}


def _tile(n: int) -> int:
    """The smallest power of two that is at least n, and at least `TILE`."""
    return max(TILE, 1 << (int(n) - 1).bit_length())


def _kernels() -> Any:
    from isopos.ops.linear import triton_kernels

    return triton_kernels


@cache
def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@cache
def _segments(most: int, programs: int, room: int) -> int:
    """The number of segments (at most `most`) with the shortest run time, if `room` programs run at a time.

    All segments except the last are read once more beforehand, which moves half as many bytes as the scan.
    """
    most = max(1, min(most, -(-2 * room // programs)))
    return min(range(1, most + 1), key=lambda n: -(-programs * n // room) / n * (1.5 - 0.5 / n))


def _precision(*inputs: Tensor) -> str:
    """Precision of matrix products. Triton 3.7.1 compiles `outputs` for sm_100 with "tf32x3", but not with "tf32"."""
    if gpu.interpreted():
        return "ieee"
    dtypes = {x.dtype for x in inputs}
    if dtypes == {torch.float16} and _generation(inputs[0].device) < 10:
        return "tf32"
    return "bf16" if dtypes == {torch.bfloat16} else "tf32x3"


@cache
def _generation(device: torch.device) -> int:
    """First number of the compute capability."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


class KernelCall:
    """Arguments of the kernels for one problem; queries (0) or keys (1) are the targets."""

    def __init__(self, sums: Sums, closed: Sequence[TritonFeatures]):
        self.sums, self.leading, self.closed = sums, sums.q.shape[:-2], closed
        self.every = not sums.causal and sums.g is None
        self.ways = (
            (Direction(False, False),) if sums.causal or self.every else (Direction(False, False), Direction(True, True))
        )
        self.denominator = "none" if sums.denominator is None else "plain" if sums.features[0].unrotated else "encoded"
        self.divide, self.precision = sums.denominator == "divide", _precision(*sums.inputs)
        width, values, doubled = sums.q.shape[-1], sums.v.shape[-1], closed[0].doubled
        self.x, self.d, self.e = _tile(width), _tile(width) * doubled, _tile(values)
        self.config = config(
            self.d,
            self.e,
            self.precision,
            _generation(sums.q.device),
            whole=any(form.normal is not None for form in closed),
            decays=sums.g is not None and not sums.segmented,
            tables=any(form.table is not None for form in closed),
            light=self.denominator == "none" and all(form.phi == "identity" for form in closed),
        )
        self.blocks, self.parts = self.d // self.config.features, self.e // self.config.values
        self.adds_features, self.adds_values = self.d > self.config.far_features, self.e > self.config.far_values
        summed = {"none": 0, "plain": width, "encoded": width * doubled}[self.denominator]
        self.sizes = Sizes(width, width * doubled, values, summed, self.leading[-1], 1, 0)
        column, dtypes = sums.denominator == "column", {x.dtype for x in sums.inputs}
        self.final = torch.float32 if column or len(dtypes) > 1 else sums.q.dtype  # of results
        self.dtype = torch.float32 if len(self.ways) > 1 or self.adds_features else self.final  # of their memory
        self.borders = self.rows(sums.g[1][..., None]) if sums.g is not None else None

    @property
    def size(self) -> int:
        """Numbers of the sums of a state."""
        return self.sizes.features * self.sizes.columns

    @cached_property
    def numbers(self) -> list[Varying]:
        """Numbers of queries and of keys."""
        inner = self.leading[-2] if len(self.leading) > 1 else 1
        return [Varying(x.shape[-2], inner, *self._cut(x.shape[-2])) for x in self.sums.inputs[:2]]

    def _cut(self, length: int) -> tuple[int, int]:
        """Chunks per segment, and number of segments."""
        chunks, programs = -(-length // self.config.chunk), self.leading.numel() * max(self.blocks, self.parts)
        each = -(-chunks // _segments(chunks // LEAST, programs, self._room))
        return each, -(-chunks // each)

    @property
    def _room(self) -> int:
        """Number of programs that run at a time."""
        return _processors(self.sums.q.device) * (8 // self.config.warps)

    def most(self, length: int) -> Any:
        """At least the number of segments of so many tokens, also of an unknown number."""
        programs = self.leading.numel() * max(self.blocks, self.parts)
        fitting = -(-2 * self._room // programs)
        return torch.sym_max(1, torch.sym_min(-(-length // self.config.chunk) // LEAST, fitting))

    @property
    def has_states(self) -> bool:
        """Whether the forward pass has states of keys: before segments, or over all keys."""
        return self.every or self.sums.stream is not None or self.numbers[1].segments > 1

    def states_of(self, n: int) -> Tensor:
        """Memory for states of sources n before segments, ``[*b h .]``, of a size that does not depend on their number."""
        size = self.size + self.sizes.feature_sum
        most = 1 if self.every else self.most(self.sums.inputs[n].shape[-2])
        return self.sums.q.new_empty(self.leading.numel() * most * size, dtype=torch.float32)

    def rows(self, x: Tensor) -> Rows:
        """A tensor ``[*b h t .]``, or broadcastable to it, with strides."""
        return rows(x, self.leading)

    def optional(self, x: Tensor | None) -> Rows | None:
        """The same for a tensor that may be absent."""
        return None if x is None else self.rows(x)

    def inputs(self, n: int, neg_grad: Tensor | None = None) -> Inputs:
        """Inputs of queries (0) or keys (1) with their feature map."""
        closed, mask, g = self.closed[n], self.sums.features[n].mask, None if self.sums.segmented else self.sums.g
        table = closed.table.flatten(-2) if closed.table is not None and closed.kind != "gather" else closed.table
        more = table, closed.normal, None if mask is None else mask.view(torch.uint8), None if g is None else g[n][..., None]
        return Inputs(self.rows(self.sums.inputs[n]), *map(self.optional, (*more, neg_grad)))

    def pair(self, n: int, neg_grad: Tensor | None = None) -> tuple[Inputs, Inputs]:
        """Inputs of targets n and of their sources, which may share a table; `neg_grad` belongs to queries.

        Sources are empty if all of them are in one state.
        """
        targets = self.inputs(n, None if n else neg_grad)
        if self.every:
            return targets, Inputs(*(None,) * len(targets))
        sources = self.inputs(1 - n, neg_grad if n else None)
        return targets, sources._replace(table=None) if self.closed[0].table is self.closed[1].table else sources

    def values(self) -> Values:
        """The values."""
        mask = self.sums.features[2].mask
        return Values(self.rows(self.sums.v), None if mask is None else self.rows(mask.view(torch.uint8)))

    def constants(self, n: int, features: int, values: int) -> dict[str, Any]:
        """Constants for tiles of features of queries or keys."""
        constants = {"C": self.config.chunk, "X": features // self.closed[n].doubled, "D": features, "E": values}
        constants |= {"PHI": self.closed[n].phi, "KIND": self.closed[n].kind, "PRECISION": self.precision}
        return constants | {"num_warps": self.config.warps, "num_stages": self.config.stages}

    def of_both(self, n: int, features: int, values: int) -> dict[str, Any]:
        """The same with constants of sources."""
        others = {"SOURCE_PHI": self.closed[1 - n].phi, "SOURCE_KIND": self.closed[1 - n].kind}
        return self.constants(n, features, values) | others

    def launch(self, kernel: Any, n: int, blocks: int, *given: Any, part: int = 0, **constants: Any) -> None:
        """Launch a kernel for all heads and segments of queries or keys."""
        numbers, sizes = self.numbers[n], self.sizes._replace(blocks=blocks, part=part)
        launch(kernel, (self.leading.numel() * blocks, numbers.segments), *given, sizes, *numbers, **constants)

    def prefixes(
        self, n: int, neg_grad: Tensor | None, values: Values, way: Direction, first: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """States of sources n before each segment (None if all are zero), and for a stream after the last segment.

        `first` is the state of a stream before the first segment of the scan. For sums over all keys, the state of all keys.
        """
        kernels, numbers, heads, last = _kernels(), self.numbers[n], self.leading.numel(), None
        if numbers.segments == 1 and self.sums.stream is None and not self.every:
            return None, None
        size, out = self.size + self.sizes.feature_sum, self.states_of(n)
        if self.every:
            out = out.new_empty(heads, numbers.segments, size)
        if self.sums.stream is not None:
            last = out.new_empty(*self.leading, size)
        constants = self.constants(n, self.config.far_features, self.config.values) | way.constants
        given = self.inputs(n, neg_grad), values, self.borders, out
        constants |= {"DENOMINATOR": self.denominator, "ALL": self.every or last is not None}
        self.launch(kernels.states, n, self.d // self.config.far_features * self.parts, *given, **constants)
        if self.every:
            return out.sum(1).flatten(), None
        most = min(1024, _tile(size))
        decay = {"DECAY": self.borders is not None, **way.constants}
        states = out, first, last, self.borders, self.sizes, *numbers
        launch(kernels.scan, (heads, -(-size // most)), *states, SIZE=most, C=self.config.chunk, **decay)
        return out, last

    def outputs(
        self,
        n: int,
        values: Values,
        prefixes: Tensor | None,
        out: Tensor,
        pair: Pair,
        way: Direction,
        low: Tensor | None = None,
    ) -> None:
        """Write sums of targets n and denominators.

        The last scan divides. All blocks of values read the former and one of them writes the latter, so the two tensors
        differ. `low` gets what rounding takes from sums.
        """
        earlier, final = pair or (None, None)
        constants: dict[str, Any] = {"DENOMINATOR": self.denominator if pair else "none"} | way.constants
        constants |= self.of_both(n, self.config.far_features, self.config.values)
        for part in range(launches := self.d // self.config.far_features):
            last = part == launches - 1
            later = final if last or final is None else columns(final, self.leading, final.shape[-2])
            rows = map(self.optional, (out, low if last else None, earlier, later))
            constants |= {"ADD": way.strict or part > 0, "DIVIDE": self.divide and last and way is self.ways[-1]}
            given = *self.pair(n), values, self.borders, prefixes, *rows
            self.launch(_kernels().outputs, n, self.parts, *given, part=part, **constants)
            earlier = later

    def gradients(
        self, n: int, neg_grad: Tensor | None, pair: Sequence[Values], prefixes: Tensor | None, sink: "_Sink", way: Direction
    ) -> None:
        """Write gradients of targets n. `pair`: values of queries and keys. The first part includes denominators."""
        constants = self.of_both(n, self.config.features, self.config.far_values) | way.constants
        for part in range(self.e // self.config.far_values):
            given = *self.pair(n, None if part else neg_grad), pair[n], pair[1 - n], self.borders, prefixes, sink.grads(way)
            constants |= {"DENOMINATOR": "none" if part else self.denominator, "ADD": way.strict or part > 0}
            self.launch(_kernels().gradients, n, self.blocks, *given, part=part, **constants)

    def signed(self, states: Tensor) -> Tensor:
        """Gradients of states ``[*b h .]`` with the sign of denominators changed, as scans sum them up; its own inverse."""
        return torch.cat((states[..., : self.size], -states[..., self.size :]), -1)

    def results(self, learns: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Memory for sums, for denominators of a division, and, if it `learns`, for digits that sums lose."""
        width = self.sizes.columns + (self.sums.denominator == "column")
        out = self.sums.q.new_empty(*self.sums.q.shape[:-1], width, dtype=self.dtype)
        buffer = padded(out, self.leading, out.shape[-2]) if self.divide else None
        return out, buffer, torch.empty_like(out) if learns and self.halves(self.dtype) else None

    def halves(self, dtype: torch.dtype) -> bool:
        """Whether quotients of a dtype lack digits that <grad, v - out> needs, in which the mean of values cancels."""
        return self.divide and self.denominator == "encoded" and dtype == torch.bfloat16

    def quotients(self, grad: Tensor, out: Tensor, low: Tensor | None, denominators: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of sums ``[*b h t e]``, and negative gradients of denominators ``[*b h t 1]``."""
        neg_grad, chunk = columns(out, self.leading, out.shape[-2]), 64 if self.e <= 128 else 32
        sums = torch.empty_like(out, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float32)
        rows = map(self.optional, (grad, out, low, denominators, sums, neg_grad))
        length, inner, *_ = self.numbers[0]
        blocks = -(-length // chunk)
        grid = (self.leading.numel() * blocks,)
        launch(_kernels().quotients, grid, *rows, self.sizes, length, inner, C=chunk, E=self.e)
        return sums, neg_grad


class _Sink:
    """Buffers for gradients of queries (0) or keys (1): of x, and of tensors of features that need a gradient."""

    def __init__(self, call: KernelCall, n: int, needs: Sequence[bool], *, decay: bool):
        self.call, self.n, self.closed, self.decay = call, n, call.closed[n], decay
        x, self.tensors = call.sums.inputs[n], call.sums.features[n].tensors
        pairs = [*zip(self.tensors, needs, strict=True)]
        self.needed = [next((need for known, need in pairs if known is tensor), False) for tensor in self.closed[2:]]
        twice, added = self.closed.kind == "gather" and call.denominator == "plain", len(call.ways) > 1 or call.adds_values
        dtype = torch.float32 if twice or added else x.dtype
        self.x = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        self.plain = torch.empty_like(self.x) if twice else None
        self.v: Tensor | None = None
        self.table, self.normals, self.decays = None, [], []
        if self.needed[0] and self.closed.table is not None:
            shape = (*call.leading, x.shape[-2], self.closed.table.shape[-2:].numel())
            self.table = x.new_empty(shape, dtype=torch.float32)

    def grads(self, way: Direction) -> Grads:
        """Destinations of the gradients of one launch."""
        call, numbers, normal, decay = self.call, self.call.numbers[self.n], None, None
        if self.needed[1]:
            normal = self.x.new_empty(*call.leading, numbers.segments, call.sizes.width, dtype=torch.float32)
            self.normals.append(normal)
        if self.decay:
            decay = columns(self.x, call.leading, numbers.length, call.blocks)
            self.decays.append((-1 if way.strict else 1, decay))
        rows = map(call.optional, (self.plain, self.table, decay, self.v))
        return Grads(call.rows(self.x), *rows, normal=normal)

    def of_x(self) -> Tensor:
        """The gradient of x."""
        return self.x if self.plain is None else self.x.add_(self.plain)

    def of_decay(self) -> Tensor | None:
        """The gradient of log decays ``[*b h t]``, or None."""
        if not self.decay:
            return None
        side = -1 if self.n else 1
        return torch.stack([side * sign * x.sum(-1, dtype=torch.float64) for sign, x in self.decays]).sum(0)

    def found(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a tensor of features, or None."""
        if tensor is self.closed.table and self.table is not None:
            return self.table.unflatten(-1, (-1, 2)).sum_to_size(tensor.shape).to(tensor.dtype)
        if tensor is self.closed.normal and self.normals:
            return torch.stack(self.normals).sum((0, -2))[..., None, :].sum_to_size(tensor.shape).to(tensor.dtype)
        return None


class Triton(Operator):
    """Triton kernels: segments in parallel, each chunk by chunk; one state for sums over all keys without a decay."""

    name = "triton"

    def serves(self, sums: Sums) -> str:
        if why := gpu.unreadable("attention", *sums.tensors):
            return why
        compiling = torch.compiler.is_compiling()
        if not compiling and _is_known(sums):
            return ""
        if why := refusal(sums, streams=True, operator=True):
            return why
        if sums.stream is not None and sums.q.shape[-2] == 1:
            return "one token of a stream is a step, and no chunk"
        if unknown := [x.dtype for x in sums.inputs if x.dtype not in DTYPES]:
            return f"it reads float32, bfloat16 and float16, not {unknown[0]}"
        return _refuses(triton_stream.expanded(sums)) or triton_stream.refuses(sums, _closed(sums)[1].doubled)

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        if sums.stream is None:
            return super().run(sums)
        doubled = _closed(sums)[0].doubled
        out, (after,) = super().run(triton_stream.packed(sums, doubled))
        return out, triton_stream.unpacked(after, sums, doubled)

    def forward(self, sums: Sums, needs: Sequence[bool]) -> tuple[Any, list[Tensor]]:
        out, after, saved = self.summed(sums, any(needs))
        return (out if after is None else (out, after)), saved if any(needs) else []

    def summed(self, sums: Sums, learns: bool, *, whole: bool = False) -> tuple[Any, Tensor | None, list[Tensor]]:
        """The sums, those of a stream after it, and tensors to save; `whole` saves memory of states even without states."""
        with torch.cuda.device_of(sums.q):
            key = sums.notes["key"] if "key" in sums.notes else _key_of(sums)
            key = key and (*key, learns, *[whole] * whole)
            out, after, *saved = planned(key, sums.tensors, lambda: self._forward(sums, learns, whole))
        return out, after, [x for x in saved if x is not None]

    def packed(self, sums: Sums, learns: bool) -> list[Tensor]:
        out, _, saved = self.summed(sums, learns, whole=learns)
        if not learns:
            return [out]
        ways = 2 if sums.g is not None and not sums.causal else 1
        numbers, states = saved[:-ways], saved[-ways:]
        first, denominators, low = (*numbers, *[None] * (3 - len(numbers)))
        kept = None if first is out else first, denominators, low
        return [out, *(out.new_empty(0) if x is None else x for x in kept), *states]

    def fake(self, sums: Sums, learns: bool) -> list[Tensor]:
        call = _call(sums)
        first, denominators, low = call.results(learns)
        out = torch.empty_like(first, dtype=call.final)
        if not learns:
            return [out]
        kept = first if call.divide and call.final != call.dtype else None, denominators, low
        return [out, *(out.new_empty(0) if x is None else x for x in kept), *(call.states_of(1) for _ in call.ways)]

    def unpacked(self, sums: Sums, packed: Sequence[Tensor]) -> list[Tensor]:
        out, first, *rest = packed
        rest = [x for x in rest if x.numel()]
        return [first if first.numel() else out, *rest] if sums.denominator == "divide" else rest

    def _forward(self, sums: Sums, learns: bool, whole: bool) -> list[Tensor | None]:
        """The sums, those of a stream after it, and tensors to save."""
        call, e, after, earlier = _call(sums), sums.v.shape[-1], None, None
        out, buffer, low = call.results(learns)
        buffer = out[..., e:] if buffer is None else buffer
        denominators, saved = buffer[..., : out.shape[-2], :], []
        for way in call.ways:
            before, after = call.prefixes(1, None, call.values(), way, *_before(sums))
            saved += [call.states_of(1)] if before is None and whole else [] if before is None else [before]
            current = denominators if way is call.ways[-1] else columns(out, call.leading, out.shape[-2])
            pair = () if sums.denominator is None else (earlier, current)
            call.outputs(0, call.values(), before, out[..., :e], pair, way, low)
            earlier = current
        if call.divide:
            count(denominators)
            saved = [out, buffer, *([] if low is None else [low]), *saved]
        return [out.to(call.final), after, *saved, *(() if after is None else (after,))]

    def backward(self, sums: Sums, saved: Sequence[Tensor], grad: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        with torch.cuda.device_of(sums.q):
            more = () if sums.stream is not None else (*saved, grad)
            key = _key_of(sums, *more)
            key = key and (*key, *needs)
            return planned(key, (*sums.tensors, *more), lambda: self._backward(sums, saved, grad, needs))

    def _backward(self, sums: Sums, saved: Sequence[Tensor], grad: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        call, e, rest, of_after, of_before = _call(sums), sums.v.shape[-1], iter(needs[5:]), None, None
        if sums.stream is not None:
            grad, of_after = grad
        neg_grad = -grad[..., e:] if sums.denominator == "column" else None
        learned = [[next(rest) for _ in each.tensors] for each in sums.features]
        if call.divide:
            out, buffer, *saved = saved
            low, *saved = saved if call.halves(out.dtype) else (None, *saved)
            grad, neg_grad = call.quotients(grad, out, low, buffer[..., : out.shape[-2], :])
        pair = Values(call.rows(grad[..., :e]), None), call.values()
        sinks = [_Sink(call, n, learned[n], decay=sums.g is not None and needs[3 + n]) for n in range(2)]
        dtype = torch.float32 if len(call.ways) > 1 or call.adds_features else sums.v.dtype
        dv, states = torch.empty_like(sums.v, dtype=dtype, memory_format=torch.contiguous_format), iter(saved)
        if call.config.together:
            sinks[1].v = dv
        for way in call.ways:
            before = next(states) if call.has_states else None
            first = None if of_after is None else call.signed(of_after)
            after, of_before = call.prefixes(0, neg_grad, pair[0], way.back, first)
            call.gradients(0, neg_grad, pair, before, sinks[0], way)
            call.gradients(1, neg_grad, pair, after, sinks[1], way.back)
            if sinks[1].v is None:
                call.outputs(1, pair[0], after, dv, (), way.back)
        of_tensors = [sink.found(tensor) for sink in sinks for tensor in sink.tensors]
        of_inputs = [x.to(y.dtype) for x, y in zip((*(sink.of_x() for sink in sinks), dv), sums.inputs, strict=True)]
        decays, first_states = [sink.of_decay() for sink in sinks], ()
        if of_after is not None and of_before is not None:
            of_before, first_states = call.signed(of_before), _before(sums)
            if decays[1] is not None:  # states decay from the log decay of the first key to that of the last
                decays[1][..., -1] += (of_after * next(states)).sum(-1, dtype=torch.float64)
                for state in first_states:
                    decays[1][..., 0] -= (of_before * state).sum(-1, dtype=torch.float64)
        return [*of_inputs, *decays, *of_tensors, *(None for _ in learned[2]), *(of_before for _ in first_states)]


def _closed(sums: Sums) -> list[TritonFeatures]:
    return [form for form in map(TritonFeatures.of, sums.features[:2]) if form is not None]


def _call(sums: Sums) -> KernelCall:
    return KernelCall(sums, _closed(sums))


def _key_of(sums: Sums, *more: Tensor) -> Any:
    """All that the launches for a problem and more tensors depend on, except addresses; None for problems without plans."""
    if sums.stream is not None or counted() or not all(isinstance(each.phi, FeatureMap) for each in sums.features):
        return None
    forms = tuple((each.phi, each.kinds, each.mask is None, each.unrotated, each.dtype) for each in sums.features)
    return sums.causal, sums.denominator, sums.g is None, sums.segmented, forms, layouts((*sums.tensors, *more))


def _is_known(sums: Sums) -> bool:
    """Whether the kernels have served such a problem before."""
    key = sums.notes["key"] = _key_of(sums)
    return key is not None and any((*key, learns) in PLANS for learns in (False, True))


def _before(sums: Sums) -> tuple[Tensor, ...]:
    """The state of a stream before its tokens as one row ``[*b h .]`` (see `triton_stream.packed`), or nothing."""
    return () if sums.stream is None else sums.stream.sums


def _refuses(sums: Sums) -> str:
    """Why the kernels do not compute these features, or ""."""
    (q, k, v), (queries, keys, values) = sums.inputs, sums.features
    if any(x.numel() == 0 for x in sums.inputs):
        return "there is nothing to sum up"
    for phi in (queries.phi, keys.phi):
        if isinstance(phi, FeatureMap) and phi not in COMPILED:
            known = ", ".join(phi.name for phi in COMPILED)
            return f"it does not know the feature map {phi.name!r}, only {known} of isopos.feature_maps"
    of_q, of_k = TritonFeatures.of(queries), TritonFeatures.of(keys)
    if of_q is None or of_k is None:
        return "it makes features by a reflection, then a rotation, a lift or a gather, and by no other maps"
    if any(f.kind == "gather" and f.normal is not None and f.normal.requires_grad for f in (of_q, of_k)):
        return "it has no gradient of a normal that a gather follows"
    if values.phi is not identity or values.map is not None or values.mask is not keys.mask or queries.mask is not None:
        return "values are summed up as they are, and a mask is one of keys and values"
    width, e = q.shape[-1], v.shape[-1]
    if k.shape[-1] != width or of_q.doubled != of_k.doubled or {width} != {width, *of_q.widths, *of_k.widths}:
        return (
            f"queries, keys and their maps have one width, here {sorted({width, k.shape[-1], *of_q.widths, *of_k.widths})}"
        )
    if any(x.shape[:-2] != q.shape[:-2] for x in (k, v)):
        return "queries, keys and values have one shape of samples and heads"
    if max(width * of_q.doubled, e) > WIDEST:
        return f"features and values come up to {WIDEST}, not by {max(width * of_q.doubled, e)}"
    reflected = of_q.normal is not None or of_k.normal is not None
    most = WIDEST if _precision(q, k, v) == "bf16" and _generation(q.device) >= 9 else REFLECTED
    if reflected and width * of_q.doubled > most:
        return f"features of a reflection come up to {most}, or {WIDEST} in bfloat16 on sm_90, not by {width * of_q.doubled}"
    return ""


TRITON = OPERATED["triton"] = Triton()
