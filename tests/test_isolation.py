"""Test containment: the content of a token, including NaN and infinity, reaches only rows that attend to it."""

import itertools

import pytest
import torch
from cases import ATTENTION, close, each, named

from isopos import schemes
from isopos.attention import linear_attention, reference
from isopos.feature_maps import elu1
from isopos.ops import library
from isopos.positions import sequence
from isopos.state import State
from isopos.terms import Clipped

T, D, HEADS = 150, 16, 2
IDS = torch.arange(T) * 3 // T  # of three sequences
J = T // 2  # the token that is broken


def drawn(dtype, t=T):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, HEADS, t, D, generator=draw).to(dtype) for _ in range(3)]


def arguments(kind, name, dtype, **choices):
    if name == "products":
        return {"denominator": None}
    return schemes.REGISTRY[name](D, HEADS, attention=kind, **choices).at(sequence(T), dtype=dtype)


def seen(which, *, causal, packed):
    """Rows that attend to token J, and its row."""
    rows = torch.arange(T)
    found = (rows >= J) if causal else rows >= 0
    return rows == J if which == 0 else found & (IDS[J] == IDS) if packed else found


@each(("causal", "packed"), [(True, False), (True, True), (False, True), (False, False)])
@each("path", ["compiled", "float32", "float64", "function"])
@each(("kind", "name"), [*(("linear", x) for x in ("rope", "retnet", "products")), ("softmax", "rope")])
def test_rows_do_not_hold_what_they_do_not_see(monkeypatch, kind, name, path, causal, packed):
    if path == "float32":
        monkeypatch.setattr(library, "libraries", lambda: ({}, "off"))
    dtype = torch.float64 if path == "float64" else torch.float32
    options = arguments(kind, name, dtype) | {"causal": causal, "segment_ids": IDS if packed else None}
    if path == "function":
        options |= {"feature_map": lambda x: elu1(x)} if kind == "linear" else {"decay": -torch.arange(T).double()}
    whole = ATTENTION[kind](*drawn(dtype), **options)
    for which, value in itertools.product(range(3), (torch.nan, torch.inf)):
        inputs = drawn(dtype)
        inputs[which][0, 0, J, 3] = value
        leaves = [x.requires_grad_() for x in inputs]
        out, rows = ATTENTION[kind](*leaves, **options), seen(which, causal=causal, packed=packed)
        with named(f"{value} in {'qkv'[which]}"):
            isolated(out, whole, rows, leaves, which if value != value else None)


def isolated(out, whole, rows, leaves, which):
    """Assert that rows that see the token have NaN, and that all other rows and their gradients are unaffected."""
    assert out[0, 0, ~rows].isfinite().all()
    torch.testing.assert_close(out[0, 0, ~rows], whole[0, 0, ~rows], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out[1], whole[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out[0, 1], whole[0, 1], atol=1e-5, rtol=1e-4)
    if which is not None:  # and nothing is hidden
        assert not out[0, 0, rows].isfinite().all(-1).any() if which < 2 else out[0, 0, rows, 3].isnan().all()
        unseen = torch.ones_like(out)
        unseen[0, 0, rows] = 0
        for grad in torch.autograd.grad(out, leaves, unseen):
            assert grad.isfinite().all()


def test_under_a_compiler():
    options = arguments("linear", "rope", torch.float32) | {"causal": True, "segment_ids": IDS}
    compiled = torch.compile(lambda q, k, v: linear_attention(q, k, v, **options), backend="aot_eager", fullgraph=True)
    q, k, v = drawn(torch.float32)
    v[0, 0, J] = torch.nan
    out, rows = compiled(q, k, v), seen(2, causal=True, packed=True)
    torch.testing.assert_close(out, linear_attention(q, k, v, **options), equal_nan=True)
    assert out[0, 0, ~rows].isfinite().all()


@each("pieces", [[1] * 12, [4, 4, 4], [5, 1, 3, 1, 2]], ids=str)
@each("path", ["compiled", "float32"])
@each("kind", ATTENTION)
def test_a_stream_of_packed_sequences(monkeypatch, kind, path, pieces):
    if path == "float32":
        monkeypatch.setattr(library, "libraries", lambda: ({}, "off"))
    ids, scheme = torch.tensor([0] * 6 + [1] * 6), schemes.rope(D, HEADS, attention=kind)
    inputs = drawn(torch.float32, 12)
    whole = ATTENTION[kind](*inputs, **scheme.at(sequence(12)), causal=True, segment_ids=ids)
    inputs[1][0, 0, 2], inputs[2][0, 0, 5] = torch.nan, torch.inf
    state, found, start = State(), [], 0
    with torch.no_grad():
        for size in pieces:
            own = slice(start, start + size)
            at = scheme.at(sequence(12)[own], state=state)
            tokens, start = (x[..., own, :] for x in inputs), start + size
            y, state = ATTENTION[kind](*tokens, **at, causal=True, segment_ids=ids[own], return_state=True)
            found.append(y)
    out = torch.cat(found, -2)
    assert out[0, 0, 2:6].isnan().any(-1).all()
    out[0, 0, 2:6] = whole[0, 0, 2:6]
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-4)


