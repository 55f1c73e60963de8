"""Couplings that are no representations; each class states the law that does not hold.

A coupling maps queries and keys differently. Constant channels next to the features add a term to scores; an absolute
position acts on one side only; stochastic encodings are relative in expectation; exponentials of generators that do not
commute are relative along lines through the origin. Polar coordinates are relative, and an isometry of magnitudes; an
encoding behind a learned linear map is relative.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from isopos.catalog import at_least
from isopos.encodings import Coupling, Encoding, Side, Sided, rope_frequencies
from isopos.exact import Weight, cast_down, constant, float64_device, full_precision, normal, to_float64
from isopos.feature_maps import FeatureMap
from isopos.lengths import Extension, Linear
from isopos.maps import Affine, Append, Composed, Identity, LinearMap, Mapped, Matrices, Operators, Rotation, TokenMap
from isopos.ops.noise import gaussian
from isopos.ops.rotate import angles, rotation_table, rotations, skew_exponential
from isopos.positions import Line, lines

__all__ = ["Absolute", "Adapted", "Constrained", "ConvSPE", "Lie", "Polar", "SineSPE", "TransformerXL"]

SOFTPLUS = FeatureMap("softplus", torch.nn.functional.softplus)


class Absolute(Sided):
    """An encoding on one side only: scores depend on the position of the query, or of the key, relative to the origin.

    The other side's isometry is evaluated at the identity. Only the monoid laws hold: a shift changes scores.

    Args:
        encoding: rho.
        side: "query" or "key".

    References:
        Algebraic Positional Encodings (Kogkalidis et al. 2024), section 3.4.1. https://arxiv.org/abs/2312.16045
    """

    def __init__(self, encoding: Encoding, side: Side = "key"):
        super().__init__()
        if side not in ("query", "key"):
            raise ValueError(f"side: expected query or key, got {side!r}")
        self.encoding, self.side = encoding, side
        self.group, self.features, self.out_features = encoding.group, encoding.features, encoding.out_features
        self.max_length = encoding.max_length

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        return self.encoding(x if side == self.side else self.group.origin(*x.shape[:-1], device=x.device), dtype)

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        return self.encoding.rescaled(rho, factor)


class Constrained(Coupling):
    """Horn's scheme 1: sinusoids u in additional channels, with a projection that keeps their product relative.

    <(q, u_x W*), (k, u_y)> = <q, k> + sum_m a_m cos(w_m (x - y)) + b_m sin(w_m (x - y)),
    u_x = (sin w_1 x, cos w_1 x, ...),  W* = blockdiag([[a_m, b_m], [-b_m, a_m]])

    It is relative, but no isometry; the added term may be negative, and so may denominators that contain it. Each of several
    axes has separate sinusoids: offsets are vectors, not distances.

    Args:
        features: d of queries and keys, any number.
        heads: h.
        frequency: ``[c m]``, radians per step, m for each of c axes.
        learned: Whether the frequencies are learned, separately per head.
        outside: Number of leading tokens without a position (class tokens): their channels are zero.

    References:
        Translational Equivariance in Kernelizable Attention (Horn et al. 2021), scheme 1 of the notes.
        https://arxiv.org/abs/2102.07680
    """

    def __init__(self, features: int, heads: int, frequency: Tensor, *, learned: bool = False, outside: int = 0):
        super().__init__()
        if frequency.ndim != 2 or not frequency.isfinite().all():
            raise ValueError(f"frequency: expected finite floats [c m], got {list(frequency.shape)}")
        at_least("outside", outside, 0)
        axes, waves = frequency.shape
        self.group = lines(axes)
        self.features, self.out_features, self.outside = features, features + 2 * axes * waves, outside
        self.frequency = constant(torch.block_diag(*frequency))[None]  # [1 c c*m]: separate per axis
        self.waves = Weight(constant(frequency).expand(heads, -1, -1)) if learned else None
        start = torch.tensor([1.0, 0.1], device="cpu", dtype=torch.float64).expand(heads, axes * waves, 2) / waves
        self.parametrise("projection", start, learned=True)  # [h c*m 2]: a and b

    @property
    def frequencies(self) -> Tensor:
        """Radians per step ``[h c c*m]`` in float64, zero for sinusoids of other axes; h = 1 if fixed."""
        if self.waves is None:
            return self.frequency
        learned = to_float64(self.waves.parameter)  # [h c m]
        axis = torch.eye(learned.shape[1], device=learned.device).repeat_interleave(learned.shape[2], 1)
        return axis * learned.flatten(1)[:, None]

    def query(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        """Channels u_x W*, after q."""
        sin, cos = self._sinusoids(x)
        a, b = to_float64(self.parameter, x.device)[:, None].unbind(-1)
        return Append(cast_down(torch.stack((a * sin - b * cos, b * sin + a * cos), -1).flatten(-2), dtype, x.device))

    def key(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        """Channels u_y, after k."""
        return Append(cast_down(torch.stack(self._sinusoids(x), -1).flatten(-2), dtype, x.device))

    def _sinusoids(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.group.check(x)
        angle = angles(x, self.frequencies)
        inside = torch.arange(x.shape[-2], device=angle.device)[:, None] >= self.outside
        return angle.sin() * inside, angle.cos() * inside


class TransformerXL(Coupling):
    """Four terms of content and relative sinusoids: (q_x + u)^T k_y + (q_x + v)^T W p_{y-x}.

    p_{y-x} is p_y rotated by -x. So the second product is that of the query's features, rotated, and channels p_y, which
    depend on the key's position alone. It is exact at every offset, without a table of offsets. The terms are parts of a
    logit: for softmax attention.

    Args:
        features: d of queries and keys.
        heads: h.
        width: Number of sinusoids p, even.
        seed: Seed of W's initial values; u and v start at zero.

    References:
        - Transformer-XL (Dai et al. 2019), section 3.3. https://arxiv.org/abs/1901.02860
        - RoFormer (Su et al. 2021), Eq. 7.
    """

    def __init__(self, features: int, heads: int, width: int, *, seed: int = 0):
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width: expected an even number of sinusoids, got {width}")
        self.group, self.features, self.out_features = Line(real=True), features, features + width
        self.frequency = rope_frequencies(width // 2)[None, None]
        self.content, self.location = (
            Weight(torch.zeros(heads, 1, features, device="cpu", dtype=torch.float64)) for _ in range(2)
        )
        self.parametrise("projection", normal(seed, heads, width, features) / width**0.5, learned=True)

    def query(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        """q + u, then W^T (q + v) rotated by x."""
        self.group.check(x)
        rotation = Rotation(rotations(x, self.frequency, dtype))
        relative = Composed(Affine(self.location.parameter.to(dtype), self.parameter.to(dtype)), rotation)
        return Append(relative, Affine(self.content.parameter.to(dtype)))

    def key(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        """k, then p_y as (cos, sin) pairs: the vector (1, 0, 1, 0, ...) rotated by y."""
        self.group.check(x)
        return Append(rotations(x, self.frequency, dtype).flatten(-2))


class Polar(Coupling):
    """Magnitudes of features at phases of positions: sum_i m(q_i) m(k_i) cos(w_i (y - x) + phase_i), m = softplus.

    This is LRPE's unitary lift applied to magnitudes; learned phase offsets of keys distinguish directions. The paper
    restricts these to [-2 pi, 0], one full turn; here they are any number. It is relative, and keeps norms of magnitudes,
    not of features.

    Args:
        frequency: ``[d]``, radians per step, one per feature.
        heads: h.
        magnitudes: Whether m is applied here; linear attention applies its feature map instead.

    References:
        Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings (Gopalakrishnan et al. 2025), PoPE.
        https://arxiv.org/abs/2509.10534
    """

    extensible = True

    def __init__(self, frequency: Tensor, heads: int, *, magnitudes: bool = False):
        super().__init__()
        self.group, self.magnitudes = Line(real=True), magnitudes
        self.features, self.out_features = len(frequency), 2 * len(frequency)
        self.frequency = constant(frequency)[None, None]
        self.parametrise("phase", torch.zeros(heads, len(frequency), device="cpu", dtype=torch.float64), learned=True)

    def query(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        self.group.check(x)
        return self._map(rotations(x, self.extended(self.frequency), dtype))

    def key(self, x: Tensor, dtype: torch.dtype = torch.float32) -> TokenMap:
        self.group.check(x)
        phase = to_float64(self.parameter, x.device)[:, None]
        return self._map(rotation_table(angles(x, self.extended(self.frequency)) + phase, dtype).to(x.device))

    def _map(self, table: Tensor) -> TokenMap:
        rotation = Rotation(table, True)
        return Composed(Mapped(Identity(), SOFTPLUS), rotation) if self.magnitudes else rotation


class Adapted(Sided):
    """An encoding of A q and A k with a learned map A = U diag(s) V^T per head: <A q, rho(x^-1 y) A k>.

    U = exp(B - B^T) and V = exp(C - C^T) are rotations, s = exp(r) is positive; B, C and r are initially zero, and A the
    identity. Scores are relative, but A is no isometry: a score at equal positions is <A q, A k>, bounded by |A|^2 |q| |k|.

    With `dual` keys have A^-T in place of A, and q^T A^T rho(x^-1 y) A^-T k is a representation in another basis, as
    `isopos.contragredient` describes: at equal positions it is <q, k>.

    Args:
        encoding: rho, with as many features as it returns.
        heads: h.
        dual: See above.

    References:
        Head-wise Adaptive Rotary Positional Encoding for Fine-Grained Image Generation (Li et al. 2025), HARoPE.
        https://arxiv.org/abs/2510.10489
    """

    def __init__(self, encoding: Encoding, heads: int, *, dual: bool = False):
        super().__init__()
        if encoding.features != encoding.out_features:
            got = f"{encoding.features} and {encoding.out_features}"
            raise ValueError(f"encoding: expected one that returns as many features as it takes, got {got}")
        self.encoding, self.dual, self.group = encoding, dual, encoding.group
        self.features = self.out_features = encoding.features
        self.max_length = encoding.max_length
        zero = torch.zeros(heads, 2, self.features, self.features, device="cpu", dtype=torch.float64)
        self.parametrise("generator", zero, learned=True)  # [h 2 d d]: B and C
        self.stretch = Weight(zero[:, 0, 0])  # [h d]: r

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        u, v = skew_exponential(to_float64(self.parameter, x.device)).unbind(1)
        sign = -1 if self.dual and side == "key" else 1  # A^-T = U diag(1 / s) V^T
        scale = torch.exp(sign * to_float64(self.stretch.parameter, x.device))
        return Composed(LinearMap(cast_down((u * scale[:, None]) @ v.mT, dtype, x.device)), self.encoding(x, dtype))

    def rescaled(self, rho: TokenMap, factor: float) -> TokenMap:
        assert isinstance(rho, Composed)
        return Composed(rho.first, self.encoding.rescaled(rho.second, factor))


class Lie(Sided):
    """exp(sum_c x_c (A_c - A_c^T)) with learned generators per head and axis that need not commute.

    It is an isometry, but no representation of a grid: exp(X)^T exp(Y) is exp(Y - X) only if X and Y commute. Scores are
    relative along each line through the origin; elsewhere the error is about |[X, Y]| / 2 near the origin. Each token needs
    a d x d matrix: t d^3 operations, t d^2 numbers.

    Args:
        generator: A, ``[h c d d]`` for c coordinates. If its skew parts commute, as on one axis, it is relative.
        learned: Whether A is learned.

    References:
        LieRE: Lie Rotational Positional Encodings (Ostmeier et al. 2024), with one dense block per head.
        https://arxiv.org/abs/2406.10322
    """

    alike = extensible = True
    weaker_law = "relative along lines through the origin"

    def __init__(self, generator: Tensor, *, learned: bool = True):
        super().__init__()
        if generator.ndim != 4 or generator.shape[-1] != generator.shape[-2]:
            raise ValueError(f"generator: expected [h c d d], got {list(generator.shape)}")
        self.group = lines(generator.shape[1])
        self.features = self.out_features = generator.shape[-1]
        self.parametrise("generator", generator, learned=learned)

    def refusal(self, rule: Extension) -> str:
        if isinstance(rule, Linear):
            return ""
        return f"expected linear for generators that do not commute, and so have no frequencies, got {rule.name}"

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        positions = to_float64(x) if self.extension is None else to_float64(x) / self.extension.factor
        total = torch.einsum("...tc,hcij->...htij", positions, to_float64(self.parameter, x.device))
        return Operators(cast_down(skew_exponential(total.contiguous()), dtype, x.device))


class _Stochastic(Sided, ABC):
    """Random combinations of features: codes ``[*b h t r d]`` whose products have the mean P_d(x - y).

    With a gate (Liutkus et al. 2021, "gated SPE"), a code is sqrt(1 - g_d) code + sqrt(g_d) e_d with noise e_d shared by all
    positions, and the mean is g_d + (1 - g_d) P_d(x - y): g_d = sigmoid(gate) is the part of a feature that ignores
    positions.
    """

    is_random = True
    weaker_law = "relative in expectation"

    def __init__(self, features: int, heads: int, realizations: int | None, noise_per_head: bool):
        super().__init__()
        self.features, self.noise_heads = features, heads if noise_per_head else None  # None: heads share the noise
        self.out_features = at_least("realizations", features if realizations is None else realizations)
        self.gate: Weight | None = None

    def _draw_gate(self, heads: int, generator: torch.Generator) -> None:
        self.gate = Weight(normal(generator, heads, self.features))
        self.gate_noise = constant(normal(generator, self.noise_heads or 1, self.features, self.out_features))

    @abstractmethod
    def _codes(self, x: Tensor, dtype: torch.dtype, side: Side) -> Tensor: ...

    def _at(self, x: Tensor, dtype: torch.dtype, side: Side) -> TokenMap:
        codes = self._codes(x, dtype, side)
        if self.gate is None:
            return Matrices(codes)
        gate = to_float64(self.gate.parameter, x.device)  # [h d]
        weight, noise = (-gate).sigmoid().sqrt(), to_float64(self.gate_noise, x.device) / self.out_features**0.5
        shared = (gate.sigmoid().sqrt()[..., None] * noise).mT  # [h r d], for all positions
        return Matrices(
            cast_down(weight, dtype, x.device)[:, None, None] * codes + cast_down(shared, dtype, x.device)[:, None]
        )


class SineSPE(_Stochastic):
    """Stochastic encoding by sines: products estimate sum_d q_d k_d P_d(x - y), relative in expectation over random draws.

    P_d(t) = sum_k gain_dk^2 cos(w_dk t + phase_dk)

    Queries and keys become `realizations` random combinations of their features. One draw is neither relative nor an
    isometry.

    Args:
        features: d.
        heads: h.
        sines: Number of sinusoids per feature.
        realizations: R, features of the result; d by default. The error falls as 1 / sqrt(R).
        gated: Whether P_d is replaced by g_d + (1 - g_d) P_d with learned g_d.
        noise_per_head: Whether heads have separate draws; otherwise they share one.
        seed: Seed of noise, phases, frequencies and gates.

    References:
        Relative Positional Encoding for Transformers with Linear Complexity (Liutkus et al. 2021), sineSPE.
        https://arxiv.org/abs/2105.08399
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        sines: int = 5,
        realizations: int | None = None,
        gated: bool = False,
        noise_per_head: bool = False,
        seed: int = 0,
    ):
        super().__init__(features, heads, realizations, noise_per_head)
        at_least("sines", sines)
        self.group = Line(real=True)
        generator = torch.Generator().manual_seed(seed)
        shape = (heads, features, sines)
        frequency = rope_frequencies(features * sines).view(sines, features).T.expand(heads, -1, -1)
        self.parametrise("frequency", frequency, learned=True)
        self.gain = Weight(torch.full(shape, sines**-0.5, device="cpu", dtype=torch.float64))
        self.phase = Weight(0.5 * normal(generator, *shape))
        shape = shape if noise_per_head else shape[1:]
        self.noise = constant(normal(generator, *shape, 2, self.out_features))
        if gated:
            self._draw_gate(heads, generator)

    def _codes(self, x: Tensor, dtype: torch.dtype, side: Side) -> Tensor:
        angle = angles(x, self.parameter.flatten(1)[:, None]).unflatten(-1, self.parameter.shape[1:])  # [*b h t d k]
        angle = angle + to_float64(self.phase.parameter, x.device)[:, None] if side == "query" else angle
        waves = torch.stack((angle.cos(), angle.sin()), -1) * to_float64(self.gain.parameter, x.device)[:, None, ..., None]
        noise = to_float64(self.noise, x.device) / self.out_features**0.5
        waves, noise = (cast_down(a, dtype, x.device) for a in (waves, noise))
        heads_axis = "h" if self.noise_heads else ""
        with full_precision(x.device):
            return torch.einsum(f"...htdkc,{heads_axis}dkcr->...htrd", waves, noise)


