"""Labelled images of folders, archives or the hub, decoded once into a cache; and synthetic digits.

The class of an image is its folder: the first one below train, valid or test, if there are such folders.
"""

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import PIL
from PIL import Image, ImageOps
from rich.console import Console

from isopos.lab.data import cache
from isopos.lab.data.arrays import Writer, hash_of
from isopos.lab.data.digits import draw_digits
from isopos.lab.data.prepare import SPLITS, OnProgress, Preparation, folder_classes, folders_of, progress_bars
from isopos.lab.data.sources import Source, find_source, hub_images

CACHE_VERSION = 4
SIDE, COUNTS = 28, (8000, 1000, 1000)  # default size of synthetic digits in pixels; their numbers in each split
GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")  # modes without colours
TRANSPOSED = (5, 6, 7, 8)  # orientations of EXIF that exchange height and width
AHEAD = 16  # decoded images per thread that may wait to be written


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Labelled images of one size; each split is ordered by a hash of the files."""

    name: str
    sha256: str  # a fingerprint of files and names, or of the pixels
    pixels: np.ndarray  # ``[n c h w]`` uint8
    labels: np.ndarray  # numbers of classes ``[n]``
    splits: Mapping[str, np.ndarray]  # rows of train, validation and test; test may be empty
    classes: Sequence[str]  # names of the classes
    skipped: Sequence[str] = ()  # descriptions of the files that were skipped


@lru_cache(maxsize=2)
def digits(height: int = 0, width: int = 0) -> ImageDataset:
    """Synthetic digits: 8000 for training, 1000 for validation and 1000 for test, by default of 28 x 28 pixels.

    Examples:
        >>> digits(6, 4).pixels.shape
        (10000, 1, 6, 4)
    """
    if min(height, width) < 0:
        raise ValueError(f"height: expected pixels, or 0 for {SIDE}, got {height} x {width}")
    pixels, labels = draw_digits(0, sum(COUNTS), height or SIDE, width or SIDE)
    splits = dict(zip(SPLITS, np.split(np.arange(len(labels)), np.cumsum(COUNTS)[:-1]), strict=True))
    sha256 = hashlib.sha256(pixels.tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    return ImageDataset("drawn digits", sha256, pixels, labels, splits, [str(n) for n in range(10)])


def read_images(
    source: str,
    height: int = 0,
    width: int = 0,
    *,
    grey: bool = False,
    console: Console | None = None,
) -> ImageDataset:
    """The images of a folder, an archive or a dataset, decoded into the cache once, then memory-mapped.

    Folders named train, valid (val, validation, dev) and test make the splits; without valid, a tenth of each class of train
    is held out, by a hash of the files, so that equal files are in one split. The orientation of EXIF is applied, 16 bits
    become 8, and transparent pixels become white. Images of another size are scaled to cover the wanted one and cropped
    around the centre. Images that cannot be decoded, hidden and other files are skipped, see `ImageDataset.skipped`.

    Args:
        source: A path, or hf:NAME[:CONFIG] of the hub.
        height, width: In pixels; 0: the size of the images, if all have the same.
        grey: Convert images to grey.

    Raises:
        ValueError: If there is nothing to read, sizes differ, a class has no image, or there are fewer than two classes.
    """
    hub = source.startswith("hf:")
    if min(height, width) < 0:
        raise ValueError(f"height: expected pixels, or 0 as found, got {height} x {width}")
    if not hub and not Path(source).exists():
        raise ValueError(
            f"data: expected a folder or an archive of images, or hf:NAME, but {source} does not exist; without --data the "
            "task draws its own"
        )
    files = (hub_images if hub else find_source)(source)
    _check_folders(files)
    with progress_bars(console, "images") as progressing:
        root, stamp = cache.default_root(), files.stamp()
        index = f"index-images-{hash_of(CACHE_VERSION, source, [path for path, _, _ in stamp])[:32]}"
        read = partial(_survey, files, progressing)
        survey = cache.cached_value(root, index, stamp, dict[str, Any], read) if stamp else read()
        if not (height and width):
            if survey["differs"]:
                raise ValueError(
                    f"height: expected a height and a width for images that differ in size, {survey['differs']}; --height "
                    f"{survey['height']} --width {survey['width']} brings all to the size of the first"
                )
            height, width = survey["height"], survey["width"]
        shape = (1 if grey else survey["channels"], height, width)
        preparation = Preparation((files,), root, progressing, [stamp], survey["sha256"])
        made_by = CACHE_VERSION, PIL.__version__, shape
        arrays = preparation.arrays("images", lambda writer: _fill(writer, files, shape, progressing), *made_by)
    order, labels, split_number = arrays["rows"].T
    splits = {split: order[split_number == n] for n, split in enumerate(SPLITS)}
    by_row = np.empty(len(order), np.int64)
    by_row[order] = labels
    skipped = [*survey["left"], *arrays.facts["left"]]
    return ImageDataset(source, survey["sha256"], arrays["pixels"], by_row, splits, arrays.facts["classes"], skipped)


def _images(source: Source, other: list[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of files with the suffix of an image; the names of other files are appended to a list."""
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for name, blocks in source.documents():
        parts = *folders_of(source.name, name), PurePath(name).name
        if PurePath(name).suffix.lower() in known and not any(part.startswith(".") for part in parts):
            yield name, b"".join(blocks)
        else:
            other.append(name)


