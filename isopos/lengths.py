"""Longer sequences than in training: rules that change the frequencies of a rotary encoding.

A rule is a value: a function from frequencies to frequencies, with an attention factor. Rules depend on the frequencies
alone, so they apply to learned ones, several axes, and zeros: a pair of features rotates by |w| per step along a direction,
and only this speed changes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from isopos.catalog import at_least, closest, expect

__all__ = ["EXTENSIONS", "Dynamic", "Extension", "Linear", "Llama3", "LongRope", "Yarn", "extension"]


@dataclass(frozen=True)
class Extension(ABC):
    """A rule for sequences `factor` times as long as the `trained` positions.

    Args:
        factor: s, at least 1; 1 changes nothing.
        trained: L, number of positions in training, on each axis; linear and dynamic do not need it.
    """

    factor: float
    trained: int | None = None

    by_length: ClassVar[bool] = False  # whether it requires `trained`
    by_series: ClassVar[bool] = False  # whether a new frequency depends on the others of its head
    whole_logits = False  # whether the attention factor also applies to features that do not rotate

    def __post_init__(self) -> None:
        for field in fields(self):  # equal rules have equal reprs, with JSON types
            if field.name != "trained" and type(value := getattr(self, field.name)) is not bool and isinstance(value, Real):
                object.__setattr__(self, field.name, float(value))
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor: expected a ratio of sequence lengths of at least 1, got {self.factor}")
        if self.trained is not None:
            object.__setattr__(self, "trained", at_least("trained", self.trained, 2))
        elif self.by_length:
            raise ValueError(f"trained: expected the number of positions in training, which {self.name} needs, got none")

    @property
    def name(self) -> str:
        """Its key in `EXTENSIONS`."""
        return type(self).__name__.lower()

    @property
    def arguments(self) -> dict[str, Any]:
        """Name and values in JSON types, as keywords for `extension` and `Scheme.extend`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name} | {key: list(a) if isinstance(a, tuple) else a for key, a in values.items()}

    def __call__(self, frequency: Tensor) -> Tensor:
        """New frequencies for ``[h c f]`` in radians per step: float64. Shares are constants for gradients."""
        with torch.no_grad():
            speed = torch.linalg.vector_norm(frequency, dim=-2, keepdim=True)
            share = self.share(speed)
        return frequency * share

    @abstractmethod
    def share(self, speed: Tensor) -> Tensor:
        """Factors between 1 / s and 1 for speeds ``[h 1 f]`` in radians per step."""

    @property
    def attention_factor(self) -> float:
        """Factor of rotated features of queries and of keys in softmax attention; logits have its square."""
        return 1.0

    def check(self, count: int) -> None:
        """Raise ValueError if the rule does not fit `count` pairs of features."""
        return


@dataclass(frozen=True)
class Linear(Extension):
    """Position interpolation: every pair rotates s times slower (Chen et al. 2023, arXiv 2306.15595)."""

    def share(self, speed: Tensor) -> Tensor:
        return torch.full_like(speed, 1 / self.factor)


@dataclass(frozen=True)
class Dynamic(Extension):
    """NTK-aware scaling: a larger base. The fastest pair keeps its speed; the slowest is alpha s - (alpha - 1) times slower.

    Frequencies are those for one length, s times the trained one, whatever the length of the input, so that cached keys stay
    valid. Other implementations recompute them for each longer call and keep the earlier keys. The `factor` of transformers
    is alpha here, and its sequence length is s times ``max_position_embeddings``.

    Args:
        alpha: At least 1; with 1 the slowest pair is s times slower.

    References:
        YaRN (Peng et al. 2023), sections 3.1 and 3.3, of bloc97 and emozilla. https://arxiv.org/abs/2309.00071
    """

    by_series = True

    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.alpha < math.inf:
            raise ValueError(f"alpha: expected a number from 1 on, got {self.alpha}")

    def share(self, speed: Tensor) -> Tensor:
        _, rank, count = _series(speed)
        return (self.alpha * self.factor - (self.alpha - 1)) ** -(rank / (count - 1).clamp_min(1))


@dataclass(frozen=True)
class _ByParts(Extension, ABC):
    """Interpolation by parts: fast pairs keep their speed, slow pairs are s times slower, others are between."""

    by_length = True

    def share(self, speed: Tensor) -> Tensor:
        kept = self.kept(speed)
        return kept + (1 - kept) / self.factor

    @abstractmethod
    def kept(self, speed: Tensor) -> Tensor:
        """1 for pairs that keep their speed, 0 for interpolated ones."""

    def turns(self, speed: Tensor) -> Tensor:
        """Number of turns over the trained positions."""
        return speed * (self.trained or 0) / (2 * math.pi)


