"""`isopos table`: run every cell of a paper's table that is not there yet, then show the paper's figures beside ours.

A cell is a run of the engine in a folder of its own, for one row, corpus and seed; it may fill several columns. Whatever is
finished stays: the same command goes on after an interruption, and processes that share the folder divide the cells, by
themselves or, with --ray, as the machines of a cluster.
"""

import functools
import itertools
import pickle
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.lab.commands import bounded
from isopos.lab.commands.spreading import do_jobs
from isopos.lab.recipes import Recipe
from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.lab.runs import cluster, signals
from isopos.lab.runs.files import write_json
from isopos.lab.runs.folders import fingerprint, recipe_of, run_place, same_recipe
from isopos.lab.runs.locks import holder, try_lock
from isopos.lab.tables.loader import (
    ABOUT,
    ASK,
    SCORES,
    TABLES,
    Cell,
    PaperTable,
    TableRow,
    cell_name,
    load_table,
    read_about,
    speed_rounds,
    timing,
)
from isopos.lab.tasks.task import Data, Scored, View, require
from isopos.spec import read

__all__ = ["ROUNDS", "Options", "run"]

ROUNDS = 21
PATIENCE = 10.0  # seconds for about.json


@dataclass(frozen=True)
class Options:
    """Run the cells of a paper's table that are missing, and print the paper's figures beside ours.

    Everything is kept in runs/tables/NAME-SCALE: the same command goes on with it, and processes that share the folder
    divide the cells. Ends with table.md, figures.json and curves.svg there.
    """

    table: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(help=f"{', '.join(TABLES)}; or the path of a .toml of your own.")
    ]
    scale: Literal["tiny", "small", "medium", "paper"] = "small"
    """Sizes: tiny proves that it runs, small takes at most 90 seconds a cell on 2 cores, paper is what the paper did.
    Medium, of lrpe-2 and permuteformer-4 alone, asks for a GPU."""
    seeds: int = 1  # Repeat with seeds 0, 1, ... and report means with standard deviations.
    rows: str = ""  # Names or schemes of rows, with commas; by default all.
    data: tuple[str, ...] = ()  # Data instead of the paper's, PATH or CORPUS=PATH; only corpora that are named are run.
    steps: int = 0  # Updates of each cell instead of the scale's; the folder's name ends with them.
    name: str = ""  # Ending of the folder's name, for a variant that is to be kept apart.
    device: Annotated[str, tyro.conf.arg(metavar="cpu|cuda|auto")] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    ray: Annotated[str, tyro.conf.arg(metavar="HOST:PORT|auto")] = ""
    """Train the cells on the machines of a Ray cluster, which share this folder; auto: the cluster of this machine."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # List the cells that are missing, and do nothing.


def run(options: Options, console: Console) -> int:
    """Run what is missing, print the table, write table.md, figures.json and curves.svg; return 0, or 130 after Ctrl-C."""
    table = load_table(options.table).with_steps(options.scale, options.steps)  # before torch is imported
    from isopos.lab.reports import paper
    from isopos.lab.training.memory import check_memory
    from isopos.lab.training.run import check_recipe, usable_device

    endings = [str(ending) for ending in (options.steps, options.name) if ending]
    folder = run_place("-".join((table.name, options.scale, *endings)))
    folder = folder.parent / "tables" / folder.name
    rows, sources = _rows(table, options.rows, console), _sources(table, options)
    require("seeds", options.seeds, "a positive number", options.seeds >= 1)
    bounded(options, seeds=10_000)
    recipes, device = {}, usable_device(options.device)
    for name, data in sources.items():
        recipe = table.recipe_at(options.scale, table.corpus(name)).edit(device=device)
        require("data", data, f"none for {name}, whose task has its own", not data or "data" in recipe.names)
        recipes[name] = recipe.edit(data=data) if name and "data" in recipe.names else recipe
    planned = [  # rows may have a scheme in common
        (name, replace(recipes[name], scheme=scheme, seed=seed))
        for seed, name in itertools.product(range(options.seeds), recipes)
        for scheme in dict.fromkeys(row.on(name) for row in rows if row.on(name))
    ]
    cells = [_cell(folder, table, name, recipe) for name, recipe in planned if not table.timed]
    if options.dry_run:
        untimed = [
            cell_name(name, row, 0).removesuffix("-seed0") for name in recipes for row in _lacking(rows, folder, name)
        ]
        lacking = untimed if table.timed else [cell.folder.name for cell in cells if not cell.done]
        said = f"{len(lacking)} of {len(cells) or len(rows) * len(recipes)} cells are missing in {folder}"
        grids.say(console, *lacking, said)
        return 0
    _check_ray(table, options, device)
    for _, recipe in planned[: len(planned) // options.seeds]:
        check_recipe(recipe)
        check_memory(recipe)
    sets = _load(table, recipes, console)
    for cell in cells:  # those that are there were trained on the same
        if fingerprint(cell.folder) not in ("", sets[cell.corpus].sha256):
            other = sets[cell.corpus].name
            raise ValueError(f"data: {cell.folder} has other data than {other}; choose a --name for this one")
    _note(folder, table, options, sets, device)
    status, missing = 0, [cell for cell in cells if not cell.done]
    try:
        if table.timed:
            for name, recipe in recipes.items():
                _time(folder, table, name, recipe, sets[name], rows, console)
        elif options.ray:
            status = _spread(missing, table, recipes, sets, options, console)
        else:
            _train_cells(missing, sets, console)
    except KeyboardInterrupt as stop:
        console.print("[yellow]interrupted: what is finished stays, and the same command goes on")
        status = signals.status(stop)
    shown, said = paper.write(table, folder)
    console.print(shown)
    grids.say(console, *said)
    grids.say(console, f"written: {folder / 'table.md'}, {folder / 'curves.svg'}")
    return status


def _check_ray(table: PaperTable, options: Options, device: str) -> None:
    """Raise a ValueError where cells are to be trained on a cluster and cannot be."""
    import torch

    if options.ray:
        require("ray", options.ray, f"none, since {table.name} times steps on one machine", not table.timed)
        cluster.check_cluster(options.ray, device, torch.get_num_threads())


def _rows(table: PaperTable, chosen: str, console: Console) -> list[TableRow]:
    """Those with a scheme that are asked for, or for which there are packages, the baseline first."""
    from isopos.lab.tasks.attentions import absence

    rows = [row for row in table.rows if row.scheme]
    if not chosen:
        absent = {row.name: missing for row in rows if (missing := absence(row.scheme))}
        grids.say(console, *(f"left out: {name}; {missing}" for name, missing in absent.items()))
        rows = [row for row in rows if row.name not in absent]
    if chosen:
        pieces = read("rows", chosen).split(",")
        wanted = [piece.text for piece in pieces]
        for piece in pieces:
            if not any(piece.text in (row.name, row.scheme) for row in rows):
                raise piece.wrong(f"names or schemes of rows with a scheme, {', '.join(row.name for row in rows)}")
        rows = [row for row in rows if row.name in wanted or row.scheme in wanted]
    return sorted(rows, key=lambda row: row.name != table.baseline)


def _sources(table: PaperTable, options: Options) -> dict[str, str]:
    """Where each corpus that is run comes from: all that can be had, or those that --data names."""
    names = [corpus.name for corpus in table.corpora]
    if not names and not options.data:
        return {"": ""}
    given = {}
    for entry in options.data:
        name, source = read("data", entry).cut("=")
        if source is not None and name.text in names:
            given[name.text] = source.text
        elif len(names) == 1:
            given[names[0]] = entry
        else:
            what = f"NAME=PATH with a name of {', '.join(names)}" if names else "none, since this table chooses no data"
            raise ValueError(f"data: expected {what}, got {entry!r}")
    sources = {one.name: one.source if "data" in table.recipe_at("original", one).names else "" for one in table.corpora}
    free = {name: source for name, source in sources.items() if source != ASK}
    if options.scale == "tiny":
        free = {one.name: "" for one in table.corpora if not one.start or one.name in free}
    chosen = given or free
    for corpus in table.corpora:
        if corpus.name in chosen and corpus.start and corpus.start not in chosen:
            if corpus.start not in free:
                raise ValueError(
                    f"data: expected {corpus.start}=PATH, with whose runs those of {corpus.name} begin, got none"
                )
            chosen[corpus.start] = free[corpus.start]
    return {name: chosen[name] for name in names if name in chosen}


def _load(table: PaperTable, recipes: Mapping[str, Recipe], console: Console) -> dict[str, Data]:
    """The data of each corpus; with what the weights of its start need to be used again, such as a tokenizer."""
    sets: dict[str, Data] = {}
    for name, recipe in recipes.items():
        corpus = table.corpus(name)
        with TemporaryDirectory() as folder:
            start = corpus.start if corpus else ""
            if start:
                sets[start].save(Path(folder))
            sets[name] = recipe.task.load(recipe, console, Path(folder) if start else None)
    return sets


def _cell(folder: Path, table: PaperTable, corpus: str, recipe: Recipe) -> Cell:
    """A cell; one that is there already must have the same recipe, but for where text and machine are."""
    place, own, start = folder / "cells" / cell_name(corpus, recipe.scheme, recipe.seed), table.corpus(corpus), None
    if own and own.start:
        start = place.with_name(cell_name(own.start, recipe.scheme, recipe.seed))
        recipe = recipe.edit(start=str(start))
    if (place / "recipe.json").exists():
        before = recipe_of(place)
        then, now = before.as_dict(), recipe.settled_as(before)
        recipe = now.edit(data=then["data"]) if corpus and "data" in now.names else now
        same_recipe(place, recipe)
    metrics = [table.metric(column) for column in table.columns if column.corpus == corpus]
    return Cell(place, corpus, recipe, metrics, start)


def _note(folder: Path, table: PaperTable, options: Options, sets: Mapping[str, Data], device: str) -> None:
    """Add to about.json, which holds all that was asked of this folder; processes that start at once take turns."""
    import torch

    path = folder / ABOUT
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    names = {name: data.name for name, data in sets.items() if name or not table.timed}
    with try_lock(path, PATIENCE) as mine:
        if not mine:
            raise ValueError(f"expected {path} to be free within seconds, but {holder(path)} has it; start again")
        before = read_about(folder)
        about = {
            "table": options.table,
            "scale": options.scale,
            "commands": [*dict.fromkeys([*before["commands"], shlex.join(["isopos", *sys.argv[1:]])])],
            "seeds": max(before["seeds"], options.seeds),
            "corpora": before["corpora"] | names,
            "machine": f"torch {torch.__version__}, {where}",
        }
        write_json(path, about)


def _lacking(rows: Sequence[TableRow], folder: Path, corpus: str) -> dict[str, int]:
    """Rounds that are missing of a corpus, by row."""
    rounds = speed_rounds(folder, corpus)
    return {
        row.name: count for row in rows if row.on(corpus) and (count := ROUNDS - sum(row.name in one for one in rounds)) > 0
    }


def _train_cells(cells: Sequence[Cell], sets: Mapping[str, Data], console: Console) -> None:
    total, done, held = sum(cell.recipe.training.steps for cell in cells), 0, {}
    with Bars(console, total=total) as bars:
        for n, cell in enumerate(cells):
            signals.heed()
            task, steps = cell.recipe.task, cell.recipe.training.steps
            with try_lock(cell.folder) as mine:
                if not mine:
                    held[n] = holder(cell.folder)
                elif not cell.done and cell.ready:
                    title = f"{n + 1}/{len(cells)} {cell.folder.name}"
                    _compute(cell, sets[cell.corpus], bars.add(title, steps, task.loss_unit, f"{task.unit}/s", before=done))
            done += steps
    for n, who in held.items():
        if not cells[n].done:
            grids.say(console, f"{cells[n].folder.name} is being computed by {who}")


def _spread(
    cells: Sequence[Cell],
    table: PaperTable,
    recipes: Mapping[str, Recipe],
    sets: Mapping[str, Data],
    options: Options,
    console: Console,
) -> int:
    """Train cells on a cluster; return the exit status, 1 where one could not be done."""
    if not cells:
        return 0
    source = pickle.dumps((table, dict(recipes)))
    jobs = [
        cluster.Job(
            name=cell.folder.name,
            call=_remote,
            arguments=(source, cell, sets[cell.corpus].sha256),
            leaves=cell.folder / SCORES,
            steps=cell.recipe.training.steps,
            ready=lambda cell=cell: cell.ready,
        )
        for cell in cells
    ]
    about = cells[0].folder.parent.parent / ABOUT
    return 0 if do_jobs(jobs, options.ray, cells[0].recipe.training.device, about, console) else 1


def _remote(source: bytes, cell: Cell, sha256: str, seconds: float) -> str:
    """Compute a cell in a process of a cluster, unless another process does or did; say where it does."""
    data = _loaded(source)[cell.corpus]
    require(f"data of {cell.corpus}", data.sha256[:12], f"that of sha256 {sha256[:12]}", data.sha256 == sha256)
    with try_lock(cell.folder, seconds) as mine:
        if not mine:
            return f"is being computed by {holder(cell.folder)}"
        if not cell.done:
            _compute(cell, data, lambda *row: None)
    return ""


@functools.lru_cache(maxsize=1)
def _loaded(source: bytes) -> dict[str, Data]:
    """The data of a table, for all cells that a process computes."""
    table, recipes = pickle.loads(source)
    return _load(table, recipes, Console(quiet=True))


def _compute(cell: Cell, data: Data, show: Any) -> None:
    """Train a cell, from the start or its last checkpoint, and score it; scores.json is written last."""
    from isopos.lab.training import run as training

    begun, recipe = time.perf_counter(), data.settle(cell.recipe)
    result = training.train(recipe, data, cell.folder, show, resume=(cell.folder / "recipe.json").exists())
    status = result.status if result else "not the first process"
    found = _scores(cell, data, recipe) if status == "finished" else {}
    seconds = time.perf_counter() - begun
    write_json(cell.folder / SCORES, {"status": status, "columns": found, "seconds": seconds})


def _scores(cell: Cell, data: Data, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Figures, or why there is none, by column; where the data has no test split validation takes its place."""
    from isopos.lab.runs.checkpoints import load_run

    model, found = load_run(cell.folder)[1].to(recipe.training.device), {}
    views: dict[View, Scored] = {}
    for metric in cell.metrics:
        view = metric.view if metric.view.split in data.splits else replace(metric.view, split="validation")
        scored = views[view] = views.get(view) or data.measure(model, recipe, view)
        value = scored.figures.get(metric.figure)
        found[metric.title] = {"value": value, **scored.figures, "split": view.split, "reason": scored.reason}
    return found


def _time(
    folder: Path, table: PaperTable, corpus: str, recipe: Recipe, data: Data, rows: Sequence[TableRow], console: Console
) -> None:
    """Rounds of steps or answers, of all schemes that lack some and the baseline, until each has enough."""
    from isopos.lab.training.run import answer_times, step_times

    times = answer_times if table.kind == "latency" else step_times
    with try_lock(folder / "timing") as mine:
        rounds, lacking = speed_rounds(folder, corpus), _lacking(rows, folder, corpus)
        if not mine or not lacking:
            return
        left, timed = max(lacking.values()), {name: table.row(name).on(corpus) for name in (table.baseline, *lacking)}
        with Bars(console, total=left) as bars:
            show = bars.add(f"rounds of all schemes{', ' * bool(corpus)}{corpus}", left)
            for n, seconds in enumerate(times(recipe, data, timed, left), 1):
                signals.heed()
                rounds.append(seconds)
                write_json(timing(folder, corpus), rounds)
                show(n)
