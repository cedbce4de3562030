"""Schedules in the database: ticks, what code declares, what operators change. The clock is an input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.errors import ConfigurationError, SqlqError
from sqlq.store import schedules
from sqlq.testing import drain, tick
from sqlq.testing.database import write_declared
from tests.kit import execute, for_each, insert_many, needs, received, refuse, rows_read, span
from tests.kit.callers import Caller, common_ways
from tests.kit.notifications import Listener
from tests.kit.plans import explained, pages, scans

pytestmark = pytest.mark.each_database

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


@pytest.fixture
def report(app: sqlq.App) -> sqlq.Task[..., Any]:
    return app.task(name="report", queue="reports", max_attempts=1)(lambda n=0: None)


def moments(jobs: list[sqlq.JobDetails]) -> list[float]:
    """The minutes from noon that jobs are for."""
    return [(job.scheduled_for - NOON) / MINUTE for job in jobs if job.scheduled_for is not None]


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
    shown: Any = {(job.schedule, job.task, job.priority, job.label) for job in found}
    assert shown == {("minutely", "report", 3, "x")}
    assert tick(app, NOON + 3 * MINUTE) == []
    assert drain(app).finished == 3
    assert sorted(seen) == [("minutely", NOON + step * MINUTE) for step in range(1, 4)]
    assert app.jobs.get(found[0].id).scheduled_for == NOON + MINUTE
    with engine.connect() as conn:
        rows = conn.execute(text("SELECT schedule, scheduled_for FROM job_states ORDER BY id")).all()
    shown = [(row.schedule, "2030-01-01" in str(row.scheduled_for)) for row in rows]
    assert shown == [("minutely", True)] * 3
    details = app.schedules.get("minutely")
    assert (details.state, details.ticks, details.skipped) == ("active", 3, 0)
    assert details.last_at == NOON + 3 * MINUTE
    assert [(job.id, job.state) for job in details.jobs] == [(job.id, "finished") for job in reversed(found)]
    assert [moment - NOON for moment in details.upcoming] == [step * MINUTE for step in range(4, 14)]


@for_each(
    ("catch_up", "wanted", "skipped"),
    [("latest", [300], 4), ("all", [60, 120, 180, 240, 300], 0), ("skip", [], 5)],
)
def test_catch_up_decides_which_missed_runs_are_enqueued(
    app: sqlq.App, report: Any, catch_up: Any, wanted: list[int], skipped: int
) -> None:
    app.schedule(catch_up, report.new(), every="1h", catch_up=catch_up)

    def ticked(at: datetime, **since: Any) -> list[float]:
        return moments([job for job in tick(app, at, **since) if job.schedule == catch_up])

    assert ticked(NOON + 5 * HOUR + 30 * MINUTE, since=NOON) == wanted
    assert app.schedules.get(catch_up).skipped == skipped
    assert ticked(NOON + 6 * HOUR) == [360]


def test_overlap_skips_or_delays_a_run_while_the_last_job_lives(app: sqlq.App, report: Any) -> None:
    app.schedule("skips", report.new(), every="1h", overlap="skip")
    app.schedule("waits", report.new(), every="1h", overlap="queue")
    app.schedule("goes on", report.new(), every="1h")
    app.schedule("has a key", report.new().set(unique_key="one"), every="1h")
    first = tick(app, NOON + HOUR, since=NOON)
    assert sorted(str(job.schedule) for job in first) == ["goes on", "has a key", "skips", "waits"]
    assert [job.schedule for job in tick(app, NOON + 2 * HOUR)] == ["goes on"]
    assert [app.schedules.get(name).skipped for name in ("skips", "waits", "has a key")] == [1, 0, 1]
    drain(app)
    later = tick(app, NOON + 2 * HOUR + MINUTE)
    assert [(job.schedule, job.scheduled_for) for job in later] == [("waits", NOON + 2 * HOUR)]


def test_schedules_with_repeats_ends_or_at_end(app: sqlq.App, report: Any) -> None:
    app.schedule("thrice", report.new(), every="1h", repeats=3)
    app.schedule("till two", report.new(), every="1h", ends=NOON + 2 * HOUR)
    app.schedule("once", report.new(), at=NOON + 90 * MINUTE)
    found = [*tick(app, NOON, since=NOON)]
    for hour in range(1, 7):
        found += tick(app, NOON + hour * HOUR)
    for name, wanted in {"thrice": [60, 120, 180], "till two": [60], "once": [90]}.items():
        assert moments([job for job in found if job.schedule == name]) == wanted
    assert {(each.state, each.upcoming) for each in app.schedules.list()} == {("ended", ())}


def test_jitter_delays_a_job_and_keeps_its_scheduled_time(app: sqlq.App, report: Any) -> None:
    app.schedule("hourly", report.new().set(delay="10s"), every="1h", jitter="30m")
    write_declared(app)
    app.database.run(lambda conn: schedules.begin_at(conn, datetime.now(UTC) - 2 * HOUR))
    ((new, job),) = schedules.tick(app.database).jobs
    found: Any = app.jobs.get(job.id)
    assert found.scheduled_for == new.scheduled_for
    assert timedelta() <= found.available_at - found.scheduled_for - timedelta(seconds=10) < 30 * MINUTE


@pytest.mark.parametrize(
    "odd", [f'{{"priority": {2**70}}}', '{"on_failure": "\\ud800"}'], ids=["priority", "on_failure"]
)
def test_a_job_that_no_driver_takes_fails_alone(app: sqlq.App, engine: Engine, odd: str) -> None:
    """SQL may write into a schedule's row what is JSON, and neither a number nor a text of any database."""
    for name in ("before", "odd", "later"):
        app.schedules.add(name, app.named("note").new(), every="1m")
    execute(engine, "UPDATE sqlq_schedules SET options = :odd WHERE name = 'odd'", odd=odd)
    ticked = schedules.tick(app.database, at=datetime.now(UTC) + timedelta(minutes=2))
    assert sorted(str(job.schedule) for job in app.jobs.list()) == ["before", "later"]
    assert list(ticked.errors) == ["odd"]
    assert app.schedules.get("odd").state == "failing"


