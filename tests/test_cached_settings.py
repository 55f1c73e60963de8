"""Test that the cache depends on the source and on every setting, with one setting of each reader changed at a time."""

import numpy as np
import pytest
from PIL import Image

from isopos.lab.data import pathfinder, random_expressions
from isopos.lab.data.corpora import load_corpus
from isopos.lab.data.expressions import read_expressions
from isopos.lab.data.glue import load_glue
from isopos.lab.data.images import read_images
from isopos.lab.data.pairs import load_pairs
from isopos.lab.data.prepare import SPLITS
from isopos.lab.data.random_expressions import Settings
from isopos.lab.data.texts import load_texts
from isopos.lab.data.tokenizers import Bytes, Words
from isopos.lab.data.tree_pairs import read_trees
from isopos.lab.data.treebank import load_trees

ROWS = range(80)
TREES = ("(a (S the (T cat)))", "(b (S (T no) cat))", "(a (U (S the)) no)", "(b dog (S cat))")
WORDS = ("the", "cat", "saw", "no", "dog", "and", "red", "bird", "that", "flew")


@pytest.fixture
def folder(tmp_path):
    """A folder of sources, one for each reader."""
    words = np.random.default_rng(1).choice(WORDS, (len(ROWS), 6))
    lines = [" ".join(row) for row in words]
    (tmp_path / "texts.csv").write_text(
        "text,title,label,kind\n" + "".join(f"{line} {n},{line[::-1]} {n},{n % 2},{n % 3}\n" for n, line in enumerate(lines))
    )
    for ending, step in (("en", 1), ("de", -1), ("fr", 2)):
        (tmp_path / "pairs").mkdir(exist_ok=True)
        (tmp_path / "pairs" / f"all.{ending}").write_text(
            "".join(f"{' '.join(row[::step])} {n}\n" for n, row in enumerate(words))
        )
    (tmp_path / "trees.txt").write_text("".join(TREES[n % 4].replace("cat", f"cat{n}") + "\n" for n in ROWS))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "trees.tsv").write_text(
        "label\tkind\ttree\tother\n" + "".join(f"{n % 2}\t{n % 3}\t(S x{n} y)\t(S y (T x{n}))\n" for n in ROWS)
    )
    (tmp_path / "tree-pairs.tsv").write_text("".join(f"(S x{n} y)\t(S y x{n})\n" for n in ROWS))
    (tmp_path / "listops.tsv").write_text("".join(f"0\t[MAX 0 0 [MIN {n % 10} 0 {n // 10} ] ]\n" for n in ROWS))
    for name in ("train", "dev"):
        (tmp_path / "glue").mkdir(exist_ok=True)
        (tmp_path / "glue" / f"{name}.tsv").write_text(
            "sentence\tlabel\tquestion\n" + "".join(f"{line}\t{n % 2}\t{line[:9]}\n" for n, line in enumerate(lines))
        )
        for n in range(6):
            path = tmp_path / "images" / ("train" if name == "train" else "valid") / "ab"[n % 2] / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 6), (40 * n, 90, 10 * len(name))).save(path)
    (tmp_path / "corpus.txt").write_text("\n".join(lines * 3) + "\n")
    return tmp_path


def of_arrays(found):
    return {name: array.tolist() for name, array in found.arrays.items()} | {"facts": found.facts}


def of_samples(splits):
    return {name: [repr(row) for row in rows] for name, rows in splits.items()}


def read_texts(folder, source="texts.csv", column="text", label="label", tokenizer="bytes", vocabulary=None):
    found = load_texts(str(folder / source), (column,), label, tokenizer=tokenizer, vocabulary=vocabulary)
    return of_arrays(found.arrays) | found.tokenizer.settings()


def pairs(folder, languages="en,de", tokenizer="words", vocabulary=None):
    found, used = load_pairs(str(folder / "pairs"), languages, tokenizer, vocabulary)
    return of_samples(found.splits) | used.settings() | found.dropped


def trees(folder, source="trees.txt", **settings):
    return of_arrays(load_trees(str(folder / source), **settings).arrays)


def images(folder, **settings):
    found = read_images(str(folder / "images"), **settings)
    splits = {name: found.pixels[rows].tolist() for name, rows in found.splits.items()}
    return splits | {"labels": found.labels.tolist(), "classes": found.classes}


def corpus(folder, tokenizer="words", vocabulary=None):
    found = load_corpus(str(folder / "corpus.txt"), 4, tokenizer=tokenizer, vocabulary=vocabulary)
    tokens = [found.train.tolist(), found.validation.tolist()]
    return {"tokens": tokens, "sizes": found.sizes, "sha256": found.sha256} | found.tokenizer.settings()


def pictures(folder, seed=0, counts=(4, 2, 2), side=16, dashes=5, distractors=0):
    return of_arrays(pathfinder.prepare(seed, counts, side, dashes, distractors, lambda *progress: None))


def expressions(folder, seed=0, counts=(6, 2, 2), **bounds):
    settings = Settings(**{"depth": 3, "arguments": 4, "shortest": 3, "longest": 30} | bounds)
    return of_samples(random_expressions.prepare(seed, counts, settings).splits)


