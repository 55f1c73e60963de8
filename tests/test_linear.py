"""Test the fast sums of `isopos.ops.linear` against the definition of linear attention."""

import gc
import math
import re
import weakref

import pytest
import torch
from cases import close, each, gradients, named, with_edges
from torch.autograd import gradcheck

from isopos.attention import reference
from isopos.feature_maps import FeatureMap, elu1, identity
from isopos.maps import Chain, Gather, Reflection, Rotation, Scaling, TokenMap, axes
from isopos.ops import linear as ops
from isopos.ops.linear import scan
from isopos.ops.linear.autograd import Backend
from isopos.ops.linear.division import clamp
from isopos.ops.linear.features import ALL_READY, READY, Features
from isopos.ops.linear.graph import GRAPH

N = (2, 3)  # batch, heads


def tensors(t, s=None, d=4, e=3, decay=None, n=N):
    """q, k, v and a non-increasing log decay for the longer of both sides, float64 with gradients."""
    s = t if s is None else s
    leaves = with_edges(*(torch.randn(*n, *shape, dtype=torch.float64) for shape in ((t, d), (s, d), (s, e))))
    if decay is not None:
        leaves.append(-decay * torch.rand(*n, max(t, s), dtype=torch.float64).cumsum(-1))
    return [x.requires_grad_() for x in leaves]


def decays(g, t, s):
    """Log decays of queries and keys with the last tokens aligned, or None without g."""
    return (g[0][..., max(t, s) - t :], g[0][..., max(t, s) - s :]) if g else None


class Rows(TokenMap):
    """Features times numbers, one or two per token: a map without a closed form and an adjoint."""

    first: torch.Tensor = axes("t 1")
    second: torch.Tensor | None = axes("t 1", default=None)

    def apply(self, x):
        parts = (part[: x.shape[-2]] for part in (self.first, self.second) if part is not None)  # PLACES has any length
        return x * math.prod(parts)


def rows(*tensors, unrotated=False, phi=identity):
    return Features(phi, Rows(*tensors), None, unrotated=unrotated)


PLACES = torch.arange(1, 1000, dtype=torch.float64)[:, None].cos()
POSITIVE = FeatureMap("positive", torch.exp)
by_place, positive, twice = rows(PLACES), Features(POSITIVE), rows(PLACES, unrotated=True, phi=POSITIVE)
swap = Gather(torch.tensor([[[2, 0, 1, 3]]]), constant=True)
mirror = Reflection(torch.tensor([[[0.6, 0.0, 0.8, 0.0]]], dtype=torch.float64))
closed = Features(elu1, Chain(mirror, swap), ("reflection", "gather"), unrotated=True)
FEATURES = {  # and what becomes of the denominator
    "sum": (ALL_READY, None),
    "places": ((by_place, by_place, by_place), None),
    "encoded": ((positive, positive, READY), "divide"),
    "plain": ((twice, twice, READY), "divide"),
    "closed": ((closed, closed, READY), "divide"),
    "column": ((twice, twice, READY), "column"),
    "ready-column": (ALL_READY, "column"),
}


@pytest.fixture
def small(monkeypatch):
    """Split the sums into several chunk groups of one head each."""
    monkeypatch.setattr(scan, "GROUP", 1)
    monkeypatch.setattr(scan, "LEAST", 2)
    monkeypatch.setattr(scan, "MOST", 2)


def total(sums, fuse):
    return ops.linear(sums) if fuse else GRAPH.run(sums)[0]


def naive(q, k, v, sums):
    return reference.linear(q, k, v, decay=sums.g, denominator=None, causal=sums.causal)


def definition(sums):
    queries, keys, values = sums.made()
    found = naive(queries[0], keys[0], values, sums)
    if sums.denominator is None:
        return found
    column = naive(queries[-1], keys[-1], torch.ones_like(values[..., :1]), sums)
    found = torch.cat((found, column), -1)
    return ops.divide(found) if sums.denominator == "divide" else found


def agree(sums, leaves, fuse=True):
    """Assert that outputs and gradients of the fast sums equal the definition."""
    fast, slow = total(sums, fuse), definition(sums)
    close(fast, slow)
    for actual, expected in zip(gradients(fast, leaves), gradients(slow, leaves), strict=True):
        close(actual, expected)


@each("decay", [None, 0.1])
@each("causal", [True, False])
def test_gradients_reach_what_features_hold(small, causal, decay):
    q, k, v, *g = tensors(130, decay=decay)
    learned, fixed = torch.randn(130, 1, dtype=torch.float64, requires_grad=True), torch.randn(130, 1, dtype=torch.float64)
    shared = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    features = (rows(learned, fixed), Features(identity, Scaling(shared[None]), None), rows(learned))
    agree(ops.Sums(q, k, v, features, decays(g, 130, 130), causal), [q, k, v, *g, learned, shared])


