"""Content-dependent phases: every token takes a step read from its key; a weight depends on the steps after its key.

    p_t = step(k_1) + ... + step(k_t),    weight_ts depends on p_t - p_s = step(k_{s+1}) + ... + step(k_t)

Steps are log gates (`ForgetGate`) or angles (`SelectiveRotation`, `ContentFrequency`): the real and the imaginary part of
one exponent, exp(p_t - p_s). They replace positions in causal attention. Products are float32 or wider, steps and their sums
float64.

`HouseholderProduct` is the other kind: a token contributes a matrix. Products of these depend on the order of tokens and
need not have an inverse, so that there is no phase p_t whose differences are the products between two tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from isopos.catalog import at_least, expect
from isopos.exact import ExactModule, Weight, constant, full_precision, to_float64
from isopos.maps import Composed, Identity, Rotation, TokenMap
from isopos.ops.householder import Factors
from isopos.ops.linear.features import Decays
from isopos.ops.rotate import rotation_table

__all__ = ["ContentFrequency", "ContentPhase", "ForgetGate", "HouseholderProduct", "Phase", "SelectiveRotation"]
__all__ += ["Strength", "cumulative", "separated", "with_phases"]

Strength = Literal["learned", "reflection"]

MIN_LOG_GATE = -1000.0  # exp(-1000) is zero in every dtype, and long sums keep precision


class ContentPhase(ExactModule, ABC):
    """Base class: steps computed from <w, k> + b by `steps`, with parameters w ``[h c d]`` and b ``[h c]``.

    k is the head's key before feature map and encoding, so layers that share a scheme have different steps. For a layer's
    input x, the key is k = W x, and <w, k> = <W^T w, x> is linear in x, as in the papers. w is initially zero.

    Args:
        features: d of keys.
        bias: Initial b ``[h c]``.
    """

    def __init__(self, features: int, bias: Tensor):
        super().__init__()
        heads, columns = bias.shape
        self.features, self.heads, self.columns = at_least("features", features), heads, columns
        self.parametrise("weight", torch.zeros(heads, columns, features, device="cpu", dtype=torch.float64), learned=True)
        self.bias = Weight(bias)

    def forward(self, k: Tensor, mask: Tensor | None = None) -> Tensor:
        """Steps float64 ``[*b h t c]`` for keys ``[*b h t d]``; zero where a mask ``[*b t]`` is False."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        k = torch.where(k.isfinite(), k, 0).to(dtype)  # NaN containment
        with full_precision(k.device):
            content = k @ self.parameter.to(dtype).mT + self.bias.parameter.to(dtype)[:, None]
            steps = self.steps(to_float64(content))
        return steps if mask is None else torch.where(mask[..., None, :, None].to(steps.device), steps, 0)

    @abstractmethod
    def steps(self, content: Tensor) -> Tensor:
        """Steps for <w, k> + b, float64 ``[*b h t c]``."""


class ForgetGate(ContentPhase):
    """Forget gates: a content-dependent log decay, log f = log sigmoid(<w, k> + b), one per head and token.

    softmax attention:  logit_ts = <q_t, k_s> + sum_{s < m <= t} log f_m
    linear attention:   state_t = f_t state_{t-1} + k_t v_t^T

    b is initially zero, as in the authors' code, and f is 1/2.

    Args:
        features: d of keys.
        heads: h.

    References:
        - Forgetting Transformer: Softmax Attention with a Forget Gate (Lin et al. 2025), section 3, where gates read the
          layer's input. https://arxiv.org/abs/2503.02130
        - Gated Linear Attention Transformers with Hardware-Efficient Training (Yang et al. 2024) and Mamba-2 (Dao and Gu
          2024) for linear attention. https://arxiv.org/abs/2312.06635

    Examples:
        >>> forget = ForgetGate(4, 1)
        >>> forget(torch.randn(1, 3, 4)).exp().flatten().tolist()
        [0.5, 0.5, 0.5]
    """

    def __init__(self, features: int, heads: int):
        super().__init__(features, torch.zeros(heads, 1, device="cpu", dtype=torch.float64))

    def steps(self, content: Tensor) -> Tensor:
        return F.logsigmoid(content).clamp_min(MIN_LOG_GATE)


