"""Replay: which ended jobs become new ones, as what, and when; on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Engine, text, update

import sqlq
from sqlq.errors import ArgumentsError, ConfigurationError, JobNotFoundError
from sqlq.model.job import ClaimedJob
from sqlq.model.outcome import Cancelled, Completed, ErrorText, Failed, Outcome, Settlement
from sqlq.schema.tables import TOKEN_SCHEMA, jobs
from sqlq.store.jobs import claim as claiming
from sqlq.store.jobs import replay as replaying
from sqlq.store.jobs import settle
from sqlq.store.workers import look
from tests.kit import span
from tests.waiting import wait_until

BOOM = Failed("error", ErrorText("ValueError", "boom", "Traceback …"))


class Play:
    """An App with two tasks, and the worker's hand: claims and settles without running anything."""

    def __init__(self, app: sqlq.App) -> None:
        self.app = app
        self.tasks = {
            name: app.task(name=name, max_attempts=3)(lambda n=0, copy=False: None)
            for name in ("send", "pack")
        }

    def enqueue(self, count: int = 1, task: str = "send", **options: Any) -> list[int]:
        new = self.tasks[task].new
        return [job.id for job in self.app.enqueue_many([new(i).set(**options) for i in range(count)])]

    def claim(self) -> list[ClaimedJob]:
        with self.app.database.begin() as conn:
            queues = list(look.due_in(self.app.database))
            return claiming.claim(conn, queues, limit=10_000, owner="worker", lease_ms=30_000)

    def end(self, outcome: Outcome = BOOM) -> list[int]:
        """Claim what is due, and end it."""
        claimed = self.claim()
        with self.app.database.begin() as conn:
            settle.settle(conn, [Settlement(j.id, j.lease_token, j.attempts, outcome) for j in claimed])
        return sorted(job.id for job in claimed)

    def ended(self, count: int = 1, outcome: Outcome = BOOM, task: str = "send", **options: Any) -> list[int]:
        ids = self.enqueue(count, task, **options)
        assert self.end(outcome) == ids
        return ids

    def replays(self, jobs: dict[int, int]) -> list[sqlq.JobDetails]:
        return [self.app.jobs.get(id) for id in jobs.values()]

    def number(self) -> int:
        return len(self.app.jobs.list(limit=10_000))


@pytest.fixture
def play(app: sqlq.App) -> Play:
    return Play(app)


def moved(engine: Engine, ids: Sequence[int], table: str, seconds: int) -> None:
    """Let jobs have ended so long ago."""
    ended = {"finished_jobs": "finished_at", "failed_jobs": "failed_at"}[table]
    earlier = f"{ended} - {span(engine, seconds)}"
    with engine.begin() as conn:
        for id in ids:
            conn.execute(text(f"UPDATE {table} SET {ended} = {earlier} WHERE id = :id"), {"id": id})


# -- what a replay is ----------------------------------------------------------------------------------------


