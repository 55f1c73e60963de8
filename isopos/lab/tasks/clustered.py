"""Clustered attention, a baseline: softmax attention of clusters of queries, at a cost proportional to length."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.attention.checks import AxisOrder, IsometryPair, check_tensor
from isopos.attention.problem import SoftmaxOptions, SoftmaxProblem, check_softmax, restored
from isopos.catalog import at_least
from isopos.exact import full_precision


def clustered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    clusters: int,
    topk: int = 32,
    iterations: int = 10,
    isometry: IsometryPair = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    layout: AxisOrder = "bhtd",
    **others: Any,
) -> Tensor:
    """Bidirectional attention in which clusters of queries share a distribution, and top-k keys are weighted per query.

    K-means clusters the queries rho(x_i) q_i; a centroid c has the weights softmax(scale <c, rho(x_j) k_j>). For the `topk`
    keys with the largest weights, each query of the cluster computes separate weights with the same sum; for other keys
    it has the centroid's (Vyas et al., "improved"; `topk=0` is their plain form). A shift of all positions is an isometry of
    all queries: it changes neither distances nor clusters, and outputs are exactly relative (Algebraic Positional Encodings,
    section 3.4.4).

    The initial centroids are evenly spaced queries, so nothing is random. The authors cluster hashes of random projections,
    which isometries change. With one cluster per query, or a `topk` of all keys, this is softmax attention.

    Args:
        q: Queries ``[*b h t d]``, any floating dtype. There is no causal form, since clusters need all queries.
        k: Keys ``[*b h s d]``.
        v: Values ``[*b h s e]``.
        clusters: Number of clusters per head; t at most are used.
        topk: Keys per cluster that are weighted per query.
        iterations: Iterations of k-means. No gradient passes through the choice of clusters and keys.
        isometry: rho at the positions of q and k; a pair for cross-attention.
        scale: d^-1/2 by default.
        mask: Keys that take part, bool ``[*b s]``.
        query_mask: Queries that take part in clustering, bool ``[*b t]``; the values and outputs of others (padding) are
            arbitrary.
        layout: As in `softmax_attention`.

    Returns:
        ``[*b h t e]`` in q's dtype; zero if no key takes part. Time and memory are ``t (clusters + topk) d``.

    Raises:
        TypeError: For arguments of a scheme that add to the scores of pairs.
        ValueError: As `softmax_attention`.

    References:
        Fast Transformers with Clustered Attention (Vyas et al. 2020). https://arxiv.org/abs/2007.04825

    Examples:
        >>> import isopos
        >>> q, k, v = torch.randn(3, 1, 4, 50, 16)
        >>> at = isopos.rope(16, 4, attention="softmax").at(isopos.sequence(50))
        >>> y = clustered_attention(q, k, v, **at, clusters=8, topk=50)
        >>> torch.allclose(y, isopos.softmax_attention(q, k, v, **at), atol=1e-5)
        True
    """
    for name, value in others.items():
        if value is not None:
            raise TypeError(f"clustered_attention() expected an encoding alone, which maps queries and keys, got {name!r}")
    for name, value, least in (("clusters", clusters, 1), ("topk", topk, 0), ("iterations", iterations, 0)):
        at_least(name, value, least)
    options: SoftmaxOptions = {"isometry": isometry, "scale": scale, "mask": mask, "layout": layout}
    problem = check_softmax(q, k, v, options, streams=False)
    if query_mask is not None:
        check_tensor("query_mask", query_mask, q)
        if query_mask.dtype != torch.bool or query_mask.shape != (
            *problem.batch[problem.groups > 1 : -1],
            problem.q.shape[-2],
        ):
            raise ValueError(f"query_mask: expected bool [*b t], got {query_mask.dtype} {list(query_mask.shape)}")
    with full_precision(q.device):
        empty = problem.q.new_zeros(*problem.batch, problem.q.shape[-2], problem.v.shape[-1])
        out = empty if problem.empty else _attend(problem, query_mask, clusters, topk, iterations)
    return restored(out, problem).to(q.dtype)


def _attend(problem: SoftmaxProblem, query_mask: Tensor | None, clusters: int, topk: int, iterations: int) -> Tensor:
    scale, dtype = problem.scale, torch.promote_types(problem.q.dtype, torch.float32)
    mapped = problem.rho_q(problem.q.to(dtype)), problem.rho_k(problem.k.to(dtype)), problem.v.to(dtype)
    q, k, v = (x.expand(*problem.batch, *x.shape[-2:]) for x in mapped)
    if query_mask is not None:
        q = torch.where(query_mask[..., None, :, None], q, 0)  # zero times NaN would reach centroids
    takes_part = (
        torch.ones((), dtype=torch.bool, device=q.device) if problem.mask is None else problem.mask[..., None, None, :]
    )
    k, v = (x if problem.mask is None else torch.where(takes_part.mT, x, 0) for x in (k, v))
    label, centre = _clusters(q, query_mask, clusters, iterations)
    takes_part = takes_part.expand(*problem.batch, 1, k.shape[-2])
    alive = takes_part.any(-1, keepdim=True)
    ahead = torch.where(takes_part | ~alive, 0.0, -torch.inf)  # a row without keys attends everywhere, and is then zero
    weight = (scale * centre @ k.mT + ahead).softmax(-1)  # [*b h c s]
    share, index = weight.topk(min(topk, k.shape[-2]), -1)
    out = torch.take_along_dim(weight.scatter(-1, index, 0) @ v, label[..., None], -2)
    if topk:
        chosen = torch.take_along_dim(index, label[..., None], -2)[..., None]  # [*b h t topk 1]
        keys, values = (torch.take_along_dim(x.unsqueeze(-3), chosen, -2) for x in (k, v))
        logits = scale * (q.unsqueeze(-2) * keys).sum(-1) + torch.take_along_dim(ahead, chosen[..., 0], -1)
        mass = torch.take_along_dim(share.sum(-1, keepdim=True), label[..., None], -2)
        per_query = mass * logits.clamp_min(torch.finfo(logits.dtype).min).softmax(-1)
        out = out + (per_query.unsqueeze(-2) @ values).squeeze(-2)
    return torch.where(alive, out, 0)


def _clusters(q: Tensor, query_mask: Tensor | None, clusters: int, iterations: int) -> tuple[Tensor, Tensor]:
    """Clusters of queries ``[*b h t]`` and their means ``[*b h c d]``, by Lloyd's algorithm."""
    t = q.shape[-2]
    clusters = min(clusters, t)
    counts = torch.ones(t, dtype=torch.bool, device=q.device) if query_mask is None else query_mask.unsqueeze(-2)
    counts = counts.expand(q.shape[:-1])
    order = counts.logical_not().to(torch.int8).argsort(dim=-1, stable=True)  # masked queries last
    step = torch.arange(clusters, device=q.device) * counts.sum(-1, keepdim=True) // clusters
    with torch.no_grad():
        centre = torch.take_along_dim(q, order.gather(-1, step)[..., None], -2)
        for _ in range(iterations):
            centre = _means(q, _nearest(q, centre), counts, centre)
        label = _nearest(q, centre)
    return label, _means(q, label, counts, centre)


def _nearest(q: Tensor, centre: Tensor) -> Tensor:
    return (centre.square().sum(-1).unsqueeze(-2) - 2 * q @ centre.mT).argmin(-1)


def _means(q: Tensor, label: Tensor, counts: Tensor, before: Tensor) -> Tensor:
    """Means of the counted queries of each cluster; the previous mean for an empty cluster."""
    member = (F.one_hot(label, before.shape[-2]) * counts[..., None]).to(q.dtype)
    size = member.sum(-2)[..., None]
    return torch.where(size > 0, member.mT @ q / size.clamp_min(1), before)
