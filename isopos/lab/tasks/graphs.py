"""Graphs: how many steps apart are two marked nodes? From positions alone, since all other tokens are equal."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data import graphs
from isopos.lab.data.arrays import Arrays
from isopos.lab.data.prepare import progress_bars
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled, classifier_metrics
from isopos.lab.tasks.task import Recipe, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor


@dataclass(frozen=True)
class GraphDistance(PositionedTask):
    """A classifier of graphs by the distance of two marked nodes in steps.

    The scheme determines the positions of nodes: the graph's lowest eigenvectors, as many as the scheme has axes, or numbers
    of nodes, which say nothing. The tokens are the same.
    """

    data: str = ""
    """A file of edges, two numbers of nodes per line, of a large graph whose connected parts are drawn; empty: points of a
    square, joined to the nearest ones. See docs/data.md."""
    vertices: int = 24  # Nodes of a graph, a token each.
    farthest: int = 8  # Largest distance; larger ones count as it. It is the number of classes.
    graphs: int = 6000  # Number of graphs; a tenth each for validation and test.
    validation_rows: int = 0  # Largest number of held-out graphs that are scored; 0: all.

    name = "graphs"
    schemes = "none,rope,rope-mixed:axes=8,wire"
    edits = MappingProxyType({"steps": 600, "batch": 64, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "graphs"
    counted = "graphs"
    limits = (("vertices", 4, 4096), ("farthest", 2, 100), ("graphs", 20, 10**7), ("validation_rows", 0, 10**9))
    axes, where, bound = 0, "on a line or on a grid, whose axes are eigenvectors of a graph", ("vertices", "fits")
    metrics = classifier_metrics("held-out graphs", "whose distance is found")

    def setting(self, recipe: Recipe) -> str:
        return f"A classifier of graphs of {self.vertices} nodes by the distance of two of them."

    def check_groups(self, recipe: Recipe) -> Any:
        scheme = super().check_groups(recipe)
        group, axes = scheme.group, scheme.group.columns
        require("schemes", recipe.scheme, f"positions {self.where}", axes == 1 or group.is_grid)
        require("farthest", self.farthest, f"less than the {self.vertices} nodes", self.farthest < self.vertices)
        require("vertices", self.vertices, f"more than the {axes} axes of {recipe.scheme}", self.vertices > axes)
        return scheme

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Classifier", 2, self.farthest)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "GraphSamples":
        tenth = self.graphs // 10
        counts = (self.graphs - 2 * tenth, tenth, tenth)
        large = graphs.read_parts(self.data, self.vertices) if self.data else ()
        with progress_bars(console) as progressing:
            arrays = graphs.prepare(0, counts, self.vertices, self.vertices - 1, self.farthest, progressing, large)
        return GraphSamples(self, arrays)


class GraphSamples(Labelled):
    """Graphs with two marked nodes, for training and evaluation."""

    def __init__(self, task: GraphDistance, arrays: Arrays):
        self.task, self.arrays, self.sha256, self.limit = task, arrays, arrays.sha256, task.validation_rows
        labels = {split: arrays[f"{split}-labels"] for split in ("train", "validation", "test")}
        self.sizes = {split: np.full(len(rows), task.vertices) for split, rows in labels.items()}
        self.name = task.data or "points of a square and their neighbours, drawn"
        self.summary = f"{' + '.join(str(len(rows)) for rows in labels.values())} graphs of {task.vertices} nodes"

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, 1 at marked nodes; eigenvectors ``[b t c]``, or numbers of nodes ``[t 1]``; classes ``[b]``."""
        import torch

        from isopos.lab.tasks.build import group_of
        from isopos.positions import sequence

        columns, nodes = group_of(recipe).columns, self.task.vertices
        tokens = torch.zeros(len(rows), nodes, dtype=torch.int64)
        tokens.scatter_(1, torch.from_numpy(self.arrays[f"{split}-pairs"][rows].astype(np.int64)), 1)
        vectors = torch.from_numpy(np.array(self.arrays[f"{split}-vectors"][rows][..., :columns]))
        positions = sequence(nodes) if columns == 1 else vectors
        return tokens, positions, torch.from_numpy(self.labels(split)[rows].astype(np.int64))
