"""Test masked language models: masks, batches, fixed masks of held-out text, and an encoder's training."""

import json
import math
import pickle
import re

import numpy as np
import pytest
import torch
from cases import close
from torch.nn import functional as F
from training import trained

from isopos import schemes
from isopos.lab.recipes import Recipe
from isopos.lab.tasks import decoding
from isopos.lab.tasks.masked import Masked, mask_tokens
from isopos.lab.tasks.task import View
from isopos.models import Encoder

LINES = "".join(f"row {n % 7}: the letters abcdefghij are always in this order.\n" for n in range(400))
SIZES = {"batch": 8, "layers": 1, "model_dim": 32, "heads": 2, "length": 32}


def ready(tmp_path, **edits):
    """A recipe with inferred fields, and its data, a text file."""
    (tmp_path / "text.txt").write_text(LINES)
    recipe = Recipe(task=Masked(data=str(tmp_path / "text.txt"))).edit(**SIZES | edits)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


@pytest.mark.parametrize("share", [0.15, 0.4, 1.0])
def test_eight_of_ten_are_hidden_one_is_another_and_one_stays(share):
    tokens = np.random.default_rng(0).integers(10_000, size=20_000)
    shown, places = mask_tokens(tokens, np.random.default_rng(1), share, 10_000)
    assert len(np.unique(places)) == len(places) == round(share * 20_000)
    rest = np.setdiff1d(np.arange(20_000), places)
    assert (shown[rest] == tokens[rest]).all()
    found = shown[places]
    parts = (found == 10_000), (found != tokens[places]) & (found < 10_000), (found == tokens[places])
    assert [part.mean() for part in parts] == pytest.approx([0.8, 0.1, 0.1], abs=0.015)
    assert shown.max() == 10_000
    assert mask_tokens(tokens[:3], np.random.default_rng(1), 0.1, 10_000)[1].shape == (1,)  # at least one


def test_batches_are_functions_of_their_step_and_ranks_share_them(tmp_path):
    recipe, data = ready(tmp_path, mask_share=0.4)
    again = pickle.loads(pickle.dumps(data))  # as processes that prepare batches have it
    for step in (0, 3, 3):
        shown, places, targets = whole = data.batch(recipe, step)
        assert (shown.shape, places.shape, targets.shape) == ((8, 32), (8, 13), (8, 13))
        text, _ = data.corpus.batch(recipe.seed, step, 8, 32)
        assert torch.equal(targets, text.gather(1, places))
        assert torch.equal(shown.scatter(1, places, targets), text)
        assert all(torch.equal(a, b) for a, b in zip(whole, again.batch(recipe, step), strict=True))
        parts = [data.batch(recipe, step, rank, 4) for rank in range(4)]
        assert all(torch.equal(torch.cat(a), b) for a, b in zip(zip(*parts, strict=True), whole, strict=True))
        assert len({tuple(row) for row in places.tolist()}) == 8
        for seed, other in ((0, step + 1), (1, step), (1, step + 1)):
            assert not torch.equal(places, data.batch(recipe.edit(seed=seed), other)[1])


def test_the_loss_is_of_the_chosen_places_only_and_the_mask_is_a_word(tmp_path):
    recipe, data = ready(tmp_path)
    model = recipe.task.model(recipe).double()
    assert model.tokens.num_embeddings == model.head.out_features == 257
    shown, places, targets = batch = data.batch(recipe, 1)
    every = model(shown)
    expected = F.nll_loss(every.gather(1, places[..., None].expand(-1, -1, 257)).log_softmax(-1).transpose(1, 2), targets)
    close(data.loss(model, *batch), expected)
    data.loss(model, *batch).backward()
    assert model.tokens.weight.grad[256].abs().sum() > 0


