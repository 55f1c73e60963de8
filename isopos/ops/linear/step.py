"""Streams: causal sums of the next tokens, and the sums that come after them."""

from collections.abc import Callable

import torch
from torch import Tensor

from isopos.exact import broadcast, cast_down
from isopos.ops.linear.division import divide
from isopos.ops.linear.features import ALL_READY, Decays, Stream, Sums, with_ones


def carry(sums: Sums, linear: Callable[[Sums], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums of the next tokens of a stream, of any number of them, with a graph; and those of all tokens, for the next.

    `linear` sums up the tokens alone.
    """
    stream = sums.stream
    assert stream is not None
    queries, keys, values = sums.made()
    if sums.denominator is not None:
        values = with_ones(values, sums.features[2].mask)
    parts = [values] if len(queries) == 1 else values.split((values.shape[-1] - 1, 1), -1)
    totals, after = [], []
    for n, operands in enumerate(zip(queries, keys, parts, strict=True)):
        total, own = _carried(*operands, sums.g, stream, stream.sums[n] if stream.sums else None, linear)
        totals.append(total)
        after.append(own)
    total = torch.cat(totals, -1)
    return divide(total) if sums.denominator == "divide" else total, tuple(after)


def _carried(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Decays,
    stream: Stream,
    state: Tensor | None,
    linear: Callable[[Sums], Tensor],
) -> tuple[Tensor, Tensor]:
    """Causal sums ``[*b h t e]`` of features, and the sum of k v^T over all tokens so far ``[*b h d e]``.

    The state is that sum at the log decay ``[*b h]`` of the last token before. Together with it, the sums are those of the
    whole sequence; k and v may lack leading axes of q, which share their state.
    """
    to_end = across = from_end = from_start = None  # of keys, of the state, of queries after one token, of queries
    if g is not None:
        query, key = g
        last = key[..., -1:]
        start = last if stream.before is None else stream.before[..., None]
        exponents = last - key, last - start, query - last, query - start
        to_end, across, from_end, from_start = (cast_down(x.exp(), k.dtype, k.device)[..., None] for x in exponents)
    if q.shape[-2] == 1:
        if state is None:
            after = k.mT @ v
        elif stream.in_place:
            after = state.copy_(weighed(state, across)).addcmul_(k.mT, v)
        else:
            after = torch.addcmul(weighed(state, across), k.mT, v)
        return (q if from_end is None else q * from_end) @ after, after
    after = weighed(k, to_end).mT @ (v if to_end is None else torch.where(to_end == 0, 0, v))
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    queries, keys, values = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    total = linear(Sums(queries, keys, values, ALL_READY, g))
    if state is None:
        return total, after
    far = q @ state if from_start is None else torch.where(from_start == 0, 0, (q * from_start) @ state)
    return total + far, after + weighed(state, across)


def weighed(x: Tensor, weight: Tensor | None) -> Tensor:
    """x times weights; what weighs nothing is zero whatever it holds."""
    return x if weight is None else torch.where(weight == 0, 0, x * weight)
