"""Checks of single arguments of attention, each with one error message."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from isopos.catalog import expect
from isopos.deprecation import renamed
from isopos.exact import broadcast, float64_device
from isopos.feature_maps import Phi
from isopos.maps import Identity, TokenMap
from isopos.parallel import Shards
from isopos.phases import ContentPhase, HouseholderProduct, Phase
from isopos.state import State, expect_batch
from isopos.terms import Term

IsometryPair = TokenMap | tuple[TokenMap, TokenMap] | None
DecayPair = Tensor | tuple[Tensor, Tensor] | None
SegmentPair = Tensor | tuple[Tensor, Tensor] | None
TransportPair = tuple[TokenMap, TokenMap] | None
AxisOrder = Literal["bhtd", "bthd"]
__getattr__ = renamed(__name__, {"Layout": "isopos.attention.checks.AxisOrder"})

PIECE = (1 << 15) - 1  # largest number of elements that PyTorch processes in one thread
OF_FLOAT64 = ("decay", "decays", "path")  # tensors of a state in float64


def check_inputs(q: Tensor, k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as ``[*b h t d]``, from either layout."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q)
    if layout != "bhtd":
        expect("layout", layout, get_args(AxisOrder))
        q, k, v = (x if x.ndim < 3 else x.transpose(-3, -2) for x in (q, k, v))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3 or not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating tensor [*b h t d], got {x.dtype} {list(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype} as q, got {x.dtype}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected {q.shape[-1]} features as q, got {k.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: expected {k.shape[-2]} tokens as k, got {v.shape[-2]}")
    return q, k, v


def heads_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Numbers of query heads and key heads if groups of query heads share keys; otherwise the same number twice."""
    heads, key_heads = q.shape[-3], max(k.shape[-3], v.shape[-3])
    return (heads, key_heads) if key_heads and heads > key_heads and heads % key_heads == 0 else (heads, heads)


def check_leading(q: Tensor, k: Tensor, v: Tensor, heads: int, key_heads: int) -> torch.Size:
    """Leading dimensions ``[*b h]`` of the output; ValueError if those of q, k and v do not broadcast."""
    try:
        of_keys, of_values = k.shape[:-2], v.shape[:-2]
        if heads != key_heads:
            of_keys, of_values = _shared(of_keys, heads, key_heads), _shared(of_values, heads, key_heads)
        return broadcast(q.shape[:-2], of_keys, of_values)
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v: expected leading dimensions [*b h] that broadcast, q's heads a multiple of k's, got {shapes}"
        ) from None


def check_mask(mask: Tensor, q: Tensor, k: Tensor, batch: torch.Size) -> None:
    """ValueError if a mask of keys does not fit."""
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


def check_term(term: Term, q: Tensor, k: Tensor, v: Tensor, batch: torch.Size, seen: int, key_heads: int) -> None:
    """ValueError if a relative term does not fit queries and keys."""
    if not isinstance(term, Term):
        raise TypeError(f"terms: expected terms that a relative bias returns at positions, got {type(term).__name__}")
    for x in (getattr(term, field.name) for field in fields(term)):  # PyTorch 2.11 cannot trace vars
        if isinstance(x, Tensor):
            check_tensor("terms", x, q)
    width = {"none": None, "value": v.shape[-1]}.get(term.side, q.shape[-1])
    if term.heads not in (1, batch[-1], key_heads) or width not in (None, term.table.shape[-1]):
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


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    """A value of queries and of keys, or one value twice; ValueError for another number of them."""
    if isinstance(value, tuple) and len(value) != 2:
        raise ValueError(f"{name}: expected one, or a pair of queries' and keys', got {len(value)}")
    return value if isinstance(value, tuple) else (value, value)


