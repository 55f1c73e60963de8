"""The table of a comparison, read from its folder: means over seeds, and differences with their intervals. No torch here."""

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
from isopos.lab.reports.intervals import LEAST, NOTE, Difference
from isopos.lab.runs.files import damaged, read_json
from isopos.lab.runs.folders import Result, fingerprint, read_ended, recipe_of
from isopos.lab.tasks.task import Task
from isopos.spec import join_spec, of_layers, split_spec

FILE = "comparison.json"
WORDS = {"attention": "attention", "decay": "decay", "denominator": "denominator", "feature_map": "features"}


@dataclass(frozen=True)
class Run:
    """A run of a comparison: its training rows and, where it ended, its result."""

    folder: Path
    recipe: Recipe
    training: list[dict[str, Any]]
    result: Result | None


@dataclass(frozen=True)
class Row:
    """A scheme: the results of its runs, those of the seeds that are compared, and the difference to the best by these."""

    scheme: str
    results: Sequence[Result]
    paired: Sequence[Result]
    difference: Difference | None
    speed: float | None

    @property
    def status(self) -> str:
        """That of the first run that did not finish, or "finished"."""
        return next((result.status for result in self.results if result.status != "finished"), "finished")


def about(folder: Path) -> dict[str, Any]:
    """comparison.json, also of before there were tasks."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        if "text" in found:
            found |= {"task": "language", "data": found["text"], "summary": f"{found['bytes']:,} bytes"}
        return {"speed": {}, "chance": None} | found

    texts = dict.fromkeys(("task", "data", "sha256", "summary", "torch", "device"), str)
    kinds = texts | {"threads": int, "planned": list[str], "complete": bool, "speed": dict[str, float]}
    kinds["chance"] = tuple[float, int] | None
    return read_json(folder / FILE, kinds, "put it right, or compare again under another --name", change)


def read_runs(folder: Path) -> list[Run]:
    """Every run of a comparison in order of its start; or a ValueError where a file is damaged or one has other data."""
    runs, sha256 = [], about(folder)["sha256"]
    for path in sorted(folder.glob("*/recipe.json"), key=lambda p: p.stat().st_mtime_ns):
        run = path.parent
        recipe = recipe_of(run)
        rows, result = read_ended(run, recipe)
        if (own := fingerprint(run)) not in ("", sha256):
            said = f"sha256: expected that of the data in {folder / FILE}, {sha256[:12]}, got {own[:12]}"
            damaged(run / "data.json", said, "put it right, or compare again under another --name")
        runs.append(Run(run, recipe, [row for row in rows if "loss" in row], result))
    return runs


def ranking(folder: Path) -> "Ranking":
    """One row a scheme with a result, best first; those that did not finish last."""
    said, runs = about(folder), read_runs(folder)
    task = runs[0].recipe.task if runs else tasks.find(said.get("task", "language"))()
    main, by_scheme = task.metrics[0], {}
    for run in runs:
        if run.result:
            by_scheme.setdefault(run.recipe.scheme, {})[run.recipe.seed] = run.result
    whole = {name: set(found) for name, found in by_scheme.items() if all(r.status == "finished" for r in found.values())}
    # an interrupted comparison ranks by the seeds that every scheme without a failure has, which keeps the runs paired
    shared = set.intersection(*whole.values()) if whole else set()

    def rank(scheme: str) -> float:
        if scheme not in whole or not shared:
            return float("inf")
        return main.rank(statistics.mean(by_scheme[scheme][seed].scores[main.title] for seed in shared))

    ordered = sorted(by_scheme, key=rank)
    best, speed = by_scheme[ordered[0]] if ordered else {}, said.get("speed", {})
    rows = []
    for scheme in ordered:
        results = by_scheme[scheme]
        seeds = sorted(shared & {*results})
        pairs = [(results[seed].scores[main.title], best[seed].scores[main.title]) for seed in seeds]
        difference = [a - b for a, b in pairs if a is not None and b is not None]
        paired = [results[seed] for seed in seeds]
        apart = Difference.paired(difference, max(1, len(ordered) - 1)) if difference else None
        rows.append(Row(scheme, [*results.values()], paired, apart, speed.get(scheme)))
    return Ranking(task, rows, said.get("chance"))


@dataclass(frozen=True)
class Ranking:
    """The rows of a comparison, best first, as text."""

    task: Task
    rows: Sequence[Row]
    chance: tuple[float, int] | None = None  # of an answer that looks at nothing, and how many samples are scored

    @property
    def above_chance(self) -> bool:
        """Whether the best row is, beyond the noise of its samples; each of the rows had a chance to be so by luck."""
        scores = [result.scores[self.task.metrics[0].title] for row in self.rows[:1] for result in row.paired]
        known = [score for score in scores if score is not None]
        if self.chance is None or not known:
            return True
        share, count = self.chance
        noise = (share * (1 - share) / count) ** 0.5
        return statistics.mean(known) - share > statistics.NormalDist().inv_cdf(1 - 0.025 / len(self.rows)) * noise

    @property
    def leads(self) -> bool:
        """Whether the first row is to be highlighted: it is above chance, and three seeds do not leave it level with all."""
        others = [row.difference for row in self.rows[1:] if row.difference is not None]
        level = any(other.seeds >= LEAST for other in others) and not any(other.shown for other in others)
        return self.above_chance and not level

    @property
    def numbers(self) -> tuple[str, ...]:
        """The titles of columns of numbers."""
        first, *others = (metric.title for metric in self.task.metrics)
        return (first, "to best", *others, f"{self.task.unit}/s", "speed", "parameters")

    @property
    def header(self) -> tuple[str, ...]:
        """The titles of the columns; the kind of attention is one where rows differ in it."""
        differ = len({row.results[0].choices["attention"] for row in self.rows}) > 1
        return ("scheme", *["attention"] * differ, "decay", "denominator", "features", *self.numbers, "laws hold")

    def cells(self, row: Row, titles: Sequence[str]) -> tuple[str, ...]:
        """A row under titles of `header`."""
        main, first = self.task.metrics[0], row.results[0]
        found = {
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
            found[metric.title] = metric.text(statistics.mean(scores) if scores else None)
        if row.status != "finished":
            found[main.title] = row.status
        return tuple(found[title] for title in titles)

    def notes(self) -> Iterator[str]:
        """What a reader must know to read the table."""
        unit = self.task.unit
        texts = dict.fromkeys(f"{metric.note or metric.title}, {metric.better} is better" for metric in self.task.metrics)
        yield (
            f"{'; '.join(texts)}. speed: training, none with the same attention = 1, "
            f"measured side by side; {unit}/s is also what else the machine did during that run."
        )
        seeds = max((row.difference.seeds for row in self.rows if row.difference is not None), default=1)
        if seeds >= LEAST:
            yield (
                f"to best: mean of {seeds} differences paired by seed, and its interval; (in brackets): the interval "
                f"includes 0, so that no difference is shown. {NOTE}"
            )
        else:
            yield f"to best: {'one seed' if seeds == 1 else f'{seeds} seeds'}, so no interval; --seeds {LEAST} gives one."
        if self.rows and not self.leads:
            yield "first: the best figure, by which no row is shown to be the best."
        if self.chance is not None:
            share, count = self.chance
            level = f"{self.task.metrics[0].text(share)}, the share of the most frequent class"
            nothing = f"by more than the noise of {count:,} samples: this shows nothing of the schemes"
            yield f"Chance is {level}." if self.above_chance else f"No row is above chance, {level}, {nothing}."
        first = [row.results[0] for row in self.rows]
        words = [word for what, word in WORDS.items() if len({result.choices[what] for result in first}) > 1]
        words += ["parameters"] * (len({result.parameters for result in first}) > 1)
        if words:
            yield f"Rows that differ in more than the encoding, here in {', '.join(words)}, do not compare encodings alone."

    def render(self, width: int) -> tuple[Table, Text]:
        """The table for a terminal of so many columns; where it does not fit, what matters least is left to the report."""
        titles, left = list(self.header), []
        others = [metric.title for metric in self.task.metrics[1:]]
        least = ("denominator", "features", "parameters", f"{self.task.unit}/s", "attention", "decay", *others, "laws hold")
        for title in least:
            columns = zip(titles, *(self.cells(row, titles) for row in self.rows), strict=True)
            if sum(max(map(len, column)) for column in columns) + 3 * len(titles) + 1 <= width:
                break
            left += [title] if title in titles else []
            titles = [other for other in titles if other != title]
        align = "".join("r" if title in self.numbers else "l" for title in titles)
        table = grids.console(titles, [self.cells(row, titles) for row in self.rows], align)
        narrow = [f"Left out, since this terminal is narrow: {', '.join(left)}; the report has them."] if left else []
        return table, Text("\n".join([*self.notes(), *narrow]))


def _short(spec: str, choices: Mapping[str, str]) -> str:
    """A scheme without the options that columns show."""
    name, options = split_spec(spec)
    return join_spec(name, {option: value for option, value in options.items() if option not in choices})


def _difference(found: Difference | None, style: str) -> str:
    """The mean with its interval, if there is one; in brackets where that includes 0."""
    if found is None:
        return "-"
    text = found.text(f"+{style}")
    return text if found.shown or found.seeds < LEAST else f"({text})"
