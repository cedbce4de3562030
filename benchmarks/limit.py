"""The limits: the same work written by hand for psycopg, sqlite3 and PyMySQL, with no framework at all.

They have no validation, no retries, no leases to renew and no threads. A loop claims 100 jobs in one
transaction, calls the handler for each, and moves the 100 to a history in another transaction.

The limit "lean" works on tables of its own, as small as a queue can have them. A team without sqlq would
write it. The limit "limit" works on sqlq's tables. The rows of sqlq cost the difference between the two, and
its Python costs the difference between "limit" and sqlq.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar

from benchmarks import work
from benchmarks.own import Sqlq, in_transactions, payload

BATCH = 100
CONSTANTS = {"queue": "default", "task": "benchmarks.tasks.noop"}


class Limit(Sqlq):
    name = "limit"
    settings = "sqlq's tables; claims 100, moves 100 to finished_jobs, one thread"
    given: ClassVar[tuple[str, ...]] = ("queue", "task", "payload")
    """The columns that an INSERT names."""

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        if url.startswith("sqlite"):
            with closing(_sqlite(url)) as connection:
                yield SQLiteProducer(connection, self.given)
        elif url.startswith("mariadb"):
            from benchmarks.servers import mariadb_connection

            with mariadb_connection(url) as mariadb, mariadb.cursor() as cursor:
                yield MariaDBProducer(cursor, self.given)
        else:
            import psycopg

            with psycopg.connect(url, autocommit=True) as postgresql:
                yield PostgreSQLProducer(postgresql, self.given)

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [["python", "-m", "benchmarks.limit", self.name, url]] * processes

    def session(self, url: str, jobs: int) -> dict[str, float]:
        """The caller's own Core INSERT of such a row, with the new id at hand."""
        from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text, insert

        id = Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
        table = Table("jobs", MetaData(), id, *(Column(name, Text) for name in self.given))

        def enqueue(session: Any, number: int) -> Any:
            row = dict(zip(self.given, _row(self.given, number), strict=True))
            return session.execute(insert(table), row).inserted_primary_key

        return in_transactions(url, jobs, enqueue)

    def move(self) -> tuple[str, str]:
        """Return where the columns of a job that ended go, and what is written there."""
        from sqlq.schema.tables import CARRIED

        carried = ", ".join(f'"{name}"' for name in CARRIED)
        return f"finished_jobs ({carried}, outcome)", f"{carried}, 'finished'"

    def reserve(self, moment: str, hour: str) -> str:
        """Return what a claim sets."""
        return (
            f"reserved_at = {moment}, reserved_by = 'limit', lease_expires_at = {moment} + {hour}, "
            "lease_token = lease_token + 1, attempts = attempts + 1"
        )


class Lean(Limit):
    name = "lean"
    settings = "tables of its own, as small as can be; claims 100, moves 100 to history, one thread"
    given = ("queue", "payload")
    settled = "SELECT count(*) FROM history"

    def prepare(self, url: str) -> None:
        """Make the tables: a queue, two indexes on it, a history."""
        if url.startswith("sqlite"):
            with closing(_sqlite(url)) as connection:
                connection.executescript(
                    _LEAN.format(
                        id="INTEGER PRIMARY KEY AUTOINCREMENT",
                        moment="INTEGER",
                        now=f"({_NOW})",
                        big="INTEGER",
                    )
                )
        elif url.startswith("mariadb"):
            from benchmarks.servers import mariadb_connection

            with mariadb_connection(url) as mariadb, mariadb.cursor() as cursor:
                for statement in filter(str.strip, _LEAN_MARIADB.split(";")):
                    cursor.execute(statement)
        else:
            import psycopg

            with psycopg.connect(url, autocommit=True) as postgresql:
                id = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
                postgresql.execute(
                    _LEAN.format(id=id, moment="timestamptz", now="statement_timestamp()", big="bigint")
                )

    def move(self) -> tuple[str, str]:
        return "history (id, queue, payload, attempts)", "id, queue, payload, attempts"

    def reserve(self, moment: str, hour: str) -> str:
        return f"reserved_at = {moment}, attempts = attempts + 1"


