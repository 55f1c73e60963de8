"""Claims: what one process at a time has, of all on machines that share a folder, without talking to each other.

A claim is a file that one process creates and no other can, with host and process in it, locked while that process lives and
renewed meanwhile. On one machine it is free as soon as the process is gone, however it ended, also where the other process
is in a container that has the same name. Of another machine, or where nothing is known of a process, it is free when it was
not renewed for ten minutes. A file system without locks, or whose locks other machines do not see, takes nothing from this.
"""

import contextlib
import json
import os
import platform
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from isopos.lab.runs.files import Damaged, read_json, replacing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["BEAT", "STALE", "check_free", "claimed", "holder", "locked"]

BEAT, STALE, TURN = 20.0, 600.0, 30.0  # seconds
WHO = ("host", "pid", "boot", "space", "start")  # of a process: what tells it from all others, also in containers


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the claim `path` is this process's, for as long as it is entered.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with claimed(Path(folder, "cell.claim")) as first, claimed(Path(folder, "cell.claim")) as second:
        ...         print(first, second)
        True False
    """
    file = _take(path)
    if file is None:
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
        file.close()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A run folder, or a comparison's, for this process alone, as long as it is entered; ValueError says who else has it."""
    with contextlib.ExitStack() as held:
        try:
            mine = held.enter_context(claimed(_lock(folder)))
        except OSError as error:
            raise ValueError(f"name: cannot write beside {folder}: {error.strerror}") from None
        if not mine:
            check_free(folder)
            raise ValueError(f"name: {folder} is just being taken by another process; start again")
        yield


def check_free(folder: Path) -> None:
    """Raise a ValueError that says who works in a run folder, where another process does."""
    lock = _lock(folder)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if _process(os.getpid()).items() <= _read(lock).items():
            return
    if who := holder(lock):
        raise ValueError(
            f"name: {folder} is in use by {who}; wait for it or choose another --name; if it is gone for good, remove {lock}"
        )


def _lock(folder: Path) -> Path:
    """Beside the folder, whose place another one may take."""
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.lock")


def holder(path: Path) -> str:
    """Who holds a claim, as text; empty where nobody does, or no longer."""
    try:
        found = _read(path)
        own = _process(found["pid"])
        if found["boot"] != own["boot"]:
            free = _age(path) > (STALE if found["host"] else BEAT)
        elif found["space"] == own["space"]:
            free = own["start"] not in ("hidden", found["start"])
        else:  # a container on this machine
            with path.open("rb") as file:
                locks = _lock_file(file, shared=True)
            free = _age(path) > STALE if locks is None else locks
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "" if free else f"process {found['pid']} on {found['host']}"


def _take(path: Path) -> IO[bytes] | None:
    """The claim, created and locked, where it is free. Processes take turns, so that only the first finds it free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    turn = path.with_name(f".{path.name}.turn")
    try:
        turn.mkdir()
    except FileExistsError:
        with contextlib.suppress(OSError):
            if _age(turn) > TURN:  # whoever made it was killed at that moment
                turn.rmdir()
        return None
    try:
        if path.exists() and holder(path):
            return None
        with replacing(path) as part:
            part.write_text(json.dumps({"host": platform.node()} | _process(os.getpid())))
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(part.open("rb+"))
                _lock_file(file, shared=False)
                opened.pop_all()
        return file
    finally:
        turn.rmdir()


def _lock_file(file: IO[bytes], *, shared: bool) -> bool | None:
    """Lock a file, unless another process has; None where the file system has no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    return None


def _read(path: Path) -> dict[str, Any]:
    """What is in a claim, of which a full disk, or an earlier version, may have left a part."""
    nobody = dict.fromkeys(WHO, "") | {"pid": 0}
    try:
        return nobody | read_json(path, {"host": str, "pid": int}, "", dict)
    except Damaged:
        return nobody


def _process(pid: int) -> dict[str, Any]:
    """What tells a process of this machine from all others: start of the machine, space of process numbers, own start."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return {"pid": pid, "boot": platform.node(), "space": "", "start": "hidden" if _runs(pid) else "gone"}
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        start = "gone" if status[0] in "XZ" else status[19]
    except OSError:
        start = "hidden" if _runs(pid) else "gone"
    return {"pid": pid, "boot": boot, "space": space, "start": start}


def _runs(pid: int) -> bool:
    try:
        if os.name == "posix":  # elsewhere a signal 0 would end it
            os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _age(path: Path) -> float:
    """Seconds since a file was changed, by the clock that stamps files of its folder, which may be another machine's."""
    with tempfile.NamedTemporaryFile(prefix=".clock.", dir=path.parent) as probe:
        return os.stat(probe.name).st_mtime - path.stat().st_mtime


def _renew(path: Path, done: threading.Event) -> None:
    while not done.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(path)
