"""Attention of one sequence over the processes of a group, and what the shards exchange.

Linear attention needs sums of constant size. Shard r has g_i at its queries and sends, for its keys,

    S_r = sum_j exp(E_r - g_j) k_j v_j^T,    E_r = g of its last key,

and total_i = (the sum over local keys) + exp(g_i - f) q_i sum_{s < r} exp(f - E_s) S_s, where f is g of its first query.
Without `causal` later shards enter in the same way, from the other end. One collective gathers all S and E while the sums
over local keys run. Windows, relative terms and softmax attention fetch the keys that their queries see.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.attention.clipped import scores_of, values_of_terms, with_terms
from isopos.attention.pairs import with_keys
from isopos.attention.problem import LinearProblem, Problem, SoftmaxProblem
from isopos.attention.segments import JUMP, returns
from isopos.exact import broadcast, cast_down
from isopos.maps import Identity
from isopos.ops import clipped, linear
from isopos.ops.linear.containment import times, with_finite_rows
from isopos.ops.linear.features import ALL_READY, Decays, Sums
from isopos.ops.linear.step import weighed
from isopos.ops.linear.window import within
from isopos.parallel import Shards
from isopos.terms import Clipped


def totals(sums: Sums, problem: LinearProblem) -> Tensor:
    """Sums of a shard's queries over the keys of all shards, before division by the denominator."""
    shards = problem.shards
    assert shards is not None
    triples = sums.triples()
    g = sums.g if problem.segments is None else _joined_segments(problem, shards)
    if problem.window is not None:
        return _windowed(triples, g, problem, shards)
    if g is None and not problem.causal:
        states = shards.add(*(k.mT @ v for _, k, v in triples)).wait()
        total = torch.cat([times(q, state) for (q, _, _), state in zip(triples, states, strict=True)], -1)
    else:
        total = _carried(triples, g, problem.causal, shards)
    return _with_terms(total, problem, shards) if problem.terms else total


def _carried(triples: Sequence[tuple[Tensor, Tensor, Tensor]], g: Decays, causal: bool, shards: Shards) -> Tensor:
    """Sums of a shard's queries over local keys, over earlier shards and, without `causal`, over later ones."""
    directions = (False,) if causal else (False, True)
    sent = [] if g is None else [g[1][..., 0], g[1][..., -1]]
    sent += [_state(k, v, g, after) for after in directions for _, k, v in triples]
    pending = shards.gather(*sent)
    sums = []
    for q, k, v in triples:
        batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
        sums.append(linear.linear(Sums(q, k, v, ALL_READY, g, causal)))
    gathered = pending.wait()
    edges = None
    if g is not None:
        (first, last), gathered = gathered[:2], gathered[2:]
        _check_order(first, last)
        edges = first, last
    count = len(triples)
    for n, after in enumerate(directions):
        states = gathered[n * count : (n + 1) * count]
        far = [_far(q, state, g, edges, after, shards.rank) for (q, _, _), state in zip(triples, states, strict=True)]
        sums = [total + more for total, more in zip(sums, far, strict=True)]
    return torch.cat(sums, -1)


def _state(k: Tensor, v: Tensor, g: Decays, after: bool) -> Tensor:
    """Decayed sum of k v^T over a shard ``[*b h d e]``, at its last key; at its first key with `after`."""
    if g is None:
        return k.mT @ v
    exponent = g[1] - g[1][..., :1] if after else g[1][..., -1:] - g[1]
    weight = cast_down(exponent.exp(), k.dtype, k.device)[..., None]
    return weighed(k, weight).mT @ torch.where(weight == 0, 0, v)


def _far(q: Tensor, states: Tensor, g: Decays, edges: Decays, after: bool, rank: int) -> Tensor:
    """Sums of queries over earlier shards, or with `after` over later ones, from the states of all ``[size *b h d e]``."""
    index = torch.arange(len(states), device=q.device)
    counted = (index > rank if after else index < rank).view(-1, *(1,) * (states.ndim - 1))
    if g is None or edges is None:
        return times(q, torch.where(counted, states, 0).sum(0))
    border = g[0][..., -1] if after else g[0][..., 0]
    edge = edges[0] if after else edges[1]
    edge = edge.view(-1, *(1,) * (states.ndim - 2 - edge.ndim), *edge.shape[1:])
    exponents = edge - border if after else border - edge
    weight = exponents.masked_fill(~counted[..., 0, 0].to(edge.device), -torch.inf).exp()
    state = weighed(states, cast_down(weight, q.dtype, q.device)[..., None, None]).sum(0)
    exponent = border[..., None] - g[0] if after else g[0] - border[..., None]
    factor = cast_down(exponent.exp(), q.dtype, q.device)[..., None]
    return torch.where(factor == 0, 0, times(q * factor, state))


