"""Run folders: recipe.json, metrics.jsonl, result.json, each written so that a kill at any moment leaves a whole one.

A result has ended its run. It is also read in the form that it had before there were tasks.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from isopos.lab.recipes import PLACEMENT, Recipe
from isopos.lab.runs.files import damaged, mismatch, parse_json, read_json, read_text, write_json, write_text

RESULT, EXAMPLES = "result.json", "examples.json"
ROWS = 1 << 30  # bytes of metrics.jsonl
ROW_START = '{"step": '  # how its rows begin
REMEDY = "put it right, or remove this run and train it again"
LENGTHS = {"1": "bits/byte", "2": "at 2x", "4": "at 4x"}  # by which scores were called


class Interrupted(KeyboardInterrupt):
    """A signal ended a run, which can be resumed; `code` is the exit status that says so."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.code = 128 + signal


def run_place(name: str) -> Path:
    """runs/NAME, or a ValueError where the name is not that of one folder."""
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"name: expected the name of one folder under runs/, got {name!r}")
    return Path("runs") / name


def check_vacant(folder: Path, *, overwrite: bool = False) -> None:
    """Raise a ValueError where a run cannot have the folder: it exists and is not to be replaced, or holds no run."""
    if not folder.exists():
        put_back(folder)  # a kill came while it was replaced
    if folder.exists() and not overwrite:
        raise ValueError(
            f"name: {folder} exists; go on with it by --resume, replace it by --overwrite, or choose another --name"
        )
    if folder.exists() and not (folder / "recipe.json").exists():
        raise ValueError(f"overwrite: {folder} holds no run; remove it yourself or choose another --name")


def create(folder: Path, recipe: Recipe, *, overwrite: bool = False) -> None:
    """Make the folder of a new run with its recipe.json, both or nothing.

    Raises:
        ValueError: Where it exists and is not to be replaced, or holds something else, or cannot be written.
    """
    check_vacant(folder, overwrite=overwrite)
    begin(folder, "recipe.json", recipe.as_dict())
    remove(aside(folder))


def begin(folder: Path, file: str, content: object) -> None:
    """Make a folder with a first file, both or nothing; one that is there is set aside.

    What an earlier kill left aside is put back before: a second one does not cost what the first one spared. `put_back`
    gives the folder its content of before, and `remove(aside(folder))` ends that.
    """
    new = folder.with_name(f".{folder.name}.new")
    try:
        remove(new)
        new.mkdir(parents=True)
        write_json(new / file, content)
        put_back(folder)
        if folder.exists():
            folder.rename(aside(folder))
        new.rename(folder)
    except OSError as error:
        raise ValueError(f"name: cannot write {folder}: {error.strerror}") from None


def aside(folder: Path) -> Path:
    """Where a folder is, whole, while another takes its place."""
    return folder.with_name(f".{folder.name}.replaced")


def put_back(folder: Path) -> bool:
    """Give a folder that is aside its place again, which what stands there loses; whether there was one."""
    found = aside(folder).exists()
    if found:
        remove(folder)
        aside(folder).rename(folder)
    return found


def remove(folder: Path) -> None:
    """Remove a folder, if it exists; after a kill it is there, whole, or not at all."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run, or a ValueError where the folder holds none, or one of other fields."""
    path = folder / "recipe.json"
    try:
        values = read_json(path, dict[str, Any], REMEDY)
    except OSError:
        runs = sorted(str(path.parent) for path in folder.glob("*/recipe.json"))
        remedy = f"it holds {', '.join(runs)}" if runs else "isopos runs lists those under runs/"
        raise ValueError(f"run: expected a folder with a recipe.json, got {folder}; {remedy}") from None
    try:
        recipe = Recipe.from_dict(values)
        recipe.check()
    except ValueError as error:
        damaged(path, error, REMEDY)
    return recipe


def same_recipe(folder: Path, recipe: Recipe) -> None:
    """Raise a ValueError that names the fields in which a run that is to be resumed differs from a recipe."""
    before, now = recipe_of(folder).as_dict(), recipe.as_dict()
    changed = [name for name in now if before.get(name) != now[name] and name not in PLACEMENT]
    if changed:
        got = "; ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in changed)
        raise ValueError(f"resume: expected the recipe of {folder}, got {got}; or choose another --name")


