"""Test encodings by skew generators against matrix exponentials, and learned schemes against their special cases."""

import pytest
import torch
from cases import HEAD_DIM, HEADS, close, each, generator, inputs, normals, perturb

import isopos
from isopos import bases, generators
from isopos.encodings import Exponential, Rotary, rope_frequencies
from isopos.generators import Circulant, Commuting, RankTwo
from isopos.positions import grid, sequence

T = 7
LINE, PLANE = torch.randn(T, 1, dtype=torch.float64) * 20, torch.randn(T, 2, dtype=torch.float64) * 20


def scores(encoding, q, k, x):
    """<rho(x_i) q, rho(x_j) k> of all pairs."""
    rho = encoding(x, torch.float64)
    return rho(q) @ rho(k).mT


def by_exponential(skew, q, k, x):
    """<exp(X_i) q, exp(X_j) k> with X = sum_c x_c L_c of skew matrices ``[h c d d]``."""
    rho = torch.matrix_exp(torch.einsum("tc,hcij->htij", x, skew).contiguous())
    return torch.einsum("htij,bhtj->bhti", rho, q) @ torch.einsum("htij,bhtj->bhti", rho, k).mT


def same_scores(encoding, other, x, **options):
    q, k, _ = inputs(2, t=len(x), d=encoding.features)
    close(scores(encoding, q, k, x), scores(other, q, k, x), **options)


def test_circulant_is_the_exponential_of_circulant_matrices():
    """Row i of C is (c_i, c_(i-1), ...), each row the one before moved by one (STRING, Eq. 11)."""
    columns, (q, k, _) = generator()[:, :2], inputs(2, t=T)
    rows = [columns.flip(-1).roll(1 + i, -1) for i in range(HEAD_DIM)]
    assert rows[1][0, 0, 0] == columns[0, 0, 1]
    matrix = torch.stack(rows, -2)
    close(
        scores(Circulant(columns, learned=False), q, k, PLANE),
        by_exponential(matrix - matrix.mT, q, k, PLANE),
        roundings=1e5,
    )


def test_commuting_is_the_exponential_of_blocks():
    blocks, direction, (q, k, _) = generator(HEADS * 2, 4).view(HEADS, 2, 4, 4), torch.randn(HEADS, 2, 2), inputs(2, t=T)
    skew = torch.stack(
        [
            torch.stack([torch.block_diag(*(w * (A - A.mT) for w, A in zip(row, head, strict=True))) for row in rows])
            for rows, head in zip(direction.double(), blocks, strict=True)
        ]
    )
    encoding = Commuting(blocks, direction, learned=False)
    close(scores(encoding, q, k, PLANE), by_exponential(skew, q, k, PLANE), roundings=1e6)


def test_rank_two_is_its_exponential_and_the_closed_form():
    (a, b), (q, k, _) = (normals(), normals().flip(0)), inputs(2, t=T)
    skew = a[:, :, None] * b[:, None] - b[:, :, None] * a[:, None]
    encoding = RankTwo(a, b, learned=False)
    close(scores(encoding, q, k, LINE), by_exponential(skew[:, None], q, k, LINE), roundings=1e6)
    s = (a.square().sum(-1) * b.square().sum(-1) - (a * b).sum(-1).square()).sqrt()[:, None, None, None]
    x, skew = LINE[..., None], skew[:, None]
    matrix = torch.eye(HEAD_DIM).double() + (s * x).sin() / s * skew + (1 - (s * x).cos()) / s**2 * skew @ skew
    close(encoding(LINE, torch.float64)(q), torch.einsum("htij,bhtj->bhti", matrix, q), roundings=1e5)


def test_commuting_in_one_block_is_an_exponential():
    A = generator()
    one = Commuting(A[:, None], torch.ones(1, 1, 1), learned=False)
    same_scores(one, Exponential(A, learned=False), LINE, roundings=1e5)


def test_cayley_is_equation_10():
    A = generator()
    skew, unit = A - A.mT, torch.eye(HEAD_DIM).double()
    close(bases.Cayley(A)(dtype=torch.float64).matrix, (unit - skew) @ torch.linalg.inv(unit + skew))


def axial(axes, pairs):
    """Rope on each axis, with the given numbers of pairs."""
    return Rotary(torch.block_diag(*(rope_frequencies(n) for n in pairs)).view(1, axes, -1))


@each(("axes", "pairs"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1])])
def test_string_starts_as_rope_on_each_axis(axes, pairs):
    x = grid(*(3,) * axes)
    same_scores(isopos.string(HEAD_DIM, HEADS, axes=axes).encoding, axial(axes, pairs), x, dtype=torch.float32)


