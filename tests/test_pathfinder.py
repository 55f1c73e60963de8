"""Test Pathfinder: contents of the pictures, seeds, and positions on a line or a grid."""

import pickle

import numpy as np
import pytest
import torch

from isopos.lab.data import pathfinder
from isopos.lab.data.pathfinder import draw_pair
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.pathfinder import Pathfinder
from isopos.lab.tasks.task import View
from isopos.positions import grid

pytestmark = pytest.mark.usefixtures("own_cache")
TINY = ("--layers=1", "--model-dim=16", "--heads=2", "--steps=3", "--batch=4", "--device=cpu")


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
    """The centres of the squares of three by three lit pixels that are furthest apart."""
    filled = np.argwhere(np.lib.stride_tricks.sliding_window_view(picture > 0, (3, 3)).all((-1, -2))) + 1
    apart = ((filled[:, None] - filled) ** 2).sum(-1)
    first, second = np.unravel_index(apart.argmax(), apart.shape)
    return filled[first], filled[second]


@pytest.mark.parametrize(("side", "dashes", "distractors"), [(16, 5, 0), (16, 6, 1), (24, 12, 0), (32, 14, 5)])
def test_every_picture_has_one_right_answer(side, dashes, distractors):
    """Gaps within a path span at most one dark pixel, those between paths more: the dots' pieces tell the class."""
    random = np.random.default_rng((side, dashes))
    for _ in range(3):
        pair = draw_pair(random, side, dashes, distractors)
        for picture, connected in zip(pair, (False, True), strict=True):
            assert not picture[[0, -1]].any()
            assert not picture[:, [0, -1]].any()
            found = pieces(picture, 2)
            assert len(found) == 2 + distractors
            first, second = (next(n for n, piece in enumerate(found) if tuple(dot) in piece) for dot in dots(picture))
            assert (first == second) == connected
        assert np.array_equal(*(np.stack(dots(picture)) for picture in pair)), "a pair has its dots at the same pixels"


def statistics(picture):
    """Distances, counts and directions in a picture, which should not reveal the connection."""
    (a, b), side, lit = dots(picture), len(picture), np.argwhere(picture)
    middle, length = (a + b) / 2, np.hypot(*(b - a))
    unit = (b - a) / length
    along, beside = (lit - middle) @ unit, (lit - middle) @ (-unit[1], unit[0])
    far, between = np.hypot(along, beside), np.abs(along) < length / 2 - 2
    toward = []
    for dot, sense in ((a, 1), (b, -1)):
        reach = np.abs(lit - dot).max(1)
        step = lit[(reach >= 2) & (reach <= 3)] - dot
        toward.append(sense * step.mean(0) @ unit if len(step) else 0.0)
    edges = [min(*dot, *(side - 1 - dot)) for dot in (a, b)]
    touching = (picture[1:] * picture[:-1] > 0).sum(), (picture[:, 1:] * picture[:, :-1] > 0).sum()
    return [
        *(length, *np.abs(b - a), min(edges), max(edges), len(lit), *lit.std(0), *touching),
        *((far <= reach).sum() for reach in (2, 3, 4)),
        *((between & (np.abs(beside) <= reach)).sum() for reach in (1, 3, 5)),
        *(far.min(), (along**2).mean(), (beside**2).mean(), abs(along.mean()), sum(toward), min(toward)),
    ]


def guesses(known, classes, unknown):
    """Predictions of simple classifiers: deciles of each statistic, and a logistic regression on all of them."""
    for column, other in zip(known.T, unknown.T, strict=True):
        cuts = np.quantile(column, np.arange(1, 10) / 10)
        tenths = np.searchsorted(cuts, column)
        yield np.bincount(tenths, classes - 0.5, minlength=10)[np.searchsorted(cuts, other)] > 0
    centre, width = known.mean(0), known.std(0) + 1e-9
    known, unknown = ((rows - centre) / width for rows in (known, unknown))
    known, unknown = (np.concatenate((rows, rows**2, np.ones((len(rows), 1))), 1) for rows in (known, unknown))
    weights = np.zeros(known.shape[1])
    for _ in range(10):  # Newton's steps, with a ridge
        chance = 1 / (1 + np.exp(-known @ weights))
        curvature = (known.T * chance * (1 - chance)) @ known + 3 * np.eye(len(weights))
        weights += np.linalg.solve(curvature, known.T @ (classes - chance) - 3 * weights)
    yield unknown @ weights > 0


