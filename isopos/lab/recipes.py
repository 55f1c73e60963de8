"""Recipes: a run and a comparison of runs as complete, frozen values. No torch here, so that `isopos --help` is instant."""

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import tyro

__all__ = ["Comparison", "Recipe", "parse_schemes"]

DEFAULT_SCHEMES = "none,sinusoidal,rope,lrpe-unitary,lrpe-orthogonal,permuteformer,retnet"


@dataclass(frozen=True)
class Recipe:
    """One run: a byte-level language model trained with one scheme. Saved as recipe.json beside its weights."""

    scheme: str = "rope"
    """Name, then options: rope:decay=retnet,denominator=plain."""
    data: str = ""
    """A file or a folder; empty: the Python language reference."""
    seed: int = 0
    """Of the initial weights and the batches."""
    steps: int = 250
    """Updates."""
    length: int = 256
    """Tokens of a training window."""
    batch: int = 8
    """Windows of an update."""
    layers: int = 3
    """Blocks of the decoder."""
    model_dim: int = 96
    """Width of the decoder."""
    heads: int = 4
    """Heads of its attention."""
    learning_rate: float = 3e-3
    """Of AdamW, at its peak after a warm-up of a tenth of the steps; then a cosine to zero."""
    validation_bytes: int = 32768
    """At most so much of the held-out tail, the last tenth of the text, is scored."""
    device: str = "cpu"
    """Of the training."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Train the same language model with several positional encodings, side by side, and show which to use.

    Ends with a table sorted by validation bits per byte, and writes runs/NAME/: a folder a run and report.html.
    """

    data: str = ""
    """Your text: a file, or a folder that is read recursively in sorted order. UTF-8 or any bytes; the last tenth is
    held out. By default the Python language reference that ships with Python."""
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
        base = replace(Recipe(device=self.device), **shared)
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
