"""Pausing, pruning by age, which workers there are, the record of operators, and how much a look reads."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import BigInteger, Connection, Engine, literal, text, update
from sqlalchemy.orm import Session

import sqlq
from sqlq.admin import failures
from sqlq.admin.batches import watched
from sqlq.cli.commands.status import show_queues
from sqlq.cli.context import Context
from sqlq.database.values import LARGEST_WINDOW
from sqlq.errors import ConfigurationError
from sqlq.model.job import State
from sqlq.model.outcome import Cancelled, ErrorText, Failed, Finished
from sqlq.schema.tables import failed_jobs, finished_jobs, workers
from sqlq.schema.types import after
from sqlq.store import health
from sqlq.store.audit import Action
from sqlq.store.jobs import failed as failed_rows
from sqlq.store.jobs import lease, lookup, operate
from sqlq.store.limits import admit
from sqlq.store.workers import look
from sqlq.store.workers import workers as workerss
from sqlq.store.workers.look import KEPT_SECONDS, KnownQueues, due_in
from tests.kit.abilities import for_each, needs
from tests.kit.hand import BOOM, Hand, claim_on, failed
from tests.kit.notifications import Listener
from tests.kit.plans import explained, pages, walk
from tests.kit.sql import NOW, execute, insert_many, locked, received, rows_read, span
from tests.kit.waiting import wait_until
from tests.kit.workers import drain, working

pytestmark = pytest.mark.each_database


def ago(seconds: int) -> Any:
    return after(literal(-seconds * 1000, BigInteger))


def age(hand: Hand, ids: Sequence[int], seconds: Sequence[int]) -> None:
    """Let finished jobs have ended so long ago."""
    with hand.app.database.begin() as conn:
        for id, past in zip(ids, seconds, strict=True):
            conn.execute(update(finished_jobs).where(finished_jobs.c.id == id).values(finished_at=ago(past)))


def register(hand: Hand, id: str, names: Sequence[str] | None, silent: int = 0) -> None:
    with hand.app.database.begin() as conn:
        workerss.register(conn, id=id, host="here", pid=7, version="0", queues=names, concurrency=2)
    silence(hand, id, silent)


def silence(hand: Hand, id: str, seconds: int) -> None:
    """Let a worker have been seen so long ago."""
    seen = update(workers).where(workers.c.id == id).values(seen_at=ago(seconds))
    hand.app.database.run(lambda conn: conn.execute(seen))


def test_a_claim_skips_paused_queues(hand: Hand) -> None:
    mail, other = hand.enqueue(queue="mail"), hand.enqueue(queue="other")
    assert hand.app.queues.pause("mail")
    assert not hand.app.queues.pause("mail")
    more = hand.enqueue(queue="mail")
    assert list(due_in(hand.app.database, KnownQueues())) == ["other"]
    assert drain(hand.app, queues=["mail"]).finished == 0, "a drain ends"
    assert [job.id for job in hand.claim("mail", "other")] == other
    assert hand.claim("mail") == [], "not even by name"
    assert [hand.app.jobs.get(id).state for id in mail + more] == ["available", "available"]
    assert hand.app.queues.resume("mail")
    assert not hand.app.queues.resume("mail")
    owner, other_owner = hand.claim("mail")
    assert [owner.id, other_owner.id] == mail + more
    assert hand.app.queues.pause("mail"), "the row of a resumed queue is used again"
    assert hand.claim("mail") == []
    with hand.app.database.begin() as conn:
        assert lease.extend(conn, [(owner.id, owner.lease_token)], lease_ms=1)
    assert hand.settle(owner, Finished()) == {owner.id}
    assert hand.states([owner.id]) == ["finished"], "what runs is settled meanwhile"


@pytest.mark.parametrize("named", [["mail", "other"], None], ids=str)
def test_a_running_worker_observes_a_pause_and_a_resume(app: sqlq.App, named: list[str] | None) -> None:
    ran: list[int] = []
    task = app.task(name="t")(ran.append)
    with working(app, queues=named):
        app.queues.pause("mail")
        for number in (1, 2, 3):
            app.enqueue_many([task.new(number).set(queue="mail"), task.new(-number).set(queue="other")])
            wait_until(lambda: len(ran) == number, what="the job of the other queue")  # noqa: B023
        assert ran == [-1, -2, -3]
        app.queues.resume("mail")
        wait_until(lambda: sorted(ran) == [-3, -2, -1, 1, 2, 3], what="the jobs that waited")


@needs("listen")
def test_idle_workers_are_woken_by_a_resume(hand: Hand) -> None:
    hand.app.queues.pause("mail")
    with closing(Listener(hand.app)) as listener:
        hand.app.queues.resume("mail")
        assert listener.hears_one()


@needs("sessions")
def test_prunes_wait_for_no_lock(hand: Hand, engine: Engine) -> None:
    _, middle, _ = hand.ended(3)
    with locked(engine, f"SELECT id FROM failed_jobs WHERE id = {middle} FOR UPDATE"):
        assert hand.app.jobs.prune(failed="0s") == (0, 2)
    assert hand.app.jobs.prune(failed="0s") == (0, 1)
    age(hand, hand.ended(4, Finished()), [90, 80, 70, 60])
    with hand.app.database.begin() as one:
        assert operate.prune(one, older_than_ms=1_000, limit=2) == 2
        with hand.app.database.begin() as two:
            two.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert operate.prune(two, older_than_ms=1_000, limit=10) == 2
    assert hand.app.jobs.list() == []


def test_finished_jobs_are_pruned_by_age_the_oldest_first_and_at_most_so_many(hand: Hand) -> None:
    ids, failed = hand.ended(5, Finished()), hand.ended()
    age(hand, ids, [70, 10, 90, 80, 50])

    def prune(limit: int) -> tuple[int, list[int]]:
        with hand.app.database.begin() as conn:
            number = operate.prune(conn, older_than_ms=60_000, limit=limit)
        return number, sorted(job.id for job in hand.app.jobs.list(state="finished"))

    assert prune(2) == (2, [ids[0], ids[1], ids[4]])
    assert prune(2) == (1, [ids[1], ids[4]])
    assert prune(2) == (0, [ids[1], ids[4]])
    assert hand.states(failed) == ["failed"]
    assert hand.app.jobs.prune(failed=timedelta(minutes=1), finished="1d") == (0, 0)
    assert hand.app.jobs.prune(failed="0s", finished="0s") == (2, 1)


def test_a_jobs_own_retention_comes_before_the_age(hand: Hand) -> None:
    """A prune by age leaves alone a row that names its `retention_ms`."""
    database, over, kept = hand.app.database, set[int](), set[int]()
    for outcome, table, ended in ((Finished(), finished_jobs, "finished"), (BOOM, failed_jobs, "failed")):
        hand.ended(1, outcome)
        over.update(hand.ended(1, outcome, retention="1m"))
        kept.update(hand.ended(1, outcome, retention="1d"))
        with database.begin() as conn:
            conn.execute(update(table).values({f"{ended}_at": ago(3_600)}))

    def left() -> set[int]:
        return {job.id for job in hand.app.jobs.list()}

    assert hand.app.jobs.prune(finished="1m", failed="1m") == (1, 1)
    assert left() == over | kept
    with database.begin() as conn:
        assert operate.prune_expired(conn, limit=1) == 1, "no more than asked for"
        assert operate.prune_expired(conn, limit=10) == 1
    assert left() == kept


def test_the_status_counts_jobs_and_shows_whether_a_queue_is_served(hand: Hand) -> None:
    hand.ended(2, queue="b")
    hand.enqueue(1, queue="a")
    hand.claim()
    hand.enqueue(3, queue="a")
    for number, queue in ((2, "a"), (1, "c")):
        hand.enqueue(number, queue=queue, delay="1h")
    hand.app.queues.pause("c")
    register(hand, "w1", ["a", "empty"])
    found = {status.queue: status for status in hand.app.queues.list()}
    assert list(found) == ["a", "b", "c", "empty"]
    a, b, c = (found[name] for name in "abc")
    assert (a.available, a.scheduled, a.running, a.failed, a.paused, a.served) == (3, 2, 1, 0, False, True)
    assert a.oldest_wait_seconds is not None
    assert 0 <= a.oldest_wait_seconds < 60
    assert (b.available, b.scheduled, b.running, b.failed) == (0, 0, 0, 2)
    assert (b.oldest_wait_seconds, b.served) == (None, False)
    assert (c.paused, c.scheduled, c.oldest_wait_seconds) == (True, 1, None)
    assert found["empty"].served
    register(hand, "w2", None)
    assert all(status.served for status in hand.app.queues.list()), "w2 serves every queue"
    for id in ("w1", "w2"):
        silence(hand, id, 120)
    assert [(s.queue, s.served) for s in hand.app.queues.list()] == [(name, False) for name in "abc"]
    assert hand.app.workers.list() == []


def test_the_queues_to_serve_are_those_that_hold_something_to_claim(hand: Hand) -> None:
    assert due_in(hand.app.database, KnownQueues()) == {}
    for name in ("b", "ä", "A", "a b"):
        hand.enqueue(2, queue=name)
    hand.enqueue(1, queue="later", delay="1d")
    hand.claim("b")
    assert sorted(due_in(hand.app.database, KnownQueues())) == sorted(["ä", "A", "a b", "later"])


def test_workers_are_listed_with_their_jobs_until_they_leave_or_are_silent(hand: Hand) -> None:
    register(hand, "w1", ["a", "b"])
    register(hand, "w2", None, silent=60)
    register(hand, "w3", None, silent=600)
    a, b, c = *hand.enqueue(2, queue="a"), *hand.enqueue(queue="c")
    hand.claim("a", owner="w1")
    hand.claim("c", owner="w3")
    one, two = hand.app.workers.list()
    assert (one.id, one.host, one.pid, one.version, one.concurrency) == ("w1", "here", 7, "0", 2)
    assert (one.queues, one.alive) == (("a", "b"), True)
    assert [(job.id, job.task, job.queue) for job in one.jobs] == [(a, "send", "a"), (b, "send", "a")]
    assert one.jobs[0].since.tzinfo is not None
    assert 0 <= one.silent_seconds < 60
    assert (two.id, two.queues, two.jobs) == ("w2", None, [])
    assert 60 <= two.silent_seconds < 120
    (silent,) = (worker for worker in hand.app.workers.list(silent=True) if worker.id == "w3")
    assert (silent.alive, [job.id for job in silent.jobs]) == (False, [c])

    def alive() -> set[str]:
        return {worker.id for worker in hand.app.workers.list()}

    assert hand.app.database.run(lambda conn: workerss.seen(conn, "w3"))
    assert alive() == {"w1", "w2", "w3"}
    with hand.app.database.begin() as conn:
        workerss.leave(conn, "w1")
        workerss.sweep(conn, silent_ms=50_000)
    assert alive() == {"w3"}
    assert not hand.app.database.run(lambda conn: workerss.seen(conn, "w2")), "it is told so"


def enqueue_in(app: sqlq.App, names: list[str]) -> None:
    task = app.task(name="of_no_worker")(lambda: None)
    app.enqueue_many([task.new().set(queue=name) for name in names])


def test_looks_read_all_queues_in_turn_when_there_are_more_than_a_window(app: sqlq.App) -> None:
    names = [f"q{i:05}" for i in range(2 * LARGEST_WINDOW + 5)]
    enqueue_in(app, [*names, "zoë"])
    app.queues.pause(names[LARGEST_WINDOW - 1])
    queues, found, sizes = KnownQueues(), set[str](), list[int]()
    for _ in range(3):
        due = due_in(app.database, queues)
        found |= due.keys()
        sizes.append(len(due))
    assert found == {*names, "zoë"} - {names[LARGEST_WINDOW - 1]}
    assert queues.after == "", "the next look begins with the first queue"
    assert max(sizes) <= 2 * LARGEST_WINDOW
    assert len(queues.names) == LARGEST_WINDOW


def test_a_worker_runs_jobs_of_its_tasks_when_strangers_fill_the_window(app: sqlq.App) -> None:
    """The queue of its task comes after those of the window."""
    task = app.task(name="own", queue="own")(lambda: None)
    with app.database.begin() as conn:
        far = f"{NOW[conn.dialect.name]} + {span(conn, 86_400)}"
        values = f"10000 + i, 'no', '{{}}', {far}"
        insert_many(conn, 2 * LARGEST_WINDOW, "jobs (queue, task, payload, available_at)", values)
    app.enqueue(task.new())
    assert drain(app).finished == 1


def test_known_queues_keep_those_with_the_latest_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*names: str) -> list[tuple[str, float, int | None]]:
        return [(name, 0.0, i) for i, name in enumerate(names, 1)]

    now = [1_000.0]
    monkeypatch.setattr(look, "LARGEST_WINDOW", 3)
    monkeypatch.setattr("sqlq.store.workers.look.time.monotonic", lambda: now[0])
    queues = KnownQueues(own=["own"])
    queues.note(rows("a", "b", "c"), claimed=["served"])
    assert queues.with_jobs[0] == "served"
    assert (len(queues.with_jobs), queues.after) == (3, "c")
    now[0] += KEPT_SECONDS / 2
    queues.note(rows("d", "e", "f"), claimed=["later"])
    assert queues.names[:3] == ["own", "later", "served"]
    now[0] += KEPT_SECONDS / 2 + 1
    queues.note(rows("g"))
    assert queues.names == ["own", "later", "g"]
    assert queues.with_jobs == ["later", "g"]
    assert queues.after == "", "there are no more queues after this window"
    named = KnownQueues(["mail"])
    named.note([("mail", 0.0, None)], claimed=["mail"])
    assert (named.names, named.after) == (["mail"], None), "it has no window"


def test_status_counts_the_queues_that_it_does_not_show(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("sqlq.store.health", "sqlq.admin.queues"):
        monkeypatch.setattr(f"{module}.QUEUE_LIMIT", 3)
    enqueue_in(app, [f"q{i}" for i in range(6)])
    app.queues.pause("q5")
    for exact in (False, True):
        shown = app.queues.list(exact=exact)
        assert [each.queue for each in shown] == ["q0", "q1", "q5"], "a paused queue is shown first"
        assert shown.others == 3
        show_queues(Context(), shown)
        assert "and 3 other queues" in capsys.readouterr().out


def said(app: sqlq.App) -> list[tuple[str, str, str, int | None]]:
    return [(row.actor, row.action, row.target, row.number) for row in reversed(app.audit.list())]


def test_each_action_of_an_actor_leaves_one_row(app: sqlq.App) -> None:
    app.queues.pause("mail")
    app.jobs.cancel(task="send")
    assert app.audit.list() == [], "nobody acts"
    send = app.task(name="send", limit=sqlq.Limit("stripe", running=2))(lambda n=0: None)
    plain = app.task(name="plain", queue="mail")(lambda: None)
    ids = [job.id for job in app.enqueue_many([send.new(1), send.new(2), plain.new()])]
    flow = app.enqueue(sqlq.chain(plain.new(), plain.new()))
    with app.acting_as("ada"):
        app.jobs.reschedule(task="plain", queue="mail", delay="1h")
        app.jobs.cancel([ids[0], 4711], force=True)
        app.jobs.cancel(range(1_001, 1_031))
        app.jobs.retry(task="mail send")
        app.jobs.prune(finished="7d", failed="30d")
        app.queues.pause("mail", "pdf", duration="10m")
        app.queues.resume(all=True)
        app.limits.set("stripe", running=1)
        app.schedules.add("nightly", plain.new(), cron="0 3 * * *")
        app.workers.stop(all=True)
        app.flows.skip(flow.jobs[0].id)
        app.flows.cancel(flow.id)
    assert said(app) == [
        ("ada", "reschedule", "reschedule --delay 1h --task plain --queue mail", 3),
        ("ada", "cancel", f"cancel {ids[0]} 4711 --force", 1),
        ("ada", "cancel", f"cancel {' '.join(map(str, range(1_001, 1_021)))} (and 10 more)", 0),
        ("ada", "retry", "retry --task 'mail send'", 0),
        ("ada", "prune", "prune --finished 7d --failed 30d", 0),
        ("ada", "queues pause", "queues pause mail pdf --duration 10m", 1),
        ("ada", "queues resume", "queues resume --all", 0),
        ("ada", "limits set", "limits set stripe --running 1", 1),
        ("ada", "schedules add", "schedules add nightly --cron '0 3 * * *'", 1),
        ("ada", "workers stop", "workers stop --all", 0),
        ("ada", "flows skip", f"flows skip {flow.jobs[0].id}", 1),
        ("ada", "cancel", f"cancel --flow {flow.id}", 1),
    ]


def test_an_interrupted_action_has_no_number(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        assert app.audit.list()[0].number is None, "its row is there before it"
        raise KeyboardInterrupt

    monkeypatch.setattr(operate, "prune", killed)
    with pytest.raises(KeyboardInterrupt), app.acting_as("ada"):
        app.jobs.prune(finished="7d")
    assert said(app) == [("ada", "prune", "prune --finished 7d", None)]


def test_a_stopped_action_ends_after_its_batch(app: sqlq.App) -> None:
    app.enqueue_many([app.task(name="t")(lambda: None).new()] * 1_200)
    with app.acting_as("ada"), watched(lambda changed: app.audit.stop(app.audit.list()[0].id)) as watch:
        assert len(app.jobs.cancel(all=True)) == 500
    assert watch.is_stopped
    (row,) = app.audit.list()
    assert (row.number, row.state) == (500, "stopped")
    assert not app.audit.stop(row.id), "it has ended"
    with app.acting_as("ada"):
        assert len(app.jobs.cancel(all=True)) == 700
    assert [(row.number, row.state) for row in app.audit.list()] == [(700, "ended"), (500, "stopped")]


def test_an_actor_counts_for_its_thread_and_its_asyncio_task(app: sqlq.App) -> None:
    async def act(name: str) -> None:
        with app.acting_as(name):
            await asyncio.sleep(0)
            await app.jobs.acancel(task=name)

    async def both() -> None:
        await asyncio.gather(act("ada"), act("bob"))

    asyncio.run(both())
    with app.acting_as("eve"), ThreadPoolExecutor(1) as other:
        other.submit(app.queues.pause, "mail").result(20)
    found = {(actor, target) for actor, _, target, _ in said(app)}
    assert found == {("ada", "cancel --task ada"), ("bob", "cancel --task bob")}


def test_an_action_in_a_callers_transaction_is_recorded_with_it(app: sqlq.App, engine: Engine) -> None:
    job = app.named("plain").new()
    for commits in (False, True):
        with Session(engine) as session, app.acting_as("ada"):
            app.schedules.add("nightly", job, cron="@daily", session=session)
            session.commit() if commits else session.rollback()
    with pytest.raises(ConfigurationError), app.acting_as("ada"):
        app.schedules.pause("never")
    assert said(app) == [
        ("ada", "schedules add", "schedules add nightly --cron @daily", 1),
        ("ada", "schedules pause", "schedules pause never", 0),  # refused
    ]


def test_the_record_is_read_in_pages_and_pruned(app: sqlq.App, engine: Engine) -> None:
    for actor in ("ada", "bob", "ada"):
        with app.acting_as(actor):
            app.queues.pause("mail")
            app.queues.resume("mail")
    newest = app.audit.list(limit=2)
    assert [row.action for row in newest] == ["queues resume", "queues pause"]
    assert [row.actor for row in app.audit.list(before=newest[-1].id)] == ["bob", "bob", "ada", "ada"]
    assert len(app.audit.list(actor="ada", action="queues pause")) == 2
    assert isinstance(asyncio.run(app.audit.alist(limit=1))[0], Action)
    assert app.audit.prune("90d") == 0
    execute(engine, "DELETE FROM sqlq_audit WHERE actor = 'bob'")
    assert app.audit.prune("0s") == 4
    assert app.audit.list() == []


@needs("postgresql")
def test_an_action_succeeds_when_its_audit_record_is_refused(
    app: sqlq.App, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    id = app.enqueue(app.task(name="t")(lambda: None).new()).id
    execute(engine, "ALTER TABLE sqlq_audit ADD CONSTRAINT refused CHECK (actor <> 'ada')")
    with app.acting_as("ada"):
        assert app.jobs.cancel([id]) == {id: "cancelled"}
    assert "cancel is done, and not recorded: the database refuses that" in caplog.text


MAIL: dict[str, Any] = {"queue": "mail", "priority": 100}


def fail(hand: Hand, count: int = 1, message: str = "boom", queue: str = "mail") -> list[int]:
    return hand.ended(count, failed(message), **{**MAIL, "queue": queue})


def status(hand: Hand, **how: Any) -> dict[str, tuple[Any, ...]]:
    queues = hand.app.queues.list(**how)
    return {s.queue: (s.available, s.scheduled, s.running, s.failed, s.capped) for s in queues}


def test_a_count_stops_at_a_bound(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    hand.enqueue(4, queue="mail")
    hand.enqueue(2, queue="mail", priority=7)
    hand.enqueue(3, queue="mail", delay="1h", priority=-7)
    hand.enqueue(1, queue="other", delay="1h")
    fail(hand, 2)
    hand.enqueue(4, queue="third")
    hand.claim("third", limit=3)
    all_of_them = {"mail": (6, 3, 0, 2, ()), "other": (0, 1, 0, 0, ()), "third": (1, 0, 3, 0, ())}
    assert status(hand) == status(hand, exact=True) == all_of_them
    oldest = [queue.oldest_wait_seconds for queue in hand.app.queues.list()]
    assert [wait is None for wait in oldest] == [False, True, False]
    assert oldest[0] == pytest.approx(hand.app.queues.list(exact=True)[0].oldest_wait_seconds, abs=5)
    monkeypatch.setattr(health, "COUNT_LIMIT", 3)
    # running and failed jobs are counted over all queues: any may have more
    assert status(hand) == {
        "mail": (3, 3, 0, 2, ("available", "scheduled", "running")),
        "other": (0, 1, 0, 0, ("running",)),
        "third": (1, 0, 3, 0, ("running",)),
    }
    monkeypatch.setattr(health, "COUNT_LIMIT", 2)
    assert status(hand)["other"] == (0, 1, 0, 0, ("running",))
    assert status(hand, exact=True) == all_of_them


def test_counts_end_sooner_with_many_priorities(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    hand.enqueue(4, queue="mail")
    hand.enqueue(1, queue="mail", priority=1)
    hand.enqueue(1, queue="other")
    monkeypatch.setattr(health, "ROW_LIMIT", 9)
    monkeypatch.setattr(health, "COUNT_MINIMUM", 1)
    assert status(hand) == {"mail": (4, 0, 0, 0, ("available",)), "other": (1, 0, 0, 0, ())}


def test_failures_are_counted_by_their_error_without_what_varies(hand: Hand) -> None:
    fail(hand, 2, "no box\nof size 1")
    (newest,) = fail(hand, 1, "no box\nof size 2")
    fail(hand, 1, "no van", queue="other")
    (lost,) = hand.ended(1, Failed("worker_lost", ErrorText("WorkerLostError", "gone")), **MAIL)
    found, complete = hand.app.jobs.failures()
    assert complete
    assert [(each.task, each.error, each.number) for each in found] == [
        ("send", "ValueError: no box", 3),
        ("send", "worker_lost: WorkerLostError: gone", 1),
        ("send", "ValueError: no van", 1),
    ]
    assert [each.newest for each in found[:2]] == [newest, lost]
    assert [each.error for each in hand.app.jobs.failures(queue="other")[0]] == ["ValueError: no van"]
    assert hand.app.jobs.failures(task="pack") == ([], True)

    def of(message: str, exception: str = "ValueError") -> str:
        return Failed("error", ErrorText(exception, message)).fingerprint

    assert of("order 17 of 'ada' is gone\nx") == of("order 4711 of 'bob' is gone\ny")
    assert len({of("a"), of("b"), of("a", "KeyError")}) == 3
    assert len(of("a")) == 12


def test_a_listing_reports_whether_it_is_complete(hand: Hand) -> None:
    (old,) = hand.enqueue(1, queue="rare")
    running = hand.enqueue(1, queue="busy")
    hand.claim("busy")
    newer = hand.enqueue(5, queue="mail")

    def ids(**how: Any) -> tuple[list[int], bool]:
        found = hand.app.jobs.list(**how)
        return [job.id for job in found], found.complete

    assert ids(queue="rare", within=5) == ([], False)
    assert ids(queue="rare", within=7) == ids(queue="rare", within=None) == ([old], True)
    assert ids(limit=5, within=5) == (newer[::-1], True), "five were wanted, and there they are"
    assert ids(state="running", within=5) == (running, True), "an index has these"
    assert [job.id for job in hand.app.jobs.list(queue="rare")] == [old]
    failed = fail(hand, 1, queue="rare")
    assert ids(queue="rare", limit=1, within=5) == (failed, True), "what was not looked at is older"
    assert ids(queue="rare", limit=2, within=5) == (failed, False)


def test_the_error_of_a_job_is_the_text_that_the_view_has(hand: Hand, engine: Engine) -> None:
    note = "the result was too long"
    ends = (failed("two\nlines"), Cancelled("not wanted"), Finished("1"), Finished(None, note=note))
    ids = [id for end in ends for id in hand.ended(1, end, **MAIL)] + hand.enqueue()
    with engine.begin() as conn:
        conn.execute(text("UPDATE failed_jobs SET reason = 'timeout'"))
        rows = conn.execute(text("SELECT id, error FROM job_states")).all()
        errors: dict[int, str | None] = {row.id: row.error for row in rows}
    assert {id: hand.app.jobs.get(id).error for id in ids} == errors
    assert [errors[id] for id in ids] == ["ValueError: two\nlines", "not wanted", None, note, None]
    execute(engine, "UPDATE failed_jobs SET exception = NULL")
    assert execute(engine, "SELECT error FROM job_states WHERE state = 'failed'") == "timeout"
    assert hand.app.jobs.get(ids[0]).error == "timeout"


@pytest.fixture
def crowded(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> sqlq.App:
    """A database without statistics, in which a careless count would read some thousand pages."""
    # in the index scheduled jobs of a higher priority lie before due ones
    monkeypatch.setattr(health, "COUNT_LIMIT", 500)
    monkeypatch.setattr(health, "SAMPLE_JOBS", 100)
    for bound in ("EXACT", "ROWS", "TIMES"):
        monkeypatch.setattr(failed_rows, bound, 100)
    kind = app.database.dialect.name
    soon, later = NOW[kind], f"{NOW[kind]} + {span(app.database.engine, 86_400)}"
    with app.database.begin() as conn:
        if kind == "postgresql":
            for table in ("jobs", "finished_jobs", "failed_jobs"):
                conn.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        into = "jobs (queue, task, priority, available_at)"
        insert_many(conn, 60_000, into, f"'mail', 't', 5, {later}")
        insert_many(conn, 60_000, into, f"'mail', 't', 0, {soon}")
        insert_many(conn, 10, into, f"'rare', 't', 0, {soon}")
        for ended, column, value in (("finished", "outcome", "finished"), ("failed", "reason", "error")):
            conn.exec_driver_sql(
                f"INSERT INTO {ended}_jobs ({column}, {ended}_at, id, created_at, {CARRIED}) "
                f"SELECT '{value}', created_at, id, created_at, {CARRIED} FROM jobs WHERE queue = 'mail'"
            )
        claim_on(conn, ["rare"], limit=5, owner="w")
    return app


NOWHERE = lookup.Selection(queue="nowhere")
LOOKS: dict[str, Callable[[Connection], Any]] = {
    "capped": health.capped,
    "listing": lambda conn: lookup.listing(conn, limit=20, within=1_000),
    "listing_queue": lambda conn: lookup.listing(conn, selection=NOWHERE, limit=20, within=1_000),
    "listing_available": lambda conn: lookup.listing(conn, state=State.AVAILABLE, limit=20, within=1_000),
    "listing_running": lambda conn: lookup.listing(conn, state=State.RUNNING, limit=20, within=1_000),
    "counts_batch": lambda conn: lookup.counts(conn, lookup.Selection(batch="import-42")),
    "failures": lambda conn: failures.grouped(conn, lookup.Selection()),
    "reserved": workerss.reserved,
    "stuck": lambda conn: health.stuck(conn, longer_than_ms=1_000),
    "unknown": health.unknown_tasks,
}
"""The queries of `status`, `jobs`, `workers`, and `doctor`."""
NEED_STATISTICS = {
    *("reserved", "stuck", "failures", "unknown"),
    *("listing_queue", "listing_available", "listing_running"),
}
"""The others are bounded whatever the planner takes the tables for."""


@needs("plans")
@for_each("analyzed", [False, True])
def test_postgresql_reads_a_bounded_number_of_pages(crowded: sqlq.App, analyzed: bool) -> None:
    if analyzed:
        with crowded.database.connect(isolation_level="AUTOCOMMIT") as conn:
            conn.exec_driver_sql("VACUUM ANALYZE")  # an index alone has the times
    with crowded.database.read() as conn:
        assert conn.scalar(text("SELECT pg_relation_size('jobs') / 8192")) > 1_000
        for name in LOOKS if analyzed else LOOKS.keys() - NEED_STATISTICS:
            with received(conn) as got:
                LOOKS[name](conn)
            assert got
            for statement, parameters in got:
                if not analyzed and "GROUP BY public.failed_jobs.queue" in statement:
                    continue  # the sample, whose rows are looked up until there was a vacuum
                plan = explained(conn, statement, parameters)
                assert pages(plan) <= 250, f"{name}: {json.dumps(plan, indent=1)}"
                # from there on PostgreSQL compiles a statement, which takes a third of a second
                assert plan["Total Cost"] < 100_000, f"{name}: {json.dumps(plan, indent=1)}"


@needs("mariadb")
def test_mariadb_reads_a_bounded_number_of_rows(crowded: sqlq.App) -> None:
    with crowded.database.connect(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("ANALYZE TABLE jobs, finished_jobs, failed_jobs")
    with crowded.database.read() as conn:
        for name, look in (LOOKS | {"keys": lambda conn: admit.sweep_on(conn, "", 500)}).items():
            with received(conn) as got:
                look(conn)
            assert sum(rows_read(conn, *statement) for statement in got) <= 10_000, name


@needs("file")
def test_sqlite_reads_by_indexes(crowded: sqlq.App) -> None:
    """A table is read by itself only from its newest job backwards, up to a limit."""
    with crowded.database.read() as conn:
        for name, look in LOOKS.items():
            with received(conn) as got:
                look(conn)
            assert got
            for statement, parameters in got:
                plan = [row[3] for row in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
                scans = [step for step in plan if re.match(r"SCAN main\.(jobs|\w+_jobs)$", step)]
                assert not scans or "LIMIT" in statement, f"{name}: {plan}"


@needs("file")
def test_a_probe_steps_over_all_jobs_of_an_error(app: sqlq.App) -> None:
    with app.database.read() as conn:
        with received(conn) as sent:
            failed_rows.groups(conn, lookup.Selection())
        plan = str([conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {said}", given).all() for said, given in sent])
    for place in ("queue=? AND task=? AND fingerprint<?", "queue=? AND task<?", "queue<?"):
        assert f"failed_jobs_error ({place})" in plan


CARRIED = "queue, task, payload, priority, attempts, available_at, lease_token, unique_until, releases"
COLUMNS = f"{CARRIED}, created_at, reason, exception, message, fingerprint, failed_at"


def insert_failed(
    app: sqlq.App, rows: int, queue: str, task: str, error: str, *, first: int, column: str = ""
) -> None:
    """Insert failed jobs, one a second until now; `column` computes the fingerprint of each from `i`."""
    kind = app.database.dialect.name
    at = f"{NOW[kind]} - {span(app.database.engine, 1)} * ({rows} - i)"
    if kind == "mariadb":
        at = f"{NOW[kind]} - INTERVAL {rows} - i SECOND"
    values = (
        f"{first} + i, '{queue}', '{task}', '{{}}', 0, 1, {NOW[kind]}, 1, 'finish', 0, {NOW[kind]}, "
        f"'error', '{error}', 'it broke', {column or repr(error)}, {at}"
    )
    with app.database.begin() as conn:
        insert_many(conn, rows, f"failed_jobs (id, {COLUMNS})", values)


def test_every_queue_and_error_is_counted_beyond_the_newest_10_000(app: sqlq.App) -> None:
    """The newest 10,000 are all of one queue."""
    insert_failed(app, 15_000, "mail", "shop.send", "SMTPError", first=0)
    insert_failed(app, 20_000, "exports", "shop.export", "DiskFull", first=20_000)
    insert_failed(app, 15_000, "bulk", "shop.crunch", "KeyError", first=60_000)

    def numbers(**only: Any) -> dict[str, int]:
        groups, is_complete = app.jobs.failures(**only)
        assert is_complete
        return {f"{each.task}: {each.fingerprint}": each.number for each in groups}

    queues = {each.queue: (each.failed, each.capped, each.estimated) for each in app.queues.list()}
    assert queues == {"mail": (15_000, (), ()), "exports": (20_000, (), ()), "bulk": (15_000, (), ())}
    exports = {"shop.export: DiskFull": 20_000}
    assert numbers() == exports | {"shop.send: SMTPError": 15_000, "shop.crunch: KeyError": 15_000}
    of_exports = ({"queue": "exports"}, {"task": "shop.export"}, {"queue": "exports", "task": "shop.export"})
    for only in (*of_exports, {"error": "DiskFull"}):
        assert numbers(**only) == exports, only
    assert numbers(queue="nowhere") == numbers(task="mail") == numbers(error="?") == {}
    assert app.queues._vitals()[0] == {"error": 50_000}
    assert app.jobs._counts(("failed",), error="DiskFull") == {"failed": 20_000}
    (group,), _ = app.jobs.failures(queue="mail")
    assert group.newest == 15_000
    lasted = (group.last_at - group.first_at).total_seconds()
    assert lasted == pytest.approx(15_000, abs=300)
    assert sum(group.over_time) == pytest.approx(15_000, rel=0.05)
    assert min(group.over_time) > 0


def test_a_number_beyond_the_bound_is_an_estimate(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_rows, "EXACT", 10_000)
    monkeypatch.setattr(failed_rows, "ROWS", 30_000)
    insert_failed(app, 30_000, "mail", "shop.send", "SMTPError", first=0)
    insert_failed(app, 100, "mail", "shop.send", "Other", first=400_000)
    (queue,) = app.queues.list()
    assert queue.failed == pytest.approx(30_000, rel=0.2)
    assert queue.estimated == ("failed",)
    many, few = app.jobs.failures()[0]
    assert many.number == pytest.approx(30_000, rel=0.2)
    assert many.estimated == ("number",)
    assert (few.number, few.estimated) == (100, ())
    assert sum(many.over_time) == pytest.approx(30_000, rel=0.2)
    assert many.last_at - many.first_at == timedelta(seconds=29_999), "the oldest is not in the sample"
    monkeypatch.setattr(failed_rows, "ROWS", 50)
    monkeypatch.setattr(failed_rows, "TIMES", 50)
    many, few = app.jobs.failures()[0]
    assert (many.estimated, few.estimated) == (("number",), ("number",))


def test_distinct_errors_without_end_are_bounded(app: sqlq.App) -> None:
    insert_failed(app, 100_000, "mail", "shop.send", "E", first=1_000, column="CAST(i AS CHAR(12))")
    insert_failed(app, 5_000, "mail", "shop.send", "Zzz", first=200_000)
    groups, is_complete = app.jobs.failures()
    assert (len(groups), is_complete) == (failed_rows.KEYS, False)
    assert (groups[0].fingerprint, groups[0].number) == ("Zzz", 5_000), "the sample has what is frequent"
    with app.database.read() as conn:
        found, is_complete = failed_rows.groups(conn, lookup.Selection(queue="mail"))
        assert (len(found), is_complete) == (failed_rows.KEYS, False)
        with received(conn) as sent:
            failed_rows.queues(conn, 10)
        assert all(reads_few(conn, *statement) for statement in sent)


def reads_few(conn: Connection, statement: str, parameters: Any) -> bool:
    """Whether no part of the plan reads many rows of failed_jobs."""

    def plan(explain: str) -> Any:
        return conn.exec_driver_sql(f"{explain} {statement}", parameters)

    match conn.dialect.name:
        case "postgresql":
            nodes = walk(explained(conn, statement, parameters))
            return not [node for node in nodes if "Relation Name" in node and node["Actual Rows"] >= 2_000]
        case "mariadb":
            return all("index" in str(row["Extra"]) for row in plan("EXPLAIN").mappings())
        case _:
            steps = [row[3] for row in plan("EXPLAIN QUERY PLAN")]
            return not [step for step in steps if re.match("SCAN failed_jobs(?!.*USING)", step)]
