"""The tasks of GLUE: texts, or pairs of texts, with a label, in the layouts of files in which they are published.

Those are the folders of GLUE's own archive (train.tsv, dev.tsv, of MNLI dev_matched.tsv and dev_mismatched.tsv), and CoLA's
and STS-B's own, whose tables have no header. GLUE keeps the labels of its tests to itself.

References:
    GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding (Wang et al. 2019).
    https://arxiv.org/abs/1804.07461
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isopos.catalog import expect
from isopos.lab.data.arrays import Arrays, Ragged, Writer, collect
from isopos.lab.data.prepare import preparing
from isopos.lab.data.sources import Source, find, whole_lines
from isopos.lab.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["SPLITS", "SUBSETS", "Sample", "Subset", "load", "phrases", "read", "subset_of"]

HIGHEST = 5  # of scores
SPLITS: tuple[str, ...] = ("train", "validation", "mismatched", "test")
OLDER = {"original", "tokenized"}  # folders of what a task was made from


@dataclass(frozen=True)
class Subset:
    """One task of GLUE."""

    texts: tuple[str, ...]  # columns
    label: str  # the column
    labels: tuple[str, ...] = ("0", "1")  # what it may hold; nothing: a number from 0 to 5
    figures: tuple[str, ...] = ("accuracy",)  # of merit, the main one first
    plain: tuple[int, ...] = ()  # numbers of the columns of texts and label where a table has no header
    ragged: bool = False  # whether published rows lack columns, and are left out


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
SUBSETS = {
    "CoLA": Subset(("sentence",), "label", figures=("matthews", "accuracy"), plain=(3, 1)),
    "SST-2": Subset(("sentence",), "label"),
    "MRPC": Subset(("#1 String", "#2 String"), "Quality", figures=("accuracy", "f1")),
    "QQP": Subset(("question1", "question2"), "is_duplicate", figures=("accuracy", "f1"), ragged=True),
    "STS-B": Subset(PAIR, "score", (), ("spearman", "pearson"), plain=(5, 6, 4)),
    "MNLI": Subset(PAIR, "gold_label", ("contradiction", "entailment", "neutral")),
    "QNLI": Subset(("question", "sentence"), "label", ENTAILMENT),
    "RTE": Subset(PAIR, "label", ENTAILMENT),
}


class Sample(NamedTuple):
    """One or two texts, and the number of their label, or a score from 0 to 1, which is a fifth of that in the file."""

    texts: tuple[str, ...]
    answer: float


def subset_of(source: str) -> str:
    """The task that a folder, or one that it is in, is called after; of no folder CoLA, whose like `phrases` are.

    Raises:
        ValueError: Where none is.

    Examples:
        >>> subset_of("glue_data/RTE"), subset_of("CoLA/cola_public.zip"), subset_of("")
        ('RTE', 'CoLA', 'CoLA')
    """
    found = next((name for part in reversed(Path(source).parts) for name in SUBSETS if Path(part).stem == name), "")
    if source and not found:
        raise ValueError(
            f"subset: expected one of {', '.join(SUBSETS)}, which no folder of {source} is called after; name it"
        )
    return found or "CoLA"


def load(source: str, name: str, tokenizer: Tokenizer, *, console: "Console | None" = None) -> Arrays:
    """The samples of a source, prepared once, then memory-mapped, by split.

    Those of a split are SPLIT-tokens and SPLIT-starts, of one text after another, and SPLIT-answers; `left` of the facts
    tells what was left out, counted.

    Args:
        source: As in `read`; empty: `phrases`.
        name: Of `SUBSETS`.
        tokenizer: Makes tokens of texts.
        console: Shows the progress of the preparation.

    Raises:
        ValueError: As of `read`, and where there is no row to train with or none for validation.
    """
    expect("subset", name, SUBSETS)
    if not source:
        return collect(lambda writer: _fill(writer, phrases(), tokenizer, Counter()))
    if not Path(source).exists():
        raise ValueError(f"data: expected a folder with {name}'s train.tsv and dev.tsv, but {source} does not exist")
    with preparing(find(source), console=console) as preparation:
        (found,) = preparation.sources

        def fill(writer: Writer) -> dict[str, Any]:
            left = Counter()
            facts = _fill(writer, read(found, name, left), tokenizer, left)
            for split, file in (("train", "train.tsv"), ("validation", "dev.tsv")):
                if not facts["rows"][split]:
                    raise ValueError(f"data: expected {name}'s {file} with labels, or a .gz of it, got none in {source}")
            return facts

        return preparation.arrays("glue", fill, name, tokenizer.fingerprint)


def _fill(writer: Writer, samples: Iterable[tuple[str, Sample]], tokenizer: Tokenizer, left: Counter[str]) -> dict[str, Any]:
    sequences, rows = {split: Ragged(writer, split, tokenizer.size) for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, sample in samples:
        for text in sample.texts:
            sequences[split].add(tokenizer.encode(text))
        writer.add(f"{split}-answers", np.array([sample.answer], np.float64))
        rows[split] += 1
    return {"rows": rows, "left": dict(left)}


def read(source: Source, name: str, left: Counter[str]) -> Iterator[tuple[str, Sample]]:
    """The split and the sample of each row of tables whose names end with .tsv, or .tsv.gz.

    A name speaks of train, dev (validation), mismatched, or test; others, those of ids and what lies in folders called
    original or tokenized are not read. Tests without labels are left out.

    Args:
        source: A folder or an archive.
        name: Of `SUBSETS`.
        left: Counts what is left out.

    Raises:
        ValueError: Where a row is wrong (with file and line).
    """
    for file, blocks in source.read(raw=False):
        path = PurePosixPath(Path(file).as_posix())
        if path.suffix.lower() != ".tsv" or OLDER & {*path.parts}:
            continue
        if split := _split(path.stem):
            for sample in _samples(file, split, SUBSETS[name], whole_lines(blocks), left):
                yield split, sample
        else:
            left[f"the file {path.name}"] += 1


def _split(stem: str) -> str:
    words = set(re.findall("[a-z]+", stem.lower()))
    known = {"ids": "", "train": "train", "test": "test", "mismatched": "mismatched", "dev": "validation"}
    return next((split for word, split in known.items() if word in words), "")


def _samples(file: str, split: str, subset: Subset, blocks: Iterable[bytes], left: Counter[str]) -> Iterator[Sample]:
    text = (line for block in blocks for line in block.decode(errors="replace").removesuffix("\n").split("\n"))
    lines = ((number, line.split("\t")) for number, line in enumerate(text, 1) if line.strip())
    number, first = next(lines, (1, [""]))
    names = [cell.strip() for cell in first]
    wanted = (*subset.texts, subset.label)
    if {*wanted} <= {*names}:
        at = tuple(map(names.index, wanted))
    elif {*subset.texts} <= {*names} and split == "test":
        left["rows without labels"] += sum(1 for _ in lines)
        return
    else:
        at, lines = subset.plain, chain([(number, first)], lines)
        if len(first) <= max(at, default=len(first)):
            raise ValueError(
                f"data: {file}, line {number}: expected the columns {', '.join(wanted)}, got {', '.join(names)}"
            )
    for number, cells in lines:
        if subset.ragged and len(cells) <= max(at):
            left["rows that lack columns"] += 1
            continue
        try:
            yield _sample(cells, at, subset)
        except ValueError as error:
            raise ValueError(f"data: {file}, line {number}: {error}; repair or remove the line") from None


def _sample(cells: list[str], at: tuple[int, ...], subset: Subset) -> Sample:
    if len(cells) <= max(at):
        raise ValueError(f"expected at least {max(at) + 1} columns, got {len(cells)}")
    *texts, label = (cells[n].strip() for n in at)
    if subset.labels:
        if label not in subset.labels:
            raise ValueError(f"column {at[-1] + 1}: expected one of {', '.join(subset.labels)}, got {label!r}")
        return Sample(tuple(texts), subset.labels.index(label))
    try:
        score = float(label)
    except ValueError:
        score = -1.0
    if not 0 <= score <= HIGHEST:
        raise ValueError(f"column {at[-1] + 1}: expected a number from 0 to {HIGHEST}, got {label!r}")
    return Sample(tuple(texts), score / HIGHEST)


def phrases() -> Iterator[tuple[str, Sample]]:
    """Phrases of the Python language reference, every other one with its words in reverse order, which has the label 0.

    The last tenth is for validation.

    Examples:
        >>> split, sample = next(phrases())
        >>> split, sample.answer
        ('train', 1)
    """
    (_, blocks), *_ = find("").documents()
    found = re.findall(r"(?:\b[a-z]+ ){5,11}[a-z]+\b", " ".join(b"".join(blocks).decode().split()))
    different = dict.fromkeys(found)
    for n, words in enumerate(phrase.split() for phrase in different):
        split = "train" if n < len(different) - len(different) // 10 else "validation"
        yield split, Sample((" ".join(words[:: 1 if n % 2 == 0 else -1]),), 1 - n % 2)
