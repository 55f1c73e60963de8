"""`isopos list`."""

import shutil
import sys
from dataclasses import dataclass

from rich.console import Console

from isopos.catalog import CATALOG


@dataclass(frozen=True)
class Options:
    """Print all schemes, each with one line and its citation."""


def run(options: Options, console: Console) -> int:
    """Print schemes as plain text; in a narrow terminal the citation is on a line below."""
    width = max(map(len, CATALOG))
    summary, citation = (max(map(len, texts)) for texts in zip(*(entry[:2] for entry in CATALOG.values()), strict=True))
    fits = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= width + summary + citation + 4
    for name, entry in CATALOG.items():
        gap = " " * (summary - len(entry.summary) + 2) if fits else "\n" + " " * (width + 2)
        print(f"{name:<{width}}  {entry.summary}{gap}{entry.citation}")
    return 0
