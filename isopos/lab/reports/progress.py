"""Progress of training on a console: a bar a run, with its loss and its speed."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bars"]


class Bars:
    """Bars on a console, while it is entered.

    Example:
        >>> with Bars(Console(width=100)) as bars:
        ...     show = bars.add("rope", 250, "bits/byte")
        ...     show(250, 3.2, 25_000.0)
        rope   ... 250/250 3.200 bits/byte 25,000 tokens/s ...
    """

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description:<32}"), BarColumn(20), MofNCompleteColumn())
        fields = (TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, *fields, console=console)

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def add(self, title: str, steps: int, unit: str) -> Callable[[int, float, float], None]:
        """A bar, and what shows a step on it: its number, its loss in bits a token and the tokens a second."""
        task = self.progress.add_task(title, total=steps, loss="", rate="")

        def show(step: int, bits: float, rate: float) -> None:
            self.progress.update(task, completed=step, loss=f"{bits:.3f} {unit}", rate=f"{rate:,.0f} tokens/s")

        return show
