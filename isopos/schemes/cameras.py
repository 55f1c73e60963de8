"""Cameras: PRoPE, whose positions are projections of images and places in them, and whose values are carried between."""

from typing import Unpack

import torch

from isopos import encodings
from isopos.contragredient import Beside, Projection
from isopos.encodings import Encoding, rope_frequencies
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import PairLayout, axial, compose, laid_out, register


@register(
    summary="projections between images, rotation in them; values carried along",
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
    """PRoPE: relative projections between cameras, and rope-axial of patches, of queries, keys and values (Li et al. 2025).

    The first half of the features sees the camera of a patch, 4 at a time, the other the patch's row and column, half each.
    Another frame of the world changes nothing, neither scores nor values. Positions are `isopos.poses.cameras` of poses,
    intrinsics and patches; without intrinsics the first half is that of GTA (Miyato et al. 2024).

    Args:
        head_dim: d, a multiple of 8.
        base: Of rope's frequencies on each axis.
        layout: Of the half that sees patches: "interleaved", pairs (2i, 2i+1), those of rows first; or "half", that of the
            authors' code: columns first, pairs (i, i + d/8) of each quarter, which turn the other way.
        transport: Whether values, too, are seen from the query's image, as in the paper.
    """
    if head_dim % 8 or head_dim < 8:
        raise ValueError(f"head size: expected a multiple of 8, half of it 4 features a camera's matrix, got {head_dim}")
    patches: Encoding = encodings.Rotary(axial([head_dim // 8] * 2, base)[None])
    if layout != "interleaved":
        back, still = -rope_frequencies(head_dim // 8, base), torch.zeros(head_dim // 8, device="cpu", dtype=torch.float64)
        turned = [torch.stack(rows)[None] for rows in ((still, back), (back, still))]  # of rows and columns
        patches = encodings.DirectSum([laid_out(encodings.Rotary(w), layout) for w in turned], shared=True)
    return compose(Beside([Projection(head_dim // 2), patches]), heads, choices, transport=transport)
