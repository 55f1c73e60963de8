"""Relative biases: learned tables over buckets of offsets, or functions of offsets, that add terms to scores and values.

They are no representations: a term depends on both positions jointly, so attention with it is quadratic. Only terms of
clipped offsets have a sum in linear time. All biases are relative except `Fire`, which divides distances by the query's
position. An offset is the key's position minus the query's.
"""

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from isopos.catalog import at_least, expect
from isopos.exact import ExactModule, Weight, cast_down, full_precision, normal, offsets, to_float64
from isopos.ops import gpu
from isopos.positions import Group, Line, lines
from isopos.terms import Clipped, DistanceKernel, Indexed, Numbers, Offsets, Term

__all__ = ["T5", "ClippedKeys", "DeBERTa", "Fire", "Kerple", "RelativeBias", "Shaw"]


class RelativeBias(ExactModule, ABC):
    """Terms for pairs of positions of `group`. Subclasses are final; they set group and heads and define `terms`."""

    group: Group
    heads: int = 1  # heads with separate tables; 1: one shared table
    outside: int = 0  # number of leading tokens without a position: class tokens
    is_linear: bool = False  # whether linear attention has a linear-time sum of its terms
    weaker_law: str = ""  # the law that holds if terms are not relative

    def forward(self, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Term, ...]:
        """Terms of queries at x ``[*b t c]`` and keys at y ``[*b s c]``, with tables in `dtype`."""
        self.group.check(x)
        self.group.check(y)
        return self.terms(x, y, dtype)

    @abstractmethod
    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        """Terms as in `forward`, for valid positions."""


