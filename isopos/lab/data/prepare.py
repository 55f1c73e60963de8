"""Preparing sources: splits of rows, learned vocabularies and cached arrays."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from rich.console import Console

from isopos.catalog import expect
from isopos.lab.data import cache
from isopos.lab.data.arrays import Arrays, Fill, Writer, cached_arrays, hash_of
from isopos.lab.data.sources import Source, survey
from isopos.lab.data.tokenizers import KINDS, Bytes, Tokenizer, learn, load_tokenizer

SPLITS: tuple[str, ...] = ("train", "validation", "test")
ALIKE = {
    "train": {"train", "training", "trainset"},
    "validation": {"valid", "validation", "validset", "val", "valset", "dev", "devset", "eval"},
    "test": {"test", "testing", "testset"},
}
"""Words that denote splits in the names of files and folders."""
CACHE_VERSION = 1

OnProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and the total (0 if unknown)."""

Surveyed = tuple[str, list[tuple[str, int]]]
"""Hash of a source's text, and name and size in bytes of every document."""


def named_split(name: str) -> str | None:
    """The split that the name of a file denotes: validation for wiki.valid.tokens; or None."""
    words = set(re.findall("[a-z]+", PurePosixPath(name.replace("\\", "/")).name.lower()))
    return next((split for split, names in ALIKE.items() if names & words), None)


def folders_of(source: str, name: str) -> tuple[str, ...]:
    """The folders and archives of a document inside its source."""
    return PurePath(name).parts[len(PurePath(source).parts) : -1]


def split_of_folder(folder: str) -> str | None:
    """The split that the name of a folder or an archive denotes: train for train.zip, but not for my-train; or None."""
    stem = folder.partition(".")[0]
    return named_split(stem) if stem.isalpha() else None


