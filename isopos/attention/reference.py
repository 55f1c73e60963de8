"""Attention by its definition: every weight is formed. Tests and benchmarks compare the fast functions with it.

    y_i = o_i (sum_j w_ij (c_j v_j + row_ij) / sum_j w_ij)

    linear:   w_ij = (<rho_i phi(q_i), rho_j phi(k_j)> + term_ij) exp(-|g_i - g_j|), causal ones exp(g_i - g_j)
    softmax:  w_ij = exp(scale <rho_i q_i, rho_j k_j> l_ij + term_ij + attn_mask_ij - |g_i - g_j|)

c_j and o_i are the maps of values and of outputs in `transport`. Sums are over the keys j that take part: keys that are not
masked, in the query's segment, if causal not after the query, and less than a window away from it; the last query is aligned
with the last key. A plain denominator sums weights without rho; a complex one treats pairs of features as complex numbers.
Time and memory are quadratic, the dtype of the inputs is kept, and every operation is differentiable any number of times.
Unmasked inputs must be finite: zero times NaN is NaN. Arguments are as in `linear_attention` and `softmax_attention`,
unchecked.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isopos.exact import cast_down
from isopos.feature_maps import Phi, identity, sides, undivided
from isopos.maps import Identity, TokenMap, pair
from isopos.ops.householder import Factors, naive_scores
from isopos.ops.linear.division import EPS
from isopos.phases import Phase, cumulative, separated, with_phases
from isopos.terms import Clipped, DistanceKernel, Numbers, Term

Pair = Tensor | tuple[Tensor, Tensor] | None  # a pair for queries and keys, or one value for both
Maps = TokenMap | tuple[TokenMap | None, TokenMap | None] | None


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: Maps = None,
    feature_map: Phi | None = None,
    decay: Pair = None,
    phases: Sequence[Phase] = (),
    denominator: str | None = "plain",
    causal: bool = False,
    terms: Sequence[Term] = (),
    mask: Tensor | None = None,
    window: int | None = None,
    segment_ids: Pair = None,
    transport: tuple[TokenMap, TokenMap] | None = None,
    product: Factors | None = None,
) -> Tensor:
    """Linear attention of q ``[*b h t d]``, k ``[*b h s d]`` and v ``[*b h s e]``: ``[*b h t e]``.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
        >>> torch.allclose(linear(q, k, v, causal=True)[..., 0, :], v[..., 0, :])
        True
    """
    k, v = (_without(x, mask) for x in (k, v))
    v, outward = (v, Identity()) if transport is None else (transport[0](v), transport[1])
    (rho_q, rho_k), decay, of_phases = _mapped(isometry, decay, phases, q, k, mask)
    product = product or of_phases
    phi = feature_map or identity
    phi_q, phi = sides(phi if divides_out(denominator, rho_q, rho_k) else undivided(phi))
    q, k = phi_q(q), _without(phi(k), mask)
    part = _takes_part(q, k, causal, mask, window, segment_ids)
    factor = part.to(q.dtype)
    if decay is not None:
        exponents = _differences(decay)  # on the CPU if the device has no float64
        exponents = exponents.tril(k.shape[-2] - q.shape[-2]) if causal else -exponents.abs()
        factor = cast_down(torch.where(part.to(exponents.device), exponents, -torch.inf).exp(), q.dtype, q.device)
    if denominator == "complex":
        a, b = ((x[..., ::2], x[..., 1::2]) for x in (rho_q(q), rho_k(k)))
        real = (a[0] @ b[0].mT + a[1] @ b[1].mT) * factor
        imaginary = (a[0] @ b[1].mT - a[1] @ b[0].mT) * factor
        x, y = (weight.sum(-1, keepdim=True) for weight in (real, imaginary))
        return outward((real @ v * x + imaginary @ v * y) / (x.square() + y.square()).clamp_min(EPS**2))
    added = sum(scores(term, q, k, phi) for term in terms)
    weight = (_scores(rho_q(q), rho_k(k), product) + added) * factor
    if denominator is None:
        return outward(weight @ v)
    total = (weight if denominator == "encoded" else (q @ k.mT + added) * factor).sum(-1, keepdim=True)
    return outward(weight @ v / torch.where(total.abs() < EPS, torch.full_like(total, EPS).copysign(total), total))


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: Maps = None,
    decay: Pair = None,
    phases: Sequence[Phase] = (),
    scale: float | None = None,
    causal: bool = False,
    terms: Sequence[Term] = (),
    locality: Tensor | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    segment_ids: Pair = None,
    transport: tuple[TokenMap, TokenMap] | None = None,
) -> Tensor:
    """Softmax attention, with the shapes of `linear`. A query without keys has a zero row."""
    k, v = (_without(x, mask) for x in (k, v))
    v, outward = (v, Identity()) if transport is None else (transport[0](v), transport[1])
    (rho_q, rho_k), decay, product = _mapped(isometry, decay, phases, q, k, mask)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    logits = scale * _scores(rho_q(q), rho_k(k), product)
    if locality is not None:
        logits = logits * locality[..., None, :, :]
    for term in terms:
        if term.side != "value":
            logits = logits + (1 if term.side == "none" else scale) * scores(term, q, k)
    if decay is not None:
        logits = logits + cast_down(-_differences(decay).abs(), logits.dtype, logits.device)
    part = _takes_part(q, k, causal, mask, window, segment_ids)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        part = part & attn_mask
    elif attn_mask is not None:
        logits = logits + attn_mask
    logits = torch.where(part, logits, -torch.inf)
    if logits.shape[-1]:
        logits = logits - logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    weight = logits.exp()
    weight = weight / weight.sum(-1, keepdim=True).clamp_min(0.5)  # at least 1 with a key: the largest weight is exp(0)
    return outward(weight @ v + sum((weight[..., None] * rows(term)).sum(-2) for term in terms if term.side == "value"))


def _mapped(isometry: Maps, decay: Pair, phases: Sequence[Phase], q: Tensor, k: Tensor, mask: Tensor | None) -> Any:
    """Maps and log decays of queries and keys, including content-dependent phases, and Householder-like maps between."""
    maps: Any = tuple(rho or Identity() for rho in pair(isometry))
    decay = None if decay is None else pair(decay)
    sums, product = separated(phases)
    maps, decay = with_phases(sums, cumulative(sums, k, mask), maps, decay, q) if sums else (maps, decay)
    return maps, decay, None if product is None else product(k, mask)


def _scores(q: Tensor, k: Tensor, product: Factors | None) -> Tensor:
    return q @ k.mT if product is None else naive_scores(q, k, product)


def divides_out(denominator: str | None, rho_q: TokenMap, rho_k: TokenMap) -> bool:
    """Whether a factor per query, and a common factor of all keys, cancel in linear attention's division."""
    return denominator is not None and all(rho.isometric or rho.linear for rho in (rho_q, rho_k))


