"""The cold path: looking at jobs in whatever state, running failed ones again, forgetting and pruning, on
every database."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text, update

import sqlq
from sqlq.errors import JobNotFoundError
from sqlq.model.outcome import Cancelled, ErrorText, Finished, Released, Retried
from sqlq.schema.tables import failed_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.jobs import lookup
from tests.kit import BOOM, Hand, execute, needs

pytestmark = pytest.mark.each_database

# -- looking -------------------------------------------------------------------------------------------------


def test_get_returns_a_job_in_any_state(hand: Hand) -> None:
    (finished,) = hand.enqueue()
    hand.end(Finished('{"sent": ["ü", 1]}'))
    (cancelled,) = hand.enqueue()
    hand.end(Cancelled("not wanted"))
    (failed,) = hand.ended()
    (running,) = hand.enqueue()
    hand.claim()
    (scheduled,) = hand.enqueue(delay="1h")
    (available,) = hand.enqueue()
    expected = ["finished", "cancelled", "failed", "running", "scheduled", "available"]
    assert hand.states([finished, cancelled, failed, running, scheduled, available]) == expected
    assert hand.app.jobs.get(finished).result == {"sent": ["ü", 1]}
    assert hand.app.jobs.get(cancelled).reason == "not wanted"
    found = hand.app.jobs.get(failed)
    assert (found.exception, found.message, found.traceback, found.reason) == (
        "ValueError",
        "boom",
        "Traceback …",
        "error",
    )
    assert found.payload == {"args": [0]}
    assert found.ended_at is not None
    assert found.ended_at.tzinfo is not None
    assert found.ended_at >= found.created_at
    assert hand.app.jobs.get(running).reserved_by == "worker"
    assert hand.app.jobs.get(available).ended_at is None


def test_a_value_that_cannot_be_decoded_is_shown_as_stored(hand: Hand, engine: Engine) -> None:
    execute(engine, "INSERT INTO jobs (task, payload, errors) VALUES ('send', '{broken', 'also broken')")
    (job,) = hand.app.jobs.list()
    assert job.payload == "{broken"
    assert job.errors == [{"message": "also broken"}]
    hand.end(Finished("not json"))
    assert hand.app.jobs.get(job.id).result == "not json"


def test_the_list_is_newest_first_limited_and_filtered(hand: Hand) -> None:
    finished = hand.enqueue(2)
    hand.end(Finished())
    failed = hand.ended(2, task="pack", queue="boxes")
    waiting = hand.enqueue(2, "pack")
    later = hand.enqueue(1, delay="1d")
    everything = [*later, *reversed(waiting), *reversed(failed), *reversed(finished)]

    def ids(**how: Any) -> list[int]:
        return [job.id for job in hand.app.jobs.list(**how)]

    assert ids() == everything
    assert ids(limit=3) == everything[:3]
    assert ids(state="failed") == list(reversed(failed))
    assert ids(state="available") == list(reversed(waiting))
    assert ids(state="scheduled") == later
    assert ids(state="finished", limit=1) == [finished[1]]
    assert ids(state="running") == []
    assert ids(state="cancelled") == []
    assert ids(task="pack") == [*reversed(waiting), *reversed(failed)]
    assert ids(queue="boxes") == list(reversed(failed))
    assert ids(queue="default", task="pack", state="available") == list(reversed(waiting))
    assert ids(task="pack", queue="nowhere") == []


def test_get_of_an_unknown_id_raises(hand: Hand) -> None:
    hand.enqueue()
    for id in (4711, 0, -1, 2**63, 10**20, -(10**20)):
        with pytest.raises(JobNotFoundError, match=f"there is no job {id}"):
            hand.app.jobs.get(id)
        assert hand.app.jobs.cancel([id]) == {id: "unknown"}
        assert hand.app.jobs.retry([id]) == hand.app.jobs.delete([id]) == []


# -- failed jobs run again (T13) -----------------------------------------------------------------------------


def test_a_retried_job_is_new_but_for_its_id_token_and_errors(hand: Hand) -> None:
    (id,) = hand.enqueue(priority=7, timeout="30s", unique_key="k")
    hand.settle(hand.claim(), Retried(0, ErrorText("OSError", "first")))
    hand.settle(hand.claim(), Released(0))
    with hand.app.database.begin() as conn:
        conn.execute(update(jobs).values(losses=2))
    last = hand.claim()
    hand.settle(last, BOOM)
    failed = hand.app.jobs.get(id)

    assert hand.app.jobs.retry([id]) == [id]

    with hand.app.database.read() as conn:
        row = conn.execute(select(jobs, (jobs.c.available_at <= now()).label("due"))).one()
        assert conn.scalar(select(func.count()).select_from(failed_jobs)) == 0
    assert (row.id, row.attempts, row.releases, row.losses, bool(row.due)) == (id, 0, 0, 0, True)
    assert (row.reserved_at, row.reserved_by, row.lease_expires_at) == (None, None, None)
    assert (row.lease_token, row.priority, row.timeout_ms, row.max_attempts, row.unique_key) == (
        3,
        7,
        30_000,
        3,
        "k",
    )
    job = hand.app.jobs.get(id)
    assert job.created_at == failed.created_at
    assert [(e["attempt"], e["reason"], e["exception"], e["message"]) for e in job.errors] == [
        (1, "error", "OSError", "first"),
        (2, "error", "ValueError", "boom"),
    ]
    assert job.errors[1]["at"].startswith(failed.ended_at.isoformat()[:19])  # type: ignore[union-attr]

    assert hand.settle(last, Finished()) == set(), "the owner of the attempt that failed must match nothing"
    (claimed,) = hand.claim()
    assert (claimed.lease_token, claimed.attempts) == (4, 1)
    assert hand.settle(last, Finished()) == set()
    assert hand.settle([claimed], BOOM) == {id}
    assert hand.app.jobs.retry([id]) == [id]
    assert [e["attempt"] for e in hand.app.jobs.get(id).errors] == [1, 2, 1]


def test_a_failed_job_whose_unique_key_is_live_stays_failed_and_is_reported(hand: Hand) -> None:
    held = hand.ended(unique_key="k") + hand.ended(unique_key="k")
    other = hand.ended(unique_key="other")
    elsewhere = hand.ended(unique_key="k", queue="elsewhere")
    hand.enqueue(unique_key="k")
    done = hand.app.jobs.retry(all=True)
    assert (done, done.held) == (other + elsewhere, held)
    assert hand.states(held) == ["failed", "failed"]
    hand.end(Finished())
    assert hand.app.jobs.retry(all=True) == held[:1], "the first takes the key, so the second stays"
    assert hand.states(held) == ["available", "failed"]


def test_errors_that_cannot_be_read_are_kept_and_full_ones_do_not_grow(hand: Hand, engine: Engine) -> None:
    odd, full = hand.ended(2)
    with engine.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET errors = 'not json' WHERE id = :id"), {"id": odd})
        conn.execute(
            text("UPDATE failed_jobs SET errors = :errors WHERE id = :id"),
            {"id": full, "errors": f'["{"x" * 70_000}"]'},
        )
    hand.app.jobs.retry(all=True)
    first, last = hand.app.jobs.get(odd).errors
    assert (first, last["message"]) == ({"message": "not json"}, "boom")
    assert hand.app.jobs.get(full).errors == [{"message": "x" * 70_000}]


@needs("sessions")
def test_retry_inserts_jobs_in_the_order_of_their_unique_keys(hand: Hand) -> None:
    """As enqueue_many inserts them: in another order the two would deadlock, and the victim might be the
    caller's transaction."""
    (b,) = hand.ended(unique_key="b")
    (a,) = hand.ended(unique_key="a")
    assert hand.app.jobs.retry(all=True) == [b, a]
    with hand.app.database.read() as conn:
        stored = conn.execute(text("SELECT id FROM jobs ORDER BY ctid")).scalars().all()
    assert stored == [a, b]