def _survey(source: Source, progressing: OnProgress) -> dict[str, Any]:
    """What is known before images are decoded: a hash, channels, size of the first, one of another size, other files."""
    digest, first, differs, channels, names, other = hashlib.sha256(), None, "", 1, [], []
    for name, content in _images(source, other):
        names.append(name)
        digest.update(
            "/".join((*folders_of(source.name, name), PurePath(name).name)).encode() + hashlib.sha256(content).digest()
        )
        progressing("reading", len(names), 0)
        try:
            with Image.open(io.BytesIO(content)) as image:
                size, grey = image.size, image.mode in GREY
                transposed = image.getexif().get(0x0112) in TRANSPOSED
                kind = _unscaled(image)
        except Exception:  # Pillow raises many types for damaged files; they are counted when decoded
            continue
        if kind:
            raise ValueError(
                f"data: expected pixels of 8 or 16 bits, got {kind} in {name}, whose range is not known; save it with 8 bits"
            )
        size, channels = (size[1], size[0]) if transposed else size, channels if grey else 3
        first = first or (name, size)
        if size != first[1] and not differs:
            differs = f"{_by(first[1])} in {first[0]} and {_by(size)} in {name}"
    if first is None:
        raise ValueError(f"data: expected folders of images, got none that Pillow reads in {source.name}")
    _classes(source.name, _splits_and_classes(source.name, names))  # before anything is decoded
    width, height = first[1]
    left = [f"{len(other)} other files ({other[0]})"] if other else []
    sizes = {"channels": channels, "height": height, "width": width, "differs": differs}  # 1 channel if all are grey
    return {"sha256": digest.hexdigest(), **sizes, "left": left}


def _unscaled(image: Image.Image) -> str:
    """The kind of pixels whose value of white is unknown; empty for others.

    In some versions of Pillow, 16-bit PNG and PPM files have mode I, too.
    """
    if image.mode == "F":
        return "floating-point numbers"
    return "numbers of 32 bits" if image.mode == "I" and image.format not in ("PNG", "PPM") else ""


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _fill(writer: Writer, source: Source, shape: tuple[int, int, int], progressing: OnProgress) -> dict[str, Any]:
    """Decode every image, and write pixels, classes and splits."""
    names, digests, broken, waiting = [], [], [], deque()
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:

        def take() -> None:
            name, digest, decoded = waiting.popleft()
            pixels = decoded.result()
            if pixels is None:
                broken.append(name)
            else:
                names.append(name)
                digests.append(digest)
                writer.add("pixels", pixels[None])
            progressing("decoding", len(names) + len(broken), 0)

        for name, content in _images(source, []):
            waiting.append((name, hashlib.sha256(content).digest(), pool.submit(_decode, content, shape)))
            if len(waiting) > AHEAD * workers:
                take()
        while waiting:
            take()
    rows, classes = _arranged(source.name, names, digests, broken)
    writer.add("rows", rows)
    return {"classes": classes, "left": [f"{len(broken)} that do not decode ({broken[0]})"] if broken else []}


