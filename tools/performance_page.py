"""docs/performance-tables.md from runs, and from these tables the summary in docs/performance.md and its picture.

python -m tools.performance_page {FOLDER,OTHERS}/bench.json > docs/performance-tables.md
python -m tools.performance_page > docs/performance.svg
python -m tools.generate
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from isopos.lab.bench.results import latest_rows
from isopos.lab.reports.grids import markdown
from isopos.lab.reports.plots import EVEN, TOTAL, svg_text
from isopos.lab.timing import Row, titles
from tools.pages import ROOT, tables

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # in seconds

__all__ = ["page", "picture", "summary"]

SECTIONS = {
    "attention": "Linear attention",
    "rotary": "Rotation of queries and keys",
    "decode": "Decoding, a token at a time",
    "sublayer": "What positions cost in an attention sublayer",
    "threads": "Threads",
    "load": "With busy processes",
    "growth": "Growth with length",
    "memory": "Memory",
    "construction": "Construction",
}
INTRODUCTION = """# Performance tables

Every row of one run of `{command}` and of `python -m benchmarks`. [Performance](performance.md) says what they mean, how
they were measured and which goals were not met.

**Machine.** {cpu}, {threads} threads, {dtype}; {platform}; Python {python}, {versions}."""

SUMMARY = (  # task, workload, baseline
    ("Train causal linear attention, L=2048", "causal, forward + backward, B=2 H=8 L=2048 d=64", "fast-transformers"),
    ("Train causal linear attention, L=8192", "causal, forward + backward, B=2 H=8 L=8192 d=64", "fast-transformers"),
    ("Train causal linear attention, L=2048", "causal, forward + backward, B=2 H=8 L=2048 d=64", "softmax (SDPA)"),
    ("Forward pass, L=8192", "causal, forward, B=2 H=8 L=8192 d=64", "softmax (SDPA)"),
    (
        "Decode one token after 32,768, B=1",
        "prepared step, no positions, B=1 H=8 d=64, after 32768 tokens",
        "softmax (SDPA) step",
    ),
    (
        "Decode one token after 32,768, B=32",
        "prepared step, no positions, B=32 H=8 d=64, after 32768 tokens",
        "softmax (SDPA) step",
    ),
    ("Rotate queries and keys, L=8192", "rotation, forward, B=2 H=8 L=8192 d=64", "transformers Llama"),
    ("Rotate, with gradients", "rotation, forward + backward, B=2 H=8 L=8192 d=64", "transformers Llama"),
    (
        "Rotary positions in an attention module",
        "attention module, rotary, forward + backward, B=4 H=8 L=512 d=64",
        "attention module, no positions",
    ),
    (
        "Unitary LRPE in an attention module",
        "attention module, unitary, forward + backward, B=4 H=8 L=512 d=64",
        "attention module, no positions",
    ),
)


def summary() -> str:
    """The most important rows: times and ratios over the allocators, from docs/performance-tables.md."""
    rows = [(line[0], " to ".join(times), line[2], speed) for line, times, speed, _ in _summarised()]
    return f"\n{markdown(('task', 'isopos', 'compared with', 'speed'), rows)}\n"


def picture() -> str:
    """The summary as text of an SVG file: one bar per row, from the lowest to the highest speed, on a logarithmic axis."""
    rows = list(_summarised())
    with rc_context({"font.size": 11, "svg.hashsalt": "isopos"}):
        figure = Figure(figsize=(5.4, 0.55 * len(rows) + 0.6), layout="constrained")
        axes = figure.subplots()
        for y, ((title, _, baseline), _, speed, (low, high)) in enumerate(rows):
            axes.plot([1, low], [y, y], color=EVEN, linewidth=2)
            axes.plot([low, high], [y, y], color=EVEN, linewidth=8, solid_capstyle="butt")
            axes.text(1.08, y - 0.2, f"{title}\n{speed} {baseline}", fontsize=9)
        axes.axvline(1, color=TOTAL, linewidth=0.8)
        axes.set_ylim(len(rows) - 0.6, -0.9)
        axes.set(xscale="log", xlim=(0.8, 2000), yticks=[], xlabel="times as fast as the baseline")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right", "left"]].set_visible(False)
        return svg_text(figure)


def _summarised() -> Iterator[tuple[tuple[str, str, str], list[str], str, tuple[float, float]]]:
    """Each line of `SUMMARY`, its times and speeds as text, and the lowest and highest speed."""
    rows = [row for table in tables(ROOT / "docs" / "performance-tables.md") for row in table[1:]]
    for line in SUMMARY:
        _, workload, baseline = line
        matching = [row for row in rows if row[:2] == [workload, baseline]]
        if not matching:
            raise ValueError(f"docs/performance-tables.md: expected a row {workload!r} compared with {baseline!r}, got none")
        ratios = sorted(float(row[5].partition("x")[0]) for row in matching)
        times = sorted((row[3] for row in matching), key=_seconds)
        ends = [f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.2g}" for ratio in (ratios[0], ratios[-1])]
        speed = f"{' to '.join(dict.fromkeys(ends))} times"
        yield line, list(dict.fromkeys((times[0], times[-1]))), speed, (ratios[0], ratios[-1])


def _seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def page(content: dict[str, Any], *others: dict[str, Any]) -> str:
    """The page of tables.

    Args:
        content: Content of a bench.json, which names the command and the machine.
        others: Contents of further ones from the same machine.
    """
    packages = {name: version for run in (*others, content) for name, version in run["versions"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    parts = [INTRODUCTION.format(**content | {"versions": versions})]
    rows = latest_rows([Row.from_json(row) for run in (content, *others) for row in run["rows"]])
    for section, title in SECTIONS.items():
        if cells := [row.cells() for row in rows if row.section == section]:
            parts.append(f"## {title}\n\n{markdown(titles(content['device']), cells)}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(*(json.loads(Path(file).read_text()) for file in sys.argv[1:])) if sys.argv[1:] else picture(), end="")
