"""`inline(app, at="commit")`: jobs run when the transaction that enqueued them has committed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import QueuePool

import sqlq
from sqlq.testing import InlineJob, assert_enqueued, inline
from tests.kit import execute, needs
from tests.kit.callers import Caller, common_sessions
from tests.kit.flows import OrderShop
from tests.kit.postgresql import async_database_url


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def shop(app: sqlq.App, engine: Engine) -> OrderShop:
    Base.metadata.create_all(engine)
    return OrderShop(app, engine)


@common_sessions
def test_a_job_runs_after_a_commit_in_the_block(shop: OrderShop, caller: Caller) -> None:
    with inline(shop.app, at="commit") as ran:
        caller.execute("INSERT INTO orders (id) VALUES (1)")
        answers = [
            caller.enqueue(shop.app, shop.count.new("first")),
            *caller.enqueue_many(shop.app, [shop.note.new("second"), shop.note.new("third")]),
        ]
        assert shop.done == []
        assert [(job.state, job.created) for job in answers] == [("available", True)] * 3
        assert [job.state for job in ran.jobs] == ["available"] * 3
        caller.commit()
        assert shop.done == [("first", 1), "second", "third"]
        assert [(job.id, job.state) for job in ran.jobs] == [(job.id, "finished") for job in answers]
        assert assert_enqueued(shop.note, args=["third"]).id == answers[2].id
        shop.done.clear()
        caller.enqueue(shop.app, shop.note.new("in the next transaction"))
        caller.commit()
        assert shop.done == ["in the next transaction"]
    with inline(shop.app, at="commit") as ran:
        caller.enqueue(shop.app, shop.note.new("open at the end of the block"))
    caller.commit()
    assert (shop.done, [job.state for job in ran.jobs]) == (["in the next transaction"], ["available"])


@common_sessions
def test_a_rolled_back_savepoint_removes_its_jobs(shop: OrderShop, caller: Caller) -> None:
    def enqueue(name: str) -> None:
        caller.enqueue(shop.app, shop.note.new(name))

    with inline(shop.app, at="commit"):
        enqueue("a")
        with caller.savepoint():
            enqueue("b, released")
            with caller.savepoint() as undo_inner:
                enqueue("c, rolled back")
                undo_inner()
            enqueue("d, released")
        with caller.savepoint() as undo:
            enqueue("e, rolled back")
            with caller.savepoint():
                enqueue("f, released into what is rolled back")
            undo()
        enqueue("g")
        caller.commit()
        with caller.savepoint() as undo:
            enqueue("h, the first of its transaction, rolled back")
            undo()
        with caller.savepoint():
            enqueue("i, released")
        caller.commit()
    assert shop.done == ["a", "b, released", "d, released", "g", "i, released"]


@common_sessions
def test_a_job_that_fails_reaches_the_test_when_the_block_ends(shop: OrderShop, caller: Caller) -> None:
    ran: list[InlineJob] = []

    def three_orders() -> None:
        with inline(shop.app, at="commit") as block:
            caller.execute("INSERT INTO orders (id) VALUES (1)")
            caller.enqueue_many(shop.app, [shop.bad.new("1"), shop.count.new("2"), shop.bad.new("3")])
            caller.commit()  # as in production: it has succeeded
            assert shop.done == ["1", ("2", 1), "3"]
            caller.enqueue(shop.app, shop.note.new("4"))
            caller.commit()
            ran.extend(block.jobs)

    with pytest.raises(LookupError, match="no order 1") as raised:
        three_orders()
    assert [job.state for job in ran] == ["failed", "finished", "failed", "finished"]
    assert ran[0].error is raised.value
    assert raised.value.__notes__ == [
        "raised by job 1, shop.bad, which ran inline after a commit",
        "a job that ran inline failed, too: LookupError: no order 3",
    ]


def test_a_closed_session_runs_no_job(shop: OrderShop, session: Session) -> None:
    with inline(shop.app, at="commit") as ran:
        shop.app.enqueue(shop.note.new("closed"), session=session)
        session.close()
        session.commit()
    assert (shop.done, ran.jobs) == ([], [])


@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "before_commit"])
def test_a_job_of_a_session_event_runs_after_the_commit(shop: OrderShop, session: Session, hook: str) -> None:
    @event.listens_for(session, hook, once=True)
    def enqueue(*args: object) -> None:
        shop.app.enqueue(shop.count.new(hook), session=session)

    with inline(shop.app, at="commit"):
        session.add(Order(id=1))
        session.commit()
    assert shop.done == [(hook, 1)]


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only"])
def test_jobs_run_on_a_connection_that_the_test_rolls_back(
    shop: OrderShop, session: Session, engine: Engine, mode: Any
) -> None:
    with engine.connect() as conn, conn.begin() as transaction, inline(shop.app, at="commit"):
        with Session(conn, join_transaction_mode=mode) as joined:
            shop.app.enqueue(shop.note.new("committed"), session=joined)
            joined.commit()
            assert shop.done == ["committed"]
            shop.app.enqueue(shop.note.new("rolled back"), session=joined)
            joined.rollback()
        transaction.rollback() if transaction.is_active else None
    assert shop.done == ["committed"]


def test_a_handler_gets_its_own_session_of_a_scoped_session(shop: OrderShop, database_url: str) -> None:
    """As in a worker, although it runs in the caller's thread."""
    pool = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1, "poolclass": QueuePool}
    engine = create_engine(database_url, **pool)
    scope = scoped_session(sessionmaker(engine))

    @shop.app.task(name="shop.ship")
    def ship(order_id: int) -> None:
        assert scope.get(Order, order_id) is not None
        scope.add(Order(id=order_id + 1))
        scope.commit()
        scope.remove()

    with inline(shop.app, at="commit"):
        scope.add(order := Order(id=1))
        shop.app.enqueue(ship.new(1), session=scope)
        scope.commit()
        assert order.id == 1, "it is still in the caller's session"
        assert scope.get(Order, 2) is not None
    scope.remove()
    engine.dispose()


