"""Migrating: what is built, what is refused, and what happens when two do it at once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

import sqlq
from sqlq.database import migrate, standing
from sqlq.database.dialects import dialect_of
from sqlq.database.postgresql import online
from sqlq.errors import ConfigurationError, SchemaVersionError
from sqlq.schema import version
from tests.kit import execute, needs
from tests.migrations.catalogue import catalogue, own_names

pytestmark = pytest.mark.each_database

CHECKOUT = Path(version.__file__).parents[2]


@pytest.fixture
def migrated(empty: Engine) -> Engine:
    """An engine on a database with sqlq's tables."""
    migrate.upgrade(empty, None)
    return empty


# ── Up ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_upgrade_returns_the_revision_before(empty: Engine) -> None:
    assert migrate.upgrade(empty, None) is None
    assert own_names(empty) == standing.OWN_NAMES
    assert migrate.upgrade(empty, None) == version.HEAD


def test_alembic_writes_no_log_lines(empty: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        migrate.upgrade(empty, None)
    assert [record.message for record in caplog.records if record.name.startswith("alembic")] == []


def test_a_failing_revision_leaves_nothing_but_steps_that_can_be_repeated(empty: Engine) -> None:
    def break_near_the_end(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "VIEW" in statement and "queue_stats" in statement:
            raise RuntimeError("the power went")

    event.listen(empty, "before_cursor_execute", break_near_the_end)
    with pytest.raises(RuntimeError, match="the power went"):
        migrate.upgrade(empty, None)
    event.remove(empty, "before_cursor_execute", break_near_the_end)
    left = standing.OWN_NAMES - {"queue_stats"} if empty.dialect.name == "mariadb" else set()
    assert own_names(empty) == left
    assert standing.check(empty, None).standing == "missing"
    assert migrate.upgrade(empty, None) is None


@needs("file", empty=True)
def test_upgrade_creates_the_file(empty: Engine) -> None:
    migrate.upgrade(empty, None)
    assert Path(empty.url.database or "").is_file()


@needs("one_writer", empty=True)
@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_upgrade_takes_the_write_lock_first(empty: Engine, begin: str) -> None:
    """Also on an engine whose own hook begins transactions, as SQLAlchemy's documentation recommends for
    SQLite."""
    statements: list[str] = []
    event.listen(empty, "begin", lambda connection: connection.exec_driver_sql(begin))
    event.listen(
        empty, "before_cursor_execute", lambda c, cursor, statement, *rest: statements.append(statement)
    )
    migrate.upgrade(empty, None)
    assert statements[:3] == [begin, "ROLLBACK", "BEGIN IMMEDIATE"]
    assert standing.check(empty, None).standing == "up to date"


@needs("postgresql", empty=True)
@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE"])
def test_upgrade_is_one_transaction_whatever_the_engine_does(empty_database_url: str, level: str) -> None:
    engine = create_engine(empty_database_url, isolation_level=level)
    with migrate.transaction(engine, None) as connection:
        assert connection.execute(text("SHOW transaction_isolation")).scalar() == "read committed"
        migrate.run(connection, None, "up", "head")
        connection.rollback()
    assert own_names(engine) == set()
    engine.dispose()


# ── Check ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_check_distinguishes_missing_from_up_to_date(empty: Engine) -> None:
    found = standing.check(empty, None)
    assert (found.standing, found.revision) == ("missing", None)
    assert f"create them with `sqlq migrate -d {empty.url.render_as_string()}`" in found.message
    if empty.dialect.name == "sqlite":
        assert not Path(empty.url.database or "").exists()
    migrate.upgrade(empty, None)
    assert standing.check(empty, None)[:2] == ("up to date", version.HEAD)


def test_check_distinguishes_behind_from_newer(migrated: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(migrated, "UPDATE sqlq_version SET version_num = '0099'")
    ahead = standing.check(migrated, None)
    assert (ahead.standing, ahead.revision) == ("ahead", "0099")
    execute(migrated, "UPDATE sqlq_version SET oldest_code = '0099'")
    assert standing.check(migrated, None).standing == "newer"
    monkeypatch.setattr(version, "HEAD", "0100")
    assert standing.check(migrated, None).standing == "behind"


# ── Refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_newer_database_that_works_is_up_to_date_but_does_not_go_down(migrated: Engine) -> None:
    """An older release that starts again after a newer one has migrated: `sqlq migrate && sqlq work` goes
    on."""
    execute(migrated, "UPDATE sqlq_version SET version_num = '0099'")
    before = catalogue(migrated)
    assert migrate.upgrade(migrated, None) == "0099"
    with pytest.raises(SchemaVersionError, match=r"revision 0099, newer than the \d{4} this sqlq knows"):
        migrate.downgrade(migrated, None, "base", force=True)
    assert catalogue(migrated) == before
    assert execute(migrated, "SELECT version_num FROM sqlq_version") == "0099"


def test_a_database_too_new_is_left_alone(migrated: Engine) -> None:
    execute(migrated, "UPDATE sqlq_version SET version_num = '0099', oldest_code = '0099'")
    before = catalogue(migrated)
    with pytest.raises(SchemaVersionError, match=r"revision 0099, newer than the \d{4} this sqlq knows"):
        migrate.upgrade(migrated, None)
    with pytest.raises(SchemaVersionError, match=r"revision 0099, newer than the \d{4} this sqlq knows"):
        migrate.downgrade(migrated, None, "base", force=True)
    assert catalogue(migrated) == before
    assert execute(migrated, "SELECT version_num FROM sqlq_version") == "0099"


@pytest.mark.parametrize(
    "foreign",
    [
        "CREATE TABLE jobs (id INTEGER PRIMARY KEY, queue TEXT)",
        "CREATE TABLE failed_jobs (uuid TEXT)",
        "CREATE VIEW job_states AS SELECT 1 AS id",
    ],
)
def test_a_foreign_table_is_refused_and_left_alone(empty: Engine, foreign: str) -> None:
    execute(empty, foreign)
    before = catalogue(empty)
    with pytest.raises(
        ConfigurationError, match=r"SQLQ_SCHEMA=|another file with -d or SQLQ_DATABASE_URL"
    ) as refusal:
        migrate.upgrade(empty, None)
    assert foreign.split()[2] in str(refusal.value)
    assert catalogue(empty) == before
    check = standing.check(empty, None)
    assert (check.standing, check.message) == ("foreign", str(refusal.value))
    assert execute(empty, version_tables(empty)) == 0


@needs("schemas", empty=True)
def test_a_schema_of_its_own_avoids_a_foreign_table(empty: Engine) -> None:
    execute(empty, "CREATE TABLE jobs (id INTEGER PRIMARY KEY, queue TEXT)")
    before = catalogue(empty)
    migrate.upgrade(empty, "sqlq")
    assert standing.check(empty, "sqlq").standing == "up to date"
    assert catalogue(empty) == before
    migrate.downgrade(empty, "sqlq", "base")
    assert catalogue(empty) == before


@needs("roles", empty=True)
def test_an_existing_schema_needs_no_right_to_create_one(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE ROLE sqlq_owner"))
        connection.execute(text("CREATE SCHEMA queueing AUTHORIZATION sqlq_owner"))
    event.listen(empty, "begin", lambda connection: connection.exec_driver_sql("SET LOCAL ROLE sqlq_owner"))
    migrate.upgrade(empty, "queueing")
    assert standing.check(empty, "queueing").standing == "up to date"
    with empty.begin() as connection:
        connection.execute(text("RESET ROLE"))
        connection.execute(text("DROP OWNED BY sqlq_owner"))
        connection.execute(text("DROP ROLE sqlq_owner"))


# ── Down ────────────────────────────────────────────────────────────────────────────────────────────────────

MOVED = (
    "id, queue, task, payload, priority, attempts, max_attempts, available_at, lease_token, "
    "unique_until, releases, created_at"
)


@pytest.mark.parametrize("table", ["jobs", "finished_jobs", "failed_jobs"])
def test_downgrade_refuses_to_lose_jobs(migrated: Engine, table: str) -> None:
    execute(migrated, "INSERT INTO jobs (task) VALUES ('shop.send_receipt')")
    if table != "jobs":
        column, value = ("outcome", "finished") if table == "finished_jobs" else ("reason", "error")
        execute(migrated, f"INSERT INTO {table} ({MOVED}, {column}) SELECT {MOVED}, '{value}' FROM jobs")
        execute(migrated, "DELETE FROM jobs")
    with pytest.raises(ConfigurationError, match=rf": 1 in \S*\b{table}; delete them first, or add --force"):
        migrate.downgrade(migrated, None, "base")
    assert own_names(migrated) == standing.OWN_NAMES
    assert execute(migrated, f"SELECT count(*) FROM {table}") == 1
    migrate.downgrade(migrated, None, "base", force=True)
    assert own_names(migrated) == set()


def test_downgrade_without_tables_is_refused(empty: Engine) -> None:
    with pytest.raises(SchemaVersionError, match="does not hold sqlq's tables"):
        migrate.downgrade(empty, None, "base")
    if empty.dialect.name == "sqlite":
        assert not Path(empty.url.database or "").exists()


def test_tables_at_a_revision_that_no_release_has_are_left_alone(migrated: Engine) -> None:
    with migrated.begin() as connection:
        connection.execute(text("UPDATE sqlq_version SET version_num = '0000'"))
    with pytest.raises(
        SchemaVersionError, match=r"at revision '0000', which no release has: correct the number"
    ):
        migrate.upgrade(migrated, None)
    with migrated.begin() as connection:
        assert version.read(connection, None) == "0000"


def test_a_revision_that_is_no_number_is_refused_in_one_sentence(migrated: Engine) -> None:
    """As the history of the host's own Alembic has them."""
    execute(migrated, "UPDATE sqlq_version SET version_num = 'ae1027a6acf'")
    said = "at revision 'ae1027a6acf', which no release has: correct the number in sqlq_version"
    with closing(sqlq.App(migrated.url)) as app:
        doing: list[Callable[[], object]] = [
            lambda: migrate.upgrade(migrated, None),
            lambda: migrate.downgrade(migrated, None, "base", force=True),
            app.jobs.list,
        ]
        for work in doing:
            with pytest.raises(SchemaVersionError, match=said):
                work()
    assert said in standing.check(migrated, None).message


def test_downgrade_to_an_unknown_revision_is_refused(migrated: Engine) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"cannot be taken down to revision '0077': .*; revisions go from .base. to 0001",
    ):
        migrate.downgrade(migrated, None, "0077")
    assert own_names(migrated) == standing.OWN_NAMES


@needs("server", empty=True)
def test_downgrade_does_not_queue_behind_a_long_transaction(
    migrated: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "LOCK_TIMEOUT_MS", 50)
    with migrated.connect() as other:
        other.execute(text("SELECT count(*) FROM jobs"))
        with pytest.raises(ConfigurationError, match="in use: stop the workers"):
            migrate.downgrade(migrated, None, "base")
    assert own_names(migrated) == standing.OWN_NAMES


# ── At once ─────────────────────────────────────────────────────────────────────────────────────────────────

MIGRATOR = """
import logging, sys
from sqlalchemy import create_engine
import sqlq
from sqlq.database import migrate
from sqlq.database.dialects import dialect_of

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
engine = create_engine(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print("before:", migrate.upgrade(engine, None), flush=True)
engine.dispose()
"""


@contextmanager
def migrating(empty_database_url: str, number: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that migrate the same empty database, each as soon as it reads a line."""
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MIGRATOR, empty_database_url],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(number)
    ]
    try:
        for process in processes:
            assert line(process) == "ready"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.integration
def test_one_of_several_processes_migrates(empty_database_url: str, empty: Engine) -> None:
    with migrating(empty_database_url, 4) as processes:
        for process in processes:
            start(process)
        said = [process.communicate(timeout=60)[0].splitlines()[-1] for process in processes]
    assert sorted(said) == [f"before: {version.HEAD}"] * 3 + ["before: None"]
    assert standing.check(empty, None).standing == "up to date"


def test_a_second_process_waits_for_the_first(empty_database_url: str, empty: Engine) -> None:
    with migrating(empty_database_url, 1) as (second,):
        with migrate.transaction(empty, None) as connection:
            start(second)
            if empty.dialect.name != "sqlite":  # which waits in silence first, for its driver's timeout
                assert line(second).startswith(f"waiting for another migration of {empty.dialect.name}")
            migrate.run(connection, None, "up", "head")
        assert line(second) == f"before: {version.HEAD}"


def test_the_wait_for_another_migrator_times_out(
    empty: Engine, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "TIMEOUT_S", 0.0)
    other = create_engine(
        empty_database_url, connect_args={"timeout": 0} if empty.dialect.name == "sqlite" else {}
    )
    with (
        migrate.transaction(empty, None),
        pytest.raises(ConfigurationError, match="perhaps by another migration"),
    ):
        migrate.upgrade(other, None)
    other.dispose()


def test_a_waiting_migration_names_the_holder_of_the_lock(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    migrations, number = (
        dialect_of(empty).migrations,
        {"postgresql": "pg_backend_pid()", "mariadb": "connection_id()"},
    )
    if empty.dialect.name not in number:
        pytest.skip("the file's lock has no names")
    monkeypatch.setattr(online, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(migrate, "HOLDER_AFTER_S", 0.2)
    with empty.connect() as stranger, stranger.begin():
        assert migrations.lock(stranger, None)
        session = stranger.exec_driver_sql(f"SELECT {number[empty.dialect.name]}").scalar()
        with pytest.raises(ConfigurationError, match=f"{empty.url.username} in session {session}, "):
            migrate.upgrade(empty, None)
        if migrations.unlocks:
            stranger.execute(text(migrations.unlocks), {"schema": empty.url.database})
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{empty.url.username} in session {session}, which" in line
    assert migrate.upgrade(empty, None) is None


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def version_tables(engine: Engine) -> str:
    if engine.dialect.name == "mariadb":
        return """SELECT count(*) FROM information_schema.tables
                   WHERE table_schema = DATABASE() AND table_name = 'sqlq_version'"""
    if engine.dialect.name == "sqlite":
        return "SELECT count(*) FROM sqlite_master WHERE name = 'sqlq_version'"
    return "SELECT count(*) FROM pg_class WHERE relname = 'sqlq_version'"
