"""Linear attention: sums of values under factorised weights, at a cost proportional to length.

One primitive carries everything:

    total_i = sum_j <q_i, k_j> exp(g_i - g_j) v_j

A denominator is the same sum with v = 1, of the same features ("encoded") or of others ("plain"). q, k ``[*b h t d]`` are
features, v ``[*b h t e]`` values, g a pair of float64 log decays ``[*b h t]`` (queries, keys) that do not increase along
tokens. Causal sums run over j <= i. Otherwise they run over all j and a decay counts both ways, exp(-|g_i - g_j|): the
causal sum, and one over j > i that walks from the last token to the first. `naive` is the specification; the fast sums walk
over tiles and are tested against it.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import broadcast, full_precision, once
from isopos.ops.place import Place
from isopos.ops.tiles import EPS, Decays, Load, Operand, Plan, Ready, Room, Upstream, Walk, Whole


def naive(q: Tensor, k: Tensor, v: Tensor, g: Decays = None, *, causal: bool = False) -> Tensor:
    """The sum as the module's first lines define it: quadratic, any float dtype, twice differentiable.

    Shapes: q ``[*b h t d]``, k ``[*b h s d]``, v ``[*b h s e]``, g ``[*b h t]`` and ``[*b h s]``. Causal sums align the last
    query with the last key.
    """
    t, s = q.shape[-2], k.shape[-2]
    weight = torch.ones(t, s, dtype=q.dtype, device=q.device)
    if g is not None:
        difference = g[0][..., :, None] - g[1][..., None, :]
        weight = torch.exp(difference.tril(s - t) if causal else -difference.abs()).to(q.dtype)
    if causal:
        weight = weight.tril(s - t)
    return (q @ k.mT * weight) @ v


class Clamped:
    """Counts the denominators that are too small to divide by, of linear attention inside ``with``, outside a compiler.

    Example:
        >>> with Clamped() as clamped:
        ...     total = divide(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> clamped.count, clamped.total
        (1, 2)
    """

    def __init__(self) -> None:
        self.small: list[Tensor] = []
        self.total = 0

    @property
    def count(self) -> int:
        """Denominators that were clamped, of `total`."""
        return sum(int(small) for small in self.small)

    def __enter__(self) -> "Clamped":
        self.token = _CLAMPED.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _CLAMPED.reset(self.token)


_CLAMPED: ContextVar[Clamped | None] = ContextVar("clamped", default=None)  # of each thread its own


def count(denominator: Tensor) -> None:
    """Tell the counter, if there is one; compiled code has clamped them by then."""
    if not torch.compiler.is_compiling() and (counter := _CLAMPED.get()) is not None:
        counter.small.append((denominator.abs() <= EPS).sum())
        counter.total += denominator.numel()


def clamp(denominator: Tensor) -> Tensor:
    """The denominator with a magnitude of at least 1e-6 and its own sign."""
    count(denominator)
    eager = not torch.compiler.is_compiling() and denominator.device.type == "cpu"
    if eager and not denominator.requires_grad and denominator.amin() >= EPS:
        return denominator  # the usual case, in one pass
    return torch.where(denominator.abs() < EPS, torch.full_like(denominator, EPS).copysign(denominator), denominator)


def divide(total: Tensor) -> Tensor:
    """The one division: sums ``[... e]`` over the denominator in the last column of total ``[... e+1]``, clamped."""
    return total[..., :-1] / clamp(total[..., -1:])


def divide_complex(total: Tensor) -> Tensor:
    """The real part of complex sums over the complex denominator: real and imaginary parts ``[2 ... e+1]``, clamped.

    Re(n / d) = Re(n conj(d)) / |d|^2
    """
    (real, below), (imaginary, turned) = (part.split((total.shape[-1] - 1, 1), -1) for part in total)
    return (real * below + imaginary * turned) / (below.square() + turned.square()).clamp_min(EPS**2)


def carry(
    q: Tensor, k: Tensor, v: Tensor, g: Decays, state: Tensor | None, before: Tensor | None, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """Causal sums ``[*b h t e]`` of the next tokens of a stream, and the sum of k v^T over all of its tokens ``[*b h d e]``.

    The state is that sum at the log decay ``before`` ``[*b h]`` of the last token of the stream so far. Together with it,
    the sums are those of the whole sequence; k and v may lack leading axes of q, which share their state. `in_place` lets a
    step of one token write over the state.
    """
    to_end = across = from_end = from_start = None  # of keys, of the state, of queries after one token, of queries
    if g is not None:
        query, key = g
        last = key[..., -1:]
        start = last if before is None else before[..., None]
        exponents = last - key, last - start, query - last, query - start
        to_end, across, from_end, from_start = (x.exp().to(k.dtype)[..., None] for x in exponents)
    if q.shape[-2] == 1:
        if state is None:
            after = k.mT @ v
        elif in_place:
            after = (state if across is None else state.mul_(across)).addcmul_(k.mT, v)
        else:
            after = torch.addcmul(state if across is None else state * across, k.mT, v)
        return (q if from_end is None else q * from_end) @ after, after
    after = (k if to_end is None else k * to_end).mT @ v
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    queries, keys, values = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    total = linear(queries, keys, values, READY, g, causal=True, below=None, fuse=True)
    if state is None:
        return total, after
    after = after + (state if across is None else state * across)
    return total + (q if from_start is None else q * from_start) @ state, after


class _Fused(torch.autograd.Function):
    """The sums, and their division, tile by tile. Keeps its inputs, its output and one state a tile; recomputes the rest.

    Inputs q, k, v ``[*b h t .]``, g_q, g_k ``[*b h t]`` or None, and the tensors of the three loads one after another;
    output ``[*b h t e]``, with a column ``[*b h t e+1]``.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, g_q, g_k, loads, causal: bool, below: str | None, *tensors: Tensor) -> Tensor:
        operands, room = _operands((q, k, v), loads, tensors, ctx.needs_input_grad[8:])
        out = torch.empty(*q.shape[:-1], v.shape[-1] + (below == "column"), dtype=room.dtype, device=q.device)
        denominator = out.new_empty(*q.shape[:-1], 1) if below == "divide" else out[..., v.shape[-1] :]
        plan, states, keep = Plan(q), [], any(ctx.needs_input_grad)
        for place in plan.groups:
            parts = [operand.at(place) for operand in operands]
            walks = _walks(parts, plan, _narrow(g_q, g_k, place), room, causal, below)
            outs = [place.of(x, -3, -2) for x in (out[..., : v.shape[-1]], denominator)]
            states += _forward(walks, *outs, divide=below == "divide", keep=keep)
        ctx.save_for_backward(q, k, v, g_q, g_k, out, denominator if below == "divide" else None, *tensors, *states)
        ctx.loads, ctx.causal, ctx.below = loads, causal, below
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("linear_attention", "isopos.attention.naive_linear_attention")
        q, k, v, g_q, g_k, out, denominator, *rest = ctx.saved_tensors
        count = sum(len(load.tensors) for load in ctx.loads)
        operands, room = _operands((q, k, v), ctx.loads, rest[:count], ctx.needs_input_grad[8:])
        for operand in operands:
            operand.open()
        upstream = Upstream(grad_outputs[0], *(() if denominator is None else (out, denominator)))
        grad_g, states = _empty_decays(q, g_q, g_k) if any(ctx.needs_input_grad[3:5]) else [], iter(rest[count:])
        with full_precision(q.device):
            for place in (plan := Plan(q)).groups:
                parts = [operand.at(place) for operand in operands]
                walks = _walks(parts, plan, _narrow(g_q, g_k, place), room, ctx.causal, ctx.below)
                _backward(walks, upstream.at(place), states, [place.of(x, -2, -1) for x in grad_g])
        grad_tensors = [grad for operand in operands for grad in operand.grads]
        return *(operand.grad for operand in operands), *(grad_g or (None, None)), None, None, None, *grad_tensors


