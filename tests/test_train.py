import json
import shutil

import pytest
import torch
from safetensors import SafetensorError

from isopos.lab.recipes import Recipe
from isopos.lab.runs import checkpoints
from isopos.lab.tasks.task import View
from isopos.lab.training import run as train

TINY = Recipe().edit(steps=12, length=32, batch=2, layers=1, model_dim=16, heads=2, validation_tokens=512, save_every=0)


@pytest.fixture(scope="module")
def source():
    return TINY.task.load(TINY)


def _model(recipe):
    return recipe.task.model(recipe)


def _losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_a_run_learns_and_its_folder_is_complete(source, tmp_path):
    seen = []
    recipe = TINY.edit(steps=60, learning_rate=1e-2)
    result = train.train(recipe, source, tmp_path / "run", lambda *row: seen.append(row))
    assert result.status == "finished"
    assert [row[0] for row in seen] == list(range(1, 61))
    assert result.scores["bits/byte"] < 6 < seen[0][1]
    assert _losses(tmp_path / "run")[-1][0] == 60
    loaded, model = checkpoints.load_run(tmp_path / "run")
    assert loaded == recipe
    assert source.evaluate(model, recipe, recipe.task.metrics)["bits/byte"] == pytest.approx(
        result.scores["bits/byte"], rel=1e-6
    )


@pytest.mark.parametrize(
    "scheme", ["sinusoidal", "rope", "lrpe-orthogonal:learned=true", "learned", "permuteformer", "ape-sequence"]
)
def test_what_schemes_share_starts_equal(scheme):
    plain, other = (_model(TINY.edit(scheme=name)).state_dict() for name in ("none", scheme))
    assert all(torch.equal(value, other[name]) for name, value in plain.items())


def test_attention_dropout_is_of_softmax_attention_and_a_note_says_so():
    recipe = TINY.edit(attention_dropout=0.5)
    tokens = torch.randint(256, (2, TINY.task.length))
    softmax, linear = (_model(recipe.edit(scheme=scheme)) for scheme in ("rope:attention=softmax", "rope"))
    assert [block.attention.dropout for model in (softmax, linear) for block in model.blocks[:1]] == [0.5, 0.0]
    assert not torch.equal(softmax(tokens), softmax(tokens))
    assert torch.equal(softmax.eval()(tokens), softmax(tokens))
    assert train.check_recipe(recipe.edit(scheme="rope:attention=softmax"))[1] == []
    assert train.check_recipe(recipe)[1] == ["rope: its linear attention forms no weights for attention_dropout to drop"]


def test_divergence_ends_the_run_and_is_recorded(source, tmp_path):
    result = train.train(TINY.edit(learning_rate=1e12), source, tmp_path / "run", lambda *row: None)
    assert result.status.startswith("diverged at step")
    assert set(result.scores.values()) == {None}
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == result.status


def test_a_validation_that_is_not_finite_is_no_result(source, tmp_path, monkeypatch):
    monkeypatch.setattr(type(source), "evaluate", lambda *_, **__: {"bits/byte": float("nan")})
    result = train.train(TINY, source, tmp_path / "run", lambda *row: None)
    assert result.status == "diverged in validation"
    assert set(result.scores.values()) == {None}


def test_a_seed_draws_the_scheme_too():
    orders = [_model(TINY.edit(scheme="permuteformer", seed=seed)).scheme.encoding.table for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_learned_positions_are_not_evaluated_beyond_their_table(source, tmp_path):
    result = train.train(TINY.edit(scheme="learned"), source, tmp_path / "run", lambda *row: None)
    assert result.scores["bits/byte"] is not None
    assert result.scores["at 2x"] is None


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple of the 3 heads"):
        _model(TINY.edit(heads=3))


def test_evaluation_is_a_mean_over_bytes(source):
    model = _model(TINY)
    bits = source.measure(model, TINY, View()).figures["bits_per_byte"]
    tokens, targets = zip(*source.corpus.windows(TINY.task.length, TINY.task.validation_tokens, 1), strict=True)
    losses = [
        source.loss(model, a, b).item() / torch.log(torch.tensor(2.0)).item() for a, b in zip(tokens, targets, strict=True)
    ]
    assert bits == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_room_for_the_weights_is_made_sure_of_before_training(source, tmp_path, monkeypatch):
    size, seen = sum(value.nbytes for value in _model(TINY).state_dict().values()), []
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size))
        message = rf"room: expected [\d,]+ bytes .* for the weights at the end, got {size:,}; .*--resume"
        with pytest.raises(OSError, match=message):
            train.train(TINY, source, tmp_path / "run", lambda *row: seen.append(row))
    assert not seen
    assert train.train(TINY, source, tmp_path / "run", resume=True).status == "finished"


def test_weights_that_cannot_be_written_are_reported_and_the_last_checkpoint_stays(source, tmp_path, monkeypatch):
    def full(model, path, **_):
        raise SafetensorError("No space left on device")

    recipe = TINY.edit(save_every=6)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_model", full)
        with pytest.raises(
            OSError,
            match=r"weights: cannot write .*model\.safetensors: No space.*; make room and continue from .*step-00000012",
        ):
            train.train(recipe, source, tmp_path / "run")
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    whole = train.train(recipe, source, tmp_path / "whole")
    assert train.train(recipe, source, tmp_path / "run", resume=True).scores == whole.scores
