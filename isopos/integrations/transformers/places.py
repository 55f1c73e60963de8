"""What takes the place of modules of positions: rotary ones, which act where a model rotates, and absolute ones."""

from typing import Any

import torch
from torch import Tensor, nn

from isopos.bases import OddEven
from isopos.encodings import Coupling, Identity, InBasis, Partial, Rotary
from isopos.integrations.transformers.evaluated import Evaluated, digits_of
from isopos.scheme import Scheme

__all__ = ["ATTENTION", "Absolute", "Angles", "Digits", "Sinusoids", "rotations"]

ATTENTION = "isopos"
"""The name of our attention, and of its masks."""


def rotations(encoding: Coupling) -> tuple[Rotary | int, ...] | None:
    """Rotations, and numbers of features that pass, side by side, where an encoding is these and heads share them.

    Which features make a pair is left out, since weights of a model are for the pairs that its code rotates.
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


def tables(scheme: Scheme, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Cosines and sines ``[*b t f 2]`` of each of the `rotations`, at positions x ``[*b t 1]``, times attention factors."""
    dtype, found = torch.promote_types(dtype, torch.float32), []
    if scheme.sharpness != 1 and any(isinstance(part, int) for part in rotations(scheme.encoding) or ()):
        raise ValueError("scheme: expected it as it was patched in, got one of whole_logits since; unpatch, and patch again")
    factor = scheme.rotary_factor * scheme.sharpness**0.5  # of which one is 1
    for part in rotations(scheme.encoding) or ():
        if isinstance(part, Rotary):
            found.append(factor * part(x, dtype).table[..., 0, :, :, :])  # pyright: ignore[reportAttributeAccessIssue]
        else:
            still = torch.tensor((1, 0), dtype=dtype, device=x.device)
            found.append(still.expand(*x.shape[:-1], part // 2, 2))
    return found


class Angles(nn.Module):
    """Cosines and sines of a scheme that rotates pairs, all heads alike, for the model's own code to rotate by.

    Args:
        scheme: One with `rotations`.
        narrow: Whether that code rotates as many features as there are cosines, and passes the rest.
    """

    def __init__(self, scheme: Scheme, *, narrow: bool):
        super().__init__()
        self.scheme, self.narrow = scheme, narrow

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of positions ``[b t]``, in the dtype of x, ``[b t d]`` each: those of f pairs, then the same again."""
        parts = tables(self.scheme, position_ids[..., None], x.dtype)
        table = parts[0] if self.narrow else torch.cat(parts, -2)
        cos, sin = table.to(x.dtype).unbind(-1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class Sinusoids(nn.Module):
    """The same for RoFormer's code: sines of all pairs, then cosines.

    Args:
        scheme: One with `rotations`.
        old: A parameter of what it replaces, whose dtype and device are the model's.
    """

    like: Tensor

    def __init__(self, scheme: Scheme, old: Tensor):
        super().__init__()
        self.scheme = scheme
        self.register_buffer("like", old.new_empty(0), persistent=False)

    def forward(self, shape: torch.Size, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Of tokens of a ``[b t]`` after so many, or at positions ``[t]``: ``[t d]``."""
        x = torch.arange(past, past + shape[1], device=self.like.device) if position_ids is None else position_ids
        table = torch.cat(tables(self.scheme, x[..., None], self.like.dtype), -2)
        cos, sin = table.to(self.like.dtype).unbind(-1)
        return torch.cat((sin, cos), -1)


class Absolute(nn.Module):
    """What a scheme adds to embeddings of tokens, or zeros, in place of a table of learned vectors.

    Args:
        scheme: Any.
        old: The table ``[n m]``.
    """

    like: Tensor

    def __init__(self, scheme: Scheme, old: Tensor):
        super().__init__()
        self.scheme = scheme
        self.register_buffer("like", old.new_empty(0, old.shape[1]), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Of positions ``[b t]``: ``[b t m]``."""
        if (added := self.scheme.embedding) is None:
            return self.like.new_zeros(*position_ids.shape, self.like.shape[1])
        return added(position_ids[..., None]).to(self.like.dtype)


class Digits(nn.Module):
    """Writes each token's position behind its queries and keys, for an attention that takes both off again.

    So the cache keeps positions with the keys they belong to, whatever it does with these: beams, crops, windows, slots.
    """

    def __init__(self, scheme: Scheme, config: Any):
        super().__init__()
        self.scheme, self.config = scheme, config

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple["_Behind", "_Nothing"]:
        """What ``q * cos + rotate_half(q) * sin`` takes for the cosines and sines of positions ``[b t]``."""
        if self.config._attn_implementation != ATTENTION:
            raise ValueError(
                f"attn_implementation: expected {ATTENTION!r} while the scheme is in the model, whose other attentions do "
                f"not know it, got {self.config._attn_implementation!r}; unpatch(model) first"
            )
        digits = digits_of(position_ids, x.dtype)
        return _Behind(Evaluated(self.scheme, position_ids[..., None], x, digits), digits), _Nothing()


class _Place:
    """What a model multiplies by queries and keys without knowing, as it does with cosines and sines."""

    def unsqueeze(self, dim: int) -> "_Place":
        """With an axis of heads."""
        return self

    def of(self, x: Tensor) -> Tensor:
        """``x * self``."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        x, place = args
        return place.of(x)


class _Behind(_Place):
    """In the place of cosines: x with digits ``[b 1 t n]`` behind it."""

    def __init__(self, evaluated: Evaluated, digits: Tensor):
        self.evaluated, self.digits = evaluated, digits
        self.shape = torch.Size((*digits.shape[:-1], evaluated.scheme.encoding.features))

    def unsqueeze(self, dim: int) -> "_Behind":
        return _Behind(self.evaluated, self.digits.unsqueeze(dim))

    def of(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.digits.to(x).expand(*x.shape[:-1], -1)), -1)


class _Nothing(_Place):
    """In the place of sines: zero."""

    def of(self, x: Tensor) -> Tensor:
        return x.new_zeros(())
