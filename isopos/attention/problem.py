"""What attention accepts: every check ends in one frozen value, before any work, and each has one clear error."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple, Never, TypedDict, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from isopos.attention.reference import divides_out
from isopos.attention.tensors import broadcasts, check_inputs, check_tensor
from isopos.catalog import at_least, expect
from isopos.exact import broadcast, wide_device
from isopos.feature_maps import FeatureMap, Phi, identity, undivided
from isopos.maps import Composed, Identity, TokenMap
from isopos.ops.linear.features import Decays
from isopos.paths import Path, along, parts
from isopos.state import State, expect_state
from isopos.terms import Clipped, Term

__all__ = ["LinearOptions", "Problem", "SoftmaxOptions", "TransportPair", "check_linear", "check_softmax", "group", "refuse"]
__all__ += ["restored"]

IsometryPair = TokenMap | tuple[TokenMap, TokenMap] | None
DecayPair = Tensor | tuple[Tensor, Tensor] | None
SegmentPair = Tensor | tuple[Tensor, Tensor] | None
TransportPair = tuple[TokenMap, TokenMap] | None
Layout = Literal["bhtd", "bthd"]


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


PIECE = (1 << 15) - 1  # the most numbers that PyTorch leaves to one thread
OF_WIDE = ("decay", "decays", "path")  # tensors of a state that are float64
OWN = {"linear": ("feature_map", "denominator"), "softmax": ("scale", "locality")}  # what schemes give


def refuse(kind: str, names: Sequence[str]) -> Never:
    """Raise TypeError for arguments that attention of a kind has not, though schemes built for the other kind give them."""
    other = "softmax" if kind == "linear" else "linear"
    remedy = f"; build the scheme with attention={kind!r}" if set(names) & set(OWN[other]) else ""
    raise TypeError(f"{kind}_attention() got an unexpected keyword argument {names[0]!r}{remedy}")


class Problem(NamedTuple):
    """Attention, checked: arguments as they were given, pairs as pairs.

    `locality`, `attn_mask` and `dropout` belong to softmax attention, `g` and what follows to linear attention.

    Attributes:
        batch: Leading dimensions ``[*b h]`` of the output; with groups ``[groups *b h]``, h being those of keys.
        layout: In which the queries were given, and the output is to be; here all is ``[*b h t d]``.
        groups: How many neighbouring heads of queries share one of keys, as a first axis of queries; 1 for none.
        segments: Ids of queries and keys; those of queries may be those of all keys.
        kind: Of the states that this attention writes.
        g: Log decays of queries and keys that the sums have; those of segments are not those given.
        before: That of the token before, in a stream.
        path: Where the last token is on the paths of content ``[*b h c]``.
        outward: Of transported values, the map of outputs; the values are mapped here.
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
    phi: Phi
    groups: int = 1
    layout: str = "bhtd"
    kind: str = ""
    window: int | None = None
    locality: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout: float = 0.0
    g: Decays = None
    before: Tensor | None = None
    path: Tensor | None = None
    denominator: str | None = None
    outward: TokenMap | None = None

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


def group(problem: Problem) -> Problem:
    """The problem with heads of queries that share one of keys as an axis of their own, the first one of queries.

    Where maps, decays or terms are one a head of queries, keys and values are repeated instead.
    """
    q, k, v = problem.q, problem.k, problem.v
    heads, own = _heads(q, k, v)
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
        return problem._replace(k=k, v=v)
    if own == 1:
        return problem  # left to broadcasting
    groups, batch = heads // own, problem.batch
    q = q.expand(*batch[:-1], *q.shape[-3:]).unflatten(-3, (own, groups)).movedim(-3, 0)
    attn_mask = problem.attn_mask
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == heads:
        attn_mask = attn_mask[(None,) * (len(batch) + 2 - attn_mask.ndim)].unflatten(-3, (own, groups)).movedim(-3, 0)
    return problem._replace(q=q, batch=torch.Size((groups, *batch[:-1], own)), groups=groups, attn_mask=attn_mask)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Heads of queries and of keys where the former share the latter; otherwise one number twice."""
    heads, own = q.shape[-3], max(k.shape[-3], v.shape[-3])
    return (heads, own) if own and heads > own and heads % own == 0 else (heads, heads)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v ``[*b h t d]`` of either layout."""
    if layout == "bhtd":
        return q, k, v
    expect("layout", layout, get_args(Layout))
    check_inputs(q, k, v)
    q, k, v = (x if x.ndim < 3 else x.transpose(-3, -2) for x in (q, k, v))
    return q, k, v