def _forward(walks: Sequence[Walk | Whole], out: Tensor, denominator: Tensor, *, divide: bool, keep: bool) -> list[Tensor]:
    """Write sums and denominators of all walks of a group, divide at the last; return the states if they are to be kept."""
    states: list[Tensor] = []
    outs, belows = (x.split(walks[0].plan.sizes, -2) for x in (out, denominator))
    for walk in walks:
        for n, total, below, before in walk.forward(outs, belows, keep=keep, divide=divide and len(walks) == 1):
            states += before if keep else []
            if total is None:
                if divide and walk is walks[-1]:
                    count(belows[n])
                continue
            if walk is not walks[0]:
                total, below = total.add_(outs[n]), below if below is None else below + belows[n]
            if below is not None and divide and walk is walks[-1]:
                below = clamp(below)
                torch.div(total, below, out=outs[n])
            else:
                outs[n].copy_(total)
            if below is not None:
                belows[n].copy_(below)
    return states


def _backward(walks: Sequence[Walk | Whole], upstream: Upstream, states: Iterator[Tensor], grad_g: list[Tensor]) -> None:
    """Add the gradients of all walks of a group, which take their states one by one."""
    for walk in walks:
        walk.backward(upstream, [[next(states) for _ in range(1 + walk.denominator)] for _ in range(walk.states)], grad_g)
        for operand in walk.operands:
            operand.first = False


