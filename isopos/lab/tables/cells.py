"""The folder of a table, and its cells: one run each, of a row, a corpus and a seed, that may fill several columns."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isopos.lab.recipes import Recipe
from isopos.lab.tasks.task import Metric

__all__ = ["SCORES", "TIMING", "Cell", "cell_name", "speed_rounds"]

SCORES, TIMING = "scores.json", "timing.json"


@dataclass(frozen=True)
class Cell:
    """One run: its place, its recipe, and what the columns that it fills show."""

    folder: Path
    corpus: str
    recipe: Recipe
    metrics: Sequence[Metric]

    @property
    def claim(self) -> Path:
        """The file that says who computes it."""
        return self.folder.parent.parent / "claims" / f"{self.folder.name}.claim"

    @property
    def done(self) -> bool:
        """Whether it has its scores."""
        return (self.folder / SCORES).exists()


def cell_name(corpus: str, scheme: str, seed: int) -> str:
    """The folder of a cell, in characters that every file system takes.

    Example:
        >>> cell_name("books", "rope:attention=softmax", 0), cell_name("", "rope", 1)
        ('books-rope+attention=softmax-seed0', 'rope-seed1')
    """
    return f"{corpus}-{scheme}-seed{seed}".replace(":", "+").removeprefix("-")


def speed_rounds(folder: Path) -> list[dict[str, float]]:
    """Seconds of a training step by row, in each round so far."""
    path = folder / TIMING
    return json.loads(path.read_text()) if path.exists() else []
