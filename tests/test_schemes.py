"""Every scheme of the table: attention is its definition, relative and learnable, whatever is cast or copied."""

import copy
import inspect
import math

import pytest
import torch
from cases import (
    HEAD_DIM,
    HEADS,
    PRESETS,
    SCHEMES,
    TOLERANCE,
    ascending,
    close,
    gradients,
    ids,
    inputs,
    perturb,
    quadratic,
    same_everywhere,
    softmax_by_definition,
)

import isopos
from isopos import schemes
from isopos.decays import Decay
from isopos.functional import linear_attention, softmax_attention
from isopos.ops import linear
from isopos.positions import sequence

every = pytest.mark.parametrize("case", SCHEMES, ids=ids)
relative = pytest.mark.parametrize("case", [case for case in SCHEMES if case.relative], ids=ids)
kinds = pytest.mark.parametrize("kind", ["linear", "softmax"])
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
FUNCTIONS = {"linear": linear_attention, "softmax": softmax_attention}
SHAPES = {"causal": (130, 130, True), "both-ways": (130, 130, False), "causal-cross": (9, 70, True)}


def made(case, kind="linear", **more):
    """A scheme with its parameters off their initial values, in float64."""
    return perturb(case.build(attention=kind, **more))


def at(scheme, x, x_key=None):
    return scheme.at(x, x_key, dtype=torch.float64)


def scores_of(case, q, k, *pairs):
    """<rho(x) q, rho(y) k> of one scheme at several pairs x, y."""
    scheme = case if isinstance(case, schemes.Scheme) else made(case)
    return [(scheme.encoding(x, torch.float64)(q) * scheme.encoding(y, torch.float64)(k)).sum(-1) for x, y in pairs]


def test_every_scheme_has_a_row_and_its_options():
    assert {case.name for case in SCHEMES} == set(schemes.REGISTRY) == set(isopos.CATALOG)
    assert len({case.id for case in SCHEMES}) == len(SCHEMES)
    for name, function in schemes.REGISTRY.items():
        assert getattr(isopos, name.replace("-", "_")) is function
        assert inspect.getdoc(function)
        used = {option for case in SCHEMES if case.name == name for option in case.options}
        own = set(schemes.options_of(name)) - set(schemes.Choices.__annotations__)
        assert own - used <= {"seed", "model_dim", "base"}, f"{name}: options without a row"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every
def test_linear_attention_is_quadratic(monkeypatch, case, shape):
    monkeypatch.setattr(linear, "SEGMENT", 1)
    t, s, causal = shape
    scheme, x = made(case), ascending(2, s)
    leaves = inputs(2, t=t, s=s, e=5, requires_grad=True)
    arguments = at(scheme, x) if t == s else at(scheme, x[:, s - t :], x)
    out, slow = (f(*leaves, **arguments, causal=causal) for f in (linear_attention, quadratic))
    same_everywhere(out, slow, [*leaves, *scheme.parameters()], 100 * TOLERANCE)  # some denominators almost vanish


@every
@pytest.mark.parametrize("denominator", ["plain", "encoded", "none"])
@pytest.mark.parametrize("decay", ["none", "retnet", "permuteformer"])
def test_denominator_and_decay_are_independent_axes(case, denominator, decay):
    scheme = made(case, denominator=denominator, decay=decay)
    assert scheme.choices | {"denominator": denominator, "decay": decay} == scheme.choices
    leaves = inputs(2, t=9, requires_grad=True)
    arguments = at(scheme, ascending(2, 9))
    assert (arguments["denominator"], arguments["decay"] is None) == (
        None if denominator == "none" else denominator,
        decay == "none",
    )
    for causal in (True, False):
        out, slow = (f(*leaves, **arguments, causal=causal) for f in (linear_attention, quadratic))
        same_everywhere(out, slow, list(leaves), 100 * TOLERANCE)


@causality
@every
def test_softmax_attention_is_its_definition(case, causal):
    scheme, x = made(case, "softmax"), ascending(2, 9)
    leaves = inputs(2, t=9, requires_grad=True)
    mask = torch.rand(2, 9) < 0.7
    arguments = at(scheme, x) | {"causal": causal, "mask": mask}
    out, slow = (f(*leaves, **arguments) for f in (softmax_attention, softmax_by_definition))
    same_everywhere(out, slow, [*leaves, *scheme.parameters()])


