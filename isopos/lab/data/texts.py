r"""Labelled texts or pairs of texts as memory-mapped tokens; and an example from the Python language reference.

Example:
    >>> texts = load_texts("", tokenizer="bytes")
    >>> texts.classes, texts.each
    (('both as usual', 'both turned', 'round ones turned', 'square ones turned'), 1)
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from isopos.lab.data.arrays import Ragged, Writer, in_memory
from isopos.lab.data.labelled import Classes, LabelledArrays, LabelledRow, labelled_rows, row_splits, text_folders
from isopos.lab.data.prepare import SPLITS, Preparation, check_tokenizer, preparing
from isopos.lab.data.sources import find_source, row_error
from isopos.lab.data.tokenizers import Tokenizer, learn

CACHE_VERSION = 2
WORDS, EACH = 7, 1.5  # words of an example text, and how often a word of the reference occurs in them
TURNED = ("both as usual", "round ones turned", "square ones turned", "both turned")


@dataclass(frozen=True, eq=False)
class Texts(LabelledArrays):
    """Tokens and classes of texts, and their tokenizer."""

    tokenizer: Tokenizer

    @property
    def each(self) -> int:
        """Texts per sample: 2 for pairs; pair n has the texts 2n and 2n + 1."""
        return self.arrays.facts["each"]


def load_texts(
    source: str,
    columns: tuple[str, ...] = ("text",),
    label: str = "label",
    *,
    tokenizer: str | Tokenizer = "bytes",
    vocabulary: int | None = None,
    console: Console | None = None,
) -> Texts:
    """The labelled texts of a source, prepared once, then memory-mapped; see `labelled.labelled_rows`.

    Args:
        source: A path; empty: passages of the Python language reference with round and square brackets around some words.
            The class is the kinds of brackets that are turned around, so it depends on the order of bytes alone. For pairs
            it is the text with the turned brackets.
        columns: The column of the text, or the two columns of a pair.
        tokenizer: "bytes", "words", "bpe" (trained on the train split), or a tokenizer.
        vocabulary: Largest number of words or pieces; by default all words, or 8192 pieces.

    Raises:
        ValueError: If there is nothing to read, or a row is wrong (with file and line).
    """
    check_tokenizer(tokenizer, vocabulary)
    if not source:
        return _example(len(columns) > 1, tokenizer, vocabulary)
    with preparing(find_source(source, tables=True), console=console) as preparation:
        return _prepared(preparation, columns, label, tokenizer, vocabulary)


def _example(pairs: bool, tokenizer: str | Tokenizer, vocabulary: int | None) -> Texts:
    if isinstance(tokenizer, str):
        texts = (text for row in _passages(pairs) if row.file == "train" for text in row.values)
        tokenizer = learn(tokenizer, texts, vocabulary)
    split = row_splits(SPLITS)
    arrays = in_memory(lambda writer: _fill(writer, _passages(pairs), split, tokenizer, []))
    return Texts("Python language reference (pydoc_data.topics), words in brackets, as usual or turned", arrays, tokenizer)


def _passages(pairs: bool) -> Iterator[LabelledRow]:
    """Passages of the reference with brackets; a tenth of the topics is validation, and another tenth is test."""
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
                yield LabelledRow((passage(words, first), passage(words, 3 - first)), label, split, 1)
            else:
                yield LabelledRow((passage(words, turned),), TURNED[turned], split, 1)


def _prepared(
    preparation: Preparation, columns: tuple[str, ...], label: str, kind: str | Tokenizer, vocabulary: int | None
) -> Texts:
    """The texts of a source, which is read once for each of its hash, a vocabulary, and its tokens."""
    (source,), names = preparation.sources, preparation.names
    folders = text_folders(source.name, names)
    split = row_splits(names, source.name, folders)

    def reading(stage: str, skipped: list[str]) -> Iterator[LabelledRow]:
        for n, row in enumerate(labelled_rows(source, folders, columns, label, skipped.append)):
            for name, value in zip(columns, row.values, strict=True):
                if not isinstance(value, str) or not value.strip():
                    got = "an empty one" if isinstance(value, str) else repr(value)[:40]
                    raise row_error(row.file, row.line, f"{name}: expected a text, got {got}")
            if n % 1000 == 0:
                preparation.progressing(stage, n, 0)
            yield row

    def training() -> Iterator[str]:
        read = reading("learning the vocabulary", [])
        return (text for row in read if split(row.file, "\n".join(row.values)) == "train" for text in row.values)

    def fill(writer: Writer) -> dict[str, object]:
        skipped: list[str] = []
        return _fill(writer, reading("writing tokens", skipped), split, tokenizer, skipped)

    tokenizer = preparation.tokenizer(kind, vocabulary, training, CACHE_VERSION, columns, label)
    arrays = preparation.arrays("texts", fill, CACHE_VERSION, columns, label, tokenizer.fingerprint)
    return Texts(source.name, arrays, tokenizer)


def _fill(
    writer: Writer, read: Iterator[LabelledRow], split: Callable[[str, str], str], tokenizer: Tokenizer, skipped: list[str]
) -> dict[str, object]:
    """Write tokens, starts and labels of rows; return the classes and the skipped files."""
    classes, each, sequences = Classes(), 1, {name: Ragged(writer, name, tokenizer.size) for name in SPLITS}
    for row in read:
        each, where = len(row.values), split(row.file, "\n".join(row.values))
        for text in row.values:
            try:
                sequences[where].add(tokenizer.encode(text))
            except ValueError as error:
                raise row_error(row.file, row.line, str(error)) from None
        classes.add(where, row)
    names = classes.write(writer)
    return {"classes": names, "each": each, "left": {file: skipped.count(file) for file in sorted({*skipped})}}
