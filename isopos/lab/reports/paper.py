"""What the cells of a paper's table came to, read from their folders: figures, ranks, curves. Nothing is trained here."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from isopos.lab.bench.timing import Spread
from isopos.lab.recipes import PLACEMENT, Recipe
from isopos.lab.reports import grids
from isopos.lab.reports.intervals import LEAST, Difference
from isopos.lab.reports.plots import line_style, literal, plain
from isopos.lab.runs.files import replacing, write_json, write_text
from isopos.lab.runs.folders import read_rows
from isopos.lab.tables.loader import (
    SCORES,
    TIMED,
    Column,
    PaperTable,
    TableRow,
    cell_name,
    read_about,
    read_scores,
    speed_rounds,
)
from isopos.lab.tasks.language import TextTask
from isopos.lab.tasks.task import Metric

# Fields that make no difference to a model or are told elsewhere:
SILENT = (*PLACEMENT, "scheme", "seed", "data", "validate_every", "accumulate", "recompute")
FIGURES = "figures.json"  # ours: by column, row and seed
PAIRED = "## Distance to"  # and the name of the reference row: the title of the second table
FEW = 3  # rows from which on a rank correlation is a number worth printing


@dataclass(frozen=True)
class Found:
    """A row: our figures by column and its validations by corpus, each by seed, and reasons why there are none by column."""

    line: TableRow
    values: Mapping[str, Mapping[int, float]]
    curves: Mapping[str, Mapping[int, Mapping[int, float]]]
    reasons: Mapping[str, str]
    stand_in: bool = False  # whether another split than a column's was scored


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks. Not a number where all values of one side are equal.

    Examples:
        >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
        0.8
    """
    ranks = [[sum(y < x for y in values) + (values.count(x) + 1) / 2 for x in values] for values in map(list, (a, b))]
    if any(len(set(one)) == 1 for one in ranks):
        return float("nan")
    return round(statistics.correlation(*ranks), 12)


def differences(paper: Recipe, ours: Recipe) -> str:
    """How a recipe differs from the paper's, in one sentence.

    Examples:
        >>> differences(Recipe().edit(steps=50_000), Recipe())
        'steps 250 (paper: 50,000).'
    """
    was, now = paper.as_dict(), ours.as_dict()
    changed = [name for name in now if name not in SILENT and was[name] != now[name]]
    texts = [f"{name.replace('_', ' ')} {_value(name, now[name])} (paper: {_value(name, was[name])})" for name in changed]
    return "; ".join(texts) + "." if texts else "The recipe is the paper's."


def _value(name: str, value: Any) -> str:
    if value == 0 and name.startswith(("vocabulary", "validation_")):
        return "all"
    if name == "warmup" and value == -1:
        return "a tenth"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def write(table: PaperTable, folder: Path) -> tuple[Table, list[str]]:
    """Write table.md, figures.json and curves.svg in a table's folder; return it for a terminal, and what is said below."""
    about = read_about(folder)
    rows = [_found(table, line, folder, about) for line in table.rows]
    titles, grid = _grid(table, rows, about)
    align, said = "ll".ljust(len(titles), "r"), list(_said(table, rows, folder, about))
    lines = [f"# {table.title}", "", f"{table.citation}, at the scale `{about['scale']}`.", ""]
    lines += [grids.markdown(titles, grid, align), "", *(f"- {text}" for text in said), ""]
    lines += _apart(table, rows, about)
    lines += [*(f"    {command}" for command in about["commands"]), "", "![curves](curves.svg)", ""]
    write_text(folder / "table.md", "\n".join(lines))
    if not table.timed:
        found = {column.title: {row.line.name: row.values[column.title] for row in rows} for column in table.columns}
        write_json(folder / FIGURES, {title: {name: own for name, own in by.items() if own} for title, by in found.items()})
    draw = _speed_picture if table.timed else _along if table.along else _curves
    figure = draw(table, rows, _alone(table, about))
    with replacing(folder / "curves.svg") as part:
        figure.savefig(part, format="svg", metadata={"Date": None})
    return grids.console(titles, grid, align, title=f"{table.title}: {table.citation}"), said