def test_circulant_string_starts_with_ropes_angles():
    encoding = isopos.string(10, HEADS, variant="circulant", axes=2).encoding
    spectrum = torch.fft.fft(encoding.parameter.double())
    angles = -2 * spectrum.imag[..., : 10 // 2]  # the first pair, of the ends, does not turn
    expected = torch.tensor([[0, 1, 0.01, 0, 0], [0, 0, 0, 1, 0.01]], dtype=torch.float64)
    close(angles, expected.expand(HEADS, -1, -1), dtype=torch.float32)


def test_axial_comrope_starts_as_rope_on_each_axis():
    encoding = isopos.comrope(16, HEADS, variant="axial").encoding
    same_scores(encoding, axial(2, [4, 4]), grid(3, 3), dtype=torch.float32)


def test_pairs_of_comrope_are_rope_with_frequencies_over_axes():
    encoding = isopos.comrope(HEAD_DIM, HEADS, block=2, axes=3).encoding
    frequency = encoding.directions().double() * rope_frequencies(HEAD_DIM // 2)
    same_scores(encoding, Rotary(frequency.detach()), grid(2, 2, 2), dtype=torch.float32)


def test_grape_with_all_planes_is_rope_with_its_speeds():
    encoding = isopos.grape(HEAD_DIM, HEADS, planes=HEAD_DIM // 2).encoding
    speed = rope_frequencies(HEADS * HEAD_DIM // 2).view(-1, HEADS).mT
    senses = torch.stack([part.parameter.detach().double() for part in encoding.parts], 1).det().sign()  # of a and b
    same_scores(encoding, Rotary((-senses * speed)[:, None]), sequence(T), dtype=torch.float32)


def test_grape_leaves_other_directions():
    encoding, x = isopos.grape(HEAD_DIM, HEADS).encoding, torch.randn(1, HEADS, T, HEAD_DIM, dtype=torch.float64)
    moved = encoding(sequence(T), torch.float64)(x) - x
    assert (torch.linalg.svdvals(moved)[..., 2:] < 1e-12).all()
    assert (torch.linalg.svdvals(moved)[..., :2] > 1e-3).all()


@each("name", ["string", "comrope", "grape", "string-circulant"])
def test_learned_generators_stay_relative_and_isometric(name):
    """The laws hold to float64 precision for any parameter values."""
    options = {"variant": "circulant"} if "-" in name else {}
    encoding = perturb(isopos.schemes.REGISTRY[name.partition("-")[0]](HEAD_DIM, HEADS, axes=2, **options).encoding, 10.0)
    (q, k, _), x = inputs(2, t=T), 100 * PLANE
    close(scores(encoding, q, k, x + 1000), scores(encoding, q, k, x), roundings=1e6)
    close(encoding(x, torch.float64)(q).norm(dim=-1), q.norm(dim=-1))


BAD = {
    "circulant odd": (lambda: Circulant(torch.ones(1, 1, 5)), "generator: expected .h c d. with even d of at least 4"),
    "commuting odd": (lambda: Commuting(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1)), "generator: expected .h n b b."),
    "commuting zero": (lambda: Commuting(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 1)), "generator: expected a skew part"),
    "direction": (lambda: Commuting(generator()[:, None], torch.ones(1, 1, 2)), r"direction: expected \[h c 1\]"),
    "no direction": (lambda: Commuting(generator()[:, None], torch.zeros(1, 1, 1)), "direction: expected .*, not zero"),
    "parallel": (lambda: RankTwo(normals(), 2 * normals()), "a, b: expected .*no rows parallel"),
    "zero": (lambda: RankTwo(normals(), 0 * normals()), "a, b: expected .*no rows parallel"),
    "cayley": (lambda: bases.Cayley(torch.ones(2, 3)), "generator: expected .h d d."),
    "string": (lambda: isopos.string(4, 1, axes=3), "head size: expected at least 6 features for 3 axes, got 4"),
    "string circulant": (lambda: isopos.string(2, 1, variant="circulant"), "head size: expected at least 4 features"),
    "comrope": (lambda: isopos.comrope(6, 1, block=4), "block: expected an even number that divides 6 features"),
    "comrope axial": (lambda: isopos.comrope(6, 1, variant="axial"), "divides 6 features on 2 axes, got 2"),
    "grape": (lambda: isopos.grape(4, 1, planes=3), "head size: expected at least 6 features for 3 parts, got 4"),
}


@each(("call", "message"), BAD.values(), ids=BAD)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_that_could_not_learn_are_refused_on_loading():
    encoding = Commuting(generator()[:, None], torch.ones(1, 1, 1))
    state = {name: torch.zeros_like(value) for name, value in encoding.state_dict().items()}
    with pytest.raises(ValueError, match="generator: expected a skew part"):
        encoding.load_state_dict(state)


def test_every_class_is_tested():
    assert {Circulant, Commuting, RankTwo} == {getattr(generators, name) for name in generators.__all__}


def test_grape_takes_an_odd_number_of_features():
    for size, options in ((7, {}), (9, {"axes": 2, "planes": 2})):
        scheme = isopos.grape(size, HEADS, **options)
        assert scheme.encoding.features == size
        assert isopos.laws.check(scheme).holds
