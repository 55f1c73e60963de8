"""Summaries in docs/results/README.md, derived from docs/results/*/results.json; `tools.generate` writes them.

Intervals of pairs are Student's at 95%, of differences paired by seed. Intervals to the best row, which the figures select,
hold for all pairs of rows at once, with moderated deviations (`isopos.lab.reports.intervals.to_best`).
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from isopos.lab.reports.grids import markdown
from isopos.lab.reports.intervals import FEW, MIN_SEEDS, NOT_SHOWN, Difference, correlation_text, spearman, to_best
from isopos.lab.reports.paper import RESULTS
from isopos.lab.runs.files import read_json
from isopos.lab.tables.loader import PaperTable, load_table
from tools.pages import ROOT

__all__ = ["ResultTable", "findings", "folders", "read", "read_all", "tuning"]

APART = 5  # standard deviations by which the best and the worst row of a column should differ
SEPARATE = "quartiles do not overlap"
FOLDER = ROOT / "docs" / "results"
CHOSEN = {"rates": dict[str, float], "correlation": float | None}
KINDS = {
    "commands": list[str],
    "seeds": int,
    "rounds": int,
    "data": dict[str, str],
    "rates": list[float],
    "chosen": dict[str, CHOSEN],
    "missing": list[str],
    "figures": dict[str, dict[str, dict[str, float]]],
}


@dataclass(frozen=True)
class ResultTable:
    """A table of docs/results: its layout, and the contents of its results.json."""

    name: str  # of the folder
    layout: PaperTable
    content: Mapping[str, Any]

    @property
    def seeds(self) -> int:
        """Number of seeds of a row without missing seeds."""
        return self.content["seeds"]

    @property
    def rates(self) -> str:
        """The multiples of the learning rate of which each row has the best; empty if one rate serves all rows."""
        return ", ".join(f"{rate:g}" for rate in self.content["rates"])

    @property
    def timed(self) -> bool:
        """Whether figures are medians of rounds, with half the range between their quartiles."""
        return self.layout.timed

    @cached_property
    def factors(self) -> Mapping[str, float]:
        """By column, 100 where figures are percentages, else 1."""
        return {column.title: 100 if self.layout.metric(column).style.endswith("%") else 1 for column in self.layout.columns}

    @cached_property
    def by_seed(self) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
        """Our figures by column, row and seed; of a timed table none."""
        return {
            title: {row: {seed: self.factors[title] * x for seed, x in seeds.items()} for row, seeds in by_row.items()}
            for title, by_row in ({} if self.timed else self.content["figures"]).items()
        }

    @cached_property
    def ours(self) -> Mapping[str, Mapping[str, tuple[float, float]]]:
        """Our figures by column and row: means and standard deviations, NaN for one seed; or medians and half ranges."""
        if self.timed:
            rounds = self.content["figures"].items()
            return {
                title: {row: (x["median"], x["half"]) for row, x in by_row.items()} for title, by_row in rounds if by_row
            }
        return {
            title: {row: _summary([*seeds.values()]) for row, seeds in by_row.items()}
            for title, by_row in self.by_seed.items()
            if by_row
        }

    @cached_property
    def paper(self) -> Mapping[str, Mapping[str, float]]:
        """The paper's figures by column, of columns with figures of ours, and row."""
        return {
            column.title: {
                row.name: self.factors[column.title] * row.figures[n]
                for row in self.layout.rows
                if row.figures and not math.isnan(row.figures[n])
            }
            for n, column in enumerate(self.layout.columns)
            if column.title in self.ours and any(row.figures for row in self.layout.rows)
        }

    def sort(self, column: str, figures: Mapping[str, float]) -> list[str]:
        """Names of rows, the best in a column first."""
        return sorted(figures, key=lambda row: self.sign(column) * figures[row])

    def sign(self, column: str) -> int:
        """1 if lower figures of a column are better, else -1."""
        layout = next(one for one in self.layout.columns if one.title == column)
        return 1 if self.layout.metric(layout).better == "lower" else -1

    def lead(self, column: str, first: str, second: str) -> Difference:
        """How much better a row is than another, paired by seed; without an interval if they have no common seeds."""
        ours, others = (self.by_seed.get(column, {}).get(row, {}) for row in (first, second))
        if shared := [seed for seed in ours if seed in others]:
            return Difference.paired([(others[seed] - ours[seed]) * self.sign(column) for seed in shared])
        figures = self.ours[column]
        return Difference((figures[second][0] - figures[first][0]) * self.sign(column), math.nan, 0)

    def leads(self, column: str, order: Sequence[str]) -> dict[str, Difference]:
        """How much better the first of these rows is than each other one, if their figures determine which is the first."""
        best, *others = order
        sign, by_seed = self.sign(column), self.by_seed.get(column, {})
        values = {
            row: [(x - by_seed[best][seed]) * sign for seed, x in by_seed[row].items() if seed in by_seed[best]]
            for row in others
            if {best, row} <= {*by_seed}
        }
        paired = to_best({row: differences for row, differences in values.items() if differences})
        return {row: paired.get(row) or self.lead(column, best, row) for row in others}

    def certainty(self, column: str, first: str, second: str, lead: Difference | None = None) -> str:
        """Interval and number of seeds of a difference, by default of these two rows alone, or whether quartiles overlap."""
        if not self.timed:
            return (lead or self.lead(column, first, second)).summary
        (a, a_half), (b, b_half) = self.ours[column][first], self.ours[column][second]
        return SEPARATE if abs(a - b) > a_half + b_half else "quartiles overlap"


