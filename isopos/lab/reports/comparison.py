"""The table of a comparison, read from its folder: means over seeds, and differences with intervals. No torch here."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from isopos.lab import tasks
from isopos.lab.recipes import Recipe
from isopos.lab.reports import grids
from isopos.lab.reports.intervals import MIN_SEEDS, NOTE, Difference, to_best
from isopos.lab.runs.files import damaged, read_json
from isopos.lab.runs.folders import Result, data_fingerprint, read_recipe, read_run
from isopos.lab.tasks.task import Task
from isopos.spec import join_spec, of_layers, split_spec

FILE = "comparison.json"
WORDS = {"attention": "attention", "decay": "decay", "denominator": "denominator", "feature_map": "features"}


@dataclass(frozen=True)
class Run:
    """A run of a comparison: its training rows, and its result if it has ended."""

    folder: Path
    recipe: Recipe
    training: list[dict[str, Any]]
    result: Result | None


@dataclass(frozen=True)
class RankedRow:
    """Results of a scheme: of all its runs, of the compared seeds, and its difference to the best scheme."""

    scheme: str
    results: Sequence[Result]
    paired: Sequence[Result]
    difference: Difference | None
    speed: float | None

    @property
    def status(self) -> str:
        """Status of the first run that did not finish, else "finished"."""
        return next((result.status for result in self.results if result.status != "finished"), "finished")


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read comparison.json, also in the older format of language models."""

    def convert(values: dict[str, Any]) -> dict[str, Any]:
        if "text" in values:
            values |= {"task": "language", "data": values["text"], "summary": f"{values['bytes']:,} bytes"}
        return {"speed": {}, "chance": None} | values

    texts = dict.fromkeys(("task", "data", "sha256", "summary", "torch", "device"), str)
    kinds = texts | {"threads": int, "planned": list[str], "complete": bool, "speed": dict[str, float]}
    kinds["chance"] = tuple[float, int] | None
    return read_json(folder / FILE, kinds, "put it right, or compare again under another --name", convert)


def read_runs(folder: Path) -> list[Run]:
    """Read all runs of a comparison in order of their start; ValueError if a file is damaged or a run has other data."""
    runs, sha256 = [], read_comparison(folder)["sha256"]
    for path in sorted(folder.glob("*/recipe.json"), key=lambda p: p.stat().st_mtime_ns):
        run = path.parent
        recipe = read_recipe(run)
        rows, result = read_run(run, recipe)
        if (other := data_fingerprint(run)) not in ("", sha256):
            reason = f"sha256: expected the hash of the data in {folder / FILE}, {sha256[:12]}, got {other[:12]}"
            damaged(run / "data.json", reason, "put it right, or compare again under another --name")
        runs.append(Run(run, recipe, [row for row in rows if "loss" in row], result))
    return runs


def ranking(folder: Path) -> "Ranking":
    """Rank the schemes of a comparison, best first, unfinished ones last."""
    about, runs = read_comparison(folder), read_runs(folder)
    task = runs[0].recipe.task if runs else tasks.find(about.get("task", "language"))()
    main, by_scheme = task.metrics[0], {}
    for run in runs:
        if run.result:
            by_scheme.setdefault(run.recipe.scheme, {})[run.recipe.seed] = run.result
    finished = {
        name: set(results) for name, results in by_scheme.items() if all(r.status == "finished" for r in results.values())
    }
    # an interrupted comparison ranks by the seeds that all schemes without a failure have: runs stay paired
    shared = set.intersection(*finished.values()) if finished else set()

    def rank(scheme: str) -> float:
        if scheme not in finished or not shared:
            return float("inf")
        values = [by_scheme[scheme][seed].scores[main.title] for seed in shared]
        found = [value for value in values if value is not None]
        return main.rank(statistics.mean(found)) if len(found) == len(values) else float("inf")

    ordered = sorted(by_scheme, key=rank)
    best, speed = by_scheme[ordered[0]] if ordered else {}, about.get("speed", {})
    seeds = {scheme: sorted(shared & {*by_scheme[scheme]}) for scheme in ordered}
    values: dict[str, list[float]] = {}
    for scheme, results in ((scheme, by_scheme[scheme]) for scheme in ordered):
        pairs = [(results[seed].scores[main.title], best[seed].scores[main.title]) for seed in seeds[scheme]]
        values[scheme] = [a - b for a, b in pairs if a is not None and b is not None]
    differences = to_best({scheme: values[scheme] for scheme in ordered[1:] if values[scheme]})
    differences |= {scheme: Difference.paired(values[scheme]) for scheme in ordered[:1] if values[scheme]}  # to itself
    rows = [
        RankedRow(
            scheme,
            [*by_scheme[scheme].values()],
            [by_scheme[scheme][seed] for seed in seeds[scheme]],
            differences.get(scheme),
            speed.get(scheme),
        )
        for scheme in ordered
    ]
    return Ranking(task, rows, about.get("chance"))


