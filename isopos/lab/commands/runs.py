"""`isopos runs`."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

__all__ = ["Runs", "run"]


@dataclass(frozen=True)
class Runs:
    """List the runs under a folder: recipe, state, loss and validation."""

    folder: Annotated[str, tyro.conf.Positional] = "runs"
    """Where they are."""


def run(options: Runs, console: Console) -> int:
    """Print a row a run, the latest last."""
    from isopos.lab.commands.eval import list_runs

    return list_runs(options.folder, console)
