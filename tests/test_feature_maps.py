"""Feature maps."""

import pytest
import torch
import torch.nn.functional as F
from cases import close

from isopos.feature_maps import FEATURE_MAPS

X = torch.cat((torch.linspace(-50, 50, 41), torch.tensor([0.0, -1e4, 1e4]))).double()
DEFINITIONS = {
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": lambda x: torch.where(x > 0, x, 0) + 0.001,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_definition(name):
    close(FEATURE_MAPS[name](X), DEFINITIONS[name](X))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradients_are_finite_and_right(name):
    x = X[X != 0].requires_grad_()
    pairs = (torch.autograd.grad(f(x).sum(), x)[0] for f in (FEATURE_MAPS[name], DEFINITIONS[name]))
    close(*pairs)


@pytest.mark.parametrize("name", ["elu+1", "relu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_positive_maps_are_positive(name, dtype):
    y = FEATURE_MAPS[name](torch.linspace(-5, 5, 41, dtype=dtype))
    assert (y > 0).all()
    assert y.dtype == dtype
