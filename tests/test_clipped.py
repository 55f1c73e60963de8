"""Test clipped relative terms: the sums of `isopos.ops.clipped` against their definition."""

import math
from fractions import Fraction

import pytest
import torch
from cases import close, each, gradients, same_everywhere
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile

from isopos.ops import clipped as ops
from isopos.ops.clipped import buckets, clipped, clipped_naive

N = (2, 3)  # batch, heads


def leaves(x, y, reach, outside=0, n=N, e=4, dtype=torch.float64):
    """Random scores and values for these positions, with gradients."""
    count = (2 * reach + 1) ** x.shape[-1] + (2 if outside else 0)
    shapes = (*n, x.shape[-2], count), (*n, y.shape[-2], e)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def line(t, start=0):
    return torch.arange(start, start + t)[:, None]


def grid(*sides):
    return torch.cartesian_prod(*map(torch.arange, sides)).view(-1, len(sides))


def walk(t, axes, seed=0):
    """Positions ``[t c]`` in strictly ascending lexicographic order, with gaps on every axis."""
    side = math.ceil((3 * t + 1) ** (1 / axes))
    kept = torch.randperm(side**axes, generator=torch.Generator().manual_seed(seed))[:t].sort().values
    return grid(*(side,) * axes)[kept] - 2


def positions(*shape, kind, far=3):
    """Random positions, with repetitions."""
    x = torch.randint(-far, far + 1, shape)
    return {"integer": x, "half": x / 2, "real": 2 * torch.rand(shape, dtype=torch.float64) * x}[kind]


def bucket(x, y, reach):
    """Bucket of one pair of positions, in exact arithmetic."""
    index = 0
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        offset = math.floor(Fraction(b) - Fraction(a) + Fraction(1, 2))
        index = (2 * reach + 1) * index + min(max(offset, -reach), reach) + reach
    return index


def agree(x, y, reach, outside=0, causal=False, n=N):
    """Assert that outputs and gradients of the fast sum equal the definition."""
    score, v = leaves(x, y, reach, outside, n)
    options = {"outside": outside, "causal": causal}
    fast, slow = (f(score, v, x, y, reach, **options) for f in (clipped, clipped_naive))
    same_everywhere(fast, slow, [score, v])


@each("kind", ["integer", "half", "real"])
@each("axes", [1, 2, 3])
def test_buckets_are_those_of_exact_arithmetic(axes, kind):
    x, y = positions(6, axes, kind=kind), positions(9, axes, kind=kind)
    expected = [[bucket(a, b, 2) for b in y] for a in x]
    assert buckets(x, y, 2).tolist() == expected
    outside = buckets(x, y, 2, outside=2).tolist()
    for i, j in torch.cartesian_prod(torch.arange(6), torch.arange(9)).tolist():
        assert outside[i][j] == (5**axes if j < 2 else 5**axes + 1 if i < 2 else expected[i][j])


def test_halves_go_up():
    x, y = torch.zeros(1, 1), torch.tensor([-1.5, -0.51, -0.5, 0.0, 0.49, 0.5, 1.49, 1.5, 9.0])[:, None]
    assert buckets(x, y, 2).tolist() == [[1, 1, 2, 2, 2, 3, 3, 4, 4]]


def test_naive_is_the_loop():
    for t, s, outside, causal in [(4, 4, 0, False), (3, 5, 0, True), (5, 3, 2, True), (4, 5, 2, False)]:
        x, y = positions(t, 2, kind="integer"), positions(2, s, 2, kind="integer")
        score, v = leaves(x, y, 1, outside)
        expected = torch.zeros(*N, t, 4, dtype=torch.float64)
        for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (*N, t, s))).tolist():
            if causal and j > i + s - t:
                continue
            n = 9 if j < outside else 10 if i < outside else bucket(x[i], y[b, j], 1)
            expected[b, h, i] += score[b, h, i, n].detach() * v[b, h, j].detach()
        close(clipped_naive(score, v, x, y, 1, outside=outside, causal=causal), expected)


@given(
    axes=st.integers(1, 3),
    reach=st.integers(1, 3),
    t=st.integers(0, 20),
    s=st.integers(0, 20),
    outside=st.integers(0, 3),
    kinds=st.tuples(*[st.sampled_from(["integer", "half", "real"])] * 2),
    batches=st.sampled_from([((), ()), ((2,), (2,)), ((), (2,)), ((2,), ()), ((1,), (2,))]),
)
def test_fast_is_naive(axes, reach, t, s, outside, kinds, batches):
    x, y = (positions(*b, n, axes, kind=k, far=5) for b, n, k in zip(batches, (t, s), kinds, strict=True))
    agree(x, y, reach, min(outside, t, s))


