"""Test couplings against their formulas, and random couplings in expectation."""

import itertools
import math

import pytest
import torch
from cases import HEAD_DIM, HEADS, close, each, generator, inputs, perturb

import isopos
from isopos import couplings, laws
from isopos.attention import linear_attention
from isopos.couplings import Absolute, Adapted, Constrained, ConvSPE, Lie, Polar, SineSPE, TransformerXL
from isopos.encodings import Exponential, Rotary, rope_frequencies
from isopos.feature_maps import Favor
from isopos.maps import Mapped
from isopos.ops.noise import gaussian
from isopos.positions import grid, sequence

T, S = 5, 7
X, Y = 4 * sequence(T) - 3, 3 * sequence(S).flip(0) - 5  # positions of queries and keys, far apart and out of order


def scores(coupling, q, k, x=X, y=Y):
    """<query(x) q, key(y) k> of all pairs ``[*b h t s]``."""
    return coupling.query(x, torch.float64)(q) @ coupling.key(y, torch.float64)(k).mT


def expected_scores(score):
    """score(b, h, i, j) of all pairs."""
    out = torch.zeros(2, HEADS, T, S, dtype=torch.float64)
    for index in itertools.product(*map(range, out.shape)):
        out[index] = torch.as_tensor(score(*index), dtype=torch.float64).detach()
    return out


# Absolute


@each("side", ["query", "key"])
def test_absolute_positions_act_on_one_side(side):
    (q, k, _), skew = inputs(2, t=T, s=S), generator() - generator().mT
    coupling = Absolute(Exponential(generator(), learned=False), side)
    powers = {"query": -X, "key": Y}[side].double()
    matrix = torch.matrix_exp(powers[:, None, :, None] * skew)  # [t h d d]

    def score(b, h, i, j):
        return q[b, h, i] @ matrix[i if side == "query" else j, h] @ k[b, h, j]

    close(scores(coupling, q, k), expected_scores(score))


def test_absolute_positions_are_checked_on_both_sides():
    coupling = Absolute(Rotary(rope_frequencies(4)[None, None]))
    for wrong in (X.bool(), X.expand(-1, 2)):
        for side in (coupling.query, coupling.key):
            with pytest.raises(ValueError, match="positions: expected"):
                side(wrong)


# Polar coordinates


@each("magnitudes", [True, False])
def test_polar_is_a_sum_of_cosines_of_magnitudes(magnitudes):
    """sum_i mu(q_i) mu(k_i) cos(w_i (y - x) + phase_i), mu(z) = log(1 + exp(z)) or, with a feature map elsewhere, z."""
    (q, k, _), frequency = inputs(2, t=T, s=S), rope_frequencies(HEAD_DIM, 20.0)
    coupling = perturb(Polar(frequency, HEADS, magnitudes=magnitudes), 30.0)
    mu = [torch.log(1 + z.exp()) if magnitudes else z for z in (q, k)]

    def score(b, h, i, j):
        turn = (frequency * (Y[j] - X[i]) + coupling.phase[h]).cos()
        return (mu[0][b, h, i] * mu[1][b, h, j] * turn).sum()

    close(scores(coupling, q, k), expected_scores(score))


def test_polar_starts_symmetric_and_its_phases_tell_direction():
    (q, _, _), coupling = inputs(2, t=T), Polar(rope_frequencies(HEAD_DIM), HEADS)
    close(scores(coupling, q, q, X, X), scores(coupling, q, q, X, X).mT)
    perturb(coupling, 10.0)
    assert not torch.allclose(scores(coupling, q, q, X, X), scores(coupling, q, q, X, X).mT)


def test_pope_has_magnitudes_where_there_is_no_feature_map():
    assert isopos.pope(HEAD_DIM, HEADS, attention="softmax").encoding.magnitudes
    assert not isopos.pope(HEAD_DIM, HEADS).encoding.magnitudes
    assert isopos.pope(7, HEADS).encoding.out_features == 14


# Generators that do not commute

PLACES = torch.randn(6, 2, dtype=torch.float64)


def lie(size=1.0, axes=2):
    return Lie(size * generator(HEADS * axes).unflatten(0, (HEADS, axes)))


