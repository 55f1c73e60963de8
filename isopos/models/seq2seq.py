"""An encoder-decoder: sequences to sequences, trees to trees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from isopos.models.blocks import NORMS, Block, BlockOptions, Context, Options, Schemes, Trunk, depth_rates, embedding
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme
from isopos.state import State

__all__ = ["Follow", "Memory", "Seq2Seq"]

Follow = Callable[[Tensor], Tensor | None]
"""Maps n target tokens ``[b n]`` to positions ``[n+1 c]`` or ``[b n+1 c]`` of them and the next one; None to stop."""


class Memory(NamedTuple):
    """An encoded source: features ``[b s m]``, positions ``[s c]`` or ``[b s c]``, layers' arguments, mask ``[b s]``."""

    features: Tensor
    positions: Tensor
    at: tuple[Arguments, ...]
    mask: Tensor | None


class Seq2Seq(Trunk):
    """An encoder of sources and a causal decoder of targets with cross-attention.

    One scheme serves the three attentions of a layer, as in Algebraic Positional Encodings (section 4.2). The inputs of the
    decoder are a start token and the targets but the last. The slot of each input has the position of the token that it
    predicts, so that cross-attention sees the true relative positions of target and source, on lines and in trees.

    Args:
        sources: Size of the source vocabulary.
        targets: Size of the target vocabulary, including a start token.
        model_dim, scheme, options: Of `Trunk`.
        layers: Number of blocks of the encoder, and of the decoder.
        tied: Whether source embedding, target embedding and head share one weight; the head has no bias then.

    Raises:
        ValueError: For tied embeddings of different vocabularies, for batch norm, and for linear attention with a
            decay, which has no meaning between two sequences.

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
        **options: Unpack[Options],
    ):
        if tied and sources != targets:
            raise ValueError(f"tied: expected one vocabulary, got {sources} source tokens and {targets} target tokens")
        if options.get("norm") == "batch":
            raise ValueError("norm: expected layer in a decoder, whose tokens must not see later ones, got batch")
        super().__init__(sources, model_dim, layers, scheme, **options)
        if any(one.attention == "linear" and one.decay is not None for one in self.schemes):
            raise ValueError(
                "decay: expected 'none' in linear attention of targets to sources, whose positions are in no common order, "
                "got a decay; softmax attention takes it"
            )
        kept: BlockOptions = {name: options[name] for name in BlockOptions.__annotations__ if name in options}  # pyright: ignore
        depths = zip(self.schemes, depth_rates(options.get("stochastic_depth", 0.0), layers), strict=True)
        self.targets = self.tokens if tied else embedding(targets, model_dim)
        self.decoder = nn.ModuleList(Block(model_dim, one, cross=True, stochastic_depth=d, **kept) for one, d in depths)
        self.last_norm = NORMS["layer"](model_dim)
        self.head = nn.Linear(model_dim, targets, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        windows = options.get("window") is not None and any(one.attention == "linear" for one in self.schemes)
        self.streams = not self.scheme.outside and not windows  # whether decoding keeps states

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        source: Tensor,
        target: Tensor,
        positions: Tensor | None = None,
        places: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b t targets]`` of the token after each of the decoder's inputs ``[b t]``.

        Args:
            source: Tokens ``[b s]``.
            target: A start token and the targets but the last ``[b t]``.
            positions: Of the source ``[s c]`` or ``[b s c]``; 0 to s - 1 by default.
            places: Positions ``[t c]`` or ``[b t c]`` of the predicted tokens; 0 to t - 1 by default.
            mask: ``[b s]``, False for padding of sources. Targets need none: attention is causal.
        """
        return self.decode(target, self.encode(source, positions, mask), places)

    def encode(self, source: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Memory:
        """Encode sources ``[b s]`` for the decoder; see `forward`."""
        positions = sequence(source.shape[1], device=source.device) if positions is None else positions
        x, at = self.enter(source, positions)
        return Memory(self.run_blocks(x, at, mask=mask), positions, at, mask)

    def decode(self, target: Tensor, memory: Memory, places: Tensor | None = None) -> Tensor:
        """Logits ``[b t targets]``; see `forward`."""
        places = sequence(target.shape[1], device=target.device) if places is None else places
        x = self._entered(target, places)
        at = self.scheme_arguments(places, x)
        context = self._context(memory, places, target.shape[1], at)
        for block, arguments, source in zip(self.decoder, at, context, strict=True):
            x = self.checkpointed(block)(x, arguments, causal=True, context=source)
        return self.head(self.last_norm(x))

    def step(
        self, token: Tensor, memory: Memory, places: Tensor, states: Sequence[State] = ()
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Logits ``[b targets]`` after one more token ``[b]``, first the start token, and the new states of the decoder.

        `places` are the positions of all slots so far, as in `decode`; the last one is the token's.
        """
        states = states or (State(),) * len(self.decoder)
        x, after = self._entered(token[:, None], places), []
        at = self.scheme_arguments(places[..., -1:, :], x, states)
        context = self._context(memory, places, 1, at)
        for block, arguments, source in zip(self.decoder, at, context, strict=True):
            x, new = block(x, arguments, causal=True, context=source, return_state=True)
            after.append(new)
        return self.head(self.last_norm(x))[:, 0], tuple(after)

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
        """The most probable tokens, one after another: ``[b n]``, at most `steps`.

        Slots are at positions 0, 1, ..., or where `follow` says, until it returns None. Schemes without streams compute all
        slots again for each token, with the same result.
        """
        memory = self.encode(source, positions, mask)
        target, states = torch.full_like(source[:, :1], start), ()
        for n in range(1, steps + 1):
            places = sequence(n, device=source.device) if follow is None else follow(target[:, 1:])
            if places is None:
                break
            if self.streams:
                logits, states = self.step(target[:, -1], memory, places, states)
            else:
                logits = self.decode(target, memory, places)[:, -1]
            target = torch.cat((target, logits.argmax(-1, keepdim=True)), 1)
        return target[:, 1:]

    def _entered(self, target: Tensor, places: Tensor) -> Tensor:
        """Vectors ``[b t m]`` of the tokens in the last of these slots, plus the scheme's embedding."""
        x, added = self.targets(target), self.scheme.embedding
        return x if added is None else x + added(places, x.dtype)[..., -target.shape[1] :, :]

    def _context(self, memory: Memory, places: Tensor, new: int, at: Sequence[Arguments]) -> tuple[Context, ...]:
        """Each layer's context for the last `new` slots; `at` has the schemes evaluated there."""
        rows = self.scheme.group.refers_to_rows  # a node is found from its root on
        slots, dtype = places if rows else places[..., -new:, :], torch.promote_types(memory.features.dtype, torch.float32)

        def context(n: int, scheme: Scheme) -> Context:
            pair = self.positions_for(scheme, slots), self.positions_for(scheme, memory.positions)
            arguments: Mapping[str, Any] = scheme.at(*pair, dtype=dtype, evaluated=(at[n], memory.at[n]))
            if rows and scheme.locality is not None:
                arguments = arguments | {"locality": arguments["locality"][..., -new:, :]}
            return Context(memory.features, arguments, memory.mask)

        return self.per_layer(context)
