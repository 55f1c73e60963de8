"""`isopos compare`: check everything, train run by run, time the schemes interleaved, show a table and write a report."""

import itertools
import shutil
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from isopos.lab import tasks
from isopos.lab.recipes import Model, Recipe, Training, join_spec, parse_schemes, split_spec
from isopos.lab.reports.comparison import ranking
from isopos.lab.reports.progress import Bars
from isopos.lab.runs.files import write_json
from isopos.lab.runs.folders import run_place
from isopos.lab.tables.loader import cell_name
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.task import Data, Task, expect

__all__ = ["Options", "default", "run"]

ROUNDS = 9


@dataclass(frozen=True)
class Options:
    """Train the same model with several positional encodings, side by side, and show which to use.

    Ends with a table, the best scheme on top, and writes runs/NAME/: a folder a run and report.html. What follows the first
    options are fields of all runs.
    """

    task: Annotated[
        str, tyro.conf.arg(help=f"What the model learns: {', '.join(tasks.TASKS)}, or MODULE:NAME of a task of your own.")
    ] = "language"
    schemes: str = Language.schemes
    """Names from `isopos list`, each with options of its own: rope,rope:decay=retnet,denominator=plain,lrpe-unitary."""
    attention: Literal["linear", "softmax"] = "linear"  # Of every scheme that does not choose its own with attention=...
    seeds: int = 1  # Repeat with seeds 0, 1, ... and report means, and differences with their spread.
    name: str = ""  # Folder under runs/; by default compare- and the time.
    overwrite: bool = False  # Replace runs/NAME if it exists.
    settings: tyro.conf.OmitArgPrefixes[Task] = field(default_factory=Language)
    model: tyro.conf.OmitArgPrefixes[Model] = field(default_factory=Model)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=lambda: Training(device="auto", save_every=0))

    def recipes(self) -> list[Recipe]:
        """One recipe a scheme and seed; schemes of one seed differ in nothing but the scheme."""
        base = Recipe(training=self.training, model=self.model, task=self.settings)
        specs = []
        for name, options in map(split_spec, parse_schemes(self.schemes)):
            if self.attention != "linear":
                options.setdefault("attention", self.attention)
            spec = join_spec(name, options)
            if spec in specs:
                raise ValueError(f"schemes: expected different ones, got {spec!r} twice")
            specs.append(spec)
        return [replace(base, scheme=spec, seed=seed) for seed in range(self.seeds) for spec in specs]


def default(arguments: Sequence[str]) -> Options:
    """What the options are where no others are given: those of the task that the arguments name."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--task=") else [word])]
    name = next((after for word, after in itertools.pairwise(words) if word == "--task"), "language")
    task = tasks.find(name)()
    recipe = Recipe(training=Training(device="auto", save_every=0), task=task).edit(**task.edits)
    recipe.check_names(Options.__dataclass_fields__)
    return Options(name, task.schemes, settings=recipe.task, model=recipe.model, training=recipe.training)


def run(options: Options, console: Console) -> int:
    """Run a comparison and return the exit status: 0, or 130 after Ctrl-C (143: SIGTERM): a report has what is finished."""
    import torch

    from isopos.lab.reports import page

    recipes, folder, warnings = _check(options)
    data = options.settings.load(recipes[0], console)
    recipes = [data.settle(recipe) for recipe in recipes]
    console.print(f"data: {data.name}, {data.summary}, sha256 {data.sha256[:12]}", markup=False, soft_wrap=True)
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    about = {
        "task": tasks.spec(options.settings),
        "data": data.name,
        "sha256": data.sha256,
        "summary": data.summary,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": recipes[0].training.device,
        "planned": [cell_name("", recipe.scheme, recipe.seed) for recipe in recipes],
    }
    complete, status = False, 0
    before = _make(folder, options.overwrite)
    try:
        write_json(folder / "comparison.json", about | {"complete": False})
        _train_all(recipes, data, folder, console)
        console.print("timing training steps, scheme by scheme in turns")
        about["speed"] = _speeds(recipes, data)
        complete = True
    except KeyboardInterrupt as stop:
        status = getattr(stop, "code", 130)
        console.print("[yellow]interrupted: the report holds what is finished")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would leave no report
        write_json(folder / "comparison.json", about | {"complete": complete})
        report = page.write(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    found = ranking(folder)
    if before is not None and not found.rows:
        shutil.rmtree(folder)
        before.rename(folder)
        console.print(f"no run was finished: {folder} is what it was", markup=False)
        return status
    if before is not None:
        shutil.rmtree(before)
    console.print(*found.render(console.width))
    console.print(f"report: {report}", markup=False)
    return status


def _check(options: Options) -> tuple[list[Recipe], Path, list[str]]:
    """Recipes that build, a folder that can be made, and what a reader of the results should know before."""
    from isopos.lab.training.run import check_recipe, usable_device

    expect("seeds", options.seeds, "a positive number", options.seeds >= 1)
    for name in ("devices", "nodes"):
        count = getattr(options.training, name)
        expect(name, count, "1, on which runs compare side by side (isopos train takes several)", count == 1)
    device, warnings = usable_device(options.training.device), []
    recipes = [recipe.edit(device=device) for recipe in options.recipes()]
    for recipe in recipes[: len(recipes) // options.seeds]:
        warnings += check_recipe(recipe)[1]
    folder = run_place(options.name or time.strftime("compare-%Y%m%d-%H%M%S"))
    if folder.exists() and not options.overwrite:
        raise ValueError(f"name: {folder} exists; choose another with --name, or replace it with --overwrite")
    if folder.exists() and not (folder / "comparison.json").exists():
        raise ValueError(f"overwrite: {folder} holds no comparison; remove it yourself or choose another --name")
    return recipes, folder, warnings


def _make(folder: Path, overwrite: bool) -> Path | None:
    """Make the folder; one that it replaces is set aside until a run is finished, and its place returned."""
    before = folder.with_name(f".{folder.name}.replaced") if overwrite and folder.exists() else None
    try:
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        folder.mkdir(parents=True)
        return before
    except OSError as error:
        raise ValueError(f"name: cannot write {folder}: {error.strerror}") from None


def _train_all(recipes: list[Recipe], data: Data, folder: Path, console: Console) -> None:
    from isopos.lab.training.run import train

    task = recipes[0].task
    with Bars(console) as bars:
        for recipe in recipes:
            title = recipe.scheme + (f" seed {recipe.seed}" if recipes[-1].seed else "")
            show = bars.add(title, recipe.training.steps, task.loss_unit, f"{task.unit}/s")
            result = train(recipe, data, folder / cell_name("", recipe.scheme, recipe.seed), show)
            if result is not None and result.status != "finished":
                bars.progress.console.print(f"[red]{title}: {result.status}")


def _speeds(recipes: list[Recipe], data: Data) -> dict[str, float]:
    """Training speed of each scheme relative to `none` with the same attention: medians of interleaved rounds."""
    from isopos.lab.tasks.build import build_scheme
    from isopos.lab.training.run import step_times

    first = [recipe for recipe in recipes if recipe.seed == recipes[0].seed]
    bases = {
        recipe.scheme: "none" + ":attention=softmax" * (build_scheme(recipe).attention == "softmax") for recipe in first
    }
    schemes = {scheme: scheme for scheme in (*bases, *bases.values())}
    rounds = list(step_times(first[0], data, schemes, ROUNDS))
    return {spec: statistics.median(seconds[base] / seconds[spec] for seconds in rounds) for spec, base in bases.items()}
