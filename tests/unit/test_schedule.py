"""The times of a schedule, and which of them get a job: no clock, no database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import sqlq
from sqlq import Schedule
from sqlq.errors import ConfigurationError
from sqlq.model.job import NewJob
from sqlq.model.schedule import MAX_CAUGHT_UP, QUEUE_LOOK, options_text, planned, read, template, turn
from tests.kit import for_each

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
SPRING = {BERLIN: datetime(2026, 3, 29, tzinfo=UTC), NEW_YORK: datetime(2026, 3, 8, tzinfo=UTC)}
AUTUMN = {BERLIN: datetime(2026, 10, 25, tzinfo=UTC), NEW_YORK: datetime(2026, 11, 1, tzinfo=UTC)}
DAY = timedelta(days=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def within(plan: Schedule, begin: datetime, end: datetime) -> list[datetime]:
    """Return the times after one and up to another, each by a call of its own, as ticks make it."""
    found: list[datetime] = []
    moment = plan.next(begin)
    while moment is not None and moment <= end:
        found.append(moment)
        moment = plan.next(moment)
    return found


# -- nights on which clocks are changed ----------------------------------------------------------------------


@for_each(
    ("cron", "zone", "night", "times"),
    [
        # clocks go from 02:00 to 03:00: what is left out comes at once after the gap
        ("0 2 * * *", BERLIN, SPRING, ["03-28 02:00+01", "03-29 03:00+02", "03-30 02:00+02"]),
        ("30 2 * * *", BERLIN, SPRING, ["03-28 02:30+01", "03-29 03:00+02", "03-30 02:30+02"]),
        ("0 2 * * *", NEW_YORK, SPRING, ["03-07 02:00-05", "03-08 03:00-04", "03-09 02:00-04"]),
        ("30 2 * * *", NEW_YORK, SPRING, ["03-07 02:30-05", "03-08 03:00-04", "03-09 02:30-04"]),
        # two of the same schedule do not come together after it
        ("0 2,3 * * *", BERLIN, SPRING, ["03-29 03:00+02", "03-30 02:00+02", "03-30 03:00+02"]),
        # clocks go back, in Berlin from 03:00 to 02:00, in New York from 02:00 to 01:00: once, at the first
        ("0 2 * * *", BERLIN, AUTUMN, ["10-24 02:00+02", "10-25 02:00+02", "10-26 02:00+01"]),
        ("30 2 * * *", BERLIN, AUTUMN, ["10-24 02:30+02", "10-25 02:30+02", "10-26 02:30+01"]),
        ("0 2 * * *", NEW_YORK, AUTUMN, ["10-31 02:00-04", "11-01 02:00-05", "11-02 02:00-05"]),
        ("30 1 * * *", NEW_YORK, AUTUMN, ["10-31 01:30-04", "11-01 01:30-04", "11-02 01:30-05"]),
    ],
)
def test_a_daily_schedule_is_neither_skipped_nor_doubled(
    cron: str, zone: str, night: dict[str, datetime], times: list[str]
) -> None:
    plan = Schedule(cron, timezone=zone)
    wanted = [at(f"2026-{time.replace(' ', 'T')}:00") for time in times]
    begin = wanted[0] - timedelta(minutes=1)
    assert list(islice(plan.moments(begin), 3)) == wanted
    assert within(plan, begin, wanted[-1]) == wanted
    # whoever looks within the hour that comes twice, or just after the gap, finds none again
    for minutes in range(0, 72 * 60, 13):
        now = begin + timedelta(minutes=minutes)
        if now < wanted[-1]:
            assert plan.next(now) == next(moment for moment in wanted if moment > now)
    assert night[zone].date() in {moment.astimezone(ZoneInfo(zone)).date() for moment in wanted}


@for_each("zone", [BERLIN, NEW_YORK])
@for_each("night", [SPRING, AUTUMN])
@for_each(
    ("make", "period"),
    [
        (lambda zone: Schedule("*/15 * * * *", timezone=zone), timedelta(minutes=15)),
        (lambda zone: Schedule("0 * * * *", timezone=zone), timedelta(hours=1)),
        (lambda zone: Schedule("* * * * *", timezone=zone), timedelta(minutes=1)),
        (lambda zone: Schedule(every="1h"), timedelta(hours=1)),
    ],
)
def test_a_plan_of_hours_or_minutes_runs_once_a_period(
    zone: str, night: dict[str, datetime], make: Callable[[str], Schedule], period: timedelta
) -> None:
    plan, begin = make(zone), night[zone] - DAY
    moments = list(takewhile(lambda moment: moment <= begin + 3 * DAY, plan.moments(begin)))
    assert {later - earlier for earlier, later in pairwise(moments)} == {period}
    assert len(moments) == 3 * DAY // period


def test_every_is_counted_from_1970_or_from_starts() -> None:
    begin = at("2026-01-01T10:20:30+00:00")
    assert Schedule(every="1h").next(begin) == at("2026-01-01T11:00:00+00:00")
    plan = Schedule(every="90s", starts=at("2026-01-01T12:00:10+02:00"))
    expected = [at(f"2026-01-01T10:{time}+00:00") for time in ("00:10", "01:40", "03:10")]
    assert within(plan, begin - DAY, at("2026-01-01T10:04:00+00:00")) == expected


def test_runs_lie_from_starts_on_and_before_ends() -> None:
    plan = Schedule("0 3 * * *", starts=at("2026-01-02T03:00:00Z"), ends=at("2026-01-04T03:00:00Z"))
    runs = [at("2026-01-02T03:00:00Z"), at("2026-01-03T03:00:00Z")]
    assert list(plan.moments(at("2020-01-01T00:00:00Z"))) == runs
    assert Schedule(at=at("2026-01-02T03:00:00Z")).next(at("2026-01-02T03:00:00Z")) is None
    # what no database keeps is left away, else it would be due before it is
    assert Schedule(at=at("2026-01-02T03:00:00.123456Z")).at == at("2026-01-02T03:00:00.123Z")


@for_each(
    "plan",
    [
        Schedule("*/7 * * * *", timezone=BERLIN),
        Schedule("0 3 1 * *", timezone=BERLIN),
        Schedule("30 2 * * *", timezone=BERLIN),
        Schedule(every="11s"),
    ],
)
@for_each("hours", [0.001, 1, 30, 24 * 10])
def test_the_newest_runs_of_a_long_outage_are_found_directly(plan: Schedule, hours: float) -> None:
    until = at("2026-11-02T12:34:56Z")
    since = until - timedelta(hours=hours)
    every = within(plan, since, until) if plan.every is None or hours < 2 else None
    for most in (1, 10, 1_001):
        moments, later = plan.due(since, until, most)
        if every is not None:
            assert moments == every[-most:]
        assert len(moments) <= most
        assert later == plan.next(until)


# -- what becomes of moments ---------------------------------------------------------------------------------

NOON = at("2026-01-01T12:00:00Z")
MINUTE = timedelta(minutes=1)


def decide(
    plan: Schedule, since: datetime, now: datetime, *, alive: bool = False
) -> tuple[list[int], int, int, float | None]:
    """Return the minutes from noon of the runs that get a job, the number skipped, and two more times.

    These are the time up to which it is decided, and that of the next look.
    """
    done = turn(plan, last_at=since, now=now, ticks=0, alive=alive)
    minutes = [(moment - NOON) // MINUTE for moment in done.runs]
    next_at = None if done.next_at is None else (done.next_at - NOON) / MINUTE
    return minutes, done.skipped, (done.last_at - NOON) // MINUTE, next_at


def minutely(**options: Any) -> Schedule:
    return Schedule("* * * * *", **options)


@for_each(
    ("options", "late", "wanted"),
    [
        ({"alive": True}, 0.1, ([1], 0, 1, 2)),
        ({"alive": True, "overlap": "skip"}, 0.1, ([], 1, 1, 2)),
        ({"alive": True, "overlap": "queue"}, 0.1, ([], 0, 0, 1.1 + QUEUE_LOOK / MINUTE)),
        ({}, 0.1, ([1], 0, 1, 2)),
        ({"catch_up": "all"}, 0.1, ([1], 0, 1, 2)),
        ({"catch_up": "skip"}, 0.1, ([1], 0, 1, 2)),
        ({}, 4.5, ([5], 4, 5, 6)),
        ({"catch_up": "all"}, 4.5, ([1, 2, 3, 4, 5], 0, 5, 6)),
        ({"catch_up": "skip"}, 4.5, ([5], 4, 5, 6)),
        ({"catch_up": "all", "repeats": 3}, 4.5, ([1, 2, 3], 2, 5, None)),
        ({"overlap": "skip", "catch_up": "all"}, 4.5, ([5], 4, 5, 6)),
        ({"overlap": "queue", "catch_up": "all"}, 4.5, ([1], 0, 1, 5.5 + QUEUE_LOOK / MINUTE)),
        ({"overlap": "queue"}, 4.5, ([5], 4, 5, 6)),
    ],
)
def test_catch_up_and_overlap_decide_about_missed_runs(
    options: dict[str, Any], late: float, wanted: tuple[Any, ...]
) -> None:
    plan = minutely(**{name: value for name, value in options.items() if name != "alive"})
    now, alive = NOON + MINUTE + late * MINUTE, "alive" in options
    assert decide(plan, NOON, now, alive=alive) == wanted


def test_catch_up_is_bounded() -> None:
    hourly = Schedule("0 * * * *", catch_up="skip")
    assert decide(hourly, NOON, NOON + 61 * MINUTE) == ([60], 0, 60, 120)
    assert decide(hourly, NOON, NOON + 61 * MINUTE + timedelta(seconds=1)) == ([], 1, 60, 120)
    moments, skipped, last, _ = decide(minutely(catch_up="all"), NOON, NOON + 5_000 * MINUTE)
    assert moments == list(range(5_001 - MAX_CAUGHT_UP, 5_001))
    assert (skipped, last) == (1, 5_000)


# -- in a row ------------------------------------------------------------------------------------------------


@for_each(
    "plan",
    [
        Schedule("0 3 * * *", timezone=BERLIN, jitter="5m", catch_up="all", overlap="queue", repeats=3),
        Schedule(every="1h30m", starts=NOON, ends=NOON + DAY),
        Schedule(at=NOON),
    ],
)
def test_a_stored_plan_is_read_equal(plan: Schedule) -> None:
    assert read(plan.as_text()) == plan


def test_a_template_keeps_the_options_of_the_job() -> None:
    job = NewJob("t", '{"args": [7]}', "mail", 5).set(
        priority=3, delay="5m", timeout="1m", label="x", headers={"a": 1}, unique_key="k"
    )
    assert template(job.task, job.queue, job.payload, options_text(job)) == job
    for options in ("[]", "{", '{"moon": 1}'):
        with pytest.raises(ConfigurationError, match="the options of its job cannot be read"):
            template("t", "q", "{}", options)


# -- declared in code ----------------------------------------------------------------------------------------


def test_declarations_are_checked_at_import() -> None:
    assert planned("0 3 * * *", timezone=BERLIN) == Schedule("0  3 * * *", timezone=BERLIN)
    assert planned(Schedule(every="1h")) == planned(None, every=timedelta(hours=1))
    with pytest.raises(ConfigurationError, match="a Schedule and jitter are given together"):
        planned(Schedule(every="1h"), jitter="1s")
    app = sqlq.App("sqlite:///nowhere.db")
    task = app.task(name="t")(lambda n: None)
    with pytest.raises(ConfigurationError, match=r"schedule is set, but u.*missing a required argument"):
        app.task(name="u", schedule="* * * * *")(lambda n: None)
    assert "u" not in app.tasks
    app.schedule("nightly", task.new(1), cron="0 3 * * *")
    app.schedule("nightly", task.new(1), cron="0 3 * * *")  # a module that is imported twice
    for job, options, said in (
        (task.new(2), {"cron": "0 3 * * *"}, "two schedules are named 'nightly'"),
        (task.new(1), {"cron": "0 4 * * *"}, "two schedules are named 'nightly'"),
        (task, {"cron": "0 4 * * *"}, "takes what task.new"),
        (task.new(1).set(available_at=NOON), {"every": "1h"}, "an available_at or start_by of its own"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            app.schedule("nightly", job, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the schedule's name has 256 characters"):
        app.schedule("n" * 256, task.new(1), cron="0 3 * * *")
    with pytest.raises(ConfigurationError, match="service is '': it must be text that is not blank"):
        sqlq.App(service="")


@for_each(
    ("nickname", "cron"),
    [("@hourly", "0 * * * *"), (" @Daily ", "0 0 * * *"), ("@weekly", "0 0 * * 0"), ("@yearly", "0 0 1 1 *")],
)
def test_a_nickname_stands_for_its_cron_expression(nickname: str, cron: str) -> None:
    assert Schedule(nickname) == Schedule(cron)
