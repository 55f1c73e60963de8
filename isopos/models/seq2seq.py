"""An encoder-decoder: sequences to sequences, trees to trees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from isopos.deprecation import renamed_argument
from isopos.models.blocks import NORMS, Block, BlockOptions, Context, ModelOptions, Schemes, Trunk, depth_rates, embedding
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme
from isopos.state import State

Follow = Callable[[Tensor], Tensor | None]
"""A function of n target tokens ``[b n]``: positions ``[n+1 c]`` or ``[b n+1 c]`` including the next one; None stops."""


class Memory(NamedTuple):
    """An encoded source: features ``[b s m]``, positions ``[s c]`` or ``[b s c]``, layers' arguments, mask ``[b s]``."""

    features: Tensor
    positions: Tensor
    at: tuple[Arguments, ...]
    mask: Tensor | None


class Seq2Seq(Trunk):
    """An encoder of sources and a causal decoder of targets with cross-attention.

    All attention of a layer uses one scheme, as in Algebraic Positional Encodings (section 4.2). Inputs of the decoder are a
    start token and all targets except the last. Each input has the position of the token that it predicts, so that
    cross-attention sees the relative positions of targets and sources, on lines and in trees.

    Args:
        sources: Size of the source vocabulary.
        targets: Size of the target vocabulary, including a start token.
        model_dim, scheme, options: Arguments of `Trunk`.
        layers: Number of blocks of the encoder, and of the decoder.
        tied: Whether source embedding, target embedding and head share one weight; the head has no bias then.

    Raises:
        ValueError: For tied embeddings of different vocabularies, for batch norm, and for linear attention with a decay,
            which is undefined between two sequences.

    References:
        Attention is all you need (Vaswani et al. 2017). https://arxiv.org/abs/1706.03762
        Algebraic Positional Encodings (Kogkalidis et al. 2024), Appendix B. https://arxiv.org/abs/2312.16045

    Examples:
        >>> import isopos
        >>> model = Seq2Seq(11, 12, 32, 2, isopos.ape_sequence(8, 4))
        >>> source, target = torch.arange(11)[None], torch.arange(5)[None]
        >>> model(source, target).shape
        torch.Size([1, 5, 12])
        >>> model.greedy(source, start=11, steps=6).shape
        torch.Size([1, 6])
    """

    tokens: nn.Embedding

    def __init__(
        self,
        sources: int,
        targets: int,
        model_dim: int,
        layers: int,
        scheme: Schemes,
        *,
        tied: bool = False,
        **options: Unpack[ModelOptions],
    ):
        if tied and sources != targets:
            raise ValueError(f"tied: expected one vocabulary, got {sources} source tokens and {targets} target tokens")
        if options.get("norm") == "batch":
            raise ValueError("norm: expected layer in a decoder, whose tokens must not see later ones, got batch")
        super().__init__(sources, model_dim, layers, scheme, **options)
        if any(part.attention == "linear" and part.decay is not None for part in self.schemes):
            raise ValueError(
                "decay: expected 'none' for linear cross-attention, whose queries and keys have no common order, got a "
                "decay; softmax attention supports it"
            )
        block: BlockOptions = {name: options[name] for name in BlockOptions.__annotations__ if name in options}  # pyright: ignore
        depths = zip(self.schemes, depth_rates(options.get("stochastic_depth", 0.0), layers), strict=True)
        self.targets = self.tokens if tied else embedding(targets, model_dim)
        self.decoder = nn.ModuleList(Block(model_dim, part, cross=True, stochastic_depth=d, **block) for part, d in depths)
        self.last_norm = NORMS["layer"](model_dim)
        self.head = nn.Linear(model_dim, targets, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        windows = options.get("window") is not None and any(part.attention == "linear" for part in self.schemes)
        self.streams = not self.scheme.outside and not windows  # whether decoding keeps states

    @renamed_argument("places", "target_positions")
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        source: Tensor,
        target: Tensor,
        positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b t targets]`` of the token after each input ``[b t]`` of the decoder.

        Args:
            source: Tokens ``[b s]``.
            target: A start token and all targets except the last ``[b t]``.
            positions: Positions of the source ``[s c]`` or ``[b s c]``; 0 to s - 1 by default.
            target_positions: Positions of the predicted tokens ``[t c]`` or ``[b t c]``; 0 to t - 1 by default.
            mask: ``[b s]``, False for padding of sources. Targets need no mask, because their attention is causal.
        """
        return self.decode(target, self.encode(source, positions, mask), target_positions)

    def encode(self, source: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Memory:
        """Encode sources ``[b s]`` for the decoder; see `forward`."""
        positions = sequence(source.shape[1], device=source.device) if positions is None else positions
        x, at = self.enter(source, positions)
        return Memory(self.run_blocks(x, at, mask=mask), positions, at, mask)

    @renamed_argument("places", "target_positions")
    def decode(self, target: Tensor, memory: Memory, target_positions: Tensor | None = None) -> Tensor:
        """Logits ``[b t targets]``; see `forward`."""
        target_positions = sequence(target.shape[1], device=target.device) if target_positions is None else target_positions
        x = self._embedded(target, target_positions)
        at = self.scheme_arguments(target_positions, x)
        context = self._context(memory, target_positions, target.shape[1], at)
        for block, arguments, source in zip(self.decoder, at, context, strict=True):
            x = self.checkpointed(block)(x, arguments, causal=True, context=source)
        return self.head(self.last_norm(x))

    @renamed_argument("places", "target_positions")
    def step(
        self, token: Tensor, memory: Memory, target_positions: Tensor, states: Sequence[State] = ()
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Logits ``[b targets]`` after one more token ``[b]``, and the next states of the decoder.

        Args:
            token: The start token at first, then the targets.
            memory: Result of `encode`.
            target_positions: Positions of all predicted tokens so far, as in `decode`.
            states: States of the decoder; none at first.
        """
        states = states or (State(),) * len(self.decoder)
        x, next_states = self._embedded(token[:, None], target_positions), []
        at = self.scheme_arguments(target_positions[..., -1:, :], x, states)
        context = self._context(memory, target_positions, 1, at)
        for block, arguments, source in zip(self.decoder, at, context, strict=True):
            x, state = block(x, arguments, causal=True, context=source, return_state=True)
            next_states.append(state)
        return self.head(self.last_norm(x))[:, 0], tuple(next_states)

    @torch.no_grad()
    def greedy(
        self,
        source: Tensor,
        start: int,
        steps: int,
        follow: Follow | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Greedy decoding: the most probable token at each step, ``[b n]`` for at most `steps` tokens.

        Positions are 0, 1, ..., or those returned by `follow`, until it returns None. Schemes without streams recompute all
        tokens at each step, with the same result.
        """
        memory = self.encode(source, positions, mask)
        target, states = source.new_full((len(source), 1), start), ()
        for n in range(1, steps + 1):
            target_positions = sequence(n, device=source.device) if follow is None else follow(target[:, 1:])
            if target_positions is None:
                break
            if self.streams:
                logits, states = self.step(target[:, -1], memory, target_positions, states)
            else:
                logits = self.decode(target, memory, target_positions)[:, -1]
            target = torch.cat((target, logits.argmax(-1, keepdim=True)), 1)
        return target[:, 1:]

    def _embedded(self, target: Tensor, target_positions: Tensor) -> Tensor:
        """Vectors ``[b t m]`` of the tokens at the last t positions, plus the scheme's embedding."""
        x = self.targets(target)
        if self.scheme.embedding is None:
            return x
        return x + self.scheme.embedding(target_positions, x.dtype)[..., -target.shape[1] :, :]

    def _context(self, memory: Memory, target_positions: Tensor, new: int, at: Sequence[Arguments]) -> tuple[Context, ...]:
        """Each layer's context for the last `new` positions; `at` has the schemes evaluated there."""
        rows = self.scheme.group.refers_to_rows  # nodes need the rows of their ancestors
        x = target_positions if rows else target_positions[..., -new:, :]
        dtype = torch.promote_types(memory.features.dtype, torch.float32)

        def context(n: int, scheme: Scheme) -> Context:
            x_query, x_key = self.positions_for(scheme, x), self.positions_for(scheme, memory.positions)
            arguments: Mapping[str, Any] = scheme.at(x_query, x_key, dtype=dtype, evaluated=(at[n], memory.at[n]))
            if rows and scheme.locality is not None:
                arguments = arguments | {"locality": arguments["locality"][..., -new:, :]}
            return Context(memory.features, arguments, memory.mask)

        return self.per_layer(context)
