"""What a benchmark leaves: every round's seconds with the machine they were taken on, as JSON, and a chart."""

import datetime
import importlib.metadata
import itertools
import json
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
from isopos.lab.bench.gpu import LIMIT
from isopos.lab.bench.peers import PEERS
from isopos.lab.bench.timing import Row
from isopos.lab.runs.files import replacing, write_json
from isopos.ops.library import libraries

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
    fewer = "" if device == "cpu" else f", of long races as many as begin in {LIMIT:g} s, and 3 at the least"
    return (
        f"{versions}; {where}, {about['dtype']}. Medians of {rounds} interleaved rounds{fewer}; "
        "ratios are taken within rounds. speed: the other's time / ours; time: ours / the other's. A difference is none "
        "where the quartiles of its ratio are on both sides of 1."
    )


def target(out: str, *, keep: bool = False) -> Path | None:
    """The folder to write into, if there is one; ValueError, before any work, where files lie there that one must `keep`."""
    if not out:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: expected a folder, but {folder} is a file")
    for path in (folder / DATA, folder / CHART):
        if path.exists() and keep:
            remedy = "choose another folder with --out, replace it with --overwrite, or go on with --resume"
            raise ValueError(f"out: {path} exists; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read(folder: Path, rounds: int, device: str = "cpu") -> list[Row]:
    """The rows that `write` has left there, if any; ValueError where machine, threads or rounds are others."""
    if not (folder / DATA).exists():
        return []
    content, about = json.loads((folder / DATA).read_text()), machine(device) | {"rounds": rounds}
    for name in ("rounds", "versions", "dtype", *(("cpu", "threads") if device == "cpu" else ("device",))):
        if content.get(name) != about[name]:
            expected = f"{name} {content.get(name)} as in {folder / DATA}"
            raise ValueError(f"resume: expected {expected}, got {about[name]}; choose another folder with --out")
    return [Row.from_json(row) for row in content["rows"]]


def merged(rows: Sequence[Row]) -> list[Row]:
    """Each row once, the last one where it was measured again: by sections, and those of one work below each other."""
    works: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for row in rows:
        works.setdefault((row.section, row.work, row.other, row.unit), {})[row.state] = row
    found = [row for states in works.values() for row in states.values()]
    sections = list(dict.fromkeys(row.section for row in found))
    return sorted(found, key=lambda row: sections.index(row.section))


def write(folder: Path, rows: Sequence[Row], command: str, rounds: int, device: str = "cpu") -> Path:
    """Write rows as JSON; return the file."""
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


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Write rows as a chart, where there are ratios; return the files."""
    raced = [row for row in rows if row.raced and row.section != "growth"]
    if not raced:
        return []
    with replacing(folder / CHART) as part, rc_context({"svg.fonttype": "none", "svg.hashsalt": "isopos"}):
        chart(raced).savefig(part, format="svg")
    return [folder / CHART]


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
