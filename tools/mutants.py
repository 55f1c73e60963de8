"""Mutants: one small change of a source each, by its syntax tree; `tools.mutate` runs the tests on them.

Comparisons and arithmetic are turned into their neighbours, numbers are off by one, booleans and conditions flipped, and
statements, signs and `not` removed; the first two arguments of a call change places, unless it is symmetric in them.

Messages, docstrings, annotations, decorators, assertions, of which `strict` of a zip is one, and `__all__` are left alone:
no test is to hold them. So is the dress of pictures, in files that import matplotlib: titles, labels, legends, grids, and
arguments by name that give colours, widths, fonts and sizes; what is drawn where, its ticks and its limits are not.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mutant", "mutants"]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult},
    **{ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}
SYMMETRIC = {"max", "min", "math.gcd", "math.lcm", "torch.add", "torch.broadcast_shapes", "torch.maximum", "torch.minimum"}
SYMMETRIC |= {"torch.mul", "torch.promote_types"}
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LEFT_ALONE = {"annotation", "returns", "decorator_list", "bases", "type_params"}  # fields of nodes
DRESS = {"grid", "legend", "margins", "plain", "set", "set_title", "set_visible", "supxlabel", "suptitle"}  # calls
STYLES = {"alpha", "color", "dpi", "figsize", "fontsize", "frameon", "label", "linewidth", "lw", "ncols", "rotation"}
STYLES |= {"shrink", "width_ratios", "zorder"}  # arguments of calls, by name


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
        scope: Qualified name of the function or class it is in; empty at a module's top.
        names: That the statement assigns, where it is in no function; of a default, the argument.
        span: Bytes of the source that `new` takes the place of.
    """

    file: str
    line: int
    scope: str
    in_function: bool
    names: tuple[str, ...]
    old: str
    new: str
    span: tuple[int, int]

    @property
    def id(self) -> str:
        """What tells it from all others of the same source."""
        return f"{self.file}:{self.line}:{self.span[0]}:{self.old} -> {self.new}"

    def apply(self, source: bytes) -> bytes:
        """The source with the change."""
        first, last = self.span
        return source[:first] + self.new.encode() + source[last:]


def mutants(root: Path, folder: str) -> list[Mutant]:
    """All of the sources under a folder, by file and place."""
    files = sorted((root / folder).rglob("*.py"))
    return [mutant for path in files for mutant in _Finder(path.read_bytes(), str(path.relative_to(root))).found()]


class _Finder:
    def __init__(self, source: bytes, file: str):
        self.source, self.file = source, file
        self.draws = b"import matplotlib" in source or b"from matplotlib" in source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        """Every mutant of the file."""
        yield from self._walk(ast.parse(self.source), "", False, ())

    def _walk(self, node: ast.AST, scope: str, in_function: bool, names: tuple[str, ...]) -> Iterator[Mutant]:
        if _left_alone(node) or (self.draws and _is_dress(node)):
            return
        place = scope, in_function, names
        if isinstance(node, ast.stmt) and _removable(node):
            yield self._mutant(node, "pass", *place)
        if isinstance(node, ast.Raise | ast.JoinedStr):
            return  # messages
        for changed, new in _changed(node):
            yield self._mutant(changed, new, *place)
        if isinstance(node, SCOPES):
            scope = f"{scope}{node.name}"
            for name, default in _defaults(node.args) if not isinstance(node, ast.ClassDef) else ():
                yield from self._walk(default, scope, True, (name,))
            scope, in_function = (f"{scope}.", False) if isinstance(node, ast.ClassDef) else (f"{scope}.<locals>.", True)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not in_function:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = tuple(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        for field, value in ast.iter_fields(node):
            if field in LEFT_ALONE or (isinstance(value, ast.arguments) and isinstance(node, SCOPES)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, scope, in_function, names)

    def _mutant(self, node: ast.expr | ast.stmt, new: str, scope: str, in_function: bool, names: tuple[str, ...]) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = self.starts[node.lineno - 1] + node.col_offset
        last = self.starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(self.source[first:last].decode().split())
        scope = scope.removesuffix(".").removesuffix(".<locals>")
        return Mutant(self.file, node.lineno, scope, in_function, names, old, new, (first, last))


def _left_alone(node: ast.AST) -> bool:
    """Whether no test is to hold what is in it."""
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    if isinstance(node, ast.FunctionDef):
        return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(name, ast.Name) and name.id.startswith("__") for name in targets)
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) in ("Literal", "Annotated")
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Each argument that has one, and it."""
    places = [*arguments.posonlyargs, *arguments.args]
    yield from ((a.arg, x) for a, x in zip(places[::-1], arguments.defaults[::-1], strict=False))
    yield from ((a.arg, x) for a, x in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if x is not None)


def _is_dress(node: ast.AST) -> bool:
    """Whether it is how a picture looks, not what it shows."""
    if isinstance(node, ast.keyword):
        return node.arg in STYLES
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in DRESS


def _removable(node: ast.stmt) -> bool:
    """Whether a statement is for its effect alone, so that what follows can still run."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    effects = ast.AugAssign | ast.Raise | ast.Continue | ast.Break
    return isinstance(node, effects) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def _changed(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """What changes, a node or its condition, and each text that takes its place."""
    for condition in _conditions(node):
        yield condition, f"(not ({ast.unparse(condition)}))"
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield node, ast.unparse(ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value))
    if isinstance(node, ast.expr):
        yield from ((node, f"({ast.unparse(new)})") for new in _others(node))


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """Every expression that takes another's place."""
    if isinstance(node, ast.Compare):
        for n, op in enumerate(node.ops):
            yield ast.Compare(node.left, [*node.ops[:n], COMPARISONS[type(op)](), *node.ops[n + 1 :]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        yield ast.Constant(
            not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 2 * value or 1.0
        )
    elif isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func) not in SYMMETRIC:
        first, second, *rest = node.args
        starred = any(isinstance(x, ast.Starred) for x in (first, second))
        if not starred and ast.unparse(first) != ast.unparse(second):
            yield ast.Call(node.func, [second, first, *rest], node.keywords)


def _is_text(node: ast.BinOp) -> bool:
    """Whether it makes a text: a message, as a rule."""
    parts = (node.left, node.right)
    return any(isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str)) for x in parts)
