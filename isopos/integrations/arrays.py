"""Schemes as plain arrays for runtimes that are not PyTorch: NumPy, JAX and MLX; and the metadata keys of llama.cpp.

`arrays` evaluates a scheme at positions. `gguf_keys` returns the metadata of a GGUF file for a scheme that llama.cpp has.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isopos.bases import OddEven
from isopos.decays import alibi_rates
from isopos.deprecation import renamed_argument
from isopos.encodings import Coupling, Encoding, InBasis, Partial, Rotary
from isopos.exact import ExactModule, to_float64
from isopos.feature_maps import FeatureMap
from isopos.lengths import Linear, Yarn
from isopos.maps import TokenMap
from isopos.positions import Line
from isopos.scheme import Scheme
from isopos.terms import DistanceKernel, Numbers

__all__ = ["arrays", "explanation", "gguf_keys"]

HALVES = ("qwen2", "qwen3", "gptneox", "phi2", "phi3", "gemma", "stablelm", "falcon", "starcoder2")
"""Architectures of llama.cpp, among others, that rotate pairs (i, i + n)."""
FORMULAS = {
    "Identity": "x",
    "Rotation": "with (c, s) = table[..., i, :], (x[2i], x[2i+1]) -> (c x[2i] - s x[2i+1], s x[2i] + c x[2i+1]); "
    "lifted: (x * table[..., 0], x * table[..., 1]) side by side",
    "Gather": "x[..., index]",
    "Reflection": "x - 2 <x, normal> normal",
    "Matrix": "matrix @ x",
    "LinearMap": "matrix @ x",
    "Plane": "with (c, s) = table[..., 0, :], a = <x, u>, b = <x, v>: x + ((c - 1) a + s b) u + ((c - 1) b - s a) v",
    "OnPairs": "on, applied to the features 0, 2, 4, ... and to 1, 3, 5, ... separately",
    "BlockSum": "parts side by side, on slices of x with these widths",
    "Blocks": "parts side by side, on slices of x with these widths",
    "Chain": "second(first(x))",
    "Composed": "second(first(x))",
    "Operators": "matrix[..., t, :, :] @ x[..., t, :]",
    "Matrices": "matrix[..., t, :, :] @ x[..., t, :]",
    "Scaling": "x * factor",
    "Factor": "x * number",
    "Shear": "exp(steps N) x, where N moves each of `order` groups of features to the one before; transposed: after",
    "Tiles": "matrix[..., t, :, :] @ each n consecutive features of x[..., t, :]",
    "Adjoint": "the adjoint of `of`",
    "Affine": "matrix @ (x + shift)",
    "Append": "(first(x), channels), side by side",
    "Mapped": "phi(first(x))",
}
"""What each map of `isopos.maps` does to features x ``[*b h t d]``."""

UNUSED = 1e30  # llama.cpp's factor for pairs that do not rotate


def arrays(scheme: Scheme, x: Tensor) -> dict[str, np.ndarray]:
    """A scheme at positions x ``[t c]`` as arrays: maps of queries and keys, log decays, relative terms, and constants.

    The last array, `explanation`, is UTF-8 text as uint8, so that npz files need no strings; the function `explanation`
    decodes it. The text holds the tree of maps, the formula of each map, and the axes of each array. Tables are float32.
    Frequencies, rates and other constants are float64; frequencies of `Rotary` include an extension. Content-dependent
    phases are computed from keys: the text only names them, under "not here".

    Examples:
        >>> import isopos
        >>> values = arrays(isopos.rope(8, 2, attention="softmax"), isopos.sequence(5))
        >>> {name: array.shape for name, array in values.items() if name != "explanation"}
        {'positions': (5, 1), 'map.table': (1, 5, 4, 2), 'encoding.frequency': (1, 1, 4)}
        >>> explanation(values)["arrays"]["map.table"]
        'h t f 2'
    """
    scheme.group.check(x)
    if x.ndim != 2:
        raise ValueError(f"x: expected positions [t c] of one sample, got {list(x.shape)}")
    tensors, axes = {"positions": x}, {"positions": "t c"}
    with torch.no_grad():
        at = scheme.at(x)
        maps = at["isometry"] if isinstance(at["isometry"], tuple) else (at["isometry"],)
        names = ("query", "key") if len(maps) == 2 else ("map",)
        trees = {name: _described(part, name, tensors, axes) for name, part in zip(names, maps, strict=True)}
        _add_of_pairs(at, tensors, axes)
        if scheme.embedding is not None:
            tensors["embedding"], axes["embedding"] = scheme.embedding(x), "t m, added to the tokens"
        for name, value, what in _constants(scheme):
            tensors[name], axes[name] = value, what
    name, options = scheme.origin or (type(scheme).__name__, {})
    about = {
        "scheme": name,
        "options": {option: str(value) for option, value in options.items()},
        "positions": scheme.group.noun,
        "attention": scheme.choices,
        "scale": at.get("scale"),
        **trees,
        "arrays": axes,
    }
    if scheme.phases:
        about["not here"] = [f"{type(part).__name__}, computed from keys" for part in scheme.phases]
    if scheme.transport:
        about["transport"] = "the map of keys also maps values, and its inverse at the query's position the output"
    result = {name: np.ascontiguousarray(value.detach().cpu().numpy()) for name, value in tensors.items()}
    return result | {"explanation": np.frombuffer(json.dumps(about, indent=1).encode(), np.uint8)}


@renamed_argument("found", "arrays")
def explanation(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The decoded `explanation` of the arrays of a scheme, or of a loaded npz file."""
    return json.loads(bytes(arrays["explanation"]))


