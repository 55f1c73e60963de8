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
BEST, LEVEL, BEHIND, UNKNOWN = "best", "no difference shown", "behind", "no interval"


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
        """Whether a row is the best, behind it, or neither as far as the interval shows."""
        if row is self.rows[0]:
            return BEST
        if row.half is None:
            return UNKNOWN
        return BEHIND if row.behind > row.half else LEVEL

    @property
    def schemes(self) -> set[str]:
        """The schemes of its rows."""
        return {row.scheme for row in self.rows}

    @property
    def has_intervals(self) -> bool:
        """Whether differences have intervals: at least three seeds."""
        return any(row.half is not None for row in self.rows)


@dataclass(frozen=True)
class Question:
    """A question about data, and the comparisons that bear on it."""

    task: str  # the task of the laboratory
    text: str  # the kind of data, and of attention
    comparisons: Sequence[Comparison]  # columns of tables

    @property
    def decided(self) -> list[Comparison]:
        """The comparisons with intervals."""
        return [each for each in self.comparisons if each.has_intervals]

    @property
    def data_sets(self) -> int:
        """Number of data sets of these comparisons."""
        return len({each.data for each in self.decided})

    @property
    def level(self) -> list[tuple[int, list[SchemeRow]]]:
        """Rows that are behind in no comparison, with the number of comparisons that they are in.

        First those in the most comparisons, then those in the most of the others, and so on.
        """
        groups, left = [], self.decided
        while left and (found := _most_level(self.decided, left)):
            rows, rest = found
            groups.append((len(left) - len(rest), rows))
            left = rest
        return groups

    @property
    def answer(self) -> str:
        """The rows that are behind in no comparison, and how far this is known."""
        decided = self.decided
        if not decided:
            return f"Not known, with fewer than {MIN_SEEDS} seeds. Best by means alone: {_best(self.comparisons)}."
        parts = [(count, listed([f"{row.name} (`{row.scheme}`)" for row in rows])) for count, rows in self.level]
        left = len(decided) - sum(count for count, _ in parts)
        parts += [(left, "none that is not behind in another")] if left else []
        (count, first), *later = parts
        compared = f"{count} of {len(decided)} comparison{'s' * (len(decided) > 1)}"
        found = "; ".join((f"in {compared}: {first}", *(f"in {count} more: {named}" for count, named in later)))
        text = f"Best, or not shown to be behind the best, {found}."
        if left == len(decided):
            text = f"It depends on the data: each row is shown to be behind in a comparison. Best: {_best(decided)}."
        others = sum(len(each.rows) - 1 for each in decided)
        behind = sum(each.verdict(row) == BEHIND for each in decided for row in each.rows)
        sets, text = self.data_sets, f"{text} Of the {others} other figures {behind} are shown to be behind."
        return text if sets >= FEW_DATA else f"{text} Seen on {sets} data set{'s' * (sets > 1)}: not known for others."


def _best(comparisons: Sequence[Comparison]) -> str:
    """The best row of each comparison."""
    return "; ".join(f"{each.rows[0].name} (`{each.rows[0].scheme}`; {each.table}, {each.column})" for each in comparisons)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _most_level(
    decided: Sequence[Comparison], left: Sequence[Comparison]
) -> tuple[list[SchemeRow], list[Comparison]] | None:
    """The rows that are behind in none and are in the most of the comparisons left, and the comparisons without them.

    None if each row of these is behind in some comparison.
    """
    behind = {row.scheme for each in decided for row in each.rows if each.verdict(row) == BEHIND}
    rows = {row.scheme: row for each in reversed(left) for row in each.rows if row.scheme not in behind}
    found = {scheme: [each for each in left if scheme in each.schemes] for scheme in rows}
    if not found:
        return None
    most = max(found, key=lambda scheme: (len(found[scheme]), sum(each.rows[0].scheme == scheme for each in left)))
    level = [scheme for scheme in found if found[scheme] == found[most]]
    level.sort(key=lambda scheme: -sum(each.rows[0].scheme == scheme for each in left))
    return [rows[scheme] for scheme in level], [each for each in left if each not in found[most]]


def cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Cells of a comparison's table below `HEADER`."""
    lines = []
    for row in comparison.rows:
        verdict = comparison.verdict(row)
        behind = Difference(row.behind, math.nan if row.half is None else row.half, comparison.seeds)
        figure = f"{row.mean:.4g}" + (f" ± {row.spread:.2g}" if row.spread is not None else "")
        lines.append((row.name, row.scheme, figure, "-" if verdict == BEST else behind.text(".2g"), verdict))
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
