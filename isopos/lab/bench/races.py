"""The races as tables: which works take turns at which sizes, and what we want of each pair."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from isopos.lab.bench.timing import Goal, at_least, at_most
from isopos.lab.bench.works import Shape

__all__ = ["BOTH", "FORWARD", "RACES", "STEP", "Race"]

FORWARD, BOTH, STEP = "forward", "forward + backward", "step"


@dataclass(frozen=True)
class Race:
    """Works at one size: pairs of ours and another, with the goal of each pair; `what` tells their inputs."""

    what: Literal["attention", "rotary", "layer"]
    passing: Literal["forward", "forward + backward", "step"]
    shape: Shape
    pairs: Mapping[tuple[str, str], Goal | None]

    def limited(self, most: int) -> "Race":
        """The race with at most so many tokens."""
        return replace(self, shape=self.shape.limited(most))


FT, PERFORMER, SDPA = (("causal", peer) for peer in ("fast-transformers", "performer-pytorch", "softmax (SDPA)"))
DECAY = {("causal, retnet decay", "causal"): at_most(1.15)}
BESIDES = {("causal, masked", "causal"): at_most(1.1), ("causal, packed", "causal"): at_most(1.1)}
PRODUCTS = {
    ("both ways, no features", "two products"): at_most(1.05),
    ("both ways", "two products, elu + 1, divided"): at_most(1.05),
}
ATTENTION = (
    Race("attention", BOTH, Shape(512), {FT: at_least(2.6), PERFORMER: None}),
    Race("attention", BOTH, Shape(2048), {FT: at_least(2.6), SDPA: at_least(5)} | DECAY | BESIDES),
    Race("attention", BOTH, Shape(2048, batch=1, heads=4), {FT: at_least(1.9)}),
    Race("attention", BOTH, Shape(8192), {FT: at_least(2.6)} | DECAY | BESIDES),
    Race("attention", FORWARD, Shape(512), {FT: at_least(1.7), PERFORMER: None}),
    Race("attention", FORWARD, Shape(2048), {FT: at_least(2.3)} | DECAY | BESIDES),
    Race("attention", FORWARD, Shape(8192), {FT: at_least(2.3), SDPA: at_least(12)} | DECAY | BESIDES),
    *(Race("attention", passing, Shape(length), PRODUCTS) for passing in (FORWARD, BOTH) for length in (2048, 8192)),
)
PEERS_OF_ROTATION = {
    ("rotation", "rotary-embedding-torch"): at_least(10),
    ("rotation", "torchtune's formula"): at_least(10),
    ("rotation", "rotate-half"): None,
    ("rotation", "x-transformers"): None,
    ("rotation", "transformers Llama"): None,
}
CLONES = ("rotation", "two clones")
ROTARY = (
    Race("rotary", FORWARD, Shape(8192), {CLONES: at_most(1.4)} | PEERS_OF_ROTATION),
    Race("rotary", BOTH, Shape(8192), {CLONES: at_most(2.6)} | PEERS_OF_ROTATION),
)
STEPS = {
    (f"decoding step{how}", other): goal
    for other, goal in (("einsum step", at_least(10)), ("softmax (SDPA) step", at_least(300)))
    for how in ("", ", in place")
}
ROTATED = {
    (f"decoding step of a scheme, rotary{how}", f"decoding step of a scheme, no positions{how}"): at_most(1.3)
    for how in ("", ", in place")
}
DECODE = (
    Race("attention", STEP, Shape(1, batch=1, cache=32768), STEPS | dict.fromkeys(ROTATED)),
    Race("attention", STEP, Shape(1, batch=32, cache=32768), STEPS | ROTATED),
)
SPEEDS = {
    "rotary": at_least(0.95),
    "permutation": at_least(0.92),
    "unitary": at_least(0.88),
    "householder + rotary": at_least(0.9),
    "householder + permutation": None,
    "householder + unitary": None,
}
KINDS: dict[str, Literal["attention", "layer"]] = {"attention function": "attention", "attention module": "layer"}


def _beside(kind: str) -> dict[tuple[str, str], Goal | None]:
    return {(f"{kind}, {name}", f"{kind}, no positions"): goal for name, goal in SPEEDS.items()}


SUBLAYER = tuple(Race(what, BOTH, Shape(512, batch=4), _beside(kind)) for kind, what in KINDS.items())
RACES = {"attention": ATTENTION, "rotary": ROTARY, "decode": DECODE, "sublayer": SUBLAYER}
