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
from typing import Any

from isopos.lab.recipes import PLACEMENT, Recipe
from isopos.lab.runs.files import write_json, write_text

__all__ = [
    "EXAMPLES",
    "Interrupted",
    "Log",
    "Result",
    "check_vacant",
    "create",
    "fingerprint",
    "read_rows",
    "recipe_of",
    "run_place",
    "same_recipe",
]

RESULT, EXAMPLES = "result.json", "examples.json"
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
    """Raise a ValueError where a run cannot have the folder: it exists, and is not to be replaced or no run."""
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
    new, old = (folder.with_name(f".{folder.name}.{state}") for state in ("new", "replaced"))
    check_vacant(folder, overwrite=overwrite)
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir(parents=True)
        write_json(new / "recipe.json", recipe.as_dict())
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ValueError(f"name: cannot write {folder}: {error.strerror}") from None


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run, or a ValueError where the folder holds none, or one of other fields."""
    path = folder / "recipe.json"
    try:
        return Recipe.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        runs = sorted(str(path.parent) for path in folder.glob("*/recipe.json"))
        remedy = f"it holds {', '.join(runs)}" if runs else "isopos runs lists those under runs/"
        raise ValueError(f"run: expected a folder with a recipe.json, got {folder}; {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def same_recipe(folder: Path, recipe: Recipe) -> None:
    """Raise a ValueError that names the fields in which a run that is to be resumed differs from a recipe."""
    before, now = recipe_of(folder).as_dict(), recipe.as_dict()
    changed = [name for name in now if before.get(name) != now[name] and name not in PLACEMENT]
    if changed:
        got = "; ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in changed)
        raise ValueError(f"resume: expected the recipe of {folder}, got {got}; or choose another --name")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a last one that is still being written; none where there is no file."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


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
        path = run / RESULT
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            if "bits_per_byte" in found:
                bits, found["rate"] = found.pop("bits_per_byte"), found.pop("tokens_per_second")
                found["scores"] = {title: bits[multiple] for multiple, title in LENGTHS.items()}
            return cls(**found)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from None


def fingerprint(run: Path) -> str:
    """The sha256 of the data that a run was trained on, or nothing."""
    for path in (run / "data.json", run / "text.json"):
        if path.exists():
            return json.loads(path.read_text())["sha256"]
    return ""
