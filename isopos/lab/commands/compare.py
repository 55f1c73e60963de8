"""`isopos compare`: check everything, train run by run, time the schemes interleaved, show a table and write a report."""

import functools
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from isopos.lab import tasks
from isopos.lab.commands import bounded
from isopos.lab.commands.spreading import do_jobs
from isopos.lab.recipes import Model, Recipe, Training
from isopos.lab.reports import grids
from isopos.lab.reports.comparison import FILE, ranking
from isopos.lab.reports.progress import Bars
from isopos.lab.runs import cluster, folders, signals
from isopos.lab.runs.files import printable, write_json
from isopos.lab.runs.folders import RESULT, run_place
from isopos.lab.runs.locks import check_free, holder, locked, try_lock
from isopos.lab.tables.loader import cell_name
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.task import Data, Task, require
from isopos.spec import arguments_of, join_spec, map_spec, parse_schemes, split_spec

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
    """Names from `isopos list`, each with options of its own: rope,rope:decay=retnet,denominator=plain,lrpe-unitary. Joined
    by + they are of layers, in a pattern that repeats: rope*3+none has positions in three layers of four."""
    attention: Literal["linear", "softmax"] = "linear"  # Of every scheme that does not choose its own with attention=...
    seeds: int = 1
    """Repeat with seeds 0, 1, ... and report means, and differences with 95% intervals, for which 3 are the least."""
    name: str = ""  # Folder under runs/; by default compare- and the time.
    overwrite: bool = False  # Replace runs/NAME if it exists.
    ray: Annotated[str, tyro.conf.arg(metavar="HOST:PORT|auto")] = ""
    """Train the runs on the machines of a Ray cluster, which share this folder; auto: the cluster of this machine."""
    settings: tyro.conf.OmitArgPrefixes[Task] = field(default_factory=Language)
    model: tyro.conf.OmitArgPrefixes[Model] = field(default_factory=Model)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=lambda: Training(device="auto", save_every=0))

    def recipes(self) -> list[Recipe]:
        """One recipe a scheme and seed; schemes of one seed differ in nothing but the scheme."""
        base = Recipe(training=self.training, model=self.model, task=self.settings)
        specs = []
        for spec in (map_spec(text, self._chosen) for text in parse_schemes(self.schemes)):
            if spec in specs:
                raise ValueError(f"schemes: expected different ones, got {spec!r} twice")
            specs.append(spec)
        return [replace(base, scheme=spec, seed=seed) for seed in range(self.seeds) for spec in specs]

    def _chosen(self, spec: str) -> str:
        """A scheme with the attention that is asked for, unless it chooses its own."""
        name, options = split_spec(spec)
        if self.attention != "linear":
            options.setdefault("attention", self.attention)
        return join_spec(name, options)


def default(arguments: Sequence[str]) -> Options:
    """What the options are where no others are given: those of the task that the arguments name."""
    name = arguments_of(arguments).get("task") or "language"
    task = tasks.find(name)()
    recipe = Recipe(training=Training(device="auto", save_every=0), task=task).edit(**task.edits)
    recipe.check_names(Options.__dataclass_fields__)
    return Options(name, task.schemes, settings=recipe.task, model=recipe.model, training=recipe.training)


