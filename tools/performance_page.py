"""docs/performance.md from runs: python -m tools.performance_page {FOLDER,OTHERS}/bench.json > docs/performance.md."""

import json
import sys
from pathlib import Path
from typing import Any

from isopos.lab.bench.processes import ALLOCATORS
from isopos.lab.bench.results import merged
from isopos.lab.reports.grids import markdown
from isopos.lab.timing import Row, titles

__all__ = ["page"]

SECTIONS = {
    "attention": "Linear attention",
    "rotary": "Rotation of queries and keys",
    "decode": "Decoding, a token at a time",
    "sublayer": "What positions cost in an attention sublayer",
    "threads": "Threads",
    "load": "Beside busy processes",
    "growth": "Growth with length",
    "memory": "Memory",
    "construction": "Construction",
}
INTRODUCTION = """# Performance

One run on one machine; `{command}` prints and writes it for yours, and
`python -m tools.performance_page {{FOLDER,OTHERS}}/bench.json > docs/performance.md` wrote this page. Other libraries are
measured by `python -m benchmarks --out OTHERS` in the repository, where they are installed: `pip install isopos[lab,peers]`,
and fast-transformers' kernel where a compiler builds it.

**Machine.** {cpu}, {threads} threads, {dtype}; {platform}; Python {python}, {versions}.

**What is measured.** Works of one row, and of all rows of the same size, take turns in one process: {rounds} rounds after
one call to warm up, every other round in the opposite order, garbage collection off while the clock runs, workloads under 5
ms repeated. Times are medians. A ratio is taken within each round, and shown as the median with its quartiles; "speed" is
the other's time by ours, "time" is ours by the other's. Goals are judged by the median. Nothing is called faster, or
slower, where the quartiles are on both sides of 1: that is "within the spread".

**Allocator.** Each section runs in a process of its own, once in each state: with glibc's allocator as it is, told to reuse
memory (`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_={trim}`), and as it is but with huge pages for tensors from 2 MiB on
(`THP_MEM_ALLOC_ENABLE=1`, which PyTorch reads once, at the first tensor). As it is, it gives large tensors back to the
system, and pages fresh from there can take longer than the arithmetic.

**Shapes.** B samples, H heads, L tokens, d features a head; causal attention is elu + 1 features with a denominator
unless a row says otherwise. "forward + backward" takes gradients of all inputs, and of the projections of a module.
Positions are evaluated once, outside the clock, as layers share them; a decoding step evaluates its own."""


def page(content: dict[str, Any], *others: dict[str, Any]) -> str:
    """The page of what runs have written.

    Args:
        content: Of bench.json, which names the command and the machine.
        others: Of other races on the same machine.
    """
    known = {name: version for one in (*others, content) for name, version in one["versions"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    trim = ALLOCATORS["reused"]["MALLOC_TRIM_THRESHOLD_"]
    parts = [INTRODUCTION.format(**content | {"versions": versions, "trim": trim})]
    rows = merged([Row.from_json(row) for one in (content, *others) for row in one["rows"]])
    for section, title in SECTIONS.items():
        own = [row for row in rows if row.section == section]
        if own:
            parts.append(f"## {title}\n\n{markdown(titles(content['device']), (row.cells() for row in own))}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(*(json.loads(Path(file).read_text()) for file in sys.argv[1:])), end="")
