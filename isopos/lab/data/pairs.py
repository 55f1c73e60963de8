"""Pairs of a source and a target: random sequences, and texts with their translations in files."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data.arrays import Arrays, Ragged, Writer
from isopos.lab.data.labelled import assigned, lines_of, two_columns, wrong
from isopos.lab.data.prepare import SPLITS, preparing
from isopos.lab.data.sources import Source, find
from isopos.lab.data.splits import Splits, stored
from isopos.lab.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["hashed", "load_texts", "names_of", "pair_source", "read_texts", "sequences", "tables"]


def sequences(
    seed: int, counts: Sequence[int], *, length: int, deviation: int, vocabulary: int
) -> dict[str, list[np.ndarray]]:
    """Random symbols below `vocabulary` in sequences of normally distributed lengths, all different, by split.

    Args:
        seed: Of the random numbers.
        counts: Sequences of train, validation and test.
        length: Mean of the lengths, which are whole numbers from 1 on.
        deviation: Their standard deviation.
        vocabulary: Different symbols.

    Raises:
        ValueError: Where there are too few different sequences.

    Examples:
        >>> found = sequences(0, (3, 1, 1), length=5, deviation=1, vocabulary=20)
        >>> [len(found[split]) for split in SPLITS], found["train"][0].dtype
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


