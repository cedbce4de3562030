"""Servers that speak like PostgreSQL and break a promise are refused by `migrate` and the doctor."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine

import sqlq
from sqlq.errors import UnsupportedDatabaseError
from tests.kit import for_each, needs
from tests.kit.command import Command


@pytest.fixture(params=["spock", "bdr"])
def extended(request: pytest.FixtureRequest, database_url: str) -> str:
    """The name of a multi-master extension that the database has, as far as its catalogue knows."""
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as conn:
        conn.execute("SET allow_system_table_mods = on")
        conn.execute(
            "INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion) "
            "VALUES (99999, %s, 10, 11, false, '5')",
            [request.param],
        )
    return str(request.param)


@needs("postgresql")
def test_a_database_with_a_multi_master_extension_is_refused(
    tmp_path: Path, database_url: str, extended: str
) -> None:
    command = Command(tmp_path, SQLQ_DATABASE_URL=database_url)
    words = (
        f"with the extension {extended} several servers take writes, and two of them may claim the same job"
    )
    assert words in command("migrate").sentence()
    found = command("doctor")
    assert found.code == 1
    assert " ".join(words.split()) in " ".join(found.out.split())


@needs("postgresql")
@for_each(
    ("version", "words"),
    [
        ("PostgreSQL 15.12-YB-2025.1.0.0-b168 on x86_64-pc-linux-gnu", "YugabyteDB does not notify workers"),
        ("CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)", "sqlq does not run on .* 'CockroachDB CCL v24"),
    ],
)
def test_migrate_refuses_a_server_by_its_version_text(database_url: str, version: str, words: str) -> None:
    class Pretends(psycopg.Cursor[Any]):
        def execute(self, query: Any, *given: Any, **options: Any) -> Any:
            told = f"SELECT '{version}'" if "version()" in str(query) else query
            return super().execute(told, *given, **options)

    engine = create_engine(database_url, connect_args={"cursor_factory": Pretends})
    with closing(sqlq.App(engine=engine)) as app, pytest.raises(UnsupportedDatabaseError, match=words):
        app.migrate()
    engine.dispose()
