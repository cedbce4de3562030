"""The tables that statements know are those of the migrations, by whatever way a database came to be."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine

from sqlq.database import migrate, standing
from sqlq.database.dialects import dialect_of
from sqlq.schema.tables import TOKEN_SCHEMA, metadata
from tests.kit import execute, needs
from tests.migrations.catalogue import NULLABLE, Catalogue, catalogue, columns, indexes, nullable, run_script

pytestmark = pytest.mark.each_database


@pytest.fixture
def migrated(empty: Engine, request: pytest.FixtureRequest) -> Iterator[Catalogue]:
    """The catalogue of another database of the same kind, made by a migration."""
    name = empty.dialect.name
    server = None if name == "sqlite" else request.getfixturevalue(name)
    url = server.create_database() if server else "sqlite://"
    engine = create_engine(url)
    migrate.upgrade(engine, None)
    found = catalogue(engine)
    assert all(found.values()), "an empty part of the catalogue compares nothing"
    yield found
    engine.dispose()
    if server:
        server.drop_database(url)


@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_statements_know_the_tables_of_the_migrations(empty: Engine) -> None:
    migrate.upgrade(empty, None)
    assert indexes(empty) == dialect_of(empty).health.OWN_INDEXES, "OWN_INDEXES in health.py lists each index"
    known = {table: set(names.split()) for table, names in NULLABLE.items()}
    assert nullable(empty) == known, "NULLABLE in catalogue.py lists each column that may be NULL"
    made = columns(empty)
    migrate.downgrade(empty, None, "base")
    metadata.create_all(empty.execution_options(schema_translate_map={TOKEN_SCHEMA: None}))
    assert made == columns(empty)


def test_down_and_up_again_changes_nothing(empty: Engine, migrated: Catalogue) -> None:
    migrate.upgrade(empty, None)
    migrate.downgrade(empty, None, "base")
    left = catalogue(empty)
    # SQLite keeps its own table of AUTOINCREMENT counters, empty.
    assert [row[:2] for rows in left.values() for row in rows if row[1] != "sqlite_sequence"] == []
    migrate.upgrade(empty, None)
    assert catalogue(empty) == migrated


def test_sql_builds_the_same(empty: Engine, migrated: Catalogue) -> None:
    run_script(empty, migrate.render_sql(empty.dialect.name, None))
    assert catalogue(empty) == migrated
    assert standing.check(empty, None).standing == "up to date"
    assert migrate.upgrade(empty, None) == "0001"


@needs("server", empty=True)
def test_tables_in_a_named_schema_equal_those_of_the_default(empty: Engine, migrated: Catalogue) -> None:
    queueing, scripted = (f"sqlq_test_{uuid4().hex[:12]}" for _ in range(2))
    migrate.upgrade(empty, queueing)
    run_script(empty, migrate.render_sql(empty.dialect.name, scripted))
    assert catalogue(empty, queueing) == migrated
    assert catalogue(empty, scripted) == migrated
    assert not any(catalogue(empty).values())
    if empty.dialect.name == "mariadb":  # whose schemas are databases of the server
        execute(empty, f"DROP SCHEMA {queueing}")
        execute(empty, f"DROP SCHEMA {scripted}")


def test_a_catalogue_differs_after_a_changed_index_or_check(empty: Engine, migrated: Catalogue) -> None:
    migrate.upgrade(empty, None)
    if empty.dialect.name == "mariadb":
        execute(empty, "ALTER TABLE jobs MODIFY priority SMALLINT NOT NULL DEFAULT 0")  # without its CHECK
    else:
        execute(empty, "DROP INDEX jobs_rescue")
        execute(empty, "CREATE INDEX jobs_rescue ON jobs (id) WHERE reserved_by IS NOT NULL")
    assert catalogue(empty) != migrated
