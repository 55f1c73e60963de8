"""Test PaTH, products of the matrices between key and query: the paper's formula, chunks, streams, laws and errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import ATTENTION, HEAD_DIM, HEADS, close, each, gradients, inputs, perturb, same_everywhere, stream
from torch import nn

import isopos
from isopos import encodings, laws, schemes
from isopos.attention import flex, naive_linear_attention
from isopos.attention.checks import check_product
from isopos.attention.problem import check_softmax
from isopos.biases import T5
from isopos.feature_maps import FeatureMap
from isopos.maps import Identity
from isopos.ops import householder
from isopos.ops.householder import Factors
from isopos.phases import HouseholderProduct
from isopos.positions import sequence
from isopos.scheme import Scheme
from isopos.stream import Stream

CHUNK, T = 8, 19  # two borders between chunks
both = pytest.mark.parametrize("kind", ATTENTION)
OPTIONS = ({}, {"strength": "reflection"}, {"decay": "forget"})
SIZES = [(1, 1, 0), (5, 5, 0), (8, 8, 0), (9, 9, 0), (24, 24, 0), (40, 3, 0), (40, 17, 0), (19, 19, 5), (1, 1, 5)]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(householder, "CHUNK", CHUNK)


def made(kind, size=0.5, heads=HEADS, **options):
    """A scheme with all parameters perturbed, including zeros."""
    return perturb(perturb(schemes.path(HEAD_DIM, heads, attention=kind, **options), 4), size)


def factors(s, p=0, d=HEAD_DIM):
    """Random unit vectors and strengths. Half of the strengths are 0, 1 or 2. The first p matrices are the identity."""
    vector = F.normalize(torch.randn(2, HEADS, s, d, dtype=torch.float64), dim=-1)
    strength = torch.where(torch.rand(2, HEADS, s) < 0.5, torch.randint(3, (2, HEADS, s)), 2 * torch.rand(2, HEADS, s))
    return F.pad(vector, (0, 0, p, 0)), F.pad(strength.double(), (p, 0))


def matrices(vector, strength):
    """The matrices H_m ``[b h s d d]``."""
    identity = torch.eye(vector.shape[-1], dtype=vector.dtype)
    return identity - strength[..., None, None] * vector[..., :, None] * vector[..., None, :]


def by_formula(q, k, h):
    """q_i^T H_i H_{i-1} ... H_{j+1} k_j of every pair, ``[b h t t]``, with a separate product for each pair."""
    t = k.shape[-2]
    score = torch.zeros(*q.shape[:-1], t, dtype=q.dtype)
    for j in range(t):
        product = torch.eye(k.shape[-1], dtype=k.dtype)
        for i in range(j, t):
            product = product if i == j else h[..., i, :, :] @ product
            row = torch.einsum("...d,...de,...e->...", q[..., i, :], product.expand(*q.shape[:-2], -1, -1), k[..., j, :])
            score = score + row[..., None, None] * F.one_hot(torch.tensor(i * t + j), t * t).view(t, t)
    return score


def by_pairs(scheme, q, k, v):
    """The paper's attention, with explicit matrices and products."""
    linear, t, turn = scheme.attention == "linear", q.shape[-2], scheme.turn
    w = torch.einsum("hed,bhtd->bhte", turn.weight, k)
    w = w / w.square().sum(-1, keepdim=True).sqrt()
    strength = torch.full(k.shape[:-1], 2.0, dtype=k.dtype)
    if turn.strength == "learned":
        strength = 2 / (1 + (-torch.einsum("hd,bhtd->bht", turn.gate.weight, k) - turn.bias.weight[:, None]).exp())
    a, b = (scheme.feature_map(x) for x in (q, k)) if linear else (q, k)
    score, plain = by_formula(a, b, matrices(w, strength)), a @ b.mT
    causal, log_gate = torch.ones(t, t).tril() > 0, torch.zeros(())
    if (forget := scheme.forget) is not None:
        gate = torch.sigmoid(torch.einsum("bhtd,hcd->bhtc", k, forget.weight) + forget.bias.weight[:, None])[..., 0]
        g = gate.log().cumsum(-1)
        log_gate = (g[..., :, None] - g[..., None, :]).masked_fill(~causal, 0)
    if linear:
        score, plain = (torch.where(causal, x * log_gate.exp(), 0) for x in (score, plain))
        return score @ v / plain.sum(-1, keepdim=True)
    return (score / math.sqrt(HEAD_DIM) + log_gate).masked_fill(~causal, -torch.inf).softmax(-1) @ v


