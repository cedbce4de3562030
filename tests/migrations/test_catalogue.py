"""The models and the migrations describe the same database, by whatever way it came to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from sqlq.database import migrate
from tests.migrations.catalogue import Catalogue, build_from_models, catalogue, run_script
from tests.servers import PostgreSQL


@pytest.fixture
def modelled(empty: Engine, postgresql: PostgreSQL) -> Iterator[Catalogue]:
    """The catalogue of another database of the same kind, made from tables.py and views.py."""
    url = "sqlite://" if empty.dialect.name == "sqlite" else postgresql.create_database()
    engine = create_engine(url)
    build_from_models(engine)
    yield catalogue(engine)
    engine.dispose()
    if empty.dialect.name == "postgresql":
        postgresql.drop_database(url)


def test_models_and_migrations_agree(empty: Engine, modelled: Catalogue) -> None:
    migrate.upgrade(empty, None)
    assert catalogue(empty) == modelled
    assert all(modelled.values()), "an empty part of the catalogue compares nothing"


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


@pytest.mark.parametrize("empty_database_url", ["postgresql"], indirect=True)
def test_a_schema_of_its_own_holds_the_same(empty: Engine, modelled: Catalogue) -> None:
    migrate.upgrade(empty, "queueing")
    run_script(empty, migrate.render_sql("postgresql", "scripted"))
    assert catalogue(empty, "queueing") == modelled
    assert catalogue(empty, "scripted") == modelled
    assert not any(catalogue(empty).values())


def test_a_difference_is_seen(empty: Engine, modelled: Catalogue) -> None:
    migrate.upgrade(empty, None)
    with empty.begin() as connection:
        connection.execute(text("DROP INDEX jobs_rescue"))
        connection.execute(text("CREATE INDEX jobs_rescue ON jobs (id) WHERE reserved_by IS NOT NULL"))
    assert catalogue(empty) != modelled
