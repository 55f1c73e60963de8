"""Test `linear_attention` against its definition, and properties that it shares with `softmax_attention`."""

import pytest
import torch
from cases import (
    HEAD_DIM,
    HEADS,
    TOLERANCE,
    ascending,
    close,
    each,
    gradients,
    inputs,
    permutations,
    perturb,
    quadratic,
    same_everywhere,
    softmax_by_definition,
    with_edges,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import isopos
from isopos import feature_maps, schemes
from isopos.attention import explain, linear_attention, naive_linear_attention, softmax_attention
from isopos.bases import Householder
from isopos.decays import Decay
from isopos.encodings import InBasis, Permutation, Rotary, rope_frequencies
from isopos.feature_maps import FEATURE_MAPS, elu1
from isopos.ops.linear import Clamped, scan
from isopos.positions import sequence

RATES = torch.tensor([0.05, 0.4], dtype=torch.float64)
FREQUENCY = rope_frequencies(HEAD_DIM // 2, 50.0)
ENCODINGS = {
    "none": None,
    "rotary": lambda: Rotary(FREQUENCY[None, None]),
    "learned": lambda: perturb(Rotary(FREQUENCY.expand(HEADS, 1, -1), learned=True)),
    "lift": lambda: Rotary(rope_frequencies(HEAD_DIM)[None, None], lift=True),
    "permutation": lambda: Permutation(permutations()),
    "basis": lambda: perturb(InBasis(Permutation(permutations()), Householder(torch.ones(HEADS, HEAD_DIM), learned=True))),
}
causality = each("causal", [True, False], ids=["causal", "both-ways"])
both = pytest.mark.parametrize("attention", [linear_attention, softmax_attention], ids=["linear", "softmax"])
LOW = {torch.float16: 4, torch.bfloat16: 4}  # roundings


def rotary(t=None, x=None):
    return Rotary(FREQUENCY[None, None])(sequence(t) if x is None else x, torch.float64)


def decay(t=None, x=None):
    return Decay(RATES)(sequence(t) if x is None else x)


def definition_of(attention):
    return quadratic if attention is linear_attention else softmax_by_definition


def masks(t):
    """Masks: random, left padding, right padding, padding only, and a sample without padding."""
    place = torch.arange(t)
    return torch.stack((torch.rand(t) < 0.5, place >= t // 3, place < t // 3, place < 0, place >= 0))


# Against definitions


@causality
@each("decayed", [False, True], ids=["", "decay"])
@each("denominator", ["plain", "encoded", "complex", None])
@each("encoding", ENCODINGS)
def test_factorised_is_quadratic(monkeypatch, encoding, denominator, decayed, causal):
    """Groups have one chunk of eight tokens; the last chunk is shorter."""
    for name, size in {"CHUNK": 8, "GROUP": 1, "LEAST": 1, "MOST": 1}.items():
        monkeypatch.setattr(scan, name, size)
    t, encoding = 18, ENCODINGS[encoding]() if ENCODINGS[encoding] else None
    q, k, v = leaves = with_edges(*inputs(2, t=t, e=5, requires_grad=True))
    x = ascending(2, t)
    rate = RATES.clone().requires_grad_()
    arguments = {
        "isometry": encoding and encoding(x, torch.float64),
        "feature_map": elu1,
        "decay": -rate[:, None] * x[..., None, :, 0] if decayed else None,
        "denominator": denominator,
        "causal": causal,
    }
    learned = [rate, *(encoding.parameters() if encoding else ())]
    slack = 1000 if denominator in ("encoded", "complex") else 1  # such sums may almost vanish, and magnify what was rounded
    out, slow = linear_attention(q, k, v, **arguments), quadratic(q, k, v, **arguments)
    same_everywhere(out, slow, [*leaves, *learned], slack * TOLERANCE)


def test_without_positions_a_complex_denominator_divides_by_pairs():
    q, k, v = (x.exp() for x in inputs(1, t=5))
    close(linear_attention(q, k, v, denominator="complex"), quadratic(q, k, v, denominator="complex"))
    vanishing = linear_attention(q, torch.zeros_like(k), v, denominator="complex")
    assert (vanishing == 0).all()


@causality
@both
@each("t", [1, 2, 63, 64, 65, 200])
def test_awkward_lengths(attention, t, causal):
    leaves = with_edges(*inputs(2, t=t, requires_grad=True))
    arguments = {"isometry": rotary(t), "decay": decay(t), "causal": causal}
    arguments |= {"feature_map": elu1} if attention is linear_attention else {}
    same_everywhere(attention(*leaves, **arguments), definition_of(attention)(*leaves, **arguments), leaves)


@causality
@both
@each("decayed", [False, True], ids=["", "decay"])
@each("denominator", ["plain", "encoded"])
def test_masks(attention, denominator, decayed, causal):
    t = 70
    q, k, v = leaves = inputs(5, t=t, requires_grad=True)
    mask = masks(t)
    arguments = {"isometry": rotary(t), "decay": decay(t) if decayed else None, "mask": mask, "causal": causal}
    if attention is linear_attention:
        arguments |= {"feature_map": FEATURE_MAPS["relu"], "denominator": denominator}
    out = attention(q, k, v, **arguments)
    same_everywhere(out, definition_of(attention)(q, k, v, **arguments), leaves)
    assert (out[3] == 0).all(), "no keys, no output"
    unmasked = {**arguments, "mask": None}
    close(out[4:], attention(q[4:], k[4:], v[4:], **unmasked))
    if causal:
        assert (out[1, :, : t // 3] == 0).all()
    garbage = torch.where(mask[:, None, :, None], 0.0, torch.tensor(float("inf")))
    assert torch.equal(attention(q, k + garbage, v + garbage, **arguments), out)


@causality
@each("backend", [None, "eager"], ids=["", "compiled"])
def test_masked_tokens_may_have_any_positions(causal, backend):
    """Their log decays may increase: padding at position 0 on either side, and numbers at random within a sequence."""
    t = 70
    leaves, mask = inputs(5, t=t, requires_grad=True), masks(t)
    x = torch.where(mask, mask.cumsum(-1) - 1, torch.randint(-9, 200, (5, t)))
    x[1:3] *= mask[1:3]
    arguments = {"isometry": rotary(x=x[..., None]), "decay": decay(x=x[..., None]), "mask": mask, "causal": causal}
    attend = linear_attention if backend is None else torch.compile(linear_attention, backend=backend)
    kept = mask[:, None, :, None]
    out, definition = (function(*leaves, feature_map=elu1, **arguments) for function in (attend, quadratic))
    same_everywhere(torch.where(kept, out, 0), torch.where(kept, definition, 0), leaves)
    assert out.isfinite().all()
    if causal and backend is None:
        half, state, found = t // 2, None, []
        for part in (slice(half), slice(half, t)):
            places = torch.where(mask, x, 0)[:, part, None]
            arguments |= {"isometry": rotary(x=places), "decay": decay(x=places), "mask": mask[:, part], "state": state}
            tokens = (leaf[..., part, :] for leaf in leaves)
            y, state = linear_attention(*tokens, feature_map=elu1, return_state=True, **arguments)
            found.append(y)
        close(torch.where(kept, torch.cat(found, -2), 0), torch.where(kept, definition, 0))


@both
@each(("t", "s"), [(1, 7), (7, 1), (70, 130), (130, 70)])
@each("decayed", [False, True], ids=["", "decay"])
def test_causal_cross_attention_aligns_the_last_tokens(attention, decayed, t, s):
    leaves = with_edges(*inputs(2, t=t, s=s, e=3, requires_grad=True))
    x = sequence(max(t, s))
    x, y = x[max(t, s) - t :], x[max(t, s) - s :]
    arguments = {"isometry": (rotary(x=x), rotary(x=y)), "causal": True, "mask": torch.rand(2, s) < 0.8}
    arguments |= {"decay": (decay(x=x), decay(x=y))} if decayed else {}
    arguments |= {"feature_map": elu1} if attention is linear_attention else {}
    out = attention(*leaves, **arguments)
    same_everywhere(out, definition_of(attention)(*leaves, **arguments), leaves)
    assert out.shape == (2, HEADS, t, 3)
    assert (out[..., : max(t - s, 0), :] == 0).all()


@given(st.data())
def test_any_shape(data):
    draw = data.draw
    size = st.integers(1, 9)
    t, d, e, heads, batch = (draw(size) for _ in range(5))
    causal, decayed = draw(st.booleans()), draw(st.booleans())
    s = t if decayed and not causal else draw(size)
    x = sequence(max(t, s))
    x, y = x[max(t, s) - t :], x[max(t, s) - s :]
    rates = Decay(torch.rand(heads, dtype=torch.float64))
    encoding = Rotary(rope_frequencies(heads * d).view(heads, 1, d))
    leaves = inputs(batch, t=t, s=s, d=2 * d, e=e, heads=heads, requires_grad=True)
    arguments = {
        "isometry": (encoding(x, torch.float64), encoding(y, torch.float64)),
        "decay": (rates(x), rates(y)) if decayed else None,
        "mask": torch.rand(batch, s) < 0.7 if draw(st.booleans()) else None,
        "causal": causal,
    }
    same_everywhere(softmax_attention(*leaves, **arguments), softmax_by_definition(*leaves, **arguments), leaves)
    arguments |= {"denominator": draw(st.sampled_from(["plain", None])), "feature_map": elu1}
    same_everywhere(linear_attention(*leaves, **arguments), quadratic(*leaves, **arguments), leaves)


# Gradients


@causality
@both
@each("encoding", ["rotary", "learned"])
def test_gradcheck(attention, encoding, causal):
    t = 4
    rho = ENCODINGS[encoding]()(sequence(t), torch.float64)
    more = {"feature_map": elu1} if attention is linear_attention else {}

    def f(q, k, v, rate):
        g = -rate[:, None] * sequence(t)[:, 0]
        return attention(q, k, v, isometry=rho, decay=g, causal=causal, mask=torch.tensor([True, False, True, True]), **more)

    assert gradcheck(
        f, (*inputs(1, t=t, d=HEAD_DIM, e=2, requires_grad=True), RATES.clone().requires_grad_()), fast_mode=True
    )


@each("encoding", ["rotary", "learned"])
def test_second_derivatives_raise(encoding):
    leaves = inputs(1, t=4, requires_grad=True)
    out = linear_attention(*leaves, isometry=ENCODINGS[encoding]()(sequence(4), torch.float64), causal=True)
    with pytest.raises(RuntimeError, match="linear_attention: expected no create_graph=True"):
        torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)


def test_two_products_have_any_derivatives():
    leaves, bare = inputs(2, t=5, s=7, requires_grad=True), {"denominator": None}
    assert gradcheck(lambda *a: linear_attention(*a, **bare), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: linear_attention(*a, **bare), leaves, fast_mode=True)
    out = linear_attention(*leaves, **bare)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, leaves, several, is_grads_batched=True, retain_graph=True)
    for n, grad in enumerate(several):
        for a, b in zip(batched, torch.autograd.grad(out, leaves, grad, retain_graph=True), strict=True):
            close(a[n], b)


def test_autocast_does_not_reach_two_products():
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        leaves = inputs(2, t=70, dtype=torch.float32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = linear_attention(*leaves, denominator=None)
            found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(map(torch.equal, *found))


@causality
@each("denominator", ["plain", "encoded", "complex", None])
def test_the_naive_definition_is_linear_attention_with_more_derivatives(causal, denominator):
    leaves, mask = inputs(2, t=5, requires_grad=True), torch.rand(2, 5) < 0.7
    scheme = schemes.rope(HEAD_DIM, HEADS, decay="retnet")
    arguments = scheme.at(sequence(5), dtype=torch.float64) | {"denominator": denominator, "causal": causal, "mask": mask}
    out, slow = (f(*leaves, **arguments) for f in (linear_attention, naive_linear_attention))
    same_everywhere(out, slow, list(leaves))
    one = {name: value for name, value in arguments.items() if name != "mask"}
    assert torch.autograd.gradgradcheck(
        lambda q: naive_linear_attention(q, *leaves[1:], **one), leaves[0].detach().requires_grad_(), fast_mode=True
    )
    each = torch.func.vmap(torch.func.grad(lambda q, k, v: naive_linear_attention(q, k, v, **one).square().sum()))(*leaves)
    (whole,) = torch.autograd.grad(naive_linear_attention(*leaves, **one).square().sum(), leaves[0])
    close(each, whole)


@each("denominator", ["none", "plane"])
def test_the_naive_definition_refuses_other_denominators(denominator):
    with pytest.raises(ValueError, match="denominator: expected 'plain', 'encoded', 'complex' or None, got"):
        naive_linear_attention(*inputs(1, t=5), denominator=denominator)


@each("causal", [False, True])
def test_several_gradients_at_once_are_refused(causal):
    q, k, v = inputs(2, t=5, dtype=torch.float32, requires_grad=True)
    for _ in range(2):  # the second call runs a plan
        out = linear_attention(q, k, v, causal=causal)
        with pytest.raises(RuntimeError, match=r"expected one gradient, got several .*naive_linear_attention"):
            torch.autograd.grad(out, (q, k, v), torch.randn(3, *out.shape), is_grads_batched=True)


def test_transforms_of_torch_func_are_refused():
    q, k, v = inputs(1, t=5)
    with pytest.raises(RuntimeError, match=r"torch.func, got one; .*naive_linear_attention"):
        torch.func.grad(lambda q: linear_attention(q, k, v, causal=True).sum())(q)


# Independence


@causality
@both
def test_layouts_and_leading_axes(attention, causal):
    t = 70
    arguments = {"isometry": rotary(t), "decay": decay(t), "causal": causal}
    q, k, v = inputs(2, t=t)
    expected = attention(q, k, v, **arguments)
    views = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (q, k, v)]
    close(attention(*views, **arguments), expected)
    close(attention(*(x[0] for x in (q, k, v)), **arguments), expected[0])
    deep = [x[:, None].expand(2, 3, HEADS, t, HEAD_DIM) for x in (q, k, v)]
    close(attention(*deep, **arguments), expected[:, None].expand(2, 3, HEADS, t, HEAD_DIM))
    close(attention(q, k[:1], v[:1], **arguments), attention(q, k[:1].expand_as(k), v[:1].expand_as(v), **arguments))


@both
@each("cut", [1, 50, 64, 69])
def test_causality_bit_for_bit(attention, cut):
    t = 70
    leaves = inputs(2, t=t, requires_grad=True)
    arguments = {"isometry": rotary(t), "decay": decay(t), "causal": True}
    arguments |= {"feature_map": elu1} if attention is linear_attention else {}
    before = attention(*leaves, **arguments)
    later = [torch.where(torch.arange(t)[:, None] < cut, x, torch.randn_like(x)) for x in leaves]
    assert torch.equal(attention(*later, **arguments)[..., :cut, :], before[..., :cut, :])
    assert not torch.equal(attention(*later, **arguments), before)
    for grad in torch.autograd.grad(before[..., :cut, :].square().sum(), leaves):
        assert (grad[..., cut:, :] == 0).all()


# Range


@causality
@each("rate", [8.0, 0.5, 1e-6, 0.0])
@each("dtype", [torch.float32, torch.float16])
def test_long_sequences_with_any_decay(dtype, rate, causal):
    t = 16384 + 3
    q, k, v = inputs(t=t, d=4, e=2, heads=1, dtype=dtype, requires_grad=True)
    x = sequence(t)
    arguments = {
        "isometry": Rotary(rope_frequencies(2)[None, None])(x),
        "decay": Decay(torch.tensor([rate]))(x),
        "feature_map": elu1,
        "causal": causal,
    }
    out = linear_attention(q, k, v, **arguments)
    assert all(grad.isfinite().all() for grad in (out, *gradients(out, [q, k, v])))
    ones = linear_attention(q, k, torch.ones_like(v), **(arguments | {"isometry": None}))
    close(ones, torch.ones_like(ones), dtype=torch.float32 if dtype == torch.float32 else dtype, roundings=100)
    if rate == 8.0:  # nothing is seen beyond a few neighbours
        near = [a[:, -20:].double() for a in (q, k, v)]
        last = {"isometry": rotary_of(x[-20:]), "decay": Decay(torch.tensor([rate]))(x[-20:])}
        close(out[:, -10:].double(), quadratic(*near, **(arguments | last))[:, -10:], dtype=dtype, roundings=100)


def rotary_of(x):
    return Rotary(rope_frequencies(2)[None, None])(x, torch.float64)


@each("rate", [1e-6, 8.0])
def test_denominators_have_the_right_sign_where_features_are_positive(rate):
    t = 16384
    q, k, _ = inputs(t=t, d=8, heads=2)
    ones = torch.ones(2, t, 1, dtype=torch.float64)
    g = Decay(torch.full((2,), rate))(sequence(t))
    rho = Permutation(permutations())(sequence(t), torch.float64)
    for isometry in (None, rho):
        weights = linear_attention(q, k, ones, isometry=isometry, feature_map=elu1, decay=g, denominator=None, causal=True)
        assert (weights > 0).all()
        assert weights.isfinite().all()


@causality
@both
@each("dtype", LOW)
def test_low_precision_inputs(attention, dtype, causal):
    t = 130
    q, k, v = leaves = inputs(2, t=t, dtype=dtype, requires_grad=True)
    arguments = {"isometry": rotary(t), "decay": decay(t), "causal": causal}
    arguments |= {"feature_map": elu1} if attention is linear_attention else {}
    out = attention(q, k, v, **arguments)
    assert out.dtype == dtype
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = attention(*wide, **arguments)
    close(out, exact, roundings=LOW[dtype])
    for grad, expected in zip(gradients(out, list(leaves)), gradients(exact, wide), strict=True):
        assert grad.dtype == dtype
        close(grad, expected, roundings=8)


def autocast_results(encoding, causal, *, forward, backward):
    """Output and gradients with autocast in the forward pass or in the backward pass."""
    torch.manual_seed(0)
    encoding = ENCODINGS[encoding]() if ENCODINGS[encoding] else None
    leaves = inputs(2, t=70, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        rho = encoding and encoding(sequence(70))
        out = linear_attention(*leaves, isometry=rho, feature_map=elu1, decay=decay(70), causal=causal)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@causality
@each("encoding", ENCODINGS)
def test_autocast_does_not_reach_linear_attention(encoding, causal):
    expected = autocast_results(encoding, causal, forward=False, backward=False)
    assert all(map(torch.equal, autocast_results(encoding, causal, forward=True, backward=False), expected))


@causality
@each("encoding", ["rotary", "permutation", "learned"])
def test_autocast_does_not_reach_the_backward_pass(encoding, causal):
    expected = autocast_results(encoding, causal, forward=False, backward=False)
    assert all(map(torch.equal, autocast_results(encoding, causal, forward=True, backward=True), expected))


# Corners


@each("shape", [(0, 2, 4), (2, 2, 0)], ids=str)
def test_a_gradient_of_nothing_is_zero(shape):
    """Parameters of each process need a gradient, whatever its share of samples."""
    scheme = isopos.rope(HEAD_DIM, 2, learned=True)
    q = torch.randn(*shape, HEAD_DIM, requires_grad=True)
    out = linear_attention(q, q, q, **scheme.at(sequence(shape[-1])), causal=True)
    for grad in torch.autograd.grad(out.sum(), [q, *scheme.parameters()]):
        assert (grad == 0).all()


def test_a_feature_map_may_return_more_features_which_the_isometry_maps():
    (q, k, v), x, phi = inputs(2, t=9, dtype=torch.float32), sequence(9), feature_maps.Favor(HEAD_DIM, 2 * HEAD_DIM)
    rho = isopos.rope(2 * HEAD_DIM, HEADS).encoding(x)
    out = linear_attention(q, k, v, feature_map=phi, isometry=rho, causal=True)
    expected = quadratic(q.double(), k.double(), v.double(), feature_map=phi.double(), isometry=rho, causal=True)
    close(out, expected, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"isometry: expected one of {2 * HEAD_DIM} features, as many as the feature map"):
        linear_attention(q, k, v, feature_map=phi, isometry=isopos.rope(HEAD_DIM, HEADS).encoding(x), causal=True)


def test_an_explanation_has_the_arguments_of_linear_attention():
    q, k, v = inputs(1, t=5)
    with pytest.raises(TypeError, match=r"linear_attention\(\) got an unexpected keyword argument 'windw'"):
        explain(q, k, v, windw=3)
    assert explain(q, k, v, **isopos.path(HEAD_DIM, HEADS).at(sequence(5)), causal=True).backend == "householder"


def test_plain_denominator_of_one_sided_isometries():
    q, k, v = inputs(2, t=6)
    for isometry in ((rotary(6), None), (None, rotary(6))):
        close(
            linear_attention(q, k, v, isometry=isometry, feature_map=elu1),
            quadratic(q, k, v, isometry=isometry, feature_map=elu1),
        )


def test_decays_of_a_pair_broadcast():
    q, k, v = inputs(2, t=3, s=6)
    x = sequence(6)
    shared, own = (decay(x=x[3:]), decay(x=x)), (decay(x=x[3:]), decay(x=x.expand(2, 6, 1)))
    close(linear_attention(q, k, v, decay=own, causal=True), linear_attention(q, k, v, decay=shared, causal=True))


OTHER_HEADS = {"q of one head": 1, "q of three heads": 3}


@both
@each("heads", OTHER_HEADS.values(), ids=OTHER_HEADS)
def test_isometries_of_other_heads_are_refused(attention, heads):
    rho = Rotary(FREQUENCY.expand(2, 1, -1))(sequence(6))
    with pytest.raises(ValueError, match="heads"):
        attention(*inputs(2, t=6, heads=heads), isometry=rho)


# Arguments


def call(attention=linear_attention, **changes):
    q, k, v = inputs(2, t=4)
    return attention(**({"q": q, "k": k, "v": v} | changes))


def wide(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


BAD = [
    ({"q": wide(4, 8)}, r"q: expected a floating tensor \[\*b h t d\]"),
    ({"q": wide(2, 2, 4, 8).long()}, "q: expected a floating tensor"),
    ({"k": wide(2, 2, 4, 8).float()}, "k: expected torch.float64 as q, got torch.float32"),
    ({"v": wide(2, 2, 4, 8).to("meta")}, "v: expected a tensor on cpu as q, got one on meta"),
    ({"k": wide(2, 2, 4, 6)}, "k: expected 8 features as q, got 6"),
    ({"v": wide(2, 2, 5, 8)}, "v: expected 4 tokens as k, got 5"),
    ({"v": wide(3, 2, 4, 8)}, "leading dimensions .* broadcast"),
    ({"k": wide(2, 3, 4, 8), "v": wide(2, 3, 4, 8)}, "leading dimensions .* broadcast"),
    ({"mask": torch.ones(2, 4)}, "mask: expected bool"),
    ({"mask": torch.ones(2, 5, dtype=torch.bool)}, r"mask: expected bool \[\*b 4\]"),
    ({"mask": torch.tensor(True)}, "mask: expected bool"),
    ({"mask": torch.ones(3, 4, dtype=torch.bool)}, r"mask: expected leading dimensions that broadcast to \[2\]"),
    ({"mask": torch.ones(2, 2, 4, dtype=torch.bool)}, "mask: expected leading dimensions"),
    ({"decay": wide(2, 4).float()}, "decay: expected float64"),
    ({"decay": wide(2, 5)}, r"decay: expected \[2, 2, 4\]"),
    ({"decay": wide(3, 4)}, r"decay: expected \[2, 2, 4\]"),
    ({"decay": wide(1, 2, 2, 4)}, r"decay: expected \[2, 2, 4\]"),
    ({"decay": (wide(2, 4), wide(2, 3))}, "decay: expected .* of the keys"),
    ({"decay": (wide(2, 4),) * 3}, "decay: expected one, or a pair"),
    ({"isometry": (rotary(4),) * 3}, "isometry: expected one, or a pair of queries' and keys', got 3"),
    ({"isometry": rotary(5)}, "q: expected 5 tokens, one per position, got 4"),
    ({"isometry": (rotary(4), rotary(5))}, "k: expected 5 tokens, one per position, got 4"),
    ({"isometry": Rotary(rope_frequencies(3)[None, None])(sequence(4))}, "q: expected 6 features, got 8"),
]


@both
@each(("changes", "message"), BAD)
def test_bad_calls(attention, changes, message):
    with pytest.raises(ValueError, match=message):
        call(attention, **changes)


@each(
    ("changes", "message"),
    [
        ({"denominator": "none"}, "denominator: expected 'plain', 'encoded', 'complex' or None, got 'none'"),
        (
            {"q": wide(2, 2, 4, 7), "k": wide(2, 2, 4, 7), "denominator": "complex"},
            "denominator: expected an even number of features",
        ),
        ({"q": wide(2, 2, 3, 8), "decay": (wide(2, 3), wide(2, 4))}, "as many queries as keys, got 3 and 4"),
    ],
)
def test_bad_calls_of_linear_attention(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(scale=1.0)


def test_log_decays_that_increase_are_refused():
    q, k, v = inputs(2, t=4)
    g = torch.tensor([0.0, -1.0, -0.5, -2.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="do not increase"):
        linear_attention(q, k, v, decay=g)
    assert softmax_attention(q, k, v, decay=g).isfinite().all()


def test_queries_beyond_the_next_key_are_refused_both_ways():
    """Up to the next key a query's weights shrink with distance in both directions; beyond it they would grow."""
    q, k, v = inputs(2, t=4)
    keys = torch.tensor([0.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    for late in (0.5, 1.0):
        linear_attention(q, k, v, decay=(keys - late, keys))
    with pytest.raises(ValueError, match="decay: expected queries between the keys of their index and the next"):
        linear_attention(q, k, v, decay=(keys - 1.5, keys))
    linear_attention(q, k, v, decay=(keys - 1.5, keys), causal=True)


@each("name", ["fourier", "exponential"])
def test_autocast_does_not_reach_a_basis(name):
    from isopos.bases import Fourier
    from isopos.encodings import Exponential, InBasis

    encoding = (
        InBasis(Rotary(FREQUENCY[None, None]), Fourier(HEAD_DIM))
        if name == "fourier"
        else Exponential(torch.randn(HEADS, HEAD_DIM, HEAD_DIM))
    )
    rho, x = encoding(sequence(5)), torch.randn(1, HEADS, 5, HEAD_DIM)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rho(x), encoding(sequence(5))(x))
        inside = rho(x)
    assert torch.equal(inside, rho(x))


@causality
@each("denominator", ["plain", None])
@each("fewer", [0, 3])
def test_packed_queries_and_keys_may_decay_apart(causal, fewer, denominator):
    """The offset of a query's log decay to its key's is the same in every segment."""
    if fewer and not causal:
        pytest.skip("without causal, a decay needs as many queries as keys")
    s, ids = 9, torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    q, k, v = inputs(2, t=s - fewer, s=s)
    keys = -torch.rand(2, HEADS, s, dtype=torch.float64).cumsum(-1)
    later = torch.cat((keys[..., 1:], keys[..., -1:] - 1), -1)
    queries = (keys + torch.rand(2, HEADS, s, dtype=torch.float64) * (later - keys))[..., fewer:]
    options = {"decay": (queries, keys), "segment_ids": ids, "causal": causal, "feature_map": elu1}
    options["denominator"] = denominator  # one would cancel what is wrong with a query's own factor
    close(linear_attention(q, k, v, **options), quadratic(q, k, v, **options))


# Layouts


@both
@each(("heads", "own"), [(4, 4), (4, 2), (6, 1)])
@each("t", [4, 7])
def test_tokens_before_heads(attention, heads, own, t):
    q, k, v = inputs(2, t=t, heads=heads)[0], *inputs(2, t=t, heads=own)[1:]
    options = {"isometry": rotary(t), "causal": True, "mask": torch.rand(2, t) < 0.8}
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    expected = attention(q, k, v, **options).transpose(1, 2)
    assert torch.equal(attention(*swapped, **options, layout="bthd"), expected)
    y, state = attention(*(x[:, :-1] for x in swapped), causal=True, layout="bthd", return_state=True)
    z, _ = attention(*(x[:, -1:] for x in swapped), causal=True, layout="bthd", state=state, return_state=True)
    close(torch.cat((y, z), 1), attention(q, k, v, causal=True).transpose(1, 2))


@both
def test_a_layout_that_was_not_stated(attention):
    q, k, v = (x.transpose(1, 2) for x in inputs(2, t=7))
    with pytest.raises(
        ValueError, match=r"q: expected 7 tokens, .*; \[b t h d\] needs q\.transpose\(1, 2\), or layout='bthd'"
    ):
        attention(q, k, v, isometry=rotary(7))
    with pytest.raises(ValueError, match=r"decay: .*; \[b t h d\] needs layout='bthd'"):
        attention(q, k, v, decay=decay(7))
    with pytest.raises(ValueError, match=r"x: expected 7 tokens, .*; \[b t h d\] needs x\.transpose\(1, 2\)"):
        rotary(7)(q)
    with pytest.raises(ValueError, match="layout: expected one of bhtd, bthd, got 'bhdt'"):
        attention(q, k, v, layout="bhdt")


# Schemes of the other kind


@both
def test_a_scheme_of_the_other_attention(attention):
    kind, other = ("linear", "softmax") if attention is linear_attention else ("softmax", "linear")
    name = {"linear": "scale", "softmax": "feature_map"}[kind]
    q, k, v = inputs(2, t=4)
    at = schemes.rope(HEAD_DIM, HEADS, attention=other).at(sequence(4))
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; build the scheme with attention='{kind}'$"):
        attention(q, k, v, **at)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'casual'$"):
        attention(q, k, v, casual=True)


@each("causal", [True, False])
@each("bad", [0, 1, 2])
@each("number", [torch.nan, torch.inf])
@each(
    ("scheme", "options"),
    [
        (schemes.rope(4, 2), {}),
        (schemes.rope(4, 2), {"window": 3}),
        (schemes.rope(4, 2, denominator="complex"), {}),
        (schemes.horn_clipped(4, 2), {}),
    ],
)
def test_gradients_of_other_rows_are_finite(causal, bad, number, scheme, options):
    """Also where sums are divided after they are contained. Only a token's own gradient may not be finite."""
    ids = torch.arange(12) // 4
    given = inputs(1, t=12, heads=2, d=4, e=4)
    given[bad][0, 0, 5] = number
    given = [x.requires_grad_() for x in given]
    y = scheme(*given, sequence(12), causal=causal, segment_ids=ids, **options)
    kept = y.isfinite().all(-1)
    assert kept[0, 0, :4].all()
    assert not kept[0, 0, 5]
    for n, grad in enumerate(torch.autograd.grad(y[kept].sum(), given)):
        others = torch.arange(12) != 5 if n == bad else slice(None)
        assert grad[..., others, :].isfinite().all()


def test_complex_denominators_are_counted_and_none_twice():
    scheme = schemes.rope(4, 2, denominator="complex", feature_map="identity")
    q, k, v = inputs(1, t=6, heads=2, d=4, e=4)
    for zero, bad in ((True, False), (False, True)):
        given = q, 0 * k if zero else k, v.index_fill(-2, torch.tensor(3), torch.nan) if bad else v
        for built, per_row in ((scheme, 12), (schemes.rope(4, 2), 12)):
            with Clamped() as clamped:
                built(*given, sequence(6), causal=True)
            assert clamped.total == per_row
            if zero and built is scheme:
                assert clamped.count == per_row


def test_an_infinite_decay_is_refused():
    """Weights of tokens at it would be NaN, exp(-inf + inf)."""
    q, k, v = inputs(1, t=4)
    decay = torch.tensor([0.0, -1, -torch.inf, -torch.inf], dtype=torch.float64).expand(HEADS, 4)
    for causal in (True, False):
        with pytest.raises(ValueError, match="decay: expected finite log decays, got -inf; a mask or segment_ids"):
            linear_attention(q, k, v, decay=decay, causal=causal)
