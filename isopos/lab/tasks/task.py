"""Recipes and tasks: the interface between tasks and the rest of the laboratory.

A run is a `Recipe`, a complete, frozen value that nests training, model and task. A task has two classes. `Task` holds its
settings, a frozen dataclass, part of every recipe and of the command line, which builds the model. `Data`, which
`Task.load` returns, holds the samples: it draws the batch of a step, computes the loss and scores held-out data. A new task
is a file in this folder with one of each and a line in `TASKS`; or, without the line, MODULE:NAME on the command line.
Recipe and task refer to each other, so they stand in one file. Tasks and recipes by name are imported when they are first
used, and nothing here imports torch, so that help is instant.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
SAME = ("layers", "model_dim", "heads", "activation", "norm")  # fields that a warm start keeps
PLACEMENT = (
    "device",
    "devices",
    "nodes",
    "strategy",
    "sequence_parallel",
    "sequence_keys",
    "workers",
    "logger",
    "save_every",
)
"""Fields that determine where and how a run is computed: they may change when it is resumed."""
LIMITS = (
    ("seed", 0, 2**63 - 1),
    ("steps", 1, 10**12),
    (("batch", "accumulate", "devices", "nodes", "sequence_parallel"), 1, 10**7),
    (("layers", "heads"), 1, 10**5),
    ("model_dim", 1, 10**7),
    ("hidden_dim", 0, 10**7),
    (("validate_every", "patience", "save_every"), 0, 10**12),
    ("workers", 0, 10**4),
    ("warmup", -1, 10**12),
)
"""Names of fields, their smallest and their largest value."""


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
    "scenes": "isopos.lab.tasks.scenes:Scenes",
    "graphs": "isopos.lab.tasks.graphs:GraphDistance",
    "series": "isopos.lab.tasks.series:Forecast",
    "transduction": "isopos.lab.tasks.transduction:Transduction",
    "tree-transduction": "isopos.lab.tasks.tree_transduction:TreeTransduction",
}
"""Module and class of each task; imported when it is first used."""


def require(name: str, value: object, what: str, met: bool) -> None:
    """Raise a ValueError about a field unless its condition is met."""
    if not met:
        raise ValueError(f"{name}: expected {what}, got {value}")


def _earlier_names(cls: type, names: Mapping[str, str]) -> None:
    """Let a class that defines an attribute by its earlier name, or by its new one, have both."""
    for old, new in names.items():
        if old in vars(cls):
            text = f"{cls.__name__}.{old} is {new} now; the old name goes in the next version"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            setattr(cls, new, vars(cls)[old])
        elif new in vars(cls):
            setattr(cls, old, vars(cls)[new])


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; restores the previous mode afterwards."""
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
    multiple: int = 1  # length as a multiple of the training length, if samples may have any length
    scored: float = 0.0  # units at the end of each sample that are scored; below 1: their share; 0: all
    limit: int = -1  # largest number of samples or units; 0: all; -1: as in training
    own: tuple[tuple[str, int], ...] = ()  # options of the task, such as ("shift", 2) of images


@dataclass(frozen=True)
class Metric:
    """A metric: a column of every table.

    Examples:
        >>> accuracy = Metric("accuracy", "accuracy", "higher", ".1%")
        >>> sorted([0.5, 0.75, 0.25], key=accuracy.rank), accuracy.text(0.5), accuracy.text(None)
        ([0.75, 0.5, 0.25], '50.0%', '-')
    """

    title: str  # of the column
    figure: str  # its name in the result of `Data.score`
    better: Literal["lower", "higher"] = "lower"
    style: str = ".3f"  # format specification of values
    view: View = View()  # which data is scored
    note: str = ""  # explanation for readers

    def rank(self, value: float) -> float:
        """A sort key: the best value has the smallest."""
        return value if self.better == "lower" else -value

    def text(self, value: float | None) -> str:
        """The value as tables show it."""
        return "-" if value is None else format(value, self.style)


Cut = Callable[[Any, int], Any]  # a tensor and its axis of tokens; the tokens of this process