def read_texts(source: str, languages: str, left: Counter[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """The split and the pair of lines: of tables with two columns, between which a tab is; or of two files.

    Names that contain train, valid and test make the splits; without valid, a tenth of train is held out, and where none
    contains train, a tenth is validation and a tenth is test, chosen by a hash of the source.

    Args:
        source: A table, a folder of those that end with .tsv; two files, SOURCE,TARGET; with `languages`, a folder; or
            hf:NAME[:CONFIG] of the hub.
        languages: Endings of the files in a folder, as en,de of train.en and train.de; all may be packed, as train.en.gz.
            Of a dataset its two columns or languages; by default source,target.
        left: Counts pairs with an empty side, and those that a held-out split has, too.

    Raises:
        ValueError: Where there is nothing to read, a row has not two columns, two files have not as many lines, or a line is
            no UTF-8 (with file and line).
    """
    endings = [ending.strip().lstrip(".") for ending in languages.split(",")] if languages else []
    if endings and (len(endings) != 2 or endings[0] == endings[1]):
        raise ValueError(f"languages: expected the two endings of a folder's files, as en,de, got {languages!r}")
    found = [pair_source(part) for part in _parts(source, languages)]

    def pairs() -> Iterator[tuple[str, tuple[str, str]]]:
        if len(found) == 2:
            yield from ((found[0].name, pair) for pair in _zipped(*((one.name, _lines(one)) for one in found)))
        elif source.startswith("hf:"):
            yield from _translations(found[0], endings or ["source", "target"])
        elif endings:
            yield from _side_by_side(found[0], endings)
        else:
            yield from ((name, pair) for name, _, pair in tables(found[0]))

    def full(left: Counter[str]) -> Iterator[tuple[str, tuple[str, str]]]:
        for name, pair in pairs():
            if all(side.strip() for side in pair):
                yield name, pair
            else:
                left["with an empty side"] += 1

    first = [".jsonl"] if source.startswith("hf:") else [f".{endings[0]}"] if endings else None
    names = [found[0].name] if len(found) == 2 else names_of(found[0], first)
    return assigned(full, names, hashed, left)


def hashed(pair: tuple[Any, Any]) -> tuple[bytes, bytes]:
    """What splits of pairs are chosen by, and what equal pairs have alike; see `assigned`."""
    return repr(pair[0]).encode(), repr(pair).encode()


def load_texts(
    source: str,
    languages: str,
    tokenizer: str | Tokenizer,
    vocabulary: int | None = None,
    console: "Console | None" = None,
) -> tuple[Splits[tuple[np.ndarray, np.ndarray]], Tokenizer]:
    """Tokens of the pairs of `read_texts`, prepared once, then memory-mapped, and what they are tokens of.

    Args:
        source: As there.
        languages: As there.
        tokenizer: words or bpe, learned of both sides of the train split, or a tokenizer that is there already.
        vocabulary: At most so many words or pieces; by default every word, and 8192 pieces.
        console: Shows the progress of the preparation.

    Raises:
        ValueError: As of `read_texts`.
    """
    with preparing(*map(pair_source, _parts(source, languages)), console=console) as preparation:

        def training() -> Iterator[str]:
            read = read_texts(source, languages, Counter())
            return (f"{side}\n" for split, pair in read if split == "train" for side in pair)

        def fill(writer: Writer) -> dict[str, Any]:
            sequences, left = {name: Ragged(writer, name, used.size) for name in SPLITS}, Counter()
            for name, pair in read_texts(source, languages, left):
                for side in pair:
                    sequences[name].add(used.encode(side))
            return {reason: left[reason] for reason in ("repeated", "with an empty side")}

        used = preparation.tokenizer(tokenizer, vocabulary, training, languages)
        arrays = preparation.arrays("pairs", fill, languages, used.fingerprint)
    return Splits(stored(arrays, _tokens, each=2), arrays.facts), used


def _tokens(arrays: Arrays, split: str, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and target as int64."""
    source, target = (arrays.sequence(split, 2 * row + n).astype(np.int64) for n in (0, 1))
    return source, target


def _parts(source: str, languages: str) -> list[str]:
    """The two files of a source, or itself."""
    files = [part.strip() for part in source.split(",")]
    return files if len(files) == 2 and not languages else [source]


def pair_source(source: str) -> Source:
    """The source of that name, of files or of the hub."""
    if not source:
        raise ValueError(f"data: expected files of pairs, got {source!r}")
    return find(source, tables=True) if source.startswith("hf:") else find(source)


def tables(source: Source) -> Iterator[tuple[str, int, tuple[str, str]]]:
    """Name of the table, number of the line, source and target of each row: of those in a folder that end with .tsv.

    Columns may be named source and target, in either order, in the first line. Empty lines are none.

    Raises:
        ValueError: Where there is no table, or a row has not two columns (with file and line).
    """
    found, names = False, names_of(source)
    for name, blocks in source.read(raw=False):
        for number, cells, at in two_columns(lines_of(name, blocks) if name in names else ()):
            if len(cells) != 2:
                raise wrong(name, number, f"expected a source, a tab and a target, got {len(cells)} columns")
            found = True
            yield name, number, (cells[at].strip(), cells[1 - at].strip())
    if not found:
        raise ValueError(
            f"data: expected rows of a source, a tab and a target, in files that end with .tsv, none in {source.name}"
        )


def names_of(source: Source, endings: Sequence[str] | None = None) -> list[str]:
    """Those of documents with such an ending; by default of the tables in a folder, or of all in a file."""
    wanted = tuple(endings or ([""] if Path(source.name).is_file() else [".tsv"]))
    return [name for name, _ in source.read(raw=False) if name.lower().endswith(wanted)]


def _lines(source: Source, wanted: str = "") -> Iterator[str]:
    """The lines of the document of that name, or of all, without their ends; ValueError where one is no UTF-8."""
    for name, blocks in source.read(raw=False):
        if name == wanted or not wanted:
            yield from (line.removesuffix("\n") for line in lines_of(name, blocks))


def _side_by_side(source: Source, endings: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Pairs of lines of each two files in a folder whose names differ in their endings."""
    names = names_of(source, [f".{ending}" for ending in endings])
    for name in names:
        own = endings.index(name.rpartition(".")[2])
        partner = name.removesuffix(endings[own]) + endings[1 - own]
        if partner not in names:
            raise ValueError(f"data: expected {partner} beside {name}, got none; repair --languages, or add the file")
        if own == 0:
            sides = [(one, _lines(source, one)) for one in (name, partner)]
            yield from ((name, pair) for pair in _zipped(*sides))
    if not names:
        raise ValueError(f"data: expected files that end with .{endings[0]} and .{endings[1]} in {source.name}, got none")


def _translations(source: Source, sides: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Pairs of a dataset's rows: two columns, or what a column translation holds by language. All white space is a space."""
    for name, blocks in source.read(raw=False):
        for number, line in enumerate(lines_of(name, blocks), 1):
            row = json.loads(line)
            row = row.get("translation", row)
            source_text, target_text = (row.get(side) for side in sides)
            if not isinstance(source_text, str) or not isinstance(target_text, str):
                said = f"expected texts {' and '.join(sides)}, got {', '.join(row)[:200]}; --languages names two columns"
                raise wrong(name, number, said)
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
