"""Test frequencies for sequences longer than in training. test_oracles.py compares them with transformers."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from canonical import canonical, score
from cases import HEADS, close, each, gradients, inputs, ordered, perturb, stream

import isopos
from isopos import Decoder, bases, contragredient, encodings, laws, schemes
from isopos.attention import softmax_attention
from isopos.encodings import rope_frequencies
from isopos.lengths import EXTENSIONS, LongRope, Yarn, extension, search
from isopos.maps import pair
from isopos.nn import absorb
from isopos.positions import Line, grid, sequence
from isopos.stream import Stream

RESCALE = [1.0, 1.5, 2.0, 4.0]
OPTIONS = {"longrope": {"rescale": RESCALE}, "dype": {"method": "yarn", "time": 0.7}}
RULES = each("name", EXTENSIONS)
EXTENDED = {
    "rope": {"attention": "softmax"},
    "rope-learned": {"learned": True},
    "rope-partial": {"rotary_dim": 6, "layout": "half"},
    "p-rope": {},
    "rope-axial": {"attention": "softmax"},
    "rope-mixed": {},
    "rope-golden": {},
    "harope": {},
    "mrope": {},
    "wire": {},
    "string": {"axes": 2},
    "string-circulant": {"axes": 2, "variant": "circulant"},
    "comrope": {},
    "comrope-axial": {"variant": "axial"},
    "pope": {},
    "retnet": {},
    "xpos": {},
    "jordan": {"decay": "none"},
    "lrpe-unitary": {},
    "lrpe-unitary-complex": {"complex": True},
    "lrpe-orthogonal": {"identity": 2},
    "ape-sequence": {"attention": "softmax"},
    "ape-absolute": {},
    "ape-grid": {},
    "ape-product": {"parts": "ring5+sequence"},
}


def built(name, head_dim=8):
    known = next(known for known in (name, name.rpartition("-")[0]) if known in schemes.REGISTRY)
    return schemes.REGISTRY[known](head_dim, HEADS, **EXTENDED[name])


def rotating(scheme):
    return [part for part in scheme.encoding.modules() if getattr(part, "extensible", False)]


def rule(name, factor=4.0, trained=64, **options):
    return extension(name, factor, trained, **{**OPTIONS.get(name, {}), **options})


@each("name", ["linear", "dynamic", "yarn", "llama3"])
def test_a_factor_of_one_changes_nothing(name):
    frequency = torch.randn(2, 3, 5, dtype=torch.float64)
    close(rule(name, 1.0)(frequency), frequency)
    assert rule(name, 1.0).attention_factor == 1
    assert rule("longrope", 1.0).attention_factor == 1


@each("name", [name for name in EXTENDED if name not in ("xpos", "jordan", "retnet", "ape-product")])
def test_linear_is_interpolation_of_positions(name):
    scheme = perturb(built(name))
    q, k, _ = inputs(t=6)
    x = ordered(scheme.group, t=6)
    before = [side(x, torch.float64) for side in (scheme.encoding.query, scheme.encoding.key)]
    scheme.extend("linear", factor=3)
    after = [side(3 * x, torch.float64) for side in (scheme.encoding.query, scheme.encoding.key)]
    close(after[0](q) @ after[1](k).mT, before[0](q) @ before[1](k).mT)


@each(("factor", "alpha"), [(4.0, 1.0), (2.5, 3.0)])
def test_dynamic_is_a_larger_base(factor, alpha):
    d, base = 8, 10000.0
    larger = base * (alpha * factor - alpha + 1) ** (d / (d - 2))
    found = rule("dynamic", factor, alpha=alpha)(rope_frequencies(d // 2)[None, None])
    close(found, rope_frequencies(d // 2, larger)[None, None])


@each("truncate", [True, False])
def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones(truncate):
    w, trained, factor = rope_frequencies(32), 512, 8.0
    kept = (rule("yarn", factor, trained, truncate=truncate)(w[None, None])[0, 0] / w - 1 / factor) / (1 - 1 / factor)
    turns = trained * w / (2 * math.pi)
    if truncate:  # bounds at the pairs around: fewer stay or are interpolated
        fast, slow = turns[turns >= 32].min(), turns[turns <= 1].max()
    else:
        fast, slow = torch.tensor(32.0).double(), torch.tensor(1.0).double()
    close(kept, ((turns / slow).log() / (fast / slow).log()).clamp(0, 1))
    assert 0 < (kept == 1).sum() < 32
    assert rule("yarn", factor, trained).attention_factor == 0.1 * math.log(8) + 1
    assert rule("yarn", factor, trained, sharpness=1.5).attention_factor == 1.5


def test_yarn_counts_on_beyond_the_last_pair():
    """If the slowest pair makes more than one full turn, YaRN keeps part of its frequency, as for all other pairs."""
    w, trained, factor = rope_frequencies(4), 1 << 16, 8.0
    kept = (rule("yarn", factor, trained, truncate=False)(w[None, None])[0, 0] / w - 1 / factor) / (1 - 1 / factor)
    turns = trained * w / (2 * math.pi)
    assert 1 < turns[-1] < 32
    close(kept, (turns.log() / math.log(32)).clamp(max=1))


def released_dype(count, base, trained, factor, time):
    """Frequencies ``[count]`` of one axis, by DyPE's released code with YaRN."""
    pair = torch.arange(count, dtype=torch.float64)
    plain = base ** (-pair / count)
    larger = (base * factor ** (2 * count / (2 * count - 2))) ** (-pair / count)

    def mask(fast, slow):
        bound = [count * math.log(trained / (n * time**2 * 2 * math.pi)) / math.log(base) for n in (fast, slow)]
        low, high = max(math.floor(bound[0]), 0), min(math.ceil(bound[1]), count)
        assert low <= high  # beyond, the code's ramp falls
        return 1 - ((pair - low) / (high - low + 0.001 * (high == low))).clamp(0, 1)

    first, second = mask(1.25, 0.75), mask(16, 2)
    mixed = plain / factor * (1 - first) + larger * first
    return mixed * (1 - second) + plain * second