@relative
def test_scores_do_not_see_a_shift(case):
    q, k, _ = inputs(3, t=9)
    group = case.build().encoding.group
    x, y, shift = group.random(3, 9), group.random(3, 9), group.random(3, 1)
    before, after, other = scores_of(case_scheme := made(case), q, k, (x, y), (x + shift, y + shift), (x + shift, y))
    close(after, before)
    assert case.name in ("none", "alibi") or not torch.allclose(other, before)
    assert case_scheme.embedding is None


@kinds
@causality
@relative
def test_attention_does_not_see_a_shift(case, causal, kind):
    scheme, x, shift = made(case, kind), ascending(2, 70), torch.tensor([500, -300])[:, None, None]
    q, k, v = inputs(2, t=70)
    before, after, other = (FUNCTIONS[kind](q, k, v, **at(scheme, p), causal=causal) for p in (x, x + shift, 2 * x))
    close(after, before, roundings=100 * TOLERANCE)
    assert case.name == "none" or not torch.allclose(other, before)


@every
def test_direction(case):
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    forward, backward = scores_of(made(case), q, k, (x, y), (y, x))
    assert torch.allclose(forward, backward) != case.directed


@every
def test_a_gradient_reaches_every_parameter_of_every_head(case):
    for kind, function in FUNCTIONS.items():
        scheme = made(case, kind)
        for causal in (True, False):
            out = function(*inputs(2, t=9), **at(scheme, sequence(9)), causal=causal)
            parameters = list(scheme.encoding.parameters()) + (
                [] if scheme.decay is None else list(scheme.decay.parameters())
            )
            for grad in gradients(out, parameters) if parameters else ():
                assert grad.isfinite().all()
                heads = grad if grad.ndim == 1 else grad.flatten(1).abs().sum(1)
                assert (heads != 0).all()


@every
def test_what_learns_is_what_the_options_say(case):
    scheme = case.build()
    names = {name.rpartition(".")[2] for name, _ in scheme.named_parameters()}
    expected = set()
    expected |= {"frequency"} if case.options.get("learned") else set()
    expected |= {"normal"} if case.options.get("learned_basis") else set()
    expected |= {"generator"} if case.name.startswith("ape-") else set()
    expected |= {"log_rate"} if callable(case.options.get("decay")) else set()
    expected |= {"weight"} if case.name == "learned" else set()
    assert names == expected
    assert all(p.shape[0] == HEADS for n, p in scheme.named_parameters() if not n.endswith("weight"))
    assert not list(scheme.buffers())


def results(scheme, x):
    """What a scheme computes, linear attention's output and the embedding."""
    torch.manual_seed(1)
    q, k, v = inputs(2, t=9, dtype=torch.float32)
    found = [linear_attention(q, k, v, **scheme.at(x), causal=True)]
    return found if scheme.embedding is None else [*found, scheme.embedding(x).float()]


@every
def test_round_trips(case):
    x, scheme = ascending(2, 9), perturb(case.build(), 0.3).float()
    before = results(scheme, x)
    restored = case.build()
    restored.load_state_dict(scheme.state_dict())
    for other in (copy.deepcopy(scheme), restored):
        assert all(map(torch.equal, results(other, x), before))
    if list(scheme.parameters()):
        assert not all(map(torch.equal, results(case.build(), x), before))


@every
@pytest.mark.parametrize("where", ["moved", "built"])
def test_meta_device_then_reset(case, where):
    x = sequence(9)
    before = results(case.build(), x)
    if where == "built":
        with torch.device("meta"):
            scheme = case.build()
    else:
        scheme = case.build().to("meta")
    assert all(parameter.is_meta for parameter in scheme.parameters())
    scheme.to_empty(device="cpu")
    for module in scheme.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(map(torch.equal, results(scheme, x), before))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_keeps_positions_exact(case, dtype):
    scheme, x = case.build(), ascending(2, 9)
    before = results(scheme, x)[0]
    assert torch.equal(results(scheme.to(dtype), x)[0], before)


