"""The one way in which the laboratory writes files: a reader, a kill, a loss of power meet the old file or the new one."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flush_folder", "printable", "replacing", "write_json", "write_text"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, that takes the place of `path` where it was written without an error, and is gone otherwise.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "a.txt")) as part:
        ...         _ = part.write_text("whole")
        ...     [(path.name, path.read_text()) for path in Path(folder).iterdir()]
        [('a.txt', 'whole')]
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    flush_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file by text."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Replace a file by the value."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def printable(text: str) -> str:
    r"""A text in one line: characters that would move a cursor, hide others or cannot be encoded are written as escapes.

    Example:
        >>> print(printable("a\x1b[2Jb\n±"))
        a\x1b[2Jb\n±
    """
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
