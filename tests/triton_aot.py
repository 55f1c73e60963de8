"""Ahead-of-time compilation of the Triton kernels for NVIDIA GPUs, on a machine without a GPU."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = (80, 90, 100)
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block may have (CUDA programming guide)
CONSTANT = {None: None, "1": 1}  # arguments that Triton takes for constants


class Resources(NamedTuple):
    """GPU resources of a compiled kernel."""

    shared: int  # bytes of a block
    registers: int  # of a thread
    spilled: int  # bytes of a thread in local memory


def started(count: int) -> ProcessPoolExecutor:
    """New processes in which Triton's interpreter is off."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_compile)


@cache
def compilers() -> ProcessPoolExecutor:
    """Two processes for `compiled`, which all tests share, since each imports PyTorch."""
    return started(2)


def _compile() -> None:
    """Turn Triton's interpreter off, before Triton is imported. A process first imports the script that started it."""
    assert os.environ.pop("TRITON_INTERPRET", "0") != "1" or "triton" not in sys.modules


def compiled(
    kernel: str, signature: Mapping[str, Any], constexprs: Mapping[str, Any], arch: int, **options: Any
) -> Resources:
    """Compile a kernel to a cubin, in a process that does not interpret kernels.

    Args:
        kernel: Where it is, "package.module:name".
        signature: Types by argument: "*bf16", "i32" and so on; with the suffix ":16" the address or number is a multiple of
            16. A tuple contains types of its items or fields. None stands for None, and "1" for the number 1; both are
            constants.
        constexprs: Arguments that are constants.
        arch: Compute capability, 90 for sm_90.
        options: num_warps and num_stages.
    """
    return _resources(_compiled(kernel, signature, constexprs, arch, **options))


def disassembled(
    kernel: str, signature: Mapping[str, Any], constexprs: Mapping[str, Any], arch: int, **options: Any
) -> tuple[Resources, str]:
    """Resources and machine code of a kernel, with the arguments of `compiled`."""
    found = _compiled(kernel, signature, constexprs, arch, **options)
    return _resources(found), dumped(found.asm["cubin"], "-sass")


def assembly(kernel: str, signature: Mapping[str, Any], constexprs: Mapping[str, Any], arch: int, **options: Any) -> str:
    """The PTX of a kernel, with the arguments of `compiled`."""
    return _compiled(kernel, signature, constexprs, arch, **options).asm["ptx"]


def _compiled(kernel: str, signature: Mapping[str, Any], constexprs: Mapping[str, Any], arch: int, **options: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = kernel.split(":")
    function = getattr(import_module(module), name)
    places = {argument: n for n, argument in enumerate(function.arg_names)}
    assert set(places) == {*signature, *constexprs}
    constants: dict[Any, Any] = dict(constexprs)
    hints = {}
    for argument, given in signature.items():
        for path, own in _paths(given, (places[argument],)):
            if own in CONSTANT:
                constants[path] = CONSTANT[own]
            elif own and own.endswith(":16"):
                hints[path] = [["tt.divisibility", 16]]
    types = {argument: "constexpr" if argument in constexprs else _bare(signature[argument]) for argument in places}
    source = ASTSource(function, types, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def variants(kernel: str, argument: str, numbers: Sequence[int]) -> int:
    """Number of variants of a kernel, "package.module:name", that Triton compiles for these values of an argument."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    module, name = kernel.split(":")
    function = getattr(import_module(module), name)
    bind = create_function_from_signature(function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32)))
    others = dict.fromkeys(function.arg_names)
    return len({str(bind(**others | {argument: number})[1]) for number in numbers})


def _paths(given: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str | None]]:
    """Yield the path and the type of each leaf of nested tuples."""
    if not isinstance(given, tuple):
        yield path, given
        return
    for n, part in enumerate(given):
        yield from _paths(part, (*path, n))


def _bare(given: Any) -> Any:
    """Types without their divisibility suffix."""
    if isinstance(given, tuple):
        return getattr(given, "_make", tuple)(_bare(part) for part in given)
    return "constexpr" if given in CONSTANT else given.removesuffix(":16")


def _resources(found: Any) -> Resources:
    """Shared memory of a block, and what a thread has."""
    return Resources(found.metadata.shared, *of_a_thread(found.asm["cubin"]))


def of_a_thread(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, where spills go."""
    said = dumped(cubin, "--dump-resource-usage")
    registers, stack, local = (int(found) for found in re.findall(r"\b(?:REG|STACK|LOCAL):(\d+)", said))
    return registers, stack + local


def dumped(cubin: bytes, option: str) -> str:
    """What cuobjdump prints of a cubin."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
