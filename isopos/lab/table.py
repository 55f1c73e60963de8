"""The table of a comparison, read from its folder: means over seeds, and differences with their spread. No torch here."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["HEADER", "Row", "cells", "notes", "read_runs", "render", "rows_of"]

HEADER = (
    *("scheme", "decay", "denominator", "features", "bits/byte", "to best", "at 2x", "at 4x"),
    *("tokens/s", "speed", "parameters", "laws hold"),
)


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
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        result = path.parent / "result.json"
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
    by_scheme: dict[str, dict[int, dict[str, Any]]] = {}
    for run in read_runs(folder):
        if run["result"]:
            by_scheme.setdefault(run["recipe"]["scheme"], {})[run["recipe"]["seed"]] = run["result"]

    def score(item: tuple[str, dict[int, dict[str, Any]]]) -> float:
        bits = [result["bits_per_byte"]["1"] for result in item[1].values()]
        return float("inf") if None in bits else statistics.mean(bits)

    ordered = sorted(by_scheme.items(), key=score)
    best = ordered[0][1] if ordered and score(ordered[0]) < float("inf") else {}
    return [_row(scheme, results, best, speed.get(scheme)) for scheme, results in ordered]


def _row(scheme: str, results: dict[int, dict[str, Any]], best: dict[int, dict[str, Any]], speed: float | None) -> Row:
    first = next(iter(results.values()))
    bits = {
        m: [r["bits_per_byte"][m] for r in results.values() if r["bits_per_byte"][m] is not None] for m in ("1", "2", "4")
    }
    pairs = [(results[seed]["bits_per_byte"]["1"], best[seed]["bits_per_byte"]["1"]) for seed in results if seed in best]
    return Row(
        scheme=scheme,
        status=next((r["status"] for r in results.values() if r["status"] != "finished"), "finished"),
        choices=first["choices"],
        bits=bits,
        difference=[a - b for a, b in pairs if a is not None],
        tokens_per_second=statistics.mean(r["tokens_per_second"] for r in results.values()),
        speed=speed,
        parameters=first["parameters"],
        laws=first["laws"],
    )


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, under `HEADER`."""
    return (
        row.scheme,
        *(row.choices[name] for name in ("decay", "denominator", "feature_map")),
        _mean(row.bits["1"]) if row.status == "finished" else row.status,
        _difference(row.difference),
        _mean(row.bits["2"]),
        _mean(row.bits["4"]),
        f"{row.tokens_per_second:,.0f}",
        "-" if row.speed is None else f"{row.speed:.2f}",
        f"{row.parameters:,}",
        row.laws,
    )


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
    yield "bits/byte of held-out text, lower is better; at 2x and 4x the training length. speed: training, none = 1."
    if any(len(row.difference) > 1 for row in rows):
        yield "to best: mean and standard deviation of paired differences between seeds; (in brackets): inside that spread."
    else:
        yield "to best: one seed, so its spread is unknown; --seeds 3 measures it."
    if len({tuple(row.choices.items()) for row in rows}) > 1:
        yield "Rows whose decay, denominator or features differ, too, do not compare encodings alone."


def render(rows: list[Row]) -> tuple[Table, Text]:
    """The table for a terminal."""
    table = Table(header_style="bold")
    for n, title in enumerate(HEADER):
        table.add_column(
            title, justify="right" if 4 <= n <= 10 else "left", overflow="fold", min_width=16 if n == 0 else None
        )
    for row in rows:
        table.add_row(*cells(row))
    return table, Text("\n".join(notes(rows)))
