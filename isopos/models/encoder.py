"""A bidirectional language model."""

from typing import Unpack

from torch import Tensor, nn

from isopos.models.blocks import Options, Trunk
from isopos.scheme import Scheme

__all__ = ["Encoder"]


class Encoder(Trunk):
    """A bidirectional language model, as RoBERTa's: every token sees all others, and each place has logits of its own token.

    Args:
        vocabulary: Number of tokens.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        options: As of `Trunk`.

    Example:
        >>> import torch
        >>> import isopos
        >>> model = Encoder(256, 32, 2, isopos.rope(8, 4))
        >>> model(torch.arange(10)[None]).shape
        torch.Size([1, 10, 256])
    """

    def __init__(self, vocabulary: int, model_dim: int, layers: int, scheme: Scheme, **options: Unpack[Options]):
        super().__init__(vocabulary, model_dim, layers, scheme, **options)
        self.head = nn.Linear(model_dim, vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens ``[b t]``, at positions ``[t c]`` or ``[b t c]`` (0 to t - 1).

        The mask ``[b t]`` is True for a sample's own tokens. Padding has positions, too: on a line the next ones, in a tree
        roots. It changes nothing.
        """
        return self.head(self.features(tokens, positions, mask=mask))
