"""`isopos runs` and `isopos eval`: what runs came to, from their folders, and their weights evaluated again."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors.torch import load_model

from isopos.lab.data import corpora
from isopos.lab.data.tokenizers import load_tokenizer
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows, recipe_of, write_json
from isopos.lab.tasks.perplexity import length_table
from isopos.lab.training.run import build_model

__all__ = ["evaluate_run", "list_runs"]


def list_runs(folder: str, console: Console) -> int:
    """Print a table of the runs in a folder and in its folders, the latest last; return the exit status.

    Raises:
        ValueError: Where there are none, or the files of one are damaged.
    """
    found = sorted(Path(folder).rglob("recipe.json"), key=lambda path: _changed(path.parent))
    runs = [path.parent for path in found if "/." not in f"/{path.relative_to(folder).as_posix()}"]  # those are half made
    if not runs:
        raise ValueError(f"folder: expected runs in {folder}, found none; isopos train and isopos compare make some")
    table = Table(header_style="bold")
    for title in ("run", "scheme", "status", "step", "nats/token", "bits/byte", "when"):
        table.add_column(title, justify="right" if title in ("step", "nats/token", "bits/byte") else "left", overflow="fold")
    for run in runs:
        table.add_row(*_cells(run, run.relative_to(folder).as_posix()))
    console.print(table)
    return 0


def _changed(run: Path) -> float:
    return max(path.stat().st_mtime for path in (run / "recipe.json", run / "metrics.jsonl") if path.exists())


def _cells(run: Path, name: str) -> list[str]:
    recipe, rows = recipe_of(run), read_rows(run / "metrics.jsonl")
    training = [row for row in rows if row.get("loss") is not None]
    validations = [row["validation"] for row in rows if row.get("validation") is not None]
    try:
        result = json.loads((run / "result.json").read_text())
    except FileNotFoundError:
        result = None
    except ValueError as error:
        raise ValueError(f"{run / 'result.json'}: {error}") from None
    best = result["bits_per_byte"]["1"] if result else min(validations, default=None)
    step = f"{rows[-1]['step'] if rows else 0}/{recipe.steps}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(_changed(run)))
    status = result["status"] if result else "not finished"
    loss = f"{training[-1]['loss']:.3f}" if training else "-"
    return [name, recipe.scheme, status, step, loss, "-" if best is None else f"{best:.3f}", when]


def evaluate_run(
    run: str, multiples: Sequence[int], tokens: int, console: Console, *, split: str = "validation", scored: int = 0
) -> int:
    """Evaluate a run on the CPU at multiples of its training length, print a table, and append the figures to its eval.json.

    Args:
        run: Its folder; without a result, its last checkpoint is evaluated.
        multiples: Of the training length.
        tokens: At most so many of the held-out text; 0: all; -1: as in training.
        console: Where to print.
        split: validation or test.
        scored: Tokens at the end of each window that count; 0: all.

    Returns:
        The exit status.

    Raises:
        ValueError: Before any work, where there is no such run or nothing to evaluate.
    """
    folder = Path(run)
    recipe = replace(recipe_of(folder), device="cpu")
    for multiple in multiples:
        if multiple < 1:
            raise ValueError(f"length: expected multiples from 1 on, got {multiple}")
    if tokens < -1:
        raise ValueError(f"tokens: expected a number, 0 for all or -1 as in training, got {tokens}")
    if scored < 0:
        raise ValueError(f"scored: expected a number of tokens, or 0 for all, got {scored}")
    model, weights, last = build_model(recipe), folder / "model.safetensors", checkpoints.newest(folder)
    if weights.exists():
        load_model(model, str(weights))
        source, step = weights.name, _last_step(folder)
    elif last is not None:
        model.load_state_dict(checkpoints.load(last)["model"])
        source, step = str(last.folder.relative_to(folder)), last.step
    else:
        raise ValueError(f"run: expected weights or a checkpoint in {folder}, got neither; train it with --resume")
    corpus = corpora.load(recipe.data, recipe.length, tokenizer=load_tokenizer(folder), console=console)
    limit = (recipe.validation_tokens if tokens < 0 else tokens) or None
    table = Table("tokens of a window", "bits/byte", "perplexity", "scored", header_style="bold")
    figures: dict[str, Any] = {}
    choice: dict[str, Any] = {"split": split, "scored": scored or None, "limit": limit}
    for row in length_table(model, corpus, recipe.length, multiples=multiples, **choice):
        score = row.score
        if score is None:
            table.add_row(str(row.length), "-", "-", row.reason)
        else:
            table.add_row(str(row.length), f"{score.bits_per_byte:.4f}", f"{score.perplexity:.2f}", f"{score.tokens:,}")
        figures[str(row.length)] = None if score is None else vars(score) | {"perplexity": score.perplexity}
    console.print(f"{folder}: {source}, step {step}; {corpus.name}", markup=False)
    console.print(table)
    path = folder / "eval.json"
    before = json.loads(path.read_text()) if path.exists() else []
    write_json(path, [*before, {"weights": source, "step": step, **choice, "lengths": figures}])
    return 0


def _last_step(folder: Path) -> int:
    rows = read_rows(folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0
