"""A custom encoding and its scheme: one reflection per head, applied to every other token."""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from isopos.encodings import Encoding
from isopos.exact import normal
from isopos.maps import Isometry, Operators
from isopos.positions import Line
from isopos.schemes import Choices, Scheme, compose, register


class Mirror(Encoding):
    """rho(x) = (I - 2 n n^T)^x: a reflection at the plane with normal n ``[h d]``, which is learned."""

    def __init__(self, normal: Tensor):
        super().__init__()
        self.group, self.features, self.out_features = Line(), normal.shape[-1], normal.shape[-1]
        self.parametrise("normal", normal, learned=True)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        n = F.normalize(self.parameter.double(), dim=-1)[:, None]  # [h 1 d]
        odd = (x % 2).unsqueeze(-3).unsqueeze(-1)  # [*b 1 t 1 1]
        return Operators((torch.eye(self.features, device=x.device) - 2 * odd * n[..., None] * n[..., None, :]).to(dtype))


@register(citation="a toy", equation="<q, (I - 2 n n^T)^t k>", learns="the normal n")
def mirror(head_dim: int, heads: int = 1, *, seed: int = 0, **choices: Unpack[Choices]) -> Scheme:
    """Reflection of every other token."""
    return compose(Mirror(normal(seed, heads, head_dim)), heads, choices)
