"""The report of a comparison: one HTML file, made from the folder alone, that loads nothing from outside."""

import html
import io
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from isopos.lab.reports.kernels import panels
from isopos.lab.reports.plots import draw_curve, draw_heat, plain
from isopos.lab.reports.table import NUMBERS, cells, header, notes, read_runs, rows_of
from isopos.lab.training.run import BITS, load_run

__all__ = ["write"]

SMOOTH = 10  # steps
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222 }
body { background: #fff } small { color: #666 } .warn { color: #a00 } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px }
th, td { padding: .3em .7em; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums } tbody tr:first-child { background: #eef7ee }
figure { margin: 1em 0 } svg { max-width: 100%; height: auto }
"""


def write(folder: Path) -> Path:
    """Write report.html, and curves.svg beside it, from what the folder holds; return the report's path."""
    about = json.loads((folder / "comparison.json").read_text())
    runs, rows = read_runs(folder), rows_of(folder)
    curves = _svg(_curves(runs, [row.scheme for row in rows]))
    _replace(folder / "curves.svg", curves)
    first = {run["recipe"]["scheme"]: run for run in reversed(runs) if run["result"]}
    pictures = [_kernel_section(first[row.scheme]) for row in rows if row.status == "finished"]
    unfinished = sorted(set(about["planned"]) - {run["folder"].name for run in runs if run["result"]})
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>isopos: {html.escape(folder.name)}</title>',
        f"<style>{STYLE}</style></head><body><h1>Which positional encoding?</h1>",
        f"<p>{html.escape(_setting(about, runs))}</p>",
        ""
        if about["complete"]
        else f'<p class="warn">Interrupted: unfinished {html.escape(", ".join(unfinished) or "timing")}.</p>',
        '<div class="wide">',
        _table(rows),
        "</div>",
        *(f"<p><small>{html.escape(note)}</small></p>" for note in notes(rows)),
        f"<h2>Training loss</h2><figure>{curves}</figure>",
        "<h2>What each scheme sees</h2>",
        "<p>Weight (linear attention) or logit (softmax attention) of a random query and a key that resembles it, in each "
        "head, compared with that at the same position, as a function of their offset: of each head, the mean, its even and "
        "its odd part. Without an odd part a scheme is blind to direction. Beside it the mean at each pair of positions: "
        "constant along diagonals where it depends on relative positions only.</p>",
        *pictures,
        "</body></html>",
    ]
    path = folder / "report.html"
    _replace(path, "\n".join(parts))
    return path


def _replace(path: Path, content: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(content, encoding="utf-8")
    os.replace(part, path)


def _setting(about: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    text = f"Text: {about['text']}, {about['bytes']:,} bytes, sha256 {about['sha256'][:12]}. "
    if runs:
        r = runs[0]["recipe"]
        text += (
            f"Byte-level decoder of {r['layers']} layers, width {r['model_dim']}, {r['heads']} heads; {r['steps']} steps of "
            f"{r['batch']} windows of {r['length']} bytes, AdamW {r['learning_rate']}. "
        )
    return text + f"torch {about['torch']}, {about['device']}, {about['threads']} threads."


def _table(rows: list[Any]) -> str:
    titles = header(rows)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' * (title in NUMBERS)}>{html.escape(cell)}</td>"
            for title, cell in zip(titles, cells(row, titles), strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _curves(runs: list[dict[str, Any]], order: list[str]) -> Figure:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    schemes = order + sorted({run["recipe"]["scheme"] for run in runs} - set(order))
    for run in runs:
        scheme, seed = run["recipe"]["scheme"], run["recipe"]["seed"]
        points = list(_smooth(run["training"]))
        place = schemes.index(scheme)
        label = scheme if run is next(r for r in runs if r["recipe"]["scheme"] == scheme) else None
        (line,) = axes.plot(
            *zip(*points, strict=True) if points else ([], []), label=label, color=colormaps["tab10"](place % 10)
        )
        line.set_dashes([(), (6, 2), (1, 2)][place // 10 % 3])
        line.set_gid(f"curve-{scheme}-seed{seed}")
    axes.set(xlabel="step", ylabel="training bits per byte")
    if runs:
        handles, labels = axes.get_legend_handles_labels()
        places = sorted(range(len(labels)), key=lambda n: schemes.index(labels[n]))
        axes.legend([handles[n] for n in places], [labels[n] for n in places], fontsize=8, frameon=False)
    plain(axes)
    return figure


def _smooth(rows: list[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Steps, and means over the `SMOOTH` up to each in bits: a curve with less noise than each step's batch has."""
    for n in range(0, len(rows), SMOOTH):
        losses = [row["loss"] for row in rows[n : n + SMOOTH] if row["loss"] is not None]
        if losses:
            yield rows[n : n + SMOOTH][-1]["step"], statistics.fmean(losses) * BITS


def _kernel_section(run: dict[str, Any]) -> str:
    scheme = load_run(run["folder"])[1].scheme
    panel = next(panels(scheme))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    draw_curve(left, *panel.row(), scheme.attention)
    draw_heat(right, panel.score.mean(0), scheme.attention)
    name = run["recipe"]["scheme"]
    return f'<h3>{html.escape(name)}</h3><figure id="kernel-{html.escape(name)}">{_svg(figure)}</figure>'


def _svg(figure: Figure) -> str:
    """The figure as an svg element, without the prologue that names a document type elsewhere."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
