"""What attention accepts: checks of its arguments before any work, each with one clear error."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isopos.exact import broadcast
from isopos.feature_maps import FeatureMap
from isopos.maps import Identity, TokenMap
from isopos.state import State
from isopos.terms import Clipped, Term

__all__ = [
    "DecayPair",
    "IsometryPair",
    "SegmentPair",
    "broadcasts",
    "check",
    "check_factors",
    "check_order",
    "check_segments",
    "check_stream",
    "decays_of",
    "groups_of",
    "kind_of",
]

IsometryPair = TokenMap | tuple[TokenMap, TokenMap] | None
DecayPair = Tensor | tuple[Tensor, Tensor] | None
SegmentPair = Tensor | tuple[Tensor, Tensor] | None


def groups_of(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Query heads that share one head of keys and values; 1 where that is left to broadcasting."""
    if min(q.ndim, k.ndim, v.ndim) < 3:
        return 1  # an error of shapes
    heads, shared = q.shape[-3], max(k.shape[-3], v.shape[-3])
    return 1 if shared in (0, 1, heads) or heads % shared else heads // shared


def check_factors(
    terms: Sequence[Term], decay: DecayPair, denominator: str | None, segment_ids: SegmentPair, streamed: bool
) -> None:
    """ValueError where what comes together has no sum in linear time."""
    for term in terms:
        if not isinstance(term, Clipped) or term.side != "query":
            raise ValueError(
                f"terms: expected clipped terms of the query's side, got {type(term).__name__} of side {term.side!r}, "
                "which adds to logits and does not factor; use softmax_attention"
            )
    if isinstance(segment_ids, tuple):
        raise ValueError(
            "segment_ids: expected one tensor, of the keys, in linear attention, got a pair; use softmax_attention"
        )
    if len(terms) > 0 and decay is not None:
        raise ValueError("decay: expected none beside clipped terms, whose far keys share one sum, got one")
    if segment_ids is not None and any(getattr(term, "outside", 0) for term in terms):
        raise ValueError("segment_ids: expected none beside class tokens, the first rows of a whole tensor, got some")
    if len(terms) > 0 and segment_ids is not None and streamed:
        raise ValueError("segment_ids: expected none beside clipped terms in a stream, which keeps one sum of far keys")
    if len(terms) > 0 and denominator == "complex":
        raise ValueError("denominator: expected 'plain', 'encoded' or None beside terms, got 'complex'")


def check_stream(state: State | None, return_state: bool, causal: bool, q: Tensor, k: Tensor) -> None:
    """ValueError where there is no stream to continue."""
    if state is None and not return_state:
        return
    if not causal or q.shape[-2] != k.shape[-2]:
        what = "causal=False" if not causal else f"{q.shape[-2]} queries and {k.shape[-2]} keys"
        raise ValueError(f"state: expected causal attention of as many queries as keys, the next tokens, got {what}")


def kind_of(
    name: str,
    q: Tensor,
    v: Tensor,
    rho: TokenMap,
    phi: FeatureMap | None,
    denominator: str | None,
    terms: Sequence[Term],
    *,
    decayed: bool,
    packed: bool,
) -> str:
    """Which attention writes a state: all that must be the same for the next tokens."""
    parts = [name, f"{q.shape[-1]} and {v.shape[-1]} features", str(q.dtype), structure(rho)]
    if name == "linear":
        parts += [getattr(phi, "__name__", type(phi).__name__), f"denominator {denominator}"]
    parts += [name for name, given in (("decay", decayed), ("segment_ids", packed)) if given]
    return ", ".join([*parts, *(f"{type(term).__name__} {term.side} {len(term.table)}" for term in terms)])


def structure(rho: TokenMap) -> str:
    inner = [structure(x) for x in vars(rho).values() if isinstance(x, TokenMap)]
    inner += [structure(x) for xs in vars(rho).values() if isinstance(xs, tuple) for x in xs if isinstance(x, TokenMap)]
    return type(rho).__name__ + (f"({', '.join(inner)})" if inner else "")


