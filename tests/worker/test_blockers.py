"""Another reason to wait is an entry of `BLOCKERS`: it is freed, swept, cleared up and explained by it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import BigInteger, Connection, Engine, bindparam, column, select, table, update

import sqlq
from sqlq.database.database import Database
from sqlq.model.job import JobDetails
from sqlq.schema.tables import blocked_by, finished_jobs, jobs
from sqlq.schema.types import far
from sqlq.store import blockers
from sqlq.store.blockers import Blocker, FlowBlocker, LimitBlocker, Reason
from sqlq.store.limits.admit import FreedJobs
from sqlq.worker.maintain.services import Sweep, Unblock
from sqlq.worker.settle.after import Unblocker
from tests.kit import wait_until

waits = table("event_waits", column("job_id", BigInteger), column("flow_id", BigInteger))
_of_keys = select(waits.c.job_id).where(waits.c.flow_id.in_(bindparam("keys", expanding=True)))
FREE = (
    update(jobs)
    .where(blocked_by("event"), jobs.c.id.in_(_of_keys))
    .values(blocked_by=None, available_at=jobs.c.due_at, due_at=None)
)


class EventBlocker(Blocker):
    """A job waits until a step of a flow has ended."""

    name = "event"
    waited_for = key = "flow_id"
    until_end = True

    def free(self, database: Database, keys: Collection[int]) -> FreedJobs:
        with database.begin() as conn:
            return FreedJobs(conn.execute(FREE, {"keys": list(keys)}).rowcount)

    def sweep(self, database: Database) -> FreedJobs | None:
        with database.read() as conn:
            flows = list(conn.scalars(select(waits.c.flow_id)))
            ended = finished_jobs.c.flow_id
            flows = list(conn.scalars(select(ended).where(ended.in_(flows))))
        return self.free(database, flows) if flows else None

    def clear_up(self, conn: Connection, limit: int) -> int:
        return conn.execute(waits.delete().where(waits.c.job_id.not_in(select(jobs.c.id)))).rowcount

    def explain(self, database: Database, job: JobDetails) -> Iterator[Reason]:
        yield Reason("it waits for a step of the flow 1", "show 7")


def enqueue_step(app: sqlq.App) -> sqlq.Job[Any]:
    """Enqueue a step of a flow, whose id is 1."""
    return app.enqueue(sqlq.chain(app.tasks["note"])).jobs[0]


@pytest.fixture
def waiting(app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> sqlq.Job[Any]:
    """A job that waits for a step of the flow 1."""
    with engine.begin() as conn:
        if conn.dialect.name == "postgresql":
            conn.exec_driver_sql("ALTER DOMAIN sqlq_blocked DROP CONSTRAINT sqlq_blocked_check")
        else:
            conn.exec_driver_sql("PRAGMA writable_schema = ON")
            conn.exec_driver_sql(
                "UPDATE sqlite_master SET sql = replace(sql, '(''flow'', ''limit'')', '(''event'')')"
            )
            conn.exec_driver_sql("PRAGMA writable_schema = RESET")
        conn.exec_driver_sql("CREATE TABLE event_waits (job_id BIGINT, flow_id BIGINT)")
    monkeypatch.setattr(blockers, "BLOCKERS", (FlowBlocker, LimitBlocker, EventBlocker))
    app.task(name="note")(lambda: None)
    job = app.enqueue(app.tasks["note"].new())
    with app.database.begin() as conn:
        conn.execute(update(jobs).values(blocked_by="event", due_at=jobs.c.available_at, available_at=far()))
        conn.execute(waits.insert(), {"job_id": job.id, "flow_id": 1})
    assert app.jobs.get(job).state == "blocked"
    return job


def test_a_worker_frees_jobs_by_each_blocker_after_a_settle(
    app: sqlq.App, waiting: sqlq.Job[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unblock, "run", lambda self: 3600.0)
    app.enqueue(app.tasks["note"].new())
    assert app.worker(drain=True).run().finished == 1
    enqueue_step(app)
    with app.worker():
        wait_until(lambda: app.jobs.get(waiting).state == "finished")


def test_an_operator_sees_and_frees_jobs_of_each_blocker(app: sqlq.App, waiting: sqlq.Job[Any]) -> None:
    assert "it waits for a step of the flow 1" in app.jobs.why(waiting)
    assert app.jobs.list(state="blocked")[0].blocked_by == "event"
    app.jobs.cancel([enqueue_step(app)])
    assert app.jobs.get(waiting).state == "available"


def test_the_maintenance_sweeps_for_each_blocker(app: sqlq.App, waiting: sqlq.Job[Any]) -> None:
    service = Unblock(app.database, EventBlocker())
    assert service.run() > 1
    assert app.jobs.get(waiting).state == "blocked"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventBlocker, "free", lambda self, database, keys: FreedJobs())
        enqueue_step(app)
        assert app.worker(drain=True).run().finished == 1
    assert app.jobs.get(waiting).state == "blocked"
    service.run()
    assert app.jobs.get(waiting).state == "available"
    app.jobs.cancel([waiting])
    app.jobs.delete([waiting])
    Sweep(app.database).run()
    with app.database.read() as conn:
        assert conn.execute(select(waits)).all() == []


def test_a_last_look_awaits_that_of_the_thread(app: sqlq.App) -> None:
    """A drain would skip what the thread has locked, and leave without the jobs that it frees."""
    began, overlapped = threading.Event(), list[bool]()

    class Slow(LimitBlocker):
        second = threading.Event()

        def free(self, database: Database, keys: Collection[str]) -> FreedJobs:
            if began.is_set():
                self.second.set()
            else:
                began.set()
                overlapped.append(self.second.wait(0.2))
            return FreedJobs()

    signals: Any = SimpleNamespace(due_at=print, settled=lambda: None)
    unblocker = Unblocker(Slow(), app.database, signals, in_use=True)
    unblocker.look()
    assert began.wait(30)
    unblocker.look_now()
    unblocker.close()
    assert overlapped == [False]
