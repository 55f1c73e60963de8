"""Feature maps phi of linear attention: applied to each token alone, before the isometry.

Most are functions of one number, in `FEATURE_MAPS` by name. `Favor` is a module: it holds random directions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from isopos.exact import ExactModule

__all__ = ["COMPILED", "FEATURE_MAPS", "Favor", "FeatureMap", "Phi", "elu1", "exp", "identity", "register", "relu", "relu2"]
__all__ += ["sides"]

LARGEST = 30.0  # exponent of a feature of `Favor`
LIFT = 20.0  # exponent added to features of keys that share a scale


@dataclass(frozen=True)
class FeatureMap:
    """A feature map with a name: a function of tensors that holds no parameters, so that attention may compute it again.

    `forward` is enough. The two others, which build no graph, make attention on the CPU several times faster.

    Args:
        name: Under which `register` makes it known.
        forward: x ``[*b h t d]`` to features ``[*b h t d']``, differentiable, in the dtype of x.
        write: ``write(x, out, scratch)`` writes phi(x) to `out`, for maps of single numbers.
        slope: ``slope(x, y)`` turns features y = phi(x) into phi'(x), in place.

    Examples:
        >>> softplus = FeatureMap("softplus", torch.nn.functional.softplus)
        >>> softplus(torch.zeros(1)).tolist()
        [0.6931...]
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor, Tensor], object] | None = None
    slope: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """phi(x)."""
        return self.forward(x)


Phi: TypeAlias = Callable[[Tensor], Tensor]  # a `FeatureMap`, a `Favor`, or any other function of tensors
FEATURE_MAPS: dict[str, FeatureMap] = {}


def register(feature_map: FeatureMap) -> FeatureMap:
    """Make a feature map known by its name; ValueError where another has it."""
    if feature_map.name in (*FEATURE_MAPS, "auto", "favor"):  # two that schemes have of their own
        raise ValueError(f"name: expected one that no feature map has, got {feature_map.name!r}; choose another")
    FEATURE_MAPS[feature_map.name] = feature_map
    return feature_map


def _elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 = exp(min(x, 0)) + max(x, 0), always positive (Katharopoulos et al. 2020, Eq. 7).

    Examples:
        >>> elu1(torch.tensor([-1.0, 0.0, 2.0])).tolist()
        [0.3678..., 1.0, 3.0]
    """
    return x.clamp_max(0).exp() + x.relu()


def _write_elu1(x: Tensor, out: Tensor, scratch: Tensor) -> None:
    torch.mul(x, 1 / math.log(2), out=out).clamp_max_(0).exp2_()  # twice as fast as exp, and as exact
    out.add_(torch.clamp_min(x, 0, out=scratch))


def _relu(x: Tensor) -> Tensor:
    """max(x, 0) + 0.001: positive, so that denominators are too (PermuteFormer, section 4.1; cosFormer has max(x, 0))."""
    return x.relu() + 1e-3


def _relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2: not negative, sparse, and zero for a query without positive features (Hua et al. 2022, FLASH)."""
    return x.relu().square()


def _exp(x: Tensor) -> Tensor:
    """exp(x), always positive; float32 overflows at 88."""
    return x.exp()


def _identity(x: Tensor) -> Tensor:
    """x itself: signed scores. Use it with ``denominator=None`` and a norm, as RetNet does."""
    return x


elu1 = register(FeatureMap("elu+1", _elu1, _write_elu1, lambda x, y: y.clamp_max_(1)))
relu = register(
    FeatureMap(
        "relu",
        _relu,
        lambda x, out, scratch: torch.clamp_min(x, 0, out=out).add_(1e-3),
        lambda x, y: torch.gt(x, 0, out=y),  # features of 1e-3 may be those of a positive x, which was rounded away
    )
)
relu2 = register(
    FeatureMap(
        "relu2", _relu2, lambda x, out, scratch: torch.clamp_min(x, 0, out=out).square_(), lambda x, y: y.sqrt_().mul_(2)
    )
)
exp = register(FeatureMap("exp", _exp, lambda x, out, scratch: torch.exp(x, out=out), lambda x, y: y))
identity = register(FeatureMap("identity", _identity, lambda x, out, scratch: out.copy_(x), lambda x, y: y.fill_(1)))
COMPILED = (identity, elu1, relu, relu2, exp)  # those that the C and Triton kernels know, by their numbers in cpu/call.h


