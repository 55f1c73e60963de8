"""Sequence to sequence: copying, reversing and repeating symbols, and translating texts."""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from isopos.lab.data.pairs import load_pairs, sequences
from isopos.lab.data.splits import Splits, Stored
from isopos.lab.data.tokenizers import UNK, Tokenizer, tokenizer_arguments
from isopos.lab.tasks.positioned import PositionedTask
from isopos.lab.tasks.samples import Samples, padded
from isopos.lab.tasks.task import Metric, Recipe, Scored, View, require

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from isopos.models.seq2seq import Follow

SYMBOLS = 20  # of random sequences
PERPLEXITY = Metric("perplexity", "perplexity", style=".3f", note="perplexity of a target's token, given those before it")
TOKENS = Metric(
    "tokens", "accuracy", "higher", ".1%", note="tokens: share that is the likeliest, given the right ones before"
)
EXACT = Metric("exact", "exact", "higher", ".1%", note="exact: share of targets that come out whole, decoded freely")


@dataclass(frozen=True)
class Transducing(PositionedTask):
    """Settings of encoder-decoders: pairs of sources and targets, from files or random."""

    data: str = ""
    samples: int = 4000  # Number of random training pairs.
    held_out: int = 500  # Number of random pairs of validation, and of test.
    data_seed: int = 0  # Seed of random pairs, independent of the seed of weights.
    longest: int = 0  # Largest number of tokens of a source or a target: longer pairs are dropped; 0: none.
    tied: bool = True  # Share one matrix between the embeddings of sources and targets and the logits.
    validation_rows: int = 0  # Largest number of held-out pairs that are scored; 0: all.
    decoded: int = 200  # Largest number of these that are decoded greedily; 0: all.

    unit = "pairs"
    limits = (
        (("samples", "held_out"), 1, 10**9),
        ("data_seed", 0, 2**63 - 1),
        (("longest", "validation_rows", "decoded"), 0, 10**9),
    )
    inferred = ("longest",)
    metrics = (PERPLEXITY, TOKENS, EXACT)

    @property
    def more(self) -> tuple[Metric, ...]:
        counts = Metric("scored", "pairs", "higher", ",.0f"), Metric("decoded", "decoded", "higher", ",.0f")
        return Metric("nats/token", "nats"), *counts


