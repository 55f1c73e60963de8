"""Recipes of the Long Range Arena (Tay et al. 2020, https://arxiv.org/abs/2011.04006), as two papers train it.

Epochs are of the published sets: 25,000 reviews, 96,000 expressions, 147,086 pairs, 160,000 pictures and 50,000 images. What
a paper leaves open is as in its authors' code, where that is published, or else as usual here, and is said. Small and tiny
recipes are of isopos' own data.

PermuteFormer's paper says that its sizes are those of Tay et al. Its code has others, a file of sizes per task
(https://github.com/cpcp1998/PermuteFormer, long_range_arena/configs), and those are the ones here. There, samples begin with
a token for the class, whose features go through a linear layer and a tanh, and end with another token.
"""

from collections.abc import Mapping
from typing import Any

from isopos.lab.tasks.images import Images
from isopos.lab.tasks.listops import ListOps
from isopos.lab.tasks.pathfinder import Pathfinder
from isopos.lab.tasks.task import Recipe, Task
from isopos.lab.tasks.text import TextClasses

TEXT = {"data": "aclImdb_v1.tar.gz", "longest": 4000}
RETRIEVAL = {"data": "lra_release/tsv_data", "label": "1", "column": "4", "pair": "5", "pairs": "towers", "longest": 4000}
LISTOPS = {"depth": 9, "arguments": 10, "shortest": 501, "longest": 1999, "expressions": 100_000}
PATHFINDER = {"side": 32, "dashes": 14, "distractors": 5, "pictures": 200_000}
IMAGE = {"data": "cifar10", "channels": 1, "patch": 1}


def lra_text(scale: str) -> Recipe:
    """LRPE's configuration (Table 9) of byte-level text: film reviews, 4 layers of 128, batch 256, 32 epochs.

    Its Table 9 has neither heads nor feed-forwards, schedule nor dropout: 4 heads, four times the width, a cosine after a
    tenth of warm-up, none.
    """
    return _lrpe(TextClasses(), TEXT, scale, model_dim=128, batch=256, steps=3125, learning_rate=1e-3)


def lra_listops(scale: str) -> Recipe:
    """LRPE's configuration (Table 9) of ListOps: 4 layers of 128, batch 256, 40 epochs; otherwise as `lra_text`.

    The expressions are grown by the Arena's specification: more than 500 and less than 2000 tokens, 2 to 10 arguments, 10
    levels, the last of digits.
    """
    return _lrpe(ListOps(), LISTOPS, scale, model_dim=128, batch=256, steps=15_000, learning_rate=1e-4)


def lra_retrieval(scale: str) -> Recipe:
    """LRPE's configuration (Table 9) of retrieval: two towers of 4 layers of 64, batch 64, 20 epochs.

    It is as `lra_text` otherwise. The pairs of articles are those of lra_release.gz, which are not distributed otherwise.
    """
    return _lrpe(TextClasses(), RETRIEVAL, scale, model_dim=64, batch=64, steps=45_964, learning_rate=1e-3)


def lra_pathfinder(scale: str) -> Recipe:
    """LRPE's configuration (Table 9) of Pathfinder: 4 layers of 32, batch 128, 200 epochs.

    It is as `lra_text` otherwise. The pictures are ours, 32 x 32, drawn by the published description.
    """
    return _lrpe(Pathfinder(), PATHFINDER, scale, model_dim=32, batch=128, steps=250_000, learning_rate=5e-4)


def permuteformer_text(scale: str) -> Recipe:
    """PermuteFormer's configuration (Table 5) of byte-level text: batch 16, 10 epochs, warm-up of 4000 updates, Adam.

    Sizes (performer_relative_tc.json): 6 layers of 512, feed-forwards of 2048, 8 heads, GELU, dropout 0.1; a token for the
    class, of which a linear layer reads the class here.
    """
    sizes = {"layers": 6, "model_dim": 512, "hidden_dim": 2048, "heads": 8, "dropout": 0.1}
    return _permuteformer(
        TextClasses(pooling="first"), TEXT, scale, batch=16, steps=15_625, learning_rate=1e-5, warmup=4000, **sizes
    )


