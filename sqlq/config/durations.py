"""Durations, times and counts as people write them, and as sqlq stores them.

Only the database's clock decides what is due or expired. Durations cross the boundary in whole milliseconds.
A time given by the caller must carry its time zone, because a naive one means another instant on every
machine.
"""

from __future__ import annotations

import re
import time
from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta

from sqlq.errors import ConfigurationError

Duration = timedelta | str
"""A `timedelta`, or text such as "500ms", "30s", "5m", "2h", "1d", "1h30m"."""

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
MAX_MS = 100 * 366 * _UNITS["d"]
"""A century: longer is a mistake, and would leave the range of a database's timestamps."""
FAR = datetime(9998, 1, 1, tzinfo=UTC)
"""The due time of a blocked job. It lies behind every job that a claim may take, so that a claim neither
takes nor reads it. (NULL would do so too, but `available_at` is NOT NULL.)"""
_YEARS = range(1970, FAR.year)


def milliseconds(value: Duration, name: str) -> int:
    """Return a duration as whole milliseconds.

    `name` names the option in the message. Numbers without a unit are refused, since half of all readers take
    them for milliseconds. Raises `error` for anything but a duration from zero to a hundred years.

    >>> milliseconds("1h30m", "delay")
    5400000
    """
    if isinstance(value, timedelta):
        ms = value // timedelta(milliseconds=1)
    elif isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
        ms = round(min(total, MAX_MS + 1))  # a number of 400 digits is infinite as a float
    else:
        form = "write it as in" if isinstance(value, str) else "give a timedelta or text such as"
        raise ConfigurationError(f'{name} is {value!r}: {form} "30s", "10m", "2h" or "1d"')
    if not 0 <= ms <= MAX_MS:
        raise ConfigurationError(f"{name} is {value!r}: it must lie between zero and a hundred years")
    return ms


def aware(value: datetime, name: str) -> datetime:
    """Return the time in UTC. Raises `error` if it has no time zone, or a year that not every time zone can
    show.

    Between times of one other zone Python compares and adds wall-clock times, which are ambiguous in the hour
    that comes twice.

    A worker whose connection has another zone could not read such a row, nor a command list it.

    >>> aware(datetime(2030, 1, 1), "available_at")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    sqlq.errors.ConfigurationError: available_at is 2030-01-01 00:00:00, which has no time zone: ...
    """
    if not isinstance(value, datetime):
        raise ConfigurationError(f"{name} is {value!r}: give a datetime with a time zone")
    if value.utcoffset() is None:
        raise ConfigurationError(
            f"{name} is {value}, which has no time zone: use datetime.now(timezone.utc) or .replace(tzinfo=…)"
        )
    at = value.astimezone(UTC) if MINYEAR < value.year < MAXYEAR else value
    if at.year not in _YEARS:
        raise ConfigurationError(
            f"{name} is {value}: it must lie between the years {_YEARS.start} and {_YEARS.stop - 1}"
        )
    return at  # guard: times-are-in-utc


def readable(ms: float, *, whole: bool = False) -> str:
    """Write a duration the way a person would, in two units, or rounded to a whole one.

    >>> readable(28.31), readable(1250), readable(130_000), readable(49_200_000), readable(4 * 86_400_000)
    ('28.3 ms', '1.25 s', '2 min 10 s', '13 h 40 min', '4 d')
    >>> readable(130_000, whole=True), readable(49_200_000, whole=True), readable(59_600, whole=True)
    ('2 min', '14 h', '60 s')
    """
    seconds = abs(ms) / 1000
    if seconds < 119.5:
        if whole:
            return f"{seconds:.0f} s"
        return f"{amount(abs(ms))} ms" if seconds < 0.9995 else f"{amount(seconds)} s"
    number, rest, large, small = *divmod(round(seconds), 60), "min", "s"
    if number >= (120 if whole else 60):
        number, rest, large, small = *divmod(round(seconds / 60), 60), "h", "min"
        if number >= 48:
            number, rest, large, small = *divmod(round(seconds / 3_600), 24), "d", "h"
    if whole:
        return f"{number + (rest >= (12 if large == 'd' else 30))} {large}"
    return f"{number:,} {large} {rest} {small}" if rest else f"{number:,} {large}"


