"""Rows of measurements: what was measured, with every round's seconds, as a table and as JSON."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from isopos.lab.bench.timing import Goal, Spread, ratios, verdict

__all__ = ["TITLES", "Row"]

TITLES = ("work", "beside", "allocator", "ours", "other", "ratio (quartiles)", "goal", "verdict")


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
    allocator: str = ""

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
        """The spread of the ratio, or of the figure."""
        if self.raced:
            return ratios(self.ours_seconds, self.other_seconds, self.goal)
        assert self.figure is not None
        return Spread.of([self.figure])

    @property
    def verdict(self) -> str:
        """What the figures say of the goal or, without one, of the difference."""
        if self.raced:
            return verdict(self.spread, self.goal)
        if self.figure is None or self.goal is None:
            return ""
        return "met" if self.goal.met(self.figure) else "not met"

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
        """Of the table: work, other, allocator, ours, the other's, ratio, goal, verdict."""
        goal = "" if self.goal is None else str(self.goal)
        if not self.raced and self.figure is None:
            return self.work, self.note, self.allocator, _time(self.ours_seconds), "", "", goal, ""
        if not self.raced:
            return self.work, self.unit, self.allocator, f"{self.figure:.3g}", "", "", goal, self.verdict
        spread = self.spread
        ratio = f"{spread.median:.3g}x {'time' if self.cost else 'speed'} ({spread.low:.3g} to {spread.high:.3g})"
        times = _time(self.ours_seconds), _time(self.other_seconds)
        return self.work, self.other, self.allocator, *times, ratio, goal, self.verdict


def _time(seconds: Sequence[float]) -> str:
    """A median with three digits.

    Example:
        >>> _time([0.0012]), _time([2.5]), _time([31e-6]), _time([])
        ('1.2 ms', '2.5 s', '31 us', '')
    """
    if not seconds:
        return ""
    median = Spread.of(seconds).median
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if median * s >= 1 or u == "us")
    return f"{median * scale:.3g} {unit}"