class Favor(ExactModule):
    """FAVOR+: positive orthogonal random features, whose products estimate exp(<q, k> / sqrt(d)) without bias.

    phi(x)_i = exp(<w_i, x'> - |x'|^2 / 2) / sqrt(m),  x' = x / d^(1/4)

    Rows w are orthogonal in blocks of d, with the norms of Gaussian vectors. Exponents are at most |w|^2 / 2, and are cut at
    30. Attention calls `query` and `key`, which scale features so that no denominator vanishes: those of a query by a factor
    of its own, those of all keys by the same one. Both divide out, and no maximum over tokens lets one item change another.
    Where nothing divides, or a map adds to features what has no such scale, attention takes the estimator itself.

    Args:
        features: d of queries and keys.
        out_features: m; d by default. The error of an estimate falls as 1 / sqrt(m).
        seed: Of the draw, equal on all machines.

    References:
        Rethinking Attention with Performers (Choromanski et al. 2021), Lemma 1 and section 2.4.
        https://arxiv.org/abs/2009.14794

    Examples:
        >>> Favor(8, 16)(torch.randn(2, 4, 10, 8)).shape
        torch.Size([2, 4, 10, 16])
    """

    projection: Tensor

    def __init__(self, features: int, out_features: int | None = None, *, seed: int = 0):
        super().__init__()
        self.features, self.out_features = features, features if out_features is None else out_features
        if min(self.features, self.out_features) < 1:
            raise ValueError(f"features: expected at least 1, got {self.features} and {self.out_features}")
        self.seed = seed
        self.register_buffer("projection", torch.empty(self.out_features, self.features, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The draw of the seed."""
        if not self.projection.is_meta:
            self.redraw(torch.Generator().manual_seed(self.seed))

    @torch.no_grad()
    def redraw(self, generator: torch.Generator) -> None:
        """Draw other directions in place: between training steps, on all machines with the same generator."""
        d, m = self.features, self.out_features
        blocks = -(-m // d)
        gaussian = torch.randn(blocks, d, d, generator=generator, device="cpu", dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform: the factorisation alone prefers some directions
        directions = q.mT.flatten(0, 1)[:m]
        norms = torch.randn(m, d, generator=generator, device="cpu", dtype=torch.float64).norm(dim=-1, keepdim=True)
        self.projection.copy_(norms * directions)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[*b h t d]`` -> positive features ``[*b h t m]``, in x's dtype: the estimator itself."""
        return self._exponent(x).clamp_max(LARGEST).exp() / self.out_features**0.5

    def query(self, x: Tensor) -> Tensor:
        """Features of queries, the largest of each being 1."""
        exponent = self._exponent(x)
        return torch.exp(exponent - exponent.detach().amax(-1, keepdim=True))

    def key(self, x: Tensor) -> Tensor:
        """Features of keys times e^20."""
        return self._exponent(x).clamp_max(LARGEST).add(LIFT).exp()

    def _exponent(self, x: Tensor) -> Tensor:
        x = x * self.features**-0.25
        return x @ self.projection.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def sides(phi: Phi) -> tuple[Phi, Phi]:
    """What maps queries, and what maps keys."""
    return (FeatureMap("favor", phi.query), FeatureMap("favor", phi.key)) if isinstance(phi, Favor) else (phi, phi)


def undivided(phi: Phi) -> Phi:
    """The feature map of sums in which scales do not divide out: that of `Favor` without them."""
    return FeatureMap("favor", phi.forward) if isinstance(phi, Favor) else phi
