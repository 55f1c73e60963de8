"""Weights of a run: checkpoints during training, and the final weights.

A checkpoint is a new folder, flushed to disk and then marked complete in one step. A kill or a full disk during writing
leaves earlier checkpoints unchanged. A checkpoint without its mark is ignored; one whose content differs from its mark is
refused. Only tensors and plain values are unpickled. The final weights are a safetensors file.
"""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model

from isopos.catalog import NotImported
from isopos.lab.recipes import Recipe
from isopos.lab.runs.files import Damaged, check_plain, damaged, flush_folder, mismatch, read_json, replacing, write_json
from isopos.lab.runs.folders import OF_MODULES, REMEDY, read_recipe

KEEP = 2  # latest checkpoints kept, in addition to the best
STATE, MARK, WEIGHTS = "state.pt", "complete.json", "model.safetensors"
MARKED = {"step": int, "sha256": str, "validation": float | None, "better": Literal["lower", "higher"], "ended": bool}


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    step: int  # number of updates
    validation: float | None  # the main metric, if it was validated
    better: str  # which values are better: "lower" or "higher"
    ended: bool  # whether training ended here


def complete(run: Path) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first; ValueError if a mark is damaged."""
    checkpoints = []
    for mark in (run / "checkpoints").glob(f"step-*/{MARK}"):
        remedy = f"remove {mark.parent} to go on without it"
        values = _read_mark(mark, remedy)
        if values["validation"] is not None and not math.isfinite(values["validation"]):
            damaged(mark, f"validation: expected a finite number, got {values['validation']}", remedy)
        checkpoints.append(Checkpoint(mark.parent, *(values[name] for name in Checkpoint._fields[1:])))
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.folder))


def _read_mark(mark: Path, remedy: str) -> dict[str, Any]:
    return read_json(mark, MARKED, remedy, lambda values: {"better": "lower"} | values)


def newest(run: Path) -> Checkpoint | None:
    """The last complete checkpoint of a run; None if there is none."""
    return next(reversed(complete(run)), None)


def best(run: Path) -> Checkpoint | None:
    """The complete checkpoint with the best validation, the first of equals; None if none was validated."""
    validated = [(item.validation, item) for item in complete(run) if item.validation is not None]
    signed = [(value if item.better == "lower" else -value, item.step, item) for value, item in validated]
    return min(signed)[-1] if signed else None


def save_checkpoint(
    run: Path,
    state: Mapping[str, Any],
    step: int,
    validation: float | None = None,
    better: str = "lower",
    ended: bool = False,
) -> Path:
    """Write a checkpoint of tensors and plain values, then remove older ones except the best and the latest.

    Raises:
        OSError: If it cannot be written; earlier checkpoints are unchanged.
    """
    folder = run / "checkpoints" / f"step-{step:08d}"
    last = newest(run)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with (folder / STATE).open("w+b") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        mark = {"step": step, "sha256": digest, "validation": validation, "better": better, "ended": ended}
        write_json(folder / MARK, mark)
        flush_folder(folder.parent)
    except (OSError, RuntimeError) as error:  # PyTorch's writer raises RuntimeError
        shutil.rmtree(folder, ignore_errors=True)
        remedy = f"{last.folder} is complete: make room and continue from it with --resume" if last else "make room"
        raise OSError(f"checkpoint: cannot write {folder}: {error}; {remedy}") from None
    _prune(run)
    return folder


def _prune(run: Path) -> None:
    needed = {checkpoint.folder for checkpoint in (*complete(run)[-KEEP:], best(run)) if checkpoint}
    for folder in (run / "checkpoints").glob("step-*"):
        if folder not in needed and folder.is_dir():
            (folder / MARK).unlink(missing_ok=True)  # first, so that a partly removed checkpoint is not complete
            shutil.rmtree(folder, ignore_errors=True)


def read_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the content of a checkpoint onto the CPU.

    Raises:
        ValueError: If it is damaged; the message names it and the previous one.
    """
    run, path = checkpoint.folder.parent.parent, checkpoint.folder / STATE
    before = [other for other in complete(run) if other.step < checkpoint.step]
    where = f"from step {before[-1].step}, {before[-1].folder}" if before else "from the start"
    remedy = f"remove {checkpoint.folder}, and --resume goes on {where}"
    try:
        check_plain(path)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != _read_mark(checkpoint.folder / MARK, remedy)["sha256"]:
                raise ValueError("its content is not what was written")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Damaged:
        raise
    except Exception as error:  # PyTorch may raise anything for a damaged file
        pickled = isinstance(error, UnpicklingError)
        damaged(path, "it holds more than tensors and plain values" if pickled else error, remedy)
    kinds = {"model": dict[str, torch.Tensor], "optimizer": dict, "best": list[float], "step": Literal[checkpoint.step]}
    if wrong := mismatch(state, kinds) or _not_finite(state["model"]):
        damaged(path, wrong, remedy)
    return state


