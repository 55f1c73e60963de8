"""Test tables of papers: data files, locks, ranks, and `isopos table` end to end."""

import contextlib
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
from forks import Forked
from rich.console import Console

from isopos import linear_attention, sequence, softmax_attention
from isopos.lab.commands import table as reproduce
from isopos.lab.recipes import SCALES
from isopos.lab.reports.intervals import spearman
from isopos.lab.reports.rates import validations
from isopos.lab.tables import loader
from isopos.lab.tables.loader import FOLDER, TABLES, load_table, scored
from isopos.lab.tasks.attentions import absence
from isopos.lab.tasks.build import build_scheme
from isopos.lab.tasks.task import Metric, Scored, View
from isopos.lab.training import run as training
from isopos.lab.training.run import check_recipe

ROWS = "Base,Rope,Type2"
TINY = ["--scale", "tiny", "--rows", ROWS]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_loads_and_its_schemes_build(name):
    table = load_table(name)
    rows = [row for row in table.rows if row.scheme and not absence(row.scheme)]
    for row in rows:
        for scale in table.scales:
            for corpus in table.corpora or [None]:
                recipe = table.recipe_at(scale, corpus)
                recipe.check()
                if scheme := row.on(corpus.name if corpus else ""):  # a row may have none of a corpus
                    build_scheme(recipe.edit(scheme=scheme))
    for corpus in [one for one in table.corpora if one.recipe] or [None]:
        tiny = table.recipe_at("tiny", corpus).edit(device="cpu")
        tiny = tiny.edit(data="") if corpus and "data" in tiny.names else tiny
        for row in rows:
            check_recipe(tiny.edit(scheme=row.on(corpus.name if corpus else "")))


def test_a_scale_that_a_table_lacks_is_refused(isopos):
    status, _, err = isopos("table", "ape-1", "--scale", "medium", "--dry-run")
    assert (status, err) == (2, "isopos: scale of ape-1: expected one of tiny, small, paper, got 'medium'\n")


def test_the_tables_hold_what_the_papers_say():
    two, five, six, four = (load_table(name) for name in ("lrpe-2", "lrpe-5", "lrpe-6", "permuteformer-4"))
    assert {row.name: row.figures for row in two.rows if row.figures} == {
        "Base": (33.94, 33.74, 9.12, 8.78),
        "Rope": (33.40, 33.13, 8.98, 8.65),
        "SPE": (43.50, 41.91, 11.91, 10.85),
        "PER": (32.86, 32.53, 8.53, 8.20),
        "Type1": (31.90, 31.60, 8.52, 8.19),
        "Type2": (31.95, 31.71, 8.46, 8.14),
        "Type3": (33.90, 33.95, 8.69, 8.43),
    }
    assert [row.figures[0] for row in five.rows if row.figures] == [
        31.90,
        31.95,
        33.90,
        32.04,
        31.86,
        34.53,
        32.09,
        31.59,
        34.16,
    ]
    assert [five.row(f"Householder {kind}").figures[0] for kind in ("unitary", "orthogonal", "permutation")] == [
        two.row(f"Type{n}").figures[0] for n in (1, 2, 3)
    ]
    means = [sum(row.figures[0] for row in five.rows[n : n + 3]) / 3 for n in (0, 3, 6)]
    assert means == pytest.approx([32.58, 32.80, 32.61], abs=0.011)  # the paper's averages, which it cuts or rounds
    assert [row.figures[0] for row in six.rows if row.figures] == [1.00, 0.86, 0.61, 0.94, 0.82, 0.82, 0.89]
    assert [row.figures[0] for row in four.rows] == [30.18, 36.87, 32.49, 35.76, 33.08]
    images = {row.name: row.figures[0] for row in load_table("lrpe-3").rows if row.figures}
    assert images == {
        "Base": 0.7788,
        "RoPE": 0.7852,
        "PER": 0.7799,
        "Type1": 0.7858,
        "Type2": 0.7878,
        "Type3": 0.7774,
    }


def test_tables_of_images_are_trained_as_the_papers_say():
    cct, deit = load_table("ape-3"), load_table("lrpe-3")
    assert [row.name for row in cct.rows[:4]] == ["Sinusoidal", "Learned", "Orthogonal (flat)", "Orthogonal (grid)"]
    recipe = cct.recipe_at("original")
    m, t, task = recipe.model, recipe.training, recipe.task
    assert (m.layers, m.model_dim, m.hidden_dim, m.heads, m.activation, m.norm) == (7, 256, 512, 4, "gelu", "layer")
    assert (m.attention_dropout, m.stochastic_depth, task.smoothing, t.weight_decay, t.batch) == (0.1, 0.1, 0.1, 3e-2, 128)
    assert (task.tokenizer, task.pooling, t.steps) == ("convolution", "sequence", 300 * 351)
    recipe = deit.recipe_at("original")
    m, t = recipe.model, recipe.training
    assert (m.layers, m.model_dim, m.hidden_dim, m.heads, m.activation) == (12, 384, 1536, 6, "gelu")
    assert (t.batch, t.steps, t.warmup, t.learning_rate, t.schedule) == (1600, 240_000, 16_000, 5e-4, "cosine")
    assert (t.optimizer, t.epsilon, t.beta1, t.beta2, t.weight_decay) == ("adamw", 1e-8, 0.9, 0.98, 0.05)
    shifts = load_table("horn-shift")
    for corpus in ("mnist", "fashion-mnist"):
        columns = [column for column in shifts.columns if column.corpus == corpus]
        assert [column.view["shift"] for column in columns] == [0, 2, 4, 6, 8]


