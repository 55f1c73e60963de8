"""Language modelling: text as bytes, words or pieces, a decoder, bits a byte in the length of the training and beyond."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isopos.lab.tasks.task import Data, Metric, Scored, Task, View, expect

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.lab.data.corpora import Corpus
    from isopos.lab.recipes import Recipe
    from isopos.models import Decoder

__all__ = ["Language", "Text"]

NOTE = "bits/byte of held-out text, at 2x and 4x the training length"


@dataclass(frozen=True)
class Language(Task):
    """What a language model reads."""

    data: str = ""
    """A file, an archive, a folder that is read in sorted order, or hf:NAME:CONFIG; empty: the Python language reference.
    docs/data.md says more. The last tenth is held out, where names of files make no splits."""
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"  # What a token is.
    vocabulary: int = 0  # Tokens; 0: as many as the tokenizer has.
    length: int = 256  # Tokens of a training window; 2 and 4 times as many are evaluated, too.
    cutoffs: tuple[int, ...] = ()  # Of an adaptive softmax: the ranks where its clusters begin. None: an ordinary softmax.
    tied: bool = False  # One matrix for the vectors of tokens and the logits.
    validation_tokens: int = 32768  # At most so many tokens of the held-out text are scored; 0: all.

    name = "language"
    schemes = "none,sinusoidal,rope,lrpe-unitary,lrpe-orthogonal,permuteformer,retnet"
    unit = "tokens"
    loss_scale: ClassVar[float] = 1 / math.log(2)
    limits = (("length", 1, 10**9), ("vocabulary", 0, 10**9), ("validation_tokens", 0, 10**15))
    settled = ("vocabulary",)
    views = ("split", "multiple", "scored", "limit")
    metrics = tuple(
        Metric(title, "bits_per_byte", view=View(multiple=multiple), note=NOTE)
        for title, multiple in (("bits/byte", 1), ("at 2x", 2), ("at 4x", 4))
    )

    @property
    def more(self) -> tuple[Metric, ...]:
        token = "byte" if self.tokenizer == "bytes" else "token"
        perplexity = Metric("perplexity", "perplexity", style=".2f", note=f"perplexity of a {token}")
        return perplexity, Metric(f"nats/{token}", "nats"), Metric("scored", "tokens", "higher", ",.0f")

    @property
    def loss_unit(self) -> str:
        return "bits/byte" if self.tokenizer == "bytes" else "bits/token"

    def size(self, recipe: "Recipe") -> int:
        return recipe.training.batch * self.length

    def setting(self, recipe: "Recipe") -> str:
        tokens = "bytes" if self.tokenizer == "bytes" else f"tokens ({self.tokenizer})"
        return f"A decoder of {tokens}, in windows of {self.length}."

    @property
    def fits(self) -> dict[str, object]:
        return {"length": self.length, "reach": self.reach}

    @property
    def reach(self) -> int:
        """Tokens of the longest window that is evaluated."""
        return max(metric.view.multiple for metric in self.metrics) * self.length

    def check(self, recipe: "Recipe") -> list[str]:
        import torch

        from isopos.encodings import Permutation
        from isopos.lab.tasks.build import check_group
        from isopos.positions import Line

        if self.tied and self.cutoffs:
            raise ValueError("tied: expected false beside cutoffs, whose rare tokens have fewer features; give --no-tied")
        few = 0 < self.validation_tokens < self.length
        expect("validation_tokens", self.validation_tokens, f"0, or at least the {self.length} of a window", not few)
        scheme = check_group(recipe, (Line,), "on a line, which text has")
        with torch.no_grad():
            small = recipe.edit(vocabulary=0, cutoffs=())  # of no consequence for the scheme
            small.task.model(small)(torch.zeros(1, self.length, dtype=torch.int64))
        return [
            f"{recipe.scheme}: its permutations repeat after {order} positions, fewer than the {self.reach} evaluated"
            for module in scheme.modules()
            if isinstance(module, Permutation) and (order := module.common_order) < self.reach
        ]

    def model(self, recipe: "Recipe") -> "Decoder":
        from isopos.lab.tasks.build import build_model
        from isopos.models import Decoder

        return build_model(recipe, Decoder, self.vocabulary or 256, cutoffs=self.cutoffs, tied=self.tied)

    def load(self, recipe: "Recipe", console: "Console | None" = None, run: Path | None = None) -> "Text":
        from isopos.lab.data import corpora
        from isopos.lab.data.tokenizers import load_tokenizer

        choice: dict[str, Any] = {"tokenizer": self.tokenizer, "vocabulary": self.vocabulary or None}
        if run is not None:
            choice = {"tokenizer": load_tokenizer(run)}
        return Text(self, corpora.load(self.data, self.length, **choice, console=console))


class Text(Data):
    """A corpus to train on and to score."""

    calls = ("advance", "loss")  # by which long windows are evaluated

    def __init__(self, task: Language, corpus: "Corpus"):
        self.task, self.corpus = task, corpus
        self.name, self.sha256 = corpus.name, corpus.sha256
        unit = "bytes" if task.tokenizer == "bytes" else "tokens"
        self.summary = f"{len(corpus.train)} + {len(corpus.validation)} {unit}"
        self.splits = ("validation", "test") if len(corpus.test) else ("validation",)

    def settle(self, recipe: "Recipe") -> "Recipe":
        import torch

        from isopos.models import AdaptiveHead

        recipe = recipe.edit(vocabulary=self.corpus.vocabulary)
        if self.task.cutoffs:
            with torch.device("meta"):
                AdaptiveHead(recipe.model.model_dim, self.corpus.vocabulary, self.task.cutoffs)
        return recipe

    def batch(self, recipe: "Recipe", step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        return self.corpus.batch(recipe.seed, step, recipe.training.batch, self.task.length, rank, ranks)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        tokens, targets = batch
        return model(tokens, targets=targets)

    def score(self, model: Any, recipe: "Recipe", view: View) -> Scored:
        from isopos.lab.tasks.decoding import perplexity, why_not

        length = view.multiple * self.task.length
        scored = int(view.scored) if view.scored >= 1 else max(1, round(view.scored * length)) if view.scored else None
        limit = (self.task.validation_tokens if view.limit < 0 else view.limit) or None
        if reason := why_not(model, self.corpus, length, view.split, limit):
            return Scored(reason=reason)
        return Scored(perplexity(model, self.corpus, length, split=view.split, scored=scored, limit=limit))

    def save(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)
