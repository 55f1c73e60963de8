"""The tasks of GLUE: an encoder, pretrained as a masked language model, classifies texts and pairs of texts."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos import catalog
from isopos.lab.data.arrays import Arrays
from isopos.lab.data.glue import SPLITS, SUBSETS, Subset, load_glue, subset_of
from isopos.lab.data.tokenizers import Bytes, Tokenizer, load_tokenizer
from isopos.lab.runs.files import read_json
from isopos.lab.tasks.masked import Masked
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.task import Metric, Recipe, Scored, View
from isopos.lab.tasks.text import TextSamples, cut_longer

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

FIGURES = {
    "accuracy": Metric("accuracy", "accuracy", "higher", ".1%", note="accuracy: share of held-out rows labelled rightly"),
    "matthews": Metric("Matthews", "matthews", "higher", note="Matthews: correlation of labels"),
    "f1": Metric("F1", "f1", "higher", ".1%", note="F1: of the rows that are duplicates or paraphrases"),
    "pearson": Metric("Pearson", "pearson", "higher", note="Pearson: correlation of scores"),
    "spearman": Metric("Spearman", "spearman", "higher", note="Spearman: correlation of the scores' ranks"),
}


@dataclass(frozen=True)
class Glue(PositionedTask):
    """A classifier of one or two texts, each followed by a line feed; features of tokens are averaged."""

    data: str = ""
    """A folder or an archive of one of GLUE's tasks, with train.tsv and dev.tsv; empty: phrases of the Python language
    reference, half of them with their words in reverse order, which is the class."""
    subset: str = ""  # CoLA, SST-2, MRPC, QQP, STS-B, MNLI, QNLI or RTE; empty: from the name of the data's folder.
    start: str = ""
    """A run of the task masked, or a folder of such runs, in which scheme and seed select one: training begins with its
    tokenizer and its weights, except the head. Empty: bytes and random weights."""
    length: int = 256  # Tokens of the longest sample; in longer ones the longer text is cut.
    vocabulary: int = 0  # Number of tokens; 0: as in the tokenizer.
    validation_rows: int = 0  # Largest number of held-out rows that are scored; 0: all.

    name = "glue"
    schemes = "none,rope,lrpe-orthogonal,permuteformer"
    edits = MappingProxyType({"steps": 300, "batch": 32, "length": 128, "learning_rate": 2e-3})
    unit = "rows"
    counted = "rows"
    in_shards = True
    limits = (("length", 4, 10**9), (("vocabulary", "validation_rows"), 0, 10**9))
    inferred = ("subset", "vocabulary")
    groups, where, bound = ("Line",), "on a line, which text has", ("length", "cuts texts there")

    @property
    def kind(self) -> Subset:
        """The chosen task of `SUBSETS`."""
        return SUBSETS[self.subset or subset_of(self.data)]

    @property
    def metrics(self) -> tuple[Metric, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        loss = Metric("loss", "loss", note=f"loss: {self.loss_unit}")
        return (*(FIGURES[name] for name in self.kind.figures), loss)

    @property
    def loss_unit(self) -> str:
        return "nats" if self.kind.labels else "squared error"

    def setting(self, recipe: Recipe) -> str:
        begin = f"that begins with the weights of {self.start}" if self.start else "that begins with random weights"
        what = self.subset or subset_of(self.data) if self.data else "phrases, some of them in reverse order"
        return f"A classifier of {what}, {begin}."

    def check(self, recipe: Recipe) -> list[str]:
        catalog.expect("subset", self.subset or subset_of(self.data), SUBSETS)
        super().check(recipe)
        self.origin(recipe)
        return []

    def origin(self, recipe: Recipe) -> Path | None:
        from isopos.lab.tasks.build import build_scheme, warm_start_recipe

        if not self.start:
            return None
        folder = self._run(recipe)
        before = warm_start_recipe(folder, recipe, Masked, ("scheme",))
        if build_scheme(before).fingerprint != build_scheme(recipe).fingerprint:
            raise ValueError(
                f"start: expected {recipe.scheme} with the constants that it has in {folder}, which follow seed and length, "
                f"got others; give --seed {before.seed}, or choose such options of the scheme in both"
            )
        return folder

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Classifier", (self.vocabulary or 256) + 1, len(self.kind.labels) or 1)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "GlueSamples":
        folder = run or self.origin(recipe)
        tokenizer = load_tokenizer(folder) if folder else Bytes()
        samples = load_glue(self.data, self.subset or subset_of(self.data), tokenizer, console=console)
        return GlueSamples(self, samples, tokenizer)

    def _run(self, recipe: Recipe) -> Path:
        """The run `start`, or the run in that folder with the same scheme and seed."""
        folder, runs = Path(self.start), []
        if (folder / "recipe.json").exists():
            return folder
        for path in sorted(folder.glob("*/recipe.json")):
            values = read_json(path, dict[str, Any], "name another folder")
            if values.get("task") == Masked.name:
                runs.append((values["scheme"], values["seed"], path.parent))
        alike = [run for scheme, seed, run in runs if (scheme, seed) == (recipe.scheme, recipe.seed)]
        if len(alike) != 1:
            wanted = f"start: expected one run with the scheme {recipe.scheme} and the seed {recipe.seed} in {folder}"
            got = ", ".join(run.name for *_, run in runs) or "none"
            raise ValueError(f"{wanted}, got {got}; isopos train lrpe-blm makes one")
        return alike[0]


class GlueSamples(TextSamples):
    """Rows of a task of GLUE."""

    def __init__(self, task: Glue, arrays: Arrays, tokenizer: Tokenizer):
        self.kind, self.name, self.end = task.kind, task.data or "built-in phrases", tokenizer.encode("\n")
        splits = [split for split in SPLITS if arrays.facts["rows"][split]]
        super().__init__(task, arrays, tokenizer, len(self.kind.texts), splits)
        self.sha256 = f"{arrays.sha256[:32]}{tokenizer.fingerprint[:32]}"
        self.exact, self.adopted = {"vocabulary": tokenizer.size}, {"subset": task.subset or subset_of(task.data)}
        dropped = f", {self.cut} cut to {task.length} tokens" * (self.cut > 0)
        dropped += "".join(f", {count} {what} left out" for what, count in arrays.facts["left"].items())
        usual = ""
        if self.kind.labels:
            answer = int(np.bincount(self.labels("train").astype(int)).argmax())
            usual = (
                f"; without a model: always {self.kind.labels[answer]} {(self.labels('validation') == answer).mean():.1%}"
            )
        counts = " + ".join(str(len(self.sizes[split])) for split in splits)
        self.summary = f"{counts} rows ({', '.join(splits)}){dropped}{usual}"

    def fitted(self, lengths: np.ndarray) -> np.ndarray:
        return cut_longer(lengths, self.task.length - lengths.shape[1] * len(self.end), favoured=1)

    def size(self, kept: np.ndarray) -> np.ndarray:
        return kept.sum(1) + kept.shape[1] * len(self.end)

    def joined(self, texts: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([part for text in texts for part in (text, self.end)])]

    def infer(self, recipe: Recipe) -> Recipe:
        if (start := self.task.origin(recipe)) and load_tokenizer(start).fingerprint != self.tokenizer.fingerprint:
            raise ValueError(
                f"start: expected runs with one tokenizer, got another in {start}; compare runs with one data set"
            )
        return super().infer(recipe)

    def labels(self, split: str) -> np.ndarray:
        return self.arrays[f"{split}-answers"]

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """As `TextSamples.tensors`; answers are labels, or scores from 0 to 1."""
        *sample, answers = super().tensors(split, rows, recipe, step)
        return *sample, answers.long() if self.kind.labels else answers.float()

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        if self.kind.labels:
            return super().loss(model, *batch)
        *sample, scores = batch
        return F.mse_loss(model(*sample)[:, 0], scores)

    def score_split(self, model: Any, recipe: Recipe, view: View, limit: int) -> Scored:
        """The figures of the subset, of all rows together; the correlation of a constant prediction is 0."""
        import torch
        from torch.nn import functional as F

        outputs = [self.answers(model, recipe, view.split, rows) for rows in self.rounds(view.split, limit)]
        logits, answers = (torch.cat(parts).cpu() for parts in zip(*outputs, strict=True))
        loss = F.cross_entropy(logits, answers) if self.kind.labels else F.mse_loss(logits[:, 0], answers)
        figures = {name: _figure(name, logits, answers) for name in self.kind.figures}
        return Scored({**figures, "loss": loss.item(), "rows": len(answers)})

    def examples(self, model: Any, recipe: Recipe, count: int) -> list[dict[str, Any]]:
        rows = np.arange(len(self.sizes["validation"]))[:count]
        logits, answers = self.answers(model, recipe, "validation", rows)
        names = self.kind.labels

        def in_words(answer: float) -> str:
            return names[int(answer)] if names else f"{answer:.2f}"

        guesses = logits.argmax(-1).tolist() if names else logits[:, 0].tolist()
        texts = [" | ".join(self.tokenizer.decode(text.tolist()) for text in self.texts("validation", row)) for row in rows]
        return [
            {"texts": text, "answer": in_words(answer), "model": in_words(guess)}
            for text, answer, guess in zip(texts, answers.tolist(), guesses, strict=True)
        ]


def _figure(name: str, logits: "Tensor", answers: "Tensor") -> float:
    """A metric of logits ``[n classes]``, or of scores ``[n 1]``.

    Matthews' correlation is computed as Pearson's correlation of binary labels: torchmetrics' is not 0 for constant
    predictions.
    """
    from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
    from torchmetrics.functional.classification import accuracy, binary_f1_score

    guesses, scores = logits.argmax(-1), logits[:, 0].double()
    match name:
        case "accuracy":
            value = accuracy(guesses, answers, "multiclass", num_classes=logits.shape[1], average="micro")
        case "f1":
            value = binary_f1_score(guesses, answers)
        case "spearman":
            value = spearman_corrcoef(scores, answers.double())
        case _:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The variance of predictions or target is close to zero")
                value = pearson_corrcoef(guesses.double() if name == "matthews" else scores, answers.double())
    return value.nan_to_num().item()
