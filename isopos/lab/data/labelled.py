"""Labelled rows of tables (.csv, .tsv, .jsonl) or of folders with one file per row and one folder per class; their splits.

Names of tables, or of folders, with train, valid and test make the splits; without valid a tenth of train is held out. Where
no name contains train, a tenth of all is validation and a tenth is test. Tenths are chosen by a hash of the contents, so
equal rows are in one split; splits made by names are kept as they are.
"""

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from isopos.lab.data.arrays import Arrays, Writer
from isopos.lab.data.prepare import SPLITS, folder_classes, folders_of, named_split, split_of_folder, split_rule
from isopos.lab.data.sources import Source, column_index, lines_of, row_error, table_cells

TABLES = (".csv", ".tsv", ".jsonl")
LINES = (".txt", ".ptb", ".mrg")  # files of s-expressions in a folder
SURROGATE = re.compile(r"[\ud800-\udfff]")
UNLABELLED = "unsup"  # aclImdb's folder of reviews without a class
LABEL = 1000  # characters in the longest label


class LabelledRow(NamedTuple):
    """Values of the chosen columns, the label, and their location."""

    values: tuple[Any, ...]
    label: str
    file: str
    line: int
    start: int = 1  # column of the first value in the line, from 1 on, if known


def labelled_rows(
    source: Source,
    folders: Mapping[str, tuple[str, str]],
    columns: Sequence[str],
    label: str,
    unlabelled: Callable[[str], None],
) -> Iterator[LabelledRow]:
    """The labelled rows of a source, in its order.

    Args:
        source: Tables, whose other files are ignored; or one file per row.
        folders: `text_folders` of its names.
        columns: Columns of the values, by name or, in tables without names, by number from 1 on.
        label: Column of the label, likewise.
        unlabelled: Called with the name of each file that is skipped because it has no labels: test tables without that
            column, texts in no folder of a class, and the folder unsup of aclImdb.

    Raises:
        ValueError: If there is no row, a column or a label is missing, or a row is broken (with file and line).
    """
    count = 0
    for name, blocks in source.read(raw=False):
        suffix = PurePosixPath(name).suffix.lower()
        if suffix in TABLES:
            read = json_rows if suffix == ".jsonl" else table_rows
            for row in read(name, lines_of(name, blocks), columns, label, unlabelled):
                count += 1
                yield row
        elif name in folders:
            split, folder = folders[name]
            if folder in ("", UNLABELLED):
                unlabelled(f"{split}/{UNLABELLED}" if folder else PurePosixPath(name).name)
                continue
            text = "".join(lines_of(name, blocks)).removesuffix("\n")
            if len(columns) > 1:
                raise ValueError(f"pair: expected none in folders of texts, got {columns[1]!r}; a table has pairs")
            count += 1
            yield LabelledRow((text,), folder, name, 1)
    if not count:
        kinds = ", ".join(TABLES)
        raise ValueError(
            f"data: expected rows in files that end with {kinds}, or .txt in one folder per class, in {source.name}"
        )


