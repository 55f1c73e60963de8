"""What is summed up, as data: inputs, what makes features of them, decays and the form of the denominator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from isopos.feature_maps import FeatureMap, Phi, identity
from isopos.ops.slices import ALL, Slices

Decays = tuple[Tensor, Tensor] | None


class Buffers:
    """Memory by name and shape that is used again; `shared` is that of several such sets."""

    def __init__(self, like: Tensor, dtype: torch.dtype, shared: "Buffers | None" = None):
        self.like, self.dtype, self._shared = like, dtype, shared  # None for itself: a cycle would outlive its call
        self.known: dict[tuple[object, ...], Tensor] = {}

    @property
    def shared(self) -> "Buffers":
        """That of several such sets, or itself."""
        return self if self._shared is None else self._shared

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A buffer that nobody else uses, with whatever was in it."""
        buffer = self.known.get((name, *shape))
        if buffer is None:
            buffer = self.known[(name, *shape)] = torch.empty(shape, dtype=self.dtype, device=self.like.device)
        return buffer


class Map(Protocol):
    """A map of features ``[*b h t d]`` that are float32 or wider, as the values of `isopos.maps` are."""

    @property
    def features(self) -> int | None:
        """The width that it maps; None where any will do."""
        ...

    @property
    def linear(self) -> bool:
        """Whether it has an adjoint."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """The map of x."""
        ...

    def adjoint(self, x: Tensor) -> Tensor:
        """Its adjoint."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """All that gradients may reach."""
        ...

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """The same with other tensors, in that order; some may be left over."""
        ...

    def part(self, slices: Slices) -> Self:
        """That for some tokens of some heads and samples."""
        ...


class Features(NamedTuple):
    """What makes features of an input: phi, then a map; zero where a mask is False.

    It runs again in the backward pass, a chunk group at a time; gradients reach the input and `tensors`.

    Args:
        phi: The feature map, of each token alone.
        map: After it, or None.
        kinds: What each tensor of the map does, one after another: a "rotation" or a "lift" by a table ``[*b h t f 2]``, a
            "gather" by an index ``[*b h t d]``, a "reflection" by a normal ``[h 1 d]`` (see `isopos.ops.rotate`). None
            where the map has no such closed form.
        mask: Which tokens take part, bool ``[*b 1 t 1]``.
        own: Whether the denominator takes phi's own features, without the map: a second tensor of features.
        dtype: Of features, float32 or float64; None for that of the input.
    """

    phi: Phi  # no default: PyTorch 2.11 cannot trace one
    map: Map | None = None
    kinds: tuple[str, ...] | None = ()
    mask: Tensor | None = None
    own: bool = False
    dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of the map and the mask, of all tokens."""
        own = () if self.map is None else self.map.tensors()
        return tuple(own) if self.mask is None else (*own, self.mask)

    @property
    def direct(self) -> bool:
        """Whether `write` and `adjoint` serve it, without a graph."""
        direct = isinstance(self.phi, FeatureMap) and self.phi.write is not None and self.phi.derivative is not None
        return direct and (self.map is None or self.map.linear)

    def table(self, needs: Sequence[bool]) -> int | None:
        """The place in `tensors` of the table of a rotation or a lift, where no other needs a gradient."""
        found, kinds = [n for n, need in enumerate(needs) if need], self.kinds or ()
        known = len(found) == 1 and self.direct and found[0] < len(kinds) and kinds[found[0]] in ("rotation", "lift")
        return found[0] if known else None

    def closed(self) -> tuple[str, Tensor | None, Tensor | None] | None:
        """A map of at most one reflection, then at most one table: its kind ("none" without), the table, and the normal.

        None where it is another map. Which phi, widths and dtypes it serves is a kernel's own matter.
        """
        if self.kinds is None:
            return None
        last, table, normal = "none", None, None
        for kind, tensor in zip(self.kinds, () if self.map is None else self.map.tensors(), strict=True):
            if table is not None or (kind == "reflection" and normal is not None):
                return None
            if kind == "reflection":
                normal = tensor
            else:
                last, table = kind, tensor
        return last, table, normal

    def ready(self, x: Tensor) -> bool:
        """Whether the features of x are x."""
        return self.phi is identity and self.map is None and self.mask is None and self.dtype in (None, x.dtype)

    def replace(self, tensors: Sequence[Tensor]) -> "Features":
        """The same with other tensors, in the order of `tensors`."""
        own, mask = self.map, None if self.mask is None else tensors[-1]
        return self._replace(map=None if own is None else own.replace(tensors), mask=mask)

    def part(self, slices: Slices) -> "Features":
        """Those of some tokens of some heads and samples."""
        if slices is ALL:
            return self
        own = None if self.map is None else self.map.part(slices)
        return self._replace(map=own, mask=None if self.mask is None else slices.of(self.mask, -3, -2))

    def without_idle_mask(self) -> "Features":
        """Without a mask where it lets every token take part; on a CPU, where looking costs little."""
        if self.mask is None or self.mask.device.type != "cpu" or not self.mask.all():
            return self
        return self._replace(mask=None)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Features of tokens x ``[*b h t .]``, and phi's own where the denominator takes them."""
        x = x if self.mask is None else torch.where(self.mask, x, 0)  # NaN of a masked token must not reach gradients either
        plain = self.phi(x if self.dtype is None else x.to(self.dtype))
        if self.map is not None and self.map.features not in (None, plain.shape[-1]):
            raise ValueError(
                f"isometry: expected one of {plain.shape[-1]} features, as many as the feature map returns, "
                f"got one of {self.map.features}; build the encoding for this head size"
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
        assert self.phi.derivative is not None
        grad = (grads[0] if self.map is None else self.map.adjoint(grads[0])).to(self.dtype or x.dtype)
        for other in grads[1:]:
            grad = grad.add_(other)
        self._drop(grad)
        return grad, None if self.phi is identity else self.phi.derivative(x, buffers("plain", *grad.shape))

    def _mapped(self, plain: Tensor) -> Tensor:
        return plain if self.map is None else self.map.apply(plain).to(plain.dtype)

    def _drop(self, x: Tensor) -> None:
        """Zero where tokens take no part, in place, whatever was there."""
        if self.mask is not None:
            dropped = ~self.mask[..., 0, :, 0].expand(*x.shape[:-3], x.shape[-2])
            x.movedim(-3, -1)[dropped] = 0  # faster than masked_fill where few are


READY = Features(identity)
ALL_READY = (READY, READY, READY)


def with_ones(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values with a column of ones; zero where a mask is False."""
    values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
    return values if mask is None else torch.where(mask, values, 0)


@dataclass(frozen=True, eq=False)
class Past:
    """The tokens before those of `Sums`, of a causal stream.

    Args:
        sums: Of k v^T ``[*b h d e]``; a denominator is one more column, or where it has features of its own their sum
            ``[*b h d 1]``. Empty at the start.
        before: Log decay ``[*b h]`` of the last token; None where there is no decay, or no token.
    """

    sums: tuple[Tensor, ...] = ()
    before: Tensor | None = None


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

    Attributes:
        notes: What a backend found out when it was asked, for when it runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    features: tuple[Features, Features, Features]
    g: Decays = None
    causal: bool = True
    denominator: str | None = None
    stream: Past | None = None
    notes: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

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
    def products(self) -> bool:
        """Whether two products of matrices are all there is to do."""
        return not self.causal and self.g is None and self.denominator is None and self.ready

    @property
    def across(self) -> Tensor | None:
        """What the sums of a stream weigh at the next token, contiguous float32 ``[*b h]``; None without a decay."""
        if self.g is None or self.stream is None or self.stream.before is None:
            return None
        weight = (self.g[1][..., 0] - self.stream.before).exp().to(torch.float32)
        return weight.expand(self.v.shape[:-2]).contiguous()

    @property
    def dtype(self) -> torch.dtype:
        """Of sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def lifted(self) -> "Sums":
        """With an axis of samples."""
        if self.q.ndim > 3 or self.stream is not None:
            return self
        return replace(self, q=self.q[None], k=self.k[None], v=self.v[None])

    def triples(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Features of queries and keys, and values, with a graph; the sums of all, side by side, end in the denominator."""
        queries, keys, values = self.made()
        if self.denominator is not None:
            values = with_ones(values, self.features[2].mask)
        parts = [values] if len(queries) == 1 else values.split((values.shape[-1] - 1, 1), -1)
        return list(zip(queries, keys, parts, strict=True))

    def made(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """All features, with a graph."""
        if self.ready:
            return (self.q,), (self.k,), self.v
        queries, keys, (values,) = (own(x) for own, x in zip(self.features, self.inputs, strict=True))
        return queries, keys, values
