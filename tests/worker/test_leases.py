"""Leases: renewed while a job is held, rescued when nobody renews, and worth nothing to those who lost
them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.model.outcome import ErrorText, Failed, Finished, Outcome, Released, Retried
from sqlq.store import health
from sqlq.store.jobs import lease
from sqlq.store.jobs import settle as settling
from sqlq.store.jobs.lease import LeaseState
from sqlq.store.workers import look
from sqlq.worker.attempt.attempt import Attempt
from sqlq.worker.claim.claimer import Intake
from sqlq.worker.maintain import services
from sqlq.worker.run.lease import Leases
from tests import kit

pytestmark = pytest.mark.each_database

ERROR = ErrorText("ValueError", "no")
EVERY_OUTCOME: list[Outcome] = [Finished("1"), Retried(0, ERROR), Failed("error", ERROR), Released()]


def test_a_lease_is_renewed_while_its_handler_runs(app: sqlq.App, engine: Engine) -> None:
    release = threading.Event()
    app.enqueue(app.task(name="t")(lambda: release.wait(30)).new())
    with kit.working(app, lease="2s"):
        kit.wait_until(lambda: app.jobs.list(state="running"), what="the job running")
        # longer than a lease, and no other worker may take it meanwhile
        seen: set[Any] = set()

        def is_renewed() -> bool:
            seen.update(kit.committed(engine, column="lease_expires_at"))
            assert kit.rescue(app) == []
            return len(seen) == 5

        kit.wait_until(is_renewed, what="four renewals")
        release.set()
        kit.wait_until(lambda: app.jobs.list(state="finished"), what="the job finished")
    (job,) = app.jobs.list()
    assert (job.attempts, job.lease_token) == (1, 1)


def test_a_worker_that_was_away_lets_others_renew_before_it_rescues(
    app: sqlq.App, engine: Engine, noop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000.0]
    monkeypatch.setattr(services, "since_boot", lambda: clock[0])
    service = services.Rescue(app.database, 30_000, lambda rescued, why: None)

    def is_rescued_after(seconds: float) -> bool:
        clock[0] += seconds
        service.run()
        return app.jobs.get(job.id).state != "running"

    service.run()
    job = app.enqueue(noop.new())
    kit.claim(app)
    kit.expire(engine)
    away, rhythm = 100.0, 7.0
    assert not is_rescued_after(away)
    assert not is_rescued_after(rhythm)
    assert not is_rescued_after(rhythm)
    assert is_rescued_after(rhythm)


def test_a_job_with_an_expired_lease_is_rescued_and_counted(app: sqlq.App, engine: Engine, noop: Any) -> None:
    job = app.enqueue(noop.new().set(max_attempts=3))
    for losses in range(2):
        kit.claim(app, owner=f"worker-{losses}")
        assert kit.rescue(app) == [], "the lease has not run out"
        kit.expire(engine)
        (rescued,) = kit.rescue(app)
        assert (rescued.id, rescued.attempts, rescued.failed) == (job.id, losses + 1, False)
        assert rescued.owner == f"worker-{losses}"
        due = "available" if losses == 0 else "scheduled"
        assert app.jobs.get(job.id).state == due, "at once after the first, then with backoff"
        kit.execute(engine, "UPDATE jobs SET available_at = created_at")
    kit.claim(app)
    kit.expire(engine)
    assert kit.rescue(app)[0].failed
    done = app.jobs.get(job.id)
    assert (done.state, done.reason, done.attempts, done.lease_token) == ("failed", "worker_lost", 3, 6)
    assert [e["reason"] for e in done.errors] == ["worker_lost", "worker_lost"]


@pytest.mark.parametrize("outcome", EVERY_OUTCOME, ids=lambda o: type(o).__name__)
def test_a_zombie_changes_nothing(app: sqlq.App, engine: Engine, noop: Any, outcome: Outcome) -> None:
    app.enqueue(noop.new())
    (zombie,) = kit.claim(app, owner="same-name")
    kit.expire(engine)
    assert kit.fate(app, zombie) is LeaseState.HELD, "expiry alone revokes nothing"
    kit.rescue(app)
    (owner,) = kit.claim(app, owner="same-name")
    before = app.jobs.get(owner.id)
    assert kit.settle(app, zombie, outcome) == set()
    with app.database.begin() as conn:
        assert lease.extend(conn, [(zombie.id, zombie.lease_token)], lease_ms=60_000) == {}
    assert app.jobs.get(owner.id) == before
    assert kit.fate(app, zombie) is LeaseState.LOST
    assert kit.settle(app, owner, Finished(None)) == {owner.id}
    assert kit.settle(app, zombie, outcome) == set()
    assert app.jobs.get(owner.id).state == "finished"


def test_a_zombie_changes_nothing_after_an_operators_retry_reset_the_attempts(
    app: sqlq.App, noop: Any
) -> None:
    job = app.enqueue(noop.new())
    (zombie,) = kit.claim(app)
    kit.settle(app, zombie, Failed("error", ERROR))
    assert app.jobs.retry([job.id]) == [job.id]
    (owner,) = kit.claim(app)
    assert (owner.id, owner.attempts) == (zombie.id, zombie.attempts)
    for outcome in EVERY_OUTCOME:
        assert kit.settle(app, zombie, outcome) == set()
    assert app.jobs.get(job.id).state == "running"


@pytest.mark.parametrize("outcome", EVERY_OUTCOME, ids=lambda o: type(o).__name__)
def test_a_settle_is_not_repeated(app: sqlq.App, noop: Any, outcome: Outcome) -> None:
    """After a lost reply to COMMIT the same settle may come again."""
    app.enqueue(noop.new())
    (job,) = kit.claim(app)
    assert kit.settle(app, job, outcome) == {job.id}
    after = app.jobs.get(job.id)
    assert kit.fate(app, job) is LeaseState.SETTLED
    for again in EVERY_OUTCOME:
        assert kit.settle(app, job, again) == set()
    assert app.jobs.get(job.id) == after


def test_a_job_is_not_started_on_a_lease_that_is_not_trusted(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    task = app.task(name="t")(lambda: started.append(1))
    job = app.enqueue(task.new())
    monkeypatch.setattr(Leases, "trusted_until", lambda leases, sent_at: 0.0)
    app.worker(max_jobs=1).run()
    assert not started
    row = app.jobs.get(job.id)
    assert (row.state, row.attempts, row.releases) == ("available", 0, 1)


def test_a_handler_sees_cancelled_when_its_lease_is_lost(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    @app.task(name="t")
    def handler() -> None:
        kit.wait_until(lambda: sqlq.current_job().should_stop(), what="being told")
        told.set()

    app.enqueue(handler.new())
    caplog.set_level(logging.ERROR, "sqlq")
    with kit.working(app, lease="3s", queues=["default"]):
        kit.wait_until(lambda: app.jobs.list(state="running"), what="the job running")
        later = f"lease_expires_at + {kit.span(engine, 3_600)}"
        kit.execute(engine, f"UPDATE jobs SET lease_token = 2, reserved_by = 'x', lease_expires_at = {later}")
        assert told.wait(60)
        kit.wait_until(lambda: "does not count" in caplog.text, what="the outcome being dropped")
        assert app.jobs.list()[0].state == "running"


@kit.needs("sessions")
@pytest.mark.parametrize("verb", ["settle", "extend"])
def test_a_locked_row_does_not_delay_the_others(app: sqlq.App, engine: Engine, noop: Any, verb: str) -> None:
    app.enqueue_many([noop.new(), noop.new(), noop.new()])
    first, second, third = held = kit.claim(app)

    def write() -> set[int]:
        if verb == "settle":
            return kit.settle(app, held, Finished(None))
        with app.database.begin() as conn:
            return kit.ids(set(lease.extend(conn, [(j.id, j.lease_token) for j in held], lease_ms=30_000)))

    with kit.locked(engine, second.id):
        assert write() == {first.id, third.id}
        assert kit.fate(app, second) is LeaseState.HELD
    assert write() == ({second.id} if verb == "settle" else {first.id, second.id, third.id})


def test_a_claim_skips_jobs_that_are_not_due_or_that_a_rival_is_claiming(app: sqlq.App, noop: Any) -> None:
    app.enqueue_many([noop.new().set(delay="1h", priority=priority) for priority in (0, 50)])
    app.enqueue_many([noop.new() for _ in range(6)])
    if app.database.engine.dialect.name == "sqlite":  # one writer at a time: the rival cannot even begin
        assert {j.id for j in kit.claim(app, limit=3)}.isdisjoint(j.id for j in kit.claim(app, limit=3))
        return
    with app.database.begin() as rival:
        theirs = kit.claim_on(rival, limit=3, owner="rival")
        ours = kit.claim(app)
    assert len(theirs) == len(ours) == 3
    assert {j.id for j in theirs}.isdisjoint(j.id for j in ours)


@kit.needs("mariadb")
def test_a_claim_of_all_due_jobs_does_not_block_producers(app: sqlq.App, noop: Any) -> None:
    """As it would where it locks what lies between rows."""
    first = app.enqueue(noop.new())
    with app.database.begin() as conn:
        claimed = kit.claim_on(conn, limit=2)
        second = app.enqueue(noop.new())
    assert [job.id for job in (*claimed, *kit.claim(app))] == [first.id, second.id]


def test_each_claim_raises_the_token_and_counts_the_attempt(app: sqlq.App, noop: Any) -> None:
    app.enqueue(noop.new())
    for token in range(1, 4):
        (job,) = kit.claim(app)
        assert (job.lease_token, job.attempts) == (token, 1)
        kit.settle(app, job, Released())
    (job,) = kit.claim(app)
    kit.settle(app, job, Retried(0, ERROR))
    (job,) = kit.claim(app)
    assert (job.lease_token, job.attempts) == (5, 2)


def test_an_attempt_that_is_settled_late_does_not_drop_the_lease_of_the_next(
    app: sqlq.App, engine: Engine, noop: Any
) -> None:
    """The same worker may claim a released job again before it has noted the end of the last attempt."""
    app.enqueue(noop.new())
    leases = app.worker()._leases
    (first,) = (Attempt(job, noop, 0.0) for job in kit.claim(app))
    leases.hold([first])
    kit.settle(app, first.claimed, Retried(0, ERROR))
    (second,) = (Attempt(job, noop, 0.0) for job in kit.claim(app))
    leases.hold([second])
    leases.drop([first.right])
    kit.expire(engine)
    leases.beat()
    assert kit.rescue(app) == []
    assert second.trusted_until > time.monotonic()
    assert first.trusted_until <= time.monotonic()


def test_a_claim_whose_reply_was_lost_is_released(app: sqlq.App, noop: Any) -> None:
    """A supervisor renews all jobs in its worker's name, so the lease would never run out."""
    app.enqueue_many([noop.new(), noop.new()])
    held, claimed = kit.claim(app)
    leases = app.worker()._leases
    leases.hold([Attempt(held, noop, 0.0)])  # which is not renewed, but lost
    renewed = {(claimed.id, claimed.lease_token): False}
    kit.renew(leases, renewed, time.monotonic() + 1)
    assert app.jobs.get(claimed.id).state == "running", "the reply may be under way"
    kit.renew(leases, renewed, time.monotonic() + 2)
    assert (app.jobs.get(claimed.id).state, app.jobs.get(claimed.id).attempts) == ("available", 0)