def test_lie_is_the_exponential_of_a_sum():
    (q, k, _), coupling = inputs(1, t=6), perturb(lie())
    skew = coupling.generator - coupling.generator.mT
    rho = torch.stack([torch.matrix_exp((x[:, None, None] * skew).sum(1)) for x in PLACES], 1)  # [h t d d]
    expected = (rho @ q[..., None]).squeeze(-1) @ (rho @ k[..., None]).squeeze(-1).mT
    close(scores(coupling, q, k, PLACES, PLACES), expected)
    close(coupling.query(PLACES, torch.float64)(q).norm(dim=-1), q.norm(dim=-1))


def test_lie_is_relative_on_lines_through_the_origin_only():
    """It is also relative if generators commute, as on one axis or for multiples of one generator."""
    (q, k, _), steps = inputs(1, t=6), torch.randn(6, 1, dtype=torch.float64)
    one = generator(HEADS)[:, None]
    for coupling, x, shift, relative in (
        (lie(), steps * PLACES[0], 3 * PLACES[0], True),
        (lie(), steps * PLACES[0], 3 * PLACES[1], False),
        (lie(), PLACES, PLACES[0], False),
        (lie(axes=1), steps, torch.tensor([2.5]), True),
        (Lie(torch.cat((one, -2 * one), 1)), PLACES, PLACES[0], True),
    ):
        here, there = (scores(coupling, q, k, z, z) for z in (x, x + shift))
        assert torch.allclose(here, there, rtol=0, atol=1e-12) == relative


def test_the_error_of_lie_is_of_second_order_in_commutators():
    """exp(X)^T exp(Y) = exp(Y - X) exp(-[X, Y] / 2 + ...): with half the size of X and Y a quarter of the error."""
    errors = []
    for size in (1e-2, 5e-3):
        skew = size * (lie().generator - lie().generator.mT).double()
        X, Y = skew.unbind(1)
        rho_x, rho_y, both = (torch.matrix_exp(Z) for Z in (X, Y, Y - X))
        commutator = X @ Y - Y @ X
        errors.append((rho_x.mT @ rho_y - both).norm().item())
        assert errors[-1] == pytest.approx(commutator.norm().item() / 2, rel=0.05)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)


@each("wrong", [torch.ones(2, 3, 3), torch.ones(1, 2, 3, 4)])
def test_lie_needs_square_generators(wrong):
    with pytest.raises(ValueError, match=r"generator: expected \[h c d d\]"):
        Lie(wrong)


def test_the_report_says_what_holds_instead():
    for name, instead in (("liere", "along lines"), ("spe-sine", "in expectation"), ("fire", "for queries up to L")):
        report = laws.check(isopos.schemes.REGISTRY[name](HEAD_DIM, HEADS))
        law = "attention" if name == "fire" else "relative"
        assert law in report.broken
        assert f"instead: relative {instead}" in report[law].note
        assert report[law].figure > 1e-3
    assert "instead" not in str(laws.check(isopos.sinusoidal(HEAD_DIM, HEADS)))


# Constrained projections


def constrained(axes=1, **options):
    frequency = rope_frequencies(6, 20.0).view(2, 3)[:axes]
    return perturb(Constrained(HEAD_DIM, HEADS, frequency, **options), 1.0), frequency


def test_constrained_is_the_notes_projection():
    """<u_x W_q*, u_y W_k*> with W_q* = blockdiag([[a, b], [-b, a]]), W_k* = I, u = [sin w_1 x, cos w_1 x, ...]."""
    (q, k, _), (coupling, frequency) = inputs(2, t=T, s=S), constrained()

    def u(x):
        return torch.tensor([f(w * x) for w in frequency[0].tolist() for f in (math.sin, math.cos)], dtype=torch.float64)

    def score(b, h, i, j):
        blocks = [torch.tensor([[a, b], [-b, a]], dtype=torch.float64) for a, b in coupling.projection[h].tolist()]
        return q[b, h, i] @ k[b, h, j] + u(X[i].item()) @ torch.block_diag(*blocks) @ u(Y[j].item())

    close(scores(coupling, q, k), expected_scores(score))


def test_constrained_is_a_sum_of_waves_on_each_axis():
    (q, k, _), (coupling, frequency) = inputs(2, t=T, s=S), constrained(axes=2)
    x, y = grid(2, 3)[:T] - 7, 2 * grid(3, 3)[:S]

    def score(b, h, i, j):
        waves = 0.0
        for axis in range(2):
            for m in range(3):
                angle = (frequency[axis, m] * (x[i, axis] - y[j, axis])).item()
                cos, sin = coupling.projection[h, 3 * axis + m].tolist()
                waves += cos * math.cos(angle) + sin * math.sin(angle)
        return (q[b, h, i] @ k[b, h, j]).item() + waves

    close(scores(coupling, q, k, x, y), expected_scores(score))


