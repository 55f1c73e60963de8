"""Test the exact text of a table with all features: kinds of corpora, columns, rows and cells."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from isopos.lab.reports import findings, paper
from isopos.lab.tables import loader
from isopos.lab.tables.loader import Cell, load_table, timing
from isopos.lab.tasks.task import View

TABLE = """
title = "Which one?"
citation = "a toy"
recipe = "lrpe-blm"
baseline = "Base"
reference = "Rope"
marked = true
notes = ["A note of the table."]
[edits]
dropout = 0.2
[corpora.books]
source = "hf:books"
[corpora.CoLA]
source = "glue/CoLA"
recipe = "lrpe-glue"
start = "books"
[corpora.CoLA.edits]
steps = 600
[corpora.shapes]
recipe = "images"
[corpora.shapes.edits]
patch = 2
steps = 900
[corpora.shapes.scales.small]
batch = 16
[corpora.absent]

[[columns]]
title = "loss"
corpus = "books"
[[columns]]
title = "half-way"
corpus = "books"
after = 0.5
[[columns]]
title = "CoLA"
corpus = "CoLA"
style = ".1%"
[[columns]]
title = "shapes"
corpus = "shapes"
split = "test"
[[columns]]
title = "elsewhere"
corpus = "absent"

[[rows]]
name = "Base"
scheme = "none"
figures = [3.0, 3.5, 0.30, 0.70, 1.0]
[[rows]]
name = "Rope"
scheme = "rope"
figures = [2.0, 2.5, 0.50, 0.60, 2.0]
[rows.schemes]
shapes = "ape-grid"
[[rows]]
name = "Decayed | rope"
scheme = "rope:decay=retnet"
figures = [2.5, nan, 0.40, 0.50, 3.0]
[[rows]]
name = "Gone"
figures = [1.0, 1.5, 0.60, 0.90, 4.0]
[[rows]]
name = "Ours"
scheme = "retnet"
[rows.schemes]
shapes = ""
[scales.paper]
[scales.small]
steps = 100
batch = 8
[scales.tiny]
steps = 5
[start_scales.paper]
[start_scales.small]
steps = 20
batch = 4
[start_scales.tiny]
steps = 5
"""
OURS = {  # mean of the column that is scored, by corpus and row; validations at 10, 50, 60 and 100 updates, less at each
    "books": {"Base": 3.0, "Rope": 2.2, "Decayed | rope": 2.4, "Ours": 2.1},
    "CoLA": {"Base": 0.2, "Rope": 0.5, "Decayed | rope": 0.45, "Ours": 0.4},
    "shapes": {"Base": 0.5, "Rope": 0.9, "Decayed | rope": 0.6},
}
NOISE = (-0.01, 0.0, 0.01, 0.05)
CURVE = {10: 3.0, 50: 1.0, 60: 0.4, 100: 0.0}
"""Twice this is added to a figure, once to that of Ours; Decayed is further behind at first."""
EXPECTED = Path(__file__).parent / "expected"


@pytest.fixture
def folder(tmp_path):
    """Cells have three seeds, Rope's four. One run of Ours is missing, one of Base diverged, one of Rope has no test."""
    (tmp_path / "toy.toml").write_text(TABLE)
    table = load_table(str(tmp_path / "toy.toml"))
    corpora = {"books": "/texts/b.txt", "CoLA": "/glue/CoLA", "shapes": "hf:shapes"}
    about = {"scale": "small", "commands": ["isopos table a", "isopos table b"], "seeds": 4, "machine": "a machine"}
    (tmp_path / "about.json").write_text(json.dumps(about | {"corpora": corpora}))
    for corpus, row, seed in ((c, r, s) for c, rows in OURS.items() for r in rows for s in range(4 if r == "Rope" else 3)):
        if (corpus, row, seed) == ("books", "Ours", 1):
            continue
        cell = tmp_path / "cells" / paper.cell_name(corpus, table.row(row).on(corpus), seed)
        cell.mkdir(parents=True)
        value = OURS[corpus][row] + NOISE[(seed + len(row)) % 3 if row != "Rope" else seed]
        split = (
            "validation" if (corpus, row, seed) == ("shapes", "Rope", 0) else "test" if corpus == "shapes" else "validation"
        )
        found = {"value": value, "reason": "", "split": split}
        status = "finished"
        if (corpus, row, seed) == ("shapes", "Base", 2):
            status = "diverged at step 7"
            columns = {}
        else:
            columns = {one.title: found for one in table.columns if one.corpus == corpus}
        (cell / "scores.json").write_text(json.dumps({"status": status, "columns": columns, "seconds": 30.0}))
        way = -1 if corpus == "shapes" else 1
        late = {10: 1.0} if row == "Decayed | rope" else {}
        rows = [
            {"step": step, "validation": value + way * (more * (2 - (row == "Ours")) + late.get(step, 0.0))}
            for step, more in CURVE.items()
        ]
        rows = [{"step": 1, "loss": 9.0}, *([] if corpus == "CoLA" else rows)]
        (cell / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return tmp_path


TIMED = """
title = "Which one is fast?"
citation = "a toy"
recipe = "quickstart"
baseline = "Base"
kind = "{kind}"
[corpora.short]
source = ""
[corpora.long]
source = ""
[[columns]]
title = "256"
corpus = "short"
[[columns]]
title = "1024"
corpus = "long"
[[rows]]
name = "Base"
scheme = "none"
figures = [1.0, 1.0]
[[rows]]
name = "Rope"
scheme = "rope"
figures = [0.5, 2.0]
[[rows]]
name = "Ours"
scheme = "retnet"
figures = [0.8, 3.0]
[[rows]]
name = "Gone"
figures = [0.1, 0.2]
[scales.paper]
[scales.small]
steps = 20
[scales.tiny]
"""
SECONDS = {  # rounds; the last one of short lacks a row, and nobody timed Ours on long samples
    "short": [(0.1, 0.2, 0.4), (0.1, 0.1, 0.1), (0.2, 0.5, 0.25), (0.4, 0.1, None)],
    "long": [(1.0, 0.5, None), (1.0, 0.25, None), (2.0, 4.0, None)],
}


TABLE_OF_TWO_SCALES = """
title = "Which?"
citation = "a toy"
recipe = "quickstart"
baseline = "Base"
columns = [{ title = "loss" }]
[[rows]]
name = "Base"
scheme = "rope"
[scales.paper]
steps = 777
length = 99
[scales.small]
[scales.tiny]
steps = 7
length = 32
hidden_dim = 64
"""
ABOUT_TINY = {"scale": "tiny", "commands": ["isopos table a"], "seeds": 1, "machine": "a machine", "corpora": {"": ""}}


@pytest.mark.parametrize("kind", ["speed", "latency", "memory"])
def test_a_table_of_times_to_its_last_character(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: None)
    monkeypatch.setattr(loader, "MEMORY_ROUNDS" if kind == "memory" else "ROUNDS", 4)
    (tmp_path / "toy.toml").write_text(TIMED.format(kind=kind))
    about = {"scale": "small", "commands": ["isopos table a"], "seeds": 1, "machine": "a machine"}
    (tmp_path / "about.json").write_text(json.dumps(about | {"corpora": dict.fromkeys(SECONDS, "random tokens")}))
    for corpus, rounds in SECONDS.items():
        named = [dict(zip(("Base", "Rope", "Ours"), one, strict=True)) for one in rounds]
        rows = [{name: taken for name, taken in one.items() if taken is not None} for one in named]
        timing(tmp_path, corpus).write_text(json.dumps(rows))
    _, notes = paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
    text = (tmp_path / "table.md").read_text()
    before = text.partition("## Findings")[0]
    assert text == (EXPECTED / f"table-{kind}.md").read_text(encoding="utf-8")
    assert [f"- {note}" for note in notes] == [line for line in before.splitlines() if line.startswith("- ")]
    found = json.loads((tmp_path / findings.RESULTS).read_text())
    assert found["rounds"] == max(map(len, SECONDS.values()))
    shown = {row: f"{x['median']:.3f} ± {x['half']:.3f}" for by in found["figures"].values() for row, x in by.items()}
    assert all(figure in text for figure in shown.values())


def test_tables_without_figures_of_a_paper_differ_from_their_own_scale_paper(tmp_path):
    """Figures of a paper go with the paper's recipe; without them the scale paper stands for it, with all its edits."""
    text = TABLE_OF_TWO_SCALES
    (tmp_path / "toy.toml").write_text(text)
    (tmp_path / "about.json").write_text(json.dumps(ABOUT_TINY))
    _, notes = paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
    (scale,) = (note for note in notes if note.startswith("Scale: "))
    assert "steps 7 (scale paper: 777)" in scale
    assert "length 32 (scale paper: 99)" in scale
    assert "hidden dim 64 (scale paper: four times model dim)" in scale
    (tmp_path / "toy.toml").write_text(text.replace('scheme = "rope"', 'scheme = "rope"\nfigures = [1.0]'))
    _, notes = paper.write(load_table(str(tmp_path / "toy.toml")), tmp_path)
    (scale,) = (note for note in notes if note.startswith("Scale: "))
    assert "777" not in scale
    assert "steps 7 (paper: " in scale


def test_a_table_to_its_last_character(folder):
    _, notes = paper.write(load_table(str(folder / "toy.toml")), folder)
    text = (folder / "table.md").read_text()
    before = text.partition("## Findings")[0]
    assert text == (EXPECTED / "table.md").read_text(encoding="utf-8")
    assert [f"- {note}" for note in notes] == [line for line in before.splitlines() if line.startswith("- ")]
    found = json.loads((folder / findings.RESULTS).read_text())["figures"]
    assert {title: {name: [*map(int, seeds)] for name, seeds in by.items()} for title, by in found.items()} == {
        "loss": {"Base": [0, 1, 2], "Rope": [0, 1, 2, 3], "Decayed | rope": [0, 1, 2], "Ours": [0, 2]},
        "half-way": {"Base": [0, 1, 2], "Rope": [0, 1, 2, 3], "Decayed | rope": [0, 1, 2], "Ours": [0, 2]},
        "CoLA": {"Base": [0, 1, 2], "Rope": [0, 1, 2, 3], "Decayed | rope": [0, 1, 2], "Ours": [0, 1, 2]},
        "shapes": {"Base": [0, 1], "Rope": [0, 1, 2, 3], "Decayed | rope": [0, 1, 2]},
        "elsewhere": {},
    }


@pytest.fixture
def load(tmp_path):
    """Load the table with a part of its text replaced."""

    def loaded(old="", new=""):
        assert old in TABLE
        (tmp_path / "toy.toml").write_text(TABLE.replace(old, new))
        return load_table(str(tmp_path / "toy.toml"))

    return loaded


def test_another_number_of_updates_changes_nothing_else_at_one_scale_of_all_corpora(load):
    table = load()
    longer = table.with_steps("small", 7)
    for corpus, same in zip(table.corpora, longer.corpora, strict=True):
        for scale in ("original", "paper", "small", "tiny"):
            expected = table.recipe_at(scale, corpus)
            assert longer.recipe_at(scale, same) == (expected.edit(steps=7) if scale == "small" else expected)
    assert table.with_steps("small", 0) is table


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('shapes = "ape-grid"', 'shapes = "ape-grid:learned"', "option=value"),
        ('shapes = "ape-grid"', 'shape = "ape-grid"', "Rope: corpus: expected one of .*, got 'shape'"),
        ("[corpora.absent]", '[corpora.absent]\nrecipe = "lrpe-glue"\nstart = "CoLA"', "absent: start: expected one of"),
        ('split = "test"', 'split = "test"\nafter = 0.5', "shapes: expected after from 0 to 1, and below 1"),
        ('split = "test"', "view = { shft = 1 }", "shft: expected none, which samples of this task do not have"),
    ],
)  # fmt: skip
def test_entries_that_cannot_be_are_refused(load, old, new, message):
    with pytest.raises(ValueError, match=message):
        load(old, new)


def test_columns_score_the_views_that_they_name(load):
    table = load('split = "test"', 'split = "test"\nview = { shift = 2, height = 32 }')
    views = {column.title: table.metric(column).view for column in table.columns}
    plain = View("validation", 1, 0.0)
    assert views == dict.fromkeys(views, plain) | {"shapes": View("test", 1, 0.0, own=(("shift", 2), ("height", 32)))}


@pytest.mark.parametrize(("status", "ready"), [("finished", True), ("diverged at step 3", False), ("", False)])
def test_a_cell_waits_for_the_end_of_the_one_that_it_starts_from(tmp_path, status, ready):
    if status:
        (tmp_path / "scores.json").write_text(json.dumps({"status": status, "columns": {}, "seconds": 1.0}))
    recipe = load_table("ape-1").recipe_at("tiny")
    assert Cell(tmp_path / "next", "", recipe, (), tmp_path).ready == ready
    assert Cell(tmp_path / "next", "", recipe, ()).ready
    assert paper.cell_name("books", "rope:decay=none*2+none", 3) == "books-rope+decay=nonex2+none-seed3"
