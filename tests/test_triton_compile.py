"""Test the Triton kernels compiled for each GPU generation: they fit, and spill at most the stated registers."""

import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from triton_aot import ARCHITECTURES, SHARED, compiled, compilers

from isopos.feature_maps import elu1, identity
from isopos.maps import Chain, Gather, Reflection, Rotation
from isopos.ops import gpu, triton_plan
from isopos.ops.linear import triton, triton_kernels, triton_stream
from isopos.ops.linear.features import Features, Past, Sums

pytestmark = pytest.mark.triton


class Recorder:
    """Record the arguments of kernel launches."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return Launch(self.calls, name)


class Launch:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def __getitem__(self, grid):
        return lambda *given, **constants: self.calls.append((self.name, given, constants))


def kind(x):
    """The type of an argument, and whether it is 1 or a multiple of 16."""
    if isinstance(x, tuple):
        return type(x)(*map(kind, x))
    if isinstance(x, torch.Tensor):
        name = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return f"*{(name | {torch.uint8: 'u8'})[x.dtype]}:16"
    return x if x is None else "1" if x == 1 else "i32" if x % 16 else "i32:16"


def problem(dtype, d, kinds, decay, denominator, *, causal=True, phi=elu1):
    """1,024 tokens of two heads. `decay` is whether there is one, or "segments"."""
    t, h = 1024, 2
    q, k, v = torch.zeros(3, 1, h, t, d, dtype=dtype)
    lifted = kinds[-1:] == ("lift",)
    maps = Rotation(torch.zeros(h, t, d if lifted else d // 2, 2), lifted)
    if "gather" in kinds:
        maps = Gather(torch.zeros(h, t, d, dtype=torch.uint8))
    if "reflection" in kinds:
        maps = Chain(Reflection(F.normalize(torch.ones(h, 1, d), dim=-1)), maps)
    g = torch.zeros(h, t, dtype=torch.float64) if decay else None
    own = Features(phi, maps if kinds else None, kinds, None, denominator == "plain")
    features, g = (own, own, Features(identity)), None if g is None else (g, g)
    return Sums(q, k, v, features, g, causal, denominator and "divide", segmented=decay == "segments")


def launches(monkeypatch, sums, arch, *, learned=True):
    """Launches of the forward and the backward pass; tables are `learned` or get no gradient."""
    recorder = Recorder()
    monkeypatch.setattr(triton_plan, "PLANS", {})  # of other recorders
    monkeypatch.setattr(triton, "_generation", lambda device: arch // 10)
    monkeypatch.setattr(triton, "_processors", lambda device: 132)
    monkeypatch.setattr(triton, "_kernels", lambda: recorder)
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    gathered = any("gather" in own.kinds for own in sums.features)
    needs = [True] * 5 + [learned and not gathered] * sum(len(own.tensors) for own in sums.features)
    if sums.stream is not None:
        sums, needs = triton_stream.packed(sums, 2), [*needs, True]
    out, saved = triton.TRITON.forward(sums, needs)
    triton.TRITON.backward(sums, saved, out, needs)
    return recorder.calls


def arguments(name, given, constants, arch):
    """Arguments and options of `compiled` for a recorded launch."""
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages") if option in constants}
    kernel = getattr(triton_kernels, name)
    types = dict(zip(inspect.signature(kernel.fn).parameters, map(kind, given), strict=False))
    types |= {number: "i32" for number in types.keys() & set(triton_kernels.VARYING)}
    return (f"{triton_kernels.__name__}:{name}", types, constants, arch), options


def compile_all(monkeypatch, problems, arch):
    """Resources of each kernel of some problems, by kernel and problem."""
    jobs, found, known = {}, {}, {}
    pool = compilers()
    for key, sums in problems.items():
        for n, (name, given, constants) in enumerate(launches(monkeypatch, sums, arch)):
            job, options = arguments(name, given, constants, arch)
            if (same := repr((job, options))) not in known:  # several launches are one kernel
                known[same] = pool.submit(compiled, *job, **options)
            jobs[(key, name, n)] = known[same]
    for key, job in jobs.items():
        found[key] = job.result()
    return found


SPILLED = {torch.bfloat16: 640, torch.float32: 128, torch.float16: 64}  # bytes of a thread at most; of 255 registers
FORMS = {  # decay, denominator, causal, features
    "plain": (False, "plain", True, elu1),
    "decay": (True, "plain", True, elu1),
    "all keys": (False, "plain", False, elu1),
    "light": (False, None, True, identity),
    "light with a decay": (True, None, True, identity),
}
WIDEST = [  # of each dtype and form, and bfloat16 at common widths
    (torch.bfloat16, 64, "plain"),
    (torch.bfloat16, 128, "plain"),
    (torch.bfloat16, 256, "plain"),
    (torch.float32, 256, "plain"),
    (torch.float16, 256, "plain"),
    (torch.bfloat16, 128, "decay"),
    (torch.bfloat16, 128, "all keys"),
    (torch.float32, 256, "all keys"),
    (torch.bfloat16, 128, "light"),
    (torch.bfloat16, 128, "light with a decay"),
]
NARROWER = [
    (torch.bfloat16, 32, "plain"),
    (torch.float32, 64, "plain"),
    (torch.float32, 128, "plain"),
    (torch.bfloat16, 64, "decay"),
    (torch.bfloat16, 64, "light"),
    (torch.bfloat16, 64, "light with a decay"),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_fit(monkeypatch, arch):
    """Rotary attention fits into shared memory and spills few registers. Narrower ones are compiled for H100s alone."""
    problems = {}
    for dtype, d, form in WIDEST + (NARROWER if arch == 90 else []):
        decay, denominator, causal, phi = FORMS[form]
        problems[dtype, d, form] = problem(dtype, d, ("rotation",), decay, denominator, causal=causal, phi=phi)
    found = compile_all(monkeypatch, problems, arch)
    for key in problems:  # in two launches or more where features are wide
        names = {"states", "outputs", "gradients"}
        names |= (set() if key[2] == "all keys" else {"scan"}) | (set() if "light" in key[2] else {"quotients"})
        assert {name for own, name, _ in found if own == key} == names
    for key, used in found.items():
        assert used.shared <= SHARED[arch], (key, used)
        assert used.spilled <= SPILLED[key[0][0]], (key, used)


def test_a_stream_compiles(monkeypatch):
    sums = problem(torch.bfloat16, 32, ("lift",), True, "plain")
    stream = Past((torch.zeros(1, 2, 64, 32), torch.zeros(1, 2, 32, 1)), torch.zeros(1, 2, dtype=torch.float64))
    found = compile_all(monkeypatch, {"stream": replace(sums, stream=stream)}, 90)
    assert [name for _, name, _ in found].count("scan") == 2
    for key, used in found.items():
        assert used.shared <= SHARED[90], (key, used)
        assert used.spilled <= SPILLED[torch.bfloat16], (key, used)


@pytest.mark.parametrize("kinds", [("lift",), ("gather",), ("reflection", "rotation"), ("reflection", "gather")], ids=str)
def test_every_kind_compiles(monkeypatch, kinds):
    """Causal with decays, and over all keys."""
    problems = {
        torch.float16: problem(torch.float16, 32, kinds, True, "plain"),
        torch.bfloat16: problem(torch.bfloat16, 64, kinds, False, "plain", causal=False),
    }
    for (dtype, *own), used in compile_all(monkeypatch, problems, 90).items():
        assert used.shared <= SHARED[90], (dtype, own, used)
        assert used.spilled <= SPILLED[dtype], (dtype, own, used)


REFLECTED = {(torch.bfloat16, 128): 640, (torch.bfloat16, 256): 1024, (torch.float32, 128): 1152}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reflections_of_wide_features_fit(monkeypatch, arch):
    """A program has all features of a reflection, so it spills more registers than others."""
    served = [(dtype, d) for dtype, d in REFLECTED if arch >= 90 or d <= triton.REFLECTED]
    problems = {own: problem(*own, ("reflection", "rotation"), False, "plain") for own in served}
    for (own, *launch), used in compile_all(monkeypatch, problems, arch).items():
        assert used.shared <= SHARED[arch], (own, launch, used)
        assert used.spilled <= REFLECTED[own], (own, launch, used)
