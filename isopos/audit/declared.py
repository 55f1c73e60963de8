"""Frequencies that a configuration declares, by the formulas of isopos in float64, and guesses at what went wrong."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isopos.encodings import rope_frequencies
from isopos.lengths import Dynamic, Extension, Linear, Llama3, LongRope, Yarn

KNOWN = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope")
EQUAL = 64 * torch.finfo(torch.float32).eps


def rule(parameters: Mapping[str, Any], trained: int | None, length: int = 0) -> Extension | None:
    """The rule for long sequences that rotary parameters declare, for calls of this length; None without one.

    Args:
        parameters: In transformers' names.
        trained: ``max_position_embeddings``.
        length: Positions of the call; dynamic and longrope go by it.

    Raises:
        ValueError: For an unknown type, or parameters that cannot be.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in KNOWN:
        raise ValueError(f"rope_type: expected one of {', '.join(KNOWN)}, got {kind!r}")
    try:
        return _rule(kind, parameters, trained, length)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        got = {KeyError: f"no {error}", ZeroDivisionError: "no number of trained positions"}.get(type(error), str(error))
        raise ValueError(f"rope_type: expected the parameters of {kind}, got {got}") from None


def _rule(kind: str, parameters: Mapping[str, Any], trained: int | None, length: int) -> Extension | None:
    original = parameters.get("original_max_position_embeddings") or trained or 0
    factor = parameters.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = (trained or original) / original
    if kind in ("default", "mrope") or not factor or (kind == "proportional" and factor == 1):
        return None
    if kind in ("linear", "proportional"):
        return Linear(factor)
    if kind == "dynamic":
        return Dynamic(max(1.0, length / (trained or length or 1)), trained, alpha=factor)
    if kind == "llama3":
        return Llama3(factor, original, fast=parameters["high_freq_factor"], slow=parameters["low_freq_factor"])
    actual = parameters.get("attention_factor")
    if kind == "longrope":
        rescale = parameters["long_factor" if length > original else "short_factor"]
        return LongRope(max(1.0, factor), original, rescale=rescale, sharpness=actual)
    scale, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if actual is None and scale and whole:
        actual = _mscale(factor, scale) / _mscale(factor, whole)
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    truncate = parameters.get("truncate", True)
    return Yarn(factor, original, fast=fast, slow=slow, truncate=truncate, sharpness=actual)


def declared_frequencies(parameters: Mapping[str, Any], features: int, trained: int | None, length: int = 0) -> Tensor:
    """Declared frequencies ``[f]`` of `features` rotating features in radians per step, float64.

    Examples:
        >>> declared_frequencies({"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}, 4, None).tolist()
        [0.5, 0.05]
    """
    base = float(parameters["rope_theta"])
    plain = rope_frequencies(features // 2, base)
    if parameters.get("rope_type") == "proportional":
        plain[int(parameters.get("partial_rotary_factor", 1.0) * features // 2) :] = 0
    extension = rule(parameters, trained, length)
    return plain if extension is None else extension(plain[None, None])[0, 0]


def declared_factor(parameters: Mapping[str, Any], trained: int | None) -> float:
    """The factor of cosines and sines that the declared type has."""
    extension = rule(parameters, trained)
    return 1.0 if extension is None else extension.attention_factor


def diagnosis(actual: Tensor, parameters: Mapping[str, Any], features: int, trained: int | None) -> str:
    """A description of frequencies ``[f]`` that differ from the declared ones."""
    actual, declared = actual.double().flatten(), declared_frequencies(parameters, features, trained)
    if len(actual) != len(declared):
        whole = rope_frequencies(len(actual), float(parameters["rope_theta"]))
        plain = " of the declared base" if same(actual, whole) else ""
        return f"{2 * len(actual)} features rotate{plain}, {features} are declared: the partial share or head size is wrong"
    if not bool(actual.isfinite().all()) or not bool(actual.any()):
        return "the table is not initialised"
    for dtype in (torch.float16, torch.bfloat16):
        if same(actual, declared.float().to(dtype).double()):
            return f"the declared frequencies, rounded to {str(dtype)[6:]}"
    if same(actual, declared, 1.1 * torch.finfo(torch.bfloat16).eps):
        worst = float(((actual - declared).abs() / declared.clamp_min(1e-30)).max())
        return f"the declared frequencies within {worst:.0e}, rounded on the way"
    plain = declared_frequencies({"rope_type": "default", "rope_theta": parameters["rope_theta"]}, features, trained)
    if same(actual, plain):
        return f"the scaling {parameters.get('rope_type')!r} is missing: these are the plain frequencies of its base"
    if base := series(actual):
        return f"frequencies of {base}"
    for factor in (2, 4, 8, 16, 32, 64):
        other = {**parameters, "factor": float(factor)}
        if "factor" in parameters and same(actual, declared_frequencies(other, features, trained)):
            return f"the declared type with factor {factor}"
    ratio = actual / declared.where(declared > 0, 1)
    return f"{float(ratio.min()):.4g} to {float(ratio.max()):.4g} times the declared frequencies"


def series(w: Tensor, digits: int = 6) -> str:
    """The base of frequencies ``[f]`` that are a geometric series, and what divides it; empty for others."""
    if len(w) < 2 or not bool((w > 0).all()):
        return ""
    base = float((w[0] / w[-1]) ** (len(w) / (len(w) - 1)))
    if not same(w / w[0], rope_frequencies(len(w), base), 1e-2):
        return ""
    return f"base {base:.{digits}g}" + ("" if abs(float(w[0]) - 1) < 1e-3 else f", divided by {float(1 / w[0]):.{digits}g}")


def same(actual: Tensor, other: Tensor, bound: float = EQUAL) -> bool:
    """Whether frequencies equal others up to relative rounding."""
    return actual.shape == other.shape and bool(((actual - other).abs() <= bound * other.abs()).all())


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1
