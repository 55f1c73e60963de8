"""The rows of `isopos gpu-check`, most important first: each checks or times one thing on a GPU and returns what it found.

Run as a module it is the process to which `isopos.lab.bench.gpu_check` gives rows: it reads one name per line and prints one
line of JSON per row. It needs torch and triton alone. In Triton's interpreter rows run on a CPU at small sizes.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from isopos import __version__
from isopos.attention import explain, linear_attention, reference
from isopos.exact import full_precision
from isopos.lab.bench import gpu, peers, races
from isopos.lab.bench.ceilings import ROOFLINE
from isopos.lab.timing import Spread
from isopos.ops import gpu as gate
from isopos.ops import rotate as rotation
from isopos.ops import trust
from isopos.ops.linear.cpu import CpuSteps
from isopos.ops.linear.triton_step import TritonSteps
from isopos.positions import sequence
from isopos.scheme import Scheme
from isopos.schemes import build
from isopos.stream import Stream

MARK = "gpu-check: "  # starts each line with a result, since libraries print, too
MACHINE = "machine"  # name of the row that describes it
SCHEMES = ("none", "rope", "retnet", "permuteformer", "lrpe-unitary")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WIDTHS = (64, 128, 80)
SMALL_WIDTHS = (16, 32, 20)  # of the same rows at small sizes
LIMITS = {  # largest error of a norm: of outputs, of gradients; some three times what the interpreter's emulation gives
    "bfloat16": (1e-2, 2e-2),
    "float32": (1e-5, 3e-5),
}
CANCELS = 0.2  # of a query's gradient in bfloat16 where features of sums and of denominators are the same: docs/gpu.md
SANITIZER, FAULTS = "compute-sanitizer", 86  # and its exit status where it finds something
RUNS = 10  # of which all have the same bits


class CallSetting(NamedTuple):
    """Where rows run."""

    device: str = "cuda"  # "cuda", or "cpu" for Triton's interpreter
    small: bool = False  # whether sizes are small, for the interpreter
    runs: int = RUNS  # how often a row of repeats runs


class GpuRow(NamedTuple):
    """What a row does.

    Attributes:
        name: Its name; the first word is its section.
        seconds: Seconds that it may take, with compiling.
        run: Returns what it found as values for JSON; "wrong" says what failed, "absent" why there is nothing to find.
        operation: What it proves right (`trust.OPERATIONS`), or "".
        dtype: The dtype for which it does so.
    """

    name: str
    seconds: float
    run: Callable[[CallSetting], dict[str, Any]]
    operation: str = ""
    dtype: str = ""

    @property
    def section(self) -> str:
        """The first word of the name."""
        return self.name.partition(":")[0]


@contextlib.contextmanager
def _switched(value: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {gate.SWITCH: value}):
        yield


def _scheme(name: str, width: int, heads: int, place: CallSetting) -> Scheme:
    return build(name, width, heads, {"denominator": "plain"}).to(place.device)


def _inputs(scheme: Scheme, batch: int, length: int, dtype: str, place: CallSetting) -> list[Tensor]:
    """Queries, keys, values and a gradient ``[b h t .]``, seeded."""
    draw, d = torch.Generator().manual_seed(0), scheme.encoding.features
    shapes = [(batch, scheme.heads, length, width) for width in (d, d, d // scheme.width, d // scheme.width)]
    return [torch.randn(shape, generator=draw).to(place.device, DTYPES[dtype]) for shape in shapes]


def _pass(scheme: Scheme, given: Sequence[Tensor], attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of queries, keys, values and parameters, with tables of a dtype."""
    *inputs, grad = given
    leaves, x = [a.detach().requires_grad_() for a in inputs], sequence(inputs[0].shape[-2], device=grad.device)
    out, parameters = attend(*leaves, **scheme.at(x, dtype=dtype), causal=True), list(scheme.parameters())
    found = torch.autograd.grad(out, [*leaves, *parameters], grad.to(out.dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros(1) if x is None else x for x in found)]


def _repeated(run: Callable[[Sequence[Tensor]], Any], given: Sequence[Tensor]) -> Any:
    """The third run, which repeats the recorded launches of the second (`isopos.ops.triton_plan`) for other numbers."""
    for n in (1, 2):
        run([x.roll(n, -2) for x in given])
    return run(given)


