"""`isopos check`."""

import linecache
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from isopos.catalog import CATALOG, own_module
from isopos.lab.commands import bounded
from isopos.lab.recipes import split_spec
from isopos.lab.runs.files import printable

if TYPE_CHECKING:
    from isopos.encodings import Encoding
    from isopos.scheme import Scheme

__all__ = ["UNMEASURED", "Options", "run"]

UNMEASURED = 3  # the exit status where the user's own code raises


@dataclass(frozen=True)
class Options:
    """Measure the laws of a scheme, or of your own encoding.

    Exits with 1 where one is broken, naming it with an example, and with 3 where what your code raises leaves it open.
    """

    subject: Annotated[str, tyro.conf.Positional]
    """A scheme with options (rope:decay=retnet), or MODULE:NAME of an encoding, or of what makes one without arguments."""
    head_dim: int = 16  # Head size of a scheme.
    heads: int = 4  # Heads of a scheme.
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """dtype of the queries and keys whose precision is measured."""


def run(options: Options, console: Console) -> int:
    """Print what `isopos.laws` finds."""
    import torch

    from isopos import laws

    bounded(options, head_dim=65_536, heads=4_096)
    subject = None
    try:
        subject = _subject(options)
        report = laws.check(subject, dtype=getattr(torch, options.dtype))
    except (Exception, SystemExit) as error:  # whatever the user's code does
        where = _raised_at(error)
        if not where and (subject is None or str(error).startswith("subject:")):
            raise  # an answer of ours
        what = f"{type(error).__name__}: {error}"
        print(printable(f"{options.subject}: could not be measured: {what}{where}"))
        return UNMEASURED
    print(replace(report, subject=printable(options.subject)))
    return 0 if report.holds else 1


def _raised_at(error: BaseException) -> str:
    """The innermost line that an exception passed of neither isopos nor what it stands on; empty where there is none."""
    below = {"isopos", "torch", "numpy", *sys.stdlib_module_names}
    lines = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in below:
            file = frame.f_code.co_filename
            lines = f" ({file}, line {number}: {linecache.getline(file, number).strip()})"
    return lines


def _subject(options: Options) -> "Encoding | Scheme":
    """The scheme of that name; or what is called so in a module, or what that class or factory makes."""
    from isopos.encodings import Encoding
    from isopos.scheme import Scheme
    from isopos.schemes import build, closest

    name, _, attribute = options.subject.partition(":")
    if name in CATALOG or not attribute or "=" in attribute:
        scheme, choices = split_spec(options.subject)
        return build(scheme, options.head_dim, options.heads, choices)
    module = own_module(name, "subject")
    own = {name: None for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Encoding)}
    if not hasattr(module, attribute):
        raise ValueError(f"subject: {name} has no {attribute!r}: {closest(attribute, own or {'nothing': None})}")
    made = getattr(module, attribute)
    try:
        made = made() if callable(made) and not isinstance(made, (Encoding, Scheme)) else made
    except TypeError as error:
        raise ValueError(f"subject: expected {options.subject} to need no arguments, got: {error}") from None
    if not isinstance(made, (Encoding, Scheme)):
        raise ValueError(f"subject: expected {options.subject} to make an Encoding or a Scheme, got {type(made).__name__}")
    return made
