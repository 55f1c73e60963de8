"""Parts of all models: token vectors, and blocks of attention and feed-forward, with shared or separate schemes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isopos.catalog import expect, probability
from isopos.models.layers import PerLayer
from isopos.nn import Attention
from isopos.parallel import shards
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme
from isopos.state import State

Schemes = Scheme | PerLayer | Sequence[Scheme]
"""A scheme for all layers of a model, or one per layer."""
Result = TypeVar("Result")

TOKEN_STD = 0.1  # standard deviation of initial token embeddings


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of features ``[b t m]`` over all tokens of a batch where the mask ``[b t]`` is True."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if mask is None:
            return super().forward(x.flatten(0, 1)).view_as(x)
        y = super().forward(x[mask])
        return y.new_zeros(x.shape).masked_scatter(mask[..., None], y)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of features ``[b t m]`` per token; the mask is ignored."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)


ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}
NORMS = {"layer": LayerNorm, "batch": BatchNorm}


class BlockOptions(TypedDict, total=False):
    """Options of the blocks of a model.

    Keys:
        hidden_dim: Width inside the feed-forward; 4 * model_dim by default.
        activation: Activation of the feed-forward, by default "relu".
        norm: Norm before each branch and the head: "layer", or "batch", over all tokens of a batch.
        dropout: Probability, on the output of both branches.
        kv_heads, attention_dropout, window: `kv_heads`, `dropout` and `window` of `Attention`. With a window in linear
            attention a model has neither `prefill` nor `step`.
    """

    hidden_dim: int | None
    activation: Literal["relu", "gelu"]
    norm: Literal["layer", "batch"]
    dropout: float
    kv_heads: int | None
    attention_dropout: float
    window: int | None


class ModelOptions(BlockOptions, total=False):
    """Options of a model: the options of its blocks, and two more; see `Trunk`."""

    stochastic_depth: float
    recompute: bool


class Context(NamedTuple):
    """Tokens of another sequence, for cross-attention."""

    features: Tensor  # ``[b s m]``
    at: Mapping[str, Any]  # result of the scheme's `at` at the positions of both sequences
    mask: Tensor | None = None  # ``[b s]``, True for tokens to attend to


class Block(nn.Module):
    """Pre-norm attention, optional cross-attention, and feed-forward, each added to its input.

    Args:
        model_dim: Width.
        scheme: Scheme of the attention.
        cross: Whether there is cross-attention.
        stochastic_depth: Probability with which a sample skips a branch in training (Huang et al. 2016,
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
        expect("activation", activation, ACTIVATIONS)
        expect("norm", norm, NORMS)
        hidden = hidden_dim or 4 * model_dim
        self.norm1, self.norm2 = NORMS[norm](model_dim), NORMS[norm](model_dim)
        self.attention = Attention(model_dim, scheme, kv_heads=kv_heads, dropout=attention_dropout, window=window)
        first, second = nn.Linear(model_dim, hidden), nn.Linear(hidden, model_dim)
        self.feed_forward = nn.Sequential(first, ACTIVATIONS[activation](), second)
        if cross:
            self.norm3 = NORMS[norm](model_dim)
            self.cross = Attention(model_dim, scheme, kv_heads=kv_heads, dropout=attention_dropout)
        self.dropout = nn.Dropout(dropout)
        self.stochastic_depth = probability("stochastic_depth", stochastic_depth)

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
        """Features ``[b t m]`` from x ``[b t m]``, or a pair with the state; the mask ``[b t]`` is False for padding."""
        attended = self.attention(self.norm1(x, mask), at, causal=causal, mask=mask, return_state=return_state)
        y, *state = attended if return_state else (attended,)
        x = x + self.residual(y)
        if context is not None:
            y = self.cross(self.norm3(x, mask), context.at, context=context.features, mask=context.mask)
            x = x + self.residual(y)
        x = x + self.residual(self.feed_forward(self.norm2(x, mask)))
        return (x, *state) if return_state else x

    def residual(self, y: Tensor) -> Tensor:
        """The branch output ``[b t m]`` after dropout and, in training, stochastic depth."""
        y = self.dropout(y)
        if self.training and self.stochastic_depth:
            keep = 1 - self.stochastic_depth
            y = y * torch.empty(len(y), 1, 1, dtype=y.dtype, device=y.device).bernoulli_(keep) / keep
        return y


class Trunk(nn.Module, ABC):
    """Token vectors, blocks, and a final norm. Subclasses add a head.

    Args:
        tokens: Maps inputs to vectors ``[b t m]``: a module, or the vocabulary size of an `nn.Embedding`.
        model_dim: Width: number of query heads * head_dim of the scheme.
        layers: Number of blocks.
        scheme: Positional scheme of all layers, or a list with one per layer.
        stochastic_depth: Stochastic depth of the last block; it increases linearly from 0 in the first.
        recompute: Gradient checkpointing: recompute each block in the backward pass.
        options: `BlockOptions`.

    Raises:
        ValueError: If the scheme adds an embedding of another width, or has content-dependent phases in a bidirectional
            model, or `PerLayer` refuses the list.
    """

    causal = False  # whether tokens attend to themselves and earlier tokens only
    in_shards = False  # whether the tokens of a sample may be in several processes
    group: Any = None  # whose processes hold one sequence; see `over`

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
                "scheme: expected positions in a bidirectional model, got content-dependent phases (decay='forget', "
                "selective), which need causal attention, as in a Decoder"
            )
        if scheme.embedding is not None and scheme.embedding.model_dim != model_dim:
            expected = scheme.embedding.model_dim
            raise ValueError(f"model_dim: expected the {expected} of the scheme's embedding, got {model_dim}")
        self.tokens = tokens if isinstance(tokens, nn.Module) else embedding(tokens, model_dim)
        each = scheme.each if isinstance(scheme, PerLayer) else (scheme,) * layers
        depths = zip(each, depth_rates(stochastic_depth, layers), strict=True)
        blocks = (Block(model_dim, part, stochastic_depth=depth, **options) for part, depth in depths)
        self.blocks, self.norm = nn.ModuleList(blocks), NORMS[options.get("norm", "layer")](model_dim)
        self.register_module("head", None)  # so that a head's parameters precede the scheme's, as in saved optimisers
        self.scheme, self.recompute = scheme, recompute

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Output of the head for tokens ``[b t]`` at positions ``[t c]`` or ``[b t c]``, by default 0 to t - 1."""

    @contextmanager
    def over(self, group: Any) -> Iterator[None]:
        """Inside ``with``, the tokens of a forward pass are one shard of a sequence over the processes of a group.

        Shards are those of `isopos.parallel.cut`: contiguous and in the order of ranks, or zig-zag. The features of every
        token equal those of the whole sequence. Gradients, averaged over the processes, are those of the mean of their
        losses. A classifier has the same output in all processes.

        Args:
            group: A `ProcessGroup`, a `DeviceMesh` of one dimension, or an `isopos.parallel.Ring`; None for one process.

        Raises:
            ValueError: For a model that mixes tokens or draws numbers for whole samples outside attention.
        """
        if group is not None:
            self._check_over()
        self.group, before = group, self.group
        try:
            yield
        finally:
            self.group = before

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The scheme of each layer."""
        return self.scheme.each if isinstance(self.scheme, PerLayer) else (self.scheme,) * len(self.blocks)

    def per_layer(self, make: Callable[[int, Scheme], Result]) -> tuple[Result, ...]:
        """Call `make` with layer number and scheme at the first layer of each scheme; return one result per layer."""
        if not isinstance(self.scheme, PerLayer):
            return (make(0, self.scheme),) * len(self.blocks)
        order, schemes = self.scheme.order, self.scheme.each
        first_layers = [order.index(n) for n in range(len(self.scheme.parts))]
        results = [make(layer, schemes[layer]) for layer in first_layers]
        return tuple(results[n] for n in order)

    def enter(
        self, tokens: Tensor, positions: Tensor | None, states: Sequence[State] | None = None
    ) -> tuple[Tensor, tuple[Arguments, ...]]:
        """Vectors ``[b t m]`` of tokens plus the scheme's embedding, and each layer's arguments of attention."""
        if states is not None:
            self.check_stream(tokens)
        known = None if states is not None else shards(self.group, tokens.shape[1], tokens.device)
        if positions is None:
            positions = sequence(tokens.shape[1], device=tokens.device) if known is None else known.index[:, None]
        if isinstance(positions, Tensor) and positions.device != tokens.device:
            raise ValueError(f"positions: expected a tensor on {tokens.device} as tokens, got one on {positions.device}")
        x = self.tokens(tokens)
        if self.scheme.embedding is not None:
            x = x + self.scheme.embedding(positions, x.dtype)
        return x, self.scheme_arguments(positions, x, states, known)

    def scheme_arguments(
        self, positions: Tensor, x: Tensor, states: Sequence[State] | None = None, group: Any = None
    ) -> tuple[Arguments, ...]:
        """Each layer's arguments of attention at positions, for features like x; with states, to continue streams."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if states is None:
            positions_of = self.positions_for
            return self.per_layer(lambda n, scheme: scheme.at(positions_of(scheme, positions), group=group, dtype=dtype))
        at = self.per_layer(lambda n, scheme: scheme.at(self.positions_for(scheme, positions), state=states[n], dtype=dtype))
        return tuple(arguments.of(state) for arguments, state in zip(at, states, strict=True))

    def positions_for(self, scheme: Scheme, positions: Tensor) -> Tensor:
        """Positions ``[*b t c]`` for a scheme; a position-free scheme among other schemes takes the first columns."""
        mixed = isinstance(self.scheme, PerLayer) and scheme.position_free
        return positions[..., : scheme.group.columns] if mixed else positions

    def features(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Features ``[b t m]`` before the head. The mask ``[b t]`` is False for padding, which no token attends to.

        Padding needs positions, too: on a line the next ones, in a tree roots. Tokens attend to those with the same number
        in segment_ids ``[b t]`` or ``[t]``, as of packed sequences.
        """
        x, at = self.enter(tokens, positions)
        if segment_ids is not None:
            at = tuple({**arguments, "segment_ids": segment_ids} for arguments in at)
        return self.run_blocks(x, at, causal=causal, mask=mask)

    def run_blocks(
        self, x: Tensor, at: Sequence[Mapping[str, Any]], *, causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Apply blocks and norm to the result of `enter`."""
        for block, arguments in zip(self.blocks, at, strict=True):
            x = self.checkpointed(block)(x, arguments, causal=causal, mask=mask)
        return self.norm(x, mask)

    def checkpointed(self, block: nn.Module) -> Callable[..., Any]:
        """The block as a function; with `recompute`, it is computed again in the backward pass."""
        if not self.recompute or not torch.is_grad_enabled():
            return block
        norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
        contexts: Any = {"context_fn": lambda: (nullcontext(), _same_statistics(norms))} if norms else {}
        return partial(checkpoint, block, use_reentrant=False, **contexts)

    def check_stream(self, tokens: Tensor) -> None:
        """ValueError for tokens of a stream while samples are in several processes."""
        if shards(self.group, tokens.shape[1], tokens.device) is not None:
            raise ValueError(
                "group: expected none in a stream, whose state one process holds, got one; leave model.over(group)"
            )

    def _check_over(self) -> None:
        """ValueError for a model whose tokens cannot be in several processes."""
        what, embedding = "", self.scheme.embedding
        if not self.in_shards:
            what = (
                "a Decoder, Encoder, Classifier, PairClassifier or Forecaster, whose samples are cut into shards of tokens, "
            )
            what += f"got {type(self).__name__}"
        elif any(isinstance(module, BatchNorm) for module in self.modules()):
            what = "norm='layer', which normalises tokens one by one, got 'batch'"
        elif self.training and any(block.stochastic_depth for block in self.blocks):
            what = "no stochastic depth, which processes would draw differently for a sample, got some"
        elif embedding is not None and embedding.group.refers_to_rows:
            what = f"an embedding that needs the positions of this shard only, got {type(embedding).__name__}"
        if what:
            raise ValueError(f"group: expected {what}")


@contextmanager
def _same_statistics(norms: Sequence[BatchNorm]) -> Iterator[None]:
    """Keep running statistics as they are, in a forward pass that is computed again."""
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            if norm.training and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.sub_(1)


def depth_rates(stochastic_depth: float, layers: int) -> list[float]:
    """Stochastic depth of each block, increasing linearly from 0 to `stochastic_depth`, which one block has."""
    return [stochastic_depth * (n / (layers - 1) if layers > 1 else 1) for n in range(layers)]


def embedding(vocabulary: int, model_dim: int) -> nn.Embedding:
    """An embedding of tokens, initialised with standard deviation `TOKEN_STD`."""
    vectors = nn.Embedding(vocabulary, model_dim)
    nn.init.normal_(vectors.weight, std=TOKEN_STD)
    return vectors
