"""A row that the database refuses holds up no other, wherever sqlq writes many rows as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, StatementError

import sqlq
from sqlq.store.apart import apart
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.worker.ipc.parent import Facts
from sqlq.worker.ipc.pipe import Pipe
from sqlq.worker.maintain import services
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.meter import Totals
from sqlq.worker.supervise.heartbeat import Heartbeat
from tests.kit import committed, execute, needs, refuse, span, wait_until, working

pytestmark = pytest.mark.each_database

INNOCENT, POISON, BATCH = 8, 5, 3  # more rows are refused than a batch has, and they come first


class Case(NamedTuple):
    """Rows of the task `poison`, a trigger that refuses them, the state of the others, and the log."""

    prepare: Callable[[Play], None]
    on: str
    refuses: str
    state: str
    logged: str
    number: int = INNOCENT


class Play:
    """Jobs of two tasks, the refused ones first, and a worker."""

    def __init__(self, app: sqlq.App, engine: Engine) -> None:
        self.app, self.engine = app, engine
        self.declare()

    def declare(self, **options: Any) -> None:
        self.poison, self.plain = (
            self.app.task(name=name, max_attempts=1, **options)(lambda: None) for name in ("poison", "plain")
        )

    def all(self) -> list[sqlq.NewJob[Any]]:
        return [*[self.poison.new()] * POISON, *[self.plain.new()] * INNOCENT]

    def enqueue(self) -> None:
        self.app.enqueue_many(self.all())

    def are(self, state: str, number: int = INNOCENT) -> bool:
        states: list[Any] = committed(self.engine, "job_states WHERE task = 'plain'", "state")
        return states == [state] * number

    def claimed(self) -> None:
        """Have a worker that is gone hold all jobs."""
        self.enqueue()
        held = "lease_token = 1, attempts = 1, reserved_by = 'dead', reserved_at = created_at"
        execute(self.engine, f"UPDATE jobs SET {held}, lease_expires_at = created_at")

    def old(self) -> None:
        self.enqueue()
        self.app.jobs.cancel(all=True)
        execute(self.engine, f"UPDATE finished_jobs SET finished_at = finished_at - {span(self.engine, 1e6)}")

    def scheduled(self) -> None:
        for number, job in enumerate(self.all()):
            self.app.schedules.add(f"{job.task} {number}", job, every="1h")
        for column in ("next_at", "last_at"):
            execute(self.engine, f"UPDATE sqlq_schedules SET {column} = {column} - {span(self.engine, 3600)}")

    def chains(self) -> None:
        cancel = self.app.task(name="cancel")(_cancel)
        for first, then in ((cancel, self.poison), (self.plain, self.plain)):
            for _ in range(POISON if first is cancel else INNOCENT // 2):
                flow = sqlq.Flow()
                flow.add(then.new(), after=[flow.add(first.new())])
                self.app.enqueue(flow)

    def in_line(self) -> None:
        self.app = sqlq.App(engine=self.engine)
        self.declare(limit=sqlq.Limit("api", running=2))
        self.enqueue()


def _cancel() -> None:
    raise sqlq.Cancel("no")


_LOST, _ENDS = "has lost its worker, but", "INSERT ON finished_jobs"
_POISON, _CHANGED, _DUE = "NEW.task = 'poison'", "OLD.task = 'poison'", "UPDATE ON sqlq_schedules"
_MAY_START = f"{_CHANGED} AND OLD.blocked_by = 'limit' AND NEW.blocked_by IS NULL"
_RELEASED, _SCHEDULE = f"{_CHANGED} AND NEW.reserved_at IS NULL", "of a schedule is due, but"
CASES = {
    "settle": Case(Play.enqueue, _ENDS, _POISON, "finished", "its outcome could not be stored"),
    "rescue": Case(Play.claimed, "INSERT ON failed_jobs", _POISON, "failed", _LOST),
    "rescue of rows that refuse a change": Case(Play.claimed, "UPDATE ON jobs", _CHANGED, "failed", _LOST),
    "ticks": Case(Play.scheduled, "INSERT ON jobs", _POISON, "finished", "schedule poison"),
    "ticks of rows that refuse a change": Case(Play.scheduled, _DUE, _CHANGED, "finished", _SCHEDULE),
    "unblock": Case(Play.chains, _ENDS, _POISON, "finished", "waits for no other step any more, but"),
    "admission": Case(Play.in_line, "UPDATE ON jobs", _MAY_START, "finished", "may start by its limit, but"),
    "prune": Case(Play.old, "DELETE ON finished_jobs", _CHANGED, "", "is old enough to be deleted, but", 0),
    "deaths": Case(Play.claimed, "UPDATE ON jobs", _RELEASED, "available", _LOST),
    "deaths of jobs that had started": Case(Play.claimed, "INSERT ON failed_jobs", _POISON, "failed", _LOST),
}


def refuse_after_a_deadlock(engine: Engine, on: str, refuses: str) -> None:
    """Let a trigger refuse rows, and raise a deadlock at its first call."""
    execute(engine, "CREATE SEQUENCE poisoned")  # which is not rolled back
    raised = {
        "postgresql": "IF nextval('poisoned') = 1 THEN RAISE SQLSTATE '40P01'; END IF; ",
        "mariadb": "IF nextval(poisoned) = 1 THEN SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END IF; ",
    }
    refuse(engine, on, refuses, first=raised[engine.dialect.name])


@contextmanager
def dead(app: sqlq.App, *, started: bool) -> Iterator[None]:
    """Have a supervisor release the jobs of a worker that died."""
    keeper, (here, there) = Heartbeat(60_000, Totals()), Pipe.pair()
    keeper.keep(Facts.of("alive", app.database, WorkerOptions()), here)
    keeper.worker_died("dead", None if started else set(), "died")
    try:
        yield
    finally:
        keeper.deaths.waiting.clear()
        keeper.close(20)
        here.close()
        there.close()


def test_a_result_is_stored_whole_when_its_table_is_back(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    states_of, looked = lease.states_of, threading.Event()

    def noted(*given: Any, **options: Any) -> Any:
        looked.set()
        return states_of(*given, **options)

    def renames() -> str:
        execute(engine, "ALTER TABLE finished_jobs RENAME TO away")
        return "whole"

    monkeypatch.setattr(lease, "states_of", noted)
    job = app.enqueue(app.task(name="t")(renames).new())
    with working(app, grace="1s"):
        assert looked.wait(20)
        execute(engine, "ALTER TABLE away RENAME TO finished_jobs")
        wait_until(lambda: app.jobs.get(job.id).state == "finished", what="its end")
    done = app.jobs.get(job.id)
    assert (done.result, done.attempts) == ("whole", 1)


def test_a_worker_ends_when_it_can_write_no_outcome(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, refusal = settling.settle, StatementError("refused", None, None, None)
    errors: list[Exception] = [refusal, refusal]

    def fails(*given: Any, **options: Any) -> Any:
        if errors:
            raise errors[0] if isinstance(errors[0], TypeError) else errors.pop(0)
        return settle(*given, **options)

    monkeypatch.setattr(settling, "settle", fails)
    monkeypatch.setattr("sqlq.worker.threads.loop.ODD_SECONDS", 0.01)
    task = app.task(name="t")(lambda: "a result that can be left out")
    first = app.enqueue(task.new())
    worker = app.worker(grace="1s").start()
    wait_until(lambda: app.jobs.get(first.id).state == "finished", timeout=20, what="its end")
    errors.append(TypeError("a fault of a library"))
    app.enqueue(task.new())
    with pytest.raises(sqlq.errors.ExecutionError, match="a fault of a library"):
        worker.join("20s")


def test_outcomes_of_a_refused_task_are_settled_apart_from_then_on(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its next refused outcome is in no batch with outcomes of other tasks."""
    play, batches, settle = Play(app, engine), list[list[int]](), settling.settle

    def noted(conn: Any, settlements: Sequence[Any], **options: Any) -> Any:
        batches.append([each.id for each in settlements])
        return settle(conn, settlements, **options)

    refuse(engine, "INSERT ON finished_jobs", _POISON)
    monkeypatch.setattr(settling, "settle", noted)
    with working(app, grace="1s", concurrency=INNOCENT + POISON):
        play.enqueue()
        wait_until(lambda: play.are("finished"), what="the others done")
        wait_until(lambda: "its outcome could not be stored" in caplog.text, what="the refusal")
        del batches[:]
        tasks = {job.id: job.task for job in app.enqueue_many(play.all())}
        wait_until(lambda: play.are("finished", 2 * INNOCENT), what="the others done again")
    kinds = [{tasks.get(id, "poison") for id in batch} for batch in batches]
    assert {"plain"} in kinds
    assert {"plain", "poison"} not in kinds


