"""Signals from outside: each wait ends once, with the value of the first signal or at its timeout."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.database.database import Database
from sqlq.model.outcome import Failed
from sqlq.payload.encryption import new_key
from sqlq.store.blockers import EventBlocker
from sqlq.store.events import free
from sqlq.store.signals import waits
from sqlq.testing import Counts
from sqlq.worker.maintain.services import Sweep, Unblock
from tests.kit import count, execute, needs, wait_until, waiting_for_locks
from tests.kit.flows import Shop

pytestmark = pytest.mark.each_database


@pytest.fixture
def shop(app: sqlq.App) -> Shop:
    return Shop(app)


def approval(shop: Shop, name: str, timeout: str | None = None, *, first: bool = False) -> list[int]:
    """Enqueue a flow: pay, wait, ship with the value; remind at the timeout. Return the ids of its jobs."""
    flow = sqlq.Flow(name)
    after = [] if first else [flow.add(shop.note.new(f"pay {name}"))]
    ok = flow.wait(name, timeout=timeout, after=after)
    flow.add(shop.note.new(ok.result))
    ok.catch(shop.note.new(f"remind {name}"))
    return [job.id for job in shop.app.enqueue(flow).jobs]


def time_out(engine: Engine, *columns: str) -> None:
    past = {"sqlite": "1", "mariadb": "'2000-01-01'"}.get(engine.dialect.name, "'epoch'")
    values = ", ".join(f"{column} = {past}" for column in columns or ("until", "look_at"))
    execute(engine, f"UPDATE sqlq_waits SET {values}")


def look(app: sqlq.App) -> list[int]:
    """Look once, as a worker does, and return the jobs that wait no longer."""
    rows, _ = app.database.run(free.look)
    return sorted(row.id for row in rows)


def test_a_step_ends_with_the_first_signal_of_its_name(shop: Shop, engine: Engine) -> None:
    """All that wait for a name get the value, also those that begin later. No worker runs the step."""
    app = shop.app
    _, ok, ship, remind = approval(shop, "a")
    first = approval(shop, "a", first=True)
    assert str(app.jobs.get(first[0]).state) == "blocked"
    assert shop.work() == ["pay a"]
    assert (app.jobs.get(ok).blocked_by, app.jobs.get(ok).label) == ("event", "a")
    assert app.jobs.why(ok)[0] == "it waits for the signal a"
    assert app.signal("a", "by ada")
    assert not app.signal("a", "by eve")
    assert shop.work() == ["by ada"] * 2
    assert app.jobs.get(remind).state == "cancelled"
    step = app.jobs.get(ok)
    assert (step.state, step.result, step.attempts, step.lease_token) == ("finished", "by ada", 0, 0)
    assert app.result(ok) == "by ada"
    late = approval(shop, "a", timeout="0s")
    assert shop.work() == ["pay a", "by ada"], "a signal that came before counts, and before a timeout"
    assert app.flows.get(app.jobs.get(late[0]).flow_id or 0).state == "finished"
    assert count(engine, "sqlq_waits") == 0
    execute(engine, "UPDATE sqlq_signals SET expires_at = created_at")
    assert app.signal("a")
    approval(shop, "a", first=True)
    assert shop.work() == [None], "a signal without a value is no timeout"
    assert ship


def test_a_timeout_fails_the_step_and_leads_to_another(shop: Shop, engine: Engine) -> None:
    """It counts from the beginning of the wait. A retry waits again."""
    app = shop.app
    _, ok, ship, _ = approval(shop, "a", timeout="3d")
    assert count(engine, "sqlq_waits") == 0
    assert shop.work() == ["pay a"]
    time_out(engine)
    assert shop.work() == ["remind a"]
    step = app.jobs.get(ok)
    assert (step.state, step.reason, step.message) == ("failed", "timeout", "no signal a came in time")
    message = free.TIMEOUT.error
    assert step.fingerprint == Failed("timeout", message).fingerprint
    assert app.jobs.get(ship).state == "blocked"
    app.jobs.retry([ok])
    assert app.jobs.get(ok).blocked_by == "event"
    assert (shop.work(), app.signal("a", 1), shop.work()) == ([], True, [1])
    assert app.jobs.get(ok).result == 1


def test_a_job_waits_without_a_slot_and_runs_again_with_the_value(app: sqlq.App, engine: Engine) -> None:
    """With its checkpoint, uncounted, and as often as it likes; under a limit it waits in line again."""
    called: list[Any] = []

    @app.task(name="publish", max_attempts=1, limit=sqlq.Limit("one", running=1))
    def publish(n: int) -> None:
        job = sqlq.current_job()
        if job.waited_for is None:
            with engine.begin() as conn:
                job.checkpoint(conn, "drafted")
            raise sqlq.WaitFor(f"a{n}", timeout="3d")
        if job.waited_for == f"a{n}":
            called.append((job.signal, job.cursor, job.attempt))
            raise sqlq.WaitFor("b")
        called.append((n, job.signal))

    jobs = app.enqueue_many([publish.new(n) for n in (1, 2)])

    def work() -> Counts:
        return app.worker(drain=True).run()

    assert work().released == 2, "the first one gives back its slot"
    assert any(line.startswith("it waits for the signal a1 until ") for line in app.jobs.why(jobs[0]))
    assert (app.signal("a1", [1]), app.signal("a2", [2])) == (True, True)
    work()
    assert sorted(called) == [([1], "drafted", 1), ([2], "drafted", 1)]
    app.signal("b", "done")
    work()
    assert sorted(called[2:]) == [(1, "done"), (2, "done")]
    assert {str(app.jobs.get(job).state) for job in jobs} == {"finished"}
    assert count(engine, "sqlq_waits") == 2
    time_out(engine, "look_at")
    look(app)
    assert count(engine, "sqlq_waits") == 0, "the waits of jobs that are gone"


def test_a_job_that_waited_in_vain_runs_again_and_fails_as_timeout(app: sqlq.App, engine: Engine) -> None:
    @app.task(name="publish", max_attempts=1)
    def publish() -> Any:
        if sqlq.current_job().waited_for is None:
            raise sqlq.WaitFor("a", "3d")
        return sqlq.current_job().signal

    job = app.enqueue(publish.new())
    app.worker(drain=True).run()
    time_out(engine)
    app.worker(drain=True).run()
    ended = app.jobs.get(job)
    assert (ended.state, ended.reason, ended.message) == ("failed", "timeout", "no signal a came in time")


def test_a_signal_goes_with_its_transaction(shop: Shop, engine: Engine) -> None:
    app = shop.app
    approval(shop, "a", first=True)
    with Session(engine) as session:
        assert app.signal("a", 1, session)
        session.rollback()
    assert (shop.work(), count(engine, "sqlq_signals")) == ([], 0)
    with Session(engine) as session, session.begin():
        assert app.signal("a", 2, session=session)
        assert not app.signal("a", 3, session=session)
    assert shop.work() == [2]
    assert asyncio.run(app.asignal("b", 1)) is True
    for refused, sentence in (
        (("",), "the signal's name is ''"),
        (("a" * 256,), "the signal's name has 256 characters"),
        (("a", object()), "the signal's value is"),
        (("a", "x" * 1_048_577), "the signal's value takes 1,048,579 bytes"),
    ):
        with pytest.raises(sqlq.EnqueueError, match=sentence):
            app.signal(*refused)
    with pytest.raises(sqlq.EnqueueError, match="the signal's name"):
        sqlq.Flow().wait(" ")


def test_a_worker_frees_what_waits_within_about_a_second(shop: Shop) -> None:
    approval(shop, "a", first=True)
    with shop.app.worker():
        wait_until(lambda: shop.app.queues.list() is not None)
        shop.app.signal("a", 7)
        wait_until(lambda: 7 in shop.called)


@needs("row_locks")
def test_a_wait_and_a_signal_that_do_not_see_each_other_meet(shop: Shop, engine: Engine) -> None:
    """Whichever commits last, and whatever a look has locked or passed over before."""
    app = shop.app
    _, one, *_ = approval(shop, "a")
    _, two, *_ = approval(shop, "b")
    execute(engine, f"UPDATE jobs SET blocked_by = 'flow' WHERE id IN ({one}, {two})")
    with app.database.begin() as conn:  # the wait is not committed when the signal is looked at
        waits.begin(conn, [(one, "a", None)])
        app.signal("a", 1)
        assert look(app) == []
    assert look(app) == [one]
    with app.database.begin() as conn:
        waits.begin(conn, [(two, "b", None)])
    with Session(engine) as session, session.begin():  # the signal is not when the wait is
        app.signal("b", 2, session=session)
        assert look(app) == []
    with engine.connect() as conn:  # another transaction has locked the job
        conn.execute(text(f"SELECT id FROM jobs WHERE id = {two} FOR UPDATE"))
        assert look(app) == []
    assert (look(app), look(app)) == ([two], [])
    three, *_ = approval(shop, "c", first=True)
    with engine.connect() as conn, ThreadPoolExecutor(1) as pool:  # another look will have seen no signal
        later = "UPDATE sqlq_waits SET look_at = look_at + INTERVAL '1' DAY WHERE job_id = "
        conn.execute(text(f"{later}{three}"))
        app.signal("c", 3)
        looked = pool.submit(look, app)
        wait_until(lambda: looked.done() or waiting_for_locks(engine))
        conn.commit()
        assert (looked.result(), look(app)) == ([three], [])


def test_a_signal_for_many_waits_calls_some_at_a_time(
    shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free, "AT_ONCE", 2)
    monkeypatch.setattr(free, "CALL", replace(free.CALL, selection=free.CALL.selection.limit(2)))
    steps = [approval(shop, "a", first=True)[0] for _ in range(5)]
    assert look(shop.app) == []
    shop.app.signal("a", 1)
    looks = [look(shop.app) for _ in range(4)]
    assert [len(ids) for ids in looks] == [2, 2, 1, 0]
    assert sorted(id for ids in looks for id in ids) == steps


def test_waits_of_cancelled_jobs_free_nothing(shop: Shop, engine: Engine) -> None:
    ok, *_ = approval(shop, "a", first=True)
    shop.app.jobs.cancel([ok])
    shop.app.signal("a")
    assert (shop.work(), count(engine, "sqlq_waits")) == ([], 0)
    ok, ship, _ = approval(shop, "b", first=True)
    shop.app.flows.skip(ok)
    assert (shop.work(), str(shop.app.jobs.get(ship).state)) == ([], "failed"), "it has no result"


def test_signals_are_bounded_and_cost_an_idle_worker_nothing(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired signals go, and the oldest beyond a number, but none that no worker has looked at."""
    monkeypatch.setattr(waits, "BOUND", waits.BOUND.offset(2))
    for n in range(5):
        app.signal(f"a{n}", keep=f"{n + 1}d")
    Sweep(app.database).run()
    assert count(engine, "sqlq_signals") == 5
    look(app)
    Sweep(app.database).run()
    assert execute(engine, "SELECT min(name) FROM sqlq_signals") == "a3"
    execute(engine, "UPDATE sqlq_signals SET expires_at = created_at")
    Sweep(app.database).run()
    assert count(engine, "sqlq_signals") == 0
    looks = []
    monkeypatch.setattr(Database, "run", lambda *_, **__: looks.append(1))
    assert Unblock(app.database, EventBlocker()).turn() is None
    assert looks == []


