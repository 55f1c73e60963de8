"""Pathfinder: what the pictures show, that they are those of their seed, and positions in a row or on a grid."""

import pickle

import numpy as np
import pytest
import torch

from isopos.lab.data import pathfinder
from isopos.lab.data.pathfinder import draw
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.pathfinder import Pathfinder
from isopos.lab.tasks.task import View
from isopos.positions import grid

TINY = ("--layers=1", "--model-dim=16", "--heads=2", "--steps=3", "--batch=4", "--device=cpu")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))


def pieces(picture, reach):
    """Sets of pixels that steps of at most `reach` pixels connect."""
    left, found = {(int(y), int(x)) for y, x in zip(*picture.nonzero(), strict=True)}, []
    while left:
        piece, edge = set(), {left.pop()}
        while edge:
            piece |= edge
            edge = {p for p in left if any(max(abs(p[0] - q[0]), abs(p[1] - q[1])) <= reach for q in edge)}
            left -= edge
        found.append(piece)
    return found


def dots(picture):
    """Squares of three by three pixels: the centres of those that are filled."""
    filled = [
        (y, x)
        for y in range(1, len(picture) - 1)
        for x in range(1, len(picture) - 1)
        if picture[y - 1 : y + 2, x - 1 : x + 2].all()
    ]
    return pieces(_marked(picture, filled), 1)


def _marked(picture, places):
    marked = np.zeros_like(picture)
    for place in places:
        marked[place] = 1
    return marked


@pytest.mark.parametrize(("side", "dashes", "distractors"), [(16, 3, 0), (32, 6, 2)])
def test_dots_are_at_the_ends_of_one_path_or_of_two(side, dashes, distractors):
    for seed in range(8):
        for connected in (True, False):
            picture = draw(np.random.default_rng((seed, side)), connected, side, dashes, distractors)
            assert not picture[[0, -1]].any()
            assert not picture[:, [0, -1]].any()
            assert len(dots(picture)) == 2
    rows = {
        connected: [draw(np.random.default_rng(n), connected, side, dashes, distractors) for n in range(30)]
        for connected in (True, False)
    }
    assert abs(np.mean(rows[True]) / np.mean(rows[False]) - 1) < 0.05  # the same number of pixels


def test_what_is_connected_is_connected():
    """Both ends of a path of one dash are dots: they lie in one piece, or in two that do not touch."""
    for seed in range(30):
        for connected in (True, False):
            picture = draw(np.random.default_rng(seed), connected, 24, 1, 0)
            first, second = (min(dot) for dot in dots(picture)) if len(dots(picture)) == 2 else ((0, 0), (0, 0))
            if (first, second) == ((0, 0), (0, 0)):
                assert connected  # two dots that run into each other
                continue
            piece = next(piece for piece in pieces(picture, 1) if first in piece)
            assert (second in piece) == connected


def test_pictures_are_prepared_once_and_are_those_of_their_seed(monkeypatch):
    recipe = Recipe(task=Pathfinder(pictures=60, distractors=0)).edit(batch=8, layers=1, model_dim=16, heads=2)
    data = recipe.task.load(recipe)
    assert [len(sizes) for sizes in data.sizes.values()] == [48, 6, 6]
    assert [data.arrays[f"{split}-labels"].mean() for split in data.sizes] == [0.5] * 3
    monkeypatch.setattr(pathfinder, "draw", None)
    again = pickle.loads(pickle.dumps(recipe.task.load(recipe)))
    assert again.sha256 == data.sha256
    every = np.concatenate([data.arrays[f"{split}-pictures"] for split in data.sizes]).reshape(60, -1)
    assert len(np.unique(every, axis=0)) == 60
    for scheme, positions in (("rope", torch.arange(256)[:, None]), ("ape-grid", grid(16, 16))):
        own = recipe.edit(scheme=scheme)
        own.task.check(own)
        tokens, at, labels = data.batch(own, 1)
        assert tokens.shape == (8, 256)
        assert torch.equal(at, positions)
        assert all(torch.equal(a, b) for a, b in zip(again.batch(own, 1), (tokens, at, labels), strict=True))
        row = next(n for n, one in enumerate(every[:48]) if np.array_equal(one, tokens[0]))
        assert labels[0] == data.arrays["train-labels"][row]
        assert data.score(own.task.model(own), own, View()).figures["pictures"] == 6


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(pathfinder, "PICTURES", 2)
    recipe = Recipe(task=Pathfinder(dashes=40, pictures=20)).edit(model_dim=16, heads=2)
    with pytest.raises(ValueError, match="dashes: expected paths that fit into a picture of 16 x 16, got 40 dashes"):
        recipe.task.load(recipe)
    for scheme in ("ape-tree:branches=2", "ape-ring:period=9", "ape-grid:axes=3"):
        own = recipe.edit(scheme=scheme)
        with pytest.raises(ValueError, match="schemes: expected positions in a row or on a grid of 2 axes"):
            own.task.check(own)
    with pytest.raises(ValueError, match="side: expected a number from 8 to 1,024, got 4"):
        recipe.edit(side=4).check()


def test_every_command_knows_it(isopos, tmp_path):
    options = ("--pictures=40", "--distractors=0", *TINY)
    code, out, err = isopos("compare", "--task=pathfinder", "--schemes=rope,ape-grid", "--name=a", *options)
    assert code == 0, err
    assert "32 + 4 + 4 pictures, half of them connected" in out
    assert isopos("train", "pathfinder", "--name=b", *options)[0] == 0
    assert isopos("train", "pathfinder", "--name=b", "--resume", *options)[0] == 0
    assert isopos("eval", "runs/b", "--split=test")[0] == 0
