"""Sums over windows: a query's own key and the nearest ones, at a cost that does not grow with the window.

Tokens are cut into blocks as long as the window. The window of a query is then the first part of its own block and the last
part of the block before it, and both are sums that scan: from the first key of the block to the query, and from the last key
of the block before to the first one in the window. So no sum is a difference of two, which would lose digits and could
vanish. Without causal the first part of the block after joins them. (Van Herk 1992 and Gil and Werman 1993 take running
maxima so.)
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import cast_down
from isopos.ops.linear.division import divide
from isopos.ops.linear.features import ALL_READY, Decays, Sums
from isopos.ops.linear.graph import aligned
from isopos.ops.linear.isolation import looks
from isopos.ops.linear.step import weighed

__all__ = ["windowed", "within"]


def windowed(sums: Sums, window: int, linear: Callable[[Sums], Tensor]) -> Tensor:
    """Sums over the keys less than a window away from the query, and up to it if causal; with a graph.

    `linear` sums up blocks, which are heads to it.
    """
    total = within(sums.triples(), sums.g, sums.causal, window, linear)
    return divide(total) if sums.denominator == "divide" else total


def within(
    triples: Sequence[Sequence[Tensor]], g: Decays, causal: bool, window: int, linear: Callable[[Sums], Tensor]
) -> Tensor:
    """The same of features and values that are made, side by side, undivided."""
    t = triples[0][0].shape[-2]
    operands, g = aligned(triples, g)
    totals = [_total(*_blocks(own, g, window), causal, linear) for own in operands]
    return torch.cat(totals, -1).flatten(-3, -2)[..., -t:, :]


def _blocks(operands: Sequence[Tensor], g: Decays, window: int) -> tuple[Tensor, Tensor, Tensor, Decays]:
    """Tokens by blocks ``[*b h n w .]``; rows of zeros come before the first ones."""
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
    own = linear(Sums(q, k, v, ALL_READY, g, causal))
    if q.shape[-3] == 1:
        return own
    earlier, later = slice(None, -1), slice(1, None)
    before = _beside(q, k, v, g, later, earlier, -1, linear)
    own = own + F.pad(before, (0, 0, 0, 0, 1, 0))
    if causal:
        return own
    return own + F.pad(_beside(q, k, v, g, earlier, later, 0, linear), (0, 0, 0, 0, 0, 1))


def _beside(
    q: Tensor, k: Tensor, v: Tensor, g: Decays, rows: slice, columns: slice, border: int, linear: Callable[[Sums], Tensor]
) -> Tensor:
    """Sums of queries over the keys in the next block that are less than a window away, from its border on.

    That block's key at `border` is the nearest. Of the block before, these are keys of later places in it than the query's;
    of the block after, of earlier ones. A decay is a factor of the query and one of the key, as far as the border.
    """
    q, k, v, of_q = q[..., rows, :, :], k[..., columns, :, :], v[..., columns, :, :], None
    if g is not None:
        g_q, g_k = g[0][..., rows, :], g[1][..., columns, :]
        edge = g_k[..., border, None]
        of_q, of_k = (cast_down((-(x - edge).abs()).exp(), q.dtype, q.device)[..., None] for x in (g_q, g_k))
        q, k, v = weighed(q, of_q), weighed(k, of_k), torch.where(of_k == 0, 0, v)
    if border:
        q, k, v = (x.flip(-2) for x in (q, k, v))
    k, v = (F.pad(x[..., :-1, :], (0, 0, 1, 0)) for x in (k, v))  # a query does not see the key of its own place
    total = linear(Sums(q, k, v, ALL_READY, None, True))
    total = total.flip(-2) if border else total
    if of_q is None or (looks(of_q) and bool((of_q != 0).all())):
        return total
    return torch.where(of_q == 0, 0, total)  # zero times what the border holds
