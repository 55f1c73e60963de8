"""Imports between the modules of isopos point downward only, and importing isopos is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isopos

ROOT = Path(isopos.__file__).parent
LAYERS = [
    {"exact", "trees", "catalog"},
    {"feature_maps"},
    {"ops"},
    {"positions"},
    {"maps", "terms", "state"},
    {"bases", "decays", "embeddings", "biases"},
    {"encodings"},
    {"couplings"},
    {"scheme"},
    {"schemes"},
    {"attention"},
    {"laws", "models"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
TORCH_FREE = [
    name for name in ("catalog.py", "cli.py", "lab/recipes/recipe.py", "lab/runs/folders.py") if (ROOT / name).exists()
]


def imports(tree: ast.AST, package: str) -> set[str]:
    """Dotted names of every module that a tree imports, wherever in it; ``from isopos import x`` counts as isopos.x."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def package(path: Path) -> str:
    return ".".join(("isopos", *path.parent.parts))


def test_every_module_has_a_layer():
    assert {path.parts[0].removesuffix(".py") for path in MODULES} <= set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_downward(path):
    own = path.parts[0].removesuffix(".py")
    parts = [name.split(".") for name in imports(parsed(path), package(path))]
    for _, *names in (p for p in parts if p[0] == "isopos"):
        assert names, f"{path} imports isopos itself"
        if names[0] in LEVEL and names[0] != own:
            assert LEVEL[names[0]] < LEVEL[own], f"{path} imports isopos.{'.'.join(names)}"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_module_level_is_free_of_torch(name):
    tree = parsed(Path(name))
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    needs_torch = {
        "torch",
        *(f"isopos.{module}" for module in LEVEL if f"{module}.py" not in TORCH_FREE and module != "lab"),
    }
    for module in imports(tree, package(Path(name))):
        assert not any(module == other or module.startswith(f"{other}.") for other in needs_torch), f"{name}: {module}"


def test_the_walk_sees_every_kind_of_import():
    source = "import isopos.lab.x\ndef f():\n    from isopos import cli\n    from . import a\n    from ..b import c\n"
    assert imports(ast.parse(source), "isopos.ops") == {"isopos.lab.x", "isopos.cli", "isopos.ops.a", "isopos.b.c"}


def test_importing_isopos_does_not_import_torch():
    code = "import sys, isopos; isopos.CATALOG; dir(isopos); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_lazy_name_exists():
    for name in set(isopos._HOME) | {module for module in isopos._MODULES if (ROOT / f"{module}.py").exists()}:
        assert getattr(isopos, name) is not None
        assert name in dir(isopos)
    with pytest.raises(AttributeError, match="no attribute 'rpoe'"):
        isopos.rpoe  # noqa: B018
