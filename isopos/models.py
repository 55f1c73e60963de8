"""Small models that read top to bottom, for comparisons and as examples of use."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isopos.attention import Attention
from isopos.positions import sequence
from isopos.scheme import Scheme
from isopos.state import State

__all__ = ["TOKEN_STD", "AdaptiveHead", "Block", "Decoder", "Encoder", "Stream"]

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

    def forward(self, x: Tensor, at: dict[str, Any], *, causal: bool, return_state: bool = False) -> Any:
        """x ``[b t m]`` -> ``[b t m]``; with `return_state` a pair of it and the attention's state."""
        found = self.attention(self.norm1(x), at, causal=causal, return_state=return_state)
        y, *state = found if return_state else (found,)
        x = x + self.dropout(y)
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return (x, *state) if return_state else x


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


def _embeddings(vocabulary: int, model_dim: int, scheme: Scheme) -> nn.Embedding:
    """Vectors of tokens, of the width of the scheme's own embedding where it has one."""
    if scheme.embedding is not None and scheme.embedding.model_dim != model_dim:
        raise ValueError(f"model_dim: expected the {scheme.embedding.model_dim} of the scheme's embedding, got {model_dim}")
    tokens = nn.Embedding(vocabulary, model_dim)
    nn.init.normal_(tokens.weight, std=TOKEN_STD)
    return tokens


def _enter(x: Tensor, scheme: Scheme, positions: Tensor, state: State | None = None) -> tuple[Tensor, Any]:
    """Embedded tokens with what a scheme adds to them, and what it gives attention."""
    if scheme.embedding is not None:
        x = x + scheme.embedding(positions, x.dtype)
    return x, scheme.at(positions, state=state, dtype=torch.promote_types(x.dtype, torch.float32))


class Decoder(nn.Module):
    """A causal language model; its layers share one scheme, evaluated once a forward.

    Args:
        vocabulary: Number of tokens.
        model_dim: Width, heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: What sees positions.
        hidden_dim: Width inside the feed-forwards; 4 * model_dim by default.
        dropout: Probability.
        cutoffs: Of an adaptive softmax (`AdaptiveHead`); by default an ordinary one.
        recompute: Compute each block again in the backward pass instead of keeping what is inside.

    Example:
        >>> import isopos
        >>> model = Decoder(256, 32, 2, isopos.rope(8, 4))
        >>> tokens = torch.arange(10)[None]
        >>> model(tokens).shape
        torch.Size([1, 10, 256])
        >>> logits, stream = model.prefill(tokens[:, :9])
        >>> logits, stream = model.step(tokens[:, 9], stream)
        >>> torch.allclose(logits, model(tokens)[:, -1], atol=1e-5)
        True
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
        cutoffs: Sequence[int] = (),
        recompute: bool = False,
    ):
        super().__init__()
        self.tokens = _embeddings(vocabulary, model_dim, scheme)
        options: dict[str, Any] = {"hidden_dim": hidden_dim, "dropout": dropout}
        self.blocks = nn.ModuleList(Block(model_dim, scheme, **options) for _ in range(layers))
        self.recompute = recompute
        self.norm = nn.LayerNorm(model_dim)
        self.head = AdaptiveHead(model_dim, vocabulary, cutoffs) if cutoffs else nn.Linear(model_dim, vocabulary)
        self.scheme = scheme

    def forward(self, tokens: Tensor, positions: Tensor | None = None, *, targets: Tensor | None = None) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens after ``[b t]``, at positions ``[t 1]`` or ``[b t 1]`` (0 to t - 1).

        With targets ``[b s]``, which come after the last s tokens, it is their mean cross-entropy in nats instead. The
        logits of an adaptive softmax are logarithms of probabilities.
        """
        positions = sequence(tokens.shape[-1], device=tokens.device) if positions is None else positions
        x, at = _enter(self.tokens(tokens), self.scheme, positions)
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, at, causal=True, use_reentrant=False) if recompute else block(x, at, causal=True)
        x = self.norm(x)
        return self.head(x) if targets is None else self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of targets ``[b s]`` after the last s of the features ``[b t m]`` of `advance`."""
        x = x[:, x.shape[1] - targets.shape[1] :]
        if isinstance(self.head, AdaptiveHead):
            return self.head.loss(x, targets)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def prefill(self, tokens: Tensor, stream: "Stream | None" = None) -> tuple[Tensor, "Stream"]:
        """Logits ``[b t vocabulary]`` of a stream's next tokens ``[b t]``, by default a new one's, and the stream then."""
        x, stream = self.advance(tokens, stream)
        return self.head(x), stream

    def advance(self, tokens: Tensor, stream: "Stream | None" = None) -> tuple[Tensor, "Stream"]:
        """What the head is given, ``[b t m]``, of a stream's next tokens ``[b t]``, and the stream then."""
        stream = stream or Stream(0, (State(),) * len(self.blocks))
        positions = sequence(tokens.shape[-1], device=tokens.device) + stream.length
        x, at = _enter(self.tokens(tokens), self.scheme, positions, stream.states[0])
        states = []
        for block, state in zip(self.blocks, stream.states, strict=True):
            own = state.stamped(self.scheme.fingerprint, at["state"]["positions"])
            x, after = block(x, at | {"state": own}, causal=True, return_state=True)
            states.append(after)
        return self.norm(x), Stream(stream.length + tokens.shape[-1], tuple(states))

    def step(self, token: Tensor, stream: "Stream") -> tuple[Tensor, "Stream"]:
        """Logits ``[b vocabulary]`` after one more token ``[b]`` of a stream, and the stream after it."""
        logits, stream = self.prefill(token[:, None], stream)
        return logits[:, 0], stream


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
        self.tokens = _embeddings(vocabulary, model_dim, scheme)
        options: dict[str, Any] = {"hidden_dim": hidden_dim, "dropout": dropout}
        self.blocks = nn.ModuleList(Block(model_dim, scheme, **options) for _ in range(layers))
        self.norm, self.head, self.scheme = nn.LayerNorm(model_dim), nn.Linear(model_dim, vocabulary), scheme

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens ``[b t]``, at positions ``[t 1]`` or ``[b t 1]`` (0 to t - 1)."""
        positions = sequence(tokens.shape[-1], device=tokens.device) if positions is None else positions
        x, at = _enter(self.tokens(tokens), self.scheme, positions)
        for block in self.blocks:
            x = block(x, at, causal=False)
        return self.head(self.norm(x))


class Stream(NamedTuple):
    """The tokens that a decoder has seen: how many, and each layer's state."""

    length: int
    states: tuple[State, ...]

    def reorder(self, index: Tensor) -> "Stream":
        """The streams of samples `index` ``[n]``, for beam search."""
        return Stream(self.length, tuple(state.reorder(index) for state in self.states))
