"""Random graphs: points of a square joined to the nearest ones, and the distances of their nodes in steps."""

import numpy as np

from isopos.lab.data.arrays import Arrays, Writer
from isopos.lab.data.prepare import SPLITS, OnProgress, generated_arrays

CACHE_VERSION = 1
NEIGHBOURS = 2  # nearest points that each one is joined to
AT_ONCE = 500  # graphs written together


def prepare(
    seed: int, counts: tuple[int, int, int], nodes: int, axes: int, farthest: int, progressing: OnProgress
) -> Arrays:
    """For each split, from the cache or drawn: `NAME-vectors`, `NAME-pairs` and `NAME-labels`.

    They are the lowest eigenvectors of each graph ``[n nodes axes]``, two of its nodes ``[n 2]``, and their distance, at
    most `farthest`, less one ``[n]``. Distances are equally likely, except ones beyond a graph.
    """
    from isopos.graphs import graph

    def fill(writer: Writer) -> dict[str, object]:
        done = 0
        for n, (split, count) in enumerate(zip(SPLITS, counts, strict=True)):
            random = np.random.default_rng((seed, n))
            for begin in range(0, count, AT_ONCE):
                size, rows = min(AT_ONCE, count - begin), []
                while len(rows) < size:
                    edges, steps = draw_graph(random, nodes), int(random.integers(1, farthest + 1))
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

    return generated_arrays("graphs", fill, CACHE_VERSION, seed, counts, nodes, axes, farthest)


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
