"""Test transduction: random symbols, text files, batches, teacher forcing, free decoding, and the commands."""

import gzip
import pickle
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import close
from training import trained

from isopos.lab.data.pairs import read_pairs, sequences
from isopos.lab.data.splits import Splits
from isopos.lab.recipes import Recipe
from isopos.lab.tasks.task import View
from isopos.lab.tasks.transduction import Transduction

pytestmark = pytest.mark.usefixtures("own_cache")
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
SIZES = {"batch": 8, "layers": 1, "model_dim": 16, "heads": 2, "samples": 60, "held_out": 10, "length": 6, "deviation": 1}


def ready(scheme="rope:attention=softmax", **edits):
    """A recipe with inferred fields, and its data."""
    recipe = Recipe(task=Transduction()).edit(scheme=scheme, **SIZES | edits)
    data = recipe.task.load(recipe)
    return data.infer(recipe), data


def test_random_sequences_follow_their_seed_and_differ_and_have_the_stated_lengths():
    found = sequences(3, (2000, 300, 300), length=40, deviation=5, vocabulary=20)
    again = sequences(3, (2000, 300, 300), length=40, deviation=5, vocabulary=20)
    other = sequences(4, (2000, 300, 300), length=40, deviation=5, vocabulary=20)
    rows = [*chain(*found.values())]
    assert all(np.array_equal(a, b) for a, b in zip(rows, chain(*again.values()), strict=True))
    assert not np.array_equal(rows[0], other["train"][0])
    assert len({row.tobytes() for row in rows}) == len(rows) == 2600
    lengths = np.array([len(row) for row in rows])
    assert abs(lengths.mean() - 39.5) < 0.5  # numbers are cut, not rounded
    assert 4.5 < lengths.std() < 5.5
    assert sorted({symbol for row in rows for symbol in row.tolist()}) == list(range(20))
    assert min(len(row) for row in sequences(0, (20, 1, 1), length=1, deviation=0, vocabulary=99)["train"]) == 1
    with pytest.raises(ValueError, match="vocabulary: expected enough symbols for 22 different sequences of about 2, got 2"):
        sequences(0, (20, 1, 1), length=2, deviation=0, vocabulary=2)


@pytest.mark.parametrize(
    ("operation", "expected"), [("copy", [1, 2, 3, 9]), ("reverse", [3, 2, 1, 9]), ("repeat", [1, 2, 3, 1, 2, 3, 9])]
)
def test_targets_by_hand(operation, expected):
    """9 ends a target and 10 starts it. The data store only the source."""
    recipe, data = ready(operation=operation, vocabulary=9)
    row = np.array([1, 2, 3])
    data.pairs["train"][0] = (row, row)
    source, given, x, y, mask, answers = data.tensors("train", np.array([0]), recipe)
    assert (source.tolist(), answers.tolist(), given.tolist()) == ([[1, 2, 3]], [expected], [[10, *expected[:-1]]])
    assert (x[:, 0].tolist(), y[:, 0].tolist(), mask.tolist()) == ([0, 1, 2], [*range(len(expected))], [[True] * 3])
    assert all(source is target for rows in data.pairs.values() for source, target in rows)


def test_data_follows_its_seed():
    _, data = ready()
    _, same = ready()
    again, other, more = pickle.loads(pickle.dumps(data)), ready(data_seed=1)[1], ready(operation="copy")[1]
    assert data.sha256 == same.sha256 == again.sha256
    assert len({data.sha256, other.sha256, more.sha256}) == 3


def test_scores_count_every_token_once():
    recipe, data = ready("ape-sequence:attention=softmax,locality=0.98", decoded=0)
    model = recipe.task.model(recipe).double().eval()
    scored = data.score(model, recipe, View()).figures
    nats, right, whole = [], [], []
    for n in range(10):
        *sample, answers = data.tensors("validation", np.array([n]), recipe)
        logits = model(*sample)[0]
        nats.append(torch.nn.functional.cross_entropy(logits, answers[0], reduction="none"))
        right.append(logits.argmax(-1) == answers[0])
        ((own, found),) = data.freely(model, recipe, "validation", np.array([n]))
        whole.append(own.tolist() == found.tolist())
    close(torch.tensor(scored["nats"], dtype=torch.float64), torch.cat(nats).mean())
    assert scored["accuracy"] == pytest.approx(torch.cat(right).double().mean().item())
    assert scored["perplexity"] == pytest.approx(np.exp(scored["nats"]))
    assert scored["exact"] == np.mean(whole)
    assert (scored["pairs"], scored["decoded"]) == (10, 10)
    assert data.score(model, recipe, View(limit=3)).figures["decoded"] == 3
    assert ready(recipe.scheme, decoded=4)[1].score(model, recipe, View()).figures["decoded"] == 4


