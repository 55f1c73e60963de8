"""Softmax attention through PyTorch's flex attention, which computes scores tile by tile and does not store them.

Added scores and masks are functions of a head, a query and a key that read tensors of the tokens: log decays, positions,
masks, segment ids, and tables of terms. Gradients reach these tensors.
"""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from isopos.attention.pairs import log_weights
from isopos.attention.problem import SoftmaxProblem
from isopos.exact import full_precision
from isopos.ops import gpu
from isopos.terms import DistanceKernel, Numbers, Term

Pair = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # arguments: sample, head, query, key
LEAST = 16  # smallest number of features for its kernels
COMPILERS = ("torch._inductor", "torch._dynamo", "triton")  # modules of errors due to shapes or the GPU, not to the caller


def attended(problem: SoftmaxProblem) -> Tensor | None:
    """`isopos.attention.softmax_attention` through flex attention; None if it does not serve.

    It is tried if GPU kernels are requested (`isopos.ops.gpu`). Where it does not serve, or its compiler fails, it warns.
    """
    if torch.compiler.is_compiling() or gpu.unreadable("flex attention", problem.q, problem.k, problem.v):
        return None
    if why := refuses(problem):
        warnings.warn(f"softmax_attention: all scores are formed in memory, since flex attention {why}", stacklevel=2)
        return None
    try:
        with full_precision(problem.q.device):
            return _run(problem)
    except Exception as error:  # by module: classes change between versions
        if not type(error).__module__.startswith(COMPILERS):
            raise
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"softmax_attention: all scores are formed in memory, since flex attention fails: {reason}", stacklevel=2
        )
        return None


def refuses(problem: SoftmaxProblem) -> str:
    """The reason why flex attention does not serve a problem, in words that follow its name, or ""."""
    widths = problem.q.shape[-1], problem.v.shape[-1]
    if problem.q.dtype == torch.float64:
        return "computes in float32"
    if problem.q.is_cuda and min(widths) < LEAST:
        return f"takes {LEAST} features and more, not {min(widths)}"
    if problem.product is not None:
        return "knows no Householder product"
    if problem.state is not None:
        return "is not made for streams"
    if len(problem.batch) - (problem.groups > 1) > 2:
        return "has one axis of samples"
    if problem.attn_mask is not None or problem.dropout:
        return "takes no attn_mask of all pairs" if problem.attn_mask is not None else "has no dropout"
    for term in problem.terms:
        if isinstance(term, DistanceKernel) and problem.q.is_cuda and term.table.requires_grad and torch.is_grad_enabled():
            return "compiles no gradient of a distance kernel on GPUs"  # PyTorch 2.11: an error in the backward pass
        if term.side == "value":
            return "adds no terms to values"
        if isinstance(term, Numbers) or (not isinstance(term, DistanceKernel) and term.bucket(_samples(problem)) is None):
            return f"computes terms of pairs one by one, and {type(term).__name__} has them all at once"
    return ""


def _run(problem: SoftmaxProblem) -> Tensor:
    groups, (*_, heads), t, s = problem.groups, problem.batch, problem.q.shape[-2], problem.k.shape[-2]
    q, k, v = problem.rho_q(problem.q), problem.rho_k(problem.k), problem.v
    keys = problem.batch[1:] if groups > 1 else problem.batch
    query = _four(_joined(q.expand(*problem.batch, *q.shape[-2:]), groups))
    key, value = (_four(x.expand(*keys, *x.shape[-2:])) for x in (k, v))
    score = _score(problem, _added(problem))
    blocks = None
    if problem.causal or problem.window is not None:
        blocks = _blocks(t, s, problem.causal, problem.window, query.device)
    run = _compiled(flex.flex_attention) if query.is_cuda else flex.flex_attention
    out = run(query, key, value, score_mod=score, block_mask=blocks, scale=problem.scale, enable_gqa=groups > 1)
    if groups > 1:
        return out.unflatten(-3, (heads, groups)).movedim(-3, 0).reshape(*problem.batch, t, v.shape[-1])
    return out.reshape(*problem.batch, t, v.shape[-1])


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _joined(x: Tensor, groups: int) -> Tensor:
    """Query heads ``[groups *b h . .]`` that share a key head, moved next to each other."""
    return x if groups == 1 else x.movedim(0, -3).flatten(-4, -3)


