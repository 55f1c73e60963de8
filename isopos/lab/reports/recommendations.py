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
class Row:
    """A scheme in a comparison.

    Args:
        name: The table's name of the row.
        scheme: The scheme with its options, as on the command line.
        mean: Mean figure over seeds.
        spread: Standard deviation over seeds, or None for one seed.
        behind: By how much the best row is better, in units of the figure.
        half: Half of the 95% interval of `behind`, for all rows at once; None without an interval, and for the best row.
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
    rows: Sequence[Row]  # schemes, the best first

    def verdict(self, row: Row) -> str:
        """Whether a row is the best, behind it, or neither as far as the interval shows."""
        if row is self.rows[0]:
            return BEST
        if row.half is None:
            return UNKNOWN
        return BEHIND if row.behind > row.half else LEVEL

    @property
    def has_intervals(self) -> bool:
        """Whether differences have intervals: at least three seeds."""
        return any(row.half is not None for row in self.rows)


@dataclass(frozen=True)
class Question:
    """A question about data, and the comparisons that bear on it."""

    task: str  # the task of the laboratory
    text: str  # the question
    comparisons: Sequence[Comparison]  # columns of tables

    @property
    def answer(self) -> str:
        """The rows that are behind in none of the most comparisons, and how far this is known."""
        decided = [each for each in self.comparisons if each.has_intervals]
        if not decided:
            first = "; ".join(f"{each.rows[0].name} ({each.table}, {each.column})" for each in self.comparisons)
            return f"Not known, with fewer than {MIN_SEEDS} seeds. Best by means alone: {first}."
        verdicts: dict[str, list[str]] = {}
        names = {row.scheme: row.name for each in reversed(decided) for row in each.rows}
        for each in decided:
            for row in each.rows:
                verdicts.setdefault(row.scheme, []).append(each.verdict(row))
        level = [scheme for scheme, found in verdicts.items() if BEHIND not in found]
        level.sort(key=lambda scheme: (-len(verdicts[scheme]), -verdicts[scheme].count(BEST)))
        most = [scheme for scheme in level if len(verdicts[scheme]) == len(verdicts[level[0]])]
        count = f"{len(verdicts[most[0]])} of {len(decided)} comparison{'s' * (len(decided) > 1)}" if most else ""
        listed = ", ".join(f"{names[scheme]} (`{scheme}`)" for scheme in most[:LISTED])
        more = f", and {len(most) - LISTED} more" if len(most) > LISTED else ""
        text = (
            f"Best, or not shown to be behind the best, in {count}: {listed}{more}." if most else "Each is behind somewhere."
        )
        others = sum(len(each.rows) - 1 for each in decided)
        behind = sum(each.verdict(row) == BEHIND for each in decided for row in each.rows)
        sets = len({each.data for each in decided})
        text = f"{text} Of the {others} other figures {behind} are shown to be behind."
        return text if sets >= FEW_DATA else f"{text} Seen on {sets} data set{'s' * (sets > 1)}: not known for others."


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
    return f"{comparison.table}, {comparison.column}: {comparison.figure}; data {comparison.data}; {seeds}"


def load_questions() -> list[Question]:
    """All questions, in the order of the page."""
    questions = []
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        comparisons = [Comparison(**each | {"rows": [Row(**row) for row in each["rows"]]}) for each in entry["comparisons"]]
        questions.append(Question(**entry | {"comparisons": comparisons}))
    return questions
