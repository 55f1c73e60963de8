"""Test the output of commands: streams, encodings, and behaviour if the output cannot be written."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from isopos import cli
from isopos.lab.reports import grids, plots
from isopos.lab.reports.progress import Bars
from isopos.lab.runs.files import printable

TINY = ["--steps=2", "--length=32", "--batch=2", "--layers=1", "--model-dim=16", "--heads=2", "--validation-tokens=512"]
HOSTILE = "a\x1b[2J[red]<b>$x$|\u202e\n\udcff"
SHOWN = r"a\x1b[2J[red]<b>$x$|\u202e\n\udcff"


def _shell(line, folder, **environment):
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"} | environment
    line = line.replace("isopos", f'"{sys.executable}" -m isopos')
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run(isopos, tmp_path):
    assert isopos("train", "quickstart", *TINY, "--name=one")[0] == 0
    return tmp_path / "runs" / "one"


def test_figures_are_kept_where_the_reader_has_gone(run, tmp_path):
    code, _, err = _shell("set -o pipefail; isopos eval runs/one | true", tmp_path)
    assert (code, err) == (141, "")
    assert json.loads((run / "eval.json").read_text())[0]["figures"]["1"]["bits_per_byte"] > 0


@pytest.mark.slow
def test_training_goes_on_where_the_reader_has_gone(tmp_path):
    line = f"set -o pipefail; isopos train quickstart {' '.join(TINY)} --name=one | true"
    assert _shell(line, tmp_path)[::2] == (141, "")
    assert (tmp_path / "runs" / "one" / "result.json").exists()


@pytest.mark.parametrize("command", ["list", "--help", "runs ."])
def test_other_commands_end_where_the_reader_has_gone(tmp_path, command):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "recipe.json").write_text("{}")
    assert _shell(f"set -o pipefail; isopos {command} | true", tmp_path)[::2] == (141, "")


@pytest.mark.parametrize("goes_on", [False, True])
def test_only_commands_that_leave_files_go_on(goes_on):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        out = cli._Output(stream, goes_on=goes_on)
        with contextlib.nullcontext() if goes_on else pytest.raises(SystemExit, match="141"):
            print("lost", file=out, flush=True)
            out.flush()
            print("too", file=out, flush=True)
        assert out.lost == 141
        assert os.fstat(write).st_rdev == os.stat(os.devnull).st_rdev


def test_a_full_disk_is_reported(tmp_path):
    code, _, err = _shell("isopos list > /dev/full", tmp_path)
    assert (code, err) == (2, "isopos: standard output: no space left on device; make room and run it again\n")


@pytest.mark.slow
def test_a_closed_output_is_no_file_that_is_opened_later(run, tmp_path):
    assert _shell("isopos eval runs/one >&- 2>&-", tmp_path) == (0, "", "")
    assert json.loads((run / "eval.json").read_text())[0]["step"] == 2
    assert _shell("isopos eval runs/nowhere >&- 2>&-", tmp_path)[0] == 2


def test_what_an_encoding_lacks_is_a_question_mark():
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    out = cli._Output(stream, goes_on=True)
    Console(file=out).print("±", "\udcff")
    stream.flush()
    assert stream.buffer.getvalue() == b"? ?\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.EACCES, "Permission denied", "a/b"),
            "a/b: permission denied; choose a folder that can be read and written",
        ),
        (OSError(errno.EIO, "Input/output error"), "input/output error"),
        (OSError(errno.EXDEV, "Invalid link", "a", None, "b"), "a and b: invalid link"),
        (OSError("a sentence"), "a sentence"),
        (MemoryError(), "expected sizes that fit into memory; choose smaller ones: MemoryError"),
        (OverflowError("too large"), "expected numbers that a computer can count with, got one beyond: too large"),
        (RuntimeError("can't allocate memory: 9 bytes"), "expected sizes that fit into memory; choose smaller ones: can't"),
        (ValueError(HOSTILE), SHOWN),
    ],
)
def test_an_error_is_one_line(isopos, monkeypatch, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr("isopos.lab.commands.list.run", fail)
    code, out, err = isopos("list")
    assert (code, out) == (2, "")
    assert err.startswith(f"isopos: {said}")
    assert len(err.splitlines()) == 1


def test_a_fault_of_ours_is_none_of_them(isopos, monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("isopos.lab.commands.list.run", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        isopos("list")


def _text(*renderables, width=200):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    for one in renderables:
        one(console) if callable(one) else console.print(one)
    return console.file.getvalue()


def test_names_are_data_wherever_they_are_printed():
    table = grids.console_table(("name",), [(HOSTILE,)], title=HOSTILE)
    said = _text(table, lambda console: grids.say(console, HOSTILE), lambda console: grids.warn(console, HOSTILE))
    assert said.count(SHOWN) == 4
    assert "\x1b" not in said.replace("\x1b[1m", "").replace("\x1b[3m", "").replace("\x1b[0m", "")
    assert grids.markdown(("name",), [(HOSTILE,)]).splitlines()[-1] == f"| {SHOWN.replace('|', chr(92) + '|')} |"
    assert printable("rope:decay=retnet ± é") == "rope:decay=retnet ± é"
    assert plots.literal("$a$\x1b") == r"\$a\$\x1b"


def test_progress_shows_names_as_they_are():
    console = Console(width=100, file=io.StringIO())
    with Bars(console) as bars:
        bars.add(HOSTILE, 1)(1)
    assert console.file.getvalue().splitlines()[0] == f"{SHOWN}: 0/1"


def test_damaged_names_do_not_reach_the_terminal(isopos, tmp_path):
    run = tmp_path / "runs" / "a[red]\x1b[2J"
    run.mkdir(parents=True)
    (run / "recipe.json").write_text(json.dumps({"scheme": "\x1b]0;title\x07[bold]"}))
    code, out, err = isopos("runs")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "a[red]" in out
