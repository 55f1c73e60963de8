"""The catalogue of the page `explorer`: each scheme as numbers and rules that plain JavaScript evaluates.

A scheme is built from the registry, and its encoding is read block by block: rotations with their frequencies, cycles of
permutations, powers of Jordan blocks, operators of tree branches, biases. Frequencies that are powers of the option `base`
are written as exponents, which a second build with another base confirms, so that the page can offer any base. Schemes that
have no such form are listed with the reason.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isopos import biases, contragredient, couplings, encodings, generators
from isopos.catalog import CATALOG
from isopos.decays import RATES
from isopos.embeddings import Sinusoidal
from isopos.lengths import EXTENSIONS
from isopos.ops.rotate import skew_exponential
from isopos.ops.spectrum import spectrum
from isopos.poses import Projective
from isopos.positions import Group, Ring, Tree
from isopos.schemes import REGISTRY, Choices, Scheme
from isopos.schemes.registry import options_of

__all__ = ["HEADS", "NotDrawable", "catalogue", "script"]

HEADS = 4
SIZES = (16, 32, 64, 128)  # head sizes
LISTED_SIZES = (16, 64)  # head sizes of schemes whose numbers no rule gives
AXES = 3  # coordinates of a grid that are written, at most
NUMERIC: dict[str, tuple[dict[str, Any], ...]] = {  # numeric options to choose from, in addition to those with named values
    "rope": ({"rotary_dim": 8},),
    "p-rope": ({"p": 0.25}, {"p": 0.5}, {"p": 1.0}),
    "xpos": ({"length": 128.0}, {"length": 2048.0}),
    "jordan": ({"order": 1}, {"order": 3}, {"growth": 1.0}),
    "cosformer": ({"length": 512}, {"length": 8192}),
    "ape-ring": ({"period": 12}, {"period": 24}, {"period": 360}),
    "ape-product": ({"parts": "sequence+ring24"}, {"parts": "tree2+grid2"}),
    "grape": ({"planes": 4}, {"axes": 2}),
    "string": ({"axes": 2},),
    "horn-constrained": ({"axes": 2},),
    "fire": ({"length": 4096.0},),
    "t5": ({"buckets": 8}, {"max_distance": 1024}),
}
NOTES: dict[type, str] = {
    couplings.Absolute: "Absolute: the query is at the origin, and the offset is the key's position.",
    couplings.Polar: "Features are magnitudes, after softplus or the feature map; learned phases start at zero.",
    couplings.Constrained: "Learned amplitudes have their initial values, 1 / n and 0.1 / n.",
    encodings.TreePath: "Head size 16; one head is shown, with its initial planes.",
    biases.T5: "The learned numbers start at zero; one random draw makes the buckets visible.",
    biases.Kerple: "r1 and r2 have their initial values.",
    biases.Fire: "For queries up to L, beyond which scores are not relative; f, c and L have their initial values.",
    Sinusoidal: "Added to the tokens: the curve is the product of two added vectors, divided by their squared length.",
}
REASONS: dict[type, str] = {
    biases.Shaw: "learned vectors of offsets meet the query: over all queries their mean score is zero",
    biases.DeBERTa: "learned vectors of offsets meet queries and keys: over all of them their mean score is zero",
    biases.ClippedKeys: "learned vectors of offsets meet the query: over all queries their mean score is zero",
    couplings.TransformerXL: "relative sinusoids meet the query through a learned matrix: their mean score is zero",
    couplings.Lie: "generators do not commute, so scores are not a function of the offset",
    couplings.SineSPE: "random features: scores are relative in expectation only",
    couplings.ConvSPE: "random features: scores are relative in expectation only",
    contragredient.Projection: "positions are cameras, 4 x 4 matrices",
}


class NotDrawable(Exception):
    """A scheme without a form that the page can evaluate; the message is the reason."""


def script(found: Mapping[str, Any]) -> str:
    """A catalogue as a script, which pages opened as files can load."""
    return f"const CATALOGUE = {json.dumps(found, separators=(',', ':'), allow_nan=False)};\n"


def catalogue() -> dict[str, Any]:
    """Schemes by name, rates of decays by name, and reasons by name of the scheme that is not drawn."""
    schemes, missing = {}, {}
    for name in CATALOG:
        try:
            schemes[name] = _scheme(name)
        except (NotDrawable, ValueError) as error:  # a refusal of these head sizes is a reason, too
            missing[name] = f"{error}"
    rates = {"none": [0.0] * HEADS} | {name: rate(HEADS).tolist() for name, rate in RATES.items()}
    return {"heads": HEADS, "rates": rates, "rules": list(EXTENSIONS), "schemes": schemes, "missing": missing}


def _scheme(name: str) -> dict[str, Any]:
    """One scheme, with the variants that single options make."""
    default = _variant(name, {})
    variants = [{"options": {}} | default]
    for options in _options(name):
        try:
            variant = _variant(name, options, variants)
        except (ValueError, NotDrawable):  # options that need others, or have another form
            continue
        if variant:
            variants.append({"options": options} | variant)
    entry = CATALOG[name]
    kinds = [kind for kind in ("linear", "softmax") if _built(name, attention=kind)]
    return {
        "function": REGISTRY[name].__name__,
        "summary": entry.summary,
        "equation": entry.equation,
        "kinds": kinds,
        "decays": [kind for kind in kinds if _built(name, attention=kind, decay="retnet")],
        "base": _default_base(name),
        "variants": variants,
    }


def _options(name: str) -> Iterator[dict[str, Any]]:
    """Each named value of each option of the scheme by itself, and the numeric options of `NUMERIC`."""
    for option, values in options_of(name).items():
        if option not in Choices.__annotations__ and option != "learned":  # learned values are drawn as they start
            yield from (
                {option: value} for value in (values if isinstance(values, tuple) else (True, False) * (values is bool))
            )
    yield from NUMERIC.get(name, ())


def _built(name: str, size: int = 16, **options: Any) -> Scheme | None:
    try:
        return REGISTRY[name](size, HEADS, **options)
    except ValueError:
        return None


def _default_base(name: str) -> float:
    scheme = REGISTRY[name](16, HEADS)
    assert scheme.origin is not None
    return scheme.origin[1].get("base", 10000.0)


def _variant(name: str, options: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Blocks of a scheme with these options by head size, and what is the same at all sizes; nothing if others equal it."""
    has_base, least = "base" in options_of(name), min(SIZES)
    base = _default_base(name)
    scheme = REGISTRY[name](least, HEADS, **options)
    blocks, kinds = list(_blocks(scheme, base)), [type(part) for part in scheme.modules()]
    found = {
        "coordinates": [_coordinate(leaf) for leaf in scheme.group.leaves][:AXES],
        "kind": scheme.attention,
        "decay": scheme.choices["decay"],
        "bias": _bias(scheme),
        "note": " ".join([*(text for kind, text in NOTES.items() if kind in kinds), *_cut(scheme)]),
    }
    if any(found == {key: other[key] for key in found} and other["sizes"][least]["blocks"] == blocks for other in others):
        return {}
    found["rules"] = _rules(name, least, options)
    found["ruled"] = has_base and blocks == list(_blocks(REGISTRY[name](least, HEADS, **options, base=500.0), 500.0))
    sizes = (least,) if any(block["kind"] == "tree" for block in blocks) else SIZES
    if any(_is_listed(block) for block in blocks):
        sizes = tuple(size for size in LISTED_SIZES if size in sizes)
    found["sizes"] = {}
    for size in sizes:
        blocks = list(_blocks(REGISTRY[name](size, HEADS, **options), base))
        features = sum(block["features"] for block in blocks if block["kind"] != "waves")
        found["sizes"][size] = {"features": features, "blocks": blocks}
    return found


