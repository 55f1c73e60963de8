"""Maps of token features: the immutable values that encodings and couplings return.

A map takes features ``[*b h t d] -> [*b h t d']``. It is evaluated once for a tensor of positions and shared by queries,
keys and layers. Encodings return an `Isometry`, which keeps inner products; couplings, which map queries and keys
differently, return other maps too.

A class declares its tensors with their axes; slicing, widths and lengths follow from these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self, dataclass_transform

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.exact import broadcast, describe, full_precision, is_exporting
from isopos.feature_maps import Phi
from isopos.ops import rotate as ops
from isopos.ops.slices import Axes, Slices

_TENSORS = (Tensor, Tensor | None, "Tensor", "Tensor | None")  # annotations of fields


def axes(names: str, *, default: Any = MISSING) -> Any:
    """A field for a tensor of a map, with named axes: *b samples, h heads, t tokens, d mapped features."""
    return field(default=default, metadata={"axes": Axes.named(names)})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(axes,))
class TokenMap(ABC):
    """A map of token features. The output has the input's dtype; sums are at least float32.

    A subclass is a frozen dataclass of tensors, maps, tuples of maps, and options. It declares the axes of each tensor and
    defines `apply`; a linear map also defines `adjoint`.

    Examples:
        >>> class Shift(TokenMap):
        ...     by: Tensor = axes("*b h t d")
        ...
        ...     def apply(self, x: Tensor) -> Tensor:
        ...         return x + self.by
        >>> shift = Shift(torch.arange(6.0).view(1, 3, 2))
        >>> shift.length, shift.features, shift.leading
        (3, 2, torch.Size([1]))
        >>> shift.tokens(1, 3)(torch.zeros(1, 2, 2)).tolist()
        [[[2.0, 3.0], [4.0, 5.0]]]
    """

    isometric: ClassVar[bool] = False
    """Whether it keeps inner products."""

    cancels: ClassVar[bool] = False
    """Whether it adds features of very different magnitudes, which cancel in products."""

    _axes: ClassVar[dict[str, Axes | None]]  # of every field; None for maps and options
    _tensors: ClassVar[tuple[tuple[str, Axes], ...]]  # tensor fields
    _maps: ClassVar[tuple[str, ...]]  # fields with maps or tuples of maps
    _has_adjoint: ClassVar[bool]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        dataclass(frozen=True, eq=False, repr=False)(cls)
        types = {item.name: item.type for item in fields(cls)}  # pyright: ignore[reportArgumentType]
        cls._axes = {item.name: item.metadata.get("axes") for item in fields(cls)}  # pyright: ignore[reportArgumentType]
        cls._tensors = tuple((name, item) for name, item in cls._axes.items() if item is not None)
        cls._maps = tuple(name for name, kind in types.items() if kind not in (*_TENSORS, bool, int))
        cls._has_adjoint = cls.adjoint is not TokenMap.adjoint
        for name, kind in types.items():
            if kind in _TENSORS and cls._axes[name] is None:
                raise TypeError(f'{cls.__name__}.{name}: expected axes, got none; {name}: Tensor = axes("*b h t d")')

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Map x ``[*b h t d]``, which is at least float32."""

    def adjoint(self, x: Tensor) -> Tensor:
        """The adjoint ``[*b h t d'] -> [*b h t d]``, <rho a, x> = <a, rho* x>; for an isometry the inverse."""
        raise NotImplementedError(f"{type(self).__name__} has no adjoint")

    def fused(self, x: Tensor) -> Tensor | None:
        """Map x of any floating dtype in one GPU kernel; None if no kernel serves."""
        return None

    @property
    def linear(self) -> bool:
        """Whether it and all its inner maps have an `adjoint`."""
        return self._has_adjoint and (not self._maps or all(part.linear for part in self._parts()))

    @property
    def needs_float32(self) -> bool:
        """Whether products of its outputs may cancel to far less than their terms, so that it needs float32."""
        return self.cancels or (bool(self._maps) and any(part.needs_float32 for part in self._parts()))

    def part(self, slices: Slices) -> Self:
        """The map restricted to slices of tokens, heads and samples."""
        return self._changed(lambda tensor, dims: dims.part(tensor, slices)) if self._axes else self

    def tokens(self, start: int, stop: int) -> Self:
        """The map restricted to tokens start to stop - 1."""
        return self.part(Slices((), slice(None), slice(start, stop)))

    def last(self, count: int) -> Self:
        """The map restricted to the last `count` tokens; itself if it is constant over tokens."""
        return self if self.length is None else self.tokens(self.length - count, self.length)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the map, then all tensors of its inner maps."""
        for name, _ in self._tensors:
            if isinstance(value := getattr(self, name), Tensor):
                yield value
        for part in self._parts():
            yield from part.tensors()

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """The same map with other tensors, in the order of `tensors`."""
        if not tensors:
            return self
        rest = iter(tensors)
        return self._changed(lambda _, dims: next(rest))

    @property
    def length(self) -> int | None:
        """Number of tokens it was evaluated for; None if it is constant over tokens."""
        return self._size("tokens", "length")

    @property
    def features(self) -> int | None:
        """Number of input features d; None if it maps any number."""
        return self._size("features", "features")

    def _size(self, axis: str, attribute: str) -> int | None:
        """The size of an axis of the first tensor that has it; otherwise the attribute of the first inner map with one."""
        for name, dims in self._tensors:
            if (position := getattr(dims, axis)) is not None and isinstance(value := getattr(self, name), Tensor):
                return value.shape[position]
        sizes = [getattr(part, attribute) for part in self._parts()]
        return next((size for size in sizes if size is not None), None)

    @property
    def numbers_per_token(self) -> int:
        """Numbers stored per token, without numbers shared by all tokens."""
        tensors = ((dims.tokens, getattr(self, name)) for name, dims in self._tensors)
        each = (x.numel() // max(1, x.shape[axis]) for axis, x in tensors if axis is not None and isinstance(x, Tensor))
        return sum(each) + sum(part.numbers_per_token for part in self._parts())

    @property
    def leading(self) -> torch.Size:
        """Axes ``[*b h]`` of the map, which broadcast to the input's axes."""
        values = ((dims, getattr(self, name)) for name, dims in self._tensors)
        shapes = [dims.leading(value) for dims, value in values if isinstance(value, Tensor)]
        shapes += [part.leading for part in self._parts()] if self._maps else []
        try:
            return broadcast(*shapes)
        except RuntimeError:
            got = ", ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"isometry: expected parts of one number of heads, as their leading dimensions [*b heads], got {got}"
            ) from None

    def _parts(self) -> Sequence["TokenMap"]:
        """Its inner maps."""
        parts = []
        for name in self._maps:
            value = getattr(self, name)
            parts += [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, TokenMap)]
        return parts

    def _changed(self, change: Callable[[Tensor, Axes], Tensor]) -> Self:
        """The same map with `change` applied to all tensors, inner maps included, in the order of `tensors`."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(changed(item) for item in value)
            return value._changed(change) if isinstance(value, TokenMap) else value

        values = {name: getattr(self, name) for name in self._axes}
        for name, dims in self._tensors:
            if isinstance(values[name], Tensor):
                values[name] = change(values[name], dims)
        for name in self._maps:
            values[name] = changed(values[name])
        return type(self)(**values)

    def check(self, x: Tensor, name: str = "x", *, features: bool = True) -> None:
        """Raise ValueError unless x is ``[*b h t d]`` with this map's tokens, and with `features` also its features."""
        if x.ndim < 3:
            raise ValueError(f"{name}: expected [*b h t d], got {list(x.shape)}")
        if not (self._tensors or self._maps):
            return  # any number of features
        count, length = self.features, self.length
        if features and count is not None and count != x.shape[-1]:
            raise ValueError(f"{name}: expected {count} features, got {x.shape[-1]}; build the encoding for this head size")
        if length is not None and length != x.shape[-2]:
            remedy = f"evaluate the encoding at the positions of {name}"
            if x.ndim > 3 and x.shape[-3] == length:
                remedy = f"[b t h d] needs {name}.transpose(1, 2), or layout='bthd' of attention"
            raise ValueError(
                f"{name}: expected {length} tokens, one per position, got {x.shape[-2]} in [*b h t d] {list(x.shape)}; "
                f"{remedy}"
            )

    def __repr__(self) -> str:
        return describe(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x ``[*b h t d]``."""
        self.check(x)
        if not x.is_floating_point():
            raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
        if len(leading := self.leading) and x.shape[-3] not in (1, leading[-1]) and leading[-1] != 1:
            raise ValueError(
                f"x: expected {leading[-1]} heads, one per table, got {x.shape[-3]}; softmax_attention and "
                "linear_attention of isopos share tables among fewer heads of keys"
            )
        if (out := self.fused(x)) is not None:
            return out
        promoted = x if x.dtype.itemsize >= 4 else x.float()
        with full_precision(x.device):
            return self.apply(promoted).to(x.dtype)


class Isometry(TokenMap, ABC):
    """A map that keeps inner products."""

    isometric = True


class Identity(Isometry):
    """The trivial representation: no positions."""

    def apply(self, x: Tensor) -> Tensor:
        return x

    def adjoint(self, x: Tensor) -> Tensor:
        return x


class Rotation(Isometry):
    """Rotation of feature pairs by a table ``[*b h t f 2]`` of cosines and sines; with ``lifted``, x -> (x cos, x sin)."""

    table: Tensor = axes("*b h t f 2")
    lifted: bool = False

    def apply(self, x: Tensor) -> Tensor:
        return (ops.lift if self.lifted else ops.rotate)(*self._promoted(x))

    def adjoint(self, x: Tensor) -> Tensor:
        return (ops.unlift if self.lifted else ops.unrotate)(*self._promoted(x))

    def fused(self, x: Tensor) -> Tensor | None:
        return ops.rotate_on_gpu(x, self.table, lifted=self.lifted)

    def _promoted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, self.table.dtype)
        return x.to(dtype), self.table.to(dtype)

    @property
    def features(self) -> int:
        """Two per frequency; one if lifted."""
        return self.table.shape[-2] * (1 if self.lifted else 2)


class Gather(Isometry):
    """A permutation of features by an index ``[*b h t d]``, or ``[h 1 d]`` for all tokens.

    The index has any integer dtype; compiled sums read uint8, as returned by `isopos.ops.rotate.narrow_index`. With
    ``halves`` it is the index of `isopos.bases.OddEven`, which moves pairs (i, i + d/2) to (2i, 2i + 1).
    """

    index: Tensor = axes("*b h t d")
    constant: bool = False
    halves: bool = False

    def apply(self, x: Tensor) -> Tensor:
        return ops.permute(x, self.index)

    def adjoint(self, x: Tensor) -> Tensor:
        return ops.unpermute(x, self.index)

    @property
    def length(self) -> int | None:
        return None if self.constant else self.index.shape[-2]


class Reflection(Isometry):
    """A Householder reflection with unit normal ``[h 1 d]``, constant over tokens."""

    normal: Tensor = axes("h 1 d")

    def apply(self, x: Tensor) -> Tensor:
        return ops.reflect(x, self.normal.to(x.dtype))

    def adjoint(self, x: Tensor) -> Tensor:
        return self.apply(x)


class _Constant(TokenMap, ABC):
    matrix: Tensor = axes("h e d")

    def apply(self, x: Tensor) -> Tensor:
        return ops.transform(x, self.matrix)

    def adjoint(self, x: Tensor) -> Tensor:
        return ops.transform(x, self.matrix.mT)


class Matrix(_Constant, Isometry):
    """A constant orthogonal matrix ``[h d d]``, or ``[h e d]`` with orthonormal columns."""


class LinearMap(_Constant):
    """Any constant matrix ``[h e d]``."""


class Plane(Isometry):
    """A rotation in the plane of orthonormal vectors u and v ``[h 1 d]``, from v towards u, by a table of angles.

    x + (cos - 1) (u u^T + v v^T) x + sin (u v^T - v u^T) x: two inner products per token, and no d x d matrix.
    """

    u: Tensor = axes("h 1 d")
    v: Tensor = axes("h 1 d")
    table: Tensor = axes("*b h t f 2")  # one angle: f = 1

    def apply(self, x: Tensor) -> Tensor:
        return self._rotated(x, 1)

    def adjoint(self, x: Tensor) -> Tensor:
        return self._rotated(x, -1)

    def _rotated(self, x: Tensor, sign: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.table.dtype)
        x, u, v = x.to(dtype), self.u.to(dtype), self.v.to(dtype)
        cos, sin = self.table.to(dtype).unbind(-1)
        a, b, cos1, sin = (x * u).sum(-1, keepdim=True), (x * v).sum(-1, keepdim=True), cos - 1, sign * sin
        return x + (cos1 * a + sin * b) * u + (cos1 * b - sin * a) * v


class OnPairs(Isometry):
    """A map, constant over tokens, of n complex features stored as pairs (real, imaginary); it maps both parts alike."""

    on: Isometry

    def apply(self, x: Tensor) -> Tensor:
        return torch.stack([self.on.apply(a) for a in x.unflatten(-1, (-1, 2)).unbind(-1)], -1).flatten(-2)

    def adjoint(self, x: Tensor) -> Tensor:
        return torch.stack([self.on.adjoint(a) for a in x.unflatten(-1, (-1, 2)).unbind(-1)], -1).flatten(-2)

    @property
    def features(self) -> int | None:
        """Twice the features of the inner map."""
        return None if self.on.features is None else 2 * self.on.features


class _SideBySide(TokenMap, ABC):
    parts: tuple[TokenMap, ...]
    widths: tuple[int, ...]
    returned: tuple[int, ...] = ()  # output widths of the parts, if they differ

    def apply(self, x: Tensor) -> Tensor:
        return _join([part.apply(a) for part, a in zip(self.parts, x.split(self.widths, -1), strict=True)])

    def adjoint(self, x: Tensor) -> Tensor:
        widths = self.returned or self.widths
        return _join([part.adjoint(a) for part, a in zip(self.parts, x.split(widths, -1), strict=True)])

    @property
    def features(self) -> int:
        return sum(self.widths)


class BlockSum(_SideBySide, Isometry):
    """Isometries side by side, each on a separate slice of the features."""

    def apply(self, x: Tensor) -> Tensor:
        match self.parts:
            case Rotation(lifted=False) as rotation, Identity():
                out = ops.exported(x, rotation.table)
                return super().apply(x) if out is None else out
        return super().apply(x)

    def fused(self, x: Tensor) -> Tensor | None:
        partial = len(self.parts) == 2 and isinstance(self.parts[1], Identity)
        return self.parts[0].fused(x) if partial else None  # the kernel copies the remaining features


class Blocks(_SideBySide):
    """Maps side by side, each on a separate slice of the features."""


class _Composition(TokenMap, ABC):
    first: TokenMap
    second: TokenMap

    def apply(self, x: Tensor) -> Tensor:
        return self.second.apply(self.first.apply(x))

    def adjoint(self, x: Tensor) -> Tensor:
        return self.first.adjoint(self.second.adjoint(x))


class Chain(_Composition, Isometry):
    """Composition of isometries: ``second(first(x))``."""

    def fused(self, x: Tensor) -> Tensor | None:
        match self.first, self.second:
            case Gather(halves=True), Rotation(lifted=False) as rotation if self.first.features == rotation.features:
                return ops.rotate_on_gpu(x, rotation.table, halves=True)
        return None


class Composed(_Composition):
    """Composition of maps: ``second(first(x))``."""


class _TokenMatrices(TokenMap, ABC):
    matrix: Tensor = axes("*b h t e d")

    def apply(self, x: Tensor) -> Tensor:
        return ops.transform_tokens(x, self.matrix)

    def adjoint(self, x: Tensor) -> Tensor:
        return ops.transform_tokens(x, self.matrix.mT)


class Operators(_TokenMatrices, Isometry):
    """One orthogonal matrix per token, ``[*b h t d d]``, for instance of trees."""


class Matrices(_TokenMatrices):
    """One matrix per token, ``[*b h t e d]``, for instance the random ones of stochastic encodings."""


class Scaling(TokenMap):
    """Features multiplied by factors ``[*b h t d]``."""

    factor: Tensor = axes("*b h t d")

    def apply(self, x: Tensor) -> Tensor:
        return x * self.factor

    def adjoint(self, x: Tensor) -> Tensor:
        return x * self.factor


class Factor(TokenMap):
    """All features multiplied by one number ``[h 1 1]``, constant over tokens."""

    number: Tensor = axes("h 1 1")

    def apply(self, x: Tensor) -> Tensor:
        return x * self.number.to(x.dtype)

    def adjoint(self, x: Tensor) -> Tensor:
        return self.apply(x)


class Shear(TokenMap):
    """exp(s N) with one step s per token ``[*b h t 1]``.

    N moves each of `order` equal groups of features to the previous group; with `transposed` it is N^T, which moves each
    group to the next one. N consists of Jordan blocks of this order.
    """

    steps: Tensor = axes("*b h t 1")
    order: int
    width: int  # features of a group
    transposed: bool = False

    cancels = True

    @property
    def features(self) -> int:
        """All groups' features."""
        return self.order * self.width

    def apply(self, x: Tensor) -> Tensor:
        return self._sheared(x, self.transposed)

    def adjoint(self, x: Tensor) -> Tensor:
        return self._sheared(x, not self.transposed)

    def _sheared(self, x: Tensor, transposed: bool) -> Tensor:
        x = term = x.to(torch.promote_types(x.dtype, self.steps.dtype))
        width = self.width
        for n in range(1, self.order):  # N^order = 0
            moved = F.pad(term[..., :-width], (width, 0)) if transposed else F.pad(term[..., width:], (0, width))
            term = moved * (self.steps / n)
            x = x + term
        return x


class Tiles(TokenMap):
    """One small matrix per token ``[*b h t n n]``, applied to each n consecutive features."""

    matrix: Tensor = axes("*b h t n n")

    cancels = True

    def apply(self, x: Tensor) -> Tensor:
        return self._tiled(x, self.matrix)

    def adjoint(self, x: Tensor) -> Tensor:
        return self._tiled(x, self.matrix.mT)

    def _tiled(self, x: Tensor, matrix: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, matrix.dtype)
        rows = x.to(dtype).unflatten(-1, (-1, matrix.shape[-1]))
        if is_exporting():  # ONNX's Einsum does not broadcast
            return (rows @ matrix.to(dtype).mT).flatten(-2)
        return torch.einsum("...ij,...rj->...ri", matrix.to(dtype), rows).flatten(-2)


class Adjoint(TokenMap):
    """The adjoint of a linear map that keeps the number of features."""

    of: TokenMap

    def apply(self, x: Tensor) -> Tensor:
        return self.of.adjoint(x)

    def adjoint(self, x: Tensor) -> Tensor:
        return self.of.apply(x)


class Affine(TokenMap):
    """x -> M (x + shift) with a constant shift ``[h 1 d]`` and matrix M ``[h e d]``, or without M."""

    shift: Tensor = axes("h 1 d")
    matrix: Tensor | None = axes("h e d", default=None)

    def apply(self, x: Tensor) -> Tensor:
        x = x + self.shift.to(x.dtype)
        return x if self.matrix is None else ops.transform(x, self.matrix)


class Append(TokenMap):
    """x -> (first(x), channels), where channels are a tensor ``[*b h t m]`` or a map of x.

    The inner product of two tokens is the sum over their features and their channels.
    """

    channels: Tensor | TokenMap = axes("*b h t m")
    first: TokenMap | None = None

    def apply(self, x: Tensor) -> Tensor:
        channels = self.channels.apply(x) if isinstance(self.channels, TokenMap) else self.channels.to(x.dtype)
        return _join([x if self.first is None else self.first.apply(x), channels])


class Mapped(TokenMap):
    """A map followed by a feature map phi, for couplings that act before phi."""

    first: TokenMap
    phi: Phi

    def apply(self, x: Tensor) -> Tensor:
        return self.phi(self.first.apply(x))


def pair(value: Any) -> tuple[Any, Any]:
    """The values of queries and keys, such as maps: a pair, or one value for both."""
    return value if isinstance(value, tuple) else (value, value)


def composed(first: TokenMap, second: TokenMap) -> TokenMap:
    """``second(first(x))``."""
    return Chain(first, second) if isinstance(first, Isometry) and isinstance(second, Isometry) else Composed(first, second)


def side_by_side(parts: tuple[TokenMap, ...], widths: tuple[int, ...], returned: tuple[int, ...] = ()) -> TokenMap:
    """Maps on separate slices of the features."""
    kind: Any = BlockSum if all(isinstance(part, Isometry) for part in parts) else Blocks
    return kind(parts, widths, returned)


def rescaled(part: TokenMap, factor: float) -> TokenMap:
    """A map with its output multiplied by a factor; tables are scaled where possible.

    Examples:
        >>> rescaled(Rotation(torch.tensor([[[[1.0, 0.0]]]])), 3.0)(torch.ones(1, 1, 2)).tolist()
        [[[3.0, 3.0]]]
    """
    match part:
        case Rotation():
            return Rotation(part.table * factor, part.lifted)
        case Chain():
            return composed(part.first, rescaled(part.second, factor))
    device = next((tensor.device for tensor in part.tensors()), None)
    return Composed(part, Factor(torch.full((1, 1, 1), factor, dtype=torch.float64, device=device)))


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate features of parts ``[*b h t .]``, which may lack axes of heads or samples."""
    leading = torch.broadcast_shapes(*(a.shape[:-1] for a in parts))
    return torch.cat([a.expand(*leading, -1) for a in parts], -1)
