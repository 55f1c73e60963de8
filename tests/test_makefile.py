"""Test interrupted installations by make, with a stub interpreter."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").exists() or shutil.which("make") is None, reason="the Makefile is part of the repository only"
)
INTERPRETER = """#!/bin/sh
here=.venv/lib/python3/site-packages
case "$*" in
    "-m venv"*) mkdir -p .venv/bin $here && cp "$0" .venv/bin/python && echo made >> made ;;
    *--version) ;;
    *writes*) sleep 0.1 && touch $here/half && exit 1 ;;
    *fails*) exit 1 ;;
    "-m pip"*) touch $here/whole ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    interpreter = tmp_path / "python"
    interpreter.write_text(INTERPRETER, encoding="utf-8")
    interpreter.chmod(0o755)

    def run(pip="installs"):
        variables = (f"PYTHON={interpreter}", f"TORCH_INDEX={pip}")
        done = subprocess.run(["make", *variables, ".venv/.installed-run"], cwd=tmp_path, capture_output=True, check=False)
        site = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
        return done.returncode, len((tmp_path / "made").read_text().split()), {file.name for file in site.iterdir()}

    return run


def test_what_is_installed_stays(make):
    assert make() == (0, 1, {"whole"})
    assert make("fails") == (0, 1, {"whole"})  # there is nothing to do


def test_half_an_installation_is_not_built_upon(make):
    assert make("writes") == (2, 1, {"half"})
    assert make() == (0, 2, {"whole"})


def test_one_that_wrote_nothing_costs_nothing(make, tmp_path):
    make()
    os.utime(tmp_path / ".venv" / ".installed-run", (0, 0))
    assert make("fails") == (2, 1, {"whole"})
    assert make() == (0, 1, {"whole"})


def test_a_gpu_is_checked_first_and_by_no_test_twice():
    done = subprocess.run(["make", "-n", "test-gpu"], cwd=ROOT, capture_output=True, text=True, check=True)
    check, tests = [line for line in done.stdout.splitlines() if "gpu-check --out" in line or "pytest" in line]
    assert "python -m isopos gpu-check --out build/gpu-check --minutes 2" in check
    files = [word for word in tests.split() if word.startswith("tests/")]
    assert files[0] == "tests/test_triton_step.py"
    assert len(files) == len(set(files)) == 5
    assert all((ROOT / file).exists() for file in files)
    assert not [file for file in files if "compile" in file]
