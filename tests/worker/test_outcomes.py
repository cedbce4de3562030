"""Each way an attempt can end, and where the job is afterwards."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError, OperationalError

import sqlq
from sqlq.config.constants import ERROR_BYTES
from sqlq.payload.encryption import new_key
from sqlq.worker.attempt.context import attempt_of
from tests.kit import drain, execute, for_each, handler_of, needs, run_one, span, wait_until, working

pytestmark = [pytest.mark.each_database, pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")]


@pytest.mark.parametrize("kind", ["def", "async def"])
@for_each(
    "error",
    [
        TypeError("fails() got an unexpected keyword argument 'a'"),  # as of a job that does not fit
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(7),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
)
def test_any_exception_of_a_handler_is_the_error_of_its_attempt(
    app: sqlq.App, error: BaseException, kind: str
) -> None:
    def fails() -> None:
        raise error

    task = app.task(name=type(error).__name__, max_attempts=2, backoff="0s")(handler_of(kind, fails))
    job = app.enqueue(task.new())
    drain(app)
    done = app.jobs.get(job.id)
    assert (done.state, done.reason, done.attempts) == ("failed", "error", 2)
    # PEP 479: what leaves a coroutine as StopIteration arrives as RuntimeError
    stops = kind == "async def" and isinstance(error, StopIteration)
    assert str(done.exception).endswith("RuntimeError" if stops else type(error).__name__)
    assert "fails" in str(done.traceback)
    assert [(e["attempt"], e["reason"]) for e in done.errors] == [(1, "error")]


async def exits() -> None:
    sys.exit(3)


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    raise ValueError


@pytest.mark.parametrize("child", [exits, stops_the_loop])
def test_a_system_exit_in_an_asyncio_task_ends_its_attempt_alone(
    app: sqlq.App, child: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """asyncio lets SystemExit of any task through the loop, on which all coroutines of the worker are."""
    going: list[Callable[[], object]] = []

    async def waits() -> None:
        go = asyncio.Event()
        going.append(functools.partial(asyncio.get_running_loop().call_soon_threadsafe, go.set))
        await go.wait()

    async def starts() -> None:
        await asyncio.create_task(child())

    def state(job: sqlq.Job) -> str:
        return app.jobs.get(job.id).state

    first = app.enqueue(app.task(name="waits")(waits).new())
    with working(app, concurrency=2):
        wait_until(lambda: going, what="a coroutine waiting")
        second = app.enqueue(app.task(name="starts", max_attempts=1)(starts).new())
        wait_until(lambda: state(second) == "failed", what="the attempt of the other failed")
        third = app.enqueue(app.task(name="later")(handler_of("async def", lambda: None)).new())
        wait_until(lambda: state(third) == "finished", what="one more run")
        going[0]()
        wait_until(lambda: state(first) == "finished", what="the first going on")
    assert [app.jobs.get(job.id).releases for job in (first, second, third)] == [0, 0, 0]


def test_an_error_text_of_50_megabytes_is_cut_and_scrubbed(
    app: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "sqlq")  # of a failed test nobody wants to see 50 megabytes

    def wordy() -> None:
        raise ValueError("head\0\ud800" + "x" * 50_000_000 + "tail")

    done = run_one(app, wordy, max_attempts=1)
    assert done.message is not None
    assert done.message.startswith("head␀\ufffd")
    assert done.message.endswith("tail")
    assert len((done.message + (done.traceback or "")).encode()) <= ERROR_BYTES


def test_retry_snooze_and_cancel(app: sqlq.App) -> None:
    assert sqlq.Retry(datetime(2020, 1, 1, tzinfo=UTC)).delay_ms == 0
    at = datetime.now(UTC) + timedelta(hours=2)
    seen: list[int] = []

    @app.task(name="retry", backoff="1h")
    def retry() -> None:
        seen.append(sqlq.current_job().attempt)
        if len(seen) < 3:
            raise sqlq.Retry("0s") from ValueError("busy")

    @app.task(name="signals")
    def signals(ends: bool) -> None:
        raise sqlq.Cancel("not wanted any more") if ends else sqlq.Snooze(at)

    new = retry.new(), signals.new(ends=False), signals.new(ends=True)
    retried, snoozed, cancelled = map(app.enqueue, new)
    counts = drain(app)
    assert (counts.finished, counts.retried, counts.released, counts.cancelled) == (1, 2, 1, 1)
    assert seen == [1, 2, 3]
    errors = [(error["exception"], error["message"]) for error in app.jobs.get(retried.id).errors]
    assert errors == [("ValueError", "busy")] * 2
    job = app.jobs.get(snoozed.id)
    assert (job.state, job.attempts, job.releases) == ("scheduled", 0, 1)
    assert job.available_at is not None
    assert abs(job.available_at - at) < timedelta(milliseconds=2), "by the database's clock"
    job = app.jobs.get(cancelled.id)
    assert (job.state, job.reason) == ("cancelled", "not wanted any more")


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_attempt_whose_outcome_cannot_be_computed_fails(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def fails() -> None:
        raise ValueError("no")

    def raises(*_: Any) -> Any:
        raise SystemExit

    monkeypatch.setattr("sqlq.worker.attempt.call.decide", raises)
    task = app.task(name="t", max_attempts=1)(handler_of(kind, fails))
    jobs = app.enqueue_many([task.new(), task.new()])
    assert drain(app, concurrency=1).failed == 2
    assert all("judging it raised a SystemExit" in (app.jobs.get(job.id).error or "") for job in jobs)
    assert "how its attempt ended cannot be judged" in caplog.text


def test_an_unreadable_payload_fails_at_once_and_blocks_nobody(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="t")(lambda: "ok")
    of_a_shape = ("[1]", "7", '{"args": 7}', '{"kwargs": []}', '{"args": [], "other": 1}')
    for payload in ("not json", "", *of_a_shape, "[" * 100_000):
        execute(engine, "INSERT INTO jobs (task, payload) VALUES ('t', :payload)", payload=payload)
    behind = app.enqueue(task.new())
    counts = drain(app)
    assert (counts.failed, counts.finished) == (8, 1)
    assert {(job.reason, job.attempts) for job in app.jobs.list(state="failed")} == {("bad_payload", 1)}
    assert app.jobs.get(behind.id).state == "finished"


@for_each("moment", ["-infinity", "infinity", "0044-03-15 BC", "9999-12-31"])
@for_each("column", ["available_at", "created_at"])
def test_tables_refuse_times_that_no_worker_could_read(engine: Engine, column: str, moment: str) -> None:
    if engine.dialect.name == "sqlite":
        moment = {"-infinity": "-1", "infinity": "9e999"}.get(moment, moment)
    # MariaDB takes no text that is no time
    with pytest.raises((IntegrityError, OperationalError)):
        execute(engine, f"INSERT INTO jobs (task, {column}) VALUES ('t', :moment)", moment=moment)


@pytest.mark.parametrize(
    ("task", "payload", "logged", "reason"),
    [
        ("no.such", "{}", "no task is named 'no.such'", "unknown_task"),
        ("t", '{"args": [1], "kwargs": {"new": 2}}', "unexpected keyword argument 'new'", "bad_payload"),
        ("at", '{"args": [1], "kwargs": {"new": 2}}', "unexpected keyword argument 'new'", "bad_payload"),
    ],
    ids=["unknown_task", "arguments", "arguments_of_a_coroutine"],
)
def test_a_job_that_a_worker_cannot_run_is_released_and_fails_after_a_day(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture,
    task: str, payload: str, logged: str, reason: str,
) -> None:  # fmt: skip
    """An older worker may meet a newer job, which another worker can run."""
    ran: list[int] = []

    @app.task(name="t", max_attempts=1)
    def plain(a: int) -> None:
        ran.append(a)

    @app.task(name="at", max_attempts=1)
    async def coroutine(a: int) -> None:
        ran.append(a)

    execute(engine, "INSERT INTO jobs (task, payload) VALUES (:task, :payload)", task=task, payload=payload)
    id = app.jobs.list()[0].id
    for released in (1, 2):
        assert drain(app).released == 1
        job = app.jobs.get(id)
        assert (job.attempts, job.releases, job.errors) == (0, released, [])
        assert (job.available_at or job.created_at) > job.created_at
        assert logged in caplog.text
        earlier = f", unknown_since = unknown_since - {span(engine, 86_400)}" if released == 2 else ""
        execute(engine, f"UPDATE jobs SET available_at = created_at{earlier}")
    assert drain(app).failed == 1
    assert app.jobs.get(id).reason == reason
    assert not ran


def test_a_job_under_an_alias_runs(app: sqlq.App, engine: Engine) -> None:
    app.task(name="shop.send_receipt", aliases=["mail.send", "mail.receipt"])(lambda n: n)
    for name in ("mail.send", "mail.receipt", "shop.send_receipt"):
        payload = '{"args": [7]}'
        execute(engine, "INSERT INTO jobs (task, payload) VALUES (:task, :p)", task=name, p=payload)
    assert drain(app).finished == 3


def test_a_job_whose_attempts_were_spent_by_hand_does_not_run_again(app: sqlq.App, engine: Engine) -> None:
    ran: list[int] = []
    app.enqueue(app.task(name="t")(lambda: ran.append(1)).new())
    execute(engine, "UPDATE jobs SET attempts = max_attempts")
    assert (drain(app).failed, ran) == (1, [])


def test_a_timed_out_thread_is_settled_when_it_ends(app: sqlq.App) -> None:
    """A thread cannot be killed; until it ends the job stays its worker's."""
    release = threading.Event()

    @app.task(name="t", timeout="50ms", max_attempts=1)
    def stubborn() -> str:
        wait_until(lambda: sqlq.current_job().should_stop(), what="the timeout")
        release.wait(10)
        return "too late"

    job = app.enqueue(stubborn.new())
    worker = app.worker(drain=True).start()
    wait_until(lambda: app.jobs.get(job.id).state == "running", what="the job running")
    release.set()
    assert worker.join("10s")
    assert (app.jobs.get(job.id).state, app.jobs.get(job.id).reason) == ("failed", "timeout")


