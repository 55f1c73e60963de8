"""`isopos train`: train or resume one run, and print its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.lab.commands import parse_known
from isopos.lab.recipes import RECIPES, SCALES, Recipe, preset, recipe_function
from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.lab.runs.folders import check_same_recipe, check_vacant, read_recipe, run_folder
from isopos.lab.runs.locks import check_free


def _recipes() -> str:
    """The first line of each recipe's docstring."""
    return " ".join(f"{name}: {(recipe_function(name).__doc__ or name).splitlines()[0]}" for name in RECIPES)


@dataclass(frozen=True)
class Options:
    """Train a run in runs/NAME from a recipe, whose fields are the options below.

    Ctrl-C and SIGTERM write a checkpoint; --resume continues from the last one: with the same options, or, without a recipe
    and a scale, with those of the run.
    """

    recipe: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(help=f"{_recipes()} Or MODULE:NAME of a task of your own.")
    ] = "quickstart"
    scale: Literal["tiny", "small", "paper"] = "small"  # Size of model and data: tiny takes seconds; paper is the paper's.
    name: str = ""  # Name of the folder below runs/; by default the recipe's name.
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Continue the run in the folder.
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Replace the run in the folder.
    change: tyro.conf.OmitArgPrefixes[Recipe] = field(default_factory=Recipe)  # Fields of the recipe.
    named: tyro.conf.Suppress[str] = recipe  # Recipe that determined these options.


@dataclass(frozen=True)
class _Chosen:
    scale: str = ""
    name: str = ""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


def default(arguments: Sequence[str]) -> Options:
    """Default options of the recipe and the scale that a command line names, or of the run that it resumes without them."""
    chosen = parse_known(_Chosen, arguments)
    named = len(arguments) > 1 and not arguments[1].startswith("-")
    recipe = arguments[1] if named else Options.recipe
    scale: Any = chosen.scale if chosen.scale in SCALES else Options.scale
    if chosen.scale and recipe not in RECIPES:
        raise ValueError(f"scale: expected none for a task, which has one recipe, got one for {recipe}")
    if chosen.resume and not named and not chosen.scale:
        change = read_recipe(run_folder(chosen.name or recipe))
    else:
        change = preset(recipe, scale)
    change.check_names(Options.__dataclass_fields__)
    return Options(recipe, scale, change=change, named=recipe)


def run(options: Options, console: Console) -> int:
    """Train and return the exit status: 0, or 1 if training diverged."""
    from isopos.lab.runs.checkpoints import newest
    from isopos.lab.training import run as training

    first, resume, overwrite = training.is_first_process(), options.resume, options.overwrite
    console.quiet = not first
    if options.recipe != options.named:
        raise ValueError(f"recipe: expected it first, isopos train {options.recipe} --..., got it after other options")
    if resume and overwrite:
        raise ValueError("resume: expected either --resume or --overwrite, got both")
    folder = run_folder(options.name or options.recipe.replace(":", "+"))
    recipe, warnings = training.check_recipe(options.change)
    if first:
        check_free(folder)
    if resume:
        check_same_recipe(folder, recipe.with_inferred(read_recipe(folder)))
    elif first:
        check_vacant(folder, overwrite=overwrite)
        start = recipe.task.origin(recipe)
        if start is not None and start.resolve() == folder.resolve():
            raise ValueError(f"start: expected another run than {folder}, which is replaced; choose another --name")
    saved = resume and (folder / "data.json").exists()
    data = recipe.task.load(recipe, console, run=folder if saved else None)
    recipe = data.infer(recipe)
    training.check_memory(recipe)
    grids.say(console, f"data: {data.name}, {data.summary}")
    grids.warn(console, *warnings)
    task = recipe.task
    with Bars(console) as bars:
        last = newest(folder) if resume else None
        done = last.step if last else 0
        show = bars.add(recipe.scheme, recipe.training.steps, task.loss_unit, f"{task.unit}/s", done=done)
        result = training.train(recipe, data, folder, show, resume=resume, overwrite=overwrite)
    if result is None:
        return 0
    scores = ", ".join(f"{metric.title} {metric.text(result.scores[metric.title])}" for metric in task.metrics)
    grids.say(console, f"{result.status}: {scores}; {folder}")
    return 0 if result.status == "finished" else 1
