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

    scheme: Annotated[str, tyro.conf.Positional]  # Scheme with options: rope:decay=retnet.
    out: str = ""  # File name ending with .png, .svg or .pdf; by default SCHEME.png.
    overwrite: bool = False  # Replace the file if it exists.
    head_dim: int = 64  # Features per head.
    heads: int = 8  # Number of heads.
    reach: int = 64  # Largest offset on a line, in steps.


def run(options: Options, console: Console) -> int:
    """Draw the kernel and print the file's path."""
    from isopos.lab.reports import plots

    bounded(options, head_dim=65_536, heads=4_096, reach=4_096)
    print(printable(str(plots.draw_kernel(**vars(options)))))
    return 0