def _error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference, of that of what is exact."""
    exact = exact.double()
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def _unserved(scheme: Scheme, given: Sequence[Tensor]) -> str:
    """Why Triton's kernels do not serve the attention of a scheme, or ""."""
    at = scheme.at(sequence(given[0].shape[-2], device=given[0].device))
    said = explain(*given[:3], **at, causal=True)
    return "" if said.backend == "triton" else said.refusals.get("triton", "another backend serves")


def _differing(run: Callable[[], Sequence[Tensor]], runs: int) -> dict[str, Any]:
    """How many runs have other bits than the first."""
    first, other, largest = [x.clone() for x in run()], 0, 0.0
    for _ in range(runs - 1):
        pairs = [*zip(run(), first, strict=True)]
        other += not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        largest = max([largest, *((a.double() - b.double()).abs().max().item() for a, b in pairs)])
    found = {"runs": runs, "differing": other, "largest": largest}
    finite = all(x.isfinite().all() for x in first)
    wrong = "" if finite else "a number is not finite"
    return found | {"wrong": f"{other} of {runs - 1} runs have other bits than the first" if other else wrong}


def _attention_repeats(name: str, dtype: str, place: CallSetting) -> dict[str, Any]:
    batch, heads, length, width = (1, 1, 40, 16) if place.small else (4, 8, 2000, 64)
    scheme = _scheme(name, width, heads, place)
    given = _inputs(scheme, batch, length, dtype, place)
    if why := _unserved(scheme, given):
        return {"absent": why}
    return _differing(lambda: _pass(scheme, given, linear_attention, torch.float32), place.runs)


def _rotation_given(width: int, dtype: str, place: CallSetting) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[b h t d]``, a table that rows share, and a gradient."""
    batch, heads, length = (2, 2, 5) if place.small else (8, 16, 1000)
    draw = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, batch, heads, length, width, generator=draw).to(place.device, DTYPES[dtype])
    angle = torch.randn(length, width // 2, generator=draw, dtype=torch.float64)
    return x, rotation.rotation_table(angle, torch.float32).to(place.device), grad


def _rotated(x: Tensor, table: Tensor, grad: Tensor, rotate: Callable[..., Tensor | None]) -> list[Tensor]:
    """Rotated features, and gradients of features and table."""
    leaves = [a.detach().requires_grad_() for a in (x, table)]
    out = rotate(*leaves)
    assert out is not None
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def _unrotated(x: Tensor, table: Tensor) -> str:
    """Why no kernel rotates, or ""."""
    from isopos.ops import triton_rotate

    return gate.unreadable("rotation", x, table) or triton_rotate.refuses(x, table, lifted=False, adjoint=False)


def _rotation_repeats(dtype: str, place: CallSetting) -> dict[str, Any]:
    x, table, grad = _rotation_given(16 if place.small else 64, dtype, place)
    if why := _unrotated(x, table):
        return {"absent": why}
    return _differing(lambda: _rotated(x, table, grad, rotation.rotate_on_gpu), place.runs)


def _decoded(scheme: Scheme, given: Sequence[Tensor]) -> tuple[Tensor, type]:
    """Outputs of a stream of tokens one by one, and the type of its steps. The C kernel does not come first."""
    with torch.no_grad(), mock.patch.object(CpuSteps, "of", return_value=None):
        stream = Stream(scheme)
        tokens = [stream(*(x[..., n : n + 1, :] for x in given[:3])) for n in range(given[0].shape[-2])]
    return torch.cat(tokens, -2), type(stream._steps)


def _step_repeats(name: str, dtype: str, place: CallSetting) -> dict[str, Any]:
    batch, heads, length, width = (2, 2, 4, 8) if place.small else (32, 8, 20, 64)
    scheme = _scheme(name, width, heads, place)
    given = _inputs(scheme, batch, length, dtype, place)
    if (steps := _decoded(scheme, given)[1]) is not TritonSteps:
        return {"absent": f"steps are {steps.__name__}: {gate.unreadable('step', *given) or 'the kernel refuses'}"}
    return _differing(lambda: [_decoded(scheme, given)[0]], place.runs)


def _judged(errors: dict[str, float], limits: dict[str, float]) -> dict[str, Any]:
    """Errors with the first one above its limit, or not a number, as what is wrong."""
    beyond = [f"{name}: {x:.1e}, at most {limits[name]:.0e}" for name, x in errors.items() if not x <= limits[name]]
    return {"errors": errors, "wrong": "; ".join(beyond)}


def _attention_errors(name: str, width: int, dtype: str, place: CallSetting) -> dict[str, Any]:
    """Of outputs and of all gradients against the quadratic definition in float64, and those of PyTorch's operations."""
    width = SMALL_WIDTHS[WIDTHS.index(width)] if place.small else width
    scheme = _scheme(name, width, 1 if place.small else 2, place)
    given = _inputs(scheme, 1, 40 if place.small else 1000, dtype, place)
    if why := _unserved(scheme, given):
        return {"absent": why}
    names = ["output", *(f"gradient of {x}" for x in ("q", "k", "v"))]
    names += [f"gradient of {parameter}" for parameter, _ in scheme.named_parameters()]
    with full_precision(torch.device(place.device)):
        exact = _pass(scheme, [x.double() for x in given], reference.DEFINITIONS["linear"], torch.float64)
    found = _repeated(lambda inputs: _pass(scheme, inputs, linear_attention, torch.float32), given)
    with _switched("0"):
        by_pytorch = _pass(scheme, given, linear_attention, torch.float32)
    of_output, of_gradient = LIMITS[dtype]
    limits = {each: of_output if each == "output" else of_gradient for each in names}
    if dtype == "bfloat16" and name in ("none", "retnet"):
        limits["gradient of q"] = CANCELS
    ours, theirs = (dict(zip(names, map(_error, x, exact), strict=True)) for x in (found, by_pytorch))
    return _judged(ours, limits) | {"pytorch": theirs}