def _described(part: Any, name: str, out: dict[str, Tensor], axes: dict[str, str]) -> dict[str, Any]:
    """The tree of a map; adds its tensors to `out` and their axes to `axes`."""
    kind = type(part).__name__
    tree: dict[str, Any] = {"map": kind, "formula": FORMULAS.get(kind, (type(part).__doc__ or "").partition("\n")[0])}
    for item in fields(part):
        value, inner = getattr(part, item.name), f"{name}.{item.name}"
        if isinstance(value, Tensor):
            out[inner], axes[inner] = value, item.metadata["axes"].names.removeprefix("*b ")
            tree[item.name] = inner
        elif isinstance(value, TokenMap):
            tree[item.name] = _described(value, inner, out, axes)
        elif isinstance(value, tuple) and any(isinstance(one, TokenMap) for one in value):
            tree[item.name] = [_described(one, f"{name}.{n}", out, axes) for n, one in enumerate(value)]
        elif item.name == "phi":
            tree[item.name] = value.name if isinstance(value, FeatureMap) else type(value).__name__.lower()
        else:
            tree[item.name] = value
    return tree


def _add_of_pairs(at: Mapping[str, Any], out: dict[str, Tensor], axes: dict[str, str]) -> None:
    """Add the log decay, relative terms and locality of a scheme's arguments."""
    if at["decay"] is not None:
        out["decay"], axes["decay"] = at["decay"], "h t: weights of queries i and keys j have the factor exp(-|g_i - g_j|)"
    for n, term in enumerate(at.get("terms") or ()):
        name, rows = f"terms.{n}", "" if term.side == "none" else " d"
        if isinstance(term, Numbers | DistanceKernel):
            numbers = term.numbers() if isinstance(term, DistanceKernel) else term.table
            out[name], axes[name] = numbers, "h t s, added to logits"
            continue
        out[f"{name}.table"], axes[f"{name}.table"] = term.table, f"h n{rows}, of side {term.side}"
        out[f"{name}.index"], axes[f"{name}.index"] = term.index().int(), "t s: the row of each query and key"
    if "locality" in at:
        out["locality"], axes["locality"] = at["locality"], "t s: factors of logits"


def _constants(scheme: Scheme) -> list[tuple[str, Tensor, str]]:
    """Name, value and axes of each parameter of a scheme, frequencies included: float64."""
    constants = []
    for path, module in scheme.named_modules():
        if isinstance(module, ExactModule) and module.parameter_name:
            value, what = to_float64(module.parameter), f"of {type(module).__name__}"
            if isinstance(module, Rotary):
                value, what = module.extended(value), "h c f: radians per step"
            constants.append((f"{path}.{module.parameter_name}", value, what))
    if scheme.favor is not None:
        constants.append(("favor.projection", scheme.favor.projection, "m d: directions of the random features"))
    return constants


