"""The command line dispatches: a command is its options and `run(options, console)`, in a file of `isopos.lab.commands`.

Nothing here imports torch, nor, until `main` is called, anything that only the extra `lab` installs.
"""

import sys
from typing import Annotated, Any, Union

__all__ = ["main"]

DESCRIPTION = "Positional encodings as isometries."


def main() -> None:
    """Run a command; exit with 0, with 2 after one line about what was wrong, or with 130 after Ctrl-C (143: SIGTERM)."""
    try:
        sys.exit(_run(sys.argv[1:] or ["--help"]))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "isopos":
            raise
        print(f'isopos: the command line needs {error.name}: pip install "isopos[lab]"', file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError) as error:
        print(f"isopos: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(*(f"isopos: {reason}" for reason in stop.args), sep="", end="\n" * len(stop.args), file=sys.stderr)
        sys.exit(getattr(stop, "code", 130))


def _run(arguments: list[str]) -> int:
    import tyro
    from rich.console import Console

    from isopos.lab.commands import compare, train
    from isopos.lab.commands.bench import Bench
    from isopos.lab.commands.check import Check
    from isopos.lab.commands.eval import Evaluation
    from isopos.lab.commands.generate import Generate
    from isopos.lab.commands.list import List
    from isopos.lab.commands.runs import Runs
    from isopos.lab.commands.show import Show
    from isopos.lab.commands.table import TableRun

    commands = {
        "compare": compare.Comparison,
        "table": TableRun,
        "train": train.Train,
        "list": List,
        "check": Check,
        "show": Show,
        "eval": Evaluation,
        "runs": Runs,
        "generate": Generate,
        "bench": Bench,
    }
    own = {"train": train.default, "compare": compare.default}  # whose options depend on what is named
    defaults: dict[str, Any] = {arguments[0]: {"default": own[arguments[0]](arguments)}} if arguments[0] in own else {}
    kinds = [Annotated[kind, tyro.conf.subcommand(name, **defaults.get(name, {}))] for name, kind in commands.items()]
    choice: Any = Union[tuple(kinds)]  # noqa: UP007
    options = tyro.cli(choice, prog="isopos", args=arguments, description=DESCRIPTION)
    console = Console(width=None if sys.stdout.isatty() else 150)
    return sys.modules[type(options).__module__].run(options, console)
