"""Problems of linear attention as data: inputs, their feature maps, decays, and the form of the denominator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from isopos.feature_maps import FeatureMap, Phi, identity
from isopos.ops.slices import ALL, Slices

Decays = tuple[Tensor, Tensor] | None


class Buffers:
    """Reused memory by name and shape; `shared` are the buffers shared by several such sets."""

    def __init__(self, like: Tensor, dtype: torch.dtype, shared: "Buffers | None" = None):
        self.like, self.dtype, self._shared = like, dtype, shared  # None for itself: a cycle would outlive its call
        self.known: dict[tuple[object, ...], Tensor] = {}

    @property
    def shared(self) -> "Buffers":
        """The buffers shared by several such sets; by default these."""
        return self if self._shared is None else self._shared

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The buffer of this name and shape, with its old contents."""
        buffer = self.known.get((name, *shape))
        if buffer is None:
            buffer = self.known[(name, *shape)] = torch.empty(shape, dtype=self.dtype, device=self.like.device)
        return buffer


class Map(Protocol):
    """A map of features ``[*b h t d]``, float32 or float64, such as the values of `isopos.maps`."""

    @property
    def features(self) -> int | None:
        """Number of input features; None if it maps any number."""
        ...

    @property
    def linear(self) -> bool:
        """Whether it has an adjoint."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """Map x."""
        ...

    def adjoint(self, x: Tensor) -> Tensor:
        """Map x by the adjoint."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """All tensors that may need gradients."""
        ...

    def replace(self, tensors: Sequence[Tensor]) -> Self:
        """The same map with other tensors, in the order of `tensors`; surplus ones are ignored."""
        ...

    def part(self, slices: Slices) -> Self:
        """The map restricted to slices of tokens, heads and samples."""
        ...


class Features(NamedTuple):
    """How features are computed from an input: phi, then a map of positions; zero where a mask is False.

    The backward pass computes features again, one chunk group at a time; gradients reach the input and `tensors`.

    Args:
        phi: The feature map, applied to each token separately.
        map: The map of positions after phi, or None.
        kinds: Operations of the map in order, one per tensor: a "rotation" or a "lift" by a table ``[*b h t f 2]``, a
            "gather" by an index ``[*b h t d]``, a "reflection" by a normal ``[h 1 d]`` (see `isopos.ops.rotate`). None
            if the map has no such closed form.
        mask: Tokens that take part, bool ``[*b 1 t 1]``.
        unrotated: Whether phi(x) without the map is returned, too, as features for a plain denominator.
        dtype: Dtype of features, float32 or float64; None for the dtype of the input.
    """

    phi: Phi  # no default: PyTorch 2.11 cannot trace one
    map: Map | None = None
    kinds: tuple[str, ...] | None = ()
    mask: Tensor | None = None
    unrotated: bool = False
    dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the map, then the mask."""
        of_map = () if self.map is None else self.map.tensors()
        return tuple(of_map) if self.mask is None else (*of_map, self.mask)

    @property
    def direct(self) -> bool:
        """Whether `write` and `adjoint` can compute it without a graph."""
        direct = isinstance(self.phi, FeatureMap) and self.phi.write is not None and self.phi.derivative is not None
        return direct and (self.map is None or self.map.linear)

    def table(self, needs: Sequence[bool]) -> int | None:
        """Index in `tensors` of the table of a rotation or a lift, if it alone needs a gradient; otherwise None."""
        needed, kinds = [n for n, need in enumerate(needs) if need], self.kinds or ()
        fused = len(needed) == 1 and self.direct and needed[0] < len(kinds) and kinds[needed[0]] in ("rotation", "lift")
        return needed[0] if fused else None

    def fused(self, needs: Sequence[bool]) -> bool:
        """Whether kernels may compute it and all gradients that its tensors need in closed form."""
        return self.kinds is not None and ((self.direct and not any(needs)) or self.table(needs) is not None)

    def closed(self) -> tuple[str, Tensor | None, Tensor | None] | None:
        """Kind, table and normal of a map with at most one reflection, then at most one table ("none" without a table).

        None for any other map. Each kernel checks phi, widths and dtypes itself.
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
        """Whether the features of x equal x, and are one tensor."""
        alone = self.map is None and self.mask is None and not self.unrotated
        return self.phi is identity and alone and self.dtype in (None, x.dtype)

    def replace(self, tensors: Sequence[Tensor]) -> "Features":
        """The same features with other tensors, in the order of `tensors`."""
        inner, mask = self.map, None if self.mask is None else tensors[-1]
        return self._replace(map=None if inner is None else inner.replace(tensors), mask=mask)

    def part(self, slices: Slices) -> "Features":
        """The features restricted to slices of tokens, heads and samples."""
        if slices is ALL:
            return self
        inner = None if self.map is None else self.map.part(slices)
        return self._replace(map=inner, mask=None if self.mask is None else slices.of(self.mask, -3, -2))

    def without_idle_mask(self) -> "Features":
        """The same features without a mask that keeps every token. Only on a CPU, where this check costs little."""
        if self.mask is None or self.mask.device.type != "cpu" or not self.mask.all():
            return self
        return self._replace(mask=None)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Features of tokens x ``[*b h t .]``, and with `unrotated` also phi(x)."""
        x = x if self.mask is None else torch.where(self.mask, x, 0)  # NaN of a masked token must not reach gradients either
        plain = self.phi(x if self.dtype is None else x.to(self.dtype))
        if self.map is not None and self.map.features not in (None, plain.shape[-1]):
            raise ValueError(
                f"isometry: expected one of {plain.shape[-1]} features, as many as the feature map returns, "
                f"got one of {self.map.features}; build the encoding for this head size"
            )
        out = (self._mapped(plain), plain)[: 1 + self.unrotated]
        return out if self.mask is None else tuple(torch.where(self.mask, y, 0) for y in out)

    def write(self, x: Tensor, buffers: Buffers) -> tuple[Tensor, ...]:
        """The same features without a graph, if `direct`: contiguous, in buffers or in new memory."""
        if self.ready(x):
            return (x.contiguous(),)
        assert isinstance(self.phi, FeatureMap)
        assert self.phi.write is not None
        plain = buffers("plain", *x.shape)
        self.phi.write(x.to(self.dtype or x.dtype), plain, buffers.shared("scratch", *x.shape))
        self._drop(plain)
        return (self._mapped(plain), plain)[: 1 + self.unrotated]

    def adjoint(self, x: Tensor, grads: Sequence[Tensor], buffers: Buffers) -> tuple[Tensor, Tensor | None]:
        """The gradient of x as one or two factors, from gradients of its features, which may be overwritten.

        The buffers must be unchanged since `write`.
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
        """Set masked tokens to zero in place, NaN included."""
        if self.mask is not None:
            dropped = ~self.mask[..., 0, :, 0].expand(*x.shape[:-3], x.shape[-2])
            x.movedim(-3, -1)[dropped] = 0  # faster than masked_fill if few are dropped


READY = Features(identity)
ALL_READY = (READY, READY, READY)


def with_ones(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values with a column of ones; zero where a mask is False."""
    values = torch.cat((values, torch.ones_like(values[..., :1])), -1)
    return values if mask is None else torch.where(mask, values, 0)


