"""Test log decays g(x) = -rate * x."""

import copy
import math

import pytest
import torch
from cases import ascending, close, each, perturb

from isopos.decays import RATES, Decay, permuteformer_rates, retnet_rates
from isopos.positions import sequence


def test_decay_is_a_line_a_head():
    rate, x = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64), ascending(2, 7)
    g = Decay(rate)(x)
    assert g.shape == (2, 3, 7)
    assert g.dtype == torch.float64
    for h in range(3):
        close(g[:, h], -rate[h] * x[..., 0])


def test_differences_stay_exact_far_out():
    decay = Decay(torch.tensor([0.01]), learned=True)
    near, far = decay(sequence(100)), decay(sequence(100) + 2**31)
    close(far - far[..., :1], near - near[..., :1], dtype=torch.float32, roundings=2)


def test_rates_are_the_papers():
    close(retnet_rates(3), torch.tensor([-math.log(1 - 2.0**-n) for n in (5, 6, 7)]).double(), dtype=torch.float32)
    shrink = permuteformer_rates(5).neg().exp()
    close(shrink[[0, -1]], torch.tensor([0.88, 0.99]).double(), dtype=torch.float32)
    close(shrink.logit().diff(), shrink.logit().diff()[:1].expand(4))
    released = RATES["permuteformer-released"](8)  # the code's torch.sigmoid(torch.arange(H) / H * 3 + 2)
    close(released, torch.tensor([math.log1p(math.exp(-(2 + 3 * h / 8))) for h in range(8)]).double(), dtype=torch.float32)
    for rates in RATES.values():
        assert (rates(1) > 0).all()
        assert rates(8).shape == (8,)
        assert rates(8).dtype == torch.float64


@each("dtype", [torch.bfloat16, torch.float16])
def test_casting_and_autocast_keep_rates_exact(dtype):
    decay = Decay(retnet_rates(4), learned=True)
    before = decay(sequence(9))
    assert torch.equal(decay.to(dtype)(sequence(9)), before)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(decay(sequence(9)), before)


def test_learned_rates():
    decay = Decay(retnet_rates(4), learned=True)
    close(decay(sequence(9)), Decay(retnet_rates(4))(sequence(9)), dtype=torch.float32)
    initial = copy.deepcopy(decay.state_dict())
    decay(sequence(9)).sum().backward()
    assert (decay.log_rate.grad != 0).all()
    perturb(decay, 1.0)
    assert not torch.allclose(decay.log_rate.float(), initial["log_rate"])
    assert (decay(sequence(9)).diff() < 0).all()
    assert torch.equal(copy.deepcopy(decay)(sequence(9)), decay(sequence(9)))
    decay.float().to("meta").to_empty(device="cpu").reset_parameters()
    torch.testing.assert_close(decay.state_dict(), initial, rtol=0, atol=0)
    assert torch.autograd.gradcheck(
        lambda p: torch.func.functional_call(decay, {"log_rate": p}, sequence(5)),
        decay.log_rate.detach().double().requires_grad_(),
    )


@each(
    ("call", "message"),
    [
        (lambda: Decay(torch.tensor([-1.0])), "not negative"),
        (lambda: Decay(torch.tensor([math.nan])), "not negative"),
        (lambda: Decay(torch.tensor([0.0]), learned=True), "positive"),
        (lambda: Decay(torch.tensor(1.0)), r"rate: expected \[h\]"),
        (lambda: Decay(torch.tensor([math.inf])), r"rate: expected \[h\], finite and not negative, got \[inf\]"),
        (lambda: Decay(torch.tensor([1.0]))(torch.zeros(3, 2)), r"expected \[\*b t 1\]"),
        (lambda: Decay(torch.tensor([1.0]))(torch.zeros(3, 1).half()), "torch.float16"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_heads_have_no_rates():
    with pytest.raises(ValueError, match="heads: expected an integer of at least 1, got 0"):
        RATES["alibi"](0)
