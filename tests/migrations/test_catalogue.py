"""The models and the migrations describe the same database, by whatever way it came to be."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine

from sqlq.database import migrate
from sqlq.schema.tables import TOKEN_SCHEMA, metadata
from tests.kit import execute
from tests.migrations.catalogue import Catalogue, build_from_models, catalogue, run_script
from tests.migrations.later_release import on_servers


@pytest.fixture
def modelled(empty: Engine, request: pytest.FixtureRequest) -> Iterator[Catalogue]:
    """The catalogue of another database of the same kind, made from tables.py, and on MariaDB by a migration:
    its indexes are others."""
    name = empty.dialect.name
    server = None if name == "sqlite" else request.getfixturevalue(name)
    url = server.create_database() if server else "sqlite://"
    engine = create_engine(url)
    if name == "mariadb":
        migrate.upgrade(engine, None)
    else:
        build_from_models(engine)
    yield catalogue(engine)
    engine.dispose()
    if server:
        server.drop_database(url)


def test_models_and_migrations_agree(empty: Engine, modelled: Catalogue) -> None:
    migrate.upgrade(empty, None)
    assert catalogue(empty) == modelled
    assert all(modelled.values()), "an empty part of the catalogue compares nothing"


@pytest.mark.parametrize("empty_database_url", ["mariadb"], indirect=True)
def test_models_and_migrations_agree_on_columns(empty: Engine) -> None:
    migrate.upgrade(empty, None)
    made = catalogue(empty)["columns"]
    migrate.downgrade(empty, None, "base")
    metadata.create_all(empty.execution_options(schema_translate_map={TOKEN_SCHEMA: None}))
    assert made == catalogue(empty)["columns"]


def test_down_and_up_again_changes_nothing(empty: Engine, modelled: Catalogue) -> None:
    migrate.upgrade(empty, None)
    migrate.downgrade(empty, None, "base")
    left = catalogue(empty)
    # SQLite keeps its own table of AUTOINCREMENT counters, empty.
    assert [row[:2] for rows in left.values() for row in rows if row[1] != "sqlite_sequence"] == []
    migrate.upgrade(empty, None)
    assert catalogue(empty) == modelled


def test_sql_builds_the_same(empty: Engine, modelled: Catalogue) -> None:
    run_script(empty, migrate.render_sql(empty.dialect.name, None))
    assert catalogue(empty) == modelled
    assert migrate.check(empty, None).standing == "up to date"
    assert migrate.upgrade(empty, None) == "0001"


@on_servers
def test_tables_in_a_named_schema_equal_those_of_the_default(empty: Engine, modelled: Catalogue) -> None:
    queueing, scripted = (f"sqlq_test_{uuid4().hex[:12]}" for _ in range(2))
    migrate.upgrade(empty, queueing)
    run_script(empty, migrate.render_sql(empty.dialect.name, scripted))
    assert catalogue(empty, queueing) == modelled
    assert catalogue(empty, scripted) == modelled
    assert not any(catalogue(empty).values())
    if empty.dialect.name == "mariadb":  # whose schemas are databases of the server
        execute(empty, f"DROP SCHEMA {queueing}")
        execute(empty, f"DROP SCHEMA {scripted}")


def test_a_catalogue_differs_after_a_changed_index_or_check(empty: Engine, modelled: Catalogue) -> None:
    migrate.upgrade(empty, None)
    if empty.dialect.name == "mariadb":
        execute(empty, "ALTER TABLE jobs MODIFY priority SMALLINT NOT NULL DEFAULT 0")  # without its CHECK
    else:
        execute(empty, "DROP INDEX jobs_rescue")
        execute(empty, "CREATE INDEX jobs_rescue ON jobs (id) WHERE reserved_by IS NOT NULL")
    assert catalogue(empty) != modelled