def _summary(figures: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(figures), statistics.stdev(figures) if len(figures) > 1 else math.nan


def read(path: Path) -> ResultTable:
    """The table of a results.json that `isopos table` wrote."""
    content = read_json(path, KINDS, "write it again by its command")
    return ResultTable(path.parent.name, load_table(content["commands"][0].split()[2]), content)


def read_all(folder: Path = FOLDER) -> list[ResultTable]:
    """All tables of a folder."""
    return [read(path) for path in sorted(folder.glob(f"*/{RESULTS}"))]


def folders(results: Sequence[ResultTable]) -> str:
    """A row for each folder, the missing cells in a fold-out, and the commands that computed the figures."""
    rows = [
        (
            f"[`{table.name}`]({table.name}/table.md)",
            f"{table.layout.citation}: {table.layout.title}",
            "; ".join(f"{name}: {data}" if name else data for name, data in table.content["data"].items()) or "none",
            f"{table.content['rounds']} rounds" if table.timed else f"{table.seeds} seed{'s' * (table.seeds != 1)}",
            str(len(table.content["missing"]) or "-"),
        )
        for table in results
    ]
    missing = [f"- `{table.name}`: {'; '.join(some)}." for table in results if (some := table.content["missing"])]
    fold = ['<details markdown="1"><summary>Missing cells</summary>', "", *missing, "", "</details>"] if missing else []
    commands = [f"    {command}" for table in results for command in table.content["commands"]]
    grid = markdown(("folder", "table", "data", "repeated", "missing entries"), rows)
    return "\n".join(("", grid, "", *fold, "", *commands, ""))


def tuning(results: Sequence[ResultTable]) -> str:
    """For each table whose rows have the best of several learning rates, what their order owes to the choice."""
    rows = []
    for table in results:
        for corpus, chosen in table.content["chosen"].items():
            counts = Counter(chosen["rates"].values())
            rates = table.content["rates"]
            ends = [f"{counts[rate]} of {counts.total()}" for rate in (min(rates), max(rates))]
            correlation = "-" if chosen["correlation"] is None else f"{chosen['correlation']:+.2f}"
            rows.append((f"[`{table.name}`]({table.name}/table.md)", corpus, table.rates, *ends, correlation))
    titles = ("table", "data", "rates", "rows with the lowest", "rows with the highest", "rank correlation")
    return f"\n{markdown(titles, rows, 'lllrrr')}\n"


def findings(results: Sequence[ResultTable]) -> str:
    """Statements that follow from each table, without judgement."""
    lines = []
    for table in results:
        lines += [f"### `{table.name}`: {table.layout.title}", "", *(f"- {text}" for text in _statements(table)), ""]
    return "\n".join(("", *lines))


def _statements(table: ResultTable) -> Iterator[str]:
    yield from _best(table)
    yield from _separation(table)
    for column, figures in table.paper.items():
        both = {row: figure for row, figure in figures.items() if row in table.ours[column]}
        if len(both) >= FEW:
            yield _ranks(table, column, both)
            yield _pairs(table, column, both)
    for certainty, gains in _learned(table).items():
        yield f"Gained by learning angles, over the fixed ones that they start with ({certainty}): {'; '.join(gains)}."
    yield from _rises(table)


def _rises(table: ResultTable) -> Iterator[str]:
    """How much figures rise from the first to the last column, where titles are numbers and the paper has no figures."""
    if not table.paper and len(table.ours) > 1 and all(title.replace(",", "").isdigit() for title in table.ours):
        first, *_, last = table.ours
        rises = {row: table.ours[last][row][0] / table.ours[first][row][0] - 1 for row in table.ours[last]}
        texts = [f"{row} {rise:+.1%}" for row, rise in sorted(rises.items(), key=lambda item: item[1])]
        yield f"From {first} to {last}: {', '.join(texts)}."


def _best(table: ResultTable) -> Iterator[str]:
    """The best row and the next: one sentence for all columns with the same two rows."""
    leads: dict[tuple[str, ...], dict[str, str]] = {}
    for column, figures in table.ours.items():
        order = table.sort(column, {row: figure for row, (figure, _) in figures.items()})
        if len(order) > 1 and figures[order[0]][0] != figures[order[1]][0]:
            best, second = order[:2]
            difference = table.leads(column, order)[second]
            gap = f"{abs(figures[best][0] - figures[second][0]):.3g}"
            lead = gap if table.timed else difference.text(".3g")
            leads.setdefault((best, second, table.certainty(column, best, second, difference)), {})[column] = lead
    for (best, second, certainty), by_column in leads.items():
        yield f"{'; '.join(by_column)}: {best} is best, ahead of {second} by {', '.join(by_column.values())} ({certainty})."


def _separation(table: ResultTable) -> Iterator[str]:
    """How far the best and the worst row are apart, in standard deviations of one seed, pooled over rows."""
    apart = {}
    for column, figures in {} if table.timed or table.seeds < MIN_SEEDS else table.ours.items():
        variances = [spread**2 for _, spread in figures.values() if not math.isnan(spread)]
        means = [mean for mean, _ in figures.values()]
        if len(means) > 1 and (deviation := math.sqrt(statistics.mean(variances or [0.0]))):
            apart[column] = (max(means) - min(means)) / deviation
    if apart:
        told = [f"{column} {distance:.0f}" for column, distance in apart.items() if distance >= APART]
        untold = [f"{column} ({distance:.1f})" for column, distance in apart.items() if distance < APART]
        text = f"Best and worst row are apart, in standard deviations of a seed: {'; '.join(told)}." if told else ""
        cannot = f"Too close to tell the order, with fewer than {APART}: {'; '.join(untold)}." if untold else ""
        yield " ".join(filter(None, (text, cannot)))


def _ranks(table: ResultTable, column: str, paper: Mapping[str, float]) -> str:
    """Rank correlation with the paper: of all rows, without the baseline, and without the most influential row."""
    ours = {row: figure for row, (figure, _) in table.ours[column].items()}

    def correlation(*omitted: str) -> float | None:
        rows = [row for row in paper if row not in omitted]
        return spearman([paper[row] for row in rows], [ours[row] for row in rows])

    text, base = (
        f"{column}: rank correlation with the paper {correlation_text(correlation())} over {len(paper)} rows",
        table.layout.baseline,
    )
    if base in paper and len(paper) > FEW:
        text += f", {correlation_text(correlation(base))} without {base}"
    without = {row: value for row in paper if row != base and (value := correlation(base, row)) is not None}
    if base in paper and len(paper) > FEW + 2 and without:
        influential = min(without, key=lambda row: without[row])
        text += f", {correlation_text(correlation(base, influential))} without {base} and {influential}"
    return text + "."


def _pairs(table: ResultTable, column: str, paper: Mapping[str, float]) -> str:
    """Which orders of two rows in the paper are confirmed and which are contradicted; by means if seeds are few."""
    pairs = [pair for pair in itertools.combinations(table.sort(column, paper), 2) if paper[pair[0]] != paper[pair[1]]]
    leads = {pair: table.lead(column, *pair) for pair in pairs}
    basis, undecided = "", "without a difference shown"
    if table.timed:
        decided = {pair for pair in pairs if table.certainty(column, *pair) == SEPARATE}
        undecided = "with quartiles that overlap"
    elif any(not math.isnan(lead.half) for lead in leads.values()):
        decided = {pair for pair, lead in leads.items() if lead.excludes_zero}
    else:
        decided, undecided = {pair for pair, lead in leads.items() if lead.mean}, "level"
        seeds = max(lead.seeds for lead in leads.values())
        basis = f" by means alone ({'one seed' if seeds == 1 else f'{seeds} seeds'})"
    contradicted = [pair for pair in pairs if pair in decided and leads[pair].mean < 0]
    groups = itertools.groupby(contradicted, lambda pair: pair[0])
    against = [f"{better} before {', '.join(worse for _, worse in group)}" for better, group in groups]
    ending = f"; against ours the paper has {'; '.join(against)}" if against else ""
    confirmed = len(decided) - len(contradicted)
    counts = f"{confirmed} in the paper's order, {len(contradicted)} not, {len(pairs) - len(decided)} {undecided}"
    return f"{column}: of {len(pairs)} pairs of rows{basis} {counts}{ending}."


def _learned(table: ResultTable) -> dict[str, list[str]]:
    """Gains of rows with learned angles over the row with their initial values, by certainty."""
    gains: dict[str, list[str]] = {}
    pairs = [(row.name, row.fixed) for row in table.layout.rows if row.fixed]
    for column, (row, fixed) in itertools.product(table.ours, pairs):
        if row in table.ours[column] and fixed in table.ours[column]:
            lead = table.lead(column, row, fixed)
            text = f"{lead.mean:+.3f}" if table.timed else lead.text("+.3f")
            name = row if fixed.startswith(row) else f"{row} over {fixed}"
            certainty = table.certainty(column, row, fixed).removesuffix(NOT_SHOWN)
            gains.setdefault(certainty, []).append(f"{name}, {column} {text}")
    return gains
