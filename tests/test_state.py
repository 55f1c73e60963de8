"""Test streams: outputs equal the whole sequence's for any cuts, after saving, copying and reordering."""

import copy
import pickle

import pytest
import torch
from cases import (
    ATTENTION,
    DEFINITIONS,
    HEAD_DIM,
    HEADS,
    SCHEMES,
    TOLERANCE,
    SchemeCase,
    ascending,
    close,
    each,
    inputs,
    inputs_of,
    parents_first,
    perturb,
    stream,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from structures import over_covering

import isopos
from isopos import State, sequence
from isopos.attention import linear_attention
from isopos.decays import Decay
from isopos.feature_maps import FEATURE_MAPS
from isopos.phases import ForgetGate
from isopos.terms import Clipped

SLACK = 1000 * TOLERANCE  # some denominators almost vanish
both = pytest.mark.parametrize("kind", ATTENTION)


PAIRS = [(case, kind) for case in SCHEMES for kind in case.kinds if case.streams(kind)]
every = over_covering(SchemeCase.streams)


def made(case, kind, *batch, t, **more):
    """A scheme with perturbed parameters, with content and positions of a stream."""
    scheme = perturb(case.build(attention=kind, **more))
    return scheme, inputs_of(scheme, *batch, t=t), parents_first(scheme.group, case.positions(*batch, t=t))


def whole(scheme, content, x, **more):
    return DEFINITIONS[scheme.attention](*content, **scheme.at(x, dtype=torch.float64), causal=True, **more)


def after(content, x, start):
    return [a[..., start:, :] for a in content], x[..., start:, :]


# Any cuts


@given(st.data())
def test_any_cuts_masks_and_shapes(data):
    draw = data.draw
    case, kind = draw(st.sampled_from(PAIRS))
    t, batch = draw(st.integers(1, 90)), draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, t), max_size=5)))
    scheme, content, x = made(case, kind, batch, t=t)
    mask = torch.rand(batch, t) < draw(st.floats(0, 1)) if draw(st.booleans()) else None
    out, _ = stream(scheme, content, x, (0, *cuts, t), mask=mask)
    close(out, whole(scheme, content, x, mask=mask), roundings=SLACK)


@both
def test_masks_may_come_and_go(kind):
    scheme, (q, k, v) = isopos.rope(HEAD_DIM, HEADS, attention=kind), inputs(2, t=6)
    mask, outputs, state = torch.rand(2, 6) < 0.5, [], State()
    mask[:, :2] = mask[:, 4:] = True
    for start in (0, 2, 4):
        part = slice(start, start + 2)
        own = mask[:, part] if start == 2 else None
        at = scheme.at(sequence(6)[part], state=state, dtype=q.dtype)
        tokens = (a[..., part, :] for a in (q, k, v))
        out, state = ATTENTION[kind](*tokens, **at, mask=own, causal=True, return_state=True)
        outputs.append(out)
    close(torch.cat(outputs, -2), whole(scheme, (q, k, v), sequence(6), mask=mask))


# The value


@every
def test_saved_and_copied(case, kind, tmp_path):
    scheme, content, x = made(case, kind, 2, t=9)
    _, state = stream(scheme, content, x, (0, 5))
    save_file(state.state_dict(), tmp_path / "state.safetensors")
    restored = State.from_state_dict(load_file(tmp_path / "state.safetensors"))
    rest = after(content, x, 5)
    expected = stream(scheme, *rest, (0, 1, 4), state=state)[0]
    for other in (restored, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert torch.equal(stream(scheme, *rest, (0, 1, 4), state=other)[0], expected)
        assert (other.fingerprint, other.kind) == (state.fingerprint, state.kind)


@every
def test_continuations_do_not_disturb_each_other(case, kind):
    scheme, content, x = made(case, kind, 2, t=9)
    _, state = stream(scheme, content, x, (0, 5))
    kept = {name: tensor.clone() for name, tensor in state.tensors.items()}
    rest, places = after(content, x, 5)
    first, second = ([a + n for a in rest] for n in range(2))
    found = [stream(scheme, a, places, (0, 1, 4), state=state)[0] for a in (first, second, first)]
    assert torch.equal(found[0], found[2])
    for out, last in zip(found, (first, second), strict=False):
        joined = [torch.cat((a[..., :5, :], b), -2) for a, b in zip(content, last, strict=True)]
        close(out, whole(scheme, joined, x)[..., 5:, :], roundings=SLACK)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())


