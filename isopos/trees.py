"""Trees as tensors of rows (parent's row, branch): parsing, and traversal from nodes to the root.

A tree is int64 ``[*b n 2]``; rows may be in any order and a root is (-1, -1). `isopos.positions.Tree` is their group.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = list[tuple[int, int]]
INTEGER_DTYPES = (torch.int64, torch.int32)  # sums of shorter ones wrap


class Unread(ValueError):
    """Error for a text that is not a tree; `at` is the index of the wrong character."""

    def __init__(self, message: str, at: int):
        super().__init__(f"tree: {message.format(f' at {at}')}")
        self.at = at


def tree(source: Any) -> Tensor:
    """The nodes of a tree: int64 ``[n 2]``, rows (parent's row, branch).

    Args:
        source: One of the following.
            Parents: an integer tensor or array ``[n]`` or a list of integers, the row of each node's parent, -1 for a root.
                A child's branch is its rank among its siblings, in the order of rows.
            Nested lists or tuples: a list is a node and its items are its children; any other item is a leaf.
            Text: an s-expression ``(label child child ...)``; the first atom labels a node, further atoms and lists are its
                children. Rows of lists and text are in preorder.

    Raises:
        ValueError: If the source is no tree: parents out of range or in a cycle, unbalanced parentheses, ...

    Examples:
        >>> tree([-1, 0, 0, 1]).tolist()
        [[-1, -1], [0, 0], [0, 1], [1, 0]]
        >>> tree([["the", "cat"], "sat"]).tolist()
        [[-1, -1], [0, 0], [1, 0], [1, 1], [0, 1]]
    """
    parents = _parent_array(source)
    if parents is not None:
        return _ranked(parents)
    return torch.tensor(read(source)[0])


def tree_labels(source: Any) -> list[Any]:
    """Labels of nodes in the order of the rows of `tree`: atoms of text; leaves of lists, and None for inner nodes.

    Examples:
        >>> tree_labels("(S (NP the cat) sat)")
        ['S', 'NP', 'the', 'cat', 'sat']
        >>> tree_labels([["the", "cat"], "sat"])
        [None, None, 'the', 'cat', 'sat']
    """
    if _parent_array(source) is not None:
        raise ValueError("tree_labels: expected nested lists or an s-expression, got parents, which carry no labels")
    return read(source)[1]


def forest(trees: Iterable[Tensor]) -> Tensor:
    """Several trees ``[n_i 2]`` packed into one tensor ``[sum(n_i) 2]``, parents renumbered.

    Examples:
        >>> forest([tree([[]]), tree([[]])]).tolist()
        [[-1, -1], [0, 0], [-1, -1], [2, 0]]
    """
    trees = list(trees)
    packed = torch.empty(0, 2, dtype=torch.int64, device=getattr(next(iter(trees), None), "device", None))
    parts, start = [packed], 0
    for nodes in trees:
        if not isinstance(nodes, Tensor) or nodes.ndim != 2 or nodes.shape[-1] != 2 or nodes.dtype not in INTEGER_DTYPES:
            got = f"{list(nodes.shape)} of {nodes.dtype}" if isinstance(nodes, Tensor) else type(nodes).__name__
            raise ValueError(f"forest: expected trees [n 2] of integers, as isopos.tree reads them, got {got}")
        if len(nodes) and (largest := int(nodes[:, 0].max())) >= len(nodes):
            raise ValueError(f"forest: expected parents below {len(nodes)}, the number of nodes, got {largest}")
        parts.append(renumber(nodes, (0,), lambda parent, start=start: parent + start))
        start += len(nodes)
    return torch.cat(parts)


def depths(position: Tensor) -> Tensor:
    """Edges from the root to each node of trees ``[*b n 2]``: int64 ``[*b n]``, in O(n log n).

    Raises ValueError if a tree lacks a node's parent, or a node is its own ancestor.

    Examples:
        >>> depths(tree("(+ (* a b) c)")).tolist()
        [0, 1, 2, 2, 1]
    """
    n = position.shape[-2]
    if (beyond := position[..., 0] >= n).any():  # a row of the next sample's tree, or of none
        row = beyond.nonzero()[0].tolist()
        raise ValueError(
            f"positions: expected parents from 0 to {n - 1}, got {position[tuple(row)].tolist()} in row {name_row(row)}; "
            "a tensor holds all rows of its trees"
        )
    up, depth = parents_of(position), (position[..., 0] >= 0).long().flatten()
    for above in _doublings(up, n.bit_length()):
        further = depth[above]
        if not further.any():
            break
        depth = depth + further
    circular = (depth >= n).nonzero()
    if len(circular):
        *_, above = _doublings(up, n.bit_length() + 1)  # more than n steps lead to the cycle
        row = int(above[circular[0, 0]])
        index = [int(i) for i in np.unravel_index(row, position.shape[:-1])]
        raise ValueError(
            f"positions: expected nodes below a root, got row {name_row(index)}, its own ancestor; set a parent to (-1, -1)"
        )
    return depth.view(position.shape[:-1])


def parents_of(position: Tensor) -> Tensor:
    """Rows of parents in the flattened forest ``[prod(b) * n]`` of trees ``[*b n 2]``; a root is its own parent."""
    parent = position[..., 0].long()
    row = torch.arange(parent.numel(), device=parent.device).view_as(parent)
    return torch.where(parent < 0, row, parent + row[..., :1]).flatten()


def _doublings(up: Tensor, rounds: int) -> Iterator[Tensor]:
    """Rows of the ancestors 1, 2, 4, ... steps up.

    Applying ``x += x[up]`` for each sums x over all ancestors, if x is zero at roots.
    """
    for _ in range(rounds):
        yield up
        up = up[up]


@torch.library.custom_op("isopos::tree_distance", mutates_args=())
def tree_distance(x: Tensor, y: Tensor) -> Tensor:
    """Distances ``[*b t s]`` of nodes x ``[*b t 2]`` and y ``[*b s 2]``, from counts of equal ancestors."""
    (up_x, up_y), (depth_x, depth_y) = (parents_of(x), parents_of(y)), (depths(x), depths(y))
    deepest = torch.cat((depth_x.flatten(), depth_y.flatten(), depth_x.new_zeros(1))).max()
    rounds = int(deepest).bit_length()
    word = torch.cat((x[..., 1].flatten(), y[..., 1].flatten())).unique(return_inverse=True)[1]
    for up in _doublings(torch.cat((up_x, up_y + len(up_x))), rounds):  # equal words of doubled length get equal numbers
        word = (word * len(word) + word[up]).unique(return_inverse=True)[1]
    word_x, word_y = word[: len(up_x)].view_as(depth_x), word[len(up_x) :].view_as(depth_y)
    equal = (word_y[..., :, None] == word_x[..., None, :]) & (depth_y > 0)[..., :, None]
    common = _sum_ancestors(equal.int(), up_y, rounds).mT.contiguous()
    return depth_x[..., :, None] + depth_y[..., None, :] - 2 * _sum_ancestors(common, up_x, rounds)


@tree_distance.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], y.shape[-2], dtype=torch.int64)


def _sum_ancestors(values: Tensor, up: Tensor, rounds: int) -> Tensor:
    """Add to each row of values ``[*b n m]`` the rows of its ancestors, in place."""
    flat = values.view(len(up), values.shape[-1])
    for above in _doublings(up, rounds):
        flat += flat.index_select(0, above)
    return values


def renumber(x: Tensor, columns: tuple[int, ...], number: Callable[[Tensor], Tensor]) -> Tensor:
    """Elements with parents' row numbers mapped by `number`; roots keep -1."""
    if not columns:
        return x
    parent = x[..., list(columns)]
    x = x.clone()
    x[..., list(columns)] = torch.where(parent < 0, parent, number(parent)).to(x.dtype)
    return x


def _parent_array(source: Any) -> Tensor | None:
    """The parents ``[n]`` if the source holds parents, else None."""
    if isinstance(source, Tensor | np.ndarray):
        if isinstance(source, np.ndarray) and source.dtype.kind not in "biuf":
            raise ValueError(f"tree: expected parents as integers [n], got {list(source.shape)} of {source.dtype}")
        parents = source if isinstance(source, Tensor) else torch.from_numpy(source.copy())
        if parents.ndim != 1 or parents.is_floating_point() or parents.is_complex() or parents.dtype == torch.bool:
            raise ValueError(f"tree: expected parents as integers [n], got {list(parents.shape)} of {parents.dtype}")
        return parents.long()
    if not isinstance(source, list | tuple) or not source:
        return None
    integers = all(isinstance(i, Integral) and not isinstance(i, bool) for i in source)
    return torch.tensor([int(i) for i in source]) if integers else None


def _ranked(parents: Tensor) -> Tensor:
    """Nodes for parents ``[n]``; branches are ranks among siblings."""
    n = len(parents)
    wrong = ((parents < -1) | (parents >= n)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"tree: expected -1 or rows from 0 to {n - 1} as parents, got {int(parents[row])} in row {row}; "
            "a list of integers is read as parents"
        )
    if not (parents == -1).any():
        raise ValueError("tree: expected a root, a parent of -1, got none; subtract 1 where rows count from 1")
    order = parents.argsort(stable=True)
    siblings = parents[order]
    rank = torch.empty_like(parents)
    rank[order] = torch.arange(n, device=parents.device) - torch.searchsorted(siblings, siblings)
    nodes = torch.stack((parents, rank.masked_fill(parents < 0, -1)), -1)
    depths(nodes)
    return nodes


def read(source: Any) -> tuple[Rows, list[Any]]:
    """Rows of nested lists or text in preorder, as in `tree`, and their labels, as in `tree_labels`."""
    if not isinstance(source, str | list | tuple):
        raise ValueError(f"tree: expected parents, nested lists or an s-expression, got {type(source).__name__}")
    labelled = isinstance(source, str)
    rows, labels, stack = [], [], [(_parsed(source) if isinstance(source, str) else source, (-1, -1))]
    while stack:
        item, row = stack.pop()
        label = item
        if isinstance(item, list | tuple):
            label, *children = item if labelled else (None, *item)
            stack += [(children[i], (len(rows), i)) for i in reversed(range(len(children)))]
        rows.append(row)
        labels.append(label)
    return rows, labels


def _parsed(text: str) -> Any:
    """An s-expression as nested lists of atoms."""
    expression: list[Any] = []
    opened = [(expression, -1)]  # open lists with their first characters
    for match in re.finditer(r"[()]|[^\s()]+", text):
        token, at = match.group(), match.start()
        inside, _ = opened[-1]
        if token == ")" and len(opened) == 1:
            raise Unread("expected balanced parentheses, got ){} that closes nothing", at)
        if token in "()" and len(opened) > 1 and not inside:
            raise Unread(f"expected a label after (, got {token}{{}}", at)
        if len(opened) == 1 and inside:
            raise Unread("expected one expression, got another{}; isopos.positions.forest packs several trees", at)
        if token == ")":
            opened.pop()
            continue
        inside.append([] if token == "(" else token)
        if token == "(":
            opened.append((inside[-1], at))
    if len(opened) > 1:
        raise Unread("expected balanced parentheses, got ({} that nothing closes", opened[-1][1])
    if not expression:
        raise Unread("expected an expression, got empty text", 0)
    return expression[0]


def name_row(index: Sequence[int]) -> str:
    """A row and its sample, for error messages."""
    *sample, row = index
    return f"{row} of sample {', '.join(map(str, sample))}" if sample else f"{row}"