def amount(number: float) -> str:
    """Write a measured number with three digits that count.

    >>> amount(1173), amount(12.5), amount(0.00833), amount(999.7)
    ('1,170', '12.5', '0.01', '1,000')
    """
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{round(rounded, 2):g}"


def rate(a_second: float) -> str:
    """Write how often something happens, in the unit in which it is no small fraction.

    >>> rate(1173), rate(0.00833), rate(0.0001), rate(0)
    ('1,170 a second', '0.5 a minute', '0.36 an hour', '0 a second')
    """
    units = {1: "a second", 60: "a minute", 3_600: "an hour", 86_400: "a day"}
    length = next((each for each in units if a_second * each >= 0.1), 86_400 if a_second else 1)
    return f"{amount(a_second * length)} {units[length]}"


def compact(ms: int) -> str:
    """Write a duration in its largest whole unit, as options take it.

    >>> compact(90_000), compact(120_000), compact(0)
    ('90s', '2m', '0s')
    """
    if ms == 0:
        return "0s"
    unit = next(unit for unit in ("d", "h", "m", "s", "ms") if ms % _UNITS[unit] == 0)
    return f"{ms // _UNITS[unit]}{unit}"


def span(seconds: float, *, whole: bool = False) -> str:
    """Write a duration in seconds as `readable` does; one below zero, which clocks may show, is zero."""
    return readable(max(0.0, seconds) * 1000, whole=whole)


def age(at: datetime) -> str:
    """Write how long ago a time was, by this machine's clock, to a whole unit: "2 min"."""
    return span((datetime.now(UTC) - at).total_seconds(), whole=True)


def ago(at: datetime) -> str:
    """Write when a time was, by this machine's clock: "2 min ago", "just now"."""
    return "just now" if (text := age(at)) == "0 s" else f"{text} ago"


def until(at: datetime) -> str:
    """Write when a time is, by this machine's clock: "in 13 h 40 min", or "3 min ago"."""
    seconds = (at - datetime.now(UTC)).total_seconds()
    return f"in {span(round(seconds))}" if seconds >= 0.5 else ago(at)


def counted(number: int, one: str, many: str | None = None) -> str:
    """Write a number with its noun: "1 job", "2 jobs"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def rounded(number: int) -> int:
    """Round an estimate to two digits.

    >>> rounded(1_234_567)
    1200000
    """
    return round(number, 2 - len(str(number)))


def about(number: int) -> str:
    """Write an estimate: "about 350,000", "about 1.2 million".

    >>> about(1_234_567)
    'about 1.2 million'
    """
    number = rounded(number)
    millions = number / 1_000_000
    return f"about {number:,}" if millions < 1 else f"about {millions:,g} million"


def in_units(number: float) -> str:
    """Write a number of bytes the way a person would.

    >>> in_units(3 << 20)
    '3 MiB'
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(number) < 999.5:
            return f"{amount(number)} {unit}"
        number /= 1024
    return f"{amount(number)} TiB"


def written(at: datetime, timespec: str = "seconds") -> str:
    """Write a time for a person, in this machine's time zone: "2026-11-22 03:35:07+00:00"."""
    return at.astimezone().isoformat(sep=" ", timespec=timespec)


def ending(end: datetime | None) -> str:
    """Write the end of a pause, as it follows "is paused"."""
    return "" if end is None else f" until {written(end)}"


def since_boot() -> float:
    """Return the seconds since this machine was started, with those in which it slept, where the system
    counts them.

    `time.monotonic` stands still while a Linux machine sleeps.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