@dataclass(frozen=True)
class Ranking:
    """Rows of a comparison, best first."""

    task: Task
    rows: Sequence[RankedRow]
    chance: tuple[float, int] | None = None  # figure of a constant answer, and number of scored samples

    @property
    def above_chance(self) -> bool:
        """Whether the best row is above chance by more than sampling noise, corrected for the number of rows."""
        scores = [result.scores[self.task.metrics[0].title] for row in self.rows[:1] for result in row.paired]
        values = [score for score in scores if score is not None]
        if self.chance is None or not values:
            return True
        share, count = self.chance
        noise = (share * (1 - share) / count) ** 0.5
        return statistics.mean(values) - share > statistics.NormalDist().inv_cdf(1 - 0.025 / len(self.rows)) * noise

    @property
    def leads(self) -> bool:
        """Whether the first row is highlighted: it is above chance and, as far as its seeds show, differs from some row."""
        others = [row.difference for row in self.rows[1:] if row.difference is not None]
        return self.above_chance and any(
            other.excludes_zero if other.seeds >= MIN_SEEDS else other.mean != 0 for other in others
        )

    @property
    def numbers(self) -> tuple[str, ...]:
        """Titles of columns of numbers."""
        first, *others = (metric.title for metric in self.task.metrics)
        return (first, "to best", *others, f"{self.task.unit}/s", "speed", "parameters")

    @property
    def header(self) -> tuple[str, ...]:
        """Titles of all columns; attention is one of them if rows differ in it."""
        differ = len({row.results[0].choices["attention"] for row in self.rows}) > 1
        return ("scheme", *["attention"] * differ, "decay", "denominator", "features", *self.numbers, "laws hold")

    def cells(self, row: RankedRow, titles: Sequence[str]) -> tuple[str, ...]:
        """Cells of a row below these titles."""
        main, first = self.task.metrics[0], row.results[0]
        cells = {
            "scheme": row.scheme if len(set(of_layers(row.scheme))) > 1 else _short(row.scheme, first.choices),
            **first.choices,
            "features": first.choices["feature_map"],
            "to best": ("best" if self.leads else "first")
            if row is self.rows[0] and row.difference
            else _difference(row.difference, main.style),
            f"{self.task.unit}/s": f"{statistics.mean(result.rate for result in row.results):,.0f}",
            "speed": "-" if row.speed is None else f"{row.speed:.2f}",
            "parameters": f"{first.parameters:,}",
            "laws hold": first.laws,
        }
        for metric in self.task.metrics:
            scores = [score for result in row.paired if (score := result.scores[metric.title]) is not None]
            cells[metric.title] = metric.text(statistics.mean(scores) if scores else None)
        if row.status != "finished":
            cells[main.title] = row.status
        return tuple(cells[title] for title in titles)

    def notes(self) -> Iterator[str]:
        """Notes below the table."""
        unit = self.task.unit
        texts = dict.fromkeys(f"{metric.note or metric.title}, {metric.better} is better" for metric in self.task.metrics)
        yield (
            f"{'; '.join(texts)}. speed: training, none with the same attention = 1, "
            f"in interleaved rounds; {unit}/s depends on other processes on the machine during the run."
        )
        seeds = max((row.difference.seeds for row in self.rows if row.difference is not None), default=0)
        if not seeds:
            yield "to best: no compared run has a figure, so no row is the best."
        elif seeds >= MIN_SEEDS:
            yield (
                f"to best: mean of {seeds} differences paired by seed, and its interval; (in brackets): the interval "
                f"includes 0, so no difference is shown. {NOTE}"
            )
        else:
            count = "one seed" if seeds == 1 else f"{seeds} seeds"
            yield f"to best: {count}, so no interval; --seeds {MIN_SEEDS} gives one."
        if seeds and not self.leads:
            yield "first: the best figure, which does not show that this row is the best."
        if self.chance is not None:
            share, count = self.chance
            level = f"{self.task.metrics[0].text(share)}, the share of the most frequent class"
            noise = f"by more than the noise of {count:,} samples, so the schemes cannot be compared"
            yield f"Chance is {level}." if self.above_chance else f"No row is above chance, {level}, {noise}."
        first = [row.results[0] for row in self.rows]
        words = [word for what, word in WORDS.items() if len({result.choices[what] for result in first}) > 1]
        words += ["parameters"] * (len({result.parameters for result in first}) > 1)
        if words:
            yield f"Rows that differ in more than the encoding, here in {', '.join(words)}, do not compare encodings alone."

    def render(self, width: int) -> tuple[Table, Text]:
        """The table for a terminal of this width; the least important columns are left out if it does not fit."""
        titles, hidden = list(self.header), []
        others = [metric.title for metric in self.task.metrics[1:]]
        optional = ("denominator", "features", "parameters", f"{self.task.unit}/s", "attention", "decay")
        for title in (*optional, *others, "laws hold"):
            columns = zip(titles, *(self.cells(row, titles) for row in self.rows), strict=True)
            if sum(max(map(len, column)) for column in columns) + 3 * len(titles) + 1 <= width:
                break
            hidden += [title] if title in titles else []
            titles = [other for other in titles if other != title]
        align = "".join("r" if title in self.numbers else "l" for title in titles)
        table = grids.console_table(titles, [self.cells(row, titles) for row in self.rows], align)
        note = [f"Left out, since this terminal is narrow: {', '.join(hidden)}; the report has them."] if hidden else []
        return table, Text("\n".join([*self.notes(), *note]))


def _short(spec: str, choices: Mapping[str, str]) -> str:
    """A scheme without the options that have columns."""
    name, options = split_spec(spec)
    return join_spec(name, {option: value for option, value in options.items() if option not in choices})


def _difference(difference: Difference | None, style: str) -> str:
    """The mean with its interval; in brackets if the interval includes 0."""
    if difference is None:
        return "-"
    text = difference.text(f"+{style}")
    return text if difference.excludes_zero or difference.seeds < MIN_SEEDS else f"({text})"
