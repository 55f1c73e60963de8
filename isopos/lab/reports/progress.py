"""Progress of runs: bars on a terminal; in a log file, a batch job or CI, a line at the start, every tenth and the end."""

import datetime
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isopos.lab.runs.files import printable

PARTS = 10  # lines of a run, after its first
Show = Callable[..., None]


class Bars:
    """Bars or lines on a console, while it is entered.

    Args:
        console: Where to print.
        total: Steps of all runs, which then share one bar that goes when they have ended; by default each has its own.

    Examples:
        >>> with Bars(Console(width=100)) as bars:
        ...     show = bars.add("rope", 250, "bits/byte")
        ...     show(250, 3.2, 25_000.0)
        rope: 0/250
        rope: 250/250, 3.200 bits/byte, 25,000 tokens/s
    """

    def __init__(self, console: Console, total: int | None = None):
        columns = (TextColumn("{task.description:<32}", markup=False), BarColumn(20), MofNCompleteColumn())
        texts = (TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        self.lines = not console.is_interactive
        self.progress = Progress(*columns, *texts, console=console, transient=total is not None, disable=self.lines)
        self.total = total
        self.shared = None if total is None else self.progress.add_task("", total=total, loss="", rate="")
        self._line = ""  # of the run in progress, where it is not printed yet

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._print()
        self.progress.stop()

    def _print(self) -> None:
        if self.lines and self._line:
            self.progress.console.print(printable(self._line), markup=False, highlight=False, soft_wrap=True)
        self._line = ""

    def add(self, title: str, steps: int, unit: str = "", rate_unit: str = "tokens/s", *, before: int = 0) -> Show:
        """What shows a step of a run: a function of its number and, where there are such, its loss and its rate.

        Where all runs share a bar, `before` are the steps of others before it.
        """
        self._print()  # the last step of the run before, which may have ended before its time
        task = self.progress.add_task(title, total=steps, loss="", rate="") if self.shared is None else self.shared
        self.progress.update(task, description=title, completed=before)
        self._line, printed, start = f"{title}: 0/{steps}", 0, None

        def show(step: int, loss: float | None = None, rate: float | None = None) -> None:
            nonlocal printed, start
            shown = "" if loss is None else f"{loss:.3f} {unit}"
            speed = "" if rate is None else f"{rate:,.0f} {rate_unit}"
            self.progress.update(task, completed=before + step, loss=shown, rate=speed)
            start = start or (step, time.monotonic())  # a run that is resumed does not start at 0
            left = _left(start, step, (self.total or steps) - before)
            self._line = ", ".join(filter(None, (f"{title}: {step}/{steps}", shown, speed, left)))
            if step * PARTS // steps > printed:
                printed = step * PARTS // steps
                self._print()

        self._print()
        return show


def _left(start: tuple[int, float], step: int, steps: int) -> str:
    """The time that is left at the mean speed since a step and its time."""
    if step in (start[0], steps):
        return ""
    seconds = (steps - step) * (time.monotonic() - start[1]) / (step - start[0])
    return f"{datetime.timedelta(seconds=round(seconds))} left"