def test_the_tables_of_the_long_range_arena_hold_what_the_papers_say():
    lrpe, first, cost, latency = (
        load_table(name) for name in ("lrpe-4", "permuteformer-1", "permuteformer-2", "permuteformer-3")
    )
    percent = {
        row.name: [round(100 * figure, 2) for figure in row.figures] for row in (*lrpe.rows, *first.rows) if row.figures
    }
    assert {name: percent[name] for name in ("Base", "RoPE", "Per", "Type1", "Type2", "Type3")} == {
        "Base": [64.81, 39.17, 84.71, 71.61, 41.21],
        "RoPE": [66.53, 40.57, 78.75, 72.68, 62.50],
        "Per": [65.50, 39.17, 83.40, 69.55, 42.03],
        "Type1": [66.80, 39.84, 82.13, 73.79, 63.43],
        "Type2": [66.52, 39.79, 81.55, 73.46, 62.35],
        "Type3": [64.94, 39.56, 83.86, 70.78, 45.15],
    }
    averages = {
        "Base": 60.30,
        "Performer": 64.87,
        "RoFormer": 56.57,
        "PermuteFormer": 65.64,
        "w/o 2D rel. pos.": 62.10,
        "w/o Property 3": 45.24,
        "Reformer": 64.04,
        "Linformer": 60.18,
        "Nyströmformer": 64.40,
    }
    for name, average in averages.items():
        assert sum(percent[name]) / len(percent[name]) == pytest.approx(average, abs=0.011), name
    seconds = {
        "Transformer": [622, 2404, 26, 180],
        "Reformer": [437, 1086, 30, 153],
        "Linformer": [323, 483, 14, 68],
        "Nyströmformer": [332, 566, 15, 65],
        "Performer": [354, 553, 13, 61],
        "PermuteFormer": [361, 550, 13, 62],
        "Performer + T5-style pos. emb. (ours: softmax)": [28585, 81070, 3697, 24601],
    }
    times = {
        "Transformer": [72.03, 20.23, 3.28, 3.89],
        "Reformer": [30.60, 13.57, 13.44, 13.49],
        "Linformer": [19.82, 4.33, 3.31, 4.20],
        "Nyströmformer": [23.55, 9.28, 7.01, 9.14],
        "Performer": [30.20, 5.09, 3.01, 3.80],
        "PermuteFormer": [31.18, 5.18, 2.99, 3.89],
    }
    for table, taken in ((cost, seconds), (latency, times)):
        assert {row.name for row in table.rows if row.figures} == set(taken)
        for name, own in taken.items():
            expected = [mine / other for mine, other in zip(own, taken["Transformer"], strict=True)]
            assert table.row(name).figures == pytest.approx(expected, rel=0.007, abs=0.006)


@pytest.mark.parametrize(("name", "fixed"), [("lrpe-1", 2), ("lrpe-2", 2), ("lrpe-5", 6), ("lrpe-6", 2), ("lengths", 3)])
def test_lrpe_learns_its_angles_and_rows_with_fixed_ones_are_ours(name, fixed):
    table = load_table(name)
    for scale in SCALES:
        for row in (row for row in table.rows if row.scheme.startswith(("lrpe-unitary", "lrpe-orthogonal"))):
            built = build_scheme(table.recipe_at(scale, *table.corpora[:1]).edit(scheme=row.scheme))
            learns = any(name.endswith("frequency") for name, _ in built.named_parameters())
            assert learns == (not row.name.endswith(" with fixed angles")), row
    ours = [row for row in table.rows if row.name.endswith(" with fixed angles")]
    assert len(ours) == fixed
    for row in ours:
        assert not row.figures
        paper_row = table.row(row.name.removesuffix(" with fixed angles"))
        assert paper_row.scheme.replace("learned=true", "learned=false") == row.scheme != paper_row.scheme


LEARNED = {"frequency", "generator", "vectors", "weight"}  # last parts of names of what turns features


