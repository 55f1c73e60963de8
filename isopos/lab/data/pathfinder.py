"""Pathfinder: grey pictures of dashed paths and two dots, which are at the ends of one path, or of two.

Drawn here from the published description: two long winding paths of dashes that do not touch, shorter ones that distract,
and two dots; all pictures have the same number of each, so that only what is connected tells them apart.

References:
    Learning long-range spatial dependencies with horizontal gated recurrent units (Linsley et al. 2018).
    https://arxiv.org/abs/1805.08315
    Long Range Arena (Tay et al. 2020), sections 2.2.5 and 2.2.6: 32 x 32 and 128 x 128. https://arxiv.org/abs/2011.04006
"""

import math
from collections.abc import Sequence

import numpy as np

from isopos.lab.data import cache
from isopos.lab.data.arrays import Arrays, Writer, key_of, prepared
from isopos.lab.data.prepare import SPLITS, Progressing

__all__ = ["draw", "prepare"]

FORMAT = 1
DASH, GAP = 2.0, 1.5  # pixels of a path, in turns
TURN = 0.6  # radians, by which the next dash turns at most
MARGIN = 1  # pixels that paths leave free, between each other and at the edge
TRIES = 60  # paths that are begun before a picture is begun anew
PICTURES = 200  # that are begun before there are none
AT_ONCE = 500


def prepare(seed: int, counts: Sequence[int], side: int, dashes: int, distractors: int, progressing: Progressing) -> Arrays:
    """Pictures ``[n side side]`` uint8 and classes ``[n]`` of each split, of the cache, drawn there if they are absent.

    Half of each split are connected.

    Raises:
        ValueError: Where such paths do not fit into the picture.
    """

    def fill(writer: Writer) -> dict[str, object]:
        done = 0
        for split, count in zip(SPLITS, counts, strict=True):
            random = np.random.default_rng((seed, SPLITS.index(split)))
            for begin in range(0, count, AT_ONCE):
                labels = np.arange(begin, min(count, begin + AT_ONCE)) % 2
                pictures = [draw(random, bool(label), side, dashes, distractors) for label in labels]
                writer.add(f"{split}-pictures", np.stack(pictures))
                writer.add(f"{split}-labels", labels)
                done += len(labels)
                progressing("drawing pictures", done, sum(counts))
        return {}

    key = key_of(FORMAT, seed, list(counts), side, dashes, distractors)
    return prepared(cache.default_root(), f"pathfinder-{key[:32]}", fill)


def draw(random: np.random.Generator, connected: bool, side: int, dashes: int, distractors: int) -> np.ndarray:
    """A picture ``[side side]`` uint8 with two paths of so many dashes, and others of a third of them.

    Examples:
        >>> picture = draw(np.random.default_rng(0), True, 16, 3, 1)
        >>> picture.shape, picture.dtype, sorted({*picture.flatten().tolist()})
        ((16, 16), dtype('uint8'), [0, 255])
    """
    for _ in range(PICTURES):
        picture, blocked = np.zeros((side, side), np.uint8), np.zeros((side, side), bool)
        ends = []
        for path in range(2 + distractors):
            found = _path(random, blocked, dashes if path < 2 else max(1, dashes // 3))
            if found is None:
                break
            points, dots = found
            y, x = points
            if path < 2:
                ends.append(dots)
                y, x = np.concatenate([y, *(dot[0] for dot in dots)]), np.concatenate([x, *(dot[1] for dot in dots)])
            _block(blocked, y, x)
            picture[points] = 255
        else:
            first, second = ends[0] if connected else (ends[0][0], ends[1][1])
            picture[first] = picture[second] = 255
            return picture
    raise ValueError(
        f"dashes: expected paths that fit into a picture of {side} x {side}, got {dashes} dashes and {distractors} "
        "distractors; choose fewer, or a larger side"
    )


Pixels = tuple[np.ndarray, np.ndarray]


def _path(random: np.random.Generator, blocked: np.ndarray, dashes: int) -> tuple[Pixels, tuple[Pixels, Pixels]] | None:
    """The pixels of a path on free ones, and those of a dot at each of its ends; or nothing where none was found."""
    side = len(blocked)
    turns = random.uniform(-TURN, TURN, (TRIES, dashes))
    turns[:, 0] = random.uniform(0, 2 * math.pi, TRIES)
    headings = np.cumsum(turns, 1)
    way = np.stack((np.sin(headings), np.cos(headings)), 1)  # [tries 2 dashes]
    place = random.uniform(MARGIN, side - 1 - MARGIN, (TRIES, 2, 1))
    begins = place + (DASH + GAP) * (np.cumsum(way, 2) - way)
    own = np.rint(begins[..., None] + way[..., None] * np.arange(0, DASH, 0.5)).astype(int).reshape(TRIES, 2, -1)
    ends = np.stack((begins[..., 0], begins[..., -1] + DASH * way[..., -1]), 1)  # [tries 2 2]
    dots = np.rint(ends).astype(int)[..., None] + np.stack(np.meshgrid([-1, 0, 1], [-1, 0, 1])).reshape(2, -1)
    whole = np.concatenate((own, dots[:, 0], dots[:, 1]), 2)
    fits = (whole >= MARGIN).all((1, 2)) & (whole < side - MARGIN).all((1, 2))
    y, x = np.clip(whole, 0, side - 1).swapaxes(0, 1)
    middles, n = begins + way * DASH / 2, np.arange(dashes)
    apart = np.abs(middles[..., :, None] - middles[..., None, :]).max(1)
    crossing = (apart <= DASH) & (np.abs(n[:, None] - n) > 1)  # dashes that do not follow each other
    found = (fits & ~blocked[y, x].any(1) & ~crossing.any((1, 2))).nonzero()[0]
    if not len(found):
        return None
    first, second = dots[found[0]]
    return tuple(own[found[0]]), (tuple(first), tuple(second))


def _block(blocked: np.ndarray, y: np.ndarray, x: np.ndarray) -> None:
    """Leave no room on pixels and beside them."""
    for dy in range(-MARGIN, MARGIN + 1):
        for dx in range(-MARGIN, MARGIN + 1):
            blocked[np.clip(y + dy, 0, len(blocked) - 1), np.clip(x + dx, 0, len(blocked) - 1)] = True