def _cut(scheme: Scheme) -> list[str]:
    count = len(scheme.group.leaves)
    return [f"The first {AXES} of {count} axes are drawn."] if count > AXES else []


def _coordinate(leaf: Group) -> dict[str, Any]:
    if isinstance(leaf, Tree):
        return {"kind": "tree", "branches": leaf.branches}
    if isinstance(leaf, Ring):
        return {"kind": "ring", "period": leaf.period}
    if isinstance(leaf, Projective):
        raise NotDrawable(REASONS[contragredient.Projection])
    return {"kind": "line"}


def _rules(name: str, size: int, options: Mapping[str, Any]) -> list[str]:
    """Rules of `isopos.lengths` that apply to the scheme."""
    found = []
    for rule in EXTENSIONS:
        scheme = REGISTRY[name](size, HEADS, **options)
        pairs = [
            part.pairs for part in scheme.encoding.modules() if isinstance(part, encodings.Coupling) and part.extensible
        ]
        try:
            scheme.extend(
                rule, factor=2.0, trained=64, **({"rescale": [2.0] * pairs[0]} if rule == "longrope" and pairs else {})
            )
        except ValueError:
            continue
        found.append(rule)
    return found


def _bias(scheme: Scheme) -> dict[str, Any] | None:
    bias = scheme.bias
    if bias is None:
        return None
    if isinstance(bias, biases.T5):
        draw = torch.randn(bias.parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return {
            "kind": "buckets",
            "starts": bias.starts.tolist(),
            "one_way": bias.one_way,
            "bidirectional": bias.bidirectional,
            "numbers": _numbers(draw),
        }
    if isinstance(bias, biases.Kerple):
        first, second = (number.tolist() for number in bias.numbers())
        return {"kind": "kerple", "power": bias.kernel == "power", "first": first, "second": second}
    if isinstance(bias, biases.Fire):
        return {
            "kind": "fire",
            "rate": bias.rate.parameter.item(),
            "length": bias.length * bias.threshold.parameter.item(),
            "into": _numbers(bias.into.parameter),
            "out": _numbers(bias.out.parameter),
        }
    raise NotDrawable(_reason(bias))


def _blocks(scheme: Scheme, base: float) -> Iterator[dict[str, Any]]:
    """Blocks of features of a scheme, in order."""
    if scheme.phases:
        raise NotDrawable("positions depend on the content of the tokens between query and key")
    if scheme.transport:
        raise NotDrawable(REASONS[contragredient.Projection])
    if scheme.embedding is not None:
        if not isinstance(scheme.embedding, Sinusoidal):
            raise NotDrawable("vectors are learned, and added to the tokens; scores do not depend on the offset alone")
        yield _rotation(scheme.embedding.frequency[None, None], [0], base, "rotation", extends=False)
    else:
        with torch.no_grad():
            yield from _read(scheme.encoding, list(range(scheme.group.columns)), base)


def _read(part: nn.Module, columns: list[int], base: float) -> Iterator[dict[str, Any]]:
    """Blocks of an encoding whose coordinates are these columns."""
    if isinstance(part, encodings.DirectSum | contragredient.ContragredientSum):
        parts = [inner for inner in part.parts if isinstance(inner, encodings.Coupling)]
        ends = list(itertools.accumulate(inner.group.columns for inner in parts))
        for inner, end in zip(parts, ends, strict=True):
            yield from _read(inner, columns if part.shared else columns[end - inner.group.columns : end], base)
    elif isinstance(part, encodings.InBasis | couplings.Absolute | encodings.Partial):
        if isinstance(part, encodings.InBasis) and part.basis.widening > 1:
            raise NotDrawable("the complex basis has twice as many features as queries have")
        yield from _read(part.encoding, columns, base)
        if isinstance(part, encodings.Partial) and part.rest:
            yield {"kind": "identity", "features": part.rest}
    else:
        yield from _leaf(part, columns, base)


def _leaf(part: nn.Module, columns: list[int], base: float) -> Iterator[dict[str, Any]]:
    """Blocks of an encoding without parts."""
    match part:
        case encodings.Identity():
            yield {"kind": "identity", "features": part.features}
        case encodings.Rotary():
            block = _rotation(part.parameter, columns, base, "lift" if part.is_lift else "rotation", extends=part.extensible)
            if isinstance(part.group, Ring):
                turns = (part.parameter[0, 0] * part.group.period / (2 * math.pi)).round().long().tolist()
                block["frequency"] = [[{"turns": turns, "of": part.group.period}]]
            yield block
        case encodings.Exponential():
            yield _rotation(part.frequency()[:, None], columns, base)
        case generators.Commuting():
            frequency = part.directions().double()[..., None] * spectrum(part.parameter.double())[0][:, None]
            yield _rotation(frequency.flatten(-2), columns, base)
        case generators.Circulant():
            yield {"kind": "identity", "features": 2}
            frequency = -2 * torch.fft.fft(part.parameter.double()).imag[..., 1 : part.features // 2]
            yield _rotation(frequency, columns, base)
        case generators.RankTwo():
            a, b = part.parameter.double().unbind(1)
            speed = ((a * a).sum(-1) * (b * b).sum(-1) - (a * b).sum(-1).square()).sqrt()
            yield _rotation(speed[:, None, None], columns, base)
            yield {"kind": "identity", "features": part.features - 2}
        case couplings.Polar():
            yield _rotation(part.frequency, columns, base, "lift")
        case couplings.Constrained():
            yield {"kind": "identity", "features": part.features}
            waves = _rotation(part.frequencies, columns, base, "waves", extends=False)
            yield waves | {"amplitudes": _numbers(part.parameter[0].T)}
        case contragredient.Jordan() if part.frequency is not None:
            count = part.frequency.shape[-1] // part.order
            block = _rotation(part.frequency[..., :count], columns, base, "jordan")
            block |= {"features": part.features, "order": part.order, "length": part.length}
            yield block | {"growth": _numbers(part.growth[: 2 * count : 2]) if part.grows else None}
        case encodings.Permutation():
            feature, first, rank, length = part.table.permute(2, 1, 0, 3).unbind(2)  # each [h c d]
            power = feature.gather(-1, first + (rank + 1) % length)
            yield {"kind": "permutation", "features": part.features, "columns": columns, "maps": power.tolist()}
        case encodings.TreePath():
            steps = skew_exponential(part.parameter[0].double())
            yield {"kind": "tree", "features": part.features, "columns": columns, "steps": _numbers(steps)}
        case _:
            raise NotDrawable(_reason(part))


def _reason(part: nn.Module) -> str:
    """Why a part is not drawn; a class without an entry in `REASONS` is described by its docstring."""
    summary = (type(part).__doc__ or "").partition("\n")[0].rstrip(".")
    return REASONS.get(type(part), f"the page has no form for {type(part).__name__} ({summary}); isopos show draws it")


def _rotation(
    frequency: Tensor, columns: list[int], base: float, kind: str = "rotation", *, extends: bool = True
) -> dict[str, Any]:
    """A block of frequencies ``[h c f]``; numbers of a learned, float32 parameter are marked."""
    frequency = frequency.double()
    heads = frequency[:1] if all(torch.equal(frequency[0], head) for head in frequency) else frequency
    rows = [[_row(row, base) for row in head[:AXES]] for head in heads]
    single = any(isinstance(row, dict) and row.pop("single", False) for head in rows for row in head)
    features = frequency.shape[-1] * (1 if kind == "lift" else 2)
    block = {"kind": kind, "features": features, "columns": columns[:AXES], "frequency": rows, "extends": extends}
    return block | ({"single": True} if single else {})


def _row(row: Tensor, base: float) -> Any:
    """Frequencies of one coordinate ``[f]``: a rule, or a list."""
    if not row.any():
        return {"same": 0, "count": len(row)}
    if len(row) > 1 and (row == row[0]).all():
        return {"same": row[0].item(), "count": len(row)}
    moving = row[row != 0]
    if (moving > 0).all():
        for count in range(1, 2 * len(row) + 1):
            exponent = -moving.log() / torch.tensor(base, dtype=torch.float64).log() * count
            whole = exponent.round()
            exact = base ** (-whole / count)
            for single in (False, True):
                rule = exact.float().double() if single else exact
                if torch.allclose(moving, rule, rtol=1e-13, atol=1e-15):
                    powers = torch.full_like(row, -1.0)
                    powers[row != 0] = whole
                    return {"of": count, "powers": _run(powers.long().tolist()), "single": single}
    listed = [float(f"{value:.9g}") for value in row.tolist()]
    if torch.tensor(listed).double().equal(row):
        return {"list": listed, "single": True}
    return {"list": row.tolist()}


def _run(powers: list[int]) -> list[int] | dict[str, int]:
    """Consecutive powers as their first, step and count; -1 stands for the frequency zero."""
    steps = {b - a for a, b in itertools.pairwise(powers)} or {1}
    if len(steps) == 1 and min(powers) >= 0 and abs(step := steps.pop()) == 1:
        return {"first": powers[0], "step": step, "count": len(powers)}
    return powers


def _is_listed(block: Mapping[str, Any]) -> bool:
    """Whether a block has numbers that grow with the head size and have no rule."""
    rows = (row for head in block.get("frequency", ()) for row in head)
    return "maps" in block or "steps" in block or any("list" in row for row in rows)


def _numbers(value: Tensor) -> Any:
    """Nested lists of 9 digits."""
    return [_numbers(part) for part in value] if value.ndim else float(f"{value.item():.9g}")
