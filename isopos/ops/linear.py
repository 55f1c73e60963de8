"""Linear attention: sums of values under factorised weights, at a cost proportional to length.

One primitive carries everything:

    total_i = sum_j <q_i, k_j> exp(g_i - g_j) v_j

A denominator is the same sum with v = 1: a further column of ones where numerator and denominator have the same features
("encoded"), a sum of its own where they differ ("plain"). q, k ``[*b h t d]`` are features, v ``[*b h t e]`` values, g a
pair of float64 log decays ``[*b h t]`` (queries, keys) that do not increase along tokens. Causal sums run over j <= i.
Otherwise they run over all j and a decay counts both ways, exp(-|g_i - g_j|): the causal sum, and one over j > i that walks
from the last token to the first. `naive` is the specification; the fast sums are tested against it.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import full_precision, once

CHUNK = 64  # tokens whose weights are formed explicitly
SEGMENT = 1 << 18  # feature elements that are mapped at a time; the states before a segment are kept for the backward pass
EPS = 1e-6

Span = tuple[int, int]
Decays = tuple[Tensor, Tensor] | None


class Load(Protocol):
    """What makes of an input the operands of each sum: one tensor, or two where the denominator is a sum of its own.

    It runs again in the backward pass, a segment of tokens at a time; gradients reach the input and `tensors`.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds for all tokens."""
        ...

    def part(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        """Views of tensors shaped as `tensors`: what concerns tokens start to stop - 1."""
        ...

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Operands of the tokens x ``[*b h t .]``, whose part of the tensors is `part`."""
        ...


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


def clamp(denominator: Tensor) -> Tensor:
    """The denominator with a magnitude of at least 1e-6 and its own sign."""
    if not torch.compiler.is_compiling() and (counter := _CLAMPED.get()) is not None:
        counter.small.append((denominator.abs() < EPS).sum())
        counter.total += denominator.numel()
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


