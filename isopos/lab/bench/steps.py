"""Training steps of a bidirectional model with one scheme after another, so that a busy machine is fair to all."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from isopos.lab.recipes import Recipe
from isopos.lab.training.run import build_scheme
from isopos.models import Encoder

__all__ = ["time_steps"]


def time_steps(
    recipe: Recipe, schemes: Mapping[str, str], rounds: int, on_round: Callable[[dict[str, float]], None]
) -> None:
    """Time forward and backward of a batch of random tokens with each scheme in turn, once a round.

    Args:
        recipe: Sizes, vocabulary and device.
        schemes: By name.
        rounds: After one that warms up.
        on_round: Hears of each round: seconds by name.
    """
    models = {}
    for name, scheme in schemes.items():
        torch.manual_seed(recipe.seed)
        built = build_scheme(replace(recipe, scheme=scheme))
        options = {"hidden_dim": recipe.hidden_dim or None, "dropout": recipe.dropout}
        models[name] = Encoder(recipe.vocabulary, recipe.model_dim, recipe.layers, built, **options).to(recipe.device)
    tokens = torch.randint(recipe.vocabulary, (recipe.batch, recipe.length), device=recipe.device)
    enabled = recipe.precision == "bfloat16"
    for n in range(rounds + 1):
        seconds = {}
        for name, model in models.items():
            _synchronize(recipe.device)
            begun = time.perf_counter()
            with torch.autocast(torch.device(recipe.device).type, torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            _synchronize(recipe.device)
            seconds[name] = time.perf_counter() - begun
            model.zero_grad()
        if n:
            on_round(seconds)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
