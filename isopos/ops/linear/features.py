"""What is summed up, as data: inputs, what makes features of them, decays and the form of the denominator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.feature_maps import FeatureMap, Phi, identity
from isopos.ops.place import Place
from isopos.ops.rotate import lift, permute, reflect, rotate, unlift, unpermute, unrotate

Decays = tuple[Tensor, Tensor] | None


class Buffers:
    """Memory by name and shape that is used again; `shared` is that of several such sets."""

    def __init__(self, like: Tensor, dtype: torch.dtype, shared: "Buffers | None" = None):
        self.like, self.dtype, self.shared = like, dtype, self if shared is None else shared
        self.known: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A buffer that nobody else uses, with whatever was in it."""
        buffer = self.known.get((name, *shape))
        if buffer is None:
            buffer = self.known[(name, *shape)] = torch.empty(shape, dtype=self.dtype, device=self.like.device)
        return buffer


KINDS = {
    "rotation": (rotate, unrotate),
    "lift": (lift, unlift),
    "gather": (permute, unpermute),
    "reflection": (reflect, reflect),
}


class Step(NamedTuple):
    """A linear map of features in closed form.

    Args:
        kind: "rotation" of pairs or "lift" by a table ``[*b h t f 2]``, "gather" by an index ``[*b h t d]``, or "reflection"
            by a normal ``[h 1 d]``: see `isopos.ops.rotate`.
        tensor: The table, index or normal.
        heads: Its axis of heads, from the end.
        tokens: Its axis of tokens; None where all tokens share it.
    """

    kind: str
    tensor: Tensor
    heads: int
    tokens: int | None

    @property
    def width(self) -> int:
        """Features that it maps."""
        shape = self.tensor.shape
        return 2 * shape[-2] if self.kind == "rotation" else shape[-2] if self.kind == "lift" else shape[-1]

    def __call__(self, x: Tensor, adjoint: bool = False) -> Tensor:
        """The map of x ``[*b h t d]``, or its adjoint."""
        function, tensor = KINDS[self.kind][adjoint], self.tensor
        if self.kind == "reflection":
            tensor = tensor.to(x.dtype)
        elif self.kind != "gather":
            dtype = torch.promote_types(x.dtype, tensor.dtype)
            x, tensor = x.to(dtype), tensor.to(dtype)
        return function(x, tensor)