@dataclass(frozen=True)
class Yarn(_ByParts):
    """YaRN: interpolation by parts, linear in the index of a pair as in its code, and sharper logits.

    Args:
        fast: Turns over the trained positions from which on a pair keeps its speed.
        slow: Turns below which a pair is interpolated.
        truncate: Round both bounds outward to integer indices of pairs, as the code does.
        sharpness: The attention factor; 0.1 ln s + 1 by default, the inverse square root of the paper's temperature.
        whole_logits: If only some features rotate, multiply whole logits, as the paper's temperature does. By default the
            factor applies to the rotated features, as in released checkpoints: their code multiplies cosines and sines.

    References:
        YaRN (Peng et al. 2023), sections 3.2 and 3.4. https://arxiv.org/abs/2309.00071
    """

    by_series = True

    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    sharpness: float | None = None
    whole_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_turns(self.fast, self.slow)
        _check_sharpness(self.sharpness)

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.sharpness is None else self.sharpness

    def kept(self, speed: Tensor) -> Tensor:
        step, rank, count = _series(speed)
        turns = self.turns(speed.amax(-1, keepdim=True))
        low, high = ((turns / bound).log() / step for bound in (self.fast, self.slow))  # indices of pairs
        if self.truncate:
            low, high = low.floor(), high.ceil()
        low, high = low.clamp_min(0), high.minimum(2 * count - 1)
        return 1 - ((rank - low) / (high - low).clamp_min(1e-3)).clamp(0, 1)


@dataclass(frozen=True)
class Llama3(_ByParts):
    """Llama 3.1's rule: by parts, linear in the turns of a pair (Dubey et al. 2024, arXiv 2407.21783; its released code).

    Args:
        fast: Turns over the trained positions from which on a pair keeps its speed; `high_freq_factor`.
        slow: Turns below which a pair is interpolated; `low_freq_factor`.
    """

    fast: float = 4.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_turns(self.fast, self.slow)

    def kept(self, speed: Tensor) -> Tensor:
        return ((self.turns(speed) - self.slow) / (self.fast - self.slow)).clamp(0, 1)


@dataclass(frozen=True)
class LongRope(Extension):
    """LongRoPE: each pair is slower by a separate factor, found by a search (Ding et al. 2024, arXiv 2402.13753).

    Args:
        rescale: Factors of the pairs, in order, for this length: `long_factor` of a checkpoint beyond its trained length,
            `short_factor` up to it.
        sharpness: The attention factor; (1 + ln s / ln L)^(1/2) by default.
        whole_logits: As for YaRN.
    """

    by_length = True

    rescale: Sequence[float] = ()
    sharpness: float | None = None
    whole_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sharpness(self.sharpness)
        object.__setattr__(self, "rescale", tuple(map(float, self.rescale)))
        if not self.rescale or not all(0 < factor < math.inf for factor in self.rescale):
            raise ValueError(f"rescale: expected a positive factor for each pair of features, got {list(self.rescale)}")

    @property
    def attention_factor(self) -> float:
        assert self.trained is not None
        return (1 + math.log(self.factor) / math.log(self.trained)) ** 0.5 if self.sharpness is None else self.sharpness

    def check(self, count: int) -> None:
        if len(self.rescale) != count:
            raise ValueError(f"rescale: expected a factor for each of {count} pairs of features, got {len(self.rescale)}")

    def share(self, speed: Tensor) -> Tensor:
        return 1 / torch.tensor(self.rescale, dtype=speed.dtype, device=speed.device).expand_as(speed)


EXTENSIONS: dict[str, type[Extension]] = {
    "linear": Linear,
    "dynamic": Dynamic,
    "yarn": Yarn,
    "longrope": LongRope,
    "llama3": Llama3,
}


def extension(name: str, factor: float, trained: int | None = None, **options: Any) -> Extension:
    """The rule with a name in `EXTENSIONS`.

    Raises:
        ValueError: For an unknown name, or an invalid value.
        TypeError: For an option that the rule does not have.

    Examples:
        >>> extension("yarn", 4.0, 2048, fast=16.0).attention_factor
        1.138629436111989
        >>> extension("linear", 2.0)(torch.ones(1, 1, 2)).tolist()
        [[[0.5, 0.5]]]
    """
    expect("extend", name, EXTENSIONS)
    names = [field.name for field in fields(EXTENSIONS[name])]
    if unknown := [option for option in options if option not in names]:
        raise TypeError(f"{name}: unknown option {unknown[0]!r}: {closest(unknown[0], names)}")
    return EXTENSIONS[name](factor, trained, **options)


def _series(speed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Speeds ``[h 1 f]`` as a geometric series: the log of its ratio, the index of each speed, and the number of speeds.

    For a geometric series an index is the number of the pair; otherwise it is a position on a logarithmic scale. Pairs with
    zero speed have the index of the slowest other pair.
    """
    slowest = speed.where(speed > 0, torch.inf).amin(-1, keepdim=True)
    count = (speed > 0).sum(-1, keepdim=True)
    fastest = speed.amax(-1, keepdim=True)
    step = (fastest / slowest).log() / (count - 1).clamp_min(1)
    step = step.where((step > 0) & step.isfinite(), 1.0)
    return step, ((fastest / speed.maximum(slowest)).log() / step).clamp_min(0), count


def _check_turns(fast: float, slow: float) -> None:
    if not 0 < slow < fast < math.inf:
        raise ValueError(f"fast: expected more turns than slow, and both positive, got {fast} and {slow}")


def _check_sharpness(sharpness: float | None) -> None:
    if sharpness is not None and not 0 < sharpness < math.inf:
        raise ValueError(f"sharpness: expected a positive attention factor, got {sharpness}")
