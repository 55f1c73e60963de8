"""Names and descriptions of all schemes, without importing torch: read from the source of `isopos/schemes/`."""

import ast
import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Description of a scheme. Properties that can be measured are not here but in docs/schemes.md."""

    summary: str
    citation: str
    equation: str  # the weight w(q, k) before the decay, or the added term; t = y - x is the offset
    cost: str = "not stated"  # additional to attention without positions, for t tokens, d features, n buckets
    extends: str = "not stated"  # other groups of positions that the scheme generalises to
    content: bool = True  # whether the effect of positions on a score depends on the query or the key
    learns: str = "nothing"  # parameters with default options
    fits: Mapping[str, str] = MappingProxyType({})  # options with defaults from the model: see `isopos.schemes.build`


def entry_of(docstring: str | None, fields: Mapping[str, Any]) -> Entry:
    """The entry of a scheme's function; its summary is the first line of the docstring, unless it is among the fields."""
    entry = Entry(**{"summary": (docstring or "").partition("\n")[0].removesuffix("."), **fields})
    if not entry.summary:
        raise ValueError("summary: expected the first line of the function's docstring, got none; write a docstring")
    return entry


def _entries() -> Iterator[tuple[str, Entry]]:
    """Names and entries of all functions in isopos/schemes/ with the decorator `register`."""
    for path in sorted(Path(__file__).parent.glob("schemes/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in function.decorator_list if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id == "register":
                    fields = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                    yield function.name.replace("_", "-"), entry_of(ast.get_docstring(function), fields)


CATALOG: dict[str, Entry] = dict(_entries())
"""Entries by name, including schemes that are registered elsewhere."""


def closest(name: object, names: Iterable[str]) -> str:
    """The nearest names as a question, or all names if none is near."""
    near = difflib.get_close_matches(str(name), names := list(names), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"


def expect(what: str, value: Any, names: Iterable[str]) -> None:
    """Raise ValueError if a value is not one of the names."""
    if value not in (names := list(names)):
        near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {value!r}{remedy}")


def at_least(name: str, value: int, least: int = 1) -> int:
    """The value as an int; ValueError if it is not an integer (NumPy's included), or less than `least`.

    A symbolic size of a compiler is returned as it is.
    """
    if type(value).__name__ == "SymInt":  # torch's, without its import
        return value
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value if isinstance(value, int) else int(value)


def probability(name: str, value: float) -> float:
    """The value; ValueError unless it is a number from 0 on, below 1."""
    try:
        fits = 0 <= value < 1
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: expected a probability below 1, got {value!r}")
    return value


def instances(name: str, values: Any, kind: type | tuple[type, ...], nouns: str) -> tuple[Any, ...]:
    """The values as a tuple; ValueError unless there is at least one, and all are of the kind, named by a plural."""
    listed = tuple(values) if isinstance(values, Iterable) else ()
    if not listed or not all(isinstance(value, kind) for value in listed):
        raise ValueError(f"{name}: expected one or more {nouns}, got {values!r}")
    return listed


class NotImported(ValueError):
    """A module of the user's cannot be imported here."""


def own_module(name: str, what: str) -> ModuleType:
    """Import a module of the user's, from the working folder or installed; NotImported, naming `what`, if this fails."""
    if not name.startswith("isopos.") and "" not in sys.path:
        sys.path.append("")  # last, so that no file here takes the place of a library
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise NotImported(f"{what}: cannot import {name}: {type(error).__name__}: {error}") from None
