"""Test content-dependent steps by definition: a weight depends on the tokens after its key up to its query."""

import dataclasses
import math
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from cases import ATTENTION, HEAD_DIM, HEADS, close, gradients, inputs, perturb, stream

import isopos
from isopos import encodings, laws, models, schemes
from isopos.attention import naive_linear_attention
from isopos.bases import OddEven
from isopos.decays import Decay
from isopos.encodings import rope_frequencies
from isopos.nn import absorb
from isopos.phases import ContentPhase, ForgetGate, SelectiveRotation
from isopos.positions import sequence
from isopos.scheme import Scheme
from isopos.stream import Stream

T = 12
both = pytest.mark.parametrize("kind", ATTENTION)
every = pytest.mark.parametrize("name", ["fox", "selective", "selective:forget", "carope"])


def made(name, kind, size=0.5, **more):
    name, _, decay = name.partition(":")
    return perturb(
        schemes.REGISTRY[name](HEAD_DIM, HEADS, attention=kind, **({"decay": decay} if decay else {}), **more), size
    )


def between(steps):
    """The sum of the steps ``[b h t c]`` of tokens m with s < m <= t: ``[b h t s c]``; zero where there are none."""
    row = torch.arange(steps.shape[-2])
    part = (row > row[:, None]) & (row <= row[:, None, None])  # [t s m]
    return torch.einsum("tsm,...mc->...tsc", part.to(steps.dtype), steps)


