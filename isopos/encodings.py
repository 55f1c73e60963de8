"""Encodings: unitary representations of a group of positions, as modules that return isometries.

An encoding rho satisfies <rho(x) q, rho(y) k> = <q, rho(x^-1 y) k>: scores depend on relative positions only. `forward`
evaluates rho at a tensor of positions; queries, keys and layers share the resulting isometry.
"""

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isopos import maps
from isopos.bases import Basis
from isopos.catalog import at_least, expect, instances
from isopos.exact import ExactModule, cast_down, constant, is_exporting, to_float64
from isopos.lengths import Extension
from isopos.maps import Blocks, BlockSum, Chain, Gather, Isometry, Matrix, Operators, Rotation, TokenMap
from isopos.ops.rotate import narrow_index, rotations, skew_exponential
from isopos.ops.spectrum import check_spectrum, spectrum
from isopos.ops.tree import path
from isopos.positions import Group, Line, Product, Ring, Tree, lines

__all__ = ["Coupling", "DirectSum", "Encoding", "Exponential", "Identity", "InBasis", "Partial", "Permutation", "Rotary"]
__all__ += ["TreePath", "long_orders", "random_permutations", "rope_frequencies"]

Side = Literal["query", "key"]
SEGMENT = 1 << 15  # tokens per lookup of permutations, which takes about 64 bytes per feature


