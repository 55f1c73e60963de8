"""Feature maps phi of linear attention: elementwise, without parameters, applied before the isometry."""

from collections.abc import Callable

from torch import Tensor

FeatureMap = Callable[[Tensor], Tensor]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 = exp(min(x, 0)) + max(x, 0), always positive (Katharopoulos et al. 2020, Eq. 7).

    Example:
        >>> import torch
        >>> elu1(torch.tensor([-1.0, 0.0, 2.0])).tolist()
        [0.3678..., 1.0, 3.0]
    """
    return x.clamp_max(0).exp() + x.relu()


def relu(x: Tensor) -> Tensor:
    """max(x, 0) + 0.001: positive, so that denominators are too (PermuteFormer, section 4.1)."""
    return x.relu() + 1e-3


def identity(x: Tensor) -> Tensor:
    """x itself: signed scores. Use it with ``denominator=None`` and a norm, as RetNet does."""
    return x


FEATURE_MAPS: dict[str, FeatureMap] = {"elu+1": elu1, "relu": relu, "identity": identity}
