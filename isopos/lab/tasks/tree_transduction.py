"""Tree to tree: copying, mirroring, reducing and taking apart, with nodes level by level or in preorder."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.data.labelled_trees import LabelledTree, Order, TreeBuilder, from_order, in_order, s_expression
from isopos.lab.data.splits import Stored
from isopos.lab.data.tree_pairs import Operation, TreePairs, labels_of, random_trees, read_trees
from isopos.lab.tasks.samples import padded
from isopos.lab.tasks.task import Recipe, require
from isopos.lab.tasks.transduction import Transduced, Transducing

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.models.seq2seq import Follow


@dataclass(frozen=True)
class TreeTransduction(Transducing):
    """An encoder-decoder of trees.

    The scheme determines whether positions are nodes of the tree or points of a line. A token of the decoder has the
    position of the node it predicts: a token determines its number of children, so the next position is known.
    """

    data: str = ""
    """A table, or a folder of .tsv, with a tab between two s-expressions, (label child child ...); names with train, valid
    and test make the splits. Empty: random trees."""
    operation: Operation = "rotation"
    """Targets of random trees: the same tree, its mirror image, an evaluation step in the group C3, or the result of one of
    four operators on a subtree."""
    order: Order = "breadth"  # Order of nodes: level by level, or in preorder.
    source_order: Literal["same", "breadth", "depth"] = "same"  # Order of nodes of sources, if different.
    depth: int = 4  # Mean depth of random trees.
    deviation: int = 1  # Standard deviation of the depth.
    labels: int = 0  # Number of labels of random trees except c3; 0: 20, for ops 2 to the power of depth, at least 32.
    vocabulary: int = 0  # Number of tokens; 0: as in the data.
    branches: int = 0  # Largest number of children of a node; 0: as in the data.

    name = "tree-transduction"
    schemes = "sinusoidal:attention=softmax,rope:attention=softmax,shiv-quirk:attention=softmax,ape-tree:attention=softmax"
    edits = MappingProxyType({"steps": 400, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    limits = (*Transducing.limits, ("depth", 1, 64), (("deviation", "labels", "vocabulary", "branches"), 0, 10**9))
    inferred = ("longest", "vocabulary", "branches")
    groups, where = ("Line", "Tree"), "on a line or in a tree, which nodes have"

    @property
    def orders(self) -> tuple[Order, Order]:
        """Orders of sources and of targets."""
        return self.order if self.source_order == "same" else self.source_order, self.order

    @property
    def ordered(self) -> str:
        """The orders in words, to be followed by "first"."""
        sources, targets = self.orders
        return targets if sources == targets else f"{targets} first from sources {sources}"

    @property
    def fits(self) -> dict[str, object]:
        known = {"length": self.longest, "reach": self.longest, "branches": self.branches or 2}
        known["depth"] = 0 if self.data else self.depth
        return {name: value for name, value in known.items() if value}

    def setting(self, recipe: Recipe) -> str:
        what = "given pairs" if self.data else f"the operation {self.operation} on random trees"
        return f"An encoder-decoder of trees of at most {self.longest} nodes, {self.ordered} first, that learns {what}."

    def check(self, recipe: Recipe) -> Sequence[str]:
        least = 9 if self.operation == "ops" else 2  # four are what roots say
        require(
            "labels", self.labels, f"at least {least}, of leaves and of others", self.labels == 0 or self.labels >= least
        )
        return super().check(recipe)

    def model(self, recipe: Recipe) -> Any:
        tokens = (self.vocabulary or 1) + 1  # the start
        return self.build(recipe, "Seq2Seq", tokens, tokens, tied=self.tied)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "Trees":
        if self.data:
            return Trees(self, read_trees(self.data, console=console))
        return Trees(
            self,
            random_trees(
                self.data_seed,
                (self.samples, self.held_out, self.held_out),
                self.operation,
                depth=self.depth,
                deviation=self.deviation,
                labels=self.labels or labels_of(self.operation, self.depth),
            ),
        )


class Trees(Transduced):
    """Pairs of trees for training and evaluation; the last token of the vocabulary starts a target."""

    def __init__(self, task: TreeTransduction, trees: TreePairs):
        self.task, self.names, self.arities = task, trees.names, np.array((*trees.arities, 0))
        self.start, self.name = len(trees.names), task.data or f"random trees for {task.operation}, {task.ordered} first"
        super().__init__(task, trees.pairs, "larger")
        branches = max(1, *(max(tree.arities) for rows in self.pairs.values() for pair in rows for tree in pair))
        self.least = {**self.least, "branches": branches, "vocabulary": self.start}
        digest = hashlib.sha256(f"{task.ordered} {self.names} {trees.arities}".encode())
        for name, rows in self.pairs.items():
            digest.update(f"{name} [".encode())
            for n, pair in enumerate(rows):
                digest.update((", " * (n > 0) + f"({pair[0].key}, {pair[1].key})").encode())
            digest.update(b"]")
        self.sha256 = digest.hexdigest()
        count = " + ".join(f"{len(rows):,}" for rows in self.pairs.values())
        nodes = np.mean(np.concatenate([*self.sizes.values()])) / 2
        self.summary = f"{count} pairs{self.dropped} of {nodes:.1f} nodes on average, {self.start:,} tokens"

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Sources ``[b s]``, targets from the start on ``[b t]``, positions of both, mask ``[b s]``, answers ``[b t]``.

        Answers are -1 beyond the end of a target. Positions are points of a line ``[t 1]`` or nodes of trees ``[b t 2]``.
        """
        from isopos.lab.tasks.build import group_of
        from isopos.positions import Tree, sequence

        pairs = [self.pairs[split][row] for row in rows]
        orders = self.task.orders
        sources, targets = ([in_order(pair[side], orders[side]) for pair in pairs] for side in (0, 1))
        source, mask, inputs, answers = self.batched([labels for labels, _ in sources], [labels for labels, _ in targets])
        if isinstance(group_of(recipe), Tree):
            x, y = (padded([nodes for _, nodes in side], -1)[0] for side in (sources, targets))
        else:
            x, y = sequence(source.shape[1]), sequence(answers.shape[1])
        return source, inputs, x, y, mask, answers

    def lengths(self, pairs: Sequence[tuple[LabelledTree, LabelledTree]]) -> np.ndarray:
        lengths = pairs.lengths if isinstance(pairs, Stored) else [[len(tree.labels) for tree in pair] for pair in pairs]
        return np.array(lengths, np.int64).reshape(-1, 2)

    def follow(self, recipe: Recipe) -> "Follow":
        import torch

        from isopos.lab.tasks.build import group_of
        from isopos.positions import Tree

        if not isinstance(group_of(recipe), Tree):
            return super().follow(recipe)
        builders: list[TreeBuilder] = []

        def positions(tokens: "Tensor") -> "Tensor | None":
            if not tokens.shape[1]:
                builders[:] = [TreeBuilder(self.task.order) for _ in tokens]
            else:
                for builder, token in zip(builders, tokens[:, -1].tolist(), strict=True):
                    builder.add(int(self.arities[token]))
            if all(builder.complete for builder in builders):
                return None
            return torch.tensor([builder.rows for builder in builders], device=tokens.device)

        return positions

    def ends(self, tokens: np.ndarray) -> np.ndarray:
        return (self.arities[tokens] - 1).cumsum(-1) == -1

    def pair_text(self, split: str, row: int) -> tuple[str, str]:
        source, target = (
            s_expression([self.names[label] for label in tree.labels], tree.arities) for tree in self.pairs[split][row]
        )
        return source, target

    def text(self, tokens: np.ndarray) -> str:
        """The tree, or the labels of an incomplete tree."""
        labels, arities = tokens.tolist(), self.arities[tokens].tolist()
        if self.start in labels or sum(arities) != len(labels) - 1:
            return " ".join((*self.names, "start")[label] for label in labels) + " ..."
        tree = from_order(labels, arities, self.task.order)
        return s_expression([self.names[label] for label in tree.labels], tree.arities)