@each("ids", [IDS, None], ids=["packed", "whole"])
def test_clipped_terms(ids):
    q, k, v = drawn(torch.float64)
    terms = [Clipped(torch.randn(HEADS, 5, D).double(), "query", sequence(T), sequence(T), 2)]
    options = {"feature_map": elu1, "terms": terms, "causal": True, "segment_ids": ids}
    whole = linear_attention(q, k, v, **options)
    v[0, 0, J, 3] = torch.nan
    out, rows = linear_attention(q, k, v, **options), seen(2, causal=True, packed=ids is not None)
    close(out[0, 0, ~rows], whole[0, 0, ~rows])
    assert out[0, 0, rows, 3].isnan().all()


@each("path", ["compiled", "definition"])
def test_a_weight_of_zero_hides_what_is_far_away(path):
    """A log decay of -1000 between two tokens separates them."""
    q, k, v = drawn(torch.float32 if path == "compiled" else torch.float64)
    g = torch.where(torch.arange(T) < J, 0.0, -1000.0).double()
    v[..., 0, :] = torch.nan
    for causal in (True, False):
        out = linear_attention(q, k, v, feature_map=elu1, decay=g, causal=causal)
        assert out[..., :J, :].isnan().all()
        assert out[..., J:, :].isfinite().all()


@each("name", ["none", "rope", "horn-clipped"])
@each("dtype", [torch.float32, torch.float64])
@each("t", [1, 40, T])
def test_fewer_queries_than_keys_of_packed_sequences_both_ways(name, dtype, t):
    q, k, v = drawn(dtype)
    scheme = schemes.REGISTRY[name](D, HEADS)
    at = scheme.at(sequence(T)[T - t :], sequence(T), dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q[..., T - t :, :], k, v)]
    out = linear_attention(*leaves, **at, segment_ids=IDS)
    exact = reference.linear(*(x.double() for x in leaves), **at, segment_ids=IDS)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-4)
    grad = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(exact, leaves, grad.double()), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not library.libraries()[0], reason=library.libraries()[1])
@each("form", ["plain", "encoded"])
@each("way", ["causal", "stream", "all keys"])
def test_compiled_sums_clamp_as_the_definition_does(form, way):
    """Denominators of about 1e-7 on both sides of zero: their signs stay, and no gradient passes the clamped ones."""
    q, k, v = (torch.zeros(1, HEADS, 8, D), torch.zeros(1, HEADS, 8, D), drawn(torch.float32, 8)[2][:1])
    q[..., 0] = torch.tensor([1.0, -1.0, -1e-7, 1e-7, -1e-8, 1e-8, -2.0, 2.0])
    k[..., 0, 0] = 1  # and all other keys are zero: a denominator is its query
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rho = schemes.rope(D, HEADS, feature_map="identity").at(torch.zeros(8, 1))["isometry"] if form == "plain" else None
    options = {"isometry": rho, "denominator": form, "causal": way != "all keys"}
    expected = reference.linear(*leaves, **options)
    if way == "stream":
        with torch.no_grad():
            state, found = State(), []
            for i in range(8):
                own = None if rho is None else rho.tokens(i, i + 1)
                token = (x[..., i : i + 1, :] for x in leaves)
                y, state = linear_attention(*token, **options | {"isometry": own}, state=state, return_state=True)
                found.append(y)
        torch.testing.assert_close(torch.cat(found, -2), expected)
        return
    out, grad = linear_attention(*leaves, **options), torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    for a, b in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert (out[0, 0] * v[0, 0, 0] >= 0).all()


@each("attention", ["linear", "softmax"])
def test_values_of_no_features(attention):
    q, k, v = drawn(torch.float32)
    assert ATTENTION[attention](q, k, v[..., :0], causal=True).shape == (2, HEADS, T, 0)
