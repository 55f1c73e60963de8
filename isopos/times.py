"""Times as positions: clock time and elapsed time."""

from collections.abc import Iterable
from datetime import datetime
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

EPOCH = datetime(1970, 1, 1)
FIRST, LAST = -62135596800, 253402300800  # the years 1 to 9999, the range of datetime
AWARE, NAIVE, NUMBER = "an offset from UTC", "no offset from UTC", "a number of seconds"


def timestamps(
    times: Iterable[Any] | np.ndarray[Any, Any] | Tensor,
    *,
    start: datetime | str | float | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Time of day, time of week and absolute time: float64 ``[*b t 3]``, the positions of `isopos.clock`.

    Columns are hours since midnight (0 to 24), days since Monday's midnight (0 to 7), and hours since `start`. The first two
    are local clock time, because days and weeks of people follow their clocks. The third is elapsed time, in UTC for times
    with offsets from UTC.

    If all times have the same offset, or none, a delay is one shift of all three columns. If the offset changes, as with
    daylight saving time, the clock skips or repeats an hour and the third column does not. Times without offsets cannot
    express this: first convert them to a time zone (`datetime.replace` with `tzinfo=ZoneInfo(...)`), or for a uniform clock
    to UTC (`astimezone`).

    Args:
        times: A list of datetimes (or pandas Timestamps), of text in ISO 8601, of numpy's datetime64, or of seconds since
            1970 in UTC, as from `time.time`; or an array ``[*b t]`` of datetime64 or numbers, or a tensor of numbers. Either
            all or none have offsets from UTC.
        start: Zero of absolute time; the first time by default. It has an offset from UTC if the times have; numbers are
            always accepted.
        device: Device of the result.

    Raises:
        TypeError: For values of other types.
        ValueError: For text that is no time, mixed kinds, and times outside the years 1 to 9999.

    Examples:
        >>> timestamps(["2024-01-01 06:00", "2024-01-03 18:30"]).tolist()  # a Monday, and the Wednesday after
        [[6.0, 0.25, 0.0], [18.5, 2.7708333333333335, 60.5]]
        >>> timestamps(["2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00"])[:, [0, 2]].tolist()  # summer time began
        [[1.0, 0.0], [3.0, 1.0]]
    """
    clock, elapsed, kind = _read(times)
    if start is None and not elapsed.numel():
        raise ValueError("start: expected a time, since times is empty, got none")
    if start is None:
        first = elapsed.flatten()[0]
    else:
        _, (first,), other = _read([start])
        if kind is not None and kind != other and NUMBER not in (kind, other):
            raise ValueError(f"start: expected {kind}, as the times have, got {other} in {start!r}")
    week = (clock + 3 * 86400) % (7 * 86400)  # 1970 began on a Thursday
    return torch.stack((clock % 86400 / 3600, week / 86400, (elapsed - first) / 3600), -1).to(device)


def seconds_since_1970(time: datetime) -> tuple[float, float]:
    """Seconds since 1970 in local clock time and in UTC; equal for a time without an offset."""
    clock = (time.replace(tzinfo=None) - EPOCH).total_seconds()
    offset = None if time.tzinfo is None else time.utcoffset()
    return clock, clock - (offset.total_seconds() if offset else 0.0)


def _read(times: Any) -> tuple[Tensor, Tensor, str | None]:
    """Seconds since 1970 in clock time and in UTC, ``[*b t]``, and the kind of times; None if there are none."""
    if isinstance(times, np.ndarray) and times.dtype.kind in "OU":
        times = times.tolist()
    if isinstance(times, Tensor | np.ndarray):
        clock, kind = _numbers(times)
        elapsed = clock
    elif isinstance(times, str | datetime | Real) or not isinstance(times, Iterable):
        raise TypeError(f"times: expected a list, an array or a tensor of times, got {times!r}; one time is [{times!r}]")
    else:
        rows, kind = [], None
        for time in times:
            *row, other = _one(time)
            kind = kind or other
            if other != kind:
                raise ValueError(f"times: expected {kind}, as in the first, in all of them, got {other} in {time!r}")
            rows.append(row)
        clock, elapsed = torch.tensor(rows, dtype=torch.float64).view(-1, 2).unbind(-1)
    if not clock.ndim or not ((clock >= FIRST) & (clock < LAST)).all():
        raise ValueError(
            f"times: expected finite ones of the years 1 to 9999, [*b t], got {list(clock.shape)}"
            + (f" from {clock.min():.6g} to {clock.max():.6g} seconds since 1970" if clock.numel() else "")
        )
    return clock, elapsed, kind


def _numbers(times: Tensor | np.ndarray[Any, Any]) -> tuple[Tensor, str]:
    """Seconds since 1970 for a tensor or an array, and whether they were numbers."""
    if isinstance(times, np.ndarray) and times.dtype.kind == "M":
        return torch.from_numpy((times - np.datetime64(0, "s")) / np.timedelta64(1, "s")), NAIVE
    real = (
        times.dtype.kind in "iuf" if isinstance(times, np.ndarray) else times.dtype != torch.bool and not times.is_complex()
    )
    if not real:
        raise TypeError(f"times: expected datetime64 or numbers of seconds since 1970, got {times.dtype}")
    return torch.as_tensor(times if isinstance(times, Tensor) else np.ascontiguousarray(times)).to(torch.float64), NUMBER


def _one(time: Any) -> tuple[float, float, str]:
    """Seconds since 1970 in clock time and in UTC for one time, and its kind."""
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            raise ValueError(f"times: expected ISO 8601, as 2024-01-31T18:30+01:00, got {time!r}") from None
    if isinstance(time, datetime):
        return *seconds_since_1970(time), NAIVE if time.tzinfo is None else AWARE
    if isinstance(time, np.datetime64):
        seconds = float((time - np.datetime64(0, "s")) / np.timedelta64(1, "s"))
        return seconds, seconds, NAIVE
    if isinstance(time, Real) and not isinstance(time, bool):
        return float(time), float(time), NUMBER
    raise TypeError(f"times: expected datetimes, text in ISO 8601 or seconds since 1970, got {type(time).__name__}")