def load_checkpoint(model: Any, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into a model; ValueError if it is damaged or of another model."""
    try:
        model.load_state_dict(read_content(checkpoint)["model"])
    except RuntimeError as error:
        damaged(checkpoint.folder / STATE, error, f"remove {checkpoint.folder} to go on without it")


def _not_finite(weights: Mapping[str, torch.Tensor]) -> str:
    """Name a weight with a NaN or an infinity, in a message; empty if there is none."""
    wrong = (name for name, value in weights.items() if value.is_floating_point() and not value.isfinite().all())
    return next((f"{name}: expected finite weights" for name in wrong), "")


def load_run(folder: Path) -> tuple[Recipe, Any]:
    """Load the recipe and the trained model of a run, on the CPU.

    Raises:
        ValueError: If the folder holds no run, or one without final weights.
    """
    recipe, model = untrained_model(folder)
    weights = folder / WEIGHTS
    if not weights.exists():
        raise ValueError(
            f"run: expected {weights}, which are written when a run ends; continue it by its command with --resume"
        )
    read_weights(model, weights)
    return recipe, model.eval()


def warm_start(model: Any, run: Path, reinitialised: tuple[str, ...] = ("head.",)) -> None:
    """Load the final weights of another run into a model, except those whose names start with `reinitialised`.

    Raises:
        ValueError: If the run has no weights, or their names or shapes differ.
    """
    weights = {name: value for name, value in load_run(run)[1].state_dict().items() if not name.startswith(reinitialised)}
    unmatched = sorted(name for name in {*model.state_dict()} ^ {*weights} if not name.startswith(reinitialised))
    try:
        if unmatched:
            raise RuntimeError(f"{unmatched[0]} is in one of the two models only")
        model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"start: expected weights of the model's shapes in {run}, got others: {reason}; choose another run"
        ) from None


def untrained_model(folder: Path) -> tuple[Recipe, Any]:
    """Read the recipe of a run and build its untrained model, on the CPU.

    Raises:
        ValueError: If the folder holds no run, or one whose model this version cannot build.
    """
    recipe = read_recipe(folder).edit(device="cpu")
    try:
        return recipe, recipe.task.model(recipe)
    except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        damaged(folder / "recipe.json", error, OF_MODULES if isinstance(error, NotImported) else REMEDY)


def save_weights(model: Any, folder: Path) -> None:
    """Write the final weights of a run; OSError if they cannot be written."""
    path = folder / WEIGHTS
    try:
        with replacing(path) as part:
            part.touch()
            mode = part.stat().st_mode  # the mode of the run's other files, which safetensors changes
            save_model(model, str(part), metadata={"sha256": _digest(model)})
            part.chmod(stat.S_IMODE(mode))
            _sort_metadata(part)
    except (SafetensorError, OSError) as error:
        last = newest(folder)
        remedy = f"make room and continue from {last.folder} with --resume" if last else "make room"
        raise OSError(f"weights: cannot write {path}: {error}; {remedy}") from None


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, whose order differs between processes; the tensors are unchanged."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def read_weights(model: Any, path: Path) -> None:
    """Load a file of weights into a model; ValueError if it is damaged or of another model."""
    remedy = f"put it right, or remove it, and the command of {path.parent} writes it again with --resume"
    try:
        check_plain(path)
        with safe_open(str(path), "pt") as file:
            digest = (file.metadata() or {}).get("sha256")
        load_model(model, str(path))
    except OSError as error:
        damaged(path, error, remedy)
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        if ' "scheme.' in str(error):
            remedy = f"if a default of its scheme has changed, name the option in recipe.json, or {remedy}"
        damaged(path, f"expected the weights of this run's model, got: {error}", remedy)
    if wrong := _not_finite(dict(model.named_parameters())):
        damaged(path, wrong, remedy)
    if digest is not None and digest != _digest(model):
        damaged(path, "its content is not what was written", remedy)


def _digest(model: Any) -> str:
    """The sha256 of a model's tensors, in order of their names."""
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()
