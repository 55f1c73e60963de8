"""Tables of papers as data: `isopos/lab/tables/NAME.toml` has rows, columns, the paper's figures, and edits of a recipe.

A custom table is another TOML file, named by its path. Unknown keys, missing figures and wrong schemes are errors. A
cell, one run, may fill several columns. No torch here.
"""

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from isopos.catalog import CATALOG, expect
from isopos.lab.recipes import SCALES, Recipe, preset
from isopos.lab.runs.files import mismatch, read_json, read_text
from isopos.lab.tasks.task import SAME, Metric, Task, View
from isopos.spec import of_layers, split_spec

RENAMED = {"along": "x_axis", "begun": "start_scales"}  # new keys by the keys before 0.1.0
FOLDER = Path(__file__).parent
SCORES, ABOUT = "scores.json", "about.json"
TIMED = {
    "speed": Metric("relative speed", "", "higher", ".2f"),
    "cost": Metric("relative time of a training step", "", "lower", ".2f"),
    "latency": Metric("relative time of one answer", "", "lower", ".2f"),
    "memory": Metric("relative memory of a training step", "", "lower", ".2f"),
}
"""Kinds of tables without training, and the ratio of a row to the baseline that they show."""
ROUNDS, MEMORY_ROUNDS = 21, 3  # of these; memory hardly varies
TABLES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
MEDIUM = "medium"  # an optional scale: an hour of one GPU
LONGEST = 150  # characters of corpus and scheme in the name of a cell
KEPT = (*SAME, "hidden_dim", "tokenizer")  # fields that runs with a warm start have of the others
ASK = "ask"  # a source that is not freely available: --data must name a replacement


@dataclass(frozen=True)
class PaperCorpus:
    """Data of a paper."""

    name: str  # as in --data NAME=PATH
    source: str = ASK  # as in `isopos train --data`, or ASK; ignored by tasks without `data`
    recipe: str = ""  # a recipe of any task; by default the table's
    edits: Mapping[str, Any] = field(default_factory=dict)  # the paper's changes of the recipe for this corpus
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # edits by scale, applied after the table's
    start: str = ""  # warm start: the corpus whose run of the same seed provides initial weights
    start_row: str = ""  # the row of that run; by default the same row


@dataclass(frozen=True)
class Column:
    """A column: one figure per row."""

    title: str
    corpus: str = ""  # training data; empty for speeds, and for tasks without `data`
    figure: str = ""  # one of the task's figures; by default the table's
    split: str = "validation"  # held-out split to score
    multiple: int = 1  # length of scored samples as a multiple of the training length
    scored: float = 0.0  # share of each sample, at its end, that counts; 0: all
    view: Mapping[str, int] = field(default_factory=dict)  # further choices of the task, see `View`
    after: float = 1.0  # show the validation after this share of the updates; 1: score the final weights
    better: str = ""  # lower or higher; by default as the task has it
    style: str = ""  # format of figures; by default as the task has it


