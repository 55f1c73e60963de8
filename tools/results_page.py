"""What docs/results/README.md says that its tables know: `tools.generate` writes it from docs/results/*/table.md."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isopos.lab.reports.grids import markdown
from isopos.lab.reports.paper import FEW, PAIRED, spearman
from isopos.lab.tables.loader import load_table

__all__ = ["Shown", "findings", "folders", "read", "shown_in"]

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LEARNS = " with fixed angles"  # at the end of the name of a row, whose other learns them


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
    said: Sequence[str]
    commands: Sequence[str]

    def sort(self, column: str, figures: Mapping[str, float]) -> list[str]:
        """Names of rows, the best in a column first."""
        return sorted(figures, key=lambda row: figures[row] * self.sign(column))

    def sign(self, column: str) -> int:
        """1 where lower figures of a column are better, -1 where higher ones are."""
        return 1 if (self.better == "lower") is (column not in self.others) else -1

    def ahead(self, column: str, first: str, second: str) -> tuple[float, float]:
        """By how much a row is better than another, and the spread of that: of distances paired by seed if there are."""
        paired = {**self.apart.get(column, {}), **({self.reference: (0.0, 0.0)} if self.reference else {})}
        figures = paired if first in paired and second in paired else self.ours[column]
        (a, a_spread), (b, b_spread) = figures[first], figures[second]
        return (b - a) * self.sign(column), math.hypot(a_spread, b_spread)


def read(path: Path) -> Shown:
    """The table in a file that `isopos table` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    tables = [[_cells(line) for line in part] for bar, part in itertools.groupby(lines, lambda s: s[:1] == "|") if bar]
    (titles, _, *rows), *second = tables
    paper = {title.removesuffix(": paper"): n for n, title in enumerate(titles) if title.endswith(": paper")}
    last = len(titles) - sum(title.startswith("updates to ") for title in titles)
    ours = {titles[n].removesuffix(": ours"): n for n in range(2, last) if n not in paper.values()}
    apart = {title: n for n, title in enumerate(second[0][0]) if n} if second else {}
    distances = second[0][2:] if second else []
    said = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    commands = [line.strip() for line in lines if line.startswith("    isopos table ")]
    table = load_table(commands[0].split()[2])
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
        said=said,
        commands=commands,
    )


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _figure(cell: str) -> tuple[float, float] | None:
    """A number, perhaps a percentage or marked, and its spread; None where the cell says why there is none."""
    value, _, spread = cell.replace(",", "").replace("%", "").removesuffix(" *").partition(" ± ")
    try:
        return float(value), float(spread or "nan")
    except ValueError:
        return None


def folders(shown: Sequence[Shown]) -> str:
    """A row for each folder, and the commands that its figures come from."""
    rows = [(f"[`{one.name}`]({one.name}/table.md)", f"{one.source}: {one.title}", _data(one), _seeds(one)) for one in shown]
    commands = [f"    {command}" for one in shown for command in one.commands]
    return "\n".join(("", markdown(("folder", "is", "data", "repeated"), rows), "", *commands, ""))


def _data(shown: Shown) -> str:
    said = next((text for text in shown.said if text.startswith(("Data: ", "Text: "))), "")
    return said[len("Data: ") :].rstrip(".").replace(" here is ", ": ") or "none"


def _seeds(shown: Shown) -> str:
    said = " ".join(shown.said)
    times = re.search(r"of up to (\d+) seeds", said) or re.search(r", (\d+) rounds", said)
    lacking = re.search(r"Missing: (.*?)\.( |$)", said)
    count, unit = (times.group(1), "round" if "rounds" in times.group() else "seed") if times else ("?", "seed")
    return f"{count} {unit}{'s' * (count != '1')}" + (f"; missing: {lacking.group(1)}" if lacking else "")


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
    if learned := list(_learned(shown)):
        sign = "negative" if shown.better == "lower" else "positive"
        yield f"Learned angles less fixed ones ({sign} is better): " + "; ".join(learned) + "."
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
        ahead, spread = shown.ahead(column, *order[:2]) if len(order) > 1 else (0.0, 0.0)
        if ahead:
            found.setdefault((*order[:2], _beside(ahead, spread)), {})[column] = f"{ahead:.3g}"
    for (first, second, beside), by in found.items():
        yield f"{'; '.join(by)}: {first} leads, ahead of {second} by {', '.join(by.values())}, {beside}."


def _beside(ahead: float, spread: float) -> str:
    if math.isnan(spread):
        return "of one seed"
    return "inside the spread" if abs(ahead) <= spread else "outside the spread"


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
    """Which of the paper's orders of two rows ours have, too, and which they contradict."""
    order = shown.sort(column, paper)
    same, near, other = 0, 0, []
    for better, worse in itertools.combinations(order, 2):
        if paper[better] == paper[worse]:
            continue
        ahead, spread = shown.ahead(column, better, worse)
        if abs(ahead) <= spread:  # never, where one of them has one seed
            near += 1
        elif ahead > 0:
            same += 1
        else:
            other.append((better, worse))
    against = [f"{better} before {', '.join(worse for _, worse in rest)}" for better, rest in _grouped(other)]
    said = f"; against ours the paper has {'; '.join(against)}" if against else ""
    count = same + near + len(other)
    return (
        f"{column}: of {count} pairs of rows {same} in the paper's order, {len(other)} not, {near} inside the spread{said}."
    )


def _grouped(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for first, rest in itertools.groupby(pairs, lambda pair: pair[0]):
        yield first, list(rest)


def _learned(shown: Shown) -> Iterator[str]:
    """What learning its angles is worth to a row that has a fixed one beside it."""
    for column, figures in shown.ours.items():
        for fixed in (row for row in figures if row.endswith(LEARNS)):
            if (row := fixed.removesuffix(LEARNS)) in figures:
                ahead, spread = shown.ahead(column, row, fixed)
                yield f"{row}, {column} {-ahead * shown.sign(column):+.3f}, {_beside(ahead, spread)}"


def shown_in(folder: Path = RESULTS) -> list[Shown]:
    """All tables of a folder."""
    return [read(path) for path in sorted(folder.glob("*/table.md"))]
