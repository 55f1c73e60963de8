"""Whether Triton kernels may be used, and on which tensors."""

import os
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isopos.ops import trust
from isopos.ops.library import PLAIN, watched

SWITCH = "ISOPOS_TRITON"
"""Environment variable. "1": kernels run wherever `isopos.ops.trust` trusts the compilers; "any": with every compiler;
"auto": where `isopos gpu-check` has passed, by the table of `isopos.ops.trust` and by the file of results; "0": never.
Unset: where the table says so, which is nowhere, since no GPU has run them yet.
"""
INPUTS = {"attention": 3, "step": 3}  # number of tensors whose dtype matters; of other operations it is the first


def interpreted() -> bool:
    """Whether Triton interprets kernels on a CPU, for tests (TRITON_INTERPRET=1, read when triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reads(x: Tensor) -> bool:
    """Whether kernels can read a tensor where it is: on a CUDA device, or interpreted on a CPU."""
    return x.is_cuda or (x.is_cpu and interpreted())


@cache
def _absent() -> str:
    return "" if find_spec("triton") else "triton is not installed: pip install triton"


def _off(operation: str, tensors: tuple[Tensor, ...]) -> str:
    """Why kernels of an operation are off for these tensors, or ""."""
    switch, device = os.environ.get(SWITCH, ""), tensors[0].device
    if switch == "1":
        return trust.unreliable(device)
    if switch == "any":
        return ""
    if switch not in ("", "auto", "0"):
        return f"{SWITCH} is expected to be 0, 1, any or auto, not {switch!r}"
    if switch != "0" and (switch or trust.PASSED):
        dtypes = tuple(x.dtype for x in tensors[: INPUTS.get(operation, 1)])
        why = trust.unproven(operation, dtypes, device, trust.results_file() if switch else None)
        return why and f"{why}; {SWITCH}=1 in the environment asks for it"
    return f"it has run on no GPU yet; {SWITCH}=1 in the environment asks for it"


def unreadable(operation: str, *tensors: Tensor) -> str:
    """Why no Triton kernel may read these tensors, or "": they must be plain CUDA tensors, outside transforms.

    Args:
        operation: What the kernel computes: one of `trust.OPERATIONS`, or "flex attention".
        tensors: All tensors that it reads, inputs first.
    """
    if torch.compiler.is_compiling():
        return "a compiler cannot trace it"
    for x in tensors:
        if not reads(x):
            return f"it runs on CUDA devices, not on {x.device.type}"
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or x.is_neg():
            return "it reads plain tensors only"
        if x.device != tensors[0].device:
            return f"it reads tensors of one device, not of {tensors[0].device} and {x.device}"
    if why := _off(operation, tensors):
        return why
    if watched():
        return "a transform, a mode or a trace watches operations, and sees none of compiled code"
    return _absent()


def language() -> tuple[Any, Any]:
    """`triton.jit` and `triton.language` for modules of kernels; placeholders without Triton, so that modules import."""
    if _absent():
        return (lambda function, **options: function), SimpleNamespace(constexpr=lambda value: value)
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language  # pyright: ignore[reportMissingImports]

    return triton.jit, triton.language
