"""Pairs of a source and a target: random sequences, and texts with their translations in files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from isopos.lab.data import cache
from isopos.lab.data.arrays import Arrays, Ragged, Writer, key_of, prepared
from isopos.lab.data.labelled import check_same, surveyed
from isopos.lab.data.prepare import SPLITS, named_split, split_rule
from isopos.lab.data.sources import Source, find
from isopos.lab.data.tokenizers import BPE, Tokenizer, Words, load_tokenizer

__all__ = ["Pairs", "Stored", "documents", "load_texts", "read_texts", "sequences", "split", "tables"]

Side = TypeVar("Side")
FORMAT = 1  # of a prepared folder


@dataclass(frozen=True)
class Pairs(Generic[Side]):
    """Sources and targets by split, and how many there were besides.

    Args:
        splits: Those of train, validation and test; the last may be empty.
        left: Pairs that are not among them, by the reason why.

    Raises:
        ValueError: Where train or validation has none.
    """

    splits: Mapping[str, Sequence[tuple[Side, Side]]]
    left: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in SPLITS[:2]:
            if not self.splits[name]:
                count = sum(map(len, self.splits.values()))
                raise ValueError(f"data: expected pairs for {name}, got none among {count}{self.said}; give it more")

    @property
    def said(self) -> str:
        """What was left out, for a summary."""
        return "".join(f", {count:,} {reason}" for reason, count in self.left.items() if count)

    def keep(self, others: str, wanted: Mapping[str, Any]) -> "Pairs[Side]":
        """Those that are wanted, by split ``[n]``; the others are counted under that name."""
        kept = {name: _kept(pairs, wanted[name]) for name, pairs in self.splits.items()}
        gone = sum(len(self.splits[name]) - len(kept[name]) for name in SPLITS)
        return Pairs(kept, self.left | {others: gone})


@dataclass(frozen=True, eq=False)
class Stored(Sequence[tuple[np.ndarray, np.ndarray]]):
    """Pairs of a split, int64 tokens that are made of memory-mapped ones where they are asked for."""

    arrays: Arrays
    split: str
    rows: np.ndarray  # which of those that are there

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of sources and of targets ``[n 2]``."""
        return self.arrays.lengths(self.split).reshape(-1, 2)[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: Any) -> Any:
        source, target = (self.arrays.sequence(self.split, 2 * int(self.rows[n]) + side) for side in (0, 1))
        return source.astype(np.int64), target.astype(np.int64)


def _kept(pairs: Sequence[Any], wanted: Any) -> Sequence[Any]:
    if isinstance(pairs, Stored):
        return Stored(pairs.arrays, pairs.split, pairs.rows[np.array(wanted, bool)])
    return [*compress(pairs, wanted)]


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


def split(files: dict[str, list[tuple[Side, Side]]]) -> Pairs[Side]:
    """Pairs of files by split: where names of files make none, a tenth is validation and a tenth is test.

    Names that contain train, valid and test make the splits; without valid, a tenth of train is held out. Tenths are chosen
    by a hash of the source. What a held-out split has is left out of those before it.
    """
    names = {name: named_split(name) for name in files}
    into = split_rule(names.values())
    splits: dict[str, list[tuple[Side, Side]]] = {name: [] for name in SPLITS}
    for name, pairs in files.items():
        for pair in pairs:
            splits[into(names[name], repr(pair[0]).encode())].append(pair)
    before, seen = sum(map(len, splits.values())), set()
    for name in reversed(SPLITS):
        splits[name] = [pair for pair in splits[name] if pair not in seen]
        seen |= set(splits[name])
    return Pairs(splits, {"repeated": before - sum(map(len, splits.values()))})


def read_texts(source: str, languages: str = "") -> Pairs[str]:
    """Pairs of lines: of tables with two columns, source and target, between which a tab is; or of two files.

    Args:
        source: A table, a folder of those that end with .tsv; two files, SOURCE,TARGET; or, with `languages`, a folder.
        languages: Endings of the files in a folder, as en,de of train.en and train.de; all may be packed, as train.en.gz.

    Raises:
        ValueError: Where there is nothing to read, a row has not two columns, two files have not as many lines, or a line is
            no UTF-8 (with file and line).
    """
    endings = [ending.strip().lstrip(".") for ending in languages.split(",")] if languages else []
    if endings and (len(endings) != 2 or endings[0] == endings[1]):
        raise ValueError(f"languages: expected the two endings of a folder's files, as en,de, got {languages!r}")
    files = _parts(source, languages)
    if len(files) == 2:
        pairs = {files[0]: _zipped(*((name, [line for _, lines in documents(name) for line in lines]) for name in files))}
    elif endings:
        pairs = dict(_side_by_side(source, endings))
    else:
        pairs = {name: [pair for _, pair in rows] for name, rows in tables(source)}
    full = {name: [pair for pair in found if all(side.strip() for side in pair)] for name, found in pairs.items()}
    found, blank = split(full), sum(len(pairs[name]) - len(full[name]) for name in pairs)
    return Pairs(found.splits, found.left | {"with an empty side": blank})


