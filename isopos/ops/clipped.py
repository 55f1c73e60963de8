"""Sums with clipped relative terms: scores depend on offsets up to a reach on each axis, at a cost linear in length.

    total_i = sum_j score[i, bucket(i, j)] v_j

Positions x ``[*b t c]`` of queries and y ``[*b s c]`` of keys are integers or reals. On each axis the offset y_j - x_i,
rounded (halves go up) and clipped to -R..R, is a digit 0..2R: the number of edges x_i + k - 1/2, k = 1-R..R, not above y_j.
A bucket is the number with these digits, first axis first, so that buckets of integers ascend with the lexicographic order
of offsets. Leading tokens without coordinates (class tokens) have two more buckets: one for pairs with such a key, one for
other pairs with such a query.

Why this is linear: let P[r] be the sum of the values whose keys rank below r on every axis. A bucket is a box of keys, and
the sum over it is a difference of P at its corners. After summation by parts each corner is read once, weighted by a
difference of scores (on several axes, by differences on every axis):

    total_i = sum_n (score[i, n] - score[i, n + 1]) P[end of bucket n of query i]

This is scheme 2 of Horn et al. 2021, who add prefix sums for the two outer buckets to a band of single keys, on any number
of axes and for keys with gaps between them.

Prefix sums are float64, so that at 100,000 tokens their differences are exact to float32. `clipped_naive` is the
specification.

References:
    Translational Equivariance in Kernelizable Attention (Horn, Shridhar, Groenewald, Baumann, 2021),
    https://arxiv.org/abs/2102.07680
    Self-Attention with Relative Position Representations (Shaw, Uszkoreit, Vaswani, 2018), https://arxiv.org/abs/1803.02155
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from isopos.exact import float64_device, is_exporting, to_float64

BLOCK = 1 << 18  # elements of prefix sums per block of the backward pass
SPREAD = 32  # most cells of the grid of ranks per key


def _edges(x: Tensor, reach: int) -> Tensor:
    """Lower edges of the buckets 1, ..., 2R of an axis: ``[... 2R]`` for coordinates ``[...]``."""
    steps = torch.arange(1 - reach, reach + 1, dtype=x.dtype, device=x.device)
    return x[..., None] + (steps - 0.5 if x.is_floating_point() else steps)


def _exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_floating_point() or y.is_floating_point():
        return to_float64(x.detach()), to_float64(y.detach())
    return x.detach().long(), y.detach().long()


def buckets(x: Tensor, y: Tensor, reach: int, outside: int = 0) -> Tensor:
    """The bucket of each query and key, int64 ``[*b t s]``, at quadratic cost.

    Args:
        x, y: Positions of queries ``[*b t c]`` and keys ``[*b s c]``; the first `outside` rows are not read.
        reach: R >= 1; there are (2R + 1)^c buckets of offsets.
        outside: Number of leading queries and keys that are class tokens, which have two more buckets.

    Examples:
        >>> x = torch.arange(5)[:, None]
        >>> buckets(x, x, reach=2)
        tensor([[2, 3, 4, 4, 4],
                [1, 2, 3, 4, 4],
                [0, 1, 2, 3, 4],
                [0, 0, 1, 2, 3],
                [0, 0, 0, 1, 2]])
        >>> buckets(x[:3], x[:3], reach=1, outside=1)
        tensor([[3, 4, 4],
                [3, 1, 2],
                [3, 0, 1]])
    """
    _check_positions(x, y, reach, outside)
    device, (x, y) = x.device, _exact(x, y)
    shape = (*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2])
    index = torch.zeros(shape, dtype=torch.int64, device=x.device)
    for query, key in zip(x.unbind(-1), y.unbind(-1), strict=True):
        edges = _edges(query, reach).expand(*shape[:-1], -1)
        if is_exporting():  # ONNX has no binary search
            digit = (edges[..., None, :] <= key[..., None, :, None]).sum(-1)
        else:
            digit = torch.searchsorted(edges.contiguous(), key[..., None, :].expand(shape).contiguous(), right=True)
        index = (2 * reach + 1) * index + digit
    inner = (2 * reach + 1) ** x.shape[-1]
    if outside:
        index[..., :outside, :] = inner + 1
        index[..., :outside] = inner
    return index.to(device)


def clipped_naive(
    score: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int, *, outside: int = 0, causal: bool = False
) -> Tensor:
    """The sum as defined at the top of this module, at quadratic cost; twice differentiable.

    Shapes as in `clipped`. Causal sums align the last query with the last key.
    """
    _check(score, v, x, y, reach, outside)
    index = buckets(x, y, reach, outside)[..., None, :, :]
    weight = score.gather(-1, index.expand(*score.shape[:-1], -1))
    if causal:
        weight = weight.tril(v.shape[-2] - score.shape[-2])
    return weight @ v


def clipped(score: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int, *, outside: int = 0, causal: bool = False) -> Tensor:
    """`clipped_naive` in time and memory proportional to tokens times buckets.

    Args:
        score: Scores of each query for each bucket ``[*b h t n]``, float32 or float64; n = (2R + 1)^c, plus 2 with
            `outside`.
        v: Values ``[*b h s e]`` in the same dtype. A column of ones sums the weights; rows of zeros mask keys.
        x, y: Positions of queries ``[*b t c]`` and keys ``[*b s c]``, integers or reals. Samples that share positions
            ``[t c]`` and ``[s c]`` are summed together, others one by one. On several axes keys should fill a good part of
            the grid of their coordinates.
        reach: R >= 1: larger offsets of an axis share a bucket.
        outside: Number of leading queries and keys that are class tokens.
        causal: Whether query i sums over keys up to key i, with the last query aligned with the last key. Positions must be
            integers; keys must be in strictly ascending lexicographic order (a sequence, or a grid row by row), and
            queries at the positions of the last keys; at most one class token, and then as many queries as keys.

    Returns:
        ``[*b h t e]`` in the dtype of v. Differentiable once, for score and v.

    Raises:
        TypeError: If score and v are not both float32 or both float64.
        ValueError: If shapes or options do not fit; if positions break the rules of `causal` (checked on the CPU and outside
            a compiler only); if the grid of the keys' coordinates has more than 32 (s + 1024) cells.

    Examples:
        >>> x, v = torch.arange(6)[:, None], torch.ones(1, 6, 1)
        >>> near = torch.tensor([0.0, 1.0, 0.0]).expand(1, 6, 3)  # the position of the query, not its neighbours
        >>> clipped(near, v, x, x, reach=1).flatten()
        tensor([1., 1., 1., 1., 1., 1.])
        >>> before = torch.tensor([1.0, 0.0, 0.0]).expand(1, 6, 3)
        >>> clipped(before, v, x, x, reach=1).flatten()
        tensor([0., 1., 2., 3., 4., 5.])
    """
    if is_exporting():  # the sum below is no graph of PyTorch's operations
        return clipped_naive(score, v, x, y, reach, outside=outside, causal=causal)
    _check(score, v, x, y, reach, outside)
    if score.dtype not in (torch.float32, torch.float64) or v.dtype != score.dtype:
        raise TypeError(f"score, v: expected one dtype, float32 or float64, got {score.dtype} and {v.dtype}; convert them")
    if (device := float64_device(score.device)) != score.device:
        there = clipped(score.to(device), v.to(device), x.to(device), y.to(device), reach, outside=outside, causal=causal)
        return there.to(score.device)
    x, y = (position[..., outside:, :] for position in _exact(x, y))
    if causal:
        _check_causal(x, y, outside)
    inner = (2 * reach + 1) ** x.shape[-1]
    weight, values = _corner_weights(score[..., outside:, :inner], reach, x.shape[-1], causal), v[..., outside:, :]
    samples = score.shape[:-3] if x.ndim > 2 or y.ndim > 2 else torch.Size()
    rows = score.shape[len(samples) : -2].numel()
    tensors = (tensor.reshape(samples.numel(), rows, *tensor.shape[-2:]) for tensor in (weight, values))
    positions = (p.expand(*samples, *p.shape[-2:]).reshape(samples.numel(), *p.shape[-2:]) for p in (x, y))
    total = _clipped_sum(*tensors, *positions, reach).view(*score.shape[:-2], x.shape[-2], v.shape[-1])
    if not outside:
        return total
    if causal:
        total = F.pad(total, (0, 0, outside, 0))
    else:
        total = torch.cat((score[..., :outside, inner + 1, None] * values.sum(-2, keepdim=True), total), -2)
    return total + score[..., inner, None] * v[..., :outside, :].sum(-2, keepdim=True)


def _corner_weights(score: Tensor, reach: int, axes: int, causal: bool) -> Tensor:
    """Differences of scores ``[... (2R+1)^c]`` on every axis, float64; causal ones end with the bucket of offset zero.

    Buckets after that hold later keys alone. Without them, no later key lies below a corner whose weight is left.
    """
    inner, last = score.shape[-1], score.shape[-1] // 2 + 1 if causal else score.shape[-1]
    grid = F.pad(score[..., :last].double(), (0, inner - last)).unflatten(-1, (2 * reach + 1,) * axes)
    for axis in range(-axes, 0):
        grid = -torch.diff(grid, dim=axis, append=torch.zeros_like(grid.narrow(axis, 0, 1)))
    return grid.flatten(-axes)[..., :last]


class _Box:
    """The grid of one sample's key coordinates, each axis ranked, with a zeroth rank before all keys.

    `cell` ``[s]`` is the cell of each key; `corner` ``[t n]`` is the cell where the keys of each bucket of a query end.
    """

    def __init__(self, x: Tensor, y: Tensor, reach: int, buckets: int):
        cell, corner, shape = y.new_zeros(len(y), dtype=torch.int64), x.new_zeros(len(x), 1, dtype=torch.int64), []
        for query, key in zip(x.unbind(-1), y.unbind(-1), strict=True):
            coordinates, rank = key.unique(return_inverse=True)
            end = F.pad(torch.searchsorted(coordinates, _edges(query, reach)), (0, 1), value=len(coordinates))
            shape.append(len(coordinates) + 1)
            cell = cell * shape[-1] + rank + 1
            corner = (corner[..., None] * shape[-1] + end[:, None]).flatten(1)
        self.cell, self.corner, self.shape = cell, corner[:, :buckets].contiguous(), tuple(shape)
        if math.prod(self.shape) > SPREAD * (len(y) + 1024):
            raise ValueError(
                f"y: expected {len(y)} keys on a grid of at most {SPREAD * (len(y) + 1024)} cells, got one of {shape} "
                "distinct coordinates (and one before them); round them to a coarser grid, or use clipped_naive"
            )

    def prefix(self, v: Tensor) -> Tensor:
        """Sums, float64 ``[h cells e]``, of the values ``[h s e]`` up to each cell."""
        sums = v.new_zeros(len(v), math.prod(self.shape), v.shape[-1], dtype=torch.float64)
        sums.index_add_(1, self.cell, v.double())
        grid = sums.view(len(v), *self.shape, v.shape[-1])
        for axis in range(1, grid.ndim - 1):
            grid.cumsum_(axis)
        return sums

    def prefix_backward(self, grad: Tensor) -> Tensor:
        """VJP of `prefix`: a value is part of the sums of all cells from its cell on."""
        grid = grad.view(len(grad), *self.shape, grad.shape[-1])
        for axis in range(1, grid.ndim - 1):
            grid = grid.flip(axis).cumsum_(axis).flip(axis)
        return grid.reshape(grad.shape)[:, self.cell]

    def corners_by_cell(self) -> tuple[Tensor, Tensor]:
        """Indices of corners (in flattened `corner`) sorted by cell, and the first index of each cell."""
        cell, order = self.corner.flatten().sort(stable=True)
        return order, torch.searchsorted(cell, torch.arange(math.prod(self.shape), device=cell.device))


@torch.library.custom_op("isopos::clipped_sum", mutates_args=())
def _clipped_sum(weight: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int) -> Tensor:
    """Sums ``[b h t e]`` of samples with separate positions: weight ``[b h t n]`` of corners, v ``[b h s e]``."""
    out = v.new_empty(*weight.shape[:-1], v.shape[-1])
    for sample in range(len(v)):
        box = _Box(x[sample], y[sample], reach, weight.shape[-1])
        for head, sums in enumerate(box.prefix(v[sample])):
            out[sample, head] = F.embedding_bag(box.corner, sums, mode="sum", per_sample_weights=weight[sample, head])
    return out


@_clipped_sum.register_fake
def _(weight: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int) -> Tensor:
    return v.new_empty(*weight.shape[:-1], v.shape[-1])


@torch.library.custom_op("isopos::clipped_sum_backward", mutates_args=())
def _clipped_sum_backward(
    grad: Tensor, weight: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """Gradients of weight, one dot product per corner, and of v, by sums over the queries that read each cell."""
    corners, e = weight.shape[-1], v.shape[-1]
    block = max(1, BLOCK // max(1, corners * e))
    grad_weight, grad_v = weight.new_empty(weight.shape), v.new_empty(v.shape)
    for sample in range(len(v)):
        box = _Box(x[sample], y[sample], reach, corners)
        order, start = box.corners_by_cell()
        grad_sums = box.prefix(v[sample])  # read, then overwritten head by head
        for head, sums in enumerate(grad_sums):
            grad_output, weights = grad[sample, head].double(), weight[sample, head].flatten()[order]
            rows = zip(
                box.corner.split(block), grad_output.split(block), grad_weight[sample, head].split(block), strict=True
            )
            for cells, row, out in rows:
                torch.bmm(sums[cells], row[..., None], out=out[..., None])
            sums.copy_(F.embedding_bag(order // corners, grad_output, start, mode="sum", per_sample_weights=weights))
        grad_v[sample] = box.prefix_backward(grad_sums)
    return grad_weight, grad_v


@_clipped_sum_backward.register_fake
def _(grad: Tensor, weight: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), v.new_empty(v.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.reach = inputs[4]


def _clipped_sum_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_clipped_sum_backward(grad, *ctx.saved_tensors, ctx.reach), None, None, None


_clipped_sum.register_autograd(_clipped_sum_autograd, setup_context=_save_inputs)


def _check_positions(x: Tensor, y: Tensor, reach: int, outside: int) -> None:
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-1] or not x.shape[-1]:
        raise ValueError(
            f"x, y: expected positions [*b t c] and [*b s c] on the same axes, at least one, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}; a sequence has one axis, arange(t)[:, None]"
        )
    if reach < 1:
        raise ValueError(f"reach: expected at least 1, got {reach}; without a reach a term does not see positions")
    if not 0 <= outside <= min(x.shape[-2], y.shape[-2]):
        raise ValueError(
            f"outside: expected class tokens among {x.shape[-2]} queries and {y.shape[-2]} keys, got {outside}; "
            "they are the first rows of both"
        )


def _check(score: Tensor, v: Tensor, x: Tensor, y: Tensor, reach: int, outside: int) -> None:
    _check_positions(x, y, reach, outside)
    n = (2 * reach + 1) ** x.shape[-1] + (2 if outside else 0)
    if score.ndim < 3 or score.shape[-2:] != (x.shape[-2], n):
        raise ValueError(
            f"score: expected [*b h {x.shape[-2]} {n}], a column for each bucket of reach {reach} on {x.shape[-1]} axes "
            f"with {outside} class tokens, got {tuple(score.shape)}; as many queries as x has rows"
        )
    if v.shape[:-2] != score.shape[:-2] or v.shape[-2] != y.shape[-2]:
        raise ValueError(
            f"v: expected {[*score.shape[:-2], y.shape[-2], 'e']}, got {tuple(v.shape)}; batch and heads of score, as many "
            "keys as y has rows"
        )
    for name, position in (("x", x), ("y", y)):
        leading, batch = position.shape[:-2], score.shape[:-3]
        pairs = zip(reversed(leading), reversed(batch), strict=False)
        if len(leading) > len(batch) or any(a not in (1, b) for a, b in pairs):
            raise ValueError(
                f"{name}: expected positions of the batch {tuple(batch)} or for all of it, got {tuple(position.shape)}; "
                "heads share positions"
            )


def _check_causal(x: Tensor, y: Tensor, outside: int) -> None:
    """ValueError unless positions, without class tokens, follow the rules of `causal`."""
    t, s = x.shape[-2], y.shape[-2]
    if x.is_floating_point():
        raise ValueError(
            "causal: expected integer positions, got real ones; a bucket around zero would hold keys before and after the "
            "query; scale positions to integers"
        )
    if t > s or outside > 1 or (outside and t != s):
        raise ValueError(
            f"causal: expected at most one class token, and with it as many queries as keys, otherwise no more queries than "
            f"keys, got {outside} class tokens, {t} other queries and {s} other keys; use clipped_naive"
        )
    if x.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return
    step = torch.zeros_like(y[..., 1:, 0])
    for axis in y.diff(dim=-2).sign().flip(-1).unbind(-1):
        step = torch.where(axis != 0, axis, step)
    if not (step > 0).all():
        raise ValueError(
            "causal: expected keys in strictly ascending lexicographic order of positions, got another order or one "
            "position twice; sort tokens by position, a grid row by row, and give segment_ids to packed samples"
        )
    if not (x == y[..., s - t :, :]).all():
        raise ValueError("causal: expected queries at the positions of the last keys, got others; align them at the end")
