"""Sums chunk by chunk with PyTorch's operations, a few chunks of a few heads at a time, whose buffers stay in the cache.

Weights are formed explicitly inside a chunk; tokens before the chunk are summed up in a state:

    total_i = sum_{j in chunk, j <= i} <q_i, k_j> exp(g_i - g_j) v_j + q_i^T (sum_{j before chunk} exp(g_i - g_j) k_j v_j^T)

The backward pass scans in reverse and computes features again; one state per chunk group is saved. All chunks of a group go
through batched products together, into buffers that the next group reuses; only states are carried from chunk to chunk.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import cast_down
from isopos.ops.linear.autograd import refusal
from isopos.ops.linear.features import Buffers, Decays, Sums
from isopos.ops.linear.scan import ChunkLayout, GroupPlan, Groups, Operand, OutputGradient, Scan, ScanKernel, Span


def _back(rows: Tensor) -> Tensor:
    """Sums of rows ``[n c d]`` over each token and all later ones."""
    return rows.flip(1).cumsum(1).flip(1)


class Weights(ABC):
    """The weights of a chunk group: inside its chunks, and between a chunk and the state before it.

    A `reverse` scan goes from the last token to the first and leaves out the diagonal.
    """

    def __init__(self, layout: ChunkLayout, reverse: bool):
        self.layout, self.reverse = layout, reverse

    @abstractmethod
    def weigh(self, scores: Tensor) -> Tensor:
        """Multiply scores ``[n c c]`` by the weights inside a chunk, in place."""

    @abstractmethod
    def fade(self, rows: Tensor, name: str) -> Tensor:
        """Multiply rows in place by weights: `before` (from the end of the last chunk), `after` (to the end of this one)."""

    @abstractmethod
    def faded(self, rows: Tensor, name: str, out: Tensor | None) -> Tensor:
        """A copy of rows after `fade`."""

    @abstractmethod
    def add(self, rows: Tensor, name: str, x: Tensor, sign: int) -> Tensor:
        """Add faded x ``[*b h n 1 .]`` to rows ``[n c .]``, in place."""

    @abstractmethod
    def carry(self, state: Tensor, added: Tensor, into: Tensor, *, back: bool = False) -> Tensor:
        """The state ``[*b h . .]`` after all chunks; writes the states before each chunk to `into` ``[n . .]``.

        `added` ``[n . .]`` is the sum over each chunk. With `back` the scan goes in the other direction.
        """

    @abstractmethod
    def prefix(self, rows: Tensor) -> Tensor:
        """Weighted sums of rows ``[n c d]`` over the tokens of the chunk that each token sees."""

    @abstractmethod
    def suffix(self, rows: Tensor) -> Tensor:
        """The same over the tokens that see each token. A total minus a prefix would lose digits."""


class Even(Weights):
    """Weights without decay: one for keys that a query sees, zero for others."""

    def __init__(self, layout: ChunkLayout, reverse: bool, like: Tensor):
        super().__init__(layout, reverse)
        n, heads = layout.count, math.prod(layout.leading)
        earlier = torch.ones(n, n, dtype=like.dtype, device=like.device).tril_(-1)
        self.later, self.earlier = (x.expand(heads, n, n) for x in (earlier.mT.contiguous(), earlier))

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.triu_(1) if self.reverse else scores.tril_()

    def fade(self, rows: Tensor, name: str) -> Tensor:
        return rows

    def faded(self, rows: Tensor, name: str, out: Tensor | None) -> Tensor:
        return rows

    def add(self, rows: Tensor, name: str, x: Tensor, sign: int) -> Tensor:
        self.layout.apart(rows).add_(x, alpha=sign)
        return rows

    def carry(self, state: Tensor, added: Tensor, into: Tensor, *, back: bool = False) -> Tensor:
        onward, shape = back == self.reverse, (len(self.later), self.layout.count, -1)
        flat, into = state.reshape(shape[0], 1, -1), into.view(shape)
        added = added.view(shape)
        torch.baddbmm(flat.expand(into.shape), self.earlier if onward else self.later, added, out=into)
        last = -1 if onward else 0
        return (added[:, last] + into[:, last]).view(state.shape)

    def prefix(self, rows: Tensor) -> Tensor:
        return _back(F.pad(rows[:, 1:], (0, 0, 0, 1))) if self.reverse else rows.cumsum(1)

    def suffix(self, rows: Tensor) -> Tensor:
        return F.pad(rows[:, :-1], (0, 0, 1, 0)).cumsum(1) if self.reverse else _back(rows)


class Fading(Weights):
    """Weights exp(g_i - g_j): `inside` chunks, from the token `before` a chunk, to its end (`after`), and `across` it.

    Every exponent is a difference of log decays and does not exceed zero: r^i and r^-j, which overflow, are never formed.
    """

    def __init__(self, layout: ChunkLayout, reverse: bool, like: Tensor, g: Sequence[Tensor]):
        """g: log decays of queries and keys ``[*b h t]`` of the group, minus the log decay of the token before it."""
        super().__init__(layout, reverse)
        self.g, dtype = g, like.dtype
        query, key = (x.unflatten(-1, (-1, layout.chunk)) for x in g)
        ends = key[..., 0] if reverse else key[..., -1]
        outside = torch.zeros_like(ends[..., :1])
        starts = torch.cat((ends[..., 1:], outside) if reverse else (outside, ends[..., :-1]), -1)[..., None]
        inside = cast_down(query[..., :, None] - key[..., None, :], dtype, like.device).exp_()
        self.inside = inside.triu_(1) if reverse else inside.tril_()
        exponents = query - starts, ends[..., None] - key, ends[..., None] - starts
        self.before, self.after, across = (cast_down(x, dtype, like.device).exp_()[..., None] for x in exponents)
        self.across = across[..., 0]
        far = starts - ends[..., None, :]
        far = cast_down(far.triu(1).exp().triu(1) if reverse else far.tril(-1).exp().tril(-1), dtype, like.device)
        self.earlier = far.expand(*layout.leading, layout.count, layout.count).reshape(-1, layout.count, layout.count)
        first, final = (starts[..., -1:, :], ends[..., :1]) if reverse else (starts[..., :1, :], ends[..., -1:])
        self.onward, self.backward = (
            cast_down(x.exp(), dtype, like.device) for x in (starts - first, (final - ends)[..., None])
        )

    def serves(self, g: Sequence[Tensor]) -> bool:
        """Whether another group has equal weights. Only checked on a CPU, where comparing costs less than computing."""
        if self.g[0].device.type != "cpu" or g[0].shape != self.g[0].shape:
            return False
        close = torch.finfo(self.inside.dtype).eps / 1024
        pairs = zip(g, self.g, strict=True) if g[0] is not g[1] else [(g[0], self.g[0])]
        return all(bool((a - b).abs_().amax() <= close) for a, b in pairs)

    def weigh(self, scores: Tensor) -> Tensor:
        self.layout.apart(scores).mul_(self.inside)
        return scores

    def fade(self, rows: Tensor, name: str) -> Tensor:
        self.layout.apart(rows).mul_(getattr(self, name))
        return rows

    def faded(self, rows: Tensor, name: str, out: Tensor | None) -> Tensor:
        out = torch.empty_like(rows) if out is None else out
        torch.mul(self.layout.apart(rows), getattr(self, name), out=self.layout.apart(out))
        return out

    def add(self, rows: Tensor, name: str, x: Tensor, sign: int) -> Tensor:
        self.layout.apart(rows).addcmul_(getattr(self, name), x, value=sign)
        return rows

    def carry(self, state: Tensor, added: Tensor, into: Tensor, *, back: bool = False) -> Tensor:
        onward, shape = back == self.reverse, (*self.layout.leading, self.layout.count, -1)
        first, far = (self.backward, self.earlier.mT) if back else (self.onward, self.earlier)
        torch.mul(state.flatten(-2).unsqueeze(-2), first, out=into.view(shape))
        shape = (len(far), self.layout.count, -1)
        into.view(shape).baddbmm_(far, added.view(shape))
        last = -1 if onward else 0
        added, into = (x.view(*self.layout.leading, self.layout.count, *x.shape[1:]).select(-3, last) for x in (added, into))
        return torch.addcmul(added, into, self.across.select(-2, last).unsqueeze(-1))

    def prefix(self, rows: Tensor) -> Tensor:
        return self._full() @ rows

    def suffix(self, rows: Tensor) -> Tensor:
        return self._full().mT @ rows

    def _full(self) -> Tensor:
        shape = (*self.layout.leading, self.layout.count, self.layout.chunk, self.layout.chunk)
        return self.inside.expand(shape).reshape(-1, *shape[-2:])


@dataclass(eq=False)
class ChunkScan(Scan):
    """Causal sums, or with `reverse` sums over later tokens."""

    weights: dict[ChunkLayout, list[Weights]] = field(default_factory=dict)

    def forward(self, outs: Sequence[Tensor], denominators: Sequence[Tensor], *, keep: bool, divide: bool) -> Groups:
        states: list[Tensor] = []
        for n in self.order:
            weights, q, k, v = self._read(n)
            before = states or self._empty(k[0].shape[-1], v.shape[-1], k[-1].shape[-1])
            total, denominator, states = self._sums(weights, q, k, v, before)
            denominator = None if denominator is None else weights.layout.tokens(denominator)
            yield n, weights.layout.tokens(total), denominator, before

    def backward(self, grad_output: OutputGradient, states: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        grad_output.split(self.plan.sizes)
        after = [torch.zeros_like(state) for state in states[0]]
        for n, before in zip(reversed(self.order), reversed(states), strict=True):
            here = slice(*self.plan.spans[n][:2])
            weights, q, k, v = self._read(n)
            grad, neg_grad = grad_output.rows(n, weights.layout, v.shape[-1], self.buffers)
            grads, after = self._sums_backward(weights, q, k, v, before, grad, neg_grad, after)
            for m, whole in enumerate(grad_g):  # weights <q, k> exp(g_q - g_k): as if q and k were scaled
                scale = sum((x * y).sum(-1, True) for x, y in zip((q, k)[m], grads[m], strict=True))
                sign = -1 if bool(m) != self.reverse else 1
                whole[..., here].add_(weights.layout.tokens(cast(Tensor, scale))[..., 0].to(whole.device), alpha=sign)
            for operand, rows in zip(self.operands, grads, strict=True):
                operand.vjp(n, self.plan.spans[n], [weights.layout.tokens(x) for x in rows])

    def _weights(self, span: Span) -> Weights:
        """Weights of a group, reused from an earlier group with equal decays, as constant decays have."""
        layout = ChunkLayout(self.leading, (span.stop - span.start) // span.chunk, span.chunk)
        like = self.operands[0].x.new_empty(0, dtype=self.buffers.dtype)
        if layout not in self.weights:
            self.weights[layout] = [Even(layout, self.reverse, like)]
        known = self.weights[layout]
        if self.g is None:
            return known[0]
        g, sign = self.g, -1 if self.reverse else 1
        border = min(span.stop, g[1].shape[-1] - 1) if self.reverse else max(span.start - 1, 0)
        outside = g[1][..., border : border + 1]
        keys = sign * (g[1][..., span.start : span.stop] - outside)
        decays = (keys if g[0] is g[1] else sign * (g[0][..., span.start : span.stop] - outside), keys)
        if keys.device.type == "cpu" and not any(x.any() for x in decays):
            return known[0]
        for weights in known[1:]:
            if cast(Fading, weights).serves(decays):
                return weights
        self.weights[layout] = [known[0], Fading(layout, self.reverse, like, decays), *known[1:2]]
        return self.weights[layout][1]

    def _read(self, n: int) -> tuple[Weights, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Weights, and rows of queries, keys and values; two for queries and keys if the denominator is unrotated."""
        span = self.plan.spans[n]
        q, k, (v,) = ([x.reshape(-1, span.chunk, x.shape[-1]) for x in o.read(n, span)] for o in self.operands)
        return self._weights(span), tuple(q), tuple(k), v

    def _sums(
        self, weights: Weights, q, k, v: Tensor, states: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Sums and denominators of a group, and the states after it."""
        buffers, (n, c, _) = self.buffers, v.shape
        scores = weights.weigh(torch.bmm(q[0], k[0].mT, out=buffers("scores", n, c, c)))
        faded = weights.faded(k[0], "after", buffers("faded", *k[0].shape))
        before, state = self._states(weights, faded, v, states[0])
        total = weights.fade(torch.bmm(q[0], before, out=buffers("total", *v.shape)), "before").baddbmm_(scores, v)
        if not self.denominator:
            return total, None, [state]
        keys, after = self._rows(weights, faded if len(k) == 1 else weights.faded(k[1], "after", None), states[1])
        product = buffers("product", *q[-1].shape)
        if len(k) == 1:
            torch.mul(weights.layout.apart(q[0]), keys, out=weights.layout.apart(product))
            denominator = weights.fade(product.sum(-1, keepdim=True), "before").add_(scores.sum(-1, keepdim=True))
        else:
            seen = weights.add(weights.prefix(k[1]), "before", keys, 1)
            denominator = torch.mul(q[1], seen, out=product).sum(-1, keepdim=True)
        return total, denominator, [state, after]

    def _states(self, weights: Weights, faded: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of k v^T before each chunk ``[n d e]``, and after the group ``[*b h d e]``."""
        shape = (len(v), faded.shape[-1], v.shape[-1])
        before = self.buffers("before", *shape)
        return before, weights.carry(state, torch.bmm(faded.mT, v, out=self.buffers("added", *shape)), before)

    def _rows(self, weights: Weights, rows: Tensor, state: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """Sums of rows before each chunk ``[*b h n 1 d]``, and after the group; with `back` in the other direction."""
        added = rows.sum(1, keepdim=True)
        before = torch.empty_like(added)
        after = weights.carry(state, added, before, back=back)
        return weights.layout.apart(before), after

    def _sums_backward(
        self, weights: Weights, q, k, v, states, grad: Tensor, neg_grad: Tensor | None, afters: Sequence[Tensor]
    ):
        """Gradients of q, k, v and the states before the group, given gradients of the states after it (`afters`)."""
        buffers, (n, c, _), d = self.buffers, v.shape, k[0].shape[-1]
        shared = len(k) == 1
        scores = weights.weigh(torch.bmm(q[0], k[0].mT, out=buffers("scores", n, c, c)))
        grad_scores = torch.bmm(grad, v.mT, out=buffers("grad scores", n, c, c))
        weights.weigh(grad_scores.sub_(neg_grad) if shared and neg_grad is not None else grad_scores)
        faded = weights.faded(k[0], "after", buffers("faded", *k[0].shape))
        before, _ = self._states(weights, faded, v, states[0])
        grad_faded = weights.faded(grad, "before", buffers("grad faded", *grad.shape))
        after = buffers("after", n, d, v.shape[-1])
        added = torch.bmm(q[0].mT, grad_faded, out=buffers("added", n, d, v.shape[-1]))
        prefixes = [weights.carry(afters[0], added, after, back=True)]
        dq = torch.bmm(grad_faded, before.mT, out=buffers("dq", n, c, d)).baddbmm_(grad_scores, k[0])
        dk = weights.fade(torch.bmm(v, after.mT, out=buffers("dk", n, c, d)), "after").baddbmm_(grad_scores.mT, q[0])
        dv = torch.bmm(faded, after, out=buffers("dv", *v.shape)).baddbmm_(scores.mT, grad)
        if neg_grad is None:
            return ((dq,), (dk,), (dv,)), prefixes
        keys, _ = self._rows(weights, faded if shared else weights.faded(k[1], "after", None), states[1])
        product, faded_neg_grad = buffers("product", *q[-1].shape), weights.faded(neg_grad, "before", None)
        later, before_keys = self._rows(weights, torch.mul(q[-1], faded_neg_grad, out=product), afters[1], back=True)
        prefixes.append(before_keys)
        if shared:
            weights.layout.apart(dq).addcmul_(weights.layout.apart(faded_neg_grad), keys, value=-1)
            return ((dq,), (weights.add(dk, "after", later, -1),), (dv,)), prefixes
        seen, more = weights.add(weights.prefix(k[1]), "before", keys, 1), -neg_grad
        dk_unrotated = weights.suffix(torch.mul(q[1], more, out=product))
        return ((dq, seen.mul_(more)), (dk, weights.add(dk_unrotated, "after", later, -1)), (dv,)), prefixes


class Whole(Scan):
    """Sums over all keys without decay: two products per group, with one state."""

    @property
    def states(self) -> int:
        return 1

    def plan_of_keys(self) -> GroupPlan:
        return GroupPlan(self.operands[1].x)

    def forward(self, outs: Sequence[Tensor], denominators: Sequence[Tensor], *, keep: bool, divide: bool) -> Groups:
        states: list[Tensor] = []
        for n, span in enumerate(self.of_keys.spans):
            k, (v,) = (operand.read(n, span) for operand in self.operands[1:])
            sums = [k[0].mT @ v] + [k[-1].sum(-2, keepdim=True)] * self.denominator
            states = [state.add_(x) for state, x in zip(states, sums, strict=True)] if states else sums
        for n, span in enumerate(self.plan.spans):
            q = self.operands[0].read(n, span)
            denominator = (q[-1] * states[1]).sum(-1, keepdim=True) if self.denominator else None
            yield n, q[0] @ states[0], denominator, [] if n else states

    def backward(self, grad_output: OutputGradient, states: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        (queries, keys, values), (sums,) = self.operands, states
        grads = [torch.zeros_like(x) for x in sums]
        grad_output.split(self.plan.sizes)
        for n, span in enumerate(self.plan.spans):
            q = queries.read(n, span)
            layout = ChunkLayout(tuple(q[0].shape[:-2]), 1, span.stop - span.start)
            rows, neg_grad = grad_output.rows(n, layout, sums[0].shape[-1], self.buffers)
            grad = layout.tokens(rows)
            grads[0].add_(q[0].mT @ grad)
            dq = [grad @ sums[0].mT]
            if neg_grad is not None:
                denominator = layout.tokens(neg_grad)
                grads[1].sub_((q[-1] * denominator).sum(-2, keepdim=True))
                product = denominator * sums[1]
                dq = [dq[0].sub_(product)] if len(q) == 1 else [dq[0], product.neg_()]
            queries.vjp(n, span, dq)
        for n, span in enumerate(self.of_keys.spans):
            k, (v,) = keys.read(n, span), values.read(n, span)
            dk, dv, of_keys = v @ grads[0].mT, k[0] @ grads[0], [x.expand(k[-1].shape) for x in grads[1:]]
            keys.vjp(n, span, [dk.add_(of_keys[0])] if of_keys and len(k) == 1 else [dk, *(x.clone() for x in of_keys)])
            values.vjp(n, span, [dv])


class Chunks(ScanKernel):
    """PyTorch's operations, chunk by chunk, on any device and in any floating dtype."""

    name = "chunks"

    def serves(self, sums: Sums) -> str:
        return refusal(sums)

    def scans(self, operands: Sequence[Operand], plan: GroupPlan, g: Decays, buffers: Buffers, sums: Sums) -> list[Scan]:
        denominator = sums.denominator is not None
        if not sums.causal and g is None:
            return [Whole(operands, plan, None, buffers, denominator)]
        directions = (False,) if sums.causal else (False, True)
        return [ChunkScan(operands, plan, g, buffers, denominator, reverse) for reverse in directions]


CHUNKS = Chunks()
