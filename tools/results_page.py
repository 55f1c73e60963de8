"""What docs/results/README.md says that its tables know: `tools.generate` writes it from docs/results/*/table.md.

Intervals of differences are Student's at 95% (`isopos.lab.reports.intervals`): of pairs of figures of the same seed where
figures.json is beside the table, or where one of two rows is that to which the table has distances. Else they are unpaired,
from the deviations of both rows' distances to that row, which share its noise, so that the interval is rather too wide; or,
without distances, from those of the columns. A row has all seeds of its table but those that the table says are missing.
The interval of the best row and the next, a pair that is picked from the figures, holds for the best and all others at once.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isopos.lab.reports.grids import markdown
from isopos.lab.reports.intervals import NOT_SHOWN, Difference
from isopos.lab.reports.paper import FEW, FIGURES, PAIRED, spearman
from isopos.lab.tables.loader import load_table
from tools.pages import ROOT, tables

__all__ = ["Shown", "findings", "folders", "read", "shown_in"]

APART = "quartiles do not overlap"
RESULTS = ROOT / "docs" / "results"


@dataclass(frozen=True)
class Shown:
    """A table.md: by column each row's figure, the paper's and ours with its spread, and below them what is said."""

    name: str
    title: str
    source: str
    baseline: str
    better: str  # lower or higher
    others: Sequence[str]  # columns in which it is the other way
    paper: Mapping[str, Mapping[str, float]]
    ours: Mapping[str, Mapping[str, tuple[float, float]]]  # the spread is not a number where there is one seed
    reference: str  # from which distances are, paired by seed; empty where the table has none
    apart: Mapping[str, Mapping[str, tuple[float, float]]]
    lacking: Mapping[str, Mapping[str, frozenset[int]]]  # by column, seeds of rows that have not all of them
    each: Mapping[str, Mapping[str, Mapping[str, float]]]  # ours by seed, where the table has figures.json
    fixed: Mapping[str, str]  # by rows that learn angles, those that stay where these start
    said: Sequence[str]
    commands: Sequence[str]

    @property
    def timed(self) -> bool:
        """Whether figures are medians of rounds, with half the range between their quartiles."""
        return any("medians of the rounds" in text for text in self.said)

    @property
    def seeds(self) -> int:
        """Of each row with a spread that lacks none."""
        return _most(self.said)

    def sort(self, column: str, figures: Mapping[str, float]) -> list[str]:
        """Names of rows, the best in a column first."""
        return sorted(figures, key=lambda row: figures[row] * self.sign(column))

    def sign(self, column: str) -> int:
        """1 where lower figures of a column are better, -1 where higher ones are."""
        return 1 if (self.better == "lower") is (column not in self.others) else -1

    def ahead(self, column: str, first: str, second: str, pairs: int = 1) -> Difference:
        """By how much a row is better than another: paired by seed where it is known how, else by the columns' spreads.

        pairs is the number of those from which this one is picked.
        """
        sign, each, apart = self.sign(column), self.each.get(column, {}), self.apart.get(column, {})
        own, others = each.get(first, {}), each.get(second, {})
        if shared := [seed for seed in own if seed in others]:
            return Difference.paired([(others[seed] - own[seed]) * sign for seed in shared], pairs)
        for row, other, turn in ((first, second, -1), (second, first, 1)):
            if other == self.reference and row in apart:
                mean, spread = apart[row]
                return Difference.of(turn * mean * sign, spread, self._count(column, spread, row, other), pairs)
        known, by = (apart, (self.reference,)) if first in apart and second in apart else (self.ours[column], ())

        def figure(row: str) -> tuple[float, float, int]:
            mean, spread = known[row]
            return mean * sign, spread, self._count(column, spread, row, *by)

        return Difference.unpaired(figure(second), figure(first), pairs)

    def _count(self, column: str, spread: float, *rows: str) -> int:
        """Of how many seeds, which all of these rows have, a spread is."""
        lacking = frozenset().union(*(self.lacking.get(column, {}).get(row, frozenset()) for row in rows))
        return 1 if math.isnan(spread) else self.seeds - len(lacking)

    def beside(self, column: str, first: str, second: str, pairs: int = 1) -> str:
        """What there is to say of a difference beside the number."""
        if not self.timed:
            return self.ahead(column, first, second, pairs).summary
        (a, a_half), (b, b_half) = self.ours[column][first], self.ours[column][second]
        return APART if abs(a - b) > a_half + b_half else "quartiles overlap"


def read(path: Path) -> Shown:
    """The table in a file that `isopos table` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (titles, *rows), *second = tables(path)
    paper = {title.removesuffix(": paper"): n for n, title in enumerate(titles) if title.endswith(": paper")}
    last = len(titles) - sum(title.startswith("updates to ") for title in titles)
    ours = {titles[n].removesuffix(": ours"): n for n in range(2, last) if n not in paper.values()}
    apart = {title: n for n, title in enumerate(second[0][0]) if n} if second else {}
    distances = second[0][1:] if second else []
    said = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    commands = [line.strip() for line in lines if line.startswith("    isopos table ")]
    table = load_table(commands[0].split()[2])
    percents = {column.title: table.metric(column).style.endswith("%") for column in table.columns}
    each = json.loads((path.parent / FIGURES).read_text()) if (path.parent / FIGURES).exists() else {}
    better = "lower" if any("lower is better" in text for text in said) else "higher"
    return Shown(
        name=path.parent.name,
        title=lines[0].removeprefix("# "),
        source=lines[2].rsplit(", at the scale", 1)[0],
        baseline=table.baseline,
        better=better,
        others=[one.title for one in table.columns if one.title in ours and table.metric(one).better != better],
        paper={title: {row[0]: found[0] for row in rows if (found := _figure(row[n]))} for title, n in paper.items()},
        ours={title: {row[0]: found for row in rows if (found := _figure(row[n]))} for title, n in ours.items()},
        reference=next((line.removeprefix(f"{PAIRED} ") for line in lines if line.startswith(PAIRED)), ""),
        apart={title: {row[0]: found for row in distances if (found := _figure(row[n]))} for title, n in apart.items()},
        lacking={one.title: _lacking(said, one.title, one.corpus) for one in table.columns},
        each={
            title: {
                row: {seed: (100 if percents[title] else 1) * one for seed, one in own.items()} for row, own in by.items()
            }
            for title, by in each.items()
        },
        fixed={row.name: row.fixed for row in table.rows if row.fixed},
        said=said,
        commands=commands,
    )


