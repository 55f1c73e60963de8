"""Instructions and memory traffic of linear attention without feature maps, by the kernels of isopos and of fla.

    python tests/fla_counts.py [--d 64 128] [--arch 100] [--launches]      # a table of docs/performance.md

Needs `fla-core`, but no GPU: launches are compiled for an imagined one, and their machine code is counted instead of run.
Where fla would measure several settings of a kernel, it gets the one with the fewest instructions.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from fake_gpu import ARCH, SHARED, Gpu, fake_gpu
from torch import Tensor
from triton_aot import dumped, of_a_thread, started
from triton_counts import by_name, loop_of, loops_of

from isopos import linear_attention, sequence
from isopos.schemes import build

TOKENS, BATCH, HEADS = 4096, 2, 16
LIBRARIES = ("isopos", "fla")


class Launch(NamedTuple):
    """A launch: its kernel, warps of a program, instructions of all warps, bytes of its tensors, resources of a thread."""

    kernel: str
    warps: int
    instructions: int
    traffic: int
    registers: int
    spilled: int


class Counter(Gpu):
    """An imagined GPU that reads what it is asked to run."""

    def __init__(self, arch: int = ARCH):
        super().__init__(arch)
        self.counts: list[Launch] = []

    def driver(self) -> Any:
        """The driver, with which autotuners count instructions in place of time."""
        found = super().driver()
        found.get_benchmarker = lambda: self._tuned
        return found

    def _tuned(self, call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
        before = len(self.counts)
        call()
        found = float(self.counts[-1].instructions)
        del self.counts[before:]
        return [found] * len(quantiles)

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}

        def launch(x: int, y: int, z: int, stream: int, binary: bytes, *rest: Any) -> None:
            given = dict(zip(names, rest[-len(names) :], strict=True))
            each, *resources = _executed(binary, _trips(metadata.name, given | constants))
            instructions = x * y * z * metadata.num_warps * each
            traffic = sum({(own.data_ptr(), own.numel() * own.itemsize): own.nbytes for own in _tensors(given)}.values())
            self.counts.append(Launch(metadata.name, metadata.num_warps, instructions, traffic, *resources))

        return launch


def _trips(kernel: str, given: dict[str, Any]) -> int:
    """How often a program runs through its loop."""
    match kernel:
        case "states" | "outputs" | "gradients":
            return given["chunks"]
        case "scan":
            return given["segments"]
        case "chunk_fwd_kernel_h" | "chunk_bwd_kernel_dh":
            return TOKENS // given["BT"]
        case "chunk_bwd_kernel_dqkwg":
            return -(-given["V"] // given["BV"])
    return -(-given["K"] // given["BK"])


def _tensors(given: Any) -> Iterator[Tensor]:
    """Tensors in nested arguments."""
    for own in given.values() if isinstance(given, dict) else given:
        if isinstance(own, Tensor):
            yield own
        elif isinstance(own, tuple):
            yield from _tensors(own)


@cache
def _executed(binary: bytes, trips: int) -> tuple[int, int, int]:
    """Instructions of a warp that runs through its loop so often; registers and spilled bytes of a thread."""
    text = dumped(binary, "-sass")
    code = by_name(re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^/]*?)\s*;", text)).total()
    loops = [by_name(said for _, said in loop).total() for loop in loops_of(text)]
    once = code - sum(n for n in loops if 3 * n > max(loops))
    return once + trips * loop_of(text).total(), *of_a_thread(binary)


def _by_isopos(q: Tensor, k: Tensor, v: Tensor, decayed: bool) -> Tensor:
    choices = {"denominator": "none", "feature_map": "identity"}
    scheme = build("none", q.shape[-1], HEADS, choices | ({"decay": "retnet"} if decayed else {}))
    at = scheme.at(sequence(TOKENS), dtype=torch.float32)
    return linear_attention(*(x.transpose(1, 2) for x in (q, k, v)), **at, causal=True).transpose(1, 2)


def _by_fla(q: Tensor, k: Tensor, v: Tensor, decayed: bool) -> Tensor:
    os.environ["FLA_CACHE_RESULTS"] = "0"  # settings chosen here are not for a real GPU
    from fla.ops.simple_gla import chunk_simple_gla
    from fla.utils import hardware

    hardware.get_all_max_shared_mem = lambda: {0: SHARED, None: SHARED}  # tensors on the CPU have no index
    decay = torch.full((HEADS,), -0.01) if decayed else None
    return chunk_simple_gla(q, k, v, g_gamma=decay, scale=1.0)[0]


def counted(library: str, decayed: bool, d: int, arch: int = ARCH) -> list[list[Launch]]:
    """Launches of the forward and of the backward pass, in a process of their own, since fla keeps settings."""
    answers: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda *device: {90: "NVIDIA H100", 100: "NVIDIA B200"}[arch],
        "get_device_capability": lambda *device: divmod(arch, 10),
        "device_count": lambda: 1,
    }
    found = Counter(arch)
    with fake_gpu(found), mock.patch.multiple(torch.cuda, **answers):
        q, k, v = (torch.randn(BATCH, TOKENS, HEADS, d, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        out = (_by_isopos if library == "isopos" else _by_fla)(q, k, v, decayed)
        forward = found.counts[:]
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return [forward, found.counts[len(forward) :]]


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--arch", type=int, default=ARCH, choices=(90, 100))
    parser.add_argument("--launches", action="store_true", help="print each launch")
    given = parser.parse_args()
    if find_spec("fla") is None:
        parser.error("fla is not installed: pip install --no-deps fla-core einops")
    print("| decay | d | kernels of | launches | forward | backward | total | bytes | registers | spilled, bytes |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    tokens = BATCH * HEADS * TOKENS
    for decayed, d, library in [(decayed, d, own) for decayed in (False, True) for d in given.d for own in LIBRARIES]:
        with started(1) as pool:
            passes = pool.submit(counted, library, decayed, d, given.arch).result()
        forward, backward = (sum(launch.instructions for launch in launches) / tokens for launches in passes)
        both = [launch for launches in passes for launch in launches]
        each = [f"{n:,.0f}" for n in (forward, backward, forward + backward, sum(own.traffic for own in both) / tokens)]
        most = max(own.registers for own in both), max(own.spilled for own in both)
        row = ("of heads" if decayed else "none", d, library, len(both), *each, *most)
        print("|", " | ".join(map(str, row)), "|", flush=True)
        for own in both if given.launches else ():
            print(f"    {own.kernel} warps={own.warps} {own.instructions / tokens:.1f} {own.traffic / tokens:.0f}", own[4:])


if __name__ == "__main__":
    main()
