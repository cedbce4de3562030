"""Pausing and resuming queues, pruning by age, and which workers there are, on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, Table, literal, select, text, update

import sqlq
from sqlq.errors import ConfigurationError
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, Finished, Settlement
from sqlq.schema.tables import failed_jobs, finished_jobs, queues, workers
from sqlq.schema.types import after
from sqlq.store.jobs import insert, lease, lookup, operate, settle
from sqlq.store.workers import notify
from sqlq.store.workers import workers as workerss
from sqlq.worker.claim.claimer import Claimer
from tests.kit import BOOM, Hand, claim_on, for_each, needs, wait_until, working

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
        conn.execute(
            update(workers)
            .where(workers.c.id == id)
            .values(seen_at=after(literal(-silent * 1000, BigInteger)))
        )


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


@for_each("names", [[["mail"]], [], ["mail", ""], ["mail", "a\0b"], ["mail", "x" * 256], ["mail", None]])
def test_bad_names_are_one_sentence_and_nothing_is_paused(hand: Hand, names: Any) -> None:
    for switch in (hand.app.queues.pause, hand.app.queues.resume):
        with pytest.raises(ConfigurationError, match=r"name at least one queue|name (is|has) "):
            switch(*names)
        with pytest.raises(ConfigurationError, match="and not both"):
            switch("mail", all=True)
    with hand.app.database.read() as conn:
        assert conn.execute(select(queues)).all() == []


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


def test_prune_works_in_batches_with_their_own_transactions(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "BATCH", 2)
    hand.ended(5, Finished())
    hand.ended(4, BOOM)
    batches: list[int] = []

    def noted(prune: Callable[..., int]) -> Callable[..., int]:
        def run(conn: Any, **how: Any) -> int:
            batches.append(prune(conn, **how))
            return batches[-1]

        return run

    monkeypatch.setattr(operate, "prune", noted(operate.prune))
    assert hand.app.jobs.prune(finished="0s", failed="0s") == (5, 4)
    assert batches == [2, 2, 1, 2, 2, 0]


@for_each(
    ("how", "complaint"),
    [
        ({}, "say what to prune"),
        ({"finished": "7"}, "finished is '7': write it as in"),
        ({"finished": "0s", "failed": "soon"}, "failed is 'soon': write it as in"),
        ({"failed": "-1d"}, "failed is '-1d'"),
        ({"failed": "0s", "finished": "200000d"}, "finished is '200000d': it must lie between"),
        ({"finished": 7}, "finished is 7: give a timedelta"),
    ],
)
def test_bad_ages_are_one_sentence_and_nothing_is_pruned(
    hand: Hand, how: dict[str, Any], complaint: str
) -> None:
    hand.ended(1, Finished())
    hand.ended(1, BOOM)
    before = hand.app.jobs.list()
    with pytest.raises(ConfigurationError, match=complaint):
        hand.app.jobs.prune(**how)
    assert hand.app.jobs.list() == before


@needs("sessions")
def test_prune_skips_a_locked_failed_job(hand: Hand, engine: Engine) -> None:
    ids = hand.ended(3, BOOM)
    with engine.connect() as rival:
        rival.execute(text("SELECT id FROM failed_jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        assert hand.app.jobs.prune(failed="0s") == (0, 2)
    assert hand.app.jobs.prune(failed="0s") == (0, 1)


# -- workers -------------------------------------------------------------------------------------------------


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
