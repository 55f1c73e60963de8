"""The commands of `isopos`, a file each: `Options`, and `run(options, console)`, which returns the exit status.

What does not fit is a ValueError before any work, which names the option: one line for the user, and the exit status 2.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from isopos.lab.tasks.task import require

Options = TypeVar("Options")


def parse_known(kind: type[Options], arguments: Sequence[str]) -> Options:
    """Parse the options of a dataclass, and ignore all others: these decide which others there are."""
    return tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)[0]


def bounded(options: Any, **most: int) -> None:
    """Raise a ValueError that names the first of these options whose number is beyond reason."""
    for name, limit in most.items():
        value = getattr(options, name)
        require(name, value, f"at most {limit:,}", value <= limit)
