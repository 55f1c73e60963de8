"""Time series: times that increase, and values beside them, of a table; or one that is drawn, with a day and a week.

Times stay what they are, however far apart; nothing is filled in between.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

import numpy as np

from isopos.catalog import expect
from isopos.lab.data.labelled import lines_of, place_of, table_cells, wrong
from isopos.lab.data.sources import find
from isopos.times import seconds_since_1970

__all__ = ["UNITS", "Series", "drawn", "read"]

UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
LARGEST = 1e30  # of values: what float32 holds of their squares, in standard deviations, ends before
MISSING = ("", "-", "?", "na", "n/a", "nan", "none", "null")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COMPACT = {4: "%Y", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}  # dates of so many digits
YEARS = range(1800, 2200)  # of them


@dataclass(frozen=True, eq=False)
class Series:
    """Values by time."""

    name: str  # of the source
    titles: tuple[str, ...]  # of the columns of values
    seconds: np.ndarray  # since 1970, increasing: float64 [n]
    values: np.ndarray  # float64 [n c], not a number where there is none
    empty: int = 0  # rows without any value, which are left out
    offsets: np.ndarray | None = None  # of the rows' clocks from that of `seconds`, in seconds: float64 [n]; None: all are 0

    @property
    def sha256(self) -> str:
        """A fingerprint of all that it holds."""
        offsets = b"" if self.offsets is None else self.offsets.tobytes()
        parts = (repr(self.titles).encode(), self.seconds.tobytes(), self.values.tobytes(), offsets)
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @property
    def clock_seconds(self) -> np.ndarray:
        """What the rows' clocks show, in seconds since 1970: float64 ``[n]``."""
        return self.seconds if self.offsets is None else self.seconds + self.offsets


def read(source: str, time: str = "", values: Sequence[str] = (), unit: str = "seconds") -> Series:
    """The series in a .csv or .tsv, perhaps packed.

    Args:
        source: Its path.
        time: The column of times, by name, or by number from 1 on where the first line has no names; the first by default.
            Times are ISO 8601, with offsets from UTC in all rows or in none, or numbers. Where the unit is
            seconds, digits alone that are a date (20240131, 202401311830) are read as one, and refused where they may well
            be either (2020, 2024013118).
        values: The columns of values; all others by default. Empty cells, and NaN, NA, null, none, - and ? are missing.
        unit: Of times that are numbers, and count from the beginning of 1970.

    Raises:
        ValueError: Where there is no such table or column, or a row is broken (with file, line and column).
    """
    expect("unit", unit, UNITS)
    found = None
    for name, blocks in () if source.startswith("hf:") else find(source, tables=True).read(raw=False):
        if PurePosixPath(name).suffix.lower() in (".csv", ".tsv"):
            if found is not None:
                raise ValueError(f"data: expected one table, got more in {source}; name one file")
            found = _read(source, name, table_cells(name, lines_of(name, blocks)), time, values, unit)
    if found is None:
        raise ValueError(f"data: expected a table that ends with .csv or .tsv, got {source}")
    return found


