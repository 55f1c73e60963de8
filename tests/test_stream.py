"""Test that streams equal attention, token by token and chunk by chunk, on every code path."""

import copy
import itertools
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import close, perturb, with_edges
from structures import over_covering

import isopos
from isopos import attention, schemes
from isopos import stream as stream_module
from isopos.decays import Decay
from isopos.models import Decoder
from isopos.ops import library
from isopos.ops.library import libraries
from isopos.ops.linear import Clamped
from isopos.ops.linear.cpu import CpuSteps
from isopos.ops.linear.step import TorchSteps
from isopos.positions import Line
from isopos.state import State
from isopos.stream import AHEAD, Stream

NEEDED = pytest.mark.skipif(not libraries()[0], reason=f"no library is installed: {libraries()[1]}")
PREPARED = ("cosformer", "lrpe-orthogonal", "lrpe-permutation", "lrpe-unitary", "none", "permuteformer", "retnet", "rope")
every = over_covering(lambda case, kind: isinstance(case.group, Line) and not case.outside and case.streams(kind))


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def prepared(monkeypatch):
    """Number of calls of steps that overwrite their sums."""
    calls, call = [], CpuSteps.__call__

    def counted(steps, *token):
        calls.extend([1] if steps.call.state.sums == steps.call.saved.sums else [])
        return call(steps, *token)

    monkeypatch.setattr(CpuSteps, "__call__", counted)
    return calls


def content(scheme, t, *batch, dtype=torch.float32):
    """Random q, k and v of t tokens."""
    width, draw = scheme.encoding.features, torch.Generator().manual_seed(0)
    widths = width, width, width // scheme.width
    return [torch.randn(*batch, scheme.heads, t, e, generator=draw, dtype=dtype) for e in widths]


def tokens(given):
    """q, k and v of each token."""
    for i in range(given[0].shape[-2]):
        yield tuple(x[..., i : i + 1, :] for x in given)


def by_states(scheme, given):
    """Outputs of tokens and the last state, computed by attention with states."""
    attend, found, state = getattr(attention, f"{scheme.attention}_attention"), [], State()
    for i, token in enumerate(tokens(given)):
        at = scheme.at(torch.tensor([[i]]), state=state, dtype=given[0].dtype)
        out, state = attend(*token, **at, causal=True, return_state=True)
        found.append(out)
    return torch.cat(found, -2), state


def same(state, other, equal=torch.equal):
    """Whether two states are equal, bit for bit."""
    assert (state.kind, state.fingerprint, set(state.tensors)) == (other.kind, other.fingerprint, set(other.tensors))
    return all(equal(x, other[name]) for name, x in state.tensors.items())


def near(x, other):
    """Whether tensors are equal up to rounding, since matrix products round differently for other numbers of tokens."""
    if x.is_floating_point():
        close(x, other, roundings=64)
    return x.is_floating_point() or torch.equal(x, other)


def called(stream, given, *cuts, x=None):
    """Outputs of the tokens between cuts, one call each."""
    parts = [slice(*pair) for pair in itertools.pairwise(cuts)]
    return torch.cat([stream(*(a[..., p, :] for a in given), None if x is None else x[..., p, :]) for p in parts], -2)


@pytest.fixture
def checks(monkeypatch):
    """Numbers of tokens of the calls that were checked."""
    calls, check = [], stream_module.check_linear
    monkeypatch.setattr(
        stream_module, "check_linear", lambda q, *args, **more: calls.append(q.shape[-2]) or check(q, *args, **more)
    )
    return calls


def no_few(monkeypatch):
    """Chunks of any length take the code for chunks."""
    for kind in (CpuSteps, TorchSteps):
        monkeypatch.setattr(kind, "few", 1)


@every
def test_every_scheme(case, kind):
    scheme = perturb(case.build(attention=kind))
    given = content(scheme, 5, 2)
    expected, state = by_states(scheme, given)
    stream = Stream(scheme)
    assert near(called(stream, given, *range(6)), expected)
    assert stream.length == 5
    assert same(stream.state, state, near)


