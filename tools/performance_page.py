"""docs/performance-tables.md from runs, and the summary in docs/performance.md from these tables.

python -m tools.performance_page {FOLDER,OTHERS}/bench.json > docs/performance-tables.md
python -m tools.generate
"""

import json
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

from isopos.lab.bench.results import merged
from isopos.lab.reports.grids import markdown
from isopos.lab.timing import Row, titles
from tools.pages import ROOT, Rows, tables

__all__ = ["page", "summary"]

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
    rows = [row for table in tables(ROOT / "docs" / "performance-tables.md") for row in table[1:]]
    return f"\n{markdown(('task', 'isopos', 'compared with', 'speed'), map(_summarised, SUMMARY, repeat(rows)))}\n"


def _summarised(line: tuple[str, str, str], rows: Rows) -> tuple[str, str, str, str]:
    title, workload, baseline = line
    matching = [row for row in rows if row[:2] == [workload, baseline]]
    if not matching:
        raise ValueError(f"docs/performance-tables.md: expected a row {workload!r} compared with {baseline!r}, got none")
    ratios = sorted(float(row[5].partition("x")[0]) for row in matching)
    times = sorted((row[3] for row in matching), key=lambda time: float(time.split()[0]))
    ends = [f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.2g}" for ratio in (ratios[0], ratios[-1])]
    return title, " to ".join(dict.fromkeys((times[0], times[-1]))), baseline, f"{' to '.join(dict.fromkeys(ends))} times"


def page(content: dict[str, Any], *others: dict[str, Any]) -> str:
    """The page of tables.

    Args:
        content: Content of a bench.json, which names the command and the machine.
        others: Contents of further ones from the same machine.
    """
    packages = {name: version for run in (*others, content) for name, version in run["versions"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    parts = [INTRODUCTION.format(**content | {"versions": versions})]
    rows = merged([Row.from_json(row) for run in (content, *others) for row in run["rows"]])
    for section, title in SECTIONS.items():
        if cells := [row.cells() for row in rows if row.section == section]:
            parts.append(f"## {title}\n\n{markdown(titles(content['device']), cells)}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(*(json.loads(Path(file).read_text()) for file in sys.argv[1:])), end="")
