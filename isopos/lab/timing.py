"""Interleaved timing of workloads, peak memory, and one measurement as a row: every round, as a table and as JSON."""

import dataclasses
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

FORMER = {"work": "workload", "other": "baseline", "state": "variant", "other_seconds": "baseline_seconds"}
"""New names of the fields of a row, by their names in bench.json before 0.1.0."""
SHORT = 5e-3  # seconds; shorter workloads are repeated
LONG = 1.0  # seconds; longer workloads are not warmed up in each round
MIN_ROUNDS = 3  # before a time limit counts


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
    """A target for a figure: a speed to reach ("at least"), or a cost to stay below ("at most").

    Examples:
        >>> print(at_least(2.6), at_most(1.05), at_least(2.6).met(2.7), at_most(1.05).met(1.1))
        >= 2.6 <= 1.05 True False
    """

    sense: Literal["at least", "at most"]
    value: float

    def __str__(self) -> str:
        return f"{'>=' if self.sense == 'at least' else '<='} {self.value:g}"

    def met(self, figure: float) -> bool:
        """Whether a figure reaches the target."""
        return figure >= self.value if self.sense == "at least" else figure <= self.value


at_least, at_most = partial(Goal, "at least"), partial(Goal, "at most")  # for speeds, and for costs


@dataclass(frozen=True)
class Row:
    """One measurement: seconds of ours and of a baseline in the same rounds, or a figure, or a note with the reason."""

    section: str
    workload: str
    baseline: str = ""  # the workload compared with
    goal: Goal | None = None
    ours_seconds: Sequence[float] = field(default_factory=list, repr=False)
    baseline_seconds: Sequence[float] = field(default_factory=list, repr=False)
    figure: float | None = None
    unit: str = ""
    note: str = ""
    variant: str = ""  # the allocator on a CPU, the backend on a GPU

    @property
    def raced(self) -> bool:
        """Whether both our workload and the baseline were timed."""
        return bool(self.ours_seconds and self.baseline_seconds)

    @property
    def cost(self) -> bool:
        """Whether the ratio is our time divided by the baseline's, not our speed."""
        return self.goal is not None and self.goal.sense == "at most"

    @property
    def spread(self) -> Spread:
        """Per-round ratios: the baseline's time / ours, or ours / the baseline's if the goal is a cost."""
        times = zip(self.ours_seconds, self.baseline_seconds, strict=True)
        return Spread.of([ours / other if self.cost else other / ours for ours, other in times])

    @property
    def verdict(self) -> str:
        """Verdict: goals are judged by the median ratio; "faster" or "slower" requires that both quartiles agree."""
        goal = self.goal
        if not self.raced:
            return "" if self.figure is None or goal is None else "met" if goal.met(self.figure) else "not met"
        spread = self.spread
        includes_one = spread.low <= 1 <= spread.high
        if goal is None:
            return "within the spread" if includes_one else "faster" if spread.low > 1 else "slower"
        if not goal.met(spread.median):
            return "not met"
        return "within the spread" if not self.cost and goal.value > 1 and includes_one else "met"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values, with the ratio and the verdict."""
        return dataclasses.asdict(self) | {"ratio": self.spread._asdict() if self.raced else None, "verdict": self.verdict}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        """The inverse of `to_json`; also reads the field names and workload names before 0.1.0."""
        content = {FORMER.get(name, name): value for name, value in content.items()}
        values = {field.name: content[field.name] for field in dataclasses.fields(cls)}
        for name in ("workload", "baseline"):
            values[name] = values[name].replace("both ways", "bidirectional")
        values["goal"] = values["goal"] and Goal(**values["goal"])
        return cls(**values)

    def cells(self) -> tuple[str, ...]:
        """The cells of the row below `titles`."""
        goal = "" if self.goal is None else str(self.goal)
        if not self.raced and self.figure is None:
            return self.workload, self.note, self.variant, _time(self.ours_seconds), "", "", goal, ""
        if not self.raced:
            return self.workload, self.unit, self.variant, f"{self.figure:.3g}", "", "", goal, self.verdict
        spread = self.spread
        ratio = f"{spread.median:.3g}x {'time' if self.cost else 'speed'} ({spread.low:.3g} to {spread.high:.3g})"
        times = _time(self.ours_seconds), _time(self.baseline_seconds)
        return self.workload, self.baseline, self.variant, *times, ratio, goal, self.verdict


def titles(device: str = "cpu") -> tuple[str, ...]:
    """Titles of a table of rows measured on a device."""
    variant = "allocator" if device == "cpu" else "backend"
    return ("workload", "compared with", variant, "ours", "baseline", "ratio (quartiles)", "goal", "verdict")


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


def interleave(
    workloads: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", limit: float = math.inf
) -> Iterator[dict[str, float]]:
    """Time workloads in interleaved rounds, after a warm-up call; yield the seconds per call of each workload, by round.

    Every other round has the opposite order, so that no workload always follows the same one. The clock stops when the
    device has finished. Short workloads are repeated within a round. On a GPU a workload that is not long is called equally
    often before the clock starts, so that it reuses freed memory blocks.

    Args:
        limit: Seconds after which no further round starts, after `MIN_ROUNDS` rounds.
    """
    calls = {name: _calls(workload, device) for name, workload in workloads.items()}
    start = time.perf_counter()
    for n in range(rounds):
        if n >= MIN_ROUNDS and time.perf_counter() - start > limit:
            return
        order = list(workloads)[:: -1 if n % 2 else 1]
        seconds = {name: seconds_of(workloads[name], device, *calls[name]) for name in order}
        yield {name: seconds[name] for name in workloads}


def rounds_of(
    workloads: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", limit: float = math.inf
) -> dict[str, list[float]]:
    """Seconds per call by workload, one value per round; see `interleave`."""
    measured = list(interleave(workloads, rounds, device, limit))
    return {name: [seconds[name] for seconds in measured] for name in workloads}


def _calls(workload: Callable[[], object], device: str) -> tuple[int, int]:
    """Numbers of timed calls per round, and of warm-up calls before them, from a few calls."""
    seconds = seconds_of(workload, device)
    while device != "cpu" and (again := seconds_of(workload, device)) < seconds / 2:  # the first may compile a kernel
        seconds = again
    repeats = 1 if seconds > 10 * SHORT else max(1, math.ceil(SHORT / max(seconds_of(workload, device), 1e-9)))
    return repeats, 0 if device == "cpu" or seconds > LONG else repeats


def seconds_of(workload: Callable[[], object], device: str, repeats: int = 1, before: int = 0) -> float:
    """Seconds per call of a workload, with garbage collection off; waits until a GPU has finished."""
    synchronize = partial(torch.cuda.synchronize, device) if device.startswith("cuda") else lambda: None
    if device != "cpu":
        gc.collect()  # memory on a GPU does not trigger Python's collector
    gc.disable()
    try:
        for _ in range(before):
            workload()
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            workload()
        synchronize()
        return (time.perf_counter() - start) / repeats
    finally:
        gc.enable()


def peak_memory(device: str = "cpu") -> int:
    """Largest memory so far, in bytes: resident memory of this process, or memory of a GPU that its tensors took."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the parent's memory at the fork
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])  # pyright: ignore[reportOptionalSubscript]
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def swept() -> Iterator[None]:
    """Freeze existing objects, so that garbage collection within the context examines new ones only (saves 0.1 s each)."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