@pytest.mark.parametrize("decay", ["none", "retnet"])
def test_a_shape_is_checked_once(monkeypatch, checks, decay):
    no_few(monkeypatch)
    scheme = isopos.rope(32, 3, decay=decay)
    given, stream = content(scheme, 40, 2), Stream(scheme)
    expected = scheme(*given, isopos.sequence(40), causal=True)
    out = called(stream, given, 0, 5, 6, 7, 12, 13, 18, 25, 26, 33, 38, 39, 40)
    close(out, expected, roundings=64)
    assert checks == [5, 1, 7]
    assert len(stream._chunks) == 2
    for t in range(8, 8 + stream_module.CHUNKS):
        stream(*content(scheme, t, 2))
    assert len(stream._chunks) == stream_module.CHUNKS


@NEEDED
def test_a_few_tokens_go_one_by_one(checks, prepared):
    scheme = isopos.retnet(32, 3)
    given, stream = content(scheme, 60, 2), Stream(scheme)
    expected, state = by_states(scheme, given)
    out = called(stream, given, 0, 4, 8, 12, 14, 18, 38, 58, 60)
    assert near(out, expected)
    assert near(stream.state["sum0"], state["sum0"])
    assert checks == [4, 1, 2, 20]
    assert len(prepared) == 3 + 4 + 4 + 2


@pytest.mark.parametrize("name", ["ape-grid", "rope-axial"])
def test_positions_of_several_columns_are_given(name):
    scheme = perturb(schemes.REGISTRY[name](16, 2))
    given, x = content(scheme, 20, 2), isopos.grid(4, 5)
    stream, expected = Stream(scheme), scheme(*given, x, causal=True)
    close(called(stream, given, 0, 2, 3, 4, 5, 12, 19, 20, x=x), expected, roundings=64)
    with pytest.raises(ValueError, match="x: expected positions of"):
        stream(*(a[..., :1, :] for a in given))
    assert stream.length == 20


@pytest.mark.parametrize("samples", [False, True])
def test_positions_may_leave_some_out(checks, samples):
    scheme = isopos.retnet(16, 2)
    given, stream = content(scheme, 12, 2), Stream(scheme)
    x = torch.arange(12)[:, None] ** 2
    x = torch.stack((x, x + 3)) if samples else x
    expected = scheme(*given, x, causal=True)
    close(called(stream, given, 0, 1, 2, 3, 6, 9, 10, 11, 12, x=x), expected, roundings=64)
    assert checks == [1, 3]
    before = stream.state
    for t in (1, 3):
        with pytest.raises(ValueError, match="decay: expected log decays that do not increase"):
            stream(*(a[..., :t, :] for a in given), x[..., :t, :])
    assert same(stream.state, before)
    assert stream.length == 12


@pytest.mark.parametrize("shared", [False, True], ids=["", "numpy"])
@pytest.mark.parametrize("steps", [(0, 1, 2, 3, 4), (0, 2, 4)], ids=["tokens", "chunks"])
def test_positions_that_changed_in_place_are_read_again(steps, shared):
    """A loop that overwrites its positions, in place or in memory that NumPy shares, gets the new ones."""
    scheme = isopos.rope(16, 2)
    given, stream, found = content(scheme, 4), Stream(scheme), []
    places = torch.tensor([0.0, 2, 3, 7])[:, None]
    x = places[: steps[1]].clone()
    for start, stop in itertools.pairwise(steps):
        if shared:
            x.numpy()[:] = places[start:stop]
        else:
            x.copy_(places[start:stop])
        found.append(stream(*(a[..., start:stop, :] for a in given), x))
    close(torch.cat(found, -2), scheme(*given, places, causal=True), roundings=64)


def test_gradients_reach_through_chunks():
    scheme, outs = isopos.retnet(16, 2), []
    given = [a.requires_grad_() for a in content(scheme, 9, 2)]
    with torch.enable_grad():
        whole = torch.autograd.grad(scheme(*given, isopos.sequence(9), causal=True).square().sum(), given)
        stream = Stream(scheme)
        found = torch.autograd.grad(called(stream, given, 0, 3, 4, 5, 8, 9).square().sum(), given)
    for own, other in zip(found, whole, strict=True):
        close(own, other, roundings=64)
    with torch.no_grad():
        outs = called(stream, given, 0, 1, 2, 5, 8)
    assert not outs.requires_grad


