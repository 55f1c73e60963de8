"""Test tasks with finite sets of samples: batches depend on seed and step only, and padding changes no score."""

import pickle
from functools import cache

import numpy as np
import pytest
import torch

from isopos.lab.data import images, texts, treebank
from isopos.lab.recipes import Recipe
from isopos.lab.tasks import find, listops, samples
from isopos.lab.tasks.task import View

SOFTMAX = "rope:attention=softmax"
SIZES = {"batch": 8, "layers": 1, "model_dim": 16, "heads": 2}
TASKS = {  # settings, and schemes whose masks or positions differ
    "listops": ({}, ("rope", "ape-tree", "learned", "shiv-quirk", f"{SOFTMAX},decay=retnet")),
    "text": ({"longest": 24}, ("rope", "sinusoidal")),
    "trees": ({}, ("rope", "ape-tree")),
    "images": ({"height": 8, "width": 8}, ("rope", "ape-grid")),
    "pathfinder": ({"side": 16, "dashes": 5, "pictures": 100}, ("rope",)),
    "scenes": ({"side": 3, "scenes": 100, "held_out": 30}, ("prope", "rope-axial:axes=3", "rope")),
    "graphs": ({"vertices": 12, "graphs": 100}, ("wire", "rope")),
    "series": ({"context": 12, "horizon": 4}, ("rope", "clock")),
    "glue": ({"length": 24}, ("rope",)),
    "transduction": ({"samples": 60, "held_out": 10, "length": 6}, (SOFTMAX, "shaw", "none")),
    "tree-transduction": ({"samples": 60, "held_out": 10, "depth": 3}, (SOFTMAX, "ape-tree:attention=softmax")),
}


@pytest.fixture(scope="module", autouse=True)
def _few(tmp_path_factory):
    """Limit the number of built-in samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOPOS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(listops, "COUNTS", (200, 30, 30))
        patch.setattr(treebank, "COUNTS", {"train": 100, "validation": 30, "test": 30})
        patch.setattr(images, "COUNTS", (100, 30, 30))
        patch.setattr(texts, "EACH", 0.1)
        images.digits.cache_clear()
        loaded.cache_clear()
        yield
    images.digits.cache_clear()


@cache
def loaded(name):
    task = find(name)(**TASKS[name][0])
    return task.load(Recipe(task=task))


def ready(name, scheme="", **edits):
    """A recipe with inferred fields, and its data."""
    settings, schemes = TASKS[name]
    recipe = Recipe(task=find(name)(**settings)).edit(scheme=scheme or schemes[0], **SIZES | edits)
    data = recipe.task.load(recipe) if edits else loaded(name)
    return data.infer(recipe), data


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_functions_of_seed_and_step_and_ranks_share_them(name):
    recipe, data = ready(name)
    again = pickle.loads(pickle.dumps(data))  # as processes that prepare batches have it
    for step in (1, 7, 60, 7):
        whole = data.batch(recipe, step)
        assert all(a.equal(b) or a.isnan().any() for a, b in zip(whole, again.batch(recipe, step), strict=True))
        for seed, other in ((0, step + 1), (1, step - 1), (1, step), (1, step + 1)):
            assert not whole[0].equal(data.batch(recipe.edit(seed=seed), other)[0])
        for rank in range(2):
            for all_rows, rows in zip(whole, data.batch(recipe, step, rank, 2), strict=True):
                shared = rows.ndim == 2 and rows.shape[-1] == 1  # positions of all samples
                expected = all_rows if shared else all_rows[4 * rank : 4 * rank + 4]
                expected = expected[tuple(slice(size) for size in rows.shape)]  # a rank pads to its own longest sample
                torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="batch: expected a multiple of the 3 ranks"):
        data.batch(recipe, 1, 0, 3)
    with pytest.raises(ValueError, match=rf"batch: expected at most the \d+ {data.unit}, got 100000"):
        data.infer(recipe.edit(batch=100_000))


@pytest.mark.parametrize("name", TASKS)
def test_an_epoch_has_every_sample_once_in_batches_of_similar_sizes(name):
    _, data = ready(name)
    sizes = data.sizes["train"]
    epochs = [samples._epoch(data, seed, epoch, 8) for seed in range(2) for epoch in range(2)]
    for rows in epochs:
        assert len(np.unique(rows)) == rows.size == len(sizes) // 8 * 8
        assert np.ptp(sizes[rows], axis=1).mean() <= np.ptp(sizes) / 3
    assert len({rows.tobytes() for rows in epochs}) == 4


@pytest.mark.parametrize(("name", "scheme"), [(name, scheme) for name, (_, schemes) in TASKS.items() for scheme in schemes])
def test_scores_are_those_of_single_samples_without_padding(name, scheme, monkeypatch):
    recipe, data = ready(name, scheme)
    model = recipe.task.model(recipe).double() if name not in ("images", "series", "glue") else recipe.task.model(recipe)
    scored = data.measure(model, recipe, View(limit=20)).figures
    counted = recipe.task.counted or data.unit
    assert name == "series" or scored[counted] == min(20, len(data.sizes["validation"]))
    monkeypatch.setattr(samples, "AT_ONCE", 1)
    assert data.measure(model, recipe, View(limit=20)).figures == pytest.approx(scored, abs=1e-5)
    assert data.measure(model, recipe, View(limit=5)).figures[counted] < scored[counted]
    reason = data.score(model, recipe, View(split="train")).reason
    assert reason == f"split: expected one of {', '.join(data.splits)}, got 'train'"


@pytest.mark.parametrize("limit", [0, 7])
@pytest.mark.parametrize("name", ["listops", "text", "trees", "images", "pathfinder", "graphs"])
def test_chance_counts_the_answers_that_are_scored(name, limit):
    recipe, data = ready(name, validation_rows=limit)
    answers = torch.cat([data.tensors("validation", rows, recipe)[-1] for rows in data.rounds("validation", limit)])
    assert data.chance(recipe) == (answers.bincount().max().item() / len(answers), len(answers))
    assert len(answers) == (limit or len(data.sizes["validation"]))


@pytest.mark.parametrize(("name", "most", "power"), [("AT_ONCE", 90, 1), ("PAIRS", 900, 2)])
def test_as_much_is_scored_at_once_as_fits(monkeypatch, name, most, power):
    recipe, data = ready("listops")
    model, shapes = recipe.task.model(recipe), []
    monkeypatch.setattr(samples, name, most)
    model.register_forward_hook(lambda model, args, output: shapes.append(args[0].shape))
    data.score(model, recipe, View())
    *whole, _ = [count for count, _ in shapes]
    assert whole == [max(1, most // longest**power) for _, longest in shapes[:-1]]
    assert max(whole) > 1