def test_the_loss_is_the_mean_of_pairs_however_long_they_are():
    recipe, data = ready()
    model, batch = recipe.task.model(recipe).double().eval(), data.batch(recipe, 1)
    *sample, answers = batch
    nats = [torch.nn.functional.cross_entropy(*pair, ignore_index=-1) for pair in zip(model(*sample), answers, strict=True)]
    assert len({*(answers >= 0).sum(1).tolist()}) > 1
    close(data.loss(model, *batch), torch.stack(nats).mean())


def test_a_decoded_target_is_right_only_if_it_ends_where_it_should():
    recipe, data = ready(vocabulary=9, operation="copy")

    class Fixed(torch.nn.Linear):
        """A model with a constant answer."""

        def greedy(self, source, start, most, follow, positions, mask):
            assert follow(torch.tensor([[1, 9], [9, 3]])) is None
            assert len(follow(torch.tensor([[1, 9], [2, 3]]))) == 3
            return self.answer[None, :most]

    source = data.pair("validation", 0)[0].tolist()
    model = Fixed(1, 1)
    for answer, right in (
        ([*source, 9, 1, 1], True),
        ([*source, 9], True),
        (source, False),
        ([*source[:-1], 9, 9], False),
        ([*source[:-1], (source[-1] + 1) % 9, 9], False),
    ):
        model.answer = torch.tensor(answer)
        assert data.of_decoded(data.freely(model, recipe, "validation", np.array([0])))["exact"] == right


def lines(path, *rows):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("".join(f"{row}\n" for row in rows))


ROWS = [(f"the {a} sees {b} birds", f"{b} vögel sieht der {a}") for a in ("cat", "dog", "cow", "fox") for b in range(12)]


def gathered(source, languages=""):
    """Pairs of texts by split."""
    left, splits = Counter(), {"train": [], "validation": [], "test": []}
    for name, pair in read_pairs(source, languages, left):
        splits[name].append(pair)
    return Splits(splits, {reason: left[reason] for reason in ("repeated", "with an empty side")})


def test_formats_of_texts_agree(tmp_path):
    """A table, named columns in either order, and two files give the same pairs, plain or in archives."""
    lines(tmp_path / "plain.tsv", *("\t".join(row) for row in ROWS), "")
    lines(tmp_path / "named.tsv", "Target\tSource", *(f"{b}\t{a}" for a, b in ROWS))
    lines(tmp_path / "rows.en.gz", *(a for a, _ in ROWS))
    lines(tmp_path / "rows.de", *(b for _, b in ROWS))
    found = [gathered(str(tmp_path / name)) for name in ("plain.tsv", "named.tsv")]
    found.append(gathered(f"{tmp_path / 'rows.en.gz'},{tmp_path / 'rows.de'}"))
    found.append(gathered(str(tmp_path), "en,de"))
    (tmp_path / "both").mkdir()
    lines(tmp_path / "both" / "a.tsv", "Target\tSource", *(f"{b}\t{a}" for a, b in ROWS[:9]))
    lines(tmp_path / "both" / "b.tsv", *("\t".join(row) for row in ROWS[9:]))
    found.append(gathered(str(tmp_path / "both")))
    assert all(one.splits == found[0].splits for one in found)
    assert sorted(chain(*found[0].splits.values())) == sorted(ROWS)


def test_endings_in_the_other_order_are_pairs_the_other_way_round(tmp_path):
    (tmp_path / "texts").mkdir()
    for ending, side in (("en", 0), ("de", 1)):
        lines(tmp_path / "texts" / f"train.{ending}", *(row[side] for row in ROWS))
    for languages, way in (("en,de", 1), ("de,en", -1)):
        _, data = ready(data=str(tmp_path / "texts"), languages=languages, tokenizer="words")
        assert {data.pair_text(name, n) for name, rows in data.pairs.items() for n in range(len(rows))} == {
            row[::way] for row in ROWS
        }


