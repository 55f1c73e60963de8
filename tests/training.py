"""A short training without the engine, for tests of tasks."""

from typing import Any

import torch

from isopos.lab.recipes import Recipe


def trained(recipe: Recipe, data: Any, steps: int, rate: float) -> Any:
    """A model of the recipe after steps of Adam, whose rate falls to a tenth."""
    model = recipe.task.model(recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        data.loss(model, *data.batch(recipe, step)).backward()
        optimizer.step()
        falling.step()
    return model