def _rotation_errors(width: int, dtype: str, place: CallSetting) -> dict[str, Any]:
    x, table, grad = _rotation_given(16 if place.small else width, dtype, place)
    if why := _unrotated(x, table):
        return {"absent": why}
    exact = _rotated(x.double(), table.double(), grad.double(), rotation.rotate_naive)
    names = ("output", "gradient of x", "gradient of the table")
    found = _repeated(lambda inputs: _rotated(inputs[0], table, inputs[1], rotation.rotate_on_gpu), (x, grad))
    return _judged(dict(zip(names, map(_error, found, exact), strict=True)), dict.fromkeys(names, LIMITS[dtype][0]))


def _step_errors(name: str, dtype: str, place: CallSetting) -> dict[str, Any]:
    batch, heads, length, width = (1, 2, 6, 8) if place.small else (2, 4, 80, 64)
    scheme = _scheme(name, width, heads, place)
    given = _inputs(scheme, batch, length, dtype, place)
    out, steps = _decoded(scheme, given)
    if steps is not TritonSteps:
        return {"absent": f"steps are {steps.__name__}: {gate.unreadable('step', *given) or 'the kernel refuses'}"}
    with torch.no_grad():
        at = scheme.at(sequence(length, device=place.device), dtype=torch.float64)
        exact = reference.DEFINITIONS["linear"](*(x.double() for x in given[:3]), **at, causal=True)
    return _judged({"output": _error(out, exact)}, {"output": LIMITS[dtype][0]})


def _compiled(name: str, place: CallSetting) -> dict[str, Any]:
    """One graph of forward and backward pass against the eager run; both have Triton's kernels."""
    width, length = (8, 12) if place.small else (64, 1000)
    scheme, backend = _scheme(name, width, 2, place), "aot_eager" if place.small else "inductor"
    given = _inputs(scheme, 1, length, "float32", place)
    graph = torch.compile(linear_attention, fullgraph=True, backend=backend)
    eager, found = (_pass(scheme, given, attend, torch.float32) for attend in (linear_attention, graph))
    names = ("output", "gradient of q", "gradient of k", "gradient of v", *dict(scheme.named_parameters()))
    return _judged(dict(zip(names, map(_error, found, eager), strict=True)), dict.fromkeys(names, 1e-4))


