"""Linear and softmax attention with positions: unpack values into tensors, fuse what is known, apply the rest first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.attention.problem import (
    DecayPair,
    IsometryPair,
    SegmentPair,
    broadcasts,
    check,
    check_factors,
    check_order,
    check_segments,
    check_stream,
    decays_of,
    groups_of,
    kind_of,
)
from isopos.exact import broadcast, full_precision
from isopos.feature_maps import FEATURE_MAPS, IN_PLACE, Favor, FeatureMap, identity, sides
from isopos.maps import Chain, Gather, Identity, Reflection, Rotation, TokenMap
from isopos.ops import clipped, linear, native
from isopos.ops.place import Place
from isopos.ops.tiles import Formula, Room
from isopos.state import State, expect_state
from isopos.terms import Clipped, Term

__all__ = ["linear_attention", "naive_linear_attention", "softmax_attention"]

_NAMES = {phi: name for name, phi in FEATURE_MAPS.items()}
JUMP = 1000.0  # of a log decay between segments: exp(-1000) is zero in every dtype


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    feature_map: FeatureMap | None = None,
    decay: DecayPair = None,
    denominator: str | None = "plain",
    causal: bool = False,
    terms: Sequence[Term] | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> Any:
    """Attention with weights <rho(x_i) phi(q_i), rho(x_j) phi(k_j)> exp(g_i - g_j), at a cost proportional to length.

    Args:
        q: Queries ``[*b h t d]``, any floating dtype; sums are float32 or wider.
        k: Keys ``[*b h s d]``.
        v: Values ``[*b h s e]``.
        isometry: rho, evaluated at the positions of q and k; a pair (of queries, of keys) for cross-attention.
        feature_map: phi, applied before rho; None leaves q and k as they are.
        decay: g, a log decay ``[*b h t]`` or ``[h t]`` in float64 that does not increase along tokens (checked on the CPU);
            a pair for cross-attention. Without `causal` it counts both ways, exp(-|g_i - g_j|).
        denominator: "plain" divides by the same sum without rho (RoFormer, Eq. 19: positive when phi is), "encoded" by
            the sum with it (PermuteFormer, Eq. 11; LRPE, Eq. 38: positive only where rho keeps positive vectors positive),
            None by nothing. "complex" takes feature pairs (2i, 2i+1) for complex numbers, divides the complex sum by the
            complex denominator and returns the real part (LRPE, Eq. 38 to the letter: another function than "encoded").
            Decay, terms and mask weigh in all. A vanishing one is clamped to a magnitude of 1e-6; `isopos.Clamped` counts.
        causal: A query takes part with keys up to its own index; the last query is aligned with the last key.
        terms: Added to the weights: `Clipped` ones of side "query", <phi(q_i), phi(row)>, in linear time. No others
            factor: a bias of logits is a factor of weights that depends on both tokens.
        mask: Keys that take part, bool ``[*b s]`` (True takes part, as in `scaled_dot_product_attention`).
        segment_ids: Which of several packed sequences each key belongs to, integers ``[*b s]``; tokens of others do not
            take part. Queries have the ids of the last keys; tokens of one id are next to each other.
        state: The tokens before, of a causal stream; ``State()`` at its start. Positions are those in the whole stream.
        return_state: Also return the state after these tokens.

    Fewer heads of keys and values than of queries are shared by groups of neighbouring query heads; isometry, decay and
    terms are then those of the keys' heads.

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys. With `return_state` a pair of that and the `State`.

    Raises:
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work.

    Source: Katharopoulos et al. 2020, Eq. 9; RoFormer, Eq. 19; LRPE, Eq. 13 and 38; PermuteFormer, Eq. 11; Horn et al. 2021
    for terms.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
        >>> linear_attention(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True).shape
        torch.Size([2, 4, 100, 16])
    """
    expect_state(state)
    terms = () if terms is None else terms
    feature_map = identity if feature_map is None else feature_map
    groups = groups_of(q, k, v)
    if groups > 1:
        options = {"isometry": isometry, "feature_map": feature_map, "decay": decay, "denominator": denominator}
        options |= {"causal": causal, "terms": terms, "mask": mask, "segment_ids": segment_ids, "state": state}
        return _by_group(linear_attention, groups, q, k, v, options, return_state)
    rho_q, rho_k = check(q, k, v, isometry, mask, terms)
    g = decays_of(decay, q, k)
    check_stream(state, return_state, causal, q, k)
    if denominator not in ("plain", "encoded", "complex", None):
        raise ValueError(f"denominator: expected 'plain', 'encoded', 'complex' or None, got {denominator!r}")
    if denominator == "complex" and q.shape[-1] % 2:
        raise ValueError(
            f"denominator: expected an even number of features for 'complex', which pairs them, got {q.shape[-1]}"
        )
    check_factors(terms, decay, denominator, segment_ids, state is not None or return_state)
    t, s = q.shape[-2], k.shape[-2]
    if g is not None and not causal and t != s:
        raise ValueError(f"decay: without causal, expected as many queries as keys, got {t} and {s}")
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    raw, before = g, None if state is None else state["decay"]
    check_segments(segment_ids, q, k, batch)
    if segment_ids is None:
        check_order(g, causal, before)
    if 0 in (*batch, t, s):
        out = q.new_zeros(*batch, t, v.shape[-1])
        return (out, state or State()) if return_state else out
    if segment_ids is not None:
        g, before = _segmented(g, segment_ids, q, k, state)
    wide = torch.promote_types(q.dtype, torch.float32)
    unmoved = isinstance(rho_q, Identity) and isinstance(rho_k, Identity)
    parts = 2 if denominator == "plain" and not unmoved else 1
    keys_kept = None if mask is None else mask[..., None, :, None]
    divided = denominator is not None
    phi_q, phi_k = sides(feature_map)
    loads = (
        _Features(rho_q, phi_q, parts, wide),
        _Features(rho_k, phi_k, parts, wide, keys_kept),
        _Features(Identity(), identity, 1, wide, keys_kept),
    )
    if state is not None or return_state:
        given = {"decayed": raw is not None, "packed": segment_ids is not None}
        state, kind = state or State(), kind_of("linear", q, v, rho_k, feature_map, denominator, terms, **given)
        of_keys = broadcast(k.shape[:-2], v.shape[:-2])
        state.expect(kind, of_keys)
        state = state if return_state else replace(state, in_place=False)  # nobody takes the next one
        if state.in_place and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError("state: expected State(), or no gradients, got a state to update in place; use torch.no_grad()")
        with full_precision(q.device):
            out, kept = _streamed(q, k, v, loads, g, before, state, denominator, feature_map, terms)
        if raw is not None:
            kept["decay"] = raw[1][..., -1].expand(of_keys).clone()  # a view would keep all tokens in memory
        if segment_ids is not None:
            last = segment_ids[..., -1]
            kept["segment"] = last.expand(broadcast(last.shape, of_keys[:-1])).clone()
        return (out.to(q.dtype), state.next(kind, **kept)) if return_state else out.to(q.dtype)
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    known = feature_map in FEATURE_MAPS.values() or isinstance(feature_map, Favor)
    with full_precision(q.device):
        if denominator == "complex":
            return linear.divide_complex(_complex_sums(q, k, v, loads, g, causal)).to(q.dtype)
        below = None if not divided else "column" if terms else "divide"
        ready = unmoved and feature_map is identity and mask is None and q.dtype == wide
        out = linear.linear(
            q, k, v, linear.READY if ready else loads, g, causal=causal, below=below, fuse=known
        )  # another may hold parameters
        for term in terms:
            assert isinstance(term, Clipped)
            out = out + _clipped_sums(q, _and_ones(v.to(wide), keys_kept, divided), term, feature_map, causal, segment_ids)
        if terms and divided:
            out = linear.divide(out)
    return out.to(q.dtype)


def naive_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    feature_map: FeatureMap | None = None,
    decay: DecayPair = None,
    denominator: str | None = "plain",
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """`linear_attention` by its definition: every weight is formed. Quadratic; any number of derivatives, and `torch.func`.

    Args and shapes are those of `linear_attention`, as far as they go: no terms, segments or states, nor "complex".

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16)
        >>> torch.allclose(naive_linear_attention(q, k, v), linear_attention(q, k, v), atol=1e-5)
        True
    """
    rho_q, rho_k = check(q, k, v, isometry, mask, ())
    g = decays_of(decay, q, k)
    if denominator not in ("plain", "encoded", None):
        raise ValueError(f"denominator: expected 'plain', 'encoded' or None, got {denominator!r}")
    kept = None if mask is None else mask[..., None, :, None]
    k, v = (k, v) if kept is None else (torch.where(kept, x, 0) for x in (k, v))
    phi_q, phi_k = sides(identity if feature_map is None else feature_map)
    q, k = phi_q(q), phi_k(k)
    k = k if kept is None else torch.where(kept, k, 0)
    moved = rho_q.apply(q), rho_k.apply(k)
    total = linear.naive(*moved, v, g, causal=causal)
    if denominator is None:
        return total
    ones = torch.ones_like(v[..., :1]) if kept is None else kept.to(v.dtype)
    below = linear.naive(*(moved if denominator == "encoded" else (q, k)), ones, g, causal=causal)
    return linear.divide(torch.cat((total, below), -1))


def _complex_sums(q: Tensor, k: Tensor, v: Tensor, loads: Any, g: Any, causal: bool) -> Tensor:
    """Real and imaginary sums over real and imaginary denominators ``[2 *b h t e+1]``."""
    query, key, value = (load(x, load.tensors)[0] for load, x in zip(loads, (q, k, v), strict=True))
    value = _and_ones(value, loads[2].kept, True)
    keys, values = (x.expand(2, *x.shape) for x in (key, value))
    return linear.linear(_and_turned(query), keys, values, linear.READY, g, causal=causal, below=None, fuse=True)


def _and_turned(query: Tensor) -> Tensor:
    """Complex queries and i times them, ``[2 *b h t d]``: <i q, k>, the real part of conj(i q) k, is Im(conj(q) k)."""
    pairs = query.unflatten(-1, (-1, 2))
    return torch.stack((query, torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)))


def _and_ones(v: Tensor, kept: Tensor | None, divided: bool) -> Tensor:
    """Values and, where a denominator is wanted, a column of ones; zero for keys that take no part."""
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1) if divided else v
    return v if kept is None else torch.where(kept, v, 0)


def _clipped_sums(q: Tensor, values: Tensor, term: Clipped, phi: FeatureMap, causal: bool, ids: Tensor | None) -> Tensor:
    """The sums of a clipped term, and of its ones."""
    score = _clipped_scores(q.to(values.dtype), term, phi)
    if ids is not None:
        return _clipped_packed(score, values, term, ids, causal)
    return clipped.clipped(score, values, term.x, term.y, term.reach, outside=term.outside, causal=causal)


def _clipped_packed(score: Tensor, values: Tensor, term: Clipped, ids: Tensor, causal: bool) -> Tensor:
    """`clipped` of each segment alone: far keys of other segments must not take part. Samples go one by one."""
    if torch.compiler.is_compiling():
        raise ValueError("segment_ids: expected none beside clipped terms under a compiler, which cannot read their borders")
    *samples, heads, t, s = *score.shape[:-1], values.shape[-2]
    rows = [a.reshape(-1, heads, *a.shape[-2:]) for a in (score, values)]
    places = [a.expand(*samples, *a.shape[-2:]).reshape(-1, *a.shape[-2:]) for a in (term.x, term.y)]
    out = []
    for *sample, own in zip(*rows, *places, ids.expand(*samples, s).reshape(-1, s), strict=True):
        borders = [0, *((own.diff() != 0).nonzero()[:, 0] + 1).tolist(), s]
        for keys in pairwise(borders):
            queries = slice(*(max(0, border - (s - t)) for border in keys))
            scores, gathered, x, y = (a[..., part, :] for a, part in zip(sample, (queries, slice(*keys)) * 2, strict=True))
            out.append(clipped.clipped(scores, gathered, x, y, term.reach, causal=causal))
    return torch.cat(out, -2).unflatten(-2, (-1, t)).movedim(-3, 0).reshape(*samples, heads, t, -1)


def _clipped_scores(q: Tensor, term: Clipped, phi: FeatureMap) -> Tensor:
    """<phi(q), phi(row)> for each row of a clipped term's table: ``[*b h t n]``."""
    phi_q, phi_k = sides(phi)
    return phi_q(q) @ phi_k(term.table.to(q.dtype)).mT


