"""Whether Triton kernels may be used, and on which tensors."""

import os
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isopos.exact import constant_when_compiled, is_exporting
from isopos.ops import trust
from isopos.ops.library import PLAIN, watched

SWITCH = "ISOPOS_TRITON"
"""Environment variable. Unset: kernels run where `isopos gpu-check` has passed by the table `PASSED` of `isopos.ops.trust`.
"auto": there, and where the file of results says so. "1": there, and wherever the compilers are trusted. "any": with every
compiler. "0": never.
"""
OPERATORS = ("attention",)  # which are registered operators, that compiled code calls
INPUTS = {"attention": 3, "step": 3}  # number of tensors whose dtype matters; of other operations it is the first


@constant_when_compiled
def interpreted() -> bool:
    """Whether Triton interprets kernels on a CPU, for tests (TRITON_INTERPRET=1, read when triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reads(x: Tensor) -> bool:
    """Whether kernels can read a tensor where it is: on a CUDA device, or interpreted on a CPU."""
    return x.is_cuda or (x.is_cpu and interpreted())


@cache
def _absent() -> str:
    return "" if find_spec("triton") else "triton is not installed: pip install triton"


def _off(operation: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    """Why kernels of an operation are off for inputs of these dtypes, or ""."""
    switch = os.environ.get(SWITCH, "")
    if switch == "any":
        return ""
    if switch == "0":
        return f"{SWITCH}=0 in the environment switches it off"
    if switch not in ("", "auto", "1"):
        return f"{SWITCH} is expected to be 0, 1, any or auto, not {switch!r}"
    why = trust.unproven(operation, dtypes, device, trust.results_file() if switch == "auto" else None)
    if switch == "1":
        return why and trust.unreliable(device)
    return why and f"{why}; {SWITCH}=1 in the environment asks for it"


@constant_when_compiled
def _missing(operation: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    """Why kernels are off or not there, or ""."""
    return _off(operation, device, dtypes) or _absent()


def unreadable(operation: str, *tensors: Tensor) -> str:
    """Why no Triton kernel may read these tensors, or "": they must be plain CUDA tensors, outside transforms.

    In compiled code only operations of `OPERATORS` have kernels.

    Args:
        operation: What the kernel computes: one of `trust.OPERATIONS`, or "flex attention".
        tensors: All tensors that it reads, inputs first.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and (is_exporting() or operation not in OPERATORS):
        return "an exported program has only PyTorch's operations" if is_exporting() else "a compiler cannot trace it"
    for x in tensors:
        if not reads(x):
            return f"it runs on CUDA devices, not on {x.device.type}"
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or (not compiling and x.is_neg()):
            return "it reads plain tensors only"
        if x.device != tensors[0].device:
            return f"it reads tensors of one device, not of {tensors[0].device} and {x.device}"
    if why := _missing(operation, tensors[0].device, tuple([x.dtype for x in tensors[: INPUTS.get(operation, 1)]])):
        return why
    if not compiling and watched():
        return "a transform, a mode or a trace watches operations, and sees none of compiled code"
    return ""


def language() -> tuple[Any, Any]:
    """`triton.jit` and `triton.language` for modules of kernels; placeholders without Triton, so that modules import."""
    if _absent():
        return (lambda function, **options: function), SimpleNamespace(constexpr=lambda value: value)
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language  # pyright: ignore[reportMissingImports]

    return triton.jit, triton.language