OTHER = Words.learn(["the cat saw a dog\n"])
READERS = {  # each with its settings, of which one at a time is changed
    read_texts: [{"column": "title"}, {"label": "kind"}, {"tokenizer": "words"}, {"tokenizer": "words", "vocabulary": 5},
                 {"tokenizer": OTHER}],
    pairs: [{"languages": "de,en"}, {"languages": "en,fr"}, {"vocabulary": 6}, {"tokenizer": "bpe", "vocabulary": 270},
            {"tokenizer": "bpe", "vocabulary": 280}, {"tokenizer": OTHER}],
    trees: [{"inner": True}, {"vocabulary": 6}, {"words": ("()", "<unk>", "the", "no")}, {"words": ("()", "<unk>", "no")}],
    images: [{"height": 4, "width": 8}, {"height": 8, "width": 4}, {"height": 4, "width": 4}, {"grey": True}],
    corpus: [{"vocabulary": 6}, {"tokenizer": "bytes"}, {"tokenizer": "bpe", "vocabulary": 260}, {"tokenizer": OTHER}],
    pictures: [{"seed": 1}, {"counts": (6, 2, 2)}, {"counts": (4, 4, 2)}, {"side": 17}, {"dashes": 6}, {"distractors": 1}],
    expressions: [{"seed": 1}, {"counts": (6, 3, 2)}, {"depth": 2}, {"arguments": 3}, {"shortest": 8}, {"longest": 12}],
    lambda folder, column="tree", label="label": trees(folder, "tables", column=column, label=label):
        [{"column": "other"}, {"label": "kind"}],
    lambda folder, name="CoLA", tokenizer=Bytes(): of_arrays(load_glue(str(folder / "glue"), name, tokenizer)):  # noqa: B008
        [{"tokenizer": OTHER}],
}  # fmt: skip


@pytest.mark.parametrize("read", READERS, ids=["texts", "pairs", "trees", "images", "corpus", "pictures", "expressions",
                                               "tables-of-trees", "glue"])  # fmt: skip
def test_one_cache_for_all_settings_gives_what_a_cache_for_each_gives(folder, monkeypatch, read):
    alone = []
    for n, settings in enumerate([{}, *READERS[read]]):
        monkeypatch.setenv("ISOPOS_CACHE", str(folder / f"cache-{n}"))
        alone.append(read(folder, **settings))
        assert all(alone[-1] != before for before in alone[:-1]), settings
    monkeypatch.setenv("ISOPOS_CACHE", str(folder / "cache"))
    for _ in range(2):  # written, then read again
        for settings, expected in zip([{}, *READERS[read]], alone, strict=True):
            assert read(folder, **settings) == expected, settings


def of_pairs(folder):
    found = read_trees(str(folder / "tree-pairs.tsv"))
    return of_samples(found.pairs.splits) | {"names": found.names}


def of_expressions(folder):
    return of_samples(read_expressions(str(folder / "listops.tsv")).splits)


CHANGED = {  # a reader, its file, and what is written in place of what
    read_texts: ("texts.csv", "the", "eht"),
    pairs: ("pairs/all.de", "the", "a"),
    trees: ("trees.txt", "no", "on"),
    corpus: ("corpus.txt", "cat", "dog"),
    of_pairs: ("tree-pairs.tsv", "(S", "(T"),
    of_expressions: ("listops.tsv", "MAX", "PM"),
}


@pytest.mark.parametrize("read", CHANGED, ids=[name for name, _, _ in CHANGED.values()])
def test_a_file_with_another_content_is_read_again(folder, monkeypatch, read):
    name, old, new = CHANGED[read]
    monkeypatch.setenv("ISOPOS_CACHE", str(folder / "cache"))
    before, text = read(folder), (folder / name).read_text()
    (folder / name).write_text(text.replace(old, new))
    after = read(folder)
    assert after != before
    monkeypatch.setenv("ISOPOS_CACHE", str(folder / "another"))
    assert read(folder) == after


def test_classes_are_those_of_folders_which_are_read_again_under_other_names(folder, monkeypatch):
    monkeypatch.setenv("ISOPOS_CACHE", str(folder / "cache"))
    before = images(folder)
    for split in ("train", "valid"):
        (folder / "images" / split / "a").rename(folder / "images" / split / "z")
    after = images(folder)
    assert (before["classes"], after["classes"]) == (["a", "b"], ["b", "z"])
    monkeypatch.setenv("ISOPOS_CACHE", str(folder / "another"))
    assert images(folder) == after


def test_splits_are_those_of_files(folder, monkeypatch):
    """The same rows with other file names have other splits, also with the first splits in the cache."""
    monkeypatch.setenv("ISOPOS_CACHE", str(folder / "cache"))
    head, *rows = (folder / "texts.csv").read_text().splitlines(keepends=True)
    parts = [head + "".join(rows[n::3]) for n in range(3)]
    read = []
    for names in (("train", "valid", "test"), ("valid", "train", "test"), ("test", "valid", "train")):
        source = folder / "-".join(names)
        for name, part in zip(names, parts, strict=True):
            (source / name).mkdir(parents=True)
            (source / name / "rows.csv").write_text(part)
        found = load_texts(str(source))
        read.append(
            {split: [found.arrays.sequence(split, n).tobytes() for n in range(len(found.labels(split)))] for split in SPLITS}
        )
    first, second, third = read
    assert (first["train"], first["validation"], first["test"]) == (second["validation"], second["train"], second["test"])
    assert (first["train"], first["validation"], first["test"]) == (third["test"], third["validation"], third["train"])
