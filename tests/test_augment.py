"""Test image augmentation: each operation by its formula, ranges of amounts, erasing, rescaled crops, and mixing."""

import math
from collections import defaultdict

import numpy as np
import pytest
from PIL import Image

from isopos.lab.data import augment
from isopos.lab.data.augment import CIFAR10, OPERATIONS, POLICIES, erase, mix, random_crop

RANDOM = np.random.default_rng(0).integers(20, 200, (6, 7, 3)).astype(np.uint8)
RAMP = np.fromfunction(lambda y, x: 20 + 4 * y + 6 * x, (16, 20))


def done(name, pixels, amount):
    return np.asarray(OPERATIONS[name](Image.fromarray(pixels.astype(np.uint8)), amount)).astype(int)


def near(found, expected):
    """Within the rounding of bytes."""
    assert np.abs(found - np.clip(expected, 0, 255)).max() <= 1


@pytest.mark.parametrize("pixels", [RANDOM, RANDOM[..., 0]], ids=["colours", "grey"])
def test_operations_of_values_by_their_formulas(pixels):
    x = pixels.astype(int)
    assert np.array_equal(done("invert", pixels, 0), 255 - x)
    assert np.array_equal(done("solarize", pixels, 100), np.where(x < 100, x, 255 - x))
    assert np.array_equal(done("solarize-add", pixels, 110), np.where(x < 128, np.minimum(x + 110, 255), x))
    assert np.array_equal(done("posterize", pixels, 3), x // 32 * 32)
    assert not done("posterize", pixels, 0).any()
    grey = x if x.ndim == 2 else np.round(x @ (0.299, 0.587, 0.114))[..., None]
    for amount in (-0.9, -0.3, 0.5, 0.9):
        near(done("brightness", pixels, amount), (1 + amount) * x)
        near(done("contrast", pixels, amount), (1 + amount) * x - amount * round(np.mean(grey)))
        near(done("color", pixels, amount), (1 + amount) * x - amount * grey)
    low, high = x.min((0, 1)), x.max((0, 1))
    near(done("autocontrast", pixels, 0), (x - low) * 255 / (high - low))


def test_equalized_values_are_their_share_among_all():
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64)) // 2 + 30
    counts = np.bincount(pixels.ravel(), minlength=256)
    step = (pixels.size - counts[counts.nonzero()[0][-1]]) // 255
    below = np.cumsum(counts) - counts
    assert np.array_equal(done("equalize", pixels, 0), ((below + step // 2) // step)[pixels].clip(max=255))


def test_sharpness_is_the_distance_from_a_mean_of_neighbours():
    x = RANDOM[..., 0].astype(int)
    smooth = x.astype(float)
    for y in range(1, 5):
        for at in range(1, 6):
            smooth[y, at] = (x[y - 1 : y + 2, at - 1 : at + 2].sum() + 4 * x[y, at]) / 13
    for amount in (-0.9, 0.6):
        near(done("sharpness", x, amount), np.round(smooth) + (1 + amount) * (x - np.round(smooth)))


def sources(name, amount):
    """Rows and columns from which an operation takes each pixel, counted from the middle of the first."""
    y, x = np.mgrid[:16, :20] + 0.5
    if name == "rotate":
        turn = math.radians(amount)
        down, right = y - 8, x - 10
        y, x = 8 + math.cos(turn) * down + math.sin(turn) * right, 10 + math.cos(turn) * right - math.sin(turn) * down
    elif name.endswith("x"):
        x = x + amount * (y if name == "shear-x" else 20)
    else:
        y = y + amount * (x if name == "shear-y" else 16)
    return y - 0.5, x - 0.5


@pytest.mark.parametrize("name", ["shear-x", "shear-y", "translate-x", "translate-y", "rotate"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_operations_of_places_take_pixels_from_where_they_should(name, sign):
    amount = sign * (25 if name == "rotate" else 0.3)
    found, (y, x) = done(name, RAMP, amount), sources(name, amount)
    inside = (y > 1) & (y < 14) & (x > 1) & (x < 18)
    outside = (y < -1) | (y > 16) | (x < -1) | (x > 20)
    assert inside.sum() > 60
    assert outside.any()
    assert np.abs(found - (20 + 4 * y + 6 * x))[inside].max() < 2  # the next pixel is 4 or 6 away
    assert (found[outside] == 128).all()


def amounts(monkeypatch, policy, draws):
    """What each operation was called with, by its name."""
    found, image = defaultdict(list), Image.fromarray(RANDOM)
    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, lambda image, amount, name=name: found[name].append(amount) or image)
    random = np.random.default_rng(0)
    for _ in range(draws):
        assert POLICIES[policy](image, random) is image
    return found


def test_amounts_of_autoaugment_are_those_of_its_levels(monkeypatch):
    assert len(CIFAR10) == 25
    found, steps = amounts(monkeypatch, "autoaugment", 4000), defaultdict(set)
    for row in CIFAR10:
        for name, probability, level in (row[:3], row[3:]):
            assert 0 <= probability <= 1
            if probability:
                steps[name].add(level / 9)
    most = {"shear-y": 0.3, "translate-x": 150 / 331, "translate-y": 150 / 331, "rotate": 30}
    for name, shares in steps.items():
        if name in ("autocontrast", "equalize", "invert"):
            expected = {0}
        elif name == "posterize":
            expected = {5}  # of level 7: 8 - 4 * 7 / 9 bits
        elif name == "solarize":
            expected = {math.ceil(256 * (1 - share)) for share in shares}
        else:
            expected = {sign * most.get(name, 0.9) * share for share in shares for sign in (-1, 1)}
        assert {round(value, 9) for value in found[name]} == {round(value, 9) for value in expected}
    assert found.keys() == steps.keys()
    wanted = sum(row[1] + row[4] for row in CIFAR10) / 25
    assert abs(sum(map(len, found.values())) / 4000 - wanted) < 0.05


def test_amounts_of_randaugment_are_in_their_ranges(monkeypatch):
    found = amounts(monkeypatch, "randaugment", 6000)
    assert found.keys() == OPERATIONS.keys()
    assert abs(sum(map(len, found.values())) / 6000 - 1) < 0.05  # two operations, half of the time each
    most = {"shear-x": 0.3, "shear-y": 0.3, "translate-x": 0.45, "translate-y": 0.45, "rotate": 30}
    for name, values in found.items():
        low, high = min(values), max(values)
        if name in ("autocontrast", "equalize", "invert"):
            assert low == high == 0
        elif name in ("posterize", "solarize", "solarize-add"):
            least, largest = {"posterize": (0, 2), "solarize": (0, 90), "solarize-add": (70, 110)}[name]
            assert least <= low < high <= largest
        else:
            whole = most.get(name, 0.9)
            assert -whole <= low < -0.8 * whole
            assert 0.8 * whole < high <= whole
            assert abs(np.abs(values).mean() / whole - 0.9) < 0.02


@pytest.mark.parametrize("change", [*POLICIES.values(), random_crop])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_changes_are_functions_of_random_numbers_and_keep_size_and_mode(change, mode):
    image = Image.fromarray(RANDOM).convert(mode)
    different = set()
    for seed in range(40):
        one, same = (change(image, np.random.default_rng(seed)) for _ in range(2))
        assert (one.size, one.mode) == (image.size, mode)
        assert one.tobytes() == same.tobytes()
        different.add(one.tobytes())
    assert len(different) > 10


def test_scaled_parts_are_planes_of_a_plane_within_its_range():
    image, random, steps = Image.fromarray(RAMP.astype(np.uint8)), np.random.default_rng(0), []
    for _ in range(50):
        pixels = np.asarray(random_crop(image, random)).astype(float)
        assert RAMP.min() - 1 <= pixels.min() < pixels.max() <= RAMP.max() + 1
        inner = pixels[4:-4, 4:-4]
        steps.append((np.diff(inner, axis=0).mean() / 4, np.diff(inner, axis=1).mean() / 6))  # share of height, of width
    area, ratio = np.prod(steps, 1), np.array([20 * width / (16 * height) for height, width in steps])
    assert 0.05 < area.min() < 0.3
    assert 0.7 < area.max() < 1.05
    assert 0.65 < ratio.min() < ratio.max() < 1.5


def test_erased_pixels_are_a_rectangle_of_noise():
    pixels, random = np.zeros((3, 24, 20), np.uint8), np.random.default_rng(0)
    noise, shares = [], []
    for _ in range(200):
        found = erase(pixels, random)
        assert not pixels.any()
        place = np.argwhere(found.any(0))
        (top, left), (bottom, right) = place.min(0), place.max(0) + 1
        shares.append((bottom - top) * (right - left) / 480)
        noise.append(found[:, top:bottom, left:right].ravel())
    assert 0.01 < min(shares) < 0.06
    assert 0.28 < max(shares) < 0.36
    values = np.concatenate(noise).astype(float)
    assert abs(values.mean() - 128) < 1
    assert abs(values.std() - 58) < 2
    assert erase(np.zeros((1, 1, 1), np.uint8), np.random.default_rng(0)).shape == (1, 1, 1)


def test_mixup_is_a_weighted_sum_of_pairs():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 5, 6)).astype(np.uint8)
    found, targets = mix(pixels, np.array([0, 1, 2, 2]), 3, 0.8, 0.0, np.random.default_rng(3))
    share = np.random.default_rng(3).beta(0.8, 0.8)
    other = pixels[[1, 0, 3, 2]]
    assert found.dtype == np.uint8
    assert np.array_equal(found, np.round(share * pixels + (1 - share) * other))
    expected = [[share, 1 - share, 0], [1 - share, share, 0], [0, 0, 1], [0, 0, 1]]
    assert np.allclose(targets, expected, atol=1e-6)


def test_cutmix_puts_a_rectangle_of_the_other_in():
    pixels, shares = np.stack([np.full((1, 12, 10), n, np.uint8) for n in range(4)]), []
    for seed in range(60):
        found, targets = mix(pixels, np.arange(4), 4, 0.0, 1.0, np.random.default_rng(seed))
        for n, other in enumerate((1, 0, 3, 2)):
            assert {*found[n].flat} <= {n, other}
            kept = (found[n] == n).mean()
            assert np.allclose(targets[n], [kept * (k == n) + (1 - kept) * (k == other) for k in range(4)], atol=1e-6)
        place = np.argwhere(found[0, 0] == 1)
        if len(place):
            assert np.prod(place.max(0) - place.min(0) + 1) == len(place)
        shares.append(kept)
    assert min(shares) < 0.4
    assert max(shares) == 1
    assert pixels[0].max() == 0


@pytest.mark.parametrize(("height", "width"), [(24, 8), (8, 24)])
def test_rectangles_are_anywhere_in_images_that_are_not_square(height, width):
    """Rectangles of erasing and CutMix reach every edge, and cover the stated area on average."""
    random, reached, shares = np.random.default_rng(0), {"erase": [], "mix": []}, {"erase": [], "mix": []}
    for _ in range(300):
        erased = erase(np.zeros((1, height, width), np.uint8), random)[0] > 0
        pixels = np.stack([np.full((1, height, width), n, np.uint8) for n in (0, 1)])
        mixed = mix(pixels, np.arange(2), 2, 0.0, 3.0, random)[0][0, 0] > 0
        for name, place in (("erase", erased), ("mix", mixed)):
            y, x = place.any(1).nonzero()[0], place.any(0).nonzero()[0]
            if len(y):
                reached[name].append((y[0], height - 1 - y[-1], x[0], width - 1 - x[-1]))
                shares[name].append(place.mean())
    for name, sides in reached.items():
        assert np.min(sides, 0).tolist() == [0] * 4, name
        assert (np.median(sides, 0)[:2] > height / 10).all(), name
    assert abs(np.mean(shares["erase"]) - (0.02 + 1 / 3) / 2) < 0.03
    assert 0.2 < np.mean(shares["mix"]) < 0.4  # of half the area; rectangles that reach beyond an edge are cut there


def test_both_kinds_of_mixing_take_turns_at_random_and_an_odd_one_out_stays():
    pixels = np.stack([np.full((1, 8, 8), n, np.uint8) for n in (0, 100, 200)])
    cut = 0
    for seed in range(200):
        found, targets = mix(pixels, np.arange(3), 3, 0.8, 1.0, np.random.default_rng(seed))
        cut += {*found[0].flat} <= {0, 100}
        assert np.array_equal(found[2], pixels[2])
        assert np.allclose(targets.sum(1), 1, atol=1e-6)
        assert targets[2].tolist() == [0, 0, 1]
    assert 80 < cut < 125  # half of them, and sums that round to one of both


def test_empty_places_are_grey():
    image = Image.new("RGB", (8, 8))
    assert {*np.asarray(augment.OPERATIONS["translate-x"](image, 0.5))[:, 5:].flat} == {128}
