"""Streams with PyTorch's operations: causal sums of the next tokens and the sums after them, with a graph or in place."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from isopos.exact import broadcast, cast_down, full_precision
from isopos.ops.library import watched
from isopos.ops.linear.autograd import refuses_step
from isopos.ops.linear.division import clamp, divide
from isopos.ops.linear.features import ALL_READY, Decays, Features, Past, Sums
from isopos.ops.rotate import permute, reflect
from isopos.ops.slices import Slices


def carry(sums: Sums, linear: Callable[[Sums], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums for the next tokens of a stream, any number of them, with a graph; and the sums of k v^T after them.

    `linear` computes sums over the new tokens alone.
    """
    stream = sums.stream
    assert stream is not None
    totals, after = [], []
    for n, operands in enumerate(sums.triples()):
        total, state = _carried(*operands, sums.g, stream, stream.sums[n] if stream.sums else None, linear)
        totals.append(total)
        after.append(state)
    total = torch.cat(totals, -1)
    return divide(total) if sums.denominator == "divide" else total, tuple(after)


def _carried(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Decays,
    stream: Past,
    state: Tensor | None,
    linear: Callable[[Sums], Tensor],
) -> tuple[Tensor, Tensor]:
    """Causal sums ``[*b h t e]`` of features, and the sum of k v^T over all tokens so far ``[*b h d e]``.

    `state` is this sum before the new tokens, at the log decay ``[*b h]`` of the last past token. k and v may lack leading
    axes of q, which then share one state.
    """
    to_end = across = from_end = from_start = None  # weights of keys, of the state, of a single token, of queries
    if g is not None:
        query, key = g
        last = key[..., -1:]
        start = last if stream.before is None else stream.before[..., None]
        exponents = last - key, last - start, query - last, query - start
        to_end, across, from_end, from_start = (cast_down(x.exp(), k.dtype, k.device)[..., None] for x in exponents)
    if q.shape[-2] == k.shape[-2] == 1:
        after = k.mT @ v if state is None else torch.addcmul(weighed(state, across), k.mT, v)
        return (q if from_end is None else q * from_end) @ after, after
    after = weighed(k, to_end).mT @ (v if to_end is None else torch.where(to_end == 0, 0, v))
    batch = broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    queries, keys, values = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    total = linear(Sums(queries, keys, values, ALL_READY, g))
    if state is None:
        return total, after
    far = q @ state if from_start is None else torch.where(from_start == 0, 0, (q * from_start) @ state)
    return total + far, after + weighed(state, across)


def weighed(x: Tensor, weight: Tensor | None) -> Tensor:
    """x times weights; weight 0 gives 0, even for NaN."""
    return x if weight is None else torch.where(weight == 0, 0, x * weight)


