"""The record of what operators did."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import sqlq
from sqlq.admin.batches import watched
from sqlq.errors import ConfigurationError
from sqlq.store.audit import Action
from sqlq.store.jobs import operate
from tests.kit import execute, needs

pytestmark = pytest.mark.each_database


def said(app: sqlq.App) -> list[tuple[str, str, str, int | None]]:
    return [(row.actor, row.action, row.target, row.number) for row in reversed(app.audit.list())]


def test_the_library_records_nothing_by_itself(app: sqlq.App) -> None:
    app.queues.pause("mail")
    app.jobs.cancel(task="send")
    assert app.audit.list() == []


def test_each_action_of_an_actor_leaves_one_row(app: sqlq.App) -> None:
    send = app.task(name="send", limit=sqlq.Limit("stripe", running=2))(lambda n=0: None)
    plain = app.task(name="plain", queue="mail")(lambda: None)
    ids = [job.id for job in app.enqueue_many([send.new(1), send.new(2), plain.new()])]
    with app.acting_as("ada"):
        app.jobs.reschedule(task="plain", delay="1h")
        app.jobs.cancel([ids[0], 4711], force=True)
        app.jobs.retry(task="mail send")
        app.jobs.retry(all=True)
        app.jobs.delete(queue="mail")
        app.jobs.prune(finished="7d", failed="30d")
        app.jobs.replay(ids[0])
        app.queues.pause("mail", "pdf", duration="10m")
        app.queues.resume(all=True)
        app.limits.set("stripe", running=1)
        app.limits.clear("stripe")
        app.schedules.add("nightly", plain.new(), cron="0 3 * * *")
        app.schedules.pause("nightly")
        app.schedules.run("nightly")
        app.schedules.remove("nightly")
        app.workers.stop(all=True)
        flow = app.enqueue(sqlq.chain(plain.new(), plain.new()))
        app.flows.skip(flow.jobs[0].id)
        app.flows.cancel(flow.id)
    assert said(app) == [
        ("ada", "reschedule", "reschedule --delay 1h --task plain", 1),
        ("ada", "cancel", f"cancel {ids[0]} 4711 --force", 1),
        ("ada", "retry", "retry --task 'mail send'", 0),
        ("ada", "retry", "retry --all", 0),
        ("ada", "delete", "delete --queue mail", 0),
        ("ada", "prune", "prune --finished 7d --failed 30d", 0),
        ("ada", "replay", f"replay {ids[0]}", 1),
        ("ada", "queues pause", "queues pause mail pdf --duration 10m", 2),
        ("ada", "queues resume", "queues resume --all", 0),
        ("ada", "limits set", "limits set stripe --running 1", 1),
        ("ada", "limits clear", "limits clear stripe", 1),
        ("ada", "schedules add", "schedules add nightly --cron '0 3 * * *'", 1),
        ("ada", "schedules pause", "schedules pause nightly", 1),
        ("ada", "schedules run", "schedules run nightly", 1),
        ("ada", "schedules remove", "schedules remove nightly", 1),
        ("ada", "workers stop", "workers stop --all", 0),
        ("ada", "flows skip", f"flows skip {flow.jobs[0].id}", 1),
        ("ada", "cancel", f"cancel --flow {flow.id}", 1),
    ]


def test_an_action_has_the_user_of_the_database(app: sqlq.App, engine: Engine) -> None:
    with app.acting_as("ada"):
        app.queues.pause("mail")
    (row,) = app.audit.list()
    user = {"postgresql": "SELECT session_user", "mariadb": "SELECT user()", "sqlite": "SELECT NULL"}
    with engine.connect() as conn:
        assert row.database_user == conn.scalar(text(user[engine.dialect.name]))


def test_many_ids_are_recorded_by_their_number(app: sqlq.App) -> None:
    with app.acting_as("ada"):
        app.jobs.cancel(range(1, 31))
    assert app.audit.list()[0].target == f"cancel {' '.join(map(str, range(1, 21)))} (and 10 more)"


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
