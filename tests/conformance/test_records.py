"""The cold path: looking at jobs in whatever state, running failed ones again, forgetting and pruning, on
every database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, func, insert, literal, select, text, update

import sqlq
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.outcome import Cancelled, ErrorText, Finished, Released, Retried
from sqlq.schema.tables import failed_jobs, finished_jobs, jobs, queues, workers
from sqlq.schema.types import after, now
from sqlq.store.jobs import lookup, operate
from sqlq.store.workers import look
from sqlq.store.workers import workers as workerss
from tests.kit import BOOM, Hand, claim_on, execute, needs

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


@pytest.mark.parametrize("how", [{"state": "broken"}, {"limit": 0}, {"limit": 1_000_000}])
def test_a_list_with_an_unknown_state_or_bad_limit_is_refused(hand: Hand, how: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"state is 'broken': it is one of blocked, scheduled, |limit is \d+: it must be a whole number",
    ):
        hand.app.jobs.list(**how)


def test_get_of_an_unknown_id_raises(hand: Hand) -> None:
    hand.enqueue()
    for id in (4711, 0, -1, 2**63, 10**20, -(10**20)):
        with pytest.raises(JobNotFoundError, match=f"there is no job {id}"):
            hand.app.jobs.get(id)
        assert hand.app.jobs.cancel([id]) == {id: "unknown"}
        assert hand.app.jobs.retry([id]) == hand.app.jobs.delete([id]) == []
    for wrong in ("7", True, None, 1.0):
        with pytest.raises(ConfigurationError, match="is not the id of a job"):
            hand.app.jobs.get(wrong)  # type: ignore[arg-type]


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


def test_retry_selects_failed_jobs_by_id_task_queue_or_all(hand: Hand) -> None:
    a = hand.ended(2)
    b = hand.ended(2, task="pack")
    c = hand.ended(2, task="pack", queue="boxes")
    assert hand.app.jobs.retry([a[0], 4711]) == [a[0]]
    assert hand.app.jobs.retry([a[0]]) == [], "it is not failed any more"
    assert hand.app.jobs.retry([*a, *b], task="pack", queue="default") == b
    assert hand.app.jobs.retry(queue="boxes") == c
    assert hand.app.jobs.retry(task="nothing") == []
    assert hand.app.jobs.retry(all=True) == a[1:]
    assert hand.app.jobs.list(state="failed") == []


@pytest.mark.parametrize("name", ["retry", "delete"])
def test_retry_and_delete_refuse_a_call_that_names_no_jobs(hand: Hand, name: str) -> None:
    ids = hand.ended(2)
    verb = getattr(hand.app.jobs, name)
    with pytest.raises(ConfigurationError, match="name the failed jobs that are meant"):
        verb()
    with pytest.raises(ConfigurationError, match="name the failed jobs that are meant"):
        verb([])
    with pytest.raises(ConfigurationError, match="or all of them, and not both"):
        verb(ids, all=True)
    with pytest.raises(ConfigurationError, match="give a list"):
        verb(ids[0])
    with pytest.raises(ConfigurationError, match="is not the id of a job"):
        verb([ids[0], "2"])
    assert hand.states(ids) == ["failed", "failed"]


@pytest.mark.parametrize(
    ("name", "where"), [("retry", (operate, "retry_failed")), ("delete", (operate, "forget"))]
)
def test_retry_and_delete_work_in_batches(
    hand: Hand, name: str, where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "BATCH", 3)
    monkeypatch.setattr(operate, "CARRIED_BATCH", 3)
    sizes: list[int] = []
    original = getattr(*where)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        sizes.append(len(result[0] if name == "retry" else result))
        return result

    monkeypatch.setattr(*where, counted)
    ids = hand.ended(7)
    verb = getattr(hand.app.jobs, name)
    assert verb(all=True) == ids
    assert max(sizes) == 3
    assert hand.app.jobs.list(state="failed") == []
    if name == "retry":
        assert hand.end() == ids
    else:
        ids = hand.ended(7)
    assert verb(ids) == ids


@needs("sessions")
def test_retry_and_delete_skip_a_locked_failed_job(hand: Hand, engine: Engine) -> None:
    ids = hand.ended(3)
    with engine.connect() as rival:
        rival.execute(text("SELECT id FROM failed_jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        assert hand.app.jobs.retry(all=True) == [ids[0], ids[2]]
        assert hand.app.jobs.delete(all=True) == []
    assert hand.app.jobs.delete(all=True) == [ids[1]]


def test_deleted_jobs_are_gone(hand: Hand) -> None:
    a, b = hand.ended(2), hand.ended(1, task="pack")
    assert hand.app.jobs.delete([a[0], 4711]) == [a[0]]
    assert hand.app.jobs.delete(task="pack") == b
    assert [job.id for job in hand.app.jobs.list()] == a[1:]
    with pytest.raises(JobNotFoundError):
        hand.app.jobs.get(a[0])


def test_delete_takes_finished_and_cancelled_jobs_by_their_ids(hand: Hand) -> None:
    finished, cancelled, waiting = hand.enqueue(3)
    hand.app.jobs.cancel([cancelled])
    hand.app.jobs.reschedule([waiting], delay="1h")
    assert hand.end(Finished()) == [finished]
    assert hand.app.jobs.delete(all=True) == []
    assert hand.app.jobs.delete([finished, cancelled, waiting]) == [finished, cancelled]
    assert [job.id for job in hand.app.jobs.list()] == [waiting]


# -- pruning (T15) -------------------------------------------------------------------------------------------


def _age(hand: Hand, ids: Sequence[int], seconds: Sequence[int]) -> None:
    with hand.app.database.begin() as conn:
        for id, ago in zip(ids, seconds, strict=True):
            moment = after(literal(-ago * 1000, BigInteger))
            conn.execute(update(finished_jobs).where(finished_jobs.c.id == id).values(finished_at=moment))


def test_finished_jobs_are_pruned_by_age_the_oldest_first_and_at_most_so_many(hand: Hand) -> None:
    ids = hand.enqueue(5)
    hand.end(Finished())
    failed = hand.ended()
    _age(hand, ids, [70, 10, 90, 80, 50])

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
    _age(hand, ids, [90, 80, 70, 60])
    with hand.app.database.begin() as one:
        assert operate.prune(one, older_than_ms=1_000, limit=2) == 2
        with hand.app.database.begin() as two:
            two.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert operate.prune(two, older_than_ms=1_000, limit=10) == 2
    assert hand.app.jobs.list() == []


# -- queues and workers --------------------------------------------------------------------------------------


def _register(app: sqlq.App, id: str, names: Sequence[str] | None) -> None:
    with app.database.begin() as conn:
        workerss.register(conn, id=id, host="here", pid=1, version="0", queues=names, concurrency=2)


def _silent(app: sqlq.App, id: str, seconds: int) -> None:
    with app.database.begin() as conn:
        conn.execute(
            update(workers)
            .where(workers.c.id == id)
            .values(seen_at=after(literal(-seconds * 1000, BigInteger)))
        )


def test_the_status_counts_jobs_and_shows_whether_a_queue_is_served(hand: Hand) -> None:
    hand.ended(2, queue="b")
    hand.enqueue(1, queue="a")
    hand.claim()
    hand.enqueue(3, queue="a")
    hand.enqueue(2, queue="a", delay="1h")
    hand.enqueue(1, queue="c", delay="1h")
    with hand.app.database.begin() as conn:
        conn.execute(insert(queues).values(queue="c", paused_at=now()))
    _register(hand.app, "w1", ["a", "empty"])
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

    _register(hand.app, "w2", None)
    assert all(status.served for status in hand.app.queues.list()), "w2 serves every queue"
    _silent(hand.app, "w1", 120)
    _silent(hand.app, "w2", 120)
    assert [(status.queue, status.served) for status in hand.app.queues.list()] == [
        ("a", False),
        ("b", False),
        ("c", False),
    ]
    assert hand.app.workers.list() == []


def test_workers_register_leave_and_are_removed_when_silent(hand: Hand) -> None:
    app = hand.app
    for id in ("w1", "w2", "w3"):
        _register(app, id, None)
    _silent(app, "w1", 80)
    _silent(app, "w2", 3600)
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
