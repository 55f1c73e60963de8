"""Whether Triton kernels may be used, and on which tensors."""

import os
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isopos.ops.library import PLAIN, watched

SWITCH = "ISOPOS_TRITON"  # environment variable; the kernels are off by default, since no GPU has run them yet


def interpreted() -> bool:
    """Whether Triton interprets kernels on a CPU, for tests (TRITON_INTERPRET=1, read when triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _absent() -> str:
    return "" if find_spec("triton") else "triton is not installed: pip install triton"


def unreadable(*tensors: Tensor) -> str:
    """Why no Triton kernel may read these tensors, or "": they must be plain CUDA tensors, outside transforms."""
    if torch.compiler.is_compiling():
        return "a compiler cannot trace it"
    for x in tensors:
        if not (x.is_cuda or (x.is_cpu and interpreted())):
            return f"it runs on CUDA devices, not on {x.device.type}"
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or x.is_neg():
            return "it reads plain tensors only"
        if x.device != tensors[0].device:
            return f"it reads tensors of one device, not of {tensors[0].device} and {x.device}"
    if os.environ.get(SWITCH) != "1":
        return f"it has run on no GPU yet; {SWITCH}=1 in the environment asks for it"
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
