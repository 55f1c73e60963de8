"""Linear attention on tensors: the fast sums of `isopos.ops.linear` against `naive`."""

import math

import pytest
import torch
from cases import close, gradients
from torch.autograd import gradcheck, gradgradcheck

from isopos.ops import linear as ops
from isopos.ops import tiles

N = (2, 3)  # batch, heads


def tensors(t, s=None, d=4, e=3, decay=None, n=N):
    """q, k, v and a log decay that does not increase, of all tokens of the longer side: float64 with gradients."""
    s = t if s is None else s
    leaves = [torch.randn(*n, *shape, dtype=torch.float64) for shape in ((t, d), (s, d), (s, e))]
    if decay is not None:
        leaves.append(-decay * torch.rand(*n, max(t, s), dtype=torch.float64).cumsum(-1))
    return [x.requires_grad_() for x in leaves]


def decays(g, t, s):
    """Those of queries and keys, the last tokens aligned; None where there is no g."""
    return (g[0][..., max(t, s) - t :], g[0][..., max(t, s) - s :]) if g else None


class Load:
    """A function of tokens and, row by row, of tensors ``[t .]``."""

    def __init__(self, function, *tensors):
        self.function, self.tensors = function, tensors

    direct = False

    def part(self, tensors, place):
        return tuple(place.of(tensor, None, -2) for tensor in tensors)

    def __call__(self, x, part):
        return self.function(x, *(tensor[: x.shape[-2]] for tensor in part))  # PLACES has rows for any length


PLACES = torch.arange(1, 1000, dtype=torch.float64)[:, None].cos()
one, by_place = Load(lambda x: (x,)), Load(lambda x, place: (x * place,), PLACES)
positive, twice = Load(lambda x: (x.exp(),)), Load(lambda x: (x.cos(), x.exp()))
LOADS = {  # and what becomes of the denominator
    "sum": ((one, one, one), None),
    "ready": (ops.READY, None),
    "places": ((by_place, by_place, by_place), None),
    "encoded": ((positive, positive, one), "divide"),
    "plain": ((twice, twice, one), "divide"),
    "column": ((twice, twice, one), "column"),
    "ready-column": ((ops.READY), "column"),
}


@pytest.fixture
def small(monkeypatch):
    """Several tiles, of one head each."""
    monkeypatch.setattr(tiles, "TILE", 1)
    monkeypatch.setattr(tiles, "LEAST", 2)
    monkeypatch.setattr(tiles, "MOST", 2)


def definition(q, k, v, g, loads, causal, below):
    parts = (load(x, load.part(load.tensors, place(x))) for load, x in zip(loads, (q, k, v), strict=True))
    queries, keys, (values,) = parts
    total = ops.naive(queries[0], keys[0], values, g, causal=causal)
    if below is None:
        return total
    column = ops.naive(queries[-1], keys[-1], torch.ones_like(values[..., :1]), g, causal=causal)
    total = torch.cat((total, column), -1)
    return ops.divide(total) if below == "divide" else total


def place(x):
    return tiles.Place((), slice(None), slice(0, x.shape[-2]))


@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_reach_what_the_loads_hold(small, causal, decay):
    (q, k, v, *g), rows = tensors(130, decay=decay), [torch.randn(130, 1, dtype=torch.float64) for _ in range(3)]
    learned, shared, fixed = rows[0].requires_grad_(), torch.ones(1, 4, dtype=torch.float64, requires_grad=True), rows[2]

    class Shared(Load):
        def part(self, tensors, place):
            return tuple(tensors)

    loads = (
        Load(lambda x, row, place: (x * row * place,), learned, fixed),
        Shared(lambda x, row: (x * row,), shared),
        Load(lambda x, row: (x * row,), learned),
    )
    leaves = [q, k, v, *g, learned, shared]
    fast = ops.linear(q, k, v, loads, decays(g, 130, 130), causal=causal, below=None, fuse=True)
    slow = definition(q, k, v, decays(g, 130, 130), loads, causal, None)
    for a, b in zip(gradients(fast, leaves), gradients(slow, leaves), strict=True):
        close(a, b)


def test_naive_is_the_loop():
    for causal, decay, t, s in [
        (True, 0.5, 4, 4),
        (False, 0.5, 4, 4),
        (True, 0.5, 3, 5),
        (True, None, 5, 3),
        (False, None, 3, 5),
    ]:
        q, k, v, *g = tensors(t, s, decay=decay)
        pair = decays(g, t, s)
        expected = torch.zeros(*N, t, 3, dtype=torch.float64)
        for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (*N, t, s))).tolist():
            if causal and j > i + s - t:
                continue
            difference = (pair[0][b, h, i] - pair[1][b, h, j]).item() if pair else 0.0
            weight = sum(q[b, h, i, n].item() * k[b, h, j, n].item() for n in range(4)) * math.exp(-abs(difference))
            expected[b, h, i] += weight * v[b, h, j].detach()
        close(ops.naive(q, k, v, pair, causal=causal), expected)


def test_naive_is_twice_differentiable():
    def f(q, k, v, g):
        return ops.naive(q, k, v, (g, g), causal=True)

    assert gradgradcheck(f, tensors(3, d=2, e=2, decay=0.5, n=(1, 2)))


def test_division_keeps_signs_and_clamps():
    below = torch.tensor([2.0, -2.0, 1e-9, -1e-9, 0.0, -0.0])
    assert ops.clamp(below).tolist() == pytest.approx([2.0, -2.0, 1e-6, -1e-6, 1e-6, -1e-6])
    total = torch.stack((torch.ones(6), below), -1)
    close(ops.divide(total)[:, 0], 1 / ops.clamp(below), roundings=2)


