"""Test sliding windows of both kinds of attention: a query sees the nearest keys, and the cost depends on the window."""

from itertools import pairwise

import pytest
import torch
from cases import (
    ATTENTION,
    DEFINITIONS,
    HEAD_DIM,
    HEADS,
    TOLERANCE,
    close,
    each,
    inputs,
    inputs_of,
    perturb,
    same_everywhere,
    scheme_case,
)
from hypothesis import given
from hypothesis import strategies as st
from structures import over_structures

import isopos
from isopos.attention import explain, linear_attention, softmax, softmax_attention
from isopos.feature_maps import elu1
from isopos.positions import Line, sequence
from isopos.state import State

T = 23
both = each("kind", ATTENTION)
causality = each("causal", [True, False], ids=["causal", "both-ways"])


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK", 4)


@pytest.mark.parametrize("kind", ATTENTION)
@given(data=st.data())
def test_any_shape_is_the_definition(kind, data):
    number, choice = st.integers(1, 40), st.booleans()
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    t, window, causal = data.draw(number), data.draw(st.integers(1, 45)), data.draw(choice)
    s = data.draw(number) if data.draw(choice) else t
    q, k, v = inputs(2, t=t, s=s, e=5, requires_grad=True)
    options = {"causal": causal, "window": window, "mask": torch.rand(2, s) < 0.7 if data.draw(choice) else None}
    if t <= s and data.draw(choice):
        options["segment_ids"] = (torch.arange(s) * 3 // s).expand(2, s)
    learned = []
    if (t == s or (causal and t < s)) and data.draw(choice):
        steps = torch.rand(HEADS, s, dtype=torch.float64, requires_grad=True)
        g, learned = -steps.cumsum(-1), [steps]
        options["decay"] = (g[:, s - t :], g)
    if kind == "linear":
        options |= {"feature_map": elu1, "denominator": data.draw(st.sampled_from(["plain", "encoded", "complex", None]))}
    scheme, x = isopos.rope(HEAD_DIM, HEADS), sequence(s)
    options["isometry"] = tuple(scheme.encoding(a, torch.float64) for a in (torch.arange(s - t, s)[:, None], x))
    out, expected = ATTENTION[kind](q, k, v, **options), DEFINITIONS[kind](q, k, v, **options)
    same_everywhere(out, expected, [q, k, v, *learned], 1000 * TOLERANCE)


def has_windows(case, kind):
    return isinstance(case.group, Line) and not (case.outside or case.clipped or (case.name, kind) == ("path", "linear"))


@over_structures(has_windows)
def test_every_structure_on_a_line(case, kind):
    scheme = perturb(case.build(attention=kind))
    content, x, mask = inputs_of(scheme, 2, t=T, requires_grad=True), case.positions(2, t=T), torch.rand(2, T) < 0.8
    for causal in case.ways:
        options = scheme.at(x, dtype=torch.float64) | {"causal": causal, "window": 5, "mask": mask}
        out, expected = ATTENTION[kind](*content, **options), DEFINITIONS[kind](*content, **options)
        same_everywhere(out, expected, [*content, *scheme.parameters()], 1000 * TOLERANCE)


@both
@each("heads", [2, 4])
def test_query_heads_share_key_heads(kind, heads):
    scheme = isopos.rope(HEAD_DIM, heads, attention=kind, decay="retnet")
    q, *_ = inputs(2, t=T, heads=4)
    _, k, v = inputs(2, t=T, heads=2)
    many = isopos.rope(HEAD_DIM, heads, attention=kind, decay=scheme.decay)
    at = many.at(sequence(T), dtype=q.dtype)
    if heads == 2:
        at = at | {"decay": at["decay"].repeat_interleave(2, 0)}
    expected = DEFINITIONS[kind](q, *(x.repeat_interleave(2, 1) for x in (k, v)), **at, causal=True, window=6)
    close(ATTENTION[kind](q, k, v, **scheme.at(sequence(T), dtype=q.dtype), causal=True, window=6), expected)


@both
@causality
def test_a_window_that_holds_all_is_none(kind, causal):
    q, k, v = inputs(2, t=T, dtype=torch.float32)
    at = isopos.rope(HEAD_DIM, HEADS, attention=kind).at(sequence(T))
    assert torch.equal(
        ATTENTION[kind](q, k, v, **at, causal=causal, window=T), ATTENTION[kind](q, k, v, **at, causal=causal)
    )


@both
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(kind, dtype):
    q, k, v = inputs(2, t=100, dtype=dtype)
    options = isopos.rope(HEAD_DIM, HEADS, attention=kind, decay="retnet").at(sequence(100)) | {"causal": True, "window": 16}
    exact = DEFINITIONS[kind](*(x.double() for x in (q, k, v)), **options)
    close(ATTENTION[kind](q, k, v, **options), exact, dtype=dtype, roundings=16)


def test_what_left_the_window_leaves_no_digits():
    """A difference of two cumulative sums would keep rounding errors of earlier large numbers."""
    q, k, v = inputs(1, t=200, dtype=torch.float32)
    v[..., :50, :] *= 1e12
    options = {"feature_map": elu1, "causal": True, "window": 20, "denominator": None}
    exact = DEFINITIONS["linear"](*(x.double() for x in (q, k, v)), **options)
    close(linear_attention(q, k, v, **options)[..., 80:, :], exact[..., 80:, :], dtype=torch.float32, roundings=64)


def test_softmax_attention_looks_at_no_more_than_the_windows_of_a_block(monkeypatch):
    keys, fused = [], torch.nn.functional.scaled_dot_product_attention

    def counted(q, k, v, **options):
        keys.append(k.shape[-2])
        return fused(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    q, k, v = inputs(1, t=100)
    softmax_attention(q, k, v, window=8, causal=True)
    softmax_attention(q, k, v, window=3)
    assert max(keys[: -(-100 // 8)]) == 15
    assert max(keys[-(-100 // 8) :]) == 8
    assert len(keys) == 13 + 25


@both
@causality
@each("dtype", [torch.float32, torch.float64])
def test_what_is_broken_outside_a_window_is_not_seen(kind, causal, dtype):
    q, k, v = inputs(1, t=T, dtype=dtype)
    options = {"causal": causal, "window": 4} | ({"feature_map": elu1} if kind == "linear" else {})
    whole, broken = ATTENTION[kind](q, k, v, **options), torch.arange(T) - 10
    v[0, 0, 10, 3] = torch.nan
    out = ATTENTION[kind](q, k, v, **options)
    seen = (broken >= 0) & (broken < 4) if causal else broken.abs() < 4
    assert out[0, 0, seen, 3].isnan().all()
    torch.testing.assert_close(out[0, 0, ~seen], whole[0, 0, ~seen], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out[0, 1], whole[0, 1], atol=1e-5, rtol=1e-4)


@causality
@each("broken", range(6, 12))
def test_what_decayed_to_nothing_within_a_window_is_not_seen(causal, broken):
    """Its weight is zero, and NaN must not propagate through zero times NaN, for any position relative to blocks."""
    q, k, v = inputs(t=T, dtype=torch.float32)
    options = {"decay": -200.0 * torch.arange(T, dtype=torch.float64), "causal": causal, "window": 5, "feature_map": elu1}
    expected = linear_attention(q, k, v, **options)
    v[:, broken] = torch.nan
    found = linear_attention(q, k, v, **options)
    rows = torch.arange(T) != broken
    torch.testing.assert_close(found[:, rows], expected[:, rows])
    assert found[:, broken].isnan().all()


@pytest.mark.slow
@both
def test_under_a_compiler(kind):
    options = isopos.rope(HEAD_DIM, HEADS, attention=kind, decay="retnet").at(sequence(T)) | {"causal": True, "window": 5}
    compiled = torch.compile(lambda q, k, v: ATTENTION[kind](q, k, v, **options), backend="aot_eager", fullgraph=True)
    leaves = inputs(2, t=T, dtype=torch.float32, requires_grad=True)
    same_everywhere(compiled(*leaves), ATTENTION[kind](*leaves, **options), list(leaves), 64)


# Streams


@each("name", ["rope", "alibi", "t5", "ape-sequence-locality", "transformer-xl"])
@each("cuts", [[0, T], [0, 12, 20, T], [0, *range(2, T + 1)]], ids=["whole", "chunks", "steps"])
def test_a_stream_is_the_whole(name, cuts):
    scheme = perturb(scheme_case(name).build(attention="softmax"))
    content, ids = inputs(2, t=T), torch.tensor([0] * 10 + [1] * (T - 10)).expand(2, T)
    options = {"causal": True, "window": 6, "segment_ids": ids, "mask": torch.rand(2, T) < 0.8}
    whole = DEFINITIONS["softmax"](*content, **scheme.at(sequence(T), dtype=torch.float64), **options)
    state, found = State(), []
    for start, stop in pairwise(cuts):
        at = scheme.at(sequence(T)[start:stop], state=state, dtype=torch.float64)
        own = options | {name: options[name][..., start:stop] for name in ("segment_ids", "mask")}
        y, state = softmax_attention(*(x[..., start:stop, :] for x in content), **at, **own, return_state=True)
        found.append(y)
    close(torch.cat(found, -2), whole)


def test_a_stream_keeps_a_window():
    scheme, sizes, state = isopos.rope(HEAD_DIM, HEADS, attention="softmax", decay="retnet"), [], State()
    for i in range(12):
        at = scheme.at(torch.tensor([[i]]), state=state)
        token = inputs(2, t=1, dtype=torch.float32)
        _, state = softmax_attention(*token, **at, causal=True, window=5, return_state=True)
        sizes.append(state.nbytes)
    assert len(set(sizes[4:])) == 1
    assert state["keys"].shape[-2] == 4
    with pytest.raises(ValueError, match=r"state: expected one of softmax, .*, got one of .*, window 5"):
        softmax_attention(*token, **scheme.at(torch.tensor([[12]]), state=state), causal=True, return_state=True)
    with pytest.raises(ValueError, match="attn_mask: expected none with a window in a stream"):
        softmax_attention(*token, causal=True, window=5, return_state=True, attn_mask=torch.ones(1, 1).bool())


def test_linear_attention_has_no_windows_in_streams_but_this_way():
    q, k, v = inputs(2, t=T)
    scheme, window = isopos.rope(HEAD_DIM, HEADS, decay="retnet"), 6
    with pytest.raises(
        ValueError, match=r"window: expected none in a stream of linear attention, .* the last window - 1 keys"
    ):
        linear_attention(q, k, v, causal=True, window=window, return_state=True)
    whole = linear_attention(q, k, v, **scheme.at(sequence(T), dtype=q.dtype), causal=True, window=window)
    for start, stop in ((7, 8), (10, 14), (22, 23)):
        first = start - window + 1
        at = scheme.at(sequence(T)[start:stop], sequence(T)[first:stop], dtype=q.dtype)
        own = (q[..., start:stop, :], *(x[..., first:stop, :] for x in (k, v)))
        close(linear_attention(*own, **at, causal=True, window=window), whole[..., start:stop, :])


def test_clipped_terms_have_no_window():
    q, k, v = inputs(2, t=T)
    with pytest.raises(ValueError, match="window: expected none with clipped terms"):
        linear_attention(q, k, v, **isopos.horn_clipped(HEAD_DIM, HEADS).at(sequence(T), dtype=q.dtype), window=3)


def test_explain_answers():
    q, k, v = torch.randn(3, 2, 4, 100, 16, dtype=torch.float64)
    assert str(explain(q, k, v, feature_map=elu1, causal=True, window=10)).startswith("chunks serves")
