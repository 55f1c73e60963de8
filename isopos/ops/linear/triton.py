"""Linear attention by Triton's kernels, on CUDA devices: features, positions, decay, sums and division in one go.

Nothing is in memory but inputs, outputs, and a state a segment: as many segments as fill the device. Features are made again
in each scan. Sums have the dtype that all inputs have, unless they are yet to be divided or their inputs differ: then they
are float32. Accuracy: features of bfloat16 inputs are rounded to bfloat16 again after phi and positions, as are weights and
states where they are multiplied; float16 goes through TF32, of as many digits, before sm_100; float32 through three products
of TF32, to some 1e-6.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.feature_maps import COMPILED, FeatureMap, identity
from isopos.ops import gpu
from isopos.ops.linear import triton_stream
from isopos.ops.linear.autograd import Kernel, refusal
from isopos.ops.linear.division import count
from isopos.ops.linear.features import Features, Sums

DTYPES = torch.bfloat16, torch.float16, torch.float32
WIDEST = 256  # features, and values
REFLECTED = 128  # features of a reflection that are no bfloat16, or before sm_90: they spill too much above
LEAST = 4  # chunks of a segment: fewer would move more bytes of states than of inputs
TILE = 16  # the least side of a product of matrices


class Rows(NamedTuple):
    """A tensor ``[outer inner head token .]`` with strides; the numbers of a row are next to each other."""

    first: Any
    outer: int
    inner: int
    head: int
    token: int


class Inputs(NamedTuple):
    """What makes the features of readers or feeders; None for what there is not."""

    x: Rows | None  # None for what has no feeders: Triton 3.6 asks no tuple with None in it whether it is None
    table: Rows | None  # pairs (cos, sin), or an index; of feeders None, too, where it is that of readers
    normal: Rows | None
    mask: Rows | None
    g: Rows | None  # log decays, float64
    less: Rows | None  # less gradients of denominators: weights of these rows in sums of features
    end: Any = None  # Triton 3.6 knows fields of one only if a constant follows them


class Values(NamedTuple):
    """Rows of values."""

    x: Rows
    mask: Rows | None


class Grads(NamedTuple):
    """Where gradients of readers go; None for what needs none."""

    x: Rows
    plain: Rows | None  # of phi's own features, where a gather has x in another order
    table: Rows | None
    decay: Rows | None  # a number a block of features
    v: Rows | None  # where keys gather what is that of their values, too
    normal: Any  # the sum of each program ``[. width]``
    end: Any = None  # as of `Inputs`


class Shape(NamedTuple):
    """How many: tokens; numbers of x, of features, of values; heads and samples; chunks of a segment, segments; blocks."""

    length: int
    width: int
    features: int
    columns: int
    own: int  # features of a denominator
    inner: int
    heads: int
    chunks: int
    segments: int
    states: int  # of a head that are read: one a segment, or one
    blocks: int  # of features or values, whose programs are next to each other: they read the same
    part: int  # of features in `outputs`, of values in `gradients`: launches whose results add up


class Closed(NamedTuple):
    """Features as the kernels make them: phi, a reflection, then a table."""

    phi: str
    kind: str  # of the table
    table: Tensor | None
    normal: Tensor | None

    @classmethod
    def of(cls, features: Features) -> "Closed | None":
        """What makes these features, if the kernels know it."""
        if not isinstance(features.phi, FeatureMap) or features.phi not in COMPILED or (closed := features.closed()) is None:
            return None
        return cls(features.phi.name, *closed)

    @property
    def doubled(self) -> int:
        """How many features it makes of one."""
        return 2 if self.kind == "lift" else 1

    @property
    def widths(self) -> set[int]:
        """How many numbers of x its tensors take."""
        found = set() if self.normal is None else {self.normal.shape[-1]}
        if self.table is not None:
            doubled = 2 if self.kind == "rotation" else 1
            found.add(self.table.shape[-1] if self.kind == "gather" else doubled * self.table.shape[-2])
        return found


class Config(NamedTuple):
    """How a problem is cut into tiles.

    Attributes:
        chunk: Tokens whose weights are formed.
        features: Of a program of `gradients` and `states`.
        values: Of a program of `outputs` and `states`.
        far_features: Of a launch of `outputs`.
        far_values: Of a launch of `gradients`.
        warps: Of a program.
        stages: Chunks whose loads are under way.
        together: Whether keys and values get their gradients in one scan, which reads less and needs more registers.
    """

    chunk: int
    features: int
    values: int
    far_features: int
    far_values: int
    warps: int
    stages: int
    together: bool


def config(
    features: int,
    values: int,
    precision: str,
    generation: int,
    *,
    whole: bool = False,
    decays: bool = False,
    light: bool = False,
) -> Config:
    """What fits into registers and shared memory of sm_80 and later; features and values are powers of two.

    Products before sm_90 hold all of their operands in registers, as do those of TF32, which are the sum of several launches
    where there are more than 64. A reflection needs the `whole` row of features, whatever that spills. Weights of decays are
    differences in float64, for which the tiles are smaller. What is `light`, without feature maps and denominators, takes
    few registers. Four warps multiply 64 rows and do none of them twice; two programs of four share a multiprocessor, so
    that one computes while the other waits.
    """
    widest, warps, together = max(features, values), 8, False
    if precision == "bf16":
        most, side, far, stages = 1 << 13, 128, 256, 2
        chunk = 16 if whole and widest > (128 if generation >= 9 else 64) else 32
        if generation >= 9:
            if widest <= (64 if whole or decays else 128) and (light or not decays):
                chunk = 64
            warps = 4 if widest <= (128 if light and not whole else 64) else 8
            together = light and not decays and widest <= 64
    else:
        chunk, most, side, far, stages = 16, 1 << 11, 32, 64, 1
        warps = 8 if whole and features > far else 4
    far_features, far_values = features if whole else min(far, features), min(far, values)
    block = features
    if whole:
        far_values = min(far_values, max(TILE, (1 << 14 if precision == "bf16" else most) // features))
    else:
        side_of_features = min(side, 32) if decays and generation < 9 else side
        block = min(side_of_features, max(TILE, min(features, most // far_values)))
    parts = min(side, max(TILE, min(values, most // far_features)))
    return Config(chunk, block, parts, far_features, far_values, warps, stages, together)


class Way(NamedTuple):
    """A scan: back or not, and whether a token leaves itself out, as one of two ways does."""

    reverse: bool
    strict: bool

    @property
    def back(self) -> "Way":
        """Of keys that gather what queries leave, or the other way round."""
        return Way(not self.reverse, self.strict)

    @property
    def constants(self) -> dict[str, bool]:
        """As kernels take it."""
        return {"REVERSE": self.reverse, "STRICT": self.strict}


def _tile(n: int) -> int:
    """The power of two that holds so many."""
    return max(TILE, 1 << (n - 1).bit_length())


def _rows(x: Tensor, leading: torch.Size) -> Rows:
    """x ``[*b h t .]`` or broadcastable to it, in strides."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    x = x.expand(*leading, *x.shape[-2:])
    x = x.flatten(0, len(leading) - 3) if len(leading) > 3 else x[(None,) * (3 - len(leading))]
    outer, inner, head, token, _ = x.stride()
    return Rows(x, outer, inner, head, token if x.shape[-2] > 1 else 0)


