"""The model under audit: calls with positions, masks and chunks, and its declared rotary tables."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

ABILITIES = {
    "positions": "its call takes no positions",
    "mask": "its call takes no mask",
    "packing": "its call takes no packed batches",
    "cache": "its call keeps no keys and values",
    "static": "it has no static cache",
    "generate": "it does not generate",
    "causal": "it is not causal",
    "bidirectional": "it is causal",
    "save": "it has no save_pretrained",
    "text": "it needs text, and got none",
    "casts": "its call is not known to serve other dtypes",
}
"""Abilities of subjects, each with the reason why a check without it does not apply."""
SENSITIVE = 3e-2  # least relative change of later outputs when the first token changes
NOISY = 1e-2  # rounding above which nothing can be told
ROUNDINGS = 32  # a difference of more roundings is a fault


class Skip(Exception):
    """A check does not apply; the message is the reason."""


@dataclass(frozen=True)
class RotaryModule:
    """A module that computes cosines and sines, with its declaration in the configuration.

    Args:
        name: Path of the module in the model.
        parameters: Declared rotary parameters: rope_type, rope_theta, factor, ... in transformers' names.
        features: Declared number of features that rotate; None where the configuration does not say.
        trained: Declared number of positions, ``max_position_embeddings``.
        frequencies: The module's frequencies ``[f]`` in radians per step; None if it has none.
        attention_factor: Factor of cosines and sines.
        tables: (module, positions ``[b t]``, dtype) -> cosines and sines ``[b t d]``; None if the module has none.
        refetch: module -> its frequencies ``[f]``; None if it has none.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, Any]
    features: int | None
    trained: int | None
    frequencies: Tensor | None
    attention_factor: float
    tables: Callable[[nn.Module, Tensor, torch.dtype], tuple[Tensor, Tensor]] | None = None
    refetch: Callable[[nn.Module], Tensor] | None = None


