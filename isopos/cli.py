"""The command line dispatches: a command is `Options` and `run(options, console)`, in a file of `isopos.lab.commands`.

Nothing here imports torch, nor, until `main` is called, anything that only the extra `lab` installs.
"""

import importlib
import sys
from typing import Annotated, Any, Union

__all__ = ["main"]

COMMANDS = ("compare", "table", "train", "list", "check", "show", "eval", "runs", "generate", "bench")
FOLLOWING = ("compare", "train")  # commands whose options depend on what is named


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

    kinds = []
    for name in COMMANDS:
        module, more = importlib.import_module(f"isopos.lab.commands.{name}"), {}
        if name == arguments[0] and name in FOLLOWING:
            more["default"] = module.default(arguments)
        kinds.append(Annotated[module.Options, tyro.conf.subcommand(name, **more)])
    choice: Any = Union[tuple(kinds)]  # noqa: UP007
    options = tyro.cli(choice, prog="isopos", args=arguments, description="Positional encodings as isometries.")
    console = Console(width=None if sys.stdout.isatty() else 150)
    return sys.modules[type(options).__module__].run(options, console)