def _kernels() -> Any:
    from isopos.ops.linear import triton_kernels

    return triton_kernels


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@cache
def _segments(most: int, programs: int, room: int) -> int:
    """Into how many segments programs cut their scans, so that the last one ends soonest where there is room for so many.

    All segments of a scan but its last are read once more beforehand: half of what the scan itself moves.
    """
    most = max(1, min(most, -(-2 * room // programs)))
    return min(range(1, most + 1), key=lambda n: -(-programs * n // room) / n * (1.5 - 0.5 / n))


def _precision(*inputs: Tensor) -> str:
    """How matrices are multiplied. For sm_100 Triton 3.7.1 does not compile `outputs` with TF32, but with three of it."""
    if gpu.interpreted():
        return "ieee"
    dtypes = {x.dtype for x in inputs}
    if dtypes == {torch.float16} and _generation(inputs[0].device) < 10:
        return "tf32"
    return "bf16" if dtypes == {torch.bfloat16} else "tf32x3"


@cache
def _generation(device: torch.device) -> int:
    """The first number of the compute capability."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


class Call:
    """The kernels' arguments for one problem; of queries (0) and keys (1), either may gather what the other leaves."""

    def __init__(self, sums: Sums, closed: Sequence[Closed]):
        self.sums, self.leading, self.closed = sums, sums.q.shape[:-2], closed
        self.every = not sums.causal and sums.g is None
        self.ways = (Way(False, False),) if sums.causal or self.every else (Way(False, False), Way(True, True))
        self.own = "none" if sums.denominator is None else "plain" if sums.features[0].own else "encoded"
        self.divide, self.precision = sums.denominator == "divide", _precision(*sums.inputs)
        width, values, doubled = sums.q.shape[-1], sums.v.shape[-1], closed[0].doubled
        self.x, self.d, self.e = _tile(width), _tile(width) * doubled, _tile(values)
        self.config = config(
            self.d,
            self.e,
            self.precision,
            _generation(sums.q.device),
            whole=any(own.normal is not None for own in closed),
            decays=sums.g is not None,
            light=self.own == "none" and all(own.phi == "identity" for own in closed),
        )
        self.blocks, self.parts = self.d // self.config.features, self.e // self.config.values
        self.adds_features, self.adds_values = self.d > self.config.far_features, self.e > self.config.far_values
        own = {"none": 0, "plain": width, "encoded": width * doubled}[self.own]
        inner = self.leading[-2] if len(self.leading) > 1 else 1
        numbers = width, width * doubled, values, own, inner, self.leading[-1]
        self.shapes = [Shape(x.shape[-2], *numbers, *self._cut(x.shape[-2]), 1, 0) for x in sums.inputs[:2]]
        self.borders = self.rows(sums.g[1][..., None]) if sums.g is not None else None

    def _cut(self, length: int) -> tuple[int, int, int]:
        """Chunks of a segment, segments, and states of a head."""
        chunks, programs = -(-length // self.config.chunk), self.leading.numel() * max(self.blocks, self.parts)
        room = _processors(self.sums.q.device) * (8 // self.config.warps)
        each = -(-chunks // _segments(chunks // LEAST, programs, room))
        segments = -(-chunks // each)
        return each, segments, 1 if self.every else segments

    def rows(self, x: Tensor) -> Rows:
        """A tensor ``[*b h t .]`` or broadcastable to it."""
        return _rows(x, self.leading)

    def optional(self, x: Tensor | None) -> Rows | None:
        """The same of what may be absent."""
        return None if x is None else self.rows(x)

    def inputs(self, n: int, less: Tensor | None = None) -> Inputs:
        """What makes features."""
        closed, mask, g = self.closed[n], self.sums.features[n].mask, self.sums.g
        table = closed.table.flatten(-2) if closed.table is not None and closed.kind != "gather" else closed.table
        more = table, closed.normal, None if mask is None else mask.view(torch.uint8), None if g is None else g[n][..., None]
        return Inputs(self.rows(self.sums.inputs[n]), *map(self.optional, (*more, less)))

    def pair(self, n: int, less: Tensor | None = None) -> tuple[Inputs, Inputs]:
        """What makes features of readers and feeders, which may have one table; `less` is that of queries.

        No feeders where all that these leave is in a state.
        """
        readers = self.inputs(n, None if n else less)
        if self.every:
            return readers, Inputs(*(None,) * len(readers))
        feeders = self.inputs(1 - n, less if n else None)
        return readers, feeders._replace(table=None) if self.closed[0].table is self.closed[1].table else feeders

    def values(self) -> Values:
        """v."""
        mask = self.sums.features[2].mask
        return Values(self.rows(self.sums.v), None if mask is None else self.rows(mask.view(torch.uint8)))

    def constants(self, n: int, features: int, values: int) -> dict[str, Any]:
        """Of readers' or feeders' features, in tiles."""
        own = {"C": self.config.chunk, "X": features // self.closed[n].doubled, "D": features, "E": values}
        own |= {"PHI": self.closed[n].phi, "KIND": self.closed[n].kind, "PRECISION": self.precision}
        return own | {"num_warps": self.config.warps, "num_stages": self.config.stages}

    def of_both(self, n: int, features: int, values: int) -> dict[str, Any]:
        """The same with those of feeders."""
        others = {"PHI_OF_FEEDERS": self.closed[1 - n].phi, "KIND_OF_FEEDERS": self.closed[1 - n].kind}
        return self.constants(n, features, values) | others

    def launch(self, kernel: Any, n: int, blocks: int, *given: Any, part: int = 0, **constants: Any) -> None:
        """Run a kernel for all heads and segments of queries or keys."""
        shape = self.shapes[n]._replace(blocks=blocks, part=part)
        kernel[self.leading.numel() * blocks, shape.segments](*given, shape, **constants)

    def prefixes(
        self, n: int, less: Tensor | None, values: Values, way: Way, first: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What they leave before each segment, None for nothing; and of a stream after all of them.

        `first` is what a stream has before the segment that the scan meets first. Of all keys it is what all segments leave.
        """
        kernels, shape, heads, last = _kernels(), self.shapes[n], self.leading.numel(), None
        if shape.segments == 1 and self.sums.stream is None and not self.every:
            return None, None
        size = shape.features * shape.columns + shape.own
        out = self.sums.q.new_empty(heads, shape.segments, size, dtype=torch.float32)
        if self.sums.stream is not None:
            last = out.new_empty(*self.leading, size)
        constants = self.constants(n, self.config.features, self.config.values) | way.constants
        given = self.inputs(n, less), values, self.borders, out
        constants |= {"DENOMINATOR": self.own, "ALL": self.every or last is not None}
        self.launch(kernels.states, n, self.blocks * self.parts, *given, **constants)
        if self.every:
            return out.sum(1), None
        number = min(1024, _tile(size))
        decay = {"DECAY": self.borders is not None, **way.constants}
        states = out, first, last, self.borders, shape
        kernels.scan[heads, -(-size // number)](*states, SIZE=number, C=self.config.chunk, **decay)
        return out, last

    def outputs(
        self,
        n: int,
        values: Values,
        prefixes: Tensor | None,
        out: Tensor,
        denominators: Sequence[Tensor | None],
        way: Way,
    ) -> None:
        """Write what they gather of the others, and denominators: those of the scan before and of this one, or none.

        The last scan divides. Blocks of values read the former and one writes the latter, so that these are not one tensor.
        """
        earlier, final = denominators or (None, None)
        own: dict[str, Any] = {"DENOMINATOR": self.own if denominators else "none"} | way.constants
        own |= self.of_both(n, self.config.far_features, self.config.values)
        for part in range(launches := self.d // self.config.far_features):
            last = part == launches - 1
            later = final if last or final is None else torch.empty_like(final)
            rows = map(self.optional, (out, earlier, later))
            own |= {"ADD": way.strict or part > 0, "DIVIDE": self.divide and last and way is self.ways[-1]}
            given = *self.pair(n), values, self.borders, prefixes, *rows
            self.launch(_kernels().outputs, n, self.parts, *given, part=part, **own)
            earlier = later

    def gradients(
        self, n: int, less: Tensor | None, pair: Sequence[Values], prefixes: Tensor | None, sink: "_Sink", way: Way
    ) -> None:
        """Write their gradients; `pair` are values of queries and keys. The first part has those of denominators."""
        own = self.of_both(n, self.config.features, self.config.far_values) | way.constants
        for part in range(self.e // self.config.far_values):
            given = *self.pair(n, None if part else less), pair[n], pair[1 - n], self.borders, prefixes, sink.grads(way)
            own |= {"DENOMINATOR": "none" if part else self.own, "ADD": way.strict or part > 0}
            self.launch(_kernels().gradients, n, self.blocks, *given, part=part, **own)

    def turned(self, states: Tensor) -> Tensor:
        """Gradients of states ``[*b h .]`` as scans sum them up: of denominators, less these. The other way round, too."""
        size = self.shapes[0].features * self.shapes[0].columns
        return torch.cat((states[..., :size], -states[..., size:]), -1)

    def quotients(self, grad: Tensor, out: Tensor, denominators: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of sums ``[*b h t e]``, and less those of denominators ``[*b h t 1]``."""
        less, chunk = torch.empty_like(denominators), 64 if self.e <= 128 else 32
        own = torch.empty_like(out, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float32)
        rows = map(self.rows, (grad, out, denominators, own, less))
        shape = self.shapes[0]._replace(blocks=-(-self.shapes[0].length // chunk))
        _kernels().quotients[self.leading.numel() * shape.blocks,](*rows, shape, C=chunk, E=self.e)
        return own, less


class _Sink:
    """Buffers for gradients of queries (0) or keys (1): of x, and of the tensors of features that need one."""

    def __init__(self, call: Call, n: int, needs: Sequence[bool], *, decay: bool):
        self.call, self.n, self.closed, self.decay = call, n, call.closed[n], decay
        x, self.tensors = call.sums.inputs[n], call.sums.features[n].tensors
        pairs = [*zip(self.tensors, needs, strict=True)]
        self.needed = [next((need for own, need in pairs if own is tensor), False) for tensor in self.closed[2:]]
        twice, added = self.closed.kind == "gather" and call.own == "plain", len(call.ways) > 1 or call.adds_values
        dtype = torch.float32 if twice or added else x.dtype
        self.x = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        self.plain = torch.empty_like(self.x) if twice else None
        self.v: Tensor | None = None
        self.table, self.normals, self.decays = None, [], []
        if self.needed[0] and self.closed.table is not None:
            shape = (*call.leading, x.shape[-2], self.closed.table.shape[-2:].numel())
            self.table = x.new_empty(shape, dtype=torch.float32)

    def grads(self, way: Way) -> Grads:
        """Where the gradients of one launch go."""
        call, shape, normal, decay = self.call, self.call.shapes[self.n], None, None
        if self.needed[1]:
            normal = self.x.new_empty(*call.leading, shape.segments, shape.width, dtype=torch.float32)
            self.normals.append(normal)
        if self.decay:
            decay = self.x.new_empty(*call.leading, shape.length, call.blocks, dtype=torch.float32)
            self.decays.append((-1 if way.strict else 1, decay))
        rows = map(call.optional, (self.plain, self.table, decay, self.v))
        return Grads(call.rows(self.x), *rows, normal=normal)

    def of_x(self) -> Tensor:
        """That of x."""
        return self.x if self.plain is None else self.x.add_(self.plain)

    def of_decay(self) -> Tensor | None:
        """That of log decays ``[*b h t]``."""
        if not self.decay:
            return None
        side = -1 if self.n else 1
        return torch.stack([side * sign * x.sum(-1, dtype=torch.float64) for sign, x in self.decays]).sum(0)

    def found(self, tensor: Tensor) -> Tensor | None:
        """That of a tensor of features."""
        if tensor is self.closed.table and self.table is not None:
            return self.table.unflatten(-1, (-1, 2)).sum_to_size(tensor.shape).to(tensor.dtype)
        if tensor is self.closed.normal and self.normals:
            return torch.stack(self.normals).sum((0, -2))[..., None, :].sum_to_size(tensor.shape).to(tensor.dtype)
        return None


class Triton(Kernel):
    """Walks over segments in parallel, each chunk by chunk; of all keys without a decay, one state for all queries."""

    name = "triton"

    def serves(self, sums: Sums) -> str:
        if why := gpu.unreadable(*sums.tensors) or refusal(sums, streams=True):
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
        call, e, shape, after = _call(sums), sums.v.shape[-1], sums.q.shape[:-1], None
        dtypes, column = {x.dtype for x in sums.inputs}, sums.denominator == "column"
        final = torch.float32 if column or len(dtypes) > 1 else sums.q.dtype
        dtype = torch.float32 if len(call.ways) > 1 or call.adds_features else final
        out = sums.q.new_empty(*shape, e + column, dtype=dtype)
        denominators = out.new_empty(*shape, 1, dtype=torch.float32) if call.divide else out[..., e:]
        saved, earlier = [], None
        with torch.cuda.device_of(sums.q):
            for way in call.ways:
                before, after = call.prefixes(1, None, call.values(), way, *_before(sums))
                saved += [] if before is None else [before]
                own = denominators if way is call.ways[-1] else torch.empty_like(denominators)
                pair = () if sums.denominator is None else (earlier, own)
                call.outputs(0, call.values(), before, out[..., :e], pair, way)
                earlier = own
        if call.divide:
            count(denominators)
        out, saved = out.to(final), [out, denominators, *saved] if call.divide else saved
        if after is not None:
            out, saved = (out, after), [*saved, after]
        return out, saved if any(needs) else []

    def backward(self, sums: Sums, saved: Sequence[Tensor], grad: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        call, e, rest, of_after, of_before = _call(sums), sums.v.shape[-1], iter(needs[5:]), None, None
        if sums.stream is not None:
            grad, of_after = grad
        less = -grad[..., e:] if sums.denominator == "column" else None
        learned = [[next(rest) for _ in own.tensors] for own in sums.features]
        with torch.cuda.device_of(sums.q):
            if call.divide:
                out, denominators, *saved = saved
                grad, less = call.quotients(grad, out, denominators)
            pair = Values(call.rows(grad[..., :e]), None), call.values()
            sinks = [_Sink(call, n, learned[n], decay=sums.g is not None and needs[3 + n]) for n in range(2)]
            dtype = torch.float32 if len(call.ways) > 1 or call.adds_features else sums.v.dtype
            dv, states = torch.empty_like(sums.v, dtype=dtype, memory_format=torch.contiguous_format), iter(saved)
            if call.config.together:
                sinks[1].v = dv
            for way in call.ways:
                before, first = next(states, None), None if of_after is None else call.turned(of_after)
                after, of_before = call.prefixes(0, less, pair[0], way.back, first)
                call.gradients(0, less, pair, before, sinks[0], way)
                call.gradients(1, less, pair, after, sinks[1], way.back)
                if sinks[1].v is None:
                    call.outputs(1, pair[0], after, dv, (), way.back)
        of_tensors = [sink.found(tensor) for sink in sinks for tensor in sink.tensors]
        own = [x.to(y.dtype) for x, y in zip((*(sink.of_x() for sink in sinks), dv), sums.inputs, strict=True)]
        decays, own_states = [sink.of_decay() for sink in sinks], ()
        if of_after is not None and of_before is not None:
            of_before, own_states = call.turned(of_before), _before(sums)
            if decays[1] is not None:  # states go from the first key's log decay to the last one's
                decays[1][..., -1] += (of_after * next(states)).sum(-1, dtype=torch.float64)
                for state in own_states:
                    decays[1][..., 0] -= (of_before * state).sum(-1, dtype=torch.float64)
        return [*own, *decays, *of_tensors, *(None for _ in learned[2]), *(of_before for _ in own_states)]


def _closed(sums: Sums) -> list[Closed]:
    return [own for own in map(Closed.of, sums.features[:2]) if own is not None]


def _call(sums: Sums) -> Call:
    return Call(sums, _closed(sums))


def _before(sums: Sums) -> tuple[Tensor, ...]:
    """What a stream has before its tokens, as `triton_stream.packed` makes it: one row ``[*b h .]``, or nothing."""
    return () if sums.stream is None else sums.stream.sums


def _refuses(sums: Sums) -> str:
    """Why the kernels do not make these features, or ""."""
    (q, k, v), (queries, keys, values) = sums.inputs, sums.features
    if any(x.numel() == 0 for x in sums.inputs):
        return "there is nothing to sum up"
    for phi in (queries.phi, keys.phi):
        if isinstance(phi, FeatureMap) and phi not in COMPILED:
            known = ", ".join(own.name for own in COMPILED)
            return f"it does not know the feature map {phi.name!r}, only {known} of isopos.feature_maps"
    of_q, of_k = Closed.of(queries), Closed.of(keys)
    if of_q is None or of_k is None:
        return "it makes features by a reflection, then a rotation, a lift or a gather, and by no other maps"
    if any(own.kind == "gather" and own.normal is not None and own.normal.requires_grad for own in (of_q, of_k)):
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


TRITON = Triton()
