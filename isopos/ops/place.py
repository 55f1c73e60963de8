"""Places: some tokens of some heads of some samples, and the views of tensors that belong to them."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ALL", "Axes", "Place"]


class Place(NamedTuple):
    """Some tokens of some heads of some samples: a slice an axis of ``[*b h t .]``; ``slice(None)`` is all."""

    batch: tuple[slice, ...]
    heads: slice
    tokens: slice

    def of(self, x: Tensor, heads: int | None, tokens: int | None) -> Tensor:
        """The view of x with those axes, from the end; batch axes come before both. An axis of length 1 serves all."""
        axes = [(axis, part) for axis, part in ((heads, self.heads), (tokens, self.tokens)) if axis is not None]
        first = min(axes[0][0], axes[-1][0])
        axes += [(first - 1 - n, part) for n, part in enumerate(reversed(self.batch))]
        for axis, part in axes:
            if part.start is not None and -axis <= x.ndim and 1 < x.shape[axis] != part.stop - part.start:
                x = x.narrow(axis, part.start, part.stop - part.start)
        return x


ALL = Place((), slice(None), slice(None))


class Axes(NamedTuple):
    """Where a tensor has its axes, counted from the end; None where it has none.

    Examples:
        >>> axes = Axes.named("*b h t d")
        >>> x = torch.zeros(5, 2, 7, 3)
        >>> x.shape[axes.tokens], x.shape[axes.features], axes.leading(x)
        (7, 3, torch.Size([5, 2]))
        >>> axes.part(x, Place((), slice(0, 1), slice(2, 6))).shape
        torch.Size([5, 1, 4, 3])
    """

    heads: int | None
    tokens: int | None
    features: int | None
    first: int  # the first axis that has a name
    samples: bool  # whether those of samples come before it

    @classmethod
    def named(cls, names: str) -> "Axes":
        """By names: *b for samples, h for heads, t for tokens, d for the features of what is mapped, and any others."""
        samples = names.startswith("*b ")
        named = names.split()[samples:]
        places = {name: n - len(named) for n, name in enumerate(named)}
        return cls(places.get("h"), places.get("t"), places.get("d"), -len(named), samples)

    def part(self, x: Tensor, place: Place) -> Tensor:
        """The view of x that concerns a place. An axis of length 1 serves all."""
        if self.heads is self.tokens is None:
            return x
        return (place if self.samples else Place((), place.heads, place.tokens)).of(x, self.heads, self.tokens)

    def leading(self, x: Tensor) -> torch.Size:
        """Axes of samples and heads ``[*b h]``."""
        if self.heads == self.first:
            return x.shape[: self.first + 1]
        heads = 1 if self.heads is None else x.shape[self.heads]
        return torch.Size((*(x.shape[: self.first] if self.samples else ()), heads))