def test_a_flood_of_unknown_signals_delays_none(
    shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free, "AT_ONCE", 3)
    monkeypatch.setattr(free, "NEW", free.NEW.limit(3))
    monkeypatch.setattr(waits, "BOUND", waits.BOUND.offset(4))
    approval(shop, "a", first=True)
    for n in range(20):
        shop.app.signal(f"unknown {n}")
    shop.app.signal("a", 1)
    assert shop.work() == [1]
    assert count(engine, "sqlq_signals") < 20


def test_a_wait_that_the_database_refuses_to_end_holds_up_no_other(shop: Shop, engine: Engine) -> None:
    bad, *_ = approval(shop, "a", first=True)
    good, *_ = approval(shop, "a", first=True)
    rule = f"ALTER TABLE finished_jobs ADD CONSTRAINT refuse CHECK (id <> {bad})"
    if engine.dialect.name == "sqlite":
        when = f"BEFORE INSERT ON finished_jobs WHEN NEW.id = {bad}"
        rule = f"CREATE TRIGGER refuse {when} BEGIN SELECT RAISE(ABORT, 'no'); END"
    execute(engine, rule)
    shop.app.signal("a", 1)
    assert shop.work() == [1]
    assert (shop.app.jobs.get(bad).state, shop.app.jobs.get(good).state) == ("blocked", "finished")


def test_values_are_encrypted_where_jobs_are(database_url: str, engine: Engine) -> None:
    app = sqlq.App(database_url, keys=[new_key()], encryption="sign")
    shop = Shop(app)
    ok, *_ = approval(shop, "a", first=True)
    app.signal("a", "secret")
    assert "signature" in execute(engine, "SELECT value FROM sqlq_signals")
    assert shop.work() == ["secret"]
    assert app.jobs.get(ok).result == "secret"
    app.close()
