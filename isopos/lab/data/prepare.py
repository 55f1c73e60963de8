"""Text into tokens: which part of a source belongs to which split; vocabulary and tokens, prepared once in a cache."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from isopos.lab.data import cache
from isopos.lab.data.sources import Source, survey, whole_lines
from isopos.lab.data.tokenizers import BPE, Bytes, Tokenizer, Words, load_tokenizer
from isopos.lab.runs.files import check_plain, damaged, read_json

__all__ = ["SPLITS", "Progressing", "in_cache", "in_memory", "named_split", "split_rule"]

SPLITS: tuple[str, ...] = ("train", "validation", "test")
FORMAT = 1  # of a prepared folder

Progressing = Callable[[str, int, int], None]
"""Hears of a stage, bytes done and bytes in all (0 where unknown)."""


Prepared = tuple[str, Tokenizer, dict[str, np.ndarray], dict[str, int]]
"""A hash of text and tokens, and for every split its tokens ``[n]`` and how many bytes of UTF-8 they are."""


def in_memory(source: Source) -> Prepared:
    """The bytes of plain files as they are."""
    pieces: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    sha256, sizes = survey(source, raw=True)
    text = _Text(source, True, [], sha256, _with_text(sizes))
    for split, _, _, piece in text.parts("reading"):
        pieces[split].append(piece)
    tokens = {split: np.frombuffer(b"".join(parts), np.uint8) for split, parts in pieces.items()}
    return text.sha256, Bytes(), tokens, {split: len(part) for split, part in tokens.items()}


def in_cache(
    source: Source, raw: bool, tokenizer: str | Tokenizer, vocabulary: int | None, root: Path, progressing: Progressing
) -> Prepared:
    """Memory-mapped tokens from a folder in the cache, written there if it is absent.

    A vocabulary that is learned has a folder of its own, so that whoever loads the same text with a tokenizer that was saved
    finds the same tokens.
    """
    stamp = source.stamp()
    total = sum(int(size) for _, size, _ in stamp) if source.plain else 0

    def read() -> tuple[str, list[tuple[str, int]]]:
        sha256, sizes = survey(source, raw, lambda done: progressing("reading", done, total))
        return sha256, _with_text(sizes)

    index = _key("index", raw, source.name, *(path for path, _, _ in stamp))
    sha256, sizes = cache.remembered(root, index, stamp, tuple[str, list[tuple[str, int]]], read) if stamp else read()
    text = _Text(source, raw, stamp, sha256, [(name, size) for name, size in sizes], progressing)
    if isinstance(tokenizer, str):
        tokenizer = Bytes() if tokenizer == "bytes" else _learned(text, tokenizer, vocabulary, root)
    key = _key("tokens", text.key, tokenizer.fingerprint)
    folder = cache.prepared(root, key, lambda part: text.write(part, tokenizer))
    counts, remedy = dict.fromkeys(SPLITS, int), f"remove {folder}, and it is prepared again"
    kinds = {
        "dtype": Literal["uint8", "uint16", "uint32", "uint64"],
        "tokens": counts,
        "bytes": counts,
        "sha256": dict[str, str],
    }
    about = read_json(folder / "about.json", kinds, remedy, lambda value: {"sha256": {}} | value)
    tokens = {split: _mapped(folder / f"{split}.bin", about, tokenizer.size, remedy) for split in SPLITS}
    return sha256 if raw else key.partition("-")[2], tokenizer, tokens, about["bytes"]


def _learned(text: "_Text", kind: str, vocabulary: int | None, root: Path) -> Tokenizer:
    learn = {"words": Words, "bpe": BPE}[kind].learn

    def build(folder: Path) -> None:
        learn(text.pieces("train"), vocabulary).save(folder)
        text.check()

    return load_tokenizer(cache.prepared(root, _key("vocabulary", text.key, kind, vocabulary), build))


def _key(kind: str, *values: object) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps([FORMAT, *values]).encode()).hexdigest()[:32]}"


def _cut(block: bytes, at: int, raw: bool) -> int:
    """Where in a block the train split ends: at a byte, or after the white space that follows it."""
    if at <= 0 or at >= len(block) or raw:
        return min(max(at, 0), len(block))
    space = re.compile(rb"\s").search(block, at - 1)
    return space.end() if space else len(block)


def _with_text(sizes: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The documents that have any; one that names itself a split would be replaced by another text, and is an error."""
    for name, size in sizes:
        if not size and (split := _named(name)):
            raise ValueError(f"data: expected text in {name}, which is {split} by its name, got none; fill or remove it")
    return [(name, size) for name, size in sizes if size]


def _by_document(source: Source, names: list[str]) -> dict[str, str]:
    """The split of each document that has one; empty where the end of the text is held out."""
    if not names:
        raise ValueError(f"data: expected text, but {source.name} is empty")
    named = {name: split for name in names if (split := _named(name))}
    if len(set(named.values())) > 1:
        for split in ("train", "validation"):
            if split not in named.values():
                files = ", ".join(sorted(named))
                raise ValueError(f"data: expected a file of {split} beside {files}, got none with text in {source.name}")
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
    """The split that a file of text is, by its name."""
    suffix = PurePosixPath(name.replace("\\", "/")).suffix.lower()
    return named_split(name) if suffix in ("", ".txt", ".tokens", ".raw", ".csv") else None


