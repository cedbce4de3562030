"""A new job with the unique key of a waiting one keeps, replaces or debounces it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Engine, MetaData, Table, create_engine, text, update
from sqlalchemy.orm import Session

import sqlq
from sqlq import Job
from sqlq.database.schemas import in_schema
from sqlq.model.outcome import ErrorText, Failed, Finished, Retried
from sqlq.store.jobs import settle as settling
from sqlq.testing import inline
from tests.faults import guard
from tests.kit import claim, claim_on, count, for_each, needs, settle, wait_until, waiting_for_locks
from tests.kit.drivers import Caller, Mode, common_modes

pytestmark = pytest.mark.each_database


@pytest.fixture
def index(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="shop.index")
    def index(page: int = 0, note: str = "") -> None: ...

    return index


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A user's engine, whose transactions on SQLite begin with the write lock."""
    engine = create_engine(database_url)
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    guard.install(engine)
    yield engine
    guard.check(engine)
    engine.dispose()


def test_a_waiting_job_gets_the_newest_arguments(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine
) -> None:
    new = index.new(1).set(unique_key="k", delay="1h")
    first = app.enqueue(new.set(priority=3, label="one", headers={"a": 1}))
    due = app.jobs.get(first.id).available_at
    again = app.enqueue(index.new(2).set(unique_key="k", on_conflict="replace", timeout="5s"))
    assert again == Job(first.id, "default", "shop.index", sqlq.State.SCHEDULED, created=False, replaced=True)
    found = app.jobs.get(first.id)
    assert found.payload == {"args": [2]}
    assert (found.priority, found.timeout_ms, found.label, found.headers) == (0, 5_000, None, {})
    assert found.available_at == due, "it is due when the first one was"
    kept = app.enqueue(index.new(3).set(unique_key="k"))
    assert (kept.created, kept.replaced, app.jobs.get(first.id).payload) == (False, False, {"args": [2]})


def test_a_job_of_another_task_may_replace_a_waiting_one(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine
) -> None:
    other = app.task(name="shop.other")(lambda: None)
    first = app.enqueue(index.new(1).set(unique_key="k"))
    again = app.enqueue(other.new().set(unique_key="k", on_conflict="replace"))
    assert (again.id, again.task, app.jobs.get(first.id).task) == (first.id, "shop.other", "shop.other")


@pytest.mark.parametrize("conflict", ["replace", "debounce"])
def test_on_conflict_creates_a_job_where_none_waits(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine, conflict: Any
) -> None:
    options: dict[str, Any] = {"max_wait": "1h"} if conflict == "debounce" else {}
    made = app.enqueue(index.new(1).set(unique_key="k", on_conflict=conflict, **options))
    assert (made.created, made.replaced, made.state) == (True, False, "available")
    with Session(engine) as session, session.begin():
        new = index.new(2).set(unique_key="m", on_conflict=conflict, **options)
        first = app.enqueue(new, session=session)
        again = app.enqueue(new, session=session)
        assert (first.created, again.created, again.replaced) == (True, False, True), (
            "in one transaction, too"
        )
    assert count(app.database.engine) == 2


def test_debounce_moves_a_job_up_to_max_wait(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine
) -> None:
    def put_off(n: int, delay: str, max_wait: str = "10m") -> timedelta:
        new = index.new(n).set(unique_key="k", delay=delay, on_conflict="debounce", max_wait=max_wait)
        job = app.enqueue(new)
        found = app.jobs.get(job.id)
        assert found.payload == {"args": [n]}
        assert found.available_at is not None
        return found.available_at - found.created_at

    minute = timedelta(minutes=1)
    assert put_off(1, "30s") == timedelta(seconds=30)
    second = put_off(2, "5m")
    assert 5 * minute <= second < 6 * minute
    assert put_off(3, "1m") == second, "never earlier"
    assert put_off(4, "1h") == 10 * minute, "and not later than that after the first"
    assert put_off(5, "1h", max_wait="2m") == 10 * minute
    assert count(app.database.engine) == 1


@pytest.mark.parametrize(("until", "created"), [("finish", False), ("start", True)])
def test_on_conflict_does_not_replace_a_running_job(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine, until: Any, created: bool
) -> None:
    new = index.new(1).set(unique_key="k", unique_until=until, on_conflict="replace")
    first = app.enqueue(new)
    (held,) = claim(app)
    again = app.enqueue(new._with_payload('{"args": [2]}'))
    assert (again.created, again.replaced, again.id == first.id) == (created, False, not created)
    assert app.jobs.get(first.id).payload == {"args": [1]}
    settle(app, held, Finished())
    assert app.enqueue(new).replaced is created