def restored(out: Tensor, problem: Problem) -> Tensor:
    """An output with the heads, and in the layout, of the queries that were given."""
    out = out if problem.groups == 1 else out.movedim(0, -3).flatten(-4, -3)
    out = out if problem.outward is None else problem.outward(out)
    return out if problem.layout == "bhtd" else out.transpose(-3, -2)


def check_linear(q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, *, streams: bool) -> Problem:
    """The problem of linear attention; ValueError where its arguments have none."""
    q, k, v = _heads_first(q, k, v, options.get("layout", "bhtd"))
    problem = check_common(q, k, v, options, streams=streams)
    phi, denominator, segments = options.get("feature_map"), options.get("denominator", "plain"), problem.segments
    state, decay, causal = problem.state, problem.decay, problem.causal
    check_denominator(denominator, q)
    check_feature_map(phi)
    _check_factors(problem, denominator, options)
    t, s = q.shape[-2], k.shape[-2]
    if decay is not None and not causal and t != s:
        raise ValueError(f"decay: without causal, expected as many queries as keys, got {t} and {s}")
    _check_segments(options.get("segment_ids"), q, k, problem.batch)
    before = None if state is None else state["decay"]
    if segments is None:
        _check_order(decay, causal, before)
    phi, problem = identity if phi is None else phi, group(_carried(problem, options.get("transport")))
    phi = phi if divides_out(denominator, problem.rho_q, problem.rho_k) else undivided(phi)
    if state is None:
        q, k, v = (x.expand(*problem.batch, *x.shape[-2:]) for x in (problem.q, problem.k, problem.v))
        return problem._replace(q=q, k=k, v=v, g=decay, phi=phi, denominator=denominator)
    name = phi.name if isinstance(phi, FeatureMap) else getattr(phi, "__name__", type(phi).__name__)
    kind = _kind("linear", problem, (name, f"denominator {denominator}"))
    state.expect(kind, problem.of_keys)
    if not problem.empty and state.in_place and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("state: expected State(), or no gradients, got a state to update in place; use torch.no_grad()")
    return problem._replace(kind=kind, g=decay, before=before, phi=phi, denominator=denominator)


def check_softmax(q: Tensor, k: Tensor, v: Tensor, options: SoftmaxOptions, *, streams: bool) -> Problem:
    """The problem of softmax attention; ValueError where its arguments have none."""
    locality, state = options.get("locality"), options.get("state")
    q, k, v = _heads_first(q, k, v, options.get("layout", "bhtd"))
    seen = 0 if not isinstance(state, State) or (keys := state["keys"]) is None else keys.shape[-2]
    problem = check_common(q, k, v, options, streams=streams, seen=seen)
    t, s = q.shape[-2], k.shape[-2] + seen
    _check_segments(options.get("segment_ids"), q, k, problem.batch)
    if state is not None and state.in_place:
        raise ValueError("state: expected State() for softmax attention, whose cache grows, got one to update in place")
    if locality is not None:
        check_tensor("locality", locality, q)
    if locality is not None and not (locality.shape[-2:] == (t, s) and broadcasts(locality.shape[:-2], problem.batch[:-1])):
        raise ValueError(f"locality: expected [*b {t} {s}], got {list(locality.shape)}")
    attn_mask, window, dropout = options.get("attn_mask"), problem.window, options.get("dropout", 0.0)
    if attn_mask is not None:
        _check_pairs(attn_mask, q, torch.Size((*problem.batch, t, s)))
        if problem.state is not None and window is not None:
            raise ValueError(
                "attn_mask: expected none beside a window in a stream, which forgets the tokens before, got one"
            )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: expected a probability below 1, got {dropout}")
    if locality is not None or attn_mask is not None or dropout:
        problem = problem._replace(locality=locality, attn_mask=attn_mask, dropout=dropout)
    if problem.rho_q.delicate or problem.rho_k.delicate:
        problem = _at_least_float32(problem)
    problem = group(_carried(problem, options.get("transport")))
    if problem.state is None:
        return problem
    kind = _kind("softmax", problem, () if window is None else (f"window {window}",))
    problem.state.expect(kind, problem.of_keys)
    return problem._replace(kind=kind)


def _check_pairs(attn_mask: Tensor, q: Tensor, pairs: torch.Size) -> None:
    """ValueError where a mask of pairs does not fit ``[*b h t s]``."""
    check_tensor("attn_mask", attn_mask, q)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(
            f"attn_mask: expected bool, True for a key that takes part, or floats, which are added, got {attn_mask.dtype}"
        )
    if not broadcasts(attn_mask.shape, pairs):
        raise ValueError(
            f"attn_mask: expected what broadcasts to [*b h t s] {list(pairs)}, got {list(attn_mask.shape)}; "
            "one a sample needs an axis of heads, attn_mask[:, None]"
        )


