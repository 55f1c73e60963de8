"""Test the C kernel of other machines and compilers against the definition in float64, in an emulator if necessary."""

import ctypes
import subprocess

import pytest
import torch
from cases import ALL_KEYS, BIDIRECTIONAL, EDGES, LINEAR, as_the_table, linear_options, with_edges, with_gradients
from emulated import Emulated, absent
from test_cpu import (  # noqa: F401 - they run here with the library of this file's fixture
    test_16_bit_gradients_are_rounded_to_nearest_ties_to_even,
    test_each_weight_is_as_exact_as_float32,
    test_features_of_extreme_numbers,
)

from isopos import rope, schemes, sequence
from isopos.attention import linear_attention, naive_linear_attention
from isopos.feature_maps import COMPILED
from isopos.ops import library
from isopos.ops.rotate import lift, rotate, unlift, unrotate
from isopos.stream import Stream
from tools.sanitize import ROOT, flags

BUILDS = {
    "NEON": ("NEON", ["aarch64-linux-gnu-gcc"], ["qemu-aarch64"]),
    "SSE2": ("SSE2", ["gcc"], []),
    "SSE2 by Clang": ("SSE2", ["clang", "-Wno-unknown-pragmas"], []),
    "AVX2 by Clang": ("AVX2", ["clang", "-Wno-unknown-pragmas"], []),
}
SHAPES = [(1, 2, 131, 20, 37), (2, 1, 70, 6, 1), (1, 3, 330, 64, 48)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=BUILDS)
def built(request, tmp_path_factory):
    instructions, compiler, emulator = BUILDS[request.param]
    if missing := absent(compiler[0], *emulator):
        pytest.skip(f"{request.param} takes {missing}")
    if not emulator and instructions not in library.instructions():
        pytest.skip(f"this processor has no {instructions}")
    emulated = Emulated(instructions, compiler, emulator, tmp_path_factory.mktemp("emulated"))
    assert emulated.lanes == library.LANES[instructions]
    yield emulated
    emulated.close()


@pytest.fixture(name="each_library")
def kernel_alone(kernel):
    return kernel


@pytest.fixture
def kernel(built, monkeypatch):
    monkeypatch.setattr(library, "libraries", lambda: ({built.lanes: built}, "emulated"))
    built.calls.clear()
    return built


def test_every_problem_forward_and_backward(kernel, monkeypatch):
    for n, name in enumerate(LINEAR + BIDIRECTIONAL + ALL_KEYS):
        b, h, t, d, e = SHAPES[n % len(SHAPES)]
        given, draw = linear_options(name, b, h, t, d), torch.Generator().manual_seed(1)
        inputs = with_edges(*(torch.randn(b, h, t, width, generator=draw) for width in (d, d, e)))
        grad = torch.randn(b, h, t, e, generator=draw)
        kernel.calls.clear()
        with torch.random.fork_rng():
            ours = with_gradients(inputs, torch.float32, given, grad)
        end = "" if given["causal"] or given.get("decay") is not None else "_all"
        assert {f"forward{end}", f"backward{end}"} <= set(kernel.calls), name
        with monkeypatch.context() as off:
            off.setattr(library, "libraries", lambda: ({}, "off"))
            other = with_gradients(inputs, torch.float32, given, grad)
            define = linear_attention if "segment_ids" in given else naive_linear_attention
            exact = with_gradients(inputs, torch.float64, given, grad, define)
        for a, usual, c in zip(ours, other, exact, strict=True):
            largest = c.abs().max().clamp_min(exact[0].abs().max())
            error, allowed = ((x.double() - c).abs().max() / largest for x in (a, usual))
            assert error < 3 * allowed + 3e-6, (name, error, allowed)


def test_16_bit_numbers(kernel):
    for dtype in (torch.bfloat16, torch.float16):
        for width in (20, 37):
            draw = torch.Generator().manual_seed(1)
            inputs = [torch.randn(1, 2, 131, n, generator=draw).to(dtype) for n in (20, 20, width)]
            grad = torch.randn(1, 2, 131, width, generator=draw)
            given = rope(20, 2).at(sequence(131)) | {"causal": True}
            ours = with_gradients(inputs, dtype, given, grad)
            exact = with_gradients(inputs, torch.float64, given, grad.to(dtype), naive_linear_attention)
            for a, c in zip(ours, exact, strict=True):
                assert (a.double() - c).abs().max() < 2 * torch.finfo(dtype).eps * c.abs().max()
    assert {"forward", "backward"} <= set(kernel.calls)


def test_steps(kernel):
    for name in ("rope", "retnet", "lrpe-unitary", "permuteformer"):
        scheme, draw = schemes.REGISTRY[name](24, 3), torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(2, 3, 12, n, generator=draw) for n in (24, 24, 13))
        steps = Stream(scheme)
        kernel.calls.clear()
        with torch.no_grad():
            out = torch.cat([steps(*(x[..., i : i + 1, :] for x in (q, k, v))) for i in range(12)], -2)
        assert kernel.calls.count("step") >= 11
        exact = naive_linear_attention(*(x.double() for x in (q, k, v)), **scheme.at(sequence(12)), causal=True)
        assert (out.double() - exact).abs().max() < 1e-5 * exact.abs().max().clamp_min(1)


def test_rotations(kernel, monkeypatch):
    monkeypatch.setattr(library, "PAST", 0)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 3, 70, 24, generator=draw), torch.randn(2, 3, 70, 48, generator=draw)
    for turn, of, pairs in ((rotate, x, 12), (unrotate, x, 12), (lift, x, 24), (unlift, y, 24)):
        angle = torch.randn(3, 70, pairs, generator=draw, dtype=torch.float64)
        table = torch.stack((angle.cos(), angle.sin()), -1)
        torch.testing.assert_close(turn(of, table.float()).double(), turn(of.double(), table), rtol=1e-5, atol=1e-6)
    assert kernel.calls == ["rotate"] * 4


def test_feature_maps(kernel):
    for n, phi in enumerate(COMPILED):
        y, derivative = torch.empty_like(EDGES), torch.empty_like(EDGES)
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (EDGES, y, derivative))
        kernel.isopos_features(ctypes.c_int64(n), *pointers, ctypes.c_int64(EDGES.numel()))
        as_the_table(phi, y, derivative)


@pytest.mark.parametrize(
    "target", ["arm64-apple-macos11", "x86_64-apple-macos11", "x86_64-pc-windows-msvc", "aarch64-pc-windows-msvc"]
)
def test_clang_compiles_it_for_other_systems(target, tmp_path):
    """Compile to an object file without the system's headers, without linking and running."""
    if missing := absent("clang"):
        pytest.skip(f"it takes {missing}")
    declared = "#include <stddef.h>\nvoid *memcpy(void *, const void *, size_t);\nvoid *memset(void *, int, size_t);\n"
    (tmp_path / "string.h").write_text(declared)
    own = subprocess.check_output(["clang", "-print-resource-dir"], text=True).strip() + "/include"
    common = [
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-psabi",
        "-ffreestanding",
        "-nostdlibinc",
    ]
    for instructions in library.X86 if target.startswith("x86") else ["NEON"]:
        where = ["-isystem", str(tmp_path), "-isystem", own, "-c", "-o", str(tmp_path / "kernel.o")]
        kernel = str(ROOT / "isopos/ops/linear/cpu/kernel.c")
        command = ["clang", "-target", target, *common, *flags(instructions), *where, kernel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
