"""Test labelled texts: tables, folders, errors, batches, pairs, and a classifier's training."""

import csv
import io
import json
import re
import tarfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from isopos.lab.data import texts
from isopos.lab.data.labelled import row_splits
from isopos.lab.data.tokenizers import Bytes
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.task import View
from isopos.lab.tasks.text import TextClasses
from isopos.models import Classifier, PairClassifier
from isopos.schemes import build

pytestmark = pytest.mark.usefixtures("own_cache")
REVIEWS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imdb" / "aclImdb_labeled.tar.xz"


def samples(count=60, seed=0):
    """Texts of 1 to 40 letters. The first letter determines the class; every third text has two lines."""
    random = np.random.default_rng(seed)
    words = ["".join(random.choice(list("abcde "), size=random.integers(1, 40))).strip() or "a" for _ in range(count)]
    words = [f'{word}\n"{n}", {word}' if n % 3 == 0 else f"{word} {n}" for n, word in enumerate(words)]
    return [(word, "ab" if word[0] in "ab" else "cde") for word in words]


def as_csv(rows, titles=("label", "text"), **options):
    file = io.StringIO()
    csv.writer(file, **options).writerows([titles, *([label, *rest] for *rest, label in rows)])
    return file.getvalue()


def as_json(rows, names=("text",)):
    return "".join(json.dumps(dict(zip((*names, "label"), row, strict=True))) + "\n" for row in rows)


def ready(data, scheme="rope", **edits):
    recipe = Recipe(task=TextClasses(data=str(data))).edit(
        **{"scheme": scheme, "batch": 8, "layers": 1, "model_dim": 16, "heads": 2, "longest": 64} | edits
    )
    recipe.task.check(recipe)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


def read(found, split):
    """Text and class of every sample."""
    label = [found.classes[n] for n in found.labels(split)]
    whole = [found.tokenizer.decode(found.arrays.sequence(split, n)) for n in range(len(label) * found.each)]
    return [(*whole[n * found.each : (n + 1) * found.each], one) for n, one in enumerate(label)]


@pytest.mark.parametrize(("labels", "classes"), [("cab", ("a", "b", "c")), (("10", "9", "30", "2"), ("2", "9", "10", "30"))])
def test_texts_keep_their_classes_for_any_order_in_the_file(tmp_path, labels, classes):
    rows = [(f"{label} {n}", label) for n in range(60) for label in labels]
    (tmp_path / "a.csv").write_text(as_csv(rows))
    found = texts.load_texts(str(tmp_path / "a.csv"))
    assert found.classes == classes
    assert sorted(row for split in ("train", "validation", "test") for row in read(found, split)) == sorted(rows)


def test_formats_agree(tmp_path):
    """CSV and JSON lines, plain or in archives, and one folder per class give the same splits, by a hash."""
    rows = samples()
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + as_csv(rows).encode())
    (tmp_path / "a.jsonl").write_text(as_json(rows))
    folder = tmp_path / "folders"
    for n, (text, label) in enumerate(rows):
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{n:03}.txt").write_text(text)
    (folder / "README.txt").parent.mkdir(exist_ok=True)
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        archive.add(folder, "reviews")
    found = [texts.load_texts(str(tmp_path / name)) for name in ("a.csv", "a.jsonl", "folders", "a.tar.xz")]
    assert found[0].classes == ("ab", "cde")
    assert found[0].arrays.sha256 == found[1].arrays.sha256
    assert found[2].arrays.sha256 == found[3].arrays.sha256
    for split in ("train", "validation", "test"):
        assert sorted(read(found[0], split)) == sorted(read(found[2], split)) != []
    assert sorted(chain(*(read(found[0], split) for split in ("train", "validation", "test")))) == sorted(rows)


def test_names_make_splits_and_test_files_without_labels_are_counted(tmp_path):
    rows = [(text.replace("\n", " "), label) for text, label in samples(90)]
    for name, some in (("train", rows[:50]), ("dev", rows[50:70])):
        (tmp_path / f"{name}.tsv").write_text("".join("\t".join(row) + "\n" for row in [("sentence", "label"), *some]))
    (tmp_path / "test.tsv").write_text("sentence\n" + "".join(f"{text}\n" for text, _ in rows[70:]))
    (tmp_path / "notes.txt").write_text("no rows")
    found = texts.load_texts(str(tmp_path), ("sentence",))
    assert (read(found, "train"), read(found, "validation"), read(found, "test")) == (rows[:50], rows[50:70], [])
    recipe, data = ready(tmp_path, column="sentence")
    assert "50 + 20 + 0 texts of 2 classes" in data.summary
    assert "test.tsv left out, which has no labels" in data.summary
    assert recipe.task.classes == 2
    assert data.splits == ("validation",)