@pytest.mark.parametrize("header", ["trg\tsrc", "TGT\tSource"])
def test_other_names_of_columns_are_no_pair(tmp_path, header):
    lines(tmp_path / "named.tsv", header, *(f"{b}\t{a}" for a, b in ROWS))
    found = gathered(str(tmp_path / "named.tsv"))
    assert sorted(pair for rows in found.splits.values() for pair in rows) == sorted(ROWS)


def test_one_source_may_have_another_target_in_each_split(tmp_path):
    for name in ("train", "val", "test"):
        lines(tmp_path / f"{name}.en", "one", "two", name)
        lines(tmp_path / f"{name}.de", f"eins ({name})", "zwei", "drei")
    found = gathered(str(tmp_path), ".en,.de")
    assert found.splits["train"] == [("one", "eins (train)"), ("train", "drei")]
    assert found.summary == ", 2 repeated"


def test_splits_have_nothing_in_common_and_what_is_left_out_is_counted(tmp_path):
    for name, rows in (("train", ROWS[:30]), ("val", ROWS[20:40]), ("test_2016", ROWS[35:])):
        lines(tmp_path / f"{name}.en", *(a for a, _ in rows), *["  "] * 3)
        lines(tmp_path / f"{name}.de", *(b for _, b in rows), "", "x", "")
    found = gathered(str(tmp_path), ".en,.de")
    assert [len(found.splits[name]) for name in ("train", "validation", "test")] == [20, 15, 13]
    assert found.summary == ", 15 repeated, 9 with an empty side"
    assert not set(found.splits["train"]) & set(found.splits["validation"])
    with pytest.raises(ValueError, match="data: expected pairs for validation, got none among 1"):
        Splits({"train": [("a", "b")], "validation": [], "test": []})


@pytest.mark.parametrize(
    ("files", "data", "languages", "message"),
    [
        (
            {"a.tsv": "a\tb\na\n"},
            "a.tsv",
            "",
            r"data: .*a\.tsv, line 2: expected a source, a tab and a target, got 1 columns",
        ),
        ({"a.tsv": "a\tb\tc\n"}, "a.tsv", "", r"a\.tsv, line 1: .* got 3 columns; repair or remove the line"),
        ({"a.tsv": "\n"}, "a.tsv", "", "data: expected rows of a source, a tab and a target"),
        ({"a.txt": "a\tb\n"}, ".", "", "data: expected rows of .* in files that end with .tsv, none in"),
        ({}, "absent.tsv", "", r"data: expected a file or a folder, but .*absent\.tsv does not exist"),
        (
            {"a": "1\n2\n", "b": "1\n"},
            "a,b",
            "",
            "data: expected as many lines in .*a as in .*b, a pair in each, got 2 and 1",
        ),
        ({"a": "1\n"}, "a,b", "", "data: expected a file or a folder, but .*b does not exist"),
        ({"x.en": "1\n"}, ".", "en,de", r"data: expected .*x\.de next to .*x\.en, got none"),
        ({"x.de": "1\n"}, ".", "en,de", r"data: expected .*x\.en next to .*x\.de, got none"),
        ({"x.fr": "1\n"}, ".", "en,de", r"data: expected files that end with \.en and \.de in"),
        ({"x.EN": "1\n", "x.De": "1\n2\n"}, ".", "en,DE", r"data: expected as many lines in .*x\.EN as in .*x\.De"),
        ({}, ".", "en", "languages: expected the two endings of a folder's files, as en,de, got 'en'"),
        ({}, ".", "en,en", "languages: expected the two endings"),
        ({"a.tsv": b"a\tb\nc\t\xff\n"}, "a.tsv", "", r"a\.tsv, line 2: expected UTF-8, got the byte 0xff"),
    ],
)
def test_texts_that_are_no_pairs_are_named(tmp_path, monkeypatch, files, data, languages, message):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        gathered(data, languages)


