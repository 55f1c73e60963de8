"""The command line: thin, and without torch until there is work to do."""

import itertools
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from isopos.lab.recipes import FIELDS, RECIPES, SCALES, Comparison, Recipe, TableRun, unknown_field

__all__ = ["main"]


@dataclass(frozen=True)
class List:
    """Print the schemes, one line and citation each."""


@dataclass(frozen=True)
class Check:
    """Measure the laws of a scheme, or of your own encoding. Exits with 1 where one is broken, naming it with an example."""

    subject: Annotated[str, tyro.conf.Positional]
    """A scheme with options (rope:decay=retnet), or MODULE:NAME of an encoding, or of what makes one without arguments."""
    head_dim: int = 16
    """Head size of a scheme."""
    heads: int = 4
    """Heads of a scheme."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Of the queries and keys whose precision is measured."""


@dataclass(frozen=True)
class Show:
    """Draw a scheme's relative kernel: a curve for lines and rings, a map for grids, a matrix for trees."""

    scheme: Annotated[str, tyro.conf.Positional]
    """A scheme with options: rope:decay=retnet."""
    out: str = ""
    """A file that ends with .png, .svg or .pdf; by default SCHEME.png in this folder."""
    overwrite: bool = False
    """Replace the file if it exists."""
    head_dim: int = 64
    """Head size."""
    heads: int = 8
    """Heads."""
    reach: int = 64
    """Steps of a line to either side."""


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the model of a run, and print the text as it comes."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of one run: runs/NAME/rope-seed0."""
    prompt: str = "The "
    """Text to continue."""
    tokens: int = 400
    """How many to generate: bytes, words or pieces, as the run was trained."""
    temperature: float = 1.0
    """Below 1 sharpens the model's distribution, above 1 flattens it; 0 takes the most probable token."""
    top_p: float = 1.0
    """Draw among the most probable tokens that have this probability together."""
    seed: int = 0
    """Of the draws."""


@dataclass(frozen=True)
class Train:
    """Train the run of a recipe in runs/NAME; what follows here are its fields, which may be changed.

    A new run takes a name of its own. Ctrl-C and SIGTERM leave a checkpoint, and --resume goes on from the last one.
    """

    recipe: Annotated[Literal["quickstart", "lrpe-alm", "permuteformer-lm"], tyro.conf.Positional] = "quickstart"
    """quickstart: bytes of the Python language reference or of your text; lrpe-alm: LRPE's Table 8, WikiText-103;
    permuteformer-lm: PermuteFormer's section 4.2.1, WikiText-103."""
    scale: Literal["tiny", "small", "paper"] = "small"
    """Sizes: tiny takes seconds, and the reference text; paper is what the paper says."""
    name: str = ""
    """Folder under runs/; by default the recipe's name."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run that is there."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the run that is there."""
    change: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)
    """Fields of the recipe."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluate the weights of a run, or the last checkpoint of one that has not ended; the figures go to its eval.json."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of one run: runs/NAME."""
    length: tuple[int, ...] = (1, 2, 4)
    """Multiples of the training length."""
    tokens: int = -1
    """At most so many tokens of the held-out text; 0: all; -1: as in training."""
    split: Literal["validation", "test"] = "validation"
    """Which held-out text; there is a test where files or books make one."""
    scored: int = 0
    """Score only so many tokens at the end of each window, of windows that overlap: PermuteFormer's 256 of 512. 0: all."""


@dataclass(frozen=True)
class Runs:
    """List the runs under a folder: recipe, state, loss and validation."""

    folder: Annotated[str, tyro.conf.Positional] = "runs"
    """Where they are."""


@dataclass(frozen=True)
class Bench:
    """Measure on this machine: ours beside others' in turns, as ratios with their spread; memory, construction, accuracy.

    Exactness is the error of every scheme in every setting and dtype, which takes a minute.
    """

    section: Annotated[
        Literal[
            "all",
            "attention",
            "rotary",
            "decode",
            "sublayer",
            "growth",
            "memory",
            "construction",
            "accuracy",
            "exactness",
        ],
        tyro.conf.Positional,
    ] = "all"
    """What to measure; "all" leaves out exactness."""
    allocator: Literal["both", "as-is", "reused"] = "both"
    """State of glibc's allocator: as it is, told to reuse memory, or one after the other."""
    rounds: int = 9
    """Rounds in which works take turns."""
    out: str = ""
    """A folder for bench.json, with every round's seconds, and bench.svg; by default nothing is written."""
    overwrite: bool = False
    """Replace them if they exist."""
    compiled: bool = False
    """Of exactness: compiled, too, which takes minutes."""


DESCRIPTION = "Positional encodings as isometries."

