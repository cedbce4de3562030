"""At most one live job per unique key in a queue (G9); a permanent key outlives its job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from tests.kit import claim, claim_on, count, drain, execute, needs, settle, wait_until, waiting_for_locks
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


def test_a_duplicate_answers_with_the_live_job(app: sqlq.App, send: Any) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k", delay="1h"))
    again = app.enqueue(app.named("shop.remind").new().set(unique_key="k"))
    assert again == Job(first.id, "default", "shop.send", sqlq.State.SCHEDULED, created=False)
    assert count(app.database.engine) == 1
    for options in ({"queue": "other"}, {"unique_key": "K"}, {"unique_key": "k "}):
        assert app.enqueue(send.new(1).set(**{"unique_key": "k", **options})).created


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
def test_a_batch_may_have_more_keys_than_a_statement_has_parameters(app: sqlq.App, send: Any) -> None:
    new = [send.new(i).set(unique_key=f"k{i}") for i in range(17_000)]
    first, again = app.enqueue_many(new), app.enqueue_many(new)
    assert all(job.created for job in first)
    assert [(job.id, job.created) for job in again] == [(job.id, False) for job in first]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@contextmanager
def rivalling(engine: Engine, waiting: int, commits: bool) -> Iterator[Session]:
    """A transaction that ends only when so many others wait for it."""
    with Session(engine) as rival:
        yield rival
        if engine.dialect.name == "postgresql":
            wait_until(lambda: waiting_for_locks(engine) == waiting, what="others wait for the rival")
        rival.commit() if commits else rival.rollback()


def enqueue_in_own_transaction(app: sqlq.App, engine: Engine, *new: NewJob) -> list[Job]:
    with Session(engine) as session, session.begin():
        jobs = app.enqueue_many(new, session=session) if new[1:] else [app.enqueue(new[0], session=session)]
        assert session.execute(text("SELECT 1")).scalar() == 1
        return jobs


@pytest.mark.parametrize("rival_commits", [True, False])
def test_a_key_belongs_to_the_rival_that_commits(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor, rival_commits: bool
) -> None:
    new = send.new(1).set(unique_key="k")
    with rivalling(engine, 1, rival_commits) as rival:
        theirs = app.enqueue(new, session=rival)
        future = pool.submit(enqueue_in_own_transaction, app, engine, new)
    (mine,) = future.result(10)
    assert mine.created is not rival_commits
    # on SQLite nothing of a rollback is left, the sequence included
    assert (mine.id == theirs.id) is (rival_commits or engine.dialect.name == "sqlite")
    assert count(engine) == 1


@pytest.mark.parametrize("conflict", ["keep", "replace"])
def test_concurrent_enqueues_of_a_unique_key_create_one_job(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor, conflict: Any
) -> None:
    start = threading.Barrier(8)

    def race(new: NewJob) -> list[Job]:
        start.wait(10)
        return enqueue_in_own_transaction(app, engine, new)

    for key in range(10):
        new = send.new().set(unique_key=f"k{key}", on_conflict=conflict)
        done = [job for jobs in pool.map(race, [new] * 8, timeout=30) for job in jobs]
        assert sum(job.created for job in done) == 1
        assert sum(job.replaced for job in done) == (7 if conflict == "replace" else 0)
        assert len({job.id for job in done}) == 1


@needs("sessions")
@pytest.mark.parametrize(
    ("conflicts", "rival_commits"), [(("keep",), True), (("keep",), False), (("keep", "replace"), True)]
)
def test_batches_with_reversed_keys_do_not_deadlock(
    app: sqlq.App, send: Any, engine: Engine, pool: Any, conflicts: tuple[Any, ...], rival_commits: bool
) -> None:
    """A rival holds the key in the middle until both batches wait. Had they come from both ends, each would
    hold the key that the other needs next."""
    new = [send.new(i).set(unique_key=f"k{i}", on_conflict=conflicts[i % len(conflicts)]) for i in range(9)]
    there = app.enqueue_many(new[::2]) if "replace" in conflicts else []
    with rivalling(engine, 2, rival_commits) as rival:
        app.enqueue(new[5 if there else 4], session=rival)
        both = [pool.submit(enqueue_in_own_transaction, app, engine, *batch) for batch in (new, new[::-1])]
    first, second = both[0].result(30), both[1].result(30)[::-1]
    assert [job.id for job in first] == [job.id for job in second]
    made = sum(a.created + b.created for a, b in zip(first, second, strict=True))
    assert made == 9 - rival_commits - len(there)
    assert count(engine) == 9


@needs("sessions")
def test_a_batch_that_is_retried_releases_its_keys(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    """It passes over the live "a" and waits for "m"; meanwhile "a" ends. With "m" in hand when it comes for
    "a" again, it would deadlock with a rival that has taken "a" and wants "m" next."""
    a, m, z = (send.new().set(unique_key=key) for key in "amz")
    live = app.enqueue(a)
    with Session(engine) as holder, Session(engine) as rival:
        app.enqueue(m, session=holder)
        future = pool.submit(enqueue_in_own_transaction, app, engine, z, m, a)
        wait_until(lambda: waiting_for_locks(engine) == 1, what="the batch waits for m")
        app.jobs.cancel([live.id])
        taken = app.enqueue(a, session=rival)
        holder.rollback()
        number = rival.scalar(text("SELECT pg_backend_pid()"))
        blocked = f"SELECT count(*) FROM pg_stat_activity WHERE {number} = ANY(pg_blocking_pids(pid))"
        wait_until(lambda: execute(engine, blocked) == 1, what="the batch waits for a")
        theirs = app.enqueue(m, session=rival)
        rival.commit()
        done = future.result(30)
    assert [(job.id, job.created) for job in done[1:]] == [(theirs.id, False), (taken.id, False)]
    assert done[0].created
    assert count(engine) == 3


@needs("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_raises_its_error(app: sqlq.App, send: Any, engine: Engine, level: str) -> None:
    new = send.new(1).set(unique_key="k")
    with Session(engine.execution_options(isolation_level=level)) as session:
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

    (job,) = enqueue_in_own_transaction(app, engine, send.new(2).set(unique_key="k"))
    assert freed == [first.id]
    assert (job.created, job.id != first.id) == (True, True)


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


def test_a_replaced_job_that_waits_to_retry_begins_anew(app: sqlq.App, send: Any, engine: Engine) -> None:
    """With all attempts, and nothing of what the other had come to; but whoever held that one is fenced."""
    first = app.enqueue(send.new(1).set(unique_key="k"))
    settle(app, claim(app), Retried(3_600_000, ErrorText("ValueError", "no")))
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


def test_a_batch_with_equal_keys_keeps_the_first_or_last(app: sqlq.App, send: Any, engine: Engine) -> None:
    old, there = (app.enqueue(send.new(0).set(unique_key=key)) for key in ("old", "there"))

    def new(n: int, key: str, conflict: Any = "replace", **options: Any) -> Any:
        return send.new(n).set(unique_key=key, on_conflict=conflict, **options)

    remind = app.named("shop.remind").new()
    done = enqueue_in_own_transaction(
        *(app, engine, new(1, "b"), send.new(2), new(3, "old"), new(4, "b"), new(5, "old")),
        *(new(6, "a", "keep"), new(7, "c", "debounce", max_wait="1h"), new(8, "b", "keep")),
        *(remind.set(unique_key="a"), remind.set(unique_key="there")),
        remind.set(unique_key="a", queue="other"),
    )
    assert [n for n, job in enumerate(done, 1) if job.created] == [2, 4, 6, 7, 11]
    assert [n for n, job in enumerate(done, 1) if job.replaced] == [5]
    assert [job.task for job in done[8:]] == ["shop.send", "shop.send", "shop.remind"]
    assert done[0].id == done[3].id == done[7].id
    assert done[2].id == done[4].id == old.id
    assert (done[8].id, done[9].id) == (done[5].id, there.id)
    found = {job.unique_key: job.payload["args"][0] for job in app.jobs.list(queue="default")}
    assert found == {"old": 5, "b": 4, "a": 6, "c": 7, "there": 0, None: 2}


@common_ways
def test_a_conflict_is_resolved_in_the_callers_transaction(app: sqlq.App, send: Any, caller: Caller) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k", delay="1m"))
    new = send.new(2).set(unique_key="k", delay="1h", on_conflict="debounce", max_wait="30m")
    for end, minutes in ((caller.rollback, 1), (caller.commit, 30)):
        caller.begin()
        again = caller.enqueue(app, new)
        assert (again.id, again.created, again.replaced) == (first.id, False, True)
        end()
        found = app.jobs.get(first.id)
        assert found.available_at == found.created_at + timedelta(minutes=minutes)


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
@pytest.mark.parametrize("commits", [True, False])
def test_the_later_of_two_replaces_wins(
    app: sqlq.App, send: Any, engine: Engine, pool: Any, commits: bool
) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k"))
    new, newest = (send.new(n).set(unique_key="k", on_conflict="replace") for n in (2, 3))
    with rivalling(engine, 1, commits) as rival:
        app.enqueue(new, session=rival)
        future = pool.submit(app.enqueue, newest)
    again = future.result(20)
    assert (again.id, again.replaced) == (first.id, True)
    assert app.jobs.get(first.id).payload == {"args": [3]}


@needs("sessions")
def test_a_replace_of_a_running_job_waits_for_its_claim_and_for_no_completion(
    app: sqlq.App, send: Any, engine: Engine, pool: ThreadPoolExecutor
) -> None:
    first = app.enqueue(send.new(1).set(unique_key="k"))
    newer = send.new(2).set(unique_key="k", on_conflict="replace")
    with app.database.begin() as conn:
        (held,) = claim_on(conn, limit=1, owner="w", lease_ms=60_000)
        future = pool.submit(app.enqueue, newer)
        wait_until(lambda: waiting_for_locks(engine) == 1, what="it waits for the claim")
    again = future.result(20)
    assert (again.id, again.created, again.replaced, again.state) == (first.id, False, False, "running")
    assert app.jobs.get(first.id).payload == {"args": [1]}
    with engine.begin() as handler, in_schema(handler, "public"):
        settling.complete(handler, (held.id, held.lease_token), Finished())
        again = pool.submit(app.enqueue, newer).result(20)  # the handler's transaction may be long
    assert (again.id, again.created, again.replaced) == (first.id, False, False)


@pytest.fixture
def charge(app: sqlq.App) -> Any:
    """It fails for orders below zero."""
    return app.task(name="charge", max_attempts=1)(lambda order: 1 / (order > 0))


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


def test_a_key_is_kept_by_a_cancelled_job_and_free_when_its_row_is_gone(app: sqlq.App, charge: Any) -> None:
    jobs = [once(charge), once(charge, 8), once(charge, -7)]
    cancelled, *others = app.enqueue_many(jobs)
    app.jobs.cancel([cancelled.id])
    again = app.enqueue(once(charge))
    assert again == Job(cancelled.id, "default", "charge", sqlq.State.CANCELLED, created=False)
    drain(app)
    assert app.jobs.prune(finished="0s").finished == 2
    app.jobs.delete(all=True)
    anew = app.enqueue_many(jobs)
    assert all(job.created for job in anew)
    assert not {job.id for job in (cancelled, *others)} & {job.id for job in anew}


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
    says = f'unique_until="pruned" of a job of charge needs READ COMMITTED.*{level}'
    with Session(engine.execution_options(isolation_level=level)) as session:
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
