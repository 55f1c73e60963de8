"""`isopos report`: the result of a comparison, from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from isopos.lab.reports import grids
from isopos.lab.reports.comparison import FILE, ranking, read_comparison, read_runs


@dataclass(frozen=True)
class Options:
    """Print the table of a comparison and write its report.html again, also after an interruption."""

    folder: Annotated[str, tyro.conf.Positional]  # Folder of a comparison: runs/NAME.


def run(options: Options, console: Console) -> int:
    """Print the result of a comparison, complete or not."""
    folder = Path(options.folder)
    if not (folder / FILE).is_file():
        comparisons = sorted(str(path.parent) for path in folder.glob(f"*/{FILE}"))
        remedy = f"it holds {', '.join(comparisons)}" if comparisons else "isopos compare writes some under runs/"
        raise ValueError(f"folder: expected a comparison, a folder with a {FILE}, got {folder}; {remedy}")
    show(folder, console)
    return 0


def show(folder: Path, console: Console) -> None:
    """Print the table, write the report, and print its path."""
    from isopos.lab.reports import page

    console.print(*ranking(folder).render(console.width))
    if left := page.unfinished(read_comparison(folder), read_runs(folder)):
        grids.say(console, left)
    grids.say(console, f"report: {page.write(folder)}")