def named_split(name: str) -> str | None:
    """The split of which the name of a file speaks, as wiki.valid.tokens of validation."""
    words = set(re.findall("[a-z]+", PurePosixPath(name.replace("\\", "/")).name.lower()))
    alike = {"train": {"train"}, "validation": {"valid", "validation", "val", "dev", "eval"}, "test": {"test"}}
    return next((split for split, names in alike.items() if names & words), None)


def split_rule(named: Iterable[str | None]) -> Callable[[str | None, bytes], str]:
    """In which split a row is, by the split of which the name of its file speaks and by its content.

    Where one of the names speaks of train they make the splits; if none speaks of validation, that is a tenth of train. Else
    a tenth of all rows is validation and a tenth is test. Tenths are chosen by a hash: equal rows are in one split.
    """
    said = set(named)

    def split(own: str | None, content: bytes) -> str:
        tenth = hashlib.sha256(content).digest()[0] % 10
        if "train" not in said:
            return ("test", "validation")[tenth] if tenth < 2 else "train"
        own = own or "train"
        return "validation" if own == "train" and "validation" not in said and tenth == 1 else own

    return split


@dataclass(frozen=True)
class _Text:
    """A source that was read once, which told its hash and its documents' sizes; what is made of it a block at a time."""

    source: Source
    raw: bool
    stamp: list
    sha256: str
    sizes: list[tuple[str, int]]
    progressing: Progressing = lambda stage, done, total: None

    @cached_property
    def documents(self) -> dict[str, str]:
        return _by_document(self.source, [name for name, _ in self.sizes])

    @cached_property
    def total(self) -> int:
        return sum(size for _, size in self.sizes)

    @property
    def cut(self) -> int:
        """The byte from which on text is held out, where its documents do not say what is."""
        return 0 if self.documents else self.total - self.total // 10

    @property
    def key(self) -> str:
        """A hash of the text and its parts."""
        parts = [[self.documents.get(name), size] for name, size in self.sizes]
        return _key("text", self.sha256, self.raw, self.cut, parts)

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
        """The text of a split, to learn a vocabulary from."""
        parts = self.parts("learning the vocabulary")
        return (_text(name, line, piece) for other, name, line, piece in parts if other == split)

    def write(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write the tokens of each split and what they are."""
        dtype = np.min_scalar_type(tokenizer.size - 1)
        tokens, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        digests = {split: hashlib.sha256() for split in SPLITS}
        with ExitStack() as opened:
            files = {split: opened.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
            for split, name, line, piece in self.parts("writing tokens"):
                raw = isinstance(tokenizer, Bytes)
                found = np.frombuffer(piece, np.uint8) if raw else _encoded(tokenizer, name, line, piece)
                block = found.astype(dtype).tobytes()
                files[split].write(block)
                digests[split].update(block)
                tokens[split] += len(found)
                sizes[split] += len(piece)
        sums = {split: digest.hexdigest() for split, digest in digests.items()}
        about = {"source": self.source.name, "dtype": dtype.name, "tokens": tokens, "bytes": sizes, "sha256": sums}
        (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        self.check()

    def check(self) -> None:
        """Raise where the files have changed since they were surveyed."""
        if self.source.stamp() != self.stamp:
            raise ValueError(
                f"data: expected {self.source.name} to stay as it is while it is read, but it changed; start again"
            )


def _text(name: str, line: int, piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        line += piece.count(b"\n", 0, error.start)
        raise ValueError(
            f"data: {name}, line {line}: expected UTF-8, got the byte {piece[error.start]:#04x}; repair it, or choose bytes"
        ) from None


def _encoded(tokenizer: Tokenizer, name: str, line: int, piece: bytes) -> np.ndarray:
    text = _text(name, line, piece)
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"{error} (in {name}, from line {line} on)") from None


def _mapped(path: Path, about: Mapping[str, Any], vocabulary: int, remedy: str) -> np.ndarray:
    """The tokens in a file, which are those that were written, or at least tokens where no hash of them is known."""
    dtype, count = np.dtype(about["dtype"]), about["tokens"][path.stem]
    try:
        check_plain(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if path.stat().st_size != count * dtype.itemsize:
            raise ValueError(f"expected {count} tokens, got {path.stat().st_size} bytes")
        if about["sha256"].get(path.stem, digest) != digest:
            raise ValueError("its content is not what was written")
        tokens = np.memmap(path, dtype, "r") if count else np.empty(0, dtype)
        if path.stem not in about["sha256"] and count and int(tokens.max()) >= vocabulary:
            raise ValueError(f"expected tokens below {vocabulary}, got {tokens.max()}")
    except (OSError, ValueError) as error:
        damaged(path, error, remedy)
    return tokens