def check_isometry(
    isometry: IsometryPair, q: Tensor, k: Tensor, heads: int, key_heads: int, *, features: bool = True
) -> tuple[TokenMap, TokenMap]:
    """The maps of queries and keys; TypeError or ValueError if they do not fit.

    Without `features` widths are not checked, because a feature map may return more features than q and k have.
    """
    rho_q, rho_k = _pair("isometry", isometry)
    for name, rho, x in (("q", rho_q, q), ("k", rho_k, k)):
        if rho is None or (name == "k" and rho is rho_q and k.shape == q.shape):
            continue
        if not isinstance(rho, TokenMap):
            raise TypeError(f"isometry: expected maps that an encoding returns at positions, got {type(rho).__name__}")
        rho.check(x, name, features=features)
        for tensor in rho.tensors():
            check_tensor("isometry", tensor, q)
        if not _fits(rho.leading, x.shape[:-2], heads, key_heads):
            raise ValueError(
                f"isometry: expected leading dimensions [*b heads] that broadcast to {list(x.shape[:-2])} of {name}, "
                f"got {list(rho.leading)}; give the encoding these heads, and positions these samples"
            )
    return rho_q or Identity(), rho_k or Identity()


def check_decay(decay: DecayPair, q: Tensor, k: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor] | None:
    """The log decays of queries and keys; ValueError if they do not fit."""
    if decay is None:
        return None
    pair = _pair("decay", decay)
    for name, g, x in (("queries", pair[0], q), ("keys", pair[1], k)):
        if name == "keys" and g is pair[0] and k.shape == q.shape:
            continue
        check_tensor("decay", g, q, float64_device(q.device))
        if g.dtype != torch.float64:
            raise ValueError(f"decay: expected float64, whose differences stay exact at any length, got {g.dtype}")
        if g.ndim < 1 or g.shape[-1] != x.shape[-2] or not _fits(g.shape[:-1], x.shape[:-2], heads, key_heads):
            expected = [*x.shape[:-2], x.shape[-2]]
            swapped = g.ndim > 0 and g.shape[-1] == x.shape[-3] and x.ndim > 3
            remedy = "; [b t h d] needs layout='bthd'" if swapped else ""
            raise ValueError(
                f"decay: expected {expected} of the {name}, or a shape that broadcasts to it, got {list(g.shape)}{remedy}"
            )
    return pair


def check_stream(state: State | None, causal: bool, q: Tensor, k: Tensor, batch: torch.Size, key_heads: int) -> None:
    """ValueError if the arguments do not continue a stream, or its tensors are of other samples or on another device.

    Sums and keys are checked by `State.check_kind`, after all arguments.
    """
    for name, features in (("decay", 0), ("segment", 0), ("path", 1)):
        if state is not None and (tensor := state[name]) is not None:
            leading = tensor.shape[: tensor.ndim - features]
            leading = torch.Size((*leading, 1)) if name == "segment" else leading
            expect_batch(batch, leading, _fits(leading, batch, batch[-1], key_heads))
    for name, tensor in () if state is None else state.tensors.items():
        if name != "positions":  # the scheme's
            check_tensor("state", tensor, q, float64_device(q.device) if name in OF_FLOAT64 else None)
    if not causal or q.shape[-2] != k.shape[-2]:
        what = "causal=False" if not causal else f"{q.shape[-2]} queries and {k.shape[-2]} keys"
        raise ValueError(f"state: expected causal attention of as many queries as keys, the next tokens, got {what}")


def check_group(q: Tensor, k: Tensor, aligned: bool, streams: bool) -> None:
    """ValueError if attention cannot run over a group of processes; `aligned` if queries and keys are the same tokens."""
    if torch.compiler.is_compiling():
        raise ValueError("group: expected none under a compiler, which cannot trace collectives with gradients, got one")
    if streams:
        raise ValueError("group: expected none in a stream, whose state one process holds, got one")
    t, s = q.shape[-2], k.shape[-2]
    if not t or not s or (aligned and t != s):
        what = "as many queries as keys, at least one," if aligned else "at least one query and one key"
        raise ValueError(f"group: expected {what} on every process, got {t} and {s}")


