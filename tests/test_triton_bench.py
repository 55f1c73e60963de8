"""Test the benchmarks of the Triton kernels at small sizes, interpreted on a CPU or on a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import races as others
from benchmarks.peers import PEERS
from isopos.lab import timing
from isopos.lab.bench import ceilings, gpu, processes, races
from isopos.ops import gpu as gate
from isopos.ops import triton_rotate
from isopos.ops.linear import triton, triton_step_kernel

DEVICE = "cpu:0" if gate.interpreted() else "cuda"  # the former takes the GPU's way
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is here, and TRITON_INTERPRET=1 is not set"
    ),
]
SHAPE = races.Shape(12, batch=1, heads=1, head_dim=16)
KERNELS = {
    "attention": (triton.Triton, "backward"),
    "rotary": (triton_rotate, "rotate"),
    "decode": (triton_step_kernel, "step"),
}


def small(contest):
    return replace(contest, shape=SHAPE._replace(length=min(SHAPE.length, contest.shape.length)))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Run each workload once, with the workloads of other libraries registered."""
    monkeypatch.setattr(races, "PEERS", PEERS)
    monkeypatch.setattr(timing, "_calls", lambda *_: (1, 0))
    monkeypatch.setitem(ceilings.MATRIX_SIZES, "cpu", 64)


@pytest.mark.parametrize(("known", "section"), [(known, section) for known in (gpu.RACES, others.GPU) for section in known])
def test_every_race_runs(known, section, monkeypatch):
    contests = {(contest.passing, *contest.pairs): small(contest) for contest in known[section]}
    monkeypatch.setitem(gpu.RACES, section, [*contests.values()])
    owner, name = KERNELS[section]
    kernel, calls = getattr(owner, name), []
    found = Spy(kernel, calls)
    monkeypatch.setattr(owner, name, found if section == "decode" else lambda *a, **b: calls.append(1) or kernel(*a, **b))
    rows = list(processes.section(section, 1, device=DEVICE))
    pairs = [pair for contest in contests.values() for pair in contest.pairs.items()]
    assert [(row.baseline, row.goal) for row in rows] == [(other, goal) for (_, other), goal in pairs]
    excused = [*PEERS] if gate.interpreted() else []  # fla's kernels cannot be interpreted in bfloat16
    assert not [row.note for row in rows if not (row.raced or row.baseline in excused or "is not installed" in row.note)]
    assert calls


class Spy:
    """A kernel that counts its launches."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        self.calls.append(grid)
        return self.kernel[grid]


def test_what_memory_does_not_do_for_is_a_row_that_says_so(monkeypatch):
    def greedy(shape):
        if DEVICE == "cuda":
            return lambda q, k: torch.empty(1 << 50, dtype=torch.uint8)
        return fail

    def fail(q, k):
        raise torch.OutOfMemoryError("as a GPU says it")

    monkeypatch.setitem(races.WORKLOADS, "two clones", greedy)
    contest = replace(small(gpu.ROTARY[0]), pairs={races.CLONES: None, ("rotation", "rotate-half"): None})
    rows = list(races.race("rotary", contest, 1, DEVICE, torch.bfloat16))
    assert [(row.raced, row.note) for row in rows] == [(False, "two clones: out of memory"), (True, "")]


PAIRS = {pair for contests in others.GPU.values() for contest in contests for pair in contest.pairs}


@pytest.mark.parametrize(("ours", "other"), sorted(PAIRS))
def test_peers_compute_the_same(ours, other):
    """Compare all gradients, in a dtype that the interpreter rounds correctly."""
    if why := PEERS[other].absence():
        pytest.skip(why)
    dtype = torch.float32 if gate.interpreted() else torch.bfloat16
    kind = "rotary" if ours == "rotation" else "attention"
    with torch.device(DEVICE):
        inputs = races._inputs(kind, SHAPE, races.BOTH, dtype, tokens_first=True)
        grads = races._grads(kind, inputs)
        found = [races._one_pass(name, SHAPE, races.BOTH, inputs, grads)() for name in (ours, other)]
        outs = [races.workload_of(name, SHAPE, dtype)(*inputs) for name in (ours, other)]
    outs = outs if kind == "rotary" else [[out] for out in outs]
    for own, theirs in zip((*found[0], *outs[0]), (*found[1], *outs[1]), strict=True):
        error = (own.double() - theirs.double()).abs().max() / own.double().abs().max()
        assert error < math.sqrt(torch.finfo(dtype).eps) / (1 if dtype == torch.bfloat16 else 100)
