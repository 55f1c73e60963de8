"""What is checked before any work: the numbers of a recipe, its scheme, device and logger, and the name of its folder."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from isopos.encodings import Permutation
from isopos.lab.recipes import Recipe, split_spec
from isopos.lab.training.run import LENGTHS, build_model, build_scheme
from isopos.models import AdaptiveHead
from isopos.positions import Line

__all__ = ["check_head", "check_recipe", "run_place", "usable_device"]


def run_place(name: str) -> Path:
    """runs/NAME.

    Raises:
        ValueError: Where the name is not that of one folder.
    """
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"name: expected the name of one folder under runs/, got {name!r}")
    return Path("runs") / name


def usable_device(device: str) -> str:
    """The device, where auto is a GPU if there is one.

    Raises:
        ValueError: Where it is none on which this torch can compute here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        usable = torch.zeros(1, device=device).item() == 0
    except (RuntimeError, AssertionError):
        usable = False
    if not usable or torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or auto, got {device!r}, which this torch cannot use here")
    return device


def check_head(recipe: Recipe) -> None:
    """Raise a ValueError where the cutoffs do not fit a recipe whose vocabulary is known by now."""
    if recipe.cutoffs:
        with torch.device("meta"):
            AdaptiveHead(recipe.model_dim, recipe.vocabulary, recipe.cutoffs)


def check_recipe(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with its device, and what a reader of its results should know before.

    Raises:
        ValueError: Where a number, the scheme, the device or the logger does not fit.
    """
    recipe.check()
    recipe = replace(recipe, device=usable_device(recipe.device))
    device = torch.device(recipe.device)
    there = 1 if device.index is not None else torch.cuda.device_count()
    if device.type == "cuda" and recipe.devices > there:
        raise ValueError(f"devices: expected at most the {there} of {recipe.device}, got {recipe.devices}")
    if recipe.logger == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logger: expected tensorboard, which is not installed: pip install tensorboard, or choose csv")
    scheme = build_scheme(recipe)
    if not isinstance(scheme.group, Line):
        name = split_spec(recipe.scheme)[0]
        raise ValueError(
            f"schemes: expected positions on a line, which text has, but {recipe.scheme} takes those of a "
            f"{scheme.group.noun}; use isopos.{name.replace('-', '_')} in a model of such data; "
            f"isopos show {name} draws it"
        )
    with torch.no_grad():
        small = replace(recipe, vocabulary=0, cutoffs=())  # of no consequence for the scheme
        build_model(small)(torch.zeros(1, recipe.length, dtype=torch.int64, device=recipe.device))
    longest = max(LENGTHS) * recipe.length
    orders = [module.common_order for module in scheme.modules() if isinstance(module, Permutation)]
    return recipe, [
        f"{recipe.scheme}: its permutations repeat after {order} positions, fewer than the {longest} evaluated"
        for order in orders
        if order < longest
    ]
