"""Test contragredient pairs, which are relative but no isometries: formulas, and completeness on a line."""

import itertools
import math

import pytest
import torch
from cases import HEAD_DIM, HEADS, close, each, inputs

import isopos
from isopos import contragredient, laws
from isopos.contragredient import ContragredientSum, Jordan
from isopos.encodings import Permutation, Rotary, rope_frequencies
from isopos.positions import sequence

T, S = 5, 7
X, Y = 4 * sequence(T) - 3, 3 * sequence(S).flip(0) - 5  # positions of queries and keys, far apart and out of order


def scores(pair, q, k, x=X, y=Y):
    """<query(x) q, key(y) k> of all pairs ``[*b h t s]``."""
    return pair.query(x, torch.float64)(q) @ pair.key(y, torch.float64)(k).mT


def test_every_class_is_tested():
    assert set(contragredient.__all__) == {
        "ContragredientSum",
        "Contragredient",
        "Jordan",
        "Projection",
    }  # the last one in test_poses.py


# Jordan blocks


def test_xpos_turns_and_shrinks_with_the_offset():
    """Sun et al., Algorithm 1: pair i shrinks by zeta_i = (2i / d + 0.4) / 1.4 in `length` steps."""
    (q, k, _), frequency = inputs(2, t=T, s=S), rope_frequencies(HEAD_DIM // 2, 50.0)
    found = scores(isopos.xpos(HEAD_DIM, HEADS, base=50.0, length=20.0).encoding, q, k)
    expected = torch.zeros_like(found)
    for b, h, i, j in itertools.product(*map(range, found.shape)):
        steps = X[i].item() - Y[j].item()
        for n, w in enumerate(frequency.tolist()):
            a, c = (complex(*z[2 * n : 2 * n + 2]) for z in (q[b, h, i], k[b, h, j]))
            zeta = (2 * n / HEAD_DIM + 0.4) / 1.4
            turn = complex(math.cos(w * steps), -math.sin(w * steps))
            expected[b, h, i, j] += (a.conjugate() * c * turn).real * zeta ** (steps / 20)
    close(found, expected)


@each("order", [1, 2, 4])
def test_scores_of_a_block_are_exponentials_times_powers_of_the_offset(order):
    """Pairs as complex numbers z: sum over n of t^n / (n! length^n) e^(g t) Re(conj(q_i) e^(i w t) k_(i+n))."""
    growth, w = torch.tensor([0.1, -0.03]), torch.tensor([0.7, 0.2])
    q, k, _ = inputs(2, t=T, s=S, d=4 * order)
    pair, t = Jordan(growth, w, order=order, length=12.0), (Y.mT - X).double()
    a, b = (torch.view_as_complex(z.unflatten(-1, (order, 2, 2))) for z in (q, k))  # [b h t order block]
    expected = torch.zeros(2, HEADS, T, S, dtype=torch.float64)
    for i, n, block in itertools.product(range(order), range(order), range(2)):
        if i + n < order:
            turn = torch.exp((growth.double() + 1j * w.double())[block] * t) * (t / 12) ** n / math.factorial(n)
            expected += (a[..., i, block].conj()[..., None] * turn * b[..., None, :, i + n, block]).real
    close(scores(pair, q, k), expected)


def test_order_one_without_growth_is_rope():
    (q, k, _), frequency = inputs(2, t=T, s=S), rope_frequencies(HEAD_DIM // 2)
    rho = Rotary(frequency[None, None])
    same = rho.query(X, torch.float64)(q) @ rho.key(Y, torch.float64)(k).mT
    assert torch.equal(scores(Jordan(torch.zeros(4), frequency), q, k), same)


@each("growth", [0.0, 0.05])
def test_alibi_is_an_additive_generator_on_lifted_features(growth):
    """The generator [[0, 1], [0, 0]] between a query's slope and a key's 1 adds slope * (y - x) to any representation."""
    (q, k, v), slope, x = inputs(2, t=9), isopos.alibi(4, HEADS).decay.rate, sequence(9) + 40
    rest = Jordan(torch.full((HEAD_DIM,), growth))
    pair = ContragredientSum([rest, Jordan(torch.zeros(1), order=2, length=64.0)], shared=True)
    lifted = torch.zeros(2, HEADS, 9, 2, dtype=torch.float64)
    query, key = lifted.clone(), lifted.clone()
    query[..., 0], key[..., 1] = slope[:, None] * 64 * HEAD_DIM**0.5, 1.0  # logits are scaled
    sides = pair.query(x, torch.float64), pair.key(x, torch.float64)
    options = {"causal": True, "scale": HEAD_DIM**-0.5}
    found = isopos.softmax_attention(torch.cat((q, query), -1), torch.cat((k, key), -1), v, isometry=sides, **options)
    at = isopos.alibi(HEAD_DIM, HEADS, attention="softmax").at(x)
    at = at | {"isometry": (rest.query(x, torch.float64), rest.key(x, torch.float64))}
    close(found, isopos.softmax_attention(q, k, v, **at, causal=True))


def in_jordan_form(blocks):
    """Jordan blocks of ``(order, growth, frequency or None)``, and their generator J as a matrix, with links of 1 / 16."""
    pairs = [Jordan(torch.tensor([g]), None if w is None else torch.tensor([w]), order=m, length=16.0) for m, g, w in blocks]
    matrices = []
    for m, g, w in blocks:
        inner = torch.tensor([[g]]) if w is None else torch.tensor([[g, -w], [w, g]])
        links = torch.diag(torch.ones(m - 1) / 16, 1)
        matrices.append(torch.kron(torch.eye(m), inner) + torch.kron(links, torch.eye(len(inner))))
    return ContragredientSum(pairs, shared=True), torch.block_diag(*matrices).double()


@each(
    "blocks",
    [
        [(1, 0.2, None), (1, -0.1, 0.5), (1, 0.0, 1.3)],
        [(3, 0.1, None), (2, -0.1, 0.4)],
        [(2, 0.0, None), (1, 0.0, None), (3, 0.05, 0.9)],
    ],
)
def test_every_one_parameter_group_is_jordan_blocks_in_a_basis(blocks):
    """exp(t P J P^-1) between queries and keys is exp(t J) between P^T q and P^-1 k."""
    pair, J = in_jordan_form(blocks)
    d = len(J)
    P = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(d)
    (q, k, _), t = inputs(1, t=T, s=S, d=d), (Y.mT - X).double()
    W = torch.linalg.matrix_exp(t[..., None, None] * (P @ J @ torch.linalg.inv(P)))
    expected = torch.einsum("...hti,tsij,...hsj->...hts", q, W, k)
    close(scores(pair, q @ P, k @ torch.linalg.inv(P).mT), expected, roundings=1e5)


def test_any_real_matrix_generates_jordan_blocks():
    """A random matrix has distinct eigenvalues. Real and imaginary parts of its eigenvectors form the basis."""
    A = 0.2 * torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    values, vectors = torch.linalg.eig(A)
    blocks, columns = [], []
    for value, vector in zip(values.tolist(), vectors.unbind(-1), strict=True):
        if value.imag == 0:
            blocks, columns = [*blocks, (1, value.real, None)], [*columns, vector.real]
        elif value.imag > 0:
            blocks, columns = [*blocks, (1, value.real, value.imag)], [*columns, vector.real, -vector.imag]
    P, (pair, _) = torch.stack(columns, -1), in_jordan_form(blocks)
    assert 0 < sum(w is None for _, _, w in blocks) < len(blocks)
    (q, k, _), t = inputs(1, t=T, s=S, d=7), (Y.mT - X).double()
    expected = torch.einsum("...hti,tsij,...hsj->...hts", q, torch.linalg.matrix_exp(t[..., None, None] * A), k)
    close(scores(pair, q @ P, k @ torch.linalg.inv(P).mT), expected, roundings=1e6, dtype=torch.float32)


def test_the_report_says_that_it_is_a_representation_and_no_isometry():
    for pair in (isopos.jordan(HEAD_DIM, HEADS).encoding, in_jordan_form([(2, 0.01, 0.4), (2, 0.0, None)])[0]):
        report = laws.check(pair)
        assert report.holds
        assert {"homomorphism", "identity", "decomposable", "relative"} <= {f.name for f in report.findings if f.is_law}
        assert not report["unitary"].holds
    unitary = laws.check(ContragredientSum([Rotary(rope_frequencies(2)[None, None])]))
    assert unitary["unitary"].holds


class _Lame(Jordan):
    """A pair in which queries grow, too."""

    def query(self, x, dtype=torch.float32):
        return self.key(x, dtype)


def test_a_pair_that_is_not_contragredient_is_found():
    assert {"relative", "identity", "decomposable"} <= {*laws.check(_Lame(torch.full((4,), 0.01))).broken}


# How far


@each(
    ("pair", "low", "high", "why"),
    [
        (isopos.xpos(HEAD_DIM).encoding, 16000, 17000, "scales leave float32"),
        (Jordan(torch.zeros(4), torch.ones(4), order=2, length=512.0), 4095, 4097, "float32 loses offsets"),
        (Jordan(torch.zeros(4), order=3, length=512.0), 1400, 1500, "float32 loses offsets"),
        (
            ContragredientSum([Jordan(torch.ones(1)), Rotary(torch.ones(1, 1, 1))], shared=True),
            40,
            42,
            "scales leave float32",
        ),
    ],
)
def test_keys_stay_valid_and_far_positions_are_refused(pair, low, high, why):
    q, k, _ = inputs(1, t=9, d=pair.features)
    whole = pair.key(sequence(9))(k)
    assert torch.equal(pair.key(sequence(5))(k[..., :5, :]), whole[..., :5, :])
    limit = pair.max_length
    assert low < limit < high
    for x in (limit - 1, 1 - limit):
        near, far = torch.tensor([[x]]), torch.tensor([[x + (1 if x > 0 else -1)]])
        ends = pair.query(near)(q[..., :1, :].float()), pair.key(near)(k[..., :1, :].float())
        assert all(end.isfinite().all() and (end != 0).all() for end in ends)
        for side in (pair.query, pair.key):
            with pytest.raises(ValueError, match=f"positions: expected magnitudes below {limit}, beyond which {why}"):
                side(far)


@each("order", [2, 3])
def test_float32_scores_are_exact_as_far_as_is_promised(order):
    pair = Jordan(torch.zeros(8), rope_frequencies(8), order=order, length=512.0)
    q, k, _ = (a / a.norm(dim=-1, keepdim=True) for a in inputs(4, t=64, d=pair.features))
    far = sequence(64) + pair.max_length - 64
    near = scores(pair, q, k, sequence(64), sequence(64))
    found = (pair.query(far)(q.float()) @ pair.key(far)(k.float()).mT).double()
    assert 1e-8 < (found - near).abs().max() < 2e-6


def test_a_common_shift_of_positions_changes_no_score():
    """The error for far positions suggests such a shift."""
    (q, k, _), pair = inputs(1, t=T, s=S), isopos.jordan(HEAD_DIM, HEADS).encoding
    close(scores(pair, q, k), scores(pair, q, k, X - 1000, Y - 1000))


@each("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_offsets_whole_and_in_a_stream(dtype):
    """At the end of the line powers of positions are rounded to float32, not to the dtype of queries and keys."""
    scheme, x = isopos.jordan(HEAD_DIM, HEADS, attention="softmax", decay="none"), sequence(9) + 8000
    content = [(3 * a).to(dtype) for a in inputs(1, t=9)]
    exact = scheme(*(a.double() for a in content), x, causal=True)
    whole = scheme(*content, x, causal=True)
    first, state = scheme(*(a[..., :5, :] for a in content), x[:5], state=isopos.State(), causal=True)
    rest, _ = scheme(*(a[..., 5:, :] for a in content), x[5:], state=state, causal=True)
    for out in (whole, torch.cat((first, rest), -2)):
        assert out.dtype == dtype
        close(out, exact, roundings=2)


# Side by side


def test_side_by_side_each_has_separate_features_and_coordinates():
    parts = [Jordan(torch.tensor([0.1]), order=2, length=9.0), Rotary(rope_frequencies(3)[None, None])]
    both = ContragredientSum(parts)
    assert both.group.columns == 2
    q, k, _ = inputs(2, t=T, s=S, d=8)
    x, y = torch.cat((X, 2 * X), -1), torch.cat((Y, Y - 1), -1)
    expected = scores(parts[0], q[..., :2], k[..., :2]) + scores(parts[1], q[..., 2:], k[..., 2:], 2 * X, Y - 1)
    close(scores(both, q, k, x, y), expected)


@each(
    ("call", "message"),
    [
        (lambda: Jordan(torch.ones(2, 2)), r"growth: expected finite floats \[f\]"),
        (lambda: Jordan(torch.tensor([math.nan])), r"growth: expected finite floats \[f\]"),
        (lambda: Jordan(torch.ones(2), torch.ones(3)), r"frequency: expected finite floats \[2\] as growth, got \[3\]"),
        (lambda: Jordan(torch.ones(2), order=0), "order: expected an integer of at least 1, got 0"),
        (lambda: Jordan(torch.ones(2), length=0.0), "length: expected a positive number of steps, got 0"),
        (lambda: Jordan(torch.ones(2), length=math.nan), "length: expected a positive number of steps, got nan"),
        (lambda: isopos.xpos(8, length=math.nan), "length: expected a positive number of steps, got nan"),
        (lambda: ContragredientSum([]), "parts: expected one or more contragredient pairs or encodings"),
        (lambda: ContragredientSum([Rotary(torch.ones(1, 1, 2), lift=True)]), "parts: expected each to return as many"),
        (
            lambda: ContragredientSum([Jordan(torch.ones(2)), Permutation(torch.arange(2)[None])], shared=True),
            "one group to share",
        ),
        (lambda: Jordan(torch.ones(2)).query(torch.ones(3, 2)), r"positions: expected \[\*b t 1\]"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_shear_alone_has_a_number_of_features():
    pair = contragredient.Jordan(torch.zeros(2), order=3)
    with pytest.raises(ValueError, match="x: expected 6 features, got 7"):
        pair.query(sequence(4))(torch.randn(1, 1, 4, 7))
