"""Eager mode: jobs run where they are enqueued, or when the caller's transaction commits, and nothing is
written.

Savepoints, callers on a loop and handlers that enqueue are those of `inline(app, at="commit")`, in
tests/faces/test_inline_at_commit.py: one class waits for the commits of both."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import sqlq
import sqlq.testing
from sqlq.app.inline import REMEMBERED
from sqlq.testing import assert_enqueued, drain, inline, on_database
from tests.kit import execute
from tests.kit.callers import Caller, automatic, common_modes, common_sessions
from tests.kit.flows import OrderShop, Shop


@pytest.fixture
def eager() -> Iterator[sqlq.App]:
    """An App without a database that answers."""
    with closing(sqlq.App("postgresql://nobody@127.0.0.1:1/nothing", eager=True)) as app:
        yield app


def test_a_job_runs_before_enqueue_returns(eager: sqlq.App) -> None:
    seen: list[Any] = []

    @eager.task(name="t", queue="mail")
    def t(day: date, pair: Any) -> None:
        running = sqlq.current_job()
        seen.append((day, pair, running.task, running.attempt, threading.current_thread()))

    job = eager.enqueue(t.new(date(2030, 1, 31), (1, 2)).set(delay="1h"))
    assert seen == [(date(2030, 1, 31), [1, 2], "t", 1, threading.current_thread())]
    assert (job.task, job.queue, job.state, job.created) == ("t", "mail", "finished", True)
    several = eager.enqueue_many([t.new(date(2030, 1, 31), n) for n in range(3)])
    assert [row[1] for row in seen[1:]] == [0, 1, 2]
    ids = {job.id, *(each.id for each in several)}
    assert len(ids) == 4
    assert all(4_000_000_000_000_000_000 < id < 2**63 for id in ids), "no stored job has one of these"
    with pytest.raises(sqlq.errors.ConfigurationError, match="outside a handler"):
        sqlq.current_job()
    ran: list[Any] = []

    @eager.task(name="a")
    async def a() -> None:
        await asyncio.sleep(0)
        ran.append(asyncio.get_running_loop())

    async def main() -> None:
        await eager.aenqueue(a.new())
        await eager.aenqueue_many([t.new(date(2030, 1, 31), 7)])
        assert ran[1] is asyncio.get_running_loop()
        assert seen[-1][-1] is not threading.current_thread()

    eager.enqueue(a.new())
    asyncio.run(main())
    assert (len(ran), len(seen)) == (2, 5)


def test_a_stop_iteration_of_a_handler_reaches_the_awaiting_caller(eager: sqlq.App) -> None:
    """No future takes one, so that who awaits a thread that raised it would wait without end."""

    @eager.task(name="t", max_attempts=1)
    def t() -> None:
        next(iter([]))

    async def main(app: sqlq.App) -> None:
        await asyncio.wait_for(app.aenqueue(t.new()), 10)

    with pytest.raises(RuntimeError, match="t raised StopIteration") as caught:
        asyncio.run(main(eager))
    assert isinstance(caught.value.__cause__, StopIteration)
    with inline(eager) as ran, pytest.raises(RuntimeError, match="t raised StopIteration"):
        asyncio.run(main(eager))
    assert [(job.state, type(job.error)) for job in ran.jobs] == [("failed", RuntimeError)]


def failing(app: sqlq.App, error: Callable[[int], BaseException | None], **options: Any) -> Any:
    """Return a job that raises what `error` makes of the number of its attempt, and the attempts it had."""
    attempts: list[int] = []

    def t() -> None:
        attempts.append(sqlq.current_job().attempt)
        if (raised := error(attempts[-1])) is not None:
            raise raised

    return app.task(name="t", **options)(t).new(), attempts


@pytest.mark.parametrize(
    ("error", "options", "attempts", "end"),
    [
        (lambda n: ValueError("x") if n < 3 else None, {}, 3, "finished"),
        (lambda n: sqlq.Retry("1h") if n < 3 else None, {}, 3, "finished"),
        (lambda n: sqlq.Cancel("done"), {}, 1, "cancelled"),
        (ValueError, {"max_attempts": 3, "backoff": "1h"}, 3, ValueError),
        (ValueError, {"fail_on": ValueError}, 1, ValueError),
        (ValueError, {"retry_on": TypeError}, 1, ValueError),
        (lambda n: sqlq.Retry("1h"), {"max_attempts": 2}, 2, sqlq.Retry),
        (lambda n: sqlq.Snooze("1h"), {}, 1, sqlq.Snooze),
        (lambda n: KeyboardInterrupt(), {}, 1, KeyboardInterrupt),
    ],
)
def test_eager_attempts_run_at_once_and_raise_the_last_error(
    eager: sqlq.App, caplog: pytest.LogCaptureFixture, error: Any, options: Any, attempts: int, end: Any
) -> None:
    job, ran = failing(eager, error, **options)
    if isinstance(end, str):
        assert eager.enqueue(job).state == end
    else:
        with pytest.raises(end) as raised:
            eager.enqueue(job)
        if end is ValueError:
            assert raised.value.args == (attempts,), "the last one"
        if end is sqlq.Snooze:
            assert raised.value.__notes__ == ["t ran eagerly, and cannot be run again later"]
    assert ran == [*range(1, attempts + 1)]
    lines = [line for line in caplog.messages if "and is tried again at once" in line]
    assert len(lines) == attempts - 1


def test_a_unique_key_holds_while_its_job_runs(eager: sqlq.App) -> None:
    states: list[tuple[str, bool]] = []
    until: Any = None

    @eager.task(name="unique")
    def t(depth: int) -> None:
        if depth < 2:
            again = eager.enqueue(t.new(depth + 1).set(unique_key="k", unique_until=until))
            states.append((again.state, again.created))

    for until, expected in (("finish", [("running", False)]), ("start", [("finished", True)] * 2)):
        states.clear()
        eager.enqueue(t.new(0).set(unique_key="k", unique_until=until))
        assert states == expected
    job, attempts = failing(eager, lambda n: ValueError("x"), max_attempts=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="x"):
            eager.enqueue(job.set(unique_key="k"))
    assert attempts == [1, 1]


def test_mistakes_are_refused_before_anything_runs(eager: sqlq.App) -> None:
    ran: list[int] = []
    t = eager.task(name="t", max_attempts=3)(lambda: ran.append(1))
    with pytest.raises(sqlq.errors.UnknownTaskError, match="no task is named 'elsewhere'"):
        eager.enqueue_many([t.new(), eager.named("elsewhere").new()])
    assert ran == []
    with inline(eager) as inlined:
        eager.enqueue(t.new())
    assert len(inlined.jobs) == 1, "inline comes before eager"


@pytest.fixture
def shop(database_url: str, engine: Engine) -> Iterator[OrderShop]:
    """Tasks of an App in this mode, on a database with tables."""
    execute(engine, "CREATE TABLE orders (id integer PRIMARY KEY)")
    with closing(sqlq.App(database_url, eager=True)) as app:
        yield OrderShop(app, engine, max_attempts=1)


@common_sessions
def test_a_job_runs_after_the_commit_and_nothing_is_written(
    shop: OrderShop, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of the job is logged, and undoes nothing."""
    undone = caller.enqueue(shop.app, shop.note.new("rolled back"))
    caller.rollback()
    caller.execute("INSERT INTO orders (id) VALUES (1)")
    bad = caller.enqueue(shop.app, shop.bad.new("1"))
    first = caller.enqueue(shop.app, shop.count.new("first"))
    (second,) = caller.enqueue_many(shop.app, [shop.note.new("second")])
    assert (shop.done, first.state, first.created) == ([], "available", True)
    with pytest.raises(sqlq.WaitTimeoutError, match="when its transaction commits"):
        shop.app.result(second)
    caller.commit()
    assert shop.done == ["1", ("first", 1), "second"]
    assert shop.app.result(second) == shop.app.result(second.id) == "SECOND"
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == (
        "shop.bad, run eagerly when its transaction had committed, failed in attempt 1 of 1"
    )
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no order 1"
    with pytest.raises(sqlq.JobFailedError, match="no order 1"):
        shop.app.result(bad)
    assert shop.app.jobs.list() == []
    assert shop.app._connected.results.job_here(undone.id) is None
    caller.enqueue(shop.app, shop.note.new("in the next transaction"))
    caller.commit()
    assert shop.done[3:] == ["in the next transaction"]


