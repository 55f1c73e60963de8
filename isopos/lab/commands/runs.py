"""`isopos runs`: a list of runs, from their folders."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.reports import grids
from isopos.lab.runs.folders import read_recipe, read_run


@dataclass(frozen=True)
class Options:
    """List the runs below a folder: scheme, status, step, loss (nats) and score."""

    folder: Annotated[str, tyro.conf.Positional] = "runs"  # Folder to search.


def run(options: Options, console: Console) -> int:
    """Print a table of all runs below a folder, latest last."""
    folder = Path(options.folder)
    paths = sorted(folder.rglob("recipe.json"), key=lambda path: _changed(path.parent))
    runs = [path.parent for path in paths if "/." not in f"/{path.relative_to(folder).as_posix()}"]  # without hidden ones
    if not runs:
        raise ValueError(f"folder: expected runs in {folder}, found none; isopos train and isopos compare make some")
    rows = [_cells(run, run.relative_to(folder).as_posix()) for run in runs]
    console.print(grids.console_table(("run", "scheme", "status", "step", "loss (nats)", "score", "when"), rows, "lllrrrl"))
    return 0


def _changed(run: Path) -> float:
    return max(path.stat().st_mtime for path in (run / "recipe.json", run / "metrics.jsonl") if path.exists())


def _cells(run: Path, name: str) -> list[str]:
    try:
        recipe = read_recipe(run)
        rows, result = read_run(run, recipe)
        main = recipe.task.metrics[0]
        best = result.scores[main.title] if result else None
    except (ValueError, KeyError) as error:  # the other runs are still listed
        return [name, "", f"cannot be read: {error}", "", "", "", ""]
    training = [row for row in rows if row.get("loss") is not None]
    validations = [row["validation"] for row in rows if row.get("validation") is not None]
    best = best if result else min(validations, key=main.rank, default=None)
    step = f"{rows[-1]['step'] if rows else 0}/{recipe.training.steps}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(_changed(run)))
    status = result.status if result else "not finished"
    loss = f"{training[-1]['loss']:.3f}" if training else "-"
    return [name, recipe.scheme, status, step, loss, "-" if best is None else f"{main.text(best)} {main.title}", when]
