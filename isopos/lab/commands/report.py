"""`isopos report`: what a comparison came to, from its folder alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.reports import grids
from isopos.lab.reports.comparison import FILE, ranking


@dataclass(frozen=True)
class Options:
    """Show what a comparison came to, and write its report.html again: of one that was killed, or whose page is lost."""

    folder: Annotated[str, tyro.conf.Positional]  # Of a comparison: runs/NAME.


def run(options: Options, console: Console) -> int:
    """Show a comparison, finished or not."""
    folder = Path(options.folder)
    if not (folder / FILE).is_file():
        known = sorted(str(path.parent) for path in folder.glob(f"*/{FILE}"))
        remedy = f"it holds {', '.join(known)}" if known else "isopos compare makes some under runs/"
        raise ValueError(f"folder: expected that of a comparison, with a {FILE}, got {folder}; {remedy}")
    show(folder, console)
    return 0


def show(folder: Path, console: Console) -> None:
    """Write the report, print the table and where the report is."""
    from isopos.lab.reports import page

    path = page.write(folder)
    console.print(*ranking(folder).render(console.width))
    grids.say(console, f"report: {path}")
