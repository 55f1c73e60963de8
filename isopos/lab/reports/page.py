"""The report of a comparison: one HTML file made from its folder, without external resources."""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from isopos.lab.reports.comparison import Ranking, Run, ranking, read_comparison, read_runs
from isopos.lab.reports.kernels import panels
from isopos.lab.reports.plots import draw_curve, draw_heat, draw_panel, draw_tree, line_style, literal, plain, svg_text
from isopos.lab.runs.checkpoints import load_run
from isopos.lab.runs.files import printable, read_json, write_text
from isopos.lab.runs.folders import EXAMPLES
from isopos.models import PerLayer
from isopos.positions import Line
from isopos.scheme import Scheme
from isopos.spec import of_layers

SMOOTH = 10  # steps
PICTURE = re.compile("data:image/png;base64,[A-Za-z0-9+/]+=*")
STYLE, SCRIPT = (Path(__file__).with_name(f"page.{ending}").read_text(encoding="utf-8") for ending in ("css", "js"))


def unfinished(about: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """A sentence that names what is left of an interrupted comparison; empty if it is complete."""
    left = sorted(set(about["planned"]) - {run.folder.name for run in runs if run.result})
    return "" if about["complete"] else f"Interrupted: unfinished {', '.join(left) or 'timing'}."


def write(folder: Path) -> Path:
    """Write report.html and curves.svg of a comparison; return the report's path."""
    about, runs, ranked = read_comparison(folder), read_runs(folder), ranking(folder)
    curves = svg(_curves(runs, ranked), "Training loss by step, one line per run")
    write_text(folder / "curves.svg", curves)
    first = {run.recipe.scheme: run for run in reversed(runs) if run.result}
    best_first = [first[row.scheme] for row in ranked.rows if row.status == "finished"]
    pictures = [section for run in best_first for section in _kernel_sections(run)]
    names = [html(scheme) for scheme in dict.fromkeys(run.recipe.scheme for run in runs)]  # each switches its curves
    switches = [f'<label><input type="checkbox" value="{name}" checked> {name}</label>' for name in names]
    parts = [
        *head(folder.name, "Which positional encoding?"),
        f"<p>{html(_setting(about, runs))}</p>",
        f'<p class="warn">{html(left)}</p>' if (left := unfinished(about, runs)) else "",
        '<div class="wide">',
        rows_html(
            ranked.header, [ranked.cells(row, ranked.header) for row in ranked.rows], ranked.numbers, best=ranked.leads
        ),
        "</div>",
        *(f"<p><small>{html(note)}</small></p>" for note in ranked.notes()),
        f"<h2>Training loss</h2><figure>{curves}</figure>",
        f'<p class="switches">{"".join(switches)}</p>',
        "<h2>Relative kernel of each scheme</h2>",
        "<p>Curves: weight (linear attention) or logit (softmax attention) of a random query and a similar key, by their "
        "offset, relative to the value at the same position. There is a curve per head, the mean of heads, and its even and "
        "odd part. Without an odd part a scheme does not distinguish directions. Maps: the mean for each pair of positions, "
        "constant along diagonals if it depends on relative positions only. A grid has a map over offsets; a tree has a "
        "matrix over its nodes.</p>",
        *pictures,
        *_examples(best_first[:1]),
        f'<script type="module">{SCRIPT}</script>',
        "</body></html>",
    ]
    path = folder / "report.html"
    write_text(path, "\n".join(parts))
    return path


def head(title: str, heading: str) -> list[str]:
    """The begin of a page, up to its heading."""
    return [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>isopos: {html(title)}</title>",
        f"<style>{STYLE}</style></head><body><h1>{html(heading)}</h1>",
    ]


def html(name: str) -> str:
    """A name as text of a page."""
    return escape(printable(name))


def _setting(about: dict[str, Any], runs: list[Run]) -> str:
    text = f"Data: {about['data']}, {about['summary']}, sha256 {about['sha256'][:12]}. "
    if runs:
        recipe = runs[0].recipe
        m, t = recipe.model, recipe.training
        text += (
            f"{recipe.task.setting(recipe)} {m.layers} layers, width {m.model_dim}, {m.heads} heads; {t.steps} steps of "
            f"{t.batch} samples, {t.optimizer} {t.learning_rate}. "
        )
    return text + f"torch {about['torch']}, {about['device']}, {about['threads']} threads."


def rows_html(
    titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = (), *, best: bool = False
) -> str:
    """An HTML table; with `best` its first row is highlighted."""
    head = "".join(f'<th scope="col"><button type="button">{html(title)}</button></th>' for title in titles)
    marks = [" class=n" * (title in numbers) for title in titles]
    body = "</tr><tr>".join(
        "".join(f"<td{mark}>{_cell(cell, title)}</td>" for mark, cell, title in zip(marks, cells, titles, strict=True))
        for cells in rows
    )
    first = ' class="best"' * best
    return f"<table><thead><tr>{head}</tr></thead><tbody><tr{first}>{body}</tr></tbody></table>"


def _cell(text: str, title: str) -> str:
    """The text, or an image if it is a data URL."""
    return f'<img src="{text}" alt="{html(title)}">' if PICTURE.fullmatch(text) else html(text)


def _examples(runs: Sequence[Run]) -> Iterator[str]:
    """Held-out samples with a model's answers, if its task has some."""
    for run in runs:
        path = run.folder / EXAMPLES
        if path.exists():
            samples = read_json(path, list[dict], "remove it, and the report goes without")
            yield f"<h2>Answers of {html(run.recipe.scheme)}</h2>"
            titles = list(samples[0]) if samples else []
            rows = [[str(sample.get(title, "-")) for title in titles] for sample in samples]
            yield f'<div class="wide">{rows_html(titles, rows)}</div>'


def _curves(runs: list[Run], ranked: Ranking) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    order, task = [row.scheme for row in ranked.rows], ranked.task
    for index, scheme in enumerate(order + sorted({run.recipe.scheme for run in runs} - set(order))):
        for n, run in enumerate(run for run in runs if run.recipe.scheme == scheme):
            points = [(step, loss * task.loss_scale) for step, loss in _smooth(run.training)]
            xy, label = zip(*points, strict=True) if points else ([], []), None if n else literal(scheme)
            axes.plot(*xy, label=label, gid=f"curve-{scheme}-seed{run.recipe.seed}", **line_style(index))
    axes.set(xlabel="step", ylabel=f"training loss, {task.loss_unit}")
    if runs:
        axes.legend(fontsize=8, frameon=False)
    plain(axes)
    return figure


def _smooth(rows: list[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Steps and mean losses in nats over `SMOOTH` steps each."""
    for n in range(0, len(rows), SMOOTH):
        losses = [row["loss"] for row in rows[n : n + SMOOTH] if row["loss"] is not None]
        if losses:
            yield rows[n : n + SMOOTH][-1]["step"], statistics.fmean(losses)


def _kernel_sections(run: Run) -> Iterator[str]:
    """A section per scheme of a model."""
    scheme, specs = load_run(run.folder)[1].scheme, [*dict.fromkeys(of_layers(run.recipe.scheme))]
    parts = dict.fromkeys(scheme.each if isinstance(scheme, PerLayer) else [scheme])
    for part, spec in zip(parts, specs, strict=True):
        yield _kernel_section(part, spec + f" in {run.recipe.scheme}" * (len(specs) > 1))


def _kernel_section(scheme: Scheme, name: str) -> str:
    if (attention := scheme.choices["attention"]) != scheme.attention:
        return f"<h3>{html(name)}</h3><p>No kernel: {attention} has no weight for each pair of tokens.</p>"
    panel = next(panels(scheme))
    if isinstance(panel.group, Line):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        draw_curve(left, *panel.row(), scheme.attention)
        draw_heat(right, panel.score.mean(0), scheme.attention)
    elif panel.group.refers_to_rows:
        figure = Figure(figsize=(12, 5.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_tree(left, panel, scheme.attention)
        draw_panel(right, panel, scheme, alone=True)
    else:
        figure = Figure(figsize=(7.5, 5.6), layout="constrained")
        draw_panel(figure.subplots(), panel, scheme, alone=True)
    return f'<h3>{html(name)}</h3><figure id="kernel-{html(name)}">{svg(figure, f"Relative kernel of {name}")}</figure>'


def svg(figure: Figure, label: str) -> str:
    """The figure as an svg element with a label, without XML prologue."""
    text = svg_text(figure)
    return f'<svg role="img" aria-label="{html(label)}"' + text[text.index("<svg") + 4 :]
