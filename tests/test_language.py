"""Language models of words and pieces from the command line: trained, evaluated as the papers do, and asked to write."""

import json
import math
import random
import zipfile

import pytest

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
    if kind == "bpe":
        pytest.importorskip("tokenizers", reason="byte-pair encoding needs the extra data")
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
    assert "scored: expected a number of tokens" in isopos("eval", "runs/run", "--scored=-1")[2]
