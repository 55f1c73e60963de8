"""Deprecated names: available for one version, with a warning that states the new name."""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` that finds renamed objects.

    Args:
        module: The module's ``__name__``.
        names: Full new name by old name, such as "isopos.spec.split_spec".

    Examples:
        >>> old = renamed("isopos.lab.recipes", {"cut": "isopos.spec.split_spec"})
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     old("cut")("rope:base=100")
        ('rope', {'base': '100'})
        >>> print(caught[0].message)
        isopos.lab.recipes.cut is isopos.spec.split_spec now; the old name goes in the next version
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} is {names[name]} now; the old name goes in the next version", DeprecationWarning, stacklevel=2
        )
        home, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(home), new)

    return __getattr__


def renamed_argument(old: str, new: str) -> Callable[[Function], Function]:
    """A decorator for functions whose argument `new` was called `old`, as a keyword only."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def renaming(*arguments: Any, **options: Any) -> Any:
            if old in options:
                message = f"argument {old} is {new} now; the old name goes in the next version"
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*arguments, **options)

        return renaming  # pyright: ignore[reportReturnType]

    return decorate


def former_argument(others: dict[str, Any], old: str, new: str, value: Any) -> Any:
    """The value of argument `new`, or the one passed as `old` among other keyword arguments, with a warning."""
    if old not in others:
        return value
    warnings.warn(f"argument {old} is {new} now; the old name goes in the next version", DeprecationWarning, stacklevel=3)
    return others.pop(old)


def former_property(old: str, new: str) -> Any:
    """A property that returns the attribute `new`, with a warning."""

    def read(instance: Any) -> Any:
        message = f"{type(instance).__name__}.{old} is {new} now; the old name goes in the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(instance, new)

    read.__doc__ = f"Deprecated name of `{new}`."
    return property(read)