class SelectiveRotation(ContentPhase):
    """Selective rotation: the angle of a pair of features is a sum of content-dependent angles over the tokens so far.

    angle_t = sum_{m <= t} frequency (<w, k_m> + b)

    b is initially one, so that it starts as rope at consecutive positions.

    Args:
        features: d of queries and keys, even.
        heads: h.
        frequency: ``[d/2]``, radians.

    References:
        Selective Rotary Position Embedding (Movahedi et al. 2025). The authors' code, whose temperatures are the frequencies
        here, reads the layer's input with length one, through a matrix of low rank and a convolution over four tokens.
        https://arxiv.org/abs/2511.17388

    Examples:
        >>> rotation = SelectiveRotation(4, 1, torch.tensor([1.0, 0.1], dtype=torch.float64))
        >>> rotation(torch.randn(1, 3, 4)).cumsum(-2).tolist()
        [[[1.0, 0.1], [2.0, 0.2], [3.0, 0.30000000000000004]]]
    """

    def __init__(self, features: int, heads: int, frequency: Tensor):
        if 2 * len(frequency) != features:
            raise ValueError(f"frequency: expected one for each pair of {features} features, got {len(frequency)}")
        super().__init__(features, torch.ones(heads, len(frequency), device="cpu", dtype=torch.float64))
        self.frequency = constant(frequency)

    def steps(self, content: Tensor) -> Tensor:
        return to_float64(self.frequency, content.device) * content


class ContentFrequency(ContentPhase):
    """Rotation by powers of one content-dependent frequency per head: the angle of pair i is a sum over the tokens so far.

    angle_t = sum_{m <= t} f_m^i,    f_m = 1 / (1 + softplus(<w, k_m> + b)),    i = 0, 1, ..., d/2 - 1

    Frequencies are a geometric series, as rope's, whose ratio f in (0, 1) each token decides. b is initially such that f is
    base^(-2/d), so that it starts as rope at consecutive positions. Pair 0 makes one radian per token whatever the content.

    Args:
        features: d of queries and keys, even, at least 4.
        heads: h.
        base: Of the frequencies at the start, above 1.

    References:
        Context-aware Rotary Position Embedding (Veisi et al. 2025), CARoPE, section 2, where f reads the token's embedding.
        https://arxiv.org/abs/2507.23083

    Examples:
        >>> rotation = ContentFrequency(4, 1, 100.0)
        >>> rotation(torch.randn(1, 2, 4)).cumsum(-2).mul(1000).round().tolist()
        [[[1000.0, 100.0], [2000.0, 200.0]]]
    """

    def __init__(self, features: int, heads: int, base: float = 10000.0):
        if features % 2 or features < 4:
            raise ValueError(f"head size: expected an even number of at least 4 features, got {features}")
        if not 1 < base < math.inf:
            raise ValueError(f"base: expected a number above 1, got {base}")
        rest = math.expm1(2 / features * math.log(base))  # softplus(b)
        start = rest + math.log(-math.expm1(-rest))
        super().__init__(features, torch.full((heads, 1), start, device="cpu", dtype=torch.float64))
        self.columns = features // 2

    def steps(self, content: Tensor) -> Tensor:
        power = torch.arange(self.columns, dtype=content.dtype, device=content.device)
        return torch.exp(-power * torch.log1p(-F.logsigmoid(-content)))


