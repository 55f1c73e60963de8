"""Sections of a benchmark: races, and single figures. Memory is measured in a new process each time."""

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from isopos.attention import linear_attention
from isopos.lab.bench import gpu, races
from isopos.lab.bench.races import Shape, scheme_for
from isopos.lab.timing import Row, at_most, peak_memory, rounds_of
from isopos.positions import sequence
from isopos.schemes import REGISTRY

SECTIONS = (*races.RACES, "threads", "load", "growth", "memory", "construction")
SMALL_PAGES, HUGE_PAGES = ({"THP_MEM_ALLOC_ENABLE": choice} for choice in "01")  # PyTorch's switch for large tensors
ALLOCATORS: dict[str, Mapping[str, str]] = {
    "as-is": SMALL_PAGES,
    # Getting new pages from the system may take most of the time of a large tensor: here glibc keeps freed memory.
    "reused": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)} | SMALL_PAGES,
    "huge-pages": HUGE_PAGES,
}
MEMORY = {"none": at_most(4.5), "rope": None, "permuteformer": None, "retnet": None}
LENGTHS = (8192, 32768)
LONG = 1 << 17  # tokens of a long sequence
NODES = 65536  # of a tree; with a limit, at most twice the largest number of tokens
COMMAND, MODULE = ("isopos", "bench"), "isopos.lab.bench.processes"  # the command, and the module that child processes run
MARK = "\x1e"  # precedes results in a child's output, where peers may print, too


def variants_of(device: str, variant: str) -> Mapping[str, Mapping[str, str]]:
    """Environments by variant: backends on a GPU, allocators on a CPU. Only glibc's allocator can be configured.

    Raises:
        ValueError: If this machine has no such variant.
    """
    option, variants, reason = ("backend", gpu.KERNELS, "") if device != "cpu" else ("allocator", ALLOCATORS, "")
    if device == "cpu" and platform.libc_ver()[0] != "glibc":
        variants, reason = {"as-is": ALLOCATORS["as-is"]}, ", since only glibc's allocator can be configured"
    if variant != "all" and variant not in variants:
        raise ValueError(f"{option}: expected all or {' or '.join(variants)} here{reason}, got {variant}")
    return variants if variant == "all" else {variant: variants[variant]}


def section(
    name: str, rounds: int, longest: int = 1 << 62, device: str = "cpu", done: Collection[Sequence[str]] = ()
) -> Iterator[Row]:
    """Measure a section in this process.

    Args:
        longest: Largest length of sequences, for a quick trial.
        done: Titles of existing rows; races whose rows all exist are left out.
    """
    existing, options = {tuple(title) for title in done}, {}
    if device != "cpu":
        options = {"device": device, "dtype": torch.bfloat16, "limit": gpu.LIMIT}
    for contest in (races.RACES if device == "cpu" else gpu.RACES).get(name, ()):
        contest = replace(contest, shape=contest.shape.limited(longest))
        if not existing.issuperset(contest.titles()):
            yield from races.race(name, contest, rounds, **options)
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)  # raises after an error from which later races cannot recover
    if device == "cpu":
        yield from _other_rows(name, rounds, longest)


