"""Pairs of a source and a target: random sequences, and texts with translations."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from isopos.lab.data.arrays import Arrays, Ragged, Writer
from isopos.lab.data.labelled import assign_splits
from isopos.lab.data.prepare import SPLITS, preparing
from isopos.lab.data.sources import Source, find_source, lines_of, row_error, two_columns
from isopos.lab.data.splits import Splits, stored
from isopos.lab.data.tokenizers import Tokenizer
from isopos.spec import read


def sequences(
    seed: int, counts: Sequence[int], *, length: int, deviation: int, vocabulary: int
) -> dict[str, list[np.ndarray]]:
    """Distinct sequences of random symbols below `vocabulary`, with normally distributed lengths, by split.

    Args:
        counts: Numbers of sequences in train, validation and test.
        length: Mean length; lengths are integers from 1 on.
        deviation: Standard deviation of the lengths.
        vocabulary: Number of symbols.

    Raises:
        ValueError: If there are too few different sequences.

    Examples:
        >>> rows = sequences(0, (3, 1, 1), length=5, deviation=1, vocabulary=20)
        >>> [len(rows[split]) for split in SPLITS], rows["train"][0].dtype
        ([3, 1, 1], dtype('int64'))
    """
    random, different, wanted = np.random.default_rng(seed), {}, sum(counts)
    for _ in range(100):
        lengths = np.maximum(1, random.normal(length, deviation, wanted).astype(np.int64))
        for symbols in np.split(random.integers(vocabulary, size=lengths.sum()), lengths.cumsum()[:-1]):
            different.setdefault(symbols.tobytes(), symbols)
        if len(different) >= wanted:
            every = iter(different.values())
            return {split: [next(every) for _ in range(count)] for split, count in zip(SPLITS, counts, strict=True)}
    raise ValueError(
        f"vocabulary: expected enough symbols for {wanted:,} different sequences of about {length}, got {vocabulary}; "
        "choose longer ones, or fewer samples"
    )


def read_pairs(source: str, languages: str, dropped: Counter[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The split and the texts of each pair: rows of tables with two columns, or lines of two files.

    Names that contain train, valid and test make the splits; without valid, a tenth of train is held out, and where none
    contains train, a tenth is validation and a tenth is test, chosen by a hash of the source.

    Args:
        source: A table with a tab between the columns, or a folder of .tsv; two files, SOURCE,TARGET; with `languages`, a
            folder; or hf:NAME[:CONFIG] of the hub.
        languages: Suffixes of the files in a folder, as en,de for train.en and train.de; all may be packed, as train.en.gz.
            For a dataset its two columns or languages; by default source,target.
        dropped: Counts dropped pairs: pairs with an empty side, and pairs that a later split has, too.

    Raises:
        ValueError: If there is nothing to read, a row does not have two columns, two files differ in their numbers of
            lines, or a line is not UTF-8 (with file and line).
    """
    option = read("languages", languages)
    endings = [piece.text.lstrip(".") for piece in option.split(",")] if languages else []
    if endings and (len(endings) != 2 or endings[0] == endings[1]):
        raise option.wrong("the two endings of a folder's files, as en,de")
    sources = [pair_source(part) for part in _parts(source, languages)]

    def pairs() -> Iterator[tuple[str, tuple[str, str]]]:
        if len(sources) == 2:
            yield from ((sources[0].name, pair) for pair in _zipped(*((one.name, _lines(one)) for one in sources)))
        elif source.startswith("hf:"):
            yield from _translations(sources[0], endings or ["source", "target"])
        elif endings:
            yield from _side_by_side(sources[0], endings)
        else:
            yield from ((name, pair) for name, _, pair in table_pairs(sources[0]))

    def full(dropped: Counter[str]) -> Iterator[tuple[str, tuple[str, str]]]:
        for name, pair in pairs():
            if all(side.strip() for side in pair):
                yield name, pair
            else:
                dropped["with an empty side"] += 1

    first = [".jsonl"] if source.startswith("hf:") else [f".{endings[0]}"] if endings else None
    names = [sources[0].name] if len(sources) == 2 else table_names(sources[0], first)
    return assign_splits(full, names, lambda pair: (repr(pair[0]).encode(), repr(pair).encode()), dropped)


def load_pairs(
    source: str,
    languages: str,
    tokenizer: str | Tokenizer,
    vocabulary: int | None = None,
    console: Console | None = None,
) -> tuple[Splits[tuple[np.ndarray, np.ndarray]], Tokenizer]:
    """Tokens of the pairs of `read_pairs`, prepared once, then memory-mapped; and their tokenizer.

    Args:
        tokenizer: "words" or "bpe", trained on both sides of the train split, or a tokenizer.
        vocabulary: Largest number of words or pieces; by default all words, or 8192 pieces.

    Raises:
        ValueError: As `read_pairs`.
    """
    with preparing(*map(pair_source, _parts(source, languages)), console=console) as preparation:

        def training() -> Iterator[str]:
            read = read_pairs(source, languages, Counter())
            return (f"{side}\n" for split, pair in read if split == "train" for side in pair)

        def fill(writer: Writer) -> dict[str, Any]:
            sequences, dropped = {name: Ragged(writer, name, used.size) for name in SPLITS}, Counter()
            for name, pair in read_pairs(source, languages, dropped):
                for side in pair:
                    sequences[name].add(used.encode(side))
            return {reason: dropped[reason] for reason in ("repeated", "with an empty side")}

        used = preparation.tokenizer(tokenizer, vocabulary, training, languages)
        arrays = preparation.arrays("pairs", fill, languages, used.fingerprint)
    return Splits(stored(arrays, _tokens, each=2), arrays.facts), used