class T5(RelativeBias):
    """One number per head and bucket, added to logits.

    Near offsets have separate buckets, far ones share them logarithmically.

    Args:
        heads: h.
        buckets: Number of buckets; half of them for each direction if bidirectional.
        max_distance: Larger offsets share the last bucket.
        bidirectional: Whether keys after the query have separate buckets; otherwise they share the bucket of offset 0.

    References:
        Exploring the Limits of Transfer Learning (Raffel et al. 2020), section 2.1. https://arxiv.org/abs/1910.10683

    Examples:
        >>> T5(8).bucket(torch.tensor([-200, -9, -8, -1, 0, 1, 200])).tolist()
        [15, 8, 8, 1, 0, 17, 31]
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True):
        super().__init__()
        self.group, self.heads, self.bidirectional = Line(), heads, bidirectional
        self.one_way = buckets // 2 if bidirectional else buckets
        near = self.one_way // 2
        if near < 1 or max_distance <= near or buckets % (1 + bidirectional):
            raise ValueError(
                f"buckets: expected {'an even number of at least 4' if bidirectional else 'at least 2'} and max_distance "
                f"larger than {near}, the number of near offsets, got {buckets} and {max_distance}"
            )
        far = self.one_way - near
        # bucket near + m starts where (distance / near)^far reaches (max_distance / near)^m
        starts = [_smallest(lambda d, m=m: d**far * near**m >= max_distance**m * near**far) for m in range(1, far)]
        self.starts = torch.tensor([*range(1, near + 1), *starts], device="cpu")
        self.parametrise("weight", torch.zeros(heads, buckets, device="cpu", dtype=torch.float64), learned=True)

    def bucket(self, offset: Tensor) -> Tensor:
        """Bucket of each offset, int64 of any shape; exact for every offset."""
        distance = offset.abs() if self.bidirectional else (-offset).clamp_min(0)
        after = (offset > 0) * self.one_way if self.bidirectional else 0
        return torch.bucketize(distance.contiguous(), self.starts.to(offset.device), right=True) + after

    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        return (_offset_term(self.parameter.to(dtype), "none", x, y, self.bucket, self.starts),)


class Shaw(RelativeBias):
    """Vectors of clipped offsets, added to keys and to values, and shared by all heads.

    logit_ij = scale <q_i, k_j + a^K_{clip(j - i)}>,  output_i = sum_j weight_ij (v_j + a^V_{clip(j - i)})

    Args:
        features: d of queries, keys and values.
        reach: Larger offsets share the last vector.
        seed: Seed of the initial vectors, with standard deviation d^-1/2.

    References:
        Self-Attention with Relative Position Representations (Shaw et al. 2018), Eq. 3 and 4. RoFormer, Eq. 5, misprints the
        query, which has no position. https://arxiv.org/abs/1803.02155
    """

    def __init__(self, features: int, *, reach: int = 16, seed: int = 0):
        super().__init__()
        self.group, self.reach = Line(), at_least("reach", reach)
        start = normal(seed, 2, 1, 2 * reach + 1, features) / features**0.5
        self.keys, self.values = Weight(start[0]), Weight(start[1])

    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        tables = (self.keys.parameter.to(dtype), "query"), (self.values.parameter.to(dtype), "value")
        return tuple(Clipped(table, side, x, y, self.reach) for table, side in tables)


class DeBERTa(RelativeBias):
    """Content to position and position to content: <q_i, k_j> + <q_i, K_delta(i,j)> + <Q_delta(j,i), k_j>.

    The vectors K and Q, separate for each head, replace the paper's projections of its relative embeddings.

    Args:
        heads: h.
        features: d of queries and keys.
        buckets: k: offsets have 2 k rows; row k + n is n steps before the query.
        max_distance: Far offsets share rows logarithmically up to this distance, as in version 2; with None offsets are
            clipped.
        released: Position to content is <Q_delta(i,j), k_j>, as in the released code and weights; Eq. 4 has delta(j,i).
        seed: Seed of the initial vectors, with standard deviation d^-1/2.

    References:
        - DeBERTa (He et al. 2021), Eq. 3 and 4. https://arxiv.org/abs/2006.03654
        - RoFormer (Su et al. 2021), Eq. 10; LRPE (Qin et al. 2023), Eq. 31.
    """

    def __init__(
        self,
        heads: int,
        features: int,
        *,
        buckets: int = 256,
        max_distance: int | None = 512,
        released: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        near, far = buckets // 2, 2**62 if max_distance is None else max_distance - 1
        if buckets < 4 or far <= near:
            raise ValueError(
                f"buckets: expected at least 4, and max_distance larger than {near + 1}, got {buckets} and {max_distance}"
            )
        self.group, self.heads, self.buckets, self.released = Line(), heads, buckets, released
        starts = list(range(1, buckets + 1))
        if max_distance is not None:  # near + m starts beyond (distance / near)^(near - 1) = (far / near)^(m - 1)
            tests = [lambda d, m=m: d ** (near - 1) * near**m > far**m * near ** (near - 1) for m in range(buckets - near)]
            starts[near:] = map(_smallest, tests)
        self.starts = torch.tensor(starts, device="cpu")
        start = normal(seed, 2, heads, 2 * buckets, features) / features**0.5
        self.keys, self.queries = Weight(start[0]), Weight(start[1])

    def bucket(self, offset: Tensor) -> Tensor:
        """Row delta of each offset, int64 of any shape; exact for every offset."""
        steps = torch.bucketize(offset.abs().contiguous(), self.starts.to(offset.device), right=True)
        return (self.buckets - steps * offset.sign()).clamp(0, 2 * self.buckets - 1)

    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        sign = 1 if self.released else -1
        keys, queries = (a.parameter.to(dtype) for a in (self.keys, self.queries))
        return (
            _offset_term(keys, "query", x, y, self.bucket, self.starts),
            _offset_term(queries, "key", x, y, lambda offset: self.bucket(sign * offset), self.starts),
        )


class Kerple(RelativeBias):
    """A kernel of the distance with two learned positive numbers per head, subtracted from logits.

    log:    -r1 log(1 + r2 |t|)
    power:  -r1 |t|^r2 with r2 at most 2; r2 = 1 is ALiBi with learned slopes

    Both are conditionally positive definite: plus a constant, which does not change softmax, they are kernels.

    Args:
        heads: h.
        kernel: "log" or "power".
        seed: Seed of the initial numbers: uniform up to 2 (r1 of log, r2 of power) or 1, and at least 0.01, as in the
            authors' code. Parameters are inverse softplus of them, or for r2 of power inverse 2 sigmoid.

    References:
        KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation (Chi et al. 2022), the logarithmic and the
        power variant. https://arxiv.org/abs/2205.09921

    Examples:
        >>> bias = Kerple(2)
        >>> (term,) = bias(torch.arange(3)[:, None], torch.arange(4)[:, None])
        >>> term.heads, term.shape, term.table[:, 0, 0].tolist()
        (2, torch.Size([3, 4]), [-0.0, -0.0])
    """

    def __init__(self, heads: int, *, kernel: str = "log", seed: int = 0):
        super().__init__()
        expect("kernel", kernel, ("log", "power"))
        self.group, self.heads, self.kernel = Line(real=True), heads, kernel
        drawn = torch.rand(2, heads, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float64)
        log = kernel == "log"
        upper = torch.tensor((2.0, 1.0) if log else (1.0, 2.0), device="cpu", dtype=torch.float64)[:, None]
        first, second = (upper * drawn).clamp_min(0.01)
        self.first = Weight(first.expm1().log())
        self.second = Weight(second.expm1().log() if log else (second / 2).logit())

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Current r1 and r2 of each head: float64 ``[h]``."""
        first, second = to_float64(self.first.parameter), to_float64(self.second.parameter)
        r2 = torch.nn.functional.softplus(second) if self.kernel == "log" else 2 * second.sigmoid()
        return torch.nn.functional.softplus(first), r2

    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        if _can_be_lazy(x, y):
            table = cast_down(torch.stack(self.numbers(), -1), dtype, x.device)
            return (DistanceKernel(table, "none", to_float64(x), to_float64(y), self.kernel),)
        distance = cast_down(self.group.distance(x, y), dtype, x.device).unsqueeze(-3)
        r1, r2 = (cast_down(a, dtype, x.device)[:, None, None] for a in self.numbers())
        if self.kernel == "log":
            return (Numbers(-r1 * torch.log1p(r2 * distance)),)
        apart = distance > 0  # the power of zero has no gradient
        return (Numbers(-r1 * torch.where(apart, distance.where(apart, 1.0) ** r2, 0.0)),)


