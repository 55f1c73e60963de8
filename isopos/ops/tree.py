"""Operators of the nodes of trees: products of generators from the root to the node.

    W(root) = I,    W(node) = W(parent) G(branch)

A tree is int64 ``[*b n 2]``, rows (parent's row, branch) in any order; a root is (-1, -1). Generators ``[h k d d]`` are one
matrix per head and branch. `path_naive` is the specification; `path` is tested against it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.exact import full_precision
from isopos.trees import depths

CHUNK = 1 << 20  # elements of operators per matrix product


def path_naive(generator: Tensor, position: Tensor) -> Tensor:
    """The operators ``[*b h n d d]`` of nodes ``[*b n 2]``: each node is followed to its root. Twice differentiable.

    Examples:
        >>> quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> path_naive(quarter.view(1, 1, 2, 2), torch.tensor([[-1, -1], [0, 0], [1, 0]]))[0, 2].tolist()
        [[-1.0, 0.0], [0.0, -1.0]]
    """
    *batch, n, _ = position.shape
    heads, _, d, _ = generator.shape
    eye = torch.eye(d, dtype=generator.dtype, device=generator.device).expand(heads, d, d)
    operators = [generator[None, :, 0][:0]]
    for tree, depth in zip(position.flatten(0, -2).split(n or 1), depths(position).flatten().split(n or 1), strict=True):
        nodes = tree.tolist()
        for (parent, branch), steps in zip(nodes, depth.tolist(), strict=True):
            operator = eye
            for _ in range(steps):
                operator = generator[:, branch] @ operator
                parent, branch = nodes[parent]
            operators.append(operator[None])
    return torch.cat(operators).view(*batch, n, heads, d, d).movedim(-3, -4)


def path(generator: Tensor, position: Tensor) -> Tensor:
    """`path_naive` computed level by level from the operators of parents, with one matrix product per branch.

    Args:
        generator: ``[h k d d]``, float32 or float64.
        position: ``[*b n 2]``, branches 0 to k - 1.

    Returns:
        ``[*b h n d d]`` in the dtype of the generators. Differentiable once, with respect to the generators; the backward
        pass keeps the result.

    Raises:
        ValueError: If a branch has no generator, a parent has no row, or a node is an ancestor of itself.
    """
    return _path(generator, position)


class _Nodes(NamedTuple):
    """Nodes of one depth and branch: their slice of the depth, their rows, and the rows of their parents."""

    branch: int
    span: slice
    rows: Tensor
    parents: Tensor


class _Forest:
    """The nodes of all samples by depth, and the positions of their operators in ``[*b h n d d]``."""

    def __init__(self, generator: Tensor, position: Tensor):
        self.heads, branches, self.features, _ = generator.shape
        *batch, self.length, _ = position.shape
        self.shape = (*batch, self.heads, self.length, self.features, self.features)
        depth, (parent, branch) = depths(position).flatten(), position.long().flatten(0, -2).unbind(-1)
        if (wrong := (branch >= branches) | (branch < 0) & (parent >= 0)).any():
            raise ValueError(
                f"position: expected branches from 0 to {branches - 1}, one per generator, got {int(branch[wrong][0])}"
            )
        key = depth * branches + branch  # -1 for roots
        order = key.argsort(stable=True)
        keys, counts = key[order].unique_consecutive(return_counts=True)
        self.roots, self.levels, self.counts = order[:0], [], [0]  # nodes of each depth, without roots
        self.index_in_depth = torch.empty_like(order)
        for which, rows in zip(keys.tolist(), order.split(counts.tolist()), strict=True):
            level, branch = divmod(which, branches)
            if level < 0:
                self.roots = rows
                continue
            if level > len(self.levels):
                self.levels.append([])
                self.counts.append(0)
            for part in rows.split(max(1, CHUNK // (self.heads * self.features**2))):
                span = slice(self.counts[-1], self.counts[-1] + len(part))
                self.index_in_depth[part] = torch.arange(span.start, span.stop, device=part.device)
                self.levels[-1].append(_Nodes(branch, span, part, parent[part] + part // self.length * self.length))
                self.counts[-1] = span.stop

    def index(self, rows: Tensor) -> Tensor:
        """Indices ``[h * m]`` of the operators of nodes ``[m]`` among all operators ``[prod(b) * h * n d d]``."""
        head = torch.arange(self.heads, device=rows.device)[:, None]
        return (rows + (rows // self.length * (self.heads - 1) + head) * self.length).flatten()

    def take(self, operators: Tensor, rows: Tensor) -> Tensor:
        """The operators of nodes, stacked: ``[h m*d d]``."""
        return operators.index_select(0, self.index(rows)).view(self.heads, -1, self.features)


def _square(x: Tensor) -> Tensor:
    """Operators ``[... d]`` of any leading shape as ``[. d d]``."""
    return x.reshape(-1, x.shape[-1], x.shape[-1])


@torch.library.custom_op("isopos::tree_path", mutates_args=())
def _path(generator: Tensor, position: Tensor) -> Tensor:
    forest = _Forest(generator, position)
    out = generator.new_empty(forest.shape)
    flat = _square(out)
    flat[forest.index(forest.roots)] = torch.eye(forest.features, dtype=out.dtype, device=out.device)
    with full_precision(out.device):
        for nodes in (nodes for level in forest.levels for nodes in level):
            product = torch.bmm(forest.take(flat, nodes.parents), generator[:, nodes.branch])
            flat.index_copy_(0, forest.index(nodes.rows), _square(product))
    return out


@_path.register_fake
def _(generator: Tensor, position: Tensor) -> Tensor:
    heads, _, d, _ = generator.shape
    return generator.new_empty(*position.shape[:-2], heads, position.shape[-2], d, d)


@torch.library.custom_op("isopos::tree_path_backward", mutates_args=())
def _path_backward(grad: Tensor, out: Tensor, generator: Tensor, position: Tensor) -> Tensor:
    """The gradient of the generators, from the deepest nodes to the roots, with gradients of two levels in memory."""
    forest, grad_generator = _Forest(generator, position), generator.new_zeros(generator.shape)
    grads, operators, deeper = _square(grad), _square(out), None
    with full_precision(out.device):
        for nodes, count in zip(reversed(forest.levels), reversed(forest.counts[:-1]), strict=True):
            above = generator.new_zeros(forest.heads, count, *generator.shape[2:])
            for part in nodes:
                gradient = forest.take(grads, part.rows)
                if deeper is not None:
                    gradient += deeper[:, part.span].flatten(1, 2)
                grad_generator[:, part.branch] += torch.bmm(forest.take(operators, part.parents).mT, gradient)
                if count:
                    passed = torch.bmm(gradient, generator[:, part.branch].mT)
                    above.index_add_(1, forest.index_in_depth[part.parents], passed.unflatten(1, (-1, forest.features)))
            deeper = above
    return grad_generator


@_path_backward.register_fake
def _(grad: Tensor, out: Tensor, generator: Tensor, position: Tensor) -> Tensor:
    return generator.new_empty(generator.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    generator, position = inputs
    ctx.save_for_backward(output, generator, position)


def _path_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _path_backward(grad, *ctx.saved_tensors), None


_path.register_autograd(_path_autograd, setup_context=_save_inputs)
