"""Test the stated versions, and which warnings are errors in tests."""

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def warn(module):
    warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module)


def test_a_warning_of_isopos_is_an_error():
    with pytest.raises(DeprecationWarning):
        warn("isopos.maps")


def test_one_of_a_library_is_none():
    with warnings.catch_warnings(record=True) as seen:
        warn("torch.jit._script")
    assert [str(warning.message) for warning in seen] == ["old"]


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="docs/ is part of the repository only")
def test_the_lowest_versions_accepted_are_measured_ones():
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if re.match(r"\| \d", line)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    (torch,) = (line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    (lowest,) = (row for row in rows if row[2] == "lowest")
    assert lowest[0].startswith(f"{python}.")
    assert lowest[1].removesuffix(".0") == torch
    assert all(int(passed) > 4000 and failed == "0" for *_, passed, failed, _ in rows)
    assert f"Python {python} or newer and PyTorch {torch} or newer" in page


@pytest.mark.parametrize(("asked", "listed"), [("", ["=lowest", "=newest"]), ("3.12=2.13", ["3.12=2.13"])])
def test_pairs_of_versions_are_sessions(asked, listed):
    pytest.importorskip("nox")
    command = [sys.executable, "-m", "nox", "-l", "-f", str(ROOT / "noxfile.py")]
    done = subprocess.run(command, env=os.environ | {"VERSIONS": asked}, capture_output=True, text=True, check=True)
    found = re.findall(r"\* versions\((.*?)\)", done.stdout)
    assert len(found) == len(listed)
    assert all(one.endswith(end) for one, end in zip(found, listed, strict=True)), found
