"""Feature maps phi of linear attention, applied to each token separately, before the isometry.

`FEATURE_MAPS` holds elementwise functions by name. `Favor` is a module with random directions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from isopos.deprecation import former_property, renamed_argument
from isopos.exact import ExactModule

__all__ = ["COMPILED", "FEATURE_MAPS", "Favor", "FeatureMap", "Phi", "elu1", "exp", "identity", "register", "relu", "relu2"]
__all__ += ["sides"]

MAX_EXPONENT = 30.0  # of a feature of `Favor`
KEY_EXPONENT = 20.0  # added to exponents of keys, which share one scale


@dataclass(frozen=True)
class FeatureMap:
    """A named feature map without parameters, which attention may therefore recompute.

    Only `forward` is required. `write` and `derivative` build no graph and make attention on the CPU several times faster.

    Args:
        name: Name in `FEATURE_MAPS`, after `register`.
        forward: x ``[*b h t d]`` to features ``[*b h t d']``, differentiable, in the dtype of x.
        write: ``write(x, out, scratch)`` writes phi(x) to `out`, for elementwise maps.
        derivative: ``derivative(x, y)`` overwrites features y = phi(x) with phi'(x).

    Examples:
        >>> softplus = FeatureMap("softplus", torch.nn.functional.softplus)
        >>> softplus(torch.zeros(1)).tolist()
        [0.6931...]
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor, Tensor], object] | None = None
    derivative: Callable[[Tensor, Tensor], Tensor] | None = None

    slope = former_property("slope", "derivative")

    def __call__(self, x: Tensor) -> Tensor:
        """phi(x)."""
        return self.forward(x)

    def __reduce__(self) -> Any:
        if FEATURE_MAPS.get(self.name) is self:
            return _registered, (self.name,)
        return super().__reduce__()

    def __hash__(self) -> int:
        return hash(FeatureMap)  # uses no field: the compiler of torch 2.11 hashes copies before it sets their fields


FeatureMap.__init__ = renamed_argument("slope", "derivative")(FeatureMap.__init__)

Phi: TypeAlias = Callable[[Tensor], Tensor]  # a `FeatureMap`, a `Favor`, or any other function of tensors
FEATURE_MAPS: dict[str, FeatureMap] = {}


def _registered(name: str) -> FeatureMap:
    """The feature map of that name, which a pickle refers to."""
    return FEATURE_MAPS[name]


def register(feature_map: FeatureMap) -> FeatureMap:
    """Add a feature map to `FEATURE_MAPS`; ValueError if its name is taken."""
    if feature_map.name in (*FEATURE_MAPS, "auto", "favor"):  # names reserved by schemes
        raise ValueError(f"name: expected a new name, got {feature_map.name!r}, which is taken; choose another")
    FEATURE_MAPS[feature_map.name] = feature_map
    return feature_map


def _elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 = exp(min(x, 0)) + max(x, 0), always positive (Katharopoulos et al. 2020, Eq. 7).

    Examples:
        >>> elu1(torch.tensor([-1.0, 0.0, 2.0])).tolist()
        [0.3678..., 1.0, 3.0]
    """
    return x.masked_fill(x > 0, 0).exp() + x.relu()  # has the derivative 1 at 0; clamp_max has 0 from torch 2.15 on


def _write_elu1(x: Tensor, out: Tensor, scratch: Tensor) -> None:
    torch.mul(x, 1 / math.log(2), out=out).clamp_max_(0).exp2_()  # twice as fast as exp, and as exact
    out.add_(torch.clamp_min(x, 0, out=scratch))


def _relu(x: Tensor) -> Tensor:
    """max(x, 0) + 0.001: positive, so that denominators are too (PermuteFormer, section 4.1; cosFormer has max(x, 0))."""
    return x.relu() + 1e-3


def _relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2: nonnegative, sparse, and zero for a query without positive features (Hua et al. 2022, FLASH)."""
    return x.relu().square()


def _exp(x: Tensor) -> Tensor:
    """exp(x), always positive; float32 overflows at 88."""
    return x.exp()