def _lacking(said: Sequence[str], column: str, corpus: str) -> dict[str, frozenset[int]]:
    """By row, the seeds without a figure in a column. A reason names none: where there is one, two have figures at least."""
    missing = next((text for text in said if text.startswith("Missing: ")), "").removeprefix("Missing: ").removesuffix(".")
    on = re.escape(f" on {corpus}") if corpus else ""
    found = [re.fullmatch(rf"(.*){on}, seeds ([\d, ]+)", part) for part in missing.split("; ")]
    lacking = {one[1]: frozenset(map(int, one[2].split(", "))) for one in found if one}
    reasons = [text.partition(f", {column}: ")[0] for text in said if f", {column}: " in text]
    return lacking | {row: frozenset(range(2, _most(said))) for row in reasons}


def _most(said: Sequence[str]) -> int:
    """How many seeds a row of a table has, if it lacks none."""
    return int(found[1]) if (found := re.search(r"of up to (\d+) seeds", " ".join(said))) else 1


def _figure(cell: str) -> tuple[float, float] | None:
    """A number, perhaps a percentage or marked, and its spread; None where the cell says why there is none."""
    value, _, spread = cell.replace(",", "").replace("%", "").replace("**", "").removesuffix(" *").partition(" ± ")
    try:
        return float(value), float(spread or "nan")
    except ValueError:
        return None


def folders(shown: Sequence[Shown]) -> str:
    """A row for each folder, the missing cells in a fold-out, and the commands that computed the figures."""
    rows = [
        (
            f"[`{one.name}`]({one.name}/table.md)",
            f"{one.source}: {one.title}",
            _data(one),
            _seeds(one),
            str(len(_missing(one)) or "-"),
        )
        for one in shown
    ]
    missing = [f"- `{one.name}`: {'; '.join(_missing(one))}." for one in shown if _missing(one)]
    fold = ['<details markdown="1"><summary>Missing cells</summary>', "", *missing, "", "</details>"] if missing else []
    commands = [f"    {command}" for one in shown for command in one.commands]
    table = markdown(("folder", "table", "data", "repeated", "missing entries"), rows)
    return "\n".join(("", table, "", *fold, "", *commands, ""))


def _data(shown: Shown) -> str:
    said = next((text for text in shown.said if text.startswith(("Data: ", "Text: "))), "")
    return said[len("Data: ") :].rstrip(".").replace(" here is ", ": ") or "none"


def _seeds(shown: Shown) -> str:
    said = " ".join(shown.said)
    times = re.search(r"of up to (\d+) seeds", said) or re.search(r", (\d+) rounds", said)
    count, unit = (times.group(1), "round" if "rounds" in times.group() else "seed") if times else ("?", "seed")
    return f"{count} {unit}{'s' * (count != '1')}"


def _missing(shown: Shown) -> list[str]:
    """What a table lacks: a row of a column with its seeds, or a column without data."""
    found = re.search(r"Missing: (.*?)\.( |$)", " ".join(shown.said))
    return found.group(1).split("; ") if found else []


def findings(shown: Sequence[Shown]) -> str:
    """What follows from each table, without a word of judgement."""
    lines = []
    for one in shown:
        lines += [f"### `{one.name}`: {one.title}", "", *(f"- {text}" for text in _found(one)), ""]
    return "\n".join(("", *lines))


