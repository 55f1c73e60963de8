"""The laboratory: text, training, comparison and reports. It imports isopos and is never imported by it."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`load`, the model of a run, imported when it is first used."""
    if name != "load":
        raise AttributeError(f"module 'isopos.lab' has no attribute {name!r}")
    from isopos.lab.training.run import load

    return load
