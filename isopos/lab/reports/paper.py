"""Results of a paper's table, read from the folders of its cells: figures, ranks, curves. Nothing is trained here."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from isopos.lab.recipes import PLACEMENT, Recipe
from isopos.lab.reports import findings, grids, rates
from isopos.lab.reports.intervals import FEW, MIN_SEEDS, Difference, correlation_text, spearman, to_best
from isopos.lab.reports.plots import line_style, literal, plain, svg_text
from isopos.lab.runs.files import write_json, write_text
from isopos.lab.tables.loader import (
    SCORES,
    TIMED,
    Column,
    PaperTable,
    TableRow,
    cell_name,
    read_about,
    read_scores,
    read_timing,
    speed_rounds,
)
from isopos.lab.tasks.language import TextTask
from isopos.lab.tasks.task import Metric
from isopos.lab.timing import Spread

# Fields that do not change a model, or are reported elsewhere:
IGNORED = (*PLACEMENT, "scheme", "seed", "data", "validate_every", "accumulate", "recompute")


@dataclass(frozen=True)
class RowResults:
    """Our results of a row: figures by column and seed, validations by corpus and seed, and reasons for missing figures."""

    table_row: TableRow
    values: Mapping[str, Mapping[int, float]]
    curves: Mapping[str, Mapping[int, Mapping[int, float]]]
    reasons: Mapping[str, str]
    stand_in: bool = False  # whether a split other than the column's was scored

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.table_row.name


def differences(paper: Recipe, ours: Recipe, source: str = "paper") -> str:
    """Describe how a recipe differs from the paper's, or from that of another source, in one sentence.

    Examples:
        >>> differences(Recipe().edit(steps=50_000), Recipe())
        'steps 250 (paper: 50,000).'
    """
    theirs, values = paper.as_dict(), ours.as_dict()
    changed = [name for name in values if name not in IGNORED and theirs[name] != values[name]]
    texts = [
        f"{name.replace('_', ' ')} {_value(name, values[name])} ({source}: {_value(name, theirs[name])})" for name in changed
    ]
    return "; ".join(texts) + "." if texts else f"The recipe is the {source}'s."


def _value(name: str, value: Any) -> str:
    if value == 0 and name.startswith(("vocabulary", "validation_")):
        return "all"
    if name == "warmup" and value == -1:
        return "a tenth"
    if name == "hidden_dim" and value == 0:
        return "four times model dim"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def write(table: PaperTable, folder: Path) -> tuple[Table, list[str]]:
    """Write table.md, results.json and pictures of a table; return the table for a console, and the notes below it."""
    about = read_about(folder)
    chosen = rates.choices(table, folder, about["corpora"], about["rates"])
    rows = [_results(table, row, folder, about) for row in table.rows]
    titles, grid = _grid(table, rows, about)
    align, notes = "ll".ljust(len(titles), "r"), list(_notes(table, rows, folder, about, chosen))
    lines = [f"# {table.title}", "", f"{table.citation}, at the scale `{about['scale']}`.", ""]
    lines += [grids.markdown(titles, grid, align), "", *(f"- {text}" for text in notes), ""]
    lines += _distance_table(table, rows, about)
    write_json(folder / findings.RESULTS, _content(table, rows, about, chosen))
    if about["scale"] != "tiny":
        found = findings.read(folder / findings.RESULTS, table)
        lines += ["## Findings", "", f"<!-- generated: findings -->{findings.section(found)}<!-- end -->", ""]
        lines += ["![distances to the best row](distances.svg)", ""]
        write_text(folder / "distances.svg", svg_text(findings.picture(found)))
    lines += [*(f"    {command}" for command in about["commands"]), "", "![curves](curves.svg)", ""]
    write_text(folder / "table.md", "\n".join(lines))
    draw = _ratios if table.timed else _figures_by_choice if table.x_axis else _curves
    figure = draw(table, rows, _trained_from_scratch(table, about))
    write_text(folder / "curves.svg", svg_text(figure))
    return grids.console_table(titles, grid, align, title=f"{table.title}: {table.citation}"), notes


def _content(
    table: PaperTable, rows: Sequence[RowResults], about: Mapping[str, Any], chosen: Mapping[str, rates.Chosen]
) -> dict[str, Any]:
    """What results.json holds, from which pages of results are generated: figures by column, row and seed.

    A timed table has the median of a row's ratios and half the range between their quartiles.
    """
    figures: dict[str, dict[str, Any]] = {}
    for column in table.columns:
        values = {row.name: row.values[column.title] for row in rows if row.values[column.title]}
        figures[column.title] = (
            {name: _median(ratios.values()) for name, ratios in values.items()} if table.timed else values
        )
    return {
        "commands": about["commands"],
        "scale": about["scale"],
        "seeds": about["seeds"],
        "rounds": max((len(ratios) for row in rows for ratios in row.values.values()), default=0) if table.timed else 0,
        "data": {name: _short(text) for name, text in about["corpora"].items()},
        "rates": sorted(about["rates"]),
        "chosen": {corpus: {"rates": one.rates, "correlation": one.correlation} for corpus, one in chosen.items()},
        "missing": list(_missing(table, rows, about)),
        "figures": figures,
    }


def _median(ratios: Iterable[float]) -> dict[str, float]:
    spread = Spread.of([*ratios])
    return {"median": spread.median, "half": (spread.high - spread.low) / 2}


def _results(table: PaperTable, row: TableRow, folder: Path, about: Mapping[str, Any]) -> RowResults:
    if table.timed:
        ratios = {}
        for column in table.columns:
            rounds = [seconds for seconds in speed_rounds(folder, column.corpus) if row.name in seconds]
            ratios[column.title] = {n: table.ratio(seconds, row.name) for n, seconds in enumerate(rounds)}
        return RowResults(row, ratios, {}, {})
    values: dict[str, dict[int, float]] = {column.title: {} for column in table.columns}
    curves: dict[str, dict[int, dict[int, float]]] = {name: {} for name in about["corpora"]}
    reasons, stand_in, tried = {}, False, about["rates"]
    for corpus in (name for name in about["corpora"] if row.scheme and row.on(name)):
        rate = rates.best_rate(table, folder, corpus, row.on(corpus), tried) if tried else 1.0
        columns = [column for column in table.columns if column.corpus == corpus]
        for seed in range(about["seeds"]):
            start = rates.start_cell(table, folder, corpus, row.on(corpus), seed, tried)
            if start and (start / SCORES).exists() and (ended := read_scores(start)["status"]) != "finished":
                curves[corpus][seed] = {}
                reasons |= {column.title: f"the run that it starts from {ended}" for column in columns}
            start_rate = rates.start_rate(table, folder, corpus, row.on(corpus), tried)
            cell = folder / "cells" / cell_name(corpus, row.on(corpus), seed, rate or 1.0, start_rate or 1.0)
            if not rate or not (cell / SCORES).exists():
                continue
            scores, curve = read_scores(cell), rates.validations(cell)
            ended = scores["status"]
            curves[corpus][seed] = curve if ended == "finished" else {}
            for column in columns:
                reason = "the same command scores it" if ended == "finished" else ended
                scored = scores["columns"].get(column.title, {"value": None, "reason": reason})
                stand_in |= scored.get("split", column.split) != column.split
                if scored["value"] is None:
                    reasons[column.title] = scored["reason"]
                elif not math.isfinite(scored["value"]):
                    reasons[column.title] = "not finite"
                elif column.after < 1 and not curve:
                    reasons[column.title] = "not validated"
                else:
                    values[column.title][seed] = scored["value"] if column.after == 1 else _early(curve, column.after)
    return RowResults(row, values, curves, reasons, stand_in)


def _early(curve: Mapping[int, float], share: float) -> float:
    """The last validation within a share of the updates, or the first one."""
    return curve[max((step for step in curve if step <= share * max(curve)), default=min(curve))]


def _grid(table: PaperTable, rows: Sequence[RowResults], about: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = [column for column in table.columns if not column.corpus or column.corpus in about["corpora"]]
    papers = any(row.table_row.figures for row in rows)
    titles = ["row", "scheme"]
    for column in columns:
        titles += [f"{column.title}: paper"] * papers + [f"{column.title}: ours" if papers else column.title]
    reached = {
        name: f"updates to {table.baseline}'s {_main(table, name).title}"
        for name in _trained_from_scratch(table, about)
        if not table.timed
    }
    titles += [text + f", {name}" * (len(reached) > 1) for name, text in reached.items()]
    grid = []
    for row in rows:
        schemes = [row.table_row.scheme, *(f"{name}: {scheme}" for name, scheme in row.table_row.schemes.items() if scheme)]
        cells = [row.name, "; ".join(filter(None, schemes)) or "not here"]
        for column in columns:
            at = table.columns.index(column)
            cells += [table.metric(column).text(_papers(row.table_row, at))] * papers
            mark = " *" * (table.marked and _leads(table, rows, row, column))
            cells.append(_ours(table, row, column) + mark if row.table_row.on(column.corpus) else "-")
        cells += [_updates(table, rows, row, corpus) for corpus in reached]
        grid.append(cells)
    return titles, grid


def _trained_from_scratch(table: PaperTable, about: Mapping[str, Any]) -> dict[str, str]:
    """Corpora without a warm start, with the names of their data here."""
    warm_started = {corpus.name for corpus in table.corpora if corpus.start}
    return {name: text for name, text in about["corpora"].items() if name not in warm_started}


def _papers(row: TableRow, at: int) -> float | None:
    """The paper's figure in a column; None if it has none (nan in the TOML)."""
    return row.figures[at] if row.figures and not math.isnan(row.figures[at]) else None


