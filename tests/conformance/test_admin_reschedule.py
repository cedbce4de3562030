"""Moving waiting jobs to another time, queue or priority: which are moved, and what stays as it is."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text

import sqlq
from sqlq.model.outcome import ErrorText, Retried, Settlement
from sqlq.payload.encryption import new_key
from sqlq.store.jobs import operate, settle
from sqlq.store.limits import admit
from tests.kit import claim, claim_on, drain, needs, wait_until, working

pytestmark = pytest.mark.each_database

SOON = timedelta(minutes=5)


def due(app: sqlq.App, id: int) -> timedelta:
    """How far from now a job is due."""
    job = app.jobs.get(id)
    at = job.available_at or job.due_at
    assert at is not None
    return at - datetime.now(UTC)


def test_waiting_jobs_are_moved_to_a_time_to_a_delay_and_to_now(app: sqlq.App) -> None:
    id = app.enqueue(app.task(name="send")(lambda: None).new()).id
    assert app.jobs.reschedule([id], delay="2h") == [id]
    assert due(app, id) > timedelta(minutes=119)
    assert app.jobs.reschedule([id], available_at=datetime.now(UTC) + timedelta(days=1)) == [id]
    assert due(app, id) > timedelta(hours=23)
    assert asyncio.run(app.jobs.areschedule(task="send")) == [id]
    assert (due(app, id) < SOON, app.jobs.get(id).state) == (True, "available")


def test_a_job_that_waits_for_a_retry_is_moved_with_its_attempts(app: sqlq.App) -> None:
    id = app.enqueue(app.task(name="send", max_attempts=3)(lambda: None).new()).id
    (held,) = claim(app)
    again = Retried(3_600_000, ErrorText("ValueError", "no"))
    with app.database.begin() as conn:
        settle.settle(conn, [Settlement(id, held.lease_token, 1, again)])
    assert app.jobs.get(id).state == "scheduled"
    assert app.jobs.reschedule([id]) == [id]
    job = app.jobs.get(id)
    assert (job.state, job.attempts, len(job.errors)) == ("available", 1, 1)


def test_running_and_ended_jobs_are_left_alone(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    running, ended = (app.enqueue(task.new()).id for _ in range(2))
    app.jobs.cancel([ended])
    (held,) = claim(app)
    before = app.jobs.get(running)
    assert app.jobs.reschedule([running, ended, 4711], delay="1h") == []
    assert app.jobs.reschedule(task="t") == []
    assert app.jobs.get(running) == before
    assert held.id == running


def test_a_job_claimed_meanwhile_is_not_touched(app: sqlq.App) -> None:
    """The claim came between the look for waiting jobs and the lock on their rows."""
    first, second = (job.id for job in app.enqueue_many([app.task(name="t")(lambda: None).new()] * 2))
    claim(app, limit=1)
    before = app.jobs.get(first)
    with app.database.begin() as conn:
        assert operate.change(conn, [first, second], delay_ms=3_600_000) == {second: "changed"}
    after = app.jobs.get(first)
    assert after == before
    assert (after.state, after.available_at) == ("running", before.available_at)


@needs("sessions")
def test_a_reschedule_waits_for_a_claim_under_way_and_leaves_its_lease(app: sqlq.App, engine: Engine) -> None:
    first, second = (job.id for job in app.enqueue_many([app.task(name="t")(lambda: None).new()] * 2))

    def waits() -> bool:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        with engine.connect() as conn:
            return bool(conn.scalar(text(f"{waiting} AND wait_event_type = 'Lock'")))

    lease = "SELECT lease_token, lease_expires_at, available_at, attempts FROM jobs WHERE id = :id"
    with ThreadPoolExecutor(1) as pool:
        with app.database.begin() as conn:
            (held,) = claim_on(conn, limit=1)
            before = conn.execute(text(lease), {"id": held.id}).one()
            moving = pool.submit(app.jobs.reschedule, [first, second], delay="1h")
            wait_until(waits, what="the reschedule to wait for the claim")
            assert app.jobs.get(second).state == "scheduled", "a locked row holds up no other"
        assert moving.result(20) == [second]
    with app.database.read() as conn:
        assert conn.execute(text(lease), {"id": first}).one() == before


def test_a_rescheduled_job_releases_its_slot_until_its_new_time(app: sqlq.App) -> None:
    call = app.task(name="call", limit=sqlq.Limit("stripe", running=1))(lambda: None)
    first, second = (job.id for job in app.enqueue_many([call.new(), call.new()]))
    admit.look(app.database)
    assert app.jobs.get(first).blocked_by is None
    assert app.jobs.reschedule([first], delay="1h") == [first]
    assert (app.jobs.get(first).blocked_by, due(app, first) > SOON) == ("limit", True)
    admit.look(app.database)  # by the wake alone
    assert app.jobs.get(second).blocked_by is None
    assert app.jobs.cancel([second]) == {second: "cancelled"}
    assert app.jobs.reschedule([first]) == [first]
    admit.look(app.database)
    assert app.jobs.get(first).state == "available"


def test_a_step_that_waits_for_another_is_due_later_and_stays_blocked(app: sqlq.App) -> None:
    step = app.task(name="step")(lambda: None)
    flow = app.enqueue(sqlq.chain(step.new(), step.new()))
    first, second = (job.id for job in flow.jobs)
    assert app.jobs.reschedule([second], delay="1h") == [second]
    assert (app.jobs.get(second).blocked_by, due(app, second) > SOON) == ("flow", True)
    app.worker(drain=True).run()
    assert [app.jobs.get(id).state for id in (first, second)] == ["finished", "scheduled"]


def test_an_idle_worker_starts_a_job_that_is_moved_to_now(app: sqlq.App) -> None:
    id = app.enqueue(app.task(name="t")(lambda: None).new().set(delay="1h")).id
    with working(app):
        assert app.jobs.reschedule([id]) == [id]
        wait_until(lambda: app.jobs.get(id).state == "finished", what="the job to run")


# -- change --------------------------------------------------------------------------------------------------


def test_a_waiting_job_changes_its_queue_priority_and_time(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    job, other = app.enqueue_many([task.new().set(delay="2h"), task.new().set(delay="2h")])
    assert app.jobs.change([job], queue="bulk", priority=7) == {job.id: "changed"}
    changed = app.jobs.get(job.id)
    assert (changed.queue, changed.priority, changed.state) == ("bulk", 7, "scheduled")
    assert app.jobs.change([job], delay="0s") == {job.id: "changed"}
    assert (app.jobs.get(job.id).queue, app.jobs.get(job.id).priority) == ("bulk", 7)
    assert drain(app, queues=["bulk"]).finished == 1
    later = datetime.now(UTC) + timedelta(days=1)
    assert asyncio.run(app.jobs.achange([other.id], available_at=later)) == {other.id: "changed"}
    assert due(app, other.id) > timedelta(hours=23)


def test_running_ended_and_unknown_jobs_do_not_change(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    running, ended = (app.enqueue(task.new()).id for _ in range(2))
    app.jobs.cancel([ended])
    claim(app)
    assert app.jobs.change([running, ended, 4711], queue="bulk") == dict.fromkeys(
        (running, ended, 4711), "not waiting"
    )
    assert app.jobs.get(running).queue == "default"


def test_a_job_whose_key_another_one_holds_stays_in_its_queue(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new().set(queue="bulk", unique_key="k"))
    met, free, lasting = app.enqueue_many(
        [
            task.new().set(unique_key="k"),
            task.new().set(unique_key="free"),
            task.new().set(unique_key="lasts", unique_until="pruned"),
        ]
    )
    ended = app.enqueue(task.new().set(queue="bulk", unique_key="lasts", unique_until="pruned"))
    app.jobs.cancel([ended])
    assert app.jobs.change([met, free, lasting], queue="bulk", priority=3) == {
        met.id: "key held",
        free.id: "changed",
        lasting.id: "key held",
    }
    assert [(job.queue, job.priority) for job in map(app.jobs.get, (met.id, free.id))] == [
        ("default", 0),
        ("bulk", 3),
    ]
    assert app.jobs.change([met], queue="default", priority=4) == {met.id: "changed"}, "where it is"


def test_a_key_that_is_taken_meanwhile_keeps_a_job_in_its_queue(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new().set(queue="bulk", unique_key="k"))
    met, other = app.enqueue_many([task.new().set(unique_key="k"), task.new()])
    monkeypatch.setattr(operate, "holder", lambda conn, queue, key: None)
    assert app.jobs.change([met, other], queue="bulk") == {met.id: "key held", other.id: "changed"}


def test_a_signed_job_stays_in_its_queue(app: sqlq.App) -> None:
    signing = sqlq.App(app.database.engine.url, keys=[new_key()])
    task = signing.task(name="t")(lambda: None)
    job = signing.enqueue(task.new())
    assert app.jobs.change([job.id], queue="bulk") == {job.id: "protected"}
    assert app.jobs.change([job.id], priority=9) == {job.id: "changed"}
    assert drain(signing).finished == 1
    signing.close()
