"""Limits together with other features: every end of a job releases its slot or turn, and the last set limit
counts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.outcome import ErrorText, Failed
from sqlq.store import schedules
from sqlq.store.limits import admit
from sqlq.store.workers import workers
from sqlq.testing.database import write_declared
from tests.kit import claim, count, execute, settle, span, wait_until

ONE = sqlq.Limit("api", running=1)


def look(app: sqlq.App) -> int:
    """Look at the wakes that are due, as a worker does; return how many jobs were admitted."""
    return admit.look(app.database).number


def state(app: sqlq.App, id: int) -> str:
    return str(app.jobs.get(id).state)


def served_by(app: sqlq.App, id: str, queues: list[str] | None) -> None:
    with app.database.begin() as conn:
        workers.register(conn, id=id, host="here", pid=1, version="0", queues=queues, concurrency=1)


# -- what a limit says ---------------------------------------------------------------------------------------


def test_the_limit_of_a_delayed_job_does_not_replace_a_newer_one(app: sqlq.App, engine: Engine) -> None:
    def call() -> None: ...

    old = app.task(name="old", limit=sqlq.Limit("api", running=2))(call)
    app.enqueue(old.new().set(delay="1h"))
    assert look(app) == 0
    with_more = sqlq.App(app.database.engine.url.render_as_string(hide_password=False))
    new = with_more.task(name="new", limit=sqlq.Limit("api", running=5))(call)
    with_more.enqueue_many([new.new() for _ in range(9)])
    with_more.close()
    assert look(app) == 5
    with engine.begin() as conn:
        earlier = f"- {span(engine, 7_200)}"
        conn.execute(text(f"UPDATE sqlq_wakes SET at = at {earlier}"))
    look(app)
    (known,) = app.limits.list()
    assert known.max_running == 5


def test_the_job_of_a_schedule_has_its_named_limit(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="poll")(lambda: None)
    app.limit("api", running=4)
    app.schedule("polls", task.new().set(limit="api"), every="1h", catch_up="all")
    write_declared(app)
    with engine.begin() as conn:
        earlier = f"- {span(engine, 36_000)}"
        conn.execute(
            text(f"UPDATE sqlq_schedules SET last_at = last_at {earlier}, next_at = next_at {earlier}")
        )
    assert len(schedules.tick(app.database).jobs) == 10
    assert look(app) == 4
    with pytest.raises(sqlq.EnqueueError, match="no limit of that name is declared"):
        app.schedule("others", task.new().set(limit="unknown"), every="1h")


# -- rates ---------------------------------------------------------------------------------------------------


def test_a_rate_that_is_raised_counts_from_the_last_start(app: sqlq.App) -> None:
    """And not from when the next would have been by the rate before, which may be tomorrow."""
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(5)])
    assert look(app) == 1
    assert look(app) == 0
    app.limits.set("api", rate="20/1s")
    (known,) = app.limits.list()
    assert known.next_start_seconds is not None
    assert known.next_start_seconds <= 0.15
    wait_until(lambda: look(app) > 0, what="the next one admitted")


def test_a_rate_that_a_deploy_raises_counts_at_once(app: sqlq.App) -> None:
    slow = app.task(name="slow", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([slow.new() for _ in range(5)])
    assert look(app) == 1
    later = sqlq.App(app.database.engine.url.render_as_string(hide_password=False))
    quick = later.task(name="slow", limit=sqlq.Limit("api", rate="20/1s"))(lambda: None)
    later.enqueue(quick.new())
    later.close()
    wait_until(lambda: look(app) > 0, what="the next one admitted")


def test_a_rate_that_is_lowered_is_kept_at_once(app: sqlq.App) -> None:
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1000/1s"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(500)])
    assert look(app) > 50
    (before,) = app.limits.list()
    after = app.limits.set("api", rate="1/1h")
    assert before.next_start_seconds is not None
    assert after.next_start_seconds is not None
    assert after.next_start_seconds > timedelta(minutes=59).total_seconds()
    assert after.running == before.running
    assert look(app) == 0


def test_looks_at_an_exhausted_rate_leave_one_wake(app: sqlq.App) -> None:
    """Each sweep, and each enqueue, looks; a rate of one a day is used up all day long."""
    task = app.task(name="call", limit=sqlq.Limit("api", rate="1/1d"))(lambda: None)
    app.enqueue_many([task.new() for _ in range(3)])
    for _ in range(5):
        app.enqueue(task.new())
        look(app)
        admit.sweep(app.database, "")
    assert count(app.database.engine, "sqlq_wakes") == 1


@pytest.mark.parametrize("limit", [ONE, sqlq.Serial("api")], ids=["one", "serial"])
def test_an_expired_job_releases_its_slot(app: sqlq.App, engine: Engine, limit: Any) -> None:
    task = app.task(name="call", limit=limit)(lambda: None)
    late, then = app.enqueue(task.new().set(start_within="90s")), app.enqueue(task.new())
    execute(engine, f"UPDATE jobs SET start_by = created_at WHERE id = {late.id}")
    app.worker(drain=True).run()
    assert (state(app, late.id), state(app, then.id)) == ("cancelled", "finished")


# -- what ends a job without a worker ------------------------------------------------------------------------


def test_skipping_a_step_releases_its_slot(app: sqlq.App) -> None:
    task = app.task(name="call", limit=ONE)(lambda: None)
    flow = app.enqueue(sqlq.group(task.new()))
    then = app.enqueue(task.new())
    assert look(app) == 1
    app.flows.skip(flow.jobs[0].id)
    assert look(app) == 1
    assert state(app, then.id) == "available"


def test_skipping_a_failed_step_releases_its_serial_key(app: sqlq.App) -> None:
    task = app.task(name="book", limit=sqlq.Serial("account", on_failure="hold"))(lambda: None)
    flow = app.enqueue(sqlq.chain(task.new(), task.new()))
    assert look(app) == 1
    settle(app, claim(app), Failed("error", ErrorText("ValueError", "no")))
    other = app.enqueue(task.new())
    assert look(app) == 0, "the failed one holds the line"
    app.flows.skip(flow.jobs[0].id)
    assert look(app) == 1
    assert (state(app, flow.jobs[1].id), state(app, other.id)) == ("available", "blocked")


def test_a_retried_step_waits_for_a_slot_and_keeps_its_followers(app: sqlq.App) -> None:
    task = app.task(name="call", limit=ONE)(lambda: None)
    flow = app.enqueue(sqlq.chain(task.new(), task.new()))
    assert look(app) == 1
    settle(app, claim(app), Failed("error", ErrorText("ValueError", "no")))
    other = app.enqueue(task.new())
    assert look(app) == 1
    app.jobs.retry([flow.jobs[0].id])
    assert look(app) == 0
    first, second = (app.jobs.get(job.id) for job in flow.jobs)
    assert (first.blocked_by, second.blocked_by) == ("limit", "flow")
    app.jobs.cancel([other.id])
    assert look(app) == 1
    assert app.worker(drain=True).run().finished == 2


def test_cancelling_admitted_jobs_admits_the_tenants_others(app: sqlq.App) -> None:
    app.fair(by="tenant:{tenant}", window=2)
    task = app.task(name="report", queue="reports")(lambda tenant: None)
    mine = app.enqueue_many([task.new(1) for _ in range(6)])
    assert look(app) == 2
    app.jobs.cancel([job.id for job in mine[:4]])
    assert look(app) == 2
    assert [state(app, job.id) for job in mine] == ["cancelled"] * 4 + ["available"] * 2


# -- queues that nobody serves -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [ONE, sqlq.Serial("api")], ids=["limit", "serial"])
def test_jobs_of_an_unserved_queue_stay_blocked(app: sqlq.App, limit: Any) -> None:
    task = app.task(name="call", limit=limit)(lambda: None)
    served_by(app, "one", ["default", "mail"])
    left = app.enqueue(task.new().set(queue="nobody"))
    then = app.enqueue(task.new())
    in_order = isinstance(limit, sqlq.Serial)
    assert look(app) == (0 if in_order else 1)
    assert state(app, left.id) == "blocked"
    assert state(app, then.id) == ("blocked" if in_order else "available")
    served_by(app, "two", ["nobody"])
    if not in_order:
        app.jobs.cancel([then.id])
    admit.sweep(app.database, "")
    assert state(app, left.id) == "available"


def test_a_queue_without_workers_releases_its_slots(app: sqlq.App) -> None:
    task = app.task(name="call", limit=ONE)(lambda: None)
    left = app.enqueue(task.new().set(queue="soon gone"))
    then = app.enqueue(task.new())
    served_by(app, "one", ["default"])
    served_by(app, "two", ["soon gone"])
    assert look(app) == 1
    admit.sweep(app.database, "")
    assert state(app, left.id) == "available", "as long as one serves it"
    with app.database.begin() as conn:
        workers.leave(conn, "two")
    admit.sweep(app.database, "")
    assert (state(app, left.id), state(app, then.id)) == ("blocked", "available")


def test_all_queues_count_as_served_without_workers_or_with_one_for_all(app: sqlq.App) -> None:
    task = app.task(name="call", limit=sqlq.Limit("api", running=2))(lambda: None)
    app.enqueue(task.new().set(queue="mine"))
    assert look(app) == 1
    served_by(app, "one", ["other"])
    served_by(app, "all", None)
    app.enqueue(task.new().set(queue="mine"))
    assert look(app) == 1
    admit.sweep(app.database, "")
    assert {job.state for job in app.jobs.list()} == {"available"}
