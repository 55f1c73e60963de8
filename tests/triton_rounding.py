"""Emulation of tensor cores in Triton's interpreter on a CPU, for the kernels of linear attention.

    TRITON_INTERPRET=1 ISOPOS_TRITON=1 python tests/triton_rounding.py      # the table of docs/gpu.md

The interpreter multiplies float32 exactly for any requested precision, and cannot multiply bfloat16. In `tensor_cores` the
host chooses as for a GPU, and dots have the arithmetic that Triton 3.7.1 compiles for sm_80 and sm_90:

- bfloat16: operands are rounded to nearest even by the kernel, outputs by the store.
- "tf32": operands go to the cores as float32, which drop their last 13 bits.
- "tf32x3": a = a' + a", a' rounded to nearest (cvt.rna.tf32) and a" cut off by the cores; a" b' + a' b", without its NaN,
  is where a' b' starts from; a" b" is left out.

Cores add exact products in blocks and truncate: blocks are as in an A100 (Fasi et al., Numerical behavior of NVIDIA
tensor cores, PeerJ CS 2021), the shortest, and digits no more than float32 has, the fewest. Not emulated: exponentials and
quotients of a GPU, which err in the last digit or two of float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from cases import linear_options, with_gradients

from isopos.ops import gpu, linear
from isopos.ops.linear import triton
from isopos.ops.linear.chunks import CHUNKS

pytest.importorskip("triton", reason="triton is not installed: pip install 'isopos[gpu-test]'")

import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

BLOCK = {"bf16": 8, "tf32": 4}  # products that are added at once


def cut(x, like):
    """x truncated at the last float32 digit of `like`."""
    unit = np.ldexp(1.0, np.frexp(like)[1] - 24)
    return np.trunc(x / unit) * unit


def multiply(a, b, c, block):
    """c + a b of float32 ``[m k]``, ``[k n]``: blocks of exact products, aligned with the largest, added and cut off."""
    a, b, c = (x.astype(np.float64) for x in (a, b.T, c))
    with np.errstate(invalid="ignore"):
        for n in range(0, a.shape[1], block):
            terms = np.concatenate((c[..., None], a[:, None, n : n + block] * b[None, :, n : n + block]), -1)
            c = cut(terms, np.abs(terms).max(-1, keepdims=True)).sum(-1)
            c = cut(c, c)
    return c.astype(np.float32)


def upper(x, half=0):
    """The bits of float32 that TF32 has; with half=0x1000 rounded to nearest, away from zero."""
    bits = (np.ascontiguousarray(x).view(np.uint32) + np.uint32(half)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), x, bits.view(np.float32))


def tf32(a, b, c):
    """c + a b in TF32."""
    return multiply(upper(a), upper(b), c, BLOCK["tf32"])


def tf32x3(a, b, c):
    """c + a b by three products in TF32."""
    high_a, high_b = upper(a, 0x1000), upper(b, 0x1000)
    with np.errstate(invalid="ignore"):
        low_a, low_b = a - high_a, b - high_b
    small = tf32(high_a, low_b, tf32(low_a, high_b, np.zeros_like(c)))
    return tf32(high_a, high_b, np.where(np.isnan(small), 0, small)) + c


def widened(x):
    """Convert bfloat16, which the interpreter stores as bits, to float32."""
    return torch.from_numpy(np.array(x)).view(torch.bfloat16).float().numpy()


def cast(self, x, dtype):
    """The interpreter's conversions, with bfloat16 rounded to nearest even."""
    data, dtype = widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data, dtype.scalar
    if dtype == tl.bfloat16:
        narrow = torch.from_numpy(np.array(data, np.float32)).bfloat16()
        return TensorHandle(narrow.view(torch.uint16).numpy(), dtype)
    return TensorHandle(data.astype(_get_np_dtype(dtype)), dtype)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Context in which the interpreter emulates tensor cores."""
    if why := gpu.unreadable("attention", torch.empty(0)):
        raise RuntimeError(f"expected TRITON_INTERPRET=1 and ISOPOS_TRITON=1 in the environment: {why}")
    exact, operation, chosen = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op, triton._precision
    in_tf32 = {ir.INPUT_PRECISION.TF32: tf32, ir.INPUT_PRECISION.TF32x3: tf32x3}

    def dot(self, a, b, c, precision, most):
        if a.dtype.scalar == tl.bfloat16:
            return TensorHandle(multiply(widened(a.data), widened(b.data), c.data, BLOCK["bf16"]), tl.float32)
        if precision in in_tf32:
            return TensorHandle(in_tf32[precision](a.data, b.data, c.data), tl.float32)
        return exact(self, a, b, c, precision, most)

    def op(self, a, b, function):
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            raise TypeError(
                "expected float32, got an operation on bfloat16, which would be one on bits: widen it in the kernel"
            )
        return operation(self, a, b, function)

    def precision(*inputs):
        with mock.patch.object(gpu, "interpreted", return_value=False):
            return chosen(*inputs)

    patches = {"create_dot": dot, "binary_op": op, "cast_impl": cast}
    with mock.patch.multiple(InterpreterBuilder, **patches), mock.patch.object(triton, "_precision", precision):
        yield


class Case(NamedTuple):
    """Causal or other attention of one head, by its name in `linear_options`; inputs are normal, values around a mean."""

    name: str
    dtype: torch.dtype
    length: int = 300
    width: int = 64
    mean: float = 0.0
    whole: bool = False  # one segment, so that one program sums up all tokens

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {self.name}, L={self.length} d={self.width} mean {self.mean:g}"


def errors(case: Case) -> dict[str, list[tuple[float, float]]]:
    """Errors of the Triton kernels and of PyTorch's operations, compared with float64 on the same inputs of the dtype.

    One pair (see `error`) for the output, for each gradient of q, k and v, and for log decays if there are any.
    """
    draw, shape = torch.Generator().manual_seed(1), (1, 1, case.length, case.width)
    q, k, v, grad = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4))
    inputs, grad = [x.to(case.dtype) for x in (q, k, v + case.mean)], grad.to(case.dtype)
    given = linear_options(case.name, *shape)
    with mock.patch.object(linear, "BACKENDS", (CHUNKS,)):
        exact, by_torch = (with_gradients(inputs, dtype, given, grad) for dtype in (torch.float64, case.dtype))
    least = mock.patch.object(triton, "LEAST", case.length if case.whole else 2)
    with tensor_cores(), least, mock.patch.object(linear, "BACKENDS", (triton.TRITON,)):
        by_triton = with_gradients(inputs, case.dtype, given, grad)
    return {name: [*map(error, found, exact)] for name, found in (("triton", by_triton), ("torch", by_torch))}


def error(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Error relative to the norm, and largest error relative to the largest magnitude."""
    away = found.double() - exact
    return (away.norm() / exact.norm()).item(), (away.abs().max() / exact.abs().max()).item()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [Case(name, BF16) for name in ("rope", "encoded", "no denominator", "all keys, rope")]