# The operation


def test_naive_scores_are_those_of_the_formula():
    q, k, _ = inputs(2, t=9)
    found = factors(9)
    close(householder.naive_scores(q, k, Factors(*found)), by_formula(q, k, matrices(*found)))
    close(householder.naive_scores(q[..., 6:, :], k, Factors(*found)), by_formula(q, k, matrices(*found))[..., 6:, :])


@each("s, t, p, chunk", [*((*size, CHUNK) for size in SIZES), (130, 130, 0, 64), (130, 66, 3, 64)])
@torch.no_grad()
def test_chunks_equal_tokens_at_any_length_and_strength(s, t, p, chunk, monkeypatch):
    """Compare scores, sums and carried keys. The first p keys come from a state and have no matrices."""
    monkeypatch.setattr(householder, "CHUNK", chunk)
    q, k, _ = inputs(2, t=t, s=p + s)
    vector, strength = factors(s, p)
    expected, own = householder.naive_scores(q, k, Factors(vector, strength)), Factors(vector[..., p:, :], strength[..., p:])
    torch.testing.assert_close(householder.scores(q, k, own), expected, rtol=0, atol=1e-10)
    values = torch.eye(p + s, dtype=torch.float64)
    total, state = householder.linear(q, k, values, Factors(vector, strength))
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-10)
    last = householder.naive_scores(
        torch.eye(HEAD_DIM, dtype=torch.float64)[:, None, None, None], k, Factors(vector, strength)
    )
    for carried in (householder.carried(k, own), state.mT):
        torch.testing.assert_close(carried.movedim(-1, 0), last[..., 0, :], rtol=0, atol=1e-10)


def test_equal_vectors_do_not_grow(monkeypatch):
    """A system of equal reflections has an inverse of alternating signs, whose powers would overflow."""
    monkeypatch.setattr(householder, "CHUNK", 64)
    q, k, _ = inputs(2, t=130)
    vector = F.normalize(torch.ones(130, HEAD_DIM, dtype=torch.float64), dim=-1)
    for strength in (1.0, 2.0):
        found = Factors(vector, torch.full((130,), strength, dtype=torch.float64))
        close(householder.scores(q, k, found), householder.naive_scores(q, k, found))
        close(
            householder.scores(*(x.float() for x in (q, k)), Factors(*(x.float() for x in found))).double(),
            householder.naive_scores(q, k, found),
            dtype=torch.float32,
        )


def test_gradients_are_those_of_finite_differences(monkeypatch):
    monkeypatch.setattr(householder, "CHUNK", 2)
    q, k, v = inputs(1, t=3, s=5, d=2, e=1, heads=1, requires_grad=True)
    vector, strength, g = torch.randn(5, 2), torch.tensor([0.0, 1.0, 2.0, 0.3, 0.7]), -torch.rand(5).cumsum(0)
    leaves = [x.double().requires_grad_() for x in (vector / 2, strength, g)]
    past, before = torch.randn(2, 1, dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64)

    def sums(q, k, v, vector, strength, g, past):
        return householder.linear(q, k, v, Factors(vector, strength), (g[2:], g), past, before)

    assert torch.autograd.gradcheck(sums, (q, k, v, *leaves, past))
    assert torch.autograd.gradcheck(lambda q, k, *own: householder.scores(q, k, Factors(*own)), (q, k, *leaves[:2]))
    assert torch.autograd.gradcheck(lambda k, *own: householder.carried(k, Factors(*own)), (k, *leaves[:2]))


# The scheme


@both
@each("options", OPTIONS)
def test_attention_is_that_of_the_paper_with_all_gradients(kind, options):
    scheme, content = made(kind, **options), inputs(2, t=12, requires_grad=True)
    out, expected = scheme(*content, sequence(12), causal=True), by_pairs(scheme, *content)
    close(out, expected)
    leaves = [*content, *scheme.parameters()]
    for fast, slow in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        close(fast, slow)
        assert slow.any()
    if kind == "linear":
        close(naive_linear_attention(*content, **scheme.at(sequence(12), dtype=torch.float64), causal=True), expected)