def _reference(table: PaperTable, rows: Sequence[RowResults]) -> RowResults:
    return next(row for row in rows if row.name == (table.reference or table.baseline))


def _mean_text(values: Sequence[float], metric: Metric, sign: str = "") -> str:
    """Mean with a sign, and standard deviation if there are several values."""
    spread = f" ± {metric.text(statistics.stdev(values))}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}{metric.style}}{spread}"


def _distance_table(table: PaperTable, rows: Sequence[RowResults], about: Mapping[str, Any]) -> list[str]:
    """Markdown lines of the differences to the reference row, for rows that share seeds with it; empty if there are none."""
    reference, grid = _reference(table, rows), []
    columns = [column for column in table.columns if not table.timed and column.corpus in about["corpora"]]
    for row in rows:
        cells = []
        for column in columns:
            values = _differences(row, reference, column)
            text = _mean_text(values, _finer(table.metric(column)), "+") if values else "-"
            cells.append(f"**{text}**" if values and Difference.paired(values).excludes_zero else text)
        if row is not reference and any(cell != "-" for cell in cells):
            grid.append([row.name, *cells])
    if not grid:
        return []
    titles = ["row", *(column.title for column in columns)]
    note = (
        "Figures minus the reference's of the same seed: means and standard deviations over seeds; bold if Student's 95% "
        f"interval, of at least {MIN_SEEDS} seeds, excludes 0."
    )
    return [f"## Distance to {reference.name}", "", note, "", grids.markdown(titles, grid, "l".ljust(len(titles), "r")), ""]


