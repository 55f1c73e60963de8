"""Test isopos.ops.linear.triton_step in the interpreter or on a GPU: steps of a stream against float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import with_edges

import isopos
from isopos import attention, schemes
from isopos import stream as stream_module
from isopos.attention.linear import sums_of
from isopos.attention.problem import check_linear
from isopos.maps import Gather
from isopos.ops import gpu
from isopos.ops.linear import Clamped
from isopos.ops.linear.cpu import CPU
from isopos.ops.linear.triton_step import STEP, TritonSteps
from isopos.state import State
from isopos.stream import Stream

DEVICE = "cpu" if gpu.interpreted() else "cuda"
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is here, and TRITON_INTERPRET=1 is not set"
    ),
]
NAMES = ("cosformer", "lrpe-orthogonal", "lrpe-permutation", "lrpe-unitary", "none", "permuteformer", "retnet", "rope")
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def launches(monkeypatch):
    """Record launches of the kernel, with the C kernel disabled."""
    from isopos.ops.linear import triton_step

    found, launch = [], triton_step.StepPlan.__call__
    monkeypatch.setattr(type(CPU), "serves", lambda self, sums: "it is not asked here")
    monkeypatch.setattr(triton_step.StepPlan, "__call__", lambda *args: found.append(1) or launch(*args))
    return found


def content(scheme, t, *batch, dtype=torch.float32, values=None):
    width, draw = scheme.encoding.features, torch.Generator().manual_seed(0)
    widths = width, width, values or width // scheme.width
    return with_edges(*(torch.randn(*batch, scheme.heads, t, e, generator=draw).to(DEVICE, dtype) for e in widths))


def at_end(scheme, given, *, dtype=None, **options):
    """The sums before the last token, and its output and the following state by attention in float64."""
    q, k, v = (x.double() for x in given)
    t, run = q.shape[-2], {"causal": True, "return_state": True}
    first, last = ([x[..., part, :] for x in (q, k, v)] for part in (slice(t - 1), slice(t - 1, t)))
    own = {name: x[..., : t - 1] if name == "mask" else x for name, x in options.items()}
    _, state = attention.linear_attention(
        *first, **scheme.at(torch.arange(t - 1, device=DEVICE)[:, None], state=State(), dtype=torch.float64), **run, **own
    )
    own = {name: x[..., t - 1 :] if name == "mask" else x for name, x in options.items()}
    position = torch.tensor([[t - 1]], device=DEVICE)
    out, after = attention.linear_attention(*last, **scheme.at(position, state=state, dtype=torch.float64), **run, **own)
    narrow = replace(
        state, kind="", tensors={name: x.float() if name.startswith("sum") else x for name, x in state.tensors.items()}
    )
    again = scheme.at(position, state=narrow) | {"causal": True} | own
    sums = sums_of(check_linear(*(x[..., t - 1 :, :] for x in given), again, streams=True))
    return sums, out, [after[f"sum{n}"] for n in range(len(sums.stream.sums))]


def run(sums):
    """Run one step; returns the output and the sums."""
    assert STEP.serves(sums) == ""
    total, after = STEP.run(sums)
    return [total, *after]


def agree(found, expected, dtype=torch.float32):
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() < DTYPES[dtype] * b.abs().max().clamp_min(1)


@pytest.mark.parametrize("denominator", ["plain", "encoded", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_every_scheme(name, denominator):
    scheme = schemes.REGISTRY[name](8, 3, denominator=denominator)
    sums, out, after = at_end(scheme, content(scheme, 4, 2))
    found = run(sums)
    assert found[0].dtype == torch.float32
    agree(found, [out, *after])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["rope", "retnet", "lrpe-unitary"])
def test_half_precision(name, dtype):
    scheme = schemes.REGISTRY[name](12, 2, denominator="encoded", feature_map="relu")
    sums, out, after = at_end(scheme, content(scheme, 4, 1, dtype=dtype))
    agree(run(sums), [out, *after])  # sums are float32, and so is what is read out of them


@pytest.mark.parametrize("feature_map", ["identity", "elu+1", "relu", "relu2", "exp"])
@pytest.mark.parametrize(("width", "values"), [(6, 5), (40, 1), (2, 80)])
def test_feature_maps_and_sizes(monkeypatch, feature_map, width, values):
    from isopos.ops.linear import triton_step

    monkeypatch.setattr(triton_step, "TILE", 64)  # several blocks of features
    scheme = schemes.REGISTRY["rope"](width, 2, feature_map=feature_map, denominator="plain", decay="retnet")
    sums, out, after = at_end(scheme, content(scheme, 4, 2, values=values))
    agree(run(sums), [out, *after])


@pytest.mark.parametrize("denominator", ["plain", "encoded"])
def test_masked_tokens_leave_the_sums(denominator):
    scheme = isopos.retnet(8, 2, denominator=denominator, feature_map="elu+1")
    given = content(scheme, 4, 3)
    mask = torch.ones(3, 4, dtype=torch.bool, device=DEVICE)
    mask[1, 3] = mask[2, 1] = False
    sums, out, after = at_end(scheme, given, mask=mask)
    given[1][1, :, 3] = given[2][1, :, 3] = torch.nan
    broken = replace(sums, k=given[1][..., 3:, :], v=given[2][..., 3:, :])
    for each in (sums, broken):
        agree(run(each), [out, *after])


def test_a_step_leaves_the_sums_before_it_as_they_are():
    scheme = isopos.retnet(8, 2, denominator="plain")
    sums, out, after = at_end(scheme, content(scheme, 4, 2))
    kept = [x.clone() for x in sums.stream.sums]
    agree(run(sums), [out, *after])
    assert all(torch.equal(x, own) for x, own in zip(sums.stream.sums, kept, strict=True))


def test_what_weighs_nothing_is_gone_and_small_denominators_are_clamped():
    scheme = isopos.retnet(8, 2, denominator="encoded", feature_map="identity")
    sums, *_ = at_end(scheme, content(scheme, 3, 1))
    sums.stream.sums[0].fill_(torch.nan)
    gone = replace(sums, g=(sums.g[0] - 1e6,) * 2, q=0 * sums.q)
    with Clamped() as clamped:
        total, state = run(gone)
    assert state.isfinite().all()
    assert (clamped.count, clamped.total) == (2, 2)
    assert not total.any()


def test_an_index_that_is_none_gives_nan():
    scheme = isopos.permuteformer(8, 2, feature_map="relu", denominator="none")
    sums, *_ = at_end(scheme, content(scheme, 3, 1))
    rho = sums.features[0].map
    wrong = Gather(torch.full_like(rho.index, rho.index.shape[-1]))
    sums = replace(sums, features=(sums.features[0]._replace(map=wrong), *sums.features[1:]))
    assert run(sums)[0].isnan().all()


NARROW = [("rope", torch.bfloat16), ("lrpe-unitary", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*((x, torch.float32) for x in ("rope", "retnet", "permuteformer")), *NARROW])
def test_prepared_steps_go_on(monkeypatch, launches, name, dtype):
    monkeypatch.setattr(stream_module, "AHEAD", 3)
    scheme = schemes.REGISTRY[name](8, 2)
    given, calls, call = content(scheme, 9, 2, dtype=dtype), [], TritonSteps.__call__
    monkeypatch.setattr(TritonSteps, "__call__", lambda *args: calls.append(1) or call(*args))
    layer = Stream(scheme)
    other = Stream(scheme, tables_from=layer)
    found = []
    for i in range(9):
        token = [x[..., i : i + 1, :] for x in given]
        if i == 5:  # heads of a token next to each other
            token[0] = token[0].transpose(1, 2).contiguous().transpose(1, 2)
        found.append(layer(*token))
        assert torch.equal(other(*token), found[-1])
    assert len(calls) == 16  # all but the first
    assert len(launches) == 16
    assert found[-1].dtype == dtype
    q, k, v = (x.double() for x in given)
    run = {"causal": True, "return_state": True, "state": State()}
    out, state = attention.linear_attention(
        q, k, v, **scheme.at(torch.arange(9, device=DEVICE)[:, None], dtype=torch.float64) | run
    )
    agree([torch.cat(found, -2)], [out], dtype)
    for name, x in layer.state.tensors.items():
        agree([x], [state.tensors[name]])


@pytest.mark.parametrize("moved", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_token_of_another_device_is_an_error_and_the_stream_goes_on(launches, moved):
    """In a stream with prepared steps. No kernel receives a tensor that it cannot read."""
    scheme, other = isopos.retnet(8, 2, denominator="plain"), "meta" if DEVICE == "cpu" else "cpu"
    given = content(scheme, 6, 2)
    layer, expected = Stream(scheme), Stream(scheme)
    for i in range(6):
        token = [x[..., i : i + 1, :] for x in given]
        if i == 3:
            before, seen = len(launches), [x.to(other) if n in moved else x for n, x in enumerate(token)]
            with pytest.raises(ValueError, match=rf"expected .* on {DEVICE}|on {other}"):
                layer(*seen)
            assert len(launches) == before
            assert layer.length == 3
        torch.testing.assert_close(layer(*token), expected(*token))


def test_what_the_kernel_does_not_know_it_refuses():
    scheme = isopos.rope(8, 2)
    sums, *_ = at_end(scheme, content(scheme, 3, 2))
    cases = {
        "after others": replace(sums, stream=replace(sums.stream, sums=())),
        "one token": replace(sums, q=sums.q.expand(2, 2, 2, 8)),
        "always divides": replace(sums, denominator="column"),
        "one log decay": replace(sums, g=(torch.zeros(2, 2, 1, dtype=torch.float64, device=DEVICE),) * 2),
        "one state per query": replace(sums, q=sums.q.expand(3, 2, 2, 1, 8)),
        "closed form": replace(sums, features=(sums.features[0]._replace(kinds=None), *sums.features[1:])),
        "contiguous float32 sums": replace(
            sums, stream=replace(sums.stream, sums=tuple(x.double() for x in sums.stream.sums))
        ),
        "plain tensors": replace(sums, q=torch.nn.Parameter(sums.q).to_sparse()),
    }
    for why, case in cases.items():
        assert why in STEP.serves(case)
    with torch.enable_grad():
        assert "gradients" in STEP.serves(replace(sums, q=sums.q.clone().requires_grad_()))
    assert STEP.serves(sums) == ""


def test_it_is_off_by_default(monkeypatch):
    monkeypatch.delenv("ISOPOS_TRITON")
    scheme = isopos.rope(8, 2)
    layer = Stream(scheme)
    for _ in range(3):
        layer(*torch.zeros(3, 1, 2, 1, 8, device=DEVICE).unbind())
    assert layer.prepared == 0
    sums, *_ = at_end(scheme, content(scheme, 3, 2))
    assert "ISOPOS_TRITON=1 in the environment asks for it" in STEP.serves(sums)


class Graph:
    """Repeats the last launch of the kernel with the same arguments, as a captured CUDA graph does."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.replay = partial(self.kernel[grid], *arguments, **constants)
            self.replay()

        return launch


