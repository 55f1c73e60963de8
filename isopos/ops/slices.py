"""Slices of samples, heads and tokens, and the views of tensors that they select."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slices(NamedTuple):
    """One slice per axis of ``[*b h t .]``: some tokens of some heads of some samples; ``slice(None)`` is all."""

    batch: tuple[slice, ...]
    heads: slice
    tokens: slice

    def of(self, x: Tensor, heads: int | None, tokens: int | None) -> Tensor:
        """The view of x, with these axes counted from the end and batch axes before both.

        Axes of length 1 broadcast, except to no element.
        """
        axes = [(axis, part) for axis, part in ((heads, self.heads), (tokens, self.tokens)) if axis is not None]
        first = min(axes[0][0], axes[-1][0])
        axes += [(first - 1 - n, part) for n, part in enumerate(reversed(self.batch))]
        for axis, part in axes:
            if part.start is not None and -axis <= x.ndim:
                size = part.stop - part.start
                if x.shape[axis] != size and (x.shape[axis] > 1 or size == 0):
                    x = x.narrow(axis, part.start if size else 0, size)
        return x


ALL = Slices((), slice(None), slice(None))


class Axes(NamedTuple):
    """Positions of a tensor's axes, counted from the end; None for an axis that it lacks.

    Examples:
        >>> axes = Axes.named("*b h t d")
        >>> x = torch.zeros(5, 2, 7, 3)
        >>> x.shape[axes.tokens], x.shape[axes.features], axes.leading(x)
        (7, 3, torch.Size([5, 2]))
        >>> axes.part(x, Slices((), slice(0, 1), slice(2, 6))).shape
        torch.Size([5, 1, 4, 3])
    """

    heads: int | None
    tokens: int | None
    features: int | None
    first: int  # the first named axis
    samples: bool  # whether axes of samples precede it
    names: str = ""  # of all axes, as declared

    @classmethod
    def named(cls, names: str) -> "Axes":
        """Axes from names: *b for samples, h for heads, t for tokens, d for mapped features, and any others."""
        samples = names.startswith("*b ")
        named = names.split()[samples:]
        axis = {name: n - len(named) for n, name in enumerate(named)}
        return cls(axis.get("h"), axis.get("t"), axis.get("d"), -len(named), samples, names)

    def part(self, x: Tensor, slices: Slices) -> Tensor:
        """The view of x that the slices select. Axes of length 1 broadcast."""
        if self.heads is self.tokens is None:
            return x
        return (slices if self.samples else Slices((), slices.heads, slices.tokens)).of(x, self.heads, self.tokens)

    def leading(self, x: Tensor) -> torch.Size:
        """Axes of samples and heads ``[*b h]``."""
        if self.heads == self.first:
            return x.shape[: self.first + 1]
        heads = 1 if self.heads is None else x.shape[self.heads]
        return torch.Size((*(x.shape[: self.first] if self.samples else ()), heads))
