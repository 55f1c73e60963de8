"""Test that committed files equal the generated ones, and the content of the page."""

import re

import pytest

from benchmarks import peers_page
from isopos.catalog import CATALOG
from isopos.schemes.registry import build, options_of
from isopos.spec import split_spec
from tools import generate, schemes_page
from tools.authors import AUTHORS

pytestmark = pytest.mark.skipif(not (generate.ROOT / "docs").exists(), reason="docs/ is part of the repository only")


@pytest.fixture(scope="module")
def generated():
    return {path.relative_to(generate.ROOT).as_posix(): (path, text) for path, text in generate.generated()}


def test_what_is_committed_is_what_is_generated(generated, subtests):
    for name, (path, text) in generated.items():
        with subtests.test(name):
            assert path.read_text(encoding="utf-8").splitlines() == text.splitlines(), f"repair it: {generate.COMMAND}"


def test_every_table_has_a_row_for_each_scheme_and_few_columns(generated):
    page = generated["docs/schemes.md"][1]
    tables = [part.splitlines() for part in page.split("\n\n") if part.lstrip().startswith("| name |")]
    assert len(tables) == 7
    for table in tables:
        rows = [line for line in table if line.startswith("|")]
        assert [row.split("`")[1] for row in rows[2:]] == list(CATALOG)
        columns = {row.replace("\\|", "").count("|") - 1 for row in rows}
        assert len(columns) == 1
        assert columns.pop() <= 8


def test_what_is_refused_has_a_note_and_performance_is_the_laboratory_s(generated):
    page, bits = generated["docs/schemes.md"][1], schemes_page._performance()
    row = next(line for line in page.splitlines() if line.startswith("| `t5` | no [") and "growing cache" in line)
    mark = row.split("[")[1].split("]")[0]
    assert f"\n[{mark}] attention: expected softmax" in page
    assert f"| `rope` | {bits['rope']} |" in page
    assert "| `t5` | not measured |" in page


def test_every_scheme_says_what_differs_from_its_authors_code(generated):
    assert list(AUTHORS) == list(CATALOG)
    page = generated["docs/schemes.md"][1]
    assert "| name | code | differs from the authors' code in |" in page
    for name, code in AUTHORS.items():
        assert f"| `{name}` | {code.where} | {code.summary} |" in page
        assert "/" in code.where or not code.differs, f"{name}: expected a repository whose code differs"


def test_options_that_give_the_authors_behaviour_exist():
    named = {name: re.findall(r"`([^`]+)`", code.differs) for name, code in AUTHORS.items()}
    assert sum(map(len, named.values())) > 3
    for name, options in named.items():
        for text in options:
            if "=" in text:
                build(name, 16, 2, split_spec(f"{name}:{text}")[1])
            else:
                assert text in options_of(name)


def test_measured_differences_are_listed_with_the_scheme():
    for one in peers_page.COMPARISONS:
        assert not one.differs or AUTHORS[one.scheme].differs