@every
def test_reordered(case, kind):
    """Beam search: the second sample twice, then the first. Three query heads share a key head."""
    scheme, (q, k, v), x = made(case, kind, 2, t=9)
    content, index = (q.repeat_interleave(3, 1), k, v), torch.tensor([1, 1, 0])
    _, state = stream(scheme, content, x, (0, 5))
    beams = [a[index] for a in (*content, x)]
    out, _ = stream(scheme, *after(beams[:3], beams[3], 5), (0, 1, 4), state=state.reorder(index))
    close(out[:, ::3], whole(scheme, (q[index], k[index], v[index]), x[index])[..., 5:, :], roundings=SLACK)


@pytest.mark.parametrize("wrong", [[0, 1], torch.tensor([True, False]), torch.tensor(1), torch.tensor([0.0])], ids=str)
def test_an_order_is_numbers_of_samples(wrong):
    with pytest.raises(ValueError, match=r"index: expected numbers of samples, int64 \[n\], got "):
        State().reorder(wrong)


@each("attention", ["linear", "softmax"])
def test_an_order_has_samples_of_the_state(attention):
    scheme, (q, k, v) = isopos.rope(HEAD_DIM, HEADS, attention=attention), inputs(2, t=6)
    for n, wrong, message in (
        (2, [0, 2], r"below 2, got \[0, 2\]$"),
        (1, [1, 0], r"below 1, .*; keys that all samples share"),
    ):
        _, state = stream(scheme, (q, k[:n], v[:n]), sequence(6), (0, 6))
        with pytest.raises(ValueError, match=f"index: expected numbers of samples {message}"):
            state.reorder(torch.tensor(wrong))


def test_shared_positions_stay_when_samples_are_reordered():
    scheme, content = isopos.t5(HEAD_DIM, HEADS), inputs(2, t=4)
    _, state = stream(scheme, content, sequence(4), (0, 3))
    moved = [a.flip(0) for a in content]
    out, _ = stream(scheme, *after(moved, sequence(4), 3), (0, 1), state=state.reorder(torch.tensor([1, 0])))
    close(out, whole(scheme, moved, sequence(4))[..., 3:, :])


@pytest.mark.parametrize(
    "scheme", [isopos.t5(HEAD_DIM, HEADS), isopos.horn_clipped(HEAD_DIM, HEADS)], ids=["t5", "horn-clipped"]
)
def test_positions_of_one_sample_and_of_each_continue_each_other(scheme):
    content, x = inputs(2, t=6), sequence(6)
    expected = whole(scheme, content, x)
    for first, rest in ((x[None], x), (x.expand(2, -1, -1), x), (x.expand(2, -1, -1), x[None]), (x, x.expand(2, -1, -1))):
        _, state = stream(scheme, content, first, (0, 5))
        out, _ = stream(scheme, *after(content, rest, 5), (0, 1), state=state)
        close(out, expected[..., 5:, :])
        swapped = state.reorder(torch.tensor([1, 0]))
        out, _ = stream(scheme, *after([a.flip(0) for a in content], rest, 5), (0, 1), state=swapped)
        close(out, expected.flip(0)[..., 5:, :])


