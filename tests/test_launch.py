"""Test `isopos train`, `eval` and `runs` through the command line, in one process."""

import io
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from isopos import lab
from isopos.lab.commands import runs as listing
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows
from isopos.lab.tasks.task import View
from isopos.lab.training import run as training

TINY = ["--length=32", "--batch=2", "--layers=1", "--model-dim=16", "--heads=2", "--validation-tokens=512", "--device=cpu"]
TRAIN = ["train", "quickstart", "--steps=6", "--save-every=2", *TINY]


def _interrupting(monkeypatch, step):
    """Send SIGINT to training at a step, as Ctrl-C does."""
    original = training.train

    def train(recipe, source, folder, show, **options):
        def stop(*row):
            show(*row)
            if row[0] == step:
                os.kill(os.getpid(), signal.SIGINT)

        return original(recipe, source, folder, stop, **options)

    monkeypatch.setattr(training, "train", train)


def test_a_run_from_the_command_line_and_its_weights_in_one_line(isopos, tmp_path):
    code, out, err = isopos(*TRAIN, "--name", "mine")
    assert (code, err) == (0, "")
    assert "finished: bits/byte" in out
    run = tmp_path / "runs" / "mine"
    names = {
        "recipe.json",
        "metrics.jsonl",
        "result.json",
        "model.safetensors",
        "tokenizer.json",
        "data.json",
        "checkpoints",
    }
    assert {path.name for path in run.iterdir()} == names
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(isinstance(row["loss"], float) for row in rows)
    (run / "checkpoints").rename(tmp_path / "gone")  # nothing there is needed
    model = lab.load("runs/mine")
    assert not model.training
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 256)


def test_a_run_is_never_replaced_unasked(isopos, tmp_path):
    assert isopos(*TRAIN)[0] == 0
    before = (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_bytes()
    code, _, err = isopos(*TRAIN)
    assert code == 2
    assert "--resume" in err
    assert "--overwrite" in err
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_bytes() == before
    assert isopos(*TRAIN, "--overwrite", "--seed=1")[0] == 0
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_bytes() != before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".quickstart.lock", "quickstart"]


def test_ctrl_c_leaves_a_checkpoint_to_evaluate_and_to_go_on_from(isopos, tmp_path, monkeypatch):
    assert isopos(*TRAIN, "--name=whole")[0] == 0
    with monkeypatch.context() as patch:
        _interrupting(patch, 3)
        code, _, err = isopos(*TRAIN, "--name=mine")
    assert code == 130
    assert err == "isopos: interrupted after step 4; the same command with --resume goes on from step 4\n"
    run = tmp_path / "runs" / "mine"
    code, out, _ = isopos("eval", "runs/mine", "--length", "1", "2")
    assert code == 0
    assert "checkpoints/step-00000004, step 4" in out
    out = isopos("runs")[1]
    assert [word in out for word in ("whole", "finished", "6/6", "mine", "not finished", "4/6")] == [True] * 6
    code, _, err = isopos(*TRAIN, "--name=mine", "--resume", "--steps=8")
    assert code == 2
    assert "steps was 6, is 8" in err
    assert isopos(*TRAIN, "--name=mine", "--resume", "--workers=1")[0] == 0
    losses = [[row["loss"] for row in read_rows(tmp_path / "runs" / name / "metrics.jsonl")] for name in ("whole", "mine")]
    assert losses[0] == losses[1]
    result = json.loads((run / "result.json").read_text())["scores"]
    assert isopos("eval", "runs/mine", "--length", "1", "2", "4")[0] == 0
    evaluations = json.loads((run / "eval.json").read_text())
    assert [one["step"] for one in evaluations] == [4, 6]
    figures = evaluations[1]["figures"]
    assert [figures[m]["bits_per_byte"] for m in "124"] == pytest.approx(list(result.values()))
    assert isopos(*TRAIN, "--name=mine", "--resume")[0] == 0  # finished: says so again


