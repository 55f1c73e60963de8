"""Causal sums in plain PyTorch operations, for `torch.export`: the program runs where isopos is not installed."""

import torch
from torch import Tensor

from isopos.ops.linear.features import Decays

CHUNK = 64  # tokens whose weights are formed explicitly


def exported_sum(q: Tensor, k: Tensor, v: Tensor, g: Decays, causal: bool) -> Tensor:
    """Sums as in `isopos.ops.linear` for features of equal length ``[*b h t d]``, without NaN containment.

    Weights are explicit inside a chunk; earlier chunks enter as states ``[*b h n d e]``. With a decay, states are weighted
    by a matrix ``[n n]`` instead of a loop, since an exported program has no loop over a dynamic length.
    """
    if causal:
        return _causal(q, k, v, g)
    assert g is not None
    later = _causal(q.flip(-2), k.flip(-2), v.flip(-2), (-g[0].flip(-1), -g[1].flip(-1)))
    return _causal(q, k, v, g) + later.flip(-2) - (q * k).sum(-1, keepdim=True) * v


def _causal(q: Tensor, k: Tensor, v: Tensor, g: Decays) -> Tensor:
    # Chunks are read and written by index: reshaping would tie an exported program to multiples of a chunk.
    t, token = q.shape[-2], torch.arange(q.shape[-2], device=q.device)
    start = torch.arange(0, t + CHUNK, CHUNK, device=q.device)  # at least two, so that no length is a special case
    padded = start[:, None] + torch.arange(CHUNK, device=q.device)
    index = padded.clamp_max(t - 1)  # [n c]
    q, k, v = q[..., index, :], torch.where((padded < t)[..., None], k[..., index, :], 0), v[..., index, :]
    if g is None:
        states = k.mT @ v
        chunk = start // CHUNK  # states before a chunk are read by index: a slice would limit the program's length
        before = torch.where((chunk > 0)[:, None, None], states[..., (chunk - 1).clamp_min(0), :, :], 0).cumsum(-3)
        near, far = (q @ k.mT).tril(), q @ before
    else:
        query, key = (x[..., index] for x in g)  # [*b h n c]
        first, last = query[..., :1], key[..., -1:]
        near = (q @ k.mT) * _weight(query[..., :, None] - key[..., None, :], q).tril()
        states = (k * _weight(last - key, k)[..., None]).mT @ v
        between = _weight(first - last.mT, q).tril(-1)  # [*b h n n], weights of states before chunks
        before = (between @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
        far = (q * _weight(query - first, q)[..., None]) @ before
    return (near @ v + far)[..., token // CHUNK, token % CHUNK, :]


def _weight(exponent: Tensor, like: Tensor) -> Tensor:
    """exp(exponent) in the dtype of `like`, at most 1; the caller masks later tokens, whose exponents are positive."""
    return exponent.clamp_max(0).exp().to(like.dtype)
