"""Differences between few figures: mean and Student's 95% interval. No torch here."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

SHARE = 0.95
FEW = 3  # fewest rows for a rank correlation
MIN_SEEDS = 3  # seeds for an interval: with two, Student's t has one degree of freedom and is useless
PANELS = 200  # of Simpson's rule, whose error is below 1e-6
NOT_SHOWN = ": no difference shown"
NOTE = (  # on differences to the best row
    "The best row is selected by the figures, so intervals are Student's at 95% for all other rows at once: 5% are divided "
    "by their number. The lead of a selected row is too large on average."
)


@lru_cache
def student(degrees: float, pairs: int = 1) -> float:
    """The t such that Student's distribution has 95% of its mass within [-t, t]; degrees of freedom >= 1.

    For several simultaneous comparisons (`pairs`) the 5% outside are divided by their number (Bonferroni).

    Examples:
        >>> [round(student(degrees), 3) for degrees in (1, 2, 4, 30)]
        [12.706, 4.303, 2.776, 2.042]
    """
    if not degrees >= 1:
        raise ValueError(f"degrees: expected a number from 1 on, got {degrees}")
    scale = 2 * math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / (degrees * math.pi) ** 0.5

    def density(t: float) -> float:
        return scale * math.exp(-(degrees + 1) / 2 * math.log1p(t * t / degrees))

    def within(t: float) -> float:
        # with t = degrees^1/2 tan(angle) the density is a power of cos(angle), without a long tail
        end = math.atan(t / degrees**0.5)
        heights = [scale * degrees**0.5 * math.cos(end * n / PANELS) ** (degrees - 1) for n in range(PANELS + 1)]
        return end / PANELS / 3 * (heights[0] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]) + heights[-1])

    share = 1 - (1 - SHARE) / pairs
    t, step = 1.95, 1.0  # below the solution: Newton's steps on a concave function approach it from below
    while step > 1e-9:
        step = (share - within(t)) / density(t)
        t += step
    return t


@dataclass(frozen=True)
class Difference:
    """The mean difference between two rows' figures, with half of its 95% interval.

    Examples:
        >>> apart = Difference.paired([0.1, 0.2, 0.3])
        >>> apart.text("+.2f"), apart.excludes_zero
        ('+0.20 [-0.05, +0.45]', False)
        >>> Difference.paired([0.1, 0.2]).summary
        '2 seeds: no interval'
    """

    mean: float
    half: float  # NaN with fewer than `MIN_SEEDS` seeds
    seeds: int
    is_paired: bool = True
    pairs: int = 1  # number of simultaneous comparisons; to the best row, the number of other rows

    @classmethod
    def paired(cls, values: Sequence[float], pairs: int = 1) -> "Difference":
        """From at least one difference of figures of the same seed."""
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls.of(statistics.mean(values), deviation, len(values), pairs)

    @classmethod
    def of(cls, mean: float, deviation: float, seeds: int, pairs: int = 1) -> "Difference":
        """From the mean and standard deviation of differences paired by seed."""
        half = student(seeds - 1, pairs) * deviation / seeds**0.5 if seeds >= MIN_SEEDS else math.nan
        return cls(mean, half, seeds, pairs=pairs)

    @classmethod
    def unpaired(cls, one: tuple[float, float, int], other: tuple[float, float, int], pairs: int = 1) -> "Difference":
        """From two means, each with its standard deviation and number of seeds (Welch's interval)."""
        (a, a_spread, n), (b, b_spread, m) = one, other
        if min(n, m) < MIN_SEEDS:
            return cls(a - b, math.nan, min(n, m), False, pairs)
        parts = a_spread**2 / n, b_spread**2 / m
        error = sum(parts)
        degrees = error**2 / (parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (m - 1)) if error else n + m - 2
        return cls(a - b, student(degrees, pairs) * error**0.5, min(n, m), False, pairs)

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval that excludes 0."""
        return abs(self.mean) > self.half

    def text(self, style: str) -> str:
        """The mean, with its interval if there is one."""
        low, high = (format(self.mean + sign * self.half, style) for sign in (-1, 1))
        return format(self.mean, style) + (f" [{low}, {high}]" if self.half == self.half else "")

    @property
    def summary(self) -> str:
        """Number of seeds, kind of interval, and whether it includes 0."""
        if self.half != self.half:
            return "one seed" if self.seeds == 1 else f"{self.seeds} seeds: no interval"
        kind = "95% interval" + f" for {self.pairs} pairs at once" * (self.pairs > 1) + ", unpaired" * (not self.is_paired)
        return f"{kind}, {self.seeds} seeds" + NOT_SHOWN * (not self.excludes_zero)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation. NaN if all values of one side are equal.

    Equal values share the mean of their ranks; those are equal that differ by less than a millionth of the largest.

    Examples:
        >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
        0.8
        >>> spearman([1, 2, 3, 4], [0.5, 0.7, 0.7 + 1e-9, 0.9])
        0.948683298051
    """
    ranks = [_ranks(a), _ranks(b)]
    if any(len(set(side)) == 1 for side in ranks):
        return float("nan")
    return round(statistics.correlation(*ranks), 12)


def _ranks(values: Sequence[float]) -> list[float]:
    same = 1e-6 * max(map(abs, values))
    return [sum(y < x - same for y in values) + (sum(abs(y - x) <= same for y in values) + 1) / 2 for x in values]
