"""Test every scheme of the table: its definition, relativity and gradients, also after casts and copies."""

import copy
import inspect
import itertools
import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    ATTENTION,
    HEAD_DIM,
    HEADS,
    LEARNED,
    PRESETS,
    SCHEMES,
    SOFTMAX_ONLY,
    STORED,
    TOLERANCE,
    close,
    each,
    gradients,
    ids,
    inputs,
    inputs_of,
    named,
    ordered,
    over_rows,
    perturb,
    quadratic,
    same_everywhere,
    shifted,
    with_kinds,
)
from structures import ENCODINGS_ALONE, over_covering, over_structures

import isopos
from isopos import biases, catalog, decays, encodings, kinds, schemes
from isopos.attention import linear_attention, softmax_attention
from isopos.decays import Decay
from isopos.kinds import Linear
from isopos.ops.linear import scan
from isopos.positions import Line, Product, Ring, Tree, grid, sequence, tree

every = over_rows(SCHEMES)
every_encoding = over_rows([*SCHEMES, *ENCODINGS_ALONE])
presets = over_rows(PRESETS)


def made(case, kind=None, **more):
    """A scheme with perturbed parameters, in float64."""
    return perturb(case.build(attention=kind or case.kinds[0], **more))


def at(scheme, x, x_key=None):
    return scheme.at(x, x_key, dtype=torch.float64)


def attend(scheme, q, k, v, x, **more):
    """Attention of the last tokens at positions x, which may start with positions of a prefix."""
    extra = x.shape[-2] - q.shape[-2]
    q, k, v = (F.pad(content, (0, 0, extra, 0)) for content in (q, k, v))
    mask = torch.arange(x.shape[-2]) >= extra if extra else None
    return ATTENTION[scheme.attention](q, k, v, **at(scheme, x), mask=mask, **more)[..., extra:, :]


def scores_of(case, q, k, *pairs):
    """<rho(x) q, rho(y) k> of one scheme at several pairs x, y."""
    encoding = (case if isinstance(case, schemes.Scheme) else made(case)).encoding
    maps = [(encoding.query(x, torch.float64), encoding.key(y, torch.float64)) for x, y in pairs]
    return [(rho_x.last(q.shape[-2])(q) * rho_y.last(k.shape[-2])(k)).sum(-1) for rho_x, rho_y in maps]


def test_every_scheme_has_a_row_and_its_options():
    assert {case.name for case in SCHEMES} == set(schemes.REGISTRY)
    assert dict(catalog._entries()) == isopos.CATALOG == {name: isopos.CATALOG[name] for name in schemes.REGISTRY}
    assert list(schemes.REGISTRY) == [name for name, _ in catalog._entries()], "the source, read without importing it"
    assert len({case.id for case in SCHEMES}) == len(SCHEMES)
    for name, function in schemes.REGISTRY.items():
        assert getattr(isopos, name.replace("-", "_")) is function
        assert inspect.getdoc(function)
        used = {option for case in SCHEMES if case.name == name for option in case.options}
        own = set(schemes.options_of(name)) - set(schemes.Choices.__annotations__)
        assert own - used <= {"seed", "model_dim", "base"}, f"{name}: options without a row"


@presets
def test_positions_in_a_list_are_one_error(case):
    scheme, x = case.build(), case.group.origin(2)
    for positions in ((x.tolist(),), (x, x.tolist())):
        with pytest.raises(ValueError, match=r"positions: expected .* got list"):
            scheme.at(*positions)


@presets
def test_defaults_are_enough(case):
    scheme = schemes.REGISTRY[case.name](HEAD_DIM, HEADS)
    assert scheme.attention == case.kinds[0]
    x = ordered(scheme.group, t=5)
    content, shape = inputs(t=5, dtype=torch.float32), (HEADS, 5, HEAD_DIM)
    assert ATTENTION[scheme.attention](*content, **scheme.at(x), causal=not case.both_ways).shape == shape


# Attention is its definition

SHAPES = {"causal": (7, 7, True), "both-ways": (7, 7, False), "causal-cross": (5, 7, True), "cross": (7, 5, False)}


@over_structures(lambda case, kind: kind == "linear")
@each("shape", SHAPES)
def test_linear_attention_is_quadratic(monkeypatch, case, kind, shape):
    """In groups of one chunk of four tokens."""
    for name, size in {"CHUNK": 4, "GROUP": 1, "LEAST": 1, "MOST": 1}.items():
        monkeypatch.setattr(scan, name, size)
    t, s, causal = SHAPES[shape]
    if not (causal or case.both_ways):
        return
    scheme = made(case)
    if shape == "cross" and scheme.decay is not None:
        scheme = made(case, decay="none")
    leaves = inputs_of(scheme, 2, t=t, s=s, requires_grad=True, **({} if scheme.transport else {"e": 5}))
    if t == s:
        arguments = at(scheme, case.positions(2, t=t))
    else:
        arguments = at(scheme, *(case.cross(2, t=t, s=s) if t < s else reversed(case.cross(2, t=s, s=t))))
    arguments |= {"causal": causal, "mask": torch.rand(2, s) < 0.9}
    if case.id == "horn-clipped-reach" and shape == "causal-cross":
        with pytest.raises(ValueError, match="causal: expected at most one class token"):
            linear_attention(*leaves, **arguments)
        return
    out, slow = (f(*leaves, **arguments) for f in (linear_attention, quadratic))
    same_everywhere(out, slow, [*leaves, *scheme.encoding.parameters()], 1000 * TOLERANCE)  # some denominators almost vanish


# Laws


@over_structures(lambda case, kind: case.relative)
def test_attention_does_not_see_a_shift(case, kind):
    scheme, x, others = made(case, kind), case.positions(2, t=20), case.positions(2, t=20)
    content = inputs_of(scheme, 2, t=20)
    (moved,) = shifted(case.group, x)
    blind = scheme.encoding.is_trivial and scheme.decay is scheme.bias is None
    for causal in case.ways:
        before, after, other = (attend(scheme, *content, p, causal=causal) for p in (x, moved, others))
        close(after, before, roundings=1000 * TOLERANCE)
        assert blind == torch.allclose(other, before)


@with_kinds([case for case in PRESETS if not case.relative])
def test_absolute_and_random_schemes_see_a_shift(case, kind):
    """The negative control of the invariance law."""
    scheme, x = made(case, kind), case.positions(2, t=9)
    q, k, v = inputs_of(scheme, 2, t=9)
    moved = x + 100 if isinstance(case.group, Line) else case.positions(2, t=9)
    if scheme.embedding is not None:
        found = [scheme.embedding(p, torch.float64) for p in (x, moved)]
    else:
        found = [attend(scheme, q, k, v, p) for p in (x, moved)]
    assert (found[0] - found[1]).abs().max() > 1e-3


@every
def test_direction(case):
    scheme, x, y = made(case), case.positions(t=9), case.group.random(9)
    q, k, _ = inputs_of(scheme, 1, t=9)
    forward, backward = scores_of(scheme, q, k, (x, y), (y, x))
    assert torch.allclose(forward, backward) != case.directed


@every
def test_a_gradient_reaches_every_parameter_of_every_head(case):
    for kind, causal in itertools.product(case.kinds, case.ways):
        scheme = made(case, kind)
        x = case.positions(2, t=40)
        learned = {name: p for name, p in scheme.named_parameters() if not name.startswith("embedding.")}
        if not learned:
            continue
        out = attend(scheme, *inputs_of(scheme, 2, t=40), x, causal=causal)
        for grad in gradients(out, list(learned.values())):
            assert grad.isfinite().all()
            heads = grad if grad.ndim == 1 else grad.flatten(1).abs().sum(1)
            assert (heads != 0).all()


ANGLES = ("lrpe-unitary", "lrpe-orthogonal", "rope-mixed", "wire")  # they learn them by default


@every
def test_what_learns_is_what_the_options_say(case):
    scheme = case.build()
    stored = {name for name, _ in scheme.named_parameters()}
    if case.id in STORED or case.name in LEARNED:
        assert STORED.get(case.id, LEARNED.get(case.name, set())) <= stored
    names = {name.rpartition(".")[2] for name in stored}
    own = LEARNED.get(case.name, ())
    if "variant" in case.options or STORED.get(case.id) == set():
        own = STORED[case.id]
    expected = {name.rpartition(".")[2] for name in own}
    learned = case.options.get("learned", case.name in ANGLES)
    expected = expected | ({"weight" if case.name == "horn-constrained" else "frequency"} if learned else set())
    expected |= {"normal"} if case.options.get("learned_basis") else set()
    expected |= {"weight"} if case.options.get("gated") else set()
    expected |= {"generator"} if case.name.startswith("ape-") else set()
    expected |= {"log_rate"} if callable(case.options.get("decay")) else set()
    assert names == expected
    shared = ("learned", "shaw", "shiv-quirk", "fire")  # by heads
    assert case.name in shared or all(p.shape[0] == HEADS for p in scheme.parameters())
    assert bool(list(scheme.buffers())) == (case.options.get("feature_map") == "favor")


def results(scheme, x):
    """Outputs of a scheme: attention's output and the embedding."""
    torch.manual_seed(1)
    content = inputs_of(scheme, 2, t=9, dtype=torch.float32)
    found = [ATTENTION[scheme.attention](*content, **scheme.at(x), causal=True)]
    return found if scheme.embedding is None else [*found, scheme.embedding(x).float()]