def test_errors_of_many_attempts_stay_bounded(app: sqlq.App) -> None:
    def fails() -> None:
        raise ValueError("x" * 5_000)

    done = run_one(app, fails, max_attempts=100)
    assert (done.state, done.attempts) == ("failed", 100)
    assert len(json.dumps(done.errors)) < 2 * ERROR_BYTES < 100 * 5_000
    assert done.errors[0]["attempt"] == 1


def logged(function: Any) -> Any:
    """A decorator as people write them: nothing shows that it calls an `async def` function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def test_an_async_handler_under_an_ordinary_decorator_is_awaited(app: sqlq.App) -> None:
    loops: list[Any] = []

    async def send(n: int) -> dict[str, int]:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return {"job": sqlq.current_job().id, "n": n}

    async def on_the_loop() -> None:
        loops.append(asyncio.get_running_loop())

    wrapped = app.task(name="wrapped")(logged(send))
    plain = app.task(name="plain")(on_the_loop)
    job = app.enqueue(wrapped.new(7))
    app.enqueue(plain.new())
    assert drain(app).finished == 2
    assert app.jobs.get(job.id).result == {"job": job.id, "n": 7}
    assert loops[0] is loops[1], "clients and pools of the handlers' own belong to one loop"


def test_a_coroutine_of_a_thread_times_out_and_ends_before_its_settle(app: sqlq.App) -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(app.jobs.get(job.id).state)

    task = app.task(name="t", timeout="200ms", max_attempts=1)(logged(slow))
    job = app.enqueue(task.new())
    assert drain(app).failed == 1
    assert app.jobs.get(job.id).reason == "timeout"
    assert ended == ["running"]


@pytest.mark.parametrize(
    ("result", "why"),
    [(object(), "is not JSON"), (float("nan"), "is not JSON"), ("x" * 1_100_000, "more than 1,048,576")],
)
def test_the_row_has_the_reason_why_a_result_was_not_stored(app: sqlq.App, result: Any, why: str) -> None:
    done = run_one(app, lambda: result)
    assert (done.state, done.result) == ("finished", None)
    assert why in done.reason
    with app.database.read() as conn:
        schema = f"{app.database.schema}." if app.database.schema else ""
        assert conn.execute(text(f"SELECT error FROM {schema}job_states")).scalar_one() == done.reason


@needs("mariadb")
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_batches_of_large_jobs_are_written_whatever_their_size(app: sqlq.App, *, keyed: bool) -> None:
    """They take more than one packet of MariaDB's together, whose size is 16 MB."""
    large = '"' * 250_000
    together = threading.Barrier(40)

    @app.task(name="t")
    def t(text: str, n: int) -> str:
        with suppress(threading.BrokenBarrierError):
            together.wait(10)
        return text

    jobs = [t.new(large, n) for n in range(40)]
    if keyed:
        jobs = [job.set(unique_key=f"key {n}") for n, job in enumerate(jobs)]
    made = app.enqueue_many(jobs)
    assert app.worker(drain=True, concurrency=40).run().finished == 40
    assert {app.result(job) for job in made} == {large}


