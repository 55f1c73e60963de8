"""What a run is: a complete, frozen value that nests training, model and task. Schemes are text: a name, then options.

No torch here, so that help is instant.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_type_hints

from isopos import catalog
from isopos.catalog import CATALOG
from isopos.lab import tasks
from isopos.lab.runs.files import mismatch
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.task import Task, expect

__all__ = [
    "PLACEMENT",
    "SCALES",
    "Model",
    "Recipe",
    "Training",
    "join_spec",
    "map_spec",
    "of_layers",
    "parse_schemes",
    "split_spec",
]

SCALES = ("tiny", "small", "paper")
PLACEMENT = ("device", "devices", "nodes", "strategy", "workers", "logger", "save_every")
"""Fields that say where and how a run is computed: they may change when it is resumed."""
LIMITS = (
    ("seed", 0, 2**63 - 1),
    ("steps", 1, 10**12),
    ("batch accumulate devices nodes", 1, 10**7),
    ("layers heads", 1, 10**5),
    ("model_dim", 1, 10**7),
    ("hidden_dim", 0, 10**7),
    ("validate_every patience save_every", 0, 10**12),
    ("workers", 0, 10**4),
    ("warmup", -1, 10**12),
)
"""Names of fields, and the least and the most that they may be."""


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
    task: Task = field(default_factory=Language)

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
        """Plain values by flat names, and under "task" what `isopos.lab.tasks.find` finds its task by."""
        own = {"task": tasks.spec(self.task), "scheme": self.scheme, "seed": self.seed}
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
        return cls(task=tasks.find(flat.pop("task"))()).edit(**flat)

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
            for name in names.split():
                expect(name, values[name], f"a number from {least:,} to {most:,}", least <= values[name] <= most)
        for name in ("learning_rate", "epsilon", "power"):
            expect(name, values[name], "a positive number", 0 < values[name] < float("inf"))
        for name in ("weight_decay", "clip"):
            expect(name, values[name], "0 or more", 0 <= values[name] < float("inf"))
        for name in ("dropout", "attention_dropout", "stochastic_depth", "beta1", "beta2"):
            expect(name, values[name], "at least 0 and less than 1", 0 <= values[name] < 1)
        expect("model_dim", m.model_dim, f"a multiple of the {m.heads} heads", m.model_dim % m.heads == 0)
        parts = t.accumulate * t.devices * t.nodes
        expect("batch", t.batch, f"a multiple of accumulate * devices * nodes = {parts}", t.batch % parts == 0)
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


def parse_schemes(text: str) -> list[str]:
    """The schemes of a comma list. A piece with "=" and no ":" is another option of the scheme before it.

    Examples:
        >>> parse_schemes("none,rope:decay=retnet,denominator=plain,retnet")
        ['none', 'rope:decay=retnet,denominator=plain', 'retnet']
    """
    specs: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        if "=" in piece and ":" not in piece and specs:
            specs[-1] += ("," if ":" in specs[-1] else ":") + piece
        else:
            specs.append(piece)
    if not specs:
        raise ValueError("schemes: expected at least one name, got none; isopos list shows them")
    return specs


def of_layers(spec: str) -> list[str]:
    """The scheme of each layer of a pattern: schemes joined by +, each for one layer or for as many as follow its *.

    A + within an option's value joins its parts, where what follows it is no scheme's name.

    Examples:
        >>> of_layers("rope:decay=retnet*2+none"), of_layers("ape-product:parts=ring4+tree2+none")
        (['rope:decay=retnet', 'rope:decay=retnet', 'none'], ['ape-product:parts=ring4+tree2', 'none'])
    """
    parts = [""]
    for piece in re.split(r"\+(?=[a-zA-Z_])", spec):
        name = re.split("[:*+]", piece)[0]
        if "=" in parts[-1] and name not in CATALOG and "." not in name:
            parts[-1] += "+" + piece
        else:
            parts.append(piece)
    found = []
    for part in parts[1:]:
        one, star, count = part.rpartition("*")
        if star and not (count.isdecimal() and 1 <= int(count) <= 100_000):
            raise ValueError(f"scheme {spec!r}: expected a number of layers after *, got {count!r}")
        found += [one] * int(count) if star else [part]
    return found


def map_spec(spec: str, change: Callable[[str], str]) -> str:
    """A scheme, or a pattern with each of its schemes, changed.

    Examples:
        >>> map_spec("rope*3+none", lambda one: one + ":attention=softmax")
        'rope:attention=softmax*3+none:attention=softmax'
    """
    runs = [(one, len([*same])) for one, same in itertools.groupby(of_layers(spec))]
    return "+".join(change(one) + f"*{count}" * (count > 1) for one, count in runs)


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of a scheme, which is the same in all layers.

    Examples:
        >>> split_spec("rope:decay=retnet,base=500000")
        ('rope', {'decay': 'retnet', 'base': '500000'})
    """
    one, *more = dict.fromkeys(of_layers(spec))
    if more:
        raise ValueError(
            f"scheme: expected one, not one a layer as in {spec}; name each by itself: {one}, {', '.join(more)}"
        )
    name, _, rest = one.partition(":")
    options = {}
    for piece in filter(None, rest.split(",")):
        option, equals, value = piece.partition("=")
        if not equals or not option or not value:
            raise ValueError(f"scheme {spec!r}: expected option=value, got {piece!r}")
        options[option.strip().replace("-", "_")] = value.strip()
    return name, options


def join_spec(name: str, options: dict[str, str]) -> str:
    """The inverse of `split_spec`."""
    return name + (":" if options else "") + ",".join(f"{k}={v}" for k, v in options.items())