def carry(q: Tensor, k: Tensor, v: Tensor, g: Decays, state: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal sums ``[*b h t e]`` of the next tokens of a stream, and the sum of k v^T over all of its tokens ``[*b h d e]``.

    The state is that sum at the log decay ``before`` ``[*b h]`` of the last token of the stream so far. Together with it,
    the sums are those of the whole sequence; k and v may lack leading axes of q, which share their state.
    """
    one = torch.ones((), dtype=k.dtype, device=k.device)
    to_end = across = from_end = from_start = one  # of keys, of the state, of queries after one token, of queries
    if g is not None:
        query, key = g
        last = key[..., -1:]
        start = last if before is None else before[..., None]
        exponents = last - key, last - start, query - last, query - start
        to_end, across, from_end, from_start = (x.exp().to(k.dtype)[..., None] for x in exponents)
    after = (k * to_end).mT @ v
    after = after if state is None else after + state * across
    if q.shape[-2] == 1:
        return (q * from_end) @ after, after
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    queries, keys, values = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    total = linear(queries, keys, values, READY, g, causal=True, divided=False, fuse=True)
    return total if state is None else total + (q * from_start) @ state, after


class _Terms(NamedTuple):
    """Operands of one sum: rows ``[n t .]``, n = batch times heads."""

    q: Tensor
    k: Tensor
    v: Tensor

    def tokens(self, at: slice) -> "_Terms":
        """A stretch of them."""
        return _Terms(self.q[:, at], self.k[:, at], self.v[:, at])

    def empty_state(self) -> Tensor:
        """Zero sums of k v^T, ``[n d e]``."""
        return self.k.new_zeros(len(self.k), self.k.shape[-1], self.v.shape[-1])


class _Chunk:
    """A stretch of tokens and its weights exp(g_i - g_j).

    They are `inside` the chunk, from `before` it to its tokens, from its tokens to its end (`after`), and `across` it. Every
    exponent is a difference of log decays and does not exceed zero: r^i and r^-j, which overflow, are never formed.
    A state ``[n d e]`` is the sum of k v^T over the tokens before the chunk.
    """

    def __init__(self, g: Decays, span: Span, heads: torch.Size, diagonal: bool, dtype: torch.dtype):
        self.heads, self.diagonal, self.decays = heads, diagonal, g is not None
        if g is None:
            return
        query, key = (x[..., slice(*span)] for x in g)
        previous, last = g[1][..., max(span[0] - 1, 0), None], key[..., -1:]
        self.inside = (query[..., :, None] - key[..., None, :]).tril_().exp_().to(dtype)
        self.before, self.after, self.across = (
            difference.exp().to(dtype)[..., None] for difference in (query - previous, last - key, last - previous)
        )

    def times(self, x: Tensor, name: str) -> Tensor:
        """Multiply rows x ``[n ...]`` in place by one of the four; heads broadcast over the batch."""
        if self.decays:
            x.view(*self.heads, *x.shape[1:]).mul_(getattr(self, name))
        return x

    def weigh(self, scores: Tensor) -> Tensor:
        """Multiply scores ``[n t t]`` by the weights inside, in place, and cut off later keys."""
        return self.times(scores, "inside").tril_(0 if self.diagonal else -1)

    def advance(self, terms: _Terms, state: Tensor) -> None:
        """Carry the state across the chunk, in place."""
        k = self.times(terms.k.clone(), "after") if self.decays else terms.k
        self.times(state, "across").baddbmm_(k.mT, terms.v)

    def forward(self, terms: _Terms, state: Tensor) -> Tensor:
        """The sums of the chunk's tokens, ``[n t e]``."""
        scores = self.weigh(torch.bmm(terms.q, terms.k.mT))
        return self.times(torch.bmm(terms.q, state), "before").baddbmm_(scores, terms.v)

    def backward(self, terms: _Terms, state: Tensor, grad: Tensor, grad_state: Tensor) -> _Terms:
        """Gradients of the operands. `grad_state`, of the state after the chunk, becomes that of the state before it."""
        q, k, v = terms
        scores = self.weigh(torch.bmm(q, k.mT))
        grad_scores = self.weigh(torch.bmm(grad, v.mT))
        grad_before = self.times(grad.clone(), "before") if self.decays else grad
        dq = torch.bmm(grad_before, state.mT).baddbmm_(grad_scores, k)
        dk = self.times(torch.bmm(v, grad_state.mT), "after").baddbmm_(grad_scores.mT, q)
        dv = self.times(torch.bmm(k, grad_state), "after").baddbmm_(scores.mT, grad)
        self.times(grad_state, "across").baddbmm_(q.mT, grad_before)
        return _Terms(dq, dk, dv)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _turn(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(1) if reverse else x


class _Loaded:
    """A segment of one input, what its load makes of it as rows ``[n t .]`` in walking order, and the way back."""

    def __init__(self, x: Tensor, load: Load, part: Sequence[Tensor], needs: Sequence[bool] | None, reverse: bool):
        """`needs` says which tensors of the part need a gradient; without it there is no way back."""
        part = [tensor.detach() for tensor in part]
        self.reverse, self.learned = reverse, [n for n, need in enumerate(needs or ()) if need]
        self.leaves = [x.detach(), *(part[n] for n in self.learned)]
        for leaf in self.leaves:
            leaf.requires_grad_(needs is not None)
        with torch.set_grad_enabled(needs is not None):
            self.outputs = load(self.leaves[0], part)
        self.rows = [_turn(_rows(out.detach()), reverse) for out in self.outputs]

    def backward(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of the segment and of the learned parts, from those of its rows."""
        pairs = [(o, _turn(g, self.reverse)) for o, g in zip(self.outputs, grads, strict=True) if o.requires_grad]
        return torch.autograd.grad([o for o, _ in pairs], self.leaves, [g.reshape(o.shape) for o, g in pairs])


@dataclass
class _Operand:
    """One input of a call with its load and the tensors that the load holds; in the backward pass, their gradients."""

    x: Tensor
    load: Load
    tensors: Sequence[Tensor]
    grad: Tensor | None = None
    grad_tensors: Sequence[Tensor | None] = ()

    def open(self, needs: Sequence[bool]) -> None:
        """Make room for gradients of the input and of the tensors that need one."""
        self.grad = torch.zeros_like(self.x, memory_format=torch.contiguous_format)
        self.grad_tensors = [torch.zeros_like(t) if need else None for t, need in zip(self.tensors, needs, strict=True)]

    def segment(self, place: Span, reverse: bool) -> _Loaded:
        """Tokens of a place, with the way back where there is room for gradients."""
        needs = None if self.grad is None else [grad is not None for grad in self.grad_tensors]
        part = self.load.part(self.tensors, *place)
        return _Loaded(self.x[..., slice(*place), :], self.load, part, needs, reverse)

    def add(self, place: Span, segment: _Loaded, grads: Sequence[Tensor]) -> None:
        """Add the gradients of a place, from those of its rows."""
        assert self.grad is not None
        own, *learned = segment.backward(grads)
        self.grad[..., slice(*place), :] += own
        rooms = [t if g is None else g for t, g in zip(self.tensors, self.grad_tensors, strict=True)]
        for n, grad in zip(segment.learned, learned, strict=True):
            self.load.part(rooms, *place)[n].add_(grad)


class _Walk:
    """One walk over the tokens: operands q, k, v, how they are cut into segments of chunks, and the passes over them.

    A `reverse` walk goes from the last token to the first and leaves out the diagonal. Spans are in walking order.
    """

    def __init__(self, operands: Sequence[_Operand], g: Decays, reverse: bool = False):
        self.operands, self.reverse = operands, reverse
        self.g = (-g[0].flip(-1), -g[1].flip(-1)) if g and reverse else g
        q = operands[0].x
        self.heads, self.length, self.width = q.shape[:-2], q.shape[-2], q.shape[-1]
        self.dtype = torch.promote_types(q.dtype, torch.float32)

    def spans(self, length: int) -> list[Span]:
        """Starts and stops of segments, whole chunks of about SEGMENT feature elements."""
        size = max(CHUNK, SEGMENT // (self.heads.numel() * self.width) // CHUNK * CHUNK)
        return [(start, min(start + size, length)) for start in range(0, length, size)]

    def place(self, span: Span) -> Span:
        """Where a span of the walk lies in the sequence."""
        return (self.length - span[1], self.length - span[0]) if self.reverse else span

    def load(self, which: int, span: Span) -> _Loaded:
        """A segment of operand 0 (queries), 1 (keys) or 2 (values)."""
        return self.operands[which].segment(self.place(span), self.reverse)

    def chunks(self, span: Span) -> list[tuple[slice, _Chunk]]:
        """The chunks of a segment, as slices of it."""
        cuts = [(start, min(start + CHUNK, span[1])) for start in range(*span, CHUNK)]
        return [
            (slice(a - span[0], b - span[0]), _Chunk(self.g, (a, b), self.heads, not self.reverse, self.dtype))
            for a, b in cuts
        ]

    def causal(self) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
        """Where each segment lies, its sums side by side ``[n t e]``, and the states before it."""
        states: list[Tensor] = []
        for span in self.spans(self.length):
            sums = [_Terms(*rows) for rows in zip(*(self.load(n, span).rows for n in range(3)), strict=True)]
            states = states or [terms.empty_state() for terms in sums]
            before = [state.clone() for state in states]
            total = torch.cat([self._sum(span, *x) for x in zip(sums, states, strict=True)], -1)
            yield slice(*self.place(span)), _turn(total, self.reverse), before

    def _sum(self, span: Span, terms: _Terms, state: Tensor) -> Tensor:
        out = torch.empty_like(terms.v)
        for at, chunk in self.chunks(span):
            here = terms.tokens(at)
            out[:, at] = chunk.forward(here, state)
            chunk.advance(here, state)
        return out

    def causal_backward(self, upstream: "_Upstream", before: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        """Add the gradients of the operands and of the log decays, if there are any, walking back."""
        grad_states: list[Tensor] = []
        for span, states in zip(reversed(self.spans(self.length)), reversed(before), strict=True):
            self._segment_backward(span, upstream, states, grad_states, grad_g)

    def _segment_backward(self, span: Span, upstream: "_Upstream", states, grad_states: list[Tensor], grad_g) -> None:
        loaded = [self.load(n, span) for n in range(3)]
        sums = [_Terms(*rows) for rows in zip(*(x.rows for x in loaded), strict=True)]
        if not grad_states:
            grad_states += [terms.empty_state() for terms in sums]
        at = slice(*self.place(span))
        grad_totals = _turn(upstream.segment(at), self.reverse).split([terms.v.shape[-1] for terms in sums], -1)
        grad_sums = [self._sum_backward(span, *x) for x in zip(sums, states, grad_totals, grad_states, strict=True)]
        for operand, segment, rows in zip(self.operands, loaded, zip(*grad_sums, strict=True), strict=True):
            operand.add(self.place(span), segment, rows)
        for n, grad in enumerate(grad_g):  # weights <q, k> exp(g_q - g_k): as if q and k were scaled
            scale = torch.stack([(x[n] * y[n]).sum(-1, True) for x, y in zip(sums, grad_sums, strict=True)]).sum(0)
            sign = -1 if bool(n) != self.reverse else 1
            grad[..., at] += sign * _turn(scale, self.reverse).view(*self.heads, -1)

    def _sum_backward(self, span: Span, terms: _Terms, state: Tensor, grad: Tensor, grad_state: Tensor) -> _Terms:
        chunks, state = self.chunks(span), state.clone()
        states = []
        for at, chunk in chunks:
            states.append(state.clone())
            chunk.advance(terms.tokens(at), state)
        out = _Terms(*(torch.empty_like(x) for x in terms))
        for (at, chunk), before in zip(reversed(chunks), reversed(states), strict=True):
            for whole, x in zip(out, chunk.backward(terms.tokens(at), before, grad[:, at], grad_state), strict=True):
                whole[:, at] = x
        return out

    def full(self) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
        """As `causal`, for sums over every key without decay; the states of all keys come with the first segment."""
        states: list[Tensor] = []
        for span in self.spans(self.operands[1].x.shape[-2]):
            rows = zip(self.load(1, span).rows, self.load(2, span).rows, strict=True)
            for n, (k, v) in enumerate(rows):
                states += [k.new_zeros(len(k), k.shape[-1], v.shape[-1])] if n == len(states) else []
                states[n].baddbmm_(k.mT, v)
        for span in self.spans(self.length):
            rows = zip(self.load(0, span).rows, states, strict=True)
            yield slice(*span), torch.cat([torch.bmm(q, state) for q, state in rows], -1), states if not span[0] else []

    def full_backward(self, upstream: "_Upstream", states: list[Tensor]) -> None:
        """Add the gradients of the operands."""
        queries, keys, values = self.operands
        grad_states = [torch.zeros_like(state) for state in states]
        for span in self.spans(self.length):
            query = self.load(0, span)
            grad_totals = upstream.segment(slice(*span)).split([state.shape[-1] for state in states], -1)
            for q, grad, grad_state in zip(query.rows, grad_totals, grad_states, strict=True):
                grad_state.baddbmm_(q.mT, grad)
            queries.add(span, query, [torch.bmm(grad, s.mT) for grad, s in zip(grad_totals, states, strict=True)])
        for span in self.spans(keys.x.shape[-2]):
            key, value = self.load(1, span), self.load(2, span)
            keys.add(span, key, [torch.bmm(v, s.mT) for v, s in zip(value.rows, grad_states, strict=True)])
            values.add(span, value, [torch.bmm(k, s) for k, s in zip(key.rows, grad_states, strict=True)])


class _Upstream:
    """The gradient of the sums, from that of the output: undoes the division where there is a denominator."""

    def __init__(self, grad: Tensor, out: Tensor | None = None, denominator: Tensor | None = None):
        self.grad, self.out, self.denominator = _rows(grad), out, denominator

    def segment(self, at: slice) -> Tensor:
        """Of the tokens at a place, ``[n t e]`` or, with the denominator's, ``[n t e+1]``."""
        grad = self.grad[:, at]
        if self.out is None or self.denominator is None:
            return grad.contiguous()
        denominator = self.denominator[:, at]
        numerator = grad / denominator
        below = -(numerator * self.out[:, at]).sum(-1, keepdim=True)
        return torch.cat((numerator, below.masked_fill_(denominator.abs() <= EPS, 0)), -1)


class _Fused(torch.autograd.Function):
    """Load, sum and divide segment by segment. Keeps its inputs, its output and one state a segment; recomputes the rest.

    Inputs q, k, v ``[*b h t .]``, g_q, g_k ``[*b h t]`` or None, and the tensors of the three loads one after another;
    output ``[*b h t e]``, the sums side by side, or with `divided` the first sums over the last.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, g_q, g_k, loads, causal: bool, divided: bool, *tensors: Tensor) -> Tensor:
        walks = _walks(_operands((q, k, v), loads, tensors), g_q, g_k, causal)
        full, states, kept = not causal and g_q is None, [], any(ctx.needs_input_grad)
        totals = denominator = None
        for walk in walks:
            for at, total, before in walk.full() if full else walk.causal():
                states += before if kept else []
                if totals is None:
                    totals = total.new_zeros(total.shape[0], q.shape[-2], total.shape[-1] - divided)
                    denominator = total.new_zeros(total.shape[0], q.shape[-2], 1) if divided else None
                totals[:, at] += total[..., : totals.shape[-1]]
                if denominator is not None:
                    denominator[:, at] += total[..., -1:]
                    if walk is walks[-1]:
                        denominator[:, at] = clamp(denominator[:, at])
                        totals[:, at] /= denominator[:, at]
        assert totals is not None
        ctx.save_for_backward(q, k, v, g_q, g_k, totals, denominator, *tensors, *states)
        ctx.loads, ctx.causal, ctx.full = loads, causal, full
        return totals.view(*q.shape[:-1], totals.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("linear_attention", "isopos.functional.naive_linear_attention")
        q, k, v, g_q, g_k, totals, denominator, *rest = ctx.saved_tensors
        count = sum(len(load.tensors) for load in ctx.loads)
        operands, states = _operands((q, k, v), ctx.loads, rest[:count]), rest[count:]
        needs = iter(ctx.needs_input_grad[8:])
        for operand in operands:
            operand.open([next(needs) for _ in operand.tensors])
        upstream = _Upstream(grad_outputs[0], totals, denominator)
        walks, grad_g = _walks(operands, g_q, g_k, ctx.causal), _empty_decays(q, g_q, g_k)
        with full_precision(q.device):
            if ctx.full:
                walks[0].full_backward(upstream, states)
            else:
                segments = len(walks) * len(walks[0].spans(q.shape[-2]))
                before = list(zip(*(iter(states),) * (len(states) // segments), strict=True))
                for n, walk in enumerate(walks):
                    own = before[n * segments // len(walks) : (n + 1) * segments // len(walks)]
                    walk.causal_backward(upstream, own, grad_g)
        grad_tensors = [grad for operand in operands for grad in operand.grad_tensors]
        return *(operand.grad for operand in operands), *(grad_g or (None, None)), None, None, None, *grad_tensors


def _operands(inputs: Sequence[Tensor], loads: Sequence[Load], tensors: Sequence[Tensor]) -> list[_Operand]:
    rest = iter(tensors)
    return [_Operand(x, load, [next(rest) for _ in load.tensors]) for x, load in zip(inputs, loads, strict=True)]


def _walks(operands: Sequence[_Operand], g_q: Tensor | None, g_k: Tensor | None, causal: bool) -> list[_Walk]:
    g = None if g_q is None or g_k is None else (g_q, g_k)
    walks = [_Walk(operands, g)]
    return walks if causal or g is None else [*walks, _Walk(operands, g, reverse=True)]


def _empty_decays(q: Tensor, g_q: Tensor | None, g_k: Tensor | None) -> list[Tensor]:
    return [x.new_zeros(*q.shape[:-2], x.shape[-1]) for x in (g_q, g_k) if x is not None]


class _Ready:
    """The load of operands that are ready."""

    tensors: tuple[Tensor, ...] = ()

    def part(self, tensors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (x,)


READY: tuple[Load, Load, Load] = (_Ready(), _Ready(), _Ready())


def _ready_walk(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool) -> _Walk:
    g = None if g_q is None or g_k is None else (g_q, g_k)
    return _Walk(_operands((q, k, v), READY, ()), g, reverse)


@torch.library.custom_op("isopos::causal_sum", mutates_args=())
def _causal_sum(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool) -> Tensor:
    parts = [total for _, total, _ in _ready_walk(q, k, v, g_q, g_k, reverse).causal()]
    return torch.cat(parts[::-1] if reverse else parts, 1).view(v.shape)


@_causal_sum.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


@torch.library.custom_op("isopos::causal_sum_backward", mutates_args=())
def _causal_sum_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, reverse: bool
) -> list[Tensor]:
    walk, grad_g = _ready_walk(q, k, v, g_q, g_k, reverse), _empty_decays(q, g_q, g_k)
    with full_precision(q.device):
        before = [before for _, _, before in walk.causal()]
        for operand in walk.operands:
            operand.open(())
        walk.causal_backward(_Upstream(grad), before, grad_g)
    return [operand.grad for operand in walk.operands if operand.grad is not None] + grad_g


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


def _total(terms: _Terms, g: Decays, causal: bool) -> Tensor:
    if not causal and g is None:
        return terms.q @ (terms.k.mT @ terms.v)
    total = _causal_sum(*terms, *(g or (None, None)), False)
    return total if causal else total + _causal_sum(*terms, *(g or (None, None)), True)


def linear(
    q: Tensor, k: Tensor, v: Tensor, loads: tuple[Load, Load, Load], g: Decays, *, causal: bool, divided: bool, fuse: bool
) -> Tensor:
    """Sums of loaded operands; with `divided`, the first over the last, which is the denominator.

    Args:
        q, k, v: ``[*b h t .]``, equal leading dimensions; equal lengths with decays that are not causal.
        loads: What makes operands of queries, keys and values, float32 or float64.
        g: Log decays of queries and keys, ``[*b h t]`` or broadcastable to it.
        causal: Sum over keys up to the query's own index; the last query is aligned with the last key.
        divided: Whether the loads give a denominator.
        fuse: Whether the loads hold nothing that learns but their tensors, so that they may run again segment by segment.

    Returns:
        ``[*b h t e]`` in the operands' dtype. Differentiable once.
    """
    t, s = q.shape[-2], k.shape[-2]
    if fuse and (t == s or not causal) and not torch.compiler.is_compiling():
        tensors = [tensor for load in loads for tensor in load.tensors]
        try:
            return _Fused.apply(q, k, v, *(g or (None, None)), loads, causal, divided, *tensors)  # pyright: ignore[reportReturnType]
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            remedy = "use isopos.functional.naive_linear_attention there"
            raise RuntimeError(f"linear_attention: expected no transform of torch.func, got one; {remedy}") from None
    operands = [load(x, load.part(load.tensors, 0, x.shape[-2])) for load, x in zip(loads, (q, k, v), strict=True)]
    if causal and t != s:  # rows of zeros come first where tokens are missing
        missing = (max(s - t, 0), max(t - s, 0), max(t - s, 0))
        operands = [[F.pad(x, (0, 0, n, 0)) for x in xs] for xs, n in zip(operands, missing, strict=True)]
        if g is not None:
            query, key = torch.broadcast_tensors(g[0][..., :1], g[1][..., :1])  # one shape but for the tokens
            query, key = g[0].expand(*query.shape[:-1], t), g[1].expand(*key.shape[:-1], s)
            g = torch.cat((key[..., : missing[0]], query), -1), torch.cat((query[..., : missing[1]], key), -1)
    total = torch.cat([_total(_Terms(*rows), g, causal) for rows in zip(*operands, strict=True)], -1)[..., -t:, :]
    return divide(total) if divided else total
