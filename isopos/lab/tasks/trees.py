"""Classification of trees: s-expressions, such as parsed sentences, or nested lists."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.runs.files import read_json, write_text
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled, classifier_metrics, majority, on_line_or_tree
from isopos.lab.tasks.task import Recipe, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.lab.data.treebank import TreeDataset

SHOWN = 300  # characters of a tree in a report
WORDS = "words.json"


@dataclass(frozen=True)
class TreeClasses(PositionedTask):
    """A classifier of trees: nodes in preorder, one token per node.

    The scheme determines whether positions are nodes of the tree or points of a line; the tokens are the same.
    """

    data: str = ""
    """A file or a folder: one s-expression per line with its class at the root (as the Stanford Sentiment Treebank), .tsv of
    a label and a tree, .jsonl of {"label": ..., "tree": [nested lists]}, or hf:NAME; empty: random trees of and, or, not.
    Names make the splits."""
    column: str = "tree"  # Column of the tree, in tables with names.
    label: str = "label"  # Column of the class, in tables with names.
    inner: bool = False  # Keep the labels of inner nodes below the root, where the root's label is the class.
    vocabulary: int = 0  # Largest number of tokens; 0: as in the train split.
    classes: int = 0  # Number of classes; 0: as in the data.
    branches: int = 0  # Largest number of children of a node; 0: as in the data.
    longest: int = 0  # Largest number of nodes: larger trees are dropped; 0: none.
    validation_rows: int = 0  # Largest number of held-out trees that are scored; 0: all.

    name = "trees"
    schemes = "none,rope,ape-sequence,shiv-quirk,ape-tree"
    edits = MappingProxyType({"steps": 500, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "trees"
    counted = "trees"
    in_shards = True
    limits = ((("vocabulary", "classes", "branches", "longest", "validation_rows"), 0, 10**9),)
    inferred = ("vocabulary", "classes", "branches", "longest")
    groups, where = ("Line", "Tree"), "in a tree or on a line"
    columns = ("column", "label")
    metrics = classifier_metrics("held-out trees", "whose class is found")

    def setting(self, recipe: Recipe) -> str:
        return f"A classifier of trees of at most {self.longest} nodes and {self.branches} branches."

    def check(self, recipe: Recipe) -> Sequence[str]:
        require("vocabulary", self.vocabulary, "0, or 2 at least", self.vocabulary != 1)
        return super().check(recipe)

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Classifier", self.vocabulary or 256, self.classes or 2)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "LabelledTrees":
        from isopos.lab.data import treebank

        words = read_json(run / WORDS, list[str], "put it right; a run cannot be read without its words") if run else ()
        choice: dict[str, Any] = {"inner": self.inner, "vocabulary": self.vocabulary, "words": words}
        return LabelledTrees(self, treebank.load_trees(self.data, self.column, self.label, **choice, console=console))


class LabelledTrees(Labelled):
    """Trees for training and evaluation."""

    def __init__(self, task: TreeClasses, dataset: "TreeDataset"):
        self.task, self.dataset = task, dataset
        self.name, self.sha256, self.limit = dataset.name, dataset.arrays.sha256, task.validation_rows
        every = {split: dataset.arrays.lengths(split) for split in ("train", "validation", "test")}
        most = task.longest or max(int(sizes.max(initial=1)) for sizes in every.values())
        self.rows = {split: (sizes <= most).nonzero()[0] for split, sizes in every.items()}
        self.sizes = {split: every[split][rows] for split, rows in self.rows.items()}
        self.adopted = {"vocabulary": len(dataset.words)}
        self.exact, self.least = {"classes": len(dataset.classes)}, {"branches": dataset.branches, "longest": most}
        left = sum(len(every[split]) - len(rows) for split, rows in self.rows.items())
        for split in ("train", "validation"):
            if not len(self.rows[split]):
                raise ValueError(f"data: expected trees for {split}, got none; {left} are larger: raise --longest")
        counts = " + ".join(str(len(rows)) for rows in self.rows.values())
        self.summary = (
            f"{counts} trees of {len(dataset.classes)} classes, {len(dataset.words)} different tokens"
            + f", {left} larger ones left out" * (left > 0)
            + majority(self.labels("validation"), dataset.classes)
        )

    def labels(self, split: str) -> np.ndarray:
        return self.dataset.labels(split)[self.rows[split]]

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, positions ``[t 1]`` or ``[b t 2]``, mask ``[b t]`` and classes ``[b]``."""
        import torch

        chosen = self.rows[split][rows]
        tokens, nodes = zip(*(self.dataset.tree(split, row) for row in chosen.tolist()), strict=True)
        return *on_line_or_tree(recipe, tokens, nodes.__getitem__), torch.from_numpy(self.dataset.labels(split)[chosen])

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        from isopos.lab.data.treebank import tree_text

        dataset, examples = self.dataset, []
        for row, answer, guess in self.guesses(model, recipe, count):
            tokens, nodes = dataset.tree("validation", self.rows["validation"][row])
            text = tree_text([dataset.words[token] for token in tokens], nodes)
            text = text if len(text) <= SHOWN else text[:SHOWN] + "..."
            examples.append({"tree": text, "class": dataset.classes[answer], "model": dataset.classes[guess]})
        return examples

    def save(self, folder: Path) -> None:
        write_text(folder / WORDS, json.dumps(self.dataset.words) + "\n")
