"""Cameras: PRoPE, with positions made of camera projections and patches, and with values transported between images."""

from typing import Unpack

import torch

from isopos import encodings
from isopos.contragredient import ContragredientSum, Projection
from isopos.encodings import Encoding, rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, axial, compose, laid_out, register


@register(
    citation="Li et al. 2025, PRoPE, arXiv 2507.10496",
    equation="<q, (g_x^-1 g_y on 4 features each, R(w t) of patches) k>; v likewise",
    cost="4 t d",
    extends="other groups of matrices, by direct sum",
)
def prope(
    head_dim: int,
    heads: int | None = None,
    *,
    base: float = 100.0,
    layout: PairLayout = "interleaved",
    transport: bool = True,
    **choices: Unpack[Choices],
) -> Scheme:
    """Projections between images, rotation within them; values are transported.

    The first half of the features is mapped by the camera of a patch, 4 features at a time, the other half by the row and
    the column of the patch, as in rope-axial. Another frame of the world changes neither scores nor values. Positions are
    `isopos.poses.cameras` of poses, intrinsics and patches. Without intrinsics the first half equals GTA (Miyato et al.
    2024).

    Args:
        head_dim: d, a multiple of 8.
        base: Base of rope's frequencies on each axis.
        layout: Layout of the half for patches: "interleaved", pairs (2i, 2i+1), rows first; or "half", the layout of the
            authors' code: columns first, pairs (i, i + d/8) of each quarter, which rotate in the opposite sense.
        transport: Whether values, too, are expressed in the frame of the query, as in the paper.
    """
    if head_dim % 8 or head_dim < 8:
        raise ValueError(f"head size: expected a multiple of 8, 4 features per camera matrix in one half, got {head_dim}")
    patches: Encoding = encodings.Rotary(axial([head_dim // 8] * 2, base)[None])
    if layout != "interleaved":
        reverse = -rope_frequencies(head_dim // 8, base)
        zero = torch.zeros_like(reverse)
        by_axis = [torch.stack(rows)[None] for rows in ((zero, reverse), (reverse, zero))]  # columns, then rows
        patches = encodings.DirectSum([laid_out(encodings.Rotary(w), layout) for w in by_axis], shared=True)
    return compose(ContragredientSum([Projection(head_dim // 2), patches]), heads, choices, transport=transport)
