"""A role without any right sends bad and many NOTIFYs: jobs and waiters go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, make_url

import sqlq
from sqlq.database import notifications
from sqlq.database.notifications import Hearing
from sqlq.store.workers import notify
from sqlq.worker.wait.poller import Poller
from tests.kit import needs, wait_until, working
from tests.kit.command import Command

FLOOD = 2_000
MOST_GROWN = 24_000_000


@pytest.fixture
def stranger(database_url: str, engine: Engine) -> Iterator[Callable[[], psycopg.Connection]]:
    """Connects as a role to which nothing was granted."""
    role = f"stranger_{uuid4().hex[:12]}"
    url = make_url(database_url).set(drivername="postgresql", username=role, password=role)
    with engine.begin() as conn:
        conn.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    try:
        yield lambda: psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
    finally:
        with engine.begin() as conn:
            conn.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


def channel(app: sqlq.App) -> str:
    """Return the channel on which workers receive notifications of jobs."""
    return notify.channel(app.database.schema)


def say(conn: psycopg.Connection, channel: str, words: str) -> None:
    conn.execute("SELECT pg_notify(%s, %s)", (channel, words))


# -- each text -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_only_an_empty_text_is_a_notification_of_jobs(words: bytes) -> None:
    hearing = Hearing()
    hearing._take(SimpleNamespace(extra=words, be_pid=7))
    assert (hearing._hinted, hearing._ignored) == (not words, bool(words))


HOSTILE = ["²", "9" * 5_000, "1,²", "-1", " ", ",", "0", str(2**63), "*", "\x1b[2J", "no"]


@needs("listen")
def test_notifications_of_a_stranger_are_ignored(
    app: sqlq.App,
    stranger: Callable[[], psycopg.Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ignored = list[int]()
    take = Hearing._take

    def takes(self: Hearing, notification: Any) -> None:
        take(self, notification)
        ignored.append(self._ignored)

    def listens() -> bool:
        say(speaker, channel(app), f"no {next(numbers)}")
        return bool(ignored)

    monkeypatch.setattr(Hearing, "_take", takes)
    answer = app.task(name="answer")(lambda: 7)
    numbers = count()
    with working(app), stranger() as speaker, caplog.at_level(logging.WARNING):
        wait_until(listens, what="the worker listening")
        before = len(ignored)
        for words in HOSTILE:
            say(speaker, channel(app), words)
        wait_until(lambda: len(ignored) >= before + len(HOSTILE), what="all of it heard")
        assert app.result(app.enqueue(answer.new()), timeout="60s") == 7
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("notifications that are none of sqlq's were ignored: "), "one line a minute"
    assert not any(record.exc_info for record in caplog.records)


# -- any number of them --------------------------------------------------------------------------------------


@contextmanager
def flooding(
    stranger: Callable[[], psycopg.Connection], channel: str, words: str
) -> Iterator[Callable[[], int]]:
    """Send notifications, as fast as may be, meanwhile; yields their number so far."""
    over, number = threading.Event(), count()
    sent = [0]

    def flood() -> None:
        with stranger() as conn:
            while not over.is_set():
                say(conn, channel, words and f"{words}{next(number)}")
                sent[0] += 1

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield lambda: sent[0]
    finally:
        over.set()
        thread.join(60)


@pytest.mark.integration
@needs("listen")
@pytest.mark.parametrize("words", ["", "x" * 4_000], ids=["jobs", "noise"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_flood_of_notifications_delays_no_job(
    tmp_path: Path,
    database_url: str,
    app: sqlq.App,
    stranger: Callable[[], psycopg.Connection],
    processes: str,
    words: str,
) -> None:
    command = Command(tmp_path, SQLQ_DATABASE_URL=database_url)

    def grown() -> int:
        return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])

    def run() -> None:
        job = app.enqueue(app.named("shop.send").new(7).set(queue="mail"))
        assert app.wait_all([job], "60s").ended

    with command.working("-p", processes, anew=True) as started:
        process = psutil.Process(started.pid)
        for _ in range(20):
            run()
        before = grown()
        with flooding(stranger, channel(app), words) as sent:
            while sent() < FLOOD:
                run()
            assert grown() - before < MOST_GROWN


@needs("listen")
def test_the_poller_reads_all_notifications_before_the_next_poll(
    app: sqlq.App, stranger: Callable[[], psycopg.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq would keep all notifications until the look is answered."""
    dry: list[bool] = []
    look = Poller._look

    def looks(self: Poller, conn: Any) -> Any:
        dry.append(self._hearing.is_dry)
        return look(self, conn)

    monkeypatch.setattr(Poller, "_look", looks)
    monkeypatch.setattr("sqlq.worker.wait.poller.IDLE_POLL_SECONDS", 0.02)
    monkeypatch.setattr(notifications, "MAX_SECONDS", 0.0005)
    ran = threading.Event()
    app.task(name="t")(ran.set)
    with working(app), stranger() as conn:
        wait_until(lambda: dry, what="the first look")
        conn.execute(
            "SELECT pg_notify(%s, n || repeat(',7', 3000)) FROM generate_series(1, 10000) n",
            (channel(app),),
        )
        app.enqueue(app.named("t").new())
        assert ran.wait(60)
    assert all(dry)