@common_modes
def test_a_connection_without_commit_events_is_refused(shop: OrderShop, caller: Caller) -> None:
    caller.begin()
    caller.execute("INSERT INTO orders (id) VALUES (1)")
    refused = r"no commit on a connection of \w+ is reported: enqueue after the commit, "
    with pytest.raises(sqlq.errors.ConfigurationError, match=refused):
        caller.enqueue(shop.app, shop.note.new("a").set(unique_key="k"))
    caller.rollback()
    assert shop.done == []
    assert shop.app.enqueue(shop.note.new("b").set(unique_key="k")).created


@automatic
def test_a_job_without_a_transaction_runs_at_once(shop: OrderShop, caller: Caller) -> None:
    assert caller.enqueue(shop.app, shop.note.new("a")).state == "finished"
    assert shop.done == ["a"]


def test_a_job_of_a_lost_session_holds_no_unique_key(shop: OrderShop, engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine)
    left: Any = Session(engine)
    left.begin_nested()
    shop.app.enqueue(shop.note.new("first").set(unique_key="k"), session=left)
    gone = weakref.ref(left)
    left.connection().invalidate()
    del left
    gc.collect()
    assert gone() is None
    assert shop.app.enqueue(shop.note.new("second").set(unique_key="k")).created
    assert shop.done == ["second"]