@given(
    axes=st.integers(1, 3),
    reach=st.integers(1, 3),
    s=st.integers(0, 30),
    missing=st.integers(0, 30),
    outside=st.integers(0, 1),
    samples=st.sampled_from([None, 1, 2]),
)
def test_causal_is_naive(axes, reach, s, missing, outside, samples):
    outside = min(outside, s)
    y = walk(s, axes) if samples is None else torch.stack([walk(s, axes, seed) for seed in range(samples)])
    x = y if outside else y[..., min(missing, s) :, :]
    agree(x, y, reach, outside, causal=True)


@each("causal", [True, False])
@each(("x", "reach"), [(line(40), 4), (line(5), 9), (grid(6, 7), 2), (grid(3, 4, 3), 1)], ids=str)
def test_sequences_and_grids(x, reach, causal):
    agree(x, x, reach, causal=causal)
    agree(x, x, reach, outside=1, causal=causal)
    agree(x.to(torch.int32), x, reach, causal=causal)


def test_any_leading_dimensions():
    x = positions(2, 1, 7, 1, kind="integer")
    agree(x, positions(3, 5, 1, kind="half"), 2, n=(2, 3, 2))
    agree(line(7), line(7), 2, causal=True, n=(2,))
    agree(line(3), line(4), 2, n=(0, 2))
    agree(positions(0, 3, 1, kind="half"), line(4), 2, n=(0, 2))


@each("start", [-(2**31), 2**31 - 3, 10**12, 2**53 + 1, -(2**62)])
def test_far_positions_are_exact(start):
    x, score = line(9, start), torch.randn(1, 9, 5)
    assert buckets(x, x, 2).equal(buckets(line(9), line(9), 2))
    for causal in (True, False):
        v = torch.randn(1, 9, 2)
        far, near = (clipped(score, v, at, at, 2, causal=causal) for at in (x, line(9)))
        assert far.equal(near)


def test_far_real_positions_are_exact():
    x = line(9).double() / 4
    assert buckets(x + 2**31, x + 2**31, 1).equal(buckets(x, x, 1))
    agree(x + 2**31, x + 2**31, 1)


def test_queries_beyond_the_keys_see_one_bucket():
    score, v = leaves(line(2), line(5), 2)
    for start, n in ((-50, 4), (50, 0)):
        close(clipped(score, v, line(2, start), line(5), 2), score[..., n, None] * v.sum(-2, keepdim=True))


def test_real_positions_on_an_edge_agree():
    x = torch.arange(60, dtype=torch.float64)[:, None] * 0.1  # offsets of a half, most of them rounded
    agree(x, x, 3)
    agree(x.float(), x, 3)


@each(("axes", "outside", "causal"), [(1, 0, True), (2, 0, False), (1, 1, True), (1, 2, False)])
def test_gradcheck(axes, outside, causal):
    x = walk(4, axes)
    tensors = leaves(x, x, 1, outside, n=(1, 2), e=2)
    for f, check in ((clipped, gradcheck), (clipped_naive, gradcheck), (clipped_naive, gradgradcheck)):
        assert check(lambda score, v, f=f: f(score, v, x, x, 1, outside=outside, causal=causal), tensors)


def test_one_gradient_alone():
    score, v = leaves(line(6), line(6), 2)
    for s, u, leaf in ((score, v.detach(), score), (score.detach(), v, v)):
        pair = (f(s, u, line(6), line(6), 2) for f in (clipped, clipped_naive))
        close(*(gradients(out, [leaf])[0] for out in pair))


