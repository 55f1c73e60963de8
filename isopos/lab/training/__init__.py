"""Training of one run, from start or checkpoint to its result."""

from collections.abc import Callable

OnStep = Callable[[int, float, float], None]
"""Called after each step on the first process with the step, its loss in the task's unit, and units per second."""