def test_what_is_no_tensor_is_an_error_and_the_stream_goes_on():
    scheme = isopos.rope(16, 2)
    given, stream = content(scheme, 4, 2), Stream(scheme)
    q, k, v = (a[..., :1, :] for a in given)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for wrong in ((None, k, v), (q, [1.0], v), (q, k, "v")):
                with pytest.raises(TypeError, match="expected a tensor, got"):
                    stream(*wrong)
            with pytest.raises(ValueError, match=r"positions: expected .* got list"):
                stream(q, k, v, [[0]])
            with pytest.raises(TypeError, match="windows"):
                stream(q, k, v, windows=3)
        stream(q, k, v)
    assert stream.length == 2


def test_an_old_name_and_what_was_pickled_by_it():
    scheme = isopos.retnet(16, 2)
    given, stream = content(scheme, 5, 2), Stream(scheme)
    called(stream, given, 0, 1, 2, 3)
    with pytest.warns(DeprecationWarning, match="beside is tables_from now"):
        assert Stream(scheme, stream.state, length=3, beside=stream)._tables is stream._tables
    text = pickle.dumps(stream, protocol=0)
    for new, old in (("stream\nStream", "nn.steps\nSteps"), ("stream\nTables", "nn.steps\n_Ahead")):
        assert f"cisopos.{new}".encode() in text
        text = text.replace(f"cisopos.{new}".encode(), f"cisopos.{old}".encode())
    with pytest.warns(DeprecationWarning, match="isopos.nn.steps") as told:
        again = pickle.loads(text)
    assert {str(one.message).split()[0] for one in told} == {"isopos.nn.steps.Steps", "isopos.nn.steps._Ahead"}
    assert torch.equal(called(again, given, 3, 4, 5), called(stream, given, 3, 4, 5))


@NEEDED
@pytest.mark.parametrize("denominator", ["plain", "encoded", "none"])
@pytest.mark.parametrize("name", PREPARED)
def test_longer_than_tables_reach(prepared, name, denominator):
    """With values wider than queries. The first tokens of states are compared with the whole in float64."""
    scheme, length = perturb(schemes.REGISTRY[name](32, 3, denominator=denominator)), 2 * AHEAD + 3
    q, k, v = with_edges(*content(scheme, length, 2))
    given, steps = (q, k, torch.cat((v, v[..., :16].flip(-2)), -1)), Stream(scheme)
    expected, state = by_states(scheme, given)
    first = [a[..., :9, :].double() for a in given]
    whole = attention.linear_attention(*first, **scheme.at(isopos.sequence(9), dtype=torch.float64), causal=True)
    torch.testing.assert_close(expected[..., :9, :], whole.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([steps(*token) for token in tokens(given)], -2), expected)
    assert len(prepared) == length - 1
    assert same(steps.state, state)


class Hastening(Decay):
    """g(x) = -rate * x^2: every token decays by more than the one before it."""

    def forward(self, x):
        return super().forward(x.double().square())


@NEEDED
@pytest.mark.parametrize("denominator", ["plain", "encoded", "none"])
def test_each_step_has_the_decay_of_its_token(prepared, denominator):
    scheme = isopos.rope(32, 3, decay=Hastening(torch.full((3,), 0.01)), denominator=denominator)
    given, steps = content(scheme, 12, 2), Stream(scheme)
    expected, state = by_states(scheme, given)
    assert torch.equal(torch.cat([steps(*token) for token in tokens(given)], -2), expected)
    assert len(prepared) == 11
    assert same(steps.state, state)


@pytest.mark.parametrize("denominator", ["plain", "encoded", "none"])
@pytest.mark.parametrize("name", PREPARED)
def test_without_a_kernel_longer_than_tables_reach(monkeypatch, name, denominator):
    """The same operations as `linear_attention` without a kernel, except for checks: bit for bit."""
    monkeypatch.setattr(library, "libraries", lambda: ({}, "none"))
    monkeypatch.setattr(stream_module, "AHEAD", 4)
    calls, call = [], TorchSteps.__call__
    monkeypatch.setattr(TorchSteps, "__call__", lambda *args: calls.append(1) or call(*args))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scheme, length = perturb(schemes.REGISTRY[name](16, 3, denominator=denominator)), 11
        given, steps = content(scheme, length, 2, dtype=dtype), Stream(scheme)
        expected, state = by_states(scheme, given)
        calls.clear()
        assert torch.equal(torch.cat([steps(*token) for token in tokens(given)], -2), expected)
        assert len(calls) == length - 1
        assert same(steps.state, state)