@both
def test_matrices_that_are_the_identity_leave_no_positions(kind):
    """Matrices are the identity for zero strength and for zero keys. With forget gates the scheme is then fox."""
    content, x = inputs(2, t=T, dtype=torch.float32), sequence(T)
    for decay, name in (("none", "none"), ("forget", "fox")):
        scheme, other = (schemes.REGISTRY[n](HEAD_DIM, HEADS, attention=kind, decay=decay) for n in ("path", name))
        with torch.no_grad():
            scheme.turn.bias.weight.fill_(-1e4)
        close(scheme(*content, x, causal=True), other(*content, x, causal=True))
    product = HouseholderProduct(HEAD_DIM, HEADS)
    k = torch.zeros(1, HEADS, 3, HEAD_DIM, requires_grad=True)
    vector, strength = product(k)
    assert not vector.any()
    assert (strength == 1).all()
    assert not torch.autograd.grad(vector.sum(), k)[0].any()
    k = torch.tensor([1e-30, 1e30])[:, None] * torch.ones(HEAD_DIM)
    close(product(k[None])[0].norm(dim=-1), torch.ones(HEADS, 2))


@both
@each("options", OPTIONS)
def test_streams_of_tokens_and_chunks_are_the_whole(kind, options):
    scheme, content = made(kind, **options), inputs(2, t=T)
    whole, mask = scheme(*content, sequence(T), causal=True), torch.rand(2, T) < 0.7
    cuts = (0, 1, 2, 14, 15, T)
    out, state = stream(scheme, content, sequence(T), cuts)
    close(out, whole)
    assert (state["sum0"] if kind == "linear" else state["keys"]).shape[-2] == (HEAD_DIM if kind == "linear" else T)
    out, _ = stream(scheme, content, sequence(T), cuts, mask=mask)
    close(out, scheme(*content, sequence(T), causal=True, mask=mask))
    with torch.no_grad():
        steps = Stream(scheme)
        close(torch.cat([steps(*(a[..., n : n + 1, :] for a in content)) for n in range(T)], -2), whole)
    half = [a.bfloat16() for a in content]
    scheme = scheme.float()
    out, state = stream(scheme, half, sequence(T), range(T + 1))
    close(out, scheme(*half, sequence(T), causal=True), roundings=4)
    if kind == "softmax":  # a cached key changes at every token
        assert state["keys"].dtype == torch.float32
    assert out.dtype == torch.bfloat16


@both
@each("options", OPTIONS)
def test_other_segments_and_masked_tokens_have_no_matrix(kind, options):
    """They contain NaN and infinity, and their gradients are zero."""
    scheme, (q, k, v) = made(kind, **options), inputs(1, t=T)
    cut = CHUNK - 3
    ids, at = (torch.arange(T) >= cut).long()[None], scheme.at(sequence(T), dtype=torch.float64)
    broken = k.clone()
    broken[..., 2, :], broken[..., 3, 0] = torch.nan, torch.inf
    alone = scheme(*(a[..., cut:, :] for a in (q, k, v)), sequence(T - cut), causal=True)
    for key in (k, broken):
        found = ATTENTION[kind](q, key, v, **at, causal=True, segment_ids=ids)[..., cut:, :]
        same_everywhere(found, alone, list(scheme.parameters()))
    mask = (torch.arange(T) != 2) & (torch.arange(T) != 3)
    found = ATTENTION[kind](q, broken, v, **at, causal=True, mask=mask[None])
    expected = scheme(*(a[..., mask, :] for a in (q, k, v)), sequence(T - 2), causal=True)
    same_everywhere(found[..., mask, :], expected, list(scheme.parameters()))
    found = scheme(q, broken, v, sequence(T), causal=True)
    close(found[..., :2, :], scheme(q, k, v, sequence(T), causal=True)[..., :2, :])
    assert found[..., 3:, :].isnan().all()


