"""Workloads of other libraries. None are here: the repository's folder `benchmarks` adds them to races of its own."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Workload = Callable[..., Any]  # takes queries, keys and, for attention, values ``[b h t d]``


class Peer(NamedTuple):
    """Another library. A rotary embedding of one has base 10000 and rotates queries and keys alike."""

    module: str  # imported by this name
    package: str  # pip's name
    make: Callable[..., Workload]  # takes the module and the arguments of `workload`
    layout: Literal["interleaved", "half"] = "interleaved"  # rotated pairs: features 2i, 2i + 1; or i, i + d/2
    longest: int = 2**62  # largest position that it reaches in reasonable time
    note: str = ""

    def load(self) -> Any:
        """Import the module.

        Raises:
            Exception: Whatever importing it raises, where it is not installed or does not fit other packages.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(self.module)

    def absence(self) -> str:
        """Why the library cannot be measured, and what to do; empty where it can be imported."""
        try:
            self.load()
        except ModuleNotFoundError as error:
            if error.name == self.module.partition(".")[0]:
                return f"{self.package} is not installed: pip install {self.package}{self.note}"
            return f"{self.package} cannot be imported: {error}"
        except Exception as error:
            return f"{self.package} cannot be imported: {type(error).__name__}: {error}"
        return ""

    def workload(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Workload:
        """The workload for features like x ``[t d]`` at positions from `start` on; `cast` casts its module to a dtype."""
        return self.make(self.load(), x, start, cast)


PEERS: dict[str, Peer] = {}  # by name
