"""Text from a trained run."""

import json

import pytest
import torch
from safetensors.torch import save_model

from isopos.lab.generate import generate
from isopos.lab.recipes import Recipe
from isopos.lab.train import build_model


@pytest.fixture(params=["rope", "permuteformer", "t5", "learned:length=64", "horn-clipped"])
def run(request, tmp_path):
    recipe = Recipe(scheme=request.param, layers=2, model_dim=16, heads=2)
    torch.manual_seed(0)
    model = build_model(recipe)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.as_dict()))
    save_model(model, str(tmp_path / "model.safetensors"))
    return tmp_path, model.eval()


@torch.no_grad()
def test_generated_bytes_are_drawn_from_the_whole_model(run):
    folder, model = run
    found = "".join(generate(str(folder), "abc", 20, seed=3)).encode()
    text, generator = list(b"abc"), torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = model(torch.tensor([text]))[:, -1]
        text.append(torch.multinomial(logits.softmax(-1), 1, generator=generator).item())
    assert found == bytes(text[3:]).decode(errors="replace").encode()


def test_seeds_choose(run):
    folder, _ = run
    first, again, other = ("".join(generate(str(folder), "abc", 20, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_bad_calls(run, tmp_path):
    folder, model = run
    for arguments, message in (
        (("nowhere", "a", 1, 0), "run: expected a folder with a trained model, got nowhere"),
        ((str(folder.parent), "a", 1, 0), "run: expected a folder .* it holds"),
        ((str(folder), "", 1, 0), "prompt: expected at least one character"),
        ((str(folder), "a", 0, 0), "tokens: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(*arguments)
    if model.scheme.max_length is not None:
        with pytest.raises(ValueError, match="tokens: expected at most 61 after this prompt"):
            generate(str(folder), "abc", 62, 0)
