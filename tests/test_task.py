"""Test the interface of tasks: the task of tests/extension in every command, and errors for unknown names and fields."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from isopos.lab import tasks
from isopos.lab.recipes import Recipe
from isopos.lab.runs.folders import read_rows
from isopos.lab.tasks.bidirectional import Bidirectional
from isopos.lab.tasks.task import View

TINY = ("--model-dim=16", "--heads=2", "--layers=1", "--batch=64", "--learning-rate=1e-2", "--device=cpu", "--length=4")


def test_a_comparison_has_the_highest_on_top(own, isopos, tmp_path):
    options = ("--task=toy_task:Order", "--schemes=none,rope", "--steps=60", "--seeds=2", "--name=a")
    code, out, err = isopos("compare", *options, *TINY)
    assert code == 0, err
    rows = [line.split()[1] for line in out.splitlines() if "elu+1" in line]
    assert rows == ["rope", "none"]
    assert "accuracy, higher is better" in out
    run = tmp_path / "runs" / "a" / "rope-seed1"
    assert json.loads((run / "recipe.json").read_text())["task"] == "toy_task:Order"
    assert json.loads((run / "result.json").read_text())["scores"]["accuracy"] > 0.6
    text = (tmp_path / "runs" / "a" / "report.html").read_text()
    assert "kernel-rope" in text
    assert "training loss, nats" in text
    assert "% accuracy" in isopos("runs")[1]
    assert isopos("eval", "runs/a/rope-seed1")[0] == 0
    length = isopos("eval", "runs/a/rope-seed1", "--length=2")[2]
    assert "length: expected none, which samples of this task do not have; it takes split, limit" in length
    assert "split: expected one of validation" in isopos("eval", "runs/a/rope-seed1", "--split=test")[2]
    assert "expected a language model, got a model of the task toy_task:Order" in isopos("generate", "runs/a/rope-seed1")[2]


def test_random_tokens_are_those_of_their_step_and_scored_where_they_stand():
    recipe = Recipe(task=Bidirectional(vocabulary=7, length=5)).edit(layers=1, model_dim=8, heads=2, batch=4)
    data, model = recipe.task.load(recipe), recipe.task.model(recipe)
    (first,), (second,) = data.batch(recipe, 0), data.batch(recipe, 1)
    assert first.shape == (4, 5)
    assert 0 <= first.min() < first.max() < 7
    assert first.equal(torch.cat([data.batch(recipe, 0, rank, 2)[0] for rank in range(2)]))
    assert not first.equal(second)
    assert recipe.task.size(recipe) == 20
    expected = F.nll_loss(model(first).log_softmax(-1).flatten(0, 1), first.flatten())
    assert data.score(model, recipe, View()).figures == pytest.approx({"loss": expected.item()})


def test_patience_waits_for_a_higher_one(own, isopos, tmp_path):
    options = ["--steps=60", "--validate-every=1", "--patience=3", "--learning-rate=1e-9", "--schedule=constant"]
    assert isopos("train", "toy_task:Order", "--name=a", *TINY, *options)[0] == 0
    assert len([row for row in read_rows(tmp_path / "runs" / "a" / "metrics.jsonl") if "loss" in row]) == 4


def test_the_list_shows_the_highest_validation_of_a_run_that_has_not_ended(own, isopos, tmp_path):
    assert isopos("train", "toy_task:Order", "--steps=2", "--name=a", *TINY)[0] == 0
    run = tmp_path / "runs" / "a"
    (run / "result.json").unlink()
    rows = [{"step": step, "validation": value} for step, value in enumerate((0.5, 0.75, 0.625), 1)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "75.0% accuracy" in " ".join(isopos("runs")[1].split())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("langage", "task: expected one of language, .* MODULE:NAME, got 'langage'; did you mean language?"),
        ("nowhere:X", "task: cannot import nowhere: ModuleNotFoundError"),
        ("toy_task:Shuffles", "task: expected toy_task:Shuffles to be a subclass"),
        ("toy_task:Right", "task: expected toy_task:Right to be a subclass"),
    ],
)
def test_a_task_that_is_not_there(own, isopos, name, message):
    with pytest.raises(ValueError, match=message):
        tasks.find(name)
    assert isopos("compare", f"--task={name}")[0] == 2


def test_fields_have_one_place():
    from dataclasses import make_dataclass

    from isopos.lab.tasks.language import Language

    twice = make_dataclass("Twice", [("steps", int, 3)], bases=(Language,), frozen=True)
    with pytest.raises(ValueError, match="task: expected fields with distinct names, got steps"):
        Recipe(task=twice())


def test_figures_and_views_that_a_task_does_not_have():
    task = Recipe().task
    with pytest.raises(ValueError, match="figure: expected one of bits_per_byte, perplexity, nats, tokens, got 'accuracy'"):
        task.figure("accuracy")
    task.check_view(View(multiple=8, scored=0.5))
    with pytest.raises(ValueError, match=r"length: expected none.* it takes no choice$"):
        tasks.find("bidirectional")().check_view(View(multiple=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--steps=5", "listops"), "recipe: expected it first, isopos train listops"),
        (("train", "--name", "listops", "typo"), "recipe: expected it first, isopos train typo"),
        (("train", "bidirectional", "--scale=tiny"), "scale: expected none for a task"),
    ],
)
def test_the_recipe_that_is_named_is_trained_or_none(isopos, tmp_path, arguments, message):
    code, _, err = isopos(*arguments)
    assert code == 2
    assert err.startswith(f"isopos: {message}")
    assert not (tmp_path / "runs").exists()


def test_no_file_of_the_working_folder_takes_the_place_of_a_library(own, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    tasks.find("language")
    assert "" not in sys.path
    tasks.find("toy_task:Order")
    assert sys.path[-1] == ""


@pytest.mark.parametrize(
    ("field", "command"), [("scale", "train"), ("resume", "train"), ("seeds", "compare"), ("task", "train")]
)
def test_a_field_is_not_called_as_an_option_of_a_command(own, isopos, tmp_path, field, command):
    lines = ["import dataclasses, toy_task", "@dataclasses.dataclass(frozen=True)", "class Own(toy_task.Order):"]
    (tmp_path / f"own_{field}.py").write_text("\n".join([*lines, f"    {field}: int = 1"]))
    task = f"own_{field}:Own"
    code, _, err = isopos(*((command, task) if command == "train" else (command, f"--task={task}")))
    assert code == 2
    assert err.startswith(f"isopos: task: expected fields with distinct names, got {field}\n")


def test_a_damaged_run_is_named_and_hides_no_other(isopos, tmp_path):
    train = ("train", "toy_task:Order", "--steps=2", *TINY)
    shutil.copy(Path(__file__).parent / "extension" / "toy_task.py", tmp_path)
    for name in ("a", "b"):
        assert isopos(*train, f"--name={name}")[0] == 0
    weights = tmp_path / "runs" / "a" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    code, _, err = isopos("eval", "runs/a")
    assert code == 2
    assert "model.safetensors: expected the weights of this run's model" in err
    recipe = tmp_path / "runs" / "a" / "recipe.json"
    recipe.write_text(recipe.read_text().replace("toy_task", "toy_gone"))
    code, out, _ = isopos("runs")
    assert code == 0
    assert "cannot be read" in out
    assert "% accuracy" in out


def test_methods_of_tasks_and_data_keep_their_earlier_names_for_a_version(own):
    toy = own("toy_task")
    with pytest.warns(DeprecationWarning, match="Old.settle is infer now; the old name goes in the next version"):
        old = type("Old", (toy.Shuffles,), {"settle": lambda self, recipe: recipe.edit(steps=7)})
    assert old().infer(Recipe()).training.steps == 7
    new = type("New", (toy.Shuffles,), {"infer": lambda self, recipe: recipe.edit(steps=8)})
    assert new().settle(Recipe()).training.steps == 8
    with pytest.warns(DeprecationWarning, match="Older.settled is inferred now"):
        older = type("Older", (toy.Order,), {"settled": ("length",)})
    assert older().inferred == ("length",)