def check_ring(shards: Shards, linear: bool, phases: bool, dropout: float) -> None:
    """ValueError if attention cannot run over zig-zag shards, or round a ring."""
    if shards.zigzag and linear:
        raise ValueError(
            "group: expected contiguous shards in linear attention, whose processes have the same work, got zig-zag ones"
        )
    if shards.zigzag and phases:
        raise ValueError(
            "group: expected contiguous shards with content-dependent phases, which sum up in the order of tokens, "
            "got zig-zag ones"
        )
    if shards.ring and dropout:
        raise ValueError(
            f"dropout: expected 0 round a ring, which computes weights again in the backward pass, got {dropout}; a group "
            "without Ring has it"
        )


def check_transport(transport: tuple[TokenMap, TokenMap], q: Tensor, v: Tensor, batch: torch.Size) -> None:
    """TypeError or ValueError if maps of values and of outputs do not fit."""
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
                f"{list(rho.leading)}; maps per head need as many heads of values as of queries"
            )


def check_phases(phases: Sequence[Phase], q: Tensor, k: Tensor, causal: bool, heads: int, key_heads: int) -> None:
    """TypeError or ValueError if content-dependent phases do not fit queries and keys."""
    t, s = q.shape[-2], k.shape[-2]
    if not causal:
        raise ValueError(
            "causal: expected True with content-dependent phases (forget gates, selective rotation, Householder products), "
            "which run from a key to a later query, got False"
        )
    if t > s:
        raise ValueError(f"phases: expected no more queries than keys, from which steps are read, got {t} and {s}")
    for part in phases:
        if not isinstance(part, ContentPhase | HouseholderProduct):
            raise TypeError(f"phases: expected those of isopos.phases, got {type(part).__name__}")
        if part.features != k.shape[-1] or part.heads not in (1, key_heads, heads):
            raise ValueError(
                f"phases: expected one of {k.shape[-1]} features and {key_heads} heads, those of k, got one of "
                f"{part.features} and {part.heads}"
            )
        check_tensor("phases", part.parameter, q)


def check_product(product: HouseholderProduct | None, terms: Sequence[Term], group: bool) -> None:
    """ValueError for arguments that do not go with a Householder product."""
    if product is None:
        return
    if terms:
        raise ValueError(f"terms: expected none with a Householder product, which changes cached keys, got {len(terms)}")
    if group:
        raise ValueError(
            "group: expected none with a Householder product, which carries keys over all later tokens, got one"
        )


def check_feature_map(phi: Phi | None) -> None:
    """TypeError if it is not a function."""
    if phi is not None and not callable(phi):
        raise TypeError(f"feature_map: expected one of isopos.feature_maps, or another function of tensors, got {phi!r}")


def check_denominator(denominator: str | None, q: Tensor) -> None:
    """ValueError for an unknown denominator, or one that does not fit the features."""
    if not (denominator is None or (isinstance(denominator, str) and denominator in ("plain", "encoded", "complex"))):
        raise ValueError(f"denominator: expected 'plain', 'encoded', 'complex' or None, got {denominator!r}")
    if denominator == "complex" and q.shape[-1] % 2:
        raise ValueError(
            f"denominator: expected an even number of features for 'complex', which pairs them, got {q.shape[-1]}"
        )


def check_segments(segment_ids: Tensor | tuple[Tensor, Tensor], q: Tensor, k: Tensor, batch: torch.Size) -> None:
    """ValueError if segment ids do not fit the tokens of keys, or of queries and keys."""
    t, s = q.shape[-2], k.shape[-2]
    pair = isinstance(segment_ids, tuple)
    for ids, count in zip(_pair("segment_ids", segment_ids), (t, s), strict=True) if pair else [(segment_ids, s)]:
        check_tensor("segment_ids", ids, q)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim < 1 or ids.shape[-1] != count:
            raise ValueError(
                f"segment_ids: expected integers [*b {count}], one per token, got {ids.dtype} {list(ids.shape)}"
            )
        if not broadcasts(ids.shape[:-1], batch[:-1]):
            raise ValueError(
                f"segment_ids: expected leading dimensions that broadcast to {list(batch[:-1])}, got {list(ids.shape)}"
            )
    if t > s and not pair:
        raise ValueError(f"segment_ids: expected no more queries than keys, got {t} and {s}")