@needs("sessions")
def test_retry_and_delete_skip_a_locked_failed_job(hand: Hand, engine: Engine) -> None:
    ids = hand.ended(3)
    with engine.connect() as rival:
        rival.execute(text("SELECT id FROM failed_jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        assert hand.app.jobs.retry(all=True) == [ids[0], ids[2]]
        assert hand.app.jobs.delete(all=True) == []
    assert hand.app.jobs.delete(all=True) == [ids[1]]


def test_delete_takes_finished_and_cancelled_jobs_by_their_ids(hand: Hand) -> None:
    finished, cancelled, waiting = hand.enqueue(3)
    hand.app.jobs.cancel([cancelled])
    hand.app.jobs.reschedule([waiting], delay="1h")
    assert hand.end(Finished()) == [finished]
    assert hand.app.jobs.delete(all=True) == []
    assert hand.app.jobs.delete([finished, cancelled, waiting]) == [finished, cancelled]
    assert [job.id for job in hand.app.jobs.list()] == [waiting]
    with pytest.raises(JobNotFoundError):
        hand.app.jobs.get(finished)


# -- counts of a queue -------------------------------------------------------------------------------------

MINE = lookup.Selection(queue="mine")


def test_queues_are_counted_alone(hand: Hand) -> None:
    hand.ended(1, queue="mine")
    hand.enqueue(2, queue="mine")
    hand.end(Finished())
    hand.enqueue(1, queue="mine")
    hand.enqueue(1, queue="mine", delay="1h")
    hand.enqueue(1, queue="others")
    with hand.app.database.begin() as conn:
        assert lookup.counts(conn, MINE) == {"failed": 1, "finished": 2, "available": 1, "scheduled": 1}


def test_the_repr_of_a_job_and_of_a_flow_is_one_short_line(app: sqlq.App) -> None:
    task = app.task(name="shop.send")(lambda: None)
    flow = app.enqueue(sqlq.group(task.new(), task.new()))
    first = flow.jobs[0]
    shown = {
        f"<Job {first.id} 'shop.send' available>": first,
        f"<JobDetails {first.id} 'shop.send' available>": app.jobs.get(first.id),
        f"<EnqueuedFlow {flow.id} None: 2 jobs>": flow,
        f"<FlowDetails {flow.id} None running: 2 available>": app.flows.get(flow.id),
        "<NewJob 'shop.send'>": task.new(),
    }
    assert {repr(each) for each in shown.values()} == shown.keys()