@every
def test_linear_attention_keeps_a_state_of_constant_size(case, kind):
    scheme, content, x = made(case, kind, 2, t=80)
    sizes, held = [], []
    for cuts in ((0, 20), (0, 80), (0, 79, 80)):
        state = stream(scheme, content, x, cuts)[1]
        sizes.append(state.nbytes)
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in state.tensors.values()))
    keeps = kind == "softmax" or scheme.group.refers_to_rows
    assert (sizes[0] < sizes[1]) == keeps
    assert keeps or len({*sizes, *held}) == 1, "nor are longer tensors kept alive by their parts"
    assert sizes[1] == sizes[2]
    assert State().nbytes == 0


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float32_and_outputs_have_the_dtype_of_inputs(case, kind, dtype):
    t = 9
    more = {"denominator": "plain"} if kind == "linear" and not case.inside else {}
    scheme = case.build(attention=kind, **more)
    content = [a.to(dtype) for a in inputs_of(scheme, 1, t=t)]
    x = parents_first(scheme.group, case.positions(1, t=t))
    out, state = stream(scheme, content, x, (0, 4, *range(6, t + 1)))
    assert out.dtype == dtype
    floats = {name: a.dtype for name, a in state.tensors.items() if a.is_floating_point()}
    if kind == "linear":
        assert set(floats.values()) <= {torch.float32, torch.float64}
    if not case.inside:  # whose random features of either sign may all but cancel
        roundings = 64 if dtype == torch.float32 else 8
        exact = whole(scheme, [a.double() for a in content], x)
        close(out, exact, dtype=dtype, roundings=roundings)
    if kind == "linear" and dtype != torch.float16:  # under which PyTorch cannot even concatenate
        with torch.autocast("cpu", torch.bfloat16):
            again, _ = stream(scheme, content, x, (0, 4, *range(6, t + 1)))
        assert torch.equal(again, out)


@every
def test_decoding_near_two_to_the_31(case, kind):
    scheme = case.build(attention=kind, **({"denominator": "none"} if kind == "linear" else {}))
    if scheme.encoding.max_length is not None or not scheme.group.is_grid:
        return  # limited, and elements without sizes
    content, x = inputs_of(scheme, 1, t=9, dtype=torch.float32), case.positions(1, t=9)
    far = x + 2**31 - 5
    exact = whole(scheme, [a.double() for a in content], x if case.relative else far)  # a shift changes nothing
    close(stream(scheme, content, far, (0, 4, *range(5, 10)))[0], exact, roundings=32)


# What is no continuation


def state_of(kind="linear", t=3, *, dtype=torch.float32, batch=2, heads=HEADS, segment_ids=None, **options):
    scheme = isopos.rope(HEAD_DIM, heads, attention=kind, **options)
    content = inputs(batch, t=t, heads=heads, dtype=dtype)
    return scheme, content, stream(scheme, content, sequence(t), (0, t), segment_ids=segment_ids)[1]


OTHERS = {
    "base": {"base": 7.0},
    "decay": {"decay": "retnet"},
    "heads": {"heads": 1},
    "batch": {"batch": 1},
    "dtype": {"dtype": torch.float64},
    "packed": {"segment_ids": torch.zeros(3, dtype=torch.int64)},
    "layout": {"layout": "half"},
    "learned": {"learned": True},
}
OF_LINEAR = {"denominator": {"denominator": "encoded"}, "none": {"denominator": "none"}, "phi": {"feature_map": "relu"}}
PAIRS_OF_OTHERS = [(kind, options) for kind in ATTENTION for options in OTHERS.values()]
PAIRS_OF_OTHERS += [("linear", options) for options in OF_LINEAR.values()]


@pytest.mark.parametrize(("kind", "options"), PAIRS_OF_OTHERS, ids=str)
def test_states_of_others_are_refused(kind, options):
    scheme, content, own = state_of(kind)
    *_, other = state_of(kind, **options)
    stream(scheme, content, sequence(3), (0, 3), state=own)
    with pytest.raises(ValueError, match=r"^state: expected one of .* got (one of|another's)"):
        stream(scheme, content, sequence(3), (0, 3), state=other)


@both
def test_states_of_other_attention_are_refused(kind):
    (other,) = set(ATTENTION) - {kind}
    scheme, content, state = state_of(kind)
    arguments = scheme.at(sequence(3), state=state)
    with pytest.raises(ValueError, match=f"state: expected one of {other}.* got one of {kind}"):
        ATTENTION[other](*content, isometry=arguments["isometry"], state=state, causal=True)
    with pytest.raises(ValueError, match="state: expected one of this scheme with these options, got another's"):
        isopos.rope(HEAD_DIM, HEADS, attention=other).at(sequence(3), state=state)
    _, unnamed = ATTENTION[kind](*content, causal=True, return_state=True)
    with pytest.raises(ValueError, match="state: expected one of this scheme"):
        scheme.at(sequence(3), state=unnamed)


