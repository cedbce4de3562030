"""Readings of the database itself: sizes, sessions and statements, as the command prints them."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, make_url, text

import sqlq
from sqlq.admin.storage import Reading, Storage, storage
from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command
from sqlq.config.durations import in_units
from tests.kit import needs

pytestmark = pytest.mark.each_database

NAMES = {
    "postgresql": ("size", "tables", "connections", "oldest transaction"),
    "mariadb": ("size", "tables", "connections", "oldest transaction", "history list"),
    "sqlite": ("file", "size", "journal mode", "WAL file"),
}


def reading(found: Storage, name: str) -> Reading:
    (each,) = (each for each in found.readings if each.name == name)
    return each


def test_each_database_is_read_in_full(app: sqlq.App) -> None:
    task = app.task(name="send")(lambda n: None)
    app.enqueue_many([task.new(i) for i in range(50)])
    found = storage(app.database)
    kind = app.database.dialect.name
    assert found.database.startswith(app.database.dialect.title)
    assert tuple(each.name for each in found.readings) == NAMES[kind]
    assert not [each for each in found.readings if each.value.startswith("could not look")]
    assert all(each.meaning for each in found.readings)
    assert (reading(found, "size").number or 0) > 10_000
    if kind != "sqlite":
        (jobs,) = (table for table in found.tables if table.name == "jobs")
        assert jobs.bytes > 0
        assert jobs.index_bytes > 0
        sizes = list((jobs.largest_indexes or {}).values())
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == (3 if kind == "postgresql" else 0)
        assert sum(sizes) <= jobs.index_bytes
        assert {"finished_jobs", "failed_jobs", "sqlq_workers"} <= {table.name for table in found.tables}


def test_the_command_prints_the_readings_as_text_and_json(app: sqlq.App, database_url: str) -> None:
    def run(*options: str) -> str:
        context = Context()
        words = ["-d", database_url, "doctor", "--sizes", *options]
        done = CliRunner(env={"COLUMNS": "300"}).invoke(command, words, obj=context)
        context.app().close()
        assert done.exit_code == 0, done.output
        return done.output

    found: dict[str, Any] = json.loads(run("--json"))
    assert [each["name"] for each in found["readings"]] == list(NAMES[app.database.dialect.name])
    said = run()
    assert app.database.dialect.title in said
    names = {name for table in found["tables"] for name in table["largest_indexes"] or ()}
    assert {name for name in names if name not in said} == set(), said


@needs("sessions")
def test_a_reading_has_the_statement_of_the_oldest_transaction(app: sqlq.App, engine: Engine) -> None:
    with engine.connect() as conn:
        conn.execute(text("CREATE TABLE kept (id int)"))
        pid = conn.execute(text("SELECT pg_backend_pid() /* mine */")).scalar()
        found = reading(storage(app.database), "oldest transaction")
    assert f"{pid} " in found.value
    assert found.query == "SELECT pg_backend_pid() /* mine */"


@needs("roles")
def test_a_role_without_a_right_loses_one_reading(app: sqlq.App, engine: Engine, database_url: str) -> None:
    role = f"poor_{uuid4().hex[:12]}"
    with engine.begin() as conn:
        conn.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
        conn.exec_driver_sql("REVOKE SELECT ON pg_catalog.pg_stat_all_indexes FROM PUBLIC")
    poor = sqlq.App(make_url(database_url).set(username=role, password=role))
    try:
        found = storage(poor.database)
        denied = [each.name for each in found.readings if each.value.startswith("could not look")]
        assert denied == ["tables"]
        assert "permission denied" in reading(found, "tables").value
        assert found.tables == ()
    finally:
        poor.close()
        with engine.begin() as conn:
            conn.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


@needs("postgresql")
def test_a_reading_that_takes_too_long_ends(
    app: sqlq.App, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlq.store.health.STATEMENT_TIMEOUT_MS", 100)
    assert app.database.schema == "public"
    with engine.begin() as conn:
        conn.execute(text("LOCK TABLE finished_jobs IN ACCESS EXCLUSIVE MODE"))
        found = storage(app.database)
    assert "statement timeout" in reading(found, "tables").value
    assert found.tables == ()
    assert "iB" in reading(found, "size").value


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 bytes"), (8192, "8 KiB"), (3 << 20, "3 MiB"), (5 << 40, "5 TiB")]
)
def test_bytes_are_written_for_people(number: int, said: str) -> None:
    assert in_units(number) == said
