"""Tables in markdown."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown"]

RULES = {"l": "---", "r": "---:"}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    r"""A table, without a newline at its end.

    Args:
        header: Titles of columns.
        rows: Cells.
        align: A letter a column, l or r; those that are missing are l.

    Example:
        >>> print(markdown(("name", "a|b"), [("rope", "1.5")], "lr"))
        | name | a\|b |
        | --- | ---: |
        | rope | 1.5 |
    """
    written = [[cell.replace("|", r"\|") for cell in row] for row in (header, *rows)]
    written.insert(1, [RULES[letter] for letter in align.ljust(len(header), "l")])
    return "\n".join(f"| {' | '.join(row)} |" for row in written)
