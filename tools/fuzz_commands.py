"""Random command lines, run in this process in a copy of a small working folder: a target of `tools.fuzz`.

A case is the words of a command line. Right is exit status 0, or 1 of a broken law, and else 2 with one clear message and no
run left behind that was not there; a traceback never is.
"""

import atexit
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from tools.fuzz_functions import Wrong

__all__ = ["Ended", "command", "draw", "prepare", "run", "smaller", "workspace"]

SMALL = "--data text.txt --length 16 --layers 1 --model-dim 8 --heads 2 --validation-tokens 200 --batch 2 --device cpu"
DONE = f"train quickstart --scale tiny --steps 2 --save-every 1 {SMALL}"
COMMANDS: tuple[str, ...] = (
    f"train quickstart --scale tiny --steps 2 --name new --scheme rope --seed 1 --save-every 1 {SMALL}",
    f"train lrpe-alm --scale tiny --steps 1 --name new --scheme none --cutoffs 100 --vocabulary 200 {SMALL}",
    f"train permuteformer-lm --scale tiny --steps 1 --dropout 0.1 --accumulate 2 --clip 0.5 {SMALL}",
    f"train quickstart --scale tiny --steps 1 --precision bfloat16 --optimizer adam --schedule polynomial --power 2 {SMALL}",
    f"train quickstart --scale tiny --steps 1 --warmup 1 --beta1 0.8 --beta2 0.9 --epsilon 1e-6 --weight-decay 0.1 {SMALL}",
    f"train quickstart --scale tiny --steps 2 --validate-every 1 --patience 1 --tokenizer words --logger csv {SMALL}",
    "train --resume --name done --scale tiny --device cpu",
    "train quickstart --resume --name done --steps 3 --scale tiny",
    f"compare --schemes none,rope --seeds 1 --steps 1 --name new {SMALL}",
    f"compare --schemes rope:decay=retnet,lrpe-unitary --attention softmax --steps 1 --name new {SMALL}",
    "table lengths --scale tiny --seeds 1 --rows rope --data text.txt --name new --device cpu --dry-run",
    "list",
    "check rope --head-dim 8 --heads 2 --dtype float32",
    "check own:encoding",
    "show rope --out new.png --head-dim 8 --heads 2 --reach 5",
    "eval runs/done --split validation --length 1 2 --scored 0.5 --limit 100",
    "runs runs",
    "generate runs/done --prompt abc --tokens 5 --temperature 0.5 --top-p 0.9 --seed 1",
)
NUMBERS = """
    -1 0 1 2 3 5 17 -2147483649 2147483648 9223372036854775807 9223372036854775808 18446744073709551616 1000000000
    99999999999999999999999999 0.5 -0.5 1e308 1e400 -1e400 nan inf -inf 1e-400 1_0 ٣ 0x10 +1 -0 1e3 True None 1,2
"""
SCHEMES = """
    rope: rope:decay rope:decay= rope:bogus=1 rope:base=nan rope:base=0 rope:base=-1 rope:rotary_dim=0 rope,rope , rop Rope
    rope:rotary_dim=99 rope:rope learned:length=4 learned:length=-1 learned:length=1000000000000 ape-ring:period=0 t5
    shaw:reach=-1 ape-product:parts=tree2 ape-product:parts= ape-product:parts=ring0+sequence horn-clipped:reach=1000000000
    permuteformer:width=1000000 lrpe-unitary:basis=none spe-sine:sines=0 spe-conv:reach=-3 none:feature_map=favor list
    own:encoding own:fails own:nothing own:exits own:number missing:x own: :own own:encoding:x json:dumps
"""
PLACES = """
    text.txt empty.txt missing.txt . folder / /dev/null /proc/self/mem runs runs/done runs/done/model.safetensors loop
    binary.bin long.txt text.txt/x ../up .hidden ~ hf: hf:x hf:x:y:z bad.zip bad.tar.gz bad.toml new.gif new new.svg
"""
TEXTS = [
    "",
    " ",
    "é",
    "日本語",
    "\u202egnp",
    "\x1b[31mred",
    "[red]x[/]",
    "[/]",
    "%s%d",
    "{0}{x}",
    "a\nb",
    "\t",
    "\udcff",
    "-",
    "--",
]
TEXTS += ["-x", "--bogus", "a" * 300, "x/y", "..", "'", '"', "\\", "$(x)", "*", "?", "con", "a b", "é" * 200]
FLAGS = (
    "--help --name --seed --seeds --steps --length --overwrite --resume --scale --scheme --schemes --data --device --devices"
)
FLAGS += (
    " --nodes --dropout --batch --heads --layers --hidden-dim --recompute --no-recompute --workers --cutoffs --out --split"
)
ENDLESS = {"--steps", "--seeds", "--workers", "--devices", "--nodes"}  # what would honestly take for ever, or the machine
_FOLDER: Path | None = None