def test_division_keeps_signs_and_clamps():
    denominator = torch.tensor([2.0, -2.0, 1e-9, -1e-9, 0.0, -0.0])
    assert clamp(denominator).tolist() == pytest.approx([2.0, -2.0, 1e-6, -1e-6, 1e-6, -1e-6])
    total = torch.stack((torch.ones(6), denominator), -1)
    close(ops.divide(total)[:, 0], 1 / clamp(denominator), roundings=2)


def test_complex_division_clamps_magnitudes_below_1e_6():
    above, least = torch.tensor(3 + 4j, dtype=torch.complex128), 1e-6
    below = torch.tensor([3e-4 - 4e-4j, -5e-4, 2e-6j, -2e-6, 1e-7j, -1e-7, 0], dtype=torch.complex128)
    total = torch.view_as_real(torch.stack((above.expand(7), below), -1)).movedim(-1, 0)
    expected = (above * below.conj()).real / below.abs().clamp_min(least).square()
    close(ops.divide_complex(total)[:, 0], expected, roundings=2)


@each("decay", [None, 0.1])
@each("causal", [True, False])
@each("fuse", [True, False])
@each("kind", FEATURES)
def test_fast_is_naive(small, kind, fuse, causal, decay):
    for t in (1, 64, 65, 150):
        q, k, v, *g = leaves = tensors(t, decay=decay)
        features, denominator = FEATURES[kind]
        with named(f"{t} tokens"):
            agree(ops.Sums(q, k, v, features, decays(g, t, t), causal, denominator), leaves, fuse)


@each("decay", [None, 0.1])
@each("kind", FEATURES)
def test_causal_cross_sums_align_the_last_tokens(kind, decay):
    for t, s in ((1, 65), (65, 1), (70, 130), (130, 70)):
        q, k, v, *g = leaves = tensors(t, s, decay=decay)
        features, denominator = FEATURES[kind]
        with named(f"{t} queries, {s} keys"):
            agree(ops.Sums(q, k, v, features, decays(g, t, s), True, denominator), leaves)


@each("fuse", [True, False])
@each("kind", FEATURES)
def test_bidirectional_cross_sums(small, kind, fuse):
    for t, s in ((3, 200), (200, 3)):
        leaves, (features, denominator) = tensors(t, s), FEATURES[kind]
        with named(f"{t} queries, {s} keys"):
            agree(ops.Sums(*leaves, features, None, False, denominator), leaves, fuse)


@each("causal", [True, False])
def test_the_size_of_groups_changes_nothing(monkeypatch, causal):
    q, k, v, *g = leaves = tensors(300, decay=0.1)
    outs = []
    for size, span in ((1 << 30, 100), (1, 1)):
        monkeypatch.setattr(scan, "GROUP", size)
        monkeypatch.setattr(scan, "LEAST", span)
        monkeypatch.setattr(scan, "MOST", span)
        outs.append(ops.linear(ops.Sums(q, k, v, FEATURES["plain"][0], decays(g, 300, 300), causal, "divide")))
        outs[-1] = [outs[-1], *gradients(outs[-1], leaves)]
    for one_group, several in zip(*outs, strict=True):
        close(several, one_group)


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_groups_with_equal_decays_on_one_side_only_have_separate_weights(monkeypatch, side):
    for name, size in {"CHUNK": 2, "GROUP": 1, "LEAST": 2, "MOST": 2}.items():
        monkeypatch.setattr(scan, name, size)
    leaves, ahead = tensors(16), torch.rand(3, 16, dtype=torch.float64)
    ahead[..., 3::4] = 0  # of the last key of a group, from which the next one counts
    same = -torch.arange(16.0, dtype=torch.float64).expand(3, 16)
    agree(ops.Sums(*leaves, ALL_READY, (same, same - ahead) if side == "queries" else (same - ahead, same)), leaves)


def test_groups_are_large_where_launches_cost():
    """A plan for another device than a CPU has one group of 8,192 tokens, and few of 65,536."""
    for shape, groups in (((2, 4, 8192, 64), 1), ((1, 2, 65536, 64), 8), ((8, 16, 4096, 64), 2)):
        plan = scan.GroupPlan(torch.empty(shape, device="meta"))
        assert (len(plan.slices), len(plan.spans)) == (1, groups)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
def test_small_chunks_gradcheck(monkeypatch, causal, fuse):
    monkeypatch.setattr(scan, "CHUNK", 2)
    monkeypatch.setattr(scan, "LEAST", 1)
    monkeypatch.setattr(scan, "MOST", 1)
    features, denominator = FEATURES["plain"]

    def f(q, k, v, g):
        return total(ops.Sums(q, k, v, features, (g, g), causal, denominator), fuse)

    assert gradcheck(f, tensors(5, d=2, e=2, decay=0.5, n=(1, 2)))


