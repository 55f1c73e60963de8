"""Rotary modules of transformers: their measured properties, and modules that replace them and tables of positions."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isopos.bases import OddEven
from isopos.encodings import Coupling, Identity, InBasis, Partial, Rotary
from isopos.positions import grid
from isopos.scheme import Scheme

FREQUENCIES = re.compile(r"^(.+_)?inv_freq$")
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "halves": lambda cos, sin: (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
    "neighbours": lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
    "pairs": lambda cos, sin: (cos, sin),
    "complex": torch.complex,
}
"""What a rotary module returns, made of the cosines and sines ``[*b t f]`` of f feature pairs."""


@dataclass(frozen=True)
class RotaryTables:
    """Measured properties of a rotary module."""

    form: str  # name of the form of its output, in `FORMS`
    pairs: int  # number f of feature pairs that have an angle
    columns: int  # coordinates of a position: 1, 2 for the patches of images, or 3 for time, height and width
    casts: bool  # whether tables have the dtype of the features. Otherwise they are float32
    layer_types: tuple[str, ...]  # types of layers with separate frequencies. Empty if all layers share them
    flexible: bool  # whether the model's code rotates as many features as a table has and leaves the rest unchanged
    halves: bool  # whether that code rotates the pairs (i, i + n / 2) of n features
    patch: tuple[int, int] | None  # height and width of a patch, for a module that is called with images

    def positions(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """Positions ``[*b t c]`` of a call's tokens or patches.

        A patch is at 2 pi times its centre, which runs from -1 to 1 on each axis of the image: float64.
        """
        if position_ids is None:
            assert self.patch is not None
            sides = [size // patch for size, patch in zip(x.shape[-2:], self.patch, strict=True)]
            corner = grid(*sides, device=x.device).double()
            return 2 * math.pi * (2 * (corner + 0.5) / torch.tensor(sides, device=x.device) - 1)
        if self.columns == 1:
            return position_ids[..., None]
        return position_ids if self.columns == 2 else position_ids.expand(3, -1, -1).movedim(0, -1)

    def take(self, scheme: Scheme) -> bool:
        """Whether the model's code can apply the rotations of a scheme."""
        parts = rotated_slices(scheme.encoding) if is_rotation(scheme) else None
        turning = [part.features // 2 for part in parts or () if isinstance(part, Rotary)]
        return parts is not None and (self.flexible or max(turning, default=0) <= self.pairs)

    def made(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        """Cosines and sines ``[*b t f]`` in the module's form, for features of a dtype."""
        dtype = dtype if self.casts else torch.float32
        return FORMS[self.form](cos.to(dtype), sin.to(dtype))


class _Replaced(nn.Module):
    """A module in place of a rotary module.

    Args:
        scheme: A scheme, or a ModuleDict with one scheme per layer type.
        tables: Properties of the replaced module.
    """

    def __init__(self, scheme: nn.Module, tables: RotaryTables):
        super().__init__()
        self.scheme, self.tables = scheme, tables


class Angles(_Replaced):
    """A rotary module with the angles of a scheme that `RotaryTables.take` accepts."""

    def forward(self, x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None) -> Any:
        """Tables at positions for features x, or for the patches of images x."""
        parts = rotary_tables(of_type(self.scheme, layer_type), self.tables.positions(x, position_ids), x.dtype)
        table = parts[0] if self.tables.flexible else torch.cat(parts, -2)[..., : self.tables.pairs, :]
        return self.tables.made(table[..., 0], table[..., 1], x.dtype)


class Unrotated(_Replaced):
    """A rotary module that rotates nothing, for models whose attention is ours and applies the scheme."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Tables of angle 0 for all positions."""
        shape = (*self.tables.positions(x, position_ids).shape[:-1], self.tables.pairs)
        return self.tables.made(torch.ones(shape, device=x.device), torch.zeros(shape, device=x.device), x.dtype)


class _Replacement(nn.Module):
    """A module in place of a table of absolute positions, which computes its vectors by a scheme.

    Args:
        scheme: The scheme.
        old: The replaced table ``[n m]``; its dtype and device are used.
    """

    like: Tensor

    def __init__(self, scheme: Scheme, old: Tensor):
        super().__init__()
        self.scheme = scheme
        self.register_buffer("like", old.new_empty(0, old.shape[-1]), persistent=False)


class Sinusoids(_Replacement):
    """Table for RoFormer's rotations, sines of all pairs and then cosines, from a scheme with `rotated_slices`."""

    def forward(self, shape: torch.Size, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Table ``[t d]`` at positions ``[t]``; by default of tokens ``[b t]`` after `past` earlier tokens."""
        x = torch.arange(past, past + shape[1], device=self.like.device) if position_ids is None else position_ids
        table = torch.cat(rotary_tables(self.scheme, x[..., None], self.like.dtype), -2)
        cos, sin = table.to(self.like.dtype).unbind(-1)
        return torch.cat((sin, cos), -1)


class AddedPositions(_Replacement):
    """The vectors that a scheme adds to embeddings of tokens, or zeros."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Vectors ``[b t m]`` of positions ``[b t]``."""
        if (added := self.scheme.embedding) is None:
            return self.like.new_zeros(*position_ids.shape, self.like.shape[-1])
        return added(position_ids[..., None]).to(self.like.dtype)


def of_type(scheme: nn.Module, layer_type: str | None) -> Any:
    """The scheme of a layer type."""
    return scheme[layer_type] if isinstance(scheme, nn.ModuleDict) and layer_type is not None else scheme


def rotated_slices(encoding: Coupling) -> tuple[Rotary | int, ...] | None:
    """Slices of a head in order: rotations, and numbers of unrotated features. None for other encodings.

    The layout of pairs is left out: a model's code decides which features form a pair.
    """
    if isinstance(encoding, Identity):
        return (encoding.features,)
    if isinstance(encoding, Partial):
        first = rotated_slices(encoding.encoding)
        return None if first is None else (*first, encoding.rest)
    if isinstance(encoding, InBasis) and isinstance(encoding.basis, OddEven):
        return rotated_slices(encoding.encoding)
    if isinstance(encoding, Rotary) and not encoding.is_lift and len(encoding.parameter) == 1:
        return (encoding,)
    return None


def is_rotation(scheme: Scheme, *, with_decay: bool = False) -> bool:
    """Whether cosines and sines shared by all heads express a scheme, except for a decay."""
    plain = scheme.bias is scheme.locality is scheme.scale is None and not scheme.phases
    plain = plain and (with_decay or scheme.decay is None)
    parts = rotated_slices(scheme.encoding)
    passing = scheme.sharpness != 1 and any(isinstance(part, int) for part in parts or ())  # no cosine sharpens these
    return plain and parts is not None and not passing


def rotary_tables(scheme: Scheme, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Cosines and sines ``[*b t f 2]`` of each of `rotated_slices` at positions x ``[*b t c]``, times attention factors."""
    dtype, by_part = torch.promote_types(dtype, torch.float32), []
    if scheme.sharpness != 1 and any(isinstance(part, int) for part in rotated_slices(scheme.encoding) or ()):
        raise ValueError("scheme: expected it as it was patched in, got one of whole_logits since; unpatch, and patch again")
    factor = scheme.rotary_factor * scheme.sharpness**0.5  # one of the two is 1
    for part in rotated_slices(scheme.encoding) or ():
        if isinstance(part, Rotary):
            by_part.append(factor * part(x, dtype).table[..., 0, :, :, :])  # pyright: ignore[reportAttributeAccessIssue]
        else:
            still = torch.tensor((1, 0), dtype=dtype, device=x.device)
            by_part.append(still.expand(*x.shape[:-1], part // 2, 2))
    return by_part


def rotary_modules(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Modules with inverse frequencies: the parent of each, its name there, and the module."""
    for name, module in model.named_modules():
        if any(FREQUENCIES.match(buffer) for buffer, _ in module.named_buffers(recurse=False)):
            parent, _, attribute = name.rpartition(".")
            yield model.get_submodule(parent), attribute, module


@torch.no_grad()
def measured(old: Any) -> RotaryTables:
    """Properties of a rotary module, measured on a new module of its class and configuration on the CPU.

    The module itself may be on the meta device or have cached tables of another length.
    """
    takes, config = inspect.signature(old.forward).parameters, old.config
    with torch.device("cpu"):
        probe: Any = type(old)(config).eval()
        types = sorted(set(getattr(config, "layer_types", None) or ())) if "layer_type" in takes else ()
        types = tuple(one for one in types if hasattr(probe, f"{one}_inv_freq"))
        size = config.patch_size if "pixel_values" in takes else ()
        patch: Any = ((size, size) if isinstance(size, int) else tuple(size)) or None
        options = {"layer_type": types[0]} if types else {}

        def call(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
            if patch is not None:
                return probe(torch.zeros(1, 3, 2 * patch[0], 2 * patch[1], dtype=dtype))
            return probe(torch.zeros(1, 1, 1, dtype=dtype), torch.arange(1, 1 + math.prod(shape)).view(shape), **options)

        columns = 2 if patch is not None or _first(call(5, 2)).ndim == 2 else 3 if _first(call(3, 1, 2)).ndim == 3 else 1
        shape = (5, 2) if columns == 2 else (1, 2)
        casts = _first(call(*shape, dtype=torch.float64)).dtype == torch.float64
        form, pairs = _form(call(*shape))
        flexible, halves = _rotated(old) if columns != 2 else (False, False)
    return RotaryTables(form, pairs, columns, casts, types, flexible, halves, patch)


def _form(tables: Any) -> tuple[str, int]:
    """Name of the form of tables in `FORMS`, and their number of pairs."""
    if isinstance(tables, Tensor):
        return "complex", tables.shape[-1]
    both = torch.stack(tables)
    count = both.shape[-1] // 2
    if both[..., :count].equal(both[..., count:]):
        return "halves", count
    return ("neighbours", count) if both[..., ::2].equal(both[..., 1::2]) else ("pairs", both.shape[-1])


def _rotated(old: Any) -> tuple[bool, bool]:
    """Whether the model's rotation leaves features without cosines unchanged, and whether it pairs (i, i + n / 2)."""
    function = getattr(sys.modules[type(old).__module__], "apply_rotary_pos_emb", None)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
        try:
            return function(x, x, cos, sin)[0]  # pyright: ignore[reportOptionalCall]
        except (RuntimeError, TypeError, ValueError, IndexError):  # another signature, or other shapes
            return None

    x, zeros = torch.eye(8)[:1].view(1, 1, 1, 8), torch.zeros(1, 1, 8)
    short = rotated(x, zeros[..., :4], zeros[..., :4])
    partner = rotated(x, zeros, 1 + zeros)
    halves = partner is not None and partner.shape == x.shape and bool(partner[..., 4])
    return short is not None and short.shape == x.shape, halves


def _first(tables: Any) -> Tensor:
    return tables if isinstance(tables, Tensor) else tables[0]
