"""Log lines about a database that is away, once for all loops of a worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

import sqlq
from sqlq.database.timeouts import waits_while
from sqlq.store.workers import notify
from sqlq.worker.maintain.maintenance import ServiceLoop
from sqlq.worker.maintain.services import Service
from sqlq.worker.settle.after import notify_idle
from sqlq.worker.threads import loop as loops
from sqlq.worker.threads.loop import Outage
from tests.kit import needs


@pytest.fixture(autouse=True)
def outages_end() -> Iterator[None]:
    yield
    loops._outages.clear()


def refused(database_url: str, *statements: str) -> DBAPIError:
    """Return the error of the database for the last of some statements."""
    engine = create_engine(database_url)
    try:
        with engine.connect() as conn:
            for statement in statements[:-1]:
                conn.execute(text(statement))
            with pytest.raises(DBAPIError) as met:
                conn.execute(text(statements[-1]))
    finally:
        engine.dispose()
    return met.value


@pytest.fixture
def refusal(database_url: str) -> DBAPIError:
    """The error of a standby for a write."""
    scope = "SESSION " if database_url.startswith("mariadb") else ""
    return refused(database_url, f"SET {scope}TRANSACTION READ ONLY", "CREATE TABLE note (id INTEGER)")


SILENT, NO_WRITES, BACK = (
    "the database does not answer",
    "the database takes no writes",
    "the database is back",
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return how the lines of the log begin."""
    return [line.split(" (")[0].split(" after")[0] for line in caplog.messages]


@needs("server")
def test_an_outage_ends_by_a_write_and_is_no_second_one_for_a_stale_connection(
    refusal: DBAPIError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    listening, claiming = Outage("listening"), Outage("claiming")
    listening.note(refusal)
    claiming.note(refusal)
    claiming.over(wrote=False)
    claiming.note(refusal)
    assert said(caplog) == [NO_WRITES]
    claiming.over()
    listening.over()
    assert said(caplog) == [NO_WRITES, BACK], "once"
    caplog.clear()
    beating, claiming = Outage("beating"), Outage("claiming")
    refusal.connection_invalidated = True  # as a worker has its engine mark it
    for outage in (beating, claiming):
        outage.note(refusal)
        outage.note(refusal)
    claiming.over()
    assert beating.note(refusal) <= 0.1, "its next connection is a new one, so it tries soon"
    beating.over()
    assert said(caplog) == [NO_WRITES, BACK]
    claiming.note(refusal)
    claiming.note(refusal)
    assert said(caplog) == [NO_WRITES, BACK, NO_WRITES]


AWAY = DBAPIError("SELECT 1", None, ConnectionError("refused"))


class Turns(Service):
    """A service of which each turn is another one."""

    activity = "looking"

    def __init__(self, *turns: Callable[[], object]) -> None:
        self._turns = list(turns)
        self.all_done = threading.Event()

    def run(self) -> float:
        if not self._turns:
            self.all_done.set()
            return 60.0
        self._turns.pop(0)()
        return 0.0

    def do(self) -> None:
        loop = ServiceLoop([self])
        loop.start()
        try:
            assert self.all_done.wait(10)
        finally:
            loop.close(10)


def fails(error: DBAPIError) -> Callable[[], object]:
    def turn() -> None:
        raise error

    return turn


def looks(app: sqlq.App) -> None:
    with app.database.read() as conn:
        conn.execute(text("SELECT 1"))


def writes(app: sqlq.App) -> None:
    with app.database.begin() as conn:
        conn.execute(text("DELETE FROM jobs WHERE id = 0"))


def test_a_turn_without_a_statement_ends_no_outage(app: sqlq.App, caplog: pytest.LogCaptureFixture) -> None:
    """For example a service of the host, or one that is not due: the database may still be away."""
    told: list[list[str]] = []
    away = fails(AWAY)

    def tell() -> None:
        told.append(said(caplog))

    Turns(away, away, tell, tell, away, away, lambda: looks(app), tell).do()
    assert told == [[SILENT], [SILENT], [SILENT, BACK]]


@needs("server")
def test_a_turn_that_only_reads_does_not_end_an_outage_at_a_standby(
    app: sqlq.App, refusal: DBAPIError, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[list[str]] = []
    away = fails(refusal)

    def tell() -> None:
        told.append(said(caplog))

    Turns(away, away, lambda: looks(app), tell, away, lambda: writes(app), tell).do()
    assert told == [[NO_WRITES], [NO_WRITES, BACK]]


def test_a_refused_service_is_logged_while_outages_are_logged_elsewhere(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other loops do not meet the error. Without this line a service that never runs would go unnoticed."""
    pruning, sweeping = Outage("pruning jobs", quiet=True), Outage("sweeping", quiet=True)
    pruning.note(AWAY)
    assert caplog.messages == []
    error = refused(database_url, "SELECT * FROM nowhere")
    for outage in (pruning, sweeping, pruning, sweeping):
        outage.note(error)
    assert [said.split(":")[0] for said in caplog.messages] == [
        f"the database refuses what {doing} needs" for doing in ("pruning jobs", "sweeping")
    ]
    assert "nowhere" in caplog.messages[0]


@needs("roles")
def test_a_missing_right_is_logged_with_its_grant(
    app: sqlq.App, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = refused(database_url, "SET ROLE pg_monitor", "DELETE FROM failed_jobs WHERE id = 1")
    Outage("pruning jobs", quiet=True).note(error)
    assert caplog.messages == [
        "the database refuses what pruning jobs needs: permission denied for table failed_jobs; "
        "the owner of the tables mends it by what `sqlq grants ROLE --as worker` prints; "
        "trying again once it is mended"
    ]


def test_outages_are_per_database(app: sqlq.App, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two Apps in one process: the answer of one database is no news of the other."""
    caplog.set_level(logging.WARNING)
    other = sqlq.App(f"sqlite:///{tmp_path / 'other.db'}")
    here, there = Outage("claiming", app.database), Outage("claiming", other.database)
    settling = Outage("settling", app.database.for_loops)
    for outage in (here, there):
        outage.note(AWAY)
        outage.note(AWAY)
    settling.note(AWAY)
    assert said(caplog) == [SILENT, SILENT], "each of its own, once for all loops"
    there.over()
    here.note(AWAY)
    assert said(caplog) == [SILENT, SILENT, BACK], "the other is still away, which is known"
    here.over()
    assert said(caplog) == [SILENT, SILENT, BACK, BACK]
    other.close()


@needs("one_writer")
def test_a_stopped_worker_does_not_wait_for_other_writers_of_the_file(app: sqlq.App) -> None:
    """Each writer before it may wait for the file's lock. A stopped worker would wait for all of them."""
    with ThreadPoolExecutor(1) as other, app.database.begin():

        def stopped() -> None:
            with waits_while(lambda: 0.0), app.database.begin():
                pytest.fail("another one writes")

        with pytest.raises(OperationalError, match="database is locked") as refused:
            other.submit(stopped).result(20)
    assert app.database.dialect.driver.problem(refused.value).is_away


@needs("postgresql")
def test_a_mistake_beside_the_loops_is_logged_with_its_traceback(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage there is not logged: the loops log it."""
    caplog.set_level(logging.INFO)
    for error in (AWAY, TypeError("no number")):
        monkeypatch.setattr(notify, "notify", Mock(side_effect=error))
        notify_idle(app.database)
    (line,) = caplog.records
    assert line.levelname == "ERROR"
    assert line.exc_info is not None
    assert line.exc_info[0] is TypeError
