"""Test that calls with a plan return what calls without one return, and that a plan serves only calls like the first."""

import threading

import pytest
import torch
from cases import each, linear_options

from isopos import schemes
from isopos.attention import linear as functions
from isopos.attention import linear_attention, plans
from isopos.ops import library
from isopos.ops.linear import Clamped, cpu_plan
from isopos.positions import sequence

pytestmark = pytest.mark.skipif(not library.libraries()[0], reason=f"compiled sums: {library.libraries()[1]}")
NAMES = ["none", "rope", "retnet", "lrpe-unitary", "lrpe-orthogonal", "permuteformer", "drawn decay, plain", "identity"]
NAMES += ["decays of queries and keys", "all keys, rope", "all keys, no denominator", "encoded", "relu2"]


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Calls of plans, none of which exist at the start."""
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(plans, "_ordered", ())
    found, call = [], cpu_plan.CpuPlan.__call__
    monkeypatch.setattr(cpu_plan.CpuPlan, "__call__", lambda *a: found.append(1) or call(*a))
    return found


def unplanned(monkeypatch, run):
    with monkeypatch.context() as off:
        off.setattr(functions, "planned", lambda *arguments: None)
        return run()


def inputs_of(*shape, dtype=torch.float32):
    return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)], torch.randn(shape).to(dtype)


def same(ours, other):
    return all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@each("name", NAMES)
@each("shape", [(2, 3, 130, 32), (3, 70, 20), (1, 1, 300, 16)])
def test_equals_calls_without_a_plan_bit_for_bit(monkeypatch, runs, name, shape):
    runs.clear()
    b, (h, t, d) = 1, shape[-3:]
    if shape[0] == 1 and name in ("permuteformer", "lrpe-orthogonal"):
        return  # these need several heads, or other sizes
    given = linear_options(name, b, h, t, d)
    for dtype in (torch.float32, torch.bfloat16):
        inputs, grad = inputs_of(*shape, dtype=dtype)

        def run(inputs=inputs, grad=grad):
            out = linear_attention(*inputs, **given)
            return out, *torch.autograd.grad(out, inputs, grad)

        expected = unplanned(monkeypatch, run)
        assert not runs
        assert same(run(), expected)
        assert same(run(), expected)
        with torch.no_grad():
            assert torch.equal(linear_attention(*inputs, **given), expected[0])
        assert len(runs) == 3
        runs.clear()


def test_features_without_a_closed_form_have_no_plan(runs):
    scheme = schemes.REGISTRY["lrpe-unitary"](16, 4, learned_basis=True)
    (q, k, v), _ = inputs_of(4, 20, 16)  # heads, without a batch
    given = scheme.at(sequence(20)) | {"causal": True}
    out = linear_attention(q, k, v, **given)
    torch.testing.assert_close(out, linear_attention(*(x.double() for x in (q, k, v)), **given).float())
    assert not runs


def test_learned_tables_and_other_layouts(monkeypatch, runs):
    scheme = schemes.REGISTRY["lrpe-unitary"](16, 4)
    learned = [parameter for parameter in scheme.parameters() if parameter.requires_grad]
    whole, grad = torch.randn(3, 2, 100, 4, 16, requires_grad=True), torch.randn(2, 100, 4, 16).transpose(1, 2)

    def run():
        out = linear_attention(*whole.transpose(-3, -2), **scheme.at(sequence(100)), causal=True)
        return out, *torch.autograd.grad(out, (whole, *learned), grad)

    assert learned
    assert same(unplanned(monkeypatch, run), run())
    assert len(runs) == 1


def test_checks_hold_after_a_plan(runs):
    (q, k, v), _ = inputs_of(1, 2, 50, 16)
    given = linear_options("drawn decay, plain", 1, 2, 50, 16)
    for _ in range(2):
        linear_attention(q, k, v, **given)
    rises = given["decay"].clone()
    rises[:, 7] = 0.5
    with pytest.raises(ValueError, match="do not increase"):
        linear_attention(q, k, v, **given | {"decay": rises})
    given["decay"][:, 7] = 0.5  # in place, after a check
    with pytest.raises(ValueError, match="do not increase"):
        linear_attention(q, k, v, **given)
    given = linear_options("rope", 1, 2, 50, 16)
    linear_attention(q, k, v, **given)
    with pytest.raises(ValueError, match="expected 50 tokens"):
        linear_attention(*(x[:, :, :40] for x in (q, k, v)), **given)
    with pytest.raises(ValueError, match="denominator"):
        linear_attention(q, k, v, **given | {"denominator": "own"})
    with pytest.raises(ValueError, match=r"v: expected torch.float32"):
        linear_attention(q, k, v.double(), **given)
    assert len(runs) == 3


def test_contains_what_is_not_finite_and_counts_small_denominators(monkeypatch, runs):
    (q, k, v), grad = inputs_of(1, 2, 80, 16)
    bad = torch.where(torch.arange(80)[:, None] == 40, torch.nan, v.detach())

    def run():
        out = linear_attention(q, k, bad, causal=True)
        return out.nan_to_num(7.0), *(x.nan_to_num(7.0) for x in torch.autograd.grad(out, (q, k), grad))

    assert same(unplanned(monkeypatch, run), run())
    assert bool(run()[0][..., :40, :].isfinite().all())
    assert runs
    counts = []
    for _ in range(2):
        with Clamped() as clamped:
            linear_attention(q, torch.zeros_like(k), v, causal=True)
        counts.append((clamped.count, clamped.total))
    assert counts == [(160, 160)] * 2


def test_saved_tensors_may_come_back_in_another_layout(monkeypatch):
    inputs, grad = inputs_of(2, 2, 70, 16)
    for name in ("rope", "no denominator", "all keys, rope"):
        given = linear_options(name, 2, 2, 70, 16)
        expected = torch.autograd.grad(linear_attention(*inputs, **given), inputs, grad)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: x if x.ndim < 4 else x.transpose(-1, -2).contiguous().transpose(-1, -2)
        ):
            out = linear_attention(*inputs, **given)
        for ours, other in zip(torch.autograd.grad(out, inputs, grad), expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(linear_attention(*inputs, **given), inputs, grad, create_graph=True)


def test_plans_go_with_their_library_and_do_not_accumulate(monkeypatch, runs):
    (q, k, v), _ = inputs_of(1, 1, 30, 8)
    linear_attention(q, k, v, causal=True)
    with monkeypatch.context() as off:
        off.setattr(library, "libraries", lambda: ({}, "off"))
        linear_attention(q, k, v, causal=True)
    assert len(runs) == 1
    monkeypatch.setattr(plans, "MOST", 3)
    for t in range(1, 10):
        linear_attention(*(x[:, :, :t] for x in (q, k, v)), causal=True)
    assert len(plans._PLANS) <= 3


def test_threads_share_plans():
    given, calls = linear_options("rope", 1, 2, 200, 32), [inputs_of(1, 2, 200, 32) for _ in range(4)]

    def run(call):
        inputs, grad = call
        out = linear_attention(*inputs, **given)
        return out, *torch.autograd.grad(out, inputs, grad)

    expected, wrong = [run(call) for call in calls], []

    def work(n):
        wrong.extend(n for _ in range(50) if not same(run(calls[n]), expected[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
