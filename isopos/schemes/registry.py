"""Registration of scheme functions, construction of schemes from names and text options, and helpers for presets."""

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from isopos import bases, encodings
from isopos.catalog import CATALOG, Entry, at_least, closest, entry_of, expect, own_module
from isopos.deprecation import renamed
from isopos.encodings import Coupling, Encoding, rope_frequencies
from isopos.kinds import FIELDS, Linear, Softmax, kind_of
from isopos.scheme import Choices, Scheme, choices_of

__getattr__ = renamed(__name__, {"Layout": "isopos.schemes.registry.PairLayout"})

PairLayout = Literal["interleaved", "half"]

REGISTRY: dict[str, Callable[..., Scheme]] = {}
ARGUMENTS = {
    "head_dim": "d; even where pairs of features rotate.",
    "gated": "Learn, per head and feature, which part ignores positions: the paper's gated variant.",
    "heads": "h.",
    "axes": "Number of axes of positions.",
    "base": "Base of geometric frequencies or angles.",
    "branches": "Largest number of children of a node.",
    "initial": 'Initial angles: "rope", base^(-2i/d), or "identity", many small and progressively fewer large ones.',
    "layout": 'Input layout of pairs: "interleaved" (2i, 2i+1), or "half" (i, i + d/2), as in checkpoints of transformers. '
    "Rotated\n        features are interleaved.",
    "learned": "Learn the frequencies or angles, separately per head.",
    "learned_basis": "Learn the normal of the Householder basis.",
    "locality": "Factor of softmax logits per step of distance; 0.98 in the paper.",
    "model_dim": "Width of the token embeddings; head_dim * heads by default.",
    "noise_per_head": "Draw noise separately per head, as in the authors' code; otherwise heads share one draw.",
    "realizations": "Features of queries and keys; d by default.",
    "seed": "Seed of random initial values.",
    "theta": 'Angles of t = 0, ..., n - 1: "a" base^(-2t/d), "b" pi (t+1) / (2 n length), "c" pi / (2 (t+1) length), as'
    "\n        in the paper's listing, where length is each input's; here it is fixed: a prefix keeps its outputs.",
    "choices": "See `isopos.scheme.Choices`.",
}  # descriptions of common options, unless a scheme's docstring describes them

TYPES: dict[type, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a finite number",
    str: "a text",
    type(None): "None",
}
"""Types of options that are checked, and how errors name them."""
ABSTRACT: dict[type, type] = {int: Integral, float: Real}  # NumPy's numbers are accepted, too
OF_KINDS = {each.name: typing.get_type_hints(kind)[each.name] for kind in (Linear, Softmax) for each in fields(kind)}

Function = TypeVar("Function", bound=Callable[..., Scheme])


