"""`isopos bench`: the sections, printed and written."""

import shlex
import sys

from rich.console import Console

from isopos.lab.bench import accuracy, exactness, processes, report
from isopos.lab.bench.rows import Row, table

__all__ = ["bench"]

ROUNDS = 9


def bench(
    console: Console,
    section: str = "all",
    *,
    allocator: str = "both",
    rounds: int = ROUNDS,
    out: str = "",
    overwrite: bool = False,
    compiled: bool = False,
) -> int:
    """Print the rows of a section, or of all but exactness, and write them if there is a folder; return the exit status.

    Args:
        console: To print on.
        section: A name of `processes.SECTIONS`, "accuracy", "exactness" or "all".
        allocator: "as-is", "reused" or "both".
        rounds: Of each race.
        out: A folder for bench.json and bench.svg.
        overwrite: Replace them.
        compiled: Of exactness.
    """
    if section == "exactness":
        exactness.console(console, compiled=compiled)
        return 0
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    states, folder = processes.allocators(allocator), report.target(out, overwrite)
    names = [name for name in processes.SECTIONS if section in ("all", name)]
    if names:
        console.print(_heading(rounds))
    rows, written = [], []
    for name in names:
        found = _measured(console, name, states, rounds)
        console.print(table(found))
        rows += found
        if folder is not None:  # after every section: what an interruption finds is there
            written = report.write(folder, rows, shlex.join(["isopos", *sys.argv[1:]]), rounds)
    if section in ("all", "accuracy"):
        console.print(accuracy.accuracy())
    for path in written:
        console.print(f"wrote {path}")
    return 0


def _measured(console: Console, name: str, states: list[str], rounds: int) -> list[Row]:
    """A section in each state of the allocator, a process each; rows of one work below each other."""
    by_state = []
    for state in states:
        with console.status(f"{name}, allocator {state}"):
            found = processes.call("section", processes.ALLOCATORS[state], name=name, rounds=rounds)
        by_state.append([Row.from_json(row).replace(allocator=state) for row in found])
    merged: dict[tuple[str, str, str], list[Row]] = {}
    for row in (row for rows in by_state for row in rows):
        merged.setdefault((row.work, row.other, row.unit), []).append(row)
    return [row for rows in merged.values() for row in rows]


def _heading(rounds: int) -> str:
    about = report.machine()
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return (
        f"{versions}; {about['cpu']}, {about['threads']} threads, {about['dtype']}. Medians of {rounds} interleaved rounds; "
        "ratios are taken within rounds. speed: the other's time / ours; time: ours / the other's. A difference is none "
        "where the quartiles of its ratio are on both sides of 1."
    )
