"""Claims that go on where the last one ended, while it is dear to begin at the head of a queue
(PostgreSQL)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

import sqlq
from sqlq.model.job import ClaimedJob
from sqlq.worker.claim import claimer as claim
from sqlq.worker.claim.claimer import Claimer, ScanCursor
from sqlq.worker.options import WorkerOptions
from tests.kit import needs, wait_until, working


def jobs_of(levels: Sequence[tuple[str, int, float, int]]) -> list[ClaimedJob]:
    blank: dict[str, Any] = dict.fromkeys(ClaimedJob._fields)
    return [
        ClaimedJob(**blank | {"queue": q, "priority": p, "due_ms": due, "id": id}) for q, p, due, id in levels
    ]


def test_the_scan_starts_at_the_head_unless_that_was_slow_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(claim, "monotonic", lambda: now)
    cursor = ScanCursor()
    job = jobs_of([("a", 0, 1.0, 7)])
    cursor.note(job, 0.002)
    assert not cursor.positions(["a"]), "it was quick"
    cursor.note(job, 0.1)
    assert not cursor.positions(["a"]), "once may be a slow disk"
    cursor.note(job, 0.1)
    now += 1.9
    assert cursor.positions(["a"])
    now += 0.2
    assert not cursor.positions(["a"]), "a twentieth of the time"
    cursor.note(job, 60.0)
    now += 4.9
    assert cursor.positions(["a"])
    now += 0.2
    assert not cursor.positions(["a"]), "one that waited for a standby is no measure"
    cursor.note(job, 0.002)
    for _ in range(2):
        cursor.note(jobs_of([("a", 0, 1.0, id) for id in range(1_000)]), 0.05)
    assert not cursor.positions(["a"]), "a large claim may take its time"


def test_the_cursor_has_the_last_claim_of_each_queue_and_priority() -> None:
    cursor = ScanCursor()
    for _ in range(2):
        cursor.note(jobs_of([("b", 0, 4.0, 0)]), 60.0)
    cursor.note(jobs_of([("b", 0, 5.0, 1), ("a", 3, 1.5, 2), ("a", 3, 1.5, 3), ("a", 0, 0.001, 4)]))
    cursor.note(jobs_of([("b", 0, 7.25, 9)]))
    assert cursor.positions(["a", "b", "c"]) == [("a", 3, 1_500, 3), ("a", 0, 1, 4), ("b", 0, 7_250, 9)]
    assert cursor.positions(["b"]) == [("b", 0, 7_250, 9)]
    cursor.note([])
    assert not cursor.positions(["b"]), "there may be jobs before it"


@needs("row_locks")
def test_claims_after_the_cursor_take_due_jobs_in_order(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "MAX_REST_SECONDS", 3600.0)
    task = app.task(name="t")(lambda: None)
    # all due at the same time: their ids order them
    one_transaction = app.enqueue_many([task.new() for _ in range(8)])
    urgent = app.enqueue_many([task.new().set(priority=5) for _ in range(3)])
    claimer = Claimer(app.database.for_loops, "somebody", WorkerOptions(("default",), 10, 30_000))
    claimed = claimer.claim(4)
    assert [job.id for job in claimed] == [*(job.id for job in urgent), one_transaction[0].id]
    for _ in range(2):
        claimer._cursor.note(claimed, 3600.0)
    early = app.enqueue(task.new().set(available_at=datetime.now(UTC) - timedelta(hours=1)))
    later = app.enqueue(task.new().set(delay="1h"))
    with app.database.begin() as conn:
        conn.execute(text("SELECT 1 FROM jobs WHERE id = :id FOR UPDATE"), {"id": one_transaction[2].id})
        assert [job.id for job in claimer.claim(3)] == [one_transaction[i].id for i in (1, 3, 4)], (
            "what is locked is somebody else's"
        )
    last = app.enqueue(task.new().set(priority=5))
    claimed = claimer.claim(2)
    assert [job.id for job in claimed] == [last.id, one_transaction[5].id]
    app.queues.pause("default")
    assert claimer.claim(10) == []
    app.queues.resume("default")
    claimer._cursor.note(claimed, 3600.0)
    assert [job.id for job in claimer.claim(10)] == [one_transaction[i].id for i in (6, 7)]
    assert claimer.claim(10) == []
    assert {job.id for job in claimer.claim(10)} == {early.id, one_transaction[2].id}, (
        "the head is not forgotten"
    )
    assert app.jobs.get(later.id).attempts == 0


@needs("postgresql")
@pytest.mark.parametrize("drain", [False, True])
def test_a_worker_with_only_slow_claims_runs_every_job(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    monkeypatch.setattr(claim, "DEAR_SECONDS", -1.0)
    monkeypatch.setattr(claim, "DEAR_SECONDS_A_JOB", 0.0)
    if drain:  # it may not end because the next claim from the head is not due yet
        monkeypatch.setattr(claim, "ANEW_ONCE_IN", 1e9)
        monkeypatch.setattr(claim, "MAX_REST_SECONDS", 1e9)
    ran: list[int] = []

    @app.task(name="t", backoff="0s")
    def task(n: int) -> None:
        if n == 1_900:
            early = datetime.now(UTC) - timedelta(hours=1)
            others = [
                task.new(2_000).set(available_at=early),
                task.new(2_001).set(priority=9),
                task.new(2_002).set(queue="other"),
            ]
            app.enqueue_many(others)
        ran.append(n)

    app.enqueue_many([task.new(i) for i in range(2_000)])
    if drain:
        app.worker(drain=True).run()
    else:
        with working(app):
            wait_until(lambda: len(ran) == 2_003, timeout=30, what="all done")
    assert sorted(ran) == list(range(2_003))