Others = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Evaluation, tyro.conf.subcommand("eval")]
    | Annotated[Runs, tyro.conf.subcommand("runs")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def _commands(arguments: list[str]) -> Any:
    """The commands, where `train` has the defaults of the recipe and scale that the arguments name."""
    training = Train()
    if arguments[0] == "train":
        for name in (word[2:].partition("=")[0] for word in arguments if word.startswith("--")):
            if name.removeprefix("no-").replace("-", "_") not in (*FIELDS, "scale", "name", "resume", "overwrite", "help"):
                raise ValueError(unknown_field(name, FIELDS))
        words = " ".join(arguments).replace("=", " ").split()
        recipe = next((word for word in words if word in RECIPES), Train.recipe)
        scale = next((b for a, b in itertools.pairwise(words) if a == "--scale" and b in SCALES), Train.scale)
        training = Train(recipe, scale, change=RECIPES[recipe](scale))  # pyright: ignore[reportArgumentType]
    train = Annotated[Train, tyro.conf.subcommand("train", default=training)]
    table = Annotated[TableRun, tyro.conf.subcommand("table")]
    return Annotated[Comparison, tyro.conf.subcommand("compare")] | table | train | Others


def main() -> None:
    """Run a command; exit with 0, with 2 after one line about what was wrong, or with 130 after Ctrl-C (143: SIGTERM)."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        command = tyro.cli(_commands(arguments), prog="isopos", args=arguments, description=DESCRIPTION)
        match command:
            case Comparison():
                sys.exit(_compare(command))
            case TableRun():
                sys.exit(_table(command, arguments))
            case Train():
                sys.exit(_train(command))
            case Evaluation():
                sys.exit(_evaluate(command))
            case Runs():
                sys.exit(_runs(command))
            case Check():
                sys.exit(_check(command))
            case List():
                sys.exit(_list())
            case Show():
                sys.exit(_show(command))
            case Generate():
                sys.exit(_generate(command))
            case Bench():
                sys.exit(_bench(command))
    except (ValueError, OSError) as error:
        print(f"isopos: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(*(f"isopos: {reason}" for reason in stop.args), sep="", end="\n" * len(stop.args), file=sys.stderr)
        sys.exit(getattr(stop, "code", 130))


def _list() -> int:
    import shutil

    from isopos.catalog import CATALOG

    width = max(map(len, CATALOG))
    summary, citation = (max(map(len, texts)) for texts in zip(*(entry[:2] for entry in CATALOG.values()), strict=True))
    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= width + summary + citation + 4
    for name, entry in CATALOG.items():
        gap = " " * (summary - len(entry.summary) + 2) if wide else "\n" + " " * (width + 2)
        print(f"{name:<{width}}  {entry.summary}{gap}{entry.citation}")
    return 0


def _generate(command: Generate) -> int:
    from isopos.lab.commands.generate import generate

    choice = {"temperature": command.temperature, "top_p": command.top_p}
    pieces = generate(command.run, command.prompt, command.tokens, command.seed, **choice)
    print(command.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _compare(comparison: Comparison) -> int:
    from isopos.lab.commands.compare import compare

    return compare(comparison, _console())


def _table(command: TableRun, arguments: list[str]) -> int:
    from isopos.lab.tables.loader import load_table

    load_table(command.table)  # before torch is imported
    from isopos.lab.commands.table import reproduce

    return reproduce(command, arguments, _console())


def _train(command: Train) -> int:
    from isopos.lab.commands.train import launch

    name = command.name or command.recipe
    return launch(name, command.change, _console(), resume=command.resume, overwrite=command.overwrite)


def _evaluate(command: Evaluation) -> int:
    from isopos.lab.commands.eval import evaluate_run

    choice = {"split": command.split, "scored": command.scored}
    return evaluate_run(command.run, command.length, command.tokens, _console(), **choice)


def _runs(command: Runs) -> int:
    from isopos.lab.commands.eval import list_runs

    return list_runs(command.folder, _console())


def _check(check: Check) -> int:
    import importlib

    import torch

    from isopos import laws
    from isopos.catalog import CATALOG
    from isopos.encodings import Encoding
    from isopos.lab.recipes import split_spec
    from isopos.schemes import build, closest

    name, _, attribute = check.subject.partition(":")
    if name in CATALOG or not attribute or "=" in attribute:
        scheme, options = split_spec(check.subject)
        subject = build(scheme, check.head_dim, check.heads, options)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(name)
        except Exception as error:  # whatever the user's module does
            raise ValueError(f"subject: cannot import {name}: {type(error).__name__}: {error}") from None
        own = {name: None for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Encoding)}
        if not hasattr(module, attribute):
            raise ValueError(f"subject: {name} has no {attribute!r}: {closest(attribute, own or {'nothing': None})}")
        subject = _made(check.subject, getattr(module, attribute))
    try:
        report = laws.check(subject, dtype=getattr(torch, check.dtype))
    except (TypeError, AttributeError, RuntimeError, NotImplementedError, LookupError) as error:  # of the user's encoding
        raise ValueError(
            f"subject: expected forward(x, dtype) to return an isometry, got {type(error).__name__}: {error}"
        ) from None
    print(replace(report, subject=check.subject))
    return 0 if report.holds else 1


def _made(name: str, subject: Any) -> Any:
    """An encoding or scheme as it is, or what its class or factory makes."""
    from isopos.encodings import Encoding
    from isopos.schemes import Scheme

    try:
        made = subject() if callable(subject) and not isinstance(subject, (Encoding, Scheme)) else subject
    except TypeError as error:
        raise ValueError(f"subject: expected {name} to need no arguments, got: {error}") from None
    if not isinstance(made, (Encoding, Scheme)):
        raise ValueError(f"subject: expected {name} to make an Encoding or a Scheme, got {type(made).__name__}")
    return made


def _show(show: Show) -> int:
    from isopos.lab.reports import plots

    size = {"head_dim": show.head_dim, "heads": show.heads, "reach": show.reach}
    print(plots.show(show.scheme, show.out, overwrite=show.overwrite, **size))
    return 0


def _bench(command: Bench) -> int:
    from isopos.lab.commands.bench import bench

    if command.compiled and command.section != "exactness":
        raise ValueError(f"compiled: expected the section exactness, got {command.section}")
    options = {name: getattr(command, name) for name in ("allocator", "rounds", "out", "overwrite", "compiled")}
    return bench(_console(), command.section, **options)


def _console():
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 150)