def test_a_claim_whose_reply_is_late_keeps_its_jobs(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stood still receives two renewals at once, and then the reply to its claim."""
    ran: list[int] = []
    task = app.task(name="t")(lambda: ran.append(sqlq.current_job().attempt))
    reached, goes_on = threading.Event(), threading.Event()
    readable = Intake.readable

    def late(*given: Any) -> Any:
        reached.set()
        assert goes_on.wait(30)
        return readable(*given)

    monkeypatch.setattr(Intake, "readable", late)
    with kit.working(app) as worker:
        job = app.enqueue(task.new())
        try:
            assert reached.wait(30)
            for sent_at in (1.0, 2.0):
                worker._leases.renewed_for_us({(job.id, 1): False}, sent_at, entered=True)
            details = app.jobs.get(job.id)
            assert (details.state, details.attempts, details.releases) == ("running", 1, 0)
        finally:
            goes_on.set()
        kit.wait_until(lambda: app.jobs.get(job.id).state == "finished", what="the job finished")
    assert ran == [1]


def test_supervisor_renewals_extend_trust_and_reveal_losses(app: sqlq.App, noop: Any, engine: Engine) -> None:
    app.enqueue_many([noop.new(), noop.new()])
    kept, lost = (Attempt(job, None, 5.0) for job in kit.claim(app))
    for job in (kept, lost):
        job.claimed_at = 0.0
    leases = app.worker()._leases
    leases.hold([kept, lost])
    kit.expire(engine)
    kit.execute(engine, "UPDATE jobs SET lease_token = lease_token + 1 WHERE id = :id", id=lost.id)
    leases.renewed_for_us({kept.right: True}, 100.0, entered=True)
    assert kept.trusted_until == leases.trusted_until(100.0)
    assert (kept.cancel_requested, kept.stop_requested) == (True, True)
    leases.beat()  # as its thread does for what is missing
    assert (lost.trusted_until, lost.stop_requested, len(leases)) == (0.0, True, 1)


@kit.needs("postgresql")
@pytest.mark.parametrize("columns", ["reserved_at", "reserved_at, reserved_by"])
def test_a_row_that_was_reserved_by_hand_is_rescued(app: sqlq.App, engine: Engine, columns: str) -> None:
    """SQLite and MariaDB refuse such a row."""
    values = ", ".join({"reserved_at": "now()", "reserved_by": "'me'"}[name] for name in columns.split(", "))
    kit.execute(engine, f"INSERT INTO jobs (task, {columns}) VALUES ('t', {values})")
    with app.database.connect(isolation_level="AUTOCOMMIT") as conn:
        seen = look.look(conn, app.database, look.KnownQueues(), hosts_within_ms=None, maintenance=True)
        assert seen.expired
        assert health.stuck(conn, longer_than_ms=0), "and the doctor sees it"
    with app.database.begin() as conn:
        (rescued,) = settling.rescue(conn)
    assert not rescued.failed
    assert app.jobs.get(rescued.id).state in ("available", "scheduled")
    assert app.workers.list() == []
