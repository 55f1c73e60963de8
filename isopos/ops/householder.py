"""Products of Householder-like maps along a path: score_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j for j <= i.

    H_m = I - strength_m vector_m vector_m^T,    |vector_m| = 1,    0 <= strength_m <= 2

Strength 0 is the identity, 1 a projection, 2 a reflection. No H_m is ever inverted, and |H_m x| <= |x|, so that products
keep their digits at any length. `naive_scores` multiplies token by token; the other functions multiply chunks of
tokens by triangular systems (UT transform) and a matrix ``[d d]`` per chunk. A key carried over the tokens m of a chunk is

    H_last ... H_{j+1} k_j = k_j - sum_m u_mj vector_m,    (I + tril(S W W^T, -1)) U = S tril(W K^T, -1)

with rows W of vectors and the diagonal S of strengths; a query is carried back by the transposed map.

References:
    PaTH Attention: Position Encoding via Accumulating Householder Transformations (Yang et al. 2025), sections 2 and 3.
    https://arxiv.org/abs/2505.16381
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import broadcast, cast_down
from isopos.ops.linear.features import Decays
from isopos.ops.linear.step import weighed

CHUNK = 64  # tokens per triangular system


class Factors(NamedTuple):
    """The maps I - strength vector vector^T of tokens, float32 or float64."""

    vector: Tensor  # unit vectors, or zero for the identity, ``[*b h s d]``
    strength: Tensor  # numbers from 0 to 2 ``[*b h s]``


class _Chunk(NamedTuple):
    """Keys k ``[*b h c d]`` and vectors ``[*b h c d]`` of a chunk, and its solved system."""

    k: Tensor
    vector: Tensor
    u: Tensor  # ``[*b h c c]``, U of the keys
    back: Tensor  # ``[*b h c d]``, the same system's solution for any vector x before the chunk is back @ x
    end: Tensor  # keys carried to the end of the chunk ``[*b h c d]``
    product: Tensor  # ``[*b h d d]``, the product of all maps of the chunk, later ones to the left


def naive_scores(q: Tensor, k: Tensor, factors: Factors) -> Tensor:
    """Scores ``[*b h t s]`` of queries ``[*b h t d]``, the last tokens, and keys ``[*b h s d]``, token by token.

    Scores of keys after their query are zero. Any floating dtype; differentiable any number of times.

    Examples:
        >>> q, k, w = torch.eye(2), torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> naive_scores(q, k, Factors(w, torch.tensor([2.0, 2.0]))).tolist()
        [[1.0, 0.0], [-1.0, 1.0]]
    """
    t, s = q.shape[-2], k.shape[-2]
    rows, path = [], k[..., :0, :]
    for i in range(s):
        vector, strength = factors.vector[..., i : i + 1, :], factors.strength[..., i : i + 1, None]
        path = path - strength * (path @ vector.mT) * vector  # every earlier key, one token further
        path = torch.cat((path, k[..., i : i + 1, :].expand(*path.shape[:-2], 1, k.shape[-1])), -2)
        if i >= s - t:
            rows.append(F.pad(q[..., i - s + t : i - s + t + 1, :] @ path.mT, (0, s - i - 1)))
    return torch.cat(rows, -2) if rows else q @ k.mT


def scores(q: Tensor, k: Tensor, factors: Factors) -> Tensor:
    """`naive_scores` chunk by chunk, for float32 or float64.

    If there are more keys than factors, the first keys belong to a stream's past, already carried to its last token.
    """
    t, s = q.shape[-2], factors.vector.shape[-2]
    past, k = k[..., : k.shape[-2] - s, :], k[..., k.shape[-2] - s :, :]
    columns, queries = [], q[..., t:, :]  # queries after the chunk, carried back to its end
    for start, chunk in reversed(list(_chunks(k, factors))):
        first, size = start - (s - t), chunk.k.shape[-2]
        inner, offset = q[..., max(first, 0) : max(first + size, 0), :], max(-first, 0)
        column = queries @ chunk.end.mT
        queries = queries @ chunk.product
        if inner.shape[-2]:
            near, own = _inner(inner, chunk, offset)
            column, queries = torch.cat((near, column), -2), torch.cat((own, queries), -2)
        columns.append(F.pad(column, (0, 0, t - column.shape[-2], 0)))
    columns.append(queries @ past.mT)
    total = torch.cat(columns[::-1], -1)
    return total if total.shape[-1] == past.shape[-2] + s else total[..., : past.shape[-2] + s]


def carried(k: Tensor, factors: Factors) -> Tensor:
    """Keys ``[*b h s d]`` carried to the last token; more keys than factors are as in `scores`."""
    s = factors.vector.shape[-2]
    past, k = k[..., : k.shape[-2] - s, :], k[..., k.shape[-2] - s :, :]
    parts, product = [], torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    for _, chunk in reversed(list(_chunks(k, factors))):
        parts.append(chunk.end @ product.mT)
        product = product @ chunk.product
    new = torch.cat(parts[::-1], -2)[..., :s, :] if parts else k
    past = past @ product.mT
    leading = broadcast(past.shape[:-2], new.shape[:-2])
    return torch.cat([x.expand(*leading, *x.shape[-2:]) for x in (past, new)], -2)


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Factors,
    g: Decays = None,
    state: Tensor | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums ``[*b h t e]`` of values ``[*b h s e]`` weighted by scores and decays, and the state ``[*b h d e]`` after them.

        total_i = sum_j score_ij exp(g_i - g_j) v_j,    state_m = exp(g_m - g_{m-1}) H_m state_{m-1} + k_m v_m^T

    Time is proportional to length: the state passes from chunk to chunk. In a compiler all tokens are one chunk.

    Args:
        q: Queries ``[*b h t d]``, the last tokens, float32 or float64.
        k: Keys ``[*b h s d]``.
        factors: Maps of the tokens.
        g: Log decays of queries and keys, float64, which do not increase along tokens.
        state: State before these tokens.
        before: Log decay ``[*b h]`` of the token before them; by default as of the first one.
    """
    t, s = q.shape[-2], k.shape[-2]
    border = None if g is None else g[1][..., :1] if before is None else before[..., None]
    totals = []
    for start, chunk in _chunks(k, factors):
        size = chunk.k.shape[-2]
        stop = min(start + size, s)
        rows = slice(max(start - (s - t), 0), max(stop - (s - t), 0))
        values = F.pad(v[..., start:stop, :], (0, 0, 0, size - (stop - start)))
        near, own = _inner(q[..., rows, :], chunk, max(s - t - start, 0))
        end, across = chunk.end, None
        if g is not None and border is not None:
            of_queries, of_keys = g[0][..., rows], F.pad(g[1][..., start:stop], (0, size - (stop - start)), mode="constant")
            last = g[1][..., stop - 1 : stop]
            near = near * _weight(of_queries[..., :, None] - of_keys[..., None, :], near)
            from_start, to_end = (_weight(x, near)[..., None] for x in (of_queries - border, last - of_keys))
            own, end, across = weighed(own, from_start), weighed(end, to_end), _weight(last - border, near)[..., None]
            kept, border = torch.where(to_end == 0, 0, values), last
            far = None if state is None else torch.where(from_start == 0, 0, own @ state)
        else:
            kept, far = values, None if state is None else own @ state
        total = near @ values
        totals.append(total if far is None else total + far)
        added = end.mT @ kept
        state = added if state is None else chunk.product @ weighed(state, across) + added
    if state is None:
        state = k.mT @ v
    return torch.cat(totals, -2) if totals else q @ state, state