@pytest.mark.parametrize(
    ("side", "dashes", "distractors", "pairs", "most"),
    [
        (24, 12, 0, 100, 0.6),
        pytest.param(32, 14, 5, 250, 0.59, marks=pytest.mark.slow),
    ],
)
def test_simple_classifiers_do_not_tell_the_classes(side, dashes, distractors, pairs, most):
    """An early generator allowed 90% by the distance of the dots. Few pairs suffice to detect that, more to detect 60%."""
    random = np.random.default_rng(7)
    rows = [[statistics(picture) for picture in draw_pair(random, side, dashes, distractors)] for _ in range(pairs)]
    half = (
        np.array(rows)[: pairs // 2].reshape(pairs // 2 * 2, -1),
        np.array(rows)[pairs // 2 :].reshape(-1, len(rows[0][0])),
    )
    classes = [np.arange(len(part)) % 2 for part in half]
    right = [(guess == classes[1]).mean() for guess in guesses(half[0], classes[0], half[1])]
    assert max(right) < most, np.round(right, 2)


def test_a_run_is_not_resumed_on_pictures_of_another_format(isopos, monkeypatch):
    """Cached pictures of an earlier format have another key, and the run stores the sha256 of its pictures."""
    options = ("--name=a", "--pictures=20", "--side=16", "--dashes=5", *TINY)
    assert isopos("train", "pathfinder", *options)[0] == 0
    assert pathfinder.CACHE_VERSION == 2
    monkeypatch.setattr(pathfinder, "CACHE_VERSION", 3)
    monkeypatch.setattr(pathfinder, "draw_pair", lambda *given: draw_pair(*given)[:, ::-1])
    code, _, err = isopos("train", "pathfinder", "--resume", *options)
    assert code != 0
    assert "expected the data of" in err, err


def test_pictures_are_prepared_once_and_are_those_of_their_seed(monkeypatch):
    recipe = Recipe(task=Pathfinder(side=16, dashes=5, pictures=60)).edit(batch=8, layers=1, model_dim=16, heads=2)
    data = recipe.task.load(recipe)
    assert [len(sizes) for sizes in data.sizes.values()] == [48, 6, 6]
    assert [data.arrays[f"{split}-labels"].mean() for split in data.sizes] == [0.5] * 3
    monkeypatch.setattr(pathfinder, "draw_pair", None)
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
    monkeypatch.setattr(pathfinder, "BATCHES", 2)
    recipe = Recipe(task=Pathfinder(side=16, dashes=40, pictures=20)).edit(model_dim=16, heads=2)
    with pytest.raises(ValueError, match="dashes: expected paths that fit into a picture of 16 x 16, got 40 dashes"):
        recipe.task.load(recipe)
    for scheme in ("ape-tree:branches=2", "ape-ring:period=9", "ape-grid:axes=3"):
        own = recipe.edit(scheme=scheme)
        with pytest.raises(ValueError, match="schemes: expected positions in a row or on a grid of 2 axes"):
            own.task.check(own)
    with pytest.raises(ValueError, match="side: expected a number from 8 to 1,024, got 4"):
        recipe.edit(side=4).check()
    recipe.edit(dashes=3).check()  # as runs of earlier versions have it, which can be read
    with pytest.raises(ValueError, match=r"dashes: expected 4 or more, .*, got 3"):
        pathfinder.draw_pair(np.random.default_rng(0), 16, 3, 0)
