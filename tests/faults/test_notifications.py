"""A role without any right sends bad and many NOTIFYs: jobs and waiters go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, make_url

import sqlq
from sqlq.database import notifications
from sqlq.database.notifications import ANY_JOB, Hearing, named_in
from sqlq.store.jobs.results import WAITS
from sqlq.store.workers import notify
from sqlq.worker.settle.after import MOST_REMEMBERED, Answers
from sqlq.worker.wait.poller import Poller
from tests.faces.command import Command
from tests.kit import working
from tests.waiting import wait_until

on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
NAMED = 600
FLOOD = 2_000
MOST_GROWN = 24_000_000
SECONDS = 120.0


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


def channels(app: sqlq.App) -> tuple[str, str]:
    """Return the channels on which workers receive jobs, and waiters the ends of jobs."""
    named = notify.channel(app.database.schema)
    return named, f"{named}_ended"


def say(conn: psycopg.Connection, channel: str, words: str) -> None:
    conn.execute("SELECT pg_notify(%s, %s)", (channel, words))


# -- each text -----------------------------------------------------------------------------------------------

ids = st.integers(1, 2**63 - 1).map(str) | st.integers(0, 10**25).map(str)
words = st.one_of(
    ids,
    st.text("0123456789,²٣ -+_*", max_size=30),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60),
    st.just("9" * 5_000),
)
texts = (
    st.tuples(
        st.sampled_from(["", WAITS, WAITS.upper(), f"{WAITS} "]),
        st.one_of(words, st.lists(words, max_size=6).map(",".join), st.just(ANY_JOB)),
    )
    .map("".join)
    .filter(lambda text: len(text.encode()) < 8_000)
)  # NOTIFY takes no more


def ids_of(listed: str) -> list[int]:
    """The ids in a list of ids, and none of what is none."""
    parts = listed.split(",")
    if not all(part and set(part) <= set("0123456789") and len(part) < 20 for part in parts):
        return []
    return [int(part) for part in parts] if all(0 < int(part) < 2**63 for part in parts) else []


@settings(max_examples=500)
@given(st.binary(max_size=40) | texts.map(str.encode))
def test_bytes_are_read_as_ids_or_as_nothing(said: bytes) -> None:
    assert named_in(said) == ids_of(said.decode("latin-1"))


@on_postgresql
def test_each_text_is_read_as_ids_or_ignored(
    app: sqlq.App, stranger: Callable[[], psycopg.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both channels, over the wire, and as it comes together with an answer."""
    monkeypatch.setattr(notifications, "REST_SECONDS", 0.0)
    monkeypatch.setattr(notifications, "BYTES_A_SECOND", 1 << 40)
    engine, lasts = app.database.engine, count(2**62)
    with stranger() as speaker, engine.connect() as ear:
        ear.exec_driver_sql("LISTEN fuzzed")
        ear.commit()
        driver: Any = ear.connection.driver_connection

        @settings(
            max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
        )
        @given(st.sampled_from(["", WAITS]), st.lists(texts, max_size=8, unique=True), st.booleans())
        def fuzz(prefix: str, said: list[str], asks: bool) -> None:
            here = Hearing(prefix)
            here.begin(driver)
            last = next(lasts)
            for text in [*said, f"{prefix}{last}"]:
                say(speaker, "fuzzed", text)
            if asks:
                driver.execute("SELECT 1")
                driver.commit()
            hinted, found = False, set[int]()
            any_job = False
            while last not in found:
                heard = here.read()
                hinted |= heard.hinted
                found.update(heard.ids or ())
                if heard.ids is None:  # what came with it stands for any
                    any_job, last = True, next(lasts)
                    say(speaker, "fuzzed", f"{prefix}{last}")
            lists = [text.removeprefix(prefix) for text in said if text.startswith(prefix)]
            assert any_job == (ANY_JOB in lists)
            assert hinted == (bool(prefix) and "" in said)
            assert any_job or found == {last}.union(*map(ids_of, lists))

        fuzz()


HOSTILE = ["²", "٣", "9" * 5_000, "1,²", "-1", "1_0", " 7", "7,", ",", "0", str(2**63), "*", "\x1b[2J", "no"]


