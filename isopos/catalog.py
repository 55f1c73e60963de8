"""The names of the schemes and what is said of each, without importing torch.

It is said once, at each scheme's function in `isopos/schemes/`, and read here from that source.
"""

import ast
import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

__all__ = ["CATALOG", "Entry", "at_least", "closest", "expect", "own_module"]


class Entry(NamedTuple):
    """What is said of a scheme; what can be measured is not said here but measured (docs/schemes.md)."""

    summary: str
    citation: str
    equation: str  # of the weight w(q, k) before the decay, or of what is added; t = y - x is the offset
    cost: str = "not said"  # beyond attention without positions, of t tokens, d features, n buckets
    extends: str = "not said"  # to which other groups
    content: bool = True  # whether what positions do to a score depends on the query or the key
    learns: str = "nothing"  # by default
    fits: Mapping[str, str] = MappingProxyType({})  # options that follow the model: see `isopos.schemes.build`


def _said() -> Iterator[tuple[str, Entry]]:
    """The names of the functions that `isopos.schemes.register` decorates, and its arguments."""
    for path in sorted(Path(__file__).parent.glob("schemes/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in function.decorator_list if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id == "register":
                    said = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                    yield function.name.replace("_", "-"), Entry(**said)


CATALOG: dict[str, Entry] = dict(_said())
"""By name; a scheme that is registered elsewhere joins it."""


def closest(name: object, names: Iterable[str]) -> str:
    """The known names, or the nearest to a misspelt one."""
    near = difflib.get_close_matches(str(name), names := list(names), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"


def expect(what: str, value: Any, names: Iterable[str]) -> None:
    """Raise ValueError where a value is none of the names."""
    if value not in (names := list(names)):
        near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
        remedy = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {value!r}{remedy}")


def at_least(name: str, value: int, least: int = 1) -> int:
    """The value, of numpy's integers as Python's; ValueError where it is no integer, or less."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value if isinstance(value, int) else int(value)


def own_module(name: str, what: str) -> ModuleType:
    """A module of the user's, from the working folder or installed; ValueError, of `what`, where it cannot be imported."""
    if not name.startswith("isopos.") and "" not in sys.path:
        sys.path.append("")  # last, so that no file here takes the place of a library
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's module does
        raise ValueError(f"{what}: cannot import {name}: {type(error).__name__}: {error}") from None
