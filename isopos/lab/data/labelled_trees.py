"""Labelled trees: operations on them, the orders in which nodes are written, and s-expressions.

No function here recurses, so trees may have any depth.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from isopos.trees import Unread

Order = Literal["breadth", "depth"]
"""Level by level, or in preorder."""


class LabelledTree(NamedTuple):
    """A tree whose nodes have labels."""

    labels: tuple[int, ...]  # of the nodes, in preorder: a node, then the subtree of its first child,
    arities: tuple[int, ...]  # number of children of each node

    @property
    def key(self) -> str:
        """Text for hashes. "Bush" is the name of the class in earlier versions, whose splits and fingerprints it keeps."""
        return f"Bush(labels={self.labels}, arities={self.arities})"

    def at(self, nodes: Sequence[int]) -> "LabelledTree":
        """The tree that has these nodes in preorder."""
        return LabelledTree(tuple(self.labels[node] for node in nodes), tuple(self.arities[node] for node in nodes))


class TreeBuilder:
    """Positions of the nodes of a tree whose numbers of children arrive one by one.

    The position of the next node is always known, in either order.

    Args:
        order: The order in which nodes arrive.

    Examples:
        >>> builder = TreeBuilder("breadth")
        >>> for arity in (2, 0, 1):
        ...     builder.add(arity)
        >>> builder.rows, builder.complete
        ([(-1, -1), (0, 0), (0, 1), (2, 0)], False)
    """

    def __init__(self, order: Order):
        self.rows = [(-1, -1)]  # (parent's row, branch) of all nodes and of the next one
        self.complete = False  # whether there is no next node; then rows of roots follow
        self._open: deque[tuple[int, int]] = deque()
        self._take = deque.popleft if order == "breadth" else deque.pop
        self._step = 1 if order == "breadth" else -1

    def add(self, arity: int) -> None:
        """Add a node with a number of children."""
        if not self.complete:
            row = len(self.rows) - 1
            self._open.extend([(row, branch) for branch in range(arity)][:: self._step])
            self.complete = not self._open
        self.rows.append((-1, -1) if self.complete else self._take(self._open))


def in_order(tree: LabelledTree, order: Order) -> tuple[list[int], list[tuple[int, int]]]:
    """Labels and rows (parent's row, branch) of a tree in an order.

    Examples:
        >>> in_order(LabelledTree((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)), "breadth")
        ([7, 8, 3, 1, 2], [(-1, -1), (0, 0), (0, 1), (1, 0), (1, 1)])
    """
    nodes, builder = list(range(len(tree.labels))), TreeBuilder(order)
    if order == "breadth":
        children, nodes = _children(tree), [0]
        for node in nodes:
            nodes += children[node]  # the loop continues with them
    for node in nodes:
        builder.add(tree.arities[node])
    return [tree.labels[node] for node in nodes], builder.rows[:-1]


def from_order(labels: Sequence[int], arities: Sequence[int], order: Order) -> LabelledTree:
    """The inverse of `in_order`: a complete tree of labels and arities in an order.

    Examples:
        >>> from_order([7, 8, 3, 1, 2], [2, 2, 0, 0, 0], "breadth")
        LabelledTree(labels=(7, 8, 1, 2, 3), arities=(2, 2, 0, 0, 0))
    """
    tree = LabelledTree(tuple(labels), tuple(arities))
    if order == "depth":
        return tree
    first = np.cumsum(arities) - arities + 1  # the first child of each node
    return tree.at(_preorder(lambda node: range(first[node], first[node] + arities[node])))


def subtree_sizes(tree: LabelledTree) -> list[int]:
    """Number of nodes of each node's subtree.

    Examples:
        >>> subtree_sizes(LabelledTree((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)))
        [5, 3, 1, 1, 1]
    """
    sizes, done = [1] * len(tree.labels), []
    for node in reversed(range(len(tree.labels))):
        sizes[node] += sum(done.pop() for _ in range(tree.arities[node]))
        done.append(sizes[node])
    return sizes


def subtree(tree: LabelledTree, node: int) -> LabelledTree:
    """A node with all its descendants."""
    nodes = slice(node, node + subtree_sizes(tree)[node])
    return LabelledTree(tree.labels[nodes], tree.arities[nodes])


def mirror(tree: LabelledTree) -> LabelledTree:
    """The mirror image: children of all nodes in reverse order.

    Examples:
        >>> mirror(LabelledTree((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)))
        LabelledTree(labels=(7, 3, 8, 2, 1), arities=(2, 0, 2, 0, 0))
    """
    children = _children(tree)
    return tree.at(_preorder(lambda node: children[node][::-1]))


def reduce_pairs(tree: LabelledTree, result: Callable[[int, int, int], int]) -> LabelledTree:
    """Replace each node whose two children are leaves by a leaf, whose label is the result of the three labels.

    Examples:
        >>> reduce_pairs(LabelledTree((9, 9, 1, 2, 2), (2, 2, 0, 0, 0)), lambda operator, a, b: (a + b) % 3)
        LabelledTree(labels=(9, 0, 2), arities=(2, 0, 0))
    """
    labels, arities, node = [], [], 0
    while node < len(tree.labels):
        pair = tree.arities[node : node + 3] == (2, 0, 0)
        labels.append(result(*tree.labels[node : node + 3]) if pair else tree.labels[node])
        arities.append(0 if pair else tree.arities[node])
        node += 3 if pair else 1
    return LabelledTree(tuple(labels), tuple(arities))


def random_shape(random: np.random.Generator, depth: int, most: int) -> tuple[int, ...]:
    """Arities in preorder of a random binary tree of that depth; ValueError where it has more than `most` nodes.

    One child of a node has the largest depth that is possible, the other one a random depth. If that is the largest, too,
    it is drawn once more (the authors' code; the paper says only "random").
    """
    arities, waiting = [], [depth]
    while waiting:
        if len(arities) == most:
            raise ValueError(
                f"depth: expected trees of at most {most:,} nodes, got more of depth {depth}; choose a smaller one"
            )
        height = waiting.pop()
        arities.append(2 if height else 0)
        if height:
            other = int(random.integers(height))
            if other == height - 1:
                other = int(random.integers(height))
            both = [height - 1, other]
            waiting += both if random.random() < 0.5 else both[::-1]
    return tuple(arities)


def arities_of(parents: np.ndarray) -> list[int]:
    """Number of children of each node; parents are rows ``[n]``, -1 for roots.

    Examples:
        >>> arities_of(np.array([-1, 0, 0, 1]))
        [2, 1, 0, 0]
    """
    return np.bincount(parents[parents >= 0], minlength=len(parents)).tolist()


def parse(text: str) -> tuple[list[str], list[int]]:
    """Labels and arities, in preorder, of an s-expression ``(label child child ...)``; an atom is a leaf.

    Raises:
        isopos.trees.Unread: If the text is not an s-expression.

    Examples:
        >>> parse("(S (NP the cat) sat)")
        (['S', 'NP', 'the', 'cat', 'sat'], [2, 2, 0, 0, 0])
    """
    from isopos.trees import read

    rows, labels = read(text)
    return labels, arities_of(np.array(rows)[:, 0])


def problem_of(error: "Unread") -> str:
    """The message of an error of `parse`, without the position in the text and without the remedy."""
    return str(error).removeprefix("tree: ").replace(f" at {error.at}", "").partition(";")[0]


def s_expression(labels: Sequence[str], arities: Sequence[int]) -> str:
    """The s-expression of a tree in preorder.

    Examples:
        >>> s_expression(["S", "NP", "the", "cat", "sat"], [2, 2, 0, 0, 0])
        '(S (NP the cat) sat)'
    """
    pieces, missing = [], []  # children that are still missing, of each open node
    for label, arity in zip(labels, arities, strict=True):
        pieces.append(("(" if arity else "") + label)
        if missing:
            missing[-1] -= 1
        if arity:
            missing.append(arity)
        while missing and not missing[-1]:
            missing.pop()
            pieces[-1] += ")"
    return " ".join(pieces)


def _children(tree: LabelledTree) -> list[list[int]]:
    """The children of each node, in their order."""
    children, waiting = [[] for _ in tree.labels], []
    for node in range(len(tree.labels)):
        if waiting:
            children[waiting.pop()].append(node)
        waiting += [node] * tree.arities[node]
    return children


def _preorder(children: Callable[[int], Sequence[int]]) -> list[int]:
    """Nodes from the root 0 on: each node before its children."""
    nodes, waiting = [], [0]
    while waiting:
        nodes.append(node := waiting.pop())
        waiting += reversed(children(node))
    return nodes
