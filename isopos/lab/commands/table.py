"""`isopos table`: run every cell of a paper's table that is not there yet, then show the paper's figures beside ours.

A cell is a run of the engine in a folder of its own, for one row, corpus and seed; it may fill several columns. Whatever is
finished stays: the same command goes on after an interruption, and several machines that share the folder divide the cells.
"""

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from isopos.lab.bench.steps import time_steps
from isopos.lab.data import corpora
from isopos.lab.recipes import Recipe, TableRun
from isopos.lab.reports import paper
from isopos.lab.reports.paper import SCORES, TIMING, cell_name, speed_rounds
from isopos.lab.runs.claims import claimed, holder
from isopos.lab.runs.folders import recipe_of, same_recipe, write_json
from isopos.lab.tables.loader import ASK, Column, Line, PaperTable, load_table
from isopos.lab.tasks.perplexity import length_table
from isopos.lab.training.checks import check_recipe, run_place, usable_device
from isopos.lab.training.run import load_run, train

__all__ = ["ROUNDS", "reproduce"]

ROUNDS = 21
PATIENCE = 100  # tenths of a second


@dataclass(frozen=True)
class Cell:
    """One run: its place, its recipe, and the columns that it fills."""

    folder: Path
    corpus: str
    recipe: Recipe
    columns: Sequence[Column]

    @property
    def claim(self) -> Path:
        """The file that says who computes it."""
        return self.folder.parent.parent / "claims" / f"{self.folder.name}.claim"

    @property
    def done(self) -> bool:
        """Whether it has its scores."""
        return (self.folder / SCORES).exists()


def reproduce(command: TableRun, arguments: Sequence[str], console: Console) -> int:
    """Run what is missing, print the table, write table.md and curves.svg; return 0, or 130 after Ctrl-C.

    Args:
        command: What is asked for.
        arguments: Of the command line, to be told beside the results.
        console: Where to print.

    Raises:
        ValueError: Before any work, where something does not fit.
    """
    table = load_table(command.table)
    folder = run_place(f"{table.name}-{command.scale}" + (f"-{command.name}" if command.name else ""))
    folder = folder.parent / "tables" / folder.name
    rows, sources = _rows(table, command.rows), _sources(table, command)
    if command.seeds < 1:
        raise ValueError(f"seeds: expected a positive number, got {command.seeds}")
    recipes = {
        name: replace(table.recipe_at(command.scale, table.corpus(name)), data=data) for name, data in sources.items()
    }
    speed = replace(table.recipe_at(command.scale), device=command.device) if table.kind == "speed" else None
    cells = [
        _cell(folder, table, name, replace(recipe, scheme=row.scheme, seed=seed, device=command.device))
        for seed in range(command.seeds)
        for name, recipe in recipes.items()
        for row in rows
    ]
    if command.dry_run:
        return _say_what_is_missing(table, cells, rows, folder, console)
    for recipe in [replace(speed, scheme=row.scheme) for row in rows] if speed else [cell.recipe for cell in cells]:
        if recipe.seed == 0:
            check_recipe(recipe)
    texts = _texts(recipes, cells, console)
    _note(folder, command, texts, shlex.join(["isopos", *arguments]))
    status = 0
    try:
        if speed:
            _time(folder, table, replace(speed, device=usable_device(speed.device)), rows, console)
        else:
            _train_cells([cell for cell in cells if not cell.done], texts, console)
    except KeyboardInterrupt as stop:
        console.print("[yellow]interrupted: what is finished stays, and the same command goes on")
        status = getattr(stop, "code", 130)
    shown, said = paper.write(table, folder)
    console.print(shown)
    console.print("\n".join(said), markup=False, soft_wrap=True)
    for cell in cells:
        if who := holder(cell.claim):
            console.print(f"{cell.folder.name} is being computed by {who}", markup=False)
    console.print(f"written: {folder / 'table.md'}, {folder / 'curves.svg'}", markup=False, soft_wrap=True)
    return status


def _rows(table: PaperTable, chosen: str) -> list[Line]:
    """Those with a scheme that are asked for, the baseline first."""
    rows = [row for row in table.rows if row.scheme]
    if chosen:
        wanted = [name.strip() for name in chosen.split(",")]
        for name in wanted:
            if not any(name in (row.name, row.scheme) for row in rows):
                known = ", ".join(row.name for row in rows)
                raise ValueError(f"rows: expected names or schemes of rows with a scheme, {known}; got {name!r}")
        rows = [row for row in rows if row.name in wanted or row.scheme in wanted]
    return sorted(rows, key=lambda row: row.name != table.baseline)


def _sources(table: PaperTable, command: TableRun) -> dict[str, str]:
    """Where each corpus that is run comes from: all that can be had, or those that --data names."""
    names = [corpus.name for corpus in table.corpora]
    given = {}
    for entry in command.data:
        name, equals, source = entry.partition("=")
        if equals and name in names:
            given[name] = source
        elif len(names) == 1:
            given[names[0]] = entry
        else:
            what = f"NAME=PATH with a name of {', '.join(names)}" if names else "none, since this table has no text"
            raise ValueError(f"data: expected {what}, got {entry!r}")
    if given:
        return {name: given[name] for name in names if name in given}
    if command.scale == "tiny":
        return dict.fromkeys(names, "")
    return {corpus.name: corpus.source for corpus in table.corpora if corpus.source != ASK}


def _cell(folder: Path, table: PaperTable, corpus: str, recipe: Recipe) -> Cell:
    """A cell; one that is there already must have the same recipe, but for where text and machine are."""
    place = folder / "cells" / cell_name(corpus, recipe.scheme, recipe.seed)
    if (place / "recipe.json").exists():
        before = recipe_of(place)
        recipe = replace(recipe, data=before.data, vocabulary=before.vocabulary)
        same_recipe(place, recipe)
    return Cell(place, corpus, recipe, [column for column in table.columns if column.corpus == corpus])


