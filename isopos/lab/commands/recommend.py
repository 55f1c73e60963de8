"""`isopos recommend`: which scheme for which data, as far as the committed results show it."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from isopos.catalog import expect
from isopos.lab.reports import grids, recommendations


@dataclass(frozen=True)
class Options:
    """Compare schemes for a task by the committed results, with 95% intervals, numbers of seeds and data."""

    task: Annotated[str, tyro.conf.Positional] = ""  # Task of the laboratory; by default all tasks, answers only.


def run(options: Options, console: Console) -> int:
    """Print the answers to all questions, or to those about a task with the figures behind them."""
    questions = recommendations.load_questions()
    tasks = list(dict.fromkeys(each.task for each in questions))
    if options.task:
        expect("task with results", options.task, tasks)
    for question in questions:
        if options.task in ("", question.task):
            grids.say(console, f"{question.task}: {question.text}", f"  {question.answer}", "")
            for comparison in question.comparisons if options.task else ():
                rows = recommendations.cells(comparison)
                console.print(
                    grids.console_table(recommendations.HEADER, rows, "llrrl", title=recommendations.caption(comparison))
                )
                console.print()
    if not options.task:
        grids.say(console, f"isopos recommend TASK prints the figures: {', '.join(tasks)}")
    return 0
