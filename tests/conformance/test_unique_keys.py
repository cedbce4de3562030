"""At most one live job per unique key in a queue (G9), alone, in batches, and against open transactions.

A new job keeps, replaces or debounces the one that waits. A permanent key outlives its job.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Engine, MetaData, Table, create_engine, event, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import sqlq
from sqlq import Job, NewJob
from sqlq.database.schemas import in_schema
from sqlq.model.outcome import ErrorText, Finished, Retried
from sqlq.store.jobs import insert
from sqlq.store.jobs import settle as settling
from tests.faults import guard
from tests.kit import claim, claim_on, count, drain, needs, settle, wait_until, waiting_for_locks
from tests.kit.callers import Caller, common_ways

pytestmark = pytest.mark.each_database


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


# -- one after the other -------------------------------------------------------------------------------------


def test_a_duplicate_answers_with_the_live_job(app: sqlq.App, send: Any) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k", delay="1h"))
    again = app.enqueue(app.named("shop.remind").new().set(unique_key="k"))
    assert again == Job(first.id, "default", "shop.send", sqlq.State.SCHEDULED, created=False)
    assert count(app.database.engine) == 1


def test_a_key_is_unique_within_its_queue_only(app: sqlq.App, send: Any) -> None:
    new = send.new(1).set(unique_key="k")
    for job in (new, new.set(queue="other"), new.set(unique_key="K"), new.set(unique_key="k ")):
        assert app.enqueue(job).created


@pytest.mark.parametrize("conflict", ["keep", "replace"])
@pytest.mark.parametrize(
    ("until", "state", "created"), [("finish", "running", False), ("start", "available", True)]
)
def test_a_key_is_held_until_the_finish_or_the_start(
    app: sqlq.App, send: Any, until: Any, state: str, created: bool, conflict: Any
) -> None:
    """A running job is not replaced."""
    first, new = (send.new(n).set(unique_key="k", unique_until=until, on_conflict=conflict) for n in (1, 2))
    id = app.enqueue(first).id
    assert app.enqueue(first).created is False
    held = claim(app)
    second = app.enqueue(new)
    assert (second.state, second.created, second.id == id) == (state, created, not created)
    assert (second.replaced, app.jobs.get(id).payload) == (False, {"args": [1]})
    settle(app, held, Finished())
    third = app.enqueue(new)
    assert (third.created, third.replaced) == (not created, created and conflict == "replace")


def test_a_retried_job_holds_its_key_unless_it_was_until_start(app: sqlq.App, send: Any) -> None:
    held, free = send.new().set(unique_key="held"), send.new().set(unique_key="free", unique_until="start")
    first, _ = app.enqueue(held), app.enqueue(free)
    both = claim(app)
    newer = app.enqueue(free)
    settle(app, both, Retried(0, ErrorText("ValueError", "no")))
    assert app.enqueue(held).id == first.id
    assert app.enqueue(free).id == newer.id


@pytest.mark.slow
def test_a_batch_may_have_more_keys_than_a_statement_has_parameters(
    app: sqlq.App, send: Any, engine: Engine
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


@pytest.mark.parametrize("rival_commits", [True, False])
def test_a_key_belongs_to_the_rival_that_commits(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor, rival_commits: bool
) -> None:
    """The rival ends its transaction only when this one waits for it."""
    new = send.new(1).set(unique_key="k")
    with Session(engine) as rival:
        theirs = app.enqueue(new, session=rival)
        future = pool.submit(enqueue_in_own_transaction, app, engine, new)
        if engine.dialect.name == "postgresql":
            wait_until(lambda: waiting_for_locks(engine) == 1, what="the second producer waits for the first")
        assert not future.done()
        rival.commit() if rival_commits else rival.rollback()
    mine = future.result(10)
    assert mine.created is not rival_commits
    # on SQLite nothing of a rollback is left, the sequence included
    assert (mine.id == theirs.id) is (rival_commits or engine.dialect.name == "sqlite")
    assert count(app.database.engine) == 1


@pytest.mark.parametrize("conflict", ["keep", "replace"])
def test_concurrent_enqueues_of_a_unique_key_create_one_job(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor, conflict: Any
) -> None:
    for key in range(10):
        start = threading.Barrier(8)

        def racer(key: int = key, start: threading.Barrier = start) -> Job:
            start.wait(10)
            new = send.new().set(unique_key=f"k{key}", on_conflict=conflict)
            return enqueue_in_own_transaction(app, engine, new)

        futures: list[Future[Job]] = [pool.submit(racer) for _ in range(8)]
        done = [future.result(30) for future in futures]
        assert sum(job.created for job in done) == 1
        assert sum(job.replaced for job in done) == (7 if conflict == "replace" else 0)
        assert len({job.id for job in done}) == 1


@needs("sessions")
@pytest.mark.parametrize(
    ("conflicts", "rival_commits"), [(("keep",), True), (("keep",), False), (("keep", "replace"), True)]
)
def test_batches_with_reversed_keys_do_not_deadlock(
    app: sqlq.App,
    send: Any,
    engine: Engine,
    pool: ThreadPoolExecutor,
    conflicts: tuple[Any, ...],
    rival_commits: bool,
) -> None:
    """Each batch takes its keys in one order, whatever order they were given in.

    A rival holds the key in the middle until both batches wait. Had they come from both ends, each would then
    hold the key that the other needs next. Some keys to replace are there already.
    """
    new = [send.new(i).set(unique_key=f"k{i}", on_conflict=conflicts[i % len(conflicts)]) for i in range(9)]
    there = app.enqueue_many(new[::2]) if "replace" in conflicts else []

    def producer(batch: list[NewJob]) -> list[Job]:
        with Session(engine) as session, session.begin():
            return app.enqueue_many(batch, session=session)

    with Session(engine) as rival:
        middle = 5 if there else 4
        app.enqueue(new[middle], session=rival)
        one, two = pool.submit(producer, new), pool.submit(producer, new[::-1])
        wait_until(lambda: waiting_for_locks(engine) == 2, what="both batches wait")
        rival.commit() if rival_commits else rival.rollback()
    first, second = one.result(30), two.result(30)[::-1]
    assert [job.id for job in first] == [job.id for job in second]
    made = sum(a.created + b.created for a, b in zip(first, second, strict=True))
    assert made == 9 - rival_commits - len(there)
    assert count(app.database.engine) == 9


@needs("sessions")
def test_a_batch_that_is_retried_releases_its_keys(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor
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
    app: sqlq.App, send: Any, engine: Engine, level: str
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
def test_an_enqueue_takes_a_key_that_is_freed_meanwhile(app: sqlq.App, send: Any, engine: Engine) -> None:
    """The rival's job ends just after the insert met it: it must not be answered with, nor be missed."""
    first = app.enqueue(send.new(1).set(unique_key="k"))
    freed: list[int] = []

    @event.listens_for(engine, "before_cursor_execute")
    def before(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "reserved_at IS NOT NULL" in statement and statement.startswith("SELECT") and not freed:
            freed.append(first.id)
            settle(app, claim(app), Finished())

    job = enqueue_in_own_transaction(app, engine, send.new(2).set(unique_key="k"))
    assert freed == [first.id]
    assert job.created
    assert job.id != first.id


# -- on_conflict ---------------------------------------------------------------------------------------------


def test_a_waiting_job_gets_the_newest_arguments(app: sqlq.App, send: Any) -> None:
    new = send.new(1).set(unique_key="k", delay="1h")
    first = app.enqueue(new.set(priority=3, label="one", headers={"a": 1}))
    due = app.jobs.get(first.id).available_at
    again = app.enqueue(send.new(2).set(unique_key="k", on_conflict="replace", timeout="5s"))
    assert again == Job(first.id, "default", "shop.send", sqlq.State.SCHEDULED, created=False, replaced=True)
    found = app.jobs.get(first.id)
    assert found.payload == {"args": [2]}
    assert (found.priority, found.timeout_ms, found.label, found.headers) == (0, 5_000, None, {})
    assert found.available_at == due, "it is due when the first one was"
    kept = app.enqueue(send.new(3).set(unique_key="k"))
    assert (kept.created, kept.replaced, app.jobs.get(first.id).payload) == (False, False, {"args": [2]})
    other = app.enqueue(app.named("shop.other").new().set(unique_key="k", on_conflict="replace"))
    assert (other.id, other.task, app.jobs.get(first.id).task) == (first.id, "shop.other", "shop.other")


def test_debounce_moves_a_job_up_to_max_wait(app: sqlq.App, send: Any) -> None:
    def put_off(n: int, delay: str, max_wait: str = "10m") -> timedelta:
        new = send.new(n).set(unique_key="k", delay=delay, on_conflict="debounce", max_wait=max_wait)
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


def test_a_replaced_job_that_waits_for_its_retry_begins_anew(
    app: sqlq.App, send: Any, engine: Engine
) -> None:
    """With all attempts, and nothing of what the other had come to; but whoever held that one is fenced."""
    first = app.enqueue(send.new(1).set(unique_key="k"))
    (held,) = claim(app)
    settle(app, held, Retried(3_600_000, ErrorText("ValueError", "no")))
    with engine.begin() as conn, guard.unguarded(conn):
        # by its table, for the word alone is one of MariaDB's
        begun = update(Table("jobs", MetaData(), Column("cursor")))
        conn.execute(begun.values(cursor="[1]"))
        conn.execute(text("UPDATE jobs SET losses = 2, releases = 3, progress = 1"))
    again = app.enqueue(send.new(2).set(unique_key="k", on_conflict="replace", max_attempts=2))
    assert (again.id, again.replaced, again.state) == (first.id, True, "scheduled")
    found = app.jobs.get(first.id)
    assert (found.attempts, found.releases, found.errors) == (0, 0, [])
    assert (found.cursor, found.progress) == (None, None)
    assert (found.payload, found.max_attempts, found.lease_token) == ({"args": [2]}, 2, 1)


def test_a_batch_with_equal_keys_keeps_the_first_or_the_last_job(
    app: sqlq.App, send: Any, engine: Engine
) -> None:
    old, there = (app.enqueue(send.new(0).set(unique_key=key)) for key in ("old", "there"))

    def new(n: int, key: str, conflict: Any = "replace", **options: Any) -> Any:
        return send.new(n).set(unique_key=key, on_conflict=conflict, **options)

    remind = app.named("shop.remind")
    batch = [
        new(1, "b"),
        send.new(2),
        new(3, "old"),
        new(4, "b"),
        new(5, "old"),
        new(6, "a", "keep"),
        new(7, "c", "debounce", max_wait="1h"),
        new(8, "b", "keep"),
        remind.new().set(unique_key="a"),
        remind.new().set(unique_key="there"),
        remind.new().set(unique_key="a", queue="other"),
    ]
    with Session(engine) as session, session.begin():
        done = app.enqueue_many(batch, session=session)
    assert [n for n, job in enumerate(done, 1) if job.created] == [2, 4, 6, 7, 11]
    assert [n for n, job in enumerate(done, 1) if job.replaced] == [5]
    assert [job.task for job in done[8:]] == ["shop.send", "shop.send", "shop.remind"]
    assert done[0].id == done[3].id == done[7].id
    assert done[2].id == done[4].id == old.id
    assert (done[8].id, done[9].id) == (done[5].id, there.id)
    payloads = {job.unique_key: job.payload for job in app.jobs.list(queue="default")}
    found = {key: payload["args"][0] for key, payload in payloads.items()}
    assert found == {"old": 5, "b": 4, "a": 6, "c": 7, "there": 0, None: 2}


@common_ways
def test_a_conflict_is_resolved_in_the_callers_transaction(app: sqlq.App, send: Any, caller: Caller) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k", delay="1m"))
    new = send.new(2).set(unique_key="k", delay="1h", on_conflict="debounce", max_wait="30m")
    for end in (caller.rollback, caller.commit):
        caller.begin()
        again = caller.enqueue(app, new)
        assert (again.id, again.created, again.replaced) == (first.id, False, True)
        end()
        found = app.jobs.get(first.id)
        assert found.available_at is not None
        waits = found.available_at - found.created_at
        assert waits == timedelta(minutes=1 if end == caller.rollback else 30)


def test_statement_has_the_conflict_clause(app: sqlq.App, send: Any, engine: Engine) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k"))
    new = send.new(2).set(unique_key="k", on_conflict="replace")
    style = "qmark" if engine.dialect.name == "sqlite" else "pyformat"
    sql, parameters = app.statement(new, paramstyle=style)
    with engine.begin() as conn:
        assert conn.exec_driver_sql(sql, parameters).scalar_one() == first.id
    assert app.jobs.get(first.id).payload == {"args": [2]}
    with pytest.raises(sqlq.EnqueueError, match=r'unique_until="pruned" of .* takes a second'):
        app.statement(send.new().set(unique_key="k", unique_until="pruned"))


@needs("sessions")
def test_a_replace_does_not_wait_for_an_open_completion(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    """A handler's transaction may be long, and its job cannot be replaced anyway."""
    first = app.enqueue(send.new(1).set(unique_key="k"))
    (held,) = claim(app)
    with engine.begin() as handler, in_schema(handler, "public"):
        settling.complete(handler, (held.id, held.lease_token), Finished())
        new = send.new(2).set(unique_key="k", on_conflict="replace")
        again = pool.submit(app.enqueue, new).result(20)
    assert (again.id, again.created, again.replaced) == (first.id, False, False)


@needs("sessions")
@pytest.mark.parametrize("rival_commits", [True, False])
def test_the_later_of_two_replaces_wins(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor, rival_commits: bool
) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k"))
    new = send.new(2).set(unique_key="k", on_conflict="replace")
    with Session(engine) as rival:
        app.enqueue(new, session=rival)
        future = pool.submit(app.enqueue, send.new(3).set(unique_key="k", on_conflict="replace"))
        wait_until(lambda: waiting_for_locks(engine) == 1, what="the second waits for the first")
        rival.commit() if rival_commits else rival.rollback()
    again = future.result(20)
    assert (again.id, again.replaced) == (first.id, True)
    assert app.jobs.get(first.id).payload == {"args": [3]}


@needs("sessions")
def test_a_job_that_was_claimed_meanwhile_is_not_replaced(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k"))
    with app.database.begin() as conn:
        claim_on(conn, limit=1, owner="w", lease_ms=60_000)
        future = pool.submit(app.enqueue, send.new(2).set(unique_key="k", on_conflict="replace"))
        wait_until(lambda: waiting_for_locks(engine) == 1, what="it waits for the claim")
    again = future.result(20)
    assert (again.id, again.created, again.replaced, again.state) == (first.id, False, False, "running")
    assert app.jobs.get(first.id).payload == {"args": [1]}


# -- permanent keys ------------------------------------------------------------------------------------------


@pytest.fixture
def charge(app: sqlq.App) -> Any:
    @app.task(name="charge", max_attempts=1)
    def charge(order: int) -> int:
        if order < 0:
            raise ValueError("no such order")
        return order

    return charge


def once(charge: Any, order: int = 7) -> Any:
    return charge.new(order).set(unique_key=f"order-{order}", unique_until="pruned")


@pytest.mark.parametrize(("order", "state"), [(7, "finished"), (-7, "failed")])
def test_a_key_names_its_job_after_it_has_ended(app: sqlq.App, charge: Any, order: int, state: str) -> None:
    first = app.enqueue(once(charge, order))
    assert first.created
    assert app.enqueue(once(charge, order)) == Job(first.id, "default", "charge", first.state, created=False)
    drain(app)
    again = app.enqueue(once(charge, order))
    assert (again.id, again.state, again.created) == (first.id, state, False)
    assert drain(app).finished == 0
    many = app.enqueue_many([charge.new(1), once(charge, order), once(charge, 8), once(charge, order)])
    assert [job.created for job in many] == [True, False, True, False]
    assert [job.id for job in many[1::2]] == [first.id] * 2
    replacing = once(charge, order).set(on_conflict="replace")
    assert app.enqueue(replacing).id == first.id, "what has ended is not replaced"
    if state == "failed":
        app.jobs.retry([first.id])
        assert app.enqueue(once(charge, order)).id == first.id
        drain(app)
        assert app.enqueue(once(charge, order)).id == first.id


def test_a_cancelled_job_keeps_its_key(app: sqlq.App, charge: Any) -> None:
    first = app.enqueue(once(charge))
    app.jobs.cancel([first.id])
    assert app.enqueue(once(charge)) == Job(
        first.id, "default", "charge", sqlq.State.CANCELLED, created=False
    )


def test_a_key_is_free_when_the_row_is_gone(app: sqlq.App, charge: Any) -> None:
    finished, failed = app.enqueue(once(charge)), app.enqueue(once(charge, -7))
    drain(app)
    assert app.jobs.prune(finished="0s").finished == 1
    app.jobs.delete(all=True)
    again = [app.enqueue(once(charge)), app.enqueue(once(charge, -7))]
    assert all(job.created for job in again)
    assert not {finished.id, failed.id} & {job.id for job in again}


@common_ways
def test_permanent_keys_hold_in_a_callers_transaction(
    app: sqlq.App, charge: Any, database_url: str, caller: Caller
) -> None:
    first = app.enqueue(once(charge))
    drain(app)
    if database_url.startswith("mariadb"):
        caller.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        caller.commit()
    caller.begin()
    done = caller.enqueue_many(app, [once(charge, 8), once(charge), charge.new(9)])
    again = caller.enqueue(app, once(charge, 8))
    caller.execute("SELECT 1")  # the transaction is usable
    caller.commit()
    assert [job.created for job in done] == [True, False, True]
    assert (done[1].id, again.id) == (first.id, done[0].id)
    assert len(app.jobs.list()) == 3


@needs("postgresql")
def test_a_job_that_ends_during_an_enqueue_of_its_key_keeps_it(
    app: sqlq.App, engine: Engine, charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for in vain, since it runs; then it ends, and the insert meets no live job."""
    first = app.enqueue(once(charge))
    held, looks = insert.held, list[int]()

    def ends_after_the_first_look(*what: Any, live: bool = False, met: bool = False) -> Any:
        found = held(*what, live=live, met=met)
        if not live:
            looks.append(len(found))
            if len(looks) == 1:
                drain(app)
        return found

    monkeypatch.setattr(insert, "held", ends_after_the_first_look)
    again = sqlq.App(engine=engine)
    again.task(name="charge")(charge.handler)
    done = again.enqueue_many([once(charge), once(charge, 8)])
    again.close()
    assert looks[:2] == [0, 1]
    assert [(job.id == first.id, job.created) for job in done] == [(True, False), (False, True)]
    with engine.connect() as conn:
        assert conn.scalar(text("SELECT count(*) FROM jobs WHERE unique_key = 'order-7'")) == 0


@needs("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"], ids=["repeatable", "serializable"])
def test_a_stricter_transaction_is_refused(app: sqlq.App, engine: Engine, charge: Any, level: Any) -> None:
    strict = engine.execution_options(isolation_level=level)
    says = f'unique_until="pruned" of a job of charge needs READ COMMITTED.*{level}'
    with Session(strict) as session:
        with pytest.raises(sqlq.EnqueueError, match=says):
            app.enqueue_many([charge.new(1), once(charge)], session=session)
        session.commit()
    assert app.jobs.list() == []


def test_a_job_is_found_by_its_key(app: sqlq.App, charge: Any) -> None:
    live = app.enqueue(charge.new(1).set(unique_key="live"))
    assert app.jobs.get_by_key("default", "live").id == live.id
    first = app.enqueue(once(charge))
    drain(app)
    found = app.jobs.get_by_key("default", "order-7")
    assert (found.id, found.state) == (first.id, "finished")
    for queue, key in (("default", "live"), ("default", "none"), ("mail", "order-7")):
        with pytest.raises(sqlq.JobNotFoundError, match=f"^no job holds the unique key '{key}' in the queue"):
            app.jobs.get_by_key(queue, key)
