"""The walk of causal linear attention over tiles: a few chunks of tokens of a few heads, whose buffers stay in the cache.

For the tokens j of a query's own chunk weights are formed, those before it are summed up in a state:

    total_i = sum_{j in chunk, j <= i} <q_i, k_j> exp(g_i - g_j) v_j + q_i^T (sum_{j before chunk} exp(g_i - g_j) k_j v_j^T)

The backward pass walks back, maps the inputs again and keeps one state a tile. All chunks of a tile go through one batched
product at a time, into buffers that the next tile uses again; only the states run from chunk to chunk. Where `native` has a
compiled tile it takes the place of these operations.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.ops import native
from isopos.ops.place import Place

CHUNK = 64  # tokens whose weights are formed explicitly
LEAST, MOST = 4, 16  # chunks of a tile: states before a tile are kept for the backward pass
TILE, WIDE = 1 << 17, 1 << 24  # features of a tile, on a CPU and elsewhere: some fifteen buffers of that size are in use
EPS = 1e-6  # the least magnitude of a denominator

Decays = tuple[Tensor, Tensor] | None


class Room:
    """Buffers by name and shape, which keep their memory; `spare` are those that several rooms share."""

    def __init__(self, like: Tensor, dtype: torch.dtype, spare: "Room | None" = None):
        self.like, self.dtype, self.spare = like, dtype, self if spare is None else spare
        self.held: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A buffer that nobody else uses, with whatever it held before."""
        buffer = self.held.get((name, *shape))
        if buffer is None:
            buffer = self.held[(name, *shape)] = torch.empty(shape, dtype=self.dtype, device=self.like.device)
        return buffer


class Formula(NamedTuple):
    """What a load does, where native.c knows it: phi, a reflection, then a table; float32, but for an index."""

    phi: str = "identity"  # a key of FEATURE_MAPS
    kind: str = "none"  # of the table: "rotation" or "lift" [*b h t f 2], "gather" int64 [*b h t d]
    table: Tensor | None = None
    normal: Tensor | None = None  # of the reflection, [h 1 d]
    kept: Tensor | None = None  # bool [*b 1 t 1]
    own: bool = False  # whether phi's features come as a second operand


