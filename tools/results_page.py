"""Summaries in docs/results/README.md, derived from docs/results/*/table.md; `tools.generate` writes them.

Intervals of pairs are Student's at 95% (`isopos.lab.reports.intervals`). They are paired by seed if figures.json lies
next to the table, or if one of the two rows is the reference of the table's distances. Otherwise they are unpaired, from the
standard deviations of both rows' distances to the reference, which share its noise, so the interval is rather too wide; or,
without distances, from the standard deviations of the columns. A row has all seeds of its table except those listed as
missing. Intervals to the best row, which the figures select, hold for all pairs of rows at once. If paired, deviations are
moderated (`isopos.lab.reports.intervals.to_best`).
"""

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isopos.lab.reports.grids import markdown
from isopos.lab.reports.intervals import FEW, MIN_SEEDS, NOT_SHOWN, Difference, spearman, to_best
from isopos.lab.reports.paper import FIGURES, PAIRED
from isopos.lab.tables.loader import load_table
from tools.pages import ROOT, Rows, tables

__all__ = ["ResultTable", "findings", "folders", "read", "read_all", "tuning"]

APART = 5  # standard deviations by which the best and the worst row of a column should differ
SEPARATE = "quartiles do not overlap"
TRIED = re.compile(r"multiples of the scale's: of (.+) each row has")  # notes of isopos.lab.reports.rates
CHOSEN = re.compile(r"(.+?): ([\d.e-]+ for .+?)\.(?: Seed 0's order .* rank correlation (\S+) over \d+ rows\.)?")
RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class ResultTable:
    """The contents of a table.md: by column, figures of each row, the paper's and ours with its spread; and the notes."""

    name: str
    title: str
    source: str
    baseline: str
    better: str  # lower or higher
    opposite: Sequence[str]  # columns with the opposite direction
    paper: Mapping[str, Mapping[str, float]]
    ours: Mapping[str, Mapping[str, tuple[float, float]]]  # means and spreads; the spread of one seed is NaN
    reference: str  # row of the distances, which are paired by seed; empty if the table has none
    distances: Mapping[str, Mapping[str, tuple[float, float]]]
    missing_seeds: Mapping[str, Mapping[str, frozenset[int]]]  # by column and row
    by_seed: Mapping[str, Mapping[str, Mapping[str, float]]]  # our figures, if the table has figures.json
    fixed: Mapping[str, str]  # for rows with learned angles: the row with their initial values, not learned
    notes: Sequence[str]
    commands: Sequence[str]

    @property
    def timed(self) -> bool:
        """Whether figures are medians of rounds, with half the range between their quartiles."""
        return any("medians of the rounds" in text for text in self.notes)

    @property
    def rates(self) -> str:
        """The multiples of the learning rate of which each row has the best; empty if one rate serves all rows."""
        return next((match[1] for text in self.notes if (match := TRIED.search(text))), "")

    @property
    def seeds(self) -> int:
        """Number of seeds of a row without missing seeds."""
        return _seed_count(self.notes)

    def sort(self, column: str, figures: Mapping[str, float]) -> list[str]:
        """Names of rows, the best in a column first; of equal figures by the means over seeds, which have more digits."""
        by_seed, sign = self.by_seed.get(column, {}), self.sign(column)

        def key(row: str) -> tuple[float, float]:
            return sign * figures[row], sign * statistics.fmean(by_seed[row].values()) if row in by_seed else 0.0

        return sorted(figures, key=key)

    def sign(self, column: str) -> int:
        """1 if lower figures of a column are better, else -1."""
        return 1 if (self.better == "lower") is (column not in self.opposite) else -1

    def lead(self, column: str, first: str, second: str, pairs: int = 1) -> Difference:
        """How much better a row is than another: paired by seed if possible, otherwise from the columns' spreads.

        `pairs` is the number of pairs from which this one is selected.
        """
        sign, by_seed, distances = self.sign(column), self.by_seed.get(column, {}), self.distances.get(column, {})
        ours, others = by_seed.get(first, {}), by_seed.get(second, {})
        if shared := [seed for seed in ours if seed in others]:
            return Difference.paired([(others[seed] - ours[seed]) * sign for seed in shared], pairs)
        for row, other, order in ((first, second, -1), (second, first, 1)):
            if other == self.reference and row in distances:
                mean, spread = distances[row]
                return Difference.of(order * mean * sign, spread, self._count(column, spread, row, other), pairs)
        figures, shared_rows = self.ours[column], ()
        if first in distances and second in distances:
            figures, shared_rows = distances, (self.reference,)

        def summary(row: str) -> tuple[float, float, int]:
            mean, spread = figures[row]
            return mean * sign, spread, self._count(column, spread, row, *shared_rows)

        return Difference.unpaired(summary(second), summary(first), pairs)

    def leads(self, column: str, order: Sequence[str]) -> dict[str, Difference]:
        """How much better the first of these rows is than each other one, if their figures determine which is the first."""
        best, *others = order
        sign, by_seed = self.sign(column), self.by_seed.get(column, {})
        values = {
            row: [(figure - by_seed[best][seed]) * sign for seed, figure in by_seed[row].items() if seed in by_seed[best]]
            for row in others
            if {best, row} <= {*by_seed}
        }
        if len(values) == len(others) and all(values.values()):
            return to_best(values)
        return {row: self.lead(column, best, row, len(order) * (len(order) - 1) // 2) for row in others}

    def _count(self, column: str, spread: float, *rows: str) -> int:
        """Number of seeds that all of these rows have; 1 if the spread is NaN."""
        missing = frozenset().union(*(self.missing_seeds.get(column, {}).get(row, frozenset()) for row in rows))
        return 1 if math.isnan(spread) else self.seeds - len(missing)

    def certainty(self, column: str, first: str, second: str, lead: Difference | None = None) -> str:
        """Interval and number of seeds of a difference, by default of these two rows alone, or whether quartiles overlap."""
        if not self.timed:
            return (lead or self.lead(column, first, second)).summary
        (a, a_half), (b, b_half) = self.ours[column][first], self.ours[column][second]
        return SEPARATE if abs(a - b) > a_half + b_half else "quartiles overlap"


def read(path: Path) -> ResultTable:
    """The table in a file that `isopos table` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (titles, *rows), *second = tables(path)
    paper = {title.removesuffix(": paper"): n for n, title in enumerate(titles) if title.endswith(": paper")}
    last = len(titles) - sum(title.startswith("updates to ") for title in titles)
    ours = {titles[n].removesuffix(": ours"): n for n in range(2, last) if n not in paper.values()}
    distances = {title: n for n, title in enumerate(second[0][0]) if n} if second else {}
    notes = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    commands = [line.strip() for line in lines if line.startswith("    isopos table ")]
    table = load_table(commands[0].split()[2])
    factors = {column.title: 100 if table.metric(column).style.endswith("%") else 1 for column in table.columns}
    by_seed = json.loads((path.parent / FIGURES).read_text()) if (path.parent / FIGURES).exists() else {}
    better = "lower" if any("lower is better" in text for text in notes) else "higher"
    return ResultTable(
        name=path.parent.name,
        title=lines[0].removeprefix("# "),
        source=lines[2].rsplit(", at the scale", 1)[0],
        baseline=table.baseline,
        better=better,
        opposite=[
            column.title for column in table.columns if column.title in ours and table.metric(column).better != better
        ],
        paper={title: {row: mean for row, (mean, _) in _figures(rows, n).items()} for title, n in paper.items()},
        ours={title: _figures(rows, n) for title, n in ours.items()},
        reference=next((line.removeprefix(f"{PAIRED} ") for line in lines if line.startswith(PAIRED)), ""),
        distances={title: _figures(second[0][1:], n) for title, n in distances.items()},
        missing_seeds={column.title: _missing_seeds(notes, column.title, column.corpus) for column in table.columns},
        by_seed={
            title: {row: {seed: factors[title] * x for seed, x in seeds.items()} for row, seeds in by_row.items()}
            for title, by_row in by_seed.items()
        },
        fixed={row.name: row.fixed for row in table.rows if row.fixed},
        notes=notes,
        commands=commands,
    )


def _missing_seeds(notes: Sequence[str], column: str, corpus: str) -> dict[str, frozenset[int]]:
    """By row, the seeds without a figure in a column. A reason names no seeds; a row with one has at least two figures."""
    missing = next((text for text in notes if text.startswith("Missing: ")), "").removeprefix("Missing: ").removesuffix(".")
    on = re.escape(f" on {corpus}") if corpus else ""
    entries = [re.fullmatch(rf"(.*){on}, seeds ([\d, ]+)", part) for part in missing.split("; ")]
    listed = {entry[1]: frozenset(map(int, entry[2].split(", "))) for entry in entries if entry}
    reasons = [text.partition(f", {column}: ")[0] for text in notes if f", {column}: " in text]
    return listed | {row: frozenset(range(2, _seed_count(notes))) for row in reasons}


def _seed_count(notes: Sequence[str]) -> int:
    """Number of seeds of a row without missing seeds."""
    return int(match[1]) if (match := re.search(r"of up to (\d+) seeds", " ".join(notes))) else 1


def _figures(rows: Rows, column: int) -> dict[str, tuple[float, float]]:
    """The figures of a column by row, without cells that have none."""
    return {row[0]: figure for row in rows if (figure := _figure(row[column]))}


def _figure(cell: str) -> tuple[float, float] | None:
    """The number in a cell, possibly a percentage or marked, and its spread; None if the cell has a reason instead."""
    value, _, spread = cell.replace(",", "").replace("%", "").replace("**", "").removesuffix(" *").partition(" ± ")
    try:
        return float(value), float(spread or "nan")
    except ValueError:
        return None


def folders(results: Sequence[ResultTable]) -> str:
    """A row for each folder, the missing cells in a fold-out, and the commands that computed the figures."""
    rows = [
        (
            f"[`{table.name}`]({table.name}/table.md)",
            f"{table.source}: {table.title}",
            _data(table),
            _repetitions(table),
            str(len(_missing(table)) or "-"),
        )
        for table in results
    ]
    missing = [f"- `{table.name}`: {'; '.join(_missing(table))}." for table in results if _missing(table)]
    fold = ['<details markdown="1"><summary>Missing cells</summary>', "", *missing, "", "</details>"] if missing else []
    commands = [f"    {command}" for table in results for command in table.commands]
    grid = markdown(("folder", "table", "data", "repeated", "missing entries"), rows)
    return "\n".join(("", grid, "", *fold, "", *commands, ""))


def _data(table: ResultTable) -> str:
    note = next((text for text in table.notes if text.startswith(("Data: ", "Text: "))), "")
    return note[len("Data: ") :].rstrip(".").replace(" here is ", ": ") or "none"


def _repetitions(table: ResultTable) -> str:
    """Number of seeds or rounds."""
    notes = " ".join(table.notes)
    match = re.search(r"of up to (\d+) seeds", notes) or re.search(r", (\d+) rounds", notes)
    count, unit = (match.group(1), "round" if "rounds" in match.group() else "seed") if match else ("?", "seed")
    return f"{count} {unit}{'s' * (count != '1')}"


def _missing(table: ResultTable) -> list[str]:
    """Missing cells: rows of a column with their seeds, and columns without data."""
    match = re.search(r"Missing: (.*?)\.( |$)", " ".join(table.notes))
    return match.group(1).split("; ") if match else []


def tuning(results: Sequence[ResultTable]) -> str:
    """For each table whose rows have the best of several learning rates, what their order owes to the choice."""
    rows = []
    for table in results:
        at = next((n for n, text in enumerate(table.notes, 1) if TRIED.search(text)), len(table.notes))
        for text in table.notes[at:]:
            if not (match := CHOSEN.fullmatch(text)):
                break
            corpus, choices, correlation = match.groups()
            by_rate = (part.split(" for ", 1) for part in choices.split("; "))  # "1 for A, B; 2 for C"
            counts = {rate: _count_names(table, names) for rate, names in by_rate}
            most = max(table.rates.split(", "), key=float)
            highest = f"{counts.get(most, 0)} of {sum(counts.values())}"
            rows.append((f"[`{table.name}`]({table.name}/table.md)", corpus, table.rates, highest, correlation or "-"))
    titles = ("table", "data", "rates", "rows with the highest", "rank correlation")
    return f"\n{markdown(titles, rows, 'lllrr')}\n"


def _count_names(table: ResultTable, text: str) -> int:
    """Number of rows in a list of names, which may have commas themselves."""
    names, count = {name for figures in table.ours.values() for name in figures}, 0
    while text:
        longest = max((name for name in names if f"{text}, ".startswith(f"{name}, ")), key=len)
        text, count = text[len(longest) :].removeprefix(", "), count + 1
    return count


def findings(results: Sequence[ResultTable]) -> str:
    """Statements that follow from each table, without judgement."""
    lines = []
    for table in results:
        lines += [f"### `{table.name}`: {table.title}", "", *(f"- {text}" for text in _statements(table)), ""]
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
    by_seed, ours = table.by_seed.get(column, {}), {row: figure for row, (figure, _) in table.ours[column].items()}
    if all(row in by_seed for row in paper):  # more digits, so that no rows are level
        ours = {row: statistics.fmean(by_seed[row].values()) for row in paper}

    def correlation(*omitted: str) -> float:
        rows = [row for row in paper if row not in omitted]
        return spearman([paper[row] for row in rows], [ours[row] for row in rows])

    text, base = f"{column}: rank correlation with the paper {correlation():+.2f} over {len(paper)} rows", table.baseline
    if base in paper and len(paper) > FEW:
        text += f", {correlation(base):+.2f} without {base}"
    if base in paper and len(paper) > FEW + 2:
        influential = min((row for row in paper if row != base), key=lambda row: correlation(base, row))
        text += f", {correlation(base, influential):+.2f} without {base} and {influential}"
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
    for column, (row, fixed) in itertools.product(table.ours, table.fixed.items()):
        if row in table.ours[column] and fixed in table.ours[column]:
            lead = table.lead(column, row, fixed)
            text = f"{lead.mean:+.3f}" if table.timed else lead.text("+.3f")
            name = row if fixed.startswith(row) else f"{row} over {fixed}"
            certainty = table.certainty(column, row, fixed).removesuffix(NOT_SHOWN)
            gains.setdefault(certainty, []).append(f"{name}, {column} {text}")
    return gains


def read_all(folder: Path = RESULTS) -> list[ResultTable]:
    """All tables of a folder."""
    return [read(path) for path in sorted(folder.glob("*/table.md"))]
