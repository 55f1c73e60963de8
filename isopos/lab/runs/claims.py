"""Claims: work that several processes, on machines that share a folder, divide among them without talking to each other.

A claim is a file that one process creates and no other can, with host and process in it. While the work goes on its time of
change is renewed. One that is not renewed for ten minutes, or whose process is gone from this host, may be taken over.
"""

import contextlib
import json
import os
import platform
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["BEAT", "STALE", "claimed", "holder"]

BEAT, STALE = 20.0, 600.0  # seconds


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the claim `path` is this process's, for as long as it is entered.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with claimed(Path(folder, "cell.claim")) as first, claimed(Path(folder, "cell.claim")) as second:
        ...         print(first, second)
        True False
    """
    if not (_create(path) or _take_over(path)):
        yield False
        return
    done = threading.Event()
    beat = threading.Thread(target=_renew, args=(path, done), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        done.set()
        beat.join()
        path.unlink(missing_ok=True)


def holder(path: Path) -> str:
    """Who holds a claim, as text; empty where nobody does, or no longer."""
    try:
        found = _read(path)
        gone = found["host"] == platform.node() and not _runs(int(found["pid"]))
        if gone or _now(path.parent) - path.stat().st_mtime > STALE:
            return ""
    except FileNotFoundError:
        return ""
    return f"process {found['pid']} on {found['host']}"


def _create(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x") as file:
            json.dump({"host": platform.node(), "pid": os.getpid()}, file)
    except FileExistsError:
        return False
    return True


def _take_over(path: Path) -> bool:
    """Replace a stale claim. Processes that see the same one take turns, so that only the first finds it stale."""
    turn = path.with_name(f".{path.name}.turn")
    try:
        turn.mkdir()
    except FileExistsError:
        with contextlib.suppress(OSError):
            if _now(path.parent) - turn.stat().st_mtime > STALE:  # whoever made it was killed at that moment
                turn.rmdir()
        return False
    try:
        if holder(path):
            return False
        path.unlink(missing_ok=True)
        return _create(path)
    finally:
        turn.rmdir()


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError:  # it is being written
        return {"host": "", "pid": 0}


def _runs(pid: int) -> bool:
    try:
        if os.name == "posix":  # elsewhere a signal 0 would end it
            os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _now(folder: Path) -> float:
    """The time by the clock that stamps files of this folder, which may be another machine's."""
    with tempfile.NamedTemporaryFile(prefix=".clock.", dir=folder) as probe:
        return os.stat(probe.name).st_mtime


def _renew(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)
