"""Classification of images: folders, archives, datasets or synthetic digits, as tokens on a grid or on a line."""

import base64
import copy
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled, classifier_metrics
from isopos.lab.tasks.task import Recipe, Scored, View, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.lab.data.images import ImageDataset


CROP = 8  # training images are shifted by at most 1 / CROP of a side


@dataclass(frozen=True)
class Images(PositionedTask):
    """A classifier of images, and how pixels become tokens.

    The scheme determines whether positions are row and column of a token, or its number.
    """

    data: str = ""
    """A folder or an archive with one folder of images per class, perhaps below train, valid and test, or hf:NAME[:CONFIG];
    empty: 10,000 synthetic digits. See docs/data.md."""
    height: int = 0  # Pixels; 0: the height of the images, if all are equal. Other images are scaled and cropped.
    width: int = 0  # Pixels; 0: the width of the images, if all are equal.
    margin: int = 0  # Pixels added around images, with the colours of their edges.
    tokenizer: Literal["patches", "convolution"] = "patches"
    """Tokens are disjoint squares, as in ViT; or the outputs of a convolution and a max-pool, as in CCT."""
    patch: int = 4  # Distance of neighbouring tokens in pixels.
    pooling: Literal["mean", "sequence"] = "mean"  # Mean of the tokens; or a weighted mean with learned weights, as in CCT.
    augment: Literal["none", "crop", "crop-flip", "scale-flip"] = "none"
    """Random augmentation of training images: shift by at most an eighth, or crop and scale; and flip half of them, left to
    right."""
    policy: Literal["none", "autoaugment", "randaugment"] = "none"
    """Random operations on training images: AutoAugment's policy for CIFAR-10, as in CCT; or RandAugment, as in DeiT."""
    erasing: float = 0.0  # Probability with which a rectangle of a training image is replaced by noise.
    mixup: float = 0.0  # Mix pairs of training images and their classes with a share of Beta(mixup, mixup); 0: off.
    cutmix: float = 0.0  # Exchange rectangles of pairs, by Beta(cutmix, cutmix); with mixup, in half of the batches; 0: off.
    repeats: int = 1  # Copies of a training image per epoch, augmented differently; an epoch has fewer different images.
    smoothing: float = 0.0  # Label smoothing: the share of the target that is uniform over classes.
    channels: int = 0  # 1: convert images to grey; 0: 1 if all images are grey, else 3.
    classes: int = 0  # Number of classes; 0: as in the data.
    validation_rows: int = 0  # Largest number of held-out images that are scored; 0: all.

    name = "images"
    schemes = "none,sinusoidal,rope,ape-sequence,ape-grid,permuteformer-2d,horn-clipped:axes=2"
    edits = MappingProxyType({"steps": 600, "batch": 32, "layers": 2, "model_dim": 48, "heads": 4, "learning_rate": 5e-3})
    unit = "images"
    counted = "images"
    limits = (
        (("height", "width", "margin"), 0, 10**5),
        ("patch", 1, 10**5),
        ("channels", 0, 10**3),
        (("classes", "validation_rows"), 0, 10**9),
        (("smoothing", "erasing"), 0, 1),
        (("mixup", "cutmix"), 0, 10**6),
        ("repeats", 1, 10**6),
    )
    inferred = ("height", "width", "channels", "classes")
    views = ("split", "limit", "height", "width", "shift")
    where = "on a line or on a grid of 2 axes, which images have"
    metrics = classifier_metrics("held-out images", "whose class is named")

    def setting(self, recipe: Recipe) -> str:
        return (
            f"A classifier of images of {self.height} x {self.width} pixels, a token for each {self.patch} x {self.patch} "
            f"({self.tokenizer}), with {self.pooling} pooling."
        )

    def tokens(self, height: int, width: int) -> int:
        """Number of tokens of an image."""
        return math.prod(self.sides(height, width))

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image."""
        rows, columns = (-(-(side + 2 * self.margin) // self.patch) for side in (height, width))
        return rows, columns

    @property
    def fits(self) -> dict[str, object]:
        length = self.tokens(self.height, self.width)
        known = {"length": length, "reach": length} if self.height and self.width else {}
        return {"scale": 1.0, **known}  # tokens of pixels vary about as much

    def check(self, recipe: Recipe) -> list[str]:
        from isopos.lab.tasks.build import repeated_positions

        scheme = self.check_groups(recipe)
        require("outside", scheme.outside, "0, since these models have no class tokens", scheme.outside == 0)
        if self.mixup or self.cutmix:
            t = recipe.training
            least = 2 * t.accumulate * t.devices * t.nodes
            what = f"pairs to mix, a multiple of 2 * accumulate * devices * nodes = {least}"
            require("batch", t.batch, what, t.batch % least == 0)
        require("width", self.width, "both a width and a height, or neither", bool(self.height) == bool(self.width))
        model = self.model(recipe)
        if not self.height:
            return []
        model.tokens.sides(self.height + 2 * self.margin, self.width + 2 * self.margin)
        longest = self.tokens(self.height, self.width)
        if scheme.max_length is not None and scheme.max_length < longest:
            raise ValueError(
                f"height: expected images of at most {scheme.max_length} tokens, for which {recipe.scheme} has positions, "
                f"got {longest}; choose a smaller one, or a larger --patch"
            )
        span = longest if scheme.group.columns == 1 else (max(self.height, self.width) + 2 * self.margin) // self.patch
        return repeated_positions(recipe, scheme, span)

    def extent(self, view: View, axes: int) -> tuple[float, int]:
        """The length of the axis that grows most; for positions on a line, the number of tokens."""
        trained, seen = self.sides(self.height, self.width), dict(view.own)
        now = self.sides(seen.get("height", self.height), seen.get("width", self.width))
        if axes == 1:
            trained, now = (math.prod(trained),), (math.prod(now),)
        return max(1.0, *(b / a for a, b in zip(trained, now, strict=True))), max(trained)

    def check_view(self, view: View) -> None:
        super().check_view(view)
        for name, value in view.own:
            require(name, value, "pixels", value >= (name != "shift"))

    def model(self, recipe: Recipe) -> Any:
        options = {"tokenizer": self.tokenizer, "patch": self.patch, "pooling": self.pooling}
        return self.build(recipe, "Vision", self.channels or 1, self.classes or 2, **options)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "ImageSamples":
        return ImageSamples(self, self.pictures(self.height, self.width, console))

    def pictures(self, height: int, width: int, console: "Console | None" = None) -> "ImageDataset":
        """The images in a size; 0: their original size."""
        from isopos.lab.data import images

        if not self.data:
            return images.digits(height, width)
        return images.read_images(self.data, height, width, grey=self.channels == 1, console=console)


class ImageSamples(Labelled):
    """Images for training and evaluation."""

    shift = 0  # pixels by which scored images are moved: right, down, left and up in turn

    def __init__(self, task: Images, pictures: "ImageDataset"):
        self.task, self.name, self.sha256, self.limit = task, pictures.name, pictures.sha256, task.validation_rows
        self.copies = task.repeats
        self.show(pictures)
        train, validation, test = (pictures.splits[split] for split in ("train", "validation", "test"))
        self.exact = {"channels": pictures.pixels.shape[1], "classes": len(pictures.classes)}
        usual = int(np.bincount(pictures.labels[train]).argmax())
        share = (pictures.labels[validation] == usual).mean()
        height, width = pictures.pixels.shape[2:]
        self.adopted = {"height": height, "width": width}
        self.summary = (
            f"{len(train)} + {len(validation)} + {len(test)} images of {height} x {width} pixels, "
            f"{'grey' if pictures.pixels.shape[1] == 1 else 'in colours'}, {len(pictures.classes)} classes"
            + "".join(f", {left} left out" for left in pictures.skipped)
            + f"; without a model: always {pictures.classes[usual]} {share:.1%}"
        )

    def show(self, pictures: "ImageDataset") -> None:
        """Replace the images by these."""
        tokens = self.task.tokens(*pictures.pixels.shape[2:])
        self.pictures = pictures
        self.sizes = {split: np.full(len(rows), tokens) for split, rows in pictures.splits.items()}

    def labels(self, split: str) -> np.ndarray:
        return self.pictures.labels[self.pictures.splits[split]]

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Pixels ``[b c h w]`` uint8, with their margin, and classes ``[b]``, or shares of classes ``[b classes]``."""
        import torch

        chosen = self.pictures.splits[split][rows % len(self.sizes[split])]
        pixels, answers, task = self.pictures.pixels[chosen], self.pictures.labels[chosen], self.task
        if step is None:
            moves = self.shift * np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])[rows % 4]
            pixels = _moved(pixels, moves, np.zeros(len(rows), bool), task.margin)
        else:
            pixels = self._changed(pixels, [(recipe.seed, step, int(row)) for row in rows])
        if step is not None and (task.mixup or task.cutmix):
            from isopos.lab.data.augment import mix

            random = np.random.default_rng((recipe.seed, step, 0, 1))  # no row's, and the same on all ranks
            pixels, answers = mix(pixels, answers, len(self.pictures.classes), task.mixup, task.cutmix, random)
        return torch.from_numpy(pixels), torch.from_numpy(answers)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        pixels, answers = batch
        return F.cross_entropy(model(pixels), answers, label_smoothing=self.task.smoothing)

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        """The scores of `Labelled`; for a view in another size, images are read again from their source."""
        seen, size = copy.copy(self), self.pictures.pixels.shape[2:]
        options = {"shift": 0, "height": int(size[0]), "width": int(size[1])} | dict(view.own)
        seen.shift, height, width, margin = options["shift"], options["height"], options["width"], 2 * self.task.margin
        if (height, width) != size:
            try:
                model.tokens.sides(height + margin, width + margin)
            except ValueError as error:
                return Scored(reason=str(error))
            most, tokens = model.scheme.max_length, self.task.tokens(height, width)
            if most is not None and most < tokens:
                return Scored(reason=f"height: expected at most {most} tokens, for which there are positions, got {tokens}")
            seen.show(self.task.pictures(height, width))
        return super(ImageSamples, seen).score(model, recipe, view)

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        rows = np.arange(min(count, len(self.sizes["validation"])))
        logits, answers = self.answers(model, recipe, "validation", rows)
        sure, named = logits.softmax(-1).max(-1)
        images, names = self.pictures.pixels[self.pictures.splits["validation"][rows]], self.pictures.classes
        rows_shown = zip(images, answers.tolist(), named.tolist(), sure.tolist(), strict=True)
        return [
            {"image": _png(pixels), "class": names[answer], "model": names[guess], "with probability": f"{share:.0%}"}
            for pixels, answer, guess, share in rows_shown
        ]

    def _changed(self, pixels: np.ndarray, seeds: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Augmented training images with their margin; `seeds` has one seed per image."""
        task, side = self.task, np.array(pixels.shape[2:])
        moves, flips = np.zeros((len(seeds), 2), np.int64), np.zeros(len(seeds), bool)
        if task.augment == "none" and task.policy == "none" and not task.erasing:
            return _moved(pixels, moves, flips, task.margin)
        randoms = [np.random.default_rng(seed) for seed in seeds]
        drawn = np.array([random.random(3) for random in randoms])
        if task.augment.startswith("crop"):
            moves = np.floor(drawn[:, :2] * (2 * (side // CROP) + 1)).astype(np.int64) - side // CROP
        if task.augment.endswith("flip"):
            flips = drawn[:, 2] < 0.5
        if task.augment == "scale-flip" or task.policy != "none":
            pixels = np.stack([self._repainted(*both) for both in zip(pixels, randoms, strict=True)])
        pixels = _moved(pixels, moves, flips, task.margin)
        if task.erasing:
            from isopos.lab.data.augment import erase

            both = zip(pixels, randoms, strict=True)
            pixels = np.stack([erase(one, random) if random.random() < task.erasing else one for one, random in both])
        return pixels

    def _repainted(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """An image ``[c h w]`` after a random crop and the operations of the policy."""
        from PIL import Image

        from isopos.lab.data.augment import POLICIES, random_crop

        image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
        if self.task.augment == "scale-flip":
            image = random_crop(image, random)
        if self.task.policy != "none":
            image = POLICIES[self.task.policy](image, random)
        return np.asarray(image).reshape(*pixels.shape[1:], -1).transpose(2, 0, 1)


def _moved(pixels: np.ndarray, moves: np.ndarray, flips: np.ndarray, margin: int) -> np.ndarray:
    """Images ``[n c h w]`` moved down and right by `moves` pixels ``[n 2]``, then flipped where `flips` ``[n]`` is True.

    Pixels beyond the edges, also in the margin, repeat the edge.
    """
    if not (moves.any() or flips.any() or margin):
        return pixels
    y, x = (
        (np.arange(-margin, side + margin) - move[:, None]).clip(0, side - 1)
        for side, move in zip(pixels.shape[2:], moves.T, strict=True)
    )
    x[flips] = x[flips, ::-1]
    return np.stack([image[:, rows][:, :, columns] for image, rows, columns in zip(pixels, y, x, strict=True)])


def _png(pixels: np.ndarray) -> str:
    """An image ``[c h w]`` as a data URL of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
