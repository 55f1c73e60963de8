"""Linear attention with positions: check, group, segment, sum, divide."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from isopos.attention import reference
from isopos.attention.checks import DecayPair, IsometryPair, Layout, TransportPair
from isopos.attention.clipped import values_of_terms, with_terms, with_terms_of_stream
from isopos.attention.problem import LinearOptions, LinearProblem, check_linear, check_naive, refuse, restored
from isopos.exact import full_precision
from isopos.feature_maps import Phi, identity, sides
from isopos.maps import Chain, Gather, Identity, Reflection, Rotation, TokenMap
from isopos.ops import linear
from isopos.ops.linear.features import ALL_READY, READY, Features, Past, Sums, with_ones
from isopos.paths import Path
from isopos.state import State
from isopos.terms import Term

__all__ = ["explain", "linear_attention", "naive_linear_attention"]


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = False, **options: Unpack[LinearOptions]
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **options: Unpack[LinearOptions]
) -> tuple[Tensor, State]: ...
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    feature_map: Phi | None = None,
    decay: DecayPair = None,
    path: Sequence[Path] | None = None,
    denominator: str | None = "plain",
    causal: bool = False,
    terms: Sequence[Term] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    segment_ids: Tensor | None = None,
    transport: TransportPair = None,
    layout: Layout = "bhtd",
    state: State | None = None,
    return_state: bool = False,
    **others: Any,
) -> Tensor | tuple[Tensor, State]:
    """Attention with weights <rho(x_i) phi(q_i), rho(x_j) phi(k_j)> exp(g_i - g_j), at a cost proportional to length.

    Args:
        q: Queries ``[*b h t d]``, any floating dtype; sums are float32 or wider.
        k: Keys ``[*b h s d]``.
        v: Values ``[*b h s e]``.
        isometry: rho, evaluated at the positions of q and k; a pair (of queries, of keys) for cross-attention.
        feature_map: phi, applied before rho; None leaves q and k as they are.
        decay: g, a log decay ``[*b h t]`` or ``[h t]`` in float64 that does not increase along tokens (checked on the CPU);
            a pair for cross-attention. Without `causal` it counts both ways, exp(-|g_i - g_j|).
        path: What tokens add by their content, with `causal`: `isopos.paths.Forget` to g, `isopos.paths.Turn` to rho. Masked
            tokens add nothing.
        denominator: "plain" divides by the same sum without rho (RoFormer, Eq. 19: positive when phi is), "encoded" by
            the sum with it (PermuteFormer, Eq. 11; LRPE, Eq. 38: positive only where rho keeps positive vectors positive),
            None by nothing. "complex" takes feature pairs (2i, 2i+1) for complex numbers, divides the complex sum by the
            complex denominator and returns the real part (LRPE, Eq. 38 to the letter: another function than "encoded").
            Decay, terms and mask weigh in all. A vanishing one is clamped to a magnitude of 1e-6; `isopos.Clamped` counts.
        causal: A query takes part with keys up to its own index; the last query is aligned with the last key.
        terms: Added to the weights: `Clipped` ones of side "query", <phi(q_i), phi(row)>, in linear time. No others
            factor: a bias of logits is a factor of weights that depends on both tokens.
        mask: Keys that take part, bool ``[*b s]`` (True takes part, as in `scaled_dot_product_attention`).
        attn_mask: Refused: linear attention forms no weight of a pair that a mask could change.
        window: A query takes part with the key of its own index and window - 1 keys before it; without `causal` with as many
            after it. Indices are counted from the last key, whatever mask or segments leave out. Sums of blocks as long as
            the window are added, none is subtracted, and the cost does not grow with the window. Not in streams, and not
            exported with a dynamic length.
        segment_ids: Which of several packed sequences each key belongs to, integers ``[*b s]``; tokens of others do not
            take part. Queries have the ids of the last keys; tokens of one id are next to each other.
        transport: A pair of maps, of values at their keys' positions and of outputs at their queries': values that have a
            direction, seen from each query's place, as `Scheme` with transport gives them.
        layout: "bthd" where q, k, v and the output are ``[*b t h d]``, which nobody can tell by shapes where t = h.
        state: The tokens before, of a causal stream; ``State()`` at its start. Positions are those in the whole stream.
        return_state: Also return the state after these tokens.

    Fewer heads of keys and values than of queries are shared by groups of neighbouring query heads. Isometry, decay and
    terms are then one a head of keys; or one a head of queries, for which keys and values are repeated in memory.

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys. With `return_state` a pair of that and the `State`.

    On the CPU a row holds nothing of tokens that it does not see (masked ones, those of other segments, later ones of causal
    sums, those whose weight a decay takes to zero), NaN and infinity included; outside a compiler neither do gradients of
    such rows. A row that sees NaN, or whose query has one, is NaN. On other devices, where looking would have to wait, NaN
    and infinity may reach rows that do not see them, but for masked tokens.

    Raises:
        TypeError: Where an argument is no tensor, or no function.
        ValueError: Where shapes, dtypes, devices or options do not fit, before any work. All tensors are dense ones on q's
            device.

    Source: Katharopoulos et al. 2020, Eq. 9; RoFormer, Eq. 19; LRPE, Eq. 13 and 38; PermuteFormer, Eq. 11; Horn et al. 2021
    for terms.

    Examples:
        >>> from isopos.feature_maps import FEATURE_MAPS
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
        >>> linear_attention(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True).shape
        torch.Size([2, 4, 100, 16])
    """
    if others:
        refuse("linear", list(others))
    options: LinearOptions = {"isometry": isometry, "feature_map": feature_map, "decay": decay, "denominator": denominator}
    options |= {"causal": causal, "terms": terms, "mask": mask, "attn_mask": attn_mask, "window": window, "path": path}
    options |= {"segment_ids": segment_ids, "transport": transport, "layout": layout, "state": state}
    out, after = attended(check_linear(q, k, v, options, streams=return_state), q.dtype)
    return (out, after) if return_state else out


def attended(problem: LinearProblem, dtype: torch.dtype) -> tuple[Tensor, State]:
    """The output in this dtype, in the layout of the queries that were checked, and the state after the tokens."""
    q, v = problem.q, problem.v
    with full_precision(q.device):
        if problem.empty:
            out, after = q.new_zeros(*problem.batch, q.shape[-2], v.shape[-1]), problem.state or State()
        elif problem.state is not None:
            out, after = _streamed(problem, problem.state)
        elif problem.window is not None:
            total = linear.windowed(sums_of(problem), problem.window, linear.linear)
            out, after = _divided(total, problem), State()
        else:
            total = with_terms(linear.linear(sums_of(problem)), problem)
            out, after = _divided(total, problem), State()
    return restored(out, problem).to(dtype), after


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: bool = False, **options: Unpack[LinearOptions]
) -> linear.Explanation:
    """Which backend serves `linear_attention` of these arguments, and why others do not.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16, dtype=torch.float64)
        >>> from isopos.feature_maps import FEATURE_MAPS
        >>> print(explain(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True))
        chunks serves
        triton does not: it runs on CUDA devices, not on cpu
        cpu does not: it sums up float32, not torch.float64
    """
    problem = check_linear(q, k, v, options, streams=return_state)
    sums = sums_of(problem)
    if problem.window is not None:  # features are made before they are cut into blocks
        (queries, *_), (keys, *_), values = sums.made()
        sums = Sums(queries, keys, values, ALL_READY, sums.g, sums.causal)
    return linear.explain(sums)


def naive_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    isometry: IsometryPair = None,
    feature_map: Phi | None = None,
    decay: DecayPair = None,
    path: Sequence[Path] | None = None,
    denominator: str | None = "plain",
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """`linear_attention` by its definition: every weight is formed. Quadratic; any number of derivatives, and `torch.func`.

    Args and shapes are those of `linear_attention`, as far as they go: no terms, segments or states.

    Examples:
        >>> q, k, v = torch.linspace(0, 1, 3 * 2 * 4 * 10 * 16).view(3, 2, 4, 10, 16)
        >>> torch.allclose(naive_linear_attention(q, k, v), linear_attention(q, k, v), atol=1e-5)
        True
    """
    given: LinearOptions = {"isometry": isometry, "decay": decay, "path": path, "causal": causal, "mask": mask}
    problem = check_naive(q, k, v, given | {"feature_map": feature_map, "denominator": denominator})
    options: dict[str, Any] = {"feature_map": feature_map, "denominator": denominator, "causal": causal, "mask": mask}
    wide = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (problem.q, problem.k, problem.v))
    out = reference.linear(*wide, isometry=(problem.rho_q, problem.rho_k), decay=problem.decay, **options)
    return restored(out.to(q.dtype), problem)


def sums_of(problem: LinearProblem, values: Tensor | None = None) -> Sums:
    """The problem as the engine has it; `values` are those of a stream with terms, complete."""
    (phi_q, phi_k), mask, state, form = sides(problem.phi), problem.mask_of_keys, problem.state, problem.denominator
    rho_q, rho_k = (None if isinstance(rho, Identity) else rho for rho in (problem.rho_q, problem.rho_k))
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    own = form == "plain" and (rho_q is not None or rho_k is not None)
    features = (
        Features(phi_q, rho_q, _kinds(rho_q), None, own, wide),
        Features(phi_k, rho_k, _kinds(rho_k), mask, own, wide),
        Features(identity, None, (), mask, False, wide),
    )
    stream, form = None, None if form is None else "column" if problem.terms else "divide"
    if state is not None:
        given = tuple(x for x in (state["sum0"], state["sum1"]) if x is not None)
        stream = Past(given, problem.before)
    if values is not None:
        return Sums(problem.q, problem.k, values, (*features[:2], READY), problem.g, problem.causal, None, stream)
    sums = Sums(problem.q, problem.k, problem.v, features, problem.g, problem.causal, form, stream)
    return _complex(sums) if problem.denominator == "complex" else sums


def _complex(sums: Sums) -> Sums:
    """Real and imaginary sums over real and imaginary denominators ``[2 *b h t e+1]``.

    Features are complex queries and i times them: <i q, k>, the real part of conj(i q) k, is Im(conj(q) k).
    """
    (query,), (key,), value = sums.made()
    value = with_ones(value, sums.features[2].mask)
    pairs = query.unflatten(-1, (-1, 2))
    query = torch.stack((query, torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)))
    if sums.stream is None:
        key, value = (x.expand(2, *x.shape) for x in (key, value))
    return Sums(query, key, value, ALL_READY, sums.g, sums.causal, None, sums.stream)


def _kinds(rho: TokenMap | None) -> tuple[str, ...] | None:
    """The closed forms that a map is made of, as the engine names them; None where it is made of others, too."""
    match rho:
        case None | Identity():
            return ()
        case Rotation():
            return ("lift" if rho.lifted else "rotation",)
        case Gather():
            return ("gather",)
        case Reflection():
            return ("reflection",)
        case Chain():
            first, second = _kinds(rho.first), _kinds(rho.second)
            return None if first is None or second is None else first + second
    return None


def _divided(total: Tensor, problem: LinearProblem) -> Tensor:
    """Sums over their denominators, where they have not been divided yet."""
    if problem.denominator == "complex":
        return linear.divide_complex(total)
    return linear.divide(total) if problem.terms and problem.denominator is not None else total


def _streamed(problem: LinearProblem, state: State) -> tuple[Tensor, State]:
    """The output of the next tokens of a stream, and the state after them."""
    values = values_of_terms(problem) if problem.terms else None
    total, found = linear.stream(sums_of(problem, values))
    after = {f"sum{n}": x for n, x in enumerate(found)}
    if values is not None:
        total, of_terms = with_terms_of_stream(total, values, problem, state)
        after |= of_terms
    if problem.decay is not None:
        after["decay"] = problem.decay[1][..., -1].expand(problem.of_keys).clone()  # a view would keep all tokens in memory
    if problem.segments is not None:
        last = problem.segments[1][..., -1]
        after["segment"] = last.expand(torch.broadcast_shapes(last.shape, problem.of_keys[:-1])).clone()
    if problem.path is not None:
        after["path"] = problem.path.expand(*problem.of_keys, -1).clone()
    return _divided(total, problem), state.next(problem.kind, **after)