def _operands(
    inputs: Sequence[Tensor], loads: Sequence[Load], tensors: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[list[Operand], Room]:
    """The inputs with their loads, and buffers for what they share."""
    rest, room = iter(zip(tensors, needs, strict=True)), Room(inputs[0], torch.promote_types(inputs[0].dtype, torch.float32))
    operands = []
    for x, load in zip(inputs, loads, strict=True):
        own = [next(rest) for _ in load.tensors]
        operands.append(Operand(x, load, [t for t, _ in own], [need for _, need in own], Room(x, room.dtype, room)))
    return operands, room


def _narrow(g_q: Tensor | None, g_k: Tensor | None, place: Place) -> Decays:
    if g_q is None or g_k is None:
        return None
    keys = place.of(g_k, -2, -1)
    return keys if g_q is g_k else place.of(g_q, -2, -1), keys


def _walks(
    operands: Sequence[Operand], plan: Plan, g: Decays, room: Room, causal: bool, below: str | None
) -> list[Walk | Whole]:
    if not causal and g is None:
        return [Whole(operands, plan, room, denominator=below is not None)]
    return [Walk(operands, plan, g, room, denominator=below is not None, reverse=n == 1) for n in range(1 if causal else 2)]


def _empty_decays(q: Tensor, g_q: Tensor | None, g_k: Tensor | None) -> list[Tensor]:
    return [x.new_zeros(*q.shape[:-2], x.shape[-1]) for x in (g_q, g_k) if x is not None]


READY: tuple[Load, Load, Load] = (Ready(), Ready(), Ready())


def _ready_walks(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool, back: bool):
    """Operands that are ready, and the walks over them with their places."""
    (operands, room), plan = _operands((q, k, v), READY, (), ()), Plan(q)
    for operand in operands if back else ():
        operand.open()
    walks = [
        (
            place,
            Walk([x.at(place) for x in operands], plan, _narrow(g_q, g_k, place), room, denominator=False, reverse=reverse),
        )
        for place in plan.groups
    ]
    return operands, walks


@torch.library.custom_op("isopos::causal_sum", mutates_args=())
def _causal_sum(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool) -> Tensor:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for place, walk in _ready_walks(q, k, v, g_q, g_k, reverse, False)[1]:
        _forward([walk], place.of(out, -3, -2), out[..., :0], divide=False, keep=False)
    return out


@_causal_sum.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@torch.library.custom_op("isopos::causal_sum_backward", mutates_args=())
def _causal_sum_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool
) -> list[Tensor]:
    (operands, walks), grad_g = _ready_walks(q, k, v, g_q, g_k, reverse, True), _empty_decays(q, g_q, g_k)
    with full_precision(q.device):
        for place, walk in walks:
            sums = place.of(torch.empty_like(v, memory_format=torch.contiguous_format), -3, -2)
            outs, belows = (x.split(walk.plan.sizes, -2) for x in (sums, sums[..., :0]))
            states = [before for *_, before in walk.forward(outs, belows, keep=True, divide=False)]
            walk.backward(Upstream(grad).at(place), states, [place.of(x, -2, -1) for x in grad_g])
    return [operand.grad for operand in operands if operand.grad is not None] + grad_g


