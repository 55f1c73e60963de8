"""Upper limits of a machine's speed: matrix products, copies, zeros; and the time that attention would take at that rate."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

PRODUCT = "matrix products of as many operations"
COPY = "copies of as many bytes"
ZEROS = "zeros where results go"
ROOFLINE = "the slower of copies of as many bytes and products of as many operations"
FRESH = f"{PRODUCT}, and {ZEROS}"
PARTS = {ROOFLINE: (COPY, PRODUCT), FRESH: (PRODUCT, ZEROS)}  # ceilings made of several measurements
MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}  # of a square matrix that keeps a device busy


def _product(like: Tensor) -> Callable[[], Tensor]:
    side = MATRIX_SIZES[like.device.type]
    a, b = torch.randn(2, side, side, dtype=like.dtype, device=like.device)
    return lambda: a @ b


WORKLOADS: dict[str, Callable[[Tensor], Callable[[], Tensor]]] = {
    PRODUCT: _product,
    COPY: lambda like: like.clone,
    ZEROS: lambda like: lambda: torch.zeros_like(like),
}


def measured(names: Iterable[str]) -> list[str]:
    """The measurements that ceilings of these names need."""
    return list(dict.fromkeys(part for name in names for part in PARTS.get(name, (name,))))


def scaled(
    seconds: Mapping[str, list[float]], tokens: int, d: int, *, device: str, gradients: bool, causal: bool = True
) -> dict[str, list[float]]:
    """Scale measured seconds to the operations, bytes and results of one attention call; add the ceilings made of several.

    Args:
        seconds: Of one product, one copy of q, and zeros of its size, round by round.
        tokens: Number of tokens, over all heads and samples.
        d: Features, and values, per token and head.
        device: Where they were measured.
        gradients: Whether the backward pass is included.
        causal: Whether attention is causal.
    """
    moved = 11 if gradients else 4  # q, k, v in and sums out; back q, k, v and a gradient in, and three out
    share = tokens * operations(d, gradients=gradients, causal=causal) / (2 * MATRIX_SIZES[torch.device(device).type] ** 3)
    factors = {PRODUCT: share, COPY: moved / 2, ZEROS: 4 if gradients else 1}
    ceilings = {name: [factor * x for x in seconds[name]] for name, factor in factors.items() if name in seconds}
    for name, join in ((ROOFLINE, max), (FRESH, lambda *x: sum(x))):
        if all(part in ceilings for part in PARTS[name]):
            ceilings[name] = [*map(join, *(ceilings[part] for part in PARTS[name]))]
    return ceilings


def operations(d: int, *, gradients: bool, causal: bool = True) -> int:
    """Fewest additions and multiplications of attention per token and head; causal attention in chunks of 64 tokens.

    Forward 4 d^2 for its part of the state and what it reads there, 2 * 64 d for half a chunk of weights and their sums.
    Backward 6 d^2 for gradients through the state, 2 d^2 each for that of the state and for the state once more, and
    5 * 64 d for weights once more, their gradients, and those of q, k and v.

    Over all keys there are no chunks, and one state a head, which is kept: 4 d^2 forward, and 8 d^2 backward.

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