def test_splits_are_named_by_files_or_by_whole_names_of_folders():
    names = ["a/train/1.csv", "a/valid/pos/1.txt", "my-test/b.csv", "x/test.csv", "x/y.csv"]
    split = row_splits(names)
    assert [split(name, "") for name in names] == ["train", "validation", "train", "test", "train"]
    names = ["training.csv", "testing.csv", "valset/a.csv", "trainsets.csv"]
    assert [row_splits(names)(name, "") for name in names] == ["train", "test", "validation", "train"]
    tenths = row_splits(["my-test/b.csv", "train.log"])
    assert {tenths("my-test/b.csv", str(n)) for n in range(100)} == {"train", "validation", "test"}


def test_the_layout_of_film_reviews(tmp_path):
    rows = samples(80)
    for n, (text, label) in enumerate(rows):
        place = tmp_path / ("train" if n < 60 else "test") / {"ab": "pos", "cde": "neg"}[label]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{n}_1.txt").write_text(text)
    (tmp_path / "train" / "unsup").mkdir()
    (tmp_path / "train" / "unsup" / "0_0.txt").write_text("nobody knows")
    (tmp_path / "train" / "urls_pos.txt").write_text("http://x")
    _, data = ready(tmp_path)
    train, validation, test = (read(data.dataset, split) for split in ("train", "validation", "test"))
    assert sorted(train + validation) == sorted((t, {"ab": "pos", "cde": "neg"}[c]) for t, c in rows[:60])
    assert len(test) == 20
    assert 0 < len(validation) < 20
    assert "train/unsup left out" in data.summary
    (tmp_path / "train" / "pos").rename(tmp_path / "train" / "x")
    (tmp_path / "train" / "neg").rename(tmp_path / "train" / "pos")
    (tmp_path / "train" / "x").rename(tmp_path / "train" / "neg")
    other = texts.load_texts(str(tmp_path))
    assert sorted(read(other, "train")) == sorted((text, {"pos": "neg", "neg": "pos"}[c]) for text, c in train)