def _main(table: PaperTable, corpus: str) -> Metric:
    """The metric of validations during training."""
    return table.task_of(corpus).metrics[0]


def _ours(table: PaperTable, row: RowResults, column: Column) -> str:
    values, metric = list(row.values[column.title].values()), _finer(table.metric(column))
    if not values:
        return "none" if column.title in row.reasons else "missing"
    if table.timed:  # ratios of rounds
        ratio = _median(values)
        return f"{metric.text(ratio['median'])} ± {metric.text(ratio['half'])}"
    return _mean_text(values, metric)


def _differences(row: RowResults, other: RowResults, column: Column) -> list[float]:
    """Differences between two rows' figures of the same seeds."""
    a, b = row.values[column.title], other.values[column.title]
    return [a[seed] - b[seed] for seed in a if seed in b]


def _leads(table: PaperTable, rows: Sequence[RowResults], row: RowResults, column: Column) -> bool:
    """Whether a row's mean is the best, or its interval to the best includes 0. False with fewer than `MIN_SEEDS` seeds.

    False for all rows if all intervals include 0.
    """
    rank, candidates = table.metric(column).rank, [other for other in rows if len(other.values[column.title]) >= MIN_SEEDS]
    if row not in candidates:
        return False
    best = min(candidates, key=lambda other: rank(statistics.mean(other.values[column.title].values())))
    paired = {other.name: _differences(other, best, column) for other in candidates if other is not best}
    found = to_best({name: values for name, values in paired.items() if len(values) >= MIN_SEEDS})
    shown = {name for name, difference in found.items() if difference.excludes_zero}
    return bool(shown) and (row is best or (row.name in found and row.name not in shown))


