"""Groups of positions, and the tensors that hold their elements.

A position is one row of an integer tensor ``[*b t c]`` with c coordinates: one for a line or a ring, two for a tree (the row
of the node's parent and the branch taken there), and for a product the coordinates of all parts. Batch axes give each
sample its own positions; for decoding and cross-attention an encoding is evaluated at another tensor.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isopos.catalog import at_least, instances
from isopos.exact import offsets
from isopos.graphs import graph
from isopos.images import frames, patches
from isopos.times import timestamps
from isopos.trees import INTEGER_DTYPES, depths, forest, name_row, parents_of, renumber, tree, tree_distance, tree_labels

__all__ = ["Group", "Line", "Product", "Ring", "Tree"]
__all__ += ["forest", "frames", "graph", "grid", "lines", "packed", "patches", "product", "ring", "sequence", "timestamps"]
__all__ += ["tree", "tree_labels"]

REAL_DTYPES = (torch.float32, torch.float64)


class Group(ABC):
    """A group whose elements are rows of ``columns`` coordinates. Each encoding names its group."""

    real = False  # whether coordinates may be floats

    @property
    def columns(self) -> int:
        """Coordinates of one element."""
        return 1

    @property
    def refers_to_rows(self) -> bool:
        """Whether coordinates refer to other rows of the tensor, as for trees."""
        return any(isinstance(leaf, Tree) for leaf in self.leaves)

    @property
    def leaves(self) -> tuple["Group", ...]:
        """The lines, rings and trees in a product; otherwise the group itself."""
        return (self,)

    @property
    def is_grid(self) -> bool:
        """Whether it is a line, or a product of lines."""
        return all(isinstance(leaf, Line) for leaf in self.leaves)

    @property
    @abstractmethod
    def noun(self) -> str:
        """A name for its positions' space: line, ring of 12, grid of 2 axes, ..."""

    @abstractmethod
    def arrange(self, t: int) -> Tensor:
        """`t` positions ``[t c]`` in an order suited to streams: an image row by row, a tree from its root."""

    @abstractmethod
    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        """The products x_i y_i of two tensors of elements ``[*b t c]``; a single row is combined with all rows of the other.

        The last t rows are the products; for trees, rows of their prefixes precede them. Operands may also contain such
        rows, so trees are paired from the last row back, up to the length of the shorter operand.
        """

    @abstractmethod
    def inverse(self, x: Tensor) -> Tensor:
        """The inverse of each element.

        Trees raise an error: positions are downward paths, whose inverses are no positions.
        """

    @abstractmethod
    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Number of steps between every row of x ``[*b t c]`` and of y ``[*b s c]``: ``[*b t s]``, int64 for integers."""

    @abstractmethod
    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Random elements ``[*shape c]``."""

    def check(self, x: Tensor) -> None:
        """Raise ValueError unless x holds elements of this group; the base class checks columns and dtype."""
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != self.columns:
            build = "isopos.sequence(t), isopos.grid(...), isopos.product(...) and isopos.positions.tree(...) build them"
            if isinstance(x, tuple):
                build = "x, segment_ids = isopos.packed(lengths) has both"
            if isinstance(x, Tensor) and x.ndim:  # position ids [*b t], as other libraries have them
                one = self.columns == 1
                build = "x[..., None] makes a column of them" if one else f"torch.stack(columns, -1) joins columns; {build}"
            raise ValueError(f"positions: expected [*b t {self.columns}] for {self}, got {got}; {build}")
        real = any(leaf.real for leaf in self.leaves)
        if x.dtype not in INTEGER_DTYPES + REAL_DTYPES * real:
            kind = "integers (int64, int32)" + ", float32 or float64" * real
            raise ValueError(
                f"positions: expected {kind}, got {x.dtype}; isopos.sequence(t) and isopos.tree(...) build them"
            )

    def shift(self, x: Tensor, y: Tensor) -> Tensor:
        """The products of one element, the last row of x, with every row of y ``[*b t c]``, as the last t rows."""
        return self.compose(x[..., -1:, :], y)

    def origin(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """The identity element, ``[*shape c]``."""
        return torch.zeros(*shape, self.columns, dtype=torch.int64, device=device)

    @property
    def _parents(self) -> tuple[int, ...]:
        """Columns that refer to rows of the same tensor."""
        starts = itertools.accumulate((leaf.columns for leaf in self.leaves), initial=0)
        return tuple(start for start, leaf in zip(starts, self.leaves, strict=False) if isinstance(leaf, Tree))


@dataclass(frozen=True)
class Line(Group):
    """The integers under addition. With ``real``, the real numbers: float32 and float64 positions are accepted, too.

    Examples:
        >>> Line().compose(sequence(3), sequence(3)).tolist()
        [[0], [2], [4]]
    """

    real: bool = False

    @property
    def noun(self) -> str:
        return "line"

    def arrange(self, t: int) -> Tensor:
        return sequence(t)

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def inverse(self, x: Tensor) -> Tensor:
        return -x

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        return offsets(x, y).abs()

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Integers from -500 to 500."""
        return torch.randint(-500, 501, (*shape, 1), generator=generator)


@dataclass(frozen=True)
class Ring(Group):
    """The integers modulo ``period``: hours of a day, residues of a cyclic molecule, angles.

    With ``real``, the real numbers modulo the period: float32 and float64 positions are accepted, too.

    Examples:
        >>> Ring(12).compose(torch.tensor([[10]]), torch.tensor([[5]])).tolist()
        [[3]]
        >>> Ring(24, real=True).distance(torch.tensor([[23.5]]), torch.tensor([[1.25]])).tolist()
        [[1.75]]
    """

    period: int
    real: bool = False

    def __post_init__(self) -> None:
        at_least("period", self.period)

    def __repr__(self) -> str:
        return f"Ring(period={self.period}{', real=True' * self.real})"  # the repr without real is part of fingerprints

    @property
    def noun(self) -> str:
        return f"ring of {self.period}"

    def arrange(self, t: int) -> Tensor:
        return sequence(t) % self.period

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y) % self.period

    def inverse(self, x: Tensor) -> Tensor:
        return -x % self.period

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The shorter way around."""
        forward = offsets(x, y) % self.period
        return torch.minimum(forward, self.period - forward)

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Elements 0 to period - 1."""
        return torch.randint(self.period, (*shape, 1), generator=generator)


@dataclass(frozen=True)
class Tree(Group):
    """Nodes of trees: products of `branches` generators, one per edge on the path from the root (APE, section 3.2.1).

    A node is a row (parent's row in the same tensor, branch) of ``[*b n 2]``. A root is (-1, -1), the identity; all roots
    are the same element. Rows may be in any order. To batch trees of several sizes, pad with roots and mask these:
    ``torch.nn.utils.rnn.pad_sequence(trees, batch_first=True, padding_value=-1)``.

    Only downward paths of the free group are positions: there is no inverse, and a shift multiplies from the left.

    Args:
        branches: Number of generators. A branch is 0 to branches - 1.

    References:
        Algebraic Positional Encodings (Kogkalidis et al. 2024). https://arxiv.org/abs/2312.16045

    Examples:
        >>> x = tree("(+ (* a b) c)")
        >>> x.tolist()
        [[-1, -1], [0, 0], [1, 0], [1, 1], [0, 1]]
        >>> Tree(2).distance(x[:1], x).tolist()
        [[0, 1, 2, 2, 1]]
        >>> Tree(2).shift(tree([[], []]), x)[-5:].tolist()
        [[0, 1], [3, 0], [4, 0], [4, 1], [3, 1]]
    """

    branches: int

    def __post_init__(self) -> None:
        at_least("branches", self.branches)

    @property
    def columns(self) -> int:
        return 2

    @property
    def noun(self) -> str:
        return f"tree of {self.branches} branches"

    def arrange(self, t: int) -> Tensor:
        """Level by level, each node with all of its branches."""
        row = torch.arange(t)[:, None] - 1
        return torch.where(row < 0, -1, torch.cat((row // self.branches, row % self.branches), -1))

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        """The word of x_i followed by the word of y_i, after the rows of x and rows for the prefixes of the new words."""
        x, y, t = _paired(x, y)
        rows, pairs = x.shape[-2], torch.arange(t, device=x.device)
        up, branch, last = parents_of(y), y[..., 1].flatten(), slice(y.shape[-2] - t, None)
        depth, node = depths(y)[..., last], torch.arange(len(up), device=y.device).view(y.shape[:-1])[..., last]
        longest = max(1, int(depth.max())) if depth.numel() else 1
        steps = []
        for k in reversed(range(longest)):  # t rows at a time, from the products to their shortest prefixes
            remaining = depth - (longest - 1 - k)  # letters of y_i in them; unused rows are roots
            parent = torch.where(remaining > 1, rows + (k - 1) * t + pairs, rows - t + pairs)
            steps.append(torch.where(remaining[..., None] > 0, torch.stack((parent, branch[node]), -1), -1))
            node = up[node]
        steps[0] = torch.where(depth[..., None] > 0, steps[0], x[..., rows - t :, :])
        return torch.cat((x, *reversed(steps)), -2)

    def shift(self, x: Tensor, y: Tensor) -> Tensor:
        """The rows of x, then y as a subtree of the last row."""
        x, y = _one_batch(x, y)
        subtree = renumber(y, (0,), lambda parent: parent + x.shape[-2])
        return torch.cat((x, torch.where(y[..., :1] < 0, x[..., -1:, :], subtree)), -2)

    def inverse(self, x: Tensor) -> Tensor:
        raise ValueError(
            f"inverse: expected a group of lines and rings, got {self}: positions are downward paths, whose inverses are no "
            "positions; distance(x, y) and shift(s, x) need none"
        )

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Edges between nodes of one tree: the sum of their depths minus twice the depth of their lowest common ancestor."""
        return tree_distance(*_one_batch(x, y))

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Trees of n rows in random order, for shape ``*b n``: from chains to broad trees."""
        *batch, n = shape
        draw = torch.rand(*batch, n + 1, generator=generator, dtype=torch.float64)
        order = torch.rand(*batch, n, generator=generator).argsort(-1)
        row = torch.arange(n)
        window = torch.minimum(n ** draw[..., n:], row)  # a parent is one of the `window` nodes before
        parent = order.gather(-1, (row - 1 - (draw[..., :n] * window).long()).clamp(min=0))
        branch = torch.randint(self.branches, (*batch, n), generator=generator)
        nodes = torch.where(row[:, None] > 0, torch.stack((parent, branch), -1), -1)
        return torch.empty_like(nodes).scatter(-2, order[..., None].expand(nodes.shape), nodes)

    def origin(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        return torch.full((*shape, 2), -1, dtype=torch.int64, device=device)

    def check(self, x: Tensor) -> None:
        """Check that rows and branches exist and that every node leads to a root. Compilers skip this."""
        super().check(x)
        if torch.compiler.is_compiling():
            return
        if x.is_meta:
            raise ValueError("positions: expected rows of trees with values, got a tensor on the meta device")
        parent, branch = x.unbind(-1)
        for wrong, expected, remedy in (
            ((x < -1).any(-1) | ((parent < 0) != (branch < 0)), "roots (-1, -1)", "pad with -1 in both columns"),
            (branch >= self.branches, f"branches from 0 to {self.branches - 1}", "build the scheme with more, branches=N"),
        ):
            if wrong.any():
                row = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"positions: expected {expected}, got {x[tuple(row)].tolist()} in row {name_row(row)}; {remedy}"
                )
        depths(x)


@dataclass(frozen=True)
class Product(Group):
    """Tuples with one element per part and concatenated coordinates. A grid of n axes is a product of n lines.

    In a product with a tree, every part has rows for prefixes of products; they hold its identity.

    Examples:
        >>> Product((Line(), Ring(4))).compose(torch.tensor([[1, 3]]), torch.tensor([[1, 3]])).tolist()
        [[2, 2]]
    """

    parts: tuple[Group, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", instances("parts", self.parts, Group, "groups"))

    @property
    def columns(self) -> int:
        return sum(part.columns for part in self.parts)

    @property
    def leaves(self) -> tuple[Group, ...]:
        return tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def noun(self) -> str:
        if self.is_grid:
            return f"grid of {len(self.leaves)} axes"
        runs = [(noun, len(list(run))) for noun, run in itertools.groupby(part.noun for part in self.parts)]
        return " by ".join(noun if n == 1 else f"{n} {noun}s" for noun, n in runs)

    def arrange(self, t: int) -> Tensor:
        """Row by row over equally many steps of each part; with a tree, all parts in parallel."""
        if self.refers_to_rows:
            return torch.cat([part.arrange(t) for part in self.parts], -1)
        side = next(n for n in itertools.count(2) if n ** len(self.parts) >= t)
        row, columns = torch.arange(t), []
        for part in reversed(self.parts):
            columns.insert(0, part.arrange(side)[row % side])
            row = row // side
        return torch.cat(columns, -1)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The coordinates of each part."""
        return x.split([part.columns for part in self.parts], -1)

    def compose(self, x: Tensor, y: Tensor) -> Tensor:
        elements = []
        x, y, t = _paired(x, y) if self._parents else (x, y, None)
        for part, *pair in zip(self.parts, self.split(x), self.split(y), strict=True):
            if t is not None and not part._parents:
                pair = [z[..., z.shape[-2] - t :, :] for z in pair]
            elements.append(part.compose(*pair))
        return self._join(elements)

    def shift(self, x: Tensor, y: Tensor) -> Tensor:
        return self._join([part.shift(a, b) for part, a, b in zip(self.parts, self.split(x), self.split(y), strict=True)])

    def inverse(self, x: Tensor) -> Tensor:
        return torch.cat([part.inverse(a) for part, a in zip(self.parts, self.split(x), strict=True)], -1)

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.parts, self.split(x), self.split(y), strict=True)
        return torch.stack([part.distance(a, b) for part, a, b in pairs]).sum(0)

    def random(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.cat([part.random(*shape, generator=generator) for part in self.parts], -1)

    def origin(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        return torch.cat([part.origin(*shape, device=device) for part in self.parts], -1)

    def check(self, x: Tensor) -> None:
        super().check(x)
        for part, a in zip(self.parts, self.split(x), strict=True):
            part.check(a)

    def _join(self, elements: Sequence[Tensor]) -> Tensor:
        rows, filled = max(a.shape[-2] for a in elements), []
        for part, a in zip(self.parts, elements, strict=True):
            identity = part.origin(*a.shape[:-2], rows - a.shape[-2], device=a.device)
            element = renumber(a, part._parents, lambda parent, before=identity.shape[-2]: parent + before)
            filled.append(torch.cat((identity, element), -2))
        return torch.cat(filled, -1)


def lines(axes: int) -> Group:
    """The line of real positions, or the grid with `axes` axes."""
    line = Line(real=True)
    return line if axes == 1 else Product((line,) * axes)


def sequence(t: int, *, device: torch.device | str | None = None) -> Tensor:
    """Positions 0 to t - 1 of a sequence: int64 ``[t 1]``. Add an integer to shift them.

    The length may be symbolic, or a tensor with one integer, as in compilers and tracers.

    Examples:
        >>> sequence(3).tolist()
        [[0], [1], [2]]
    """
    symbolic = isinstance(t, Tensor) and t.ndim == 0 and t.dtype in INTEGER_DTYPES
    return torch.arange(t if symbolic else at_least("t", t, 0), device=device)[:, None]


def packed(lengths: Sequence[int] | Tensor, *, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Positions ``[t 1]`` and segment ids ``[t]`` of sequences packed into one, each from position 0: int64.

    Args:
        lengths: Number of tokens of each sequence; for cumulative lengths ``[0, 2, 5]`` use ``torch.diff``.
        device: Device of the result.

    Examples:
        >>> x, ids = packed([2, 3])
        >>> x[:, 0].tolist(), ids.tolist()
        ([0, 1, 0, 1, 2], [0, 0, 1, 1, 1])
    """
    try:
        counts = torch.as_tensor(lengths if isinstance(lengths, Tensor) else list(lengths), device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"lengths: expected a list of token counts, got {lengths}") from None
    real = counts.numel() > 0 and (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
    counts = counts.long()
    if counts.ndim != 1 or real or (counts < 0).any():
        raise ValueError(f"lengths: expected a list of token counts, got {lengths}")
    ids = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return (torch.arange(len(ids), device=counts.device) - starts[ids])[:, None], ids


def ring(period: int, *, device: torch.device | str | None = None) -> Tensor:
    """Every element of ``Ring(period)``: int64 ``[period 1]``."""
    return sequence(at_least("period", period), device=device)


def grid(*sizes: int, device: torch.device | str | None = None) -> Tensor:
    """Every point of a grid, last axis fastest: int64 ``[prod(sizes) len(sizes)]``.

    Examples:
        >>> grid(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    if not sizes:
        raise ValueError("sizes: expected at least one axis, got none")
    return product(*(sequence(at_least("size", n, 0), device=device) for n in sizes))


def product(*parts: Tensor, group: Product | None = None) -> Tensor:
    """Every combination of rows of the parts ``[t_i c_i]``, last fastest: ``[prod(t_i) sum(c_i)]``.

    With `group` each part is checked, and parents in tree parts become rows of the product. Trees need it: without it a part
    with a root, neighbouring coordinates (-1, -1), is refused.

    Examples:
        >>> product(sequence(2), grid(1, 2)).tolist()
        [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
        >>> product(tree([[]]), sequence(2), group=Product((Tree(1), Line()))).tolist()
        [[-1, -1, 0], [-1, -1, 1], [0, 0, 0], [1, 0, 1]]
    """
    if not parts:
        raise ValueError("product: expected at least one part, got none")
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim != 2:
            got = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(f"product: expected parts [t c], got {got}")
    if group is None:
        for i, part in enumerate(parts):
            if not torch.compiler.is_compiling() and not part.is_meta and ((part[:, 1:] == -1) & (part[:, :-1] == -1)).any():
                raise ValueError(
                    f"product: expected parts without trees, got (-1, -1), a tree's root, in part {i}; pass "
                    "group=Product((...)), whose parts say which columns are trees"
                )
    elif len(group.parts) != len(parts):
        raise ValueError(f"product: expected {len(group.parts)} parts for {group}, got {len(parts)}")
    else:
        for part, group_part in zip(parts, group.parts, strict=True):
            group_part.check(part)
    lengths, columns = [part.shape[0] for part in parts], []
    for i, part in enumerate(parts):
        after, before = math.prod(lengths[i + 1 :]), math.prod(lengths[:i])
        rows = torch.arange(part.shape[0], device=part.device)  # ONNX's repeat_interleave takes no dynamic number
        row = rows[None, :, None].expand(before, -1, after).reshape(-1)
        repeated = part[row]
        if group is not None:
            first = (torch.arange(len(row), device=part.device) - row * after)[:, None]  # row of the part's row 0
            repeated = renumber(repeated, group.parts[i]._parents, lambda parent, n=after, first=first: parent * n + first)
        columns.append(repeated)
    return torch.cat(columns, -1)


def _one_batch(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in int64 with equal batch axes."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.long().expand(*batch, -1, -1), y.long().expand(*batch, -1, -1)


def _paired(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """Elements with equal batch axes and single rows repeated, and the number of pairs, which are the last rows."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    m, n = x.shape[-2], y.shape[-2]
    m, n = n if m == 1 else m, m if n == 1 else n
    return x.expand(*batch, m, -1), y.expand(*batch, n, -1), min(m, n)
