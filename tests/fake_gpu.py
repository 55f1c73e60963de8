"""A stand-in for a GPU, of sm_90 unless told: launches of Triton's kernels are compiled and counted, but not run.

Everything of a call runs except the kernels and the C code of launches: isopos, Triton's specialisation, its compiler and
ptxas. Tensors are on the CPU, and outputs are whatever memory holds. It needs a process without Triton's interpreter
(`triton_aot.started`). `python tests/fake_gpu.py` prints the time of calls in Python.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from isopos import linear_attention, sequence
from isopos.ops import gpu, triton_rotate
from isopos.ops.linear import containment, triton_kernels, triton_step_kernel
from isopos.ops.linear import triton as linear
from isopos.ops.rotate import rotate_on_gpu
from isopos.schemes import build
from isopos.stream import Stream

ARCH, PROCESSORS, SHARED = 90, 132, 227 << 10
KERNELS = [
    x
    for module in (triton_rotate, triton_kernels, triton_step_kernel)
    for x in vars(module).values()
    if hasattr(x, "device_caches")
]


class Gpu:
    """Counts of launches.

    Attributes:
        arch: Compute capability, 90 for sm_90.
        launches: Names of the kernels in the order of their launches; only of compiled kernels.
        variants: Names of kernels by the key of each variant that Triton asked for.
    """

    def __init__(self, arch: int = ARCH):
        self.arch = arch
        self.launches: list[str] = []
        self.variants: dict[str, str] = {}

    def driver(self) -> Any:
        """The driver that Triton asks."""
        from triton.backends.compiler import GPUTarget

        return SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", self.arch, 32),
            launcher_cls=self._launcher,
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": SHARED, "multiprocessor_count": PROCESSORS},
                load_binary=lambda name, binary, *rest: (name, binary, 0, 0, 1024),  # module, function, ..., threads
            ),
        )

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: self.launches.append(metadata.name)

    def assembly(self) -> list[tuple[str, str]]:
        """Name and PTX of each compiled variant."""
        found = [variant for kernel in KERNELS for caches in kernel.device_caches.values() for variant in caches[0].values()]
        return [(variant.metadata.name, variant.asm["ptx"]) for variant in found]

    def since(self, call: Callable[[], Any]) -> list[str]:
        """The launches of a call."""
        before = len(self.launches)
        call()
        return self.launches[before:]


@contextmanager
def fake_gpu(found: Gpu | None = None, *, compiles: bool = True) -> Iterator[Gpu]:
    """A GPU to which tensors on the CPU belong, with kernels on. Without `compiles` variants are counted alone."""
    from triton import knobs
    from triton.runtime import driver

    assert not gpu.interpreted()
    found, before = found or Gpu(), driver._active

    def compiling(*given: Any, fn: Any, key: str, **more: Any) -> bool:
        found.variants[key] = fn.name.rpartition(".")[2]
        return not compiles  # True: the caller takes care of it

    there = mock.patch.multiple
    patches: list[Any] = [mock.patch.dict(os.environ, {gpu.SWITCH: "1"}), there(knobs.runtime, jit_cache_hook=compiling)]
    patches += [there(gpu, reads=lambda x: True)]
    patches += [there(linear, _processors=lambda device: PROCESSORS, _generation=lambda device: found.arch // 10)]
    patches += [there(containment, may_inspect=lambda x: False)]  # as for the numbers of a GPU
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for kernel in KERNELS:
            kernel.device_caches.clear()
        driver.set_active(found.driver())
        try:
            yield found
        finally:
            driver._active = before
            for kernel in KERNELS:
                kernel.device_caches.clear()


def attention(name: str, t: int, *, b: int = 2, h: int = 4, d: int = 64, **options: Any) -> tuple[Callable, Callable]:
    """A forward call of linear attention in bfloat16, and one of its gradients given its result."""
    scheme = build(name, d, h, {"denominator": "plain", **options})
    q, k, v = (x.requires_grad_() for x in torch.randn(3, b, h, t, d, dtype=torch.bfloat16).unbind())
    at, grad = scheme.at(sequence(t), dtype=torch.float32), torch.randn(b, h, t, d, dtype=torch.bfloat16)
    return lambda: linear_attention(q, k, v, **at, causal=True), lambda out: torch.autograd.grad(out, (q, k, v), grad)


def steps(name: str, *, b: int = 2, h: int = 4, d: int = 64) -> Callable:
    """A call for the next token of a stream."""
    stream, content = Stream(build(name, d, h, {})), torch.randn(3, b, h, 1, d, dtype=torch.bfloat16).unbind()
    return torch.no_grad()(lambda: stream(*content))


def rotation(t: int, *, b: int = 2, h: int = 4, d: int = 64) -> tuple[Callable, Callable]:
    """A rotation and its gradients."""
    x, table = torch.randn(b, h, t, d, requires_grad=True), torch.randn(1, t, d // 2, 2, requires_grad=True)
    grad = torch.randn(x.shape)
    return lambda: rotate_on_gpu(x, table), lambda out: torch.autograd.grad(out, (x, table), grad)


def microseconds(forward: Callable, backward: Callable | None = None, *, rounds: int = 300) -> list[float]:
    """Median times of calls that have been compiled, on a processor's clock, which other processes do not stretch."""
    found: list[tuple[float, ...]] = []
    for _ in range(rounds):
        start = time.process_time()
        out = forward()
        middle = time.process_time()
        if backward is not None:
            backward(out)
        found.append((middle - start, time.process_time() - middle))
    return [1e6 * median(times) for times in zip(*found[rounds // 10 :], strict=True)]


def main() -> None:
    """Print times in Python of calls around launches."""
    torch.set_num_threads(1)
    cases: dict[str, Any] = {
        f"{name}, t={t}": attention(name, t, b=1, h=2) for name in ("none", "rope", "retnet") for t in (64, 1024)
    }
    cases |= {"rotation": rotation(64), "step, rope": (steps("rope"),), "step, retnet": (steps("retnet"),)}
    with fake_gpu():
        for name, case in cases.items():
            forward, backward = microseconds(*case)
            print(f"{name:16} forward {forward:6.1f} us  backward {backward:6.1f} us")


if __name__ == "__main__":
    main()
