"""Test every scheme in every setting (whole, streamed, packed, padded, grouped heads, cast) against its definition."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ATTENTION,
    DEFINITIONS,
    HEAD_DIM,
    HEADS,
    PRESETS,
    TOLERANCE,
    close,
    each,
    gradients,
    inputs,
    inputs_of,
    named,
    parents_first,
    perturb,
    rows_later,
    same_everywhere,
    scheme_case,
    stream,
)
from hypothesis import given
from hypothesis import strategies as st
from structures import over_covering, over_other_rows, over_structures

import isopos
from isopos import packed, sequence
from isopos.attention import softmax_attention
from isopos.decays import RATES, Decay

T, PAD, GROUPS = 8, 3, 3
SEGMENTS = torch.tensor([[7] * T + [-1] * T])
SLACK = 1000 * TOLERANCE  # some denominators almost vanish
causality = each("causal", [True, False], ids=["causal", "both-ways"])
both = each("kind", ATTENTION)


class Setting:
    """A scheme with perturbed parameters, random content with a mask, and the expected output by definition."""

    def __init__(self, case, kind, causal, *, t=T, **more):
        self.case, self.kind, self.causal = case, kind, causal
        self.scheme = perturb(case.build(attention=kind, **more))
        self.content = inputs_of(self.scheme, 2, t=t, requires_grad=True)
        self.x = parents_first(self.scheme.group, case.positions(2, t=t))
        self.mask = torch.rand(2, t) < 0.7
        self.leaves = [*self.content, *self.scheme.parameters()]

    def attend(self, q, k, v, x, mask, *, definition=False, x_key=None, **more):
        function = (DEFINITIONS if definition else ATTENTION)[self.kind]
        at = self.scheme.at(x, x_key, dtype=torch.float64)
        return function(q, k, v, **at, causal=self.causal, mask=mask, **more)

    def expected(self):
        return self.attend(*self.content, self.x, self.mask, definition=True)

    # The settings: the output of the same tokens, or of the last of them

    def chunks(self):
        """A stream in chunks, with two batch axes."""
        content, x, mask = [a[None] for a in self.content], self.x[None], self.mask[None]
        return stream(self.scheme, content, x, (0, 3, 3, 4, T), mask=mask)[0][0]

    def steps(self):
        return stream(self.scheme, self.content, self.x, range(T + 1), mask=self.mask)[0]

    def padded_right(self):
        x = torch.cat((self.x, self.x[..., -1:, :] + self.scheme.group.is_grid * torch.arange(1, PAD + 1)[:, None]), -2)
        content = (torch.cat((a, pad), -2) for a, pad in zip(self.content, self._pads(), strict=True))
        return self.attend(*content, x, F.pad(self.mask, (0, PAD)))[..., :T, :]

    def padded_left(self):
        group = self.scheme.group
        before = self.x[..., :1, :] - group.is_grid * torch.arange(PAD, 0, -1)[:, None]
        x = torch.cat((before, rows_later(group, self.x, PAD)), -2)
        content = (torch.cat((pad, a), -2) for a, pad in zip(self.content, self._pads(), strict=True))
        return self.attend(*content, x, F.pad(self.mask, (PAD, 0)))[..., PAD:, :]

    def _pads(self):
        """Padding: queries, and keys and values that no query may see."""
        q, k, v = (a.detach()[..., :PAD, :] for a in self.content)
        return q, k * torch.nan, v * torch.inf

    def packed(self):
        return self._unpacked(self.attend(*self._packed(), segment_ids=SEGMENTS))

    def packed_stream(self):
        *content, x, mask = self._packed()
        cuts = (0, 3, T + 2, T + 3, 2 * T)
        return self._unpacked(stream(self.scheme, content, x, cuts, mask=mask, segment_ids=SEGMENTS)[0])

    def _packed(self):
        x = torch.cat([rows_later(self.scheme.group, x, n * T) for n, x in enumerate(self.x)])
        return *(a.transpose(0, 1).flatten(1, 2)[None] for a in self.content), x[None], self.mask.reshape(1, -1)

    def _unpacked(self, out):
        return out[0].unflatten(1, (2, T)).transpose(0, 1)

    def shared(self):
        return self._of_one(self.attend(*self._shared(), self.x, self.mask))

    def shared_stream(self):
        return self._of_one(stream(self.scheme, self._shared(), self.x, (0, 3, 4, T), mask=self.mask)[0])

    def _shared(self):
        """Inputs with several query heads per key head. The test reads the middle one."""
        q, k, v = self.content
        return torch.stack((q.flip(-1), q, torch.randn_like(q)), 2).flatten(1, 2), k, v

    def _of_one(self, out):
        return out.unflatten(1, (HEADS, GROUPS))[:, :, 1]

    def views(self):
        """Non-contiguous tensors: all samples but the last with two batch axes, the last with none."""
        moved = [a.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1) for a in self.content]
        whole = *moved, self.x.mT.contiguous().mT, self.mask
        first, last = self.attend(*(a[:-1, None] for a in whole)), self.attend(*(a[-1] for a in whole))
        return torch.cat((first[:, 0], last[None]))

    def last_queries(self):
        q, k, v = self.content
        return self.attend(q[..., -4:, :], k, v, self.x[..., -4:, :], self.mask, x_key=self.x)


BIDIRECTIONAL = {"padded_right", "padded_left", "packed", "shared", "views"}
STREAMS = {"chunks", "steps", "packed_stream", "shared_stream"}
CAUSAL = {*STREAMS, "last_queries"}


def refusal(case, kind, name):
    """Pattern of the error of an unsupported setting, "" if the setting does not apply, None if it is supported."""
    if name in STREAMS and (case.outside or (case.clipped and kind == "linear" and case.group.columns > 1)):
        return "segment_ids|state: expected .* class tokens"
    if case.clipped and kind == "linear" and name == "packed_stream":
        return "segment_ids: expected none with clipped terms in a stream"
    if case.outside and name in ("padded_left", "packed", "last_queries"):  # the first rows of a tensor are class tokens
        return ""
    return "" if case.group.refers_to_rows and name == "last_queries" else None  # queries are rows of the keys' tensor


def same_gradients(out, expected, leaves):
    for fast, slow in zip(gradients(out, leaves), expected, strict=True):
        assert fast.isfinite().all()
        close(fast, slow, roundings=SLACK)


def one_answer(case, kind, causal):
    setting = Setting(case, kind, causal)
    expected = setting.expected()
    slow = gradients(expected, setting.leaves)
    for name in sorted(BIDIRECTIONAL | CAUSAL if causal else BIDIRECTIONAL):
        refused = refusal(case, kind, name)
        if refused:
            with named(name), pytest.raises(ValueError, match=refused):
                getattr(setting, name)()
        elif refused is None:
            with named(name):
                out = getattr(setting, name)()
                last = expected[..., -out.shape[-2] :, :]
                close(out, last, roundings=SLACK)
                of_last = slow if last.shape == expected.shape else gradients(last, setting.leaves)
                same_gradients(out, of_last, setting.leaves)


@over_structures()
def test_one_answer(case, kind):
    for causal in case.ways:
        one_answer(case, kind, causal)


@pytest.mark.slow
@over_other_rows()
def test_one_answer_of_other_rows(case, kind):
    for causal in case.ways:
        one_answer(case, kind, causal)


@over_covering()
def test_one_token_alone_and_alone_in_its_segment(case, kind):
    for causal in case.ways:
        setting = Setting(case, kind, causal, t=1)
        expected = setting.attend(*setting.content, setting.x, None, definition=True)
        for more in ({}, {} if case.outside else {"segment_ids": torch.zeros(2, 1, dtype=torch.int64)}):
            close(setting.attend(*setting.content, setting.x, None, **more), expected, roundings=SLACK)


@over_covering()
def test_what_is_masked_reaches_no_gradient(case, kind):
    """Masked keys and values contain NaN and infinities. All keys of the first sample are masked."""
    for causal in case.ways:
        setting = Setting(case, kind, causal)
        setting.mask[0] = False
        q, k, v = setting.content
        poison = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(T)[:T, None]
        filled = [torch.where(setting.mask[:, None, :, None], a, poison).detach().requires_grad_() for a in (k, v)]
        out, clean = (setting.attend(q, *keys, setting.x, setting.mask) for keys in (filled, (k, v)))
        assert torch.equal(out, clean)
        assert (out[0] == 0).all()
        learned = list(setting.scheme.parameters())
        found, expected = gradients(out, [q, *filled, *learned]), gradients(clean, [q, k, v, *learned])
        assert all(map(torch.equal, found, expected))


@over_covering()
def test_a_broken_query_breaks_its_row_only(case, kind):
    for causal in case.ways:
        setting = Setting(case, kind, causal)
        setting.mask[1, :6] = True
        q, k, v = setting.content
        broken = q.detach().clone()
        broken[1, 0, 5, 2] = torch.nan
        out, clean = (setting.attend(a, k, v, setting.x, setting.mask) for a in (broken, q))
        rows = out.isnan().any(-1)
        assert rows.nonzero().tolist() == [[1, 0, 5]]
        assert torch.equal(out[~rows], clean[~rows])


@over_covering()
def test_samples_are_independent(case, kind):
    setting = Setting(case, kind, True)
    before = setting.attend(*setting.content, setting.x, setting.mask)
    q, k, v = (torch.stack((a[0], 1e3 * torch.randn_like(a[0]))) for a in setting.content)
    setting.mask[1] = ~setting.mask[1]
    assert torch.equal(setting.attend(q, k, v, setting.x, setting.mask)[0], before[0])


# Packed sequences


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("causal", [True, False])
@given(st.data())
def test_any_layout_of_segments(kind, causal, data):
    """Each sample packs different sequences with random start positions, and chunks cut them anywhere."""
    draw = data.draw
    name = draw(st.sampled_from(["rope-learned-decay", "permuteformer", "lrpe-orthogonal-learned", "rope-encoded", "xpos"]))
    kind = kind if kind in scheme_case(name).kinds else "linear"
    t = draw(st.integers(1, 80))
    setting = Setting(scheme_case(name), kind, causal, t=t)
    cuts = [[0, *sorted(draw(st.sets(st.integers(1, t), max_size=4)) - {t}), t] for _ in range(2)]
    segments = torch.stack([packed(torch.tensor(cut).diff())[1].flip(0) for cut in cuts]).flip(1)
    out = setting.attend(*setting.content, setting.x, setting.mask, segment_ids=segments)
    with torch.no_grad():
        for n, cut in enumerate(cuts):
            lengths = segments[n].unique_consecutive(return_counts=True)[1].tolist()
            places = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
            assert len(places) == len(cut) - 1
            for own in places:
                parts = [a[n : n + 1, ..., own, :] for a in (*setting.content, setting.x)]
                alone = setting.attend(*parts, setting.mask[n : n + 1, own], definition=True)
                close(out[n : n + 1, ..., own, :], alone, roundings=SLACK)
    if causal:
        chunks = (0, *sorted(draw(st.lists(st.integers(0, t), max_size=4))), t)
        streamed, _ = stream(setting.scheme, setting.content, setting.x, chunks, mask=setting.mask, segment_ids=segments)
        close(streamed, out, roundings=SLACK)


@both
def test_segments_of_all_samples_alike(kind):
    scheme, content = isopos.rope(HEAD_DIM, HEADS, attention=kind, decay="retnet"), inputs(2, t=7)
    x, segments = packed([3, 4])
    out, _ = stream(scheme, content, x, (0, 2, 5, 7), segment_ids=segments)
    for own in (slice(3), slice(3, 7)):
        parts = (a[..., own, :] for a in content)
        close(out[..., own, :], DEFINITIONS[kind](*parts, **scheme.at(x[own], dtype=torch.float64), causal=True))


def test_packed_queries_of_other_lengths_have_separate_segments():
    q, k, v = inputs(2, t=5, s=7)
    queries, keys = packed([2, 3])[1], packed([4, 3])[1]
    out = softmax_attention(q, k, v, segment_ids=(queries, keys))
    for own, of_keys in ((slice(2), slice(4)), (slice(2, 5), slice(4, 7))):
        close(out[..., own, :], softmax_attention(q[..., own, :], k[..., of_keys, :], v[..., of_keys, :]))


@both
def test_fewer_queries_have_the_segments_of_the_last_keys(kind):
    scheme, (q, k, v) = isopos.rope(HEAD_DIM, HEADS, attention=kind, decay="retnet"), inputs(2, t=7)
    x, segments = packed([2, 3, 2])
    whole = ATTENTION[kind](q, k, v, **scheme.at(x, dtype=q.dtype), segment_ids=segments, causal=True)
    at = scheme.at(x[-4:], x, dtype=q.dtype)
    close(ATTENTION[kind](q[..., -4:, :], k, v, **at, segment_ids=segments, causal=True), whole[..., -4:, :])


# Shapes


@both
@causality
@each("decay", ["none", "retnet"])
@each(("heads", "shared", "t", "e"), [(6, 2, 67, 8), (6, 2, 1, 5), (3, 1, 7, 3), (4, 4, 67, 3)])
def test_query_heads_share_key_heads(kind, causal, decay, heads, shared, t, e):
    """Groups of adjacent query heads share a key head. The result equals repeated keys, values and tables."""
    scheme = isopos.rope(HEAD_DIM, shared, attention=kind, decay=decay)
    many = isopos.rope(HEAD_DIM, heads, attention=kind, decay=own_rates(decay, shared, heads))
    _, k, v = inputs(2, t=t, e=e, heads=shared, requires_grad=True)
    q, *_ = inputs(2, t=t, heads=heads, requires_grad=True)
    repeated = [a.repeat_interleave(heads // shared, 1) for a in (k, v)]
    x, options = sequence(t), {"causal": causal, "mask": torch.rand(2, t) < 0.8}
    out = ATTENTION[kind](q, k, v, **scheme.at(x, dtype=q.dtype), **options)
    same_everywhere(out, DEFINITIONS[kind](q, *repeated, **many.at(x, dtype=q.dtype), **options), [q, k, v])


def own_rates(decay, shared, heads):
    return decay if decay == "none" else Decay(RATES[decay](shared).repeat_interleave(heads // shared))


@both
@each("name", ["rope-decay", "ape-sequence", "permuteformer"])
@each("causal", [True, False])
def test_expanded_inputs(kind, name, causal):
    case = scheme_case(name)
    setting = Setting(case, kind if kind in case.kinds else "linear", causal)
    q, k, v = (a.detach()[:1].expand(2, HEADS, T, HEAD_DIM).requires_grad_() for a in setting.content)
    x, mask = setting.x[:1].expand(2, T, 1), setting.mask[:1].expand(2, T)
    close(setting.attend(q, k, v, x, mask), setting.attend(q, k, v, x, mask, definition=True), roundings=SLACK)


@each(("batch", "t", "s"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
@both
@causality
def test_nothing(kind, causal, batch, t, s):
    q, k, v = inputs(batch, t=t, s=s, e=5, heads=4, requires_grad=True)
    for segments in (None, torch.zeros(batch, s, dtype=torch.int64)):
        if segments is None or t <= s:
            options = {"mask": torch.ones(batch, s).bool(), "segment_ids": segments, "causal": causal}
            out = ATTENTION[kind](q, k[:, :2], v[:, :2], **options)
            assert out.shape == (batch, 4, t, 5)
            assert (out == 0).all()


# The same again


def everything(case, kind, x):
    """Output and all gradients of a scheme, with inputs from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    scheme = case.build(attention=kind)
    shape = (2, HEADS, 70, scheme.encoding.features)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    out = ATTENTION[kind](q, k, v, **scheme.at(x), causal=True)
    return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, *scheme.parameters()], allow_unused=True)]


