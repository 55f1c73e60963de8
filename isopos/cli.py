"""The command line `isopos`. Each command is a file of `isopos.lab.commands` with `Options` and `run(options, console)`.

Until `main` is called, nothing here imports torch, slow modules, or packages of the extra `lab`, so that Ctrl-C is handled
from the start.
"""

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Union

COMMANDS = (
    *("compare", "table", "train", "list", "recommend", "check", "audit", "show"),
    *("eval", "report", "runs", "generate", "export", "tables", "convert", "bench"),
)
GPU_CHECK = "gpu-check"
SAVING = (GPU_CHECK, "compare", "table", "train", "eval", "report", "export", "tables", "convert", "bench")  # write files
DESCRIPTION = f"Positional encodings as isometries. `isopos {GPU_CHECK} --help` is about Triton's kernels on a GPU."
LOST = 141  # exit status after the reader closed standard output, as after SIGPIPE
MEMORY = ("allocate memory", "out of memory")  # in PyTorch's messages
REMEDIES = {
    errno.ENOSPC: "; make room and run it again",
    errno.EDQUOT: "; make room and run it again",
    errno.EACCES: "; choose a folder that can be read and written",
    errno.EROFS: "; choose a folder that can be written",
}


def main() -> None:
    """Run a command. Exit with its status; with 2 after a message of one line; with 130 after Ctrl-C, 143 after SIGTERM."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by the parent: the next opened file would get its number
            setattr(sys, name, _nowhere(number))
    arguments = sys.argv[1:] or ["--help"]
    out = _Output(sys.stdout, arguments[0] in SAVING)
    with contextlib.redirect_stdout(out):  # pyright: ignore[reportArgumentType]
        status = _status(arguments)
        out.flush()
    sys.exit(status or out.lost)


def _status(arguments: list[str]) -> int:
    """Run a command and return its exit status; print errors as one line."""
    code = 2
    try:
        return _run(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else bool(stop.code)
    except KeyboardInterrupt as stop:
        message, code = str(stop), getattr(stop, "code", 130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "isopos":
            raise
        message = f'the command line needs {error.name}: pip install "isopos[lab]"'
    except OSError as error:
        message = _sentence(error)
    except OverflowError as error:
        message = f"expected numbers that a computer can count with, got one beyond: {error}"
    except ValueError as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in MEMORY):
            raise
        message = f"expected sizes that fit into memory; choose smaller ones: {str(error) or 'MemoryError'}"
    if message:
        from isopos.lab.runs.files import printable

        print(f"isopos: {printable(message)}", file=sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    if arguments[0] == GPU_CHECK:  # on a machine that has torch and triton alone
        return importlib.import_module("isopos.lab.bench.gpu_check").main(arguments[1:])
    import tyro
    from rich.console import Console

    from isopos.catalog import expect
    from isopos.lab.runs import signals

    with signals.raising():
        if arguments[0].startswith("-"):  # about all commands
            kinds = [Annotated[_module(name).Options, tyro.conf.subcommand(name)] for name in COMMANDS]
            every: Any = Union[tuple(kinds)]  # noqa: UP007
            options = tyro.cli(every, prog="isopos", args=arguments, description=DESCRIPTION)
        else:
            name, *rest = arguments
            expect("command", name, COMMANDS)
            module, more = _module(name), {}
            if hasattr(module, "default"):
                more["default"] = module.default(arguments)  # the task or recipe on the command line adds its options
            options = tyro.cli(module.Options, prog=f"isopos {name}", args=rest, **more)
        console = Console(width=None if sys.stdout.isatty() else 150)
        signals.raise_pending()
        return sys.modules[type(options).__module__].run(options, console)


def _module(command: str) -> Any:
    return importlib.import_module(f"isopos.lab.commands.{command}")


class _Output:
    """Standard output that replaces characters its encoding lacks by question marks, and survives a reader that closes it.

    Commands that write files continue without a reader; others end.
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
    """A stream with this file number that discards what is written."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    return open(number, "w", closefd=False)


def _sentence(error: OSError) -> str:
    """The error as text: file names, reason, remedy."""
    if error.strerror is None:
        return str(error)
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{f'{names}: ' * bool(names)}{error.strerror[0].lower()}{error.strerror[1:]}{REMEDIES.get(error.errno or 0, '')}"