class Load(Protocol):
    """What makes of an input the operands of the sums: features, and others for the denominator where it has its own.

    It runs again in the backward pass, a tile at a time; gradients reach the input and `tensors`.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds for all tokens."""
        ...

    @property
    def direct(self) -> bool:
        """Whether it is a `Direct` one."""
        ...

    def part(self, tensors: Sequence[Tensor], place: Place) -> tuple[Tensor, ...]:
        """Views of tensors shaped as `tensors`: what concerns a place."""
        ...

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Operands ``[*b h t .]`` of the tokens x ``[*b h t .]`` of a place, whose part of the tensors is `part`."""
        ...


class Direct(Load, Protocol):
    """A load that knows its gradient, where its tensors need none."""

    def at(self, place: Place) -> "Direct":
        """The load of a place."""
        ...

    def formula(self) -> Formula | None:
        """The load in terms that native.c knows, if there are any."""
        ...

    def write(self, x: Tensor, room: Room) -> tuple[Tensor, ...]:
        """The operands of all its tokens, without a graph, in buffers or memory of their own."""
        ...

    def pull(self, grads: Sequence[Tensor], room: Room) -> tuple[Tensor, Tensor | None]:
        """Two factors of the gradient of x, or one, from those of the operands, which it may overwrite.

        The buffers hold what `write` left there.
        """
        ...


class Ready:
    """The load of operands that are ready."""

    tensors: tuple[Tensor, ...] = ()
    direct = True

    def part(self, tensors: Sequence[Tensor], place: Place) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()

    def __call__(self, x: Tensor, part: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """x itself."""
        return (x,)

    def at(self, place: Place) -> "Ready":
        """The same."""
        return self

    def formula(self) -> Formula:
        """That of nothing."""
        return Formula()

    def write(self, x: Tensor, room: Room) -> tuple[Tensor, ...]:
        """x itself."""
        return (x.contiguous(),)

    def pull(self, grads: Sequence[Tensor], room: Room) -> tuple[Tensor, Tensor | None]:
        """Its gradient itself."""
        return grads[0], None


class Span(NamedTuple):
    """Tokens of a tile, in chunks of equal length."""

    start: int
    stop: int
    chunk: int

    @property
    def place(self) -> Place:
        """These tokens of all heads and samples."""
        return Place((), slice(None), slice(self.start, self.stop))


class Plan:
    """How ``[*b h t d]`` is cut into tiles of about TILE features: of all heads that fit, then of more tokens.

    Attributes:
        groups: Heads and samples that walk together.
        spans: Tiles of a group: of whole chunks, then the tokens that are left.
    """

    def __init__(self, x: Tensor):
        *batch, heads, length, width = x.shape
        whole, chunk = length - length % CHUNK, CHUNK * width
        size = max(1, (TILE if x.device.type == "cpu" else WIDE) // chunk)  # in chunks
        some = max(1, size // min(LEAST, -(-length // CHUNK)))  # heads of all samples
        per_head = -(-heads // -(-heads // min(heads, some)))
        steps = [*(1 for _ in batch[:-1]), min(batch[-1], max(1, some // per_head)), per_head]
        parts = itertools.product(*(_slices(n, step) for n, step in zip((*batch, heads), steps, strict=True)))
        self.groups = [Place(part[:-1], part[-1], slice(None)) for part in parts]
        count = min(MOST, max(LEAST, size // (steps[-1] * steps[-2])))
        self.spans = [Span(part.start, part.stop, CHUNK) for part in _slices(whole, count * CHUNK)]
        self.spans += [Span(whole, length, length - whole)] if whole < length else []
        self.sizes = [span.stop - span.start for span in self.spans]


def _back(rows: Tensor) -> Tensor:
    """Sums of rows ``[n c d]`` over the tokens from each on."""
    return rows.flip(1).cumsum(1).flip(1)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@dataclass(frozen=True)
class Tile:
    """The shape of a tile: its chunks are rows ``[n c .]``, n = samples times heads times chunks of a head."""

    leading: tuple[int, ...]  # samples and heads
    count: int  # chunks of a head
    chunk: int

    def rows(self, x: Tensor) -> Tensor:
        """x ``[*b h t .]`` by chunks."""
        return x.reshape(-1, self.chunk, x.shape[-1])

    def apart(self, rows: Tensor) -> Tensor:
        """Rows with their axes apart: ``[*b h n c .]``."""
        return rows.view(*self.leading, self.count, *rows.shape[1:])

    def tokens(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`."""
        return rows.view(*self.leading, -1, rows.shape[-1])


