"""Many idle processes on one PostgreSQL: their statements and connections.

The counts are from the server's log and its list of sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

import sqlq
from tests.faults.account import record
from tests.kit import wait_until
from tests.kit.databases import migrate
from tests.kit.postgresql import OwnPostgreSQL
from tests.kit.processes import WorkerProcess, worker_process
from tests.programs.play import work

pytestmark = pytest.mark.integration

PROCESSES = 6
LOOK, CLAIM = "AS listens,", "FOR UPDATE SKIP LOCKED) AS ready"
ENTRY = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) \w+ \[(\d+)\] (\S*) LOG:  (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Statement:
    """A statement of a worker, as the server has logged it."""

    at: datetime
    session: int
    text: str


class Fleet:
    """A database whose server logs each statement, and one connection of who enqueues."""

    def __init__(self, server: OwnPostgreSQL, folder: Path) -> None:
        self._log = server.directory / "log"
        self._folder = folder
        self.url = server.create_database()
        name = make_url(self.url).database
        migrate(self.url)
        self._name = str(name)
        self.producer = psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True)
        self.producer.execute(f"ALTER DATABASE \"{name}\" SET log_statement = 'all'")
        self._read_from = 0

    def number(self, question: str) -> int:
        row = self.producer.execute(question).fetchone()
        assert row is not None
        return int(row[0])

    def sessions(self) -> int:
        """How many sessions the workers have."""
        return self.number(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )

    def forget(self) -> None:
        """Count from now on."""
        self._read_from = self._log.stat().st_size

    def asked(self, what: str = "") -> list[Statement]:
        """Return the statements of the workers, in order."""
        with self._log.open(errors="replace") as log:
            log.seek(self._read_from)
            text = log.read()
        entries = list(ENTRY.finditer(text))
        ends = [*(entry.start() for entry in entries[1:]), len(text)][: len(entries)]
        found = [
            Statement(datetime.fromisoformat(entry[1]), int(entry[2]), text[entry.start() : end])
            for entry, end in zip(entries, ends, strict=True)
            if entry[3] == self._name and entry[4] in ("statement", "execute")
        ]
        own = self.producer.info.backend_pid
        return [statement for statement in found if what in statement.text and statement.session != own]

    def look(self, times: int) -> list[Statement]:
        """Wait until the workers' poller has looked so often, and nobody has claimed since.

        Return the statements meanwhile.
        """

        def looked() -> bool:
            asked = [LOOK in s.text for s in self.asked() if CLAIM in s.text or LOOK in s.text]
            return len(asked) >= times and all(asked[-times:])

        wait_until(looked, what="the workers at rest")
        return self.asked()

    def run_one(self) -> None:
        with closing(sqlq.App(self.url)) as app:
            app.wait_all([app.enqueue(work.new())], "30s")

    @contextmanager
    def working(self, processes: int = PROCESSES) -> Iterator[WorkerProcess]:
        with worker_process(
            self._folder, "tests.programs.play:app", self.url, "-p", str(processes)
        ) as worker:
            entered = "SELECT count(*) FROM sqlq_workers"
            wait_until(lambda: self.number(entered) == processes, what="all processes at work")
            self.look(times=3)
            yield worker


@pytest.fixture
def fleet(restartable_postgresql: OwnPostgreSQL, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(restartable_postgresql, tmp_path)
    yield made
    made.producer.close()
    restartable_postgresql.drop_database(made.url)


@pytest.mark.slow
def test_idle_workers_send_few_statements_and_hold_few_connections(fleet: Fleet) -> None:
    with fleet.working():
        fleet.run_one()
        wait_until(lambda: fleet.sessions() <= 2 * (PROCESSES + 1) + 1, what="idle connections closed")
        sessions = fleet.sessions()
        fleet.forget()
        asked = fleet.look(times=12)
    # twelve looks in a row, and no claim between them: earlier statements were not at rest
    first = [i for i, statement in enumerate(asked) if LOOK in statement.text][-12]
    asked = asked[first:]
    seconds = (asked[-1].at - asked[0].at).total_seconds()
    assert len({s.session for s in asked if LOOK in s.text}) == 1, "one lookout for all"
    record("an idle fleet", processes=PROCESSES, sessions=sessions)
    # a service that falls into the time counts more than it does over an hour
    assert len(asked) <= seconds * (1 + 0.2 * (PROCESSES - 1)) + 3


def test_a_single_worker_polls_for_itself(fleet: Fleet) -> None:
    """It receives notifications itself, which its supervisor would forward later."""
    with fleet.working(processes=1):
        assert len({statement.session for statement in fleet.look(times=5) if LOOK in statement.text}) == 1
