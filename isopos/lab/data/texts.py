r"""Texts with classes, alone or in pairs, as memory-mapped tokens; and those that come with isopos.

Example:
    >>> found = load("", tokenizer="bytes")
    >>> found.classes, found.tokenizer.decode(found.sequence("train", 0))[-9:] != ""
    (('both as usual', 'both turned', 'round ones turned', 'square ones turned'), True)
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isopos.lab.data.arrays import Arrays, Ragged, Writer, collect
from isopos.lab.data.labelled import Classes, Row, parts, rows, wrong
from isopos.lab.data.prepare import SPLITS, Preparation, check_tokenizer, preparing
from isopos.lab.data.sources import find
from isopos.lab.data.tokenizers import Tokenizer, learn

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Texts", "load"]

WORDS, EACH = 7, 1.5  # of a text that comes with isopos, and how often a word of the reference is in one
TURNED = ("both as usual", "round ones turned", "square ones turned", "both turned")


@dataclass(frozen=True, eq=False)
class Texts:
    """Tokens of every text, its class, and what they are tokens of."""

    name: str  # of the source
    tokenizer: Tokenizer
    arrays: Arrays

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.arrays.facts["classes"])

    @property
    def each(self) -> int:
        """Texts of a sample: 2 of pairs."""
        return self.arrays.facts["each"]

    def labels(self, split: str) -> np.ndarray:
        """The class of each sample, int64."""
        return self.arrays[f"{split}-labels"]

    def lengths(self, split: str) -> np.ndarray:
        """Tokens of each text ``[samples each]``."""
        return self.arrays.lengths(split).reshape(-1, self.each)

    def sequence(self, split: str, n: int) -> np.ndarray:
        """The tokens of the n-th text of a split; of pairs sample n has 2n and 2n + 1."""
        return self.arrays.sequence(split, n)


def load(
    source: str,
    columns: tuple[str, ...] = ("text",),
    label: str = "label",
    *,
    tokenizer: str | Tokenizer = "bytes",
    vocabulary: int | None = None,
    console: "Console | None" = None,
) -> Texts:
    """The labelled texts of a source, prepared once, then memory-mapped; see `labelled.rows`.

    Args:
        source: A path; empty: passages of the Python language reference with some words in round brackets and some in square
            ones, each as usual or turned, which the bytes of a passage do not tell but by their order; of a pair, which
            one has turned ones.
        columns: Of a text, or of two that are a pair.
        label: The column of the class.
        tokenizer: bytes, words, bpe (trained on the train split), or a tokenizer that is there already.
        vocabulary: At most so many words or pieces; by default every word, and 8192 pieces.
        console: Shows the progress of the preparation.

    Raises:
        ValueError: Where there is nothing to read, or something in it is wrong (with file and line).
    """
    check_tokenizer(tokenizer, vocabulary)
    if not source:
        return _own(len(columns) > 1, tokenizer, vocabulary)
    with preparing(find(source, tables=True), console=console) as preparation:
        return _prepared(preparation, columns, label, tokenizer, vocabulary)


def _own(pairs: bool, tokenizer: str | Tokenizer, vocabulary: int | None) -> Texts:
    if isinstance(tokenizer, str):
        texts = (text for row in _passages(pairs) if row.file == "train" for text in row.values)
        tokenizer = learn(tokenizer, texts, vocabulary)
    split = parts(SPLITS)
    found = collect(lambda writer: _fill(writer, _passages(pairs), split, tokenizer, []))
    return Texts("Python language reference (pydoc_data.topics), words in brackets, as usual or turned", tokenizer, found)


def _passages(pairs: bool) -> Iterator[Row]:
    """Some words of the reference, a few of them in brackets; every tenth topic is for validation, and another for test."""
    from pydoc_data.topics import topics

    random = np.random.default_rng(0)

    def passage(words: list[str], turned: int) -> str:
        begin = int(random.integers(max(1, len(words) - WORDS)))
        some = words[begin : begin + WORDS]
        for pair, way in zip(("()", "[]"), (turned % 2, turned // 2), strict=True):
            first, last = sorted(random.integers(len(some), size=2).tolist())
            opening, closing = pair[::-1] if way else pair
            some[first] = opening + some[first]
            some[last] += closing
        return " ".join(some)

    for n, name in enumerate(sorted(topics)):
        words = re.sub(r"[()[\]]", " ", topics[name]).split()
        split = {0: "validation", 1: "test"}.get(n % 10, "train")
        for _ in range(int(EACH * len(words) / WORDS)):
            turned = int(random.integers(len(TURNED)))
            if pairs:
                first = 3 * (turned % 2)
                label = "the first is turned" if first else "the second is turned"
                yield Row((passage(words, first), passage(words, 3 - first)), label, split, 1)
            else:
                yield Row((passage(words, turned),), TURNED[turned], split, 1)


def _prepared(
    preparation: Preparation, columns: tuple[str, ...], label: str, kind: str | Tokenizer, vocabulary: int | None
) -> Texts:
    """The texts of a source, which is read as often as it takes: for its hash, for a vocabulary, for its tokens."""
    (source,), split = preparation.sources, parts(preparation.names)

    def reading(stage: str, left: list[str]) -> Iterator[Row]:
        for n, row in enumerate(rows(source, preparation.names, columns, label, left.append)):
            for name, value in zip(columns, row.values, strict=True):
                if not isinstance(value, str) or not value.strip():
                    got = "an empty one" if isinstance(value, str) else repr(value)[:40]
                    raise wrong(row.file, row.line, f"{name}: expected a text, got {got}")
            if n % 1000 == 0:
                preparation.progressing(stage, n, 0)
            yield row

    def training() -> Iterator[str]:
        read = reading("learning the vocabulary", [])
        return (text for row in read if split(row.file, "\n".join(row.values)) == "train" for text in row.values)

    def fill(writer: Writer) -> dict[str, object]:
        left: list[str] = []
        return _fill(writer, reading("writing tokens", left), split, tokenizer, left)

    tokenizer = preparation.tokenizer(kind, vocabulary, training, columns, label)
    return Texts(source.name, tokenizer, preparation.arrays("texts", fill, columns, label, tokenizer.fingerprint))


def _fill(
    writer: Writer, read: Iterator[Row], split: Callable[[str, str], str], tokenizer: Tokenizer, left: list[str]
) -> dict[str, object]:
    """Write tokens, starts and labels of rows; return the classes and what was left out."""
    classes, each, sequences = Classes(), 1, {name: Ragged(writer, name, tokenizer.size) for name in SPLITS}
    for row in read:
        each, where = len(row.values), split(row.file, "\n".join(row.values))
        for text in row.values:
            try:
                sequences[where].add(tokenizer.encode(text))
            except ValueError as error:
                raise wrong(row.file, row.line, str(error)) from None
        classes.add(where, row)
    names, labels = classes.settle()
    for name, numbers in labels.items():
        writer.add(f"{name}-labels", numbers)
    return {"classes": names, "each": each, "left": {file: left.count(file) for file in sorted({*left})}}