def _memcheck(names: Sequence[str], seconds: float, place: CallSetting) -> dict[str, Any]:
    """Rows under compute-sanitizer, each with two runs; PyTorch's cache of memory is off, so that bounds are seen."""
    tool = shutil.which(SANITIZER) or next(map(str, Path("/usr/local").glob(f"cuda*/bin/{SANITIZER}")), None)
    if tool is None:
        return {"absent": f"{SANITIZER} is not installed; it comes with the CUDA toolkit"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FAULTS), sys.executable, "-m", __spec__.name]
    command += ["--device", place.device, "--runs", "2", *["--small"] * place.small, *names]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")]
    results = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    failed = [f"{row['row']}: {row.get('wrong')}" for row in results if row["status"] == "failed"]
    if done.returncode == 0 and len(results) == len(names) and not failed:
        return {"rows": list(names), "said": lines[-1] if lines else ""}
    said = failed or lines[:8] or (done.stderr or done.stdout).splitlines()[-4:]
    return {"wrong": f"exit status {done.returncode}: {' | '.join(said)}"}


def _race(contest: races.Race, place: CallSetting, *, section: str = "attention", more: bool = False) -> dict[str, Any]:
    """Times of a race's workloads in interleaved rounds."""
    if more and (why := _no_peers(contest)):
        return {"absent": why}
    if place.small:
        contest = replace(contest, shape=races.Shape(min(40, contest.shape.length), batch=1, heads=2, head_dim=16))
    rounds, limit = (1, 0.0) if place.small else (7, 3.0)
    dtype = torch.float32 if place.small else torch.bfloat16
    found = []
    for row in races.race(section, contest, rounds, place.device, dtype, limit):
        ours, other = (Spread.of(x).median if x else None for x in (row.ours_seconds, row.baseline_seconds))
        ratio = row.spread._asdict() if row.raced else None
        goal = None if row.goal is None else str(row.goal)
        named = {"workload": row.workload, "baseline": row.baseline, "seconds": ours, "baseline seconds": other}
        found.append(named | {"ratio": ratio, "cost": row.cost, "goal": goal, "verdict": row.verdict, "note": row.note})
    notes = [each["note"] for each in found]
    return {"races": found, "wrong": notes[0] if all(notes) else ""}


def _no_peers(contest: races.Race) -> str:
    """Why the other library of a race is not here, or ""."""
    try:
        others: Any = importlib.import_module("benchmarks.peers")  # the repository's folder, not in the wheel
    except ImportError as error:
        return f"adapters of other libraries are in the repository's folder benchmarks: {error}"
    peers.PEERS.update(others.PEERS)
    reasons = [others.PEERS[other].absence() for _, other in contest.pairs]
    return reasons[0] if all(reasons) else ""


def _checks() -> Iterator[GpuRow]:
    """Rows that are right or wrong."""
    both = tuple(DTYPES)
    for name, dtype in (("rope", "bfloat16"), ("retnet", "float32"), ("permuteformer", "bfloat16")):
        yield GpuRow(f"repeat: step, {name}, {dtype}", 60, partial(_step_repeats, name, dtype), "step", dtype)
    for dtype in both:
        yield GpuRow(f"repeat: rotation, {dtype}", 60, partial(_rotation_repeats, dtype), "rotation", dtype)
    for name, dtype in itertools.product(("rope", "none", "retnet"), both):
        yield GpuRow(f"repeat: attention, {name}, {dtype}", 90, partial(_attention_repeats, name, dtype), "attention", dtype)
    for width, dtype, name in itertools.product(WIDTHS, both, SCHEMES):
        run = partial(_attention_errors, name, width, dtype)
        yield GpuRow(f"accuracy: attention, {name}, d={width}, {dtype}", 90, run, "attention", dtype)
        if name == SCHEMES[-1]:
            run = partial(_rotation_errors, width, dtype)
            yield GpuRow(f"accuracy: rotation, d={width}, {dtype}", 60, run, "rotation", dtype)
    for dtype, name in itertools.product(both, SCHEMES):
        yield GpuRow(f"decoding: {name}, {dtype}", 60, partial(_step_errors, name, dtype), "step", dtype)
    for name in ("rope", "lrpe-unitary"):
        yield GpuRow(f"compile: {name}, float32", 120, partial(_compiled, name))
    names = [f"repeat: {what}, bfloat16" for what in ("step, rope", "rotation", "attention, rope", "attention, retnet")]
    yield GpuRow("memcheck: repeats in bfloat16", 180, partial(_memcheck, names, 175.0))


DECAYED = f"{gpu.PLAIN}, retnet decay"
FLA = {(gpu.PLAIN, "fla, linear attention"): None, (DECAYED, "fla, simple gated linear attention"): None}