def _tokens(arrays: Arrays, split: str, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and target as int64."""
    source, target = (arrays.sequence(split, 2 * row + n).astype(np.int64) for n in (0, 1))
    return source, target


def _parts(source: str, languages: str) -> list[str]:
    """The two files of a source, or the source."""
    files = [] if Path(source).exists() else [piece.text for piece in read("data", source).split(",")]
    return files if len(files) == 2 and not languages else [source]


def pair_source(source: str) -> Source:
    """The files or the dataset of that name; see `find_source`."""
    if not source:
        raise ValueError(f"data: expected files of pairs, got {source!r}")
    return find_source(source, tables=not source.lower().endswith(".csv"))


def table_pairs(source: Source) -> Iterator[tuple[str, int, tuple[str, str]]]:
    """Name of the table, number of the line, source and target of each row of a table or of the .tsv files in a folder.

    The first line may name the columns source and target, in either order. Empty lines are skipped.

    Raises:
        ValueError: If there is no table, or a row does not have two columns (with file and line).
    """
    any_row, names = False, table_names(source)
    for name, blocks in source.read(raw=False):
        for number, cells, at in two_columns(lines_of(name, blocks) if name in names else ()):
            if len(cells) != 2:
                raise row_error(name, number, f"expected a source, a tab and a target, got {len(cells)} columns")
            any_row = True
            yield name, number, (cells[at].strip(), cells[1 - at].strip())
    if not any_row:
        raise ValueError(
            f"data: expected rows of a source, a tab and a target, in files that end with .tsv, none in {source.name}"
        )


def table_names(source: Source, endings: Sequence[str] | None = None) -> list[str]:
    """Names of the documents with such a suffix; by default tables of a folder, or all documents of a file."""
    wanted = tuple(ending.lower() for ending in endings or ([""] if Path(source.name).is_file() else [".tsv"]))
    return [name for name, _ in source.read(raw=False) if name.lower().endswith(wanted)]


def _lines(source: Source, wanted: str = "") -> Iterator[str]:
    """The lines of the document of that name, or of all, without line ends; ValueError if a line is not UTF-8."""
    for name, blocks in source.read(raw=False):
        if name == wanted or not wanted:
            yield from (line.removesuffix("\n") for line in lines_of(name, blocks))


def _side_by_side(source: Source, endings: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Pairs of lines of two files in a folder whose names differ in their suffixes."""
    names = table_names(source, [f".{ending}" for ending in endings])
    for name in names:
        stem, _, ending = name.rpartition(".")
        side = [one.lower() for one in endings].index(ending.lower())
        expected = f"{stem}.{endings[1 - side]}"
        partner = next((other for other in names if other.lower() == expected.lower()), None)
        if partner is None:
            raise ValueError(f"data: expected {expected} next to {name}, got none; repair --languages, or add the file")
        if side == 0:
            sides = [(one, _lines(source, one)) for one in (name, partner)]
            yield from ((name, pair) for pair in _zipped(*sides))
    if not names:
        raise ValueError(f"data: expected files that end with .{endings[0]} and .{endings[1]} in {source.name}, got none")


def _translations(source: Source, sides: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Pairs of a dataset: two columns, or two languages of a column `translation`. Runs of white space become a space."""
    for name, blocks in source.read(raw=False):
        for number, line in enumerate(lines_of(name, blocks), 1):
            row = json.loads(line)
            row = row.get("translation", row)
            source_text, target_text = (row.get(side) for side in sides)
            if not isinstance(source_text, str) or not isinstance(target_text, str):
                problem = f"expected texts {' and '.join(sides)}, got {', '.join(row)[:200]}; --languages names two columns"
                raise row_error(name, number, problem)
            yield name, (" ".join(source_text.split()), " ".join(target_text.split()))


def _zipped(one: tuple[str, Iterator[str]], other: tuple[str, Iterator[str]]) -> Iterator[tuple[str, str]]:
    (source, sources), (target, targets), counts = one, other, [0, 0]
    for pair in zip_longest(sources, targets):
        there = [side is not None for side in pair]
        counts = [count + more for count, more in zip(counts, there, strict=True)]
        if all(there):
            yield pair
    if counts[0] != counts[1]:
        raise ValueError(
            f"data: expected as many lines in {source} as in {target}, a pair in each, got {counts[0]} and {counts[1]}"
        )