def test_an_encoder_may_share_its_vectors_with_its_head():
    model = Encoder(50, 16, 1, schemes.build("rope", 8, 2), tied=True)
    assert model.head.weight is model.tokens.weight
    assert model.head.bias.shape == (50,)
    assert (
        sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in Encoder(50, 16, 1, schemes.build("rope", 8, 2)).parameters()) - 50 * 16
    )


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_held_out_windows_have_one_mask_each_however_they_are_batched(tmp_path, monkeypatch, attention):
    recipe, data = ready(tmp_path, scheme=f"rope:attention={attention}", mask_share=0.4)
    model = recipe.task.model(recipe).double()
    scored = data.measure(model, recipe, View()).figures
    windows = len(data.corpus.validation) // 32
    assert scored["tokens"] == 13 * windows
    assert scored["bits"] == pytest.approx(scored["loss"] / math.log(2))
    nats, right = [], []
    for n in range(windows):
        text = data.corpus.validation[32 * n : 32 * n + 32].astype(np.int64)
        shown, places = mask_tokens(text, np.random.default_rng((n,)), 0.4, 256)
        logits = model(torch.from_numpy(shown)[None])[0, torch.from_numpy(places)]
        targets = torch.from_numpy(text[places])
        nats.append(F.cross_entropy(logits, targets, reduction="none"))
        right.append(logits.argmax(-1) == targets)
    assert scored["loss"] == pytest.approx(torch.cat(nats).mean().item())
    assert scored["accuracy"] == pytest.approx(torch.cat(right).double().mean().item())
    monkeypatch.setattr(decoding, "PIECE", 100)
    assert data.measure(model, recipe, View()).figures == pytest.approx(scored)
    assert data.measure(model, recipe.edit(seed=5), View()).figures == pytest.approx(scored)
    assert data.measure(model, recipe, View(limit=100)).figures["tokens"] == 3 * 13
    assert data.measure(model, recipe, View(multiple=2)).figures["tokens"] == 26 * (len(data.corpus.validation) // 64)
    assert data.measure(model, recipe, View(multiple=1000)).reason.startswith("length: expected less than")


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"mask_share": 0.0}, "mask_share: expected a share, above 0 and at most 1, got 0.0"),
        ({"mask_share": 15.0}, "mask_share: expected a share"),
        ({"mask_share": float("nan")}, "mask_share: expected a share"),
        ({"scheme": "ape-tree"}, "schemes: expected positions on a line, which text has"),
        ({"validation_tokens": 31}, "validation_tokens: expected 0, or at least the 32 of a window, got 31"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, edits, message):
    recipe, _ = ready(tmp_path)
    with pytest.raises(ValueError, match=f"^{message}"):
        recipe.edit(**edits).task.check(recipe.edit(**edits))


def test_a_short_training_finds_letters_by_their_neighbours_and_shows_examples(tmp_path):
    recipe, data = ready(tmp_path, scheme="rope:decay=retnet", mask_share=0.4)
    before = data.measure(recipe.task.model(recipe), recipe, View()).figures
    model = trained(recipe, data, 120, 1e-2).eval()
    after = data.measure(model, recipe, View()).figures
    assert after["loss"] < 1.5 < 5 < before["loss"]
    assert after["accuracy"] > 0.5 > before["accuracy"]
    first, second = data.examples(model, recipe, 2)
    assert first["text"] == data.corpus.tokenizer.decode(data.corpus.validation[:32])
    assert len(first["shown"]) == len(first["model"]) == len(first["text"]) == 32
    assert first["shown"].count("_") > 5 > first["model"].count("_")
    assert second["text"] != first["text"]


SMALL = ("--steps=12", "--batch=8", "--layers=1", "--model-dim=16", "--heads=2", "--length=32", "--device=cpu")


def test_a_comparison_ranks_by_loss_and_its_runs_are_evaluated(isopos, tmp_path):
    (tmp_path / "text.txt").write_text(LINES)
    options = ("--task=masked", "--data=text.txt", "--schemes=none,rope", "--mask-share=0.4", "--name=c", *SMALL)
    status, out, err = isopos("compare", *options)
    assert (status, err) == (0, "")
    found = [float(loss) for loss in re.findall(r"^│ \w+ .*? (\d\.\d{3}) │", out, re.MULTILINE)]
    assert found == sorted(found)
    assert "loss: nats a masked token of held-out text, lower is better" in " ".join(out.split())
    page = (tmp_path / "runs" / "c" / "report.html").read_text()
    assert "An encoder of bytes, 40% of them masked, in windows of 32." in page
    assert "Answers of rope" in page or "Answers of none" in page
    status, out, err = isopos("eval", "runs/c/rope-seed0", "--length", "1", "2")
    assert (status, err) == (0, "")
    (figures,) = json.loads((tmp_path / "runs" / "c" / "rope-seed0" / "eval.json").read_text())
    scores = json.loads((tmp_path / "runs" / "c" / "rope-seed0" / "result.json").read_text())["scores"]
    assert figures["figures"]["1"]["loss"] == pytest.approx(scores["loss"])
    assert figures["figures"]["2"]["loss"] == pytest.approx(scores["loss at 2x"])
    assert "scored: expected none" in isopos("eval", "runs/c/rope-seed0", "--scored=8")[2]
    assert "expected a language model" in isopos("generate", "runs/c/rope-seed0")[2]
