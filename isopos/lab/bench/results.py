"""Files of a benchmark: bench.json, with every round's seconds and the machine, and a chart."""

import datetime
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from isopos import __version__
from isopos.lab.bench.gpu import LIMIT
from isopos.lab.bench.peers import PEERS
from isopos.lab.reports.plots import svg_text
from isopos.lab.runs.files import damaged, mismatch, read_json, write_json, write_text
from isopos.lab.timing import Row
from isopos.ops.library import libraries

DATA, CHART = "bench.json", "bench.svg"
COLORS = ("#0072b2", "#d55e00", "#009e73")  # one per variant


def machine(device: str = "cpu") -> dict[str, Any]:
    """Versions, threads and processor, on which figures depend."""
    versions = {"isopos": __version__, "isopos.ops.library": libraries()[1], "torch": torch.__version__}
    for peer in PEERS.values():
        try:
            versions[peer.package] = importlib.metadata.version(peer.package)
        except importlib.metadata.PackageNotFoundError:
            versions[peer.package] = "not installed"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": next(models, platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "dtype": "bfloat16" if device.startswith("cuda") else "float32",
    }


def heading(rounds: int, device: str = "cpu") -> str:
    """A paragraph above the rows: the machine, and the definition of ratios."""
    about = machine(device)
    processor = f"{about['cpu']}, {about['threads']} threads" if device == "cpu" else about["device"]
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    fewer = "" if device == "cpu" else f", or fewer in long benchmarks: the rounds that start within {LIMIT:g} s, at least 3"
    return (
        f"{versions}; {processor}, {about['dtype']}. Medians of {rounds} interleaved rounds{fewer}; "
        "ratios are taken within rounds. speed: baseline time / ours; time: ours / baseline time. No difference is claimed "
        "where the quartiles of the ratio are on both sides of 1."
    )


def target(out: str, *, keep: bool = False) -> Path | None:
    """The folder to write to; None if `out` is empty.

    Raises:
        ValueError: If `keep` is set and the folder has files of a benchmark.
    """
    if not out:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: expected a folder, but {folder} is a file")
    for path in (folder / DATA, folder / CHART):
        if path.exists() and keep:
            remedy = "choose another folder with --out, replace it with --overwrite, or continue with --resume"
            raise ValueError(f"out: {path} exists; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def earlier_rows(folder: Path, rounds: int, device: str) -> list[Row]:
    """The rows of an earlier run in a folder; ValueError if the machine, the threads or the rounds differ."""
    if not (folder / DATA).exists():
        return []
    remedy = "remove it, or choose another folder with --out"
    content = read_json(folder / DATA, dict, remedy)
    about = machine(device) | {"rounds": rounds}
    for name in ("rounds", "versions", "dtype", *(("cpu", "threads") if device == "cpu" else ("device",))):
        if content.get(name) != about[name]:
            expected = f"{name} {content.get(name)} as in {folder / DATA}"
            raise ValueError(f"resume: expected {expected}, got {about[name]}; choose another folder with --out")
    if wrong := mismatch(content, {"rows": list[dict]}):
        damaged(folder / DATA, wrong, remedy)
    return [Row.from_json(row) for row in content["rows"]]


def latest_rows(rows: Sequence[Row]) -> list[Row]:
    """Each row once, in its latest measurement; sorted by section, with variants of a workload next to each other."""
    variants: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for row in rows:
        variants.setdefault((row.section, row.workload, row.baseline, row.unit), {})[row.variant] = row
    merged = [row for by_variant in variants.values() for row in by_variant.values()]
    sections = list(dict.fromkeys(row.section for row in merged))
    return sorted(merged, key=lambda row: sections.index(row.section))


def write_results(folder: Path, rows: Sequence[Row], command: str, rounds: int, device: str) -> Path:
    """Write rows and machine as JSON; return the path."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {
        "command": command,
        "when": when,
        "rounds": rounds,
        **machine(device),
        "rows": [row.to_json() for row in rows],
    }
    write_json(folder / DATA, content)
    return folder / DATA


def draw_chart(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw a chart of the rows that have a ratio; return the files written."""
    raced = [row for row in rows if row.raced and row.section != "growth"]
    if not raced:
        return []
    write_text(folder / CHART, svg_text(chart(raced)))
    return [folder / CHART]


def chart(rows: Sequence[Row]) -> Figure:
    """One bar per ratio: our speed in units of the baseline's on a logarithmic axis, with quartiles and goals."""
    colors = dict(zip(dict.fromkeys(row.variant for row in rows), itertools.cycle(COLORS), strict=False))
    figure = Figure(figsize=(11, 1.2 + 0.26 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        low, median, high = row.spread if not row.cost else (1 / ratio for ratio in reversed(row.spread))
        spread = [[median - low], [high - median]]
        style = {"color": colors[row.variant], "height": 0.7, "xerr": spread, "error_kw": {"lw": 1, "capsize": 2}}
        axes.barh(y, median - 1, left=1, **style)
        if row.goal is not None:
            goal = 1 / row.goal.value if row.cost else row.goal.value
            axes.plot([goal, goal], [y - 0.45, y + 0.45], color="black", lw=2)
    axes.set_xscale("log")
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(rows)), [f"{row.workload}  vs  {row.baseline}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    figure.supxlabel("times as fast as the baseline; whiskers: quartiles of rounds; black marks: goals", fontsize=9)
    handles = [Patch(color=color, label=variant) for variant, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper right", fontsize=8)
    return figure
