"""Interruption of a command: SIGINT and SIGTERM raise `Interrupted`.

An exception may be lost, for instance inside C code while a library is imported. Signals are therefore remembered as well;
code that is about to start more work calls `raise_pending`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isopos.lab.runs.folders import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_pending: list[int] = []


def _raise(number: int, frame: Any) -> None:
    _pending.append(number)
    raise Interrupted("", number)


def _wait(number: int, frame: Any) -> None:
    _pending.append(number)


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    """Handle signals by `handler` within the context, also where the process was started to ignore SIGINT."""
    with restored_handlers():
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, handler)
        yield


@contextmanager
def raising() -> Iterator[None]:
    """Raise `Interrupted` on a signal, while a command runs."""
    with _handled(_raise):
        try:
            yield
        finally:
            _pending.clear()


def deferred() -> Any:
    """Return a context in which signals are only remembered, so that an operation is completed."""
    return _handled(_wait)


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the signal handlers on exit: some libraries replace them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def remember(number: int) -> None:
    """Remember a signal that another handler received; ignored outside of commands, where nothing checks for it."""
    if signal.getsignal(number) is _raise:
        _pending.append(number)


def pending() -> int:
    """The first remembered signal, or 0."""
    return _pending[0] if _pending else 0


def raise_pending() -> None:
    """Raise `Interrupted` if a signal is remembered."""
    if _pending:
        raise Interrupted("", _pending[0])


def exit_status(stop: KeyboardInterrupt) -> int:
    """Exit status of an interrupted command: 130 after Ctrl-C, 143 after SIGTERM."""
    return stop.code if isinstance(stop, Interrupted) else 128 + signal.SIGINT
