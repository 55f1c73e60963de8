"""What sources become once and for all: which split a row is of, vocabularies that are learned, arrays that are kept."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from isopos.catalog import expect
from isopos.lab.data import cache
from isopos.lab.data.arrays import Arrays, Fill, Writer, key_of, prepared
from isopos.lab.data.sources import Source, survey
from isopos.lab.data.tokenizers import KINDS, Bytes, Tokenizer, learn, load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "SPLITS",
    "Preparation",
    "Progressing",
    "check_tokenizer",
    "named_split",
    "preparing",
    "shown",
    "split_rule",
    "surveyed",
]

SPLITS: tuple[str, ...] = ("train", "validation", "test")
FORMAT = 1  # of prepared folders

Progressing = Callable[[str, int, int], None]
"""Hears of a stage, how much of it is done, and of how much in all (0 where unknown)."""

Surveyed = tuple[str, list[tuple[str, int]]]
"""A hash of a source's text, and name and size in bytes of every document."""


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


def check_tokenizer(tokenizer: str | Tokenizer, vocabulary: int | None) -> None:
    """Raise a ValueError where a name is no kind of tokenizer, or a size is given to one that has its own."""
    if isinstance(tokenizer, str):
        expect("tokenizer", tokenizer, KINDS)
    if vocabulary is not None and tokenizer not in KINDS[1:]:
        raise ValueError(f"vocabulary: expected none beside {tokenizer}, which has its own, got {vocabulary}")


def surveyed(source: Source, root: Path, progressing: Progressing, raw: bool = False) -> Surveyed:
    """What `survey` finds in a source, of the cache while its files' sizes and times of change stay."""
    stamp = source.stamp()
    total = sum(int(size) for _, size, _ in stamp) if source.plain else 0

    def read() -> Surveyed:
        return survey(source, raw, lambda done: progressing("reading", done, total))

    index = f"index-{key_of(raw, source.tables, source.name, [path for path, _, _ in stamp])[:32]}"
    sha256, sizes = cache.remembered(root, index, stamp, tuple[str, list[tuple[str, int]]], read) if stamp else read()
    return sha256, [(name, size) for name, size in sizes]


@dataclass(frozen=True)
class Preparation:
    """Sources of which something is made that the cache keeps."""

    sources: Sequence[Source]
    root: Path  # of the cache
    progressing: Progressing
    stamps: list[list[list[str | int]]]  # of the sources, before they were read
    key: str  # a hash of what they hold
    surveys: Sequence[Surveyed] = ()

    @property
    def names(self) -> list[str]:
        """Those of all documents."""
        return [name for _, sizes in self.surveys for name, _ in sizes]

    def tokenizer(
        self, kind: str | Tokenizer, vocabulary: int | None, texts: Callable[[], Iterable[str]], *settings: Any
    ) -> Tokenizer:
        """The tokenizer of that kind, learned of texts which the settings choose; or one that is there already."""
        if isinstance(kind, Tokenizer) or kind == "bytes":
            return kind if isinstance(kind, Tokenizer) else Bytes()

        def build(folder: Path) -> None:
            learn(kind, texts(), vocabulary).save(folder)
            self.check()

        key = key_of(self.key, kind, vocabulary, *settings)
        return load_tokenizer(cache.prepared(self.root, f"vocabulary-{key[:32]}", build))

    def arrays(self, kind: str, fill: Fill, *settings: Any) -> Arrays:
        """What `fill` writes, a function of the sources and of the settings."""

        def checked(writer: Writer) -> dict[str, Any]:
            facts = fill(writer)
            self.check()
            return facts

        return prepared(self.root, f"{kind}-{key_of(self.key, *settings)[:32]}", checked)

    def check(self) -> None:
        """Raise a ValueError where the files have changed since they were surveyed."""
        for source, stamp in zip(self.sources, self.stamps, strict=True):
            if source.stamp() != stamp:
                raise ValueError(
                    f"data: expected {source.name} to stay as it is while it is read, but it changed; start again"
                )


@contextlib.contextmanager
def preparing(
    *sources: Source, root: Path | None = None, console: "Console | None" = None, raw: bool = False
) -> Iterator[Preparation]:
    """Survey sources, as raw bytes or as text, and show on a console how far their preparation is.

    What is made of them depends on all that they hold, and on the folders in which it is, which are splits and classes.
    """
    root = cache.default_root() if root is None else root
    with shown(console) as progressing:
        stamps = [source.stamp() for source in sources]
        surveys = [surveyed(source, root, progressing, raw) for source in sources]
        about = [(sha256, [[PurePosixPath(name).parts[-3:], size] for name, size in sizes]) for sha256, sizes in surveys]
        yield Preparation(sources, root, progressing, stamps, key_of(FORMAT, about), surveys)


@contextlib.contextmanager
def shown(console: "Console | None", what: str = "text") -> Iterator[Progressing]:
    """Shows how far a preparation is, by a bar on a terminal and elsewhere by a line a stage; nothing without a console."""
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