@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith(("horn", "lengths", "lrpe-", "newer-"))])
def test_what_learns_its_angles_has_a_row_with_the_same_ones_fixed(name):
    table = load_table(name)
    for corpus in table.corpora or (None,):
        recipe, of = table.recipe_at("tiny", corpus), corpus.name if corpus else ""
        for row in (row for row in table.rows if row.on(of).split(":")[0] not in ("", "horn-constrained", "spe-sine")):
            learned = build_scheme(recipe.edit(scheme=row.on(of)))
            own = {name.rpartition(".")[2] for name, _ in learned.encoding.named_parameters()} & LEARNED
            assert bool(own) == bool(row.fixed) or (learned.phases and not own), row
            if not row.fixed:
                continue
            fixed = build_scheme(recipe.edit(scheme=table.row(row.fixed).on(of)))
            if learned.phases:  # of tokens: what they start as is at consecutive positions
                torch.manual_seed(0)
                q, k, v = torch.rand(3, 1, recipe.model.heads, 9, recipe.model.model_dim // recipe.model.heads)
                fixed.load_state_dict({name: learned.state_dict()[name] for name in fixed.state_dict()})  # forget gates
                both = [scheme(q, k, v, sequence(9), causal=True) for scheme in (learned, fixed)]
                torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)
                continue
            assert learned.choices == fixed.choices
            assert not list(fixed.encoding.parameters())
            torch.manual_seed(0)
            attend = linear_attention if fixed.attention == "linear" else softmax_attention
            q, k, v = torch.rand(3, 1, recipe.model.heads, 9, recipe.model.model_dim // recipe.model.heads)
            x = torch.randint(9, (9, learned.encoding.group.columns)).sort(0).values
            both = [attend(q, k, v, **scheme.at(x)) for scheme in (learned, fixed)]
            torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'split = "test"',
            'spilt = "test"',
            "expected one of title, corpus, figure, split, multiple, scored, view, after, better, style, got 'spilt'",
        ),
        ("figures = [36.87]", "figures = [36.87, 1]", "Performer: expected 1 figures or none, got 2"),
        ('baseline = "Performer"', 'baseline = "Perform"', "baseline: expected a row with a scheme, got 'Perform'"),
        ("steps = 20\n", "stepz = 20\n", "got 'stepz'; did you mean steps?"),
        ("scored = 0.5", "scored = 1", "a multiple from 1 on and a share scored"),
        ("[scales.paper]\n", "", "scales: expected tiny, small, paper and perhaps medium, got medium, small, tiny"),
        ('corpus = "wikitext-103"', 'corpus = "wiki"', "corpus: expected one of wikitext-103, got 'wiki'"),
        ("[[rows]]", "[rows", "permuteformer-4.toml"),
    ],
)
def test_a_damaged_table_is_one_clear_error(tmp_path, old, new, message):
    text = (FOLDER / "permuteformer-4.toml").read_text()
    assert old in text
    (tmp_path / "permuteformer-4.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"permuteformer-4\.toml") as error:
        load_table(str(tmp_path / "permuteformer-4.toml"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_spearman_with_ties():
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # as SciPy's spearmanr
    assert spearman([1, 1], [1, 2]) is None
    assert spearman([1, 2, 3, math.inf], [1, 2, 3, 4]) == 1
    assert spearman([30.10, 30.15, 30.05, 2e5], [1, 2, 3, 4]) == pytest.approx(0.4)


def test_a_table_end_to_end_goes_on_and_is_not_computed_twice(isopos, tmp_path, monkeypatch):
    code, out, _ = isopos("table", "lrpe-2", *TINY, "--dry-run")
    assert (code, "6 of 6 cells are missing" in out) == (0, True)
    assert not (tmp_path / "runs").exists()
    code, out, _ = isopos("table", "lrpe-2", *TINY, "--data", "books=" + _text(tmp_path))
    assert code == 0
    assert "says nothing about the order" in out
    folder = tmp_path / "runs" / "tables" / "lrpe-2-tiny"
    cells = sorted(path.name for path in (folder / "cells").iterdir() if path.is_dir())
    assert cells == ["books-lrpe-orthogonal+learned=true-seed0", "books-rope-seed0", "books-sinusoidal-seed0"]
    page = (folder / "table.md").read_text()
    assert "| Rope | rope | 8.98 | " in page
    assert "steps 20 (paper: 50,000)" in page
    assert "- Data: books here is text.txt.\n" in page
    assert "Type1 on books, seeds 0" in page
    assert "wikitext-103, for which --data wikitext-103=PATH gives one" in page
    assert "isopos table lrpe-2 --scale tiny" in page
    assert "</svg>" in (folder / "curves.svg").read_text()
    before = {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*.json")}
    monkeypatch.setattr(training, "train", None)
    code, out, _ = isopos("table", "lrpe-2", *TINY, "--data", "books=" + _text(tmp_path))
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*.json")} == before
    code, out, _ = isopos("runs", "runs/tables")
    assert (code, "lrpe-2-tiny/cells/books-rope-seed0" in "".join(out.split())) == (0, True)
    (tmp_path / "other.txt").write_text("another text " * 2000)
    code, _, err = isopos("table", "lrpe-2", *TINY, "--data", "books=other.txt")
    assert (code, "has other data than other.txt" in err) == (2, True)


def test_a_cell_that_another_process_computes_is_left_to_it(isopos, tmp_path):
    command = ("table", "lrpe-2", *TINY, "--data", "books=" + _text(tmp_path), "--rows", "Base,Rope")
    folder = tmp_path / "runs" / "tables" / "lrpe-2-tiny"
    held = "import sys, pathlib; from isopos.lab.runs.locks import try_lock\n"
    held += "with try_lock(pathlib.Path(sys.argv[1])) as mine: print(mine, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    place = folder / "cells" / "books-rope-seed0"
    with subprocess.Popen([sys.executable, "-c", held, str(place)], text=True, **pipes) as other:
        assert other.stdout.readline() == "True\n"
        code, out, _ = isopos(*command)
        assert (code, f"books-rope-seed0 is being computed by process {other.pid} on " in out) == (0, True)
        assert [path.parent.name for path in folder.glob("cells/*/scores.json")] == ["books-sinusoidal-seed0"]
        other.kill()
    code, out, _ = isopos(*command)
    assert (code, "is being computed by" in out) == (0, False)
    assert (place / "scores.json").exists()


def test_other_numbers_of_updates_have_separate_folders(isopos, tmp_path):
    command = ["table", "lrpe-2", "--scale", "tiny", "--rows", "Base,Rope", "--data", "books=" + _text(tmp_path)]
    assert isopos(*command, "--steps", "30", "--name", "longer")[0] == 0
    folder = tmp_path / "runs" / "tables" / "lrpe-2-tiny-30-longer"
    assert "steps 30 (paper: 50,000)" in (folder / "table.md").read_text()
    assert json.loads((folder / "cells" / "books-rope-seed0" / "recipe.json").read_text())["steps"] == 30
    assert "2 of 2 cells are missing" in isopos(*command, "--dry-run")[1]
    assert "0 of 2 cells are missing" in isopos(*command, "--steps", "30", "--name", "longer", "--dry-run")[1]


TASKS = """
title = "Two tasks"
citation = "a toy"
recipe = "listops"
figure = "accuracy"
baseline = "flat"

[corpora.lists]
source = ""
edits = { longest = 12 }
scales.tiny = { steps = 4 }

[corpora.order]
recipe = "toy_task:Order"

[[columns]]
title = "lists"
corpus = "lists"

[[columns]]
title = "order"
corpus = "order"

[[rows]]
name = "flat"
scheme = "rope"
figures = [0.5, 0.5]

[[rows]]
name = "tree"
scheme = "rope"
schemes = { lists = "ape-tree" }

[[rows]]
name = "order only"
scheme = "none"
schemes = { lists = "" }

[scales.paper]
[scales.small]
[scales.tiny]
steps = 3
batch = 4
layers = 1
model_dim = 16
heads = 2
"""


def test_a_corpus_may_be_another_task_and_a_row_have_another_scheme_on_it(own, isopos, tmp_path):
    (tmp_path / "two.toml").write_text(TASKS)
    code, _, err = isopos("table", "two.toml", "--scale", "tiny", "--device", "cpu")
    assert code == 0, err
    folder = tmp_path / "runs" / "tables" / "two-tiny"
    steps = {path.parent.name: json.loads(path.read_text())["steps"] for path in folder.glob("cells/*/recipe.json")}
    assert steps == {
        "lists-rope-seed0": 4,
        "lists-ape-tree-seed0": 4,
        "order-rope-seed0": 3,
        "order-none-seed0": 3,
    }
    page = (folder / "table.md").read_text()
    rows = {
        cells[1]: cells[2:]
        for line in page.partition("##")[0].splitlines()
        if len(cells := [*map(str.strip, line.split("|"))]) > 3
    }
    assert rows["tree"][0] == "rope; lists: ape-tree"
    assert rows["tree"][4] == rows["flat"][4] != "missing"
    assert rows["order only"][2] == rows["order only"][-3] == "-"
    assert "A model of order sees" in page
    code, _, err = isopos("table", "two.toml", "--scale", "tiny", "--data", "order=x.txt")
    assert (code, "data: expected none for order, whose task has its own, got x.txt" in err) == (2, True)
    assert "0 of 2 cells are missing" in isopos("table", "two.toml", "--scale=tiny", "--data", "order=", "--dry-run")[1]
    longer = load_table(str(tmp_path / "two.toml")).with_steps("tiny", 9)
    assert [longer.recipe_at("tiny", corpus).training.steps for corpus in longer.corpora] == [9, 9]
    for old, new, message in (
        ("scales.tiny", "scales.tyny", "scale: expected one of tiny, small, paper, medium, got 'tyny'; did you mean tiny?"),
        ("longest = 12", "tokenizer = 1", "field of a recipe: expected one of .*, got 'tokenizer'"),
        ('{ lists = ""', '{ list = ""', "order only: corpus: expected one of lists, order, got 'list'"),
        (TASKS, 'title = "x"', "two.toml: PaperTable: expected citation, baseline, recipe, scales, got none;"),
    ):
        (tmp_path / "two.toml").write_text(TASKS.replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            load_table(str(tmp_path / "two.toml"))


@pytest.mark.slow
def test_each_row_has_the_learning_rate_that_validates_best_with_the_first_seed(isopos, tmp_path):
    command = ["lrpe-1", "--scale", "tiny", "--rows", "Base", "--device", "cpu", "--data", "wikibook=", "CoLA="]
    tuned = [*command, "--seeds", "2", "--rates", "0.01", "1"]
    assert isopos("table", *command)[0] == 0  # its cells serve the rate 1
    cells = tmp_path / "runs" / "tables" / "lrpe-1-tiny" / "cells"
    before = {path: path.stat().st_mtime_ns for path in cells.glob("*/scores.json")}
    assert isopos("table", *tuned, "--dry-run")[1].splitlines()[0] == "wikibook-sinusoidal-rate0.01-seed0"
    code, out, err = isopos("table", *tuned)
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    runs = [path.parent for path in cells.glob("*/scores.json")]
    ends = {path.name: [*validations(path).values()][-1] for path in runs}
    rates = {path.name: json.loads((path / "recipe.json").read_text())["learning_rate"] for path in runs}
    assert ends["wikibook-sinusoidal-seed0"] < ends["wikibook-sinusoidal-rate0.01-seed0"]
    assert rates["wikibook-sinusoidal-rate0.01-seed0"] == rates["wikibook-sinusoidal-seed0"] * 0.01
    accuracies = [ends[f"CoLA-sinusoidal{rate}-seed0"] for rate in ("-rate0.01", "")]
    best = "" if accuracies[1] > accuracies[0] else "-rate0.01"  # of equal ones the first
    other = {"": "-rate0.01", "-rate0.01": ""}[best]
    assert f"CoLA-sinusoidal{best}-seed1" in ends
    assert f"CoLA-sinusoidal{other}-seed1" not in ends
    assert "wikibook-sinusoidal-seed1" in ends
    assert "wikibook-sinusoidal-rate0.01-seed1" not in ends
    starts = {
        json.loads((path / "recipe.json").read_text())["start"].rpartition("/")[2]
        for path in runs
        if path.name.startswith("CoLA")
    }
    assert starts == {"wikibook-sinusoidal-seed0", "wikibook-sinusoidal-seed1"}
    assert "wikibook: 1 for Base." in out
    assert "0 of 6 cells are missing" in isopos("table", *tuned, "--dry-run")[1]
    values = json.loads((cells.parent / "results.json").read_text())["figures"]["CoLA"]["Base"]
    scored = [json.loads((cells / f"CoLA-sinusoidal{best}-seed{seed}" / "scores.json").read_text()) for seed in (0, 1)]
    assert [*values.values()] == [each["columns"]["CoLA"]["value"] for each in scored]


PATCHED = """
title = "t"
citation = "c"
recipe = "language"
figure = "bits_per_byte"
baseline = "rope"
corpora = { text = { source = "" }, patched = { source = "", start = "text", start_row = "rope" } }
columns = [{ title = "bits", corpus = "text" }, { title = "patched", corpus = "patched" }]
rows = [{ name = "rope", scheme = "rope" }, { name = "none", scheme = "none" }]

[scales.paper]
[scales.small]
[scales.tiny]
steps = 4
warmup = 1
validate_every = 2
batch = 2
length = 32
tokenizer = "bytes"
vocabulary = 0
validation_tokens = 256
layers = 1
model_dim = 16
hidden_dim = 32
heads = 2

[start_scales.paper]
[start_scales.small]
[start_scales.tiny]
steps = 3
warmup = 1
validate_every = 3
batch = 2
"""


def test_rates_of_runs_that_start_from_others_whatever_was_run_before(isopos, tmp_path):
    """The names of these cells have the rates of the runs that they start from."""
    (tmp_path / "warm.toml").write_text(PATCHED)
    command = ["table", "warm.toml", "--scale", "tiny", "--device", "cpu"]
    folder = tmp_path / "runs" / "tables" / "warm-tiny"
    for more in ([], ["--rates", "1", "9"], ["--rates", "1", "9", "20", "--seeds", "2"]):
        code, out, err = isopos(*command, *more)
        assert code == 0, err
        assert "missing" not in (folder / "table.md").read_text()
    chosen = {path.name: json.loads((path / "recipe.json").read_text()) for path in (folder / "cells").glob("patched-*")}
    for name, recipe in chosen.items():
        rate = re.search(r"-rate(\d+)-", recipe["start"])
        assert (f"-from{rate[1]}-" if rate else "patched-") in name
        assert rate or "-from" not in name
    shutil.copytree(folder, folder.with_name("warm-tiny-copy"))
    out = isopos(*command, *more, "--name", "copy", "--dry-run")[1]
    assert "0 of" in out


def test_cells_are_scored_again_for_columns_that_have_changed(isopos, tmp_path):
    path, command = tmp_path / "warm.toml", ["table", "warm.toml", "--scale", "tiny", "--device", "cpu", "--data", "text="]
    path.write_text(PATCHED)
    assert isopos(*command)[0] == 0
    folder = tmp_path / "runs" / "tables" / "warm-tiny"
    cell = folder / "cells" / "text-rope-seed0"
    before = json.loads((cell / "scores.json").read_text())["columns"]["bits"]
    path.write_text(PATCHED.replace('{ title = "bits", ', '{ title = "bits", multiple = 4, ', 1))
    assert "2 of 2 cells are missing" in isopos(*command, "--dry-run")[1]
    weights = (cell / "model.safetensors").stat().st_mtime_ns
    assert isopos(*command)[0] == 0
    after = json.loads((cell / "scores.json").read_text())
    assert after["columns"]["bits"]["value"] != before["value"]
    assert (cell / "model.safetensors").stat().st_mtime_ns == weights
    assert (
        json.loads((folder / "results.json").read_text())["figures"]["bits"]["rope"]["0"]
        == after["columns"]["bits"]["value"]
    )
    assert "0 of 2 cells are missing" in isopos(*command, "--dry-run")[1]


def test_rounds_of_another_scheme_or_size_are_refused(isopos, tmp_path):
    text = PATCHED.replace('figure = "bits_per_byte"', 'kind = "speed"').split("corpora =")[0]
    text += 'columns = [{ title = "speed" }]\nrows = [{ name = "rope", scheme = "rope" }]\n'
    text += PATCHED[PATCHED.index("[scales.paper]") : PATCHED.index("[start_scales.paper]")]
    command = ["table", "times.toml", "--scale", "tiny", "--device", "cpu"]
    (tmp_path / "times.toml").write_text(text)
    assert isopos(*command)[0] == 0
    for old, new, said in (
        ('scheme = "rope"', 'scheme = "none"', "row rope: expected that of .*, rope, got none"),
        ("batch = 2", "batch = 4", "batch: expected that of .*, 2, got 4"),
    ):
        (tmp_path / "times.toml").write_text(text.replace(old, new))
        code, _, err = isopos(*command)
        assert code == 2
        assert re.search(said, err), err


@pytest.mark.parametrize(
    ("table", "rates"), [("ape-1", ["2"]), ("ape-1", ["1", "1"]), ("ape-1", ["0", "1"]), ("lrpe-6", ["1", "2"])]
)
def test_learning_rates_that_cannot_be_tried_are_refused(isopos, table, rates):
    status, _, err = isopos("table", table, "--scale", "tiny", "--rates", *rates, "--dry-run")
    assert (status, err.startswith("isopos: rates: expected ")) == (2, True)


def _text(folder):
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(1500)))
    return str(path)


def test_timings_are_rounds_that_schemes_share(isopos, tmp_path):
    rows = ["--rows", "Base,Rope", "--scale", "tiny"]
    code, out, _ = isopos("table", "lrpe-6", *rows)
    assert (code, "relative speed" in out) == (0, True)
    path = tmp_path / "runs" / "tables" / "lrpe-6-tiny" / "timing.json"
    rounds = json.loads(path.read_text())["rounds"]
    assert [set(one) for one in rounds] == [{"Base", "Rope"}] * loader.ROUNDS
    both = isopos("table", "newer-text", "--rows", "string, circulant,rope", "--scale", "tiny", "--dry-run")[1]
    assert "string+variant=circulant" in both
    assert "linear-rope-" in both
    assert "linear-string-" not in both
    code, out, _ = isopos("table", "lrpe-6", "--rows", "Type2,Rope", "--scale", "tiny")
    more = json.loads(path.read_text())["rounds"]
    assert more[: len(rounds)] == rounds
    assert [set(one) for one in more[len(rounds) :]] == [{"Base", "Type2"}] * loader.ROUNDS
    code, out, _ = isopos("table", "lrpe-6", *rows, "--dry-run")
    assert "0 of 2 cells are missing" in out


@pytest.mark.parametrize(("name", "what"), [("permuteformer-2", "training step"), ("permuteformer-3", "one answer")])
def test_costs_are_ratios_of_rounds_by_column(isopos, tmp_path, name, what, monkeypatch):
    monkeypatch.setattr(loader, "ROUNDS", 3)
    code, _, err = isopos("table", name, "--scale", "tiny", "--device", "cpu", "--rows", "Transformer,PermuteFormer")
    assert code == 0, err
    folder = tmp_path / "runs" / "tables" / f"{name}-tiny"
    table = load_table(name)
    for column in table.columns:
        assert table.metric(column).better == "lower"
        rounds = json.loads((folder / f"timing-{column.corpus}.json").read_text())["rounds"]
        assert [set(one) for one in rounds] == [{"Transformer", "PermuteFormer"}] * 3
        expected = sorted(one["PermuteFormer"] / one["Transformer"] for one in rounds)[1]
        assert table.ratio({"Transformer": 2.0, "PermuteFormer": 3.0}, "PermuteFormer") == 1.5
        page = (folder / "table.md").read_text()
        row = next(line for line in page.splitlines() if line.startswith("| PermuteFormer |"))
        assert f"| {expected:.3f} ± " in row
        assert f"{column.title}: Transformer takes " in page
    assert "Performer on text; Performer on retrieval" in page
    assert "updates to" not in page
    assert "rounds" not in page.partition("Missing:")[2].partition("\n")[0]
    again = isopos("table", name, "--scale", "tiny", "--rows", "Transformer,PermuteFormer", "--dry-run")[1]
    assert "0 of 8 cells are missing" in " ".join(again.split())
    assert "image-Performer" in isopos("table", name, "--scale", "tiny", "--rows", "Performer", "--dry-run")[1]
    path = folder / "timing-text.json"
    path.write_text(path.read_text().replace('"layers": "1"', '"layers": "2"'))
    code, _, err = isopos("table", name, "--scale", "tiny", "--dry-run")
    assert (code, "layers: expected that of" in err) == (2, True), err


def test_memory_is_that_of_a_step_in_a_process_of_its_own(tmp_path, isopos, monkeypatch):
    """A bias of all pairs of 512 tokens takes 4 MiB and more, which neither the fused kernel nor sums over tokens do."""
    monkeypatch.setattr(loader, "MEMORY_ROUNDS", 1)
    text = Path(FOLDER, "arena-memory.toml").read_text(encoding="utf-8").replace("length = 64", "length = 512")
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    rows = "Performer,Performer + T5-style pos. emb. (ours: softmax)"
    command = ("table", "own.toml", "--scale", "tiny", "--rows", rows, "--data", "text=")
    code, out, err = isopos(*command, "--device", "cpu")
    assert code == 0, err
    folder = tmp_path / "runs" / "tables" / "own-tiny"
    (mib,) = json.loads((folder / "timing-text.json").read_text())["rounds"]
    softmax, linear, biased = (mib[row] for row in ("Transformer", *rows.split(",")))
    assert 0.5 * softmax < linear < 2 * softmax
    assert biased > softmax + 2 * 2 * 512**2 * 4 / 2**20 - 1, "weights of both samples and both heads"
    assert f"{softmax:,.1f} MiB, the median of 1 rounds" in " ".join(out.split())
    assert "Machine: 1 rounds, on torch" in (folder / "table.md").read_text()
    assert "0 of 2 cells are missing" in isopos(*command, "--dry-run")[1]


def test_the_best_and_what_is_not_shown_to_differ_from_it_are_marked(own, isopos, tmp_path):
    """Two seeds mark no row. Three seeds with differences 0.02, 0.05, 0.08 mark none; three differences of 0.05 do."""
    text = TASKS.replace('baseline = "flat"', 'baseline = "flat"\nmarked = true')
    (tmp_path / "two.toml").write_text(text)
    folder = tmp_path / "runs" / "tables" / "two-tiny"
    command = ["table", "two.toml", "--scale", "tiny", "--device", "cpu", "--data", "order=", "--seeds"]
    assert isopos(*command, "2")[0] == 0
    assert " * |" not in (folder / "table.md").read_text()
    assert isopos(*command, "3")[0] == 0

    def marked(*nones):
        for scheme, values in (("rope", (0.8, 0.9, 1.0)), ("none", nones)):
            for seed, value in enumerate(values):
                path = folder / "cells" / f"order-{scheme}-seed{seed}" / "scores.json"
                scores = json.loads(path.read_text())
                scores["columns"]["order"]["value"] = value
                path.write_text(json.dumps(scores))
        assert isopos(*command, "3")[0] == 0
        return (folder / "table.md").read_text()

    page = marked(0.78, 0.85, 0.92)
    assert "| 90.00% ± 10.00% |" in page
    assert " * |" not in page
    assert "Marked (*) are the best figure and figures not shown to differ from it" in page
    page = marked(0.75, 0.85, 0.95)
    assert "| 90.00% ± 10.00% * |" in page
    assert "| 85.00% ± 10.00% |" in page
    assert isopos(*command, "1")[0] == 0  # what there is of more seeds stays in the table
    assert "| 90.00% ± 10.00% * |" in (folder / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["lrpe-7"],
            f"table: expected one of {', '.join(TABLES)} or the path of a .toml, got 'lrpe-7'",
        ),
        (["nowhere.toml"], "table: expected the path of a .toml file, got 'nowhere.toml', which does not exist"),
        (["lrpe-2", "--seeds", "0"], "seeds: expected a positive number, got 0"),
        (["lrpe-6", "--seeds", "2"], "seeds: expected none, since lrpe-6 measures steps without training, got 2"),
        (["lrpe-2", "--rows", "Bass"], "rows: expected names or schemes"),
        (["lrpe-2", "--data", "x.txt"], "data: expected NAME=PATH with a name of wikitext-103, books, got 'x.txt'"),
        (["lrpe-5", "--data", "x.txt"], "data: expected a file or a folder, but x.txt does not exist"),
        (["lrpe-6", "--data", "x.txt"], "data: expected none, since this table chooses no data"),
        (["lrpe-5", "--name", "a/b"], "name: expected the name of one folder"),
        (["lrpe-2", "--steps", "-1"], "steps: expected a number from 1 to 1,000,000,000,000, got -1"),
        (["lrpe-6", "--steps", "10"], "steps: expected none, since lrpe-6 measures steps without training, got 10"),
        (["lrpe-6", "--device", "gpu"], "device: expected cpu, cuda or auto, got 'gpu'"),
    ],
)
def test_bad_input_is_one_line_before_any_work(isopos, tmp_path, arguments, message):
    code, _, err = isopos("table", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def _start(folder, *arguments):
    options = ["permuteformer-4", "--scale=tiny", f"--data={_text(folder)}"]
    return Forked(folder, forks.isopos, "table", *options, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_after_a_signal_the_same_command_goes_on(tmp_path, number):
    rows = ("--rows", "PermuteFormer,Performer")
    process = _start(tmp_path, *rows)
    folder = tmp_path / "runs" / "tables" / "permuteformer-4-tiny"
    end = time.monotonic() + 240
    while not list(folder.glob("cells/*/metrics.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.005)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == (130 if number == signal.SIGINT else -number), out
    if number == signal.SIGINT:
        assert "the same command continues" in out
        assert "Missing: " in out
    again = _start(tmp_path, *rows)
    out, _ = again.communicate(timeout=240)
    assert again.returncode == 0, out
    assert len(list(folder.glob("cells/*/scores.json"))) == 2


@pytest.mark.slow
def test_two_processes_divide_the_cells(tmp_path):
    both = [_start(tmp_path) for _ in range(2)]
    outs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    folder = tmp_path / "runs" / "tables" / "permuteformer-4-tiny"
    assert len(list(folder.glob("cells/*/scores.json"))) == 5
    assert any("Missing" not in out for out in outs)
    page = (folder / "table.md").read_text()
    assert all(row.name in page for row in load_table("permuteformer-4").rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lrpe-2", "lengths", "ape-3", "lrpe-3"])  # permuteformer-4: two processes, above
def test_a_whole_table_at_the_tiny_scale(isopos, tmp_path, name):
    start = time.process_time()
    code, out, _ = isopos("table", name, "--scale", "tiny", "--device", "cpu")
    assert code == 0
    assert "Missing" not in out
    assert time.process_time() - start < 120
    page = (tmp_path / "runs" / "tables" / f"{name}-tiny" / "table.md").read_text()
    assert all(row.name in page for row in load_table(name).rows)


def test_rows_are_those_that_are_asked_for_with_the_baseline_first():
    console = Console(quiet=True)
    for name in TABLES:
        table = load_table(name)
        known = [row.name for row in table.rows if row.scheme and not absence(row.scheme)]
        expected = [table.baseline, *(row for row in known if row != table.baseline)]
        assert [row.name for row in reproduce._rows(table, "", console)] == expected
        few = [row for row in known if row in (*known[-2:], table.baseline)]
        found = [row.name for row in reproduce._rows(table, ",".join(reversed(few)), console)]
        assert found == [table.baseline, *(row for row in few if row != table.baseline)]


def test_the_sources_of_corpora_and_of_those_from_whose_runs_they_start():
    loaded = functools.cache(load_table)

    def sources(table, *data, scale="small"):
        return reproduce._sources(loaded(table), reproduce.Options(table, scale=scale, data=data))

    assert sources("permuteformer-4", "a.txt") == sources("permuteformer-4", "wikitext-103=a.txt")
    assert list(sources("permuteformer-4", "a.txt").values()) == ["a.txt"]
    starting = 0
    for name in TABLES:
        table = loaded(name)
        order = [one.name for one in table.corpora] or [""]
        for scale in ("tiny", "small")[: 1 + all(not one.start for one in table.corpora)]:
            found = sources(name, scale=scale)
            assert list(found) == [one for one in order if one in found], "in the order of the table"
        for corpus in table.corpora:
            if corpus.start:
                starting += 1
                found = sources(name, f"{corpus.name}=x", f"{corpus.start}=y")
                assert found == {corpus.start: "y", corpus.name: "x"}
                try:
                    found = sources(name, f"{corpus.name}=x")
                    assert list(found) == [corpus.start, corpus.name]
                except ValueError as error:
                    said = f"data: expected {corpus.start}=PATH, from whose runs {corpus.name} starts, got none"
                    assert str(error) == said  # noqa: PT017
    assert starting
    with pytest.raises(ValueError, match="data: expected NAME=PATH with a name of wikitext-103, books, got 'x'"):
        sources("lrpe-2", "x")


def test_a_custom_table_keeps_its_sources_at_the_smallest_scale(tmp_path):
    text = (FOLDER / "newer-masked.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace('source = ""', 'source = "mine.txt"'))
    path = str(tmp_path / "own.toml")
    assert reproduce._sources(load_table(path), reproduce.Options(path, scale="tiny")) == {"text": "mine.txt"}
    (tmp_path / "own.toml").write_text(text.replace('source = ""', 'source = "ask"'))
    assert reproduce._sources(load_table(path), reproduce.Options(path, scale="tiny")) == {"text": ""}


def test_what_about_json_keeps_of_all_commands(tmp_path, monkeypatch):
    table, data = load_table("lrpe-2"), SimpleNamespace(name="mine")
    instructions = torch.backends.cpu.get_cpu_capability()
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads, {instructions}"
    for seeds, corpus, *arguments in (
        (2, "books", "a", "--seeds=2", "--device", "cpu"),
        (3, "books", "a", "--seeds", "3", "--rates", "0.5", "1e-1", "--device", "cpu"),
        (1, "wikitext-103", "b c"),
        (1, "wikitext-103", "b c"),
        (1, "books", "a", "--device", "cpu"),  # fewer seeds
    ):
        monkeypatch.setattr(sys, "argv", ["isopos", "table", *arguments])
        reproduce._note(tmp_path, table, reproduce.Options("lrpe-2", "tiny", seeds=seeds), {corpus: data}, "cpu")
    assert json.loads((tmp_path / "about.json").read_text()) == {
        "table": "lrpe-2",
        "scale": "tiny",
        "commands": [
            "isopos table a --seeds 3 --rates 0.5 1e-1 --device cpu",
            "isopos table 'b c'",
            "isopos table a --device cpu",
        ],
        "seeds": 3,
        "corpora": {"books": "mine", "wikitext-103": "mine"},
        "machine": machine,
        "rates": [],
    }
    monkeypatch.setattr(reproduce, "try_lock", lambda *_: contextlib.nullcontext(False))
    with pytest.raises(
        ValueError, match=r"expected .*about.json to be free within seconds, but process .* has its lock; start again"
    ):
        reproduce._note(tmp_path, table, reproduce.Options("lrpe-2"), {}, "cpu")


def test_missing_rounds_by_row(tmp_path):
    table = load_table("lrpe-6")
    rows = [table.row(name) for name in ("Base", "Rope", "Type2")]
    rounds = [{"Base": 1.0, "Rope": 1.0}] * 20 + [{"Base": 1.0, "Type2": 1.0}] * 3
    (tmp_path / "timing.json").write_text(json.dumps(rounds))
    assert reproduce._missing_rounds(table, rows, tmp_path, "") == {"Rope": 1, "Type2": 18}


def test_a_metric_of_a_split_that_the_data_lack_is_of_the_validation(tmp_path, monkeypatch):
    """The command scores a view once for all columns that share it."""
    asked = []

    def measure(model, recipe, view):
        asked.append(view)
        return Scored({"nats": float(len(asked))}, reason="why")

    metrics = [
        Metric("a", "nats", view=View("test")),
        Metric("b", "bits", view=View("test")),
        Metric("c", "nats", view=View("validation", 2)),
    ]
    cell = reproduce.Cell(tmp_path, "", None, metrics, None)
    recipe = SimpleNamespace(training=SimpleNamespace(device="cpu"))
    monkeypatch.setattr("isopos.lab.runs.checkpoints.load_run", lambda folder: (None, torch.nn.Linear(1, 1)))
    for splits, split in ((("validation",), "validation"), (("validation", "test"), "test")):
        asked.clear()
        found = reproduce._scores(cell, SimpleNamespace(splits=splits, measure=measure), recipe)
        assert asked == [View(split), View("validation", 2)]
        assert found == {
            "a": {"value": 1.0, "nats": 1.0, "split": split, "reason": "why", "scored": scored(metrics[0])},
            "b": {"value": None, "nats": 1.0, "split": split, "reason": "why", "scored": scored(metrics[1])},
            "c": {"value": 2.0, "nats": 2.0, "split": "validation", "reason": "why", "scored": scored(metrics[2])},
        }
