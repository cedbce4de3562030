"""Migrating: what is built, what is refused, and what happens when two do it at once."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, inspect, text

from sqlq.database import migrate, standing
from sqlq.database.dialects import dialect_of
from sqlq.database.postgresql import online
from sqlq.errors import ConfigurationError, SchemaVersionError
from sqlq.schema import version
from tests.kit import execute, needs
from tests.kit.preloaded import environment
from tests.migrations.catalogue import catalogue, own_names

pytestmark = pytest.mark.each_database


@pytest.fixture
def migrated(empty: Engine) -> Engine:
    """An engine on a database with sqlq's tables."""
    migrate.upgrade(empty, None)
    return empty


def test_upgrade_makes_the_tables_once_and_downgrade_knows_its_revisions(
    empty: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    found = standing.check(empty, None)
    assert (found.standing, found.revision) == ("missing", None)
    assert f"create them with `sqlq migrate -d {empty.url.render_as_string()}`" in found.message
    with pytest.raises(SchemaVersionError, match="does not hold sqlq's tables"):
        migrate.downgrade(empty, None, "base")
    if empty.dialect.name == "sqlite":
        assert not Path(empty.url.database or "").exists()
    with caplog.at_level(logging.DEBUG):
        assert migrate.upgrade(empty, None) is None
    assert [record.message for record in caplog.records if record.name.startswith("alembic")] == []
    assert own_names(empty) == standing.OWN_NAMES
    assert standing.check(empty, None)[:2] == ("up to date", version.HEAD)
    assert migrate.upgrade(empty, None) == version.HEAD
    said = r"cannot be taken down to revision '0077': .*; revisions go from .base. to " + version.HEAD
    with pytest.raises(ConfigurationError, match=said):
        migrate.downgrade(empty, None, "0077")
    assert own_names(empty) == standing.OWN_NAMES


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


@needs("one_writer", empty=True)
@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_upgrade_takes_the_write_lock_first(empty: Engine, begin: str) -> None:
    """Also on an engine whose own hook begins transactions, as SQLAlchemy's documentation recommends for
    SQLite."""
    statements: list[str] = []
    event.listen(empty, "begin", lambda connection: connection.exec_driver_sql(begin))
    event.listen(empty, "before_cursor_execute", lambda *given: statements.append(given[2]))
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


@pytest.mark.parametrize("works", [True, False])
def test_a_newer_database_is_kept(migrated: Engine, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older release that starts again after a newer one has migrated goes on, where the newer one lets
    it: `sqlq migrate && sqlq work`."""
    oldest = "0001" if works else "0099"
    execute(migrated, f"UPDATE sqlq_version SET version_num = '0099', oldest_code = '{oldest}'")
    before, newer = catalogue(migrated), r"revision 0099, newer than the \d{4} this sqlq knows"
    assert standing.check(migrated, None)[:2] == ("ahead" if works else "newer", "0099")
    if works:
        assert migrate.upgrade(migrated, None) == "0099"
    else:
        with pytest.raises(SchemaVersionError, match=newer):
            migrate.upgrade(migrated, None)
    with pytest.raises(SchemaVersionError, match=newer):
        migrate.downgrade(migrated, None, "base", force=True)
    assert catalogue(migrated) == before
    assert execute(migrated, "SELECT version_num FROM sqlq_version") == "0099"
    monkeypatch.setattr(version, "HEAD", "0100")
    assert standing.check(migrated, None).standing == "behind"


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
    remedy = r"SQLQ_SCHEMA=|another file with -d or SQLQ_DATABASE_URL"
    with pytest.raises(ConfigurationError, match=remedy) as refusal:
        migrate.upgrade(empty, None)
    assert foreign.split()[2] in str(refusal.value)
    assert catalogue(empty) == before
    check = standing.check(empty, None)
    assert (check.standing, check.message) == ("foreign", str(refusal.value))
    assert "sqlq_version" not in inspect(empty).get_table_names()


@needs("roles", empty=True)
def test_an_existing_schema_needs_no_right_to_create_one(empty: Engine) -> None:
    execute(empty, "CREATE ROLE sqlq_owner; CREATE SCHEMA queueing AUTHORIZATION sqlq_owner")
    event.listen(empty, "begin", lambda connection: connection.exec_driver_sql("SET LOCAL ROLE sqlq_owner"))
    migrate.upgrade(empty, "queueing")
    assert standing.check(empty, "queueing").standing == "up to date"
    execute(empty, "RESET ROLE; DROP OWNED BY sqlq_owner; DROP ROLE sqlq_owner")


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


@pytest.mark.parametrize("number", ["0000", "ae1027a6acf"])
def test_tables_at_a_revision_that_no_release_has_are_left_alone(migrated: Engine, number: str) -> None:
    """As the history of the host's own Alembic has them."""
    execute(migrated, f"UPDATE sqlq_version SET version_num = '{number}'")
    said = f"at revision '{number}', which no release has: correct the number in sqlq_version"
    with pytest.raises(SchemaVersionError, match=said):
        migrate.upgrade(migrated, None)
    if not number.isdigit():
        with pytest.raises(SchemaVersionError, match=said):
            migrate.downgrade(migrated, None, "base", force=True)
    assert execute(migrated, "SELECT version_num FROM sqlq_version") == number


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


MIGRATOR = """
import logging, sys
from sqlalchemy import create_engine
from sqlq.database import migrate

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
engine = create_engine(sys.argv[1])
print("ready", flush=True)
print("before:", migrate.upgrade(engine, None), flush=True)
"""


def test_a_second_process_waits_for_the_first(empty_database_url: str, empty: Engine) -> None:
    command = [sys.executable, "-c", MIGRATOR, empty_database_url]
    with migrate.transaction(empty, None) as connection:
        second = subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE)
        assert second.stdout is not None
        assert second.stdout.readline() == "ready\n"
        if empty.dialect.name != "sqlite":  # which waits in silence first, for its driver's timeout
            said = f"waiting for another migration of {empty.dialect.name}"
            assert second.stdout.readline().startswith(said)
        migrate.run(connection, None, "up", "head")
    assert second.communicate(timeout=60)[0] == f"before: {version.HEAD}\n"


def test_the_wait_for_another_migrator_times_out(
    empty: Engine, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "TIMEOUT_S", 0.0)
    options = {"timeout": 0} if empty.dialect.name == "sqlite" else {}
    other = create_engine(empty_database_url, connect_args=options)
    refused = pytest.raises(ConfigurationError, match="perhaps by another migration")
    with migrate.transaction(empty, None), refused:
        migrate.upgrade(other, None)
    other.dispose()


def test_a_waiting_migration_names_the_holder_of_the_lock(
    empty: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    migrations = dialect_of(empty).migrations
    number = {"postgresql": "pg_backend_pid()", "mariadb": "connection_id()"}
    if empty.dialect.name not in number:
        pytest.skip("the file's lock has no names")
    monkeypatch.setattr(online, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(migrate, "HOLDER_AFTER_S", 0.2)
    with empty.begin() as stranger:
        assert migrations.lock(stranger, None)
        session = stranger.exec_driver_sql(f"SELECT {number[empty.dialect.name]}").scalar()
        with pytest.raises(ConfigurationError, match=f"{empty.url.username} in session {session}, "):
            migrate.upgrade(empty, None)
        if migrations.unlocks:
            stranger.execute(text(migrations.unlocks), {"schema": empty.url.database})
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{empty.url.username} in session {session}, which" in line
    assert migrate.upgrade(empty, None) is None


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ("0099", "newer than the {head} this sqlq knows: install the newer sqlq here"),
        ("0000", "older than the {head} this sqlq needs: run `sqlq migrate -d {url}`"),
        (None, "does not hold sqlq's tables yet: create them with `sqlq migrate -d {url}`"),
    ],
)
def test_require_names_the_fault_and_its_remedy(migrated: Engine, found: str | None, sentence: str) -> None:
    execute(migrated, "DELETE FROM sqlq_version")
    if found:
        execute(migrated, "INSERT INTO sqlq_version (version_num, oldest_code) VALUES (:of, :of)", of=found)
    with migrated.begin() as connection, pytest.raises(SchemaVersionError) as complaint:
        version.require(connection, None)
    url = migrated.url.render_as_string()
    assert str(complaint.value).startswith(url)
    assert sentence.format(url=url, head=version.HEAD) in str(complaint.value)


@pytest.mark.parametrize(
    ("oldest_code", "usable"), [("0001", True), ("0002", True), ("0003", False), ("0004", False)]
)
def test_newer_tables_are_usable_by_their_oldest_code(
    migrated: Engine, monkeypatch: pytest.MonkeyPatch, oldest_code: str, usable: bool
) -> None:
    execute(migrated, f"UPDATE sqlq_version SET version_num = '0004', oldest_code = '{oldest_code}'")
    monkeypatch.setattr(version, "HEAD", "0002")
    with migrated.begin() as connection:
        if usable:
            assert version.require(connection, None) == "0004"
        else:
            with pytest.raises(SchemaVersionError, match="newer than the 0002 this sqlq knows"):
                version.require(connection, None)
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 0, "the transaction is usable"


def test_a_version_table_without_oldest_code_is_read(empty: Engine) -> None:
    """As an old sqlq_version that nobody has dropped; nothing may fail in a caller's transaction."""
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE sqlq_version (version_num VARCHAR(32) NOT NULL)"))
        assert version.find(connection, None) is None
        connection.execute(text("INSERT INTO sqlq_version VALUES ('0099')"))
        assert version.find(connection, None) == ("0099", "0099")


@needs("schemas", empty=True)
def test_the_search_path_of_a_session_does_not_hide_the_version(migrated: Engine) -> None:
    with migrated.connect() as connection:
        connection.execute(text("SET search_path = pg_catalog"))
        version.require(connection, None)
        assert version.read(connection, None) == version.HEAD


@needs("roles", empty=True)
@pytest.mark.parametrize("granted", [[], ["USAGE ON SCHEMA queueing"], ["SELECT ON queueing.sqlq_version"]])
def test_a_missing_grant_does_not_abort_the_transaction(empty: Engine, granted: list[str]) -> None:
    migrate.upgrade(empty, "queueing")
    commands = r"SQLQ_SCHEMA=queueing sqlq grants sqlq_producer --as producer -d postgresql\S+` prints$"
    with empty.connect() as connection:
        for statement in ("CREATE ROLE", *(f"GRANT {grant} TO" for grant in granted), "SET ROLE"):
            connection.execute(text(f"{statement} sqlq_producer"))
        with pytest.raises(SchemaVersionError, match=commands):
            version.require(connection, "queueing")
        connection.execute(text("RESET ROLE"))
        for right in ("USAGE ON SCHEMA queueing", "SELECT ON queueing.sqlq_version"):
            connection.execute(text(f"GRANT {right} TO sqlq_producer"))
        connection.execute(text("SET ROLE sqlq_producer"))
        version.require(connection, "queueing")
