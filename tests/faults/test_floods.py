"""A role that may only enqueue, or nothing at all, floods tables and channels: jobs and waiters go on."""

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
from sqlalchemy import Engine, create_engine, make_url

import sqlq
from sqlq.database import notifications
from sqlq.database.notifications import Hearing
from sqlq.model.retry import PUT_BACK_NAMES
from sqlq.store.limits import admit
from sqlq.store.workers import notify
from sqlq.worker.wait.poller import Poller
from tests.kit import drain, execute, needs, wait_until, working
from tests.kit.command import Command, grant

FLOOD = 2_000
MOST_GROWN = 24_000_000


@pytest.fixture
def role(database_url: str, engine: Engine) -> Iterator[Callable[..., Engine]]:
    """Make a role of a kind by the command, or one without any right, and return its engine."""
    opened: list[Engine] = []

    def make(kind: str | None = None) -> Engine:
        name = f"flood_{uuid4().hex[:12]}"
        execute(engine, f"CREATE ROLE {name} LOGIN PASSWORD '{name}'")
        if kind is not None:
            grant(database_url, name, kind)
        opened.append(create_engine(make_url(database_url).set(username=name, password=name)))
        return opened[-1]

    yield make
    for each in opened:
        each.dispose()
        execute(engine, f"DROP OWNED BY {each.url.username}; DROP ROLE {each.url.username}")


@pytest.fixture
def stranger(role: Callable[..., Engine]) -> Callable[[], psycopg.Connection]:
    """Connects as a role to which nothing was granted."""
    url = role().url.set(drivername="postgresql").render_as_string(hide_password=False)
    return lambda: psycopg.connect(url, autocommit=True)


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
            "SELECT pg_notify(%s, n || repeat(',7', 3000)) FROM generate_series(1, 10000) n", (channel(app),)
        )
        app.enqueue(app.named("t").new())
        assert ran.wait(60)
    assert all(dry)


# -- tables and the log --------------------------------------------------------------------------------------


@needs("roles")
def test_old_wakes_hold_up_no_limit(app: sqlq.App, role: Callable[..., Engine], engine: Engine) -> None:
    """At the next look a job of a limit starts, although its wake is the last of many."""
    app.limit("stripe", running=2)
    charge = app.task(name="charge", limit="stripe")(lambda: None)
    execute(
        role("producer"),
        "INSERT INTO sqlq_wakes (at, limit_key, max_running) "
        f"SELECT '1970-01-01', 'k' || i, 1 FROM generate_series(1, {2 * admit.WAKES_AT_ONCE + 1}) i",
    )
    job = app.enqueue(charge.new())
    assert admit.look(app.database).number == 1
    assert app.jobs.get(job.id).state == "available"
    with engine.connect() as conn:
        (rule,) = conn.exec_driver_sql("SELECT max_running FROM sqlq_limits WHERE limit_key = 'stripe'").all()
    assert rule == (2,)


@needs("roles")
def test_a_statement_ends_when_its_client_gives_up(app: sqlq.App, engine: Engine) -> None:
    with app.database.for_loops.engine.connect() as conn:
        driver = conn.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        driver.pgconn.send_query(b"SELECT pg_sleep(3600)")
        driver.pgconn.flush()
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(3600)'"

        def number() -> int:
            with engine.connect() as other:
                return int(other.exec_driver_sql(sleeping).scalar_one())

        wait_until(lambda: number() == 1, what="the statement running")
        conn.invalidate()
    wait_until(lambda: number() == 0, what="its end")


@needs("roles")
def test_many_rows_of_unknown_tasks_are_few_lines_of_the_log(
    app: sqlq.App, role: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    execute(
        role("untrusted-producer"),
        "INSERT INTO jobs (task, payload) SELECT 'no.' || i % 60, '{}' FROM generate_series(1, 300) i",
    )
    with caplog.at_level(logging.INFO, "sqlq"):
        assert drain(app).released >= 300  # of a slow drain some are due again
    lines = [record for record in caplog.records if "no." in record.getMessage()]
    assert len(lines) < 2 * PUT_BACK_NAMES
    assert all(line.levelno == logging.WARNING for line in lines)