def gguf_keys(scheme: Scheme, architecture: str = "llama") -> dict[str, Any]:
    """Metadata of a GGUF file of llama.cpp for a scheme: keys, and tensors that change frequencies.

    Linear and dynamic scaling, YaRN with its usual rounding, and ALiBi have keys. Any other frequencies are written as
    a base and the tensor ``rope_freqs.weight``, by which llama.cpp divides them, as for Llama 3.1. The architecture
    ``llama`` loads this tensor; others of llama.cpp may not, and then refuse the file.

    Args:
        scheme: A scheme with softmax attention: ALiBi, or a rotation on a line of all or the first features, the same in
            all heads.
        architecture: Name in ``general.architecture``, the first word of each key. It also decides which features llama.cpp
            pairs: (2i, 2i+1) for llama, (i, i + n) for qwen2, phi3 and most others. `pairs` of the result is the pairing
            that the scheme needs.

    Returns:
        A dict of `architecture`, `pairs`, `keys` (values as int, float or str) and `tensors` (lists of float32 numbers).

    Raises:
        ValueError: For a scheme that llama.cpp, or the architecture ``llama``, cannot express, with the reason.

    Source: llama.cpp, ``ggml_rope_ext`` and the keys of gguf-py's constants.py.

    Examples:
        >>> import isopos
        >>> gguf_keys(isopos.rope(128, attention="softmax", base=5e5))["keys"]
        {'llama.rope.dimension_count': 128, 'llama.rope.freq_base': 500000.0}
        >>> gguf_keys(isopos.rope_axial(64, 1, attention="softmax"))
        Traceback (most recent call last):
        ValueError: scheme: expected one that llama.cpp has, rotation of pairs on a line or ALiBi with softmax ...
    """
    if not architecture.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"architecture: expected a name such as llama or qwen2, got {architecture!r}")
    plain = {"architecture": architecture, "pairs": "none", "tensors": {}}
    if _is_alibi(scheme):
        if architecture == "llama":
            raise ValueError(
                "architecture: expected one whose code in llama.cpp adds ALiBi, as mpt or bloom, got llama, which rotates"
            )
        return plain | {"keys": {f"{architecture}.attention.max_alibi_bias": 8.0}}
    rotary, half, reason = _rotary(scheme)
    if rotary is None or reason:
        raise ValueError(
            "scheme: expected one that llama.cpp has, rotation of pairs on a line or ALiBi with softmax attention, got "
            f"{reason}; tables of any scheme are in --format npz"
        )
    if architecture in HALVES and not half:
        raise ValueError(
            f"architecture: expected one whose pairs are (2i, 2i + 1), as llama, got {architecture}, whose pairs are "
            "(i, i + n); pass layout='half', and convert weights by isopos.nn.convert_layout"
        )
    if architecture == "llama" and half:
        raise ValueError(
            "architecture: expected one whose pairs are (i, i + n), as qwen2, for layout='half', got llama, whose pairs are "
            "(2i, 2i+1); or convert the weights by isopos.nn.convert_layout and pass layout='interleaved'"
        )
    if architecture == "llama" and 2 * rotary.pairs < scheme.encoding.features:
        raise ValueError(
            "architecture: expected one that rotates a part of a head, as gptneox or phi2, got llama, which rotates all "
            f"{scheme.encoding.features} features"
        )
    keys, factors = _keys(scheme, rotary)
    tensors = {} if factors is None else {"rope_freqs.weight": np.float32(factors).tolist()}
    count = rotary.pairs
    return plain | {
        "pairs": f"(i, i + {count})" if half else "(2i, 2i + 1)",
        "keys": {f"{architecture}.rope.{name}": value for name, value in keys.items()},
        "tensors": tensors,
    }


def _is_alibi(scheme: Scheme) -> bool:
    """Whether a scheme is ALiBi with softmax attention and nothing else."""
    rates, decay = alibi_rates(scheme.heads), scheme.decay
    alone = scheme.encoding.is_trivial and scheme.embedding is scheme.bias is scheme.locality is None and not scheme.phases
    plain = scheme.attention == "softmax" and scheme.scale is None and not scheme.transport
    return alone and plain and decay is not None and torch.allclose(decay.rate.detach(), rates, rtol=1e-6, atol=0)


