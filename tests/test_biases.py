"""Test relative biases against the equations of their papers, pair by pair."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from cases import HEAD_DIM, HEADS, close, each, inputs, perturb

import isopos
from isopos import biases
from isopos.attention import linear_attention, softmax_attention
from isopos.biases import T5, ClippedKeys, DeBERTa, Fire, Kerple, Shaw
from isopos.decays import alibi_rates
from isopos.feature_maps import elu1
from isopos.positions import grid, sequence

T, S = 6, 9
X, Y = 4 * sequence(T) - 3, 3 * sequence(S).flip(0) - 5  # positions of queries and keys, far apart and out of order


def clip(value, low, high):
    return max(low, min(high, value))


def attend(logits, values):
    """Softmax over logits[b][h][i][j], of vectors values[b][h][i][j]."""
    weight = logits.softmax(-1)
    return (weight[..., None] * values).sum(-2)


def pairs():
    """All b, h, i, j."""
    return itertools.product(range(2), range(HEADS), range(T), range(S))


def logits_of(score):
    out = torch.zeros(2, HEADS, T, S, dtype=torch.float64)
    for index in pairs():
        out[index] = score(*index)
    return out


def offset(i, j):
    return int(Y[j] - X[i])


# Buckets


@each(("buckets", "distance", "both"), [(32, 128, True), (32, 128, False), (8, 20, True), (6, 7, False), (4, 2, True)])
def test_t5_buckets_are_the_papers(buckets, distance, both):
    """Section 2.1 as published code has it, in exact arithmetic: floats fall on the wrong side of powers."""

    def bucket(offset):
        count, first, n = buckets, 0, -offset
        if both:
            count, first, n = buckets // 2, (n < 0) * (buckets // 2), abs(n)
        n, near = max(n, 0), count // 2
        if n < near:
            return first + n
        steps = 0  # floor(log(n / near) / log(distance / near) * (count - near))
        while near + steps < count and Fraction(n, near) ** (count - near) >= Fraction(distance, near) ** (steps + 1):
            steps += 1
        return first + min(near + steps, count - 1)

    offsets = [*range(-300, 301), -(2**31), 2**31]
    found = T5(HEADS, buckets=buckets, max_distance=distance, bidirectional=both).bucket(torch.tensor(offsets))
    assert found.tolist() == [bucket(n) for n in offsets]
    assert set(found.tolist()) == set(range(buckets)) - ({buckets // 2} if both else set())  # offset 0 has the first one


@each(("buckets", "distance"), [(256, 512), (8, 20), (4, 100)])
def test_deberta_buckets_are_version_2s(buckets, distance):
    def row(offset):
        middle, n = buckets // 2, abs(offset)
        if n > middle:  # ceil(log(n / middle) / log((distance - 1) / middle) * (middle - 1)) + middle
            steps = 0
            while Fraction(distance - 1, middle) ** steps < Fraction(n, middle) ** (middle - 1) and steps < buckets:
                steps += 1
            n = middle + steps
        return clip(buckets + (n if offset < 0 else -n), 0, 2 * buckets - 1)

    offsets = [*range(-60, 61), *range(-1100, 1100, 37), -(2**31), 2**31]
    found = DeBERTa(1, 4, buckets=buckets, max_distance=distance).bucket(torch.tensor(offsets))
    assert found.tolist() == [row(n) for n in offsets]


def test_deberta_buckets_of_version_1_are_equation_3():
    k = 5
    found = DeBERTa(1, 4, buckets=k, max_distance=None).bucket(torch.arange(-20, 21))  # j - i
    assert found.tolist() == [0 if -n <= -k else 2 * k - 1 if -n >= k else -n + k for n in range(-20, 21)]


# Equations


def test_t5_adds_a_number_to_logits():
    bias, (q, k, v) = perturb(T5(HEADS, buckets=8, max_distance=20), 5), inputs(2, t=T, s=S)
    logits = logits_of(
        lambda b, h, i, j: q[b, h, i] @ k[b, h, j] / HEAD_DIM**0.5 + bias.weight[h, bias.bucket(torch.tensor(offset(i, j)))]
    )
    expected = attend(logits, v[:, :, None])
    close(softmax_attention(q, k, v, terms=bias(X, Y, torch.float64)), expected)


def test_shaw_is_equation_5_with_queries_that_have_no_position():
    """RoFormer's Eq. 5 for keys and values; its query, x_m + p_m, is a misprint (Shaw et al., Eq. 3 and 4)."""
    reach, (q, k, v) = 4, inputs(2, t=T, s=S)
    bias = perturb(Shaw(HEAD_DIM, reach=reach))
    keys, values = bias.keys.weight[0], bias.values.weight[0]
    near = torch.tensor([[clip(offset(i, j), -reach, reach) + reach for j in range(S)] for i in range(T)])
    logits = logits_of(lambda b, h, i, j: q[b, h, i] @ (k[b, h, j] + keys[near[i, j]]) / HEAD_DIM**0.5)
    expected = attend(logits, v[:, :, None] + values[near])
    close(softmax_attention(q, k, v, terms=bias(X, Y, torch.float64)), expected)


