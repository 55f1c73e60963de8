"""What a run is, and what it learns: the seam between tasks and the rest of the laboratory, which knows no more of them.

A run is a `Recipe`, a complete, frozen value that nests training, model and task. A task is two things. Its settings are a
frozen dataclass (`Task`), part of every recipe and of the command line, which builds the model; its module is free of torch
where it is imported. What `Task.load` makes of them (`Data`) has the samples at hand: it draws the batch of a step, computes
the loss and scores held-out data. Another task is another file in this folder with one of each, and a line in `TASKS`; or,
without the line, MODULE:NAME on the command line. Recipe and task know each other, so they stand in one file. Tasks and
recipes by name are imported when they are first used. No torch here, so that help is instant.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from isopos import catalog
from isopos.deprecation import renamed
from isopos.lab.runs.files import mismatch

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

__all__ = [
    "PLACEMENT",
    "SCALES",
    "TASKS",
    "Data",
    "Metric",
    "Model",
    "Recipe",
    "Scored",
    "Task",
    "Training",
    "View",
    "evaluation",
    "find",
    "require",
    "spec",
]

__getattr__ = renamed(__name__, {"expect": "isopos.lab.tasks.task.require"})

SCALES = ("tiny", "small", "paper")
PLACEMENT = ("device", "devices", "nodes", "strategy", "workers", "logger", "save_every")
"""Fields that say where and how a run is computed: they may change when it is resumed."""
LIMITS = (
    ("seed", 0, 2**63 - 1),
    ("steps", 1, 10**12),
    (("batch", "accumulate", "devices", "nodes"), 1, 10**7),
    (("layers", "heads"), 1, 10**5),
    ("model_dim", 1, 10**7),
    ("hidden_dim", 0, 10**7),
    (("validate_every", "patience", "save_every"), 0, 10**12),
    ("workers", 0, 10**4),
    ("warmup", -1, 10**12),
)
"""A field or several, and the least and the most that they may be."""


TASKS = {
    "language": "isopos.lab.tasks.language:Language",
    "bidirectional": "isopos.lab.tasks.bidirectional:Bidirectional",
    "masked": "isopos.lab.tasks.masked:Masked",
    "glue": "isopos.lab.tasks.glue:Glue",
    "listops": "isopos.lab.tasks.listops:ListOps",
    "text": "isopos.lab.tasks.text:TextClasses",
    "trees": "isopos.lab.tasks.trees:TreeClasses",
    "pathfinder": "isopos.lab.tasks.pathfinder:Pathfinder",
    "images": "isopos.lab.tasks.images:Images",
    "series": "isopos.lab.tasks.series:Forecast",
    "transduction": "isopos.lab.tasks.transduction:Transduction",
    "tree-transduction": "isopos.lab.tasks.tree_transduction:TreeTransduction",
}
"""Where each task is; imported when it is first used."""


def require(name: str, value: object, what: str, met: bool) -> None:
    """Raise a ValueError where a field is not what it should be."""
    if not met:
        raise ValueError(f"{name}: expected {what}, got {value}")


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; then the mode of before."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


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
    counted: ClassVar[str] = ""  # the figure of `Data.score` that says how many samples were scored
    loss_scale: ClassVar[float] = 1.0  # of a loss in nats, where it is shown
    limits: ClassVar[tuple[tuple[str | tuple[str, ...], int, int], ...]] = ()
    """A field or several, and the least and the most that they may be."""
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
        """What `Data.score` finds besides, for tables and evaluations: by default how many samples were scored."""
        return (Metric("scored", self.counted, "higher", ",.0f"),) if self.counted else ()

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
        """`score` of a model that is in evaluation mode meanwhile."""
        with evaluation(model):
            return self.score(model, recipe, view)

    def evaluate(self, model: Any, recipe: "Recipe", metrics: Sequence[Metric]) -> dict[str, float | None]:
        """Scores by title; None where scheme or data have none. Each view is scored once."""
        found: dict[View, Scored] = {}
        for metric in metrics:
            if metric.view not in found:
                found[metric.view] = self.measure(model, recipe, metric.view)
        return {metric.title: found[metric.view].figures.get(metric.figure) for metric in metrics}

    def chance(self, recipe: "Recipe") -> tuple[float, int] | None:
        """The first metric of an answer that looks at nothing, and of how many held-out samples; None where not known."""
        return None

    def save(self, folder: Path) -> None:
        """Write beside the weights what they need to be used again, such as a tokenizer."""
        return

    def examples(self, model: Any, recipe: "Recipe", count: int) -> list[dict[str, Any]]:
        """A few held-out samples with the model's answers, for the report; none by default."""
        return []


