"""Waiting for jobs: what comes of it, and what it costs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlq
from sqlq.results import waiter as waiting
from tests.kit import execute, needs, received, wait_until, working
from tests.kit.flows import Shop
from tests.kit.mariadb import OwnMariaDB
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.processes import run_program

ID = UUID(int=7)


@pytest.fixture
def tasks(app: sqlq.App) -> dict[str, Any]:
    """Tasks that end in each way."""

    @app.task(name="answer")
    def answer(n: int) -> UUID:
        return UUID(int=n)

    @app.task(name="fails", max_attempts=2, backoff="0s")
    def fails() -> None:
        raise ValueError("no paper\nin tray 2")

    @app.task(name="cancels")
    def cancels() -> None:
        raise sqlq.Cancel("not needed")

    return {"answer": answer, "fails": fails, "cancels": cancels}


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Begin work in a thread of its own, and return its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def watches(app: sqlq.App) -> dict[int, set[Any]]:
    """Return what this App waits for, by job."""
    found: dict[int, set[Any]] = {}
    for watch in list(app._connected.results.waiter._watches):
        for id in list(watch.waits_for):
            found.setdefault(id, set()).add(watch)
    return found


def is_seen(app: sqlq.App, id: int) -> bool:
    """Whether a poll has looked at a job that is waited for."""
    return any(watch.seen for watch in watches(app).get(id, ()))


def test_results_are_waited_for_without_blocking_the_loop(app: sqlq.App, tasks: Any) -> None:
    async def main() -> tuple[list[UUID], Any]:
        jobs = await app.aenqueue_many([tasks["answer"].new(n) for n in range(50)])
        found = await asyncio.gather(*(app.aresult(job, "30s") for job in jobs))
        return list(found), await app.aresult(jobs[7])

    with working(app):
        assert app.result(app.enqueue(tasks["answer"].new(7)), timeout="30s") == ID
        job = app.enqueue(tasks["answer"].new(7))
        assert app.result(job.id, timeout=None) == ID
        assert app.result(job) == ID, "and again, without a wait"
        assert asyncio.run(main()) == ([UUID(int=n) for n in range(50)], ID)
    assert watches(app) == {}


def test_waiting_for_a_failed_or_cancelled_job_raises_its_error(app: sqlq.App, tasks: Any) -> None:
    job = app.enqueue(tasks["fails"].new())
    with (
        working(app),
        pytest.raises(sqlq.JobFailedError, match=r"^job 1 .fails. failed after 2 attempts: ") as raised,
    ):
        app.result(job, timeout="30s")
    error = raised.value
    assert str(error).endswith("ValueError: no paper"), "the first line"
    assert (error.id, error.task, error.attempts, error.reason) == (job.id, "fails", 2, "error")
    assert (error.exception, error.message) == ("ValueError", "no paper\nin tray 2")
    assert error.traceback is not None
    assert 'raise ValueError("no paper' in error.traceback
    with pytest.raises(sqlq.JobFailedError):
        asyncio.run(app.aresult(job))
    with (
        working(app),
        pytest.raises(sqlq.JobCancelledError, match=r"was cancelled: not needed$") as cancelled,
    ):
        app.result(app.enqueue(tasks["cancels"].new()), timeout="30s")
    assert (cancelled.value.task, cancelled.value.reason) == ("cancels", "not needed")


def test_the_timeout_ends_the_wait_and_not_the_job(app: sqlq.App, tasks: Any) -> None:
    """And a job that ended long ago is seen however short the time is."""
    job = app.enqueue(tasks["answer"].new(7))
    with pytest.raises(TimeoutError, match=r"^job 1 is available and has no result after 50 ms$") as raised:
        app.result(job, timeout="50ms")
    assert isinstance(raised.value, sqlq.WaitTimeoutError)
    with pytest.raises(sqlq.WaitTimeoutError, match=r"^job 1 is available and has no result$"):
        app.result(job, timeout="0s")
    with pytest.raises(TimeoutError, match="after 50 ms"):
        asyncio.run(app.aresult(job, timeout="50ms"))
    assert watches(app) == {}
    assert app.worker(drain=True).run().finished == 1
    assert app.result(job, timeout="1ms") == ID
    with closing(sqlq.App(engine=app.database.engine)) as again:
        assert asyncio.run(again.aresult(job, timeout="1ms")) == str(ID)
        assert [ended.state for ended in again.as_completed([job], timeout="0s")] == ["finished"]


def test_waiting_for_an_unknown_job_raises_at_once(app: sqlq.App, engine: Engine, tasks: Any) -> None:
    for timeout in ("0s", "1h", None):
        with pytest.raises(sqlq.JobNotFoundError, match=r"^there is no job 4711: it never was"):
            app.result(4711, timeout=timeout)
    with pytest.raises(sqlq.JobNotFoundError, match=r"^there is no job 99999999999999999999: "):
        app.result(99999999999999999999, timeout="1h")
    with pytest.raises(sqlq.JobNotFoundError):
        asyncio.run(app.aresult(4711, timeout=None))
    with Session(engine) as session:
        job = app.enqueue(tasks["answer"].new(7), session=session)
        says = f"^there is no job {job.id}: .* its transaction has not been committed"
        with pytest.raises(sqlq.JobNotFoundError, match=says):
            app.result(job, timeout="1h")


@pytest.mark.parametrize(
    ("statement", "error", "says"),
    [
        ("DELETE FROM jobs", sqlq.JobNotFoundError, "^there is no job 1: .* kept no more"),
        ("ALTER TABLE failed_jobs RENAME TO others", DBAPIError, "failed_jobs"),
    ],
    ids=["row", "table"],
)
def test_the_wait_for_a_job_ends_when_its_row_or_a_table_is_gone(
    app: sqlq.App, engine: Engine, tasks: Any, statement: str, error: type[Exception], says: str
) -> None:
    job = app.enqueue(tasks["answer"].new(7))
    waiter = in_a_thread(lambda: app.result(job, timeout="30s"))
    wait_until(lambda: is_seen(app, job.id), what="a first look")
    execute(engine, statement)
    with pytest.raises(error, match=says):
        waiter.result(60)


def test_closing_the_app_ends_the_wait_with_an_error(app: sqlq.App, tasks: Any) -> None:
    job = app.enqueue(tasks["answer"].new(7))
    waiter = in_a_thread(lambda: app.result(job, timeout=None))
    wait_until(lambda: job.id in watches(app), what="the waiter")
    app.close()
    with pytest.raises(sqlq.SqlqError, match=r"^the App was closed while this waited"):
        waiter.result(60)
    with working(app):
        assert app.result(job, timeout="30s") == ID, "it may be used again"


def test_all_or_the_first_of_several_jobs_are_waited_for(app: sqlq.App, tasks: Any) -> None:
    jobs = app.enqueue_many([tasks["answer"].new(1), tasks["fails"].new(), tasks["cancels"].new()])
    later = app.enqueue(tasks["answer"].new(7).set(delay="1h"))
    with working(app):
        done = app.wait_all([*jobs, jobs[0].id], timeout="30s")
        assert [job.id for job in done.ended] == [1, 2, 3]
        assert [job.state for job in done.ended] == ["finished", "failed", "cancelled"]
        assert done.pending == []
        late = app.wait_all([later.id, *jobs], timeout="50ms")
        assert [job.id for job in late.ended] == [1, 2, 3]
        assert [(job.id, job.task, job.state) for job in late.pending] == [(later.id, "answer", "scheduled")]
        assert app.wait_all([later, *jobs], timeout="0s").pending[0].id == later.id
        assert asyncio.run(app.await_all([later.id, *jobs], timeout="50ms")) == late
        job = app.enqueue(tasks["answer"].new(1))
        assert [each.id for each in app.wait_all([later, job], all=False).ended] == [job.id]
        again = app.enqueue(tasks["answer"].new(1))
        first = asyncio.run(app.await_all([later, again], all=False))
    assert [each.id for each in first.ended] == [again.id]
    assert app.wait_all([]).ended == []
    assert watches(app) == {}


def test_as_completed_yields_jobs_as_they_end(app: sqlq.App, tasks: Any) -> None:
    go = [threading.Event() for _ in range(3)]

    @app.task(name="held")
    def held(n: int) -> int:
        assert go[n].wait(60)
        return n

    async def main() -> set[int]:
        jobs = app.enqueue_many([tasks["answer"].new(n) for n in range(5)])
        return {(await app.aresult(job)).int async for job in app.as_completed(jobs, timeout="30s")}

    jobs = app.enqueue_many([held.new(n) for n in range(3)])
    found = []
    with working(app):
        go[1].set()
        for job in app.as_completed(jobs, timeout="30s"):
            found.append(app.result(job))
            if len(found) < 3:
                go[{1: 2, 2: 0}[found[-1]]].set()
        assert asyncio.run(main()) == set(range(5))
    assert found == [1, 2, 0]
    late = app.enqueue(tasks["answer"].new(7))
    said = f"^1 of 2 jobs have not ended after 50 ms; job {late.id} is available$"
    with pytest.raises(TimeoutError, match=said):
        list(app.as_completed([1, late], timeout="50ms"))
    assert watches(app) == {}


def test_the_result_of_a_flow_is_that_of_its_end_or_of_a_failed_step(app: sqlq.App) -> None:
    shop = Shop(app)
    note, shop.broken = shop.note, {"broken"}
    fails = app.enqueue(sqlq.chain(note.new("broken"), note.new("ship")))
    with pytest.raises(sqlq.WaitTimeoutError, match=r"^2 of 2 jobs have not ended; job 1 is available$"):
        app.result(fails)
    with working(app):
        with pytest.raises(sqlq.JobFailedError, match="broken is broken"):
            app.result(fails, "30s")
        assert app.result(app.enqueue(sqlq.chain(note.new(3), note)), "30s") == 3
        assert app.result(app.enqueue(sqlq.group(note.new(1), note.new(2))), "30s") == [1, 2]
        assert app.result(app.enqueue(sqlq.group(note.new(1))), "30s") == [1], "a list, whatever their number"
        assert app.result(app.enqueue(note.map([1, 2, 3]).then(shop.total)), "30s") == 6
        flow = sqlq.Flow()
        paid = flow.add(note.new("pay"))
        sent, told = flow.add(note.new("send"), after=[paid]), flow.add(note.new("tell"), after=[paid])
        alarm = flow.add(note.new("alarm"), after=[sent, told], when="failure")
        flow.add(note.new("log"), after=[alarm])
        placed = app.enqueue(flow)
        assert asyncio.run(app.aresult(placed, "30s")) == ["send", "tell"], "not what comes upon a failure"
        assert app.result(placed) == ["send", "tell"]


def test_a_thousand_waiters_share_their_queries(app: sqlq.App, tasks: Any) -> None:
    others = set(threading.enumerate())  # the threads of other tests' Apps end on their own
    jobs = app.enqueue_many([tasks["answer"].new(n).set(delay="1h") for n in range(1000)])

    def polls_are_rare() -> bool:
        rare = app._connected.results.waiter._interval == waiting.MAX_SECONDS
        return rare and all(is_seen(app, job.id) for job in jobs)

    async def main() -> tuple[int, float]:
        waiters = [asyncio.create_task(app.aresult(job, "60s")) for job in jobs]
        await asyncio.to_thread(wait_until, polls_are_rare, what="rare polls")
        with received(app.database.engine) as sent:
            began = time.monotonic()
            await asyncio.sleep(1)
            took = time.monotonic() - began
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        return len(sent), took

    sent, took = asyncio.run(main())
    assert sent <= 2 * took / (0.8 * waiting.MAX_SECONDS) + 4, f"{sent} statements in {took:.1f} s"
    assert watches(app) == {}
    assert sum(thread.name == "sqlq-results" for thread in set(threading.enumerate()) - others) == 1


@needs("server")
def test_waiters_wait_through_a_restart_of_the_database(
    app: sqlq.App, tasks: Any, restartable_server: OwnPostgreSQL | OwnMariaDB
) -> None:
    job = app.enqueue(tasks["answer"].new(7))
    waiter = in_a_thread(lambda: app.result(job, timeout="60s"))
    wait_until(lambda: is_seen(app, job.id), what="a first look")
    restartable_server.stop("immediate")
    short = in_a_thread(lambda: app.result(job, timeout="200ms"))
    with pytest.raises(TimeoutError):
        short.result(60)
    restartable_server.start()
    with working(app):
        assert waiter.result(60) == ID


def test_a_forked_process_waits_for_itself(app: sqlq.App, database_url: str) -> None:
    app.task(name="t")(lambda who: None)
    with working(app):
        words = ("-W", "ignore::DeprecationWarning", "-m", "tests.programs.forking", "waits", database_url)
        done = run_program(*words)
    assert (done.returncode, done.stderr) == (0, "")