def test_a_failing_schedule_stops_no_other_and_recovers(app: sqlq.App, engine: Engine, report: Any) -> None:
    for name in ("a", "b", "c"):
        app.schedules.add(name, report.new(), every="1h")
    app.schedules.add("d", report.new(), every="1h", repeats=7)
    tick(app, NOON, since=NOON)
    execute(engine, "UPDATE sqlq_schedules SET options = :odd WHERE name = 'a'", odd='{"moon": 1}')
    execute(engine, "UPDATE sqlq_schedules SET payload = 'refused' WHERE name = 'b'")
    beyond = "UPDATE sqlq_schedules SET plan = replace(plan, :was, :now) WHERE name = 'd'"
    execute(engine, beyond, was="7", now=str(10**30))
    refuse(engine, "INSERT ON jobs", "NEW.payload = 'refused'", "refused here")
    done = schedules.tick(app.database, at=NOON + HOUR)
    assert [new.schedule for new, _ in done.jobs] == ["c"]
    assert done.errors.keys() == {"a", "b", "d"}
    found = {each.name: each for each in app.schedules.list()}
    states = [(found[name].state, found[name].ticks) for name in "abcd"]
    assert states == [("failing", 0), ("failing", 0), ("active", 1), ("failing", 0)]
    assert "options of its job cannot be read" in str(found["a"].error)
    assert "refused here" in str(found["b"].error)
    assert "from 1 to 1,000,000,000" in str(found["d"].error)
    with pytest.raises(SqlqError, match="the schedule 'a' could not be ticked"):
        tick(app, NOON + HOUR + 2 * MINUTE)
    execute(engine, "UPDATE sqlq_schedules SET options = '{}', payload = '{}'")
    execute(engine, beyond, was=str(10**30), now="7")
    later = tick(app, NOON + HOUR + 5 * MINUTE)
    assert [(job.schedule, job.scheduled_for) for job in later] == [(name, NOON + HOUR) for name in "abd"]
    assert {each.state for each in app.schedules.list()} == {"active"}


