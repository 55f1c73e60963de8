"""Test the files of graphs, trees, images and texts that docs/results was computed from."""

import gzip
import io
import json
import struct
import tarfile

import numpy as np
import pytest

from isopos.lab.data.images import read_images
from isopos.lab.data.texts import load_texts
from tools import public_data

COUNTIES = [{"arcs": [[0, 1]]}, {"arcs": [[3]]}, {"arcs": [[[2, ~1]]]}]  # the first and the third share arc 1
NOUNS = """  1 the licence
00000010 03 n 01 entity 0 001 ~ 00000020 n 0000 |
00000020 03 n 02 thing 0 object 0 003 @ 00000010 n 0000 + 00000099 v 0101 @i 00000030 n 0000 | with @ and n
00000030 03 n 01 class 0 000 |
"""


@pytest.mark.parametrize(
    ("kind", "text", "name", "edges"),
    [
        ("counties", json.dumps({"objects": {"counties": {"geometries": COUNTIES}}}), "us-counties.txt", "0 2\n"),
        ("wordnet", NOUNS, "wordnet-nouns.txt", "0 1\n0 2\n"),
    ],
)
def test_edges_are_those_of_the_source(tmp_path, kind, text, name, edges):
    (tmp_path / "source").write_text(text)
    public_data.main(kind, str(tmp_path / "source"), str(tmp_path / "new"))
    assert (tmp_path / "new" / name).read_text() == edges


@pytest.mark.parametrize(
    ("kind", "text", "tree", "image"),
    [
        ("sst", "(3 (2 A) (4 (2 (3 b) (1 c.)) (2 d)))\n(2 (2 e) (2 f))\n", "(3 2 (4 (2 3 1) 2))", "(3 (4 2 (2 1 3)) 2)"),
        (
            "listops",
            "7\t( ( ( [MAX 7 ) ( ( ( ( [MIN 2 ) ( ( ( [MAX 1 ) 3 ) ] ) ) 4 ) ] ) ) ] )\n5\t( ( [MAX 5 ) ] )\n",
            "(MAX 7 (MIN 2 (MAX 1 3) 4))",
            "(MAX (MIN 4 (MAX 3 1) 2) 7)",
        ),
    ],
)
def test_trees_are_those_of_the_source_and_their_images(tmp_path, kind, text, tree, image):
    with gzip.open(tmp_path / "source.gz", "wt") as file:
        file.write(text)
    public_data.main(kind, str(tmp_path / "source.gz"), str(tmp_path))
    assert (tmp_path / f"{kind}-copy.tsv").read_text() == f"{tree}\t{tree}\n"
    assert (tmp_path / f"{kind}-mirror.tsv").read_text() == f"{tree}\t{image}\n"


def test_fashion_mnist_keeps_pixels_classes_and_splits(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(60, 28, 28), dtype=np.uint8)
    labels = np.arange(60, dtype=np.uint8) % 10
    for name, chosen in (("train", slice(40)), ("t10k", slice(40, 60))):
        images, classes = pixels[chosen], labels[chosen]
        header = struct.pack(">4i", 0x803, len(images), 28, 28)
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = struct.pack(">2i", 0x801, len(images))
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + classes.tobytes()))
    public_data.main("fashion", str(tmp_path), str(tmp_path / "new"))
    loaded = read_images(str(tmp_path / "new" / "fashion-mnist.zip"))
    assert list(loaded.classes) == [str(n) for n in range(10)]
    assert (len(loaded.splits["test"]), sum(map(len, loaded.splits.values()))) == (20, 60)
    of_test = {(loaded.pixels[row].tobytes(), int(loaded.labels[row])) for row in loaded.splits["test"]}
    assert of_test == {(image.tobytes(), label) for image, label in zip(pixels[40:], labels[40:].tolist(), strict=True)}
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError):
        public_data.main("fashion", str(tmp_path), str(tmp_path / "none"))
    assert not list((tmp_path / "none").iterdir())


PACKAGES = """Package: b-game
Source: game (1.0)
Section: games

Package: a-game
Source: game
Section: games

Package: c
Section: python

Package: d
Section: math

Package: e
Section: net

Package: e
Description-en: A client
 Its first line
 continues.
 .
   * an item

Package: a-game
Description-en: A game
 With data.

Package: b-game
Description-en: A game
 With a program.

Package: c
Description-en: A module
 For Python.

Package: d
Description-en: A title alone
"""


def test_descriptions_of_packages_are_one_of_each_source_with_its_section(tmp_path):
    (tmp_path / "lists").write_text(PACKAGES)
    public_data.main("packages", str(tmp_path / "lists"), str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "debian-packages.jsonl").read_text().splitlines()]
    assert rows == [
        {"text": "A game\nWith data.", "label": "games"},
        {"text": "A client\nIts first line\ncontinues.\n\n  * an item", "label": "net"},
    ]


def test_the_last_novel_of_each_author_is_test(tmp_path):
    words = {
        name: [f"{name}{n}" for n in range(250 * passages + 249)]
        for name, passages in (
            ("Eliot_Adam", 40),
            ("Eliot_Felix", 2),
            ("Hardy_Jude", 40),
            ("Hardy_Madding", 1),
            ("Hardy_Tess", 3),
        )
    }
    with tarfile.open(tmp_path / "novels.tar.xz", "w:xz") as archive:
        for name in reversed(words):
            member, text = tarfile.TarInfo(f"{name}.txt"), "\ufeff" + "\r\n".join(words[name])
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    public_data.main("authors", str(tmp_path / "novels.tar.xz"), str(tmp_path))
    read = {
        split: [json.loads(line) for line in (tmp_path / "novel-authors" / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    expected = {
        "train": [("Eliot", "Eliot_Adam", 40), ("Hardy", "Hardy_Jude", 40), ("Hardy", "Hardy_Madding", 1)],
        "test": [("Eliot", "Eliot_Felix", 2), ("Hardy", "Hardy_Tess", 3)],
    }
    for split, novels in expected.items():
        assert [(row["label"], row["text"].split()) for row in read[split]] == [
            (author, words[name][250 * n : 250 * (n + 1)]) for author, name, passages in novels for n in range(passages)
        ]
    texts = load_texts(str(tmp_path / "novel-authors"))
    assert texts.classes == ("Eliot", "Hardy")
    assert len(texts.labels("test")) == 5


def test_wrong_arguments_write_nothing(tmp_path):
    for arguments, message in (
        (("trees", "a", "b"), "kind: expected series, .* got trees"),
        (("sst", "a"), "paths: expected FILE"),
    ):
        with pytest.raises(ValueError, match=message):
            public_data.main(arguments[0], *(str(tmp_path / name) for name in arguments[1:]))
    assert not [*tmp_path.iterdir()]
