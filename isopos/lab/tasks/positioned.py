"""Tasks whose samples have positions of certain groups, with models from `isopos.models`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from isopos.lab.tasks.task import Recipe, Task


@dataclass(frozen=True)
class PositionedTask(Task):
    """A task that declares the positions of its samples; nothing here imports torch before a method is called."""

    groups: ClassVar[tuple[str, ...]] = ()  # classes of `isopos.positions`; Product means a grid of two axes
    where: ClassVar[str] = ""  # the same in words: "on a line, which text has"
    bound: ClassVar[tuple[str, str]] = ("longest", "leaves longer ones out")
    """The field that limits the length of samples, and the effect of a smaller value."""

    @property
    def fits(self) -> dict[str, object]:
        longest = getattr(self, self.bound[0], 0)
        known = {"length": longest, "reach": longest, "branches": getattr(self, "branches", 0)}
        return {name: value for name, value in known.items() if value}

    def check(self, recipe: Recipe) -> Sequence[str]:
        self.check_groups(recipe)
        return super().check(recipe)

    def check_groups(self, recipe: Recipe) -> Any:
        """The scheme of a recipe, after the check that it has positions for the samples; see `build.check_positions`."""
        from isopos import positions
        from isopos.lab.tasks.build import check_positions

        field, remedy = self.bound
        sizes = {"length": getattr(self, field, 0), "branches": getattr(self, "branches", 0)}
        kinds, axes = tuple(getattr(positions, name) for name in self.groups), 2 * ("Product" in self.groups)
        return check_positions(recipe, kinds, self.where, field=field, remedy=remedy, axes=axes, **sizes)

    def build(self, recipe: Recipe, kind: str, *first: int, **options: Any) -> Any:
        """A model of `isopos.models` with the sizes and the scheme of a recipe; see `build.build_model`."""
        from isopos import models
        from isopos.lab.tasks.build import build_model

        return build_model(recipe, getattr(models, kind), *first, **options)
