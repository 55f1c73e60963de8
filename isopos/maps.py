"""Isometries: the immutable values that encodings return.

An isometry maps features ``[*b h t d] -> [*b h t d']`` and keeps inner products. It is evaluated once for a tensor of
positions and shared by queries, keys and layers. The last five classes need not keep inner products: couplings use them,
which treat queries and keys apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from isopos.exact import full_precision
from isopos.feature_maps import Phi
from isopos.ops.place import Place
from isopos.ops.rotate import (
    lift,
    permute,
    reflect,
    rotate,
    transform,
    transform_tokens,
    unlift,
    unpermute,
    unrotate,
)


class Isometry(ABC):
    """A map of the features of tokens. The output has the input's dtype; sums are float32 or wider."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Map x ``[*b h t d]`` of at least float32."""

    @abstractmethod
    def part(self, place: Place) -> "Isometry":
        """The part for some tokens of some heads and samples."""

    def tokens(self, start: int, stop: int) -> "Isometry":
        """The part for tokens start to stop - 1."""
        return self.part(Place((), slice(None), slice(start, stop)))

    @property
    def linear(self) -> bool:
        """Whether it is a linear map with an `adjoint`."""
        return False

    def adjoint(self, x: Tensor) -> Tensor:
        """The linear map with <rho a, x> = <a, rho* x>, which undoes an isometry: x ``[*b h t d'] -> [*b h t d]``."""
        raise NotImplementedError(f"{type(self).__name__} has no adjoint")

    @property
    def isometric(self) -> bool:
        """Whether it keeps inner products."""
        return True

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Tokens it was evaluated for; None where it is the same for every token."""

    @property
    @abstractmethod
    def features(self) -> int | None:
        """The width d it maps; None where any will do."""

    @property
    @abstractmethod
    def leading(self) -> torch.Size:
        """Axes ``[*b h]`` of its own, which broadcast to those of what it maps."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor it holds."""
        for field in fields(self):  # pyright: ignore[reportArgumentType]  # every final class is a dataclass
            value = getattr(self, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Isometry):
                    yield from item.tensors()
                elif isinstance(item, Tensor):
                    yield item

    def replace(self, tensors: Sequence[Tensor]) -> "Isometry":
        """The same isometry with other tensors, in the order of `tensors`."""
        if not tensors:
            return self
        rest = iter(tensors)

        def replaced(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(replaced(item) for item in value)
            if isinstance(value, Isometry):
                return value.replace([next(rest) for _ in value.tensors()])
            return next(rest) if isinstance(value, Tensor) else value

        values = {field.name: getattr(self, field.name) for field in fields(self)}  # pyright: ignore[reportArgumentType]
        return type(self)(**{name: replaced(value) for name, value in values.items()})

    def check(self, x: Tensor, name: str = "x") -> None:
        """Raise ValueError where x is not ``[*b h t d]`` of this isometry's tokens and features."""
        if x.ndim < 3:
            raise ValueError(f"{name}: expected [*b h t d], got {list(x.shape)}")
        if self.features is not None and self.features != x.shape[-1]:
            raise ValueError(
                f"{name}: expected {self.features} features, got {x.shape[-1]}; build the encoding for this head size"
            )
        if self.length is not None and self.length != x.shape[-2]:
            raise ValueError(
                f"{name}: expected {self.length} tokens, one a position, got {x.shape[-2]} in [*b h t d] {list(x.shape)}; "
                f"evaluate the encoding at the positions of {name}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Map x ``[*b h t d]``."""
        self.check(x)
        if not x.is_floating_point():
            raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
        wide = x if x.dtype.itemsize >= 4 else x.float()
        with full_precision(x.device):
            return self.apply(wide).to(x.dtype)


class Linear(Isometry, ABC):
    """A linear map, which has an adjoint."""

    @property
    def linear(self) -> bool:
        """Yes."""
        return True

    @abstractmethod
    def adjoint(self, x: Tensor) -> Tensor:
        """Map x ``[*b h t d']`` back."""


class Constant(Isometry, ABC):
    """A map that is the same for every token; its tensors are ``[h . .]``."""

    def part(self, place: Place) -> Isometry:
        """Those of the heads."""
        return self.replace([place.of(tensor, -3, None) for tensor in self.tensors()])

    @property
    def length(self) -> None:
        """Any."""


class PerToken(Isometry, ABC):
    """A map whose one tensor has a row for each token."""

    rows: ClassVar[str]  # the tensor
    axis: ClassVar[int]  # of tokens in it, from the end; that of heads comes before it

    def part(self, place: Place) -> Isometry:
        """Their rows."""
        return self.replace([place.of(getattr(self, self.rows), self.axis - 1, self.axis)])

    @property
    def length(self) -> int:
        """Number of rows."""
        return getattr(self, self.rows).shape[self.axis]

    @property
    def leading(self) -> torch.Size:
        """Of the tensor."""
        return getattr(self, self.rows).shape[: self.axis]


@dataclass(frozen=True, eq=False)
class Identity(Constant, Linear):
    """The trivial representation: no position."""

    def apply(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def adjoint(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def part(self, place: Place) -> Isometry:
        """Itself."""
        return self

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return torch.Size()

    @property
    def features(self) -> None:
        """Any."""


@dataclass(frozen=True, eq=False)
class Rotation(PerToken, Linear):
    """Rotation of feature pairs by a table ``[*b h t f 2]`` of cosines and sines; with ``lifted``, x -> (x cos, x sin)."""

    table: Tensor
    lifted: bool = False

    rows, axis = "table", -3

    def apply(self, x: Tensor) -> Tensor:
        """Rotate, or lift."""
        return (lift if self.lifted else rotate)(*self._wide(x))

    def adjoint(self, x: Tensor) -> Tensor:
        """Rotate back, or undo the lift."""
        return (unlift if self.lifted else unrotate)(*self._wide(x))

    def _wide(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, self.table.dtype)
        return x.to(dtype), self.table.to(dtype)

    @property
    def features(self) -> int:
        """Two a frequency; one when lifted."""
        return self.table.shape[-2] * (1 if self.lifted else 2)


@dataclass(frozen=True, eq=False)
class Gather(Linear):
    """A permutation of features by an index ``[*b h t d]``, or ``[h 1 d]`` for every token alike."""

    index: Tensor
    constant: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Gather."""
        return permute(x, self.index)

    def adjoint(self, x: Tensor) -> Tensor:
        """Scatter."""
        return unpermute(x, self.index)

    def part(self, place: Place) -> Isometry:
        """Rows of the index."""
        return Gather(place.of(self.index, -3, None if self.constant else -2), self.constant)

    @property
    def length(self) -> int | None:
        """Rows of the index."""
        return None if self.constant else self.index.shape[-2]

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return self.index.shape[:-2]

    @property
    def features(self) -> int:
        """Places of the index."""
        return self.index.shape[-1]


@dataclass(frozen=True, eq=False)
class Powers(Linear):
    """Powers of permutations by steps ``[*b t c]`` and the cycles ``[4 c h d]`` of each: `Gather` without its index.

    The cycles are, by place in a row of all cycles, the feature there; and by feature the first place of its cycle, its rank
    in it and the cycle's length.
    """

    cycles: Tensor
    steps: Tensor

    def index(self) -> Tensor:
        """The feature that comes to each place: int64 ``[*b h t d]``."""
        feature, first, rank, length = self.cycles
        index = None
        for axis, steps in enumerate(self.steps[..., None, :, :].unbind(-1)):
            place = first[axis, :, None] + (rank[axis, :, None] + steps[..., None]) % length[axis, :, None]
            power = feature[axis, :, None].expand(*place.shape[:-1], -1).gather(-1, place)
            index = power if index is None else index.gather(-1, power)
        assert index is not None
        return index

    def apply(self, x: Tensor) -> Tensor:
        """Gather."""
        return permute(x, self.index())

    def adjoint(self, x: Tensor) -> Tensor:
        """Scatter."""
        return unpermute(x, self.index())

    def part(self, place: Place) -> Isometry:
        """The cycles of the heads, the steps of the tokens."""
        heads = Place((), place.heads, place.tokens)
        return Powers(heads.of(self.cycles, -2, None), place.of(self.steps, None, -2))

    @property
    def length(self) -> int:
        """Number of steps."""
        return self.steps.shape[-2]

    @property
    def leading(self) -> torch.Size:
        """Samples and heads."""
        return torch.Size((*self.steps.shape[:-2], self.cycles.shape[2]))

    @property
    def features(self) -> int:
        """Places of the cycles."""
        return self.cycles.shape[-1]


@dataclass(frozen=True, eq=False)
class Reflection(Constant, Linear):
    """A Householder reflection with unit normal ``[h 1 d]``, the same for every token."""

    normal: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Reflect."""
        return reflect(x, self.normal.to(x.dtype))

    def adjoint(self, x: Tensor) -> Tensor:
        """Reflect."""
        return self.apply(x)

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return self.normal.shape[:-2]

    @property
    def features(self) -> int:
        """The normal's width."""
        return self.normal.shape[-1]


@dataclass(frozen=True, eq=False)
class Matrix(Constant, Linear):
    """A constant orthogonal matrix ``[h d d]``."""

    matrix: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Multiply."""
        return transform(x, self.matrix)

    def adjoint(self, x: Tensor) -> Tensor:
        """Multiply by the transpose."""
        return transform(x, self.matrix.mT)

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return self.matrix.shape[:-2]

    @property
    def features(self) -> int:
        """Columns of the matrix."""
        return self.matrix.shape[-1]


@dataclass(frozen=True, eq=False)
class OnPairs(Constant):
    """A map, the same for every token, of n complex features as pairs (real, imaginary): it acts on either part alike."""

    on: Isometry

    def apply(self, x: Tensor) -> Tensor:
        """Map both parts."""
        return torch.stack([self.on.apply(a) for a in x.unflatten(-1, (-1, 2)).unbind(-1)], -1).flatten(-2)

    def adjoint(self, x: Tensor) -> Tensor:
        """Map both parts back."""
        return torch.stack([self.on.adjoint(a) for a in x.unflatten(-1, (-1, 2)).unbind(-1)], -1).flatten(-2)

    @property
    def linear(self) -> bool:
        """Where the map is."""
        return self.on.linear

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return self.on.leading

    @property
    def features(self) -> int | None:
        """Twice the part's."""
        return None if self.on.features is None else 2 * self.on.features


@dataclass(frozen=True, eq=False)
class Chain(Isometry):
    """One isometry after another: ``second(first(x))``."""

    first: Isometry
    second: Isometry

    def apply(self, x: Tensor) -> Tensor:
        """First, then second."""
        return self.second.apply(self.first.apply(x))

    def adjoint(self, x: Tensor) -> Tensor:
        """Second's, then first's."""
        return self.first.adjoint(self.second.adjoint(x))

    @property
    def linear(self) -> bool:
        """Where both parts are."""
        return self.first.linear and self.second.linear

    def part(self, place: Place) -> Isometry:
        """Both parts'."""
        return Chain(self.first.part(place), self.second.part(place))

    @property
    def isometric(self) -> bool:
        """Where both parts are."""
        return self.first.isometric and self.second.isometric

    @property
    def length(self) -> int | None:
        """Of the part that has one."""
        return self.second.length if self.first.length is None else self.first.length

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return torch.broadcast_shapes(self.first.leading, self.second.leading)

    @property
    def features(self) -> int | None:
        """The width that the first maps."""
        return self.second.features if self.first.features is None else self.first.features


@dataclass(frozen=True, eq=False)
class BlockSum(Isometry):
    """Isometries side by side, each on its own slice of the features."""

    parts: tuple[Isometry, ...]
    widths: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Slice by slice."""
        slices = [part.apply(a) for part, a in zip(self.parts, x.split(self.widths, -1), strict=True)]
        leading = torch.broadcast_shapes(*(a.shape[:-1] for a in slices))  # one part's tables may have heads or batches
        return torch.cat([a.expand(*leading, -1) for a in slices], -1)

    def part(self, place: Place) -> Isometry:
        """Each part's."""
        return BlockSum(tuple(part.part(place) for part in self.parts), self.widths)

    @property
    def length(self) -> int | None:
        """Of the first part that has one."""
        return next((part.length for part in self.parts if part.length is not None), None)

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return torch.broadcast_shapes(*(part.leading for part in self.parts))

    @property
    def features(self) -> int:
        """The sum of the widths."""
        return sum(self.widths)


@dataclass(frozen=True, eq=False)
class Matrices(PerToken, Linear):
    """A matrix a token, ``[*b h t d' d]``: orthogonal for a tree, random for stochastic encodings."""

    matrix: Tensor

    rows, axis = "matrix", -3

    def apply(self, x: Tensor) -> Tensor:
        """Multiply."""
        return transform_tokens(x, self.matrix)

    def adjoint(self, x: Tensor) -> Tensor:
        """Multiply by the transposes."""
        return transform_tokens(x, self.matrix.mT)

    @property
    def features(self) -> int:
        """Columns of a matrix."""
        return self.matrix.shape[-1]


@dataclass(frozen=True, eq=False)
class Scaling(PerToken, Linear):
    """Features times factors ``[*b h t d]``: no isometry."""

    factor: Tensor

    rows, axis = "factor", -2

    def apply(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.factor

    def adjoint(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.factor

    @property
    def isometric(self) -> bool:
        """No."""
        return False

    @property
    def features(self) -> int:
        """Factors of a token."""
        return self.factor.shape[-1]


@dataclass(frozen=True, eq=False)
class Affine(Constant):
    """x -> M (x + shift) with a constant shift ``[h 1 d]`` and matrix M ``[h d' d]``, or without M: no isometry."""

    shift: Tensor
    matrix: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Shift, then multiply."""
        x = x + self.shift.to(x.dtype)
        return x if self.matrix is None else transform(x, self.matrix)

    @property
    def isometric(self) -> bool:
        """No."""
        return False

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return self.shift.shape[:-2]

    @property
    def features(self) -> int:
        """The shift's width."""
        return self.shift.shape[-1]


@dataclass(frozen=True, eq=False)
class Append(Isometry):
    """x -> (first(x), channels), where the channels are ``[*b h t m]``, or what `channels` makes of x: no isometry.

    Two tokens' inner product is that of their features plus that of their channels.
    """

    channels: Tensor | Isometry
    first: Isometry | None = None

    def apply(self, x: Tensor) -> Tensor:
        """First's features, then the channels."""
        channels = self.channels.apply(x) if isinstance(self.channels, Isometry) else self.channels.to(x.dtype)
        parts = (x if self.first is None else self.first.apply(x), channels)
        leading = torch.broadcast_shapes(*(a.shape[:-1] for a in parts))
        return torch.cat([a.expand(*leading, -1) for a in parts], -1)

    def part(self, place: Place) -> Isometry:
        """Their channels."""
        channels = self.channels
        part = channels.part(place) if isinstance(channels, Isometry) else place.of(channels, -3, -2)
        return Append(part, self.first and self.first.part(place))

    @property
    def isometric(self) -> bool:
        """No."""
        return False

    @property
    def length(self) -> int | None:
        """Of the channels."""
        return self.channels.length if isinstance(self.channels, Isometry) else self.channels.shape[-2]

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        own = self.channels.leading if isinstance(self.channels, Isometry) else self.channels.shape[:-2]
        return own if self.first is None else torch.broadcast_shapes(own, self.first.leading)

    @property
    def features(self) -> int | None:
        """Of the first map, or of what makes channels."""
        own = self.channels.features if isinstance(self.channels, Isometry) else None
        return own if self.first is None or self.first.features is None else self.first.features


@dataclass(frozen=True, eq=False)
class Mapped(Isometry):
    """A map, then a feature map phi of its output, for what acts on queries and keys ahead of phi: no isometry."""

    first: Isometry
    phi: Phi

    def apply(self, x: Tensor) -> Tensor:
        """First, then phi."""
        return self.phi(self.first.apply(x))

    def part(self, place: Place) -> Isometry:
        """The first map's."""
        return Mapped(self.first.part(place), self.phi)

    @property
    def isometric(self) -> bool:
        """No."""
        return False

    @property
    def length(self) -> int | None:
        """Of the first map."""
        return self.first.length

    @property
    def leading(self) -> torch.Size:
        """Of its tensors."""
        return self.first.leading

    @property
    def features(self) -> int | None:
        """Of the first map."""
        return self.first.features
