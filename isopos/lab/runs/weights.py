"""The weights of a run, from safetensors and recipe.json: nothing is unpickled, and no data is looked at."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model

from isopos.lab.recipes import Recipe
from isopos.lab.runs.folders import recipe_of

__all__ = ["FILE", "load", "load_run", "read"]

FILE = "model.safetensors"


def load_run(folder: Path) -> tuple[Recipe, Any]:
    """The recipe and the trained model of a run, on the CPU.

    Raises:
        ValueError: Where the folder holds no run, or one without weights yet.
    """
    recipe = recipe_of(folder).edit(device="cpu")
    weights = folder / FILE
    if not weights.exists():
        raise ValueError(f"run: expected {weights}, which a run has when it ends; go on with it by isopos train --resume")
    model = recipe.task.model(recipe)
    read(model, weights)
    return recipe, model.eval()


def read(model: Any, path: Path) -> None:
    """Give a model the weights in a file; ValueError, which names it, where they are damaged or another model's."""
    try:
        load_model(model, str(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path}: expected the weights of this run's model, got: {error}") from None


def load(run: str | Path) -> Any:
    """The trained model of a run, as `load_run` finds it: on the CPU, in evaluation mode."""
    return load_run(Path(run))[1]
