"""The seam between tasks and the rest of the laboratory: whoever trains, compares, evaluates or reports knows no more.

A task is two things. Its settings are a frozen dataclass (`Task`), free of torch, which is part of every recipe and of the
command line. What `Task.load` makes of them (`Data`) has the samples at hand: it builds the model, draws the batch of a
step, computes the loss and scores held-out data. Another task is another file in this folder with one of each.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.lab.recipes import Recipe

__all__ = ["Data", "Metric", "Task", "View"]


@dataclass(frozen=True)
class View:
    """Which held-out data is scored, and how.

    Args:
        split: validation or test.
        multiple: Of the training length, where a task has samples of any length.
        scored: Share of each sample, at its end, that counts; 1: all.
        limit: At most so many (in the task's unit); 0: all; -1: as in training.
    """

    split: str = "validation"
    multiple: int = 1
    scored: float = 1.0
    limit: int = -1


@dataclass(frozen=True)
class Metric:
    """A figure of merit: a column of every table.

    Args:
        title: Of the column.
        figure: Its name among those that `Data.score` returns.
        better: lower or higher.
        style: How a value is written, as in ``format(value, style)``: ".3f", ".1%".
        view: What is scored.
        note: What a reader must know, in one sentence.

    Example:
        >>> accuracy = Metric("accuracy", "accuracy", "higher", ".1%")
        >>> sorted([0.5, 0.75, 0.25], key=accuracy.rank), accuracy.text(0.5), accuracy.improves(0.5, None)
        ([0.75, 0.5, 0.25], '50.0%', True)
    """

    title: str
    figure: str
    better: Literal["lower", "higher"] = "lower"
    style: str = ".3f"
    view: View = View()
    note: str = ""

    def rank(self, value: float) -> float:
        """A number by which values sort, the best first."""
        return value if self.better == "lower" else -value

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far."""
        return best is None or self.rank(value) < self.rank(best)

    def text(self, value: float | None) -> str:
        """The value as tables show it."""
        return "-" if value is None else format(value, self.style)


@dataclass(frozen=True)
class Task(ABC):
    """The settings of a task: a frozen dataclass whose fields are options of the command line."""

    name: ClassVar[str]
    unit: ClassVar[str] = "tokens"
    """What a throughput counts."""
    schemes: ClassVar[str]
    """Compared by default: a comma list."""

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The columns of a comparison; the first ranks, decides which weights are best, and ends patience."""

    @abstractmethod
    def check(self, recipe: "Recipe") -> None:
        """Raise a ValueError that names the first field that cannot be, before any data is read."""

    @abstractmethod
    def load(self, recipe: "Recipe", console: "Console | None" = None) -> "Data":
        """The data, prepared.

        Raises:
            ValueError: Where there is none, or it does not fit; the message names file, line and remedy.
        """


class Data(ABC):
    """A task with its samples at hand. Every method is a function of its arguments: a run resumes exactly.

    Attributes:
        name: Of the source, for readers.
        sha256: A fingerprint: a run goes on, and a table is filled, with the same data only.
        summary: Sizes in one line.
    """

    name: str
    sha256: str
    summary: str

    @abstractmethod
    def settle(self, recipe: "Recipe") -> "Recipe":
        """The recipe with what only the data tells, such as the size of a vocabulary."""

    @abstractmethod
    def options(self, scheme: str, recipe: "Recipe") -> Mapping[str, str]:
        """Options of a scheme that fit the samples (a learned table's length), unless a user gives others."""

    @abstractmethod
    def model(self, recipe: "Recipe") -> "nn.Module":
        """The model on the CPU, initialised from the recipe's seed; what it shares with models of other schemes is equal."""

    @abstractmethod
    def batch(self, recipe: "Recipe", step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        """A rank's share in the batch of a step: a function of (seed, step, rank). The shares together are the batch."""

    @abstractmethod
    def loss(self, model: "nn.Module", *batch: "Tensor") -> "Tensor":
        """The mean loss of a batch in nats: a scalar with a graph."""

    @abstractmethod
    def score(self, model: "nn.Module", recipe: "Recipe", view: View) -> Mapping[str, float | None]:
        """Figures by name. Where the scheme or the data has none for this view: None, with the reason under "reason"."""

    def save(self, folder: Path) -> None:
        """Write beside the weights what they need to be used again, such as a tokenizer."""
        return

    def examples(self, model: "nn.Module", recipe: "Recipe", count: int) -> list[dict[str, Any]]:
        """A few held-out samples with the model's answers, for the report; none by default."""
        return []