@dataclass(frozen=True)
class TableRow:
    """A row: a scheme, and the paper's figures."""

    name: str  # the paper's name of it, or ours
    scheme: str = ""  # with options; empty if isopos has none
    figures: Sequence[float] = ()  # figures of the paper, one per column; empty for other rows
    schemes: Mapping[str, str] = field(default_factory=dict)  # schemes of corpora that need another, such as on grids
    fixed: str = ""  # for learned frequencies: the row with their initial values, not learned

    def on(self, corpus: str) -> str:
        """The scheme for a corpus."""
        return self.schemes.get(corpus, self.scheme)


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper."""

    name: str  # of the file
    title: str  # subject of the comparison
    citation: str  # paper, table or section
    baseline: str  # the row whose final loss others should reach, and whose speed is 1
    recipe: str  # name of the paper's recipe, changed by `edits`
    scales: Mapping[str, Mapping[str, Any]]  # edits of the recipe by scale
    columns: Sequence[Column]
    rows: Sequence[TableRow]  # in the paper's order, then ours
    kind: str = "scores"  # figures of trained models; or one of `TIMED`
    marked: bool = False  # whether the best figures are marked, if others differ from them
    reference: str = ""  # the row that differences are taken to; by default the baseline
    figure: str = ""  # default figure of columns; by default the task's first
    x_axis: str = ""  # a choice of the task on the picture's x axis; by default updates
    corpora: Sequence[PaperCorpus] = ()  # training data of the columns
    notes: Sequence[str] = ()  # printed below the table
    edits: Mapping[str, Any] = field(default_factory=dict)  # the paper's differences from the named recipe
    start_scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # `scales` of runs with a warm start

    def recipe_at(self, scale: str, corpus: PaperCorpus | None = None) -> Recipe:
        """The recipe of a corpus at a scale, without scheme and seed; the scale "original" is exactly the paper's."""
        data = corpus or PaperCorpus("")
        if data.start:
            before = self.recipe_at(scale, self.corpus(data.start))
            recipe = preset(data.recipe or self.recipe, "paper").edit(start="")
            recipe, scales = replace(recipe, model=before.model), self.start_scales
        else:
            recipe, scales = preset(data.recipe or self.recipe, "paper").edit(**self.edits), self.scales
        if corpus is not None and "data" in recipe.names:
            recipe = recipe.edit(data=corpus.source)
        recipe = recipe.edit(**data.edits)
        return recipe if scale == "original" else recipe.edit(**{**scales[scale], **data.scales.get(scale, {})})

    def with_steps(self, scale: str, steps: int) -> "PaperTable":
        """The table with another number of updates at a scale; 0: unchanged.

        Raises:
            ValueError: If it has no such scale, the number is wrong, or the table trains nothing.
        """
        expect(f"scale of {self.name}", scale, [name for name in (*SCALES, MEDIUM) if name in self.scales])
        if not steps:
            return self
        if self.timed:
            raise ValueError(f"steps: expected none, since {self.name} measures steps without training, got {steps}")

        def longer(scales: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
            return {**scales, scale: {**scales.get(scale, {}), "steps": steps}}

        corpora = [replace(corpus, scales=longer(corpus.scales)) for corpus in self.corpora]
        changed = replace(self, scales=longer(self.scales), corpora=corpora)
        changed.recipe_at(scale, *changed.corpora[:1]).check()
        return changed

    def metric(self, column: Column) -> Metric:
        """The metric of a column: figure, view and format."""
        task = self.task_of(column.corpus)
        figure = task.figure(column.figure or self.figure or task.metrics[0].figure)
        if self.timed:
            figure = TIMED[self.kind]
        view = View(column.split, column.multiple, column.scored, own=tuple(column.view.items()))
        changes = {key: value for key in ("better", "style") if (value := getattr(column, key))}
        return replace(figure, title=column.title, view=view, **changes)

    def corpus(self, name: str) -> PaperCorpus | None:
        """The corpus with a name; None for the empty name, which tables without corpora use."""
        return next(corpus for corpus in self.corpora if corpus.name == name) if name else None

    @property
    def timed(self) -> bool:
        """Whether the table shows times or memory instead of scores."""
        return self.kind in TIMED

    @property
    def rounds(self) -> int:
        """The number of rounds in which a table without training measures its rows."""
        return MEMORY_ROUNDS if self.kind == "memory" else ROUNDS

    def ratio(self, costs: Mapping[str, float], row: str) -> float:
        """Ratio of a row to the baseline in one round of seconds or MiB."""
        cost = costs[row] / costs[self.baseline]
        return 1 / cost if TIMED[self.kind].better == "higher" else cost

    def task_of(self, corpus: str) -> Task:
        """The task of a corpus."""
        return self.recipe_at("original", self.corpus(corpus)).task

    def row(self, name: str) -> TableRow:
        """The row with a name."""
        return next(row for row in self.rows if row.name == name)

    def start_scheme(self, corpus: PaperCorpus, scheme: str) -> str:
        """The scheme of the run from which a scheme on this corpus starts."""
        return self.row(corpus.start_row).on(corpus.start) if corpus.start_row else scheme


@dataclass(frozen=True)
class Cell:
    """One run of a row, a corpus and a seed: its folder, recipe, and the metrics of its columns."""

    folder: Path
    corpus: str
    recipe: Recipe
    metrics: Sequence[Metric]
    start: Path | None = None  # the cell whose final weights it starts from

    @property
    def ready(self) -> bool:
        """Whether the cell that it starts from is finished."""
        return self.start is None or ((self.start / SCORES).exists() and read_scores(self.start)["status"] == "finished")

    @property
    def done(self) -> bool:
        """Whether it has ended and, if it finished, has been scored for each of its columns."""
        if not (self.folder / SCORES).exists():
            return False
        scores = read_scores(self.folder)
        return scores["status"] != "finished" or all(
            (found := scores["columns"].get(metric.title)) and found.get("scored", scored(metric)) == scored(metric)
            for metric in self.metrics
        )


def scored(metric: Metric) -> str:
    """The figure of a metric and its view as text, by which scores of a column that has changed are told."""
    return f"{metric.figure}, {metric.view}"


def load_table(name: str) -> PaperTable:
    """Load a table by its name or from a file.

    Raises:
        ValueError: If there is no such file, or an entry is wrong; the message names the file.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists() and name.endswith(".toml"):
        raise ValueError(f"table: expected the path of a .toml file, got {name!r}, which does not exist")
    if not path.exists():
        known = f"; isopos tables {name} writes the arrays of the scheme" if name.partition(":")[0] in CATALOG else ""
        raise ValueError(f"table: expected one of {', '.join(TABLES)} or the path of a .toml, got {name!r}{known}")
    try:
        text = read_text(path, "put it right").removeprefix("\ufeff")
        values = {RENAMED.get(key, key): value for key, value in tomllib.loads(text).items()}
        tables = {"columns": list[dict], "rows": list[dict], "corpora": dict[str, dict]}
        if wrong := mismatch(values, {name: kind for name, kind in tables.items() if name in values}):
            raise ValueError(wrong)
        columns = tuple(_build(Column, entry) for entry in values.pop("columns", ()))
        rows = tuple(_build(TableRow, entry) for entry in values.pop("rows", ()))
        corpora = tuple(_build(PaperCorpus, {"name": key, **entry}) for key, entry in values.pop("corpora", {}).items())
        table = _build(PaperTable, {"name": path.stem, "columns": columns, "rows": rows, "corpora": corpora, **values})
        _check(table)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    return table


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from values of TOML; ValueError that names the first wrong key."""
    hints = get_type_hints(kind)
    for key in values:
        expect(kind.__name__, key, hints)
        if wrong := mismatch(values[key], hints[key]):
            raise ValueError(f"{kind.__name__}: {key}: {wrong}")
    missing = [a.name for a in fields(kind) if a.default is a.default_factory is MISSING and a.name not in values]
    if missing:
        raise ValueError(f"{kind.__name__}: expected {', '.join(missing)}, got none; write them into the file")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _check(table: PaperTable) -> None:
    names = [row.name for row in table.rows]
    for key, titles in (("rows", names), ("columns", [column.title for column in table.columns])):
        if not titles or len(set(titles)) < len(titles):
            raise ValueError(f"{key}: expected different names, got {titles}")
    expect("kind", table.kind, ("scores", *TIMED))
    if set(table.scales) - {MEDIUM} != set(SCALES):
        raise ValueError(f"scales: expected {', '.join(SCALES)} and perhaps {MEDIUM}, got {', '.join(table.scales)}")
    for corpus in table.corpora or (PaperCorpus(""),):
        known = [name for name in preset(corpus.recipe or table.recipe, "paper").names if name not in ("scheme", "seed")]
        changes = [table.edits, *table.scales.values()]
        if corpus.start:
            changes = [{"start": ""}, *table.start_scales.values()]
            for edits in (*table.start_scales.values(), corpus.edits, *corpus.scales.values()):
                if kept := sorted({*KEPT} & {*edits}):
                    raise ValueError(f"{kept[0]}: expected none for {corpus.name}, which has that of {corpus.start}")
            expect(f"{corpus.name}: start", corpus.start, [other.name for other in table.corpora if not other.start])
            if corpus.start_row:
                able = [row.name for row in table.rows if row.on(corpus.start)]
                expect(f"{corpus.name}: start_row", corpus.start_row, able)
            if set(table.start_scales) != set(table.scales):
                scales = ", ".join(table.start_scales) or "none"
                wanted = ", ".join(scale for scale in (*SCALES, MEDIUM) if scale in table.scales)
                raise ValueError(f"start_scales: expected {wanted}, got {scales}")
        for edits in (*changes, corpus.edits, *corpus.scales.values()):
            for name in edits:
                expect("field of a recipe", name, known)
        for scale in corpus.scales:
            expect("scale", scale, (*SCALES, MEDIUM))
    for key, row in (("baseline", table.baseline), ("reference", table.reference or table.baseline)):
        if row not in names or not table.row(row).scheme:
            raise ValueError(f"{key}: expected a row with a scheme, got {row!r}")
    corpora = [corpus.name for corpus in table.corpora] or [""]
    for row in table.rows:
        if row.fixed:
            expect(f"{row.name}: fixed", row.fixed, [name for name in names if name != row.name])
        for corpus in row.schemes:
            expect(f"{row.name}: corpus", corpus, corpora)
        for scheme in (row.scheme, *row.schemes.values()):
            for layer in of_layers(scheme):
                split_spec(layer)
        if len(row.figures) not in (0, len(table.columns)):
            raise ValueError(f"{row.name}: expected {len(table.columns)} figures or none, got {len(row.figures)}")
    for column in table.columns:
        expect(f"{column.title}: corpus", column.corpus, corpora)
        if column.better not in ("", "lower", "higher") or column.multiple < 1 or not 0 <= column.scored < 1:
            raise ValueError(f"{column.title}: expected better lower or higher, a multiple from 1 on and a share scored")
        metric, task = table.metric(column), table.task_of(column.corpus)
        if table.kind == "scores":
            task.check_view(metric.view)
        main = task.metrics[0]
        if not 0 < column.after <= 1 or (column.after < 1 and (metric.figure, metric.view) != (main.figure, main.view)):
            raise ValueError(f"{column.title}: expected after from 0 to 1, and below 1 for {main.title}, got {column.after}")
        if table.x_axis and table.x_axis not in column.view:
            raise ValueError(f"{column.title}: expected a view with {table.x_axis}, the x axis of the picture")


def cell_name(corpus: str, scheme: str, seed: int, rate: float = 1.0, start_rate: float = 1.0) -> str:
    """The folder name of a cell, in characters and of a length that every file system allows.

    Args:
        corpus: Name of the corpus, or empty.
        scheme: The scheme with its options.
        seed: The seed.
        rate: The learning rate, as a multiple of the scale's.
        start_rate: The learning rate of the run that it starts from.

    Examples:
        >>> cell_name("books", "rope:attention=softmax", 0), cell_name("", "rope", 1), cell_name("", "rope", 1, 0.5)
        ('books-rope+attention=softmax-seed0', 'rope-seed1', 'rope-rate0.5-seed1')
        >>> len(cell_name("", "+".join(["rope:base=500000"] * 40), 0))
        169
    """
    name = f"{corpus}-{scheme}".replace(":", "+").replace("*", "x").replace("/", "-").removeprefix("-")
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    tuned = f"-from{start_rate:g}" * (start_rate != 1) + f"-rate{rate:g}" * (rate != 1)
    return f"{name}{tuned}-seed{seed}"


def timing(folder: Path, corpus: str = "") -> Path:
    """Path of the seconds, or of the MiB, of a corpus."""
    return folder / f"timing{'-' * bool(corpus)}{corpus}.json"


def read_timing(folder: Path, corpus: str = "") -> dict[str, Any]:
    """What was timed, by name, on which machine, and rounds: seconds, or MiB of a table of memory, by row."""
    path, kinds = timing(folder, corpus), {"timed": dict[str, str], "machine": str, "rounds": list[dict[str, float]]}
    empty = {"timed": {}, "machine": "", "rounds": []}
    if not path.exists():
        return empty

    def changed(value: Any) -> Any:
        return {**empty, "rounds": value} if isinstance(value, list) else value  # of earlier versions

    return read_json(path, kinds, "remove it, and steps are timed again", changed)


def speed_rounds(folder: Path, corpus: str = "") -> list[dict[str, float]]:
    """Seconds of a training step or of an answer, or MiB of a step, by row, for each round so far."""
    return read_timing(folder, corpus)["rounds"]


def read_about(folder: Path) -> dict[str, Any]:
    """Read about.json: the requests for a table's folder so far."""
    path = folder / ABOUT
    if not path.exists():
        return {"commands": [], "seeds": 0, "corpora": {}, "rates": []}
    kinds = {
        "scale": str,
        "commands": list[str],
        "seeds": int,
        "corpora": dict[str, str],
        "machine": str,
        "rates": list[float],
    }
    remedy = "remove it, and the same command as before writes it again"
    return read_json(path, kinds, remedy, lambda about: {"rates": [], **about})  # older ones lack rates


def read_scores(cell: Path) -> dict[str, Any]:
    """Read a cell's status, seconds, and for each column its values or the reason why there are none."""
    kinds = {"status": str, "columns": dict[str, dict[str, str | float | None]], "seconds": float}
    return read_json(cell / SCORES, kinds, "remove it to score the cell again")
