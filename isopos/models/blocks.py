"""What every model here is made of: embedded tokens, blocks of attention and feed-forward, one scheme for all of them."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isopos.attention import Attention
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme
from isopos.state import State

__all__ = ["TOKEN_STD", "Block", "Options", "Trunk"]

TOKEN_STD = 0.1  # of initial token embeddings


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input.

    Args:
        model_dim: Width.
        scheme: Of the attention.
        hidden_dim: Width inside the feed-forward; 4 * model_dim by default.
        dropout: Probability, on both branches.
        kv_heads, attention_dropout, window: `kv_heads`, `dropout` and `window` of `Attention`.
    """

    def __init__(
        self,
        model_dim: int,
        scheme: Scheme,
        *,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        kv_heads: int | None = None,
        attention_dropout: float = 0.0,
        window: int | None = None,
    ):
        super().__init__()
        hidden = hidden_dim or 4 * model_dim
        self.norm1, self.norm2 = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.attention = Attention(model_dim, scheme, kv_heads=kv_heads, dropout=attention_dropout, window=window)
        self.feed_forward = nn.Sequential(nn.Linear(model_dim, hidden), nn.ReLU(), nn.Linear(hidden, model_dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, at: Any, *, causal: bool, mask: Tensor | None = None, return_state: bool = False) -> Any:
        """x ``[b t m]``, of which those of the mask ``[b t]`` are seen -> ``[b t m]``, or a pair of it and the state."""
        found = self.attention(self.norm1(x), at, causal=causal, mask=mask, return_state=return_state)
        y, *state = found if return_state else (found,)
        x = x + self.dropout(y)
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return (x, *state) if return_state else x


class Options(TypedDict, total=False):
    """Of every model: see `Trunk`."""

    hidden_dim: int | None
    dropout: float
    recompute: bool
    kv_heads: int | None
    attention_dropout: float
    window: int | None


class Trunk(nn.Module, ABC):
    """Vectors of tokens, blocks, and the norm after them. Subclasses add a head.

    Args:
        vocabulary: Number of tokens.
        model_dim: Width, heads * head_dim of the scheme, or of queries where `kv_heads` are fewer.
        layers: Number of blocks.
        scheme: What sees positions.
        hidden_dim: Width inside the feed-forwards; 4 * model_dim by default.
        dropout: Probability.
        recompute: Compute each block again in the backward pass instead of keeping what is inside.
        kv_heads, attention_dropout, window: `kv_heads`, `dropout` and `window` of `Attention`; of linear attention, which
            has no windows in streams, a model with one has neither `prefill` nor `step`.

    Raises:
        ValueError: Where the scheme adds an embedding of another width.
    """

    def __init__(
        self,
        vocabulary: int,
        model_dim: int,
        layers: int,
        scheme: Scheme,
        *,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        recompute: bool = False,
        kv_heads: int | None = None,
        attention_dropout: float = 0.0,
        window: int | None = None,
    ):
        super().__init__()
        added = scheme.embedding
        if added is not None and added.model_dim != model_dim:
            raise ValueError(f"model_dim: expected the {added.model_dim} of the scheme's embedding, got {model_dim}")
        self.tokens = nn.Embedding(vocabulary, model_dim)
        nn.init.normal_(self.tokens.weight, std=TOKEN_STD)
        own = {"hidden_dim": hidden_dim, "dropout": dropout, "kv_heads": kv_heads, "window": window}
        own["attention_dropout"] = attention_dropout
        blocks = (Block(model_dim, scheme, **own) for _ in range(layers))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(model_dim)
        self.register_module("head", None)  # parameters of heads come before those of schemes, as in saved optimisers
        self.scheme, self.recompute = scheme, recompute

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the head makes of tokens ``[b t]`` at positions ``[t c]`` or ``[b t c]``, by default 0 to t - 1."""

    def enter(self, tokens: Tensor, positions: Tensor | None, state: State | None = None) -> tuple[Tensor, Arguments]:
        """Vectors ``[b t m]`` of tokens with what the scheme adds to them, and what it gives attention."""
        positions = sequence(tokens.shape[1], device=tokens.device) if positions is None else positions
        if isinstance(positions, Tensor) and positions.device != tokens.device:
            raise ValueError(f"positions: expected a tensor on {tokens.device} as tokens, got one on {positions.device}")
        x = self.tokens(tokens)
        if self.scheme.embedding is not None:
            x = x + self.scheme.embedding(positions, x.dtype)
        return x, self.scheme.at(positions, state=state, dtype=torch.promote_types(x.dtype, torch.float32))

    def features(
        self, tokens: Tensor, positions: Tensor | None, *, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """What the head is given, ``[b t m]``; with a mask ``[b t]``, True for a sample's own tokens, none sees its padding.

        Padding has positions, too: on a line the next ones, in a tree roots.
        """
        x, at = self.enter(tokens, positions)
        again = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            call = partial(checkpoint, block, use_reentrant=False) if again else block
            x = call(x, at, causal=causal, mask=mask)
        return self.norm(x)