@each("time", [1.0, 0.8, 0.5, 0.3, 0.1])
@each(("count", "trained"), [(28, 64), (8, 32)])
def test_dype_is_its_released_code(time, count, trained):
    w, factor = rope_frequencies(count), 3.0
    found = rule("dype", factor, trained, method="yarn", time=time)(w[None, None])[0, 0]
    close(found, released_dype(count, 10000.0, trained, factor, time))
    larger = 10000.0 * factor ** (2 * count / (2 * count - 2) * 2 * time**2)
    close(rule("dype", factor, method="ntk", time=time)(w[None, None])[0, 0], rope_frequencies(count, larger))
    assert rule("dype", factor, method="yarn").attention_factor == 0.1 * math.log(factor) + 1
    assert rule("dype", factor, method="ntk").attention_factor == 1


@each("method", ["ntk", "yarn"])
def test_dype_has_one_rule_on_each_axis_and_ends_without(method):
    line, plane = schemes.rope(8, base=100.0), schemes.rope_axial(16, base=100.0)
    for scheme in (line, plane):
        scheme.extend("dype", factor=4, trained=16, method=method, time=0.6)
    one, both = (scheme.encoding.extended(scheme.encoding.parameter)[0] for scheme in (line, plane))
    close(both, torch.block_diag(one, one))
    before = schemes.rope(8).encoding.parameter
    close(schemes.rope(8).extend("dype", factor=4, trained=16, method=method, time=0).encoding.extended(before), before)


@pytest.mark.parametrize("base", [100.0, 10000.0])
def test_yarn_has_one_rule_on_each_axis(base):
    line, plane = schemes.rope(32, base=base), schemes.rope_axial(64, base=base)
    one, both = (
        scheme.extend("yarn", factor=4, trained=64).encoding.extended(scheme.encoding.parameter)[0]
        for scheme in (line, plane)
    )
    close(both, torch.block_diag(one, one))


@pytest.mark.parametrize("options", [{"truncate": False}, {"truncate": True}])
def test_pairs_without_one_turn_are_all_interpolated(options):
    speed = torch.tensor([[[0.1, 0.01, 0.001]]], dtype=torch.float64)  # 0.06 turns and fewer
    close(Yarn(4.0, 4, **options)(speed), speed / 4)


def test_without_rotation_only_the_order_of_a_causal_mask_is_left():
    scheme = schemes.rope(8, HEADS, attention="softmax").extend("drop", factor=4, sharpness=1.2)
    content, x = inputs(1, t=6), sequence(6)
    none = schemes.none(8, HEADS, attention="softmax")
    q, k, v = content
    close(scheme(*content, x, causal=True), none(1.2**2 * q, k, v, x, causal=True))
    assert laws.check(schemes.rope(8, HEADS).extend("drop", factor=2)).broken == ["seen"]


W = rope_frequencies(16, 1000.0)
TARGET = torch.tensor([1.9 ** (i / 5) for i in range(5)] + [4.1, 4.1, 4.2, 4.5, 4.5, 5, 5, 5.5, 6, 6, 6]).double()


def distance(rule):
    return (torch.tensor(rule.rescale, dtype=torch.float64) - TARGET).square().sum().item()


