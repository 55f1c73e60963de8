"""The table of a comparison, read from its folder: means over seeds, and differences with their spread. No torch here."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from isopos.lab.recipes import join_spec, split_spec
from isopos.lab.runs.folders import read_rows

__all__ = ["NUMBERS", "Row", "cells", "header", "notes", "read_runs", "render", "rows_of"]

Results = dict[int, dict[str, Any]]  # by seed
NUMBERS = ("bits/byte", "to best", "at 2x", "at 4x", "tokens/s", "speed", "parameters")


WORDS = {"attention": "attention", "decay": "decay", "denominator": "denominator", "feature_map": "features"}


@dataclass(frozen=True)
class Row:
    """A scheme: what its runs came to."""

    scheme: str
    status: str
    choices: dict[str, str]
    bits: dict[str, list[float]]
    difference: list[float]
    tokens_per_second: float
    speed: float | None
    parameters: int
    laws: str


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Every run of a comparison in order of its start: recipe, training rows and, where it ended, its result."""
    runs = []
    for path in sorted(folder.glob("*/recipe.json"), key=lambda p: p.stat().st_mtime_ns):
        rows, result = read_rows(path.parent / "metrics.jsonl"), path.parent / "result.json"
        runs.append(
            {
                "folder": path.parent,
                "recipe": json.loads(path.read_text()),
                "training": [row for row in rows if "loss" in row],
                "result": json.loads(result.read_text()) if result.exists() else None,
            }
        )
    return runs


def rows_of(folder: Path) -> list[Row]:
    """One row a scheme with a result, best first; those that did not finish last."""
    speed = json.loads((folder / "comparison.json").read_text()).get("speed", {})
    by_scheme: dict[str, Results] = {}
    for run in read_runs(folder):
        if run["result"]:
            by_scheme.setdefault(run["recipe"]["scheme"], {})[run["recipe"]["seed"]] = run["result"]

    finished = {
        scheme: {seed: result for seed, result in results.items() if result["status"] == "finished"}
        for scheme, results in by_scheme.items()
    }
    # an interrupted comparison ranks by the seeds that every scheme without a failure has, which keeps the runs paired
    seeds = [set(results) for scheme, results in finished.items() if len(results) == len(by_scheme[scheme])]
    shared = set.intersection(*seeds) if seeds else set()

    def score(scheme: str) -> float:
        bits = [finished[scheme][seed]["bits_per_byte"]["1"] for seed in shared if seed in finished[scheme]]
        return statistics.mean(bits) if len(finished[scheme]) == len(by_scheme[scheme]) and bits else float("inf")

    ordered = sorted(by_scheme, key=score)
    best = finished[ordered[0]] if ordered else {}
    return [_row(scheme, by_scheme[scheme], best, shared, speed.get(scheme)) for scheme in ordered]


def _row(scheme: str, results: Results, best: Results, shared: set[int], speed: float | None) -> Row:
    first = next(iter(results.values()))
    paired = [results[seed]["bits_per_byte"] for seed in sorted(shared) if seed in results]
    bits = {m: [values[m] for values in paired if values[m] is not None] for m in ("1", "2", "4")}
    pairs = [(results[seed]["bits_per_byte"]["1"], best[seed]["bits_per_byte"]["1"]) for seed in sorted(shared & {*results})]
    return Row(
        scheme=scheme,
        status=next((r["status"] for r in results.values() if r["status"] != "finished"), "finished"),
        choices=first["choices"],
        bits=bits,
        difference=[a - b for a, b in pairs if None not in (a, b)],
        tokens_per_second=statistics.mean(r["tokens_per_second"] for r in results.values()),
        speed=speed,
        parameters=first["parameters"],
        laws=first["laws"],
    )


def header(rows: list[Row]) -> tuple[str, ...]:
    """The titles of the columns; the kind of attention is one where rows differ in it."""
    differ = len({row.choices["attention"] for row in rows}) > 1
    return ("scheme", *["attention"] * differ, "decay", "denominator", "features", *NUMBERS, "laws hold")


def cells(row: Row, titles: Sequence[str]) -> tuple[str, ...]:
    """The row as text, under `header`."""
    name, options = split_spec(row.scheme)
    found = {
        "scheme": join_spec(name, {k: v for k, v in options.items() if k not in row.choices}),  # other columns show those
        **row.choices,
        "features": row.choices["feature_map"],
        "bits/byte": _mean(row.bits["1"]) if row.status == "finished" else row.status,
        "to best": _difference(row.difference),
        "at 2x": _mean(row.bits["2"]),
        "at 4x": _mean(row.bits["4"]),
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "speed": "-" if row.speed is None else f"{row.speed:.2f}",
        "parameters": f"{row.parameters:,}",
        "laws hold": row.laws,
    }
    return tuple(found[title] for title in titles)


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}" if values else "-"


def _difference(values: list[float]) -> str:
    """Mean of the paired differences, with their standard deviation; in brackets where it does not exceed it."""
    if not values:
        return "-"
    mean = statistics.mean(values)
    if mean == 0:
        return "best"
    if len(values) == 1:
        return f"{mean:+.3f}"
    spread = statistics.stdev(values)
    text = f"{mean:+.3f} ± {spread:.3f}"
    return f"({text})" if abs(mean) <= spread else text


def notes(rows: list[Row]) -> Iterator[str]:
    """What a reader must know to read the table."""
    yield (
        "bits/byte of held-out text, lower is better; at 2x and 4x the training length. speed: training, none with the same "
        "attention = 1, measured side by side; tokens/s is also what else the machine did during that run."
    )
    if any(len(row.difference) > 1 for row in rows):
        yield "to best: mean and standard deviation of paired differences between seeds; (in brackets): inside that spread."
    else:
        yield "to best: one seed, so its spread is unknown; --seeds 3 measures it."
    differ = [what for what in WORDS if len({row.choices[what] for row in rows}) > 1]
    words = [WORDS[what] for what in differ] + ["parameters"] * (len({row.parameters for row in rows}) > 1)
    if words:
        words = ", ".join(words)
        yield f"Rows that differ in more than the encoding, here in {words}, do not compare encodings alone."


def render(rows: list[Row], width: int) -> tuple[Table, Text]:
    """The table for a terminal of so many columns; where it does not fit, what matters least is left to the report."""
    titles, left = list(header(rows)), []
    for title in ("denominator", "features", "parameters", "tokens/s", "attention", "decay", "at 2x", "laws hold"):
        columns = zip(titles, *(cells(row, titles) for row in rows), strict=True)
        if sum(max(map(len, column)) for column in columns) + 3 * len(titles) + 1 <= width:
            break
        left += [title] if title in titles else []
        titles = [other for other in titles if other != title]
    table = Table(header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in NUMBERS else "left", no_wrap=title != "scheme", overflow="fold")
    for row in rows:
        table.add_row(*cells(row, titles))
    narrow = [f"Left out, since this terminal is narrow: {', '.join(left)}; the report has them."] if left else []
    return table, Text("\n".join([*notes(rows), *narrow]))