@needs("postgresql")
def test_a_job_of_two_phases_runs_after_the_second(shop: OrderShop, engine: Engine) -> None:
    with inline(shop.app, at="commit"):
        with Session(engine, twophase=True) as session:
            session.add(Order(id=1))
            shop.app.enqueue(shop.count.new("session"), session=session)
            session.commit()
        with engine.connect() as conn:
            for number, end in enumerate(("commit", "rollback"), 1):
                transaction = conn.begin_twophase()
                shop.app.enqueue(shop.count.new(end), session=conn)
                transaction.prepare()
                assert len(shop.done) == number
                getattr(transaction, end)()
    assert shop.done == [("session", 1), ("commit", 1)]


@needs("postgresql")
@pytest.mark.parametrize("kind", ["session", "connection"])
def test_a_commit_that_fails_runs_nothing(shop: OrderShop, engine: Engine, kind: str) -> None:
    execute(engine, "CREATE TABLE lines (o int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)")
    with inline(shop.app, at="commit") as ran, engine.connect() as conn, Session(engine) as session:
        caller: Any = session if kind == "session" else conn
        caller.execute(text("INSERT INTO lines VALUES (99)"))
        shop.app.enqueue(shop.note.new("never"), session=caller)
        with pytest.raises(IntegrityError):
            caller.commit()
        caller.rollback()
        shop.app.enqueue(shop.note.new("later"), session=caller)
        caller.commit()
    assert shop.done == ["later"]
    assert len(ran.jobs) == 1


def test_async_handlers_run_on_the_callers_loop_and_others_in_a_thread(
    shop: OrderShop, database_url: str
) -> None:
    engine = create_async_engine(async_database_url(database_url))
    loops, threads = [], []

    @shop.app.task(name="shop.on_loop")
    async def on_loop(order_id: int) -> None:
        loops.append(asyncio.get_running_loop())
        assert sqlq.current_job().task == "shop.on_loop"
        async with AsyncSession(engine) as own, own.begin():
            assert await own.get(Order, order_id) is not None
            own.add(Order(id=order_id + 1))
            await shop.app.aenqueue(in_thread.new(order_id + 1), session=own)

    @shop.app.task(name="shop.in_thread")
    def in_thread(order_id: int) -> None:
        threads.append(threading.current_thread())
        shop.app.enqueue(shop.count.new("from a thread"))

    async def main() -> None:
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(id=1))
            await shop.app.aenqueue(on_loop.new(1), session=session)
            assert not loops
        assert loops == [asyncio.get_running_loop()]
        with pytest.raises(sqlq.errors.ConfigurationError, match="outside a handler"):
            sqlq.current_job()
        async with AsyncSession(engine) as session:  # and what is enqueued on the sync face of one
            await session.run_sync(lambda sync: shop.app.enqueue(shop.anote.new("b"), session=sync))
            await session.commit()
        await engine.dispose()

    with inline(shop.app, at="commit"):
        asyncio.run(main())
    assert shop.done == [("from a thread", 2), ("b", threading.current_thread())]
    assert threads != [threading.current_thread()]


def test_a_cancelled_commit_cancels_its_running_handler(shop: OrderShop, database_url: str) -> None:
    engine = create_async_engine(async_database_url(database_url))
    started = asyncio.Event()

    @shop.app.task(name="shop.endless")
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async def commit() -> None:
        async with AsyncSession(engine) as session:
            await shop.app.aenqueue(endless.new(), session=session)
            await session.commit()

    async def main() -> None:
        committing = asyncio.create_task(commit())
        await started.wait()
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        await engine.dispose()

    with inline(shop.app, at="commit"):
        asyncio.run(main())


def test_a_job_without_a_session_runs_and_raises_at_once(shop: OrderShop) -> None:
    with inline(shop.app, at="commit"):
        assert shop.app.enqueue(shop.note.new("now")).state == "finished"
        with pytest.raises(LookupError, match="no order 1"):
            shop.app.enqueue(shop.bad.new("1"))
    assert shop.done == ["now", "1"]


def test_blocks_in_blocks_each_keep_to_their_own(shop: OrderShop, engine: Engine) -> None:
    with inline(shop.app, at="commit") as outer, engine.connect() as conn:
        shop.app.enqueue(shop.note.new("outer"), session=conn)
        with inline(shop.app, at="commit") as inner:
            shop.app.enqueue(shop.note.new("inner"), session=conn)
        conn.commit()
        assert shop.done == ["outer"]
    assert [job.state for job in (*outer.jobs, *inner.jobs)] == ["finished", "available"]
