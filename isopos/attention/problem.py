"""The problems of attention: frozen values, one class per kind.

Arguments are checked, grouped and segmented here, in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never, TypedDict, TypeVar

import torch
from torch import Tensor

from isopos.attention import checks
from isopos.attention.checks import AxisOrder, DecayPair, IsometryPair, SegmentPair, TransportPair
from isopos.attention.reference import divides_out
from isopos.attention.segments import segmented
from isopos.catalog import at_least, probability
from isopos.exact import broadcast, is_exporting
from isopos.feature_maps import FeatureMap, Phi, identity, undivided
from isopos.maps import TokenMap
from isopos.ops.householder import Factors
from isopos.ops.linear.features import Decays
from isopos.parallel import Shards, shards
from isopos.phases import ContentPhase, Phase, cumulative, separated, with_phases
from isopos.state import State, expect_state
from isopos.terms import Clipped, Term


class CommonOptions(TypedDict, total=False):
    """Arguments of both kinds of attention after q, k and v; see the functions' docstrings."""

    isometry: IsometryPair
    decay: DecayPair
    phases: Sequence[Phase] | None
    causal: bool
    terms: Sequence[Term] | None
    mask: Tensor | None
    attn_mask: Tensor | None
    window: int | None
    transport: TransportPair
    layout: AxisOrder
    state: State | None
    group: Any


class LinearOptions(CommonOptions, total=False):
    """Arguments of linear attention."""

    feature_map: Phi | None
    denominator: str | None
    segment_ids: Tensor | None


class SoftmaxOptions(CommonOptions, total=False):
    """Arguments of softmax attention."""

    scale: float | None
    locality: Tensor | None
    segment_ids: SegmentPair
    dropout: float


FROM_SCHEMES = {"linear": ("feature_map", "denominator"), "softmax": ("scale", "locality")}
"""Arguments of one kind that schemes give."""