@dataclass(frozen=True, eq=False)
class Opaque:
    """A map of features in no closed form: functions of its tensors, which backends other than PyTorch's see from outside.

    Args:
        tensors: All that gradients may reach.
        apply: Of features ``[*b h t d]`` and tensors.
        part: The tensors for some tokens of some heads and samples.
        adjoint: Of what `apply` returns and tensors, where it is linear.
    """

    tensors: tuple[Tensor, ...]
    apply: Callable[[Tensor, Sequence[Tensor]], Tensor]
    part: Callable[[Sequence[Tensor], Place], tuple[Tensor, ...]]
    adjoint: Callable[[Tensor, Sequence[Tensor]], Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Features:
    """What makes features of an input: phi, then a map; zero where a mask is False. By default the input is ready.

    It runs again in the backward pass, a chunk group at a time; gradients reach the input and `tensors`.

    Args:
        phi: The feature map, of each token alone.
        map: After it: steps in closed form, or an opaque one.
        mask: Which tokens take part, bool ``[*b 1 t 1]``.
        own: Whether the denominator takes phi's own features, without the map: a second tensor of features.
        dtype: Of features, float32 or float64; None for that of the input.
    """

    phi: Phi = identity
    map: tuple[Step, ...] | Opaque = ()
    mask: Tensor | None = None
    own: bool = False
    dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of the map and the mask, of all tokens."""
        own = self.map.tensors if isinstance(self.map, Opaque) else tuple(step.tensor for step in self.map)
        return own if self.mask is None else (*own, self.mask)

    @property
    def direct(self) -> bool:
        """Whether `write` and `adjoint` serve it, without a graph."""
        direct = isinstance(self.phi, FeatureMap) and self.phi.write is not None and self.phi.slope is not None
        return direct and not (isinstance(self.map, Opaque) and self.map.adjoint is None)

    def ready(self, x: Tensor) -> bool:
        """Whether the features of x are x."""
        return self.phi is identity and self.map == () and self.mask is None and self.dtype in (None, x.dtype)

    def replace(self, tensors: Sequence[Tensor]) -> "Features":
        """The same with other tensors, in the order of `tensors`."""
        mask = None if self.mask is None else tensors[-1]
        if isinstance(self.map, Opaque):
            own = replace(self.map, tensors=tuple(tensors[: len(self.map.tensors)]))
        else:
            own = tuple(step._replace(tensor=tensor) for step, tensor in zip(self.map, tensors, strict=False))
        return Features(self.phi, own, mask, self.own, self.dtype)

    def part(self, place: Place) -> "Features":
        """Those of some tokens of some heads and samples."""
        if not self.map and self.mask is None:
            return self
        if isinstance(self.map, Opaque):
            own = self.map.part(self.map.tensors, place)
        else:
            own = tuple(place.of(step.tensor, step.heads, step.tokens) for step in self.map)
        return self.replace(own if self.mask is None else (*own, place.of(self.mask, -3, -2)))

    def without_idle_mask(self) -> "Features":
        """Without a mask where it lets every token take part; on a CPU, where looking costs little."""
        if self.mask is None or self.mask.device.type != "cpu" or not self.mask.all():
            return self
        return replace(self, mask=None)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Features of tokens x ``[*b h t .]``, and phi's own where the denominator takes them."""
        x = x if self.mask is None else torch.where(self.mask, x, 0)  # NaN of a masked token must not reach gradients either
        plain = self.phi(x if self.dtype is None else x.to(self.dtype))
        if not isinstance(self.map, Opaque) and self.map and self.map[0].width != plain.shape[-1]:
            raise ValueError(
                f"isometry: expected one of {plain.shape[-1]} features, as many as the feature map returns, "
                f"got one of {self.map[0].width}; build the encoding for this head size"
            )
        out = (self._mapped(plain), plain)[: 1 + self.own]
        return out if self.mask is None else tuple(torch.where(self.mask, y, 0) for y in out)

    def write(self, x: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """The same without a graph, where it is direct: contiguous, in buffers or memory of their own."""
        if self.ready(x):
            return (x.contiguous(),)
        assert isinstance(self.phi, FeatureMap)
        assert self.phi.write is not None
        plain = buffers("plain", *x.shape)
        self.phi.write(x.to(self.dtype or x.dtype), plain, buffers.shared("scratch", *x.shape))
        self._drop(plain)
        return (self._mapped(plain), plain)[: 1 + self.own]

    def adjoint(self, x: Tensor, grads: Sequence[Tensor], buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        """Two factors of the gradient of x, or one, from gradients of its features, which it may overwrite.

        The buffers hold what `write` left there.
        """
        if self.ready(x):
            return grads[0], None
        assert isinstance(self.phi, FeatureMap)
        assert self.phi.slope is not None
        grad = grads[0]
        if isinstance(self.map, Opaque):
            assert self.map.adjoint is not None
            grad = self.map.adjoint(grad, self.map.tensors)
        else:
            for step in reversed(self.map):
                grad = step(grad, adjoint=True)
        grad = grad.to(self.dtype or x.dtype)
        for other in grads[1:]:
            grad = grad.add_(other)
        self._drop(grad)
        return grad, None if self.phi is identity else self.phi.slope(buffers("plain", *grad.shape))

    def _mapped(self, plain: Tensor) -> Tensor:
        """The map of phi's features, in their dtype."""
        if isinstance(self.map, Opaque):
            return self.map.apply(plain, self.map.tensors).to(plain.dtype)
        x = plain
        for step in self.map:
            x = step(x)
        return x.to(plain.dtype)

    def _drop(self, x: Tensor) -> None:
        """Zero where tokens take no part, in place, whatever was there."""
        if self.mask is not None:
            dropped = ~self.mask[..., 0, :, 0].expand(*x.shape[:-3], x.shape[-2])
            x.movedim(-3, -1)[dropped] = 0  # faster than masked_fill where few are


READY = Features()
ALL_READY = (READY, READY, READY)


def with_ones(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values with a column of ones; zero where a mask is False."""
    values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
    return values if mask is None else torch.where(mask, values, 0)


@dataclass(frozen=True, eq=False)
class Stream:
    """The tokens before those of `Sums`, of a causal stream.

    Args:
        sums: Of k v^T ``[*b h d e]``; a denominator is one more column, or where it has features of its own their sum
            ``[*b h d 1]``. Empty at the start.
        before: Log decay ``[*b h]`` of the last token; None where there is no decay, or no token.
        in_place: Whether a step of one token may write over the sums.
    """

    sums: tuple[Tensor, ...] = ()
    before: Tensor | None = None
    in_place: bool = False


@dataclass(frozen=True, eq=False)
class Sums:
    """A problem of linear attention, checked and complete: what a backend serves or refuses.

    Args:
        q: Inputs of queries ``[*b h t .]``.
        k: Inputs of keys ``[*b h s .]``, with leading dimensions as q, but for streams.
        v: Inputs of values ``[*b h s e]``.
        features: What makes features of q, k and v; those of queries and keys have two where the denominator has its own.
        g: Log decays of queries and keys, ``[*b h t]`` or broadcastable to it; without causal as many as keys.
        causal: Sum over keys up to the query's own index; the last query is aligned with the last key.
        denominator: What becomes of the sum of the weights: None for none, "column" for a last column, "divide" to divide
            by it.
        stream: The tokens before, which are summed up, too.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    features: tuple[Features, Features, Features] = ALL_READY
    g: Decays = None
    causal: bool = True
    denominator: str | None = None
    stream: Stream | None = None

    @property
    def notes(self) -> dict[str, Any]:
        """What a backend found out when it was asked, for when it runs."""
        return self.__dict__.setdefault("notes", {})

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, inputs first."""
        after = () if self.stream is None else self.stream.sums
        return (*self.inputs, *(self.g or ()), *(tensor for own in self.features for tensor in own.tensors), *after)

    @property
    def ready(self) -> bool:
        """Whether all features are the inputs."""
        return all(own.ready(x) for own, x in zip(self.features, self.inputs, strict=True))

    @property
    def dtype(self) -> torch.dtype:
        """Of sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def lifted(self) -> "Sums":
        """With an axis of samples."""
        if self.q.ndim > 3 or self.stream is not None:
            return self
        return replace(self, q=self.q[None], k=self.k[None], v=self.v[None])

    def made(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """All features, with a graph."""
        queries, keys, (values,) = (own(x) for own, x in zip(self.features, self.inputs, strict=True))
        return queries, keys, values
