"""Test that one sequence over several processes gives the outputs and gradients of one process, with constant traffic.

The processes are threads that communicate by Gloo. The slow test starts real processes.
"""

import copy
import itertools
import json
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from cases import each, inputs, named, perturb, scheme_case
from shards import CPU, IDS, SHARDS, Whole, main, on_ranks, unordered
from trainers import on_processes

import isopos
from isopos import Decoder, linear_attention, parallel, sequence, softmax_attention
from isopos.attention import ring, sharded
from isopos.parallel import Ring, Shards, Traffic, cut

T = len(IDS)
FEW = [
    *("rope-learned-decay", "rope-complex", "lrpe-unitary-learned", "selective", "fox-encoded", "horn-clipped"),
    *("horn-clipped-reach", "ape-tree", "horn-constrained-outside", "prope", "t5", "fire", "ape-sequence-locality"),
]


def compared(rows, dtype=torch.float64, error=1e-12):
    """Compare shards with the whole for rows (a scheme's row, kind of attention, causal, options)."""
    wholes = []
    for case, kind, causal, options in rows:
        torch.manual_seed(0)
        wholes.append((f"{case.id}-{kind} {causal} {[*options]}", Whole.of(case, kind, causal, T, dtype, **options)))

    def member(group, rank):
        for name, whole in wholes:
            with named(name):
                whole.compare(group, SHARDS, error)

    on_ranks(len(SHARDS), member)


def test_shards_of_a_sequence_give_what_the_whole_gives():
    cases = [scheme_case(name) for name in FEW]
    rows = [(case, kind, causal, {}) for case in cases for kind in case.kinds for causal in case.ways]
    compared([*rows, *((case, case.kinds[-1], True, {"segment_ids": IDS}) for case in cases)])


def test_float32_to_a_millionth():
    cases = [scheme_case(name) for name in ("rope-learned-decay", "retnet", "fox", "t5")]
    more = [{}, {"window": 3}, {"segment_ids": IDS}]
    compared([(case, case.kinds[0], True, options) for case in cases for options in more], torch.float32, 1e-6)


@pytest.mark.slow
def test_structures_in_every_setting_in_groups_of_two_three_and_four_processes(tmp_path):
    said, *_ = on_processes(tmp_path, 4, main, timeout=900)
    found = re.search(r"cases in groups of 2, 3 and 4 processes; overlap (.*)", said)
    assert found, said
    times = json.loads(found[1])
    for suffix in ("", " back"):  # a collective is under way during the sums over own keys
        sent, sums, awaited = (times[name + suffix] for name in ("sent", "sums", "awaited"))
        assert sent[1] <= sums[0] < sums[1] <= awaited[0]


def test_a_ring_gives_what_the_whole_gives(monkeypatch):
    """Also with small blocks of keys and logits, with zig-zag shards, and if a process needs no keys of another."""
    monkeypatch.setattr(ring, "KEYS", 2)
    monkeypatch.setattr(ring, "LOGITS", 64)
    wholes = []
    for name in ("rope-learned-decay", "deberta", "shaw", "fox"):
        case = scheme_case(name)
        for causal, options in itertools.product(case.ways, ({}, {"segment_ids": IDS}, {"window": 2})):
            torch.manual_seed(0)
            wholes.append((case, f"{name} {causal} {[*options]}", Whole.of(case, "softmax", causal, T, **options)))

    def member(group, rank):
        for case, name, whole in wholes:
            with named(name):
                whole.compare(Ring(group), SHARDS, 1e-12)
                if unordered(case):
                    whole.compare(Ring(group, zigzag=True), SHARDS, 1e-12)

    on_ranks(len(SHARDS), member)


@each("kind", [lambda group: group, Ring])
def test_terms_of_keys_see_them_unrotated(kind):
    scheme = isopos.schemes.Scheme(
        isopos.rope(4, 2).encoding, 2, attention="softmax", bias=perturb(isopos.deberta(4, 2)).bias
    )
    q, k, v = inputs(1, t=8, heads=2, d=4, e=4)
    whole = softmax_attention(q, k, v, **scheme.at(sequence(8), dtype=q.dtype), causal=True)

    def member(group, rank):
        own = [cut(x, group, -2) for x in (q, k, v)]
        at = scheme.at(cut(sequence(8), group, 0), group=kind(group), dtype=q.dtype)
        return softmax_attention(*own, **at, causal=True)

    torch.testing.assert_close(torch.cat(on_ranks(2, member), -2), whole, rtol=0, atol=1e-12)