@on_postgresql
def test_notifications_of_a_stranger_end_no_wait(
    app: sqlq.App,
    stranger: Callable[[], psycopg.Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, ignored, listeners = threading.Event(), list[int](), set[Hearing]()
    take = Hearing._take

    def takes(self: Hearing, said: Any) -> None:
        take(self, said)
        ignored.append(self._ignored)
        listeners.add(self)

    def both_listen() -> bool:
        for channel in channels(app):
            say(speaker, channel, f"no {next(hears)}")
        return len(listeners) == 2

    monkeypatch.setattr(Hearing, "_take", takes)

    @app.task(name="held")
    def held() -> int:
        assert go.wait(60)
        return 7

    result: list[Any] = []
    hears = count()
    with working(app), stranger() as speaker, caplog.at_level(logging.WARNING):
        job = app.enqueue(held.new())
        waiter = threading.Thread(target=lambda: result.append(app.result(job, timeout="60s")))
        waiter.start()
        wait_until(lambda: app._connected.results.waiter._watches.get(job.id), what="somebody waiting")
        wait_until(both_listen, what="the worker and who waits listening")
        before = len(ignored)
        for channel in channels(app):
            for text in HOSTILE:
                say(speaker, channel, f"{text}{next(hears)}no")
                say(speaker, channel, text)
                say(speaker, channel, WAITS + text)
        wait_until(lambda: len(ignored) >= before + len(HOSTILE) * 6, what="all of it heard")
        go.set()
        waiter.join(60)
        assert result == [7]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "one line a minute, of the lookout and of who waits"
    assert all(line.startswith("notifications that are none of sqlq's were ignored: ") for line in told)
    assert not any(record.exc_info for record in caplog.records)


# -- any number of them --------------------------------------------------------------------------------------


@contextmanager
def flooding(
    stranger: Callable[[], psycopg.Connection], *channels: tuple[str, str]
) -> Iterator[Callable[[], int]]:
    """Name other jobs, as fast as may be, meanwhile; yields how often it was done so far."""
    over, said = threading.Event(), [0]

    def flood() -> None:
        with stranger() as conn:
            while not over.is_set():
                for channel, prefix in channels:
                    first = 10**6 + said[0] * NAMED
                    say(conn, channel, prefix + ",".join(map(str, range(first, first + NAMED))))
                said[0] += 1

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield lambda: said[0]
    finally:
        over.set()
        thread.join(60)


@on_postgresql
def test_a_flood_of_notifications_fills_bounded_memory(
    app: sqlq.App, stranger: Callable[[], psycopg.Connection]
) -> None:
    answer = app.task(name="answer")(lambda n: n)
    workers, waits = channels(app)
    most = [0]
    with working(app) as worker, flooding(stranger, (workers, WAITS), (waits, "")) as said:
        wait_until(lambda: worker._answers._until, what="the flood heard")
        jobs = 0
        while jobs < 50 or said() < FLOOD:
            assert app.result(app.enqueue(answer.new(jobs)), timeout="60s") == jobs
            most.append(len(worker._answers._until))
            jobs += 1
        assert worker._answers._any_until > 0, "beyond the bound it is any job"
    assert 0 < max(most) <= MOST_REMEMBERED


@pytest.mark.integration
@on_postgresql
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_flood_of_notifications_delays_no_job(
    tmp_path: Path,
    database_url: str,
    app: sqlq.App,
    stranger: Callable[[], psycopg.Connection],
    processes: str,
) -> None:
    workers, _ = channels(app)
    command = Command(tmp_path, SQLQ_DATABASE_URL=database_url)

    def grown() -> int:
        return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])

    def run() -> None:
        job = app.enqueue(app.named("shop.send").new(7).set(queue="mail"))
        assert app.wait([job], "60s").ended

    with command.working("-p", processes, anew=True) as started:
        process = psutil.Process(started.pid)
        for _ in range(20):
            run()
        before = grown()
        with flooding(stranger, (workers, WAITS)) as said:
            while said() < FLOOD:
                run()
            assert grown() - before < MOST_GROWN


@on_postgresql
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
    monkeypatch.setattr("sqlq.worker.wait.poller.LOOKOUT_SECONDS", 0.02)
    monkeypatch.setattr(notifications, "LONGEST_SECONDS", 0.0005)
    ran = threading.Event()
    app.task(name="t")(ran.set)
    with working(app), stranger() as conn:
        wait_until(lambda: dry, what="the first look")
        conn.execute(
            "SELECT pg_notify(%s, %s || n || repeat(',7', 3000)) FROM generate_series(1, 10000) n",
            (channels(app)[0], WAITS),
        )
        app.enqueue(app.named("t").new())
        assert ran.wait(60)
    assert all(dry)


def test_expired_requests_are_removed_once_a_second(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(app.database)
    forgot: list[float] = []
    monkeypatch.setattr(answers, "_forget", forgot.append)
    for first in range(1, 2_000, 2):
        answers.asked([first, first + 1])
    assert len(forgot) <= 1 + (forgot[-1] - forgot[0])
    assert len(answers._until) == 2_000
    answers.asked(list(range(MOST_REMEMBERED)))
    assert len(answers._until) == 2_000
    assert answers._any_until > 0


@on_postgresql
def test_too_many_ids_at_once_stand_for_any_job(app: sqlq.App) -> None:
    """Beyond so many bytes a second no ids are read, and the next look covers all jobs."""
    here, engine = Hearing(), app.database.engine
    with engine.connect() as ear, app.database.begin() as conn:
        ear.exec_driver_sql("LISTEN many")
        ear.commit()
        here.begin(ear.connection.driver_connection)
        conn.exec_driver_sql(
            "SELECT pg_notify('many', n || repeat(',7', 3000)) FROM generate_series(1, 100) n"
        )
        conn.commit()
        found: list[int] = []

        def means_any() -> bool:
            ids = here.read().ids
            found.extend(ids or ())
            return ids is None

        wait_until(means_any, timeout=20, what="more than is read")
    assert len(found) < 100_000
