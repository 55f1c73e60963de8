"""The commands of `isopos`, one file each: `Options`, and `run(options, console)`, which returns the exit status.

Wrong options raise a ValueError before any work; its message names the option. It becomes one line, and exit status 2.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from isopos.lab.tasks.task import require
from isopos.spec import read, split_spec

Options = TypeVar("Options")


def parse_known(kind: type[Options], arguments: Sequence[str]) -> Options:
    """Parse the options of a dataclass from a command line, ignoring all others."""
    return tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)[0]


def bounded(options: Any, **limits: int) -> None:
    """Raise a ValueError that names the first option above its limit."""
    for name, limit in limits.items():
        value = getattr(options, name)
        require(name, value, f"at most {limit:,}", value <= limit)


def rule_of(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a rule for longer sequences: yarn:factor=4,fast=16."""
    name, texts = split_spec(spec, "extend")
    return name, {option: _rule_value(option, text) for option, text in texts.items()}


def _rule_value(option: str, text: str) -> Any:
    """Parse an option of a rule."""
    if option == "truncate" and text in ("true", "false"):
        return text == "true"
    piece = read(f"extend: {option}", text)
    if option == "rescale":
        return [part.number("numbers joined by +") for part in piece.split("+")]
    return int(text) if text.isdecimal() else piece.number("true or false" if option == "truncate" else "a number")
