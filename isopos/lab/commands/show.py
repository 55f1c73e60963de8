"""`isopos show`."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.commands import bounded
from isopos.lab.runs.files import printable


@dataclass(frozen=True)
class Options:
    """Draw a scheme's relative kernel: a curve for lines and rings, a map for grids, a matrix for trees."""

    scheme: Annotated[str, tyro.conf.Positional]  # A scheme with options: rope:decay=retnet.
    out: str = ""  # A file that ends with .png, .svg or .pdf; by default SCHEME.png in this folder.
    overwrite: bool = False  # Replace the file if it exists.
    head_dim: int = 64  # Head size.
    heads: int = 8  # Heads.
    reach: int = 64  # Steps of a line to either side.


def run(options: Options, console: Console) -> int:
    """Draw it, and print the file's path."""
    from isopos.lab.reports import plots

    bounded(options, head_dim=65_536, heads=4_096, reach=4_096)
    print(printable(str(plots.show(**vars(options)))))
    return 0
