"""What a benchmark leaves: every round's seconds with the machine they were taken on, as JSON, and a chart."""

import datetime
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from isopos import __version__
from isopos.lab.bench.peers import PEERS
from isopos.lab.bench.timing import Row
from isopos.lab.runs.files import replacing, write_json
from isopos.ops.library import libraries

__all__ = ["CHART", "DATA", "chart", "heading", "machine", "target", "write"]

DATA, CHART = "bench.json", "bench.svg"
COLORS = ("#0072b2", "#d55e00", "#009e73")  # of states


def machine(device: str = "cpu") -> dict[str, Any]:
    """Versions, threads and processor: what figures depend on."""
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
    """What a reader of rows must know: the machine, and what their words mean."""
    about = machine(device)
    where = f"{about['cpu']}, {about['threads']} threads" if device == "cpu" else about["device"]
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return (
        f"{versions}; {where}, {about['dtype']}. Medians of {rounds} interleaved rounds; "
        "ratios are taken within rounds. speed: the other's time / ours; time: ours / the other's. A difference is none "
        "where the quartiles of its ratio are on both sides of 1."
    )


def target(out: str, overwrite: bool) -> Path | None:
    """The folder to write into, if there is one; ValueError, before any work, where files of an earlier run lie there."""
    if not out:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: expected a folder, but {folder} is a file")
    for path in (folder / DATA, folder / CHART):
        if path.exists() and not overwrite:
            raise ValueError(f"out: {path} exists; choose another folder with --out, or replace it with --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(folder: Path, rows: Sequence[Row], command: str, rounds: int, device: str = "cpu") -> list[Path]:
    """Write rows as JSON and, where there are ratios, as a chart; return the files."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {
        "command": command,
        "when": when,
        "rounds": rounds,
        **machine(device),
        "rows": [row.to_json() for row in rows],
    }
    write_json(folder / DATA, content)
    raced = [row for row in rows if row.raced and row.section != "growth"]
    if not raced:
        return [folder / DATA]
    with replacing(folder / CHART) as part, rc_context({"svg.fonttype": "none", "svg.hashsalt": "isopos"}):
        chart(raced).savefig(part, format="svg")
    return [folder / DATA, folder / CHART]


def chart(rows: Sequence[Row]) -> Figure:
    """One bar a ratio, our speed in units of the other's on a logarithmic axis, with quartiles and goals."""
    colors = dict(zip(dict.fromkeys(row.state for row in rows), itertools.cycle(COLORS), strict=False))
    figure = Figure(figsize=(11, 1.2 + 0.26 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        low, middle, high = row.spread if not row.cost else (1 / ratio for ratio in reversed(row.spread))
        spread = [[middle - low], [high - middle]]
        style = {"color": colors[row.state], "height": 0.7, "xerr": spread, "error_kw": {"lw": 1, "capsize": 2}}
        axes.barh(place, middle - 1, left=1, **style)
        if row.goal is not None:
            goal = 1 / row.goal.value if row.cost else row.goal.value
            axes.plot([goal, goal], [place - 0.45, place + 0.45], color="black", lw=2)
    axes.set_xscale("log")
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(rows)), [f"{row.work}  vs  {row.other}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    figure.supxlabel("times as fast as the other; whiskers: quartiles of rounds; black marks: goals", fontsize=9)
    handles = [Patch(color=color, label=state) for state, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper right", fontsize=8)
    return figure
