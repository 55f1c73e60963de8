"""Conversion of the sums of a stream to the layout of Triton's kernels: one row ``[*b h .]``, k v^T, then keys."""

from dataclasses import replace

import torch
from torch import Tensor

from isopos.ops.linear.features import Past, Sums
from isopos.ops.linear.step import weighed


def expanded(sums: Sums) -> Sums:
    """The problem with leading axes of queries for keys and values, too, which may lack the first ones in streams."""
    if sums.stream is None:
        return sums
    leading, first = sums.q.shape[:-2], sums.q.ndim - sums.k.ndim
    if sums.k.shape[:-2] != sums.v.shape[:-2] or leading[max(first, 0) :] != sums.k.shape[:-2]:
        return sums
    return replace(sums, k=sums.k.expand(*leading, *sums.k.shape[-2:]), v=sums.v.expand(*leading, *sums.v.shape[-2:]))


def _shapes(sums: Sums, doubled: int) -> list[tuple[int, ...]]:
    """Shapes of the sums of a stream, for `doubled` output features per input feature."""
    (*leading, _, width), unrotated = sums.k.shape, sums.features[1].unrotated
    column = sums.denominator is not None and not unrotated
    return [(*leading, width * doubled, sums.v.shape[-1] + column), *[(*leading, width, 1)] * unrotated]


def refuses(sums: Sums, doubled: int) -> str:
    """Why the sums of its stream do not fit its features, or ""."""
    given, shapes = () if sums.stream is None else sums.stream.sums, _shapes(sums, doubled)
    if given and [tuple(x.shape) for x in given if x.dtype == torch.float32] != shapes:
        return f"a stream has float32 sums {shapes}"
    return ""


def packed(sums: Sums, doubled: int) -> Sums:
    """The problem with the sums of its stream as one row, weighted for the first token."""
    assert sums.stream is not None
    whole, weight = expanded(sums), sums.across
    if not sums.stream.sums:
        return whole
    first, *keys = (weighed(x, None if weight is None else weight[..., None, None]) for x in sums.stream.sums)
    first = _paired(first, back=False) if doubled > 1 else first
    if first.shape[-1] > sums.v.shape[-1]:
        first, keys = first[..., :-1], [first[..., -1:]]
    row = torch.cat([x.flatten(-2) for x in (first, *keys)], -1)
    return replace(whole, stream=Past((row.expand(*whole.q.shape[:-2], -1).contiguous(),)))


def unpacked(row: Tensor, sums: Sums, doubled: int) -> tuple[Tensor, ...]:
    """The sums of a stream from such a row: the inverse of `packed`."""
    row, (shape, *separate) = row[(0,) * (sums.q.ndim - sums.k.ndim)], _shapes(sums, doubled)
    d, e = shape[-2], sums.v.shape[-1]
    first, rest = row[..., : d * e].unflatten(-1, (d, e)), row[..., d * e :, None]
    if shape[-1] > e:
        first, rest = torch.cat((first, rest), -1), None
    first = _paired(first, back=True) if doubled > 1 else first
    return (first, rest) if separate and rest is not None else (first,)


def _paired(rows: Tensor, *, back: bool) -> Tensor:
    """Rows (x cos, x sin) ``[*b h 2d .]`` of a lift in the order of the kernels, (x_0 cos, x_0 sin, ...), or back."""
    return rows.unflatten(-2, (-1, 2) if back else (2, -1)).transpose(-3, -2).flatten(-3, -2)
