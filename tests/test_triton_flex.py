"""Test isopos.attention.flex on a CPU or GPU against attention with all scores in memory."""

import warnings
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention

import isopos
from isopos import attention, schemes
from isopos.attention import flex
from isopos.ops import gpu
from isopos.terms import DistanceKernel, Offsets

DEVICE = "cpu" if gpu.interpreted() else "cuda"
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU is here, and TRITON_INTERPRET=1 is not set"
    ),
]
T, S, D = 9, 12, 16
CASES = {  # scheme, its options, arguments of attention
    "t5": ("t5", {}, {}),
    "t5, causal": ("t5", {}, {"causal": True}),
    "alibi, causal": ("alibi", {}, {"causal": True}),
    "alibi, bidirectional, masked": ("alibi", {}, {"mask": torch.tensor([[1, 1, 0, 1, 1, 0, 1, 0, 1], [0] * 9]) > 0}),
    "kerple log": ("kerple", {}, {"causal": True}),
    "kerple power, in windows": ("kerple", {"kernel": "power"}, {"window": 4}),
    "deberta": ("deberta", {}, {}),
    "rotary, in causal windows": ("rope", {}, {"causal": True, "window": 3}),
    "rotary, packed": ("rope", {}, {"segment_ids": torch.arange(T) // 4, "causal": True}),
    "rotary, packed, a sample each": (
        "rope",
        {},
        {"segment_ids": torch.stack((torch.arange(T) // 4, torch.arange(T) // 3))},
    ),
    "forgetting by content": ("rope", {"decay": "forget"}, {"causal": True}),
    "locality": ("rope", {}, {"locality": torch.rand(T, T)}),
}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Count runs of flex attention, and enable its gradients on the CPU, where PyTorch blocks them."""
    found, run = [], flex._run
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_run", lambda *given: found.append(1) or run(*given))
    with torch.device(DEVICE):
        yield found


def both(name, options, more, *, groups=1, positions=None, batch=(2,)):
    """Output and gradients of everything, with flex attention and without."""
    scheme, draw = schemes.build(name, D, 2, {"attention": "softmax"} | options), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw, device="cpu").to(parameter.device))
    scheme.to(DEVICE)
    more = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in more.items()}
    q = torch.randn(*batch, 2 * groups, T, D, generator=draw, device="cpu").to(DEVICE).requires_grad_()
    k, v = torch.randn(2, *batch, 2, T, D, generator=draw, device="cpu").to(DEVICE).requires_grad_().unbind()
    leaves = [q, k, v, *scheme.parameters()]
    for switch in (gpu.SWITCH, "NONE"):
        with mock.patch.object(gpu, "SWITCH", switch):
            at = scheme.at(torch.arange(T)[:, None] if positions is None else positions)
            out = attention.softmax_attention(q, k, v, **at | more)
        found = torch.autograd.grad((out * torch.linspace(-1, 1, D)).sum(), leaves, allow_unused=True)
        yield [out, *(x for x in found if x is not None)]


def runs_of(name):
    """Runs of flex attention per call of a case. On GPUs it has no gradient of KERPLE's kernels, and a warning says so."""
    return 0 if DEVICE == "cuda" and name.startswith("kerple") else 1


def agree(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert (a - b).abs().max() < (3e-6 if DEVICE == "cpu" else 1e-4) * b.abs().max().clamp_min(1)


@pytest.mark.filterwarnings("ignore:.*no gradient of a distance kernel")
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(runs, case):
    agree(*both(*CASES[case]))
    assert len(runs) == runs_of(case)


@pytest.mark.filterwarnings("ignore:.*no gradient of a distance kernel")
def test_heads_share_keys(runs):
    cases = "t5, causal", "alibi, bidirectional, masked", "kerple log", "deberta"
    for case in cases:
        agree(*both(*CASES[case], groups=3))
    assert len(runs) == sum(map(runs_of, cases))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_log_decays(runs, causal):
    q, k, v = torch.randn(3, 2, 2, T, D)
    g = -torch.rand(2, 2, T, dtype=torch.float64).cumsum(-1).requires_grad_()
    found = []
    for switch in (gpu.SWITCH, "NONE"):
        with mock.patch.object(gpu, "SWITCH", switch):
            out = attention.softmax_attention(q, k, v, decay=g, causal=causal)
        found.append([out, *torch.autograd.grad(out.square().sum(), [g])])
    agree(*found)
    assert len(runs) == 1


@pytest.mark.filterwarnings("ignore:.*no gradient of a distance kernel")
@pytest.mark.parametrize("name", ["t5", "kerple", "deberta"])
def test_positions_of_samples(runs, name):
    positions = torch.stack((torch.arange(T), 3 * torch.arange(T) - 20))[..., None]
    agree(*both(name, {}, {}, positions=positions))
    agree(*both(name, {}, {}, batch=()))
    assert len(runs) == 2 * runs_of(name)


def test_more_keys_than_queries_and_queries_without_keys(runs):
    q, (k, v) = torch.randn(2, 2, S, D), torch.randn(2, 2, 2, T, D)
    for a, b, c in ((q[..., :5, :], k, v), (q, k, v)):
        g = tuple(-torch.arange(x.shape[-2], dtype=torch.float64).expand(2, -1) / 8 for x in (a, b))
        for window in (None, 2):
            found = attention.softmax_attention(a, b, c, decay=g, causal=True, window=window)
            with mock.patch.object(gpu, "SWITCH", "NONE"):
                agree([found], [attention.softmax_attention(a, b, c, decay=g, causal=True, window=window)])
    assert not found[..., : S - T, :].any()
    assert len(runs) == 4


def test_half_precision_keeps_its_dtype(runs):
    scheme, x = isopos.t5(D, 2).to(DEVICE), torch.arange(T)[:, None]
    q, k, v = torch.randn(3, 2, 2, T, D).bfloat16()
    found = attention.softmax_attention(q, k, v, **scheme.at(x), causal=True)
    wide = attention.softmax_attention(q.float(), k.float(), v.float(), **scheme.at(x), causal=True)
    assert found.dtype == torch.bfloat16
    assert (found - wide).abs().max() < 2e-2
    assert len(runs) == 2


def test_no_pairs_are_formed():
    """Terms have one row per token, and flex attention computes the bias of a pair from them."""
    x = torch.arange(1000)[:, None]
    for scheme, kind in (
        (isopos.t5(D, 2).to(DEVICE), Offsets),
        (isopos.kerple(D, 2).to(DEVICE), DistanceKernel),
        (isopos.deberta(D, 2).to(DEVICE), Offsets),
    ):
        for term in scheme.at(x)["terms"]:
            assert type(term) is kind
            assert max(a.numel() for a in vars(term).values() if isinstance(a, torch.Tensor)) < 100_000


def test_a_warning_names_what_flex_attention_does_not_serve(runs):
    q, k, v = torch.randn(3, 2, 2, T, D)
    x = torch.arange(T)[:, None]
    cases = {
        "takes no attn_mask": {"attn_mask": torch.ones(T, T, dtype=torch.bool)},
        "has no dropout": {"dropout": 0.5, "window": 3},
        "adds no terms to values": isopos.shaw(D, 2).to(DEVICE).at(x),
        "terms of pairs one by one, and Numbers": isopos.fire(D, 2).to(DEVICE).at(x),
    }
    for why, options in cases.items():
        with pytest.warns(UserWarning, match=f"all scores are formed in memory, since flex attention .*{why}"):
            attention.softmax_attention(q, k, v, **options)
    with pytest.warns(UserWarning, match="computes in float32"):
        attention.softmax_attention(q.double(), k.double(), v.double(), window=3)
    with pytest.warns(UserWarning, match="streams"):
        attention.softmax_attention(q, k, v, window=3, causal=True, return_state=True)
    with pytest.warns(UserWarning, match="one axis of samples"):
        attention.softmax_attention(*torch.randn(3, 2, 2, 2, T, D), window=3)
    assert not runs


def test_a_warning_names_what_does_not_compile(monkeypatch):
    """Other errors propagate."""
    q, k, v = torch.randn(3, 2, 2, T, D)
    failure = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})

    def fails(error):
        def run(*given):
            raise error

        monkeypatch.setattr(flex, "_run", run)

    fails(failure("OutOfResources: shared memory\nmany lines"))
    with pytest.warns(UserWarning, match="since flex attention fails: OutOfResources: shared memory$"):
        found = attention.softmax_attention(q, k, v, window=3)
    with mock.patch.object(gpu, "SWITCH", "NONE"):
        agree([found], [attention.softmax_attention(q, k, v, window=3)])
    fails(ValueError("terms: expected others"))
    with pytest.raises(ValueError, match="expected others"):
        attention.softmax_attention(q, k, v, window=3)


def test_it_is_off_by_default(monkeypatch, runs):
    monkeypatch.delenv("ISOPOS_TRITON")
    q, k, v = torch.randn(3, 2, 2, T, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.softmax_attention(q, k, v, **isopos.t5(D, 2).to(DEVICE).at(torch.arange(T)[:, None]))
        attention.softmax_attention(q, k, v, attn_mask=torch.ones(T, T, dtype=torch.bool))
    assert not runs
