"""Test tokenised text: sources, splits, batches, windows and the cache."""

import bz2
import gzip
import hashlib
import io
import itertools
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from rich.console import Console

from isopos.lab.data import corpora, prepare, sources
from isopos.lab.data.corpora import Corpus, load_corpus
from isopos.lab.data.sources import whole_lines
from isopos.lab.data.tokenizers import BPE, Bytes, Words, load_tokenizer
from isopos.lab.tasks.language import Language
from isopos.lab.tasks.task import Recipe

PROSE = "".join(f"line {n} of a text with café and words number {n % 7}\n" for n in range(300))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """An empty cache for one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ISOPOS_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(bytes(range(256)) * 2)
    (tmp_path / "a.txt").write_bytes(b"first " * 200)
    (tmp_path / "empty").write_bytes(b"")
    return tmp_path


def made(train, validation, test=()):
    parts = [np.array(part, np.uint8) for part in (train, validation, test)]
    return Corpus("x", "", Bytes(), *parts, sizes=dict(zip(corpora.SPLITS, map(len, parts), strict=True)))


def zipped(path, **files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"wiki.{name}.tokens", text)
    return str(path)


def tarred(path, books, suffix="txt"):
    with tarfile.open(path, "w:xz") as archive:
        for name, text in books.items():
            info = tarfile.TarInfo(f"corpus/{name}.{suffix}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    return str(path)


def test_a_folder_is_read_in_sorted_order_and_any_byte_counts(folder, cache):
    whole = b"first " * 200 + bytes(range(256)) * 2
    read = load_corpus(str(folder), 8)
    assert bytes(read.train) + bytes(read.validation) == whole
    assert read.sha256 == hashlib.sha256(whole).hexdigest()
    assert len(read.validation) == len(whole) // 10
    assert not len(read.test)
    assert read.bytes_per_token("train") == 1
    assert not any(cache.iterdir())


def test_the_default_text_is_the_language_reference():
    read = load_corpus("", 256)
    assert len(read.train) > 300_000
    assert b"statement" in bytes(read.validation)


def test_batches_are_pure_functions_of_seed_and_step(folder):
    read = load_corpus(str(folder), 8)
    tokens, targets = read.batch(0, 5, 4, 8)
    again = read.batch(0, 5, 4, 8)
    assert tokens.shape == targets.shape == (4, 8)
    assert tokens.equal(again[0])
    assert tokens[:, 1:].equal(targets[:, :-1])
    drawn = [read.batch(seed, step, 4, 8)[0].numpy().tobytes() for seed in range(3) for step in range(3)]
    assert len(set(drawn)) == 9  # no seed repeats what another one has at another step


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_the_batch_of_one(ranks):
    read = made(np.arange(200), np.arange(50))
    whole = read.batch(3, 7, 6, 5)
    parts = [read.batch(3, 7, 6, 5, rank, ranks) for rank in range(ranks)]
    assert all(torch.cat(part).equal(side) for part, side in zip(zip(*parts, strict=True), whole, strict=True))


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="batch: expected a multiple of the 4 ranks, and a rank below, got 6 and 0"):
        made(np.arange(200), np.arange(50)).batch(0, 0, 6, 5, 0, 4)


def test_batches_reach_both_ends_of_the_training_part_and_nothing_else():
    read = made(np.arange(20), np.arange(20, 100))
    seen = torch.cat([torch.cat(read.batch(0, step, 8, 4)) for step in range(200)])
    assert seen.min() == 0
    assert seen.max() == 19


def test_windows_cover_the_tail_once():
    read = made(np.arange(50), np.arange(50, 100))
    inputs = torch.cat([tokens.flatten() for tokens, _ in read.windows(7, 1000, 3)])
    assert inputs.tolist() == list(range(50, 50 + 49))
    targets = torch.cat([targets.flatten() for _, targets in read.windows(7, 21, 2)])
    assert targets.tolist() == list(range(51, 51 + 21))
    assert list(read.windows(50, None, 2)) == []


@pytest.mark.parametrize("tokens", [9, 10, 11, 20, 47])
@pytest.mark.parametrize("scored", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 4])
def test_every_token_with_enough_context_is_scored_once(tokens, scored, count):
    read = made([], [], np.arange(tokens))
    seen = []
    for inputs, targets in read.windows(8, None, count, "test", scored):
        assert inputs.shape[1] == 8
        assert inputs[:, -1].add(1).equal(targets[:, -1])
        seen += targets.flatten().tolist()
    assert seen == list(range(8 - scored + 1, tokens))


def test_a_window_scores_some_of_its_tokens():
    with pytest.raises(ValueError, match="scored: expected 1 to the 8 tokens of a window, got 9"):
        next(made([], np.arange(20)).windows(8, None, 1, scored=9))


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="expected tokens in test, got none in x; it has train, validation"):
        made([1], [2]).split("test")
    with pytest.raises(ValueError, match="expected one of train, validation, test, got 'dev'"):
        made([1], [2]).split("dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b"short", "at least 9 tokens of train .* of 8, got 5 in .*; use more")],
)
def test_what_cannot_be_read_is_refused(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(path), 8)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        load_corpus(str(tmp_path), 8)


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_the_names_of_files_make_the_splits(tmp_path, tokenizer):
    parts = {"valid": "c d <unk>\n", "test": "e\n", "train": "a b c d a <unk>\n\n"}
    path = tmp_path / "wiki"
    path.mkdir()
    for name, text in parts.items():
        (path / f"wiki.{name}.tokens").write_text(text)
    (path / "LICENSE.md").write_text("of no split")
    packed = zipped(tmp_path / "wiki.zip", **parts)
    one, other = (load_corpus(str(source), 2, tokenizer=tokenizer) for source in (path, packed))
    for read in (one, other):
        texts = [read.tokenizer.decode(read.split(split)).replace(" \n", "\n") for split in corpora.SPLITS]
        if tokenizer == "bytes":
            assert texts == [parts["train"], parts["valid"], parts["test"]]
        else:
            assert texts == ["a b c d a <unk>\n\n", "c d <unk>\n", "<unk>\n"]
        assert read.bytes_per_token("test") == len(parts["test"]) / len(read.test)


def test_files_of_splits_without_a_train_file_are_refused(tmp_path):
    path = zipped(tmp_path / "wiki.zip", valid="a b", test="c d")
    with pytest.raises(ValueError, match=r"expected a file of train as well as .*wiki.test.tokens, .*got none"):
        load_corpus(path, 2)


def test_texts_of_no_split_next_to_those_of_splits_are_refused(tmp_path):
    path = zipped(tmp_path / "wiki.zip", train="a b", valid="c d", more="e f")
    with pytest.raises(
        ValueError, match=r"expected train, valid or test in the name of every text, .* got .*wiki.more.tokens"
    ):
        load_corpus(path, 2)


def test_a_source_that_disappears_is_named(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(PROSE)
    moved = tmp_path / "text.txt", tmp_path / "elsewhere.txt"
    monkeypatch.setattr(corpora._Text, "write", lambda *_: moved[0].rename(moved[1]) and moved[0].open())
    with pytest.raises(ValueError, match=r"^data: cannot read .*text.txt: No such file"):
        load_corpus(str(tmp_path / "text.txt"), 8, tokenizer="words", cache=tmp_path / "cache")


def test_code_is_no_split(tmp_path):
    (tmp_path / "train.py").write_text("x = 1\n" * 20)
    (tmp_path / "val.py").write_text("y = 1\n" * 20)
    assert len(load_corpus(str(tmp_path), 4).train) == 216


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_packed_files_are_read_as_streams(tmp_path, suffix):
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes({".gz": gzip, ".xz": lzma, ".bz2": bz2}[suffix].compress(PROSE.encode()))
    read = load_corpus(str(path), 8)
    assert read.tokenizer.decode(read.train) + read.tokenizer.decode(read.validation) == PROSE
    assert len(read.validation) == pytest.approx(len(PROSE.encode()) / 10, abs=60)
    assert isinstance(read.train, np.memmap)


def books(count=30):
    return {f"book{n}": f"\ufeffbook {n} begins\r\nand ends {n}".encode() * 3 for n in range(count)}


def test_books_are_whole_and_in_one_split(tmp_path):
    read = load_corpus(tarred(tmp_path / "novels.tar.xz", books()), 8)
    held = [read.tokenizer.decode(read.split(split)) for split in corpora.SPLITS]
    assert [text.count("\nand") for text in held] == [28 * 3, 3, 3]
    assert "\r" not in "".join(held)
    assert "".join(held).count("\ufeff") == 30 * 2  # those within a book
    numbers = [{line.split()[1] for line in text.splitlines() if line.startswith("book")} for text in held]
    assert sum(map(len, numbers)) == len(set.union(*numbers)) == 30
    assert load_corpus(tarred(tmp_path / "renamed.tar.xz", dict(reversed(books().items()))), 8).validation.tolist() == (
        read.validation.tolist()
    )


def test_two_books_are_too_few(tmp_path):
    with pytest.raises(ValueError, match="expected one text or at least 3"):
        load_corpus(tarred(tmp_path / "two.tar.xz", books(2)), 8)


def test_byte_order_marks_and_crlf_go_wherever_blocks_end(tmp_path):
    from isopos.lab.data.sources import _normal

    text = b"\xef\xbb\xbfone\r\ntwo\rthree\r\n\r\nend"
    for size in range(1, len(text) + 1):
        blocks = (text[n : n + size] for n in range(0, len(text), size))
        assert b"".join(_normal(blocks)) == b"one\ntwo\rthree\n\nend\n"
    assert list(_normal([])) == []


def test_rows_of_csv_are_lines(tmp_path):
    for name in ("train", "valid"):
        rows = '""\n" = Title = \n"\n" said ""so"" , \n"\nplain\n' * 9
        (tmp_path / f"x.{name}.csv.gz").write_bytes(gzip.compress(rows.encode()))
    read = load_corpus(str(tmp_path), 8)
    assert read.tokenizer.decode(read.train) == '\n = Title = \n said "so" , \nplain\n' * 9


BROKEN = {
    "two.csv": (b"one\ntwo,columns\n", r"two.csv, line 2: expected 1 columns, as the first line has, got 2"),
    "columns.csv": (b"one,two\n", r"columns.csv, line 1: expected one column of text, got 2; a file that is no table"),
    "quote.csv": (b'one\n"two"x\n', r"quote.csv, line \d: expected CSV, got"),
    "cut.txt.gz": (gzip.compress(PROSE.encode())[:-400], r"cut.txt beyond line \d+: "),
    "no.zip": (b"PK no archive", r"cannot read .*no.zip: File is not a zip file"),
    "no.tar.xz": (b"no archive", r"cannot read .*no.tar.xz: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_its_line(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / name), 8)


def test_words_that_are_no_utf8_are_named_with_file_and_line(tmp_path, cache):
    lines = [b"a line of words"] * 2_000
    lines[1_234] = b"caf\xe9"
    (tmp_path / "latin.txt").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"latin.txt, line 1235: expected UTF-8, got the byte 0xe9; repair or"):
        load_corpus(str(tmp_path / "latin.txt"), 8, tokenizer="words")
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_words_are_as_wikitext_counts_them(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("b a <eos> a\n\na c\n" * 12)
    read = load_corpus(str(path), 4, tokenizer="words")
    assert read.tokenizer.words == ("<eos>", "a", "b", "c", "<unk>")
    whole = np.concatenate([read.train, read.validation])
    assert whole.dtype == np.uint8
    assert whole.tolist() == [2, 1, 0, 1, 0, 0, 1, 3, 0] * 12
    assert read.tokenizer.encode("c zebra\n").tolist() == [3, 4, 0]


def test_a_tokenizer_that_is_there_serves_another_text(tmp_path):
    (tmp_path / "a.txt").write_text("one two three\n" * 20)
    (tmp_path / "b.txt").write_text("three two four\n" * 20)
    first = load_corpus(str(tmp_path / "a.txt"), 4, tokenizer="words")
    second = load_corpus(str(tmp_path / "b.txt"), 4, tokenizer=first.tokenizer)
    assert second.tokenizer.decode(second.train[:4]) == "three two <unk> \n"
    with pytest.raises(ValueError, match=r"or <unk> for others, got 'four'; learn .* \(in .*b.txt, from line 1 on\)"):
        load_corpus(str(tmp_path / "b.txt"), 4, tokenizer=Words(["<eos>", "two", "three"]))


def test_bad_settings(tmp_path):
    for settings, message in (
        ({"tokenizer": "letters"}, "tokenizer: expected one of bytes, words, bpe, got 'letters'"),
        ({"vocabulary": 10}, "vocabulary: expected none with bytes"),
        ({"tokenizer": "words", "vocabulary": 1}, "vocabulary: expected at least 2 words"),
    ):
        with pytest.raises(ValueError, match=message):
            load_corpus("", 8, **settings)


def test_preparation_is_done_once_and_again_when_the_text_changes(tmp_path, cache, monkeypatch):
    path, reads = tmp_path / "text.txt", []
    path.write_text(PROSE)
    monkeypatch.setattr(prepare, "survey", lambda *a, f=prepare.survey: reads.append("survey") or f(*a))
    monkeypatch.setattr(corpora._Text, "write", lambda *a, f=corpora._Text.write: reads.append("build") or f(*a))
    first = load_corpus(str(path), 8, tokenizer="words")
    again = load_corpus(str(path), 8, tokenizer="words")
    assert reads == ["survey", "build"]
    assert again.sha256 == first.sha256
    assert again.train.tolist() == first.train.tolist()
    monkeypatch.chdir(tmp_path)  # another name
    assert load_corpus("text.txt", 8, tokenizer="words").sha256 == first.sha256
    assert reads == ["survey", "build", "survey"]
    reads.pop()
    os.utime(path, ns=(0, 0))  # a look, but the same text
    assert load_corpus(str(path), 8, tokenizer="words").sha256 == first.sha256
    assert reads == ["survey", "build", "survey"]
    assert load_corpus(str(path), 8, tokenizer="words", vocabulary=9).vocabulary == 9
    assert reads == ["survey", "build", "survey", "build"]
    path.write_text(PROSE + PROSE)
    assert load_corpus(str(path), 8, tokenizer="words").sha256 != first.sha256
    assert reads[4:] == ["survey", "build"]


def test_a_saved_tokenizer_finds_the_tokens_that_are_there(tmp_path, cache, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    first = load_corpus(str(path), 8, tokenizer="words", vocabulary=20)
    first.tokenizer.save(tmp_path)
    monkeypatch.setattr(corpora._Text, "parts", None)  # not again
    again = load_corpus(str(path), 8, tokenizer=load_tokenizer(tmp_path))
    assert again.sha256 == first.sha256
    assert again.train.tolist() == first.train.tolist()


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, cache):
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    monkeypatch.setattr(corpora, "_encoded", lambda *a, f=corpora._encoded: (path.write_text("other"), f(*a))[1])
    with pytest.raises(ValueError, match="to stay as it is while it is read"):
        load_corpus(str(path), 8, tokenizer="words")
    assert not list(cache.glob("stream-*/"))


def test_a_large_plain_text_is_mapped_with_the_same_result(tmp_path, monkeypatch, folder):
    small = load_corpus(str(folder), 8)
    monkeypatch.setattr(corpora, "SMALL", 100)
    large = load_corpus(str(folder), 8)
    assert isinstance(large.train, np.memmap)
    assert large.sha256 == small.sha256
    assert large.train.tolist() == small.train.tolist()
    assert large.validation.tolist() == small.validation.tolist()


def test_a_damaged_cache_is_noticed(tmp_path, cache):
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    load_corpus(str(path), 8, tokenizer="words")
    (stream,) = cache.glob("*/train.bin")
    stream.write_bytes(stream.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"train\.bin: its content is not what was written; remove .*, and it is prepared again"
    ):
        load_corpus(str(path), 8, tokenizer="words")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(PROSE)
    with pytest.raises(ValueError, match=r"cache: cannot write .*; ISOPOS_CACHE names another folder"):
        load_corpus(str(tmp_path / "text.txt"), 8, tokenizer="words", cache=tmp_path / "text.txt" / "below")


def test_progress_is_shown_on_a_console(tmp_path):
    (tmp_path / "text.txt").write_text(PROSE)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    load_corpus(str(tmp_path / "text.txt"), 8, tokenizer="words", console=console)
    for stage in ("reading", "learning the vocabulary", "writing tokens"):
        assert stage in console.file.getvalue()


PREPARE = """
import sys
from isopos.lab.data import corpora
read = corpora.load_corpus(sys.argv[1], 8, tokenizer="words")
print(read.sha256, len(read.train), int(read.train.sum()))
"""


def _start(path):
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_that_start_at_once_prepare_one_folder(tmp_path, cache):
    path = tmp_path / "text.txt"
    path.write_text(PROSE * 300)
    found = [process.communicate() for process in [_start(path) for _ in range(3)]]
    assert len(set(found)) == 1, found
    assert found[0][0].split()[1] == str(len(load_corpus(str(path), 8, tokenizer="words").train))
    assert len(list(cache.glob("*/train.bin"))) == len(list(cache.glob("*/tokenizer.json"))) == 1


@pytest.mark.slow
def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path, cache):
    path = tmp_path / "text.txt"
    path.write_text(PROSE * 1000)
    process = _start(path)
    while process.poll() is None and not list(cache.glob(".*/train.bin")):
        pass
    process.kill()
    process.communicate()
    assert list(cache.glob(".*/train.bin"))
    assert not list(cache.glob("[!.]*/train.bin"))
    assert len(load_corpus(str(path), 8, tokenizer="words").train) > 2_000_000
    assert not list(cache.glob(".*/train.bin"))


def test_pieces_are_learned_from_the_train_split_and_kept(tmp_path, cache, monkeypatch):
    path = zipped(tmp_path / "wiki.zip", train=PROSE, valid="line of a text\nqqqq\n" * 9, test="café")
    read = load_corpus(path, 8, tokenizer="bpe", vocabulary=300)
    assert read.vocabulary == 300
    assert read.train.dtype == np.uint16
    assert read.tokenizer.decode(read.train) == PROSE
    assert read.tokenizer.decode(read.test) == "café\n"
    assert 3 < read.bytes_per_token("train") < 10
    assert len(read.tokenizer.encode(" text")) == 1
    assert len(read.tokenizer.encode("qqqq")) == 4
    monkeypatch.setattr(BPE, "learn", None)  # not again
    again = load_corpus(path, 8, tokenizer="bpe", vocabulary=300)
    assert again.train.tolist() == read.train.tolist()
    again.tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(PROSE).tolist() == read.train.tolist()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder of parquet files, which `datasets` reads like a dataset of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    datasets.disable_progress_bars()
    rows = {
        "train": ["", " = Title = \n", " some words \n"] * 50,
        "validation": [" held out \n"] * 9,
        "test": ["no end"] * 9,
    }
    (tmp_path / "data").mkdir()
    for split, texts in rows.items():
        datasets.Dataset.from_dict({"text": texts, "n": list(range(len(texts)))}).to_parquet(
            tmp_path / "data" / f"{split}.parquet"
        )
    return tmp_path / "data"


def test_rows_of_datasets_are_lines_of_its_splits(hub):
    read = load_corpus(f"hf:{hub}", 8)
    assert [read.tokenizer.decode(read.split(split)) for split in corpora.SPLITS] == [
        "\n = Title = \n some words \n" * 50,
        " held out \n" * 9,
        "no end\n" * 9,
    ]
    words = load_corpus(f"hf:{hub}:default", 8, tokenizer="words")
    assert words.tokenizer.decode(words.train[:4]) == "\n= Title = "


def test_a_dataset_of_one_split_holds_its_tail_out(hub):
    (hub / "validation.parquet").unlink()
    (hub / "test.parquet").unlink()
    read = load_corpus(f"hf:{hub}", 8)
    assert len(read.train) + len(read.validation) == 50 * len("\n = Title = \n some words \n")
    assert not len(read.test)


def test_bad_datasets(hub, tmp_path):
    with pytest.raises(ValueError, match=r"expected hf:NAME or hf:NAME:CONFIG .* gave \w+: "):
        load_corpus(f"hf:{tmp_path / 'absent'}", 8)
    import datasets

    (tmp_path / "other").mkdir()
    datasets.Dataset.from_dict({"sentence": ["a"] * 9, "label": [1] * 9}).to_csv(tmp_path / "other" / "train.csv")
    with pytest.raises(ValueError, match=r"expected a column text in .*, split train, got .*sentence, label"):
        load_corpus(f"hf:{tmp_path / 'other'}", 8)


def read_text(path, lines):
    """Write and read a text of words; print their number and the peak memory of this process in bytes."""
    import resource

    words = [f"word{n:05}" for n in range(50_000)]
    with open(path, "w") as file:
        for n in range(int(lines)):
            file.write(" ".join(words[(n * 97 + k * k) % 50_000] for k in range(50)) + "\n")
    found = load_corpus(path, 512, tokenizer="words")
    for step in range(100):
        found.batch(0, step, 8, 512)
    unit = 1 if sys.platform == "darwin" else 1024
    print(len(found.train), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path, cache):
    """103 million words fit into 2 GiB. Only the memory map of the tokens grows, by at most 4 bytes per word."""
    pytest.importorskip("resource", reason="this system does not tell peak memory")
    found = []
    for lines in (20_000, 120_000):
        environment = {"ISOPOS_CACHE": str(cache)}
        process = Forked(tmp_path, read_text, str(tmp_path / f"{lines}.txt"), str(lines), environment=environment)
        found.append([int(number) for number in process.communicate(timeout=300)[0].split()])
    (words, memory), (more_words, more_memory) = found
    assert more_words > 5_500_000
    growth = max(0, more_memory - memory) / (more_words - words)
    assert growth < 8, f"{growth} bytes a word"
    assert memory + growth * 103e6 < 2 << 30, f"{memory >> 20} MiB and {growth} bytes a word"


SHARED = Path(corpora.__file__).parents[3] / "shared" / "data"


def real(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the real data {path} is absent")
    return str(path)


def test_wikitext_2_has_its_known_counts():
    read = load_corpus(real("wikitext2"), 512, tokenizer="words")
    assert [len(read.split(split)) for split in corpora.SPLITS] == [2_088_628, 217_646, 245_569]
    assert read.vocabulary == 33_278
    assert read.train.dtype == np.uint16


@pytest.mark.slow
def test_novels_are_split_by_book():
    read = load_corpus(real("novels/novels83.tar.xz"), 512)
    assert [len(read.split(split)) > 1_000_000 for split in corpora.SPLITS] == [True] * 3
    assert sum(read.sizes.values()) < 66_471_152
    assert not (read.validation == 13).any()
    assert (read.train == 10).sum() > 100_000


def test_a_table_that_was_read_as_rows_is_read_as_lines(tmp_path):
    """The cache stores surveys of rows and surveys of lines separately."""
    (tmp_path / "a.csv").write_text("text\n" + "".join(f'"row {n}, quoted"\n' for n in range(60)))
    whole = load_corpus(str(tmp_path / "a.csv"), 8).sha256
    for root in ("one", "other"):
        source = sources.find_source(str(tmp_path / "a.csv"), tables=root == "one")
        with prepare.preparing(source, root=tmp_path / "cache") as preparation:
            first = preparation.surveys
        assert first == [sources.survey(source, raw=False)]
    assert load_corpus(str(tmp_path / "a.csv"), 8, cache=tmp_path / "cache").sha256 == whole


def test_nothing_in_a_folder_is_left_out_silently(tmp_path, monkeypatch):
    folder, other = tmp_path / "texts", tmp_path / "other"
    for path in (folder / "below", other):
        path.mkdir(parents=True)
        (path / "a.txt").write_text(PROSE)
    assert [name for name, _ in sources.find_source(str(folder)).documents()] == [f"{folder}/below/a.txt"]
    scan = os.scandir

    def unreadable(path):
        if str(path).endswith("below"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", unreadable)
        with pytest.raises(ValueError, match=f"data: cannot read {folder}/below: Permission denied"):
            sources.find_source(str(folder))
    for link, target, message in (
        ("linked", other, f"expected folders, got the link {folder}/linked, which is not followed"),
        ("broken.txt", tmp_path / "gone", f"cannot read {folder}/broken.txt: No such file"),
        ("endless.txt", "/dev/zero", f"cannot read {folder}/endless.txt: expected a plain file"),
    ):
        (folder / link).symlink_to(target)
        with pytest.raises(ValueError, match=f"data: {message}"):
            sources.find_source(str(folder))
        (folder / link).unlink()
    (folder / "linked.txt").symlink_to(other / "a.txt")  # a file is read where it is
    assert len(list(sources.find_source(str(folder)).documents())) == 2


@pytest.mark.parametrize(
    "name", ["{}.txt", "{}.md", "{}.text", "wiki.{}.en", "{}ing.txt", "{}set.txt", "wiki.{}.raw.en", "{}-00000-of-00001"]
)
def test_names_of_splits(tmp_path, name):
    """No text of another split is in train, and files without a split are named."""
    for word, letter in {"train": "a", "valid": "b", "test": "c"}.items():
        file = "dev.txt" if (word, name) == ("valid", "{}ing.txt") else name.format(word)
        (tmp_path / file).write_text(letter * 200)
    (tmp_path / "README.html").write_text("d" * 200)
    corpus = load_corpus(str(tmp_path), 8)
    found = [bytes(part) for part in (corpus.train, corpus.validation, corpus.test)]
    assert found == [b"a" * 200, b"b" * 200, b"c" * 200]
    assert [Path(left).name for left in corpus.left] == ["README.html"]
    task = Language(data=str(tmp_path), length=8)
    summary = "200 + 200 bytes, left out without a split in the name: README.html"
    assert task.load(Recipe(task=task)).summary == summary


@pytest.mark.parametrize("where", ["alone", "in a folder"])
def test_what_has_no_end_is_refused_before_it_is_read(tmp_path, where):
    os.mkfifo(tmp_path / "pipe.txt")
    source = tmp_path / "pipe.txt" if where == "alone" else tmp_path
    with pytest.raises(
        ValueError, match=r"data: cannot read .*pipe\.txt: expected a plain file, got a folder, a pipe or a device"
    ):
        load_corpus(str(source), 8)
    with pytest.raises(ValueError, match="data: cannot read /dev/zero: expected a plain file"):
        load_corpus("/dev/zero", 8)


@pytest.mark.parametrize("name", ["valid.txt", "wiki.test.tokens", "validation.csv"])
@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_split_that_is_empty_is_not_replaced_by_another_text(tmp_path, cache, name, tokenizer):
    (tmp_path / "train.txt").write_text(PROSE)
    (tmp_path / name).write_text("")
    split = "test" if "test" in name else "validation"
    with pytest.raises(ValueError, match=f"data: expected text in .*{name}, which is {split} by its name, got none"):
        load_corpus(str(tmp_path), 8, tokenizer=tokenizer)


def test_an_archive_that_unpacks_without_limit_is_refused(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(sources, "UNPACKED", 1 << 21)
    with gzip.open(tmp_path / "bomb.txt.gz", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for n in range(64):
            archive.writestr(f"{n}.txt", bytes(1 << 20))
    for name in ("bomb.txt.gz", "bomb.zip"):
        with pytest.raises(
            ValueError, match=rf"data: expected text, but .*{name[:8]}.* unpacks to more than 100 times its size"
        ):
            load_corpus(str(tmp_path / name), 8)
    assert not list(cache.glob("stream-*"))


def test_text_without_lines_is_cut_in_time_that_grows_as_it_does():
    """The reader joins each block at most twice, for any preceding text."""

    class Block(bytes):
        scanned = 0

        def __contains__(self, part):
            Block.scanned += len(self)
            return super().__contains__(part)

    blocks = [Block(b"x" * 1000) for _ in range(400)]
    assert b"".join(whole_lines(iter(blocks))) == b"x" * 400_000
    assert Block.scanned <= 4 * 400_000


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_cut_as_by_the_plain_way(seed):
    def plain(blocks):
        held = b""
        for block in blocks:
            held += block
            cut = held.rfind(b"\n") + 1 or held.rfind(b" ") + 1
            if cut:
                yield held[:cut]
                held = held[cut:]
        if held:
            yield held

    random = np.random.default_rng(seed)
    text = bytes(random.choice([*b"aaaaaa \n"], 400).tolist())
    cuts = sorted(random.integers(0, 400, 40).tolist())
    blocks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, 400])]
    assert list(whole_lines(blocks)) == list(plain(blocks))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_that_has_a_name_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "books.zip", "w") as archive:
        for text in ("one", "two"):
            archive.writestr("a.txt", text)
    with pytest.raises(
        ValueError, match=r"^data: expected files of different names in .*books.zip, got a.txt twice; pack it"
    ):
        list(sources.find_source(str(tmp_path / "books.zip")).documents())


def test_members_of_a_zip_are_read_in_sorted_order(tmp_path):
    with zipfile.ZipFile(tmp_path / "books.zip", "w") as archive:
        for name in ("c.txt", "a.txt", "d/b.txt", "B.txt"):
            archive.writestr(name, name)
    found = [
        (name.rpartition(".zip/")[2], b"".join(blocks))
        for name, blocks in sources.find_source(str(tmp_path / "books.zip")).documents()
    ]
    assert found == [(name, name.encode()) for name in ("B.txt", "a.txt", "c.txt", "d/b.txt")]
