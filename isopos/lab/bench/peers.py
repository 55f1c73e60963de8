"""Another library's works. There are none here: `benchmarks`, a folder of the repository, adds them to races of its own."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Work = Callable[..., Any]  # of queries, keys and, if it is attention, values ``[b h t d]``


class Peer(NamedTuple):
    """Another library; a rotary embedding of one has base 10000 and rotates queries and keys alike."""

    module: str  # that has to be importable
    package: str  # its name to pip
    make: Callable[..., Work]  # of the module, and as `work`
    layout: Literal["interleaved", "half"] = "interleaved"  # rotated pairs are features 2i, 2i + 1, or i, i + d/2
    longest: int = 2**62  # positions that it reaches in a reasonable time
    note: str = ""

    def load(self) -> Any:
        """The module; ImportError, or another error, where it is not installed or does not fit what is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(self.module)

    def absence(self) -> str:
        """Why the peer is not measured, and what to do; empty where it can be imported."""
        try:
            self.load()
        except ModuleNotFoundError as error:
            if error.name == self.module.partition(".")[0]:
                return f"{self.package} is not installed: pip install {self.package}{self.note}"
            return f"{self.package} cannot be imported: {error}"
        except Exception as error:
            return f"{self.package} cannot be imported: {type(error).__name__}: {error}"
        return ""

    def work(self, x: Tensor, start: int = 0, cast: torch.dtype | None = None) -> Work:
        """For features like x ``[t d]`` at the positions from `start` on, by a module that may be cast to a dtype."""
        return self.make(self.load(), x, start, cast)


PEERS: dict[str, Peer] = {}  # by name: what races may have beside ours
