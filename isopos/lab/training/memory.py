"""Estimate the memory of a step before a run starts, so that it is refused instead of killed."""

import torch

from isopos.lab.recipes import Recipe
from isopos.lab.tasks.build import machine_memory


def check_memory(recipe: Recipe) -> None:
    """Raise a ValueError if the activations that blocks keep for the backward pass exceed the memory."""
    t, m = recipe.training, recipe.model
    units = recipe.task.size(recipe) / (t.accumulate * t.devices * t.nodes)
    tensors = 1 if m.recompute else 8  # at least, per block: input, q, k, v, and the wider inside of the feed-forward
    need, available = 4 * units * m.model_dim * m.layers * tensors, _memory(t.device, t.devices)
    if need > available:
        raise ValueError(
            f"batch: expected one whose {t.accumulate} parts fit into the {available / 2**30:.1f} GiB of memory, "
            f"got {t.batch}, which needs more than {need / 2**30:,.1f} GiB in each; choose a smaller batch, or a larger "
            "--accumulate"
        )


def _memory(device: str, devices: int) -> float:
    """Memory in bytes that each process may use; infinite where the system does not tell."""
    return torch.cuda.mem_get_info(device)[1] if torch.device(device).type == "cuda" else machine_memory() / devices