def run(options: Options, console: Console) -> int:
    """Run a comparison and return the exit status: 0, or 130 after Ctrl-C (143: SIGTERM): a report has what is finished."""
    import torch

    from isopos.lab.training.memory import check_memory

    recipes, folder, warnings = _check(options)
    source = recipes[0]
    data = options.settings.load(source, console)
    recipes = [data.settle(recipe) for recipe in recipes]
    check_memory(recipes[0])
    grids.say(console, f"data: {data.name}, {data.summary}, sha256 {data.sha256[:12]}")
    grids.warn(console, *warnings)
    about = {
        "task": tasks.spec(options.settings),
        "data": data.name,
        "sha256": data.sha256,
        "summary": data.summary,
        "chance": data.chance(recipes[0]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": recipes[0].training.device,
        "planned": [cell_name("", recipe.scheme, recipe.seed) for recipe in recipes],
        "complete": False,
    }
    train = _train_all
    if options.ray:
        train = functools.partial(_spread, source, options.ray)
    with locked(folder):
        return _compare(recipes, data, folder, about, console, train)


def _compare(
    recipes: list[Recipe], data: Data, folder: Path, about: dict[str, Any], console: Console, train: Callable[..., None]
) -> int:
    status = 0
    folders.begin(folder, FILE, about)
    try:
        train(recipes, data, folder, console)
        console.print("timing training steps, scheme by scheme in turns")
        about |= {"speed": _speeds(recipes, data), "complete": True}
    except KeyboardInterrupt as stop:
        status = signals.status(stop)
        console.print("[yellow]interrupted: the report holds what is finished")
    finally:
        with signals.waiting():  # another Ctrl-C would leave no report
            write_json(folder / FILE, about)
            _finish(folder, console, complete=about["complete"])
    return status


def _finish(folder: Path, console: Console, *, complete: bool) -> None:
    """Show the report; where no run has ended, the folder that was replaced takes its place again."""
    from isopos.lab.commands import report

    before = folders.aside(folder)
    if not ranking(folder).rows and folders.put_back(folder):
        grids.say(console, f"no run was finished: {folder} is what it was")
        return
    report.show(folder, console)
    if complete:
        folders.remove(before)
    elif before.exists():
        grids.say(console, f"until a comparison is complete, {before} keeps what {folder} was")


def _check(options: Options) -> tuple[list[Recipe], Path, list[str]]:
    """Recipes that build, a folder that can be made, and what a reader of the results should know before."""
    import torch

    from isopos.lab.training.run import check_recipe, usable_device

    require("seeds", options.seeds, "a positive number", options.seeds >= 1)
    bounded(options, seeds=10_000)
    for name in ("devices", "nodes"):
        count = getattr(options.training, name)
        require(name, count, "1, on which runs compare side by side (isopos train takes several)", count == 1)
    device, warnings = usable_device(options.training.device), []
    recipes = [recipe.edit(device=device) for recipe in options.recipes()]
    for recipe in recipes[: len(recipes) // options.seeds]:
        warnings += check_recipe(recipe)[1]
    if options.ray:
        cluster.check_cluster(options.ray, device, torch.get_num_threads())
    folder = run_place(options.name or time.strftime("compare-%Y%m%d-%H%M%S"))
    check_free(folder)
    if not folder.exists():
        folders.put_back(folder)  # a kill came while it was replaced
    if folder.exists() and not options.overwrite:
        raise ValueError(f"name: {folder} exists; choose another with --name, or replace it with --overwrite")
    if folder.exists() and not (folder / FILE).exists():
        raise ValueError(f"overwrite: {folder} holds no comparison; remove it yourself or choose another --name")
    return recipes, folder, warnings


def _train_all(recipes: list[Recipe], data: Data, folder: Path, console: Console) -> None:
    from isopos.lab.training.run import train

    task = recipes[0].task
    with Bars(console) as bars:
        for recipe in recipes:
            signals.heed()
            title = recipe.scheme + (f" seed {recipe.seed}" if recipes[-1].seed else "")
            show = bars.add(title, recipe.training.steps, task.loss_unit, f"{task.unit}/s")
            result = train(recipe, data, folder / cell_name("", recipe.scheme, recipe.seed), show)
            if result is not None and result.status != "finished":
                bars.progress.console.print(Text(printable(f"{title}: {result.status}"), "red"))


def _spread(source: Recipe, address: str, recipes: list[Recipe], data: Data, folder: Path, console: Console) -> None:
    """As `_train_all`, on a cluster, whose processes load the data of the recipe `source`."""
    jobs = []
    for recipe in recipes:
        place = folder / cell_name("", recipe.scheme, recipe.seed)
        arguments = (source, recipe, data.sha256, place)
        jobs.append(cluster.Job(place.name, _remote, arguments, place / RESULT, recipe.training.steps))
    if not do_jobs(jobs, address, recipes[0].training.device, folder / FILE, console):
        raise ValueError(f"ray: expected each run to end, but not all of them could; {folder} has those that did")


def _remote(source: Recipe, recipe: Recipe, sha256: str, folder: Path, seconds: float) -> str:
    """Train a run in a process of a cluster, from the start or its last checkpoint; say what it came to if not finished."""
    from isopos.lab.training.run import train

    data = _loaded(pickle.dumps(source))
    require("data", data.sha256[:12], f"that of sha256 {sha256[:12]}", data.sha256 == sha256)
    with try_lock(folder, seconds) as mine:
        if not mine:
            raise ValueError(f"{folder} is in use by {holder(folder)}")
        result = train(recipe, data, folder, resume=(folder / "recipe.json").exists())
    return "" if result is None or result.status == "finished" else result.status


@functools.lru_cache(maxsize=1)
def _loaded(source: bytes) -> Data:
    """The data of a comparison, for all runs that a process trains."""
    recipe = pickle.loads(source)
    return recipe.task.load(recipe)


def _speeds(recipes: list[Recipe], data: Data) -> dict[str, float]:
    """Training speed of each scheme relative to `none` with the same attention: medians of interleaved rounds."""
    from isopos.lab.tasks.build import build_scheme
    from isopos.lab.training.run import step_times

    first = [recipe for recipe in recipes if recipe.seed == recipes[0].seed]
    bases = {
        recipe.scheme: "none" + ":attention=softmax" * (build_scheme(recipe).attention == "softmax") for recipe in first
    }
    schemes = {scheme: scheme for scheme in (*bases, *bases.values())}
    rounds = []
    for seconds in step_times(first[0], data, schemes, ROUNDS):
        signals.heed()
        rounds.append(seconds)
    return {spec: statistics.median(seconds[base] / seconds[spec] for seconds in rounds) for spec, base in bases.items()}