def check_common(q: Tensor, k: Tensor, v: Tensor, options: Any, *, streams: bool = False, seen: int = 0) -> Problem:
    """What both kinds of attention check alike; heads are not grouped yet."""
    check_inputs(q, k, v)
    state, terms, ids = options.get("state"), options.get("terms"), options.get("segment_ids")
    causal, mask = options.get("causal", False), options.get("mask")
    expect_state(state)
    terms = () if terms is None else tuple(terms)
    batch, rho_q, rho_k = _check(q, k, v, options.get("isometry"), mask, terms, seen)
    decay = _check_decay(options.get("decay"), q, k, v)
    if state is not None or streams:
        for name, tensor in () if state is None else state.tensors.items():
            if name != "positions":  # the scheme's
                check_tensor("state", tensor, q, wide_device(q.device) if name in OF_WIDE else None)
        _check_stream(causal, q, k)
        state = state or State()
        state = state if streams else replace(state, in_place=False)  # nobody takes the next one
    segments = ids if isinstance(ids, tuple) or ids is None else (ids, ids)
    problem, window = Problem(q, k, v, batch, rho_q, rho_k, decay, causal, terms, mask, segments, state, identity), None
    _check_transport(options.get("transport"), q, v, batch)
    if options.get("layout", "bhtd") != "bhtd":
        problem = problem._replace(layout=options["layout"])
    if options.get("window") is not None:
        window = at_least("window", options["window"])
        window = window if state is not None or window < max(q.shape[-2], k.shape[-2]) else None  # all are in it
    problem = problem if window is None else problem._replace(window=window)
    path = options.get("path") or ()
    return _with_path(problem, tuple(path) if isinstance(path, Sequence) else (path,)) if path else problem


