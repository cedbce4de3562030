"""Run a worker while a test goes on, do by hand what a worker does, or try a table of values."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

import sqlq
from sqlq.model.outcome import Outcome, Settlement
from sqlq.schema.types import MARIADB_NOW, POSTGRESQL_NOW, SQLITE_NOW
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import LeaseState
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.claim.claimer import Claimer
from sqlq.worker.decide import Turn, claim_size
from sqlq.worker.ipc.parent import NoParent
from sqlq.worker.options import WorkerOptions
from sqlq.worker.report.reporter import Reporter
from sqlq.worker.run.isolated import IsolatedProcesses
from sqlq.worker.supervise.heartbeat import Dead, Deaths
from sqlq.worker.supervise.supervisor import Supervisor
from sqlq.worker.worker import Worker
from tests import claims as claiming


def worker_of(
    app: sqlq.App,
    supervision: NoParent | None = None,
    isolates: IsolatedProcesses | None = None,
    **options: Any,
) -> Worker:
    """Return a worker as `sqlq work` has it."""
    return app._worker(WorkerOptions.of(**options), supervision, isolates)


def claim_size_of(claimer: Claimer, running: int = 0) -> int:
    """Return how many jobs a worker with this claimer claims while none wait."""
    turn = Turn(running, ahead=claimer.ahead(0, 0.0), max_claim=claimer.max_jobs)
    return claim_size(claimer._options, turn)


def run_isolated(isolates: IsolatedProcesses, job: Attempt) -> Outcome:
    """Run a job in a process of its own, as a slot does."""
    assert isolates.let_in(job)
    return isolates.execute(job, lambda job: None, lambda: None)


@contextmanager
def working(app: sqlq.App, **options: Any) -> Iterator[Any]:
    """Run a worker in a thread of this process; at the end it stops at once, whatever a test asserts."""
    worker = worker_of(app, **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def supervising(supervisor: Supervisor) -> Iterator[Future[int]]:
    """Run a supervisor in a thread of this process, and stop it at the end; its exit code is yielded."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(supervisor.run)
        finally:
            supervisor.stop()


def deaths(*worker: str, started: set[tuple[int, int]] | None = frozenset()) -> Deaths:  # type: ignore[assignment]
    """Return the deaths of workers, as their supervisor has them."""
    found = Deaths(Reporter().rescued)
    found.waiting += [Dead(each, started, "died", time.monotonic() + 60) for each in worker]
    return found


def drain(app: sqlq.App, **options: Any) -> Any:
    """Run a worker until nothing is available; return its counts."""
    return app.worker(drain=True, **options).run()


def run_one(app: sqlq.App, handler: Callable[[], Any], **options: Any) -> Any:
    """Run one job of this handler until nothing is available; return all that is known of it then."""
    job = app.enqueue(app.task(name="t", backoff="0s", **options)(handler).new())
    drain(app)
    return app.jobs.get(job.id)


def execute(engine: Engine, statement: str) -> Any:
    """Run a statement in a transaction of its own and return its first value, if it has any."""
    with engine.begin() as connection:
        result = connection.execute(text(statement))
        return result.scalar() if result.returns_rows else None


NOW = {"postgresql": POSTGRESQL_NOW, "sqlite": f"({SQLITE_NOW})", "mariadb": MARIADB_NOW}
"""The clock of each kind of database, in SQL."""


def span(engine: Engine | Connection, seconds: float) -> str:
    """Return a span of time in the database's SQL, to be added to a time."""
    return {
        "postgresql": f"interval '{seconds} s'",
        "sqlite": f"{round(seconds * 1_000)}",
        "mariadb": f"INTERVAL {round(seconds * 1_000_000)} MICROSECOND",
    }[engine.dialect.name]


_HANDLER = "SHOW SESSION STATUS LIKE 'Handler_read%'"


def rows_read(conn: Connection, statement: str, parameters: Any = None) -> int:
    """Run a statement and return how many rows the storage engine read for it (MariaDB)."""

    def read() -> int:
        rows = conn.execution_options(no_parameters=True).exec_driver_sql(_HANDLER)
        return sum(int(number) for _, number in rows)

    before = read()
    conn.exec_driver_sql(statement, parameters).close()
    return read() - before


def waiting_for_locks(engine: Engine) -> Any:
    """Return how many sessions of the test's database wait for another's transaction (on a server)."""
    waiting = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock'",
        "mariadb": "SELECT count(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist "
        "p ON p.id = t.trx_mysql_thread_id WHERE p.db = database() AND t.trx_state = 'LOCK WAIT'",
    }
    if engine.dialect.name == "mariadb":
        time.sleep(0.11)  # noqa: TID251 - what is asked for more often is answered from memory
    return execute(engine, waiting[engine.dialect.name])


def claim(app: sqlq.App, lease_ms: int = 30_000, owner: str = "me", limit: int = 10) -> list[Any]:
    with app.database.begin() as conn:
        return claiming.claim(conn, ["default"], limit=limit, owner=owner, lease_ms=lease_ms)


def renew(leases: Any, renewed: dict[tuple[int, int], bool], sent_at: float) -> None:
    """Renew as a supervisor does, and look into it as the thread of the leases does."""
    leases.renewed_for_us(renewed, sent_at, entered=True)
    if (doubts := leases._doubts) is not None:
        leases._doubts = None
        leases._give_back(doubts)
        leases.beat()


def ids(rights: set[tuple[int, int]]) -> set[int]:
    return {id for id, _ in rights}


def settle(app: sqlq.App, job: Any, outcome: Outcome) -> set[int]:
    with app.database.begin() as conn:
        return ids(settling.settle(conn, [Settlement(job.id, job.lease_token, job.attempts, outcome)]))


def fate(app: sqlq.App, job: Any) -> LeaseState:
    with app.database.read() as conn:
        return lease.states_of(conn, [(job.id, job.lease_token)])[job.id, job.lease_token]


def expire(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET lease_expires_at = reserved_at WHERE reserved_at IS NOT NULL"))


def rescue(app: sqlq.App) -> list[settling.Rescued]:
    with app.database.begin() as conn:
        return settling.rescue(conn)


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have no thread of this name started, as where the system has none left."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def for_each(
    names: str | Sequence[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for all rows of a table, as one case with the same fixtures.

    It is for tables where a case for each row costs more than the test. Each row
    that fails is reported; a row that is skipped does not skip the others.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*given: Any, **fixtures: Any) -> None:
            failures: list[BaseException] = []
            for row in table:
                values = dict(zip(keys, [row] if len(keys) == 1 else row, strict=True))
                try:
                    test(*given, **fixtures, **values)
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"with {values}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)

        signature = inspect.signature(test)
        asked_for = [each for each in signature.parameters.values() if each.name not in keys]
        vars(run)["__signature__"] = signature.replace(parameters=asked_for)
        return run

    return decorate
