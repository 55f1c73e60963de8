"""`isopos table`: run the missing cells of a paper's table, then print the paper's figures next to ours.

A cell is a run in its own folder, for one row, corpus and seed; it may fill several columns. Finished cells are kept: the
same command continues after an interruption. Processes that share the folder divide the cells by locks or, with --ray, as
jobs on a cluster.
"""

import functools
import itertools
import math
import pickle
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from isopos.lab.commands import bounded
from isopos.lab.commands.spreading import do_jobs
from isopos.lab.recipes import PLACEMENT, Recipe
from isopos.lab.reports import grids
from isopos.lab.reports.progress import Bars
from isopos.lab.reports.rates import best_rate, start_cell, start_rate
from isopos.lab.runs import cluster, signals
from isopos.lab.runs.files import finite, write_json
from isopos.lab.runs.folders import check_same_recipe, data_fingerprint, read_recipe, run_folder
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
    read_scores,
    read_timing,
    scored,
    speed_rounds,
    timing,
)
from isopos.lab.tasks.task import Data, Scored, View, require
from isopos.spec import read

UNTIMED = ("scheme", "seed", "data")  # fields of a recipe that do not concern all rounds
LOCK_SECONDS = 10.0  # to wait for the lock of about.json
HOW_OFTEN = re.compile(r" --(seeds|rates)([ =][\d.][\d.e-]*)+")  # arguments whose later value replaces an earlier one