def refuse(kind: str, names: Sequence[str]) -> Never:
    """Raise TypeError for arguments that this kind of attention does not have, such as arguments of the other kind."""
    other = "softmax" if kind == "linear" else "linear"
    remedy = f"; build the scheme with attention={kind!r}" if set(names) & set(FROM_SCHEMES[other]) else ""
    raise TypeError(f"{kind}_attention() got an unexpected keyword argument {names[0]!r}{remedy}")


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked arguments of both kinds of attention; pairs are tuples.

    Attributes:
        batch: Leading dimensions ``[*b h]`` of the output; with groups ``[groups *b h]``, where h is the number of key
            heads.
        segments: Ids of queries and keys; the former may be the ids of all keys.
        phase: Content-dependent phases of the last token ``[*b h c]``.
        product: Householder-like maps of the tokens of k.
        layout: Layout of the caller's queries and of the output; tensors here are ``[*b h t d]``.
        groups: Number of neighbouring query heads that share a key head, the first axis of queries; 1 without groups.
        outward: Map of outputs, for transported values; `v` is mapped already.
        kind: Kind of the states that this attention writes.
        shards: Of the sequence over a group of processes; the tokens here are one of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    batch: torch.Size
    rho_q: TokenMap
    rho_k: TokenMap
    decay: Decays
    causal: bool
    terms: tuple[Term, ...]
    mask: Tensor | None
    segments: tuple[Tensor, Tensor] | None
    state: State | None
    window: int | None
    phase: Tensor | None
    product: Factors | None
    layout: str
    shards: Shards | None = None
    groups: int = 1
    outward: TokenMap | None = None
    kind: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum."""
        return 0 in self.batch or 0 in (self.q.shape[-2], *self.v.shape[-2:])

    @property
    def mask_of_keys(self) -> Tensor | None:
        """The mask ``[*b 1 s 1]``."""
        return None if self.mask is None else self.mask[..., None, :, None]

    @property
    def of_keys(self) -> torch.Size:
        """Leading dimensions of keys and values with what they have for each sample or head, and of states."""
        leading = [self.k.shape[:-2], self.v.shape[:-2]]
        leading += [] if self.decay is None else [self.decay[1].shape[:-1]]
        per_sample = [self.mask, None if self.segments is None else self.segments[1]]
        leading += [torch.Size((*x.shape[:-1], 1)) for x in per_sample if x is not None]
        return broadcast(*leading)


@dataclass(frozen=True, eq=False)
class LinearProblem(Problem):
    """Checked arguments of linear attention.

    Attributes:
        g: Log decays of queries and keys, with the jumps between segments.
        before: Log decay of the previous token, in a stream.
    """

    phi: Phi = field(kw_only=True)  # without a default: torch 2.11 cannot trace one that is an object
    denominator: str | None = "plain"
    g: Decays = None
    before: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SoftmaxProblem(Problem):
    """Checked arguments of softmax attention."""

    scale: float = 1.0
    locality: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout: float = 0.0


AnyProblem = TypeVar("AnyProblem", bound=Problem)


def check_linear(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, *, streams: bool) -> LinearProblem:
    """The problem of linear attention; ValueError for arguments that do not fit together."""
    phi, denominator, ids = options.get("feature_map"), options.get("denominator", "plain"), options.get("segment_ids")
    features = identity if phi is None else phi
    problem = _shared(LinearProblem, q, k, v, options, streams=streams, phi=features)
    q, k, state, decay = problem.q, problem.k, problem.state, problem.decay
    checks.check_denominator(denominator, q)
    checks.check_feature_map(phi)
    phi = features if divides_out(denominator, problem.rho_q, problem.rho_k) else undivided(features)
    before = None if state is None else state["decay"]
    decay = decay if decay is None or ids is not None else _between(decay, problem.mask, before)
    problem = replace(problem, phi=phi, denominator=denominator, decay=decay, g=decay, before=before)
    _check_factors(problem, options)
    if decay is not None and not problem.causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"decay: without causal, expected as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}")
    if ids is not None:
        checks.check_segments(ids, q, k, problem.batch)
    elif decay is not None:
        try:
            checks.check_order(decay, problem.causal, before)
        except ValueError:
            if problem.shards is None:
                raise
            decay = decay[0].new_full(decay[0].shape, torch.inf), decay[1].new_full(decay[1].shape, torch.inf)
            problem = replace(problem, decay=decay, g=decay)  # a mark, by which all processes of the group refuse
    problem = _grouped(_carried(problem, options.get("transport")))
    if problem.segments is not None and not problem.empty:
        previous = None if state is None else state["segment"]
        shared = problem.shards is not None
        g, before = segmented(problem.segments[1], previous, problem.decay, before, problem.q.shape[-2], marked=shared)
        problem = replace(problem, g=g, before=before)
    if state is None:
        return _expanded(problem) if problem.shards is None else problem
    name = phi.name if isinstance(phi, FeatureMap) else getattr(phi, "__name__", type(phi).__name__)
    return _stamped(problem, state, "linear", (name, f"denominator {denominator}"))


def check_softmax(q: Tensor, k: Tensor, v: Tensor, options: SoftmaxOptions, *, streams: bool) -> SoftmaxProblem:
    """The problem of softmax attention; ValueError for arguments that do not fit together."""
    state, scale, locality = options.get("state"), options.get("scale"), options.get("locality")
    attn_mask, dropout = options.get("attn_mask"), options.get("dropout", 0.0)
    seen = 0 if not isinstance(state, State) or (keys := state["keys"]) is None else keys.shape[-2]
    pairs = options.get("terms") is not None or locality is not None or attn_mask is not None
    problem = _shared(SoftmaxProblem, q, k, v, options, streams=streams, seen=seen, pairs=pairs)
    if problem.shards is not None and pairs:
        seen = problem.shards.total - problem.k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(scale, str) or not abs(scale) < math.inf or getattr(scale, "requires_grad", False):
        remedy = "; multiply q by a learned one" if isinstance(scale, Tensor) else ""
        raise ValueError(f"scale: expected a finite factor of logits, got {scale!r}{remedy}")
    dropout = probability("dropout", dropout)
    problem = replace(problem, scale=float(scale), locality=locality, attn_mask=attn_mask, dropout=dropout)
    q, k, batch, state = problem.q, problem.k, problem.batch, problem.state
    t, s = q.shape[-2], k.shape[-2] + seen
    if (ids := options.get("segment_ids")) is not None:
        checks.check_segments(ids, q, k, batch)
    if locality is not None:
        checks.check_tensor("locality", locality, q)
        if locality.shape[-2:] != (t, s) or not checks.broadcasts(locality.shape[:-2], batch[:-1]):
            raise ValueError(f"locality: expected [*b {t} {s}], got {list(locality.shape)}")
    if attn_mask is not None:
        checks.check_pairs(attn_mask, q, torch.Size((*batch, t, s)))
        if state is not None and problem.window is not None:
            raise ValueError("attn_mask: expected none with a window in a stream, which forgets the tokens before, got one")
    maps = problem.rho_q, problem.rho_k
    grows = q.dtype == torch.float16 and not all(rho.isometric for rho in maps)  # factors may leave float16
    if grows or any(rho.needs_float32 for rho in maps):
        problem = _at_least_float32(problem)
    problem = _grouped(_carried(problem, options.get("transport")))
    if problem.groups > 1 and attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == batch[-1]:
        attn_mask = attn_mask[(None,) * (len(batch) + 2 - attn_mask.ndim)].unflatten(-3, (-1, problem.groups))
        problem = replace(problem, attn_mask=attn_mask.movedim(-3, 0))
    if state is None:
        return problem
    return _stamped(problem, state, "softmax", () if problem.window is None else (f"window {problem.window}",))


def check_naive(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> LinearProblem:
    """The problem of the naive function, which accepts decays in any order and maps features itself."""
    problem = _grouped(_shared(LinearProblem, q, k, v, options, phi=identity))
    checks.check_denominator(options.get("denominator"), q)
    checks.check_feature_map(options.get("feature_map"))
    return problem


def restored(out: Tensor, problem: Problem) -> Tensor:
    """An output with the heads and the layout of the caller's queries."""
    out = out if problem.groups == 1 else out.movedim(0, -3).flatten(-4, -3)
    out = out if problem.outward is None else problem.outward(out)
    return out if problem.layout == "bhtd" else out.transpose(-3, -2)


