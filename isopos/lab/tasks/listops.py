"""ListOps: the value of nested operations on lists of digits, from a sequence of tokens or from their tree."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data import random_expressions
from isopos.lab.data.expressions import (
    NUMBERS,
    TOKENS,
    Expression,
    expression_text,
    generate_expressions,
    read_expressions,
    tree_nodes,
)
from isopos.lab.data.splits import Splits
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled, classifier_metrics, on_line_or_tree
from isopos.lab.tasks.task import Recipe, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn


RANDOM = {"operators": ("MIN", "MAX", "MED", "SM"), "depth": 4, "arguments": 5, "longest": 50}  # built-in expressions
COUNTS = (10_000, 1000, 1000)
HELD_OUT = 2000  # largest held-out split of other random expressions; they are a twelfth each, too


@dataclass(frozen=True)
class ListOps(PositionedTask):
    """A classifier of expressions by their value, a digit.

    The scheme determines whether positions are points of a line or nodes of the expression's tree: the children of an
    operator are its arguments and its closing bracket.
    """

    data: str = ""
    """A file or a folder with rows of a label, a tab and an expression, as published by Nangia and Bowman and in the Long
    Range Arena. Names with train, valid and test make the splits. Empty: 12,000 random expressions of at most 50 tokens."""
    depth: int = 4  # Largest depth of nested lists in random expressions.
    arguments: int = 5  # Largest number of arguments in random expressions.
    shortest: int = 0  # Smallest number of tokens of a random expression.
    expressions: int = 12_000  # Number of random expressions; a twelfth, at most 2000, each for validation and test.
    longest: int = 0  # Largest number of tokens: longer expressions are dropped; 0: none.
    branches: int = 0  # Largest number of children in trees, with closing brackets; 0: as in the data.
    validation_rows: int = 0  # Largest number of held-out expressions that are scored; 0: all.

    name = "listops"
    schemes = "none,rope,ape-sequence,ape-tree"
    edits = MappingProxyType({"steps": 800, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "examples"
    counted = "expressions"
    in_shards = True
    limits = (
        (("longest", "branches", "validation_rows", "shortest"), 0, 10**9),
        ("depth", 1, 50),
        ("arguments", 2, 250),
        ("expressions", 36, 10**8),
    )
    inferred = ("longest", "branches")
    groups, where = ("Line", "Tree"), "on a line or in a tree, which expressions have"
    metrics = classifier_metrics("held-out expressions", "whose value is found")

    def setting(self, recipe: Recipe) -> str:
        return f"A classifier of expressions of at most {self.longest} tokens, whose trees have {self.branches} branches."

    def check(self, recipe: Recipe) -> Sequence[str]:
        if self.random:
            field = next(iter(self.random))
            require(field, self.random[field], f"{getattr(ListOps, field)} with data, which is not random", not self.data)
            least, longest = max(1, self.shortest), self.longest
            require("longest", longest, f"at least {least} tokens with {field}, which limits the length", longest >= least)
        return super().check(recipe)

    @property
    def random(self) -> dict[str, int]:
        """Settings of random expressions that differ from the built-in ones."""
        values = {name: getattr(self, name) for name in ("depth", "arguments", "shortest", "expressions")}
        return {name: value for name, value in values.items() if value != getattr(ListOps, name)}

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Classifier", len(TOKENS), 10)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "Expressions":
        if self.random and not self.data:
            held = min(HELD_OUT, self.expressions // 12)
            settings = random_expressions.Settings(self.depth, self.arguments, self.shortest, self.longest)
            return Expressions(self, random_expressions.prepare(0, (self.expressions - 2 * held, held, held), settings))
        rows = read_expressions(self.data, console=console) if self.data else generate_expressions(0, COUNTS, **RANDOM)
        if self.longest:
            rows = rows.keep("longer", {name: some.lengths[:, 0] <= self.longest for name, some in rows.splits.items()})
        return Expressions(self, rows)


class Expressions(Labelled):
    """Expressions for training and evaluation."""

    def __init__(self, task: ListOps, expressions: Splits[Expression]):
        self.task, self.rows, self.name = task, expressions.splits, task.data or "built-in"
        self.sha256, self.limit = self._hash(), task.validation_rows
        counts = " + ".join(str(len(rows)) for rows in self.rows.values())
        answers, frequent = self.labels("validation"), int(np.bincount(self.labels("train")).argmax())
        extremes = {NUMBERS["[MIN"]: 0, NUMBERS["[MAX"]: 9}  # guesses by the first token; 4 for others
        by_first = [extremes.get(row.tokens[0], 4) for row in self.rows["validation"]]
        self.summary = (
            f"{counts} expressions{expressions.summary}; without a model: always {frequent} "
            f"{(answers == frequent).mean():.1%}, by the first operator {(answers == by_first).mean():.1%}"
        )
        self.sizes = {split: rows.lengths[:, 0] for split, rows in self.rows.items()}
        self.least = {
            "longest": max(int(sizes.max(initial=1)) for sizes in self.sizes.values()),
            "branches": max(int(rows.column("about")[:, 1].max(initial=1)) for rows in self.rows.values()),
        }

    def labels(self, split: str) -> np.ndarray:
        return self.rows[split].column("about")[:, 0]

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, positions ``[t 1]`` or ``[b t 2]``, mask ``[b t]`` and answers ``[b]``."""
        import torch

        samples = [self.rows[split][n] for n in rows]
        tokens = [np.frombuffer(sample.tokens, np.uint8) for sample in samples]
        answers = torch.tensor([sample.answer for sample in samples])
        return *on_line_or_tree(recipe, tokens, lambda n: tree_nodes(samples[n].tokens)), answers

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        rows = self.rows["validation"]
        return [
            {"expression": expression_text(rows[row].tokens), "answer": answer, "model": guess}
            for row, answer, guess in self.guesses(model, recipe, count)
        ]

    def _hash(self) -> str:
        """A fingerprint of all tokens, in their order."""
        digest = hashlib.sha256()
        for split, rows in self.rows.items():
            digest.update(split.encode())
            for n, row in enumerate(rows):
                digest.update(b"\xff" * (n > 0) + row.tokens)
        return digest.hexdigest()
