"""Statements of tests: what each kind of database calls the same thing, and what it reads and waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from sqlq.schema.types import MARIADB_NOW, POSTGRESQL_NOW, SQLITE_NOW
from tests.kit.waiting import let_pass


def execute(engine: Engine, statement: str, **parameters: Any) -> Any:
    """Run a statement in a transaction of its own and return its first value, if it has any."""
    with engine.begin() as connection:
        result = connection.execute(text(statement), parameters)
        return result.scalar() if result.returns_rows else None


NOW = {"postgresql": POSTGRESQL_NOW, "sqlite": f"({SQLITE_NOW})", "mariadb": MARIADB_NOW}
"""The clock of each kind of database, in SQL."""


def span(engine: Engine | Connection, seconds: float) -> str:
    """Return a span of time in the database's SQL, to be added to a time."""
    return {
        "postgresql": f"interval '{seconds} s'",
        "sqlite": f"{round(seconds * 1_000)}",
        "mariadb": f"INTERVAL {round(seconds * 1_000_000)} MICROSECOND",
    }[engine.dialect.name]


def refuse(engine: Engine, event: str, when: str = "1 = 1", says: str = "refused", first: str = "") -> None:
    """Have the database refuse rows by a trigger of the host's own; `event` is as "INSERT ON jobs".

    Where it has a server, `first` comes before, in the trigger's language.
    """
    statements = {
        "sqlite": [
            f"CREATE TRIGGER refuse BEFORE {event} WHEN {when} BEGIN SELECT RAISE(ABORT, '{says}'); END"
        ],
        "postgresql": [
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN {first}RAISE EXCEPTION '{says}'; END $$",
            f"CREATE TRIGGER refuse BEFORE {event} FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION refuse()",
        ],
        "mariadb": [
            f"CREATE TRIGGER refuse BEFORE {event} FOR EACH ROW IF {when} THEN {first}"
            f"SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{says}'; END IF"
        ],
    }[engine.dialect.name]
    with engine.begin() as conn:
        for statement in statements:
            conn.execution_options(no_parameters=True).exec_driver_sql(statement)


def insert_many(conn: Connection, rows: int, into: str, values: str) -> None:
    """Insert so many rows into a table, as in "jobs (task)". Their values are SQL about `i`, their number."""
    numbers = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :rows)"
    if conn.dialect.name == "mariadb":
        conn.exec_driver_sql(f"SET SESSION max_recursive_iterations = {rows}")
    conn.execute(text(f"INSERT INTO {into} {numbers} SELECT {values} FROM n"), {"rows": rows})


_HANDLER = "SHOW SESSION STATUS LIKE 'Handler_read%'"


def rows_read(conn: Connection, statement: str, parameters: Any = None) -> int:
    """Run a statement and return how many rows the storage engine read for it (MariaDB)."""

    def read() -> int:
        rows = conn.execution_options(no_parameters=True).exec_driver_sql(_HANDLER)
        return sum(int(number) for _, number in rows)

    before = read()
    conn.exec_driver_sql(statement, parameters).close()
    return read() - before


def waiting_for_locks(engine: Engine) -> Any:
    """Return how many sessions of the test's database wait for another's transaction (on a server)."""
    waiting = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND wait_event_type = 'Lock'",
        "mariadb": "SELECT count(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist "
        "p ON p.id = t.trx_mysql_thread_id WHERE p.db = database() AND t.trx_state = 'LOCK WAIT'",
    }
    if engine.dialect.name == "mariadb":
        let_pass(0.11, "the server answers from memory what is asked for more often")
    return execute(engine, waiting[engine.dialect.name])


@contextmanager
def received(by: Connection | Engine | type[Engine]) -> Iterator[list[tuple[str, Any]]]:
    """Collect the statements that a connection, or each of an engine, sends, with their parameters."""
    got: list[tuple[str, Any]] = []

    def collect(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        got.append((statement, parameters))

    event.listen(by, "before_cursor_execute", collect)
    yield got
    event.remove(by, "before_cursor_execute", collect)


def count(engine: Engine, table: str = "jobs") -> int:
    """Return how many rows a table has, as others see it."""
    return len(committed(engine, table, "1"))


def committed(engine: Engine, table: str = "jobs", column: str = "id") -> list[int]:
    """Return a column of a table in order, as others see it."""
    with engine.connect() as conn:
        return list(conn.scalars(text(f"SELECT {column} FROM {table} ORDER BY 1")))


@contextmanager
def locked(engine: Engine, query: str | int) -> Iterator[None]:
    """Have somebody's transaction lock what a query reads, or a job's row."""
    if isinstance(query, int):
        query = f"SELECT 1 FROM jobs WHERE id = {query} FOR UPDATE"
    with engine.connect() as conn, conn.begin() as transaction:
        assert conn.execute(text(query)).all()
        yield
        transaction.rollback()
