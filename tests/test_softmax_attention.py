"""Test features of `softmax_attention` alone. test_linear_attention.py tests shared features."""

import pytest
import torch
from cases import (
    HEAD_DIM,
    HEADS,
    close,
    each,
    gradients,
    inputs,
    perturb,
    same_everywhere,
    scheme_case,
    softmax_by_definition,
)

from isopos import schemes
from isopos.attention import linear_attention, reference, softmax_attention
from isopos.decays import Decay
from isopos.encodings import Rotary, rope_frequencies
from isopos.positions import sequence
from isopos.state import State


def test_scale_and_default():
    q, k, v = inputs(2, t=5)
    close(softmax_attention(q, k, v, scale=0.1), softmax_by_definition(q, k, v, scale=0.1))
    lift = Rotary(rope_frequencies(HEAD_DIM)[None, None], lift=True)(sequence(5), torch.float64)
    close(softmax_attention(q, k, v, isometry=lift), softmax_by_definition(q, k, v, isometry=lift, scale=HEAD_DIM**-0.5))


@each("causal", [True, False])
@each("masked", [True, False])
def test_autocast_softmax_is_finite(masked, causal):
    t = 70
    leaves = inputs(2, t=t, dtype=torch.float32, requires_grad=True)
    rho, g = Rotary(rope_frequencies(HEAD_DIM // 2)[None, None])(sequence(t)), Decay(torch.tensor([0.05, 0.4]))(sequence(t))
    with torch.autocast("cpu", torch.bfloat16):
        mask = torch.rand(2, t) < 0.5 if masked else None
        out = softmax_attention(*leaves, isometry=rho, decay=g, causal=causal, mask=mask)
    assert out.isfinite().all()
    exact = softmax_attention(*leaves, isometry=rho, decay=g, causal=causal, mask=mask)
    close(out, exact, dtype=torch.bfloat16, roundings=8)


def test_rows_without_keys_have_finite_gradients_in_float16():
    q, k, v = leaves = inputs(1, t=100, dtype=torch.float16, requires_grad=True)
    g = Decay(torch.full((HEADS,), 2000.0))(sequence(100))
    out = softmax_attention(q, k, v, decay=g, causal=True, mask=torch.arange(100)[None] >= 40)
    assert all(grad.isfinite().all() for grad in gradients(out, list(leaves)))


# Masks of pairs

T, S = 5, 7
PAIRS = [(), (S,), (T, 1), (T, S), (1, T, S), (4, T, S), (2, 1, 1, S), (2, 1, T, S), (2, 4, T, S)]  # four heads of queries
WHOLE = (1, T, S), (2, 4, T, S)
SOME = ["rope", "alibi", "t5", "shaw", "deberta", "transformer-xl", "ape-sequence-locality", "permuteformer"]


def of_pairs(shape, dtype):
    """A random mask of pairs; floats have infinities, too."""
    takes_part, added = torch.rand(shape) < 0.7, torch.randn(shape, dtype=torch.float64)
    return takes_part if dtype == torch.bool else torch.where(takes_part, added, -torch.inf).to(dtype)


@each("causal", [True, False])
@each("dtype", [torch.bool, torch.float64])
@each(
    ("name", "shape"),
    [(name, shape) for name in SOME for shape in (PAIRS if name in ("rope", "deberta") else WHOLE)],
    ids=str,
)
def test_a_mask_of_pairs_is_that_of_the_definition(name, shape, dtype, causal):
    scheme = perturb(scheme_case(name).build(attention="softmax", heads=4))
    q, k, v = leaves = inputs(2, t=T, s=S, heads=4, requires_grad=True)
    mask = of_pairs(shape, dtype).requires_grad_(dtype != torch.bool)
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    options = {"attn_mask": mask, "mask": torch.rand(2, S) < 0.8, "segment_ids": ids, "causal": causal}
    options |= scheme.at(sequence(S)[S - T :], sequence(S), dtype=q.dtype)
    out, expected = softmax_attention(q, k, v, **options), softmax_by_definition(q, k, v, **options)
    learned = [*leaves, *([mask] if mask.requires_grad else []), *scheme.parameters()]
    same_everywhere(out, expected, learned)


@each("dtype", [torch.bool, torch.float64])
@each("own", [1, 2])
@each("heads", [1, 4])
@each("samples", [(), (1,), (2,)], ids=str)
def test_a_mask_of_pairs_has_the_heads_of_queries(samples, heads, own, dtype):
    q, *_ = inputs(2, t=T, heads=4)
    _, k, v = inputs(2, t=T, s=S, heads=own)
    mask = of_pairs((*samples, heads, T, S), dtype)
    expected = softmax_by_definition(q, *(x.repeat_interleave(4 // own, 1) for x in (k, v)), attn_mask=mask)
    close(softmax_attention(q, k, v, attn_mask=mask), expected)


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("of_mask", [torch.bool, torch.float32, torch.float64, torch.float16])
def test_masks_of_pairs_of_any_dtype(dtype, of_mask):
    leaves = inputs(2, t=T, s=S, dtype=dtype, requires_grad=True)
    mask = of_pairs((2, 1, T, S), of_mask)
    mask[0, 0, 0, :3] = False if of_mask == torch.bool else torch.finfo(of_mask).min  # of float32 it is no number of float16
    out = softmax_attention(*leaves, attn_mask=mask)
    exact = softmax_by_definition(*(x.double() for x in leaves), attn_mask=mask)
    assert out.dtype == dtype
    close(out, exact, dtype=dtype, roundings=8)
    assert all(grad.isfinite().all() for grad in gradients(out, list(leaves)))


def test_a_row_without_pairs_is_zero_and_has_finite_gradients():
    q, k, v = leaves = inputs(2, t=T, s=S, requires_grad=True)
    for mask in (torch.zeros(T, S).bool(), torch.full((T, S), -torch.inf)):
        mask = mask.index_fill(0, torch.tensor([1, 2]), 1)
        out = softmax_attention(q, k, v, attn_mask=mask)
        assert (out[..., [0, 3, 4], :] == 0).all()
        close(out[..., 1:3, :], softmax_by_definition(q[..., 1:3, :], k, v))
        assert all(grad.isfinite().all() for grad in gradients(out, list(leaves)))


def test_a_mask_of_pairs_reaches_the_fused_function_as_it_is(monkeypatch):
    """A bool mask stays bool, and a mask with fewer axes is not expanded to [*b h t s]."""
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **o: seen.append(o["attn_mask"]) or fused(*a, **o),
    )
    q, k, v = inputs(2, t=T, s=S)
    softmax_attention(q, k, v, attn_mask=of_pairs((T, S), torch.bool))
    softmax_attention(q, k, v, attn_mask=of_pairs((T, S), torch.float64))
    softmax_attention(q, k, v, mask=torch.rand(2, S) < 0.8)
    assert [mask.dtype for mask in seen] == [torch.bool, torch.float64, torch.bool]
    assert [mask.shape for mask in seen] == [(2, HEADS, T, S)] * 3
    assert [mask.stride()[:2] for mask in seen[:2]] == [(0, 0)] * 2
    assert seen[2].stride()[1:3] == (0, 0), "one number a key"


def test_a_mask_of_pairs_in_a_stream_counts_all_keys():
    q, k, v = inputs(2, t=S)
    mask, scheme, state, found = (
        of_pairs((S, S), torch.float64),
        schemes.rope(HEAD_DIM, HEADS, attention="softmax"),
        State(),
        [],
    )
    for own in (slice(0, 3), slice(3, 4), slice(4, S)):
        at = scheme.at(sequence(S)[own], state=state, dtype=q.dtype)
        tokens, part = (x[..., own, :] for x in (q, k, v)), mask[own, : own.stop]
        y, state = softmax_attention(*tokens, **at, attn_mask=part, causal=True, return_state=True)
        found.append(y)
    at = scheme.at(sequence(S), dtype=q.dtype)
    close(torch.cat(found, -2), softmax_by_definition(q, k, v, **at, causal=True, attn_mask=mask))


@each("number", [torch.nan, torch.inf, -torch.inf])
@each("options", [{"segment_ids": torch.tensor([0, 0, 0, 1])}, {"causal": True}, {"window": 2}])
def test_gradients_of_rows_that_do_not_see_a_key_are_finite(number, options):
    """A key of -inf has a weight of zero, so that outputs are finite."""
    q, k, v = (x.abs() for x in inputs(1, t=4, heads=2, d=4, e=4))
    k[..., 3, :] = number
    given = [x.requires_grad_() for x in (q, k, v)]
    y = softmax_attention(*given, **options)
    rows = slice(0, 2)
    assert y[..., rows, :].isfinite().all()
    for grad in torch.autograd.grad(y[..., rows, :].sum(), given):
        assert grad[..., :3, :].isfinite().all()


def test_a_learned_scale_is_refused():
    """It would have no gradient."""
    q, k, v = inputs(1, t=4)
    with pytest.raises(ValueError, match=r"^scale: expected a finite factor of logits, .*; multiply q by a learned one"):
        softmax_attention(q, k, v, scale=torch.tensor(0.5, requires_grad=True))


@each("name", ["rope", "alibi", "t5", "ape-sequence-locality"])
@each("empty", [0.0, torch.nan])
def test_a_static_cache(name, empty):
    """Keys and values have a fixed capacity, and each step fills more slots in place."""
    scheme, capacity = scheme_case(name).build(attention="softmax"), 12
    q, k, v = inputs(2, t=9)
    whole = softmax_attention(q, k, v, **scheme.at(sequence(9), dtype=q.dtype), causal=True)
    keys, values = (torch.full((2, HEADS, capacity, HEAD_DIM), empty, dtype=q.dtype) for _ in range(2))
    slots, found = torch.arange(capacity), []
    for own in (slice(0, 4), slice(4, 5), slice(5, 9)):
        keys[..., own, :], values[..., own, :] = k[..., own, :], v[..., own, :]
        at = scheme.at(slots[own, None], slots[:, None], dtype=q.dtype)
        options = {"mask": slots < own.stop, "attn_mask": slots <= slots[own, None]}
        found.append(softmax_attention(q[..., own, :], keys, values, **at, **options))
    close(torch.cat(found, -2), whole)


@each(
    ("changes", "message"),
    [
        ({"attn_mask": torch.ones(T, S).long()}, "attn_mask: expected bool, .* or floats, which are added, got torch.int64"),
        (
            {"attn_mask": torch.ones(2, T, S).bool()},
            r"\[\*b h t s\] \[2, 4, 5, 7\], got \[2, 5, 7\]; one per sample needs an axis",
        ),
        ({"attn_mask": torch.ones(T, T).bool()}, r"\[2, 4, 5, 7\], got \[5, 5\]"),
        ({"attn_mask": torch.ones(T, S, device="meta")}, "attn_mask: expected a tensor on cpu as q"),
        ({"window": 0}, "window: expected an integer of at least 1, got 0"),
        ({"window": 2.0}, "window: expected an integer of at least 1, got 2.0"),
        ({"dropout": 1.0}, "dropout: expected a probability below 1, got 1.0"),
    ],
)
def test_bad_masks_of_pairs(changes, message):
    q, k, v = inputs(2, t=T, s=S, heads=4)
    with pytest.raises(ValueError, match=message):
        softmax_attention(q, k[:, :2], v[:, :2], **changes)


def test_linear_attention_refuses_a_mask_of_pairs():
    q, k, v = inputs(2, t=T)
    with pytest.raises(
        ValueError, match=r"attn_mask: expected none in linear attention, which .*; mask .*, segment_ids, causal"
    ):
        linear_attention(q, k, v, attn_mask=torch.ones(T, T).bool())


# Dropout


@each("options", [{}, {"causal": True}, {"window": 3}, {"locality": torch.ones(40, 40)}], ids=str)
def test_dropout_drops_weights_and_divides_the_others(options):
    q, k, _ = inputs(2, t=40, dtype=torch.float32)
    v = torch.eye(40).expand(2, HEADS, 40, 40)  # outputs are the weights
    exact = softmax_attention(q, k, v, **options)
    out = softmax_attention(q, k, v, **options, dropout=0.25)
    kept = out != 0
    torch.testing.assert_close(out[kept], exact[kept] / 0.75)
    assert 0.7 < kept.sum() / (exact != 0).sum() < 0.8


@each("which", [0, 1, 2], ids="qkv")
def test_one_of_three_may_have_samples_that_the_others_share(which):
    inputs = [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(3)]
    inputs[which] = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    out = softmax_attention(*inputs, mask=mask, causal=True)
    close(out, reference.softmax(*inputs, mask=mask, causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decays_are_exact_where_the_nearest_key_is_far(dtype):
    scheme, x = schemes.alibi(16, 4, attention="softmax"), sequence(30)
    q, k, v = torch.randn(3, 1, 4, 30, 16).to(dtype)
    for far in (0, 5_000, 100_000):
        found = softmax_attention(q, k, v, **scheme.at(x + far, x))
        wanted = softmax_attention(q.double(), k.double(), v.double(), **scheme.at(x + far, x, dtype=torch.float64))
        assert (found - wanted).abs().max() < 8 * torch.finfo(dtype).eps * v.abs().max()
