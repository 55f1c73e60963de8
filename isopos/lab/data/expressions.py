"""ListOps: nested operations on lists of digits, as tokens, answers and trees; read from files, or random.

The rows of Nangia and Bowman bracket their lists in pairs, ``( ( ( [MAX 2 ) 9 ) ] )``. The parentheses are redundant and
are dropped: ``[MAX 2 9 ]``.

References:
    ListOps: a diagnostic dataset for latent tree learning (Nangia and Bowman 2018). https://arxiv.org/abs/1804.06028
    Long Range Arena (Tay et al. 2020), whose tables have a header and the columns Source and Target.
    https://arxiv.org/abs/2011.04006
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from isopos.lab.data.arrays import Arrays, Ragged, Writer, in_memory
from isopos.lab.data.labelled import assign_splits
from isopos.lab.data.prepare import SPLITS, preparing
from isopos.lab.data.sources import find_source, lines_of, row_error, two_columns
from isopos.lab.data.splits import Splits, stored


def _median(numbers: Sequence[int]) -> int:
    """The median, rounded down."""
    n, ordered = len(numbers), sorted(numbers)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) // 2


OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": _median,
    "SM": lambda numbers: sum(numbers) % 10,
    "FIRST": lambda numbers: numbers[0],
    "LAST": lambda numbers: numbers[-1],
    "PM": lambda numbers: math.prod(numbers) % 10,
}
"""Functions of the arguments: sum and product are modulo 10, the median is rounded down."""
TOKENS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""The number of a digit's token is the digit."""
CLOSE = len(TOKENS) - 1
NUMBERS = {token: number for number, token in enumerate(TOKENS)}
FUNCTIONS = tuple(OPERATORS.values())


WORD = re.compile(r"\]|[^\s()\]]+")


class Misplaced(ValueError):
    """The text is not an expression; its n-th token is wrong."""

    def __init__(self, message: str, n: int):
        super().__init__(message)
        self.n = n


class Expression(NamedTuple):
    """One sample."""

    tokens: bytes  # numbers of `TOKENS`
    answer: int  # its value
    branches: int  # largest number of children in its tree; an operator's children are its arguments and the closing bracket


def write_expressions(writer: Writer, samples: Iterable[tuple[str, Expression]]) -> None:
    """Write pairs of a split and an expression: SPLIT-tokens and SPLIT-starts, and SPLIT-about, answers and branches."""
    sequences = {split: Ragged(writer, split, 256) for split in SPLITS}
    for split in SPLITS:
        writer.add(f"{split}-about", np.empty((0, 2), np.int32))
    for split, (tokens, answer, branches) in samples:
        sequences[split].add(np.frombuffer(tokens, np.uint8))
        writer.add(f"{split}-about", np.array([[answer, branches]]))


def splits_of(arrays: Arrays) -> Splits[Expression]:
    """The expressions that `write_expressions` wrote, with the column `about`: answers and branches ``[n 2]``."""
    return Splits(stored(arrays, _expression), arrays.facts, "expressions")


def _expression(arrays: Arrays, split: str, row: int) -> Expression:
    answer, branches = arrays[f"{split}-about"][row].tolist()
    return Expression(arrays.sequence(split, row).tobytes(), answer, branches)


def encode(text: str) -> bytes:
    """Tokens of an expression, without parentheses.

    Raises:
        ValueError: If a word is not a token.

    Examples:
        >>> list(encode("( ( [MAX 2 ) 9 ) ]"))
        [11, 2, 9, 17]
    """
    if text.count("(") != text.count(")"):
        raise ValueError(f"expected as many ( as ), got {text.count('(')} and {text.count(')')}")
    words = [word[0] for word in WORD.finditer(text)]
    for n, word in enumerate(words):
        if word not in NUMBERS:
            raise Misplaced(f"expected digits, ] and {', '.join(TOKENS[10:CLOSE])}, got {word!r}", n)
    return bytes([NUMBERS[word] for word in words])


def expression_text(tokens: bytes) -> str:
    """The expression of tokens.

    Examples:
        >>> expression_text(encode("[MAX 2 [MIN 4 7]]"))
        '[MAX 2 [MIN 4 7 ] ]'
    """
    return " ".join(TOKENS[token] for token in tokens)


def evaluate(tokens: bytes) -> Expression:
    """The expression of tokens, with its answer.

    Raises:
        ValueError: If the tokens are not an expression.

    Examples:
        >>> evaluate(encode("[MAX 2 9 [MIN 4 7] 0]"))[1:]
        (9, 5)
    """
    values: list[list[int]] = [[]]  # arguments at top level and in each open list
    opened: list[int] = []  # positions of the operators of open lists
    branches = 1
    for n, token in enumerate(tokens):
        if token < 10:
            values[-1].append(token)
        elif token < CLOSE:
            opened.append(n)
            values.append([])
        elif not opened:
            raise Misplaced("expected balanced brackets, got ] that closes nothing", n)
        else:
            begin, arguments = opened.pop(), values.pop()
            if not arguments:
                raise Misplaced(f"expected arguments of {TOKENS[tokens[begin]]}, got none", begin)
            branches = max(branches, len(arguments) + 1)
            values[-1].append(FUNCTIONS[tokens[begin] - 10](arguments))
        if not opened and len(values[0]) > 1:
            raise Misplaced("expected one expression, got another", n)
    if opened:
        raise Misplaced(f"expected balanced brackets, got {TOKENS[tokens[opened[-1]]]} that nothing closes", opened[-1])
    if not tokens:
        raise ValueError("expected an expression, got none")
    return Expression(tokens, values[0][0], branches)