def _found(shown: Shown) -> Iterator[str]:
    yield from _first(shown)
    for column, figures in shown.paper.items():
        both = {row: figure for row, figure in figures.items() if row in shown.ours[column]}
        if len(both) >= FEW:
            yield _ranks(shown, column, both)
            yield _pairs(shown, column, both)
    for kind, gains in _learned(shown).items():
        yield f"Gained by learning angles, over the fixed ones that they start with ({kind}): {'; '.join(gains)}."
    if not shown.paper and len(shown.ours) > 1 and all(title.replace(",", "").isdigit() for title in shown.ours):
        first, *_, last = shown.ours
        rises = {row: shown.ours[last][row][0] / shown.ours[first][row][0] - 1 for row in shown.ours[last]}
        texts = [f"{row} {rise:+.1%}" for row, rise in sorted(rises.items(), key=lambda item: item[1])]
        yield f"From {first} to {last}: {', '.join(texts)}."


def _first(shown: Shown) -> Iterator[str]:
    """The best row and the next: a sentence for columns that have the same ones."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for column, figures in shown.ours.items():
        order = shown.sort(column, {row: figure for row, (figure, _) in figures.items()})
        if len(order) > 1 and figures[order[0]][0] != figures[order[1]][0]:
            best, second, pairs = order[0], order[1], len(order) - 1
            apart = f"{_gap(figures, best, second):.3g}" if shown.timed else ""
            apart = apart or shown.ahead(column, best, second, pairs).text(".3g")
            found.setdefault((best, second, shown.beside(column, best, second, pairs)), {})[column] = apart
    for (first, second, beside), by in found.items():
        yield f"{'; '.join(by)}: {first} is best, ahead of {second} by {', '.join(by.values())} ({beside})."


def _gap(figures: Mapping[str, tuple[float, float]], first: str, second: str) -> float:
    return abs(figures[first][0] - figures[second][0])


def _ranks(shown: Shown, column: str, paper: Mapping[str, float]) -> str:
    """Rank correlation with the paper: of all rows, without the baseline, and without the row on which that leans most."""

    def correlation(*gone: str) -> float:
        rows = [row for row in paper if row not in gone]
        return spearman([paper[row] for row in rows], [shown.ours[column][row][0] for row in rows])

    text, base = f"{column}: rank correlation with the paper {correlation():+.2f} over {len(paper)} rows", shown.baseline
    if base in paper and len(paper) > FEW:
        text += f", {correlation(base):+.2f} without {base}"
    if base in paper and len(paper) > FEW + 2:
        most = min((row for row in paper if row != base), key=lambda row: correlation(base, row))
        text += f", {correlation(base, most):+.2f} without {base} and {most}"
    return text + "."


def _pairs(shown: Shown, column: str, paper: Mapping[str, float]) -> str:
    """Which of the paper's orders of two rows ours have, too, and which they contradict; by means where seeds are few."""
    pairs = [pair for pair in itertools.combinations(shown.sort(column, paper), 2) if paper[pair[0]] != paper[pair[1]]]
    apart = {pair: shown.ahead(column, *pair) for pair in pairs}
    by, near = "", "without a difference shown"
    if shown.timed:
        known, near = {pair for pair in pairs if shown.beside(column, *pair) == APART}, "with quartiles that overlap"
    elif any(not math.isnan(one.half) for one in apart.values()):
        known = {pair for pair, one in apart.items() if one.excludes_zero}
    else:
        known, near = {pair for pair, one in apart.items() if one.mean}, "level"
        seeds = max(one.seeds for one in apart.values())
        by = f" by means alone ({'one seed' if seeds == 1 else f'{seeds} seeds'})"
    other = [pair for pair in pairs if pair in known and apart[pair].mean < 0]
    against = [f"{better} before {', '.join(worse for _, worse in rest)}" for better, rest in _grouped(other)]
    said = f"; against ours the paper has {'; '.join(against)}" if against else ""
    counts = f"{len(known) - len(other)} in the paper's order, {len(other)} not, {len(pairs) - len(known)} {near}"
    return f"{column}: of {len(pairs)} pairs of rows{by} {counts}{said}."


def _grouped(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for first, rest in itertools.groupby(pairs, lambda pair: pair[0]):
        yield first, list(rest)


def _learned(shown: Shown) -> dict[str, list[str]]:
    """What learning its angles gains a row, beside one that keeps those it starts with; by what there is to say of that."""
    found: dict[str, list[str]] = {}
    for column, (row, fixed) in itertools.product(shown.ours, shown.fixed.items()):
        if row in shown.ours[column] and fixed in shown.ours[column]:
            gain = shown.ahead(column, row, fixed)
            text = f"{gain.mean:+.3f}" if shown.timed else gain.text("+.3f")
            name = row if fixed.startswith(row) else f"{row} over {fixed}"
            kind = shown.beside(column, row, fixed).removesuffix(NOT_SHOWN)
            found.setdefault(kind, []).append(f"{name}, {column} {text}")
    return found


def shown_in(folder: Path = RESULTS) -> list[Shown]:
    """All tables of a folder."""
    return [read(path) for path in sorted(folder.glob("*/table.md"))]
