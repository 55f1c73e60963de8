# pyright: reportInvalidTypeForm=false
"""Rotations and lifts on CUDA devices, by Triton: one pass over features, and none over anything else.

A kernel's program holds a table's rows of some tokens and turns all that share them: samples, heads. Arithmetic is float32,
whatever the dtype of features; the sums of a table's gradient are, too, and always in the same order.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.ops import gpu
from isopos.ops.library import flat

jit, tl = gpu.language()
kernel = partial(jit, do_not_specialize=("tokens", "shared", "rows"))  # one variant for all lengths and batches

TILE, BUSY = 1024, 1024  # pairs of a program; programs that fill a device
WIDEST = 1024  # pairs of a head


@jit
def _read(x, step, left, LAYOUT: tl.constexpr, F: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    """Both features of F pairs (P the power of two above) of T tokens, of which `left` are there.

    Those of a pair are next to each other ("pairs"), F apart ("halves"), or there is the first one only ("alone").
    """
    token = tl.arange(0, T)[:, None]
    row = x + token.to(tl.int64) * step
    if LAYOUT == "pairs":
        place = tl.arange(0, 2 * P)[None, :]
        tile = tl.load(row + place, mask=(token < left) & (place < 2 * F), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(tile, (T, P, 2)))
    else:
        place = tl.arange(0, P)[None, :]
        seen = (token < left) & (place < F)
        first = tl.load(row + place, mask=seen, other=0.0).to(tl.float32)
        second = tl.zeros_like(first)
        if LAYOUT == "halves":
            second = tl.load(row + F + place, mask=seen, other=0.0).to(tl.float32)
    return first, second


@jit
def _write(x, step, left, first, second, LAYOUT: tl.constexpr, F: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    token = tl.arange(0, T)[:, None]
    row = x + token.to(tl.int64) * step
    if LAYOUT == "pairs":
        place = tl.arange(0, 2 * P)[None, :]
        tile = tl.reshape(tl.join(first, second), (T, 2 * P))
        tl.store(row + place, tile.to(x.dtype.element_ty), mask=(token < left) & (place < 2 * F))
    else:
        place = tl.arange(0, P)[None, :]
        seen = (token < left) & (place < F)
        tl.store(row + place, first.to(x.dtype.element_ty), mask=seen)
        if LAYOUT == "halves":
            tl.store(row + F + place, second.to(x.dtype.element_ty), mask=seen)


@jit
def _pass_on(x, x_step, out, out_step, left, REST: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    """Copy REST features (R the power of two above) of T tokens."""
    token, place = tl.arange(0, T)[:, None], tl.arange(0, R)[None, :]
    seen = (token < left) & (place < REST)
    tile = tl.load(x + token.to(tl.int64) * x_step + place, mask=seen)
    tl.store(out + token.to(tl.int64) * out_step + place, tile.to(out.dtype.element_ty), mask=seen)


@jit
def _place(row, start, sizes, strides):
    """Where tokens of a row begin, from `start` on; rows are counted over three axes."""
    of_rows = (
        row // (sizes[1] * sizes[2]) * strides[0] + row // sizes[2] % sizes[1] * strides[1] + row % sizes[2] * strides[2]
    )
    return of_rows + start * strides[3]


@jit
def _mine(tokens, shared, rows, T: tl.constexpr):
    """A program's first token, and its rows: the first one and that after the last."""
    pid, blocks, groups = tl.program_id(0).to(tl.int64), tl.cdiv(tokens, T), tl.cdiv(shared, rows)
    group = pid // blocks
    first = group // groups * shared + group % groups * rows
    return pid % blocks * T, first, tl.minimum(first + rows, (group // groups + 1) * shared)


@kernel
def turn(
    x,
    table,
    out,
    tokens,
    shared,
    rows,
    sizes,
    of_x,
    of_table,
    of_out,
    F: tl.constexpr,
    P: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    ADJOINT: tl.constexpr,
):
    """Rows of x by the table's row that so many (`shared`) of them share; a program turns `rows` of these.

    `sizes` are those of three leading axes, and `of_x` and so on strides of these and of tokens.
    """
    start, first, last = _mine(tokens, shared, rows, T)
    left = tokens - start
    cos, sin = _read(table + _place(first, start, sizes, of_table), of_table[3], left, "pairs", F, P, T)
    if ADJOINT:
        sin = -sin
    for row in range(first, last):
        own, to = x + _place(row, start, sizes, of_x), out + _place(row, start, sizes, of_out)
        a, b = _read(own, of_x[3], left, FROM, F, P, T)
        _write(to, of_out[3], left, a * cos - b * sin, a * sin + b * cos, TO, F, P, T)
        if REST > 0:
            _pass_on(own + 2 * F, of_x[3], to + 2 * F, of_out[3], left, REST, R, T)


@kernel
def pull(
    x,
    table,
    grad,
    grad_x,
    parts,
    tokens,
    shared,
    rows,
    sizes,
    of_x,
    of_table,
    of_grad,
    of_grad_x,
    F: tl.constexpr,
    P: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    ADJOINT: tl.constexpr,
    OF_X: tl.constexpr,
):
    """Gradients of `turn`: of x, and of the table in parts ``[groups varying tokens 2F]``, each the sum over `rows` rows."""
    start, first, last = _mine(tokens, shared, rows, T)
    left = tokens - start
    cos, sin = _read(table + _place(first, start, sizes, of_table), of_table[3], left, "pairs", F, P, T)
    if ADJOINT:
        sin = -sin
    of_cos, of_sin = tl.zeros_like(cos), tl.zeros_like(sin)
    for row in range(first, last):
        from_grad = grad + _place(row, start, sizes, of_grad)
        a, b = _read(x + _place(row, start, sizes, of_x), of_x[3], left, FROM, F, P, T)
        of_a, of_b = _read(from_grad, of_grad[3], left, TO, F, P, T)
        of_cos += of_a * a + of_b * b
        of_sin += of_b * a - of_a * b
        if OF_X:
            to = grad_x + _place(row, start, sizes, of_grad_x)
            _write(to, of_grad_x[3], left, of_a * cos + of_b * sin, of_b * cos - of_a * sin, FROM, F, P, T)
            if REST > 0:
                _pass_on(from_grad + 2 * F, of_grad[3], to + 2 * F, of_grad_x[3], left, REST, R, T)
    if ADJOINT:
        of_sin = -of_sin
    varying = sizes[0] * sizes[1] * sizes[2] // shared
    part = first % shared // rows * varying + first // shared
    _write(parts + (part * tokens + start) * 2 * F, 2 * F, left, of_cos, of_sin, "pairs", F, P, T)


def _power(n: int) -> int:
    """The power of two from n on."""
    return 1 << (n - 1).bit_length()


def _over(n: int, size: int) -> int:
    """Parts of a size that hold n."""
    return -(-n // size)


class _Launch(NamedTuple):
    """How rows are dealt to programs: their leading axes with those ahead by which the table varies.

    Attributes:
        order: The three leading axes of features in that order.
        sizes: Theirs.
        shared: Rows that share one of the table.
        tile: Tokens of a program.
        rows: Of those that share one of the table, how many a program turns: as many as leave the device busy.
    """

    order: list[int]
    sizes: tuple[int, ...]
    tokens: int
    pairs: int
    shared: int
    tile: int
    rows: int

    @classmethod
    def of(cls, shape: torch.Size, table: Tensor) -> "_Launch":
        """That of features ``[*b h t .]`` and rows of a table ``[*b h t 2f]``."""
        leading = [1] * (5 - len(shape)) + list(shape[:-2])
        own = [1] * (5 - table.ndim) + list(table.shape[:-2])
        order = sorted(range(3), key=lambda n: own[n] == 1)
        t, f = shape[-2], table.shape[-1] // 2
        tile = max(1, min(_power(t), TILE // _power(f)))
        shared = math.prod(n for n, varies in zip(leading, own, strict=True) if varies == 1)
        programs = math.prod(leading) // shared * _over(t, tile)
        rows = _over(shared, min(shared, _over(BUSY, programs)))
        return cls(order, tuple(leading[n] for n in order), t, f, shared, tile, rows)

    @property
    def groups(self) -> int:
        """Programs for the tokens of a row of the table."""
        return _over(self.shared, self.rows)

    @property
    def programs(self) -> int:
        """All of them."""
        return math.prod(self.sizes) // self.shared * self.groups * _over(self.tokens, self.tile)

    def places(self, *tensors: Tensor) -> tuple[Any, ...]:
        """What a kernel takes after its tensors ``[*b h t .]``: sizes, then strides of each, zero for an axis of one."""
        found = []
        for x in tensors:
            strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
            leading = [0] * (5 - x.ndim) + strides[:-2]
            found.append((*(leading[n] for n in self.order), strides[-2]))
        return self.tokens, self.shared, self.rows, self.sizes, *found

    def constants(self, x: Tensor, *, lifted: bool, adjoint: bool, halves: bool) -> dict[str, int | str]:
        """What is known when a kernel is compiled."""
        rest = 0 if lifted else x.shape[-1] - 2 * self.pairs
        way = ("alone", "halves") if lifted else ("halves" if halves else "pairs", "pairs")
        way = way[::-1] if adjoint else way
        powers = {"P": _power(self.pairs), "R": _power(max(rest, 1))}
        sizes = {"F": self.pairs, "REST": rest, "T": self.tile} | powers
        return sizes | {"FROM": way[0], "TO": way[1], "ADJOINT": adjoint}


def refuses(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool) -> str:
    """Why the kernel does not serve these, which `gpu.unreadable` lets pass, or ""."""
    if table.dtype != torch.float32 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it turns float32, bfloat16 and float16 by a float32 table, not {x.dtype} by {table.dtype}"
    if not 3 <= x.ndim <= 5:
        return f"it has one to three axes ahead of tokens, not {x.ndim - 2}"
    width, own = table.shape[-2] * (2 if adjoint or not lifted else 1), table.shape[:-2]
    if x.shape[-1] != width if lifted else x.shape[-1] < width:
        return f"it turns features of {width}, not of {x.shape[-1]}"
    if table.shape[-2] > WIDEST or x.shape[-1] - width > 2 * WIDEST:
        return f"it has at most {WIDEST} pairs"
    if torch.broadcast_shapes(x.shape[:-1], own) != x.shape[:-1] or own[-1] != x.shape[-2] or 0 in x.shape:
        return f"it has a row of the table for every token, not {list(own)} for {list(x.shape[:-1])}"
    return ""


def rotate(
    x: Tensor,
    table: Tensor,
    *,
    lifted: bool = False,
    adjoint: bool = False,
    halves: bool = False,
    in_place: bool = False,
) -> Tensor:
    """x ``[*b h t .]`` rotated or lifted by a table ``[*b h t f 2]``, or by the adjoint; without a graph.

    Features after those of the table's pairs pass unchanged.

    Args:
        halves: Pairs (2i, 2i + 1) come from (i, i + f), and go back there by the adjoint.
        in_place: Write over x, in which a token's features are next to each other.
    """
    x, rows = x if in_place else flat(x), flat(table.flatten(-2))
    launch = _Launch.of(x.shape, rows)
    constants = launch.constants(x, lifted=lifted, adjoint=adjoint, halves=halves)
    if in_place:
        out = x
    elif lifted:
        out = x.new_empty(*x.shape[:-1], launch.pairs * (1 if adjoint else 2))
    else:
        out = torch.empty_like(x)
        out = out if out.stride(-1) == 1 else out.contiguous()  # of what overlaps itself, PyTorch may put another axis last
    with torch.cuda.device_of(x):
        turn[(launch.programs,)](x, rows, out, *launch.places(x, rows, out), **constants)
    return out


def pulled(
    x: Tensor, table: Tensor, grad: Tensor, *, lifted: bool, adjoint: bool, halves: bool = False, of_x: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Gradients of x, if `of_x`, and of the table, from that of `rotate`."""
    x, grad, rows = flat(x), flat(grad), flat(table.flatten(-2))
    launch = _Launch.of(x.shape, rows)
    constants = launch.constants(x, lifted=lifted, adjoint=adjoint, halves=halves) | {"OF_X": of_x}
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else x  # which is not written
    parts = table.new_empty(launch.groups, *table.shape)
    places = launch.places(x, rows, grad, grad_x)
    with torch.cuda.device_of(x):
        pull[(launch.programs,)](x, rows, grad, grad_x, parts, *places, **constants)
    return grad_x if of_x else None, parts.sum(0) if launch.groups > 1 else parts[0]