_LEAN = """
    CREATE TABLE jobs (
        id {id}, queue text NOT NULL, payload text NOT NULL, priority smallint NOT NULL DEFAULT 0,
        attempts integer NOT NULL DEFAULT 0, available_at {moment} NOT NULL DEFAULT {now},
        reserved_at {moment});
    CREATE INDEX jobs_due ON jobs (queue, priority DESC, available_at, id) WHERE reserved_at IS NULL;
    CREATE INDEX jobs_reserved ON jobs (reserved_at) WHERE reserved_at IS NOT NULL;
    CREATE TABLE history (
        id {big} PRIMARY KEY, queue text NOT NULL, payload text NOT NULL, attempts integer NOT NULL,
        finished_at {moment} NOT NULL DEFAULT {now});
"""

# without partial indexes, reserved_at is the first column of both
_LEAN_MARIADB = """
    CREATE TABLE jobs (
        id bigint AUTO_INCREMENT PRIMARY KEY, queue varchar(100) NOT NULL, payload longtext NOT NULL,
        priority smallint NOT NULL DEFAULT 0, attempts integer NOT NULL DEFAULT 0,
        available_at datetime(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), reserved_at datetime(6));
    CREATE INDEX jobs_claim ON jobs (reserved_at, queue, priority, available_at, id);
    CREATE INDEX jobs_reserved ON jobs (reserved_at);
    CREATE TABLE history (
        id bigint PRIMARY KEY, queue varchar(100) NOT NULL, payload longtext NOT NULL,
        attempts integer NOT NULL, finished_at datetime(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)));
"""


def _row(given: Sequence[str], number: int) -> list[str]:
    return [CONSTANTS.get(name) or payload(number) for name in given]


class PostgreSQLProducer:
    mark = "%s"

    def __init__(self, connection: Any, given: Sequence[str]) -> None:
        self.connection = connection
        self.given = given
        self.row = f"({', '.join([self.mark] * len(given))})"
        self.insert = f"INSERT INTO jobs ({', '.join(given)}) VALUES "
        self.one_row = f"{self.insert}{self.row} RETURNING id"
        self.notifying = f"WITH new AS ({self.one_row}) SELECT id, pg_notify('jobs', '') FROM new"

    def run(self, statement: str, parameters: Sequence[Any]) -> Sequence[Any]:
        rows: Sequence[Any] = self.connection.execute(statement, parameters).fetchall()
        return rows

    def one(self, number: int) -> None:
        self.run(self.one_row, _row(self.given, number))

    def tick(self, number: int) -> None:
        """With a notification in the same transaction, for a worker that sleeps."""
        self.run(self.notifying, _row(self.given, number))

    def many(self, numbers: Sequence[int]) -> list[int]:
        statement = f"{self.insert}{', '.join([self.row] * len(numbers))} RETURNING id"
        parameters = [value for number in numbers for value in _row(self.given, number)]
        return [id for (id,) in self.run(statement, parameters)]


class SQLiteProducer(PostgreSQLProducer):
    mark = "?"

    def tick(self, number: int) -> None:
        self.one(number)


class MariaDBProducer(SQLiteProducer):
    mark = "%s"

    def run(self, statement: str, parameters: Sequence[Any]) -> Sequence[Any]:
        self.connection.execute(statement, parameters)
        rows: Sequence[Any] = self.connection.fetchall()
        return rows


