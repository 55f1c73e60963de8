"""Rotations, permutations and dense maps of features: what isometries do to a tensor."""

from typing import Any

import torch
from torch import Tensor

from isopos.exact import wide
from isopos.ops import library

BLOCK = 1 << 14  # tokens whose angles are formed at a time


def angles(position: Tensor, frequency: Tensor) -> Tensor:
    """Angles in radians, float64 ``[*b h t f]``, of positions ``[*b t c]`` and frequencies ``[h c f]`` (radians per step).

    Products and sums, not a matmul: autocast leaves them alone, and position 2^31 keeps an error below 1e-6. They are on the
    CPU where the positions' device has no float64.
    """
    x = wide(position)[..., None, :, :, None]
    return (x * wide(frequency, position.device)[:, None]).sum(-2)


def rotation_table(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosine and sine of angles ``[*b h t f]``, rounded once: ``[*b h t f 2]``."""
    return torch.stack((angle.cos(), angle.sin()), -1).to(dtype)


def rotations(position: Tensor, frequency: Tensor, dtype: torch.dtype) -> Tensor:
    """The rotation table ``[*b h t f 2]`` of positions ``[*b t c]`` and frequencies ``[h c f]``, on the positions' device.

    Where nothing learns it is filled a block of tokens at a time, since float64 angles are twice the table.
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
    """`rotate_naive` as one complex product: pairs and table are viewed as complex, nothing but the result is made."""
    if torch.compiler.is_compiling() or x.dtype != table.dtype:
        return rotate_naive(x, table)  # a compiler fuses the real formula and cannot generate code for complex numbers
    if _large(x, table, lifted=False, adjoint=False):
        return _Compiled.apply(x, table, False, False)
    return torch.view_as_real(_complex(x.unflatten(-1, (-1, 2))) * _complex(table)).flatten(-2)


def _complex(pairs: Tensor) -> Tensor:
    """Pairs ``[... 2]`` as complex numbers, copied where their places in memory do not allow a view."""
    *strides, last = pairs.stride()
    if last != 1 or pairs.storage_offset() % 2 or any(stride % 2 for stride in strides):
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)


def unrotate(x: Tensor, table: Tensor) -> Tensor:
    """The inverse of `rotate`, which is its adjoint."""
    if _large(x, table, lifted=False, adjoint=True):
        return _Compiled.apply(x, table, False, True)
    cos, sin = table.unbind(-1)
    return rotate(x, torch.stack((cos, -sin), -1))


def lift(x: Tensor, table: Tensor) -> Tensor:
    """x ``[*b h t d]`` -> (x cos, x sin) ``[*b h t 2d]``: complex numbers x e^{i angle} as real features (LRPE, Eq. 22)."""
    if _large(x, table, lifted=True, adjoint=False):
        return _Compiled.apply(x, table, True, False)
    cos, sin = table.unbind(-1)
    return torch.cat((x * cos, x * sin), -1)


def unlift(x: Tensor, table: Tensor) -> Tensor:
    """The adjoint of `lift`: (a, b) ``[*b h t 2d]`` -> a cos + b sin ``[*b h t d]``, which undoes it."""
    if _large(x, table, lifted=True, adjoint=True):
        return _Compiled.apply(x, table, True, True)
    cos, sin = table.unbind(-1)
    first, second = x.chunk(2, -1)
    return first * cos + second * sin


class _Compiled(torch.autograd.Function):
    """A map of `_ROTATIONS`, by a table that needs no gradient: `library.rotate`, and its adjoint in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, lifted: bool, adjoint: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.lifted, ctx.adjoint = lifted, adjoint
        return library.rotate(x, table, lifted=lifted, adjoint=adjoint)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ROTATIONS[ctx.lifted, not ctx.adjoint](grads[0], *ctx.saved_tensors), None, None, None


def _large(x: Tensor, table: Tensor, *, lifted: bool, adjoint: bool) -> bool:
    """Whether `_Compiled` serves these and is faster: where the result is larger than a cache."""
    eager = not torch.compiler.is_compiling() and not table.requires_grad
    return eager and library.rotates(x, table, lifted=lifted, adjoint=adjoint)


_ROTATIONS = {(False, False): rotate, (False, True): unrotate, (True, False): lift, (True, True): unlift}


def permute(x: Tensor, index: Tensor) -> Tensor:
    """Feature ``index[..., i]`` of x at place i: x ``[*b h t d]``, index int64 ``[*b h t d]`` or broadcastable to it."""
    shape = torch.broadcast_shapes(x.shape, index.shape)
    return x.expand(shape).gather(-1, index.expand(shape))


def unpermute(x: Tensor, index: Tensor) -> Tensor:
    """The inverse of `permute`, which is its adjoint."""
    shape = torch.broadcast_shapes(x.shape, index.shape)
    return torch.empty(shape, dtype=x.dtype, device=x.device).scatter_(-1, index.expand(shape), x.expand(shape))


def transform(x: Tensor, matrix: Tensor) -> Tensor:
    """Apply a constant matrix ``[h d' d]`` to each token of x ``[*b h t d]``."""
    return x @ matrix.mT.to(x.dtype)


def transform_tokens(x: Tensor, matrix: Tensor) -> Tensor:
    """Apply a matrix a token ``[*b h t d' d]`` to x ``[*b h t d]``; the dtype is the wider of the two."""
    dtype = torch.promote_types(x.dtype, matrix.dtype)
    return torch.einsum("...ij,...j->...i", matrix.to(dtype), x.to(dtype))


def skew_exponential(generator: Tensor) -> Tensor:
    """exp(A - A^T) of generators A ``[... d d]``: orthogonal, with determinant 1.

    A single matrix goes as a pair: alone, PyTorch's CPU code loses seven of float64's digits at small norms.
    """
    skew = generator - generator.mT
    if skew.shape[:-2].numel() > 1:
        return torch.linalg.matrix_exp(skew)
    return torch.linalg.matrix_exp(skew.expand(2, *skew.shape))[0]


def reflect(x: Tensor, normal: Tensor) -> Tensor:
    """Householder reflection x - 2 <x, u> u with a unit normal u ``[h 1 d]``: two passes, never a d x d product."""
    return x - (2 * (x * normal).sum(-1, keepdim=True)) * normal


def half_to_interleaved(features: int, *, device: torch.device | str | None = None) -> Tensor:
    """The index that brings the half-split layout (pair i, i + d/2) into the interleaved one (pair 2i, 2i+1): ``[d]``.

    ``x_half[..., half_to_interleaved(d)]`` is interleaved; applied to the rows of a projection's weight it converts a
    checkpoint. ``half_to_interleaved(d).argsort()`` is the way back.

    Examples:
        >>> half_to_interleaved(6).tolist()
        [0, 3, 1, 4, 2, 5]
    """
    if features % 2:
        raise ValueError(f"features: expected an even number, got {features}")
    return torch.arange(features, device=device).unflatten(0, (2, -1)).T.flatten()
