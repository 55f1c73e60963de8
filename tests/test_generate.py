"""Test text generation from a trained run."""

import json

import pytest
import torch
from safetensors.torch import save_model

from isopos.lab.commands.generate import Options, generate
from isopos.lab.data.tokenizers import BPE, Words
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.decoding import sample_tokens
from isopos.models import Decoder


@pytest.fixture(params=["rope", "permuteformer", "t5", "learned:length=64", "horn-clipped"])
def run(request, tmp_path):
    recipe = Recipe(scheme=request.param).edit(layers=2, model_dim=16, heads=2)
    torch.manual_seed(0)
    model = recipe.task.model(recipe)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.as_dict()))
    save_model(model, str(tmp_path / "model.safetensors"))
    return tmp_path, model.eval()


@torch.no_grad()
def test_generated_bytes_are_drawn_from_the_whole_model(run):
    folder, model = run
    found = "".join(generate(Options(str(folder), "abc", 20, seed=3))).encode()
    text, generator = list(b"abc"), torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = model(torch.tensor([text]))[:, -1]
        text.append(torch.multinomial(logits.softmax(-1), 1, generator=generator).item())
    assert found == bytes(text[3:]).decode(errors="replace").encode()


def test_seeds_choose(run):
    folder, _ = run
    first, again, other = ("".join(generate(Options(str(folder), "abc", 20, seed=seed))) for seed in (1, 1, 2))
    assert first == again != other


def test_bad_calls(run, tmp_path):
    folder, model = run
    for arguments, message in (
        (("nowhere", "a", 1), "run: expected a folder with a recipe.json, got nowhere"),
        ((str(folder.parent), "a", 1), "run: expected a folder .* it holds"),
        ((str(folder), "", 1), "prompt: expected at least one character"),
        ((str(folder), "a", 0), "tokens: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(Options(*arguments))
    for choice, message in (
        ({"temperature": -1.0}, "temperature: expected 0 or a positive number, got -1.0"),
        ({"temperature": float("nan")}, "temperature: expected 0 or a positive number, got nan"),
        ({"top_p": 0.0}, "top_p: expected a probability above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: expected a probability above 0 and at most 1, got 1.1"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(Options(str(folder), "a", 1, **choice))
    if model.scheme.max_length is not None:
        with pytest.raises(ValueError, match="tokens: expected at most 61 after this prompt"):
            generate(Options(str(folder), "abc", 62))
        assert "".join(generate(Options(str(folder), "abc", 61)))


@torch.no_grad()
def test_no_temperature_takes_the_most_probable_byte(run):
    folder, model = run
    found = "".join(generate(Options(str(folder), "abc", 20, temperature=0, seed=3))).encode()
    text = list(b"abc")
    for _ in range(20):
        text.append(model(torch.tensor([text]))[:, -1].argmax().item())
    assert found == bytes(text[3:]).decode(errors="replace").encode()


def shares(probabilities, temperature, top_p):
    logits = torch.tensor([probabilities], dtype=torch.float64).log().expand(20_000, -1)
    drawn = sample_tokens(logits, temperature, top_p, torch.Generator().manual_seed(0))
    return (drawn.bincount(minlength=len(probabilities)) / len(drawn)).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        (1.0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 0.69, [0, 4 / 7, 0, 3 / 7]),
        (1.0, 0.71, [0, 4 / 9, 2 / 9, 3 / 9]),
        (1.0, 1e-9, [0, 1, 0, 0]),
        (1.0, 0.0, [0, 1, 0, 0]),
        (0.5, 1.0, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (0.5, 0.8, [0, 16 / 25, 0, 9 / 25]),  # the temperature first
        (1e9, 1.0, [1 / 4] * 4),
        (1e-300, 1.0, [0, 1, 0, 0]),
        (0.0, 0.5, [0, 1, 0, 0]),
    ],
)
def test_shares_of_draws(temperature, top_p, expected):
    assert shares([0.1, 0.4, 0.2, 0.3], temperature, top_p) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("kind", [Words, BPE])
@pytest.mark.parametrize("cutoffs", [(), (8,)])
@torch.no_grad()
def test_runs_of_words_and_pieces(kind, cutoffs, tmp_path, monkeypatch):
    tokenizer = kind.learn(["the cat sat on the mat\nand the dog sat on the cat\n"] * 9)
    torch.manual_seed(0)
    recipe = Recipe().edit(layers=1, model_dim=16, heads=2)
    model = Decoder(tokenizer.size, 16, 1, recipe.task.model(recipe).scheme, cutoffs=cutoffs).eval()
    save_model(model, str(tmp_path / "model.safetensors"))
    monkeypatch.setattr("isopos.lab.runs.checkpoints.load_run", lambda folder: (recipe, model))
    with pytest.raises(ValueError, match=f"expected a tokenizer of the model's {tokenizer.size} tokens .*, got 256"):
        generate(Options(str(tmp_path), "the cat", 1))
    tokenizer.save(tmp_path)
    found = "".join(generate(Options(str(tmp_path), "the cat", 12, temperature=0)))
    text = tokenizer.encode("the cat").tolist()
    begin = len(text)
    for _ in range(12):
        text.append(model(torch.tensor([text]))[:, -1].argmax().item())
    assert found == " " * (kind is Words) + tokenizer.decode(text[begin:])
    if kind is Words:
        with pytest.raises(ValueError, match="prompt: expected at least one word, got '  '"):
            generate(Options(str(tmp_path), "  ", 1))
    with pytest.raises(ValueError, match="prompt: expected text in UTF-8"):
        generate(Options(str(tmp_path), "the \udcff", 1))
    model.head.apply(lambda part: [weight.fill_(torch.nan) for weight in part.parameters()] and None)
    with pytest.raises(ValueError, match="run: expected logits that are numbers, got nan"):
        list(generate(Options(str(tmp_path), "the cat", 1)))