@needs("sessions")
def test_one_of_two_concurrent_ticks_enqueues_and_neither_waits(app: sqlq.App, report: Any) -> None:
    for name in ("a", "b"):
        app.schedule(name, report.new(), every="1h")
    tick(app, NOON, since=NOON)
    with app.database.begin() as conn, ThreadPoolExecutor(1) as pool:
        assert len(schedules._tick(conn, at=NOON + HOUR).jobs) == 2
        assert pool.submit(schedules.tick, app.database, at=NOON + HOUR).result(30).seen == 0
    assert schedules.tick(app.database, at=NOON + HOUR).seen == 0


def test_concurrent_ticks_lose_and_double_no_run(app: sqlq.App, report: Any) -> None:
    names, steps = [f"s{n}" for n in range(20)], range(1, 16)
    for name in names:
        app.schedule(name, report.new(), cron="* * * * *", catch_up="all")
    tick(app, NOON, since=NOON)

    def work(_: int) -> None:
        with closing(sqlq.App(app.database.engine.url)) as other:
            for step in steps:
                while schedules.tick(other.database, at=NOON + step * MINUTE).seen:
                    pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    tick(app, NOON + 15 * MINUTE)
    found = sorted((str(job.schedule), job.scheduled_for) for job in app.jobs.list(limit=10_000))
    assert found == sorted((name, NOON + step * MINUTE) for name in names for step in steps)


@needs("listen")
def test_a_tick_wakes_idle_workers(app: sqlq.App, report: Any) -> None:
    app.schedules.add("hourly", report.new(), every="1h")
    tick(app, NOON, since=NOON)
    with closing(Listener(app)) as listener:
        assert schedules.tick(app.database, at=NOON).jobs == []
        assert not listener.hears_within(0)
        assert len(schedules.tick(app.database, at=NOON + HOUR).jobs) == 1
        assert listener.hears_one()


def fill(engine: Engine, number: int) -> None:
    """Add schedules of which none is due."""
    with engine.begin() as conn:
        values = """concat('far', i), 't', 'q', '{}', '{"every": 60000}'"""
        if engine.dialect.name == "sqlite":
            values = values.replace("concat('far', i)", "'far' || i")
        insert_many(conn, number, "sqlq_schedules (name, task, queue, payload, plan)", values)
        conn.execute(text(f"UPDATE sqlq_schedules SET next_at = last_at + {span(engine, 86_400)}"))
    analyze = {"postgresql": "VACUUM (ANALYZE)", "mariadb": "ANALYZE TABLE sqlq_schedules"}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql(analyze.get(engine.dialect.name, "ANALYZE"))


def test_a_tick_reads_only_what_is_due(app: sqlq.App, engine: Engine, report: Any) -> None:
    fill(engine, 10_000)
    app.schedule("due", report.new(), every="1h")
    write_declared(app)
    execute(engine, "UPDATE sqlq_schedules SET next_at = created_at WHERE name = 'due'")
    with app.database.begin() as conn:
        with received(conn) as got:
            schedules._tick(conn, at=None)
            conn.execute(schedules._NEXT_MS).all()
        statements = [each for each in got if "sqlq_schedules" in each[0]]
        assert statements
        for statement, parameters in statements:
            if engine.dialect.name == "postgresql":
                plan = explained(conn, statement, parameters)
                assert pages(plan) < 40, json.dumps(plan, indent=1)
                assert not scans(plan)
            elif engine.dialect.name == "mariadb":
                if statement.startswith("SELECT"):
                    assert rows_read(conn, statement, parameters) < 40, statement
            else:
                rows = conn.exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)
                steps = [row[3] for row in rows if "sqlq_schedules" in row[3]]
                assert steps
                assert all("INDEX" in step for step in steps), steps


