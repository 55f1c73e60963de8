"""Classification of texts or pairs of texts, read from tables or from one folder per class."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.data.arrays import Arrays
from isopos.lab.data.texts import Texts, load_texts
from isopos.lab.data.tokenizers import Tokenizer, tokenizer_arguments
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Labelled, classifier_metrics, majority, padded
from isopos.lab.tasks.task import Recipe

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

SHOWN = 300  # characters of a text in a report
SPECIAL = 2  # tokens added to the tokenizer: the separator of two texts, and the class token


@dataclass(frozen=True)
class TextClasses(PositionedTask):
    """A classifier of texts."""

    data: str = ""
    """A .csv, .tsv or .jsonl, a folder or an archive of them, or with one folder per class (as aclImdb), or hf:NAME; empty:
    passages with turned brackets. Names with train, valid and test make the splits, otherwise a hash of the text."""
    column: str = "text"  # Column of the text: its name, or its number from 1 on in a table without names.
    pair: str = ""  # Column of a second text, to classify pairs.
    label: str = "label"  # Column of the class.
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"  # Kind of tokens.
    vocabulary: int = 0  # Largest number of tokens; 0: as in the tokenizer.
    classes: int = 0  # Number of classes; 0: as in the data.
    longest: int = 512  # Largest number of tokens of a sample, or of each of two towers; longer texts are cut.
    pairs: Literal["joined", "towers"] = "joined"  # Two texts as one sequence, or as two with the same weights.
    pooling: Literal["mean", "first"] = "mean"  # Classify the mean of all tokens, or an additional first token.
    validation_rows: int = 0  # Largest number of held-out samples that are scored; 0: all.

    name = "text"
    schemes = "none,sinusoidal,rope,ape-sequence"
    edits = MappingProxyType({"steps": 500, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    unit = "texts"
    counted = "texts"
    in_shards = True
    limits = ((("vocabulary", "classes", "validation_rows"), 0, 10**9), ("longest", 4, 10**9))
    inferred = ("vocabulary", "classes")
    groups, where, bound = ("Line",), "on a line, which text has", ("longest", "cuts texts there")
    columns = ("column", "label")
    metrics = classifier_metrics("held-out texts", "whose class is found")

    def setting(self, recipe: Recipe) -> str:
        tokens = "bytes" if self.tokenizer == "bytes" else f"tokens ({self.tokenizer})"
        what = "texts" if not self.pair else f"pairs of texts ({self.pairs})"
        return f"A classifier of {what} of at most {self.longest} {tokens}."

    def check(self, recipe: Recipe) -> Sequence[str]:
        if self.pairs == "towers" and not self.pair:
            raise ValueError("pair: expected the column of a second text, which towers compare, got none")
        return super().check(recipe)

    def model(self, recipe: Recipe) -> Any:
        kind = "PairClassifier" if self.pairs == "towers" else "Classifier"
        return self.build(recipe, kind, (self.vocabulary or 256) + SPECIAL, self.classes or 2, pooling=self.pooling)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "LabelledTexts":
        columns = (self.column, self.pair) if self.pair else (self.column,)
        chosen = tokenizer_arguments(self.tokenizer, self.vocabulary, run)
        return LabelledTexts(self, load_texts(self.data, columns, self.label, **chosen, console=console))


class TextSamples(Labelled):
    """Samples of one text or two, which are cut to fit.

    Args:
        arrays: Tokens of all texts by split.
        each: Texts per sample.
    """

    def __init__(self, task: Any, arrays: Arrays, tokenizer: Tokenizer, each: int, splits: Sequence[str]):
        self.task, self.arrays, self.tokenizer, self.limit = task, arrays, tokenizer, task.validation_rows
        every = {split: arrays.lengths(split).reshape(-1, each) for split in splits}
        self.kept = {split: self.fitted(lengths) for split, lengths in every.items()}  # tokens of each text [samples each]
        self.sizes = {split: self.size(kept) for split, kept in self.kept.items()}
        self.cut = sum(int((self.kept[split] < every[split]).any(1).sum()) for split in splits)

    @abstractmethod
    def fitted(self, lengths: np.ndarray) -> np.ndarray:
        """Number of tokens that are kept of texts of these lengths ``[samples each]``."""

    @abstractmethod
    def size(self, kept: np.ndarray) -> np.ndarray:
        """Number of tokens of samples, given the numbers of kept tokens of their texts ``[samples each]``."""

    @abstractmethod
    def joined(self, texts: list[np.ndarray]) -> list[np.ndarray]:
        """The sequence of tokens for the texts of a sample, or two sequences for two towers."""

    def texts(self, split: str, row: int) -> list[np.ndarray]:
        """The kept tokens of each text of a sample."""
        kept = self.kept[split][row]
        return [self.arrays.sequence(split, len(kept) * row + n)[:count] for n, count in enumerate(kept)]

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, or ``[b 2 t]`` for towers, positions ``[t 1]``, a mask like tokens, and answers ``[b]``."""
        import torch

        from isopos.positions import sequence

        samples = [self.joined(self.texts(split, row)) for row in rows]
        tokens, mask = padded([one for sample in samples for one in sample])
        if (towers := len(samples[0])) > 1:
            tokens, mask = tokens.unflatten(0, (-1, towers)), mask.unflatten(0, (-1, towers))
        return tokens, sequence(tokens.shape[-1]), mask, torch.from_numpy(self.labels(split)[rows])

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


