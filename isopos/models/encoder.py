"""Bidirectional models: logits per token, or logits of classes for a sample or a pair of samples."""

from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from isopos.catalog import expect
from isopos.deprecation import renamed_argument
from isopos.models.blocks import ModelOptions, Schemes, Trunk
from isopos.parallel import shards

POOLINGS = ("mean", "first")


class Encoder(Trunk):
    """A bidirectional language model, as RoBERTa: every token attends to all tokens; logits predict each token.

    Args:
        vocabulary, model_dim, layers, scheme, options: Arguments of `Trunk`.
        tied: Whether the head shares its weight with the token embedding; it has a bias, as in RoBERTa.

    Examples:
        >>> import isopos
        >>> model = Encoder(256, 32, 2, isopos.rope(8, 4))
        >>> tokens = torch.arange(10)[None]
        >>> model(tokens).shape
        torch.Size([1, 10, 256])
        >>> model(tokens, indices=torch.tensor([[3, 7]])).shape
        torch.Size([1, 2, 256])
    """

    in_shards = True

    def __init__(
        self,
        vocabulary: int,
        model_dim: int,
        layers: int,
        scheme: Schemes,
        *,
        tied: bool = False,
        **options: Unpack[ModelOptions],
    ):
        super().__init__(vocabulary, model_dim, layers, scheme, **options)
        self.head = nn.Linear(model_dim, vocabulary)
        if tied:
            self.head.weight = self.tokens.weight  # pyright: ignore[reportAttributeAccessIssue]

    @renamed_argument("places", "indices")
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens ``[b t]`` at positions ``[t c]`` or ``[b t c]`` (0 to t - 1).

        The mask ``[b t]`` is False for padding, which has no effect. Padding needs positions, too: on a line the next ones,
        in a tree roots. With indices of tokens ``[b n]``, only the logits of these tokens ``[b n vocabulary]`` are computed.
        """
        x = self.features(tokens, positions, mask=mask)
        if indices is not None:
            x = x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(x)


class Classifier(Trunk):
    """A bidirectional classifier of samples, by the mean of their tokens or by their first token.

    Args:
        vocabulary, model_dim, layers, scheme, options: Arguments of `Trunk`.
        classes: Number of classes.
        pooling: Input of the head: the "mean" of a sample's tokens, or its "first" token.

    Examples:
        >>> import isopos
        >>> model = Classifier(20, 10, 32, 2, isopos.ape_tree(8, 4, branches=3))
        >>> nodes = isopos.tree("(MAX 2 9 (MIN 4 7))")
        >>> model(torch.arange(len(nodes))[None], nodes).shape
        torch.Size([1, 10])
    """

    in_shards = True

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        model_dim: int,
        layers: int,
        scheme: Schemes,
        *,
        pooling: Literal["mean", "first"] = "mean",
        **options: Unpack[ModelOptions],
    ):
        expect("pooling", pooling, POOLINGS)
        super().__init__(vocabulary, model_dim, layers, scheme, **options)
        self.head, self.pooling = self._new_head(model_dim, options.get("hidden_dim") or 4 * model_dim, classes), pooling

    def _new_head(self, model_dim: int, hidden: int, classes: int) -> nn.Module:
        return nn.Linear(model_dim, classes)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b classes]`` of samples ``[b t]``; the mask is False for padding, see `Encoder.forward`."""
        return self.head(_pooled(self.features(tokens, positions, mask=mask), mask, self.pooling, self.group))


class PairClassifier(Classifier):
    """A classifier of pairs: one encoder pools each of two samples, and a perceptron compares them.

    Its input is [u, v, u * v, u - v]; it has two hidden layers, as in the Long Range Arena's retrieval (Tay et al. 2020,
    https://arxiv.org/abs/2011.04006; classifier_head_dual in its code).

    Args:
        vocabulary, classes, model_dim, layers, scheme, pooling, options: Arguments of `Classifier`.

    Examples:
        >>> import isopos
        >>> model = PairClassifier(256, 2, 32, 2, isopos.rope(8, 4))
        >>> model(torch.randint(256, (3, 2, 10))).shape
        torch.Size([3, 2])
    """

    def _new_head(self, model_dim: int, hidden: int, classes: int) -> nn.Module:
        perceptron = nn.Linear(4 * model_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU()
        return nn.Sequential(*perceptron, nn.Linear(hidden // 2, classes))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits ``[b classes]`` of pairs ``[b 2 t]``; the mask ``[b 2 t]`` is False for padding.

        Positions are ``[t c]`` or ``[b 2 t c]``; see `Encoder.forward`.
        """
        if positions is not None and positions.ndim > 2:
            positions = positions.flatten(0, 1)
        mask = None if mask is None else mask.flatten(0, 1)
        pooled = _pooled(self.features(tokens.flatten(0, 1), positions, mask=mask), mask, self.pooling, self.group)
        u, v = pooled.unflatten(0, (-1, 2)).unbind(1)
        return self.head(torch.cat((u, v, u * v, u - v), -1))


def _pooled(x: Tensor, mask: Tensor | None, pooling: str, group: Any = None) -> Tensor:
    """One vector ``[b m]`` per sample from features ``[b t m]``, which may be those of one shard: the mean, or the first.

    The first token is the first one that the mask keeps, or that of the first shard.
    """
    known = shards(group, x.shape[1], x.device)
    if pooling == "first":
        if known is None:
            return x[:, 0] if mask is None else x[torch.arange(len(x), device=x.device), mask.int().argmax(1)]
        is_first = torch.tensor(known.rank == 0, device=x.device)  # a condition, so that all processes have a graph
        return known.add(torch.where(is_first, x[:, 0], 0)).wait()[0]
    if known is None and mask is None and x.shape[1]:
        return x.mean(1)
    wide = torch.promote_types(x.dtype, torch.float32)  # a sum of float16 would overflow
    total, count = x.sum(1, dtype=wide), x.new_full((1,), x.shape[1], dtype=wide)
    if mask is not None:
        total = torch.where(mask[..., None], x, 0).sum(1, dtype=wide)
        count = mask.sum(1, keepdim=True).to(wide)
    if known is not None:
        total, count = known.add(total, count).wait()
    return (total / count.clamp_min(1)).to(x.dtype)  # zeros of a sample without tokens