DEFINITIONS: dict[str, Callable[..., Tensor]] = {"linear": linear, "softmax": softmax}


def rows(term: Term, phi: Phi = identity) -> Tensor:
    """The row of a term's table for each pair of tokens: ``[*b h t s d]``, or ``[*b h t s]`` for numbers."""
    if isinstance(term, Numbers):
        return term.table
    if isinstance(term, DistanceKernel):
        return term.numbers()
    index = _clipped(term) if isinstance(term, Clipped) else term.index()
    return phi(term.table)[:, index].movedim(0, -3 if term.side == "none" else -4)


def scores(term: Term, q: Tensor, k: Tensor, phi: Phi = identity) -> Tensor:
    """The score that a term adds to each pair: ``[*b h t s]``."""
    table = rows(term, phi)
    if term.side == "none":
        return table
    return ((q[..., :, None, :] if term.side == "query" else k[..., None, :, :]) * table).sum(-1)


def _takes_part(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, window: int | None, segment_ids: Pair = None
) -> Tensor:
    """Mask of keys for each query: bool ``[t s]`` or ``[*b 1 t s]``."""
    t, s = q.shape[-2], k.shape[-2]
    offset = torch.arange(s, device=q.device) - torch.arange(s - t, s, device=q.device)[:, None]
    part = offset <= 0 if causal else offset == offset
    part = part if window is None else part & (offset.abs() < window)
    if segment_ids is not None:
        of_queries, of_keys = pair(segment_ids)
        of_queries = of_queries[..., of_queries.shape[-1] - t :]
        part = part & (of_queries[..., None] == of_keys[..., None, :]).unsqueeze(-3)
    return part if mask is None else part & mask[..., None, None, :]


def _without(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with zeros at masked tokens."""
    return x if mask is None else torch.where(mask[..., None, :, None], x, 0)


def _differences(decay: Pair) -> Tensor:
    g_q, g_k = pair(decay)
    return g_q[..., :, None] - g_k[..., None, :]


def _clipped(term: Clipped) -> Tensor:
    """Buckets of clipped offsets.

    Offsets are rounded (halves up) and clipped on each axis, and are digits in base 2R + 1; class tokens have two more
    buckets.
    """
    offset, base = term.y[..., None, :, :] - term.x[..., :, None, :], 2 * term.reach + 1
    digit = (offset.double() + 0.5).floor().clamp(-term.reach, term.reach).long() + term.reach
    index = (digit * base ** torch.arange(offset.shape[-1]).flip(0)).sum(-1)
    index[..., : term.outside, :] = base ** offset.shape[-1] + 1
    index[..., : term.outside] = base ** offset.shape[-1]
    return index
