"""The command line dispatches: a command is `Options` and `run(options, console)`, in a file of `isopos.lab.commands`.

Nothing here imports torch, nor, until `main` is called, anything that takes time or that only the extra `lab` installs: what
interrupts `main` is heeded there.
"""

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

__all__ = ["main"]

COMMANDS = (
    *("compare", "table", "train", "list", "check", "audit", "show"),
    *("eval", "report", "runs", "generate", "export", "bench"),
)
FOLLOWING = ("compare", "train")  # commands whose options depend on what is named
SAVING = (
    "compare",
    "table",
    "train",
    "eval",
    "report",
    "export",
    "bench",
)  # commands that leave files, also where nobody reads
LOST = 141  # the exit status where standard output was closed by its reader, as that of a process which SIGPIPE ended
MEMORY = ("allocate memory", "out of memory")  # what PyTorch says of a tensor that does not fit
REMEDIES = {
    errno.ENOSPC: "; make room and run it again",
    errno.EDQUOT: "; make room and run it again",
    errno.EACCES: "; choose a place that can be read and written",
    errno.EROFS: "; choose a place that can be written",
}


def main() -> None:
    """Run a command; exit with 0, with 2 after one line about what was wrong, or with 130 after Ctrl-C (143: SIGTERM)."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by who started this: the next file that is opened would take its place
            setattr(sys, name, _nowhere(number))
    arguments = sys.argv[1:] or ["--help"]
    out = _Output(sys.stdout, arguments[0] in SAVING)
    with contextlib.redirect_stdout(out):  # pyright: ignore[reportArgumentType]
        status = _status(arguments)
        out.flush()
    sys.exit(status or out.lost)


def _status(arguments: list[str]) -> int:
    """The exit status of a command, however it ends."""
    code = 2
    try:
        return _run(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else bool(stop.code)
    except KeyboardInterrupt as stop:
        said, code = str(stop), getattr(stop, "code", 130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "isopos":
            raise
        said = f'the command line needs {error.name}: pip install "isopos[lab]"'
    except OSError as error:
        said = _sentence(error)
    except OverflowError as error:
        said = f"expected numbers that a computer can count with, got one beyond: {error}"
    except ValueError as error:
        said = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in MEMORY):
            raise
        said = f"expected sizes that fit into memory; choose smaller ones: {str(error) or 'MemoryError'}"
    if said:
        from isopos.lab.runs.files import printable

        print(f"isopos: {printable(said)}", file=sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    import tyro
    from rich.console import Console

    from isopos.lab.runs import signals

    with signals.raising():
        kinds = []
        for name in COMMANDS:
            module, more = importlib.import_module(f"isopos.lab.commands.{name}"), {}
            if name == arguments[0] and name in FOLLOWING:
                more["default"] = module.default(arguments)
            kinds.append(Annotated[module.Options, tyro.conf.subcommand(name, **more)])
        choice: Any = Union[tuple(kinds)]  # noqa: UP007
        options = tyro.cli(choice, prog="isopos", args=arguments, description="Positional encodings as isometries.")
        console = Console(width=None if sys.stdout.isatty() else 150)
        signals.heed()
        return sys.modules[type(options).__module__].run(options, console)


class _Output:
    """Standard output: a character that its encoding lacks is a question mark; whoever reads it may go.

    Commands that leave files then go on without a reader; the others end.
    """

    def __init__(self, stream: Any, goes_on: bool):
        self.stream, self.goes_on, self.lost = stream, goes_on, 0
        stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError as error:
            self.lost = LOST if isinstance(error, BrokenPipeError) else 2
            if self.lost != LOST:
                print(f"isopos: standard output: {_sentence(error)}", file=sys.stderr)
            _nowhere(self.stream.fileno())
            if not self.goes_on:
                raise SystemExit(self.lost) from None


def _nowhere(number: int) -> Any:
    """A stream of this number that keeps nothing."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    return open(number, "w", closefd=False)


def _sentence(error: OSError) -> str:
    """What went wrong with which file, and what to do."""
    if error.strerror is None:
        return str(error)
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{f'{names}: ' * bool(names)}{error.strerror[0].lower()}{error.strerror[1:]}{REMEDIES.get(error.errno or 0, '')}"