@each("distance", [20, None])
def test_deberta_is_equation_10(distance):
    bias, (q, k, v) = perturb(DeBERTa(HEADS, HEAD_DIM, buckets=8, max_distance=distance)), inputs(2, t=T, s=S)
    keys, queries = bias.keys.weight, bias.queries.weight

    def score(b, h, i, j):
        there, back = bias.bucket(torch.tensor([offset(i, j), -offset(i, j)]))
        terms = q[b, h, i] @ k[b, h, j] + q[b, h, i] @ keys[h, there] + queries[h, back] @ k[b, h, j]
        return terms / (3 * HEAD_DIM) ** 0.5

    arguments = {"terms": bias(X, Y, torch.float64), "scale": (3 * HEAD_DIM) ** -0.5}
    close(softmax_attention(q, k, v, **arguments), attend(logits_of(score), v[:, :, None]))


@each("distance", [20, None])
def test_deberta_as_released_reads_one_row_for_both(distance):
    """The code gathers row clamp(-(j' - i') + k) of keys j' and transposes: delta(i, j), where Eq. 4 has delta(j, i)."""
    bias = perturb(DeBERTa(HEADS, HEAD_DIM, buckets=8, max_distance=distance, released=True))
    q, k, v = inputs(2, t=T, s=S)
    keys, queries = bias.keys.weight, bias.queries.weight

    def score(b, h, i, j):
        there = bias.bucket(torch.tensor(offset(i, j)))
        return (q[b, h, i] @ k[b, h, j] + q[b, h, i] @ keys[h, there] + queries[h, there] @ k[b, h, j]) / 24**0.5

    assert HEAD_DIM == 8
    arguments = {"terms": bias(X, Y, torch.float64), "scale": 24**-0.5}
    close(softmax_attention(q, k, v, **arguments), attend(logits_of(score), v[:, :, None]))