@each("fuse", [True, False])
def test_second_derivatives_raise(fuse):
    q, k, v, *g = tensors(5, decay=0.5)
    out = total(ops.Sums(q, k, v, FEATURES["plain"][0], decays(g, 5, 5), True, "divide"), fuse)
    with pytest.raises(RuntimeError, match=r"naive_linear_attention|no autograd formula"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum().backward()


def test_clamped_denominators_pass_no_gradient():
    q, k, v = tensors(3)
    with torch.no_grad():
        q[..., :, 0], q[..., :, 1:] = 1.0, 0.0
        k[..., :, 0] = torch.tensor([1.0, -1.0, 1.0])  # the second row's denominator vanishes
    agree(ops.Sums(q, k, v, ALL_READY, denominator="divide"), [q, k, v])


def test_decays_of_heads_broadcast():
    q, k, v = tensors(70)
    g = (-torch.rand(3, 70, dtype=torch.float64).cumsum(-1)).requires_grad_()
    agree(ops.Sums(q, k, v, ALL_READY, (g, g)), [q, k, v, g])


def test_states_are_kept_for_gradients_only(monkeypatch, small):
    original, counts = scan._forward, []
    monkeypatch.setattr(scan, "_forward", lambda *given, **options: counts.append(original(*given, **options)) or counts[-1])
    q, k, v = tensors(300)
    for _ in range(2):
        ops.linear(ops.Sums(q, k, v, ALL_READY))
        q, k, v = (x.detach() for x in (q, k, v))
    heads = len(counts) // 2
    assert all(counts[:heads])
    assert not any(counts[heads:])


# Who serves what


def numbers(dtype=torch.float32, t=70, d=16, features=ALL_READY, **more):
    return ops.Sums(*torch.randn(3, 1, 2, t, d, dtype=dtype), features, **more)


def phi(function):
    return (Features(function), Features(function), READY)


REFUSALS = [
    ("cpu", numbers(torch.float64), "it sums up float32, not torch.float64"),
    ("cpu", numbers(features=phi(POSITIVE)), "it does not know the feature map 'positive', only identity, elu.1, .*"),
    ("cpu", numbers(features=phi(FeatureMap("relu", torch.exp))), "it does not know the feature map 'relu', only .*"),
    (
        "cpu",
        numbers(causal=False, features=phi(FeatureMap("favor", torch.exp)), denominator="divide"),
        "features that PyTorch makes go into products of matrices .*, which it has, too|no library is installed .*",
    ),
    ("cpu", numbers(causal=False), "two products of matrices are all there is to do"),
    ("cpu", numbers(d=257), "features come up to 256, not 257|no library is installed .*"),
    ("cpu", numbers(t=1, stream=ops.Past()), "a step is one token after others"),
    ("chunks", numbers(stream=ops.Past()), "it takes and returns no sums of a stream"),
    ("chunks", numbers(features=phi(torch.nn.Softplus())), "Softplus is no FeatureMap and may hold parameters, .*"),
    ("chunks", numbers(causal=False), "two products of matrices are all there is to do"),
    (
        "chunks",
        ops.Sums(torch.randn(1, 2, 5, 4), *torch.randn(2, 1, 2, 9, 4), ALL_READY),
        "causal and decaying sums have as many queries as keys, here 5 and 9",
    ),
]


@each(("name", "sums", "why"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_refusal_is_a_sentence(name, sums, why):
    (backend,) = (backend for backend in ops.BACKENDS if backend.name == name)
    assert re.fullmatch(why, backend.serves(sums))
    explanation = ops.explain(sums)
    assert explanation.backend != name
    assert re.fullmatch(why, explanation.refusals[name])
    assert f"{name} does not: {explanation.refusals[name]}" in str(explanation).splitlines()


def test_the_first_that_serves_gets_the_problem(monkeypatch):
    class Mine(Backend):
        name = "mine"

        def serves(self, sums):
            return "" if sums.causal else "it sums causally"

        def run(self, sums):
            return definition(sums), ()

    monkeypatch.setattr(ops, "BACKENDS", (Mine(), *ops.BACKENDS))
    sums = ops.Sums(*tensors(9), ALL_READY)
    assert str(ops.explain(sums)) == "mine serves"
    assert ops.linear(sums).grad_fn.name() == definition(sums).grad_fn.name()
    assert ops.explain(ops.Sums(*tensors(9), ALL_READY, causal=False)).refusals["mine"] == "it sums causally"


@each("dtype", [torch.float32, torch.float64], ids=["cpu", "chunks"])
def test_a_call_keeps_nothing(dtype):
    """Memory is free when the call ends, without garbage collection."""
    own = Features(elu1, Rotation(torch.ones(2, 300, 4, 2, dtype=dtype)), ("rotation",))
    q, k, v = (torch.randn(1, 2, 300, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    known = weakref.ref(q)
    gc.disable()
    try:
        ops.linear(ops.Sums(q, k, v, (own, own, READY))).sum().backward()
        del q
        assert known() is None
    finally:
        gc.enable()
