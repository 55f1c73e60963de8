"""Contragredient pairs: representations rho that need not be unitary; queries are mapped by rho(x)^-T, keys by rho(y).

    <rho(x)^-T q, rho(y) k> = q^T rho(x^-1 y) k

Scores are relative for every representation; a unitary one is its own contragredient, and so an encoding. Without the
isometry norms change, scores are unbounded, and the dtype of tables limits the distance of positions.
"""

import math
from abc import ABC
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isopos.catalog import at_least, instances
from isopos.deprecation import renamed
from isopos.encodings import Coupling, Encoding, Side, Sided, refusal_of_shared, rescaled_parts, shortest
from isopos.exact import cast_down, constant, is_exporting, to_float64
from isopos.lengths import Extension
from isopos.maps import Blocks, Composed, Identity, Rotation, Scaling, Shear, Tiles, TokenMap
from isopos.ops.rotate import rotations
from isopos.poses import Projective, inverse_4x4
from isopos.positions import Line, Product

__all__ = ["Contragredient", "ContragredientSum", "Jordan", "Projection"]

__getattr__ = renamed(__name__, {"Beside": "isopos.contragredient.ContragredientSum"})


class Contragredient(Sided, ABC):
    """A representation rho of `group` on `features` features: rho(x)^-T for queries, rho(x) for keys."""


