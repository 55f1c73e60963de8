"""Damaged run folders, and the commands that read them: a target of `tools.fuzz`.

A case is ``command=... file=... damage=... at=...``, in a copy of a working folder with a finished run, one that stopped,
and a comparison. Right is an answer, the one of the undamaged folder where bytes of weights are damaged; or exit status 2
with one message that names the file, or its folder. `isopos runs` always lists the other runs.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tools import fuzz_commands
from tools.fuzz_commands import DONE, Ended, command, workspace
from tools.fuzz_functions import Wrong

__all__ = ["draw", "prepare", "run", "smaller"]

COMMANDS = {
    "runs": "runs",
    "eval": "eval runs/done --limit 100",
    "eval-half": "eval runs/half --limit 100",
    "resume": f"{DONE} --resume --name half",
    "resume-done": f"{DONE} --resume --name done",
    "report": "report runs/pair",
    "generate": "generate runs/done --tokens 5",
    "eval-pair": "eval runs/pair/rope-seed0 --limit 100",
}
READS = {"eval": "done", "eval-half": "half", "resume": "half", "resume-done": "done", "report": "pair", "generate": "done"}
READS["eval-pair"] = "pair/rope-seed0"
VALUES: dict[str, Any] = {
    **{"null": None, "text": "plane", "list": [1, [2]], "map": {"a": {}}, "true": True, "negative": -1, "huge": 10**30},
    **{
        "zero": 0,
        "half": 0.5,
        "nan": float("nan"),
        "infinity": float("inf"),
        "empty": "",
        "markup": "[red]\x1b[31m[/]",
        "million": 10**9,
    },
}
BYTES = "truncate clear missing folder flip zeros append utf16 latin1 loop fifo endless swap deep"
DAMAGES = (
    *BYTES.split(),
    *(f"all-{name}" for name in VALUES),
    *(f"field-{name}" for name in VALUES),
    "field-gone",
    "field-new",
)
WEIGHTS = (".pt", ".safetensors")
_FILES: list[str] = []
_ANSWERS: dict[str, Ended] = {}


def prepare() -> None:
    """Make the working folder, and note its files."""
    fuzz_commands.prepare()
    if not _FILES:
        assert fuzz_commands._FOLDER is not None
        runs = fuzz_commands._FOLDER / "runs"
        if not (runs / "half").exists():
            shutil.copytree(runs / "done", runs / "half")
            for name in ("result.json", "model.safetensors", "eval.json"):
                (runs / "half" / name).unlink(missing_ok=True)
            shutil.rmtree(max((runs / "half" / "checkpoints").iterdir()))
        _FILES.extend(sorted(str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()))


def draw(random: Random) -> list[str]:
    """The words of a case: a command that reads the file as often as not."""
    name = random.choice(list(COMMANDS))
    files = [file for file in _FILES if file.startswith(f"{READS.get(name, '')}")] if random.random() < 0.9 else _FILES
    damages = [damage for damage in DAMAGES if "-" not in damage] if random.random() < 0.5 else DAMAGES
    words = [f"command={name}", f"file={random.choice(files)}", f"damage={random.choice(damages)}"]
    return [*words, f"at={random.random():.3f}"]


def smaller(word: str) -> Iterator[str]:
    """A simpler place of the damage."""
    if word.startswith("at="):
        yield from (f"at={place}" for place in ("0", "0.5") if word != f"at={place}")


def run(words: Sequence[str]) -> str:
    """What comes of a case: "answer" or "error"."""
    case = dict(word.split("=", 1) for word in words)
    if case.keys() != {"command", "file", "damage", "at"}:
        return "error"  # not a case
    name = case["command"]
    if name not in _ANSWERS:
        with workspace():
            _ANSWERS[name] = command(shlex.split(COMMANDS[name]))
    with workspace() as place:
        file = place / "runs" / case["file"]
        damage(file, case["damage"], float(case["at"]))
        ended = command(shlex.split(COMMANDS[name]))
    return judge(case, file, ended, _ANSWERS[name])


def judge(case: dict[str, str], file: Path, ended: Ended, whole: Ended) -> str:
    """What comes of a command in a damaged folder, and what it gave in the whole one."""
    name = case["command"]
    if "Traceback (most recent call last)" in ended.out + ended.err:
        raise Wrong(f"a traceback: {ended.err[-200:]}")
    if re.search(r"[\x00-\x08\x0b-\x1f]", ended.out + ended.err):
        raise Wrong("control characters of the file in what it writes")
    if name == "runs" and (ended.status not in (0, None) or ended.out.count("seed0") + ended.out.count("finished") < 3):
        raise Wrong(f"not all other runs are listed: exit status {ended.status}, {ended.err[-200:]!r}")
    if ended.status in (0, None):
        changed = file.suffix in WEIGHTS and case["damage"] in ("flip", "zeros", "truncate", "append", "clear")
        if changed and name.startswith("eval") and figures(ended) != figures(whole):
            raise Wrong(f"other figures without a word: {figures(ended)}, not {figures(whole)}")
        return "answer"
    if ended.status != 2 or not ended.err.startswith("isopos: ") or len(ended.err.strip().splitlines()) > 2:
        raise Wrong(f"exit status {ended.status}, not one message: {ended.err[-300:]!r}")
    if file.name == "complete.json" and case["damage"] == "loop":
        return "error"  # as without it: what has no mark is no checkpoint
    words = ended.err.replace("\n", " ")
    if not any(part in words for part in {file.name, file.parent.name, "/".join(file.parts[-3:-1])}):
        raise Wrong(f"the message does not name {file.name}: {ended.err[-300:]!r}")
    if re.search(r"\[Errno|Error: |object (has no|is not)|NoneType|unexpected keyword", words):
        raise Wrong(f"not a clear message: {ended.err[-300:]!r}")
    return "error"


def figures(ended: Ended) -> list[str]:
    """The numbers in what a command writes."""
    return re.findall(r"\d+\.\d+", ended.out)


def damage(file: Path, kind: str, at: float) -> None:
    """Damage a file."""
    whole = file.read_bytes()
    place = min(int(at * len(whole)), max(0, len(whole) - 1))
    changes: dict[str, Callable[[], bytes]] = {
        "truncate": lambda: whole[:place],
        "clear": lambda: b"",
        "flip": lambda: whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] if whole else b"x",
        "zeros": lambda: whole[:place] + bytes(min(64, len(whole) - place)) + whole[place + 64 :],
        "append": lambda: whole + b"\x00{]",
        "utf16": lambda: whole.decode("latin1").encode("utf-16"),
        "latin1": lambda: whole[:place] + b"\xe9\xff" + whole[place:],
        "swap": lambda: (
            (file.parents[1] / "done" / "data.json").read_bytes() if file.parents[1].name == "runs" else whole[::-1]
        ),
        "deep": lambda: b"[" * 100_000 + b"]" * 100_000,
    }
    if kind in changes:
        file.write_bytes(changes[kind]())
    elif kind.startswith(("all-", "field-")):
        _damage_json(file, kind, at)
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "loop":
            file.symlink_to(file.name)
        elif kind == "fifo":
            os.mkfifo(file)
        elif kind == "endless":
            file.symlink_to("/dev/zero")


def _damage_json(file: Path, kind: str, at: float) -> None:
    """Another value in the place of all, or of one field; files of lines in one of them."""
    value = VALUES.get(kind.partition("-")[2])
    try:
        lines = (
            file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text(encoding="utf-8")]
        )
        n = min(int(at * len(lines)), len(lines) - 1)
        found = json.loads(lines[n])
    except (ValueError, IndexError):
        file.write_text(json.dumps(value), encoding="utf-8")
        return
    if kind.startswith("all-") or not isinstance(found, dict) or not found:
        found = value
    else:
        place, name = found, list(found)[int(at * 7919) % len(found)]
        if isinstance(found[name], dict) and found[name] and at > 0.5:
            place = found[name]
            name = list(place)[int(at * 104729) % len(place)]
        if kind == "field-gone":
            del place[name]
        elif kind == "field-new":
            place["surprise"] = 1
        else:
            place[name] = value
    lines[n] = json.dumps(found)
    file.write_text("\n".join(lines), encoding="utf-8")
