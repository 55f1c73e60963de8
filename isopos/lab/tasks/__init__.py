"""Tasks by name. One of your own is MODULE:NAME, of a module in the working folder or installed."""

from isopos.catalog import expect, own_module
from isopos.lab.tasks.task import Task

__all__ = ["TASKS", "find", "spec"]

TASKS = {
    "language": "isopos.lab.tasks.language:Language",
    "bidirectional": "isopos.lab.tasks.bidirectional:Bidirectional",
    "masked": "isopos.lab.tasks.masked:Masked",
    "glue": "isopos.lab.tasks.glue:Glue",
    "listops": "isopos.lab.tasks.listops:ListOps",
    "text": "isopos.lab.tasks.text:TextClasses",
    "trees": "isopos.lab.tasks.trees:TreeClasses",
    "pathfinder": "isopos.lab.tasks.pathfinder:Pathfinder",
    "images": "isopos.lab.tasks.images:Images",
    "series": "isopos.lab.tasks.series:Forecast",
    "transduction": "isopos.lab.tasks.transduction:Transduction",
    "tree-transduction": "isopos.lab.tasks.tree_transduction:TreeTransduction",
}
"""Where each task is; imported when it is first used."""


def find(name: str) -> type[Task]:
    """The task of a name of `TASKS`, or of MODULE:NAME; or a ValueError where there is none.

    Examples:
        >>> find("language")().unit
        'tokens'
    """
    module, _, attribute = TASKS.get(name, name).partition(":")
    if not attribute:
        expect("task", name, (*TASKS, "MODULE:NAME"))
    found = getattr(own_module(module, "task"), attribute, None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ValueError(f"task: expected {name} to be a subclass of isopos.lab.tasks.task.Task, got {found!r}")
    return found


def spec(task: Task) -> str:
    """What `find` finds it by.

    Examples:
        >>> spec(find("language")())
        'language'
    """
    kind = type(task)
    return kind.name if TASKS.get(kind.name) == (own := f"{kind.__module__}:{kind.__qualname__}") else own