def _finer(metric: Metric) -> Metric:
    """The metric with one more digit than the paper's figures, for means and spreads; percentages have at most two."""
    if metric.style == ".2%":
        return metric
    return replace(metric, style=re.sub(r"\.(\d+)", lambda digits: f".{int(digits[1]) + 1}", metric.style))


def _mean_curve(row: RowResults, corpus: str, seeds: Sequence[int] | None = None) -> dict[int, float]:
    """Mean validation over seeds by update, at the updates that all seeds have."""
    curves = [curve for seed, curve in row.curves[corpus].items() if curve and (seeds is None or seed in seeds)]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return {step: statistics.mean(curve[step] for curve in curves) for step in steps}


def _finished(row: RowResults, other: RowResults, corpus: str) -> list[int]:
    """Seeds with validations of two rows."""
    seeds = ({seed for seed, curve in one.curves[corpus].items() if curve} for one in (row, other))
    return sorted(set.intersection(*seeds))


def _distances(row: RowResults, reference: RowResults, corpus: str) -> dict[int, list[float]]:
    """Validation minus the reference's by update, one number per shared seed."""
    seeds = _finished(row, reference, corpus)
    pairs = [(row.curves[corpus][seed], reference.curves[corpus][seed]) for seed in seeds]
    steps = sorted(set.intersection(*({*a} & {*b} for a, b in pairs))) if pairs else []
    return {step: [a[step] - b[step] for a, b in pairs] for step in steps}


def _updates(table: PaperTable, rows: Sequence[RowResults], row: RowResults, corpus: str) -> str:
    """The first validated update at which a row reaches the baseline's final value: means over shared seeds."""
    if not row.table_row.on(corpus) or not row.curves[corpus]:
        return "-" if not row.table_row.on(corpus) else "missing"
    base = next(other for other in rows if other.name == table.baseline)
    shared = _finished(row, base, corpus)
    goal, curve = _mean_curve(base, corpus, shared), _mean_curve(row, corpus, shared)
    if not goal or not curve:
        return "missing"
    rank = _main(table, corpus).rank
    last = rank(goal[max(goal)])
    return next((f"{step:,}" for step, value in curve.items() if rank(value) <= last), "not reached")


