"""Triton's kernels compiled ahead of time for each generation of GPUs: they fit, and spill no more than said."""

import pytest
import torch
import torch.nn.functional as F
from triton_aot import ARCHITECTURES, SHARED, compiled, compilers

from isopos.feature_maps import elu1, identity
from isopos.maps import Chain, Reflection, Rotation
from isopos.ops import gpu
from isopos.ops.linear import triton
from isopos.ops.linear.features import Features, Sums

pytest.importorskip("triton", reason="pip install triton")


class Recorder:
    """Kernels that write down how they are called."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return Launch(self.calls, name)


class Launch:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def __getitem__(self, grid):
        return lambda *given, **constants: self.calls.append((self.name, grid, given, constants))


def kind(x):
    """The type of an argument, and whether it is a multiple of 16."""
    if isinstance(x, tuple):
        return type(x)(*map(kind, x))
    if isinstance(x, torch.Tensor):
        name = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return f"*{(name | {torch.uint8: 'u8', torch.int64: 'i64'})[x.dtype]}:16"
    return x if x is None else "i32" if x % 16 else "i32:16"


def problem(dtype, d, kinds, decay, denominator):
    """2,048 tokens of two heads, whose tables are learned."""
    t, h = 1024, 2
    q, k, v = torch.zeros(3, 1, h, t, d, dtype=dtype)
    lifted = kinds[-1:] == ("lift",)
    maps = Rotation(torch.zeros(h, t, d if lifted else d // 2, 2), lifted) if kinds else None
    if "reflection" in kinds:
        maps = Chain(Reflection(F.normalize(torch.ones(h, 1, d), dim=-1)), maps)
    g = torch.zeros(h, t, dtype=torch.float64) if decay else None
    own = Features(elu1 if denominator else identity, maps, kinds, None, denominator == "plain")
    form = "divide" if denominator else None
    return Sums(q, k, v, (own, own, Features(identity)), None if g is None else (g, g), True, form)


def launches(monkeypatch, sums):
    """What the forward and the backward pass would launch."""
    recorder = Recorder()
    monkeypatch.setattr(triton, "_kernels", lambda: recorder)
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    needs = [True] * (5 + sum(len(own.tensors) for own in sums.features))
    out, saved = triton.TRITON.forward(sums, needs)
    triton.TRITON.backward(sums, saved, out, needs)
    return recorder.calls


def compile_all(pool, calls, arch):
    import inspect

    from isopos.ops.linear import triton_kernels

    jobs = []
    for name, _, given, constants in calls:
        constants = dict(constants)
        options = {option: constants.pop(option) for option in ("num_warps", "num_stages") if option in constants}
        function = getattr(triton_kernels, name)
        arguments = list(inspect.signature(getattr(function, "fn", function)).parameters)
        signature = dict(zip(arguments, map(kind, given), strict=False))
        job = pool.submit(compiled, f"isopos.ops.linear.triton_kernels:{name}", signature, constants, arch, **options)
        jobs.append((name, options, job))
    return jobs
