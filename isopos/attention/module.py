"""Multi-head attention as a module: projections around a scheme."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from isopos.attention.linear import linear_attention
from isopos.attention.softmax import softmax_attention
from isopos.scheme import Scheme

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
        head_dim, features = model_dim // scheme.heads, scheme.encoding.features
        if head_dim * scheme.width != features:
            raise ValueError(
                f"model_dim: expected {scheme.heads * features // scheme.width} for this scheme, got {model_dim}"
            )
        self.heads = scheme.heads
        self.attend = softmax_attention if scheme.attention == "softmax" else linear_attention
        self.normalised = scheme.normalised
        self.query, self.key = (nn.Linear(model_dim, scheme.width * model_dim) for _ in range(2))
        self.value = nn.Linear(model_dim, model_dim)
        self.out = nn.Linear(model_dim, model_dim)

    def forward(
        self,
        x: Tensor,
        at: Mapping[str, Any],
        *,
        context: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend from x ``[b t m]`` to itself or to a context ``[b s m]``.

        Args:
            x: Tokens.
            at: What the scheme's `at` returned; with a state, x are the next tokens of a stream.
            context: Tokens of keys and values.
            causal: A token sees those up to its own.
            mask: ``[b s]``, True where a key takes part.
            segment_ids: ``[b s]``, of packed sequences.
            return_state: Return a pair of the output and the next state.
        """
        source = x if context is None else context
        heads = (layer(a).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, a in self._inputs(x, source))
        options = {**at, "causal": causal, "mask": mask, "segment_ids": segment_ids, "return_state": return_state}
        found = self.attend(*heads, **options)
        y, *state = found if return_state else (found,)
        if self.normalised:
            y = F.layer_norm(y, y.shape[-1:])
        y = self.out(y.transpose(1, 2).flatten(2))
        return (y, *state) if return_state else y

    def _inputs(self, x: Tensor, source: Tensor):
        return (self.query, x), (self.key, source), (self.value, source)
