"""Workers tick: when a run is due, by the database's clock, and with the schedules of their code."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.store import schedules
from sqlq.testing import drain
from sqlq.worker.maintain.control import Control
from sqlq.worker.maintain.services import TAKEN_SECONDS, TICK_SECONDS, Ticks
from tests.kit import execute, locked, needs, received, wait_until, working

SECOND = timedelta(seconds=1)


def counted(app: sqlq.App, name: str) -> int:
    return {each.name: each.ticks for each in app.schedules.list()}.get(name, 0)


def test_a_draining_worker_neither_ticks_nor_declares(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    run, served = Control.run, threading.Event()

    def noted(service: Control) -> float:  # the service behind the one that declares
        served.set()
        return run(service)

    monkeypatch.setattr(Control, "run", noted)
    app.task(name="nightly", schedule="0 3 * * *")(lambda: None)
    app.enqueue(app.task(name="t")(lambda: served.wait(60)).new())
    assert drain(app).finished == 1
    assert app.schedules.list() == []


def test_ticks_sleep_until_the_next_run(app: sqlq.App) -> None:
    ticks = Ticks(app.database)
    longest = TICK_SECONDS if app.database.dialect.in_a_file else 7.0
    assert ticks.run() == longest
    task = app.task(name="beat")(lambda: None)
    app.schedules.add("far", task.new(), cron="0 3 1 1 *")
    assert ticks.run() == longest
    app.schedules.add("near", task.new(), every="1s")
    assert 0 <= ticks.run() <= 1.0


def test_a_running_worker_observes_an_added_schedule(app: sqlq.App) -> None:
    app.task(name="beat", max_attempts=1)(lambda: None)
    with working(app), closing(sqlq.App(app.database.engine.url)) as other:
        wait_until(app.workers.list, what="the worker")
        other.schedules.add("beat", other.named("beat").new(), every="1s", repeats=1)
        wait_until(lambda: app.jobs.list(state="finished"), what="its job")
        assert other.schedules.get("beat").state == "ended"


@needs("sessions")
def test_a_schedule_locked_by_another_tick_is_read_again_soon(app: sqlq.App, engine: Engine) -> None:
    task = app.task(name="beat")(lambda: None)
    app.schedules.add("beat", task.new(), every="1s")
    execute(engine, "UPDATE sqlq_schedules SET next_at = now()")
    with locked(engine, "SELECT name FROM sqlq_schedules FOR UPDATE"):
        assert Ticks(app.database).run() == TAKEN_SECONDS


@needs("listen")
def test_the_poller_reports_when_a_schedule_is_due(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a change is seen soon, though the service itself sleeps for long."""
    heard: list[float] = []
    monkeypatch.setattr(Ticks, "expect", lambda ticks, moment: heard.append(moment))
    task = app.task(name="beat")(lambda: None)
    with working(app):
        wait_until(app.workers.list, what="the worker")
        assert heard == []
        app.schedules.add("far", task.new(), cron="0 3 1 1 *")
        wait_until(lambda: heard, timeout=30, what="the lookout")


def test_ticks_send_no_query_while_the_poller_runs(app: sqlq.App) -> None:
    """So a database without schedules gets no queries. A due time from the poller is ticked."""
    called: list[bool] = []
    silent: list[bool] = []
    ticks = Ticks(app.database, is_watched=lambda: not silent, freed=lambda: called.append(True))
    app.schedules.add("beat", app.task(name="beat")(lambda: None).new(), every="1s")
    with received(app.database.engine) as sent:
        assert ticks.run() > 0
        ticks.expect(time.monotonic() + 3_600)
        assert ticks.run() > 0
        assert sent == []
    wait_until(lambda: (schedules.next_in(app.database) or 0) <= 0, what="its moment")
    ticks.expect(time.monotonic())
    # the next run is not left to the poller, which may look later than that
    assert ticks.run() <= 1.0
    assert counted(app, "beat") == 1
    assert called == [True], "the worker that ticks is called at once"
    silent.append(True)
    wait_until(lambda: ticks.run() and counted(app, "beat") >= 2, what="the next tick")
