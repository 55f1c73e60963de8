"""Races: which works take turns at which sizes, what we want of each pair, and how they are run."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from isopos.lab.bench.peers import PEERS
from isopos.lab.bench.timing import Goal, Row, at_least, at_most, rounds_of
from isopos.lab.bench.works import Shape, work_of

__all__ = ["LENGTHS", "RACES", "Race", "growth", "once", "race"]

FORWARD, BOTH, STEP = "forward", "forward + backward", "step"
INPUTS = {"attention": 3, "rotary": 2, "layer": 1}
LENGTHS = tuple(2**n for n in range(10, 18))  # of `growth`
TWICE, ONCE = at_most(2.2), at_most(2.6)


@dataclass(frozen=True)
class Race:
    """Works at one size: pairs of ours and another, with the goal of each pair; `what` tells their inputs."""

    what: Literal["attention", "rotary", "layer"]
    passing: Literal["forward", "forward + backward", "step"]
    shape: Shape
    pairs: Mapping[tuple[str, str], Goal | None]

    def limited(self, most: int) -> "Race":
        """The race with at most so many tokens."""
        return replace(self, shape=self.shape.limited(most))


FT, PERFORMER, SDPA = (("causal", peer) for peer in ("fast-transformers", "performer-pytorch", "softmax (SDPA)"))
DECAY = {("causal, retnet decay", "causal"): at_most(1.15)}
BESIDES = {("causal, masked", "causal"): at_most(1.1), ("causal, packed", "causal"): at_most(1.1)}
PRODUCTS = {
    ("both ways, no features", "two products"): at_most(1.05),
    ("both ways", "two products, elu + 1, divided"): at_most(1.05),
}
ATTENTION = (
    Race("attention", BOTH, Shape(512), {FT: at_least(2.6), PERFORMER: None}),
    Race("attention", BOTH, Shape(2048), {FT: at_least(2.6), SDPA: at_least(5)} | DECAY | BESIDES),
    Race("attention", BOTH, Shape(2048, batch=1, heads=4), {FT: at_least(1.9)}),
    Race("attention", BOTH, Shape(8192), {FT: at_least(2.6)} | DECAY | BESIDES),
    Race("attention", FORWARD, Shape(512), {FT: at_least(1.7), PERFORMER: None}),
    Race("attention", FORWARD, Shape(2048), {FT: at_least(2.3)} | DECAY | BESIDES),
    Race("attention", FORWARD, Shape(8192), {FT: at_least(2.3), SDPA: at_least(12)} | DECAY | BESIDES),
    *(Race("attention", passing, Shape(length), PRODUCTS) for passing in (FORWARD, BOTH) for length in (2048, 8192)),
)
PEERS_OF_ROTATION = {
    ("rotation", "rotary-embedding-torch"): at_least(10),
    ("rotation", "torchtune's formula"): at_least(10),
    ("rotation", "rotate-half"): None,
    ("rotation", "x-transformers"): None,
    ("rotation", "transformers Llama"): None,
}
CLONES = ("rotation", "two clones")
ROTARY = (
    Race("rotary", FORWARD, Shape(8192), {CLONES: at_most(1.4)} | PEERS_OF_ROTATION),
    Race("rotary", BOTH, Shape(8192), {CLONES: at_most(2.6)} | PEERS_OF_ROTATION),
)
STEPS = {
    (f"decoding step{how}", other): goal
    for other, goal in (("einsum step", at_least(10)), ("softmax (SDPA) step", at_least(300)))
    for how in ("", ", in place")
}
ROTATED = {
    (f"decoding step of a scheme, rotary{how}", f"decoding step of a scheme, no positions{how}"): at_most(1.3)
    for how in ("", ", in place")
}
DECODE = (
    Race("attention", STEP, Shape(1, batch=1, cache=32768), STEPS | dict.fromkeys(ROTATED)),
    Race("attention", STEP, Shape(1, batch=32, cache=32768), STEPS | ROTATED),
)
SPEEDS = {
    "rotary": at_least(0.95),
    "permutation": at_least(0.92),
    "unitary": at_least(0.88),
    "householder + rotary": at_least(0.9),
    "householder + permutation": None,
    "householder + unitary": None,
}
KINDS: dict[str, Literal["attention", "layer"]] = {"attention function": "attention", "attention module": "layer"}


def _beside(kind: str) -> dict[tuple[str, str], Goal | None]:
    return {(f"{kind}, {name}", f"{kind}, no positions"): goal for name, goal in SPEEDS.items()}


SUBLAYER = tuple(Race(what, BOTH, Shape(512, batch=4), _beside(kind)) for kind, what in KINDS.items())
RACES = {"attention": ATTENTION, "rotary": ROTARY, "decode": DECODE, "sublayer": SUBLAYER}


def race(section: str, contest: Race, rounds: int) -> Iterator[Row]:
    """The rows of a race: a pair each; where a peer is not installed, the row says so."""
    what, passing, shape = contest.what, contest.passing, contest.shape
    names = dict.fromkeys(itertools.chain(*contest.pairs))
    notes = {name: PEERS[name].absence() for name in names if name in PEERS}
    inputs = _inputs(what, shape, passing)
    works = {name: _work(name, what, shape, passing, inputs) for name in names if not notes.get(name)}
    with nullcontext() if passing == BOTH else torch.no_grad():
        seconds = rounds_of(works, rounds)
    for (ours, other), goal in contest.pairs.items():
        work = ", ".join((ours, *(() if passing == STEP else (passing,)), str(shape)))
        times = seconds[ours], seconds.get(other, [])
        yield Row(section, work, other, goal, *times, note=notes.get(other, ""))


def growth(rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Time of causal attention with rotary positions as its length doubles."""
    works, shapes = {}, [Shape(length, batch=1, heads=4) for length in lengths]
    for shape in shapes:
        inputs = _inputs("attention", shape, BOTH)
        works[str(shape)] = _work("attention function, rotary", "attention", shape, BOTH, inputs)
    seconds = rounds_of(works, rounds)
    rows = []
    for shape, longer in itertools.pairwise(shapes):
        times = seconds[str(longer)], seconds[str(shape)]
        rows.append(Row("growth", f"causal, rotary, {BOTH}, {longer}", f"L={shape.length}", TWICE, *times))
    return once(rows)


def once(rows: list[Row]) -> list[Row]:
    """Rows of growth whose steepest may be steeper: where the data no longer fit into the cache."""
    steepest = max(rows, key=lambda row: row.spread.median)
    return [replace(row, goal=ONCE) if row is steepest else row for row in rows]


def _inputs(what: str, shape: Shape, passing: str) -> list[torch.Tensor]:
    batch, length, heads, width = shape.batch, shape.length, shape.heads, shape.head_dim
    sizes = (batch, length, heads * width) if what == "layer" else (batch, heads, length, width)
    return [torch.randn(sizes).requires_grad_(passing == BOTH) for _ in range(INPUTS[what])]


def _work(name: str, what: str, shape: Shape, passing: str, inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """One pass of a work; gradients are of its inputs and of what it learns."""
    call = work_of(name, shape)
    if passing != BOTH:
        return lambda: call(*inputs)
    module = call.func if isinstance(call, partial) else None
    leaves = [*inputs, *(module.parameters() if isinstance(module, torch.nn.Module) else ())]
    grads = [torch.randn_like(x) for x in (inputs if what == "rotary" else inputs[:1])]

    def work():
        out = call(*inputs)
        return torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, grads)

    return work