def _read(
    source: str, name: str, lines: Iterator[tuple[int, list[str]]], time: str, values: Sequence[str], unit: str
) -> Series:
    at, places, titles, first, own_zone = -1, list[int](), list[str](), None, 0.0
    seconds, offsets, rows, empty = list[float](), list[float](), list[list[float]](), 0
    for line, row in lines:
        cells = [cell.strip() for cell in row]
        if not places:
            titles = [str(n) for n in range(1, len(cells) + 1)]
            bare = _moment(cells[place_of(name, titles, time or "1")], unit) if (time or "1") in titles else None
            titles = cells if bare is None else titles
            at = place_of(name, titles, time) if time else 0
            places = [place_of(name, titles, one) for one in values] or [n for n in range(len(titles)) if n != at]
            if at in places or not places:
                raise ValueError(f"values: expected columns beside that of times, {titles[at]}, got {', '.join(titles)}")
            if bare is None:
                continue
        moment = _moment(cells[at], unit, first)
        if first is None and isinstance(moment, float) and unit == "seconds" and (date := _compact(cells[at])):
            wanted = f"a time or a number, but this may be either; write {date.isoformat()}, or {cells[at]}.0 for a number"
            raise wrong(name, line, f"{titles[at]}: expected {wanted}, got {cells[at]!r}", at + 1)
        if moment is None or type(moment) is not type(first or moment):
            kind = "a number" if isinstance(first, float) else "an ISO time"
            what = "an ISO time or a number" if first is None else f"{kind}, as the first"
            raise wrong(name, line, f"{titles[at]}: expected {what}, got {cells[at][:40]!r}", at + 1)
        try:
            shown, zone = _clock(moment, UNITS[unit])
            first, own_zone = (moment, zone) if first is None else (first, own_zone)
            offset = zone - own_zone
            now = shown - offset  # by the clock of the first time
            _ = EPOCH + timedelta(seconds=now)
        except OverflowError:
            what = f"a time in the years 1 to 9999, in {unit} since 1970 where it is a number; --time-unit names others"
            raise wrong(name, line, f"{titles[at]}: expected {what}, got {cells[at][:40]!r}", at + 1) from None
        mixed = _aware(moment) is not _aware(first)
        if mixed or (seconds and now <= seconds[-1]):
            what = "an offset from UTC for all times or for none" if mixed else "a time after the one above"
            raise wrong(name, line, f"{titles[at]}: expected {what}, got {cells[at][:40]!r}", at + 1)
        found = [_value(name, line, titles[place], cells[place], place + 1) for place in places]
        if all(map(math.isnan, found)):
            empty += 1
        else:
            seconds.append(now)
            offsets.append(offset)
            rows.append(found)
    if not rows:
        raise ValueError(f"data: expected rows with a time and a value, got none in {name}")
    shown = np.array(offsets) if any(offsets) else None
    return Series(source, tuple(titles[place] for place in places), np.array(seconds), np.array(rows), empty, shown)


def _moment(text: str, unit: str, first: float | datetime | None = None) -> float | datetime | None:
    """A time, as a number or as ISO 8601; None where it is neither.

    Digits alone are a date among dates; as the first time they are one where they cannot well be a number.
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
    """The date and time that digits alone are, or None."""
    if not (text.isascii() and text.isdigit() and len(text) in COMPACT):
        return None
    try:
        date = datetime.strptime(text, COMPACT[len(text)])
    except ValueError:
        return None
    return date if date.year in YEARS else None


def _number(text: str) -> float:
    """The number that a text is; infinite where it is none. Python's underscores between digits are none of a table."""
    try:
        return math.inf if "_" in text else float(text)
    except ValueError:
        return math.inf


def _clock(moment: float | datetime, unit: int) -> tuple[float, float]:
    """Seconds since 1970 as the clock of a time shows them, and how far that is from UTC."""
    if not isinstance(moment, datetime):
        return float(moment) * unit, 0.0
    shown, passed = seconds_since_1970(moment)
    return shown, round(shown - passed, 6)  # offsets have microseconds at most


def _aware(moment: float | datetime) -> bool:
    return isinstance(moment, datetime) and moment.tzinfo is not None


def _value(name: str, line: int, title: str, text: str, column: int) -> float:
    if text.lower() in MISSING:
        return math.nan
    value = _number(text)
    if not math.isfinite(value):
        raise wrong(name, line, f"{title}: expected a number or nothing, got {text[:40]!r}; --values names columns", column)
    if abs(value) > LARGEST:
        raise wrong(name, line, f"{title}: expected a number of at most {LARGEST:g}, got {text[:40]!r}", column)
    return value


def drawn(seed: int = 0, count: int = 5000) -> Series:
    """Load and temperature at irregular times, from Monday, 1 January 2024 on: a function of the arguments.

    Half an hour to an hour and a half lie between two rows, and every hundredth time a gap of 6 to 48 hours, too. Both have
    a day, the load a week as well, a trend and an answer to cold; both have noise that is forgotten in 8 hours. Of each a
    fiftieth is missing.

    Examples:
        >>> series = drawn()
        >>> series.values.shape, series.titles, round((series.seconds[-1] - series.seconds[0]) / 86400)
        ((4998, 2), ('load', 'temperature'), 270)
    """
    random = np.random.default_rng(seed)
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
