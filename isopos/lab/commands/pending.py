"""Options of train, eval and generate, and how the commands run whose files do not yet hold options and `run`."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.lab.recipes import FIELDS, RECIPES, SCALES, Comparison, Recipe, TableRun, unknown_field

__all__ = ["HOOKS", "Evaluation", "Generate", "Train", "training"]


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


def training(arguments: list[str]) -> Train:
    """`train` with the defaults of the recipe and scale that the arguments name."""
    for name in (word[2:].partition("=")[0] for word in arguments if word.startswith("--")):
        if name.removeprefix("no-").replace("-", "_") not in (*FIELDS, "scale", "name", "resume", "overwrite", "help"):
            raise ValueError(unknown_field(name, FIELDS))
    words = " ".join(arguments).replace("=", " ").split()
    recipe = next((word for word in words if word in RECIPES), Train.recipe)
    scale = next((b for a, b in itertools.pairwise(words) if a == "--scale" and b in SCALES), Train.scale)
    return Train(recipe, scale, change=RECIPES[recipe](scale))  # pyright: ignore[reportArgumentType]


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


def _generate(command: Generate, console: Console) -> int:
    from isopos.lab.commands.generate import generate

    choice = {"temperature": command.temperature, "top_p": command.top_p}
    pieces = generate(command.run, command.prompt, command.tokens, command.seed, **choice)
    print(command.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _compare(comparison: Comparison, console: Console) -> int:
    from isopos.lab.commands.compare import compare

    return compare(comparison, console)


def _table(command: TableRun, console: Console) -> int:
    from isopos.lab.tables.loader import load_table

    load_table(command.table)  # before torch is imported
    from isopos.lab.commands.table import reproduce

    return reproduce(command, sys.argv[1:], console)


def _train(command: Train, console: Console) -> int:
    from isopos.lab.commands.train import launch

    name = command.name or command.recipe
    return launch(name, command.change, console, resume=command.resume, overwrite=command.overwrite)


def _evaluate(command: Evaluation, console: Console) -> int:
    from isopos.lab.commands.eval import evaluate_run

    choice = {"split": command.split, "scored": command.scored}
    return evaluate_run(command.run, command.length, command.tokens, console, **choice)


HOOKS: dict[type, Callable[[Any, Console], int]] = {
    Comparison: _compare,
    TableRun: _table,
    Train: _train,
    Evaluation: _evaluate,
    Generate: _generate,
}
