"""Tasks with finite sets of samples: batches of an epoch, and loss and figures of classifiers."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from isopos.lab.data.arrays import Arrays
from isopos.lab.data.labelled import similar_classes
from isopos.lab.tasks.task import Cut, Data, Metric, Recipe, Scored, View, evaluation, require

if TYPE_CHECKING:
    from torch import Tensor

POOL = 50  # batches whose samples are sorted by size together
AT_ONCE = 1 << 14  # largest number of tokens scored at once
PAIRS = 1 << 21  # largest number of scores per head scored at once


def classifier_metrics(what: str, right: str) -> tuple[Metric, Metric]:
    """Metrics of a classifier: accuracy, described as the share of `what` that is `right`, and cross-entropy.

    Examples:
        >>> classifier_metrics("held-out texts", "named correctly")[0].note
        'accuracy: share of held-out texts named correctly'
    """
    return (
        Metric("accuracy", "accuracy", "higher", ".1%", note=f"accuracy: share of {what} {right}"),
        Metric("nats", "nats", note="nats: cross-entropy of their classes"),
    )


def majority(labels: np.ndarray, classes: Sequence[str]) -> str:
    """The accuracy of the most frequent class, and a warning about similar classes, for a summary.

    Examples:
        >>> majority(np.array([0, 1, 1]), ("no", "yes"))
        '; without a model: at most 66.7%, of yes'
    """
    counts, warning = np.bincount(labels, minlength=len(classes)), similar_classes(classes)
    share = f"; without a model: at most {counts.max() / counts.sum():.1%}, of {classes[int(counts.argmax())]}"
    return f"{share}; {warning}" if warning else share


def padded(sequences: Sequence[Any], fill: int = 0) -> "tuple[Tensor, Tensor]":
    """Sequences ``[n ...]`` of different lengths as one int64 tensor ``[b t ...]``, and its mask ``[b t]``.

    Examples:
        >>> tokens, mask = padded([np.array([1, 2]), np.array([3])])
        >>> tokens.tolist(), mask.tolist()
        ([[1, 2], [3, 0]], [[True, True], [True, False]])
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tensors = [torch.from_numpy(np.array(one, np.int64)) for one in sequences]
    lengths = torch.tensor([len(one) for one in tensors])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return pad_sequence(tensors, batch_first=True, padding_value=fill), mask


def on_line_or_tree(recipe: Recipe, tokens: Sequence[Any], nodes: Callable[[int], Any]) -> "tuple[Tensor, Tensor, Tensor]":
    """Tokens ``[b t]`` of samples, positions as the scheme needs, and the mask ``[b t]``.

    Args:
        tokens: Tokens of each sample.
        nodes: The tree positions ``[t 2]`` of a sample by its index.

    Returns:
        Positions are ``[b t 2]`` for schemes of trees, -1 beyond the end of a sample, and ``[t 1]`` for others.
    """
    from isopos.lab.tasks.build import group_of
    from isopos.positions import Tree, sequence

    padded_tokens, mask = padded(tokens)
    on_tree = isinstance(group_of(recipe), Tree)
    positions = padded([nodes(n) for n in range(len(tokens))], -1)[0] if on_tree else sequence(mask.shape[1])
    return padded_tokens, positions, mask