@pytest.mark.parametrize("name", ["rope", "retnet"])
def test_without_a_kernel_what_decayed_to_nothing_is_gone(monkeypatch, name):
    """A weight of zero removes NaN, as in a whole sequence; without decay NaN stays."""
    monkeypatch.setattr(library, "libraries", lambda: ({}, "none"))
    scheme = schemes.REGISTRY[name](16, 3, decay=Decay(torch.full((3,), 400.0)) if name == "retnet" else "none")
    q, k, v = content(scheme, 5, 2)
    v[:, :, 2] = torch.nan
    steps = Stream(scheme)
    out = torch.cat([steps(*token) for token in tokens((q, k, v))], -2)
    seen = [2] if name == "retnet" else [2, 3, 4]
    assert [i for i in range(5) if not out[..., i, :].isfinite().all()] == seen


def test_without_a_kernel_inference_mode_may_end(monkeypatch):
    """Tensors created inside cannot be overwritten outside: one step by attention, then the step is prepared again."""
    monkeypatch.setattr(library, "libraries", lambda: ({}, "none"))
    scheme = isopos.retnet(16, 3)
    given, steps, outs = content(scheme, 8, 2), Stream(scheme), []
    for i, token in enumerate(tokens(given)):
        with torch.inference_mode(i < 4):
            outs.append(steps(*token).clone())
    expected, state = by_states(scheme, given)
    assert torch.equal(torch.cat(outs, -2), expected)
    assert same(steps.state, state)


@pytest.mark.parametrize("changed", range(3), ids=["q", "k", "v"])
@NEEDED
def test_one_layout_alone_may_change(prepared, changed):
    scheme = isopos.rope(32, 3)
    given = content(scheme, 6, 2)
    expected, _ = by_states(scheme, given)
    steps = Stream(scheme)
    for i, token in enumerate(tokens(given)):
        token = [x.contiguous() for x in token]
        if i in (2, 4):
            token[changed] = token[changed].transpose(0, 1).contiguous().transpose(0, 1)  # samples of a head side by side
        assert torch.equal(steps(*token), expected[..., i : i + 1, :])
    assert len(prepared) == 5


@NEEDED
def test_layouts_may_change(prepared):
    scheme = isopos.rope(32, 3, decay="retnet")
    given = content(scheme, 9, 2)
    expected, _ = by_states(scheme, given)
    steps = Stream(scheme)
    for i, (q, k, v) in enumerate(tokens(given)):
        if i in (4, 5):
            q = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a token next to each other
        if i == 7:
            v = torch.stack((v, v), -1)[..., 0]  # every other number
        assert torch.equal(steps(q, k, v), expected[..., i : i + 1, :])
    assert len(prepared) == 7  # all but the first and the last layout


@NEEDED
def test_another_layout_may_stay_when_tables_are_made_again(monkeypatch, prepared):
    monkeypatch.setattr(stream_module, "AHEAD", 3)
    scheme = isopos.rope(32, 3)
    given, steps = content(scheme, 12, 2), Stream(scheme)
    expected, _ = by_states(scheme, given)
    for i, (q, k, v) in enumerate(tokens(given)):
        q = q if i < 2 else torch.cat((q, q), -1)[..., :32]  # rows with a gap after each
        assert torch.equal(steps(q, k, v), expected[..., i : i + 1, :])
    assert len(prepared) == 11


@NEEDED
@pytest.mark.parametrize("fails", [False, True])
def test_what_does_not_fit_goes_the_long_way(prepared, fails):
    """With a mask, options, gradients or other shapes, calls give attention's result or error, and the stream continues."""
    scheme = isopos.retnet(32, 3)
    given = content(scheme, 6, 2)
    steps = Stream(scheme)
    first, second, third, *_ = tokens(given)
    steps(*first)
    steps(*second)
    before = steps.state
    if fails:
        q, k, v = third
        wrong = (q.double(), k, v, "float64"), (q[:1], k[:1], v[:1], "samples"), (q[..., :16], k, v, "features")
        for *token, match in wrong:
            with pytest.raises(ValueError, match=match):
                steps(*token)
        assert same(steps.state, before)
        assert steps.length == 2
    at = scheme.at(torch.tensor([[2]]), state=before)
    mask = torch.tensor([[True], [False]])
    expected, after = attention.linear_attention(*third, **at, causal=True, mask=mask, return_state=True)
    assert torch.equal(steps(*third, mask=mask), expected)
    assert same(steps.state, after)
    assert len(prepared) == 1


