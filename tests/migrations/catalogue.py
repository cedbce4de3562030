"""The catalogue of a database: its tables, rules, indexes and views, as data that can be compared.

Alembic's comparison sees neither CHECKs nor views.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import Connection, Engine, create_engine, inspect, make_url, text

from sqlq.database import standing
from sqlq.schema import tables
from tests.kit import execute
from tests.kit.mariadb import found as program

Catalogue = dict[str, list[tuple[object, ...]]]

_POSTGRESQL = {
    "columns": """
        SELECT table_name, column_name, ordinal_position, data_type, domain_name,
               character_maximum_length, is_nullable, column_default,
               is_identity, identity_generation
          FROM information_schema.columns WHERE table_schema = :schema""",
    "constraints": """
        SELECT conrelid::regclass::text, conname, contype, convalidated, pg_get_constraintdef(oid)
          FROM pg_constraint WHERE connamespace = CAST(:schema AS regnamespace)""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = :schema",
    "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = :schema",
    "relations": """
        SELECT relname, relkind, relpersistence, reloptions
          FROM pg_class WHERE relnamespace = CAST(:schema AS regnamespace)""",
}


def catalogue(engine: Engine, schema: str | None = None) -> Catalogue:
    """Return everything a database holds but the version table, in an order of its own."""
    with engine.connect() as connection:
        if engine.dialect.name == "mariadb":
            return _mariadb(connection, schema or str(engine.url.database))
        if engine.dialect.name == "sqlite":
            return _sqlite(connection)
        return _postgresql(connection, schema or "public")


def _postgresql(connection: Connection, schema: str) -> Catalogue:
    # With the schema first in the search_path definitions name it nowhere, so that two schemas can be
    # compared.
    connection.exec_driver_sql(f"SET LOCAL search_path = {schema}")
    found: Catalogue = {}
    for what, query in _POSTGRESQL.items():
        rows = connection.execute(text(query), {"schema": schema}).all()
        own = [map(str, row) for row in rows if "sqlq_version" not in str(row)]
        found[what] = sorted((tuple(each.replace(f"{schema}.", "") for each in row) for row in own), key=str)
    return found


def _sqlite(connection: Connection) -> Catalogue:
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE tbl_name <> 'sqlq_version'"
    rows = connection.execute(text(query)).all()
    return {"objects": sorted((kind, name, table, _one_line(sql)) for kind, name, table, sql in rows)}


def _mariadb(connection: Connection, schema: str) -> Catalogue:
    query = "SELECT table_name, table_type FROM information_schema.tables WHERE table_schema = :schema"
    rows = connection.execute(text(query), {"schema": schema}).all()
    found: Catalogue = {"objects": []}
    for name, kind in sorted(tuple(row) for row in rows if row[0] != "sqlq_version"):
        statement = connection.exec_driver_sql(f"SHOW CREATE TABLE `{schema}`.`{name}`").all()[0][1]
        said = re.sub(r" AUTO_INCREMENT=\d+", "", statement).replace(f"`{schema}`.", "")
        found["objects"].append((kind, name, name, said))
    return found


_COLUMNS = {
    "postgresql": """
        SELECT table_name, column_name, data_type, character_maximum_length
          FROM information_schema.columns
          JOIN information_schema.tables USING (table_schema, table_name)
         WHERE table_schema = current_schema() AND table_type = 'BASE TABLE'""",
    "sqlite": """
        SELECT m.name, c.name, c.type
          FROM sqlite_master m CROSS JOIN pragma_table_xinfo(m.name) c WHERE m.type = 'table'""",
    "mariadb": """
        SELECT table_name, column_name, REPLACE(column_type, 'longtext', 'text')
          FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
         WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND extra NOT LIKE '%INVISIBLE%'""",
}