@every
def test_autocast_and_order_of_calls_change_nothing(case):
    scheme, x = case.build(), ascending(2, 9)

    def tensors():
        arguments = scheme.at(x)
        return [*arguments["isometry"].tensors(), *([] if arguments["decay"] is None else [arguments["decay"]])]

    before = tensors()
    scheme.at(5 * ascending(3, 70), dtype=torch.float64)
    after = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        inside = tensors()
    for again in (after, inside):
        assert all(map(torch.equal, again, before))


@pytest.mark.parametrize("case", [c for c in SCHEMES if c.options.get("denominator") != "encoded"], ids=ids)  # signs change
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs(case, dtype):
    scheme, x = case.build(), sequence(70)
    leaves = inputs(1, t=70, dtype=dtype)
    out = linear_attention(*leaves, **scheme.at(x), causal=True)
    exact = linear_attention(*(leaf.double() for leaf in leaves), **at(scheme, x), causal=True)
    assert out.dtype == dtype
    close(out, exact, roundings=4)


@every
@pytest.mark.parametrize("width", [(4, 1), (6, 3), (64, 2)])
def test_other_sizes(case, width):
    head_dim, heads = width
    more = {"decay": "retnet"} if callable(case.options.get("decay")) else {}
    scheme = case.build(head_dim, heads, **more)
    out = linear_attention(*inputs(t=5, d=head_dim, e=3, heads=heads, dtype=torch.float32), **scheme.at(sequence(5)))
    assert out.shape == (heads, 5, 3)
    assert out.isfinite().all()


# Equivalences


def relative_scores(name, **options):
    torch.manual_seed(1)
    q, k, _ = inputs(1, t=9)
    return scores_of(schemes.REGISTRY[name](HEAD_DIM, HEADS, **options), q, k, (sequence(9), 7 * sequence(9).flip(0)))[0]


def test_lrpe_in_the_identity_basis_is_rope():
    close(relative_scores("lrpe-orthogonal", basis="identity"), relative_scores("rope"))
    assert not torch.allclose(relative_scores("lrpe-orthogonal"), relative_scores("rope"))


def test_ape_starts_as_rope():
    close(relative_scores("ape-sequence"), relative_scores("rope"), dtype=torch.float32)
    close(relative_scores("ape-sequence", base=77.0), relative_scores("rope", base=77.0), dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("rope", "learned"),
        ("lrpe-unitary", "learned"),
        ("lrpe-orthogonal", "learned_basis"),
        ("lrpe-permutation", "learned_basis"),
    ],
)
def test_learned_starts_as_fixed(name, option):
    close(relative_scores(name, **{option: True}), relative_scores(name), dtype=torch.float32)


def test_retnet_is_rope_with_its_decay():
    pairs = [schemes.retnet(HEAD_DIM, HEADS), schemes.rope(HEAD_DIM, HEADS, decay="retnet")]
    assert pairs[0].choices == pairs[1].choices
    assert all(map(torch.equal, *(results(scheme, sequence(9)) for scheme in pairs)))
    original = schemes.retnet(HEAD_DIM, HEADS, original=True)
    assert original.normalised
    assert original.choices == {"attention": "linear", "decay": "retnet", "denominator": "none", "feature_map": "identity"}
    assert schemes.retnet(HEAD_DIM, HEADS, original=True, denominator="plain").choices["denominator"] == "plain"


def test_lrpe_unitary_is_equation_22():
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    (found,) = scores_of(schemes.lrpe_unitary(HEAD_DIM, HEADS, basis="identity"), q, k, (x, y))
    angle = 10000.0 ** (-2 * torch.arange(HEAD_DIM).double() / HEAD_DIM) * (x - y)
    close(found, (angle.cos() * q * k).sum(-1))


