"""Rows have nothing of tokens that they do not see, whatever these hold: in products of matrices zero times NaN is NaN."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from isopos.ops.library import watched
from isopos.ops.linear.features import Sums


def looks(x: Tensor) -> bool:
    """Whether numbers can be looked at: not under a compiler, nor at little cost but on a CPU."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or watched() or is_legacy_batchedtensor(x):
        return False
    return x.device.type == "cpu"


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite, as far as it can be told."""
    return not looks(x) or math.isfinite(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)).item())


def broken(parts: Iterable[Tensor]) -> Tensor:
    """Tokens ``[*b h t]`` of which a number is NaN or infinite."""
    return torch.stack([~x.isfinite().all(-1) for x in parts]).any(0)


def joined(total: Tensor, clean: Tensor, seen: Tensor) -> Tensor:
    """`total` where ``seen`` is True and `clean` elsewhere, with the gradient of `clean`."""
    return clean + torch.where(seen, total.detach() - clean.detach(), 0)


def isolated(sums: Sums, total: Tensor, run: Callable[[Sums], Tensor]) -> Tensor:
    """The sums, summed again without broken tokens where any number is not finite, for the rows that see none of these.

    Without log decays the last row sees every key; of another row's query gradients alone would hold something. In two
    products of matrices all rows of a head see each of its keys, and their gradients are `graph`'s care.
    """
    if sums.products:
        return total
    known = sums.notes.get("finite")
    if finite(total if sums.g is not None or total.requires_grad else total[..., -1:, :]) if known is None else known:
        return total
    clean, seen = cleaned(sums)
    return total if bool(seen.all()) else joined(total, run(clean), seen)


@torch.no_grad()
def _broken(sums: Sums) -> tuple[Tensor, Tensor]:
    """Broken queries, and broken keys or values."""
    queries, keys, value = sums.made()
    return broken(queries), broken((*keys, value))


def cleaned(sums: Sums) -> tuple[Sums, Tensor]:
    """The problem without what broken tokens hold, and the rows ``[*b h t 1]`` that see one."""
    of_queries, of_keys = _broken(sums)
    q = torch.where(of_queries[..., None], 0, sums.q)
    k, v = (torch.where(of_keys[..., None], 0, x) for x in (sums.k, sums.v))
    return replace(sums, q=q, k=k, v=v), (of_queries | _sees(of_keys, sums))[..., None]


@torch.no_grad()
def _sees(broken: Tensor, sums: Sums) -> Tensor:
    """The rows ``[*b h t]`` that see one of the keys ``[*b h s]``: the nearest before them, or after them, has a weight."""
    t, s = sums.q.shape[-2], broken.shape[-1]
    index, own = torch.arange(s, device=broken.device), torch.arange(s - t, s, device=broken.device)
    seen = broken.new_zeros(*broken.shape[:-1], t)
    before = torch.where(broken, index, -1).cummax(-1).values[..., own.clamp_min(0)]
    nearest = [torch.where(own < 0, -1, before)]
    if not sums.causal:
        after = torch.where(broken, index, s).flip(-1).cummin(-1).values.flip(-1)[..., own.clamp_min(0)]
        nearest.append(torch.where(after == s, -1, after))
    for near in nearest:
        weight = torch.ones((), dtype=sums.dtype, device=broken.device)
        if sums.g is not None:
            query, key = sums.g[0].expand(near.shape), sums.g[1].expand(broken.shape)
            weight = (-(query - key.gather(-1, near.clamp_min(0))).abs()).exp().to(sums.dtype)
        seen |= (near >= 0) & (weight > 0)
    return seen
