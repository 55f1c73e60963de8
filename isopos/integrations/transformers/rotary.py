"""Rotary modules of transformers: what is measured on one, what takes its place, and the scheme that it amounts to."""

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

__all__ = ["Angles", "Tables", "Unrotated", "is_rotation", "measured", "of_type", "rotary_modules", "rotations", "tables"]

FREQUENCIES = re.compile(r"^(.+_)?inv_freq$")
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "halves": lambda cos, sin: (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
    "neighbours": lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
    "pairs": lambda cos, sin: (cos, sin),
    "complex": torch.complex,
}
"""What a rotary module returns, made of the cosines and sines ``[*b t f]`` of f feature pairs."""


@dataclass(frozen=True)
class Tables:
    """What `measured` finds out about a rotary module.

    Args:
        form: Name of what it returns, in `FORMS`.
        pairs: Number f of feature pairs that have an angle.
        columns: Coordinates of a position: 1, 2 for the patches of images, or 3 for time, height and width.
        casts: Whether tables have the dtype of the features. Otherwise they are float32.
        layer_types: Types of layers that have frequencies of their own. Empty where all layers share them.
        flexible: Whether the model's code rotates as many features as a table has, and passes the rest.
        halves: Whether that code rotates the pairs (i, i + n / 2) of n features.
        patch: Height and width of a patch, for a module that is called with images.
    """

    form: str
    pairs: int
    columns: int
    casts: bool
    layer_types: tuple[str, ...]
    flexible: bool
    halves: bool
    patch: tuple[int, int] | None

    def positions(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        """Positions ``[*b t c]`` of what the module is called with.

        Patches of images are at 2 pi times their centres, which go from -1 to 1 along each side: float64.
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
        """Whether the model's code can rotate by the angles of a scheme."""
        parts = rotations(scheme.encoding) if is_rotation(scheme) else None
        turning = [part.features // 2 for part in parts or () if isinstance(part, Rotary)]
        return parts is not None and (self.flexible or max(turning, default=0) <= self.pairs)

    def made(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
        """What the module returns for features of a dtype, of cosines and sines ``[*b t f]``."""
        dtype = dtype if self.casts else torch.float32
        return FORMS[self.form](cos.to(dtype), sin.to(dtype))


class Angles(nn.Module):
    """A rotary module that takes its angles from a scheme.

    Args:
        scheme: A scheme that the tables take, or a ModuleDict with one scheme per layer type.
        tables: Of the module that it replaces.
    """

    def __init__(self, scheme: nn.Module, tables: Tables):
        super().__init__()
        self.scheme, self.tables = scheme, tables

    def forward(self, x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None) -> Any:
        """Tables at positions for features x, or for the patches of images x."""
        parts = tables(of_type(self.scheme, layer_type), self.tables.positions(x, position_ids), x.dtype)
        table = parts[0] if self.tables.flexible else torch.cat(parts, -2)[..., : self.tables.pairs, :]
        return self.tables.made(table[..., 0], table[..., 1], x.dtype)


class Unrotated(nn.Module):
    """A rotary module that leaves all features as they are, where an attention of ours applies the scheme."""

    def __init__(self, scheme: nn.Module, tables: Tables):
        super().__init__()
        self.scheme, self.tables = scheme, tables

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Tables of angle 0."""
        shape = (*self.tables.positions(x, position_ids).shape[:-1], self.tables.pairs)
        return self.tables.made(torch.ones(shape, device=x.device), torch.zeros(shape, device=x.device), x.dtype)


def of_type(scheme: nn.Module, layer_type: str | None) -> Any:
    """The scheme of a layer type."""
    return scheme[layer_type] if isinstance(scheme, nn.ModuleDict) and layer_type is not None else scheme


def rotations(encoding: Coupling) -> tuple[Rotary | int, ...] | None:
    """Rotations, and numbers of features that pass, side by side. None for an encoding of something else.

    It leaves out which features make a pair, since the weights of a model are for the pairs that its code rotates.
    """
    if isinstance(encoding, Identity):
        return (encoding.features,)
    if isinstance(encoding, Partial):
        first = rotations(encoding.encoding)
        return None if first is None else (*first, encoding.rest)
    if isinstance(encoding, InBasis) and isinstance(encoding.basis, OddEven):
        return rotations(encoding.encoding)
    if isinstance(encoding, Rotary) and not encoding.is_lift and len(encoding.parameter) == 1:
        return (encoding,)
    return None


def is_rotation(scheme: Scheme, *, with_decay: bool = False) -> bool:
    """Whether cosines and sines, the same for all heads, express all that a scheme does in attention, or all but a decay."""
    plain = scheme.bias is scheme.locality is scheme.scale is None and not scheme.phases
    plain = plain and (with_decay or scheme.decay is None)
    parts = rotations(scheme.encoding)
    passing = scheme.sharpness != 1 and any(isinstance(part, int) for part in parts or ())  # no cosine sharpens these
    return plain and parts is not None and not passing


def tables(scheme: Scheme, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Cosines and sines ``[*b t f 2]`` of each of the `rotations` at positions x ``[*b t c]``, times attention factors."""
    dtype, found = torch.promote_types(dtype, torch.float32), []
    if scheme.sharpness != 1 and any(isinstance(part, int) for part in rotations(scheme.encoding) or ()):
        raise ValueError("scheme: expected it as it was patched in, got one of whole_logits since; unpatch, and patch again")
    factor = scheme.rotary_factor * scheme.sharpness**0.5  # one of the two is 1
    for part in rotations(scheme.encoding) or ():
        if isinstance(part, Rotary):
            found.append(factor * part(x, dtype).table[..., 0, :, :, :])  # pyright: ignore[reportAttributeAccessIssue]
        else:
            still = torch.tensor((1, 0), dtype=dtype, device=x.device)
            found.append(still.expand(*x.shape[:-1], part // 2, 2))
    return found


def rotary_modules(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Modules with inverse frequencies: the parent of each, its name there, and the module."""
    for name, module in model.named_modules():
        if any(FREQUENCIES.match(buffer) for buffer, _ in module.named_buffers(recurse=False)):
            parent, _, own = name.rpartition(".")
            yield model.get_submodule(parent), own, module


@torch.no_grad()
def measured(old: Any) -> Tables:
    """What a rotary module does, measured on a new module of its class and configuration on the CPU.

    The module itself may be on the meta device, or have a cache of another length.
    """
    takes, config = inspect.signature(old.forward).parameters, old.config
    with torch.device("cpu"):
        probe: Any = type(old)(config).eval()
        types = sorted(set(getattr(config, "layer_types", None) or ())) if "layer_type" in takes else ()
        types = tuple(one for one in types if hasattr(probe, f"{one}_inv_freq"))
        patch = _pair(config.patch_size) if "pixel_values" in takes else None
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
    return Tables(form, pairs, columns, casts, types, flexible, halves, patch)


def _form(found: Any) -> tuple[str, int]:
    """The name of a table's form, and its number of pairs."""
    if isinstance(found, Tensor):
        return "complex", found.shape[-1]
    both = torch.stack(found)
    count = both.shape[-1] // 2
    if both[..., :count].equal(both[..., count:]):
        return "halves", count
    return ("neighbours", count) if both[..., ::2].equal(both[..., 1::2]) else ("pairs", both.shape[-1])


def _rotated(old: Any) -> tuple[bool, bool]:
    """Whether the model's function of rotation passes features without cosines, and whether it pairs halves."""
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


def _first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