def test_a_replay_is_a_new_job_that_names_its_origin(play: Play, engine: Engine) -> None:
    (old,) = play.ended(
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
    done = play.app.jobs.replay(old)
    ((origin, new),) = done.jobs.items()
    assert (done.number, origin, done.already, done.steps) == (1, old, 0, 0)
    job = play.app.jobs.get(new)
    assert new > old
    assert (job.state, job.replay_of, job.attempts, job.lease_token) == ("available", old, 0, 0)
    assert (job.task, job.payload, job.queue, job.priority) == ("send", {"args": [0]}, "mail", 7)
    assert (job.timeout_ms, job.max_attempts, job.label) == (30_000, 2, "blue")
    assert job.headers == {"tenant": "blue"}
    assert (job.retention_ms, job.unique_key, job.on_failure) == (9 * 86_400_000, None, None)
    assert job.backoff == play.app.jobs.get(old).backoff
    assert (job.history, job.errors) == ((), [])
    before = play.app.jobs.get(old)
    assert (before.state, before.replayed_as, before.unique_key) == ("failed", new, "k")
    with engine.connect() as conn:
        found = conn.execute(text("SELECT id, replay_of FROM job_states WHERE replay_of IS NOT NULL")).all()
    assert [tuple(row) for row in found] == [(new, old)]
    assert play.end(Completed()) == [new]
    assert play.app.jobs.get(new).replay_of == old, "it keeps the name where it has ended"


def test_a_replay_emits_an_enqueued_event_and_a_log_line(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[sqlq.JobEvent] = []
    play.app.on("enqueued")(heard.extend)
    first, second = play.ended(2, label="order 7", priority=3)
    with caplog.at_level("DEBUG", "sqlq"):
        jobs = play.app.jobs.replay(task="send", since="1h", rate="1/m").jobs
    told = wait_until(lambda: [event for event in heard if event.id in jobs.values()][1:] and heard[-2:])
    assert [(e.id, e.task, e.queue, e.label, e.attempt, e.max_attempts) for e in told] == [
        (jobs[of], "send", "default", "order 7", 0, 3) for of in (first, second)
    ]
    assert [e.delay_seconds for e in told] == [None, 60]
    assert f"job {jobs[first]}: send in queue default, enqueued as a replay of job {first}" in caplog.messages


def test_a_replay_does_not_call_enqueue_middleware(play: Play) -> None:
    """Its headers stay those of the first enqueue. New ones would be about the operator who replays it."""
    who = ["web"]
    play.app.stamp(lambda job: {"who": who[0]})
    (id,) = play.ended()
    who[0] = "operator"
    (replay,) = play.replays(play.app.jobs.replay(id).jobs)
    assert replay.headers == {"who": "web"}
    assert play.claim()[0].id == replay.id


def test_a_retried_job_can_be_replayed_after_its_next_end(play: Play) -> None:
    (id,) = play.ended()
    play.app.jobs.replay(id)
    play.end(Completed())
    play.app.jobs.retry([id])
    play.end()
    assert play.app.jobs.get(id).replayed_as is None, "it is another ending"
    assert list(play.app.jobs.replay(id).jobs) == [id]


def test_a_replay_has_no_cursor_and_no_progress(play: Play, engine: Engine) -> None:
    (id,) = play.enqueue(expires="1h")
    with engine.begin() as conn:
        options = {"schema_translate_map": {TOKEN_SCHEMA: None}}
        conn.execute(update(jobs).values(cursor="7"), execution_options=options)
        conn.execute(text("UPDATE jobs SET progress = 3, progress_of = 4"))
    play.end()
    job = play.replays(play.app.jobs.replay(id).jobs)[0]
    assert (job.cursor, job.progress, job.start_by) == (None, None, None)


def test_a_replay_keeps_the_schedule_and_its_time(play: Play) -> None:
    app = play.app
    app.schedules.add("nightly", play.tasks["send"].new(), cron="0 3 * * *")
    (job,) = app.schedules.backfill(
        "nightly", datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 2, tzinfo=UTC)
    )
    play.end(Completed())
    (again,) = play.replays(app.jobs.replay(job.id).jobs)
    assert (again.schedule, again.scheduled_for) == ("nightly", datetime(2026, 3, 1, 3, tzinfo=UTC))


def test_a_replay_under_a_limit_waits_for_its_turn(play: Play, engine: Engine) -> None:
    @play.app.task(name="charge", limit=sqlq.Limit("stripe", running=1))
    def charge() -> None: ...

    app = play.app
    first, second = (app.enqueue(charge.new()) for _ in range(2))
    app.worker(drain=True).run()
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM sqlq_wakes"))
    done = app.jobs.replay([first.id, second.id])
    with engine.begin() as conn:
        looked_at = set(conn.execute(text("SELECT limit_key FROM sqlq_wakes")).scalars())
    assert looked_at == {"stripe"}, "a worker looks at the line at once, not at its next sweep"
    assert [job.state for job in play.replays(done.jobs)] == ["blocked", "blocked"]
    assert [job.limit_key for job in play.replays(done.jobs)] == ["stripe", "stripe"]
    assert app.worker(drain=True).run().completed == 2


# -- which jobs ----------------------------------------------------------------------------------------------


def test_jobs_are_chosen_by_task_queue_state_and_time(play: Play, engine: Engine) -> None:
    finished = play.ended(2, Completed())
    failed = play.ended(2)
    cancelled = play.ended(1, Cancelled("no"))
    packed = play.ended(1, Completed(), "pack", queue="mail")
    moved(engine, finished, "finished_jobs", 7200)

    def chosen(**options: Any) -> list[int]:
        done = play.app.jobs.replay(dry_run=True, **options)
        assert [job.id for job in done.first] == [job.id for job in done.first][: done.number]
        assert done.jobs == {}
        return [job.id for job in done.first]

    assert chosen(task="send") == finished + failed, "cancelled ones are not meant unless they are named"
    assert chosen(task="send", state="failed") == failed
    assert chosen(task="send", state="finished") == finished
    assert chosen(task="send", state="cancelled") == cancelled
    assert chosen(queue="mail") == packed
    assert chosen(queue="mail", task="send") == []
    assert chosen(since="1h") == failed + packed
    assert chosen(until="1h") == finished
    assert chosen(since=datetime.now(UTC) - timedelta(hours=3), until="1h") == finished
    assert chosen(ids=cancelled) == cancelled
    assert play.number() == 6, "a dry run writes nothing"
    assert sorted(play.app.jobs.replay(task="send").jobs) == finished + failed


def test_a_replay_leaves_out_replayed_jobs_unless_again_is_set(play: Play) -> None:
    old = play.ended(3, Completed())
    first = play.app.jobs.replay(task="send")
    assert sorted(first.jobs) == old
    play.end(Completed())
    second = play.app.jobs.replay(task="send")
    assert (second.number, second.jobs, second.already) == (0, {}, 6), "the replays, too, have ended"
    more = play.ended(1, Completed())
    assert sorted(play.app.jobs.replay(task="send").jobs) == more
    play.end(Completed())
    new = first.jobs[old[0]]
    assert play.app.jobs.replay(new).jobs.keys() == {new}, "by its id a replay is a job like others"
    assert play.app.jobs.replay(task="send", again=True).number == 8


def test_a_replay_of_several_ids_leaves_out_replayed_jobs(play: Play) -> None:
    ids = play.ended(3)
    play.app.jobs.replay(ids[0])
    done = play.app.jobs.replay(ids)
    assert (sorted(done.jobs), done.already) == (ids[1:], 1)
    with pytest.raises(
        ConfigurationError, match=rf"job {ids[0]} has been replayed .* and so have the 2 others"
    ):
        play.app.jobs.replay(ids)
    assert sorted(play.app.jobs.replay(ids, again=True).jobs) == ids


def test_an_interrupted_replay_continues_where_it_ended(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "BATCH", 2)
    old = play.ended(5, Completed())
    seen: list[tuple[int, int]] = []

    def stop(done: int, of: int) -> None:
        seen.append((done, of))
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play.app.jobs.replay(task="send", progress=stop)
    assert seen == [(2, 5), (4, 5)]
    rest = play.app.jobs.replay(task="send")
    assert (list(rest.jobs), rest.already) == (old[4:], 4)
    replays = [job for job in play.app.jobs.list() if job.replay_of is not None]
    assert sorted(job.replay_of or 0 for job in replays) == old, "each job was replayed once"


def test_a_replay_leaves_out_its_own_jobs_that_end_meanwhile(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "BATCH", 2)
    old = play.ended(4, Completed())
    done = play.app.jobs.replay(task="send", again=True, progress=lambda done, of: play.end(Completed()))
    assert list(done.jobs) == old
    assert play.number() == 8


def test_new_ids_follow_the_order_of_the_old_ones(play: Play) -> None:
    finished, failed = play.ended(3, Completed()), play.ended(3)
    more = play.ended(2, Completed())
    jobs = play.app.jobs.replay(task="send").jobs
    assert list(jobs) == finished + failed + more
    assert list(jobs.values()) == sorted(jobs.values())


# -- when ----------------------------------------------------------------------------------------------------


def test_a_replay_with_a_rate_makes_jobs_due_one_after_the_other(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "BATCH", 3)
    play.ended(4, Completed())
    play.ended(3)
    due = [job.available_at for job in play.replays(play.app.jobs.replay(task="send", rate="1/10m").jobs)]
    assert None not in due
    gaps = [(b - a).total_seconds() for a, b in pairwise(due)]  # type: ignore[operator]
    assert all(595 < gap < 605 for gap in gaps), gaps
    assert play.claim()[0].id == play.app.jobs.list(state="running")[0].id
    assert len(play.app.jobs.list(state="scheduled")) == 6


def test_a_replay_with_a_rate_waits_in_its_limit_until_due(play: Play) -> None:
    @play.app.task(name="charge", limit=sqlq.Limit("stripe", running=5))
    def charge() -> None: ...

    app = play.app
    app.enqueue_many([charge.new() for _ in range(3)])
    app.worker(drain=True).run()
    replays = play.replays(app.jobs.replay(task="charge", rate="1/1h").jobs)
    assert [job.state for job in replays] == ["blocked"] * 3
    due = [job.due_at for job in replays]
    assert 3590 < (due[1] - due[0]).total_seconds() < 3610  # type: ignore[operator]
    assert app.worker(drain=True).run().completed == 1


# -- other arguments -----------------------------------------------------------------------------------------


def test_a_replay_of_one_job_takes_other_arguments(play: Play) -> None:
    (id,) = play.ended()
    (job,) = play.replays(play.app.jobs.replay(id, args=[7]).jobs)
    assert job.payload == {"args": [7]}
    (job,) = play.replays(play.app.jobs.replay(id, kwargs={"copy": True}, again=True).jobs)
    assert job.payload == {"args": [0], "kwargs": {"copy": True}}, "what is not given stays as it was"
    assert play.app.jobs.get(id).payload == {"args": [0]}


def test_changed_arguments_are_checked_by_the_task(play: Play) -> None:
    (id,) = play.ended()
    before = play.number()
    with pytest.raises(ArgumentsError, match="too many positional arguments"):
        play.app.jobs.replay(id, args=[1, 2, 3])
    with pytest.raises(ArgumentsError, match="colour"):
        play.app.jobs.replay(id, kwargs={"colour": "red"})
    with pytest.raises(ConfigurationError, match="args is 'ab': give a list"):
        play.app.jobs.replay(id, args="ab")
    with pytest.raises(ConfigurationError, match="for one job only"):
        play.app.jobs.replay(task="send", args=[1])
    assert play.number() == before
    assert play.app.jobs.get(id).replayed_as is None


def test_changed_arguments_of_a_task_that_is_not_known_here_are_json(play: Play) -> None:
    app = play.app
    job = app.enqueue(app.named("shop.elsewhere").new(1, b=2))
    play.end()
    when = datetime(2026, 1, 1, tzinfo=UTC)
    (new,) = play.replays(app.jobs.replay(job.id, kwargs={"b": when}).jobs)
    assert new.payload == {"args": [1], "kwargs": {"b": "2026-01-01T00:00:00Z"}}


def test_changed_arguments_make_another_key_of_a_limit(play: Play) -> None:
    @play.app.task(name="charge", limit=sqlq.Limit("customer:{customer}", running=1))
    def charge(customer: int) -> None: ...

    job = play.app.enqueue(charge.new(1))
    play.app.worker(drain=True).run()
    (new,) = play.replays(play.app.jobs.replay(job.id, args=[2]).jobs)
    assert (new.limit_key, new.payload) == ("customer:2", {"args": [2]})
    assert play.app.worker(drain=True).run().completed == 1


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_bad_replay_is_refused_in_one_sentence_and_writes_nothing(play: Play) -> None:
    app = play.app
    ended, _ = play.ended(2)
    (live,) = play.enqueue()
    before = play.number()

    def refused(kind: type[Exception], words: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            app.jobs.replay(*args, **options)
        assert "\n" not in str(caught.value)

    refused(JobNotFoundError, "there is no job 4711 to replay", [ended, 4711])
    refused(ConfigurationError, f"job {live} has not ended", [ended, live])
    refused(ConfigurationError, "name the jobs to replay")
    refused(
        ConfigurationError, "state is 'running': it is finished, failed or cancelled", ended, state="running"
    )
    refused(ConfigurationError, "since is '2 hours'", since="2 hours")
    refused(ConfigurationError, "no time zone", since=datetime(2026, 1, 1))  # noqa: DTZ001
    refused(ConfigurationError, "is not after since", since="1h", until="2h")
    refused(ConfigurationError, "rate is 'fast'", ended, rate="fast")
    refused(ConfigurationError, "in more than a hundred years", task="send", rate="1/36000d")
    refused(ConfigurationError, "not the id of a job", [True])
    refused(ConfigurationError, "ids is '42'", "42")
    refused(ConfigurationError, rf"job {ended} \(send, failed\) is not of the task", ended, task="pack")
    assert play.number() == before


def test_a_replay_refuses_a_pruned_job(play: Play) -> None:
    failed, kept = play.ended(2)
    play.app.jobs.delete([failed])
    with pytest.raises(JobNotFoundError, match=r"ended longer ago than ended jobs are kept$"):
        play.app.jobs.replay([failed, kept])
    assert play.app.jobs.replay(task="send", since="1h").jobs.keys() == {kept}


def test_steps_of_flows_are_refused_by_id_and_left_out_otherwise(play: Play) -> None:
    app = play.app
    app.enqueue(sqlq.chain(play.tasks["pack"].new(), play.tasks["pack"].new()))
    (step,) = play.end(Completed())
    with pytest.raises(
        ConfigurationError, match=rf"job {step} is a step of flow \d+, and cannot be replayed"
    ):
        app.jobs.replay(step)
    done = app.jobs.replay(task="pack")
    assert (done.number, done.jobs, done.steps) == (0, {}, 1)


def test_replay_refuses_ids_out_of_range(play: Play) -> None:
    play.ended()
    for id in (0, -1, 2**63, 2**70):
        with pytest.raises(JobNotFoundError, match="there is no job"):
            play.app.jobs.replay(id)


def test_areplay_is_replay_in_a_thread(play: Play) -> None:
    (id,) = play.ended()
    assert list(asyncio.run(play.app.jobs.areplay(id, kwargs={"copy": True})).jobs) == [id]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_concurrent_replays_copy_each_job_once(play: Play, engine: Engine) -> None:
    ids = play.ended(3, Completed())
    with engine.connect() as conn, conn.begin():
        conn.execute(text("SELECT id FROM finished_jobs WHERE id = :id FOR UPDATE"), {"id": ids[0]})
        done = play.app.jobs.replay(task="send")
        assert (list(done.jobs), done.number) == (ids[1:], 2), "what another has locked is passed over"
    assert list(play.app.jobs.replay(task="send").jobs) == ids[:1]


def test_an_unreadable_payload_is_copied_as_it_is(play: Play, engine: Engine) -> None:
    (id,) = play.enqueue()
    with engine.begin() as conn:
        conn.execute(text("UPDATE jobs SET payload = '{not json'"))
    play.end()
    (job,) = play.replays(play.app.jobs.replay(id).jobs)
    assert job.payload == "{not json"
