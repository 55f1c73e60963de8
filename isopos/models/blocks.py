"""What every model here is made of: embedded tokens, blocks of attention and feed-forward, a scheme for all or one each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isopos.catalog import expect
from isopos.models.layers import PerLayer
from isopos.nn import Attention
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme
from isopos.state import State

__all__ = ["TOKEN_STD", "Block", "BlockOptions", "Context", "Options", "Schemes", "Trunk", "embedding", "rising"]

Schemes = Scheme | PerLayer | Sequence[Scheme]
"""What a model takes: a scheme for all of its layers, or one for each."""
Made = TypeVar("Made")

TOKEN_STD = 0.1  # of initial token embeddings


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of features ``[b t m]``, over all tokens of a batch that the mask ``[b t]`` has."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if mask is None:
            return super().forward(x.flatten(0, 1)).view_as(x)
        own = super().forward(x[mask])
        return own.new_zeros(x.shape).masked_scatter(mask[..., None], own)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of features ``[b t m]``, each token by itself."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}
NORMS = {"layer": LayerNorm, "batch": BatchNorm}


class BlockOptions(TypedDict, total=False):
    """Of every block of a model.

    Keys:
        hidden_dim: Width inside the feed-forwards; 4 * model_dim by default.
        activation: Of the feed-forwards, by default "relu".
        norm: What comes ahead of each branch and of the head: "layer", or "batch", over all tokens of a batch.
        dropout: Probability, of the features of both branches.
        kv_heads, attention_dropout, window: `kv_heads`, `dropout` and `window` of `Attention`; of linear attention, which
            has no windows in streams, a model with one has neither `prefill` nor `step`.
    """

    hidden_dim: int | None
    activation: Literal["relu", "gelu"]
    norm: Literal["layer", "batch"]
    dropout: float
    kv_heads: int | None
    attention_dropout: float
    window: int | None


class Options(BlockOptions, total=False):
    """Of every model: those of its blocks, and two of the model's own; see `Trunk`."""

    stochastic_depth: float
    recompute: bool