class Operand:
    """One input of a walk with its load; in the backward pass with its gradient and those of the load's tensors.

    `needs` says which tensors need a gradient, `grads` is room for them (None for the others).
    """

    def __init__(self, x: Tensor, load: Load, tensors: Sequence[Tensor], needs: Sequence[bool], room: Room):
        self.x, self.load, self.tensors, self.needs, self.room = x, load, tensors, needs, room
        self.grad: Tensor | None = None
        self.grads: Sequence[Tensor | None] = [None] * len(tensors)
        self.first = True  # whether no gradient has been written yet
        self.direct = load.direct and not any(needs)

    def open(self) -> None:
        """Make room for gradients."""
        self.grad = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        self.grads = [torch.zeros_like(t) if need else None for t, need in zip(self.tensors, self.needs, strict=True)]

    def at(self, place: Place) -> "Operand":
        """That of some heads and samples."""
        x, grad = place.of(self.x, -3, -2), None if self.grad is None else place.of(self.grad, -3, -2)
        if self.direct:
            part = Operand(x, cast(Direct, self.load).at(place), (), (), self.room)
        else:
            part = Operand(x, self.load, self.load.part(self.tensors, place), self.needs, self.room)
            rooms = [t if grad is None else grad for t, grad in zip(self.tensors, self.grads, strict=True)]
            part.grads = [x if need else None for x, need in zip(self.load.part(rooms, place), self.needs, strict=True)]
        part.grad = grad
        return part

    def split(self, sizes: Sequence[int]) -> None:
        """Cut its tokens into tiles."""
        self.xs = self.x.split(sizes, -2)
        self.rooms = None if self.grad is None else self.grad.split(sizes, -2)

    def formula(self, n: int, span: Span) -> Formula | None:
        """That of the load of tile n, if it has one."""
        if not self.direct or self.xs[n].dtype != torch.float32:
            return None
        return cast(Direct, self.load).at(span.place).formula()

    def read(self, n: int, span: Span) -> tuple[Tensor, ...]:
        """The operands of tile n ``[*b h t .]``, contiguous."""
        x = self.xs[n]
        if self.direct:
            self.here = cast(Direct, self.load).at(span.place)
            return self.here.write(x, self.room)
        back = self.grad is not None
        part = [tensor.detach() for tensor in self.load.part(self.tensors, span.place)]
        self.leaves = [x.detach(), *(tensor for tensor, need in zip(part, self.needs, strict=True) if need)]
        for leaf in self.leaves:
            leaf.requires_grad_(back)
        with torch.set_grad_enabled(back):
            self.outputs = self.load(self.leaves[0], part)
        return tuple(out.detach().contiguous() for out in self.outputs)

    def pull(self, n: int, span: Span, grads: Sequence[Tensor]) -> None:
        """Add the gradients of tile n, which was read last, from those of its operands."""
        assert self.rooms is not None
        slope = None
        if self.direct:
            own, slope = self.here.pull(grads, self.room)
        else:
            pairs = [(out, grad) for out, grad in zip(self.outputs, grads, strict=True) if out.requires_grad]
            own, *learned = torch.autograd.grad([o for o, _ in pairs], self.leaves, [g for _, g in pairs])
            rooms = [t if grad is None else grad for t, grad in zip(self.tensors, self.grads, strict=True)]
            parts = [p for p, need in zip(self.load.part(rooms, span.place), self.needs, strict=True) if need]
            for room, grad in zip(parts, learned, strict=True):
                room.add_(grad)
        if slope is not None:
            torch.mul(own, slope, out=self.rooms[n]) if self.first else self.rooms[n].addcmul_(own, slope)
        elif self.first:
            self.rooms[n].copy_(own)
        else:
            self.rooms[n].add_(own)


class Weights(ABC):
    """The weights of a tile: inside its chunks, and between a chunk and the state that comes before it.

    A `reverse` walk goes from the last token to the first and leaves out the diagonal.
    """

    def __init__(self, tile: Tile, reverse: bool):
        self.tile, self.reverse = tile, reverse

    @abstractmethod
    def weigh(self, scores: Tensor) -> Tensor:
        """Multiply scores ``[n c c]`` by the weights inside a chunk, in place."""

    @abstractmethod
    def fade(self, rows: Tensor, name: str) -> Tensor:
        """Multiply rows in place by the weights `before` or `after`: from the last chunk, or to this one's end."""

    @abstractmethod
    def faded(self, rows: Tensor, name: str, out: Tensor | None) -> Tensor:
        """`fade` of a copy."""

    @abstractmethod
    def add(self, rows: Tensor, name: str, x: Tensor, sign: int) -> Tensor:
        """Add faded x ``[*b h n 1 .]`` to rows ``[n c .]``, in place."""

    @abstractmethod
    def carry(self, state: Tensor, added: Tensor, into: Tensor, *, back: bool = False) -> Tensor:
        """A state ``[*b h . .]`` after all chunks; what it is before each comes `into` ``[n . .]``.

        `added` ``[n . .]`` is what each chunk adds. With `back` the walk goes the other way.
        """

    @abstractmethod
    def prefix(self, rows: Tensor) -> Tensor:
        """Sums of rows ``[n c d]`` over the tokens of their chunk that a token sees, weighted."""

    @abstractmethod
    def suffix(self, rows: Tensor) -> Tensor:
        """The same over the tokens that see a token. A total less a prefix would lose digits."""


