"""A causal language model with streams, and a head for large vocabularies."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from isopos.models.blocks import ModelOptions, Schemes, Trunk
from isopos.positions import sequence
from isopos.state import State
from isopos.stream import Stream


class Decoder(Trunk):
    """A causal language model. Its layers share one scheme, evaluated once per forward pass, or have separate schemes.

    Args:
        vocabulary, model_dim, layers, scheme, options: Arguments of `Trunk`.
        cutoffs: Cutoffs of an adaptive softmax (`AdaptiveHead`); by default an ordinary softmax.
        tied: Whether the head shares its weight with the token embedding; it has no bias then, as in Fairseq.

    Raises:
        ValueError: For a tied head with cutoffs, because rare tokens have fewer features then, and for batch norm.

    Examples:
        >>> import torch
        >>> import isopos
        >>> model = Decoder(256, 32, 2, isopos.rope(8, 4))
        >>> tokens = torch.arange(10)[None]
        >>> model(tokens).shape
        torch.Size([1, 10, 256])
        >>> logits, stream = model.prefill(tokens[:, :9])
        >>> logits, stream = model.step(tokens[:, 9], stream)
        >>> torch.allclose(logits, model(tokens)[:, -1], atol=1e-5)
        True
        >>> steps = model.steps(stream)  # the same, and keeps the stream
        >>> steps(torch.tensor([10])).shape, steps.length
        (torch.Size([1, 256]), 11)
    """

    tokens: nn.Embedding
    causal = True
    in_shards = True

    def __init__(
        self,
        vocabulary: int,
        model_dim: int,
        layers: int,
        scheme: Schemes,
        *,
        cutoffs: Sequence[int] = (),
        tied: bool = False,
        **options: Unpack[ModelOptions],
    ):
        if tied and cutoffs:
            raise ValueError(f"tied: expected no cutoffs with a tied head, got {tuple(cutoffs)}; choose one of the two")
        if options.get("norm") == "batch":
            raise ValueError("norm: expected layer in a decoder, whose tokens must not see later ones, got batch")
        super().__init__(vocabulary, model_dim, layers, scheme, **options)
        if tied:
            self.head = nn.Linear(model_dim, vocabulary, bias=False)
            self.head.weight = self.tokens.weight
        else:
            self.head = AdaptiveHead(model_dim, vocabulary, cutoffs) if cutoffs else nn.Linear(model_dim, vocabulary)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b t vocabulary]`` of the tokens after ``[b t]``, at positions ``[t 1]`` or ``[b t 1]`` (0 to t - 1).

        Packed sequences need segment_ids ``[b t]`` or ``[t]``: a token sees its own sequence. `isopos.packed` gives both.

        With targets ``[b s]``, which follow the last s tokens, it returns their mean cross-entropy in nats instead. The
        logits of an adaptive softmax are log probabilities.
        """
        x = self.features(tokens, positions, causal=True, segment_ids=segment_ids)
        return self.head(x) if targets is None else self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of targets ``[b s]``, predicted from the last s of the features ``[b t m]``.

        -100 is no target, except with an adaptive softmax, which refuses it.
        """
        if targets.shape[0] != x.shape[0] or targets.shape[1] > x.shape[1]:
            raise ValueError(f"targets: expected [{x.shape[0]} s] of at most {x.shape[1]} tokens, got {list(targets.shape)}")
        x = x[:, x.shape[1] - targets.shape[1] :]
        if isinstance(self.head, AdaptiveHead):
            return self.head.loss(x, targets)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def prefill(self, tokens: Tensor, stream: "DecoderState | None" = None) -> tuple[Tensor, "DecoderState"]:
        """Logits ``[b t vocabulary]`` for the next tokens ``[b t]`` of a stream, by default a new one, and its state."""
        x, stream = self.advance(tokens, stream)
        return self.head(x), stream

    def advance(self, tokens: Tensor, stream: "DecoderState | None" = None) -> tuple[Tensor, "DecoderState"]:
        """Features ``[b t m]`` before the head for the next tokens of a stream, by default a new one, and its state."""
        stream = stream or self._new()
        positions = sequence(tokens.shape[-1], device=tokens.device) + stream.length
        x, at = self.enter(tokens, positions, stream.states)
        states = []
        for block, arguments in zip(self.blocks, at, strict=True):
            x, state = block(x, arguments, causal=True, return_state=True)
            states.append(state)
        return self.norm(x), DecoderState(stream.length + tokens.shape[-1], tuple(states))

    def step(self, token: Tensor, stream: "DecoderState") -> tuple[Tensor, "DecoderState"]:
        """Logits ``[b vocabulary]`` after one more token ``[b]`` of a stream, and its state.

        Several continuations may start from one stream; for a single continuation `steps` is faster.
        """
        logits, stream = self.prefill(token[:, None], stream)
        return logits[:, 0], stream

    def steps(self, stream: "DecoderState | None" = None) -> "Continuation":
        """A `Continuation` of a stream, by default a new one: it takes one token or a chunk per call."""
        return Continuation(self, stream or self._new())

    def _new(self) -> "DecoderState":
        return DecoderState(0, (State(),) * len(self.blocks))


class Continuation:
    """Decoding of a stream: it keeps the state of each layer.

    A call with one token ``[b]`` returns the logits ``[b vocabulary]`` after it. A call with a chunk of tokens ``[b t]``
    returns the logits ``[b t vocabulary]`` after each token. Parameters of the model must not change between calls.

    Attributes:
        layers: One `isopos.Stream` per layer.
    """

    def __init__(self, model: Decoder, stream: "DecoderState"):
        self.model, self.layers = model, list[Stream]()
        for scheme, state in zip(model.schemes, stream.states, strict=True):
            same = next((layer for layer in self.layers if layer.scheme is scheme), None)
            self.layers.append(Stream(scheme, state, length=stream.length, tables_from=same))

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return self.layers[0].length

    @property
    def stream(self) -> "DecoderState":
        """The stream so far, for `Decoder.step` and other continuations; later calls do not change it."""
        return DecoderState(self.length, tuple(layer.state for layer in self.layers))

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits after the next token ``[b]``, or after each of the next tokens ``[b t]``."""
        single = tokens.ndim == 1
        tokens = tokens[:, None] if single else tokens
        self.model.check_stream(tokens)
        x, embedding = self.model.tokens(tokens), self.model.scheme.embedding
        if embedding is not None:
            x = x + embedding(sequence(tokens.shape[-1], device=tokens.device) + self.length, x.dtype)
        for block, layer in zip(self.model.blocks, self.layers, strict=True):
            x = block(x, layer, causal=True)
        logits = self.model.head(self.model.norm(x))
        return logits[:, 0] if single else logits