@NEEDED
def test_gradients_are_not_lost(prepared):
    scheme = isopos.lrpe_unitary(32, 3, learned=True)
    steps = Stream(scheme)
    for n, token in enumerate(tokens(content(scheme, 6, 2))):
        with torch.set_grad_enabled(n in (2, 4)):
            out = steps(*token)
        assert out.requires_grad == (n in (2, 4))
    assert len(prepared) == 1  # of n = 1: a step with gradients prepares none


@NEEDED
def test_default_dtypes_are_not_those_of_steps(prepared):
    scheme = isopos.retnet(32, 3)
    given, before = content(scheme, 4, 2), torch.get_default_dtype()
    expected, _ = by_states(scheme, given)
    steps = Stream(scheme)
    try:
        torch.set_default_dtype(torch.float64)
        with Clamped():
            found = [steps(*token) for token in tokens(given)]
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.cat(found, -2), expected)
    assert len(prepared) == 3


@NEEDED
def test_layers_share_tables(monkeypatch):
    scheme, calls = isopos.rope(32, 3), []
    given = content(scheme, AHEAD + 5, 2)
    first = Stream(scheme)
    layers = [first, Stream(scheme, tables_from=first), Stream(scheme, tables_from=first)]
    at = type(scheme).at

    def watched(self, x, *arguments, state=None, **more):
        calls.extend([] if state else [len(x)])
        return at(self, x, *arguments, state=state, **more)

    monkeypatch.setattr(type(scheme), "at", watched)
    for token in tokens(given):
        one, *others = (layer(*token) for layer in layers)
        assert all(torch.equal(one, other) for other in others)
    assert calls == [1, AHEAD, AHEAD]
    with pytest.raises(ValueError, match="tables_from"):
        Stream(scheme, tables_from=first)
    with pytest.raises(ValueError, match="tables_from"):
        Stream(isopos.rope(32, 3), length=first.length, tables_from=first)


@pytest.mark.parametrize(
    ("name", "heads", "width", "most", "count"),
    [
        pytest.param("rope", 64, 256, None, AHEAD, id="an angle a pair"),
        pytest.param("lrpe-orthogonal", 64, 256, None, AHEAD, id="angles and a matrix that all tokens share"),
        pytest.param("spe-sine", 3, 32, 5 * 2 * 3 * 32 * 32, 5, id="two matrices a token"),
    ],
)
def test_tables_reach_as_far_as_what_they_hold_for_a_token_allows(monkeypatch, name, heads, width, most, count):
    scheme, calls = schemes.REGISTRY[name](width, heads), []
    if most is not None:
        monkeypatch.setattr(stream_module, "TABLE_SIZE", most)
    at = type(scheme).at
    monkeypatch.setattr(type(scheme), "at", lambda self, x, *args, **kw: calls.append(len(x)) or at(self, x, *args, **kw))
    steps = Stream(scheme)
    for token in tokens(content(scheme, 3)):
        steps(*token)
    assert calls[-1] == count


@NEEDED
def test_a_state_given_or_taken_stays_as_it_is():
    scheme = isopos.retnet(32, 3)
    given = content(scheme, 8, 2)
    expected, _ = by_states(scheme, given)
    _, state = by_states(scheme, [x[..., :3, :] for x in given])
    copy = State.from_state_dict(state.state_dict())
    steps = Stream(scheme, state, length=3)
    later = list(tokens(given))[3:]
    outs = [steps(*later[0]), steps(*later[1])]
    middle = steps.state
    kept = State.from_state_dict({name: x.clone() for name, x in middle.state_dict().items()})
    outs += [steps(*token) for token in later[2:]]
    assert torch.equal(torch.cat(outs, -2), expected[..., 3:, :])
    assert same(state, copy)
    assert same(middle, kept)
    swapped = Stream(scheme, middle.reorder(torch.tensor([1, 0])), length=5)
    assert torch.equal(swapped(*(x.flip(0) for x in later[2])).flip(0), expected[..., 5:6, :])
    with pytest.raises(ValueError, match="x: expected positions of"):
        Stream(isopos.clock(32, 3))(*later[0])
    with pytest.raises(ValueError, match="length: expected the number of tokens in the state"):
        Stream(scheme, middle)
    with pytest.raises(ValueError, match="state: expected one of 9 tokens, got none"):
        Stream(scheme, State(), length=9)
    for wrong in (-3, True, 2.5, "5"):
        with pytest.raises(ValueError, match="length: expected an integer of at least 0, got"):
            Stream(scheme, state, length=wrong)
    with pytest.raises(TypeError, match="state"):
        Stream(scheme, {})  # pyright: ignore[reportArgumentType]


