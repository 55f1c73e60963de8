"""Triton's linear attention, interpreted on a CPU, beside its definition in float64."""

import pytest
import torch
from cases import LINEAR, linear_options, quadratic, with_gradients

from isopos.ops.linear import triton

pytestmark = pytest.mark.triton
SERVED = [name for name in LINEAR if name != "favor"]


@pytest.fixture(autouse=True)
def several_segments(monkeypatch):
    """Of two chunks each, where there are more."""
    monkeypatch.setattr(triton, "LEAST", 2)
    calls = []
    forward = triton.Triton.forward
    monkeypatch.setattr(triton.Triton, "forward", lambda *args: calls.append(1) or forward(*args))
    return calls


def drawn(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def near(found, exact, most=3e-6):
    """Equal up to `most` times the largest number."""
    for x, y in zip(found, exact, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).abs().max() <= most * max(y.abs().max(), exact[0].abs().max())


def by_definition(inputs, given, grad):
    """The same by the definition, in float64."""
    if "segment_ids" in given:
        given = given | {"segment_ids": (given["segment_ids"],) * 2}
    return with_gradients(inputs, torch.float64, given, grad, quadratic)


@pytest.mark.parametrize("name", SERVED)
def test_agrees_with_the_definition(several_segments, name):
    b, h, t, d, e = 1, 2, 200, 16, 24
    given = linear_options(name, b, h, t, d)
    *inputs, grad = drawn((b, h, t, d), (b, h, t, d), (b, h, t, e), (b, h, t, e))
    near(with_gradients(inputs, torch.float32, given, grad), by_definition(inputs, given, grad))
    assert several_segments