@dataclass(frozen=True)
class Options:
    """Run the missing cells of a paper's table, and print the paper's figures next to ours. Arrays: isopos tables.

    Results are kept in runs/tables/NAME-SCALE: the same command continues there, and processes that share the folder divide
    the cells. Writes table.md, results.json, curves.svg and, but for tiny, distances.svg.
    """

    table: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(help=f"{', '.join(TABLES)}; or the path of a .toml of your own.")
    ]
    scale: Literal["tiny", "small", "medium", "paper"] = "small"
    """Size: tiny tests that it runs; small takes at most 90 seconds per cell on 2 cores; paper is the paper's.
    Only lrpe-2 and permuteformer-4 have medium, which needs a GPU."""
    seeds: int = 1  # Number of seeds: 0, 1, ...; figures are means with standard deviations.
    rows: str = ""  # Comma list of names or schemes of rows; by default all.
    data: tuple[str, ...] = ()  # Data to replace the paper's: PATH or CORPUS=PATH; only these corpora are run.
    steps: int = 0  # Updates per cell; 0: as the scale has. They become part of the folder's name.
    rates: tuple[float, ...] = ()
    """Multiples of the learning rate, such as 0.5 1 2, that each row tries with seed 0; the best serves all its seeds."""
    name: str = ""  # Suffix of the folder's name, to keep a variant separate.
    device: Annotated[str, tyro.conf.arg(metavar="cpu|cuda|auto")] = "auto"
    """Device; auto takes a GPU if there is one."""
    ray: Annotated[str, tyro.conf.arg(metavar="HOST:PORT|auto")] = ""
    """Train on the machines of a Ray cluster, which must share this folder; auto: the cluster of this machine."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # Only list the missing cells.


def run(options: Options, console: Console) -> int:
    """Run the missing cells, print the table and write its files; return 0, or 130 after Ctrl-C."""
    table = load_table(options.table).with_steps(options.scale, options.steps)  # before torch is imported
    from isopos.lab.reports import paper
    from isopos.lab.training.run import check_memory, check_recipe, usable_device

    endings = [str(ending) for ending in (options.steps, options.name) if ending]
    folder = run_folder("-".join((table.name, options.scale, *endings)))
    folder = folder.parent / "tables" / folder.name
    rows, sources = _rows(table, options.rows, console), _sources(table, options)
    require("seeds", options.seeds, "a positive number", options.seeds >= 1)
    fixed = f"none, since {table.name} measures steps without training"
    require("seeds", options.seeds, fixed, options.seeds == 1 or not table.timed)
    bounded(options, seeds=10_000)
    recipes, device = {}, usable_device(options.device)
    for name, data in sources.items():
        recipe = table.recipe_at(options.scale, table.corpus(name)).edit(device=device)
        require("data", data, f"none for {name}, whose task has its own", not data or "data" in recipe.names)
        recipes[name] = recipe.edit(data=data) if name and "data" in recipe.names else recipe
    _check_rates(table, recipes, options.rates)
    planned = [  # rows may have a scheme in common
        (name, replace(recipes[name], scheme=scheme, seed=seed))
        for seed, name in itertools.product(range(options.seeds), recipes)
        for scheme in dict.fromkeys(row.on(name) for row in rows if row.on(name))
    ]
    plan = functools.partial(_cells, folder, table, planned, options.rates)
    cells = [] if table.timed else plan()
    if options.dry_run:
        missing = [cell.folder.name for cell in cells if not cell.done] or _untimed(folder, table, recipes, rows)
        count = f"{len(missing)} of {len(cells) or len(rows) * len(recipes)} cells are missing in {folder}"
        more = "those of further seeds follow, at the learning rates that seed 0 chooses"
        grids.say(console, *missing, count, *[more] * bool(options.rates and options.seeds > 1 and missing))
        return 0
    _check_ray(table, options, device)
    for _, recipe in planned[: len(planned) // options.seeds]:
        check_recipe(recipe)
        check_memory(recipe)
    sets = _load(table, recipes, console)
    _check_data(cells, sets)
    _note(folder, table, options, sets, device)
    status = 0
    try:
        if table.timed:
            for name, recipe in recipes.items():
                _time(folder, table, name, recipe, sets[name], rows, console)
        else:
            status = _fill(cells, plan, table, recipes, sets, options, console)
    except KeyboardInterrupt as stop:
        console.print("[yellow]interrupted: finished cells are kept, and the same command continues")
        status = signals.exit_status(stop)
    grid, notes = paper.write(table, folder)
    console.print(grid)
    grids.say(console, *notes)
    files = [folder / name for name in ("table.md", "results.json", "distances.svg", "curves.svg")]
    grids.say(console, f"written: {', '.join(str(file) for file in files if file.exists())}")
    return status


def _fill(
    cells: Sequence[Cell],
    plan: Callable[[], Sequence[Cell]],
    table: PaperTable,
    recipes: Mapping[str, Recipe],
    sets: Mapping[str, Data],
    options: Options,
    console: Console,
) -> int:
    """Train the missing ones of these cells, and those of the learning rates that they choose; return the exit status."""
    status = 0
    while True:
        missing = [cell for cell in cells if not cell.done]
        if options.ray:
            status |= _spread(missing, table, recipes, sets, options, console)
        else:
            _train_cells(missing, sets, console)
        before, cells = cells, plan() if options.rates else cells
        if len(cells) == len(before):
            return status
        _check_data(cells, sets)


def _check_rates(table: PaperTable, recipes: Mapping[str, Recipe], rates: Sequence[float]) -> None:
    """Raise a ValueError if learning rates cannot be tried."""
    require("rates", rates, f"none, since {table.name} measures steps without training", not rates or not table.timed)
    right = len({f"{rate:g}" for rate in rates}) == len(rates) != 1 and all(0 < rate < math.inf for rate in rates)
    require("rates", rates, "several different positive multiples of the learning rate, or none", right)
    unseen = [name or table.name for name, recipe in recipes.items() if rates and not recipe.training.validate_every]
    reason = f"none, since {', '.join(unseen)} has no validation that could choose; give its recipe validate_every"
    require("rates", rates, reason, not unseen)


def _check_data(cells: Sequence[Cell], sets: Mapping[str, Data]) -> None:
    """Raise a ValueError if finished cells have other data."""
    for cell in cells:
        if data_fingerprint(cell.folder) not in ("", sets[cell.corpus].sha256):
            name = sets[cell.corpus].name
            raise ValueError(f"data: {cell.folder} has other data than {name}; choose a --name for these data")


def _check_ray(table: PaperTable, options: Options, device: str) -> None:
    """Raise a ValueError if cells are to be trained on a cluster and cannot be."""
    import torch

    if options.ray:
        require("ray", options.ray, f"none, since {table.name} measures steps on one machine", not table.timed)
        cluster.check_cluster(options.ray, device, torch.get_num_threads())


def _rows(table: PaperTable, chosen: str, console: Console) -> list[TableRow]:
    """The requested rows with a scheme and the rows from which they start, or all whose packages are installed.

    The baseline is first.
    """
    from isopos.lab.tasks.attentions import absence

    rows = [row for row in table.rows if row.scheme]
    if chosen:
        names, pieces = set(), read("rows", chosen).split(",")
        known = {name for row in rows for name in (row.name, row.scheme)}
        while pieces:  # the longest that fits, since names and schemes may have commas
            first, *_ = pieces
            fits = [n for n, last in enumerate(pieces, 1) if first.part(first.start, last.stop).text in known]
            if not fits:
                raise first.wrong(f"names or schemes of rows with a scheme, {', '.join(row.name for row in rows)}")
            names.add(first.part(first.start, pieces[fits[-1] - 1].stop).text)
            pieces = pieces[fits[-1] :]
        names |= {corpus.start_row for corpus in table.corpora}  # others start from their runs
        rows = [row for row in rows if row.name in names or row.scheme in names]
    else:
        absent = {row.name: missing for row in rows if (missing := absence(row.scheme))}
        grids.say(console, *(f"left out: {name}; {missing}" for name, missing in absent.items()))
        rows = [row for row in rows if row.name not in absent]
    return sorted(rows, key=lambda row: row.name != table.baseline)  # the baseline first


def _sources(table: PaperTable, options: Options) -> dict[str, str]:
    """The source of each corpus to run: all freely available corpora, or the corpora in --data."""
    names = [corpus.name for corpus in table.corpora]
    if not names and not options.data:
        return {"": ""}
    replaced = {}
    for entry in options.data:
        name, source = read("data", entry).cut("=")
        if source is not None and name.text in names:
            replaced[name.text] = source.text
        elif len(names) == 1:
            replaced[names[0]] = entry
        else:
            what = f"NAME=PATH with a name of {', '.join(names)}" if names else "none, since this table chooses no data"
            raise ValueError(f"data: expected {what}, got {entry!r}")
    sources = {
        corpus.name: corpus.source if "data" in table.recipe_at("original", corpus).names else "" for corpus in table.corpora
    }
    free = {name: source for name, source in sources.items() if source != ASK}
    if options.scale == "tiny":
        own = options.table.endswith(".toml")
        free = {
            corpus.name: free.get(corpus.name, "") if own else ""
            for corpus in table.corpora
            if not corpus.start or corpus.name in free
        }
    chosen = replaced or free
    for corpus in table.corpora:
        if corpus.name in chosen and corpus.start and corpus.start not in chosen:
            if corpus.start not in free:
                raise ValueError(f"data: expected {corpus.start}=PATH, from whose runs {corpus.name} starts, got none")
            chosen[corpus.start] = free[corpus.start]
    return {name: chosen[name] for name in names if name in chosen}


def _load(table: PaperTable, recipes: Mapping[str, Recipe], console: Console) -> dict[str, Data]:
    """Load the data of each corpus; a corpus with a warm start reuses, for instance, the tokenizer of the other run."""
    sets: dict[str, Data] = {}
    for name, recipe in recipes.items():
        corpus = table.corpus(name)
        with TemporaryDirectory() as folder:
            start = corpus.start if corpus else ""
            if start:
                sets[start].save(Path(folder))
            sets[name] = recipe.task.load(recipe, console, Path(folder) if start else None)
    return sets


def _cells(folder: Path, table: PaperTable, planned: Sequence[tuple[str, Recipe]], rates: Sequence[float]) -> list[Cell]:
    """The cells of planned runs. Of learning rates to try, seed 0 has all, and other seeds have the best one, once known."""
    cells = []
    for corpus, recipe in planned:
        data, scheme, seed = table.corpus(corpus), recipe.scheme, recipe.seed
        best = best_rate(table, folder, corpus, scheme, rates) if rates and seed else 1.0
        start = start_cell(table, folder, corpus, scheme, seed, rates)
        before = start_rate(table, folder, corpus, scheme, rates) or 1.0
        if start or not (data and data.start):
            tried = rates if rates and seed == 0 else [best]
            names = {rate: cell_name(corpus, scheme, seed, rate, before) for rate in tried if rate is not None}
            cells += [_cell(folder / "cells" / name, table, corpus, recipe, rate, start) for rate, name in names.items()]
    return cells


def _cell(path: Path, table: PaperTable, corpus: str, recipe: Recipe, rate: float, start: Path | None) -> Cell:
    """A cell. If it exists, its recipe must be the same except for the paths of data and start, and the device."""
    recipe = recipe.edit(learning_rate=recipe.training.learning_rate * rate)
    if start:
        recipe = recipe.edit(start=str(start))
    if (path / "recipe.json").exists():
        before = read_recipe(path)
        recipe = recipe.with_inferred(before)
        recipe = recipe.edit(data=before.as_dict()["data"]) if corpus and "data" in recipe.names else recipe
        if start and Path(began := before.as_dict()["start"]).name == start.name:  # perhaps before the table was copied
            recipe = recipe.edit(start=began)
        check_same_recipe(path, recipe)
    metrics = [table.metric(column) for column in table.columns if column.corpus == corpus]
    return Cell(path, corpus, recipe, metrics, start)


def _note(folder: Path, table: PaperTable, options: Options, sets: Mapping[str, Data], device: str) -> None:
    """Add this command to about.json, which records all requests for the folder, under a lock."""
    path = folder / ABOUT
    names = {name: data.name for name, data in sets.items() if name or not table.timed}
    with try_lock(path, LOCK_SECONDS) as mine:
        if not mine:
            raise ValueError(f"expected {path} to be free within seconds, but {holder(path)} has its lock; start again")
        before = read_about(folder)
        about = {
            "table": options.table,
            "scale": options.scale,
            "commands": _commands(
                before["commands"], shlex.join(["isopos", *sys.argv[1:]]), options.seeds >= before["seeds"]
            ),
            "seeds": max(before["seeds"], options.seeds),
            "corpora": before["corpora"] | names,
            "machine": _machine(device),
            "rates": list(options.rates),
        }
        write_json(path, about)


def _machine(device: str) -> str:
    """Version of PyTorch and kind of the device, as tables name them: runs on another may round otherwise."""
    import torch

    if device.startswith("cuda"):
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    return f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, {torch.backends.cpu.get_cpu_capability()}"


def _commands(before: Sequence[str], command: str, whole: bool) -> list[str]:
    """All commands whose cells a table shows: a whole one replaces the same with fewer seeds or other learning rates."""
    if command in before:
        return [*before]
    same = HOW_OFTEN.sub("", command)
    return [*(old for old in before if not whole or HOW_OFTEN.sub("", old) != same), command]


def _missing_rounds(table: PaperTable, rows: Sequence[TableRow], folder: Path, corpus: str) -> dict[str, int]:
    """Number of missing rounds of a corpus, by row."""
    rounds = speed_rounds(folder, corpus)
    return {
        row.name: count
        for row in rows
        if row.on(corpus) and (count := table.rounds - sum(row.name in seconds for seconds in rounds)) > 0
    }


def _train_cells(cells: Sequence[Cell], sets: Mapping[str, Data], console: Console) -> None:
    total, done, holders = sum(cell.recipe.training.steps for cell in cells), 0, {}
    with Bars(console, total=total) as bars:
        for n, cell in enumerate(cells):
            signals.raise_pending()
            task, steps = cell.recipe.task, cell.recipe.training.steps
            with try_lock(cell.folder) as mine:
                if not mine:
                    holders[n] = holder(cell.folder)
                elif not cell.done and cell.ready:
                    title = f"{n + 1}/{len(cells)} {cell.folder.name}"
                    _compute(cell, sets[cell.corpus], bars.add(title, steps, task.loss_unit, f"{task.unit}/s", before=done))
            done += steps
    for n, process in holders.items():
        if not cells[n].done:
            grids.say(console, f"{cells[n].folder.name} is being computed by {process}")
    for cell in cells:
        if cell.start and not cell.done and not (cell.start / SCORES).exists():
            grids.say(console, f"{cell.folder.name} waits for {cell.start.name}; the same command goes on with it")


def _spread(
    cells: Sequence[Cell],
    table: PaperTable,
    recipes: Mapping[str, Recipe],
    sets: Mapping[str, Data],
    options: Options,
    console: Console,
) -> int:
    """Train cells on a cluster; return the exit status, 1 if one failed."""
    if not cells:
        return 0
    source = pickle.dumps((table, dict(recipes)))
    jobs = [
        cluster.Job(
            name=cell.folder.name,
            call=_remote,
            arguments=(source, cell, sets[cell.corpus].sha256),
            output=cell.folder / SCORES,
            steps=cell.recipe.training.steps,
            ready=lambda cell=cell: cell.ready,
        )
        for cell in cells
    ]
    about = cells[0].folder.parent.parent / ABOUT
    return 0 if do_jobs(jobs, options.ray, cells[0].recipe.training.device, about, console) else 1


def _remote(source: bytes, cell: Cell, sha256: str, seconds: float) -> str:
    """Compute a cell in a process of a cluster; return the holder of its lock if another process computes it."""
    data = _loaded(source)[cell.corpus]
    require(f"data of {cell.corpus}", data.sha256[:12], f"data with sha256 {sha256[:12]}", data.sha256 == sha256)
    with try_lock(cell.folder, seconds) as mine:
        if not mine:
            return f"is being computed by {holder(cell.folder)}"
        if not cell.done:
            _compute(cell, data, lambda *row: None)
    return ""


@functools.lru_cache(maxsize=1)
def _loaded(source: bytes) -> dict[str, Data]:
    """The data of a table, cached for all cells of a process."""
    table, recipes = pickle.loads(source)
    return _load(table, recipes, Console(quiet=True))


def _compute(cell: Cell, data: Data, show: Any) -> None:
    """Train a cell, resuming from its last checkpoint, and score it; scores.json is written last."""
    from isopos.lab.training import run as training

    start, recipe = time.perf_counter(), data.infer(cell.recipe)
    result = training.train(recipe, data, cell.folder, show, resume=(cell.folder / "recipe.json").exists())
    status = result.status if result else "not the first process"
    columns = _scores(cell, data, recipe) if status == "finished" else {}
    seconds, machine = time.perf_counter() - start, _machine(recipe.training.device)
    if (cell.folder / SCORES).exists():  # only scored again, for columns that have changed
        before = read_scores(cell.folder)
        seconds, machine = seconds + before["seconds"], before.get("machine", machine)
    write_json(cell.folder / SCORES, {"status": status, "columns": columns, "seconds": seconds, "machine": machine})


def _scores(cell: Cell, data: Data, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Figures by column, or the reason for a missing figure. Data without a test split is scored on validation."""
    from isopos.lab.runs.checkpoints import load_run

    model, columns = load_run(cell.folder)[1].to(recipe.training.device), {}
    views: dict[View, Scored] = {}
    for metric in cell.metrics:
        view = metric.view if metric.view.split in data.splits else replace(metric.view, split="validation")
        found = views[view] = views.get(view) or data.measure(model, recipe, view)
        figures = finite(found.figures)
        value, reason = figures.get(metric.figure), found.reason or "not finite" * (metric.figure in figures)
        columns[metric.title] = {"value": value, **figures, "split": view.split, "reason": reason, "scored": scored(metric)}
    return columns


