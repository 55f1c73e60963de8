"""Differences between few figures: means and 95% intervals, of a pair or of all rows to the best one. No torch here."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

SHARE = 0.95
FEW = 3  # fewest rows for a rank correlation
MIN_SEEDS = 3  # seeds for an interval: with two, Student's t has one degree of freedom and is useless
PANELS = 200  # of Simpson's rule, whose error is below 1e-6
NOT_SHOWN = ": no difference shown"
PRIOR = 8.0  # largest weight of the rows' common variance, in degrees of freedom
ROUNDING = 1e-9  # deviations below this share of the largest difference are rounding errors
NOTE = (  # on differences to the best row
    "The best row is selected by the figures, so intervals are at 95% for all pairs of rows at once: 5% are divided by "
    "their number. Standard deviations of few seeds are moved towards one that the rows have in common (moderated t, Smyth "
    "2004). The lead of a selected row is too large on average."
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
    pairs: int = 1  # number of simultaneous comparisons; for the best row, which the figures select, all pairs of rows

    @classmethod
    def paired(cls, values: Sequence[float], pairs: int = 1) -> "Difference":
        """From at least one difference of figures of the same seed."""
        seeds, half = len(values), math.nan
        if seeds >= MIN_SEEDS:
            half = student(seeds - 1, pairs) * statistics.stdev(values) / seeds**0.5
        return cls(statistics.mean(values), half, seeds, pairs)

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
        kind = "95% interval" + f" for {self.pairs} pairs at once" * (self.pairs > 1)
        return f"{kind}, {self.seeds} seeds" + NOT_SHOWN * (not self.excludes_zero)


def to_best(differences: Mapping[str, Sequence[float]]) -> dict[str, Difference]:
    """Differences between the best row, which these figures select, and each other row, paired by seed.

    The intervals hold for all pairs of rows at once (Bonferroni), since the best row could have been any. A deviation of few
    seeds is itself uncertain, so the variances of the rows are moved towards a common one, which counts as so many degrees
    of freedom as the rows' variances agree in: the moderated t of Smyth (2004), "Linear models and empirical Bayes methods",
    section 3. The weight is at most `PRIOR` and half of the rows' own degrees of freedom. In simulations of nine rows that
    are all alike, with three seeds, a difference is then shown in 3 to 6% of all tables, whether their deviations are alike
    or far from it; of three rows, in 7%.

    Args:
        differences: By row, differences of figures of the same seed: at least one.

    Examples:
        >>> found = to_best({"a": [0.9, 1.0, 1.1], "b": [0.8, 1.0, 1.2], "c": [0.2, 0.0, 0.1]})
        >>> [(row, found[row].text(".2f"), found[row].excludes_zero) for row in found]
        [('a', '1.00 [0.65, 1.35]', True), ('b', '1.00 [0.56, 1.44]', True), ('c', '0.10 [-0.25, 0.45]', False)]
    """
    pairs, seeds = len(differences) * (len(differences) + 1) // 2, max(map(len, differences.values()), default=0)
    variances = [_variance(values) for values in differences.values() if len(values) == seeds >= MIN_SEEDS]
    common, weight = _common_variance(variances, seeds - 1)
    found = {}
    for row, values in differences.items():
        mean, half = statistics.mean(values), math.nan
        if len(values) >= MIN_SEEDS:
            degrees = len(values) - 1 + weight
            variance = ((len(values) - 1) * _variance(values) + weight * common) / degrees
            half = student(degrees, pairs) * (variance / len(values)) ** 0.5
        found[row] = Difference(mean, half, len(values), pairs=pairs)
    return found


def _variance(values: Sequence[float]) -> float:
    """The variance; 0 if it is of rounding errors."""
    variance, largest = statistics.variance(values), max(map(abs, values))
    return 0.0 if largest < math.inf and variance <= (ROUNDING * largest) ** 2 else variance


def _common_variance(variances: Sequence[float], degrees: int) -> tuple[float, float]:
    """The variance that rows have in common, and its weight in degrees of freedom, from the moments of their logarithms.

    `degrees` are those of each variance. The weight is 0 where fewer than two variances are finite and differ from 0.
    """
    logs = [math.log(variance) for variance in variances if 0 < variance < math.inf]
    if len(logs) < 2:
        return 0.0, 0.0
    centre = statistics.mean(logs) - _digamma(degrees / 2) + math.log(degrees / 2)
    excess = statistics.variance(logs) - _trigamma(degrees / 2)  # beyond that of rows with one variance
    if excess <= 0:
        return math.exp(centre), min(PRIOR, degrees * len(logs) / 2)
    low, high = 1e-9, 1e9  # of half the weight, by halving the logarithm's interval: _trigamma decreases
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _trigamma(middle) > excess else (low, middle)
    common = math.exp(centre + _digamma(low) - math.log(low))
    return common, min(PRIOR, degrees * len(logs) / 2, 2 * low)


def _digamma(x: float) -> float:
    """The derivative of the logarithm of the gamma function, by its recurrence and asymptotic series."""
    total = 0.0
    while x < 8:
        total, x = total - 1 / x, x + 1
    return total + math.log(x) - 1 / (2 * x) - 1 / (12 * x**2) + 1 / (120 * x**4) - 1 / (252 * x**6)


def _trigamma(x: float) -> float:
    """The derivative of `_digamma`, likewise."""
    total = 0.0
    while x < 8:
        total, x = total + 1 / x**2, x + 1
    return total + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation; None if all values of one side are equal.

    Equal values share the mean of their ranks; those are equal that differ by less than a millionth of the largest.

    Examples:
        >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
        0.8
        >>> spearman([1, 2, 3, 4], [0.5, 0.7, 0.7 + 1e-9, 0.9])
        0.948683298051
    """
    ranks = [_ranks(a), _ranks(b)]
    if any(len(set(side)) == 1 for side in ranks):
        return None
    return round(statistics.correlation(*ranks), 12)


def correlation_text(value: float | None) -> str:
    """A rank correlation, with its sign."""
    return "undefined" if value is None else f"{value:+.2f}"


def _ranks(values: Sequence[float]) -> list[float]:
    alike = partial(math.isclose, rel_tol=1e-6)
    return [sum(y < x and not alike(x, y) for y in values) + (sum(alike(x, y) for y in values) + 1) / 2 for x in values]
