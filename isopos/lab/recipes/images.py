"""Recipes of classifiers of images."""

from isopos.lab.tasks.images import Images
from isopos.lab.tasks.task import Recipe

EPOCH = {"cct": 45_000 // 128, "deit": 1_281_167 // 1600}  # updates; CIFAR-10 without the tenth that is held out


def cct(scale: str) -> Recipe:
    """The compact convolutional transformer of the algebraic paper's Table 3 (CCT-7/3x1, Hassani et al. 2021), on CIFAR-10.

    Width 256, feed-forward 512, GELU, 7 layers, 4 heads, attention dropout and stochastic depth 10% (appendix B). Both
    authors' code has batches of 128, weight decay 3e-2, label smoothing 0.1, 5 epochs of warm-up to 5e-4 and a cosine; the
    algebraic paper has 300 epochs. Its code, like Hassani's script for CIFAR-10, applies AutoAugment's policy (Cubuk et al.
    2018), then moves images by at most 4 pixels and flips them, as here; new pixels are black there, and have the colour of
    the edge here. The algebraic paper's code has 100 tokens where Hassani's and this one have 256, and more dropout; the
    notes of the table ape-3 list the differences. Other scales use drawn digits, which are only moved.
    """
    paper = Recipe(task=Images()).edit(
        scheme="ape-grid:attention=softmax,initial=identity,locality=0.98,metric=euclidean",
        data="cifar10",
        tokenizer="convolution",
        patch=2,
        pooling="sequence",
        augment="crop-flip",
        policy="autoaugment",
        smoothing=0.1,
        steps=300 * EPOCH["cct"],
        batch=128,
        layers=7,
        model_dim=256,
        heads=4,
        hidden_dim=512,
        activation="gelu",
        attention_dropout=0.1,
        stochastic_depth=0.1,
        learning_rate=5e-4,
        warmup=5 * EPOCH["cct"],
        weight_decay=3e-2,
        clip=0.0,
        validate_every=10 * EPOCH["cct"],
        save_every=10 * EPOCH["cct"],
        workers=4,
        device="auto",
    )
    return _scaled(paper, scale)


def deit(scale: str) -> Recipe:
    """DeiT-small with linear attention, as in LRPE's Table 3, on ImageNet.

    12 layers of 384, feed-forward 1536, GELU, 6 heads, 300 epochs of batches of 1600, AdamW with betas 0.9 and 0.98, weight
    decay 0.05, 20 epochs of warm-up to 5e-4, then a cosine (Table 8). The rest is not in the paper. From DeiT (Touvron et
    al. 2021, Table 9): patches of 16 pixels of 224, stochastic depth 0.1, label smoothing 0.1, repeated augmentation,
    RandAugment 9/0.5, mixup 0.8, cutmix 1 and erasing 0.25; from its code: random crops that are scaled and flipped. The
    mean of all tokens replaces its class token. Other scales use drawn digits, which are only moved.
    """
    paper = Recipe(task=Images()).edit(
        scheme="lrpe-orthogonal",
        data="imagenet",
        height=224,
        width=224,
        patch=16,
        augment="scale-flip",
        policy="randaugment",
        erasing=0.25,
        mixup=0.8,
        cutmix=1.0,
        repeats=3,
        smoothing=0.1,
        steps=300 * EPOCH["deit"],
        batch=1600,
        layers=12,
        model_dim=384,
        heads=6,
        hidden_dim=1536,
        activation="gelu",
        stochastic_depth=0.1,
        learning_rate=5e-4,
        warmup=20 * EPOCH["deit"],
        beta2=0.98,
        weight_decay=0.05,
        clip=0.0,
        validate_every=10 * EPOCH["deit"],
        save_every=10 * EPOCH["deit"],
        workers=8,
        device="auto",
    )
    return _scaled(paper, scale)


def _scaled(paper: Recipe, scale: str) -> Recipe:
    """The recipe for drawn digits without flips, at sizes for two CPU cores."""
    small = paper.edit(data="", height=0, width=0, patch=4, layers=3, model_dim=64, heads=4)
    small = small.edit(augment="crop", policy="none", erasing=0.0, mixup=0.0, cutmix=0.0, repeats=1, smoothing=0.0)
    small = small.edit(hidden_dim=128, steps=800, batch=32, stochastic_depth=0.0, attention_dropout=0.0, learning_rate=2e-3)
    small = small.edit(warmup=80, validate_every=200, save_every=200, workers=0)
    tiny = small.edit(layers=1, model_dim=32, heads=2, hidden_dim=64, steps=50, warmup=5, validate_every=25, save_every=25)
    return {"tiny": tiny, "small": small, "paper": paper}[scale]
