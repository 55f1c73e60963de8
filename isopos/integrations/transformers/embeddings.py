"""Modules that replace a model's tables of absolute positions."""

import torch
from torch import Tensor, nn

from isopos.integrations.transformers.rotary import tables
from isopos.scheme import Scheme


class _Replacement(nn.Module):
    """A module that computes vectors of positions by a scheme.

    Args:
        scheme: The scheme.
        old: The replaced table ``[n m]``; its dtype and device are used.
    """

    like: Tensor

    def __init__(self, scheme: Scheme, old: Tensor):
        super().__init__()
        self.scheme = scheme
        self.register_buffer("like", old.new_empty(0, old.shape[-1]), persistent=False)


class Sinusoids(_Replacement):
    """Table for RoFormer's rotations, sines of all pairs and then cosines, from a scheme with `rotations`."""

    def forward(self, shape: torch.Size, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Table ``[t d]`` at positions ``[t]``; by default of tokens ``[b t]`` after `past` earlier tokens."""
        x = torch.arange(past, past + shape[1], device=self.like.device) if position_ids is None else position_ids
        table = torch.cat(tables(self.scheme, x[..., None], self.like.dtype), -2)
        cos, sin = table.to(self.like.dtype).unbind(-1)
        return torch.cat((sin, cos), -1)


class Absolute(_Replacement):
    """The vectors that a scheme adds to embeddings of tokens, or zeros."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Vectors ``[b t m]`` of positions ``[b t]``."""
        if (added := self.scheme.embedding) is None:
            return self.like.new_zeros(*position_ids.shape, self.like.shape[-1])
        return added(position_ids[..., None]).to(self.like.dtype)