class Even(Weights):
    """Weights without decay: one for what a query sees, zero for the rest."""

    def __init__(self, tile: Tile, reverse: bool, like: Tensor):
        super().__init__(tile, reverse)
        n, heads = tile.count, math.prod(tile.leading)
        earlier = torch.ones(n, n, dtype=like.dtype, device=like.device).tril_(-1)
        self.later, self.earlier = (x.expand(heads, n, n) for x in (earlier.mT.contiguous(), earlier))

    def weigh(self, scores: Tensor) -> Tensor:
        """Cut off what a query does not see."""
        return scores.triu_(1) if self.reverse else scores.tril_()

    def fade(self, rows: Tensor, name: str) -> Tensor:
        """Leave rows as they are."""
        return rows

    def faded(self, rows: Tensor, name: str, out: Tensor | None) -> Tensor:
        """The rows themselves."""
        return rows

    def add(self, rows: Tensor, name: str, x: Tensor, sign: int) -> Tensor:
        """Add."""
        self.tile.apart(rows).add_(x, alpha=sign)
        return rows

    def carry(self, state: Tensor, added: Tensor, into: Tensor, *, back: bool = False) -> Tensor:
        """One product with a triangle of ones."""
        turned, shape = back != self.reverse, (len(self.later), self.tile.count, -1)
        flat, into = state.reshape(shape[0], 1, -1), into.view(shape)
        added = added.view(shape)
        torch.baddbmm(flat.expand(into.shape), self.later if turned else self.earlier, added, out=into)
        last = 0 if turned else -1
        return (added[:, last] + into[:, last]).view(state.shape)

    def prefix(self, rows: Tensor) -> Tensor:
        """Cumulative sums."""
        return _back(F.pad(rows[:, 1:], (0, 0, 0, 1))) if self.reverse else rows.cumsum(1)

    def suffix(self, rows: Tensor) -> Tensor:
        """Cumulative sums from the end."""
        return F.pad(rows[:, :-1], (0, 0, 1, 0)).cumsum(1) if self.reverse else _back(rows)


class Fading(Weights):
    """Weights exp(g_i - g_j): `inside` chunks, from `before` one to its tokens, from them to its end (`after`), `across` it.

    Every exponent is a difference of log decays and does not exceed zero: r^i and r^-j, which overflow, are never formed.
    """

    def __init__(self, tile: Tile, reverse: bool, like: Tensor, g: Sequence[Tensor]):
        """g holds log decays of queries and keys ``[*b h t]`` of the tile, less that of the last token before it."""
        super().__init__(tile, reverse)
        self.g, dtype = g, like.dtype
        query, key = (x.unflatten(-1, (-1, tile.chunk)) for x in g)
        ends = key[..., 0] if reverse else key[..., -1]
        outside = torch.zeros_like(ends[..., :1])
        starts = torch.cat((ends[..., 1:], outside) if reverse else (outside, ends[..., :-1]), -1)[..., None]
        inside = (query[..., :, None] - key[..., None, :]).to(dtype).exp_()
        self.inside = inside.triu_(1) if reverse else inside.tril_()
        exponents = query - starts, ends[..., None] - key, ends[..., None] - starts
        self.before, self.after, across = (x.to(dtype).exp_()[..., None] for x in exponents)
        self.across = across[..., 0]
        far = starts - ends[..., None, :]
        far = (far.triu(1).exp().triu(1) if reverse else far.tril(-1).exp().tril(-1)).to(dtype)
        self.earlier = far.expand(*tile.leading, tile.count, tile.count).reshape(-1, tile.count, tile.count)
        first, final = (starts[..., -1:, :], ends[..., :1]) if reverse else (starts[..., :1, :], ends[..., -1:])
        self.onward, self.backward = (x.exp().to(dtype) for x in (starts - first, (final - ends)[..., None]))

    def serves(self, g: Sequence[Tensor]) -> bool:
        """Whether another tile has these weights, too; only on a CPU, where looking costs less than computing."""
        if self.inside.device.type != "cpu" or g[0].shape != self.g[0].shape:
            return False
        close = torch.finfo(self.inside.dtype).eps / 1024
        pairs = zip(g, self.g, strict=True) if g[0] is not g[1] else [(g[0], self.g[0])]
        return all(bool((a - b).abs_().amax() <= close) for a, b in pairs)

    def weigh(self, scores: Tensor) -> Tensor:
        """Multiply by the weights inside."""
        self.tile.apart(scores).mul_(self.inside)
        return scores

    def fade(self, rows: Tensor, name: str) -> Tensor:
        """Multiply."""
        self.tile.apart(rows).mul_(getattr(self, name))
        return rows

    def faded(self, rows: Tensor, name: str, out: Tensor | None) -> Tensor:
        """Multiply a copy."""
        out = torch.empty_like(rows) if out is None else out
        torch.mul(self.tile.apart(rows), getattr(self, name), out=self.tile.apart(out))
        return out

    def add(self, rows: Tensor, name: str, x: Tensor, sign: int) -> Tensor:
        """Multiply x and add."""
        self.tile.apart(rows).addcmul_(getattr(self, name), x, value=sign)
        return rows

    def carry(self, state: Tensor, added: Tensor, into: Tensor, *, back: bool = False) -> Tensor:
        """One product with the weights from chunk to chunk."""
        turned, wide = back != self.reverse, (*self.tile.leading, self.tile.count, -1)
        first, far = (self.backward, self.earlier.mT) if back else (self.onward, self.earlier)
        torch.mul(state.flatten(-2).unsqueeze(-2), first, out=into.view(wide))
        shape = (len(far), self.tile.count, -1)
        into.view(shape).baddbmm_(far, added.view(shape))
        last = 0 if turned else -1
        added, into = (x.view(*self.tile.leading, self.tile.count, *x.shape[1:]).select(-3, last) for x in (added, into))
        return torch.addcmul(added, into, self.across.select(-2, last).unsqueeze(-1))

    def prefix(self, rows: Tensor) -> Tensor:
        """One product with the weights inside."""
        return self._wide() @ rows

    def suffix(self, rows: Tensor) -> Tensor:
        """One product with their transpose."""
        return self._wide().mT @ rows

    def _wide(self) -> Tensor:
        shape = (*self.tile.leading, self.tile.count, self.tile.chunk, self.tile.chunk)
        return self.inside.expand(shape).reshape(-1, *shape[-2:])


