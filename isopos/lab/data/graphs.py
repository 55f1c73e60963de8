"""Random graphs, and the distances of their nodes in steps: points joined to the nearest ones, or parts of a large graph."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from isopos.lab.data.arrays import Arrays, Writer
from isopos.lab.data.prepare import SPLITS, OnProgress, generated_arrays
from isopos.lab.runs.files import check_plain

CACHE_VERSION = 1
PARTS = (0.8, 0.9)  # shares of the nodes of a large graph at which those for validation and test begin
NEIGHBOURS = 2  # nearest points that each one is joined to
AT_ONCE = 500  # graphs written together


def prepare(
    seed: int,
    counts: tuple[int, int, int],
    nodes: int,
    axes: int,
    farthest: int,
    progressing: OnProgress,
    large: "Sequence[LargeGraph]" = (),
) -> Arrays:
    """For each split, from the cache or drawn: `NAME-vectors`, `NAME-pairs` and `NAME-labels`.

    They are the lowest eigenvectors of each graph ``[n nodes axes]``, two of its nodes ``[n 2]``, and their distance, at
    most `farthest`, less one ``[n]``. Distances are drawn with equal probability; a graph that lacks the drawn one is left
    out, so distances that few graphs have are rarer.

    Args:
        large: For each split the graph whose parts are drawn; by default points of a square.
    """
    from isopos.graphs import graph

    def fill(writer: Writer) -> dict[str, object]:
        done = 0
        for n, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
            random = np.random.default_rng((seed, n))
            draw = partial(large[n].draw if large else draw_graph, random, nodes)
            for begin in range(0, count, AT_ONCE):
                size, rows = min(AT_ONCE, count - begin), []
                while len(rows) < size:
                    edges, steps = draw(), int(random.integers(1, farthest + 1))
                    apart = steps_between(edges, nodes)
                    pairs = np.argwhere(apart == steps if steps < farthest else apart >= steps)
                    if len(pairs):
                        vectors = graph(edges.tolist(), axes, nodes=nodes).numpy()
                        rows.append((vectors, pairs[random.integers(len(pairs))], steps - 1))
                for name, values in zip(("vectors", "pairs", "labels"), zip(*rows, strict=True), strict=True):
                    writer.add(f"{split}-{name}", np.array(values))
                done += size
                progressing("drawing graphs", done, sum(counts))
        return {}

    return generated_arrays(
        "graphs", fill, CACHE_VERSION, seed, counts, nodes, axes, farthest, *(part.sha256 for part in large)
    )


def draw_graph(random: np.random.Generator, nodes: int) -> np.ndarray:
    """Edges ``[m 2]`` of a random connected graph: points joined to the nearest ones, and parts by the shortest edges.

    Examples:
        >>> draw_graph(np.random.default_rng(0), 4).tolist()
        [[0, 1], [0, 2], [0, 3], [1, 3], [2, 3]]
    """
    points = random.uniform(size=(nodes, 2))
    apart = np.hypot(*(points[:, None] - points).transpose(2, 0, 1))
    np.fill_diagonal(apart, np.inf)
    joined = np.zeros((nodes, nodes), bool)
    np.put_along_axis(joined, apart.argsort(1)[:, :NEIGHBOURS], True, 1)
    joined |= joined.T
    while True:
        part = np.isfinite(_steps(joined)[0])
        if part.all():
            return np.argwhere(np.triu(joined))
        between = np.where(np.outer(part, ~part), apart, np.inf)
        one, other = np.unravel_index(between.argmin(), between.shape)
        joined[one, other] = joined[other, one] = True


@dataclass(frozen=True, eq=False)
class LargeGraph:
    """A graph whose connected parts are drawn."""

    neighbours: Sequence[np.ndarray]  # of each node
    roots: np.ndarray  # nodes from which parts begin

    @property
    def sha256(self) -> str:
        """A fingerprint of all contents."""
        contents = [self.roots, np.array([*map(len, self.neighbours)]), *self.neighbours]
        return hashlib.sha256(np.concatenate(contents).astype(np.int64).tobytes()).hexdigest()

    def draw(self, random: np.random.Generator, nodes: int) -> np.ndarray:
        """Edges ``[m 2]`` of a random connected part with all its edges, its nodes numbered at random.

        From a random root on, a random neighbour outside of a random node inside is added.
        """
        chosen = [int(self.roots[random.integers(len(self.roots))])]
        inside = set(chosen)
        while len(chosen) < nodes:
            near = [node for node in self.neighbours[chosen[random.integers(len(chosen))]].tolist() if node not in inside]
            if near:
                chosen.append(near[random.integers(len(near))])
                inside.add(chosen[-1])
        number = dict(zip(chosen, random.permutation(nodes).tolist(), strict=True))
        pairs = {
            (number[node], number[other])
            for node in chosen
            for other in self.neighbours[node].tolist()
            if other in inside and number[node] < number[other]
        }
        return np.array(sorted(pairs))


def read_parts(source: str, nodes: int) -> list[LargeGraph]:
    """The graph in a file of edges, cut into three for training, validation and test, which share no node.

    The nodes of each are consecutive in depth-first order. In trees and maps most of them stay connected; in denser graphs
    the held-out ones fall apart, and samples are drawn from the connected parts that are large enough.

    Args:
        source: As for `isopos.graphs.edges`.
        nodes: Number of nodes of the parts that are to be drawn.

    Raises:
        ValueError: If the file is no list of edges, or one of the three has no connected part of so many nodes.
    """
    from isopos.graphs import edges

    try:
        check_plain(Path(source))
        pairs = edges(source).numpy()
    except OSError as error:
        raise ValueError(f"data: cannot read {source}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"data: {error}") from None
    pairs = np.unique(pairs, return_inverse=True)[1].reshape(-1, 2)
    order, _ = _depth_first(_neighbours(pairs, int(pairs.max()) + 1))
    at = np.empty(len(order), np.int64)
    at[order] = np.searchsorted([int(share * len(order)) for share in PARTS], np.arange(len(order)), "right")
    parts = []
    for n, split in enumerate(SPLITS):
        kept = _neighbours(pairs[(at[pairs] == n).all(1)], len(order))
        _, component = _depth_first(kept)
        sizes = np.bincount(component)
        if (most := max(sizes[component[at == n]], default=0)) < nodes:
            raise ValueError(
                f"vertices: expected at most {most}, the nodes of the largest connected part "
                f"for {split} in {source}, got {nodes}; choose fewer, or a larger graph"
            )
        parts.append(LargeGraph(kept, np.flatnonzero(sizes[component] >= nodes)))
    return parts


def _neighbours(pairs: np.ndarray, nodes: int) -> list[np.ndarray]:
    """The neighbours of each node, sorted, without itself, from edges ``[m 2]``."""
    both = np.unique(np.concatenate((pairs, pairs[:, ::-1])), axis=0)
    both = both[both[:, 0] != both[:, 1]]
    return np.split(both[:, 1], np.searchsorted(both[:, 0], np.arange(1, nodes)))


def _depth_first(neighbours: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All nodes ``[n]`` in depth-first order, and the first node of the connected part of each node ``[n]``."""
    order, first = list[int](), np.full(len(neighbours), -1)
    for root in range(len(neighbours)):
        stack = [root]
        while stack:
            if first[node := stack.pop()] < 0:
                first[node] = root
                order.append(node)
                stack += [other for other in neighbours[node][::-1].tolist() if first[other] < 0]
    return np.array(order), first


def steps_between(edges: np.ndarray, nodes: int) -> np.ndarray:
    """Steps between the nodes of a graph ``[nodes nodes]``, infinite between separate parts.

    Examples:
        >>> steps_between(np.array([[0, 1], [1, 2]]), 3).tolist()
        [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
    """
    joined = np.zeros((nodes, nodes), bool)
    joined[tuple(edges.T)] = True
    return _steps(joined | joined.T)


def _steps(joined: np.ndarray) -> np.ndarray:
    """Steps between nodes ``[n n]``, breadth first from all nodes at once."""
    steps, edges = np.full(joined.shape, np.inf), joined.astype(np.float32)
    last, count = np.eye(len(joined), dtype=bool), 0
    while last.any():
        steps[last] = count
        last = (last.astype(np.float32) @ edges > 0) & np.isinf(steps)
        count += 1
    return steps
