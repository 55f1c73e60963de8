"""What isopos says of the versions it runs on, and whose warnings stop its tests."""

import re
import warnings
from pathlib import Path

import pytest

from tools import versions

ROOT = Path(versions.__file__).parents[1]


def warn(module):
    warnings.warn_explicit("old", DeprecationWarning, f"{module}.py", 1, module)


def test_a_warning_of_our_own_is_an_error():
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
    python, needed = versions.floors()
    (lowest,) = (row for row in rows if row[2] == "lowest")
    assert lowest[0].startswith(f"{python}.")
    assert lowest[1].removesuffix(".0") == needed["torch"]
    assert all(int(passed) > 9000 and failed == "0" for *_, passed, failed, _ in rows)
    assert f"Python {python} or newer and PyTorch {needed['torch']} or newer" in page
