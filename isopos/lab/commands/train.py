"""`isopos train`: check everything, train or go on with one run, and say what it came to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from rich.console import Console

from isopos.catalog import expect
from isopos.lab.recipes import RECIPES, SCALES, Recipe, preset, recipe_function
from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.spec import arguments_of

__all__ = ["Options", "default", "run"]


def _recipes() -> str:
    """What each recipe is, by the first line that its function says of itself."""
    return " ".join(f"{name}: {(recipe_function(name).__doc__ or name).splitlines()[0]}" for name in RECIPES)


@dataclass(frozen=True)
class Options:
    """Train the run of a recipe in runs/NAME; what follows here are its fields, which may be changed.

    A new run takes a name of its own. Ctrl-C and SIGTERM leave a checkpoint, and --resume goes on from the last one.
    """

    recipe: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(help=f"{_recipes()} Or MODULE:NAME of a task of your own.")
    ] = "quickstart"
    scale: Literal["tiny", "small", "paper"] = "small"  # Sizes: tiny takes seconds; paper is what the paper says.
    name: str = ""  # Folder under runs/; by default the recipe's name.
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Go on with the run that is there.
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Replace the run that is there.
    change: tyro.conf.OmitArgPrefixes[Recipe] = field(default_factory=Recipe)  # Fields of the recipe.
    named: tyro.conf.Suppress[str] = recipe  # The recipe whose fields these are.


def default(arguments: Sequence[str]) -> Options:
    """What the options are where no others are given: the recipe and scale that the arguments name."""
    given = arguments_of(arguments)
    recipe = arguments[1] if len(arguments) > 1 and not arguments[1].startswith("-") else Options.recipe
    scale = given["scale"] if given.get("scale") in SCALES else Options.scale
    if "scale" in given and recipe not in RECIPES:
        raise ValueError(f"scale: expected none beside a task, which has one recipe of its own, got one for {recipe}")
    change, own = preset(recipe, scale), Options.__dataclass_fields__
    change.check_names(own)
    for name in given:
        expect("field of a recipe", name.removeprefix("no_"), (*change.names, *own, "help"))
    return Options(recipe, scale, change=change, named=recipe)  # pyright: ignore[reportArgumentType]


def run(options: Options, console: Console) -> int:
    """Train, and return the exit status: 0, or 1 where it diverged."""
    from isopos.lab.runs.folders import check_vacant, recipe_of, run_place, same_recipe
    from isopos.lab.runs.locks import check_free
    from isopos.lab.training import run as training
    from isopos.lab.training.memory import check_memory

    first, resume, overwrite = training.is_first_process(), options.resume, options.overwrite
    console.quiet = not first
    if options.recipe != options.named:
        raise ValueError(f"recipe: expected it first, isopos train {options.recipe} --..., got it after other options")
    if resume and overwrite:
        raise ValueError("resume: expected either --resume or --overwrite, got both")
    folder = run_place(options.name or options.recipe.replace(":", "+"))
    recipe, warnings = training.check_recipe(options.change)
    if first:
        check_free(folder)
    if resume:
        same_recipe(folder, recipe.settled_as(recipe_of(folder)))
    elif first:
        check_vacant(folder, overwrite=overwrite)
    data = recipe.task.load(recipe, console)
    recipe = data.settle(recipe)
    check_memory(recipe)
    grids.say(console, f"data: {data.name}, {data.summary}")
    grids.warn(console, *warnings)
    task = recipe.task
    with Bars(console) as bars:
        show = bars.add(recipe.scheme, recipe.training.steps, task.loss_unit, f"{task.unit}/s")
        result = training.train(recipe, data, folder, show, resume=resume, overwrite=overwrite)
    if result is None:
        return 0
    scores = ", ".join(f"{metric.title} {metric.text(result.scores[metric.title])}" for metric in task.metrics)
    grids.say(console, f"{result.status}: {scores}; {folder}")
    return 0 if result.status == "finished" else 1
