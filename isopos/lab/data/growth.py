"""Random ListOps expressions of any length, many at once: grown level by level, as arrays, and written to the cache.

The procedure is that of `expressions.generate`, which the Long Range Arena's generator follows, too: an argument is a list
with probability 1/4, and expressions that are too short or too long are drawn again. The Arena (Tay et al. 2020,
https://arxiv.org/abs/2011.04006; its data/listops.py) has more than 500 and less than 2000 tokens, 2 to 10 arguments, and
10 levels, of which the last has digits alone.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from isopos.lab.data import cache
from isopos.lab.data.arrays import Writer, key_of, prepared
from isopos.lab.data.expressions import CLOSE, NUMBERS, Expression, splits_of, write
from isopos.lab.data.prepare import SPLITS
from isopos.lab.data.splits import Splits

__all__ = ["Settings", "grow", "prepare"]

FORMAT = 2
AT_ONCE = 2000  # expressions that are begun together
OPERATORS = ("MIN", "MAX", "MED", "SM")  # equally likely
TRIES = 500_000  # expressions that are begun, or come again, in a row: then there are none


@dataclass(frozen=True)
class Settings:
    """Of random expressions: lists inside each other, arguments of a list, and tokens, at most, and tokens at least."""

    depth: int
    arguments: int
    shortest: int
    longest: int


@dataclass
class Level:
    """The lists of a level: operators, numbers of arguments and, of all these arguments, digits and which are lists."""

    operators: np.ndarray
    counts: np.ndarray
    digits: np.ndarray
    lists: np.ndarray
    sizes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # tokens of each argument

    @property
    def starts(self) -> np.ndarray:
        """Where the arguments of each list begin."""
        return np.cumsum(self.counts) - self.counts


def prepare(seed: int, counts: Sequence[int], settings: Settings) -> Splits[Expression]:
    """So many different expressions of train, validation and test, of the cache, written there if they are absent.

    Raises:
        ValueError: Where there are next to no expressions of such lengths.
    """

    def samples() -> Iterator[tuple[str, Expression]]:
        found, seen = grow(seed, settings), set()
        for split, count in zip(SPLITS, counts, strict=True):
            kept, vain = 0, 0
            while kept < count:
                one = next(found)
                digest = hashlib.sha256(one.tokens).digest()[:16]
                vain = vain + 1 if digest in seen else 0
                if vain > TRIES:
                    raise ValueError(
                        f"expressions: expected fewer, got {sum(counts):,}; {len(seen):,} different ones were found"
                    )
                if digest in seen:
                    continue
                seen.add(digest)
                kept += 1
                yield split, one

    def fill(writer: Writer) -> dict[str, object]:
        write(writer, samples())
        return {}

    key = f"listops-{key_of(FORMAT, seed, list(counts), vars(settings))[:32]}"
    return splits_of(prepared(cache.default_root(), key, fill))


def grow(seed: int, settings: Settings) -> Iterator[Expression]:
    """Random expressions of the settings without end; equal ones may come again.

    Examples:
        >>> 501 <= len(next(grow(0, Settings(depth=9, arguments=10, shortest=501, longest=1999))).tokens) <= 1999
        True
    """
    random, vain = np.random.default_rng(seed), 0
    while True:
        levels = _levels(random, settings)
        sizes = _sizes(levels)
        fitting = (sizes >= settings.shortest) & (sizes <= settings.longest)
        vain = 0 if fitting.any() else vain + len(sizes)
        if vain > TRIES:
            raise ValueError(
                f"shortest: expected lengths that random expressions have, got none of {TRIES:,} with {settings}"
            )
        values, branches = _values(levels), _branches(levels)
        tokens = _tokens(levels, sizes)
        ends = np.cumsum(sizes)
        for n in fitting.nonzero()[0].tolist():
            yield Expression(tokens[ends[n] - sizes[n] : ends[n]].tobytes(), int(values[n]), int(branches[n]) + 1)


def _levels(random: np.random.Generator, settings: Settings) -> list[Level]:
    levels, lists = [], AT_ONCE
    for depth in range(settings.depth):
        if not lists:
            break
        counts = random.integers(2, settings.arguments + 1, size=lists)
        total = int(counts.sum())
        inner = random.random(total) < 0.25 if depth + 1 < settings.depth else np.zeros(total, bool)
        operators = np.array([NUMBERS[f"[{name}"] for name in OPERATORS])[random.integers(len(OPERATORS), size=lists)]
        levels.append(Level(operators, counts, random.integers(10, size=total), inner))
        lists = int(inner.sum())
    return levels


def _sizes(levels: list[Level]) -> np.ndarray:
    """Tokens of each expression; those of all arguments are kept."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        level.sizes = np.ones(len(level.digits), np.int64)
        level.sizes[level.lists] = below
        below = 2 + np.add.reduceat(level.sizes, level.starts)
    return below


def _values(levels: list[Level]) -> np.ndarray:
    """What each expression evaluates to."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        values, starts, counts = level.digits.copy(), level.starts, level.counts
        values[level.lists] = below
        ordered = values[np.lexsort((values, np.repeat(np.arange(len(counts)), counts)))]
        middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
        found = {
            "MIN": np.minimum.reduceat(values, starts),
            "MAX": np.maximum.reduceat(values, starts),
            "MED": middle,
            "SM": np.add.reduceat(values, starts) % 10,
        }
        below = np.select([level.operators == NUMBERS[f"[{name}"] for name in found], list(found.values()))
    return below


def _branches(levels: list[Level]) -> np.ndarray:
    """The most arguments that a list of each expression has."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        inside = np.zeros(len(level.digits), np.int64)
        inside[level.lists] = below
        below = np.maximum(level.counts, np.maximum.reduceat(inside, level.starts))
    return below


def _tokens(levels: list[Level], sizes: np.ndarray) -> np.ndarray:
    """The tokens of all expressions, one after another: every list begins after what is before it in its own list."""
    tokens = np.empty(int(sizes.sum()), np.uint8)
    begins, whole = np.cumsum(sizes) - sizes, sizes
    for level in levels:
        tokens[begins], tokens[begins + whole - 1] = level.operators, CLOSE
        before = np.cumsum(level.sizes) - level.sizes
        inside = before - np.repeat(before[level.starts], level.counts) + np.repeat(begins, level.counts) + 1
        tokens[inside[~level.lists]] = level.digits[~level.lists]
        begins, whole = inside[level.lists], level.sizes[level.lists]
    return tokens