def test_schemes_built_alike_share_streams():
    scheme, content, state = state_of(learned=True)
    again = perturb(isopos.rope(HEAD_DIM, HEADS, learned=True)).float()
    assert again.fingerprint == scheme.fingerprint == copy.deepcopy(scheme).bfloat16().fingerprint
    stream(again, content, sequence(3), (0, 3), state=state)


@both
def test_no_stream(kind):
    scheme, (q, k, v), state = state_of(kind)
    at, function = scheme.at(sequence(3), state=state), ATTENTION[kind]
    for options in (at, {"return_state": True}):
        with pytest.raises(ValueError, match=r"state: expected causal attention .* got causal=False"):
            function(q, k, v, **options)
    with pytest.raises(ValueError, match=r"state: expected .* as many queries as keys, .* got 2 queries and 3 keys"):
        function(q[..., :2, :], k, v, state=State(), causal=True)
    with pytest.raises(ValueError, match="x_key: expected none in a stream"):
        scheme.at(sequence(3), sequence(3), state=state)
    for call in (lambda: scheme.at(sequence(3), state={}), lambda: function(q, k, v, state={}, causal=True)):
        with pytest.raises(TypeError, match="state: expected a State, got dict"):
            call()


def test_log_decays_may_not_rise_between_chunks_either():
    scheme, content, state = state_of(decay="retnet")
    with pytest.raises(ValueError, match="decay: expected log decays that do not increase"):
        stream(scheme, content, sequence(3), (0, 3), state=state)
    stream(scheme, content, sequence(3) + 2, (0, 3), state=state)


@both
def test_decays_come_always_or_never(kind):
    content, g = inputs(1, t=3), -ascending(3)[..., 0].double()
    for before, now in ((g, None), (None, g)):
        _, state = ATTENTION[kind](*content, decay=before, causal=True, return_state=True)
        with pytest.raises(ValueError, match="state: expected one of"):
            ATTENTION[kind](*content, decay=now, causal=True, state=state)


@pytest.mark.parametrize(
    "changes",
    [{"denominator": "encoded"}, {"denominator": None}, {"feature_map": FEATURE_MAPS["relu"]}],
    ids=lambda x: "-".join(x),
)
def test_states_without_a_scheme_know_what_wrote_them(changes):
    content = inputs(1, t=3)
    _, state = linear_attention(*content, causal=True, return_state=True)
    linear_attention(*content, causal=True, state=state)
    with pytest.raises(ValueError, match="state: expected one of linear"):
        linear_attention(*content, causal=True, state=state, **changes)


@both
@pytest.mark.parametrize(("batch", "t"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_streams(kind, batch, t):
    scheme, state = isopos.rope(HEAD_DIM, HEADS, attention=kind, decay="retnet"), State()
    options = {"segment_ids": torch.zeros(batch, t, dtype=torch.int64), "mask": torch.ones(batch, t, dtype=torch.bool)}
    for n in range(2):
        x = sequence(t) + n * t
        out, state = stream(scheme, inputs(batch, t=t, e=5), x, (0, t), state=state, **options)
        assert out.shape == (batch, HEADS, t, 5)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
@pytest.mark.parametrize("each", ["mask", "segment_ids"])
def test_samples_may_share_keys(kind, each):
    """Two samples have the same keys, but a mask or segments each."""
    attention = isopos.linear_attention if kind == "linear" else isopos.softmax_attention
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    options = {"mask": torch.tensor([[True, True, True, False], [True, True, True, True]])}
    options["segment_ids"] = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    options = {name: x for name, x in options.items() if name == each}
    scheme, x = isopos.rope(8, 2, attention=kind, decay="retnet"), isopos.sequence(4)
    whole, state, found = attention(q, k, v, **scheme.at(x), causal=True, **options), State(), []
    for n in (0, 2):
        part = slice(n, n + 2)
        own = {name: a[:, part] for name, a in options.items()}
        at = scheme.at(x[part], state=state)
        y, state = attention(*(a[..., part, :] for a in (q, k, v)), **at, causal=True, **own, return_state=True)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, -2), whole)


