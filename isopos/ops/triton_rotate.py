# pyright: reportInvalidTypeForm=false
"""Rotations and lifts on CUDA devices by Triton, in one pass over features.

A program loads the table rows of some tokens and maps all samples and heads that share them. Arithmetic is float32 for every
dtype of features. Gradients of the table are float32 sums in a fixed order.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isopos.ops import gpu
from isopos.ops.library import flat
from isopos.ops.triton_plan import launch, layouts, planned

jit, tl = gpu.language()
kernel = partial(jit, do_not_specialize=("tokens", "shared", "rows"))  # one variant for all lengths and batches

TILE, BUSY, WARPS = 2048, 1024, 2  # pairs per program; programs that fill a device; its warps, from sweeps on an H100
WIDEST = 1024  # largest number of pairs per head


@jit
def _read(x, step, left, LAYOUT: tl.constexpr, F: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    """First and second features of F pairs (P: next power of two) of T tokens, `left` of which exist.

    LAYOUT: features of a pair are adjacent ("pairs"), F apart ("halves"), or only the first one exists ("alone").
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
    """Copy REST features (R: next power of two) of T tokens."""
    token, place = tl.arange(0, T)[:, None], tl.arange(0, R)[None, :]
    seen = (token < left) & (place < REST)
    tile = tl.load(x + token.to(tl.int64) * x_step + place, mask=seen)
    tl.store(out + token.to(tl.int64) * out_step + place, tile.to(out.dtype.element_ty), mask=seen)


@jit
def _indices(row, sizes):
    """Indices of a row, counted over three axes."""
    i, j, k = row // (sizes[1] * sizes[2]), row // sizes[2] % sizes[1], row % sizes[2]
    return i.to(tl.int32), j.to(tl.int32), k.to(tl.int32)


@jit
def _next(i, j, k, sizes):
    """Indices of the next row, without divisions."""
    k += 1
    j += (k == sizes[2]).to(tl.int32)
    i += (j == sizes[1]).to(tl.int32)
    return i, tl.where(j == sizes[1], 0, j), tl.where(k == sizes[2], 0, k)


@jit
def _offset(i, j, k, start, strides):
    """Offset of token `start` of a row."""
    return i.to(tl.int64) * strides[0] + j.to(tl.int64) * strides[1] + k.to(tl.int64) * strides[2] + start * strides[3]


