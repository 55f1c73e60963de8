"""Speed of the compiled kernel against PyTorch operations: `python -m tools.without_kernel` prints a Markdown table.

Interleaved rounds in one process time the same calls with the library and without it. The figure is the smallest processor
time of one thread over all rounds, which other processes affect little.
"""

import functools
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

import isopos
from isopos.lab.reports.grids import markdown
from isopos.ops import library

__all__ = ["table"]

SCHEMES = "none", "rope", "retnet", "lrpe-unitary", "permuteformer"
ROUNDS, STEPS = 9, 64
TITLES = "call", "scheme", "with the kernel", "without", "ratio"


def _content(t: int, *, gradients: bool = False) -> list[Tensor]:
    return [torch.randn(1, 8, t, 64, requires_grad=gradients) for _ in range(3)]


def _whole(name: str, t: int, *, gradients: bool) -> Callable[[], object]:
    scheme = isopos.schemes.REGISTRY[name](64, 8)
    at, (q, k, v) = scheme.at(isopos.sequence(t)), _content(t, gradients=gradients)

    def run() -> object:
        out = isopos.linear_attention(q, k, v, **at, causal=True)
        return torch.autograd.grad(out.sum(), (q, k, v)) if gradients else out

    return run


def _steps(name: str) -> Callable[[], object]:
    scheme = isopos.schemes.REGISTRY[name](64, 8)
    stream, (q, k, v) = isopos.Stream(scheme), _content(1)

    def run() -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                stream(q, k, v)

    return run


WORKLOADS: dict[str, tuple[Callable[[str], Callable[[], object]], int]] = {  # with the number of calls per run
    "causal, forward, L=64": (functools.partial(_whole, t=64, gradients=False), 1),
    "causal, forward + backward, L=64": (functools.partial(_whole, t=64, gradients=True), 1),
    "causal, forward, L=2048": (functools.partial(_whole, t=2048, gradients=False), 1),
    "causal, forward + backward, L=2048": (functools.partial(_whole, t=2048, gradients=True), 1),
    "a step of `isopos.Stream`": (_steps, STEPS),
}


def table(rounds: int = ROUNDS) -> list[tuple[str, ...]]:
    """Rows for B=1 H=8 d=64, float32, on one thread."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for title, (workload, count) in WORKLOADS.items():
            for name in SCHEMES:
                times = _race(functools.partial(workload, name), rounds)
                ours, other = (f"{1e6 * x / count:.3g} us" if count > 1 else f"{1e3 * x:.3g} ms" for x in times)
                rows.append((title, name, ours, other, f"{times[1] / times[0]:.3g}x"))
    finally:
        torch.set_num_threads(threads)
    return rows


def _race(make: Callable[[], Callable[[], object]], rounds: int) -> tuple[float, float]:
    """The smallest seconds of a run with the library, and without it."""
    absent = mock.patch.object(library, "libraries", return_value=({}, "hidden for a comparison"))
    no_warning = mock.patch.object(library, "warned", True)
    compiled, best = make(), [float("inf")] * 2
    with absent, no_warning:
        plain = make()
    for _ in range(rounds + 1):
        best[0] = min(best[0], _timed(compiled))
        with absent, no_warning:
            best[1] = min(best[1], _timed(plain))
    return best[0], best[1]


def _timed(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


if __name__ == "__main__":
    print(markdown(TITLES, table()), end="")
