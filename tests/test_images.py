"""Test the images task: folders and archives, the cache, batches, views, and a classifier's training."""

import base64
import copy
import io
import itertools
import json
import pickle
import re
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import close
from PIL import Image
from training import trained

from isopos.lab.data import augment, images
from isopos.lab.data.digits import draw_digits
from isopos.lab.data.images import digits, read_images
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.images import Images, ImageSamples, _moved
from isopos.lab.tasks.samples import _epoch
from isopos.lab.tasks.task import View

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
LINE, GRID = "rope", "ape-grid"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path_factory.mktemp("cache")))


def paint(path, value=100, size=(8, 8), mode="L", **more):
    """Write an image with one pixel value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path, **more)
    return path


def bars(root, count=40, side=8):
    """Write images of two classes: horizontal and vertical bars at random positions, on dark noise."""
    random = np.random.default_rng(0)
    for n in range(count):
        pixels = random.integers(0, 40, (side, side)).astype(np.uint8)
        place = random.integers(1, side - 2)
        pixels[(place, slice(None)) if n % 2 else (slice(None), place)] = 200
        path = root / ("lying" if n % 2 else "standing") / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return str(root)


def ready(tmp_path, scheme=GRID, count=40, side=8, **edits):
    """A recipe with inferred fields, and its data, which are bars."""
    source = bars(tmp_path / "bars", count, side)
    sizes = {"batch": 4, "layers": 1, "model_dim": 16, "heads": 2, "patch": 2}
    recipe = Recipe(task=Images(data=source)).edit(scheme=scheme, **sizes | edits)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


def test_classes_are_folders_and_a_tenth_of_each_is_held_out(tmp_path):
    found = read_images(bars(tmp_path / "bars"))
    assert found.pixels.shape == (40, 1, 8, 8)
    assert found.classes == ["lying", "standing"]
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 36, "validation": 4, "test": 0}
    assert sorted(found.labels[found.splits["validation"]]) == [0, 0, 1, 1]
    assert sorted(np.concatenate([*found.splits.values()])) == list(range(40))
    for row, label in enumerate(found.labels):
        folders = [np.asarray(Image.open(path)) for path in (tmp_path / "bars" / found.classes[label]).iterdir()]
        assert any(np.array_equal(found.pixels[row, 0], pixels) for pixels in folders)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Write parquet files, which `datasets` reads like a dataset of the hub. The label -1 means no label."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    datasets.disable_progress_bars()

    def write(split, labels, name="label", classes=("lying", "standing")):
        kinds = datasets.Features(
            {"img": datasets.Image(), name: datasets.ClassLabel(names=[*classes]), "id": datasets.Value("int64")}
        )
        rows = [{"img": Image.new("RGB", (6, 4), (10 * n, 0, 99)), name: one, "id": n} for n, one in enumerate(labels)]
        (tmp_path / "data").mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows, features=kinds).to_parquet(tmp_path / "data" / f"{split}.parquet")
        return f"hf:{tmp_path / 'data'}"

    return write


def test_a_dataset_of_the_hub_has_folders_of_splits_and_classes(hub):
    source = [hub("train", [0, 1] * 10), hub("test", [1, 0, -1])][0]
    found = read_images(source)
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 18, "validation": 2, "test": 2}
    assert found.classes == ["lying", "standing"]
    assert found.skipped == ["1 other files (" + f"{source}/test/2.unlabelled)"]
    assert found.pixels.shape == (22, 3, 4, 6)
    labels = {int(pixels[0, 0, 0]) // 10: label for pixels, label in zip(found.pixels[:20], found.labels[:20], strict=True)}
    assert labels == {n: n % 2 for n in range(20)}
    assert read_images(source, 8, 8).pixels.shape == (22, 3, 8, 8)


def test_names_of_classes_with_slashes_stay_apart(hub):
    found = read_images(hub("train", [0, 1, 2] * 10, classes=("leaf/green", "leaf/dry", "root")))
    assert found.classes == ["leaf\N{DIVISION SLASH}dry", "leaf\N{DIVISION SLASH}green", "root"]


def test_a_dataset_without_classes_says_what_it_has(hub):
    import datasets

    source = hub("train", [0, 1])
    datasets.Dataset.from_dict({"text": ["a"], "n": [1]}).to_parquet(source.removeprefix("hf:") + "/train.parquet")
    said = "data: expected a column of Image and one of ClassLabel in .*, split train, got text of Value, n of Value"
    with pytest.raises(ValueError, match=said):
        read_images(source)


@pytest.mark.parametrize("packed", ["zip", "tar.xz", "folder of tar"])
def test_an_archive_has_the_same_images_as_its_folder(tmp_path, packed):
    for n, split in enumerate(("train", "train", "val", "test")):
        for label in ("a", "b"):
            paint(tmp_path / "in" / split / label / "deeper" / f"{n}.png", 10 * n + (label == "b"))
    plain, target = read_images(str(tmp_path / "in")), tmp_path / packed
    if packed == "zip":
        with zipfile.ZipFile(target := tmp_path / "a.zip", "w") as archive:
            for path in (tmp_path / "in").rglob("*.png"):
                archive.write(path, path.relative_to(tmp_path / "in"))
    elif packed == "tar.xz":
        with tarfile.open(target := tmp_path / "a.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / "in", "wrapped")
    else:
        target.mkdir()
        for split in ("train", "val", "test"):
            with tarfile.open(target / f"{split}.tar", "w") as archive:
                archive.add(tmp_path / "in" / split, "")
    found = read_images(str(target))
    for one in (plain, found):
        assert {split: len(rows) for split, rows in one.splits.items()} == {"train": 4, "validation": 2, "test": 2}
    for split, rows in plain.splits.items():
        assert np.array_equal(found.pixels[found.splits[split]], plain.pixels[rows])
        assert np.array_equal(found.labels[found.splits[split]], plain.labels[rows])


@pytest.mark.parametrize(("dtype", "what"), [(np.float32, "floating-point numbers"), (np.int32, "numbers of 32 bits")])
def test_pixels_without_a_range_are_refused(tmp_path, dtype, what):
    for n in range(4):
        paint(tmp_path / "ab"[n % 2] / f"{n}.png", n)
    Image.fromarray(np.full((8, 8), 200, dtype)).save(tmp_path / "b" / "z.tiff")
    with pytest.raises(
        ValueError, match=f"^data: expected pixels of 8 or 16 bits, got {what} in .*z.tiff, whose range is not"
    ):
        read_images(str(tmp_path))
    Image.fromarray(np.full((8, 8), 0x33FF, np.uint16)).save(tmp_path / "b" / "z.tiff")
    found = read_images(str(tmp_path))
    assert sorted(found.pixels[found.labels == 1, 0, 0, 0]) == [1, 3, 0x33]


def test_sizes_below_zero_are_refused_before_anything_is_read(tmp_path):
    for n in range(4):
        paint(tmp_path / "ab"[n % 2] / f"{n}.png", n)
    with pytest.raises(ValueError, match=r"^height: expected pixels, or 0 as found, got -8 x 8"):
        read_images(str(tmp_path), -8, 8)
    with pytest.raises(ValueError, match=r"^height: expected pixels, or 0 for 28, got 8 x -8"):
        digits(8, -8)


def test_modes_of_images(tmp_path):
    """Grey images keep one channel if no image has colours. Alpha blends with white, 16 bits become 8, palettes RGB."""
    for n in range(2):
        paint(tmp_path / "a" / f"{n}.png", 51 + n)
        paint(tmp_path / "b" / f"{n}.png", 1, mode="1")
    Image.fromarray(np.full((8, 8), 0x33FF, np.uint16)).save(tmp_path / "a" / "sixteen.png")
    found = read_images(str(tmp_path))
    assert found.pixels.shape == (5, 1, 8, 8)
    assert sorted(found.pixels[found.labels == 0, 0, 0, 0]) == [0x33, 51, 52]
    assert set(found.pixels[found.labels == 1].flat) == {255}
    paint(tmp_path / "a" / "clear.png", (200, 0, 0, 0), mode="RGBA")
    paint(tmp_path / "a" / "palette.gif", 7, mode="P")
    paint(tmp_path / "a" / "ink.jpg", (255, 0, 0, 0), mode="CMYK")
    found = read_images(str(tmp_path))
    assert found.pixels.shape == (8, 3, 8, 8)
    pixels = {tuple(pixel) for pixel in found.pixels[found.labels == 0, :, 4, 4].tolist()}
    assert {(255, 255, 255), (51, 51, 51), (0x33, 0x33, 0x33)} <= pixels
    assert not found.skipped
    task = Images(data=str(tmp_path), channels=1)
    grey = task.load(Recipe(task=task)).pictures
    assert grey.pixels.shape == (8, 1, 8, 8)
    luma = (found.pixels.astype(float) * np.array([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    assert np.abs(grey.pixels[:, 0] - luma).max() <= 1
    assert np.array_equal(grey.labels, found.labels)


TURNS = {  # by the orientation of EXIF
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].T,
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", TURNS)
def test_images_of_every_orientation_are_whole(tmp_path, orientation):
    exif, pixels = Image.Exif(), np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif[0x0112] = orientation
    for n, folder in enumerate("aabb"):
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.fromarray(pixels + 10 * n).save(tmp_path / folder / f"{n}.png", exif=exif)
    found = sorted(read_images(str(tmp_path)).pixels[:, 0].tolist(), key=np.min)
    assert found == [TURNS[orientation](pixels + 10 * n).tolist() for n in range(4)]


def test_sizes_that_differ_need_one_and_are_cut_around_their_middle(tmp_path):
    source = bars(tmp_path / "bars", 8)
    pixels = np.zeros((8, 24), np.uint8)
    pixels[:, 8:16] = 250
    Image.fromarray(pixels).save(tmp_path / "bars" / "lying" / "wide.png")
    with pytest.raises(
        ValueError,
        match=r"^height: expected a height and a width for images .* 8 x 8 in .* and 24 x 8 in .*wide.png; --height 8 --w",
    ):
        read_images(source)
    for height, width in ((8, 8), (16, 12)):
        found = read_images(source, height, width).pixels
        assert found.shape == (9, 1, height, width)
        assert any((image > 240).all() for image in found)


def test_what_is_no_image_is_left_out_and_counted(tmp_path):
    source = bars(tmp_path / "bars", 8)
    whole = (tmp_path / "bars" / "lying" / "1.png").read_bytes()
    (tmp_path / "bars" / "lying" / "broken.png").write_bytes(whole[:60])
    (tmp_path / "bars" / "lying" / "none.jpg").write_bytes(b"no image")
    (tmp_path / "bars" / "README.md").write_text("words")
    (tmp_path / "bars" / "table.csv").write_text("a,b\n1,2\n")
    found = read_images(source)
    assert len(found.pixels) == 8
    assert re.fullmatch(r"2 other files \(.*README.md\)", found.skipped[0])
    assert re.fullmatch(r"2 that do not decode \(.*broken.png\)", found.skipped[1])
    data = Images(data=source).load(Recipe(task=Images(data=source)))
    assert f"{found.skipped[0]} left out, {found.skipped[1]} left out" in data.summary
    (tmp_path / "bars" / "other").mkdir()
    (tmp_path / "bars" / "other" / "notes.txt").write_text("")
    again = read_images(source)
    assert (again.sha256, again.skipped[0][:13], again.skipped[1]) == (found.sha256, "3 other files", found.skipped[1])


def test_equal_images_are_in_one_split(tmp_path):
    for label in "ab":
        for n in range(40):
            paint(tmp_path / "set" / label / f"{n}.png", n // 4 + 100 * (label == "b"))
    found = read_images(str(tmp_path / "set"))
    values = {split: {int(found.pixels[row, 0, 0, 0]) for row in rows} for split, rows in found.splits.items()}
    assert not values["train"] & values["validation"]
    assert (len(values["train"]), len(values["validation"]), len(found.splits["validation"])) == (18, 2, 8)


def test_hidden_folders_and_files_that_pillow_only_writes(tmp_path):
    source = bars(tmp_path / "bars", 8)
    whole = (tmp_path / "bars" / "lying" / "1.png").read_bytes()
    for name in (".ipynb_checkpoints/1.png", "lying/.thumbnails/1.png", "paper.pdf"):
        (tmp_path / "bars" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bars" / name).write_bytes(whole)
    (tmp_path / "bars" / ".git").mkdir()
    found = read_images(source)
    assert (found.classes, len(found.pixels)) == (["lying", "standing"], 8)
    assert found.skipped[0].startswith("3 other files (")


def layout(tmp_path, *names):
    for n, name in enumerate(names):
        paint(tmp_path / "set" / name, n)
    return str(tmp_path / "set")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a/1.png", "a/2.png"), "expected images in a folder of their class, at least two of them, got .* in none"),
        (("train/a/1.png", "train/a/2.png", "val/a/1.png"), "expected at least 2 classes, a folder each, got a in"),
        (("a/1.png", "a/2.png", "b/1.png"), "expected at least 2 images of the class b, got 1 in"),
        (("a/1.png", "b/1.png", "1.png"), r"expected images in a folder of their class, .* got .*set/1.png in none"),
        (
            ("train/a/1.png", "train/b/1.png", "c/1.png"),
            "in a folder train, valid or test, or none, got .*c/1.png elsewhere",
        ),
        (("train/a/1.png", "train/b/1.png", "val/c/1.png"), "classes of train in every split, got c, which train lacks"),
        (("val/a/1.png", "val/b/1.png"), "expected a folder train next to validation, got none"),
        (("train/1.png", "train/b/1.png"), r"got .*train/1.png in none"),
    ],
)
def test_folders_that_make_no_classes_are_refused(tmp_path, names, message, monkeypatch):
    if "images of the class" not in message:
        monkeypatch.setattr(images, "_decode", None)  # they are refused before
    with pytest.raises(ValueError, match=f"^data: .*{message}"):
        read_images(layout(tmp_path, *names))


def test_folders_without_images_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^data: expected a folder or an archive of images, or hf:NAME, but .* does not exist; without"
    ):
        read_images(str(tmp_path / "absent"))
    source = bars(tmp_path / "bars", 8)
    (tmp_path / "bars" / "kneeling").mkdir()
    with pytest.raises(ValueError, match=r"^data: expected images in .*kneeling, got none; fill or remove it$"):
        read_images(source)
    (tmp_path / "bars" / "kneeling" / "1.png").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"^data: .* 2 images of the class kneeling, got 0 in .*; 1 more do not decode$"):
        read_images(source)
    source = layout(tmp_path, "train/a/1.png", "train/b/1.png", "val/a/1.png")
    (tmp_path / "set" / "val" / "a" / "1.png").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"^data: expected images of validation that decode, got none in"):
        read_images(source)
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"^data: expected folders of images, got none that Pillow reads in"):
        read_images(str(tmp_path / "words"))
    (tmp_path / "a.zip").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"^data: cannot read .*a\.zip"):
        read_images(str(tmp_path / "a.zip"))


def test_images_are_decoded_once_for_any_name_of_their_folder(tmp_path, monkeypatch):
    source = bars(tmp_path / "bars", 8)
    first = read_images(source)
    monkeypatch.setattr(images, "_decode", None)
    assert np.array_equal(read_images(source).pixels, first.pixels)
    (tmp_path / "bars").rename(tmp_path / "moved")
    again = read_images(str(tmp_path / "moved"))
    assert again.sha256 == first.sha256
    assert np.array_equal(again.pixels, first.pixels)
    paint(tmp_path / "moved" / "lying" / "1.png", 3)
    with pytest.raises(TypeError, match="NoneType"):  # another content is decoded anew
        read_images(str(tmp_path / "moved"))


def test_drawn_digits_are_those_of_their_seed_and_have_room():
    pixels, labels = draw_digits(3, 40, 20, 30)
    same, _ = draw_digits(3, 40, 20, 30)
    assert np.array_equal(pixels, same)
    assert not np.array_equal(pixels, draw_digits(4, 40, 20, 30)[0])
    assert pixels.shape == (40, 1, 20, 30)
    assert set(labels) == set(range(10))
    ink = pixels[:, 0] > 120
    assert (ink.sum((1, 2)) > 8).all()
    assert not ink[:, 0].any()
    middles = [np.argwhere(one).mean(0) for one in ink]
    assert np.std(middles, 0).min() > 1  # they lie anywhere
    assert [len(rows) for rows in digits(4, 4).splits.values()] == [8000, 1000, 1000]


def test_moving_flipping_and_margins_by_hand():
    pixels = np.arange(12, dtype=np.uint8).reshape(1, 1, 3, 4)
    still, no = np.zeros((1, 2), int), np.array([False])
    assert _moved(pixels, still, no, 0) is pixels
    assert _moved(pixels, np.array([[1, -2]]), no, 0)[0, 0].tolist() == [[2, 3, 3, 3], [2, 3, 3, 3], [6, 7, 7, 7]]
    assert np.array_equal(_moved(pixels, still, ~no, 0), pixels[..., ::-1])
    wide = _moved(pixels, still, no, 2)
    assert np.array_equal(wide[0, 0], np.pad(pixels[0, 0], 2, "edge"))


DEIT = {"augment": "scale-flip", "policy": "randaugment", "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "repeats": 3}


@pytest.mark.parametrize("changes", [{"augment": "crop-flip", "policy": "autoaugment"}, DEIT], ids=str)
def test_augmented_batches_are_functions_of_their_step_and_ranks_share_them(tmp_path, changes):
    recipe, data = ready(tmp_path, margin=2, **changes)
    again = pickle.loads(pickle.dumps(data))  # as processes that prepare batches have it
    for step in (1, 60):
        whole = data.batch(recipe, step)
        assert whole[0].shape == (4, 1, 12, 12)
        assert all(torch.equal(a, b) for a, b in zip(whole, again.batch(recipe, step), strict=True))
        assert not torch.equal(whole[0], data.batch(recipe, step + 1)[0])
        assert not torch.equal(whole[0], data.batch(recipe.edit(seed=1), step)[0])
        parts = [data.batch(recipe, step, rank, 2) for rank in range(2)]
        assert all(torch.equal(torch.cat(pair), one) for pair, one in zip(zip(*parts, strict=True), whole, strict=True))


CHANGES = {  # of training images, in the order in which they are made
    "augment": ("none", "crop", "crop-flip", "scale-flip"),
    "policy": ("none", "autoaugment", "randaugment"),
    "erasing": (0.0, 0.25, 1.0),
}


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("mixing", [{}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}], ids=str)
def test_every_combination_of_changes_is_one_after_the_other_for_each_image_by_itself(tmp_path, margin, mixing):
    """Each (seed, step, row) has one generator. The order is move, flip, crop, policy, edge, noise, then mixing of pairs."""
    pictures = read_images(bars(tmp_path / "bars", 12, 16))
    for changes in itertools.product(*CHANGES.values()):
        settings = dict(zip(CHANGES, changes, strict=True))
        task = Images(repeats=2, margin=margin, **settings, **mixing)
        recipe, data = Recipe(task=task, seed=5), ImageSamples(task, pictures)
        rows, expected = np.array([1, 7, 3, len(data.sizes["train"]) + 3]), []
        chosen = data.pictures.splits["train"][rows % len(data.sizes["train"])]
        for row, pixels in zip(rows.tolist(), data.pictures.pixels[chosen], strict=True):
            random = np.random.default_rng((5, 9, row))
            drawn, image = random.random(3), Image.fromarray(pixels[0])
            crops, flips = settings["augment"].startswith("crop"), settings["augment"].endswith("flip")
            moves = np.floor(drawn[:2] * 5).astype(int) - 2 if crops else np.zeros(2, int)
            image = augment.random_crop(image, random) if settings["augment"] == "scale-flip" else image
            image = augment.POLICIES.get(settings["policy"], lambda image, random: image)(image, random)
            one = _moved(np.asarray(image)[None, None], moves[None], np.array([flips and drawn[2] < 0.5]), margin)[0]
            if settings["erasing"] and random.random() < settings["erasing"]:
                one = augment.erase(one, random)
            expected.append(one)
        expected, answers = np.stack(expected), data.pictures.labels[chosen]
        if mixing:
            random, shares = np.random.default_rng((5, 9, 0, 1)), (mixing.get("mixup", 0.0), mixing.get("cutmix", 0.0))
            expected, answers = augment.mix(expected, answers, 2, *shares, random)
        pixels, found = data.tensors("train", rows, recipe, 9)
        assert np.array_equal(pixels, expected), settings
        assert np.array_equal(found, answers), settings


def test_pairs_are_whole_in_every_part_of_a_batch(tmp_path):
    recipe, _ = ready(tmp_path, mixup=0.5, batch=8)
    for parts in (
        {"accumulate": 8},
        {"devices": 8},
        {"nodes": 8},
        {"accumulate": 4, "devices": 2},
        {"devices": 2, "nodes": 4},
    ):
        with pytest.raises(ValueError, match=r"^batch: expected pairs to mix, .* devices \* nodes = 16, got 8$"):
            recipe.task.check(recipe.edit(**parts))
    for parts in ({"accumulate": 4}, {"devices": 4}, {"nodes": 4}, {"devices": 2, "nodes": 2}):
        recipe.task.check(recipe.edit(**parts))


def test_augmented_images_are_those_of_the_data_moved_or_flipped(tmp_path):
    recipe, data = ready(tmp_path, side=16, augment="crop-flip")
    rows, found = np.arange(8), set()
    plain, answers = data.tensors("train", rows, recipe)
    for step in range(1, 60):
        pixels, same = data.tensors("train", rows, recipe, step)
        assert torch.equal(answers, same)
        for before, after in zip(plain, pixels, strict=True):
            ways = [
                (down, right, flip)
                for down in range(-2, 3)
                for right in range(-2, 3)
                for flip in (False, True)
                if np.array_equal(_moved(before[None].numpy(), np.array([[down, right]]), np.array([flip]), 0)[0], after)
            ]
            assert ways
            found |= {*ways}
    assert len(found) == 50
    crops, _ = ready(tmp_path, side=16, augment="crop")[1].tensors("train", rows, recipe, 1)
    flipped = [not torch.equal(a, b) for a, b in zip(crops, data.tensors("train", rows, recipe, 1)[0], strict=True)]
    assert 0 < sum(flipped) < 8


def test_without_policy_and_erasing_the_random_numbers_are_those_of_moves_and_flips_alone(tmp_path):
    recipe, data = ready(tmp_path, side=16, augment="crop-flip")
    pixels, answers = data.batch(recipe, 5)
    random = np.random.default_rng((0, 0))
    rows = random.permutation(36).reshape(9, 4)[random.permutation(9)][5]
    chosen = data.pictures.splits["train"][rows]
    drawn = np.array([np.random.default_rng((0, 5, int(row))).random(3) for row in rows])
    moves = np.floor(drawn[:, :2] * 5).astype(int) - 2
    assert np.array_equal(pixels, _moved(data.pictures.pixels[chosen], moves, drawn[:, 2] < 0.5, 0))
    assert np.array_equal(answers, data.pictures.labels[chosen])


def test_repeated_images_are_changed_otherwise_each_time_and_each_epoch_has_a_share(tmp_path):
    recipe, data = ready(tmp_path, side=16, repeats=3, augment="crop")
    rows = np.stack([_epoch(data, 0, epoch, 4) for epoch in range(2)])
    assert rows.shape == (2, 9, 4)
    for epoch in rows:
        kept, times = np.unique(epoch % 36, return_counts=True)
        assert (len(kept), {*times}) == (12, {3})
        assert len(np.unique(epoch)) == 36
    assert {*rows[0].flat} != {*rows[1].flat}
    pixels, _ = data.tensors("train", np.arange(0, 108, 36) + 5, recipe, 1)
    assert not any(torch.equal(pixels[a], pixels[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    plain, _ = data.tensors("train", np.arange(0, 108, 36) + 5, recipe)
    assert all(torch.equal(plain[0], one) for one in plain)
    wide = _epoch(data, 0, 0, 12) % 36
    assert (wide[:, 1:] == wide[:, :-1]).mean() < 0.4  # 2 of 11 by chance, 2 of 3 where copies stay side by side
    every = ready(tmp_path, side=16)[1]
    assert np.array_equal(np.sort(_epoch(every, 0, 1, 4), None), np.arange(36))


def test_mixed_images_have_shares_of_classes_which_the_loss_asks_for(tmp_path):
    recipe, data = ready(tmp_path, mixup=0.8, smoothing=0.3)
    model = recipe.task.model(recipe)
    plain, _ = ready(tmp_path)[1].batch(recipe, 3)
    pixels, shares = data.batch(recipe, 3)
    assert not torch.equal(plain, pixels)
    assert shares.shape == (4, 2)
    close(shares.sum(-1), torch.ones(4))
    assert ((shares > 0.01) & (shares < 0.99)).any()
    log = model(pixels).log_softmax(-1)
    close(data.loss(model, pixels, shares), -(0.7 * (shares * log).sum(-1).mean() + 0.3 * log.mean()))
    held, answers = data.tensors("validation", np.arange(4), recipe)
    assert (held.dtype, answers.shape) == (torch.uint8, (4,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"erasing": 1.5}, "erasing: expected a number from 0 to 1, got 1.5"),
        ({"mixup": -0.5}, "mixup: expected a number from 0 to 1,000,000, got -0.5"),
        ({"cutmix": float("nan")}, "cutmix: expected a number from 0 to 1,000,000, got nan"),
        ({"repeats": 0}, "repeats: expected a number from 1 to 1,000,000, got 0"),
        ({"mixup": 0.5, "batch": 6, "accumulate": 2}, "batch: expected pairs to mix, a multiple of .* = 4, got 6"),
    ],
)
def test_changes_that_cannot_be_are_refused_before_any_image_is_read(wrong, message):
    recipe = Recipe(task=Images(data="absent")).edit(**wrong)
    with pytest.raises(ValueError, match=f"^{message}$"):
        recipe.check() or recipe.task.check(recipe)


def replaced(data, shift):
    """A copy of the data that shifts images by `shift` pixels for scores."""
    other = copy.copy(data)
    other.shift = shift
    return other


def test_scores_are_of_images_that_are_moved_as_asked(tmp_path):
    recipe, data = ready(tmp_path)
    model = recipe.task.model(recipe).double()
    pixels, answers = data.tensors("validation", np.arange(4), recipe)
    for shift in (0, 3):
        moves = shift * np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
        moved = torch.from_numpy(_moved(pixels.numpy(), moves, np.zeros(4, bool), 0))
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(model.eval()(moved), answers)
        scored = data.measure(model, recipe, View(own=(("shift", shift),))).figures
        close(torch.tensor(scored["nats"], dtype=torch.float64), expected)
        assert scored["images"] == 4
        for n in range(4):
            alone, _ = replaced(data, shift).tensors("validation", np.array([n]), recipe)
            assert torch.equal(alone[0], moved[n]), "by its number, not its place in a batch"
    assert data.measure(model, recipe, View(limit=2)).figures["images"] == 2
    assert data.measure(model, recipe, View(split="test")).reason.startswith("split: expected one of validation")


def test_the_loss_is_smoothed_as_asked(tmp_path):
    recipe, data = ready(tmp_path, smoothing=0.3)
    model = recipe.task.model(recipe)
    pixels, answers = data.batch(recipe, 1)
    log = model(pixels).log_softmax(-1)
    close(data.loss(model, pixels, answers), -(0.7 * log.gather(1, answers[:, None]).mean() + 0.3 * log.mean()))


@pytest.mark.parametrize("scheme", [LINE, GRID, "horn-clipped:axes=2", "permuteformer-2d", "none", "sinusoidal"])
def test_a_trained_size_is_scored_in_others(tmp_path, scheme):
    recipe, data = ready(tmp_path, scheme)
    model = recipe.task.model(recipe)
    own = (("height", 16), ("width", 12))
    assert data.measure(model, recipe, View(own=own)).figures["images"] == 4
    assert data.pictures.pixels.shape[2:] == (8, 8)
    reason = data.measure(model, recipe, View(own=(("height", 9),))).reason
    assert reason == "height: expected a multiple of the 2 pixels of a patch, got 9"


def test_schemes_with_so_many_positions_say_why_larger_images_have_no_figures(tmp_path):
    recipe, data = ready(tmp_path, "learned")
    model = recipe.task.model(recipe)
    assert model.scheme.max_length == 16
    view = View(own=(("height", 16),))
    assert data.measure(model, recipe, view).reason.startswith("height: expected at most 16 tokens, for which there are pos")


def test_what_does_not_fit_is_refused(tmp_path):
    recipe, data = ready(tmp_path)
    task = recipe.task
    assert (task.height, task.width, task.channels, task.classes) == (8, 8, 1, 2)

    def check(**edits):
        edited = recipe.edit(**edits)
        return edited.task.check(edited)

    for scheme in ("ape-tree", "ape-grid:axes=3", "ape-ring", "ape-product:parts=sequence+tree2"):
        with pytest.raises(
            ValueError, match=f"schemes: expected positions on a line or on a grid .* {re.escape(scheme)} takes"
        ):
            check(scheme=scheme)
    with pytest.raises(ValueError, match="outside: expected 0, since these models have no class tokens, got 1"):
        check(scheme="horn-clipped:axes=2,outside=1")
    with pytest.raises(ValueError, match=r"height: expected images of at most 9 tokens, .* learned:length=9 .* got 16"):
        check(scheme="learned:length=9")
    with pytest.raises(ValueError, match="width: expected both a width and a height, or neither, got 0"):
        check(width=0)
    with pytest.raises(ValueError, match="height: expected a multiple of the 3 pixels of a patch, got 8"):
        check(patch=3)
    with pytest.raises(ValueError, match=r"batch: expected at most the 36 images, got 37"):
        data.infer(recipe.edit(batch=37))
    for name in ("classes", "channels"):
        with pytest.raises(ValueError, match=f"{name}: expected 0, or the . of .*, got 7"):
            data.infer(recipe.edit(**{name: 7}))
    (note,) = check(scheme="permuteformer-2d", height=400, width=400)
    assert re.search(r"permutations repeat after \d+ positions, fewer than the 200 evaluated", note)


def test_a_short_training_finds_which_side_a_dot_is_on_by_its_place(tmp_path):
    """Without positions, patches of one pixel carry no information about the class."""
    random = np.random.default_rng(0)
    for n in range(200):
        pixels = random.integers(0, 40, (6, 6)).astype(np.uint8)
        pixels[random.integers(6), random.integers(3) + 3 * (n % 2)] = 250
        path = tmp_path / "dots" / ("right" if n % 2 else "left") / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    sizes, found = {"batch": 32, "layers": 1, "model_dim": 16, "heads": 2, "patch": 1}, {}
    for scheme in ("none", "sinusoidal"):
        recipe = Recipe(task=Images(data=str(tmp_path / "dots"), pooling="sequence")).edit(scheme=scheme, **sizes)
        data = recipe.task.load(recipe)
        recipe = data.infer(recipe)
        model = trained(recipe, data, 80, 1e-2)
        found[scheme] = data.measure(model, recipe, View()).figures["accuracy"]
    assert found["sinusoidal"] > 0.9
    assert found["none"] < 0.8
    shown = data.examples(model, recipe, 3)
    assert len(shown) == 3
    for n, one in enumerate(shown):
        image = Image.open(io.BytesIO(base64.b64decode(one["image"].removeprefix("data:image/png;base64,"))))
        assert np.array_equal(np.asarray(image), data.tensors("validation", np.array([n]), recipe)[0][0, 0])
        assert one["class"] in data.pictures.classes
        assert re.fullmatch(r"\d+%", one["with probability"])


@pytest.mark.parametrize(
    ("name", "height", "channels", "classes"), [("mnist_png", 28, 1, 10), ("tiny_imagenet30", 64, 3, 30)]
)
@pytest.mark.slow
def test_published_images(name, height, channels, classes):
    if not (SHARED / name).exists():
        pytest.skip("the published images are not beside this project")
    found = read_images(str(SHARED / name))
    assert found.pixels.shape[1:] == (channels, height, height)
    assert len(found.classes) == classes
    assert not any("decode" in one for one in found.skipped)


SMALL = ["--steps=12", "--batch=8", "--layers=1", "--model-dim=16", "--heads=2", "--patch=2", "--device=cpu"]


def test_how_much_larger_images_are_than_in_training():
    task = Images(height=8, width=16, patch=2, margin=2)
    assert task.extent(View(), 2) == (1.0, 10)
    assert task.extent(View(own=(("height", 20), ("width", 4))), 2) == (2.0, 10)
    assert task.extent(View(own=(("height", 20),)), 1) == (2.0, 60)
    assert task.extent(View(own=(("height", 2),)), 1) == (1.0, 60)


def test_a_comparison_shows_images_and_a_run_is_scored_in_another_size(isopos, tmp_path):
    source = bars(tmp_path / "bars")
    schemes = "rope,ape-grid"
    status, out, err = isopos("compare", "--task=images", f"--data={source}", f"--schemes={schemes}", "--name=c", *SMALL)
    assert (status, err) == (0, "")
    found = re.findall(r"^│ ([\w-]+) .*?(\d+\.\d)%", out, re.MULTILINE)
    assert sorted(name for name, _ in found) == sorted(schemes.split(","))
    assert "36 + 4 + 0 images of 8 x 8 pixels, grey, 2 classes" in out
    text = (tmp_path / "runs" / "c" / "report.html").read_text()
    assert text.count('<img src="data:image/png;base64,') == 4
    assert "A classifier of images of 8 x 8 pixels, a token for each 2 x 2 (patches), with mean pooling." in text
    run = "runs/c/ape-grid-seed0"
    status, out, _ = isopos("eval", run, "--view", "height=12", "width=16", "shift=1")
    assert status == 0
    assert ", height 12, width 16, shift 1\n" in out
    saved = json.loads((tmp_path / run / "eval.json").read_text())
    assert saved[0]["own"] == [["height", 12], ["width", 16], ["shift", 1]]
    assert saved[0]["figures"]["1"]["images"] == 4
    status, out, err = isopos("eval", run, "--view", "height=12", "width=16", "--extend=linear")
    assert (status, err) == (0, "")
    assert ", height 12, width 16, extended by linear\n" in out
    for wrong, message in (
        ("shift", "view: expected NAME=NUMBER, got 'shift'"),
        ("shift=-1", "view: expected NAME=NUMBER, got '-1' at character 7 of 'shift=-1'"),
        (
            "shft=2",
            "shft: expected none, which samples of this task do not have; it takes split, limit, height, width, shift",
        ),
        ("height=0", "height: expected pixels, got 0"),
        ("height=7", "height: expected a multiple of the 2 pixels of a patch, got 7"),
    ):
        status, _, err = isopos("eval", run, "--view", wrong)
        assert (status, message in err) == (2, True), err