class HouseholderProduct(ExactModule):
    """A matrix of each token between key and query: H_m = I - b_m w_m w_m^T with a unit vector w_m, in the order of tokens.

    score_ts = <q_t, H_t H_{t-1} ... H_{s+1} k_s>,    w_m = A k_m / |A k_m|,    b_m = 2 sigmoid(<u, k_m> + c)

    k is the head's key before feature map and encoding; queries and keys are their features in linear attention. A is
    initially the identity, u and c are zero: b is 1, and each token projects along its key, as the delta rule does. A token
    whose A k_m is zero has H = I. |H x| <= |x| always; with strength "reflection", b is 2 and |H x| = |x|.

    Args:
        features: d of keys.
        heads: h.
        strength: "learned" for b in (0, 2), or "reflection" for b = 2, where every H is orthogonal.

    References:
        PaTH Attention: Position Encoding via Accumulating Householder Transformations (Yang et al. 2025), where w reads the
        layer's input through a matrix of low rank and a convolution over three tokens, and b reads the input.
        https://arxiv.org/abs/2505.16381

    Examples:
        >>> product = HouseholderProduct(2, 1)
        >>> vector, strength = product(torch.tensor([[[3.0, 4.0], [0.0, 0.0]]]))
        >>> vector.tolist(), strength.tolist()
        ([[[0.6000..., 0.8000...], [0.0, 0.0]]], [[1.0, 1.0]])
    """

    def __init__(self, features: int, heads: int, strength: Strength = "learned"):
        super().__init__()
        expect("strength", strength, get_args(Strength))
        self.features, self.heads, self.strength = at_least("features", features), heads, strength
        identity = torch.eye(features, device="cpu", dtype=torch.float64)
        self.parametrise("weight", identity.repeat(heads, 1, 1), learned=True)
        learned = strength == "learned"
        self.gate = Weight(torch.zeros(heads, features, device="cpu", dtype=torch.float64)) if learned else None
        self.bias = Weight(torch.zeros(heads, device="cpu", dtype=torch.float64)) if learned else None

    def forward(self, k: Tensor, mask: Tensor | None = None) -> Factors:
        """Matrices of keys ``[*b h t d]``, float32 or wider; the identity where a mask ``[*b t]`` is False."""
        dtype = torch.promote_types(k.dtype, torch.float32)
        k = torch.where(k.isfinite(), k, 0).to(dtype)  # NaN containment
        with full_precision(k.device):
            vector = _normalised(k @ self.parameter.to(dtype).mT)
            if self.gate is None or self.bias is None:
                strength = torch.full_like(vector[..., 0], 2)
            else:
                content = (k @ self.gate.parameter.to(dtype)[..., None])[..., 0]
                strength = 2 * torch.sigmoid(content + self.bias.parameter.to(dtype)[:, None])
        return Factors(vector, strength if mask is None else torch.where(mask[..., None, :], strength, 0))


Phase: TypeAlias = ContentPhase | HouseholderProduct


def _normalised(x: Tensor) -> Tensor:
    """x / |x|, and zero with a zero gradient where x is zero. Squares neither overflow nor vanish."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    known = (largest > 0) & largest.isfinite()
    x = torch.where(known, x / torch.where(known, largest, 1), 1)
    return torch.where(known, x / x.norm(dim=-1, keepdim=True), 0)


def separated(phases: Iterable[Phase]) -> tuple[list[ContentPhase], HouseholderProduct | None]:
    """The phases that add up, and the one product of matrices, if any; ValueError for several."""
    sums = [phase for phase in phases if isinstance(phase, ContentPhase)]
    products = [phase for phase in phases if isinstance(phase, HouseholderProduct)]
    if len(products) > 1:
        raise ValueError(f"phases: expected at most one Householder product, got {len(products)}")
    return sums, products[0] if products else None


def cumulative(
    phases: Sequence[ContentPhase], k: Tensor, mask: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Content-dependent phases of tokens: float64 ``[*b h t c]``, cumulative sums starting from `before` ``[*b h c]``."""
    total = torch.cat([phase(k, mask) for phase in phases], -1).cumsum(-2)
    return total if before is None else before.unsqueeze(-2) + total


def with_phases(
    phases: Sequence[ContentPhase], total: Tensor, maps: tuple[TokenMap, TokenMap], decay: Decays, q: Tensor
) -> tuple[tuple[TokenMap, TokenMap], Decays]:
    """Maps and log decays of queries and keys with content-dependent phases, at `total` ``[*b h s c]``, included.

    Queries are the last tokens; they determine device and dtype.
    """
    t, s, angle = q.shape[-2], total.shape[-2], None
    for phase, part in zip(phases, total.split([phase.columns for phase in phases], -1), strict=True):
        if isinstance(phase, ForgetGate):
            g, pair = part[..., 0], decay or (0, 0)
            decay = pair[0] + g[..., s - t :], pair[1] + g
        else:
            angle = part if angle is None else angle + part
    if angle is None:
        return maps, decay
    rotation = Rotation(rotation_table(angle, torch.promote_types(q.dtype, torch.float32)).to(q.device))
    rotations = rotation if t == s else rotation.last(t), rotation  # a compiler treats the length of a slice as a constant
    pairs = zip(maps, rotations, strict=True)
    rho_q, rho_k = (rotated if isinstance(rho, Identity) else Composed(rho, rotated) for rho, rotated in pairs)
    return (rho_q, rho_k), decay
