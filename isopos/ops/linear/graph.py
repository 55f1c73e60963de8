"""Sums as a graph of PyTorch's operations, for problems that no kernel serves: compiled, in streams, with any phi."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import full_precision, is_exporting
from isopos.ops.linear.autograd import Backend, Kernel, chosen
from isopos.ops.linear.chunks import CHUNKS
from isopos.ops.linear.containment import contained, finite, may_inspect, nonfinite
from isopos.ops.linear.division import divide
from isopos.ops.linear.exported import exported_sum
from isopos.ops.linear.features import ALL_READY, Decays, Sums
from isopos.ops.linear.kernels import KERNELS
from isopos.ops.linear.step import carry


def _ready(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, causal: bool) -> tuple[Kernel, Sums]:
    sums = Sums(q, k, v, ALL_READY, None if g_q is None or g_k is None else (g_q, g_k), causal)
    return chosen(KERNELS, sums) or CHUNKS, sums


@torch.library.custom_op("isopos::linear_sum", mutates_args=())
def _linear_sum(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, causal: bool) -> Tensor:
    kernel, sums = _ready(q, k, v, g_q, g_k, causal)
    return contained(sums, kernel.forward(sums, ())[0], lambda clean: kernel.forward(clean, ())[0])


@_linear_sum.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, causal: bool) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op("isopos::linear_sum_backward", mutates_args=())
def _linear_sum_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, causal: bool
) -> list[Tensor]:
    (kernel, sums), needs = _ready(q, k, v, g_q, g_k, causal), (True,) * 5
    with full_precision(q.device):
        grads = kernel.backward(sums, kernel.forward(sums, needs)[1], grad, needs)
    return [x for x in grads if x is not None]


@_linear_sum_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g_q: Tensor | None, g_k: Tensor | None, causal: bool) -> list[Tensor]:
    decays = [x.new_empty(*q.shape[:-2], x.shape[-1]) for x in (g_q, g_k) if x is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)] + decays


def _save_inputs(ctx, inputs, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.causal = inputs[5]


def _linear_sum_autograd(ctx, grad: Tensor):
    grads = _linear_sum_backward(grad, *ctx.saved_tensors, ctx.causal)
    return *grads, *(None,) * (6 - len(grads))


_linear_sum.register_autograd(_linear_sum_autograd, setup_context=_save_inputs)


class _Products(torch.autograd.Function):
    """Queries times the sum of k v^T, with NaN containment in the backward pass.

    A non-finite number of a key or a query makes a row of that sum or of its gradient non-finite, one of a value a column.
    So it suffices to inspect one row and one column of each.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = k.mT @ v
        ctx.save_for_backward(q, k, v, state)
        return q @ state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (q, k, v, state), (grad,) = ctx.saved_tensors, grads
        with full_precision(q.device):
            after = q.mT @ grad
            edges = state[..., :1], state[..., :1, :], after[..., :1]
            if may_inspect(grad) and not all(map(finite, edges)):
                q, k, v = (torch.where(nonfinite([x])[..., None], 0, x) for x in (q, k, v))
                state, after = k.mT @ v, q.mT @ grad
            elif torch.is_grad_enabled():  # for second derivatives
                state = k.mT @ v
            factors = (grad, state.mT), (v, after.mT), (k, after)
            return tuple(a @ b if need else None for (a, b), need in zip(factors, ctx.needs_input_grad, strict=True))


def _total(q: Tensor, k: Tensor, v: Tensor, g: Decays, causal: bool) -> Tensor:
    if is_exporting():
        return q @ (k.mT @ v) if not causal and g is None else exported_sum(q, k, v, g, causal)
    if not causal and g is None:
        learned = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return _Products.apply(q, k, v) if learned and may_inspect(q.detach()) else q @ (k.mT @ v)  # pyright: ignore[reportReturnType]
    g_q, g_k = g or (None, None)
    return _linear_sum(q, k, v, g_q, g_k, causal)


def aligned(operands: Sequence[Sequence[Tensor]], g: Decays) -> tuple[list[list[Tensor]], Decays]:
    """Queries and keys of equal length: the shorter ones are padded with zeros at the start."""
    t, s = operands[0][0].shape[-2], operands[0][1].shape[-2]
    missing = (max(s - t, 0), max(t - s, 0), max(t - s, 0))
    padded = [[F.pad(x, (0, 0, n, 0)) for x, n in zip(xs, missing, strict=True)] for xs in operands]
    if g is None:
        return padded, g
    query, key = torch.broadcast_tensors(g[0][..., :1], g[1][..., :1])  # equal shapes except for tokens
    query, key = g[0].expand(*query.shape[:-1], t), g[1].expand(*key.shape[:-1], s)
    return padded, (torch.cat((key[..., : missing[0]], query), -1), torch.cat((query[..., : missing[1]], key), -1))


class Graph(Backend):
    """PyTorch's operations with their graph. Causal sums are one custom operation, opaque to compilers."""

    name = "graph"

    def serves(self, sums: Sums) -> str:
        return ""

    def run(self, sums: Sums) -> tuple[Tensor, tuple[Tensor, ...]]:
        return (self._sum(sums), ()) if sums.stream is None else carry(sums, self._alone)

    def _alone(self, sums: Sums) -> Tensor:
        """The sums of tokens without a stream, by the first kernel that serves them, if any."""
        if sums.q.ndim == 3:
            return self._alone(sums.lifted())[0]
        backend = chosen(KERNELS, sums) or self
        return contained(sums, backend.run(sums)[0], lambda clean: backend.run(clean)[0])

    def _sum(self, sums: Sums) -> Tensor:
        t, g = sums.q.shape[-2], sums.g
        queries, keys, values = sums.made()
        parts = [values]
        if sums.denominator is not None:
            ones = torch.ones_like(values[..., :1])
            parts = [torch.cat((values, ones), -1)] if len(queries) == 1 else [values, ones]
        operands = [list(each) for each in zip(queries, keys, parts, strict=False)]
        if (sums.causal or g is not None) and t != sums.k.shape[-2]:
            operands, g = aligned(operands, g)
        totals = [_total(xs[0], xs[1], xs[2], g, sums.causal) for xs in operands]
        total = totals[0] if len(totals) == 1 else torch.cat(totals, -1)
        total = total if total.shape[-2] == t else total[..., -t:, :]  # a full slice costs a copy, backward
        return divide(total) if sums.denominator == "divide" else total


GRAPH = Graph()
