"""Upper limits of a machine's speed: the time of attention at the rate of matrix products, copies and zeros."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

PRODUCT = "matrix products of as many operations"
COPY = "copies of as many bytes"
ZEROS = "zeros where results go"
ROOFLINE = "the slower of copies of as many bytes and products of as many operations"
FRESH = f"{PRODUCT}, and {ZEROS}"
PARTS = {ROOFLINE: (COPY, PRODUCT), FRESH: (PRODUCT, ZEROS)}  # ceilings made of several measurements
MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}  # rows of a square matrix that is large enough to use the device fully


def _product(like: Tensor) -> Callable[[], Tensor]:
    side = MATRIX_SIZES[like.device.type]
    a, b = torch.randn(2, side, side, dtype=like.dtype, device=like.device)
    return lambda: a @ b


WORKLOADS: dict[str, Callable[[Tensor], Callable[[], Tensor]]] = {
    PRODUCT: _product,
    COPY: lambda like: like.clone,
    ZEROS: lambda like: lambda: torch.zeros_like(like),
}


def measurement_names(names: Iterable[str]) -> list[str]:
    """Names of the measurements for ceilings with these names."""
    return list(dict.fromkeys(part for name in names for part in PARTS.get(name, (name,))))


def scaled(
    seconds: Mapping[str, list[float]], tokens: int, d: int, *, device: str, gradients: bool, causal: bool = True
) -> dict[str, list[float]]:
    """Scale measured seconds to the operations, bytes and results of one attention call; add combined ceilings.

    Args:
        seconds: Seconds of one product, one copy of q, and zeros of its size, round by round.
        tokens: Number of tokens, over all heads and samples.
        d: Features, and values, per token and head.
        gradients: Whether the backward pass is included.
        causal: Whether attention is causal.
    """
    moved = 11 if gradients else 4  # reads q, k, v, writes sums; backward reads q, k, v, a gradient, writes three
    share = tokens * operations(d, gradients=gradients, causal=causal) / (2 * MATRIX_SIZES[torch.device(device).type] ** 3)
    factors = {PRODUCT: share, COPY: moved / 2, ZEROS: 4 if gradients else 1}
    ceilings = {name: [factor * x for x in seconds[name]] for name, factor in factors.items() if name in seconds}
    for name, join in ((ROOFLINE, max), (FRESH, lambda *x: sum(x))):
        if all(part in ceilings for part in PARTS[name]):
            ceilings[name] = [*map(join, *(ceilings[part] for part in PARTS[name]))]
    return ceilings


def operations(d: int, *, gradients: bool, causal: bool = True) -> int:
    """Smallest number of additions and multiplications of attention per token and head, in chunks of 64 tokens if causal.

    Forward: 4 d^2 to update and read the state, 2 * 64 d for half a chunk of weights and their sums. Backward: 6 d^2 for
    gradients through the state, 2 d^2 each for the gradient of the state and for recomputing the state, and 5 * 64 d for
    recomputing weights and for the gradients of weights, q, k and v.

    Bidirectional attention has no chunks, and keeps one state per head: 4 d^2 forward, and 8 d^2 backward.

    Examples:
        >>> operations(64, gradients=False), operations(64, gradients=True)
        (24576, 86016)
        >>> operations(64, gradients=False, causal=False), operations(64, gradients=True, causal=False)
        (16384, 49152)
    """
    if not causal:
        return (12 if gradients else 4) * d * d
    chunk = 64
    return 14 * d * d + 7 * chunk * d if gradients else 4 * d * d + 2 * chunk * d
