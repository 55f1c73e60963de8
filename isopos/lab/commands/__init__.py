"""The commands of `isopos`, one file each: `Options`, and `run(options, console)`, which returns the exit status.

Wrong options raise a ValueError before any work; its message names the option. It becomes one line, and exit status 2.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from isopos.lab.tasks.task import require

Options = TypeVar("Options")


def parse_known(kind: type[Options], arguments: Sequence[str]) -> Options:
    """Parse the options of a dataclass from a command line, ignoring all others."""
    return tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)[0]


def bounded(options: Any, **limits: int) -> None:
    """Raise a ValueError that names the first option above its limit."""
    for name, limit in limits.items():
        value = getattr(options, name)
        require(name, value, f"at most {limit:,}", value <= limit)