def read_ended(run: Path, recipe: Recipe) -> "tuple[list[dict[str, Any]], Result | None]":
    """The rows of a run and, where it has ended, its result; or a ValueError where a file of them is damaged."""
    rows, result = read_rows(run / "metrics.jsonl"), Result.of(run)
    whole = result is not None and result.status == "finished" and not recipe.training.patience
    if rows and whole and rows[-1]["step"] != recipe.training.steps:
        said = f"expected rows up to step {recipe.training.steps}, got them up to step {rows[-1]['step']}"
        damaged(run / "metrics.jsonl", said, "remove it")
    fingerprint(run)  # that it can be read
    return rows, result


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, without a last one that is still being written; none where there is no file.

    Raises:
        Damaged: Where a line is no row, steps go back, the rows end before the last complete checkpoint, or the run has
            ended and there are none or an unfinished one.
    """
    if not path.exists():
        return []
    ended = (path.parent / RESULT).exists()  # these first: a run that goes on writes its rows before them
    marks = [mark.parent.name.removeprefix("step-") for mark in path.parent.glob("checkpoints/step-*/complete.json")]
    reached = max([int(ended), *(int(step) for step in marks if step.isdecimal())])
    remedy = "remove the line, or the file"
    *lines, last = read_text(path, remedy, ROWS).split("\n")
    rows = [parse_json(line, f"{path}, line {n}", dict[str, float | None], remedy) for n, line in enumerate(lines, 1)]
    steps = [0]
    for n, row in enumerate(rows, 1):
        if wrong := mismatch(row, {"step": int}):
            damaged(f"{path}, line {n}", wrong, remedy)
        steps.append(row["step"])
        if steps[-1] < steps[-2]:
            damaged(f"{path}, line {n}", f"expected a step from {steps[-2]} on, got {steps[-1]}", remedy)
    if last and (ended or not last.startswith(ROW_START[: len(last)])):
        damaged(f"{path}, line {len(lines) + 1}", "expected a row, got the part of one", remedy)
    if steps[-1] < reached:
        got = f"got them up to step {steps[-1]}" if rows else "got none"
        damaged(path, f"expected rows up to step {reached} at least, {got}", "remove it")
    return rows


class Log(AbstractContextManager):
    """metrics.jsonl of a run, to go on with after a step: what it held of later steps is dropped."""

    def __init__(self, folder: Path, step: int = 0):
        path = folder / "metrics.jsonl"
        self.rows = [row for row in read_rows(path) if row["step"] <= step]
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in self.rows))
        self._file = path.open("a", encoding="utf-8")

    def write(self, **row: Any) -> None:
        """Append a row."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Make the rows survive a loss of power."""
        os.fsync(self._file.fileno())

    def __exit__(self, *error: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    status: str  # "finished" or "diverged ..."
    scores: Mapping[str, float | None]  # by titles of the task's metrics: None where there is none
    rate: float  # the task's units a second
    parameters: int  # how many
    choices: Mapping[str, str]  # of the scheme
    laws: str  # whether those of the trained scheme hold

    def save(self, run: Path) -> None:
        """Write it, with which the run counts as ended."""
        write_json(run / RESULT, vars(self))

    @classmethod
    def of(cls, run: Path) -> "Result | None":
        """That of a run, if it has ended; or a ValueError where the file is damaged."""

        def change(found: dict[str, Any]) -> dict[str, Any]:
            if "bits_per_byte" in found:
                bits, found["rate"] = found.pop("bits_per_byte"), found.pop("tokens_per_second")
                found["scores"] = {title: bits[multiple] for multiple, title in LENGTHS.items()}
            return found

        remedy = "remove it, and train --resume makes it again"
        if not (run / RESULT).exists():
            return None
        scores = {metric.title: float | None for metric in recipe_of(run).task.metrics}
        choices = dict.fromkeys(("attention", "feature_map", "decay", "denominator"), str)
        kinds = get_type_hints(cls) | {"scores": scores, "choices": choices}
        found = read_json(run / RESULT, kinds, remedy, change)
        if not found["status"].startswith(("finished", "diverged")):
            damaged(run / RESULT, f"status: expected finished or diverged, got {found['status']!r}", remedy)
        return cls(**{name: found[name] for name in kinds})


def fingerprint(run: Path) -> str:
    """The sha256 of the data that a run was trained on, or nothing."""
    for path, kinds in ((run / "data.json", {"name": str, "sha256": str}), (run / "text.json", {"sha256": str})):
        if path.exists():
            remedy = "remove it, and the data of this run is no longer compared"
            sha256 = read_json(path, kinds, remedy)["sha256"]
            if not sha256:
                damaged(path, "sha256: expected that of the data, got an empty text", remedy)
            return sha256
    return ""
