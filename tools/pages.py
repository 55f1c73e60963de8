"""Reading tables from pages of the documentation."""

import itertools
import re
from pathlib import Path

__all__ = ["ROOT", "Rows", "cells", "tables"]

ROOT = Path(__file__).parents[1]
Rows = list[list[str]]


def cells(line: str) -> list[str]:
    r"""The cells in a line of a table.

    Examples:
        >>> cells("| a | b \| c |")
        ['a', 'b | c']
    """
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables(page: Path) -> list[Rows]:
    """The tables of a page: rows of cells, beginning with the titles, without the rule below them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    parts = (list(part) for is_table, part in itertools.groupby(lines, lambda line: line.startswith("|")) if is_table)
    return [[cells(line) for n, line in enumerate(part) if n != 1] for part in parts]
