"""Pairs of tokens in softmax attention: the mask of pairs that take part, and the numbers added to their logits."""

from dataclasses import replace

import torch
from torch import Tensor

from isopos.attention.problem import SoftmaxProblem
from isopos.exact import cast_down, float64_device
from isopos.terms import Numbers


def takes_part(problem: SoftmaxProblem) -> Tensor:
    """Mask of keys for each query: bool ``[*b h t s]`` or a shape that broadcasts to it, with all keys."""
    t, s, ids, added = problem.q.shape[-2], problem.k.shape[-2], problem.segments, problem.attn_mask
    pairs = problem.causal or problem.window is not None
    mask = torch.ones(t if pairs else 1, s, dtype=torch.bool, device=problem.q.device)
    mask = mask.tril(s - t) if problem.causal else mask
    if problem.window is not None:
        mask = mask.triu(s - t - problem.window + 1)
        mask = mask if problem.causal else mask.tril(s - t + problem.window - 1)
    mask = mask if problem.mask is None else mask & problem.mask[..., None, None, :]
    if added is not None:
        mask = mask & (added if added.dtype == torch.bool else added != -torch.inf)
    if ids is None:
        return mask
    of_queries = ids[0][..., ids[0].shape[-1] - t :]
    return mask & (of_queries[..., :, None] == ids[1][..., None, :]).unsqueeze(-3)


def with_keys(problem: SoftmaxProblem, k: Tensor) -> SoftmaxProblem:
    """The problem with the numbers that terms of the key's side give for unmapped keys k ``[*b h s d]``."""
    dtype = torch.promote_types(problem.q.dtype, torch.float32)
    q, k = problem.q.to(dtype), k.to(dtype)
    terms = (Numbers(problem.scale * term.scores(q, k)) if term.side == "key" else term for term in problem.terms)
    return replace(problem, terms=tuple(terms))


def log_weights(difference: Tensor, causal: bool) -> Tensor:
    """-|g_i - g_j| of differences g_i - g_j; causal ones of 0 have the gradient of one below 0, as for a rate of 0."""
    return torch.where(difference > 0, -difference, difference) if causal else -difference.abs()


def added_to_logits(problem: SoftmaxProblem) -> Tensor:
    """Numbers added to logits, ``[*b h t s]`` or a shape that broadcasts to it: decays in float64, and relative terms."""
    q, k, g, dtype = problem.q, problem.k, problem.decay, torch.promote_types(problem.q.dtype, torch.float32)
    bias = torch.zeros((), dtype=torch.float64, device=float64_device(q.device))
    if g is not None:
        difference = g[0][..., :, None] - g[1][..., None, :]
        bias = log_weights(difference, problem.causal)
    if bias.device != q.device:
        bias = cast_down(bias, torch.float32, q.device)
    if problem.attn_mask is not None and problem.attn_mask.is_floating_point():
        bias = bias + problem.attn_mask.to(torch.promote_types(problem.attn_mask.dtype, dtype))
    for term in problem.terms:
        if term.side != "value":
            bias = bias + (1 if term.side == "none" else problem.scale) * term.scores(q.to(dtype), k.to(dtype))
    return bias