def register(**fields: Any) -> Callable[[Function], Function]:
    """Register a function ``(head_dim, heads, *, options, **choices) -> Scheme`` under its name, with `-` for `_`.

    `build`, the command line, laws and documents then know the scheme. Annotations of its options define how text is parsed;
    its docstring describes them, and common options are added to it.

    Args:
        fields: Fields of `isopos.catalog.Entry`, at least citation and equation. The summary is the docstring's first line.

    Raises:
        ValueError: If the name is registered already.

    Examples:
        >>> import isopos
        >>> from isopos.scheme import Scheme
        >>> @register(citation="this example", equation="<q, k>")
        ... def whole_turns(head_dim, heads=1, **choices):
        ...     '''Rotation by whole turns.'''
        ...     return Scheme(isopos.encodings.Identity(head_dim), heads, **choices)
        >>> isopos.catalog.CATALOG["whole-turns"].summary
        'Rotation by whole turns'
        >>> build("whole-turns", 8, 2, {"attention": "softmax"}).attention
        'softmax'
        >>> del REGISTRY["whole-turns"], isopos.catalog.CATALOG["whole-turns"]
    """
    Entry(**{"summary": "", **fields})  # a missing field is an error here, not at the function

    def add(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        if name in REGISTRY:
            home = REGISTRY[name].__module__
            raise ValueError(
                f"scheme: expected a new name, got {name!r}, which {home} has; rename one, or del REGISTRY[{name!r}]"
            )
        signature = inspect.signature(function)

        @functools.cache
        def accepted() -> dict[str, Any]:
            """Options of the function, of `Scheme`, and of the kinds of attention."""
            named = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
            return named | dict(list(inspect.signature(Scheme).parameters.items())[2:]) | dict.fromkeys(FIELDS)

        @functools.cache
        def annotated() -> dict[str, Any]:
            """Types of all options."""
            return OF_KINDS | typing.get_type_hints(Scheme.__init__) | typing.get_type_hints(function)

        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Scheme:
            if unknown := [option for option in options if option not in accepted()]:
                raise TypeError(f"{name}: unknown option {unknown[0]!r}: {closest(unknown[0], accepted())}")
            if isinstance(kind := options.get("attention"), Linear | Softmax):
                options |= {"attention": kind.name, **kind.chosen}
            arguments, options = tuple(map(_plain, arguments)), {name: _plain(value) for name, value in options.items()}
            bound = signature.bind(*arguments, **options)
            values = bound.arguments
            at_least("head_dim", values["head_dim"])
            at_least("heads", 1 if values.get("heads") is None else values["heads"])
            kinds = annotated()
            for option, value in options.items():
                _check_type(f"{name}: {option}", value, kinds.get(option), any_number=True)
            scheme = function(*arguments, **options)
            for option, value in options.items():  # after the function's own errors, which say more of numbers
                _check_type(f"{name}: {option}", value, kinds.get(option))
            bound.apply_defaults()
            scheme.origin = name, {key: value for key, value in (bound.arguments | options).items() if key in accepted()}
            return scheme

        entry = entry_of(inspect.getdoc(function), fields)
        checked.__doc__ = _described(function, entry)
        REGISTRY[name], CATALOG[name] = checked, entry
        return typing.cast(Function, checked)

    return add


def _check_type(name: str, value: Any, kind: Any, *, any_number: bool = False) -> None:
    """ValueError for a value of another type than its annotation, of numbers, truth values, texts and None.

    With `any_number` numbers are not distinguished from each other.
    """
    kinds = set(typing.get_args(kind) or (kind,))
    if not kinds <= TYPES.keys():
        return
    found = next((each for each in TYPES if isinstance(value, ABSTRACT.get(each, each))), None)
    if any_number and found in (int, float) and kinds & {int, float}:
        return
    if not (found in kinds or (found is int and float in kinds)) or (found is float and not math.isfinite(value)):
        raise ValueError(f"{name}: expected {' or '.join(TYPES[each] for each in TYPES if each in kinds)}, got {value!r}")


def _plain(value: Any) -> Any:
    """An int for an integer of another type, such as NumPy's, and other values as they are."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, int) else value


def _described(function: Callable[..., Scheme], entry: Entry) -> str:
    """The docstring, completed by the source and by `ARGUMENTS`."""
    text, _, described = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    described, *rest = described.split("\n\n", 1)
    lines = {name: f"    {name}: {what}" for name, what in ARGUMENTS.items()}
    parts = re.split(r"^(?=    \w+:)", described, flags=re.M)
    lines |= {part.split(":")[0].strip(): part.rstrip() for part in parts if part}
    arguments = [lines[name] for name in inspect.signature(function).parameters if name in lines]
    return "\n\n".join([text, f"Source: {entry.citation}.", "\n".join(["Args:", *arguments]), *rest])


def build(
    name: str,
    head_dim: int,
    heads: int,
    options: Mapping[str, object] | None = None,
    *,
    model: Mapping[str, object] | None = None,
) -> Scheme:
    """A scheme from its name and options, as text from the command line or as values.

    Args:
        name: Name, as in `resolve`.
        head_dim: d.
        heads: h.
        options: Value of each option, or its text.
        model: Facts about the model: "length", the longest sequence in training; "reach", the longest in evaluation;
            "branches", largest number of children of a node; "depth" of a typical tree; "scale", the standard deviation of
            token embeddings; "seed". They determine options in `Entry.fits`, and seeds, that `options` does not contain.

    Raises:
        ValueError: For an unknown scheme, option or value; the message lists the valid ones.

    Examples:
        >>> build("rope", 64, 8, {"decay": "retnet", "base": "500000"}).choices["decay"]
        'retnet'
        >>> build("learned", 64, 8, model={"length": 100}).max_length
        100
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options: expected them by name, {{'decay': 'retnet'}}, got {options!r}")
    name = resolve(name)
    parameters, model = options_of(name), model or {}
    sources = {"seed": "seed"} | dict(CATALOG[name].fits)
    fitted = {option: model[fact] for option, fact in sources.items() if option in parameters and fact in model}
    values = {}
    for option, value in (fitted | dict(options or {})).items():
        if option not in parameters:
            raise ValueError(f"{name}: unknown option {option!r}: {closest(option, parameters)}")
        plain = isinstance(value, str | int | float)  # others are values of the scheme's function already
        values[option] = _parse(f"{name}: {option}", str(value), parameters[option]) if plain else value
    return REGISTRY[name](head_dim, heads, **values)


def resolve(name: str) -> str:
    """The key in `REGISTRY` for a scheme: its name, or ``module.name`` for a scheme that your module registers.

    The module is imported from the working folder or from installed packages.

    Raises:
        ValueError: For an unknown name, a module that cannot be imported, or one that registers no such scheme.
    """
    module, dot, scheme = name.rpartition(".")
    if dot:
        own_module(module, f"scheme {name}")
        scheme = scheme.replace("_", "-")
        if scheme not in (names := [key for key, function in REGISTRY.items() if function.__module__ == module]):
            raise ValueError(
                f"scheme {name}: expected a scheme that {module} registers by @register, got {scheme!r} of "
                f"{', '.join(names) or 'none'}"
            )
    elif name not in REGISTRY:
        raise ValueError(f"unknown scheme {name!r}: {closest(name, REGISTRY)}")
    return scheme


def options_of(name: str) -> dict[str, Any]:
    """Options of a scheme with their types, or with the valid names."""
    hints = typing.get_type_hints(REGISTRY[name])
    parameters = inspect.signature(REGISTRY[name]).parameters.values()
    types = {p.name: hints.get(p.name, str) for p in parameters if p.kind is p.KEYWORD_ONLY}
    names = {option: typing.get_args(kind) for option, kind in types.items() if typing.get_origin(kind) is Literal}
    return types | names | choices_of()


def _parse(what: str, text: str, kind: Any) -> Any:
    if isinstance(kind, tuple):
        expect(what, text, kind)
        return text
    kinds = typing.get_args(kind) or (kind,)
    if str in kinds:
        return text
    if type(None) in kinds and text.lower() == "none":
        return None
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, bool: {"true": True, "false": False}.__getitem__}
    for reader in (readers[k] for k in kinds if k in readers):
        try:
            return reader(text.lower())
        except (ValueError, KeyError):
            continue
    names = " or ".join("true or false" if k is bool else k.__name__ for k in kinds if k in readers)
    raise ValueError(f"{what}: expected {names}, got {text!r}")


