"""Language modelling: text as bytes, words or pieces, a decoder, bits a byte in the length of the training and beyond."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isopos.lab.tasks.task import Data, Metric, Recipe, Scored, Task, View, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.lab.data.corpora import Corpus
    from isopos.models import Decoder

__all__ = ["Language", "Text", "TextTask", "Windows"]

NOTE = "bits/byte of held-out text, at 2x and 4x the training length"


@dataclass(frozen=True)
class TextTask(Task):
    """What a model reads in windows of a text."""

    data: str = ""
    """A file, an archive, a folder that is read in sorted order, or hf:NAME:CONFIG; empty: the Python language reference.
    docs/data.md says more. The last tenth is held out, where names of files make no splits."""
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"  # What a token is.
    vocabulary: int = 0  # Tokens; 0: as many as the tokenizer has.
    length: int = 256  # Tokens of a training window; multiples are evaluated, too.
    tied: bool = False  # One matrix for the vectors of tokens and the logits.
    validation_tokens: int = 32768  # At most so many tokens of the held-out text are scored; 0: all.

    unit = "tokens"
    limits = (("length", 1, 10**9), ("vocabulary", 0, 10**9), ("validation_tokens", 0, 10**15))
    settled = ("vocabulary",)

    @property
    def token(self) -> str:
        """What readers call a token."""
        return "byte" if self.tokenizer == "bytes" else "token"

    @property
    def tokens(self) -> str:
        """What readers call several, with the tokenizer."""
        return "bytes" if self.tokenizer == "bytes" else f"tokens ({self.tokenizer})"

    def size(self, recipe: Recipe) -> int:
        return recipe.training.batch * self.length

    @property
    def fits(self) -> dict[str, object]:
        return {"length": self.length, "reach": self.reach}

    @property
    def reach(self) -> int:
        """Tokens of the longest window that is evaluated."""
        return max(metric.view.multiple for metric in self.metrics) * self.length

    def extent(self, view: View, axes: int) -> tuple[float, int]:
        return view.multiple, self.length

    def check(self, recipe: Recipe) -> list[str]:
        import torch

        from isopos.lab.tasks.build import check_group, repeated_positions
        from isopos.positions import Line

        few = 0 < self.validation_tokens < self.length
        require("validation_tokens", self.validation_tokens, f"0, or at least the {self.length} of a window", not few)
        scheme = check_group(recipe, (Line,), "on a line, which text has")
        with torch.no_grad():
            small = recipe.edit(vocabulary=0)  # of no consequence for the scheme
            small.task.model(small)(torch.zeros(1, self.length, dtype=torch.int64))
        return repeated_positions(recipe, scheme, self.reach)

    def corpus(self, console: "Console | None", run: Path | None) -> "Corpus":
        """The text as tokens of its own tokenizer, or of that of a run."""
        from isopos.lab.data import corpora
        from isopos.lab.data.tokenizers import load_tokenizer

        choice: dict[str, Any] = {"tokenizer": self.tokenizer, "vocabulary": self.vocabulary or None}
        if run is not None:
            choice = {"tokenizer": load_tokenizer(run)}
        return corpora.load(self.data, self.length, **choice, console=console)


@dataclass(frozen=True)
class Language(TextTask):
    """What a language model reads."""

    cutoffs: tuple[int, ...] = ()  # Of an adaptive softmax: the ranks where its clusters begin. None: an ordinary softmax.
    start: str = ""
    """A run of this task: training begins with its weights and tokenizer. Its scheme may be another, as rope whose positions
    are dropped: --scheme none:attention=softmax. Empty: with random weights."""

    name = "language"
    schemes = "none,sinusoidal,rope,lrpe-unitary,lrpe-orthogonal,permuteformer,retnet"
    loss_scale: ClassVar[float] = 1 / math.log(2)
    views = ("split", "multiple", "scored", "limit")
    metrics = tuple(
        Metric(title, "bits_per_byte", view=View(multiple=multiple), note=NOTE)
        for title, multiple in (("bits/byte", 1), ("at 2x", 2), ("at 4x", 4))
    )

    @property
    def more(self) -> tuple[Metric, ...]:
        perplexity = Metric("perplexity", "perplexity", style=".2f", note=f"perplexity of a {self.token}")
        return perplexity, Metric(f"nats/{self.token}", "nats"), Metric("scored", "tokens", "higher", ",.0f")

    @property
    def loss_unit(self) -> str:
        return f"bits/{self.token}"

    def setting(self, recipe: Recipe) -> str:
        return f"A decoder of {self.tokens}, in windows of {self.length}."

    def check(self, recipe: Recipe) -> list[str]:
        if self.tied and self.cutoffs:
            raise ValueError("tied: expected false beside cutoffs, whose rare tokens have fewer features; give --no-tied")
        self.origin(recipe)
        return super().check(recipe.edit(cutoffs=()))  # of no consequence for the scheme

    def model(self, recipe: Recipe) -> "Decoder":
        from isopos.lab.tasks.build import build_model
        from isopos.models import Decoder

        return build_model(recipe, Decoder, self.vocabulary or 256, cutoffs=self.cutoffs, tied=self.tied)

    def origin(self, recipe: Recipe) -> Path | None:
        from isopos.lab.tasks.build import begun

        folder = Path(self.start) if self.start else None
        if folder is not None:
            begun(folder, recipe, Language, ("cutoffs", "tied"))
        return folder

    def anew(self, recipe: Recipe) -> tuple[str, ...]:
        """A scheme that is not the run's: of what it learns nothing can be kept."""
        from isopos.lab.tasks.build import begun

        return () if begun(Path(self.start), recipe, Language).scheme == recipe.scheme else ("scheme.",)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "Text":
        return Text(self, self.corpus(console, run or self.origin(recipe)))


class Windows(Data):
    """A corpus to train on and to score."""

    def __init__(self, task: TextTask, corpus: "Corpus"):
        self.task, self.corpus = task, corpus
        self.name, self.sha256 = corpus.name, corpus.sha256
        unit = "bytes" if task.tokenizer == "bytes" else "tokens"
        self.summary = f"{len(corpus.train)} + {len(corpus.validation)} {unit}"
        self.splits = ("validation", "test") if len(corpus.test) else ("validation",)

    def settle(self, recipe: Recipe) -> Recipe:
        return recipe.edit(vocabulary=self.corpus.vocabulary)

    def save(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)

    def limit(self, view: View) -> int | None:
        """At most so many tokens of a split are scored; nothing: all."""
        return (self.task.validation_tokens if view.limit < 0 else view.limit) or None


class Text(Windows):
    """A corpus whose next tokens are predicted."""

    task: Language
    calls = ("advance", "loss")  # by which long windows are evaluated

    def settle(self, recipe: Recipe) -> Recipe:
        import torch

        from isopos.models import AdaptiveHead

        recipe = super().settle(recipe)
        if self.task.cutoffs:
            with torch.device("meta"):
                AdaptiveHead(recipe.model.model_dim, self.corpus.vocabulary, self.task.cutoffs)
        return recipe

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        return self.corpus.batch(recipe.seed, step, recipe.training.batch, self.task.length, rank, ranks)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        tokens, targets = batch
        return model(tokens, targets=targets)

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        from isopos.lab.tasks.decoding import perplexity, why_not

        length = view.multiple * self.task.length
        scored = int(view.scored) if view.scored >= 1 else max(1, round(view.scored * length)) if view.scored else None
        limit = self.limit(view)
        if reason := why_not(model, self.corpus, length, view.split, limit):
            return Scored(reason=reason)
        return Scored(perplexity(model, self.corpus, length, split=view.split, scored=scored, limit=limit))
