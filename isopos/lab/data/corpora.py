r"""Text as memory-mapped tokens for training and evaluation; batches are functions of seed and step.

Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "rhyme.txt")
    ...     _ = path.write_text("one two three four\n" * 40)
    ...     corpus = load_corpus(str(path), 8)
    >>> corpus.vocabulary, len(corpus.train), len(corpus.validation)
    (256, 684, 76)
    >>> tokens, targets = corpus.batch(seed=0, step=1, count=2, length=8)
    >>> tokens.shape, corpus.tokenizer.decode(corpus.validation[:8])
    (torch.Size([2, 8]), 'one two ')
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from isopos.catalog import expect
from isopos.lab.data.arrays import Arrays, Writer, hash_of, in_memory
from isopos.lab.data.prepare import SPLITS, OnProgress, Preparation, check_tokenizer, named_split, preparing
from isopos.lab.data.sources import Source, decoded, find_source, survey, whole_lines
from isopos.lab.data.tokenizers import Bytes, Tokenizer

SMALL = 64 << 20  # plain bytes up to this size stay in memory and need no cache
FINGERPRINT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of each split ``[n]``, unsigned integers, with their tokenizer."""

    name: str  # of the source
    sha256: str  # a fingerprint of text and tokens; at byte level the hash of the text
    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray  # empty if the source has no test split
    sizes: dict[str, int]  # bytes of UTF-8 in each split, for bits per byte
    left: tuple[str, ...] = ()  # files without a split next to files with one, which are not read

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.tokenizer.size

    def split(self, name: str) -> np.ndarray:
        """The tokens of train, validation or test.

        Raises:
            ValueError: If the name is another one, or the split is empty.
        """
        expect("split", name, SPLITS)
        if not len(getattr(self, name)):
            others = ", ".join(other for other in SPLITS if len(getattr(self, other)))
            raise ValueError(f"split: expected tokens in {name}, got none in {self.name}; it has {others}")
        return getattr(self, name)

    def bytes_per_token(self, split: str) -> float:
        """Mean number of UTF-8 bytes per token: bits per byte are nats per token, divided by it and by ln 2."""
        return self.sizes[split] / len(self.split(split))

    def batch(self, seed: int, step: int, count: int, length: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[count / ranks, length]`` int64 of a step, a function of its arguments alone.

        The batches of all ranks, concatenated, are the batch of a single rank.
        """
        if count % ranks or not 0 <= rank < ranks:
            raise ValueError(f"batch: expected a multiple of the {ranks} ranks, and a rank below, got {count} and {rank}")
        starts = np.random.default_rng((seed, step)).integers(len(self.train) - length, size=count)
        share = count // ranks
        return _windows(self.train, starts[rank * share : (rank + 1) * share], length, length)

    def windows(
        self, length: int, limit: int | None, count: int, split: str = "validation", scored: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows of a split: inputs ``[<= count, length]`` and the targets of their last tokens ``[<= count, scored]``.

        Windows overlap by ``length - scored`` tokens (0 by default). Each of the first `limit` tokens with so many tokens
        before it is a target exactly once: the last window is moved back and scores the remaining tokens. A split of at
        most `length` tokens has no window.
        """
        scored = length if scored is None else scored
        if not 0 < scored <= length:
            raise ValueError(f"scored: expected 1 to the {length} tokens of a window, got {scored}")
        tokens = self.split(split)
        tokens = tokens if limit is None else tokens[: limit + 1]
        starts = range(0, len(tokens) - length, scored)
        for n in range(0, len(starts), count):
            yield _windows(tokens, starts[n : n + count], length, scored)
        if starts and (left := len(tokens) - length - 1 - starts[-1]):
            yield _windows(tokens, [len(tokens) - length - 1], length, left)


def _windows(tokens: np.ndarray, starts: Iterable[int], length: int, scored: int) -> tuple[Tensor, Tensor]:
    stacked = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
    return stacked[:, :-1], stacked[:, length + 1 - scored :]


def load_corpus(
    source: str,
    length: int,
    *,
    tokenizer: str | Tokenizer = "bytes",
    vocabulary: int | None = None,
    cache: Path | None = None,
    console: Console | None = None,
) -> Corpus:
    """The corpus of a source, tokenized once, then memory-mapped.

    Names that contain train, valid and test make the splits (WikiText's files, a dataset's). Of an archive of several files
    a twentieth, whole ones, is validation and another is test, chosen by a hash of their names. Of any other text the last
    tenth is validation, and there is no test.

    Plain files at byte level are used unchanged, and up to 64 MiB stay in memory. Everything else has folders in the
    cache, named by hashes of the text and of the tokenizer. The sizes and modification times of files identify a text, so
    that a second start does not read it.

    Args:
        source: Empty for the Python language reference, hf:NAME[:CONFIG], or the path of a file, an archive or a folder.
        length: Tokens of a training window; train and validation need one window each.
        tokenizer: "bytes", "words", "bpe" (trained on the train split), or a tokenizer.
        vocabulary: Largest number of words or pieces; by default all words, or 8192 pieces.
        cache: Folder of the cache; by default $ISOPOS_CACHE, else isopos in $XDG_CACHE_HOME, else ~/.cache/isopos.
        console: Shows the progress; by default nothing is shown.

    Raises:
        ValueError: If there is nothing to read, a file is broken (with file and line), a split is shorter than a window, or
            the vocabulary does not cover the text.
    """
    check_tokenizer(tokenizer, vocabulary)
    documents = find_source(source)
    raw = documents.plain and (tokenizer == "bytes" or isinstance(tokenizer, Bytes))
    if raw and sum(path.stat().st_size for path in documents.files) <= SMALL:
        corpus = _in_memory(documents)
    else:
        with preparing(documents, root=cache, console=console, raw=raw) as preparation:
            corpus = _in_cache(preparation, raw, tokenizer, vocabulary)
    for split in ("train", "validation"):
        tokens = len(getattr(corpus, split))
        if tokens <= length:
            raise ValueError(
                f"data: expected at least {length + 1} tokens of {split} for a window of {length}, got {tokens} in "
                f"{corpus.name}; use more text or a smaller --length"
            )
    return corpus


def _in_memory(source: Source) -> Corpus:
    """The bytes of plain files, unchanged."""
    sha256, sizes = survey(source, raw=True)
    text = _Text(source, True, sha256, _with_text(sizes))
    return _corpus(source, sha256, Bytes(), in_memory(lambda writer: text.write(writer, Bytes())))


def _in_cache(preparation: Preparation, raw: bool, kind: str | Tokenizer, vocabulary: int | None) -> Corpus:
    """Memory-mapped tokens of a folder of the cache, whose key follows from text and tokenizer."""
    (source,), ((sha256, sizes),) = preparation.sources, preparation.surveys
    text = _Text(source, raw, sha256, _with_text(sizes), preparation.progressing)
    preparation = replace(preparation, key=text.key)
    tokenizer = preparation.tokenizer(kind, vocabulary, lambda: text.pieces("train"))
    arrays = preparation.arrays("stream", lambda writer: text.write(writer, tokenizer), tokenizer.fingerprint)
    return _corpus(
        source, sha256 if raw else hash_of(FINGERPRINT_VERSION, text.key, tokenizer.fingerprint)[:32], tokenizer, arrays
    )


def _corpus(source: Source, sha256: str, tokenizer: Tokenizer, arrays: Arrays) -> Corpus:
    left = tuple(arrays.facts.get("left", ()))  # caches of before have none
    tokens = (arrays[split] for split in SPLITS)
    return Corpus(source.name, sha256, tokenizer, *tokens, sizes=arrays.facts["bytes"], left=left)


@dataclass(frozen=True)
class _Text:
    """A source whose hash and sizes are known, read block by block."""

    source: Source
    raw: bool
    sha256: str
    sizes: list[tuple[str, int]]
    progressing: OnProgress = lambda stage, done, total: None

    @cached_property
    def documents(self) -> dict[str, str]:
        return _by_document(self.source, [name for name, _ in self.sizes])

    @cached_property
    def total(self) -> int:
        return sum(size for _, size in self.sizes)

    @property
    def cut(self) -> int:
        """The byte at which the train split ends, where documents do not determine splits."""
        return 0 if self.documents else self.total - self.total // 10

    @property
    def key(self) -> str:
        """A hash of the text and its parts."""
        parts = [[self.documents.get(name), size] for name, size in self.sizes]
        return f"text-{hash_of(FINGERPRINT_VERSION, self.sha256, self.raw, self.cut, parts)[:32]}"

    def parts(self, stage: str) -> Iterator[tuple[str, str, int, bytes]]:
        """Split, document, line and block, in the order of the source."""
        offset, cut = 0, self.cut
        for name, blocks in self.source.read(self.raw):
            line = 1
            for block in blocks if self.raw else whole_lines(blocks):
                pieces = {self.documents.get(name, ""): block}
                if not self.documents:
                    at = _cut(block, cut - offset, self.raw)
                    pieces = {"train": block[:at], "validation": block[at:]}
                offset += len(block)
                for split, piece in pieces.items():
                    if split and piece:
                        yield split, name, line, piece
                    line += piece.count(b"\n")
                self.progressing(stage, offset, self.total)

    def pieces(self, split: str) -> Iterator[str]:
        """The text of a split, from which a vocabulary is learned."""
        parts = self.parts("learning the vocabulary")
        return (decoded(name, line, piece) for other, name, line, piece in parts if other == split)

    def write(self, writer: Writer, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write the tokens of each split; return the numbers of their bytes."""
        dtype, sizes = np.min_scalar_type(tokenizer.size - 1), dict.fromkeys(SPLITS, 0)
        for split in SPLITS:
            writer.add(split, np.empty(0, dtype))
        for split, name, line, piece in self.parts("writing tokens"):
            raw = isinstance(tokenizer, Bytes)
            writer.add(split, np.frombuffer(piece, np.uint8) if raw else _encoded(tokenizer, name, line, piece))
            sizes[split] += len(piece)
        left = [name for name, _ in self.sizes if self.documents and name not in self.documents]
        return {"source": self.source.name, "bytes": sizes, "left": left}


def _cut(block: bytes, at: int, raw: bool) -> int:
    """The offset in a block at which the train split ends: a byte, or the end of the white space that follows it."""
    if at <= 0 or at >= len(block) or raw:
        return min(max(at, 0), len(block))
    space = re.compile(rb"\s").search(block, at - 1)
    return space.end() if space else len(block)


def _with_text(sizes: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The documents that are not empty. An empty file whose name denotes a split is an error."""
    for name, size in sizes:
        if not size and (split := _named(name)):
            raise ValueError(f"data: expected text in {name}, which is {split} by its name, got none; fill or remove it")
    return [(name, size) for name, size in sizes if size]


def _by_document(source: Source, names: list[str]) -> dict[str, str]:
    """The split of each document by its name; empty if documents make no splits, so that the end of the text is held out."""
    if not names:
        raise ValueError(f"data: expected text, but {source.name} is empty")
    named = {name: split for name in names if (split := _named(name))}
    if len(set(named.values())) > 1:
        for split in ("train", "validation"):
            if split not in named.values():
                files = ", ".join(sorted(named))
                raise ValueError(f"data: expected a file of {split} as well as {files}, got none with text in {source.name}")
        kinds = {_suffix(name) for name in named}
        if other := next((name for name in names if name not in named and _suffix(name) in kinds), ""):
            files = " and ".join(sorted(named)[:2])
            raise ValueError(
                f"data: expected train, valid or test in the name of every text, as in {files}, or in none, got {other}; "
                "rename or remove it"
            )
        return named
    if not source.books or len(names) == 1:
        return {}
    if len(names) < len(SPLITS):
        raise ValueError(f"data: expected one text or at least {len(SPLITS)} in {source.name}, got {len(names)}")
    order = sorted(names, key=lambda name: (hashlib.sha256(PurePosixPath(name).name.encode()).digest(), name))
    share = max(1, len(names) // 20)
    held_out = {name: SPLITS[1 + n // share] for n, name in enumerate(order[: 2 * share])}
    return {name: held_out.get(name, "train") for name in names}


def _named(name: str) -> str | None:
    """The split that the name of a file of text denotes: wiki.train.en, but not train.py, which is code."""
    if _suffix(name) in ("", ".txt", ".text", ".md", ".tokens", ".raw", ".csv"):
        return named_split(name)
    _, *inner = PurePosixPath(name.replace("\\", "/")).name.split(".")[:-1]
    return named_split(".".join(inner)) if inner else None


def _suffix(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).suffix.lower()


def _encoded(tokenizer: Tokenizer, name: str, line: int, piece: bytes) -> np.ndarray:
    text = decoded(name, line, piece)
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"{error} (in {name}, from line {line} on)") from None
