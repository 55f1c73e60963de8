"""What attention works on, a frozen value for each kind: arguments are checked, grouped and segmented here, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Never, TypedDict, TypeVar

import torch
from torch import Tensor

from isopos.attention.checks import (
    DecayPair,
    IsometryPair,
    Layout,
    SegmentPair,
    TransportPair,
    broadcasts,
    check_decay,
    check_denominator,
    check_feature_map,
    check_inputs,
    check_isometry,
    check_leading,
    check_mask,
    check_order,
    check_pairs,
    check_path,
    check_segments,
    check_stream,
    check_tensor,
    check_term,
    check_transport,
    heads_of,
)
from isopos.attention.reference import divides_out
from isopos.attention.segments import segmented
from isopos.catalog import at_least
from isopos.exact import broadcast
from isopos.feature_maps import FeatureMap, Phi, identity, undivided
from isopos.maps import Composed, Identity, TokenMap
from isopos.ops.linear.features import Decays
from isopos.paths import Path, along, parts
from isopos.state import State, expect_state
from isopos.terms import Clipped, Term

__all__ = ["LinearOptions", "LinearProblem", "Problem", "SoftmaxOptions", "SoftmaxProblem", "check_linear", "check_softmax"]
__all__ += ["check_naive", "refuse", "restored"]


class Options(TypedDict, total=False):
    """Arguments of both kinds of attention after q, k and v; their docstrings describe them."""

    isometry: IsometryPair
    decay: DecayPair
    path: Sequence[Path] | None
    causal: bool
    terms: Sequence[Term] | None
    mask: Tensor | None
    attn_mask: Tensor | None
    window: int | None
    transport: TransportPair
    layout: Layout
    state: State | None


class LinearOptions(Options, total=False):
    """Those of linear attention."""

    feature_map: Phi | None
    denominator: str | None
    segment_ids: Tensor | None


class SoftmaxOptions(Options, total=False):
    """Those of softmax attention."""

    scale: float | None
    locality: Tensor | None
    segment_ids: SegmentPair
    dropout: float


OWN = {"linear": ("feature_map", "denominator"), "softmax": ("scale", "locality")}  # what schemes give


def refuse(kind: str, names: Sequence[str]) -> Never:
    """Raise TypeError for arguments that attention of a kind has not, though schemes built for the other kind give them."""
    other = "softmax" if kind == "linear" else "linear"
    remedy = f"; build the scheme with attention={kind!r}" if set(names) & set(OWN[other]) else ""
    raise TypeError(f"{kind}_attention() got an unexpected keyword argument {names[0]!r}{remedy}")


@dataclass(frozen=True, eq=False)
class Problem:
    """What both kinds of attention have, checked: arguments as they were given, pairs as pairs.

    Attributes:
        batch: Leading dimensions ``[*b h]`` of the output; with groups ``[groups *b h]``, h being those of keys.
        segments: Ids of queries and keys; those of queries may be those of all keys.
        path: Where the last token is on the paths of content ``[*b h c]``.
        layout: In which the queries were given, and the output is to be; here all is ``[*b h t d]``.
        groups: How many neighbouring heads of queries share one of keys, as a first axis of queries; 1 for none.
        outward: Of transported values, the map of outputs; the values are mapped here.
        kind: Of the states that this attention writes.
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
    path: Tensor | None
    layout: str
    groups: int = 1
    outward: TokenMap | None = None
    kind: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum up."""
        return 0 in self.batch or 0 in (self.q.shape[-2], *self.v.shape[-2:])

    @property
    def mask_of_keys(self) -> Tensor | None:
        """``[*b 1 s 1]``."""
        return None if self.mask is None else self.mask[..., None, :, None]

    @property
    def of_keys(self) -> torch.Size:
        """Leading dimensions of keys and values, which those of a state are."""
        return broadcast(self.k.shape[:-2], self.v.shape[:-2])


@dataclass(frozen=True, eq=False)
class LinearProblem(Problem):
    """Linear attention, checked.

    Attributes:
        g: Log decays of queries and keys that the sums have; those of segments are not those given.
        before: That of the token before, in a stream.
    """

    phi: Phi = identity
    denominator: str | None = "plain"
    g: Decays = None
    before: Tensor | None = None


@dataclass(frozen=True, eq=False)
class SoftmaxProblem(Problem):
    """Softmax attention, checked."""

    scale: float = 1.0
    locality: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout: float = 0.0


AnyProblem = TypeVar("AnyProblem", bound=Problem)


def check_linear(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, *, streams: bool) -> LinearProblem:
    """The problem of linear attention; ValueError where its arguments have none."""
    shared = _shared(q, k, v, options, streams=streams)
    phi, denominator, ids = options.get("feature_map"), options.get("denominator", "plain"), options.get("segment_ids")
    q, k, state, decay = shared["q"], shared["k"], shared["state"], shared["decay"]
    check_denominator(denominator, q)
    check_feature_map(phi)
    phi = identity if phi is None else phi
    phi = phi if divides_out(denominator, shared["rho_q"], shared["rho_k"]) else undivided(phi)
    before = None if state is None else state["decay"]
    problem = LinearProblem(**shared, phi=phi, denominator=denominator, g=decay, before=before)
    _check_factors(problem, options)
    if decay is not None and not problem.causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"decay: without causal, expected as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}")
    if ids is not None:
        check_segments(ids, q, k, problem.batch)
    elif decay is not None:
        check_order(decay, problem.causal, before)
    problem = _grouped(_carried(problem, options.get("transport")))
    if problem.segments is not None and not problem.empty:
        previous = None if state is None else state["segment"]
        g, before = segmented(problem.segments[1], previous, problem.decay, before, problem.q.shape[-2])
        problem = replace(problem, g=g, before=before)
    if state is None:
        return _expanded(problem)
    name = phi.name if isinstance(phi, FeatureMap) else getattr(phi, "__name__", type(phi).__name__)
    return _stamped(problem, state, "linear", (name, f"denominator {denominator}"))


def check_softmax(q: Tensor, k: Tensor, v: Tensor, options: SoftmaxOptions, *, streams: bool) -> SoftmaxProblem:
    """The problem of softmax attention; ValueError where its arguments have none."""
    state, scale, locality = options.get("state"), options.get("scale"), options.get("locality")
    seen = 0 if not isinstance(state, State) or (keys := state["keys"]) is None else keys.shape[-2]
    shared = _shared(q, k, v, options, streams=streams, seen=seen)
    attn_mask, dropout = options.get("attn_mask"), options.get("dropout", 0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    problem = SoftmaxProblem(**shared, scale=float(scale), locality=locality, attn_mask=attn_mask, dropout=dropout)
    q, k, batch, state = problem.q, problem.k, problem.batch, problem.state
    t, s = q.shape[-2], k.shape[-2] + seen
    if (ids := options.get("segment_ids")) is not None:
        check_segments(ids, q, k, batch)
    if locality is not None:
        check_tensor("locality", locality, q)
        if locality.shape[-2:] != (t, s) or not broadcasts(locality.shape[:-2], batch[:-1]):
            raise ValueError(f"locality: expected [*b {t} {s}], got {list(locality.shape)}")
    if attn_mask is not None:
        check_pairs(attn_mask, q, torch.Size((*batch, t, s)))
        if state is not None and problem.window is not None:
            raise ValueError(
                "attn_mask: expected none beside a window in a stream, which forgets the tokens before, got one"
            )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a probability below 1, got {dropout}")
    if problem.rho_q.delicate or problem.rho_k.delicate:
        problem = _at_least_float32(problem)
    problem = _grouped(_carried(problem, options.get("transport")))
    if problem.groups > 1 and attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == batch[-1]:
        attn_mask = attn_mask[(None,) * (len(batch) + 2 - attn_mask.ndim)].unflatten(-3, (-1, problem.groups))
        problem = replace(problem, attn_mask=attn_mask.movedim(-3, 0))
    if state is None:
        return problem
    return _stamped(problem, state, "softmax", () if problem.window is None else (f"window {problem.window}",))


def check_naive(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions) -> LinearProblem:
    """The problem of what forms every weight, which takes decays in any order and maps features itself."""
    problem = _grouped(LinearProblem(**_shared(q, k, v, options)))
    check_denominator(options.get("denominator"), q)
    check_feature_map(options.get("feature_map"))
    return problem


def restored(out: Tensor, problem: Problem) -> Tensor:
    """An output with the heads, and in the layout, of the queries that were given."""
    out = out if problem.groups == 1 else out.movedim(0, -3).flatten(-4, -3)
    out = out if problem.outward is None else problem.outward(out)
    return out if problem.layout == "bhtd" else out.transpose(-3, -2)


def _shared(q: Tensor, k: Tensor, v: Tensor, options: Any, *, streams: bool = False, seen: int = 0) -> dict[str, Any]:
    """Fields of a problem that both kinds check alike, after `seen` keys of a stream; heads are not grouped yet."""
    layout, causal = options.get("layout", "bhtd"), options.get("causal", False)
    mask, state = options.get("mask"), options.get("state")
    q, k, v = check_inputs(q, k, v, layout)
    expect_state(state)
    heads, own = heads_of(q, k, v)
    batch = check_leading(q, k, v, heads, own)
    if mask is not None:
        check_mask(mask, q, k, batch)
    terms = () if (given := options.get("terms")) is None else tuple(given)
    for term in terms:
        check_term(term, q, k, v, batch, seen, own)
    rho_q, rho_k = check_isometry(options.get("isometry"), q, k, heads, own)
    decay = check_decay(options.get("decay"), q, k, heads, own)
    if state is not None or streams:
        check_stream(state, causal, q, k)
        state = state or State()
    if (transport := options.get("transport")) is not None:
        check_transport(transport, q, v, batch)
    ids, window, path, place = options.get("segment_ids"), options.get("window"), options.get("path") or (), None
    if window is not None:
        window = at_least("window", window)
        window = window if state is not None or window < max(q.shape[-2], k.shape[-2]) else None  # all are in it
    if path:
        path = tuple(path) if isinstance(path, Sequence) else (path,)
        check_path(path, q, k, causal, heads, own)
        shared = heads != own and any(part.heads == heads for part in path)  # steps of each query head, from keys it shares
        keys = k.repeat_interleave(heads // k.shape[-3], -3) if shared else k
        (rho_q, rho_k), decay, place = _along(path, q, keys, mask, (rho_q, rho_k), decay, state)
    segments = ids if isinstance(ids, tuple) or ids is None else (ids, ids)
    return {
        "q": q,
        "k": k,
        "v": v,
        "batch": batch,
        "rho_q": rho_q,
        "rho_k": rho_k,
        "decay": decay,
        "causal": causal,
        "terms": terms,
        "mask": mask,
        "segments": segments,
        "state": state,
        "window": window,
        "path": place,
        "layout": layout,
    }


def _along(
    path: Sequence[Path],
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    maps: tuple[TokenMap, TokenMap],
    decay: Decays,
    state: State | None,
) -> tuple[tuple[TokenMap, TokenMap], Decays, Tensor]:
    """Maps and log decays with what tokens' keys add to them, and where the last token is; ValueError for another state."""
    t, s, before, columns = q.shape[-2], k.shape[-2], None if state is None else state["path"], sum(p.columns for p in path)
    if before is not None and before.shape[-1] != columns:
        raise ValueError(f"state: expected one of {columns} paths, got one of {before.shape[-1]}; start with State()")
    total = along(path, k, mask, before)
    g, turn = parts(path, total, torch.promote_types(q.dtype, torch.float32), q.device)
    start = torch.zeros_like(total.sum(-2)) if before is None else before
    if g is not None:
        pair = decay or (0, 0)
        decay = pair[0] + g[..., s - t :], pair[1] + g
    if turn is not None:
        last = turn if t == s else turn.last(t)  # a compiler takes the length of a slice for a constant
        rho_q, rho_k = maps
        maps = (
            (last if isinstance(rho_q, Identity) else Composed(rho_q, last)),
            (turn if isinstance(rho_k, Identity) else Composed(rho_k, turn)),
        )
    return maps, decay, total[..., -1, :] if s else start


