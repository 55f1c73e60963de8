"""Reading and writing of the laboratory's files.

After a kill or a loss of power a file has its old or its new content. Files are read only if they are regular, of bounded
size, and have the expected fields and types; otherwise `Damaged` names the file and the remedy.
"""

import contextlib
import errno
import glob
import json
import math
import os
import secrets
import stat
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

MAX_BYTES = 256 << 20  # of a file
ABANDONED = 3600.0  # seconds after which the part files of killed processes are removed
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "named values", list: "a list"}


class Damaged(ValueError):
    """A file of the laboratory has unexpected content; the message names it and the remedy."""


def damaged(path: Path | str, reason: object, remedy: str) -> NoReturn:
    """Raise `Damaged` with a message of one line."""
    reason = reason.strerror or reason if isinstance(reason, OSError) else reason
    text = " ".join(str(reason).split()) or type(reason).__name__
    raise Damaged(f"{path}: {text if len(text) <= 1000 else text[:1000] + '...'}; {remedy}") from None


def check_plain(path: Path, limit: int | None = None) -> None:
    """Raise OSError or ValueError if a path is no regular file, or has more than `limit` bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("expected a plain file, got a folder, a pipe or a device")
    if limit is not None and status.st_size > limit:
        raise ValueError(f"expected at most {limit} bytes, got {status.st_size}")


def read_text(path: Path, remedy: str, limit: int = MAX_BYTES) -> str:
    """Read a text file.

    Raises:
        FileNotFoundError: If there is none.
        Damaged: If it cannot be read, is no regular file, too large, or not in UTF-8.
    """
    try:
        check_plain(path, limit)
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        damaged(path, error, remedy)


def read_json(path: Path, kind: Any, remedy: str, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """Read a JSON file whose value has a kind (see `mismatch`) after `change`, which converts older formats.

    Raises:
        FileNotFoundError: If there is none.
        Damaged: As `read_text`, and if it is not JSON or of another kind.
    """
    return parse_json(read_text(path, remedy), path, kind, remedy, change)


def parse_json(
    text: str, path: Path | str, kind: Any, remedy: str, change: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Parse a JSON text from the file `path`; see `read_json`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        damaged(path, f"expected JSON, got none: {error}", remedy)
    try:
        value = change(value)
    except (ValueError, TypeError, KeyError, AttributeError):
        damaged(path, mismatch(value, kind) or f"expected other values, got {_short(value)}", remedy)
    if wrong := mismatch(value, kind):
        damaged(path, wrong, remedy)
    return value


def mismatch(value: Any, kind: Any) -> str:
    """Describe how a plain value differs from a kind; empty if it does not.

    A kind is a type, Any, a union, a Literal, a list, tuple or mapping of a kind, or a dictionary of kinds by the names that
    a value must have, among others. Integers count as floats; booleans are neither.

    Examples:
        >>> mismatch({"step": 3, "loss": None, "more": 1}, {"step": int, "loss": float | None})
        ''
        >>> mismatch({"step": "3"}, {"step": int}), mismatch([1], list[str])
        ("step: expected a whole number, got '3'", '0: expected text, got 1')
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return "" if any(not mismatch(value, member) for member in args) else mismatch(value, args[0])
    if origin is Literal:
        return "" if value in args else f"expected one of {', '.join(map(str, args))}, got {_short(value)}"
    if kind in (int, float):
        matches = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return "" if matches else _expected(kind, value)
    plain = dict if isinstance(kind, dict) or origin is Mapping else list if origin in (tuple, Sequence) else origin or kind
    if kind is not Any and not isinstance(value, (list, tuple) if plain is list else plain):
        return _expected(plain, value)
    parts: Iterator[tuple[object, Any, Any]] = iter(())
    if isinstance(kind, dict):
        if missing := next((name for name in kind if name not in value), ""):
            return f"{missing}: expected a value, got none"
        parts = ((name, value[name], kind) for name, kind in kind.items())
    elif origin is tuple and Ellipsis not in args:
        if len(value) != len(args):
            return f"expected {len(args)} values, got {_short(value)}"
        parts = ((n, item, kind) for n, (item, kind) in enumerate(zip(value, args, strict=True)))
    elif args:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = ((name, item, args[-1 if plain is dict else 0]) for name, item in items)
    return next((f"{name}: {wrong}" for name, item, kind in parts if (wrong := mismatch(item, kind))), "")


def _expected(kind: Any, value: object) -> str:
    return f"expected {WORDS.get(kind, getattr(kind, '__name__', kind))}, got {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it replaces `path` if the context ends without an error, and is removed otherwise.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder, "a.txt")) as part:
        ...         _ = part.write_text("whole")
        ...     [(path.name, path.read_text()) for path in Path(folder).iterdir()]
        [('a.txt', 'whole')]
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")  # processes elsewhere have equal ids
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > ABANDONED:
                other.unlink()
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    flush_folder(path.parent)


def finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Figures by name, with None for a figure that is not finite, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Replace a file by a value as JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def printable(text: str) -> str:
    r"""The text in one line: control characters, and characters that cannot be encoded, as escapes.

    Examples:
        >>> print(printable("a\x1b[2Jb\n±"))
        a\x1b[2Jb\n±
    """
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
