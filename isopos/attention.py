"""Multi-head attention as a module: projections around a scheme."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from isopos.functional import linear_attention, softmax_attention
from isopos.schemes import Scheme

__all__ = ["Attention"]


class Attention(nn.Module):
    """Multi-head attention whose scores see positions through a scheme.

    The scheme is evaluated once a forward and shared by layers: pass ``scheme.at(positions)`` as `at`.

    Args:
        model_dim: Width of inputs and outputs, a multiple of the scheme's heads.
        scheme: Not a submodule of this one: whoever builds several layers owns it.

    Example:
        >>> import torch
        >>> import isopos
        >>> scheme = isopos.rope(16, 4)
        >>> layer = Attention(64, scheme)
        >>> layer(torch.randn(2, 10, 64), scheme.at(isopos.sequence(10)), causal=True).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, model_dim: int, scheme: Scheme):
        super().__init__()
        if model_dim % scheme.heads:
            raise ValueError(f"model_dim: expected a multiple of the {scheme.heads} heads, got {model_dim}")
        head_dim = model_dim // scheme.heads
        if head_dim != scheme.encoding.features:
            raise ValueError(
                f"model_dim: expected {scheme.heads} heads of {scheme.encoding.features} features, got {head_dim}"
            )
        self.heads = scheme.heads
        self.attend = softmax_attention if scheme.attention == "softmax" else linear_attention
        self.normalised = scheme.normalised
        self.query, self.key, self.value = (nn.Linear(model_dim, model_dim) for _ in range(3))
        self.out = nn.Linear(model_dim, model_dim)

    def forward(
        self,
        x: Tensor,
        at: dict[str, Any],
        *,
        context: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from x ``[b t m]`` to itself or to a context ``[b s m]``; mask ``[b s]``: True where a key takes part."""
        source = x if context is None else context
        heads = (layer(a).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, a in self._inputs(x, source))
        y = self.attend(*heads, causal=causal, mask=mask, **at)
        if self.normalised:
            y = F.layer_norm(y, y.shape[-1:])
        return self.out(y.transpose(1, 2).flatten(2))

    def _inputs(self, x: Tensor, source: Tensor):
        return (self.query, x), (self.key, source), (self.value, source)