@pytest.mark.parametrize("t", [1, 63, 64, 65, 130, 300])
@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", LOADS)
def test_fast_is_naive(small, kind, fuse, causal, decay, t):
    leaves = tensors(t, decay=decay)
    (q, k, v, *g), (loads, below) = leaves, LOADS[kind]
    fast = ops.linear(q, k, v, loads, decays(g, t, t), causal=causal, below=below, fuse=fuse)
    slow = definition(q, k, v, decays(g, t, t), loads, causal, below)
    close(fast, slow)
    for actual, expected in zip(gradients(fast, leaves), gradients(slow, leaves), strict=True):
        close(actual, expected)


@pytest.mark.parametrize(("t", "s"), [(1, 65), (65, 1), (70, 130), (130, 70)])
@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("kind", LOADS)
def test_causal_cross_sums_align_the_last_tokens(kind, decay, t, s):
    leaves = tensors(t, s, decay=decay)
    (q, k, v, *g), (loads, below) = leaves, LOADS[kind]
    fast = ops.linear(q, k, v, loads, decays(g, t, s), causal=True, below=below, fuse=True)
    slow = definition(q, k, v, decays(g, t, s), loads, True, below)
    close(fast, slow)
    for actual, expected in zip(gradients(fast, leaves), gradients(slow, leaves), strict=True):
        close(actual, expected)


@pytest.mark.parametrize(("t", "s"), [(3, 200), (200, 3)])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("kind", LOADS)
def test_bidirectional_cross_sums(small, kind, fuse, t, s):
    leaves, (loads, below) = tensors(t, s), LOADS[kind]
    fast = ops.linear(*leaves, loads, None, causal=False, below=below, fuse=fuse)
    slow = definition(*leaves, None, loads, False, below)
    close(fast, slow)
    for actual, expected in zip(gradients(fast, leaves), gradients(slow, leaves), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_tiles_change_nothing(monkeypatch, causal):
    leaves = tensors(300, decay=0.1)
    (q, k, v, *g), (loads, _) = leaves, LOADS["plain"]
    outs = []
    for size, span in ((1 << 30, 100), (1, 1)):
        monkeypatch.setattr(tiles, "TILE", size)
        monkeypatch.setattr(tiles, "LEAST", span)
        monkeypatch.setattr(tiles, "MOST", span)
        outs.append(ops.linear(q, k, v, loads, decays(g, 300, 300), causal=causal, below="divide", fuse=True))
        outs[-1] = [outs[-1], *gradients(outs[-1], leaves)]
    for one_tile, several in zip(*outs, strict=True):
        close(several, one_tile)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
def test_small_chunks_gradcheck(monkeypatch, causal, fuse):
    monkeypatch.setattr(tiles, "CHUNK", 2)
    monkeypatch.setattr(tiles, "LEAST", 1)
    monkeypatch.setattr(tiles, "MOST", 1)
    loads, below = LOADS["plain"]

    def f(q, k, v, g):
        return ops.linear(q, k, v, loads, (g, g), causal=causal, below=below, fuse=fuse)

    assert gradcheck(f, tensors(5, d=2, e=2, decay=0.5, n=(1, 2)))


@pytest.mark.parametrize("fuse", [True, False])
def test_second_derivatives_raise(fuse):
    leaves, (loads, below) = tensors(5, decay=0.5), LOADS["plain"]
    q, k, v, *g = leaves
    out = ops.linear(q, k, v, loads, decays(g, 5, 5), causal=True, below=below, fuse=fuse)
    with pytest.raises(RuntimeError, match=r"naive_linear_attention|no autograd formula"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum().backward()


def test_clamped_denominators_pass_no_gradient():
    q, k, v = tensors(3)
    with torch.no_grad():
        q[..., :, 0], q[..., :, 1:] = 1.0, 0.0
        k[..., :, 0] = torch.tensor([1.0, -1.0, 1.0])  # the second row's denominator vanishes
    out = ops.linear(q, k, v, (one, one, one), None, causal=True, below="divide", fuse=True)
    slow = definition(q, k, v, None, (one,) * 3, True, "divide")
    close(out, slow)
    for actual, expected in zip(gradients(out, [q, k, v]), gradients(slow, [q, k, v]), strict=True):
        close(actual, expected)


def test_decays_of_heads_broadcast():
    q, k, v = tensors(70)
    g = -torch.rand(3, 70, dtype=torch.float64).cumsum(-1)
    g.requires_grad_()
    fast = ops.linear(q, k, v, (one,) * 3, (g, g), causal=True, below=None, fuse=True)
    slow = ops.naive(q, k, v, (g, g), causal=True)
    close(fast, slow)
    for actual, expected in zip(gradients(fast, [q, k, v, g]), gradients(slow, [q, k, v, g]), strict=True):
        close(actual, expected)


def test_states_are_kept_for_gradients_only(monkeypatch, small):
    original, counts = ops._forward, []
    monkeypatch.setattr(ops, "_forward", lambda *walks, **options: counts.append(original(*walks, **options)) or counts[-1])
    q, k, v = tensors(300)
    for _ in range(2):
        ops.linear(q, k, v, (one,) * 3, None, causal=True, below=None, fuse=True)
        q, k, v = (x.detach() for x in (q, k, v))
    heads = len(counts) // 2
    assert all(counts[:heads])
    assert not any(counts[heads:])
