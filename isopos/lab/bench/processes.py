"""Measurements in processes of their own, so that none inherits the memory of another."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isopos.lab.bench import figures, races
from isopos.lab.bench.rows import Row
from isopos.lab.bench.works import Shape

__all__ = ["ALLOCATORS", "FUNCTIONS", "SECTIONS", "allocators", "call", "in_states", "section"]

SECTIONS = (*races.RACES, "growth", "memory", "construction")
ALLOCATORS: dict[str, Mapping[str, str]] = {
    "as-is": {},
    # Most of the time of a large tensor may go into pages fresh from the system: glibc is told to keep what it has.
    "reused": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}
NODES = 2  # of a tree, for each token that a short section is cut to


def allocators(choice: str) -> list[str]:
    """The states of the allocator that a choice names; only glibc can be told."""
    if platform.libc_ver()[0] == "glibc":
        return list(ALLOCATORS) if choice == "both" else [choice]
    if choice == "reused":
        raise ValueError("allocator: expected as-is, since only glibc can be told to reuse memory, got reused")
    return ["as-is"]


def section(name: str, rounds: int, most: int = 1 << 62) -> Iterator[Row]:
    """The rows of a section, in this process; `most` cuts sequences, for a try."""
    if name == "growth":
        yield from races.growth(rounds, [length for length in races.LENGTHS if length <= most] or [most // 2, most])
    if name == "memory":
        lengths = dict.fromkeys(min(length, most) for length in figures.LENGTHS)
        yield from figures.memory(call, tuple(lengths), min(figures.LONG, most))
    if name == "construction":
        yield from figures.construction(call, rounds, min(figures.NODES, NODES * most))
    for contest in races.RACES.get(name, ()):
        yield from races.race(name, contest.limited(most), rounds)
    if name == "rotary":
        yield figures.rotation_error(Shape().limited(most))


def in_states(name: str, states: Sequence[str], rounds: int) -> list[Row]:
    """The rows of a section in states of the allocator, a process each; those of one work below each other."""
    merged: dict[tuple[str, str, str], list[Row]] = {}
    for state in states:
        for content in call("section", ALLOCATORS[state], name=name, rounds=rounds):
            row = Row.from_json(content).replace(allocator=state)
            merged.setdefault((row.work, row.other, row.unit), []).append(row)
    return [row for rows in merged.values() for row in rows]


def call(function: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """What a function of `FUNCTIONS` returns in a process of its own."""
    command = [sys.executable, "-m", "isopos.lab.bench.processes", function, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | (environment or {}))
    if done.returncode:
        why = "killed, perhaps for want of memory" if done.returncode < 0 else "its error is above"
        raise OSError(f"the process of {function} {json.dumps(arguments)} ended with {done.returncode}: {why}")
    return json.loads(done.stdout.splitlines()[-1])  # what a peer prints comes before


FUNCTIONS = {
    "section": lambda **arguments: [row.to_json() for row in section(**arguments)],
    "peak": lambda spec, shape: figures.peak(spec, Shape(*shape)),
    "long": lambda spec, shape: figures.long(spec, Shape(*shape)),
    "tree": figures.tree,
}

if __name__ == "__main__":  # a function in this process: FUNCTION ARGUMENTS, printed as JSON
    print(json.dumps(FUNCTIONS[sys.argv[1]](**json.loads(sys.argv[2]))))
