"""Schedules in the database: ticks, what code declares, what operators change. The clock is an input."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import ConfigurationError, SqlqError
from sqlq.store import schedules
from sqlq.store.workers import notify
from sqlq.testing import drain, on_database, tick
from sqlq.testing.database import write_declared
from tests.kit import execute, needs, received, refuse, rows_read, span, wait_until
from tests.kit.postgresql import async_database_url

pytestmark = pytest.mark.each_database

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


@pytest.fixture
def report(app: sqlq.App) -> sqlq.Task[..., Any]:
    return app.task(name="report", queue="reports", max_attempts=1)(lambda n=0: None)


def moments(jobs: list[sqlq.JobDetails]) -> list[float]:
    """The minutes from noon that jobs are for."""
    return [(job.scheduled_for - NOON) / MINUTE for job in jobs if job.scheduled_for is not None]


# -- ticks ---------------------------------------------------------------------------------------------------


def test_each_run_gets_one_job_with_its_time(app: sqlq.App, engine: Engine) -> None:
    seen: list[tuple[Any, Any]] = []

    def report(n: int) -> None:
        job = sqlq.current_job()
        seen.append((job.schedule, job.scheduled_for))

    task = app.task(name="report", max_attempts=1)(report)
    app.schedule("minutely", task.new(7).set(priority=3, label="x"), cron="* * * * *")
    assert tick(app, NOON, since=NOON) == []
    found = [job for step in range(1, 4) for job in tick(app, NOON + step * MINUTE)]
    assert moments(found) == [1, 2, 3]
    assert {(job.schedule, job.task, job.priority, job.label) for job in found} == {
        ("minutely", "report", 3, "x")
    }
    assert tick(app, NOON + 3 * MINUTE) == []
    assert drain(app).finished == 3
    assert sorted(seen) == [("minutely", NOON + step * MINUTE) for step in range(1, 4)]
    assert app.jobs.get(found[0].id).scheduled_for == NOON + MINUTE
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT schedule, scheduled_for FROM job_states ORDER BY id")).all()
    assert [row.schedule for row in rows] == ["minutely"] * 3
    assert "2030-01-01" in str(rows[0].scheduled_for)
    details = app.schedules.get("minutely")
    assert (details.state, details.ticks, details.skipped, details.last_at) == (
        "active",
        3,
        0,
        NOON + 3 * MINUTE,
    )
    assert [(job.id, job.state) for job in details.jobs] == [(job.id, "finished") for job in reversed(found)]
    assert [moment - NOON for moment in details.upcoming] == [step * MINUTE for step in range(4, 14)]


def test_an_ordinary_job_is_of_no_schedule(app: sqlq.App, report: Any) -> None:
    job = app.jobs.get(app.enqueue(report.new()).id)
    assert (job.schedule, job.scheduled_for) == (None, None)


def test_a_failed_job_keeps_its_scheduled_time_through_a_retry(app: sqlq.App) -> None:
    task = app.task(name="broken", max_attempts=1)(lambda: 1 / 0)
    app.schedule("hourly", task.new(), every="1h")
    [job] = tick(app, NOON + HOUR, since=NOON)
    drain(app)
    failed = app.jobs.get(job.id)
    assert (failed.state, failed.schedule, failed.scheduled_for) == ("failed", "hourly", NOON + HOUR)
    app.jobs.retry([job.id])
    assert app.jobs.get(job.id).scheduled_for == NOON + HOUR
    assert app.schedules.get("hourly").jobs[0].state == "available"


@pytest.mark.parametrize(
    ("catch_up", "wanted", "skipped"),
    [("latest", [300], 4), ("all", [60, 120, 180, 240, 300], 0), ("skip", [], 5)],
)
def test_catch_up_decides_which_missed_runs_are_enqueued(
    app: sqlq.App, report: Any, catch_up: Any, wanted: list[int], skipped: int
) -> None:
    app.schedule("hourly", report.new(), every="1h", catch_up=catch_up)
    assert moments(tick(app, NOON + 5 * HOUR + 30 * MINUTE, since=NOON)) == wanted
    assert app.schedules.get("hourly").skipped == skipped
    assert moments(tick(app, NOON + 6 * HOUR)) == [360]


def test_a_clock_step_runs_no_schedule_twice(app: sqlq.App, report: Any) -> None:
    app.schedule("minutely", report.new(), cron="* * * * *", catch_up="all")
    found = tick(app, NOON + 3 * MINUTE, since=NOON)
    for step in (1, -600, 2, 5, 3, 5, 90, 4, 91):
        found += tick(app, NOON + step * MINUTE)
    assert moments(found) == list(range(1, 92))


def test_overlap_skips_or_delays_a_run_while_the_last_job_lives(app: sqlq.App, report: Any) -> None:
    app.schedule("skips", report.new(), every="1h", overlap="skip")
    app.schedule("waits", report.new(), every="1h", overlap="queue")
    app.schedule("goes on", report.new(), every="1h")
    first = tick(app, NOON + HOUR, since=NOON)
    assert sorted(str(job.schedule) for job in first) == ["goes on", "skips", "waits"]
    assert [job.schedule for job in tick(app, NOON + 2 * HOUR)] == ["goes on"]
    assert [app.schedules.get(name).skipped for name in ("skips", "waits")] == [1, 0]
    drain(app)
    later = tick(app, NOON + 2 * HOUR + MINUTE)
    assert [(job.schedule, job.scheduled_for) for job in later] == [("waits", NOON + 2 * HOUR)]


def test_a_run_whose_unique_key_is_live_is_skipped(app: sqlq.App, report: Any) -> None:
    app.schedule("hourly", report.new().set(unique_key="one"), every="1h")
    assert len(tick(app, NOON + HOUR, since=NOON)) == 1
    assert tick(app, NOON + 2 * HOUR) == []
    found = app.schedules.get("hourly")
    assert (found.ticks, found.skipped) == (1, 1)


def test_schedules_with_repeats_ends_or_at_end(app: sqlq.App, report: Any) -> None:
    app.schedule("thrice", report.new(), every="1h", repeats=3)
    app.schedule("till two", report.new(), every="1h", ends=NOON + 2 * HOUR)
    app.schedule("once", report.new(), at=NOON + 90 * MINUTE)
    found = [*tick(app, NOON, since=NOON)]
    for hour in range(1, 7):
        found += tick(app, NOON + hour * HOUR)
    of = {
        name: moments([job for job in found if job.schedule == name])
        for name in ("thrice", "till two", "once")
    }
    assert of == {"thrice": [60, 120, 180], "till two": [60], "once": [90]}
    assert {(each.state, each.upcoming) for each in app.schedules.list()} == {("ended", ())}


def test_jitter_delays_a_job_and_keeps_its_scheduled_time(app: sqlq.App, report: Any) -> None:
    app.schedule("hourly", report.new().set(delay="10s"), every="1h", jitter="30m")
    write_declared(app)
    with app.database.begin() as conn:
        schedules.begin_at(conn, datetime.now(UTC) - 2 * HOUR)
    ((new, job),) = schedules.tick(app.database).jobs
    found = app.jobs.get(job.id)
    assert found.scheduled_for == new.scheduled_for
    assert found.scheduled_for is not None
    assert found.available_at is not None
    assert (
        timedelta(seconds=10)
        <= found.available_at - found.scheduled_for
        < 30 * MINUTE + timedelta(seconds=10)
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("priority", str(2**70)), ("on_failure", '"\\ud800"')],
    ids=["priority", "on_failure"],
)
def test_a_job_that_no_driver_takes_fails_alone(
    app: sqlq.App, engine: Engine, option: str, value: str
) -> None:
    """SQL may write into a schedule's row what is JSON, and neither a number nor a text of any database."""
    note = app.task(name="note")(lambda: None)
    for name in ("before", "odd", "later"):
        app.schedules.add(name, note.new(), every="1m")
    with engine.begin() as conn:
        odd = {"options": f'{{"{option}": {value}}}'}
        conn.execute(text("UPDATE sqlq_schedules SET options = :options WHERE name = 'odd'"), odd)
    ticked = schedules.tick(app.database, at=datetime.now(UTC) + timedelta(minutes=2))
    assert sorted(str(job.schedule) for job in app.jobs.list()) == ["before", "later"]
    assert list(ticked.errors) == ["odd"]
    assert app.schedules.get("odd").state == "failing"