def _check_factors(problem: LinearProblem, options: LinearOptions) -> None:
    """ValueError where what comes together has no sum in linear time."""
    terms, segment_ids = problem.terms, options.get("segment_ids")
    if options.get("attn_mask") is not None:
        raise ValueError(
            "attn_mask: expected none in linear attention, which forms no weight of a pair that it could mask, got one; "
            "mask [*b s], segment_ids, causal and window factor, and softmax_attention takes any"
        )
    if problem.window is not None and terms:
        raise ValueError(
            f"window: expected none beside clipped terms, whose far keys share one sum, got {problem.window}; "
            "use softmax_attention"
        )
    if problem.window is not None and problem.state is not None:
        raise ValueError(
            f"window: expected none in a stream of linear attention, whose sums forget no token, got {problem.window}; "
            "give it the last window - 1 keys and values again, before those of the new tokens, or use softmax_attention"
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
        raise ValueError("decay: expected none beside clipped terms, whose far keys share one sum, got one")
    if segment_ids is not None and any(isinstance(term, Clipped) and term.outside for term in terms):
        raise ValueError("segment_ids: expected none beside class tokens, the first rows of a whole tensor, got some")
    if terms and segment_ids is not None and problem.state is not None:
        raise ValueError("segment_ids: expected none beside clipped terms in a stream, which keeps one sum of far keys")
    if terms and problem.denominator == "complex":
        raise ValueError("denominator: expected 'plain', 'encoded' or None beside terms, got 'complex'")


def _grouped(problem: AnyProblem) -> AnyProblem:
    """The problem with heads of queries that share one of keys as an axis of their own, the first one of queries.

    Where maps, decays or terms are one a head of queries, keys and values are repeated instead.
    """
    q, k, v = problem.q, problem.k, problem.v
    if q.shape[-3] == k.shape[-3] == v.shape[-3]:
        return problem
    heads, own = heads_of(q, k, v)
    if heads == own:
        return problem
    decays, maps = problem.decay or (), (problem.rho_q, problem.rho_k)
    given = [("isometry", rho.leading[-1:]) for rho in maps] + [("decay", g.shape[-2:-1]) for g in decays]
    given += [("terms", (term.heads,)) for term in problem.terms]
    of_queries, of_keys = ([name for name, shape in given if shape == (n,)] for n in (heads, own))
    if of_queries and of_keys and own > 1:
        raise ValueError(
            f"{of_keys[0]}: expected {heads} heads, those of q, as {of_queries[0]} has, got {own}, those of k; "
            "what is one a head is so for the heads of q, or for those of k"
        )
    if of_queries:
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
        return replace(problem, k=k, v=v)
    if own == 1:
        return problem  # left to broadcasting
    groups, batch = heads // own, problem.batch
    q = q.expand(*batch[:-1], *q.shape[-3:]).unflatten(-3, (own, groups)).movedim(-3, 0)
    return replace(problem, q=q, batch=torch.Size((groups, *batch[:-1], own)), groups=groups)


def _carried(problem: AnyProblem, transport: TransportPair) -> AnyProblem:
    """The problem with values at the places of their keys, and the map that brings outputs to those of their queries."""
    if transport is None:
        return problem
    problem = problem if transport[0].isometric else _at_least_float32(problem)
    mask, v = problem.mask_of_keys, problem.v
    v = transport[0](v if mask is None else torch.where(mask, v, 0))  # what is masked may hold anything
    return replace(problem, v=v, outward=transport[1])


def _at_least_float32(problem: AnyProblem) -> AnyProblem:
    q, k, v = (x if x.dtype.itemsize >= 4 else x.float() for x in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v)


def _expanded(problem: LinearProblem) -> LinearProblem:
    """The problem with all leading dimensions of its queries, keys and values, as plain tensors."""
    batch, given = problem.batch, (problem.q, problem.k, problem.v)
    if all(type(x) is Tensor and x.shape[:-2] == batch for x in given):
        return problem
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in given)
    return replace(problem, q=q, k=k, v=v)


def _stamped(problem: AnyProblem, state: State, name: str, choices: tuple[str, ...]) -> AnyProblem:
    """The problem with the kind of the states that it writes; ValueError where another wrote the one given."""
    kind = _kind(name, problem, choices)
    state.expect(kind, problem.of_keys)
    return replace(problem, kind=kind)


def _kind(name: str, problem: Problem, choices: tuple[str, ...]) -> str:
    """Which attention writes a state: all that must be the same for the next tokens."""
    q, v, given = problem.q, problem.v, (("decay", problem.decay), ("path", problem.path), ("segment_ids", problem.segments))
    parts = [name, f"{q.shape[-1]} and {v.shape[-1]} features", str(q.dtype), _structure(problem.rho_k), *choices]
    parts += [name for name, x in (*given, ("transport", problem.outward)) if x is not None]
    return ", ".join([*parts, *(f"{type(term).__name__} {term.side} {term.heads}" for term in problem.terms)])


def _structure(rho: TokenMap) -> str:
    values = [x for value in vars(rho).values() for x in (value if isinstance(value, tuple) else (value,))]
    inner = [_structure(x) for x in values if isinstance(x, TokenMap)]
    return type(rho).__name__ + (f"({', '.join(inner)})" if inner else "")
