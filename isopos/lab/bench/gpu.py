"""Races on a CUDA device in bfloat16: against flash attention, copies and matrix products.

Each race runs with Triton's kernels and with PyTorch's operations, one process each. Queries, keys and values have the
memory layout of projections, ``[b t h d]``. No round starts after `LIMIT` seconds: softmax attention over 128k keys takes
seconds per call, forward and backward.
"""

from typing import Literal

from isopos.lab.bench.ceilings import ROOFLINE
from isopos.lab.bench.races import BOTH, CLONES, FORWARD, PREPARED, STEP, Race, Shape
from isopos.lab.timing import Goal, at_least, at_most
from isopos.ops.gpu import SWITCH

KERNELS = {"triton": {SWITCH: "any"}, "pytorch": {SWITCH: "0"}}
LIMIT = 10.0  # seconds
PLAIN, EVERY = "causal, no features", "bidirectional, no features"  # without a denominator, as the baselines compute
POSITIONS = {"rotary": at_least(0.97), "permutation": at_least(0.97), "householder + rotary": at_least(0.97)}
NONE = "attention function, no positions"
Passing = Literal["forward", "forward + backward"]


def _attention(passing: Passing, length: int, head_dim: int) -> Race:
    """Causal attention, also with a decay and with positions."""
    long = length >= 4096
    soft = at_least(8) if length >= 1 << 16 else at_least(1) if long else None
    pairs: dict[tuple[str, str], Goal | None] = {
        (PLAIN, ROOFLINE): at_least(0.7) if long else None,
        ("causal", "softmax (SDPA)"): soft if passing == BOTH else None,
    }
    positions = {(f"attention function, {name}", NONE): goal for name, goal in POSITIONS.items()}
    return Race("attention", passing, Shape(length, 8, 16, head_dim), pairs | positions)


def _bidirectional(passing: Passing, length: int, head_dim: int) -> Race:
    """Bidirectional attention: without features, with a denominator, with a decay."""
    pairs = {
        (EVERY, ROOFLINE): None,
        ("bidirectional", ROOFLINE): None,
        (EVERY, "two products"): None,
        ("bidirectional", "softmax (SDPA), bidirectional"): None,
        (f"{EVERY}, retnet decay", f"{PLAIN}, retnet decay"): None,
    }
    return Race("attention", passing, Shape(length, 8, 16, head_dim), pairs, causal=False)


ATTENTION = (
    *(_attention(BOTH, 1 << n, head_dim) for n in (10, 12, 14, 16, 17) for head_dim in (64, 128)),
    *(_attention(FORWARD, 1 << n, 64) for n in (12, 16)),
    *(_bidirectional(BOTH, 1 << n, head_dim) for n in (10, 12, 14, 16) for head_dim in (64, 128)),
    *(_bidirectional(FORWARD, 1 << n, 64) for n in (12, 16)),
)
# 0.9 of the rate of copies: the gradient of a clone is not copied
COPIES: dict[Passing, Goal] = {FORWARD: at_most(1.11), BOTH: at_most(2.22)}
ROTARY = tuple(
    Race("rotary", passing, Shape(8192, 8, 16, d), {CLONES: COPIES[passing]}) for passing in COPIES for d in (64, 128)
)
STEPS = {
    (f"captured {PREPARED}", "captured mul_ of the state"): at_least(0.8),
    ("captured prepared step, rotary", f"captured {PREPARED}"): at_most(1.3),
    (PREPARED, f"captured {PREPARED}"): None,
}
DECODE = tuple(Race("attention", STEP, Shape(1, batch, 16, 64), STEPS) for batch in (1, 256))
RACES = {"attention": ATTENTION, "rotary": ROTARY, "decode": DECODE}
