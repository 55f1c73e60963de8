"""Tasks by name; a task of your own is MODULE:NAME, of a module in the working folder or an installed one."""

from isopos.lab.tasks.task import TASKS, find, spec

__all__ = ["TASKS", "find", "spec"]