def test_the_search_finds_lower_scores_and_keeps_its_constraints():
    seen = []

    def score(one):
        seen.append(one)
        return distance(one)

    found = search(score, W, factor=4, trained=256, rounds=30, seed=1, sharpness=1.1)
    assert isinstance(found, LongRope)
    assert distance(found) == min(map(distance, seen)) < 0.5 * distance(seen[0])
    assert len({one.rescale for one in seen}) == len(seen)  # each is scored once
    whole = int((2 * math.pi <= 256 * W).sum())
    for one in seen:
        rescale = torch.tensor(one.rescale, dtype=torch.float64)
        critical = next(i for i, value in enumerate(one.rescale) if value >= 4)
        assert critical <= whole
        assert rescale[-1] <= 8
        assert (rescale.diff() >= 0).all()
        close(rescale[:critical], rescale[critical] ** (torch.arange(critical) / critical))
    again = search(distance, W, factor=4, trained=256, rounds=30, seed=1, sharpness=1.1)
    assert again == found
    assert found.attention_factor == 1.1
    scheme = schemes.rope(32, base=1000.0, attention="softmax").extend(**found.arguments)
    close(scheme.encoding.extended(scheme.encoding.parameter)[0, 0], W / torch.tensor(found.rescale, dtype=torch.float64))


def test_scores_that_are_no_numbers_lose():
    calls = iter([math.nan, math.inf] + [1.0 / n for n in range(1, 1000)])
    assert search(lambda rule: next(calls), W, factor=2, trained=256, rounds=2).rescale
    with pytest.raises(ValueError, match="score: expected finite numbers, got none"):
        search(lambda rule: math.nan, W, factor=2, trained=256, rounds=2)


def test_llama3_is_linear_in_turns():
    w, trained, factor = rope_frequencies(32), 512, 8.0
    found = rule("llama3", factor, trained)(w[None, None])[0, 0]
    for before, after in zip(w.tolist(), found.tolist(), strict=True):
        turns = trained * before / (2 * math.pi)
        kept = min(max((turns - 1) / 3, 0), 1)
        assert after == pytest.approx(kept * before + (1 - kept) * before / factor, rel=1e-12)


def test_longrope_has_a_factor_for_each_pair():
    w = rope_frequencies(4)
    close(rule("longrope")(w[None, None])[0, 0], w / torch.tensor(RESCALE))
    assert rule("longrope").attention_factor == (1 + math.log(4) / math.log(64)) ** 0.5


@RULES
def test_several_axes_keep_their_directions_and_see_speeds_alone(name):
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    w = torch.randn(2, 3, 4, dtype=torch.float64)
    found = rule(name)(w)
    close(rule(name)(turn @ w), turn @ found)
    share = found / w
    close(share, share[:, :1].expand_as(share))
    assert (share <= 1).all()


@RULES
def test_pairs_that_do_not_turn_stay_and_change_no_others(name):
    w = torch.cat((rope_frequencies(4), torch.zeros(2)))[None, None].requires_grad_()
    found = (rule(name, rescale=[*RESCALE, 1, 1]) if name == "longrope" else rule(name))(w)
    close(found[..., :4], rule(name)(w[..., :4]))
    assert (found[..., 4:] == 0).all()
    (grad,) = torch.autograd.grad(found.sum(), w)
    assert grad.isfinite().all()
    for odd in (torch.zeros(1, 1, 4), torch.ones(1, 2, 4), torch.ones(1, 1, 4)):
        assert rule(name)(odd).isfinite().all()


@each("name", EXTENDED)
@each("kind", ["dynamic", "yarn"])
def test_an_extended_scheme_is_its_canonical_form_and_keeps_its_laws(name, kind):
    scheme = perturb(built(name))
    q, k, _ = inputs(t=5)
    x = ordered(scheme.group, t=5) % 300
    before = scheme.encoding.key(x, torch.float64)(k)
    scheme.extend(kind, factor=4, trained=300)
    query, key = (side(x, torch.float64) for side in (scheme.encoding.query, scheme.encoding.key))
    assert (key(k) - before).abs().max() > 1e-3, "other frequencies"
    if name not in ("ape-absolute", "retnet"):  # absolute; the decay is in its canonical form
        expected = score(canonical(scheme), q, k, x, x) / scheme.at(x, dtype=torch.float64).get("scale", 1.0)
        torch.testing.assert_close(query(q) @ key(k).mT, expected, rtol=0, atol=1e-10)
    if kind == "yarn":
        assert laws.check(built(name).extend(kind, factor=4, trained=300)).broken == laws.check(built(name)).broken
    for part in rotating(scheme):
        assert part.extension == extension(kind, 4, 300)


