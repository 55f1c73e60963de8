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
    >>> tokens.shape, corpus.tokenizer.decode(corpus.validation[:8])
    (torch.Size([2, 8]), 'one two ')
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from isopos.catalog import expect
from isopos.lab.data.cache import default_root
from isopos.lab.data.prepare import SPLITS, Progressing, in_cache, in_memory
from isopos.lab.data.sources import find
from isopos.lab.data.tokenizers import Bytes, Tokenizer

__all__ = ["SPLITS", "Corpus", "load", "shown"]

SMALL = 64 << 20  # plain bytes up to this size stay in memory and need no cache


@dataclass(frozen=True, eq=False)
class Corpus:
    """Streams of tokens ``[n]``, unsigned integers, and what they are tokens of."""

    name: str  # of the source
    sha256: str  # a fingerprint of text and tokens: of the bytes themselves where the tokens are those
    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray  # empty where the source has no third part
    sizes: dict[str, int]  # bytes of UTF-8 in each split, for bits per byte

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return self.tokenizer.size

    def split(self, name: str) -> np.ndarray:
        """The tokens of train, validation or test.

        Raises:
            ValueError: Where it is another name, or empty.
        """
        expect("split", name, SPLITS)
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

    Plain files at byte level are taken as they are, and up to 64 MiB stay in memory. All else has folders in the cache,
    named by hashes of the text and of the tokenizer. A text is known to be the same by its files' sizes and times of change,
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
    if isinstance(tokenizer, str):
        expect("tokenizer", tokenizer, kinds)
    if vocabulary is not None and tokenizer not in kinds[1:]:
        raise ValueError(f"vocabulary: expected none beside {tokenizer}, which has its own, got {vocabulary}")
    found, root = find(source), default_root() if cache is None else cache
    with shown(console) as progressing:
        raw = found.plain and (tokenizer == "bytes" or isinstance(tokenizer, Bytes))
        if raw and sum(path.stat().st_size for path in found.files) <= SMALL:
            sha256, used, tokens, sizes = in_memory(found)
        else:
            sha256, used, tokens, sizes = in_cache(found, raw, tokenizer, vocabulary, root, progressing)
    corpus = Corpus(found.name, sha256, used, **tokens, sizes=sizes)
    for split in ("train", "validation"):
        tokens = len(getattr(corpus, split))
        if tokens <= length:
            raise ValueError(
                f"data: expected at least {length + 1} tokens of {split} for a window of {length}, got {tokens} in "
                f"{corpus.name}; use more text or a smaller --length"
            )
    return corpus


@contextlib.contextmanager
def shown(console: Console | None) -> Iterator[Progressing]:
    """Shows how far a preparation is, or nothing without a console."""
    live, stages = console is not None and console.is_interactive, {}
    with Progress(console=console, transient=True, disable=not live) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total or None)
                if console is not None and not live:
                    console.print(f"preparing text: {stage}", markup=False)
            bars.update(stages[stage], completed=done)

        yield show
