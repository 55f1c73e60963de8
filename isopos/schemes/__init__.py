"""Presets: named choices of encoding, decay, feature map and denominator, a function each, in files by family.

Every function takes ``(head_dim, heads, **options)``. Besides its own options each takes those of `Choices`, so that the
encoding, the decay, the denominator, the feature map and the kind of attention stay independent of one another.
`register` makes a function one of them, in a file of this folder, which needs no mention elsewhere, or in a module of yours.
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
    """A scheme's function that was registered later."""
    if (function := REGISTRY.get(name.replace("_", "-"))) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return function