def test_a_process_that_stays_keeps_no_session_and_few_jobs(shop: OrderShop, engine: Engine) -> None:
    jobs: list[int] = []

    def commit_many() -> weakref.ref[Session]:
        with Session(engine) as session:
            many = [shop.note.new("a") for _ in range(REMEMBERED // 10)]
            jobs.extend(job.id for job in shop.app.enqueue_many(many, session=session))
            session.commit()
            return weakref.ref(session)

    gone = [commit_many() for _ in range(20)]
    gc.collect()
    assert not any(each() for each in gone)
    results = shop.app._connected.results
    assert [results.job_here(jobs[0]), results.job_here(jobs[-1]) is None] == [None, False]
    assert len(shop.app._eagerly.jobs) == REMEMBERED


def test_many_threads_commit_on_connections_of_their_own(shop: OrderShop, engine: Engine) -> None:
    def commit(n: int) -> None:
        for i in range(25):
            with engine.connect() as conn:
                if engine.dialect.name == "sqlite":
                    conn.exec_driver_sql("BEGIN")
                shop.app.enqueue(shop.note.new(f"{n} {i}"), session=conn)
                conn.rollback() if i % 5 == 0 else conn.commit()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(commit, range(8)))
    assert sorted(shop.done) == sorted(f"{n} {i}" for n in range(8) for i in range(25) if i % 5)


def test_a_calls_eager_comes_first(shop: OrderShop, session: Session, engine: Engine, tmp_path: Path) -> None:
    """And a test's own database comes before that of the App."""
    shop.app.enqueue(shop.note.new("at once"), eager=True)
    assert shop.done == ["at once"]
    shop.app.enqueue(shop.note.new("written"), session=session, eager=False)
    session.commit()
    assert shop.done == ["at once"]
    assert [job.task for job in shop.app.jobs.list()] == ["shop.note"]
    with closing(sqlq.App(engine=engine)) as plain:
        note = plain.task(name="plain.note")(shop.done.append)
        plain.enqueue(note.new("by the call"), session=session, eager=True)
        assert shop.done == ["at once"]
        session.commit()
    assert shop.done == ["at once", "by the call"]
    with on_database(shop.app, f"sqlite:///{tmp_path / 'test.db'}"):
        shop.app.enqueue(shop.note.new("a"))
        assert_enqueued(shop.note, args=["a"])
        assert "a" not in shop.done
        assert drain(shop.app).finished == 1


@pytest.mark.parametrize(
    ("argument", "variable", "project"),
    [({"eager": True}, "0", ""), ({}, "1", "eager = false"), ({}, "", "eager = true")],
)
def test_argument_variable_and_pyproject_set_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: Any, variable: str, project: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLQ_EAGER", variable)
    (tmp_path / "pyproject.toml").write_text(f"[tool.sqlq]\n{project}\n")
    with closing(sqlq.App("sqlite:///none.db", **argument)) as app:
        assert app.enqueue(app.task(name="t")(lambda: None).new()).state == "finished"


def test_a_job_is_found_by_its_id(shop: OrderShop, session: Session) -> None:
    new = shop.note.new("a").set(queue="mail", label="of a")
    job = shop.app.enqueue(new, session=session)
    waiting = shop.app.jobs.get(job.id)
    assert (waiting.state, waiting.attempts, waiting.reserved_at) == ("available", 0, None)
    session.commit()
    found = shop.app.jobs.get(job.id)
    assert (found.id, found.state, found.result, found.args) == (job.id, "finished", "A", ["a"])
    assert (found.queue, found.task, found.label, found.attempts) == ("mail", "shop.note", "of a", 1)
    assert found.reserved_at is not None
    assert found.ended_at is not None
    assert found.created_at <= found.reserved_at <= found.ended_at
    with pytest.raises(sqlq.JobNotFoundError):
        shop.app.jobs.get(4711)


def test_a_job_that_ran_eagerly_has_its_result_at_once(eager: sqlq.App) -> None:
    """It needs no database."""
    shop = Shop(eager)
    cancelled, _ = failing(eager, lambda n: sqlq.Cancel("not needed"))
    job = eager.enqueue(eager.task(name="answer")(lambda n: n).new(7))
    assert eager.result(job) == eager.result(job, timeout=None) == 7
    assert asyncio.run(eager.aresult(job, timeout="1s")) == 7
    assert eager.wait_all([job]).ended == [job]
    assert [eager.result(done) for done in eager.as_completed([job])] == [7]
    with pytest.raises(sqlq.JobCancelledError):
        eager.result(eager.enqueue(cancelled))
    assert eager.result(eager.enqueue(sqlq.group(shop.note.new(1), shop.note.new(2)))) == [1, 2]


def test_a_job_that_ran_inline_has_its_result_at_once(app: sqlq.App, engine: Engine) -> None:
    """And a row is no job of the block that has the same number."""
    shop = Shop(app)
    shop.broken = {"pay"}
    row = app.enqueue(shop.total.new([7]))
    with sqlq.testing.inline(app) as ran:
        job = app.enqueue(shop.note.new(7))
        assert job.id == row.id
        assert (app.jobs.get(row).task, app.jobs.get(job).task) == ("total", "note")
        with pytest.raises(sqlq.WaitTimeoutError, match="is available"):
            app.result(row)
        assert app.result(job, timeout="1s") == app.result(job.id) == 7
        assert app.result(app.enqueue(sqlq.chain(shop.note.new(3), shop.note))) == 3
        with pytest.raises(ValueError, match="pay is broken"):
            app.enqueue(shop.note.new("pay"))
        with pytest.raises(sqlq.JobFailedError, match=r"\(note\) failed after 1 attempt: ValueError: pay is"):
            app.result(ran.jobs[-1].id)
    with sqlq.testing.inline(app, at="commit"), Session(engine) as session:
        job = app.enqueue(shop.note.new(7), session=session)
        with pytest.raises(sqlq.WaitTimeoutError, match=r"is available .*: it runs in this process when its"):
            app.result(job, timeout="1h")
        session.commit()
        assert app.result(job) == 7


def test_an_eager_flow_is_refused_where_a_step_waits_for_a_signal(app: sqlq.App) -> None:
    flow = sqlq.Flow()
    flow.wait("approved:7")
    with pytest.raises(sqlq.errors.ConfigurationError, match="waits for the signal approved:7"):
        app.enqueue(flow, eager=True)
    assert app.jobs.list() == []
