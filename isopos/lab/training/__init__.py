"""One run from start or checkpoint to result."""

from collections.abc import Callable

OnStep = Callable[[int, float, float], None]
"""Hears of a step, its loss as the task shows it, and the task's units a second, on the first process."""