def columns(engine: Engine) -> set[tuple[object, ...]]:
    """Return the columns that a statement may name, with the types that they have or their domains are of,
    and the primary keys."""
    own = {table.name for table in tables.metadata.sorted_tables}
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(text(_COLUMNS[engine.dialect.name]))]
    keys = {(table, *inspect(engine).get_pk_constraint(table)["constrained_columns"]) for table in own}
    return keys | {row for row in rows if row[0] in own}


_CARRIED = """backoff cursor errors flow_id batch_key headers label limit_key max_attempts on_failure
    on_success progress progress_note progress_of replay_of reserved_at reserved_by retention_ms schedule
    scheduled_for start_by timeout_ms unique_key"""
NULLABLE = {
    "jobs": f"{_CARRIED} blocked_by cancel_requested_at due_at lease_expires_at unknown_since",
    "finished_jobs": f"{_CARRIED} expires_at reason result start_ms",
    "failed_jobs": f"{_CARRIED} exception expires_at message start_ms traceback",
    "sqlq_audit": "database_user ended_at number stopped_at",
    "sqlq_edges": "",
    "sqlq_flows": "name",
    "sqlq_limits": "closed_until max_running next_free_at period_ms pinned_at rate",
    "sqlq_queues": "paused_at paused_until",
    "sqlq_schedules": "declared_at error error_at next_at paused_at retired_at service",
    "sqlq_signals": "look_at value",
    "sqlq_waits": "outcome until value",
    "sqlq_wakes": "max_running period_ms rate",
    "sqlq_workers": "asked asked_at cancels_at clock_at name queues start_error supervisor_pid",
}
"""The columns of each table that may be NULL, on every database. Statements do not depend on it."""


def nullable(engine: Engine) -> dict[str, set[str]]:
    """Return the columns of each table that a statement may name and that may be NULL."""
    found = inspect(engine)
    columns = {table: found.get_columns(table.name) for table in tables.metadata.sorted_tables}
    return {
        table.name: {each["name"] for each in known if each["nullable"] and each["name"] in table.c}
        for table, known in columns.items()
    }


def indexes(engine: Engine) -> set[str | None]:
    """Return the names of the indexes of sqlq's tables, without those of primary keys."""
    found = inspect(engine)
    own = [table.name for table in tables.metadata.sorted_tables]
    return {index["name"] for table in own for index in found.get_indexes(table)}


def _one_line(sql: str | None) -> str:
    """Return a statement as SQLite keeps it, without what spaces and line breaks add."""
    return re.sub(r"\s*([(),])\s*", r"\1", re.sub(r"\s+", " ", sql or "").strip())


def own_names(engine: Engine) -> set[str]:
    """Return which tables and views of sqlq's are in the default schema."""
    found = catalogue(engine)
    names = [row[0] for row in found.get("relations", ())] + [row[1] for row in found.get("objects", ())]
    return standing.OWN_NAMES & {str(name) for name in names}


def run_script(engine: Engine, script: str) -> None:
    """Run SQL as a person's client would: as one text, with no help of SQLAlchemy's."""
    if engine.dialect.name == "sqlite":
        file = sqlite3.connect(make_url(engine.url).database or "")
        file.executescript(script)
        file.close()
    elif engine.dialect.name == "mariadb":
        at = engine.url
        client = [program("mariadb"), "--no-defaults", f"-h{at.host}", f"-P{at.port}", f"-u{at.username}"]
        subprocess.run([*client, str(at.database)], input=script.encode(), check=True)
    else:
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(script.encode())


@contextmanager
def another_database(like: Engine, file: Path) -> Iterator[Engine]:
    """An empty database beside another one."""
    name = f"{like.url.database}_{file.stem}"
    in_a_file = like.dialect.name == "sqlite"
    outside = like.execution_options(isolation_level="AUTOCOMMIT")
    if not in_a_file:
        execute(outside, f"CREATE DATABASE {name}")
    engine = create_engine(f"sqlite:///{file}" if in_a_file else like.url.set(database=name))
    yield engine
    engine.dispose()
    if not in_a_file:
        execute(outside, f"DROP DATABASE {name}")