def folder_classes(source: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """Split and class of each file of a source, by its folders; "" where these denote none.

    Folders that denote splits are splits if one of them, or of the folders next to them, is train. The class is the folder
    below, and without splits the first folder that differs.

    Raises:
        ValueError: If all folders of a level denote splits, but none train.
    """
    folders = [folders_of(source, name) for name in names]
    at = [next((n for n, one in enumerate(parts) if split_of_folder(one)), None) for parts in folders]
    level = min((n for n in at if n is not None), default=0)
    siblings = {split_of_folder(parts[level]) for parts in folders if len(parts) > level}
    if "train" in siblings:
        return [
            ("", "") if n is None else (split_of_folder(parts[n]) or "", "".join(parts[n + 1 : n + 2]))
            for parts, n in zip(folders, at, strict=True)
        ]
    if siblings and None not in siblings:
        found = ", ".join(sorted(map(str, siblings)))
        raise ValueError(f"data: expected a folder train next to {found}, got none in {source}")
    least = min(map(len, folders), default=0)
    shared = next((n for n, some in enumerate(zip(*folders, strict=False)) if len({*some}) > 1), least)
    return [("", "".join(parts[shared : shared + 1])) for parts in folders]


def split_rule(named: Iterable[str | None]) -> Callable[[str | None, bytes], str]:
    """A function that returns the split of a row, given the split that its file name denotes, and its content.

    If a file name denotes train, file names determine the splits; without a file of validation, a tenth of the train rows
    is validation. Otherwise a tenth of all rows is validation and a tenth is test. Tenths are chosen by a hash of the
    content, so equal rows are in one split.
    """
    names = set(named)

    def split(name: str | None, content: bytes) -> str:
        tenth = hashlib.sha256(content).digest()[0] % 10
        if "train" not in names:
            return ("test", "validation")[tenth] if tenth < 2 else "train"
        name = name or "train"
        return "validation" if name == "train" and "validation" not in names and tenth == 1 else name

    return split


def check_tokenizer(tokenizer: str | Tokenizer, vocabulary: int | None) -> None:
    """Raise a ValueError for an unknown kind of tokenizer, or for a size other than that of a tokenizer that has one."""
    if isinstance(tokenizer, str):
        expect("tokenizer", tokenizer, KINDS)
    fixed = Bytes.size if tokenizer == "bytes" else getattr(tokenizer, "size", None)
    if fixed and vocabulary not in (None, fixed):
        raise ValueError(f"vocabulary: expected none with {tokenizer}, which has {fixed}, got {vocabulary}")


def cached_survey(source: Source, root: Path, progressing: OnProgress, raw: bool = False) -> Surveyed:
    """`survey`, from the cache while sizes and modification times of the files are the same."""
    stamp = source.stamp()
    total = sum(int(size) for _, size, _ in stamp) if source.plain else 0

    def read() -> Surveyed:
        return survey(source, raw, lambda done: progressing("reading", done, total))

    index = f"index-{hash_of(raw, source.tables, source.name, [path for path, _, _ in stamp])[:32]}"
    sha256, sizes = cache.cached_value(root, index, stamp, tuple[str, list[tuple[str, int]]], read) if stamp else read()
    return sha256, [(name, size) for name, size in sizes]


def generated_arrays(kind: str, fill: Fill, *settings: Any) -> Arrays:
    """The arrays that `fill` writes, a function of the settings alone, from the cache."""
    return cached_arrays(cache.default_root(), f"{kind}-{hash_of(*settings)[:32]}", fill)


@dataclass(frozen=True)
class Preparation:
    """Surveyed sources, and the arrays prepared from them in the cache."""

    sources: Sequence[Source]
    root: Path  # folder of the cache
    progressing: OnProgress
    stamps: list[list[list[str | int]]]  # of the sources, before they were read
    key: str  # a hash of their contents
    surveys: Sequence[Surveyed] = ()

    @property
    def names(self) -> list[str]:
        """Names of all documents."""
        return [name for _, sizes in self.surveys for name, _ in sizes]

    def tokenizer(
        self, kind: str | Tokenizer, vocabulary: int | None, texts: Callable[[], Iterable[str]], *settings: Any
    ) -> Tokenizer:
        """A tokenizer of that kind, learned from texts, which the settings determine; or the given tokenizer."""
        if isinstance(kind, Tokenizer) or kind == "bytes":
            return kind if isinstance(kind, Tokenizer) else Bytes()

        def build(folder: Path) -> None:
            learn(kind, texts(), vocabulary).save(folder)
            self.check()

        key = hash_of(self.key, kind, vocabulary, *settings)
        return load_tokenizer(cache.cached_folder(self.root, f"vocabulary-{key[:32]}", build))

    def arrays(self, kind: str, fill: Fill, *settings: Any) -> Arrays:
        """The arrays that `fill` writes, a function of the sources and the settings."""

        def checked(writer: Writer) -> dict[str, Any]:
            facts = fill(writer)
            self.check()
            return facts

        return cached_arrays(self.root, f"{kind}-{hash_of(self.key, *settings)[:32]}", checked)

    def check(self) -> None:
        """Raise a ValueError if files have changed since they were surveyed."""
        for source, stamp in zip(self.sources, self.stamps, strict=True):
            if source.stamp() != stamp:
                raise ValueError(
                    f"data: expected {source.name} to stay as it is while it is read, but it changed; start again"
                )


@contextlib.contextmanager
def preparing(
    *sources: Source, root: Path | None = None, console: Console | None = None, raw: bool = False
) -> Iterator[Preparation]:
    """Survey sources, as raw bytes or as text, and show the progress on a console.

    The key depends on all contents, and on the names of folders, which are splits and classes.
    """
    root = cache.default_root() if root is None else root
    with progress_bars(console) as progressing:
        stamps = [source.stamp() for source in sources]
        surveys = [cached_survey(source, root, progressing, raw) for source in sources]
        about = [
            (sha256, [[folders_of(source.name, name), PurePath(name).name, size] for name, size in sizes])
            for source, (sha256, sizes) in zip(sources, surveys, strict=True)
        ]
        yield Preparation(sources, root, progressing, stamps, hash_of(CACHE_VERSION, about), surveys)


@contextlib.contextmanager
def progress_bars(console: Console | None, what: str = "text") -> Iterator[OnProgress]:
    """Shows progress: bars on a terminal, elsewhere one line per stage; nothing without a console."""
    from rich.progress import Progress

    live, stages = console is not None and console.is_interactive, {}
    with Progress(console=console, transient=True, disable=not live) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total or None)
                if console is not None and not live:
                    console.print(f"preparing {what}: {stage}", markup=False)
            bars.update(stages[stage], completed=done)

        yield show
