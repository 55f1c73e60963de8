"""The laboratory: tasks, training, comparison, reports, measurements. `load` gives the model of a run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isopos.lab.runs.weights import load as load


def __getattr__(name: str) -> Any:
    if name == "load":
        from isopos.lab.runs.weights import load

        return load
    raise AttributeError(f"module 'isopos.lab' has no attribute {name!r}")
