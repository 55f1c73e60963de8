r"""Named arrays, written a few rows at a time in memory or in a folder of the cache, from which they are memory-mapped.

Example:
    >>> def fill(writer):
    ...     writer.add("a", np.arange(3))
    ...     writer.add("a", np.arange(2))
    ...     return {"what": "numbers"}
    >>> arrays = in_memory(fill)
    >>> arrays["a"].tolist(), arrays.facts
    ([0, 1, 2, 0, 1], {'what': 'numbers'})
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from isopos.lab.data import cache
from isopos.lab.runs.files import check_plain, damaged, read_json

ABOUT = "about.json"


@dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays by name, with plain values."""

    arrays: Mapping[str, np.ndarray]
    facts: dict[str, Any]
    sha256: str  # a fingerprint of names, content and facts

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def sequence(self, name: str, n: int) -> np.ndarray:
        """The n-th sequence of a `Ragged` ``[t]``."""
        begin, end = self[f"{name}-starts"][n : n + 2]
        return self[f"{name}-tokens"][begin:end]

    def lengths(self, name: str) -> np.ndarray:
        """Lengths of the sequences of a `Ragged`."""
        return np.diff(self[f"{name}-starts"])


class Writer:
    """Appends rows to arrays by name; `open` opens the file of an array."""

    def __init__(self, open: Callable[[str], BinaryIO]):
        self._open = open
        self._files: dict[str, tuple[BinaryIO, Any]] = {}
        self._about: dict[str, dict[str, Any]] = {}

    def add(self, name: str, rows: np.ndarray) -> None:
        """Append rows ``[n ...]``. The first rows determine the dtype and the further axes."""
        if name not in self._files:
            self._files[name] = (self._open(name), hashlib.sha256())
            self._about[name] = {"dtype": rows.dtype.name, "shape": [0, *rows.shape[1:]]}
        about, content = self._about[name], np.ascontiguousarray(rows, self._about[name]["dtype"]).tobytes()
        file, digest = self._files[name]
        file.write(content)
        digest.update(content)
        about["shape"][0] += len(rows)

    def about(self) -> dict[str, dict[str, Any]]:
        """Dtype, shape and hash of every array."""
        return {name: about | {"sha256": self._files[name][1].hexdigest()} for name, about in self._about.items()}


class Ragged:
    """Appends sequences of different lengths to an array NAME-tokens, and their ends there to NAME-starts.

    Args:
        name: Prefix of their names.
        values: Number of different tokens, which determines the dtype.
    """

    def __init__(self, writer: Writer, name: str, values: int):
        self._add, self._name, self._end = writer.add, name, 0
        writer.add(f"{name}-tokens", np.empty(0, np.min_scalar_type(values - 1)))
        writer.add(f"{name}-starts", np.zeros(1, np.int64))

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens ``[t]``."""
        self._end += len(tokens)
        self._add(f"{self._name}-tokens", tokens)
        self._add(f"{self._name}-starts", np.array([self._end]))


Fill = Callable[[Writer], dict[str, Any]]
"""Writes all arrays and returns the facts."""


def in_memory(fill: Fill) -> Arrays:
    """The arrays that `fill` writes, in memory."""
    files: dict[str, io.BytesIO] = {}

    def opened(name: str) -> BinaryIO:
        files[name] = io.BytesIO()
        return files[name]

    writer = Writer(opened)
    facts = fill(writer)
    about = writer.about()
    arrays = {n: np.frombuffer(files[n].getvalue(), one["dtype"]).reshape(one["shape"]) for n, one in about.items()}
    return Arrays(arrays, facts, hash_of(about, facts))


def cached_arrays(root: Path, key: str, fill: Fill) -> Arrays:
    """The arrays of a folder of the cache, memory-mapped; `fill` writes them if the folder is absent.

    Raises:
        ValueError: If the cache cannot be written, or the hash of a file in the folder is wrong.
    """

    def build(folder: Path) -> None:
        with ExitStack() as stack:
            writer = Writer(lambda name: stack.enter_context((folder / f"{name}.bin").open("wb")))
            facts = fill(writer)
        about = writer.about()
        contents = {"arrays": about, "facts": facts, "sha256": hash_of(about, facts)}
        (folder / ABOUT).write_text(json.dumps(contents) + "\n")

    folder = cache.cached_folder(root, key, build)
    remedy = f"remove {folder}, and it is prepared again"
    kinds = {"arrays": dict[str, dict[str, Any]], "facts": dict[str, Any], "sha256": str}
    about = read_json(folder / ABOUT, kinds, remedy, lambda value: {"sha256": ""} | value)
    sha256 = hash_of(about["arrays"], about["facts"])
    if about["sha256"] not in ("", sha256):  # earlier versions wrote none
        damaged(folder / ABOUT, "its content is not what was written", remedy)
    arrays = {name: _mapped(folder / f"{name}.bin", one, remedy) for name, one in about["arrays"].items()}
    return Arrays(arrays, about["facts"], sha256)


def hash_of(*values: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _mapped(path: Path, about: Mapping[str, Any], remedy: str) -> np.ndarray:
    try:
        check_plain(path)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
                raise ValueError("its content is not what was written")
        shape = tuple(about["shape"])
        return np.memmap(path, about["dtype"], "r", shape=shape) if all(shape) else np.empty(shape, about["dtype"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        damaged(path, error, remedy)