CASES += [Case("retnet", BF16, 150), Case("lrpe-orthogonal", BF16, 150), Case("bidirectional with a decay", BF16, 100)]
CASES += [Case("rope", BF16, 150, width=128), Case("retnet", FP32, 70)]
CASES += [Case(name, dtype, 70) for dtype in (FP16, FP32) for name in ("rope", "all keys, rope")]
LONG = Case("rope", BF16, 4096, whole=True)
AWAY = [Case(*own, mean=1) for own in (("rope", BF16), ("none", BF16), ("all keys, none", BF16, 1024))]
AWAY += [Case("no denominator", BF16, 2048, mean=1, whole=True)]


def main() -> None:
    """Print errors of norms as a table in Markdown."""
    print("| inputs | attention | L | d | mean of v | output | dq, dk, dv | by PyTorch | dq, dk, dv |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in (*CASES, LONG, *AWAY):
        (out, *grads), (by_torch, *of_torch) = ([f"{own[0]:.1e}" for own in found[:4]] for found in errors(case).values())
        own = str(case.dtype).removeprefix("torch."), case.name, *map(str, case[2:4]), f"{case.mean:g}"
        print("|", " | ".join((*own, out, ", ".join(grads), by_torch, ", ".join(of_torch))), "|", flush=True)


if __name__ == "__main__":
    main()