def tree_nodes(tokens: bytes) -> list[tuple[int, int]]:
    """Tree positions of an expression: (parent's row, branch) of each token, as for `positions.Tree`.

    An operator's children are its arguments, in order, and finally its closing bracket. So a model sees the same tokens with
    every kind of positions, and every token has a separate position.

    Examples:
        >>> tree_nodes(encode("[MAX 2 [MIN 4 7] 9]"))
        [(-1, -1), (0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (0, 2), (0, 3)]
    """
    rows: list[tuple[int, int]] = []
    opened: list[list[int]] = []  # row and number of children of each open operator
    for row, token in enumerate(tokens):
        if opened:
            rows.append((opened[-1][0], opened[-1][1]))
            opened[-1][1] += 1
        else:
            rows.append((-1, -1))
        if token == CLOSE:
            opened.pop()
        elif token >= 10:
            opened.append([row, 0])
    return rows


def read_expressions(source: str, console: Console | None = None) -> Splits[Expression]:
    """The expressions of a file, or of the .tsv files in a folder; also packed, as .tsv.gz.

    A row is a label, a tab and an expression, unless the first row names the columns: Source and Target. Every label is
    compared with the value of its expression. Names that contain train, valid and test make the splits; without valid,
    a tenth of train is held out. Where no name contains train, a tenth of all is validation and a tenth is test. Tenths are
    chosen by a hash of the tokens, so splits are disjoint. Splits made by names may overlap: expressions of test are then
    dropped from validation and train, and expressions of validation from train. Prepared once, then memory-mapped.

    Raises:
        ValueError: If there is nothing to read, or a row is wrong (with file, line and column).
    """
    if not Path(source).exists():
        raise ValueError(
            f"data: expected a file or a folder of rows, but {source} does not exist; without --data they are random"
        )
    with preparing(find_source(source, tables=True), console=console) as preparation:
        (files,), alone = preparation.sources, Path(source).is_file()
        names = [name for name in preparation.names if alone or name.lower().endswith(".tsv")]
        if not names:
            raise _nothing(f"in files that end with .tsv or .tsv.gz, got none in {source}")

        def rows(dropped: Counter[str]) -> Iterator[tuple[str, Expression]]:
            for name, blocks in files.read(raw=False):
                if name in names:
                    yield from ((name, row) for row in _rows(name, lines_of(name, blocks)))

        def fill(writer: Writer) -> dict[str, int]:
            dropped = Counter()
            write_expressions(writer, assign_splits(rows, names, lambda row: (row.tokens, row.tokens), dropped))
            return dict(dropped)

        return splits_of(preparation.arrays("expressions", fill))


def _nothing(what: str) -> ValueError:
    return ValueError(f"data: expected rows of a label, a tab and an expression, {what}")


def _rows(name: str, lines: Iterable[str]) -> Iterator[Expression]:
    some = False
    for number, cells, formula in two_columns(lines, source=1):
        try:
            if len(cells) != 2:
                raise ValueError(f"expected a label, a tab and an expression, got {len(cells)} columns")
            row, label = evaluate(encode(cells[formula])), cells[1 - formula].strip()
            if label not in TOKENS[:10]:
                raise ValueError(f"expected a label from 0 to 9, got {label!r}")
            if int(label) != row.answer:
                raise ValueError(f"expected the label {row.answer}, to which the expression evaluates, got {label}")
        except ValueError as error:
            column = None
            if isinstance(error, Misplaced):
                before = len("\t".join(cells[:formula])) + (formula > 0)
                column = 1 + before + [word.start() for word in WORD.finditer(cells[formula])][error.n]
            raise row_error(name, number, str(error), column) from None
        some = True
        yield row
    if not some:
        raise _nothing(f"but {name} has none")


def generate_expressions(
    seed: int, counts: Sequence[int], *, operators: Sequence[str], depth: int, arguments: int, longest: int
) -> Splits[Expression]:
    """Distinct random expressions by the published procedure: an argument is a list with probability 1/4.

    Args:
        counts: Numbers of expressions in train, validation and test.
        operators: Names of `OPERATORS`, equally likely.
        depth: Largest depth of nested lists.
        arguments: Largest number of arguments; all numbers from 2 on are equally likely.

    Examples:
        >>> rows = generate_expressions(0, (2, 1, 1), operators=("MIN", "MAX"), depth=2, arguments=3, longest=20)
        >>> [len(rows.splits[split]) for split in SPLITS]
        [2, 1, 1]
    """
    random = np.random.default_rng(seed)
    draw = chain.from_iterable(random.random(1 << 14).tolist() for _ in repeat(None))  # endless, in [0, 1)

    def grow(level: int) -> bytes:
        if level and (level == depth or next(draw) >= 0.25):
            return bytes([int(10 * next(draw))])
        operator = NUMBERS["[" + operators[int(len(operators) * next(draw))]]
        count = 2 + int((arguments - 1) * next(draw))
        return bytes([operator, *b"".join(grow(level + 1) for _ in range(count)), CLOSE])

    different: dict[bytes, None] = {}
    while len(different) < sum(counts):
        tokens = grow(0)
        if len(tokens) <= longest:
            different[tokens] = None
    splits = (split for split, count in zip(SPLITS, counts, strict=True) for _ in range(count))

    def fill(writer: Writer) -> dict[str, int]:
        write_expressions(writer, zip(splits, map(evaluate, different), strict=False))
        return {}

    return splits_of(in_memory(fill))
