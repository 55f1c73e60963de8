"""The weights of a run, from safetensors and recipe.json: nothing is unpickled, and no data is looked at."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_model

from isopos.lab.recipes import Recipe
from isopos.lab.runs.folders import recipe_of

__all__ = ["FILE", "load", "load_run"]

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
    load_model(model, str(weights))
    return recipe, model.eval()


def load(run: str | Path) -> Any:
    """The trained model of a run, as `load_run` finds it: on the CPU, in evaluation mode."""
    return load_run(Path(run))[1]