def _identity(x: Tensor) -> Tensor:
    """x: signed scores. Use it with ``denominator=None`` and a norm, as in RetNet."""
    return x


elu1 = register(FeatureMap("elu+1", _elu1, _write_elu1, lambda x, y: y.clamp_max_(1)))
relu = register(
    FeatureMap(
        "relu",
        _relu,
        lambda x, out, scratch: torch.clamp_min(x, 0, out=out).add_(1e-3),
        lambda x, y: torch.gt(x, 0, out=y),  # a feature of 1e-3 may come from a small positive x
    )
)
relu2 = register(
    FeatureMap(
        "relu2", _relu2, lambda x, out, scratch: torch.clamp_min(x, 0, out=out).square_(), lambda x, y: y.sqrt_().mul_(2)
    )
)
exp = register(FeatureMap("exp", _exp, lambda x, out, scratch: torch.exp(x, out=out), lambda x, y: y))
identity = register(FeatureMap("identity", _identity, lambda x, out, scratch: out.copy_(x), lambda x, y: y.fill_(1)))
COMPILED = (identity, elu1, relu, relu2, exp)  # maps in the C and Triton kernels; the order is the enum of cpu/call.h


class Favor(ExactModule):
    """FAVOR+: positive orthogonal random features. Their products are unbiased estimates of exp(<q, k> / sqrt(d)).

    phi(x)_i = exp(<w_i, x'> - |x'|^2 / 2) / sqrt(m),  x' = x / d^(1/4)

    Rows w are orthogonal in blocks of d, with the norms of Gaussian vectors. Exponents are at most |w|^2 / 2, and are
    clamped to 30. Attention calls `query` and `key`, which scale features so that no denominator vanishes: queries by one
    factor each, keys by one common factor. Both factors cancel in the division, and no item depends on a maximum over other
    tokens. Without a denominator, or with maps that add unscaled features, attention calls the estimator itself.

    Args:
        features: d of queries and keys.
        out_features: m; d by default. The error of an estimate falls as 1 / sqrt(m).
        seed: Seed of the directions, equal on all machines.

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
        """Restore the directions of the seed."""
        if not self.projection.is_meta:
            self.redraw(torch.Generator().manual_seed(self.seed))

    @torch.no_grad()
    def redraw(self, generator: torch.Generator) -> None:
        """Draw new directions in place: between training steps, with the same generator on all machines."""
        d, m = self.features, self.out_features
        blocks = -(-m // d)
        gaussian = torch.randn(blocks, d, d, generator=generator, device="cpu", dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform; plain QR prefers some directions
        directions = q.mT.flatten(0, 1)[:m]
        norms = torch.randn(m, d, generator=generator, device="cpu", dtype=torch.float64).norm(dim=-1, keepdim=True)
        self.projection.copy_(norms * directions)

    def forward(self, x: Tensor) -> Tensor:
        """Positive features ``[*b h t m]`` of x ``[*b h t d]``, in x's dtype: the estimator itself."""
        return self._exponent(x).clamp_max(MAX_EXPONENT).exp() / self.out_features**0.5

    def query(self, x: Tensor) -> Tensor:
        """Features of queries, scaled so that the largest feature of each query is 1."""
        exponent = self._exponent(x)
        return torch.exp(exponent - exponent.detach().amax(-1, keepdim=True))

    def key(self, x: Tensor) -> Tensor:
        """Features of keys, scaled by e^20."""
        return self._exponent(x).clamp_max(MAX_EXPONENT).add(KEY_EXPONENT).exp()

    def _exponent(self, x: Tensor) -> Tensor:
        x = x * self.features**-0.25
        return x @ self.projection.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2


def sides(phi: Phi) -> tuple[Phi, Phi]:
    """The feature maps of queries and of keys."""
    return (FeatureMap("favor", phi.query), FeatureMap("favor", phi.key)) if isinstance(phi, Favor) else (phi, phi)


def undivided(phi: Phi) -> Phi:
    """The feature map for sums without a denominator: `Favor` without scaling, other maps unchanged."""
    return FeatureMap("favor", phi.forward) if isinstance(phi, Favor) else phi