def _inner(q: Tensor, chunk: _Chunk, offset: int) -> tuple[Tensor, Tensor]:
    """Scores of a chunk's queries, the first of which is token `offset` of it, and the queries carried back to its start."""
    of_vectors = (q @ chunk.vector.mT).tril(offset)
    return (q @ chunk.k.mT).tril(offset) - of_vectors @ chunk.u, q - of_vectors @ chunk.back


def _chunks(k: Tensor, factors: Factors) -> Iterator[tuple[int, _Chunk]]:
    """The first token of each chunk, and the chunk, in order. The last one is padded with zeros."""
    s, d = factors.vector.shape[-2:]
    if not torch.compiler.is_compiling() and s == 0:
        return
    whole = torch.compiler.is_compiling() or s <= CHUNK  # a compiler would unroll a loop for each length
    size, count = (s, 1) if whole else (CHUNK, -(-s // CHUNK))
    leading = broadcast(k.shape[:-2], factors.vector.shape[:-2], factors.strength.shape[:-1])
    tensors = (k, factors.vector, factors.strength[..., None])
    if not whole:
        tensors = tuple(F.pad(x, (0, 0, 0, size * count - s)) for x in tensors)
    k, vector, strength = (x.expand(*leading, *x.shape[-2:]).unflatten(-2, (count, -1)) for x in tensors)
    system = torch.eye(size, dtype=k.dtype, device=k.device) + (strength * vector @ vector.mT).tril(-1)
    right = strength * torch.cat(((vector @ k.mT).tril(-1), vector), -1)
    u, back = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split((size, d), -1)
    end = k - u.mT @ vector
    product = torch.eye(d, dtype=k.dtype, device=k.device) - vector.mT @ back
    for n, parts in enumerate(zip(*(x.unbind(-3) for x in (k, vector, u, back, end, product)), strict=True)):
        yield n * size, _Chunk(*parts)


def _weight(exponent: Tensor, like: Tensor) -> Tensor:
    """exp(exponent), at most 1, in the dtype of `like`; scores of later keys, whose exponents are positive, are zero."""
    return cast_down(exponent.clamp_max(0).exp(), like.dtype, like.device)
