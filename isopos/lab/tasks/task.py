"""The seam between tasks and the rest of the laboratory: whoever trains, compares, evaluates or reports knows no more.

A task is two things. Its settings are a frozen dataclass (`Task`), part of every recipe and of the command line, which
builds the model; its module is free of torch where it is imported. What `Task.load` makes of them (`Data`) has the samples
at hand: it draws the batch of a step, computes the loss and scores held-out data. Another task is another file in this
folder with one of each, and a line in `tasks.TASKS`; or, without the line, MODULE:NAME on the command line.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isopos import catalog

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.lab.recipes import Recipe

__all__ = ["Data", "Metric", "Scored", "Task", "View", "expect"]


def expect(name: str, value: object, what: str, met: bool) -> None:
    """Raise a ValueError where a field is not what it should be."""
    if not met:
        raise ValueError(f"{name}: expected {what}, got {value}")


@dataclass(frozen=True)
class View:
    """Which held-out data is scored, and how."""

    split: str = "validation"  # or test
    multiple: int = 1  # of the training length, where a task has samples of any length
    scored: float = 0.0  # of each sample, at its end: so many of its units; below 1 a share; 0: all
    limit: int = -1  # at most so many, in the task's unit; 0: all; -1: as in training
    own: tuple[tuple[str, int], ...] = ()  # choices that only this task has: of images ("shift", 2)


@dataclass(frozen=True)
class Metric:
    """A figure of merit: a column of every table.

    Examples:
        >>> accuracy = Metric("accuracy", "accuracy", "higher", ".1%")
        >>> sorted([0.5, 0.75, 0.25], key=accuracy.rank), accuracy.text(0.5), accuracy.text(None)
        ([0.75, 0.5, 0.25], '50.0%', '-')
    """

    title: str  # of the column
    figure: str  # its name among those that `Data.score` returns
    better: Literal["lower", "higher"] = "lower"
    style: str = ".3f"  # of values, as in format(value, style)
    view: View = View()  # what is scored
    note: str = ""  # what a reader must know, in a few words

    def rank(self, value: float) -> float:
        """A number by which values sort, the best first."""
        return value if self.better == "lower" else -value

    def text(self, value: float | None) -> str:
        """The value as tables show it."""
        return "-" if value is None else format(value, self.style)


@dataclass(frozen=True)
class Scored:
    """Figures by name; where the scheme or the data has none for a view, no figures and the reason."""

    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Task(ABC):
    """The settings of a task: a frozen dataclass whose fields are options of the command line, each with a default."""

    metrics: ClassVar[tuple[Metric, ...]]
    """The columns of a comparison; the first ranks, decides which weights are best, and ends patience."""
    name: ClassVar[str] = ""  # in the registry; a task of your own needs none
    schemes: ClassVar[str] = "none,rope"  # compared by default: a comma list
    edits: ClassVar[Mapping[str, Any]] = {}  # of the recipe of a comparison, by default: flat names
    unit: ClassVar[str] = "samples"  # what a throughput counts
    loss_scale: ClassVar[float] = 1.0  # of a loss in nats, where it is shown
    limits: ClassVar[tuple[tuple[str, int, int], ...]] = ()  # names of fields, and the least and the most that they may be
    settled: ClassVar[tuple[str, ...]] = ()  # fields that are found in the data where they are 0
    views: ClassVar[tuple[str, ...]] = ("split", "limit")  # of a `View`, what can be chosen: fields, or names of its own

    @abstractmethod
    def model(self, recipe: "Recipe") -> Any:
        """The model, a module on the CPU, without looking at data, initialised from the recipe's seed (`build.build_model`).

        It has the attributes `scheme` and, to be sharded, `blocks`.
        """

    @abstractmethod
    def load(self, recipe: "Recipe", console: "Console | None" = None, run: Path | None = None) -> "Data":
        """The data, prepared: for a new run, or with what `Data.save` wrote in the folder of one.

        Raises:
            ValueError: Where there is none, or it does not fit; the message names file, line and remedy.
        """

    def check(self, recipe: "Recipe") -> Sequence[str]:
        """What a reader of the results should know before; the scheme fits the groups of positions that samples have.

        Raises:
            ValueError: Before any data is read; the message names the first field that cannot be.
        """
        self.model(recipe)
        return ()

    def origin(self, recipe: "Recipe") -> Path | None:
        """The folder of a run that has ended, with whose weights training begins, but for those of `anew`; none by default.

        Raises:
            ValueError: Where there is none, or its model is another.
        """
        return None

    def anew(self, recipe: "Recipe") -> tuple[str, ...]:
        """How names of weights begin that are not those of the run of `origin`: of the head by default."""
        return ("head.",)

    @property
    def fits(self) -> Mapping[str, object]:
        """What options of schemes follow where a user gives none, as in `isopos.schemes.build`: "length", "branches", ..."""
        return {}

    @property
    def more(self) -> tuple[Metric, ...]:
        """What `Data.score` finds besides, for tables and evaluations."""
        return ()

    @property
    def loss_unit(self) -> str:
        """What a training loss is shown in."""
        return "nats"

    def size(self, recipe: "Recipe") -> int:
        """Units of a step."""
        return recipe.training.batch

    def setting(self, recipe: "Recipe") -> str:
        """What a report says of model and samples, in a sentence."""
        return f"{type(self).__name__}."

    @property
    def figures(self) -> tuple[Metric, ...]:
        """Everything that `Data.score` finds, once."""
        every = (*self.metrics, *self.more)
        return tuple(metric for n, metric in enumerate(every) if metric.figure not in [one.figure for one in every[:n]])

    def figure(self, name: str) -> Metric:
        """That of `figures` with this name, or a ValueError where there is none."""
        known = {metric.figure: metric for metric in self.figures}
        catalog.expect("figure", name, known)
        return known[name]

    def extent(self, view: View, axes: int) -> tuple[float, int] | None:
        """How many times longer than in training samples of a view are, along positions of so many axes, and how long there.

        None where samples have no lengths to choose.
        """
        return None

    def check_view(self, view: View) -> None:
        """Raise a ValueError that names the first field of a view that the samples of this task do not have."""
        takes, known = ", ".join(self.views).replace("multiple", "length") or "no choice", vars(View())
        for name, value in [*vars(replace(view, own=())).items(), *view.own]:
            if value != known.get(name) and name not in self.views:
                name = name.replace("multiple", "length")
                raise ValueError(f"{name}: expected none, which samples of this task do not have; it takes {takes}")


class Data(ABC):
    """A task with its samples at hand. Every method is a function of its arguments: a run resumes exactly."""

    name: str  # of the source, for readers
    sha256: str  # a fingerprint: a run goes on, and a table is filled, with the same data only
    summary: str  # sizes in a few words
    splits: tuple[str, ...] = ("validation",)  # held-out ones that there are
    calls: ClassVar[tuple[str, ...]] = ()
    """Methods of the model, beside its call, that `loss` and `score` use: shards of weights must know them."""

    def settle(self, recipe: "Recipe") -> "Recipe":
        """The recipe with what only the data tells, such as the size of a vocabulary."""
        return recipe

    @abstractmethod
    def batch(self, recipe: "Recipe", step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        """A rank's share in the batch of a step: a function of (seed, step, rank). The shares together are the batch."""

    @abstractmethod
    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        """The mean loss of a batch in nats: a scalar with a graph."""

    @abstractmethod
    def score(self, model: Any, recipe: "Recipe", view: View) -> Scored:
        """Figures of held-out data, of a model in evaluation mode; no gradients are recorded."""

    def measure(self, model: Any, recipe: "Recipe", view: View) -> Scored:
        """`score`, which the model is put in evaluation mode for."""
        import torch

        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return self.score(model, recipe, view)
        finally:
            model.train(training)

    def chance(self, recipe: "Recipe") -> tuple[float, int] | None:
        """The first metric of an answer that looks at nothing, and of how many held-out samples; None where not known."""
        return None

    def save(self, folder: Path) -> None:
        """Write beside the weights what they need to be used again, such as a tokenizer."""
        return

    def examples(self, model: Any, recipe: "Recipe", count: int) -> list[dict[str, Any]]:
        """A few held-out samples with the model's answers, for the report; none by default."""
        return []
