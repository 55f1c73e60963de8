"""Tokens that see each other on both sides: a language model that reads, and what classifiers share with it."""

from collections.abc import Iterable

from torch import Tensor, nn

from isopos.models.blocks import enter, trunk
from isopos.positions import sequence
from isopos.scheme import Scheme

__all__ = ["Encoder", "encode"]


def encode(x: Tensor, blocks: Iterable[nn.Module], scheme: Scheme, positions: Tensor | None, mask: Tensor | None) -> Tensor:
    """Embedded tokens ``[b t m]`` that have seen each other, ``[b t m]``; what padding holds and where it is changes none.

    Args:
        x: Tokens of samples, padded to the longest.
        blocks: Of the model.
        scheme: What sees positions.
        positions: ``[t c]`` or ``[b t c]``; 0 to t - 1 by default. Padding has some, too: those after the sample on a line,
            roots in a tree.
        mask: ``[b t]``, True for the sample's own tokens; all by default.
    """
    x, at = enter(x, scheme, sequence(x.shape[1], device=x.device) if positions is None else positions)
    for block in blocks:
        x = block(x, at, causal=False, mask=mask)
    return x


class Encoder(nn.Module):
    """A bidirectional language model, as RoBERTa's: every token sees all others, and each place has logits of its own token.

    Args:
        vocabulary: Number of tokens.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        hidden_dim: Width inside the feed-forwards; 4 * model_dim by default.
        dropout: Probability.

    Example:
        >>> import torch
        >>> import isopos
        >>> model = Encoder(256, 32, 2, isopos.rope(8, 4))
        >>> model(torch.arange(10)[None]).shape
        torch.Size([1, 10, 256])
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
    ):
        super().__init__()
        self.tokens, self.blocks, self.norm = trunk(vocabulary, model_dim, layers, scheme, hidden_dim, dropout)
        self.head, self.scheme = nn.Linear(model_dim, vocabulary), scheme

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens ``[b t]``; positions and mask as in `encode`."""
        return self.head(self.norm(encode(self.tokens(tokens), self.blocks, self.scheme, positions, mask)))