@pytest.fixture
def deploy(database_url: str) -> Iterator[Callable[..., sqlq.App]]:
    """Makes releases whose code declares these schedules, each of the task of its name."""
    with ExitStack() as stack:

        def made(service: str | None = None, **plans: str) -> sqlq.App:
            app = stack.enter_context(closing(sqlq.App(database_url, service=service)))
            for name, cron in plans.items():
                app.task(name=name, schedule=cron)(lambda: None)
            return app

        yield made


def starts(app: sqlq.App, hours_ago: float = 0) -> schedules.Followed:
    """A worker of a release starts, whose supervisor began so long ago."""
    declared, ago = app._schedules, lambda: hours_ago * 3_600_000
    return schedules.follow(app.database, declared.declared, declared.service, app.tasks, ago)


def plans(app: sqlq.App) -> dict[str, tuple[str, str]]:
    return {each.name: (each.state, str(each.plan)) for each in app.schedules.list()}


def test_declared_schedules_follow_the_deploy(deploy: Callable[..., sqlq.App]) -> None:
    old = deploy(kept="0 1 * * *", changed="0 2 * * *", gone="0 3 * * *")
    done = starts(old, hours_ago=5)
    assert (sorted(done.added), done.changed, done.retired) == (["changed", "gone", "kept"], [], [])
    assert starts(old, hours_ago=5)[:4] == ([], [], [], [])
    new = deploy(kept="0 1 * * *", changed="0 4 * * *", fresh="0 5 * * *")
    new.task(name="gone")(lambda: None)
    assert starts(new, hours_ago=1)[:4] == (["fresh"], ["changed"], ["gone"], [])
    active = {"kept": ("active", "0 1 * * *"), "changed": ("active", "0 4 * * *")}
    wanted = {**active, "gone": ("retired", "0 3 * * *"), "fresh": ("active", "0 5 * * *")}
    assert plans(new) == wanted
    assert starts(old, hours_ago=5)[:4] == ([], [], [], []), "a child that the old supervisor starts anew"
    assert plans(new) == wanted
    assert sorted(starts(old).changed) == ["changed", "gone"], "back to the old release, by a new start"
    assert plans(new)["gone"] == ("active", "0 3 * * *")


def test_a_deploy_with_an_unchanged_plan_catches_up_missed_runs(deploy: Callable[..., sqlq.App]) -> None:
    app = deploy(hourly="0 * * * *")
    tick(app, NOON, since=NOON)
    starts(app)
    assert moments(tick(app, NOON + HOUR)) == [60]
    changed = deploy()
    changed.task(name="hourly", queue="other", schedule="0 * * * *")(lambda: None)
    assert starts(changed).changed == ["hourly"], "its job, not its plan"
    assert moments(found := tick(changed, NOON + 2 * HOUR)) == [120]
    assert found[0].queue == "other"


@pytest.mark.parametrize("services", [("shop", "mail"), (None, "mail"), ("shop", None), (None, None)])
def test_services_on_one_database_retire_only_their_own_schedules(
    deploy: Callable[..., sqlq.App], services: tuple[str | None, str | None]
) -> None:
    shop = deploy(services[0], nightly="0 1 * * *")
    mail = deploy(services[1], weekly="0 2 * * 1")
    for _ in range(2):
        for app in (shop, mail):
            assert starts(app).retired == []
    assert plans(shop) == {"nightly": ("active", "0 1 * * *"), "weekly": ("active", "0 2 * * 1")}
    without = deploy(services[0])
    if services[0] is None:
        without.task(name="nightly")(lambda: None)
    assert starts(without).retired == ["nightly"]
    assert plans(shop)["weekly"] == ("active", "0 2 * * 1")


def test_a_schedule_of_another_service_is_left_alone(deploy: Callable[..., sqlq.App]) -> None:
    shop = deploy("shop", nightly="0 1 * * *")
    mail = deploy("mail", nightly="0 2 * * *", added="0 3 * * *")
    starts(shop)
    shop.schedules.add("added", shop.tasks["nightly"].new(), cron="0 4 * * *")
    assert sorted(starts(mail).foreign) == ["added", "nightly"]
    assert plans(shop) == {"nightly": ("active", "0 1 * * *"), "added": ("active", "0 4 * * *")}