def test_a_stored_plan_beyond_all_bounds_hides_no_other(app: sqlq.App, engine: Engine, report: Any) -> None:
    for name in ("a", "b"):
        app.schedules.add(name, report.new(), every="1h", repeats=7)
    execute(
        engine,
        "UPDATE sqlq_schedules SET plan = replace(plan, '7', :many) WHERE name = 'a'",
        many=str(10**30),
    )
    assert [(each.name, each.state) for each in app.schedules.list()] == [("a", "failing"), ("b", "active")]
    assert "from 1 to 1,000,000,000" in str(app.schedules.get("a").error)


def test_a_failing_schedule_stops_no_other_and_recovers(app: sqlq.App, engine: Engine, report: Any) -> None:
    for name in ("a", "b", "c"):
        app.schedules.add(name, report.new(), every="1h")
    tick(app, NOON, since=NOON)
    with engine.begin() as conn:
        conn.execute(text("UPDATE sqlq_schedules SET options = '{\"moon\": 1}' WHERE name = 'a'"))
        conn.execute(text("UPDATE sqlq_schedules SET payload = 'refused' WHERE name = 'b'"))
    refuse(engine, "INSERT ON jobs", "NEW.payload = 'refused'", "refused here")
    done = schedules.tick(app.database, at=NOON + HOUR)
    assert [new.schedule for new, _ in done.jobs] == ["c"]
    assert done.errors.keys() == {"a", "b"}
    found = {each.name: each for each in app.schedules.list()}
    assert [(found[name].state, found[name].ticks) for name in "abc"] == [
        ("failing", 0),
        ("failing", 0),
        ("active", 1),
    ]
    assert "options of its job cannot be read" in str(found["a"].error)
    assert "refused here" in str(found["b"].error)
    with pytest.raises(SqlqError, match="the schedule 'a' could not be ticked"):
        tick(app, NOON + HOUR + 2 * MINUTE)
    execute(engine, "UPDATE sqlq_schedules SET options = '{}', payload = '{}'")
    later = tick(app, NOON + HOUR + 5 * MINUTE)
    assert [(job.schedule, job.scheduled_for) for job in later] == [("a", NOON + HOUR), ("b", NOON + HOUR)]
    assert {each.state for each in app.schedules.list()} == {"active"}