def check(
    q: Tensor, k: Tensor, v: Tensor, isometry: IsometryPair, mask: Tensor | None, terms: Sequence[Term], seen: int = 0
) -> tuple[TokenMap, TokenMap]:
    """The isometries of queries and keys; ValueError where the arguments do not fit together, after `seen` keys."""
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
        batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v: expected leading dimensions [*b h] that broadcast, got {shapes}") from None
    if mask is not None:
        if mask.dtype != torch.bool or mask.ndim < 1 or mask.shape[-1] != k.shape[-2]:
            raise ValueError(
                f"mask: expected bool [*b {k.shape[-2]}], True for keys that take part, got {mask.dtype} {list(mask.shape)}"
            )
        if not broadcasts(mask.shape[:-1], batch[:-1]):
            raise ValueError(
                f"mask: expected leading dimensions that broadcast to {list(batch[:-1])}, got {list(mask.shape)}; "
                "[*b s] says which keys take part, for all queries"
            )
    for term in terms:
        _check_term(term, q, k, v, batch, seen)
    rho_q, rho_k = isometry if isinstance(isometry, tuple) else (isometry, isometry)
    rho_q, rho_k = rho_q or Identity(), rho_k or Identity()
    for name, rho, x in (("q", rho_q, q), ("k", rho_k, k)):
        if not isinstance(rho, TokenMap):
            raise TypeError(f"isometry: expected what an encoding returns at positions, got {type(rho).__name__}")
        rho.check(x, name)
        if not broadcasts(rho.leading, x.shape[:-2]):
            raise ValueError(
                f"isometry: expected leading dimensions [*b heads] that broadcast to {list(x.shape[:-2])} of {name}, "
                f"got {list(rho.leading)}; give the encoding these heads, and positions these samples"
            )
    return rho_q, rho_k


def _check_term(term: Term, q: Tensor, k: Tensor, v: Tensor, batch: torch.Size, seen: int) -> None:
    """ValueError where a relative term does not fit queries and keys."""
    if not isinstance(term, Term):
        raise TypeError(f"terms: expected what a relative bias returns at positions, got {type(term).__name__}")
    width = {"none": None, "value": v.shape[-1]}.get(term.side, q.shape[-1])
    if len(term.table) not in (1, *batch[-1:]) or width not in (None, term.table.shape[-1]):
        raise ValueError(
            f"terms: expected a table of {batch[-1]} heads{'' if width is None else f' and {width} features'}, "
            f"got {list(term.table.shape)}"
        )
    pairs = (q.shape[-2], k.shape[-2] + seen)
    if term.shape[-2:] != pairs or not broadcasts(term.shape[:-2], batch[:-1]):
        raise ValueError(
            f"terms: expected positions of {list(batch[:-1])} samples, {pairs[0]} queries and {pairs[1]} keys, "
            f"got {list(term.shape)}; evaluate the scheme at the positions of both"
        )


def decays_of(decay: DecayPair, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """The log decays of queries and keys; ValueError where they do not fit."""
    if decay is None:
        return None
    pair = decay if isinstance(decay, tuple) else (decay, decay)
    for name, g, x in (("queries", pair[0], q), ("keys", pair[1], k)):
        if not isinstance(g, Tensor):
            raise TypeError(f"decay: expected a tensor of log decays, got {type(g).__name__}")
        if g.dtype != torch.float64:
            raise ValueError(f"decay: expected float64, whose differences stay exact at any length, got {g.dtype}")
        if g.ndim < 1 or g.shape[-1] != x.shape[-2] or not broadcasts(g.shape[:-1], x.shape[:-2]):
            expected = [*x.shape[:-2], x.shape[-2]]
            raise ValueError(f"decay: expected {expected} of the {name}, or what broadcasts to it, got {list(g.shape)}")
    return pair


def check_segments(segment_ids: SegmentPair, q: Tensor, k: Tensor, batch: torch.Size) -> None:
    """ValueError where segment ids do not fit the tokens of the keys, or of both."""
    if segment_ids is None:
        return
    t, s = q.shape[-2], k.shape[-2]
    pair = isinstance(segment_ids, tuple)
    for ids, count in zip(segment_ids, (t, s), strict=True) if pair else [(segment_ids, s)]:
        if not isinstance(ids, Tensor):
            raise TypeError(f"segment_ids: expected a tensor of integers, got {type(ids).__name__}")
        if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim < 1 or ids.shape[-1] != count:
            raise ValueError(f"segment_ids: expected integers [*b {count}], one a token, got {ids.dtype} {list(ids.shape)}")
        if not broadcasts(ids.shape[:-1], batch[:-1]):
            raise ValueError(
                f"segment_ids: expected leading dimensions that broadcast to {list(batch[:-1])}, got {list(ids.shape)}"
            )
    if t > s and not pair:
        raise ValueError(f"segment_ids: expected no more queries than keys, got {t} and {s}")


def check_order(pair: tuple[Tensor, Tensor] | None, causal: bool, before: Tensor | None = None) -> None:
    """ValueError where a weight would grow with distance; not while compiling, nor on a GPU, which would have to wait."""
    if pair is None or torch.compiler.is_compiling() or pair[0].device.type != "cpu":
        return
    query, key = pair
    if any((g.diff(dim=-1) > 0).any() for g in pair) or (before is not None and (key[..., :1] > before[..., None]).any()):
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


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape broadcasts to another without changing it."""
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))
