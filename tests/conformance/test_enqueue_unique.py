"""At most one live job per unique key in a queue (G9): alone, in batches, and against rivals whose
transactions are open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlq
from sqlq import Job, NewJob
from sqlq.model.outcome import ErrorText, Finished, Retried, Settlement
from sqlq.store.jobs import settle as settling
from tests.kit import claim_on, count, needs, wait_until, waiting_for_locks

pytestmark = pytest.mark.each_database


@pytest.fixture
def remind(app: sqlq.App) -> sqlq.Task[..., None]:
    @app.task(name="shop.remind")
    def remind() -> None: ...

    return remind


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A user's engine, whose transactions on SQLite begin with the write lock, so that two of them meet
    there."""
    engine = create_engine(database_url)
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    yield engine
    engine.dispose()


def claim_all(app: sqlq.App) -> dict[int, int]:
    with app.database.begin() as conn:
        return {job.id: job.lease_token for job in claim_on(conn, limit=10, owner="w", lease_ms=60_000)}


def settle(app: sqlq.App, job: Job, token: int, outcome: Any) -> None:
    with app.database.begin() as conn:
        assert settling.settle(conn, [Settlement(job.id, token, 1, outcome)]) == {(job.id, token)}


# -- one after the other -------------------------------------------------------------------------------------


def test_a_duplicate_answers_with_the_live_job(
    app: sqlq.App, send: sqlq.Task[..., None], remind: sqlq.Task[..., None]
) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k", delay="1h"))
    again = app.enqueue(remind.new().set(unique_key="k"))
    assert again == Job(first.id, "default", "shop.send", sqlq.State.SCHEDULED, created=False)
    assert count(app.database.engine) == 1


def test_a_key_is_unique_within_its_queue_only(app: sqlq.App, send: sqlq.Task[..., None]) -> None:
    new = send.new(1).set(unique_key="k")
    made = [
        app.enqueue(job).created
        for job in (new, new.set(queue="other"), new.set(unique_key="K"), new.set(unique_key="k "))
    ]
    assert made == [True] * 4


@pytest.mark.parametrize(
    ("until", "state", "created"), [("finish", "running", False), ("start", "available", True)]
)
def test_a_key_is_held_until_the_finish_or_the_start(
    app: sqlq.App, send: sqlq.Task[..., None], until: Any, state: str, created: bool
) -> None:
    new = send.new(1).set(unique_key="k", unique_until=until)
    first = app.enqueue(new)
    assert not app.enqueue(new).created
    tokens = claim_all(app)
    second = app.enqueue(new)
    assert (second.state, second.created, second.id == first.id) == (state, created, not created)
    settle(app, first, tokens[first.id], Finished())
    assert app.enqueue(new).created is not created


def test_a_retried_job_holds_its_key_unless_it_was_until_start(
    app: sqlq.App, send: sqlq.Task[..., None]
) -> None:
    held, free = send.new().set(unique_key="held"), send.new().set(unique_key="free", unique_until="start")
    first, second = app.enqueue(held), app.enqueue(free)
    tokens = claim_all(app)
    newer = app.enqueue(free)
    error = ErrorText("ValueError", "no")
    for job in (first, second):
        settle(app, job, tokens[job.id], Retried(0, error))
    assert app.enqueue(held).id == first.id
    assert app.enqueue(free).id == newer.id


def test_duplicates_within_a_batch(
    app: sqlq.App, send: sqlq.Task[..., None], remind: sqlq.Task[..., None], engine: Engine
) -> None:
    old = app.enqueue(send.new().set(unique_key="old"))
    new = [
        send.new(1).set(unique_key="b"),
        send.new(2),
        remind.new().set(unique_key="b"),
        send.new(3).set(unique_key="a"),
        remind.new().set(unique_key="old"),
        remind.new().set(unique_key="b", queue="other"),
        remind.new().set(unique_key="old"),
    ]
    with Session(engine) as session, session.begin():
        done = app.enqueue_many(new, session=session)
    assert [job.created for job in done] == [True, True, False, True, False, True, False]
    assert [job.task for job in done] == ["shop.send"] * 5 + ["shop.remind", "shop.send"]
    assert done[2].id == done[0].id
    assert done[4].id == done[6].id == old.id
    assert count(app.database.engine) == 5


@pytest.mark.slow
def test_a_batch_may_have_more_keys_than_a_statement_has_parameters(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine
) -> None:
    new = [send.new(i).set(unique_key=f"k{i}") for i in range(17_000)]
    first = app.enqueue_many(new)
    with Session(engine) as session, session.begin():
        again = app.enqueue_many(new, session=session)
    assert all(job.created for job in first)
    assert [(job.id, job.created) for job in again] == [(job.id, False) for job in first]


# -- at the same time ----------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def enqueue_in_own_transaction(app: sqlq.App, engine: Engine, new: NewJob) -> Job:
    with Session(engine) as session, session.begin():
        job = app.enqueue(new, session=session)
        assert session.execute(text("SELECT 1")).scalar() == 1
        return job


def meet(
    app: sqlq.App, engine: Engine, pool: ThreadPoolExecutor, new: NewJob, *, rival_commits: bool
) -> tuple[Job, Job]:
    """Enqueue `new` beside a rival that enqueued it, and ends its transaction only when this one waits for
    it."""
    with Session(engine) as rival:
        theirs = app.enqueue(new, session=rival)
        future = pool.submit(enqueue_in_own_transaction, app, engine, new)
        if engine.dialect.name == "postgresql":
            wait_until(lambda: waiting_for_locks(engine) == 1, what="the second producer waits for the first")
        assert not future.done()
        if rival_commits:
            rival.commit()
        else:
            rival.rollback()
        return theirs, future.result(10)


