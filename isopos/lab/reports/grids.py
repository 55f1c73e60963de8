"""Tables of text, in Markdown and for a console, and lines around them. Cells are data, never markup.

Only functions for a console need rich: `isopos gpu-check` writes Markdown on machines without it.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from isopos.lab.runs.files import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RULES, JUSTIFY = {"l": "---", "r": "---:"}, {"l": "left", "r": "right"}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    r"""A Markdown table, without a final newline.

    Args:
        align: One letter per column, l or r; missing ones are l.

    Examples:
        >>> print(markdown(("name", "a|b"), [("rope", "1.5")], "lr"))
        | name | a\|b |
        | --- | ---: |
        | rope | 1.5 |
    """
    lines = [[printable(cell).replace("|", r"\|") for cell in row] for row in (header, *rows)]
    lines.insert(1, [RULES[letter] for letter in align.ljust(len(header), "l")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def console_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "", *, title: str = "", **options: Any
) -> "Table":
    """A table for a console, with options of rich's `Table`; long cells are folded, markup in cells is not interpreted."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", title=Text(printable(title), "table.title") if title else None, **options)
    for name, letter in zip(header, align.ljust(len(header), "l"), strict=True):
        table.add_column(Text(name), justify=JUSTIFY[letter], overflow="fold")  # pyright: ignore[reportArgumentType]
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def say(out: "Console", *lines: str) -> None:
    """Print each line unchanged and unwrapped."""
    for line in lines:
        out.print(printable(line), markup=False, soft_wrap=True)


def warn(out: "Console", *warnings: str) -> None:
    """Print warnings."""
    from rich.text import Text

    for warning in warnings:
        out.print("[yellow]warning:[/]", Text(printable(warning)), soft_wrap=True)
