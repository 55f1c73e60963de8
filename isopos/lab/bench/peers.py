"""Description of other libraries as baselines; the repository's folder `benchmarks` adds them with its races."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Workload = Callable[..., Any]  # takes queries, keys and, for attention, values ``[b h t d]``


class Peer(NamedTuple):
    """Another library. Its rotary embedding has base 10000 and rotates queries and keys alike."""

    module: str  # name for import
    package: str  # name for pip
    make: Callable[..., Workload]  # takes the module and the arguments of `workload`
    layout: Literal["interleaved", "half"] = "interleaved"  # rotated pairs: features 2i, 2i + 1; or i, i + d/2
    longest: int = 2**62  # largest position that can be measured in reasonable time
    note: str = ""  # appended to the pip command

    def load(self) -> Any:
        """Import the module.

        Raises:
            Exception: Any exception of the import, if it is not installed or does not fit other packages.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(self.module)

    def absence(self) -> str:
        """The reason why the library cannot be imported, with a remedy; empty if it can."""
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
        """The workload for features like x ``[t d]`` at positions from `start` on; with `cast` its module has this dtype."""
        return self.make(self.load(), x, start, cast)


PEERS: dict[str, Peer] = {}  # by name
