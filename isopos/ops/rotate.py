"""Rotations, permutations and dense maps of features: the operations of isometries."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from isopos.exact import is_exporting, to_float64
from isopos.ops import gpu, library

BLOCK = 1 << 14  # tokens per block of angles
_AS_ONNX = ContextVar("as_onnx", default=False)  # whether an export has rotations as ONNX's operation


def angles(position: Tensor, frequency: Tensor) -> Tensor:
    """Angles in radians, float64 ``[*b h t f]``, of positions ``[*b t c]`` and frequencies ``[h c f]`` (radians per step).

    It uses products and sums instead of a matmul, which autocast would round: position 2^31 keeps an error below 1e-6. The
    result is on the CPU if the positions' device has no float64.
    """
    x = to_float64(position)[..., None, :, :, None]
    return (x * to_float64(frequency, position.device)[:, None]).sum(-2)


def rotation_table(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of angles ``[*b h t f]``, rounded once: ``[*b h t f 2]``."""
    return torch.stack((angle.cos(), angle.sin()), -1).to(dtype)


def rotations(position: Tensor, frequency: Tensor, dtype: torch.dtype) -> Tensor:
    """The rotation table ``[*b h t f 2]`` of positions ``[*b t c]`` and frequencies ``[h c f]``, on the positions' device.

    Without gradients it is computed one block of tokens at a time, since float64 angles take twice the memory of the table.
    """
    t = position.shape[-2]
    learns = torch.is_grad_enabled() and (frequency.requires_grad or position.requires_grad)
    if learns or torch.compiler.is_compiling() or t <= BLOCK:
        return rotation_table(angles(position, frequency), dtype).to(position.device)
    out = None
    for start in range(0, t, BLOCK):
        part = rotation_table(angles(position[..., start : start + BLOCK, :], frequency), dtype)
        out = part.new_empty(*part.shape[:-3], t, *part.shape[-2:]) if out is None else out
        out[..., start : start + BLOCK, :, :] = part
    assert out is not None
    return out.to(position.device)


def rotate_naive(x: Tensor, table: Tensor) -> Tensor:
    """Rotate feature pairs (2i, 2i+1) of x ``[*b h t 2f]`` by a table ``[*b h t f 2]`` (RoFormer, Eq. 15)."""
    cos, sin = table.unbind(-1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """`rotate_naive` as one complex product: pairs and table are viewed as complex, and only the result is allocated."""
    if torch.compiler.is_compiling() or x.dtype != table.dtype:
        out = exported(x, table)  # else a compiler fuses the real formula and cannot generate code for complex numbers
        return rotate_naive(x, table) if out is None else out
    if (out := _compiled(x, table, lifted=False, adjoint=False)) is not None:
        return out
    if not x.numel():
        return rotate_naive(x, table)  # complex views of empty slices with an odd offset have no gradient
    return torch.view_as_real(_complex(x.unflatten(-1, (-1, 2))) * _complex(table)).flatten(-2)


@contextmanager
def as_onnx(choice: bool = True) -> Iterator[None]:
    """Within it, `torch.export` sees rotations as ONNX's RotaryEmbedding where they are one."""
    token = _AS_ONNX.set(choice)
    try:
        yield
    finally:
        _AS_ONNX.reset(token)


def exported(x: Tensor, table: Tensor) -> Tensor | None:
    """`rotate` as ONNX's RotaryEmbedding, in an export that asks for it; features after those of the table pass unchanged.

    None where it is not this operation: float64, a table per head, and other numbers of axes than ``[b h t d]``.
    """
    if not is_exporting() or torch.compiler.is_dynamo_compiling() or not _AS_ONNX.get():
        return None  # dynamo, of strict exports, does not know context variables
    shared = table.ndim < 4 or table.shape[-4] == 1  # by all heads
    if x.ndim != 4 or table.ndim > 5 or not shared or {x.dtype, table.dtype} != {torch.float32}:
        return None
    table = table.reshape(-1, *table.shape[-3:]).expand(x.shape[0], x.shape[-2], -1, -1)  # [b t f 2]
    cos, sin = table.unbind(-1)
    width = 2 * table.shape[-2]
    return torch.onnx.ops.rotary_embedding(
        x, cos, sin, interleaved=True, rotary_embedding_dim=0 if width == x.shape[-1] else width
    )


def _complex(pairs: Tensor) -> Tensor:
    """Pairs ``[... 2]`` as complex numbers, copied if their strides allow no view."""
    *strides, last = pairs.stride()
    if last != 1 or pairs.storage_offset() % 2 or any(stride % 2 for stride in strides):
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)


