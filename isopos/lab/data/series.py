"""Time series: increasing times with values, read from a table; and a synthetic example.

Times may be irregular; gaps are not filled.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

import numpy as np

from isopos.catalog import expect
from isopos.lab.data.sources import column_index, find_source, lines_of, row_error, separators, table_cells
from isopos.times import seconds_since_1970

UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
LARGEST = 1e30  # value; squares of larger ones, in standard deviations, overflow float32
MISSING = ("", "-", "?", "na", "n/a", "nan", "none", "null")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# dates by number of digits
COMPACT = {4: "%Y", 6: "%Y%m", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
YEARS, ALONE = range(1800, 2200), range(1000, 3000)  # of such dates; of a year without a month


@dataclass(frozen=True, eq=False)
class Series:
    """Values at increasing times."""

    name: str  # of the source
    titles: tuple[str, ...]  # of the columns of values
    seconds: np.ndarray  # since 1970, increasing: float64 [n]
    values: np.ndarray  # float64 [n c], NaN where missing
    empty: int = 0  # rows without any value, which are dropped
    offsets: np.ndarray | None = None  # local time minus `seconds`, in seconds: float64 [n]; None: all are 0

    @property
    def sha256(self) -> str:
        """A fingerprint of all contents."""
        offsets = b"" if self.offsets is None else self.offsets.tobytes()
        parts = (repr(self.titles).encode(), self.seconds.tobytes(), self.values.tobytes(), offsets)
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @property
    def clock_seconds(self) -> np.ndarray:
        """Local time in seconds since 1970: float64 ``[n]``."""
        return self.seconds if self.offsets is None else self.seconds + self.offsets


def read_series(source: str, time: str = "", values: Sequence[str] = (), unit: str = "seconds") -> Series:
    """The series in a .csv or .tsv file, which may be packed.

    Args:
        source: The path of the file.
        time: The column of times, by name, or by number from 1 on if the first line has no names; by default the first.
            Times are ISO 8601, with offsets from UTC in all rows or in none, or numbers. If the unit is seconds, digits
            that are a date (20240131, 202401311830) are read as a date, and ambiguous ones (2020, 202401, 2024013118) are an
            error. Years with fractions (2020.5) are numbers.
        values: The columns of values; by default all others. Empty cells, NaN, NA, null, none, - and ? are missing values.
        unit: The unit of times that are numbers, counted from the beginning of 1970.

    Raises:
        ValueError: If there is no such table or column, or a row is broken (with file, line and column).
    """
    expect("unit", unit, UNITS)
    series = None
    for name, blocks in () if source.startswith("hf:") else find_source(source, tables=True).read(raw=False):
        if PurePosixPath(name).suffix.lower() in (".csv", ".tsv"):
            if series is not None:
                raise ValueError(f"data: expected one table, got more in {source}; name one file")
            series = _read(source, name, table_cells(name, lines_of(name, blocks)), time, values, unit)
    if series is None:
        raise ValueError(f"data: expected a table that ends with .csv or .tsv, got {source}")
    return series


def _read(
    source: str, name: str, lines: Iterator[tuple[int, list[str]]], time: str, values: Sequence[str], unit: str
) -> Series:
    at, columns, titles, first, first_zone = -1, list[int](), list[str](), None, 0.0
    seconds, offsets, rows, empty = list[float](), list[float](), list[list[float]](), 0
    for line, row in lines:
        cells = [cell.strip() for cell in row]
        if not cells:
            continue
        if not columns:
            titles = [str(n) for n in range(1, len(cells) + 1)]
            bare = _moment(cells[column_index(name, titles, time or "1")], unit) if (time or "1") in titles else None
            titles = cells if bare is None else titles
            at = column_index(name, titles, time) if time else 0
            columns = [column_index(name, titles, one) for one in values] or [n for n in range(len(titles)) if n != at]
            used = [titles[n] for n in columns]
            if twice := next((title for title in used if used.count(title) > 1), ""):
                raise ValueError(f"values: expected different columns, got {twice} twice; rename or leave out one")
            if at in columns or not columns:
                remedy = f"; {text}" if (text := separators(titles)) else ""
                got = ", ".join(titles)
                raise ValueError(f"values: expected columns besides the times, {titles[at]}, got {got}{remedy}")
            if bare is None:
                continue
        moment = _moment(cells[at], unit, first)
        if first is None and isinstance(moment, float) and unit == "seconds" and (date := _compact(cells[at])):
            wanted = f"a time or a number, but this may be either; write {date.isoformat()}, or {cells[at]}.0 for a number"
            raise row_error(name, line, f"{titles[at]}: expected {wanted}, got {cells[at]!r}", at + 1)
        if moment is None or type(moment) is not type(moment if first is None else first):
            kind = "a number" if isinstance(first, float) else "an ISO time"
            what = "an ISO time or a number" if first is None else f"{kind}, as the first"
            raise row_error(name, line, f"{titles[at]}: expected {what}, got {cells[at][:40]!r}", at + 1)
        try:
            local, zone = _clock(moment, UNITS[unit])
            first, first_zone = (moment, zone) if first is None else (first, first_zone)
            offset = zone - first_zone
            now = local - offset  # in the zone of the first time
            _ = EPOCH + timedelta(seconds=now)
        except OverflowError:
            what = f"a time in the years 1 to 9999, in {unit} since 1970 where it is a number"
            what += "; divide milliseconds by 1000; --time-unit takes minutes, hours and days, too"
            raise row_error(name, line, f"{titles[at]}: expected {what}, got {cells[at][:40]!r}", at + 1) from None
        mixed = _aware(moment) is not _aware(first)
        if mixed or (seconds and now <= seconds[-1]):
            later = "a time after the one above, of rows in order of time"
            what = "an offset from UTC for all times or for none" if mixed else later
            raise row_error(name, line, f"{titles[at]}: expected {what}, got {cells[at][:40]!r}", at + 1)
        cells_read = [_value(name, line, titles[column], cells[column], column + 1) for column in columns]
        if all(map(math.isnan, cells_read)):
            empty += 1
        else:
            seconds.append(now)
            offsets.append(offset)
            rows.append(cells_read)
    if not rows:
        raise ValueError(f"data: expected rows with a time and a value, got none in {name}")
    zones = np.array(offsets) if any(offsets) else None
    return Series(source, tuple(titles[column] for column in columns), np.array(seconds), np.array(rows), empty, zones)


def _moment(text: str, unit: str, first: float | datetime | None = None) -> float | datetime | None:
    """A time, as a number or as ISO 8601; None if it is neither.

    After a first time that is a date, digits are a date; as the first time they are a date only if that is not ambiguous.
    """
    known = isinstance(first, datetime)
    if (known or (first is None and unit == "seconds" and len(text) in (8, 12, 14))) and (date := _compact(text)):
        return date
    number = _number(text)
    if math.isfinite(number):
        return number
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _compact(text: str) -> datetime | None:
    """The date and time that consists of digits; or None."""
    if not (text.isascii() and text.isdigit() and len(text) in COMPACT):
        return None
    try:
        date = datetime.strptime(text, COMPACT[len(text)])
    except ValueError:
        return None
    return date if date.year in (ALONE if len(text) == 4 else YEARS) else None


def _number(text: str) -> float:
    """The number that a text denotes; infinity if it is not a number. Underscores between digits are not allowed."""
    try:
        return math.inf if "_" in text else float(text)
    except ValueError:
        return math.inf


def _clock(moment: float | datetime, unit: int) -> tuple[float, float]:
    """Local time in seconds since 1970, and its offset from UTC in seconds."""
    if not isinstance(moment, datetime):
        return float(moment) * unit, 0.0
    local, utc = seconds_since_1970(moment)
    return local, round(local - utc, 6)  # offsets have microseconds at most


def _aware(moment: float | datetime) -> bool:
    return isinstance(moment, datetime) and moment.tzinfo is not None


def _value(name: str, line: int, title: str, text: str, column: int) -> float:
    if text.lower() in MISSING:
        return math.nan
    value = _number(text)
    if not math.isfinite(value):
        raise row_error(
            name, line, f"{title}: expected a number or nothing, got {text[:40]!r}; --values names columns", column
        )
    if abs(value) > LARGEST:
        raise row_error(name, line, f"{title}: expected a number of at most {LARGEST:g}, got {text[:40]!r}", column)
    return value


def example_series(count: int = 5000) -> Series:
    """A synthetic load and temperature at irregular times from Monday, 1 January 2024 on: a function of `count`.

    Rows are half an hour to an hour and a half apart; every hundredth gap is 6 to 48 hours longer. Both values have a daily
    cycle; the load has a weekly cycle, a trend, and rises with cold. Both have noise with a correlation time of 8 hours. A
    fiftieth of the values is missing.

    Examples:
        >>> series = example_series()
        >>> series.values.shape, series.titles, round((series.seconds[-1] - series.seconds[0]) / 86400)
        ((4998, 2), ('load', 'temperature'), 270)
    """
    random = np.random.default_rng(0)
    gaps = np.where(random.random(count) < 0.01, random.uniform(6, 48, count), 0)
    hours = np.cumsum(random.uniform(0.5, 1.5, count) + gaps)
    day, week = 2 * np.pi * hours / 24, hours // 24 % 7
    kept, noise = np.exp(-np.diff(hours, prepend=hours[0]) / 8)[:, None], random.standard_normal((count, 2))
    for n in range(1, count):
        noise[n] = kept[n] * noise[n - 1] + np.sqrt(1 - kept[n] ** 2) * noise[n]
    temperature = 10 - 6 * np.cos(2 * np.pi * hours / 8766) - 4 * np.cos(day - 2 * np.pi * 3 / 24) + 1.5 * noise[:, 0]
    shape = -np.cos(day - 2 * np.pi * 2 / 24) - 0.5 * np.cos(2 * day - 2 * np.pi * 4 / 24)
    load = 50 + 0.002 * hours + 10 * np.where(week < 5, 1, 0.3) * shape - 5 * (week >= 5)
    load += 0.5 * np.maximum(0, 12 - temperature) + 1.5 * noise[:, 1]
    values = np.stack((load, temperature), -1)
    values[random.random(values.shape) < 0.02] = np.nan
    kept = ~np.isnan(values).all(1)
    start = (datetime(2024, 1, 1, tzinfo=UTC) - EPOCH).total_seconds()
    titles = ("load", "temperature")
    return Series("load and temperature, drawn", titles, start + 3600 * hours[kept], values[kept], int((~kept).sum()))
