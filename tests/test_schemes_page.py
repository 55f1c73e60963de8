from pathlib import Path

import pytest

import isopos
from isopos.catalog import CATALOG
from tools import schemes_page

ROOT = Path(isopos.__file__).parent.parent
COMMITTED = ROOT / "docs" / "schemes.md"

pytestmark = pytest.mark.skipif(not COMMITTED.exists(), reason="docs/ is part of the repository, not of the package")


@pytest.fixture(scope="module")
def page():
    return schemes_page.page()


def test_the_committed_page_is_what_the_generator_prints(page):
    expected, found = page.splitlines(), COMMITTED.read_text(encoding="utf-8").splitlines()
    assert found == expected, f"regenerate it: {schemes_page.COMMAND}"


def test_every_table_has_a_row_for_each_scheme_and_few_columns(page):
    tables = [part.splitlines() for part in page.split("\n\n") if part.lstrip().startswith("| name |")]
    assert len(tables) == 6
    for table in tables:
        rows = [line for line in table if line.startswith("|")]
        assert [row.split("`")[1] for row in rows[2:]] == list(CATALOG)
        columns = {row.replace("\\|", "").count("|") - 1 for row in rows}
        assert len(columns) == 1
        assert columns.pop() <= 8


def test_what_is_refused_has_a_note(page):
    row = next(line for line in page.splitlines() if line.startswith("| `t5` | no [") and "growing cache" in line)
    mark = row.split("[")[1].split("]")[0]
    assert f"\n[{mark}] attention: expected softmax" in page
    assert "| `t5` |" in row


def test_performance_is_the_readme_s(page):
    bits = schemes_page._performance()
    assert "rope" in bits
    assert f"| `rope` | {bits['rope']} |" in page
    assert "| `t5` | not measured here |" in page
