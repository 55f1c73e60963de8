"""Signals that end a command: SIGINT and SIGTERM raise `Interrupted`.

An exception may be lost on its way, for instance in what C calls while a library is imported. So the number is kept too, and
whoever is about to begin more work asks `heed` or `kept`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isopos.lab.runs.folders import Interrupted

ENDING = (signal.SIGINT, signal.SIGTERM)
_kept: list[int] = []


def _raise(number: int, frame: Any) -> None:
    _kept.append(number)
    raise Interrupted("", number)


def _wait(number: int, frame: Any) -> None:
    _kept.append(number)


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    """By this handler, also where the process was started to ignore SIGINT; afterwards as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def raising() -> Iterator[None]:
    """While a command runs."""
    with _handled(_raise):
        try:
            yield
        finally:
            _kept.clear()


def waiting() -> Any:
    """A context in which signals are only kept: what must not be left half done is done first."""
    return _handled(_wait)


@contextmanager
def unchanged() -> Iterator[None]:
    """Whatever handles signals when this is entered handles them again afterwards: libraries take them for themselves."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def keep(number: int) -> None:
    """Keep a signal that another handler took and could not heed; outside of commands nobody would heed it."""
    if signal.getsignal(number) is _raise:
        _kept.append(number)


def kept() -> int:
    """The first signal that is kept, or 0."""
    return _kept[0] if _kept else 0


def heed() -> None:
    """Raise `Interrupted` where a signal is kept."""
    if _kept:
        raise Interrupted("", _kept[0])


def status(stop: KeyboardInterrupt) -> int:
    """The exit status of a command that was interrupted: 130 after Ctrl-C, 143 after SIGTERM."""
    return stop.code if isinstance(stop, Interrupted) else 128 + signal.SIGINT
