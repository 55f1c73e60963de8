"""The laboratory: tasks, training, comparison, reports, measurements."""

from pathlib import Path
from typing import Any

__all__ = ["load"]


def load(run: str | Path) -> Any:
    """The trained model of a run: on the CPU, in evaluation mode.

    Raises:
        ValueError: Where the folder holds no run, or one without weights yet.
    """
    from isopos.lab.runs.checkpoints import load_run

    return load_run(Path(run))[1]
