"""How connections are used past SQLAlchemy: which statement gets which, and what is done with one that met an
error."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool

import sqlq
from sqlq.database import pool
from sqlq.database.database import Database
from sqlq.database.values import Execute
from tests.kit import execute, needs
from tests.kit.proxy import Proxy

pytestmark = pytest.mark.each_database


class Clock(SimpleNamespace):
    """The clock of the modules that look how long a connection has rested."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pool, "time", clock)
    return clock


def counting(engine: Engine, what: str) -> list[Any]:
    seen: list[Any] = []
    event.listen(engine, what, lambda connection, *_: seen.append(connection))
    return seen


def backend(database: Database) -> int:
    """The server process that answers a statement past SQLAlchemy."""
    ((pid,),) = database.run_statement("SELECT pg_backend_pid()", None)
    return int(pid)


def test_consecutive_statements_take_one_connection_from_the_pool(app: sqlq.App, clock: Clock) -> None:
    task = app.task(name="t")(lambda: None)
    app.enqueue(task.new())
    app.database.close()
    taken, made = counting(app.database.engine, "checkout"), counting(app.database.engine, "connect")
    for _ in range(10):
        app.enqueue(task.new())
    assert (len(taken), len(made)) == (1, 1)
    clock.now += 2 * pool.TAKEN_SECONDS
    app.enqueue(task.new())
    assert (len(taken), len(made)) == (2, 1)
    assert len(app.jobs.list()) == 12
    assert len(made) == 1, "a thread needs one connection"


