"""Eager mode without a session: jobs run where they are enqueued, and nothing is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import sqlq
from sqlq.testing import assert_enqueued, drain, inline, on_database


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
    assert len({job.id, *(each.id for each in several)}) == 4
    with pytest.raises(sqlq.errors.ConfigurationError, match="outside a handler"):
        sqlq.current_job()


def test_ids_of_eager_jobs_are_no_stored_ones(eager: sqlq.App) -> None:
    """Handlers make idempotency keys of it."""
    t = eager.task(name="t")(lambda: None)
    for _ in range(100):
        assert 4_000_000_000_000_000_000 < eager.enqueue(t.new()).id < 2**63


def test_asynchronous_handlers_and_callers(eager: sqlq.App) -> None:
    ran: list[Any] = []

    @eager.task(name="a")
    async def a() -> None:
        await asyncio.sleep(0)
        ran.append(asyncio.get_running_loop())

    @eager.task(name="b")
    def b() -> None:
        ran.append(threading.current_thread())

    eager.enqueue(a.new())

    async def main() -> None:
        await eager.aenqueue(a.new())
        await eager.aenqueue_many([b.new()])
        assert ran[1] is asyncio.get_running_loop()
        assert ran[2] is not threading.current_thread()

    asyncio.run(main())
    assert len(ran) == 3


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


def test_middleware_runs_around_eager_jobs(eager: sqlq.App) -> None:
    said: list[str] = []

    @eager.middleware
    @contextmanager
    def around(running: sqlq.JobContext) -> Iterator[None]:
        said.append("in")
        yield
        said.append("out")

    eager.enqueue(eager.task(name="t")(lambda: said.append("handler")).new())
    assert said == ["in", "handler", "out"]


def failing(app: sqlq.App, error: Callable[[int], BaseException | None], **options: Any) -> Any:
    """Return a job that raises what `error` makes of the number of its attempt, and the attempts it had."""
    attempts: list[int] = []

    def t() -> None:
        attempts.append(sqlq.current_job().attempt)
        if (raised := error(attempts[-1])) is not None:
            raise raised

    return app.task(name="t", **options)(t).new(), attempts


def test_eager_attempts_run_at_once_and_raise_the_last_error(
    eager: sqlq.App, caplog: pytest.LogCaptureFixture
) -> None:
    job, attempts = failing(eager, lambda n: ValueError(f"no {n}"), max_attempts=3, backoff="1h")
    with pytest.raises(ValueError, match="no 3"):
        eager.enqueue(job)
    assert attempts == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "t, run eagerly, failed in attempt 1 of 3, and is tried again at once: no 1",
        "t, run eagerly, failed in attempt 2 of 3, and is tried again at once: no 2",
    ]


@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        (lambda n: ValueError("x") if n < 3 else None, {}, [1, 2, 3]),
        (lambda n: sqlq.Retry("1h") if n < 3 else None, {}, [1, 2, 3]),
        (lambda n: sqlq.Cancel("done"), {}, [1]),
    ],
)
def test_eager_attempts_may_succeed_or_cancel(
    eager: sqlq.App, error: Any, options: dict[str, Any], expected: list[int]
) -> None:
    job, attempts = failing(eager, error, **options)
    state = eager.enqueue(job).state
    assert (attempts, state) == (expected, "finished" if len(expected) > 1 else "cancelled")


@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        (ValueError("x"), {"fail_on": ValueError}, [1]),
        (ValueError("x"), {"retry_on": TypeError}, [1]),
        (sqlq.Retry("1h"), {"max_attempts": 2}, [1, 2]),
        (sqlq.Snooze("1h"), {}, [1]),
        (KeyboardInterrupt(), {}, [1]),
    ],
)
def test_eager_attempts_that_fail_raise(
    eager: sqlq.App, error: BaseException, options: dict[str, Any], expected: list[int]
) -> None:
    job, attempts = failing(eager, lambda n: error, **options)
    with pytest.raises(type(error)) as raised:
        eager.enqueue(job)
    assert attempts == expected
    if isinstance(error, sqlq.Snooze):
        assert raised.value.__notes__ == ["t ran eagerly, and cannot be run again later"]


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


def test_callbacks_of_eager_jobs_run(eager: sqlq.App) -> None:
    followed: list[str] = []

    @eager.task(name="after")
    def after(ended: sqlq.JobOutcome) -> None:
        followed.append(ended.task)

    eager.enqueue(eager.task(name="good", on_success=after)(lambda: None).new())
    bad = eager.task(name="bad", on_failure=after, max_attempts=1)(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        eager.enqueue(bad.new())
    assert followed == ["good", "bad"]


def test_mistakes_are_refused_before_anything_runs(eager: sqlq.App) -> None:
    ran: list[int] = []
    t = eager.task(name="t")(lambda: ran.append(1))
    wrong: Any = t
    with pytest.raises(sqlq.EnqueueError, match="not a Task"):
        eager.enqueue_many([t.new(), wrong])
    with pytest.raises(sqlq.errors.UnknownTaskError, match="no task is named 'elsewhere'"):
        eager.enqueue_many([t.new(), eager.named("elsewhere").new()])
    assert ran == []


def test_eager_of_a_call_comes_before_app_and_environment(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    for said, given, expected in (
        ("1", None, True),
        ("0", None, False),
        ("1", False, False),
        ("", None, False),
        ("0", True, True),
    ):
        monkeypatch.setenv("SQLQ_EAGER", said)
        with closing(sqlq.App(database_url, eager=given)) as app:
            t = app.task(name="t")(ran.append)
            for call, result in ((None, expected), (True, True), (False, False)):
                ran.clear()
                app.enqueue(t.new(1), eager=call)
                assert (ran == [1]) is result
    monkeypatch.setenv("SQLQ_EAGER", "perhaps")
    with pytest.raises(sqlq.errors.ConfigurationError, match="SQLQ_EAGER is 'perhaps': it is True or False"):
        sqlq.App()


def test_inline_comes_before_eager(eager: sqlq.App) -> None:
    t = eager.task(name="t", max_attempts=3)(lambda: 1 / 0)
    with inline(eager) as ran, pytest.raises(ZeroDivisionError):
        eager.enqueue(t.new())
    assert [job.attempts for job in ran.jobs] == [1]


def test_eager_jobs_are_written_on_a_test_database(eager: sqlq.App, tmp_path: Path) -> None:
    ran: list[int] = []
    t = eager.task(name="t")(ran.append)
    with on_database(eager, f"sqlite:///{tmp_path / 'test.db'}"):
        eager.enqueue(t.new(1))
        assert_enqueued(t, args=[1])
        eager.enqueue(t.new(2), eager=True)
        assert ran == [2]
        assert drain(eager).finished == 1
    eager.enqueue(t.new(3))
    assert ran == [2, 1, 3]
