"""The specification of linear attention: every weight is formed."""

import torch
from torch import Tensor

from isopos.ops.linear.features import Decays


def naive(q: Tensor, k: Tensor, v: Tensor, g: Decays = None, *, causal: bool = False) -> Tensor:
    """The sum as the package's first lines define it: quadratic, any float dtype, twice differentiable.

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
