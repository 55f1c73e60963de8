"""Test perplexity."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import perturb

from isopos import Decoder, schemes
from isopos.lab.data.corpora import Corpus
from isopos.lab.data.tokenizers import Bytes, Words
from isopos.lab.recipes import Recipe
from isopos.lab.runs.checkpoints import load_run
from isopos.lab.tasks import decoding as evaluate
from isopos.lab.tasks.decoding import perplexity
from isopos.lab.tasks.language import Language, Text
from isopos.lab.tasks.task import View

LENGTH = 12


def corpus(tokens=100, words=40):
    tokenizer = Words([f"w{n}" for n in range(words - 1)] + ["<eos>"])
    streams = [np.random.default_rng(n).integers(words, size=tokens).astype(np.uint8) for n in range(3)]
    sizes = {"train": 10 * tokens, "validation": 3 * tokens, "test": 5 * tokens // 2}  # bytes of words of other lengths
    return Corpus("random words", "", tokenizer, *streams, sizes=sizes)


def made(scheme="rope", words=40, **more):
    return perturb(Decoder(words, 16, 2, schemes.build(scheme.partition(":")[0], 8, 2, options(scheme)), **more)).eval()


def options(scheme):
    return dict(piece.split("=") for piece in scheme.partition(":")[2].split(",") if piece)


def brute(model, tokens, length, scored):
    """Score each token with enough preceding tokens, in the first window that scores it."""
    losses = []
    tokens = torch.from_numpy(tokens.astype(np.int64))
    last = len(tokens) - 1 - length
    starts = [*range(0, last + 1, scored)]
    done = length - scored
    for start in starts + [last] * (starts[-1] != last):
        log_p = model(tokens[None, start : start + length])[0].log_softmax(-1)
        for place in range(done, start + length):
            losses.append(-log_p[place - start, tokens[place + 1]].item())
        done = start + length
    return losses


@pytest.mark.parametrize("scored", [None, 1, 5, LENGTH])
@pytest.mark.parametrize("cutoffs", [(), (6, 20)])
def test_perplexity_is_that_of_the_mean_over_tokens(scored, cutoffs):
    model, text = made(cutoffs=cutoffs), corpus()
    losses = brute(model, text.test, LENGTH, scored or LENGTH)
    score = perplexity(model, text, LENGTH, split="test", scored=scored)
    assert score["tokens"] == len(losses) == 99 - (LENGTH - (scored or LENGTH))
    assert score["nats"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(score["nats"] / math.log(2) / 2.5)


def test_a_limit_looks_at_the_first_tokens_only():
    model, text = made(), corpus()
    losses = brute(model, text.validation[:31], LENGTH, LENGTH)
    score = perplexity(model, text, LENGTH, limit=30)
    assert score["tokens"] == 30
    assert score["nats"] == pytest.approx(sum(losses) / 30, rel=1e-5)


STREAMED = ["rope", "rope:attention=softmax", "permuteformer", "retnet", "horn-clipped", "t5", "sinusoidal", "lrpe-unitary"]


@pytest.mark.parametrize("scheme", STREAMED)
@pytest.mark.parametrize("scored", [None, 9, 30])
def test_pieces_of_a_long_window_have_its_score(scheme, scored, monkeypatch):
    model, text = made(scheme), corpus()
    whole = perplexity(model, text, 40, scored=scored)
    monkeypatch.setattr(evaluate, "PIECE", 7)
    pieces = perplexity(model, text, 40, scored=scored)
    assert pieces["tokens"] == whole["tokens"]
    assert pieces["nats"] == pytest.approx(whole["nats"], rel=1e-5)


def test_softmax_attention_sees_shorter_pieces_of_longer_windows(monkeypatch):
    model, text, seen = made("rope:attention=softmax"), corpus(), []
    monkeypatch.setattr(evaluate, "SCORES", 240)
    model.blocks[0].register_forward_hook(lambda block, args, found: seen.append(args[0].shape[:2].numel()))
    for length, most in ((8, 24), (40, 6)):  # three windows at once; pieces of one
        seen.clear()
        perplexity(model, text, length)
        assert max(seen) == most


def test_a_large_vocabulary_is_scored_in_smaller_pieces(monkeypatch):
    model, text = made(), corpus()
    whole, sizes = perplexity(model, text, LENGTH), []
    monkeypatch.setattr(evaluate, "LOGITS", 5 * 40)
    model.head.register_forward_hook(lambda head, args, found: sizes.append(found.numel()))
    assert perplexity(model, text, LENGTH)["nats"] == pytest.approx(whole["nats"], rel=1e-5)
    assert max(sizes) == 5 * 40


def test_training_mode_comes_back_and_dropout_does_not_count():
    model, text = made(dropout=0.5), corpus()
    calm = perplexity(model.eval(), text, LENGTH)
    data = Text(Language(length=LENGTH), text)
    assert data.measure(model.train(), Recipe(), View()).figures == calm
    assert model.training


def test_a_view_is_scored_or_says_why_not():
    model, text = made("learned:length=30"), corpus()
    data = Text(Language(length=LENGTH, validation_tokens=0), text)
    rows = [data.score(model, Recipe(), View("test", multiple, scored)) for multiple, scored in ((1, 0.5), (2, 6), (4, 0))]
    assert [len(row.figures) for row in rows] == [4, 4, 0]
    for row, length in zip(rows, (12, 24), strict=False):
        assert row.figures["nats"] == perplexity(model, text, length, scored=6, split="test")["nats"]
    assert rows[2].reason == "length: expected at most 30, for which the scheme has positions, got 48"
    reason = data.score(made(), Recipe(), View(multiple=16)).reason
    assert reason == "length: expected less than the 100 tokens of validation, got 192; use more text or a shorter window"
    reason = data.score(made(), Recipe(), View(multiple=4, limit=40)).reason
    assert reason.startswith("length: expected at most the 40 tokens of validation that are scored, of 100, got 48; ")
    assert "eval --limit" in reason


def test_bad_calls():
    model, text = made(), corpus()
    for arguments, message in (
        ({"length": 100}, "length: expected less than the 100 tokens of validation, got 100"),
        ({"length": 50, "limit": 20}, "length: expected at most the 20 tokens"),
        ({"length": 0}, "length: expected positive numbers of tokens"),
        ({"length": 8, "scored": 9}, "scored: expected 1 to the 8"),
        ({"length": 8, "split": "dev"}, "split: expected one of train, validation, test"),
    ):
        with pytest.raises(ValueError, match=message):
            perplexity(model, text, **arguments)
    other = Corpus("bytes", "", Bytes(), text.train, text.validation, text.test, text.sizes)
    with pytest.raises(ValueError, match="expected the 40 tokens of the model, got the 256 of bytes; load the text with"):
        perplexity(model, other, 8)


def test_an_infinite_loss_is_an_infinite_perplexity(monkeypatch):
    monkeypatch.setattr(evaluate, "_nats", lambda model, tokens, targets, piece: 1000.0 * targets.numel())
    assert perplexity(made(), corpus(), LENGTH)["perplexity"] == math.inf


def test_one_is_the_last_token_of_a_window_and_nothing_all():
    model, text = made(), corpus()
    data = Text(Language(length=LENGTH, validation_tokens=0), text)
    for view, scored in ((View(scored=1), 1), (View(scored=0.01), 1), (View(), None), (View(scored=LENGTH), LENGTH)):
        assert data.score(model, Recipe(), view).figures == perplexity(model, text, LENGTH, scored=scored)


# Extended frequencies

TINY = ["--steps=2", "--length=32", "--batch=2", "--layers=1", "--model-dim=16", "--heads=2", "--validation-tokens=512"]


def figures(folder):
    return json.loads((folder / "eval.json").read_text())[-1]


def test_a_run_is_scored_with_extended_frequencies(isopos, tmp_path):
    line = ["train", "quickstart", *TINY, "--scheme=rope:attention=softmax,learned=true", "--name=one"]
    assert isopos(*line)[0] == 0
    run, lengths = tmp_path / "runs" / "one", ["--length", "4", "1", "2"]
    assert isopos("eval", "runs/one", *lengths)[0] == 0
    plain = figures(run)["figures"]
    code, out, err = isopos("eval", "runs/one", *lengths, "--extend=yarn:fast=16,truncate=false")
    assert (code, err) == (0, "")
    assert ", extended by yarn:fast=16,truncate=false\n" in out
    found = figures(run)
    assert found["extend"] == "yarn:fast=16,truncate=false"
    recipe, model = load_run(run)
    data = recipe.task.load(recipe, run=run)
    for multiple in (1, 2, 4):
        model.scheme.extend("yarn", factor=multiple, trained=32, fast=16, truncate=False)
        assert found["figures"][str(multiple)] == data.measure(model, recipe, View(multiple=multiple)).figures
        same = found["figures"][str(multiple)]["nats"] == pytest.approx(plain[str(multiple)]["nats"], abs=1e-9)
        assert same == (multiple == 1)
    assert isopos("eval", "runs/one", *lengths, "--extend=longrope:rescale=1+1.5+2+4,factor=4")[0] == 0
    model.scheme.extend("longrope", factor=4, trained=32, rescale=[1, 1.5, 2, 4])
    assert figures(run)["figures"]["2"] == data.measure(model, recipe, View(multiple=2)).figures
    for wrong, message in (
        (
            "yern",
            "extend: expected one of linear, dynamic, yarn, longrope, llama3, dype, drop, got 'yern'; did you mean yarn?",
        ),
        ("yarn:fest=3", "extend: yarn: unknown option 'fest': did you mean fast?"),
        ("yarn:fast=x", "extend: fast: expected a number, got 'x'"),
        ("yarn:fast=1+2", "extend: fast: expected a number, got '1+2'"),
        ("yarn:truncate=no", "extend: truncate: expected true or false, got 'no'"),
        ("longrope:rescale=1+x", "extend: rescale: expected numbers joined by +, got 'x' at character 3 of '1+x'"),
        ("yarn:factor=0.5", "factor: expected a ratio of sequence lengths of at least 1"),
        ("longrope", "rescale: expected a positive factor for each pair of features, got []"),
        ("longrope:rescale=1+2", "rescale: expected a factor for each of 4 pairs of features, got 2"),
    ):
        code, _, err = isopos("eval", "runs/one", f"--extend={wrong}")
        assert (code, err.startswith(f"isopos: {message}")) == (2, True), err
    assert len(json.loads((run / "eval.json").read_text())) == 3, "what is refused leaves no figures"


def test_a_run_in_a_folder_that_cannot_be_written_is_scored(isopos, tmp_path, monkeypatch):
    """Nothing is written, not even a lock. Root may write anywhere, so that the answer of the system is replaced."""
    assert isopos("train", "quickstart", *TINY, "--name=one")[0] == 0
    run = tmp_path / "runs" / "one"
    (tmp_path / "runs" / ".one.lock").unlink()
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to("runs") or mode != os.W_OK)
        code, out, err = isopos("eval", "runs/one")
    assert (code, err) == (0, "")
    assert "not added to runs/one/eval.json, since the folder cannot be written" in " ".join(out.split())
    assert sorted(tmp_path.rglob("*")) == before
    assert isopos("eval", "runs/one")[0] == 0
    assert figures(run)["figures"]


def test_schemes_that_do_not_rotate_are_not_extended(isopos):
    assert isopos("train", "quickstart", *TINY, "--scheme=permuteformer", "--name=one")[0] == 0
    code, _, err = isopos("eval", "runs/one", "--extend=linear")
    assert (code, "extend: expected a scheme that rotates by frequencies" in err) == (2, True), err


def test_processes_divide_the_windows_that_are_scored(isopos, monkeypatch):
    """Windows of 3 and 6 times 32 tokens, but not all of 1, 2 and 4 times, have a third for each of three processes."""
    assert isopos("train", "quickstart", *TINY, "--name=one")[0] == 0
    counts = []
    monkeypatch.setattr("isopos.lab.training.group.run_in_group", lambda count, *arguments: counts.append(count))
    assert isopos("eval", "runs/one", "--sequence-parallel=3", "--length", "3", "6") == (0, "", "")
    code, _, err = isopos("eval", "runs/one", "--sequence-parallel=3")
    assert (code, err) == (2, "isopos: length: expected a multiple of sequence_parallel = 3, got 32\n")
    assert counts == [3]