def test_threads_change_nothing():
    """Results in two concurrent threads equal the results of one, bit for bit."""
    every = [(case, kind, case.positions(t=70)) for case in PRESETS for kind in case.kinds]
    alone = [everything(*pair) for pair in every]
    found = {}

    def work(order):
        for n in order:
            found[n, order] = everything(*every[n])

    orders = (tuple(range(len(every))), tuple(reversed(range(len(every)))))
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * len(every)
    for (n, _), tensors in found.items():
        for a, b in zip(tensors, alone[n], strict=True):
            assert (a is b is None) or torch.equal(a, b)


# Bad input


def call(kind, t=4, s=4, **changes):
    return ATTENTION[kind](*inputs(2, t=t, s=s), **changes)


whole_numbers = torch.zeros(2, 4, dtype=torch.int64)
BAD = {
    "float": (whole_numbers.float(), r"expected integers \[\*b 4\], one per token, got torch.float32 \[2, 4\]"),
    "bool": (whole_numbers.bool(), r"expected integers \[\*b 4\], one per token, got torch.bool"),
    "short": (whole_numbers[:, :3], r"expected integers \[\*b 4\], one per token, got torch.int64 \[2, 3\]"),
    "scalar": (whole_numbers[0, 0], r"expected integers \[\*b 4\]"),
    "batch": (torch.zeros(3, 4, dtype=torch.int64), r"leading dimensions that broadcast to \[2\], got \[3, 4\]"),
    "heads": (torch.zeros(2, 2, 4, dtype=torch.int64), r"leading dimensions that broadcast to \[2\], got \[2, 2, 4\]"),
}