@_causal_sum_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)] + _empty_decays(q, g_q, g_k)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.reverse = inputs[5]


def _causal_sum_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = _causal_sum_backward(grad, *ctx.saved_tensors, ctx.reverse)
    return *grads, *(None,) * (6 - len(grads))


_causal_sum.register_autograd(_causal_sum_autograd, setup_context=_keep_inputs)


def _total(q: Tensor, k: Tensor, v: Tensor, g: Decays, causal: bool) -> Tensor:
    if not causal and g is None:
        return q @ (k.mT @ v)
    g_q, g_k = g or (None, None)
    total = _causal_sum(q, k, v, g_q, g_k, False)
    return total if causal else total + _causal_sum(q, k, v, g_q, g_k, True)


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    loads: tuple[Load, Load, Load],
    g: Decays,
    *,
    causal: bool,
    below: str | None,
    fuse: bool,
) -> Tensor:
    """Sums of loaded operands.

    Args:
        q, k, v: ``[*b h t .]``, equal leading dimensions; equal lengths with decays that are not causal.
        loads: What makes operands of queries, keys and values, float32 or float64. Queries and keys have two where the
            denominator has features of its own.
        g: Log decays of queries and keys, ``[*b h t]`` or broadcastable to it.
        causal: Sum over keys up to the query's own index; the last query is aligned with the last key.
        below: What becomes of the denominator, the sum of the weights: None for none, "column" for a last column,
            "divide" to divide by it.
        fuse: Whether the loads hold nothing that learns but their tensors, so that they may run again tile by tile.

    Returns:
        ``[*b h t e]``, or ``[*b h t e+1]`` with a column, in the operands' dtype. Differentiable once.
    """
    t, s = q.shape[-2], k.shape[-2]
    if q.ndim == 3:
        return linear(q[None], k[None], v[None], loads, g, causal=causal, below=below, fuse=fuse)[0]
    if not causal and g is None and below is None and loads == READY:
        return q @ (k.mT @ v)
    if fuse and (t == s or not causal) and not torch.compiler.is_compiling():
        tensors, (g_q, g_k) = [tensor for load in loads for tensor in load.tensors], g or (None, None)
        try:
            return _Fused.apply(q, k, v, g_q, g_k, loads, causal, below, *tensors)  # pyright: ignore[reportReturnType]
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            remedy = "use isopos.attention.naive_linear_attention there"
            raise RuntimeError(f"linear_attention: expected no transform of torch.func, got one; {remedy}") from None
    queries, keys, (values,) = (load(x, load.tensors) for load, x in zip(loads, (q, k, v), strict=True))
    ones = torch.ones_like(values[..., :1])
    sums = [values if below is None or len(queries) > 1 else torch.cat((values, ones), -1), ones]
    operands = [[query, key, value] for query, key, value in zip(queries, keys, sums, strict=False)]
    if causal and t != s:  # rows of zeros come first where tokens are missing
        missing = (max(s - t, 0), max(t - s, 0), max(t - s, 0))
        operands = [[F.pad(x, (0, 0, n, 0)) for x, n in zip(xs, missing, strict=True)] for xs in operands]
        if g is not None:
            query, key = torch.broadcast_tensors(g[0][..., :1], g[1][..., :1])  # one shape but for the tokens
            query, key = g[0].expand(*query.shape[:-1], t), g[1].expand(*key.shape[:-1], s)
            g = torch.cat((key[..., : missing[0]], query), -1), torch.cat((query[..., : missing[1]], key), -1)
    total = torch.cat([_total(xs[0], xs[1], xs[2], g, causal) for xs in operands], -1)[..., -t:, :]
    return divide(total) if below == "divide" else total
