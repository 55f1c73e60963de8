"""The tasks of GLUE: labelled texts or pairs of texts, read from the published files.

These are the folders of GLUE's archive (train.tsv and dev.tsv; for MNLI dev_matched.tsv and dev_mismatched.tsv), and the
archives of CoLA and STS-B, whose tables have no header; those of STS-B end with .csv and have tabs, too. The labels of
GLUE's test splits are not published.

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
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from isopos.catalog import expect
from isopos.lab.data.arrays import Arrays, Ragged, Writer, in_memory
from isopos.lab.data.prepare import preparing
from isopos.lab.data.sources import Source, find_source, lines_of, row_error
from isopos.lab.data.tokenizers import Tokenizer

HIGHEST = 5  # score
SPLITS: tuple[str, ...] = ("train", "validation", "mismatched", "test")
SKIPPED = {"original", "tokenized"}  # folders of raw data


@dataclass(frozen=True)
class Subset:
    """One task of GLUE."""

    texts: tuple[str, ...]  # names of their columns
    label: str  # name of its column
    labels: tuple[str, ...] = ("0", "1")  # classes; empty: the label is a number from 0 to 5
    figures: tuple[str, ...] = ("accuracy",)  # metrics, the main one first
    plain: tuple[int, ...] = ()  # columns of texts and label in tables without a header
    ragged: bool = False  # whether published rows with missing columns are skipped


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
    """One or two texts, and the number of their label, or a score from 0 to 1 (a fifth of the score in the file)."""

    texts: tuple[str, ...]
    answer: float


def subset_of(source: str) -> str:
    """The task with the name of the folder or of one of its parents; CoLA if the source is empty (`phrases`).

    Raises:
        ValueError: If no folder has the name of a task.

    Examples:
        >>> subset_of("glue_data/RTE"), subset_of("CoLA/cola_public.zip"), subset_of("")
        ('RTE', 'CoLA', 'CoLA')
    """
    name = next((name for part in reversed(Path(source).parts) for name in SUBSETS if Path(part).stem == name), "")
    if source and not name:
        raise ValueError(
            f"subset: expected one of {', '.join(SUBSETS)}, which no folder of {source} is called after; name it"
        )
    return name or "CoLA"


def load_glue(source: str, name: str, tokenizer: Tokenizer, *, console: Console | None = None) -> Arrays:
    """The samples of a source by split, prepared once, then memory-mapped.

    Each split has the arrays SPLIT-tokens and SPLIT-starts of all texts, and SPLIT-answers. The fact `left` counts skipped
    rows and files.

    Args:
        source: As in `read_glue`; empty: `phrases`.
        name: A key of `SUBSETS`.
        tokenizer: Turns texts into tokens.

    Raises:
        ValueError: As of `read_glue`, and if train or validation has no row.
    """
    expect("subset", name, SUBSETS)
    if not source and name != "CoLA":
        raise ValueError(f"subset: expected CoLA without --data, whose phrases have one text and two classes, got {name}")
    if not source:
        return in_memory(lambda writer: _fill(writer, phrases(), tokenizer, Counter()))
    if not Path(source).exists():
        raise ValueError(f"data: expected a folder with {name}'s train.tsv and dev.tsv, but {source} does not exist")
    with preparing(find_source(source, tables=True), console=console) as preparation:
        (files,) = preparation.sources

        def fill(writer: Writer) -> dict[str, Any]:
            dropped = Counter()
            facts = _fill(writer, read_glue(files, name, dropped), tokenizer, dropped)
            for split, file in (("train", "train.tsv"), ("validation", "dev.tsv")):
                if not facts["rows"][split]:
                    raise ValueError(f"data: expected {name}'s {file} with labels, or a .gz of it, got none in {source}")
            return facts

        return preparation.arrays("glue", fill, name, tokenizer.fingerprint)


def _fill(
    writer: Writer, samples: Iterable[tuple[str, Sample]], tokenizer: Tokenizer, dropped: Counter[str]
) -> dict[str, Any]:
    sequences, rows = {split: Ragged(writer, split, tokenizer.size) for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, sample in samples:
        for text in sample.texts:
            sequences[split].add(tokenizer.encode(text))
        writer.add(f"{split}-answers", np.array([sample.answer], np.float64))
        rows[split] += 1
    return {"rows": rows, "left": dict(dropped)}


def read_glue(source: Source, name: str, dropped: Counter[str]) -> Iterator[tuple[str, Sample]]:
    """The split and the sample of each row of tables: .tsv or .tsv.gz, or .csv with tabs.

    The name of a file denotes its split: train, dev (validation), mismatched or test. Other files, files of ids, and the
    folders original and tokenized are skipped, and so are test tables without labels.

    Args:
        source: A folder or an archive.
        name: A key of `SUBSETS`.

    Raises:
        ValueError: If a row is wrong (with file and line).
    """
    for file, blocks in source.read(raw=False):
        path = PurePosixPath(Path(file).as_posix())
        if path.suffix.lower() not in (".tsv", ".csv") or SKIPPED & {*path.parts}:
            continue
        if split := _split(path.stem):
            for sample in _samples(file, split, SUBSETS[name], lines_of(file, blocks, "replace"), dropped):
                yield split, sample
        else:
            dropped[f"the file {path.name}"] += 1


def _split(stem: str) -> str:
    words = set(re.findall("[a-z]+", stem.lower()))
    known = {"ids": "", "train": "train", "test": "test", "mismatched": "mismatched", "dev": "validation"}
    return next((split for word, split in known.items() if word in words), "")


def _samples(file: str, split: str, subset: Subset, text: Iterable[str], dropped: Counter[str]) -> Iterator[Sample]:
    lines = ((number, line.removesuffix("\n").split("\t")) for number, line in enumerate(text, 1) if line.strip())
    number, first = next(lines, (1, [""]))
    names = [cell.strip() for cell in first]
    wanted = (*subset.texts, subset.label)
    if {*wanted} <= {*names}:
        at = tuple(map(names.index, wanted))
    elif {*subset.texts} <= {*names} and split == "test":
        dropped["rows without labels"] += sum(1 for _ in lines)
        return
    else:
        at, lines = subset.plain, chain([(number, first)], lines)
        if len(first) <= max(at, default=len(first)):
            raise ValueError(
                f"data: {file}, line {number}: expected the columns {', '.join(wanted)}, got {', '.join(names)}"
            )
    for number, cells in lines:
        if subset.ragged and len(cells) <= max(at):
            dropped["rows that lack columns"] += 1
            continue
        try:
            yield _sample(cells, at, subset)
        except ValueError as error:
            raise row_error(file, number, str(error)) from None


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
    """Phrases of the Python language reference; every other one has its words in reverse order and the label 0.

    The last tenth is the validation split.

    Examples:
        >>> split, sample = next(phrases())
        >>> split, sample.answer
        ('train', 1)
    """
    (_, blocks), *_ = find_source("").documents()
    phrases_of = re.findall(r"(?:\b[a-z]+ ){5,11}[a-z]+\b", " ".join(b"".join(blocks).decode().split()))
    different = dict.fromkeys(phrases_of)
    for n, words in enumerate(phrase.split() for phrase in different):
        split = "train" if n < len(different) - len(different) // 10 else "validation"
        yield split, Sample((" ".join(words[:: 1 if n % 2 == 0 else -1]),), 1 - n % 2)
