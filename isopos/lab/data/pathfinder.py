"""Pathfinder: grey pictures of dashed paths and two dots, which are the ends of one long path or of two paths.

Pictures are drawn in pairs. Both pictures of a pair have two long winding paths with the same first dashes at each of the
four ends, dots at the same two ends, equal numbers of dashes and lit pixels in the long paths, and equal numbers of shorter
paths. They differ in a few dashes in the middle, which join the ends: the two dots in one picture, each dot and an end
without a dot in the other. Among random candidates, the two pictures that are most alike after blurring are taken. So dots
and first dashes do not determine the class, and counts of pixels hardly: the accuracy of simple classifiers is 53% on
pictures of 24 x 24 with 12 dashes, and 50% on 32 x 32 with 14 dashes and 5 distractors, over 2,000 and 1,000 pictures
(`tests/test_pathfinder.py` allows for the noise of fewer). With few dashes, such as 6 on 16 x 16, it is more than 60%.

A gap within a path spans at most one dark pixel, and different paths are further apart, so every picture has one right
answer. The numbers of dashes follow the generator of Linsley et al.; the Arena uses paths of 14 dashes with 5 distractors of
4 (`curv_contour_length_14`). The sizes in pixels are ours, and pixels are either 0 or 255.

References:
    Learning long-range spatial dependencies with horizontal gated recurrent units (Linsley et al. 2018).
    https://arxiv.org/abs/1805.08315
    Long Range Arena (Tay et al. 2020), sections 2.2.5 and 2.2.6: 32 x 32 and 128 x 128. https://arxiv.org/abs/2011.04006
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import numpy as np

from isopos.lab.data.arrays import Arrays, Writer
from isopos.lab.data.prepare import SPLITS, OnProgress, generated_arrays

CACHE_VERSION = 2
FEWEST = 4  # Dashes of a long path.
STEP, GAP = 2.5, 1.75  # Pixels from one dash to the next along a path, and pixels of the gap between them.
REACH = 2  # Largest distance in pixels of consecutive dashes of a path; different paths are further apart.
TURN = 1.2  # Largest angle between consecutive dashes in radians.
MARGIN = 1  # Dark pixels at the edge.
SPREAD = 0.7  # Largest distance of first dashes to be joined, as a share of the length of the dashes between them.
WALKS = 192  # Random paths; pairs of them give first dashes.
PAIRS = 24  # Largest number of such pairs that are tried.
HALVES = 50  # Random halves of a path from each end, per dash whose direction is free.
CANDIDATES = 64  # Paths between two ends, among which a compatible one is chosen.
BLUR = 2  # Radius of the blur in pixels.
SHORT = 400  # Random distractors, among which one that fits is chosen.
ATTEMPTS = 4  # To find room for the distractors of a picture.
BATCHES = 500  # Of random paths before the picture counts as too full.
CROWDED = 40  # Long paths without room for distractors before that.
AT_ONCE = 500  # Pictures written together, an even number.

LIT = np.linspace(GAP / 2 / STEP, 1 - GAP / 2 / STEP, 4)[:, None]  # points of a dash, as shares of a step


def prepare(seed: int, counts: Sequence[int], side: int, dashes: int, distractors: int, progressing: OnProgress) -> Arrays:
    """Pictures ``[n side side]`` uint8 and classes ``[n]`` of each split, from the cache or drawn.

    Half of each split are connected: pictures 2n and 2n + 1 are a pair.

    Raises:
        ValueError: If such paths do not fit into the picture.
    """

    def fill(writer: Writer) -> dict[str, object]:
        done = 0
        for split, count in zip(SPLITS, counts, strict=True):
            random = np.random.default_rng((seed, SPLITS.index(split)))
            for begin in range(0, count, AT_ONCE):
                labels = np.arange(begin, min(count, begin + AT_ONCE)) % 2
                pairs = [draw_pair(random, side, dashes, distractors) for _ in labels[::2]]
                writer.add(f"{split}-pictures", np.concatenate(pairs)[: len(labels)])
                writer.add(f"{split}-labels", labels)
                done += len(labels)
                progressing("drawing pictures", done, sum(counts))
        return {}

    return generated_arrays("pathfinder", fill, CACHE_VERSION, seed, counts, side, dashes, distractors)


def draw_pair(random: np.random.Generator, side: int, dashes: int, distractors: int) -> np.ndarray:
    """A pair of pictures ``[2 side side]`` uint8; only in the second one the dots are connected.

    Each has two paths of `dashes` dashes, and distractors of a third as many.

    Examples:
        >>> pair = draw_pair(np.random.default_rng(0), 16, 5, 1)
        >>> pair.shape, pair.dtype, sorted({*pair.flatten().tolist()})
        ((2, 16, 16), dtype('uint8'), [0, 255])
    """
    if dashes < FEWEST:
        raise ValueError(
            f"dashes: expected {FEWEST} or more, of which some in the middle can be joined in two ways, got {dashes}"
        )
    crowded = 0
    for _ in range(BATCHES):
        for stubs in _stubs(random, side, dashes):
            if (long := _long(random, stubs, side, dashes)) is None:
                continue
            pictures = [picture for one in long if (picture := _distract(random, one, dashes // 3, distractors)) is not None]
            if len(pictures) == 2:
                return np.stack(pictures).astype(np.uint8) * 255
            crowded += 1
        if crowded > CROWDED:
            break
    raise ValueError(
        f"dashes: expected paths that fit into a picture of {side} x {side}, got {dashes} dashes and {distractors} "
        "distractors; choose fewer, or a larger side"
    )


def _stubs(random: np.random.Generator, side: int, dashes: int) -> Iterator[np.ndarray]:
    """Corners ``[4 dashes+1 2]`` of first dashes: the ends of two random paths that do not touch.

    The first two begin with dots. They belong to one random path or to both, with equal probability.
    """
    corners = _placed(random, _walk(random, WALKS, dashes), side)
    corners = corners[_simple(corners)]
    masks = _masks(_pixels(corners), side)
    one, other = _apart(masks, masks, REACH + 1).nonzero()
    last = 1 + _kept(dashes)
    every = np.stack([part[:, :last] for n in (one, other) for part in (corners[n], corners[n, ::-1])], 1)  # [n 4 last 2]
    ends, tips = (_distance(every[:, None, :, n] - every[:, :, None, n]) for n in (0, -1))  # [n 4 4]
    reachable = tips[:, [0, 1], [2, 3]].max(1) < SPREAD * STEP * (dashes - 2 * last + 4)
    clear = (ends + side * np.eye(4)).min((1, 2)) > REACH + 3
    dots = _pixels(every[:, :, :2].reshape(-1, 2, 2))[:, 0, 0].reshape(-1, 8)
    framed = ((dots > MARGIN) & (dots < side - 1 - MARGIN)).all(1)
    for n in random.permutation((reachable & clear & framed).nonzero()[0])[:PAIRS]:
        yield every[n, [0, 1, 2, 3] if random.random() < 0.5 else [0, 2, 1, 3]]


def _kept(dashes: int) -> int:
    """Number of dashes at each end that both pictures of a pair share."""
    return max(1, min((dashes + 1) // 3, (dashes - 4) // 2))


def _long(random: np.random.Generator, stubs: np.ndarray, side: int, dashes: int) -> np.ndarray | None:
    """The long paths and dots of both pictures ``[2 side side]``, with equal numbers of lit pixels; or None."""
    more = dashes - 2 * _kept(dashes)
    halves = [_half(random, stub, (more + (n in (0, 3))) // 2, side) for n, stub in enumerate(stubs)]
    candidates: list[np.ndarray] = []
    for pairing in (((0, 2), (3, 1)), ((0, 1), (3, 2))):
        both: list[np.ndarray] = []
        for one, other in pairing:
            pixels = _pixels(_joined(random, halves[one], halves[other], stubs.shape[1] - 1))
            if not len(pixels):
                return None
            both.append(_masks(pixels, side, [pixels[0, -n, -n] for n in (one, other) if n < 2]))
        some, others = both
        first, second = _apart(some, others, REACH).nonzero()
        taken = random.permutation(len(first))[:CANDIDATES]
        candidates.append(some[first[taken]] | others[second[taken]])
    if not all(map(len, candidates)):
        return None
    return _alike(candidates[0], candidates[1])


def _alike(some: np.ndarray, others: np.ndarray) -> np.ndarray | None:
    """Two masks ``[2 side side]``, one of each kind with equal numbers of lit pixels, nearest after blurring; or None."""
    one, other = (_spread(masks.astype(np.float32), BLUR, np.add).reshape(len(masks), -1) for masks in (some, others))
    unlike = (one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T
    unlike[some.sum((1, 2))[:, None] != others.sum((1, 2))] = math.inf
    first, second = np.unravel_index(unlike.argmin(), unlike.shape)
    return None if unlike.min() == math.inf else np.stack((some[first], others[second]))


def _half(random: np.random.Generator, stub: np.ndarray, more: int, side: int) -> np.ndarray:
    """Corners ``[n dashes+1 2]`` of random halves of paths within the picture: a stub and further dashes."""
    walk = _walk(random, HALVES * more, more + 1, stub[-2], _headings(stub[None])[0])
    corners = np.concatenate((np.broadcast_to(stub[:-2], (len(walk), *stub[:-2].shape)), walk), 1)
    return corners[((corners >= MARGIN) & (corners <= side - 1 - MARGIN)).all((1, 2))]


def _joined(random: np.random.Generator, one: np.ndarray, other: np.ndarray, kept: int) -> np.ndarray:
    """Corners ``[n dashes+1 2]`` of paths that follow a half from one end, and a half from another end backwards.

    Halves that nearly meet are joined: the remaining distance is spread over their steps except the first `kept` ones.
    """
    free = [half.shape[1] - 1 - kept for half in (one, other)]
    rest = other[:, -1] - one[:, None, -1]
    turn = _headings(other) + math.pi - _headings(one)[:, None]
    turn = (turn + math.pi) % (2 * math.pi) - math.pi
    # a step grows by at most the half of sqrt(2) times this, so that its gap spans at most REACH
    near = min(1.0, math.sqrt(2) * (REACH / GAP - 1) * STEP * min(free))
    meet = np.argwhere((_distance(rest) < near) & (np.abs(turn) < TURN))
    first, second = random.permutation(meet)[:CANDIDATES].T
    moves = [rest[first, second][:, None] / 2 * np.clip(np.arange(-kept, n + 1) / n, 0, None)[:, None] for n in free]
    corners = np.concatenate((one[first] + moves[0], (other[second] - moves[1])[:, -2::-1]), 1)
    return corners[_simple(corners)]


def _distract(random: np.random.Generator, lit: np.ndarray, dashes: int, distractors: int) -> np.ndarray | None:
    """A picture ``[side side]`` with shorter paths added on dark pixels; None if there is no room."""
    side = len(lit)
    for _ in range(ATTEMPTS):
        picture = lit.copy()
        for _ in range(distractors):
            pixels = _pixels(_placed(random, _walk(random, SHORT, max(1, dashes)), side)).reshape(SHORT, -1, 2)
            free = ~_spread(picture[None], REACH, np.logical_or)[0][pixels[..., 0], pixels[..., 1]].any(1)
            if not free.any():
                break
            picture[tuple(pixels[free.argmax()].T)] = True
        else:
            return picture
    return None


def _walk(
    random: np.random.Generator, number: int, dashes: int, begin: Sequence[float] = (0, 0), heading: float | None = None
) -> np.ndarray:
    """Corners ``[number dashes+1 2]`` of random paths from a point."""
    turns = random.uniform(-TURN, TURN, (number, dashes))
    turns[:, 0] = random.uniform(0, 2 * math.pi, number) if heading is None else heading
    headings = np.cumsum(turns, 1)
    steps = STEP * np.stack((np.sin(headings), np.cos(headings)), -1)
    return begin + np.cumsum(np.concatenate((np.zeros((number, 1, 2)), steps), 1), 1)


def _placed(random: np.random.Generator, corners: np.ndarray, side: int) -> np.ndarray:
    """The paths that fit, each moved to a random location in the picture."""
    low, room = corners.min(1), side - 1 - 2 * MARGIN - np.ptp(corners, 1)
    fits = (room >= 0).all(1)
    begin = MARGIN - low[fits] + random.uniform(0, 1, (fits.sum(), 2)) * room[fits]
    return corners[fits] + begin[:, None]


def _simple(corners: np.ndarray) -> np.ndarray:
    """Whether all dashes of a path that are not consecutive are apart ``[n]``."""
    middles, n = (corners[:, 1:] + corners[:, :-1]) / 2, np.arange(corners.shape[1] - 1)
    close = _distance(middles[:, :, None] - middles[:, None]) < STEP - 0.4
    return ~(close & (np.abs(n[:, None] - n) > 1)).any((1, 2))


def _distance(apart: np.ndarray) -> np.ndarray:
    """Chebyshev norm of vectors ``[... 2]``."""
    return np.maximum(np.abs(apart[..., 0]), np.abs(apart[..., 1]))


def _headings(corners: np.ndarray) -> np.ndarray:
    y, x = (corners[:, -1] - corners[:, -2]).T
    return np.arctan2(y, x)


def _pixels(corners: np.ndarray) -> np.ndarray:
    """Pixels ``[n dashes points 2]`` of the dashes of paths, each in the middle of a step."""
    return np.rint(corners[:, :-1, None] + np.diff(corners, axis=1)[:, :, None] * LIT).astype(int)


def _masks(pixels: np.ndarray, side: int, dots: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Masks of lit pixels ``[n side side]``, with squares of 3 x 3 as dots."""
    masks = np.zeros((len(pixels), side, side), bool)
    y, x = pixels.reshape(len(pixels), math.prod(pixels.shape[1:3]), 2).transpose(2, 0, 1)
    masks[np.arange(len(pixels))[:, None], y, x] = True
    for row, column in dots:
        masks[:, row - 1 : row + 2, column - 1 : column + 2] = True
    return masks


def _apart(some: np.ndarray, others: np.ndarray, reach: int) -> np.ndarray:
    """Whether the distance of masks ``[n side side]`` and others ``[m side side]`` is larger than `reach` ``[n m]``."""
    side = some.shape[-1]
    near = _spread(some, reach, np.logical_or)
    near, others = (masks.reshape(len(masks), side**2).astype(np.float32) for masks in (near, others))
    return near @ others.T == 0


def _spread(masks: np.ndarray, by: int, operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Box filter of masks ``[n side side]``: reduces the square of pixels at most `by` from each one by an operation."""
    side = masks.shape[-1]
    rows = np.pad(masks, [(0, 0), (by, by), (0, 0)])
    columns = np.pad(reduce(operation, (rows[:, n : n + side] for n in range(2 * by + 1))), [(0, 0), (0, 0), (by, by)])
    return reduce(operation, (columns[..., n : n + side] for n in range(2 * by + 1)))
