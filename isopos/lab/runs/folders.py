"""Run folders: recipe.json, metrics.jsonl, result.json, each written so that a kill at any moment leaves a complete file.

A run with a result.json has ended. Results of language models in an older format can also be read.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from isopos.catalog import NotImported
from isopos.lab.recipes import PLACEMENT, Recipe
from isopos.lab.runs.files import damaged, mismatch, parse_json, read_json, read_text, write_json, write_text

RESULT, EXAMPLES = "result.json", "examples.json"
MAX_ROWS_BYTES = 1 << 30  # of metrics.jsonl
ROW_START = '{"step": '  # first characters of each row
REMEDY = "put it right, or remove this run and train it again"
OF_MODULES = "start in the folder that holds the module, or install it"
LENGTHS = {"1": "bits/byte", "2": "at 2x", "4": "at 4x"}  # titles of scores in the older format


class Interrupted(KeyboardInterrupt):
    """A signal ended a run, which can be resumed; `code` is the exit status."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.code = 128 + signal


def run_folder(name: str) -> Path:
    """The folder runs/NAME; ValueError unless the name is a single folder, and not a hidden one."""
    if Path(name).name != name or not name.strip() or name.startswith("."):
        raise ValueError(f"name: expected the name of one folder under runs/, got {name!r}")
    return Path("runs") / name


def check_vacant(folder: Path, *, overwrite: bool = False) -> None:
    """Raise a ValueError if a new run cannot use the folder: it exists without `overwrite`, or holds no run."""
    if not folder.exists():
        restore(folder)  # after a kill during its replacement
    if folder.exists() and not overwrite:
        raise ValueError(
            f"name: {folder} exists; continue it by --resume, replace it by --overwrite, or choose another --name"
        )
    if folder.exists() and not (folder / "recipe.json").exists():
        raise ValueError(f"overwrite: {folder} holds no run; remove it yourself or choose another --name")


def create(folder: Path, recipe: Recipe, *, overwrite: bool = False) -> None:
    """Make the folder of a new run with its recipe.json, both or neither; a run that it replaces is moved aside.

    Raises:
        ValueError: If it exists without `overwrite`, holds no run, or cannot be written.
    """
    check_vacant(folder, overwrite=overwrite)
    start_folder(folder, "recipe.json", recipe.as_dict())


def start_folder(folder: Path, file: str, content: object) -> None:
    """Make a folder with its first file, both or neither; an existing folder is moved aside.

    A folder that an earlier kill left aside is restored first. `restore` undoes the replacement;
    `remove_folder(aside_path(folder))` completes it.
    """
    new = folder.with_name(f".{folder.name}.new")
    try:
        remove_folder(new)
        new.mkdir(parents=True)
        write_json(new / file, content)
        restore(folder)
        if folder.exists():
            folder.rename(aside_path(folder))
        new.rename(folder)
    except OSError as error:
        raise ValueError(f"name: cannot write {folder}: {error.strerror}") from None


def aside_path(folder: Path) -> Path:
    """Path of a folder, complete, while another replaces it."""
    return folder.with_name(f".{folder.name}.replaced")


def restore(folder: Path) -> bool:
    """Move a replaced folder back in place of its replacement; return whether there was one."""
    if exists := aside_path(folder).exists():
        remove_folder(folder)
        aside_path(folder).rename(folder)
    return exists


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists; a kill leaves it complete or removed."""
    removed = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.exists():
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which gets this name if the context ends without an error, and is removed otherwise."""
    part = folder.with_name(f".{folder.name}.new")
    remove_folder(part)  # of a killed process
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(folder)
    except BaseException:
        remove_folder(part)
        raise


def read_recipe(folder: Path) -> Recipe:
    """Read the recipe of a run; ValueError if the folder holds none, or one with other fields."""
    path = folder / "recipe.json"
    try:
        values = read_json(path, dict[str, Any], REMEDY)
    except OSError:
        runs = sorted(str(path.parent) for path in folder.glob("*/recipe.json"))
        remedy = f"it holds {', '.join(runs)}" if runs else "isopos runs lists the runs under runs/"
        raise ValueError(f"run: expected a folder with a recipe.json, got {folder}; {remedy}") from None
    try:
        recipe = Recipe.from_dict(values)
        recipe.check()
    except ValueError as error:
        damaged(path, error, OF_MODULES if isinstance(error, NotImported) else REMEDY)
    return recipe


def check_same_recipe(folder: Path, recipe: Recipe, remedy: str = "choose another --name") -> None:
    """Raise a ValueError that names the fields in which a run to resume differs from a recipe."""
    before, now = read_recipe(folder).as_dict(), recipe.as_dict()
    changed = [name for name in now if before.get(name) != now[name] and name not in PLACEMENT]
    if changed:
        got = "; ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in changed)
        raise ValueError(f"resume: expected the recipe of {folder}, got {got}; or {remedy}")