def _notes(
    table: PaperTable,
    rows: Sequence[RowResults],
    folder: Path,
    about: Mapping[str, Any],
    chosen: Mapping[str, rates.Chosen],
) -> Iterator[str]:
    """Notes below the table."""
    if any(about["corpora"]):
        yield "Data: " + "; ".join(f"{name} here is {_short(text)}" for name, text in about["corpora"].items()) + "."
    corpora = [corpus for corpus in table.corpora if corpus.name in about["corpora"]] or [None]
    source, theirs = ("paper", "original") if any(row.table_row.figures for row in rows) else ("scale paper", "paper")
    pairs = [(table.recipe_at(theirs, corpus), table.recipe_at(about["scale"], corpus)) for corpus in corpora]
    by_difference: dict[str, list[str]] = {}
    for corpus, (original, ours) in zip(corpora, pairs, strict=True):
        by_difference.setdefault(differences(original, ours, source), []).append(corpus.name if corpus else "")
    for text, names in by_difference.items():
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        yield f"Scale{f' of {listed}' if len(pairs) > 1 else ''}: {text}"
    if not table.timed:
        for corpus, (original, ours) in zip(corpora, pairs, strict=True):
            separate = corpus is not None and corpus.recipe and not corpus.start
            if corpus is not corpora[0] and not separate:
                continue  # as for the first corpus, or stated with its scale
            model = f"A model of {corpus.name}" if corpus and separate else "A model"
            seen, paper = (r.training.steps * r.task.size(r) / 1e6 for r in (ours, original))
            kinds = [f" ({r.task.tokenizer})" if isinstance(r.task, TextTask) else "" for r in (original, ours)]
            counts = [f"{n:,.1f} million" if n >= 0.1 else f"{n:.2g} million" for n in (paper, seen)]
            paper, seen = (f"{count} {ours.task.unit}{kind}" for count, kind in zip(counts, kinds, strict=True))
            yield f"{model} sees {seen}, the {source}'s {paper}."
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
        yield from _baseline(table, folder)
    if table.marked:
        yield (
            "Marked (*) are the best figure and figures not shown to differ from it: the 95% interval of the differences "
            "paired by seed, for all pairs of rows at once, includes 0. None is marked if "
            f"no row differs from the best, or with fewer than {MIN_SEEDS} seeds."
        )
    yield from rates.notes(chosen, about["rates"])
    yield from _ranks(table, rows, about)
    yield from _early_order(table, rows, about)
    yield from table.notes
    for row in rows:
        for title, reason in row.reasons.items():
            yield f"{row.name}, {title}: {reason}."
    if missing := "; ".join(_missing(table, rows, about)):
        yield f"Missing: {missing}."
    cells = [read_scores(path.parent) for path in sorted((folder / "cells").glob(f"*/{SCORES}"))]
    timings = [read_timing(folder, corpus) for corpus in ([corpus.name for corpus in table.corpora] or [""])]
    seconds = [cell["seconds"] for cell in cells] + [sum(a.values()) for timing in timings for a in timing["rounds"]]
    count = f"{len(seconds)} {'rounds' if table.timed else 'cells'}"
    named = [cell.get("machine", "") for cell in cells] + [timing["machine"] for timing in timings if timing["rounds"]]
    machines = " and ".join(filter(None, dict.fromkeys(named))) or about["machine"]
    time = "" if table.kind == "memory" else f" time: {sum(seconds) / 60:.1f} minutes,"
    yield f"Machine{time or ':'} {count}, on {machines}."


def _baseline(table: PaperTable, folder: Path) -> Iterator[str]:
    """The baseline's time or memory, if the table shows ratios to it."""
    if TIMED[table.kind].better == "higher":
        return
    for column in table.columns:
        rounds = speed_rounds(folder, column.corpus)
        if costs := [round[table.baseline] for round in rounds if table.baseline in round]:
            median = statistics.median(costs)
            text = f"{median:,.1f} MiB" if table.kind == "memory" else f"{median * 1e3:,.2f} ms"
            yield f"{column.title}: {table.baseline} takes {text}, the median of {len(costs)} rounds."


def _short(name: str) -> str:
    return name if name.startswith("hf:") or " " in name else Path(name).name


