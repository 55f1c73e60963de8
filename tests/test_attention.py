"""The attention module: projections around a scheme."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import HEAD_DIM, HEADS, PRESETS, SCHEMES, TOLERANCE, ascending, close, ids, perturb, quadratic

from isopos import Attention, schemes
from isopos.positions import sequence

WIDTH = HEAD_DIM * HEADS
every = pytest.mark.parametrize("case", SCHEMES, ids=ids)
causality = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
kinds = pytest.mark.parametrize("kind", ["linear", "softmax"])


def made(case, kind="linear"):
    scheme = perturb(case.build(attention=kind))
    return scheme, Attention(WIDTH, scheme).double()


def tokens(*shape):
    return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)


def embedded(scheme, x, at):
    return x if scheme.embedding is None else x + 5 * scheme.embedding(at, torch.float64)


@every
def test_it_is_projections_around_linear_attention(case):
    (scheme, layer), x, at = made(case), tokens(2, 9), ascending(2, 9)
    q, k, v = (p(x).view(2, 9, HEADS, HEAD_DIM).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    y = quadratic(q, k, v, **scheme.at(at, dtype=torch.float64), causal=True)
    y = F.layer_norm(y, (HEAD_DIM,)) if scheme.choices["denominator"] == "none" else y
    expected = layer.out(y.transpose(1, 2).reshape(2, 9, WIDTH))
    close(layer(x, scheme.at(at, dtype=torch.float64), causal=True), expected, roundings=100 * TOLERANCE)


@kinds
@causality
@every
def test_only_absolute_schemes_see_a_shift(case, causal, kind):
    """The invariance law; sinusoidal and learned embeddings are its negative control."""
    (scheme, layer), x, at = made(case, kind), tokens(2, 9), ascending(2, 9)
    before, after = (layer(embedded(scheme, x, p), scheme.at(p, dtype=torch.float64), causal=causal) for p in (at, at + 100))
    if case.relative:
        close(after, before, roundings=100 * TOLERANCE)
    else:
        assert (after - before).abs().max() > 1e-3


@kinds
@pytest.mark.parametrize("case", PRESETS, ids=ids)
def test_cross_attention_to_a_context_with_padding(case, kind):
    (scheme, layer), x, context = made(case, kind), tokens(2, 4), tokens(2, 9)
    if kind == "linear" and scheme.decay is not None:
        scheme, layer = made(case._replace(options={**case.options, "decay": "none"}), kind)
    at = scheme.at(sequence(4) + 3, sequence(9), dtype=torch.float64) | ({"decay": None} if kind == "softmax" else {})
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    y = layer(x, at, context=context, mask=mask)
    changed = torch.where(mask[..., None], context, torch.randn_like(context))
    assert torch.equal(layer(x, at, context=changed, mask=mask), y)
    assert not torch.allclose(layer(x, at, context=changed), layer(x, at, context=context))
    cut = at | {"isometry": scheme.at(sequence(4) + 3, sequence(5), dtype=torch.float64)["isometry"]}
    close(y[1:], layer(x[1:], cut, context=context[1:, :5]))


@pytest.mark.parametrize("case", PRESETS, ids=ids)
@kinds
def test_causal_layers_do_not_see_the_future(case, kind):
    (scheme, layer), x = made(case, kind), tokens(2, 9)
    at = scheme.at(sequence(9), dtype=torch.float64)
    before = layer(x, at, causal=True)
    later = torch.where(torch.arange(9)[:, None] < 5, x, torch.randn_like(x))
    assert torch.equal(layer(later, at, causal=True)[:, :5], before[:, :5])
    assert not torch.equal(layer(later, at, causal=False)[:, :5], layer(x, at, causal=False)[:, :5])


@pytest.mark.parametrize("case", PRESETS, ids=ids)
@kinds
def test_gradients_reach_every_parameter(case, kind):
    (scheme, layer), x = made(case, kind), tokens(2, 9)
    at = ascending(2, 9)
    layer(embedded(scheme, x, at), scheme.at(at, dtype=torch.float64), causal=True).square().sum().backward()
    learned = [*layer.named_parameters(), *scheme.named_parameters()]
    silent = {name for name, p in learned if p.grad is None or not p.grad.any()}
    assert silent <= ({"key.bias"} if kind == "softmax" and case.name == "none" else set())  # softmax ignores it without rho


def test_a_scheme_is_shared_not_owned():
    scheme = schemes.rope(HEAD_DIM, HEADS, learned=True)
    layer = Attention(WIDTH, scheme)
    assert {name.partition(".")[0] for name in layer.state_dict()} == {"query", "key", "value", "out"}
    x, at = torch.randn(2, 9, WIDTH), scheme.at(sequence(9))
    assert torch.equal(copy.deepcopy(layer)(x, at), layer(x, at))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers(dtype):
    scheme = schemes.rope(HEAD_DIM, HEADS, decay="retnet")
    layer, x = Attention(WIDTH, scheme).to(dtype), torch.randn(2, 9, WIDTH).to(dtype)
    y = layer(x, scheme.at(sequence(9)), causal=True)
    assert y.dtype == dtype
    close(y, layer.double()(x.double(), scheme.at(sequence(9)), causal=True), roundings=8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Attention(WIDTH + 1, schemes.rope(HEAD_DIM, HEADS)), "a multiple of the 2 heads, got 17"),
        (lambda: Attention(2 * WIDTH, schemes.rope(HEAD_DIM, HEADS)), "2 heads of 8 features, got 16"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
