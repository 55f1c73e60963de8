"""The report of an audit as one HTML file: the verdict, the results, and errors over position for each layer."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from isopos.audit import Finding, Report
from isopos.lab.reports.page import head, html, rows_html, svg
from isopos.lab.reports.plots import line_style, literal, plain
from isopos.lab.runs.files import write_text

TITLES = ("severity", "check", "expected", "measured", "where", "line", "remedy", "issue")
LEAST, MOST = 1e-17, 10.0  # errors are drawn between these


def write(report: Report, path: Path) -> None:
    """Write the page."""
    sound = [a for a in report.results if a.severity == "sound"]
    rows = [[getattr(a, title) for title in TITLES] for a in (*report.findings, *sound)]
    left_out = [["failed" if a.failed else "not measured", a.check, a.reason] for a in report.unmeasured]
    parts = [
        *head(report.subject, report.verdict),
        *(f"<p>Encoding: {html(words)}.</p>" for words in report.encodings),
        f'<div class="wide">{rows_html(TITLES, rows)}</div>',
        f'<h2>Without a result</h2><div class="wide">{rows_html(("", "check", "reason"), left_out)}</div>' * bool(left_out),
        "<h2>Error over position</h2>",
        "<p>Relative differences of two calls that must agree, at each token: of outputs, and of each layer where the check "
        "compares layers; of rotary tables, the difference from the declared cosines and sines in float64.</p>",
        *_figures(report),
        "</body></html>",
    ]
    write_text(path, "\n".join(parts))


def _figures(report: Report) -> Iterator[str]:
    for a in (*report.findings, *(a for a in report.results if a.severity == "sound")):
        if a.curves:
            title = f"{a.check}: {a.expected}"
            yield f"<h3>{html(title)} ({a.severity})</h3><figure>{svg(_drawn(a), title)}</figure>"


def _drawn(finding: Finding) -> Figure:
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    for n, (name, points) in enumerate(finding.curves):
        x, y = zip(*points, strict=True)
        axes.plot(x, [min(max(error, LEAST), MOST) for error in y], label=literal(name), **line_style(n))
    axes.set(xlabel="position", ylabel="relative error", yscale="log")
    if max(x for _, points in finding.curves for x, _ in points) > 1000:
        axes.set_xscale("symlog", linthresh=16)
    axes.legend(fontsize=7, frameon=False)
    plain(axes)
    return figure
