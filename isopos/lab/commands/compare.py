"""`isopos compare`: train a model with several schemes, time them in interleaved rounds, and report which is best."""

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
from isopos.lab.commands import bounded, parse_known, report
from isopos.lab.commands.spreading import do_jobs
from isopos.lab.recipes import Model, Recipe, Training
from isopos.lab.reports import grids
from isopos.lab.reports.comparison import FILE, ranking
from isopos.lab.reports.progress import Bars
from isopos.lab.runs import cluster, folders, signals
from isopos.lab.runs.files import printable, write_json
from isopos.lab.runs.folders import RESULT, run_folder
from isopos.lab.runs.locks import check_free, holder, locked, try_lock
from isopos.lab.tables.loader import cell_name
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.task import Data, Task, require
from isopos.spec import join_spec, map_spec, parse_schemes, split_spec

ROUNDS = 9


@dataclass(frozen=True)
class Options:
    """Train the same model with several positional encodings, and rank them.

    Prints a table, best scheme first, and writes runs/NAME/ with a folder per run and report.html. The options after --ray
    are fields of all runs.
    """

    task: Annotated[
        str, tyro.conf.arg(help=f"What the model learns: {', '.join(tasks.TASKS)}, or MODULE:NAME of a task of your own.")
    ] = "language"
    schemes: str = Language.schemes
    """Schemes from `isopos list`, each with options: rope,rope:decay=retnet,denominator=plain,lrpe-unitary. Schemes joined
    by + form a pattern of layers that repeats: rope*3+none has positions in three of four layers."""
    attention: Literal["linear", "softmax"] = "linear"  # Attention of schemes without the option attention=...
    seeds: int = 1
    """Number of seeds: 0, 1, ... With at least 3, differences of means have 95% intervals."""
    name: str = ""  # Name of the folder below runs/; by default compare- and the time.
    overwrite: bool = False  # Replace runs/NAME if it exists.
    ray: Annotated[str, tyro.conf.arg(metavar="HOST:PORT|auto")] = ""
    """Train on the machines of a Ray cluster, which must share this folder; auto: the cluster of this machine."""
    settings: tyro.conf.OmitArgPrefixes[Task] = field(default_factory=Language)
    model: tyro.conf.OmitArgPrefixes[Model] = field(default_factory=Model)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=lambda: Training(device="auto", save_every=0))

    def recipes(self) -> list[Recipe]:
        """One recipe per scheme and seed; recipes of one seed differ in the scheme only."""
        base = Recipe(training=self.training, model=self.model, task=self.settings)
        specs = []
        for spec in (map_spec(text, self._chosen) for text in parse_schemes(self.schemes)):
            if spec in specs:
                raise ValueError(f"schemes: expected each scheme once, got {spec!r} twice")
            specs.append(spec)
        return [replace(base, scheme=spec, seed=seed) for seed in range(self.seeds) for spec in specs]

    def _chosen(self, spec: str) -> str:
        """Add the option attention to a scheme that does not have it."""
        name, options = split_spec(spec)
        if self.attention != "linear":
            options.setdefault("attention", self.attention)
        return join_spec(name, options)


@dataclass(frozen=True)
class _Chosen:
    task: str = "language"


def default(arguments: Sequence[str]) -> Options:
    """Default options of the task that a command line names."""
    name = parse_known(_Chosen, arguments).task
    task = tasks.find(name)()
    recipe = Recipe(training=Training(device="auto", save_every=0), task=task).edit(**task.edits)
    recipe.check_names(Options.__dataclass_fields__)
    return Options(name, task.schemes, settings=recipe.task, model=recipe.model, training=recipe.training)


def run(options: Options, console: Console) -> int:
    """Run a comparison; return 0, or 130 after Ctrl-C (143: SIGTERM), when the report shows the finished runs."""
    import torch

    from isopos.lab.training.run import check_memory

    recipes, folder, warnings = _check(options)
    source = recipes[0]
    data = options.settings.load(source, console)
    recipes = [data.infer(recipe) for recipe in recipes]
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
    folders.start_folder(folder, FILE, about)
    try:
        train(recipes, data, folder, console)
        console.print("timing training steps in interleaved rounds")
        about |= {"speed": _speeds(recipes, data), "complete": True}
    except KeyboardInterrupt as stop:
        status = signals.exit_status(stop)
        console.print("[yellow]interrupted: the report holds what is finished")
    finally:
        with signals.deferred():  # another Ctrl-C would leave no report
            write_json(folder / FILE, about)
            _finish(folder, console, complete=about["complete"])
    return status