@needs("postgresql")
def test_a_connection_that_rested_long_is_pinged(
    app: sqlq.App, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def answers(connection: object) -> bool:
        asked.append(connection)
        return True

    monkeypatch.setattr(app.database.engine.dialect, "do_ping", answers)
    pid = backend(app.database)
    for seconds, pings in ((0.01, 0), (pool.IDLE_SECONDS / 2, 0), (2 * pool.IDLE_SECONDS, 1), (0.01, 1)):
        clock.now += seconds
        assert (backend(app.database), len(asked)) == (pid, pings), seconds


@needs("sessions")
def test_a_connection_cut_off_between_two_statements_is_replaced(
    app: sqlq.App, clock: Clock, engine: Engine
) -> None:
    pid = backend(app.database)
    with engine.connect() as conn:
        # waits until that process is gone, which has ended its connection by then
        assert conn.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
    assert backend(app.database) != pid


@needs("postgresql")
def test_a_useless_connection_is_dropped_with_the_idle_ones(app: sqlq.App, clock: Clock) -> None:
    met: list[int] = []

    def meets_a_standby(ask: Execute) -> None:
        met.extend(pid for (pid,) in ask("SELECT pg_backend_pid()", None))
        met.append(backend(app.database))  # as another thread's would, it rests when the error comes
        ask("DO $$ BEGIN RAISE SQLSTATE '25006'; END $$", None)

    with pytest.raises(DBAPIError, match="25006") as raised:
        app.database.run_raw(meets_a_standby)
    assert raised.value.connection_invalidated
    assert len({*met, backend(app.database)}) == 3


@needs("postgresql")
def test_a_connection_that_cannot_be_rolled_back_is_dropped(
    app: sqlq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises the exception that broke it off, and not its consequence."""

    def interrupted(connection: Any, statement: str, parameters: Any) -> None:
        connection.close()
        raise KeyboardInterrupt

    pid = backend(app.database)
    with monkeypatch.context() as patched:
        patched.setattr(app.database.dialect.driver, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backend(app.database)
    assert backend(app.database) != pid


def test_a_thread_keeps_at_most_one_idle_connection(app: sqlq.App) -> None:
    """Two could be all that a small pool has, and whoever waits for the pool would wait in vain."""
    app.database.run_raw(lambda ask: (app.database.run_statement("SELECT 1", ()), ask("SELECT 1", ())))
    assert app.database.engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # a QueuePool's


def test_a_thread_does_not_keep_the_only_connection_of_a_pool(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=1, max_overflow=0)
    with closing(sqlq.App(engine=engine)) as app:
        app.enqueue(app.task(name="t")(lambda: None).new())
        assert app.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool's
    engine.dispose()


def test_an_engine_may_be_configured_twice() -> None:
    engine = create_engine("sqlite://")
    sqlq.configure_sqlite(engine)
    sqlq.configure_sqlite(engine, immediate=True)
    begun: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: begun.append(args[2]))
    execute(engine, "CREATE TABLE t (n INTEGER)")
    assert begun == ["BEGIN IMMEDIATE", "CREATE TABLE t (n INTEGER)"], "the last word counts"
    engine.dispose()


@needs("mariadb")
def test_a_session_with_changed_settings_is_replaced(app: sqlq.App, clock: Clock) -> None:
    """As behind a proxy, which may give a connection another session."""

    def level() -> str:
        ((said,),) = app.database.run_statement("SELECT @@tx_isolation", None)
        return str(said)

    app.database.run_statement("SET SESSION tx_isolation = 'REPEATABLE-READ'", None)
    clock.now += 2 * pool.IDLE_SECONDS
    assert level() == "READ-COMMITTED"


def test_a_connection_in_use_at_the_close_is_closed_when_it_comes_back(app: sqlq.App) -> None:
    taken = counting(app.database.engine, "checkout")

    def close(ask: Execute) -> None:
        app.database.close()
        ask("SELECT 1", ())  # goes on meanwhile

    with app.database.begin() as conn:
        app.database.close()
        conn.execute(text("SELECT 1"))
    app.database.run_raw(close)
    assert len(set(taken)) == 2
    for connection in taken:
        with pytest.raises(app.database.engine.dialect.loaded_dbapi.Error):
            connection.cursor().execute("SELECT 1")
    app.enqueue(app.task(name="t")(lambda: None).new())  # opens another


def test_a_close_breaks_no_return_of_a_connection_in_another_thread(app: sqlq.App) -> None:
    event.listen(app.database.engine, "checkin", lambda *_: app.database.close())
    app.database.require_tables()
    assert app.jobs.list() == []


def test_connections_are_pooled_after_two_closes(app: sqlq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = app.database.engine.pool
    recreate = pool.recreate

    def meanwhile() -> Pool:
        monkeypatch.setattr(pool, "recreate", recreate)
        app.database.close()
        return recreate()

    monkeypatch.setattr(pool, "recreate", meanwhile)
    app.database.close()
    made = counting(app.database.engine, "connect")
    for _ in range(2):
        with app.database.begin() as conn:
            conn.execute(text("SELECT 1"))
    assert len(made) == 1


def test_connections_are_closed_when_their_database_is_collected(database_url: str, app: sqlq.App) -> None:
    database = Database(make_url(database_url))
    error = database.engine.dialect.loaded_dbapi.Error
    made = counting(database.engine, "connect")
    with database.begin() as conn:
        conn.execute(text("SELECT 1"))
    database.run_raw(lambda ask: ask("SELECT 1", ()))
    del database, conn
    gc.collect()
    assert made
    for connection in made:
        with pytest.raises(error):
            connection.cursor().execute("SELECT 1")


# ── Hosts ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hosts(app: sqlq.App, database_url: str) -> Iterator[list[Proxy]]:
    """Yield two ways to the same server."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(make_url(database_url).port or 1)) for _ in range(2)]


def opened(hosts: list[Proxy], database_url: str) -> Database:
    given = make_url(database_url)
    query = {"host": [f"127.0.0.1:{each.port}" for each in hosts]}
    return Database(URL.create(given.drivername, given.username, database=given.database, query=query))


def query(database: Database) -> None:
    with database.read() as conn:
        conn.execute(text("SELECT 1"))


def run_raw(database: Database) -> None:
    database.run_raw(lambda ask: ask("SELECT 1", None))


def tried(database: Database) -> list[str]:
    """Return the ports of each connection that is made from now on, in the order in which they are tried."""
    ports: list[str] = []
    event.listen(database.engine, "do_connect", lambda *given: ports.append(given[3]["port"]))
    return ports


@needs("postgresql")
@pytest.mark.parametrize("use", [query, run_raw])
def test_a_host_is_tried_last_when_its_connection_has_broken(
    hosts: list[Proxy], database_url: str, use: Callable[[Database], None]
) -> None:
    first, second = hosts
    with opened(hosts, database_url) as database:
        ports = tried(database)
        use(database)
        first.drop()
        with suppress(DBAPIError):
            use(database)
        use(database)
    assert ports == [f"{first.port},{second.port}", f"{second.port},{first.port}"]


@needs("postgresql")
def test_a_host_stays_first_when_a_connection_is_late(hosts: list[Proxy], database_url: str) -> None:
    first, second = hosts
    with opened(hosts, database_url) as database:
        with database.read():
            database.close()
        ports = tried(database)
        query(database)
    assert ports == [f"{first.port},{second.port}"]


@needs("postgresql")
def test_the_port_of_hosts_is_for_libpq_to_find_when_the_url_has_none(
    hosts: list[Proxy], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_url(database_url)
    monkeypatch.setenv("PGPORT", str(hosts[0].port))
    url = URL.create(given.drivername, given.username, host="127.0.0.1,localhost", database=given.database)
    with Database(url) as database, database.read() as conn:
        assert conn.connection.driver_connection.info.port == hosts[0].port  # type: ignore[union-attr]


@needs("postgresql")
def test_a_host_is_tried_first_when_it_has_answered_last(hosts: list[Proxy], database_url: str) -> None:
    first, second = hosts
    first.target = 1  # where nobody answers
    with opened(hosts, database_url) as database:
        ports = tried(database)
        query(database)
        database.close()
        query(database)
    assert ports == [f"{first.port},{second.port}", f"{second.port},{first.port}"]
