"""A scheme evaluated in a forward pass of a model, for all layers; and positions stored as additional features of keys."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.scheme import Arguments, Scheme

BYTES = 4  # of a coordinate; each is a number below 256, which every floating dtype has
CACHE = "past_key_values: expected a cache that keeps keys as they are, of the same tokens in layers with one mask, got "


def digits_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Digits ``[b t n]`` of positions ``[b t c]``: 4 for each coordinate from -2^31 to 2^31 - 1."""
    shifts = torch.arange(0, 8 * BYTES, 8, device=x.device)
    return ((x[..., None] + 2 ** (8 * BYTES - 1) >> shifts) & 255).flatten(-2).to(dtype)


def positions_of(written: Tensor) -> Tensor:
    """Positions ``[b t c]`` from the digits of `digits_of`."""
    digits = written.to(torch.int64)
    torch._assert_async((digits == written).all(), CACHE + "rounded")  # pyright: ignore
    shifts = torch.arange(0, 8 * BYTES, 8, device=written.device)
    return (digits.unflatten(-1, (-1, BYTES)) << shifts).sum(-1) - 2 ** (8 * BYTES - 1)


class Written:
    """Wrapper of a model's cache that appends the digits of positions to the features of new keys.

    Positions thus stay with their keys when the cache reorders beams, crops, or has windows or fixed slots.

    Args:
        cache: The model's cache.
        digits: Digits of the new tokens ``[b t n]``, or ``[1 t n]`` for all samples.
    """

    def __init__(self, cache: Any, digits: Tensor):
        self.cache, self.digits = cache, digits

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[b h t d]``; return all keys with digits ``[b h s d + n]``, and all values."""
        digits = self.digits.to(keys)[:, None].expand(*keys.shape[:-1], -1)
        return self.cache.update(torch.cat((keys, digits), -1), values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class _Kept(NamedTuple):
    """Evaluated arguments: for keys at the positions of queries, or for a cache with its mask and digits."""

    at: Arguments
    kind: tuple[torch.dtype, torch.device]
    mask: Tensor | None
    written: Tensor | None


class Evaluated:
    """A scheme at the positions of one forward pass; layers call it for the arguments of their attention.

    Layers whose keys have the same positions share the arguments. With gradients, the arguments for keys at the positions of
    queries are evaluated before all layers: one graph reaches the scheme's parameters, and a checkpointed layer finds the
    same arguments again. Arguments for cached keys or another device are kept unless they have a graph. Nothing outlives the
    pass and its graph, since only the model's arguments hold this object.

    Args:
        scheme: Scheme of all layers.
        x: Positions of queries ``[b t c]``, or ``[1 t c]`` for all samples.
        like: A tensor with the expected dtype and device of queries.
        digits: Digits of positions for a cache ``[b t n]``; None without a cache.
        window: The `Window` of softmax attention combined with a scheme of linear attention, or None.
        group: The processes that hold the sequence; see `isopos.Scheme.at`.
    """

    def __init__(
        self, scheme: Scheme, x: Tensor, like: Tensor, digits: Tensor | None = None, window: Any = None, group: Any = None
    ):
        self.scheme, self.x, self.digits, self.window, self.group = scheme, x, digits, window, group
        self.kept: list[_Kept] = []
        self.learns, self.again = self._learns(), False
        if torch.is_grad_enabled():
            self.kept.append(self._evaluate(_kind(like)))

    def __call__(self, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Arguments]:
        """Keys without digits, and arguments for them.

        Args:
            query: ``[b h t d]``.
            key: ``[b h s d]``, or ``[b h s d + n]`` of a cache.
            mask: ``[b 1 t s]``.
        """
        features, written = query.shape[-1], key[:, 0, :, query.shape[-1] :]
        if self.digits is None or not written.shape[-1]:  # no cache
            return key, self._at(_kind(query))
        if query.shape[-2] != key.shape[-2]:
            return key[..., :features], self._at(_kind(query), mask, written)
        _expect_same(written, self.digits.to(written))
        return key[..., :features], self._at(_kind(query))

    def at_queries(self, query: Tensor) -> Arguments:
        """Arguments for keys at the positions of queries."""
        return self._at(_kind(query))

    def _at(
        self, kind: tuple[torch.dtype, torch.device], mask: Tensor | None = None, written: Tensor | None = None
    ) -> Arguments:
        """Kept arguments that fit, or newly evaluated ones."""
        learns = self._learns()
        if self.learns and not learns:  # a reentrant checkpoint, which goes backward through any graph that it finds
            self.again = True
        if not learns or (self.learns and not self.again):
            for kept in self.kept:
                if kept.kind == kind and kept.mask is mask:
                    if written is not None and kept.written is not None:
                        _expect_same(written, kept.written)
                    return kept.at
        evaluated = self._evaluate(kind, mask, written)
        if not learns:
            self.kept = [evaluated, *self.kept[:1]]  # two kinds of layers at most: with a window and without
        return evaluated.at

    def _evaluate(
        self, kind: tuple[torch.dtype, torch.device], mask: Tensor | None = None, written: Tensor | None = None
    ) -> _Kept:
        dtype, device = kind
        x = self.x.to(device)
        if mask is None or written is None:
            return _Kept(self.scheme.at(x, group=self.group, dtype=dtype), kind, None, None)
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        y = torch.where(seen.any(-2).any(-2)[..., None], positions_of(written), x[:, :1])  # a static cache has free slots
        return _Kept(self.scheme.at(x.expand(len(y), -1, -1), y, dtype=dtype), kind, mask, written)

    def _learns(self) -> bool:
        """Whether arguments evaluated now would have a graph."""
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.scheme.parameters())


def _kind(x: Tensor) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of tables for queries x."""
    return torch.promote_types(x.dtype, torch.float32), x.device


def _expect_same(written: Tensor, expected: Tensor) -> None:
    torch._assert_async((written == expected).all(), CACHE + "others")  # pyright: ignore
