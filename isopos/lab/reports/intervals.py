"""What a difference between few figures shows: its mean, and Student's 95% interval. No torch here."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

SHARE = 0.95
LEAST = 3  # seeds of an interval: Student's t of two has one degree of freedom, and its interval says next to nothing
PANELS = 200  # of Simpson's rule, whose error is below 1e-6
UNSHOWN = ": no difference shown"
NOTE = (  # of differences to the best row
    "The best row is picked from the figures, so that intervals are Student's at 95% for all the other rows at once: 5% are "
    "divided by their number. A row that is picked leads by too much on average."
)


@lru_cache
def student(degrees: float, pairs: int = 1) -> float:
    """The t that a share of 95% of Student's distribution lies within, on both sides of 0; degrees of freedom from 1 on.

    With several pairs, each of which could be the one that is shown, the 5% outside are divided by their number.

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
        # in the angle whose tangent is t / degrees^1/2, a power of a cosine, which has no long tail
        end = math.atan(t / degrees**0.5)
        heights = [scale * degrees**0.5 * math.cos(end * n / PANELS) ** (degrees - 1) for n in range(PANELS + 1)]
        return end / PANELS / 3 * (heights[0] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]) + heights[-1])

    share = 1 - (1 - SHARE) / pairs
    t, step = 1.95, 1.0  # below every solution: Newton's steps in a concave function never pass it
    while step > 1e-9:
        step = (share - within(t)) / density(t)
        t += step
    return t


@dataclass(frozen=True)
class Difference:
    """By how much one row's figures exceed another's: the mean, and half of its 95% interval.

    Examples:
        >>> apart = Difference.paired([0.1, 0.2, 0.3])
        >>> apart.text("+.2f"), apart.shown
        ('+0.20 [-0.05, +0.45]', False)
        >>> Difference.paired([0.1, 0.2]).words
        '2 seeds: no interval'
    """

    mean: float
    half: float  # not a number with fewer than `LEAST` seeds
    seeds: int
    is_paired: bool = True
    pairs: int = 1  # for so many at once the interval holds: of a row that is picked as the best, the number of the others

    @classmethod
    def paired(cls, values: Sequence[float], pairs: int = 1) -> "Difference":
        """Of at least one difference between two figures of the same seed."""
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls.of(statistics.mean(values), deviation, len(values), pairs)

    @classmethod
    def of(cls, mean: float, deviation: float, seeds: int, pairs: int = 1) -> "Difference":
        """Of the mean and standard deviation of differences that are paired by seed."""
        half = student(seeds - 1, pairs) * deviation / seeds**0.5 if seeds >= LEAST else math.nan
        return cls(mean, half, seeds, pairs=pairs)

    @classmethod
    def unpaired(cls, one: tuple[float, float, int], other: tuple[float, float, int], pairs: int = 1) -> "Difference":
        """Of two means, each with its standard deviation and number of seeds, that are not paired (Welch's interval)."""
        (a, a_spread, n), (b, b_spread, m) = one, other
        if min(n, m) < LEAST:
            return cls(a - b, math.nan, min(n, m), False, pairs)
        parts = a_spread**2 / n, b_spread**2 / m
        error = sum(parts)
        degrees = error**2 / (parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (m - 1)) if error else n + m - 2
        return cls(a - b, student(degrees, pairs) * error**0.5, min(n, m), False, pairs)

    @property
    def shown(self) -> bool:
        """Whether there is an interval, and it does not include 0."""
        return abs(self.mean) > self.half

    def text(self, style: str) -> str:
        """The mean, with its interval if there is one."""
        low, high = (format(self.mean + sign * self.half, style) for sign in (-1, 1))
        return format(self.mean, style) + (f" [{low}, {high}]" if self.half == self.half else "")

    @property
    def words(self) -> str:
        """How many seeds it rests on, and whether they show a difference."""
        if self.half != self.half:
            return "one seed" if self.seeds == 1 else f"{self.seeds} seeds: no interval"
        kind = "95% interval" + f" for {self.pairs} pairs at once" * (self.pairs > 1) + ", unpaired" * (not self.is_paired)
        return f"{kind}, {self.seeds} seeds" + UNSHOWN * (not self.shown)
