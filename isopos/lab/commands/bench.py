"""`isopos bench`."""

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from isopos.lab.commands import bounded


@dataclass(frozen=True)
class Options:
    """Measure on this machine: ours beside PyTorch's in turns, as ratios with their spread; memory, construction, accuracy.

    Exactness is the error of every scheme in every setting and dtype, which takes a minute.
    """

    section: Annotated[
        Literal[
            "all",
            "attention",
            "rotary",
            "decode",
            "sublayer",
            "threads",
            "load",
            "growth",
            "memory",
            "construction",
            "accuracy",
            "exactness",
        ],
        tyro.conf.Positional,
    ] = "all"
    """What to measure; "all" leaves out exactness."""
    device: Literal["cpu", "cuda"] = "cpu"  # Where: a GPU has the sections attention, rotary and decode.
    state: Literal["all", "as-is", "reused", "huge-pages", "triton", "pytorch"] = "all"
    """One of the states that are measured one after the other: of glibc's allocator on a CPU, as it is, told to reuse memory
    or with huge pages; on a GPU whose kernels serve."""
    rounds: int = 9  # Rounds in which works take turns; on a GPU fewer where they take long.
    out: str = ""  # A folder for bench.json, with every round's seconds, and bench.svg; by default nothing is written.
    overwrite: bool = False  # Replace them if they exist.
    resume: bool = False  # Go on with them, after an interruption or with what is missing: races they have are left out.
    compiled: bool = False  # With exactness: compiled into one graph, too, which takes minutes.


def run(options: Options, console: Console) -> int:
    """Print the rows of a section, or of all but exactness, and write them if there is a folder."""
    from isopos.lab.bench import accuracy, exactness, gpu, processes, results
    from isopos.lab.bench.timing import TITLES
    from isopos.lab.reports import grids
    from isopos.lab.training.run import usable_device

    section, rounds, device = options.section, options.rounds, usable_device(options.device)
    if device != "cpu" and section not in ("all", *gpu.RACES):
        raise ValueError(f"section: expected all, {', '.join(gpu.RACES)} on a GPU, got {section}")
    if options.compiled and section != "exactness":
        raise ValueError(f"compiled: expected the section exactness, got {section}")
    if section == "exactness":
        exactness.console(console, compiled=options.compiled)
        return 0
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    bounded(options, rounds=100_000)
    if options.resume and (options.overwrite or not options.out):
        raise ValueError("resume: expected a folder to go on with, --out, that is not to be replaced, no --overwrite")
    states = processes.states_of(device, options.state)
    folder = results.target(options.out, keep=not (options.overwrite or options.resume))
    rows = results.read(folder, rounds, device) if options.resume and folder else []
    names = [name for name in (processes.SECTIONS if device == "cpu" else gpu.RACES) if section in ("all", name)]
    if names:
        console.print(results.heading(rounds, device))
    command, written = shlex.join([*processes.COMMAND, *sys.argv[2:]]), []
    for name in names:
        with console.status(name):
            for row in processes.in_states(name, states, rounds, device, rows):
                rows = results.merged([*rows, row])
                if folder is not None:  # after every row: an interruption finds what there is
                    written = [results.write(folder, rows, command, rounds, device)]
        console.print(grids.console(TITLES, [row.cells() for row in rows if row.section == name]))
        if folder is not None:
            written += results.draw(folder, rows)
    if device == "cpu" and section in ("all", "accuracy"):
        console.print(accuracy.accuracy())
    grids.say(console, *(f"wrote {path}" for path in written))
    return 0