@dataclass(frozen=True, eq=False)
class Past:
    """Past tokens of a causal stream, before those of `Sums`.

    Args:
        sums: Sums of k v^T ``[*b h d e]``. The sum of keys for a denominator is one more column, or a second tensor
            ``[*b h d 1]`` for unrotated features. Empty at the start.
        before: Log decay ``[*b h]`` of the last token; None without a decay, or at the start.
    """

    sums: tuple[Tensor, ...] = ()
    before: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Sums:
    """A checked and complete problem of linear attention, which a backend serves or refuses.

    Args:
        q: Inputs of queries ``[*b h t .]``.
        k: Inputs of keys ``[*b h s .]``, with the leading dimensions of q, except in streams.
        v: Inputs of values ``[*b h s e]``.
        features: Features of q, k and v. Those of queries and keys are two tensors if the denominator is unrotated.
        g: Log decays of queries and keys, ``[*b h t]`` or broadcastable to it; without `causal`, equally many of both.
        causal: Whether query i sums over keys up to key i; the last query is aligned with the last key.
        denominator: Use of the sum of weights: None for no denominator, "column" to append it as the last column, "divide"
            to divide by it.
        stream: Past tokens, which are summed up, too.
        segmented: Whether g only separates segments: tokens of one segment have equal numbers, and weights of others vanish.

    Attributes:
        notes: Results of `serves`, which the same backend reuses when it runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    features: tuple[Features, Features, Features]
    g: Decays = None
    causal: bool = True
    denominator: str | None = None
    stream: Past | None = None
    segmented: bool = False
    notes: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, inputs first."""
        after = () if self.stream is None else self.stream.sums
        return (*self.inputs, *(self.g or ()), *(tensor for each in self.features for tensor in each.tensors), *after)

    @property
    def ready(self) -> bool:
        """Whether all features equal the inputs."""
        return all(each.ready(x) for each, x in zip(self.features, self.inputs, strict=True))

    @property
    def products(self) -> bool:
        """Whether the problem is just two matrix products."""
        return not self.causal and self.g is None and self.denominator is None and self.ready

    @property
    def across(self) -> Tensor | None:
        """Weights of past sums at the next token, contiguous float32 ``[*b h]``; None without a decay."""
        if self.g is None or self.stream is None or self.stream.before is None:
            return None
        weight = (self.g[1][..., 0] - self.stream.before).exp().to(torch.float32)
        return weight.expand(self.v.shape[:-2]).contiguous()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def lifted(self) -> "Sums":
        """The same problem with an axis of samples."""
        if self.q.ndim > 3 or self.stream is not None:
            return self
        return replace(self, q=self.q[None], k=self.k[None], v=self.v[None])

    def triples(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(features of queries, of keys, values), with a graph. Their concatenated sums end with the denominator."""
        queries, keys, values = self.made()
        if self.denominator is not None:
            values = with_ones(values, self.features[2].mask)
        parts = [values] if len(queries) == 1 else values.split((values.shape[-1] - 1, 1), -1)
        return list(zip(queries, keys, parts, strict=True))

    def made(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """All features, with a graph."""
        if self.ready:
            return (self.q,), (self.k,), self.v
        queries, keys, (values,) = (each(x) for each, x in zip(self.features, self.inputs, strict=True))
        return queries, keys, values
