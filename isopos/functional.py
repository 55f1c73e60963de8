"""Linear and softmax attention with positions: unpack values into tensors, fuse what is known, apply the rest first."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import full_precision
from isopos.feature_maps import FEATURE_MAPS, FeatureMap
from isopos.isometries import Identity, Isometry
from isopos.ops import linear

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
            None by nothing. Decay and mask weigh in both. A vanishing one is clamped to a magnitude of 1e-6.
        causal: A query takes part with keys up to its own index; the last query is aligned with the last key.
        mask: Keys that take part, bool ``[*b s]`` (True takes part, as in `scaled_dot_product_attention`).

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys.

    Raises:
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work.

    Source: Katharopoulos et al. 2020, Eq. 9; RoFormer, Eq. 19; LRPE, Eq. 13 and 38; PermuteFormer, Eq. 11.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
        >>> linear_attention(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True).shape
        torch.Size([2, 4, 100, 16])
    """
    rho_q, rho_k = _check(q, k, v, isometry, mask)
    g = _decays(decay, q, k)
    _check_order(g)
    if denominator not in ("plain", "encoded", None):
        raise ValueError(f"denominator: expected 'plain', 'encoded' or None, got {denominator!r}")
    t, s = q.shape[-2], k.shape[-2]
    if g is not None and not causal and t != s:
        raise ValueError(f"decay: without causal, expected as many queries as keys, got {t} and {s}")
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if 0 in (*batch, t, s):
        return q.new_zeros(*batch, t, v.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    unmoved = isinstance(rho_q, Identity) and isinstance(rho_k, Identity)
    parts = {None: 1, "encoded": 1, "plain": 1 if unmoved else 2}[denominator]
    keys_kept = None if mask is None else mask[..., None, :, None]
    divided = denominator is not None
    loads = (
        _Features(rho_q, feature_map, parts, wide),
        _Features(rho_k, feature_map, parts, wide, keys_kept),
        _Values(parts, divided, wide, keys_kept),
    )
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    fuse = feature_map is None or feature_map in FEATURE_MAPS.values()  # another may hold parameters
    with full_precision(q.device):
        out = linear.linear(q, k, v, loads, g, causal=causal, divided=divided, fuse=fuse)
    return out.to(q.dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    decay: DecayPair = None,
    scale: float | None = None,
    causal: bool = False,
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
        mask: Keys that take part, bool ``[*b s]``.

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys.

    Raises:
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work.

    Source: RoFormer, Eq. 2 and 16; Algebraic Positional Encodings, section 3.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 10, 16)
        >>> softmax_attention(q, k, v, causal=True).shape
        torch.Size([2, 4, 10, 16])
    """
    rho_q, rho_k = _check(q, k, v, isometry, mask)
    g = _decays(decay, q, k)
    t, s = q.shape[-2], k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = rho_q(q), rho_k(k)
    if g is None and mask is None and (not causal or t == s):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    keep = torch.ones(t, s, dtype=torch.bool, device=q.device)
    keep = keep.tril(s - t) if causal else keep
    if mask is not None:
        keep = keep & mask[..., None, None, :]
        k, v = (torch.where(mask[..., None, :, None], x, 0) for x in (k, v))
    alive = keep.any(-1, keepdim=True)
    bias = torch.zeros((), dtype=torch.float64, device=q.device)
    if g is not None:
        difference = g[0][..., :, None] - g[1][..., None, :]
        bias = difference if causal else -difference.abs()
    # a row without keys attends everywhere, which keeps its gradient finite, and is then set to zero
    bias = bias.clamp_min(torch.finfo(q.dtype).min).masked_fill(~keep, -torch.inf).masked_fill(~alive, 0).to(q.dtype)
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(*batch, t, s), scale=scale)
    return torch.where(alive, out, 0)


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
        x = torch.where(part[0], x.to(self.dtype), 0) if part else x.to(self.dtype)
        ones = torch.ones_like(x[..., :1])
        return (x,) if not self.divided else (x, ones) if self.parts == 2 else (torch.cat((x, ones), -1),)


def _check(q: Tensor, k: Tensor, v: Tensor, isometry: IsometryPair, mask: Tensor | None) -> tuple[Isometry, Isometry]:
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


def _check_order(pair: tuple[Tensor, Tensor] | None) -> None:
    """ValueError where a log decay increases along tokens; not while compiling, nor on a GPU, which would have to wait."""
    for g in () if pair is None or torch.compiler.is_compiling() else pair:
        if g.device.type == "cpu" and (g.diff(dim=-1) > 0).any():
            raise ValueError("decay: expected log decays that do not increase along tokens; sort tokens by position")


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))