def _texts(recipes: Mapping[str, Recipe], cells: Sequence[Cell], console: Console) -> dict[str, corpora.Corpus]:
    """The corpora by name, each loaded once; cells that are there were trained on the same."""
    texts = {}
    for name, r in recipes.items():
        vocabulary = r.vocabulary or None
        texts[name] = corpora.load(r.data, r.length, tokenizer=r.tokenizer, vocabulary=vocabulary, console=console)
    for cell in cells:
        kept, name = cell.folder / "text.json", cell.corpus
        if kept.exists() and json.loads(kept.read_text())["sha256"] != texts[name].sha256:
            raise ValueError(f"data: {cell.folder} has another text than {texts[name].name}; choose a --name for this one")
    return texts


def _note(folder: Path, command: TableRun, texts: Mapping[str, corpora.Corpus], line: str) -> None:
    """Add to about.json, which holds all that was asked of this folder; processes that start at once take turns."""
    device, path = usable_device(command.device), folder / "about.json"
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    for _ in range(PATIENCE):
        with claimed(folder / "claims" / "about.claim") as mine:
            if mine:
                before = json.loads(path.read_text()) if path.exists() else {"commands": [], "seeds": 0, "corpora": {}}
                about = {
                    "table": command.table,
                    "scale": command.scale,
                    "commands": [*dict.fromkeys([*before["commands"], line])],
                    "seeds": max(before["seeds"], command.seeds),
                    "corpora": before["corpora"] | {name: text.name for name, text in texts.items()},
                    "machine": f"torch {torch.__version__}, {where}",
                }
                write_json(path, about)
                return
        time.sleep(0.1)
    raise ValueError(f"claim: expected {path} to be free within seconds, but another process holds it; start again")


def _say_what_is_missing(
    table: PaperTable, cells: Sequence[Cell], rows: Sequence[Line], folder: Path, console: Console
) -> int:
    if table.kind == "speed":
        rounds = speed_rounds(folder)
        missing = [row.name for row in rows if sum(row.name in one for one in rounds) < ROUNDS]
    else:
        missing = [cell.folder.name for cell in cells if not cell.done]
    for name in missing:
        console.print(name, markup=False)
    console.print(f"{len(missing)} of {len(cells) or len(rows)} cells are missing in {folder}", markup=False)
    return 0


def _train_cells(cells: Sequence[Cell], texts: Mapping[str, corpora.Corpus], console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(cell.recipe.steps for cell in cells), text="")
        for n, cell in enumerate(cells):
            base = sum(other.recipe.steps for other in cells[:n])
            with claimed(cell.claim) as mine:
                if not mine or cell.done:
                    continue
                bar.update(task, description=f"{n + 1}/{len(cells)} {cell.folder.name}", completed=base)

                def show(step: int, bits: float, rate: float, base: int = base) -> None:
                    bar.update(task, completed=base + step, text=f"{bits:.3f} bits/token {rate:,.0f} tokens/s")

                _compute(cell, texts[cell.corpus], show)


def _compute(cell: Cell, text: corpora.Corpus, show: Any) -> None:
    """Train a cell, from the start or its last checkpoint, and score it; scores.json is written last."""
    begun = time.perf_counter()
    recipe = replace(cell.recipe, vocabulary=text.vocabulary, device=usable_device(cell.recipe.device))
    result = train(recipe, text, cell.folder, show, resume=(cell.folder / "recipe.json").exists())
    status = result.status if result else "not the first process"
    found = dict(_scores(cell, text, recipe)) if status == "finished" else {}
    seconds = time.perf_counter() - begun
    write_json(cell.folder / SCORES, {"status": status, "columns": found, "seconds": seconds})


def _scores(cell: Cell, text: corpora.Corpus, recipe: Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    """Perplexity, or why there is none, by column; where the text has no test split validation takes its place."""
    model = load_run(cell.folder)[1].to(recipe.device)
    for column in cell.columns:
        split = column.split if len(getattr(text, column.split)) else "validation"
        scored = None if column.scored == 1 else max(1, round(column.scored * column.multiple * recipe.length))
        (row,) = length_table(
            model,
            text,
            recipe.length,
            multiples=(column.multiple,),
            split=split,
            scored=scored,
            limit=recipe.validation_tokens or None,
        )
        score = row.score
        yield (
            column.title,
            {
                "value": score.perplexity if score else None,
                "bits_per_byte": score.bits_per_byte if score else None,
                "tokens": score.tokens if score else 0,
                "split": split,
                "reason": row.reason,
            },
        )


def _time(folder: Path, table: PaperTable, recipe: Recipe, rows: Sequence[Line], console: Console) -> None:
    """Rounds of training steps, of all schemes that lack some and the baseline, until each has enough."""
    with claimed(folder / "claims" / "timing.claim") as mine:
        rounds = speed_rounds(folder)
        lacking = [row for row in rows if sum(row.name in one for one in rounds) < ROUNDS]
        left = max((ROUNDS - sum(row.name in one for one in rounds) for row in lacking), default=0)
        if not mine or not left:
            return
        timed = {row.name: row.scheme for row in (table.row(table.baseline), *lacking)}
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("rounds of all schemes", total=left)

            def keep(seconds: dict[str, float]) -> None:
                rounds.append(seconds)
                write_json(folder / TIMING, rounds)
                bar.update(task, advance=1)

            time_steps(recipe, timed, left, keep)