@each("causal, ids", [(False, None), (True, torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))])
def test_clipped_terms_of_shared_keys(causal, ids):
    scheme, (q, k, v) = isopos.horn_clipped(4, 2), inputs(2, t=8, heads=4, d=4, e=4)
    k, v = k[:, :2], v[:, :2]
    options = {"causal": causal, "segment_ids": ids}
    whole = linear_attention(q, k, v, **scheme.at(sequence(8), dtype=q.dtype), **options)

    def member(group, rank):
        own, part = [cut(x, group, -2) for x in (q, k, v)], None if ids is None else cut(ids, group, 0)
        at = scheme.at(cut(sequence(8), group, 0), group=group, dtype=q.dtype)
        return linear_attention(*own, **at, **options | {"segment_ids": part})

    torch.testing.assert_close(torch.cat(on_ranks(2, member), -2), whole, rtol=0, atol=1e-12)


def test_nan_and_infinity_stay_in_the_rows_that_see_them_round_a_ring():
    q, k, v = inputs(2, t=8, heads=2, d=4, e=4, requires_grad=True)
    with torch.no_grad():
        q[0, 0, 3], k[0, 1, 5], v[1, 1, 2] = torch.nan, torch.inf, torch.nan
    whole = softmax_attention(q, k, v, causal=True)
    kept = ~whole.isnan()
    grads = torch.autograd.grad(whole[kept].sum(), (q, k, v))

    def member(group, rank):
        own = [cut(x, Ring(group), -2).detach().requires_grad_() for x in (q, k, v)]
        y = softmax_attention(*own, causal=True, group=Ring(group))
        return y.detach(), torch.autograd.grad(y[cut(kept, group, -2)].sum(), own)

    (first, one), (second, two) = on_ranks(2, member)
    torch.testing.assert_close(torch.cat((first, second), -2), whole, rtol=0, atol=1e-12, equal_nan=True)
    for found, other, right in zip(one, two, grads, strict=True):
        torch.testing.assert_close(torch.cat((found, other), -2), right, rtol=0, atol=1e-12, equal_nan=True)


def test_zigzag_shards_have_the_same_work_and_contiguous_ones_send_half(monkeypatch):
    """Count the computed pairs of queries and keys, and the sent bytes, of each of 4 processes."""
    found = {}
    for zigzag in (False, True):

        def member(group, rank, zigzag=zigzag):
            plan = ring._Plan(SimpleNamespace(window=None, causal=True), Shards(Ring(group, zigzag), 512, CPU), {}, {}, None)
            sources = [(rank - hop) % 4 for hop in range(4)]
            pieces = plan.shards.pieces
            blocks = [ring._Block(s, [pieces[s][n] for n in plan.needed(rank, s)], ()) for s in sources]
            units = [unit for block in blocks for unit in plan.units(block, 1)]
            pairs = sum((b - a) * (d - c) for (a, b), (c, d) in ((unit.of_rows, unit.of_keys) for unit in units))
            return pairs, sum(len(plan.needed(other, rank)) for other in range(4) if other != rank)

        monkeypatch.setattr(ring, "KEYS", 64)
        monkeypatch.setattr(ring, "LOGITS", 64 * 64)
        found[zigzag] = list(zip(*on_ranks(4, member), strict=True))
    work, balanced = found[False][0], found[True][0]
    assert max(balanced) == min(balanced)
    assert max(work) / (sum(work) / 4) > 1.7
    assert sum(work) == sum(balanced)
    assert found[False][1] == (3, 2, 1, 0)  # shards that are sent
    assert found[True][1] == (3, 4, 5, 6)  # half shards: the first to all, the second to those before


def content(t, *batch, heads=2, d=4):
    return inputs(*batch, t=t, d=d, e=d, heads=heads, dtype=torch.float32, requires_grad=True)


