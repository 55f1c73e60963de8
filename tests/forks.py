"""Processes that run isopos without the seconds of its imports: one server imports it and Lightning, and forks them.

`test_signals.py` and `test_output.py` test what happens before `isopos.cli.main`, such as Ctrl-C during the imports.
"""

import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

COMMANDS = ("train", "table", "eval", "compare")
IMPORTED = ["isopos.cli", "isopos.lab.training.trainer", *(f"isopos.lab.commands.{name}" for name in COMMANDS)]


@functools.cache
def _server() -> Any:
    """The context of the server, which starts with one thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def isopos(*arguments: str) -> None:
    """Run ``python -m isopos``."""
    sys.argv = ["isopos", *arguments]
    runpy.run_module("isopos", run_name="__main__", alter_sys=True)


class Forked:
    """A process that runs ``function(*arguments)`` in a folder and a new session, with methods of `subprocess.Popen`."""

    def __init__(
        self, folder: Path, function: Callable[..., Any], *arguments: str, environment: Mapping[str, str] | None = None
    ):
        reader, writer = _server().Pipe(duplex=False)
        self.process = _server().Process(target=_run, args=(str(folder), environment or {}, writer, function, arguments))
        self.process.start()
        writer.close()
        self.pid, self.stdout = self.process.pid, os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the number of a signal; None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """The exit status, if it has one."""
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until all that write to its output have ended; returns the output."""
        found: list[str] = []
        thread = Thread(target=lambda: found.append(self.stdout.read()), daemon=True)
        thread.start()
        thread.join(timeout)
        self.process.join(timeout)
        if not found or self.returncode is None:
            raise subprocess.TimeoutExpired([self.process.name], timeout or 0)
        self.stdout.close()
        return found[0], ""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to it and the processes of its session, unless it has ended."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)


def _run(folder: str, environment: Mapping[str, str], out: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.setsid()
    usual = multiprocessing.get_all_start_methods()[0]
    multiprocessing.set_start_method(usual, force=True)  # not the server's, by which a worker would import PyTorch again
    for stream in (1, 2):
        os.dup2(out.fileno(), stream)
    out.close()
    sys.stdout, sys.stderr = (open(stream, "w", encoding="utf-8", closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    function(*arguments)
