"""Linear attention with positions: check, group, segment, sum, divide."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from isopos.attention import reference, sharded
from isopos.attention.checks import AxisOrder, DecayPair, IsometryPair, TransportPair
from isopos.attention.clipped import values_of_terms, with_terms, with_terms_of_stream
from isopos.attention.plans import planned
from isopos.attention.problem import LinearOptions, LinearProblem, check_linear, check_naive, refuse, restored
from isopos.deprecation import former_argument
from isopos.exact import full_precision
from isopos.feature_maps import Phi, identity, sides
from isopos.maps import Chain, Gather, Identity, Reflection, Rotation, TokenMap
from isopos.ops import householder, linear
from isopos.ops.linear.containment import contained, with_finite_gradient
from isopos.ops.linear.features import ALL_READY, READY, Features, Past, Sums, with_ones
from isopos.phases import Phase
from isopos.state import State
from isopos.terms import Term


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
    phases: Sequence[Phase] | None = None,
    denominator: str | None = "plain",
    causal: bool = False,
    terms: Sequence[Term] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    segment_ids: Tensor | None = None,
    transport: TransportPair = None,
    layout: AxisOrder = "bhtd",
    state: State | None = None,
    return_state: bool = False,
    group: Any = None,
    **others: Any,
) -> Tensor | tuple[Tensor, State]:
    """Attention with weights <rho(x_i) phi(q_i), rho(x_j) phi(k_j)> exp(g_i - g_j), at a cost linear in length.

    Args:
        q: Queries ``[*b h t d]``, any floating dtype; sums are float32 or wider.
        k: Keys ``[*b h s d]``.
        v: Values ``[*b h s e]``.
        isometry: rho at the positions of q and k; a pair (for queries, for keys) in cross-attention.
        feature_map: phi, applied before rho; None leaves q and k unchanged.
        decay: g, a log decay ``[*b h t]`` or ``[h t]`` in float64 that does not increase along unmasked tokens (checked on
            the CPU); a pair in cross-attention. Without `causal` the factor is exp(-|g_i - g_j|).
        phases: Content-dependent phases, with `causal`: `isopos.phases.ForgetGate` adds to g,
            `isopos.phases.SelectiveRotation` to rho; `isopos.phases.HouseholderProduct` multiplies features of keys, which a
            plain denominator leaves out. Masked tokens add nothing.
        denominator: "plain" divides by the sum without rho (RoFormer, Eq. 19: positive if phi is), "encoded" by the sum with
            rho (PermuteFormer, Eq. 11; LRPE, Eq. 38: positive only if rho keeps positive vectors positive). None does not
            divide. "complex" treats feature pairs (2i, 2i+1) as complex numbers, divides the complex sum by the complex
            denominator and returns the real part (LRPE, Eq. 38 literally, which differs from "encoded"). All include decay,
            terms and mask. Denominators are clamped to a magnitude of at least 1e-6; `isopos.Clamped` counts clamped ones.
        causal: A query attends to keys up to its index; the last query is aligned with the last key.
        terms: Terms added to the weights: `Clipped` terms of side "query", <phi(q_i), phi(row)>, in linear time. Biases of
            logits are refused; they are factors of weights that depend on both tokens jointly.
        mask: Keys that take part, bool ``[*b s]`` (True takes part, as in `scaled_dot_product_attention`).
        attn_mask: Refused, because linear attention does not form the weights of pairs.
        window: A query attends to the key of its index and the window - 1 keys before it; without `causal` also to as many
            after it. Indices count from the last key, including masked keys and other segments. Sums of blocks of the
            window's length are added, never subtracted; the cost does not grow with the window. Not available in streams.
        segment_ids: Segments of packed sequences, integers ``[*b s]``, one per key; tokens attend within their segment only.
            Queries have the ids of the last keys; tokens of one id are adjacent.
        transport: A pair of maps, of values at their keys' positions and of outputs at their queries', for values with a
            direction; `Scheme` with transport returns it.
        layout: "bthd" if q, k, v and the output are ``[*b t h d]``. Shapes alone are ambiguous where t = h.
        state: State after the previous tokens of a causal stream; ``State()`` at its start. Positions count over the stream.
        return_state: Also return the state after these tokens.
        group: The processes that hold one sequence, a `ProcessGroup` or a `DeviceMesh` of one dimension: tokens here are one
            shard of it, in the order of ranks, of any length. The result equals that of the whole sequence, as do gradients
            if all processes run the backward pass. Tensors have the tokens of the shard, positions count over the sequence.
            The bytes sent do not depend on the number of tokens, except with windows and clipped terms: a window sends the
            keys within it, a clipped term of a causal sequence the keys in its reach, other clipped terms all values.

    If there are fewer heads of keys and values than of queries, groups of neighbouring query heads share them. Isometry,
    decay and terms then have one entry per key head; with one entry per query head, keys and values are repeated in memory.

    Returns:
        ``[*b h t e]`` in q's dtype; zero for a query without keys. With `return_state`, a pair of this and the `State`.

    NaN containment: on the CPU a row does not depend on tokens that it does not attend to (masked tokens, other segments,
    later tokens of causal sums, tokens whose weight decays to zero), including their NaN and infinity; outside a compiler
    this also holds for its gradients. A row with NaN in its query or in an attended token is NaN. On other devices, where a
    check would synchronise, NaN and infinity may reach other rows, except from masked tokens.

    Raises:
        TypeError: If an argument is not a tensor, or not a function.
        ValueError: If shapes, dtypes, devices or options do not fit, before any computation. Tensors must be dense and on
            q's device.

    Source: Katharopoulos et al. 2020, Eq. 9; RoFormer, Eq. 19; LRPE, Eq. 13 and 38; PermuteFormer, Eq. 11; for terms, Horn
    et al. 2021.

    Examples:
        >>> from isopos.feature_maps import FEATURE_MAPS
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16)
        >>> linear_attention(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True).shape
        torch.Size([2, 4, 100, 16])
    """
    phases = former_argument(others, "path", "phases", phases)
    if others:
        refuse("linear", list(others))
    call, extras = None, (phases, terms, mask, attn_mask, window, segment_ids, transport, state, group)
    if not (torch.compiler.is_compiling() or return_state or layout != "bhtd" or any(x is not None for x in extras)):
        call = planned(q, k, v, isometry, feature_map, decay, denominator, causal)
        if call is not None and (out := call.run()) is not None:
            return out
    options: LinearOptions = {"isometry": isometry, "feature_map": feature_map, "decay": decay, "denominator": denominator}
    options |= {"causal": causal, "terms": terms, "mask": mask, "attn_mask": attn_mask, "window": window, "phases": phases}
    options |= {"segment_ids": segment_ids, "transport": transport, "layout": layout, "state": state, "group": group}
    problem = check_linear(q, k, v, options, streams=return_state)
    if call is not None and call.is_new and call.make(problem, sums_of(problem)) and (out := call.run()) is not None:
        return out
    out, after = attended(problem, q.dtype)
    return (out, after) if return_state else out


def attended(problem: LinearProblem, dtype: torch.dtype) -> tuple[Tensor, State]:
    """The output of a checked problem, in this dtype and the layout of the caller, and the state after the tokens."""
    q = problem.q
    with full_precision(q.device):
        if problem.empty:
            out, after = _nothing(problem), problem.state or State()
        elif problem.product is not None:
            out, after = _with_product(problem, problem.product)
        elif problem.state is not None:
            out, after = _streamed(problem, problem.state)
        elif problem.shards is not None:
            out, after = _sharded(problem), State()
        elif problem.window is not None:
            total = linear.windowed(sums_of(problem), problem.window, linear.linear)
            out, after = _divided(total, problem), State()
        else:
            total = with_terms(linear.linear(sums_of(problem)), problem)
            out, after = _divided(total, problem), State()
    return restored(out, problem).to(dtype), after


def _nothing(problem: LinearProblem) -> Tensor:
    """Zeros, from which gradients of zero reach all tensors, so that parameters have one on every process."""
    zeros = problem.q.new_zeros(*problem.batch, problem.q.shape[-2], problem.v.shape[-1])
    tensors = (problem.q, problem.k, problem.v, *(problem.g or ()), *problem.rho_q.tensors(), *problem.rho_k.tensors())
    return zeros + sum(x.flatten()[:0].sum().to(zeros.dtype) for x in tensors if x.requires_grad)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: bool = False, **options: Unpack[LinearOptions]
) -> linear.Explanation:
    """The backend that serves `linear_attention` for these arguments, and the reasons why others do not.

    The arguments have the meaning and shapes of `linear_attention`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16, dtype=torch.float64)
        >>> from isopos.feature_maps import FEATURE_MAPS
        >>> print(explain(q, k, v, feature_map=FEATURE_MAPS["elu+1"], causal=True))
        chunks serves
        triton does not: it runs on CUDA devices, not on cpu
        cpu does not: it sums up float32, not torch.float64
    """
    if others := [name for name in options if name not in LinearOptions.__annotations__]:
        refuse("linear", others)
    problem = check_linear(q, k, v, options, streams=return_state)
    if problem.product is not None:
        return linear.Explanation("householder", {"the others": "Householder products between tokens multiply keys"})
    sums = sums_of(problem)
    if problem.window is not None:  # features are computed before blocks are cut
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
    phases: Sequence[Phase] | None = None,
    denominator: str | None = "plain",
    causal: bool = False,
    mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """`linear_attention` by its definition, with all weights in memory; for any number of derivatives and `torch.func`.

    The arguments have the meaning and shapes of `linear_attention`. The cost is quadratic.

    Examples:
        >>> q, k, v = torch.linspace(0, 1, 3 * 2 * 4 * 10 * 16).view(3, 2, 4, 10, 16)
        >>> torch.allclose(naive_linear_attention(q, k, v), linear_attention(q, k, v), atol=1e-5)
        True
    """
    phases = former_argument(others, "path", "phases", phases)
    if others:
        refuse("naive_linear", list(others))
    checked: LinearOptions = {"isometry": isometry, "decay": decay, "phases": phases, "causal": causal, "mask": mask}
    problem = check_naive(q, k, v, checked | {"feature_map": feature_map, "denominator": denominator})
    options: dict[str, Any] = {"feature_map": feature_map, "denominator": denominator, "causal": causal, "mask": mask}
    promoted = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (problem.q, problem.k, problem.v))
    options |= {"decay": problem.decay, "product": problem.product}
    out = reference.linear(*promoted, isometry=(problem.rho_q, problem.rho_k), **options)
    return restored(out.to(q.dtype), problem)


def sums_of(problem: LinearProblem, values: Tensor | None = None) -> Sums:
    """The problem in the form of the backends; `values` are complete values of a stream with terms."""
    (phi_q, phi_k), mask, state, form = sides(problem.phi), problem.mask_of_keys, problem.state, problem.denominator
    rho_q, rho_k = (None if isinstance(rho, Identity) else rho for rho in (problem.rho_q, problem.rho_k))
    dtype = torch.promote_types(problem.q.dtype, torch.float32)
    unrotated = form == "plain" and (rho_q is not None or rho_k is not None or problem.product is not None)
    features = (
        Features(phi_q, rho_q, _kinds(rho_q), None, unrotated, dtype),
        Features(phi_k, rho_k, _kinds(rho_k), mask, unrotated, dtype),
        Features(identity, None, (), mask, False, dtype),
    )
    stream, form = None, None if form is None else "column" if problem.terms else "divide"
    if state is not None:
        sums = tuple(x for x in (state["sum0"], state["sum1"]) if x is not None)
        stream = Past(sums, problem.before)
    if values is not None:
        return Sums(problem.q, problem.k, values, (*features[:2], READY), problem.g, problem.causal, None, stream)
    segmented = problem.segments is not None and problem.decay is None
    sums = Sums(problem.q, problem.k, problem.v, features, problem.g, problem.causal, form, stream, segmented)
    return _complex(sums) if problem.denominator == "complex" else sums


def _complex(sums: Sums) -> Sums:
    """Real and imaginary sums, with real and imaginary denominators ``[2 *b h t e+1]``.

    Features are complex queries and i times them: <i q, k>, the real part of conj(i q) k, is Im(conj(q) k).
    """
    (query,), (key,), value = sums.made()
    value = with_ones(value, sums.features[2].mask)
    axes = max(x.ndim for x in (query, key, value))  # the new axis is before those of all
    query = query[(None,) * (axes - query.ndim)]
    pairs = query.unflatten(-1, (-1, 2))
    query = torch.stack((query, torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)))
    if sums.stream is None:
        key, value = (x[(None,) * (axes - x.ndim)] for x in (key, value))
        key, value = (x.expand(2, *x.shape) for x in (key, value))
    return Sums(query, key, value, ALL_READY, sums.g, sums.causal, None, sums.stream, sums.segmented)


def _kinds(rho: TokenMap | None) -> tuple[str, ...] | None:
    """Names of the closed forms that a map consists of, as in the backends; None if it has other parts."""
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
    """Sums divided by their denominators, unless the backend has divided them."""
    return _quotient(total, problem) if problem.terms or problem.denominator == "complex" else total


def _quotient(total: Tensor, problem: LinearProblem) -> Tensor:
    """Sums divided by the denominators next to them, if there are any."""
    if problem.denominator == "complex":
        return linear.divide_complex(with_finite_gradient(total, (0, -1)))
    return total if problem.denominator is None else linear.divide(with_finite_gradient(total))


def _sharded(problem: LinearProblem) -> Tensor:
    """The output of one shard of a sequence over a group of processes."""
    return _quotient(sharded.totals(sums_of(problem), problem), problem)


def _streamed(problem: LinearProblem, state: State) -> tuple[Tensor, State]:
    """The output of the next tokens of a stream, and the state after them."""
    values = values_of_terms(problem) if problem.terms else None
    total, sums = linear.stream(sums_of(problem, values))
    after = {f"sum{n}": x for n, x in enumerate(sums)}
    if values is not None:
        total, of_terms = with_terms_of_stream(total, values, problem, state)
        after |= of_terms
    return _divided(total, problem), _next(problem, state, after)


def _next(problem: LinearProblem, state: State, after: dict[str, Tensor]) -> State:
    """The state after the tokens of a stream, from its sums."""
    if problem.decay is not None:
        after["decay"] = problem.decay[1][..., -1].expand(problem.of_keys).clone()  # a view would keep all tokens in memory
    if problem.segments is not None:
        last = problem.segments[1][..., -1]
        after["segment"] = last.expand(torch.broadcast_shapes(last.shape, problem.of_keys[:-1])).clone()
    if problem.phase is not None:
        after["path"] = problem.phase.expand(*problem.of_keys, -1).clone()
    return state.next(problem.kind, **after)


def _with_product(problem: LinearProblem, product: householder.Factors) -> tuple[Tensor, State]:
    """The output with a Householder product between keys and queries, and the state after the tokens."""
    before, made = problem.state, sums_of(problem)
    width, past = product.vector.shape[-1], Past() if made.stream is None else made.stream

    def run(sums: Sums) -> tuple[Tensor, list[Tensor]]:
        (q, k, v), *unrotated = sums.triples()
        if q.shape[-1] != width:
            raise ValueError(
                f"feature_map: expected one that returns {width} features, in which the Householder product acts, got one "
                f"that returns {q.shape[-1]}"
            )
        total, state = householder.linear(q, k, v, product, sums.g, past.sums[0] if past.sums else None, past.before)
        states = [state]
        for q, k, v in unrotated:
            plain = Sums(q, k, v, ALL_READY, sums.g, True, None, Past(past.sums[1:], past.before))
            denominator, (state,) = linear.stream(plain)
            total, states = torch.cat((total, denominator), -1), [*states, state]
        return total if problem.denominator is None else linear.divide(total), states

    out, states = run(made)
    out = contained(made, out, lambda clean: run(clean)[0])
    return out, State() if before is None else _next(problem, before, {f"sum{n}": x for n, x in enumerate(states)})