def sent(t, attend, size=2, **options):
    """Bytes and messages that a process sends in both passes, with `t` tokens per process."""

    def member(group, rank):
        scheme = isopos.retnet(4, 2, attention=attend)
        with Traffic() as traffic:
            at = scheme.at(sequence(t) + rank * t, group=group)
            attention = softmax_attention if attend == "softmax" else linear_attention
            attention(*content(t, 1), **at, **{"causal": True} | options).sum().backward()
        return traffic.sent, traffic.messages

    return on_ranks(size, member)


def test_traffic_of_linear_attention_does_not_grow_with_the_length():
    """In each direction one message: S [2 heads, 4, 4 + 1] in float32, and g of the first and the last key in float64."""
    assert sent(8, "linear") == sent(64, "linear") == 2 * [(2 * (2 * 4 * 5 * 4 + 2 * 2 * 8), 2)]
    assert sent(64, "linear", size=3)[0][0] == 2 * sent(64, "linear")[0][0]
    window = [sent(t, "linear", window=3)[0][0] for t in (8, 64)]
    assert window[0] == window[1]
    few, many = (sum(bytes for bytes, _ in sent(t, "softmax")) for t in (8, 64))
    assert 7 < many / few <= 8


def test_traffic_of_a_ring_is_keys_and_values_twice_and_their_gradients():
    """There is one more message with the lengths of shards, 8 bytes each. With `causal`, keys go only to later processes."""
    t, each, scheme = 8, 2 * 4 * 4, isopos.rope(4, 2, attention="softmax")

    def member(group, rank, causal):
        with Traffic() as traffic:
            at = scheme.at(sequence(t) + rank * t, group=Ring(group))
            softmax_attention(*content(t, 1), **at, causal=causal).sum().backward()
        return traffic.sent - 8 * (group.size() - 1)

    for size in (2, 3):
        whole = on_ranks(size, lambda group, rank: member(group, rank, False))
        assert whole == size * [6 * each * t * (size - 1)]
        assert 2 * sum(on_ranks(size, lambda group, rank: member(group, rank, True))) == sum(whole)


@each("causal", [True, False])
def test_sums_over_own_keys_run_while_a_collective_is_under_way(causal, monkeypatch):
    """In both passes."""
    order, linear = [], sharded.linear.linear

    def log(name):
        order.append((threading.current_thread().name, name))

    def own(sums):
        log("own")
        for x in (sums.q, sums.v):
            x.register_hook(lambda grad: log("own"))
        return linear(sums)

    def logged(name):
        function = getattr(parallel.Pending, name)
        monkeypatch.setattr(parallel.Pending, name, lambda *given: (log(name), function(*given))[1])

    def member(group, rank):
        threading.current_thread().name = str(rank)
        at = isopos.retnet(4, 2, denominator="encoded").at(sequence(4) + 4 * rank, group=group)
        linear_attention(*content(4, 1), **at, causal=causal).sum().backward()

    monkeypatch.setattr(sharded.linear, "linear", own)
    logged("begin")
    logged("end")
    on_ranks(2, member)
    names = [name for thread, name in order if thread == "0"]
    assert names == ["begin", "own", "end", "begin", "own", "own", "end"]


def test_shared_heads_layouts_and_nan():
    """A NaN in the second shard reaches no row of the first, nor of other segments, as in one process."""
    q, k, v = inputs(2, t=8, heads=4, d=4, e=4)
    k, v = k[:, :2], v[:, :2].clone()
    v[:, :, 5] = torch.nan
    ids, scheme = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), isopos.rope(4, 2)
    tokens = [a.transpose(1, 2) for a in (q, k, v)]
    for options in ({"causal": True}, {"causal": True, "segment_ids": ids}, {"segment_ids": ids}):
        given = {"layout": "bthd"} | options
        whole = linear_attention(*tokens, **scheme.at(sequence(8), dtype=q.dtype), **given)

        def member(group, rank, given=given):
            part = slice(4 * rank, 4 * rank + 4)
            own = {name: x[part] if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            at = scheme.at(sequence(8)[part], group=group, dtype=q.dtype)
            return linear_attention(*(a[:, part] for a in tokens), **at, **own)

        found = torch.cat(on_ranks(2, member), 1)
        assert 0 < whole.isnan().sum() < whole.numel()
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12, equal_nan=True)


