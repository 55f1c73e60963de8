"""`isopos bench`."""

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from isopos.lab.commands import bounded
from isopos.lab.reports import grids
from isopos.lab.tasks.task import require

RACES = Literal["attention", "rotary", "decode", "sublayer", "threads", "load", "growth"]
Section = Literal["all", RACES, "memory", "construction", "accuracy", "exactness"]


@dataclass(frozen=True)
class Options:
    """Measure this machine: isopos against PyTorch in interleaved rounds, as ratios with quartiles; memory and accuracy.

    The section exactness prints the error of every scheme in every setting and dtype; it takes a minute.
    """

    section: Annotated[Section, tyro.conf.Positional] = "all"
    """Section to measure; "all" leaves out exactness."""
    device: Literal["cpu", "cuda"] = "cpu"  # Device; a GPU has the sections attention, rotary and decode.
    allocator: Literal["all", "as-is", "reused", "huge-pages"] = "all"
    """Memory allocator on a CPU: glibc's unchanged, set to reuse memory, or with huge pages; by default each of them."""
    backend: Literal["all", "triton", "pytorch"] = "all"  # Kernels on a GPU; by default each of them.
    state: Literal["", "all", "as-is", "reused", "huge-pages", "triton", "pytorch"] = ""
    """Former name of --allocator and --backend; it goes in the next version."""
    rounds: int = 9  # Interleaved rounds per race; fewer on a GPU where calls take long.
    out: str = ""  # Folder for bench.json (seconds of every round) and bench.svg; by default nothing is written.
    overwrite: bool = False  # Replace the files if they exist.
    resume: bool = False  # Add missing races to the files in --out.
    compiled: bool = False  # Section exactness: measure compiled graphs as well (minutes).


def run(options: Options, console: Console) -> int:
    """Print the rows of a section, or of all except exactness; write them to a folder if `out` is set."""
    from isopos.lab.bench import accuracy, exactness, gpu, processes, results
    from isopos.lab.timing import titles
    from isopos.lab.training.run import usable_device

    section, rounds, device = options.section, options.rounds, usable_device(options.device)
    if device != "cpu" and section not in ("all", *gpu.RACES):
        raise ValueError(f"section: expected all, {', '.join(gpu.RACES)} on a GPU, got {section}")
    if options.compiled and section != "exactness":
        raise ValueError(f"compiled: expected the section exactness, got {section}")
    if section == "exactness":
        for name in ("allocator", "backend", "state", "rounds", "out", "overwrite", "resume"):
            value, default = getattr(options, name), getattr(Options(), name)
            require(name, value, f"{default!r} with the section exactness, which has no races", value == default)
        exactness.print_tables(console, compiled=options.compiled)
        return 0
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    bounded(options, rounds=100_000)
    if options.resume and (options.overwrite or not options.out):
        raise ValueError("resume: expected --out, the folder to continue, without --overwrite")
    used, unused = ("allocator", "backend") if device == "cpu" else ("backend", "allocator")
    ignored = getattr(options, unused)
    require(unused, ignored, f"all on {options.device}, whose option is --{used}", ignored == "all")
    alone = not options.state or getattr(options, used) == "all"
    require("state", options.state, f"--{used} alone, of which it is the former name", alone)
    require(
        "out", options.out, "none with the section accuracy, which has no races", not options.out or section != "accuracy"
    )
    variants = processes.variants_of(device, options.state or getattr(options, used))
    folder = results.target(options.out, keep=not (options.overwrite or options.resume))
    rows = results.earlier_rows(folder, rounds, device) if options.resume and folder else []
    names = [name for name in (processes.SECTIONS if device == "cpu" else gpu.RACES) if section in ("all", name)]
    if names:
        console.print(results.heading(rounds, device))
    command, written = shlex.join([*processes.COMMAND, *sys.argv[2:]]), []
    for name in names:
        with console.status(name):
            for row in processes.in_variants(name, variants, rounds, device, rows):
                rows = results.latest_rows([*rows, row])
                if folder is not None:  # after every row: an interruption keeps the rows so far
                    written = [results.write_results(folder, rows, command, rounds, device)]
        console.print(grids.console_table(titles(device), [row.cells() for row in rows if row.section == name]))
        if folder is not None:
            written += results.draw_chart(folder, rows)
    if device == "cpu" and section in ("all", "accuracy"):
        console.print(accuracy.accuracy())
    grids.say(console, *(f"wrote {path}" for path in written))
    return 0
