"""Masked language modelling: some tokens of a text are hidden, and a bidirectional model finds them in their places.

References:
    BERT (Devlin et al. 2019), https://arxiv.org/abs/1810.04805: of the tokens that are chosen 80% are hidden, 10% are
    others, 10% stay. RoBERTa (Liu et al. 2019), https://arxiv.org/abs/1907.11692: drawn anew each time that a text is seen.
    Should You Mask 15% in Masked Language Modeling? (Wettig et al. 2022), https://arxiv.org/abs/2202.08005: or 40%.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.tasks.language import TextTask, Windows
from isopos.lab.tasks.task import Metric, Recipe, Scored, View, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from isopos.models import Encoder

__all__ = ["Masked", "MaskedText", "hide"]

HIDDEN, OTHER = 0.8, 0.1  # shares of the chosen tokens that are hidden, or others


@dataclass(frozen=True)
class Masked(TextTask):
    """What a masked language model reads: text of which a share of the tokens is to be found; LRPE's bidirectional model."""

    mask_share: float = 0.15  # Of the tokens of a window, which are hidden (8 of 10), others, or as they are, and scored.

    name = "masked"
    schemes = "none,sinusoidal,rope,lrpe-orthogonal,permuteformer"
    edits = MappingProxyType({"steps": 400, "batch": 16, "length": 128})
    views = ("split", "multiple", "limit")
    metrics = (
        Metric("loss", "loss", note="loss: nats a masked token of held-out text"),
        Metric("accuracy", "accuracy", "higher", ".1%", note="accuracy: share of the masked tokens that are found"),
        Metric("loss at 2x", "loss", view=View(multiple=2), note="loss at 2x: in windows of twice the training length"),
    )

    @property
    def more(self) -> tuple[Metric, ...]:
        return Metric("bits", "bits", note="bits a masked token"), Metric("scored", "tokens", "higher", ",.0f")

    def setting(self, recipe: Recipe) -> str:
        return f"An encoder of {self.tokens}, {self.mask_share:.0%} of them masked, in windows of {self.length}."

    def check(self, recipe: Recipe) -> list[str]:
        require("mask_share", self.mask_share, "a share, above 0 and at most 1", 0 < self.mask_share <= 1)
        return super().check(recipe)

    def model(self, recipe: Recipe) -> "Encoder":
        """An encoder, for which the mask is one more word after those of the tokenizer."""
        from isopos.lab.tasks.build import build_model
        from isopos.models import Encoder

        return build_model(recipe, Encoder, (self.vocabulary or 256) + 1, tied=self.tied)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "MaskedText":
        return MaskedText(self, self.corpus(console, run))


class MaskedText(Windows):
    """A corpus, a share of whose tokens is found."""

    task: Masked

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        """Tokens as they are shown ``[b t]``, places ``[b n]`` that are chosen, and the tokens ``[b n]`` that stood there.

        Every row has as many, so that the mean loss of ranks is that of the batch.
        """
        count = recipe.training.batch
        tokens, _ = self.corpus.batch(recipe.seed, step, count, self.task.length, rank, ranks)
        first = rank * (count // ranks)
        rows = ((recipe.seed, step, 1 + row) for row in range(first, first + len(tokens)))
        return self._hidden(tokens.numpy(), rows)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        tokens, places, targets = batch
        return F.cross_entropy(model(tokens, places=places).flatten(0, 1), targets.flatten())

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        """Of windows side by side, whose masks are those of their numbers; a rest that fills no window is not read."""
        from torch.nn import functional as F

        from isopos.lab.tasks.decoding import at_once, why_not

        length, limit = view.multiple * self.task.length, self.limit(view)
        if reason := why_not(model, self.corpus, length, view.split, limit):
            return Scored(reason=reason)
        tokens = len(self.corpus.split(view.split))
        windows, most = min(tokens, limit or tokens) // length, max(1, at_once(model, length) // length)
        nats, right, count = 0.0, 0, 0
        for begin in range(0, windows, most):
            numbers = range(begin, min(begin + most, windows))
            logits, targets, _ = self._answers(model, view.split, length, numbers)
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
            right += int((logits.argmax(-1) == targets).sum())
            count += len(targets)
        return Scored({"loss": nats / count, "accuracy": right / count, "bits": nats / count / math.log(2), "tokens": count})

    def examples(self, model: Any, recipe: Recipe, count: int) -> list[dict[str, Any]]:
        """Held-out windows as a model is shown them, as they are, and as it takes them to be."""
        length, found = self.task.length, []
        for n in range(min(count, len(self.corpus.validation) // length)):
            logits, _, (shown, places) = self._answers(model, "validation", length, range(n, n + 1))
            taken = shown[0].clone()
            taken[places[0]] = logits.argmax(-1)
            text = self.corpus.validation[n * length : (n + 1) * length]
            kinds = {"shown": shown[0], "text": text, "model": taken}
            found.append({name: self._text(tokens.tolist()) for name, tokens in kinds.items()})
        return found

    def _answers(
        self, model: Any, split: str, length: int, numbers: range
    ) -> "tuple[Tensor, Tensor, tuple[Tensor, Tensor]]":
        """Logits ``[n vocabulary]`` and targets ``[n]`` of held-out windows with their numbers, what is shown, and where."""
        text, device = self.corpus.split(split), next(model.parameters()).device
        tokens = np.stack([text[n * length : (n + 1) * length] for n in numbers]).astype(np.int64)
        shown, places, targets = (a.to(device) for a in self._hidden(tokens, ((n,) for n in numbers)))
        return model(shown, places=places).flatten(0, 1), targets.flatten(), (shown, places)

    def _hidden(self, tokens: np.ndarray, seeds: Iterable[tuple[int, ...]]) -> "tuple[Tensor, Tensor, Tensor]":
        import torch

        size, share = self.corpus.vocabulary, self.task.mask_share
        rows = (hide(row, np.random.default_rng(seed), share, size) for row, seed in zip(tokens, seeds, strict=True))
        shown, places = (torch.from_numpy(np.stack(one)) for one in zip(*rows, strict=True))
        return shown, places, torch.from_numpy(tokens).gather(1, places)

    def _text(self, tokens: Sequence[int]) -> str:
        """With a low line for the mask."""
        words = self.corpus.tokenizer
        return b"".join(words.piece(token) if token < words.size else b"_" for token in tokens).decode(errors="replace")


def hide(tokens: np.ndarray, random: np.random.Generator, share: float, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[t]`` as a model is shown them, and the places ``[n]`` of those that it is to find: a share, at least one.

    Of ten eight are the mask, whose number is the size of the vocabulary, one is any word of it, and one is as it was.

    Examples:
        >>> shown, places = hide(np.zeros(1000, int), np.random.default_rng(0), 0.4, 256)
        >>> len(places), int((shown == 256).sum()), int(((shown > 0) & (shown < 256)).sum())
        (400, 316, 53)
    """
    places = np.sort(random.permutation(len(tokens))[: max(1, round(share * len(tokens)))])
    draw, others = random.random(len(places)), random.integers(vocabulary, size=len(places))
    shown = tokens.copy()
    shown[places] = np.where(draw < HIDDEN, vocabulary, np.where(draw < HIDDEN + OTHER, others, tokens[places]))
    return shown, places