@each("kind", ["rope", "horn-clipped", "rope-complex"])
@each("causal", [True, False])
@each("bad", [0, 1, 2])
def test_gradients_of_rows_that_see_no_nan_are_those_of_one_process(kind, causal, bad):
    scheme, size = scheme_case(kind).build(), 9
    given = inputs(1, t=size, heads=scheme.heads, d=scheme.encoding.features, e=4)
    given[bad][0, 0, 5] = torch.nan
    whole = scheme(*(x.requires_grad_() for x in given), sequence(size), causal=causal)
    kept = whole.isfinite().all(-1)
    grads = torch.autograd.grad(whole[kept].sum(), given)

    def member(group, rank):
        own = [cut(x, group, -2).detach().requires_grad_() for x in given]
        y = scheme(*own, cut(sequence(size), group, 0), causal=causal, group=group)
        return torch.autograd.grad(y[cut(kept, group, -1)].sum(), own)

    others = torch.arange(size) != 5  # the token's own gradients may be NaN
    for expected, *found in zip(grads, *on_ranks(3, member), strict=True):
        joined = torch.cat(found, -2)[..., others, :]
        assert joined.isfinite().all()
        torch.testing.assert_close(joined, expected[..., others, :], rtol=0, atol=1e-12)


@each("causal", [True, False])
@each("options", [{"segment_ids": IDS}, {"decay": -500 * torch.arange(T, dtype=torch.float64).expand(2, T)}, {}])
def test_gradients_of_windows_are_those_of_one_process(causal, options):
    """Queries padded to the last key have its decay; another one's weight would be infinite."""
    given = inputs(1, t=T, heads=2, d=4, e=4, requires_grad=True)
    grads = torch.autograd.grad(linear_attention(*given, causal=causal, window=3, **options).sum(), given)

    def member(group, rank):
        own = [cut(x, group, -2).detach().requires_grad_() for x in given]
        cuts = {name: cut(x, group, -1) for name, x in options.items()}
        y = linear_attention(*own, causal=causal, window=3, group=group, **cuts)
        return torch.autograd.grad(y.sum(), own)

    for expected, *found in zip(grads, *on_ranks(3, member), strict=True):
        torch.testing.assert_close(torch.cat(found, -2), expected, rtol=0, atol=1e-12)


@each("causal", [True, False])
def test_decay_that_increases_between_shards_is_refused_by_all(causal):
    def member(group, rank):
        g = -torch.arange(4, dtype=torch.float64).expand(2, 4)
        with pytest.raises(ValueError, match="decay: expected log decays that do not increase from shard to shard"):
            linear_attention(*content(4, 1), decay=g, causal=causal, group=group)

    on_ranks(2, member)


