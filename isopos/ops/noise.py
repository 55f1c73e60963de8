"""Random numbers as a function of position, reproducible at any position without a table."""

import math

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hashed(x: Tensor) -> Tensor:
    """A hash of int64, elementwise: the finaliser of splitmix64 (Steele et al. 2014)."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX2)
    return x ^ _shifted(x, 31)


def gaussian(position: Tensor, width: int, seed: int) -> Tensor:
    """Independent standard normal numbers, float64 ``[*b t width]``, for integer positions ``[*b t]``."""
    row = hashed(hashed(position.long()) + seed)  # nested, since a sum of hashes would be symmetric in x and y
    bits = hashed(row[..., None] + torch.arange(width, device=position.device))
    first, second = ((_shifted(bits, shift) & 0xFFFFFFFF).double().add(0.5) / 2**32 for shift in (0, 32))
    return (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()  # Box and Muller


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1 if bits else -1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)
