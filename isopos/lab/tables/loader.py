"""Tables of papers as data: `isopos/lab/tables/NAME.toml` holds rows, columns, the paper's figures and edits of a recipe.

Another table is another file, which may lie anywhere: its path is its name then. Keys that none has, figures that miss and
schemes that do not parse are errors. What fills a table is a cell: one run, which may fill several columns. No torch here.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from isopos.catalog import expect
from isopos.deprecation import renamed
from isopos.lab.recipes import SCALES, Recipe, preset
from isopos.lab.runs.files import mismatch, read_json, read_text
from isopos.lab.tasks.task import Metric, Task, View
from isopos.spec import of_layers, split_spec

__getattr__ = renamed(__name__, {"Line": "isopos.lab.tables.loader.TableRow"})

FOLDER = Path(__file__).parent
SCORES, ABOUT = "scores.json", "about.json"
TIMED = {
    "speed": Metric("relative speed", "", "higher", ".2f"),
    "cost": Metric("relative time of a training step", "", "lower", ".2f"),
    "latency": Metric("relative time of one answer", "", "lower", ".2f"),
}
"""Kinds of tables in which nothing is trained, and what they show: ratios of a row to the baseline."""
TABLES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
MEDIUM = "medium"  # a scale that a table may have besides: an hour of one GPU
ASK = "ask"  # a source that cannot be had freely, so that --data must name a stand-in


@dataclass(frozen=True)
class Corpus:
    """Data of the paper."""

    name: str  # what --data calls it
    source: str = ASK  # as `isopos train --data` takes it, or ASK; of no consequence for a task without `data`
    recipe: str = ""  # its own, of any task; by default that of the table
    edits: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, that the paper made for it
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # edits of its own by scale, after the table's
    start: str = ""  # the corpus with whose run, of the same row and seed, training begins; the task of `recipe` has `start`


@dataclass(frozen=True)
class Column:
    """One figure of each row."""

    title: str  # of the column
    corpus: str = ""  # what the model is trained on; none for speeds, and where a task has no `data`
    figure: str = ""  # one of the task's; by default that of the table
    split: str = "validation"  # that is scored
    multiple: int = 1  # of the training length, for the samples that are scored
    scored: float = 0.0  # share of each sample, at its end, that counts; 0: all
    view: Mapping[str, int] = field(default_factory=dict)  # choices of the task's own, as `View.own`
    after: float = 1.0  # share of the updates after which the validation while training is shown; 1: of the final weights
    better: str = ""  # lower or higher; by default as the task says of the figure
    style: str = ""  # of figures; by default as the task says


@dataclass(frozen=True)
class TableRow:
    """A row."""

    name: str  # the paper's, or ours
    scheme: str = ""  # with options; empty where isopos has none
    figures: Sequence[float] = ()  # the paper's, one a column; empty for a row of ours
    schemes: Mapping[str, str] = field(default_factory=dict)  # by corpus, where it is another one, as on a grid
    fixed: str = ""  # the row with the frequencies or angles with which this one starts, where it learns them

    def on(self, corpus: str) -> str:
        """The scheme that the models of a corpus have."""
        return self.schemes.get(corpus, self.scheme)


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper."""

    name: str  # of its file
    title: str  # what it compares
    citation: str  # paper, table or section
    baseline: str  # the row whose final loss the others are to reach, whose speed is 1
    recipe: str  # the paper's, as `isopos train` takes it, with `edits`
    scales: Mapping[str, Mapping[str, Any]]  # edits of the recipe by scale
    columns: Sequence[Column]  # the figures
    rows: Sequence[TableRow]  # in the paper's order, then ours
    kind: str = "scores"  # of trained models; or one of `TIMED`
    marked: bool = False  # whether the best figures are, where some differ from them
    reference: str = ""  # the row from which the others' distance is shown; by default the baseline
    figure: str = ""  # of the columns that name none; by default the task's first
    along: str = ""  # one of the task's own choices, by which the picture shows the columns; by default validations
    corpora: Sequence[Corpus] = ()  # what the columns' models are trained on
    notes: Sequence[str] = ()  # what a reader must know
    edits: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, where the paper's differs from the named one
    begun: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by scale, of the recipes that begin with a run

    def recipe_at(self, scale: str, corpus: Corpus | None = None) -> Recipe:
        """The recipe of a corpus at a scale, without scheme and seed; that of the scale "original" is what the paper did."""
        own = corpus or Corpus("")
        if own.start:
            before = self.recipe_at(scale, self.corpus(own.start))
            recipe, scales = replace(preset(own.recipe, "paper").edit(start=""), model=before.model), self.begun
        else:
            recipe, scales = preset(own.recipe or self.recipe, "paper").edit(**self.edits), self.scales
        if corpus is not None and "data" in recipe.names:
            recipe = recipe.edit(data=corpus.source)
        recipe = recipe.edit(**own.edits)
        return recipe if scale == "original" else recipe.edit(**{**scales[scale], **own.scales.get(scale, {})})

    def with_steps(self, scale: str, steps: int) -> "PaperTable":
        """With so many updates at a scale; 0: with as many as it has.

        Raises:
            ValueError: Where it has no such scale, they are no number of updates, or nothing is trained.
        """
        expect(f"scale of {self.name}", scale, [known for known in (*SCALES, MEDIUM) if known in self.scales])
        if not steps:
            return self
        if self.timed:
            raise ValueError(f"steps: expected none, since {self.name} times steps without training, got {steps}")

        def longer(scales: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
            return {**scales, scale: {**scales.get(scale, {}), "steps": steps}}

        corpora = [replace(corpus, scales=longer(corpus.scales)) for corpus in self.corpora]
        changed = replace(self, scales=longer(self.scales), corpora=corpora)
        changed.recipe_at(scale, *changed.corpora[:1]).check()
        return changed

    def metric(self, column: Column) -> Metric:
        """What a column shows, and how."""
        task = self.task_of(column.corpus)
        figure = task.figure(column.figure or self.figure or task.metrics[0].figure)
        if self.timed:
            figure = TIMED[self.kind]
        view = View(column.split, column.multiple, column.scored, own=tuple(column.view.items()))
        own = {key: value for key in ("better", "style") if (value := getattr(column, key))}
        return replace(figure, title=column.title, view=view, **own)

    def corpus(self, name: str) -> Corpus | None:
        """The corpus of that name; none of an empty one, by which a table without corpora goes."""
        return next(corpus for corpus in self.corpora if corpus.name == name) if name else None

    @property
    def timed(self) -> bool:
        """Whether it shows seconds, not scores."""
        return self.kind in TIMED

    def ratio(self, seconds: Mapping[str, float], row: str) -> float:
        """What a round shows of a row."""
        slower = seconds[row] / seconds[self.baseline]
        return 1 / slower if TIMED[self.kind].better == "higher" else slower

    def task_of(self, corpus: str) -> Task:
        """What the models of a corpus learn."""
        return self.recipe_at("original", self.corpus(corpus)).task

    def row(self, name: str) -> TableRow:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class Cell:
    """One run, of a row, a corpus and a seed: its place, its recipe, and what the columns that it fills show."""

    folder: Path
    corpus: str
    recipe: Recipe
    metrics: Sequence[Metric]
    start: Path | None = None  # the cell with whose weights it begins

    @property
    def ready(self) -> bool:
        """Whether what it begins with is there."""
        return self.start is None or ((self.start / SCORES).exists() and read_scores(self.start)["status"] == "finished")

    @property
    def done(self) -> bool:
        """Whether it has its scores."""
        return (self.folder / SCORES).exists()


def load_table(name: str) -> PaperTable:
    """The table of that name, or in that file.

    Raises:
        ValueError: Where there is no such file, or something in it does not fit; the message names the file.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists():
        raise ValueError(f"table: expected one of {', '.join(TABLES)} or the path of a .toml, got {name!r}")
    try:
        values = tomllib.loads(read_text(path, "put it right"))
        tables = {"columns": list[dict], "rows": list[dict], "corpora": dict[str, dict]}
        if wrong := mismatch(values, {name: kind for name, kind in tables.items() if name in values}):
            raise ValueError(wrong)
        columns = tuple(_made(Column, one) for one in values.pop("columns", ()))
        rows = tuple(_made(TableRow, one) for one in values.pop("rows", ()))
        corpora = tuple(_made(Corpus, {"name": key, **one}) for key, one in values.pop("corpora", {}).items())
        table = _made(PaperTable, {"name": path.stem, "columns": columns, "rows": rows, "corpora": corpora, **values})
        _check(table)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return table


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    known = {one.name: one for one in fields(kind)}
    hints = get_type_hints(kind)
    for key in values:
        expect(kind.__name__, key, known)
        if wrong := mismatch(values[key], hints[key]):
            raise ValueError(f"{kind.__name__}: {key}: {wrong}")
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


def _check(table: PaperTable) -> None:
    names = [row.name for row in table.rows]
    for what, found in (("rows", names), ("columns", [column.title for column in table.columns])):
        if not found or len(set(found)) < len(found):
            raise ValueError(f"{what}: expected different names, got {found}")
    expect("kind", table.kind, ("scores", *TIMED))
    if set(table.scales) - {MEDIUM} != set(SCALES):
        raise ValueError(f"scales: expected {', '.join(SCALES)} and perhaps {MEDIUM}, got {', '.join(table.scales)}")
    for corpus in table.corpora or (Corpus(""),):
        known = [name for name in preset(corpus.recipe or table.recipe, "paper").names if name not in ("scheme", "seed")]
        given = [table.edits, *table.scales.values()]
        if corpus.start:
            given = [{"start": ""}, *table.begun.values()]
            expect(f"{corpus.name}: start", corpus.start, [other.name for other in table.corpora if not other.start])
            if set(table.begun) != set(SCALES):
                raise ValueError(f"begun: expected {', '.join(SCALES)}, got {', '.join(table.begun) or 'none'}")
        for edits in (*given, corpus.edits, *corpus.scales.values()):
            for name in edits:
                expect("field of a recipe", name, known)
        for scale in corpus.scales:
            expect("scale", scale, (*SCALES, MEDIUM))
    for what, row in (("baseline", table.baseline), ("reference", table.reference or table.baseline)):
        if row not in names or not table.row(row).scheme:
            raise ValueError(f"{what}: expected a row with a scheme, got {row!r}")
    known = [corpus.name for corpus in table.corpora] or [""]
    for row in table.rows:
        if row.fixed:
            expect(f"{row.name}: fixed", row.fixed, [name for name in names if name != row.name])
        for corpus in row.schemes:
            expect(f"{row.name}: corpus", corpus, known)
        for scheme in (row.scheme, *row.schemes.values()):
            for one in of_layers(scheme):
                split_spec(one)
        if len(row.figures) not in (0, len(table.columns)):
            raise ValueError(f"{row.name}: expected {len(table.columns)} figures or none, got {len(row.figures)}")
    for column in table.columns:
        expect(f"{column.title}: corpus", column.corpus, known)
        if column.better not in ("", "lower", "higher") or column.multiple < 1 or not 0 <= column.scored < 1:
            raise ValueError(f"{column.title}: expected better lower or higher, a multiple from 1 on and a share scored")
        metric, task = table.metric(column), table.task_of(column.corpus)
        if table.kind == "scores":
            task.check_view(metric.view)
        main = task.metrics[0]
        if not 0 < column.after <= 1 or (column.after < 1 and (metric.figure, metric.view) != (main.figure, main.view)):
            raise ValueError(f"{column.title}: expected after from 0 to 1, and below 1 for {main.title}, got {column.after}")
        if table.along and table.along not in column.view:
            raise ValueError(f"{column.title}: expected a view with {table.along}, by which the picture shows columns")


def cell_name(corpus: str, scheme: str, seed: int) -> str:
    """The folder of a cell, in characters that every file system takes.

    Examples:
        >>> cell_name("books", "rope:attention=softmax", 0), cell_name("", "rope", 1)
        ('books-rope+attention=softmax-seed0', 'rope-seed1')
    """
    return f"{corpus}-{scheme}-seed{seed}".replace(":", "+").replace("*", "x").removeprefix("-")


def timing(folder: Path, corpus: str = "") -> Path:
    """Where the seconds of a corpus are."""
    return folder / f"timing{'-' * bool(corpus)}{corpus}.json"


def speed_rounds(folder: Path, corpus: str = "") -> list[dict[str, float]]:
    """Seconds of a training step, or of an answer, by row, in each round so far."""
    path = timing(folder, corpus)
    return read_json(path, list[dict[str, float]], "remove it, and steps are timed again") if path.exists() else []


def read_about(folder: Path) -> dict[str, Any]:
    """What was asked of the folder of a table so far."""
    path, kinds = (
        folder / ABOUT,
        {"scale": str, "commands": list[str], "seeds": int, "corpora": dict[str, str], "machine": str},
    )
    if not path.exists():
        return {"commands": [], "seeds": 0, "corpora": {}}
    return read_json(path, kinds, "remove it, and the same command as before writes it again")


def read_scores(cell: Path) -> dict[str, Any]:
    """What a cell came to: its status, its columns' values or the reasons why there is none, and seconds."""
    columns = dict[str, dict[str, str | float | None]]
    return read_json(
        cell / SCORES, {"status": str, "columns": columns, "seconds": float}, "remove it to score the cell again"
    )