@dataclass(frozen=True)
class Training:
    """How a run learns, and where it is computed."""

    steps: int = 250  # Updates.
    batch: int = 8  # Samples of an update, on all devices together.
    accumulate: int = 1  # Parts in which each device computes its share of an update, to save memory.
    optimizer: Literal["adam", "adamw"] = "adamw"
    """Adam adds the weight decay to gradients; AdamW shrinks the weights by it."""
    learning_rate: float = 3e-3  # At its peak, after the warm-up.
    schedule: Literal["cosine", "polynomial", "inverse-sqrt", "constant"] = "cosine"
    """After the warm-up: a cosine to zero, a power of the remaining share, sqrt(warmup / step), or no change."""
    power: float = 1.0  # Of the polynomial schedule.
    warmup: int = -1  # Updates of the linear warm-up; -1: a tenth of the steps.
    beta1: float = 0.9  # Adam's average of gradients.
    beta2: float = 0.999  # Adam's average of their squares.
    epsilon: float = 1e-8  # Adam's, in the denominator.
    weight_decay: float = 0.01  # A unit of learning rate.
    clip: float = 1.0  # Largest norm of the gradient; 0: as it is.
    precision: Literal["float32", "bfloat16"] = "float32"  # Of products; weights and optimizer stay in float32.
    validate_every: int = 0
    """Updates between validations while training, of which the best gives the weights; 0: only at the end, of the last."""
    patience: int = 0  # Stop after so many validations in a row without a better one; 0: never.
    save_every: int = 20  # Updates between checkpoints; 0: none.
    logger: Literal["none", "csv", "tensorboard"] = "none"  # What to write beside metrics.jsonl.
    workers: int = 0  # Processes that prepare batches, a device.
    device: str = "cpu"  # cpu, cuda, or auto, which takes a GPU if there is one.
    devices: int = 1  # Devices of each machine.
    nodes: int = 1  # Machines, which share the file system of the run's folder.
    strategy: Literal["ddp", "fsdp2"] = "ddp"  # With several devices: copies of the weights, or shares of them.


@dataclass(frozen=True)
class Model:
    """The sizes of a model, whatever it reads."""

    layers: int = 3  # Blocks.
    model_dim: int = 96  # Width.
    heads: int = 4  # Heads of its attention.
    hidden_dim: int = 0  # Width inside the feed-forward; 0: four times that of the model.
    activation: Literal["relu", "gelu"] = "relu"  # Inside the feed-forward.
    norm: Literal["layer", "batch"] = "layer"  # Of the features of a token, or of a feature over the tokens of a batch.
    dropout: float = 0.0  # Probability.
    attention_dropout: float = 0.0  # Probability, of weights of softmax attention; linear attention forms none.
    stochastic_depth: float = 0.0
    """Probability with which a sample is spared the last block in training; of those before it falls to 0 in equal steps."""
    recompute: bool = False
    """Gradient checkpointing: compute each block a second time in the backward pass instead of keeping what is in it."""