def read_run(run: Path, recipe: Recipe) -> "tuple[list[dict[str, Any]], Result | None]":
    """Read the rows and the result of a run, None if it has not ended; ValueError if a file is damaged."""
    result, rows = Result.read(run), read_rows(run / "metrics.jsonl")  # in this order, which a run that ends now needs
    all_steps = result is not None and result.status == "finished" and not recipe.training.patience
    if rows and all_steps and rows[-1]["step"] != recipe.training.steps:
        reason = f"expected rows up to step {recipe.training.steps}, got rows up to step {rows[-1]['step']}"
        damaged(run / "metrics.jsonl", reason, "remove it")
    data_fingerprint(run)  # raises if data.json is damaged
    return rows, result


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl, without a last row that is being written; empty if there is no file.

    Raises:
        Damaged: If a line is no row, steps decrease, the rows end before the last complete checkpoint, or the run has
            ended and there are no rows or an incomplete one.
    """
    if not path.exists():
        return []
    ended = (path.parent / RESULT).exists()  # read before the rows, which a running process writes first
    checkpoints = [mark.parent.name.removeprefix("step-") for mark in path.parent.glob("checkpoints/step-*/complete.json")]
    reached = max([int(ended), *(int(step) for step in checkpoints if step.isdecimal())])
    remedy = "remove the line, or the file"
    *lines, last = read_text(path, remedy, MAX_ROWS_BYTES).split("\n")
    rows = [parse_json(line, f"{path}, line {n}", dict[str, float | None], remedy) for n, line in enumerate(lines, 1)]
    steps = [0]
    for n, row in enumerate(rows, 1):
        if wrong := mismatch(row, {"step": int}):
            damaged(f"{path}, line {n}", wrong, remedy)
        steps.append(row["step"])
        if steps[-1] < steps[-2]:
            damaged(f"{path}, line {n}", f"expected a step from {steps[-2]} on, got {steps[-1]}", remedy)
    if last and (ended or not last.startswith(ROW_START[: len(last)])):
        damaged(f"{path}, line {len(lines) + 1}", "expected a row, got a part of one", remedy)
    if steps[-1] < reached:
        got = f"got rows up to step {steps[-1]}" if rows else "got none"
        damaged(path, f"expected rows up to step {reached} at least, {got}", "remove it")
    return rows


class Log(AbstractContextManager):
    """Writer of metrics.jsonl that continues after a step; rows of later steps are dropped."""

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
        """Flush the rows to disk."""
        os.fsync(self._file.fileno())

    def __exit__(self, *error: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Result:
    """Result of a run."""

    status: str  # "finished" or "diverged ..."
    scores: Mapping[str, float | None]  # by titles of the task's metrics; None where a metric has no value
    rate: float  # the task's units per second
    parameters: int  # number of parameters
    choices: Mapping[str, str]  # the scheme's attention, feature map, decay and denominator
    laws: str  # whether the laws of the trained scheme hold

    def save(self, run: Path) -> None:
        """Write result.json, after which the run has ended."""
        write_json(run / RESULT, vars(self))

    @classmethod
    def read(cls, run: Path) -> "Result | None":
        """Read the result of a run; None if it has not ended; ValueError if the file is damaged."""

        def convert(values: dict[str, Any]) -> dict[str, Any]:
            if "bits_per_byte" in values:
                bits, values["rate"] = values.pop("bits_per_byte"), values.pop("tokens_per_second")
                values["scores"] = {title: bits[multiple] for multiple, title in LENGTHS.items()}
            return values

        remedy = "remove it, and the command of the run writes it again with --resume"
        if not (run / RESULT).exists():
            return None
        scores = {metric.title: float | None for metric in read_recipe(run).task.metrics}
        choices = dict.fromkeys(("attention", "feature_map", "decay", "denominator"), str)
        kinds = get_type_hints(cls) | {"scores": scores, "choices": choices}
        values = read_json(run / RESULT, kinds, remedy, convert)
        if not values["status"].startswith(("finished", "diverged")):
            damaged(run / RESULT, f"status: expected finished or diverged, got {values['status']!r}", remedy)
        return cls(**{name: values[name] for name in kinds})


def data_fingerprint(run: Path) -> str:
    """The sha256 of the data that a run was trained on; empty if unknown."""
    for path, kinds in ((run / "data.json", {"name": str, "sha256": str}), (run / "text.json", {"sha256": str})):
        if path.exists():
            remedy = "remove it, and the data of this run is no longer compared"
            sha256 = read_json(path, kinds, remedy)["sha256"]
            if not sha256:
                damaged(path, "sha256: expected the hash of the data, got an empty text", remedy)
            return sha256
    return ""
