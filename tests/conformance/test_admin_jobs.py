"""Operators choose jobs, look at them, cancel them (T10, T11, T12), run them again, forget and move them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, text, update

import sqlq
from sqlq.admin import batches
from sqlq.admin.batches import watched
from sqlq.admin.verbs import VERBS
from sqlq.errors import ConfigurationError, JobNotFoundError, SchemaVersionError
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import ON_REQUEST, Cancelled, ErrorText, Finished, Outcome, Released, Retried
from sqlq.payload.encryption import new_key
from sqlq.schema.tables import TOKEN_SCHEMA, failed_jobs, jobs
from sqlq.schema.types import now
from sqlq.store.jobs import lease, lookup, operate
from sqlq.store.jobs.lease import LeaseState
from sqlq.store.limits import admit
from tests.kit.abilities import for_each, needs
from tests.kit.hand import BOOM, Hand, claim_on, fate, rescue
from tests.kit.sql import committed, execute, locked, received, span, waiting_for_locks
from tests.kit.waiting import wait_until
from tests.kit.workers import drain, listening, working

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
def test_a_verb_takes_batches_of_older_jobs(hand: Hand, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_verb_refuses_a_wrong_choice(hand: Hand, verb: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as refusal:
        changed(hand, verb, **options)
    assert "\n" not in str(refusal.value)


def test_get_returns_a_job_in_any_state(hand: Hand) -> None:
    (finished,) = hand.ended(outcome=Finished('{"sent": ["ü", 1]}'))
    (cancelled,) = hand.ended(outcome=Cancelled("not wanted"))
    (failed,) = hand.ended()
    (running,) = hand.enqueue()
    hand.claim()
    ids = [finished, cancelled, failed, running, *hand.enqueue(delay="1h"), *hand.enqueue()]
    assert hand.states(ids) == ["finished", "cancelled", "failed", "running", "scheduled", "available"]
    assert hand.app.jobs.get(finished).result == {"sent": ["ü", 1]}
    assert hand.app.jobs.get(cancelled).reason == "not wanted"
    found = hand.app.jobs.get(failed)
    assert (found.exception, found.message, found.reason) == ("ValueError", "boom", "error")
    assert (found.traceback, found.payload) == ("Traceback …", {"args": [0]})
    assert found.ended_at is not None
    assert found.ended_at.tzinfo is not None
    assert found.ended_at >= found.created_at
    assert hand.app.jobs.get(running).reserved_by == "worker"
    assert hand.app.jobs.get(ids[-1]).ended_at is None
    for id in (4711, 0, -1, 2**63, 10**20, -(10**20)):
        with pytest.raises(JobNotFoundError, match=f"there is no job {id}"):
            hand.app.jobs.get(id)
        assert hand.app.jobs.cancel([id]) == {id: "unknown"}
        assert hand.app.jobs.retry([id]) == hand.app.jobs.delete([id]) == []


def test_the_list_is_newest_first_limited_and_filtered(hand: Hand) -> None:
    finished = hand.ended(2, Finished())[::-1]
    failed = hand.ended(2, task="pack", queue="boxes")[::-1]
    waiting = hand.enqueue(2, "pack")[::-1]
    later = hand.enqueue(1, delay="1d")
    everything = [*later, *waiting, *failed, *finished]
    rows: list[tuple[dict[str, Any], list[int]]] = [
        ({}, everything),
        ({"limit": 3}, everything[:3]),
        ({"state": "failed"}, failed),
        ({"state": "available"}, waiting),
        ({"state": "scheduled"}, later),
        ({"state": "finished", "limit": 1}, finished[:1]),
        ({"state": "running"}, []),
        ({"state": "cancelled"}, []),
        ({"task": "pack"}, [*waiting, *failed]),
        ({"queue": "boxes"}, failed),
        ({"queue": "default", "task": "pack", "state": "available"}, waiting),
        ({"task": "pack", "queue": "nowhere"}, []),
    ]
    for options, ids in rows:
        assert [job.id for job in hand.app.jobs.list(**options)] == ids, options


def test_a_retried_job_is_new_but_for_its_id_token_and_errors(hand: Hand) -> None:
    (id,) = hand.enqueue(priority=7, timeout="30s", unique_key="k")
    hand.settle(hand.claim(), Retried(0, ErrorText("OSError", "first")))
    hand.settle(hand.claim(), Released(0))
    hand.app.database.run(lambda conn: conn.execute(update(jobs).values(losses=2)))
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
def test_retry_goes_in_the_order_of_unique_keys_and_skips_locked_jobs(hand: Hand, engine: Engine) -> None:
    """As enqueue_many inserts them: in another order the two would deadlock."""
    (b,) = hand.ended(unique_key="b")
    (a,) = hand.ended(unique_key="a")
    assert hand.app.jobs.retry(all=True) == [b, a]
    with hand.app.database.read() as conn:
        stored = conn.execute(text("SELECT id FROM jobs ORDER BY ctid")).scalars().all()
    assert stored == [a, b]
    ids = hand.ended(3, queue="other")
    with locked(engine, f"SELECT id FROM failed_jobs WHERE id = {ids[1]} FOR UPDATE"):
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


SOON = timedelta(minutes=5)


def due(app: sqlq.App, id: int) -> timedelta:
    """How far from now a job is due."""
    job = app.jobs.get(id)
    at = job.available_at or job.due_at
    assert at is not None
    return at - datetime.now(UTC)


def test_waiting_jobs_are_moved_and_changed(hand: Hand) -> None:
    app, (id,) = hand.app, hand.enqueue()
    assert app.jobs.reschedule([id], delay="2h") == [id]
    assert due(app, id) > timedelta(minutes=119)
    assert app.jobs.reschedule([id], available_at=datetime.now(UTC) + timedelta(days=1)) == [id]
    assert due(app, id) > timedelta(hours=23)
    assert asyncio.run(app.jobs.areschedule(task="send")) == [id]
    assert (due(app, id) < SOON, app.jobs.get(id).state) == (True, "available")
    hand.settle(hand.claim(), Retried(3_600_000, ErrorText("ValueError", "no")))
    assert app.jobs.get(id).state == "scheduled"
    assert app.jobs.reschedule([id]) == [id]
    job = app.jobs.get(id)
    assert (job.state, job.attempts, len(job.errors)) == ("available", 1, 1), "a retry keeps its attempts"
    moved, other = hand.enqueue(2, delay="2h")
    assert app.jobs.change([moved], queue="bulk", priority=7) == {moved: "changed"}
    changed = app.jobs.get(moved)
    assert (changed.queue, changed.priority, changed.state) == ("bulk", 7, "scheduled")
    assert app.jobs.change([moved], delay="0s") == {moved: "changed"}
    assert (app.jobs.get(moved).queue, app.jobs.get(moved).priority) == ("bulk", 7)
    assert drain(app, queues=["bulk"]).finished == 1
    later = datetime.now(UTC) + timedelta(days=1)
    assert asyncio.run(app.jobs.achange([other], available_at=later)) == {other: "changed"}
    assert due(app, other) > timedelta(hours=23)


def test_a_job_claimed_meanwhile_is_not_touched(hand: Hand) -> None:
    """Nor one that has ended, or whose claim came between the look for waiting jobs and their locks."""
    app, (running, second, ended) = hand.app, hand.enqueue(3)
    app.jobs.cancel([ended])
    hand.claim(limit=1)
    before = app.jobs.get(running)
    changed = app.database.run(lambda conn: operate.change(conn, [running, second], delay_ms=3_600_000))
    assert changed == {second: "changed"}
    three = (running, ended, 4711)
    assert app.jobs.reschedule(three, delay="1h") == []
    assert app.jobs.reschedule(task="send") == [second]
    assert app.jobs.change(three, queue="bulk") == dict.fromkeys(three, "not waiting")
    assert app.jobs.get(running) == before
    assert before.state == "running"


@needs("sessions")
def test_a_reschedule_waits_for_a_claim_under_way_and_leaves_its_lease(hand: Hand, engine: Engine) -> None:
    app, (first, second) = hand.app, hand.enqueue(2)
    lease = text(f"SELECT lease_token, lease_expires_at, available_at, attempts FROM jobs WHERE id = {first}")
    with ThreadPoolExecutor(1) as pool:
        with app.database.begin() as conn:
            claim_on(conn, limit=1)
            before = conn.execute(lease).one()
            moving = pool.submit(app.jobs.reschedule, [first, second], delay="1h")
            wait_until(lambda: waiting_for_locks(engine), what="the reschedule to wait for the claim")
            assert app.jobs.get(second).state == "scheduled", "a locked row holds up no other"
        assert moving.result(20) == [second]
    with app.database.read() as conn:
        assert conn.execute(lease).one() == before


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


def test_a_moved_step_stays_blocked_and_an_idle_worker_starts_a_moved_job(hand: Hand) -> None:
    app, step = hand.app, hand.tasks["send"].new()
    first, second = (job.id for job in app.enqueue(sqlq.chain(step, step)).jobs)
    assert app.jobs.reschedule([second], delay="1h") == [second]
    assert (app.jobs.get(second).blocked_by, due(app, second) > SOON) == ("flow", True)
    drain(app)
    assert hand.states([first, second]) == ["finished", "scheduled"]
    (id,) = hand.enqueue(delay="1h")
    with working(hand.app):
        assert hand.app.jobs.reschedule([id]) == [id]
        wait_until(lambda: hand.states([id]) == ["finished"], what="the job to run")


def test_a_job_whose_key_is_held_stays_in_its_queue(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    app, task = hand.app, hand.tasks["send"]
    hand.enqueue(queue="bulk", unique_key="k")
    met, free, plain = (*hand.enqueue(unique_key="k"), *hand.enqueue(unique_key="free"), *hand.enqueue())
    permanent = task.new().set(unique_key="lasts", unique_until="pruned")
    lasting, ended = app.enqueue(permanent).id, app.enqueue(permanent.set(queue="bulk"))
    app.jobs.cancel([ended])
    effects = app.jobs.change([met, free, lasting], queue="bulk", priority=3)
    assert effects == {met: "key held", free: "changed", lasting: "key held"}
    left, moved = app.jobs.get(met), app.jobs.get(free)
    assert [(job.queue, job.priority) for job in (left, moved)] == [("default", 0), ("bulk", 3)]
    assert app.jobs.change([met], queue="default", priority=4) == {met: "changed"}, "where it is"
    monkeypatch.setattr(operate, "holder", lambda conn, queue, key: None)  # it is taken meanwhile
    assert app.jobs.change([met, plain], queue="bulk") == {met: "key held", plain: "changed"}


def test_a_signed_job_stays_in_its_queue(app: sqlq.App) -> None:
    with closing(sqlq.App(app.database.engine.url, keys=[new_key()])) as signing:
        job = signing.enqueue(signing.task(name="t")(lambda: None).new())
        assert app.jobs.change([job.id], queue="bulk") == {job.id: "protected"}
        assert app.jobs.change([job.id], priority=9) == {job.id: "changed"}
        assert drain(signing).finished == 1


IMPORT = "import-42"


@pytest.fixture
def load(app: sqlq.App) -> Callable[..., list[sqlq.Job]]:
    """Enqueues each line by a call of its own; those below zero fail."""

    @app.task(name="load", max_attempts=1)
    def load(line: int) -> int:
        if line < 0:
            raise ValueError("no such line")
        return line * 2

    return lambda *lines, **options: [
        app.enqueue(load.new(line).set(**{"batch": IMPORT, **options})) for line in lines
    ]


def test_a_batch_has_the_jobs_of_separate_calls_in_all_tables(app: sqlq.App, load: Any) -> None:
    task = app.tasks["load"]
    jobs = load(1, -1) + app.enqueue_many([task.new(2).set(batch=IMPORT), task.new(3)])[:1]
    drain(app)
    jobs += load(4, delay="1h")
    load(5, batch="import-43")
    ids = [job.id for job in jobs]
    found = app.jobs.of_batch(IMPORT)
    assert [(job.id, job.task, job.queue) for job in found] == [(id, "load", "default") for id in ids]
    assert [job.state for job in found] == ["finished", "failed", "finished", "scheduled"]
    assert app.jobs.counts(batch=IMPORT) == {"finished": 2, "failed": 1, "scheduled": 1}
    assert app.jobs.get(ids[0]).batch_key == IMPORT
    with pytest.raises(sqlq.JobFailedError, match="no such line"):
        app.result(app.jobs.of_batch(IMPORT))
    old = app.jobs.list(batch=IMPORT, task="load", within=2)
    assert [job.id for job in old] == ids[::-1], "an old batch is found, too"
    assert (app.jobs.of_batch("import"), app.jobs.counts(batch="import")) == ([], {})


def test_a_batch_has_results_and_failed_jobs_stay_in_it_when_run_again(app: sqlq.App, load: Any) -> None:
    load(1, 2, 3)
    with working(app):
        done = app.wait_all(app.jobs.of_batch(IMPORT), timeout="30s")
    assert (len(done.ended), len(done.pending)) == (3, 0)
    batch = app.jobs.of_batch(IMPORT)
    assert app.result(batch) == asyncio.run(app.aresult(batch)) == [2, 4, 6]
    assert app.result([batch[2].id, batch[0].id], raw=True) == [6, 2]
    assert asyncio.run(app.jobs.acounts(batch=IMPORT)) == {"finished": 3}
    assert app.result(app.jobs.of_batch("none")) == []
    (mine,), (other,) = load(-1), load(-2, batch="b")
    drain(app)
    found, complete = app.jobs.failures(batch="b")
    assert ([each.number for each in found], complete) == ([1], True)
    (copy,) = app.jobs.replay(batch="b").values()
    assert [each.id for each in app.jobs.of_batch("b")] == [other.id, copy]
    assert app.jobs.retry(batch=IMPORT) == [mine.id]
    assert app.jobs.get(mine.id).batch_key == IMPORT


def test_a_replay_is_a_new_job_that_names_its_origin(hand: Hand, engine: Engine) -> None:
    options: dict[str, Any] = {"queue": "mail", "priority": 7, "timeout": "30s", "max_attempts": 2}
    options |= {"label": "blue", "headers": {"tenant": "blue"}, "backoff": "5m", "retention": "9d"}
    who = ["web"]
    hand.app.before_enqueue(lambda job: {"who": who[0]})
    (old,) = hand.ended(unique_key="k", on_failure=None, **options)
    who[0] = "operator"
    ((origin, new),) = hand.app.jobs.replay(old).items()
    job, before = hand.app.jobs.get(new), hand.app.jobs.get(old)
    assert origin == old < new
    assert (job.state, job.replay_of, job.attempts, job.lease_token) == ("available", old, 0, 0)
    assert (job.task, job.payload, job.queue, job.priority) == ("send", {"args": [0]}, "mail", 7)
    assert (job.timeout_ms, job.max_attempts, job.label) == (30_000, 2, "blue")
    assert job.headers == {"tenant": "blue", "who": "web"}, "a replay calls no middleware of the enqueue"
    assert (job.retention_ms, job.unique_key, job.on_failure) == (9 * 86_400_000, None, None)
    assert (job.backoff, job.history, job.errors) == (before.backoff, (), [])
    assert (before.state, before.unique_key) == ("failed", "k")
    with engine.connect() as conn:
        found = conn.execute(text("SELECT id, replay_of FROM job_states WHERE replay_of IS NOT NULL")).all()
    assert [tuple(row) for row in found] == [(new, old)]
    assert hand.end(Finished()) == [new]
    assert hand.app.jobs.get(new).replay_of == old, "it keeps the name where it has ended"
    assert hand.app.jobs.replay(new).keys() == {new}, "a replay is a job like others"
    assert hand.app.jobs.replay(old)[old] > new, "each replay copies"


def test_a_replay_emits_an_enqueued_event(hand: Hand) -> None:
    heard = listening(hand.app, "enqueued")
    first, second = hand.ended(2, label="order 7", priority=3)
    jobs = hand.app.jobs.replay(task="send", since="1h")
    assert hand.app._events.flush(10)
    told = [event for event in heard if event.id in jobs.values()]
    assert [(e.id, e.task, e.queue, e.label, e.attempt, e.max_attempts) for e in told] == [
        (jobs[of], "send", "default", "order 7", 0, 3) for of in (first, second)
    ]


def test_a_replay_has_no_cursor_and_waits_under_a_limit(hand: Hand, engine: Engine) -> None:
    hand.app.schedules.add("nightly", hand.tasks["send"].new().set(start_within="1h"), cron="0 3 * * *")
    id = hand.app.schedules.run("nightly").id
    with engine.begin() as conn:
        options = {"schema_translate_map": {TOKEN_SCHEMA: None}}
        conn.execute(update(jobs).values(cursor="7", payload="{not json"), execution_options=options)
        conn.execute(text("UPDATE jobs SET progress = 3, progress_of = 4"))
    hand.end()
    job = hand.app.jobs.get(hand.app.jobs.replay(id)[id])
    assert (job.cursor, job.progress, job.start_by) == (None, None, None)
    assert job.payload == "{not json", "it is copied as it is"
    assert (job.schedule, job.scheduled_for) == ("nightly", hand.app.jobs.get(id).scheduled_for)
    app = hand.app
    charge = app.task(name="charge", limit=sqlq.Limit("stripe", running=1))(lambda: None)
    ids = [app.enqueue(charge.new()).id for _ in range(2)]
    drain(app)
    execute(engine, "DELETE FROM sqlq_wakes")
    done = [app.jobs.get(id) for id in app.jobs.replay(ids).values()]
    looked_at = committed(engine, "sqlq_wakes", "limit_key")
    assert set(map(str, looked_at)) == {"stripe"}, "a worker looks at the line at once, not at its next sweep"
    assert [(job.state, job.limit_key) for job in done] == [("blocked", "stripe")] * 2
    assert drain(app).finished == 2


def test_jobs_are_chosen_by_the_time_of_their_end_in_the_order_of_their_ids(
    hand: Hand, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, failed = hand.ended(2, Finished()), hand.ended(2)
    execute(engine, f"UPDATE finished_jobs SET finished_at = finished_at - {span(engine, 7_200)}")
    cancelled = hand.ended(1, Cancelled("no"))

    def chosen(**options: Any) -> list[int]:
        if replays := hand.app.jobs.replay(**options):
            hand.app.jobs.cancel([*replays.values()])
        return [*replays]

    assert chosen(task="send") == finished + failed, "cancelled ones are not meant unless they are named"
    assert chosen(since="1h") == failed
    assert chosen(until="1h") == finished
    assert chosen(since=datetime.now(UTC) - timedelta(hours=3), until="1h") == finished
    assert chosen(since="1h", until="2h") == []
    assert chosen(ids=cancelled) == cancelled
    monkeypatch.setattr(lookup, "BATCH", 3)
    ids = hand.ended(3, Finished(), "pack") + hand.ended(3, task="pack") + hand.ended(2, Finished(), "pack")
    jobs = hand.app.jobs.replay(task="pack")
    assert (list(jobs), list(jobs.values())) == (ids, sorted(jobs.values()))


def test_a_replay_of_ids_writes_nothing_when_interrupted(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
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


ERROR = ErrorText("ValueError", "no", "Traceback …")
EVERY_OUTCOME: list[Outcome] = [Finished("1"), Cancelled("no"), Retried(0, ERROR), BOOM, Released()]


def extend(hand: Hand, job: ClaimedJob) -> dict[tuple[int, int], bool]:
    rights = [(job.id, job.lease_token)]
    return hand.app.database.run(lambda conn: lease.extend(conn, rights, lease_ms=30_000))


def requested(hand: Hand) -> dict[int, Any]:
    with hand.app.database.read() as conn:
        rows = conn.execute(text("SELECT id, cancel_requested_at FROM jobs"))
        return {id: at for id, at in rows if at is not None}


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
    assert extend(hand, owner) == {(id, owner.lease_token): True}, "fenced by nothing, and told so"
    assert hand.settle(owner, Finished("1")) == {id}
    assert hand.states([id]) == ["finished"]
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
def test_a_running_handler_sees_the_cancel_and_its_job_ends_cancelled(app: sqlq.App, is_async: bool) -> None:
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
    ids = [hand.enqueue(queue=queue)[0] for queue in "abcde"]
    *four, elsewhere = ids
    claimed = {job.queue: job for job in hand.claim()}
    hand.settle(claimed["a"], Finished())
    hand.settle(claimed["b"], BOOM)
    for queue in "de":
        hand.settle(claimed[queue], Released())
    effects = dict(zip(four, ("ended", "ended", "requested", "cancelled"), strict=True))
    assert hand.app.jobs.cancel([*four, 4711]) == {**effects, 4711: "unknown"}
    assert hand.app.jobs.cancel([elsewhere], queue="d") == {elsewhere: "passed over"}
    assert hand.app.jobs.cancel([elsewhere], task="pack") == {elsewhere: "passed over"}
    assert hand.states(ids[3:]) == ["cancelled", "available"]


def test_operator_calls_refuse_a_database_without_tables(empty_database_url: str) -> None:
    with closing(sqlq.App(empty_database_url)) as app:
        verbs = (lambda: app.jobs.cancel([1]), lambda: app.queues.pause("q"), lambda: app.queues.resume("q"))
        for call in (*verbs, lambda: app.jobs.prune(failed="1d"), app.workers.list):
            with pytest.raises((SchemaVersionError, ConfigurationError), match="migrate"):
                call()


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
    """Each job ends exactly once, and as one of the callers was answered."""
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
        parts = [hand.app.jobs.cancel(part[i : i + 4], force=force) for i in range(0, len(part), 4)]
        return {id: word for answer in parts for id, word in answer.items()}

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
        conn.execute(update(jobs).values(priority=1))
        with received(conn) as got:
            operate.cancel(conn, list(reversed(ids)))
    cancel, _ = got[0]
    assert "ORDER BY" in cancel
    assert cancel.split("ORDER BY")[1].split()[0].endswith("jobs.id")
