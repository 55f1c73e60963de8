"""Test calls of a scheme, and one scheme for the streams of several layers."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import ATTENTION, HEAD_DIM, HEADS, close, each, inputs, inputs_of, perturb, scheme_case
from structures import over_covering

import isopos
from isopos import Attention, encodings, schemes
from isopos.positions import Line, sequence
from isopos.state import State

WIDTH = HEADS * HEAD_DIM


@over_covering()
def test_a_call_is_attention_with_all_of_the_scheme(case, kind):
    scheme = perturb(case.build(attention=kind))
    content, x, mask = inputs_of(scheme, 2, t=9), case.positions(2, t=9), torch.rand(2, 9) < 0.8
    for causal in case.ways:
        expected = ATTENTION[kind](*content, **scheme.at(x, dtype=torch.float64), causal=causal, mask=mask)
        if scheme.choices["denominator"] == "none":
            expected = F.layer_norm(expected, expected.shape[-1:])
        assert torch.equal(scheme(*content, x, causal=causal, mask=mask), expected)


def test_a_call_keeps_the_decay():
    """Compare with ALiBi by hand. A user of `scheme.encoding` alone would lose the decay."""
    q, k, v = inputs(2, t=30)
    offset = torch.arange(30) - torch.arange(30)[:, None]
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)
    bias = (slopes[:, None, None] * offset).masked_fill(offset > 0, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    close(isopos.alibi(HEAD_DIM, 2, attention="softmax")(q, k, v, sequence(30), causal=True), expected)


def test_other_positions_of_keys():
    scheme = isopos.rope(HEAD_DIM, HEADS)
    q, k, v = inputs(2, t=3, s=9)
    x, y = sequence(9)[6:], sequence(9)
    expected = ATTENTION["linear"](q, k, v, **scheme.at(x, y, dtype=q.dtype), causal=True)
    assert torch.equal(scheme(q, k, v, x, y, causal=True), expected)


@over_covering()
def test_what_is_evaluated_already_serves_between_other_positions(case, kind):
    scheme = perturb(case.build(attention=kind))
    x, y = case.positions(2, t=5), case.positions(2, t=5)
    own = tuple(scheme.at(one, dtype=torch.float64) for one in (x, y))
    (q, k, v), attend = inputs_of(scheme, 2, t=5), ATTENTION[kind]
    if scheme.decay is not None and kind == "linear":
        return  # it weighs no pairs of two sequences
    again = scheme.at(x, y, dtype=torch.float64, evaluated=own)
    more = {"causal": not case.both_ways}
    close(attend(q, k, v, **again, **more), attend(q, k, v, **scheme.at(x, y, dtype=torch.float64), **more), roundings=0)


@over_covering(lambda case, kind: isinstance(case.group, Line) and not case.outside)
def test_a_stream_of_calls_is_the_whole(case, kind):
    scheme = perturb(case.build(attention=kind))
    content, x = inputs_of(scheme, 2, t=9), case.positions(t=9)
    state, found = State(), []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        y, state = scheme(*(a[..., start:stop, :] for a in content), x[start:stop], state=state, causal=True)
        found.append(y)
    close(torch.cat(found, -2), scheme(*content, x, causal=True), roundings=1e6)


# Several layers

LAYERS, T = 3, 9
SHARED = [("rope", "linear"), ("rope", "softmax"), ("retnet", "linear"), ("alibi", "softmax"), ("t5", "softmax")]
SHARED += [("ape-sequence", "linear"), ("permuteformer", "linear"), ("horn-clipped", "linear"), ("ape-tree", "softmax")]
SHARED += [("ape-sequence-locality", "softmax"), ("transformer-xl", "softmax")]


@each(("name", "kind"), SHARED)
def test_layers_share_tables_and_have_separate_streams(monkeypatch, name, kind):
    scheme = perturb(scheme_case(name).build(attention=kind))
    layers = [Attention(WIDTH, scheme).double() for _ in range(LAYERS)]
    tokens, x, counts = torch.randn(2, T, WIDTH, dtype=torch.float64), sequence(T), []
    if name == "ape-tree":
        x = torch.tensor([[-1, -1], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [3, 1], [3, 0], [7, 1]])
    with torch.no_grad():
        whole, at = tokens, scheme.at(x, dtype=torch.float64)
        for layer in layers:
            whole = whole + layer(whole, at, causal=True)
        evaluate = type(scheme.encoding).query
        monkeypatch.setattr(type(scheme.encoding), "query", lambda *a, **o: counts.append(0) or evaluate(*a, **o))
        forward = type(scheme.encoding).forward
        monkeypatch.setattr(type(scheme.encoding), "forward", lambda *a, **o: counts.append(0) or forward(*a, **o))
        states, found = [State()] * LAYERS, []
        for i in range(T):
            counts.clear()
            y, at = tokens[:, i : i + 1], scheme.at(x[i : i + 1], state=states[0], dtype=torch.float64)
            evaluations = len(counts)
            for n, layer in enumerate(layers):
                out, states[n] = layer(y, at.of(states[n]), causal=True, return_state=True)
                y = y + out
            found.append(y)
            assert len(counts) == evaluations > 0, "no layer evaluates the scheme again"
    close(torch.cat(found, 1), whole, roundings=1e6)
    assert len({id(state) for state in states}) == LAYERS


def test_only_streams_go_on_to_other_layers():
    scheme = isopos.rope(HEAD_DIM, HEADS)
    with pytest.raises(
        ValueError, match=r"state: expected arguments of a stream, scheme\.at\(x, state=\.\.\.\), got arguments without"
    ):
        scheme.at(sequence(3)).of(State())
    other = isopos.rope(HEAD_DIM, HEADS, base=100.0)
    _, state = other(*inputs(1, t=3), sequence(3), state=State(), causal=True)
    with pytest.raises(ValueError, match="state: expected one of this scheme with these options"):
        scheme.at(sequence(3), state=State()).of(state)


def test_softmax_attention_has_no_feature_map():
    scheme = isopos.rope(HEAD_DIM, HEADS, attention="softmax")
    assert not hasattr(scheme, "feature_map"), "what walks over attributes, as torch.jit.trace, finds none"


def test_a_fingerprint_is_the_same_in_training_and_in_evaluation():
    assert isopos.t5(8, 2).eval().fingerprint == isopos.t5(8, 2).fingerprint


def test_a_fingerprint_covers_only_choices_of_isopos():
    marked = isopos.t5(8, 2)
    marked.encoding._is_hf_initialized = True  # as transformers marks all modules
    assert marked.fingerprint == isopos.t5(8, 2).fingerprint


@each(
    ("one", "other"),
    [
        ((1, 2), (1, 3)),
        ([torch.ones(2)], [torch.zeros(2)]),
        ([np.ones(2)], [np.zeros(2)]),
        ({"a": [0.5]}, {"a": [0.25]}),
        (torch.tensor(1, dtype=torch.bfloat16), torch.tensor(2, dtype=torch.bfloat16)),
        (np.float64(1), np.float64(2)),
        (1j, 2j),
    ],
)
def test_a_fingerprint_covers_constants_wherever_they_are(one, other):
    def fingerprint(constant):
        encoding = type("Custom", (encodings.Identity,), {})(8)
        encoding.constant = constant
        return schemes.compose(encoding, 2, {}).fingerprint

    assert fingerprint(one) == fingerprint(copy.deepcopy(one)) != fingerprint(other)


def test_a_scheme_knows_how_it_was_made():
    scheme = isopos.permuteformer(8, 2, attention="softmax")
    name, options = scheme.origin
    assert (name, options["seed"], options["attention"]) == ("permuteformer", 0, "softmax")
    assert schemes.REGISTRY[name](**options).fingerprint == scheme.fingerprint
    absorbed = isopos.ape_sequence(8, 2, attention="softmax")
    assert isopos.nn.absorb(absorbed, torch.nn.Linear(16, 16)).origin is None