def test_logits_are_sharper_by_the_square_of_the_factor():
    scheme = schemes.rope(8, HEADS, attention="softmax").extend("yarn", factor=16, trained=32)
    q, k, v = inputs(t=40)
    found = softmax_attention(q, k, v, **scheme.at(sequence(40), dtype=torch.float64))
    rho, sharp = scheme.encoding(sequence(40), torch.float64), 0.1 * math.log(16) + 1
    close(found, (rho(sharp * q) @ rho(sharp * k).mT / 8**0.5).softmax(-1) @ v)
    assert "scale" not in schemes.rope(8, HEADS).extend("yarn", factor=16, trained=32).at(sequence(4))


SOME = {"factor": 16.0, "trained": 32}
PARTIAL = {"yarn": {}, "longrope": {"rescale": [1.0, 2.0]}}


@each("name", PARTIAL)
@each("layout", ["interleaved", "half"])
def test_features_that_pass_are_made_sharper_in_whole_logits_alone(name, layout):
    options, x = SOME | PARTIAL[name], sequence(40)
    scheme = schemes.rope(8, HEADS, rotary_dim=4, layout=layout, attention="softmax")
    q, k, v = inputs(t=40)
    alone = schemes.rope(4, HEADS, layout=layout).extend(name, **options).encoding(x, torch.float64)
    rotated, passed = alone(q[..., :4]) @ alone(k[..., :4]).mT, q[..., 4:] @ k[..., 4:].mT
    sharp = extension(name, **options).attention_factor
    assert sharp > 1.2
    for whole, logits in ((False, sharp**2 * rotated + passed), (True, sharp**2 * (rotated + passed))):
        scheme.extend(name, **options, whole_logits=whole)
        expected = (logits / 8**0.5).masked_fill(~torch.ones(40, 40).tril().bool(), -math.inf).softmax(-1) @ v
        close(stream(scheme, (q, k, v), x, (0, 3, 4, 40))[0], expected)
        torch.testing.assert_close(score(canonical(scheme), q, k, x, x), logits / 8**0.5, rtol=0, atol=1e-10)


def test_a_factor_of_some_features_leaves_positions_of_values_as_they_are():
    """A direct sum of several maps, one with frequencies; with and without reuse of an evaluation."""
    group, frequency = Line(), rope_frequencies(1)[None, None]
    parts = [encodings.Rotary(frequency, group=group), encodings.Permutation(torch.tensor([[1, 2, 0]]))]
    encoding = encodings.DirectSum([*parts, encodings.Identity(3, group)], shared=True)
    scheme = schemes.Scheme(encoding, HEADS, attention="softmax", transport=True).extend("yarn", **SOME)
    q, k, v = inputs(t=9)
    x, sharp = sequence(9), 0.1 * math.log(16) + 1
    rho, gain = encoding(x, torch.float64), torch.tensor([sharp] * 2 + [1.0] * 6, dtype=torch.float64)
    expected = rho.adjoint(((gain * rho(q)) @ (gain * rho(k)).mT / 8**0.5).softmax(-1) @ rho(v))
    at = scheme.at(x, dtype=torch.float64)
    close(softmax_attention(q, k, v, **at), expected)
    close(softmax_attention(q, k, v, **scheme.at(x, x, dtype=torch.float64, evaluated=(at, at))), expected)
    logits = torch.einsum("hti,htsij,hsj->hts", q, canonical(scheme)[0].matrix(x, x), k)
    close(logits, (gain * rho(q)) @ (gain * rho(k)).mT / 8**0.5)


ROTATED = {  # features whose frequencies a rule changes, of 8
    "prope": [4, 5, 6, 7],
    "ape-product": [0, 1, 2, 3],
    "own pairs": [2, 3, 4, 5],
    "rope": list(range(8)),
}


@each("name", ROTATED)
def test_the_factor_is_that_of_features_with_frequencies(name):
    line, options = Line(), {"attention": "softmax"}
    own = [
        encodings.Identity(2, line),
        encodings.Rotary(rope_frequencies(2)[None, None], group=line),
        encodings.Identity(2, line),
    ]
    make = {
        "prope": lambda: schemes.prope(8, transport=False, **options),
        "ape-product": lambda: schemes.ape_product(8, 1, **options),
        "own pairs": lambda: schemes.Scheme(contragredient.ContragredientSum(own, shared=True), 1, **options),
        "rope": lambda: schemes.rope(8, **options),
    }
    scheme = make[name]().extend("yarn", **SOME)
    at = scheme.at(scheme.group.origin(1), dtype=torch.float64)
    rho_q, rho_k = pair(at["isometry"])
    unit = torch.eye(8, dtype=torch.float64)[:, None, None]
    gain = at["scale"] * 8**0.5 * (rho_q(unit) * rho_k(unit)).sum((-1, -2, -3))
    expected = torch.ones(8, dtype=torch.float64)
    expected[ROTATED[name]] = (0.1 * math.log(16) + 1) ** 2
    close(gain, expected)