def _check_order(first: Tensor, last: Tensor) -> None:
    """Raise ValueError in all processes if log decays increase in a shard, which marks it, or from one to the next."""
    if first.device.type == "cpu" and bool((last == torch.inf).any()):
        raise ValueError(
            "decay: expected log decays that do not increase along tokens, got a shard in which they do or are -inf"
        )
    if first.device.type == "cpu" and bool((first[1:] > last[:-1]).any()):
        raise ValueError("decay: expected log decays that do not increase from shard to shard; sort tokens by position")


def _joined_segments(problem: LinearProblem, shards: Shards) -> Decays:
    """Log decays with jumps between segments, added up over all previous shards."""
    assert problem.g is not None
    assert problem.segments is not None
    g = problem.g[1]
    ids = problem.segments[1].expand(*g.shape[:-2], -1)
    raw = g if problem.decay is None else problem.decay[1].expand(g.shape)
    sent = ids[..., 0], ids[..., -1], g[..., -1], raw[..., 0], raw[..., -1]
    first, last, drop, start, stop = shards.gather(*sent).wait()
    if drop.device.type == "cpu" and bool((drop == torch.inf).any()):
        raise ValueError(
            "segment_ids: expected tokens of one id next to each other, and log decays that do not increase in a segment, "
            "got a shard with others"
        )
    if first.device.type == "cpu" and returns(torch.stack((first, last), -1).movedim(0, -2).flatten(-2)):
        raise ValueError(
            "segment_ids: expected tokens of one id next to each other, got an id that returns in a later shard"
        )
    step = torch.zeros_like(start[1:]) if problem.decay is None else start[1:] - stop[:-1]
    new = (first[1:] != last[:-1]).unsqueeze(-1).to(step.device)
    border = torch.where(new, -JUMP, step)
    offset = drop[: shards.rank].sum(0) + border[: shards.rank].sum(0)
    return problem.g[0] + offset[..., None], problem.g[1] + offset[..., None]


def _windowed(triples: Sequence[tuple[Tensor, Tensor, Tensor]], g: Decays, problem: LinearProblem, shards: Shards) -> Tensor:
    """Sums over windows, which may reach keys of other shards."""
    window = problem.window
    assert window is not None
    keys = [x for _, k, v in triples for x in (k, v)]
    decays = [] if g is None else [g[1]]
    edges = None if g is None else shards.gather(g[1][..., 0], g[1][..., -1])
    fetched = shards.tokens([*keys, *decays], [-2] * len(keys) + [-1] * len(decays), _halo(window, problem.causal)).wait()
    after = _after(window, problem.causal, shards)
    if g is not None and edges is not None:
        _check_order(*edges.wait())
        of_keys = fetched[-1]
        of_queries = g[0].expand(*broadcast(g[0].shape[:-1], of_keys.shape[:-1]), -1)
        later = of_keys[..., of_keys.shape[-1] - after :]  # of queries after the shard, which are not returned
        g = torch.cat((of_queries, later.expand(*of_queries.shape[:-1], after)), -1), of_keys
    padded = [(F.pad(q, (0, 0, 0, after)), *fetched[2 * n : 2 * n + 2]) for n, (q, _, _) in enumerate(triples)]
    leading = [broadcast(*(x.shape[:-2] for x in triple)) for triple in padded]
    padded = [[x.expand(*axes, *x.shape[-2:]) for x in triple] for triple, axes in zip(padded, leading, strict=True)]
    total = within(padded, g, problem.causal, window, linear.linear)
    return total[..., : problem.q.shape[-2], :]


def _halo(window: int | None, causal: bool) -> Callable[[int, int], tuple[int, int]]:
    """A function from the first index and last index + 1 of queries to those of the keys that they see."""
    if window is None:
        return lambda start, stop: (0, stop if causal else 1 << 62)
    return lambda start, stop: (start - window + 1, stop if causal else stop + window - 1)


def _after(window: int, causal: bool, shards: Shards) -> int:
    """Number of keys after this shard that its queries see."""
    return 0 if causal else min(window - 1, shards.total - shards.start - shards.count)


def _with_terms(total: Tensor, problem: LinearProblem, shards: Shards) -> Tensor:
    """Sums and denominators plus the sums of clipped terms."""
    for term in problem.terms:
        assert isinstance(term, Clipped)
        near = problem.causal and term.x.shape[-1] == 1 and not term.outside and problem.segments is None
        total = _with_near(total, problem, term, shards) if near else _with_all(total, problem, term, shards)
    return total


