"""Migrating while jobs come and go, and after a migration was broken off, at whatever point that happened."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import IntegrityError

import sqlq
import sqlq.alembic
from sqlq.database import migrate, standing
from sqlq.database.postgresql import online
from sqlq.errors import ConfigurationError
from tests.kit import count, execute, needs, wait_until, waiting_for_locks, working
from tests.kit.preloaded import ROOT
from tests.migrations import later_release
from tests.migrations.catalogue import another_database, catalogue, run_script
from tests.migrations.later_release import TODAY, Migrator

pytestmark = pytest.mark.each_database

Builder = TypeVar("Builder")
Start = Callable[..., Migrator]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """The history of a later release, two revisions longer than today's."""
    return later_release.write_history(tmp_path / "later")


@pytest.fixture
def migrated(empty: Engine) -> Engine:
    """An engine on a database with today's tables and some jobs in them."""
    migrate.upgrade(empty, None)
    execute(empty, "INSERT INTO jobs (task) VALUES ('shop.a'), ('shop.b')")
    return empty


@pytest.fixture
def later(migrated: Engine, history: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The same, seen by a later release in this process."""
    later_release.become(history, monkeypatch)
    return migrated


@pytest.fixture
def start(empty_database_url: str, history: Path) -> Iterator[Start]:
    """Starts the later release's migrator in a process of its own."""
    started: list[Migrator] = []

    def start(**options: Any) -> Migrator:
        started.append(Migrator(empty_database_url, history, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_an_upgrade_keeps_jobs_and_views_and_rewrites_no_table(later: Engine) -> None:
    file = table_file(later)
    execute(later, "CREATE VIEW shop_jobs AS SELECT id, state FROM job_states WHERE task LIKE 'shop.%'")
    assert migrate.upgrade(later, None) == TODAY
    assert migrate.upgrade(later, None) == "0802"
    assert execute(later, "SELECT count(*) FROM job_states") == 2
    assert execute(later, "SELECT count(note) FROM jobs") == 0
    assert execute(later, "SELECT count(*) FROM shop_jobs WHERE state = 'available'") == 2
    assert "jobs_by_task" in str(catalogue(later))
    assert table_file(later) == file
    migrate.downgrade(later, None, TODAY, force=True)
    assert execute(later, "SELECT count(*) FROM shop_jobs") == 2
    assert "jobs_by_task" not in str(catalogue(later))


def test_every_way_to_migrate_makes_the_same_tables(later: Engine, tmp_path: Path) -> None:
    """By revisions beside the traffic, from nothing at once, inside a host's Alembic, and as a script."""
    migrate.upgrade(later, None)
    beside_traffic = catalogue(later)

    def hosted(engine: Engine) -> None:
        for revision in (TODAY, "0802"):
            with engine.begin() as connection:
                sqlq.alembic.upgrade(Operations(MigrationContext.configure(connection)), revision)

    ways: list[Callable[[Engine], object]] = [
        lambda engine: migrate.upgrade(engine, None),
        hosted,
        lambda engine: run_script(engine, migrate.render_sql(engine.dialect.name, None)),
    ]
    for number, build in enumerate(ways):
        with another_database(later, tmp_path / f"{number}.db") as other:
            build(other)
            assert catalogue(other) == beside_traffic, f"way {number}"
            assert standing.check(other, None).standing == "up to date"
    assert "CONCURRENTLY" not in migrate.render_sql("postgresql", None)


SHOP = """
import sqlq
app = sqlq.App()
task = app.task(name="t")(lambda n: n)
"""


@pytest.mark.integration
@needs("server", empty=True)
def test_one_of_three_migrators_migrates_and_workers_of_both_releases_run(
    migrated: Engine, start: Start, history: Path, empty_database_url: str
) -> None:
    (history / "shop.py").write_text(SHOP)
    execute(migrated, "DELETE FROM jobs")
    three = [start() for _ in range(3)]
    first = [migrator.migrated_from(TODAY) for migrator in three]
    assert [migrator.process.wait(30) for migrator in three] == [0, 0, 0]
    assert first.count(True) == 1
    assert (live_index(migrated), revision(migrated)) == (True, "0802")
    with closing(sqlq.App(empty_database_url)) as app:
        assert app.migrate() == "0802"
        task = app.task(name="t")(lambda n: n)
        app.enqueue_many([task.new(n) for n in range(20)])
        app.worker(drain=True, max_jobs=10).run()
        assert count(migrated, "finished_jobs") == 10
        assert start(command=["-a", "shop:app", "work", "--drain"]).process.wait(60) == 0
        assert count(migrated, "finished_jobs") == 20


@needs("server", empty=True)
def test_traffic_goes_on_while_a_migration_cannot_get_its_lock(
    migrated: Engine, start: Start, empty_database_url: str
) -> None:
    app, file = sqlq.App(empty_database_url), table_file(migrated)
    task = app.task(name="t")(lambda n: n)
    execute(migrated, "DELETE FROM jobs")
    enqueued, ended = list[int](), threading.Event()

    def enqueue() -> None:
        while not ended.is_set():
            enqueued.append(app.enqueue(task.new(len(enqueued))).id)

    def goes_on(number: int) -> None:
        so_far, done = len(enqueued), count(migrated, "finished_jobs")
        wait_until(
            lambda: len(enqueued) > so_far + number and count(migrated, "finished_jobs") > done + number,
            what="jobs enqueued and done",
        )

    with working(app):
        thread = threading.Thread(target=enqueue)
        thread.start()
        try:
            with migrated.connect() as long_transaction:
                long_transaction.execute(text("SELECT count(*) FROM jobs"))
                migrator = start()
                assert migrator.says("waiting for a moment in which no session uses the tables in")
                # behind a lock that it waited for without end nothing would get through
                goes_on(50)
                assert revision(migrated) == TODAY
            assert migrator.migrated_from(TODAY)
            goes_on(20)
        finally:
            ended.set()
            thread.join()
        wait_until(lambda: count(migrated, "finished_jobs") == len(enqueued), what="all jobs done")
    app.close()
    assert (revision(migrated), table_file(migrated), live_index(migrated)) == ("0802", file, True)


@needs("server", empty=True)
def test_a_lock_timeout_is_one_sentence_and_changes_nothing(
    later: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "LOCK_TIMEOUT_MS", 20)
    monkeypatch.setattr(online, "TIMEOUT_S", 0.2)
    before = catalogue(later)
    with later.connect() as long_transaction:
        long_transaction.execute(text("SELECT count(*) FROM jobs"))
        in_use = r"were in use whenever the migration tried.*end the oldest transactions"
        with pytest.raises(ConfigurationError, match=in_use):
            migrate.upgrade(later, None)
        assert catalogue(later) == before
    migrate.upgrade(later, None)
    assert live_index(later) is True


@pytest.mark.integration
@needs("postgresql", empty=True)
def test_a_migrator_killed_while_it_waits_for_a_lock_leaves_nothing(migrated: Engine, start: Start) -> None:
    with migrated.connect() as long_transaction:
        long_transaction.execute(text("SELECT count(*) FROM jobs"))
        killed = start(lock_timeout_ms=60_000)
        wait_until(lambda: waiting_for_locks(migrated), what="the migrator waiting")
        killed.kill()
    assert start().migrated_from(TODAY)
    assert live_index(migrated) is True


KILLED = """
import os, signal, sys, traceback
from sqlalchemy import create_engine, event
from sqlq.database import migrate, standing

for number in range(1, 100):
    if (child := os.fork()) == 0:
        engine, left = create_engine(sys.argv[1]), [number]

        def count(conn, cursor, statement, parameters, context, executemany):
            left[0] -= not statement.startswith("SELECT")
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        event.listen(engine, sys.argv[2], count)
        try:
            if sys.argv[3] == "up":
                migrate.upgrade(engine, None)
            elif standing.check(engine, None).standing != "missing":
                migrate.downgrade(engine, None, "base")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if (ended := os.waitpid(child, 0)[1]) != signal.SIGKILL:
        break
assert ended == 0
print(number)
"""


@pytest.mark.integration
@needs("mariadb", empty=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_migration_killed_at_each_statement_goes_on(empty: Engine, when: str) -> None:
    """Each statement commits, so a next migration repeats those that were made, one after the other."""

    def killed(way: str) -> int:
        command = [sys.executable, "-c", KILLED, empty.url.render_as_string(), f"{when}_cursor_execute", way]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert killed("up") > 15
    assert standing.check(empty, None).standing == "up to date"
    made = catalogue(empty)
    assert killed("down") > 6
    assert standing.check(empty, None).standing == "missing"
    migrate.upgrade(empty, None)
    assert catalogue(empty) == made


@contextmanager
def building(engine: Engine, start: Callable[[], Builder]) -> Iterator[Builder]:
    """A builder in the middle of its build, which waits for a transaction that wrote to jobs before."""
    execute(engine, "UPDATE sqlq_version SET version_num = '0801'")  # as if the step before had been made
    execute(engine, "ALTER TABLE jobs ADD COLUMN note TEXT")
    with engine.connect() as long_transaction:
        long_transaction.execute(text("INSERT INTO jobs (task) VALUES ('shop.c')"))
        builder = start()
        wait_until(lambda: waiting_for_locks(engine), what="the build waiting")
        assert live_index(engine) is False
        yield builder
        long_transaction.commit()


@needs("sessions", empty=True)
def test_an_index_build_blocks_no_job(migrated: Engine, start: Start, empty_database_url: str) -> None:
    """Nor do timeouts of statements and of idle transactions end it."""
    database = execute(migrated, "SELECT current_database()")
    with migrated.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(text(f"ALTER DATABASE {database} SET {name} = '300ms'"))
    with building(migrated, start) as migrator, closing(sqlq.App(empty_database_url)) as app:
        app.enqueue(app.task(name="t")(lambda: None).new().set(queue="q"))
        app.worker(["q"], drain=True).run()
        assert count(migrated, "finished_jobs") == 1
        old = """SELECT count(*) = 3 FROM pg_stat_activity
                  WHERE datname = current_database()
                     AND statement_timestamp() - state_change > interval '700ms'
                    AND (state = 'idle in transaction' OR query LIKE 'CREATE INDEX CONCURRENTLY%')"""
        wait_until(lambda: execute(migrated, old), what="the build, its guard and ours being old")
    assert migrator.migrated_from("0801")
    assert live_index(migrated) is True


@pytest.mark.integration
@needs("sessions", empty=True)
def test_an_index_of_an_aborted_build_is_built_again(migrated: Engine, start: Start) -> None:
    with building(migrated, start) as migrator:
        build = "datname = current_database() AND query LIKE 'CREATE INDEX CONCURRENTLY%'"
        execute(migrated, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {build}")
        assert migrator.process.wait(30) == 1
        assert (live_index(migrated), revision(migrated)) == (False, "0801")
        broken = index_oid(migrated)
    again = start()
    assert again.says("dropping the index jobs_by_task, whose build was broken off")
    assert again.migrated_from("0801")
    assert live_index(migrated) is True
    assert index_oid(migrated) != broken


@pytest.mark.integration
@needs("postgresql", empty=True)
def test_a_second_migrator_keeps_an_index_build(migrated: Engine, start: Start) -> None:
    with building(migrated, start) as migrator:
        second = start()
        assert second.says("waiting for another migration")
        index = index_oid(migrated)
    assert migrator.migrated_from("0801")
    assert second.migrated_from("0802")
    assert (live_index(migrated), index_oid(migrated)) == (True, index)


@pytest.mark.integration
@needs("postgresql", empty=True)
def test_an_index_build_of_a_stranger_is_taken_over(migrated: Engine, start: Start) -> None:
    """As a server leaves it that does not end the statements of a killed client."""

    def build() -> None:
        with migrated.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("CREATE INDEX CONCURRENTLY jobs_by_task ON jobs (task, id)")

    thread = threading.Thread(target=build)
    with building(migrated, thread.start):
        migrator = start()
        assert migrator.says("waiting for another build or a vacuum of public.jobs")
        index = index_oid(migrated)
    assert migrator.migrated_from("0801")
    thread.join()
    assert (live_index(migrated), index_oid(migrated), revision(migrated)) == (True, index, "0802")


@needs("sessions", empty=True)
def test_an_index_build_that_waits_too_long_is_reported_in_one_sentence(
    later: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "INDEX_TIMEOUT_MS", 100)
    monkeypatch.setattr(online, "LOCK_TIMEOUT_MS", 100)
    execute(later, "UPDATE sqlq_version SET version_num = '0801'")
    with later.connect() as long_transaction:
        long_transaction.execute(text("INSERT INTO jobs (task) VALUES ('shop.c')"))
        slow = r"index jobs_by_task in postgresql.* was not built.*end the oldest ones"
        with pytest.raises(ConfigurationError, match=slow):
            migrate.upgrade(later, None)
    assert revision(later) == "0801"
    migrate.upgrade(later, None)
    assert live_index(later) is True


@needs("postgresql", empty=True)
def test_a_failed_unique_index_leaves_nothing_behind(migrated: Engine) -> None:
    def unique(connection: Connection) -> None:
        connection.exec_driver_sql(
            "CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS one_queue ON public.jobs (queue)"
        )

    with pytest.raises(IntegrityError):
        online.build_index(migrated, "public", "jobs", "one_queue", unique)
    assert live_index(migrated, "one_queue") is None
    with migrated.connect() as connection, pytest.raises(IntegrityError):
        unique(connection.execution_options(isolation_level="AUTOCOMMIT"))
    assert live_index(migrated, "one_queue") is False, "what a killed build with duplicates leaves"
    execute(migrated, "DELETE FROM jobs WHERE task = 'shop.a'")
    online.build_index(migrated, "public", "jobs", "one_queue", unique)
    assert live_index(migrated, "one_queue") is True


@needs("sessions", empty=True)
def test_a_pool_of_one_connection_suffices(later: Engine) -> None:
    engine = create_engine(later.url, pool_size=1, max_overflow=0, pool_timeout=1)
    assert migrate.upgrade(engine, None) == TODAY
    assert live_index(later) is True
    with engine.connect() as connection:
        assert connection.execute(text("SHOW lock_timeout")).scalar() == "0", "no setting is left in the pool"
    engine.dispose()


def table_file(engine: Engine) -> int | None:
    """The number of the file that holds jobs; a rewrite makes another."""
    if engine.dialect.name == "sqlite":
        return None
    query = {
        "postgresql": "SELECT pg_relation_filenode('jobs')",
        "mariadb": "SELECT table_id FROM information_schema.innodb_sys_tables "
        "WHERE name = CONCAT(DATABASE(), '/jobs')",
    }
    return int(execute(engine, query[engine.dialect.name]))


def revision(engine: Engine) -> str:
    return str(execute(engine, "SELECT version_num FROM sqlq_version"))


def live_index(engine: Engine, name: str = "jobs_by_task") -> bool | None:
    if engine.dialect.name == "mariadb":
        return bool(execute(engine, f"SHOW INDEX FROM jobs WHERE key_name = '{name}'"))
    with engine.connect() as connection:
        return online.is_valid(connection, "public", name)


def index_oid(engine: Engine) -> int:
    return int(execute(engine, "SELECT 'jobs_by_task'::regclass::oid"))