@dataclass(frozen=True)
class Recipe:
    """One run: the model of a task, trained with one scheme. Saved as recipe.json beside its weights.

    On the command line, in files and in tables its fields and those of its parts have one flat name each.
    """

    scheme: str = "rope"
    """Name, then options: rope:decay=retnet,denominator=plain. Or a pattern of layers, which repeats: rope*3+none."""
    seed: int = 0  # Of the initial weights, the batches and dropout.
    training: Training = Training()
    model: Model = Model()
    task: Task = field(default_factory=lambda: find("language")())

    def __post_init__(self) -> None:
        self.check_names(("task",))

    @property
    def names(self) -> tuple[str, ...]:
        """The flat names of all fields."""
        parts = (self.task, self.model, self.training)
        return ("scheme", "seed", *(one.name for part in parts for one in fields(part)))

    def check_names(self, others: Iterable[str]) -> None:
        """Raise a ValueError where a field has the name of another, or of one of these, such as options of a command."""
        names = [*self.names, *others]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"task: expected fields with names of their own, got {', '.join(sorted(twice))}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values by flat names, and under "task" what `find` finds its task by."""
        own = {"task": spec(self.task), "scheme": self.scheme, "seed": self.seed}
        return own | asdict(self.task) | asdict(self.model) | asdict(self.training)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """The inverse of `as_dict`, also after JSON; what is missing takes its default, and the task is language.

        Examples:
            >>> Recipe.from_dict({"steps": 10, "cutoffs": [100, 200]}).task.cutoffs
            (100, 200)
        """
        flat = {"task": "language"} | dict(values)
        if wrong := mismatch(flat, {"task": str}):
            raise ValueError(wrong)
        return cls(task=find(flat.pop("task"))()).edit(**flat)

    def edit(self, **changes: Any) -> "Recipe":
        """The recipe with changes of fields by flat names, or a ValueError where there is no such field.

        Examples:
            >>> recipe = Recipe().edit(seed=1, steps=10, length=64)
            >>> recipe.seed, recipe.training.steps, recipe.task.length
            (1, 10, 64)
        """
        for name in changes:
            catalog.expect("field of a recipe", name, self.names)
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
        kinds = {
            name: kind for part in (self, self.task, self.model, self.training) for name, kind in _kinds(type(part)).items()
        }
        if wrong := mismatch(plain, {name: kinds[name] for name in plain}):
            raise ValueError(wrong)

        def edited(part: Any) -> Any:
            return replace(part, **{one.name: plain[one.name] for one in fields(part) if one.name in plain})

        own = {name: plain[name] for name in ("scheme", "seed") if name in plain}
        parts = {"training": edited(self.training), "model": edited(self.model), "task": edited(self.task)}
        return replace(self, **own, **parts)

    def settled_as(self, before: "Recipe") -> "Recipe":
        """With what the data told another recipe, where this one leaves it open."""
        then, now = before.as_dict(), self.as_dict()
        return self.edit(**{name: then[name] for name in self.task.settled if not now[name] and name in then})

    def check(self) -> None:
        """Raise a ValueError that names the first field whose number cannot be."""
        t, m, values = self.training, self.model, self.as_dict()
        for names, least, most in (*LIMITS, *self.task.limits):
            for name in names.split() if isinstance(names, str) else names:  # with spaces between several, before
                require(name, values[name], f"a number from {least:,} to {most:,}", least <= values[name] <= most)
        for name in ("learning_rate", "epsilon", "power"):
            require(name, values[name], "a positive number", 0 < values[name] < float("inf"))
        for name in ("weight_decay", "clip"):
            require(name, values[name], "0 or more", 0 <= values[name] < float("inf"))
        for name in ("dropout", "attention_dropout", "stochastic_depth", "beta1", "beta2"):
            require(name, values[name], "at least 0 and less than 1", 0 <= values[name] < 1)
        require("model_dim", m.model_dim, f"a multiple of the {m.heads} heads", m.model_dim % m.heads == 0)
        parts = t.accumulate * t.devices * t.nodes
        require("batch", t.batch, f"a multiple of accumulate * devices * nodes = {parts}", t.batch % parts == 0)
        if t.validate_every and not t.save_every:
            raise ValueError("save_every: expected checkpoints, which keep the best weights, got 0; give both or neither")
        if t.patience and not t.validate_every:
            raise ValueError("patience: expected validations to wait for, got validate_every = 0; give both")


@cache
def _kinds(part: type) -> dict[str, Any]:
    """What the fields of a part are, in a file: types of a task's own are not looked into."""
    plain = (int, float, str, bool)
    hints = get_type_hints(part)
    return {one.name: hint for one in fields(part) if not isinstance(hint := hints[one.name], type) or hint in plain}


def find(name: str) -> type[Task]:
    """The task of a name of `TASKS`, or of MODULE:NAME; or a ValueError where there is none.

    Examples:
        >>> find("language")().unit
        'tokens'
    """
    module, _, attribute = TASKS.get(name, name).partition(":")
    if not attribute:
        catalog.expect("task", name, (*TASKS, "MODULE:NAME"))
    found = getattr(catalog.own_module(module, "task"), attribute, None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ValueError(f"task: expected {name} to be a subclass of isopos.lab.tasks.task.Task, got {found!r}")
    return found


def spec(task: Task) -> str:
    """What `find` finds it by.

    Examples:
        >>> spec(find("language")())
        'language'
    """
    kind = type(task)
    return kind.name if TASKS.get(kind.name) == (own := f"{kind.__module__}:{kind.__qualname__}") else own