def _check_rounds(before: Mapping[str, str], now: Mapping[str, str], more: bool, path: Path) -> None:
    """Raise a ValueError if earlier rounds have timed something else or, if there are to be more, on another machine."""
    for name, value in now.items():
        if before.get(name, "") not in ("", value) and (more or name != "machine"):
            raise ValueError(
                f"{name}: expected that of {path}, {before[name]}, got {value}; choose a --name for these rounds"
            )


def _untimed(folder: Path, table: PaperTable, recipes: Mapping[str, Recipe], rows: Sequence[TableRow]) -> list[str]:
    """Names of rows with missing rounds; none of a table that trains. ValueError if earlier ones measured something else."""
    missing = list[str]()
    for name, recipe in recipes.items() if table.timed else ():
        _check_rounds(read_timing(folder, name)["timed"], _measured(recipe, rows, name), False, timing(folder, name))
        names = _missing_rounds(table, rows, folder, name)
        missing += [cell_name(name, row, 0).removesuffix("-seed0") for row in names]
    return missing


def _measured(recipe: Recipe, rows: Sequence[TableRow], corpus: str) -> dict[str, str]:
    """What rounds measure: fields of the recipe, and schemes by row."""
    fields = {name: str(value) for name, value in recipe.as_dict().items() if name not in (*PLACEMENT, *UNTIMED)}
    return fields | {f"row {row.name}": row.on(corpus) for row in rows}


