"""Recipes of encoder-decoders for sequences and trees."""

from isopos.lab.tasks.task import Recipe
from isopos.lab.tasks.transduction import Transduction
from isopos.lab.tasks.tree_transduction import TreeTransduction

PAPER = {  # all encoder-decoders of Algebraic Positional Encodings
    "batch": 64,
    "layers": 2,
    "model_dim": 512,
    "hidden_dim": 2048,
    "heads": 8,
    "learning_rate": 5e-4,
    "clip": 0.0,
    "decoded": 0,
}


def transduction(scale: str) -> Recipe:
    """Copy, reverse or repeat random symbols; at the scale paper as in Algebraic Positional Encodings (Appendix B).

    There: lengths of N(100, 10), a vocabulary of 20, 2 + 2 pre-norm layers of 512 with ReLU, 2048 inside and 8 heads, tied
    vectors, and AdamW with 5% of warm-up to 5e-4, then a cosine. The authors' code, as first published, has 10,000, 1000 and
    1000 samples, 200 epochs of batches of 64, and learning rates from 1e-7 to 1e-9 at the ends, here a first step and 0. Its
    version of December 2024 has 6000, 2000 and 2000 samples and 400 epochs.
    """
    small = Recipe(task=Transduction()).edit(scheme="rope:attention=softmax", **Transduction.edits, device="auto")
    sizes = {
        "tiny": {"samples": 500, "held_out": 50, "length": 8, "steps": 50, "layers": 1, "model_dim": 32, "heads": 2},
        "small": {},
        "paper": PAPER
        | {"samples": 10_000, "held_out": 1000, "length": 100, "deviation": 10, "vocabulary": 20}
        | {"steps": 31_200, "warmup": 1560, "validate_every": 780, "save_every": 780},
    }
    return small.edit(**sizes[scale])


def tree_transduction(scale: str) -> Recipe:
    """Operations on random trees; at the scale paper as in Algebraic Positional Encodings (section 4, Appendix B).

    There: depths of N(7, 1), 20 labels; models and training as in `transduction`. The authors' code has 6000, 2000 and 2000
    samples, 400 epochs of batches of 64, and breadth-first sources, as here. The notes of the table ape-2 list the
    differences.
    """
    small = Recipe(task=TreeTransduction()).edit(
        scheme="ape-tree:attention=softmax", **TreeTransduction.edits, device="auto"
    )
    sizes = {
        "tiny": {"samples": 300, "held_out": 30, "depth": 3, "steps": 30, "layers": 1, "model_dim": 32, "heads": 2},
        "small": {},
        "paper": PAPER
        | {"samples": 6000, "held_out": 2000, "depth": 7, "deviation": 1, "source_order": "breadth"}
        | {"steps": 37_200, "warmup": 1860, "validate_every": 930, "save_every": 930},
    }
    return small.edit(**sizes[scale])
