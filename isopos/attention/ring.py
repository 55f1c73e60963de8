"""Softmax attention of one sequence over a ring of processes: keys and values of one other process at a time.

At hop n process r receives the keys of process r - n, while it attends to the keys of hop n - 1. The keys of each hop give
an output o_b and the logarithm l_b of its sum of weights. All hops together give

    l = log sum_b exp(l_b),    o = sum_b exp(l_b - l) o_b.

The backward pass fetches the keys again, computes o_b and l_b again with the gradients

    exp(l_b - l) do    and    exp(l_b - l) <do, o_b - o>,

and sends the gradients of keys back to their process. Logits are computed for a block of queries and a block of keys at a
time. Keys that no query of the receiving process sees are not sent, and blocks whose pairs are all masked are not computed,
so all processes have the same work in causal attention with zig-zag shards.

References:
    Ring attention with blockwise transformers (Liu, Zaharia, Abbeel 2023), https://arxiv.org/abs/2310.01889
    Striped attention (Brandon et al. 2023), https://arxiv.org/abs/2311.09431; zig-zag shards are a variant
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.attention.pairs import added_to_logits, takes_part
from isopos.attention.problem import SoftmaxProblem
from isopos.exact import full_precision, once
from isopos.maps import Identity
from isopos.ops.linear.containment import finite, nonfinite
from isopos.parallel import Shards, Traffic, traffic_now
from isopos.terms import Numbers

KEYS, LOGITS = 2048, 1 << 22  # largest number of keys, and of logits, at a time

Piece = tuple[int, int]  # first index in the sequence, and last + 1


def serves(problem: SoftmaxProblem) -> bool:
    """Whether a problem takes the ring. Windows of contiguous shards do not: they only need keys of adjacent shards."""
    shards = problem.shards
    assert shards is not None
    pairs = bool(problem.terms) or problem.locality is not None or problem.attn_mask is not None
    return shards.ring and (shards.zigzag or pairs or problem.window is None)


def attended(problem: SoftmaxProblem) -> Tensor:
    """Outputs ``[*b h t e]`` of a shard's queries."""
    shards, traffic = problem.shards, traffic_now()
    assert shards is not None
    kept, moved = _kept(problem), _moved(problem)
    tensors = [*(x.tensor for x in kept.values()), *(x.movedim(axis, 0) for x, axis in moved.values())]
    blank = problem.q.new_empty(0)
    terms = tuple(replace(term, table=term.table.detach()) for term in problem.terms)
    problem = replace(problem, q=blank, k=blank, v=blank, rho_q=Identity(), rho_k=Identity(), terms=terms)
    axes = {name: axis for name, (_, axis) in moved.items()}
    plan = _Plan(problem, shards, {name: x._replace(tensor=blank) for name, x in kept.items()}, axes, traffic)
    with full_precision(tensors[0].device):
        return _Attend.apply(plan, *tensors)  # pyright: ignore[reportReturnType]


class _Kept(NamedTuple):
    """A tensor that stays in its process, with its axis of queries and its axis of all keys; None without such an axis."""

    tensor: Tensor
    rows: int | None = None
    columns: int | None = None

    def part(self, x: Tensor, rows: slice, columns: slice) -> Tensor:
        """Slice of x, which has the axes of this tensor, for some queries and keys."""
        x = x if self.rows is None else x[(..., rows, *(slice(None),) * (-1 - self.rows))]
        return x if self.columns is None else x[..., columns]


def _kept(problem: SoftmaxProblem) -> dict[str, _Kept]:
    """Tensors that stay, by name: queries with their decay and segments, and tensors over pairs of queries and keys."""
    assert problem.shards is not None
    t, kept = problem.q.shape[-2], {"q": _Kept(problem.rho_q(problem.q), -2)}
    if any(term.side == "query" for term in problem.terms):
        kept["raw_q"] = _Kept(problem.q, -2)
    if problem.decay is not None:
        kept["decay"] = _Kept(problem.decay[0], -1)
    if problem.segments is not None:
        kept["segments"] = _Kept(problem.segments[0][..., -t:], -1)
    for name, x in (("locality", problem.locality), ("attn_mask", problem.attn_mask)):
        if x is not None:
            kept[name] = _Kept(x.expand(*x.shape[:-2], t, problem.shards.total), -2, -1)
    for n, term in enumerate(problem.terms):
        kept[f"table{n}"] = _Kept(term.table, -2, -1) if isinstance(term, Numbers) else _Kept(term.table)
    return kept