class ConvSPE(_Stochastic):
    """Stochastic encoding by filtered noise: products estimate sum_d q_d k_d P_d(x - y), relative in expectation.

    P_d is the correlation of a query and a key filter of `reach` steps, and zero beyond. The noise of a position is a
    function of it, so positions are unbounded integers. One draw is neither relative nor an isometry.

    Args:
        features: d.
        heads: h.
        reach: Length of the filters in steps.
        realizations: R, features of the result; d by default.
        gated: Whether P_d is replaced by g_d + (1 - g_d) P_d with learned g_d.
        noise_per_head: Whether heads have separate draws; otherwise they share one.
        seed: Seed of noise, filters and gates.

    References:
        Relative Positional Encoding for Transformers with Linear Complexity (Liutkus et al. 2021), convSPE.
        https://arxiv.org/abs/2105.08399
    """

    def __init__(
        self,
        features: int,
        heads: int,
        *,
        reach: int = 8,
        realizations: int | None = None,
        gated: bool = False,
        noise_per_head: bool = False,
        seed: int = 0,
    ):
        super().__init__(features, heads, realizations, noise_per_head)
        self.group, self.reach, self.seed = Line(), at_least("reach", reach), seed
        generator = torch.Generator().manual_seed(seed)
        start = (1 + normal(generator, heads, features, 2, reach)) / (2 * reach) ** 0.5
        self.parametrise("filters", start, learned=True)
        if gated:
            self._draw_gate(heads, generator)

    def _codes(self, x: Tensor, dtype: torch.dtype, side: Side) -> Tensor:
        lags = (x.long() - torch.arange(self.reach, device=x.device)).to(float64_device(x.device))  # [*b t p]
        shape, heads_axis = (self.out_features, self.features), ""
        if self.noise_heads:
            shape, heads_axis = (self.noise_heads, *shape), "h"
        noise = cast_down(gaussian(lags, math.prod(shape), self.seed), dtype, x.device)
        noise = (noise / self.out_features**0.5).unflatten(-1, shape)
        with full_precision(x.device):
            return torch.einsum(
                f"...tp{heads_axis}rd,hdp->...htrd", noise, self.parameter[:, :, 0 if side == "query" else 1].to(dtype)
            )
