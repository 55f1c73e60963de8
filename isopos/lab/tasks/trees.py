"""Classes of trees: of s-expressions, as of sentences with their syntax, or of nested lists."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data.labelled import alike
from isopos.lab.tasks.samples import Labelled, accuracy
from isopos.lab.tasks.task import Metric, Recipe, Task, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.lab.data.treebank import Bank

__all__ = ["LabelledTrees", "TreeClasses"]

SHOWN = 300  # characters of a tree in a report
WORDS = "words.json"


@dataclass(frozen=True)
class TreeClasses(Task):
    """What a classifier of trees reads: nodes in preorder, a token each.

    Their positions are those in the tree, or in the line of tokens, as the scheme has it; the tokens are the same.
    """

    data: str = ""
    """A file or a folder: an s-expression a line with its class at the root (as the Stanford Sentiment Treebank), .tsv of a
    label and a tree, .jsonl with nested lists, or hf:NAME; empty: random trees of and, or, not. Names make the splits."""
    column: str = "tree"  # Of the tree, in tables with names.
    label: str = "label"  # Of its class, likewise.
    inner: bool = False  # See the labels of inner nodes below the root, too, where the root's is the class.
    vocabulary: int = 0  # Tokens; 0: as many as the train split has.
    classes: int = 0  # Different labels; 0: as many as the data has.
    branches: int = 0  # Of the trees; 0: as many as the data has.
    longest: int = 0  # Nodes: larger trees are left out, and counted; 0: none are.
    validation_rows: int = 0  # At most so many held-out trees are scored; 0: all.

    name = "trees"
    schemes = "none,rope,ape-sequence,shiv-quirk,ape-tree"
    edits = MappingProxyType({"steps": 500, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "trees"
    limits = ((("vocabulary", "classes", "branches", "longest", "validation_rows"), 0, 10**9),)
    settled = ("vocabulary", "classes", "branches", "longest")
    metrics = accuracy("held-out trees", "whose class is found")

    @property
    def more(self) -> tuple[Metric, ...]:
        return (Metric("scored", "trees", "higher", ",.0f"),)

    def setting(self, recipe: Recipe) -> str:
        return f"A classifier of trees of at most {self.longest} nodes and {self.branches} branches."

    @property
    def fits(self) -> dict[str, object]:
        known = {"length": self.longest, "reach": self.longest, "branches": self.branches}
        return {name: value for name, value in known.items() if value}

    def check(self, recipe: Recipe) -> Sequence[str]:
        from isopos.lab.tasks.build import check_group
        from isopos.positions import Line, Tree

        scheme = check_group(recipe, (Line, Tree), "in a tree or on a line")
        length = scheme.max_length
        if length is not None and length < self.longest:
            raise ValueError(
                f"longest: expected at most {length}, for which {recipe.scheme} has positions, got trees of {self.longest} "
                f"nodes; --longest {length} leaves those out"
            )
        if isinstance(scheme.group, Tree) and scheme.group.branches < self.branches:
            raise ValueError(
                f"branches: expected at most the {scheme.group.branches} of {recipe.scheme}, got trees with {self.branches}"
            )
        require("vocabulary", self.vocabulary, "0, or 2 at least", self.vocabulary != 1)
        return super().check(recipe)

    def model(self, recipe: Recipe) -> Any:
        from isopos.lab.tasks.build import build_model
        from isopos.models import Classifier

        return build_model(recipe, Classifier, self.vocabulary or 256, self.classes or 2)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "LabelledTrees":
        from isopos.lab.data import treebank
        from isopos.lab.runs.files import read_json

        words = read_json(run / WORDS, list[str], "put it right; a run cannot be read without its words") if run else ()
        choice: dict[str, Any] = {"inner": self.inner, "vocabulary": self.vocabulary, "words": words}
        return LabelledTrees(self, treebank.load(self.data, self.column, self.label, **choice, console=console))


class LabelledTrees(Labelled):
    """Trees to train on and to score."""

    unit = "trees"

    def __init__(self, task: TreeClasses, bank: "Bank"):
        self.task, self.bank = task, bank
        self.name, self.sha256, self.limit = bank.name, bank.arrays.sha256, task.validation_rows
        every = {split: bank.sizes(split) for split in ("train", "validation", "test")}
        most = task.longest or max(int(sizes.max(initial=1)) for sizes in every.values())
        self.rows = {split: (sizes <= most).nonzero()[0] for split, sizes in every.items()}
        self.sizes = {split: every[split][rows] for split, rows in self.rows.items()}
        self.longest, left = most, sum(len(every[split]) - len(rows) for split, rows in self.rows.items())
        for split in ("train", "validation"):
            if not len(self.rows[split]):
                raise ValueError(f"data: expected trees for {split}, got none; {left} are larger: raise --longest")
        self.splits = ("validation", "test") if len(self.rows["test"]) else ("validation",)
        counts = " + ".join(str(len(rows)) for rows in self.rows.values())
        usual = np.bincount(bank.labels("validation")[self.rows["validation"]], minlength=len(bank.classes))
        self.summary = (
            f"{counts} trees of {len(bank.classes)} classes, {len(bank.words)} different tokens"
            + f", {left} larger ones left out" * (left > 0)
            + f"; without a model: at most {usual.max() / usual.sum():.1%}, of {bank.classes[int(usual.argmax())]}"
            + (f"; {same}" if (same := alike(bank.classes)) else "")
        )

    def settle(self, recipe: Recipe) -> Recipe:
        found, task = self.bank, self.task
        for name, there in (("classes", len(found.classes)), ("vocabulary", len(found.words))):
            given = getattr(task, name)
            right = given in (0, there) or (name == "vocabulary" and given >= there)
            require(name, given, f"the {there} of the data, or 0 for those", right)
        few = 0 < task.branches < found.branches
        require("branches", task.branches, f"at least the {found.branches} of the data", not few)
        recipe = recipe.edit(classes=len(found.classes), vocabulary=len(found.words))
        recipe = recipe.edit(branches=task.branches or found.branches, longest=self.longest)
        recipe.task.check(recipe)
        return super().settle(recipe)

    def labels(self, split: str) -> np.ndarray:
        return self.bank.labels(split)[self.rows[split]]

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, positions ``[t 1]`` or ``[b t 2]``, mask ``[b t]`` and classes ``[b]``."""
        import torch

        from isopos.lab.tasks.build import group_of
        from isopos.positions import Tree, sequence

        own = self.rows[split][rows]
        trees = [self.bank.tree(split, row) for row in own.tolist()]
        longest = max(len(tokens) for tokens, _ in trees)
        tokens, mask = np.zeros((len(own), longest), np.int64), np.zeros((len(own), longest), bool)
        nodes = np.full((len(own), longest, 2), -1)
        for n, (some, at) in enumerate(trees):
            tokens[n, : len(some)], mask[n, : len(some)], nodes[n, : len(some)] = some, True, at
        positions = torch.from_numpy(nodes) if isinstance(group_of(recipe), Tree) else sequence(longest)
        labels = torch.from_numpy(self.bank.labels(split)[own])
        return torch.from_numpy(tokens), positions, torch.from_numpy(mask), labels

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        from isopos.lab.data.treebank import text

        bank, rows = self.bank, self.some("validation", count)
        logits, answers = self.answers(model, recipe, "validation", rows)
        found = []
        for row, answer, guess in zip(
            self.rows["validation"][rows].tolist(), answers.tolist(), logits.argmax(-1).tolist(), strict=True
        ):
            tokens, nodes = bank.tree("validation", row)
            shown = text([bank.words[token] for token in tokens], nodes)
            shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
            found.append({"tree": shown, "class": bank.classes[answer], "model": bank.classes[guess]})
        return found

    def save(self, folder: Path) -> None:
        from isopos.lab.runs.files import write_text

        write_text(folder / WORDS, json.dumps(self.bank.words) + "\n")