@dataclass
class Subject(ABC):
    """The model under audit. Checks call it in eval mode, on a float64 copy if the model supports float64.

    Args:
        module: The user's model; never changed.
        name: For the report.
        abilities: Names in `ABILITIES`.
        limit: Positions from 0 up to this number are those the model was made for; None for any.
        is_relative: Whether outputs must not see a shift of all positions; None where nothing tells.
        encoding: How positions enter, in words: "rotary", "learned absolute table", ...
        text: Tokens of natural text ``[b t]``, for trained weights.
    """

    module: nn.Module
    name: str
    abilities: frozenset[str] = frozenset()
    limit: int | None = None
    is_relative: bool | None = None
    encoding: str = "unknown"
    heads: int | None = None
    length: int = 12
    text: Tensor | None = None
    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def tokens(self, rows: int, count: int, seed: int = 0) -> Tensor:
        """Random tokens ``[b t]``, or features ``[b t d]``."""

    @abstractmethod
    def call(self, module: nn.Module, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Outputs ``[b t v]`` of one of the copies; mask ``[b t]`` is True for tokens that take part."""

    def prepared(self, made: nn.Module) -> nn.Module:
        """A copy, prepared for calls in float64."""
        return made

    def packed(self, tokens: Tensor, lengths: Sequence[int], masked: bool = False) -> Tensor:
        """Outputs of one row ``[1 t v]`` that holds samples of these lengths; with a mask of ones where `masked`."""
        raise NotImplementedError

    def stream(self, chunks: Sequence[Tensor], kind: str = "dynamic", order: Tensor | None = None) -> Tensor:
        """Outputs of chunks through a cache, one after the other ``[b t v]``; `order` reorders its rows before the last."""
        raise NotImplementedError

    def generated(self, tokens: Tensor, mask: Tensor, count: int) -> Tensor:
        """Logits ``[b n v]`` of the next tokens of left-padded samples, chosen greedily."""
        raise NotImplementedError

    def rotary(self, module: nn.Module) -> list[RotaryModule]:
        """Rotary modules in the model or a copy of it."""
        return []

    def entry(self) -> str:
        """The line of the configuration that declares rotary parameters; empty without one."""
        return ""

    def loaded_again(self) -> nn.Module:
        """The model, written to a folder and read again."""
        raise NotImplementedError

    def without(self, *names: str) -> str | None:
        """The reason why a check that needs these abilities does not apply."""
        able = self.abilities | ({"text"} if self.text is not None else set())
        return next((ABILITIES[name] for name in names if name not in able), None)

    @cached_property
    def copies(self) -> dict[torch.dtype, nn.Module]:
        """Copies with the same weights in float32, and in float64 if the model supports it."""
        made = self.prepared(copy.deepcopy(self.module).eval().requires_grad_(False)).double()
        kept = {torch.float64: made}
        try:
            self._probe(made)
        except RuntimeError:
            kept = {}
            made = made.float()
            self._probe(made)
        with torch.no_grad():
            if self.context(made) < SENSITIVE:
                _amplify(made)
                self.notes.append("its weights let tokens hardly see each other: a copy with larger ones was measured")
        return kept | {torch.float32: copy.deepcopy(made).float()}

    @cached_property
    def exact(self) -> nn.Module:
        """The copy that checks call: float64, unless padding makes its outputs non-finite and those in float32 finite.

        Some masks hold the least float64, which is minus infinity once a softmax is taken in float32.
        """
        double, single = (self.copies.get(dtype) for dtype in (torch.float64, torch.float32))
        assert single is not None
        if double is None:
            return single
        finite = [bool(self._probe(module, padded=True).isfinite().all()) for module in (double, single)]
        return single if finite == [False, True] else double

    @torch.no_grad()
    def context(self, module: nn.Module) -> float:
        """The relative change of all other outputs when the first token changes."""
        tokens, other = self.tokens(1, self.length), self.tokens(1, self.length, seed=1)
        changed = torch.cat((other[:, :1], tokens[:, 1:]), 1)
        return relative_error(self.call(module, changed)[:, 1:], self.call(module, tokens)[:, 1:])

    @torch.no_grad()
    def sees_later(self) -> bool:
        """Whether a change of the last token changes an output before it."""
        tokens, other = self.tokens(1, self.length), self.tokens(1, self.length, seed=1)
        changed = torch.cat((tokens[:, :-1], other[:, -1:]), 1)
        got, want = (self.call(self.exact, a)[:, :-1] for a in (changed, tokens))
        return relative_error(got, want) >= 1e-6

    @torch.no_grad()
    def outputs(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Outputs of the exact copy ``[b t v]``."""
        return self.call(self.exact, tokens, positions, mask)

    @cached_property
    def rounding(self) -> float:
        """The relative rounding of float32 in whole calls, measured; float64 copies may compute parts in float32."""
        if torch.float64 not in self.copies:
            return 64 * torch.finfo(torch.float32).eps
        errors = []
        for seed in range(2):
            tokens = self.tokens(2, self.length, seed=seed)
            with torch.no_grad():
                errors.append(relative_error(*(self.call(self.copies[a], tokens) for a in (torch.float32, torch.float64))))
        return max(*errors, 4 * torch.finfo(torch.float32).eps)

    @property
    def tolerance(self) -> float:
        """The largest relative difference of two calls that rounding explains."""
        if not self.rounding < NOISY / ROUNDINGS:
            raise Skip(f"rounding changes its outputs by {self.rounding:.1e}, so that nothing can be told from it")
        return ROUNDINGS * self.rounding

    @property
    def shift(self) -> int:
        """A shift of all positions within the model's limit; 0 if there is none."""
        room = 10**6 if self.limit is None else self.limit - 2 * self.length
        return max(0, min(37, room))

    @torch.no_grad()
    def _probe(self, module: nn.Module, padded: bool = False) -> Tensor:
        """Outputs of two samples, the second left-padded if the model supports padding."""
        tokens = self.tokens(2, self.length)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool)
        mask[1, :2] = False
        use = padded and "mask" in self.abilities
        return self.call(module, tokens, None, mask if use else None)[:, 2:]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected number; infinite if a number is not finite."""
    if got.shape != expected.shape:
        raise ValueError(f"outputs: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}")
    got, expected = got.double(), expected.double()
    if not bool(got.isfinite().all() and expected.isfinite().all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


@contextmanager
def traced(module: nn.Module):
    """Record each submodule's output ``[b t ...]`` by name, in the order in which they finish."""
    seen: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.ndim >= 3 and first.is_floating_point():
                seen.pop(name, None)
                seen[name] = first.detach().clone()

        return hook

    handles = [child.register_forward_hook(record(name)) for name, child in module.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _amplify(module: nn.Module) -> None:
    """Give matrices entries of standard deviation 1 / sqrt(inputs), so that scores of attention are of order one."""
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 or not parameter.is_floating_point():
            continue
        std = float(parameter.double().std())
        is_table = "embed" in name or "wte" in name or "wpe" in name
        inputs = 1 if is_table else parameter[0].numel() if parameter.ndim != 3 else min(parameter.shape[1:])
        if std > 0:
            parameter.mul_(inputs**-0.5 / std)