@pytest.mark.parametrize("name", ["rope", "retnet", "permuteformer"])
def test_a_repeated_launch_is_the_next_token(monkeypatch, launches, name):
    from isopos.ops.linear import triton_step_kernel

    graph = Graph(triton_step_kernel.step)
    monkeypatch.setattr(triton_step_kernel, "step", graph)
    monkeypatch.setattr(stream_module, "AHEAD", 5)
    scheme, found = schemes.REGISTRY[name](8, 2), []
    given, layer, other = content(scheme, 9, 2), Stream(scheme), Stream(scheme)
    expected = [other(*(x[..., i : i + 1, :] for x in given)) for i in range(9)]
    token = [x[..., :1, :].clone() for x in given]

    def write(i):
        for x, own in zip(token, given, strict=True):
            x.copy_(own[..., i : i + 1, :])

    for i in range(3):
        write(i)
        out = layer(*token)
    assert layer.prepared == 3  # of five, after two of them; the first token had no tables
    for i in range(3, 6):
        write(i)
        graph.replay()
        found.append(out.clone())
    write(0)
    before = [x.clone() for x in layer._steps.sums]
    graph.replay()
    assert out.isnan().all()
    for x, own in zip(layer._steps.sums, before, strict=True):
        x.copy_(own)
    with pytest.raises(ValueError, match="expected at most the 3 tokens that are prepared, got 4"):
        layer.replayed(4)
    layer.replayed(3)
    assert (layer.length, layer.prepared) == (6, 0)
    sides, rows = layer._steps.sides, layer._steps.rows
    for i in range(6, 9):
        write(i)
        found.append(layer(*token))
    assert all(map(torch.equal, found, expected[3:]))
    assert layer._steps.rows is rows
    assert all(new.table is old.table for new, old in zip(layer._steps.sides, sides, strict=True))  # overwritten
