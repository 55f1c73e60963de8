"""Random augmentations of training images: policies of operations, random crops, erasing and mixing.

Each is a function of images and a random generator alone. Empty pixels are grey, which our models see as 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageEnhance, ImageOps

EMPTY = "#808080"
ATTEMPTS = 10  # to find a rectangle that fits
NOISE = 128, 58  # mean and standard deviation of the noise in erased rectangles

OPERATIONS: Mapping[str, Callable[[Image.Image, float], Image.Image]] = {
    "shear-x": lambda image, amount: _affine(image, (1, amount, 0, 0, 1, 0)),
    "shear-y": lambda image, amount: _affine(image, (1, 0, 0, amount, 1, 0)),
    "translate-x": lambda image, amount: _affine(image, (1, 0, amount * image.width, 0, 1, 0)),
    "translate-y": lambda image, amount: _affine(image, (1, 0, 0, 0, 1, amount * image.height)),
    "rotate": lambda image, amount: image.rotate(amount, Image.Resampling.BICUBIC, fillcolor=EMPTY),
    "color": lambda image, amount: ImageEnhance.Color(image).enhance(1 + amount),
    "contrast": lambda image, amount: ImageEnhance.Contrast(image).enhance(1 + amount),
    "brightness": lambda image, amount: ImageEnhance.Brightness(image).enhance(1 + amount),
    "sharpness": lambda image, amount: ImageEnhance.Sharpness(image).enhance(1 + amount),
    "posterize": lambda image, amount: _mapped(image, [n >> 8 - int(amount) << 8 - int(amount) for n in range(256)]),
    "solarize": lambda image, amount: ImageOps.solarize(image, int(amount)),
    "solarize-add": lambda image, amount: _mapped(image, [min(255, n + int(amount) * (n < 128)) for n in range(256)]),
    "autocontrast": lambda image, amount: ImageOps.autocontrast(image),
    "equalize": lambda image, amount: ImageOps.equalize(image),
    "invert": lambda image, amount: ImageOps.invert(image),
}
"""Amounts are factors of shears and enhancements, shares of the side of translations, degrees of rotations."""
ENHANCED = dict.fromkeys(("color", "contrast", "brightness", "sharpness"), 0.9)
SIGNED = {"shear-x": 0.3, "shear-y": 0.3, "rotate": 30, **ENHANCED}  # the largest amounts, in both directions
AUTO = {**SIGNED, "translate-x": 150 / 331, "translate-y": 150 / 331}
RAND = {**SIGNED, "translate-x": 0.45, "translate-y": 0.45}

CIFAR10 = (
    ("invert", 0.1, 7, "contrast", 0.2, 6),
    ("rotate", 0.7, 2, "translate-x", 0.3, 9),
    ("sharpness", 0.8, 1, "sharpness", 0.9, 3),
    ("shear-y", 0.5, 8, "translate-y", 0.7, 9),
    ("autocontrast", 0.5, 8, "equalize", 0.9, 2),
    ("shear-y", 0.2, 7, "posterize", 0.3, 7),
    ("color", 0.4, 3, "brightness", 0.6, 7),
    ("sharpness", 0.3, 9, "brightness", 0.7, 9),
    ("equalize", 0.6, 5, "equalize", 0.5, 1),
    ("contrast", 0.6, 7, "sharpness", 0.6, 5),
    ("color", 0.7, 7, "translate-x", 0.5, 8),
    ("equalize", 0.3, 7, "autocontrast", 0.4, 8),
    ("translate-y", 0.4, 3, "sharpness", 0.2, 6),
    ("brightness", 0.9, 6, "color", 0.2, 8),
    ("solarize", 0.5, 2, "invert", 0.0, 3),
    ("equalize", 0.2, 0, "autocontrast", 0.6, 0),
    ("equalize", 0.2, 8, "equalize", 0.6, 4),
    ("color", 0.9, 9, "equalize", 0.6, 6),
    ("autocontrast", 0.8, 4, "solarize", 0.2, 8),
    ("brightness", 0.1, 3, "color", 0.7, 0),
    ("solarize", 0.4, 5, "autocontrast", 0.9, 3),
    ("translate-y", 0.9, 9, "translate-y", 0.7, 9),
    ("autocontrast", 0.9, 2, "solarize", 0.8, 3),
    ("equalize", 0.8, 8, "invert", 0.1, 3),
    ("translate-y", 0.7, 9, "autocontrast", 0.9, 1),
)
"""Operation, probability and level from 0 to 9, two per sub-policy (Cubuk et al. 2018, appendix, Table 7)."""


def autoaugment(image: Image.Image, random: Generator) -> Image.Image:
    """Apply one of 25 sub-policies for CIFAR-10, each of two operations with a probability.

    Level 9 of an operation is the end of its range: 0.3 of shears, 150 / 331 of the side, 30 degrees, factors from 0.1 to
    1.9 with 1 at level 0, 4 bits of 8, a threshold of 0. The direction of shears, translations, rotations and factors is
    random; the code of CCT's authors rotates in one direction only, and takes nearest pixels, not bicubic ones.

    References:
        AutoAugment: learning augmentation policies from data (Cubuk et al. 2018), Tables 6 and 7.
        https://arxiv.org/abs/1805.09501
    """
    policy = CIFAR10[random.integers(len(CIFAR10))]
    for name, probability, level in (policy[:3], policy[3:]):
        if random.random() < probability:
            share = level / 9
            amounts = {"posterize": round(8 - 4 * share), "solarize": math.ceil(256 * (1 - share))}
            image = OPERATIONS[name](image, amounts.get(name, _signed(AUTO, name, share, random)))
    return image


def randaugment(image: Image.Image, random: Generator) -> Image.Image:
    """Apply two operations of 15, each with probability 1/2, at a level of 9 +- 0.5 of 10.

    This is rand-m9-mstd0.5-inc1 of DeiT: level 10 is 0.3 of shears, 0.45 of the side, 30 degrees, factors of 0.1
    or 1.9, no bit, a threshold of 0, and 110 added to values below 128.

    References:
        RandAugment: practical automated data augmentation (Cubuk et al. 2020). https://arxiv.org/abs/1909.13719
        Training data-efficient image transformers (Touvron et al. 2021), Table 9. https://arxiv.org/abs/2012.12877
    """
    for number in random.integers(len(OPERATIONS), size=2):
        if random.random() < 0.5:
            name, share = [*OPERATIONS][number], min(random.normal(9, 0.5), 10) / 10
            amounts = {"posterize": 4 - int(4 * share), "solarize": 256 - int(256 * share), "solarize-add": int(110 * share)}
            image = OPERATIONS[name](image, amounts.get(name, _signed(RAND, name, share, random)))
    return image


POLICIES = {"autoaugment": autoaugment, "randaugment": randaugment}


def random_crop(image: Image.Image, random: Generator) -> Image.Image:
    """A random crop of 8% to 100% of the area, with sides of 3 : 4 to 4 : 3, scaled to the size of the image.

    References:
        Going deeper with convolutions (Szegedy et al. 2015), section 6. https://arxiv.org/abs/1409.4842
    """
    part = _part(image.height, image.width, (0.08, 1), 4 / 3, random)
    if part is None:
        return image
    y, x = part
    return image.resize(image.size, Image.Resampling.BICUBIC, (x.start, y.start, x.stop, y.stop))


def erase(pixels: np.ndarray, random: Generator) -> np.ndarray:
    """Replace a rectangle of 2% to 33% of an image ``[c h w]`` uint8, with sides of 3 : 10 to 10 : 3, by noise.

    References:
        Random erasing data augmentation (Zhong et al. 2020). https://arxiv.org/abs/1708.04896
    """
    _, height, width = pixels.shape
    part = _part(height, width, (0.02, 1 / 3), 10 / 3, random)
    if part is None:
        return pixels
    pixels = pixels.copy()
    rectangle = pixels[:, *part]
    rectangle[:] = random.normal(*NOISE, rectangle.shape).round().clip(0, 255)
    return pixels


def mix(
    pixels: np.ndarray, answers: np.ndarray, classes: int, mixup: float, cutmix: float, random: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Mix neighbouring pairs of images ``[n c h w]`` uint8; returns images and targets, shares of classes ``[n classes]``.

    Mixup is a weighted sum of pixels, rounded, with a share of Beta(mixup, mixup). CutMix takes a rectangle from the other
    image, with a share of Beta(cutmix, cutmix). The share is drawn once per batch. A parameter of 0 switches a method off;
    if both are on, each is chosen half of the time.

    References:
        mixup: beyond empirical risk minimization (Zhang et al. 2018). https://arxiv.org/abs/1710.09412
        CutMix: regularization strategy to train strong classifiers (Yun et al. 2019). https://arxiv.org/abs/1905.04899
    """
    other = (np.arange(len(pixels)) ^ 1).clip(max=len(pixels) - 1)  # the last of an odd number has none
    targets = np.eye(classes, dtype=np.float32)[answers]
    if cutmix > 0 and (mixup == 0 or random.random() < 0.5):
        side = math.sqrt(1 - random.beta(cutmix, cutmix))
        middles = [(random.integers(size), int(size * side) // 2) for size in pixels.shape[2:]]
        y, x = (slice(max(0, middle - half), middle + half) for middle, half in middles)
        cut = pixels.copy()
        cut[:, :, y, x] = pixels[other][:, :, y, x]
        share = 1 - pixels[0, 0, y, x].size / pixels[0, 0].size
        return cut, _between(targets, targets[other], share)
    share = random.beta(mixup, mixup)
    return _between(pixels, pixels[other], share).round().astype(np.uint8), _between(targets, targets[other], share)


def _between(one: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
    """Weighted sum of two arrays in float32; `share` is the weight of the first one."""
    return np.float32(share) * one + np.float32(1 - share) * other


def _signed(most: Mapping[str, float], name: str, share: float, random: Generator) -> float:
    """A share of the largest amount of an operation, with a random sign; 0 for operations without an amount."""
    return most.get(name, 0.0) * share * (2 * random.integers(2) - 1)


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=EMPTY)


def _mapped(image: Image.Image, table: Sequence[int]) -> Image.Image:
    """An image whose values are replaced by the entries of a table."""
    return image.point([*table] * len(image.getbands()))


def _part(
    height: int, width: int, area: tuple[float, float], aspect: float, random: Generator
) -> tuple[slice, slice] | None:
    """Rows and columns of a random rectangle by its share of the area and the largest ratio of its sides, or None."""
    for _ in range(ATTEMPTS):
        size = random.uniform(*area) * height * width
        ratio = math.exp(random.uniform(-1, 1) * math.log(aspect))
        sides = round(math.sqrt(size / ratio)), round(math.sqrt(size * ratio))
        if 0 < sides[0] <= height and 0 < sides[1] <= width:
            y, x = (int(random.integers(whole - side + 1)) for whole, side in zip((height, width), sides, strict=True))
            return slice(y, y + sides[0]), slice(x, x + sides[1])
    return None
