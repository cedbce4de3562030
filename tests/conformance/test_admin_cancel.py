"""Cancelling by an operator (T10, T11, T12): what each job becomes, what its owner can still do, and who wins
a race."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine, event, text, update

import sqlq
from sqlq.admin import batches
from sqlq.errors import ConfigurationError, SchemaVersionError
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import ON_REQUEST, Cancelled, ErrorText, Finished, Outcome, Released, Retried
from sqlq.schema.tables import jobs as jobs_table
from sqlq.store.jobs import lease, operate
from sqlq.store.jobs.lease import LeaseState
from tests.kit import (
    BOOM,
    Hand,
    claim_on,
    fate,
    locked,
    needs,
    received,
    rescue,
    wait_until,
    waiting_for_locks,
    working,
)

pytestmark = pytest.mark.each_database

ERROR = ErrorText("ValueError", "no", "Traceback …")
EVERY_OUTCOME: list[Outcome] = [Finished("1"), Cancelled("no"), Retried(0, ERROR), BOOM, Released()]


def extend(hand: Hand, job: ClaimedJob) -> dict[tuple[int, int], bool]:
    with hand.app.database.begin() as conn:
        return lease.extend(conn, [(job.id, job.lease_token)], lease_ms=30_000)


def requested(hand: Hand) -> dict[int, Any]:
    with hand.app.database.read() as conn:
        rows = conn.execute(text("SELECT id, cancel_requested_at FROM jobs"))
        return {id: at for id, at in rows if at is not None}


# -- what each job becomes -----------------------------------------------------------------------------------


def test_a_cancelled_waiting_job_keeps_its_options(hand: Hand) -> None:
    (retried,) = hand.enqueue(priority=7, timeout="30s", unique_key="k")
    (owner,) = hand.claim()
    assert hand.settle(owner, Retried(0, ERROR)) == {retried}
    (scheduled,) = hand.enqueue(delay="1h")
    before = hand.app.jobs.get(retried)

    assert hand.app.jobs.cancel([retried, scheduled]) == {retried: "cancelled", scheduled: "cancelled"}

    after = hand.app.jobs.get(retried)
    assert (after.state, after.reason) == ("cancelled", "cancelled on request")
    assert after.ended_at is not None
    kept = "id task queue payload priority attempts lease_token unique_key errors created_at available_at"
    for name in kept.split():
        assert getattr(after, name) == getattr(before, name), name
    assert hand.states([scheduled]) == ["cancelled"]
    assert hand.claim() == [], "it is not run any more"
    (again,) = hand.enqueue(unique_key="k")
    assert again not in (retried, scheduled), "its unique key is free"
    assert hand.app.jobs.cancel([retried]) == {retried: "ended"}


def test_cancel_of_a_running_job_is_a_request_and_leaves_its_owner(hand: Hand) -> None:
    (id,) = hand.enqueue()
    (owner,) = hand.claim()
    assert hand.app.jobs.cancel([id]) == {id: "requested"}
    first = requested(hand)
    assert list(first) == [id]
    assert hand.app.jobs.cancel([id]) == {id: "requested"}
    assert requested(hand) == first, "the first request counts"
    assert hand.states([id]) == ["running"]
    told = "the owner is fenced by nothing, and told at its heartbeat"
    assert extend(hand, owner) == {(id, owner.lease_token): True}, told
    assert hand.settle(owner, Finished("1")) == {id}
    assert hand.states([id]) == ["finished"]


def test_an_operators_retry_clears_the_request_and_its_reason(hand: Hand) -> None:
    (id,) = hand.enqueue()
    (owner,) = hand.claim()
    hand.app.jobs.cancel([id], reason="too late")
    hand.settle(owner, BOOM)
    assert hand.app.jobs.retry([id]) == [id]
    assert requested(hand) == {}
    (owner,) = hand.claim()
    hand.app.jobs.cancel([id])
    hand.settle(owner, Cancelled(ON_REQUEST))
    job = hand.app.jobs.get(id)
    assert job.reason == "cancelled on request"
    assert [line.outcome for line in job.history] == ["cancel_requested", "failed", "put_back", "cancelled"]
    assert job.history[0].reason == "too late"


@pytest.mark.variants
@pytest.mark.parametrize("outcome", EVERY_OUTCOME, ids=lambda o: type(o).__name__)
def test_after_a_forced_cancel_the_old_owner_changes_nothing(hand: Hand, outcome: Outcome) -> None:
    (id,) = hand.enqueue()
    (owner,) = hand.claim()
    (waiting,) = hand.enqueue()
    assert hand.app.jobs.cancel([id, waiting], force=True) == {id: "cancelled", waiting: "cancelled"}
    assert hand.app.jobs.get(waiting).lease_token == 0
    ended = hand.app.jobs.get(id)
    assert (ended.state, ended.lease_token) == ("cancelled", owner.lease_token + 1)
    assert ended.reserved_by == "worker"
    assert "while it ran" in str(ended.reason)
    assert hand.settle(owner, outcome) == set()
    assert extend(hand, owner) == {}
    assert fate(hand.app, owner) is LeaseState.LOST
    assert rescue(hand.app) == []
    assert hand.app.jobs.get(id) == ended
    assert [job.id for job in hand.app.jobs.list()] == [waiting, id]


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_running_handler_sees_the_cancel_and_its_job_ends_as_cancelled(
    app: sqlq.App, is_async: bool
) -> None:
    async def waits_async() -> None:
        started.set()
        await asyncio.Event().wait()

    def waits() -> None:
        started.set()
        wait_until(lambda: sqlq.current_job().should_stop(), timeout=30, what="the request")

    started = threading.Event()
    id = app.enqueue(app.task(name="waits")(waits_async if is_async else waits).new()).id
    with working(app, lease="3s"):
        assert started.wait(20)
        assert app.jobs.cancel([id]) == {id: "requested"}
        wait_until(lambda: app.jobs.get(id).state == "cancelled", timeout=30, what="the job cancelled")
    assert (app.jobs.get(id).reason, app.jobs.get(id).attempts) == ("cancelled on request", 1)


@pytest.mark.parametrize("force", [False, True])
def test_the_reason_of_a_cancel_is_stored_when_the_job_ends(hand: Hand, force: bool) -> None:
    waiting, running, plain = hand.enqueue(3)
    hand.app.jobs.reschedule([waiting], delay="1h")
    owned = {job.id: job for job in hand.claim()}
    why = 'the customer\'s "order" is void \\'
    hand.app.jobs.cancel([waiting, running], force=force, reason=why)
    hand.app.jobs.cancel([plain])
    hand.settle(owned[running], Cancelled(ON_REQUEST))
    hand.settle(owned[plain], Cancelled(ON_REQUEST))
    reasons = [hand.app.jobs.get(id).reason for id in (waiting, running, plain)]
    assert reasons == [why, why, "cancelled on request"]
    with pytest.raises(sqlq.JobCancelledError) as caught:
        hand.app.result(running)
    assert caught.value.reason == why


def test_cancel_returns_an_outcome_for_each_id(hand: Hand) -> None:
    finished, failed, running, waiting, elsewhere = (hand.enqueue(queue=queue)[0] for queue in "abcde")
    claimed = {job.queue: job for job in hand.claim()}
    hand.settle(claimed["a"], Finished())
    hand.settle(claimed["b"], BOOM)
    for queue in "de":
        hand.settle(claimed[queue], Released())
    assert hand.app.jobs.cancel([finished, failed, running, waiting, 4711]) == {
        finished: "ended",
        failed: "ended",
        running: "requested",
        waiting: "cancelled",
        4711: "unknown",
    }
    assert hand.app.jobs.cancel([elsewhere], queue="d") == {elsewhere: "passed over"}
    assert hand.app.jobs.cancel([elsewhere], task="pack") == {elsewhere: "passed over"}
    assert hand.states([waiting, elsewhere]) == ["cancelled", "available"]


def test_operator_calls_refuse_a_database_without_tables(empty_database_url: str) -> None:
    with closing(sqlq.App(empty_database_url)) as app:
        calls = (lambda: app.jobs.cancel([1]), lambda: app.queues.pause("q"), lambda: app.queues.resume("q"))
        for call in (*calls, lambda: app.jobs.prune(failed="1d"), app.workers.list):
            with pytest.raises((SchemaVersionError, ConfigurationError), match="migrate"):
                call()


# -- races: the row's lock decides ---------------------------------------------------------------------------


@needs("sessions")
@pytest.mark.parametrize("force", [False, True])
def test_cancel_after_a_claim_is_a_request(hand: Hand, engine: Engine, force: bool) -> None:
    first, second, third = hand.enqueue(3)
    with ThreadPoolExecutor(1) as pool:
        with hand.app.database.begin() as conn:
            claimed = claim_on(conn, limit=2, owner="worker")
            assert [job.id for job in claimed] == [first, second]
            cancelling = pool.submit(hand.app.jobs.cancel, [first, second, third], force=force)
            wait_until(lambda: waiting_for_locks(engine), what="the cancel to wait for the claim")
            assert hand.states([third]) == ["cancelled"], "a locked row holds up no other"
        done = cancelling.result(20)
    if force:
        assert done == dict.fromkeys((first, second, third), "cancelled")
        assert all(hand.settle(job, Finished()) == set() for job in claimed)
    else:
        assert done == {first: "requested", second: "requested", third: "cancelled"}
        assert set(requested(hand)) == {first, second}
        assert all(hand.settle(job, Finished()) == {job.id} for job in claimed)


@needs("sessions")
def test_a_settle_after_a_forced_cancel_changes_nothing(hand: Hand) -> None:
    (id,) = hand.enqueue()
    (owner,) = hand.claim()
    with hand.app.database.begin() as conn:
        assert [row.id for row in operate.cancel(conn, [id], force=True).gone] == [id]
        assert hand.settle(owner, Finished("1")) == set(), "the settle passes over the locked row"
        assert fate(hand.app, owner) is LeaseState.HELD, "not committed yet: not known to be lost"
    assert hand.settle(owner, Finished("1")) == set()
    assert fate(hand.app, owner) is LeaseState.LOST
    assert hand.states([id]) == ["cancelled"]


@needs("sessions")
@pytest.mark.parametrize("force", [False, True])
def test_cancel_reports_rows_that_stay_locked(
    hand: Hand, engine: Engine, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LOCK_TIMEOUT_SECONDS", 0.05)
    held, other, free = hand.enqueue(3)
    done = {held: "locked", other: "locked", free: "cancelled"}
    with locked(engine, held), locked(engine, other):
        assert hand.app.jobs.cancel(queue="default", force=force) == done
    assert hand.states([held, other, free]) == ["available", "available", "cancelled"]
    assert hand.app.jobs.cancel([held]) == {held: "cancelled"}


@needs("one_writer")
def test_on_sqlite_a_cancel_waits_for_the_writer(hand: Hand, engine: Engine) -> None:
    """Whichever has the write lock first: the claim's row is running when the cancel looks at it."""
    (id,) = hand.enqueue()
    with ThreadPoolExecutor(1) as pool:
        with hand.app.database.begin() as conn:
            assert claim_on(conn, limit=1, owner="worker")
            begins = threading.Event()
            event.listen(hand.app.database.engine, "begin", lambda conn: begins.set())
            cancelling = pool.submit(hand.app.jobs.cancel, [id])
            assert begins.wait(10)
        assert cancelling.result(20) == {id: "requested"}


