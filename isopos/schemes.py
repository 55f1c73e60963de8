"""Schemes: named choices of encoding, decay, feature map and denominator, one function each, in `REGISTRY`.

Every function takes ``(head_dim, heads, **options)``. Besides its own options each takes those of `Choices`, so that the
encoding, the decay, the denominator, the feature map and the kind of attention stay independent of one another.
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from isopos import bases, encodings
from isopos.catalog import CATALOG
from isopos.decays import RATES, Decay
from isopos.embeddings import Learned, Sinusoidal
from isopos.encodings import Encoding, rope_frequencies
from isopos.feature_maps import FEATURE_MAPS
from isopos.positions import Ring

__all__ = ["REGISTRY", "Choices", "Scheme", "build"]

Basis = Literal["identity", "householder", "odd-even", "fourier"]


class Choices(TypedDict, total=False):
    """Options of every scheme."""

    attention: Literal["linear", "softmax"]
    feature_map: Literal["elu+1", "relu", "identity"]
    decay: Literal["none", "retnet", "permuteformer", "alibi"]
    denominator: Literal["plain", "encoded", "none"]


class Scheme(nn.Module):
    """The choices that make attention see positions, ready for `linear_attention` or `softmax_attention`.

    Args:
        encoding: rho, for `heads` heads.
        heads: Number of key heads.
        attention: "linear" or "softmax".
        feature_map: phi of linear attention: a name of `FEATURE_MAPS`; "auto" is "elu+1".
        decay: A name of `decays.RATES`, a `Decay`, or "none".
        denominator: Of linear attention: "plain" (also "auto"), "encoded" or "none" (then `Attention` normalises each
            head's output).
        embedding: Absolute positions to add to the token embeddings, or None.

    Example:
        >>> import isopos
        >>> scheme = isopos.rope(64, 8, decay="retnet")
        >>> q, k, v = torch.randn(3, 1, 8, 10, 64)
        >>> isopos.linear_attention(q, k, v, **scheme.at(isopos.sequence(10)), causal=True).shape
        torch.Size([1, 8, 10, 64])
    """

    def __init__(
        self,
        encoding: Encoding,
        heads: int,
        *,
        attention: str = "linear",
        feature_map: str = "auto",
        decay: str | Decay = "none",
        denominator: str = "auto",
        embedding: Sinusoidal | Learned | None = None,
    ):
        super().__init__()
        _expect("attention", attention, ("linear", "softmax"))
        if attention == "softmax":
            for name, choice in (("feature_map", feature_map), ("denominator", denominator)):
                if choice != "auto":
                    raise ValueError(f"{name}: expected no choice with softmax attention, which has its own, got {choice!r}")
        feature_map = "elu+1" if feature_map == "auto" else feature_map
        denominator = "plain" if denominator == "auto" else denominator
        _expect("feature_map", feature_map, FEATURE_MAPS)
        _expect("denominator", denominator, ("plain", "encoded", "none"))
        if not isinstance(decay, Decay):
            _expect("decay", decay, ("none", *RATES))
        self.encoding, self.heads, self.attention, self.embedding = encoding, heads, attention, embedding
        self.decay = decay if isinstance(decay, Decay) else Decay(RATES[decay](heads)) if decay != "none" else None
        if self.decay is not None and len(self.decay.initial) not in (1, heads):
            raise ValueError(f"decay: expected rates of {heads} heads, got {len(self.decay.initial)}")
        linear = attention == "linear"
        self.choices = {
            "attention": attention,
            "decay": decay if isinstance(decay, str) else "own",
            "denominator": denominator if linear else "softmax",
            "feature_map": feature_map if linear else "softmax",
        }

    @property
    def max_length(self) -> int | None:
        """Positions it can tell apart from 0 on, where that is limited by a table."""
        return None if self.embedding is None else self.embedding.max_length

    @property
    def normalised(self) -> bool:
        """Whether a norm of each head's output takes the place of the denominator."""
        return self.choices["denominator"] == "none"

    def at(self, x: Tensor, x_key: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Keyword arguments of the attention function, at positions x ``[*b t c]`` of queries and of keys if they differ."""
        pair = lambda f: f(x) if x_key is None else (f(x), f(x_key))  # noqa: E731
        arguments: dict[str, Any] = {
            "isometry": pair(lambda at: self.encoding(at, dtype)),
            "decay": None if self.decay is None else pair(self.decay),
        }
        if self.attention == "softmax":
            return arguments
        denominator = self.choices["denominator"]
        return arguments | {
            "feature_map": FEATURE_MAPS[self.choices["feature_map"]],
            "denominator": None if denominator == "none" else denominator,
        }


def _scheme(encoding: Encoding, heads: int, choices: Choices, *, embedding: Any = None, **defaults: str) -> Scheme:
    """A scheme with a preset's defaults, where they have a meaning and the user has not chosen."""
    if choices.get("attention") == "softmax":
        defaults = {name: value for name, value in defaults.items() if name == "decay"}
    return Scheme(encoding, heads, embedding=embedding, **(defaults | dict(choices)))  # pyright: ignore[reportArgumentType]


def none(head_dim: int, heads: int = 1, **choices: Unpack[Choices]) -> Scheme:
    """No position at all: with `causal`, order is seen only through what a query may not see."""
    return _scheme(encodings.Identity(_size(head_dim, heads)), heads, choices)


def sinusoidal(
    head_dim: int, heads: int, *, model_dim: int | None = None, scale: float = 1.0, **choices: Unpack[Choices]
) -> Scheme:
    """Sines and cosines added to the token embeddings (Vaswani et al. 2017, section 3.5).

    Args:
        head_dim: d.
        heads: h.
        model_dim: Width of the token embeddings; head_dim * heads by default.
        scale: Amplitude; 1 beside token embeddings of unit variance, as in the paper, and less beside smaller ones.
        choices: See `Choices`.
    """
    embedding = Sinusoidal(_size(head_dim, heads) * heads if model_dim is None else model_dim, scale=scale)
    return _scheme(encodings.Identity(head_dim), heads, choices, embedding=embedding)


def learned(
    head_dim: int,
    heads: int,
    *,
    length: int = 2048,
    model_dim: int | None = None,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """One learned vector a position, added to the token embeddings (Gehring et al. 2017).

    Args:
        head_dim: d.
        heads: h.
        length: Number of positions; others raise an error.
        model_dim: Width of the token embeddings; head_dim * heads by default.
        seed: Of the initial vectors.
        choices: See `Choices`.
    """
    embedding = Learned(length, _size(head_dim, heads) * heads if model_dim is None else model_dim, seed=seed)
    return _scheme(encodings.Identity(head_dim), heads, choices, embedding=embedding)


def rope(
    head_dim: int,
    heads: int = 1,
    *,
    base: float = 10000.0,
    learned: bool = False,
    rotary_dim: int | None = None,
    **choices: Unpack[Choices],
) -> Scheme:
    """Rotary position embedding: pairs of features turn by base^(-2i/d) a step (RoFormer, Eq. 14-16; linear: Eq. 19).

    Args:
        head_dim: d, even.
        heads: h; 1 serves any number of heads alike, with one decay and one set of learned frequencies.
        base: Of the geometric frequencies.
        learned: Learn the frequencies, each head its own.
        rotary_dim: Features that turn, even; the others pass unchanged (partial rotary). All by default.
        choices: See `Choices`.
    """
    width = _size(head_dim, heads) if rotary_dim is None else rotary_dim
    rotary = _rotary(width, heads, base, learned)
    return _scheme(rotary if width == head_dim else encodings.Partial(rotary, head_dim), heads, choices)


def retnet(
    head_dim: int, heads: int, *, original: bool = False, base: float = 10000.0, **choices: Unpack[Choices]
) -> Scheme:
    """Rotary with per-head decay gamma = 1 - 2^(-5-h) (RetNet, Sun et al. 2023, Eq. 5 and 8).

    By default on the feature map and denominator of its neighbours, so that only the decay differs from rope.
    TransNormerLLM's LRPE-d is of this family.

    Args:
        head_dim: d, even.
        heads: h.
        original: RetNet itself: identity feature map, no denominator, a norm of each head's output.
        base: Of the geometric frequencies.
        choices: See `Choices`.
    """
    defaults = {"feature_map": "identity", "denominator": "none"} if original else {}
    if original and choices.get("attention") == "softmax":
        raise ValueError("original: expected linear attention, for which RetNet is defined, got softmax")
    return _scheme(_rotary(_size(head_dim, heads), heads, base, False), heads, choices, decay="retnet", **defaults)


def lrpe_unitary(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    learned: bool = False,
    learned_basis: bool = False,
    base: float = 10000.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's unitary type on real vectors: d angles base^(-2t/d), the real part of the complex score (LRPE, Eq. 22).

    The score is a sum of cosines, score(i, j) = score(j, i): without `causal` a model cannot tell left from right.

    Args:
        head_dim: d.
        heads: h.
        basis: P.
        learned: Learn the angles, each head its own.
        learned_basis: Learn the normal of the Householder basis.
        base: Of the geometric angles.
        seed: Of the Householder normal.
        choices: See `Choices`.
    """
    angle = rope_frequencies(_size(head_dim, heads), base).square().expand(heads if learned else 1, 1, -1)
    encoding = encodings.Rotary(angle, learned=learned, lift=True)
    return _scheme(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def lrpe_orthogonal(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    learned: bool = False,
    learned_basis: bool = False,
    base: float = 10000.0,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's orthogonal type: d/2 rotations by base^(-2t/d) in the basis P (LRPE, Eq. 23). With P = I it is rope.

    Args:
        head_dim: d, even.
        heads: h.
        basis: P.
        learned: Learn the angles, each head its own.
        learned_basis: Learn the normal of the Householder basis.
        base: Of the geometric angles.
        seed: Of the Householder normal.
        choices: See `Choices`.
    """
    encoding = _rotary(_size(head_dim, heads), heads, base, learned)
    return _scheme(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def lrpe_permutation(
    head_dim: int,
    heads: int,
    *,
    basis: Basis = "householder",
    learned_basis: bool = False,
    seed: int = 0,
    **choices: Unpack[Choices],
) -> Scheme:
    """LRPE's permutation type: powers of a random permutation a head, in the basis P (LRPE, Eq. 24).

    Args:
        head_dim: d.
        heads: h.
        basis: P. With "identity" or "odd-even" scores of positive features stay positive, and so may "encoded" denominators.
        learned_basis: Learn the normal of the Householder basis.
        seed: Of permutations and the Householder normal.
        choices: See `Choices`.
    """
    encoding = _permutation(_size(head_dim, heads), heads, seed)
    return _scheme(_in_basis(encoding, basis, heads, learned_basis, seed), heads, choices)


def permuteformer(head_dim: int, heads: int, *, seed: int = 0, **choices: Unpack[Choices]) -> Scheme:
    """PermuteFormer: powers of a random permutation a head, ReLU features, decay r in [0.88, 0.99] (PermuteFormer, Eq. 11).

    The paper has r = 1 in bidirectional models: ``decay="none"``. Its fourfold width of query and key features is not here.

    Args:
        head_dim: d.
        heads: h.
        seed: Of the permutations; `scheme.encoding.orders` tells how many positions each head tells apart.
        choices: See `Choices`.
    """
    defaults = {"feature_map": "relu", "denominator": "encoded", "decay": "permuteformer"}
    return _scheme(_permutation(_size(head_dim, heads), heads, seed), heads, choices, **defaults)


def alibi(head_dim: int, heads: int, **choices: Unpack[Choices]) -> Scheme:
    """ALiBi: no encoding but a decay a head, logits minus slope times distance (Press et al. 2022, section 3).

    With ``attention="softmax"`` it is the paper's; linear attention multiplies its weights by exp(-slope * distance).

    Args:
        head_dim: d.
        heads: h.
        choices: See `Choices`.
    """
    return _scheme(encodings.Identity(_size(head_dim, heads)), heads, choices, decay="alibi")


def cosformer(head_dim: int, heads: int = 1, *, length: int = 2048, **choices: Unpack[Choices]) -> Scheme:
    """cosFormer: ReLU features, weights times cos(pi / 2 * offset / length) (Qin et al. 2022; LRPE, Eq. 35).

    One angle for all features, as LRPE's unitary type: direction-blind. Weights are positive for offsets below `length`;
    features here are max(x, 0) + 0.001.

    Args:
        head_dim: d.
        heads: h.
        length: M, the offset whose weight is zero: at least the longest sequence.
        choices: See `Choices`.
    """
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    angle = torch.full((1, 1, _size(head_dim, heads)), math.pi / 2 / length, device="cpu", dtype=torch.float64)
    defaults = {"feature_map": "relu", "denominator": "encoded"}
    return _scheme(encodings.Rotary(angle, lift=True), heads, choices, **defaults)


def ape_ring(head_dim: int, heads: int, *, period: int = 128, seed: int = 0, **choices: Unpack[Choices]) -> Scheme:
    """Algebraic encoding of a ring: rotations by multiples of 2 pi / period in a learned basis a head (APE, section 3.4.2).

    Positions are any integers; those that differ by the period are one. Frequencies are fixed, since others would not close
    the ring, and fall geometrically from half a turn a step to one turn a period.

    Args:
        head_dim: d, even.
        heads: h.
        period: n, at least 2.
        seed: Of the initial basis, near the identity.
        choices: See `Choices`.
    """
    if period < 2:
        raise ValueError(f"period: expected at least 2, got {period}")
    count = _even(_size(head_dim, heads)) // 2
    turns = (period / 2) ** torch.linspace(1, 0, count, device="cpu", dtype=torch.float64)
    frequency = 2 * math.pi / period * turns.floor()
    ring = encodings.Rotary(frequency[None, None], group=Ring(period))
    generator = torch.Generator().manual_seed(seed)
    near = 0.1 * torch.randn(heads, head_dim, head_dim, generator=generator, device="cpu") / head_dim**0.5
    return _scheme(encodings.InBasis(ring, bases.Orthogonal(near, learned=True)), heads, choices)


def ape_sequence(head_dim: int, heads: int, *, base: float = 10000.0, **choices: Unpack[Choices]) -> Scheme:
    """Algebraic encoding of sequences: exp(x (A - A^T)) with a learned A a head (APE, sections 3.1 and 4.2).

    It starts as rope with angles base^(-2i/d), in closed form, and learns both angles and basis.

    Args:
        head_dim: d, even.
        heads: h.
        base: Of the initial angles.
        choices: See `Choices`.
    """
    _even(_size(head_dim, heads))
    lower = torch.zeros(head_dim, device="cpu", dtype=torch.float64)
    lower[::2] = rope_frequencies(head_dim // 2, base)
    generator = torch.diag(lower[:-1], -1)  # A - A^T has blocks [[0, -w], [w, 0]]
    return _scheme(encodings.Exponential(generator.expand(heads, -1, -1)), heads, choices)


def _size(head_dim: int, heads: int) -> int:
    for name, value in (("head_dim", head_dim), ("heads", heads)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    return head_dim


def _even(width: int) -> int:
    if width % 2 or width < 2:
        raise ValueError(f"head size: expected an even number of features for a rotation of pairs, got {width}")
    return width


def _rotary(width: int, heads: int, base: float, learned: bool) -> Encoding:
    frequency = rope_frequencies(_even(width) // 2, base)
    return encodings.Rotary(frequency.expand(heads if learned else 1, 1, -1), learned=learned)


def _permutation(width: int, heads: int, seed: int) -> Encoding:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(width, generator=generator, device="cpu") for _ in range(heads)]
    return encodings.Permutation(torch.stack(rows))


def _in_basis(encoding: Encoding, basis: str, heads: int, learned: bool, seed: int) -> Encoding:
    _expect("basis", basis, typing.get_args(Basis))
    if learned and basis != "householder":
        raise ValueError(f"learned_basis: expected basis='householder', the only one with parameters, got {basis!r}")
    if basis == "identity":
        return encoding
    if basis == "householder":
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(heads, encoding.features, generator=generator, device="cpu")
        return encodings.InBasis(encoding, bases.Householder(normal, learned=learned))
    return encodings.InBasis(encoding, {"odd-even": bases.OddEven, "fourier": bases.Fourier}[basis](encoding.features))


REGISTRY: dict[str, Callable[..., Scheme]] = {name: globals()[name.replace("-", "_")] for name in CATALOG}


def build(name: str, head_dim: int, heads: int, options: Mapping[str, str] | None = None) -> Scheme:
    """A scheme from its name and options as text, as the command line has them.

    Raises:
        ValueError: For an unknown scheme, option or value, naming those that exist.

    Example:
        >>> build("rope", 64, 8, {"decay": "retnet", "base": "500000"}).choices["decay"]
        'retnet'
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown scheme {name!r}: {closest(name, REGISTRY)}")
    parameters = options_of(name)
    values = {}
    for option, text in (options or {}).items():
        if option not in parameters:
            raise ValueError(f"{name}: unknown option {option!r}: {closest(option, parameters)}")
        values[option] = _parse(f"{name}: {option}", text, parameters[option])
    return REGISTRY[name](head_dim, heads, **values)


def options_of(name: str) -> dict[str, Any]:
    """The options of a scheme and their types."""
    hints = typing.get_type_hints(REGISTRY[name])
    own = [p.name for p in inspect.signature(REGISTRY[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {option: hints[option] for option in own} | typing.get_type_hints(Choices)


def closest(name: str, names: Mapping[str, Any]) -> str:
    """The known names, or the nearest to a misspelt one."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"


def _parse(what: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        _expect(what, text, typing.get_args(kind))
        return text
    kinds = typing.get_args(kind) or (kind,)
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}
    for reader in (readers[k] for k in kinds if k in readers):
        try:
            return reader(text.lower())
        except (ValueError, KeyError):
            continue
    names = " or ".join("true or false" if k is bool else k.__name__ for k in kinds if k in readers)
    raise ValueError(f"{what}: expected {names}, got {text!r}")


def _expect(what: str, value: Any, names: Any) -> None:
    if value not in names:
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {value!r}")