def test_columns_by_number_where_there_are_no_names(tmp_path):
    rows = [(f"gj04\t{int(label == 'ab')}\t\t{text}") for text, label in samples(40) if "\n" not in text]
    (tmp_path / "raw.tsv").write_text("\n".join(rows))
    found = texts.load_texts(str(tmp_path / "raw.tsv"), ("4",), "2")
    assert found.classes == ("0", "1")
    assert sum(len(found.labels(split)) for split in ("train", "validation", "test")) == len(rows)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "text;label\nx;1\n",
            r"expected a column text, got text;label; separate columns by commas and decimals by",
        ),
        ("a.csv", "text,class\nx,1\n", r"line 1: expected a column label, got text, class; name those to use, by"),
        ("a.csv", "text,label,label\nx,1,2\n", r"line 1: expected one column label, got 2; rename all but one"),
        ("a.csv", "text,label\nx,\n", r"line 2: expected a label, got none; repair or remove the line"),
        ("a.csv", "text,label\nx,1\n  ,1\n", r"line 3: text: expected a text, got an empty one; repair"),
        ("a.csv", "text,label\nx,1,2\n", r"line 2: expected 2 columns, as the first line has, got 3"),
        ("a.csv", 'text,label\n"a\nb",1\n"x"y,1\n', r"line 4: expected CSV, got "),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "x", "label": null}\n', r"line 2: expected a label, got none"),
        ("a.jsonl", '{"text": "x"}\n', r"line 1: expected a field label, got text"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', r"line 1: text: expected a text, got 3"),
        ("a.jsonl", '{"text": "x", "label": 1\n', r"line 1, column 25: expected JSON, got "),
        ("a.jsonl", "[1]\n", r"line 1: expected an object"),
        (
            "a.jsonl",
            '{"text": "x", "label": ' + "9" * 5000 + "}\n",
            r"a\.jsonl, line 1: expected numbers of at most 4,300 dig",
        ),
        ("a.jsonl", '{"text": "x\\ud800y", "label": 1}\n', r"a\.jsonl, line 1: text: expected text, got \\ud800, which is"),
        ("a.jsonl", '{"text": "x", "label": "\\udfff"}\n', r"a\.jsonl, line 1: label: expected text, got \\udfff, which"),
        (
            "a.csv",
            "text,label\nx," + "9" * 5000 + "\n",
            r"line 2: expected a label of at most 1,000 characters, got 5,000: '9",
        ),
        ("a.csv", "text,label\nx,1\n\xff,1\n", r"line 3: expected UTF-8, got the byte 0xff"),
        (
            "a.txt",
            "no class",
            r"files that end with \.csv, \.tsv, \.jsonl, or \.txt in one folder per class",
        ),
        ("a.csv", "text,label\n", r"expected rows in files that end with"),
        ("a.csv", "text,label\n" + "x,1\n" * 40, r"expected rows for .*, got none among 40"),
        ("a.csv", "text,label\n" + "".join(f"x{n},1\n" for n in range(40)), r"label: expected classes, 2 at least, got 1"),
        ("a.csv", "text,label\n" + "".join(f"x{n},{n / 7}\n" for n in range(40)), "expected a class that train has, too"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        texts.load_texts(str(tmp_path / name))


def test_rows_of_datasets_have_the_names_of_their_classes(tmp_path, monkeypatch):
    """A folder of parquet files, which `datasets` reads like the hub, equals the .jsonl of the same rows."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    datasets.disable_progress_bars()
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["cde", "ab"])})
    rows, folders = samples(40), (tmp_path / "hub", tmp_path / "plain")
    for folder in folders:
        folder.mkdir()
    for split, some in (("train", rows[:30]), ("validation", rows[30:])):
        table = [{"text": text, "label": int(label == "ab")} for text, label in some]
        datasets.Dataset.from_list(table, features=kinds).to_parquet(folders[0] / f"{split}.parquet")
        (folders[1] / f"{split}.jsonl").write_text(as_json(some))
    unknown = [{"text": "nobody knows", "label": -1}] * 3
    datasets.Dataset.from_list(unknown, features=kinds).to_parquet(folders[0] / "unsupervised.parquet")
    splits = (f"  - split: {name}\n    path: {name}.parquet\n" for name in ("train", "validation", "test", "unsupervised"))
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(splits)}---\n"
    (folders[0] / "README.md").write_text(card)
    datasets.Dataset.from_list(unknown, features=kinds).to_parquet(folders[0] / "test.parquet")
    found, plain = texts.load_texts(f"hf:{folders[0]}"), texts.load_texts(str(folders[1]))
    for split, some in (("train", rows[:30]), ("validation", rows[30:]), ("test", [])):
        assert read(found, split) == read(plain, split) == some
    assert found.arrays.facts["left"] == {"test.jsonl": 1, "unsupervised.jsonl": 3}
    with pytest.raises(ValueError, match=r"data: hf:.*/train\.jsonl, line 1: expected a field genre, got text, label"):
        texts.load_texts(f"hf:{folders[0]}", label="genre")


def test_labels_that_may_be_one_class_are_reported(tmp_path):
    rows = "".join(f"some {n} words,{('0', '0.0', 'nan', 'NaN')[n % 4]}\n" for n in range(200))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    found = ready(tmp_path / "a.csv")[1]
    assert "; '0' and '0.0', 'NaN' and 'nan' are separate classes here: if they are one class" in found.summary
    (tmp_path / "a.csv").write_text("text,label\n" + rows.replace("0.0", "1").replace("nan", "2").replace("NaN", "3"))
    assert "separate classes" not in ready(tmp_path / "a.csv")[1].summary


def test_a_class_of_the_test_split_alone_is_refused(tmp_path):
    for name, rows in (("train", samples(30)), ("valid", samples(5, 1)), ("test", [("x", "ab"), ("y", "never")])):
        (tmp_path / f"{name}.csv").write_text(as_csv(rows))
    with pytest.raises(
        ValueError, match=r"test\.csv, line 3: expected a class that train has, too, got 'never', which is in"
    ):
        texts.load_texts(str(tmp_path))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"pairs": "towers"}, "pair: expected the column of a second text, which towers compare, got none"),
        ({"vocabulary": 300}, "vocabulary: expected none with bytes"),
        ({"classes": 3}, "classes: expected 0, or the 4 of the data, got 3"),
        ({"data": "nowhere.csv"}, r"data: expected a file or a folder, but nowhere\.csv does not exist"),
        ({"scheme": "learned:length=9"}, "longest: expected at most 9, for which learned:length=9 has positions, got 64"),
        ({"scheme": "ape-tree:branches=2"}, "schemes: expected positions on a line, which text has"),
    ],
)
def test_choices_that_do_not_fit_are_refused(edits, message):
    with pytest.raises(ValueError, match=message):
        ready(**{"data": ""} | edits)


def test_what_is_prepared_is_kept_and_a_change_is_seen(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text(as_csv(samples()))
    first = texts.load_texts(str(path))
    assert isinstance(first.arrays["train-tokens"], np.memmap)
    monkeypatch.setattr(texts, "_fill", None)
    again = texts.load_texts(str(path))
    assert again.arrays.sha256 == first.arrays.sha256
    monkeypatch.undo()
    monkeypatch.setenv("ISOPOS_CACHE", str(tmp_path / "cache"))
    path.write_text(as_csv(samples(70)))
    assert texts.load_texts(str(path)).arrays.sha256 != first.arrays.sha256


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_batches_are_cut_and_counted(tmp_path, tokenizer, pooling):
    (tmp_path / "a.csv").write_text(as_csv(samples()))
    recipe, data = ready(tmp_path / "a.csv", tokenizer=tokenizer, pooling=pooling, longest=12)
    size = data.dataset.tokenizer.size
    assert (recipe.task.vocabulary, data.dataset.tokenizer.size) == (size, size)
    seen = []
    for step in range(len(data.sizes["train"]) // 8):
        tokens, positions, mask, labels = data.batch(recipe, step)
        assert positions[:, 0].tolist() == list(range(tokens.shape[1]))
        for row, own, label in zip(tokens, mask, labels, strict=True):
            assert own.sum() <= 12
            assert (row[0] == size + 1) == (pooling == "first")
            seen.append((bytes(row[own][pooling == "first" :].tolist()) if tokenizer == "bytes" else None, int(label)))
    if tokenizer == "bytes":
        room = 12 - (pooling == "first")
        known = [(text.encode()[:room], data.dataset.classes.index(c)) for text, c in read(data.dataset, "train")]
        assert not set(seen) - set(known)
        cut = sum(len(text.encode()) > room for split in data.sizes for text, _ in read(data.dataset, split))
        assert f", {cut} of them cut at 12 tokens" in data.summary


def test_pairs_share_their_room(tmp_path):
    rows = [
        ("a" * a, "b" * b, str(n % 2)) for n, (a, b) in enumerate([(3, 3), (30, 3), (3, 30), (30, 30), (9, 9), (10, 9)] * 9)
    ]
    (tmp_path / "train.jsonl").write_text(as_json(rows, ("text", "other")))
    (tmp_path / "valid.jsonl").write_text(as_json(rows[:2], ("text", "other")))
    _, data = ready(tmp_path, pair="other", longest=20)
    recipe, _ = ready(tmp_path, pair="other", longest=20)
    tokens, _, mask, _ = data.tensors("train", np.arange(6), recipe)
    shown = [
        "".join("ab|"["ab".find(chr(n)) if n < 256 else 2] for n in row[own]) for row, own in zip(tokens, mask, strict=True)
    ]
    expected = [(3, 3), (16, 3), (3, 16), (10, 9), (9, 9), (10, 9)]
    assert shown == ["a" * a + "|" + "b" * b for a, b in expected]
    assert data.sizes["train"][:6].tolist() == [a + b + 1 for a, b in expected]
    recipe, data = ready(tmp_path, pair="other", longest=20, pairs="towers", pooling="first")
    tokens, _, mask, _ = data.tensors("train", np.arange(6), recipe)
    assert tokens.shape == (6, 2, 20)
    assert mask.sum(-1).tolist() == [
        [min(a, 19) + 1, min(b, 19) + 1] for a, b in [(3, 3), (30, 3), (3, 30), (30, 30), (9, 9), (10, 9)]
    ]
    scored = data.score(recipe.task.model(recipe), recipe, View())
    assert scored.figures["texts"] == 2


def shortened(first, second, room, tie):
    """Lengths after cutting the longer text token by token until both fit. If equal, text number `tie` is cut."""
    both = [first, second]
    while sum(both) > room:
        both[tie if both[0] == both[1] else int(both[1] > both[0])] -= 1
    return both


LENGTHS = [(a, b) for a in (1, 5, 7, 8, 9, 30) for b in (1, 6, 8, 9, 31)]


@pytest.mark.parametrize("longest", [16, 17])
@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("pairs", ["joined", "towers"])
def test_pairs_are_cut_as_their_pooling_and_their_towers_need(tmp_path, pairs, pooling, longest):
    """Kept tokens, sizes, number of cut samples and batches follow the definition for every combination."""
    rows = [("a" * a, "b" * b, str(n % 2)) for n, (a, b) in enumerate(LENGTHS)]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(as_json(rows, ("text", "other")))
    recipe, data = ready(tmp_path, pair="other", pairs=pairs, pooling=pooling, longest=longest)
    first = pooling == "first"
    tokens, positions, mask, labels = data.tensors("train", np.arange(len(rows)), recipe)
    towers = [[min(n, longest - first) for n in both] for both in LENGTHS]
    kept = towers if pairs == "towers" else [shortened(*both, longest - first - 1, 1) for both in LENGTHS]
    assert [[*both] for both in data.kept["train"]] == kept
    sizes = [max(both) if pairs == "towers" else sum(both) + 1 for both in kept]
    assert data.sizes["train"].tolist() == [size + first for size in sizes]
    assert (
        f", {sum([*a] != b for a, b in zip(LENGTHS, kept, strict=True)) * 2} of them cut at {longest} tokens" in data.summary
    )
    assert len(positions) == tokens.shape[-1] == max(sizes) + first <= longest
    start, between = [257] * first, [256]
    for (a, b), row, real in zip(kept, tokens, mask, strict=True):
        texts_of = ([97] * a, [98] * b)
        joined = [start + one for one in texts_of] if pairs == "towers" else start + texts_of[0] + between + texts_of[1]
        parts = [one[own].tolist() for one, own in zip(row, real, strict=True)] if pairs == "towers" else row[real].tolist()
        assert parts == joined
    assert labels.tolist() == [n % 2 for n in range(len(rows))]


def test_towers_see_each_text_by_itself_and_padding_is_nothing():
    torch.manual_seed(0)
    model = PairClassifier(20, 3, 16, 1, build("rope", 8, 2)).double()
    tokens, other = torch.randint(20, (2, 2, 7)), torch.randint(20, (2, 2, 9))
    mask = torch.ones(2, 2, 9, dtype=torch.bool)
    mask[:, :, 7:] = False
    other[..., :7] = tokens
    torch.testing.assert_close(model(tokens), model(other, None, mask))
    u, v = (model.features(tokens[:, n], None).mean(1) for n in range(2))
    torch.testing.assert_close(model(tokens), model.head(torch.cat((u, v, u * v, u - v), -1)))
    first = Classifier(20, 3, 16, 1, build("rope", 8, 2), pooling="first")
    torch.testing.assert_close(first(tokens[0]), first.head(first.features(tokens[0], None)[:, 0]))
    with pytest.raises(ValueError, match="pooling: expected one of mean, first, got 'last'"):
        Classifier(20, 3, 16, 1, build("rope", 8, 2), pooling="last")


def test_a_part_of_what_is_held_out_is_spread_over_a_source_sorted_by_class(tmp_path):
    rows = sorted(samples(300), key=lambda row: row[1])
    (tmp_path / "train.csv").write_text(as_csv(rows))
    (tmp_path / "valid.csv").write_text(as_csv(rows[:10] + rows[-10:]))
    recipe, data = ready(tmp_path)
    assert [data.dataset.labels("validation")[row] for row in data.spread("validation", 4)] == [0, 0, 1, 1]
    assert data.score(recipe.task.model(recipe), recipe, View(limit=4)).figures["texts"] == 4
    assert [one["class"] for one in data.examples(recipe.task.model(recipe), recipe, 2)] == ["ab", "cde"]


def test_passages_are_told_apart_by_order_alone():
    """Swapped brackets keep the same bytes. Splits have no topic in common."""
    found = texts.load_texts("")
    assert isinstance(found.tokenizer, Bytes)
    shares = np.bincount(found.labels("train")) / len(found.labels("train"))
    assert len(shares) == 4
    assert shares.max() < 0.27
    for split in ("train", "test"):
        for text, label in read(found, split)[::10]:
            turned = {
                "()": label in ("round ones turned", "both turned"),
                "[]": label in ("square ones turned", "both turned"),
            }
            for pair, way in turned.items():
                assert re.sub(rf"[^{re.escape(pair)}]", "", text) == (pair[::-1] if way else pair)


def test_of_a_pair_of_passages_one_has_turned_brackets():
    found = texts.load_texts("", ("text", "other"))
    assert (found.classes, found.each) == (("the first is turned", "the second is turned"), 2)
    rows = [row for split in ("train", "test") for row in read(found, split)[::20]]
    for first, second, label in rows:
        ways = ["".join(re.sub(rf"[^{re.escape(pair)}]", "", text) for pair in ("()", "[]")) for text in (first, second)]
        assert ways == ([")(][", "()[]"] if label == "the first is turned" else ["()[]", ")(]["])
    assert 0.4 < np.mean([label == "the first is turned" for *_, label in rows]) < 0.6


def text_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("names", "classes", "left"),
    [
        (["{split}/{c}/{n}.txt", "ROOT/imdbEr.txt"], ("neg", "pos"), {"imdbEr.txt": 1}),
        (["{c}/{year}/{n}.txt"], ("neg", "pos"), {}),
        (["{c}/the train journey {n}.txt"], ("neg", "pos"), {}),
        (["corpus/{c}/{n}.txt", "ROOT/corpus/README.txt"], ("neg", "pos"), {"README.txt": 1}),
        (["{dev}/{n}.txt"], ("dev", "sales"), {}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_folders_of_texts(tmp_path, names, classes, left, packed):
    files = {}
    for n in range(60):
        words = {"split": "test" if n % 3 else "train", "c": ("pos", "neg")[n % 2], "year": 2019 + n % 4 // 2, "n": n}
        files[names[0].format(**words, dev=("dev", "sales")[n % 2])] = f"text {n}"
    files |= {name.removeprefix("ROOT/"): "of no class" for name in names[1:]}
    source = text_files(tmp_path / "set", files)
    if packed:
        source = str(tmp_path / "set.tar.gz")
        with tarfile.open(source, "w:gz") as archive:
            archive.add(tmp_path / "set", ".")
    found = texts.load_texts(source)
    assert found.classes == classes
    assert found.arrays.facts["left"] == left
    counts = [len(found.labels(split)) for split in ("train", "validation", "test")]
    assert sum(counts) == 60
    assert min(counts) > 0  # by folders, or by hash
    for split in ("train", "validation", "test"):
        own = {name.split("/")[0] for name, text in files.items() for one, _ in read(found, split) if text == one}
        assert own == ({"test"} if split == "test" else {"train"}) or "{split}" not in names[0]


def test_the_folders_above_a_source_name_no_splits(tmp_path):
    content = as_csv(samples(90))
    found = [texts.load_texts(text_files(tmp_path / above / "x", {"rows.csv": content})) for above in ("plain", "train")]
    assert found[0].arrays.sha256 == found[1].arrays.sha256


def test_a_class_of_the_first_line_alone_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text(as_csv(samples(40)))
    with pytest.raises(ValueError, match=r"rows.csv, line 1: expected a class of several rows, got 'label' alone"):
        texts.load_texts(str(tmp_path / "rows.csv"), ("2",), "1")


def test_columns_without_data_are_refused():
    recipe = Recipe(task=TextClasses(column="review"))
    with pytest.raises(ValueError, match="column: expected 'text' without --data, which has columns, got 'review'"):
        recipe.task.check(recipe)


@pytest.mark.slow
@pytest.mark.skipif(not REVIEWS.exists(), reason="the film reviews lie beside this repository only")
def test_film_reviews():
    found = texts.load_texts(str(REVIEWS))
    assert found.classes == ("neg", "pos")
    assert len(found.labels("train")) + len(found.labels("validation")) == len(found.labels("test")) == 25_000
    assert sum(int(found.arrays[f"{split}-starts"][-1]) for split in ("train", "validation", "test")) == 65_483_508