class AdaptiveHead(nn.Module):
    """An adaptive softmax for tokens sorted by frequency: rare tokens belong to clusters with fewer features.

    The first `cutoffs[0]` tokens and one token per cluster use all features; tokens of cluster i use model_dim / 4^i.

    References:
        Grave et al., Efficient softmax approximation for GPUs, https://arxiv.org/abs/1609.04309

    Args:
        model_dim: Number of input features.
        vocabulary: Number of tokens, the most frequent first.
        cutoffs: First token of each cluster, increasing and below the vocabulary.

    Examples:
        >>> import torch
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
                f"cutoffs: expected at most {int(math.log(model_dim, 4))} for a width of {model_dim}, which each cutoff "
                f"divides by 4, got {len(cutoffs)}"
            )
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(model_dim, vocabulary, list(cutoffs))

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities ``[*b vocabulary]`` from ``[*b m]``."""
        return self.softmax.log_prob(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of targets ``[*b]``; computes only the clusters of the targets."""
        return self.softmax(x.reshape(-1, x.shape[-1]), targets.flatten()).loss


class DecoderState(NamedTuple):
    """State of a decoder after `length` tokens: one state per layer."""

    length: int
    states: tuple[State, ...]

    def reorder(self, index: Tensor) -> "DecoderState":
        """The streams of samples `index` ``[n]``, for beam search."""
        return DecoderState(self.length, tuple(state.reorder(index) for state in self.states))
