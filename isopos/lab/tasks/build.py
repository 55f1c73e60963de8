"""Schemes and models of recipes, and the checks that they fit the task."""

import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from isopos.encodings import Permutation
from isopos.lab.runs.files import read_json
from isopos.lab.tasks.attentions import BASELINES, check_baseline, replace_attention
from isopos.lab.tasks.task import SAME, Recipe, Task, require
from isopos.models import TOKEN_STD, PerLayer
from isopos.positions import Group
from isopos.schemes import Scheme, build
from isopos.spec import of_layers, split_spec

Built = TypeVar("Built")
WEIGHTS = "model.safetensors"  # of a finished run


def machine_memory() -> float:
    """Bytes of memory of this machine; infinity if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return math.inf


def build_scheme(recipe: Recipe) -> Scheme | PerLayer:
    """The scheme of a recipe, or one per layer, with options that follow from samples and seed."""
    specs = of_layers(recipe.scheme)
    made = {spec: _build(recipe, spec) for spec in specs}
    if len(made) == 1:
        return made[specs[0]]
    layers, times = recipe.model.layers, recipe.model.layers // len(specs)
    require("layers", layers, f"a multiple of the {len(specs)} of {recipe.scheme}", layers == times * len(specs))
    for spec, scheme in made.items():
        if (other := scheme.choices["attention"]) in BASELINES:
            raise ValueError(f"schemes: expected attention linear or softmax in some of the layers, got {other} in {spec}")
    return PerLayer([made[spec] for spec in specs * times])


def _build(recipe: Recipe, spec: str) -> Scheme:
    """One scheme of a recipe; its attention may be one of `BASELINES`."""
    m = recipe.model
    require("model_dim", m.model_dim, f"a multiple of the {m.heads} heads", m.model_dim % m.heads == 0)
    name, options = split_spec(spec)
    known, other = {"scale": TOKEN_STD, "seed": recipe.seed, **recipe.task.fits}, options.get("attention", "")
    options |= {"attention": "softmax"} if other in BASELINES else {}
    scheme = build(name, m.model_dim // m.heads, m.heads, options, model=known)
    if other in BASELINES:
        check_baseline(other, scheme, spec)
        scheme.choices["attention"] = other
    return scheme


def repeated_positions(recipe: Recipe, scheme: Scheme | PerLayer, length: int) -> list[str]:
    """A warning for each permutation of a scheme that repeats within `length` positions."""
    return [
        f"{recipe.scheme}: its permutations repeat after {order} positions, fewer than the {length} evaluated"
        for module in scheme.modules()
        if isinstance(module, Permutation) and (order := module.common_order) < length
    ]


def warm_start_recipe(folder: Path, recipe: Recipe, kind: type[Task], also: Sequence[str] = ()) -> Recipe:
    """The recipe of a finished run whose weights are the initial weights of another recipe.

    Args:
        also: Names of further fields in which both must agree.

    Raises:
        ValueError: If there is no such run, or its model is different.
    """
    path = folder / "recipe.json"
    require("start", folder, "the folder of a run", path.exists())
    before = Recipe.from_dict(read_json(path, dict[str, Any], "name another run"))
    require("start", f"one of {type(before.task).__name__}", f"a run of the task {kind.name}", isinstance(before.task, kind))
    require("start", folder, f"a run that has ended, with {WEIGHTS}", (folder / WEIGHTS).exists())

    def shapes(one: Recipe) -> dict[str, Any]:
        values = one.as_dict()
        return {name: values[name] for name in (*also, *SAME)} | {
            "hidden_dim": one.model.hidden_dim or 4 * one.model.model_dim
        }

    then, now = shapes(before), shapes(recipe)
    if others := [name for name in then if then[name] != now[name]]:
        got = ", ".join(f"{name} {now[name]}" for name in others)
        options = " ".join(f"--{name.replace('_', '-')} {then[name]}" for name in others)
        raise ValueError(f"start: expected a model as in {folder}, got {got}; give {options}")
    return before


@lru_cache(maxsize=16)
def scheme_of(recipe: Recipe) -> Scheme | PerLayer:
    """`build_scheme`, cached: to read, not to train."""
    return build_scheme(recipe)


def group_of(recipe: Recipe) -> Group:
    """The group of positions of a recipe's scheme."""
    return scheme_of(recipe).group


def build_model(recipe: Recipe, kind: Callable[..., Built], *first: int, **options: Any) -> Built:
    """A model with the sizes and the scheme of a recipe, initialised from its seed.

    The global random state is unchanged.

    Args:
        first: Its first arguments, which the task determines, such as the size of the vocabulary.
        options: Its further arguments.
    """
    m = recipe.model
    least = 4 * m.model_dim * (first[0] + m.layers * (4 * m.model_dim + 2 * (m.hidden_dim or 4 * m.model_dim)))  # bytes
    require(
        "model_dim",
        m.model_dim,
        f"weights that this machine has memory for, not {least >> 30:,} GiB",
        least < machine_memory(),
    )
    scheme = build_scheme(recipe)
    sizes = {name: getattr(m, name) for name in ("activation", "norm", "dropout", "stochastic_depth", "recompute")}
    sizes["hidden_dim"] = m.hidden_dim or None
    if m.attention_dropout and scheme.attention == "softmax":
        sizes["attention_dropout"] = m.attention_dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = kind(*first, m.model_dim, m.layers, scheme, **sizes, **options)
        if (other := scheme.choices["attention"]) in BASELINES:
            replace_attention(model, other, recipe.task.fits.get("length"))
        return model