def _ranks(table: PaperTable, rows: Sequence[RowResults], about: Mapping[str, Any]) -> Iterator[str]:
    """Rank correlations with the paper's order, and both orders."""
    if about["scale"] == "tiny":
        if any(row.table_row.figures for row in rows):
            yield "This scale shows that the table runs; it says nothing about the order of the schemes."
        return
    for at, column in enumerate(table.columns):
        both = [(row.name, _papers(row.table_row, at), row.values[column.title]) for row in rows]
        centre = statistics.median if table.timed else statistics.mean  # as in the table
        pairs = [(name, paper, centre(ours.values())) for name, paper, ours in both if ours and paper is not None]
        if len(pairs) < FEW:
            continue
        rank = table.metric(column).rank
        names, theirs, ours = zip(*pairs, strict=True)
        first, second = (_order(names, [*map(rank, figures)]) for figures in (theirs, ours))
        correlation = correlation_text(spearman(theirs, ours))
        yield (
            f"{column.title}: rank correlation with the paper {correlation} over {len(pairs)} rows. "
            f"Best first, paper: {first}; ours: {second}."
        )


def _early_order(table: PaperTable, rows: Sequence[RowResults], about: Mapping[str, Any]) -> Iterator[str]:
    """Rank correlation between the order after a tenth of the updates and the final order."""
    for corpus in () if table.timed or about["scale"] == "tiny" else _trained_from_scratch(table, about):
        curves = {row.name: curve for row in rows if (curve := _mean_curve(row, corpus))}
        steps = sorted(set.intersection(*map(set, curves.values()))) if len(curves) >= FEW else []
        early = next((step for step in steps[:-1] if step * 10 >= steps[-1]), 0)
        if early:
            rank = _main(table, corpus).rank
            before, after = ([rank(curve[step]) for curve in curves.values()] for step in (early, steps[-1]))
            correlation = correlation_text(spearman(before, after))
            yield (
                f"{corpus or 'Validation'}: order after {early:,} and after {steps[-1]:,} updates, rank correlation "
                f"{correlation} over {len(curves)} rows. Best first, then: {_order(curves, before)}; "
                f"in the end: {_order(curves, after)}."
            )


def _order(names: Iterable[str], ranks: Sequence[float]) -> str:
    """Names in order of their ranks, best first."""
    return ", ".join(name for _, name in sorted(zip(ranks, names, strict=True)))


def _missing(table: PaperTable, rows: Sequence[RowResults], about: Mapping[str, Any]) -> Iterator[str]:
    """Missing cells, corpora that were not run, and rows without a scheme here."""
    for row in rows:
        if not row.table_row.scheme:
            yield f"{row.name}, whose scheme is not here"
        for corpus in () if table.timed else about["corpora"]:
            missing = [seed for seed in range(about["seeds"]) if seed not in row.curves[corpus]]
            if row.table_row.on(corpus) and missing:
                yield f"{row.name}{f' on {corpus}' if corpus else ''}, seeds {', '.join(map(str, missing))}"
        for column in table.columns if table.timed else ():
            count = table.rounds - len(row.values[column.title])
            if row.table_row.on(column.corpus) and count > 0:
                rounds = "" if count == table.rounds else f", {count} of {table.rounds} rounds"
                yield f"{row.name}{f' on {column.corpus}' if column.corpus else ''}{rounds}"
    for corpus in table.corpora:
        if corpus.name not in about["corpora"]:
            yield f"{corpus.name}, for which --data {corpus.name}=PATH gives one"


