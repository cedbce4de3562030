"""After a deadlock MariaDB has undone a whole transaction, so each connection refuses the next write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.db import transaction
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError, PendingRollbackError
from sqlalchemy.orm import Session

import sqlq
from tests.kit import BOOM, committed, count, end, execute, needs, run_one, wait_until, waiting_for_locks
from tests.kit.callers import Caller, modes, of_django, sessions

UNDONE = "MariaDB has undone the whole transaction, .*deadlock .*run it again from its start"


@contextmanager
def deadlock(watched_orders: Engine, take: Callable[[Session], object]) -> Iterator[None]:
    """Let a rival, who has written more, `take` what the block waits for, and wait for its order 1."""
    with Session(watched_orders) as rival, ThreadPoolExecutor(1) as pool:
        rival.execute(text("INSERT INTO orders SELECT seq FROM seq_101_to_110"))
        take(rival)
        waiting = pool.submit(rival.execute, text("SELECT id FROM orders WHERE id = 1 FOR UPDATE"))
        wait_until(lambda: waiting_for_locks(watched_orders), what="the rival waiting for the order")
        with pytest.raises(sqlq.EnqueueError, match=UNDONE):
            yield
        waiting.exception(20)
        rival.rollback()


def keyed(send: Any, key: str = "k") -> Any:
    return send.new(1).set(unique_key=key)


def enqueue_undone(caller: Caller, app: sqlq.App, send: Any) -> None:
    with deadlock(caller.watch, lambda rival: app.enqueue(keyed(send), session=rival)):
        caller.enqueue_many(app, [keyed(send), send.new(2).set(unique_key="l")])


@sessions("mariadb")
def test_a_session_refuses_all_after_a_deadlock_to_rollback(app: sqlq.App, send: Any, buyer: Caller) -> None:
    for in_savepoint in (False, True):
        buyer.order(1)
        if in_savepoint:
            with buyer.savepoint() as undo:
                enqueue_undone(buyer, app, send)
                undo()
        else:
            enqueue_undone(buyer, app, send)
        with pytest.raises(PendingRollbackError):
            buyer.order(2)
        with pytest.raises(PendingRollbackError):
            buyer.commit()
        buyer.rollback()
        assert buyer.committed()[0] == []
    buyer.order(3)
    buyer.enqueue(app, keyed(send))
    buyer.commit()
    assert buyer.committed()[0] == [3]


@modes(databases=("mariadb",))
def test_a_drivers_connection_refuses_all_after_a_deadlock(app: sqlq.App, send: Any, buyer: Caller) -> None:
    buyer.begin()
    buyer.order(1)
    enqueue_undone(buyer, app, send)
    for go_on in (lambda: buyer.order(2), buyer.commit, lambda: buyer.execute("BEGIN")):
        with pytest.raises(Exception, match=r"(?i)gone away|not connected|\(0, ''\)"):
            go_on()
    buyer.close()
    assert buyer.committed()[0] == []


@needs("mariadb")
@of_django
def test_djangos_block_is_rolled_back_after_a_deadlock(app: sqlq.App, send: Any, buyer: Caller) -> None:
    alias = buyer.session.alias
    with transaction.atomic(using=alias):
        buyer.order(1)
        enqueue_undone(buyer, app, send)
        with pytest.raises(transaction.TransactionManagementError):
            buyer.order(2)
    with transaction.atomic(using=alias):
        buyer.order(1)
        with suppress(ZeroDivisionError), transaction.atomic(using=alias):
            enqueue_undone(buyer, app, send)
            raise ZeroDivisionError
        with pytest.raises(transaction.TransactionManagementError):
            buyer.order(2)
    buyer.begin()
    buyer.order(1)
    enqueue_undone(buyer, app, send)
    with pytest.raises(Exception, match=r"gone away|\(0, ''\)"):
        buyer.order(2)
    buyer.close()
    assert buyer.committed()[0] == []


@needs("mariadb")
def test_a_handler_of_an_undone_transaction_completes_nothing(app: sqlq.App, watched_orders: Engine) -> None:
    def pay() -> None:
        running = sqlq.current_job()
        take = text(f"SELECT id FROM jobs WHERE id = {running.id} FOR UPDATE")
        with Session(watched_orders) as session:
            session.execute(text("INSERT INTO orders VALUES (1)"))
            if running.attempt > 1:
                running.complete(session)
                session.commit()
                return
            with deadlock(watched_orders, lambda rival: rival.execute(take)):
                running.complete(session)
            with pytest.raises(PendingRollbackError):
                session.commit()

    done = run_one(app, pay)
    assert (done.state, done.attempts) == ("finished", 2)
    assert committed(watched_orders, "orders") == [1]


@needs("mariadb")
def test_a_row_newer_than_the_snapshot_undoes_all(app: sqlq.App, send: Any, watched_orders: Engine) -> None:
    with Session(watched_orders) as session:
        session.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
        session.execute(text("SELECT COUNT(*) FROM jobs"))
        session.execute(text("INSERT INTO orders VALUES (1)"))
        app.enqueue(keyed(send))
        with pytest.raises(sqlq.EnqueueError, match=UNDONE):
            app.enqueue(keyed(send), session=session)
        with pytest.raises(PendingRollbackError):
            session.commit()
    assert committed(watched_orders, "orders") == []


@needs("mariadb")
def test_a_lock_timeout_undoes_one_statement_only(app: sqlq.App, send: Any, watched_orders: Engine) -> None:
    with Session(watched_orders) as rival, Session(watched_orders) as session:
        app.enqueue(keyed(send), session=rival)
        session.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        session.execute(text("INSERT INTO orders VALUES (1)"))
        with pytest.raises(OperationalError, match="1205"):
            app.enqueue(keyed(send), session=session)
        session.execute(text("INSERT INTO orders VALUES (2)"))
        session.commit()
    assert committed(watched_orders, "orders") == [1, 2]


@needs("mariadb")
def test_neighbouring_keys_do_not_deadlock_when_just_freed(app: sqlq.App, send: Any, watch: Engine) -> None:
    """An ended key stays in the index until the purge, which an old snapshot holds back."""

    a, b, _ = app.enqueue_many([keyed(send, key) for key in "abm"])
    with watch.connect() as old, Session(watch) as session, Session(watch) as other:
        old.execute(text("START TRANSACTION WITH CONSISTENT SNAPSHOT"))
        old.execute(text("SELECT COUNT(*) FROM jobs"))
        app.jobs.cancel([a, b])
        for each in (session, other):
            each.execute(text("SET SESSION innodb_lock_wait_timeout = 2"))
        app.enqueue(keyed(send, "a"), session=session)
        app.enqueue(keyed(send, "b"), session=other)  # waits for nobody
        other.commit()
        app.enqueue_many([keyed(send, "ab"), keyed(send, "ac")], session=session)
        session.commit()
    assert len(app.jobs.list(state="available")) == 5


@needs("mariadb")
def test_a_met_key_is_read_anew_in_an_old_snapshot(app: sqlq.App, send: Any, watch: Engine) -> None:
    first = app.enqueue(keyed(send))
    with Session(watch) as session:
        session.execute(text("SELECT COUNT(*) FROM jobs"))
        app.jobs.cancel([first])
        second = app.enqueue(keyed(send))
        met = app.enqueue(keyed(send), session=session)
    assert (met.id, met.created) == (second.id, False)


WRITES: dict[str, Callable[[sqlq.App, Any, list[int]], object]] = {
    "enqueue": lambda app, send, ids: app.enqueue(send.new()),
    "enqueue a key": lambda app, send, ids: app.enqueue(keyed(send)),
    "enqueue_many": lambda app, send, ids: app.enqueue_many([keyed(send), send.new()]),
    "enqueue a flow": lambda app, send, ids: app.enqueue(sqlq.chain(send.new(), send.new())),
    "cancel": lambda app, send, ids: app.jobs.cancel(ids[:1]),
    "reschedule": lambda app, send, ids: app.jobs.reschedule(ids[:1], delay="1h"),
    "retry": lambda app, send, ids: app.jobs.retry(ids[1:]),
    "delete": lambda app, send, ids: app.jobs.delete(ids[1:]),
    "replay": lambda app, send, ids: app.jobs.replay(ids[1]),
    "pause": lambda app, send, ids: app.queues.pause("default"),
    "limit": lambda app, send, ids: app.limits.set("stripe", running=2),
    "schedule": lambda app, send, ids: app.schedules.add("nightly", send.new(), cron="0 0 * * *"),
}
"""Transactions of sqlq's own, of a job that waits and one that failed."""
WRITTEN = ("jobs", "finished_jobs", "failed_jobs", "sqlq_queues", "sqlq_limits", "sqlq_schedules")


@needs("mariadb")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_sqlqs_own_transaction_is_repeated_after_a_deadlock(
    app: sqlq.App, send: Any, watched_orders: Engine, write: Callable[..., object]
) -> None:
    app.limit("stripe", running=1)
    failed = app.enqueue(send.new()).id
    end(app, BOOM)
    waiting = app.enqueue(send.new().set(delay="1d")).id
    execute(watched_orders, "CREATE TABLE deadlocks (number integer) ENGINE = Aria TRANSACTIONAL = 0")
    once = "IF NOT EXISTS (SELECT 1 FROM deadlocks) THEN INSERT INTO deadlocks VALUES (1); "
    once += "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END IF"
    for table in WRITTEN:
        for event in ("INSERT", "UPDATE", "DELETE"):
            trigger = f"CREATE TRIGGER {event}_{table} AFTER {event} ON {table} FOR EACH ROW {once}"
            execute(watched_orders, trigger)
    write(app, send, [waiting, failed])
    assert count(watched_orders, "deadlocks") == 1
