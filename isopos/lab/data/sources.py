"""Sources of text: files, folders, archives read as streams, and Hugging Face datasets; their documents, lines and cells.

Datasets of the hub are read by `datasets`. Files are read here, so that errors name the line (docs/data.md).
"""

import bz2
import csv
import gzip
import hashlib
import json
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from isopos.lab.runs.files import check_plain

BLOCK, ROWS = 1 << 20, 1000  # bytes and rows of tables read at once
UNPACKED, RATIO = 1 << 30, 100  # largest unpacked size of a file: bytes, or a multiple of its size
FIELD = 1 << 24  # characters in the largest cell
HEADERS = {"source": "source", "src": "source", "target": "target", "trg": "target", "tgt": "target"}
BOM = "\ufeff".encode()
PACKED: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
ARCHIVES = (".zip", ".tar", ".tgz", *(f".tar{suffix}" for suffix in PACKED))
BROKEN = (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, RuntimeError)

Document = tuple[str, Iterator[bytes]]
"""A name and the blocks of its text, which must be read before the next document."""


@dataclass(frozen=True)
class Source:
    """Documents that can be read repeatedly, in a fixed order."""

    name: str  # for readers
    documents: Callable[[], Iterator[Document]]  # their bytes as they are
    files: tuple[Path, ...]  # their sizes and modification times identify the text
    plain: bool = False  # whether the bytes of these files are the text
    books: bool = False  # whether documents are held out as wholes
    tables: bool = False  # whether a .csv is a table, not text with a line per row

    def read(self, raw: bool) -> Iterator[Document]:
        """The documents: raw, or as text without byte order marks, with LF at the end of every line."""
        for name, blocks in self.documents():
            text = blocks if raw else _normal(blocks)
            lines = not (raw or self.tables) and name.lower().endswith(".csv")
            yield name, (_normal(_joined(_only_column(name, text))) if lines else text)

    def stamp(self) -> list[list[str | int]]:
        """Path, size and modification time of every file."""
        return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.files]


def find_source(source: str, *, tables: bool = False) -> Source:
    """The source of that name: "" (the Python language reference), hf:NAME[:CONFIG], or a path.

    A path names a file, an archive (.zip, .tar and .tar.xz, .tgz, ...) or a folder, read recursively in sorted order. Files
    with the suffix .gz, .xz or .bz2 are unpacked while they are read. Rows of a .csv with one column are lines, and so are
    rows of the column `text` of a dataset. With `tables`, a .csv is read unchanged, and rows of a dataset are JSON objects.

    Raises:
        ValueError: If there is nothing to read.
    """
    if not source:
        return Source("Python language reference (pydoc_data.topics)", _builtin, (), plain=True)
    if source.startswith("hf:"):
        return _hub(source, tables)
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"data: expected a file or a folder, but {path} does not exist; a dataset of the Hugging Face hub is "
            "hf:NAME:CONFIG, as hf:Salesforce/wikitext:wikitext-103-v1"
        )
    files = tuple(sorted(_files(path))) if path.is_dir() else (path,)
    for file in files:
        try:
            check_plain(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"data: cannot read {file}: {_reason(error)}") from None
    packed = any(file.name.lower().endswith((*ARCHIVES, *PACKED, ".csv")) for file in files)
    books = path.is_file() and path.name.lower().endswith(ARCHIVES)
    return Source(source, lambda: _read(files), files, plain=not packed, books=books, tables=tables)