def _moved(problem: SoftmaxProblem) -> dict[str, tuple[Tensor, int]]:
    """Tensors that travel round the ring, by name, each with its axis of keys."""
    moved = {"k": (problem.rho_k(problem.k), -2), "v": (problem.v, -2)}
    if any(term.side == "key" for term in problem.terms):
        moved["raw_k"] = problem.k, -2
    if problem.decay is not None:
        moved["decay"] = problem.decay[1], -1
    if problem.segments is not None:
        moved["segments"] = problem.segments[1], -1
    if problem.mask is not None:
        moved["mask"] = problem.mask, -1
    return moved


class _Block(NamedTuple):
    """Keys of one process: `tensors` ``[n ...]`` hold the tokens of `pieces` of the sequence."""

    source: int
    pieces: list[Piece]
    tensors: Sequence[Tensor]


class _Unit(NamedTuple):
    """A block of queries by keys: slices of this process's queries and of the received keys, and their pieces."""

    rows: slice
    keys: slice
    of_rows: Piece
    of_keys: Piece


@dataclass(eq=False)
class _Plan:
    """Attention of one shard: the keys that it receives and the pairs that it computes."""

    problem: SoftmaxProblem
    shards: Shards
    kept: dict[str, _Kept]
    axes: dict[str, int]
    traffic: Traffic | None

    def __post_init__(self) -> None:
        self.pieces = tuple(self.shards.pieces)

    def sees(self, queries: Piece, keys: Piece) -> bool:
        """Whether any query of a piece sees any key of another piece, by their indices alone."""
        return _sees(queries, keys, self.problem.causal, self.problem.window)

    def needed(self, rank: int, source: int) -> list[int]:
        """Numbers of the pieces of process `source` that process `rank` needs."""
        queries = self.pieces[rank]
        return [n for n, keys in enumerate(self.pieces[source]) if any(self.sees(piece, keys) for piece in queries)]

    def blocks(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, _Block]]:
        """Hop and keys, this process's keys first; while one block is used, the next one is on its way."""
        shards, hops = self.shards, _hops(self.pieces, self.problem.causal, self.problem.window)
        held = self.pieces[shards.rank]

        def start(hop: int) -> Any:
            source = (shards.rank - hop) % shards.size
            rows = self.local(held, self.needed((shards.rank + hop) % shards.size, shards.rank))
            pieces = [self.pieces[source][n] for n in self.needed(shards.rank, source)]
            sent = [torch.cat([x[part] for part in rows]) if rows else x[:0] for x in tensors]
            return source, pieces, shards.pass_on(sent, hop, sum(b - a for a, b in pieces), self.traffic)

        pending = [start(hop) for hop in hops[:1]]
        yield 0, _Block(shards.rank, list(held), tensors)
        for n, hop in enumerate(hops):
            source, pieces, wait = pending.pop()
            block = _Block(source, pieces, wait())
            pending = [start(later) for later in hops[n + 1 : n + 2]]
            yield hop, block

    def local(self, pieces: Sequence[Piece], chosen: Sequence[int]) -> list[slice]:
        """Slices of a process's tokens that hold the chosen pieces."""
        ends = [sum(b - a for a, b in pieces[:n]) for n in range(len(pieces) + 1)]
        return [slice(ends[n], ends[n + 1]) for n in chosen]

    def units(self, block: _Block, batch: int) -> Iterator[_Unit]:
        """Units of this process's queries and a block's keys that have pairs to compute."""
        held = self.pieces[self.shards.rank]
        queries_by_piece = zip(self.local(held, range(len(held))), held, strict=True)
        keys = list(zip(self.local(block.pieces, range(len(block.pieces))), block.pieces, strict=True))
        for rows, queries in queries_by_piece:
            for slice_of_keys, piece in keys:
                for first in range(*piece, KEYS):
                    last = min(first + KEYS, piece[1])
                    size = max(16, LOGITS // (batch * (last - first)))
                    for start in range(*queries, size):
                        stop = min(start + size, queries[1])
                        if self.sees((start, stop), (first, last)):
                            a, b = rows.start - queries[0], slice_of_keys.start - piece[0]
                            yield _Unit(slice(a + start, a + stop), slice(b + first, b + last), (start, stop), (first, last))

    def compute(self, unit: _Unit, kept: dict[str, Tensor], moved: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs of a unit's queries over its keys, and the logarithms of their sums of weights."""
        problem, dtype = self.problem, kept["q"].dtype
        q, k, v = kept["q"], moved["k"], moved["v"]
        q_nan, k_nan = (None if finite(x) and finite(y) else nonfinite((x,)) | nonfinite((y,)) for x, y in ((q, q), (k, v)))
        q = q if q_nan is None else torch.where(q_nan[..., None], 0, q)
        k, v = (x if k_nan is None else torch.where(k_nan[..., None], 0, x) for x in (k, v))
        part = self.of_unit(unit, kept, moved)
        allowed = _visible(unit, problem.causal, problem.window, q.device)
        allowed = takes_part(part) if allowed is None else takes_part(part) & allowed
        logits = problem.scale * q @ k.mT
        if "locality" in kept:
            logits = logits * kept["locality"].unsqueeze(-3).to(dtype)
        added = added_to_logits(part).to(dtype).clamp_min(torch.finfo(dtype).min)
        logits = (logits + added).masked_fill(~allowed, -torch.inf)
        largest = logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
        weight = (logits - largest).exp()
        total = weight.sum(-1, keepdim=True)
        has_keys = total > 0
        total = torch.where(has_keys, total, 1)
        out = sum((term.values(weight) for term in part.terms if term.side == "value"), weight @ v) / total
        if q_nan is not None or k_nan is not None:
            seen = out.new_zeros(out.shape[:-1], dtype=torch.bool) if q_nan is None else q_nan.expand(out.shape[:-1])
            seen = seen if k_nan is None else seen | (allowed & k_nan.unsqueeze(-2)).any(-1)
            out = out.masked_fill(seen[..., None], torch.nan)
        return out, torch.where(has_keys, largest + total.log(), -torch.inf)[..., 0]

    def of_unit(self, unit: _Unit, kept: dict[str, Tensor], moved: dict[str, Tensor]) -> SoftmaxProblem:
        """The problem of a unit without `causal` and window, which follow from indices alone."""
        rows, columns = unit.rows, slice(*unit.of_keys)
        terms = [
            replace(term if isinstance(term, Numbers) else term.part(rows, columns), table=kept[f"table{n}"])
            for n, term in enumerate(self.problem.terms)
        ]
        return replace(
            self.problem,
            q=kept.get("raw_q", kept["q"]),
            k=moved.get("raw_k", moved["k"]),
            v=moved["v"],
            terms=tuple(terms),
            decay=None if self.problem.decay is None else (kept["decay"], moved["decay"]),
            segments=None if self.problem.segments is None else (kept["segments"], moved["segments"]),
            mask=moved.get("mask"),
            attn_mask=kept.get("attn_mask"),
            causal=False,
            window=None,
        )

    def parts(
        self, unit: _Unit, kept: Sequence[Tensor], moved: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Tensors of a unit's queries and of its keys, by name, in the dtype of the sums."""
        rows, columns = unit.rows, slice(*unit.of_keys)
        queries = {name: kind.part(x, rows, columns) for (name, kind), x in zip(self.kept.items(), kept, strict=True)}
        keys = {name: x[unit.keys].movedim(0, axis) for (name, axis), x in zip(self.axes.items(), moved, strict=True)}
        queries = {name: _promoted(x, dtype) for name, x in queries.items()}
        return queries, {name: _promoted(x, dtype) for name, x in keys.items()}


def _sees(queries: Piece, keys: Piece, causal: bool, window: int | None) -> bool:
    if queries[0] == queries[1] or keys[0] == keys[1] or (causal and keys[0] >= queries[1]):
        return False
    return window is None or (keys[1] > queries[0] - window + 1 and keys[0] < queries[1] + window - 1)


@lru_cache(64)
def _hops(pieces: tuple[tuple[Piece, ...], ...], causal: bool, window: int | None) -> list[int]:
    """The distances in the ring at which some process needs keys."""
    size = len(pieces)

    def needs(rank: int, source: int) -> bool:
        return any(_sees(queries, keys, causal, window) for queries in pieces[rank] for keys in pieces[source])

    return [hop for hop in range(1, size) if any(needs(rank, (rank - hop) % size) for rank in range(size))]


def _promoted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else x


def _visible(unit: _Unit, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """Keys of a unit that its queries see by their indices: bool ``[t s]``; None for all."""
    (start, stop), (first, last) = unit.of_rows, unit.of_keys
    below = not causal or last <= start + 1
    near = window is None or max(stop - 1 - first, last - 1 - start) < window
    if below and near:
        return None
    offset = torch.arange(first, last, device=device) - torch.arange(start, stop, device=device)[:, None]
    allowed = offset <= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
    return allowed if window is None else allowed & (offset.abs() < window)


class _Attend(torch.autograd.Function):
    """Outputs ``[*b h t e]`` in the dtype of the sums."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Tensor:
        batch, count = plan.problem.batch, len(plan.kept)
        kept, moved = tensors[:count], tensors[count:]
        q, v = kept[0], moved[list(plan.axes).index("v")]
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*batch, q.shape[-2], v.shape[-1], dtype=dtype)
        logarithm = q.new_full((*batch, q.shape[-2]), -torch.inf, dtype=dtype)
        for _, block in plan.blocks(moved):
            for unit in plan.units(block, math.prod(batch)):
                partial, added = plan.compute(unit, *plan.parts(unit, kept, block.tensors, dtype))
                before = logarithm[..., unit.rows]
                after = torch.logaddexp(before, added)
                old, new = (torch.where(after == -torch.inf, 0, (x - after).exp())[..., None] for x in (before, added))
                out[..., unit.rows, :] = old * out[..., unit.rows, :] + new * partial
                logarithm[..., unit.rows] = after
        ctx.plan = plan
        ctx.save_for_backward(*tensors, out, logarithm)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        once("attention over a group", "a single process")
        plan, (*tensors, out, logarithm) = ctx.plan, ctx.saved_tensors
        count, batch, dtype = len(plan.kept), math.prod(plan.problem.batch), out.dtype
        kept, moved = tensors[:count], tensors[count:]
        grads = [_zeros(x, dtype) for x in kept]
        home, returning = [_zeros(x, dtype) for x in moved], None
        with full_precision(out.device):
            for hop, block in plan.blocks(moved):
                of_block = [_zeros(x, dtype) for x in block.tensors] if hop else home
                for unit in plan.units(block, batch):
                    _add_grads(plan, unit, kept, block.tensors, (grad, out, logarithm), (grads, of_block))
                if returning is not None:
                    _take_home(*returning, home)
                returning = _sent_home(plan, hop, of_block) if hop else None
            if returning is not None:
                _take_home(*returning, home)
        pairs = zip((*grads, *home), tensors, strict=True)
        return None, *(None if total is None else total.to(x.dtype) for total, x in pairs)


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Zeros in which gradients of x are summed; None for integers."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else None


def _add_grads(
    plan: _Plan,
    unit: _Unit,
    kept: Sequence[Tensor],
    moved: Sequence[Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    totals: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
) -> None:
    """Add the gradients of a unit's tensors."""
    grad, out, logarithm = results[0][..., unit.rows, :], results[1][..., unit.rows, :], results[2][..., unit.rows]
    queries, keys = plan.parts(unit, kept, moved, out.dtype)
    leaves = [x.detach().requires_grad_() for x in (*queries.values(), *keys.values()) if x.is_floating_point()]
    unused = iter(leaves)
    queries, keys = (
        {name: next(unused) if x.is_floating_point() else x for name, x in part.items()} for part in (queries, keys)
    )
    with torch.enable_grad():
        partial, logsum = plan.compute(unit, queries, keys)
    share = torch.where(logarithm == -torch.inf, 0, (logsum.detach() - logarithm).exp())
    differences = torch.where(grad == 0, 0, grad * (partial.detach() - out))  # NaN stays where it is asked for
    of_sum = torch.where(share == 0, 0, share * differences.sum(-1))
    derivatives = torch.autograd.grad((partial, logsum), leaves, (share[..., None] * grad, of_sum), allow_unused=True)
    derivatives = iter(derivatives)
    rows, columns = unit.rows, slice(*unit.of_keys)
    for (name, kind), total in zip(plan.kept.items(), totals[0], strict=True):
        if queries[name].is_floating_point() and (x := next(derivatives)) is not None and total is not None:
            kind.part(total, rows, columns).add_(x)
    for (name, axis), total in zip(plan.axes.items(), totals[1], strict=True):
        if keys[name].is_floating_point() and (x := next(derivatives)) is not None and total is not None:
            total[unit.keys].add_(x.movedim(axis, 0))


def _sent_home(plan: _Plan, hop: int, grads: Sequence[Tensor | None]) -> tuple[Any, list[slice]]:
    """Start to send gradients of keys to their process; return also the slices of local keys whose gradients arrive."""
    shards = plan.shards
    used = plan.local(plan.pieces[shards.rank], plan.needed((shards.rank + hop) % shards.size, shards.rank))
    incoming = sum(part.stop - part.start for part in used)
    return shards.pass_on([x for x in grads if x is not None], -hop, incoming, plan.traffic), used


def _take_home(wait: Any, used: list[slice], home: Sequence[Tensor | None]) -> None:
    """Add the gradients of local keys that other processes send back."""
    for total, x in zip([x for x in home if x is not None], wait(), strict=True):
        for rows, grad in zip(used, x.split([rows.stop - rows.start for rows in used]), strict=True):
            total[rows] += grad
