"""Tasks by name; a custom task is MODULE:NAME, from a module in the working folder or an installed one."""

from isopos.lab.tasks.task import TASKS, find, spec

__all__ = ["TASKS", "find", "spec"]
