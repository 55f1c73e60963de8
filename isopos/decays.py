"""Log decays g(x) = -rate * x: a weight shrinks by exp(-rate) per step (RetNet; PermuteFormer's r = exp(-rate))."""

import torch
from torch import Tensor, nn

from isopos.catalog import at_least
from isopos.exact import ExactModule, constant, to_float64
from isopos.positions import Line

__all__ = ["Decay", "alibi_rates", "permuteformer_rates", "permuteformer_released_rates", "retnet_rates"]


class Decay(ExactModule):
    """g(x) = -rate * x with one rate per head, on a line.

    Args:
        rate: ``[h]``, in nats per step, nonnegative (r = exp(-rate)). Positions must not decrease along tokens.
        learned: Whether the rates are learned, as logarithms, so that they stay positive.

    Examples:
        >>> Decay(torch.tensor([0.5]))(torch.arange(3)[:, None]).tolist()
        [[-0.0, -0.5, -1.0]]
    """

    log_rate: nn.Parameter | None

    def __init__(self, rate: Tensor, *, learned: bool = False):
        super().__init__()
        least = "positive" if learned else "not negative"
        if rate.ndim != 1 or not (rate > 0 if learned else rate >= 0).all() or not rate.isfinite().all():
            raise ValueError(f"rate: expected [h], finite and {least}, got {rate.tolist()}")
        self.initial_rate = constant(rate)
        self.parametrise("log_rate", self.initial_rate.log(), learned=learned)

    @property
    def rate(self) -> Tensor:
        """Rates ``[h]`` in nats per step: float64."""
        return self.initial_rate if self.log_rate is None else to_float64(self.log_rate).exp()

    def forward(self, x: Tensor) -> Tensor:
        """g at positions x ``[*b t 1]``: float64 ``[*b h t]``, on the CPU if x's device has no float64."""
        Line(real=True).check(x)
        return -to_float64(self.rate, x.device)[:, None] * to_float64(x[..., None, :, 0])


def retnet_rates(heads: int) -> Tensor:
    """Rates of gamma = 1 - 2^(-5-h) for heads h = 0, 1, ... (Sun et al. 2023, Eq. 8): float64 ``[heads]``.

    Examples:
        >>> retnet_rates(2).neg().exp().tolist()
        [0.96875, 0.984375]
    """
    head = torch.arange(heads, device="cpu", dtype=torch.float64)
    return -torch.log1p(-torch.exp2(-5 - head))


def permuteformer_rates(heads: int) -> Tensor:
    """Rates of r in [0.88, 0.99] (PermuteFormer, section 4.2.1), evenly spaced in log(r / (1 - r)): float64 ``[heads]``.

    Examples:
        >>> [round(r, 2) for r in permuteformer_rates(2).neg().exp().tolist()]
        [0.88, 0.99]
    """
    ends = torch.tensor([0.88, 0.99], device="cpu", dtype=torch.float64).logit()
    share = torch.linspace(0, 1, heads, device="cpu", dtype=torch.float64)
    return -torch.sigmoid(ends[0] + share * (ends[1] - ends[0])).log()


def permuteformer_released_rates(heads: int) -> Tensor:
    """Rates of r = sigmoid(2 + 3 h / H) for heads h = 0, 1, ..., H - 1, as in PermuteFormer's code: float64 ``[heads]``.

    Examples:
        >>> [round(r, 2) for r in permuteformer_released_rates(2).neg().exp().tolist()]
        [0.88, 0.97]
    """
    head = torch.arange(heads, device="cpu", dtype=torch.float64)
    return -torch.sigmoid(2 + 3 * head / heads).log()


def alibi_rates(heads: int) -> Tensor:
    """ALiBi's slopes: 2^(-8 i / n) for i = 1, ..., n heads (Press et al. 2022, section 3): float64 ``[heads]``.

    If n is not a power of two: the slopes of the next smaller power of two, then every other slope of the next larger one.

    Examples:
        >>> alibi_rates(6).log2().tolist()
        [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]
    """
    count = 2 ** (at_least("heads", heads).bit_length() - 1)
    exponents = [i / count for i in range(1, count + 1)] + [i / count / 2 for i in range(1, 2 * (heads - count), 2)]
    return torch.exp2(-8 * torch.tensor(exponents, device="cpu", dtype=torch.float64))


RATES = {
    "retnet": retnet_rates,
    "permuteformer": permuteformer_rates,
    "permuteformer-released": permuteformer_released_rates,
    "alibi": alibi_rates,
}