@both
@each(("segments", "message"), BAD.values(), ids=BAD)
def test_bad_segments(kind, segments, message):
    with pytest.raises(ValueError, match=f"^segment_ids: .*{message}"):
        call(kind, segment_ids=segments)
    if kind == "softmax":
        with pytest.raises(ValueError, match=f"^segment_ids: .*{message}"):
            call(kind, segment_ids=(whole_numbers, segments))


@both
def test_segments_that_do_not_fit(kind):
    with pytest.raises(TypeError, match="segment_ids: expected a tensor, got list"):
        call(kind, segment_ids=[0, 0, 1, 1])
    with pytest.raises(ValueError, match="segment_ids: expected no more queries than keys, got 5 and 4"):
        call(kind, t=5, segment_ids=whole_numbers)
    for mask in (torch.ones(2, 3).bool(), torch.ones(3, 4).bool(), torch.ones(2, 4), torch.ones(2, 2, 4).bool()):
        with pytest.raises(ValueError, match=r"^mask: expected"):
            call(kind, mask=mask, segment_ids=whole_numbers)


def test_segments_of_linear_attention():
    returning = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    with pytest.raises(ValueError, match="segment_ids: expected tokens of one id next to each other"):
        call("linear", segment_ids=returning, causal=True)
    with pytest.raises(ValueError, match="segment_ids: expected one tensor, of the keys, in linear attention, got a pair"):
        call("linear", segment_ids=(whole_numbers, whole_numbers))
    rising = torch.tensor([0.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="decay: expected log decays that do not increase along a segment"):
        call("linear", segment_ids=torch.tensor([0, 0, 1, 1]), decay=rising)
    call("linear", segment_ids=torch.tensor([0, 0, 1, 2]), decay=rising)
    assert call("softmax", segment_ids=returning).isfinite().all()
    scheme = scheme_case("horn-clipped").build()
    arguments = scheme.at(sequence(4), dtype=torch.float64) | {"causal": True, "return_state": True}
    with pytest.raises(ValueError, match="segment_ids: expected none with clipped terms in a stream"):
        call("linear", segment_ids=whole_numbers, **arguments)
    scheme = scheme_case("horn-clipped-reach").build()
    with pytest.raises(ValueError, match="segment_ids: expected none with class tokens"):
        call("linear", segment_ids=whole_numbers, **scheme.at(sequence(4), dtype=torch.float64), causal=True)
