"""Test that docs/promises.md names a test for every promise, and that these tests exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "promises.md").read_text(encoding="utf-8")


def test_every_promise_names_tests_that_are_there():
    promises = [line for line in PAGE.splitlines() if line.startswith("| ") and line != "| promise | shown by |"]
    assert len(promises) > 30
    for line in promises:
        named = re.findall(r"(test_\w+\.py)::(test_\w+)", line.rsplit("|", 2)[1])
        assert named, line
        for file, name in named:
            tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
