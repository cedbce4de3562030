"""Durations and times: an accepted text has one meaning, and everything else is refused in a sentence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlq.config.durations import FAR, MAX_MS, aware, milliseconds, readable
from sqlq.errors import ConfigurationError
from tests.kit import for_each


@for_each(
    ("given", "ms"),
    [
        ("0s", 0),
        ("500ms", 500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("1h30m", 5_400_000),
        ("1.5s", 1_500),
        (" 5m ", 300_000),
        ("1m1ms", 60_001),
        (timedelta(minutes=5), 300_000),
        (timedelta(microseconds=1_999), 1),
        (timedelta(days=36_600), MAX_MS),
    ],
)
def test_durations(given: Any, ms: int) -> None:
    assert milliseconds(given, "delay") == ms


@for_each(
    "given",
    [
        "",
        "5",
        "m",
        "5 minutes",
        "-5m",
        "5m-1s",
        "1e3s",
        "five",
        ".5s",
        5,
        5.0,
        True,
        None,
        b"5m",
        ["5m"],
        datetime(2030, 1, 1, tzinfo=UTC),
    ],
)
def test_a_bad_duration_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^delay is .*: give a timedelta or text such as"):
        milliseconds(given, "delay")


@for_each("given", ["36601d", "9" * 400 + "d", timedelta(microseconds=-1), timedelta(days=-1), timedelta.max])
def test_durations_out_of_range_are_refused(given: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^delay is .*: it must lie between zero and a hundred years$"
    ):
        milliseconds(given, "delay")


@given(st.integers(0, MAX_MS))
def test_text_and_timedelta_agree(ms: int) -> None:
    assert milliseconds(f"{ms}ms", "delay") == milliseconds(timedelta(milliseconds=ms), "delay") == ms


@given(st.text())
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        ms = milliseconds(text, "delay")
    except ConfigurationError:
        return
    assert 0 <= ms <= MAX_MS


def test_aware_times_are_converted_to_utc() -> None:
    moment = aware(datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), "available_at")
    assert (moment, moment.tzinfo) == (datetime(2030, 1, 1, tzinfo=UTC), UTC)
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    second = aware(first.replace(fold=1), "at")
    assert [second, aware(first, "at")] == [datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (1, 0)]


@for_each(
    ("given", "reason"),
    [
        (datetime(2030, 1, 1), "has no time zone"),  # noqa: DTZ001  # the mistake itself
        ("2030-01-01T00:00:00Z", "give a datetime"),
        (None, "give a datetime"),
        (datetime.min.replace(tzinfo=UTC), "between the years 1970 and 9997"),
        (FAR, "between the years 1970 and 9997"),
        (datetime.max.replace(tzinfo=UTC), "between the years 1970 and 9997"),
        (datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=1))), "between the years 1970 and 9997"),
        (datetime(9997, 12, 31, 23, tzinfo=timezone(-timedelta(hours=1))), "between the years 1970 and 9997"),
    ],
)
def test_naive_and_distant_times_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^available_at is .*{reason}"):
        aware(given, "available_at")


@for_each(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (850, "850 ms"),
        (12_500, "12.5 s"),
        (119_000, "119 s"),
        (180_000, "3 min"),
        (9_000_000, "2.5 h"),
        (345_600_000, "4 d"),
    ],
)
def test_durations_for_people(ms: int, text: str) -> None:
    assert readable(ms) == text