def _four(x: Tensor) -> Tensor:
    """x with an axis of samples."""
    return x if x.ndim == 4 else x[None]


def _samples(problem: SoftmaxProblem) -> int:
    return problem.batch[-2] if len(problem.batch) - (problem.groups > 1) > 1 else 1


@lru_cache(32)
def _blocks(t: int, s: int, causal: bool, window: int | None, device: torch.device) -> Any:
    """The block mask of pairs that take part, from indices alone."""

    def takes_part(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        back = i + (s - t) - j
        part = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
        return part if window is None else part & (back.abs() < window)

    with torch.inference_mode(False):  # a backward pass may save them
        make = _compiled(flex.create_block_mask) if device.type == "cuda" else flex.create_block_mask
        return make(takes_part, None, None, t, s, device=device)


def _score(problem: SoftmaxProblem, added: list[Pair]) -> Any:
    """The function that modifies a score: added terms, and -inf for keys that do not take part."""
    t, s, ids, samples = problem.q.shape[-2], problem.k.shape[-2], problem.segments, _samples(problem)
    locality = None if problem.locality is None else problem.locality.expand(samples, t, s)
    mask = None if problem.mask is None else problem.mask.expand(samples, s)
    of_queries, of_keys = (None, None) if ids is None else (ids[0][..., ids[0].shape[-1] - t :].expand(samples, t), ids[1])
    of_keys = None if of_keys is None else of_keys.expand(samples, s)

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if locality is not None:
            value = value * locality[b, i, j]
        for add in added:
            value = value + add(b, h, i, j)
        if mask is not None:
            value = torch.where(mask[b, j], value, -torch.inf)
        if of_queries is not None and of_keys is not None:
            value = torch.where(of_queries[b, i] == of_keys[b, j], value, -torch.inf)
        return value

    return score


def _added(problem: SoftmaxProblem) -> list[Pair]:
    """Functions of a pair that are added to its score."""
    samples, groups, heads = _samples(problem), problem.groups, problem.batch[-1]
    added: list[Pair] = []
    if problem.decay is not None:
        of_q, of_k = (g.expand(samples, heads, -1) for g in problem.decay)
        causal = problem.causal

        def decay(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            difference = of_q[b, h // groups, i] - of_k[b, h // groups, j]  # float64
            return log_weights(difference, causal).to(torch.float32)

        added.append(decay)
    for term in problem.terms:
        added.append(_number(problem, term) if term.side == "none" else _product(problem, term))
    return added


def _number(problem: SoftmaxProblem, term: Term) -> Pair:
    """A number from a table or a kernel, for a term of side "none"."""
    groups, samples, table, one = problem.groups, _samples(problem), term.table, term.heads == 1
    if isinstance(term, DistanceKernel):
        distance = term.distance(samples)

        def add(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            head = 0 * h if one else h // groups
            return term.number(distance(b, i, j), table[head, 0], table[head, 1])

        return add
    bucket = term.bucket(samples)
    assert bucket is not None
    return lambda b, h, i, j: table[0 * h if one else h // groups, bucket(b, i, j)]


def _product(problem: SoftmaxProblem, term: Term) -> Pair:
    """The product of a table's row with the query or the key, from a table ``[b h t n]`` of products with all rows."""
    groups, samples, heads, bucket = problem.groups, _samples(problem), problem.batch[-1], term.bucket(_samples(problem))
    assert bucket is not None
    of_query = term.side == "query"
    x, batch = (problem.q, problem.batch) if of_query else (problem.k, torch.Size((samples, heads)))
    rows = problem.scale * (x.to(torch.float32) @ term.table.mT.to(torch.float32))
    rows = rows.expand(*batch, *rows.shape[-2:])
    rows = _four(_joined(rows, groups if of_query else 1))

    def add(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        index = bucket(b, i, j)
        return rows[b, h, i, index] if of_query else rows[b, h // groups, j, index]

    return add