@dataclass(frozen=True)
class Scored:
    """Figures by name; or no figures, and the reason why the scheme or the data has none for a view."""

    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Task(ABC):
    """The settings of a task: a frozen dataclass whose fields are options of the command line, each with a default."""

    metrics: ClassVar[tuple[Metric, ...]]
    """The columns of a comparison; the first one ranks, selects the best weights, and ends patience."""
    name: ClassVar[str] = ""  # key in `TASKS`; a custom task needs none
    schemes: ClassVar[str] = "none,rope"  # schemes that are compared by default
    edits: ClassVar[Mapping[str, Any]] = {}  # default changes of the recipe of a comparison, by flat names
    unit: ClassVar[str] = "samples"  # unit of throughputs
    counted: ClassVar[str] = ""  # the figure of `Data.score` that says how many samples were scored
    loss_scale: ClassVar[float] = 1.0  # factor of a loss in nats for readers
    limits: ClassVar[tuple[tuple[str | tuple[str, ...], int, int], ...]] = ()
    """Names of fields, their smallest and their largest value."""
    inferred: ClassVar[tuple[str, ...]] = ()  # fields that are inferred from the data if they are 0
    settled: ClassVar[tuple[str, ...]] = ()  # earlier name of `inferred`
    views: ClassVar[tuple[str, ...]] = ("split", "limit")  # fields and options of a `View` that can be chosen
    in_shards: ClassVar[bool | str] = False
    """Whether `Data.shard` cuts samples of any length; or the field whose value the number of shards must divide."""

    def __init_subclass__(cls) -> None:
        _earlier_names(cls, {"settled": "inferred", "anew": "reinitialised"})

    @abstractmethod
    def model(self, recipe: "Recipe") -> Any:
        """The model, a module on the CPU, initialised from the recipe's seed (`build.build_model`), without reading data.

        It has the attribute `scheme` and, to be sharded, `blocks`.
        """

    @abstractmethod
    def load(self, recipe: "Recipe", console: "Console | None" = None, run: Path | None = None) -> "Data":
        """The prepared data of a new run, or of the run in a folder, with the files that `Data.save` wrote there.

        Raises:
            ValueError: If there is no data, or it does not fit; the message names file, line and remedy.
        """

    def check(self, recipe: "Recipe") -> Sequence[str]:
        """Check settings and scheme before any data is read; returns warnings for readers of the results.

        Raises:
            ValueError: The message names the first field that is wrong.
        """
        self.model(recipe)
        return ()

    def check_sequence_parallel(self, recipe: "Recipe") -> None:
        """ValueError unless several processes can hold one sample together, by `Data.shard`; by default they cannot."""
        if not self.in_shards:
            raise ValueError(
                f"sequence_parallel: expected 1, since {type(self).__name__} has no samples that are cut into shards of "
                f"tokens, got {recipe.training.sequence_parallel}; tasks of text, trees, expressions and series have"
            )
        if isinstance(self.in_shards, str):
            ranks, value = recipe.training.sequence_parallel, getattr(self, self.in_shards)
            require(self.in_shards, value, f"a multiple of sequence_parallel = {ranks}", value % ranks == 0)

    def origin(self, recipe: "Recipe") -> Path | None:
        """The folder of a finished run for a warm start: its weights are the initial weights, except for `reinitialised`.

        Raises:
            ValueError: If there is no such run, or its model is different.
        """
        return None

    def reinitialised(self, recipe: "Recipe") -> tuple[str, ...]:
        """Prefixes of the names of weights that a warm start reinitialises: by default the head."""
        return ("head.",)

    anew = reinitialised

    @property
    def fits(self) -> Mapping[str, object]:
        """Options of schemes that follow from samples, as in `isopos.schemes.build`: "length", "branches", ..."""
        return {}

    @property
    def more(self) -> tuple[Metric, ...]:
        """Further metrics for tables and evaluations: by default the number of scored samples."""
        return (Metric("scored", self.counted, "higher", ",.0f"),) if self.counted else ()

    @property
    def loss_unit(self) -> str:
        """Unit of the training loss for readers."""
        return "nats"

    def size(self, recipe: "Recipe") -> int:
        """Number of units in a step."""
        return recipe.training.batch

    def setting(self, recipe: "Recipe") -> str:
        """A sentence about model and samples for reports."""
        return f"{type(self).__name__}."

    @property
    def figures(self) -> tuple[Metric, ...]:
        """All metrics, once per figure."""
        every = (*self.metrics, *self.more)
        return tuple(metric for n, metric in enumerate(every) if metric.figure not in [one.figure for one in every[:n]])

    def figure(self, name: str) -> Metric:
        """The metric of `figures` with this name; ValueError if there is none."""
        known = {metric.figure: metric for metric in self.figures}
        catalog.expect("figure", name, known)
        return known[name]

    def extent(self, view: View, axes: int) -> tuple[float, int] | None:
        """The length of samples in a view relative to training, along positions with `axes` axes, and the training length.

        None if the length cannot be chosen.
        """
        return None

    def check_view(self, view: View) -> None:
        """Raise a ValueError for the first field of a view that this task does not support."""
        takes, known = ", ".join(self.views).replace("multiple", "length") or "no choice", vars(View())
        for name, value in [*vars(replace(view, own=())).items(), *view.own]:
            if value != known.get(name) and name not in self.views:
                name = name.replace("multiple", "length")
                raise ValueError(f"{name}: expected none, which samples of this task do not have; it takes {takes}")


