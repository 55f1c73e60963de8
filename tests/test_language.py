"""Test language models of words and BPE tokens from the command line: training, evaluation, and generation."""

import json
import math
import random
import re
import shutil
import zipfile

import pytest
import torch

from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.runs.folders import read_rows

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "under", "mat", "rug", "and", "a", "big", "red", "<unk>"]


@pytest.fixture
def wiki(tmp_path, monkeypatch):
    """An archive like WikiText's, of sentences whose words follow each other in order."""
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    with zipfile.ZipFile(tmp_path / "wiki.zip", "w") as archive:
        for split, lines in (("train", 400), ("valid", 60), ("test", 60)):
            text = "".join(f" {' '.join(sorted(draw.sample(WORDS, 6)))} \n" for _ in range(lines))
            archive.writestr(f"wiki.{split}.tokens", text)
    return "wiki.zip"


SMALL = ("--scale=tiny", "--length=16", "--layers=1", "--model-dim=32", "--heads=2", "--hidden-dim=32", "--steps=60")


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_a_language_model_from_data_to_text(isopos, tmp_path, wiki, kind):
    level = {"words": ["--tokenizer=words", "--cutoffs", "4", "9"], "bpe": ["--tokenizer=bpe", "--vocabulary=280"]}[kind]
    code, out, err = isopos("train", "quickstart", *SMALL, f"--data={wiki}", *level, "--learning-rate=0.01", "--name=run")
    assert code == 0, err
    run = tmp_path / "runs" / "run"
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["vocabulary"] == {"words": len(WORDS) + 1, "bpe": 280}[kind]
    code, out, err = isopos("eval", "runs/run", "--split=test", "--scored=8", "--limit=0", "--length", "1", "2", "4", "1000")
    assert code == 2  # for the window of 16,000 tokens, which leaves the others' figures
    assert "expected less than" in out
    assert err.startswith("isopos: length: expected less than")
    figures = json.loads((run / "eval.json").read_text())[0]["figures"]
    assert figures["1000"] is None
    for multiple in (1, 2, 4):
        row = figures[str(multiple)]
        assert row["tokens"] == figures["1"]["tokens"] - 16 * (multiple - 1)  # after length - 8 tokens of context
        assert row["perplexity"] == pytest.approx(math.exp(row["nats"]))
        assert row["perplexity"] < {"words": len(WORDS) + 1, "bpe": 30}[kind] * 0.8
    assert len(list((tmp_path / "cache").glob("*/train.bin"))) == 1  # evaluation has found what training prepared
    write = ("generate", "runs/run", "--prompt=a big cat", "--tokens=20")
    code, calm, err = isopos(*write, "--temperature=0")
    assert code == 0, err
    assert calm.startswith("a big cat")
    assert len(calm.split()) > 5
    assert calm == isopos(*write, "--temperature=0", "--seed=1")[1] == isopos(*write, "--top-p=1e-9")[1]
    assert calm != isopos(*write, "--temperature=3")[1]
    assert "temperature: expected 0 or a positive number" in isopos(*write, "--temperature=-1")[2]
    assert "scored: expected a whole number of tokens" in isopos("eval", "runs/run", "--scored=-1")[2]


def test_a_table_patches_the_run_of_one_row(isopos, tmp_path):
    table = ("table", "newer-patched", "--scale=tiny", "--device=cpu", "--rows=alibi", "--seeds=2")
    assert "8 of 8 cells are missing" in isopos(*table, "--dry-run")[1]
    status, _, err = isopos(*table)
    assert (status, err) == (0, "")
    cells = tmp_path / "runs" / "tables" / "newer-patched-tiny" / "cells"
    schemes = [f"{name}+attention=softmax-seed{seed}" for name in ("alibi", "rope") for seed in (0, 1)]
    assert sorted(path.name for path in cells.glob("*-seed?")) == [
        f"{on}-{one}" for on in ("patched", "text") for one in schemes
    ]
    for one in schemes:
        (recipe, _), (before, _) = (checkpoints.load_run(cells / f"{on}-{one}") for on in ("patched", "text"))
        assert tmp_path / recipe.task.start == cells / f"text-rope+attention=softmax-seed{one[-1]}"
        assert (recipe.scheme, recipe.seed, recipe.model) == (before.scheme, before.seed, before.model)
    page = (cells.parent / "table.md").read_text()
    assert "| alibi | alibi:attention=softmax | " in page
    assert " rope on" not in page.replace("p-rope on", ""), "no cell of rope is missing"