class Fire(RelativeBias):
    """A learned network of the distance relative to the query's position, both on a logarithmic scale.

    b(x, y) = f(psi(|y - x|) / psi(max(L, x))),  psi(n) = log(c n + 1),  f(s) = W relu(s u + w)

    Positions count from the start of a sequence. For queries beyond the learned position L a score depends on the position,
    not on the offset alone; the argument of f stays within the range of training at any length. For queries up to L it is
    relative. f has no bias before softmax, which would cancel it.

    Args:
        heads: h.
        width: Hidden units of f.
        length: Initial L, at least 1; a factor of it, initially 1, is learned.
        seed: Seed of f.

    References:
        Functional Interpolation for Relative Positions Improves Long Context Transformers (Li et al. 2024), FIRE with the
        transform log and the threshold. Initial c, width and L are from the listing in its appendix.
        https://arxiv.org/abs/2310.04418
    """

    weaker_law = "relative for queries up to L"

    def __init__(self, heads: int, *, width: int = 32, length: float = 512.0, seed: int = 0):
        super().__init__()
        if not length >= 1:
            raise ValueError(f"length: expected at least one step, got {length}")
        self.group, self.heads, self.length = Line(real=True), heads, float(length)
        generator = torch.Generator().manual_seed(seed)
        at_least("width", width)
        self.into = Weight(normal(generator, 2, width))  # u and w
        self.out = Weight(normal(generator, heads, width) / width**0.5)
        self.rate = Weight(torch.tensor([0.1], device="cpu", dtype=torch.float64))  # c
        self.threshold = Weight(torch.tensor([1.0], device="cpu", dtype=torch.float64))  # L / length

    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        rate = to_float64(self.rate.parameter, x.device).abs()
        threshold = self.length * to_float64(self.threshold.parameter, x.device).abs()
        last = torch.maximum(to_float64(x), threshold.clamp_min(1))  # [*b t 1]
        share = torch.log1p(rate * to_float64(self.group.distance(x, y))) / torch.log1p(rate * last)
        u, w = self.into.parameter.to(dtype)
        hidden = (cast_down(share, dtype, x.device)[..., None] * u + w).relu()  # [*b t s width]
        with full_precision(x.device):
            return (Numbers((hidden @ self.out.parameter.to(dtype).mT).movedim(-1, -3)),)


class ClippedKeys(RelativeBias):
    """Horn's scheme 2: vectors of clipped offsets, added to keys. Linear attention sums them in linear time.

    weight_ij = <phi(q_i), phi(k_j) + phi(w_{clip(y_j - x_i)})>

    Offsets are signed and clipped on each axis; far buckets are prefix sums over the grid.

    Args:
        heads: h.
        features: d of queries and keys.
        reach: R >= 1: (2 R + 1)^axes buckets.
        axes: Number of axes of positions.
        outside: Number of leading tokens without a position (class tokens); they have two separate buckets, as key and as
            query.
        mean: Mean of the initial vectors; their standard deviation is 1, as for queries.
        seed: Seed of the initial vectors.

    References:
        Translational Equivariance in Kernelizable Attention (Horn et al. 2021), scheme 2 of the notes, whose printed sum is
        garbled. https://arxiv.org/abs/2102.07680
    """

    is_linear = True

    def __init__(
        self,
        heads: int,
        features: int,
        *,
        reach: int = 8,
        axes: int = 1,
        outside: int = 0,
        mean: float = 0.0,
        seed: int = 0,
    ):
        super().__init__()
        at_least("axes", axes)
        at_least("outside", outside, 0)
        self.group = lines(axes)
        self.heads, self.reach, self.outside = heads, at_least("reach", reach), outside
        buckets = (2 * reach + 1) ** axes + (2 if outside else 0)
        self.parametrise("weight", normal(seed, heads, buckets, features) + mean, learned=True)

    def terms(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Term, ...]:
        return (Clipped(self.parameter.to(dtype), "query", x, y, self.reach, self.outside),)


def _can_be_lazy(x: Tensor, y: Tensor) -> bool:
    """Whether a GPU kernel may evaluate the term pair by pair, without forming all pairs in memory."""
    return not (torch.compiler.is_compiling() or gpu.unreadable("flex attention", x, y))


def _offset_term(
    table: Tensor, side: str, x: Tensor, y: Tensor, bucket: Callable[[Tensor], Tensor], starts: Tensor
) -> Indexed | Offsets:
    """A term with the buckets of all pairs, or with one bucket per offset; offsets beyond the last start share a bucket."""
    if not _can_be_lazy(x, y):
        return Indexed(table, side, bucket(offsets(x.long(), y.long())))
    largest = int(starts[-1])
    return Offsets(table, side, x, y, bucket(torch.arange(-largest, largest + 1, device=x.device)))


def _smallest(holds: Callable[[int], bool]) -> int:
    """The smallest positive integer that fulfils a monotonic condition. Integers avoid rounded powers."""
    return 1 + bisect.bisect_left(range(1, 2**62), True, key=holds)
