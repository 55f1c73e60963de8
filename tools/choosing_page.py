"""Which scheme for which data: recommendations.json of `isopos recommend` and docs/choosing.md, from docs/results.

Each question names columns of tables. Intervals of differences to the best row hold for all
rows of a column at once (`isopos.lab.reports.findings`).
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from isopos.lab.reports import recommendations
from isopos.lab.reports.findings import ResultTable
from isopos.lab.reports.grids import markdown
from isopos.lab.reports.intervals import Difference
from isopos.lab.reports.recommendations import Comparison, Question, SchemeRow
from isopos.lab.tasks.attentions import BASELINES
from isopos.schemes import REGISTRY

__all__ = ["answers", "content", "overview", "questions", "untrained"]

OVERVIEW = ("data", "best, or close to the best (on so many data sets)", "data sets")
DRAWN = {"": "drawn by the task", "built-in": "drawn expressions"}  # data without a name of their own
SOURCES = {"random trees": "random trees", "random symbols": "random symbols", "sst-": "SST's trees"}  # by prefix: some have
SOURCES |= dict.fromkeys(("listops-copy", "listops-mirror"), "ListOps' trees")  # a file for each operation
NAMED = 2  # schemes of an experiment in the overview
SOFTMAX = "attention=softmax"
GRAPHS = ("newer-graphs", "newer-graphs-us-counties", "newer-graphs-wordnet")
PATCHED = ("newer-patched", "newer-patched-shakespeare", "newer-patched-wikitext2")
PHOTOGRAPHS = ("newer-scenes-cifar10", "newer-scenes-tiny-imagenet")
SERIES = ("newer-series", "newer-series-elecdemand", "newer-series-weather")
MASKED = ("lrpe-1", "lrpe-1-shakespeare", "lrpe-1-novels")
MASKED_DECAYS = ("newer-masked-shakespeare", "newer-masked-wikitext2", "newer-masked-novels")
QUESTIONS = (  # task, data and attention, kind of attention or "" for both, columns of tables
    (
        "language",
        "Text from left to right, linear attention",
        "linear",
        {
            "lrpe-2": ("WikiText-103 test", "Books test"),
            "permuteformer-4": ("WikiText-103 test",),
            "newer-text-rates": ("linear", "decay"),
            "newer-text-shakespeare": ("linear", "decay"),
            "newer-text-wikitext2": ("linear", "decay"),
        },
    ),
    (
        "language",
        "Text from left to right, softmax attention",
        "softmax",
        {"newer-text-rates": ("softmax",), "newer-text-shakespeare": ("softmax",), "newer-text-wikitext2": ("softmax",)}
        | dict.fromkeys(PATCHED, ("from the start",)),
    ),
    (
        "language",
        "Text, linear attention, positions that may depend on tokens",
        "linear",
        {"newer-content": ("linear",), "newer-content-shakespeare": ("linear",), "newer-content-wikitext2": ("linear",)},
    ),
    (
        "language",
        "Text, softmax attention, positions that may depend on tokens",
        "softmax",
        {"newer-content": ("softmax",), "newer-content-shakespeare": ("softmax",), "newer-content-wikitext2": ("softmax",)},
    ),
    (
        "language",
        "Windows of text longer than in training",
        "",
        {
            "lengths": ("4,096", "16,384"),
            "newer-text-rates": ("linear, 4x", "decay, 4x", "softmax, 4x"),
            "newer-text-shakespeare": ("linear, 4x", "decay, 4x", "softmax, 4x"),
            "newer-text-wikitext2": ("linear, 4x", "decay, 4x", "softmax, 4x"),
            "newer-content": ("linear, 4x", "softmax, 4x"),
            "newer-content-shakespeare": ("linear, 4x", "softmax, 4x"),
            "newer-content-wikitext2": ("linear, 4x", "softmax, 4x"),
        },
    ),
    (
        "language",
        "Text, softmax attention, an encoding that replaces rope after training",
        "softmax",
        dict.fromkeys(PATCHED, ("patched",)),
    ),
    (
        "language",
        "Windows longer than in training, an encoding that replaces rope after training",
        "softmax",
        dict.fromkeys(PATCHED, ("patched, 4x",)),
    ),
    ("masked", "Text read in both directions", "", dict.fromkeys(MASKED_DECAYS, ("loss",))),
    ("masked", "Text read in both directions, a decay for one row only", "", dict.fromkeys(MASKED, ("Loss",))),
    ("glue", "Labels of sentences, after such a training", "", {"lrpe-1": ("SST-2", "RTE", "CoLA", "STS-B")}),
    (
        "text",
        "Labels of long texts, read as bytes",
        "",
        {"lrpe-4": ("Text",), "permuteformer-1": ("Text",), "lrpe-4-packages": ("Text",), "lrpe-4-authors": ("Text",)},
    ),
    (
        "listops",
        "Nested expressions, read as a sequence",
        "",
        dict.fromkeys(("lrpe-4", "lrpe-4-listops-d20s", "lrpe-4-listops-d8"), ("ListOps",)),
    ),
    (
        "images",
        "Images",
        "",
        {"newer-images": ("held out",), "ape-3": ("@300 test",), "lrpe-3": ("accuracy",)},
    ),
    (
        "images",
        "Images, each pixel a token",
        "",
        dict.fromkeys(("lrpe-4", "permuteformer-1", "lrpe-4-mnist", "lrpe-4-fashion-mnist"), ("Image",)),
    ),
    (
        "images",
        "Images whose content moves after training",
        "",
        {
            "horn-shift": ("MNIST, 4 px", "MNIST, 8 px"),
            "horn-shift-fashion-mnist": ("Fashion, 4 px", "Fashion, 8 px"),
            "horn-shift-tiny-imagenet": ("Tiny-ImageNet, 4 px", "Tiny-ImageNet, 8 px"),
        },
    ),
    (
        "images",
        "Images at other resolutions than in training, softmax attention",
        "softmax",
        {
            "newer-resolutions": [
                f"{title}, {side} px" for side in (48, 64) for title in ("MNIST", "Fashion", "Tiny-ImageNet")
            ]
        },
    ),
    (
        "scenes",
        "Images of several cameras, softmax attention",
        "",
        dict.fromkeys(("newer-scenes", *PHOTOGRAPHS), ("softmax",)),
    ),
    ("scenes", "Images of several cameras, each pixel's ray an input", "", {"newer-scenes": ("softmax, rays",)}),
    (
        "scenes",
        "Images of several cameras, linear attention",
        "",
        dict.fromkeys(("newer-scenes", *PHOTOGRAPHS), ("linear",)),
    ),
    ("graphs", "Nodes of graphs, linear attention", "", dict.fromkeys(GRAPHS, ("linear",))),
    ("graphs", "Nodes of graphs, softmax attention", "", dict.fromkeys(GRAPHS, ("softmax",))),
    (
        "series",
        "Series with a daily cycle",
        "",
        dict.fromkeys(SERIES, ("MAE, times",)),
    ),
    ("transduction", "Sequences to copy, reverse or repeat", "", {"ape-1": ("Copy", "Reverse", "Repeat")}),
    (
        "tree-transduction",
        "Trees to copy, mirror, reduce or take apart",
        "",
        {
            "ape-2": ("Copy, depth", "Reorder, depth", "C3, depth", "TreeOps, depth"),
            "ape-2-sst": ("Copy, depth", "Reorder, depth"),
            "ape-2-listops": ("Copy, depth", "Reorder, depth"),
        },
    ),
)


def questions(tables: Sequence[ResultTable]) -> list[Question]:
    """All questions with their comparisons."""
    by_name = {table.name: table for table in tables}
    return [
        Question(
            task, text, [_comparison(by_name[name], column, kind) for name, titles in columns.items() for column in titles]
        )
        for task, text, kind, columns in QUESTIONS
    ]


def _comparison(table: ResultTable, title: str, kind: str) -> Comparison:
    layout = table.layout
    column = next(each for each in layout.columns if each.title == title)
    schemes = {row: row for row in table.ours[title]} | {row.name: row.on(column.corpus) for row in layout.rows}
    ours = {row: figure for row, figure in table.ours[title].items() if _is_of(kind, schemes[row])}
    order = table.sort(title, {row: mean for row, (mean, _) in ours.items()})
    leads = table.leads(title, order)
    rows = [SchemeRow(row, schemes[row], *_numbers(ours[row]), *_behind(leads.get(row))) for row in order]
    metric = layout.metric(column)
    figure = f"{metric.note or metric.figure}, {metric.better} is better"
    data = _source(table.content["data"].get(column.corpus, column.corpus))
    return Comparison(table.name, title, data, figure, table.seeds, table.rates, rows)


def _source(data: str) -> str:
    """The name of a data set, the same for all operations on it."""
    return next((name for prefix, name in SOURCES.items() if data.startswith(prefix)), DRAWN.get(data, data))


def _is_of(kind: str, scheme: str) -> bool:
    """Whether a row is a scheme with this kind of attention, and no baseline."""
    if any(f"attention={name}" in scheme for name in BASELINES):
        return False
    return not kind or (SOFTMAX in scheme) is (kind == "softmax")


def _numbers(figure: tuple[float, float]) -> tuple[float, float | None]:
    mean, spread = figure
    return mean, None if math.isnan(spread) else spread


def _behind(lead: Difference | None) -> tuple[float, float | None]:
    if lead is None:  # the best row
        return 0.0, None
    return float(f"{lead.mean:.6g}"), None if math.isnan(lead.half) else float(f"{lead.half:.6g}")


def untrained(tables: Sequence[ResultTable]) -> str:
    """Names of the schemes that no row of a table of training has."""
    rows = {
        row.on(column.corpus).partition(":")[0]
        for table in tables
        for column in (() if table.timed else table.layout.columns)
        for row in table.layout.rows
        if row.name in table.ours.get(column.title, {})
    }
    return ", ".join(f"`{name}`" for name in REGISTRY if name not in rows)


def content(known: Sequence[Question]) -> str:
    """The file recommendations.json."""
    text = json.dumps([asdict(question) for question in known], indent=1, ensure_ascii=False)
    return re.sub(r"\{[^{}]*\}", lambda row: re.sub(r"\n *", " ", row[0]), text) + "\n"  # rows without line breaks


def answers(known: Sequence[Question]) -> str:
    """The generated part of docs/choosing.md."""
    return "\n".join(("", *(line for question in known for line in _section(question))))


def overview(known: Sequence[Question]) -> str:
    """The generated table of all answers at the top of docs/choosing.md."""
    lines = []
    for question in known:
        found = []
        for each in question.experiments:
            leaders = [f"`{row.scheme}`" for row in each.leaders]
            more = f" and {len(leaders) - NAMED} more" if len(leaders) > NAMED else ""
            found += [f"{', '.join(leaders[:NAMED])}{more} ({len(each.data_sets)})"] if leaders else []
        sets = len({each.data for each in question.comparisons})
        anchor = "".join(letter for letter in question.text.lower() if letter.isalnum() or letter in " -").replace(" ", "-")
        lines.append(
            (f"[{question.text}](#{anchor})", "; ".join(found) or "none: it depends on the data, or is not shown", f"{sets}")
        )
    return f"\n{markdown(OVERVIEW, lines, 'llr')}\n"


def _section(question: Question) -> Iterator[str]:
    yield from (f"## {question.text}", "", *(f"- {answer}" for answer in question.answers), "")
    yield from (markdown(recommendations.SUMMARY, recommendations.summary(question), "lllllr"), "")
    for comparison in question.comparisons:
        yield f'<details markdown="1"><summary>{recommendations.caption(comparison)}</summary>'
        yield from ("", markdown(recommendations.HEADER, recommendations.cells(comparison), "llrrl"), "", "</details>", "")
    yield from (f"    isopos recommend {question.task}", "")