def test_a_run_goes_on_without_the_positions_of_another(isopos, tmp_path, monkeypatch):
    """DroPE: a run starts from weights trained with positions. Parameters of another scheme are reinitialised."""
    sizes = ["--length=16", "--layers=1", "--model-dim=16", "--heads=2", "--batch=4", "--steps=4", "--save-every=2"]
    sizes += ["--validation-tokens=64", "--device=cpu"]
    assert isopos("train", "quickstart", "--scheme=lrpe-orthogonal", "--name=with", *sizes)[0] == 0
    own = Recipe(scheme="none").edit(start="runs/with", length=16, layers=1, model_dim=16, heads=2, batch=4, steps=4)
    before = checkpoints.load_run(tmp_path / "runs" / "with")[1].state_dict()
    for scheme in ("none", "rope:learned=true", "lrpe-orthogonal"):
        recipe = own.edit(scheme=scheme)
        recipe.task.check(recipe)
        model = recipe.task.model(recipe)
        fresh = {name: value.clone() for name, value in model.state_dict().items()}
        checkpoints.warm_start(model, tmp_path / "runs" / "with", recipe.task.reinitialised(recipe))
        for name, value in model.state_dict().items():
            kept = not name.startswith("scheme.") or scheme == "lrpe-orthogonal"
            assert torch.equal(value, (before if kept else fresh)[name]), name
    command = ["train", "quickstart", "--scheme=none", "--start=runs/with", "--name=without", *sizes]
    assert isopos(*command)[0] == 0
    run = tmp_path / "runs" / "without"
    model = own.task.model(own)
    checkpoints.warm_start(model, tmp_path / "runs" / "with", own.task.reinitialised(own))
    data = own.task.load(own)
    rows = read_rows(run / "metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(data.loss(model.train(), *data.batch(own, 1)).item(), rel=1e-5)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "result.json").unlink()
    assert isopos(*command, "--resume")[0] == 0
    assert read_rows(run / "metrics.jsonl") == rows
    before, weights = sorted(path.name for path in run.iterdir()), (run / "model.safetensors").read_bytes()
    for more, message in (
        (("--start=runs/without",), "start: expected another run than runs/without, which is replaced"),
        (("--tokenizer=words",), "got tokenizer words; give --tokenizer bytes"),
        (("--vocabulary=300",), "vocabulary: expected 256, as in runs/with"),
    ):
        status, _, err = isopos(*command, "--overwrite", *more)
        assert (status, err.count("\n"), message in err) == (2, 1, True), err
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "warm_start", lambda *_: (_ for _ in ()).throw(ValueError("start: damaged")))
        assert isopos(*command, "--overwrite")[0] == 2
    assert (sorted(path.name for path in run.iterdir()), (run / "model.safetensors").read_bytes()) == (before, weights)
    assert isopos(*command, "--overwrite", "--seed=1")[0] == 0
    assert (run / "model.safetensors").read_bytes() != weights
    assert not (tmp_path / "runs" / ".without.replaced").exists()
    for change, message in (
        ({"start": "runs/nowhere"}, "start: expected the folder of a run, got runs/nowhere"),
        ({"layers": 2}, "start: expected a model as in runs/with, got layers 2; give --layers 1"),
        ({"tied": True}, "start: expected a model as in runs/with, got tied True; give --tied False"),
    ):
        recipe = own.edit(**change)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            recipe.task.check(recipe)
