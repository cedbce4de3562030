"""Replay: which ended jobs become new ones, as what, and when; on every database."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, text, update

import sqlq
from sqlq.admin.batches import watched
from sqlq.model.outcome import Cancelled, Finished
from sqlq.schema.tables import TOKEN_SCHEMA, jobs
from sqlq.store.jobs import lookup
from tests.kit import Hand, execute, span, wait_until

pytestmark = pytest.mark.each_database


def replays(hand: Hand, jobs: dict[int, int]) -> list[sqlq.JobDetails]:
    return [hand.app.jobs.get(id) for id in jobs.values()]


def moved(engine: Engine, ids: Sequence[int], table: str, seconds: int) -> None:
    """Let jobs have ended so long ago."""
    ended = {"finished_jobs": "finished_at", "failed_jobs": "failed_at"}[table]
    earlier = f"{ended} - {span(engine, seconds)}"
    with engine.begin() as conn:
        for id in ids:
            conn.execute(text(f"UPDATE {table} SET {ended} = {earlier} WHERE id = :id"), {"id": id})


def number(hand: Hand) -> int:
    return len(hand.app.jobs.list(limit=10_000))


# -- what a replay is ----------------------------------------------------------------------------------------


def test_a_replay_is_a_new_job_that_names_its_origin(hand: Hand, engine: Engine) -> None:
    (old,) = hand.ended(
        queue="mail",
        priority=7,
        timeout="30s",
        max_attempts=2,
        label="blue",
        headers={"tenant": "blue"},
        backoff="5m",
        retention="9d",
        unique_key="k",
        on_failure=None,
    )
    ((origin, new),) = hand.app.jobs.replay(old).items()
    assert origin == old
    job = hand.app.jobs.get(new)
    assert new > old
    assert (job.state, job.replay_of, job.attempts, job.lease_token) == ("available", old, 0, 0)
    assert (job.task, job.payload, job.queue, job.priority) == ("send", {"args": [0]}, "mail", 7)
    assert (job.timeout_ms, job.max_attempts, job.label) == (30_000, 2, "blue")
    assert job.headers == {"tenant": "blue"}
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


def test_a_replay_emits_an_enqueued_event(hand: Hand) -> None:
    heard: list[sqlq.JobEvent] = []
    hand.app.on("enqueued")(heard.extend)
    first, second = hand.ended(2, label="order 7", priority=3)
    jobs = hand.app.jobs.replay(task="send", since="1h")
    told = wait_until(lambda: [event for event in heard if event.id in jobs.values()][1:] and heard[-2:])
    assert [(e.id, e.task, e.queue, e.label, e.attempt, e.max_attempts) for e in told] == [
        (jobs[of], "send", "default", "order 7", 0, 3) for of in (first, second)
    ]


def test_a_replay_does_not_call_enqueue_middleware(hand: Hand) -> None:
    """Its headers stay those of the first enqueue. New ones would be about the operator who replays it."""
    who = ["web"]
    hand.app.before_enqueue(lambda job: {"who": who[0]})
    (id,) = hand.ended()
    who[0] = "operator"
    (replay,) = replays(hand, hand.app.jobs.replay(id))
    assert replay.headers == {"who": "web"}
    assert hand.claim()[0].id == replay.id


def test_a_job_is_copied_by_each_replay(hand: Hand) -> None:
    (id,) = hand.ended()
    first, second = (hand.app.jobs.replay(id)[id] for _ in range(2))
    assert first < second
    hand.end(Finished())
    assert hand.app.jobs.replay(first).keys() == {first}, "a replay is a job like others"


def test_a_replay_has_no_cursor_and_no_progress(hand: Hand, engine: Engine) -> None:
    (id,) = hand.enqueue(start_within="1h")
    with engine.begin() as conn:
        options = {"schema_translate_map": {TOKEN_SCHEMA: None}}
        conn.execute(update(jobs).values(cursor="7"), execution_options=options)
        conn.execute(text("UPDATE jobs SET progress = 3, progress_of = 4"))
    hand.end()
    job = replays(hand, hand.app.jobs.replay(id))[0]
    assert (job.cursor, job.progress, job.start_by) == (None, None, None)


def test_a_replay_keeps_the_schedule_and_its_time(hand: Hand) -> None:
    app = hand.app
    app.schedules.add("nightly", hand.tasks["send"].new(), cron="0 3 * * *")
    job = app.jobs.get(app.schedules.run("nightly").id)
    hand.end(Finished())
    (again,) = replays(hand, app.jobs.replay(job.id))
    assert (again.schedule, again.scheduled_for) == ("nightly", job.scheduled_for)


def test_a_replay_under_a_limit_waits_for_its_turn(hand: Hand, engine: Engine) -> None:
    @hand.app.task(name="charge", limit=sqlq.Limit("stripe", running=1))
    def charge() -> None: ...

    app = hand.app
    first, second = (app.enqueue(charge.new()) for _ in range(2))
    app.worker(drain=True).run()
    execute(engine, "DELETE FROM sqlq_wakes")
    done = app.jobs.replay([first.id, second.id])
    with engine.begin() as conn:
        looked_at = set(conn.execute(text("SELECT limit_key FROM sqlq_wakes")).scalars())
    assert looked_at == {"stripe"}, "a worker looks at the line at once, not at its next sweep"
    assert [job.state for job in replays(hand, done)] == ["blocked", "blocked"]
    assert [job.limit_key for job in replays(hand, done)] == ["stripe", "stripe"]
    assert app.worker(drain=True).run().finished == 2


# -- which jobs ----------------------------------------------------------------------------------------------


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
    assert (len(batches), number(hand)) == (2, 5)


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


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_replay_leaves_out_ids_that_have_not_ended_or_do_not_fit(hand: Hand) -> None:
    failed, pruned = hand.ended(2)
    (live,) = hand.enqueue()
    hand.app.jobs.delete([pruned])
    ids = [failed, pruned, live, 0, -1, 2**63, 2**70]
    assert hand.app.jobs.replay(ids).keys() == {failed}
    assert hand.app.jobs.replay(ids, task="pack") == {}


def test_a_replay_leaves_out_steps_of_flows(hand: Hand) -> None:
    app = hand.app
    app.enqueue(sqlq.chain(hand.tasks["pack"].new(), hand.tasks["pack"].new()))
    (step,) = hand.end(Finished())
    assert app.jobs.replay(step) == app.jobs.replay(task="pack") == {}


def test_an_unreadable_payload_is_copied_as_it_is(hand: Hand, engine: Engine) -> None:
    (id,) = hand.enqueue()
    execute(engine, "UPDATE jobs SET payload = '{not json'")
    hand.end()
    (job,) = replays(hand, hand.app.jobs.replay(id))
    assert job.payload == "{not json"
