"""Trees with classes: s-expressions and nested JSON lists, read without recursion, as arrays of tokens and nodes.

The label of a node is the first atom of its s-expression; inner nodes of nested lists have no labels. Tokens are the labels
of the train split, by frequency. `NODE` is the token of nodes without a label, `UNKNOWN` the token of other labels.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any, NamedTuple, NoReturn

import numpy as np
from rich.console import Console

from isopos.lab.data.arrays import Ragged, Writer, in_memory
from isopos.lab.data.labelled import LINES, Classes, LabelledArrays, LabelledRow, json_rows, row_splits, table_rows
from isopos.lab.data.labelled_trees import arities_of, problem_of, s_expression
from isopos.lab.data.prepare import SPLITS, preparing
from isopos.lab.data.sources import Source, find_source, lines_of, row_error
from isopos.trees import Unread, read

CACHE_VERSION = 3
NODE, UNKNOWN = "()", "<unk>"
COUNTS = {"train": 5000, "validation": 1000, "test": 1000}  # random trees
DEPTH, NODES = 6, (6, 30)


class Read(NamedTuple):
    """A tree: its row, which has its class; its nodes ``[n 2]``, as from `isopos.tree`; and their labels."""

    row: LabelledRow
    nodes: np.ndarray
    labels: Sequence[str | None]


@dataclass(frozen=True, eq=False)
class TreeDataset(LabelledArrays):
    """Tokens, nodes and classes of trees."""

    @property
    def words(self) -> tuple[str, ...]:
        """The label of each token."""
        return tuple(self.arrays.facts["words"])

    @property
    def branches(self) -> int:
        """Largest number of children of a node."""
        return self.arrays.facts["branches"]

    def tree(self, split: str, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens ``[t]`` and nodes ``[t 2]`` of the n-th tree of a split, in preorder."""
        rows = slice(*self.arrays[f"{split}-starts"][n : n + 2])
        return self.arrays[f"{split}-tokens"][rows], self.arrays[f"{split}-nodes"][rows]


def load_trees(
    source: str,
    column: str = "tree",
    label: str = "label",
    *,
    inner: bool = False,
    vocabulary: int = 0,
    words: Sequence[str] = (),
    console: Console | None = None,
) -> TreeDataset:
    """The labelled trees of a source, prepared once, then memory-mapped.

    Lines of a file that is not a table (in a folder: .txt, .ptb or .mrg) are s-expressions with the class at the root. The
    other labels of inner nodes are taken to be classes, too, and are hidden, as usual for the Stanford Sentiment Treebank; a
    node above a single word becomes that word. Rows of a .tsv or .csv are a label and a tree, or have columns with these
    names; lines of a .jsonl are objects with a label and nested lists or an s-expression. Splits as in `labelled`.

    Args:
        source: A path; empty: random trees of "and", "or" and "not", whose class is their value.
        inner: Keep the labels of inner nodes below the root, where the root's label is the class.
        vocabulary: Largest number of tokens; 0: all labels of train.
        words: The labels of tokens, if they are known already.

    Raises:
        ValueError: If there is no tree, or one is wrong (with file, line and column).
    """
    if not source:
        trees = [*_random()]
        arrays = in_memory(lambda writer: _fill(writer, lambda: trees, row_splits(SPLITS), 0, words))
        return TreeDataset("random trees of and, or and not", arrays)
    with preparing(find_source(source, tables=True), console=console) as preparation:
        (files,) = preparation.sources

        def reading() -> Iterator[Read]:
            for n, one in enumerate(_trees(files, column, label, inner)):
                if n % 1000 == 0:
                    preparation.progressing("reading trees", n, 0)
                yield one

        def fill(writer: Writer) -> dict[str, object]:
            return _fill(writer, reading, row_splits(preparation.names, files.name), vocabulary, words)

        return TreeDataset(
            files.name, preparation.arrays("trees", fill, CACHE_VERSION, column, label, inner, vocabulary, list(words))
        )


