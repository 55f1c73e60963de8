"""Small models that read top to bottom, for comparisons and as examples of use."""

from typing import Any

import torch
from torch import Tensor, nn

from isopos.attention import Attention
from isopos.positions import sequence
from isopos.scheme import Scheme

__all__ = ["TOKEN_STD", "Block", "Decoder"]

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

    def forward(self, x: Tensor, at: dict[str, Any], *, causal: bool) -> Tensor:
        """x ``[b t m]`` -> ``[b t m]``."""
        x = x + self.dropout(self.attention(self.norm1(x), at, causal=causal))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class Decoder(nn.Module):
    """A causal language model; its layers share one scheme, evaluated once a forward.

    Args:
        vocabulary: Number of tokens.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        dropout: Probability.

    Example:
        >>> import isopos
        >>> model = Decoder(256, 32, 2, isopos.rope(8, 4))
        >>> model(torch.zeros(1, 10, dtype=torch.int64)).shape
        torch.Size([1, 10, 256])
    """

    def __init__(self, vocabulary: int, model_dim: int, layers: int, scheme: Scheme, *, dropout: float = 0.0):
        super().__init__()
        if scheme.embedding is not None and scheme.embedding.model_dim != model_dim:
            raise ValueError(
                f"model_dim: expected the {scheme.embedding.model_dim} of the scheme's embedding, got {model_dim}"
            )
        self.tokens = nn.Embedding(vocabulary, model_dim)
        nn.init.normal_(self.tokens.weight, std=TOKEN_STD)
        self.blocks = nn.ModuleList(Block(model_dim, scheme, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(model_dim)
        self.head = nn.Linear(model_dim, vocabulary)
        self.scheme = scheme

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens after ``[b t]``, at positions ``[t 1]`` or ``[b t 1]`` (0 to t - 1)."""
        positions = sequence(tokens.shape[-1], device=tokens.device) if positions is None else positions
        x = self.tokens(tokens)
        if self.scheme.embedding is not None:
            x = x + self.scheme.embedding(positions, x.dtype)
        at = self.scheme.at(positions, dtype=torch.promote_types(x.dtype, torch.float32))
        for block in self.blocks:
            x = block(x, at, causal=True)
        return self.head(self.norm(x))
