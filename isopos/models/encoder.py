"""A bidirectional language model."""

from torch import Tensor, nn

from isopos.models.blocks import enter, through, trunk
from isopos.scheme import Scheme

__all__ = ["Encoder"]


class Encoder(nn.Module):
    """A bidirectional language model, as RoBERTa's: every token sees all others, and each place has logits of its own token.

    Args:
        vocabulary: Number of tokens.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        hidden_dim: Width inside the feed-forwards; 4 * model_dim by default.
        dropout: Probability.
        recompute: Compute each block again in the backward pass instead of keeping what is inside.

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
        recompute: bool = False,
    ):
        super().__init__()
        self.tokens, self.blocks, self.norm = trunk(vocabulary, model_dim, layers, scheme, hidden_dim, dropout)
        self.head = nn.Linear(model_dim, vocabulary)
        self.scheme, self.recompute = scheme, recompute

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens ``[b t]``, at positions ``[t c]`` or ``[b t c]`` (0 to t - 1).

        The mask ``[b t]`` is True for a sample's own tokens. Padding has positions, too: on a line the next ones, in a tree
        roots. It changes nothing.
        """
        x, at = enter(self.tokens(tokens), self.scheme, positions)
        x = through(self.blocks, x, at, causal=False, mask=mask, recompute=self.recompute)
        return self.head(self.norm(x))
