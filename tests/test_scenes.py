"""Test scenes: what cameras see, and models that see cameras relative to each other only."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from isopos.lab.data import scenes
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.scenes import Scenes

SIZES = {"batch": 8, "layers": 1, "model_dim": 16, "heads": 2}


def ready(scheme, **settings):
    recipe = Recipe(task=Scenes(side=3, scenes=40, held_out=10, **settings)).edit(scheme=scheme, **SIZES)
    return recipe, recipe.task.load(recipe)


def test_a_pixel_has_the_colour_of_the_tile_where_its_ray_leaves_the_room():
    """The reference follows each ray in small steps until a coordinate is beyond a wall."""
    random = np.random.default_rng(0)
    walls, focal = random.integers(200, size=(2, 6, 3, 3), dtype=np.uint8), random.uniform(0.5, 1, (2, 4))
    rotation, centre = np.linalg.qr(random.normal(size=(2, 4, 3, 3)))[0], random.uniform(-0.3, 0.3, (2, 4, 3))
    pixels, at = scenes._seen(walls, rotation, centre, focal, 6), 1e-4 * np.arange(40_000)[:, None]
    right = 0
    for n, view, y, x in np.ndindex(pixels.shape):
        ray = rotation[n, view] @ [((x + 0.5) / 6 - 0.5) / focal[n, view], ((y + 0.5) / 6 - 0.5) / focal[n, view], 1]
        way = centre[n, view] + at * ray
        end = way[np.abs(way).max(1).searchsorted(1)]
        axis = int(np.abs(end).argmax())
        row, column = (min(2, int((end[other] + 1) * 1.5)) for other in range(3) if other != axis)
        right += pixels[n, view, y, x] == walls[n, 2 * axis + (end[axis] > 0), row, column]
    assert right >= pixels.size - 3  # but for rays that end on a border of tiles


def test_poses_are_cameras_in_a_random_frame(monkeypatch):
    pixels, poses, focal = scenes.draw_scenes(np.random.default_rng(1), 50, 3, 4, 2, 6)
    rotation = poses[..., :3, :3]
    np.testing.assert_allclose(rotation @ rotation.swapaxes(-1, -2), np.broadcast_to(np.eye(3), rotation.shape), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(rotation), 1)
    assert np.abs(rotation[:, 0].mean(0)).max() < 0.3, "frames have any direction"
    monkeypatch.setattr(np.linalg, "qr", lambda x: (np.broadcast_to(np.eye(3), x.shape).copy(), np.ones(x.shape)))
    same, plain, _ = scenes.draw_scenes(np.random.default_rng(1), 50, 3, 4, 2, 6)
    assert np.array_equal(same, pixels)
    relative = [np.linalg.inv(x[:, :1]) @ x for x in (poses, plain)]
    np.testing.assert_allclose(*relative, atol=1e-12)
    assert np.abs(plain[..., :3, 3]).max() <= scenes.APART
    assert (plain[..., 2, 2] ** 2 + plain[..., 0, 2] ** 2 > math.cos(scenes.PITCH) ** 2 - 1e-9).all(), "cameras look ahead"
    assert ((scenes.FOCAL[0] <= focal) & (focal <= scenes.FOCAL[1])).all()


def test_walls_have_images_of_their_split_in_levels_of_grey(tmp_path):
    """Grey of training and validation is 40, 80, 120 or 160, a fourth of the images each; of the test all is 250."""
    for split, greys in (("train", (40, 80, 120, 160)), ("valid", (40, 160)), ("test", (250,))):
        for n, grey in enumerate(greys):
            for kind in ("a", "b"):
                (tmp_path / split / kind).mkdir(parents=True, exist_ok=True)
                Image.new("L", (8, 8), grey).save(tmp_path / split / kind / f"{n}.png")
    task = Scenes(data=str(tmp_path), side=4, colours=4, scenes=200, held_out=50)
    data = task.load(Recipe(task=task).edit(scheme="rope", **SIZES))
    assert data.name == str(tmp_path)
    shares = {split: np.bincount(data.arrays[f"{split}-pixels"].ravel(), minlength=4) for split in data.sizes}
    assert shares["train"].min() > 0.2 * shares["train"].sum()
    assert (shares["validation"] > 0).tolist() == [True, False, False, True]
    assert (shares["test"] > 0).tolist() == [False, False, False, True]
    drawn = Recipe(task=Scenes(side=4, colours=4, scenes=200, held_out=50)).edit(scheme="rope", **SIZES).task
    assert task.load(Recipe(task=task)).sha256 == data.sha256 != drawn.load(Recipe(task=drawn)).sha256


def test_an_image_keeps_its_tiles_on_a_wall():
    picture = np.arange(9, dtype=np.uint8).reshape(1, 3, 3)
    pixels, *_ = scenes.draw_scenes(np.random.default_rng(0), 20, 3, 6, 3, 9, picture)
    assert pixels.shape == (20, 3, 6, 6)
    assert set(pixels.ravel()) == set(range(9))
    jumps = np.abs(np.diff(pixels.astype(int), axis=-1))
    assert {0, 1, 3} <= set(jumps.ravel().tolist()), "neighbours on a wall are neighbours in the image"


def test_rays_are_lines_from_cameras_in_the_frame_of_the_first():
    """The points of a line o + s d are those with p x d = o x d."""
    _, poses, focal = scenes.draw_scenes(np.random.default_rng(2), 3, 2, 4, 2, 6)
    rays = scenes.rays(poses, focal, 4)
    assert rays.shape == (3, 2, 4, 4, 6)
    np.testing.assert_allclose(np.linalg.norm(rays[..., :3], axis=-1), 1)
    for n, view, y, x in np.ndindex(rays.shape[:-1]):
        seen = np.array([((x + 0.5) / 4 - 0.5) / focal[n, view], ((y + 0.5) / 4 - 0.5) / focal[n, view], 1, 1 / 3])
        point = np.linalg.inv(poses[n, 0]) @ poses[n, view] @ (3 * seen)  # three times as far as the image, then a 1
        direction, moment = rays[n, view, y, x, :3], rays[n, view, y, x, 3:]
        np.testing.assert_allclose(np.cross(point[:3], direction), moment, atol=1e-12)
        assert point[:3] @ direction > 0
    frame = np.linalg.qr(np.random.default_rng(3).normal(size=(4, 4)))[0]
    np.testing.assert_allclose(scenes.rays(frame @ poses, focal, 4), rays, atol=1e-12)


def test_with_rays_tokens_are_colours_and_lines():
    recipe, data = ready("rope:attention=softmax", rays=True)
    without, plain = ready("rope:attention=softmax")
    tokens, positions, answers = data.batch(recipe, 3)
    known, same, others = plain.batch(without, 3)
    assert torch.equal(positions, same)
    assert torch.equal(answers, others)
    assert tokens.shape == (8, 27, 12)
    assert tokens[:, -9:, :6].isnan().all()
    assert torch.equal(tokens[:, :-9, :6].argmax(-1), known[:, :-9])
    assert (tokens[:, :9, 9:].abs() < 1e-15).all(), "rays of the first camera start at the origin"
    model = recipe.task.model(recipe)
    logits, found = data.logits(model, tokens, positions, answers)
    assert logits.shape == (72, 6)
    assert torch.equal(found, answers.flatten())
    turned = tokens.clone()
    turned[:, -9:, 6:] = tokens[:, -9:, 6:].roll(1, 0)
    assert (data.logits(model, turned, positions, answers)[0] - logits).abs().max() > 1e-3, "other rays change predictions"


def test_chance_counts_rooms_whose_pixels_are_alike():
    recipe, data = ready("prope")
    share, count = data.chance(recipe)
    labels = data.labels("validation")[data.spread("validation", data.limit)]
    assert count == len(labels) < labels.size
    assert share == np.unique(labels, return_counts=True)[1].max() / labels.size


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_predictions_do_not_depend_on_the_frame_of_the_world(kind):
    recipe, data = ready(f"prope:attention={kind}")
    tokens, positions, answers = data.batch(recipe, 3)
    assert (tokens[:, -9:] == recipe.task.colours).all()
    assert (tokens[:, :-9] < recipe.task.colours).all()
    assert positions.shape == (8, 27, 18)
    assert answers.shape == (8, 9)
    angle = torch.tensor(0.7, dtype=torch.float64)
    frame = torch.eye(4, dtype=torch.float64)
    frame[0, 0], frame[0, 1], frame[1, 0], frame[1, 1] = angle.cos(), -angle.sin(), angle.sin(), angle.cos()
    frame[:3, 3] = torch.tensor([0.3, -0.2, 0.5])
    moved = positions.clone()
    moved[..., :16] = (frame @ positions[..., :16].unflatten(-1, (4, 4))).flatten(-2)
    model = recipe.task.model(recipe).double().eval()
    with torch.no_grad():
        logits, others = model(tokens, positions), model(tokens, moved)
        turned = model(tokens, positions.roll(1, 0))
    torch.testing.assert_close(others, logits, rtol=0, atol=1e-6)
    assert (turned - logits).abs().max() > 1e-3, "other cameras change predictions"


def test_positions_are_those_of_the_scheme():
    for scheme, columns, size in (("rope", 1, 27), ("rope-axial", 2, 3), ("rope-axial:axes=3", 3, 3)):
        recipe, data = ready(scheme)
        recipe.task.check(recipe)
        positions = data.batch(recipe, 0)[1]
        assert positions.shape == (27, columns)
        assert positions.max() == size - 1
        assert len(positions.unique(dim=0)) == (9 if columns == 2 else 27)
    recipe, data = ready("prope")
    without, poses = ready("prope", intrinsics=False)
    assert torch.equal(data.batch(recipe, 0)[0], poses.batch(without, 0)[0])
    assert not torch.equal(data.batch(recipe, 0)[1], poses.batch(without, 0)[1])
    short = recipe.edit(scheme="learned:length=26")
    with pytest.raises(ValueError, match="schemes: expected positions for 27 pixels, got learned:length=26"):
        short.task.check(short)
    for scheme in ("ape-tree:branches=2", "clock", "rope-axial:axes=4"):
        recipe = Recipe(task=Scenes(side=3)).edit(scheme=scheme, **SIZES | {"model_dim": 32})
        with pytest.raises(ValueError, match="schemes: expected positions of cameras, of a line, or of a grid"):
            recipe.task.check(recipe)
