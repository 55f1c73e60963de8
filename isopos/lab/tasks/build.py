"""What tasks build their models from: the scheme of a recipe, and the random numbers of its seed."""

import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from isopos.encodings import Permutation
from isopos.lab.runs.files import read_json
from isopos.lab.tasks.attentions import OTHERS, check_other, replace_attention
from isopos.lab.tasks.task import Recipe, Task, require
from isopos.models import TOKEN_STD, PerLayer
from isopos.positions import Group, Tree
from isopos.schemes import Scheme, build
from isopos.spec import of_layers, split_spec

__all__ = ["begun", "build_model", "build_scheme", "check_group", "group_of", "memory", "repeated_positions", "scheme_of"]

Built = TypeVar("Built")
WEIGHTS = "model.safetensors"  # which a run has when it ends
SAME = ("layers", "model_dim", "heads", "activation", "norm")  # fields of a model that begins with weights of another


def memory() -> float:
    """Bytes of memory of this machine; infinity where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return math.inf


def build_scheme(recipe: Recipe) -> Scheme | PerLayer:
    """The scheme of a recipe, or those of its layers, with the options that fit its samples and seed."""
    specs = of_layers(recipe.scheme)
    made = {spec: _build(recipe, spec) for spec in specs}
    if len(made) == 1:
        return made[specs[0]]
    layers, times = recipe.model.layers, recipe.model.layers // len(specs)
    require("layers", layers, f"a multiple of the {len(specs)} of {recipe.scheme}", layers == times * len(specs))
    for spec, scheme in made.items():
        if (other := scheme.choices["attention"]) in OTHERS:
            raise ValueError(f"schemes: expected attention linear or softmax in some of the layers, got {other} in {spec}")
    return PerLayer([made[spec] for spec in specs * times])


def _build(recipe: Recipe, spec: str) -> Scheme:
    """A scheme of a recipe; its attention may be one of `OTHERS`."""
    m = recipe.model
    require("model_dim", m.model_dim, f"a multiple of the {m.heads} heads", m.model_dim % m.heads == 0)
    name, options = split_spec(spec)
    known, other = {"scale": TOKEN_STD, "seed": recipe.seed, **recipe.task.fits}, options.get("attention", "")
    own = options | {"attention": "softmax"} if other in OTHERS else options
    scheme = build(name, m.model_dim // m.heads, m.heads, own, model=known)
    if other in OTHERS:
        check_other(other, scheme, spec)
        scheme.choices["attention"] = other
    return scheme


def check_group(
    recipe: Recipe,
    kinds: tuple[type[Group], ...],
    where: str,
    *,
    length: int = 0,
    field: str = "longest",
    remedy: str = "leaves longer ones out",
    branches: int = 0,
) -> Scheme | PerLayer:
    """The scheme of a recipe, as of `build_scheme`, after checks that it fits the samples.

    Args:
        recipe: Of the scheme.
        kinds: Groups of positions that samples have.
        where: These in words: "on a line, which text has".
        length: Tokens of the longest sample.
        field: The field of the task that limits these.
        remedy: What a smaller value of the field does.
        branches: Branches of the trees.

    Raises:
        ValueError: Where the scheme has positions of another kind, or too few of them.
    """
    scheme = build_scheme(recipe)
    if not isinstance(scheme.group, kinds):
        name = split_spec(of_layers(recipe.scheme)[0])[0]
        raise ValueError(
            f"schemes: expected positions {where}, but {recipe.scheme} takes those of a {scheme.group.noun}; "
            f"use isopos.{name.replace('-', '_')} in a model of such data; isopos show {name} draws it"
        )
    longest = scheme.max_length
    if longest is not None and longest < length:
        raise ValueError(
            f"{field}: expected at most {longest}, for which {recipe.scheme} has positions, got {length}; "
            f"--{field} {longest} {remedy}"
        )
    if isinstance(scheme.group, Tree) and scheme.group.branches < branches:
        raise ValueError(
            f"branches: expected at most the {scheme.group.branches} of {recipe.scheme}, got trees with {branches}"
        )
    return scheme


def repeated_positions(recipe: Recipe, scheme: Scheme | PerLayer, length: int) -> list[str]:
    """A warning for each permutation of a scheme that repeats within so many positions."""
    return [
        f"{recipe.scheme}: its permutations repeat after {order} positions, fewer than the {length} evaluated"
        for module in scheme.modules()
        if isinstance(module, Permutation) and (order := module.common_order) < length
    ]


def begun(folder: Path, recipe: Recipe, kind: type[Task], also: Sequence[str] = ()) -> Recipe:
    """The recipe of a run of that task which has ended, with whose weights one of another recipe can begin.

    Raises:
        ValueError: Where there is none, or its model has other sizes, or other fields of those that are to be the same, too.
    """
    path = folder / "recipe.json"
    require("start", folder, "the folder of a run", path.exists())
    before = Recipe.from_dict(read_json(path, dict[str, Any], "name another run"))
    require("start", f"one of {type(before.task).__name__}", f"a run of the task {kind.name}", isinstance(before.task, kind))
    require("start", folder, f"a run that has ended, with {WEIGHTS}", (folder / WEIGHTS).exists())

    def shapes(one: Recipe) -> dict[str, Any]:
        values = one.as_dict()
        own = {name: values[name] for name in (*also, *SAME)}
        return own | {"hidden_dim": one.model.hidden_dim or 4 * one.model.model_dim}

    then, now = shapes(before), shapes(recipe)
    if others := [name for name in then if then[name] != now[name]]:
        own = ", ".join(f"{name} {now[name]}" for name in others)
        options = " ".join(f"--{name.replace('_', '-')} {then[name]}" for name in others)
        raise ValueError(f"start: expected a model as that of {folder}, got {own}; give {options}")
    return before


@lru_cache(maxsize=16)
def scheme_of(recipe: Recipe) -> Scheme | PerLayer:
    """What `build_scheme` makes of a recipe, once: to look at, not to train."""
    return build_scheme(recipe)


def group_of(recipe: Recipe) -> Group:
    """Whose positions the scheme of a recipe takes."""
    return scheme_of(recipe).group


def build_model(recipe: Recipe, kind: Callable[..., Built], *first: int, **options: Any) -> Built:
    """A model of the sizes and the scheme of a recipe, whose first sizes and other options are those of the task.

    Its random numbers are those of the seed, so that what models share starts equal; afterwards they are those of before.
    """
    m = recipe.model
    least = 4 * m.model_dim * (first[0] + m.layers * (4 * m.model_dim + 2 * (m.hidden_dim or 4 * m.model_dim)))  # bytes
    require("model_dim", m.model_dim, f"weights that this machine has memory for, not {least >> 30:,} GiB", least < memory())
    scheme = build_scheme(recipe)
    sizes = {name: getattr(m, name) for name in ("activation", "norm", "dropout", "stochastic_depth", "recompute")}
    sizes["hidden_dim"] = m.hidden_dim or None
    if m.attention_dropout and scheme.attention == "softmax":
        sizes["attention_dropout"] = m.attention_dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = kind(*first, m.model_dim, m.layers, scheme, **sizes, **options)
        if (other := scheme.choices["attention"]) in OTHERS:
            replace_attention(model, other, recipe.task.fits.get("length"))
        return model