def text_folders(source: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Split and class of each text in folders, see `folder_classes`, by its name; empty for a source with tables."""
    texts = [name for name in names if name.lower().endswith(".txt")]
    tables = any(name.lower().endswith(TABLES) for name in names)
    return {} if tables else dict(zip(texts, folder_classes(source, texts), strict=True))


def table_rows(
    name: str,
    lines: Iterator[str],
    columns: Sequence[str],
    label: str,
    unlabelled: Callable[[str], None],
    bare: Sequence[str] = (),
) -> Iterator[LabelledRow]:
    """Rows of a table. `bare` names the columns if the first line does not."""
    wanted, columns_read = (*columns, label), None
    for line, cells in table_cells(name, lines):
        if not cells:
            continue
        if columns_read is None:
            width, titles = len(cells), [cell.strip() for cell in cells]
            if named := not all(one.isdecimal() for one in wanted):
                named = len(bare) != width or bool({*wanted} & {*titles})
                titles = titles if named else list(bare)
            else:
                titles = [str(n) for n in range(1, width + 1)]
            if label not in titles and named_split(name) == "test" and {*columns} <= {*titles}:
                unlabelled(PurePosixPath(name).name)
                return
            columns_read = [column_index(name, titles, one) for one in wanted]
            if named:
                continue
        *values, cell_of_label = (cells[column] for column in columns_read)
        start = 1 + sum(len(cell) + 1 for cell in cells[: columns_read[0]]) if name.lower().endswith(".tsv") else 1
        yield LabelledRow(tuple(values), _label(cell_of_label, name, line), name, line, start)


def json_rows(
    name: str,
    lines: Iterator[str],
    columns: Sequence[str],
    label: str,
    unlabelled: Callable[[str], None],
    loads: Callable[[str], Any] = json.loads,
) -> Iterator[LabelledRow]:
    """Rows of JSON lines, one object per line, parsed by `loads`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cells = loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise row_error(name, number, f"expected JSON, got none: {error.msg}", error.colno) from None
        except ValueError:  # Python limits the digits of integers
            raise row_error(name, number, "expected numbers of at most 4,300 digits, got one of more") from None
        except RecursionError:
            raise row_error(name, number, "expected an object of texts, got one too deep") from None
        if not isinstance(cells, dict):
            raise row_error(name, number, f"expected an object, as {{...}}, got {str(cells)[:40]}")
        unknown = name.startswith("hf:") and cells.get(label, "") is None  # a class that the dataset has as unknown
        if (unknown or label not in cells) and named_split(name) == "test" and number == 1:
            unlabelled(PurePosixPath(name).name)
            return
        if unknown:
            unlabelled(PurePosixPath(name).name)
            continue
        for one in (*columns, label):
            if one not in cells:
                raise row_error(name, number, f"expected a field {one}, got {', '.join(cells)[:200] or 'none'}")
            if half := _lone_surrogate(cells[one]):
                raise row_error(name, number, f"{one}: expected text, got {half}, which is half of a character")
        values = tuple(cells[one] for one in columns)
        yield LabelledRow(values, _label(cells[label], name, number), name, number)


def _label(value: Any, file: str, line: int) -> str:
    if value is None or isinstance(value, list | dict) or not str(value).strip():
        raise row_error(file, line, f"expected a label, got {'none' if value in (None, '') else repr(value)[:40]}")
    label = str(value).strip()
    if len(label) > LABEL:
        raise row_error(
            file, line, f"expected a label of at most {LABEL:,} characters, got {len(label):,}: {label[:40]!r}..."
        )
    return label


def _lone_surrogate(value: Any) -> str:
    r"""The first surrogate without its other half, such as \ud800, in the texts of a JSON value; or ""."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += reversed(one)
        elif isinstance(one, dict):
            waiting += reversed([*one, *one.values()])
        elif isinstance(one, str) and (match := SURROGATE.search(one)):
            return ascii(match[0])[1:-1]
    return ""


def similar_classes(classes: Sequence[str]) -> str:
    """A warning about classes that may be one class in two spellings; or "".

    Examples:
        >>> similar_classes(["0", "0.0", "1", "NaN", "nan"])
        "'0' and '0.0', 'NaN' and 'nan' are separate classes here: if they are one class, write them alike"
        >>> similar_classes(["0", "1", "10"])
        ''
    """
    known: dict[Any, list[str]] = {}
    for name in classes:
        try:
            key = str(float(name))
        except ValueError:
            key = name.casefold()
        known.setdefault(key, []).append(name)
    pairs = [" and ".join(repr(name[:40]) for name in names) for names in known.values() if len(names) > 1]
    return f"{', '.join(pairs[:5])} are separate classes here: if they are one class, write them alike" if pairs else ""


def row_splits(
    names: Iterable[str], source: str = "", folders: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> Callable[[str, str], str]:
    """A function from the name of a row's file and its text to its split.

    The name of the file or of the two folders above it, inside the source, denotes the split; of a text in `folders` only
    its folder does. Files without a suffix of tables or texts are ignored.
    """
    named: dict[str, str | None] = {}
    for name in names:
        if name in folders:
            named[name] = folders[name][0] or None
        elif PurePosixPath(name).suffix.lower() in ("", *LINES, *TABLES):
            above = (split_of_folder(folder) for folder in folders_of(source, name)[:-3:-1])
            named[name] = named_split(name) or next(filter(None, above), None)
    into = split_rule(named.values())
    return lambda name, content: into(named.get(name), content.encode())


def assign_splits(
    rows: Callable[[Counter[str]], Iterable[tuple[str, Any]]],
    names: Iterable[str],
    content: Callable[[Any], tuple[bytes, bytes]],
    dropped: Counter[str],
) -> Iterator[tuple[str, Any]]:
    """Pairs of a split and a row, in order; splits follow from file names and hashes, see `split_rule`.

    Splits made by names may overlap: rows of a held-out split are then dropped from earlier ones.

    Args:
        rows: Yields file names and rows, and counts the rows that it drops; called twice if names make the splits.
        content: Of a row two byte strings: the first is hashed to choose its split, the second is equal for equal rows.
    """
    named = {name: named_split(name) for name in names}
    into, held = split_rule(named.values()), {split: set() for split in SPLITS[1:]}

    def placed(dropped: Counter[str]) -> Iterator[tuple[str, bytes, Any]]:
        for name, row in rows(dropped):
            hashed, whole = content(row)
            yield into(named[name], hashed), hashlib.sha256(whole).digest()[:16], row

    if any(named.values()):
        for split, digest, _ in placed(Counter()):
            if split in held:
                held[split].add(digest)
    for split, digest, row in placed(dropped):
        if any(digest in held[later] for later in SPLITS[SPLITS.index(split) + 1 :]):
            dropped["repeated"] += 1
        else:
            yield split, row


@dataclass(frozen=True, eq=False)
class LabelledArrays:
    """Samples with a class each: arrays with the classes that `Classes` writes, and the fact `classes`, their names."""

    name: str  # of the source
    arrays: Arrays

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return tuple(self.arrays.facts["classes"])

    def labels(self, split: str) -> np.ndarray:
        """The class of each sample, int64."""
        return self.arrays[f"{split}-labels"]


class Classes:
    """Collects the labels of rows by split; `write` writes them as numbers of classes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._first: list[tuple[str, int]] = []  # file and line of each label's first row
        self._rows = {split: array("q") for split in SPLITS}

    def add(self, split: str, row: LabelledRow) -> None:
        """Add the label of a row."""
        number = self._numbers.setdefault(row.label, len(self._numbers))
        if number == len(self._first):
            self._first.append((row.file, row.line))
        self._rows[split].append(number)

    def write(self, writer: Writer) -> list[str]:
        """Write SPLIT-labels, the class of each row; return the sorted names of the classes.

        Raises:
            ValueError: If train or validation has no row, train lacks a class, there are too few or too many classes, or
                only the first line of a table has a class.
        """
        count = sum(map(len, self._rows.values()))
        for split in SPLITS[:2]:
            if not self._rows[split]:
                raise ValueError(f"data: expected rows for {split}, got none among {count}; give it more rows")
        train = {*self._rows["train"]}
        for label, number in self._numbers.items():
            if number not in train:
                split = next(split for split in SPLITS if number in self._rows[split])
                problem = f"expected a class that train has, too, got {label[:40]!r}, which is in {split} alone"
                raise row_error(*self._first[number], problem)
        if not 1 < len(self._numbers) <= max(2, count // 2):
            some = ", ".join([*self._numbers][:5])
            raise ValueError(f"label: expected classes, 2 at least, got {len(self._numbers)} in {count} rows: {some[:200]}")
        counts = np.bincount([number for rows in self._rows.values() for number in rows])
        for label, number in self._numbers.items():
            file, line = self._first[number]
            if counts[number] == line == 1 and file.lower().endswith((".csv", ".tsv")):
                problem = f"expected a class of several rows, got {label[:40]!r} alone, as if the line named the columns"
                raise row_error(file, line, problem)
        integers = all(label.removeprefix("-").isdecimal() for label in self._numbers)
        names = sorted(self._numbers, key=int if integers else str)
        order = np.argsort(np.array([self._numbers[name] for name in names]))
        for split, rows in self._rows.items():
            writer.add(f"{split}-labels", order[np.array(rows, np.int64)])
        return names
