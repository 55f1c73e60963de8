"""What a run came to: result.json, written when it has ended, also in the form that it had before there were tasks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isopos.lab.runs.files import write_json

__all__ = ["EXAMPLES", "Result", "fingerprint"]

FILE, EXAMPLES = "result.json", "examples.json"
LENGTHS = {"1": "bits/byte", "2": "at 2x", "4": "at 4x"}  # by which scores were called


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    status: str  # "finished" or "diverged ..."
    scores: Mapping[str, float | None]  # by titles of the task's metrics: None where there is none
    rate: float  # the task's units a second
    parameters: int  # how many
    choices: Mapping[str, str]  # of the scheme
    laws: str  # whether those of the trained scheme hold

    def save(self, run: Path) -> None:
        """Write it, with which the run counts as ended."""
        write_json(run / FILE, vars(self))

    @classmethod
    def of(cls, run: Path) -> "Result | None":
        """That of a run, if it has ended; or a ValueError where the file is damaged."""
        path = run / FILE
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            if "bits_per_byte" in found:
                bits, found["rate"] = found.pop("bits_per_byte"), found.pop("tokens_per_second")
                found["scores"] = {title: bits[multiple] for multiple, title in LENGTHS.items()}
            return cls(**found)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from None


def fingerprint(run: Path) -> str:
    """The sha256 of the data that a run was trained on, or nothing."""
    for path in (run / "data.json", run / "text.json"):
        if path.exists():
            return json.loads(path.read_text())["sha256"]
    return ""