def _with_path(problem: Problem, path: Sequence[Path]) -> Problem:
    """The problem with the log decay and the rotation that tokens' keys add; ValueError where they have no path."""
    q, k, state = problem.q, problem.k, problem.state
    t, s, (heads, own) = q.shape[-2], k.shape[-2], _heads(q, k, problem.v)
    if not problem.causal:
        raise ValueError(
            "causal: expected True beside a path that tokens make (forget gates, selective rotation), which runs from a key "
            "to a later query, got False"
        )
    if t > s:
        raise ValueError(f"path: expected no more queries than keys, whose steps it is made of, got {t} and {s}")
    for part in path:
        if not isinstance(part, Path):
            raise TypeError(f"path: expected those of isopos.paths, got {type(part).__name__}")
        if part.features != k.shape[-1] or part.heads not in (1, own, heads):
            raise ValueError(
                f"path: expected one of {k.shape[-1]} features and {own} heads, those of k, got one of {part.features} and "
                f"{part.heads}"
            )
        check_tensor("path", part.parameter, q)
    before, columns = None if state is None else state["path"], sum(part.columns for part in path)
    if before is not None and before.shape[-1] != columns:
        raise ValueError(f"state: expected one of {columns} paths, got one of {before.shape[-1]}; start with State()")
    if heads != own and any(part.heads == heads for part in path):
        k = k.repeat_interleave(heads // k.shape[-3], -3)
    total = along(path, k, problem.mask, before)
    g, turn = parts(path, total, torch.promote_types(q.dtype, torch.float32), q.device)
    start = torch.zeros_like(total.sum(-2)) if before is None else before
    changes: dict[str, Any] = {"path": total[..., -1, :] if s else start}
    if g is not None:
        pair = problem.decay or (0, 0)
        changes["decay"] = pair[0] + g[..., s - t :], pair[1] + g
    if turn is not None:
        last = turn if t == s else turn.last(t)  # a compiler takes the length of a slice for a constant
        for side, rho, add in (("rho_q", problem.rho_q, last), ("rho_k", problem.rho_k, turn)):
            changes[side] = add if isinstance(rho, Identity) else Composed(rho, add)
    return problem._replace(**changes)


def _check(
    q: Tensor, k: Tensor, v: Tensor, isometry: IsometryPair, mask: Tensor | None, terms: Sequence[Term], seen: int = 0
) -> tuple[torch.Size, TokenMap, TokenMap]:
    """Batch and isometries of queries and keys; ValueError where the arguments do not fit together, after `seen` keys."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3 or not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating tensor [*b h t d], got {x.dtype} {list(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype} as q, got {x.dtype}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected {q.shape[-1]} features as q, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: expected {k.shape[-2]} tokens as k, got {v.shape[-2]}")
    heads, own = _heads(q, k, v)
    try:
        of_keys, of_values = k.shape[:-2], v.shape[:-2]
        if heads != own:
            of_keys, of_values = _shared(of_keys, heads, own), _shared(of_values, heads, own)
        batch = broadcast(q.shape[:-2], of_keys, of_values)
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v: expected leading dimensions [*b h] that broadcast, q's heads a multiple of k's, got {shapes}"
        ) from None
    if mask is not None:
        check_tensor("mask", mask, q)
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
        _check_term(term, q, k, v, batch, seen, (heads, own))
    rho_q, rho_k = isometry if isinstance(isometry, tuple) else (isometry, isometry)
    for name, rho, x in (("q", rho_q, q), ("k", rho_k, k)):
        if rho is None or (x is k and rho is rho_q and k.shape == q.shape):
            continue
        if not isinstance(rho, TokenMap):
            raise TypeError(f"isometry: expected what an encoding returns at positions, got {type(rho).__name__}")
        rho.check(x, name)
        for tensor in rho.tensors():
            check_tensor("isometry", tensor, q)
        if not _fits(rho.leading, x.shape[:-2], heads, own):
            raise ValueError(
                f"isometry: expected leading dimensions [*b heads] that broadcast to {list(x.shape[:-2])} of {name}, "
                f"got {list(rho.leading)}; give the encoding these heads, and positions these samples"
            )
    return batch, rho_q or Identity(), rho_k or Identity()


def _check_transport(transport: TransportPair, q: Tensor, v: Tensor, batch: torch.Size) -> None:
    """TypeError or ValueError where maps of values and of outputs do not fit."""
    if transport is None:
        return
    if not isinstance(transport, tuple) or not all(isinstance(rho, TokenMap) for rho in transport) or len(transport) != 2:
        got = type(transport).__name__
        raise TypeError(f"transport: expected a pair of maps, of values and of outputs, as scheme.at gives them, got {got}")
    for name, rho, x, leading in (("v", transport[0], v, v.shape[:-2]), ("q", transport[1], q, batch)):
        for tensor in rho.tensors():
            check_tensor("transport", tensor, q)
        if rho.features not in (None, v.shape[-1]) or rho.length not in (None, x.shape[-2]):
            got = f"{v.shape[-1]} features of values, {x.shape[-2]} tokens of {name}"
            raise ValueError(f"transport: expected {got}, got maps of {rho.features} features, {rho.length} tokens")
        if not broadcasts(rho.leading, leading):
            raise ValueError(
                f"transport: expected leading dimensions that broadcast to {list(leading)} of {name}, got "
                f"{list(rho.leading)}; maps of a head each need as many heads of values as of queries"
            )


def _carried(problem: Problem, transport: TransportPair) -> Problem:
    """The problem with values at the places of their keys, and the map that brings outputs to those of their queries."""
    if transport is None:
        return problem
    problem = problem if transport[0].isometric else _at_least_float32(problem)
    mask, v = problem.mask_of_keys, problem.v
    v = transport[0](v if mask is None else torch.where(mask, v, 0))  # what is masked may hold anything
    return problem._replace(v=v, outward=transport[1])


def _at_least_float32(problem: Problem) -> Problem:
    q, k, v = (x if x.dtype.itemsize >= 4 else x.float() for x in (problem.q, problem.k, problem.v))
    return problem._replace(q=q, k=k, v=v)


def _shared(leading: torch.Size, heads: int, own: int) -> torch.Size:
    """Leading dimensions ``[*b h]`` of keys, with the heads of the queries that share them."""
    return leading if leading[-1] in (1, heads) or leading[-1] != own else torch.Size((*leading[:-1], heads))


def _fits(leading: torch.Size, to: torch.Size, heads: int, own: int) -> bool:
    """Whether leading dimensions ``[*b h]`` broadcast to others; where heads share, h may be those of queries or of keys."""
    return broadcasts(leading, to) or (
        leading[-1:] in ((heads,), (own,)) and heads != own and broadcasts(leading[:-1], to[:-1])
    )


def _check_term(term: Term, q: Tensor, k: Tensor, v: Tensor, batch: torch.Size, seen: int, heads: tuple[int, int]) -> None:
    """ValueError where a relative term does not fit queries and keys."""
    if not isinstance(term, Term):
        raise TypeError(f"terms: expected what a relative bias returns at positions, got {type(term).__name__}")
    for x in (getattr(term, field.name) for field in fields(term)):  # PyTorch 2.11 cannot trace vars
        if isinstance(x, Tensor):
            check_tensor("terms", x, q)
    width = {"none": None, "value": v.shape[-1]}.get(term.side, q.shape[-1])
    if term.heads not in (1, batch[-1], heads[1]) or width not in (None, term.table.shape[-1]):
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


def _check_decay(decay: DecayPair, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """The log decays of queries and keys; ValueError where they do not fit."""
    if decay is None:
        return None
    pair, heads = decay if isinstance(decay, tuple) else (decay, decay), _heads(q, k, v)
    for name, g, x in (("queries", pair[0], q), ("keys", pair[1], k)):
        check_tensor("decay", g, q, wide_device(q.device))
        if g.dtype != torch.float64:
            raise ValueError(f"decay: expected float64, whose differences stay exact at any length, got {g.dtype}")
        if g.ndim < 1 or g.shape[-1] != x.shape[-2] or not _fits(g.shape[:-1], x.shape[:-2], *heads):
            expected = [*x.shape[:-2], x.shape[-2]]
            swapped = g.ndim > 0 and g.shape[-1] == x.shape[-3] and x.ndim > 3
            remedy = "; [b t h d] needs layout='bthd'" if swapped else ""
            raise ValueError(
                f"decay: expected {expected} of the {name}, or what broadcasts to it, got {list(g.shape)}{remedy}"
            )
    return pair


def check_feature_map(phi: Phi | None) -> None:
    """TypeError where it is no function."""
    if phi is not None and not callable(phi):
        raise TypeError(f"feature_map: expected one of isopos.feature_maps, or another function of tensors, got {phi!r}")


def check_denominator(denominator: str | None, q: Tensor) -> None:
    """ValueError where there is no such denominator, of these features."""
    if not (denominator is None or (isinstance(denominator, str) and denominator in ("plain", "encoded", "complex"))):
        raise ValueError(f"denominator: expected 'plain', 'encoded', 'complex' or None, got {denominator!r}")
    if denominator == "complex" and q.shape[-1] % 2:
        raise ValueError(
            f"denominator: expected an even number of features for 'complex', which pairs them, got {q.shape[-1]}"
        )


def _check_factors(problem: Problem, denominator: str | None, options: LinearOptions) -> None:
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
    if terms and denominator == "complex":
        raise ValueError("denominator: expected 'plain', 'encoded' or None beside terms, got 'complex'")


def _check_stream(causal: bool, q: Tensor, k: Tensor) -> None:
    """ValueError where there is no stream to continue."""
    if not causal or q.shape[-2] != k.shape[-2]:
        what = "causal=False" if not causal else f"{q.shape[-2]} queries and {k.shape[-2]} keys"
        raise ValueError(f"state: expected causal attention of as many queries as keys, the next tokens, got {what}")


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


def _check_segments(segment_ids: SegmentPair, q: Tensor, k: Tensor, batch: torch.Size) -> None:
    """ValueError where segment ids do not fit the tokens of the keys, or of both."""
    if segment_ids is None:
        return
    t, s = q.shape[-2], k.shape[-2]
    pair = isinstance(segment_ids, tuple)
    for ids, count in zip(segment_ids, (t, s), strict=True) if pair else [(segment_ids, s)]:
        check_tensor("segment_ids", ids, q)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim < 1 or ids.shape[-1] != count:
            raise ValueError(f"segment_ids: expected integers [*b {count}], one a token, got {ids.dtype} {list(ids.shape)}")
        if not broadcasts(ids.shape[:-1], batch[:-1]):
            raise ValueError(
                f"segment_ids: expected leading dimensions that broadcast to {list(batch[:-1])}, got {list(ids.shape)}"
            )
    if t > s and not pair:
        raise ValueError(f"segment_ids: expected no more queries than keys, got {t} and {s}")


def _check_order(pair: tuple[Tensor, Tensor] | None, causal: bool, before: Tensor | None = None) -> None:
    """ValueError where a weight would grow with distance; not while compiling, nor on a GPU, which would have to wait."""
    if pair is None or torch.compiler.is_compiling() or pair[0].device.type != "cpu" or isinstance(pair[0], FakeTensor):
        return
    query, key = pair
    rises = _rises(key) or (query is not key and _rises(query))
    if rises or (before is not None and (key[..., :1] > before[..., None]).any()):
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


def _rises(g: Tensor) -> bool:
    """Whether a number is larger than the one before it, in pieces that one thread looks at: several may have to wait."""
    count = g.shape[-1] - 1
    step = max(1, PIECE // max(1, g.shape[:-1].numel()))
    pairs = ((n, min(n + step, count)) for n in range(0, count, step))
    return any(bool((g[..., n + 1 : end + 1] > g[..., n:end]).any()) for n, end in pairs)