class Upstream:
    """The gradient of the output, and for a division the output and its denominator."""

    def __init__(self, grad: Tensor, out: Tensor | None = None, denominator: Tensor | None = None):
        self.all = (grad, out, denominator)

    def at(self, place: Place) -> "Upstream":
        """That of some heads and samples."""
        grad, *rest = self.all
        return Upstream(place.of(grad, -3, -2), *(None if x is None else place.of(x, -3, -2) for x in rest))

    def split(self, sizes: Sequence[int]) -> None:
        """Cut tokens into tiles."""
        self.parts = [x if x is None else x.split(sizes, -2) for x in self.all]

    def rows(self, n: int, tile: Tile, values: int, room: Room) -> tuple[Tensor, Tensor | None]:
        """Gradients of a tile's sums ``[n c e]``, and less those of its denominators ``[n c 1]``, if it has any."""
        grad, out, denominator = (None if x is None else x[n] for x in self.parts)
        assert grad is not None
        sums = room("grad", *grad.shape[:-1], values)
        if out is None or denominator is None:
            sums.copy_(grad[..., :values])
            return tile.rows(sums), None if grad.shape[-1] == values else tile.rows(-grad[..., values:])
        torch.div(grad, denominator, out=sums)
        below = torch.mul(sums, out, out=room("product", *sums.shape)).sum(-1, keepdim=True)
        return tile.rows(sums), tile.rows(below.masked_fill_(denominator.abs() <= EPS, 0))


