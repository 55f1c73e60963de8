"""Races against other libraries, with goals, which replace the races of `isopos bench`."""

from benchmarks.peers import PEERS, ROTARY
from isopos.lab.bench import accuracy, gpu, peers, processes, races
from isopos.lab.bench.races import BOTH, FORWARD, Race, Shape
from isopos.lab.timing import Goal, at_least

__all__ = ["GPU", "RACES", "join"]

FT, PERFORMER = ("causal", "fast-transformers"), ("causal", "performer-pytorch")
ATTENTION = (
    Race("attention", BOTH, Shape(512), {FT: at_least(2.6), PERFORMER: None}),
    Race("attention", BOTH, Shape(2048), {FT: at_least(6)}),
    Race("attention", BOTH, Shape(2048, batch=1, heads=4), {FT: at_least(1.9)}),
    Race("attention", BOTH, Shape(8192), {FT: at_least(6)}),
    Race("attention", FORWARD, Shape(512), {FT: at_least(1.7), PERFORMER: None}),
    Race("attention", FORWARD, Shape(2048), {FT: at_least(2.3)}),
    Race("attention", FORWARD, Shape(8192), {FT: at_least(2.3)}),
)
EMBEDDINGS: dict[tuple[str, str], Goal | None] = {
    ("rotation", "rotary-embedding-torch"): at_least(10),
    ("rotation", "x-transformers"): None,
    ("rotation", "transformers Llama"): None,
}
RACES = {
    "attention": ATTENTION,
    "rotary": tuple(Race("rotary", passing, Shape(8192), EMBEDDINGS) for passing in (FORWARD, BOTH)),
}
LOADED = tuple(Race("attention", BOTH, Shape(length), {FT: at_least(4)}) for length in (2048, 8192))


def _sums(passing: gpu.Passing, length: int, head_dim: int) -> Race:
    """Causal sums without a denominator, as fla computes them, without and with a decay."""
    goal = at_least(1.2) if length >= 4096 else None
    pairs = {
        (gpu.PLAIN, "fla, linear attention"): goal,
        (f"{gpu.PLAIN}, retnet decay", "fla, simple gated linear attention"): goal,
    }
    return Race("attention", passing, Shape(length, 8, 16, head_dim), pairs)


KERNELS: dict[tuple[str, str], Goal | None] = {
    ("rotation", "fla, rotary"): None,
    ("rotation", "flash-attn, rotary"): None,
}
GPU = {
    "attention": (
        *(_sums(BOTH, 1 << n, head_dim) for n in (10, 12, 14, 16, 17) for head_dim in (64, 128)),
        *(_sums(FORWARD, 1 << n, 64) for n in (12, 16)),
    ),
    "rotary": tuple(
        Race("rotary", passing, Shape(8192, 8, 16, d), KERNELS) for passing in (FORWARD, BOTH) for d in (64, 128)
    ),
}


def join() -> None:
    """Replace the races of `isopos bench` by these, also in child processes, and add the other libraries' workloads."""
    peers.PEERS.update(PEERS)
    accuracy.LIBRARIES.update(ROTARY)
    for registry, contests in ((races.RACES, RACES), (gpu.RACES, GPU)):
        registry.clear()
        registry.update(contests)
    races.LOADED = LOADED
    processes.SECTIONS = (*RACES, "load")
    processes.COMMAND, processes.MODULE = ("python", "-m", "benchmarks"), "benchmarks.process"