def check_pairs(attn_mask: Tensor, q: Tensor, pairs: torch.Size) -> None:
    """ValueError if a mask of pairs does not fit ``[*b h t s]``."""
    check_tensor("attn_mask", attn_mask, q)
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(
            f"attn_mask: expected bool, True for a key that takes part, or floats, which are added, got {attn_mask.dtype}"
        )
    if not broadcasts(attn_mask.shape, pairs):
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to [*b h t s] {list(pairs)}, got {list(attn_mask.shape)}; "
            "one per sample needs an axis of heads, attn_mask[:, None]"
        )


def check_order(pair: tuple[Tensor, Tensor], causal: bool, before: Tensor | None = None) -> None:
    """ValueError if a weight would grow with distance; no check in a compiler or on a GPU, where it would synchronise."""
    query, key = pair
    if not is_readable(query):
        return
    if rises(key, before) or (query is not key and rises(query)):
        remedy = "sort tokens by position, and give segment_ids where positions begin again (x, ids = isopos.packed(...))"
        raise ValueError(f"decay: expected log decays that do not increase along tokens; {remedy}")
    if (key[..., -1:] == -torch.inf).any():  # the smallest one
        raise ValueError("decay: expected finite log decays, got -inf; a mask or segment_ids end what tokens see")
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


def is_readable(x: Tensor) -> bool:
    """Whether numbers can be looked at: not in a compiler, nor on a GPU, where it would synchronise."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and not isinstance(x, FakeTensor)


def rises(g: Tensor, before: Tensor | None = None) -> bool:
    """Whether any number exceeds its predecessor, in pieces small enough for one thread; several threads might wait."""
    if before is not None and (g[..., :1] > before[..., None]).any():
        return True
    count = g.shape[-1] - 1
    step = max(1, PIECE // max(1, g.shape[:-1].numel()))
    pairs = ((n, min(n + step, count)) for n in range(0, count, step))
    return any(bool((g[..., n + 1 : end + 1] > g[..., n:end]).any()) for n, end in pairs)


def _shared(leading: torch.Size, heads: int, key_heads: int) -> torch.Size:
    """Leading dimensions ``[*b h]`` of keys, with the number of query heads that share them."""
    return leading if leading[-1] in (1, heads) or leading[-1] != key_heads else torch.Size((*leading[:-1], heads))


def _fits(leading: torch.Size, to: torch.Size, heads: int, key_heads: int) -> bool:
    """Whether leading dimensions ``[*b h]`` broadcast to others; with shared heads, h may count query heads or key heads."""
    return broadcasts(leading, to) or (
        leading[-1:] in ((heads,), (key_heads,)) and heads != key_heads and broadcasts(leading[:-1], to[:-1])
    )


def check_tensor(name: str, x: Any, q: Tensor, device: torch.device | None = None) -> None:
    """TypeError or ValueError if x is not a dense tensor on q's device.

    Log decays, which are float64, are on the CPU if q's device has no float64.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    device = q.device if device is None else device
    if type(x) is type(q) is Tensor and x.layout is torch.strided and x.device == device and not x.is_nested:
        return
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested one" if x.is_nested else str(x.layout)
        raise ValueError(f"{name}: expected a dense tensor, got {kind}; use to_dense(), or pack sequences with segment_ids")
    if x.device != device or isinstance(x, FakeTensor) is not isinstance(q, FakeTensor):
        actual, expected = (f"{at}{' (fake)' * isinstance(a, FakeTensor)}" for at, a in ((x.device, x), (device, q)))
        raise ValueError(
            f"{name}: expected a tensor on {expected} as q, got one on {actual}; move it, or positions, to q's device"
        )


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a shape broadcasts to another without changing it."""
    return len(shape) <= len(to) and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(to), strict=False))
