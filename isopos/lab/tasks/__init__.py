"""Tasks by name. One of your own is MODULE:NAME, of a module in the working folder or installed."""

from isopos.lab.tasks.task import TASKS, find, spec

__all__ = ["TASKS", "find", "spec"]
