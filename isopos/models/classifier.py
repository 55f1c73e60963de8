"""One answer for a whole sample."""

from torch import Tensor, nn

from isopos.models.blocks import enter, through, trunk
from isopos.models.heads import mean
from isopos.scheme import Scheme

__all__ = ["Classifier"]


class Classifier(nn.Module):
    """A bidirectional model whose tokens, averaged, choose a class.

    Args:
        vocabulary: Number of tokens.
        classes: Number of classes.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        hidden_dim: Width inside the feed-forwards; 4 * model_dim by default.
        dropout: Probability.
        recompute: Compute each block again in the backward pass instead of keeping what is inside.

    Example:
        >>> import torch
        >>> import isopos
        >>> model = Classifier(20, 10, 32, 2, isopos.ape_tree(8, 4, branches=3))
        >>> nodes = isopos.tree("(MAX 2 9 (MIN 4 7))")
        >>> model(torch.arange(len(nodes))[None], nodes).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
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
        self.head = nn.Linear(model_dim, classes)
        self.scheme, self.recompute = scheme, recompute

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b classes]`` of samples ``[b t]``, of which the tokens of the mask take part; see `Encoder.forward`."""
        x, at = enter(self.tokens(tokens), self.scheme, positions)
        x = through(self.blocks, x, at, causal=False, mask=mask, recompute=self.recompute)
        return self.head(mean(self.norm(x), mask))