class Data(ABC):
    """The samples of a task. Every method is a function of its arguments, so that runs resume exactly."""

    name: str  # of the source, for readers
    sha256: str  # a fingerprint: runs and tables can only be continued with the same data
    summary: str  # sizes, for readers
    splits: tuple[str, ...] = ("validation",)  # held-out splits that exist
    calls: ClassVar[tuple[str, ...]] = ()
    """Methods of the model, in addition to its call, that `loss` and `score` use, for sharded weights."""

    def __init_subclass__(cls) -> None:
        _earlier_names(cls, {"settle": "infer"})

    def infer(self, recipe: "Recipe") -> "Recipe":
        """The recipe with the fields that are inferred from the data, such as the size of the vocabulary."""
        return recipe

    settle = infer

    @abstractmethod
    def batch(self, recipe: "Recipe", step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        """A rank's share of the batch of a step: a function of (seed, step, rank). All shares together are the batch."""

    def shard(self, batch: "tuple[Tensor, ...]", cut: "Cut", ranks: int) -> "tuple[Tensor, ...]":
        """This process's shard of the tokens of a batch. The mean of the losses of all shards is the loss of the batch.

        Args:
            batch: As `batch` returns it.
            cut: A function of a tensor and its axis of tokens, which takes the tokens of this process.
            ranks: Number of shards.
        """
        raise NotImplementedError("a task that passes check_sequence_parallel cuts its batches")

    def part(self, model: Any, batch: "tuple[Tensor, ...]") -> "tuple[Tensor, ...]":
        """The batch, or this process's shard of it while the model is over a group (`isopos.models.blocks.Trunk.over`)."""
        if (group := getattr(model, "group", None)) is None:
            return batch
        from isopos.parallel import Shards, cut

        return self.shard(batch, lambda x, axis: cut(x, group, axis), Shards(group, 0, batch[0].device).size)

    @abstractmethod
    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        """The mean loss of a batch in nats: a scalar with gradients."""

    @abstractmethod
    def score(self, model: Any, recipe: "Recipe", view: View) -> Scored:
        """Figures of a model in evaluation mode on held-out data, without gradients."""

    def measure(self, model: Any, recipe: "Recipe", view: View) -> Scored:
        """`score` in evaluation mode; then the mode is restored."""
        with evaluation(model):
            return self.score(model, recipe, view)

    def evaluate(self, model: Any, recipe: "Recipe", metrics: Sequence[Metric]) -> dict[str, float | None]:
        """Values of metrics by title; None if scheme or data have none. Each view is scored once."""
        scored = {view: self.measure(model, recipe, view) for view in dict.fromkeys(metric.view for metric in metrics)}
        return {metric.title: scored[metric.view].figures.get(metric.figure) for metric in metrics}

    def chance(self, recipe: "Recipe") -> tuple[float, int] | None:
        """The first metric of a constant answer, and the number of held-out samples it is taken from; None if unknown."""
        return None

    def save(self, folder: Path) -> None:
        """Write files that the weights require, such as a tokenizer, into the folder of a run."""
        return

    def examples(self, model: Any, recipe: "Recipe", count: int) -> list[dict[str, Any]]:
        """A few held-out samples with the model's answers, for the report; by default none."""
        return []


@dataclass(frozen=True)
class Training:
    """How and where a run is trained."""

    steps: int = 250  # Number of updates.
    batch: int = 8  # Samples per update, on all devices together.
    accumulate: int = 1  # Parts in which each device computes its share of an update, to save memory.
    optimizer: Literal["adam", "adamw"] = "adamw"
    """Adam adds the weight decay to gradients; AdamW decouples it."""
    learning_rate: float = 3e-3  # Peak learning rate, after the warm-up.
    schedule: Literal["cosine", "polynomial", "inverse-sqrt", "constant"] = "cosine"
    """After the warm-up: a cosine to zero, a power of the remaining share of steps, sqrt(warmup / step), or constant."""
    power: float = 1.0  # Exponent of the polynomial schedule.
    warmup: int = -1  # Updates of the linear warm-up; -1: a tenth of the steps.
    beta1: float = 0.9  # Adam's decay of the average of gradients.
    beta2: float = 0.999  # Adam's decay of the average of squared gradients.
    epsilon: float = 1e-8  # Adam's epsilon in the denominator.
    weight_decay: float = 0.01  # Weight decay per unit of learning rate.
    clip: float = 1.0  # Largest norm of the gradient; 0: no clipping.
    precision: Literal["float32", "bfloat16"] = "float32"  # Precision of products; weights and optimizer have float32.
    validate_every: int = 0
    """Updates between validations; the best validation selects the weights. 0: validate only the last weights."""
    patience: int = 0  # Stop after this number of validations without improvement; 0: never.
    save_every: int = 20  # Updates between checkpoints; 0: none.
    logger: Literal["none", "csv", "tensorboard"] = "none"  # Logger in addition to metrics.jsonl.
    workers: int = 0  # Processes per device that prepare batches.
    device: str = "cpu"  # cpu, cuda, or auto, which takes a GPU if there is one.
    devices: int = 1  # Number of devices of each machine.
    nodes: int = 1  # Number of machines, which share the file system of the run's folder.
    strategy: Literal["ddp", "fsdp2"] = "ddp"  # With several devices: replicated or sharded weights.
    sequence_parallel: int = 1  # Devices that hold one sequence together, each an equal part of its tokens.
    sequence_keys: Literal["gather", "ring", "zigzag"] = "gather"
    """How softmax attention sees the keys of these devices: all at once; one device's at a time; or so with two pieces of
    the sequence on each device, which balances causal attention."""

    @property
    def shares(self) -> int:
        """Number of shares of a batch: groups of devices that hold one sequence."""
        return self.devices * self.nodes // self.sequence_parallel


@dataclass(frozen=True)
class Model:
    """The sizes of a model."""

    layers: int = 3  # Number of blocks.
    model_dim: int = 96  # Width of the model.
    heads: int = 4  # Number of attention heads.
    hidden_dim: int = 0  # Width of the feed-forward layers; 0: four times the width of the model.
    activation: Literal["relu", "gelu"] = "relu"  # Activation of the feed-forward layers.
    norm: Literal["layer", "batch"] = "layer"  # Normalise features of a token, or each feature over the batch.
    dropout: float = 0.0  # Dropout probability.
    attention_dropout: float = 0.0  # Dropout probability of the weights of softmax attention.
    stochastic_depth: float = 0.0
    """Probability with which a sample skips the last block in training; linear in depth, 0 for the first block."""
    recompute: bool = False
    """Gradient checkpointing: recompute each block in the backward pass instead of storing its activations."""


@dataclass(frozen=True)
class Recipe:
    """One run: the model of a task, trained with one scheme. Saved as recipe.json next to the weights.

    On the command line, in files and in tables, each field has one flat name, also those of nested parts.
    """

    scheme: str = "rope"
    """Name and options: rope:decay=retnet,denominator=plain. Or a repeated pattern of layers: rope*3+none."""
    seed: int = 0  # Seed of initial weights, batches and dropout.
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
        """Raise a ValueError if two fields have one name, or a field has one of these names (options of a command)."""
        names = [*self.names, *others]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"task: expected fields with distinct names, got {', '.join(sorted(twice))}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values by flat names; "task" is the name for `find`."""
        flat = {"task": spec(self.task), "scheme": self.scheme, "seed": self.seed}
        return flat | asdict(self.task) | asdict(self.model) | asdict(self.training)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """The inverse of `as_dict`, also after JSON. Missing fields have their defaults; the default task is language.

        Examples:
            >>> Recipe.from_dict({"steps": 10, "cutoffs": [100, 200]}).task.cutoffs
            (100, 200)
        """
        flat = {"task": "language"} | dict(values)
        if wrong := mismatch(flat, {"task": str}):
            raise ValueError(wrong)
        return cls(task=find(flat.pop("task"))()).edit(**flat)

    def edit(self, **changes: Any) -> "Recipe":
        """The recipe with changed fields, by flat names; ValueError if a field does not exist.

        Examples:
            >>> recipe = Recipe().edit(seed=1, steps=10, length=64)
            >>> recipe.seed, recipe.training.steps, recipe.task.length
            (1, 10, 64)
        """
        names = self.names
        for name in changes:
            catalog.expect("field of a recipe", name, names)
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
        kinds = {
            name: kind for part in (self, self.task, self.model, self.training) for name, kind in _kinds(type(part)).items()
        }
        if wrong := mismatch(plain, {name: kinds[name] for name in plain}):
            raise ValueError(wrong)

        def edited(part: Any) -> Any:
            return replace(part, **{one.name: plain[one.name] for one in fields(part) if one.name in plain})

        top = {name: plain[name] for name in ("scheme", "seed") if name in plain}
        parts = {"training": edited(self.training), "model": edited(self.model), "task": edited(self.task)}
        return replace(self, **top, **parts)

    def with_inferred(self, before: "Recipe") -> "Recipe":
        """The recipe with the inferred fields of another recipe, where they are 0 here."""
        then, now = before.as_dict(), self.as_dict()
        return self.edit(**{name: then[name] for name in self.task.inferred if not now[name] and name in then})

    settled_as = with_inferred

    def check(self) -> None:
        """Raise a ValueError for the first field whose number is out of range."""
        t, m, values = self.training, self.model, self.as_dict()
        for names, least, most in (*LIMITS, *self.task.limits):
            for name in names.split() if isinstance(names, str) else names:  # earlier versions separate names by spaces
                require(name, values[name], f"a number from {least:,} to {most:,}", least <= values[name] <= most)
        for name in ("learning_rate", "epsilon", "power"):
            require(name, values[name], "a positive number", 0 < values[name] < float("inf"))
        for name in ("weight_decay", "clip"):
            require(name, values[name], "0 or more", 0 <= values[name] < float("inf"))
        for name in ("dropout", "attention_dropout", "stochastic_depth", "beta1", "beta2"):
            require(name, values[name], "at least 0 and less than 1", 0 <= values[name] < 1)
        require("model_dim", m.model_dim, f"a multiple of the {m.heads} heads", m.model_dim % m.heads == 0)
        world, ranks = t.devices * t.nodes, t.sequence_parallel
        require("sequence_parallel", ranks, f"a divisor of devices * nodes = {world}", world % ranks == 0)
        if ranks > 1:
            self.task.check_sequence_parallel(self)
            require("stochastic_depth", m.stochastic_depth, "0 with sequence_parallel", m.stochastic_depth == 0)
            require("norm", m.norm, "layer with sequence_parallel", m.norm == "layer")
            ring = t.sequence_keys != "gather" and m.attention_dropout > 0
            require("attention_dropout", m.attention_dropout, f"0 with sequence_keys = {t.sequence_keys}", not ring)
        else:
            require("sequence_keys", t.sequence_keys, "gather without sequence_parallel", t.sequence_keys == "gather")
        parts, per = t.accumulate * t.shares, "" if ranks == 1 else " / sequence_parallel"
        require("batch", t.batch, f"a multiple of accumulate * devices * nodes{per} = {parts}", t.batch % parts == 0)
        if t.validate_every and not t.save_every:
            raise ValueError("save_every: expected checkpoints, which keep the best weights, got 0; give both or neither")
        if t.patience and not t.validate_every:
            raise ValueError("patience: expected validations to wait for, got validate_every = 0; give both")


@cache
def _kinds(part: type) -> dict[str, Any]:
    """Types of the fields of a part in files; types that a task defines are not checked."""
    plain = (int, float, str, bool)
    hints = get_type_hints(part)
    return {one.name: hint for one in fields(part) if not isinstance(hint := hints[one.name], type) or hint in plain}


def find(name: str) -> type[Task]:
    """The class of a task by its name in `TASKS` or as MODULE:NAME; ValueError if there is none.

    Examples:
        >>> find("language")().unit
        'tokens'
    """
    module, _, attribute = TASKS.get(name, name).partition(":")
    if not attribute:
        catalog.expect("task", name, (*TASKS, "MODULE:NAME"))
    kind = getattr(catalog.own_module(module, "task"), attribute, None)
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise ValueError(f"task: expected {name} to be a subclass of isopos.lab.tasks.task.Task, got {kind!r}")
    return kind


def spec(task: Task) -> str:
    """The name by which `find` finds a task.

    Examples:
        >>> spec(find("language")())
        'language'
    """
    kind = type(task)
    return kind.name if TASKS.get(kind.name) == (name := f"{kind.__module__}:{kind.__qualname__}") else name
