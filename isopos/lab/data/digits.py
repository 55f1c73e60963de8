"""Synthetic images of digits: strokes, randomly moved, slanted and thickened, on noise. No file is read."""

import numpy as np

STROKES: tuple[str, ...] = (
    "5,0 8,2 9,5 8,8 5,10 2,8 1,5 2,2 5,0",
    "3,2 6,0 6,10",
    "1,3 3,0 7,0 9,3 7,6 1,10 9,10",
    "1,1 5,0 8,2 7,4 4,5 7,6 9,8 5,10 1,9",
    "7,10 7,0 1,7 9,7",
    "8,0 2,0 2,4 6,4 9,7 6,10 1,9",
    "8,1 4,0 1,5 2,9 5,10 8,8 7,5 2,6",
    "1,0 9,0 4,10",
    "5,5 2,3 3,0 7,0 8,3 5,5 1,7 3,10 7,10 9,7 5,5",
    "8,4 5,5 2,3 3,0 7,0 8,3 6,10",
)
"""Corners of the line of each digit: x to the right and y downwards, in a box of 10 by 10."""
BLOCK = 500  # images drawn at once


def draw_digits(seed: int, count: int, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[n 1 h w]`` uint8, light on dark, and their digits ``[n]``: a function of the arguments.

    The centre of a digit lies in the middle third of the image; its height is two to three fifths of the shorter side.

    Examples:
        >>> pixels, digits = draw_digits(0, 4, 28, 28)
        >>> pixels.shape, pixels.dtype, digits.tolist()
        ((4, 1, 28, 28), dtype('uint8'), [8, 6, 5, 2])
    """
    random = np.random.default_rng(seed)
    digits = random.integers(10, size=count)
    drawn = [_drawn(random, digits[n : n + BLOCK], height, width) for n in range(0, count, BLOCK)]
    return np.concatenate(drawn)[:, None], digits


def _drawn(random: np.random.Generator, digits: np.ndarray, height: int, width: int) -> np.ndarray:
    n, side = len(digits), min(height, width)
    begin, end = _segments(digits)  # [n s 2]
    size = side * random.uniform(0.4, 0.6, n) / 10
    slant, turn = random.uniform(-0.3, 0.3, n), random.uniform(-0.25, 0.25, n)
    aspect, half = random.uniform(0.6, 0.9, n), random.uniform(0.03, 0.055, n) * side
    middle = np.array([width, height]) * random.uniform(1 / 3, 2 / 3, (n, 2)) - 0.5
    cos, sin, one = np.cos(turn), np.sin(turn), np.ones(n)
    turned = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)
    shape = turned @ np.stack([np.stack([aspect, slant], -1), np.stack([0 * one, one], -1)], -2) * size[:, None, None]
    begin, end = (np.einsum("nij,nsj->nsi", shape, points - 5) + middle[:, None] for points in (begin, end))
    begin, end, half = (values.astype(np.float32) for values in (begin, end, half))
    pixel = np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1).reshape(-1, 2).astype(np.float32)  # [p 2]
    nearest = np.full((n, len(pixel)), np.inf, np.float32)
    for a, b in zip(begin.swapaxes(0, 1), end.swapaxes(0, 1), strict=True):  # distances to one segment of each digit
        segment, offset = (b - a)[:, None], pixel - a[:, None]
        share = np.clip((offset * segment).sum(-1) / np.maximum((segment**2).sum(-1), 1e-9), 0, 1)
        nearest = np.minimum(nearest, np.hypot(*np.moveaxis(offset - share[..., None] * segment, -1, 0)))
    ink = np.clip(half[:, None] + 0.5 - nearest, 0, 1) * random.uniform(0.6, 0.9, n)[:, None]
    noise = 0.08 * random.standard_normal(ink.shape)
    return (255 * np.clip(ink + 0.1 + noise, 0, 1)).astype(np.uint8).reshape(n, height, width)


def _segments(digits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the segments of each digit, padded to the longest line by repeating the last point."""
    lines = [np.array([[float(x) for x in corner.split(",")] for corner in line.split()]) for line in STROKES]
    most = max(map(len, lines))
    padded = np.stack([np.concatenate([line, np.repeat(line[-1:], most - len(line), 0)]) for line in lines])[digits]
    return padded[:, :-1], padded[:, 1:]
