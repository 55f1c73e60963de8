"""Packed sequences in linear attention: from one to the next log decays fall so far that no weight is left."""

import torch

from isopos.attention.problem import Problem
from isopos.exact import broadcast, wide_device

JUMP = 1000.0  # of a log decay between segments: exp(-1000) is zero in every dtype


def segmented(problem: Problem) -> Problem:
    """The problem with log decays that fall by a jump from segment to segment, and that of the token before: zero.

    Within a segment differences are those of the given decay. Queries are aligned with the last keys.
    """
    q, state = problem.q, problem.state
    if problem.segments is None or problem.empty:
        return problem
    ids = problem.segments[1]
    t, s = q.shape[-2], problem.k.shape[-2]
    previous = state["segment"] if state is not None else None
    previous = ids[..., :1] if previous is None else previous[..., None]
    leading = broadcast(previous.shape[:-1], ids.shape[:-1])
    ids = ids.expand(*leading, s)
    still = torch.zeros(max(t, s), dtype=torch.float64, device=wide_device(q.device))
    new = (ids != torch.cat((previous.expand(*leading, 1), ids[..., :-1]), -1)).to(still.device)
    query, key = problem.decay or (still[:t], still[:s])
    before = key[..., :1] if problem.before is None else problem.before[..., None]
    first, steps = key[..., :1] - before, key.diff(dim=-1)
    step = torch.cat((first, steps.expand(*first.shape[:-1], s - 1)), -1)
    if not torch.compiler.is_compiling() and ids.device.type == "cpu":
        distinct = (ids.sort(-1).values.diff(dim=-1) != 0).sum(-1)
        if (new[..., 1:].sum(-1) > distinct).any():
            raise ValueError("segment_ids: expected tokens of one id next to each other, got an id that returns")
        if (torch.where(new.unsqueeze(-2), 0, step) > 0).any():
            raise ValueError("decay: expected log decays that do not increase along a segment; sort tokens by position")
    of_keys = torch.where(new.unsqueeze(-2), -JUMP, step).cumsum(-1)
    of_queries = of_keys[..., s - t :] + (query - key[..., s - t :])
    return problem._replace(g=(of_queries, of_keys), before=torch.zeros_like(of_keys[..., -1]))