def _streamed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loads: tuple["_Features", "_Features", "_Features"],
    g: tuple[Tensor, Tensor] | None,
    before: Tensor | None,
    state: State,
    denominator: str | None,
    phi: FeatureMap,
    terms: Sequence[Term],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the next tokens of a stream, and what is kept of all of them."""
    if not terms and (stepped := _stepped(q, k, v, loads, g, before, state, denominator)) is not None:
        return stepped
    queries, keys, (value,) = (load(x, load.tensors) for load, x in zip(loads, (q, k, v), strict=True))
    values = _and_ones(value, loads[2].kept, denominator is not None)
    sums = [values] if len(queries) == 1 else values.split((value.shape[-1], 1), -1)
    totals, kept = [], {}
    for n, (query, key, value) in enumerate(zip(queries, keys, sums, strict=True)):
        query = _and_turned(query) if denominator == "complex" else query
        total, kept[f"sum{n}"] = linear.carry(query, key, value, g, state[f"sum{n}"], before, in_place=state.in_place)
        totals.append(total)
    total = torch.cat(totals, -1)
    for term in terms:
        assert isinstance(term, Clipped)
        added, near = _clipped_stream(q, values, term, phi, state)
        total, kept = total + added, kept | near
    if denominator == "complex":
        out = linear.divide_complex(total)
    else:
        out = total if denominator is None else linear.divide(total)
    return out, kept


def _stepped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loads: tuple["_Features", "_Features", "_Features"],
    g: tuple[Tensor, Tensor] | None,
    before: Tensor | None,
    state: State,
    denominator: str | None,
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """`_streamed` for a token without gradients, where compiled code serves it."""
    sums = [x for name in ("sum0", "sum1") if (x := state[name]) is not None]
    held = (q, k, v, *sums, *(g or ()), *(x for load in loads for x in load.tensors))
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in held)
    if q.shape[-2] > 1 or not sums or graph or denominator == "complex" or torch.compiler.is_compiling():
        return None
    if not native.serves(*held) or not all(load.direct for load in loads):
        return None
    across = None
    if g is not None:
        if g[0] is not g[1] or before is None:
            return None
        across = (g[1][..., 0] - before).exp().to(torch.float32).expand(q.shape[:-2]).contiguous()
    formulas = [load.formula() for load in loads]
    divided = denominator is not None
    found = native.step((q, k, v), formulas, sums, across, denominator=divided, in_place=state.in_place)
    if found is None:
        return None
    out, after, below = found
    if below is not None:
        linear.count(below)
    return out, {f"sum{n}": x for n, x in enumerate(after)}


def _clipped_stream(
    q: Tensor, values: Tensor, term: Clipped, phi: FeatureMap, state: State
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sums of a clipped term for the next tokens of a stream: near keys are kept, those beyond reach are summed."""
    if term.x.shape[-1] > 1 or term.outside:
        raise ValueError("state: expected clipped terms of a sequence without class tokens, whose far keys share one sum")
    rows, positions, far = values, term.y, state["far"]
    if (near := state["near"]) is not None and (places := state["places"]) is not None:
        rows = torch.cat((near.expand(*rows.shape[:-2], *near.shape[-2:]), rows), -2)
        positions = torch.cat((places.expand(*positions.shape[:-2], *places.shape[-2:]), positions), -2)
    score = _clipped_scores(q.to(values.dtype), term, phi)
    batch = broadcast(score.shape[:-2], rows.shape[:-2])
    wide = rows.expand(*batch, *rows.shape[-2:])
    total = clipped.clipped(score.expand(*batch, *score.shape[-2:]), wide, term.x, positions, term.reach, causal=True)
    total = total if far is None else total + score[..., :1] * far.unsqueeze(-2)
    gone = rows[..., : max(0, rows.shape[-2] - term.reach), :].sum(-2)
    kept = {"near": rows[..., -term.reach :, :].clone(), "places": positions[..., -term.reach :, :].clone()}
    return total, kept | {"far": gone if far is None else far + gone}


