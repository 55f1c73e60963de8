"""Sums over windows of the nearest keys, at a cost that does not grow with the window.

Tokens are cut into blocks as long as the window. The window of a query consists of the first part of its block and the last
part of the block before. Both sums are scans: from the first key of the block to the query, and from the last key of the
block before down to the first key in the window. No sum is a difference of two sums, which would lose digits. Without
`causal` the first part of the next block is added. (Van Herk 1992 and Gil and Werman 1993 compute running maxima this way.)
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import cast_down, is_exporting
from isopos.ops.linear.containment import may_inspect, with_finite_gradient
from isopos.ops.linear.division import divide
from isopos.ops.linear.features import ALL_READY, Decays, Sums
from isopos.ops.linear.graph import aligned
from isopos.ops.linear.step import weighed


def windowed(sums: Sums, window: int, linear: Callable[[Sums], Tensor]) -> Tensor:
    """Sums over keys at a distance less than `window`, with a graph; if causal, only over keys up to the query.

    `linear` computes sums of blocks, which it takes as heads.
    """
    total = within(sums.triples(), sums.g, sums.causal, window, linear)
    return divide(with_finite_gradient(total)) if sums.denominator == "divide" else total


def within(
    triples: Sequence[Sequence[Tensor]], g: Decays, causal: bool, window: int, linear: Callable[[Sums], Tensor]
) -> Tensor:
    """The same for computed features and values: sums ``[*b h t .]`` of all triples, concatenated, not divided."""
    t = triples[0][0].shape[-2]
    operands, g = aligned(triples, g)
    totals = [_total(*_blocks(each, g, window), causal, linear) for each in operands]
    return torch.cat(totals, -1).flatten(-3, -2)[..., -t:, :]


def _blocks(operands: Sequence[Tensor], g: Decays, window: int) -> tuple[Tensor, Tensor, Tensor, Decays]:
    """Tokens as blocks ``[*b h n w .]``, padded with zeros at the start."""
    count = (operands[0].shape[-2] + window - 1) // window
    missing = count * window - operands[0].shape[-2]
    q, k, v = (F.pad(x, (0, 0, missing, 0)).unflatten(-2, (count, window)) for x in operands)
    if g is not None:
        first = g[1][..., :1]
        g_q, g_k = (torch.cat((first.expand(*x.shape[:-1], missing), x), -1).unflatten(-1, (count, window)) for x in g)
        g = g_q, g_k
    return q, k, v, g


def _total(q: Tensor, k: Tensor, v: Tensor, g: Decays, causal: bool, linear: Callable[[Sums], Tensor]) -> Tensor:
    """Sums of blocks ``[*b h n w e]``."""
    total = linear(Sums(q, k, v, ALL_READY, g, causal))
    if not is_exporting() and q.shape[-3] == 1:  # a program has one way for all numbers of blocks
        return total
    earlier, later = slice(None, -1), slice(1, None)
    before = _neighbour(q, k, v, g, later, earlier, -1, linear)
    total = total + F.pad(before, (0, 0, 0, 0, 1, 0))
    if causal:
        return total
    return total + F.pad(_neighbour(q, k, v, g, earlier, later, 0, linear), (0, 0, 0, 0, 0, 1))


def _neighbour(
    q: Tensor, k: Tensor, v: Tensor, g: Decays, rows: slice, columns: slice, border: int, linear: Callable[[Sums], Tensor]
) -> Tensor:
    """Sums of queries over keys of the neighbouring block at a distance less than the window.

    `border` is the index of the nearest key in that block: -1 in the block before, 0 in the block after. A decay is split
    at the border into a factor of the query and a factor of the key.
    """
    q, k, v, of_q = q[..., rows, :, :], k[..., columns, :, :], v[..., columns, :, :], None
    if g is not None:
        g_q, g_k = g[0][..., rows, :], g[1][..., columns, :]
        edge = g_k[..., border, None]
        of_q, of_k = (cast_down((-(x - edge).abs()).exp(), q.dtype, q.device)[..., None] for x in (g_q, g_k))
        q, k, v = weighed(q, of_q), weighed(k, of_k), torch.where(of_k == 0, 0, v)
    if border:
        q, k, v = (x.flip(-2) for x in (q, k, v))
    k, v = (F.pad(x[..., :-1, :], (0, 0, 1, 0)) for x in (k, v))  # a query does not see the key with its index
    total = linear(Sums(q, k, v, ALL_READY, None, True))
    total = total.flip(-2) if border else total
    if of_q is None or (may_inspect(of_q) and bool((of_q != 0).all())):
        return total
    return torch.where(of_q == 0, 0, total)  # weight 0 gives 0, even for NaN
