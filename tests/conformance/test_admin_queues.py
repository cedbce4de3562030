"""Pausing and resuming queues, pruning by age, and which workers there are, on every database."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, Table, literal, text, update

import sqlq
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, Finished, Settlement
from sqlq.schema.tables import failed_jobs, finished_jobs, jobs, queues, workers
from sqlq.schema.types import after, now
from sqlq.store.jobs import insert, lease, lookup, operate, settle
from sqlq.store.workers import look, notify
from sqlq.store.workers import workers as workerss
from sqlq.worker.claim.claimer import Claimer
from tests.kit import BOOM, Hand, claim_on, needs, wait_until, working

pytestmark = pytest.mark.each_database


def age(hand: Hand, table: Table, column: str, ids: Sequence[int], seconds: Sequence[int]) -> None:
    with hand.app.database.begin() as conn:
        for id, ago in zip(ids, seconds, strict=True):
            conn.execute(
                update(table)
                .where(table.c.id == id)
                .values({column: after(literal(-ago * 1000, BigInteger))})
            )


def register(hand: Hand, id: str, names: Sequence[str] | None, silent: int = 0) -> None:
    with hand.app.database.begin() as conn:
        workerss.register(conn, id=id, host="here", pid=7, version="0", queues=names, concurrency=2)
    silence(hand, id, silent)


def silence(hand: Hand, id: str, seconds: int) -> None:
    """Let a worker have been seen so long ago."""
    with hand.app.database.begin() as conn:
        ago = after(literal(-seconds * 1000, BigInteger))
        conn.execute(update(workers).where(workers.c.id == id).values(seen_at=ago))


# -- pausing -------------------------------------------------------------------------------------------------


def test_a_claim_skips_paused_queues(hand: Hand) -> None:
    mail, other = hand.enqueue(queue="mail"), hand.enqueue(queue="other")
    assert hand.app.queues.pause("mail")
    assert not hand.app.queues.pause("mail")
    more = hand.enqueue(queue="mail")
    assert [job.id for job in hand.claim("mail", "other")] == other
    assert hand.claim("mail") == [], "not even by name"
    assert [hand.app.jobs.get(id).state for id in mail + more] == ["available", "available"]
    assert hand.app.queues.resume("mail")
    assert not hand.app.queues.resume("mail")
    assert [job.id for job in hand.claim("mail")] == mail + more
    assert hand.app.queues.pause("mail"), "the row of a resumed queue is used again"
    assert hand.claim("mail") == []


def test_a_running_job_settles_while_its_queue_is_paused(hand: Hand) -> None:
    (id,) = hand.enqueue(queue="mail")
    (owner,) = hand.claim("mail")
    hand.app.queues.pause("mail")
    with hand.app.database.begin() as conn:
        assert lease.extend(conn, [(id, owner.lease_token)], lease_ms=1)
        assert settle.settle(conn, [Settlement(id, owner.lease_token, 1, Finished())])
    assert hand.app.jobs.get(id).state == "finished"


@pytest.mark.parametrize("named", [["mail"], ["mail", "other"], None], ids=str)
def test_a_running_worker_observes_a_pause_and_a_resume(
    app: sqlq.App, named: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    task = app.task(name="t", queue="mail")(ran.append)
    with working(app, queues=named):
        app.enqueue(task.new(1))
        wait_until(lambda: ran == [1], what="the first job")
        app.queues.pause("mail")
        looks = threading.Semaphore(0)
        hints = app.database.dialect.notifies
        claim = Claimer.claim

        def counted(claimer: Claimer, limit: int, *, quiet: bool = False) -> list[ClaimedJob]:
            found = claim(claimer, limit, quiet=quiet)
            looks.release()
            return found

        def claimed() -> bool:
            if looks.acquire(timeout=1):
                return True
            if hints:  # one may be lost, and a paused queue has no other
                notify.notify(app.database)
            return False

        monkeypatch.setattr(Claimer, "claim", counted)
        # the worker receives four notifications, claims in vain, and nothing has run
        hears = hints or app.database.dialect.in_a_file
        for number in (2, 3, 4, 5):
            app.enqueue(task.new(number))
            if hears:  # else it polls, and that leaves out a paused queue
                wait_until(claimed, what="a claim")
        assert ran == [1]
        app.queues.resume("mail")
        wait_until(lambda: sorted(ran) == [1, 2, 3, 4, 5], what="the jobs that waited for the resume")


def test_drain_ends_although_a_paused_queue_holds_jobs(app: sqlq.App) -> None:
    task = app.task(name="t", queue="mail")(lambda: None)
    app.enqueue(task.new())
    app.queues.pause("mail")
    assert app.worker(["mail"], drain=True).run().finished == 0
    assert app.worker(drain=True).run().finished == 0
    app.queues.resume("mail")
    assert app.worker(drain=True).run().finished == 1


@needs("listen")
def test_idle_workers_are_woken_by_a_resume(hand: Hand) -> None:
    hand.app.queues.pause("mail")
    with hand.app.database.connect(isolation_level="AUTOCOMMIT") as conn:
        notify.listen(conn)
        hand.app.queues.resume("mail")
        driver: Any = conn.connection.driver_connection
        assert list(driver.notifies(timeout=10, stop_after=1))
        conn.invalidate()


def test_unknown_returns_queues_without_jobs_workers_or_pause(hand: Hand) -> None:
    hand.enqueue(queue="waiting")
    hand.enqueue(queue="running")
    hand.claim("running")
    with hand.app.database.begin() as conn:
        insert.insert(conn, [hand.tasks["send"].new().set(queue="failing")])
        (job,) = claim_on(conn, ["failing"], limit=1, owner="w", lease_ms=1)
        settle.settle(conn, [Settlement(job.id, job.lease_token, 1, BOOM)])
    register(hand, "w", ["served"])
    names = ["waiting", "running", "failing", "served", "maill"]
    assert hand.app.queues._unknown(names) == ["maill"]
    assert hand.app.queues.pause(*names) == sorted(names)
    assert hand.app.queues._unknown(["maill"]) == []
    assert hand.app.queues.pause("maill") == []


def test_the_status_shows_paused_queues_also_empty_ones(hand: Hand) -> None:
    hand.enqueue(queue="mail")
    for name in ("mail", "empty"):
        hand.app.queues.pause(name)
    register(hand, "w", ["mail"])
    assert [(s.queue, s.paused, s.served) for s in hand.app.queues.list()] == [
        ("empty", True, False),
        ("mail", True, True),
    ]


# -- pruning (T15) -------------------------------------------------------------------------------------------


def test_ended_jobs_are_pruned_by_their_age(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "BATCH", 2)
    finished = hand.ended(4, Finished())
    (cancelled,) = hand.ended(1, Cancelled("no"))
    failed = hand.ended(5, BOOM)
    (waiting,) = hand.enqueue(delay="1h")
    age(hand, finished_jobs, "finished_at", [*finished, cancelled], [100, 90, 80, 10, 70])
    age(hand, failed_jobs, "failed_at", failed, [100, 90, 80, 70, 10])

    assert hand.app.jobs.prune(finished="1m") == (4, 0)
    assert {job.id for job in hand.app.jobs.list()} == {finished[3], waiting, *failed}
    assert hand.app.jobs.prune(failed=timedelta(minutes=1), finished="1d") == (0, 4)
    assert {job.id for job in hand.app.jobs.list()} == {finished[3], waiting, failed[4]}
    assert hand.app.jobs.prune(failed="1m", finished="1m") == (0, 0)
    assert hand.app.jobs.prune(failed="0s", finished="0s") == (1, 1)
    assert [job.id for job in hand.app.jobs.list()] == [waiting]


@needs("sessions")
def test_prune_skips_a_locked_failed_job(hand: Hand, engine: Engine) -> None:
    ids = hand.ended(3, BOOM)
    with engine.connect() as rival:
        rival.execute(text("SELECT id FROM failed_jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        assert hand.app.jobs.prune(failed="0s") == (0, 2)
    assert hand.app.jobs.prune(failed="0s") == (0, 1)


def test_finished_jobs_are_pruned_by_age_the_oldest_first_and_at_most_so_many(hand: Hand) -> None:
    ids = hand.enqueue(5)
    hand.end(Finished())
    failed = hand.ended()
    age(hand, finished_jobs, "finished_at", ids, [70, 10, 90, 80, 50])

    def prune(limit: int) -> int:
        with hand.app.database.begin() as conn:
            return operate.prune(conn, older_than_ms=60_000, limit=limit)

    assert prune(2) == 2
    assert sorted(job.id for job in hand.app.jobs.list(state="finished")) == [ids[0], ids[1], ids[4]]
    assert [prune(2), prune(2)] == [1, 0]
    assert sorted(job.id for job in hand.app.jobs.list(state="finished")) == [ids[1], ids[4]]
    assert hand.states(failed) == ["failed"]


@needs("sessions")
def test_two_prunes_do_not_wait_for_each_other(hand: Hand) -> None:
    ids = hand.enqueue(4)
    hand.end(Finished())
    age(hand, finished_jobs, "finished_at", ids, [90, 80, 70, 60])
    with hand.app.database.begin() as one:
        assert operate.prune(one, older_than_ms=1_000, limit=2) == 2
        with hand.app.database.begin() as two:
            two.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert operate.prune(two, older_than_ms=1_000, limit=10) == 2
    assert hand.app.jobs.list() == []


def test_a_jobs_own_retention_comes_before_the_age(hand: Hand) -> None:
    """A row that names its `retention_ms` is deleted when that is over, failed or finished; a prune by age
    leaves it alone."""
    database = hand.app.database
    kept = []
    for outcome, table, ended_at in (
        (Finished(), finished_jobs, "finished_at"),
        (BOOM, failed_jobs, "failed_at"),
    ):
        aged, over, lasting = hand.enqueue(3)
        with database.begin() as conn:
            for id, ms in ((over, 60_000), (lasting, 86_400_000)):
                conn.execute(update(jobs).where(jobs.c.id == id).values(retention_ms=ms))
        hand.end(outcome)
        with database.begin() as conn:
            conn.execute(update(table).values({ended_at: after(literal(-3_600_000, BigInteger))}))
        kept.append((aged, over, lasting))
    (_, finished_over, finished_kept), (_, failed_over, failed_kept) = kept
    assert hand.app.jobs.prune(finished="1m", failed="1m") == (1, 1)
    assert {job.id for job in hand.app.jobs.list()} == {
        finished_over,
        finished_kept,
        failed_over,
        failed_kept,
    }
    with database.begin() as conn:
        assert operate.prune_expired(conn, limit=1) == 1, "no more than asked for"
        assert operate.prune_expired(conn, limit=10) == 1
    assert {job.id for job in hand.app.jobs.list()} == {finished_kept, failed_kept}


# -- status and workers --------------------------------------------------------------------------------------


def test_the_status_counts_jobs_and_shows_whether_a_queue_is_served(hand: Hand) -> None:
    hand.ended(2, queue="b")
    hand.enqueue(1, queue="a")
    hand.claim()
    hand.enqueue(3, queue="a")
    hand.enqueue(2, queue="a", delay="1h")
    hand.enqueue(1, queue="c", delay="1h")
    with hand.app.database.begin() as conn:
        conn.execute(queues.insert().values(queue="c", paused_at=now()))
    register(hand, "w1", ["a", "empty"])
    found = {status.queue: status for status in hand.app.queues.list()}
    assert list(found) == ["a", "b", "c", "empty"]
    a = found["a"]
    assert (a.available, a.scheduled, a.running, a.failed, a.paused, a.served) == (3, 2, 1, 0, False, True)
    assert a.oldest_wait_seconds is not None
    assert 0 <= a.oldest_wait_seconds < 60
    b = found["b"]
    assert (b.available, b.scheduled, b.running, b.failed, b.oldest_wait_seconds, b.served) == (
        0,
        0,
        0,
        2,
        None,
        False,
    )
    assert (found["c"].paused, found["c"].scheduled, found["c"].oldest_wait_seconds) == (True, 1, None)
    assert found["empty"].served

    register(hand, "w2", None)
    assert all(status.served for status in hand.app.queues.list()), "w2 serves every queue"
    silence(hand, "w1", 120)
    silence(hand, "w2", 120)
    assert [(status.queue, status.served) for status in hand.app.queues.list()] == [
        ("a", False),
        ("b", False),
        ("c", False),
    ]
    assert hand.app.workers.list() == []


def test_workers_register_leave_and_are_removed_when_silent(hand: Hand) -> None:
    app = hand.app
    for id in ("w1", "w2", "w3"):
        register(hand, id, None)
    silence(hand, "w1", 80)
    silence(hand, "w2", 3600)
    assert {worker.id for worker in app.workers.list()} == {"w1", "w3"}
    with app.database.begin() as conn:
        assert workerss.seen(conn, "w2")
    assert {worker.id for worker in app.workers.list()} == {"w1", "w2", "w3"}
    with app.database.begin() as conn:
        workerss.leave(conn, "w3")
        workerss.sweep(conn, silent_ms=60_000)
    assert {worker.id for worker in app.workers.list()} == {"w2"}
    with app.database.begin() as conn:
        assert not workerss.seen(conn, "w1"), "one that was swept out is told so"


def test_the_queues_to_serve_are_those_that_hold_something_to_claim(hand: Hand) -> None:
    for name in ("b", "ä", "A", "a b"):
        hand.enqueue(2, queue=name)
    hand.enqueue(1, queue="later", delay="1d")
    with hand.app.database.begin() as conn:
        claim_on(conn, ["b"], limit=10, owner="w")
    assert sorted(look.due_in(hand.app.database, look.KnownQueues())) == sorted(["ä", "A", "a b", "later"])


def test_no_queue_is_to_serve_without_jobs(hand: Hand) -> None:
    assert look.due_in(hand.app.database, look.KnownQueues()) == {}
    assert hand.app.queues.list() == []


def test_workers_list_shows_each_worker_with_its_jobs(hand: Hand) -> None:
    register(hand, "w1", ["a", "b"])
    register(hand, "w2", None, silent=60)
    register(hand, "w3", None, silent=600)
    a, b = hand.enqueue(2, queue="a")
    (c,) = hand.enqueue(queue="c")
    hand.claim("a", owner="w1")
    hand.claim("c", owner="w3")
    found = {worker.id: worker for worker in hand.app.workers.list()}
    assert list(found) == ["w1", "w2"]
    one = found["w1"]
    assert (one.host, one.pid, one.version, one.queues, one.concurrency, one.alive) == (
        "here",
        7,
        "0",
        ("a", "b"),
        2,
        True,
    )
    assert [(job.id, job.task, job.queue) for job in one.jobs] == [(a, "send", "a"), (b, "send", "a")]
    assert one.jobs[0].since.tzinfo is not None
    assert 0 <= one.silent_seconds < 60
    assert (found["w2"].queues, found["w2"].jobs) == (None, [])
    assert 60 <= found["w2"].silent_seconds < 120
    silent = hand.app.workers.list(silent=True)
    assert [
        (worker.id, worker.alive, [job.id for job in worker.jobs]) for worker in silent if worker.id == "w3"
    ] == [("w3", False, [c])]