def test_a_replaced_job_that_waits_for_its_retry_begins_anew(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine
) -> None:
    """With all attempts, and nothing of what the other had come to; but whoever held that one is fenced."""
    first = app.enqueue(index.new(1).set(unique_key="k"))
    (held,) = claim(app)
    settle(app, held, Retried(3_600_000, ErrorText("ValueError", "no")))
    with engine.begin() as conn, guard.unguarded(conn):
        # by its table, for the word alone is one of MariaDB's
        begun = update(Table("jobs", MetaData(), Column("cursor")))
        conn.execute(begun.values(cursor="[1]"))
        conn.execute(text("UPDATE jobs SET losses = 2, releases = 3, progress = 1"))
    again = app.enqueue(index.new(2).set(unique_key="k", on_conflict="replace", max_attempts=2))
    assert (again.id, again.replaced, again.state) == (first.id, True, "scheduled")
    found = app.jobs.get(first.id)
    assert (found.attempts, found.releases, found.errors, found.cursor, found.progress) == (
        0,
        0,
        [],
        None,
        None,
    )
    assert (found.payload, found.max_attempts, found.lease_token) == ({"args": [2]}, 2, 1)


def test_a_batch_with_equal_keys_keeps_the_last_job(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine
) -> None:
    old = app.enqueue(index.new(0).set(unique_key="old"))

    def new(n: int, key: str, conflict: Any = "replace") -> sqlq.NewJob:
        return index.new(n).set(unique_key=key, on_conflict=conflict)

    batch = [
        new(1, "b"),
        index.new(2),
        new(3, "old"),
        new(4, "b"),
        new(5, "old"),
        new(6, "a", "keep"),
        new(7, "c").set(on_conflict="debounce", max_wait="1h"),
        new(8, "b", "keep"),
    ]
    with Session(engine) as session, session.begin():
        done = app.enqueue_many(batch, session=session)
    assert [job.created for job in done] == [False, True, False, True, False, True, True, False]
    assert [job.replaced for job in done] == [False, False, False, False, True, False, False, False]
    assert done[0].id == done[3].id == done[7].id
    assert done[2].id == done[4].id == old.id
    payloads = {job.unique_key: job.payload["args"][0] for job in app.jobs.list()}
    assert payloads == {"old": 5, "b": 4, "a": 6, "c": 7, None: 2}


@common_modes
def test_conflicts_are_resolved_on_connections_of_drivers(
    app: sqlq.App, index: sqlq.Task[..., None], database_url: str, mode: Mode
) -> None:
    first = app.enqueue(index.new(1).set(unique_key="k", delay="1m"))
    new = index.new(2).set(unique_key="k", delay="1h", on_conflict="debounce", max_wait="30m")
    with Caller(database_url, mode) as caller:
        for end in (caller.rollback, caller.commit):
            caller.begin()
            again = caller.enqueue(app, new)
            assert (again.id, again.created, again.replaced) == (first.id, False, True)
            end()
            found = app.jobs.get(first.id)
            assert found.available_at is not None
            waits = found.available_at - found.created_at
            assert waits == timedelta(minutes=1 if end == caller.rollback else 30)


def test_statement_has_the_conflict_clause(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine
) -> None:
    first = app.enqueue(index.new(1).set(unique_key="k"))
    new = index.new(2).set(unique_key="k", on_conflict="replace")
    sql, parameters = app.statement(
        new, paramstyle="pyformat" if engine.dialect.name != "sqlite" else "qmark"
    )
    with engine.begin() as conn:
        assert conn.exec_driver_sql(sql, parameters).scalar_one() == first.id
    assert app.jobs.get(first.id).payload == {"args": [2]}


