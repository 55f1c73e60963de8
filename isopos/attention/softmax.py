"""Softmax attention with positions, through `scaled_dot_product_attention`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.attention import flex, ring, sharded
from isopos.attention.checks import AxisOrder, DecayPair, IsometryPair, SegmentPair, TransportPair
from isopos.attention.pairs import added_to_logits, takes_part, with_keys
from isopos.attention.problem import SoftmaxOptions, SoftmaxProblem, check_softmax, refuse, restored
from isopos.deprecation import former_argument
from isopos.exact import full_precision, is_exporting
from isopos.maps import Identity
from isopos.ops import householder
from isopos.ops.library import watched
from isopos.ops.linear.containment import finite, nonfinite, with_gradient_of
from isopos.phases import Phase
from isopos.state import State
from isopos.terms import Term

TOKENS = ("keys", "values", "raw_keys")  # of a state, with an axis of features
BLOCK = 256  # smallest number of queries per block with a window


@overload
def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = False, **options: Unpack[SoftmaxOptions]
) -> Tensor: ...
@overload
def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[SoftmaxOptions]
) -> tuple[Tensor, State]: ...
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    decay: DecayPair = None,
    phases: Sequence[Phase] | None = None,
    scale: float | None = None,
    causal: bool = False,
    terms: Sequence[Term] | None = None,
    locality: Tensor | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    segment_ids: SegmentPair = None,
    dropout: float = 0.0,
    transport: TransportPair = None,
    layout: AxisOrder = "bhtd",
    state: State | None = None,
    return_state: bool = False,
    group: Any = None,
    **others: Any,
) -> Tensor | tuple[Tensor, State]:
    """Attention with logits scale * <rho(x_i) q_i, rho(x_j) k_j> - |g_i - g_j|, through `scaled_dot_product_attention`.

    Arguments that are not listed, shared heads and NaN containment are as in `linear_attention`; NaN containment holds
    outside a compiler only.

    Args:
        q: Queries ``[*b h t d]``, any floating dtype.
        k: Keys ``[*b h s d]``.
        v: Values ``[*b h s e]``.
        decay: g, a log decay ``[*b h t]`` in float64; a pair in cross-attention. Tokens may have any order.
        scale: d^-1/2 by default, where d is the width of q before rho.
        terms: Relative terms. Scores of the query's or the key's side are scaled and added, numbers are added unscaled, rows
            of the value's side are added to values. Time and memory are quadratic.
        locality: Factors ``[*b t s]`` of scale * <rho(x_i) q_i, rho(x_j) k_j> (APE, section 4.2).
        attn_mask: Pairs that take part, bool, or floats that are added to logits (-inf takes no part), ``[*b h t s]`` with
            the heads of q or a shape that broadcasts to it, as in `scaled_dot_product_attention`; s includes a stream's past
            keys.
        window: As in `linear_attention`. Time and memory grow with t * window, unless terms, locality, attn_mask or a
            compiler need all pairs. A stream keeps the last window - 1 tokens, unless there are terms or locality.
        segment_ids: Integers ``[*b s]`` as in `linear_attention`, or a pair (of queries, of keys).
        dropout: Probability of dropping a weight; the others are divided by 1 - dropout. It is applied whenever it is
            passed.
        group: As in `linear_attention`. Encoded keys and values travel to the processes whose queries see them, so the bytes
            sent are proportional to the length, or with a window to it. Terms, locality and attn_mask have the queries of
            the shard and the keys of all shards, as ``scheme.at(x, group=group)`` gives them.

    Mask, attn_mask, window, segment_ids and causal combine. A static cache is keys and values of any capacity S, with a mask
    of filled slots; other slots may hold anything (`mask` reads none of them; `attn_mask` needs finite numbers in them,
    except on the CPU). For several new tokens at positions p ``[t]`` add the attn_mask ``slots <= p[:, None]``; do not pass
    `causal`, which would align the last query with the last slot.

    If GPU kernels are requested (`isopos.ops.gpu`), decays, terms, locality, windows, masks and segments go through
    PyTorch's flex attention, which does not store scores; a warning states what it does not serve.

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys. With `return_state`, a pair of this and the `State`.

    Raises:
        TypeError: If an argument is not a tensor.
        ValueError: If shapes, dtypes, devices or options do not fit, before any computation. Tensors must be dense and on
            q's device.

    Source: RoFormer, Eq. 2, 5-7, 10 and 16; Algebraic Positional Encodings, sections 3 and 4.2.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16)
        >>> softmax_attention(q, k, v, causal=True).shape
        torch.Size([2, 4, 10, 16])
        >>> keys, values = (torch.cat((x, torch.zeros(2, 4, 22, 16)), -2) for x in (k, v))  # a static cache
        >>> slots, p = torch.arange(32), torch.arange(8, 10)
        >>> new = softmax_attention(q[..., 8:, :], keys, values, mask=slots < 10, attn_mask=slots <= p[:, None])
        >>> torch.allclose(new, softmax_attention(q, k, v, causal=True)[..., 8:, :], atol=1e-6)
        True
    """
    phases = former_argument(others, "path", "phases", phases)
    if others:
        refuse("softmax", list(others))
    options: SoftmaxOptions = {"isometry": isometry, "decay": decay, "scale": scale, "causal": causal, "terms": terms}
    options |= {"locality": locality, "mask": mask, "attn_mask": attn_mask, "window": window, "segment_ids": segment_ids}
    options |= {"dropout": dropout, "transport": transport, "layout": layout, "state": state, "phases": phases}
    options |= {"group": group}
    problem = check_softmax(q, k, v, options, streams=return_state)
    t = problem.q.shape[-2]
    if problem.shards is not None and ring.serves(problem):
        return restored(ring.attended(problem), problem).to(q.dtype)
    problem = problem if problem.shards is None else sharded.softmax_problem(problem)
    problem, after = (problem, State()) if problem.state is None else _cached(problem, problem.state)
    out = _contained(problem)
    out = out if out.shape[-2] == t else out[..., :t, :]
    out = restored(out, problem).to(q.dtype)
    return (out, after) if return_state else out


def _contained(problem: SoftmaxProblem) -> Tensor:
    """Attention with NaN containment: rows that attend to no non-finite token are recomputed without these tokens."""
    out = _attend(problem)
    # PyTorch's kernel may return numbers for a query of NaN; a key of -inf has a weight of zero, and a gradient of NaN
    if finite(out) and finite(problem.q) and (not out.requires_grad or finite(problem.k)):
        return out
    with torch.no_grad():
        of_queries, of_keys = nonfinite((problem.q,)), nonfinite((problem.k,)) | nonfinite((problem.v,))
        seen = ((takes_part(problem) & of_keys.unsqueeze(-2)).any(-1) | of_queries)[..., None]
    out = out.masked_fill(of_queries[..., None], torch.nan)
    q = torch.where(of_queries[..., None], 0, problem.q)
    k, v = (torch.where(of_keys[..., None], 0, x) for x in (problem.k, problem.v))
    return with_gradient_of(out, _attend(replace(problem, q=q, k=k, v=v)), seen)


def _attend(problem: SoftmaxProblem) -> Tensor:
    q, k, v, causal, mask, dropout = problem.q, problem.k, problem.v, problem.causal, problem.mask, problem.dropout
    rho_q, rho_k, t, s, scale = problem.rho_q, problem.rho_k, q.shape[-2], k.shape[-2], problem.scale
    added, locality = problem.attn_mask, problem.locality
    unmasked = mask is None and problem.segments is None and added is None and problem.window is None
    formed = locality is not None or problem.product is not None  # scores, in memory
    plain = len(problem.terms) == 0 and problem.decay is None and not formed  # Dynamo has no `not` of a tuple
    if plain and unmasked and (not causal or t == s):
        return F.scaled_dot_product_attention(rho_q(q), rho_k(k), v, dropout_p=dropout, is_causal=causal, scale=scale)
    if mask is not None:
        k, v = (torch.where(mask[..., None, :, None], x, 0) for x in (k, v))
        problem = replace(problem, k=k, v=v)
    if (out := flex.attended(problem)) is not None:
        return out
    if problem.window is not None and not problem.terms and not formed and added is None and _splits(problem):
        return _by_blocks(problem)
    part = takes_part(problem)
    alive = part.any(-1, keepdim=True)
    bias = part | ~alive  # rows without keys attend to all, for a finite gradient, and are set to zero below
    if not plain or (added is not None and added.is_floating_point()):
        with full_precision(q.device):
            bias = added_to_logits(problem).masked_fill(~part, -torch.inf)
            if s:  # relative to the largest, so that rounding to the dtype of q is exact enough
                bias = bias - bias.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(bias.dtype).min)
        bias = bias.clamp_min(torch.finfo(q.dtype).min).masked_fill(~part, -torch.inf).masked_fill(~alive, 0)
    of_values = [term for term in problem.terms if term.side == "value"]
    if not formed and not of_values:
        bias = (bias if bias.dtype == torch.bool else bias.to(q.dtype)).expand(*problem.batch, t, s)
        q, k, v = (x.expand(*problem.batch, *x.shape[-2:]) for x in (rho_q(q), rho_k(k), v))
        if q.is_cuda and s and bias.requires_grad and not (q.requires_grad or k.requires_grad or v.requires_grad):
            # kernels of GPUs save nothing for the gradient of a mask alone, which then fails
            q = torch.where(torch.ones_like(q, dtype=torch.bool), q, bias[..., :1, :1])
        if is_exporting() and q.ndim > 4:  # ONNX has attention of four axes only
            q, k, v, bias = (x.flatten(0, q.ndim - 4) for x in (q, k, v, bias))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
        return torch.where(alive, out.reshape(*problem.batch, *out.shape[-2:]), 0)
    dtype = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        queries, keys = scale * rho_q(q.to(dtype)), rho_k(k.to(dtype))
        logits = queries @ keys.mT if problem.product is None else householder.scores(queries, keys, problem.product)
        logits = logits if locality is None else logits * locality.unsqueeze(-3).to(dtype)
        weight = F.dropout((logits + bias.to(dtype)).softmax(-1), dropout, training=dropout > 0)
        out = sum((term.values(weight) for term in of_values), weight @ v.to(dtype))
    return torch.where(alive, out, 0).to(q.dtype)


def _splits(problem: SoftmaxProblem) -> bool:
    """Whether some keys are outside all windows of a block of queries. A compiler would unroll blocks for each length."""
    assert problem.window is not None
    short = problem.k.shape[-2] <= 2 * max(problem.window, BLOCK)
    return not (torch.compiler.is_compiling() or watched() or short)


def _by_blocks(problem: SoftmaxProblem) -> Tensor:
    """Attention block by block of queries, each to the keys in its windows only."""
    window, ids, g = problem.window, problem.segments, problem.decay
    t, s = problem.q.shape[-2], problem.k.shape[-2]
    assert window is not None
    q, k, out, size = problem.rho_q(problem.q), problem.rho_k(problem.k), [], max(window, BLOCK)
    of_queries = None if ids is None else ids[0][..., ids[0].shape[-1] - t :]
    for start in range(0, t, size):
        stop = min(start + size, t)
        first, last = start + s - t - window + 1, stop + s - t + (0 if problem.causal else window - 1)
        rows, columns = slice(start, stop), slice(max(0, first), max(0, min(last, s)))
        index = [torch.arange(a.start, a.stop, device=q.device) for a in (rows, columns)]
        part = replace(
            problem,
            q=q[..., rows, :],
            k=k[..., columns, :],
            v=problem.v[..., columns, :],
            rho_q=Identity(),
            rho_k=Identity(),
            window=None,
            mask=None if problem.mask is None else problem.mask[..., columns],
            segments=None if ids is None or of_queries is None else (of_queries[..., rows], ids[1][..., columns]),
            decay=None if g is None else (g[0][..., rows], g[1][..., columns]),
            attn_mask=(index[1] - index[0][:, None] - (s - t)).abs() < window,
        )
        out.append(_attend(part))
    return torch.cat(out, -2)


def _cached(problem: SoftmaxProblem, state: State) -> tuple[SoftmaxProblem, State]:
    """The problem with all mapped keys, values and masks of the stream so far; and the state after its tokens."""
    k, v, mask, g, ids = problem.rho_k(problem.k), problem.v, problem.mask, problem.decay, problem.segments
    batch, count = problem.of_keys, k.shape[-2]
    if (product := problem.product) is not None:  # changes cached keys with each token, so that roundings would add up
        k = k.to(torch.promote_types(k.dtype, torch.float32))
    if mask is not None or state["mask"] is not None:
        mask = torch.ones(count, dtype=torch.bool, device=k.device) if mask is None else mask
        if state["mask"] is None and (old := state["keys"]) is not None:
            mask = torch.cat((mask.new_ones(*mask.shape[:-1], old.shape[-2]), mask), -1)
    mapped = not isinstance(problem.rho_k, Identity) and any(term.side == "key" for term in problem.terms)
    new = {
        "keys": k.expand(*batch, *k.shape[-2:]),
        "values": v.expand(*batch, *v.shape[-2:]),
        "raw_keys": problem.k.expand(*batch, *problem.k.shape[-2:]) if mapped else None,  # as terms see them
        "mask": None if mask is None else mask.expand(*batch[:-1], mask.shape[-1]),
        "decays": None if g is None else g[1].expand(*batch, count),
        "segments": None if ids is None else ids[1].expand(*batch[:-1], count),
    }
    joined = {}
    for name, x in new.items():
        old, axis = state[name], -2 if name in TOKENS else -1
        joined[name] = x if x is None or old is None else torch.cat((old, x), axis)
    k, v, mask = joined["keys"], joined["values"], joined["mask"]
    if product is not None:
        known = k if mask is None else torch.where(mask[..., None, :, None], k, 0)
        with full_precision(k.device):
            joined["keys"] = householder.carried(known, product)
    g = None if g is None else (g[0], joined["decays"])
    ids = None if ids is None else (ids[0], joined["segments"])
    if (raw := joined["raw_keys"]) is not None:
        problem = with_keys(problem, raw if mask is None else torch.where(mask[..., None, :, None], raw, 0))
    problem = replace(problem, k=k, v=v, mask=mask, decay=g, segments=ids, rho_k=Identity())
    if problem.window is not None and not problem.terms and problem.locality is None:  # these need all positions
        gone = max(0, k.shape[-2] - problem.window + 1)
        for name, x in joined.items() if gone else ():
            joined[name] = x if x is None else (x[..., gone:, :] if name in TOKENS else x[..., gone:]).clone()
    after = None if problem.phase is None else problem.phase.expand(*batch, -1).clone()
    return problem, state.next(problem.kind, **joined, path=after)
