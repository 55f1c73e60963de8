"""One answer for a whole sample."""

from typing import Unpack

from torch import Tensor, nn

from isopos.models.blocks import Options, Trunk
from isopos.models.heads import mean
from isopos.scheme import Scheme

__all__ = ["Classifier"]


class Classifier(Trunk):
    """A bidirectional model whose tokens, averaged, choose a class.

    Args:
        vocabulary: Number of tokens.
        classes: Number of classes.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        options: As of `Trunk`.

    Example:
        >>> import torch
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
        return self.head(mean(self.features(tokens, positions, mask=mask), mask))