def _decode(content: bytes, shape: tuple[int, int, int]) -> np.ndarray | None:
    """The pixels ``[c h w]`` of an image file; None if it is broken."""
    channels, height, width = shape
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
                image = Image.fromarray((np.asarray(image, np.int64).clip(0, 65535) >> 8).astype(np.uint8))
            if image.has_transparency_data:
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            image = image.convert("L" if channels == 1 else "RGB")
            if image.size != (width, height):
                image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    except MemoryError:  # which says nothing about the file
        raise
    except Exception:  # as above
        return None
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def _arranged(
    source: str, names: Sequence[str], digests: Sequence[bytes], broken: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Rows of images in the order of a hash, with class and number of the split ``[n 3]``; and the names of the classes."""
    labelled = _splits_and_classes(source, [*names, *broken])
    classes = _classes(source, labelled)
    kept, by_name = labelled[: len(names)], any(split == "validation" for split, _ in labelled)
    rows = np.array([(classes.index(label), SPLITS.index(split or "train")) for split, label in kept]).reshape(-1, 2)
    order = np.array(sorted(range(len(names)), key=lambda n: digests[n]), dtype=np.int64)
    for n, label in enumerate(classes):
        members = order[(rows[order] == (n, 0)).all(1)]
        least = 1 if by_name else 2
        if len(members) < least:
            gone = sum(one == label for _, one in labelled[len(names) :])
            what = f"; {gone} more do not decode" if gone else ""
            raise ValueError(
                f"data: expected at least {least} images of the class {label}, got {len(members)} in {source}{what}"
            )
        if not by_name:
            count = max(1, len(members) // 10)
            equal = sum(digests[member] == digests[members[count - 1]] for member in members[count:])
            rows[members[: count + equal if count + equal < len(members) else count], 1] = SPLITS.index("validation")
    if not (rows[:, 1] == SPLITS.index("validation")).any():
        raise ValueError(f"data: expected images of validation that decode, got none in {source}")
    return np.stack((order, *rows[order].T), 1), classes


def _splits_and_classes(source: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """Split (or "") and class of each image, by its folders."""
    labelled = folder_classes(source, names)
    named = any(split for split, _ in labelled)
    for name, (split, label) in zip(names, labelled, strict=True):
        if named and not split:
            raise ValueError(f"data: expected every image in a folder train, valid or test, or none, got {name} elsewhere")
        if not label:
            raise ValueError(f"data: expected images in a folder of their class, at least two of them, got {name} in none")
    return labelled


def _classes(source: str, labelled: Sequence[tuple[str, str]]) -> list[str]:
    """The names of the classes in the train split."""
    classes = sorted({label for split, label in labelled if split in ("", "train")})
    if len(classes) < 2:
        raise ValueError(f"data: expected at least 2 classes, a folder each, got {', '.join(classes) or 'none'} in {source}")
    if strange := sorted({label for _, label in labelled} - {*classes}):
        raise ValueError(f"data: expected classes of train in every split, got {strange[0]}, which train lacks, in {source}")
    return classes


def _check_folders(source: Source) -> None:
    """Raise a ValueError if a sibling of class folders has no files."""
    root = Path(source.name)
    if not root.is_dir():
        return
    parents = {parent for file in source.files for parent in file.parents}
    for parent in {file.parent.parent for file in source.files if file.parent != root}:
        for folder in sorted(parent.iterdir()):
            if folder.is_dir() and folder not in parents and not folder.name.startswith("."):
                raise ValueError(f"data: expected images in {folder}, got none; fill or remove it")
