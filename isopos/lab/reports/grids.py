"""Tables of texts, in markdown and for a console."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

__all__ = ["console", "markdown"]

RULES, SIDES = {"l": "---", "r": "---:"}, {"l": "left", "r": "right"}


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


def console(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "", **options: Any) -> Table:
    """The same for a console, with options of rich's `Table`; long cells are folded."""
    table = Table(header_style="bold", **options)
    for title, letter in zip(header, align.ljust(len(header), "l"), strict=True):
        table.add_column(title, justify=SIDES[letter], overflow="fold")  # pyright: ignore[reportArgumentType]
    for row in rows:
        table.add_row(*row)
    return table
