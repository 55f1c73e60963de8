"""Triton's kernels of rotations and of steps, compiled ahead of time: what they take of a GPU."""

import itertools

import pytest
from triton_aot import ARCHITECTURES, SHARED, compiled, compilers

pytestmark = pytest.mark.triton
SIZES, STRIDES = ("i32",) * 3, ("i32:16",) * 4
LAUNCH = {"tokens": "i32", "shared": "i32", "rows": "i32", "sizes": SIZES}
ROTATIONS = {  # pairs, features passed on, dtype, and where a pair comes from and goes to
    "rope of 128 in bf16": (64, 0, "*bf16:16", "pairs", "pairs"),
    "half layout, partly, in fp16": (24, 80, "*fp16:16", "halves", "pairs"),
    "lift of 64 in fp32": (64, 0, "*fp32:16", "alone", "halves"),
    "unlift of 60 in fp32": (60, 0, "*fp32", "halves", "alone"),
    "widest": (1024, 0, "*fp32:16", "pairs", "pairs"),
}


def power(n):
    return 1 << (max(n, 1) - 1).bit_length()


def rotations():
    """Arguments of `compiled` for each rotation, forward and back."""
    for (f, rest, dtype, here, there), kernel in itertools.product(ROTATIONS.values(), ("turn", "pull")):
        constants = {"F": f, "P": power(f), "REST": rest, "R": power(rest), "T": max(1, 1024 // power(f))}
        constants |= {"FROM": here, "TO": there, "ADJOINT": there == "alone"}
        tensors = {"x": dtype, "table": "*fp32:16", "out": dtype}
        strides = {"of_x": STRIDES, "of_table": STRIDES, "of_out": STRIDES}
        if kernel == "pull":
            tensors = {"x": dtype, "table": "*fp32:16", "grad": dtype, "grad_x": dtype, "parts": "*fp32:16"}
            strides = {name: STRIDES for name in ("of_x", "of_table", "of_grad", "of_grad_x")}
            constants["OF_X"] = True
        yield f"isopos.ops.triton_rotate:{kernel}", tensors | LAUNCH | strides, constants


def test_rotations_fit_a_gpu():
    """Nothing is spilled, and a processor holds several programs' shared memory."""
    with compilers() as pool:
        jobs = [(*job, arch) for arch in ARCHITECTURES for job in rotations()]
        for job, found in zip(jobs, pool.map(compiled, *zip(*jobs, strict=True)), strict=True):
            assert found.spilled == 0, (job, found)
            assert found.shared <= SHARED[job[-1]] // 8, (job, found)
            assert found.registers <= (192 if "OF_X" in job[2] else 128), (job, found)