@needs("sessions")
def test_one_of_two_concurrent_ticks_enqueues_and_neither_waits(app: sqlq.App, report: Any) -> None:
    for name in ("a", "b"):
        app.schedule(name, report.new(), every="1h")
    tick(app, NOON, since=NOON)
    with app.database.begin() as conn:
        conn.execute(text("SET LOCAL lock_timeout = '10s'"))
        assert len(schedules._tick(conn, at=NOON + HOUR).jobs) == 2
        other = sqlq.App(app.database.engine.url)
        done: list[schedules.Ticked] = []
        thread = threading.Thread(target=lambda: done.append(schedules.tick(other.database, at=NOON + HOUR)))
        thread.start()
        thread.join(30)
        assert [each.seen for each in done] == [0]
    assert schedules.tick(other.database, at=NOON + HOUR).seen == 0
    other.close()


def test_concurrent_ticks_lose_and_double_no_run(app: sqlq.App, report: Any) -> None:
    names, minutes = [f"s{n}" for n in range(20)], 15
    for name in names:
        app.schedule(name, report.new(), cron="* * * * *", catch_up="all")
    tick(app, NOON, since=NOON)
    others = [sqlq.App(app.database.engine.url) for _ in range(4)]

    def work(other: sqlq.App) -> None:
        for step in range(1, minutes + 1):
            while schedules.tick(other.database, at=NOON + step * MINUTE).seen:
                pass

    threads = [threading.Thread(target=work, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tick(app, NOON + minutes * MINUTE)
    found = app.jobs.list(limit=10_000)
    assert sorted((str(job.schedule), job.scheduled_for) for job in found) == sorted(
        (name, NOON + step * MINUTE) for name in names for step in range(1, minutes + 1)
    )
    for other in others:
        other.close()


@needs("listen")
def test_a_tick_wakes_idle_workers(app: sqlq.App, engine: Engine, report: Any) -> None:
    app.schedules.add("hourly", report.new(), every="1h")
    tick(app, NOON, since=NOON)
    connection = engine.raw_connection()
    driver: Any = connection.driver_connection
    driver.autocommit = True
    driver.execute(f'LISTEN "{notify.channel(app.database.schema)}"')
    assert schedules.tick(app.database, at=NOON).jobs == []
    assert list(driver.notifies(timeout=0, stop_after=1)) == []
    assert len(schedules.tick(app.database, at=NOON + HOUR).jobs) == 1
    wait_until(lambda: list(driver.notifies(timeout=0.1, stop_after=1)), what="the hint")
    connection.close()


# -- ten thousand --------------------------------------------------------------------------------------------


def fill(engine: Engine, number: int) -> None:
    """Add schedules of which none is due."""
    with engine.begin() as conn:
        conn.execute(
            text(
                "INSERT INTO sqlq_schedules (name, task, queue, payload, plan) "
                "VALUES (:name, 'report', 'reports', '{}', '{\"every\": 60000}')"
            ),
            [{"name": f"far{i}"} for i in range(number)],
        )
        conn.execute(text(f"UPDATE sqlq_schedules SET next_at = last_at + {span(engine, 86_400)}"))
    analyze = {
        "postgresql": "VACUUM (ANALYZE)",
        "sqlite": "ANALYZE",
        "mariadb": "ANALYZE TABLE sqlq_schedules",
    }
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql(analyze[engine.dialect.name])


def test_a_tick_reads_only_what_is_due(app: sqlq.App, engine: Engine, report: Any) -> None:
    fill(engine, 10_000)
    app.schedule("due", report.new(), every="1h")
    write_declared(app)
    with app.database.begin() as conn:
        conn.execute(text(f"UPDATE {where(app)}sqlq_schedules SET next_at = created_at WHERE name = 'due'"))
        with received(conn) as got:
            schedules._tick(conn, at=None)
            conn.execute(schedules._NEXT_MS).all()
        assert got
        for statement, parameters in got:
            if "sqlq_schedules" not in statement:
                continue
            if engine.dialect.name == "postgresql":
                explained = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement
                (plan,) = conn.exec_driver_sql(explained, parameters).scalar_one()
                touched = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
                assert touched < 40, json.dumps(plan, indent=1)
                assert "Seq Scan" not in json.dumps(plan)
            elif engine.dialect.name == "mariadb":
                if statement.startswith("SELECT"):
                    assert rows_read(conn, statement, parameters) < 40, statement
            else:
                steps = [
                    row[3] for row in conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)
                ]
                read = [step for step in steps if "sqlq_schedules" in step]
                assert read
                assert not [step for step in read if "INDEX" not in step], steps


def where(app: sqlq.App) -> str:
    return f"{app.database.schema}." if app.database.schema else ""


# -- what code declares --------------------------------------------------------------------------------------


def deploy(url: Any, service: str | None = None, **plans: str) -> sqlq.App:
    """A release whose code declares these schedules, each of the task of its name."""
    app = sqlq.App(url, service=service)
    for name, cron in plans.items():
        app.task(name=name, schedule=cron)(lambda: None)
    return app


def starts(app: sqlq.App, hours_ago: float = 0) -> schedules.Followed:
    """A worker of a release starts, whose supervisor began so long ago."""
    declared = app._schedules
    return schedules.follow(
        app.database, declared.declared, declared.service, app.tasks, lambda: hours_ago * 3_600_000
    )


def plans(app: sqlq.App) -> dict[str, tuple[str, str]]:
    return {each.name: (each.state, str(each.plan)) for each in app.schedules.list()}


def test_declared_schedules_follow_the_deploy(database_url: str) -> None:
    old = deploy(database_url, kept="0 1 * * *", changed="0 2 * * *", gone="0 3 * * *")
    done = starts(old, hours_ago=5)
    assert (sorted(done.added), done.changed, done.retired) == (["changed", "gone", "kept"], [], [])
    assert starts(old, hours_ago=5)[:4] == ([], [], [], [])
    new = deploy(database_url, kept="0 1 * * *", changed="0 4 * * *", fresh="0 5 * * *")
    new.task(name="gone")(lambda: None)
    assert starts(new, hours_ago=1)[:4] == (["fresh"], ["changed"], ["gone"], [])
    wanted = {
        "kept": ("active", "0 1 * * *"),
        "changed": ("active", "0 4 * * *"),
        "gone": ("retired", "0 3 * * *"),
        "fresh": ("active", "0 5 * * *"),
    }
    assert plans(new) == wanted
    # a child that the old supervisor starts anew
    assert starts(old, hours_ago=5)[:4] == ([], [], [], [])
    assert plans(new) == wanted
    # back to the old release, by a new start
    assert sorted(starts(old).changed) == ["changed", "gone"]
    assert plans(new)["gone"] == ("active", "0 3 * * *")
    for app in (old, new):
        app.close()


def test_a_deploy_with_an_unchanged_plan_catches_up_missed_runs(database_url: str) -> None:
    app = deploy(database_url, hourly="0 * * * *")
    tick(app, NOON, since=NOON)
    starts(app)
    assert moments(tick(app, NOON + HOUR)) == [60]
    changed = sqlq.App(database_url)
    changed.task(name="hourly", queue="other", schedule="0 * * * *")(lambda: None)
    assert starts(changed).changed == ["hourly"], "its job, not its plan"
    assert moments(found := tick(changed, NOON + 2 * HOUR)) == [120]
    assert found[0].queue == "other"
    for each in (app, changed):
        each.close()


@pytest.mark.parametrize("services", [("shop", "mail"), (None, "mail"), ("shop", None), (None, None)])
def test_services_on_one_database_retire_only_their_own_schedules(
    database_url: str, services: tuple[str | None, str | None]
) -> None:
    shop = deploy(database_url, services[0], nightly="0 1 * * *")
    mail = deploy(database_url, services[1], weekly="0 2 * * 1")
    for _ in range(2):
        for app in (shop, mail):
            assert starts(app).retired == []
    assert plans(shop) == {"nightly": ("active", "0 1 * * *"), "weekly": ("active", "0 2 * * 1")}
    without = deploy(database_url, services[0])
    if services[0] is None:
        without.task(name="nightly")(lambda: None)
    assert starts(without).retired == ["nightly"]
    assert plans(shop)["weekly"] == ("active", "0 2 * * 1")
    for app in (shop, mail, without):
        app.close()


def test_a_schedule_of_another_service_is_left_alone(database_url: str) -> None:
    shop = deploy(database_url, "shop", nightly="0 1 * * *")
    mail = deploy(database_url, "mail", nightly="0 2 * * *", added="0 3 * * *")
    starts(shop)
    shop.schedules.add("added", shop.tasks["nightly"].new(), cron="0 4 * * *")
    assert sorted(starts(mail).foreign) == ["added", "nightly"]
    assert plans(shop) == {"nightly": ("active", "0 1 * * *"), "added": ("active", "0 4 * * *")}
    for app in (shop, mail):
        app.close()


def test_a_pause_holds_across_deploys(database_url: str) -> None:
    old = deploy(database_url, weekly="0 2 * * 1")
    starts(old, hours_ago=2)
    assert old.schedules.pause("weekly")
    new = deploy(database_url, weekly="0 4 * * 1")
    assert starts(new).changed == ["weekly"]
    assert plans(new) == {"weekly": ("paused", "0 4 * * 1")}
    assert tick(new, NOON + timedelta(days=30), since=NOON) == []
    assert new.schedules.resume("weekly")
    assert not new.schedules.resume("weekly")
    assert plans(new) == {"weekly": ("active", "0 4 * * 1")}
    for app in (old, new):
        app.close()


# -- at run time ---------------------------------------------------------------------------------------------


def test_a_schedule_is_added_in_the_callers_transaction(app: sqlq.App, engine: Engine, report: Any) -> None:
    with Session(engine) as session:
        app.schedules.add("hourly", report.new(), every="1h", session=session)
        session.rollback()
        assert app.schedules.list() == []
        app.schedules.add("hourly", report.new(), every="1h", session=session)
        with pytest.raises(ConfigurationError, match="there is a schedule 'hourly' already"):
            app.schedules.add("hourly", report.new(), every="2h", session=session)
        with pytest.raises(ConfigurationError, match="has no moment to come"):
            app.schedules.add("past", report.new(), at=datetime(2020, 1, 1, tzinfo=UTC), session=session)
        app.schedules.add("daily", report.new(), cron="0 3 * * *", session=session)
        session.commit()
    assert {each.name for each in app.schedules.list()} == {"hourly", "daily"}
    assert app.schedules.list()[0].is_declared is False
    # a worker that starts leaves them alone
    assert starts(app)[:4] == ([], [], [], [])
    with engine.connect() as conn:
        app.schedules.pause("daily", session=conn)
        conn.rollback()
    assert app.schedules.get("daily").state == "active"
    app.schedules.remove("daily")
    with pytest.raises(sqlq.errors.ScheduleNotFoundError, match="there is no schedule 'dayly'"):
        app.schedules.get("dayly")
    with pytest.raises(sqlq.errors.ScheduleNotFoundError, match="there is no schedule 'dayly'"):
        app.schedules.pause("dayly")


def test_a_schedule_runs_first_at_its_start_when_that_is_now(app: sqlq.App, report: Any) -> None:
    start = datetime.now(UTC)
    app.schedules.add("hourly", report.new(), every="1h", starts=start)
    whole = start.replace(microsecond=start.microsecond // 1000 * 1000)
    assert [job.scheduled_for for job in tick(app, start + MINUTE)] == [whole]
    assert tick(app, start + MINUTE) == []
    assert [job.scheduled_for for job in tick(app, start + HOUR)] == [whole + HOUR]


def test_a_schedule_has_no_run_at_a_start_long_ago(app: sqlq.App, report: Any) -> None:
    start = datetime.now(UTC) - 2 * MINUTE
    app.schedules.add("hourly", report.new(), every="1h", starts=start)
    assert tick(app, start + 3 * MINUTE) == []


def test_a_schedule_is_added_on_a_drivers_connection(app: sqlq.App, engine: Engine, report: Any) -> None:
    connection = engine.raw_connection()
    app.schedules.add("hourly", report.new(), every="1h", session=connection)
    connection.rollback()
    assert app.schedules.list() == []
    app.schedules.add("hourly", report.new(), every="1h", session=connection)
    connection.commit()
    connection.close()
    assert str(app.schedules.get("hourly").plan) == "every 1 h"


def test_a_paused_schedule_enqueues_no_runs(app: sqlq.App, report: Any) -> None:
    app.schedules.add("hourly", report.new(), every="1h")
    app.schedules.pause("hourly")
    assert not app.schedules.pause("hourly")
    assert tick(app, NOON + 5 * HOUR) == []
    app.schedules.resume("hourly")
    assert moments(tick(app, NOON + HOUR, since=NOON)) == [60]


def test_run_enqueues_beside_the_plan(app: sqlq.App, report: Any) -> None:
    app.schedules.add("hourly", report.new(7), every="1h")
    job = app.jobs.get(app.schedules.run("hourly").id)
    assert (job.schedule, job.state) == ("hourly", "available")
    assert job.scheduled_for is not None
    assert abs(job.scheduled_for - datetime.now(UTC)) < timedelta(minutes=1)
    found = app.schedules.get("hourly")
    assert (found.ticks, [each.id for each in found.jobs]) == (0, [job.id])


def test_a_schedules_job_takes_no_result_of_a_step(app: sqlq.App, report: Any) -> None:
    job = report.new(sqlq.Flow().add(report.new(1)).result)
    for add in (app.schedule, app.schedules.add):
        with pytest.raises(
            ConfigurationError, match=r"'hourly' is the result of step 1 .*: a schedule has no"
        ):
            add("hourly", job, every="1h")
    assert tick(app, NOON) == []


@needs("file")
def test_a_test_ticks_on_its_own_database(app: sqlq.App, report: Any, tmp_path: Any) -> None:
    app.schedule("hourly", report.new(), every="1h")
    with on_database(app, f"sqlite:///{tmp_path}/own.db"):
        assert moments(tick(app, NOON + HOUR, since=NOON)) == [60]
    assert app.schedules.list() == []
    with pytest.raises(ConfigurationError, match="has no time zone"):
        tick(app, datetime(2030, 1, 1))  # noqa: DTZ001


# -- for asynchronous code -----------------------------------------------------------------------------------


def test_an_asynchronous_session_is_joined(app: sqlq.App, report: Any) -> None:
    async def work() -> None:
        url = app.database.engine.url
        engine = create_async_engine(async_database_url(url.render_as_string(hide_password=False)))
        if url.get_backend_name() == "sqlite":
            sqlq.configure_sqlite(engine)
        async with AsyncSession(engine) as session:
            await app.schedules.aadd("nightly", report.new(), cron="0 3 * * *", session=session)
            await session.rollback()
            assert await app.schedules.alist() == []
            await app.schedules.aadd("nightly", report.new(), cron="0 3 * * *", session=session)
            await session.commit()
        await engine.dispose()
        assert [each.name for each in app.schedules.list()] == ["nightly"]

    asyncio.run(work())
