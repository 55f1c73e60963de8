"""Samples by split, made of memory-mapped arrays when they are read, and how many were dropped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Generic, TypeVar

import numpy as np

from isopos.lab.data.arrays import Arrays
from isopos.lab.data.prepare import SPLITS

Sample = TypeVar("Sample", covariant=True)


@dataclass(frozen=True, eq=False)
class Stored(Sequence[Sample]):
    """The samples of a split that are stored as sequences of tokens, and perhaps as columns."""

    arrays: Arrays  # SPLIT-tokens and SPLIT-starts, as `Ragged` writes them, and SPLIT-NAME for each column
    split: str
    rows: np.ndarray  # the stored samples that belong to it ``[n]``
    make: Callable[[Arrays, str, int], Sample]  # makes a sample of the arrays, the split and a row
    each: int = 1  # sequences of a sample

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the sequences ``[n each]``."""
        return self.arrays.lengths(self.split).reshape(-1, self.each)[self.rows]

    def column(self, name: str) -> np.ndarray:
        """The values of a column ``[n ...]``."""
        return self.arrays[f"{self.split}-{name}"][self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: Any) -> Any:
        return self.make(self.arrays, self.split, int(self.rows[n]))


def stored(arrays: Arrays, make: Callable[[Arrays, str, int], Sample], each: int = 1) -> dict[str, Stored[Sample]]:
    """All stored samples by split; see `Stored`."""
    return {split: Stored(arrays, split, np.arange(len(arrays.lengths(split)) // each), make, each) for split in SPLITS}


@dataclass(frozen=True)
class Splits(Generic[Sample]):
    """Samples by split, and how many were dropped.

    Raises:
        ValueError: Where train or validation has none.
    """

    splits: Mapping[str, Any]  # samples of train, validation and test; the last may be empty
    dropped: dict[str, int] = field(default_factory=dict)  # numbers of samples that are not among them, by the reason
    noun: str = "pairs"  # plural of a sample, for messages

    def __post_init__(self) -> None:
        for name in SPLITS[:2]:
            if not self.splits[name]:
                count = sum(map(len, self.splits.values()))
                remedy = "give it more, or raise --longest" if self.dropped.get("longer") else "give it more"
                raise ValueError(f"data: expected {self.noun} for {name}, got none among {count}{self.summary}; {remedy}")

    @property
    def summary(self) -> str:
        """What was dropped, in words."""
        return "".join(f", {count:,} {reason}" for reason, count in self.dropped.items() if count)

    def keep(self, others: str, wanted: Mapping[str, Any]) -> "Splits[Sample]":
        """The samples whose masks ``[n]`` are True, by split; the number of the others is counted under that name."""
        kept = {name: _kept(samples, wanted[name]) for name, samples in self.splits.items()}
        count = sum(len(self.splits[name]) - len(kept[name]) for name in SPLITS)
        return replace(self, splits=kept, dropped=self.dropped | {others: count})


def _kept(samples: Sequence[Sample], wanted: np.ndarray) -> Sequence[Sample]:
    if isinstance(samples, Stored):
        return replace(samples, rows=samples.rows[np.array(wanted, bool)])
    return [*compress(samples, wanted)]
