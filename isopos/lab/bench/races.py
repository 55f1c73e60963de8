"""Workloads by name, and races: pairs of workloads that are compared at one size, with goals."""

import itertools
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.attention import linear_attention
from isopos.feature_maps import elu1
from isopos.lab.bench import ceilings
from isopos.lab.bench.ceilings import FRESH, PRODUCT
from isopos.lab.bench.peers import PEERS
from isopos.lab.timing import Goal, Row, at_least, at_most, rounds_of, seconds_of, swept
from isopos.nn import Attention
from isopos.positions import sequence
from isopos.scheme import Scheme
from isopos.schemes import build
from isopos.spec import split_spec
from isopos.state import State
from isopos.stream import Stream

EPSILON = 1e-6
PACKED = 8  # sequences per packed row


class Shape(NamedTuple):
    """Sizes of queries, keys and values; a decoding step attends to `cache` earlier tokens.

    Examples:
        >>> print(Shape(length=512, batch=1), Shape(length=1, cache=32768), Shape().limited(100))
        B=1 H=8 L=512 d=64 B=2 H=8 d=64, after 32768 tokens B=2 H=8 L=100 d=64
    """

    length: int = 8192
    batch: int = 2
    heads: int = 8
    head_dim: int = 64
    cache: int = 0

    def __str__(self) -> str:
        length = "" if self.length == 1 else f"L={self.length} "
        cache = f", after {self.cache} tokens" if self.cache else ""
        return f"B={self.batch} H={self.heads} {length}d={self.head_dim}{cache}"

    def limited(self, longest: int) -> "Shape":
        """The shape with at most `longest` tokens."""
        return self._replace(length=min(self.length, longest), cache=min(self.cache, longest))


