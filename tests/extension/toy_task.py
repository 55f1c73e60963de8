"""A custom task: does token 1 come before token 2? Without positions no model can tell."""

from dataclasses import dataclass

import torch

from isopos.lab.tasks.build import build_model
from isopos.lab.tasks.task import Data, Metric, Scored, Task
from isopos.models import Classifier


@dataclass(frozen=True)
class Order(Task):
    length: int = 16
    metrics = (Metric("accuracy", "accuracy", "higher", ".1%"),)

    def model(self, recipe):
        return build_model(recipe, Classifier, self.length, 2)

    def load(self, recipe, console=None, run=None):
        return Shuffles()


class Shuffles(Data):
    name, sha256, summary = "shuffled tokens", "shuffled tokens", "as many as are asked for"

    def batch(self, recipe, step, rank=0, ranks=1):
        random = torch.Generator().manual_seed(recipe.seed * 2**32 + step)
        tokens = torch.rand(recipe.training.batch, recipe.task.length, generator=random).argsort(-1)
        place = tokens.argsort(-1)
        return tuple(a.tensor_split(ranks)[rank] for a in (tokens, (place[:, 1] < place[:, 2]).long()))

    def loss(self, model, tokens, answers):
        return torch.nn.functional.cross_entropy(model(tokens), answers)

    def score(self, model, recipe, view):
        tokens, answers = (a.to(recipe.training.device) for a in self.batch(recipe.edit(batch=500), 0))
        return Scored({"accuracy": (model(tokens).argmax(-1) == answers).double().mean().item()})