@pytest.mark.parametrize("after_a_deadlock", [False, True], ids=["", "after a deadlock"])
@pytest.mark.parametrize("name", CASES)
def test_refused_rows_hold_up_no_other(
    app: sqlq.App, engine: Engine, monkeypatch: Any, caplog: Any, *, name: str, after_a_deadlock: bool
) -> None:
    if after_a_deadlock and engine.dialect.name == "sqlite":
        return  # with one writer there is none
    for batch in ("RESCUE_BATCH", "PRUNE_BATCH"):
        monkeypatch.setattr(services, batch, BATCH)
    monkeypatch.setattr(services, "RESCUE_MS", 100)
    monkeypatch.setattr(services, "PRUNE_SECONDS", 0.1)
    case, play = CASES[name], Play(app, engine)
    case.prepare(play)
    (refuse_after_a_deadlock if after_a_deadlock else refuse)(engine, case.on, case.refuses)
    short = {"lease": "3s"} if name.startswith("rescue") else {}
    acting = (
        dead(play.app, started="started" in name)
        if name.startswith("deaths")
        # a rescue after a deadlock waits for half a lease
        else working(play.app, grace="1s", queues=["default"], concurrency=INNOCENT + POISON, **short)
    )
    with acting:
        wait_until(lambda: play.are(case.state, case.number), timeout=20, what="the others done")
        wait_until(lambda: case.logged in caplog.text, timeout=20, what="the refusal in the log")


@needs("sessions")
def test_a_deadlock_in_a_savepoint_is_no_refusal(app: sqlq.App) -> None:
    """Elsewhere it has undone the whole transaction, and further writes would be in none."""
    refused: list[int] = []
    with pytest.raises(DBAPIError, match="deadlock"), app.database.begin() as conn:
        apart(
            [1, 2],
            lambda some: conn.exec_driver_sql("DO $$ BEGIN RAISE 'deadlock' USING ERRCODE = '40P01'; END $$"),
            lambda one, error: refused.append(one),
            app.database.dialect,
            within=conn,
        )
    assert refused == []
