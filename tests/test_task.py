"""The seam of tasks: one from outside the package, in under 40 lines, goes through every command, and a table of it."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from isopos.lab import tasks
from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows
from isopos.lab.tasks.task import View
from isopos.lab.training import run as training

TASK = '''"""Each place names the bit to its left."""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from isopos.lab.tasks.build import build_scheme, seeded
from isopos.lab.tasks.task import Data, Metric, Scored, Task
from isopos.models import Encoder

@dataclass(frozen=True)
class Left(Task):
    bits: int = 8
    """Of a sample."""
    @property
    def metrics(self):
        return (Metric("accuracy", "right", "higher", ".1%", note="share of bits that are named"),)
    def model(self, recipe):
        scheme = build_scheme(recipe)
        with seeded(recipe):
            return Encoder(2, recipe.model.model_dim, recipe.model.layers, scheme)
    def load(self, recipe, console=None, run=None):
        return Bits()

class Bits(Data):
    name, sha256, summary = "random bits", "none", "as many as are asked for"
    def draw(self, recipe, step, count):
        bits = np.random.default_rng((recipe.seed, step)).integers(2, size=(count, recipe.task.bits))
        return torch.from_numpy(bits), torch.from_numpy(bits).roll(1, 1)
    def batch(self, recipe, step, rank=0, ranks=1):
        return tuple(x.tensor_split(ranks)[rank] for x in self.draw(recipe, step, recipe.training.batch))
    def loss(self, model, *batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    def score(self, model, recipe, view):
        bits, left = self.draw(recipe, 10**9, 64)
        return Scored({"right": (model(bits).argmax(-1) == left).double().mean().item()})
'''
TABLE = """title = "Bits"
citation = "nobody"
baseline = "none"
recipe = "lefts:Left"
columns = [{ title = "accuracy" }]
rows = [{ name = "none", scheme = "none", figures = [0.5] }, { name = "rope", scheme = "rope", figures = [1] }]
edits = { model_dim = 16, heads = 2, layers = 1, batch = 16, save_every = 8, validate_every = 4, learning_rate = 1e-2 }
scales = { tiny = { steps = 8 }, small = { steps = 60 }, paper = { steps = 60 } }
"""
TINY = ["--model-dim=16", "--heads=2", "--layers=1", "--batch=16", "--learning-rate=1e-2", "--device=cpu", "--bits=6"]


@pytest.fixture
def lefts(tmp_path, monkeypatch):
    (tmp_path / "lefts.py").write_text(TASK)
    (tmp_path / "bits.toml").write_text(TABLE)
    monkeypatch.setitem(sys.modules, "lefts", None)
    del sys.modules["lefts"]
    monkeypatch.syspath_prepend(tmp_path)


def test_it_takes_less_than_40_lines():
    assert len(TASK.splitlines()) < 40
    assert len(TABLE.splitlines()) < 40


def test_a_comparison_has_the_highest_on_top(lefts, isopos, tmp_path):
    code, out, err = isopos(
        "compare", "--task=lefts:Left", "--schemes=none,rope", "--steps=80", "--seeds=2", "--name=a", *TINY
    )
    assert code == 0, err
    rows = [line.split()[1] for line in out.splitlines() if "elu+1" in line]
    assert rows == ["rope", "none"]
    assert "share of bits that are named, higher is better" in out
    run = tmp_path / "runs" / "a" / "rope-seed1"
    assert json.loads((run / "recipe.json").read_text())["task"] == "lefts:Left"
    assert json.loads((run / "result.json").read_text())["scores"]["accuracy"] > 0.6
    text = (tmp_path / "runs" / "a" / "report.html").read_text()
    assert "kernel-rope" in text
    assert "training loss, nats" in text
    assert "% accuracy" in isopos("runs")[1]
    assert isopos("eval", "runs/a/rope-seed1")[0] == 0
    assert (
        "length: expected none, which samples of this task do not have"
        in isopos("eval", "runs/a/rope-seed1", "--length=2")[2]
    )
    assert "split: expected one of validation" in isopos("eval", "runs/a/rope-seed1", "--split=test")[2]
    assert "expected a language model, got one of the task lefts:Left" in isopos("generate", "runs/a/rope-seed1")[2]


def test_a_run_goes_on_bit_for_bit_with_the_weights_of_the_highest_validation(lefts, isopos, tmp_path, monkeypatch):
    command = ["train", "lefts:Left", "--steps=40", "--save-every=10", "--validate-every=5", "--dropout=0.1", *TINY]
    assert isopos(*command, "--name=whole")[0] == 0
    original = training.train

    def train(recipe, data, folder, show, **options):
        def stop(*row):
            show(*row)
            if row[0] == 17:
                os.kill(os.getpid(), signal.SIGTERM)

        return original(recipe, data, folder, stop, **options)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", train)
        assert isopos(*command, "--name=parts")[0] == 143
    assert isopos(*command, "--name=parts", "--resume")[0] == 0
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    rows = read_rows(whole / "metrics.jsonl")
    assert read_rows(parts / "metrics.jsonl") == rows
    best = max(row["validation"] for row in rows if "validation" in row)
    assert checkpoints.best(whole).validation == best
    assert json.loads((whole / "result.json").read_text())["scores"] == {"accuracy": best}


def test_patience_waits_for_a_higher_one(lefts, isopos, tmp_path):
    options = ["--steps=60", "--validate-every=1", "--patience=3", "--learning-rate=1e-9", "--schedule=constant"]
    assert isopos("train", "lefts:Left", "--name=a", *TINY, *options)[0] == 0
    assert len([row for row in read_rows(tmp_path / "runs" / "a" / "metrics.jsonl") if "loss" in row]) == 4


def test_a_table_of_its_own(lefts, isopos, tmp_path):
    for _ in range(2):
        code, _, err = isopos("table", "bits.toml", "--device=cpu")
        assert code == 0, err
    folder = tmp_path / "runs" / "tables" / "bits-small"
    page = (folder / "table.md").read_text()
    assert "| rope | rope | 100.0% |" in page
    assert "Figures are share of bits that are named, higher is better" in page
    assert sorted(path.name for path in (folder / "cells").iterdir()) == ["none-seed0", "rope-seed0"]
    assert "updates to none's accuracy" in page
    speed = Path("bits.toml").read_text().replace('title = "Bits"', 'title = "Bits"\nkind = "speed"')
    Path("speeds.toml").write_text(speed)
    assert isopos("table", "speeds.toml", "--scale=tiny", "--device=cpu")[0] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("langage", "task: expected one of language, .* or MODULE:NAME, got 'langage', did you mean language?"),
        ("nowhere:X", "task: cannot import nowhere: ModuleNotFoundError"),
        ("lefts:Bits", "task: expected lefts:Bits to be a subclass"),
        ("lefts:Right", "task: expected lefts:Right to be a subclass"),
    ],
)
def test_a_task_that_is_not_there(lefts, isopos, name, message):
    with pytest.raises(ValueError, match=message):
        tasks.find(name)
    assert isopos("compare", f"--task={name}")[0] == 2


def test_fields_have_one_place():
    from dataclasses import make_dataclass

    from isopos.lab.tasks.language import Language

    twice = make_dataclass("Twice", [("steps", int, 3)], bases=(Language,), frozen=True)
    with pytest.raises(ValueError, match="task: expected fields with names of their own, got steps"):
        Recipe(task=twice())


def test_figures_and_views_that_a_task_does_not_have():
    task = Recipe().task
    with pytest.raises(ValueError, match="figure: expected one of bits_per_byte, perplexity, nats, tokens, got 'accuracy'"):
        task.figure("accuracy")
    task.check_view(View(multiple=8, scored=0.5))
    with pytest.raises(ValueError, match=r"length: expected none.* it takes limit$"):
        tasks.find("bidirectional")().check_view(View(multiple=2))
