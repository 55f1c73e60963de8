"""One sequence over several processes is the sequence in one: outputs and gradients, to roundings, at a constant traffic.

The processes are threads here, with Gloo between them; the slow test starts real ones.
"""

import copy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cases import each, inputs, named, perturb, scheme_case
from shards import IDS, SHARDS, Whole, on_ranks, settings
from structures import over_structures

import isopos
from isopos import Decoder, linear_attention, parallel, sequence, softmax_attention
from isopos.attention import sharded
from isopos.parallel import Traffic

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


@pytest.mark.slow
@over_structures()
def test_shards_of_every_structure_in_every_setting(case, kind):
    compared([(case, kind, causal, options) for causal in case.ways for options in settings(case, kind)])


def test_float32_to_a_millionth():
    cases = [scheme_case(name) for name in ("rope-learned-decay", "retnet", "fox", "t5")]
    more = [{}, {"window": 3}, {"segment_ids": IDS}]
    compared([(case, case.kinds[0], True, options) for case in cases for options in more], torch.float32, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes(size):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("shards.py"))], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"cases in {size} processes" in done.stdout


def content(t, *batch, heads=2, d=4):
    return inputs(*batch, t=t, d=d, e=d, heads=heads, dtype=torch.float32, requires_grad=True)


def sent(t, attend, size=2, **options):
    """Bytes and messages that a process sends in a forward and a backward pass over `t` tokens of each."""

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


@each("causal", [True, False])
def test_decay_that_increases_between_shards_is_refused_by_all(causal):
    def member(group, rank):
        g = -torch.arange(4, dtype=torch.float64).expand(2, 4)
        with pytest.raises(ValueError, match="decay: expected log decays that do not increase from shard to shard"):
            linear_attention(*content(4, 1), decay=g, causal=causal, group=group)

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
            with pytest.raises(ValueError, match="x_key: expected none beside a group"):
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
