"""Test grouped heads: per-head tensors may be per query head or per key head, and errors use the caller's shapes."""

import pytest
import torch
from cases import ATTENTION, DEFINITIONS, HEAD_DIM, close, each, inputs, perturb, same_everywhere, scheme_case, stream

import isopos
from isopos.attention import linear_attention, naive_linear_attention, softmax_attention
from isopos.decays import Decay
from isopos.feature_maps import elu1
from isopos.positions import sequence

HEADS, T = 6, 9  # of queries
causality = each("causal", [True, False], ids=["causal", "both-ways"])
sharing = pytest.mark.parametrize("own", [1, 2, 3])
CASES = [("rope-learned", "linear"), ("rope-learned", "softmax"), ("rope-learned-decay", "linear"), ("t5", "softmax")]
CASES += [
    ("alibi", "linear"),
    ("alibi", "softmax"),
    ("deberta", "softmax"),
    ("ape-sequence", "linear"),
    ("permuteformer", "linear"),
]
CASES += [("horn-clipped", "linear"), ("transformer-xl", "softmax")]


def built(name, kind, heads):
    options = (
        {"decay": lambda: Decay(torch.linspace(0.05, 0.4, heads), learned=True)} if name == "rope-learned-decay" else {}
    )
    return perturb(scheme_case(name).build(heads=heads, attention=kind, **options))


def drawn(own, **more):
    q, *_ = inputs(2, t=T, heads=HEADS, **more)
    return q, *inputs(2, t=T, heads=own, **more)[1:]


def repeated(own, *tensors):
    return [x.repeat_interleave(HEADS // own, 1) for x in tensors]


@sharing
@causality
@each(("name", "kind"), CASES)
def test_one_a_query_head(name, kind, causal, own):
    scheme, (q, k, v) = built(name, kind, HEADS), drawn(own, requires_grad=True)
    at, options = scheme.at(sequence(T), dtype=q.dtype), {"causal": causal, "mask": torch.rand(2, T) < 0.8}
    out = ATTENTION[kind](q, k, v, **at, **options)
    expected = DEFINITIONS[kind](q, *repeated(own, k, v), **at, **options)
    same_everywhere(out, expected, [q, k, v, *scheme.parameters()])


@sharing
@each(("name", "kind"), CASES)
def test_a_stream_of_one_a_query_head(name, kind, own):
    scheme, (q, k, v) = built(name, kind, HEADS), drawn(own)
    whole = ATTENTION[kind](q, k, v, **scheme.at(sequence(T), dtype=q.dtype), causal=True)
    with torch.no_grad():
        close(stream(scheme, (q, k, v), sequence(T), [0, 4, 5, 6, T])[0], whole.detach())


@causality
@each("heads", [2, HEADS])
def test_the_naive_definition_shares_heads(causal, heads):
    q, k, v = drawn(2)
    at = isopos.rope(HEAD_DIM, heads, decay="retnet").at(sequence(T), dtype=q.dtype)
    close(naive_linear_attention(q, k, v, **at, causal=causal), linear_attention(q, k, v, **at, causal=causal))


@pytest.mark.parametrize("options", [{"isometry": isopos.encodings.Rotary(torch.rand(4, 1, 4))(isopos.sequence(5))}, {}])
def test_phases_of_key_heads_and_others_of_query_heads_are_refused(options):
    q, k, v = torch.randn(1, 4, 5, 8), *torch.randn(2, 1, 2, 5, 8)
    if options:
        options, said = options | {"phases": [isopos.phases.SelectiveRotation(8, 2, torch.rand(4))]}, "isometry"
    else:
        g = -torch.arange(5, dtype=torch.float64).expand(4, 5)
        options, said = {"decay": g, "phases": [isopos.phases.ForgetGate(8, 2)]}, "decay"
    for attention in (linear_attention, softmax_attention):
        with pytest.raises(ValueError, match=f"^phases: expected 4 heads, those of q, as {said} has, got 2"):
            attention(q, k, v, causal=True, **options)


def test_samples_that_queries_lack_are_no_groups():
    """Keys have two samples and groups of two heads; the two axes must not be confused."""
    q, k, v = inputs(2, t=T, heads=2)
    q = inputs(1, t=T, heads=4)[0][0]
    expected = DEFINITIONS["linear"](q, *(x.repeat_interleave(2, 1) for x in (k, v)), feature_map=elu1)
    close(linear_attention(q, k, v, feature_map=elu1), expected)


WRONG = [
    ({"decay": torch.zeros(4, T).double()}, r"decay: expected \[2, 6, 9\] of the queries, .* got \[4, 9\]"),
    ({"mask": torch.ones(3, 2, T).bool()}, r"mask: expected leading dimensions that broadcast to \[2\], got \[3, 2, 9\]"),
    ({"segment_ids": torch.zeros(3, 2, T).long()}, r"segment_ids: .* broadcast to \[2\], got \[3, 2, 9\]"),
    (isopos.rope(HEAD_DIM, 4, learned=True).at(sequence(T)), r"isometry: .* to \[2, 6\] of q, got \[4\]"),
    (
        isopos.horn_clipped(HEAD_DIM, 4).at(sequence(T)),
        r"terms: expected a table of 6 heads and 8 features, got \[4, 17, 8\]",
    ),
    (
        isopos.rope(HEAD_DIM, 6, learned=True).at(sequence(T)) | {"decay": torch.zeros(2, T).double()},
        "decay: expected 6 heads, those of q, as isometry has, got 2, those of k; arguments per head",
    ),
    ({"k": torch.zeros(2, 4, T, HEAD_DIM).double()}, r"q's heads a multiple of k's, got \[2, 6, 9, 8\], \[2, 4, 9, 8\]"),
]


@each(("changes", "message"), WRONG)
def test_messages_have_the_shapes_that_were_given(changes, message):
    q, k, v = drawn(2)
    with pytest.raises(ValueError, match=message):
        linear_attention(**({"q": q, "k": k, "v": v} | dict(changes)))
    if "terms" not in changes:
        changes = {name: value for name, value in changes.items() if name not in ("feature_map", "denominator")}
        with pytest.raises(ValueError, match=message):
            softmax_attention(**({"q": q, "k": k, "v": v} | changes))