def _fill(
    writer: Writer,
    trees: Callable[[], Iterable[Read]],
    split: Callable[[str, str], str],
    vocabulary: int,
    words: Sequence[str],
) -> dict[str, object]:
    """Write tokens, nodes, starts and labels; return classes, words and branches."""
    counts, classes, branches = Counter(), Classes(), 1
    for one in () if words else trees():
        if split(one.row.file, one.row.values[0]) == "train":
            counts.update(label for label in one.labels if label not in (None, NODE, UNKNOWN))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    words = list(words) or [NODE, UNKNOWN, *ordered][: vocabulary or None]
    index, sequences = {word: n for n, word in enumerate(words)}, {}
    for name in SPLITS:
        sequences[name] = Ragged(writer, name, len(words) + 1)
        writer.add(f"{name}-nodes", np.empty((0, 2), np.int32))
    for one in trees():
        where = split(one.row.file, one.row.values[0])
        tokens = [index.get(NODE if label is None else label, 1) for label in one.labels]
        sequences[where].add(np.array(tokens))
        writer.add(f"{where}-nodes", one.nodes)
        classes.add(where, one.row)
        branches = max(branches, 1 + int(one.nodes[:, 1].max()))
    names = classes.write(writer)
    return {"classes": names, "words": words, "branches": branches}


def _trees(source: Source, column: str, label: str, inner: bool) -> Iterator[Read]:
    """The trees of a source, in its order."""
    count, alone = 0, Path(source.name).is_file()
    for name, blocks in source.read(raw=False):
        suffix, lines = PurePosixPath(name).suffix.lower(), lines_of(name, blocks)
        if suffix in (".tsv", ".csv"):
            some = table_rows(name, lines, (column,), label, _refuse, (label, column))
        elif suffix == ".jsonl":
            some = json_rows(name, lines, (column,), label, _refuse, loads)
        elif not alone and suffix not in LINES:
            continue
        else:
            some = (LabelledRow((line,), "", name, n) for n, line in enumerate(lines, 1) if line.strip())
        for row in some:
            count += 1
            yield _tree(row, inner)
    if not count:
        raise ValueError(f"data: expected trees, an s-expression a line or a label and a tree, got none in {source.name}")


def _refuse(name: str) -> None:
    raise ValueError(f"data: expected labels in {name}, which is test by its name, got none; remove it")


def _tree(row: LabelledRow, inner: bool) -> Read:
    (value,) = row.values
    try:
        if not isinstance(value, str | list):
            raise Unread(f"expected an s-expression or nested lists, got {str(value)[:40]}", 0)
        rows, labels = read(value)
    except Unread as error:
        raise row_error(row.file, row.line, problem_of(error), error.at + row.start) from None
    rows, shown = np.array(rows), list[str | None](labels)
    if not row.label:
        row = row._replace(label=labels[0])
        if len(rows) == 1:
            raise row_error(
                row.file, row.line, f"expected a label and a tree, as (label child ...), got {labels[0][:40]!r} alone", 1
            )
        rows, shown = (rows, [None, *labels[1:]]) if inner else _hidden(rows, labels)
    return Read(row._replace(values=(tree_text(shown, rows),)), rows, shown)  # equal trees, as models see them, in one split


def _hidden(rows: np.ndarray, labels: Sequence[str]) -> tuple[np.ndarray, list[str | None]]:
    """The tree without the labels of inner nodes; a node above a single leaf becomes that leaf."""
    parent, n = rows[:, 0], len(rows)
    children = np.bincount(parent[parent >= 0], minlength=n)
    leaf = children == 0
    merged = leaf & (parent >= 0) & (children[parent] == 1)  # in preorder such a leaf comes right after its parent
    named = [label if is_leaf else None for label, is_leaf in zip(labels, leaf, strict=True)]
    for row in merged.nonzero()[0].tolist():
        named[row - 1] = labels[row]
    new_row = np.cumsum(~merged) - 1
    kept = rows[~merged].copy()
    kept[:, 0] = np.where(kept[:, 0] >= 0, new_row[kept[:, 0]], -1)
    return kept, [name for name, gone in zip(named, merged.tolist(), strict=True) if not gone]


