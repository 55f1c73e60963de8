"""NaN containment: NaN and infinity reach only rows that see them, although zero times NaN is NaN in matrix products."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from isopos.ops.library import watched
from isopos.ops.linear.division import uncounted
from isopos.ops.linear.features import Sums


def may_inspect(x: Tensor) -> bool:
    """Whether the numbers of x may be inspected: on a CPU, where that costs little, and outside compilers and transforms."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or watched() or is_legacy_batchedtensor(x):
        return False
    return x.device.type == "cpu"


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite; True if they may not be inspected."""
    return not may_inspect(x) or math.isfinite(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)).item())


def nonfinite(parts: Iterable[Tensor]) -> Tensor:
    """Tokens ``[*b h t]`` with a NaN or infinite number in any of the parts."""
    return torch.stack([~x.isfinite().all(-1) for x in parts]).any(0)


def with_gradient_of(total: Tensor, clean: Tensor, seen: Tensor) -> Tensor:
    """`total` where `seen` is True and `clean` elsewhere, with the gradient of `clean`."""
    return clean + torch.where(seen, total.detach() - clean.detach(), 0)


def contained(sums: Sums, total: Tensor, run: Callable[[Sums], Tensor]) -> Tensor:
    """The sums; if any number is not finite, rows that see no non-finite token are summed again without these tokens.

    Without log decays and gradients it suffices to inspect the last row, which sees every key. In two matrix products all
    rows of a head see all its keys; `graph` handles their gradients.
    """
    if sums.products:
        return total
    known = sums.notes.get("finite")
    if finite(total if sums.g is not None or total.requires_grad else total[..., -1:, :]) if known is None else known:
        return total
    clean, seen = cleaned(sums)
    with uncounted():
        return with_gradient_of(total, run(clean), seen)


def with_finite_gradient(total: Tensor, axes: tuple[int, ...] = (-1,)) -> Tensor:
    """Sums to be divided, without a gradient in rows with a NaN or infinity on these axes, since it would be NaN."""
    if not total.requires_grad or finite(total):
        return total
    return torch.where(total.isfinite().all(axes, keepdim=True), total, total.detach())


def with_finite_rows(x: Tensor) -> Tensor:
    """The rows of x, zero where one has a NaN or infinity, which would reach gradients of all rows of the other factor."""
    return x if finite(x) else torch.where(nonfinite((x,))[..., None], 0, x)


def times(q: Tensor, state: Tensor) -> Tensor:
    """q @ state, with the gradient of their finite numbers."""
    if finite(q) and finite(state):
        return q @ state
    total = q.detach() @ state.detach()
    return with_gradient_of(total, with_finite_rows(q) @ torch.where(state.isfinite(), state, 0), ~total.isfinite())


def cleaned(sums: Sums) -> tuple[Sums, Tensor]:
    """The problem with non-finite tokens set to zero, and the rows ``[*b h t 1]`` that see one."""
    with torch.no_grad():
        queries, keys, value = sums.made()
        of_queries, of_keys = nonfinite(queries), nonfinite((*keys, value))
    q = torch.where(of_queries[..., None], 0, sums.q)
    k, v = (torch.where(of_keys[..., None], 0, x) for x in (sums.k, sums.v))
    return replace(sums, q=q, k=k, v=v), (of_queries | _sees(of_keys, sums))[..., None]


@torch.no_grad()
def _sees(nonfinite: Tensor, sums: Sums) -> Tensor:
    """The rows ``[*b h t]`` that see one of the keys ``[*b h s]``: the nearest one before or after has a positive weight."""
    t, s = sums.q.shape[-2], nonfinite.shape[-1]
    index, row = torch.arange(s, device=nonfinite.device), torch.arange(s - t, s, device=nonfinite.device)
    seen = nonfinite.new_zeros(*nonfinite.shape[:-1], t)
    before = torch.where(nonfinite, index, -1).cummax(-1).values[..., row.clamp_min(0)]
    nearest = [torch.where(row < 0, -1, before)]
    if not sums.causal:
        after = torch.where(nonfinite, index, s).flip(-1).cummin(-1).values.flip(-1)[..., row.clamp_min(0)]
        nearest.append(torch.where(after == s, -1, after))
    for near in nearest:
        weight = torch.ones((), dtype=sums.dtype, device=nonfinite.device)
        if sums.g is not None:
            query, key = sums.g[0].expand(near.shape), sums.g[1].expand(nonfinite.shape)
            weight = (-(query - key.gather(-1, near.clamp_min(0))).abs()).exp().to(sums.dtype)
        seen |= (near >= 0) & (weight > 0)
    return seen
