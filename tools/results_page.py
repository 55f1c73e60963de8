"""Parts of docs/results/README.md, derived from docs/results/*/results.json; `tools.generate` writes them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from isopos.lab.reports.findings import RESULTS, ResultTable, read
from isopos.lab.reports.grids import markdown
from tools.pages import ROOT

__all__ = ["folders", "read_all", "tuning"]

FOLDER = ROOT / "docs" / "results"


def read_all(folder: Path = FOLDER) -> list[ResultTable]:
    """All tables of a folder."""
    return [read(path) for path in sorted(folder.glob(f"*/{RESULTS}"))]


def folders(results: Sequence[ResultTable]) -> str:
    """A row for each folder, the missing cells in a fold-out, and the commands that computed the figures."""
    rows = [
        (
            f"[`{table.name}`]({table.name}/table.md), [picture]({table.name}/distances.svg)",
            f"{table.layout.citation}: {table.layout.title}",
            "; ".join(f"{name}: {data}" if name else data for name, data in table.content["data"].items()) or "none",
            f"{table.content['rounds']} rounds" if table.timed else f"{table.seeds} seed{'s' * (table.seeds != 1)}",
            str(len(table.content["missing"]) or "-"),
        )
        for table in results
    ]
    missing = [f"- `{table.name}`: {'; '.join(some)}." for table in results if (some := table.content["missing"])]
    fold = ['<details markdown="1"><summary>Missing cells</summary>', "", *missing, "", "</details>"] if missing else []
    commands = [f"    {command}" for table in results for command in table.content["commands"]]
    grid = markdown(("folder", "table", "data", "repeated", "missing entries"), rows)
    return "\n".join(("", grid, "", *fold, "", *commands, ""))


def tuning(results: Sequence[ResultTable]) -> str:
    """For each table whose rows have the best of several learning rates, what their order owes to the choice."""
    rows = []
    for table in results:
        for corpus, chosen in table.content["chosen"].items():
            counts = Counter(chosen["rates"].values())
            rates = table.content["rates"]
            ends = [f"{counts[rate]} of {counts.total()}" for rate in (min(rates), max(rates))]
            correlation = "-" if chosen["correlation"] is None else f"{chosen['correlation']:+.2f}"
            rows.append((f"[`{table.name}`]({table.name}/table.md)", corpus, table.rates, *ends, correlation))
    titles = ("table", "data", "rates", "rows with the lowest", "rows with the highest", "rank correlation")
    return f"\n{markdown(titles, rows, 'lllrrr')}\n"
