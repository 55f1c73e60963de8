"""`isopos recommend`: which scheme for which data, as far as the committed results show it."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from isopos.catalog import expect
from isopos.lab.reports import grids, recommendations
from isopos.lab.tasks.task import TASKS


@dataclass(frozen=True)
class Options:
    """Compare schemes for a kind of data by the committed results, with 95% intervals, numbers of seeds and data."""

    task: Annotated[str, tyro.conf.Positional] = ""  # Task, or a word of the question (trees); by default all answers.


def run(options: Options, console: Console) -> int:
    """Print the answers to all questions, or to those with a task or word, with the figures behind them."""
    questions = recommendations.load_questions()
    tasks, word = list(dict.fromkeys(each.task for each in questions)), options.task.lower()
    found = [each for each in questions if each.task == word] or [each for each in questions if word in each.text.lower()]
    if not found:
        expect("task with results", options.task, tasks)
    if word in TASKS and word not in tasks:
        grids.say(console, f"task {word}: no results; these answers have the word in their question")
    for question in found:
        grids.say(console, f"{question.task}: {question.text}", *(f"  {answer}" for answer in question.answers), "")
        if not word:
            continue
        console.print(grids.console_table(recommendations.SUMMARY, recommendations.summary(question), "lllllr"))
        for comparison in question.comparisons:
            rows, title = recommendations.cells(comparison), recommendations.caption(comparison)
            console.print()
            console.print(grids.console_table(recommendations.HEADER, rows, "llrrl", title=title))
        console.print()
    if not word:
        grids.say(console, f"isopos recommend TASK prints the figures: {', '.join(tasks)}")
    return 0