@every_encoding
def test_round_trips(case):
    x, scheme = case.positions(2, t=9), perturb(case.build(), 0.3).float()
    before = results(scheme, x)
    restored = case.build()
    restored.load_state_dict(scheme.state_dict())
    for other in (copy.deepcopy(scheme), restored):
        assert all(map(torch.equal, results(other, x), before))
    if list(scheme.parameters()):
        assert not all(map(torch.equal, results(case.build(), x), before))


@every_encoding
def test_meta_device_then_reset(case):
    x = case.positions(t=9)
    before = results(case.build(), x)
    moved = [perturb(case.build()).float().to("meta")] if case in PRESETS or not case.name else []
    if case.name:
        with torch.device("meta"):
            moved.append(case.build())
    for scheme in moved:
        assert all(parameter.is_meta for parameter in scheme.parameters())
        scheme.to_empty(device="cpu")
        for module in scheme.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert all(map(torch.equal, results(scheme, x), before))


@every_encoding
def test_casting_keeps_positions_exact(case):
    scheme, x = case.build(), case.positions(2, t=9)
    before = results(scheme, x)[0]
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(results(scheme.to(dtype), x)[0], before)


@every_encoding
def test_autocast_and_order_of_calls_change_nothing(case):
    scheme, x = case.build(), case.positions(2, t=9)

    def tensors():
        arguments = scheme.at(x)
        rho = arguments["isometry"] if isinstance(arguments["isometry"], tuple) else (arguments["isometry"],)
        tables = [term.table for term in arguments.get("terms", ())]
        assert all(tensor.dtype in (torch.float32, torch.uint8, torch.int64) for side in rho for tensor in side.tensors())
        others = [arguments[name] for name in ("decay", "locality") if arguments.get(name) is not None]
        return [*(tensor for side in rho for tensor in side.tensors()), *tables, *others]

    before = tensors()
    scheme.at(case.positions(3, t=70), dtype=torch.float64)
    after = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        inside = tensors()
    for again in (after, inside):
        assert all(map(torch.equal, again, before))


SIGNED = {"encoded", "complex"}  # denominators that may almost vanish


@over_covering(lambda case, kind: not case.inside)
def test_low_precision_inputs(case, kind):
    scheme, x = case.build(attention=kind), case.positions(t=70)
    if scheme.choices["denominator"] in SIGNED:
        scheme = case.build(attention=kind, denominator="plain")
    for dtype in (torch.float16, torch.bfloat16):
        leaves = inputs_of(scheme, 1, t=70, dtype=dtype)
        function = ATTENTION[kind]
        out = function(*leaves, **scheme.at(x), causal=True)
        exact = function(*(leaf.double() for leaf in leaves), **at(scheme, x), causal=True)
        assert out.dtype == dtype
        close(out, exact, roundings=8)


@presets
def test_other_sizes(case):
    least = {"clock": 6, "drope": 6, "prope": 8}.get(case.name, 4)  # a pair each of three parts, or of four
    for head_dim, heads in ((least, 1), (max(6, least), 3), (64, 2)):
        scheme = case.build(head_dim, heads)
        leaves = inputs(t=5, d=head_dim, e=head_dim, heads=heads, dtype=torch.float32)
        out = ATTENTION[scheme.attention](*leaves, **scheme.at(ordered(scheme.group, t=5)), causal=not case.both_ways)
        assert out.shape == (heads, 5, head_dim)
        assert out.isfinite().all()


# What does not apply is refused

GROUPED = [case for case in PRESETS if not isinstance(case.group, Line)]


@each("case", GROUPED, ids=ids)
def test_decays_need_a_line(case):
    for decay in ("retnet", lambda: Decay(torch.ones(HEADS))):
        with pytest.raises(ValueError, match=r"decay: expected 'none', since a log decay needs positions on a line"):
            case.build(decay=decay)


def test_clipped_terms_take_no_decay_in_linear_attention():
    with pytest.raises(ValueError, match="decay: expected 'none' with clipped keys"):
        schemes.horn_clipped(8, 2, decay="retnet")
    assert schemes.horn_clipped(8, 2, attention="softmax", decay="retnet").decay is not None


@each("name", SOFTMAX_ONLY)
def test_terms_of_logits_do_not_factor(name):
    with pytest.raises(ValueError, match=rf"attention: expected softmax, got linear: {name} adds a term"):
        schemes.REGISTRY[name](8, 2, attention="linear")


@each("name", ["ape-sequence", "ape-tree", "ape-grid", "ape-ring", "ape-product"])
def test_locality_is_of_logits(name):
    with pytest.raises(ValueError, match="locality: expected softmax attention, whose logits it multiplies, got linear"):
        schemes.REGISTRY[name](8, 2, locality=0.9)
    for wrong in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"locality: expected a factor per step in \(0, 1\]"):
            schemes.REGISTRY[name](8, 2, locality=wrong, attention="softmax")
    one = schemes.REGISTRY[name](8, 2, locality=1.0, attention="softmax")
    assert (one.at(ordered(one.group, t=5))["locality"] == 1).all()


def test_only_a_locality_on_a_grid_has_another_metric():
    for build in (
        lambda: schemes.ape_grid(8, 2, metric="euclidean", attention="softmax"),
        lambda: schemes.ape_tree(8, 2, metric="euclidean", locality=0.9, attention="softmax"),
    ):
        with pytest.raises(
            ValueError, match="metric: expected none, or euclidean for a locality on a grid, got 'euclidean'"
        ):
            build()
    with pytest.raises(ValueError, match="metric: expected one of steps, euclidean, got 'euclid'"):
        schemes.ape_grid(8, 2, metric="euclid", locality=0.9, attention="softmax")


@each("case", [case for case in PRESETS if case.inside], ids=ids)
def test_what_acts_ahead_of_the_feature_map_has_no_plain_denominator(case):
    with pytest.raises(ValueError, match=r"denominator: expected 'encoded' or 'none', .* ahead of the feature map"):
        case.build(denominator="plain")


NO_PAIRS = ["none", "lrpe-permutation", "ape-sequence", "cosformer", "horn-constrained"]


@each("name", [*NO_PAIRS, "lrpe-orthogonal", "string"])  # the last two turn pairs that a real basis mixes
def test_complex_denominators_need_pairs_that_turn(name):
    with pytest.raises(ValueError, match=r"denominator: expected .* does not rotate all features .* got 'complex'"):
        schemes.REGISTRY[name](8, 2, denominator="complex")


@presets
def test_positions_of_another_kind_are_refused(case):
    scheme = case.build()
    wrong = torch.zeros(4, scheme.group.columns + 1, dtype=torch.int64)
    for x in (wrong, wrong[:, :-1].bool(), wrong[:, :-1].half()):
        with pytest.raises(ValueError, match="positions: expected"):
            scheme.at(x)
        with pytest.raises(ValueError, match="positions: expected"):
            scheme.at(case.positions(t=4), x)


# Equivalences


def relative_scores(name, **options):
    torch.manual_seed(1)
    q, k, _ = inputs(1, t=9)
    return scores_of(schemes.REGISTRY[name](HEAD_DIM, HEADS, **options), q, k, (sequence(9), 7 * sequence(9).flip(0)))[0]


def test_fixed_lrpe_in_the_identity_basis_is_rope():
    """LRPE, Appendix D.1; the learned one starts there."""
    close(relative_scores("lrpe-orthogonal", basis="identity", learned=False), relative_scores("rope"))
    assert not torch.allclose(relative_scores("lrpe-orthogonal", learned=False), relative_scores("rope"))


