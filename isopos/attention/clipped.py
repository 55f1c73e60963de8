"""Clipped relative terms in linear attention: their parts of the sums for whole, packed and streamed sequences."""

from itertools import pairwise

import torch
from torch import Tensor

from isopos.attention.problem import LinearProblem
from isopos.exact import appended, broadcast
from isopos.feature_maps import sides
from isopos.ops import clipped
from isopos.ops.linear.containment import with_finite_rows
from isopos.ops.linear.features import with_ones
from isopos.state import State
from isopos.terms import Clipped


def values_of_terms(problem: LinearProblem) -> Tensor:
    """Values, with a column of ones if there is a denominator; zero for masked keys."""
    v, mask = problem.v.to(torch.promote_types(problem.v.dtype, torch.float32)), problem.mask_of_keys
    if problem.denominator is not None:
        return with_ones(v, mask)
    return v if mask is None else torch.where(mask, v, 0)


def with_terms(total: Tensor, problem: LinearProblem) -> Tensor:
    """Sums and denominators ``[*b h t e+1]``, NaN where a row sees one, plus the sums of all clipped terms."""
    values = with_finite_rows(values_of_terms(problem)) if problem.terms else total
    for term in _terms(problem):
        score = with_finite_rows(scores_of(problem, term))
        if problem.segments is not None:
            total = total + _packed(score, values, term, problem.segments[1], problem.causal)
            continue
        total = total + clipped.clipped(
            score, values, term.x, term.y, term.reach, outside=term.outside, causal=problem.causal
        )
    return total


def with_terms_of_stream(
    total: Tensor, values: Tensor, problem: LinearProblem, state: State
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same for the next tokens of a stream; and the state of the terms: near keys, and the sum of far ones."""
    near, past, far = state["near"], state["places"], state["far"]
    reach = max((term.reach for term in _terms(problem)), default=0)  # the state keeps the keys near for any term
    after: dict[str, Tensor] = {}
    for term in _terms(problem):
        if term.x.shape[-1] > 1 or term.outside:
            raise ValueError(
                "state: expected clipped terms of a sequence without class tokens, whose far keys share one sum"
            )
        rows, positions = values, term.y
        if near is not None and past is not None:
            rows, positions = appended(near, rows), appended(past, positions)
        score = scores_of(problem, term)
        batch = broadcast(score.shape[:-2], rows.shape[:-2])
        expanded, score = rows.expand(*batch, *rows.shape[-2:]), score.expand(*batch, *score.shape[-2:])
        added = clipped.clipped(score, expanded, term.x, positions, term.reach, causal=True)
        total = total + (added if far is None else added + score[..., :1] * far.unsqueeze(-2))
        gone = rows[..., : max(0, rows.shape[-2] - reach), :].sum(-2)
        after = {"near": rows[..., -reach:, :].clone(), "places": positions[..., -reach:, :].clone()}
        after["far"] = gone if far is None else far + gone
    return total, after


def _terms(problem: LinearProblem) -> list[Clipped]:
    return [term for term in problem.terms if isinstance(term, Clipped)]  # checked: no others


def scores_of(problem: LinearProblem, term: Clipped) -> Tensor:
    """<phi(q), phi(row)> for each row of a clipped term's table: ``[*b h t n]``."""
    phi_q, phi_k = sides(problem.phi)
    q = problem.q.to(torch.promote_types(problem.q.dtype, torch.float32))
    return phi_q(q) @ phi_k(term.table.to(q.dtype)).mT


def _packed(score: Tensor, values: Tensor, term: Clipped, ids: Tensor, causal: bool) -> Tensor:
    """Sums within each segment, without far keys of other segments. Samples are processed one by one."""
    if torch.compiler.is_compiling():
        raise ValueError("segment_ids: expected none with clipped terms under a compiler, which cannot read their borders")
    *samples, heads, t, s = *score.shape[:-1], values.shape[-2]
    rows = [a.reshape(-1, heads, *a.shape[-2:]) for a in (score, values)]
    positions = [a.expand(*samples, *a.shape[-2:]).reshape(-1, *a.shape[-2:]) for a in (term.x, term.y)]
    out = []
    for *sample, segments in zip(*rows, *positions, ids.expand(*samples, s).reshape(-1, s), strict=True):
        borders = [0, *((segments.diff() != 0).nonzero()[:, 0] + 1).tolist(), s]
        for keys in pairwise(borders):
            queries = slice(*(max(0, border - (s - t)) for border in keys))
            scores, gathered, x, y = (a[..., part, :] for a, part in zip(sample, (queries, slice(*keys)) * 2, strict=True))
            out.append(clipped.clipped(scores, gathered, x, y, term.reach, causal=causal))
    return torch.cat(out, -2).unflatten(-2, (-1, t)).movedim(-3, 0).reshape(*samples, heads, t, -1)