@each(("axes", "outside"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_clipped_keys_add_a_vector_to_keys(axes, outside):
    """weight_ij = <phi(q_i), phi(k_j) + phi(w_clip(y_j - x_i))>, each axis clipped by itself, class tokens apart."""
    x, y = (X, Y) if axes == 1 else (grid(2, 3) + 2, grid(3, 3))
    reach, (q, k, v) = 2, inputs(2, t=T, s=S)
    bias = perturb(ClippedKeys(HEADS, HEAD_DIM, reach=reach, axes=axes, outside=outside))
    rows = list(itertools.product(range(-reach, reach + 1), repeat=axes))
    assert bias.weight.shape == (HEADS, len(rows) + 2 * (outside > 0), HEAD_DIM)

    def vector(h, i, j):
        near = tuple(clip(int(b - a), -reach, reach) for a, b in zip(x[i], y[j], strict=True))
        inner = rows.index(near)
        return bias.weight[h, len(rows) if j < outside else len(rows) + 1 if i < outside else inner]

    weight = logits_of(lambda b, h, i, j: elu1(q[b, h, i]) @ (elu1(k[b, h, j]) + elu1(vector(h, i, j))))
    out = linear_attention(q, k, v, terms=bias(x, y, torch.float64), feature_map=elu1)
    close(out, weight @ v / weight.sum(-1, keepdim=True))
    logits = logits_of(lambda b, h, i, j: q[b, h, i] @ (k[b, h, j] + vector(h, i, j)) / HEAD_DIM**0.5)
    close(softmax_attention(q, k, v, terms=bias(x, y, torch.float64)), attend(logits, v[:, :, None]))


def test_clipped_keys_may_begin_with_next_to_no_weight():
    q, k, v = inputs(2, t=S, s=S)
    plain = linear_attention(q, k, v, feature_map=elu1)
    usual, little = (ClippedKeys(HEADS, HEAD_DIM, reach=2, mean=mean) for mean in (0.0, -30.0))
    close(little.parameter, usual.parameter - 30)
    found = [linear_attention(q, k, v, feature_map=elu1, terms=bias(*[sequence(S)] * 2)) for bias in (usual, little)]
    close(found[1], plain, roundings=1e5)
    assert (found[0] - plain).abs().max() > 0.01


@each("kernel", ["log", "power"])
def test_kerple_subtracts_a_kernel_of_the_distance(kernel):
    bias, (q, k, v) = perturb(Kerple(HEADS, kernel=kernel), 5), inputs(2, t=T, s=S)
    (r1, r2) = [[n.item() for n in a] for a in bias.numbers()]
    assert min(r1 + r2) > 0
    assert kernel == "log" or max(r2) < 2

    def kernel_of(h, t):
        return r1[h] * (math.log(1 + r2[h] * abs(t)) if kernel == "log" else abs(t) ** r2[h])

    logits = logits_of(lambda b, h, i, j: q[b, h, i] @ k[b, h, j] / HEAD_DIM**0.5 - kernel_of(h, offset(i, j)))
    close(softmax_attention(q, k, v, terms=bias(X, Y, torch.float64)), attend(logits, v[:, :, None]))


@each("kernel", ["log", "power"])
def test_kerples_kernels_are_conditionally_positive_definite(kernel):
    """sum_ij c_i c_j k(x_i - x_j) >= 0 wherever c sums to zero, real positions included."""
    x = 30 * torch.randn(40, 1, dtype=torch.float64)
    (term,) = Kerple(64, kernel=kernel, seed=3)(x, x, torch.float64)
    basis = torch.linalg.qr(torch.cat((torch.ones(40, 1), torch.randn(40, 39)), 1).double()).Q[:, 1:]
    assert torch.linalg.eigvalsh(basis.mT @ term.table @ basis).min() > -1e-9


@each("kernel", ["log", "power"])
def test_positions_learn_from_kerple(kernel):
    """Real positions have gradients, of a token's distance to itself, too."""
    bias, x = perturb(Kerple(HEADS, kernel=kernel)), torch.randn(5, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bias(x, x, torch.float64)[0].table, x)


def test_kerple_starts_where_its_code_draws():
    for kernel, most in (("log", (2, 1)), ("power", (1, 2))):
        for numbers, limit in zip(Kerple(1000, kernel=kernel).numbers(), most, strict=True):
            assert 0.0099 < numbers.min() < 0.02 * limit
            assert 0.98 * limit < numbers.max() <= limit
            assert numbers.mean().item() == pytest.approx(limit / 2, rel=0.1)


def test_kerples_power_of_one_is_alibi():
    bias, slopes = Kerple(4, kernel="power").double(), alibi_rates(4)
    with torch.no_grad():
        bias.first.weight.copy_(slopes.expm1().log())
        bias.second.weight.zero_()
    q, k, v = inputs(2, t=T, heads=4)
    at = isopos.alibi(HEAD_DIM, 4, attention="softmax").at(X, dtype=torch.float64)
    close(softmax_attention(q, k, v, terms=bias(X, X, torch.float64)), softmax_attention(q, k, v, **at))


@each("factor", [1.3, -0.1])
def test_fire_is_a_network_of_shares(factor):
    """psi(|i - j|) / psi(max(L, i)), query by query; psi(n) = log(c n + 1), f one hidden layer of ReLU; L is at least 1."""
    x, (q, k, v) = torch.tensor([[-3], [0], [2], [5], [8], [40]]), inputs(2, t=T, s=S)
    bias = perturb(Fire(HEADS, width=3, length=4.0), 0.5)
    with torch.no_grad():
        bias.threshold.weight.fill_(factor)
    c, (u, w), out = bias.rate.weight.item(), bias.into.weight, bias.out.weight

    def score(b, h, i, j):
        distance, last = abs((Y[j] - x[i]).item()), max(4 * abs(factor), 1, x[i].item())
        share = math.log(abs(c) * distance + 1) / math.log(abs(c) * last + 1)
        return q[b, h, i] @ k[b, h, j] / HEAD_DIM**0.5 + out[h] @ (share * u + w).clamp_min(0)

    close(softmax_attention(q, k, v, terms=bias(x, Y, torch.float64)), attend(logits_of(score), v[:, :, None]))


def test_fire_is_relative_for_queries_up_to_its_length():
    bias = perturb(Fire(HEADS, length=50.0))
    last = int(50 * bias.threshold.weight.item())
    for by, same in ((last - int(X.max()), True), (last - int(X.max()) + 2, False)):
        (here,), (there,) = bias(X, Y, torch.float64), bias(X + by, Y + by, torch.float64)
        assert torch.allclose(here.table, there.table, rtol=0, atol=1e-12) == same


def test_numbers_have_no_buckets():
    (term,) = Kerple(HEADS)(X, Y)
    with pytest.raises(TypeError, match="index: expected a term with buckets"):
        term.index()


def test_clipped_keys_take_real_positions():
    bias = ClippedKeys(HEADS, HEAD_DIM, reach=2)
    (half,) = bias(X + 0.25, Y.double() + 0.25)
    (whole,) = bias(X, Y)
    assert torch.equal(half.index(), whole.index())


# Modules

MAKE = {
    "t5": lambda: T5(HEADS),
    "shaw": lambda: Shaw(HEAD_DIM, reach=3),
    "deberta": lambda: DeBERTa(HEADS, HEAD_DIM, buckets=8, max_distance=20),
    "clipped-keys": lambda: ClippedKeys(HEADS, HEAD_DIM, reach=3),
    "kerple": lambda: Kerple(HEADS),
    "fire": lambda: Fire(HEADS),
}
every = each("make", MAKE.values(), ids=MAKE)


def test_every_bias_has_a_row():
    final = {getattr(biases, name) for name in biases.__all__} - {biases.RelativeBias}
    assert {type(make()) for make in MAKE.values()} == final


@every
def test_tables_stay_exact_and_positions_are_checked(make):
    bias = make()
    before = [term.table for term in bias(X, Y)]
    assert all(table.dtype == torch.float32 for table in before)
    assert all(term.table.dtype == torch.float64 for term in bias(X, Y, torch.float64))
    assert all(map(torch.equal, [term.table for term in bias.bfloat16()(X, Y)], before))
    for wrong in (X.bool(), X.half(), X.expand(-1, 2), X[:, 0]):
        for arguments in ((wrong, Y), (Y, wrong)):
            with pytest.raises(ValueError, match="positions: expected"):
                bias(*arguments)


@pytest.mark.parametrize("apart", [False, True])
def test_positions_far_out_are_subtracted_before_anything_is_rounded(monkeypatch, apart):
    """Numbers of pairs, and what a GPU's kernel takes in their place."""
    monkeypatch.setattr(biases, "_can_be_lazy", lambda x, y: apart)
    (q, k, _), far = inputs(2, t=T, s=S), 2**40
    for name, make in MAKE.items():
        bias = perturb(make())
        rounded, exact = (bias(X + far, Y + far, dtype) for dtype in (torch.float32, torch.float64))
        for term, expected in zip(rounded, exact, strict=True):
            found = term.scores(q.float(), k.float())
            assert (found - expected.scores(q, k)).abs().max() < 1e-4, name


@each(
    ("make", "spread"),
    [
        (lambda seed: Shaw(HEAD_DIM, seed=seed), HEAD_DIM**-0.5),
        (lambda seed: DeBERTa(HEADS, HEAD_DIM, seed=seed), HEAD_DIM**-0.5),
        (lambda seed: ClippedKeys(HEADS, HEAD_DIM, seed=seed), 1.0),
    ],
)
def test_seeds_choose(make, spread):
    first, again, other = (next(make(seed).parameters()).detach() for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std().item() == pytest.approx(spread, rel=0.1)


@each(
    ("call", "message"),
    [
        (lambda: T5(2, buckets=2), "buckets: expected an even number of at least 4"),
        (lambda: T5(2, buckets=33), "buckets: expected an even number"),
        (lambda: T5(2, buckets=1, bidirectional=False), "buckets: expected at least 2"),
        (lambda: T5(2, buckets=32, max_distance=8), "max_distance larger than 8, the number of near offsets, got 32 and 8"),
        (lambda: DeBERTa(2, 8, buckets=2), "buckets: expected at least 4"),
        (lambda: DeBERTa(2, 8, buckets=32, max_distance=17), "max_distance larger than 17, got 32 and 17"),
        (lambda: Shaw(8, reach=0), "reach: expected an integer of at least 1, got 0"),
        (lambda: Shaw(8, reach=2.0), "reach: expected an integer of at least 1, got 2.0"),
        (lambda: Kerple(2, kernel="exp"), "kernel: expected one of log, power, got 'exp'"),
        (lambda: Fire(2, width=0), "width: expected an integer of at least 1, got 0"),
        (lambda: Fire(2, length=0.0), "length: expected at least one step, got 0.0"),
        (lambda: ClippedKeys(2, 8, reach=0), "reach: expected an integer of at least 1, got 0"),
        (lambda: ClippedKeys(2, 8, axes=0), "axes: expected an integer of at least 1"),
        (lambda: ClippedKeys(2, 8, outside=-1), "outside: expected an integer of at least 0, got -1"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
