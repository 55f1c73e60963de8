"""Learning rates that a table tries: the best one of each row, and what the order of rows owes to the choice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isopos.lab.reports.intervals import FEW, spearman
from isopos.lab.runs.folders import read_rows
from isopos.lab.tables.loader import SCORES, PaperTable, cell_name, read_scores


def validations(cell: Path) -> dict[int, float]:
    """The main figure on held-out data by update."""
    return {row["step"]: row["validation"] for row in read_rows(cell / "metrics.jsonl") if row.get("validation") is not None}


def best_rate(table: PaperTable, folder: Path, corpus: str, scheme: str, rates: Sequence[float]) -> float | None:
    """The rate whose run of seed 0 has the best last validation; None until all runs have ended.

    Runs that diverged are not chosen, unless all did. Of equal runs the first is chosen.

    Args:
        table: The table.
        folder: Its folder, which has `cells`.
        corpus: Name of the corpus, or empty.
        scheme: The scheme of a row on it.
        rates: Learning rates, as multiples of the scale's.
    """
    ends, start = {}, start_rate(table, folder, corpus, scheme, rates)
    if start is None:
        return None
    for rate in rates:
        cell = folder / "cells" / cell_name(corpus, scheme, 0, rate, start)
        if not (cell / SCORES).exists():
            return None
        if read_scores(cell)["status"] == "finished":
            ends[rate] = _end(table, corpus, cell)
    return min(ends, key=lambda rate: ends[rate], default=rates[0])


def start_rate(table: PaperTable, folder: Path, corpus: str, scheme: str, rates: Sequence[float]) -> float | None:
    """The rate of the run that runs of a corpus start from: 1 without one; None if it is not chosen yet."""
    data = table.corpus(corpus)
    if data is None or not data.start or not rates:
        return 1.0
    return best_rate(table, folder, data.start, table.start_scheme(data, scheme), rates)


def start_cell(table: PaperTable, folder: Path, corpus: str, scheme: str, seed: int, rates: Sequence[float]) -> Path | None:
    """The folder of the run that a run starts from; None if it starts from random weights, or the rate is not chosen yet.

    Args:
        table, folder, corpus, scheme, rates: As in `best_rate`, of the run that starts.
        seed: Its seed.
    """
    data = table.corpus(corpus)
    if data is None or not data.start:
        return None
    rate = start_rate(table, folder, corpus, scheme, rates)
    before = table.start_scheme(data, scheme)
    return None if rate is None else folder / "cells" / cell_name(data.start, before, seed, rate)


@dataclass(frozen=True)
class Chosen:
    """The learning rates of the rows on a corpus, and what the order of rows owes to them."""

    rates: dict[str, float]  # by row
    correlation: float | None  # of seed 0's last validations at the scale's rate and at the chosen ones; None of few rows
    rows: int  # in the correlation


def choices(table: PaperTable, folder: Path, corpora: Sequence[str], rates: Sequence[float]) -> dict[str, Chosen]:
    """The chosen rates by corpus; empty if none were tried."""
    found = {}
    for corpus in corpora if rates else ():
        schemes = {row.name: row.on(corpus) for row in table.rows if row.on(corpus)}
        best = {name: best_rate(table, folder, corpus, scheme, rates) for name, scheme in schemes.items()}
        known = {name: rate for name, rate in best.items() if rate is not None}
        pairs = _ends(table, folder, corpus, {schemes[name]: rate for name, rate in known.items()}, rates)
        correlation = spearman(*zip(*pairs, strict=True)) if len(pairs) >= FEW else None
        if known:
            found[corpus] = Chosen(known, correlation, len(pairs))
    return found


def notes(chosen: Mapping[str, Chosen], rates: Sequence[float]) -> Iterator[str]:
    """Sentences on the chosen rates; none if none were tried."""
    if rates:
        tried = ", ".join(f"{rate:g}" for rate in sorted(rates))
        choice = "each row has the one whose run of seed 0 ends with the best validation"
        yield f"Learning rates are multiples of the scale's: of {tried} {choice}."
    for corpus, one in chosen.items():
        by_rate = {rate: [name for name, best in one.rates.items() if best == rate] for rate in sorted(rates)}
        found = "; ".join(f"{rate:g} for {', '.join(names)}" for rate, names in by_rate.items() if names)
        effect = "" if one.correlation is None else f"rank correlation {one.correlation:+.2f} over {one.rows} rows."
        yield f"{corpus or 'Rates'}: {found}." + f" Seed 0's order at 1 and at the chosen ones: {effect}" * bool(effect)


def _ends(
    table: PaperTable, folder: Path, corpus: str, chosen: Mapping[str, float], rates: Sequence[float]
) -> list[list[float]]:
    """Seed 0's last validations at the scale's learning rate and at the chosen one, of each scheme that has both."""
    pairs = []
    for scheme, rate in chosen.items():
        start = start_rate(table, folder, corpus, scheme, rates) or 1.0
        cells = [folder / "cells" / cell_name(corpus, scheme, 0, each, start) for each in (1.0, rate)]
        if all((cell / SCORES).exists() and read_scores(cell)["status"] == "finished" for cell in cells):
            pairs.append([_end(table, corpus, cell) for cell in cells])
    return pairs


def _end(table: PaperTable, corpus: str, cell: Path) -> float:
    """The last validation of a run as a rank, lower for better ones."""
    curve = validations(cell)
    return table.task_of(corpus).metrics[0].rank(curve[max(curve)])