def _time(
    folder: Path, table: PaperTable, corpus: str, recipe: Recipe, data: Data, rows: Sequence[TableRow], console: Console
) -> None:
    """Measure the baseline and all schemes with missing rounds, until no rounds are missing."""
    from isopos.lab.training.run import answer_times, step_memory, step_times

    measures, path = {"latency": answer_times, "memory": step_memory}, timing(folder, corpus)
    with try_lock(folder / "timing") as mine:
        if not mine:
            grids.say(console, f"rounds{' of ' * bool(corpus)}{corpus} are being timed by {holder(folder / 'timing')}")
            return
        known, missing = read_timing(folder, corpus), _missing_rounds(table, rows, folder, corpus)
        described = _measured(recipe, rows, corpus) | {"data": data.sha256}
        machine, rounds = _machine(recipe.training.device), known["rounds"]
        _check_rounds(
            {**known["timed"], "machine": known["machine"]}, {**described, "machine": machine}, bool(missing), path
        )
        if not missing:
            return
        count, timed = max(missing.values()), {name: table.row(name).on(corpus) for name in (table.baseline, *missing)}
        with Bars(console, total=count) as bars:
            show = bars.add(f"rounds of all schemes{', ' * bool(corpus)}{corpus}", count)
            measure = measures.get(table.kind, step_times)
            for n, costs in enumerate(measure(recipe, data, timed, count), 1):
                signals.raise_pending()
                rounds.append(costs)
                write_json(path, {"timed": {**known["timed"], **described}, "machine": machine, "rounds": rounds})
                show(n)