def _with_near(total: Tensor, problem: LinearProblem, term: Clipped, shards: Shards) -> Tensor:
    """Add a clipped term of a causal sequence: keys within its reach are fetched, earlier ones enter as one sum."""
    values = with_finite_rows(values_of_terms(problem))  # the total is NaN where a row sees one
    sums = shards.gather(values.to(torch.float64).sum(-2))
    near, positions = shards.tokens([values, term.y], [-2, -2], lambda start, stop: (start - term.reach, start)).wait()
    score = with_finite_rows(scores_of(problem, term))
    batch = broadcast(score.shape[:-2], values.shape[:-2])
    rows = torch.cat((near, values), -2).expand(*batch, -1, -1)
    score = score.expand(*batch, -1, -1)
    added = clipped.clipped(score, rows, term.x, torch.cat((positions, term.y), -2), term.reach, causal=True)
    far = sums.wait()[0][: shards.rank].sum(0) - near.to(torch.float64).sum(-2)
    return total + added + score[..., :1] * far.to(values.dtype).unsqueeze(-2)


def _with_all(total: Tensor, problem: LinearProblem, term: Clipped, shards: Shards) -> Tensor:
    """Add any clipped term: values and positions of all shards are fetched, and queries are padded to the whole sequence."""
    fetched = _fetched(problem, {"v": (problem.v, -2), "y": (term.y, -2)}, shards, None, problem.causal)
    fetched["v"] = fetched["v"].expand(*problem.batch, *fetched["v"].shape[-2:])  # of all heads of the scores
    y, start, stop = fetched.pop("y"), shards.start, shards.start + shards.count
    x = torch.cat((y[..., :start, :], term.x.expand(*y.shape[:-2], -1, -1), y[..., stop:, :]), -2)
    rows = (0, 0, start, y.shape[-2] - stop)
    whole = replace(problem, q=F.pad(problem.q, rows), terms=(replace(term, x=x, y=y),), **fetched)
    return with_terms(F.pad(total, rows), whole)[..., start:stop, :]


def softmax_problem(problem: SoftmaxProblem) -> SoftmaxProblem:
    """The problem of a shard's queries and all keys that they see.

    With terms, locality or attn_mask it has the keys of all shards. Otherwise queries may be padded with zeros, so that the
    last query is aligned with the last key.
    """
    shards, t = problem.shards, problem.q.shape[-2]
    assert shards is not None
    pairs = bool(problem.terms) or problem.locality is not None or problem.attn_mask is not None
    window, causal = (None, False) if pairs else (problem.window, problem.causal)
    tensors = {"k": (problem.rho_k(problem.k), -2), "v": (problem.v, -2)}
    if any(term.side == "key" for term in problem.terms):
        tensors["raw"] = problem.k, -2  # terms see keys as they are
    fields = _fetched(problem, tensors, shards, window, causal)
    problem = with_keys(problem, fields.pop("raw")) if "raw" in fields else problem
    if pairs:
        fields |= {"attn_mask": _allowed(problem, shards), "window": None, "causal": False}
    elif window is not None and (after := _after(window, causal, shards)):
        fields |= {"q": F.pad(problem.rho_q(problem.q), (0, 0, 0, after)), "rho_q": Identity()}
        for name in ("decay", "segments"):
            if name in fields:
                of_queries = fields[name][0][..., -t:]
                last = of_queries[..., -1:].expand(*of_queries.shape[:-1], after)
                fields[name] = torch.cat((of_queries, last), -1), fields[name][1]
    return replace(problem, rho_k=Identity(), shards=None, **fields)


def _fetched(
    problem: Problem, tensors: dict[str, tuple[Tensor, int]], shards: Shards, window: int | None, causal: bool
) -> dict[str, Any]:
    """Fields of a problem for all keys that its queries see: `tensors` with their axes, mask, decay and segments."""
    sent = dict(tensors)
    pairs = {"decay": problem.decay, "segments": problem.segments}
    sent |= {name: (pair[1], -1) for name, pair in pairs.items() if pair is not None}
    if problem.mask is not None:
        sent["mask"] = problem.mask, -1
    rows, axes = zip(*sent.values(), strict=True)
    fields: dict[str, Any] = dict(zip(sent, shards.tokens(rows, axes, _halo(window, causal)).wait(), strict=True))
    return fields | {name: (pair[0], fields[name]) for name, pair in pairs.items() if pair is not None}


def _allowed(problem: SoftmaxProblem, shards: Shards) -> Tensor:
    """The attn_mask ``[*b h t s]`` of a shard's queries and all keys, with `causal` and the window."""
    index = torch.arange(shards.total, device=problem.q.device)
    offset = index - index[shards.start : shards.start + problem.q.shape[-2], None]
    allowed = torch.ones_like(offset, dtype=torch.bool)
    allowed = allowed if not problem.causal else allowed & (offset <= 0)
    allowed = allowed if problem.window is None else allowed & (offset.abs() < problem.window)
    added = problem.attn_mask
    if added is None:
        return allowed
    return allowed & added if added.dtype == torch.bool else added.masked_fill(~allowed, -torch.inf)