def test_tensors_of_something_else_are_no_state():
    with pytest.raises(ValueError, match=r"tensors: expected those of State.state_dict\(\), got no fingerprint and kind"):
        State.from_state_dict({"weight": torch.zeros(2)})


@pytest.mark.parametrize("reaches", [(4, 2), (2, 4), (2, 2), (1, 3)])
def test_several_clipped_terms_share_the_sum_of_far_keys(reaches):
    q, k, v = inputs(2, t=12, dtype=torch.float64)
    tables = [torch.rand(HEADS, 2 * reach + 1, HEAD_DIM, dtype=torch.float64) for reach in reaches]

    def terms(queries, keys):
        return [Clipped(table, "query", queries, keys, reach) for table, reach in zip(tables, reaches, strict=True)]

    x, state, found = sequence(12), State(), []
    whole = linear_attention(q, k, v, causal=True, terms=terms(x, x))
    for n in range(0, 12, 3):
        part, own = slice(n, n + 3), {"terms": terms(x[n : n + 3], x[n : n + 3]), "causal": True}
        out, state = linear_attention(*(a[..., part, :] for a in (q, k, v)), state=state, return_state=True, **own)
        found.append(out)
    close(torch.cat(found, -2), whole)
    tables[0] = torch.rand(HEADS, 2 * 5 + 1, HEAD_DIM, dtype=torch.float64)
    longer = [Clipped(tables[0], "query", x[:3] + 12, x[:3] + 12, 5), terms(x[:3] + 12, x[:3] + 12)[1]]
    with pytest.raises(ValueError, match="reach 5"):
        linear_attention(*(a[..., :3, :] for a in (q, k, v)), state=state, terms=longer, causal=True)


def test_in_place_is_a_stream_now():
    with pytest.warns(
        DeprecationWarning, match=r"in_place has no effect on a State now, isopos\.Stream overwrites its sums"
    ):
        state = State(in_place=True)
    q, k, v = inputs(1, t=2)
    _, after = linear_attention(q, k, v, causal=True, state=state, return_state=True)
    sums = after.tensors["sum0"].clone()
    linear_attention(q[..., :1, :], k[..., :1, :], v[..., :1, :], causal=True, state=after, return_state=True)
    assert torch.equal(after.tensors["sum0"], sums)


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_stream_goes_on_with_as_many_samples(kind):
    """Zero samples are a different number and an error. Zero tokens leave the state unchanged."""
    q, k, v = inputs(2, t=3)
    _, state = ATTENTION[kind](q, k, v, causal=True, return_state=True)
    with pytest.raises(ValueError, match=r"state: expected one of \[0, 2\] samples and heads, got one of \[2, 2\]"):
        ATTENTION[kind](q[:0], k[:0], v[:0], state=state, causal=True, return_state=True)
    decayed = {"causal": True, "return_state": True}
    _, after = ATTENTION[kind](q, k, v, decay=Decay(torch.ones(2))(torch.arange(6).view(2, 3, 1)), **decayed)
    g = Decay(torch.ones(2))(torch.arange(9, 18).view(3, 3, 1))
    with pytest.raises(ValueError, match=r"state: expected one of \[3, 2\] samples and heads, got one of \[2, 2\]"):
        ATTENTION[kind](*(x[:1].expand(3, -1, -1, -1) for x in (q, k, v)), decay=g, state=after, **decayed)
    gated = {"phases": [ForgetGate(HEAD_DIM, 2)], "causal": True, "return_state": True}
    _, after = ATTENTION[kind](q, k, v, **gated)
    for n in (0, 1):
        with pytest.raises(ValueError, match=rf"state: expected one of \[{n}, 2\] samples and heads, got one of \[2, 2\]"):
            ATTENTION[kind](q[:n], k[:n], v[:n], state=after, **gated)
    out, after = ATTENTION[kind](q[:, :, :0], k[:, :, :0], v[:, :, :0], state=state, causal=True, return_state=True)
    assert out.shape == (2, 2, 0, HEAD_DIM)
    assert all(torch.equal(x, after[name]) for name, x in state.tensors.items())