class Ended(NamedTuple):
    """How a command ended: its exit status, and what it wrote."""

    status: object
    out: str
    err: str


def draw(random: Random) -> list[str]:
    """The words of a command line: one that is right, with some changes."""
    words: list[str] = random.choice(COMMANDS).split()
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3))):
        place = random.randrange(1, len(words) + 1)
        change = random.random()
        if change < 0.6 and place < len(words):
            if words[place].startswith("--") and place + 1 < len(words):
                place += 1
            words[place] = _value(random, words[place - 1])
        elif change < 0.75 and place < len(words):
            del words[place]
        elif change < 0.9:
            flag = random.choice(FLAGS.split())
            words[place:place] = [flag, *([_value(random, flag)] if random.random() < 0.7 else [])]
        else:
            words[place:place] = [random.choice(words)]
    return words


def _value(random: Random, flag: str) -> str:
    kind = random.random()
    if flag in ENDLESS:
        return random.choice(["-1", "0", "1", "2", "x", "", "nan", "0.5", "-9999999999"])
    if flag in ("--scheme", "--schemes", "check", "show") and kind < 0.7:
        return random.choice(SCHEMES.split())
    if flag in ("--data", "--name", "--out", "eval", "generate", "runs", "table", "train") and kind < 0.7:
        return random.choice(PLACES.split() + TEXTS)
    pool = NUMBERS.split() if kind < 0.7 else TEXTS if kind < 0.85 else SCHEMES.split() + PLACES.split()
    return random.choice(pool)


def smaller(word: str) -> Iterator[str]:
    """Simpler words in the place of one: none, a command line's words say what they mean."""
    yield from ()


def prepare() -> None:
    """Make the working folder that every case has a copy of."""
    global _FOLDER
    if _FOLDER is not None:
        return
    _FOLDER = Path(tempfile.mkdtemp(prefix="isopos-fuzz-"))
    atexit.register(_remove, os.getpid())
    random, known = Random(0), COMMANDS[0].split()
    lines = (" ".join(random.choice(known) for _ in range(9)) for _ in range(300))
    (_FOLDER / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for words in (f"{DONE} --name done", f"compare --schemes none,rope --steps 1 --name pair {SMALL}", "eval runs/done"):
        line = [sys.executable, "-m", "isopos", *words.split()]
        subprocess.run(line, cwd=_FOLDER, env=environment, check=True, capture_output=True)
    (_FOLDER / "empty.txt").touch()
    (_FOLDER / "binary.bin").write_bytes(bytes(random.randrange(256) for _ in range(5000)))
    (_FOLDER / "long.txt").write_text("x" * 5000)
    (_FOLDER / "loop").symlink_to("loop")
    (_FOLDER / "folder").mkdir()
    for name in ("bad.zip", "bad.tar.gz", "bad.toml"):
        (_FOLDER / name).write_bytes(b"PK\x03\x04 = [no such thing")
    (_FOLDER / "own.py").write_text(OWN)


def _remove(process: int) -> None:
    """Remove the working folder with the process that made it, not with its children."""
    if _FOLDER is not None and os.getpid() == process:
        shutil.rmtree(_FOLDER, ignore_errors=True)


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


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A copy of the working folder, in which this process is."""
    prepare()
    assert _FOLDER is not None
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="isopos-case-") as folder:
        place = Path(folder) / "here"
        shutil.copytree(_FOLDER, place, symlinks=True)
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(before)


def command(words: Sequence[str]) -> Ended:
    """Run a command line in this process; what it raises but SystemExit goes on."""
    from isopos import cli

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


def run(words: Sequence[str]) -> str:
    """What comes of a command line: "answer" or "error"."""
    with workspace() as place:
        before = set(place.glob("runs/*"))
        ended = command(words)
        left = sorted(path.name for path in set(place.glob("runs/*")) - before)
        above = sorted(path.name for path in place.parent.iterdir() if path != place)
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
    if re.search(r"\[Errno|Error: |object (has no|is not)|NoneType|tensor\(", ended.err):
        raise Wrong(f"not a clear message: {ended.err[-300:]!r}")
    return "error"