def test_a_pause_holds_across_deploys(deploy: Callable[..., sqlq.App]) -> None:
    old = deploy(weekly="0 2 * * 1")
    starts(old, hours_ago=2)
    assert old.schedules.pause("weekly")
    assert not old.schedules.pause("weekly")
    new = deploy(weekly="0 4 * * 1")
    assert starts(new).changed == ["weekly"]
    assert plans(new) == {"weekly": ("paused", "0 4 * * 1")}
    assert tick(new, NOON + timedelta(days=30), since=NOON) == []
    assert new.schedules.resume("weekly")
    assert not new.schedules.resume("weekly")
    assert plans(new) == {"weekly": ("active", "0 4 * * 1")}


def test_a_schedule_is_added_in_the_callers_transaction(app: sqlq.App, engine: Engine, report: Any) -> None:
    with Session(engine) as session:
        app.schedules.add("hourly", report.new(), every="1h", session=session)
        with pytest.raises(ConfigurationError, match="there is a schedule 'hourly' already"):
            app.schedules.add("hourly", report.new(), every="2h", session=session)
        with pytest.raises(ConfigurationError, match="has no moment to come"):
            app.schedules.add("past", report.new(), at=datetime(2020, 1, 1, tzinfo=UTC), session=session)
        app.schedules.add("daily", report.new(), cron="0 3 * * *", session=session)
        session.commit()
    assert {each.name for each in app.schedules.list()} == {"hourly", "daily"}
    assert app.schedules.list()[0].is_declared is False
    assert starts(app)[:4] == ([], [], [], []), "a worker that starts leaves them alone"
    with engine.connect() as conn:
        app.schedules.pause("daily", session=conn)
        conn.rollback()
    assert app.schedules.get("daily").state == "active"
    app.schedules.remove("daily")
    for missed in (app.schedules.get, app.schedules.pause):
        with pytest.raises(sqlq.errors.ScheduleNotFoundError, match="there is no schedule 'dayly'"):
            missed("dayly")


@common_ways
def test_a_schedule_is_added_in_any_callers_transaction(app: sqlq.App, report: Any, caller: Caller) -> None:
    add = app.schedules.aadd if caller.is_async else app.schedules.add
    for end in (caller.rollback, caller.commit):
        caller.begin()
        caller.do(add("hourly", report.new(), every="1h", session=caller.session))
        end()
        assert [each.name for each in app.schedules.list()] == (["hourly"] if end == caller.commit else [])


def test_a_schedule_runs_first_at_its_start_and_by_hand_beside_its_plan(app: sqlq.App, report: Any) -> None:
    app.schedules.add("beside", report.new(7), every="1h")
    job: Any = app.jobs.get(app.schedules.run("beside").id)
    assert (job.schedule, job.state) == ("beside", "available")
    assert abs(job.scheduled_for - datetime.now(UTC)) < timedelta(minutes=1)
    found = app.schedules.get("beside")
    assert (found.ticks, [each.id for each in found.jobs]) == (0, [job.id])
    start = datetime.now(UTC)
    app.schedules.add("hourly", report.new(), every="1h", starts=start)
    app.schedules.add("long ago", report.new(), every="1h", starts=start - 2 * MINUTE)
    whole = start.replace(microsecond=start.microsecond // 1000 * 1000)
    assert [job.scheduled_for for job in tick(app, start + MINUTE)] == [whole]
    assert tick(app, start + MINUTE) == []
    assert whole + HOUR in [job.scheduled_for for job in tick(app, start + HOUR)]


def test_a_schedules_job_takes_no_result_of_a_step(app: sqlq.App, report: Any) -> None:
    job = report.new(sqlq.Flow().add(report.new(1)).result)
    for add in (app.schedule, app.schedules.add):
        with pytest.raises(ConfigurationError, match=r"'hourly' is the result of step 1 .*: a schedule"):
            add("hourly", job, every="1h")
    assert tick(app, NOON) == []
