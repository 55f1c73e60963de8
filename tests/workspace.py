"""A working folder with runs, command lines in a copy of it, and checks of their results."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from random_calls import Wrong
from strategies import DONE, READERS, SMALL, VALUES, Damage

from isopos import cli

WEIGHTS = (".pt", ".safetensors")
UNCLEAR = re.compile(r"\[Errno|Error: |object (has no|is not)|NoneType|tensor\(|unexpected keyword")
OWN = '''"""A user's module."""
import sys
from isopos.encodings import Rotary, rope_frequencies
nothing, number = None, 3

def encoding():
    return Rotary(rope_frequencies(4)[None, None])

def fails():
    raise RuntimeError("as it pleases")

def exits():
    sys.exit(0)
'''


def is_unclear(text: str) -> bool:
    """Whether a message comes from Python or PyTorch. Errors of a user's module may name their class."""
    return bool(UNCLEAR.search(re.sub(r"cannot import [^:]+: \w+: ", "", text)))


class Ended(NamedTuple):
    """How a command ended: its exit status, and what it wrote."""

    status: object
    out: str
    err: str


def command(words: Sequence[str]) -> Ended:
    """Run a command line in this process and folder. Exceptions other than SystemExit propagate."""
    written = io.BytesIO(), io.BytesIO()
    streams = [io.TextIOWrapper(part, "utf-8", write_through=True) for part in written]
    status: object = "none"
    before, sys.argv = sys.argv, ["isopos", *words]
    sys.modules.pop("own", None)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            cli.main()
    except SystemExit as stop:
        status = stop.code
    finally:
        sys.argv = before
    return Ended(status, *(part.getvalue().decode() for part in written))


def make(folder: Path) -> None:
    """Fill a folder with a finished run, an unfinished run, a comparison, and invalid data files."""
    random = Random(0)
    (folder / "text.txt").write_text("\n".join(" ".join(random.choices(DONE.split(), k=9)) for _ in range(300)))
    with contextlib.chdir(folder):
        for words in (f"{DONE} --name done", f"compare --schemes none,rope --steps 1 --name pair {SMALL}", "eval runs/done"):
            ended = command(words.split())
            assert not ended.status, ended
    runs = folder / "runs"
    shutil.copytree(runs / "done", runs / "half")
    for name in ("result.json", "model.safetensors", "eval.json"):
        (runs / "half" / name).unlink(missing_ok=True)
    shutil.rmtree(max((runs / "half" / "checkpoints").iterdir()))
    (folder / "empty.txt").touch()
    (folder / "binary.bin").write_bytes(random.randbytes(5000))
    (folder / "long.txt").write_text("x" * 5000)
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    for name in ("bad.zip", "bad.tar.gz", "bad.toml"):
        (folder / name).write_bytes(b"PK\x03\x04 = [no such thing")
    (folder / "own.py").write_text(OWN)


@contextlib.contextmanager
def copied(made: Path) -> Iterator[Path]:
    """Context: a temporary copy of a folder as the working folder."""
    with tempfile.TemporaryDirectory(prefix="isopos-case-") as folder:
        here = Path(folder) / "here"
        shutil.copytree(made, here, symlinks=True)
        with contextlib.chdir(here):
            yield here


def run_command(words: Sequence[str], made: Path) -> str:
    """Outcome of a command line in a copy of a folder: "answer" or "error". Raises `Wrong` for any other end."""
    with copied(made) as here:
        before = set(here.glob("runs/*"))
        ended = command(words)
        left = sorted(path.name for path in set(here.glob("runs/*")) - before)
        above = sorted(path.name for path in here.parent.iterdir() if path != here)
    if above:
        raise Wrong(f"wrote outside the working folder: {above}")
    if "Traceback (most recent call last)" in ended.out + ended.err:
        raise Wrong(f"a traceback: {ended.err[-200:]}")
    if ended.err.startswith("isopos: ") and re.search(r"[\x00-\x08\x0b-\x1f\u202e]", ended.err):
        raise Wrong(f"control characters in what it writes: {ended.err[-200:]!r}")
    if ended.status in (0, None) or (ended.status == 1 and words[:1] == ["check"]):
        return "answer"
    if ended.status != 2 or not ended.err.strip() + ended.out.strip():
        raise Wrong(f"exit status {ended.status}, {ended.err[-200:]!r}")
    if left:
        raise Wrong(f"exit status 2, but runs/{left[0]} is left: {ended.err[-200:]!r}")
    if ended.err.startswith("isopos: ") and len(ended.err.strip().splitlines()) > 3:
        raise Wrong(f"more than one message: {ended.err[:300]!r}")
    if is_unclear(ended.err):
        raise Wrong(f"not a clear message: {ended.err[-300:]!r}")
    return "error"


def run_damaged(case: Damage, made: Path, whole: Ended) -> str:
    """Outcome of a command that reads a damaged file: "answer" or "error". Raises `Wrong` for any other end.

    `whole` is the result in the undamaged folder. An error has exit status 2 and one message that names the file or its
    folder. With damaged weights an answer must equal `whole`. `isopos runs` always lists the other runs.
    """
    with copied(made) as here:
        file = here / "runs" / case.file
        damage(file, case.kind, case.at)
        ended = command(READERS[case.command][0].split())
    if "Traceback (most recent call last)" in ended.out + ended.err:
        raise Wrong(f"a traceback: {ended.err[-200:]}")
    if re.search(r"[\x00-\x08\x0b-\x1f]", ended.out + ended.err):
        raise Wrong("control characters of the file in what it writes")
    listed = ended.out.count("seed0") + ended.out.count("finished")
    if case.command == "runs" and (ended.status not in (0, None) or listed < 3):
        raise Wrong(f"not all other runs are listed: exit status {ended.status}, {ended.err[-200:]!r}")
    if ended.status in (0, None):
        changed = file.suffix in WEIGHTS and case.kind in ("flip", "zeros", "truncate", "append", "clear")
        if changed and case.command.startswith("eval") and figures(ended) != figures(whole):
            raise Wrong(f"other figures without a word: {figures(ended)}, not {figures(whole)}")
        return "answer"
    if ended.status != 2 or not ended.err.startswith("isopos: ") or len(ended.err.strip().splitlines()) > 2:
        raise Wrong(f"exit status {ended.status}, not one message: {ended.err[-300:]!r}")
    if file.name == "complete.json" and case.kind == "loop":
        return "error"  # as without it: what has no mark is no checkpoint
    words = ended.err.replace("\n", " ")
    if not any(part in words for part in {file.name, file.parent.name, "/".join(file.parts[-3:-1])}):
        raise Wrong(f"the message does not name {file.name}: {ended.err[-300:]!r}")
    if is_unclear(words):
        raise Wrong(f"not a clear message: {ended.err[-300:]!r}")
    return "error"


def figures(ended: Ended) -> list[str]:
    """The numbers in what a command writes."""
    return re.findall(r"\d+\.\d+", ended.out)


def damage(file: Path, kind: str, at: float) -> None:
    """Damage a file."""
    whole = file.read_bytes()
    n = min(int(at * len(whole)), max(0, len(whole) - 1))
    changes: dict[str, Callable[[], bytes]] = {
        "truncate": lambda: whole[:n],
        "clear": lambda: b"",
        "flip": lambda: whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :] if whole else b"x",
        "zeros": lambda: whole[:n] + bytes(min(64, len(whole) - n)) + whole[n + 64 :],
        "append": lambda: whole + b"\x00{]",
        "utf16": lambda: whole.decode("latin1").encode("utf-16"),
        "latin1": lambda: whole[:n] + b"\xe9\xff" + whole[n:],
        "swap": lambda: (file.parents[1] / "done/data.json").read_bytes() if file.parents[1].name == "runs" else whole[::-1],
        "deep": lambda: b"[" * 100_000 + b"]" * 100_000,
    }
    if kind in changes:
        file.write_bytes(changes[kind]())
    elif kind.startswith(("all-", "field-")):
        _damage_json(file, kind, at)
    else:
        file.unlink()
        others = {"folder": file.mkdir, "fifo": lambda: os.mkfifo(file), "missing": lambda: None}
        others |= {"loop": lambda: file.symlink_to(file.name), "endless": lambda: file.symlink_to("/dev/zero")}
        others[kind]()


def _damage_json(file: Path, kind: str, at: float) -> None:
    """Replace all of a JSON file, or one field, by another value; in JSON lines, in one line."""
    value = VALUES.get(kind.partition("-")[2])
    try:
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        n = min(int(at * len(lines)), len(lines) - 1)
        found = json.loads(lines[n])
    except (ValueError, IndexError):
        file.write_text(json.dumps(value), encoding="utf-8")
        return
    if kind.startswith("all-") or not isinstance(found, dict) or not found:
        found = value
    else:
        owner, name = found, list(found)[int(at * 7919) % len(found)]
        if isinstance(found[name], dict) and found[name] and at > 0.5:
            owner = found[name]
            name = list(owner)[int(at * 104729) % len(owner)]
        if kind == "field-gone":
            del owner[name]
        elif kind == "field-new":
            owner["surprise"] = 1
        else:
            owner[name] = value
    lines[n] = json.dumps(found)
    file.write_text("\n".join(lines), encoding="utf-8")
