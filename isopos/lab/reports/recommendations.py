"""What the committed results say about a choice of scheme, for `isopos recommend` and docs/choosing.md. No torch here.

recommendations.json next to this file has the figures. `python -m tools.generate` derives it from docs/results.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isopos.lab.reports.intervals import MIN_SEEDS, Difference

FILE = Path(__file__).with_name("recommendations.json")
FEW_DATA = 3  # on fewer data sets an answer says so
LISTED = 4  # rows that an answer names
HEADER = ("row", "scheme", "figure", "behind the best", "")
SUMMARY = ("table", "data", "best", "close to it", "nearest that is shown to be behind", "behind")
BEST, CLOSE, LEVEL, BEHIND, UNKNOWN = "best", "close", "no difference shown", "behind", "no interval"


@dataclass(frozen=True)
class SchemeRow:
    """A scheme in a comparison.

    Args:
        name: The table's name of the row.
        scheme: The scheme with its options, as on the command line.
        mean: Mean figure over seeds.
        spread: Standard deviation over seeds, or None for one seed.
        behind: By how much the best row is better, in units of the figure.
        half: Half of the 95% interval of `behind`, for all pairs of rows at once; None without one, and for the best row.
    """

    name: str
    scheme: str
    mean: float
    spread: float | None
    behind: float
    half: float | None


@dataclass(frozen=True)
class Comparison:
    """A column of a table of results, with the best row first."""

    table: str  # name of the table, a folder of docs/results
    column: str  # title of the column
    data: str  # the data that models were trained on
    figure: str  # what the figures are, and whether lower or higher is better
    seeds: int  # number of seeds
    rates: str  # multiples of the learning rate of which each row has the best; empty if one rate serves all
    rows: Sequence[SchemeRow]  # schemes, the best first

    def verdict(self, row: SchemeRow) -> str:
        """Whether a row is the best, close to it, behind it, or none of these as far as the interval shows.

        It is close if its interval includes 0 and ends before half of the distance to the worst row.
        """
        if row is self.rows[0]:
            return BEST
        if row.half is None:
            return UNKNOWN
        if row.behind > row.half:
            return BEHIND
        return CLOSE if row.behind + row.half < self.rows[-1].behind / 2 else LEVEL

    def select(self, *verdicts: str) -> list[SchemeRow]:
        """The rows with one of these verdicts."""
        return [row for row in self.rows if self.verdict(row) in verdicts]

    @property
    def tells(self) -> bool:
        """Whether a row is shown to be behind the best."""
        return bool(self.select(BEHIND))

    @property
    def has_intervals(self) -> bool:
        """Whether differences have intervals: at least three seeds."""
        return any(row.half is not None for row in self.rows)


@dataclass(frozen=True)
class Experiment:
    """Comparisons of the same schemes, on several data sets or in several columns of a table."""

    comparisons: Sequence[Comparison]

    @property
    def data_sets(self) -> list[str]:
        """Names of the data sets on which a difference is shown; of all, if there are none."""
        told = [each.data for each in self.comparisons if each.tells]
        return list(dict.fromkeys(told or [each.data for each in self.comparisons]))

    @property
    def leaders(self) -> list[SchemeRow]:
        """Schemes that are best or close to the best in each comparison that tells a difference, the best by means first."""
        told = [each for each in self.comparisons if each.tells]
        shares: dict[str, list[float]] = {}
        for each in told:
            for row in each.select(BEST, CLOSE):
                shares.setdefault(row.scheme, []).append(row.behind / each.rows[-1].behind)
        found = sorted((sum(share), scheme) for scheme, share in shares.items() if len(share) == len(told))
        rows = {row.scheme: row for each in told for row in each.rows}
        return [rows[scheme] for _, scheme in found]

    @property
    def title(self) -> str:
        """The first table, the columns, and the number of schemes."""
        first, columns = self.comparisons[0], dict.fromkeys(each.column for each in self.comparisons)
        return f"`{first.table}` ({'; '.join(columns)}; {len(first.rows)} schemes)"

    @property
    def answer(self) -> str:
        """The leaders, and how far this is known: data sets, seeds and learning rates."""
        told = [each for each in self.comparisons if each.tells]
        if not any(each.has_intervals for each in self.comparisons):
            return f"not known, with fewer than {MIN_SEEDS} seeds. Best by means alone: {_best(self.comparisons)}."
        sets = f"{len(self.data_sets)} data set{'s' * (len(self.data_sets) > 1)}"
        if not told:
            return f"no row is shown to be behind another ({sets}): these figures do not tell."
        sets += ": not known for others" * (len(self.data_sets) < FEW_DATA)
        seeds = {each.seeds for each in told}
        named = listed([f"{row.name} (`{row.scheme}`)" for row in self.leaders])
        text = (
            f"best, or close to the best: {named}"
            if named
            else f"none is best or close to the best in all. Best: {_best(told)}"
        )
        untold = "; ".join(self.label(each) for each in self.comparisons if not each.tells)
        tuned = sum(bool(each.rates) for each in told)
        rates = "the best of several learning rates for each row" if tuned else "one learning rate for all rows"
        rates += f" in {tuned} of {len(told)} comparisons" * (0 < tuned < len(told))
        numbers = " or ".join(map(str, sorted(seeds)))
        return f"{text} ({sets}; {numbers} seeds; {rates})." + f" No difference is shown on {untold}." * bool(untold)

    def label(self, comparison: Comparison) -> str:
        """The data of a comparison, and its column if there are others on these data."""
        several = sum(each.data == comparison.data for each in self.comparisons) > 1
        return f"{comparison.data}, {comparison.column}" if several else comparison.data


@dataclass(frozen=True)
class Question:
    """A question about data, and the comparisons that bear on it."""

    task: str  # the task of the laboratory
    text: str  # the kind of data, and of attention
    comparisons: Sequence[Comparison]  # columns of tables

    @property
    def experiments(self) -> list[Experiment]:
        """The comparisons, those of the same schemes together."""
        groups: dict[frozenset[str], list[Comparison]] = {}
        for each in self.comparisons:
            groups.setdefault(frozenset(row.scheme for row in each.rows), []).append(each)
        return [Experiment(group) for group in groups.values()]

    @property
    def answers(self) -> list[str]:
        """An answer for each experiment."""
        return [f"{each.title}: {each.answer}" for each in self.experiments]


def _best(comparisons: Sequence[Comparison]) -> str:
    """The best row of each comparison."""
    return "; ".join(f"{each.rows[0].name} (`{each.rows[0].scheme}`; {each.data}, {each.column})" for each in comparisons)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def summary(question: Question) -> list[tuple[str, ...]]:
    """Cells below `SUMMARY`: a line for each comparison, with the interval of the nearest row that is shown to be behind."""
    lines = []
    for each in question.comparisons:
        best, close, behind = each.rows[0].name, [row.name for row in each.select(CLOSE)], each.select(BEHIND)
        nearest = f"{behind[0].name} by {_interval(behind[0], each.seeds)}" if behind else "none"
        counts = f"{len(behind)} of {len(each.rows) - 1}" if each.has_intervals else "no interval"
        lines.append((f"{each.table}, {each.column}", each.data, best, listed(close) or "-", nearest, counts))
    return lines


def _interval(row: SchemeRow, seeds: int) -> str:
    return Difference(row.behind, math.nan if row.half is None else row.half, seeds).text(".2g")


def cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Cells of a comparison's table below `HEADER`."""
    lines = []
    for row in comparison.rows:
        verdict = comparison.verdict(row)
        figure = f"{row.mean:.4g}" + (f" ± {row.spread:.2g}" if row.spread is not None else "")
        lines.append((row.name, row.scheme, figure, "-" if verdict == BEST else _interval(row, comparison.seeds), verdict))
    return lines


def caption(comparison: Comparison) -> str:
    """Title of a comparison's table: what was compared, in what figure, on how many seeds."""
    seeds = f"{comparison.seeds} seed{'s' * (comparison.seeds > 1)}"
    tuned = f", each row with the best of the learning rates {comparison.rates}" * bool(comparison.rates)
    return f"{comparison.table}, {comparison.column}: {comparison.figure}; data {comparison.data}; {seeds}{tuned}"


def load_questions() -> list[Question]:
    """All questions, in the order of the page."""
    questions = []
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        comparisons = [
            Comparison(**each | {"rows": [SchemeRow(**row) for row in each["rows"]]}) for each in entry["comparisons"]
        ]
        questions.append(Question(**entry | {"comparisons": comparisons}))
    return questions
