"""Operators choose jobs, look at them, run them again, forget them and move them; on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text, update

import sqlq
from sqlq.admin.batches import watched
from sqlq.admin.verbs import VERBS
from sqlq.errors import ConfigurationError, JobNotFoundError
from sqlq.model.outcome import Cancelled, ErrorText, Finished, Outcome, Released, Retried
from sqlq.payload.encryption import new_key
from sqlq.schema.tables import TOKEN_SCHEMA, failed_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.jobs import lookup, operate
from sqlq.store.limits import admit
from tests.kit import (
    BOOM,
    Hand,
    claim,
    claim_on,
    committed,
    drain,
    execute,
    for_each,
    needs,
    settle,
    span,
    wait_until,
    waiting_for_locks,
    working,
)

pytestmark = pytest.mark.each_database

ACTS_ON: dict[str, Outcome] = {"retry": BOOM, "delete": BOOM, "replay": Finished()}
"""The outcome of the jobs that a verb is for; the other verbs are for jobs that wait."""
each_verb = pytest.mark.parametrize(
    "verb", [words for words, verb in VERBS.items() if verb.is_of_jobs and verb.selectors]
)


def ready(hand: Hand, verb: str, count: int = 1, task: str = "send", **options: Any) -> list[int]:
    """Make jobs that a verb is for."""
    if verb in ACTS_ON:
        return hand.ended(count, ACTS_ON[verb], task, **options)
    return hand.enqueue(count, task, **options)


def changed(hand: Hand, verb: str, **options: Any) -> list[int]:
    """Do it, and return the ids that the answer reports as changed."""
    answer = getattr(hand.app.jobs, verb)(**options)
    if isinstance(answer, dict):
        return [id for id, effect in answer.items() if effect == "cancelled" or isinstance(effect, int)]
    return list(answer)


@each_verb
def test_a_verb_changes_the_jobs_that_fit_all_that_is_given(hand: Hand, verb: str) -> None:
    sent = ready(hand, verb, 3)
    packed = ready(hand, verb, 2, "pack")
    boxes = ready(hand, verb, 2, "pack", queue="boxes")
    (imported,) = ready(hand, verb, batch="import")
    others = {*sent, *packed, *boxes}
    for options, ids in (
        ({"ids": [sent[0], 4711]}, sent[:1]),
        ({"ids": [*sent, *packed], "task": "pack", "queue": "default"}, packed),
        ({"ids": boxes, "batch": "import"}, []),
        ({"batch": "import"}, [imported]),
        ({"task": "pack", "queue": "boxes"}, boxes),
        ({"task": "nothing"}, []),
        ({"queue": "nowhere"}, []),
    ):
        assert changed(hand, verb, **options) == ids, options
        others -= {*ids}
    everything = [*sent, *packed, *boxes, imported] if verb == "reschedule" else sorted(others)
    assert changed(hand, verb, all=True) == everything, "which moves what waits as often as it is told"


@each_verb
def test_a_verb_works_in_batches_and_leaves_newer_jobs(
    hand: Hand, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((lookup, "BATCH"), (operate, "BATCH"), (operate, "CARRIED_BATCH")):
        monkeypatch.setattr(module, name, 3)
    ids, late = ready(hand, verb, 7), list[int]()

    def see(_: int) -> bool:
        if len(late) < 5:
            late.extend(ready(hand, verb, queue="late"))
        return True

    with watched(see):
        assert changed(hand, verb, all=True) == ids
    assert len(late) >= 3, "one after each batch"
    assert changed(hand, verb, ids=late) == late, "none of them was touched"


@each_verb
@for_each(
    ("options", "says"),
    [
        ({}, "name the .*jobs that are meant"),
        ({"ids": [1], "all": True}, "or all of them, and not both"),
        ({"ids": [1, True]}, "True is not the id of a job"),
        ({"queue": "a\0b"}, "NUL"),
        ({"batch": ""}, "batch is ''"),
    ],
)
def test_a_verb_refuses_a_choice_in_a_sentence(
    hand: Hand, verb: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as refusal:
        changed(hand, verb, **options)
    assert "\n" not in str(refusal.value)


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
    assert (found.exception, found.message, found.reason) == ("ValueError", "boom", "error")
    assert found.traceback == "Traceback …"
    assert found.payload == {"args": [0]}
    assert found.ended_at is not None
    assert found.ended_at.tzinfo is not None
    assert found.ended_at >= found.created_at
    assert hand.app.jobs.get(running).reserved_by == "worker"
    assert hand.app.jobs.get(available).ended_at is None


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
    assert (row.lease_token, row.unique_key) == (3, "k")
    assert (row.priority, row.timeout_ms, row.max_attempts) == (7, 30_000, 3)
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
    for id, errors in ((odd, "not json"), (full, f'["{"x" * 70_000}"]')):
        execute(engine, "UPDATE failed_jobs SET errors = :errors WHERE id = :id", errors=errors, id=id)
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


# -- other times, queues and priorities ----------------------------------------------------------------------


SOON = timedelta(minutes=5)


def due(app: sqlq.App, id: int) -> timedelta:
    """How far from now a job is due."""
    job = app.jobs.get(id)
    at = job.available_at or job.due_at
    assert at is not None
    return at - datetime.now(UTC)


def test_waiting_jobs_are_moved_to_a_time_to_a_delay_and_to_now(app: sqlq.App) -> None:
    id = app.enqueue(app.task(name="send", max_attempts=3)(lambda: None).new()).id
    assert app.jobs.reschedule([id], delay="2h") == [id]
    assert due(app, id) > timedelta(minutes=119)
    assert app.jobs.reschedule([id], available_at=datetime.now(UTC) + timedelta(days=1)) == [id]
    assert due(app, id) > timedelta(hours=23)
    assert asyncio.run(app.jobs.areschedule(task="send")) == [id]
    assert (due(app, id) < SOON, app.jobs.get(id).state) == (True, "available")
    settle(app, claim(app), Retried(3_600_000, ErrorText("ValueError", "no")))
    assert app.jobs.get(id).state == "scheduled"
    assert app.jobs.reschedule([id]) == [id]
    job = app.jobs.get(id)
    assert (job.state, job.attempts, len(job.errors)) == ("available", 1, 1), "a retry keeps its attempts"


def test_running_and_ended_jobs_are_left_alone(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    running, ended = (app.enqueue(task.new()).id for _ in range(2))
    app.jobs.cancel([ended])
    (held,) = claim(app)
    before = app.jobs.get(running)
    assert app.jobs.reschedule([running, ended, 4711], delay="1h") == []
    assert app.jobs.reschedule(task="t") == []
    three = (running, ended, 4711)
    assert app.jobs.change(three, queue="bulk") == dict.fromkeys(three, "not waiting")
    assert app.jobs.get(running) == before
    assert held.id == running


def test_a_job_claimed_meanwhile_is_not_touched(app: sqlq.App) -> None:
    """The claim came between the look for waiting jobs and the lock on their rows."""
    first, second = (job.id for job in app.enqueue_many([app.task(name="t")(lambda: None).new()] * 2))
    claim(app, limit=1)
    before = app.jobs.get(first)
    with app.database.begin() as conn:
        assert operate.change(conn, [first, second], delay_ms=3_600_000) == {second: "changed"}
    after = app.jobs.get(first)
    assert after == before
    assert (after.state, after.available_at) == ("running", before.available_at)


@needs("sessions")
def test_a_reschedule_waits_for_a_claim_under_way_and_leaves_its_lease(app: sqlq.App, engine: Engine) -> None:
    first, second = (job.id for job in app.enqueue_many([app.task(name="t")(lambda: None).new()] * 2))
    lease = "SELECT lease_token, lease_expires_at, available_at, attempts FROM jobs WHERE id = :id"
    with ThreadPoolExecutor(1) as pool:
        with app.database.begin() as conn:
            (held,) = claim_on(conn, limit=1)
            before = conn.execute(text(lease), {"id": held.id}).one()
            moving = pool.submit(app.jobs.reschedule, [first, second], delay="1h")
            wait_until(lambda: waiting_for_locks(engine), what="the reschedule to wait for the claim")
            assert app.jobs.get(second).state == "scheduled", "a locked row holds up no other"
        assert moving.result(20) == [second]
    with app.database.read() as conn:
        assert conn.execute(text(lease), {"id": first}).one() == before


def test_a_rescheduled_job_releases_its_slot_until_its_new_time(app: sqlq.App) -> None:
    call = app.task(name="call", limit=sqlq.Limit("stripe", running=1))(lambda: None)
    first, second = (job.id for job in app.enqueue_many([call.new(), call.new()]))
    admit.look(app.database)
    assert app.jobs.get(first).blocked_by is None
    assert app.jobs.reschedule([first], delay="1h") == [first]
    assert (app.jobs.get(first).blocked_by, due(app, first) > SOON) == ("limit", True)
    admit.look(app.database)  # by the wake alone
    assert app.jobs.get(second).blocked_by is None
    assert app.jobs.cancel([second]) == {second: "cancelled"}
    assert app.jobs.reschedule([first]) == [first]
    admit.look(app.database)
    assert app.jobs.get(first).state == "available"


def test_a_step_that_waits_for_another_is_due_later_and_stays_blocked(app: sqlq.App) -> None:
    step = app.task(name="step")(lambda: None)
    flow = app.enqueue(sqlq.chain(step.new(), step.new()))
    first, second = (job.id for job in flow.jobs)
    assert app.jobs.reschedule([second], delay="1h") == [second]
    assert (app.jobs.get(second).blocked_by, due(app, second) > SOON) == ("flow", True)
    app.worker(drain=True).run()
    assert [app.jobs.get(id).state for id in (first, second)] == ["finished", "scheduled"]


def test_an_idle_worker_starts_a_job_that_is_moved_to_now(app: sqlq.App) -> None:
    id = app.enqueue(app.task(name="t")(lambda: None).new().set(delay="1h")).id
    with working(app):
        assert app.jobs.reschedule([id]) == [id]
        wait_until(lambda: app.jobs.get(id).state == "finished", what="the job to run")


def test_a_waiting_job_changes_its_queue_priority_and_time(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    job, other = app.enqueue_many([task.new().set(delay="2h"), task.new().set(delay="2h")])
    assert app.jobs.change([job], queue="bulk", priority=7) == {job.id: "changed"}
    changed = app.jobs.get(job.id)
    assert (changed.queue, changed.priority, changed.state) == ("bulk", 7, "scheduled")
    assert app.jobs.change([job], delay="0s") == {job.id: "changed"}
    assert (app.jobs.get(job.id).queue, app.jobs.get(job.id).priority) == ("bulk", 7)
    assert drain(app, queues=["bulk"]).finished == 1
    later = datetime.now(UTC) + timedelta(days=1)
    assert asyncio.run(app.jobs.achange([other.id], available_at=later)) == {other.id: "changed"}
    assert due(app, other.id) > timedelta(hours=23)


def test_a_job_whose_key_another_one_holds_stays_in_its_queue(app: sqlq.App) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new().set(queue="bulk", unique_key="k"))
    met, free = app.enqueue_many([task.new().set(unique_key=key) for key in ("k", "free")])
    permanent = task.new().set(unique_key="lasts", unique_until="pruned")
    lasting, ended = app.enqueue(permanent), app.enqueue(permanent.set(queue="bulk"))
    app.jobs.cancel([ended])
    effects = app.jobs.change([met, free, lasting], queue="bulk", priority=3)
    assert effects == {met.id: "key held", free.id: "changed", lasting.id: "key held"}
    left, moved = app.jobs.get(met.id), app.jobs.get(free.id)
    assert [(job.queue, job.priority) for job in (left, moved)] == [("default", 0), ("bulk", 3)]
    assert app.jobs.change([met], queue="default", priority=4) == {met.id: "changed"}, "where it is"


def test_a_key_that_is_taken_meanwhile_keeps_a_job_in_its_queue(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new().set(queue="bulk", unique_key="k"))
    met, other = app.enqueue_many([task.new().set(unique_key="k"), task.new()])
    monkeypatch.setattr(operate, "holder", lambda conn, queue, key: None)
    assert app.jobs.change([met, other], queue="bulk") == {met.id: "key held", other.id: "changed"}


def test_a_signed_job_stays_in_its_queue(app: sqlq.App) -> None:
    signing = sqlq.App(app.database.engine.url, keys=[new_key()])
    task = signing.task(name="t")(lambda: None)
    job = signing.enqueue(task.new())
    assert app.jobs.change([job.id], queue="bulk") == {job.id: "protected"}
    assert app.jobs.change([job.id], priority=9) == {job.id: "changed"}
    assert drain(signing).finished == 1
    signing.close()


# -- jobs of one batch ---------------------------------------------------------------------------------------


IMPORT = "import-42"


@pytest.fixture
def load(app: sqlq.App) -> Any:
    @app.task(name="load", max_attempts=1)
    def load(line: int) -> int:
        if line < 0:
            raise ValueError("no such line")
        return line * 2

    return load


def enqueued(app: sqlq.App, *lines: int, batch: str = IMPORT, **options: Any) -> list[sqlq.Job]:
    """Enqueue each job by a call of its own."""
    load = app.tasks["load"]
    return [app.enqueue(load.new(line).set(batch=batch, **options)) for line in lines]


def test_a_batch_has_the_jobs_of_separate_calls_in_all_tables(app: sqlq.App, load: Any) -> None:
    jobs = enqueued(app, 1, -1) + app.enqueue_many([load.new(2).set(batch=IMPORT), load.new(3)])[:1]
    drain(app)
    jobs += enqueued(app, 4, delay="1h")
    enqueued(app, 5, batch="import-43")
    found = app.jobs.of_batch(IMPORT)
    assert [(job.id, job.task, job.queue) for job in found] == [(job.id, "load", "default") for job in jobs]
    assert [job.state for job in found] == ["finished", "failed", "finished", "scheduled"]
    assert app.jobs.counts(batch=IMPORT) == {"finished": 2, "failed": 1, "scheduled": 1}
    assert app.jobs.get(jobs[0].id).batch_key == IMPORT
    with pytest.raises(sqlq.JobFailedError, match="no such line"):
        app.result(app.jobs.of_batch(IMPORT))
    assert [job.id for job in app.jobs.list(batch=IMPORT, task="load", within=2)] == [
        job.id for job in reversed(jobs)
    ], "an old batch is found, too"
    assert app.jobs.of_batch("import") == []
    assert app.jobs.counts(batch="import") == {}


def test_a_batch_is_waited_for_and_has_results(app: sqlq.App, load: Any) -> None:
    enqueued(app, 1, 2, 3)
    with working(app):
        done = app.wait_all(app.jobs.of_batch(IMPORT), timeout="30s")
    assert len(done.ended) == 3
    assert not done.pending
    batch = app.jobs.of_batch(IMPORT)
    assert app.result(batch) == [2, 4, 6]
    assert app.result([batch[2].id, batch[0].id], raw=True) == [6, 2]
    assert asyncio.run(app.aresult(batch)) == [2, 4, 6]
    assert asyncio.run(app.jobs.acounts(batch=IMPORT)) == {"finished": 3}
    assert app.result(app.jobs.of_batch("none")) == []


def test_failed_jobs_of_a_batch_are_counted_and_stay_in_it_when_they_run_again(
    app: sqlq.App, load: Any
) -> None:
    (mine,), (other,) = enqueued(app, -1), enqueued(app, -2, batch="b")
    drain(app)
    found, complete = app.jobs.failures(batch="b")
    assert ([each.number for each in found], complete) == ([1], True)
    (copy,) = app.jobs.replay(batch="b").values()
    assert [each.id for each in app.jobs.of_batch("b")] == [other.id, copy]
    assert app.jobs.retry(batch=IMPORT) == [mine.id]
    assert app.jobs.get(mine.id).batch_key == IMPORT


# -- copies of ended jobs ------------------------------------------------------------------------------------


def replays(hand: Hand, jobs: dict[int, int]) -> list[sqlq.JobDetails]:
    return [hand.app.jobs.get(id) for id in jobs.values()]


def moved(engine: Engine, ids: Sequence[int], table: str, seconds: int) -> None:
    """Let jobs have ended so long ago."""
    ended = {"finished_jobs": "finished_at", "failed_jobs": "failed_at"}[table]
    earlier = f"{ended} - {span(engine, seconds)}"
    with engine.begin() as conn:
        for id in ids:
            conn.execute(text(f"UPDATE {table} SET {ended} = {earlier} WHERE id = :id"), {"id": id})


def test_a_replay_is_a_new_job_that_names_its_origin(hand: Hand, engine: Engine) -> None:
    options: dict[str, Any] = {"queue": "mail", "priority": 7, "timeout": "30s", "max_attempts": 2}
    options |= {"label": "blue", "headers": {"tenant": "blue"}, "backoff": "5m", "retention": "9d"}
    who = ["web"]
    hand.app.before_enqueue(lambda job: {"who": who[0]})
    (old,) = hand.ended(unique_key="k", on_failure=None, **options)
    who[0] = "operator"
    ((origin, new),) = hand.app.jobs.replay(old).items()
    assert origin == old
    job = hand.app.jobs.get(new)
    assert new > old
    assert (job.state, job.replay_of, job.attempts, job.lease_token) == ("available", old, 0, 0)
    assert (job.task, job.payload, job.queue, job.priority) == ("send", {"args": [0]}, "mail", 7)
    assert (job.timeout_ms, job.max_attempts, job.label) == (30_000, 2, "blue")
    assert job.headers == {"tenant": "blue", "who": "web"}, "a replay calls no middleware of the enqueue"
    assert (job.retention_ms, job.unique_key, job.on_failure) == (9 * 86_400_000, None, None)
    assert job.backoff == hand.app.jobs.get(old).backoff
    assert (job.history, job.errors) == ((), [])
    before = hand.app.jobs.get(old)
    assert (before.state, before.unique_key) == ("failed", "k")
    with engine.connect() as conn:
        found = conn.execute(text("SELECT id, replay_of FROM job_states WHERE replay_of IS NOT NULL")).all()
    assert [tuple(row) for row in found] == [(new, old)]
    assert hand.end(Finished()) == [new]
    assert hand.app.jobs.get(new).replay_of == old, "it keeps the name where it has ended"
    assert hand.app.jobs.replay(new).keys() == {new}, "a replay is a job like others"
    assert hand.app.jobs.replay(old)[old] > new, "each replay copies"


def test_a_replay_emits_an_enqueued_event(hand: Hand) -> None:
    heard: list[sqlq.JobEvent] = []
    hand.app.on("enqueued")(heard.extend)
    first, second = hand.ended(2, label="order 7", priority=3)
    jobs = hand.app.jobs.replay(task="send", since="1h")
    told = wait_until(lambda: [event for event in heard if event.id in jobs.values()][1:] and heard[-2:])
    assert [(e.id, e.task, e.queue, e.label, e.attempt, e.max_attempts) for e in told] == [
        (jobs[of], "send", "default", "order 7", 0, 3) for of in (first, second)
    ]


def test_a_replay_has_no_cursor_and_no_progress(hand: Hand, engine: Engine) -> None:
    hand.app.schedules.add("nightly", hand.tasks["send"].new().set(start_within="1h"), cron="0 3 * * *")
    id = hand.app.schedules.run("nightly").id
    with engine.begin() as conn:
        options = {"schema_translate_map": {TOKEN_SCHEMA: None}}
        conn.execute(update(jobs).values(cursor="7", payload="{not json"), execution_options=options)
        conn.execute(text("UPDATE jobs SET progress = 3, progress_of = 4"))
    hand.end()
    (job,) = replays(hand, hand.app.jobs.replay(id))
    assert (job.cursor, job.progress, job.start_by) == (None, None, None)
    assert job.payload == "{not json", "it is copied as it is"
    assert (job.schedule, job.scheduled_for) == ("nightly", hand.app.jobs.get(id).scheduled_for)


def test_a_replay_under_a_limit_waits_for_its_turn(hand: Hand, engine: Engine) -> None:
    @hand.app.task(name="charge", limit=sqlq.Limit("stripe", running=1))
    def charge() -> None: ...

    app = hand.app
    first, second = (app.enqueue(charge.new()) for _ in range(2))
    app.worker(drain=True).run()
    execute(engine, "DELETE FROM sqlq_wakes")
    done = app.jobs.replay([first.id, second.id])
    looked_at = committed(engine, "sqlq_wakes", "limit_key")
    assert set(map(str, looked_at)) == {"stripe"}, "a worker looks at the line at once, not at its next sweep"
    assert [job.state for job in replays(hand, done)] == ["blocked", "blocked"]
    assert [job.limit_key for job in replays(hand, done)] == ["stripe", "stripe"]
    assert app.worker(drain=True).run().finished == 2


def test_jobs_are_chosen_by_the_time_of_their_end(hand: Hand, engine: Engine) -> None:
    finished = hand.ended(2, Finished())
    failed = hand.ended(2)
    cancelled = hand.ended(1, Cancelled("no"))
    moved(engine, finished, "finished_jobs", 7200)

    def chosen(**options: Any) -> list[int]:
        replays = hand.app.jobs.replay(**options)
        if replays:
            hand.app.jobs.cancel([*replays.values()])
        return [*replays]

    assert chosen(task="send") == finished + failed, "cancelled ones are not meant unless they are named"
    assert chosen(since="1h") == failed
    assert chosen(until="1h") == finished
    assert chosen(since=datetime.now(UTC) - timedelta(hours=3), until="1h") == finished
    assert chosen(since="1h", until="2h") == []
    assert chosen(ids=cancelled) == cancelled


def test_a_replay_of_ids_writes_nothing_when_it_is_interrupted(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "BATCH", 2)
    ids = hand.ended(5, Finished())
    batches: list[str] = []

    def stop(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "INTO" in statement and "jobs" in statement:
            batches.append(statement)
            if len(batches) == 2:
                raise KeyboardInterrupt

    event.listen(hand.app.database.engine, "before_cursor_execute", stop)
    with pytest.raises(KeyboardInterrupt):
        hand.app.jobs.replay(ids)
    assert (len(batches), len(hand.app.jobs.list())) == (2, 5)


def test_a_replay_by_task_goes_on_where_it_was(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "BATCH", 2)
    ids = hand.ended(5, Finished())
    with watched(lambda changed: False) as watch:
        assert [*hand.app.jobs.replay(task="send")] == ids[:2]
    assert watch.is_stopped
    copies = hand.app.jobs.replay(task="send")
    assert [*copies] == ids[2:], "nothing is copied twice"
    hand.app.jobs.cancel([copies[ids[4]]])
    assert [*hand.app.jobs.replay(task="send")] == ids[4:], "nothing came of a copy that was cancelled"
    hand.end()
    assert [*hand.app.jobs.replay(ids[0])] == ids[:1], "but by its id"


def test_new_ids_follow_the_order_of_the_old_ones(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    finished, failed = hand.ended(3, Finished()), hand.ended(3)
    more = hand.ended(2, Finished())
    monkeypatch.setattr(lookup, "BATCH", 3)
    jobs = hand.app.jobs.replay(task="send")
    assert list(jobs) == finished + failed + more
    assert list(jobs.values()) == sorted(jobs.values())


def test_a_replay_leaves_out_steps_of_flows_and_ids_that_do_not_fit(hand: Hand) -> None:
    hand.app.enqueue(sqlq.chain(hand.tasks["pack"].new(), hand.tasks["pack"].new()))
    (step,) = hand.end(Finished())
    assert hand.app.jobs.replay(step) == hand.app.jobs.replay(task="pack") == {}
    failed, pruned = hand.ended(2)
    (live,) = hand.enqueue()
    hand.app.jobs.delete([pruned])
    ids = [failed, pruned, live, 0, -1, 2**63, 2**70]
    assert hand.app.jobs.replay(ids, task="pack") == {}
    assert hand.app.jobs.replay(ids).keys() == {failed}