def _curves(table: PaperTable, rows: Sequence[RowResults], names: Mapping[str, str]) -> Figure:
    """Validation by update, one panel per corpus: means over seeds, and below them distances to the reference.

    Distances are paired by seed; the band is their 95% interval, if there are at least `MIN_SEEDS` seeds.
    """
    figure = Figure(figsize=(6 * max(1, len(names)) + 2, 8.5), layout="constrained")
    panels = figure.subplots(2, max(1, len(names)), squeeze=False, sharex="col")
    with_scheme = [row for row in rows if row.table_row.scheme]
    reference = _reference(table, rows)
    for (above, below), corpus in zip(panels.T, names, strict=False):
        title = _main(table, corpus).title
        for n, row in enumerate(with_scheme):
            if curve := _mean_curve(row, corpus):
                above.plot(list(curve), list(curve.values()), label=literal(row.name), **line_style(n))
            if distances := _distances(row, reference, corpus):
                paired = [Difference.paired(values) for values in distances.values()]
                means, halves = [each.mean for each in paired], [each.half for each in paired]
                _plot_band(below, list(distances), means, halves, n)
        above.set(ylabel=f"validation, {title}", title=literal(f"{corpus}: {_short(names[corpus])}"))
        below.set(xlabel="updates", ylabel=literal(f"{title} less {reference.name}'s, paired by seed"))
        plain(above)
        plain(below)
    drawn = [axes.get_legend_handles_labels() for axes in panels[0]]
    handles = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    if handles:
        panels[0, -1].legend(handles.values(), handles.keys(), fontsize=8, frameon=False, loc="upper right")
    return figure


def _plot_band(axes: Axes, x: Sequence[float], mean: Sequence[float], half: Sequence[float], n: int, **options: Any) -> None:
    """Plot means in the n-th style, with a band of half widths."""
    low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
    axes.plot(x, mean, **line_style(n), **options)
    axes.fill_between(x, low, high, color=line_style(n)["color"], alpha=0.15, linewidth=0)


def _figures_by_choice(table: PaperTable, rows: Sequence[RowResults], names: Mapping[str, str]) -> Figure:
    """Figures by the choice on the x axis, one panel per corpus: means over seeds, within a standard deviation."""
    figure = Figure(figsize=(6 * max(1, len(names)) + 2, 4.5), layout="constrained")
    for axes, corpus in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names, strict=False):
        columns = [column for column in table.columns if column.corpus == corpus]
        columns.sort(key=lambda column: column.view[table.x_axis])
        for n, row in enumerate(rows):
            if points := [column for column in columns if row.values[column.title]]:
                figures = [[*row.values[column.title].values()] for column in points]
                spread = [statistics.stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in figures]
                x = [column.view[table.x_axis] for column in points]
                _plot_band(axes, x, [*map(statistics.mean, figures)], spread, n, label=literal(row.name))
        figure_of = {table.task_of(corpus).figure(table.metric(column).figure).title: None for column in columns}
        axes.set(xlabel=table.x_axis, ylabel=", ".join(figure_of), title=literal(f"{corpus}: {_short(names[corpus])}"))
        if axes.lines:
            axes.legend(fontsize=8, frameon=False)
        plain(axes)
    return figure


def _ratios(table: PaperTable, rows: Sequence[RowResults], names: Mapping[str, str]) -> Figure:
    figure = Figure(figsize=(8 if len(table.columns) == 1 else 4 * len(table.columns) + 3, 4), layout="constrained")
    panels = figure.subplots(1, len(table.columns), squeeze=False, sharey=True)[0]
    for at, (axes, column) in enumerate(zip(panels, table.columns, strict=True)):
        measured = [(n, row) for n, row in enumerate(rows) if row.values[column.title]]
        for index, (n, row) in enumerate(measured):
            low, median, high = Spread.of([*row.values[column.title].values()])
            axes.errorbar(median, -n, xerr=(high - low) / 2, fmt="o", color="C0", label=None if index else "ours")
            if row.table_row.figures:
                label = None if "paper" in axes.get_legend_handles_labels()[1] else "paper"
                axes.plot(row.table_row.figures[at], -n, "x", color="C1", label=label)
        axes.set_yticks([-n for n, row in enumerate(rows) if any(row.values.values())])
        axes.set_yticklabels([literal(row.name) for row in rows if any(row.values.values())])
        axes.set(xlabel=literal(column.title))
        if measured:
            axes.legend(frameon=False)
        plain(axes)
    return figure