@NEEDED
def test_denominators_are_counted(prepared):
    scheme = isopos.none(32, 3, feature_map="identity")
    steps = Stream(scheme)
    q, k, v = torch.ones(3, 2, 3, 1, 32)
    steps(q, k, v)
    with Clamped() as clamped:
        steps(q, k, v)
        steps(0 * q, k, v)
    steps(0 * q, k, v)
    assert (clamped.count, clamped.total, len(prepared)) == (6, 12, 3)


@NEEDED
def test_positions_end_where_the_scheme_does():
    scheme = isopos.cosformer(32, 3, length=AHEAD // 2)
    given = content(scheme, AHEAD // 2 + 1)
    *first, last = tokens(given)
    steps = Stream(scheme)
    for token in first:
        steps(*token)
    with pytest.raises(ValueError, match="positions"):
        steps(*last)
    assert steps.length == AHEAD // 2


@pytest.mark.parametrize("name", ["rope", "retnet", "sinusoidal", "rope:attention=softmax", "horn-clipped:denominator=none"])
def test_a_decoder_goes_on(name):
    name, *options = name.split(":")
    scheme = schemes.build(name, 16, 2, dict(option.split("=") for option in options))
    model = Decoder(50, 32, 2, scheme).eval()
    text = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    _, stream = model.prefill(text[:, :5])
    steps = model.steps(stream)
    for i in range(5, 12):
        usual, stream = model.step(text[:, i], stream)
        assert torch.equal(steps(text[:, i]), usual)
    assert steps.length == steps.stream.length == 12
    assert all(same(one, other) for one, other in zip(steps.stream.states, stream.states, strict=True))
    new = model.steps()
    torch.testing.assert_close(torch.stack([new(token) for token in text.T], 1), model(text), rtol=1e-4, atol=1e-4)


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=NEEDED), False], ids=["kernel", "none"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_by_themselves(monkeypatch, how, compiled):
    if not compiled:
        monkeypatch.setattr(library, "libraries", lambda: ({}, "none"))
    scheme = isopos.retnet(16, 3)
    given, first = content(scheme, 7, 2), Stream(scheme)
    expected, state = by_states(scheme, given)
    steps = [first, Stream(scheme, tables_from=first)]
    start, later = list(tokens(given))[:4], list(tokens(given))[4:]
    for token in start:
        for one in steps:
            one(*token)
    copies = COPIES[how](steps) if how != "copy" else [copy.copy(one) for one in steps]
    for one in (*copies, *steps):  # which share no sums
        assert torch.equal(torch.cat([one(*token) for token in later], -2), expected[..., 4:, :])
        assert one.length == 7
        assert all(torch.equal(x, state[name]) for name, x in one.state.tensors.items())
    assert copies[0]._tables is copies[1]._tables


def test_threads_may_share_tables(monkeypatch):
    """A thread uses the tables of one thread, never parts of two."""
    scheme = isopos.rope(16, 3)
    given, first, at = content(scheme, 9, 2), Stream(scheme), type(scheme).at
    expected, _ = by_states(scheme, given)
    monkeypatch.setattr(stream_module, "AHEAD", 3)

    def slowly(self, x, *arguments, **more):
        found = at(self, x, *arguments, **more)
        time.sleep(0.01)
        return found

    monkeypatch.setattr(type(scheme), "at", slowly)
    layers = [Stream(scheme, tables_from=first) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda steps: torch.cat([steps(*token) for token in tokens(given)], -2), layers))
    assert all(torch.equal(out, expected) for out in found)