class Context(NamedTuple):
    """What the tokens of a cross-attention see besides each other.

    Args:
        features: ``[b s m]``.
        at: What the scheme's `at` returned at the positions of both.
        mask: ``[b s]``, True where a token takes part.
    """

    features: Tensor
    at: Mapping[str, Any]
    mask: Tensor | None = None


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input; and attention to a context between the two.

    Args:
        model_dim: Width.
        scheme: Of the attention.
        cross: Whether there is attention to a context.
        stochastic_depth: Probability with which a sample is spared a branch in training (Huang et al. 2016,
            https://arxiv.org/abs/1603.09382).
        options: `BlockOptions`.
    """

    def __init__(
        self,
        model_dim: int,
        scheme: Scheme,
        *,
        cross: bool = False,
        hidden_dim: int | None = None,
        activation: Literal["relu", "gelu"] = "relu",
        norm: Literal["layer", "batch"] = "layer",
        dropout: float = 0.0,
        kv_heads: int | None = None,
        attention_dropout: float = 0.0,
        window: int | None = None,
        stochastic_depth: float = 0.0,
    ):
        super().__init__()
        for name, value, known in (("activation", activation, ACTIVATIONS), ("norm", norm, NORMS)):
            expect(name, value, known)
        if not 0 <= stochastic_depth < 1:
            raise ValueError(f"stochastic_depth: expected a probability below 1, got {stochastic_depth}")
        hidden = hidden_dim or 4 * model_dim
        self.norm1, self.norm2 = NORMS[norm](model_dim), NORMS[norm](model_dim)
        self.attention = Attention(model_dim, scheme, kv_heads=kv_heads, dropout=attention_dropout, window=window)
        widen, narrow = nn.Linear(model_dim, hidden), nn.Linear(hidden, model_dim)
        self.feed_forward = nn.Sequential(widen, ACTIVATIONS[activation](), narrow)
        if cross:
            self.norm3 = NORMS[norm](model_dim)
            self.cross = Attention(model_dim, scheme, kv_heads=kv_heads, dropout=attention_dropout)
        self.dropout, self.stochastic_depth = nn.Dropout(dropout), stochastic_depth

    def forward(
        self,
        x: Tensor,
        at: Any,
        *,
        causal: bool,
        mask: Tensor | None = None,
        context: Context | None = None,
        return_state: bool = False,
    ) -> Any:
        """x ``[b t m]``, of which those of the mask ``[b t]`` are seen -> ``[b t m]``, or a pair of it and the state."""
        found = self.attention(self.norm1(x, mask), at, causal=causal, mask=mask, return_state=return_state)
        y, *state = found if return_state else (found,)
        x = x + self.branch(y)
        if context is not None:
            own = self.norm3(x, mask)
            x = x + self.branch(self.cross(own, context.at, context=context.features, mask=context.mask))
        x = x + self.branch(self.feed_forward(self.norm2(x, mask)))
        return (x, *state) if return_state else x

    def branch(self, y: Tensor) -> Tensor:
        """What is added of a branch's output ``[b t m]``: all, but for dropout and stochastic depth in training."""
        y = self.dropout(y)
        if self.training and self.stochastic_depth:
            keep = 1 - self.stochastic_depth
            y = y * torch.empty(len(y), 1, 1, dtype=y.dtype, device=y.device).bernoulli_(keep) / keep
        return y


class Trunk(nn.Module, ABC):
    """Vectors of tokens, blocks, and the norm after them. Subclasses add a head.

    Args:
        tokens: What makes vectors ``[b t m]`` of inputs: their number as words, of an `nn.Embedding`, or a module.
        model_dim: Width, heads * head_dim of the scheme, or of queries where `kv_heads` are fewer.
        layers: Number of blocks.
        scheme: What sees positions: of all layers, or a list of one a layer.
        stochastic_depth: Of the last block; it rises from 0 in the first in equal steps.
        recompute: Compute each block again in the backward pass instead of keeping what is inside.
        options: `BlockOptions`.

    Raises:
        ValueError: Where the scheme adds an embedding of another width, or needs causal attention where there is none, and
            for a list that `PerLayer` refuses.
    """

    causal = False  # whether no token sees later ones

    def __init__(
        self,
        tokens: int | nn.Module,
        model_dim: int,
        layers: int,
        scheme: Schemes,
        *,
        stochastic_depth: float = 0.0,
        recompute: bool = False,
        **options: Unpack[BlockOptions],
    ):
        super().__init__()
        scheme = scheme if isinstance(scheme, Scheme | PerLayer) else PerLayer(scheme)
        if isinstance(scheme, PerLayer) and len(scheme.order) != layers:
            raise ValueError(f"scheme: expected one for each of {layers} layers, got {len(scheme.order)}")
        if scheme.phases and not self.causal:
            raise ValueError(
                "scheme: expected positions, since tokens here see later ones, got steps that keys take (decay='forget', "
                "selective), which need causal attention, that of a Decoder"
            )
        added = scheme.embedding
        if added is not None and added.model_dim != model_dim:
            raise ValueError(f"model_dim: expected the {added.model_dim} of the scheme's embedding, got {model_dim}")
        self.tokens = tokens if isinstance(tokens, nn.Module) else embedding(tokens, model_dim)
        own = scheme.each if isinstance(scheme, PerLayer) else (scheme,) * layers
        depths = zip(own, rising(stochastic_depth, layers), strict=True)
        blocks = (Block(model_dim, each, stochastic_depth=depth, **options) for each, depth in depths)
        self.blocks, self.norm = nn.ModuleList(blocks), NORMS[options.get("norm", "layer")](model_dim)
        self.register_module("head", None)  # parameters of heads come before those of schemes, as in saved optimisers
        self.scheme, self.recompute = scheme, recompute

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the head makes of tokens ``[b t]`` at positions ``[t c]`` or ``[b t c]``, by default 0 to t - 1."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """That of each layer."""
        return self.scheme.each if isinstance(self.scheme, PerLayer) else (self.scheme,) * len(self.blocks)

    def of_layers(self, make: Callable[[int, Scheme], Made]) -> tuple[Made, ...]:
        """What is made of the scheme of each layer and its number: once of each scheme, of its first layer."""
        if not isinstance(self.scheme, PerLayer):
            return (make(0, self.scheme),) * len(self.blocks)
        order, schemes = self.scheme.order, self.scheme.each
        layers = [order.index(n) for n in range(len(self.scheme.parts))]  # the first of each scheme
        found = [make(layer, schemes[layer]) for layer in layers]
        return tuple(found[n] for n in order)

    def enter(
        self, tokens: Tensor, positions: Tensor | None, states: Sequence[State] | None = None
    ) -> tuple[Tensor, tuple[Arguments, ...]]:
        """Vectors ``[b t m]`` of tokens with what the scheme adds to them, and what it gives attention in each layer."""
        positions = sequence(tokens.shape[1], device=tokens.device) if positions is None else positions
        if isinstance(positions, Tensor) and positions.device != tokens.device:
            raise ValueError(f"positions: expected a tensor on {tokens.device} as tokens, got one on {positions.device}")
        x = self.tokens(tokens)
        if self.scheme.embedding is not None:
            x = x + self.scheme.embedding(positions, x.dtype)
        return x, self.evaluate(positions, x, states)

    def evaluate(self, positions: Tensor, x: Tensor, states: Sequence[State] | None = None) -> tuple[Arguments, ...]:
        """What schemes give attention in each layer at positions of vectors like x; of streams that go on from states."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if states is None:
            return self.of_layers(lambda n, scheme: scheme.at(self.seen(scheme, positions), dtype=dtype))
        found = self.of_layers(lambda n, scheme: scheme.at(self.seen(scheme, positions), state=states[n], dtype=dtype))
        return tuple(at.of(state) for at, state in zip(found, states, strict=True))

    def seen(self, scheme: Scheme, positions: Tensor) -> Tensor:
        """What a scheme is given of positions ``[*b t c]``: one of several that sees none takes those of the others."""
        mixed = isinstance(self.scheme, PerLayer) and scheme.position_free
        return positions[..., : scheme.group.columns] if mixed else positions

    def features(
        self, tokens: Tensor, positions: Tensor | None, *, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """What the head is given, ``[b t m]``; with a mask ``[b t]``, True for a sample's own tokens, none sees its padding.

        Padding has positions, too: on a line the next ones, in a tree roots.
        """
        x, at = self.enter(tokens, positions)
        return self.through(x, at, causal=causal, mask=mask)

    def through(self, x: Tensor, at: Sequence[Arguments], *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """What blocks and norm make of what `enter` returned."""
        again = self.recompute and torch.is_grad_enabled()
        for block, own in zip(self.blocks, at, strict=True):
            call = partial(checkpoint, block, use_reentrant=False) if again else block
            x = call(x, own, causal=causal, mask=mask)
        return self.norm(x, mask)


def rising(stochastic_depth: float, layers: int) -> list[float]:
    """That of each block: from 0 in the first in equal steps to that of the last."""
    return [stochastic_depth * n / max(1, layers - 1) for n in range(layers)]


def embedding(vocabulary: int, model_dim: int) -> nn.Embedding:
    """Vectors of so many tokens, drawn with `TOKEN_STD`."""
    made = nn.Embedding(vocabulary, model_dim)
    nn.init.normal_(made.weight, std=TOKEN_STD)
    return made