def by_pairs(scheme, q, k, v):
    """Attention pair by pair, with sums of log gates and angles between the tokens instead of cumulative sums."""
    linear, causal = scheme.attention == "linear", torch.ones(q.shape[-2], q.shape[-2]).tril() > 0
    a, b = (scheme.feature_map(x) for x in (q, k)) if linear else (q, k)
    plain = weight = a @ b.mT
    if (turn := scheme.turn) is not None:
        content = torch.einsum("bhtd,hfd->bhtf", k, turn.weight) + turn.bias.weight[:, None]
        powers = torch.arange(HEAD_DIM // 2)
        angle = between(content * turn.frequency if content.shape[-1] > 1 else (1 / (1 + F.softplus(content))) ** powers)
        (x, y), (u, w) = ((z[..., ::2], z[..., 1::2]) for z in (a, b))
        x, y, u, w = x[..., :, None, :], y[..., :, None, :], u[..., None, :, :], w[..., None, :, :]
        weight = ((x * u + y * w) * angle.cos() + (x * w - y * u) * angle.sin()).sum(-1)
    log_gate = torch.zeros(())
    if (forget := scheme.forget) is not None:
        gate = torch.sigmoid(torch.einsum("bhtd,hcd->bhtc", k, forget.weight) + forget.bias.weight[:, None])
        log_gate = between(gate.log())[..., 0]
    if linear:
        weight, plain = (torch.where(causal, x * log_gate.exp(), 0) for x in (weight, plain))
        return weight @ v / plain.sum(-1, keepdim=True)
    return (weight / HEAD_DIM**0.5 + log_gate).masked_fill(~causal, -torch.inf).softmax(-1) @ v


@both
@every
def test_attention_is_that_of_every_pair_with_all_gradients(name, kind):
    scheme, content = made(name, kind), inputs(2, t=T, requires_grad=True)
    out, expected = scheme(*content, sequence(T), causal=True), by_pairs(scheme, *content)
    close(out, expected)
    leaves = [*content, *scheme.parameters()]
    for fast, slow in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        close(fast, slow)
        assert slow.any()
    at = scheme.at(sequence(T), dtype=torch.float64)
    if kind == "linear":
        close(naive_linear_attention(*content, **at, causal=True), expected)


@both
def test_at_the_start_gates_are_one_half_and_angles_those_of_rope(kind):
    content, x = inputs(2, t=T, dtype=torch.float32), sequence(T)
    half = Decay(torch.full((HEADS,), math.log(2)))
    none, rope = schemes.none(HEAD_DIM, HEADS, attention=kind, decay=half), schemes.rope(HEAD_DIM, HEADS, attention=kind)
    for name, same in (("fox", none), ("selective", rope), ("carope", rope)):
        close(*(s(*content, x, causal=True) for s in (schemes.REGISTRY[name](HEAD_DIM, HEADS, attention=kind), same)))


@both
def test_gates_and_positions_are_independent(kind):
    """FoX with RoPE: rotations by positions, which need not be consecutive, and gates by content."""
    scheme, content = perturb(schemes.rope(HEAD_DIM, HEADS, attention=kind, decay="forget"), 0.5), inputs(2, t=T)
    x = 3 * sequence(T) + 5
    g = F.logsigmoid(content[1] @ scheme.forget.weight.mT + scheme.forget.bias.weight[:, None])[..., 0].cumsum(-1)
    at = scheme.at(x, dtype=torch.float64)
    given = {name: value for name, value in at.items() if name != "phases"} | {"decay": g}
    close(ATTENTION[kind](*content, **at, causal=True), ATTENTION[kind](*content, **given, causal=True))


@both
def test_pairs_of_the_half_layout_are_those_of_the_authors_code(kind):
    """Pairs (i, i + d/2) equal interleaved pairs of reordered features."""
    options = {"attention": kind, "base": 50.0}
    half, pairs = (perturb(schemes.selective(HEAD_DIM, HEADS, layout=a, **options), 0.5) for a in ("half", "interleaved"))
    (q, k, v), x = inputs(2, t=T), sequence(T)
    order = torch.arange(HEAD_DIM).view(2, -1).mT.flatten()  # 0, d/2, 1, d/2 + 1, ...
    with torch.no_grad():
        pairs.turn.weight.copy_(half.turn.weight[..., order])
        pairs.turn.bias.weight.copy_(half.turn.bias.weight)
    expected = pairs(q[..., order], k[..., order], v, x, causal=True)
    close(half(q, k, v, x, causal=True), expected)
    close(stream(half, (q, k, v), x, (0, 3, 4, T))[0], expected)
    assert (pairs(q, k, v, x, causal=True) - expected).abs().max() > 1e-3


@both
@every
def test_a_stream_is_exact_however_far_its_path(name, kind):
    """A state at 10^8 nats and radians gives the same outputs, because sums are float64."""
    scheme, content = made(name, kind), inputs(2, t=T)
    x, cut = sequence(T), 7
    whole = scheme(*content, x, causal=True)
    start, state = stream(scheme, [a[..., :cut, :] for a in content], x, (0, cut))
    assert state["path"].dtype == torch.float64
    columns = state["path"].shape[-1]
    assert columns == (scheme.forget is not None) + (0 if scheme.turn is None else HEAD_DIM // 2)
    far = 2 * torch.pi * 10**7  # whole turns
    moved = {n: a - far if n in ("path", "decay", "decays") else a for n, a in state.tensors.items()}
    for tensors in (dict(state.tensors), moved):
        after = dataclasses.replace(state, tensors=MappingProxyType(tensors))
        rest, _ = stream(scheme, [a[..., cut:, :] for a in content], x[cut:], (0, 2, T - cut), state=after)
        close(torch.cat((start, rest), -2), whole, roundings=1e8)  # 10^-16 of the length
    close(torch.cat((start, rest), -2), whole, dtype=torch.float32, roundings=1)


@both
def test_gates_that_forget_all_leave_the_token_itself(kind):
    """Gate logits of -10^38 in float32 and -60,000 in float16 do not overflow."""
    scheme = schemes.fox(HEAD_DIM, HEADS, attention=kind)
    with torch.no_grad():
        scheme.forget.bias.weight.fill_(-3e38)
    q, k, v = inputs(1, t=300, dtype=torch.float32, requires_grad=True)
    out = scheme(q, k, v, sequence(300), causal=True)
    close(out, v)
    assert all(grad.isfinite().all() for grad in gradients(out, [q, k, v, *scheme.parameters()]))
    with torch.no_grad():
        scheme.forget.bias.weight.fill_(-60000)
    half = [x.detach().half() for x in (q, k, v)]
    close(scheme(*half, sequence(300), causal=True), half[2], roundings=4)


@both
def test_behind_a_closed_gate_a_sequence_starts_again(kind):
    """After a closed gate, outputs equal the outputs of the following tokens alone, without loss of precision."""
    scheme, (q, k, v) = made("fox", kind), inputs(2, t=T)
    with torch.no_grad():
        scheme.forget.weight[..., 0] = 1
    q[..., 0], k[..., 4, 0] = 0, -1e20  # which the gate sees, and no query
    out = scheme(q, k, v, sequence(T), causal=True)[..., 4:, :]
    q, k, v = (a[..., 4:, :] for a in (q, k, v))
    k[..., 0, 0] = -60  # a first gate closes nothing
    close(out, scheme(q, k, v, sequence(T - 4), causal=True))


@both
@every
def test_other_segments_and_masked_tokens_take_no_steps(name, kind):
    """They contain NaN and infinity, and their gradients are zero."""
    scheme, (q, k, v) = made(name, kind), inputs(1, t=T)
    ids, at = torch.tensor([[0] * 5 + [1] * (T - 5)]), scheme.at(sequence(T), dtype=torch.float64)
    broken = k.clone()
    broken[..., 2, :], broken[..., 3, 0] = torch.nan, torch.inf
    alone = scheme(*(a[..., 5:, :] for a in (q, k, v)), sequence(T - 5), causal=True)
    for key in (k, broken):
        found = ATTENTION[kind](q, key, v, **at, causal=True, segment_ids=ids)[..., 5:, :]
        close(found, alone)
        grads = gradients(found, list(scheme.parameters()))
        for grad, own in zip(grads, gradients(alone, list(scheme.parameters())), strict=True):
            close(grad, own)
    mask = torch.tensor([[True, True, False, False, True] + [True] * (T - 5)])
    found = ATTENTION[kind](q, broken, v, **at, causal=True, mask=mask)
    close(found[..., mask[0], :], scheme(*(a[..., mask[0], :] for a in (q, k, v)), sequence(T - 2), causal=True))


@both
@every
def test_steps_of_query_heads_that_share_a_key(name, kind):
    scheme, (q, _, _), (_, k, v) = made(name, kind), inputs(2, t=T, heads=2), inputs(2, t=T, heads=1)
    many = [x.expand(-1, 2, -1, -1) for x in (k, v)]
    close(scheme(q, k, v, sequence(T), causal=True), scheme(q, *many, sequence(T), causal=True))
    four = schemes.REGISTRY[name.partition(":")[0]](HEAD_DIM, 4, attention=kind)
    four, (q, _, _), (_, k, v) = perturb(four), inputs(2, t=T, heads=4), inputs(2, t=T, heads=2)
    many = [x.repeat_interleave(2, 1) for x in (k, v)]
    close(four(q, k, v, sequence(T), causal=True), four(q, *many, sequence(T), causal=True))


def test_steps_go_the_long_way_in_float32():
    scheme = schemes.fox(HEAD_DIM, HEADS)
    with torch.no_grad():
        scheme.forget.weight.normal_()
    content = inputs(1, t=T, dtype=torch.float32)
    steps = Stream(scheme)
    with torch.no_grad():
        out = torch.cat([steps(*(a[..., n : n + 1, :] for a in content)) for n in range(T)], -2)
        close(out, scheme(*content, sequence(T), causal=True))


# What they are, and what is refused


class _Mean(ContentPhase):
    """Steps that depend on all tokens of a sequence, which violates the law."""

    def steps(self, content):
        return F.logsigmoid(content.mean(-2, keepdim=True).expand_as(content))


def test_a_path_that_sees_other_tokens_breaks_its_law():
    def subject(gate):
        scheme = schemes.fox(HEAD_DIM, HEADS)
        scheme.forget = gate(HEAD_DIM, torch.zeros(HEADS, 1)) if gate is _Mean else gate(HEAD_DIM, HEADS)
        return scheme

    assert laws.check(subject(ForgetGate)).holds
    report = laws.check(subject(_Mean))
    assert "path" in report.broken
    assert report["path"].figure > 1e-3


@both
@every
def test_both_ways_are_refused_before_any_work(name, kind, monkeypatch):
    scheme, content = made(name, kind), inputs(2, t=T)
    monkeypatch.setattr(ContentPhase, "forward", None)
    with pytest.raises(ValueError, match="causal: expected True with content-dependent phases"):
        scheme(*content, sequence(T))
    with pytest.raises(ValueError, match="phases: expected no more queries than keys"):
        scheme(content[0], *(a[..., 1:, :] for a in content[1:]), sequence(T), sequence(T - 1), causal=True)
    for model in (models.Encoder, lambda *more: models.Seq2Seq(5, *more)):
        with pytest.raises(ValueError, match="scheme: expected positions in a bidirectional model"):
            model(5, HEAD_DIM * HEADS, 1, scheme)


def test_what_does_not_fit_is_refused():
    q, k, v = inputs(1, t=3)
    for path, error in (
        (ForgetGate(4, 2), r"phases: expected one of 8 features and 2 heads, .* got one of 4 and 2"),
        (ForgetGate(8, 3), r"phases: expected one of 8 features and 2 heads, .* got one of 8 and 3"),
    ):
        with pytest.raises(ValueError, match=error):
            isopos.linear_attention(q, k, v, phases=(path,), causal=True)
    with pytest.raises(TypeError, match=r"phases: expected those of isopos\.phases, got str"):
        isopos.softmax_attention(q, k, v, phases="fox", causal=True)
    turn = SelectiveRotation(8, 2, rope_frequencies(4))
    with pytest.raises(ValueError, match="turn: expected None with Rotary, whose maps"):
        Scheme(schemes.rope(8).encoding, 2, turn=turn)
    with pytest.raises(ValueError, match="turn: expected steps read from keys of 8 features and 4 heads, got 8 and 2"):
        Scheme(encodings.Identity(8), 4, turn=turn)
    with pytest.raises(ValueError, match="frequency: expected one for each pair of 8 features, got 3"):
        SelectiveRotation(8, 2, rope_frequencies(3))
    with pytest.raises(TypeError, match=r"phases: expected those of isopos\.phases, got Tensor"):
        isopos.linear_attention(q, k, v, phases=torch.ones(1), causal=True)
    basis = encodings.InBasis(schemes.rope(8).encoding, OddEven(8))
    with pytest.raises(ValueError, match="scheme: expected no content-dependent phases"):
        absorb(Scheme(basis, 2, attention="softmax", decay="forget"), torch.nn.Linear(16, 16))
    with pytest.raises(ValueError, match="decay: expected 'none' with clipped keys"):
        schemes.horn_clipped(8, 2, decay="forget")
    with pytest.raises(ValueError, match="head size: expected an even number"):
        schemes.selective(7, 2)
    with pytest.raises(ValueError, match="head size: expected an even number of at least 4 features, got 2"):
        schemes.carope(2, 2)
    with pytest.raises(ValueError, match=r"base: expected a number above 1, got 1\.0"):
        schemes.carope(8, 2, base=1.0)
    scheme, state = schemes.selective(8, 2), isopos.State()
    _, state = scheme(q, k, v, sequence(3), state=state, causal=True)
    with pytest.raises(ValueError, match="state: expected one of 1 phases, got one of 4"):
        isopos.linear_attention(q, k, v, phases=(ForgetGate(8, 2),), causal=True, state=state)


def test_paths_know_what_they_are():
    assert [type(own) for own in schemes.selective(8, 2, decay="forget").phases] == [ForgetGate, SelectiveRotation]
    assert schemes.rope(8, 2, decay="retnet").phases == ()
    assert "phases" not in schemes.rope(8, 2).at(sequence(3))
