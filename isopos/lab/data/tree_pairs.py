"""Pairs of trees: random ones with what an operation makes of them, and those of files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isopos.lab.data.bushes import Bush, grow, mirrored, parsed, part, reduced, sizes
from isopos.lab.data.pairs import Pairs, split, tables
from isopos.lab.data.prepare import SPLITS

__all__ = ["Operation", "TreePairs", "labels_of", "random_trees", "read_trees"]

Operation = Literal["copy", "rotation", "c3", "ops"]
ACTIONS, HOLE = ("extract", "flip-extract", "truncate", "no-op"), "hole"
MOST = 1 << 14  # nodes of a random tree


@dataclass(frozen=True)
class TreePairs:
    """Trees whose labels are numbers of tokens, and what those are.

    Args:
        pairs: Sources and targets.
        names: Of the tokens.
        arities: How many children a node of a target has, by its token.
    """

    pairs: Pairs[Bush]
    names: tuple[str, ...]
    arities: tuple[int, ...]


def random_trees(
    seed: int, counts: Sequence[int], operation: Operation, *, depth: int, deviation: int, labels: int
) -> TreePairs:
    """Random binary trees and their targets, all sources different (Algebraic Positional Encodings, section 4.1).

    copy: the same tree. rotation: its mirror image. c3: an expression of the cyclic group of order 3, of which every
    operation on two numbers is done. ops: a root that says what is to be done, a leaf with the label of a node, and a tree
    whose labels all differ: the subtree of that node, or its mirror image, or the tree with a hole in its place, or the
    tree as it is.

    The paper's appendix draws depths from a discretised normal distribution; here they are whole numbers from 1 on, which
    those of ops count with the root above. What a truncated subtree leaves is not in the paper: a leaf of its own here, so
    that a token says how many children it has.

    Args:
        seed: Of the random numbers.
        counts: Pairs of train, validation and test.
        operation: Which.
        depth: Mean depth.
        deviation: Its standard deviation.
        labels: Of copy, rotation and ops: one half of leaves, the other of inner nodes.

    Raises:
        ValueError: Where there are too few different trees, or too large ones.
    """
    random, inner = np.random.default_rng(seed), labels - labels // 2
    leaves = 3 if operation == "c3" else labels // 2
    names = [*map(str, range(leaves)), *(["+"] if operation == "c3" else [f"f{n}" for n in range(inner)])]
    arities = [0] * leaves + [2] * (len(names) - leaves)
    if operation == "ops":
        names, arities = [*names, HOLE, *ACTIONS], [*arities, 0, *[2] * len(ACTIONS)]

    def draw() -> tuple[Bush, Bush] | None:
        own = max(1, int(random.normal(depth, deviation)))
        shape = grow(random, own - 1 if operation == "ops" else own, MOST)
        count, unique = (len(shape) + 1) // 2, operation == "ops"
        if unique and count > min(leaves, inner + 1):
            return None
        if unique:
            of_leaves, of_inner = random.permutation(leaves)[:count], leaves + random.permutation(inner)[: count - 1]
        else:
            of_leaves = random.integers(leaves, size=count)
            of_inner = leaves + random.integers(len(names) - leaves, size=count - 1)
        chosen = np.empty(len(shape), np.int64)
        chosen[[arity == 0 for arity in shape]], chosen[[arity > 0 for arity in shape]] = of_leaves, of_inner
        return _made(operation, Bush(tuple(chosen.tolist()), shape), names, random)

    different: dict[Bush, tuple[Bush, Bush]] = {}
    for _ in range(100 * sum(counts)):
        pair = draw()
        if pair is not None:
            different.setdefault(pair[0], pair)
        if len(different) == sum(counts):
            every = iter(different.values())
            splits = {name: [next(every) for _ in range(count)] for name, count in zip(SPLITS, counts, strict=True)}
            return TreePairs(Pairs(splits), tuple(names), tuple(arities))
    raise ValueError(
        f"depth: expected {sum(counts):,} different trees, with labels for all nodes, of a depth about {depth}, got only "
        f"{len(different):,}; choose deeper trees, more labels (--vocabulary), or fewer samples"
    )


def labels_of(operation: Operation, depth: int) -> int:
    """How many labels random trees have by default: the paper's 20, or more where all of a tree's labels must differ."""
    return 2 ** (depth + 1) if operation == "ops" else 20


def _made(operation: Operation, tree: Bush, names: Sequence[str], random: np.random.Generator) -> tuple[Bush, Bush]:
    """A tree as source and target."""
    if operation == "copy":
        return tree, tree
    if operation == "rotation":
        return tree, mirrored(tree)
    if operation == "c3":
        return tree, reduced(tree, lambda _, a, b: (a + b) % 3)
    node, action = int(random.integers(len(tree.labels))), int(random.integers(len(ACTIONS)))
    own = slice(node, node + sizes(tree)[node])
    hole = names.index(HOLE)
    made: dict[str, Callable[[], Bush]] = {
        "extract": lambda: part(tree, node),
        "flip-extract": lambda: mirrored(part(tree, node)),
        "truncate": lambda: Bush(
            (*tree.labels[: own.start], hole, *tree.labels[own.stop :]),
            (*tree.arities[: own.start], 0, *tree.arities[own.stop :]),
        ),
        "no-op": lambda: tree,
    }
    source = Bush((hole + 1 + action, tree.labels[node], *tree.labels), (2, 0, *tree.arities))
    return source, made[ACTIONS[action]]()


def read_trees(source: str) -> TreePairs:
    """Trees of rows, a source, a tab and a target, each an s-expression; see `pairs.tables` and `pairs.split`.

    A token is a label with its number of children, so that a label of two kinds of nodes is two tokens.

    Raises:
        ValueError: Where there is nothing to read, or a row or a tree is wrong (with file, line and column).
    """
    files: dict[str, list[tuple[Bush, Bush]]] = {}
    known: dict[tuple[str, int], int] = {}
    for name, rows in tables(source):
        files[name] = []
        for number, sides in rows:
            made: list[Bush] = []
            for text in sides:
                try:
                    labels, arities = parsed(text)
                except ValueError as error:
                    where, _, said = str(error).partition(": ")
                    side = " of the target" if made else ""
                    raise ValueError(
                        f"data: {name}, line {number}, {where}{side}: {said}; repair or remove the line"
                    ) from None
                tokens = [known.setdefault(token, len(known)) for token in zip(labels, arities, strict=True)]
                made.append(Bush(tuple(tokens), tuple(arities)))
            files[name].append((made[0], made[1]))
    return TreePairs(split(files), tuple(label for label, _ in known), tuple(arity for _, arity in known))