@pytest.mark.parametrize("nested", [False, True])
def test_datasets_have_pairs_in_two_columns_or_by_language(tmp_path, monkeypatch, nested):
    """A folder of parquet files, which `datasets` reads like the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    datasets.disable_progress_bars()
    rows = {"train": [("a\tb", "c\nd"), ("", "e")], "validation": [("f", "g")]}
    (tmp_path / "hub").mkdir()
    for split, pairs in rows.items():
        sides = [{"de": one, "en": other} for one, other in pairs]
        table = [{"translation": row} for row in sides] if nested else sides
        datasets.Dataset.from_list(table).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    left = Counter()
    found = [*read_pairs(f"hf:{tmp_path / 'hub'}", "de,en", left)]
    assert found == [("train", ("a b", "c d")), ("validation", ("f", "g"))]
    assert left == {"with an empty side": 1}
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: expected texts source and target, got .*--languages names"):
        [*read_pairs(f"hf:{tmp_path / 'hub'}", "", left)]


@pytest.mark.parametrize("tokenizer", ["words", "bpe"])
def test_texts_are_tokens_of_one_vocabulary_that_stays_with_the_run(tmp_path, tokenizer):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    lines(tmp_path / "rows.tsv", *("\t".join(row) for row in ROWS))
    recipe, data = ready(data=str(tmp_path / "rows.tsv"), tokenizer=tokenizer)
    assert recipe.task.vocabulary == data.tokenizer.size == data.end == data.start - 1
    known = {data.pair_text(name, n) for name, rows in data.pairs.items() for n in range(len(rows))}
    assert known == set(ROWS)
    data.save(tmp_path)
    again = recipe.task.load(recipe, run=tmp_path)
    assert again.sha256 == data.sha256
    assert isinstance(data.pairs["train"].arrays["train-tokens"], np.memmap)
    shorter = recipe.edit(longest=6).task.load(recipe, run=tmp_path)
    kept = {shorter.pair_text(name, n) for name, rows in shorter.pairs.items() for n in range(len(rows))}
    counts = {shown: [len(data.tokenizer.encode(side)) for side in shown] for shown in known}
    assert kept == {shown for shown, (source, target) in counts.items() if max(source, target + 1) <= 6}
    model = recipe.task.model(recipe)
    figures = data.score(model, recipe, View()).figures
    assert 0 <= figures["bleu"] <= 100
    right = [data.pair("validation", n)[1] for n in range(3)]
    assert data.of_decoded([(own, own) for own in right])["bleu"] == pytest.approx(100)
    if tokenizer == "words":
        unknown = np.full_like(right[0], data.tokenizer.encode("x")[0])
        figures = data.of_decoded([(unknown, unknown), (right[0], right[0])])
        assert figures["exact"] == 0.5
        assert data.of_decoded([(unknown, unknown)])["bleu"] == 0
    assert [metric.title for metric in recipe.task.metrics] == ["perplexity", "tokens", "BLEU"]
    first, *_ = data.examples(model, recipe, 2)
    assert (first["source"], first["target"]) in ROWS


def test_longer_pairs_are_left_out_and_what_cannot_be_is_refused():
    recipe, data = ready(operation="repeat", longest=13)
    assert max(data.lengths(rows).max() for rows in data.pairs.values()) <= 13
    left = re.search(r", (\d+) longer, 20 tokens", data.summary)
    assert left
    assert sum(map(len, data.pairs.values())) == 80 - int(left[1])
    assert ready()[0].task.fits == {"length": ready()[0].task.longest, "reach": 6}
    recipe, _ = ready("learned:attention=softmax")
    assert recipe.task.model(recipe).scheme.max_length == recipe.task.longest
    for scheme, message in (
        ("ape-tree", "schemes: expected positions on a line, which sequences have"),
        ("retnet", "decay: expected 'none' for linear cross-attention"),
        ("learned:length=4", "longest: expected at most 4, for which learned:length=4 has positions"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe.edit(scheme=scheme).task.check(recipe.edit(scheme=scheme))
    with pytest.raises(ValueError, match="languages: expected none without --data, got 'en,de'"):
        ready(languages="en,de")[0].task.check(recipe.edit(languages="en,de"))
    with pytest.raises(ValueError, match="data: expected pairs for train, got none among 0, 80 longer"):
        ready(longest=1)


@pytest.mark.slow
def test_a_short_training_copies():
    more = {"operation": "copy", "batch": 32, "model_dim": 32, "samples": 1000, "vocabulary": 6, "length": 4}
    recipe, data = ready("ape-sequence:attention=softmax", **more)
    figures = data.measure(trained(recipe, data, 200, 1e-2), recipe, View()).figures
    assert figures["accuracy"] > 0.9
    assert figures["exact"] > 0.5


@pytest.mark.skipif(not SHARED.exists(), reason="the captions are not beside this project")
def test_captions():
    found = gathered(str(SHARED), "en,de")
    assert [len(found.splits[name]) for name in ("train", "validation", "test")] == [29_000, 1014, 1000]
    assert found.summary == ""
