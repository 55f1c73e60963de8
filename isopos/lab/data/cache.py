"""Folders and values that are computed once and kept, by key; safe with several processes."""

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


def default_root() -> Path:
    """$ISOPOS_CACHE, else isopos in $XDG_CACHE_HOME, else ~/.cache/isopos."""
    folder = os.environ.get("ISOPOS_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isopos"


def cached_folder(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder `root/key`; if it is absent, `build` fills a temporary folder, which is then renamed to it.

    One process builds and others wait for it. The temporary folder of a killed process is never used, and is removed by the
    next process that builds.

    Raises:
        ValueError: If the cache cannot be written.
    """
    target = root / key
    if target.is_dir():
        return target
    with _writing(root), FileLock(root / f"{key}.lock"):
        if target.is_dir():
            return target
        for remains in root.glob(f".{key}-*"):
            shutil.rmtree(remains, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
        try:
            build(part)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def cached_value(root: Path, key: str, stamp: Any, kind: Any, make: Callable[[], Any]) -> Any:
    """The plain value in `root/key.json` if its stamp is the same; otherwise `make` computes it, and it is written there.

    A damaged file, or a value that is not of the kind (see `mismatch`), is ignored.
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
        name = Path(error.filename or root)
        if root not in (name, *name.parents) and name not in root.parents:  # a source's
            raise ValueError(f"data: cannot read {error.filename}: {error.strerror}") from None
        raise ValueError(
            f"cache: cannot write {error.filename or root}: {error.strerror}; ISOPOS_CACHE names another folder"
        ) from None
