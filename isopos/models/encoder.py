"""Bidirectional models: logits of every token, or one answer for a whole sample."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isopos.models.blocks import Options, Trunk
from isopos.scheme import Scheme

__all__ = ["Classifier", "Encoder"]


class Encoder(Trunk):
    """A bidirectional language model, as RoBERTa's: every token sees all others, and each place has logits of its own token.

    Args:
        vocabulary, model_dim, layers, scheme, options: Of `Trunk`.
        tied: Whether the rows of the head are the vectors of tokens; its bias is its own, as RoBERTa's.

    Example:
        >>> import isopos
        >>> model = Encoder(256, 32, 2, isopos.rope(8, 4))
        >>> tokens = torch.arange(10)[None]
        >>> model(tokens).shape
        torch.Size([1, 10, 256])
        >>> model(tokens, places=torch.tensor([[3, 7]])).shape
        torch.Size([1, 2, 256])
    """

    def __init__(
        self,
        vocabulary: int,
        model_dim: int,
        layers: int,
        scheme: Scheme,
        *,
        tied: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(vocabulary, model_dim, layers, scheme, **options)
        self.head = nn.Linear(model_dim, vocabulary)
        if tied:
            self.head.weight = self.tokens.weight  # pyright: ignore[reportAttributeAccessIssue]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens ``[b t]``, at positions ``[t c]`` or ``[b t c]`` (0 to t - 1).

        The mask ``[b t]`` is True for a sample's own tokens. Padding has positions, too: on a line the next ones, in a tree
        roots. It changes nothing. With places ``[b n]``, from 0 to t - 1, logits ``[b n vocabulary]`` are of those only.
        """
        x = self.features(tokens, positions, mask=mask)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(x)


class Classifier(Trunk):
    """A bidirectional model whose tokens, averaged, choose a class.

    Args:
        vocabulary, model_dim, layers, scheme, options: Of `Trunk`.
        classes: Number of classes.

    Example:
        >>> import isopos
        >>> model = Classifier(20, 10, 32, 2, isopos.ape_tree(8, 4, branches=3))
        >>> nodes = isopos.tree("(MAX 2 9 (MIN 4 7))")
        >>> model(torch.arange(len(nodes))[None], nodes).shape
        torch.Size([1, 10])
    """

    def __init__(
        self, vocabulary: int, classes: int, model_dim: int, layers: int, scheme: Scheme, **options: Unpack[Options]
    ):
        super().__init__(vocabulary, model_dim, layers, scheme, **options)
        self.head = nn.Linear(model_dim, classes)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b classes]`` of samples ``[b t]``, of which the tokens of the mask take part; see `Encoder.forward`."""
        x = self.features(tokens, positions, mask=mask)
        if mask is None:
            return self.head(x.mean(1))
        return self.head(torch.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdim=True))