def _sqlite(url: str) -> sqlite3.Connection:
    """A connection with sqlq's own settings: write-ahead log, and SQLite's default of a flush to disk for
    each commit."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    return connection


# -- the worker ----------------------------------------------------------------------------------------------


def work_on_postgresql(subject: Limit, url: str) -> None:
    """Claim 100, call, move 100; where there is nothing, wait for a notification, at most a tenth of a
    second."""
    import json

    import psycopg

    into, what = subject.move()
    claim = f"""
        WITH due AS MATERIALIZED (
             SELECT id FROM jobs
              WHERE queue = 'default' AND reserved_at IS NULL AND available_at <= statement_timestamp()
              ORDER BY priority DESC, available_at, id LIMIT {BATCH} FOR UPDATE SKIP LOCKED)
        UPDATE jobs SET {subject.reserve("statement_timestamp()", "interval '1 hour'")}
          FROM due WHERE jobs.id = due.id
        RETURNING jobs.id, payload"""
    move = f"""
        WITH gone AS (DELETE FROM jobs WHERE id = ANY(%s) RETURNING *)
        INSERT INTO {into} SELECT {what} FROM gone"""
    with (
        psycopg.connect(url, autocommit=True) as connection,
        psycopg.connect(url, autocommit=True) as listening,
    ):
        listening.execute("LISTEN jobs")
        while True:
            claimed = connection.execute(claim).fetchall()
            for _, arguments in claimed:
                work.done(*json.loads(arguments)["args"])
            if claimed:
                connection.execute(move, ([id for id, _ in claimed],))
            else:
                list(listening.notifies(timeout=0.1, stop_after=1))


def work_on_sqlite(subject: Limit, url: str) -> None:
    """Claim 100, call, move 100; where there is nothing, look again after two milliseconds."""
    import json

    into, what = subject.move()
    claim = f"""
        UPDATE jobs SET {subject.reserve(_NOW, "3600000")}
         WHERE id IN (SELECT id FROM jobs
                       WHERE queue = 'default' AND reserved_at IS NULL AND available_at <= {_NOW}
                       ORDER BY priority DESC, available_at, id LIMIT {BATCH})
        RETURNING id, payload"""
    of_these = "WHERE id IN (SELECT value FROM json_each(?))"
    with closing(_sqlite(url)) as connection:
        seen = None
        while True:
            version = connection.execute("PRAGMA data_version").fetchone()
            if version == seen:
                time.sleep(0.002)
                continue
            connection.execute("BEGIN IMMEDIATE")
            claimed = connection.execute(claim).fetchall()
            connection.execute("COMMIT")
            for _, arguments in claimed:
                work.done(*json.loads(arguments)["args"])
            seen = version
            if claimed:
                ids = json.dumps([id for id, _ in claimed])
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"INSERT INTO {into} SELECT {what} FROM jobs {of_these}", (ids,))
                connection.execute(f"DELETE FROM jobs {of_these}", (ids,))
                connection.execute("COMMIT")
                if len(claimed) == BATCH:
                    seen = None


def work_on_mariadb(subject: Limit, url: str) -> None:
    """Claim 100, call, move 100; where there is nothing, look again after ten milliseconds."""
    import json

    from benchmarks.servers import mariadb_connection

    into, what = subject.move()
    ready = "reserved_at IS NULL AND queue = 'default'"
    due = f"""
        SELECT id, payload FROM jobs FORCE INDEX (jobs_claim)
         WHERE {ready} AND priority = (SELECT MAX(priority) FROM jobs WHERE {ready})
           AND available_at <= UTC_TIMESTAMP(6)
         ORDER BY available_at, id LIMIT {BATCH} FOR UPDATE SKIP LOCKED"""
    reserve = f"""
        UPDATE jobs FORCE INDEX (PRIMARY) SET {subject.reserve("UTC_TIMESTAMP(6)", "INTERVAL 1 HOUR")}
         WHERE id IN """
    copy = f"INSERT INTO {into} SELECT {what} FROM jobs FORCE INDEX (PRIMARY) WHERE id IN "
    with mariadb_connection(url) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION tx_isolation = 'READ-COMMITTED'")
        while True:
            cursor.execute("BEGIN")
            cursor.execute(due)
            if not (claimed := cursor.fetchall()):
                cursor.execute("COMMIT")
                time.sleep(0.01)
                continue
            ids = f"({', '.join(str(id) for id, _ in claimed)})"
            cursor.execute(reserve + ids)
            cursor.execute("COMMIT")
            for _, arguments in claimed:
                work.done(*json.loads(arguments)["args"])
            cursor.execute("BEGIN")
            cursor.execute(copy + ids)
            # with an order and a limit, the rows are found by their ids, not by a scan
            cursor.execute(f"DELETE FROM jobs WHERE id IN {ids} ORDER BY id LIMIT {BATCH}")
            cursor.execute("COMMIT")


_NOW = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
SUBJECTS = (Limit, Lean)

if __name__ == "__main__":
    from benchmarks.peers import find

    chosen: Any = find(sys.argv[1])
    works = {"sqlite": work_on_sqlite, "mariadb": work_on_mariadb, "postgresql": work_on_postgresql}
    works[re.split(r"\W", sys.argv[2])[0]](chosen, sys.argv[2])