def unrotate(x: Tensor, table: Tensor) -> Tensor:
    """The inverse of `rotate`, which is its adjoint."""
    if (out := _compiled(x, table, lifted=False, adjoint=True)) is not None:
        return out
    cos, sin = table.unbind(-1)
    return rotate(x, torch.stack((cos, -sin), -1))


def lift(x: Tensor, table: Tensor) -> Tensor:
    """x ``[*b h t d]`` -> (x cos, x sin) ``[*b h t 2d]``: complex numbers x e^{i angle} as real features (LRPE, Eq. 22)."""
    if (out := _compiled(x, table, lifted=True, adjoint=False)) is not None:
        return out
    cos, sin = table.unbind(-1)
    return torch.cat((x * cos, x * sin), -1)


def unlift(x: Tensor, table: Tensor) -> Tensor:
    """The adjoint of `lift`: (a, b) ``[*b h t 2d]`` -> a cos + b sin ``[*b h t d]``, which undoes it."""
    if (out := _compiled(x, table, lifted=True, adjoint=True)) is not None:
        return out
    cos, sin = table.unbind(-1)
    first, second = x.chunk(2, -1)
    return first * cos + second * sin


def rotate_on_gpu(
    x: Tensor, table: Tensor, *, lifted: bool = False, adjoint: bool = False, halves: bool = False
) -> Tensor | None:
    """Rotate or lift x, or apply the adjoint, in one GPU kernel; None if no kernel serves x.

    x has any floating dtype except float64; arithmetic is float32 and the result has the dtype of x. Features beyond the
    pairs of the table pass unchanged. With `halves`, input pairs are (i, i + f), as in `half_to_interleaved`.
    """
    kernel = _kernel(x, table, lifted=lifted, adjoint=adjoint)
    how = {"lifted": lifted, "adjoint": adjoint, "halves": halves}
    return None if kernel is None else _OnGpu.apply(x, table, kernel, how)  # pyright: ignore[reportReturnType]


def _kernel(x: Tensor, table: Tensor, *, lifted: bool = False, adjoint: bool = False) -> Any:
    """The module `triton_rotate` if it serves these tensors, otherwise None."""
    if torch.compiler.is_compiling() or gpu.unreadable("rotation", x, table):
        return None
    from isopos.ops import triton_rotate

    return None if triton_rotate.refuses(x, table, lifted=lifted, adjoint=adjoint) else triton_rotate


class _OnGpu(torch.autograd.Function):
    """`triton_rotate.rotate` with gradients of x and of the table."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, kernel: Any, how: dict[str, bool]) -> Tensor:
        ctx.save_for_backward(table, x if ctx.needs_input_grad[1] else None)
        ctx.kernel, ctx.how = kernel, how
        return kernel.rotate(x, table, **how)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (table, x), (grad,), how, wanted = ctx.saved_tensors, grads, ctx.how, ctx.needs_input_grad[:2]
        if x is None:
            how = {**how, "adjoint": not how["adjoint"]}
            out = rotate_on_gpu(grad, table, **how)
            derivatives = [_defined(grad, table, **how) if out is None else out, None]
        elif torch.is_grad_enabled() or gpu.unreadable(
            "rotation", x, table, grad
        ):  # for second derivatives, or if hooks unpacked other tensors
            with torch.enable_grad():
                out, leaves = _defined(x, table, **how), [a for a, want in zip((x, table), wanted, strict=True) if want]
            grads_of = iter(torch.autograd.grad(out, leaves, grad, create_graph=torch.is_grad_enabled()))
            derivatives = [next(grads_of) if want else None for want in wanted]
        else:
            derivatives = ctx.kernel.rotate_vjp(x, table, grad, **how, of_x=wanted[0])
        return *derivatives, None, None


def _defined(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool, halves: bool) -> Tensor:
    """`rotate_on_gpu` by PyTorch's operations, for second derivatives."""
    promoted, width = x.to(torch.promote_types(x.dtype, table.dtype)), x.shape[-1] if lifted else 2 * table.shape[-2]
    rotated, index = promoted[..., :width], half_to_interleaved(width, device=x.device) if halves else None
    rotated = rotated if index is None or adjoint else rotated[..., index]
    cos, sin = table.to(promoted.dtype).unbind(-1)
    if lifted:
        first, second = rotated.chunk(2, -1) if adjoint else (rotated, rotated)
        rotated = first * cos + second * sin if adjoint else torch.cat((first * cos, second * sin), -1)
    else:
        rotated = rotate_naive(rotated, torch.stack((cos, -sin if adjoint else sin), -1))
    rotated = rotated if index is None or not adjoint else rotated[..., index.argsort()]
    return torch.cat((rotated, promoted[..., width:]), -1).to(x.dtype)