def test_a_key_belongs_to_the_rival_that_commits(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    theirs, mine = meet(app, engine, pool, send.new(1).set(unique_key="k"), rival_commits=True)
    assert (mine.id, mine.created) == (theirs.id, False)
    assert count(app.database.engine) == 1


def test_a_key_is_free_when_the_rival_rolls_back(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    theirs, mine = meet(app, engine, pool, send.new(1).set(unique_key="k"), rival_commits=False)
    assert mine.created
    # there nothing of a rollback is left, the sequence included
    assert mine.id != theirs.id or engine.dialect.name == "sqlite"
    assert count(app.database.engine) == 1


def test_concurrent_enqueues_of_a_unique_key_create_one_job(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    for key in range(10):
        start = threading.Barrier(8)

        def racer(key: int = key, start: threading.Barrier = start) -> Job:
            start.wait(10)
            return enqueue_in_own_transaction(app, engine, send.new().set(unique_key=f"k{key}"))

        futures: list[Future[Job]] = [pool.submit(racer) for _ in range(8)]
        done = [future.result(30) for future in futures]
        assert sum(job.created for job in done) == 1
        assert len({job.id for job in done}) == 1


@needs("sessions")
@pytest.mark.parametrize("rival_commits", [True, False])
def test_batches_with_reversed_keys_do_not_deadlock(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor, rival_commits: bool
) -> None:
    """Each batch takes its keys in one order, whatever order they were given in.

    A rival holds the key in the middle until both batches wait. Had they come from both ends, each would then
    hold the key that the other needs next.
    """
    new = [send.new(i).set(unique_key=f"k{i}") for i in range(9)]

    def producer(batch: list[NewJob]) -> list[Job]:
        with Session(engine) as session, session.begin():
            return app.enqueue_many(batch, session=session)

    with Session(engine) as rival:
        app.enqueue(new[4], session=rival)
        one, two = pool.submit(producer, new), pool.submit(producer, new[::-1])
        wait_until(lambda: waiting_for_locks(engine) == 2, what="both batches wait")
        if rival_commits:
            rival.commit()
        else:
            rival.rollback()
    first, second = one.result(30), two.result(30)[::-1]
    assert [job.id for job in first] == [job.id for job in second]
    assert sum(a.created + b.created for a, b in zip(first, second, strict=True)) == 9 - rival_commits
    assert count(app.database.engine) == 9


@needs("sessions")
def test_a_batch_that_is_retried_releases_its_keys(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine, pool: ThreadPoolExecutor
) -> None:
    """It passes over the live "a" and waits for "m"; meanwhile "a" ends. With "m" in hand when it comes for
    "a" again, it would deadlock with a rival that has taken "a" and wants "m" next."""
    a, m, z = (send.new().set(unique_key=key) for key in "amz")
    live = app.enqueue(a)

    def batch() -> list[Job]:
        with Session(engine) as session, session.begin():
            app.enqueue(send.new(1), session=session)
            jobs = app.enqueue_many([z, m, a], session=session)
            assert session.execute(text("SELECT 1")).scalar() == 1
            return jobs

    with Session(engine) as holder, Session(engine) as rival:
        app.enqueue(m, session=holder)
        future = pool.submit(batch)
        wait_until(lambda: waiting_for_locks(engine) == 1, what="the batch waits for m")
        app.jobs.cancel([live.id])
        taken = app.enqueue(a, session=rival)
        holder.rollback()
        is_blocked = text("SELECT count(*) FROM pg_stat_activity WHERE :rival = ANY(pg_blocking_pids(pid))")
        number = rival.scalar(text("SELECT pg_backend_pid()"))
        with engine.connect() as watch:
            wait_until(lambda: watch.scalar(is_blocked, {"rival": number}) == 1, what="the batch waits for a")
        theirs = app.enqueue(m, session=rival)
        rival.commit()
        done = future.result(30)
    assert [(job.id, job.created) for job in done[1:]] == [(theirs.id, False), (taken.id, False)]
    assert done[0].created
    assert count(app.database.engine) == 4


@needs("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_raises_the_databases_error(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine, level: str
) -> None:
    new = send.new(1).set(unique_key="k")
    strict = engine.execution_options(isolation_level=level)
    with Session(strict) as session:
        session.execute(text("SELECT count(*) FROM jobs")).all()
        first = app.enqueue(new)
        with pytest.raises(DBAPIError, match="could not serialize access"):
            app.enqueue(new, session=session)
        session.rollback()
        again = app.enqueue(new, session=session)
        assert (again.id, again.created) == (first.id, False)


@needs("sessions")
def test_an_enqueue_takes_a_key_that_is_freed_meanwhile(
    app: sqlq.App, send: sqlq.Task[..., None], engine: Engine
) -> None:
    """The rival's job ends just after the insert met it: it must not be answered with, nor be missed."""
    first = app.enqueue(send.new(1).set(unique_key="k"))
    freed: list[int] = []

    @event.listens_for(engine, "before_cursor_execute")
    def before(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "reserved_at IS NOT NULL" in statement and statement.startswith("SELECT") and not freed:
            freed.append(first.id)
            settle(app, first, claim_all(app)[first.id], Finished())

    job = enqueue_in_own_transaction(app, engine, send.new(2).set(unique_key="k"))
    assert freed == [first.id]
    assert job.created
    assert job.id != first.id
