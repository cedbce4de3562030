"""The limit: the same work on the same tables, written by hand for psycopg and sqlite3, with no framework at all.

No validation, no retries, no leases to renew, no threads: a loop that claims 100 jobs in one statement, calls the handler for
each and moves the 100 to finished_jobs in another. It is what sqlq's own SQL could at best come to, not a queue to use.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from benchmarks import work
from benchmarks.own import Sqlq, in_transactions, payload

BATCH = 100
TASK = "benchmarks.tasks.noop"


class Limit(Sqlq):
    name = "limit"
    settings = "claims 100, moves 100 to finished_jobs, one thread"

    @contextmanager
    def producer(self, url: str, task: str) -> Iterator[Any]:
        with _producer(url) as producer:
            yield producer

    def workers(self, url: str, task: str, concurrency: int, processes: int) -> list[list[str]]:
        return [["python", "-m", "benchmarks.limit", url]] * processes

    def session(self, url: str, jobs: int) -> dict[str, float]:
        """The caller's own Core INSERT of such a row, with the new id at hand."""
        from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text, insert

        table = Table(
            "jobs",
            MetaData(),
            Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
            Column("queue", Text),
            Column("task", Text),
            Column("payload", Text),
        )

        def enqueue(session: Any, number: int) -> Any:
            row = {"queue": "default", "task": TASK, "payload": payload(number)}
            return session.execute(insert(table), row).inserted_primary_key

        return in_transactions(url, jobs, enqueue)


@contextmanager
def _producer(url: str) -> Iterator[Any]:
    if url.startswith("sqlite"):
        with closing(_sqlite(url)) as connection:
            yield SQLiteProducer(connection)
    else:
        import psycopg

        with psycopg.connect(url, autocommit=True) as postgresql:
            yield PostgreSQLProducer(postgresql)


class PostgreSQLProducer:
    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.insert = "INSERT INTO jobs (queue, task, payload) VALUES (%s, %s, %s)"

    def one(self, number: int) -> None:
        self.connection.execute(self.insert + " RETURNING id", ("default", TASK, payload(number))).fetchone()

    def tick(self, number: int) -> None:
        """With a notification in the same transaction, for whoever sleeps."""
        self.connection.execute(
            f"WITH new AS ({self.insert} RETURNING id) SELECT id, pg_notify('jobs', '') FROM new", ("default", TASK, payload(number))
        ).fetchone()

    def many(self, numbers: Sequence[int]) -> list[int]:
        values = ", ".join(["(%s, %s, %s)"] * len(numbers))
        parameters = [value for number in numbers for value in ("default", TASK, payload(number))]
        cursor = self.connection.execute(f"INSERT INTO jobs (queue, task, payload) VALUES {values} RETURNING id", parameters)
        return [id for (id,) in cursor]


class SQLiteProducer:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def one(self, number: int) -> None:
        self.connection.execute("INSERT INTO jobs (queue, task, payload) VALUES (?, ?, ?)", ("default", TASK, payload(number)))

    def many(self, numbers: Sequence[int]) -> list[int]:
        values = ", ".join(["(?, ?, ?)"] * len(numbers))
        parameters = [value for number in numbers for value in ("default", TASK, payload(number))]
        cursor = self.connection.execute(f"INSERT INTO jobs (queue, task, payload) VALUES {values} RETURNING id", parameters)
        return [id for (id,) in cursor.fetchall()]


def _sqlite(url: str) -> sqlite3.Connection:
    """A connection with sqlq's own settings: write-ahead log, and SQLite's default of a flush to disk for each commit."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    return connection


# -- the worker --------------------------------------------------------------------------------------------------------


def _carried() -> str:
    from sqlq.schema.tables import CARRIED

    return ", ".join(CARRIED)


def work_on_postgresql(url: str) -> None:
    """Claim 100, call, move 100; where there is nothing, wait for a notification, at most a tenth of a second."""
    import json

    import psycopg

    columns = _carried()
    claim = f"""
        WITH due AS MATERIALIZED (
             SELECT id FROM jobs
              WHERE queue = 'default' AND reserved_at IS NULL AND available_at <= statement_timestamp()
              ORDER BY priority DESC, available_at, id LIMIT {BATCH} FOR UPDATE SKIP LOCKED)
        UPDATE jobs
           SET reserved_at = statement_timestamp(), reserved_by = 'limit', lease_expires_at = statement_timestamp() + interval '1 hour',
               lease_token = lease_token + 1, attempts = attempts + 1
          FROM due WHERE jobs.id = due.id
        RETURNING jobs.id, task, payload"""
    move = f"""
        WITH gone AS (DELETE FROM jobs WHERE id = ANY(%s) RETURNING {columns})
        INSERT INTO finished_jobs ({columns}, outcome) SELECT {columns}, 'completed' FROM gone"""
    with psycopg.connect(url, autocommit=True) as connection, psycopg.connect(url, autocommit=True) as listening:
        listening.execute("LISTEN jobs")
        while True:
            claimed = connection.execute(claim).fetchall()
            for _, _, arguments in claimed:
                work.done(*json.loads(arguments)["args"])
            if claimed:
                connection.execute(move, ([id for id, _, _ in claimed],))
            else:
                list(listening.notifies(timeout=0.1, stop_after=1))


def work_on_sqlite(url: str) -> None:
    """Claim 100, call, move 100; where there is nothing, look again after two milliseconds."""
    import json

    columns = _carried()
    moment = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
    claim = f"""
        UPDATE jobs SET reserved_at = {moment}, reserved_by = 'limit', lease_expires_at = {moment} + 3600000,
               lease_token = lease_token + 1, attempts = attempts + 1
         WHERE id IN (SELECT id FROM jobs WHERE queue = 'default' AND reserved_at IS NULL AND available_at <= {moment}
                       ORDER BY priority DESC, available_at, id LIMIT {BATCH})
        RETURNING id, task, payload"""
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
            for _, _, arguments in claimed:
                work.done(*json.loads(arguments)["args"])
            seen = version
            if claimed:
                ids = json.dumps([id for id, _, _ in claimed])
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(
                    f"INSERT INTO finished_jobs ({columns}, outcome) SELECT {columns}, 'completed' FROM jobs "
                    "WHERE id IN (SELECT value FROM json_each(?))",
                    (ids,),
                )
                connection.execute("DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(?))", (ids,))
                connection.execute("COMMIT")
                if len(claimed) == BATCH:
                    seen = None


SUBJECTS = (Limit,)

if __name__ == "__main__":
    (work_on_sqlite if sys.argv[1].startswith("sqlite") else work_on_postgresql)(sys.argv[1])