def _attention_race(passing: Any, length: int, width: int, pairs: Mapping[tuple[str, str], Any] | None = None) -> races.Race:
    """Causal attention against a roofline, SDPA, itself with positions and with a decay, or other pairs."""
    goals = gpu._attention(passing, length, width).pairs
    own = [(gpu.PLAIN, ROOFLINE), ("causal", "softmax (SDPA)"), ("attention function, rotary", gpu.NONE)]
    known = {pair: goals[pair] for pair in own} | {(DECAYED, gpu.PLAIN): None}
    return races.Race("attention", passing, races.Shape(length, 8, 16, width), known if pairs is None else pairs)


def _times() -> Iterator[GpuRow]:
    """Rows of times, which run alone. `isopos bench --device cuda` has more of them, and PyTorch's operations."""
    both, forward = races.BOTH, races.FORWARD
    for passing, length, width in (
        *((both, 4096, 64), (both, 16384, 64), (both, 16384, 128), (both, 1024, 64)),
        *((forward, 4096, 64), (both, 65536, 64), (both, 65536, 128)),
    ):
        contest = _attention_race(passing, length, width)
        yield GpuRow(f"time: attention, {passing}, {contest.shape}", 100, partial(_race, contest))
        if (passing, length, width) == (both, 16384, 64):
            for contest in gpu.ROTARY:
                run = partial(_race, contest, section="rotary")
                yield GpuRow(f"time: rotation, {contest.passing}, {contest.shape}", 60, run)
            for contest in gpu.DECODE:
                yield GpuRow(f"time: step, {contest.shape}", 60, partial(_race, contest, section="decode"))
    for length, width in ((4096, 64), (16384, 64), (16384, 128)):
        contest = _attention_race(both, length, width, FLA)
        yield GpuRow(f"time: fla, {both}, {contest.shape}", 150, partial(_race, contest, more=True))


@cache
def all_rows() -> dict[str, GpuRow]:
    """All rows by name, most important first."""
    return {row.name: row for row in (*_checks(), *_times())}


def machine(place: CallSetting) -> dict[str, Any]:
    """What results depend on: the device, versions, and the kernels' source."""
    device = torch.device(place.device)
    found = {"device": trust.device_name(device), "torch": torch.__version__, "triton": trust.triton_version()}
    found |= {
        "isopos": __version__,
        "kernels": trust.kernels_fingerprint(),
        "python": platform.python_version(),
        "small": place.small,
    }
    found |= {"ptxas": "", "ptxas path": "", "trusted": ""}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory GiB": round(properties.total_memory / 2**30),
        }
        found |= {"cuda": torch.version.cuda, "ptxas": trust.ptxas(), "ptxas path": os.environ.get(trust.PATH, "")}
        found["trusted"] = trust.unreliable(device)
    return found


def result(name: str, place: CallSetting) -> dict[str, Any]:
    """Run a row; its result with its status: passed, failed, measured or absent. An error is a failure.

    "usable" is false if the device does not answer any more, as after some errors.
    """
    start = time.perf_counter()
    try:
        found = machine(place) if name == MACHINE else all_rows()[name].run(place)
    except Exception as error:
        traceback.print_exc()
        found = {"wrong": f"{type(error).__name__}: {error}"[:1000]}
    of_measures = name == MACHINE or "races" in found
    status = "absent" if "absent" in found else "measured" if of_measures else "passed"
    status = "failed" if found.get("wrong") else status
    own = {"row": name, "status": status, "seconds": round(time.perf_counter() - start, 2), "usable": _usable(place)}
    return own | found


def _usable(place: CallSetting) -> bool:
    try:
        if place.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def _watch_parent() -> None:
    """End this process when its parent has ended, even in the middle of a kernel."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """Run rows named by arguments, or by lines of the standard input, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="gpu_rows")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args(arguments)
    place, failed = CallSetting(given.device, given.small, given.runs), False
    _watch_parent()
    torch.set_num_threads(min(4, torch.get_num_threads()))
    os.environ[gate.SWITCH] = "any"
    hopper = place.device == "cuda" and trust.compute_generation(torch.device("cuda")) == trust.HOPPER
    if hopper and trust.PATH not in os.environ and (newest := trust.newest_ptxas()):
        os.environ[trust.PATH] = newest
    if not given.names:
        print(MARK + json.dumps({"ready": True}), flush=True)
    for line in given.names or sys.stdin:
        found = result(line.strip(), place)
        failed |= found["status"] == "failed"
        print(MARK + json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
