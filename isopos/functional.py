"""Linear and softmax attention with positions: unpack values into tensors, fuse what is known, apply the rest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import full_precision
from isopos.feature_maps import FEATURE_MAPS, Favor, FeatureMap, sides
from isopos.isometries import Identity, Isometry
from isopos.ops import clipped, linear
from isopos.terms import Clipped, Term

__all__ = ["linear_attention", "softmax_attention"]

IsometryPair = Isometry | tuple[Isometry, Isometry] | None
DecayPair = Tensor | tuple[Tensor, Tensor] | None


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
    terms: Sequence[Term] = (),
    mask: Tensor | None = None,
) -> Tensor:
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
            Decay, terms and mask weigh in all. A vanishing one is clamped to a magnitude of 1e-6.
        causal: A query takes part with keys up to its own index; the last query is aligned with the last key.
        terms: Added to the weights: `Clipped` ones of side "query", <phi(q_i), phi(row)>, in linear time. No others
            factor: a bias of logits is a factor of weights that depends on both tokens.
        mask: Keys that take part, bool ``[*b s]`` (True takes part, as in `scaled_dot_product_attention`).

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys.

    Raises:
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work.

    Source: Katharopoulos et al. 2020, Eq. 9; RoFormer, Eq. 19; LRPE, Eq. 13 and 38; PermuteFormer, Eq. 11; Horn et al. 2021
    for terms.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
        >>> linear_attention(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True).shape
        torch.Size([2, 4, 100, 16])
    """
    rho_q, rho_k = _check(q, k, v, isometry, mask, terms)
    g = _decays(decay, q, k)
    _check_order(g, causal)
    if denominator not in ("plain", "encoded", "complex", None):
        raise ValueError(f"denominator: expected 'plain', 'encoded', 'complex' or None, got {denominator!r}")
    if denominator == "complex" and q.shape[-1] % 2:
        raise ValueError(
            f"denominator: expected an even number of features for 'complex', which pairs them, got {q.shape[-1]}"
        )
    _check_factors(terms, decay, denominator)
    t, s = q.shape[-2], k.shape[-2]
    if g is not None and not causal and t != s:
        raise ValueError(f"decay: without causal, expected as many queries as keys, got {t} and {s}")
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if 0 in (*batch, t, s):
        return q.new_zeros(*batch, t, v.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    unmoved = isinstance(rho_q, Identity) and isinstance(rho_k, Identity)
    parts = 2 if denominator == "plain" and not unmoved else 1
    keys_kept = None if mask is None else mask[..., None, :, None]
    divided = denominator is not None
    phi_q, phi_k = (None, None) if feature_map is None else sides(feature_map)
    loads = (
        _Features(rho_q, phi_q, parts, wide),
        _Features(rho_k, phi_k, parts, wide, keys_kept),
        _Values(parts, divided, wide, keys_kept),
    )
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    known = feature_map is None or feature_map in FEATURE_MAPS.values() or isinstance(feature_map, Favor)
    with full_precision(q.device):
        if denominator == "complex":
            return linear.divide_complex(_complex_sums(q, k, v, loads, g, causal)).to(q.dtype)
        divides = divided and len(terms) == 0
        out = linear.linear(q, k, v, loads, g, causal=causal, divided=divides, fuse=known)  # another may hold parameters
        for term in terms:
            assert isinstance(term, Clipped)
            out = out + _clipped_sums(q, v, term, feature_map, loads[2], causal)
        if terms and divided:
            out = linear.divide(out)
    return out.to(q.dtype)


def _check_factors(terms: Sequence[Term], decay: DecayPair, denominator: str | None) -> None:
    """ValueError where what comes together has no sum in linear time."""
    for term in terms:
        if not isinstance(term, Clipped) or term.side != "query":
            raise ValueError(
                f"terms: expected clipped terms of the query's side, got {type(term).__name__} of side {term.side!r}, "
                "which adds to logits and does not factor; use softmax_attention"
            )
    if terms and decay is not None:
        raise ValueError("decay: expected none beside clipped terms, whose far keys share one sum, got one")
    if terms and denominator == "complex":
        raise ValueError("denominator: expected 'plain', 'encoded' or None beside terms, got 'complex'")


def _complex_sums(q: Tensor, k: Tensor, v: Tensor, loads: Any, g: Any, causal: bool) -> Tensor:
    """Real and imaginary sums over real and imaginary denominators ``[2 *b h t e+1]``.

    <i q, k>, the real part of conj(i q) k, is the imaginary part of conj(q) k.
    """
    query, *rest = (load(x, load.part(load.tensors, 0, x.shape[-2])) for load, x in zip(loads, (q, k, v), strict=True))
    pairs = query[0].unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    keys, values = (x[0].expand(2, *x[0].shape) for x in rest)
    both = torch.stack((query[0], turned))
    return linear.linear(both, keys, values, linear.READY, g, causal=causal, divided=False, fuse=True)


def _clipped_sums(q: Tensor, v: Tensor, term: Clipped, phi: FeatureMap | None, load: "_Values", causal: bool) -> Tensor:
    """The sums of a clipped term, and of its ones."""
    features, rows = (x.to(load.dtype) for x in (q, term.table))
    if phi is not None:
        features, rows = (side(x) for side, x in zip(sides(phi), (features, rows), strict=True))
    values = torch.cat(load(v, load.tensors), -1)
    return clipped.clipped(features @ rows.mT, values, term.x, term.y, term.reach, outside=term.outside, causal=causal)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    decay: DecayPair = None,
    scale: float | None = None,
    causal: bool = False,
    terms: Sequence[Term] = (),
    locality: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
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

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys.

    Raises:
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work.

    Source: RoFormer, Eq. 2, 5-7, 10 and 16; Algebraic Positional Encodings, sections 3 and 4.2.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16)
        >>> softmax_attention(q, k, v, causal=True).shape
        torch.Size([2, 4, 10, 16])
    """
    rho_q, rho_k = _check(q, k, v, isometry, mask, terms)
    g = _decays(decay, q, k)
    t, s = q.shape[-2], k.shape[-2]
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if locality is not None and not isinstance(locality, Tensor):
        raise TypeError(f"locality: expected factors [*b {t} {s}], got {type(locality).__name__}")
    if locality is not None and not (locality.shape[-2:] == (t, s) and _broadcasts(locality.shape[:-2], batch[:-1])):
        raise ValueError(f"locality: expected [*b {t} {s}], got {list(locality.shape)}")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if q.dtype == torch.float16 and not (rho_q.isometric and rho_k.isometric):  # its factors may leave float16
        arguments = {"decay": decay, "scale": scale, "causal": causal, "terms": terms, "locality": locality, "mask": mask}
        return softmax_attention(q.float(), k.float(), v.float(), isometry=(rho_q, rho_k), **arguments).to(q.dtype)
    if g is None and mask is None and len(terms) == 0 and locality is None and (not causal or t == s):
        return F.scaled_dot_product_attention(rho_q(q), rho_k(k), v, is_causal=causal, scale=scale)
    if mask is not None:
        k, v = (torch.where(mask[..., None, :, None], x, 0) for x in (k, v))
    with full_precision(q.device):
        bias = _bias(q, k, g, terms, scale, causal)
    keep = torch.ones(t, s, dtype=torch.bool, device=q.device)
    keep = keep.tril(s - t) if causal else keep
    keep = keep if mask is None else keep & mask[..., None, None, :]
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
    """phi, then rho: features of the numerator, and phi's alone where the denominator takes them as they are."""

    rho: Isometry
    phi: FeatureMap | None
    parts: int
    dtype: torch.dtype
    kept: Tensor | None = None  # of keys, [*b 1 s 1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.rho.tensors(), *(() if self.kept is None else (self.kept,))

    def part(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        rho, kept = self._split(tensors)
        return *rho.tokens(start, stop).tensors(), *(mask[..., start:stop, :] for mask in kept)

    def _split(self, tensors: Sequence[Tensor]) -> tuple[Isometry, Sequence[Tensor]]:
        count = len(tensors) - (self.kept is not None)
        return self.rho.replace(tensors[:count]), tensors[count:]

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rho, kept = self._split(part)
        plain = x.to(self.dtype) if self.phi is None else self.phi(x.to(self.dtype))
        out = (rho(plain), plain)[: self.parts]
        return tuple(torch.where(kept[0], y, 0) for y in out) if kept else out


@dataclass(frozen=True)
class _Values:
    """Values, and the ones whose sum is the denominator: a column of its own sum, or one more of the values'."""

    parts: int
    divided: bool
    dtype: torch.dtype
    kept: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.kept is None else (self.kept,)

    def part(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(mask[..., start:stop, :] for mask in tensors)

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x, ones = x.to(self.dtype), torch.ones_like(x[..., :1], dtype=self.dtype)
        x, ones = (torch.where(part[0], a, 0) for a in (x, ones)) if part else (x, ones)
        return (x,) if not self.divided else (x, ones) if self.parts == 2 else (torch.cat((x, ones), -1),)


def _check(
    q: Tensor, k: Tensor, v: Tensor, isometry: IsometryPair, mask: Tensor | None, terms: Sequence[Term]
) -> tuple[Isometry, Isometry]:
    """The isometries of queries and keys; ValueError where the arguments do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3 or not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating tensor [*b h t d], got {x.dtype} {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} as q, got {x.dtype} on {x.device}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected {q.shape[-1]} features as q, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: expected {k.shape[-2]} tokens as k, got {v.shape[-2]}")
    try:
        batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v: expected leading dimensions [*b h] that broadcast, got {shapes}") from None
    if mask is not None:
        if mask.dtype != torch.bool or mask.ndim < 1 or mask.shape[-1] != k.shape[-2]:
            raise ValueError(f"mask: expected bool [*b {k.shape[-2]}], got {mask.dtype} {list(mask.shape)}")
        if not _broadcasts(mask.shape[:-1], batch[:-1]):
            raise ValueError(
                f"mask: expected leading dimensions that broadcast to {list(batch[:-1])}, got {list(mask.shape)}"
            )
    for term in terms:
        _check_term(term, q, k, v, batch)
    rho_q, rho_k = isometry if isinstance(isometry, tuple) else (isometry, isometry)
    rho_q, rho_k = rho_q or Identity(), rho_k or Identity()
    for name, rho, x in (("q", rho_q, q), ("k", rho_k, k)):
        if not isinstance(rho, Isometry):
            raise TypeError(f"isometry: expected what an encoding returns at positions, got {type(rho).__name__}")
        rho.check(x, name)
        if not _broadcasts(rho.leading, x.shape[:-2]):
            raise ValueError(
                f"isometry: expected leading dimensions [*b heads] that broadcast to {list(x.shape[:-2])} of {name}, "
                f"got {list(rho.leading)}; build the encoding for these heads"
            )
    return rho_q, rho_k


def _check_term(term: Term, q: Tensor, k: Tensor, v: Tensor, batch: torch.Size) -> None:
    """ValueError where a relative term does not fit queries and keys."""
    if not isinstance(term, Term):
        raise TypeError(f"terms: expected what a relative bias returns at positions, got {type(term).__name__}")
    width = {"none": None, "value": v.shape[-1]}.get(term.side, q.shape[-1])
    if len(term.table) not in (1, *batch[-1:]) or width not in (None, term.table.shape[-1]):
        raise ValueError(
            f"terms: expected a table of {batch[-1]} heads{'' if width is None else f' and {width} features'}, "
            f"got {list(term.table.shape)}"
        )
    pairs = (q.shape[-2], k.shape[-2])
    if term.shape[-2:] != pairs or not _broadcasts(term.shape[:-2], batch[:-1]):
        raise ValueError(
            f"terms: expected positions of {list(batch[:-1])} samples, {pairs[0]} queries and {pairs[1]} keys, "
            f"got {list(term.shape)}; evaluate the scheme at the positions of both"
        )


def _decays(decay: DecayPair, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """The log decays of queries and keys; ValueError where they do not fit."""
    if decay is None:
        return None
    pair = decay if isinstance(decay, tuple) else (decay, decay)
    for name, g, x in (("queries", pair[0], q), ("keys", pair[1], k)):
        if not isinstance(g, Tensor):
            raise TypeError(f"decay: expected a tensor of log decays, got {type(g).__name__}")
        if g.dtype != torch.float64:
            raise ValueError(f"decay: expected float64, whose differences stay exact at any length, got {g.dtype}")
        if g.ndim < 1 or g.shape[-1] != x.shape[-2] or not _broadcasts(g.shape[:-1], x.shape[:-2]):
            expected = [*x.shape[:-2], x.shape[-2]]
            raise ValueError(f"decay: expected {expected} of the {name}, or what broadcasts to it, got {list(g.shape)}")
    return pair


def _check_order(pair: tuple[Tensor, Tensor] | None, causal: bool) -> None:
    """ValueError where a weight would grow with distance; not while compiling, nor on a GPU, which would have to wait."""
    if pair is None or torch.compiler.is_compiling() or pair[0].device.type != "cpu":
        return
    query, key = pair
    if any((g.diff(dim=-1) > 0).any() for g in pair):
        raise ValueError("decay: expected log decays that do not increase along tokens; sort tokens by position")
    if query is key:
        return
    count = min(query.shape[-1], key.shape[-1])
    query, key = query[..., query.shape[-1] - count :], key[..., key.shape[-1] - count :]
    if (query > key).any() or (not causal and (key[..., 1:] > query[..., :-1]).any()):
        where = "not before" if causal else "between"
        raise ValueError(
            f"decay: expected queries {where} the keys of their index{'' if causal else ' and the next'}, counted from the "
            "end, or weights would grow with distance; softmax_attention takes any positions"
        )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))