def test_a_retry_names_the_queue_and_the_priority_of_the_next_attempt(app: sqlq.App) -> None:
    """It stays in its queue where another job has its unique key in the new one."""
    seen = []

    @app.task(name="t")
    def task() -> None:
        job = sqlq.current_job()
        seen.append((job.queue, attempt_of(job).claimed.priority))
        if len(seen) == 1:
            raise sqlq.Retry("0s", queue="slow", priority=-5)
        raise sqlq.Retry("1h", queue="other", priority=7)

    app.enqueue(task.new().set(unique_key="k", queue="other", delay="1h"))
    job = app.enqueue(task.new().set(unique_key="k"))
    drain(app)
    assert seen == [("default", 0), ("slow", -5)]
    done = app.jobs.get(job.id)
    assert (done.queue, done.priority, done.attempts) == ("slow", 7, 2)


def test_a_running_job_knows_its_worker(app: sqlq.App) -> None:
    seen = []
    task = app.task(name="t")(lambda: seen.append(sqlq.current_job().worker))
    app.enqueue(task.new())
    with working(app) as worker:
        wait_until(lambda: seen, what="the job run")
        assert seen == [worker.id] == [known.id for known in app.workers.list()]


def test_a_job_with_a_bad_signature_leaves_one_line_and_no_traceback(
    app: sqlq.App, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlq")
    encrypting = sqlq.App(database_url, keys=[new_key()])
    encrypting.task(name="t")(lambda: None)
    job = app.enqueue(app.task(name="t")(lambda: None).new())
    assert drain(encrypting).failed == 1
    encrypting.close()
    assert app.jobs.get(job.id).reason == "bad_signature"
    (line,) = [record for record in caplog.records if getattr(record, "job_id", None) == job.id]
    assert line.exc_info is None


def test_a_signed_job_stays_in_its_queue(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = sqlq.App(database_url, keys=[new_key()])
    attempts = []

    @app.task(name="t")
    def task() -> None:
        attempts.append(sqlq.current_job().queue)
        if len(attempts) == 1:
            raise sqlq.Retry("0s", queue="other", priority=3)

    app.enqueue(task.new())
    assert drain(app).finished == 1
    app.close()
    assert attempts == ["default", "default"]
    assert "it stays in its queue" in caplog.text
