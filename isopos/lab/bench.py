"""Measurements of the operations: side by side in one process, interleaved, medians. Figures are rows, never tests."""

import itertools
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isopos.feature_maps import elu1
from isopos.functional import linear_attention
from isopos.lab import exactness
from isopos.lab.accuracy import accuracy
from isopos.ops.rotate import rotate
from isopos.positions import sequence
from isopos.schemes import REGISTRY

__all__ = ["bench"]

ROUNDS = 9
BATCH, HEADS, HEAD_DIM, LENGTH = 2, 8, 64, 8192
GROWTH = (1024, 2048, 4096, 8192)
NODES = 65536
REUSE = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
LONG = 1 << 17  # tokens of a long sequence
MEMORY = ("none", "rope", "permuteformer", "retnet")


def bench(console: Console, section: str = "all", *, compiled: bool = False) -> int:
    """Print the rows of a section, or of all but exactness; return the exit status."""
    if section == "exactness":
        exactness.console(console, compiled=compiled)
        return 0
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32; medians of {ROUNDS} interleaved rounds"
    )
    sections = {"rotation": _rotation, "growth": _growth, "memory": _memory, "construction": _construction}
    table = Table("work", "figure", "what it is", header_style="bold")
    for rows in [sections[name] for name in sections if section in ("all", name)]:
        for row in rows():
            table.add_row(*row)
    if table.row_count:
        console.print(table)
    if section in ("all", "accuracy"):
        console.print(accuracy())
    return 0


def _times(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each work, interleaved, after one round of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for n in range(ROUNDS + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            if n:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _textbook(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula that most code uses, on the half-split layout."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rotation():
    """Rotation of one tensor against the textbook formula, and its error against float64.

    Most of the time of a large tensor may go into memory fresh from the system, so the rows come in both states of the
    allocator: as it is, and told to keep what it has (glibc only).
    """
    shape = f"B={BATCH} H={HEADS} L={LENGTH} d={HEAD_DIM}"
    for state, environment in (("allocator as it is", {}), ("memory reused", REUSE)):
        figures = _in_process("rotation()", environment)
        for work in ("forward", "forward + backward"):
            ratio = figures[f"textbook {work}"] / figures[f"ours {work}"]
            yield f"rotation {work}, {shape}", f"{ratio:.2f}x", f"textbook rotate-half time / ours, {state}"
    yield f"rotation, {shape}", f"{figures['error']:.1e}", "largest error against float64, of the largest feature"


def rotation() -> None:
    """Print the seconds of rotations, ours and the textbook's, and the error of ours."""
    rope = REGISTRY["rope"](HEAD_DIM, HEADS).encoding
    rho, exact = (rope(sequence(LENGTH), dtype) for dtype in (torch.float32, torch.float64))
    table = rho.table
    cos, sin = (part.repeat(1, 1, 2) for part in table.unbind(-1))
    x, grad = torch.randn(2, BATCH, HEADS, LENGTH, HEAD_DIM)
    leaf = x.clone().requires_grad_()
    seconds = _times(
        {
            "ours forward": lambda: rotate(x, table),
            "textbook forward": lambda: _textbook(x, cos, sin),
            "ours forward + backward": lambda: torch.autograd.grad(rotate(leaf, table), leaf, grad),
            "textbook forward + backward": lambda: torch.autograd.grad(_textbook(leaf, cos, sin), leaf, grad),
        }
    )
    error = (rho(x).double() - exact(x.double())).abs().max() / x.abs().max()
    print(json.dumps(seconds | {"error": error.item()}))


def _in_process(call: str, environment: Mapping[str, str] | None = None) -> Any:
    """What a function of this module prints in a process of its own."""
    code = f"from isopos.lab import bench; bench.{call}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | (environment or {})
    )
    return json.loads(done.stdout)


def _inputs(length: int) -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, length, HEAD_DIM).requires_grad_() for _ in range(3)]


def _growth():
    """Time of causal linear attention with rope, as length doubles."""
    scheme = REGISTRY["rope"](HEAD_DIM, HEADS)

    def work(length: int) -> Callable[[], object]:
        inputs, at = _inputs(length), scheme.at(sequence(length))
        return lambda: torch.autograd.grad(linear_attention(*inputs, causal=True, **at).sum(), inputs)

    seconds = _times({str(length): work(length) for length in GROWTH})
    for a, b in itertools.pairwise(GROWTH):
        yield (
            f"attention with rope forward + backward, L={b}",
            f"{seconds[str(b)] / seconds[str(a)]:.2f}x",
            f"time / time at L={a}",
        )


