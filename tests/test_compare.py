"""Test `isopos compare` end to end at a tiny size, through the command line."""

import io
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from isopos.lab.commands import compare
from isopos.lab.recipes import Recipe
from isopos.lab.reports.comparison import ranking
from isopos.lab.runs import folders
from isopos.lab.tasks.language import Text
from isopos.lab.training import run as training

TINY = ["--steps=4", "--length=32", "--batch=2", "--layers=1", "--model-dim=16", "--heads=2"]


class _Page(HTMLParser):
    """The ids of a page, what it loads, and whether its tags are balanced."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.ids, self.loads, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _check_page(path):
    text = path.read_text()
    page = _Page(text)
    assert page.open == []
    assert all(load.startswith(("#", "data:")) for load in page.loads)
    assert not re.search(r"@import|url\((?!#)|<script[^>]*src|<!DOCTYPE svg", text)
    return page, text


def test_a_comparison_end_to_end(isopos, tmp_path):
    schemes = "none,sinusoidal,rope:decay=retnet,denominator=encoded"
    code, out, _ = isopos("compare", "--schemes", schemes, "--seeds", "2", "--name", "one", *TINY)
    assert code == 0
    folder = tmp_path / "runs" / "one"
    runs = sorted(path.parent.name for path in folder.glob("*/model.safetensors"))
    names = ["none", "rope+decay=retnet,denominator=encoded", "sinusoidal"]
    assert runs == sorted(f"{name}-seed{seed}" for name in names for seed in range(2))
    page, text = _check_page(folder / "report.html")
    assert sum(i.startswith("curve-") for i in page.ids) == 6
    best_first = [f"kernel-{row.scheme}" for row in ranking(folder).rows]
    assert [name for name in page.ids if name.startswith("kernel-")] == best_first
    assert len(best_first) == 3
    about = json.loads((folder / "comparison.json").read_text())
    assert about["complete"]
    assert about["sha256"][:12] in out
    assert about["sha256"][:12] in text
    assert set(about["speed"]) == {"none", "sinusoidal", "rope:decay=retnet,denominator=encoded"}
    assert about["speed"]["none"] == 1
    assert "no (attention)" in out  # sinusoidal sees absolute positions
    assert out.count("yes") == 2


def test_softmax_attention_and_text_of_the_user(isopos, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.bin").write_bytes(bytes(range(256)) * 4)
    schemes = "rope,rope:attention=linear"
    code, out, _ = isopos("compare", "--data=mine", "--attention=softmax", "--schemes", schemes, "--name=one", *TINY)
    assert code == 0
    assert "softmax" in out
    assert "elu+1" in out
    runs = {json.loads(p.read_text())["scheme"] for p in (tmp_path / "runs" / "one").glob("*/recipe.json")}
    assert runs == {"rope:attention=softmax", "rope:attention=linear"}


def test_ctrl_c_leaves_a_report_of_what_is_finished(isopos, tmp_path, monkeypatch):
    original = training.train

    def interrupted(recipe, source, folder, on_step):
        def stop(step, *rest):
            on_step(step, *rest)
            if recipe.scheme == "rope" and step == 2:
                raise KeyboardInterrupt

        return original(recipe, source, folder, stop)

    monkeypatch.setattr(training, "train", interrupted)
    code, out, _ = isopos("compare", "--schemes", "none,rope,retnet", "--name", "one", *TINY)
    assert code == 130
    page, text = _check_page(tmp_path / "runs" / "one" / "report.html")
    assert {i for i in page.ids if i.startswith("curve-")} == {"curve-none-seed0", "curve-rope-seed0"}
    assert "Interrupted" in text
    assert "none" in out
    assert not json.loads((tmp_path / "runs" / "one" / "comparison.json").read_text())["complete"]


def test_a_scheme_that_diverges_does_not_stop_the_others(isopos, tmp_path, monkeypatch):
    import torch

    original = training.train

    def poisoned(recipe, *rest):
        if recipe.scheme != "rope":
            return original(recipe, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(Text, "loss", lambda self, model, *_: next(model.parameters()).sum() * torch.nan)
            return original(recipe, *rest)

    monkeypatch.setattr(training, "train", poisoned)
    code, out, _ = isopos("compare", "--schemes", "none,rope,retnet", "--name", "one", *TINY)
    assert code == 0
    assert "diverged at step 1" in out
    page, text = _check_page(tmp_path / "runs" / "one" / "report.html")
    assert "diverged at step 1" in text
    assert {"kernel-none", "kernel-retnet"} <= set(page.ids)


@pytest.mark.slow
def test_softmax_only_schemes_and_wide_ones_next_to_linear_ones(isopos, tmp_path):
    schemes = "none,permuteformer:width=4,horn-clipped,spe-sine,t5,shaw,xpos,deberta,transformer-xl,horn-constrained"
    code, out, _ = isopos("compare", "--schemes", schemes, "--name", "one", *TINY)
    assert code == 0
    page = _check_page(tmp_path / "runs" / "one" / "report.html")[0]
    assert sum(i.startswith("kernel-") for i in page.ids) == 10
    assert "attention" in out
    assert "here in attention, decay, denominator, features, parameters, do not compare" in out
    speed = json.loads((tmp_path / "runs" / "one" / "comparison.json").read_text())["speed"]
    assert speed["none"] == 1
    assert len(speed) == 10


def test_speeds_are_relative_to_no_positions_with_the_same_attention(monkeypatch):
    rounds = [{"none": 1.0, "rope": step, "t5": 3.0, "none:attention=softmax": 6.0} for step in (2.0, 4.0, 5.0)]
    monkeypatch.setattr(training, "step_times", lambda *_: iter(rounds))
    recipes = [Recipe(scheme=scheme) for scheme in ("none", "rope", "t5")]
    assert compare._speeds(recipes, None) == {"none": 1.0, "rope": 0.25, "t5": 2.0}


def test_positions_that_a_scheme_does_not_have_are_not_evaluated(isopos, tmp_path):
    assert isopos("compare", "--schemes", "xpos:length=33", "--name", "one", *TINY, "--length=300")[0] == 0
    (result,) = (tmp_path / "runs" / "one").glob("*/result.json")
    scores = json.loads(result.read_text())["scores"]
    assert scores["bits/byte"] is not None
    assert scores["at 4x"] is None


def test_permutations_that_repeat_are_warned_of(isopos):
    schemes = "permuteformer,permuteformer:decay=none,permuteformer:matrix=identity"
    code, out, _ = isopos("compare", "--schemes", schemes, "--name", "one", *TINY)
    assert code == 0
    warnings = [line for line in out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 2
    assert re.search(
        r"permuteformer: its permutations repeat after \d+ positions, fewer than the 128 evaluated", warnings[0]
    )


def test_learned_positions_end_to_end(isopos, tmp_path):
    assert isopos("compare", "--schemes", "learned", "--name", "one", *TINY)[0] == 0
    assert "kernel-learned" in _check_page(tmp_path / "runs" / "one" / "report.html")[0].ids


def test_ctrl_c_while_a_run_begins_leaves_a_report(isopos, tmp_path, monkeypatch):
    def interrupted(recipe, source, folder, on_step):
        folder.mkdir()
        (folder / "recipe.json").write_text(json.dumps(recipe.as_dict()))
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    code, _, _ = isopos("compare", "--schemes", "none,rope", "--name", "one", *TINY)
    assert code == 130
    _, text = _check_page(tmp_path / "runs" / "one" / "report.html")
    assert "Interrupted: unfinished none-seed0, rope-seed0" in text


BAD = {
    "--schemes none,learned:length=10": "0 to 9",
    "--schemes sinusoidal:model_dim=50": "50",
    "--schemes rope,rope:": "twice",
    "--schemes retnet:original=true --attention softmax": "original",
    "--device meta": "device",
    "--schemes rop": "did you mean rope",
    "--schemes rope:bse=2": "did you mean base",
    "--schemes rope:decay=fast": "retnet",
    "--schemes rope --heads 8 --model-dim 24": "even",
    "--heads 3": "multiple",
    "--steps 0": "steps: expected a number from 1 to",
    "--seeds -1": "positive",
    "--devices 2": "isopos train takes several",
    "--data nowhere": "does not exist",
    "--data empty": "is empty",
    "--data short": "at least",
    "--name ../up": "one folder",
    "--name there": "--overwrite",
    "--device tpu": "device",
    "--schemes rope:denominator=plain --attention softmax": "softmax",
    "--schemes rope,ape-tree": "tree of 2 branches",
    "--schemes ape-ring": "ring of 128",
    "--schemes permuteformer-2d": "grid of 2 axes",
    "--schemes rope,horn-clipped:axes=2": "isopos show horn-clipped draws it",
    "--schemes ape-product": "isopos.ape_product",
    "--schemes shiv-quirk --attention softmax": "tree",
    "--schemes t5:attention=linear": "softmax",
    "--schemes shaw --heads 2 --seeds 0": "positive",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_gets_one_line_and_writes_nothing(isopos, tmp_path, arguments):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"short")
    (tmp_path / "runs" / "there").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = isopos("compare", *TINY, *arguments.split())
    assert code == 2
    assert out == ""
    assert BAD[arguments] in err
    assert err.startswith("isopos: ")
    assert len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_made(isopos, tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    code, _, err = isopos("compare", "--name", "one", *TINY)
    assert code == 2
    assert "cannot write" in err


def test_overwrite_replaces_comparisons_only(isopos, tmp_path):
    arguments = ["compare", "--schemes", "none", "--name", "one", "--overwrite", *TINY]
    assert isopos(*arguments)[0] == 0
    (tmp_path / "runs" / "one" / "old").touch()
    assert isopos(*arguments)[0] == 0
    assert not (tmp_path / "runs" / "one" / "old").exists()
    (tmp_path / "runs" / "one" / "comparison.json").unlink()
    code, _, err = isopos(*arguments)
    assert code == 2
    assert "holds no comparison" in err


def _interrupted_in(monkeypatch, scheme):
    original = training.train

    def train(recipe, *rest):
        if recipe.scheme == scheme:
            raise KeyboardInterrupt
        return original(recipe, *rest)

    monkeypatch.setattr(training, "train", train)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_complete_comparison_survives_kills_and_interruptions(isopos, tmp_path, monkeypatch, killed):
    """Replacements are killed, interrupted in the second run, or interrupted in the first run."""
    folder, arguments = tmp_path / "runs" / "one", ["compare", "--schemes", "none,rope", "--name", "one", *TINY]
    assert isopos(*arguments)[0] == 0
    page = (folder / "report.html").read_text()
    if killed:
        folders.start_folder(folder, "comparison.json", {"killed": True})
    with monkeypatch.context() as patch:
        _interrupted_in(patch, "rope")
        code, out, _ = isopos(*arguments, "--overwrite")
    assert code == 130
    assert "until a comparison is complete, runs/.one.replaced holds the earlier runs/one" in out
    assert "unfinished rope-seed0" in (folder / "report.html").read_text()
    with monkeypatch.context() as patch:
        _interrupted_in(patch, "none")
        code, out, _ = isopos(*arguments, "--overwrite")
    assert code == 130
    assert "no run was finished: runs/one is unchanged" in out
    assert (folder / "report.html").read_text() == page
    assert isopos(*arguments, "--overwrite")[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".one.lock", "one"]


def test_the_report_of_a_comparison_that_was_killed(isopos, tmp_path):
    folder = tmp_path / "runs" / "one"
    assert isopos("compare", "--schemes", "none,rope", "--name", "one", *TINY)[0] == 0
    page = (folder / "report.html").read_text()
    for name in ("report.html", "curves.svg", "rope-seed0/result.json"):
        (folder / name).unlink()
    about = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps(about | {"complete": False, "speed": {}}))
    code, out, err = isopos("report", "runs/one")
    assert (code, err) == (0, "")
    assert "report: runs/one/report.html" in out
    assert "Interrupted: unfinished rope-seed0." in out
    found, text = _check_page(folder / "report.html")
    assert "Interrupted: unfinished rope-seed0" in text
    assert "Interrupted" not in page
    assert {"kernel-none", "curve-rope-seed0"} <= set(found.ids)


@pytest.mark.parametrize(("folder", "said"), [("runs", "it holds runs/one"), ("nowhere", "isopos compare writes some")])
def test_a_report_needs_a_comparison(isopos, tmp_path, folder, said):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "comparison.json").write_text("{}")
    code, out, err = isopos("report", folder)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("command", ["compare --name one", "train quickstart", "table permuteformer-4 --scale tiny"])
def test_a_batch_beyond_memory_is_found_before_the_name_is_taken(isopos, tmp_path, monkeypatch, command):
    monkeypatch.setattr(training, "_memory", lambda *_: 1000.0)
    sizes = TINY if "table" not in command else []
    code, _, err = isopos(*command.split(), *sizes)
    assert code == 2
    assert err.startswith("isopos: batch: expected one whose 1 parts fit into the 0.0 GiB of memory, got ")
    assert not (tmp_path / "runs").exists()


def test_a_batch_that_fits_is_none_of_them(monkeypatch):
    training.check_memory(Recipe())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 7))
    assert training._memory("cuda:1", 2) == 7, "a graphics card is one process's own"
    whole = training._memory("cpu", 1)
    assert 2**28 < whole < 2**50
    assert training._memory("cpu", 4) == whole / 4


def test_runs_of_a_comparison_in_their_order():
    """Runs go seed by seed over all schemes. An option of one scheme overrides the option of all."""
    options = compare.Options(schemes="none,rope:attention=linear,rope+none", attention="softmax", seeds=2)
    softmax = "rope:attention=softmax+none:attention=softmax"
    schemes = ["none:attention=softmax", "rope:attention=linear", softmax]
    assert [(recipe.seed, recipe.scheme) for recipe in options.recipes()] == [(n, one) for n in (0, 1) for one in schemes]
    assert [recipe.scheme for recipe in compare.Options(schemes="none,rope").recipes()] == ["none", "rope"]


@pytest.mark.parametrize("seeds", [1, 2])
def test_titles_of_runs_have_seeds_where_there_are_several(monkeypatch, tmp_path, seeds):
    titles, trained = [], []

    def train(recipe, data, folder, show):
        trained.append((recipe, folder.name))
        show(1, 2.0, 3.0)
        return SimpleNamespace(status="finished" if recipe.scheme == "none" else "diverged at step 1")

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(compare.Bars, "add", lambda self, title, *unit: titles.append((title, *unit)) or (lambda *row: None))
    recipes = compare.Options(schemes="none,rope", seeds=seeds).recipes()
    console = Console(record=True, width=100, file=io.StringIO())
    compare._train_all(recipes, None, tmp_path, console)
    names = ["none", "rope"] if seeds == 1 else ["none seed 0", "rope seed 0", "none seed 1", "rope seed 1"]
    assert titles == [(name, 250, "bits/byte", "tokens/s") for name in names]
    assert trained == [(recipe, f"{recipe.scheme}-seed{recipe.seed}") for recipe in recipes]
    said = [line for line in console.export_text().splitlines() if "diverged" in line]
    assert said == [f"{name}: diverged at step 1" for name in names if "rope" in name]