def test_concurrent_claims_settles_and_cancels_lose_nothing(hand: Hand) -> None:
    """Claims, settles and cancels of the same jobs run at once.

    Each job ends exactly once, and as one of the callers was answered.
    """
    ids = hand.enqueue(60)
    settled: set[int] = set()

    def work() -> None:
        while claimed := hand.claim(limit=3):
            for job in claimed:
                # as a worker does: a settle passes over a row that somebody has locked, and is repeated
                while not (done := hand.settle(job, Finished())) and fate(hand.app, job) is LeaseState.HELD:
                    pass
                settled.update(done)

    def end(part: Sequence[int], *, force: bool) -> dict[int, Any]:
        return {
            id: word
            for i in range(0, len(part), 4)
            for id, word in hand.app.jobs.cancel(part[i : i + 4], force=force).items()
        }

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work), pool.submit(work)]
        told = [pool.submit(end, ids[:40], force=False), pool.submit(end, ids[20:], force=True)]
        for future in running:
            future.result(60)
        answers = [future.result(60) for future in told]
    work()
    states = dict(zip(ids, hand.states(ids), strict=True))
    cancelled = {id for answer in answers for id, word in answer.items() if word == "cancelled"}
    assert {id for id, state in states.items() if state == "cancelled"} == cancelled
    assert {id for id, state in states.items() if state == "finished"} == settled
    assert cancelled | settled == set(ids)
    assert not cancelled & settled


def test_ids_are_cancelled_in_ascending_order_of_their_locks(hand: Hand) -> None:
    ids = hand.enqueue(3)

    with hand.app.database.begin() as conn:
        conn.execute(update(jobs_table).values(priority=1))
        with received(conn) as got:
            operate.cancel(conn, list(reversed(ids)))
    cancel, _ = got[0]
    assert "ORDER BY" in cancel
    assert cancel.split("ORDER BY")[1].split()[0].endswith("jobs.id")
