"""Works take turns; what is measured is a row, with every round's seconds, as a table and as JSON."""

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

TITLES = ("work", "beside", "state", "ours", "other", "ratio (quartiles)", "goal", "verdict")
SHORT, LONG = 5e-3, 1.0  # seconds: a shorter work is repeated for so long; a longer one is not called off the clock
FEWEST = 3  # rounds, whatever their time


class Spread(NamedTuple):
    """A median between its quartiles.

    Examples:
        >>> Spread.of([3.0, 1.0, 2.0, 5.0, 4.0])
        Spread(low=2.0, median=3.0, high=4.0)
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]))


@dataclass(frozen=True)
class Goal:
    """What a figure should be. A ratio to be reached says how many times as fast ours is, one to be kept, what it costs.

    Examples:
        >>> print(at_least(2.6), at_most(1.05), at_least(2.6).met(2.7), at_most(1.05).met(1.1))
        >= 2.6 <= 1.05 True False
    """

    sense: Literal["at least", "at most"]
    value: float

    def __str__(self) -> str:
        return f"{'>=' if self.sense == 'at least' else '<='} {self.value:g}"

    def met(self, figure: float) -> bool:
        """Whether a figure is what it should be."""
        return figure >= self.value if self.sense == "at least" else figure <= self.value


at_least, at_most = partial(Goal, "at least"), partial(Goal, "at most")  # of a speed, and of a cost


@dataclass(frozen=True)
class Row:
    """Ours beside another's in the same rounds, or a figure by itself; a note says why there is neither."""

    section: str
    work: str
    other: str = ""
    goal: Goal | None = None
    ours_seconds: Sequence[float] = field(default_factory=list, repr=False)
    other_seconds: Sequence[float] = field(default_factory=list, repr=False)
    figure: float | None = None
    unit: str = ""
    note: str = ""
    state: str = ""  # of the allocator, or whose kernels

    @property
    def raced(self) -> bool:
        """Whether ours and another's were timed."""
        return bool(self.ours_seconds and self.other_seconds)

    @property
    def cost(self) -> bool:
        """Whether the ratio is our time in units of the other's."""
        return self.goal is not None and self.goal.sense == "at most"

    @property
    def spread(self) -> Spread:
        """Our speed in units of the other's, round by round; where the goal is a cost, our time in units of the other's."""
        times = zip(self.ours_seconds, self.other_seconds, strict=True)
        return Spread.of([ours / other if self.cost else other / ours for ours, other in times])

    @property
    def verdict(self) -> str:
        """What the figures say: a goal is judged by the median, and nothing is faster unless all quartiles are beyond 1."""
        goal = self.goal
        if not self.raced:
            return "" if self.figure is None or goal is None else "met" if goal.met(self.figure) else "not met"
        spread = self.spread
        level = spread.low <= 1 <= spread.high
        if goal is None:
            return "within the spread" if level else "faster" if spread.low > 1 else "slower"
        if not goal.met(spread.median):
            return "not met"
        return "within the spread" if not self.cost and goal.value > 1 and level else "met"

    def to_json(self) -> dict[str, Any]:
        """Plain values of all fields, with the ratio and the verdict."""
        return dataclasses.asdict(self) | {"ratio": self.spread._asdict() if self.raced else None, "verdict": self.verdict}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        """The inverse of `to_json`."""
        fields = {field.name: content[field.name] for field in dataclasses.fields(cls)}
        fields["goal"] = fields["goal"] and Goal(**fields["goal"])
        return cls(**fields)

    def cells(self) -> tuple[str, ...]:
        """Of the table: work, other, state, ours, the other's, ratio, goal, verdict."""
        goal = "" if self.goal is None else str(self.goal)
        if not self.raced and self.figure is None:
            return self.work, self.note, self.state, _time(self.ours_seconds), "", "", goal, ""
        if not self.raced:
            return self.work, self.unit, self.state, f"{self.figure:.3g}", "", "", goal, self.verdict
        spread = self.spread
        ratio = f"{spread.median:.3g}x {'time' if self.cost else 'speed'} ({spread.low:.3g} to {spread.high:.3g})"
        times = _time(self.ours_seconds), _time(self.other_seconds)
        return self.work, self.other, self.state, *times, ratio, goal, self.verdict


def _time(seconds: Sequence[float]) -> str:
    """A median with three digits.

    Examples:
        >>> _time([0.0012]), _time([2.5]), _time([31e-6]), _time([])
        ('1.2 ms', '2.5 s', '31 us', '')
    """
    if not seconds:
        return ""
    median = Spread.of(seconds).median
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if median * s >= 1 or u == "us")
    return f"{median * scale:.3g} {unit}"


def turns(
    works: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", limit: float = math.inf
) -> Iterator[dict[str, float]]:
    """Seconds of each work, round by round, after a call to warm up; short works are repeated within a round.

    Works take turns, every other round in the opposite order, so that none always follows the same. The clock stops when
    the device has finished. Elsewhere than on a CPU a work is called as often before the clock starts, unless it is long:
    it then finds memory in the pieces that it left itself, and not as another one did.

    Args:
        works: By name.
        rounds: At most.
        device: Where they run.
        limit: Seconds after which no round begins, once there are FEWEST.
    """
    paces = {name: _pace(work, device) for name, work in works.items()}
    begun = time.perf_counter()
    for n in range(rounds):
        if n >= FEWEST and time.perf_counter() - begun > limit:
            return
        order = list(works)[:: -1 if n % 2 else 1]
        seconds = {name: seconds_of(works[name], device, *paces[name]) for name in order}
        yield {name: seconds[name] for name in works}


def rounds_of(
    works: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", limit: float = math.inf
) -> dict[str, list[float]]:
    """The seconds of `turns` by work."""
    measured = list(turns(works, rounds, device, limit))
    return {name: [seconds[name] for seconds in measured] for name in works}


def _pace(work: Callable[[], object], device: str) -> tuple[int, int]:
    """How often to call a work on the clock, and before; its first calls warm it up."""
    first = seconds_of(work, device)
    while device != "cpu" and (now := seconds_of(work, device)) < first / 2:  # that one may have compiled a kernel
        first = now
    repeats = 1 if first > 10 * SHORT else max(1, math.ceil(SHORT / max(seconds_of(work, device), 1e-9)))
    return repeats, 0 if device == "cpu" or first > LONG else repeats


def seconds_of(work: Callable[[], object], device: str, repeats: int = 1, before: int = 0) -> float:
    """Seconds of one call, without collections of garbage; a GPU has finished all calls by then."""
    synchronize = partial(torch.cuda.synchronize, device) if device.startswith("cuda") else lambda: None
    if device != "cpu":
        gc.collect()  # no number of bytes there makes Python collect what others have left
    gc.disable()
    try:
        for _ in range(before):
            work()
        synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize()
        return (time.perf_counter() - begun) / repeats
    finally:
        gc.enable()


@contextmanager
def swept() -> Iterator[None]:
    """Within it collections of garbage look at what is new alone: the libraries' own objects would take them 0.1 s each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
