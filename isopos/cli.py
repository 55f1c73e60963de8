"""The command line: thin, and without torch until there is work to do."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from isopos.lab.recipes import Comparison

__all__ = ["main"]


@dataclass(frozen=True)
class List:
    """Print the schemes, one line and citation each."""


@dataclass(frozen=True)
class Bench:
    """Measure rotations and linear attention on this machine."""


DESCRIPTION = "Positional encodings as isometries."
Command = (
    Annotated[Comparison, tyro.conf.subcommand("compare")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main() -> None:
    """Run a command; exit with 0, with 2 after one line about what was wrong, or with 130 after Ctrl-C."""
    arguments = sys.argv[1:] or ["--help"]
    command = tyro.cli(Command, prog="isopos", args=arguments, description=DESCRIPTION)  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        if isinstance(command, Comparison):
            sys.exit(_compare(command))
        sys.exit(_list() if isinstance(command, List) else _bench())
    except (ValueError, OSError) as error:
        print(f"isopos: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _list() -> int:
    from isopos.catalog import CATALOG

    width = max(map(len, CATALOG))
    summary = max(len(entry.summary) for entry in CATALOG.values())
    for name, entry in CATALOG.items():
        print(f"{name:<{width}}  {entry.summary:<{summary}}  {entry.citation}")
    return 0


def _compare(comparison: Comparison) -> int:
    from isopos.lab.compare import compare

    return compare(comparison, _console())


def _bench() -> int:
    from isopos.lab.bench import bench

    return bench(_console())


def _console():
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 150)
