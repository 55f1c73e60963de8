"""Text as bytes, of any file or folder or the reference that ships with Python, in windows drawn from seed and step."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Text", "load"]


@dataclass(frozen=True)
class Text:
    """Bytes to train on and a held-out tail."""

    name: str
    sha256: str
    train: np.ndarray
    validation: np.ndarray

    def batch(self, seed: int, step: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[count length]`` of one step, the same for every scheme."""
        starts = np.random.default_rng((seed, step)).integers(len(self.train) - length, size=count)
        windows = np.stack([self.train[start : start + length + 1] for start in starts]).astype(np.int64)
        return torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])

    def windows(self, length: int, limit: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets ``[<= count length]`` that cover at most `limit` bytes of the tail once."""
        tail = self.validation[: limit + 1]
        starts = range(0, len(tail) - length, length)
        for group in (starts[i : i + count] for i in range(0, len(starts), count)):
            stacked = np.stack([tail[start : start + length + 1] for start in group]).astype(np.int64)
            yield torch.from_numpy(stacked[:, :-1]), torch.from_numpy(stacked[:, 1:])


def load(source: str, length: int) -> Text:
    """The text of a file, of a folder (recursively, in sorted order), or, without a source, the Python language reference.

    Raises:
        ValueError: Where there is nothing to read, or less than a window of `length` tokens on either side of the split.
    """
    data = _builtin() if not source else _read(Path(source))
    cut = len(data) - len(data) // 10
    least = 10 * (length + 1)
    if len(data) < least:
        raise ValueError(
            f"data: expected at least {least} bytes for windows of {length} and a held-out tenth, got {len(data)} "
            f"in {source}; use more text or a smaller --length"
        )
    array = np.frombuffer(data, dtype=np.uint8)
    name = source or "Python language reference (pydoc_data.topics)"
    return Text(name, hashlib.sha256(data).hexdigest(), array[:cut], array[cut:])


def _builtin() -> bytes:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _read(path: Path) -> bytes:
    if not path.exists():
        raise ValueError(f"data: expected a file or a folder, but {path} does not exist")
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    try:
        data = b"".join(p.read_bytes() for p in files)
    except OSError as error:
        raise ValueError(f"data: cannot read {error.filename}: {error.strerror}") from None
    if not data:
        raise ValueError(f"data: expected text, but {path} is empty")
    return data