def _finish(folder: Path, console: Console, *, complete: bool) -> None:
    """Show the report; if no run has ended, restore the folder that was replaced."""
    before = folders.aside_path(folder)
    if not ranking(folder).rows and folders.restore(folder):
        grids.say(console, f"no run was finished: {folder} is unchanged")
        return
    report.show(folder, console)
    if complete:
        folders.remove_folder(before)
    elif before.exists():
        grids.say(console, f"until a comparison is complete, {before} holds the earlier {folder}")


def _check(options: Options) -> tuple[list[Recipe], Path, list[str]]:
    """Check all options; return recipes, folder and warnings."""
    import torch

    from isopos.lab.training.run import check_recipe, usable_device

    require("seeds", options.seeds, "a positive number", options.seeds >= 1)
    bounded(options, seeds=10_000)
    for name in ("devices", "nodes"):
        count = getattr(options.training, name)
        require(name, count, "1, since runs are compared on one device (isopos train takes several)", count == 1)
    device, warnings = usable_device(options.training.device), []
    recipes = [recipe.edit(device=device) for recipe in options.recipes()]
    for recipe in recipes[: len(recipes) // options.seeds]:
        warnings += check_recipe(recipe)[1]
    if options.ray:
        cluster.check_cluster(options.ray, device, torch.get_num_threads())
    folder = run_folder(options.name or time.strftime("compare-%Y%m%d-%H%M%S"))
    check_free(folder)
    if not folder.exists():
        folders.restore(folder)  # after a kill during its replacement
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
            signals.raise_pending()
            title = recipe.scheme + (f" seed {recipe.seed}" if recipes[-1].seed else "")
            show = bars.add(title, recipe.training.steps, task.loss_unit, f"{task.unit}/s")
            result = train(recipe, data, folder / cell_name("", recipe.scheme, recipe.seed), show)
            if result is not None and result.status != "finished":
                bars.progress.console.print(Text(printable(f"{title}: {result.status}"), "red"))


def _spread(source: Recipe, address: str, recipes: list[Recipe], data: Data, folder: Path, console: Console) -> None:
    """Train on a cluster, whose processes load the data of the recipe `source`; see `_train_all`."""
    jobs = []
    for recipe in recipes:
        path = folder / cell_name("", recipe.scheme, recipe.seed)
        arguments = (source, recipe, data.sha256, path)
        jobs.append(cluster.Job(path.name, _remote, arguments, path / RESULT, recipe.training.steps))
    if not do_jobs(jobs, address, recipes[0].training.device, folder / FILE, console):
        raise ValueError(f"ray: expected each run to end, but some failed; {folder} has the finished runs")


def _remote(source: Recipe, recipe: Recipe, sha256: str, folder: Path, seconds: float) -> str:
    """Train a run in a process of a cluster, resuming from its last checkpoint; return its status unless it finished."""
    from isopos.lab.training.run import train

    data = _loaded(pickle.dumps(source))
    require("data", data.sha256[:12], f"data with sha256 {sha256[:12]}", data.sha256 == sha256)
    with try_lock(folder, seconds) as mine:
        if not mine:
            raise ValueError(f"{folder} is in use by {holder(folder)}")
        result = train(recipe, data, folder, resume=(folder / "recipe.json").exists())
    return "" if result is None or result.status == "finished" else result.status


@functools.lru_cache(maxsize=1)
def _loaded(source: bytes) -> Data:
    """The data of a comparison, cached for all runs of a process."""
    recipe = pickle.loads(source)
    return recipe.task.load(recipe)


def _speeds(recipes: list[Recipe], data: Data) -> dict[str, float]:
    """Training speed of each scheme relative to `none` with the same attention: medians over interleaved rounds."""
    from isopos.lab.tasks.build import build_scheme
    from isopos.lab.training.run import step_times

    first = [recipe for recipe in recipes if recipe.seed == recipes[0].seed]
    bases = {
        recipe.scheme: "none" + ":attention=softmax" * (build_scheme(recipe).attention == "softmax") for recipe in first
    }
    schemes = {scheme: scheme for scheme in (*bases, *bases.values())}
    rounds = []
    for seconds in step_times(first[0], data, schemes, ROUNDS):
        signals.raise_pending()
        rounds.append(seconds)
    return {spec: statistics.median(seconds[base] / seconds[spec] for seconds in rounds) for spec, base in bases.items()}
