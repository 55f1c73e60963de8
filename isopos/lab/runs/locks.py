"""Locks: one process at a time works on a run, of all processes on all machines that share its folder.

A lock is a hidden file beside what it guards, which the operating system locks (`filelock.FileLock`). Such a lock ends with
its process, however that ends, in any container; on NFS the server keeps it, and frees it when the machine's lease runs
out. The alternative, a file whose existence is the lock, would outlive a process that was killed. `filelock` takes it, with
a warning, only where the file system has no locks.

The files stay, since removing one that another process has just opened would make two locks of one. They lie beside the
folder, which may be moved or removed meanwhile. What only reads, such as a report, asks for no lock.
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout


@contextlib.contextmanager
def try_lock(path: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Whether this process has the lock of `path`, a folder or a file, for as long as the context is entered.

    A process that has a lock gets it again.

    Args:
        path: What the lock guards. It need not exist.
        seconds: How long to wait for another process.

    Raises:
        OSError: Where the lock's file cannot be written.

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
        if not isinstance(lock, SoftFileLock):  # whose file says this already
            with contextlib.suppress(OSError):  # a full disk, or Windows, which locks what is in the file, too
                file.write_text(f"{os.getpid()}\n{platform.node()}\n", encoding="utf-8")
        yield True
    finally:
        lock.release()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder for this process alone, for as long as the context is entered; ValueError says who else works there."""
    with contextlib.ExitStack() as held:
        try:
            mine = held.enter_context(try_lock(folder))
        except OSError as error:
            raise ValueError(f"name: cannot write beside {folder}: {error.strerror}") from None
        if not mine:
            raise ValueError(f"name: {folder} is in use by {holder(folder)}; wait for it or choose another --name")
        yield


def check_free(folder: Path) -> None:
    """Raise a ValueError that says who works in a folder, where another process does."""
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
    """The file of the lock of `path`: beside it, hidden."""
    path = path.resolve()
    return path.with_name(f".{path.name}.lock")