def compose(
    encoding: Coupling, heads: int | None, choices: Choices, defaults: Mapping[str, str] | None = None, **parts: Any
) -> Scheme:
    """A scheme of these parts, with a preset's defaults for options that the user has not chosen, if they apply.

    Args:
        encoding: The encoding, or a coupling of queries and keys.
        heads: Number of key heads; None for one, of any number of heads.
        choices: The user's options: of `Scheme`, and fields of `Linear` and `Softmax` with the name of the kind.
        defaults: The preset's choices; with softmax attention only its attention and decay apply.
        parts: Options of `Scheme` that the preset determines.

    Raises:
        ValueError: For a decay without a number of heads, and as `Scheme`.
        TypeError: For a choice that the preset determines.
    """
    defaults = defaults or {}
    if heads is None and choices.get("decay", "none") != "none":
        raise ValueError("heads: expected their number with a decay, which has one rate per head, got none")
    heads = 1 if heads is None else heads
    if {**defaults, **choices}.get("attention") == "softmax":
        defaults = {name: value for name, value in defaults.items() if name in ("attention", "decay")}
    options: dict[str, Any] = {**defaults, **choices}
    if fixed := [name for name in parts if name in options]:
        raise TypeError(f"{fixed[0]}: expected none, since this scheme determines it, got {options[fixed[0]]!r}")
    options |= parts
    kind = kind_of(**{name: options.pop(name) for name in ("attention", *FIELDS) if name in options})
    return Scheme(encoding, heads, attention=kind, **options)


def even(width: int) -> int:
    """The width; ValueError unless it is a positive even number."""
    if width % 2 or width < 2:
        raise ValueError(f"head size: expected an even number of features for a rotation of pairs, got {width}")
    return width


def laid_out(rotary: Encoding, layout: str) -> Encoding:
    """A rotation of pairs (2i, 2i+1), or with layout="half" of pairs (i, i + d/2)."""
    expect("layout", layout, typing.get_args(PairLayout))
    return rotary if layout == "interleaved" else encodings.InBasis(rotary, bases.OddEven(rotary.features))


def axial(shares: Sequence[int], base: float) -> Tensor:
    """Rope's frequencies for each axis on separate pairs, float64 ``[c f]``; each is zero except on its axis."""
    return torch.block_diag(*(rope_frequencies(share, base) for share in shares))


def split_widths(width: int, parts: int, step: int) -> list[int]:
    """Widths of parts: multiples of `step`, as equal as possible, larger ones first."""
    if width < step * at_least("axes", parts):
        raise ValueError(f"head size: expected at least {step * parts} features for {parts} parts, got {width}")
    share, rest = divmod(width // step, parts)
    return [step * (share + (n < rest)) for n in range(parts)]
