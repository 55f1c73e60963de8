"""A bidirectional model as RoBERTa's that predicts random tokens from themselves, to measure the cost of a step."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.task import Cut, Data, Metric, Recipe, Scored, View

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor


@dataclass(frozen=True)
class Bidirectional(PositionedTask):
    """Random tokens for a bidirectional model."""

    vocabulary: int = 256  # Number of different tokens.
    length: int = 512  # Tokens of a sample.

    name = "bidirectional"
    unit = "tokens"
    in_shards = "length"
    views = ()
    limits = ((("vocabulary", "length"), 1, 10**9),)
    groups, where, bound = ("Line",), "on a line, which text has", ("length", "shortens samples")
    metrics = (Metric("loss", "loss", note="nats per token"),)

    def size(self, recipe: Recipe) -> int:
        return recipe.training.batch * self.length

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Encoder", self.vocabulary)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "RandomTokens":
        return RandomTokens(self)


class RandomTokens(Data):
    """Random tokens, a function of seed and step."""

    def __init__(self, task: Bidirectional):
        self.task, self.name, self.summary = task, "random tokens", "as many as are asked for"
        self.sha256 = hashlib.sha256(repr(task).encode()).hexdigest()

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        import numpy as np
        import torch

        shape = (recipe.training.batch, self.task.length)
        whole = np.random.default_rng((recipe.seed, step)).integers(self.task.vocabulary, size=shape)
        return (torch.from_numpy(whole).tensor_split(ranks)[rank],)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        import torch.nn.functional as F

        (tokens,) = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def shard(self, batch: "tuple[Tensor, ...]", cut: Cut, ranks: int) -> "tuple[Tensor, ...]":
        return (cut(batch[0], 1),)

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        from isopos.parallel import summed

        batch = tuple(tokens.to(recipe.training.device) for tokens in self.batch(recipe, 0))
        loss, count = summed(model.group, batch[0].device, self.loss(model, *self.part(model, batch)).item(), 1)
        return Scored({"loss": loss / count})
