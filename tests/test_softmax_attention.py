"""What `softmax_attention` has for itself; the rest is in test_linear_attention.py."""

import pytest
import torch
from cases import HEAD_DIM, HEADS, close, gradients, inputs, softmax_by_definition

from isopos.attention import softmax_attention
from isopos.decays import Decay
from isopos.encodings import Rotary, rope_frequencies
from isopos.positions import sequence


def test_scale_and_default():
    q, k, v = inputs(2, t=5)
    close(softmax_attention(q, k, v, scale=0.1), softmax_by_definition(q, k, v, scale=0.1))
    lift = Rotary(rope_frequencies(HEAD_DIM)[None, None], lift=True)(sequence(5), torch.float64)
    close(softmax_attention(q, k, v, isometry=lift), softmax_by_definition(q, k, v, isometry=lift, scale=HEAD_DIM**-0.5))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_autocast_softmax_is_finite(masked, causal):
    t = 70
    leaves = inputs(2, t=t, dtype=torch.float32, requires_grad=True)
    rho, g = Rotary(rope_frequencies(HEAD_DIM // 2)[None, None])(sequence(t)), Decay(torch.tensor([0.05, 0.4]))(sequence(t))
    with torch.autocast("cpu", torch.bfloat16):
        mask = torch.rand(2, t) < 0.5 if masked else None
        out = softmax_attention(*leaves, isometry=rho, decay=g, causal=causal, mask=mask)
    assert out.isfinite().all()
    exact = softmax_attention(*leaves, isometry=rho, decay=g, causal=causal, mask=mask)
    close(out, exact, dtype=torch.bfloat16, roundings=8)


def test_rows_without_keys_have_finite_gradients_in_float16():
    q, k, v = leaves = inputs(1, t=100, dtype=torch.float16, requires_grad=True)
    g = Decay(torch.full((HEADS,), 2000.0))(sequence(100))
    out = softmax_attention(q, k, v, decay=g, causal=True, mask=torch.arange(100)[None] >= 40)
    assert all(grad.isfinite().all() for grad in gradients(out, list(leaves)))