class Jordan(Contragredient):
    """exp(x A) with A of equal real Jordan blocks: order m, growth g, frequency w, the eigenvalues g +- i w.

    Blocks of several orders side by side (`ContragredientSum`) give all finite-dimensional representations of a line, up to
    a basis, which the projections of queries and keys learn. Scores are sums of e^(g t) cos(w t) and e^(g t) sin(w t) times
    t^n / (n! length^n), n < m, for offsets t = y - x. Special cases: rotation (g = 0, m = 1), xPos (m = 1, g > 0), and with
    g = w = 0, m = 2 the additive generator [[0, 1], [0, 0]] / length, whose score of the features (length, 0) and (0, 1) is
    the offset itself, as in ALiBi.

    Features are m groups of equal width. In each group a frequency has a pair (2i, 2i+1); without frequencies a block has
    one feature. Scales of each side are powers relative to a fixed zero, so that cached keys stay valid. Positions from
    +-max_length on are refused, on the CPU and outside a compiler, where the check is cheap: scales would leave float32, or
    for m > 1 the powers of x and y in t^n cancel, with errors of 2^-23 (2 |x| / length)^(m - 1) / (m - 1)! of |q| |k|. At
    the limit these are 2e-6: at 8 times the length for m = 2, nearer for higher orders.

    Args:
        growth: ``[f]``, nats per step of each block; where positive, weights of keys after the query grow.
        frequency: ``[f]``, radians per step; without it eigenvalues are real, and blocks half as wide.
        order: m.
        length: Number of steps in which the nilpotent part counts one.

    References:
        - A Length-Extrapolatable Transformer (Sun et al. 2022), Algorithm 1: order 1. https://arxiv.org/abs/2212.10554
        - Train Short, Test Long (Press et al. 2022), ALiBi: order 2. https://arxiv.org/abs/2108.12409

    Examples:
        >>> line = Jordan(torch.zeros(1), order=2, length=64)  # [[0, 1/64], [0, 0]]
        >>> q, k = torch.tensor([[[64.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
        >>> (line.query(torch.tensor([[3]]))(q) * line.key(torch.tensor([[10]]))(k)).sum().item()
        7.0
    """

    def __init__(self, growth: Tensor, frequency: Tensor | None = None, *, order: int = 1, length: float = 1024.0):
        super().__init__()
        if growth.ndim != 1 or not len(growth) or not growth.isfinite().all():
            raise ValueError(f"growth: expected finite floats [f], got {growth.dtype} {list(growth.shape)}")
        if frequency is not None and (frequency.shape != growth.shape or not frequency.isfinite().all()):
            raise ValueError(f"frequency: expected finite floats [{len(growth)}] as growth, got {list(frequency.shape)}")
        if not 0 < length < math.inf:
            raise ValueError(f"length: expected a positive number of steps, got {length}")
        self.group, self.order, self.length = Line(real=True), at_least("order", order), float(length)
        self.extensible, self.is_causal = frequency is not None, bool((growth > 0).any())
        pairs = 1 if frequency is None else 2
        self.features = self.out_features = order * pairs * len(growth)
        self.growth, self.grows = constant(growth).repeat_interleave(pairs).repeat(order), bool(growth.any())
        self.frequency = None if frequency is None else constant(frequency).repeat(order)[None, None]
        limits = []
        if (fastest := self.growth.abs().max().item()) > 0:
            limits.append(1 + 40 / fastest)  # exp(+-40): long sums of two stay inside float32
        if order > 1:
            limits.append(length / 2 * (16 * math.factorial(order - 1)) ** (1 / (order - 1)))
        self.max_length = min((int(limit) for limit in limits if limit < 2**62), default=None)  # others leave int64

    def refusal(self, rule: Extension) -> str:
        if self.order == 1 or rule.name != "longrope":
            return ""
        return f"expected another rule than longrope for blocks of {self.order} pairs that share a frequency, got longrope"

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        self._check_length(x)
        parts: list[TokenMap] = []
        if self.frequency is not None:
            parts.append(Rotation(rotations(x, self.extended(self.frequency), dtype)))
        sign = -1 if side == "query" else 1  # queries shrink with x, keys grow
        if self.grows:
            factor = torch.exp(sign * to_float64(self.growth, x.device) * to_float64(x))[..., None, :, :]
            parts.append(Scaling(cast_down(factor, dtype, x.device)))
        if self.order > 1:
            steps = (sign / self.length * to_float64(x))[..., None, :, :]
            parts.append(Shear(cast_down(steps, dtype, x.device), self.order, self.features // self.order, side == "query"))
        first, *others = parts or [Identity()]
        for part in others:
            first = Composed(first, part)
        return first

    def _check_length(self, x: Tensor) -> None:
        limit = self.max_length
        if limit is None or torch.compiler.is_compiling() or x.device.type != "cpu" or not (x.abs() >= limit).any():
            return
        what = "float32 loses offsets" if self.order > 1 else "scales leave float32"
        raise ValueError(
            f"positions: expected magnitudes below {limit}, beyond which {what}, got {x.abs().max().item()}; count them "
            "from the middle of the tokens, which changes no score, build it with a larger length=, or use rope with "
            "decay='retnet' for longer sequences"
        )


class Projection(Contragredient):
    """The 4 x 4 matrix g of a camera on each 4 consecutive features; scores are q^T (g_x^-1 g_y) k, relative between images.

    Args:
        features: d, a multiple of 4.

    References:
        Cameras as Relative Positional Encoding (Li et al. 2025), PRoPE, whose projections are g^-1.
        https://arxiv.org/abs/2507.10496
    """

    def __init__(self, features: int):
        super().__init__()
        if features % 4 or features < 4:
            raise ValueError(f"features: expected a multiple of 4, on which matrices of cameras act, got {features}")
        self.group = Projective()
        self.features = self.out_features = features

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        matrix = to_float64(x).unflatten(-1, (4, 4))
        inverse = inverse_4x4 if is_exporting() else torch.linalg.inv
        matrix = inverse(matrix).mT if side == "query" else matrix
        return Tiles(cast_down(matrix[..., None, :, :, :], dtype, x.device))


class ContragredientSum(Contragredient):
    """Contragredient pairs or encodings side by side, each on a separate slice of features and separate coordinates.

    Args:
        parts: In order of features; each returns as many features as it takes.
        shared: Whether all parts take the same coordinates (of one group) instead of a product of their groups.

    Examples:
        >>> both = ContragredientSum([Jordan(torch.zeros(1), order=3), Jordan(torch.zeros(2), torch.ones(2))], shared=True)
        >>> both.features, both.group
        (7, Line(real=True))
    """

    def __init__(self, parts: Sequence[Contragredient | Encoding], *, shared: bool = False):
        super().__init__()
        parts = instances("parts", parts, (Contragredient, Encoding), "contragredient pairs or encodings")
        if wider := [part for part in parts if part.features != part.out_features]:
            takes, returns = wider[0].features, wider[0].out_features
            raise ValueError(f"parts: expected each to return as many features as it takes, got one of {takes} to {returns}")
        if shared and len({part.group for part in parts}) > 1:
            raise ValueError(f"parts: expected one group to share, got {[part.group for part in parts]}")
        self.parts, self.shared = nn.ModuleList(parts), shared
        self.widths = tuple(part.features for part in parts)
        self.group = parts[0].group if shared else Product(tuple(part.group for part in parts))
        self.features = self.out_features = sum(self.widths)
        self.max_length = shortest(parts)
        self.is_causal = any(part.is_causal for part in parts)

    def refusal(self, rule: Extension) -> str:
        return refusal_of_shared(self.parts, rule) if self.shared else ""

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        columns = self.group.split(x) if isinstance(self.group, Product) and not self.shared else (x,) * len(self.parts)
        parts = [part for part in self.parts if isinstance(part, Coupling)]
        sides = (getattr(part, side) for part in parts)
        return Blocks(tuple(side(a, dtype) for side, a in zip(sides, columns, strict=True)), self.widths)

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        return rescaled_parts(self.parts, rho, factor)
