"""Tasks by name. One of your own is MODULE:NAME, of a module in the working folder or installed."""

import difflib

from isopos.catalog import own_module
from isopos.lab.tasks.task import Task

__all__ = ["TASKS", "find", "spec"]

TASKS = {
    "language": "isopos.lab.tasks.language:Language",
    "bidirectional": "isopos.lab.tasks.bidirectional:Bidirectional",
    "listops": "isopos.lab.tasks.listops:ListOps",
}
"""Where each task is; imported when it is first used."""


def find(name: str) -> type[Task]:
    """The task of a name of `TASKS`, or of MODULE:NAME; or a ValueError where there is none.

    Example:
        >>> find("language")().unit
        'tokens'
    """
    module, _, attribute = TASKS.get(name, name).partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, TASKS, 1)
        meant = f", did you mean {near[0]}?" if near else ""
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, or MODULE:NAME, got {name!r}{meant}")
    found = getattr(own_module(module, "task"), attribute, None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ValueError(f"task: expected {name} to be a subclass of isopos.lab.tasks.task.Task, got {found!r}")
    return found


def spec(task: Task) -> str:
    """What `find` finds it by.

    Example:
        >>> spec(find("language")())
        'language'
    """
    kind = type(task)
    return kind.name if TASKS.get(kind.name) == (own := f"{kind.__module__}:{kind.__qualname__}") else own