class Coupling(ExactModule, ABC):
    """A map of queries and a map of keys at positions of `group`; their inner products depend on positions.

    Maps take `features` features and return `out_features`. An `Encoding` is a coupling with one isometry for both. Other
    couplings, in `isopos.couplings`, obey weaker laws, which they name.
    """

    group: Group
    features: int
    out_features: int
    max_length: int | None = None  # number of valid positions, from 0; None: unlimited
    outside: int = 0  # number of leading tokens without a position: class tokens
    is_complex: bool = False  # whether pairs of features are complex numbers that it multiplies by phases
    is_trivial: bool = False  # whether positions have no effect
    is_random: bool = False  # whether it is relative in expectation only
    alike: bool = False  # whether queries and keys have the same map
    weaker_law: str = ""  # the law that holds if scores are not relative
    is_causal: bool = False  # whether it is meant for causal attention: weights of later keys grow
    extensible: bool = False  # whether it has frequencies that an extension may change
    extension: Extension | None = None  # changes frequencies for sequences longer than in training

    @abstractmethod
    def query(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        """The map of queries at positions x ``[*b t c]``."""

    @abstractmethod
    def key(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        """The map of keys at positions x ``[*b t c]``."""

    @property
    def pairs(self) -> int:
        """Number of feature pairs, each with a separate frequency."""
        return self.out_features // 2

    def extended(self, frequency: Tensor) -> Tensor:
        """Frequencies ``[h c f]`` after its extension."""
        return frequency if self.extension is None else self.extension(to_float64(frequency))

    @property
    def all_extensible(self) -> bool:
        """Whether an extension changes the frequencies of all features."""
        children = (child if isinstance(child, nn.ModuleList) else (child,) for child in self.children())
        inner = [part for parts in children for part in parts if isinstance(part, Coupling)]
        return all(part.all_extensible for part in inner) if inner else self.extensible

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        """The map rho, with a factor on the features whose frequencies an extension changes."""
        return maps.rescaled(rho, factor) if self.extensible else rho

    def refusal(self, rule: Extension) -> str:
        """The reason why a rule does not apply to its frequencies, or ""."""
        return ""

    def forward(self, *_: Any, **__: Any) -> Any:
        name = type(self).__name__
        raise TypeError(
            f"encoding: expected encoding.query(x) for queries and encoding.key(x) for keys, since {name} maps them "
            "differently, or scheme.at(x), the arguments of attention; got encoding(x)"
        )


class Encoding(Coupling, ABC):
    """A representation of `group` on `features` features; its isometries return `out_features`.

    Subclasses are final; they set these three attributes and define `forward`.
    """

    alike = True
    order: float = math.inf  # period in positions
    is_lift: bool = False  # whether outputs are real parts, then imaginary parts, of complex features
    is_paired: bool = False  # whether outputs are pairs (real, imaginary) of complex features

    def query(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        return self(x, dtype)

    def key(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        return self(x, dtype)

    @abstractmethod
    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        """Evaluate at positions x ``[*b t c]``: tables ``[*b h t .]`` in `dtype` (float32 or float64) on x's device."""


class Sided(Coupling, ABC):
    """A coupling with one rule for both sides, `at`."""

    def query(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        self.group.check(x)
        return self._at(x, dtype, "query")

    def key(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        self.group.check(x)
        return self._at(x, dtype, "key")

    @abstractmethod
    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap: ...


def rope_frequencies(count: int, base: float = 10000.0) -> Tensor:
    """base^(-i / count) for i = 0, 1, ...: float64 ``[count]``, in radians per step (RoFormer, Eq. 15, with count = d/2).

    Examples:
        >>> rope_frequencies(2).tolist()
        [1.0, 0.01]
    """
    if not (count > 0 and base > 0):
        raise ValueError(f"base: expected a positive number, and at least one frequency, got {base} and {count}")
    return base ** (-torch.arange(count, device="cpu", dtype=torch.float64) / count)


class Identity(Encoding):
    """The trivial representation of any group: no positions.

    Args:
        features: d.
        group: Group of the positions, which have no effect.
    """

    is_trivial = True

    def __init__(self, features: int, group: Group | None = None):
        super().__init__()
        self.group, self.features, self.out_features = group or Line(real=True), features, features

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        return maps.Identity()


class Rotary(Encoding):
    """Rotation of feature pairs (2i, 2i+1) by angle <frequency_i, x>: a sum of characters of a line, a ring or a grid.

    rho(x) = diag(R(w_1 x), ..., R(w_f x)),  R(a) = [[cos a, -sin a], [sin a, cos a]]

    With `lift` it multiplies d real features, as complex numbers, by phases, x -> (x cos, x sin): LRPE's unitary type. The
    real part of a score, sum_i cos(w_i (x - y)) q_i k_i, is symmetric in the direction, score(x, y) = score(y, x).

    Args:
        frequency: ``[h c f]`` radians per step, for heads, coordinates and pairs (h = 1: shared by all heads).
        learned: Whether the frequencies are learned. Fixed ones are float64 constants outside parameters and buffers.
        lift: Map d features to 2d instead of rotating pairs.
        group: By default a line, or a grid for several coordinates. A ring of period n needs multiples of 2 pi / n.
        max_length: Number of valid positions from 0 on; others raise an error. None: unlimited.

    References:
        - RoFormer (Su et al. 2021), Eq. 14-16. https://arxiv.org/abs/2104.09864
        - Linearized Relative Positional Encoding (Qin et al. 2023), Eq. 22 and 23. https://arxiv.org/abs/2307.09270

    Examples:
        >>> rho = Rotary(rope_frequencies(4)[None, None])(torch.tensor([[0], [3]]))
        >>> rho(torch.ones(1, 1, 2, 8))[0, 0, 0].tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        frequency: Tensor,
        *,
        learned: bool = False,
        lift: bool = False,
        group: Group | None = None,
        max_length: int | None = None,
    ):
        super().__init__()
        if frequency.ndim != 3 or not frequency.is_floating_point() or not frequency.isfinite().all():
            raise ValueError(f"frequency: expected finite floats [h c f], got {frequency.dtype} {list(frequency.shape)}")
        _, columns, count = frequency.shape
        self.group = group or lines(columns)
        if self.group.columns != columns:
            raise ValueError(f"frequency: expected {self.group.columns} coordinates for {self.group}, got {columns}")
        if not (self.group.is_grid or isinstance(self.group, Ring)):
            raise ValueError(f"group: expected a line, a grid or a ring, got {self.group}; DirectSum joins lines and rings")
        if isinstance(self.group, Ring):
            whole = constant(frequency) * self.group.period / (2 * math.pi)
            if learned or not torch.allclose(whole, whole.round(), rtol=0, atol=1e-6):
                got = "learned ones" if learned else constant(frequency).flatten().tolist()[:8]
                raise ValueError(
                    f"frequency: expected fixed multiples of 2 pi / {self.group.period} on {self.group}, got {got}"
                )
            self.order = self.group.period // math.gcd(self.group.period, *whole.round().int().flatten().tolist())
        self.is_lift, self.is_complex, self.max_length = lift, not lift, max_length
        self.extensible = self.group.is_grid and max_length is None  # other frequencies would not close a ring
        self.features = count if lift else 2 * count
        self.out_features = 2 * count
        self.parametrise("frequency", frequency, learned=learned)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        """Angles are float64; their cosines and sines are rounded once to `dtype`."""
        self.group.check(x)
        self.check_length(x)
        if isinstance(self.group, Ring) and not x.is_floating_point():
            x = x % self.group.period  # exact however often they go around
        return Rotation(rotations(x, self.extended(self.parameter), dtype), self.is_lift)

    def check_length(self, *xs: Tensor) -> None:
        """ValueError for positions of queries and keys beyond `max_length`, or as far apart.

        No check in a compiler or on a GPU, where it would synchronise.
        """
        limit, xs = self.max_length, tuple(x for x in xs if x.numel())
        if limit is None or torch.compiler.is_compiling() or not xs or any(x.device.type != "cpu" for x in xs):
            return
        low, high = min(x.min().item() for x in xs), max(x.max().item() for x in xs)
        if max(high - low, high, -low) >= limit:
            raise ValueError(
                f"positions: expected magnitudes and offsets below {limit}, from which on weights are negative, "
                f"got {low} to {high}; build the scheme for the longest sequence, length={int(max(high - low, high)) + 1}"
            )


class Permutation(Encoding):
    """Powers of permutations of the features: (rho(x) v)_i = v_{pi^x(i)}, for every integer x, including negative ones.

    Powers are read from the cycles of pi, so no table grows with length. Nonnegative features stay nonnegative, and so do
    denominators. A head does not distinguish positions that differ by a multiple of its order; all heads together
    distinguish `common_order` positions. On a grid, both are the minimum over axes.

    Args:
        permutation: int64 ``[h d]``, one permutation per head; or ``[h c d]`` for c coordinates, with permutations that
            commute (PermuteFormer, section 3.5).
        length: Longest sequence; a smaller common order raises a warning.

    References:
        PermuteFormer (Chen 2021), Eq. 11-13. https://arxiv.org/abs/2109.02377

    Examples:
        >>> rho = Permutation(torch.tensor([[1, 2, 0, 4, 3]]))
        >>> rho.orders, rho.common_order
        ((6,), 6)
        >>> rho(torch.tensor([[0], [1], [-1]]))(torch.arange(5.0).expand(1, 3, 5)).tolist()
        [[[0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 0.0, 4.0, 3.0], [2.0, 0.0, 1.0, 4.0, 3.0]]]
    """

    def __init__(self, permutation: Tensor, *, length: int | None = None):
        super().__init__()
        maps = permutation[:, None] if permutation.ndim == 2 else permutation
        every = torch.arange(maps.shape[-1], device=maps.device)
        if maps.ndim != 3 or maps.is_floating_point() or not maps.sort(-1).values.eq(every).all():
            raise ValueError(
                f"permutation: expected [h d] or [h c d] of 0 to d - 1, got {permutation.dtype} {list(maps.shape)}"
            )
        _, columns, features = maps.shape
        for a, b in itertools.combinations(range(columns), 2):
            if not maps[:, a].gather(-1, maps[:, b]).equal(maps[:, b].gather(-1, maps[:, a])):
                raise ValueError(f"permutation: expected axes that commute, got {a} and {b} that do not")
        self.group = Line() if columns == 1 else Product((Line(),) * columns)
        self.features = self.out_features = features
        # All cycles stand in a row of slots. Entries: the feature in each slot; for each feature the first slot of its
        # cycle, its rank in the cycle, and the cycle's length.
        table = torch.tensor([[_cycle_table(axis) for axis in head] for head in maps.tolist()], device="cpu")
        self.table = table.permute(2, 1, 0, 3).contiguous()  # [4 c h d]
        orders = [[math.lcm(*axis) for axis in head] for head in table[:, :, 3].tolist()]
        self.orders = tuple(map(min, orders))
        self.order = self.common_order = min(math.lcm(*axis) for axis in zip(*orders, strict=True))
        if length is not None and self.common_order < at_least("length", length):
            warnings.warn(
                f"permutation: {self.common_order} positions are distinguished, fewer than the {length} of the longest "
                "sequence; choose another seed, more features or long_orders",
                stacklevel=2,
            )

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        """The index of each token's permutation, in uint8 for at most 256 features."""
        self.group.check(x)
        cycles, steps = self.table.to(x.device), x.to(torch.int64)
        segments = (steps,) if is_exporting() else steps.split(SEGMENT, -2)  # which would limit a program's length
        parts = [self._index(cycles, part) for part in segments]
        return Gather(parts[0] if len(parts) == 1 else torch.cat(parts, -2))

    def _index(self, cycles: Tensor, steps: Tensor) -> Tensor:
        """Features ``[*b h t d]`` reached by steps ``[*b t c]`` along cycles ``[4 c h d]``."""
        feature, first, rank, length = cycles
        index = None
        for axis, taken in enumerate(steps[..., None, :, :].unbind(-1)):
            slot = first[axis, :, None] + (rank[axis, :, None] + taken[..., None]) % length[axis, :, None]
            power = feature[axis, :, None].expand(*slot.shape[:-1], -1).gather(-1, slot)
            index = power if index is None else index.gather(-1, power)
        assert index is not None
        return narrow_index(index, self.features)


def _cycle_table(permutation: list[int]) -> list[list[int]]:
    table = feature_at, first, rank, length = [[0] * len(permutation) for _ in range(4)]
    slot = 0
    for start in range(len(permutation)):
        if length[start]:
            continue
        cycle = [start]
        while (feature := permutation[cycle[-1]]) != start:
            cycle.append(feature)
        for n, feature in enumerate(cycle):
            feature_at[slot + n], first[feature], rank[feature], length[feature] = feature, slot, n, len(cycle)
        slot += len(cycle)
    return table


def long_orders(features: int, heads: int = 1) -> Tensor:
    """Permutations ``[h d]`` of large orders and of a very large common order.

    A random permutation of 64 features has an order of a few thousand, often of a few dozen, and a head does not distinguish
    positions that differ by its order. The first permutation here has the largest possible order (Landau's function),
    2,042,040 for 64 features; each further one maximises its order times the factor by which it enlarges the common order.

    Examples:
        >>> long_orders(8).tolist()  # cycles of 3 and 5
        [[1, 2, 0, 4, 5, 6, 7, 3]]
        >>> Permutation(long_orders(16)).common_order, Permutation(long_orders(16, 2)).common_order
        (140, 4620)
    """
    primes = [p for p in range(2, features + 1) if all(p % n for n in range(2, math.isqrt(p) + 1))]
    common, rows = 1, []
    for _ in range(heads):
        best: list[tuple[int, tuple[int, ...]]] = [(1, ())] * (features + 1)  # by features used: value, cycle lengths
        for prime in primes:
            powers = [prime**n for n in range(1, features) if prime**n <= features]
            gain = {power: power * (math.lcm(common, power) // common if rows else 1) for power in powers}
            best = [
                max([best[used], *((best[used - p][0] * gain[p], (*best[used - p][1], p)) for p in powers if p <= used)])
                for used in range(features + 1)
            ]
        lengths = best[features][1]
        common = math.lcm(common, *lengths)
        permutation, first = list(range(features)), 0
        for length in lengths:
            permutation[first : first + length] = [*range(first + 1, first + length), first]
            first += length
        rows.append(permutation)
    return torch.tensor(rows, device="cpu")


def random_permutations(features: int, heads: int, seed: int, orders: str = "random") -> Tensor:
    """One permutation per head ``[h d]``: random, or with orders="long" random relabellings of `long_orders`."""
    expect("orders", orders, ("random", "long"))
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(features, generator=generator, device="cpu") for _ in range(heads)]
    if orders == "long":
        rows = [row[longest[row.argsort()]] for row, longest in zip(rows, long_orders(features, heads), strict=True)]
    return torch.stack(rows)


class Exponential(Encoding):
    """exp(x (A - A^T)): every orthogonal representation of a line, in a learned basis with learned angles.

    The skew matrix A - A^T = P^T (blocks of frequencies) P is diagonalised once per forward pass in float64, so that each
    position costs a rotation in the basis P instead of a d x d matrix. The outer P^T cancels in products.

    Args:
        generator: A, ``[h d d]`` with even d. The frequencies of A - A^T must be distinct and nonzero, because otherwise
            eigenvectors have no gradient; random and RoPE-like generators have such frequencies.
        learned: Whether A is learned.

    References:
        Algebraic Positional Encodings (Kogkalidis et al. 2024), sections 3.1 and 4.2. https://arxiv.org/abs/2312.16045

    Examples:
        >>> rho = Exponential(torch.randn(2, 6, 6), learned=True)(torch.arange(4)[:, None])
        >>> rho(torch.randn(1, 2, 4, 6)).shape
        torch.Size([1, 2, 4, 6])
    """

    extensible = True

    def __init__(self, generator: Tensor, *, learned: bool = True):
        super().__init__()
        if generator.ndim != 3 or generator.shape[-1] != generator.shape[-2] or generator.shape[-1] % 2:
            raise ValueError(f"generator: expected [h d d] with even d, got {list(generator.shape)}")
        self.group = Line(real=True)
        self.features = self.out_features = generator.shape[-1]
        check_spectrum(generator)
        self.parametrise("generator", generator, learned=learned)

    def frequency(self) -> Tensor:
        """Current angles per step of the planes of the generator, before an extension: float64 ``[h d/2]``."""
        return spectrum(to_float64(self.parameter))[0]

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        frequency, basis = spectrum(to_float64(self.parameter, x.device))
        rotation = Rotation(rotations(x, self.extended(frequency[:, None]), dtype))
        return Chain(Matrix(cast_down(basis, dtype, x.device)), rotation)

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if not self.parameter.is_meta:
            check_spectrum(self.parameter)


class TreePath(Encoding):
    """Products of generators along the path from the root: rho(node) = rho(parent) exp(A_b - A_b^T) for its branch b.

    This is a representation of the free group on the branches: <rho(x) q, rho(y) k> depends on the path from x up to the
    nearest common ancestor and down to y. A shift, multiplication from the left, moves the tree below another node.
    Operators are computed level by level, once per node. Because generators do not commute, each node stores a d x d matrix.

    Args:
        generator: A, ``[h b d d]`` for b branches.
        learned: Whether A is learned.

    References:
        Algebraic Positional Encodings (Kogkalidis et al. 2024), section 3.2. https://arxiv.org/abs/2312.16045

    Examples:
        >>> from isopos.positions import tree
        >>> rho = TreePath(torch.randn(2, 2, 4, 4))(tree("(S (NP she) (VP sleeps))"))
        >>> rho(torch.randn(1, 2, 5, 4)).shape
        torch.Size([1, 2, 5, 4])
    """

    def __init__(self, generator: Tensor, *, learned: bool = True):
        super().__init__()
        if generator.ndim != 4 or generator.shape[-1] != generator.shape[-2]:
            raise ValueError(f"generator: expected [h b d d], got {list(generator.shape)}")
        self.group = Tree(generator.shape[1])
        self.features = self.out_features = generator.shape[-1]
        self.parametrise("generator", generator, learned=learned)

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        step = skew_exponential(to_float64(self.parameter, x.device))
        return Operators(path(cast_down(step, dtype, x.device), x))


class InBasis(Encoding):
    """P^T rho(x) P for an encoding rho and a constant orthogonal P. The outer P^T cancels in products, so P is applied once.

    Args:
        encoding: rho.
        basis: P, whose number of output features is the encoding's.

    References:
        Linearized Relative Positional Encoding (Qin et al. 2023), Eq. 22-24 and 75. https://arxiv.org/abs/2307.09270
    """

    def __init__(self, encoding: Encoding, basis: Basis):
        super().__init__()
        if basis.widening * basis.features != encoding.features:
            got = basis.widening * basis.features
            raise ValueError(f"basis: expected {encoding.features} features as the encoding, got {got}")
        if basis.widening == 2 and encoding.is_lift:
            got = f"{type(encoding).__name__} with lift=True, which maps real features"
            raise ValueError(
                f"encoding: expected one of pairs, complex features, as those of {type(basis).__name__}, got {got}"
            )
        self.encoding, self.basis = encoding, basis
        self.is_complex, self.is_trivial = encoding.is_complex and basis.is_complex, encoding.is_trivial
        self.order, self.is_lift, self.is_paired = encoding.order, encoding.is_lift, basis.widening == 2
        self.group, self.features, self.out_features = encoding.group, basis.features, encoding.out_features
        self.max_length = encoding.max_length

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        rho = self.encoding(x, dtype)  # checks x
        return Chain(self.basis(x.device, dtype), rho)

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        assert isinstance(rho, Chain)
        return maps.composed(rho.first, self.encoding.rescaled(rho.second, factor))


class DirectSum(Encoding):
    """Encodings side by side, each on a separate slice of features and, on a product of groups, separate coordinates.

    Args:
        parts: The encodings, in order of features.
        shared: Whether all parts take the same coordinates (of one group) instead of a product of their groups.

    Examples:
        >>> lines = [Rotary(rope_frequencies(4)[None, None]) for _ in range(2)]
        >>> grid = DirectSum(lines)
        >>> grid.group.columns, grid.features
        (2, 16)
    """

    def __init__(self, parts: Sequence[Encoding], *, shared: bool = False):
        super().__init__()
        parts = instances("parts", parts, Encoding, "encodings")
        if shared and len({part.group for part in parts}) > 1:
            raise ValueError(f"parts: expected one group to share, got {[part.group for part in parts]}")
        self.parts, self.shared = nn.ModuleList(parts), shared
        self.widths, self.returned = (tuple(getattr(part, name) for part in parts) for name in ("features", "out_features"))
        orders = [part.order for part in parts]
        self.order = math.inf if math.inf in orders else math.lcm(*map(int, orders))
        self.group = parts[0].group if shared else Product(tuple(part.group for part in parts))
        self.features, self.out_features = sum(self.widths), sum(self.returned)
        self.max_length = shortest(parts)

    def refusal(self, rule: Extension) -> str:
        return refusal_of_shared(self.parts, rule) if self.shared else ""

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        self.group.check(x)
        columns = (x,) * len(self.parts) if self.shared else self.group.split(x)  # pyright: ignore[reportAttributeAccessIssue]
        parts = tuple(part(a, dtype) for part, a in zip(self.parts, columns, strict=True))
        return BlockSum(parts, self.widths, self.returned)

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        return rescaled_parts(self.parts, rho, factor)


class Partial(Encoding):
    """An encoding of the first features; the rest pass unchanged: partial rotary, LRPE's identity block (Eq. 23, q > 0).

    Args:
        encoding: Acts on its number of features.
        features: d, at least the encoding's number of features.
    """

    def __init__(self, encoding: Encoding, features: int):
        super().__init__()
        self.rest = features - encoding.features
        if self.rest < 0:
            raise ValueError(f"features: expected at least {encoding.features} as the encoding, got {features}")
        self.encoding, self.group, self.order = encoding, encoding.group, encoding.order
        self.features, self.out_features = features, encoding.out_features + self.rest
        self.max_length = encoding.max_length

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Isometry:
        inner, rest = self.encoding, self.rest
        return BlockSum((inner(x, dtype), maps.Identity()), (inner.features, rest), (inner.out_features, rest))

    @property
    def all_extensible(self) -> bool:
        return False

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        return rescaled_parts((self.encoding, None), rho, factor)


def shortest(parts: Iterable[Any]) -> int | None:
    """The smallest `max_length` of several couplings, embeddings or schemes; None if all are unlimited."""
    return min((part.max_length for part in parts if part.max_length is not None), default=None)


def refusal_of_shared(parts: Iterable[nn.Module], rule: Extension) -> str:
    """The reason why a rule that needs all pairs of an axis does not apply to parts with the same coordinates, or ""."""
    turning = [_turning(part) for part in parts]
    if not rule.by_series or sum(map(len, turning)) == len(set().union(*turning)):
        return ""
    return f"expected linear or llama3 for parts that rotate along the same axis, got {rule.name}, which needs all its pairs"


def _turning(part: nn.Module) -> set[int]:
    """Columns of positions along which a part rotates by frequencies that an extension may change."""
    columns: set[int] = set()
    for module in part.modules():
        if isinstance(module, Coupling) and module.extensible:
            known = isinstance(module, Rotary) and module.group == getattr(part, "group", None)
            moved = module.parameter.detach().any(0).any(-1).tolist() if known else [True] * module.group.columns
            columns |= {column for column, moves in enumerate(moved) if moves}
    return columns


def rescaled_parts(parts: Iterable[Any], rho: TokenMap, factor: float) -> TokenMap:
    """`Coupling.rescaled` of couplings side by side, of which None has nothing to rescale."""
    assert isinstance(rho, BlockSum | Blocks)
    each = (inner if part is None else part.rescaled(inner, factor) for part, inner in zip(parts, rho.parts, strict=True))
    return maps.side_by_side(tuple(each), rho.widths, rho.returned)
