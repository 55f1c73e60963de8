"""Test that imports point downward without cycles, the core needs only torch and numpy, and nothing is too long."""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import isopos

ROOT = Path(isopos.__file__).parent
# From the bottom up: a room knows those of earlier lines, and none beside it; a longer name is a room of its own.
LAYERS = """
deprecation
exact trees catalog
spec parallel
graphs images times
lengths
feature_maps
ops
positions
poses maps terms state kinds
bases decays embeddings biases
paths phases
encodings
contragredient couplings generators
attention
scheme
schemes stream
nn
laws models
audit.subject audit.declared
integrations
audit
testing
__init__
lab.timing lab.runs.files
lab.data
lab.tasks
lab.recipes
lab.runs lab.tables
lab.training
lab.reports
lab.bench
lab.commands lab
cli
__main__
"""
LEVEL = {
    room: (level, rooms)
    for level, line in enumerate(LAYERS.strip().splitlines())
    for rooms in line.split()
    for room in rooms.split("+")
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
PACKAGES = {
    "audit": {"rich"},
    "cli": {"tyro", "rich"},
    "integrations": {"transformers", "safetensors", "onnx", "onnxruntime", "onnxscript"},
    "ops": {"triton"},
}
"""What rooms use beside torch and numpy, within functions."""
SUBCLASSES = {"integrations.transformers.model", "integrations.transformers.states"}
"""Modules whose classes inherit from those of transformers; no other module imports them before a function runs."""
MOST = {"function": 60, "module": 600}


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def at_import(node: ast.AST) -> list[ast.AST]:
    """The nodes that run when a module is imported."""
    found = [node]
    for child in ast.iter_child_nodes(node):
        typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not typing and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found += at_import(child)
    return found


def imported(nodes: list[ast.AST], package: str) -> set[str]:
    """Dotted names of what nodes import; ``from isopos import x`` counts as isopos.x."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imports(name: str, *, run: bool = False) -> set[str]:
    """Names that a module imports: anywhere, or (`run`) only when it is imported."""
    package = f"isopos.{name}" if MODULES[name].name == "__init__.py" else f"isopos.{name}".rpartition(".")[0]
    return imported(at_import(parsed(name)) if run else list(ast.walk(parsed(name))), package.removesuffix(".__init__"))


def own(names: set[str]) -> set[str]:
    """The modules of isopos that contain these names."""
    found = set()
    for parts in (name.split(".")[1:] for name in names if name.split(".")[0] == "isopos"):
        known = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        found.add(next((name for name in known if name in MODULES), "__init__"))
    return found


def layer(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return next(LEVEL[room] for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in LEVEL)


def test_imports_point_downward():
    found = set()
    for name in MODULES:
        level, rooms = layer(name)
        for other in own(imports(name)):
            below, others = layer(other)
            if below >= level and rooms != others:
                found.add((name, other))
    assert not found


def test_imports_have_no_circles():
    """All imports count, also within functions and for type checkers."""
    list(graphlib.TopologicalSorter({name: own(imports(name)) - {name} for name in MODULES}).static_order())


def test_every_kind_of_import_is_found():
    source = """
import isopos.lab.x
class A:
    from . import a
if TYPE_CHECKING:
    import b
def f():
    from isopos import cli
    from ..b import c
"""
    tree = ast.parse(source)
    everywhere = {"isopos.lab.x", "isopos.cli", "isopos.ops.a", "isopos.b.c", "b"}
    assert imported(list(ast.walk(tree)), "isopos.ops") == everywhere
    assert imported(at_import(tree), "isopos.ops") == {"isopos.lab.x", "isopos.ops.a"}


def test_the_core_needs_torch_and_numpy_alone():
    """Any other package is imported inside a function of its layer, or by one of `SUBCLASSES`."""
    allowed, found = {*sys.stdlib_module_names, "isopos", "torch", "numpy"}, {}
    for name in (name for name in MODULES if name.split(".")[0] != "lab"):
        more, ahead = ({"transformers"}, set()) if name in SUBCLASSES else (set(), SUBCLASSES)
        assert {module.split(".")[0] for module in imports(name, run=True)} <= allowed | more, name
        assert not own(imports(name, run=True)) & ahead, name
        found.setdefault(name.split(".")[0], set()).update({module.split(".")[0] for module in imports(name)} - allowed)
    assert {room: packages for room, packages in found.items() if packages} == PACKAGES


def test_help_needs_no_torch():
    """Neither the command line nor its imports from isopos import torch before a command runs."""
    seen, ahead = set(), {"cli", *own(imports("cli"))}
    while ahead - seen:
        name = (ahead - seen).pop()
        seen.add(name)
        found = imports(name, run=True)
        assert not any(module.split(".")[0] in ("torch", "lightning", "matplotlib") for module in found), name
        ahead |= own(found)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_isopos_does_not_import_torch():
    assert python("import sys, isopos; isopos.CATALOG; dir(isopos); sys.exit('torch' in sys.modules)").returncode == 0


ABSENT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("safetensors", "tyro", "rich", "matplotlib", "lightning", "torchmetrics", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_the_library_is_whole_without_the_extra_and_imports_neither_the_laboratory_nor_the_compiler():
    core = [name for name in MODULES if name.split(".")[0] not in ("lab", "__init__", "__main__")]
    core = [f"isopos.{name}" for name in core if name not in SUBCLASSES]
    done = python(f"""{ABSENT}
for name in {core}:
    importlib.import_module(name)
import isopos
for name in dir(isopos):
    assert getattr(isopos, name) is not None or name.startswith("__"), name
print(*(name for name in sys.modules if name.startswith("isopos.lab") or name == "torch._dynamo"), end="")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "start", ["from isopos.cli import main; main()", "import runpy; runpy.run_module('isopos', run_name='__main__')"]
)
def test_without_the_extra_the_command_line_says_what_to_install(start):
    done = python(f"{ABSENT}sys.argv = ['isopos', 'list']\n{start}")
    assert done.returncode == 2
    assert done.stderr == 'isopos: the command line needs tyro: pip install "isopos[lab]"\n'


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'rpoe'"):
        isopos.rpoe  # noqa: B018


def test_nothing_is_too_long():
    """Signatures and docstrings of functions do not count."""
    found = {name for name, path in MODULES.items() if len(path.read_text("utf-8").splitlines()) > MOST["module"]}
    for name in MODULES:
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = node.body[0] if ast.get_docstring(node) else None
                lines = [
                    n
                    for n in range(node.body[0].lineno, node.end_lineno + 1)
                    if not text or not text.lineno <= n <= text.end_lineno
                ]
                if len(lines) > MOST["function"]:
                    found.add(f"{name}.{node.name}")
    assert not found
