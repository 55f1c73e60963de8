"""Test that every public method has a docstring, possibly inherited."""

import importlib
import inspect
import pkgutil
import sys

import isopos

MODULES = [
    name for _, name, _ in pkgutil.walk_packages(isopos.__path__, "isopos.") if not name.rpartition(".")[2].startswith("_")
]


def undocumented(cls):
    """Public methods and properties of a class without a docstring, including inherited docstrings."""
    fields = getattr(cls, "__dataclass_fields__", ())
    for name, member in vars(cls).items():
        member = getattr(member, "func", None) or getattr(member, "__func__", member)
        member = member.fget if isinstance(member, property) else member
        if name.startswith("_") or name in fields or not inspect.isfunction(member) or inspect.getdoc(member):
            continue
        if not any(name in vars(base) for base in cls.__mro__[1:]):
            yield f"{cls.__qualname__}.{name}"


def test_public_methods_are_documented():
    bare = []
    for name in MODULES:
        importlib.import_module(name)
        module = sys.modules[name]  # a package may show a function of that name
        classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
        public = (cls for cls in classes if not cls.__name__.startswith("_"))
        bare += [f"{name}.{method}" for cls in public for method in undocumented(cls)]
    assert not bare


def test_missing_docstrings_are_found():
    class Base:
        def documented(self):
            """Say so."""

        def bare(self):
            pass

    class Derived(Base):
        def documented(self):
            pass

        @property
        def size(self):
            return 1

    assert [*undocumented(Base)] == [f"{Base.__qualname__}.bare"]
    assert [*undocumented(Derived)] == [f"{Derived.__qualname__}.size"]