@jit
def _share(tokens, shared, rows, T: tl.constexpr):
    """First token of this program, its first row, and the row after its last."""
    pid, blocks, groups = tl.program_id(0).to(tl.int64), tl.cdiv(tokens, T), tl.cdiv(shared, rows)
    group = pid // blocks
    first = group // groups * shared + group % groups * rows
    return pid % blocks * T, first, tl.minimum(first + rows, (group // groups + 1) * shared)


@kernel
def rotation_kernel(
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
    """Rotate rows of x. `shared` rows share one row of the table; a program rotates up to `rows` of them.

    `sizes` has the lengths of three leading axes; `of_x` and so on have strides of these axes and of tokens.
    """
    start, first, last = _share(tokens, shared, rows, T)
    left = tokens - start
    i, j, k = _indices(first, sizes)
    cos, sin = _read(table + _offset(i, j, k, start, of_table), of_table[3], left, "pairs", F, P, T)
    if ADJOINT:
        sin = -sin
    for _ in range(first, last):
        source, to = x + _offset(i, j, k, start, of_x), out + _offset(i, j, k, start, of_out)
        a, b = _read(source, of_x[3], left, FROM, F, P, T)
        _write(to, of_out[3], left, a * cos - b * sin, a * sin + b * cos, TO, F, P, T)
        if REST > 0:
            _pass_on(source + 2 * F, of_x[3], to + 2 * F, of_out[3], left, REST, R, T)
        i, j, k = _next(i, j, k, sizes)


@kernel
def rotation_vjp_kernel(
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
    """VJP of `rotation_kernel`: gradients of x, and of the table ``[groups varying tokens 2F]`` per group of rows."""
    start, first, last = _share(tokens, shared, rows, T)
    left = tokens - start
    i, j, k = _indices(first, sizes)
    cos, sin = _read(table + _offset(i, j, k, start, of_table), of_table[3], left, "pairs", F, P, T)
    if ADJOINT:
        sin = -sin
    of_cos, of_sin = tl.zeros_like(cos), tl.zeros_like(sin)
    for _ in range(first, last):
        from_grad = grad + _offset(i, j, k, start, of_grad)
        a, b = _read(x + _offset(i, j, k, start, of_x), of_x[3], left, FROM, F, P, T)
        of_a, of_b = _read(from_grad, of_grad[3], left, TO, F, P, T)
        of_cos += of_a * a + of_b * b
        of_sin += of_b * a - of_a * b
        if OF_X:
            to = grad_x + _offset(i, j, k, start, of_grad_x)
            _write(to, of_grad_x[3], left, of_a * cos + of_b * sin, of_b * cos - of_a * sin, FROM, F, P, T)
            if REST > 0:
                _pass_on(from_grad + 2 * F, of_grad[3], to + 2 * F, of_grad_x[3], left, REST, R, T)
        i, j, k = _next(i, j, k, sizes)
    if ADJOINT:
        of_sin = -of_sin
    varying = sizes[0] * sizes[1] * sizes[2] // shared
    part = first % shared // rows * varying + first // shared
    _write(parts + (part * tokens + start) * 2 * F, 2 * F, left, of_cos, of_sin, "pairs", F, P, T)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _ceil_div(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


class _Launch(NamedTuple):
    """How rows are distributed over programs. Leading axes are reordered: axes along which the table varies come first.

    Attributes:
        order: The three leading axes of features in this order.
        sizes: Their lengths.
        tokens: Number of tokens.
        pairs: Number of pairs per head.
        shared: Number of rows that share one row of the table.
        tile: Tokens per program.
        rows: Number of rows of one group per program, such that the device stays busy.
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
        """The launch for features ``[*b h t .]`` and a table ``[*b h t 2f]``."""
        leading = [1] * (5 - len(shape)) + list(shape[:-2])
        varying = [1] * (5 - table.ndim) + list(table.shape[:-2])
        order = sorted(range(3), key=lambda n: varying[n] == 1)
        t, f = shape[-2], table.shape[-1] // 2
        tile = max(1, min(_power_of_two(t), TILE // _power_of_two(f)))
        shared = math.prod(n for n, varies in zip(leading, varying, strict=True) if varies == 1)
        programs = math.prod(leading) // shared * _ceil_div(t, tile)
        rows = _ceil_div(shared, min(shared, _ceil_div(BUSY, programs)))
        return cls(order, tuple(leading[n] for n in order), t, f, shared, tile, rows)

    @property
    def groups(self) -> int:
        """Number of programs per tile of tokens of a table row."""
        return _ceil_div(self.shared, self.rows)

    @property
    def programs(self) -> int:
        """Number of programs."""
        return math.prod(self.sizes) // self.shared * self.groups * _ceil_div(self.tokens, self.tile)

    def arguments(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Arguments of a kernel after its tensors ``[*b h t .]``: sizes, then strides, zero for axes of length 1."""
        found = []
        for x in tensors:
            strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
            leading = [0] * (5 - x.ndim) + strides[:-2]
            found.append((*(leading[n] for n in self.order), strides[-2]))
        return self.tokens, self.shared, self.rows, self.sizes, *found

    def constants(self, x: Tensor, *, lifted: bool, adjoint: bool, halves: bool) -> dict[str, int | str]:
        """Compile-time constants of a kernel."""
        rest = 0 if lifted else x.shape[-1] - 2 * self.pairs
        way = ("alone", "halves") if lifted else ("halves" if halves else "pairs", "pairs")
        way = way[::-1] if adjoint else way
        powers = {"P": _power_of_two(self.pairs), "R": _power_of_two(max(rest, 1))}
        sizes = {"F": self.pairs, "REST": rest, "T": self.tile, "num_warps": WARPS} | powers
        return sizes | {"FROM": way[0], "TO": way[1], "ADJOINT": adjoint}


def refuses(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool) -> str:
    """Why the kernel does not serve tensors that `gpu.unreadable` accepts, or ""."""
    if table.dtype != torch.float32 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it rotates float32, bfloat16 and float16 by a float32 table, not {x.dtype} by {table.dtype}"
    if not 3 <= x.ndim <= 5:
        return f"it has one to three axes ahead of tokens, not {x.ndim - 2}"
    width, rows = table.shape[-2] * (2 if adjoint or not lifted else 1), table.shape[:-2]
    if x.shape[-1] != width if lifted else x.shape[-1] < width:
        return f"it rotates features of {width}, not of {x.shape[-1]}"
    if table.shape[-2] > WIDEST or x.shape[-1] - width > 2 * WIDEST:
        return f"it has at most {WIDEST} pairs"
    fits = len(rows) < x.ndim and all(r in (1, n) for r, n in zip(reversed(rows), reversed(x.shape[:-1]), strict=False))
    if not fits or rows[-1] != x.shape[-2] or 0 in x.shape:
        return f"it has a row of the table for every token, not {list(rows)} for {list(x.shape[:-1])}"
    return ""


def rotate(x: Tensor, table: Tensor, *, lifted: bool = False, adjoint: bool = False, halves: bool = False) -> Tensor:
    """Rotate or lift x ``[*b h t .]`` by a table ``[*b h t f 2]``, or by the adjoint, without a graph.

    Features beyond the pairs of the table pass unchanged.

    Args:
        x: Features ``[*b h t .]``.
        table: Cosines and sines ``[*b h t f 2]``.
        lifted: Lift instead of rotate.
        adjoint: Apply the adjoint.
        halves: Input pairs are (i, i + f), output pairs (2i, 2i + 1); the adjoint goes back.
    """
    x, rows = flat(x), flat(table.flatten(-2))

    def run() -> list[Tensor | None]:
        of = _Launch.of(x.shape, rows)
        if lifted:
            out = x.new_empty(*x.shape[:-1], of.pairs * (1 if adjoint else 2))
        else:
            out = torch.empty_like(x)
            out = out if out.stride(-1) == 1 else out.contiguous()  # empty_like of overlapping memory may reorder axes
        constants = of.constants(x, lifted=lifted, adjoint=adjoint, halves=halves)
        launch(rotation_kernel, (of.programs,), x, rows, out, *of.arguments(x, rows, out), **constants)
        return [out]

    with torch.cuda.device_of(x):
        (out,) = planned(("rotate", lifted, adjoint, halves, layouts((x, rows))), (x, rows), run)
    assert out is not None
    return out


def rotate_vjp(
    x: Tensor, table: Tensor, grad: Tensor, *, lifted: bool, adjoint: bool, halves: bool = False, of_x: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Gradients of x (None without `of_x`) and of the table, given the gradient of `rotate`."""
    given = x, grad, rows = flat(x), flat(grad), flat(table.flatten(-2))

    def run() -> list[Tensor | None]:
        of = _Launch.of(x.shape, rows)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else x  # not written
        parts = table.new_empty(of.groups, *table.shape)
        constants = of.constants(x, lifted=lifted, adjoint=adjoint, halves=halves) | {"OF_X": of_x}
        arguments = of.arguments(x, rows, grad, grad_x)
        launch(rotation_vjp_kernel, (of.programs,), x, rows, grad, grad_x, parts, *arguments, **constants)
        return [grad_x if of_x else None, parts]

    with torch.cuda.device_of(x):
        grad_x, parts = planned(("rotate_vjp", lifted, adjoint, halves, of_x, layouts(given)), given, run)
    assert parts is not None
    return grad_x, parts.sum(0) if parts.shape[0] > 1 else parts[0]
