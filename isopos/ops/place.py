"""Places: some tokens of some heads of some samples, and the views of tensors that belong to them."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Place"]


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