def load_texts(
    source: str,
    languages: str,
    tokenizer: str | Tokenizer,
    vocabulary: int | None = None,
    *,
    root: Path | None = None,
    console: object = None,
) -> tuple[Pairs[np.ndarray], Tokenizer]:
    """Tokens of the pairs of `read_texts`, prepared once, then memory-mapped, and what they are tokens of.

    Args:
        source: As there.
        languages: As there.
        tokenizer: words or bpe, learned of both sides of the train split, or a tokenizer that is there already.
        vocabulary: At most so many words or pieces; by default every word, and 8192 pieces.
        root: Of the cache.
        console: Shows the progress of the preparation.

    Raises:
        ValueError: As of `read_texts`.
    """
    root, read = cache.default_root() if root is None else root, lru_cache(1)(lambda: read_texts(source, languages))
    from isopos.lab.data.corpora import shown

    with shown(console) as progressing:  # pyright: ignore[reportArgumentType]
        found = [_found(part) for part in _parts(source, languages)]
        before = [surveyed(one, root, progressing) for one in found]
        key = key_of(FORMAT, languages, [one.key for one in before])

        def learn(folder: Path) -> None:
            lines = (f"{side}\n" for pair in read().splits["train"] for side in pair)
            {"words": Words, "bpe": BPE}[str(tokenizer)].learn(lines, vocabulary).save(folder)

        def fill(writer: Writer) -> dict[str, Any]:
            for name, pairs in read().splits.items():
                sequences = Ragged(writer, name, used.size)
                for pair in pairs:
                    for side in pair:
                        sequences.add(used.encode(side))
            for one, then in zip(found, before, strict=True):
                check_same(one, then)
            return read().left

        if isinstance(tokenizer, str):
            used = load_tokenizer(cache.prepared(root, f"vocabulary-{key_of(key, tokenizer, vocabulary)[:32]}", learn))
        else:
            used = tokenizer
        arrays = prepared(root, f"pairs-{key_of(key, used.fingerprint)[:32]}", fill)
    stored = {name: Stored(arrays, name, np.arange(len(arrays.lengths(name)) // 2)) for name in SPLITS}
    return Pairs(stored, arrays.facts), used


def _parts(source: str, languages: str) -> list[str]:
    """The two files of a source, or itself."""
    files = [part.strip() for part in source.split(",")]
    return files if len(files) == 2 and not languages else [source]


def _found(source: str) -> Source:
    if source.startswith("hf:") or not source:
        raise ValueError(f"data: expected files of pairs, got {source!r}")
    return find(source)


def documents(source: str, endings: Sequence[str] = ("",)) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of the files of a source, see `find`, whose names end so; ValueError where one is no UTF-8."""
    for name, blocks in _found(source).read(raw=False):
        if name.lower().endswith(tuple(endings)):
            lines = b"".join(blocks).split(b"\n")[:-1]  # every line has an end
            yield name, [_decoded(name, n, line) for n, line in enumerate(lines, 1)]


def tables(source: str) -> Iterator[tuple[str, list[tuple[int, tuple[str, str]]]]]:
    """Name and rows of a table, or of those of a folder that end with .tsv: number of the line, source and target.

    Columns may be named source and target, in either order, in the first line. Empty lines are none.

    Raises:
        ValueError: Where there is no table, or a row has not two columns (with file and line).
    """
    found = list(documents(source, ("",) if Path(source).is_file() else (".tsv",)))
    if not any(line.strip() for _, lines in found for line in lines):
        raise ValueError(
            f"data: expected rows of a source, a tab and a target, in files that end with .tsv, none in {source}"
        )
    for name, lines in found:
        rows, order = [], (0, 1)
        for number, line in enumerate(lines, 1):
            cells = line.split("\t")
            if number == 1 and sorted(cell.strip().lower() for cell in cells) == ["source", "target"]:
                order = (0, 1) if cells[0].strip().lower() == "source" else (1, 0)
            elif len(cells) == 2:
                rows.append((number, (cells[order[0]].strip(), cells[order[1]].strip())))
            elif line.strip():
                raise ValueError(
                    f"data: {name}, line {number}: expected a source, a tab and a target, got {len(cells)} columns; "
                    "repair or remove the line"
                )
        yield name, rows


def _side_by_side(folder: str, endings: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Pairs of lines of each two files in a folder whose names differ in their endings."""
    every = dict(documents(folder, [f".{ending}" for ending in endings]))
    for name in every:
        own = endings.index(name.rpartition(".")[2])
        partner = name.removesuffix(endings[own]) + endings[1 - own]
        if partner not in every:
            raise ValueError(f"data: expected {partner} beside {name}, got none; repair --languages, or add the file")
        if own == 0:
            yield name, _zipped((name, every[name]), (partner, every[partner]))
    if not every:
        raise ValueError(f"data: expected files that end with .{endings[0]} and .{endings[1]} in {folder}, got none")


def _zipped(one: tuple[str, list[str]], other: tuple[str, list[str]]) -> list[tuple[str, str]]:
    (source, sources), (target, targets) = one, other
    if len(sources) != len(targets):
        raise ValueError(
            f"data: expected as many lines in {source} as in {target}, a pair in each, got {len(sources)} and {len(targets)}"
        )
    return list(zip(sources, targets, strict=True))


def _decoded(name: str, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {name}, line {number}: expected UTF-8, got the byte {line[error.start]:#04x}; repair or remove the line"
        ) from None
