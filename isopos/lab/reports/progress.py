"""Progress of runs: bars on a terminal; lines elsewhere, at the start, every tenth of the steps and the end."""

import datetime
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isopos.lab.runs.files import printable

PARTS = 10  # lines per run, after its first
Show = Callable[..., None]


class Bars:
    """Progress bars, or lines, on a console within the context.

    Args:
        total: Steps of all runs, to show one bar for all that vanishes at the end; by default each run has a bar.

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
        self._line = ""  # of the current run, if not printed yet

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._print()
        self.progress.stop()

    def add(
        self, title: str, steps: int, unit: str = "", rate_unit: str = "tokens/s", *, before: int = 0, done: int = 0
    ) -> Show:
        """Start the progress of a run; return a function that shows a step with, optionally, its loss and rate.

        If all runs share a bar, `before` is the number of steps of earlier runs; `done` is that of steps of this one.
        """
        self._print()  # last step of the previous run, which may have ended early
        task = self.progress.add_task(title, total=steps, loss="", rate="") if self.shared is None else self.shared
        self.progress.update(task, description=title, completed=before + done)
        self._line, printed, start = f"{title}: {done}/{steps}", done * PARTS // steps, None

        def show(step: int, loss: float | None = None, rate: float | None = None) -> None:
            nonlocal printed, start
            loss_text = "" if loss is None else f"{loss:.3f} {unit}"
            rate_text = "" if rate is None else f"{rate:,.0f} {rate_unit}"
            self.progress.update(task, completed=before + step, loss=loss_text, rate=rate_text)
            start = start or (step, time.monotonic())  # a resumed run does not start at 0
            remaining = _remaining(start, step, (self.total or steps) - before)
            self._line = ", ".join(filter(None, (f"{title}: {step}/{steps}", loss_text, rate_text, remaining)))
            if step * PARTS // steps > printed:
                printed = step * PARTS // steps
                self._print()

        self._print()
        return show

    def _print(self) -> None:
        if self.lines and self._line:
            self.progress.console.print(printable(self._line), markup=False, highlight=False, soft_wrap=True)
        self._line = ""


def _remaining(start: tuple[int, float], step: int, steps: int) -> str:
    """Remaining time at the mean speed since `start`, a step and its time."""
    if step in (start[0], steps):
        return ""
    seconds = (steps - step) * (time.monotonic() - start[1]) / (step - start[0])
    return f"{datetime.timedelta(seconds=round(seconds))} left"
