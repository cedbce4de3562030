"""The catalogue of a database: its tables, rules, indexes and views, as data that can be compared.

Alembic's comparison sees neither CHECKs nor views.
"""

from __future__ import annotations

import re
import sqlite3
import subprocess
from typing import Any

import psycopg
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, event, make_url, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn

from sqlq.database import migrate
from sqlq.schema import indexes, rules, tables, types
from tests.mariadb import found as program

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
        return (
            _sqlite(connection)
            if engine.dialect.name == "sqlite"
            else _postgresql(connection, schema or "public")
        )


def _postgresql(connection: Connection, schema: str) -> Catalogue:
    # With the schema first in the search_path definitions name it nowhere, so that two schemas can be
    # compared.
    connection.exec_driver_sql(f"SET LOCAL search_path = {schema}")
    rows = {
        what: connection.execute(text(query), {"schema": schema}).all() for what, query in _POSTGRESQL.items()
    }
    return {
        what: sorted(
            (
                tuple(str(value).replace(f"{schema}.", "") for value in row)
                for row in found
                if "sqlq_version" not in str(row)
            ),
            key=str,
        )
        for what, found in rows.items()
    }


def _sqlite(connection: Connection) -> Catalogue:
    rows = connection.execute(
        text("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE tbl_name <> 'sqlq_version'")
    ).all()
    return {"objects": sorted((kind, name, table, _one_line(sql)) for kind, name, table, sql in rows)}


def _mariadb(connection: Connection, schema: str) -> Catalogue:
    rows = connection.execute(
        text("SELECT table_name, table_type FROM information_schema.tables WHERE table_schema = :schema"),
        {"schema": schema},
    ).all()
    found: Catalogue = {"columns": _mariadb_columns(connection, schema), "objects": []}
    for name, kind in sorted(tuple(row) for row in rows if row[0] != "sqlq_version"):
        statement = connection.exec_driver_sql(f"SHOW CREATE TABLE `{schema}`.`{name}`").all()[0][1]
        said = re.sub(r" AUTO_INCREMENT=\d+", "", statement).replace(f"`{schema}`.", "")
        found["objects"].append((kind, name, name, said))
    return found


def _mariadb_columns(connection: Connection, schema: str) -> list[tuple[object, ...]]:
    """The columns that `tables.py` describes, without those that stand for partial indexes."""
    rows = connection.execute(
        text(
            "SELECT table_name, column_name, REPLACE(column_type, 'longtext', 'text'), is_nullable, "
            "column_default, extra, generation_expression FROM information_schema.columns "
            "WHERE table_schema = :schema ORDER BY table_name, ordinal_position"
        ),
        {"schema": schema},
    )
    known = {(table.name, column.name) for table in _TABLES for column in table.columns}
    return [tuple(map(str, row)) for row in rows if tuple(row[:2]) in known]


_TABLES = tables.metadata.sorted_tables


def _one_line(sql: str | None) -> str:
    """Return a statement as SQLite keeps it, without what spaces, line breaks and doubled brackets add."""
    line = re.sub(r"\s*([(),])\s*", r"\1", re.sub(r"\s+", " ", sql or "").strip())
    # SQLAlchemy 2.0 puts a second pair of brackets around a default that is an expression.
    return re.sub(r"DEFAULT\(\((CAST\(.*?AS INTEGER\))\)\)", r"DEFAULT(\1)", line)


@compiles(CreateColumn, "postgresql")
def _create_column(element: CreateColumn, compiler: Any, **kw: Any) -> str:
    column = element.element
    plain = str(compiler.visit_create_column(element, **kw))
    name = "moment" if isinstance(column.type, types.Moment) else column.info.get("domain")
    if name is None or column.computed is not None or column.table.metadata is not tables.metadata:
        return plain
    words = compiler.dialect.type_compiler_instance.process(column.type, type_expression=column)
    schema = compiler.preparer.schema_for_object(column.table)
    before = f"{compiler.preparer.quote_schema(schema)}." if schema else ""
    return plain.replace(f" {words}", f" {before}sqlq_{name}", 1)


@event.listens_for(tables.metadata, "before_create")
def _create_domains(target: MetaData, connection: Connection, **kw: Any) -> None:
    if connection.dialect.name == "postgresql":
        schema = connection.get_execution_options().get("schema_translate_map", {}).get(tables.TOKEN_SCHEMA)
        before = f"{connection.dialect.identifier_preparer.quote_schema(schema)}." if schema else ""
        for name, (kind, rule) in rules.DOMAINS.items():
            connection.exec_driver_sql(
                f"CREATE DOMAIN {before}sqlq_{name} AS {kind} CONSTRAINT sqlq_{name}_check CHECK ({rule})"
            )


def build_from_models(engine: Engine, schema: str | None = None) -> None:
    """Make what tables.py and indexes.py describe, without any migration, and the views of the newest one."""
    placed = engine.execution_options(schema_translate_map={tables.TOKEN_SCHEMA: schema})
    first: Any = ScriptDirectory(str(migrate.location())).get_revision("0001").module
    with placed.begin() as connection:
        tables.metadata.create_all(connection)
        before = f"{schema}." if schema else ""
        for each in indexes.INDEXES:
            kind, rule = "UNIQUE INDEX" if each.unique else "INDEX", each.where and f" WHERE {each.where}"
            connection.exec_driver_sql(
                f"CREATE {kind} {each.name} ON {before}{each.table} ({each.columns}){rule or ''}"
            )
        for statement in first._views(engine.dialect.name, before):
            connection.exec_driver_sql(statement)


def own_names(engine: Engine) -> set[str]:
    """Return which tables and views of sqlq's are in the default schema."""
    found = catalogue(engine)
    names = (
        {str(row[0]) for row in found["relations"]}
        if "relations" in found
        else {str(row[1]) for row in found["objects"]}
    )
    return names & migrate.OWN_NAMES


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