class Samples(Data):
    """A finite set of samples, scored in batches of similar sizes."""

    sizes: Mapping[str, np.ndarray]  # tokens of each sample, by split; epochs consist of the train split
    unit: str = "samples"  # noun for messages
    copies: int = 1  # how often an epoch has a sample; with more than one it has the fewer different ones
    limit: int = 0  # held-out samples scored while training, at most; 0: all
    exact: Mapping[str, int] = MappingProxyType({})  # fields of the task that are 0, or this number of the data
    adopted: Mapping[str, Any] = MappingProxyType({})  # fields of the task that take these values of the data
    least: Mapping[str, int] = MappingProxyType({})  # fields of the task that are 0, or at least this number of the data

    @property
    def splits(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(split for split, sizes in self.sizes.items() if split != "train" and len(sizes))

    @abstractmethod
    def tensors(self, split: str, rows: np.ndarray, recipe: Recipe, step: int | None = None) -> "tuple[Tensor, ...]":
        """Samples of a split as one batch.

        In training, samples of a step may be augmented: a function of (seed, step, row). Rows beyond the number of samples
        are copies, which are augmented differently.
        """

    @abstractmethod
    def score_split(self, model: Any, recipe: Recipe, view: View, limit: int) -> Scored:
        """Figures of at most `limit` samples (0: all) of a view whose split exists."""

    def score(self, model: Any, recipe: Recipe, view: View) -> Scored:
        if view.split not in self.splits:
            return Scored(reason=f"split: expected one of {', '.join(self.splits)}, got {view.split!r}")
        return self.score_split(model, recipe, view, self.limit if view.limit < 0 else view.limit)

    def infer(self, recipe: Recipe) -> Recipe:
        recipe = recipe.edit(**self.adopted)
        for name, count in self.exact.items():
            value = getattr(recipe.task, name)
            require(name, value, f"0, or the {count} of the data", value in (0, count))
        for name, count in self.least.items():
            value = getattr(recipe.task, name)
            require(name, value, f"0, or at least the {count} of the data", value == 0 or value >= count)
        if changes := {**self.exact, **{name: getattr(recipe.task, name) or count for name, count in self.least.items()}}:
            recipe = recipe.edit(**changes)
            recipe.task.check(recipe)
        count = len(self.sizes["train"])
        if recipe.training.batch > count:
            raise ValueError(f"batch: expected at most the {count} {self.unit}, got {recipe.training.batch}")
        return recipe

    def batch(self, recipe: Recipe, step: int, rank: int = 0, ranks: int = 1) -> "tuple[Tensor, ...]":
        """The tensors of a rank's share of a step.

        An epoch has every sample once, except the remainder after its last whole batch; the first one begins with its
        second batch, since steps count from 1. A batch has samples of similar sizes.
        """
        count = recipe.training.batch
        if count % ranks or not 0 <= rank < ranks:
            raise ValueError(f"batch: expected a multiple of the {ranks} ranks, and a rank below, got {count} and {rank}")
        epoch, number = divmod(step, len(self.sizes["train"]) // count)
        share = count // ranks
        drawn = _epoch(self, recipe.seed, epoch, count)[number, rank * share : (rank + 1) * share]
        return self.tensors("train", drawn, recipe, step)

    def spread(self, split: str, limit: int) -> np.ndarray:
        """At most `limit` rows of a split (0: all), evenly spread, since a source may be sorted by class."""
        count = len(self.sizes[split])
        wanted = min(limit or count, count)
        return np.arange(wanted) * count // wanted

    def rounds(self, split: str, limit: int) -> Iterator[np.ndarray]:
        """The rows of `spread`, the longest first, in batches that fit into memory."""
        sizes, begin = self.sizes[split], 0
        order = self.spread(split, limit)
        order = order[np.argsort(-sizes[order], kind="stable")]
        while begin < len(order):
            longest = int(sizes[order[begin]])
            end = begin + max(1, min(AT_ONCE // longest, PAIRS // longest**2))
            yield order[begin:end]
            begin = end

    def on_device(self, model: Any, recipe: Recipe, split: str, rows: np.ndarray) -> "list[Tensor]":
        """The tensors of samples on the device of a model."""
        device = next(model.parameters()).device
        return [tensor.to(device) for tensor in self.tensors(split, rows, recipe)]


class Labelled(Samples):
    """Samples with a class each, or several: the last of their tensors, ``[b]`` or ``[b n]``."""

    task: Any
    arrays: Arrays

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.task.counted

    def labels(self, split: str) -> np.ndarray:
        """The class of each sample of a split ``[n]``, or its classes: by default the array SPLIT-labels."""
        return self.arrays[f"{split}-labels"]

    def loss(self, model: Any, *batch: "Tensor") -> "Tensor":
        from torch.nn import functional as F

        return F.cross_entropy(*self.logits(model, *batch))

    def logits(self, model: Any, *batch: "Tensor") -> "tuple[Tensor, Tensor]":
        """A model's logits ``[n classes]`` and the right answers ``[n]``: by default one per sample."""
        *sample, answers = batch
        return model(*sample), answers

    def score_split(self, model: Any, recipe: Recipe, view: View, limit: int) -> Scored:
        """Accuracy, nats, and the number of samples by the name of their unit."""
        from torch.nn import functional as F

        nats, right, count, samples = 0.0, 0, 0, 0
        for rows in self.rounds(view.split, limit):
            logits, answers = self.answers(model, recipe, view.split, rows)
            nats += F.cross_entropy(logits, answers, reduction="sum").item()
            right += int((logits.argmax(-1) == answers).sum())
            count, samples = count + len(answers), samples + len(rows)
        return Scored({"accuracy": right / count, "nats": nats / count, self.unit: samples})

    def chance(self, recipe: Recipe) -> tuple[float, int] | None:
        """The share of the most frequent class if accuracy ranks schemes."""
        if recipe.task.metrics[0].figure != "accuracy":
            return None
        _, counts = np.unique(self.labels("validation")[self.spread("validation", self.limit)], return_counts=True)
        return int(counts.max()) / int(counts.sum()), int(counts.sum())

    def answers(self, model: Any, recipe: Recipe, split: str, rows: np.ndarray) -> "tuple[Tensor, Tensor]":
        """A model's `logits` in evaluation mode, and the right answers."""
        batch = self.part(model, tuple(self.on_device(model, recipe, split, rows)))
        with evaluation(model):
            return self.logits(model, *batch)

    def shard(self, batch: "tuple[Tensor, ...]", cut: Cut, ranks: int) -> "tuple[Tensor, ...]":
        """Tokens ``[b t]`` or ``[b 2 t]``, positions ``[t c]`` or ``[b t c]``, and perhaps a mask, cut; and all answers."""
        tokens, positions, *mask, answers = batch
        if tokens.shape[-1] < 2 * ranks:  # so that no shard is empty
            raise ValueError(
                f"sequence_parallel: expected samples of at least {2 * ranks} tokens for {ranks} processes, got a batch "
                f"whose longest has {tokens.shape[-1]}"
            )
        return cut(tokens, -1), cut(positions, -2), *(cut(part_of_mask, -1) for part_of_mask in mask), answers

    def guesses(self, model: Any, recipe: Recipe, count: int) -> list[tuple[int, int, int]]:
        """Row, right class and the model's class of a few validation samples, evenly spread."""
        rows = self.spread("validation", count)
        logits, answers = self.answers(model, recipe, "validation", rows)
        return [*zip(rows.tolist(), answers.tolist(), logits.argmax(-1).tolist(), strict=True)]


@lru_cache(maxsize=1)
def _epoch(data: Samples, seed: int, epoch: int, count: int) -> np.ndarray:
    """Rows of the batches of an epoch ``[batches count]``."""
    random, sizes = np.random.default_rng((seed, epoch)), data.sizes["train"]
    order = random.permutation(len(sizes))
    if data.copies > 1:
        order = (order[:, None] + len(sizes) * np.arange(data.copies)).ravel()
    order = order[: len(sizes) // count * count]
    pool = np.arange(len(order)) // (POOL * count)
    order = order[np.lexsort((sizes[order % len(sizes)], pool))].reshape(-1, count)
    if data.copies > 1:
        order = random.permuted(order, axis=1)  # so that copies are not neighbours
    return order[random.permutation(len(order))]
