"""Language modelling: a decoder of bytes, words or pieces, scored by bits per byte at training length and beyond."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.task import Cut, Data, Metric, Recipe, Scored, View, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.lab.data.corpora import Corpus

NOTE = "bits/byte of held-out text"
LONGER = "at 2x, 4x: in windows of 2 and 4 times the training length"


@dataclass(frozen=True)
class TextTask(PositionedTask):
    """Settings of tasks that read windows of a text."""

    data: str = ""
    """A file, an archive, a folder, which is read in sorted order, or hf:NAME:CONFIG; empty: the Python language reference.
    The last tenth is held out unless names of files make splits. See docs/data.md."""
    tokenizer: Literal["bytes", "words", "bpe"] = "bytes"  # Kind of tokens.
    vocabulary: int = 0  # Largest number of tokens; 0: as in the tokenizer.
    length: int = 256  # Tokens of a training window; evaluation also uses multiples.
    tied: bool = False  # Share one matrix between embedding and logits.
    validation_tokens: int = 32768  # Largest number of held-out tokens that are scored; 0: all.

    unit = "tokens"
    in_shards = "length"
    limits = (("length", 1, 10**9), ("vocabulary", 0, 10**9), ("validation_tokens", 0, 10**15))
    inferred = ("vocabulary",)
    groups, where, bound = ("Line",), "on a line, which text has", ("", "")  # windows are checked by a call of the model

    @property
    def token(self) -> str:
        """The noun for a token."""
        return "byte" if self.tokenizer == "bytes" else "token"

    @property
    def tokens(self) -> str:
        """The noun for several tokens, with the tokenizer."""
        return "bytes" if self.tokenizer == "bytes" else f"tokens ({self.tokenizer})"

    def size(self, recipe: Recipe) -> int:
        return recipe.training.batch * self.length

    @property
    def fits(self) -> dict[str, object]:
        return {"length": self.length, "reach": self.reach}

    @property
    def reach(self) -> int:
        """Length of the longest window that is evaluated."""
        return max(metric.view.multiple for metric in self.metrics) * self.length

    def extent(self, view: View, axes: int) -> tuple[float, int]:
        return view.multiple, self.length

    def check(self, recipe: Recipe) -> list[str]:
        import torch

        from isopos.lab.tasks.build import repeated_positions

        few = 0 < self.validation_tokens < self.length
        require("validation_tokens", self.validation_tokens, f"0, or at least the {self.length} of a window", not few)
        scheme = self.check_groups(recipe)
        with torch.no_grad():
            small = recipe.edit(vocabulary=0)  # the scheme does not depend on it
            small.task.model(small)(torch.zeros(1, self.length, dtype=torch.int64))
        return repeated_positions(recipe, scheme, self.reach)

    def corpus(self, console: "Console | None", run: Path | None) -> "Corpus":
        """The text as tokens of a new tokenizer, or of the tokenizer of a run."""
        from isopos.lab.data import corpora
        from isopos.lab.data.tokenizers import tokenizer_arguments

        chosen = tokenizer_arguments(self.tokenizer, self.vocabulary, run)
        return corpora.load_corpus(self.data, self.length, **chosen, console=console)


@dataclass(frozen=True)
class Language(TextTask):
    """A language model."""

    cutoffs: tuple[int, ...] = ()  # Ranks at which the clusters of an adaptive softmax begin; empty: ordinary softmax.
    start: str = ""
    """A run of this task: training begins with its weights and tokenizer. Its scheme may be different, for instance to drop
    the positions of rope: --scheme none:attention=softmax. Empty: random weights."""

    name = "language"
    schemes = "none,sinusoidal,rope,lrpe-unitary,lrpe-orthogonal,permuteformer,retnet"
    loss_scale: ClassVar[float] = 1 / math.log(2)
    views = ("split", "multiple", "scored", "limit")
    metrics = tuple(
        Metric(title, "bits_per_byte", view=View(multiple=multiple), note=note)
        for title, multiple, note in (("bits/byte", 1, NOTE), *((f"at {n}x", n, LONGER) for n in (2, 4)))
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
            raise ValueError("tied: expected false with cutoffs, whose rare tokens have fewer features; give --no-tied")
        self.origin(recipe)
        return super().check(recipe.edit(cutoffs=()))  # the scheme does not depend on them

    def model(self, recipe: Recipe) -> Any:
        return self.build(recipe, "Decoder", self.vocabulary or 256, cutoffs=self.cutoffs, tied=self.tied)

    def origin(self, recipe: Recipe) -> Path | None:
        from isopos.lab.tasks.build import warm_start_recipe

        folder = Path(self.start) if self.start else None
        if folder is not None:
            before = warm_start_recipe(folder, recipe, Language, ("cutoffs", "tied", "tokenizer"))
            known = before.as_dict()["vocabulary"]
            require("vocabulary", self.vocabulary, f"{known}, as in {folder}", self.vocabulary in (0, known))
        return folder

    def reinitialised(self, recipe: Recipe) -> tuple[str, ...]:
        """The parameters of the scheme, if the run has another one."""
        from isopos.lab.tasks.build import warm_start_recipe

        return () if warm_start_recipe(Path(self.start), recipe, Language).scheme == recipe.scheme else ("scheme.",)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "Text":
        return Text(self, self.corpus(console, run or self.origin(recipe)))


class Windows(Data):
    """A corpus for training and evaluation."""

    def __init__(self, task: TextTask, corpus: "Corpus"):
        self.task, self.corpus = task, corpus
        self.name, self.sha256 = corpus.name, corpus.sha256
        unit = "bytes" if task.tokenizer == "bytes" else "tokens"
        unknown = corpus.tokenizer.share_unknown(corpus.validation)
        self.summary = f"{len(corpus.train)} + {len(corpus.validation)} {unit}"
        self.summary += f", {unknown:.1%} of the held-out ones unknown" * (unknown > 0)
        for name in corpus.left[:1]:
            more = f" and {len(corpus.left) - 1} more" if len(corpus.left) > 1 else ""
            self.summary += f", left out without a split in the name: {Path(name).name}{more}"
        self.splits = ("validation", "test") if len(corpus.test) else ("validation",)

    def infer(self, recipe: Recipe) -> Recipe:
        return recipe.edit(vocabulary=self.corpus.vocabulary)

    def save(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)

    def limit(self, view: View) -> int | None:
        """Largest number of scored tokens; None: all."""
        return (self.task.validation_tokens if view.limit < 0 else view.limit) or None


class Text(Windows):
    """A corpus for predicting the next token."""

    task: Language
    calls = ("advance", "features", "loss")  # used to evaluate long windows

    def infer(self, recipe: Recipe) -> Recipe:
        import torch

        from isopos.models import AdaptiveHead

        recipe = super().infer(recipe)
        if self.task.cutoffs:
            with torch.device("meta"):
                AdaptiveHead(recipe.model.model_dim, self.corpus.vocabulary, self.task.cutoffs)
        return recipe

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        return self.corpus.batch(recipe.seed, step, recipe.training.batch, self.task.length, rank, ranks)

    def shard(self, batch: "tuple[Tensor, ...]", cut: Cut, ranks: int) -> "tuple[Tensor, ...]":
        return tuple(cut(rows, 1) for rows in batch)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        tokens, targets = batch
        return model(tokens, targets=targets)

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        from isopos.lab.tasks.decoding import perplexity, unscorable

        length = view.multiple * self.task.length
        scored = int(view.scored) if view.scored >= 1 else max(1, round(view.scored * length)) if view.scored else None
        limit = self.limit(view)
        if reason := unscorable(model, self.corpus, length, view.split, limit):
            return Scored(reason=reason)
        return Scored(perplexity(model, self.corpus, length, split=view.split, scored=scored, limit=limit))
