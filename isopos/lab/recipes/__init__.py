"""Recipes of runs: functions of a scale that return complete recipes, one file per task. No torch here."""

import importlib
from collections.abc import Callable

from isopos.catalog import expect
from isopos.deprecation import renamed
from isopos.lab.tasks.task import PLACEMENT, SCALES, TASKS, Model, Recipe, Training, find

__all__ = ["PLACEMENT", "RECIPES", "SCALES", "Model", "Recipe", "Training", "preset", "recipe_function"]

GRAMMAR = ("join_spec", "map_spec", "of_layers", "parse_schemes", "split_spec")
__getattr__ = renamed(__name__, {name: f"isopos.spec.{name}" for name in GRAMMAR})

FUNCTIONS = {
    "language": ("quickstart", "lrpe_alm", "permuteformer_lm"),
    "masked": ("lrpe_blm", "lrpe_glue"),
    "listops": ("listops",),
    "arena": (
        *("lra_text", "lra_listops", "lra_retrieval", "lra_pathfinder"),
        *(f"permuteformer_{task}" for task in ("text", "retrieval", "pathfinder", "image")),
    ),
    "images": ("cct", "deit"),
    "transduction": ("transduction", "tree_transduction"),
}
RECIPES = {name.replace("_", "-"): f"{file}:{name}" for file, names in FUNCTIONS.items() for name in names}
"""Each recipe's file in this folder and its function, which takes a scale."""


def preset(name: str, scale: str) -> Recipe:
    """The recipe of a name in `RECIPES`; or the default recipe of a task, by its name or MODULE:NAME."""
    if name in RECIPES:
        return recipe_function(name)(scale)
    if name not in TASKS and ":" not in name:
        expect("recipe", name, (*RECIPES, "MODULE:NAME of a task"))
    task = find(name)()
    return Recipe(task=task).edit(**task.edits)


def recipe_function(name: str) -> Callable[[str], Recipe]:
    """The function of a recipe by its name in `RECIPES`."""
    module, _, function = RECIPES[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)