class TorchSteps:
    """Steps that update the sums of a stream in place, on any device, in any dtype, if no kernel serves the steps.

    Results equal those of `carry`, by the same operations. Nothing is checked again; features of queries and keys are
    computed together if they have the same map.

    Args:
        sums: One step with float32 or float64 sums. The sums of its stream are overwritten from then on.

    Attributes:
        sums: Sums over all tokens so far.
        few: As in `isopos.ops.linear.cpu.CpuSteps`.
    """

    few = 4

    def __init__(self, sums: Sums):
        assert sums.stream is not None
        self.inputs, self.sums, self.dtype = sums.inputs, sums.stream.sums, sums.dtype
        self.leading, self.ones = self.sums[0].shape[:-2], None
        if sums.denominator is not None and len(self.sums) == 1:  # values with a column of ones
            self.ones = sums.v.new_ones(*sums.v.shape[:-1], sums.v.shape[-1] + 1, dtype=self.dtype)

    @classmethod
    def of(cls, sums: Sums) -> "TorchSteps | None":
        """The steps after this one; None if they need more than sums and a division."""
        return cls(sums) if not refuses_step(sums) and all(each.mask is None for each in sums.features) else None

    def look_ahead(self, features: tuple[Features, Features], weights: Tensor | None) -> None:
        """Set the tables of the next n tokens, as in `isopos.ops.linear.cpu.CpuSteps`."""
        query, key = self.features = features
        shapes = {x.shape for x in self.inputs[:2]}
        self.alike = query.phi is key.phi and query.map is key.map and query.kinds is not None and len(shapes) == 1
        promoted = (query.dtype or self.inputs[0].dtype) == self.dtype
        self.mapped = _by_row(query, self.dtype) if self.alike and promoted else None
        self.weights = None if weights is None else weights.view(-1, *self.leading, 1, 1)
        self.fades = weights is not None and bool((weights == 0).any())

    def fits(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the plan serves these tensors: same types, shapes, dtypes and devices, outside transforms."""
        for x, known in zip((q, k, v), self.inputs, strict=True):
            if type(x) is not Tensor or x.shape != known.shape or x.dtype != known.dtype or x.device != known.device:
                return False
        frozen = self.sums[0].is_inference() and not torch.is_inference_mode_enabled()  # must not be overwritten
        return not frozen and not watched()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        """The output ``[*b h 1 e]`` of the token with row n of the tables, in q's dtype."""
        with full_precision(q.device):
            out = self._step(q, k, v, n)
        return out if out.dtype == q.dtype else out.to(q.dtype)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        queries, keys = self._features(q, k, n)
        if self.weights is not None:
            self._fade(self.weights[n])
        (query, *plain), (key, *_), (state, *row) = queries, keys, self.sums
        if self.ones is not None:
            self.ones[..., :-1] = v
            return divide(query @ state.addcmul_(key.mT, self.ones))
        total = query @ state.addcmul_(key.mT, v.to(self.dtype))
        return total / clamp(plain[0] @ row[0].add_(keys[1].mT)) if row else total

    def _features(self, q: Tensor, k: Tensor, n: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Features of queries and of keys, computed together if both have the same map."""
        token, (query, key) = Slices((), slice(None), slice(n, n + 1)), self.features
        if not self.alike:
            return query.part(token)(q), key.part(token)(k)
        both = torch.stack((q, k))
        if self.mapped is None:
            both = query.part(token)(both)
        else:
            plain = query.phi(both if both.dtype is self.dtype else both.to(self.dtype))
            both = self.mapped(plain, n), plain
        return tuple(x[0] for x in both), tuple(x[1] for x in both)

    def _fade(self, weight: Tensor) -> None:
        """Multiply the sums by a weight; weight 0 gives 0, even for NaN."""
        for state in self.sums:
            state.copy_(torch.where(weight == 0, 0, state * weight)) if self.fades else state.mul_(weight)


def _by_row(features: Features, dtype: torch.dtype) -> Callable[[Tensor, int], Tensor] | None:
    """Maps phi(x) of one token by row n of the tables; None if the map has no closed form, or other dtypes meet."""
    if (closed := features.closed()) is None:
        return None
    kind, table, normal = closed
    if any(x is not None and x.is_floating_point() and x.dtype != dtype for x in (table, normal)):
        return None
    if table is None:
        by_table = None
    elif kind == "gather":
        by_table = functools.partial(_gathered, table.to(torch.int64))
    elif kind == "lift":
        by_table = functools.partial(_lifted, *table.unbind(-1))
    else:
        by_table = functools.partial(_rotated, torch.view_as_complex(table.contiguous()))
    if normal is None:
        return by_table or (lambda x, n: x)
    return lambda x, n: reflect(x, normal) if by_table is None else by_table(reflect(x, normal), n)


def _gathered(index: Tensor, x: Tensor, n: int) -> Tensor:
    return permute(x, _row(index, n))


def _lifted(cos: Tensor, sin: Tensor, x: Tensor, n: int) -> Tensor:
    return torch.cat((x * _row(cos, n), x * _row(sin, n)), -1)


def _rotated(turns: Tensor, x: Tensor, n: int) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * _row(turns, n)).flatten(-2)


def _row(x: Tensor, n: int) -> Tensor:
    """Row n of x ``[... t .]``, or the only one."""
    return x if x.shape[-2] == 1 else x.narrow(-2, n, 1)