def _memory():
    """Peak memory of forward + backward above the inputs, in bytes of q; each in a process of its own."""
    shape = f"B={BATCH} H={HEADS} L={LENGTH} d={HEAD_DIM}"
    for name in MEMORY:
        figure = _in_process(f"peak({name!r})")
        work = f"attention with {name} forward + backward, {shape}"
        yield work, f"{figure:.2f}", "peak memory above the inputs / bytes of q"
    for name in MEMORY:
        figure = _in_process(f"long({name!r}, {LONG})")
        work = f"attention with {name} forward, causal, no gradient, B=1 H={HEADS} L={LONG} d={HEAD_DIM}"
        yield work, f"{figure:.0f} MiB", "peak memory above inputs and output"


def long(name: str, length: int) -> None:
    """Print the peak resident memory of one pass without gradients above its inputs and output, in MiB."""
    scheme = REGISTRY[name](HEAD_DIM, HEADS)
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM) for _ in range(3))
    with torch.no_grad():
        linear_attention(*(x[..., :512, :] for x in (q, k, v)), causal=True, **scheme.at(sequence(512)))
        before = _high_water()
        linear_attention(q, k, v, causal=True, **scheme.at(sequence(length)))
    print((_high_water() - before - q.nbytes) / 2**20)


def peak(name: str) -> None:
    """Print the peak resident memory of one forward and backward pass above its inputs, as a multiple of the bytes of q."""
    scheme = REGISTRY[name](HEAD_DIM, HEADS)
    small, inputs = _inputs(256), _inputs(LENGTH)
    linear_attention(*small, causal=True, feature_map=elu1).sum().backward()
    at, grad = scheme.at(sequence(LENGTH)), torch.ones(BATCH, HEADS, LENGTH, HEAD_DIM)
    before = _high_water()
    linear_attention(*inputs, causal=True, **at).backward(grad)
    after = _high_water()
    print((after - before) / (inputs[0].numel() * inputs[0].element_size()))


def _construction():
    """Seconds to build each scheme, and to encode a large tree in a process of its own."""
    seconds = _times({name: lambda make=make: make(HEAD_DIM, HEADS) for name, make in REGISTRY.items()})
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:5]
    for name in slowest:
        yield f"construction of {name}, d={HEAD_DIM} H={HEADS}", f"{1e3 * seconds[name]:.1f} ms", "one of the slowest five"
    median = statistics.median(seconds.values())
    yield f"construction, d={HEAD_DIM} H={HEADS}", f"{1e3 * median:.1f} ms", f"median of {len(seconds)} schemes"
    runs = [_in_process(f"tree({NODES})") for _ in range(3)]
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    work = f"operators of a binary tree, {NODES:,} nodes, d={HEAD_DIM} H=1"
    yield work, f"{figures['seconds']:.2f} s", "isopos.ape_tree(64, 1).encoding(positions), of three processes"
    yield (
        work,
        f"{figures['bytes'] / 2**30:.2f} GiB",
        f"peak memory above the start; the result is {figures['result'] / 2**30:.2f}",
    )


def tree(nodes: int) -> None:
    """Print the seconds, the peak memory above the start and the bytes of a complete binary tree's operators."""
    row = torch.arange(nodes)
    positions = torch.stack(((row - 1).div(2, rounding_mode="floor"), (row - 1) % 2), -1)
    positions[0] = -1
    encoding = REGISTRY["ape-tree"](HEAD_DIM, 1).encoding
    with torch.no_grad():
        encoding(positions[:3])
        before, begun = _high_water(), time.perf_counter()
        rho = encoding(positions)
        seconds = time.perf_counter() - begun
    result = sum(tensor.numel() * tensor.element_size() for tensor in rho.tensors())
    print(json.dumps({"seconds": seconds, "bytes": _high_water() - before, "result": result}))


def _high_water() -> int:
    """The most bytes of memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held when it started this process
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])  # pyright: ignore[reportOptionalSubscript]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