class _Compiled(torch.autograd.Function):
    """`library.rotate` by a table without gradient; the backward pass applies the adjoint from `_ROTATIONS`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, lifted: bool, adjoint: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.lifted, ctx.adjoint = lifted, adjoint
        return library.rotate(x, table, lifted=lifted, adjoint=adjoint)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ROTATIONS[ctx.lifted, not ctx.adjoint](grads[0], *ctx.saved_tensors), None, None, None


def _compiled(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool) -> Tensor | None:
    """Rotate or lift, or the adjoint, by compiled code; None where it does not serve or is not faster."""
    if torch.compiler.is_compiling() or x.dtype != table.dtype:
        return None
    if not table.requires_grad and library.rotates(x, table, lifted=lifted, adjoint=adjoint):
        return _Compiled.apply(x, table, lifted, adjoint)  # pyright: ignore[reportReturnType]
    return rotate_on_gpu(x, table, lifted=lifted, adjoint=adjoint)


_ROTATIONS = {(False, False): rotate, (False, True): unrotate, (True, False): lift, (True, True): unlift}


def narrow_index(index: Tensor, features: int) -> Tensor:
    """An index of features in the smallest dtype that holds it; compiled kernels read uint8, for up to 256 features.

    Examples:
        >>> narrow_index(torch.tensor([1, 0]), 2).dtype, narrow_index(torch.tensor([1, 0]), 300).dtype
        (torch.uint8, torch.int16)
    """
    return index.to(torch.uint8 if features <= 1 << 8 else torch.int16 if features <= 1 << 15 else torch.int32)


def permute(x: Tensor, index: Tensor) -> Tensor:
    """y[..., i] = x[..., index[..., i]] for x ``[*b h t d]`` and integers index ``[*b h t d]``, or broadcastable to it."""
    shape = torch.broadcast_shapes(x.shape, index.shape)
    return x.expand(shape).gather(-1, index.to(torch.int64).expand(shape))


def unpermute(x: Tensor, index: Tensor) -> Tensor:
    """The inverse of `permute`, which is its adjoint."""
    shape = torch.broadcast_shapes(x.shape, index.shape)
    return torch.empty(shape, dtype=x.dtype, device=x.device).scatter_(
        -1, index.to(torch.int64).expand(shape), x.expand(shape)
    )


def transform(x: Tensor, matrix: Tensor) -> Tensor:
    """Apply a constant matrix ``[h d' d]`` to each token of x ``[*b h t d]``."""
    return x @ matrix.mT.to(x.dtype)


def transform_tokens(x: Tensor, matrix: Tensor) -> Tensor:
    """Apply one matrix per token ``[*b h t d' d]`` to x ``[*b h t d]``; returns their promoted dtype."""
    dtype = torch.promote_types(x.dtype, matrix.dtype)
    if is_exporting():  # ONNX's Einsum does not broadcast
        return (matrix.to(dtype) @ x.to(dtype)[..., None]).squeeze(-1)
    return torch.einsum("...ij,...j->...i", matrix.to(dtype), x.to(dtype))


def skew_exponential(generator: Tensor) -> Tensor:
    """exp(A - A^T) of generators A ``[... d d]``: orthogonal, with determinant 1.

    A single matrix is computed as a pair: alone, PyTorch's CPU code loses seven of float64's digits at small norms.
    """
    skew = generator - generator.mT
    if skew.shape[:-2].numel() > 1:
        return torch.linalg.matrix_exp(skew)
    return torch.linalg.matrix_exp(skew.expand(2, *skew.shape))[0]


def reflect(x: Tensor, normal: Tensor) -> Tensor:
    """Householder reflection x - 2 <x, u> u with a unit normal u ``[h 1 d]``: two passes, never a d x d product."""
    return x - (2 * (x * normal).sum(-1, keepdim=True)) * normal


def half_to_interleaved(features: int, *, device: torch.device | str | None = None) -> Tensor:
    """The index ``[d]`` that turns the half-split layout (pairs i, i + d/2) into the interleaved one (pairs 2i, 2i + 1).

    ``x_half[..., half_to_interleaved(d)]`` is interleaved; applied to the rows of a projection's weight it converts a
    checkpoint. ``half_to_interleaved(d).argsort()`` is the inverse.

    Examples:
        >>> half_to_interleaved(6).tolist()
        [0, 3, 1, 4, 2, 5]
    """
    if features % 2:
        raise ValueError(f"features: expected an even number, got {features}")
    return torch.arange(features, device=device).unflatten(0, (2, -1)).T.flatten()