def _files(folder: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders; a folder that cannot be read is an error."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"data: cannot read {error.filename}: {error.strerror}") from None

    for parent, folders, files in os.walk(folder, onerror=refuse):
        for link in (path for name in folders if (path := Path(parent, name)).is_symlink()):
            raise ValueError(f"data: expected folders, got the link {link}, which is not followed; name what it leads to")
        yield from (Path(parent, name) for name in files)


def survey(
    source: Source, raw: bool, progress: Callable[[int], None] = lambda done: None
) -> tuple[str, list[tuple[str, int]]]:
    """Read everything once: a hash of the text, and name and size in bytes of every document.

    `progress` is called with the number of bytes read.
    """
    digest, sizes, done = hashlib.sha256(), [], 0
    for name, blocks in source.read(raw):
        before = done
        for block in blocks:
            digest.update(block)
            done += len(block)
            progress(done)
        sizes.append((name, done - before))
    return digest.hexdigest(), sizes


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    r"""The same text in blocks that end with a line; a very long line is split at spaces.

    Examples:
        >>> list(whole_lines([b"one\ntw", b"o\nthree"]))
        [b'one\n', b'two\n', b'three']
    """
    held: list[bytes] = []  # blocks without a line end; only the first may have spaces
    for block in blocks:
        held.append(block)
        if b"\n" in block or b" " in block or b" " in held[0]:
            whole = b"".join(held)
            cut = whole.rfind(b"\n") + 1 or whole.rfind(b" ") + 1
            yield whole[:cut]
            held = [whole[cut:]]
    if any(held):
        yield b"".join(held)


def row_error(file: str, line: int, problem: str, column: int | None = None) -> ValueError:
    """The error for a row."""
    at = f"line {line}" + (f", column {column}" if column is not None else "")
    return ValueError(f"data: {file}, {at}: {problem}; repair or remove the line")


def decoded(name: str, line: int, content: bytes, errors: str = "strict") -> str:
    """The text of some lines of a document; `line` is the number of the first one, `errors` as for `bytes.decode`."""
    try:
        return content.decode(errors=errors)
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise row_error(name, line, f"expected UTF-8, got the byte {content[error.start]:#04x}") from None


def lines_of(name: str, blocks: Iterable[bytes], errors: str = "strict") -> Iterator[str]:
    """The lines of a document, with line ends; `errors` as for `bytes.decode`."""
    held, number = b"", 1
    for block in blocks:
        *whole, held = (held + block).split(b"\n")
        for line in whole:
            yield decoded(name, number, line, errors) + "\n"
            number += 1


def two_columns(lines: Iterable[str], source: int = 0) -> Iterator[tuple[int, list[str], int]]:
    """Number and cells of each line that is not blank, and the index of the source among the cells.

    The first line may name the columns Source and Target, or src and trg or tgt; otherwise `source` is the index.
    """
    for number, line in enumerate(lines, 1):
        cells = line.removesuffix("\n").split("\t")
        names = [HEADERS.get(cell.strip().lower()) for cell in cells]
        if number == 1 and sorted(filter(None, names)) == ["source", "target"] and len(names) == 2:
            source = names.index("source")
        elif line.strip():
            yield number, cells, source


def table_cells(name: str, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each row. An empty row has none; others have as many as the first. Quotes in TSV are text."""
    csv.field_size_limit(FIELD)
    plain, width = name.lower().endswith(".tsv"), 0
    reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if plain else csv.reader(lines, strict=True)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise row_error(name, reader.line_num, f"expected {'TSV' if plain else 'CSV'}, got {error}") from None
        if cells is None:
            return
        if cells and width not in (0, len(cells)):
            raise row_error(name, reader.line_num, f"expected {width} columns, as the first line has, got {len(cells)}")
        width = len(cells) or width
        yield reader.line_num, cells


def column_index(name: str, titles: Sequence[str], wanted: str) -> int:
    """The index of a column; ValueError unless the file has one of this name."""
    if (count := titles.count(wanted)) > 1:
        raise ValueError(f"data: {name}, line 1: expected one column {wanted}, got {count}; rename all but one")
    if wanted not in titles:
        some = ", ".join(title[:40] for title in titles[:20])
        remedy = "name those to use, by numbers from 1 on where the first line has no names"
        raise ValueError(f"data: {name}, line 1: expected a column {wanted}, got {some}; {separators(titles) or remedy}")
    return titles.index(wanted)


def separators(titles: Sequence[str]) -> str:
    """The remedy for a first line that separates columns by semicolons, which this reads as one column; else empty."""
    semicolons = len(titles) == 1 and ";" in titles[0]
    return "separate columns by commas and decimals by points, not by semicolons and commas" if semicolons else ""


def _normal(blocks: Iterable[bytes]) -> Iterator[bytes]:
    held, started, last = b"", False, b"\n"
    for block in blocks:
        held += block
        if not started:
            if len(held) < len(BOM):
                continue
            held, started = held.removeprefix(BOM), True
        cut = len(held) - held.endswith(b"\r")  # its LF may be in the next block
        ready, held = held[:cut].replace(b"\r\n", b"\n"), held[cut:]
        if ready:
            last = ready[-1:]
            yield ready
    if not (held or last).endswith(b"\n"):
        held += b"\n"
    if held:
        yield held


def _builtin() -> Iterator[Document]:
    from pydoc_data.topics import topics

    yield "pydoc_data.topics", iter(["\n".join(topics[name] for name in sorted(topics)).encode()])


def _read(files: Iterable[Path]) -> Iterator[Document]:
    for path in files:
        try:
            with path.open("rb") as stream:
                budget = [max(UNPACKED, RATIO * path.stat().st_size)]
                for name, blocks in _unpacked(str(path), stream):
                    yield name, _guarded(name, blocks, budget)
        except BROKEN as error:
            raise ValueError(f"data: cannot read {path}: {_reason(error)}") from None


def _unpacked(name: str, stream: BinaryIO) -> Iterator[Document]:
    """The documents in a stream, by the suffix of its name; nothing is unpacked to disk."""
    name = name[: -len(".tgz")] + ".tar.gz" if name.lower().endswith(".tgz") else name
    stem, dot, suffix = name.rpartition(".")
    match dot + suffix.lower():
        case ".gz" | ".xz" | ".bz2" as packed:
            with PACKED[packed](stream) as inner:
                yield from _unpacked(stem, inner)
        case ".tar":
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    inner = archive.extractfile(member) if member.isfile() else None
                    if inner is not None:
                        yield from _unpacked(f"{name}/{member.name}", inner)  # pyright: ignore[reportArgumentType]
        case ".zip":
            with zipfile.ZipFile(stream) as archive:
                members = sorted(archive.namelist())
                if twice := [one for one, other in pairwise(members) if one == other and not one.endswith("/")]:
                    raise ValueError(
                        f"data: expected files of different names in {name}, got {twice[0]} twice; pack it again"
                    )
                for member in members:
                    if not member.endswith("/") and not member.startswith("__MACOSX/"):
                        with archive.open(member) as inner:
                            yield from _unpacked(f"{name}/{member}", inner)  # pyright: ignore[reportArgumentType]
        case _:
            yield name, iter(lambda: stream.read(BLOCK), b"")


def _only_column(name: str, blocks: Iterable[bytes]) -> Iterator[str]:
    """The cells of a .csv with one column."""
    for line, cells in table_cells(name, lines_of(name, blocks)):
        if len(cells) > 1:
            problem = f"expected one column of text, got {len(cells)}; a file that is no table should not end with .csv"
            raise row_error(name, line, problem)
        yield "".join(cells)


def _joined(rows: Iterable[str]) -> Iterator[bytes]:
    """Rows as lines, in blocks."""
    lines = (row if row.endswith("\n") else row + "\n" for row in rows)
    while block := "".join(islice(lines, ROWS)):
        yield block.encode()


def _guarded(name: str, blocks: Iterator[bytes], budget: list[int]) -> Iterator[bytes]:
    """The same blocks; errors name the line where a file is damaged, and the unpacked size is limited."""
    line = 1
    try:
        for block in blocks:
            budget[0] -= len(block)
            if budget[0] < 0:
                raise ValueError(
                    f"data: expected text, but {name} unpacks to more than {RATIO} times its size; unpack it first"
                )
            yield block
            line += block.count(b"\n")
    except BROKEN as error:
        raise ValueError(f"data: cannot read {name} beyond line {line}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _hub(source: str, tables: bool) -> Source:
    """A dataset of the hub as a source."""
    splits = _hub_splits(source)
    for split, rows in splits.items():
        if not tables and "text" not in rows.column_names:
            raise ValueError(f"data: expected a column text in {source}, split {split}, got {', '.join(rows.column_names)}")
    suffix = ".jsonl" if tables else ".txt" if len(splits) > 1 else ""

    def documents() -> Iterator[Document]:
        for split, rows in splits.items():
            lines = _objects(rows) if tables else (row["text"] or "" for row in _rows_of(rows.select_columns("text")))
            yield f"{source}/{split}{suffix}", _joined(lines)

    return Source(source, documents, _hub_files(splits), tables=tables)


def _objects(rows: Any) -> Iterator[str]:
    """Rows of a dataset as JSON; classes are given by name, unknown ones (below 0) as null."""
    import datasets

    classes = {name: kind for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)}
    for row in _rows_of(rows):
        for name, kind in classes.items():
            number = row[name]
            row[name] = None if number is None or number < 0 else kind.int2str(number)
        yield json.dumps(row, default=str)


def _rows_of(rows: Any) -> Iterator[dict[str, Any]]:
    """Rows of a dataset, read in batches, a hundred times as fast as one by one."""
    for batch in rows.iter(ROWS):
        yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))


def hub_images(source: str) -> Source:
    """The encoded images of hf:NAME[:CONFIG] as documents SPLIT/CLASS/NUMBER.png.

    Images without a label have the suffix .unlabelled. A slash in the name of a class becomes a division slash.

    Raises:
        ValueError: If a split does not have one column of images and one of classes.
    """
    splits = _hub_splits(source)
    import datasets

    columns = {}
    for split, rows in splits.items():
        kinds = {
            kind: [name for name, feature in rows.features.items() if isinstance(feature, kind)]
            for kind in (datasets.Image, datasets.ClassLabel)
        }
        if any(len(names) != 1 for names in kinds.values()):
            columns_of = ", ".join(f"{name} of {type(feature).__name__}" for name, feature in rows.features.items())
            raise ValueError(
                f"data: expected a column of Image and one of ClassLabel in {source}, split {split}, got {columns_of}"
            )
        columns[split] = [names[0] for names in kinds.values()]

    def documents() -> Iterator[Document]:
        for split, rows in splits.items():
            image, label = columns[split]
            classes, stored = rows.features[label], rows.cast_column(image, datasets.Image(decode=False))
            for n, row in enumerate(stored):
                content, known = row[image]["bytes"], row[label] is not None and row[label] >= 0
                name = classes.int2str(row[label]).replace("/", "\N{DIVISION SLASH}") if known else ""
                folder = f"{name}/{n}.png" if known else f"{n}.unlabelled"
                yield f"{source}/{split}/{folder}", iter([content or Path(row[image]["path"]).read_bytes()])

    return Source(source, documents, _hub_files(splits))


def _hub_files(splits: Any) -> tuple[Path, ...]:
    return tuple(Path(file["filename"]) for rows in splits.values() for file in rows.cache_files)


def _hub_splits(source: str) -> Any:
    """The splits of a dataset, loaded into the cache of `datasets`."""
    import datasets

    name, _, config = source.removeprefix("hf:").partition(":")
    try:
        return datasets.load_dataset(name, config or None)
    except Exception as error:  # of the network, of the hub, of files on it
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"data: expected hf:NAME or hf:NAME:CONFIG of a dataset on the hub or in its cache here, but {source} gave "
            f"{type(error).__name__}: {reason}"
        ) from None