def _found(table: PaperTable, line: TableRow, folder: Path, about: Mapping[str, Any]) -> Found:
    if table.timed:
        rounds = {one.title: [r for r in speed_rounds(folder, one.corpus) if line.name in r] for one in table.columns}
        ratios = {title: {n: table.ratio(one, line.name) for n, one in enumerate(some)} for title, some in rounds.items()}
        return Found(line, ratios, {}, {})
    values: dict[str, dict[int, float]] = {column.title: {} for column in table.columns}
    curves: dict[str, dict[int, dict[int, float]]] = {name: {} for name in about["corpora"]}
    reasons, stand_in = {}, False
    for corpus in about["corpora"] if line.scheme else ():
        for seed in range(about["seeds"]):
            cell = folder / "cells" / cell_name(corpus, line.on(corpus), seed)
            if not (cell / SCORES).exists():
                continue
            scores, metrics = read_scores(cell), read_rows(cell / "metrics.jsonl")
            curve = {row["step"]: row["validation"] for row in metrics if row.get("validation") is not None}
            curves[corpus][seed] = curve
            for column in (column for column in table.columns if column.corpus == corpus):
                found = scores["columns"].get(column.title, {"value": None, "reason": scores["status"]})
                stand_in |= found.get("split", column.split) != column.split
                if found["value"] is None:
                    reasons[column.title] = found["reason"]
                else:
                    values[column.title][seed] = found["value"] if column.after == 1 else _early(curve, column.after)
    return Found(line, values, curves, reasons, stand_in)


def _early(curve: Mapping[int, float], share: float) -> float:
    """The last validation within a share of the updates, or the first."""
    return curve[max((step for step in curve if step <= share * max(curve)), default=min(curve))]