@each(("name", "pairs"), [("lrpe-unitary", 1), ("lrpe-orthogonal", 2)])
def test_lrpe_learns_its_angles_from_those_of_the_paper(name, pairs):
    """Types 1 and 2: initially alpha_t = 10000^(-2t/d), learnable (Appendix D.1), separate per head; type 3 is fixed."""
    scheme = schemes.REGISTRY[name](16, HEADS)
    ((path, angles),) = scheme.named_parameters()
    assert (path, angles.dtype, angles.shape) == ("encoding.encoding.frequency", torch.float32, (HEADS, 1, 16 // pairs))
    initial = 10000.0 ** (-2 * torch.arange(16 // pairs).double() / 16)
    assert torch.equal(angles.detach(), initial.float().expand_as(angles))
    assert not list(schemes.lrpe_permutation(16, HEADS).parameters())


def test_lrpe_on_complex_pairs_is_rope():
    close(relative_scores("lrpe-unitary", complex=True, basis="identity", learned=False), relative_scores("rope"))
    pairs = relative_scores("lrpe-unitary", complex=True, basis="householder", learned=False)
    assert not torch.allclose(pairs, relative_scores("rope"))
    choices = schemes.lrpe_unitary(HEAD_DIM, HEADS, complex=True).choices
    assert choices["denominator"] == "complex"
    scheme, x = schemes.lrpe_unitary(HEAD_DIM, HEADS, complex=True, basis="identity", learned=False), sequence(9)
    content = inputs(2, t=9)
    rope = schemes.rope(HEAD_DIM, HEADS, denominator="complex")
    close(attend(scheme, *content, x, causal=True), attend(rope, *content, x, causal=True))


@each("theta", ["b", "c"])
@each(
    ("name", "options", "count"),
    [
        ("lrpe-unitary", {}, HEAD_DIM),
        ("lrpe-unitary", {"complex": True}, HEAD_DIM // 2),
        ("lrpe-orthogonal", {}, HEAD_DIM // 2),
        ("lrpe-orthogonal", {"identity": 2}, HEAD_DIM // 2 - 1),
    ],
)
def test_thetas_of_types_b_and_c(name, options, count, theta):
    """pi / 2 / length times t / n, or over t, for t = 1, ..., n, with a length that does not depend on the input."""
    length = 50
    scheme = schemes.REGISTRY[name](HEAD_DIM, HEADS, basis="identity", theta=theta, length=length, **options)
    rotary = getattr(scheme.encoding, "encoding", scheme.encoding)
    order = torch.arange(1, count + 1).double()
    expected = math.pi / 2 / length * (order / count if theta == "b" else 1 / order)
    close(rotary.initial[0, 0], expected)


def test_the_identity_block_does_not_turn():
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    scheme = schemes.lrpe_orthogonal(HEAD_DIM, HEADS, basis="identity", identity=2)
    (found,) = scores_of(scheme, q, k, (x, y))
    (turned,) = scores_of(schemes.lrpe_orthogonal(6, HEADS, basis="identity"), q[..., :6], k[..., :6], (x, y))
    close(found, turned + (q * k)[..., 6:].sum(-1))


def test_rotated_features_come_out_interleaved_in_either_layout():
    q = torch.arange(16.0).expand(1, 2, 5, 16)
    half, interleaved = (isopos.rope(16, layout=layout).encoding(sequence(5)) for layout in ("half", "interleaved"))
    pairs = [n for i in range(8) for n in (i, i + 8)]
    assert torch.equal(half(q), interleaved(q[..., pairs]))
    assert torch.equal(half(q)[..., 0, :], q[..., 0, pairs])


def test_layouts_of_rope():
    """Half: feature i is paired with i + d/2. Interleaved: 2i with 2i + 1."""
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    half, interleaved = schemes.rope(HEAD_DIM, HEADS, layout="half"), schemes.rope(HEAD_DIM, HEADS)
    order = torch.arange(HEAD_DIM).view(2, -1).T.flatten()  # 0, d/2, 1, d/2 + 1, ...
    close(scores_of(half, q, k, (x, y))[0], scores_of(interleaved, q[..., order], k[..., order], (x, y))[0])


def test_a_grid_of_one_axis_is_a_sequence():
    torch.manual_seed(1)
    q, k, _ = inputs(1, t=9)
    (found,) = scores_of(schemes.ape_grid(HEAD_DIM, HEADS, axes=1), q, k, (sequence(9), 7 * sequence(9).flip(0)))
    close(found, relative_scores("ape-sequence"))


def test_a_unary_tree_is_a_sequence():
    q, k, _ = inputs(1, t=9)
    path, power = schemes.ape_tree(HEAD_DIM, HEADS, branches=1), schemes.ape_sequence(HEAD_DIM, HEADS)
    with torch.no_grad():
        power.encoding.generator.copy_(path.encoding.generator[:, 0])
    chain = tree([-1, *range(8)])
    found, expected = (
        rho(q) @ rho(k).mT for rho in (path.encoding(chain, torch.float64), power.encoding(sequence(9), torch.float64))
    )
    close(found, expected, dtype=torch.float32)


def test_a_product_is_its_parts_side_by_side():
    product, x = schemes.ape_product(HEAD_DIM, HEADS, parts="sequence + sequence"), grid(3, 3)
    axes = schemes.ape_grid(HEAD_DIM, HEADS)
    q, k, _ = inputs(1, t=9)
    close(*(scores_of(scheme, q, k, (x, 2 * x))[0] for scheme in (product, axes)))
    mixed = schemes.ape_product(10, HEADS, parts="tree3+grid2+ring5").encoding
    assert mixed.group == Product((Tree(3), Line(real=True), Line(real=True), Ring(5)))
    assert mixed.widths == (4, 2, 2, 2)


def test_permutations_of_a_grid_commute():
    for case in (c for c in SCHEMES if c.name == "permuteformer-2d"):
        encoding, axes = case.build().encoding, case.group.columns
        x, (q, *_) = case.positions(t=9), inputs(1, t=9)
        moved = q
        for axis in torch.randperm(axes).tolist():
            moved = encoding(x * (torch.arange(axes) == axis), torch.float64)(moved)
        assert torch.equal(encoding(x, torch.float64)(q), moved)


def test_ablations_of_permuteformer():
    q, k, _ = inputs(1, t=9)
    x = sequence(9)
    nothing, matrix = (schemes.permuteformer(HEAD_DIM, HEADS, matrix=name) for name in ("identity", "orthogonal"))
    close(scores_of(nothing, q, k, (x, 2 * x))[0], (q * k).sum(-1))
    assert not torch.allclose(scores_of(matrix, q, k, (x, 2 * x))[0], (q * k).sum(-1))
    assert schemes.permuteformer(HEAD_DIM, HEADS, decay="none").decay is None


def test_permuteformer_warns_of_short_orders():
    with pytest.warns(UserWarning, match="positions are distinguished, fewer than the 100000 of the longest sequence"):
        schemes.permuteformer(HEAD_DIM, 1, length=100000)
    assert schemes.permuteformer(64, 1, orders="long", length=2042040).encoding.common_order == 2042040


def test_locality_multiplies_logits_by_a_power_of_the_distance():
    q, k, v = inputs(2, t=9)
    for case in (c for c in SCHEMES if "locality" in c.options):
        scheme, x = case.build(), case.positions(2, t=9)
        distance = case.group.distance(x, x)
        if "metric" in case.options:  # ((coords - coords) ** 2).sum().sqrt().floor(), as APE's code for images has it
            places = x.tolist()
            far = [
                [[math.isqrt(sum((a - b) ** 2 for a, b in zip(i, j, strict=True))) for j in y] for i in y] for y in places
            ]
            assert not torch.equal(torch.tensor(far), distance)
            distance = torch.tensor(far)
        factor = 0.9 ** distance.double()
        rho = scheme.encoding(x, torch.float64)
        logits = rho(q) @ rho(k).mT / HEAD_DIM**0.5 * factor[:, None]
        close(softmax_attention(q, k, v, **at(scheme, x)), logits.softmax(-1) @ v)
        assert factor.min() < 0.9


def test_starts_near_the_identity_have_many_small_angles_and_few_large_ones():
    angle = schemes.ape_sequence(64, 2, initial="identity").encoding.frequency()
    assert angle.shape == (2, 32)
    assert (angle < 1).all()
    assert (angle.diff().diff() > 0).float().mean() > 0.9, "gaps grow"
    assert (angle < 0.25).float().mean() > 0.6


def test_ape_starts_as_rope():
    close(relative_scores("ape-sequence"), relative_scores("rope"), dtype=torch.float32)
    close(relative_scores("ape-sequence", base=77.0), relative_scores("rope", base=77.0), dtype=torch.float32)


@each(
    ("name", "option"),
    [
        ("rope", "learned"),
        ("lrpe-unitary", "learned"),
        ("lrpe-orthogonal", "learned"),
        ("lrpe-orthogonal", "learned_basis"),
        ("lrpe-permutation", "learned_basis"),
    ],
)
def test_learned_starts_as_fixed(name, option):
    close(relative_scores(name, **{option: True}), relative_scores(name, **{option: False}), dtype=torch.float32)


@each(
    ("name", "options"),
    [
        ("string", {}),
        ("string", {"variant": "circulant"}),
        ("comrope", {}),
        ("comrope", {"variant": "axial"}),
        ("grape", {"axes": 2, "planes": 2}),
        ("liere", {}),
    ],
)
def test_generators_that_do_not_learn_stay_where_the_others_start(name, options):
    learned, fixed = (schemes.REGISTRY[name](HEAD_DIM, HEADS, learned=learned, **options) for learned in (True, False))
    assert list(learned.parameters())
    assert not list(fixed.parameters())
    x = torch.randn(9, learned.encoding.group.columns)
    for one, other in zip(results(learned, x), results(fixed, x), strict=True):
        close(one, other, dtype=torch.float32)


def test_retnet_is_rope_with_its_decay():
    pairs = [schemes.retnet(HEAD_DIM, HEADS), schemes.rope(HEAD_DIM, HEADS, decay="retnet")]
    assert pairs[0].choices == pairs[1].choices
    assert all(map(torch.equal, *(results(scheme, sequence(9)) for scheme in pairs)))
    original = schemes.retnet(HEAD_DIM, HEADS, original=True)
    assert original.normalised
    assert original.choices == {"attention": "linear", "decay": "retnet", "denominator": "none", "feature_map": "identity"}
    assert schemes.retnet(HEAD_DIM, HEADS, original=True, denominator="plain").choices["denominator"] == "plain"


def test_retnet_has_the_frequencies_of_its_code():
    """torchscale: angle = 1 / 10000^linspace(0, 1, d / 2) of pairs (2i, 2i+1), and gamma = 1 - 2^(-5-h) per step."""
    (q, k, _), x, y = inputs(1, t=9), sequence(9), 3 * sequence(9).flip(0)
    scheme = schemes.retnet(HEAD_DIM, HEADS, original=True, frequencies="torchscale")
    (found,) = scores_of(scheme, q, k, (x, y))
    angle = 10000.0 ** -(torch.arange(HEAD_DIM // 2).double() / (HEAD_DIM / 2 - 1)) * (x - y)
    a, b = (torch.view_as_complex(z.unflatten(-1, (-1, 2))) for z in (q, k))
    close(found, (a.conj() * b * torch.exp(-1j * angle)).real.sum(-1))
    close(scheme.decay.rate.neg().exp(), 1 - 2.0 ** (-5 - torch.arange(HEADS).double()))
    base = schemes.retnet(4, 1, frequencies="torchscale", base=100.0).encoding.parameter
    close(base[0, 0], torch.tensor([1.0, 0.01], dtype=torch.float64))


def test_xpos_shrinks_as_its_equation_says():
    """The decay is zeta_i = (2i / d + 0.4) / 1.4 per the catalogue's number of steps, for any frequency of the pair."""
    steps = int(isopos.CATALOG["xpos"].equation.partition("zeta^(-t / ")[2].partition(")")[0])
    scheme, d = schemes.xpos(HEAD_DIM, 1), HEAD_DIM
    rho_q, rho_k = scheme.encoding.query(sequence(1), torch.float64), scheme.encoding.key(sequence(1) - steps, torch.float64)
    eye = torch.eye(d, dtype=torch.float64)[None, :, None]
    table = (rho_q(eye)[0, :, 0] @ rho_k(eye)[0, :, 0].mT).unflatten(0, (-1, 2))  # scores of features, [d/2 2 d]
    length = torch.stack([table[i, 0, 2 * i : 2 * i + 2].norm() for i in range(d // 2)])
    close(length, (2 * torch.arange(d // 2).double() / d + 0.4) / 1.4)


def test_lrpe_unitary_is_equation_22():
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    (found,) = scores_of(schemes.lrpe_unitary(HEAD_DIM, HEADS, basis="identity", learned=False), q, k, (x, y))
    angle = 10000.0 ** (-2 * torch.arange(HEAD_DIM).double() / HEAD_DIM) * (x - y)
    close(found, (angle.cos() * q * k).sum(-1))


def test_rope_is_equation_15():
    q, k, _ = inputs(1, t=9)
    x, y = sequence(9), 3 * sequence(9).flip(0)
    (found,) = scores_of(schemes.rope(HEAD_DIM, HEADS, base=500.0), q, k, (x, y))
    angle = 500.0 ** (-2 * torch.arange(HEAD_DIM // 2).double() / HEAD_DIM) * (x - y)
    a, b = (torch.view_as_complex(z.unflatten(-1, (-1, 2))) for z in (q, k))
    close(found, (a.conj() * b * torch.exp(-1j * angle)).real.sum(-1))


@each("name", [name for name in schemes.REGISTRY if "seed" in schemes.options_of(name)])
def test_seeds_choose(name):
    made_of = {seed: schemes.REGISTRY[name](HEAD_DIM, HEADS, seed=seed) for seed in (1, 2)}
    x = ordered(made_of[1].group, 2, t=9, least=1)
    first, other = (results(scheme, x) for scheme in made_of.values())
    again = results(schemes.REGISTRY[name](HEAD_DIM, HEADS, seed=np.int64(1)), x)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_parts_side_by_side_are_drawn_apart():
    """Random initial values of all axes and planes differ. ape-product is excluded: its smallest parts have one basis."""
    compared = 0
    for case in (c for c in SCHEMES if "seed" in schemes.options_of(c.name) and c.name != "ape-product"):
        for one in (m for m in case.build().encoding.modules() if isinstance(m, encodings.DirectSum)):
            for a, b in itertools.combinations([dict(part.named_parameters()) for part in one.parts], 2):
                for name in a.keys() & b.keys():
                    assert a[name].shape != b[name].shape or not a[name].equal(b[name]), f"{case.id}: {name}"
                    compared += 1
    assert compared


def test_random_seeds_of_torch_are_left_alone():
    state = torch.get_rng_state()
    for case in SCHEMES:
        case.build()
    assert torch.equal(torch.get_rng_state(), state)


def test_only_limited_schemes_have_a_max_length():
    for case in SCHEMES:
        limit = case.build().max_length
        limits = {"learned": 256, "cosformer": case.options.get("length", 2048)}
        near = {"xpos": (3000, 20000), "jordan": (900, 9000)}.get(case.name)
        assert near[0] < limit < near[1] if near else limit == limits.get(case.name)
    assert schemes.learned(HEAD_DIM, HEADS).max_length == 2048


# Text options


@each("case", PRESETS, ids=ids)
def test_build_is_the_function(case):
    kind = case.kinds[-1]
    scheme = schemes.build(case.name, HEAD_DIM, HEADS, {"attention": kind})
    assert scheme.choices == schemes.REGISTRY[case.name](HEAD_DIM, HEADS, attention=kind).choices
    assert scheme.attention == kind


def ring():
    return encodings.Rotary(torch.full((1, 1, 2), math.pi / 4), group=Ring(8))


def test_build_reads_every_kind_of_option():
    assert schemes.build("rope-axial", 16, 1, {"sections": [6, 2]}).encoding.features == 16
    rope = schemes.build("rope", 8, 2, {"base": "1e2", "learned": "True", "rotary_dim": "4"})
    close(rope.encoding.encoding.initial[0, 0], schemes.rope(4, base=100.0).encoding.initial[0, 0])
    assert rope.encoding.rest == 4
    assert list(rope.parameters())
    assert not list(schemes.build("rope", 8, 2, {"learned": "false"}).parameters())
    assert schemes.build("learned", 8, 2, {"length": "12", "model_dim": "5"}).embedding.weight.shape == (12, 5)
    assert schemes.build("rope", 8, 2, {"attention": "softmax"}).choices["denominator"] == "softmax"
    assert set(schemes.options_of("rope")) == {"base", "learned", "rotary_dim", "layout", *schemes.Choices.__annotations__}


BAD_TEXT = [
    (("rpoe", {}), r"scheme 'rpoe': .*rope"),
    (("xyzzy", {}), r"scheme 'xyzzy': .*one of none, sinusoidal"),
    (("rope", {"bse": "1"}), r"rope: .*option 'bse': .*base"),
    (("rope", {"decay": "retnt"}), r"rope: decay: expected .*retnet.* got 'retnt'"),
    (("rope", {"denominator": "x"}), r"denominator: expected .*plain, encoded, complex, none, got 'x'"),
    (("lrpe-unitary", {"basis": "furier"}), r"basis: expected .*fourier.* got 'furier'"),
    (("rope", {"base": "x"}), r"rope: base: expected float, got 'x'"),
    (("rope", {"learned": "maybe"}), r"rope: learned: expected true or false, got 'maybe'"),
    (("rope", {"rotary_dim": "4.5"}), r"rope: rotary_dim: expected int, got '4.5'"),
    (("rope", {"attention": "softmax", "denominator": "plain"}), r"denominator: expected no choice with softmax"),
]


@each(("arguments", "message"), BAD_TEXT)
def test_bad_text(arguments, message):
    name, options = arguments
    with pytest.raises(ValueError, match=message):
        schemes.build(name, 8, 2, options)


BAD_VALUES = [
    (lambda f: f(0, 2), r"head_dim: expected an integer of at least 1, got 0"),
    (lambda f: f(8.0, 2), r"head_dim: expected an integer of at least 1"),
    (lambda f: f(8, 0), r"heads: expected an integer of at least 1, got 0"),
    (lambda f: f(8, 2, attention="sofmax"), r"attention: expected .*softmax.* got 'sofmax'"),
    (lambda f: f(8, 2, feature_map="elu"), r"feature_map: expected .*elu\+1.* got 'elu'"),
    (lambda f: f(8, 2, denominator=None), r"denominator: expected .* got None"),
    (lambda f: f(8, 2, decay="retnt"), r"decay: expected .*retnet.* got 'retnt'"),
    (lambda f: f(8, 2, attention="softmax", feature_map="relu"), r"feature_map: expected no choice with softmax"),
]


@presets
def test_bad_values_of_every_scheme(case):
    for call, message in BAD_VALUES:
        with pytest.raises(ValueError, match=message):
            call(schemes.REGISTRY[case.name])
    with pytest.raises(TypeError, match="dekay"):
        schemes.REGISTRY[case.name](8, 2, dekay="retnet")


@each(
    ("call", "message"),
    [
        (lambda: schemes.retnet(7, 1, frequencies="torchscale"), r"head size: expected an even number"),
        (lambda: schemes.retnet(8, 1, frequencies="linspace"), r"frequencies: expected one of rope, torchscale"),
        (lambda: schemes.rope(8, rotary_dim=3), r"head size: expected an even number"),
        (lambda: schemes.rope(8, rotary_dim=10), r"rotary_dim: expected an even number up to the head size 8, got 10"),
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
        (lambda: schemes.rope(8, 2, decay=Decay(torch.ones(3))), r"decay: expected rates of 2 heads, got 3"),
        (lambda: schemes.rope(8, layout="llama"), r"layout: expected one of interleaved, half, got 'llama'"),
        (lambda: schemes.rope(8, layout="half", rotary_dim=3), r"head size: expected an even number"),
        (lambda: schemes.retnet(8, 2, original=True, attention="softmax"), r"original: expected linear attention"),
        (lambda: schemes.xpos(8, length=0), r"length: expected a positive number of steps, got 0"),
        (lambda: schemes.xpos(8, base=0.0), r"base: expected a positive number"),
        (lambda: schemes.jordan(8, 2, order=5), r"order: expected at most the 4 pairs of a head, got 5"),
        (lambda: schemes.jordan(8, 2, length=0.0), r"length: expected a positive number of steps, got 0"),
        (lambda: schemes.lrpe_unitary(7, 1, complex=True), r"head size: expected an even number"),
        (lambda: schemes.lrpe_unitary(8, 1, theta="b", length=0), r"length: expected an integer of at least 1, got 0"),
        (lambda: schemes.lrpe_unitary(8, 1, theta="d"), r"theta: expected one of a, b, c, got 'd'"),
        (lambda: schemes.lrpe_orthogonal(8, 1, identity=3), r"head size: expected an even number .* got 5"),
        (lambda: schemes.lrpe_orthogonal(8, 1, identity=8), r"identity: expected 0 to 7 features that do not rotate, got 8"),
        (lambda: schemes.lrpe_orthogonal(8, 1, identity=-2), r"identity: expected 0 to 7"),
        (
            lambda: schemes.lrpe_permutation(8, 1, basis="fourier", learned_basis=True),
            r"learned_basis: expected basis='householder'",
        ),
        (lambda: schemes.permuteformer(8, 1, matrix="skew"), r"matrix: expected one of permutation, identity, orthogonal"),
        (lambda: schemes.permuteformer(7, 1, matrix="orthogonal"), r"head size: expected an even number"),
        (lambda: schemes.permuteformer(8, 1, orders="short"), r"orders: expected one of random, long, got 'short'"),
        (lambda: schemes.permuteformer_2d(8, 1, orders="short"), r"orders: expected one of random, long"),
        (lambda: schemes.permuteformer_2d(3, 1), r"head size: expected at least 4, 2 features for each of 2 axes, got 3"),
        (lambda: schemes.Scheme(encodings.Identity(4), 0), "heads: expected an integer of at least 1, got 0"),
        (lambda: schemes.Scheme(ring(), 1, bias=biases.T5(1), attention="softmax"), "bias: expected positions of Ring"),
        (lambda: schemes.t5(8, 1, buckets=3), r"buckets: expected an even number"),
        (lambda: schemes.t5(8, 1, buckets=32, max_distance=4), r"max_distance larger than"),
        (lambda: schemes.deberta(8, 1, buckets=2), r"buckets: expected at least 4"),
        (lambda: schemes.deberta(8, 1, max_distance=100), r"max_distance larger than 129, got 256 and 100"),
        (lambda: schemes.transformer_xl(8, 1, model_dim=5), r"width: expected an even number of sinusoids, got 5"),
        (lambda: schemes.ape_absolute(8, 1, side="both"), r"side: expected query or key, got 'both'"),
        (lambda: schemes.ape_grid(8, 1, axes=5), r"head size: expected at least 10 features for 5 parts, got 8"),
        (lambda: schemes.ape_product(8, 1, parts="sequence3"), r"parts: expected .* joined by \+, got 'sequence3'"),
        (lambda: schemes.ape_product(8, 1, parts="ring"), r"parts: expected .* joined by \+, got 'ring'$"),
        (
            lambda: schemes.ape_product(8, 1, parts="tree2+bush"),
            r"parts: expected .*got 'bush' at character 7 of 'tree2\+bush'",
        ),
        (lambda: schemes.ape_product(8, 1, parts=""), r"parts: expected"),
        (lambda: schemes.ape_product(8, 1, parts="ring1"), r"period: expected an integer of at least 2, got 1"),
        (lambda: schemes.ape_product(8, 1, parts="tree0"), r"branches: expected an integer of at least 1, got 0"),
        (lambda: schemes.ape_product(8, 1, parts="grid0"), r"axes: expected an integer of at least 1, got 0"),
        (lambda: schemes.ape_product(8, 1, parts="grid5"), r"head size: expected at least 10 features for 5 parts"),
        (lambda: schemes.horn_constrained(8, 1, outside=-1), r"outside: expected an integer of at least 0, got -1"),
        (lambda: schemes.horn_clipped(8, 1, outside=-1), r"outside"),
        (lambda: schemes.shiv_quirk(8, 1, branches=9), r"depth: expected .* of 9 branches in width 8"),
        (lambda: schemes.shiv_quirk(8, 1, depth=5), r"depth: expected 1 to 4 of 2 branches in width 8, got 5"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each(
    "call",
    [
        *(lambda width=width: schemes.rope(8, 1, rotary_dim=width) for width in (2, 8)),
        *(lambda p=p: schemes.p_rope(8, 1, p=p) for p in (0.25, 1.0)),
        *(lambda width=width: schemes.lrpe_orthogonal(8, 1, identity=width) for width in (0, 6)),
        *(lambda size=size: schemes.comrope(8, 1, block=size) for size in (2, 8)),
        *(lambda depth=depth: schemes.shiv_quirk(8, 1, depth=depth) for depth in (1, 4)),
        lambda: schemes.string(8, 1, axes=4),
        lambda: schemes.string(10, 1, axes=4, variant="circulant"),
        lambda: schemes.ape_grid(10, 1, axes=5),
        lambda: schemes.ape_product(10, 1, parts="grid5"),
        lambda: schemes.horn_clipped(8, 1, outside=0),
        lambda: schemes.t5(8, 1, buckets=4, max_distance=2),
        lambda: schemes.deberta(8, 1, buckets=4, max_distance=4),
        lambda: schemes.fire(8, 1, length=1.0),
    ],
)
def test_ends_of_ranges_are_in(call):
    scheme = call()
    q, k, v = inputs(1, t=3, d=scheme.encoding.features, heads=1)
    assert scheme(q, k, v, ordered(scheme.group, t=3)).isfinite().all()


EVEN = "rope retnet lrpe-orthogonal ape-sequence ape-ring xpos ape-absolute ape-grid ape-tree ape-product"
LEAST = {
    1: """learned length, cosformer length, jordan order, lrpe-unitary length, lrpe-orthogonal length, permuteformer width,
        permuteformer-2d axes, shaw reach, ape-grid axes, ape-tree branches, horn-constrained axes,
        horn-constrained sinusoids, horn-clipped axes, horn-clipped reach, spe-sine sines, spe-sine realizations,
        spe-conv reach, spe-conv realizations, shiv-quirk branches""",
    2: "ape-ring period",
}


def test_options_have_least_values_and_pairs_need_an_even_head():
    for name in EVEN.split():
        with named(name), pytest.raises(ValueError, match="head size: expected an even number"):
            schemes.REGISTRY[name](7, 1)
    for least, options in LEAST.items():
        for name, option in (row.split() for row in options.split(",")):
            for wrong in (least - 1, least + 0.5):
                message = f"{option}: expected an integer of at least {least}, got {wrong}"
                with named(f"{name}: {option}={wrong}"), pytest.raises(ValueError, match=message):
                    schemes.REGISTRY[name](8, 1, **{option: wrong})
            with named(f"{name}: {option}={least}"):
                schemes.REGISTRY[name](8, 1, **{option: least})
    for name in ("ape-sequence", "ape-absolute", "ape-grid", "ape-tree"):
        with named(name), pytest.raises(ValueError, match="initial: expected one of rope, identity, got 'zero'"):
            schemes.REGISTRY[name](8, 1, initial="zero")


@each(
    ("name", "options", "message"),
    [
        ("rope", {"learned": "false"}, "learned: expected True or False, got 'false'"),
        ("rope", {"learned": 1}, "learned: expected True or False, got 1"),
        ("rope", {"base": "10000"}, "base: expected a finite number, got '10000'"),
        ("rope", {"rotary_dim": 4.0}, "rotary_dim: expected an integer or None, got 4.0"),
        ("rope", {"inside": "x"}, "inside: expected True or False, got 'x'"),
        ("rope", {"transport": "x"}, "transport: expected True or False, got 'x'"),
        ("rope", {"attention": "softmax", "scale": "x"}, "scale: expected a finite number or None, got 'x'"),
        ("ape-tree", {"seed": None}, "seed: expected an integer, got None"),
        ("permuteformer", {"seed": None}, "seed: expected an integer, got None"),
        ("permuteformer", {"length": -7}, "length: expected an integer of at least 1, got -7"),
        ("horn-clipped", {"mean": math.nan}, "mean: expected a finite number, got nan"),
        ("horn-constrained", {"outside": 1.5}, "outside: expected an integer of at least 0, got 1.5"),
        ("sinusoidal", {"scale": math.nan}, "scale: expected a finite number, got nan"),
        ("sinusoidal", {"model_dim": 0}, "model_dim: expected an integer of at least 1, got 0"),
        ("learned", {"model_dim": -1}, "model_dim: expected an integer of at least 1, got -1"),
        ("comrope", {"axes": -1}, "axes: expected an integer of at least 1, got -1"),
        ("t5", {"bidirectional": -1}, "bidirectional: expected True or False, got -1"),
        ("ape-product", {"parts": 2}, "parts: expected a text, got 2"),
    ],
)
def test_options_have_the_types_of_their_annotations(name, options, message):
    with pytest.raises(ValueError, match=message):
        schemes.REGISTRY[name](8, 2, **options)


def test_numbers_of_numpy_are_options_and_options_have_names():
    assert schemes.rope(8, 2, base=np.float32(100)).fingerprint == schemes.rope(8, np.int64(2), base=100).fingerprint
    with pytest.raises(ValueError, match=r"options: expected them by name, .*, got 'decay=retnet'"):
        schemes.build("rope", 8, 2, "decay=retnet")


def test_at_names_keys_apart():
    scheme, x, y = schemes.rope(8, 2, decay="retnet"), sequence(3), sequence(5)
    both = scheme.at(x, y)
    assert [rho.length for rho in both["isometry"]] == [3, 5]
    assert [g.shape for g in both["decay"]] == [(2, 3), (2, 5)]
    assert set(both) == {"isometry", "decay", "feature_map", "denominator"}
    assert set(schemes.rope(8, 2, attention="softmax").at(x)) == {"isometry", "decay", "scale"}
    assert scheme.at(x, dtype=torch.float64)["isometry"].table.dtype == torch.float64


def test_what_at_returns_is_a_frozen_value():
    at = schemes.t5(8, 2, decay="alibi").at(sequence(3))
    changes = (lambda: at.update(scale=2.0), lambda: at.pop("scale"), lambda: operator.setitem(at, "scale", 2.0), at.clear)
    for change in changes:
        with pytest.raises(TypeError, match="expected no change, since layers share them"):
            change()
    with pytest.raises(KeyError):
        at["state"]
    changed = at | {"scale": 2.0}
    assert (changed["scale"], changed["isometry"], at["scale"]) == (2.0, at["isometry"], 8**-0.5)
    before = same = at
    same |= {"scale": 2.0}
    assert (same["scale"], before["scale"]) == (2.0, 8**-0.5)
    assert isinstance(copy.deepcopy(at), type(at))
    assert {"scale": 1.0, "causal": True} | at == dict(at) | {"causal": True} == {"causal": True} | dict(at)
    assert set(at) == {"isometry", "decay", "terms", "scale"}
    assert "decay=float64 [2, 3]" in repr(at)
    assert "table=float32 [2, 32]" in repr(at)
    assert len(repr(at).splitlines()) == 6


@pytest.fixture
def registries():
    """Registries that a test may add to."""
    before = [(table, dict(table)) for table in (schemes.REGISTRY, isopos.CATALOG, decays.RATES)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


TOY = {"summary": "rotation by whole steps", "citation": "nobody", "equation": "<q, R(t) k>", "fits": {"base": "length"}}


def test_a_scheme_and_a_decay_from_outside(registries):
    @schemes.register(**TOY)
    def toy(head_dim: int, heads: int, *, base: float = 10.0, seed: int = 0, **choices):
        """Rotation.

        Args:
            base: Of the frequencies.
        """
        frequency = encodings.rope_frequencies(head_dim // 2, base)[None, None]
        return schemes.compose(encodings.Rotary(frequency), heads, choices, {"decay": "half"})

    decays.RATES["half"] = lambda heads: torch.full((heads,), math.log(2))
    scheme = schemes.build("toy", 8, 2, {"base": "20"}, model={"length": 7})
    assert scheme.choices["decay"] == "half"
    assert isopos.laws.check(scheme).holds
    assert isopos.toy is schemes.toy is toy is schemes.REGISTRY["toy"]
    assert "toy" in dir(isopos)
    described = [line.strip().split(":")[0] for line in toy.__doc__.splitlines()[5:]]
    assert described == ["head_dim", "heads", "base", "seed", "choices"]
    first = [
        schemes.build("toy", 8, 2, more, model={"length": 7}).encoding.initial[0, 0, 1] for more in ({}, {"base": "20"})
    ]
    assert [float(f) for f in first] == pytest.approx([7**-0.25, 20**-0.25])
    assert schemes.options_of("toy")["decay"] == ("none", *decays.RATES, "forget")
    assert isinstance(schemes.rope(8, 2, decay="half").decay, Decay)
    with pytest.raises(ValueError, match=r"decay: expected one of none, .*half, forget, got 'hafl'; did you mean half\?"):
        schemes.rope(8, 2, decay="hafl")
    with pytest.raises(ValueError, match="scheme: expected a new name, got 'toy', which test_schemes has"):
        schemes.register(**TOY)(toy)
    with pytest.raises(TypeError, match="equation"):
        schemes.register(summary="x", citation="y")
    with pytest.raises(ValueError, match="summary: expected the first line of the function's docstring"):
        schemes.register(citation="y", equation="z")(lambda head_dim, heads: None)


def test_options_that_follow_the_model():
    model = {"length": 20, "reach": 80, "scale": 0.02, "seed": 3}
    assert schemes.build("learned", 8, 2, model=model).max_length == 20
    assert schemes.build("learned", 8, 2, {"length": "30"}, model=model).max_length == 30
    assert schemes.build("cosformer", 8, 2, model=model).max_length == 80
    assert schemes.build("sinusoidal", 8, 2, model=model).embedding.scale == 0.02
    same = [schemes.lrpe_permutation(8, 2, seed=3), schemes.build("lrpe-permutation", 8, 2, model=model)]
    assert same[0].fingerprint == same[1].fingerprint != schemes.lrpe_permutation(8, 2).fingerprint


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


def test_a_ring_closes_for_every_learned_basis():
    scheme, x = perturb(schemes.ape_ring(HEAD_DIM, HEADS, period=12)), sequence(9)
    q, k, _ = inputs(1, t=9)
    here, round_once, shifted = scores_of(scheme, q, k, (x, 3 * x), (x + 12, 3 * x - 24), (x + 5, 3 * x))
    close(round_once, here)
    assert not torch.allclose(shifted, here)


@over_rows([case for case in SCHEMES if case.name != "learned"])  # as any embedding
def test_default_dtypes_change_nothing(case):
    before, x = case.build(), case.positions(t=9)
    for default in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        after = case.build()
        torch.set_default_dtype(torch.float32)
        for a, b in zip(before.parameters(), after.parameters(), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        for side in ("query", "key"):
            one, other = (getattr(scheme.encoding, side)(x).tensors() for scheme in (before, after))
            assert all(map(torch.equal, one, other))


@each("size", [1, 2])
@each("head_dim", [64, 128])
def test_weights_of_favor_sum_to_one(head_dim, size):
    q, k = size * torch.randn(2, 1, 2, 100, head_dim)
    scheme = schemes.none(head_dim, 2, feature_map="favor")
    out = linear_attention(q, k, torch.ones(1, 2, 100, 1), **scheme.at(sequence(100)), causal=True)
    close(out, torch.ones_like(out), roundings=1e5)


def test_a_ring_of_one_pair_turns_once_a_period():
    scheme = schemes.ape_ring(2, 1, period=6)
    assert scheme.encoding.encoding.parameter.item() == pytest.approx(2 * math.pi / 6)


def test_terms_of_other_positions_are_refused():
    q = torch.randn(1, 2, 12, 8)
    for case in PRESETS:
        scheme = case.build(attention="softmax")
        if scheme.bias is not None:
            for t in (1, 10):
                with pytest.raises(ValueError, match="terms: expected positions of"):
                    softmax_attention(q, q, q, **at(scheme, sequence(t)))


@each("name", ["shaw", "deberta", "horn-clipped"])
def test_autocast_reaches_no_bias(name):
    q, k, v = inputs(1, t=9, dtype=torch.float32)
    arguments = schemes.REGISTRY[name](HEAD_DIM, HEADS, attention="softmax").at(sequence(9))
    expected = softmax_attention(q, k, v, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        close(softmax_attention(q, k, v, **arguments).float(), expected, dtype=torch.bfloat16, roundings=16)


def test_scales_beyond_float16_stay_inside_attention():
    scheme, x = schemes.xpos(64, 2, attention="softmax"), sequence(9000)[-16:]
    q, k, v = inputs(1, t=16, d=64, e=5, dtype=torch.float16)
    out = softmax_attention(q, k, v, **scheme.at(x), causal=True)
    exact = softmax_attention(*(a.double() for a in (q, k, v)), **at(scheme, x), causal=True)
    assert out.dtype == torch.float16
    close(out, exact, roundings=8)


RING = encodings.Rotary(torch.full((1, 1, 1), 2 * math.pi / 6), group=Ring(6))


@each(
    ("parts", "message"),
    [
        (
            {"attention": Linear(inside=True), "bias": biases.ClippedKeys(2, 8)},
            "inside: expected False with a relative bias",
        ),
        ({"attention": "softmax", "bias": biases.T5(4)}, "bias: expected positions of .* and 2 heads"),
        ({"encoding": encodings.DirectSum([RING] * 2), "bias": biases.ClippedKeys(2, 4, axes=2)}, "bias: expected"),
        ({"encoding": encodings.DirectSum([RING]), "bias": biases.ClippedKeys(2, 2)}, "bias: expected positions of"),
        ({"attention": "softmax", "bias": biases.ClippedKeys(2, 8, axes=2)}, "bias: expected positions of"),
    ],
)
def test_parts_that_do_not_fit(parts, message):
    with pytest.raises(ValueError, match=message):
        schemes.Scheme(**{"encoding": encodings.Identity(8), "heads": 2} | parts)


@each(
    ("parts", "message"),
    [
        ({"encoding": isopos.rope(16, 2)}, "encoding: expected an Encoding .* such as scheme.encoding, got Scheme"),
        ({"bias": "t5"}, "bias: expected None or RelativeBias, got str"),
        ({"embedding": "sinusoidal"}, "embedding: expected None or Embedding, got str"),
        ({"turn": 1}, "turn: expected None or SelectiveRotation or ContentFrequency or HouseholderProduct, got int"),
        ({"width": 0}, "width: expected an integer of at least 1, got 0"),
    ],
)
def test_parts_of_other_types(parts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        schemes.Scheme(**{"encoding": encodings.Identity(8), "heads": 2} | parts)


@each(
    ("fields", "message"),
    [
        ({"attention": "softmax", "inside": True}, "inside: expected False with softmax"),
        ({"attention": "softmax", "scale": math.nan}, "scale: expected a positive number"),
        ({"attention": "softmax", "feature_map": "elu+1"}, "feature_map: expected no choice with softmax attention"),
        ({"attention": "softmax", "denominator": "plain"}, "denominator: expected no choice with softmax attention"),
        ({"scale": 0.5}, "scale: expected softmax attention, whose logits it multiplies, got linear"),
        ({"locality": 0.5}, "locality: expected softmax attention, whose logits it multiplies, got linear"),
        ({"inside": True, "denominator": "plain"}, "denominator: expected 'encoded' or 'none', .* ahead of the feature map"),
    ],
)
def test_a_kind_has_only_its_fields(fields, message):
    kind, own = kinds.KINDS[fields.get("attention", "linear")], {n: x for n, x in fields.items() if n != "attention"}
    with pytest.raises((TypeError, ValueError), match=f"unexpected keyword argument|{message}"):
        kind(**own)
    with pytest.raises(ValueError, match=message):
        schemes.rope(8, 2, **fields)


def test_presets_take_a_kind_or_its_fields():
    for kind, fields in (
        (kinds.Linear("relu", "encoded"), {"feature_map": "relu", "denominator": "encoded"}),
        (kinds.Softmax(scale=0.5, locality=0.9), {"attention": "softmax", "scale": 0.5, "locality": 0.9}),
    ):
        one, other = schemes.permuteformer(8, 2, attention=kind), schemes.permuteformer(8, 2, **fields)
        assert one.fingerprint == other.fingerprint
        assert one.choices == other.choices
        assert schemes.REGISTRY[one.origin[0]](**one.origin[1]).fingerprint == one.fingerprint
    assert schemes.permuteformer(8, 2, attention=kinds.Linear()).choices["denominator"] == "plain", "no preset's default"
    assert (kinds.Linear().denominator, kinds.Linear(inside=True).denominator) == ("plain", "encoded")
    with pytest.raises(TypeError, match="inside: expected none, since this scheme determines it, got True"):
        schemes.spe_sine(8, 2, attention=kinds.Linear(inside=True))


def test_an_encoding_may_act_ahead_of_the_feature_map():
    rotary = schemes.rope(8, 2).encoding
    scheme, x = schemes.Scheme(rotary, 2, attention=Linear(inside=True)), sequence(9)
    q, k, v = inputs(1, t=9)
    phi = scheme.feature_map
    rho = rotary(x, torch.float64)
    weight = phi(rho(q)) @ phi(rho(k)).mT
    close(linear_attention(q, k, v, **at(scheme, x)), weight @ v / weight.sum(-1, keepdim=True))


@each("name", ["none", "rope", "xpos", "cosformer"])
def test_a_decay_needs_heads(name):
    assert schemes.REGISTRY[name](8).heads == 1
    with pytest.raises(ValueError, match="heads: expected their number with a decay"):
        schemes.REGISTRY[name](8, decay="retnet")
    assert schemes.REGISTRY[name](8, 1, decay="retnet").decay is not None


def test_arguments_of_one_attention_do_not_pass_for_the_other():
    q, k, v = inputs(1, t=5, dtype=torch.float32)
    with pytest.raises(TypeError, match="scale"):
        linear_attention(q, k, v, **schemes.alibi(HEAD_DIM, HEADS, attention="softmax").at(sequence(5)))
    with pytest.raises(TypeError, match="feature_map"):
        softmax_attention(q, k, v, **schemes.rope(HEAD_DIM, HEADS).at(sequence(5)))


@each("period", [2, 3, 5, 7, 12, 13, 129])
def test_frequencies_of_a_ring_are_whole_turns_a_period_up_to_half_a_turn_a_step(period):
    ring = schemes.ape_ring(16, 2, period=period).encoding.encoding
    turns = ring.parameter.flatten() * period / (2 * math.pi)
    close(turns, turns.round())
    whole = turns.round().int().tolist()
    assert whole == sorted(whole, reverse=True)
    assert (whole[-1], whole[0]) == (1, period // 2), "one turn a period; half a turn a step, or the most below it"
    assert ring.order == period


def test_options_of_a_recipe_follow_its_samples():
    from isopos.lab.recipes import preset
    from isopos.lab.tasks.build import build_scheme
    from isopos.models import TOKEN_STD

    recipe = preset("lrpe-alm", "tiny")
    reach = recipe.task.reach
    assert reach > recipe.task.length
    built = {name: build_scheme(recipe.edit(scheme=name)) for name in ("cosformer", "sinusoidal", "learned")}
    assert built["cosformer"].max_length == reach
    assert (built["cosformer"].encoding.parameter == math.pi / 2 / reach).all()
    assert built["sinusoidal"].embedding.scale == TOKEN_STD
    assert built["learned"].max_length == recipe.task.length
    chosen = build_scheme(recipe.edit(scheme="cosformer:length=9000"))
    assert chosen.max_length == 9000


# Of the papers, or of the first lines of each preset; typed by hand, since pages of the documentation follow the code
DEFAULTS = """
    none: linear elu+1 plain none
    sinusoidal: linear elu+1 plain none, scale=1.0
    learned: linear elu+1 plain none, length=2048 seed=0
    shiv-quirk: linear elu+1 plain none, branches=2
    ape-sequence: linear elu+1 plain none, initial=rope base=10000.0
    ape-absolute: linear elu+1 plain none, side=key initial=rope base=10000.0
    ape-grid: linear elu+1 plain none, axes=2 initial=rope base=10000.0 metric=steps
    ape-ring: linear elu+1 plain none, period=128 seed=0
    ape-tree: linear elu+1 plain none, branches=2 initial=rope base=10000.0 seed=0
    ape-product: linear elu+1 plain none, parts=sequence+tree2 initial=rope base=10000.0 seed=0
    rope-axial: linear elu+1 plain none, axes=2 base=100.0 layout=interleaved
    rope-mixed: linear elu+1 plain none, axes=2 base=10.0 learned=True seed=0
    rope-golden: linear elu+1 plain none, axes=2 base=100.0
    mrope: linear elu+1 plain none, interleaved=False time=fast base=10000.0 layout=interleaved
    horn-constrained: linear elu+1 encoded none, axes=1 sinusoids=8 learned=False outside=0
        inside=False base=10000.0
    horn-clipped: linear elu+1 plain none, axes=1 outside=0 mean=0.0 seed=0
    shaw: softmax softmax softmax none, reach=16 seed=0
    transformer-xl: softmax softmax softmax none, seed=0
    t5: softmax softmax softmax none, buckets=32 max_distance=128 bidirectional=True
    deberta: softmax softmax softmax none, buckets=256 max_distance=512 released=False seed=0
    alibi: linear elu+1 plain alibi
    lrpe-unitary: linear elu+1 plain none, basis=householder complex=False theta=a length=512 learned=True
        learned_basis=False base=10000.0 seed=0
    lrpe-orthogonal: linear elu+1 plain none, basis=householder identity=0 theta=a length=512 learned=True
        learned_basis=False base=10000.0 seed=0
    lrpe-permutation: linear elu+1 plain none, basis=householder learned_basis=False seed=0
    permuteformer: linear relu encoded permuteformer, width=1 matrix=permutation orders=random seed=0
    permuteformer-2d: linear relu encoded none, axes=2 orders=random seed=0
    rope: linear elu+1 plain none, base=10000.0 learned=False layout=interleaved
    p-rope: linear elu+1 plain none, p=0.75 base=10000.0 layout=interleaved
    retnet: linear elu+1 plain retnet, original=False frequencies=rope base=10000.0
    xpos: linear elu+1 encoded none, base=10000.0 length=512.0
    harope: linear elu+1 plain none, axes=2 base=10000.0 released=False
    drope: linear elu+1 plain none, base=10000.0
    carope: linear elu+1 plain none, base=10000.0 layout=interleaved
    wire: linear elu+1 plain none, axes=8 learned=True seed=0
    prope: linear elu+1 plain none, base=100.0 layout=interleaved transport=True
    jordan: linear elu+1 plain retnet, order=2 growth=0.0 base=10000.0 length=1024.0
    cosformer: linear relu encoded none, length=2048
    spe-sine: linear elu+1 encoded none, sines=5 gated=False noise_per_head=False seed=0
    clock: linear elu+1 plain none, base=10000.0
    string: linear elu+1 plain none, variant=cayley axes=1 base=10000.0 learned=True
    comrope: linear elu+1 plain none, variant=linear axes=2 base=10000.0 learned=True seed=0
    grape: linear elu+1 plain none, axes=1 planes=1 base=10000.0 learned=True seed=0
    liere: linear elu+1 plain none, axes=2 base=10000.0 learned=True seed=0
    fox: linear elu+1 plain forget
    selective: linear elu+1 plain none, base=10000.0 layout=interleaved
    path: linear elu+1 plain none, strength=learned
    kerple: softmax softmax softmax none, kernel=log seed=0
    fire: softmax softmax softmax none, width=32 length=512.0 seed=0
    pope: linear elu+1 plain none, base=10000.0
    spe-conv: linear elu+1 encoded none, reach=8 gated=False noise_per_head=False seed=0
"""


def test_defaults_of_presets_are_those_of_the_papers():
    written, found = {}, {}
    for line in DEFAULTS.replace("\n        ", " ").strip().splitlines():
        name, _, rest = line.strip().partition(": ")
        written[name] = rest
    for name, function in schemes.REGISTRY.items():
        choices = function(HEAD_DIM, HEADS).choices
        options = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        given = " ".join(f"{option}={value}" for option, value in options.items() if value is not None)
        main = " ".join(choices[name] for name in ("attention", "feature_map", "denominator", "decay"))
        found[name] = f"{main}, {given}".removesuffix(", ")
    assert found == written
    assert schemes.retnet(HEAD_DIM, HEADS, original=True).choices | {"attention": ""} == {
        "attention": "",
        "feature_map": "identity",
        "denominator": "none",
        "decay": "retnet",
    }
    assert schemes.lrpe_unitary(HEAD_DIM, HEADS, complex=True).choices["denominator"] == "complex"
    assert schemes.horn_clipped(HEAD_DIM, HEADS).bias.reach == 8
    assert schemes.horn_clipped(HEAD_DIM, HEADS, axes=2).bias.reach == 2
    assert schemes.shiv_quirk(16, 4).embedding.depth == 16
    assert schemes.deberta(HEAD_DIM, HEADS).scale == (3 * HEAD_DIM) ** -0.5


@each("name", ["horn-constrained", "horn-clipped", "rope", "none"])
@each("denominator", ["plain", "encoded", "none"])
@each("dtype", [torch.float64, torch.float16])
def test_favor_is_its_estimator_wherever_its_scales_do_not_divide_out(name, denominator, dtype):
    case = schemes.REGISTRY[name](HEAD_DIM, HEADS, feature_map="favor", denominator=denominator)
    (q, k, v), x = inputs(1, t=9), sequence(9)
    with torch.no_grad():
        at = perturb(case).at(x, dtype=torch.float64)
        expected = quadratic(q, k, v, **at | {"feature_map": case.favor.forward}, causal=True)
        out = linear_attention(*(a.to(dtype) for a in (q, k, v)), **at, causal=True)
        elsewhere = linear_attention(q, k, v, **case.at(3 * x, dtype=torch.float64), causal=True)
    assert out.isfinite().all()
    close(out, expected, roundings=TOLERANCE if dtype == torch.float64 else 16)
    assert (name == "none") == torch.allclose(elsewhere, expected, rtol=0, atol=1e-4)


def test_unknown_options_get_the_close_name():
    with pytest.raises(TypeError, match="rope: unknown option 'bsae': did you mean base"):
        isopos.rope(8, 2, bsae=100.0)
    with pytest.raises(TypeError, match="lrpe-orthogonal: unknown option 'identty': did you mean identity"):
        schemes.lrpe_orthogonal(8, 2, identty=2)
    assert isopos.rope(8, 2, attention="softmax", scale=0.5).scale == 0.5, "what every scheme takes besides"


APART = [case for case in PRESETS if not isinstance(case.build().encoding, encodings.Encoding)]


@each("case", APART, ids=ids)
def test_what_maps_queries_and_keys_apart_says_so(case):
    encoding = case.build().encoding
    with pytest.raises(TypeError, match=f"query.* key.* since {type(encoding).__name__} maps them differently.* scheme.at"):
        encoding(sequence(3))


@each("kind", ["linear", "softmax"])
def test_cosformer_beyond_its_length_is_refused(kind):
    scheme = schemes.cosformer(HEAD_DIM, HEADS, length=16, attention=kind)
    for x in (sequence(16), sequence(16) - 15, sequence(16)[None] - torch.tensor([[[0]], [[9]]]).clamp_max(0)):
        scheme.at(x)
    for x in (sequence(17), sequence(17) - 8, sequence(2) + 15, -sequence(2) - 15):
        with pytest.raises(ValueError, match=r"offsets below 16, .* length=\d+"):
            scheme.at(x)
    with pytest.raises(ValueError, match=r"offsets below 16, .* got -8 to 8"):  # of queries and other keys
        scheme.at(sequence(9), -sequence(9))
    partial = schemes.compose(encodings.Partial(scheme.encoding, HEAD_DIM + 2), HEADS, {"attention": kind})
    with pytest.raises(ValueError, match=r"offsets below 16, .* got -8 to 8"):
        partial.at(sequence(9), -sequence(9))
    with pytest.raises(ValueError, match=r"got 16 to 16; .* length=17"):  # the 17th token of a stream
        scheme.at(torch.tensor([[16]]), state=isopos.State())
    assert scheme.at(sequence(0))["isometry"].length == 0


@each("axes", [2, 3])
def test_orders_of_a_grid_are_those_of_its_axes(axes):
    scheme = schemes.permuteformer_2d(24, 3, axes=axes)
    encoding, unit = scheme.encoding, torch.eye(24, dtype=torch.float64)[:, None, None]

    def turns(axis, steps):
        x = torch.zeros(1, axes, dtype=torch.int64)
        x[0, axis] = steps
        return encoding(x, torch.float64)(unit.expand(-1, 3, -1, -1))[..., 0, :]  # [d h d]

    origin = turns(0, 0)
    repeats = [
        next(n for n in range(1, 2000) if turns(axis, n)[:, h].equal(origin[:, h])) for h in range(3) for axis in range(axes)
    ]
    heads = [repeats[axes * h : axes * (h + 1)] for h in range(3)]
    assert encoding.orders == tuple(map(min, heads))
    assert encoding.common_order == encoding.order == min(math.lcm(*axis) for axis in zip(*heads, strict=True))


def test_axes_of_permutations_are_drawn_apart():
    one, other = (schemes.permuteformer_2d(16, 2, seed=seed).encoding.table[0] for seed in (0, 1))
    assert not any((one[1, h, 8:] - 8).equal(first[0, h, :8]) for h in range(2) for first in (one, other))
    with pytest.warns(UserWarning, match="positions are distinguished, fewer than the 50 of the longest sequence"):
        schemes.permuteformer_2d(8, 2, length=50)


def test_values_print_shapes():
    for case in PRESETS:
        at = case.build().at(ordered(case.group, t=300))
        assert max(map(len, repr(at).splitlines())) < 400
        for value in (at["isometry"], *at.get("terms", ())):
            assert "tensor(" not in repr(value)
            assert len(repr(value)) < 400
    assert repr(isopos.rope(8).encoding(sequence(3))) == "Rotation(table=float32 [1, 3, 4, 2], lifted=False)"


def test_states_and_reports_print_within_a_screen():
    scheme, content = isopos.deberta(16, 2), torch.randn(3, 1, 2, 100, 16)
    at = scheme.at(sequence(100), state=isopos.State())
    _, state = softmax_attention(*content, **at, causal=True, return_state=True)
    values = [state, at, isopos.laws.check(scheme)]
    for value in values:
        assert len(repr(value).splitlines()) <= 24
        assert max(map(len, repr(value).splitlines())) < 700
        assert "tensor(" not in repr(value)
    assert "keys: float32 [1, 2, 100, 16]" in repr(state)
    assert repr(values[-1]) == str(values[-1])


def test_dtypes_are_what_the_docstring_says():
    """Fixed: float64. Learned: float32, also cast to less, float64 after double(). Tables: float32 unless asked for."""
    scheme = isopos.lrpe_orthogonal(16, 2, decay="retnet")
    for cast, expected in (("float", "32"), ("bfloat16", "32"), ("half", "32"), ("double", "64")):
        getattr(scheme, cast)()
        at = scheme.at(sequence(40))
        assert {str(parameter.dtype) for parameter in scheme.parameters()} == {f"torch.float{expected}"}
        assert {x.dtype for x in (scheme.encoding.basis.parameter, scheme.decay.rate, at["decay"])} == {torch.float64}
        assert at["isometry"].second.table.dtype == torch.float32
    content = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
    exact, rounded = (
        isopos.linear_attention(*content, **scheme.at(sequence(40), dtype=dtype), causal=True)
        for dtype in (torch.float64, torch.float32)
    )
    assert exact.dtype == rounded.dtype == torch.float64
    assert 1e-10 < (exact - rounded).abs().max() < 1e-6


@every
def test_what_positions_learn_does_not_shrink(case):
    from isopos.models import Block

    scheme = case.build()
    block = Block(HEAD_DIM * HEADS, scheme)
    model = torch.nn.ModuleList([block, scheme, torch.nn.ModuleList([scheme])])
    decaying, others = isopos.parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    matrices = [module.weight for module in block.modules() if isinstance(module, torch.nn.Linear)]
    assert {id(p) for p in decaying["params"]} == set(map(id, matrices))
    both = [*decaying["params"], *others["params"]]
    assert len(both) == len(set(map(id, both))) == len(list(model.parameters()))
    torch.optim.AdamW([decaying, others])


@each("theta", ["a", "b"])
def test_a_complex_basis_of_real_vectors_is_equation_22_and_tells_direction(theta):
    scheme = schemes.lrpe_unitary(HEAD_DIM, HEADS, basis="dft", theta=theta, length=40, learned=False)
    x = sequence(9)
    q, k, _ = inputs(2, t=9)
    t = torch.arange(HEAD_DIM, dtype=torch.float64)
    angle = 10000 ** (-2 * t / HEAD_DIM) if theta == "a" else math.pi / 80 / HEAD_DIM * (t + 1)
    phase = torch.exp(1j * angle * x)
    a, b = (torch.fft.fft(z, norm="ortho") * phase for z in (q, k))
    rho = scheme.encoding(x, torch.float64)
    close(rho(q) @ rho(k).mT, (a.conj() @ b.mT).real)
    content, other = (torch.randn(HEAD_DIM, dtype=torch.float64).expand(1, HEADS, 9, -1) for _ in range(2))
    told = rho(content) @ rho(other).mT
    real = schemes.lrpe_unitary(HEAD_DIM, HEADS, basis="fourier", theta=theta).encoding(x, torch.float64)
    blind = real(content) @ real(other).mT
    assert (told[..., 0, 5] - told[..., 5, 0]).abs().min() > 1e-3
    close(blind, blind.mT)
    with pytest.raises(ValueError, match="basis: expected one of identity, householder, odd-even, fourier, got 'dft'"):
        schemes.lrpe_unitary(HEAD_DIM, HEADS, basis="dft", complex=True)
    with pytest.raises(ValueError, match="Spectrum, so projections of this size cannot contain it"):
        isopos.nn.absorb(schemes.lrpe_unitary(8, 2, basis="dft", attention="softmax"), torch.nn.Linear(16, 16))
