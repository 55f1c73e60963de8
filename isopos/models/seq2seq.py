"""An encoder and a decoder that sees it: sequences into sequences, trees into trees."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isopos.models.blocks import NORMS, Block, BlockOptions, Context, Options, Schemes, Trunk, embedding, rising
from isopos.positions import sequence
from isopos.scheme import Arguments, Scheme
from isopos.state import State

__all__ = ["Follow", "Memory", "Seq2Seq"]

Follow = Callable[[Tensor], Tensor | None]
"""Positions ``[n+1 c]`` or ``[b n+1 c]`` of the n tokens ``[b n]`` that are there and of the next; None: none is to come."""


class Memory(NamedTuple):
    """A source to decode: features ``[b s m]``, positions ``[s c]`` or ``[b s c]``, the schemes there, mask ``[b s]``."""

    features: Tensor
    positions: Tensor
    at: tuple[Arguments, ...]
    mask: Tensor | None


class Seq2Seq(Trunk):
    """An encoder of sources and a causal decoder of targets, whose blocks also attend to the source.

    One scheme serves all three attentions of a layer, as in Algebraic Positional Encodings (section 4.2). The decoder is
    given a start token and the targets but the last, at the positions of the targets: a slot stands where the token is to be
    that it yields. So cross-attention sees the true relative positions of target and source, in lines and in trees.

    Args:
        sources: Number of source tokens.
        targets: Number of target tokens, one of which a task takes to start with.
        model_dim, scheme, options: Of `Trunk`.
        layers: Blocks of the encoder, and as many of the decoder.
        tied: Whether sources, targets and logits share one matrix of vectors; logits have no bias then.

    Raises:
        ValueError: For tied vectors of different vocabularies, for a norm over tokens, and for linear attention with a
            decay, which weighs no pairs of two sequences.

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
        if any(own.attention == "linear" and own.decay is not None for own in self.schemes):
            raise ValueError(
                "decay: expected 'none' in linear attention of targets to sources, whose positions are in no common order, "
                "got a decay; softmax attention takes it"
            )
        kept: BlockOptions = {name: options[name] for name in BlockOptions.__annotations__ if name in options}  # pyright: ignore
        depths = zip(self.schemes, rising(options.get("stochastic_depth", 0.0), layers), strict=True)
        self.targets = self.tokens if tied else embedding(targets, model_dim)
        self.decoder = nn.ModuleList(Block(model_dim, own, cross=True, stochastic_depth=d, **kept) for own, d in depths)
        self.last_norm = NORMS["layer"](model_dim)
        self.head = nn.Linear(model_dim, targets, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        whole = options.get("window") is not None and any(own.attention == "linear" for own in self.schemes)
        self.streams = not self.scheme.outside and not whole

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        source: Tensor,
        target: Tensor,
        positions: Tensor | None = None,
        places: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[b t targets]`` of what comes after each of the tokens ``[b t]`` that the decoder is given.

        Args:
            source: Tokens ``[b s]``.
            target: A start token and the targets but the last ``[b t]``.
            positions: Of the source ``[s c]`` or ``[b s c]``; 0 to s - 1 by default.
            places: Positions ``[t c]`` or ``[b t c]`` of the tokens that the slots yield; 0 to t - 1 by default.
            mask: ``[b s]``, True for a source's own tokens. Padding of targets needs none: no slot sees later ones.
        """
        return self.decode(target, self.encode(source, positions, mask), places)

    def encode(self, source: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Memory:
        """Sources ``[b s]`` for the decoder; see `forward`."""
        positions = sequence(source.shape[1], device=source.device) if positions is None else positions
        x, at = self.enter(source, positions)
        return Memory(self.through(x, at, mask=mask), positions, at, mask)

    def decode(self, target: Tensor, memory: Memory, places: Tensor | None = None) -> Tensor:
        """Logits ``[b t targets]``; see `forward`."""
        places = sequence(target.shape[1], device=target.device) if places is None else places
        x = self._entered(target, places)
        at = self.evaluate(places, x)
        context = self._context(memory, places, target.shape[1], at)
        again = self.recompute and torch.is_grad_enabled()
        for block, own, seen in zip(self.decoder, at, context, strict=True):
            call = partial(checkpoint, block, use_reentrant=False) if again else block
            x = call(x, own, causal=True, context=seen)
        return self.head(self.last_norm(x))

    def step(
        self, token: Tensor, memory: Memory, places: Tensor, states: Sequence[State] = ()
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Logits ``[b targets]`` after one more token ``[b]``, the start token at first, and the decoder's states then.

        `places` are the positions of all slots so far, as in `decode`; the last one is the token's.
        """
        states = states or (State(),) * len(self.decoder)
        x, after = self._entered(token[:, None], places), []
        at = self.evaluate(places[..., -1:, :], x, states)
        context = self._context(memory, places, 1, at)
        for block, own, seen in zip(self.decoder, at, context, strict=True):
            x, new = block(x, own, causal=True, context=seen, return_state=True)
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
        """The likeliest tokens one after another, each given those before it: ``[b n]``, at most so many steps.

        Slots are at positions 0, 1, ... or where `follow` says, until it says none. A stream is kept where the scheme has
        one, otherwise all slots are computed again for each: the tokens are the same.
        """
        memory = self.encode(source, positions, mask)
        given, states = torch.full_like(source[:, :1], start), ()
        for n in range(1, steps + 1):
            places = sequence(n, device=source.device) if follow is None else follow(given[:, 1:])
            if places is None:
                break
            if self.streams:
                logits, states = self.step(given[:, -1], memory, places, states)
            else:
                logits = self.decode(given, memory, places)[:, -1]
            given = torch.cat((given, logits.argmax(-1, keepdim=True)), 1)
        return given[:, 1:]

    def _entered(self, target: Tensor, places: Tensor) -> Tensor:
        """Vectors ``[b t m]`` of tokens in the last of these places, with what the scheme adds to them."""
        x, added = self.targets(target), self.scheme.embedding
        return x if added is None else x + added(places, x.dtype)[..., -target.shape[1] :, :]

    def _context(self, memory: Memory, places: Tensor, new: int, at: Sequence[Arguments]) -> tuple[Context, ...]:
        """What the last `new` of the places, at which the schemes are evaluated already, see of a source, in each layer."""
        rows = self.scheme.group.refers_to_rows  # a node is found from its root on
        seen, dtype = places if rows else places[..., -new:, :], torch.promote_types(memory.features.dtype, torch.float32)

        def context(n: int, scheme: Scheme) -> Context:
            pair = self.seen(scheme, seen), self.seen(scheme, memory.positions)
            found: Mapping[str, Any] = scheme.at(*pair, dtype=dtype, evaluated=(at[n], memory.at[n]))
            if rows and scheme.locality is not None:
                found = found | {"locality": found["locality"][..., -new:, :]}
            return Context(memory.features, found, memory.mask)

        return self.of_layers(context)
