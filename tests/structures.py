"""Structures of the arguments of attention, derived from the case table, with one representative row per structure.

A new row with a new structure is added automatically. Tests of attention (settings, devices, modules, streams, kernels) run
over structures; tests of presets (formula, law, options) run over all rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cases import COMPOSED, HEAD_DIM, HEADS, SCHEMES, Decorator, SchemeCase, over_pairs
from torch import Tensor

from isopos import schemes
from isopos.maps import TokenMap
from isopos.positions import sequence
from isopos.terms import Term


class ComposedCase(SchemeCase):
    """A row of `COMPOSED` as a scheme: its encoding and no other choice."""

    def build(self, head_dim: int = HEAD_DIM, heads: int = HEADS, **more: Any) -> schemes.Scheme:
        assert (head_dim, heads) == (HEAD_DIM, HEADS), f"{self.id}: of {HEADS} heads of {HEAD_DIM} features"
        return schemes.compose(self.options["encoding"](), heads, {"attention": "linear"} | more)


class Structure(NamedTuple):
    """A structure, its rows, and their representative row."""

    kind: str
    case: SchemeCase
    rows: list[str]


ENCODINGS_ALONE = [ComposedCase(case.id, "", {"encoding": case.make}) for case in COMPOSED]
"""The rows of `COMPOSED` as schemes."""


def structure(scheme: schemes.Scheme) -> tuple[Any, ...]:
    """The structure of a scheme: its options, and name and nested types of each argument."""
    group = scheme.group
    x = sequence(2) if group.columns == 1 else group.origin(2)
    seen = [(name, _of_argument(x)) for name, x in scheme.at(x).items() if x is not None]
    parts = type(scheme.bias).__name__, type(scheme.embedding).__name__
    return scheme.attention, scheme.inside, scheme.width > 1, scheme.outside > 0, group.refers_to_rows, *parts, *seen


def _of_argument(value: Any) -> Any:
    """Classes, whether they have heads, and options that are not numbers."""
    if isinstance(value, tuple):
        return tuple(map(_of_argument, value))
    if isinstance(value, TokenMap):
        options = ((name, own) for name, own in vars(value).items() if isinstance(own, TokenMap | tuple | bool))
        own = tuple((name, _of_argument(option)) for name, option in options if option not in ((), None))
        return type(value).__name__, _heads(value.leading), own
    if isinstance(value, Term):
        columns = value.x.shape[-1] if hasattr(value, "x") else 1
        return type(value).__name__, value.side, _heads((value.heads,)), columns
    if isinstance(value, str | bool):
        return value
    return type(value).__name__


def _heads(leading: tuple[int, ...]) -> str:
    return "shared" if leading[-1:] in ((), (1,)) else "a head"


def _cost(scheme: schemes.Scheme) -> tuple[bool, int]:
    """Sort key: rows with parameters first, for their gradients; then rows with few numbers."""
    tensors = [*scheme.parameters(), *(x for x in vars(scheme.encoding).values() if isinstance(x, Tensor))]
    return not list(scheme.encoding.parameters()), sum(x.numel() for x in tensors)


class _Built(NamedTuple):
    """What is kept of the scheme of a row."""

    case: SchemeCase
    structure: tuple[Any, ...]
    cost: tuple[bool, int]
    classes: tuple[str, ...]  # of encodings


_BUILT: dict[tuple[int, str], _Built] = {}  # which keeps the cases, and so their ids, alive


def _built(case: SchemeCase, kind: str) -> _Built:
    """What is kept of the scheme of a row, which is built once."""
    if (id(case), kind) not in _BUILT:
        scheme = case.build(attention=kind)
        classes = tuple(type(module).__name__ for module in scheme.encoding.modules())
        _BUILT[id(case), kind] = _Built(case, structure(scheme), _cost(scheme), classes)
    return _BUILT[id(case), kind]


Where = Callable[[SchemeCase, str], bool]  # of a row and a kind of attention


def everywhere(case: SchemeCase, kind: str) -> bool:
    """No limit to the rows and kinds."""
    return True


def structures(rows: list[SchemeCase], *apart: str, where: Where = everywhere) -> list[Structure]:
    """Structures of rows and their kinds of attention, each represented by its cheapest row.

    They exclude the arguments named by `apart`, which a test combines with the others.
    """
    found: dict[Any, list[tuple[Any, Structure]]] = {}
    for case in rows:
        for kind in (kind for kind in case.kinds if where(case, kind)):
            built = _built(case, kind)
            seen = tuple(part for part in built.structure if not (isinstance(part, tuple) and part[0] in apart))
            found.setdefault(seen, []).append((built.cost, Structure(kind, case, [])))
    least = [min(rows, key=lambda row: row[0])[1] for rows in found.values()]
    names = [[f"{own.case.id}-{own.kind}" for _, own in rows] for rows in found.values()]
    return [own._replace(rows=same) for own, same in zip(least, names, strict=True)]


STRUCTURES = structures([*SCHEMES, *ENCODINGS_ALONE])


def isometries(rows: list[SchemeCase], known: list[SchemeCase]) -> list[SchemeCase]:
    """Rows in which each isometry and each class of encodings occurs once, if it does not occur in `known`."""
    found: dict[Any, SchemeCase] = {}
    for case in [*known, *rows]:
        found.setdefault(_isometry(_built(case, case.kinds[0])), case)
    return [*found.values()]


def _isometry(built: _Built) -> Any:
    arguments = dict(part for part in built.structure if isinstance(part, tuple))
    return arguments.get("isometry"), built.classes


def covering(where: Where = everywhere) -> tuple[list[tuple[SchemeCase, str]], list[tuple[SchemeCase, str]]]:
    """Rows and kinds of attention in which everything occurs once: for tests of what concerns each of both parts alone.

    The first list has each structure of the arguments but for the isometry. The second one adds rows, so that each isometry
    and each class of encodings occurs.
    """
    rows = [*SCHEMES, *ENCODINGS_ALONE]
    others = [(own.case, own.kind) for own in structures(rows, "isometry", where=where)]
    found: dict[Any, tuple[SchemeCase, str]] = {}
    for case, kind in [*others, *pairs(where), *((case, case.kinds[0]) for case in rows if where(case, case.kinds[0]))]:
        found.setdefault(_isometry(_built(case, kind)), (case, kind))
    known = {(case.id, kind) for case, kind in others}
    return others, [(case, kind) for case, kind in found.values() if (case.id, kind) not in known]


def pairs(where: Where = everywhere) -> Iterator[tuple[SchemeCase, str]]:
    """Row and kind of attention of each structure."""
    return ((own.case, own.kind) for own in STRUCTURES if where(own.case, own.kind))


def over_structures(where: Where = everywhere) -> Decorator:
    """Parametrise a test of a `case` and a `kind` by families of presets, for all structures of their rows."""
    return over_pairs(pairs(where))


def over_covering(where: Where = everywhere) -> Decorator:
    """Parametrise a test in the same way by the rows of `covering`."""
    others, isometries = covering(where)
    return over_pairs([*others, *isometries])


def over_other_rows() -> Decorator:
    """Parametrise a test in the same way by rows with other classes of encodings, groups or numbers of columns.

    The remaining rows run the same code with other numbers.
    """

    def parts(case: SchemeCase, kind: str) -> tuple[Any, ...]:
        built = _built(case, kind)
        return kind, built.structure, built.classes, type(case.group), case.group.columns, case.outside

    found = {parts(*row): row for row in pairs()}
    known = len(found)
    for case in [*SCHEMES, *ENCODINGS_ALONE]:
        for kind in case.kinds:
            found.setdefault(parts(case, kind), (case, kind))
    return over_pairs([*found.values()][known:])