def test_second_derivatives_raise():
    score, v = leaves(line(3), line(3), 1)
    (first,) = torch.autograd.grad(clipped(score, v, line(3), line(3), 1).square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()


@each("block", [1, 40, 1 << 18])
def test_blocks_change_nothing(monkeypatch, block):
    monkeypatch.setattr(ops, "BLOCK", block)
    agree(line(30), line(20), 2)


def test_float32_keeps_its_digits_at_length_50000():
    length, x = 50_000, line(50_000)
    score, v = leaves(x, x, 2, n=(1,), e=2, dtype=torch.float32)
    with torch.no_grad():
        v[..., 1] = 1  # the sums of weights
        score[..., [0, -1]] = 0  # near buckets alone: differences of long sums
    fast = clipped(score, v, x, x, 2)
    fast_score, fast_v = torch.autograd.grad(fast.sum(), [score, v])
    assert fast.dtype == fast_score.dtype == fast_v.dtype == torch.float32
    at = torch.tensor([0, 1, length // 2, length - 2, length - 1])
    wide = score.detach().double().requires_grad_()
    slow = clipped_naive(wide[:, at], v.detach().double(), x[at], x, 2)
    close(fast[:, at], slow, roundings=4)
    (slow_score,) = torch.autograd.grad(slow.sum(), wide)
    close(fast_score[:, at], slow_score[:, at], roundings=4)
    close(fast_score[:, at, 1:-1], slow_score[:, at, 1:-1], roundings=4)  # small beside those of far buckets
    # Key j is one after query j - 1, at query j and one before query j + 1.
    close(fast_v[:, 1:-1, 0], wide[:, :-2, 3] + wide[:, 1:-1, 2] + wide[:, 2:, 1], roundings=4)


def allocated(t, causal):
    """Total and peak bytes that both passes allocate on a grid of t tokens, with R = 3, e = 16."""
    x = grid(t // 16, 16)
    score, v = leaves(x, x, 3, n=(1,), e=16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        clipped(score, v, x, x, 3, causal=causal).sum().backward()
    sizes = [event.self_cpu_memory_usage for event in record.events()]
    return sum(size for size in sizes if size > 0), max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_memory_is_linear(monkeypatch, causal):
    monkeypatch.setattr(ops, "BLOCK", 49 * 16 * 8)
    (total, _), (double, largest) = allocated(512, causal), allocated(1024, causal)
    assert double < 2.2 * total
    assert largest < 1024 * 49 * 16 * 8 / 4  # far from [t n e]


def test_positions_move_together():
    x, shift = walk(20, 2), torch.tensor([1000, -7])
    score, v = leaves(x, x, 2)
    for causal in (True, False):
        assert clipped(score, v, x, x, 2, causal=causal).equal(clipped(score, v, x + shift, x + shift, 2, causal=causal))


@each("outside", [0, 1])
def test_later_keys_do_not_reach_earlier_queries(outside):
    x = walk(20, 2)
    score, v = leaves(x, x, 2, outside)
    with torch.no_grad():
        v[..., 12:, :] = torch.nan
    out = clipped(score, v, x, x, 2, outside=outside, causal=True)
    assert out[..., :12, :].isfinite().all()
    assert out[..., 12:, :].isnan().all()


def test_class_tokens_need_no_coordinates():
    x = grid(3, 4).double()
    score, v = leaves(x, x, 1, 2)
    unread = torch.cat((torch.full((2, 2), torch.nan, dtype=torch.float64), x[2:]))
    assert clipped(score, v, unread, unread, 1, outside=2).equal(clipped(score, v, x, x, 1, outside=2))
    assert buckets(unread, unread, 1, outside=2).equal(buckets(x, x, 1, outside=2))


@pytest.mark.slow  # a fast test of test_compile.py compiles it, too
@pytest.mark.parametrize(("outside", "causal"), [(1, True), (0, True), (0, False), (1, False)])
def test_compiles_whole(outside, causal):
    functions = [clipped, torch.compile(clipped, fullgraph=True, backend="aot_eager")]
    compiled_buckets = torch.compile(buckets, fullgraph=True, backend="aot_eager")
    for t in (6, 9, 11):
        x = walk(t, 2, seed=t)
        score, v = leaves(x, x, 1, outside)
        outs = [f(score, v, x, x, 1, outside=outside, causal=causal) for f in functions]
        eager, fast = ([out, *torch.autograd.grad(out.square().sum(), [score, v])] for out in outs)
        for a, b in zip(fast, eager, strict=True):
            close(a, b, roundings=4)
        assert compiled_buckets(x, x, 1, outside).equal(buckets(x, x, 1, outside))


def test_registered_operations():
    x, y = torch.stack([grid(2, 3), grid(2, 3) + 1]), positions(2, 5, 2, kind="integer")
    weight, v = leaves(x, y, 1)
    torch.library.opcheck(ops._clipped_sum, (weight, v, x, y, 1))
    grad = torch.randn(*N, 6, 4, dtype=torch.float64)
    torch.library.opcheck(ops._clipped_sum_backward, (grad, weight.detach(), v.detach(), x, y, 1))


def test_scattered_positions_raise():
    x = torch.arange(300)[:, None].expand(-1, 2)
    score, v = leaves(x, x, 1, n=(1,))
    with pytest.raises(ValueError, match=r"grid of at most 42368 cells, got one of \[301, 301\].*clipped_naive"):
        clipped(score, v, x, x, 1)
    agree(x[:180], x[:180], 1, n=(1,))
    many = torch.arange(2**16 - 1)[:, None].expand(-1, 4)
    score, v = leaves(many[:1], many, 1, n=(1,), e=1)
    with pytest.raises(ValueError, match="65536, 65536"):  # a product of 2^64
        clipped(score, v, many[:1], many, 1)


X, Y = line(4), line(6)
INVALID = {
    "axes": ({"x": X.expand(-1, 2)}, "x, y: expected positions"),
    "no axis": ({"x": X[:, 0], "y": Y[:, 0]}, "x, y: expected positions"),
    "reach": ({"reach": 0}, "reach: expected at least 1, got 0"),
    "outside": ({"outside": 5}, "outside: expected class tokens among 4 queries and 6 keys, got 5"),
    "negative outside": ({"outside": -1}, "outside: expected"),
    "buckets": ({"score": torch.ones(2, 3, 4, 3)}, r"score: expected \[\*b h 4 5\]"),
    "buckets outside": ({"outside": 1}, r"score: expected \[\*b h 4 7\]"),
    "queries": ({"score": torch.ones(2, 3, 5, 5)}, r"score: expected \[\*b h 4 5\]"),
    "heads": ({"score": torch.ones(4, 5)}, r"score: expected \[\*b h 4 5\]"),
    "values": ({"v": torch.ones(2, 3, 4, 2)}, r"v: expected \[2, 3, 6, 'e'\], got \(2, 3, 4, 2\)"),
    "batch of values": ({"v": torch.ones(1, 3, 6, 2)}, r"v: expected \[2, 3, 6"),
    "batch of x": ({"x": X.expand(3, 4, 1)}, r"x: expected positions of the batch \(2,\)"),
    "heads of y": ({"y": Y.expand(1, 2, 6, 1)}, r"y: expected positions of the batch \(2,\)"),
}
CAUSAL = {
    "real": ({"x": X.double(), "y": Y}, "expected integer positions, got real"),
    "longer": ({"x": line(7), "score": torch.ones(2, 3, 7, 5)}, "got 0 class tokens, 7 other queries and 6 other keys"),
    "two class tokens": ({"x": Y, "outside": 2, "score": torch.ones(2, 3, 6, 7)}, "at most one class token"),
    "lengths": ({"outside": 1, "score": torch.ones(2, 3, 4, 7)}, "got 1 class tokens, 3 other queries and 5 other keys"),
    "order": ({"x": Y.flip(0)[2:], "y": Y.flip(0)}, "strictly ascending lexicographic order"),
    "twice": ({"y": torch.tensor([0, 1, 2, 2, 3, 4])[:, None]}, "strictly ascending"),
    "places": ({}, "queries at the positions of the last keys"),
}


def call(f, changes, **options):
    given = {"score": torch.ones(2, 3, 4, 5), "v": torch.ones(2, 3, 6, 2), "x": X, "y": Y, "reach": 2, **options}
    return f(**given | changes)


@each("f", [clipped, clipped_naive])
@each("name", INVALID)
def test_what_does_not_fit_raises(f, name):
    changes, message = INVALID[name]
    with pytest.raises(ValueError, match=message):
        call(f, changes)


@each("name", CAUSAL)
def test_what_is_not_causal_raises(name):
    changes, message = CAUSAL[name]
    with pytest.raises(ValueError, match=message):
        call(clipped, changes, causal=True)
    call(clipped_naive, changes, causal=True)


def test_grids_in_another_order_raise():
    by_columns = grid(3, 4)[torch.arange(12).view(3, 4).T.flatten()]
    score, v = leaves(by_columns, by_columns, 1)
    with pytest.raises(ValueError, match="lexicographic"):
        clipped(score, v, by_columns, by_columns, 1, causal=True)
    agree(by_columns.flip(-1), by_columns.flip(-1), 1, causal=True)


@each("dtypes", [(torch.bfloat16,) * 2, (torch.float32, torch.float64)])
def test_other_dtypes_raise(dtypes):
    with pytest.raises(TypeError, match="one dtype, float32 or float64"):
        call(clipped, {"score": torch.ones(2, 3, 4, 5, dtype=dtypes[0]), "v": torch.ones(2, 3, 6, 2, dtype=dtypes[1])})
