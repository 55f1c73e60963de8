"""Races on a CUDA device, in bfloat16: against flash-linear-attention, flash attention, copies, and products of matrices.

Each is run with PyTorch's operations and with the kernels of Triton, a process each. Queries, keys and values lie in memory
as projections leave them, ``[b t h d]``, which is what the others ask for.
"""

from isopos.lab.bench.ceilings import ROOFLINE
from isopos.lab.bench.races import BOTH, CLONES, FORWARD, PREPARED, STEP, Race, Shape
from isopos.lab.bench.timing import Goal, at_least, at_most
from isopos.ops.gpu import SWITCH

__all__ = ["KERNELS", "RACES"]

KERNELS = {"pytorch": {SWITCH: "0"}, "triton": {SWITCH: "1"}}
PLAIN = "causal, no features"  # without a denominator: what the others compute
BESIDE = {"rotary": at_least(0.97), "permutation": at_least(0.97), "householder + rotary": at_least(0.97)}
NONE = "attention function, no positions"


def _attention(passing: str, length: int, head_dim: int) -> Race:
    long = length >= 4096
    soft = at_least(8) if length >= 1 << 16 else at_least(1) if long else None
    pairs: dict[tuple[str, str], Goal | None] = {
        (PLAIN, "fla, linear attention"): at_least(1.2) if long else None,
        ("causal, no features, retnet decay", "fla, simple gated linear attention"): at_least(1.2) if long else None,
        (PLAIN, ROOFLINE): at_least(0.7) if long else None,
        ("causal", "softmax (SDPA)"): soft if passing == BOTH else None,
    }
    beside = {(f"attention function, {name}", NONE): goal for name, goal in BESIDE.items()}
    return Race("attention", passing, Shape(length, 8, 16, head_dim), pairs | beside)  # pyright: ignore[reportArgumentType]


ATTENTION = (
    *(_attention(BOTH, 1 << n, head_dim) for n in (10, 12, 14, 16, 17) for head_dim in (64, 128)),
    *(_attention(FORWARD, 1 << n, 64) for n in (12, 16)),
)
ROTATION = {CLONES: at_most(1.11), ("rotation", "fla, rotary"): None, ("rotation", "flash-attn, rotary"): None}
ROTARY = tuple(Race("rotary", passing, Shape(8192, 8, 16, d), ROTATION) for passing in (FORWARD, BOTH) for d in (64, 128))
STEPS = {(PREPARED, "mul_ of the state"): at_least(0.8), ("prepared step, rotary", PREPARED): at_most(1.3)}
DECODE = tuple(Race("attention", STEP, Shape(1, batch, 16, 64), STEPS) for batch in (1, 256))
RACES = {"attention": ATTENTION, "rotary": ROTARY, "decode": DECODE}
