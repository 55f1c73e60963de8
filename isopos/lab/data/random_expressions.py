"""A generator of long random ListOps expressions: many at once, level by level, as arrays, written to the cache.

It follows the procedure of `generate_expressions` and of the Long Range Arena's generator: an argument is a list with
probability 1/4, and expressions that are too short or too long are drawn again. The Arena (Tay et al. 2020,
https://arxiv.org/abs/2011.04006; its data/listops.py) has more than 500 and less than 2000 tokens, 2 to 10 arguments, and
10 levels; the last level has only digits.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from isopos.lab.data.arrays import Writer
from isopos.lab.data.expressions import CLOSE, NUMBERS, Expression, splits_of, write_expressions
from isopos.lab.data.prepare import SPLITS, generated_arrays
from isopos.lab.data.splits import Splits

CACHE_VERSION = 2
AT_ONCE = 2000  # expressions generated together
OPERATORS = ("MIN", "MAX", "MED", "SM")  # equally likely
TRIES = 500_000  # rejected or repeated expressions in a row before it is an error


@dataclass(frozen=True)
class Settings:
    """Bounds of random expressions."""

    depth: int  # largest depth of nested lists
    arguments: int  # largest number of arguments
    shortest: int  # smallest number of tokens
    longest: int  # largest number of tokens


@dataclass
class Level:
    """All lists at one depth."""

    operators: np.ndarray  # of each list
    counts: np.ndarray  # arguments of each list
    digits: np.ndarray  # of each argument of all lists
    lists: np.ndarray  # whether an argument is a list instead
    sizes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # tokens of each argument

    @property
    def starts(self) -> np.ndarray:
        """Index of the first argument of each list."""
        return np.cumsum(self.counts) - self.counts


def prepare(seed: int, counts: Sequence[int], settings: Settings) -> Splits[Expression]:
    """Distinct expressions of train, validation and test, from the cache or generated.

    Raises:
        ValueError: If hardly any expressions have such lengths.
    """

    def samples() -> Iterator[tuple[str, Expression]]:
        expressions, seen, repeats = draw_expressions(seed, settings), set(), 0
        for split in (split for split, count in zip(SPLITS, counts, strict=True) for _ in range(count)):
            expression = next(expressions)
            while (digest := hashlib.sha256(expression.tokens).digest()[:16]) in seen:
                expression, repeats = next(expressions), repeats + 1
                if repeats > TRIES:
                    raise ValueError(
                        f"expressions: expected fewer, got {sum(counts):,}; {len(seen):,} different ones were found"
                    )
            seen.add(digest)
            repeats = 0
            yield split, expression

    def fill(writer: Writer) -> dict[str, object]:
        write_expressions(writer, samples())
        return {}

    return splits_of(generated_arrays("listops", fill, CACHE_VERSION, seed, counts, vars(settings)))


def draw_expressions(seed: int, settings: Settings) -> Iterator[Expression]:
    """Endless random expressions, which may repeat.

    Examples:
        >>> 501 <= len(next(draw_expressions(0, Settings(depth=9, arguments=10, shortest=501, longest=1999))).tokens) <= 1999
        True
    """
    random, rejected = np.random.default_rng(seed), 0
    while True:
        levels = _levels(random, settings)
        sizes = _sizes(levels)
        fitting = (sizes >= settings.shortest) & (sizes <= settings.longest)
        rejected = 0 if fitting.any() else rejected + len(sizes)
        if rejected > TRIES:
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
    """Tokens of each expression; sets the sizes of arguments at each level."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        level.sizes = np.ones(len(level.digits), np.int64)
        level.sizes[level.lists] = below
        below = 2 + np.add.reduceat(level.sizes, level.starts)
    return below


def _values(levels: list[Level]) -> np.ndarray:
    """The value of each expression."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        values, starts, counts = level.digits.copy(), level.starts, level.counts
        values[level.lists] = below
        ordered = values[np.lexsort((values, np.repeat(np.arange(len(counts)), counts)))]
        middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
        results = {
            "MIN": np.minimum.reduceat(values, starts),
            "MAX": np.maximum.reduceat(values, starts),
            "MED": middle,
            "SM": np.add.reduceat(values, starts) % 10,
        }
        below = np.select([level.operators == NUMBERS[f"[{name}"] for name in results], list(results.values()))
    return below


def _branches(levels: list[Level]) -> np.ndarray:
    """The largest number of arguments in each expression."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        inside = np.zeros(len(level.digits), np.int64)
        inside[level.lists] = below
        below = np.maximum(level.counts, np.maximum.reduceat(inside, level.starts))
    return below


def _tokens(levels: list[Level], sizes: np.ndarray) -> np.ndarray:
    """The tokens of all expressions, concatenated. A list begins after the arguments that precede it in its parent."""
    tokens = np.empty(int(sizes.sum()), np.uint8)
    begins, whole = np.cumsum(sizes) - sizes, sizes
    for level in levels:
        tokens[begins], tokens[begins + whole - 1] = level.operators, CLOSE
        before = np.cumsum(level.sizes) - level.sizes
        inside = before - np.repeat(before[level.starts], level.counts) + np.repeat(begins, level.counts) + 1
        tokens[inside[~level.lists]] = level.digits[~level.lists]
        begins, whole = inside[level.lists], level.sizes[level.lists]
    return tokens
