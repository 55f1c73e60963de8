"""Pairs of trees: random ones with what an operation makes of them, and those of files."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.data.arrays import Arrays, Ragged, Writer
from isopos.lab.data.bushes import Bush, grow, mirrored, parsed, part, reduced, sizes
from isopos.lab.data.labelled import assigned
from isopos.lab.data.pairs import hashed, names_of, pair_source, tables
from isopos.lab.data.prepare import SPLITS, preparing
from isopos.lab.data.sources import Source
from isopos.lab.data.splits import Splits, stored

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Operation", "TreePairs", "labels_of", "random_trees", "read_trees"]

Operation = Literal["copy", "rotation", "c3", "ops"]
ACTIONS = ("extract", "flip-extract", "truncate", "no-op")
MOST = 1 << 14  # nodes of a random tree


@dataclass(frozen=True)
class TreePairs:
    """Trees whose labels are numbers of tokens, and what those are.

    Args:
        pairs: Sources and targets.
        names: Of the tokens.
        arities: How many children a node of a target has, by its token.
    """

    pairs: Splits[tuple[Bush, Bush]]
    names: tuple[str, ...]
    arities: tuple[int, ...]


def random_trees(
    seed: int, counts: Sequence[int], operation: Operation, *, depth: int, deviation: int, labels: int
) -> TreePairs:
    """Random binary trees and their targets, all sources different (Algebraic Positional Encodings, section 4.1).

    copy: the same tree. rotation: its mirror image. c3: an expression of the cyclic group of order 3, of which every
    operation on two numbers is done. ops: a root that says what is to be done, a leaf with the label of a node, and a tree
    whose labels all differ. The target is the subtree of that node, or its mirror image, or the tree with a leaf of the same
    label in place of that subtree, or the tree as it is.

    The paper's appendix draws depths from a discretised normal distribution; here they are whole numbers from 1 on, which
    those of ops count with the root above. What a truncated subtree leaves is not in the paper; it is the node's label in
    the authors' code. Here it is too, as a token of its own where the label is that of an inner node, so that a token says
    how many children it has.

    Args:
        seed: Of the random numbers.
        counts: Pairs of train, validation and test.
        operation: Which.
        depth: Mean depth.
        deviation: Its standard deviation.
        labels: Of copy, rotation and ops: one half of leaves, the other of inner nodes; of ops, the last four of those are
            what roots say.

    Raises:
        ValueError: Where there are too few different trees, or too large ones.
    """
    random, ops = np.random.default_rng(seed), operation == "ops"
    leaves = 3 if operation == "c3" else labels // 2
    inner = 1 if operation == "c3" else labels - leaves - ops * len(ACTIONS)
    names = [*map(str, range(leaves)), *(["+"] if operation == "c3" else [f"f{n}" for n in range(inner)])]
    arities = [0] * leaves + [2] * inner
    if ops:
        names, arities = [*names, *ACTIONS, *names[leaves:]], [*arities, *[2] * len(ACTIONS), *[0] * inner]

    def draw() -> tuple[Bush, Bush] | None:
        own = max(1, int(random.normal(depth, deviation)))
        shape = grow(random, own - ops, MOST)
        count = (len(shape) + 1) // 2
        if ops and count > min(leaves, inner + 1):
            return None
        if ops:
            of_leaves, of_inner = random.permutation(leaves)[:count], leaves + random.permutation(inner)[: count - 1]
        else:
            of_leaves = random.integers(leaves, size=count)
            of_inner = leaves + random.integers(inner, size=count - 1)
        chosen = np.empty(len(shape), np.int64)
        chosen[[arity == 0 for arity in shape]], chosen[[arity > 0 for arity in shape]] = of_leaves, of_inner
        return _made(operation, Bush(tuple(chosen.tolist()), shape), leaves, inner, random)

    different: dict[Bush, tuple[Bush, Bush]] = {}
    for _ in range(100 * sum(counts)):
        pair = draw()
        if pair is not None:
            different.setdefault(pair[0], pair)
        if len(different) == sum(counts):
            every = iter(different.values())
            splits = {name: [next(every) for _ in range(count)] for name, count in zip(SPLITS, counts, strict=True)}
            return TreePairs(Splits(splits), tuple(names), tuple(arities))
    raise ValueError(
        f"depth: expected {sum(counts):,} different trees, with labels for all nodes, of a depth about {depth}, got only "
        f"{len(different):,}; choose deeper trees, more labels (--vocabulary), or fewer samples"
    )


def labels_of(operation: Operation, depth: int) -> int:
    """How many labels random trees have by default: the paper's 20, or more where all of a tree's labels must differ.

    Those are 128 in the authors' code, whose trees have a depth of about 7.
    """
    return max(32, 2**depth) if operation == "ops" else 20


def _made(operation: Operation, tree: Bush, leaves: int, inner: int, random: np.random.Generator) -> tuple[Bush, Bush]:
    """A tree, of so many labels of leaves and of inner nodes, as source and target."""
    if operation == "copy":
        return tree, tree
    if operation == "rotation":
        return tree, mirrored(tree)
    if operation == "c3":
        return tree, reduced(tree, lambda _, a, b: (a + b) % 3)
    node, action = int(random.integers(len(tree.labels))), int(random.integers(len(ACTIONS)))
    own, label = slice(node, node + sizes(tree)[node]), tree.labels[node]
    leaf = label + (inner + len(ACTIONS)) * (tree.arities[node] > 0)  # the token of that label without children
    made: dict[str, Callable[[], Bush]] = {
        "extract": lambda: part(tree, node),
        "flip-extract": lambda: mirrored(part(tree, node)),
        "truncate": lambda: Bush(
            (*tree.labels[: own.start], leaf, *tree.labels[own.stop :]),
            (*tree.arities[: own.start], 0, *tree.arities[own.stop :]),
        ),
        "no-op": lambda: tree,
    }
    source = Bush((leaves + inner + action, label, *tree.labels), (2, 0, *tree.arities))
    return source, made[ACTIONS[action]]()


def read_trees(source: str, console: "Console | None" = None) -> TreePairs:
    """Trees of rows, a source, a tab and a target, each an s-expression; see `pairs.tables` and `pairs.read_texts`.

    A token is a label with its number of children, so that a label of two kinds of nodes is two tokens. Prepared once, then
    memory-mapped.

    Args:
        source: A table, or a folder of those that end with .tsv.
        console: Shows the progress of the preparation.

    Raises:
        ValueError: Where there is nothing to read, or a row or a tree is wrong (with file, line and column).
    """
    with preparing(pair_source(source), console=console) as preparation:
        (found,) = preparation.sources

        def fill(writer: Writer) -> dict[str, Any]:
            known: dict[tuple[str, int], int] = {}
            sequences, left = {split: Ragged(writer, split, 1 << 32) for split in SPLITS}, Counter()
            for split, pair in assigned(lambda _: _trees(found, known), names_of(found), hashed, left):
                for tree in pair:
                    sequences[split].add(np.array(tree.labels))
            names, arities = [label for label, _ in known], [arity for _, arity in known]
            return {"names": names, "arities": arities, "left": {"repeated": left["repeated"]}}

        arrays = preparation.arrays("tree-pairs", fill)
    arities = tuple(arrays.facts["arities"])
    return TreePairs(Splits(stored(arrays, _pair, each=2), arrays.facts["left"]), tuple(arrays.facts["names"]), arities)


def _pair(arrays: Arrays, split: str, row: int) -> tuple[Bush, Bush]:
    """Source and target of tokens in preorder; the number of a node's children follows from its token."""
    arities = arrays.facts["arities"]
    both = (tuple(arrays.sequence(split, 2 * row + n).tolist()) for n in (0, 1))
    source, target = (Bush(labels, tuple(arities[label] for label in labels)) for labels in both)
    return source, target


def _trees(source: Source, known: dict[tuple[str, int], int]) -> Iterator[tuple[str, tuple[Bush, Bush]]]:
    """Name of the file and both trees of each row; tokens that come for the first time get the next number."""
    from isopos.trees import Unread

    for name, number, sides in tables(source):
        made: list[Bush] = []
        for text in sides:
            try:
                labels, arities = parsed(text)
            except Unread as error:
                side = " of the target" if made else ""
                problem = f"line {number}, column {error.at + 1}{side}: {error.said.partition(';')[0]}"
                raise ValueError(f"data: {name}, {problem}; repair or remove the line") from None
            tokens = [known.setdefault(token, len(known)) for token in zip(labels, arities, strict=True)]
            made.append(Bush(tuple(tokens), tuple(arities)))
        yield name, (made[0], made[1])
