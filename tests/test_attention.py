"""Test the attention module: projections and a scheme."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from cases import (
    HEAD_DIM,
    HEADS,
    TOLERANCE,
    close,
    each,
    inputs,
    normals,
    perturb,
    quadratic,
    softmax_by_definition,
)
from structures import over_covering
from torch import nn

import isopos
from isopos import Attention, bases, encodings, schemes
from isopos.attention import softmax_attention
from isopos.encodings import rope_frequencies
from isopos.nn import absorb, convert_layout
from isopos.positions import sequence
from isopos.schemes import compose

WIDTH = HEAD_DIM * HEADS
DEFINITIONS = {"linear": quadratic, "softmax": softmax_by_definition}
causality = each("causal", [True, False], ids=["causal", "both-ways"])
every = over_covering()


def made(case, kind=None):
    scheme = perturb(case.build(attention=kind or case.kinds[0]))
    return scheme, Attention(WIDTH, scheme).double()


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def embedded(scheme, x, at):
    return x if scheme.embedding is None else x + 5 * scheme.embedding(at, torch.float64)


@every
def test_it_is_projections_around_attention(case, kind):
    (scheme, layer), x, at = made(case, kind), tokens(2, 9), case.positions(2, t=9)
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    assert q.shape == k.shape == (2, HEADS, 9, HEAD_DIM * scheme.width)
    y = DEFINITIONS[kind](q, k, v, **scheme.at(at, dtype=torch.float64), causal=True)
    y = F.layer_norm(y, (HEAD_DIM,)) if scheme.choices["denominator"] == "none" else y
    expected = layer.out(y.transpose(1, 2).reshape(2, 9, WIDTH))
    close(layer(x, scheme.at(at, dtype=torch.float64), causal=True), expected, roundings=1000 * TOLERANCE)


@over_covering(lambda case, kind: case.both_ways)
def test_cross_attention_to_a_context_with_padding(case, kind):
    (scheme, layer), x, context = made(case, kind), tokens(2, 4), tokens(2, 9)
    if scheme.decay is not None:
        scheme, layer = made(case._replace(options={**case.options, "decay": "none"}), kind)
    x_at, y_at = case.group.random(4), case.positions(t=9)
    at = scheme.at(x_at, y_at, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    y = layer(x, at, context=context, mask=mask)
    assert y.shape == x.shape
    changed = torch.where(mask[..., None], context, torch.randn_like(context))
    close(layer(x, at, context=changed, mask=mask), y)
    assert not torch.allclose(layer(x, at, context=changed), layer(x, at, context=context))


def test_a_scheme_is_shared_not_owned():
    scheme = schemes.rope(HEAD_DIM, HEADS, learned=True)
    layer = Attention(WIDTH, scheme)
    assert {name.partition(".")[0] for name in layer.state_dict()} == {"query", "key", "value", "out"}
    x, at = torch.randn(2, 9, WIDTH), scheme.at(sequence(9))
    assert torch.equal(copy.deepcopy(layer)(x, at), layer(x, at))


@each("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers(dtype):
    scheme = schemes.rope(HEAD_DIM, HEADS, decay="retnet")
    layer, x = Attention(WIDTH, scheme).to(dtype), torch.randn(2, 9, WIDTH).to(dtype)
    y = layer(x, scheme.at(sequence(9)), causal=True)
    assert y.dtype == dtype
    close(y, layer.double()(x.double(), scheme.at(sequence(9)), causal=True), roundings=8)


# Wider projections


def test_wider_queries_and_keys():
    scheme, x = schemes.permuteformer(HEAD_DIM, HEADS, width=4), torch.randn(2, 9, WIDTH)
    layer = Attention(WIDTH, scheme)
    assert layer.query.out_features == layer.key.out_features == 4 * WIDTH
    assert layer.value.out_features == layer.out.out_features == WIDTH
    assert scheme.encoding.features == 4 * HEAD_DIM
    assert layer(x, scheme.at(sequence(9)), causal=True).shape == x.shape


# Absorbed bases


def in_basis(make, **choices):
    rotary = encodings.Rotary(rope_frequencies(HEAD_DIM // 2, 50.0)[None, None])
    return compose(encodings.InBasis(rotary, make()), HEADS, {"attention": "softmax"} | choices)


ABSORBED = {
    "exponential": lambda: schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax"),
    "householder": lambda: in_basis(lambda: bases.Householder(normals())),
    "householder-learned": lambda: in_basis(lambda: bases.Householder(normals(), learned=True)),
    "odd-even": lambda: in_basis(lambda: bases.OddEven(HEAD_DIM)),
    "fourier": lambda: in_basis(lambda: bases.Fourier(HEAD_DIM)),
    "pairs": lambda: in_basis(lambda: bases.Pairs(bases.OddEven(HEAD_DIM // 2))),
    "ring": lambda: schemes.ape_ring(HEAD_DIM, HEADS, attention="softmax"),
    "identity-map": lambda: in_basis(
        lambda: bases.Fourier(HEAD_DIM), attention="linear", feature_map="identity", denominator="none"
    ),
}


@each("make", ABSORBED.values(), ids=ABSORBED)
def test_absorbing_a_basis_keeps_what_a_layer_computes(make):
    scheme = perturb(make())
    layer, x = Attention(WIDTH, scheme).double(), tokens(2, 9)
    at = torch.randint(-50, 50, (2, 9, 1)).cumsum(1)
    before = layer(x, scheme.at(at, dtype=torch.float64))
    weight, kept = layer.query.weight.detach().clone(), copy.deepcopy(scheme)
    fingerprint = scheme.fingerprint
    absorbed = absorb(scheme, layer.query, layer.key)
    assert absorbed.fingerprint != fingerprint == scheme.fingerprint
    close(layer(x, absorbed.at(at, dtype=torch.float64)), before, dtype=torch.float32, roundings=8)
    assert not torch.allclose(layer.query.weight, weight)
    assert isinstance(absorbed.encoding, encodings.Rotary)
    assert absorbed.choices == scheme.choices
    assert type(scheme.encoding) is type(kept.encoding), "the scheme itself is left alone"


def test_a_basis_that_cannot_be_absorbed_changes_nothing():
    encoding, layer = schemes.ape_sequence(HEAD_DIM, HEADS).encoding, torch.nn.Linear(WIDTH, WIDTH)
    transported = schemes.Scheme(encoding, HEADS, attention="softmax", transport=True)
    weight = layer.weight.clone()
    with pytest.raises(ValueError, match="scheme: expected no transport, whose values would need the same basis"):
        absorb(transported, layer)
    with pytest.raises(ValueError, match="projections: expected weights, got a layer on the meta device"):
        absorb(
            schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax"), layer, torch.nn.Linear(WIDTH, WIDTH, device="meta")
        )
    assert torch.equal(layer.weight, weight)


def test_a_stream_has_no_context_and_returns_no_state():
    scheme, x = schemes.rope(HEAD_DIM, HEADS), torch.randn(1, 5, WIDTH)
    layer = Attention(WIDTH, scheme)
    close(layer(x, isopos.Stream(scheme)), layer(x, scheme.at(sequence(5)), causal=True))
    for name, value in (("context", x), ("return_state", True)):
        with pytest.raises(ValueError, match=f"{name}: expected none with a Stream"):
            layer(x, isopos.Stream(scheme), **{name: value})


@each(("own", "other"), [({}, {"denominator": "none"}), ({"denominator": "none"}, {}), ({"attention": "softmax"}, {})])
def test_a_stream_is_one_of_the_layers_scheme(own, other):
    layer, x = Attention(WIDTH, schemes.rope(HEAD_DIM, HEADS, **own)), torch.randn(1, 5, WIDTH)
    with pytest.raises(ValueError, match=r"at: expected a Stream of this layer's scheme, .* denominator, got one of"):
        layer(x, isopos.Stream(schemes.rope(HEAD_DIM, HEADS, **other)))


@each(
    "call",
    [
        lambda part: Attention(WIDTH, part),
        lambda part: isopos.Stream(part),
        lambda part: absorb(part, torch.nn.Linear(WIDTH, WIDTH)),
    ],
)
def test_an_encoding_is_no_scheme(call):
    with pytest.raises(TypeError, match=r"scheme: expected a Scheme, such as isopos.rope\(head_dim, heads\), got Rotary"):
        call(schemes.rope(HEAD_DIM, HEADS).encoding)


@each("wrong", [None, "a", 1.0, -0.1, math.nan])
def test_dropout_is_a_probability(wrong):
    scheme = schemes.rope(HEAD_DIM, HEADS, attention="softmax")
    for call in (lambda: Attention(WIDTH, scheme, dropout=wrong), lambda: softmax_attention(*inputs(1, t=3), dropout=wrong)):
        with pytest.raises(ValueError, match=f"dropout: expected a probability below 1, got {wrong!r}"):
            call()


def test_ape_with_softmax_is_rope_with_learned_angles_once_absorbed():
    """Algebraic Positional Encodings, Appendix A: both compute the same function and the same class of functions."""
    ape = perturb(schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax"), 1.0)
    layer, x, at = Attention(WIDTH, ape).double(), tokens(2, 9), 3 * sequence(9) - 5
    before = layer(x, ape.at(at, dtype=torch.float64), causal=True)
    absorb(ape, layer.query, layer.key)
    rope = schemes.rope(HEAD_DIM, HEADS, learned=True, attention="softmax").double()
    with torch.no_grad():
        rope.encoding.frequency.copy_(ape.encoding.frequency()[:, None])
    close(layer(x, rope.at(at, dtype=torch.float64), causal=True), before)


def test_several_layers_absorb_one_basis():
    scheme = perturb(schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax"))
    layers = [Attention(WIDTH, scheme).double() for _ in range(2)]
    x, at = tokens(2, 9), sequence(9)
    before = [layer(x, scheme.at(at, dtype=torch.float64)) for layer in layers]
    absorbed = absorb(scheme, *(p for layer in layers for p in (layer.query, layer.key)))
    for layer, y in zip(layers, before, strict=True):
        close(layer(x, absorbed.at(at, dtype=torch.float64)), y, dtype=torch.float32, roundings=8)


def test_absorbed_angles_keep_dtype_and_modes():
    for change in (lambda scheme: scheme.double(), lambda scheme: scheme.requires_grad_(False).eval()):
        scheme = change(perturb(schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax")))
        layer, x, at = Attention(WIDTH, scheme).double(), tokens(2, 9), 10_000 * sequence(9)
        before, generator = layer(x, scheme.at(at, dtype=torch.float64)), scheme.encoding.parameter
        absorbed = absorb(scheme, layer.query, layer.key).encoding
        angles = absorbed.parameter
        assert (angles.dtype, angles.requires_grad) == (generator.dtype, generator.requires_grad)
        assert absorbed.training is scheme.training
        if angles.dtype == torch.float64:
            close(layer(x, {**scheme.at(at), "isometry": absorbed(at, torch.float64)}), before, roundings=1e4)
    tied = [nn.Linear(WIDTH, WIDTH) for _ in "qk"]
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="projections: expected each layer's weight once, got one twice"):
        absorb(schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax"), *tied)


@each(
    ("make", "message"),
    [
        (lambda: schemes.ape_sequence(HEAD_DIM, HEADS), r"scheme: expected softmax attention or the identity feature map"),
        (lambda: schemes.rope(HEAD_DIM, HEADS, attention="softmax"), r"expected an encoding with a basis .*, got Rotary"),
        (
            lambda: schemes.ape_tree(HEAD_DIM, HEADS, attention="softmax"),
            r"an encoding with a basis .*, got TreePath",
        ),
        (lambda: schemes.ape_sequence(HEAD_DIM, 1, attention="softmax"), "projections: expected 8 outputs, 1 heads, got 16"),
    ],
)
def test_what_cannot_be_absorbed_is_left_untouched(make, message):
    layer = nn.Linear(WIDTH, WIDTH)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=message):
        absorb(make(), layer)
    assert all(map(torch.equal, layer.state_dict().values(), before.values()))


def test_a_projection_that_does_not_fit_leaves_the_others_untouched():
    layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH + 2)
    before = layers[0].weight.detach().clone()
    with pytest.raises(ValueError, match="projections: expected 16 outputs"):
        absorb(schemes.ape_sequence(HEAD_DIM, HEADS, attention="softmax"), *layers)
    assert torch.equal(layers[0].weight, before)


# Layouts


@each("rotary_dim", [None, 4])
def test_converted_weights_give_the_same_scores_in_the_other_layout(rotary_dim):
    x, at = torch.randn(1, 9, WIDTH, dtype=torch.float64), 3 * sequence(9)
    weights = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64)
    v = inputs(1, t=9)[2]

    def attend(layout, q, k):
        scheme = schemes.rope(HEAD_DIM, HEADS, layout=layout, rotary_dim=rotary_dim, attention="softmax")
        heads = ((x @ w.mT).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (q, k))
        return softmax_attention(*heads, v, **scheme.at(at, dtype=torch.float64))

    expected = attend("interleaved", *weights)
    half = [convert_layout(w, HEADS, to="half", rotary_dim=rotary_dim) for w in weights]
    close(attend("half", *half), expected)
    assert not torch.allclose(attend("half", *weights), expected)
    for w, converted in zip(weights, half, strict=True):
        assert torch.equal(convert_layout(converted, HEADS, to="interleaved", rotary_dim=rotary_dim), w)
        bias = convert_layout(w[:, 0], HEADS, to="half", rotary_dim=rotary_dim)
        assert torch.equal(bias, converted[:, 0])


def test_half_puts_the_first_of_each_pair_first():
    assert convert_layout(torch.arange(8), 2, to="half").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert convert_layout(torch.arange(12), 2, to="half", rotary_dim=4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@each(
    ("call", "message"),
    [
        (lambda: Attention(WIDTH + 1, schemes.rope(HEAD_DIM, HEADS)), "a multiple of the 2 heads, got 17"),
        (
            lambda: Attention(2 * WIDTH, schemes.rope(HEAD_DIM, HEADS)),
            "model_dim: expected 16, 2 heads of 8 features, got 32; or build the scheme for 4 heads",
        ),
        (
            lambda: Attention(4 * WIDTH, schemes.permuteformer(HEAD_DIM, HEADS, width=4)),
            "model_dim: expected 16, 2 heads of 8 features, got 64",
        ),
        (lambda: convert_layout(torch.zeros(6), 4, to="half"), "heads: expected a divisor of the 6 rows, got 4"),
        (lambda: convert_layout(torch.zeros(6), 0, to="half"), "heads: expected a divisor"),
        (lambda: convert_layout(torch.zeros(6), 1, to="llama"), "to: expected interleaved or half, got 'llama'"),
        (lambda: convert_layout(torch.zeros(6), 2, to="half"), "expected an even number"),
        (lambda: convert_layout(torch.zeros(8), 2, to="half", rotary_dim=6), "rotary_dim: expected an even number up to 4"),
        (lambda: convert_layout(torch.zeros(8), 2, to="half", rotary_dim=0), "rotary_dim: expected an even number up to 4"),
        (lambda: convert_layout(torch.zeros(8), 2, to="half", rotary_dim=3), "expected an even number"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each("name", ["ape-sequence", "rotary", "fixed"])
def test_absorbed_angles_learn_where_they_did(name):
    learned = name != "fixed"
    scheme = schemes.compose(
        encodings.InBasis(encodings.Rotary(torch.rand(HEADS, 1, HEAD_DIM // 2), learned=learned), bases.Fourier(HEAD_DIM))
        if name != "ape-sequence"
        else encodings.Exponential(torch.randn(HEADS, HEAD_DIM, HEAD_DIM)),
        HEADS,
        {"attention": "softmax"},
    )
    layer = Attention(WIDTH, scheme)
    absorbed = absorb(scheme, layer.query, layer.key)
    assert isinstance(absorbed.encoding.parameter, torch.nn.Parameter) == learned
    if learned:
        layer(tokens(2, 9).float(), absorbed.at(sequence(9)), causal=True).square().sum().backward()
        assert (absorbed.encoding.parameter.grad != 0).all()


# Fewer heads of keys, dropout and windows


SHARED = [("rope", "linear"), ("alibi", "linear"), ("alibi", "softmax"), ("t5", "softmax")]


@causality
@each("own", [1, 2, 4])
@each("of_keys", [True, False], ids=["scheme-of-keys", "scheme-of-queries"])
@each(("name", "kind"), SHARED)
def test_heads_of_queries_share_those_of_keys(name, kind, of_keys, own, causal):
    scheme = perturb(schemes.REGISTRY[name](HEAD_DIM, own if of_keys else 4, attention=kind))
    layer, x = Attention(4 * HEAD_DIM, scheme, kv_heads=own).double(), torch.randn(2, 9, 4 * HEAD_DIM).double()
    assert (layer.query.out_features, layer.key.out_features, layer.value.out_features) == (32, own * 8, own * 8)
    q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    at, full = scheme.at(sequence(9), dtype=torch.float64), {}
    for name, value in at.items():  # for all heads of queries
        full[name] = value
        if of_keys and name == "decay" and value is not None:
            full[name] = value.repeat_interleave(4 // own, -2)
        if of_keys and name == "terms":
            full[name] = [dataclasses.replace(term, table=term.table.repeat_interleave(4 // own, 0)) for term in value]
    y = DEFINITIONS[kind](q, *(a.repeat_interleave(4 // own, 1) for a in (k, v)), **full, causal=causal)
    close(layer(x, at, causal=causal), layer.out(y.transpose(1, 2).flatten(2)), roundings=1000 * TOLERANCE)


def test_dropout_is_of_weights_and_in_training():
    scheme = schemes.rope(HEAD_DIM, HEADS, attention="softmax")
    layer, x, at = Attention(WIDTH, scheme, dropout=0.5), torch.randn(2, 9, WIDTH), scheme.at(sequence(9))
    assert not torch.equal(layer(x, at), layer(x, at))
    layer.eval()
    same = Attention(WIDTH, scheme)
    same.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, at), same(x, at))


@each("kind", ["linear", "softmax"])
def test_a_layer_with_a_window(kind):
    scheme = schemes.rope(HEAD_DIM, HEADS, attention=kind)
    layer, x, at = Attention(WIDTH, scheme, window=3), torch.randn(1, 9, WIDTH), scheme.at(sequence(9))
    before, after = layer(x, at, causal=True), layer(x.index_fill(1, torch.tensor(2), 1.0), at, causal=True)
    assert torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4], atol=1e-6)


def test_a_layer_reads_its_options_in_at():
    scheme, x = schemes.rope(HEAD_DIM, HEADS), torch.randn(1, 5, WIDTH)
    layer, at = Attention(WIDTH, scheme, window=2), scheme.at(sequence(5))
    y, state = Attention(WIDTH, scheme)(x, {**at, "state": isopos.State(), "return_state": True}, causal=True)
    assert isinstance(state, isopos.State)
    assert y.shape == x.shape
    torch.testing.assert_close(layer(x, {**at, "window": 2}, causal=True), layer(x, at, causal=True))
    with pytest.raises(ValueError, match="window: expected 2, as this layer has it, got 3 in at"):
        layer(x, {**at, "window": 3}, causal=True)


def test_a_layer_takes_what_a_scheme_returns_at_positions():
    layer, x = Attention(WIDTH, schemes.rope(HEAD_DIM, HEADS)), torch.randn(1, 5, WIDTH)
    for wrong in (sequence(5), layer, None):
        message = rf"at: expected scheme\.at\(positions\), or a Stream of the scheme, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=message):
            layer(x, wrong)


def test_a_layer_has_one_denominator():
    plain, none = (schemes.rope(HEAD_DIM, HEADS, denominator=name) for name in ("plain", "none"))
    for own, other in ((plain, none), (none, plain)):
        with pytest.raises(ValueError, match="at: expected arguments with the denominator of this layer's scheme"):
            Attention(WIDTH, own)(torch.randn(1, 5, WIDTH), other.at(sequence(5)))


@each("kind", ["linear", "softmax"])
@each("wrong", ["no", 1, 0, None, torch.tensor(False)], ids=repr)
def test_causal_is_true_or_false(kind, wrong):
    scheme = schemes.rope(HEAD_DIM, HEADS, attention=kind)
    with pytest.raises(TypeError, match=r"causal: expected True or False, got "):
        scheme(*torch.randn(3, 1, HEADS, 4, HEAD_DIM), sequence(4), causal=wrong)


def test_a_layer_takes_a_mask_of_pairs():
    scheme = schemes.rope(HEAD_DIM, HEADS, attention="softmax")
    layer, x, at = Attention(WIDTH, scheme), torch.randn(2, 9, WIDTH), scheme.at(sequence(9))
    mask = torch.ones(9, 9).tril().bool()
    torch.testing.assert_close(layer(x, at, attn_mask=mask), layer(x, at, causal=True))


@each(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "kv_heads: expected a divisor of the 4 heads, got 3"),
        ({"kv_heads": 0}, "kv_heads: expected an integer of at least 1, got 0"),
        ({"kv_heads": 1}, "scheme: expected 4 heads, as of queries, or 1, as of keys, got 2"),
        ({"model_dim": 4 * HEAD_DIM + 1, "kv_heads": 2}, "model_dim: expected a multiple of the head size 8, got 33"),
        ({"model_dim": WIDTH, "dropout": 0.1}, "dropout: expected 0 with linear attention, which forms no weights to drop"),
        ({"model_dim": WIDTH, "dropout": 1.0}, "dropout: expected a probability below 1, got 1.0"),
        ({"model_dim": WIDTH, "window": 0}, "window: expected an integer of at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Attention(**({"model_dim": 4 * HEAD_DIM, "scheme": schemes.rope(HEAD_DIM, 2)} | options))
