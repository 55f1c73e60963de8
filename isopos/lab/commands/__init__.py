"""The commands of `isopos`, a file each: `Options`, and `run(options, console)`, which returns the exit status.

What does not fit is a ValueError before any work, which names the option: one line for the user, and the exit status 2.
"""

from typing import Any

from isopos.lab.tasks.task import require

__all__ = ["bounded"]


def bounded(options: Any, **most: int) -> None:
    """Raise a ValueError that names the first of these options whose number is beyond reason."""
    for name, limit in most.items():
        value = getattr(options, name)
        require(name, value, f"at most {limit:,}", value <= limit)