def test_rope_is_equation_15():
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    (found,) = scores_of(schemes.rope(HEAD_DIM, HEADS, base=500.0), q, k, (x, y))
    angle = 500.0 ** (-2 * torch.arange(HEAD_DIM // 2).double() / HEAD_DIM) * (x - y)
    a, b = (torch.view_as_complex(z.unflatten(-1, (-1, 2))) for z in (q, k))
    close(found, (a.conj() * b * torch.exp(-1j * angle)).real.sum(-1))


@pytest.mark.parametrize("name", ["lrpe-unitary", "lrpe-orthogonal", "lrpe-permutation", "permuteformer"])
def test_seeds_choose(name):
    first, again, other = (schemes.REGISTRY[name](HEAD_DIM, HEADS, seed=seed) for seed in (1, 1, 2))
    pairs = [[*scheme.encoding(sequence(3)).tensors()] for scheme in (first, again, other)]
    assert all(map(torch.equal, pairs[0], pairs[1]))
    assert not all(map(torch.equal, pairs[0], pairs[2]))


def test_random_seeds_of_torch_are_left_alone():
    state = torch.get_rng_state()
    for case in SCHEMES:
        if not {"learned", "learned_basis"} & set(case.options):
            case.build()
    assert torch.equal(torch.get_rng_state(), state)


def test_only_limited_schemes_have_a_max_length():
    for case in SCHEMES:
        assert case.build().max_length == (case.options["length"] if case.name == "learned" else None)
    assert schemes.learned(HEAD_DIM, HEADS).max_length == 2048


# Text options


@pytest.mark.parametrize("case", PRESETS, ids=ids)
def test_build_is_the_function(case):
    scheme = schemes.build(case.name, HEAD_DIM, HEADS, {"decay": "retnet"})
    assert scheme.choices == schemes.REGISTRY[case.name](HEAD_DIM, HEADS, decay="retnet").choices


def test_build_reads_every_kind_of_option():
    rope = schemes.build("rope", 8, 2, {"base": "1e2", "learned": "True", "rotary_dim": "4"})
    close(rope.encoding.encoding.initial[0, 0], schemes.rope(4, base=100.0).encoding.initial[0, 0])
    assert rope.encoding.rest == 4
    assert list(rope.parameters())
    assert not list(schemes.build("rope", 8, 2, {"learned": "false"}).parameters())
    assert schemes.build("learned", 8, 2, {"length": "12", "model_dim": "5"}).embedding.weight.shape == (12, 5)
    assert schemes.build("rope", 8, 2, {"attention": "softmax"}).choices["denominator"] == "softmax"
    assert set(schemes.options_of("rope")) == {"base", "learned", "rotary_dim", *schemes.Choices.__annotations__}


BAD_TEXT = [
    (("rpoe", {}), r"scheme 'rpoe': .*rope"),
    (("xyzzy", {}), r"scheme 'xyzzy': .*one of none, sinusoidal"),
    (("rope", {"bse": "1"}), r"rope: .*option 'bse': .*base"),
    (("rope", {"decay": "retnt"}), r"rope: decay: expected .*retnet.* got 'retnt'"),
    (("rope", {"denominator": "x"}), r"denominator: expected .*plain, encoded, none, got 'x'"),
    (("lrpe-unitary", {"basis": "furier"}), r"basis: expected .*fourier.* got 'furier'"),
    (("rope", {"base": "x"}), r"rope: base: expected float, got 'x'"),
    (("rope", {"learned": "maybe"}), r"rope: learned: expected true or false, got 'maybe'"),
    (("rope", {"rotary_dim": "4.5"}), r"rope: rotary_dim: expected int, got '4.5'"),
    (("rope", {"attention": "softmax", "denominator": "plain"}), r"denominator: expected no choice with softmax"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_TEXT)
def test_bad_text(arguments, message):
    name, options = arguments
    with pytest.raises(ValueError, match=message):
        schemes.build(name, 8, 2, options)


BAD_VALUES = [
    (lambda f: f(0, 2), r"head_dim: expected a positive integer, got 0"),
    (lambda f: f(8.0, 2), r"head_dim: expected a positive integer"),
    (lambda f: f(8, 0), r"heads: expected a positive integer, got 0"),
    (lambda f: f(8, 2, attention="sofmax"), r"attention: expected .*softmax.* got 'sofmax'"),
    (lambda f: f(8, 2, feature_map="elu"), r"feature_map: expected .*elu\+1.* got 'elu'"),
    (lambda f: f(8, 2, denominator=None), r"denominator: expected .* got None"),
    (lambda f: f(8, 2, decay="retnt"), r"decay: expected .*retnet.* got 'retnt'"),
    (lambda f: f(8, 2, attention="softmax", feature_map="relu"), r"feature_map: expected no choice with softmax"),
]


@pytest.mark.parametrize("case", PRESETS, ids=ids)
@pytest.mark.parametrize(("call", "message"), BAD_VALUES)
def test_bad_values_of_every_scheme(case, call, message):
    with pytest.raises(ValueError, match=message):
        call(schemes.REGISTRY[case.name])


@pytest.mark.parametrize("case", PRESETS, ids=ids)
def test_unknown_options_raise(case):
    with pytest.raises(TypeError, match="dekay"):
        schemes.REGISTRY[case.name](8, 2, dekay="retnet")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schemes.rope(7), r"head size: expected an even number"),
        (lambda: schemes.retnet(7, 1), r"head size: expected an even number"),
        (lambda: schemes.lrpe_orthogonal(7, 1), r"head size: expected an even number"),
        (lambda: schemes.ape_sequence(7, 1), r"head size: expected an even number"),
        (lambda: schemes.rope(8, rotary_dim=3), r"head size: expected an even number"),
        (lambda: schemes.rope(8, rotary_dim=10), r"at least 10 as the encoding, got 8"),
        (lambda: schemes.rope(8, rotary_dim=-2), r"expected"),
        (lambda: schemes.rope(8, base=0.0), r"base: expected a positive number"),
        (lambda: schemes.rope(8, base=math.nan), r"base: expected a positive number"),
        (lambda: schemes.ape_sequence(8, 1, base=-5.0), r"base: expected"),
        (lambda: schemes.lrpe_unitary(8, 1, base=-5.0), r"base: expected"),
        (lambda: schemes.lrpe_orthogonal(8, 1, basis="furier"), r"basis: expected .*fourier.* got 'furier'"),
        (
            lambda: schemes.lrpe_unitary(8, 1, basis="fourier", learned_basis=True),
            r"learned_basis: expected basis='householder'",
        ),
        (lambda: schemes.sinusoidal(5, 1), r"model_dim: expected an even width"),
        (lambda: schemes.learned(8, 1, length=0), r"length: expected at least 1"),
        (lambda: schemes.cosformer(8, 1, length=0), r"length: expected at least 1"),
        (lambda: schemes.ape_ring(8, 1, period=1), r"period: expected at least 2"),
        (lambda: schemes.ape_ring(7, 1), r"head size: expected an even number"),
        (lambda: schemes.rope(8, 2, decay=Decay(torch.ones(3))), r"decay: expected"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_at_names_keys_apart():
    scheme, x, y = schemes.rope(8, 2, decay="retnet"), sequence(3), sequence(5)
    both = scheme.at(x, y)
    assert [rho.length for rho in both["isometry"]] == [3, 5]
    assert [g.shape for g in both["decay"]] == [(2, 3), (2, 5)]
    assert set(both) == {"isometry", "decay", "feature_map", "denominator"}
    assert set(schemes.rope(8, 2, attention="softmax").at(x)) == {"isometry", "decay"}
    assert scheme.at(x, dtype=torch.float64)["isometry"].table.dtype == torch.float64


def test_alibi_is_a_bias_of_slopes_times_distance():
    q, k, v = inputs(2, t=9, heads=8)
    distance = (sequence(9) - sequence(9).T).abs()
    bias = -torch.tensor([2.0**-i for i in range(1, 9)], dtype=torch.float64)[:, None, None] * distance
    expected = (q @ k.mT / HEAD_DIM**0.5 + bias).softmax(-1) @ v
    close(softmax_attention(q, k, v, **schemes.alibi(HEAD_DIM, 8, attention="softmax").at(sequence(9))), expected)


def test_cosformer_weighs_relu_features_with_the_cosine_of_the_offset():
    q, k, v = inputs(2, t=9)
    offset = (sequence(9) - sequence(9).T).double()
    weight = (q.relu() + 1e-3) @ (k.relu() + 1e-3).mT * torch.cos(math.pi / 2 * offset / 16)
    out = linear_attention(q, k, v, **at(schemes.cosformer(HEAD_DIM, HEADS, length=16), sequence(9)))
    close(out, weight @ v / weight.sum(-1, keepdim=True))
    assert (weight > 0).all()


def test_a_ring_closes_whatever_its_basis_learns():
    scheme, x = perturb(schemes.ape_ring(HEAD_DIM, HEADS, period=12)), sequence(9)
    q, k, _ = inputs(1, t=9)
    here, round_once, shifted = scores_of(scheme, q, k, (x, 3 * x), (x + 12, 3 * x - 24), (x + 5, 3 * x))
    close(round_once, here)
    assert not torch.allclose(shifted, here)