# -- at the same time ----------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@needs("sessions")
def test_a_replace_does_not_wait_for_an_open_completion(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    """A handler's transaction may be long, and its job cannot be replaced anyway."""
    first = app.enqueue(index.new(1).set(unique_key="k"))
    (held,) = claim(app)
    with engine.begin() as handler, in_schema(handler, "public"):
        settling.complete(handler, (held.id, held.lease_token), Finished())
        new = index.new(2).set(unique_key="k", on_conflict="replace")
        again = pool.submit(app.enqueue, new).result(20)
    assert (again.id, again.created, again.replaced) == (first.id, False, False)


@needs("sessions")
@pytest.mark.parametrize("rival_commits", [True, False])
def test_the_later_of_two_replaces_wins(
    app: sqlq.App,
    index: sqlq.Task[..., None],
    engine: Engine,
    pool: ThreadPoolExecutor,
    rival_commits: bool,
) -> None:
    first = app.enqueue(index.new(1).set(unique_key="k"))
    new = index.new(2).set(unique_key="k", on_conflict="replace")
    with Session(engine) as rival:
        app.enqueue(new, session=rival)
        future = pool.submit(app.enqueue, index.new(3).set(unique_key="k", on_conflict="replace"))
        wait_until(lambda: waiting_for_locks(engine) == 1, what="the second waits for the first")
        rival.commit() if rival_commits else rival.rollback()
    again = future.result(20)
    assert (again.id, again.replaced) == (first.id, True)
    assert app.jobs.get(first.id).payload == {"args": [3]}


@needs("sessions")
def test_a_job_that_was_claimed_meanwhile_is_not_replaced(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    first = app.enqueue(index.new(1).set(unique_key="k"))
    with app.database.begin() as conn:
        claim_on(conn, limit=1, owner="w", lease_ms=60_000)
        future = pool.submit(app.enqueue, index.new(2).set(unique_key="k", on_conflict="replace"))
        wait_until(lambda: waiting_for_locks(engine) == 1, what="it waits for the claim")
    again = future.result(20)
    assert (again.id, again.created, again.replaced, again.state) == (first.id, False, False, "running")
    assert app.jobs.get(first.id).payload == {"args": [1]}


@needs("sessions")
def test_batches_with_reversed_keys_do_not_deadlock(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    """Some are there and some not, some are to be kept and others replaced: one order for all of them."""
    app.enqueue_many([index.new(n).set(unique_key=f"k{n}") for n in range(0, 9, 2)])
    batch = [
        index.new(100 + n).set(unique_key=f"k{n}", on_conflict="keep" if n % 3 == 0 else "replace")
        for n in range(9)
    ]

    def producer(batch: list[sqlq.NewJob]) -> list[Job]:
        with Session(engine) as session, session.begin():
            return app.enqueue_many(batch, session=session)

    with Session(engine) as rival:
        app.enqueue(batch[4], session=rival)
        one, two = pool.submit(producer, batch), pool.submit(producer, batch[::-1])
        wait_until(lambda: waiting_for_locks(engine) == 2, what="both batches wait")
        rival.commit()
    first, second = one.result(30), two.result(30)[::-1]
    assert [job.id for job in first] == [job.id for job in second]
    assert count(app.database.engine) == 9


def test_concurrent_replaces_leave_one_job(
    app: sqlq.App, index: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    start = threading.Barrier(4)

    def racer(n: int) -> Job:
        start.wait(20)
        with Session(engine) as session, session.begin():
            return app.enqueue(index.new(n).set(unique_key="k", on_conflict="replace"), session=session)

    done = [future.result(30) for future in [pool.submit(racer, n) for n in range(4)]]
    assert sum(job.created for job in done) == 1
    assert sum(job.replaced for job in done) == 3
    assert len({job.id for job in done}) == count(app.database.engine) == 1


# -- without a table, and what is refused --------------------------------------------------------------------


def test_a_job_that_waits_for_the_commit_inline_is_replaced(app: sqlq.App, engine: Engine) -> None:
    seen: list[int] = []
    task = app.task(name="t")(seen.append)
    with inline(app, at="commit"), Session(engine) as session, session.begin():
        new = [task.new(n).set(unique_key="k", on_conflict="replace") for n in (1, 2)]
        first, second = (app.enqueue(job, session=session) for job in new)
        assert (first.created, first.replaced, second.created, second.replaced) == (True, False, False, True)
    assert seen == [2]


@for_each(
    ("options", "says"),
    [
        ({"on_conflict": "replace"}, 'on_conflict="replace" is about a unique key'),
        ({"on_conflict": "drop", "unique_key": "k"}, "on_conflict is 'drop': it is"),
        ({"on_conflict": "debounce", "unique_key": "k"}, "without max_wait could put the job off for ever"),
        ({"max_wait": "5m"}, 'max_wait="5m" is about a unique key'),
        ({"max_wait": "5m", "unique_key": "k"}, "and max_wait is for that alone"),
        ({"max_wait": 5, "on_conflict": "debounce", "unique_key": "k"}, "max_wait is 5: give a timedelta"),
    ],
)
def test_incomplete_conflict_options_are_refused(options: dict[str, Any], says: str) -> None:
    new = sqlq.NewJob("t", "{}", "default", 5)
    with pytest.raises(sqlq.EnqueueError) as refused:
        new.set(**options)
    assert says in str(refused.value)


def test_a_job_that_met_a_conflict_can_fail_and_be_retried(
    app: sqlq.App, engine: Engine, index: sqlq.Task[..., None]
) -> None:
    new = index.new(1).set(unique_key="k", on_conflict="replace")
    first, second = app.enqueue(new), app.enqueue(new)
    assert (second.id, second.created) == (first.id, False)
    (held,) = claim(app)
    settle(app, held, Failed("error", ErrorText("E", "no")))
    assert app.jobs.retry([first.id]) == [first.id]
    assert (count(app.database.engine), app.jobs.list(state="failed")) == (1, [])