def test_constrained_learns_frequencies_a_head():
    """q k + sum_m a cos(w (x - y)) + b sin(w (x - y)) with frequencies w of each head, axis and wave, which learn."""
    (q, k, _), x, y = inputs(2, t=T, s=S), grid(2, 3)[:T] - 7, 2 * grid(3, 3)[:S]
    start = rope_frequencies(6, 20.0).view(2, 3)
    fixed, coupling = (Constrained(HEAD_DIM, HEADS, start, learned=learned) for learned in (False, True))
    close(scores(coupling, q, k, x, y), scores(fixed, q, k, x, y), dtype=torch.float32)
    perturb(coupling, 1.0)

    def score(b, h, i, j):
        waves = 0.0
        for n, (cos, sin) in enumerate(coupling.projection[h].tolist()):
            axis, m = divmod(n, 3)
            angle = coupling.waves.weight[h, axis, m].item() * (x[i, axis] - y[j, axis]).item()
            waves += cos * math.cos(angle) + sin * math.sin(angle)
        return (q[b, h, i] @ k[b, h, j]).item() + waves

    close(scores(coupling, q, k, x, y), expected_scores(score))
    scores(coupling, q, k, x, y).square().sum().backward()
    assert (coupling.waves.weight.grad != 0).all()


def test_tokens_outside_the_grid_have_no_waves():
    (q, k, _), (coupling, _) = inputs(2, t=T, s=S), constrained(outside=2)
    inner, _ = constrained()
    inner.load_state_dict(coupling.state_dict())
    expected = scores(inner, q, k)
    plain = q @ k.mT
    expected[..., :2, :], expected[..., :2] = plain[..., :2, :], plain[..., :2]
    close(scores(coupling, q, k), expected)


def test_constrained_channels_are_relative_in_expectation_ahead_of_favor():
    """A shift changes the scores of each draw, but not their mean over draws, exp(score / sqrt(d))."""
    coupling = Constrained(2, 1, torch.tensor([[0.5]]))
    q, k = (0.5 * torch.randn(1, 1, 2, 2, dtype=torch.float64) for _ in range(2))
    x, y, seeds = sequence(2), 3 - sequence(2), 400
    maps = [(coupling.query(x + s, torch.float64)(q), coupling.key(y + s, torch.float64)(k)) for s in (0, 9)]
    phis = [Favor(4, 64, seed=seed).double() for seed in range(seeds)]
    rows = [torch.stack([(phi(a) * phi(b)).sum(-1)[0, 0] for a, b in maps]) * torch.exp(2 * shrink(phi)) for phi in phis]
    draws = torch.stack(rows)
    mean, error = draws.mean(0), draws.std(0) / seeds**0.5
    exact = torch.exp((maps[0][0] * maps[0][1]).sum(-1)[0, 0] / 2)
    assert ((mean - exact).abs() < 5 * error).all()
    assert (error < 0.05 * exact).all()
    assert (draws[:, 0] - draws[:, 1]).abs().max() > 0.1


def shrink(phi):
    """Logarithm of the factor by which Favor divides its features."""
    return (phi.projection.double().square().sum(-1).amax() / 2 - 30).clamp_min(0)


# Transformer-XL


