r"""Text as tokens to train on and held-out ones, memory-mapped, in batches drawn from seed and step.

Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "rhyme.txt")
    ...     _ = path.write_text("one two three four\n" * 40)
    ...     corpus = load(str(path), 8)
    >>> corpus.vocabulary, len(corpus.train), len(corpus.validation)
    (256, 684, 76)
    >>> tokens, targets = corpus.batch(seed=0, step=1, count=2, length=8)
    >>> tokens.shape, corpus.decode(corpus.validation[:8])
    (torch.Size([2, 8]), 'one two ')
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from isopos.lab import cache as caches
from isopos.lab.sources import Source, Survey, find, survey, whole_lines
from isopos.lab.tokenizers import BPE, Bytes, Tokenizer, Words, load_tokenizer

__all__ = ["SPLITS", "Corpus", "load"]

SPLITS: tuple[str, ...] = ("train", "validation", "test")
FORMAT = 1  # of a prepared folder
SMALL = 64 << 20  # plain bytes up to this size stay in memory and need no cache

Progressing = Callable[[str, int, int], None]
"""Hears of a stage, bytes done and bytes in all (0 where unknown)."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Streams of tokens, and what they are tokens of.

    Args:
        name: Of the source.
        sha256: A fingerprint of text and tokens: of the bytes themselves where the tokens are those.
        tokenizer: Text to tokens and back.
        train: Tokens ``[n]`` to train on, unsigned integers, as are the others.
        validation: Held-out tokens.
        test: More of them; empty where the source has no third part.
        sizes: Bytes of UTF-8 in each split, for bits per byte.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    sizes: dict[str, int]

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.tokenizer.size

    def encode(self, text: str) -> np.ndarray:
        """Tokens of text."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens."""
        return self.tokenizer.decode(tokens)

    def save_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json, which a run needs to read and to write text."""
        self.tokenizer.save(folder)

    def split(self, name: str) -> np.ndarray:
        """The tokens of train, validation or test.

        Raises:
            ValueError: Where it is another name, or empty.
        """
        if name not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {name!r}")
        if not len(getattr(self, name)):
            has = ", ".join(other for other in SPLITS if len(getattr(self, other)))
            raise ValueError(f"split: expected tokens in {name}, got none in {self.name}; it has {has}")
        return getattr(self, name)

    def bytes_per_token(self, split: str) -> float:
        """Mean bytes of UTF-8 a token: nats a token, divided by it and by ln 2, are bits a byte."""
        return self.sizes[split] / len(self.split(split))

    def batch(self, seed: int, step: int, count: int, length: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[count / ranks, length]`` int64 of one step: a function of its arguments and nothing else.

        The ranks' batches, one after another, are the batch of a single one.
        """
        if count % ranks or not 0 <= rank < ranks:
            raise ValueError(f"batch: expected a multiple of the {ranks} ranks, and a rank below, got {count} and {rank}")
        starts = np.random.default_rng((seed, step)).integers(len(self.train) - length, size=count)
        share = count // ranks
        return _windows(self.train, starts[rank * share : (rank + 1) * share], length, length)

    def windows(
        self, length: int, limit: int | None, count: int, split: str = "validation", scored: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs ``[<= count, length]`` and targets of their last `scored` tokens (all by default) ``[<= count, scored]``.

        Each of the first `limit` tokens of a split that has ``length - scored`` tokens before it is a target once: windows
        overlap by so much, and the last one, moved back, scores what is left. A split of at most `length` tokens has none.
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


def load(
    source: str,
    length: int,
    *,
    tokenizer: str | Tokenizer = "bytes",
    vocabulary: int | None = None,
    cache: Path | None = None,
    console: Console | None = None,
) -> Corpus:
    """The tokens of a source: prepared once, then memory-mapped.

    Names that contain train, valid and test make the splits (WikiText's files, a dataset's). Of an archive of several files
    a twentieth, whole ones, is validation and another is test, chosen by a hash of their names. Of any other text the last
    tenth is validation, and there is no test.

    Plain files at byte level are taken as they are, and up to 64 MiB stay in memory. All else has a folder in the cache,
    named by a hash of the text and of the tokenizer. A text is known to be the same by its files' sizes and times of change,
    so that a second start does not read it.

    Args:
        source: Empty for the Python language reference, hf:NAME[:CONFIG], or the path of a file, an archive or a folder.
        length: Tokens of a window to train with, of which train and validation need one each.
        tokenizer: bytes, words, bpe (trained on the train split), or a tokenizer that is there already.
        vocabulary: At most so many words or pieces; by default every word, and 8192 pieces.
        cache: A folder; by default $ISOPOS_CACHE, else isopos in $XDG_CACHE_HOME, else ~/.cache/isopos.
        console: Shows the progress of the preparation; by default it is silent.

    Raises:
        ValueError: Where there is nothing to read, a file is broken (with file and line), a split is shorter than a window,
            or the vocabulary does not cover the text.
    """
    kinds = ("bytes", "words", "bpe")
    if isinstance(tokenizer, str) and tokenizer not in kinds:
        raise ValueError(f"tokenizer: expected one of {', '.join(kinds)}, got {tokenizer!r}")
    if vocabulary is not None and tokenizer not in kinds[1:]:
        raise ValueError(f"vocabulary: expected none beside {tokenizer}, which has its own, got {vocabulary}")
    found, root = find(source), caches.default_root() if cache is None else cache
    with _shown(console) as progressing:
        raw = found.plain and (tokenizer == "bytes" or isinstance(tokenizer, Bytes))
        if raw and sum(path.stat().st_size for path in found.files) <= SMALL:
            corpus = _in_memory(found)
        else:
            corpus = _in_cache(found, raw, tokenizer, vocabulary, root, progressing)
    for split in ("train", "validation"):
        tokens = len(getattr(corpus, split))
        if tokens <= length:
            raise ValueError(
                f"data: expected at least {length + 1} tokens of {split} for a window of {length}, got {tokens} in "
                f"{corpus.name}; use more text or a smaller --length"
            )
    return corpus


@dataclass(frozen=True)
class _Plan:
    """Which part of a source belongs to which split: by document, or from the byte `cut` on."""

    documents: dict[str, str]
    cut: int

    def parts(self, source: Source, raw: bool) -> Iterator[tuple[str, str, int, bytes]]:
        """Split, document, line and block, in the order of the source."""
        offset = 0
        for name, blocks in source.read(raw):
            line = 1
            for block in blocks if raw else whole_lines(blocks):
                if self.documents:
                    pieces = [(self.documents.get(name, ""), block)]
                else:
                    at = _cut(block, self.cut - offset, raw)
                    pieces = [("train", block[:at]), ("validation", block[at:])]
                offset += len(block)
                for split, piece in pieces:
                    if split and piece:
                        yield split, name, line, piece
                    line += piece.count(b"\n")


def _cut(block: bytes, at: int, raw: bool) -> int:
    """Where in a block the train split ends: at a byte, or after the white space that follows it."""
    if at <= 0 or at >= len(block) or raw:
        return min(max(at, 0), len(block))
    space = re.compile(rb"\s").search(block, at - 1)
    return space.end() if space else len(block)


def _plan(source: Source, found: Survey) -> _Plan:
    names = [name for name, _ in found.sizes]
    if not names:
        raise ValueError(f"data: expected text, but {source.name} is empty")
    named = {name: split for name in names if (split := _named(name))}
    if len(set(named.values())) > 1:
        for split in ("train", "validation"):
            if split not in named.values():
                files = ", ".join(sorted(named))
                raise ValueError(f"data: expected a file of {split} beside {files}, got none with text in {source.name}")
        return _Plan(named, 0)
    if source.books and len(names) > 1:
        if len(names) < len(SPLITS):
            raise ValueError(f"data: expected one text or at least {len(SPLITS)} in {source.name}, got {len(names)}")
        order = sorted(names, key=lambda name: (hashlib.sha256(PurePosixPath(name).name.encode()).digest(), name))
        share = max(1, len(names) // 20)
        held = {name: SPLITS[1 + n // share] for n, name in enumerate(order[: 2 * share])}
        return _Plan({name: held.get(name, "train") for name in names}, 0)
    return _Plan({}, found.total - found.total // 10)


def _named(name: str) -> str | None:
    """The split that a file of text is, by its name."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.suffix.lower() not in ("", ".txt", ".tokens", ".raw", ".csv"):
        return None
    words = set(re.findall("[a-z]+", path.name.lower()))
    alike = {"train": {"train"}, "validation": {"valid", "validation", "val"}, "test": {"test"}}
    return next((split for split, names in alike.items() if names & words), None)


def _in_memory(source: Source) -> Corpus:
    found = survey(source, raw=True)
    pieces: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for split, _, _, piece in _plan(source, found).parts(source, raw=True):
        pieces[split].append(piece)
    tokens = {split: np.frombuffer(b"".join(parts), np.uint8) for split, parts in pieces.items()}
    return Corpus(source.name, found.sha256, Bytes(), **tokens, sizes={split: len(tokens[split]) for split in SPLITS})


def _in_cache(
    source: Source, raw: bool, kind: str | Tokenizer, vocabulary: int | None, root: Path, progressing: Progressing
) -> Corpus:
    stamp = source.stamp()

    def read() -> list:
        size = sum(int(size) for _, size, _ in stamp)
        found = survey(source, raw, lambda done: progressing("reading", done, size if source.plain else 0))
        return [found.sha256, found.sizes]

    index = hashlib.sha256(json.dumps([FORMAT, raw, source.name, *(path for path, _, _ in stamp)]).encode()).hexdigest()[:32]
    sha256, sizes = caches.remembered(root, f"index-{index}", stamp, read) if stamp else read()
    found = Survey(sha256, tuple((name, size) for name, size in sizes))
    plan = _plan(source, found)
    choice = kind.fingerprint if isinstance(kind, Tokenizer) else [kind, vocabulary]
    splits = [[plan.documents.get(name), size] for name, size in found.sizes]
    key = hashlib.sha256(json.dumps([FORMAT, sha256, raw, choice, plan.cut, splits]).encode()).hexdigest()

    def build(folder: Path) -> None:
        _build(folder, source, raw, plan, found.total, kind, vocabulary, progressing)
        if source.stamp() != stamp:
            raise ValueError(f"data: expected {source.name} to stay as it is while it is read, but it changed; start again")

    folder = caches.prepared(root, key[:32], build)
    about = json.loads((folder / "about.json").read_text())
    tokens = {split: _mapped(folder / f"{split}.bin", about["dtype"], about["tokens"][split]) for split in SPLITS}
    whole = sha256 if raw else key
    return Corpus(source.name, whole, load_tokenizer(folder), **tokens, sizes=about["bytes"])


def _build(
    folder: Path,
    source: Source,
    raw: bool,
    plan: _Plan,
    total: int,
    kind: str | Tokenizer,
    vocabulary: int | None,
    progressing: Progressing,
) -> None:
    """Write the tokens of each split, the tokenizer and what they are into a folder; a block at a time is in memory."""

    def parts(stage: str, split: str | None = None) -> Iterator[tuple[str, str, int, bytes]]:
        done = 0
        for part in plan.parts(source, raw):
            done += len(part[3])
            if split in (None, part[0]):
                yield part
            progressing(stage, done, total)

    def texts() -> Iterator[str]:
        return (_text(name, line, piece) for _, name, line, piece in parts("learning the vocabulary", "train"))

    if isinstance(kind, Tokenizer):
        tokenizer = kind
    elif kind == "bytes":
        tokenizer = Bytes()
    else:
        tokenizer = {"words": Words, "bpe": BPE}[kind].learn(texts(), vocabulary)
    dtype = np.min_scalar_type(tokenizer.size - 1)
    tokens, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    try:
        for split, name, line, piece in parts("writing tokens"):
            if isinstance(tokenizer, Bytes):
                found = np.frombuffer(piece, np.uint8)
            else:
                found = _encoded(tokenizer, name, line, piece)
            files[split].write(found.astype(dtype).tobytes())
            tokens[split] += len(found)
            sizes[split] += len(piece)
    finally:
        for file in files.values():
            file.close()
    tokenizer.save(folder)
    about = {"source": source.name, "dtype": dtype.name, "tokens": tokens, "bytes": sizes}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")


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


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"cache: expected {count} tokens in {path}, got {path.stat().st_size} bytes; remove {path.parent}")
    return np.memmap(path, dtype, "r") if count else np.empty(0, dtype)


@contextlib.contextmanager
def _shown(console: Console | None) -> Iterator[Progressing]:
    """Progress on a console: a bar a stage, from the first stage on."""
    if console is None:
        yield lambda stage, done, total: None
        return
    bars, tasks = Progress(console=console, transient=True), {}

    def show(stage: str, done: int, total: int) -> None:
        bars.start()
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total or None)
        bars.update(tasks[stage], completed=done)

    try:
        yield show
    finally:
        if tasks:
            bars.stop()
