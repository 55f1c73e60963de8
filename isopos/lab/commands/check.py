"""`isopos check`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from isopos.catalog import CATALOG, own_module
from isopos.lab.commands import bounded
from isopos.lab.runs.files import printable
from isopos.spec import read, split_spec

if TYPE_CHECKING:
    from isopos.couplings import Coupling
    from isopos.scheme import Scheme

UNMEASURED = 3  # exit status if the user's code raises


@dataclass(frozen=True)
class Options:
    """Measure the laws of a scheme, or of your own encoding.

    Exit status: 0 if all hold; 1 if one fails, with a counterexample; 3 if your code raises.
    """

    subject: Annotated[str, tyro.conf.Positional]
    """Scheme with options (rope:decay=retnet), or MODULE:NAME of an encoding, a class, or a function without arguments."""
    head_dim: int = 16  # Features per head of a scheme.
    heads: int = 4  # Number of heads of a scheme.
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """dtype of queries and keys for the law of precision."""


def run(options: Options, console: Console) -> int:
    """Print the report of `isopos.laws.check`."""
    import torch

    from isopos import laws
    from isopos.laws.checks import raised_at

    bounded(options, head_dim=65_536, heads=4_096)
    try:
        subject = _subject(options)
    except (Exception, SystemExit) as error:
        if not (where := raised_at(error)):
            raise  # our own error message
        print(printable(f"{options.subject}: could not be measured: {type(error).__name__}: {error}{where}"))
        return UNMEASURED
    report = laws.check(subject, dtype=getattr(torch, options.dtype))
    print(replace(report, subject=printable(options.subject)))
    return UNMEASURED if report.unmeasured else 0 if report.holds else 1


def _subject(options: Options) -> "Coupling | Scheme":
    """The scheme of a name; or an attribute of a module, called if it is a class or function."""
    from isopos.couplings import Coupling
    from isopos.scheme import Scheme
    from isopos.schemes import build, closest

    whole, entry = read("subject", options.subject).cut(":")
    name, attribute = whole.text, entry.text if entry else ""
    if name in CATALOG or not attribute or "=" in attribute:
        scheme, choices = split_spec(options.subject)
        return build(scheme, options.head_dim, options.heads, choices)
    module = own_module(name, "subject")
    classes = [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Coupling)]
    if not hasattr(module, attribute):
        known = closest(attribute, classes) if classes else "it has no encoding"
        raise ValueError(f"subject: {name} has no {attribute!r}: {known}")
    subject = getattr(module, attribute)
    try:
        subject = subject() if callable(subject) and not isinstance(subject, (Coupling, Scheme)) else subject
    except TypeError as error:
        registered = f", or, if it is registered, check {name}.{attribute}"
        raise ValueError(
            f"subject: expected {options.subject} to need no arguments, got: {error}; give them defaults{registered}"
        ) from None
    if not isinstance(subject, (Coupling, Scheme)):
        kind = "nothing" if subject is None else type(subject).__name__
        raise ValueError(f"subject: expected {options.subject} to be an Encoding or a Scheme, or to return one, got {kind}")
    return subject
