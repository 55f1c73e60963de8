"""Masked language modelling: a bidirectional model predicts masked tokens of a text.

References:
    BERT (Devlin et al. 2019), https://arxiv.org/abs/1810.04805: of the chosen tokens 80% are masked, 10% are replaced, 10%
    stay. RoBERTa (Liu et al. 2019), https://arxiv.org/abs/1907.11692: masks are redrawn each time a text is seen.
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
from isopos.lab.tasks.task import Cut, Metric, Recipe, Scored, View, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor


MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens


@dataclass(frozen=True)
class Masked(TextTask):
    """A masked language model, as LRPE's bidirectional model."""

    mask_share: float = 0.15  # Share of the tokens that are predicted; 8 of 10 of them are masked.

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

    def model(self, recipe: Recipe) -> Any:
        """An encoder; the mask is one more token after the tokens of the tokenizer."""
        return self.build(recipe, "Encoder", (self.vocabulary or 256) + 1, tied=self.tied)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "MaskedText":
        return MaskedText(self, self.corpus(console, run))


class MaskedText(Windows):
    """A corpus for predicting masked tokens."""

    task: Masked

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        """Masked tokens ``[b t]``, indices of chosen tokens ``[b n]``, and their original values ``[b n]``.

        All rows have the same number n, so that the mean loss over ranks equals the mean loss of the batch.
        """
        count = recipe.training.batch
        tokens, _ = self.corpus.batch(recipe.seed, step, count, self.task.length, rank, ranks)
        first = rank * (count // ranks)
        rows = ((recipe.seed, step, 1 + row) for row in range(first, first + len(tokens)))
        return self._masked(tokens.numpy(), rows)

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        tokens, indices, targets, *share = batch
        logits = model(tokens, indices=indices).flatten(0, 1)
        if not share:
            return F.cross_entropy(logits, targets.flatten())
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") * share[0].to(logits.dtype)

    def shard(self, batch: "tuple[Tensor, ...]", cut: Cut, ranks: int) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]``, indices of chosen tokens in the shard, targets ``[b m]`` (-100: none), and a target's weight.

        m is the largest number of chosen tokens of a row, at least 1.
        """
        import torch

        tokens, indices, targets = batch
        index = cut(torch.arange(tokens.shape[1], device=tokens.device), 0)
        local = torch.full((tokens.shape[1],), -1, device=tokens.device)
        local[index] = torch.arange(len(index), device=tokens.device)
        chosen = local[indices]
        first = (chosen < 0).long().argsort(dim=1, stable=True)[:, : max(1, int((chosen >= 0).sum(1).max()))]
        chosen, targets = chosen.gather(1, first), targets.gather(1, first)
        share = torch.tensor(ranks / indices.numel(), dtype=torch.float64, device=tokens.device)
        return cut(tokens, 1), chosen.clamp_min(0), targets.masked_fill(chosen < 0, -100), share

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        """Scores of disjoint windows; the number of a window is the seed of its mask. A shorter last one is not read."""
        from torch.nn import functional as F

        from isopos.lab.tasks.decoding import tokens_at_once, unscorable
        from isopos.parallel import summed

        length, limit = view.multiple * self.task.length, self.limit(view)
        if reason := unscorable(model, self.corpus, length, view.split, limit):
            return Scored(reason=reason)
        tokens = len(self.corpus.split(view.split))
        windows, most = min(tokens, limit or tokens) // length, max(1, tokens_at_once(model, length) // length)
        nats, right, count = 0.0, 0, 0
        for begin in range(0, windows, most):
            numbers = range(begin, min(begin + most, windows))
            logits, targets, _ = self._answers(model, view.split, length, numbers)
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
            right += int((logits.argmax(-1) == targets).sum())
            count += int((targets >= 0).sum())
        nats, right, count = summed(model.group, next(model.parameters()).device, nats, right, count)
        return Scored(
            {"loss": nats / count, "accuracy": right / count, "bits": nats / count / math.log(2), "tokens": int(count)}
        )

    def examples(self, model: Any, recipe: Recipe, count: int) -> list[dict[str, Any]]:
        """Held-out windows with masks, the original text, and the text with predictions."""
        length, examples = self.task.length, []
        for n in range(min(count, len(self.corpus.validation) // length)):
            logits, _, (masked, indices) = self._answers(model, "validation", length, range(n, n + 1))
            predicted = masked[0].clone()
            predicted[indices[0]] = logits.argmax(-1)
            text = self.corpus.validation[n * length : (n + 1) * length]
            kinds = {"shown": masked[0], "text": text, "model": predicted}
            examples.append({name: self._text(tokens.tolist()) for name, tokens in kinds.items()})
        return examples

    def _answers(
        self, model: Any, split: str, length: int, numbers: range
    ) -> "tuple[Tensor, Tensor, tuple[Tensor, Tensor]]":
        """Logits ``[n vocabulary]`` and targets ``[n]`` of held-out windows by number; their masked tokens and indices."""
        text, device = self.corpus.split(split), next(model.parameters()).device
        tokens = np.stack([text[n * length : (n + 1) * length] for n in numbers]).astype(np.int64)
        batch = tuple(a.to(device) for a in self._masked(tokens, ((n,) for n in numbers)))
        masked, indices, targets, *_ = self.part(model, batch)
        return model(masked, indices=indices).flatten(0, 1), targets.flatten(), (masked, indices)

    def _masked(self, tokens: np.ndarray, seeds: Iterable[tuple[int, ...]]) -> "tuple[Tensor, Tensor, Tensor]":
        import torch

        size, share = self.corpus.vocabulary, self.task.mask_share
        rows = (mask_tokens(row, np.random.default_rng(seed), share, size) for row, seed in zip(tokens, seeds, strict=True))
        masked, indices = (torch.from_numpy(np.stack(one)) for one in zip(*rows, strict=True))
        return masked, indices, torch.from_numpy(tokens).gather(1, indices)

    def _text(self, tokens: Sequence[int]) -> str:
        """Text with an underscore for the mask."""
        words = self.corpus.tokenizer
        return b"".join(words.piece(token) if token < words.size else b"_" for token in tokens).decode(errors="replace")


def mask_tokens(
    tokens: np.ndarray, random: np.random.Generator, share: float, vocabulary: int
) -> tuple[np.ndarray, np.ndarray]:
    """Masked tokens ``[t]``, and the indices ``[n]`` of the share of them, at least one, that a model predicts.

    Of ten, eight become the mask, whose number is the size of the vocabulary, one a random token, and one is unchanged.

    Examples:
        >>> masked, indices = mask_tokens(np.zeros(1000, int), np.random.default_rng(0), 0.4, 256)
        >>> len(indices), int((masked == 256).sum()), int(((masked > 0) & (masked < 256)).sum())
        (400, 316, 53)
    """
    indices = np.sort(random.permutation(len(tokens))[: max(1, round(share * len(tokens)))])
    draw, others = random.random(len(indices)), random.integers(vocabulary, size=len(indices))
    masked = tokens.copy()
    masked[indices] = np.where(draw < MASKED, vocabulary, np.where(draw < MASKED + REPLACED, others, tokens[indices]))
    return masked, indices
