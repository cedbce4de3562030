"""Durations and times: an accepted text has one meaning, and everything else is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlq.config import durations
from sqlq.database.timeouts import AnswerTimeout
from sqlq.errors import ConfigurationError
from tests.kit import for_each


@for_each(
    ("given", "ms"),
    [
        *(("0s", 0), ("500ms", 500), ("1d", 86_400_000), ("1h30m", 5_400_000), ("1.5s", 1_500)),
        *((" 5m ", 300_000), ("1m1ms", 60_001), (timedelta(minutes=5), 300_000)),
        *((timedelta(microseconds=1_999), 1), (timedelta(days=36_600), durations.MAX_MS)),
    ],
)
def test_durations(given: Any, ms: int) -> None:
    assert durations.milliseconds(given, "delay") == durations.milliseconds(f"{ms}ms", "delay") == ms


@given(st.text())
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        ms = durations.milliseconds(text, "delay")
    except ConfigurationError:
        return
    assert 0 <= ms <= durations.MAX_MS


def test_aware_times_are_converted_to_utc() -> None:
    moment = durations.aware(datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), "available_at")
    assert (moment, moment.tzinfo) == (datetime(2030, 1, 1, tzinfo=UTC), UTC)
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    second = durations.aware(first.replace(fold=1), "at")
    assert [second, durations.aware(first, "at")] == [
        datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (1, 0)
    ]


@for_each(
    ("given", "reason"),
    [
        (datetime(2030, 1, 1), "has no time zone"),  # noqa: DTZ001  # the mistake itself
        ("2030-01-01T00:00:00Z", "give a datetime"),
        (None, "give a datetime"),
        (durations.FAR, "between the years 1970 and 9997"),
        (datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=1))), "between the years 1970 and 9997"),
        (datetime(9997, 12, 31, 23, tzinfo=timezone(-timedelta(hours=1))), "between the years 1970 and 9997"),
    ],
)
def test_naive_and_distant_times_are_refused(given: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^available_at is .*{reason}"):
        durations.aware(given, "available_at")


WRITTEN: dict[Callable[[float], str], dict[float, str]] = {
    durations.readable: {
        0: "0 ms", 0.00833: "0.01 ms", 999.4: "999 ms", 999.7: "1 s", 1_250: "1.25 s", 60_300: "60.3 s",
        119_600: "2 min", 130_200: "2 min 10 s", 3_599_400: "59 min 59 s", 3_599_600: "1 h",
        172_769_000: "47 h 59 min", 172_771_000: "2 d", 356_400_000: "4 d 3 h",
        durations.MAX_MS: "36,600 d",
    },
    durations.rate: {
        0: "0 a second", 1_173.2: "1,170 a second", 3.5512: "3.55 a second", 0.1: "0.1 a second",
        0.05: "3 a minute", 0.00833: "0.5 a minute", 0.00001: "0.86 a day", 0.0000001: "0.01 a day",
    },
    durations.in_units: {
        0: "0 bytes", 999: "999 bytes", 1_000: "0.98 KiB", 1023 * 1024: "1 MiB", 3 << 40: "3 TiB",
    },
}  # fmt: skip


@for_each("write", WRITTEN)
def test_numbers_are_written_for_people(write: Callable[[float], str]) -> None:
    assert {number: write(number) for number in WRITTEN[write]} == WRITTEN[write]


@for_each(
    ("seconds", "past", "future"),
    [
        *((0.1, "just now", "just now"), (3.2, "3 s ago", "in 3 s"), (60.3, "60 s ago", "in 60 s")),
        *((130.2, "2 min ago", "in 2 min 10 s"), (5_400.2, "90 min ago", "in 1 h 30 min")),
        *((48_960.2, "14 h ago", "in 13 h 36 min"), (345_600.2, "4 d ago", "in 4 d")),
    ],
)
def test_times_are_written_for_people(seconds: float, past: str, future: str) -> None:
    assert durations.ago(datetime.now(UTC) - timedelta(seconds=seconds)) == past
    assert durations.until(datetime.now(UTC) - timedelta(seconds=seconds)) == past
    assert durations.until(datetime.now(UTC) + timedelta(seconds=seconds)) == future


@given(st.floats(0, 1e15))
def test_no_measured_number_has_an_exponent(number: float) -> None:
    for write in (durations.amount, durations.rate, durations.readable, durations.in_units):
        text = write(number)
        assert "e+" not in text
        assert "e-" not in text


# -- the timeout of an answer --------------------------------------------------------------------------------


def test_the_timeout_grows_with_slow_answers_up_to_its_maximum() -> None:
    patience = AnswerTimeout(4.0, 20.0)
    assert patience.seconds() == float("inf"), "outside of the block a migration may take its time"
    with patience:
        assert patience.seconds() == 4.0
        patience.gave_up()
        assert patience.seconds() == 8.0
        patience.gave_up()
        patience.gave_up()
        assert patience.seconds() == 20.0
        patience.start_over()
        assert patience.seconds() == 4.0
    assert patience.seconds() == float("inf")
