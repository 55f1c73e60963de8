"""Pathfinder: are two dots in a picture the ends of one dashed path? From pixels on a line or on a grid."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data import pathfinder
from isopos.lab.data.arrays import Arrays
from isopos.lab.data.prepare import progress_bars
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled, classifier_metrics
from isopos.lab.tasks.task import Recipe

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor


GREYS = 256


@dataclass(frozen=True)
class Pathfinder(PositionedTask):
    """A classifier of pictures of dashed paths, drawn after the published description, with one token per pixel.

    The scheme determines whether positions are points of a line or of a grid; the tokens are the same.
    """

    side: int = 24  # Height and width in pixels; 32 and 128 in the Long Range Arena.
    dashes: int = 12  # Dashes of each of the two long paths; 14 in the Arena. With few dashes classes are easy to guess.
    distractors: int = 0  # Number of shorter paths, with a third as many dashes; 5 in the Arena.
    pictures: int = 6000  # Number of pictures; a tenth each for validation and test.
    validation_rows: int = 0  # Largest number of held-out pictures that are scored; 0: all.

    name = "pathfinder"
    schemes = "none,rope,ape-sequence,ape-grid"
    edits = MappingProxyType({"steps": 500, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "pictures"
    counted = "pictures"
    in_shards = True
    limits = (
        ("side", 8, 1024),
        ("dashes", 1, 1000),
        (("distractors", "validation_rows"), 0, 10**9),
        ("pictures", 20, 10**8),
    )
    where = "in a row or on a grid of 2 axes, which pixels have"
    metrics = classifier_metrics("held-out pictures", "classified correctly as connected or not")

    def setting(self, recipe: Recipe) -> str:
        return f"A classifier of pictures of {self.side} x {self.side} pixels, a token each."

    @property
    def fits(self) -> dict[str, object]:
        return {"length": self.side**2, "reach": self.side**2}

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Classifier", GREYS, 2)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "PathfinderSamples":
        tenth = self.pictures // 10
        counts = (self.pictures - 2 * tenth, tenth, tenth)
        with progress_bars(console) as progressing:
            arrays = pathfinder.prepare(0, counts, self.side, self.dashes, self.distractors, progressing)
        return PathfinderSamples(self, arrays)


class PathfinderSamples(Labelled):
    """Pictures for training and evaluation."""

    def __init__(self, task: Pathfinder, arrays: Arrays):
        self.task, self.arrays, self.sha256, self.limit = task, arrays, arrays.sha256, task.validation_rows
        labels = {split: arrays[f"{split}-labels"] for split in ("train", "validation", "test")}
        self.sizes = {split: np.full(len(rows), task.side**2) for split, rows in labels.items()}
        self.name = f"Pathfinder, {task.side} x {task.side}"
        self.summary = f"{' + '.join(str(len(rows)) for rows in labels.values())} pictures, half of them connected"

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b side^2]``, positions ``[side^2 1]`` or ``[side^2 2]``, and classes ``[b]``."""
        import torch

        from isopos.lab.tasks.build import group_of
        from isopos.positions import Line, grid, sequence

        side = self.task.side
        tokens = torch.from_numpy(self.arrays[f"{split}-pictures"][rows].reshape(len(rows), -1).astype(np.int64))
        positions = sequence(side**2) if isinstance(group_of(recipe), Line) else grid(side, side)
        return tokens, positions, torch.from_numpy(self.arrays[f"{split}-labels"][rows])
