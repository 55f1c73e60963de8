"""The laboratory: tasks, training, comparisons, reports, benchmarks."""

from pathlib import Path
from typing import Any

__all__ = ["load"]


def load(run: str | Path) -> Any:
    """Load the trained model of a run, on the CPU in evaluation mode.

    Raises:
        ValueError: If the folder holds no run, or one without final weights.
    """
    from isopos.lab.runs.checkpoints import load_run

    return load_run(Path(run))[1]
