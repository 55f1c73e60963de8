"""What a step needs at least, and what the machine has: found before a run takes its name, not by a kill in its midst."""

import os

import torch

from isopos.lab.recipes import Recipe


def check_memory(recipe: Recipe) -> None:
    """Raise a ValueError where what the blocks leave for the backward pass is more than there is memory."""
    t, m = recipe.training, recipe.model
    units = recipe.task.size(recipe) / (t.accumulate * t.devices * t.nodes)
    tensors = 1 if m.recompute else 8  # of a block at least: its inputs, q, k, v, and the wide inside of the feed-forward
    need, there = 4 * units * m.model_dim * m.layers * tensors, _there(t.device, t.devices)
    if need > there:
        raise ValueError(
            f"batch: expected one whose {t.accumulate} parts fit into the {there / 2**30:.1f} GiB of memory, got {t.batch}, "
            f"which needs more than {need / 2**30:,.1f} GiB in each; choose a smaller batch, or a larger --accumulate"
        )


def _there(device: str, devices: int) -> float:
    """Bytes that each process may use at most; infinitely many where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return float("inf")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