def permuteformer_retrieval(scale: str) -> Recipe:
    """PermuteFormer's configuration (Table 5) of retrieval: batch 32, 10 epochs, warm-up of 1000 updates, Adam.

    Sizes (performer_relative_matching.json): two towers of 4 layers of 128, feed-forwards of 512, 4 heads, GELU, dropout
    0.1; a token for the class. The perceptron on top is that of Tay et al., which sees u * v and u - v, too.
    """
    sizes = {"layers": 4, "model_dim": 128, "hidden_dim": 512, "heads": 4, "dropout": 0.1}
    return _permuteformer(
        TextClasses(pooling="first"), RETRIEVAL, scale, batch=32, steps=45_964, learning_rate=2e-4, warmup=1000, **sizes
    )


def permuteformer_pathfinder(scale: str) -> Recipe:
    """PermuteFormer's configuration (Table 5) of Pathfinder: batch 256, 80 epochs, warm-up of 4000 updates, Adam.

    Sizes (performer_2d_relative_pathfinder.json): 4 layers of 128, feed-forwards of 128, 8 heads, GELU, dropout 0.1. On a
    grid features are not widened here, and a mean of all tokens replaces the token for the class. The pictures are ours.
    """
    sizes = {"layers": 4, "model_dim": 128, "hidden_dim": 128, "heads": 8, "dropout": 0.1}
    return _permuteformer(Pathfinder(), PATHFINDER, scale, batch=256, steps=50_000, learning_rate=5e-4, warmup=4000, **sizes)


def permuteformer_image(scale: str) -> Recipe:
    """PermuteFormer's configuration (Table 5) of CIFAR-10 in grey: batch 256, 50 epochs, warm-up of 200 updates, Adam.

    Sizes (performer_2d_relative_images.json): 3 layers of 64, feed-forwards of 128, 4 heads, GELU, dropout 0.3. Otherwise as
    `permuteformer_pathfinder`. A pixel is a number here, a word there. At the other scales digits are drawn.
    """
    sizes = {"layers": 3, "model_dim": 64, "hidden_dim": 128, "heads": 4, "dropout": 0.3}
    return _permuteformer(Images(), IMAGE, scale, batch=256, steps=9765, learning_rate=1e-2, warmup=200, **sizes)


def _lrpe(task: Task, data: Mapping[str, Any], scale: str, **paper: Any) -> Recipe:
    shared = {"scheme": "lrpe-orthogonal", "norm": "batch", "device": "auto"}
    return _scaled(task, shared, {"layers": 4, "heads": 4, "clip": 1.0, **data, **paper}, scale)


def _permuteformer(task: Task, data: Mapping[str, Any], scale: str, **paper: Any) -> Recipe:
    """Features are four times as wide as a head (section 4.1); without a decay, as bidirectional models are; no clipping."""
    scheme = "permuteformer-2d:decay=none" if isinstance(task, Pathfinder | Images) else "permuteformer:width=4,decay=none"
    shared = {"scheme": scheme, "device": "auto", "optimizer": "adam"}
    more = {"activation": "gelu", "schedule": "inverse-sqrt", "weight_decay": 0.0, "clip": 0.0, **data, **paper}
    return _scaled(task, shared, more, scale)


def _scaled(task: Task, shared: Mapping[str, Any], paper: Mapping[str, Any], scale: str) -> Recipe:
    small = Recipe(task=task).edit(**task.edits).edit(**shared)
    if getattr(task, "pair", None) == "" and "pair" in paper:
        small = small.edit(pair="other", pairs="towers")
    checks = {"validate_every": 500, "save_every": 500}
    tiny = {"steps": 50, "layers": 1, "model_dim": 32, "heads": 2}
    if isinstance(task, Pathfinder):
        tiny["pictures"] = 400
    return small.edit(**{"tiny": tiny, "small": {}, "paper": {**checks, **paper}}[scale])
