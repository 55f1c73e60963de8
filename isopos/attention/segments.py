"""Packed sequences in linear attention: the log decay drops so far between segments that their weights are zero."""

import torch
from torch import Tensor

from isopos.attention.checks import is_readable
from isopos.exact import broadcast, float64_device
from isopos.ops.linear.features import Decays

JUMP = 1000.0  # drop of the log decay between segments: exp(-1000) is zero in every dtype


def segmented(
    ids: Tensor, previous: Tensor | None, decay: Decays, before: Tensor | None, t: int, *, marked: bool = False
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Log decays of t queries and of keys, with a jump between segments; and the log decay of the previous token: zero.

    Within a segment, differences equal differences of `decay`. Queries are aligned with the last keys.

    Args:
        ids: Segment ids of keys ``[*b s]``.
        previous: Id of the previous token ``[*b]``, in a stream.
        decay: Log decays of queries and keys, or None.
        before: Log decay of the previous token ``[*b h]``.
        t: Number of queries.
        marked: Return infinity instead of an error, by which all processes of a group refuse.
    """
    s = ids.shape[-1]
    previous = ids[..., :1] if previous is None else previous[..., None]
    leading = broadcast(previous.shape[:-1], ids.shape[:-1])
    ids = ids.expand(*leading, s)
    new = (ids != torch.cat((previous.expand(*leading, 1), ids[..., :-1]), -1)).to(float64_device(ids.device))
    look, wrong = is_readable(ids), ""
    if look and returns(ids):
        wrong = "segment_ids: expected tokens of one id next to each other, got an id that returns"
    new = new.unsqueeze(-2)
    if decay is None:
        of_keys = new.to(torch.float64).mul_(-JUMP).cumsum(-1)
        of_queries = of_keys if t == s else of_keys[..., s - t :]
    else:
        query, key = decay
        start = key[..., :1] if before is None else before[..., None]
        first, steps = key[..., :1] - start, key.diff(dim=-1)
        step = torch.cat((first, steps.expand(*first.shape[:-1], s - 1)), -1)
        if look and not wrong and (torch.where(new, 0, step) > 0).any():
            wrong = "decay: expected log decays that do not increase along a segment; sort tokens by position"
        of_keys = torch.where(new, -JUMP, step).cumsum(-1)
        of_queries = of_keys[..., s - t :] + (query - key[..., s - t :])
    if wrong:
        if not marked:
            raise ValueError(wrong)
        of_queries, of_keys = torch.full_like(of_queries, torch.inf), torch.full_like(of_keys, torch.inf)
    return (of_queries, of_keys), torch.zeros_like(of_keys[..., -1])


def returns(ids: Tensor) -> bool:
    """Whether an id ``[*b s]`` recurs after another one. Ids usually increase, which is fast."""
    if not (ids[..., 1:] < ids[..., :-1]).any():
        return False
    distinct = (ids.sort(-1).values.diff(dim=-1) != 0).sum(-1)
    return bool(((ids[..., 1:] != ids[..., :-1]).sum(-1) > distinct).any())
