"""What every model here is made of: embedded tokens, blocks of attention and feed-forward, one scheme for all of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isopos.attention import Attention
from isopos.positions import sequence
from isopos.scheme import Scheme
from isopos.state import State

__all__ = ["TOKEN_STD", "Block", "enter", "through", "trunk"]

TOKEN_STD = 0.1  # of initial token embeddings


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input.

    Args:
        model_dim: Width.
        scheme: Of the attention.
        hidden_dim: Width inside the feed-forward; 4 * model_dim by default.
        dropout: Probability, on both branches.
    """

    def __init__(self, model_dim: int, scheme: Scheme, *, hidden_dim: int | None = None, dropout: float = 0.0):
        super().__init__()
        hidden = hidden_dim or 4 * model_dim
        self.norm1, self.norm2 = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.attention = Attention(model_dim, scheme)
        self.feed_forward = nn.Sequential(nn.Linear(model_dim, hidden), nn.ReLU(), nn.Linear(hidden, model_dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, at: Any, *, causal: bool, mask: Tensor | None = None, return_state: bool = False) -> Any:
        """x ``[b t m]``, of which those of the mask ``[b t]`` are seen -> ``[b t m]``, or a pair of it and the state."""
        found = self.attention(self.norm1(x), at, causal=causal, mask=mask, return_state=return_state)
        y, *state = found if return_state else (found,)
        x = x + self.dropout(y)
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return (x, *state) if return_state else x


def trunk(
    vocabulary: int, model_dim: int, layers: int, scheme: Scheme, hidden_dim: int | None, dropout: float
) -> tuple[nn.Embedding, nn.ModuleList, nn.LayerNorm]:
    """Vectors of tokens, blocks, and the norm after them; see `Block`.

    Raises:
        ValueError: Where the scheme adds an embedding of another width.
    """
    if scheme.embedding is not None and scheme.embedding.model_dim != model_dim:
        raise ValueError(f"model_dim: expected the {scheme.embedding.model_dim} of the scheme's embedding, got {model_dim}")
    tokens = nn.Embedding(vocabulary, model_dim)
    nn.init.normal_(tokens.weight, std=TOKEN_STD)
    blocks = nn.ModuleList(Block(model_dim, scheme, hidden_dim=hidden_dim, dropout=dropout) for _ in range(layers))
    return tokens, blocks, nn.LayerNorm(model_dim)


def enter(x: Tensor, scheme: Scheme, positions: Tensor | None = None, state: State | None = None) -> tuple[Tensor, Any]:
    """Embedded tokens ``[b t m]`` with what a scheme adds to them, and what it gives attention, at positions 0 to t - 1.

    Or at those given, ``[t c]`` or ``[b t c]``. Padding has positions, too: on a line the next ones, in a tree roots.
    """
    positions = sequence(x.shape[1], device=x.device) if positions is None else positions
    if scheme.embedding is not None:
        x = x + scheme.embedding(positions, x.dtype)
    return x, scheme.at(positions, state=state, dtype=torch.promote_types(x.dtype, torch.float32))


def through(
    blocks: Iterable[nn.Module],
    x: Tensor,
    at: Any,
    *,
    causal: bool,
    mask: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """x ``[b t m]`` after all blocks.

    With a mask ``[b t]`` no sample sees its padding. With `recompute` the backward pass computes each block again instead
    of keeping what is inside.
    """
    options: dict[str, Any] = {"causal": causal, "mask": mask}
    for block in blocks:
        again = recompute and torch.is_grad_enabled()
        x = checkpoint(block, x, at, use_reentrant=False, **options) if again else block(x, at, **options)
    return x
