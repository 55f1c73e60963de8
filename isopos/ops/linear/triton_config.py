"""Tiles of the Triton kernels of linear attention."""

from typing import NamedTuple

TILE = 16  # smallest side of a matrix product


class Config(NamedTuple):
    """How a problem is cut into tiles.

    Attributes:
        chunk: Tokens per chunk.
        features: Features per program of `gradients`.
        values: Values per program of `outputs` and `states`.
        far_features: Features per launch of `outputs`, and per program of `states`.
        far_values: Values per launch of `gradients`.
        warps: Warps per program.
        stages: Chunks whose loads are in flight.
        together: Whether one scan computes gradients of keys and values, which reads less and needs more registers.
    """

    chunk: int
    features: int
    values: int
    far_features: int
    far_values: int
    warps: int
    stages: int
    together: bool


def config(
    features: int,
    values: int,
    precision: str,
    generation: int,
    *,
    whole: bool = False,
    decays: bool = False,
    tables: bool = False,
    light: bool = False,
) -> Config:
    """The tiles that fit into registers and shared memory of sm_80 and later; for bfloat16 on sm_90 from sweeps on an H100.

    Products before sm_90 and TF32 products hold all operands in registers; more than 64 TF32 features are split over several
    launches. Four warps multiply 64 rows; two programs of four warps share a multiprocessor, so that one computes while the
    other waits.

    Args:
        features: Number of features, a power of two.
        values: Number of values, a power of two.
        precision: "bf16", "tf32", "tf32x3" or "ieee".
        generation: First number of the compute capability.
        whole: Whether a program needs all features of a row, as a reflection does, even if registers spill.
        decays: Whether there is a log decay.
        tables: Whether tables rotate or permute features.
        light: Whether there is neither a feature map nor a denominator, which takes few registers.
    """
    widest, warps, together = max(features, values), 8, False
    if precision == "bf16":
        most, side, far, stages = 1 << 13, 128, 256, 2
        chunk = 16 if whole and widest > (128 if generation >= 9 else 64) else 32
        if generation >= 9:
            chunk = 64 if widest <= (64 if whole else 128) else chunk
            few = not whole and (light or not (tables or decays))  # registers
            warps = 4 if widest <= (128 if few else 64) else 8
            together = not (whole or decays) and widest <= 64
    else:
        chunk, most, side, far, stages = 16, 1 << 11, 32, 64, 1
        warps = 8 if whole and features > far else 4
    far_features, far_values = features if whole else min(far, features), min(far, 128, values)
    block = features
    if whole:
        far_values = min(far_values, max(TILE, (1 << 14 if precision == "bf16" else most) // features))
    else:
        side_of_features = min(side, 32) if decays and generation < 9 else side
        block = min(side_of_features, max(TILE, min(features, most // far_values)))
    state = 2 * most if chunk == 64 and warps == 8 else most  # numbers that 8 warps hold together with a chunk
    parts = min(side, max(TILE, min(values, state // far_features)))
    return Config(chunk, block, parts, far_features, far_values, warps, stages, together)
