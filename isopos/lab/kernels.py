"""Pictures of a scheme: its score as a function of offset, and query by key."""

from typing import NamedTuple

import torch
from torch import Tensor

from isopos.feature_maps import FEATURE_MAPS
from isopos.positions import sequence
from isopos.schemes import Scheme

__all__ = ["Kernel", "kernel"]

REACH = 64


class Kernel(NamedTuple):
    """Scores of one query and one key, relative to their score without offset, averaged over heads."""

    offset: Tensor  # [2 reach + 1], key position minus query position; reach is 64 or half a table of positions
    score: Tensor  # at each offset, the query in the middle
    heat: Tensor  # [reach + 1, reach + 1], query position by key position


@torch.no_grad()
def kernel(scheme: Scheme, seed: int = 0) -> Kernel:
    """Scores of one random query and key at all positions: with a decay, and, where attention is linear, a feature map."""
    generator = torch.Generator().manual_seed(seed)
    heads, width = scheme.heads, scheme.encoding.features
    content = torch.randn(2, 1, heads * width, generator=generator, dtype=torch.float64)
    reach = REACH if scheme.max_length is None else min(REACH, (scheme.max_length - 1) // 2)
    x = sequence(2 * reach + 1)
    q, k = content if scheme.embedding is None else content + scheme.embedding(x, torch.float64)
    at = scheme.at(x, dtype=torch.float64)
    phi = FEATURE_MAPS[scheme.choices["feature_map"]] if scheme.attention == "linear" else FEATURE_MAPS["identity"]
    q, k = (
        at["isometry"](phi(a.expand(len(x), -1).unflatten(-1, (heads, width)).transpose(0, 1)[None]).contiguous())[0]
        for a in (q, k)
    )
    scores = q @ k.mT
    if scheme.attention == "softmax":
        scores = scores / width**0.5
    if at["decay"] is not None:
        distance = (at["decay"][:, :, None] - at["decay"][:, None, :]).abs()
        scores = scores - distance if scheme.attention == "softmax" else scores * torch.exp(-distance)
    scores = scores.mean(0)
    return Kernel((x - reach)[:, 0], scores[reach] / scores[reach, reach].abs(), scores[: reach + 1, : reach + 1])