def workload_of(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """A workload of isopos, PyTorch or a peer for one shape; ImportError if the peer is not installed."""
    if name in PEERS:
        return PEERS[name].workload(torch.empty(shape.length, shape.head_dim, dtype=dtype))
    return WORKLOADS[name](shape)


def scheme_for(spec: str, shape: Shape) -> Scheme:
    """A scheme, with options, for the heads of a shape."""
    name, options = split_spec(spec)
    return build(name, shape.head_dim, shape.heads, options)


def _attention(shape: Shape, spec: str = "none", *, causal: bool = True):
    return partial(linear_attention, **scheme_for(spec, shape).at(sequence(shape.length)), causal=causal)


def _layer(shape: Shape, spec: str):
    scheme = scheme_for(spec, shape)
    layer = Attention(shape.heads * shape.head_dim, scheme)
    return partial(layer, at=scheme.at(sequence(shape.length)), causal=True)


def _masked(shape: Shape):
    mask = (torch.arange(shape.length) < shape.length - shape.length // 10).expand(shape.batch, -1)
    return partial(linear_attention, feature_map=elu1, causal=True, mask=mask)


def _packed(shape: Shape):
    ids = (torch.arange(shape.length) * PACKED // shape.length).expand(shape.batch, -1)
    return partial(linear_attention, feature_map=elu1, causal=True, segment_ids=ids)


def _divided_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) + EPSILON)


def _rotation(shape: Shape):
    rho = scheme_for("rope", shape).encoding(sequence(shape.length))
    return lambda q, k: (rho(q), rho(k))


def _table(shape: Shape) -> Tensor:
    """Cosines and sines in float32 ``[t d/2 2]``."""
    return scheme_for("rope", shape).encoding(sequence(shape.length)).table[0]


def _half_split(shape: Shape):
    """The common formula, on pairs (i, i + d/2)."""
    cos, sin = (part.repeat(1, 2) for part in _table(shape).unbind(-1))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return lambda q, k: (rotate(q), rotate(k))


def _stacked(shape: Shape):
    """torchtune's formula, on pairs (2i, 2i + 1) in float32."""
    cos, sin = _table(shape).unbind(-1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).type_as(x)

    return lambda q, k: (rotate(q), rotate(k))


def _stream(shape: Shape, spec: str = ""):
    """Decoding steps that return a new state, with a scheme at advancing positions, or without a scheme."""
    scheme, state, position = scheme_for(spec, shape) if spec else None, State(), 0

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal state, position
        at: Any = {"feature_map": elu1, "state": state}
        if scheme is not None:
            at = scheme.at(torch.tensor([[position]]), state=state)
        out, state = linear_attention(q, k, v, **at, causal=True, return_state=True)
        position += 1
        return out

    return step


def _added(shape: Shape):
    """Add a tensor of the state's size to another in place: the minimum that a step reads and writes, and one more read."""
    size = shape.batch, shape.heads, shape.head_dim, shape.head_dim + 1
    state, addend = torch.zeros(size), torch.randn(size)
    return lambda q, k, v: state.add_(addend)


def _scaled(shape: Shape):
    """Read and write a tensor of the state's size once."""
    state = torch.ones(shape.batch, shape.heads, shape.head_dim, shape.head_dim + 1)
    return lambda q, k, v: state.mul_(1)


def _einsum_step(shape: Shape):
    sums = torch.zeros(shape.batch, shape.heads, shape.head_dim, shape.head_dim)
    keys = torch.zeros(shape.batch, shape.heads, shape.head_dim)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal sums, keys
        q, k, v = F.elu(q[:, :, 0]) + 1, F.elu(k[:, :, 0]) + 1, v[:, :, 0]
        sums = sums + torch.einsum("bhd,bhe->bhde", k, v)
        keys = keys + k
        denominator = torch.einsum("bhd,bhd->bh", q, keys) + EPSILON
        return (torch.einsum("bhd,bhde->bhe", q, sums) / denominator.unsqueeze(-1)).unsqueeze(-2)

    return step


def _cached(shape: Shape):
    """Softmax attention of one query to a full cache; each step replaces the cache's last token."""
    keys, values = (torch.randn(1, 1, shape.cache, shape.head_dim).repeat(*shape[1:3], 1, 1) for _ in range(2))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[:, :, -1:], values[:, :, -1:] = k, v
        return F.scaled_dot_product_attention(q, keys, values)

    return step


def _captured(shape: Shape, make: Callable[[Shape], Any]):
    """A workload as a CUDA graph, captured at its first call and replayed later, so that Python takes no part."""
    call, graph = make(shape), None

    def replay(*inputs: Tensor) -> None:
        nonlocal graph
        if not inputs[0].is_cuda:  # Triton's interpreter
            return call(*inputs)
        if graph is None:
            for _ in range(3):
                call(*inputs)  # which compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(*inputs)
        graph.replay()

    return replay


BARE = "none:feature_map=identity,denominator=none"
WORKLOADS: dict[str, Callable[[Shape], Any]] = {
    "causal": _attention,
    "causal, retnet decay": partial(_attention, spec="none:decay=retnet"),
    "causal, no features": partial(_attention, spec=BARE),
    "causal, no features, retnet decay": partial(_attention, spec=f"{BARE},decay=retnet"),
    "causal, masked": _masked,
    "causal, packed": _packed,
    "bidirectional": partial(_attention, causal=False),
    "bidirectional, no features": partial(_attention, spec=BARE, causal=False),
    "bidirectional, no features, retnet decay": partial(_attention, spec=f"{BARE},decay=retnet", causal=False),
    "two products": lambda shape: lambda q, k, v: q @ (k.mT @ v),
    "two products, elu + 1, divided": lambda shape: _divided_products,
    "softmax (SDPA)": lambda shape: partial(F.scaled_dot_product_attention, is_causal=True),
    "softmax (SDPA), bidirectional": lambda shape: F.scaled_dot_product_attention,
    "rotation": _rotation,
    "two clones": lambda shape: lambda q, k: (q.clone(), k.clone()),
    "rotate-half": _half_split,
    "torchtune's formula": _stacked,
    "decoding step": _stream,
    "decoding step of a scheme, no positions": partial(_stream, spec="none"),
    "decoding step of a scheme, rotary": partial(_stream, spec="rope"),
    "prepared step, no positions": lambda shape: Stream(scheme_for("none", shape)),
    "prepared step, rotary": lambda shape: Stream(scheme_for("rope", shape)),
    "add_ to the state": _added,
    "einsum step": _einsum_step,
    "softmax (SDPA) step": _cached,
}
WORKLOADS |= {
    f"captured {name}": partial(_captured, make=WORKLOADS[name])
    for name in ("prepared step, no positions", "prepared step, rotary")
}
WORKLOADS["captured mul_ of the state"] = partial(_captured, make=_scaled)
POSITIONS = {  # the scheme, and the goal of its speed against no positions
    "no positions": ("none", None),
    "rotary": ("rope", at_least(0.95)),
    "permutation": ("lrpe-permutation:basis=identity", at_least(0.95)),
    "unitary": ("lrpe-unitary:basis=identity,learned=false", at_least(0.75)),
    "householder + rotary": ("lrpe-orthogonal:learned=false", at_least(0.9)),
    "householder + permutation": ("lrpe-permutation", None),
    "householder + unitary": ("lrpe-unitary:learned=false", None),
}
WORKLOADS |= {f"attention function, {name}": partial(_attention, spec=spec) for name, (spec, _) in POSITIONS.items()}
WORKLOADS |= {f"attention module, {name}": partial(_layer, spec=spec) for name, (spec, _) in POSITIONS.items()}

FORWARD, BOTH, STEP = "forward", "forward + backward", "step"
INPUTS = {"attention": 3, "rotary": 2, "layer": 1}
LENGTHS = tuple(2**n for n in range(10, 18))  # of the section growth
DOUBLING, STEEPEST = at_most(2.2), at_most(2.6)  # goals of the time ratio when the length doubles


@dataclass(frozen=True)
class Race:
    """Pairs of a workload and its baseline at one size, each with a goal; `what` names their kind of inputs."""

    what: Literal["attention", "rotary", "layer"]
    passing: Literal["forward", "forward + backward", "step"]
    shape: Shape
    pairs: Mapping[tuple[str, str], Goal | None]
    causal: bool = True  # whether ceilings count the operations of causal attention

    def titles(self) -> list[tuple[str, str]]:
        """Titles of each row: the workload with its pass and size, and the baseline."""
        passing = () if self.passing == STEP else (self.passing,)
        return [(", ".join((ours, *passing, str(self.shape))), other) for ours, other in self.pairs]


SDPA = "causal", "softmax (SDPA)"
WRITTEN = {("causal", FRESH): None}
DECAY = {("causal, retnet decay", "causal"): at_most(1.1)}
VARIANTS = {("causal, masked", "causal"): at_most(1.1), ("causal, packed", "causal"): at_most(1.1)}
PRODUCTS = {
    ("bidirectional, no features", "two products"): at_most(1.05),
    ("bidirectional", "two products, elu + 1, divided"): at_most(1.05),
}


def _share(goal: float) -> dict[tuple[str, str], Goal | None]:
    return {("causal", PRODUCT): at_least(goal)}


ATTENTION = (
    Race("attention", BOTH, Shape(512), _share(0.45)),
    Race("attention", BOTH, Shape(2048), {SDPA: at_least(5)} | _share(0.6) | DECAY | VARIANTS),
    Race("attention", BOTH, Shape(2048, batch=1, heads=4), _share(0.6)),
    Race("attention", BOTH, Shape(2048, head_dim=32), _share(0.45)),
    Race("attention", BOTH, Shape(2048, head_dim=128), _share(0.65)),
    Race("attention", BOTH, Shape(8192), _share(0.6) | WRITTEN | DECAY | VARIANTS),
    Race("attention", BOTH, Shape(8192, batch=1, heads=1), _share(0.45)),
    Race("attention", FORWARD, Shape(512), _share(0.45)),
    Race("attention", FORWARD, Shape(2048), _share(0.6) | DECAY | VARIANTS),
    Race("attention", FORWARD, Shape(8192), {SDPA: at_least(12)} | _share(0.6) | WRITTEN | DECAY | VARIANTS),
    Race("attention", FORWARD, Shape(8192, batch=1, heads=1), _share(0.45)),
    *(Race("attention", passing, Shape(length), PRODUCTS) for passing in (FORWARD, BOTH) for length in (2048, 8192)),
)
FORMULAS = {("rotation", "torchtune's formula"): at_least(10), ("rotation", "rotate-half"): None}
CLONES = ("rotation", "two clones")
ROTARY = (
    Race("rotary", FORWARD, Shape(8192), {CLONES: at_most(1.4)} | FORMULAS),
    Race("rotary", BOTH, Shape(8192), {CLONES: at_most(2.6)} | FORMULAS),
)
PREPARED = "prepared step, no positions"
STEPS = {
    ("decoding step", "einsum step"): None,
    ("decoding step", "softmax (SDPA) step"): None,
    ("decoding step of a scheme, rotary", "decoding step of a scheme, no positions"): None,
    (PREPARED, "einsum step"): at_least(10),
    (PREPARED, "softmax (SDPA) step"): at_least(300),
    (PREPARED, "add_ to the state"): None,
    ("prepared step, rotary", PREPARED): at_most(1.3),
}
DECODE = (
    Race("attention", STEP, Shape(1, batch=1, cache=32768), STEPS),
    Race("attention", STEP, Shape(1, batch=32, cache=32768), STEPS | {(PREPARED, "add_ to the state"): at_least(0.6)}),
)
KINDS: dict[str, Literal["attention", "layer"]] = {"attention function": "attention", "attention module": "layer"}


def _against_none(kind: str) -> dict[tuple[str, str], Goal | None]:
    none, *others = ((f"{kind}, {name}", goal) for name, (_, goal) in POSITIONS.items())
    return {(name, none[0]): goal for name, goal in others}


SUBLAYER = tuple(Race(what, BOTH, Shape(512, batch=4), _against_none(kind)) for kind, what in KINDS.items())
RACES = {"attention": ATTENTION, "rotary": ROTARY, "decode": DECODE, "sublayer": SUBLAYER}


ENTIRE_RACE = "the race"  # key of its errors
LOADED = tuple(Race("attention", BOTH, Shape(length), {("causal", PRODUCT): None}) for length in (2048, 8192))
LOADED_TIME = at_most(2.5)


def race(
    section: str,
    contest: Race,
    rounds: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    limit: float = math.inf,
) -> Iterator[Row]:
    """Run a race; yield a row per pair. A row says why there is no ratio: not installed, out of memory, or an error.

    Args:
        dtype: Dtype of queries, keys and values.
        limit: Seconds after which no further round starts, after three rounds.
    """
    what, passing, shape = contest.what, contest.passing, contest.shape
    names = dict.fromkeys(itertools.chain(*contest.pairs))
    notes = {name: reason for name in names if name in PEERS and (reason := PEERS[name].absence())}
    workloads, seconds = {}, {}
    with swept(), _noted(notes, ENTIRE_RACE), nullcontext() if passing == BOTH else torch.no_grad():
        torch.cuda.empty_cache()  # memory of the previous race
        with torch.device(device):  # for every tensor created here
            inputs = _inputs(what, shape, passing, dtype, tokens_first=device != "cpu")
            grads = _grads(what, inputs)
            for name in ceilings.measurement_names(names):
                if name not in notes:
                    with _noted(notes, name):
                        workloads[name] = _one_pass(name, shape, passing, inputs, grads)
        for name in [*workloads]:
            with _noted(notes, name):
                seconds_of(workloads[name], device)  # compiles kernels, and fails if memory does not suffice
            if name in notes:
                del workloads[name]
                torch.cuda.empty_cache()
        seconds = rounds_of(workloads, rounds, device, limit)
    size = shape.batch * shape.heads * shape.length, shape.head_dim
    seconds |= ceilings.scaled(seconds, *size, device=device, gradients=passing == BOTH, causal=contest.causal)
    for title, ((ours, other), goal) in zip(contest.titles(), contest.pairs.items(), strict=True):
        times = seconds.get(ours, []), seconds.get(other, [])
        reasons = (notes[name] for name in (ENTIRE_RACE, ours, *ceilings.measurement_names([other])) if name in notes)
        yield Row(section, *title, goal, *times, note=next(reasons, ""))


@contextmanager
def _noted(notes: dict[str, str], name: str) -> Iterator[None]:
    """Catch an error of a workload and note it under its name; print its traceback unless memory ran out."""
    try:
        yield
    except torch.OutOfMemoryError:
        notes[name] = f"{name}: out of memory"
    except Exception as error:
        traceback.print_exc()
        notes[name] = f"{name}: {type(error).__name__}: {error}".partition("\n")[0]


def threads(rounds: int, longest: int) -> Iterator[Row]:
    """Causal attention with 1, 2, 4, ... threads up to all cores, each compared with half the number."""
    shape, before = Shape(2048).limited(longest), torch.get_num_threads()
    inputs = _inputs("attention", shape, BOTH)
    workload = _one_pass("causal", shape, BOTH, inputs, _grads("attention", inputs))
    counts = [2**n for n in range(max(2, os.cpu_count() or 1).bit_length())]

    def run(count: int) -> None:
        torch.set_num_threads(count)
        workload()

    try:
        seconds = rounds_of({str(count): partial(run, count) for count in counts}, rounds)
    finally:
        torch.set_num_threads(before)
    for half, count in itertools.pairwise(map(str, counts)):
        title = f"causal, {BOTH}, {shape}, {count} threads"
        yield Row("threads", title, f"{half} threads", None, seconds[count], seconds[half])


def under_load(rounds: int, longest: int) -> Iterator[Row]:
    """Causal attention while 1 or 2 other processes compute: compared with matrix products, and with an idle machine."""
    for contest in LOADED:
        contest = replace(contest, shape=contest.shape.limited(longest))
        idle = list(race("load", contest, rounds))
        for count in (1, 2):
            with busy(count):
                for row, alone in zip(race("load", contest, rounds), idle, strict=True):
                    workload = f"{row.workload}, {count} busy"
                    yield replace(row, workload=workload)
                    yield Row("load", workload, "itself, none busy", LOADED_TIME, row.ours_seconds, alone.ours_seconds)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run processes that keep a core busy each, at this process's priority."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def growth(rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Time of causal attention with rotary positions as its length doubles."""
    workloads, shapes = {}, [Shape(length, batch=1, heads=4) for length in lengths]
    for shape in shapes:
        inputs = _inputs("attention", shape, BOTH)
        grads = _grads("attention", inputs)
        workloads[str(shape)] = _one_pass("attention function, rotary", shape, BOTH, inputs, grads)
    seconds, rows = rounds_of(workloads, rounds), []
    for shape, longer in itertools.pairwise(shapes):
        times = seconds[str(longer)], seconds[str(shape)]
        rows.append(Row("growth", f"causal, rotary, {BOTH}, {longer}", f"L={shape.length}", DOUBLING, *times))
    return allow_one_steeper(rows)


def allow_one_steeper(rows: list[Row]) -> list[Row]:
    """Rows of growth; the steepest gets a weaker goal, because the data no longer fit into the cache there."""
    steepest = max(rows, key=lambda row: row.spread.median)
    return [replace(row, goal=STEEPEST) if row is steepest else row for row in rows]


def _inputs(
    what: str, shape: Shape, passing: str, dtype: torch.dtype = torch.float32, *, tokens_first: bool = False
) -> list[torch.Tensor]:
    """Random inputs: of a layer ``[b t m]``; of heads ``[b h t d]``, with `tokens_first` laid out as ``[b t h d]``."""
    batch, length, heads, width = shape.batch, shape.length, shape.heads, shape.head_dim
    sizes = (batch, length, heads * width) if what == "layer" else (batch, heads, length, width)
    if tokens_first and what != "layer":
        inputs = [torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2) for _ in range(INPUTS[what])]
    else:
        inputs = [torch.randn(sizes, dtype=dtype) for _ in range(INPUTS[what])]
    return [x.requires_grad_(passing == BOTH) for x in inputs]


def _grads(what: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of outputs if inputs need gradients; one set for all workloads, since it may take gigabytes."""
    return [torch.randn_like(x) for x in (inputs if what == "rotary" else inputs[:1]) if x.requires_grad]


def _one_pass(
    name: str, shape: Shape, passing: str, inputs: list[torch.Tensor], grads: list[torch.Tensor]
) -> Callable[[], Any]:
    """One pass of a workload, with gradients of inputs and parameters if needed."""
    if name in ceilings.WORKLOADS:
        return ceilings.WORKLOADS[name](inputs[0].detach())
    call = workload_of(name, shape, inputs[0].dtype)
    if passing != BOTH:
        return lambda: call(*inputs)
    module = call.func if isinstance(call, partial) else None
    leaves = [*inputs, *(module.parameters() if isinstance(module, torch.nn.Module) else ())]

    def forward_and_backward():
        out = call(*inputs)
        return torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, grads)

    return forward_and_backward