@both
def test_query_heads_that_share_a_key(kind):
    for scheme_heads, key_heads in ((2, 1), (2, 2), (4, 2)):
        scheme = made(kind, heads=scheme_heads)
        (q, _, _), (_, k, v) = inputs(2, t=T, heads=2 if key_heads == 1 else 4), inputs(2, t=T, heads=key_heads)
        many = [x.repeat_interleave(q.shape[1] // key_heads, 1) for x in (k, v)]
        copy = scheme
        if scheme_heads != q.shape[1]:  # one matrix per key head: its query heads have equal ones
            copy = made(kind, heads=4)
            with torch.no_grad():
                for mine, theirs in zip(copy.parameters(), scheme.parameters(), strict=True):
                    mine.copy_(theirs.repeat_interleave(2, 0))
        expected = copy(q, *many, sequence(T), causal=True)
        close(scheme(q, k, v, sequence(T), causal=True), expected)
        close(stream(scheme, (q, k, v), sequence(T), (0, 3, 4, T))[0], expected)


@pytest.mark.parametrize("options", [{"decay": "alibi"}, {"decay": "retnet", "denominator": "none"}, {}])
def test_few_queries_against_many_keys(options):
    scheme, segments = made("linear", **options), torch.arange(T) // 7
    q, k, v = inputs(2, t=T)
    x, given = sequence(T), {} if "decay" in options else {"segment_ids": segments}
    whole = isopos.linear_attention(q, k, v, **scheme.at(x, dtype=torch.float64), causal=True, **given)
    for count in (1, 2, 9):
        at = scheme.at(x[-count:], x, dtype=torch.float64)
        close(isopos.linear_attention(q[..., -count:, :], k, v, **at, causal=True, **given), whole[..., -count:, :])


def test_softmax_attention_has_windows_of_streams_and_fewer_queries():
    scheme, content = made("softmax", decay="forget"), inputs(2, t=T)
    at = scheme.at(sequence(T), dtype=torch.float64) | {"causal": True}
    score = by_pairs(scheme, *content[:2], torch.eye(T, dtype=torch.float64).expand(2, HEADS, T, T))
    near = (score * torch.ones(T, T).triu(1 - 6)).tril()
    expected = near @ content[2] / near.sum(-1, keepdim=True)
    close(isopos.softmax_attention(*content, **at, window=6), expected)
    attention = isopos.Attention(HEAD_DIM * HEADS, scheme, window=6).double()
    tokens, state, outs = torch.randn(2, T, HEAD_DIM * HEADS, dtype=torch.float64), isopos.State(), []
    for start, stop in ((0, 3), (3, 4), (4, 16), (16, T)):
        x = torch.arange(start, stop)[:, None]
        found = scheme.at(x, state=state, dtype=torch.float64)
        out, state = attention(tokens[:, start:stop], found, causal=True, return_state=True)
        outs.append(out)
    close(torch.cat(outs, 1), attention(tokens, at, causal=True))
    assert state["keys"].shape[-2] == 5
    last = isopos.softmax_attention(content[0][..., -4:, :], *content[1:], **at)
    close(last, isopos.softmax_attention(*content, **at)[..., -4:, :])


# Laws


@both
def test_norms_never_grow_and_reflections_keep_them(kind):
    """In float32, for any number of tokens between."""
    k = torch.randn(1, HEADS, 500, HEAD_DIM)
    for strength in ("learned", "reflection"):
        scheme = made(kind, strength=strength).float()
        with torch.no_grad():
            _, state = stream(scheme, (k, k, torch.eye(500).expand(1, HEADS, -1, -1)), sequence(500), (0, 300, 500))
        after = state["sum0"].mT if kind == "linear" else state["keys"]
        before = scheme.feature_map(k) if kind == "linear" else k
        ratio = after.norm(dim=-1) / before.norm(dim=-1)
        assert ratio.max() < 1 + 1e-5
        assert (ratio.min() > 1 - 1e-5) == (strength == "reflection")


def test_laws_that_hold_and_that_do_not():
    learned, reflection = (laws.check(schemes.path(HEAD_DIM, HEADS, strength=s)) for s in ("learned", "reflection"))
    assert learned.holds
    assert not learned["unitary"].is_law
    assert not learned["unitary"].holds
    assert reflection.holds
    assert reflection["unitary"].is_law

    class Long(HouseholderProduct):
        def forward(self, k, mask=None):
            return Factors(*(x * 1.2 for x in super().forward(k, mask)))

    scheme = schemes.path(HEAD_DIM, HEADS, strength="reflection")
    scheme.turn = Long(HEAD_DIM, HEADS, "reflection")
    assert {"bounded", "unitary"} <= set(laws.check(scheme).broken)


@both
def test_tokens_before_the_key_change_nothing(kind):
    scheme, content, more = made(kind), inputs(1, t=9), inputs(1, t=T)
    weights = {"denominator": None} if kind == "linear" else {}
    at = scheme.at(sequence(9), dtype=torch.float64) | weights | {"causal": True}
    alone = ATTENTION[kind](*content, **at)
    longer = [torch.cat(parts, -2) for parts in zip(more, content, strict=True)]
    longer[2][..., :T, :] = 0
    if kind == "linear":
        close(ATTENTION[kind](*longer, **at | {"isometry": Identity()})[..., T:, :], alone)
    else:
        mask = torch.ones(9, T + 9).tril(T) > 0
        mask[:, :T] = False
        close(ATTENTION[kind](longer[0][..., T:, :], *longer[1:], **at, attn_mask=mask), alone)


# What is refused


def test_what_does_not_fit_is_refused():
    (q, k, v), product = inputs(1, t=5), HouseholderProduct(HEAD_DIM, HEADS).double()
    linear, softmax = (lambda f=f, **o: f(q, k, v, phases=(product,), causal=True, **o) for f in ATTENTION.values())
    for run, options, error in (
        (linear, {"window": 2}, "window: expected none with a Householder product in linear attention, got 2"),
        (linear, {"denominator": "complex"}, "denominator: expected 'plain', 'encoded' or None with a Householder product"),
        (linear, {"feature_map": _Wide}, "feature_map: expected one that returns 8 features, in which .* returns 16"),
        (softmax, {"terms": T5(HEADS)(sequence(5), sequence(5))}, "terms: expected none with a Householder product"),
    ):
        with pytest.raises(ValueError, match=error):
            run(**options)
    with pytest.raises(ValueError, match="group: expected none with a Householder product, which"):
        check_product(product, (), group=True)
    with pytest.raises(ValueError, match="causal: expected True with content-dependent phases"):
        isopos.softmax_attention(q, k, v, phases=(product,))
    with pytest.raises(ValueError, match="phases: expected at most one Householder product, got 2"):
        isopos.linear_attention(q, k, v, phases=(product, product), causal=True)
    with pytest.raises(ValueError, match="strength: "):
        schemes.path(HEAD_DIM, HEADS, strength="weak")
    with pytest.raises(ValueError, match="turn: expected None with Rotary, whose maps"):
        Scheme(schemes.rope(HEAD_DIM).encoding, HEADS, turn=product)
    with pytest.raises(ValueError, match="bias: expected None with a Householder product"):
        Scheme(encodings.Identity(HEAD_DIM), HEADS, attention="softmax", turn=product, bias=T5(HEADS))
    with pytest.raises(
        ValueError, match="denominator: expected 'plain', 'encoded' or 'none', since Identity does not rotate all"
    ):
        schemes.path(HEAD_DIM, HEADS, denominator="complex")
    scheme, state = schemes.path(HEAD_DIM, HEADS, attention="softmax"), isopos.State()
    _, state = scheme(q, k, v, sequence(5), state=state, causal=True)
    with pytest.raises(ValueError, match="state: expected one of softmax"):
        isopos.softmax_attention(q, k, v, causal=True, state=state)


def test_flex_attention_leaves_it_alone():
    q, k, v = inputs(1, t=5, d=16, dtype=torch.float32)
    problem = check_softmax(q, k, v, {"phases": (HouseholderProduct(16, HEADS),), "causal": True}, streams=False)
    assert flex.refuses(problem) == "knows no Householder product"
    assert not flex.refuses(check_softmax(q, k, v, {"causal": True}, streams=False))


_Wide = FeatureMap("wide", lambda x: torch.cat((x.exp(), (-x).exp()), -1))


def test_parameters_are_read_and_stay_exact():
    scheme = schemes.path(HEAD_DIM, HEADS).bfloat16()
    assert {p.dtype for p in scheme.parameters()} == {torch.float32}
    assert schemes.path(HEAD_DIM, HEADS).fingerprint != schemes.path(HEAD_DIM, HEADS, strength="reflection").fingerprint
    copy = schemes.path(HEAD_DIM, HEADS)
    nn.init.normal_(scheme.turn.weight)
    copy.load_state_dict(scheme.state_dict())
    assert torch.equal(copy.turn.weight, scheme.turn.weight)
