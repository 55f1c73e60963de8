"""Folders that are prepared once: keyed by what is in them, complete or absent, whoever else prepares them meanwhile."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from isopos.lab.runs.files import Damaged, read_json, write_text

__all__ = ["default_root", "prepared", "remembered"]


def default_root() -> Path:
    """$ISOPOS_CACHE, else isopos in $XDG_CACHE_HOME, else ~/.cache/isopos."""
    own = os.environ.get("ISOPOS_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isopos"


def prepared(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder `root/key`; if it is absent, `build` fills a private folder that then takes its name in one step.

    One process builds and others wait for it. What a killed process leaves is never taken for complete, and is removed by
    the next that builds.

    Raises:
        ValueError: Where the cache cannot be written.
    """
    target = root / key
    if target.is_dir():
        return target
    with _writing(root), FileLock(root / f"{key}.lock"):
        if target.is_dir():
            return target
        for left in root.glob(f".{key}-*"):
            shutil.rmtree(left, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
        try:
            build(part)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def remembered(root: Path, key: str, stamp: Any, kind: Any, make: Callable[[], Any]) -> Any:
    """The plain value that `make` returned when the stamp was the same; otherwise made, and kept as `root/key.json`.

    A file that is damaged, or whose value is not of the kind, as in `mismatch`, is as none.
    """
    path = root / f"{key}.json"
    with contextlib.suppress(OSError, Damaged):
        kept = read_json(path, {"stamp": Any, "value": kind}, "")
        if kept["stamp"] == stamp:
            return kept["value"]
    value = make()
    with _writing(root):
        write_text(path, json.dumps({"stamp": stamp, "value": value}))
    return value


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(
            f"cache: cannot write {error.filename or root}: {error.strerror}; ISOPOS_CACHE names another folder"
        ) from None
