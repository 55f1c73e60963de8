"""Statements that follow from the figures of a table, and their picture; from results.json, which `isopos table` wrote.

Intervals of pairs are Student's at 95%, of differences paired by seed. Intervals to the best row, which the figures select,
hold for all pairs of rows at once, with moderated deviations (`isopos.lab.reports.intervals.to_best`).
"""

import itertools
import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isopos.lab.recipes import Recipe
from isopos.lab.reports.intervals import FEW, MIN_SEEDS, NOT_SHOWN, Difference, correlation_text, spearman, to_best
from isopos.lab.reports.plots import EVEN, ODD, literal, plain
from isopos.lab.runs.files import read_json
from isopos.lab.tables.loader import PaperTable, load_table

RESULTS = "results.json"
SAME = 0.01  # largest difference of numbers of weights that is not named
APART = 5  # standard deviations by which the best and the worst row of a column should differ
SEPARATE = "quartiles do not overlap"
CHOSEN = {"rates": dict[str, float], "correlation": float | None}
KINDS = {
    "commands": list[str],
    "scale": str,
    "seeds": int,
    "rounds": int,
    "data": dict[str, str],
    "rates": list[float],
    "chosen": dict[str, CHOSEN],
    "missing": list[str],
    "figures": dict[str, dict[str, dict[str, float]]],
}
INCHES, ROW_INCHES = 4.3, 0.24  # the width of a picture, which a phone shows whole, and the height of a row
NAME = 24  # letters in a line of a name


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
        return sorted(figures, key=lambda row: self.signs[column] * figures[row])

    @cached_property
    def signs(self) -> Mapping[str, int]:
        """By column, 1 if lower figures are better, else -1."""
        return {one.title: 1 if self.layout.metric(one).better == "lower" else -1 for one in self.layout.columns}

    def lead(self, column: str, first: str, second: str) -> Difference:
        """How much better a row is than another, paired by seed; without an interval if they have no common seeds."""
        ours, others = (self.by_seed.get(column, {}).get(row, {}) for row in (first, second))
        if shared := [seed for seed in ours if seed in others]:
            return Difference.paired([(others[seed] - ours[seed]) * self.signs[column] for seed in shared])
        figures = self.ours[column]
        return Difference((figures[second][0] - figures[first][0]) * self.signs[column], math.nan, 0)

    def leads(self, column: str, order: Sequence[str]) -> dict[str, Difference]:
        """How much better the first of these rows is than each other one, if their figures determine which is the first."""
        best, *others = order
        sign, by_seed = self.signs[column], self.by_seed.get(column, {})
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


def read(path: Path, layout: PaperTable | None = None) -> ResultTable:
    """The table of a results.json that `isopos table` wrote; by default with the layout that its command names."""
    content = read_json(path, KINDS, "write it again by its command")
    return ResultTable(path.parent.name, layout or load_table(content["commands"][0].split()[2]), content)


def section(table: ResultTable) -> str:
    """The part of table.md between its marks: the statements of a table."""
    return "\n".join(("", *(f"- {text}" for text in statements(table)), ""))


def statements(table: ResultTable) -> Iterator[str]:
    """Statements that follow from a table, without judgement."""
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
    yield from _weights(table)


def _weights(table: ResultTable) -> Iterator[str]:
    """Rows with over 1% more or fewer weights than the baseline's model: for these, figures compare sizes, too."""
    layout, differ = table.layout, dict[str, list[str]]()
    shown = {(column.corpus, row) for column in layout.columns for row in table.ours.get(column.title, ())}
    for name in table.content["data"] or ("",):
        recipe = layout.recipe_at(table.content["scale"], layout.corpus(name))
        counts = {row.name: _count(recipe.edit(scheme=row.on(name))) for row in layout.rows if (name, row.name) in shown}
        base = _count(recipe.edit(scheme=layout.row(layout.baseline).on(name)))
        more = {row: count - base for row, count in counts.items() if count}  # sizes depend on the data, too; these do not
        text = ", ".join(f"{row} with {count:+,}" for row, count in more.items() if abs(count) > SAME * base)
        differ.setdefault(text, []).append(name)
    for text, names in differ.items():
        where = f" of models for {', '.join(names)}" if any(names) else ""
        yield f"Weights{where}: as many as with {layout.baseline}, within {SAME:.0%}{f', but for {text}' * bool(text)}."


@cache
def _count(recipe: Recipe) -> int:
    """The number of weights of a recipe's model; 0 if it needs a package that is not here."""
    from isopos.lab.tasks.attentions import absence

    return 0 if absence(recipe.scheme) else sum(weight.numel() for weight in recipe.task.model(recipe).parameters())


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


def picture(table: ResultTable) -> Figure:
    """For each column, how far rows are behind the best one, with 95% intervals; of a timed table, its ratios.

    Filled dots are rows that are shown to be behind.
    """
    columns = [title for title, figures in table.ours.items() if len(figures) > 1]
    heights = [1.5 + sum(map(_room, table.ours[title])) for title in columns] or [1.0]
    figure = Figure(figsize=(INCHES, ROW_INCHES * sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, title in zip(panels, columns, strict=False):
        _dots(axes, table, title)
    figure.suptitle(_wrapped(table.layout.title, 44), fontsize=10)
    return figure


def _wrapped(text: str, letters: int = NAME) -> str:
    return "\n".join(map(literal, textwrap.wrap(text, letters)))


def _room(name: str) -> float:
    """The height of a row, more than 1 if its name takes several lines."""
    return max(1.0, 0.65 * len(textwrap.wrap(name, NAME)))


def _dots(axes: Axes, table: ResultTable, column: str) -> None:
    figures, factor = table.ours[column], table.factors[column]
    order = table.sort(column, {row: figure for row, (figure, _) in figures.items()})
    leads = {} if table.timed else table.leads(column, order)
    y, ticks = 0.0, []
    for row in order:
        lead = leads.get(row)
        centre, half = figures[row] if table.timed else (lead.mean, lead.half) if lead else (0.0, math.nan)
        shown = bool(lead and lead.excludes_zero)
        colour = ODD if shown else EVEN
        bar, face = None if math.isnan(half) else half, colour if shown else "none"
        axes.errorbar(centre, y - _room(row) / 2, xerr=bar, fmt="o", color=colour, markersize=5, markerfacecolor=face)
        ticks.append(y - _room(row) / 2)
        y -= _room(row)
    plain(axes)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(ticks, [_wrapped(row) for row in order], fontsize=8)
    axes.set_ylim(y, 0.0)
    metric = table.layout.metric(next(one for one in table.layout.columns if one.title == column))
    unit = f"{metric.figure}, in points" if factor == 100 else metric.figure
    label = f"{column}: {unit}" if table.timed else f"{column}: behind {order[0]}, {unit}"
    axes.set_title(_wrapped(label, 52), fontsize=8.5, loc="right")
    axes.tick_params(axis="x", labelsize=8)
    if not table.timed:
        axes.axvline(0, color=EVEN, linewidth=0.8)