def _grid(table: PaperTable, rows: Sequence[Found], about: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = [column for column in table.columns if not column.corpus or column.corpus in about["corpora"]]
    papers = any(row.line.figures for row in rows)
    titles = ["row", "scheme"]
    for column in columns:
        titles += [f"{column.title}: paper"] * papers + [f"{column.title}: ours" if papers else column.title]
    reached = {
        name: f"updates to {table.baseline}'s {_main(table, name).title}" for name in _alone(table, about) if not table.timed
    }
    titles += [text + f", {name}" * (len(reached) > 1) for name, text in reached.items()]
    grid = []
    for row in rows:
        schemes = [row.line.scheme, *(f"{name}: {scheme}" for name, scheme in row.line.schemes.items() if scheme)]
        cells = [row.line.name, "; ".join(filter(None, schemes)) or "not here"]
        for column in columns:
            at = table.columns.index(column)
            cells += [table.metric(column).text(_papers(row.line, at))] * papers
            mark = " *" * (table.marked and _leads(table, rows, row, column))
            cells.append(_ours(table, row, column) + mark if row.line.on(column.corpus) else "-")
        cells += [_updates(table, rows, row, corpus) for corpus in reached]
        grid.append(cells)
    return titles, grid


def _alone(table: PaperTable, about: Mapping[str, Any]) -> dict[str, str]:
    """The corpora on which training began with random weights, and what they are here."""
    begun = {corpus.name for corpus in table.corpora if corpus.start}
    return {name: text for name, text in about["corpora"].items() if name not in begun}


def _papers(line: TableRow, at: int) -> float | None:
    """The paper's figure in a column; none where it has none, which a table calls nan."""
    return line.figures[at] if line.figures and not math.isnan(line.figures[at]) else None


def _reference(table: PaperTable, rows: Sequence[Found]) -> Found:
    return next(row for row in rows if row.line.name == (table.reference or table.baseline))


def _apart(table: PaperTable, rows: Sequence[Found], about: Mapping[str, Any]) -> list[str]:
    """Lines with a table of the differences to the reference row, of the rows that share seeds with it; or none."""
    reference, grid = _reference(table, rows), []
    columns = [column for column in table.columns if not table.timed and column.corpus in about["corpora"]]
    for row in rows:
        cells = []
        for column in columns:
            apart, metric = _less(row, reference, column), _finer(table.metric(column))
            spread = f" ± {metric.text(statistics.stdev(apart))}" if len(apart) > 1 else ""
            text = f"{statistics.mean(apart):+{metric.style}}{spread}" if apart else "-"
            cells.append(f"**{text}**" if apart and Difference.paired(apart).shown else text)
        if row is not reference and any(cell != "-" for cell in cells):
            grid.append([row.line.name, *cells])
    titles = ["row", *(column.title for column in columns)]
    what = (
        "A figure less the reference's of the same seed: means and standard deviations over seeds; bold where Student's 95% "
        f"interval, of {LEAST} seeds at least, excludes 0."
    )
    shown = [f"{PAIRED} {reference.line.name}", "", what, "", grids.markdown(titles, grid, "l".ljust(len(titles), "r")), ""]
    return shown if grid else []


def _main(table: PaperTable, corpus: str) -> Metric:
    """By which validations while training are."""
    return table.task_of(corpus).metrics[0]


def _ours(table: PaperTable, row: Found, column: Column) -> str:
    values, metric = list(row.values[column.title].values()), _finer(table.metric(column))
    if not values:
        return "none" if column.title in row.reasons else "missing"
    if table.timed:  # ratios of rounds
        ratio = Spread.of(values)
        return f"{metric.text(ratio.median)} ± {metric.text((ratio.high - ratio.low) / 2)}"
    spread = f" ± {metric.text(statistics.stdev(values))}" if len(values) > 1 else ""
    return metric.text(statistics.mean(values)) + spread


def _less(row: Found, other: Found, column: Column) -> list[float]:
    """A row's figures less another's of the same seed."""
    own, theirs = row.values[column.title], other.values[column.title]
    return [own[seed] - theirs[seed] for seed in own if seed in theirs]


def _leads(table: PaperTable, rows: Sequence[Found], row: Found, column: Column) -> bool:
    """Whether a row's mean is the best, or no difference to it is shown; never with fewer seeds than an interval takes.

    Nor is any where no row of the column is shown to differ from the best.
    """
    rank, found = table.metric(column).rank, [one for one in rows if len(one.values[column.title]) >= LEAST]
    if row not in found:
        return False
    best = min(found, key=lambda one: rank(statistics.mean(one.values[column.title].values())))
    apart = {one.line.name: _less(one, best, column) for one in found}
    level = {
        name: not Difference.paired(values, max(1, len(found) - 1)).shown
        for name, values in apart.items()
        if len(values) >= LEAST
    }
    return level.get(row.line.name, False) and not all(level.values())


def _finer(metric: Metric) -> Metric:
    """With one digit more than the paper's figures have, for means and spreads; of a percentage with at most two."""
    if metric.style == ".2%":
        return metric
    return replace(metric, style=re.sub(r"\.(\d+)", lambda digits: f".{int(digits[1]) + 1}", metric.style))


def _mean_curve(row: Found, corpus: str, seeds: Sequence[int] | None = None) -> dict[int, float]:
    """Mean validation by update, over the seeds, at the updates that all of them have."""
    kept = [curve for seed, curve in row.curves[corpus].items() if curve and (seeds is None or seed in seeds)]
    steps = sorted(set.intersection(*(set(curve) for curve in kept))) if kept else []
    return {step: statistics.mean(curve[step] for curve in kept) for step in steps}


def _distances(row: Found, reference: Found, corpus: str) -> dict[int, list[float]]:
    """A row's validation less the reference's by update, a number for each seed that both have."""
    seeds = sorted({*row.curves[corpus]} & {*reference.curves[corpus]})
    pairs = [(row.curves[corpus][seed], reference.curves[corpus][seed]) for seed in seeds]
    steps = sorted(set.intersection(*({*own} & {*other} for own, other in pairs))) if pairs else []
    return {step: [own[step] - other[step] for own, other in pairs] for step in steps}


def _updates(table: PaperTable, rows: Sequence[Found], row: Found, corpus: str) -> str:
    """The first validated update at which a row is as good as the baseline in the end: means over the seeds of both."""
    if not row.line.on(corpus) or not row.curves[corpus]:
        return "-" if not row.line.on(corpus) else "missing"
    base = next(other for other in rows if other.line.name == table.baseline)
    shared = sorted({*row.curves[corpus]} & {*base.curves[corpus]})
    goal, own = _mean_curve(base, corpus, shared), _mean_curve(row, corpus, shared)
    if not goal or not own:
        return "missing"
    rank = _main(table, corpus).rank
    last = rank(goal[max(goal)])
    return next((f"{step:,}" for step, value in own.items() if rank(value) <= last), "not reached")


def _said(table: PaperTable, rows: Sequence[Found], folder: Path, about: Mapping[str, Any]) -> Iterator[str]:
    """What must be known beside the figures."""
    if any(about["corpora"]):
        yield "Data: " + "; ".join(f"{name} here is {_short(text)}" for name, text in about["corpora"].items()) + "."
    chosen = [corpus for corpus in table.corpora if corpus.name in about["corpora"]] or [None]
    pairs = [(table.recipe_at("original", corpus), table.recipe_at(about["scale"], corpus)) for corpus in chosen]
    alike: dict[str, list[str]] = {}
    for corpus, (original, ours) in zip(chosen, pairs, strict=True):
        alike.setdefault(differences(original, ours), []).append(corpus.name if corpus else "")
    for text, names in alike.items():
        yield f"Scale{f' of {_listed(names)}' if len(pairs) > 1 else ''}: {text}"
    if not table.timed:
        for corpus, (original, ours) in zip(chosen, pairs, strict=True):
            own = corpus is not None and corpus.recipe and not corpus.start
            if corpus is not chosen[0] and not own:
                continue  # the same as of the first, or told by its scale
            model = f"A model of {corpus.name}" if corpus and own else "A model"
            seen, paper = (r.training.steps * r.task.size(r) / 1e6 for r in (ours, original))
            kinds = [f" ({r.task.tokenizer})" if isinstance(r.task, TextTask) else "" for r in (original, ours)]
            paper, seen = (f"{_millions(n)} {ours.task.unit}{kind}" for n, kind in zip((paper, seen), kinds, strict=True))
            yield f"{model} sees {seen}, the paper's {paper}."
        figures = [
            (table.recipe_at(about["scale"], table.corpus(column.corpus)).task.figure(metric.figure), metric.better)
            for column, metric in zip(table.columns, map(table.metric, table.columns), strict=True)
            if column.corpus in (*about["corpora"], "")
        ]
        for note in dict.fromkeys(f"{figure.note or figure.title}, {better} is better" for figure, better in figures):
            yield f"Figures are {note}; means and standard deviations of up to {about['seeds']} seeds."
        if any(row.stand_in for row in rows):
            yield "Data without a test split are scored on their validation split in the columns of the test."
    else:
        yield "Figures are medians of the rounds' ratios to the baseline, and half the range between their quartiles."
        yield from _seconds(table, folder)
    if table.marked:
        yield (
            "Marked (*) are the best figure and those of which no difference to it is shown: the 95% interval of the "
            "differences paired by seed, for all rows at once (5% divided by the number of the others), includes 0. Where "
            f"no row differs from the best, none is, nor with fewer than {LEAST} seeds."
        )
    yield from _ranks(table, rows, about)
    yield from _settling(table, rows, about)
    yield from table.notes
    for row in rows:
        for title, reason in row.reasons.items():
            yield f"{row.line.name}, {title}: {reason}."
    if missing := "; ".join(_missing(table, rows, about)):
        yield f"Missing: {missing}."
    seconds = [read_scores(path.parent)["seconds"] for path in (folder / "cells").glob(f"*/{SCORES}")]
    corpora = [corpus.name for corpus in table.corpora] or [""]
    seconds += [sum(one.values()) for corpus in corpora for one in speed_rounds(folder, corpus)]
    count = f"{len(seconds)} {'rounds' if table.timed else 'cells'}"
    yield f"Machine time: {sum(seconds) / 60:.1f} minutes, {count}, on {about['machine']}."


def _millions(count: float) -> str:
    return f"{count:,.1f} million" if count >= 0.1 else f"{count:.2g} million"


def _seconds(table: PaperTable, folder: Path) -> Iterator[str]:
    """What the baseline took, where ratios are of times."""
    if TIMED[table.kind].better == "higher":
        return
    for column in table.columns:
        if taken := [one[table.baseline] for one in speed_rounds(folder, column.corpus) if table.baseline in one]:
            middle = f"{statistics.median(taken) * 1e3:,.2f} ms"
            yield f"{column.title}: {table.baseline} takes {middle}, the median of {len(taken)} rounds."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _short(name: str) -> str:
    return name if name.startswith("hf:") or " " in name else Path(name).name


def _ranks(table: PaperTable, rows: Sequence[Found], about: Mapping[str, Any]) -> Iterator[str]:
    """Rank correlations with the paper's order, and both orders."""
    if about["scale"] == "tiny":
        if any(row.line.figures for row in rows):
            yield "This scale shows that the table runs; it says nothing about the order of the schemes."
        return
    for at, column in enumerate(table.columns):
        both = [(row.line.name, _papers(row.line, at), row.values[column.title]) for row in rows]
        middle = statistics.median if table.timed else statistics.mean  # as the table shows
        pairs = [(name, paper, middle(ours.values())) for name, paper, ours in both if ours and paper is not None]
        if len(pairs) < FEW:
            continue
        rank = table.metric(column).rank
        names, theirs, ours = zip(*pairs, strict=True)
        first, second = (_order(names, [*map(rank, figures)]) for figures in (theirs, ours))
        yield (
            f"{column.title}: rank correlation with the paper {spearman(theirs, ours):+.2f} over {len(pairs)} rows. "
            f"Best first, paper: {first}; ours: {second}."
        )


def _settling(table: PaperTable, rows: Sequence[Found], about: Mapping[str, Any]) -> Iterator[str]:
    """Whether the order of rows changes with training: validations after a tenth of the updates beside the last ones."""
    for corpus in _alone(table, about) if about["scale"] != "tiny" else ():
        curves = {row.line.name: curve for row in rows if (curve := _mean_curve(row, corpus))}
        steps = sorted(set.intersection(*map(set, curves.values()))) if len(curves) >= FEW else []
        early = next((step for step in steps[:-1] if step * 10 >= steps[-1]), 0)
        if early:
            rank = _main(table, corpus).rank
            then, now = ([rank(curve[step]) for curve in curves.values()] for step in (early, steps[-1]))
            yield (
                f"{corpus or 'Validation'}: order after {early:,} and after {steps[-1]:,} updates, rank correlation "
                f"{spearman(then, now):+.2f} over {len(curves)} rows. Best first, then: {_order(curves, then)}; "
                f"in the end: {_order(curves, now)}."
            )


def _order(names: Iterable[str], ranks: Sequence[float]) -> str:
    """Names, the best first."""
    return ", ".join(name for _, name in sorted(zip(ranks, names, strict=True)))


def _missing(table: PaperTable, rows: Sequence[Found], about: Mapping[str, Any]) -> Iterator[str]:
    """Cells without figures, by corpus and row; corpora that were not run; rows whose scheme isopos has not."""
    for row in rows:
        if not row.line.scheme:
            yield f"{row.line.name}, whose scheme is not here"
        for corpus in () if table.timed else about["corpora"]:
            lacking = [seed for seed in range(about["seeds"]) if seed not in row.curves[corpus]]
            if row.line.on(corpus) and lacking:
                yield f"{row.line.name}{f' on {corpus}' if corpus else ''}, seeds {', '.join(map(str, lacking))}"
        for column in table.columns if table.timed else ():
            if row.line.on(column.corpus) and not row.values[column.title]:
                yield f"{row.line.name}{f' on {column.corpus}' if column.corpus else ''}"
    for corpus in table.corpora:
        if corpus.name not in about["corpora"]:
            yield f"{corpus.name}, for which --data {corpus.name}=PATH gives one"


def _curves(table: PaperTable, rows: Sequence[Found], names: Mapping[str, str]) -> Figure:
    """By update, a column of panels a corpus: validation, mean over seeds, and its distance to the reference's.

    Distances are paired by seed; their band is the 95% interval, which fewer than three seeds do not have.
    """
    figure = Figure(figsize=(6 * max(1, len(names)) + 2, 8.5), layout="constrained")
    panels = figure.subplots(2, max(1, len(names)), squeeze=False, sharex="col")
    drawn = [row for row in rows if row.line.scheme]
    reference = _reference(table, rows)
    for (above, below), corpus in zip(panels.T, names, strict=False):
        title = _main(table, corpus).title
        for n, row in enumerate(drawn):
            if curve := _mean_curve(row, corpus):
                above.plot(list(curve), list(curve.values()), label=literal(row.line.name), **line_style(n))
            if apart := _distances(row, reference, corpus):
                found = [Difference.paired(values) for values in apart.values()]
                low, high = ([one.mean + sign * one.half for one in found] for sign in (-1, 1))
                below.plot(list(apart), [one.mean for one in found], **line_style(n))
                below.fill_between(list(apart), low, high, color=line_style(n)["color"], alpha=0.15, linewidth=0)
        above.set(ylabel=f"validation, {title}", title=literal(f"{corpus}: {_short(names[corpus])}"))
        below.set(xlabel="updates", ylabel=literal(f"{title} less {reference.line.name}'s, paired by seed"))
        plain(above)
        plain(below)
    if names and panels[0, 0].get_legend_handles_labels()[0]:
        panels[0, -1].legend(*panels[0, 0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="upper right")
    return figure


def _along(table: PaperTable, rows: Sequence[Found], names: Mapping[str, str]) -> Figure:
    """A panel a corpus: figures by a choice in which columns differ, means over seeds within a standard deviation."""
    figure = Figure(figsize=(6 * max(1, len(names)) + 2, 4.5), layout="constrained")
    for axes, corpus in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names, strict=False):
        columns = sorted((one for one in table.columns if one.corpus == corpus), key=lambda one: one.view[table.along])
        for n, row in enumerate(rows):
            shown = [(one.view[table.along], values) for one in columns if (values := [*row.values[one.title].values()])]
            if not shown:
                continue
            at, values = zip(*shown, strict=True)
            mean = [statistics.mean(of) for of in values]
            spread = [statistics.stdev(of) if len(of) > 1 else 0.0 for of in values]
            low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
            axes.plot(at, mean, label=literal(row.line.name), **line_style(n))
            axes.fill_between(at, low, high, color=line_style(n)["color"], alpha=0.15, linewidth=0)
        axes.set(xlabel=table.along, ylabel=_main(table, corpus).title, title=literal(f"{corpus}: {_short(names[corpus])}"))
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
        plain(axes)
    return figure


def _speed_picture(table: PaperTable, rows: Sequence[Found], names: Mapping[str, str]) -> Figure:
    figure = Figure(figsize=(8 if len(table.columns) == 1 else 4 * len(table.columns) + 3, 4), layout="constrained")
    panels = figure.subplots(1, len(table.columns), squeeze=False, sharey=True)[0]
    for at, (axes, column) in enumerate(zip(panels, table.columns, strict=True)):
        drawn = [(n, row) for n, row in enumerate(rows) if row.values[column.title]]
        for shown, (n, row) in enumerate(drawn):
            low, median, high = Spread.of([*row.values[column.title].values()])
            axes.errorbar(median, -n, xerr=(high - low) / 2, fmt="o", color="C0", label=None if shown else "ours")
            if row.line.figures:
                axes.plot(row.line.figures[at], -n, "x", color="C1", label=None if shown else "paper")
        axes.set_yticks([-n for n, row in enumerate(rows) if any(row.values.values())])
        axes.set_yticklabels([literal(row.line.name) for row in rows if any(row.values.values())])
        axes.set(xlabel=literal(column.title))
        if drawn:
            axes.legend(frameon=False)
        plain(axes)
    return figure
