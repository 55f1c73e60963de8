"""What every test starts from: seeded random numbers, one thread, float32 by default."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("isopos", deadline=None, max_examples=20, derandomize=True, database=None)
hypothesis.settings.load_profile("isopos")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_start():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