def test_a_gradient_reaches_learned_frequencies():
    for scheme in (perturb(built("rope-learned")), perturb(built("ape-sequence"))):
        scheme.extend("yarn", factor=4, trained=64)
        q, k, _ = inputs(t=5)
        rho = scheme.encoding(30 * sequence(5), torch.float64)
        for grad in gradients(rho(q) @ rho(k).mT, list(scheme.parameters())):
            assert grad.isfinite().all()
            assert (grad.flatten(1).abs().sum(1) > 0).all()


@pytest.mark.slow
def test_extended_schemes_compile():
    scheme = schemes.rope(8, HEADS, learned=True, attention="softmax").extend("yarn", factor=4, trained=64)
    q, k, v = inputs(t=9, dtype=torch.float32)
    run = lambda x: softmax_attention(q, k, v, **scheme.at(x), causal=True)  # noqa: E731
    close(torch.compile(run, backend="aot_eager", fullgraph=True)(sequence(9)), run(sequence(9)))


# Trained models, and streams


@each("attention", ["linear", "softmax"])
def test_keys_in_a_cache_stay_valid_but_not_those_from_before(attention):
    scheme = schemes.rope(8, HEADS, attention=attention)
    content, x = inputs(t=9), sequence(9)
    _, before = stream(scheme, [a[..., :4, :] for a in content], x[:4], (0, 4))
    scheme.extend("dynamic", factor=4)
    whole, state = stream(scheme, content, x, (0, 9))
    pieces, _ = stream(scheme, content, x, (0, 2, 3, 9))
    close(pieces, whole)
    with pytest.raises(ValueError, match="state: expected one of this scheme with these options"):
        scheme.at(x[4:], state=before)
    again = schemes.rope(8, HEADS, attention=attention).extend("dynamic", factor=4)
    again.at(x + 9, state=state)  # built alike
    assert again.fingerprint == scheme.fingerprint != again.extend("dynamic", factor=5).fingerprint


RULED = {name: {"factor": 4.0, "trained": 6} | OPTIONS.get(name, {}) for name in EXTENSIONS}


@RULES
@each("options", [{}, {"learned": True}, {"attention": "softmax"}, {"attention": "softmax", "rotary_dim": 6}])
def test_streams_and_steps_of_an_extended_scheme_are_whole_calls(name, options):
    rule = RULED[name] | ({"rescale": RESCALE[:3]} if name == "longrope" and "rotary_dim" in options else {})
    scheme = schemes.rope(8, HEADS, **options).extend(name, **rule)
    content, x = inputs(1, t=20, dtype=torch.float32), sequence(20)
    with torch.no_grad():
        whole = scheme(*content, x, causal=True)
        assert (whole - schemes.rope(8, HEADS, **options)(*content, x, causal=True)).abs().max() > 1e-3
        close(stream(scheme, content, x, (0, 3, 4, 20))[0], whole)
        steps = Stream(scheme)
        close(torch.cat([steps(*(a[..., i : i + 1, :] for a in content)) for i in range(20)], -2), whole)


@RULES
def test_what_an_extension_says_makes_it_again(name):
    first = extension(name, np.float64(4), np.int64(6), **OPTIONS.get(name, {}))
    again = extension(**json.loads(json.dumps(first.arguments)))
    assert (again, repr(again)) == (first, repr(first))
    assert repr(first) == repr(extension(name, 4, 6, **OPTIONS.get(name, {})))


@pytest.mark.slow
@RULES
def test_extended_models_are_exported(name):
    scheme = schemes.rope(8, HEADS, learned=True, attention="softmax").extend(name, **RULED[name])
    model, tokens = Decoder(20, 16, 1, scheme).eval(), torch.arange(9)[None]
    lengths = ({1: torch.export.Dim("length", min=2, max=64)},)
    program = torch.export.export(model, (tokens,), dynamic_shapes=lengths).module()
    for t in (9, 17):
        close(program(torch.arange(t)[None]), model(torch.arange(t)[None]))


