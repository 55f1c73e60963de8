"""Locks: only one process at a time works on a run, among all processes on all machines that share its folder.

A lock is a hidden file next to the folder or file that it guards, locked by the operating system (`filelock.FileLock`). It
ends with its process, even when that is killed, and works across containers. On NFS the server keeps the lock, and releases
it when the machine's lease expires. On file systems without locks `filelock` falls back, with a warning, to a file whose
existence is the lock, which outlives a killed process.

Lock files are never removed: another process may just have opened one, and would then lock a different file. They lie next
to the folder because the folder may be moved or removed. Reading, as for a report, needs no lock.
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout


@contextlib.contextmanager
def try_lock(path: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Try to lock a folder or file within the context; yield whether this process has the lock. It can be taken repeatedly.

    The lock is released on exit.

    Args:
        path: Folder or file to guard. It need not exist.
        seconds: How long to wait for another process.

    Raises:
        OSError: If the lock file cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, try_lock(Path(folder, "run")) as mine:
        ...     mine, sorted(os.listdir(folder))
        (True, ['.run.lock'])
    """
    file = lock_path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, is_singleton=True)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        yield False
        return
    try:
        if not isinstance(lock, SoftFileLock):  # SoftFileLock writes the same content itself
            with contextlib.suppress(OSError):  # full disk; or Windows, which also locks the content
                file.write_text(f"{os.getpid()}\n{platform.node()}\n", encoding="utf-8")
        yield True
    finally:
        lock.release()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder within the context; ValueError if another process has the lock; the message names it."""
    with contextlib.ExitStack() as stack:
        try:
            mine = stack.enter_context(try_lock(folder))
        except OSError as error:
            raise ValueError(f"name: cannot write next to {folder}: {error.strerror}") from None
        if not mine:
            raise ValueError(f"name: {folder} is in use by {holder(folder)}; wait for it or choose another --name")
        yield


def check_free(folder: Path) -> None:
    """Raise a ValueError that names the other process if one has the lock of a folder."""
    if lock_path(folder).exists():
        with locked(folder):
            pass


def holder(path: Path) -> str:
    """The process that last had the lock of `path`, as text."""
    with contextlib.suppress(OSError):
        pid, host, *_ = [*lock_path(path).read_text(encoding="utf-8", errors="replace").split("\n"), "", ""]
        if pid.isascii() and pid.isdigit() and host:
            return f"process {pid} on {host}"
    return "another process"


def lock_path(path: Path) -> Path:
    """Path of the lock file: next to `path`, hidden."""
    path = path.resolve()
    return path.with_name(f".{path.name}.lock")
