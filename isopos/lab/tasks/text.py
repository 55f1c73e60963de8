"""Classification of texts or pairs of texts, read from tables or from one folder per class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.tasks.samples import Labelled, accuracy, majority, padded
from isopos.lab.tasks.task import Recipe, Task

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.lab.data.texts import Texts

__all__ = ["LabelledTexts", "TextClasses"]

SHOWN = 300  # characters of a text in a report
SPECIAL = 2  # tokens after those of the tokenizer: the separator of two texts, and the class token


@dataclass(frozen=True)
class TextClasses(Task):
    """A classifier of texts."""

    data: str = ""
    """A .csv, .tsv or .jsonl, a folder or an archive of them, or with one folder per class (as aclImdb), or hf:NAME; empty:
    passages with turned brackets. Names with train, valid and test make the splits, otherwise a hash of the text."""
    column: str = "text"  # Column of the text: its name, or its number from 1 on in a table without names.
    pair: str = ""  # Column of a second text, to classify pairs.
    label: str = "label"  # Column of the class.
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"  # Kind of tokens.
    vocabulary: int = 0  # Largest number of tokens; 0: that of the tokenizer.
    classes: int = 0  # Number of classes; 0: that of the data.
    longest: int = 512  # Largest number of tokens of a sample, or of each of two towers; longer texts are cut.
    pairs: Literal["joined", "towers"] = "joined"  # Two texts as one sequence, or as two with the same weights.
    pooling: Literal["mean", "first"] = "mean"  # Classify the mean of all tokens, or an additional first token.
    validation_rows: int = 0  # Largest number of held-out samples that are scored; 0: all.

    name = "text"
    schemes = "none,sinusoidal,rope,ape-sequence"
    edits = MappingProxyType({"steps": 500, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "texts"
    counted = "texts"
    limits = ((("vocabulary", "classes", "validation_rows"), 0, 10**9), ("longest", 4, 10**9))
    inferred = ("vocabulary", "classes")
    metrics = accuracy("held-out texts", "whose class is found")

    def setting(self, recipe: Recipe) -> str:
        tokens = "bytes" if self.tokenizer == "bytes" else f"tokens ({self.tokenizer})"
        what = "texts" if not self.pair else f"pairs of texts ({self.pairs})"
        return f"A classifier of {what} of at most {self.longest} {tokens}."

    @property
    def fits(self) -> dict[str, object]:
        return {"length": self.longest, "reach": self.longest}

    def check(self, recipe: Recipe) -> Sequence[str]:
        from isopos.lab.tasks.build import check_group
        from isopos.positions import Line

        if self.pairs == "towers" and not self.pair:
            raise ValueError("pair: expected the column of a second text, which towers compare, got none")
        check_group(recipe, (Line,), "on a line, which text has", length=self.longest, remedy="cuts texts there")
        return super().check(recipe)

    def model(self, recipe: Recipe) -> Any:
        from isopos.lab.tasks.build import build_model
        from isopos.models import Classifier, PairClassifier

        kind = PairClassifier if self.pairs == "towers" else Classifier
        return build_model(recipe, kind, (self.vocabulary or 256) + SPECIAL, self.classes or 2, pooling=self.pooling)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "LabelledTexts":
        from isopos.lab.data import texts
        from isopos.lab.data.tokenizers import load_tokenizer

        choice: dict[str, Any] = {"tokenizer": self.tokenizer, "vocabulary": self.vocabulary or None}
        if run is not None:
            choice = {"tokenizer": load_tokenizer(run)}
        columns = (self.column, self.pair) if self.pair else (self.column,)
        return LabelledTexts(self, texts.load_texts(self.data, columns, self.label, **choice, console=console))


class LabelledTexts(Labelled):
    """Texts for training and evaluation."""

    unit = "texts"

    def __init__(self, task: TextClasses, texts: "Texts"):
        self.task, self.texts = task, texts
        self.name, self.sha256, self.limit = texts.name, texts.arrays.sha256, task.validation_rows
        every = {split: texts.lengths(split) for split in ("train", "validation", "test")}
        self.kept = kept = {split: self._kept(lengths) for split, lengths in every.items()}
        self.sizes = {split: self._size(lengths) for split, lengths in kept.items()}
        self.exact = {"classes": len(texts.classes)}
        cut = sum(int((kept[split] < every[split]).any(-1).sum()) for split in every)
        counts = " + ".join(str(len(sizes)) for sizes in self.sizes.values())
        left = "".join(f", {file} left out, which has no labels" for file in texts.arrays.facts["left"])
        self.summary = (
            f"{counts} texts of {len(texts.classes)} classes, {cut} of them cut at {task.longest} tokens{left}"
            + majority(texts.labels("validation"), texts.classes)
        )

    def _kept(self, lengths: np.ndarray) -> np.ndarray:
        """Number of tokens of each text ``[samples each]`` that are kept."""
        t = self.task
        room = t.longest - (t.pooling == "first") - (lengths.shape[1] == 2 and t.pairs == "joined")
        if lengths.shape[1] == 1 or t.pairs == "towers":
            return np.minimum(lengths, room)
        half = np.minimum(lengths, np.maximum(room - lengths[:, ::-1], (room + np.array([1, 0])) // 2))
        return np.minimum(lengths, half)

    def _size(self, kept: np.ndarray) -> np.ndarray:
        """Number of tokens of each sample; for towers, of the longer text."""
        t = self.task
        joined = kept.sum(-1) + kept.shape[1] - 1 if t.pairs == "joined" else kept.max(-1)
        return joined + (t.pooling == "first")

    def infer(self, recipe: Recipe) -> Recipe:
        return super().infer(recipe.edit(vocabulary=self.texts.tokenizer.size))

    def labels(self, split: str) -> np.ndarray:
        return self.texts.labels(split)

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, or ``[b 2 t]`` for towers, positions ``[t 1]``, a mask like tokens, and classes ``[b]``."""
        import torch

        from isopos.positions import sequence

        tokens, mask = padded(self._sequences(split, rows))
        if self.task.pairs == "towers":
            tokens, mask = tokens.unflatten(0, (-1, 2)), mask.unflatten(0, (-1, 2))
        return tokens, sequence(tokens.shape[-1]), mask, torch.from_numpy(self.texts.labels(split)[rows])

    def _sequences(self, split: str, rows: np.ndarray) -> list[np.ndarray]:
        """The tokens of each sample; for towers, of both texts of each sample in turn."""
        texts, task, between = self.texts, self.task, self.texts.tokenizer.size
        start = [between + 1] * (task.pooling == "first")
        sequences = []
        for row, kept in zip(rows, self.kept[split][rows], strict=True):
            sample = [texts.sequence(split, texts.each * row + n)[:count] for n, count in enumerate(kept)]
            if len(sample) == 2 and task.pairs == "joined":
                sample = [np.concatenate([sample[0], [between], sample[1]])]
            sequences += [np.concatenate([start, one]) for one in sample]
        return sequences

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        texts = self.texts
        return [
            {
                **{name: self._shown(texts.each * row + n) for n, name in enumerate(("text", "second text")[: texts.each])},
                "class": texts.classes[answer],
                "model": texts.classes[guess],
            }
            for row, answer, guess in self.guesses(model, recipe, count)
        ]

    def _shown(self, n: int) -> str:
        text = self.texts.tokenizer.decode(self.texts.sequence("validation", n)[:SHOWN])[:SHOWN]
        return text + "..." * (len(self.texts.sequence("validation", n)) > SHOWN)

    def save(self, folder: Path) -> None:
        self.texts.tokenizer.save(folder)