def _rotary(scheme: Scheme) -> tuple[Rotary | None, bool, str]:
    """The rotation of a scheme, whether it pairs (i, i + n), and the reason why llama.cpp cannot express it, or ""."""
    refusals = {
        "linear attention; pass attention='softmax'": scheme.attention != "softmax",
        "an embedding that is added to tokens": scheme.embedding is not None,
        "relative terms or a locality": scheme.bias is not None or scheme.locality is not None,
        "content-dependent phases": bool(scheme.phases),
        "a decay that is not ALiBi's alone": scheme.decay is not None,
        "values that are mapped": scheme.transport,
        "wider queries than values": scheme.width != 1,
        "a scale of logits of its own": scheme.scale is not None,
    }
    part: Coupling | Encoding = scheme.encoding
    partial = isinstance(part, Partial)
    part = part.encoding if isinstance(part, Partial) else part
    half = isinstance(part, InBasis) and isinstance(part.basis, OddEven)
    part = part.encoding if half and isinstance(part, InBasis) else part
    if reason := next((reason for reason, refused in refusals.items() if refused), ""):
        return None, half, reason
    if not isinstance(part, Rotary) or part.is_lift:
        return None, half, f"the encoding {type(part).__name__}"
    if not isinstance(part.group, Line):
        return None, half, f"positions of {part.group}"
    if len(part.parameter) > 1:
        return None, half, f"separate frequencies of {len(part.parameter)} heads"
    if partial and scheme.sharpness != 1:
        return None, half, "an attention factor of features that do not rotate"
    return part, half, ""


def _keys(scheme: Scheme, rotary: Rotary) -> tuple[dict[str, Any], np.ndarray | None]:
    """Keys without the architecture's name, and factors of frequencies; None if the keys alone determine them."""
    plain, wanted = (to_float64(w.detach())[0, 0].numpy() for w in (rotary.parameter, rotary.extended(rotary.parameter)))
    rule, count = scheme.extension, len(plain)
    factor = 1.0 if rule is None else rule.attention_factor
    keys: dict[str, Any] = {"dimension_count": 2 * count, "freq_base": _base(plain)}
    if isinstance(rule, Linear):
        keys |= {"scaling.type": "linear", "scaling.factor": rule.factor}
    elif isinstance(rule, Yarn):
        keys |= {"scaling.type": "yarn", "scaling.factor": rule.factor}
        keys |= {"scaling.original_context_length": rule.trained}
        keys |= {"scaling.yarn_beta_fast": rule.fast, "scaling.yarn_beta_slow": rule.slow}
        factor /= 1 + 0.1 * np.log(rule.factor)  # llama.cpp multiplies by this
    elif rule is not None and np.allclose(_frequencies(rebased := keys | {"freq_base": _base(wanted)}), wanted, rtol=1e-6):
        keys = rebased
    factors = None
    if not np.allclose(_frequencies(keys), wanted, rtol=1e-6, atol=0):
        keys = {"dimension_count": 2 * count, "freq_base": _base(plain)}
        factor = 1.0 if rule is None else rule.attention_factor
        with np.errstate(divide="ignore"):
            factors = np.minimum(_frequencies(keys) / wanted, UNUSED)
        if (wanted < 0).any():
            raise ValueError("scheme: expected frequencies that are not negative, for llama.cpp, got negative ones")
    if abs(factor - 1) > 1e-9:
        keys["scaling.attn_factor"] = float(factor)
    return keys, factors


def _base(frequency: np.ndarray) -> float:
    """Base of frequencies that form a geometric series from 1 on; 10000 for other frequencies."""
    count = len(frequency)
    if count < 2 or not frequency[-1] > 0:
        return 10000.0
    base = float(frequency[-1] ** (-count / (count - 1)))
    near = round(base, 6 - int(np.floor(np.log10(base)))) if base > 0 else base
    return near if np.isclose(near, base, rtol=1e-9) else base


def _frequencies(keys: Mapping[str, Any]) -> np.ndarray:
    """Frequencies that llama.cpp computes from keys alone: float64."""
    count, base, scale = keys["dimension_count"] // 2, keys["freq_base"], 1 / keys.get("scaling.factor", 1.0)
    frequency = base ** (-np.arange(count) / count)
    if keys.get("scaling.type") != "yarn":
        return frequency * scale
    context, turns = (
        keys["scaling.original_context_length"],
        (keys["scaling.yarn_beta_fast"], keys["scaling.yarn_beta_slow"]),
    )
    low, high = (count * np.log(context / (turn * 2 * np.pi)) / np.log(base) for turn in turns)
    low, high = max(0.0, np.floor(low)), min(2 * count - 1.0, np.ceil(high))
    kept = 1 - np.clip((np.arange(count) - low) / max(0.001, high - low), 0, 1)
    return frequency * (scale * (1 - kept) + kept)
