"""Labelled trees in preorder, what is made of them, and the order in which they are written.

A bush is its labels and how many children each node has, both in preorder. Nothing here recurses: chains of any depth work.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

__all__ = [
    "Bush",
    "Growth",
    "Order",
    "arities_of",
    "grow",
    "mirrored",
    "parsed",
    "part",
    "rebuilt",
    "reduced",
    "shown",
    "sizes",
    "written",
]

Order = Literal["breadth", "depth"]


class Bush(NamedTuple):
    """A tree.

    Args:
        labels: Of its nodes, in preorder: a node, then its first child with all below it, ...
        arities: How many children each has.
    """

    labels: tuple[int, ...]
    arities: tuple[int, ...]


class Growth:
    """Where the next node of a tree stands, whose nodes come one by one, with how many children they have.

    That is well defined in either order, since a node says how many children follow it.

    Args:
        order: Level by level, or in preorder.

    Examples:
        >>> grown = Growth("breadth")
        >>> for arity in (2, 0, 1):
        ...     grown.add(arity)
        >>> grown.rows, grown.whole
        ([(-1, -1), (0, 0), (0, 1), (2, 0)], False)
    """

    def __init__(self, order: Order):
        self.rows = [(-1, -1)]  # of all nodes, and of the next: the row of its parent, and the branch
        self.whole = False  # whether there is no next one; then rows of roots follow
        self.take = deque.popleft if order == "breadth" else deque.pop
        self.step = 1 if order == "breadth" else -1
        self.open: deque[tuple[int, int]] = deque()

    def add(self, arity: int) -> None:
        """Set the next node."""
        if not self.whole:
            row = len(self.rows) - 1
            self.open.extend([(row, branch) for branch in range(arity)][:: self.step])
            self.whole = not self.open
        self.rows.append((-1, -1) if self.whole else self.take(self.open))


def written(bush: Bush, order: Order) -> tuple[list[int], list[tuple[int, int]]]:
    """Labels and rows (parent's row, branch) of a tree in an order.

    Examples:
        >>> written(Bush((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)), "breadth")
        ([7, 8, 3, 1, 2], [(-1, -1), (0, 0), (0, 1), (1, 0), (1, 1)])
    """
    nodes, grown = list(range(len(bush.labels))), Growth(order)
    if order == "breadth":
        children, queue, nodes = _children(bush), deque([0]), []
        while queue:
            nodes.append(node := queue.popleft())
            queue.extend(children[node])
    for node in nodes:
        grown.add(bush.arities[node])
    return [bush.labels[node] for node in nodes], grown.rows[:-1]


def rebuilt(labels: Sequence[int], arities: Sequence[int], order: Order) -> Bush:
    """The whole tree that `written` wrote in an order.

    Examples:
        >>> rebuilt([7, 8, 3, 1, 2], [2, 2, 0, 0, 0], "breadth")
        Bush(labels=(7, 8, 1, 2, 3), arities=(2, 2, 0, 0, 0))
    """
    nodes = list(range(len(labels)))
    if order == "breadth":
        first, nodes, waiting = np.cumsum(arities) - arities + 1, [], [0]  # the first child of each node
        while waiting:
            nodes.append(node := waiting.pop())
            waiting += reversed(range(first[node], first[node] + arities[node]))
    return Bush(tuple(labels[node] for node in nodes), tuple(arities[node] for node in nodes))


def sizes(bush: Bush) -> list[int]:
    """How many nodes each node and all below it are.

    Examples:
        >>> sizes(Bush((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)))
        [5, 3, 1, 1, 1]
    """
    found, done = [1] * len(bush.labels), []
    for node in reversed(range(len(bush.labels))):
        found[node] += sum(done.pop() for _ in range(bush.arities[node]))
        done.append(found[node])
    return found


def part(bush: Bush, node: int) -> Bush:
    """The node and all below it."""
    own = slice(node, node + sizes(bush)[node])
    return Bush(bush.labels[own], bush.arities[own])


def mirrored(bush: Bush) -> Bush:
    """First children last, everywhere.

    Examples:
        >>> mirrored(Bush((7, 8, 1, 2, 3), (2, 2, 0, 0, 0)))
        Bush(labels=(7, 3, 8, 2, 1), arities=(2, 0, 2, 0, 0))
    """
    children, nodes, waiting = _children(bush), [], [0]
    while waiting:
        nodes.append(node := waiting.pop())
        waiting += children[node]
    return Bush(tuple(bush.labels[node] for node in nodes), tuple(bush.arities[node] for node in nodes))


def reduced(bush: Bush, result: Callable[[int, int, int], int]) -> Bush:
    """Every node whose two children are leaves, as a leaf with what its label and theirs result in.

    Examples:
        >>> reduced(Bush((9, 9, 1, 2, 2), (2, 2, 0, 0, 0)), lambda operator, a, b: (a + b) % 3)
        Bush(labels=(9, 0, 2), arities=(2, 0, 0))
    """
    labels, arities, node = [], [], 0
    while node < len(bush.labels):
        leaf = bush.arities[node : node + 3] == (2, 0, 0)
        labels.append(result(*bush.labels[node : node + 3]) if leaf else bush.labels[node])
        arities.append(0 if leaf else bush.arities[node])
        node += 3 if leaf else 1
    return Bush(tuple(labels), tuple(arities))


def grow(random: np.random.Generator, depth: int, most: int) -> tuple[int, ...]:
    """Children of the nodes of a random binary tree of that depth, in preorder; ValueError where it has more than `most`.

    One of the two children of a node is as deep as may be. The depth of the other is drawn from all that fit; where it is
    the deepest, too, it is drawn once more (the authors' code; the paper says no more than random).
    """
    arities, waiting = [], [depth]
    while waiting:
        if len(arities) == most:
            raise ValueError(
                f"depth: expected trees of at most {most:,} nodes, got more of depth {depth}; choose a smaller one"
            )
        own = waiting.pop()
        arities.append(2 if own else 0)
        if own:
            other = int(random.integers(own))
            if other == own - 1:
                other = int(random.integers(own))
            both = [own - 1, other]
            waiting += both if random.random() < 0.5 else both[::-1]
    return tuple(arities)


def arities_of(parents: np.ndarray) -> list[int]:
    """How many children each node has, of the rows of their parents ``[n]``, -1 for roots.

    Examples:
        >>> arities_of(np.array([-1, 0, 0, 1]))
        [2, 1, 0, 0]
    """
    return np.bincount(parents[parents >= 0], minlength=len(parents)).tolist()


def parsed(text: str) -> tuple[list[str], list[int]]:
    """Labels and numbers of children, in preorder, of an s-expression ``(label child child ...)``; an atom is a leaf.

    Raises:
        isopos.trees.Unread: Where it is none.

    Examples:
        >>> parsed("(S (NP the cat) sat)")
        (['S', 'NP', 'the', 'cat', 'sat'], [2, 2, 0, 0, 0])
    """
    from isopos.trees import read

    rows, labels = read(text)
    return labels, arities_of(np.array(rows)[:, 0])


def shown(labels: Sequence[str], arities: Sequence[int]) -> str:
    """The s-expression of a tree in preorder.

    Examples:
        >>> shown(["S", "NP", "the", "cat", "sat"], [2, 2, 0, 0, 0])
        '(S (NP the cat) sat)'
    """
    found, left = [], []  # children that are still to come, of each node that is open
    for label, arity in zip(labels, arities, strict=True):
        found.append(("(" if arity else "") + label)
        if left:
            left[-1] -= 1
        if arity:
            left.append(arity)
        while left and not left[-1]:
            left.pop()
            found[-1] += ")"
    return " ".join(found)


def _children(bush: Bush) -> list[list[int]]:
    """The children of each node, in their order."""
    found, waiting = [[] for _ in bush.labels], []
    for node in range(len(bush.labels)):
        if waiting:
            found[waiting.pop()].append(node)
        waiting += [node] * bush.arities[node]
    return found
