"""Races are run: inputs are made, peers are found, works take turns."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from isopos.lab.bench.peers import PEERS
from isopos.lab.bench.races import BOTH, STEP, Race
from isopos.lab.bench.rows import Row
from isopos.lab.bench.timing import at_most, rounds_of
from isopos.lab.bench.works import Shape, work_of

__all__ = ["LENGTHS", "growth", "once", "race"]

INPUTS = {"attention": 3, "rotary": 2, "layer": 1}
LENGTHS = tuple(2**n for n in range(10, 18))  # of `growth`
TWICE, ONCE = at_most(2.2), at_most(2.6)


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
        yield Row(
            section=section,
            work=", ".join((ours, *(() if passing == STEP else (passing,)), str(shape))),
            other=other,
            goal=goal,
            ours_seconds=seconds[ours],
            other_seconds=seconds.get(other, []),
            note=notes.get(other, ""),
        )


def growth(rounds: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Time of causal attention with rotary positions as its length doubles."""
    shapes = {length: Shape(length, batch=1, heads=4) for length in lengths}
    works = {
        str(length): _work("attention function, rotary", "attention", shape, BOTH, _inputs("attention", shape, BOTH))
        for length, shape in shapes.items()
    }
    seconds = rounds_of(works, rounds)
    rows = [
        Row(
            section="growth",
            work=f"causal, rotary, {BOTH}, {shapes[longer]}",
            other=f"L={length}",
            goal=TWICE,
            ours_seconds=seconds[str(longer)],
            other_seconds=seconds[str(length)],
        )
        for length, longer in itertools.pairwise(lengths)
    ]
    return once(rows)


def once(rows: list[Row]) -> list[Row]:
    """Rows of growth whose steepest may be steeper: where the data no longer fit into the cache."""
    steepest = max(rows, key=lambda row: row.spread.median)
    return [row.replace(goal=ONCE) if row is steepest else row for row in rows]


def _inputs(what: str, shape: Shape, passing: str) -> list[torch.Tensor]:
    batch, length, heads, width = shape.batch, shape.length, shape.heads, shape.head_dim
    sizes = (batch, length, heads * width) if what == "layer" else (batch, heads, length, width)
    return [torch.randn(sizes).requires_grad_(passing == BOTH) for _ in range(INPUTS[what])]


def _work(name: str, what: str, shape: Shape, passing: str, inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """One pass of a work; gradients are of its inputs and of what it learns."""
    call, parameters = work_of(name, shape)
    if passing != BOTH:
        return lambda: call(*inputs)
    leaves = [*inputs, *parameters]
    grads = [torch.randn_like(x) for x in (inputs if what == "rotary" else inputs[:1])]

    def work():
        out = call(*inputs)
        return torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, grads)

    return work
