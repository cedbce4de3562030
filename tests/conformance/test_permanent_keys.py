"""Unique keys that last: one job for each, also after it has ended, until its row is gone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import sqlq
import sqlq.testing
from sqlq.store.jobs import insert
from tests.kit import needs, wait_until, working
from tests.kit.drivers import Caller, Mode, common_modes

pytestmark = pytest.mark.each_database


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    if engine.dialect.name == "sqlite":
        sqlq.configure_sqlite(engine, immediate=True)
    yield engine
    engine.dispose()


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


def work(app: sqlq.App) -> Any:
    return app.worker(drain=True).run()


@pytest.mark.parametrize(("order", "state"), [(7, "finished"), (-7, "failed")])
def test_a_key_names_its_job_after_it_has_ended(app: sqlq.App, charge: Any, order: int, state: str) -> None:
    first = app.enqueue(once(charge, order))
    assert first.created
    assert app.enqueue(once(charge, order)) == sqlq.Job(
        first.id, "default", "charge", first.state, created=False
    )
    work(app)
    again = app.enqueue(once(charge, order))
    assert (again.id, again.state, again.created) == (first.id, state, False)
    assert work(app).finished == 0
    many = app.enqueue_many([charge.new(1), once(charge, order), once(charge, 8), once(charge, order)])
    assert [job.created for job in many] == [True, False, True, False]
    assert [job.id for job in many[1::2]] == [first.id] * 2
    replacing = once(charge, order).set(on_conflict="replace")
    assert app.enqueue(replacing).id == first.id, "what has ended is not replaced"


def test_a_cancelled_job_keeps_its_key(app: sqlq.App, charge: Any) -> None:
    first = app.enqueue(once(charge))
    app.jobs.cancel([first.id])
    assert app.enqueue(once(charge)) == sqlq.Job(
        first.id, "default", "charge", sqlq.State.CANCELLED, created=False
    )


def test_a_key_is_free_when_the_row_is_gone(app: sqlq.App, charge: Any) -> None:
    finished, failed = app.enqueue(once(charge)), app.enqueue(once(charge, -7))
    work(app)
    assert app.jobs.prune(finished="0s").finished == 1
    app.jobs.delete(all=True)
    again = [app.enqueue(once(charge)), app.enqueue(once(charge, -7))]
    assert all(job.created for job in again)
    assert not {finished.id, failed.id} & {job.id for job in again}


def test_a_failed_job_that_is_retried_is_the_one_of_its_key(app: sqlq.App, charge: Any) -> None:
    first = app.enqueue(once(charge, -7))
    work(app)
    app.jobs.retry([first.id])
    assert app.enqueue(once(charge, -7)).id == first.id
    work(app)
    assert app.enqueue(once(charge, -7)).id == first.id
    assert app.jobs.get(first.id).unique_until == "pruned"


def test_a_key_until_finish_is_free_when_its_job_has_ended(app: sqlq.App, charge: Any) -> None:
    new = charge.new(7).set(unique_key="order-7")
    first = app.enqueue(new)
    work(app)
    assert app.enqueue(new).id != first.id


def _read_committed(engine: Engine) -> Engine:
    """Return an engine in READ COMMITTED, which is no server's of MariaDB by default."""
    if engine.dialect.name != "mariadb":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


def test_permanent_keys_hold_in_a_callers_transaction(app: sqlq.App, engine: Engine, charge: Any) -> None:
    first = app.enqueue(once(charge))
    work(app)
    with Session(_read_committed(engine)) as session, session.begin():
        done = app.enqueue_many([once(charge, 8), once(charge), charge.new(9)], session=session)
        assert [job.created for job in done] == [True, False, True]
        assert done[1].id == first.id
        session.execute(text("SELECT 1"))  # the transaction is usable


@common_modes
def test_permanent_keys_hold_on_a_drivers_connection(
    app: sqlq.App, charge: Any, database_url: str, mode: Mode
) -> None:
    first = app.enqueue(once(charge))
    work(app)
    with Caller(database_url, mode) as caller:
        if database_url.startswith("mariadb"):
            caller.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        caller.begin()
        done = caller.enqueue_many(app, [once(charge, 8), once(charge), charge.new(9)])
        again = caller.enqueue(app, once(charge, 8))
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
                work(app)
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


def test_many_producers_and_a_worker_make_one_job_of_each_key(
    app: sqlq.App, engine: Engine, charge: Any
) -> None:
    ran: list[int] = []

    @app.task(name="count")
    def count(n: int) -> None:
        ran.append(n)

    def produce(_: int) -> set[int]:
        made = [
            app.enqueue(count.new(n % 20).set(unique_key=str(n % 20), unique_until="pruned"))
            for n in range(60)
        ]
        return {job.id for job in made}

    with working(app), ThreadPoolExecutor(4) as pool:
        ids = set().union(*pool.map(produce, range(4)))
        wait_until(lambda: len(ran) >= 20, what="all keys")
    assert len(ids) == 20
    assert sorted(ran) == list(range(20))


@needs("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"], ids=["repeatable", "serializable"])
def test_a_stricter_transaction_is_refused(app: sqlq.App, engine: Engine, charge: Any, level: Any) -> None:
    strict = engine.execution_options(isolation_level=level)
    with Session(strict) as session:
        with pytest.raises(
            sqlq.EnqueueError, match=f'unique_until="pruned" of a job of charge needs READ COMMITTED.*{level}'
        ):
            app.enqueue_many([charge.new(1), once(charge)], session=session)
        session.commit()
    assert app.jobs.list() == []


def test_statement_refuses_a_key_that_takes_two_statements(app: sqlq.App, charge: Any) -> None:
    with pytest.raises(sqlq.EnqueueError, match='unique_until="pruned" of a job of charge takes a second'):
        app.statement(once(charge))


def test_a_job_is_found_by_its_key(app: sqlq.App, charge: Any) -> None:
    live = app.enqueue(charge.new(1).set(unique_key="live"))
    assert app.jobs.get_by_key("default", "live").id == live.id
    first = app.enqueue(once(charge))
    assert app.jobs.get_by_key("default", "order-7").state == "available"
    work(app)
    assert (app.jobs.get_by_key("default", "order-7").id, app.jobs.get(first.id).state) == (
        first.id,
        "finished",
    )
    for queue, key in (("default", "live"), ("default", "none"), ("mail", "order-7")):
        with pytest.raises(sqlq.JobNotFoundError, match=f"^no job holds the unique key '{key}' in the queue"):
            app.jobs.get_by_key(queue, key)
    with pytest.raises(sqlq.errors.ConfigurationError, match="key is 7: it must be text"):
        app.jobs.get_by_key("default", 7)  # type: ignore[arg-type]


def test_unique_until_pruned_needs_a_unique_key(charge: Any) -> None:
    with pytest.raises(
        sqlq.EnqueueError, match=r'^unique_until="pruned" is about a unique key: set unique_key'
    ):
        charge.new(7).set(unique_until="pruned")