def cut_longer(lengths: np.ndarray, room: int, favoured: int) -> np.ndarray:
    """Tokens of each text ``[samples each]`` that are kept, of all texts of a sample at most `room`.

    Of two texts the longer one is cut; of two long ones the one at the index `favoured` keeps one more if `room` is odd.

    Examples:
        >>> cut_longer(np.array([[30, 3], [30, 30]]), 19, favoured=0).tolist()
        [[16, 3], [10, 9]]
    """
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    half = (room + (np.arange(2) == favoured)) // 2
    return np.minimum(lengths, np.maximum(room - lengths[:, ::-1], half))


class LabelledTexts(TextSamples):
    """Texts for training and evaluation."""

    def __init__(self, task: TextClasses, texts: Texts):
        super().__init__(task, texts.arrays, texts.tokenizer, texts.each, ("train", "validation", "test"))
        self.dataset, self.name, self.sha256 = texts, texts.name, texts.arrays.sha256
        self.exact, self.adopted = {"classes": len(texts.classes)}, {"vocabulary": self.tokenizer.size}
        counts = " + ".join(str(len(sizes)) for sizes in self.sizes.values())
        left = "".join(f", {file} left out, which has no labels" for file in texts.arrays.facts["left"])
        self.summary = (
            f"{counts} texts of {len(texts.classes)} classes, {self.cut} of them cut at {task.longest} tokens{left}"
            + majority(texts.labels("validation"), texts.classes)
        )

    def fitted(self, lengths: np.ndarray) -> np.ndarray:
        t = self.task
        room = t.longest - (t.pooling == "first") - (lengths.shape[1] == 2 and t.pairs == "joined")
        return np.minimum(lengths, room) if t.pairs == "towers" else cut_longer(lengths, room, favoured=0)

    def size(self, kept: np.ndarray) -> np.ndarray:
        """For towers, of the longer text."""
        joined = kept.sum(-1) + kept.shape[1] - 1 if self.task.pairs == "joined" else kept.max(-1)
        return joined + (self.task.pooling == "first")

    def joined(self, texts: list[np.ndarray]) -> list[np.ndarray]:
        task, between = self.task, self.tokenizer.size
        if len(texts) == 2 and task.pairs == "joined":
            texts = [np.concatenate([texts[0], [between], texts[1]])]
        start = [between + 1] * (task.pooling == "first")
        return [np.concatenate([start, one]) for one in texts]

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        each, classes = self.dataset.each, self.dataset.classes
        return [
            {
                **{name: self._shown(each * row + n) for n, name in enumerate(("text", "second text")[:each])},
                "class": classes[answer],
                "model": classes[guess],
            }
            for row, answer, guess in self.guesses(model, recipe, count)
        ]

    def _shown(self, n: int) -> str:
        tokens = self.arrays.sequence("validation", n)
        return self.tokenizer.decode(tokens[:SHOWN])[:SHOWN] + "..." * (len(tokens) > SHOWN)
