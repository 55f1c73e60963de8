"""What is checked before any work: the numbers of a recipe, its task, device and logger, and the name of its folder."""

import importlib.util
from pathlib import Path

import torch

from isopos.lab.recipes import Recipe

__all__ = ["check_recipe", "run_place", "usable_device"]


def run_place(name: str) -> Path:
    """runs/NAME, or a ValueError where the name is not that of one folder."""
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"name: expected the name of one folder under runs/, got {name!r}")
    return Path("runs") / name


def usable_device(device: str) -> str:
    """The device, where auto is a GPU if there is one; or a ValueError where this torch cannot compute on it here."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        usable = torch.zeros(1, device=device).item() == 0
    except (RuntimeError, AssertionError):
        usable = False
    if not usable or torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or auto, got {device!r}, which this torch cannot use here")
    return device


def check_recipe(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with its device, and what a reader of its results should know before.

    Raises:
        ValueError: Where a number, the task, the device or the logger does not fit.
    """
    recipe.check()
    recipe = recipe.edit(device=usable_device(recipe.training.device))
    t = recipe.training
    device = torch.device(t.device)
    there = 1 if device.index is not None else torch.cuda.device_count()
    if device.type == "cuda" and t.devices > there:
        raise ValueError(f"devices: expected at most the {there} of {t.device}, got {t.devices}")
    if t.logger == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logger: expected tensorboard, which is not installed: pip install tensorboard, or choose csv")
    return recipe, list(recipe.task.check(recipe))