@pytest.mark.parametrize("t", [1, 3, 9])
def test_a_stream_refuses_a_scheme_that_is_extended_meanwhile(t):
    scheme = schemes.rope(8, HEADS)
    running, other = Stream(scheme), Stream(scheme)
    q, k, v = inputs(1, t=t, dtype=torch.float32)
    for _ in range(3):
        running(q, k, v)
    scheme.extend("linear", factor=2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^state: expected one of this scheme .* before an extension"):
            running(q, k, v)
    assert running.length == 3 * t
    close(
        torch.cat([other(q, k, v) for _ in range(2)], -2),
        scheme(*(torch.cat((a, a), -2) for a in (q, k, v)), sequence(2 * t), causal=True),
    )


def test_weights_are_those_of_the_training_and_a_second_extension_takes_the_place_of_the_first():
    model = Decoder(20, 16, 2, schemes.rope(8, HEADS, learned=True, attention="softmax"))
    weights = copy.deepcopy(model.state_dict())
    tokens = torch.arange(9)[None]
    plain = model(tokens)
    model.scheme.extend("linear", factor=2)
    model.scheme.extend("yarn", factor=4, trained=5)
    assert all(weights[name].equal(value) for name, value in model.state_dict().items())
    extended = model(tokens)
    assert (extended - plain).abs().max() > 1e-4
    other = Decoder(20, 16, 2, schemes.rope(8, HEADS, learned=True, attention="softmax").extend("yarn", factor=4, trained=5))
    other.load_state_dict(weights)
    assert other(tokens).equal(extended)
    close(copy.deepcopy(model)(tokens), extended)


def test_a_new_resolution_of_a_grid():
    """With four times the pixels, every second pixel keeps its interpolated position."""
    q, k, _ = inputs(t=9)
    small, large = grid(3, 3), 2 * grid(3, 3)
    for scheme in (
        schemes.rope_axial(8, HEADS),
        schemes.rope_mixed(8, HEADS),
        schemes.ape_grid(8, HEADS),
        schemes.comrope(8, HEADS),
    ):
        rho = scheme.encoding(small, torch.float64)
        finer = scheme.extend("linear", factor=2).encoding(large, torch.float64)
        close(finer(q) @ finer(k).mT, rho(q) @ rho(k).mT)


@each("name", ["grape", "liere"])
def test_positions_are_interpolated_where_frequencies_make_no_series(name):
    """A head with one plane has no series of frequencies. Generators that do not commute have no frequencies."""
    scheme = perturb(schemes.REGISTRY[name](8, HEADS, axes=2))
    q, k, _ = inputs(t=9)
    x = grid(3, 3)
    rho = scheme.encoding.key(x, torch.float64)
    before = rho(q) @ rho(k).mT
    known = {"grape": ("linear", "llama3", "longrope", "drop"), "liere": ("linear",)}[name]
    for kind in EXTENSIONS:
        options = {"rescale": [2.0] if name == "grape" else RESCALE} if kind == "longrope" else {}
        if kind not in known:
            with pytest.raises(
                ValueError, match=f"^extend: expected linear.* for {'a single plane' if name == 'grape' else 'gener'}"
            ):
                scheme.extend(kind, factor=2, trained=4, **options)
            assert scheme.extension is None
    for kind in known:
        options = {"rescale": [2.0], "sharpness": 1.0} if kind == "longrope" else {}
        finer = copy.deepcopy(scheme).extend(kind, factor=2, trained=4, **options)
        rho = finer.encoding.key(2 * x, torch.float64)
        if kind in ("linear", "longrope"):  # llama3 goes by turns: fast planes stay
            close(rho(q) @ rho(k).mT, before)
        if name == "grape":
            close(rho(q) @ rho(k).mT, score(canonical(finer), q, k, 2 * x, 2 * x))
    assert laws.check(copy.deepcopy(scheme).extend("linear", factor=2)).broken == laws.check(scheme).broken


def test_absorbed_schemes_keep_their_extension():
    scheme = perturb(schemes.ape_sequence(8, HEADS, attention="softmax")).extend("yarn", factor=4, trained=64)
    layers = [torch.nn.Linear(16, 16, bias=False).double() for _ in "qk"]
    tokens, x = torch.randn(9, 16).double(), 20 * sequence(9)

    def logits(scheme):
        q, k = (layer(tokens).unflatten(-1, (HEADS, 8)).transpose(0, 1) for layer in layers)
        rho = scheme.encoding(x, torch.float64)
        return scheme.at(x)["scale"] * rho(q) @ rho(k).mT

    expected = logits(scheme)
    close(logits(absorb(scheme, *layers)), expected, dtype=torch.float32)


def test_an_extension_is_printed():
    assert "Yarn(factor=4" in repr(schemes.rope(8, 2).extend("yarn", factor=4, trained=64))
    assert "xtension" not in repr(schemes.rope(8, 2))


# What cannot be


@each(
    "scheme",
    [
        "none",
        "learned",
        "sinusoidal",
        "t5",
        "alibi",
        "shaw",
        "permuteformer",
        "ape-ring",
        "ape-tree",
        "spe-sine",
    ],
)
def test_schemes_without_rotary_frequencies(scheme):
    one = schemes.REGISTRY[scheme](8, HEADS)
    with pytest.raises(ValueError, match=r"^extend: expected a scheme that rotates by frequencies on a line or a grid, as"):
        one.extend("linear", factor=2)
    with pytest.raises(ValueError, match=r"got Rotary on a line of 2048 positions; build it with a larger length=$"):
        schemes.cosformer(8, HEADS).extend("linear", factor=2)


@each(
    ("call", "message"),
    [
        (
            lambda s: s.extend("ntk", factor=2),
            r"extend: expected one of linear, dynamic, .*, drop, got 'ntk'",
        ),
        (lambda s: s.extend("linear", factor=0.5), r"factor: expected a ratio of sequence lengths of at least 1, got 0.5"),
        (lambda s: s.extend("linear", factor=math.inf), r"factor: expected"),
        (lambda s: s.extend("linear", factor=math.nan), r"factor: expected"),
        (lambda s: s.extend("yarn", factor=2), r"trained: expected the number of positions in training, which yarn needs"),
        (lambda s: s.extend("llama3", factor=2), r"trained: .* llama3"),
        (lambda s: s.extend("longrope", factor=2, rescale=RESCALE), r"trained: .* longrope"),
        (lambda s: s.extend("yarn", factor=2, trained=1), r"trained: expected an integer of at least 2, got 1"),
        (lambda s: s.extend("yarn", factor=2, trained=2.5), r"trained: expected an integer"),
        (lambda s: s.extend("yarn", factor=2, trained=9, fast=1, slow=2), r"fast: expected more turns than slow"),
        (lambda s: s.extend("llama3", factor=2, trained=9, slow=0), r"fast: expected more turns than slow"),
        (lambda s: s.extend("yarn", factor=2, trained=9, sharpness=0), r"sharpness: expected a positive"),
        (lambda s: s.extend("dynamic", factor=2, alpha=0.5), r"alpha: expected a number from 1 on, got 0.5"),
        (
            lambda s: s.extend("longrope", factor=2, trained=9),
            r"rescale: expected a positive factor .*got \[\]",
        ),
        (lambda s: s.extend("dype", factor=2, time=1.5), r"time: expected a number from 1, pure noise, to 0, .* got 1.5"),
        (lambda s: s.extend("dype", factor=2, method="pi"), r"method: expected one of ntk, yarn, got 'pi'"),
        (lambda s: s.extend("dype", factor=2, method="yarn"), r"trained: expected the number of positions in training"),
        (lambda s: s.extend("dype", factor=2, power=0), r"power: expected a positive exponent of time"),
        (lambda s: s.extend("drop", factor=2, sharpness=-1), r"sharpness: expected a positive"),
        (lambda s: search(distance, W.flip(0), factor=2, trained=9), r"frequency: expected .* fastest first"),
        (lambda s: search(distance, W, factor=2, trained=9, population=1), r"population: expected .* at least 2, got 1"),
        (lambda s: search(distance, W, factor=2, trained=9, most=0.5), r"most: expected a multiple of the factor"),
        (lambda s: s.extend("longrope", factor=2, trained=9, rescale=[1, 0]), r"rescale: .* got \[1.0, 0.0\]"),
        (lambda s: s.extend("longrope", factor=2, trained=9, rescale=[1, 2]), r"rescale: .* each of 4 pairs .* got 2"),
    ],
)
def test_bad_values_change_nothing(call, message):
    scheme = isopos.rope(8, HEADS)
    before = scheme.fingerprint
    with pytest.raises(ValueError, match=f"^{message}"):
        call(scheme)
    assert scheme.extension is None
    assert scheme.fingerprint == before


def test_unknown_options_get_the_close_name():
    with pytest.raises(TypeError, match=r"^yarn: unknown option 'fest': did you mean fast\?"):
        isopos.rope(8).extend("yarn", factor=2, trained=9, fest=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear", {"factor": "2"}, "factor: expected a number, got '2'"),
        ("linear", {"factor": True}, "factor: expected a number, got True"),
        ("linear", {"factor": None}, "factor: expected a number, got None"),
        ("yarn", {"factor": 2, "fast": "3"}, "fast: expected a number, got '3'"),
        ("yarn", {"factor": 2, "sharpness": "1"}, "sharpness: expected a number, got '1'"),
        ("yarn", {"factor": 2, "whole_logits": "no"}, "whole_logits: expected True or False, got 'no'"),
        ("longrope", {"factor": 2, "rescale": None}, "rescale: expected a sequence of numbers, got None"),
        ("longrope", {"factor": 2, "rescale": [1, "a"]}, r"rescale: expected a sequence of numbers, got \[1, 'a'\]"),
    ],
)
def test_values_of_other_types_are_refused(name, options, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        isopos.rope(8).extend(name, trained=9, **options)


def test_float32_speeds_of_several_axes_have_one_index():
    """Learned frequencies of RoPE-Mixed start with the speeds of axial rotations, up to rounding."""
    fixed, learned = (
        schemes.build(name, 48, 1, {"axes": 3, "base": 100.0, "attention": "softmax"}).extend("yarn", factor=4, trained=64)
        for name in ("rope-axial", "rope-mixed")
    )
    shares = [
        (scheme.encoding.extended(scheme.encoding.parameter).norm(dim=1) / scheme.encoding.parameter.norm(dim=1))
        for scheme in (fixed, learned)
    ]
    torch.testing.assert_close(shares[1].double().sort().values, shares[0].double().sort().values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("size", "order", "rule", "options"),
    [(16, 3, "dynamic", {}), (16, 3, "yarn", {}), (8, 2, "longrope", {"rescale": [1.0, 2.0, 3.0, 4.0]})],
)
def test_blocks_refuse_rules_that_would_split_them(size, order, rule, options):
    """Pairs of a block share a frequency, and remaining pairs would be a series by themselves."""
    scheme = isopos.jordan(size, 2, order=order, attention="softmax")
    with pytest.raises(ValueError, match=r"^extend: expected "):
        scheme.extend(rule, factor=4, trained=64, **options)
    assert scheme.extension is None
    scheme.extend("linear", factor=4)


@each("attention", ["linear", "softmax"])
def test_schemes_with_one_encoding_share_its_extension(attention):
    scheme = isopos.rope(8, 2, attention=attention)
    other = schemes.compose(scheme.encoding, 2, {"attention": attention})
    before, stream = other.fingerprint, Stream(other)
    q, k, v = inputs(1, t=4, heads=2, d=8, e=8)
    stream(q, k, v)
    scheme.extend("yarn", factor=4, trained=64)
    assert other.extension is scheme.extension
    assert other.fingerprint == scheme.fingerprint != before
    for call in (lambda: stream(q, k, v), lambda: Stream(other, stream.state, length=4)(q, k, v)):
        with pytest.raises(ValueError, match="state: expected one of this scheme"):
            call()


def _shared(*parts, sum_of=encodings.DirectSum):
    return schemes.compose(sum_of(parts, shared=True), 2, {"attention": "softmax"})


@each("sum_of", [encodings.DirectSum, contragredient.ContragredientSum])
@each("name", ["dynamic", "yarn", "dype"])
def test_parts_along_one_axis_refuse_rules_of_whole_series(name, sum_of):
    """Each part would be a series by itself: two of 4 pairs would not be extended as one of 8."""
    fast, slow = (encodings.Rotary(w[None, None]) for w in rope_frequencies(8).chunk(2))
    wrapped = encodings.Partial(encodings.InBasis(slow, bases.Householder(torch.ones(2, 8))), 10)
    for parts in ((fast, slow), (fast, wrapped)):
        scheme = _shared(*copy.deepcopy(parts), sum_of=sum_of)
        with pytest.raises(ValueError, match=rf"^extend: .* along the same axis, got {name}, which needs all its pairs"):
            scheme.extend(name, factor=4, trained=64)
        assert scheme.extension is None
        scheme.extend("linear", factor=4)
    _shared(fast, encodings.Identity(4, fast.group), sum_of=sum_of).extend(name, factor=4, trained=64)


def test_parts_along_separate_axes_are_separate_series():
    """As both kinds of a grid's sum, and as one rotation with features of each axis."""
    series = rope_frequencies(4)
    rows, columns = (torch.eye(2, dtype=torch.float64)[axis, :, None] * series for axis in range(2))
    shared = _shared(*(encodings.Rotary(w[None]) for w in (rows, columns))).extend("dynamic", factor=4)
    apart = schemes.compose(encodings.DirectSum([encodings.Rotary(series[None, None]) for _ in range(2)]), 2, {})
    x, content = grid(6, 5), torch.randn(1, 2, 30, 16, dtype=torch.float64)
    for scheme in (shared, apart.extend("dynamic", factor=4)):
        whole = encodings.Rotary(torch.cat([extension("dynamic", 4)(w[None]) for w in (rows, columns)], -1))
        close(scheme.encoding(x, torch.float64)(content), whole(x, torch.float64)(content))