def test_a_damaged_checkpoint_is_refused_and_without_it_the_run_goes_on(isopos, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        _interrupting(patch, 4)
        assert isopos(*TRAIN)[0] == 130
    last = checkpoints.newest(tmp_path / "runs" / "quickstart").folder
    (last / "state.pt").write_bytes(b"damaged")
    code, _, err = isopos(*TRAIN, "--resume")
    assert code == 2
    assert str(last.relative_to(tmp_path)) in err
    assert "--resume goes on from step 4" in err
    assert len(err.splitlines()) == 1
    for path in last.iterdir():
        path.unlink()
    assert isopos(*TRAIN, "--resume")[0] == 0


def test_a_run_does_not_go_on_with_another_text(isopos, tmp_path, monkeypatch):
    text = tmp_path / "mine.txt"
    text.write_text("one two three four\n" * 50)
    with monkeypatch.context() as patch:
        _interrupting(patch, 2)
        assert isopos(*TRAIN, "--data=mine.txt")[0] == 130
    text.write_text("one two three five\n" * 50)
    code, _, err = isopos(*TRAIN, "--data=mine.txt", "--resume")
    assert code == 2
    assert "expected the data of runs/quickstart, sha256" in err
    text.write_text("one two three four\n" * 50)
    assert isopos(*TRAIN, "--data=mine.txt", "--resume")[0] == 0


def test_a_run_that_diverges_exits_with_1(isopos):
    code, out, _ = isopos(*TRAIN, "--learning-rate=1e12", "--clip=0", "--schedule=constant", "--steps=20")
    assert code == 1
    assert "diverged at step" in out


def test_words_and_an_adaptive_softmax(isopos, tmp_path, monkeypatch):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    arguments = ["--tokenizer=words", "--vocabulary=600", "--cutoffs", "100", "300"]
    assert isopos(*TRAIN, *arguments)[0] == 0
    recipe = json.loads((tmp_path / "runs" / "quickstart" / "recipe.json").read_text())
    assert (recipe["vocabulary"], recipe["cutoffs"]) == (600, [100, 300])
    assert isopos(*TRAIN, *arguments, "--resume")[0] == 0
    code, out, _ = isopos("eval", "runs/quickstart", "--length=1")
    assert code == 0
    assert "perplexity" in out
    assert len(isopos("generate", "runs/quickstart", "--prompt", "The", "--tokens=5")[1]) > 3


@pytest.mark.parametrize("name", ["lrpe-alm", "permuteformer-lm"])
def test_the_recipes_of_papers_run_at_tiny_scale(isopos, tmp_path, monkeypatch, name):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    arguments = ("--scale=tiny", "--steps=3", "--validate-every=2", "--vocabulary=500", "--validation-tokens=300")
    assert isopos("train", name, *arguments)[0] == 0
    assert json.loads((tmp_path / "runs" / name / "recipe.json").read_text())["schedule"] == "inverse-sqrt"


BAD = {
    "--steps 0": "steps: expected a number from 1 to",
    "--scheme rop": "did you mean rope",
    "--scheme ape-tree": "tree of 2 branches",
    "--batch 3 --accumulate 2": "multiple of accumulate * devices * nodes = 2, got 3",
    "--devices 4 --nodes 2": "nodes = 8, got 2",
    "--device tpu": "device: expected cpu, cuda or auto",
    "--data nowhere": "does not exist",
    "--name ../up": "one folder",
    "--name a --resume": "expected a folder with a recipe.json",
    "--resume --overwrite": "either --resume or --overwrite",
    "--patience 2": "validate_every",
    "--cutoffs 900 800 --tokenizer words": "cutoffs: expected increasing",
    "--cutoffs 90 --tied": "tied: expected false with cutoffs, whose rare tokens have fewer features; give --no-tied",
    "--vocabulary 300": "vocabulary: expected none with bytes",
    "--heads 3": "multiple of the 3 heads",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gets_one_line_and_writes_no_run(isopos, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    code, _, err = isopos(*TRAIN, *arguments.split())
    assert code == 2
    assert BAD[arguments] in err
    assert err.startswith("isopos: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_logger_that_is_not_installed(isopos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    code, _, err = isopos(*TRAIN, "--logger=tensorboard")
    assert code == 2
    assert "pip install tensorboard, or choose csv" in err
    assert not (tmp_path / "runs").exists()


def test_what_there_is_not_to_list_or_evaluate(isopos, tmp_path):
    assert "expected runs in runs, found none" in isopos("runs")[2]
    assert "expected a folder with a recipe.json" in isopos("eval", "runs/mine")[2]
    assert isopos(*TRAIN)[0] == 0
    assert "expected multiples from 1 on" in isopos("eval", "runs/quickstart", "--length", "0")[2]
    for path in (tmp_path / "runs" / "quickstart").rglob("*.*"):
        if path.name in ("model.safetensors", "complete.json"):
            path.unlink()
    assert "expected weights or a checkpoint" in isopos("eval", "runs/quickstart")[2]
    with pytest.raises(ValueError, match="which are written when a run ends"):
        lab.load("runs/quickstart")


def _rows(text):
    """Cells of a table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def _listed(folder):
    """Rows of the list of runs, without the time, and the times."""
    console = Console(record=True, width=200, file=io.StringIO())
    assert listing.run(listing.Options(folder), console) == 0
    rows = _rows(console.export_text())
    return [row[:-1] for row in rows], {row[-1] for row in rows}


def test_runs_are_listed_with_what_their_folders_say(isopos, tmp_path):
    """The list has the last loss, and the best validation of unfinished or the score of finished runs; no hidden folders."""
    whole = [*TRAIN, "--validate-every=2", "--learning-rate=0.3", "--schedule=constant"]
    assert isopos(*whole, "--name=seed-a")[0] == 0
    for name in ("seed-b", "seed-c"):
        shutil.copytree("runs/seed-a", f"runs/{name}")
        (tmp_path / "runs" / name / "result.json").unlink()
    shutil.copytree("runs/seed-a", "runs/.seed-d")
    lines = (tmp_path / "runs" / "seed-a" / "metrics.jsonl").read_text().splitlines(True)
    rows = [json.loads(line) for line in lines]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    bits = {row["step"]: row["validation"] for row in rows if "validation" in row}
    assert list(bits) == [2, 4, 6]
    shutil.rmtree("runs/seed-c/checkpoints")
    (tmp_path / "runs" / "seed-c" / "metrics.jsonl").write_text(lines[0])
    for age, name in enumerate(("seed-b", "seed-c", "seed-a")):
        for file in ("recipe.json", "metrics.jsonl"):
            os.utime(tmp_path / "runs" / name / file, (10**9 - age, 10**9 - age))
    score = json.loads((tmp_path / "runs" / "seed-a" / "result.json").read_text())["scores"]["bits/byte"]
    rows, times = _listed("runs")
    assert rows == [  # latest last
        ["seed-a", "rope", "finished", "6/6", f"{losses[6]:.3f}", f"{score:.3f} bits/byte"],
        ["seed-c", "rope", "not finished", "1/6", f"{losses[1]:.3f}", "-"],
        ["seed-b", "rope", "not finished", "6/6", f"{losses[6]:.3f}", f"{min(bits.values()):.3f} bits/byte"],
    ]
    assert times == {time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (10**9, 10**9 - 1)}
    assert _listed("runs/seed-a/..")[0] == rows


def test_what_eval_appends_in_full(isopos, tmp_path):
    """Each call appends one entry with its arguments and the printed figures."""
    assert isopos(*TRAIN, "--name=a", "--steps=3")[0] == 0
    path = tmp_path / "runs" / "a" / "eval.json"
    recipe, model = checkpoints.load_run(path.parent)
    data = recipe.task.load(recipe, run=path.parent)
    (path.parent / "data.json").write_text(json.dumps({"name": "other", "sha256": "0" * 64}))
    plain = {"weights": "model.safetensors", "step": 3, "split": "validation", "scored": 0.0, "limit": -1, "own": []}
    views = (
        ((), {}, (1, 2, 4), {}),
        (("--length=2", "--scored=0.5", "--limit=200"), {"scored": 0.5, "limit": 200}, (2,), {}),
        (("--split=test", "--length=1", "--extend=linear:factor=3"), {"split": "test"}, (1,), {"extend": "linear:factor=3"}),
    )
    if "test" not in data.splits:
        views = (*views[:2], (("--length=1", "--extend=linear:factor=3"), {}, (1,), {"extend": "linear:factor=3"}))
    expected = []
    for arguments, changes, multiples, more in views:
        code, out, err = isopos("eval", "runs/a", *arguments, "--other-data")
        assert code == 0, err
        view = View(**changes)
        if more:
            model.scheme.extend("linear", factor=3)
        figures = {str(m): dict(data.measure(model, recipe, replace(view, multiple=m)).figures) for m in multiples}
        expected.append(plain | changes | more | {"data": data.sha256, "figures": figures})
        assert json.loads(path.read_text()) == expected
        rows = _rows(out)
        assert [row[:2] for row in rows] == [[f"{m}x", f"{figures[str(m)]['bits_per_byte']:.3f}"] for m in multiples]


def test_a_custom_recipe_names_its_folder_and_its_end_is_the_status(isopos, monkeypatch, tmp_path):
    assert isopos(*TRAIN, "--resume", "--overwrite")[2] == (
        "isopos: resume: expected either --resume or --overwrite, got both\n"
    )
    out = isopos(*TRAIN, "--name=a", "--steps=2")[1]
    scores = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["scores"]
    said = ", ".join(f"{title} {value:.3f}" for title, value in scores.items())
    assert " ".join(out.split()).endswith(f"finished: {said}; runs/a")
    monkeypatch.setattr(training, "is_first_process", lambda: False)
    monkeypatch.setattr(training, "train", lambda *_, **__: None)
    assert isopos(*TRAIN, "--name=a") == (0, "", "")  # another process, which neither asks nor says anything
