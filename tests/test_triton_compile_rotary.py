"""Test GPU resources of the Triton kernels for rotations and decoding steps, compiled ahead of time."""

import itertools
import re

import pytest
from triton_aot import ARCHITECTURES, SHARED, assembly, compiled, compilers, variants

from isopos.ops.linear.triton_step import StepSide

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


STEPS = {  # features, values, dtype, side, sums of phi's own features, decays
    "rope": (64, 64, "*bf16:16", "rotation", True, False),
    "retnet of 128": (128, 128, "*bf16:16", "rotation", False, True),
    "householder, then lift": (60, 50, "*fp32", "lift", True, False),
    "permutation of 256": (256, 256, "*fp16:16", "gather", False, False),
}


def power(n):
    return 1 << (max(n, 1) - 1).bit_length()


def rotations():
    """Arguments of `compiled` for each rotation, forward and back."""
    kernels = "rotation_kernel", "rotation_vjp_kernel"
    for (f, rest, dtype, here, there), kernel in itertools.product(ROTATIONS.values(), kernels):
        constants = {"F": f, "P": power(f), "REST": rest, "R": power(rest), "T": max(1, 1024 // power(f))}
        constants |= {"FROM": here, "TO": there, "ADJOINT": there == "alone"}
        tensors = {"x": dtype, "table": "*fp32:16", "out": dtype}
        strides = {"of_x": STRIDES, "of_table": STRIDES, "of_out": STRIDES}
        if kernel == "rotation_vjp_kernel":
            tensors = {"x": dtype, "table": "*fp32:16", "grad": dtype, "grad_x": dtype, "parts": "*fp32:16"}
            strides = {name: STRIDES for name in ("of_x", "of_table", "of_grad", "of_grad_x")}
            constants["OF_X"] = True
        yield f"isopos.ops.triton_rotate:{kernel}", tensors | LAUNCH | strides, constants


def test_rotations_fit_a_gpu():
    """No registers are spilled, and the shared memory of several programs fits on one multiprocessor."""
    pool = compilers()
    jobs = [(*job, arch) for arch in ARCHITECTURES for job in rotations()]
    for job, found in zip(jobs, pool.map(compiled, *zip(*jobs, strict=True)), strict=True):
        assert found.spilled == 0, (job, found)
        assert found.shared <= SHARED[job[-1]] // 8, (job, found)
        assert found.registers <= (192 if "OF_X" in job[2] else 128), (job, found)


def steps(cases=STEPS):
    """Arguments of `compiled` for each step."""
    for w, e, dtype, kind, own, decays in cases.values():
        d, whole, half = w * (1 + (kind == "lift")), "i32:16", kind == "lift"
        places = (whole,) * 3
        table = "*u8:16" if kind == "gather" else "*fp32:16"
        side = StepSide(dtype, table, "*fp32:16" if half else None, None, places, places, places, places)
        plain = side._replace(table=None, normal=None, mask="*u8" if half else None, of_mask=("1", whole, whole))
        sums, rows = "*fp32:16", "*fp32:16"
        signature = {"q": side, "k": side, "v": plain, "before": (sums, rows), "after": (sums, rows), "out": dtype}
        signature |= {"weights": "*fp32:16" if decays else None, "denominators": None}
        signature |= {"heads": "i32", "rows": "*i32:16", "length": "i32", "across": "i32"}
        way = ("elu+1", kind, half, False)
        constants = {"D": d, "W": w, "WP": power(w), "E": e, "EP": power(e), "C": min(power(d), 2048 // power(e))}
        constants |= {"OF_Q": way, "OF_K": way, "OF_V": ("identity", "none", False, half), "DECAYS": decays}
        constants |= {"DENOMINATED": True, "UNROTATED": own, "COUNTED": False}
        yield "isopos.ops.linear.triton_step_kernel:step", signature, constants


def test_steps_fit_a_gpu():
    """Sums go from memory to registers and back, without spills."""
    pool = compilers()
    jobs = [(*job, arch) for arch in ARCHITECTURES for job in steps()]
    for job, found in zip(jobs, pool.map(compiled, *zip(*jobs, strict=True)), strict=True):
        assert found.spilled == 0, (job, found)
        assert found.shared <= SHARED[job[-1]] // 8, (job, found)
        assert found.registers <= 160, (job, found)


SMALL_STEPS = {  # of fewer numbers than a program has threads: several warps load what one of them stores
    "a column beside the sums": (8, 8, "*fp32:16", "rotation", False, True),
    "sums of phi's own features": (8, 8, "*fp32:16", "rotation", True, False),
    "a column, in two blocks": (64, 64, "*bf16:16", "rotation", False, False),
}


def test_a_barrier_stands_between_loads_and_stores_of_steps():
    """Sums are updated in place. A warp must not load a sum that another warp has already stored."""
    pool = compilers()
    jobs = [(*job, 90) for job in steps(STEPS | SMALL_STEPS)]
    for job, text in zip(jobs, pool.map(assembly, *zip(*jobs, strict=True)), strict=True):
        order = re.findall(r"\b(ld\.global|st\.global|bar\.sync)", text)
        assert {"ld.global", "st.global"} <= set(order)
        unordered = re.search(r"ld\.global (st\.global )+", " ".join(order) + " ")
        assert unordered is None, (job, order)


def test_what_changes_from_call_to_call_compiles_nothing_again():
    own = {"isopos.ops.linear.triton_step_kernel:step": ("length", "across")}
    own |= {
        f"isopos.ops.triton_rotate:{kernel}": ("tokens", "shared", "rows")
        for kernel in ("rotation_kernel", "rotation_vjp_kernel")
    }
    pool = compilers()
    for kernel, arguments in own.items():
        for argument in arguments:
            assert pool.submit(variants, kernel, argument, (0, 1, 2, 16)).result() == 1, (kernel, argument)
    assert pool.submit(variants, "isopos.ops.linear.triton_step_kernel:step", "heads", (1, 2, 16)).result() == 3
