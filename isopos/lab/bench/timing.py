"""Works take turns; their times are compared round by round, and no difference within the spread is called one."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch

__all__ = ["Goal", "Spread", "at_least", "at_most", "ratios", "rounds_of", "turns", "verdict"]

SHORT = 5e-3  # seconds: a shorter work is repeated for so long


class Spread(NamedTuple):
    """A median between its quartiles.

    Example:
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

    Example:
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


def ratios(ours: Sequence[float], other: Sequence[float], goal: Goal | None = None) -> Spread:
    """Our speed in units of the other's, round by round; where the goal is a cost, our time in units of the other's.

    Example:
        >>> ratios([1.0, 1.0, 2.0], [3.0, 2.0, 2.0])
        Spread(low=1.5, median=2.0, high=2.5)
        >>> ratios([1.0], [4.0], at_most(1.1)).median
        0.25
    """
    over, under = (ours, other) if goal is not None and goal.sense == "at most" else (other, ours)
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def verdict(spread: Spread, goal: Goal | None = None) -> str:
    """What the figures say: a goal is judged by the median, and nothing is faster unless all quartiles are beyond 1.

    Example:
        >>> verdict(Spread(1.1, 1.3, 1.4)), verdict(Spread(0.9, 1.3, 1.4)), verdict(Spread(0.7, 0.8, 0.9))
        ('faster', 'within the spread', 'slower')
        >>> verdict(Spread(2.5, 2.7, 2.9), at_least(2.6)), verdict(Spread(2.5, 2.55, 2.9), at_least(2.6))
        ('met', 'not met')
        >>> verdict(Spread(0.9, 1.3, 1.4), at_least(1.2)), verdict(Spread(0.9, 1.04, 1.1), at_most(1.05))
        ('within the spread', 'met')
    """
    level = spread.low <= 1 <= spread.high
    if goal is None:
        return "within the spread" if level else "faster" if spread.low > 1 else "slower"
    if not goal.met(spread.median):
        return "not met"
    return "within the spread" if goal.sense == "at least" and goal.value > 1 and level else "met"


def turns(works: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu") -> Iterator[dict[str, float]]:
    """Seconds of each work, round by round, after a call to warm up; short works are repeated within a round.

    Works take turns, every other round in the opposite order, so that none always follows the same. The clock stops when
    the device has finished.
    """
    repeats = {name: _repeats(work, device) for name, work in works.items()}
    for n in range(rounds):
        order = list(works)[:: -1 if n % 2 else 1]
        seconds = {name: _seconds(works[name], repeats[name], device) for name in order}
        yield {name: seconds[name] for name in works}


def rounds_of(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of `turns` by work."""
    measured = list(turns(works, rounds))
    return {name: [seconds[name] for seconds in measured] for name in works}


def _repeats(work: Callable[[], object], device: str) -> int:
    """How often to repeat a work, once it is warm."""
    first = _seconds(work, 1, device)
    return 1 if first > 10 * SHORT else max(1, math.ceil(SHORT / max(_seconds(work, 1, device), 1e-9)))


def _seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds of one call, without collections of garbage."""
    synchronize = partial(torch.cuda.synchronize, device) if device.startswith("cuda") else lambda: None
    synchronize()
    gc.disable()
    try:
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize()
        return (time.perf_counter() - begun) / repeats
    finally:
        gc.enable()
