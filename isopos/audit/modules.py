"""Audits of a torch module with an example call."""

import bisect
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isopos.audit.subject import Subject

NAMES = {
    "positions": ("positions", "position_ids"),
    "mask": ("mask", "attention_mask"),
    "segments": ("segments", "segment_ids"),
}
ROTARY = ("rotary", "rope", "roform")
REACH = 2048  # positions that are tried; checks take no later ones


class ModuleSubject(Subject):
    """A torch module, whose calls may take positions, a mask or segments by these names."""

    function: Callable[..., Tensor] | None
    example: Tensor
    names: dict[str, str]

    @classmethod
    def of(
        cls, module: nn.Module, call: Callable[..., Tensor] | None, example: Tensor | None, relative: bool | None,
        causal: bool | None,
    ) -> "ModuleSubject":  # fmt: skip
        """The subject of a module, after a trial of the call."""
        if not isinstance(example, Tensor) or example.ndim not in (2, 3):
            raise ValueError(
                f"example: expected tokens [1 t] or features [1 t d] for {type(module).__name__}, got {example!r}"
            )
        parameters = inspect.signature(module.forward if call is None else call).parameters
        names = {argument: name for argument, known in NAMES.items() for name in known if name in parameters}
        rotary = any(word in type(child).__name__.lower() for child in module.modules() for word in ROTARY)
        subject = cls(
            module, type(module).__name__, is_relative=True if relative is None and rotary else relative,
            encoding="rotary" if rotary else "unknown", length=max(12, min(24, example.shape[1])),
        )  # fmt: skip
        subject.function, subject.example, subject.names = call, example, names
        subject.limit = subject.end()
        if subject.limit is not None and subject.limit < 2 * subject.length:
            subject.length = max(8, subject.limit // 2)
        arguments = set(names) - {"segments"} | ({"packing"} if "segments" in names else set())
        if causal is None:
            causal = not subject.sees_later()
        subject.abilities = frozenset({*arguments, "causal" if causal else "bidirectional", "casts"})
        return subject

    @torch.no_grad()
    def end(self) -> int | None:
        """The number of positions that its tables have; None if no table ended."""
        module, most = copy.deepcopy(self.module).eval(), REACH if "positions" in self.names else 2 * self.length

        def serves(count: int) -> bool:
            try:
                if "positions" in self.names:
                    self.call(module, self.tokens(1, self.length), torch.arange(count - self.length, count)[None])
                else:
                    self.call(module, self.tokens(1, count))
            except IndexError:
                return False
            return True

        if serves(most) or not serves(self.length):
            return None
        return self.length + bisect.bisect_left(range(self.length + 1, most), True, key=lambda count: not serves(count))

    def tokens(self, rows: int, count: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1 + seed)
        if not self.example.is_floating_point():
            return torch.randint(0, int(self.example.max()) + 1, (rows, count), generator=generator)
        return torch.randn((rows, count, self.example.shape[-1]), generator=generator, dtype=torch.float64)

    def call(
        self, module: nn.Module, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        options = {"positions": positions, "mask": mask, **more}
        options = {self.names[name]: value for name, value in options.items() if value is not None and name in self.names}
        if tokens.is_floating_point():
            tokens = tokens.to(next((p.dtype for p in module.parameters()), tokens.dtype))
        out = module(tokens, **options) if self.function is None else self.function(module, tokens, **options)
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != tokens.shape[:2]:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"call: expected outputs [b t v] for tokens {tuple(tokens.shape[:2])}, got {shape}")
        return out

    def packed(self, tokens: Tensor, lengths: Sequence[int], masked: bool = False) -> Tensor:
        segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        with torch.no_grad():
            mask = torch.ones_like(segments, dtype=torch.bool) if masked else None
            return self.call(self.exact, tokens, positions, mask, segments=segments)
