"""Longer sequences than in training: rules that change the frequencies of a rotary encoding.

A rule is a value: a function from frequencies to frequencies, with an attention factor. Rules depend on the frequencies
alone, so they apply to learned ones, several axes, and zeros: a pair of features rotates by |w| per step along a direction,
and only this speed changes.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from isopos.catalog import at_least, closest, expect

__all__ = [
    "EXTENSIONS",
    "Drop",
    "Dynamic",
    "Dype",
    "Extension",
    "Linear",
    "Llama3",
    "LongRope",
    "Yarn",
    "extension",
    "search",
]


@dataclass(frozen=True)
class Extension(ABC):
    """A rule for sequences `factor` times as long as the `trained` positions.

    Args:
        factor: s, at least 1; with 1 most rules change nothing ("drop" and "longrope" may).
        trained: L, number of positions in training, on each axis; linear and dynamic do not need it.
    """

    factor: float
    trained: int | None = None

    by_length: ClassVar[bool] = False  # whether it requires `trained`
    by_series: ClassVar[bool] = False  # whether a new frequency depends on the others of its head
    whole_logits = False  # whether the attention factor also applies to features that do not rotate

    def __post_init__(self) -> None:
        for field in fields(self):
            value, number = getattr(self, field.name), field.type in (float, float | None)
            if field.type is bool and not isinstance(value, bool):
                raise TypeError(f"{field.name}: expected True or False, got {value!r}")
            if number and (value is not None or field.type is float):
                if isinstance(value, bool) or not isinstance(value, Real):
                    raise TypeError(f"{field.name}: expected a number, got {value!r}")
                object.__setattr__(self, field.name, float(value))  # equal rules have equal reprs, with JSON types
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor: expected a ratio of sequence lengths of at least 1, got {self.factor}")
        if self.trained is not None:
            object.__setattr__(self, "trained", at_least("trained", self.trained, 2))
        elif self.by_length:
            raise ValueError(f"trained: expected the number of positions in training, which {self.name} needs, got none")
        sharpness = getattr(self, "sharpness", None)
        if sharpness is not None and not 0 < sharpness < math.inf:
            raise ValueError(f"sharpness: expected a positive attention factor, got {sharpness}")

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
        """Factors for speeds ``[h 1 f]`` in radians per step."""

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
        _, rank, last = _series(speed)
        return (self.alpha * self.factor - (self.alpha - 1)) ** -(rank / last.clamp_min(1))


@dataclass(frozen=True)
class _ByParts(Extension, ABC):
    """Interpolation by parts: fast pairs keep their speed, slow pairs are s times slower, others are between."""

    by_length = True

    fast: float = 32.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.slow < self.fast < math.inf:
            raise ValueError(f"fast: expected more turns than slow, and both positive, got {self.fast} and {self.slow}")

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

    truncate: bool = True
    sharpness: float | None = None
    whole_logits: bool = False

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.sharpness is None else self.sharpness

    def kept(self, speed: Tensor) -> Tensor:
        step, rank, last = _series(speed)
        turns = self.turns(speed.amax(-1, keepdim=True))
        low, high = ((turns / bound).log() / step for bound in (self.fast, self.slow))  # indices of pairs
        if self.truncate:
            low, high = low.floor(), high.ceil()
        low, high = low.clamp_min(0), high.minimum(2 * last + 1)
        return (1 - ((rank - low) / (high - low).clamp_min(1e-3)).clamp(0, 1)) * (rank < high)


@dataclass(frozen=True)
class Llama3(_ByParts):
    """Llama 3.1's rule: by parts, linear in the turns of a pair (Dubey et al. 2024, arXiv 2407.21783; its released code).

    Args:
        factor, trained: As of `Extension`.
        fast: Turns over the trained positions from which on a pair keeps its speed; `high_freq_factor`.
        slow: Turns below which a pair is interpolated; `low_freq_factor`.
    """

    fast: float = 4.0

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
        try:
            object.__setattr__(self, "rescale", tuple(map(float, self.rescale)))
        except (TypeError, ValueError):
            raise TypeError(f"rescale: expected a sequence of numbers, got {self.rescale!r}") from None
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


@dataclass(frozen=True)
class Dype(Extension):
    """DyPE: scaling that fades over the steps of denoising, from full scaling at pure noise to none.

    Extend the scheme again before each step of a diffusion transformer, with the step's time. Factors of frequencies are
    those of one axis of `trained` patches at any number of axes, for pairs with equal speeds.

    Args:
        time: From 1, pure noise, to 0, the image.
        method: "ntk": a base larger by s^(2 time^2 d / (d - 2)), as dynamic for the factor s^(2 time^2). "yarn": between
            interpolation, that larger base for s, and the trained frequencies, pairs are divided by their turns over the
            trained positions, at bounds that shrink with time^2, so that at last all are trained; logits are sharper at all
            times. This is the released code's YaRN, which is not `Yarn`.
        power: Exponent of time, the paper's lambda_t.

    References:
        DyPE: Dynamic Position Extrapolation for Ultra High Resolution Diffusion (Issachar et al. 2025), its released code.
        https://arxiv.org/abs/2510.20766

    Examples:
        >>> speed = torch.tensor([[[1.0, 0.5]]], dtype=torch.float64)
        >>> [Dype(4.0, time=t)(speed).round(decimals=6).flatten().tolist() for t in (1.0, 0.5, 0.0)]
        [[1.0, 0.03125], [1.0, 0.25], [1.0, 0.5]]
    """

    by_series = True

    time: float = 1.0
    method: Literal["ntk", "yarn"] = "ntk"
    power: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect("method", self.method, get_args(Literal["ntk", "yarn"]))
        if not 0 <= self.time <= 1:
            raise ValueError(f"time: expected a number from 1, pure noise, to 0, the image, got {self.time}")
        if not 0 < self.power < math.inf:
            raise ValueError(f"power: expected a positive exponent of time, got {self.power}")
        if self.method == "yarn" and self.trained is None:
            raise ValueError("trained: expected the number of positions in training, which yarn needs, got none")

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.method == "yarn" else 1.0

    def share(self, speed: Tensor) -> Tensor:
        step, rank, last = _series(speed)
        weight, slower = max(self.time**self.power, 1e-30), rank / last.clamp_min(1)
        if self.method == "ntk":
            return self.factor ** -(2 * weight * slower)
        share = torch.full_like(speed, 1 / self.factor)
        turns = speed.amax(-1, keepdim=True) * (self.trained or 0) / (2 * math.pi)
        for fast, slow, target in ((1.25, 0.75, self.factor**-slower), (16.0, 2.0, torch.ones_like(speed))):
            low, high = ((turns / (bound * weight)).log() / step for bound in (fast, slow))  # indices of pairs
            low, high = low.floor().clamp_min(0), high.ceil().minimum(last + 1)
            kept = (1 - ((rank - low) / (high - low).clamp_min(1e-3)).clamp(0, 1)) * (rank < high)
            share = share * (1 - kept) + target * kept
        return share


@dataclass(frozen=True)
class Drop(Extension):
    """DroPE: no rotation at all, after training with it and a short training without it at the trained length.

    Attention has to be causal, which is what then tells the order of tokens. Until it has been trained again without
    rotation, a model is worse at every length.

    Args:
        sharpness: The attention factor for the longer sequences; 1 by default.
        whole_logits: As for YaRN.

    References:
        Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings (Gelberg et al. 2025).
        https://arxiv.org/abs/2512.12167
    """

    sharpness: float | None = None
    whole_logits: bool = False

    @property
    def attention_factor(self) -> float:
        return 1.0 if self.sharpness is None else self.sharpness

    def share(self, speed: Tensor) -> Tensor:
        return torch.zeros_like(speed)


EXTENSIONS: dict[str, type[Extension]] = {
    "linear": Linear,
    "dynamic": Dynamic,
    "yarn": Yarn,
    "longrope": LongRope,
    "llama3": Llama3,
    "dype": Dype,
    "drop": Drop,
}


def search(
    score: Callable[[LongRope], float],
    frequency: Tensor,
    *,
    factor: float,
    trained: int,
    most: float = 2.0,
    population: int = 16,
    rounds: int = 10,
    seed: int = 0,
    **options: Any,
) -> LongRope:
    """Evolutionary search for the rule with the lowest score, by which LongRoPE2 finds its factors.

    A rule has a critical pair and, from it on, factors that do not decrease, from s to `most` times s. Pairs before it have
    the factors of a larger base, lambda_i = lambda_c^(i / c), which reach the critical pair's at i = c. The critical pair is
    at or before the first one without a whole turn over the trained positions, since slow pairs have seen too little of
    their turns. The search starts from s at each critical pair. In each round, changes of factors or of the critical pair,
    and mixtures of two rules with the same one, replace the worse half.

    LongRoPE2's score is perplexity of the answer's tokens alone in texts of the new length with a needle, an answer far
    before its question: ``score`` extends the scheme by ``scheme.extend(**rule.arguments)`` and measures this. The same
    seed and scores give the same result.

    Args:
        score: Called once for each rule; lower is better. A result that is not finite is worse than all others.
        frequency: Frequencies of the pairs ``[f]``, in radians per step, fastest first.
        factor: s.
        trained: L.
        most: Largest factor, as a multiple of s, from 1 on.
        population: Rules that are kept, at least 2.
        rounds: Number of rounds; each scores at most `population` new rules.
        seed: Of the evolution.
        options: Other options of `LongRope`.

    Raises:
        ValueError: For an invalid value, and if no score is finite.

    References:
        LongRoPE2: Near-Lossless LLM Context Window Scaling (Shang et al. 2025), whose search code is not
        released; steps of the evolution are as in LongRoPE's. https://arxiv.org/abs/2502.20082

    Examples:
        >>> rule = search(lambda rule: abs(rule.rescale[-1] - 5.0), torch.tensor([1.0, 0.1, 0.01]), factor=4, trained=64)
        >>> abs(rule.rescale[-1] - 5) < 0.3, rule.name
        (True, 'longrope')
    """
    if frequency.ndim != 1 or len(frequency) < 2 or not (frequency.diff() <= 0).all() or not (frequency > 0).all():
        raise ValueError(f"frequency: expected at least 2 positive ones [f], fastest first, got {list(frequency.shape)}")
    at_least("population", population, 2)
    at_least("rounds", rounds, 0)
    start = LongRope(factor, trained, rescale=[1.0], **options)  # which checks them
    if not 1 <= most < math.inf:
        raise ValueError(f"most: expected a multiple of the factor, from 1 on, got {most}")
    whole = int((frequency * trained >= 2 * math.pi).sum())
    critical = range(1, max(1, min(whole, len(frequency) - 1)) + 1)
    draw, scores = random.Random(seed), dict[tuple[float, ...], float]()

    def scored(gene: _Gene) -> float:
        rescale = gene.rescale
        if rescale not in scores:
            loss = float(score(LongRope(factor, trained, rescale=rescale, **options)))
            scores[rescale] = loss if math.isfinite(loss) else math.inf
        return scores[rescale]

    kept = sorted((_Gene(c, (start.factor,) * (len(frequency) - c)) for c in critical), key=scored)
    for _ in range(rounds):
        kept = kept[: max(1, (population + 1) // 2)]
        new = [draw.choice(kept).changed(draw, critical, factor, most) for _ in range(population - len(kept))]
        mates = [[b for b in kept if b.critical == a.critical] for a in kept]
        new += [a.mixed(draw.choice(partners), draw) for a, partners in zip(kept, mates, strict=True) if len(partners) > 1]
        kept = sorted({*kept, *new}, key=lambda gene: (scored(gene), gene))
    if scored(kept[0]) == math.inf:
        raise ValueError("score: expected finite numbers, got none for all rules")
    return LongRope(factor, trained, rescale=kept[0].rescale, **options)


class _Gene(NamedTuple):
    """A critical pair, and the factors from it on."""

    critical: int
    slow: tuple[float, ...]

    @property
    def rescale(self) -> tuple[float, ...]:
        """The factors of all pairs."""
        return (*(self.slow[0] ** (i / self.critical) for i in range(self.critical)), *self.slow)

    def changed(self, draw: random.Random, critical: Sequence[int], factor: float, most: float) -> "_Gene":
        """Some factors drawn again between their neighbours, or another critical pair."""
        start, slow = self.critical, list(self.slow)
        if draw.random() < 0.3:
            start = min(max(start + draw.choice((-1, 1)), critical[0]), critical[-1])
            slow = slow[start - self.critical :] if start > self.critical else slow[:1] * (self.critical - start) + slow
        for i in range(len(slow)):
            if draw.random() < 0.3:
                low = slow[i - 1] if i else factor
                slow[i] = draw.uniform(low, slow[i + 1] if i + 1 < len(slow) else most * factor)
        return _Gene(start, tuple(slow))

    def mixed(self, other: "_Gene", draw: random.Random) -> "_Gene":
        """Factors of either parent, in order."""
        return _Gene(self.critical, tuple(sorted(draw.choice(pair) for pair in zip(self.slow, other.slow, strict=True))))


def extension(name: str, factor: float | None, trained: int | None = None, **options: Any) -> Extension:
    """The rule with a name in `EXTENSIONS`.

    Raises:
        ValueError: For an unknown name, or an invalid value.
        TypeError: For an option that the rule does not have, or a value of another type.

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
    make: Any = EXTENSIONS[name]
    return make(factor, trained, **options)  # which checks their values


def _series(speed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Speeds ``[h 1 f]`` as a geometric series: the log of its ratio, the index of each speed, and that of the slowest.

    Equal speeds, as of several axes, have one index. If the speeds are no geometric series, an index is a position on a
    logarithmic scale. Pairs with zero speed have the index of the slowest other pair.
    """
    ordered = speed.sort(-1, descending=True).values
    fastest, slowest = ordered[..., :1], speed.where(speed > 0, torch.inf).amin(-1, keepdim=True)
    slower = ordered[..., 1:] < ordered[..., :-1] * (1 - 1e-6)  # learned ones are float32
    last = (slower & (ordered[..., 1:] > 0)).sum(-1, keepdim=True)
    step = (fastest / slowest).log() / last.clamp_min(1)
    step = step.where((step > 0) & step.isfinite(), 1.0)
    return step, ((fastest / speed.maximum(slowest)).log() / step).clamp_min(0), last
