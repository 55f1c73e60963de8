"""Test run folders, and folders from versions without tasks."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from isopos.lab.recipes import Recipe
from isopos.lab.reports.comparison import read_comparison
from isopos.lab.runs import folders
from isopos.lab.runs.checkpoints import untrained_model
from isopos.lab.runs.folders import Result, data_fingerprint, read_recipe

OLD = {"status": "finished", "bits_per_byte": {"1": 2.5, "2": 2.625, "4": None}, "tokens_per_second": 9.0}
MORE = {
    "parameters": 5,
    "choices": dict.fromkeys(("attention", "feature_map", "decay", "denominator"), "linear"),
    "laws": "yes",
}


def test_a_run_folder_is_never_replaced_unasked(tmp_path):
    run = tmp_path / "run"
    folders.create(run, Recipe().edit(steps=3))
    with pytest.raises(ValueError, match=r"exists; continue it by --resume, .*--overwrite, .*--name"):
        folders.create(run, Recipe())
    assert folders.read_recipe(run).training.steps == 3
    folders.create(run, Recipe().edit(steps=4), overwrite=True)
    assert folders.read_recipe(run).training.steps == 4
    assert folders.read_recipe(folders.aside_path(run)).training.steps == 3


def test_only_runs_are_replaced(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="holds no run"):
        folders.create(tmp_path, Recipe(), overwrite=True)
    assert (tmp_path / "mine").exists()


def test_what_a_kill_left_does_not_hinder(tmp_path):
    (tmp_path / ".run.new").mkdir()
    folders.create(tmp_path / "run", Recipe())
    assert not (tmp_path / ".run.new").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        folders.create(tmp_path / "file" / "run", Recipe())


def test_a_folder_without_a_run_says_where_runs_are(tmp_path):
    folders.create(tmp_path / "all" / "one", Recipe())
    with pytest.raises(ValueError, match=r"recipe\.json, got .*; it holds .*one"):
        folders.read_recipe(tmp_path / "all")
    (tmp_path / "all" / "one" / "recipe.json").write_text('{"stepz": 1}')
    with pytest.raises(ValueError, match=r"recipe\.json: field of a recipe: expected one of .*, got 'stepz'"):
        folders.read_recipe(tmp_path / "all" / "one")
    (tmp_path / "all" / "one" / "recipe.json").write_text('{"steps": 0}')
    with pytest.raises(ValueError, match=r"recipe\.json: steps: expected a number from 1"):
        folders.read_recipe(tmp_path / "all" / "one")


def test_the_recipe_of_a_resumed_run_may_differ_in_where_it_runs(tmp_path):
    folders.create(tmp_path / "run", Recipe())
    folders.check_same_recipe(tmp_path / "run", Recipe().edit(device="cuda", workers=3, devices=2, save_every=7))
    with pytest.raises(ValueError, match="seed was 0, is 1; steps was 250, is 3;"):
        folders.check_same_recipe(tmp_path / "run", Recipe().edit(steps=3, seed=1))


def test_what_the_data_told_a_resumed_run_is_taken_where_it_is_left_open(tmp_path):
    before = Recipe().edit(vocabulary=300)
    folders.create(tmp_path / "run", before)
    assert Recipe().with_inferred(before) == before
    with pytest.raises(ValueError, match="vocabulary was 300, is 500;"):
        folders.check_same_recipe(tmp_path / "run", Recipe().edit(vocabulary=500).with_inferred(before))


def test_a_log_goes_on_after_a_step_and_drops_what_came_later(tmp_path):
    with folders.Log(tmp_path) as log:
        for step in range(1, 6):
            log.write(step=step, loss=step / 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed while it wrote
    assert [row["step"] for row in folders.read_rows(path)] == [1, 2, 3, 4, 5]
    with folders.Log(tmp_path, 3) as log:
        log.write(step=4, loss=9.0)
        assert [row["loss"] for row in log.rows] == [1 / 3, 2 / 3, 1.0]
    assert [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())][2:] == [(3, 1.0), (4, 9.0)]


def test_numbers_survive_a_log_bit_for_bit(tmp_path):
    with folders.Log(tmp_path) as log:
        log.write(step=1, loss=0.1 + 0.2)
    assert folders.read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.1 + 0.2}]


class Killed(BaseException):
    pass


def _kill_at(monkeypatch, moment):
    """Simulate a kill at a given folder operation; a removal stops halfway."""
    calls = []

    def killing(change):
        def call(path, *rest, **options):
            calls.append(path)
            if len(calls) == moment:
                if change is shutil.rmtree and path.exists():
                    next(path.iterdir()).unlink()
                raise Killed
            return change(path, *rest, **options)

        return call

    monkeypatch.setattr(folders.shutil, "rmtree", killing(shutil.rmtree))
    for name in ("rename", "mkdir"):
        monkeypatch.setattr(Path, name, killing(getattr(Path, name)))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("moment", range(1, 12))
def test_a_kill_at_any_moment_costs_nothing_that_was_there(tmp_path, monkeypatch, moment, again):
    """The kill comes during a replacement, or while a second attempt restores the folder after a first kill."""
    run = tmp_path / "run"
    folders.start_folder(run, "recipe.json", {"mine": 1})
    (run / "more").write_text("whole")
    if again:
        folders.start_folder(run, "recipe.json", {"killed": 1})
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        _kill_at(patch, moment)
        folders.start_folder(run, "recipe.json", {"new": 1})
        folders.restore(run)
    folders.start_folder(run, "recipe.json", {"newer": 1})
    assert json.loads((run / "recipe.json").read_text()) == {"newer": 1}
    assert folders.restore(run)
    assert json.loads((run / "recipe.json").read_text()) == {"mine": 1}
    assert (run / "more").read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} <= {"run", ".run.new", ".run.gone", "..run.new.gone"}


def test_a_run_that_a_kill_left_aside_is_there_again(tmp_path):
    folders.create(tmp_path / "run", Recipe())
    (tmp_path / "run").rename(folders.aside_path(tmp_path / "run"))
    with pytest.raises(ValueError, match="exists"):
        folders.create(tmp_path / "run", Recipe().edit(steps=3))
    assert folders.read_recipe(tmp_path / "run") == Recipe()


def test_a_result_is_read_as_it_was_written(tmp_path):
    result = Result("finished", {"bits/byte": 0.5, "at 2x": None, "at 4x": None}, 3.0, **MORE)
    (tmp_path / "recipe.json").write_text("{}")
    assert Result.read(tmp_path) is None
    result.save(tmp_path)
    assert Result.read(tmp_path) == result


def test_a_run_of_before_there_were_tasks(tmp_path):
    (tmp_path / "recipe.json").write_text(
        json.dumps({"scheme": "rope", "steps": 3, "length": 16, "cutoffs": [], "clip": 0.5})
    )
    (tmp_path / "result.json").write_text(json.dumps(OLD | MORE))
    (tmp_path / "text.json").write_text(json.dumps({"name": "text", "sha256": "abc"}))
    said = {"torch": "2.13.0", "device": "cpu", "threads": 2, "planned": [], "complete": True}
    (tmp_path / "comparison.json").write_text(json.dumps({"text": "mine", "bytes": 12_345, "sha256": "abc"} | said))
    recipe = read_recipe(tmp_path)
    assert (recipe.training.steps, recipe.training.clip, recipe.task.length) == (3, 0.5, 16)
    assert Result.read(tmp_path) == Result("finished", {"bits/byte": 2.5, "at 2x": 2.625, "at 4x": None}, 9.0, **MORE)
    assert data_fingerprint(tmp_path) == "abc"
    assert [read_comparison(tmp_path)[key] for key in ("task", "data", "summary")] == ["language", "mine", "12,345 bytes"]


@pytest.mark.parametrize("text", ["{", '{"status": "finished"}', json.dumps(OLD | MORE | {"bits_per_byte": {}})])
def test_a_damaged_result_is_named(tmp_path, text):
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json: "):
        Result.read(tmp_path)


def test_a_module_that_is_not_here_is_no_damage(tmp_path):
    values = Recipe().edit(scheme="rope").as_dict()
    (tmp_path / "recipe.json").write_text(json.dumps({**values, "scheme": "nowhere.mine"}))
    with pytest.raises(
        ValueError, match=r"cannot import nowhere: .*; start in the folder that holds the module, or install it"
    ):
        untrained_model(tmp_path)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a", "a/", "", " ", ".a", ".a.lock"])
def test_a_name_is_that_of_one_folder(name):
    with pytest.raises(ValueError, match=f"name: expected the name of one folder under runs/, got {name!r}"):
        folders.run_folder(name)
    assert folders.run_folder("a.b") == Path("runs/a.b")


@pytest.mark.parametrize("aside", [False, True])
def test_what_a_kill_left_aside_is_kept_until_a_new_run_ends(tmp_path, aside):
    run = tmp_path / "run"
    folders.create(run, Recipe())
    if aside:
        folders.start_folder(run, "recipe.json", Recipe().as_dict())
        assert folders.aside_path(run).exists()
    folders.create(run, Recipe().edit(seed=3), overwrite=True)
    assert folders.read_recipe(run).seed == 3
    folders.remove_folder(folders.aside_path(run))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_rows_of_a_run_that_ended(tmp_path):
    """A finished run has one row per step unless patience ended it. No rows, or a partial row, are damage."""
    recipe = Recipe().edit(steps=3)
    folders.create(tmp_path / "run", recipe)
    run = tmp_path / "run"
    result = Result("finished", {"bits/byte": 0.5, "at 2x": None, "at 4x": None}, 3.0, **MORE)
    result.save(run)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="expected rows up to step 1 at least, got none; remove it"):
        folders.read_rows(run / "metrics.jsonl")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: expected rows up to step 3, got rows up to step 2; remove it"):
        folders.read_run(run, recipe)
    rows = folders.read_rows(run / "metrics.jsonl")
    assert folders.read_run(run, recipe.edit(patience=1, validate_every=1)) == (rows, result)
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 2.0}\n{"st')
    with pytest.raises(ValueError, match="line 2: expected a row, got a part of one; remove the line, or the file"):
        folders.read_run(run, recipe)
    for status, known in (("diverged at step 2", True), ("ended", False)):
        replace(result, status=status).save(run)
        if known:
            assert Result.read(run).status == status
        else:
            with pytest.raises(
                ValueError, match="status: expected finished or diverged, got 'ended'; remove it, and the command"
            ):
                Result.read(run)
    (run / "data.json").write_text('{"name": "a", "sha256": ""}')
    with pytest.raises(
        ValueError, match="sha256: expected the hash of the data, got an empty text; remove it, and the data of"
    ):
        data_fingerprint(run)
