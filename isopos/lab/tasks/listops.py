"""ListOps: what a nested operation on lists of digits evaluates to, from a sequence of tokens or from their tree."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data import growth
from isopos.lab.data.expressions import NUMBERS, TOKENS, Expression, Rows, generate, nodes, read, text
from isopos.lab.tasks.samples import Labelled, accuracy
from isopos.lab.tasks.task import Metric, Recipe, Task, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.models import Classifier
    from isopos.positions import Group

__all__ = ["Expressions", "ListOps"]

RANDOM = {"operators": ("MIN", "MAX", "MED", "SM"), "depth": 4, "arguments": 5, "longest": 50}  # of the built-in expressions
COUNTS = (10_000, 1000, 1000)
HELD_OUT = 2000  # of other random expressions, at most, in each held-out split: a twelfth, as here


@dataclass(frozen=True)
class ListOps(Task):
    """What a classifier of ListOps reads: expressions whose value is a digit, by accuracy.

    Positions are those of the tokens in a line, or in the tree of the expression, as the scheme has it: an operator is a
    node, its arguments and then its closing bracket are its children.
    """

    data: str = ""
    """A file or a folder of rows, a label, a tab and an expression: those of Nangia and Bowman or of the Long Range Arena.
    Names with train, valid and test make the splits; by default 12,000 random expressions of at most 50 tokens."""
    depth: int = 4  # Lists inside each other, at most, in random expressions.
    arguments: int = 5  # Of a list in random expressions, at most.
    shortest: int = 0  # Tokens of a random expression, at least.
    expressions: int = 12_000  # How many are random; a twelfth, and at most 2000, for validation, and as many for the test.
    longest: int = 0  # Tokens: longer expressions are left out; 0: none are.
    branches: int = 0  # Of the trees, closing brackets counted; 0: as many as the data has.
    validation_rows: int = 0  # At most so many held-out expressions are scored; 0: all.

    name = "listops"
    schemes = "none,rope,ape-sequence,ape-tree"
    edits = MappingProxyType({"steps": 800, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "examples"
    limits = (
        (("longest", "branches", "validation_rows", "shortest"), 0, 10**9),
        ("depth", 1, 50),
        ("arguments", 2, 250),
        ("expressions", 36, 10**8),
    )
    settled = ("longest", "branches")
    metrics = accuracy("held-out expressions", "whose value is found")

    @property
    def more(self) -> tuple[Metric, ...]:
        return (Metric("scored", "expressions", "higher", ",.0f"),)

    def setting(self, recipe: Recipe) -> str:
        return f"A classifier of expressions of at most {self.longest} tokens, whose trees have {self.branches} branches."

    @property
    def fits(self) -> dict[str, object]:
        known = {"length": self.longest, "reach": self.longest, "branches": self.branches}
        return {name: value for name, value in known.items() if value}

    def check(self, recipe: Recipe) -> list[str]:
        from isopos.lab.tasks.build import check_group
        from isopos.positions import Line, Tree

        scheme = check_group(recipe, (Line, Tree), "on a line or in a tree, which expressions have")
        length = scheme.max_length
        if length is not None and length < self.longest:
            raise ValueError(
                f"longest: expected at most {length}, for which {recipe.scheme} has positions, got expressions of "
                f"{self.longest} tokens; --longest {length} leaves those out"
            )
        if isinstance(scheme.group, Tree) and scheme.group.branches < self.branches:
            raise ValueError(
                f"branches: expected at most the {scheme.group.branches} of {recipe.scheme}, got trees with {self.branches}"
            )
        if self.random:
            field = next(iter(self.random))
            require(field, self.random[field], f"{getattr(ListOps, field)} beside data, which is not random", not self.data)
            least, longest = max(1, self.shortest), self.longest
            require("longest", longest, f"at least {least} tokens beside {field}, to draw no longer ones", longest >= least)
        self.model(recipe)
        return []

    @property
    def random(self) -> dict[str, int]:
        """What random expressions have of their own, not as the built-in ones."""
        own = {name: getattr(self, name) for name in ("depth", "arguments", "shortest", "expressions")}
        return {name: value for name, value in own.items() if value != getattr(ListOps, name)}

    def model(self, recipe: Recipe) -> "Classifier":
        from isopos.lab.tasks.build import build_model
        from isopos.models import Classifier

        return build_model(recipe, Classifier, len(TOKENS), 10)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "Expressions":
        if self.random and not self.data:
            held = min(HELD_OUT, self.expressions // 12)
            settings = growth.Settings(self.depth, self.arguments, self.shortest, self.longest)
            return Expressions(self, growth.prepare(0, (self.expressions - 2 * held, held, held), settings))
        rows = read(self.data, console=console) if self.data else generate(0, COUNTS, **RANDOM)
        return Expressions(self, rows.up_to(self.longest) if self.longest else rows)


class Expressions(Labelled):
    """Expressions to train on and to score."""

    unit = "expressions"

    def __init__(self, task: ListOps, rows: Rows):
        self.task, self.rows, self.sha256 = task, rows.splits, rows.sha256
        self.name = task.data or "built-in"
        train, validation, test = self.rows.values()
        self.splits = ("validation", "test") if len(test) else ("validation",)
        frequent = Counter(train.answers.tolist()).most_common(1)[0][0]
        usual, first = (
            (validation.answers == guesses).mean() for guesses in (frequent, [_by_first(row) for row in validation])
        )
        left = f", {rows.long} longer ones left out" * (rows.long > 0) + f", {rows.repeated} repeated" * (rows.repeated > 0)
        self.summary = (
            f"{len(train)} + {len(validation)} + {len(test)} expressions{left}; without a model: always {frequent} "
            f"{usual:.1%}, by the first operator {first:.1%}"
        )
        self.sizes = {split: rows.lengths for split, rows in self.rows.items()}
        self.limit = task.validation_rows

    def settle(self, recipe: Recipe) -> Recipe:
        longest = max(int(sizes.max(initial=1)) for sizes in self.sizes.values())
        branches = max(int(rows.branches.max(initial=1)) for rows in self.rows.values())
        task = self.task
        require("branches", task.branches, f"at least the {branches} of the data", not 0 < task.branches < branches)
        recipe = recipe.edit(longest=task.longest or longest, branches=task.branches or branches)
        recipe.task.check(recipe)
        return super().settle(recipe)

    def labels(self, split: str) -> np.ndarray:
        return self.rows[split].answers

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, positions ``[t 1]`` or ``[b t 2]``, mask ``[b t]`` and answers ``[b]``."""
        from isopos.lab.tasks.build import group_of

        return _tensors([self.rows[split][n] for n in rows], group_of(recipe))

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        rows = self.rows["validation"][:count]
        logits, _ = self.answers(model, recipe, "validation", np.arange(len(rows)))
        return [
            {"expression": text(row.tokens), "answer": row.answer, "model": answer}
            for row, answer in zip(rows, logits.argmax(-1).tolist(), strict=True)
        ]


def _by_first(row: Expression) -> int:
    """A guess that looks at the first token only: 0 of a minimum, 9 of a maximum, else in the middle."""
    return {NUMBERS["[MIN"]: 0, NUMBERS["[MAX"]: 9}.get(row.tokens[0], 4)


def _tensors(rows: Sequence[Expression], group: "Group") -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """Tokens, positions, mask and answers of expressions, padded to the longest; padding has further positions, or roots."""
    import torch

    from isopos.positions import Tree, sequence

    lengths = torch.tensor([len(row.tokens) for row in rows])
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths[:, None]
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    tokens[mask] = torch.frombuffer(bytearray(b"".join(row.tokens for row in rows)), dtype=torch.uint8).long()
    positions = sequence(longest)
    if isinstance(group, Tree):
        positions = group.origin(len(rows), longest)
        positions[mask] = torch.tensor([node for row in rows for node in nodes(row.tokens)])
    return tokens, positions, mask, torch.tensor([row.answer for row in rows])
