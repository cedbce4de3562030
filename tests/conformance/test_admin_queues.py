"""Pausing and resuming queues, pruning by age, which workers there are, and the record of operators."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, Table, literal, text, update
from sqlalchemy.orm import Session

import sqlq
from sqlq.admin.batches import watched
from sqlq.cli.commands.status import show_queues
from sqlq.cli.context import Context
from sqlq.database.values import LARGEST_WINDOW
from sqlq.errors import ConfigurationError
from sqlq.model.outcome import Finished
from sqlq.schema.tables import failed_jobs, finished_jobs, jobs, queues, workers
from sqlq.schema.types import after, now
from sqlq.store.audit import Action
from sqlq.store.jobs import lease, operate
from sqlq.store.workers import look
from sqlq.store.workers import workers as workerss
from sqlq.store.workers.look import KEPT_SECONDS, KnownQueues, due_in
from tests.kit import BOOM, Hand, claim_on, drain, execute, needs, wait_until, working
from tests.kit.notifications import Listener

pytestmark = pytest.mark.each_database


def ago(seconds: int) -> Any:
    return after(literal(-seconds * 1000, BigInteger))


def age(hand: Hand, table: Table, column: str, ids: Sequence[int], seconds: Sequence[int]) -> None:
    with hand.app.database.begin() as conn:
        for id, past in zip(ids, seconds, strict=True):
            conn.execute(update(table).where(table.c.id == id).values({column: ago(past)}))


def register(hand: Hand, id: str, names: Sequence[str] | None, silent: int = 0) -> None:
    with hand.app.database.begin() as conn:
        workerss.register(conn, id=id, host="here", pid=7, version="0", queues=names, concurrency=2)
    silence(hand, id, silent)


def silence(hand: Hand, id: str, seconds: int) -> None:
    """Let a worker have been seen so long ago."""
    with hand.app.database.begin() as conn:
        conn.execute(update(workers).where(workers.c.id == id).values(seen_at=ago(seconds)))


# -- pausing -------------------------------------------------------------------------------------------------


def test_a_claim_skips_paused_queues(hand: Hand) -> None:
    mail, other = hand.enqueue(queue="mail"), hand.enqueue(queue="other")
    assert hand.app.queues.pause("mail")
    assert not hand.app.queues.pause("mail")
    more = hand.enqueue(queue="mail")
    assert list(look.due_in(hand.app.database, look.KnownQueues())) == ["other"]
    assert drain(hand.app, queues=["mail"]).finished == 0, "a drain ends"
    assert [job.id for job in hand.claim("mail", "other")] == other
    assert hand.claim("mail") == [], "not even by name"
    assert [hand.app.jobs.get(id).state for id in mail + more] == ["available", "available"]
    assert hand.app.queues.resume("mail")
    assert not hand.app.queues.resume("mail")
    assert [job.id for job in hand.claim("mail")] == mail + more
    assert hand.app.queues.pause("mail"), "the row of a resumed queue is used again"
    assert hand.claim("mail") == []


def test_a_running_job_settles_while_its_queue_is_paused(hand: Hand) -> None:
    (id,) = hand.enqueue(queue="mail")
    (owner,) = hand.claim("mail")
    hand.app.queues.pause("mail")
    with hand.app.database.begin() as conn:
        assert lease.extend(conn, [(id, owner.lease_token)], lease_ms=1)
    assert hand.settle(owner, Finished()) == {id}
    assert hand.states([id]) == ["finished"]


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
    listener = Listener(hand.app)
    hand.app.queues.resume("mail")
    assert listener.hears_one()
    listener.close()


# -- pruning (T15) -------------------------------------------------------------------------------------------


@needs("sessions")
def test_prune_skips_a_locked_failed_job(hand: Hand, engine: Engine) -> None:
    ids = hand.ended(3, BOOM)
    with engine.connect() as rival:
        rival.execute(text("SELECT id FROM failed_jobs WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        assert hand.app.jobs.prune(failed="0s") == (0, 2)
    assert hand.app.jobs.prune(failed="0s") == (0, 1)


def test_finished_jobs_are_pruned_by_age_the_oldest_first_and_at_most_so_many(hand: Hand) -> None:
    ids = hand.enqueue(5)
    hand.end(Finished())
    failed = hand.ended()
    age(hand, finished_jobs, "finished_at", ids, [70, 10, 90, 80, 50])

    def prune(limit: int) -> int:
        with hand.app.database.begin() as conn:
            return operate.prune(conn, older_than_ms=60_000, limit=limit)

    assert prune(2) == 2
    assert sorted(job.id for job in hand.app.jobs.list(state="finished")) == [ids[0], ids[1], ids[4]]
    assert [prune(2), prune(2)] == [1, 0]
    assert sorted(job.id for job in hand.app.jobs.list(state="finished")) == [ids[1], ids[4]]
    assert hand.states(failed) == ["failed"]
    assert hand.app.jobs.prune(failed=timedelta(minutes=1), finished="1d") == (0, 0)
    assert hand.app.jobs.prune(failed="0s", finished="0s") == (2, 1)


@needs("sessions")
def test_two_prunes_do_not_wait_for_each_other(hand: Hand) -> None:
    ids = hand.enqueue(4)
    hand.end(Finished())
    age(hand, finished_jobs, "finished_at", ids, [90, 80, 70, 60])
    with hand.app.database.begin() as one:
        assert operate.prune(one, older_than_ms=1_000, limit=2) == 2
        with hand.app.database.begin() as two:
            two.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert operate.prune(two, older_than_ms=1_000, limit=10) == 2
    assert hand.app.jobs.list() == []


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
            conn.execute(update(table).values({ended_at: ago(3_600)}))
        kept.append((aged, over, lasting))
    (_, finished_over, finished_kept), (_, failed_over, failed_kept) = kept
    assert hand.app.jobs.prune(finished="1m", failed="1m") == (1, 1)
    left = {job.id for job in hand.app.jobs.list()}
    assert left == {finished_over, finished_kept, failed_over, failed_kept}
    with database.begin() as conn:
        assert operate.prune_expired(conn, limit=1) == 1, "no more than asked for"
        assert operate.prune_expired(conn, limit=10) == 1
    assert {job.id for job in hand.app.jobs.list()} == {finished_kept, failed_kept}


# -- status and workers --------------------------------------------------------------------------------------


def test_the_status_counts_jobs_and_shows_whether_a_queue_is_served(hand: Hand) -> None:
    hand.ended(2, queue="b")
    hand.enqueue(1, queue="a")
    hand.claim()
    hand.enqueue(3, queue="a")
    hand.enqueue(2, queue="a", delay="1h")
    hand.enqueue(1, queue="c", delay="1h")
    with hand.app.database.begin() as conn:
        conn.execute(queues.insert().values(queue="c", paused_at=now()))
    register(hand, "w1", ["a", "empty"])
    found = {status.queue: status for status in hand.app.queues.list()}
    assert list(found) == ["a", "b", "c", "empty"]
    a = found["a"]
    assert (a.available, a.scheduled, a.running, a.failed, a.paused, a.served) == (3, 2, 1, 0, False, True)
    assert a.oldest_wait_seconds is not None
    assert 0 <= a.oldest_wait_seconds < 60
    b = found["b"]
    assert (b.available, b.scheduled, b.running, b.failed) == (0, 0, 0, 2)
    assert (b.oldest_wait_seconds, b.served) == (None, False)
    assert (found["c"].paused, found["c"].scheduled, found["c"].oldest_wait_seconds) == (True, 1, None)
    assert found["empty"].served

    register(hand, "w2", None)
    assert all(status.served for status in hand.app.queues.list()), "w2 serves every queue"
    silence(hand, "w1", 120)
    silence(hand, "w2", 120)
    assert [(s.queue, s.served) for s in hand.app.queues.list()] == [(name, False) for name in "abc"]
    assert hand.app.workers.list() == []


def test_workers_register_leave_and_are_removed_when_silent(hand: Hand) -> None:
    app = hand.app
    for id in ("w1", "w2", "w3"):
        register(hand, id, None)
    silence(hand, "w1", 80)
    silence(hand, "w2", 3600)
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
    assert look.due_in(hand.app.database, look.KnownQueues()) == {}
    for name in ("b", "ä", "A", "a b"):
        hand.enqueue(2, queue=name)
    hand.enqueue(1, queue="later", delay="1d")
    with hand.app.database.begin() as conn:
        claim_on(conn, ["b"], limit=10, owner="w")
    assert sorted(look.due_in(hand.app.database, look.KnownQueues())) == sorted(["ä", "A", "a b", "later"])


def test_workers_list_shows_each_worker_with_its_jobs(hand: Hand) -> None:
    register(hand, "w1", ["a", "b"])
    register(hand, "w2", None, silent=60)
    register(hand, "w3", None, silent=600)
    a, b = hand.enqueue(2, queue="a")
    (c,) = hand.enqueue(queue="c")
    hand.claim("a", owner="w1")
    hand.claim("c", owner="w3")
    found = {worker.id: worker for worker in hand.app.workers.list()}
    assert list(found) == ["w1", "w2"]
    one = found["w1"]
    assert (one.host, one.pid, one.version, one.concurrency) == ("here", 7, "0", 2)
    assert (one.queues, one.alive) == (("a", "b"), True)
    assert [(job.id, job.task, job.queue) for job in one.jobs] == [(a, "send", "a"), (b, "send", "a")]
    assert one.jobs[0].since.tzinfo is not None
    assert 0 <= one.silent_seconds < 60
    assert (found["w2"].queues, found["w2"].jobs) == (None, [])
    assert 60 <= found["w2"].silent_seconds < 120
    (silent,) = (worker for worker in hand.app.workers.list(silent=True) if worker.id == "w3")
    assert (silent.alive, [job.id for job in silent.jobs]) == (False, [c])


# -- more queues than one look reads -------------------------------------------------------------------------


FAR = {"postgresql": "now() + interval '1 day'", "sqlite": "9e12", "mariadb": "now() + interval 1 day"}


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
    ran: list[int] = []
    task = app.task(name="own", queue="own")(lambda: ran.append(1))
    execute(
        app.database.engine,
        "INSERT INTO jobs (queue, task, payload, available_at) VALUES "
        + ", ".join(
            f"('a{i:05}', 'no', '{{}}', {FAR[app.database.engine.dialect.name]})"
            for i in range(2 * LARGEST_WINDOW)
        ),
    )
    app.enqueue(task.new())
    assert drain(app).finished == 1


def rows(*names: str, first: int | None = 1) -> list[tuple[str, float, int | None]]:
    return [(name, 0.0, None if first is None else first + i) for i, name in enumerate(names)]


def test_known_queues_keep_those_with_the_latest_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlq.store.workers.look.LARGEST_WINDOW", 3)
    now = [1_000.0]
    monkeypatch.setattr("sqlq.store.workers.look.time.monotonic", lambda: now[0])
    queues = KnownQueues(own=["own"])
    queues.note(rows("a", "b", "c"), claimed=["served"])
    assert queues.with_jobs[0] == "served"
    assert len(queues.with_jobs) == 3
    assert queues.after == "c"
    now[0] += KEPT_SECONDS / 2
    queues.note(rows("d", "e", "f"), claimed=["later"])
    assert queues.names[:3] == ["own", "later", "served"]
    now[0] += KEPT_SECONDS / 2 + 1
    queues.note(rows("g"))
    assert queues.names == ["own", "later", "g"]
    assert queues.with_jobs == ["later", "g"]
    assert queues.after == "", "there are no more queues after this window"
    named = KnownQueues(["mail"])
    named.note(rows("mail", first=None), claimed=["mail"])
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


# -- the record of what operators did ------------------------------------------------------------------------


def said(app: sqlq.App) -> list[tuple[str, str, str, int | None]]:
    return [(row.actor, row.action, row.target, row.number) for row in reversed(app.audit.list())]


def test_the_library_records_what_an_actor_does_alone(app: sqlq.App) -> None:
    app.queues.pause("mail")
    app.jobs.cancel(task="send")
    assert app.audit.list() == []
    with app.acting_as("ada"):
        app.jobs.cancel(range(1, 31))
    assert app.audit.list()[0].target == f"cancel {' '.join(map(str, range(1, 21)))} (and 10 more)"


def test_each_action_of_an_actor_leaves_one_row(app: sqlq.App) -> None:
    send = app.task(name="send", limit=sqlq.Limit("stripe", running=2))(lambda n=0: None)
    plain = app.task(name="plain", queue="mail")(lambda: None)
    ids = [job.id for job in app.enqueue_many([send.new(1), send.new(2), plain.new()])]
    flow = app.enqueue(sqlq.chain(plain.new(), plain.new()))
    with app.acting_as("ada"):
        app.jobs.reschedule(task="plain", queue="mail", delay="1h")
        app.jobs.cancel([ids[0], 4711], force=True)
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
        ("ada", "retry", "retry --task 'mail send'", 0),
        ("ada", "prune", "prune --finished 7d --failed 30d", 0),
        ("ada", "queues pause", "queues pause mail pdf --duration 10m", 2),
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


def test_a_refused_action_changed_nothing(app: sqlq.App) -> None:
    with pytest.raises(ConfigurationError), app.acting_as("ada"):
        app.schedules.pause("never")
    assert said(app) == [("ada", "schedules pause", "schedules pause never", 0)]


def test_an_actor_counts_for_its_thread_and_its_asyncio_task(app: sqlq.App) -> None:
    async def act(name: str) -> None:
        with app.acting_as(name):
            await asyncio.sleep(0)
            await app.jobs.acancel(task=name)

    async def both() -> None:
        await asyncio.gather(act("ada"), act("bob"))

    asyncio.run(both())
    with app.acting_as("eve"):
        other = threading.Thread(target=lambda: app.queues.pause("mail"))
        other.start()
        other.join(20)
    found = {(actor, target) for actor, _, target, _ in said(app)}
    assert found == {("ada", "cancel --task ada"), ("bob", "cancel --task bob")}


def test_an_action_in_a_callers_transaction_is_recorded_with_it(app: sqlq.App, engine: Engine) -> None:
    job = app.task(name="plain")(lambda: None).new()
    for commits in (False, True):
        with Session(engine) as session, app.acting_as("ada"):
            app.schedules.add("nightly", job, cron="@daily", session=session)
            session.commit() if commits else session.rollback()
    assert said(app) == [("ada", "schedules add", "schedules add nightly --cron @daily", 1)]


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