def _segmented(
    g: tuple[Tensor, Tensor] | None, ids: Tensor, q: Tensor, k: Tensor, state: State | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Log decays of queries and keys that fall by a jump from segment to segment, and that of the token before: zero.

    Within a segment differences are those of g. Queries are aligned with the last keys.
    """
    t, s = q.shape[-2], k.shape[-2]
    previous = state["segment"] if state is not None else None
    previous = ids[..., :1] if previous is None else previous[..., None]
    leading = broadcast(previous.shape[:-1], ids.shape[:-1])
    ids = ids.expand(*leading, s)
    new = ids != torch.cat((previous.expand(*leading, 1), ids[..., :-1]), -1)
    still = torch.zeros(max(t, s), dtype=torch.float64, device=q.device)
    query, key = g or (still[:t], still[:s])
    before = state["decay"] if state is not None else None
    before = key[..., :1] if before is None else before[..., None]
    first, steps = key[..., :1] - before, key.diff(dim=-1)
    step = torch.cat((first, steps.expand(*first.shape[:-1], s - 1)), -1)
    if not torch.compiler.is_compiling() and ids.device.type == "cpu":
        distinct = (ids.sort(-1).values.diff(dim=-1) != 0).sum(-1)
        if (new[..., 1:].sum(-1) > distinct).any():
            raise ValueError("segment_ids: expected tokens of one id next to each other, got an id that returns")
        if (torch.where(new.unsqueeze(-2), 0, step) > 0).any():
            raise ValueError("decay: expected log decays that do not increase along a segment; sort tokens by position")
    key_jumps = torch.where(new.unsqueeze(-2), -JUMP, step).cumsum(-1)
    query_jumps = key_jumps[..., s - t :] + (query - key[..., s - t :])
    return (query_jumps, key_jumps), torch.zeros_like(key_jumps[..., -1])


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    decay: DecayPair = None,
    scale: float | None = None,
    causal: bool = False,
    terms: Sequence[Term] | None = None,
    locality: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: SegmentPair = None,
    state: State | None = None,
    return_state: bool = False,
) -> Any:
    """Attention with logits scale * <rho(x_i) q_i, rho(x_j) k_j> + g_i - g_j, through `scaled_dot_product_attention`.

    Args:
        q: Queries ``[*b h t d]``, any floating dtype.
        k: Keys ``[*b h s d]``.
        v: Values ``[*b h s e]``.
        isometry: rho at the positions of q and k; a pair for cross-attention.
        decay: g, a log decay ``[*b h t]`` in float64; a pair for cross-attention. Without `causal` -|g_i - g_j| is added.
        scale: d^-1/2 by default, d being the width of q before rho.
        causal: A query takes part with keys up to its own index; the last query is aligned with the last key.
        terms: Relative terms: scores of the query's or the key's side are scaled and added, numbers are added as they are,
            rows of the value's side are added to values. Time and memory are quadratic, as those of softmax itself.
        locality: Factors ``[*b t s]`` of scale * <rho(x_i) q_i, rho(x_j) k_j> (APE, section 4.2).
        mask: Keys that take part, bool ``[*b s]``.
        segment_ids: Which of several packed sequences each key belongs to, integers ``[*b s]``; tokens of others do not
            take part. Queries have the ids of the last keys, or of their own where this is a pair.
        state: The tokens before, of a causal stream; ``State()`` at its start. Positions are those in the whole stream.
        return_state: Also return the state after these tokens.

    Fewer heads of keys and values than of queries are shared by groups of neighbouring query heads; isometry, decay and
    terms are then those of the keys' heads.

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys. With `return_state` a pair of that and the `State`.

    Raises:
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work.

    Source: RoFormer, Eq. 2, 5-7, 10 and 16; Algebraic Positional Encodings, sections 3 and 4.2.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16)
        >>> softmax_attention(q, k, v, causal=True).shape
        torch.Size([2, 4, 10, 16])
    """
    expect_state(state)
    terms = () if terms is None else terms
    groups = groups_of(q, k, v)
    if groups > 1:
        options = {"isometry": isometry, "decay": decay, "scale": scale, "causal": causal, "terms": terms}
        options |= {"locality": locality, "mask": mask, "segment_ids": segment_ids, "state": state}
        return _by_group(softmax_attention, groups, q, k, v, options, return_state)
    seen = 0 if state is None or (keys := state["keys"]) is None else keys.shape[-2]
    rho_q, rho_k = check(q, k, v, isometry, mask, terms, seen)
    g = decays_of(decay, q, k)
    check_segments(segment_ids, q, k, broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    ids = segment_ids if isinstance(segment_ids, tuple) or segment_ids is None else (segment_ids, segment_ids)
    check_stream(state, return_state, causal, q, k)
    after = None
    if state is not None and state.in_place:
        raise ValueError("state: expected State() for softmax attention, whose cache grows, got one to update in place")
    if state is not None or return_state:
        given = {"decayed": g is not None, "packed": ids is not None}
        kind = kind_of("softmax", q, v, rho_k, None, None, terms, **given)
        k, v, mask, g, ids, after = _cached(rho_k(k), v, mask, g, ids, state or State(), kind)
        rho_k = Identity()
    out = _softmax(q, k, v, (rho_q, rho_k), g, scale, causal, terms, locality, mask, ids)
    return (out, after) if return_state else out


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    isometry: tuple[TokenMap, TokenMap],
    g: tuple[Tensor, Tensor] | None,
    scale: float | None,
    causal: bool,
    terms: Sequence[Term],
    locality: Tensor | None,
    mask: Tensor | None,
    ids: tuple[Tensor, Tensor] | None,
) -> Tensor:
    (rho_q, rho_k), t, s = isometry, q.shape[-2], k.shape[-2]
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if locality is not None and not isinstance(locality, Tensor):
        raise TypeError(f"locality: expected factors [*b {t} {s}], got {type(locality).__name__}")
    if locality is not None and not (locality.shape[-2:] == (t, s) and broadcasts(locality.shape[:-2], batch[:-1])):
        raise ValueError(f"locality: expected [*b {t} {s}], got {list(locality.shape)}")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if q.dtype == torch.float16 and not (rho_q.isometric and rho_k.isometric):  # its factors may leave float16
        wide = q.float(), k.float(), v.float()
        return _softmax(*wide, isometry, g, scale, causal, terms, locality, mask, ids).to(q.dtype)
    if g is None and mask is None and ids is None and len(terms) == 0 and locality is None and (not causal or t == s):
        return F.scaled_dot_product_attention(rho_q(q), rho_k(k), v, is_causal=causal, scale=scale)
    if mask is not None:
        k, v = (torch.where(mask[..., None, :, None], x, 0) for x in (k, v))
    with full_precision(q.device):
        bias = _bias(q, k, g, terms, scale, causal)
    keep = torch.ones(t, s, dtype=torch.bool, device=q.device)
    keep = keep.tril(s - t) if causal else keep
    keep = keep if mask is None else keep & mask[..., None, None, :]
    keep = keep if ids is None else keep & (_of_queries(ids, t)[..., :, None] == ids[1][..., None, :]).unsqueeze(-3)
    alive = keep.any(-1, keepdim=True)
    # a row without keys attends everywhere, which keeps its gradient finite, and is then set to zero
    bias = bias.clamp_min(torch.finfo(q.dtype).min).masked_fill(~keep, -torch.inf).masked_fill(~alive, 0)
    of_values = [term for term in terms if term.side == "value"]
    if locality is None and not of_values:
        bias = bias.to(q.dtype).expand(*batch, t, s)
        out = F.scaled_dot_product_attention(rho_q(q), rho_k(k), v, attn_mask=bias, scale=scale)
        return torch.where(alive, out, 0)
    wide = torch.promote_types(q.dtype, torch.float32)
    with full_precision(q.device):
        logits = scale * rho_q(q.to(wide)) @ rho_k(k.to(wide)).mT
        logits = logits if locality is None else logits * locality.unsqueeze(-3).to(wide)
        weight = (logits + bias.to(wide)).softmax(-1)
        out = sum((term.values(weight) for term in of_values), weight @ v.to(wide))
    return torch.where(alive, out, 0).to(q.dtype)


def _of_queries(ids: tuple[Tensor, Tensor], t: int) -> Tensor:
    """The segments of queries: their own, or those of the last keys."""
    return ids[0][..., ids[0].shape[-1] - t :] if ids[0] is ids[1] else ids[0]


def _cached(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    g: tuple[Tensor, Tensor] | None,
    ids: tuple[Tensor, Tensor] | None,
    state: State,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None, State]:
    """Keys with positions and all that belongs to them, of the stream so far and of its next tokens."""
    batch, count = broadcast(k.shape[:-2], v.shape[:-2]), k.shape[-2]
    state.expect(kind, batch)
    if mask is not None or state["mask"] is not None:
        mask = torch.ones(count, dtype=torch.bool, device=k.device) if mask is None else mask
        if state["mask"] is None and (old := state["keys"]) is not None:
            mask = torch.cat((mask.new_ones(*mask.shape[:-1], old.shape[-2]), mask), -1)
    new = {
        "keys": k.expand(*batch, *k.shape[-2:]),
        "values": v.expand(*batch, *v.shape[-2:]),
        "mask": None if mask is None else mask.expand(*batch[:-1], mask.shape[-1]),
        "decays": None if g is None else g[1].expand(*batch, count),
        "segments": None if ids is None else ids[1].expand(*batch[:-1], count),
    }
    joined = {}
    for name, x in new.items():
        old, axis = state[name], -2 if name in ("keys", "values") else -1
        joined[name] = x if x is None or old is None else torch.cat((old, x), axis)
    after = state.next(kind, **joined)
    g = None if g is None else (g[0], joined["decays"])
    ids = None if ids is None else (ids[0], joined["segments"])
    return joined["keys"], joined["values"], joined["mask"], g, ids, after


def _bias(
    q: Tensor, k: Tensor, g: tuple[Tensor, Tensor] | None, terms: Sequence[Term], scale: float, causal: bool
) -> Tensor:
    """What is added to logits, ``[*b h t s]`` or what broadcasts to it: decays in float64 and relative terms."""
    bias = torch.zeros((), dtype=torch.float64, device=q.device)
    if g is not None:
        difference = g[0][..., :, None] - g[1][..., None, :]
        bias = difference if causal else -difference.abs()
    for term in terms:
        if term.side != "value":
            wide = torch.promote_types(q.dtype, torch.float32)
            bias = bias + (1 if term.side == "none" else scale) * term.scores(q.to(wide), k.to(wide))
    return bias


@dataclass(frozen=True)
class _Features:
    """phi, then rho: features of the numerator, and phi's alone where the denominator takes them as they are.

    Values are features, too, of the trivial maps.
    """

    rho: TokenMap
    phi: FeatureMap
    parts: int
    dtype: torch.dtype
    kept: Tensor | None = None  # of keys and values, [*b 1 s 1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.rho.tensors(), *(() if self.kept is None else (self.kept,))

    @property
    def direct(self) -> bool:
        return self.phi in IN_PLACE and self.rho.linear

    def part(self, tensors: Sequence[Tensor], place: Place) -> tuple[Tensor, ...]:
        rho, kept = self._split(tensors)
        return *rho.part(place).tensors(), *(place.of(mask, -3, -2) for mask in kept)

    def _split(self, tensors: Sequence[Tensor]) -> tuple[TokenMap, Sequence[Tensor]]:
        count = len(tensors) - (self.kept is not None)
        return self.rho.replace(tensors[:count]), tensors[count:]

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rho, kept = self._split(part)
        x = torch.where(kept[0], x, 0) if kept else x  # what a masked token holds must not reach gradients either
        plain = self.phi(x.to(self.dtype))
        out = (rho(plain), plain)[: self.parts]
        return tuple(torch.where(kept[0], y, 0) for y in out) if kept else out

    def at(self, place: Place) -> "_Features":
        if self.kept is None and isinstance(self.rho, Identity):
            return self
        kept = None if self.kept is None else place.of(self.kept, -3, -2)
        if kept is not None and kept.device.type == "cpu" and place.tokens.start is not None and kept.all():
            kept = None
        return _Features(self.rho.part(place), self.phi, self.parts, self.dtype, kept)

    def formula(self) -> Formula | None:
        first, last = (self.rho.first, self.rho.second) if type(self.rho) is Chain else (Identity(), self.rho)
        if type(last) is Reflection and type(first) is Identity:
            first, last = last, first
        if type(first) not in (Identity, Reflection) or self.dtype != torch.float32:
            return None
        normal = first.normal if type(first) is Reflection else None
        own, phi = self.parts == 2, _NAMES[self.phi]
        if type(last) is Identity:
            known = Formula(phi, "none", None, normal, self.kept, own)
        elif type(last) is Rotation and last.table.dtype == torch.float32:
            known = Formula(phi, "lift" if last.lifted else "rotation", last.table, normal, self.kept, own)
        elif type(last) is Gather:
            known = Formula(phi, "gather", last.index, normal, self.kept, own)
        else:
            return None
        return known if normal is None or normal.dtype == torch.float32 else None

    def write(self, x: Tensor, room: Room) -> tuple[Tensor, ...]:
        plain = room("plain", *x.shape)
        IN_PLACE[self.phi].write(x.to(self.dtype), plain, room.spare("scratch", *x.shape))
        self._drop(plain)
        return (self.rho.apply(plain).to(self.dtype), plain)[: self.parts]

    def pull(self, grads: Sequence[Tensor], room: Room) -> tuple[Tensor, Tensor | None]:
        grad = self.rho.adjoint(grads[0]).to(self.dtype)
        for other in grads[1:]:
            grad = grad.add_(other)
        grad = self._drop(grad)
        return grad, None if self.phi is identity else IN_PLACE[self.phi].slope(room("plain", *grad.shape))

    def _drop(self, x: Tensor) -> Tensor:
        """Zero where keys take no part, in place, whatever was there."""
        if self.kept is not None:
            dropped = ~self.kept[..., 0, :, 0].expand(*x.shape[:-3], x.shape[-2])
            x.movedim(-3, -1)[dropped] = 0  # faster than masked_fill where few are
        return x


def _by_group(
    attention: Any, groups: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], return_state: bool
) -> Any:
    """Attention with the groups of query heads as one more axis of the batch."""
    q = q.unflatten(-3, (-1, groups)).movedim(-3, 0)
    found = attention(q, k, v, **options, return_state=return_state)
    out, *after = found if return_state else (found,)
    out = out.movedim(0, -3).flatten(-4, -3)
    return (out, *after) if return_state else out