class Transduced(Samples):
    """Pairs for training and evaluation: teacher-forced, and decoded greedily.

    Args:
        pairs: Sources and targets; pairs with a side of more than `task.longest` tokens are dropped.
        longer: What the summary calls these.
    """

    unit = "pairs"
    calls = ("greedy",)
    start: int  # the first input token of the decoder

    def __init__(self, task: Transducing, pairs: Splits[Any], longer: str):
        self.limit, self.decoded = task.validation_rows, task.decoded
        lengths = {split: self.lengths(rows) for split, rows in pairs.splits.items()}
        if task.longest:
            short = {split: (sides <= task.longest).all(1) for split, sides in lengths.items()}
            pairs, lengths = pairs.keep(longer, short), {split: sides[short[split]] for split, sides in lengths.items()}
        self.pairs, self.dropped = pairs.splits, pairs.summary
        self.sizes = {split: sides.sum(1) for split, sides in lengths.items()}
        self.longest = int(max(sides.max(initial=1) for sides in lengths.values()))
        self.least = {"longest": self.longest}

    @abstractmethod
    def lengths(self, pairs: Sequence[Any]) -> np.ndarray:
        """Tokens of the sources and of the targets that a model is given ``[n 2]``."""

    @abstractmethod
    def ends(self, tokens: np.ndarray) -> np.ndarray:
        """Whether decoded targets ``[... n]`` end at each token, bool ``[... n]``; the first end counts."""

    def follow(self, recipe: Recipe) -> "Follow":
        """Positions of the tokens of decoded targets, by default on a line; see `Seq2Seq.greedy`."""
        from isopos.positions import sequence

        def positions(tokens: "Tensor") -> "Tensor | None":
            complete = self.ends(tokens.cpu().numpy()).any(1).all()
            return None if complete else sequence(tokens.shape[1] + 1, device=tokens.device)

        return positions

    def ended(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens ``[n]`` of a decoded target up to its end."""
        ends = np.flatnonzero(self.ends(tokens))
        return tokens[: ends[0] + 1] if len(ends) else tokens

    @abstractmethod
    def pair_text(self, split: str, row: int) -> tuple[str, str]:
        """Source and target as text."""

    @abstractmethod
    def text(self, tokens: np.ndarray) -> str:
        """A decoded target as text."""

    def most(self, source: "Tensor", answers: "Tensor") -> int:
        """Largest number of tokens of a decoded target: by default as many as the right answers."""
        return answers.shape[1]

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        """The mean over pairs of the mean over tokens, so that ranks' shares of a batch have equal weight."""
        from torch.nn import functional as F

        *sample, answers = batch
        nats = F.cross_entropy(model(*sample).flatten(0, 1), answers.flatten(), ignore_index=-1, reduction="none")
        return (nats.view_as(answers).sum(1) / (answers >= 0).sum(1)).mean()

    def score_split(self, model: Any, recipe: Recipe, view: View, limit: int) -> Scored:
        """Perplexity, nats and accuracy of the tokens of targets, the share of exactly decoded targets, and the counts."""
        from torch.nn import functional as F

        most = self.decoded if view.limit < 0 else view.limit
        nats, right, tokens, pairs = 0.0, 0, 0, 0
        for rows in self.rounds(view.split, limit):
            *sample, answers = self.on_device(model, recipe, view.split, rows)
            logits, real = model(*sample), answers >= 0
            nats += F.cross_entropy(logits[real], answers[real], reduction="sum").item()
            right += int((logits.argmax(-1) == answers)[real].sum())
            tokens, pairs = tokens + int(real.sum()), pairs + len(rows)
        nats /= tokens
        perplexity = math.exp(nats) if nats < 700 else math.inf
        figures = {"perplexity": perplexity, "nats": nats, "accuracy": right / tokens, "pairs": pairs}
        decoded = [
            one
            for rows in self.rounds(view.split, min(most or pairs, pairs))
            for one in self.freely(model, recipe, view.split, rows)
        ]
        return Scored(figures | self.of_decoded(decoded) | {"decoded": len(decoded)})

    def of_decoded(self, decoded: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
        """Figures of pairs of right and decoded targets."""
        return {"exact": sum(np.array_equal(*pair) for pair in decoded) / len(decoded)}

    def freely(self, model: Any, recipe: Recipe, split: str, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """The right and the decoded target of each row."""
        source, _, positions, _, mask, answers = self.on_device(model, recipe, split, rows)
        tokens = model.greedy(source, self.start, self.most(source, answers), self.follow(recipe), positions, mask)
        pairs = zip(answers.cpu().numpy(), tokens.cpu().numpy(), strict=True)
        return [(right[right >= 0], self.ended(output)) for right, output in pairs]

    def examples(self, model: "nn.Module", recipe: Recipe, count: int) -> list[dict[str, Any]]:
        rows = np.arange(len(self.sizes["validation"]))[:count]
        decoded = self.freely(model, recipe, "validation", rows)
        texts = [self.pair_text("validation", row) for row in rows]
        titles = ("source", "target", "model")
        return [
            dict(zip(titles, (*sides, self.text(output)), strict=True))
            for sides, (_, output) in zip(texts, decoded, strict=True)
        ]

    def batched(self, sources: Sequence[Any], targets: Sequence[Any]) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
        """Sources ``[b s]`` and their mask ``[b s]``, inputs of the decoder and answers ``[b t]``, -1 beyond the end."""
        import torch

        source, mask = padded(sources)
        answers, _ = padded(targets, -1)
        inputs = torch.cat((torch.full_like(answers[:, :1], self.start), answers[:, :-1].clamp_min(0)), 1)
        return source, mask, inputs, answers


@dataclass(frozen=True)
class Transduction(Transducing):
    """An encoder-decoder that learns to copy, to reverse, to repeat, or to translate."""

    data: str = ""
    """Pairs of texts: a table with a tab between source and target or a folder of such .tsv, two files SOURCE,TARGET, a
    folder and --languages, or hf:NAME; names make the splits. Empty: random symbols."""
    languages: str = ""  # Suffixes of the files in a folder of texts, or columns of hf:NAME: en,de.
    operation: Literal["copy", "reverse", "repeat"] = "reverse"
    """Targets of random symbols: the source, the reversed source, or the source twice."""
    length: int = 16  # Mean number of symbols of a random source.
    deviation: int = 2  # Standard deviation of that number.
    tokenizer: Literal["words", "bpe"] = "words"  # Kind of tokens of texts, shared by sources and targets.
    vocabulary: int = 0  # Number of random symbols, 0: 20; for texts the largest number of tokens, 0: the tokenizer's.

    name = "transduction"
    schemes = (
        "none:attention=softmax,sinusoidal:attention=softmax,shaw,rope:attention=softmax,ape-sequence:attention=softmax"
    )
    edits = MappingProxyType({"steps": 600, "batch": 32, "layers": 2, "model_dim": 64, "heads": 4, "learning_rate": 2e-3})
    limits = (*Transducing.limits, ("length", 1, 10**6), (("deviation", "vocabulary"), 0, 10**9))
    inferred = ("longest", "vocabulary")
    groups, where = ("Line",), "on a line, which sequences have"

    @property
    def metrics(self) -> tuple[Metric, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """For texts BLEU instead of exact targets."""
        bleu = Metric("BLEU", "bleu", "higher", ".1f", note="BLEU: of words, decoded greedily")
        return (PERPLEXITY, TOKENS, bleu if self.data else EXACT)

    @property
    def more(self) -> tuple[Metric, ...]:
        return (*super().more, EXACT)

    @property
    def fits(self) -> dict[str, object]:
        known = {"length": self.longest, "reach": self.longest if self.data else self.length}
        return {name: value for name, value in known.items() if value}

    def setting(self, recipe: Recipe) -> str:
        what = f"translates texts ({self.tokenizer})" if self.data else f"is to {self.operation} symbols"
        return f"An encoder-decoder that {what}, of {self.vocabulary:,} tokens, in at most {self.longest} positions."

    def check(self, recipe: Recipe) -> Sequence[str]:
        require("languages", repr(self.languages), "none without --data", bool(self.data) or not self.languages)
        return super().check(recipe)

    def model(self, recipe: Recipe) -> Any:
        tokens = (self.vocabulary or SYMBOLS) + 2  # start and end
        return self.build(recipe, "Seq2Seq", tokens, tokens, tied=self.tied)

    def load(self, recipe: Recipe, console: "Console | None" = None, run: Path | None = None) -> "Sequences":
        if not self.data:
            made = sequences(
                self.data_seed,
                (self.samples, self.held_out, self.held_out),
                length=self.length,
                deviation=self.deviation,
                vocabulary=self.vocabulary or SYMBOLS,
            )
            return Sequences(self, Splits({name: [(row, row) for row in rows] for name, rows in made.items()}))
        chosen = tokenizer_arguments(self.tokenizer, self.vocabulary, run)
        return Sequences(self, *load_pairs(self.data, self.languages, **chosen, console=console))


class Sequences(Transduced):
    """Pairs of symbols or tokens; the last two tokens of the vocabulary end and start a target."""

    def __init__(self, task: Transduction, pairs: Splits[tuple[np.ndarray, np.ndarray]], tokenizer: Tokenizer | None = None):
        self.task, self.tokenizer, self.name = task, tokenizer, task.data or f"random symbols to {task.operation}"
        self.end = tokenizer.size if tokenizer else task.vocabulary or SYMBOLS
        self.start = self.end + 1
        super().__init__(task, pairs, "longer")
        self.sha256, self.adopted = self._hash(), {"vocabulary": self.end}
        counts = " + ".join(f"{len(rows):,}" for rows in self.pairs.values())
        self.summary = f"{counts} pairs{self.dropped}, {self.end:,} tokens"

    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Sources ``[b s]``, targets from the start on ``[b t]``, positions of both, mask ``[b s]``, answers ``[b t]``.

        Answers are -1 beyond the end of a target.
        """
        from isopos.positions import sequence

        source, mask, inputs, answers = self.batched(*zip(*(self.pair(split, row) for row in rows), strict=True))
        return source, inputs, sequence(source.shape[1]), sequence(answers.shape[1]), mask, answers

    def pair(self, split: str, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a source, and of its target with the end token."""
        source, target = self.pairs[split][row]
        if not self.task.data:
            target = {"copy": source, "reverse": source[::-1], "repeat": np.tile(source, 2)}[self.task.operation]
        return source, np.append(target, self.end)

    def ends(self, tokens: np.ndarray) -> np.ndarray:
        return tokens == self.end

    def most(self, source: "Tensor", answers: "Tensor") -> int:
        """For texts more than the reference has, up to the longest."""
        free = min(2 * source.shape[1] + 10, self.longest) if self.tokenizer else 0
        return max(answers.shape[1], free)

    def of_decoded(self, decoded: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
        """Metrics of decoded targets, with BLEU of texts in per cent; a word outside the vocabulary is always wrong."""
        figures = super().of_decoded(decoded)
        if self.tokenizer:
            from torchmetrics.functional.text import bleu_score

            known = [pair for pair in decoded if UNK not in self.text(pair[0]).split()]
            figures["exact"] = sum(np.array_equal(*pair) for pair in known) / len(decoded)
            references, texts = ([self.text(side) for side in sides] for sides in zip(*decoded, strict=True))
            figures["bleu"] = 100 * float(
                bleu_score(texts, [[reference.replace(UNK, "<other>")] for reference in references])
            )
        return figures

    def pair_text(self, split: str, row: int) -> tuple[str, str]:
        source, target = self.pair(split, row)
        return self.text(source), self.text(target)

    def text(self, tokens: np.ndarray) -> str:
        symbols = [token for token in tokens.tolist() if token < self.end]
        return self.tokenizer.decode(symbols).strip() if self.tokenizer else " ".join(map(str, symbols))

    def save(self, folder: Path) -> None:
        if self.tokenizer:
            self.tokenizer.save(folder)

    def lengths(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Lengths of sources and targets, with the end token of targets."""
        twice = not self.task.data and self.task.operation == "repeat"
        lengths = pairs.lengths if isinstance(pairs, Stored) else [(len(source), len(target)) for source, target in pairs]
        return np.array(lengths, np.int64).reshape(-1, 2) * (1, 1 + twice) + (0, 1)

    def _hash(self) -> str:
        """A fingerprint of all tokens, in order, and of the operation."""
        digest = hashlib.sha256(f"{self.task.operation if not self.task.data else ''} {self.end}".encode())
        for name, rows in self.pairs.items():
            if isinstance(rows, Stored):
                digest.update(f"{name} {rows.arrays.sha256}".encode() + rows.rows.tobytes())
            else:
                for source, target in rows:
                    digest.update(f"{name} {len(source)} {len(target)}".encode() + source.tobytes() + target.tobytes())
        return digest.hexdigest()
