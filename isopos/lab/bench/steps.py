"""Training steps of a bidirectional model with one scheme after another, so that a busy machine is fair to all."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.lab.bench.timing import turns
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
    tokens = torch.randint(recipe.vocabulary, (recipe.batch, recipe.length), device=recipe.device)
    works = {name: _step(replace(recipe, scheme=scheme), tokens) for name, scheme in schemes.items()}
    for seconds in turns(works, rounds, recipe.device):
        on_round(seconds)


def _step(recipe: Recipe, tokens: Tensor) -> Callable[[], None]:
    torch.manual_seed(recipe.seed)
    options = {"hidden_dim": recipe.hidden_dim or None, "dropout": recipe.dropout}
    model = Encoder(recipe.vocabulary, recipe.model_dim, recipe.layers, build_scheme(recipe), **options).to(recipe.device)
    kind, narrow = torch.device(recipe.device).type, recipe.precision == "bfloat16"

    def step() -> None:
        model.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=narrow):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()

    return step