class Walk:
    """One walk over the tokens of some heads, forward and back.

    `reverse` goes from the last token to the first, without the diagonal. Gradients go to the operands.
    """

    def __init__(
        self, operands: Sequence[Operand], plan: Plan, g: Decays, room: Room, *, denominator: bool, reverse: bool = False
    ):
        self.operands, self.plan, self.g, self.room = operands, plan, g, room
        self.denominator, self.reverse = denominator, reverse
        self.leading = tuple(operands[0].x.shape[:-2])
        self.states = len(plan.spans)
        self.order = range(len(plan.spans))[:: -1 if reverse else 1]
        for operand in operands:
            operand.split(plan.sizes)
        self.weights: dict[Tile, list[Weights]] = {}
        tensors = [tensor for operand in operands for tensor in (operand.x, *operand.tensors)]
        self.native = room.dtype == torch.float32 and not reverse and native.serves(*tensors, *(g or ()))

    def _weights(self, span: Span) -> Weights:
        """Those of a tile, or of one before that had the same: steady decays, and none at all inside packed sequences."""
        tile = Tile(self.leading, (span.stop - span.start) // span.chunk, span.chunk)
        like = self.operands[0].x.new_empty(0, dtype=self.room.dtype)
        if tile not in self.weights:
            self.weights[tile] = [Even(tile, self.reverse, like)]
        known = self.weights[tile]
        if self.g is None:
            return known[0]
        g, sign = self.g, -1 if self.reverse else 1
        border = min(span.stop, g[1].shape[-1] - 1) if self.reverse else max(span.start - 1, 0)
        outside = g[1][..., border : border + 1]
        keys = sign * (g[1][..., span.start : span.stop] - outside)
        own = (keys if g[0] is g[1] else sign * (g[0][..., span.start : span.stop] - outside), keys)
        if keys.device.type == "cpu" and not any(x.any() for x in own):
            return known[0]
        for weights in known[1:]:
            if cast(Fading, weights).serves(own):
                return weights
        self.weights[tile] = [known[0], Fading(tile, self.reverse, like, own), *known[1:2]]
        return self.weights[tile][1]

    def _read(self, n: int) -> tuple[Weights, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Weights and rows of queries, keys and values; two of queries and keys where the denominator has its own."""
        span = self.plan.spans[n]
        q, k, (v,) = ([x.reshape(-1, span.chunk, x.shape[-1]) for x in o.read(n, span)] for o in self.operands)
        return self._weights(span), tuple(q), tuple(k), v

    def _empty(self, d: int, e: int, own: int) -> list[Tensor]:
        """Zero sums of k v^T ``[*b h d e]`` and, for a denominator, of its k ``[*b h 1 d]``."""
        like, shapes = self.operands[0].x, [(d, e)] + [(1, own)] * self.denominator
        return [like.new_zeros(*self.leading, *shape, dtype=self.room.dtype) for shape in shapes]

    def _native(self, n: int) -> native.Tile | None:
        """Tile n for native.c, if that serves it."""
        if self.native:
            tile = native.Tile(self.operands, n, self.plan.spans[n], self.room)
            if tile.library is not None:
                return tile
            self.native = False
        return None

    def forward(
        self, outs: Sequence[Tensor], belows: Sequence[Tensor], *, keep: bool, divide: bool
    ) -> Iterator[tuple[int, Tensor | None, Tensor | None, list[Tensor]]]:
        """Number, sums ``[*b h t e]`` and denominators ``[*b h t 1]`` of each tile, in buffers, and the states before it.

        Instead of sums None, where they are in `outs` and `belows` already, and divided if they are to be.
        """
        states: list[Tensor] = []
        for n in self.order:
            if (tile := self._native(n)) is not None:
                states = states or self._empty(*tile.sizes)
                before = [state.clone() for state in states] if keep else []
                below = belows[n] if self.denominator else None
                tile.forward(self.g, states, outs[n], below, divide=divide)
                yield n, None, None, before
                continue
            weights, q, k, v = self._read(n)
            before = states or self._empty(k[0].shape[-1], v.shape[-1], k[-1].shape[-1])
            total, below, states = self._sums(weights, q, k, v, before)
            yield n, weights.tile.tokens(total), None if below is None else weights.tile.tokens(below), before

    def _sums(
        self, weights: Weights, q, k, v: Tensor, states: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Sums and denominators of a tile, and the states after it."""
        room, (n, c, _) = self.room, v.shape
        scores = weights.weigh(torch.bmm(q[0], k[0].mT, out=room("scores", n, c, c)))
        faded = weights.faded(k[0], "after", room("faded", *k[0].shape))
        before, state = self._states(weights, faded, v, states[0])
        total = weights.fade(torch.bmm(q[0], before, out=room("total", *v.shape)), "before").baddbmm_(scores, v)
        if not self.denominator:
            return total, None, [state]
        keys, after = self._rows(weights, faded if len(k) == 1 else weights.faded(k[1], "after", None), states[1])
        product = room("product", *q[-1].shape)
        if len(k) == 1:
            torch.mul(weights.tile.apart(q[0]), keys, out=weights.tile.apart(product))
            below = weights.fade(product.sum(-1, keepdim=True), "before").add_(scores.sum(-1, keepdim=True))
        else:
            seen = weights.add(weights.prefix(k[1]), "before", keys, 1)
            below = torch.mul(q[1], seen, out=product).sum(-1, keepdim=True)
        return total, below, [state, after]

    def _states(self, weights: Weights, faded: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of k v^T before each chunk ``[n d e]``, and after the tile."""
        shape = (len(v), faded.shape[-1], v.shape[-1])
        before = self.room("before", *shape)
        return before, weights.carry(state, torch.bmm(faded.mT, v, out=self.room("added", *shape)), before)

    def _rows(self, weights: Weights, rows: Tensor, state: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """The sums of rows before each chunk ``[*b h n 1 d]``, and after the tile; with `back` the other way."""
        added = rows.sum(1, keepdim=True)
        before = torch.empty_like(added)
        after = weights.carry(state, added, before, back=back)
        return weights.tile.apart(before), after

    def backward(self, upstream: Upstream, states: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        """Add the gradients of the operands and of the log decays, given the states of `forward` in its order."""
        upstream.split(self.plan.sizes)
        after = [torch.zeros_like(state) for state in states[0]]
        for n, before in zip(reversed(self.order), reversed(states), strict=True):
            here = slice(*self.plan.spans[n][:2])
            if (tile := self._native(n)) is not None:
                scales = tile.backward(self.g, before, after, upstream, bool(grad_g))
                for whole, scale in zip(grad_g, scales, strict=True):
                    whole[..., here].add_(scale)
                continue
            weights, q, k, v = self._read(n)
            grad, below = upstream.rows(n, weights.tile, v.shape[-1], self.room)
            grads, after = self._sums_backward(weights, q, k, v, before, grad, below, after)
            for m, whole in enumerate(grad_g):  # weights <q, k> exp(g_q - g_k): as if q and k were scaled
                scale = sum((x * y).sum(-1, True) for x, y in zip((q, k)[m], grads[m], strict=True))
                sign = -1 if bool(m) != self.reverse else 1
                whole[..., here].add_(weights.tile.tokens(cast(Tensor, scale))[..., 0], alpha=sign)
            for operand, rows in zip(self.operands, grads, strict=True):
                operand.pull(n, self.plan.spans[n], [weights.tile.tokens(x) for x in rows])

    def _sums_backward(
        self, weights: Weights, q, k, v, states, grad: Tensor, below: Tensor | None, afters: Sequence[Tensor]
    ):
        """Gradients of q, k and v, and of the states before the tile, from those of the states after it (`afters`)."""
        room, (n, c, _), d = self.room, v.shape, k[0].shape[-1]
        shared = len(k) == 1
        scores = weights.weigh(torch.bmm(q[0], k[0].mT, out=room("scores", n, c, c)))
        grad_scores = torch.bmm(grad, v.mT, out=room("grad scores", n, c, c))
        weights.weigh(grad_scores.sub_(below) if shared and below is not None else grad_scores)
        faded = weights.faded(k[0], "after", room("faded", *k[0].shape))
        before, _ = self._states(weights, faded, v, states[0])
        grad_faded = weights.faded(grad, "before", room("grad faded", *grad.shape))
        after = room("after", n, d, v.shape[-1])
        added = torch.bmm(q[0].mT, grad_faded, out=room("added", n, d, v.shape[-1]))
        befores = [weights.carry(afters[0], added, after, back=True)]
        dq = torch.bmm(grad_faded, before.mT, out=room("dq", n, c, d)).baddbmm_(grad_scores, k[0])
        dk = weights.fade(torch.bmm(v, after.mT, out=room("dk", n, c, d)), "after").baddbmm_(grad_scores.mT, q[0])
        dv = torch.bmm(faded, after, out=room("dv", *v.shape)).baddbmm_(scores.mT, grad)
        if below is None:
            return ((dq,), (dk,), (dv,)), befores
        keys, _ = self._rows(weights, faded if shared else weights.faded(k[1], "after", None), states[1])
        product, less = room("product", *q[-1].shape), weights.faded(below, "before", None)
        later, before_keys = self._rows(weights, torch.mul(q[-1], less, out=product), afters[1], back=True)
        befores.append(before_keys)
        if shared:
            weights.tile.apart(dq).addcmul_(weights.tile.apart(less), keys, value=-1)
            return ((dq,), (weights.add(dk, "after", later, -1),), (dv,)), befores
        seen, more = weights.add(weights.prefix(k[1]), "before", keys, 1), -below
        dk_own = weights.suffix(torch.mul(q[1], more, out=product))
        return ((dq, seen.mul_(more)), (dk, weights.add(dk_own, "after", later, -1)), (dv,)), befores


class Whole:
    """Sums over every key without decay: two products, tile by tile, with one state."""

    def __init__(self, operands: Sequence[Operand], plan: Plan, room: Room, *, denominator: bool):
        self.operands, self.plan, self.room, self.denominator = operands, plan, room, denominator
        self.of_keys = Plan(operands[1].x)
        for operand, cut in zip(operands, (plan, self.of_keys, self.of_keys), strict=True):
            operand.split(cut.sizes)
        self.states = 1

    def forward(
        self, outs: Sequence[Tensor], belows: Sequence[Tensor], *, keep: bool, divide: bool
    ) -> Iterator[tuple[int, Tensor, Tensor | None, list[Tensor]]]:
        """Number, sums ``[*b h t e]`` and denominators ``[*b h t 1]`` of each tile; states of all keys with the first.

        They are the sums of k v^T ``[*b h d e]`` and, for a denominator, of its k ``[*b h 1 d]``.
        """
        states: list[Tensor] = []
        for n, span in enumerate(self.of_keys.spans):
            k, (v,) = (operand.read(n, span) for operand in self.operands[1:])
            own = [k[0].mT @ v] + [k[-1].sum(-2, keepdim=True)] * self.denominator
            states = [state.add_(x) for state, x in zip(states, own, strict=True)] if states else own
        for n, span in enumerate(self.plan.spans):
            q = self.operands[0].read(n, span)
            below = (q[-1] * states[1]).sum(-1, keepdim=True) if self.denominator else None
            yield n, q[0] @ states[0], below, [] if n else states

    def backward(self, upstream: Upstream, befores: Sequence[Sequence[Tensor]], grad_g: Sequence[Tensor]) -> None:
        """Add the gradients of the operands."""
        (queries, keys, values), (states,) = self.operands, befores
        grads = [torch.zeros_like(state) for state in states]
        upstream.split(self.plan.sizes)
        for n, span in enumerate(self.plan.spans):
            q = queries.read(n, span)
            tile = Tile(tuple(q[0].shape[:-2]), 1, span.stop - span.start)
            rows, less = upstream.rows(n, tile, states[0].shape[-1], self.room)
            grad = tile.tokens(rows)
            grads[0].add_(q[0].mT @ grad)
            dq = [grad @ states[0].mT]
            if less is not None:
                below = tile.tokens(less)
                grads[1].sub_((q[-1] * below).sum(-2, keepdim=True))
                own = below * states[1]
                dq = [dq[0].sub_(own)] if len(q) == 1 else [dq[0], own.neg_()]
            queries.pull(n, span, dq)
        for n, span in enumerate(self.of_keys.spans):
            k, (v,) = keys.read(n, span), values.read(n, span)
            dk, dv, of_keys = v @ grads[0].mT, k[0] @ grads[0], [x.expand(k[-1].shape) for x in grads[1:]]
            keys.pull(n, span, [dk.add_(of_keys[0])] if of_keys and len(k) == 1 else [dk, *(x.clone() for x in of_keys)])
            values.pull(n, span, [dv])
