"""Positions of graph nodes: the lowest eigenvectors of the Laplacian; and a reader of edge lists."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isopos.catalog import at_least

__all__ = ["edges", "graph"]

DIGITS = 18  # digits of a node number that fit into int64
COMMENT = re.compile("[#%].*", re.DOTALL)
EDGES = "edges as integers [m 2] or [2 m], a file of them or a graph of networkx"
MAX_NODES = 1 << 15  # their Laplacian takes 8 GiB


def graph(source: Tensor | Sequence[Sequence[int]] | str | Path | Any, axes: int = 8, *, nodes: int | None = None) -> Tensor:
    """Positions of the nodes of an undirected, connected graph, for `isopos.wire`: float64 ``[n axes]``.

    Column k is the eigenvector of the k-th smallest nonzero eigenvalue of the Laplacian D - A, with a mean square of 1, so
    that positions do not shrink with the graph; missing eigenvectors are zero. On a path it is about cos(pi k x / n).

    An eigenvector is determined up to its sign, and eigenvectors of equal eigenvalues, as in rings, square grids and other
    symmetric graphs, up to a rotation; no rule based on values alone can choose among them. Here the first of the largest
    entries is positive, which depends on the numbering of symmetric nodes. Positions of different graphs, or of a graph that
    changed, are not comparable.

    Args:
        source: A file for `edges`; integers, ``[m 2]`` with one row per edge, or ``[2 m]`` with one column per edge, as
            PyTorch Geometric's ``edge_index``, with nodes 0 to n - 1; or a networkx graph, with nodes numbered in its order.
            Repeated edges count once, loops are ignored; directions and weights have no effect. ``[2 2]`` means rows, or
            columns if only these connect their nodes; if both do, the edges are the same.
        axes: Number of eigenvectors.
        nodes: n; by default one more than the largest node. For networkx it is known.

    Raises:
        ValueError: For an invalid graph, and for one that is not connected: separate parts have separate eigenvectors, and
            no relative positions.

    References:
        Rotary Position Encodings for Graphs (Reid et al. 2025), WIRE. https://arxiv.org/abs/2509.22259

    Examples:
        >>> graph([[0, 1], [1, 2]], 2).round(decimals=3).abs().tolist()
        [[1.225, 0.707], [0.0, 1.414], [1.225, 0.707]]
    """
    pairs, nodes = _pairs(source, nodes)
    at_least("axes", axes)
    pairs, largest = pairs.detach().to("cpu", torch.int64), int(pairs.max())
    count = largest + 1 if nodes is None else at_least("nodes", nodes, 2)
    if int(pairs.min()) < 0 or largest >= count:
        raise ValueError(f"graph: expected nodes from 0 to {count - 1}, got {int(pairs.min())} to {largest}")
    if count > MAX_NODES:
        raise ValueError(
            f"graph: expected at most {MAX_NODES:,} nodes, since eigenvectors of n nodes are n x n numbers, got {count:,}; "
            "number them from 0 on without gaps, or take parts of the graph"
        )
    adjacency = torch.zeros(count, count, dtype=torch.float64)
    adjacency[pairs[:, 0], pairs[:, 1]] = adjacency[pairs[:, 1], pairs[:, 0]] = 1
    adjacency.fill_diagonal_(0)
    if unreachable := int((~_reached(adjacency)).sum()):
        raise ValueError(
            f"graph: expected a connected one, got {unreachable} of {count} nodes without a path to node 0; take its parts "
            "one by one"
        )
    vectors = torch.linalg.eigh(adjacency.sum(-1).diag() - adjacency).eigenvectors[:, 1 : axes + 1]
    size = vectors.abs()
    first = (size > size.amax(0) * (1 - 1e-6)).int().argmax(0)
    vectors = vectors * vectors.gather(0, first[None]).sign() * math.sqrt(count)
    return torch.nn.functional.pad(vectors, (0, axes - vectors.shape[-1]))


def _pairs(source: Any, nodes: int | None) -> tuple[Tensor, int | None]:
    """Edges as integers ``[m 2]``, and the number of nodes if known."""
    if hasattr(source, "nodes") and hasattr(source, "adjacency"):  # networkx
        rows = {node: row for row, node in enumerate(source.nodes())}
        if nodes not in (None, len(rows)):
            raise ValueError(f"nodes: expected {len(rows)}, the number of nodes of the graph, got {nodes}")
        pairs, nodes = torch.tensor([[rows[a], rows[b]] for a, b in source.edges()], dtype=torch.int64), len(rows)
    elif isinstance(source, str | Path):
        pairs = edges(source)
    else:
        try:
            pairs = torch.as_tensor(np.ascontiguousarray(source) if isinstance(source, np.ndarray) else source)
        except (RuntimeError, TypeError, ValueError):
            raise ValueError(f"graph: expected {EDGES}, got {type(source).__name__}") from None
        columns = pairs.ndim == 2 and len(pairs) == 2 != pairs.shape[1]
        if columns or (pairs.shape == (2, 2) and not _joined(pairs) and _joined(pairs.mT)):
            pairs = pairs.mT
    if pairs.ndim != 2 or pairs.shape[-1] != 2 or pairs.dtype not in (torch.int64, torch.int32) or not len(pairs):
        raise ValueError(f"graph: expected {EDGES}, got {pairs.dtype} {list(pairs.shape)}")
    return pairs, nodes


def _joined(pair: Tensor) -> bool:
    """Whether two edges ``[2 2]`` connect their nodes."""
    distinct = {frozenset(edge) for edge in pair.tolist() if edge[0] != edge[1]}
    return len(set(pair.flatten().tolist())) == len(distinct) + 1


def _reached(adjacency: Tensor) -> Tensor:
    """Nodes with a path to node 0: bool ``[n]``."""
    reached = torch.zeros(len(adjacency), dtype=torch.bool)
    reached[0], new = True, torch.tensor([0])
    while len(new):
        neighbours = (adjacency[new] > 0).any(0) & ~reached
        reached |= neighbours
        new = neighbours.nonzero()[:, 0]
    return reached


def edges(path: str | Path) -> Tensor:
    """The edges in a text file, one per line: int64 ``[m 2]``.

    A line is two node numbers from 0 on, separated by spaces, a tab or a comma. Empty lines and comments from "#" or "%" on
    are skipped.

    Raises:
        ValueError: For an invalid line, and for a file without edges.
        OSError: If the file cannot be read.
    """
    pairs = []
    with Path(path).open("rb") as lines:
        for number, content in enumerate(lines, 1):
            try:
                line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                got = f"the byte {error.object[error.start]:#04x}"
                raise ValueError(f"{path}, line {number}: expected UTF-8, got {got}") from None
            words = COMMENT.sub("", line).replace(",", " ").split()
            if not words:
                continue
            if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
                raise ValueError(
                    f"{path}, line {number}: expected two numbers of nodes from 0 on, got {line.strip()[:80]!r}"
                )
            if large := next((word for word in words if len(word.lstrip("0")) > DIGITS), ""):
                raise ValueError(f"{path}, line {number}: expected numbers of at most {DIGITS} digits, got {large[:40]}...")
            pairs.append([int(word.lstrip("0") or "0") for word in words])
    if not pairs:
        raise ValueError(f"{path}: expected one edge per line, two numbers of nodes, got none")
    return torch.tensor(pairs)
