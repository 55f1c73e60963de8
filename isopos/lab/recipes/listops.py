"""Recipes of ListOps."""

from isopos.lab.tasks.listops import ListOps
from isopos.lab.tasks.task import Recipe


def listops(scale: str) -> Recipe:
    """ListOps; at the scale paper as the Long Range Arena trains its transformer (Tay et al. 2020; base_listops_config.py).

    There: 6 layers of 512 with 8 heads, 5000 updates of 32 expressions of at most 2000 tokens, peak learning rate 0.05 /
    sqrt(1000), data in the folder listops-1000 of lra_release.gz. Here a mean replaces its class token, and its dropout,
    which is not stated, is 0.1. Other scales learn random expressions; small takes a minute on 2 cores.
    """
    small = Recipe(task=ListOps()).edit(**ListOps.edits, device="auto")
    sizes = {
        "tiny": {"steps": 50, "layers": 1, "model_dim": 32, "heads": 2},
        "small": {},
        "paper": {
            "data": "lra_release/listops-1000",
            "longest": 2000,
            "steps": 5000,
            "layers": 6,
            "model_dim": 512,
            "hidden_dim": 2048,
            "heads": 8,
            "dropout": 0.1,
            "learning_rate": 1.58e-3,
            "schedule": "inverse-sqrt",
            "warmup": 1000,
            "beta2": 0.98,
            "epsilon": 1e-9,
            "weight_decay": 0.1,
            "clip": 0.0,
            "validate_every": 500,
            "save_every": 500,
        },
    }
    return small.edit(**sizes[scale])
