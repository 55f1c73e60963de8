"""Tasks whose samples have positions of certain groups, with models from `isopos.models`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from isopos.lab.tasks.task import Recipe, Task, require
from isopos.spec import of_layers, split_spec


@dataclass(frozen=True)
class PositionedTask(Task):
    """A task that declares the positions of its samples; nothing here imports torch before a method is called."""

    groups: ClassVar[tuple[str, ...]] = ("Line", "Product")  # classes of `isopos.positions`
    axes: ClassVar[int] = 2  # largest number of axes of a grid, which Product means; 0: any product
    where: ClassVar[str] = ""  # the same in words: "on a line, which text has"
    bound: ClassVar[tuple[str, str]] = ("longest", "leaves longer ones out")
    """The field that limits the length of samples, and the effect of a smaller value."""
    columns: ClassVar[tuple[str, ...]] = ()  # fields about the columns of --data

    @property
    def fits(self) -> dict[str, object]:
        longest = getattr(self, self.bound[0], 0)
        known = {"length": longest, "reach": longest, "branches": getattr(self, "branches", 0)}
        return {name: value for name, value in known.items() if value}

    def check(self, recipe: Recipe) -> Sequence[str]:
        self.check_columns()
        self.check_groups(recipe)
        return super().check(recipe)

    def check_columns(self) -> None:
        """Raise a ValueError for a field about columns if there are none."""
        for name in self.columns if not getattr(self, "data", "") else ():
            value, usual = getattr(self, name), getattr(type(self), name)
            require(name, repr(value), f"{usual!r} without --data, which has columns", value == usual)

    def check_groups(self, recipe: Recipe) -> Any:
        """The scheme of a recipe (see `build.build_scheme`), after checks that it fits the samples.

        Raises:
            ValueError: If the scheme has positions of another kind, or too few.
        """
        from isopos import positions
        from isopos.lab.tasks.build import build_scheme

        scheme, field, remedy = build_scheme(recipe), *self.bound
        group, longest, length = scheme.group, scheme.max_length, getattr(self, field, 0)
        axes = self.axes if "Product" in self.groups else 0
        kinds = tuple(getattr(positions, name) for name in self.groups)
        if not isinstance(group, kinds) or (axes and not (group.is_grid and group.columns <= axes)):
            name = split_spec(of_layers(recipe.scheme)[0])[0]
            raise ValueError(
                f"schemes: expected positions {self.where}, but {recipe.scheme} takes positions of a {group.noun}; "
                f"use isopos.{name.replace('-', '_')} in a model of such data; isopos show {name} draws it"
            )
        if longest is not None and longest < length:
            raise ValueError(
                f"{field}: expected at most {longest}, for which {recipe.scheme} has positions, got {length}; "
                f"--{field} {longest} {remedy}"
            )
        if isinstance(group, positions.Tree) and group.branches < (branches := getattr(self, "branches", 0)):
            raise ValueError(
                f"branches: expected at most the {group.branches} of {recipe.scheme}, got trees with {branches}"
            )
        return scheme

    def build(self, recipe: Recipe, kind: str, *first: int, **options: Any) -> Any:
        """A model of `isopos.models` with the sizes and the scheme of a recipe; see `build.build_model`."""
        from isopos import models
        from isopos.lab.tasks.build import build_model

        return build_model(recipe, getattr(models, kind), *first, **options)