def test_transformer_xl_is_equation_7():
    """q^T k + q^T W p + u^T k + v^T W p with p of the offset (RoFormer's Eq. 6 misprints absolute ones)."""
    (q, k, _), width = inputs(2, t=T, s=S), 6
    coupling = perturb(TransformerXL(HEAD_DIM, HEADS, width), 1.0)
    u, v, w = coupling.content.weight[:, 0], coupling.location.weight[:, 0], coupling.projection.mT
    assert (u != 0).all()

    def p(offset):
        angles = [offset * 10000 ** (-2 * i / width) for i in range(width // 2)]
        return torch.tensor([f(angle) for angle in angles for f in (math.cos, math.sin)], dtype=torch.float64)

    def score(b, h, i, j):
        there = w[h] @ p(Y[j].item() - X[i].item())
        return q[b, h, i] @ k[b, h, j] + q[b, h, i] @ there + u[h] @ k[b, h, j] + v[h] @ there

    close(scores(coupling, q, k), expected_scores(score))


# Stochastic encodings

DRAWS = 600


def draws_of(make):
    """Scores ``[draw t]`` of one query and key at offsets, for seeds 0, 1, ... with the same parameters."""
    q, k = torch.randn(2, 1, HEADS, T, 3, dtype=torch.float64)
    state, found = perturb(make(0)).state_dict(), []
    x, y = X, X + torch.tensor([0, 1, -2, 3, -8])[:, None]
    for seed in range(DRAWS):
        coupling = make(seed).double()
        coupling.load_state_dict(state)
        found.append((coupling.query(x, torch.float64)(q) * coupling.key(y, torch.float64)(k)).sum(-1)[0])
    return torch.stack(found), q[0], k[0], (y - x)[:, 0], coupling


def assert_mean(draws, expected):
    mean, error = draws.mean(0), draws.std(0) / DRAWS**0.5
    assert ((mean - expected).abs() < 5 * error).all()
    assert (error < 0.1).all()
    assert expected.abs().max() > 0.5
    assert draws.std(0).min() > 0.1, "one draw is not its mean"


def gated(coupling, covariance):
    """g + (1 - g) P(x - y) of each feature, ``[h t d]`` (Liutkus et al. 2021, gated SPE)."""
    if coupling.gate is None:
        return covariance
    gate = 1 / (1 + torch.exp(-coupling.gate.weight))[:, None]
    return gate + (1 - gate) * covariance


SPE = each("options", [{}, {"gated": True, "noise_per_head": True}])  # crossed by the test of heads that learn alike


@SPE
def test_sine_spe_approaches_its_covariance(options):
    """E <Q_x, K_y> = sum_d q_d k_d sum_k gain^2 cos(w (x - y) + phase)."""
    draws, q, k, offset, coupling = draws_of(lambda seed: SineSPE(3, HEADS, sines=2, realizations=16, seed=seed, **options))
    angle = -coupling.frequency[:, None] * offset[:, None, None] + coupling.phase.weight[:, None]
    covariance = (coupling.gain.weight[:, None].square() * angle.cos()).sum(-1)
    assert_mean(draws, (q * k * gated(coupling, covariance)).sum(-1))


@SPE
def test_conv_spe_approaches_its_covariance(options):
    """E <Q_x, K_y> = sum_d q_d k_d sum_p f_d(p) g_d(p + y - x), zero beyond the filters."""
    reach = 4
    draws, q, k, offset, coupling = draws_of(
        lambda seed: ConvSPE(3, HEADS, reach=reach, realizations=16, seed=seed, **options)
    )
    covariance = torch.zeros(HEADS, T, 3, dtype=torch.float64)
    for t, step in enumerate(offset.tolist()):
        for p in range(reach):
            if 0 <= p + step < reach:
                covariance[:, t] += coupling.filters[:, :, 0, p] * coupling.filters[:, :, 1, p + step]
    assert (covariance[:, -1] == 0).all()
    assert_mean(draws, (q * k * gated(coupling, covariance)).sum(-1))


@each("make", [SineSPE, ConvSPE])
@each("per_head", [False, True])
def test_heads_that_learn_alike_tell_whether_they_share_noise(make, per_head):
    coupling = make(4, 2, gated=True, noise_per_head=per_head)
    with torch.no_grad():
        for parameter in coupling.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    first, second = coupling.key(sequence(5), torch.float64).matrix
    assert torch.equal(first, second) != per_head
    coupling.gate.weight.data.fill_(math.inf)  # what is left is the gate's noise alone, the same at all positions
    (first, second), query = coupling.key(sequence(5)).matrix, coupling.query(sequence(5)).matrix
    assert torch.equal(first, second) != per_head
    assert torch.equal(first, first[:1].expand_as(first))
    assert torch.equal(query[0], first)


def test_conv_spe_noise_is_a_function_of_the_position():
    coupling, far = ConvSPE(3, HEADS), torch.tensor([[2**40], [-5], [0]])
    together = coupling.query(far).matrix
    for n in range(3):
        assert torch.equal(coupling.query(far[n : n + 1]).matrix, together[:, n : n + 1])
    assert not torch.equal(together[:, 0], together[:, 1])


# Noise


def test_noise_is_standard_normal():
    z = gaussian(torch.arange(-500, 500), 200, seed=3)
    assert z.shape == (1000, 200)
    assert z.dtype == torch.float64
    error = z.numel() ** -0.5
    for power, moment, spread in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((z**power).mean() - moment) < 5 * spread * error
    share = (torch.arange(z.numel()) + 0.5) / z.numel()
    assert (torch.special.ndtr(z.flatten().sort().values) - share).abs().max() < 2 * error  # Kolmogorov and Smirnov


def test_noise_of_positions_columns_and_seeds_is_independent():
    z = gaussian(torch.arange(400), 300, seed=0)
    seeded = [gaussian(torch.arange(400) + n, 300, seed=1) for n in (-1, 0, 1)]
    for other in (*seeded, z.roll(1, 0), z.roll(1, 1), z.roll(7, 0).roll(3, 1)):
        assert abs((z * other).mean()) < 5 * z.numel() ** -0.5
    assert len(z.unique()) == z.numel()
    rows, columns = (z @ z.mT / 300).fill_diagonal_(0), (z.mT @ z / 400).fill_diagonal_(0)
    assert rows.abs().max() < 6 * 300**-0.5
    assert columns.abs().max() < 6 * 400**-0.5


def test_noise_of_a_position_is_one_wherever_it_is_seen():
    x = torch.tensor([[0, 5, -7], [2**62, 5, -(2**62)]])
    z = gaussian(x, 11, seed=9)
    assert z.isfinite().all()
    assert torch.equal(z[0, 1], z[1, 1])
    assert torch.equal(gaussian(x[0].int(), 11, seed=9), z[0])
    assert torch.equal(gaussian(x, 7, seed=9), z[..., :7])


# Modules


@each("dual", [False, True])
def test_an_adapted_encoding_acts_on_mapped_queries_and_keys(dual):
    (q, k, _), rope = inputs(2, t=T, s=S), Rotary(rope_frequencies(HEAD_DIM // 2)[None, None])
    coupling = perturb(Adapted(rope, HEADS, dual=dual))
    (b, c), r = coupling.parameter.detach().unbind(1), coupling.stretch.parameter.detach()
    of_queries = torch.matrix_exp(b - b.mT) @ torch.diag_embed(r.exp()) @ torch.matrix_exp(c - c.mT).mT
    of_keys = torch.linalg.inv(of_queries).mT if dual else of_queries
    rows = [(q, of_queries, X), (k, of_keys, Y)]
    left, right = (rope(x, torch.float64)(torch.einsum("hij,bhtj->bhti", a, y)) for y, a, x in rows)
    close(scores(coupling, q, k), left @ right.mT)


def test_every_class_is_tested():
    assert set(couplings.__all__) == {
        "Absolute",
        "Adapted",
        "Constrained",
        "ConvSPE",
        "Lie",
        "Polar",
        "SineSPE",
        "TransformerXL",
    }


def test_what_acts_ahead_of_a_feature_map_maps_once():
    coupling, phi = SineSPE(HEAD_DIM, HEADS, realizations=5), torch.exp
    q, k, v = inputs(2, t=T)
    maps = tuple(Mapped(side(X, torch.float64), phi) for side in (coupling.query, coupling.key))
    a, b = phi(coupling.query(X, torch.float64)(q)), phi(coupling.key(X, torch.float64)(k))
    weight = a @ b.mT
    out = linear_attention(q, k, v, isometry=maps, denominator="encoded")
    close(out, weight @ v / weight.sum(-1, keepdim=True))


@each(
    ("call", "message"),
    [
        (lambda: Absolute(Rotary(torch.ones(1, 1, 2)), "value"), "side: expected query or key, got 'value'"),
        (lambda: Constrained(8, 2, torch.ones(3)), r"frequency: expected finite floats \[c m\]"),
        (lambda: Constrained(8, 2, torch.full((1, 3), math.inf)), r"frequency: expected finite floats"),
        (lambda: Constrained(8, 2, torch.ones(1, 3), outside=-1), "outside: expected an integer of at least 0, got -1"),
        (lambda: TransformerXL(8, 2, 5), "width: expected an even number of sinusoids, got 5"),
        (lambda: TransformerXL(8, 2, 0), "width: expected an even number of sinusoids, got 0"),
        (lambda: SineSPE(8, 2, sines=0), "sines: expected an integer of at least 1, got 0"),
        (lambda: SineSPE(8, 2, realizations=0), "realizations: expected an integer of at least 1, got 0"),
        (lambda: ConvSPE(8, 2, realizations=0), "realizations: expected an integer of at least 1, got 0"),
        (lambda: ConvSPE(8, 2, reach=0), "reach: expected an integer of at least 1, got 0"),
        (lambda: ConvSPE(8, 2).query(torch.zeros(3, 1)), "positions: expected integers"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