def tree_text(labels: Sequence[str | None], nodes: np.ndarray) -> str:
    """The s-expression of a tree in preorder, also of nodes without labels.

    Examples:
        >>> tree_text(["and", "T", "not", "F"], np.array([[-1, -1], [0, 0], [0, 1], [2, 0]]))
        '(and T (not F))'
    """
    arities = arities_of(nodes[:, 0])
    unlabelled = {True: "", False: "()"}  # of inner nodes and of leaves
    names = [
        unlabelled[arity > 0] if label in (None, NODE) else str(label) for label, arity in zip(labels, arities, strict=True)
    ]
    return s_expression(names, arities).replace("( ", "(")


ATOM = re.compile(r'\s*([\[\]{},:]|"(?:[^"\\]|\\.)*"|[^\s\[\]{},:"]+|"|$)')


def loads(line: str) -> Any:
    """The value of JSON of any depth; atoms in lists stay text.

    Raises:
        json.JSONDecodeError: If it is not JSON, with the column.

    Examples:
        >>> loads('{"label": 1, "tree": [["the", "cat"], 2]}')
        {'label': 1, 'tree': [['the', 'cat'], '2']}
    """

    def refuse(what: str, at: int) -> NoReturn:
        raise json.JSONDecodeError(f"expected {what}", line, at)

    def put(value: Any) -> None:
        if keys[-1] is None:
            stack[-1].append(value)
        else:
            stack[-1][keys[-1]] = value

    stack: list[Any] = [[]]
    keys: list[Any] = [None]  # for each open list or object, the key of the next value
    state, at = "value", 0  # the expected token: a value, a key, a colon, or a token that may follow a value
    while match := ATOM.match(line, at):
        token, at, begin = match[1], match.end(), match.start(1)
        inside = stack[-1]
        if token == "":
            if len(stack) > 1 or state != "after":
                refuse("the end of a list or an object", begin)
            return stack[0][0]
        if len(stack) == 1 and state == "after":
            refuse("the end of the line", begin)
        if token in ("]", "}"):
            kind, first = (list, "value") if token == "]" else (dict, "key")
            if len(stack) == 1 or not isinstance(inside, kind) or not (state == "after" or (state == first and not inside)):
                refuse(f"no {token}", begin)
            stack.pop()
            keys.pop()
            put(inside)
            state = "after"
        elif state == "after":
            if token != ",":
                refuse("a comma", begin)
            state = "key" if isinstance(inside, dict) else "value"
        elif state == "colon":
            if token != ":":
                refuse("a colon", begin)
            state = "value"
        elif state == "value" and token in ("[", "{"):
            stack.append([] if token == "[" else {})
            keys.append(None)
            state = "value" if token == "[" else "key"
        else:
            try:
                value = json.loads(token)
            except ValueError:
                refuse("a value", begin)
            if state == "key":
                if not isinstance(value, str):
                    refuse("a name in quotes", begin)
                keys[-1], state = value, "colon"
            else:
                put(value if keys[-1] is not None or len(stack) == 1 or isinstance(value, str) else token)
                state = "after"
    return refuse("a value", at)


def _random() -> Iterator[Read]:
    """Random trees of "and", "or" and "not", half of them true."""
    draw = Random(0).random

    def grow(depth: int) -> tuple[str, int, bool]:
        if depth and (depth == DEPTH or draw() < 0.4):
            value = draw() < 0.5
            return "T" if value else "F", 1, value
        name = ("not", "and", "or")[int(3 * draw())]
        children = [grow(depth + 1) for _ in range(1 if name == "not" else 2 + int(2 * draw()))]
        texts, nodes, values = zip(*children, strict=True)
        value = not values[0] if name == "not" else (all if name == "and" else any)(values)
        return f"({name} {' '.join(texts)})", 1 + sum(nodes), value

    seen = set()
    for split, count in COUNTS.items():
        wanted = {True: count // 2, False: count // 2}
        while any(wanted.values()):
            expression, nodes, value = grow(0)
            if NODES[0] <= nodes <= NODES[1] and wanted[value] and expression not in seen:
                wanted[value] -= 1
                seen.add(expression)
                yield _tree(LabelledRow((expression,), str(value).lower(), split, 1), True)
