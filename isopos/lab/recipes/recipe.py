"""Recipes: a run and a comparison of runs as complete, frozen values. No torch here, so that `isopos --help` is instant."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal

import tyro

__all__ = ["PLACEMENT", "RECIPES", "SCALES", "Comparison", "Recipe", "TableRun", "parse_schemes"]

DEFAULT_SCHEMES = "none,sinusoidal,rope,lrpe-unitary,lrpe-orthogonal,permuteformer,retnet"
SCALES = ("tiny", "small", "paper")
PLACEMENT = ("device", "devices", "nodes", "strategy", "workers", "logger", "save_every")
"""Fields that say where and how a run is computed: they may change when it is resumed."""


@dataclass(frozen=True)
class Recipe:
    """One run: a language model trained with one scheme. Saved as recipe.json beside its weights."""

    scheme: str = "rope"
    """Name, then options: rope:decay=retnet,denominator=plain."""
    data: str = ""
    """A file, an archive, a folder or hf:NAME:CONFIG; empty: the Python language reference. docs/data.md says more."""
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"
    """What a token is."""
    vocabulary: int = 0
    """Tokens; 0: as many as the tokenizer has."""
    seed: int = 0
    """Of the initial weights, the batches and dropout."""
    steps: int = 250
    """Updates."""
    length: int = 256
    """Tokens of a training window."""
    batch: int = 8
    """Windows of an update, on all devices together."""
    accumulate: int = 1
    """Parts in which each device computes its share of an update, to save memory."""
    layers: int = 3
    """Blocks of the decoder."""
    model_dim: int = 96
    """Width of the decoder."""
    heads: int = 4
    """Heads of its attention."""
    hidden_dim: int = 0
    """Width inside the feed-forward; 0: four times that of the decoder."""
    dropout: float = 0.0
    """Probability."""
    cutoffs: tuple[int, ...] = ()
    """Of an adaptive softmax: the ranks where its clusters begin. None: an ordinary softmax."""
    optimizer: Literal["adam", "adamw"] = "adamw"
    """Adam adds the weight decay to gradients; AdamW shrinks the weights by it."""
    learning_rate: float = 3e-3
    """At its peak, after the warm-up."""
    schedule: Literal["cosine", "polynomial", "inverse-sqrt", "constant"] = "cosine"
    """After the warm-up: a cosine to zero, a power of the remaining share, sqrt(warmup / step), or no change."""
    power: float = 1.0
    """Of the polynomial schedule."""
    warmup: int = -1
    """Updates of the linear warm-up; -1: a tenth of the steps."""
    beta1: float = 0.9
    """Adam's average of gradients."""
    beta2: float = 0.999
    """Adam's average of their squares."""
    epsilon: float = 1e-8
    """Adam's, in the denominator."""
    weight_decay: float = 0.01
    """A unit of learning rate."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: as it is."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of products; weights and optimizer stay in float32."""
    recompute: bool = False
    """Gradient checkpointing: compute each block a second time in the backward pass instead of keeping what is in it."""
    validation_tokens: int = 32768
    """At most so many tokens of the held-out tail, the last tenth of the text, are scored; 0: all."""
    validate_every: int = 0
    """Updates between validations while training, of which the best gives the weights; 0: only at the end, of the last."""
    patience: int = 0
    """Stop after so many validations in a row without a better one; 0: never."""
    save_every: int = 20
    """Updates between checkpoints; 0: none."""
    logger: Literal["none", "csv", "tensorboard"] = "none"
    """What to write beside metrics.jsonl."""
    workers: int = 0
    """Processes that prepare batches, a device."""
    device: str = "cpu"
    """cpu, cuda, or auto, which takes a GPU if there is one."""
    devices: int = 1
    """Devices of each machine."""
    nodes: int = 1
    """Machines, which share the file system of the run's folder."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """With several devices: copies of the weights, or shares of them."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """The inverse of `as_dict`, also after JSON; what is missing takes its default.

        Raises:
            ValueError: Where there is no such field.

        Example:
            >>> Recipe.from_dict({"steps": 10, "cutoffs": [100, 200]}).cutoffs
            (100, 200)
        """
        for name in values:
            if name not in FIELDS:
                raise ValueError(unknown_field(name, FIELDS))
        plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**plain)

    def check(self) -> None:
        """Raise a ValueError that names the first field whose number cannot be."""
        for name in ("steps", "length", "batch", "accumulate", "layers", "model_dim", "heads", "devices", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        for name in ("learning_rate", "epsilon", "power"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")
        counts = ("vocabulary", "hidden_dim", "validation_tokens", "validate_every", "patience", "save_every", "workers")
        for name in (*counts, "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 0 and less than 1, got {getattr(self, name)}")
        if self.warmup < -1:
            raise ValueError(f"warmup: expected a number of updates, or -1 for a tenth of the steps, got {self.warmup}")
        if self.model_dim % self.heads:
            raise ValueError(f"model_dim: expected a multiple of the {self.heads} heads, got {self.model_dim}")
        parts = self.accumulate * self.devices * self.nodes
        if self.batch % parts:
            raise ValueError(f"batch: expected a multiple of accumulate * devices * nodes = {parts}, got {self.batch}")
        if self.validate_every and not self.save_every:
            raise ValueError("save_every: expected checkpoints, which keep the best weights, got 0; give both or neither")
        if self.patience and not self.validate_every:
            raise ValueError("patience: expected validations to wait for, got validate_every = 0; give both")


FIELDS = tuple(field.name for field in fields(Recipe))


def unknown_field(name: str, names: tuple[str, ...]) -> str:
    """What to say of a field that no recipe has.

    Example:
        >>> unknown_field("stepz", ("seed", "steps"))
        'recipe: no field stepz, did you mean steps? Valid: seed, steps'
    """
    near = difflib.get_close_matches(name, names, 1)
    return f"recipe: no field {name}{f', did you mean {near[0]}?' if near else '.'} Valid: {', '.join(names)}"


def quickstart(scale: str) -> Recipe:
    """A byte-level model of the Python language reference, or of your text: a minute on 2 cores."""
    small = Recipe(device="auto")
    sizes = {
        "tiny": replace(small, steps=50, length=64, layers=1, model_dim=32, heads=2),
        "small": small,
        "paper": replace(small, steps=5000, length=512, batch=32, layers=6, model_dim=512, heads=8, validate_every=500),
    }
    return sizes[scale]


def lrpe_alm(scale: str) -> Recipe:
    """LRPE's autoregressive language model (Table 8, column ALM; section 4): WikiText-103, 50,000 updates of 128 windows.

    The paper's Adam is that of Fairseq, whose weight decay is decoupled: AdamW here. Its dropout is not stated; 0.1 is that
    of Fairseq's transformer_lm. 267,744 tokens are the words of WikiText-103, whatever the table calls them. Their
    logits are 0.5 GB a window: with fewer than 32 devices raise `accumulate`.
    """
    paper = Recipe(
        scheme="lrpe-orthogonal",
        data="hf:Salesforce/wikitext:wikitext-103-v1",
        tokenizer="words",
        steps=50_000,
        length=512,
        batch=128,
        accumulate=1,
        layers=6,
        model_dim=512,
        heads=8,
        hidden_dim=2048,
        dropout=0.1,
        learning_rate=5e-4,
        schedule="inverse-sqrt",
        warmup=4000,
        beta2=0.98,
        clip=0.0,
        validation_tokens=0,
        validate_every=1000,
        save_every=1000,
        device="auto",
    )
    return _scaled(paper, scale)


def permuteformer_lm(scale: str) -> Recipe:
    """PermuteFormer's language model (section 4.2.1): WikiText-103, 6 layers of 512, feed-forward 1024, 8 heads, length 512.

    r in [0.88, 0.99] and ReLU features are the scheme's own, as are wider queries and keys (`width=4`, section 4.1). The
    rest (updates, windows, learning rate, optimizer, dropout), which the paper leaves to Fairseq, is as in `lrpe_alm`.
    """
    paper = replace(lrpe_alm("paper"), scheme="permuteformer:width=4", hidden_dim=1024)
    return _scaled(paper, scale)


def _scaled(paper: Recipe, scale: str) -> Recipe:
    """The same kind of run at sizes for one GPU (small) or two CPU cores and the reference text (tiny)."""
    sizes = {"layers": 4, "model_dim": 256, "hidden_dim": paper.hidden_dim // 2, "heads": 4, "length": 256, "batch": 32}
    small = replace(paper, **sizes, accumulate=4, steps=10_000, warmup=1000, validation_tokens=100_000)
    sizes = {"layers": 2, "model_dim": 64, "hidden_dim": paper.hidden_dim // 8, "heads": 4, "length": 64, "batch": 8}
    tiny = replace(small, **sizes, data="", steps=100, warmup=10, learning_rate=3e-3, validate_every=50, save_every=50)
    return {"tiny": replace(tiny, accumulate=1, validation_tokens=4096), "small": small, "paper": paper}[scale]


RECIPES: dict[str, Callable[[str], Recipe]] = {
    "quickstart": quickstart,
    "lrpe-alm": lrpe_alm,
    "permuteformer-lm": permuteformer_lm,
}
"""Functions of a scale that return complete recipes."""


@dataclass(frozen=True)
class Comparison:
    """Train the same language model with several positional encodings, side by side, and show which to use.

    Ends with a table sorted by validation bits per byte, and writes runs/NAME/: a folder a run and report.html.
    """

    data: str = ""
    """Your text: a file, an archive, hf:NAME:CONFIG, or a folder that is read recursively in sorted order. UTF-8 or any
    bytes; the last tenth is held out, where names of files make no splits. By default the language reference of Python."""
    schemes: str = DEFAULT_SCHEMES
    """Names from `isopos list`, each with options of its own: rope,rope:decay=retnet,denominator=plain,lrpe-unitary."""
    attention: Literal["linear", "softmax"] = "linear"
    """Of every scheme that does not choose its own with attention=..."""
    steps: int = Recipe.steps
    """Updates a run."""
    seeds: int = 1
    """Repeat with seeds 0, 1, ... and report means, and differences with their spread."""
    name: str = ""
    """Folder under runs/; by default compare- and the time."""
    overwrite: bool = False
    """Replace runs/NAME if it exists."""
    length: int = Recipe.length
    """Tokens of a training window; evaluated at 2 and 4 times as many, too."""
    batch: int = Recipe.batch
    """Windows of an update."""
    layers: int = Recipe.layers
    """Blocks of the decoder."""
    model_dim: int = Recipe.model_dim
    """Width of the decoder."""
    heads: int = Recipe.heads
    """Heads of its attention."""
    learning_rate: float = Recipe.learning_rate
    """Peak learning rate."""
    device: Annotated[str, tyro.conf.arg(metavar="cpu|cuda|auto")] = "auto"
    """Where to train; auto takes a GPU if there is one."""

    def recipes(self) -> list[Recipe]:
        """One recipe a scheme and seed; schemes of one seed differ in nothing but the scheme."""
        shared = {
            f: getattr(self, f)
            for f in ("data", "steps", "length", "batch", "layers", "model_dim", "heads", "learning_rate")
        }
        base = replace(Recipe(device=self.device, save_every=0), **shared)
        specs = [self._with_attention(spec) for spec in parse_schemes(self.schemes)]
        for spec in specs:
            if specs.count(spec) > 1:
                raise ValueError(f"schemes: expected different ones, got {spec!r} twice")
        return [replace(base, scheme=spec, seed=seed) for seed in range(self.seeds) for spec in specs]

    def _with_attention(self, spec: str) -> str:
        name, options = split_spec(spec)
        if self.attention != "linear":
            options.setdefault("attention", self.attention)
        return join_spec(name, options)


@dataclass(frozen=True)
class TableRun:
    """Run the cells of a paper's table that are missing, and print the paper's figures beside ours.

    Everything is kept in runs/tables/NAME-SCALE: the same command goes on with it, and machines that share the folder divide
    the cells. Ends with table.md and curves.svg there.
    """

    table: Annotated[str, tyro.conf.Positional]
    """lrpe-2, lrpe-5, lrpe-6, permuteformer-4, or lengths, which is no paper's."""
    scale: Literal["tiny", "small", "paper"] = "small"
    """Sizes: tiny proves that it runs, small takes at most 90 seconds a cell on 2 cores, paper is what the paper did."""
    seeds: int = 1
    """Repeat with seeds 0, 1, ... and report means with standard deviations."""
    rows: str = ""
    """Names or schemes of rows, with commas; by default all."""
    data: tuple[str, ...] = ()
    """Text instead of the paper's, PATH or CORPUS=PATH; only corpora that are named are run."""
    name: str = ""
    """Ending of the folder's name, for a variant that is to be kept apart."""
    device: Annotated[str, tyro.conf.arg(metavar="cpu|cuda|auto")] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List the cells that are missing, and do nothing."""


def parse_schemes(text: str) -> list[str]:
    """The schemes of a comma list. A piece with "=" and no ":" is another option of the scheme before it.

    Example:
        >>> parse_schemes("none,rope:decay=retnet,denominator=plain,retnet")
        ['none', 'rope:decay=retnet,denominator=plain', 'retnet']
    """
    specs: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            continue
        if "=" in piece and ":" not in piece and specs:
            specs[-1] += ("," if ":" in specs[-1] else ":") + piece
        else:
            specs.append(piece)
    if not specs:
        raise ValueError("schemes: expected at least one name, got none; isopos list shows them")
    return specs


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of a scheme.

    Example:
        >>> split_spec("rope:decay=retnet,base=500000")
        ('rope', {'decay': 'retnet', 'base': '500000'})
    """
    name, _, rest = spec.partition(":")
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
