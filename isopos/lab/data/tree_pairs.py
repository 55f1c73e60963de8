"""Pairs of trees: random trees with their images under an operation, or pairs read from files."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console

from isopos.lab.data.arrays import Arrays, Ragged, Writer
from isopos.lab.data.labelled import assign_splits
from isopos.lab.data.labelled_trees import (
    LabelledTree,
    mirror,
    parse,
    problem_of,
    random_shape,
    reduce_pairs,
    subtree,
    subtree_sizes,
)
from isopos.lab.data.pairs import pair_source, table_names, table_pairs
from isopos.lab.data.prepare import SPLITS, preparing
from isopos.lab.data.sources import Source
from isopos.lab.data.splits import Splits, stored

Operation = Literal["copy", "rotation", "c3", "ops"]
ACTIONS = ("extract", "flip-extract", "truncate", "no-op")
MOST = 1 << 14  # nodes of the largest random tree


@dataclass(frozen=True)
class TreePairs:
    """Pairs of trees whose labels are numbers of tokens, with the tokens."""

    pairs: Splits[tuple[LabelledTree, LabelledTree]]  # sources and targets
    names: tuple[str, ...]  # names of the tokens
    arities: tuple[int, ...]  # number of children of a node, by its token


def random_trees(
    seed: int, counts: Sequence[int], operation: Operation, *, depth: int, deviation: int, labels: int
) -> TreePairs:
    """Random binary trees and their targets, with distinct sources (Algebraic Positional Encodings, section 4.1).

    copy: the target is the source. rotation: its mirror image. c3: the source is an expression in the cyclic group of order
    3; the target has every sum of two numbers evaluated. ops: the source is a root that names an action, a leaf with the
    label of a node, and a tree whose labels all differ. The target is the subtree of that node (extract), its mirror image
    (flip-extract), the tree with a leaf in place of that subtree (truncate), or the tree (no-op).

    The paper's appendix draws depths from a discretised normal distribution; here they are integers from 1 on, and include
    the root that names the action. The paper does not say which leaf replaces a truncated subtree; as in the authors' code
    it has the label of the node. An inner node has a separate token, so that a token determines its number of
    children.

    Args:
        counts: Numbers of pairs in train, validation and test.
        labels: Number of labels for copy, rotation and ops: one half for leaves, the other half for inner nodes; for ops,
            the last four of these are the actions.

    Raises:
        ValueError: If there are too few different trees, or trees are too large.
    """
    random, ops = np.random.default_rng(seed), operation == "ops"
    leaves = 3 if operation == "c3" else labels // 2
    inner = 1 if operation == "c3" else labels - leaves - ops * len(ACTIONS)
    names = [*map(str, range(leaves)), *(["+"] if operation == "c3" else [f"f{n}" for n in range(inner)])]
    arities = [0] * leaves + [2] * inner
    if ops:
        names, arities = [*names, *ACTIONS, *names[leaves:]], [*arities, *[2] * len(ACTIONS), *[0] * inner]

    def draw() -> tuple[LabelledTree, LabelledTree] | None:
        height = max(1, int(random.normal(depth, deviation)))
        shape = random_shape(random, height - ops, MOST)
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
        return _made(operation, LabelledTree(tuple(chosen.tolist()), shape), leaves, inner, random)

    different: dict[LabelledTree, tuple[LabelledTree, LabelledTree]] = {}
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
    """The default number of labels: the paper's 20, or more for ops, where all labels of a tree differ.

    The authors' code has 128 for ops, with trees of a depth of about 7.
    """
    return max(32, 2**depth) if operation == "ops" else 20


def _made(
    operation: Operation, tree: LabelledTree, leaves: int, inner: int, random: np.random.Generator
) -> tuple[LabelledTree, LabelledTree]:
    """Source and target for a tree; `leaves` and `inner` are the numbers of labels."""
    if operation == "copy":
        return tree, tree
    if operation == "rotation":
        return tree, mirror(tree)
    if operation == "c3":
        return tree, reduce_pairs(tree, lambda _, a, b: (a + b) % 3)
    node, action = int(random.integers(len(tree.labels))), int(random.integers(len(ACTIONS)))
    part, label = slice(node, node + subtree_sizes(tree)[node]), tree.labels[node]
    leaf = label + (inner + len(ACTIONS)) * (tree.arities[node] > 0)  # the token of that label without children
    made: dict[str, Callable[[], LabelledTree]] = {
        "extract": lambda: subtree(tree, node),
        "flip-extract": lambda: mirror(subtree(tree, node)),
        "truncate": lambda: LabelledTree(
            (*tree.labels[: part.start], leaf, *tree.labels[part.stop :]),
            (*tree.arities[: part.start], 0, *tree.arities[part.stop :]),
        ),
        "no-op": lambda: tree,
    }
    source = LabelledTree((leaves + inner + action, label, *tree.labels), (2, 0, *tree.arities))
    return source, made[ACTIONS[action]]()


def read_trees(source: str, console: Console | None = None) -> TreePairs:
    """Pairs of trees from rows of two s-expressions with a tab between them; see `table_pairs` and `read_pairs`.

    A token is a label together with a number of children. Prepared once, then memory-mapped.

    Args:
        source: A table, or a folder of .tsv files.

    Raises:
        ValueError: If there is nothing to read, or a row or a tree is wrong (with file, line and column).
    """
    with preparing(pair_source(source), console=console) as preparation:
        (files,) = preparation.sources

        def fill(writer: Writer) -> dict[str, Any]:
            known: dict[tuple[str, int], int] = {}
            sequences, dropped = {split: Ragged(writer, split, 1 << 32) for split in SPLITS}, Counter()

            def content(pair: tuple[LabelledTree, LabelledTree]) -> tuple[bytes, bytes]:
                return pair[0].key.encode(), f"({pair[0].key}, {pair[1].key})".encode()

            for split, pair in assign_splits(lambda _: _trees(files, known), table_names(files), content, dropped):
                for tree in pair:
                    sequences[split].add(np.array(tree.labels))
            names, arities = [label for label, _ in known], [arity for _, arity in known]
            return {"names": names, "arities": arities, "left": {"repeated": dropped["repeated"]}}

        arrays = preparation.arrays("tree-pairs", fill)
    arities = tuple(arrays.facts["arities"])
    return TreePairs(Splits(stored(arrays, _pair, each=2), arrays.facts["left"]), tuple(arrays.facts["names"]), arities)


def _pair(arrays: Arrays, split: str, row: int) -> tuple[LabelledTree, LabelledTree]:
    """Source and target of tokens in preorder; the number of a node's children follows from its token."""
    arities = arrays.facts["arities"]
    both = (tuple(arrays.sequence(split, 2 * row + n).tolist()) for n in (0, 1))
    source, target = (LabelledTree(labels, tuple(arities[label] for label in labels)) for labels in both)
    return source, target


def _trees(source: Source, known: dict[tuple[str, int], int]) -> Iterator[tuple[str, tuple[LabelledTree, LabelledTree]]]:
    """Name of the file and both trees of each row; new tokens get the next number in `known`."""
    from isopos.trees import Unread

    for name, number, sides in table_pairs(source):
        made: list[LabelledTree] = []
        for text in sides:
            try:
                labels, arities = parse(text)
            except Unread as error:
                side = " of the target" if made else ""
                problem = f"line {number}, column {error.at + 1}{side}: {problem_of(error)}"
                raise ValueError(f"data: {name}, {problem}; repair or remove the line") from None
            tokens = [known.setdefault(token, len(known)) for token in zip(labels, arities, strict=True)]
            made.append(LabelledTree(tuple(tokens), tuple(arities)))
        yield name, (made[0], made[1])
