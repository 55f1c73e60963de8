"""What stands behind the blocks: rare words in small clusters, and samples in one vector."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["AdaptiveHead", "mean"]


class AdaptiveHead(nn.Module):
    """An adaptive softmax: tokens are sorted by frequency, and rare ones share clusters of fewer features.

    The first `cutoffs[0]` tokens and one token a cluster have all the features, cluster i of the rest has model_dim / 4^i.

    References:
        Grave et al., Efficient softmax approximation for GPUs, https://arxiv.org/abs/1609.04309

    Args:
        model_dim: Features of what comes in.
        vocabulary: Number of tokens, the most frequent first.
        cutoffs: Where the clusters begin, increasing and below the vocabulary.

    Example:
        >>> head = AdaptiveHead(16, 1000, (50, 200))
        >>> x, targets = torch.randn(2, 5, 16), torch.randint(1000, (2, 5))
        >>> torch.allclose(head(x).exp().sum(-1), torch.ones(2, 5))
        True
        >>> torch.allclose(head.loss(x, targets), -head(x).gather(-1, targets[..., None]).mean())
        True
    """

    def __init__(self, model_dim: int, vocabulary: int, cutoffs: Sequence[int]):
        super().__init__()
        edges = [0, *cutoffs, vocabulary]
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"cutoffs: expected increasing numbers from 1 to {vocabulary - 1}, got {tuple(cutoffs)}")
        if model_dim < 4 ** len(cutoffs):
            raise ValueError(
                f"cutoffs: expected at most {int(math.log(model_dim, 4))} for a width of {model_dim}, which each divides by "
                f"4, got {len(cutoffs)}"
            )
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(model_dim, vocabulary, list(cutoffs))

    def forward(self, x: Tensor) -> Tensor:
        """Logarithms of probabilities ``[*b vocabulary]`` from ``[*b m]``."""
        return self.softmax.log_prob(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of targets ``[*b]``: no more of the vocabulary is computed than they need."""
        return self.softmax(x.flatten(0, -2), targets.flatten()).loss


def mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean ``[b m]`` of a sample's tokens ``[b t m]``, of those of the mask ``[b t]`` where there is one.

    Example:
        >>> mean(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[True, True, False]])).tolist()
        [[2.0]]
    """
    if mask is None:
        return x.mean(1)
    return torch.where(mask[..., None], x, 0).sum(1) / mask.sum(1, keepdim=True)