def _shared(
    kind: type[AnyProblem],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Any,
    *,
    streams: bool = False,
    seen: int = 0,
    pairs: bool = False,
    **more: Any,
) -> AnyProblem:
    """A problem with the fields common to both kinds, and more; after `seen` keys of a stream; heads are not grouped yet.

    With `pairs` there are arguments of all keys of a group.
    """
    layout, causal = options.get("layout", "bhtd"), options.get("causal", False)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")
    mask, state = options.get("mask"), options.get("state")
    q, k, v = checks.check_inputs(q, k, v, layout)
    expect_state(state)
    heads, key_heads = checks.heads_of(q, k, v)
    batch = checks.check_leading(q, k, v, heads, key_heads)
    if mask is not None:
        checks.check_mask(mask, q, k, batch)
    terms = tuple(() if (terms := options.get("terms")) is None else terms)
    known = shards(options.get("group"), k.shape[-2], k.device)
    if known is not None:
        aligned = causal or bool(terms) or any(options.get(name) is not None for name in ("window", "segment_ids"))
        checks.check_group(q, k, aligned, state is not None or streams)
        checks.check_ring(known, kind is LinearProblem, bool(options.get("phases")), options.get("dropout", 0.0))
        seen = known.total - k.shape[-2] if pairs else seen
    for term in terms:
        checks.check_term(term, q, k, v, batch, seen, key_heads)
    phi = options.get("feature_map")
    same = phi is None or (isinstance(phi, FeatureMap) and phi.write is not None)  # elementwise
    rho_q, rho_k = checks.check_isometry(options.get("isometry"), q, k, heads, key_heads, features=same)
    decay = checks.check_decay(options.get("decay"), q, k, heads, key_heads)
    if state is not None or streams:
        checks.check_stream(state, causal, q, k, batch, key_heads)
        state = state or State()
    if (transport := options.get("transport")) is not None:
        checks.check_transport(transport, q, v, batch)
    ids, window, phases = options.get("segment_ids"), options.get("window"), options.get("phases") or ()
    phase = product = None
    if window is not None:
        window = at_least("window", window)
        longest = max(q.shape[-2], k.shape[-2])  # an exported program has no choice by its length
        kept = state is not None or known is not None or (is_exporting() and isinstance(longest, torch.SymInt))
        window = window if kept or window < longest else None  # None: all keys are in it
    if phases:
        phases = tuple(phases) if isinstance(phases, Sequence) else (phases,)
        checks.check_phases(phases, q, k, causal, heads, key_heads)
        sums, of_product = separated(phases)
        checks.check_product(of_product, terms, known is not None)
        shared = heads != key_heads and any(part.heads == heads for part in phases)  # one step per query head
        keys = k.repeat_interleave(heads // k.shape[-3], -3) if shared else k
        product = None if of_product is None else of_product(keys, mask)
        if sums:
            total, phase = _totals(sums, keys, mask, None if state is None else state["path"])
            if known is not None:  # from the last token of the previous shard on
                total = total + known.before(phase).unsqueeze(-2)
            leading = _heads_of((rho_q, rho_k), decay)
            _check_heads([*leading, ("phases", total.shape[-3:-2])], heads, key_heads)
            (rho_q, rho_k), decay = with_phases(sums, total, (rho_q, rho_k), decay, q)
    segments = ids if isinstance(ids, tuple) or ids is None else (ids, ids)
    common = (q, k, v, batch, rho_q, rho_k, decay, causal, terms, mask, segments, state, window, phase, product)
    return kind(*common, layout, known, **more)


def _totals(phases: Sequence[ContentPhase], k: Tensor, mask: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Content-dependent phases of all tokens, from `before` on, and of the last; ValueError for another scheme's state."""
    columns = sum(part.columns for part in phases)
    if before is not None and before.shape[-1] != columns:
        raise ValueError(f"state: expected one of {columns} phases, got one of {before.shape[-1]}; start with State()")
    total = cumulative(phases, k, mask, before)
    start = torch.zeros_like(total.sum(-2)) if before is None else before
    return total, total[..., -1, :] if k.shape[-2] else start


def _between(decay: tuple[Tensor, Tensor], mask: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log decays that do not increase at masked tokens, whose positions may be any: theirs are moved between neighbours'.

    Decays without an increase stay as they are. Positions shared by all samples are looked at on the CPU alone, and none in
    exports, for whose formats there are no running maxima.
    """
    g = decay[1]
    if mask is None or g is not decay[0] or not g.shape[-1] or torch.compiler.is_exporting():
        return decay
    if not checks.rises(g, before) if checks.is_readable(g) else g.ndim < 3:
        return decay
    kept, own = mask.unsqueeze(-2).to(g.device), g.detach()  # what a masked token is moved to has no gradient
    least = torch.where(kept, own, -torch.inf).flip(-1).cummax(-1).values.flip(-1)  # of this token or the next one kept
    moved = torch.maximum(own, least)
    moved = moved if before is None else torch.minimum(moved, before.detach()[..., None])
    g = torch.where(kept, g, torch.where(kept, own, moved).cummin(-1).values)
    return g, g


def _check_factors(problem: LinearProblem, options: LinearOptions) -> None:
    """ValueError for combinations without a sum in linear time."""
    terms, segment_ids = problem.terms, options.get("segment_ids")
    if options.get("attn_mask") is not None:
        raise ValueError(
            "attn_mask: expected none in linear attention, which forms no weight of a pair that it could mask, got one; "
            "mask [*b s], segment_ids, causal and window factor, and softmax_attention takes any"
        )
    if problem.window is not None and terms:
        raise ValueError(
            f"window: expected none with clipped terms, whose far keys share one sum, got {problem.window}; "
            "use softmax_attention"
        )
    if problem.window is not None and problem.state is not None:
        raise ValueError(
            f"window: expected none in a stream of linear attention, whose sums forget no token, got {problem.window}; "
            "give it the last window - 1 keys and values again, before those of the new tokens, or use softmax_attention"
        )
    if problem.product is not None and problem.window is not None:
        raise ValueError(
            f"window: expected none with a Householder product in linear attention, got {problem.window}; use "
            "softmax_attention"
        )
    if problem.product is not None and problem.denominator == "complex":
        raise ValueError(
            "denominator: expected 'plain', 'encoded' or None with a Householder product, which has no pairs, got 'complex'"
        )
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
    if terms and problem.decay is not None:
        raise ValueError("decay: expected none with clipped terms, whose far keys share one sum, got one")
    if segment_ids is not None and any(isinstance(term, Clipped) and term.outside for term in terms):
        raise ValueError("segment_ids: expected none with class tokens, the first rows of a whole tensor, got some")
    if terms and segment_ids is not None and problem.state is not None:
        raise ValueError("segment_ids: expected none with clipped terms in a stream, which keeps one sum of far keys")
    if terms and problem.denominator == "complex":
        raise ValueError("denominator: expected 'plain', 'encoded' or None with terms, got 'complex'")


def _grouped(problem: AnyProblem) -> AnyProblem:
    """The problem with query heads that share a key head on a separate first axis of queries.

    If maps, decays or terms differ between query heads, keys and values are repeated instead.
    """
    q, k, v = problem.q, problem.k, problem.v
    if q.shape[-3] == k.shape[-3] == v.shape[-3]:
        return problem
    heads, key_heads = checks.heads_of(q, k, v)
    if heads == key_heads:
        return problem
    leading = _heads_of((problem.rho_q, problem.rho_k), problem.decay)
    leading += [("terms", torch.Size((term.heads,))) for term in problem.terms]
    leading += [] if problem.product is None else [("phases", problem.product.vector.shape[-3:-2])]
    if _check_heads(leading, heads, key_heads):
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
        return replace(problem, k=k, v=v)
    if key_heads == 1:
        return problem  # left to broadcasting
    groups, batch = heads // key_heads, problem.batch
    q = q.expand(*batch[:-1], *q.shape[-3:]).unflatten(-3, (key_heads, groups)).movedim(-3, 0)
    return replace(problem, q=q, batch=torch.Size((groups, *batch[:-1], key_heads)), groups=groups)


def _heads_of(maps: tuple[TokenMap, TokenMap], decay: Decays) -> list[tuple[str, torch.Size]]:
    """Names and head counts of maps and log decays."""
    return [("isometry", rho.leading[-1:]) for rho in maps] + [("decay", g.shape[-2:-1]) for g in decay or ()]


def _check_heads(leading: Sequence[tuple[str, torch.Size]], heads: int, key_heads: int) -> bool:
    """Whether arguments, by name and head count, differ between query heads; ValueError if others have those of k."""
    of_queries, of_keys = ([name for name, shape in leading if shape == (n,)] for n in (heads, key_heads))
    if of_queries and of_keys and heads > key_heads > 1:
        raise ValueError(
            f"{of_keys[0]}: expected {heads} heads, those of q, as {of_queries[0]} has, got {key_heads}, those of k; "
            "arguments per head have the heads of q, or all have those of k"
        )
    return bool(of_queries)


def _carried(problem: AnyProblem, transport: TransportPair) -> AnyProblem:
    """The problem with values mapped at their keys' positions, and the map of outputs at their queries'."""
    if transport is None:
        return problem
    problem = problem if transport[0].isometric else _at_least_float32(problem)
    mask, v = problem.mask_of_keys, problem.v
    v = transport[0](v if mask is None else torch.where(mask, v, 0))  # masked values may hold anything
    return replace(problem, v=v, outward=transport[1])


def _at_least_float32(problem: AnyProblem) -> AnyProblem:
    q, k, v = (x if x.dtype.itemsize >= 4 else x.float() for x in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v)


def _expanded(problem: LinearProblem) -> LinearProblem:
    """The problem with queries, keys and values expanded to all leading dimensions, as plain tensors."""
    batch, tensors = problem.batch, (problem.q, problem.k, problem.v)
    if all(type(x) is Tensor and x.shape[:-2] == batch for x in tensors):
        return problem
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in tensors)
    return replace(problem, q=q, k=k, v=v)


def _stamped(problem: AnyProblem, state: State, name: str, choices: tuple[str, ...]) -> AnyProblem:
    """The problem with the kind of the states it writes: everything that must not change for the next tokens.

    ValueError if the state was written by attention of another kind.
    """
    q, v = problem.q, problem.v
    parts = [name, f"{q.shape[-1]} and {v.shape[-1]} features", str(q.dtype), _structure(problem.rho_k), *choices]
    optional = (
        ("decay", problem.decay),
        ("path", problem.phase),
        ("product", problem.product),
        ("segment_ids", problem.segments),
        ("transport", problem.outward),
    )
    parts += [name for name, x in optional if x is not None]
    parts += [f"{type(term).__name__} {term.side} {term.heads}" for term in problem.terms]
    parts += [f"reach {term.reach}" for term in problem.terms if isinstance(term, Clipped)]
    kind = ", ".join(parts)
    state.check_kind(kind, problem.of_keys)
    return replace(problem, kind=kind)


def _structure(rho: TokenMap) -> str:
    values = [x for value in vars(rho).values() for x in (value if isinstance(value, tuple) else (value,))]
    inner = [_structure(x) for x in values if isinstance(x, TokenMap)]
    return type(rho).__name__ + (f"({', '.join(inner)})" if inner else "")
