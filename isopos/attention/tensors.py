"""What every tensor of attention must be: dense, on one device, of leading dimensions that broadcast."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["broadcasts", "check_inputs", "check_tensor"]


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """`check_tensor` of queries, keys and values."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q)


def check_tensor(name: str, x: Any, q: Tensor, device: torch.device | None = None) -> None:
    """TypeError or ValueError where x is no dense tensor on q's device: what another holds is not read as if it were one.

    Log decays, which are float64, are on another device where q's has none.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    device = q.device if device is None else device
    if type(x) is type(q) is Tensor and x.layout is torch.strided and x.device == device and not x.is_nested:
        return
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested one" if x.is_nested else str(x.layout)
        raise ValueError(f"{name}: expected a dense tensor, got {kind}; use to_dense(), or pack sequences with segment_ids")
    if x.device != device or isinstance(x, FakeTensor) is not isinstance(q, FakeTensor):
        own, of_q = (f"{at}{' (fake)' * isinstance(a, FakeTensor)}" for at, a in ((x.device, x), (device, q)))
        raise ValueError(f"{name}: expected a tensor on {of_q} as q, got one on {own}; move it, or positions, to q's device")


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape broadcasts to another without changing it."""
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))