@each("causal", [True, False])
@each(
    ("options", "message"),
    [
        (
            {"decay": torch.tensor([-4.0, -6, -5, -7]).double()},
            "decay: .* do not increase along tokens, got a shard in which",
        ),
        ({"segment_ids": torch.tensor([1, 2, 1, 2])}, "segment_ids: .* next to each other, .* got a shard with others"),
        (
            {"segment_ids": torch.arange(4) // 2, "decay": torch.arange(4).double()},
            "segment_ids: .* got a shard with others",
        ),
    ],
)
@each("window", [None, 2])
def test_what_one_shard_has_wrong_is_refused_by_all(causal, options, message, window):
    """None waits for the others until the group's timeout."""

    def member(group, rank):
        good = {"decay": -torch.arange(4.0).double() - 4 * rank, "segment_ids": torch.arange(4) // 2 + 2 * rank}
        own = {name: value if rank == 1 else good[name] for name, value in options.items()}
        own = {name: x.expand(2, 4) if name == "decay" else x for name, x in own.items()}
        with pytest.raises(ValueError, match=message):
            linear_attention(*content(4, 1), **own, causal=causal, window=window, group=group)

    on_ranks(3, member)


def test_windows_and_segments_are_checked_across_shards():
    q, k, v = content(2, 1)

    def member(group, rank):
        g = torch.tensor([[50.0, 49], [51, 3], [4, 3]][rank], dtype=torch.float64).expand(2, 2)
        with pytest.raises(ValueError, match="decay: expected log decays that do not increase from shard to shard"):
            linear_attention(q, k, v, decay=g, causal=True, window=3, group=group)
        with pytest.raises(ValueError, match=r"segment_ids: .* an id that returns in a later shard"):
            linear_attention(q, k, v, segment_ids=torch.tensor([[0, 0], [1, 1], [0, 0]][rank]), causal=True, group=group)

    on_ranks(3, member)


@each("size", [2, 3])
@each("causal", [True, False])
def test_complex_denominators_of_shared_heads_and_samples(size, causal):
    scheme = isopos.rope(4, 2, denominator="complex")
    q, k, v = inputs(2, t=6, heads=6, d=4, e=4)
    at = scheme.at(sequence(6), dtype=q.dtype)
    for of_k in (k[:, :2], k[:1, :2], k[:, :2]):
        of_v = v[:, :2] if of_k.shape[0] == 2 else v[0, :2]
        whole = linear_attention(q, of_k, of_v, **at, causal=causal)

        def member(group, rank, of_k=of_k, of_v=of_v):
            own = [cut(a, group, -2) for a in (q, of_k, of_v)]
            at = scheme.at(cut(sequence(6), group, 0), group=group, dtype=q.dtype)
            return linear_attention(*own, **at, causal=causal)

        torch.testing.assert_close(torch.cat(on_ranks(size, member), -2), whole, rtol=0, atol=1e-12)


def test_streams_of_a_model_over_a_group_are_refused():
    models = [Decoder(11, 8, 1, isopos.rope(4, 2)) for _ in range(2)]
    tokens = torch.randint(11, (1, 4))

    def member(group, rank):
        model = models[rank]
        with model.over(group):
            for run in (model.prefill, model.steps()):
                with pytest.raises(ValueError, match=r"group: expected none in a stream, .* leave model\.over"):
                    run(tokens)
        model.prefill(tokens)

    on_ranks(2, member)


def test_what_is_refused_is_refused_before_anything_is_sent():
    q, k, v = content(4, 1)
    rows = [
        ({"state": isopos.State(), "causal": True}, "group: expected none in a stream"),
        ({"return_state": True, "causal": True}, "group: expected none in a stream"),
        ({"causal": True, "k": k[..., :3, :], "v": v[..., :3, :]}, "group: expected as many queries as keys"),
        ({"q": q[..., :0, :]}, "group: expected at least one query"),
    ]

    def member(group, rank):
        with Traffic() as traffic:
            for attention in (linear_attention, softmax_attention):
                for options, message in rows:
                    with pytest.raises(ValueError, match=message):
                        attention(**{"q": q, "k": k, "v": v, "group": group} | options)
            with pytest.raises(ValueError, match="x_key: expected none with a group"):
                isopos.rope(4, 2).at(sequence(4), sequence(3), group=group)
        assert traffic.messages == 0

    on_ranks(2, member)
    with pytest.raises(TypeError, match="group: expected a ProcessGroup or a DeviceMesh, got str"):
        linear_attention(q, k, v, group="all")


@each("scheme", [isopos.rope(4, 2), isopos.sinusoidal(4, 2), [isopos.alibi(4, 2), isopos.none(4, 2)]])
def test_a_decoder_over_shards(scheme):
    model = perturb(Decoder(11, 8, 2, scheme))
    tokens, targets = torch.randint(11, (2, 2, 8))
    loss = model(tokens, targets=targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))

    def member(group, rank):
        part = slice(4 * rank, 4 * rank + 4)
        with model_of[rank].over(group):
            own = model_of[rank](tokens[:, part], targets=targets[:, part])
        return own.detach(), torch.autograd.grad(own, list(model_of[rank].parameters()))

    model_of = [copy.deepcopy(model) for _ in range(2)]
    (first, grads), (second, others) = on_ranks(2, member)
    torch.testing.assert_close((first + second) / 2, loss, rtol=0, atol=1e-12)
    for grad, other, right in zip(grads, others, expected, strict=True):
        torch.testing.assert_close((grad + other) / 2, right, rtol=0, atol=1e-12)