def _other_rows(name: str, rounds: int, longest: int) -> Iterator[Row]:
    """Rows of a CPU section that are no races."""
    if name == "growth":
        yield from races.growth(rounds, [length for length in races.LENGTHS if length <= longest] or [longest // 2, longest])
    if name == "threads":
        yield from races.threads(rounds, longest)
    if name == "load":
        yield from races.under_load(rounds, longest)
    if name == "memory":
        lengths = dict.fromkeys(min(length, longest) for length in LENGTHS)
        yield from memory(tuple(lengths), min(LONG, longest))
    if name == "construction":
        yield from construction(rounds, min(NODES, 2 * longest))
    if name == "rotary":
        yield rotation_error(Shape().limited(longest))


def in_variants(
    name: str, variants: Mapping[str, Mapping[str, str]], rounds: int, device: str, done: Sequence[Row]
) -> Iterator[Row]:
    """Measure a section once per variant, each in a process; yield rows as they come, without races that are done."""
    for variant, environment in variants.items():
        titles = [(row.workload, row.baseline) for row in done if (row.section, row.variant) == (name, variant)]
        for content in results_of_child("section", environment, name=name, rounds=rounds, device=device, done=titles):
            yield replace(Row.from_json(content), variant=variant)


def results_of_child(function: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> Iterator[Any]:
    """Run a function of `FUNCTIONS` in a child process; yield its results as they come."""
    command = [sys.executable, "-m", MODULE, function, json.dumps(arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | (environment or {})) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _, mark, content = line.partition(MARK)
                if mark:
                    yield json.loads(content)
        except BaseException:  # the consumer stopped
            process.kill()
            raise
    if process.returncode:
        reason = "killed, perhaps because memory ran out" if process.returncode < 0 else "its error is above"
        raise OSError(f"the process of {function} {json.dumps(arguments)} ended with {process.returncode}: {reason}")


def call(function: str, **arguments: Any) -> Any:
    """Run a function of `FUNCTIONS` in a child process; return its result."""
    (result,) = results_of_child(function, **arguments)
    return result


def rotation_error(shape: Shape) -> Row:
    """Largest error of rotary queries against float64."""
    rope, x = scheme_for("rope", shape).encoding, torch.randn(shape.batch, shape.heads, shape.length, shape.head_dim)
    float32, float64 = (rope(sequence(shape.length), dtype) for dtype in (torch.float32, torch.float64))
    error = (float32(x).double() - float64(x.double())).abs().max() / x.abs().max()
    unit = "largest error against float64, of the largest feature"
    return Row("rotary", f"rotation, {shape}", figure=error.item(), unit=unit)


def memory(lengths: tuple[int, ...] = LENGTHS, longest: int = LONG) -> Iterator[Row]:
    """Peak memory: with gradients, in units of the bytes of q; and without gradients, for long sequences."""
    for length, (spec, goal) in itertools.product(lengths, MEMORY.items()):
        if goal is None and length != lengths[0]:  # each process takes seconds to start
            continue
        shape = Shape(length)
        figure, unit = call("peak", spec=spec, shape=shape), "peak memory above the inputs / bytes of q"
        yield Row("memory", f"causal, {spec}, forward + backward, {shape}", figure=figure, unit=unit, goal=goal)
    shape, unit = Shape(longest, batch=1), "MiB of peak memory above inputs and output"
    for spec in MEMORY:
        figure = call("long", spec=spec, shape=shape)
        yield Row("memory", f"causal, {spec}, forward, no gradient, {shape}", figure=figure, unit=unit)


def peak(spec: str, shape: Shape) -> float:
    """Peak resident memory of a forward and backward pass above its inputs, as a multiple of the bytes of q."""
    scheme = scheme_for(spec, shape)
    sizes = (shape.batch, shape.heads, shape.length, shape.head_dim)
    inputs, small = ([torch.randn(size).requires_grad_() for _ in range(3)] for size in (sizes, (*sizes[:2], 256, sizes[3])))
    out = linear_attention(*small, **scheme.at(sequence(256)), causal=True)
    out.backward(torch.ones_like(out))  # warm-up: the first explicit gradient makes PyTorch import about 25 MiB
    at, grad = scheme.at(sequence(shape.length)), torch.ones(sizes)
    before = peak_memory()
    linear_attention(*inputs, causal=True, **at).backward(grad)
    return (peak_memory() - before) / inputs[0].nbytes


def long(spec: str, shape: Shape) -> float:
    """Peak resident memory of a forward pass without gradients above inputs and output, in MiB."""
    scheme = scheme_for(spec, shape)
    q, k, v = (torch.randn(shape.batch, shape.heads, shape.length, shape.head_dim) for _ in range(3))
    with torch.no_grad():
        linear_attention(*(x[..., :512, :] for x in (q, k, v)), causal=True, **scheme.at(sequence(min(512, shape.length))))
        before = peak_memory()
        linear_attention(q, k, v, causal=True, **scheme.at(sequence(shape.length)))
    return (peak_memory() - before - q.nbytes) / 2**20


def construction(rounds: int, nodes: int = NODES) -> Iterator[Row]:
    """Time to build each scheme; and time and memory to encode a large tree, in a child process."""
    size = f"d={Shape().head_dim} H={Shape().heads}"
    workloads = {name: lambda make=make: make(Shape().head_dim, Shape().heads) for name, make in REGISTRY.items()}
    seconds = {name: statistics.median(values) for name, values in rounds_of(workloads, rounds).items()}
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:5]:
        yield Row("construction", f"construction of {name}, {size}", figure=1e3 * seconds[name], unit="ms, slowest five")
    median = 1e3 * statistics.median(seconds.values())
    yield Row("construction", f"construction, {size}", figure=median, unit=f"ms, median of {len(seconds)} schemes")
    runs = [call("tree", nodes=nodes) for _ in range(3)]
    units = {
        "seconds": "s, isopos.ape_tree(64, 1).encoding(positions), median of three processes",
        "bytes": "GiB of peak memory above the start, median of three processes",
        "result": "GiB, the result",
    }
    for name, unit in units.items():
        figure = statistics.median(run[name] for run in runs) / (1 if name == "seconds" else 2**30)
        yield Row("construction", f"operators of a binary tree, {nodes:,} nodes, d=64 H=1", figure=figure, unit=unit)


def tree_operators(nodes: int) -> dict[str, float]:
    """Seconds, peak bytes above the start, and result bytes of the operators of a complete binary tree."""
    row = torch.arange(nodes)
    positions = torch.stack(((row - 1).div(2, rounding_mode="floor"), (row - 1) % 2), -1)
    positions[0] = -1
    encoding = REGISTRY["ape-tree"](64, 1).encoding
    with torch.no_grad():
        encoding(positions[:3])
        before, start = peak_memory(), time.perf_counter()
        rho = encoding(positions)
        seconds = time.perf_counter() - start
    result = sum(tensor.nbytes for tensor in rho.tensors())
    return {"seconds": seconds, "bytes": peak_memory() - before, "result": result}


FUNCTIONS = {
    "section": lambda **arguments: (row.to_json() for row in section(**arguments)),
    "peak": lambda spec, shape: [peak(spec, Shape(*shape))],
    "long": lambda spec, shape: [long(spec, Shape(*shape))],
    "tree": lambda nodes: [tree_operators(nodes)],
}


def main(function: str, arguments: str) -> None:
    """Run a function of `FUNCTIONS` in this process, and print each result as a line of JSON."""
    for result in FUNCTIONS[function](**json.loads(arguments)):
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
