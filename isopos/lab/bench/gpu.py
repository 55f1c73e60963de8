"""Races on a CUDA device, in bfloat16: against flash attention, copies, and products of matrices.

Each is run with the kernels of Triton and with PyTorch's operations, a process each. Queries, keys and values lie in memory
as projections leave them, ``[b t h d]``. A race has its rounds, or as many as it begins
in `LIMIT` seconds: forward and backward, softmax attention with 128k keys takes seconds a call.
"""

from typing import Literal

from isopos.lab.bench.ceilings import ROOFLINE
from isopos.lab.bench.races import BOTH, CLONES, FORWARD, PREPARED, STEP, Race, Shape
from isopos.lab.bench.timing import Goal, at_least, at_most
from isopos.ops.gpu import SWITCH

KERNELS = {"triton": {SWITCH: "1"}, "pytorch": {SWITCH: "0"}}
LIMIT = 10.0  # seconds
PLAIN, EVERY = "causal, no features", "both ways, no features"  # without a denominator: what the others compute
BESIDE = {"rotary": at_least(0.97), "permutation": at_least(0.97), "householder + rotary": at_least(0.97)}
NONE = "attention function, no positions"
Passing = Literal["forward", "forward + backward"]


def _attention(passing: Passing, length: int, head_dim: int) -> Race:
    """Causal sums, with a decay and with positions, too."""
    long = length >= 4096
    soft = at_least(8) if length >= 1 << 16 else at_least(1) if long else None
    pairs: dict[tuple[str, str], Goal | None] = {
        (PLAIN, ROOFLINE): at_least(0.7) if long else None,
        ("causal", "softmax (SDPA)"): soft if passing == BOTH else None,
    }
    beside = {(f"attention function, {name}", NONE): goal for name, goal in BESIDE.items()}
    return Race("attention", passing, Shape(length, 8, 16, head_dim), pairs | beside)


def _both_ways(passing: Passing, length: int, head_dim: int) -> Race:
    """Sums over all keys, without features and with a denominator, and both ways with a decay."""
    pairs = {
        (EVERY, ROOFLINE): None,
        ("both ways", ROOFLINE): None,
        (EVERY, "two products"): None,
        ("both ways", "softmax (SDPA), both ways"): None,
        (f"{EVERY}, retnet decay", f"{PLAIN}, retnet decay"): None,
    }
    return Race("attention", passing, Shape(length, 8, 16, head_dim), pairs, causal=False)


ATTENTION = (
    *(_attention(BOTH, 1 << n, head_dim) for n in (10, 12, 14, 16, 17) for head_dim in (64, 128)),
    *(_attention(FORWARD, 1 << n, 64) for n in (12, 16)),
    *(_both_ways(BOTH, 1 << n, head_dim) for n in (10, 12, 14, 16) for head_dim in (64, 128)),
    *(_both_ways(FORWARD, 1 << n, 64) for n in (12, 16)),
)
# 0.9 of the rate of copies: a clone's gradient is no copy
COPIES: dict[Passing, Goal] = {FORWARD: at_most(1.11), BOTH: at_most(2.22)}
ROTARY = tuple(
    Race("rotary", passing, Shape(8192, 8, 16, d), {CLONES: COPIES[passing]}) for passing in COPIES for d in (64, 128)
)
STEPS = {(PREPARED, "mul_ of the state"): at_least(0.8), ("prepared step, rotary", PREPARED): at_most(1.3)}
DECODE = tuple(Race("attention", STEP, Shape(1, batch, 16, 64), STEPS) for batch in (1, 256))
RACES = {"attention": ATTENTION, "rotary": ROTARY, "decode": DECODE}