def test_a_stream_refuses_what_it_has_itself():
    stream, (q, k, v) = Stream(isopos.rope(16, 4)), torch.randn(3, 1, 4, 5, 16)
    for name, value in (("causal", False), ("state", State()), ("group", "world")):
        with pytest.raises(ValueError, match=f"{name}: expected .* with a Stream"):
            stream(q, k, v, **{name: value})
    assert stream.length == 0
    assert not torch.allclose(Stream(stream.scheme)(q, k, v, denominator=None), stream(q, k, v))


@pytest.mark.parametrize("name", ["rope", "pope", "rope-mixed"])
@torch.no_grad()
def test_terms_of_keys_see_cached_keys_unrotated(name):
    other = schemes.build(name, 16, 2, {"attention": "softmax"} | ({"axes": 1} if name == "rope-mixed" else {}))
    bias = perturb(isopos.deberta(16, 2)).bias
    scheme = schemes.Scheme(
        other.encoding, 2, attention="softmax", bias=bias, **({"phases": other.phases} if other.phases else {})
    )
    q, k, v = torch.randn(3, 2, 2, 9, 16, dtype=torch.float64)
    mask = torch.rand(2, 9) > 0.2
    whole = scheme(q, k, v, isopos.sequence(9), causal=True, mask=mask)
    k = torch.where(mask[:, None, :, None], k, torch.nan)
    stream = Stream(scheme)
    found = [stream(*(a[:, :, n : n + 3] for a in (q, k, v)), mask=mask[:, n : n + 3]) for n in range(0, 9, 3)]
    torch.testing.assert_close(torch.cat(found, -2)[mask[:, None].expand(2, 2, 9)], whole[mask[:, None].expand(2, 2, 9)])


@pytest.mark.parametrize(
    ("name", "options"), [("ape-tree", {"branches": 2}), ("t5", {}), ("ape-sequence", {"locality": 0.9})], ids=str
)
@torch.no_grad()
def test_a_tensor_of_positions_may_be_given_twice(name, options):
    """Its tables depend on the positions before it, too."""
    scheme = perturb(schemes.build(name, 8, 2, {"attention": "softmax"} | options))
    same = torch.zeros(1, scheme.group.columns, dtype=torch.int64)
    xs = [same, same, same + 1]
    if name == "ape-tree":  # parents and branches
        xs = [same - 1, same, same, torch.tensor([[0, 1]]), torch.tensor([[2, 0]])]
    q, k, v = torch.randn(3, 1, 2, len(xs), 8, dtype=torch.float64)
    whole = attention.softmax_attention(q, k, v, **scheme.at(torch.cat(xs), dtype=q.dtype), causal=True)
    stream = Stream(scheme)
    found = [stream(*(a[:, :, n : n + 1] for a in (q, k, v)), x) for n, x in enumerate(xs)]
    torch.testing.assert_close(torch.cat(found, -2), whole)


@torch.no_grad()
def test_float16_keys_of_maps_that_are_no_isometries_stay_finite():
    """At position 11,700 the factors of xpos leave float16."""
    scheme, x = schemes.REGISTRY["xpos"](16, 2, attention="softmax"), torch.arange(40)[:, None] * 300
    q, k, v = (a.half() for a in torch.randn(3, 1, 2, 40, 16))
    stream = Stream(scheme)
    found = [stream(*(a[:, :, n : n + 5] for a in (q, k, v)), x[n : n + 5]) for n in range(0, 40, 5)]
    whole = attention.softmax_attention(q, k, v, **scheme.at(x), causal=True)
    assert bool(whole.isfinite().all())
    torch.testing.assert_close(torch.cat(found, -2), whole)


@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_default_positions_may_not_go_back_behind_given_ones(count):
    stream, (q, k, v) = Stream(isopos.rope(16, 2, decay="retnet")), torch.randn(3, 1, 2, 9, 16)
    for n in range(3):
        stream(*(a[:, :, n : n + 1] for a in (q, k, v)), torch.tensor([[100 + n]]))
    with pytest.raises(ValueError, match="decay: expected log decays that do not increase"):
        stream(*(a[:, :, 3 : 3 + count] for a in (q, k, v)))
