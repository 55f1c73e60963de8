"""Training steps with one scheme after another, so that a busy machine is fair to all."""

from collections.abc import Callable, Iterator, Mapping

import torch

from isopos.lab.bench.timing import turns
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.task import Data

__all__ = ["step_times"]


def step_times(recipe: Recipe, data: Data, schemes: Mapping[str, str], rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of forward and backward of the same samples by the names of `schemes`, a round; one before warms up."""
    works = {name: _step(recipe.edit(scheme=scheme), data) for name, scheme in schemes.items()}
    yield from turns(works, rounds, recipe.training.device)


def _step(recipe: Recipe, data: Data) -> Callable[[], None]:
    device, narrow = recipe.training.device, recipe.training.precision == "bfloat16"
    batch = [tensor.to(device) for tensor in data.batch(recipe, 1)]
    model = recipe.task.model(recipe).to(device)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=narrow):
            loss = data.loss(model, *batch)
        loss.backward()

    return step
