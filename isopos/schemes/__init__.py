"""Presets: named combinations of encoding, decay, feature map and denominator, one function per scheme, one file per family.

Every function takes ``(head_dim, heads, **options)``. Options are the scheme's own and `Choices`; encoding,
decay, denominator, feature map and kind of attention are independent. `register` adds a function, from a file in this
folder, which is imported automatically, or from a module of yours.
"""

import importlib
import pkgutil
from collections.abc import Callable

from isopos.catalog import closest
from isopos.scheme import Choices, Scheme
from isopos.schemes.registry import REGISTRY, build, compose, options_of, register, resolve

__all__ = ["REGISTRY", "Choices", "Scheme", "build", "closest", "compose", "options_of", "register", "resolve"]

for _family in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_family}")
globals().update({function.__name__: function for function in REGISTRY.values()})  # even where a file has that name


def __getattr__(name: str) -> Callable[..., Scheme]:
    """The function of a scheme that was registered later."""
    if (function := REGISTRY.get(name.replace("_", "-"))) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return function
