"""The fixtures of all tests: servers, databases and an App on each kind of database.

`database_url`, and what rests on it (`engine`, `app`), gives every test twice, once for SQLite and once for
PostgreSQL. With SQLQ_TEST_DATABASES=mariadb it gives each once, for MariaDB. A test for one of them alone
names it:

    @pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)

A database that cannot be had is a failure, never a skip.
"""

from __future__ import annotations

import compileall
import gc
import os
import re
import shutil
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Dialect, Engine, create_engine, make_url

import sqlq
from sqlq.database.database import Database
from sqlq.model import retry
from sqlq.worker.worker import Worker
from tests import environment
from tests.mariadb import MariaDB, OwnMariaDB, own_mariadb
from tests.servers import OwnPostgreSQL, PostgreSQL, own_postgresql

DATABASES = os.environ.get("SQLQ_TEST_DATABASES", "sqlite,postgresql").split(",")
SERVERS = [kind for kind in DATABASES if kind != "sqlite"]
"""Those of them that are reached over a network."""


def pytest_configure() -> None:
    """Refuse an environment that is not meant. Forget the shell's settings of sqlq, Ctrl-C and bytecode.

    So no test sees, or touches, the database that they name.
    """
    if sentences := environment.mistakes():
        pytest.exit("\n".join(sentences), returncode=pytest.ExitCode.USAGE_ERROR)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        print(environment.described())
    for name in [
        name for name in os.environ if name.startswith("SQLQ_") and not name.startswith("SQLQ_TEST_")
    ]:
        del os.environ[name]
    # what is started in the background ignores Ctrl-C, and so would each process that a test interrupts
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # an import, and collecting tests, make many objects and no garbage.
    # Pytest keeps the rewritten assertions of three hundred files, which take each process six seconds
    sys.dont_write_bytecode = False


def pytest_xdist_auto_num_workers() -> int:
    """Two processes a core: for half of the time a test waits for processes, leases and timeouts. Each
    process collects all tests, which takes five seconds."""
    return 2 * (os.cpu_count() or 1)


SAME_ON_BOTH = (
    *("faces/", "faults/", "worker/", "migrations/test_history.py"),
    *(
        f"conformance/test_{what}.py"
        for what in (
            *("admin_doctor", "admin_listings", "admin_queues", "enqueue_limits", "enqueue_refused"),
            *("records", "replay", "schedules", "wrong_arguments"),
        )
    ),
)
ON_EACH = (
    *(
        f"worker/test_{what}.py"
        for what in ("complete", "leases", "limits", "newest_first", "queue_order", "sql_rows")
    ),
    *(
        f"faults/test_{what}.py"
        for what in ("database_outages", "hostile_data", "small_guards", "state_machine")
    ),
)
"""Tests of the layers above the database run on one kind of it, but for files about each kind.

The statements below have tests of their own on each kind. `poe test-all` runs them all on both, the
scorecard's command those of faults.
"""
ALL = "SQLQ_TEST_ALL"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out repetitions, unless the command line names a test or SQLQ_TEST_ALL is set.

    One of several alike tests runs, chosen by its name. Tests of the layers above the database are alike on
    both kinds of it, and those marked `variants` with all their parameters. Tests marked `integration` run
    when the command line names their folder or file.
    """
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(600))
    if any("::" in argument for argument in config.args):
        return
    left_out: set[pytest.Item] = set()
    if "mariadb" not in DATABASES:  # its programs come from no wheel
        left_out.update(item for item in items if _needs_mariadb(item))
    if not os.environ.get(ALL):
        left_out.update(_repeated(config, [item for item in items if item not in left_out]))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> str | None:
    """Return a line that the tests of MariaDB do not run."""
    if "mariadb" in DATABASES:
        return None
    return "MariaDB is not tested: SQLQ_TEST_DATABASES=mariadb does so, with the programs of mariadb-server"


def _needs_mariadb(item: pytest.Item) -> bool:
    given: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    wanted = {"mariadb", "galera"}.intersection(getattr(item, "fixturenames", ()))
    return "mariadb" in given.values() or bool(wanted)


def _repeated(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that are like another one, and those of real processes unless they are named."""
    left_out: set[pytest.Item] = set()
    folder = Path(__file__).parent
    asked_for = [config.invocation_params.dir.joinpath(argument).resolve() for argument in config.args]
    is_wanted = "integration" in config.option.markexpr
    if not is_wanted and any(folder.is_relative_to(path) for path in asked_for):
        left_out.update(item for item in items if item.get_closest_marker("integration") is not None)
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            alike.setdefault(_but_for_what_is_alike(item), []).append(item)
    for name, found in alike.items():
        chosen = sorted(found, key=lambda item: item.nodeid)[zlib.crc32(name.encode()) % len(found)]
        left_out.update(item for item in found if item is not chosen)
    return left_out


def _but_for_what_is_alike(item: pytest.Item) -> str:
    """Return the part of a test's name that alike tests share."""
    name = item.nodeid
    if item.get_closest_marker("variants") is not None:
        name = name.partition("[")[0]
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    if file.startswith(SAME_ON_BOTH) and file not in ON_EACH:
        given: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if (kind := given.get("database_url", given.get("empty_database_url"))) in DATABASES:
            name = re.sub(rf"(?<=[\[-]){kind}(?=[\]-])", "", name, count=1)
    return name


def pytest_sessionstart() -> None:
    """Compile sqlq once: a thousand processes that the tests start import it, and write nothing."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compileall.compile_dir(Path(sqlq.__file__).parent, quiet=2)


class Compiled(dict[Any, Any]):
    """A cache of compiled statements that all engines of sqlq's own share.

    Each test makes engines, and a quarter of its time went into compiling the same statements. An engine
    keeps them by its dialect. Dialects of one class, for servers of one version, compile alike.
    """

    def __init__(self, dialect: Dialect) -> None:
        super().__init__()
        self._dialect = dialect

    def _key(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        dialect = self._dialect
        return (type(dialect), getattr(dialect, "server_version_info", None), *key[1:])

    def get(self, key: Any, default: Any = None) -> Any:
        return _COMPILED.get(self._key(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        _COMPILED[self._key(key)] = compiled


_COMPILED: dict[tuple[Any, ...], Any] = {}


@pytest.fixture(autouse=True, scope="session")
def compiled_once() -> Iterator[None]:
    """Have engines of sqlq's own share what they compile."""
    begin = Database.__init__

    def sharing(database: Database, *args: Any, **options: Any) -> None:
        begin(database, *args, **options)
        database.engine._compiled_cache = Compiled(database.engine.dialect)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "__init__", sharing)
        yield


_RUNNING: set[Worker] = set()


@pytest.fixture(autouse=True)
def nothing_put_back() -> None:
    """Let each test read the lines of the log about unknown tasks."""
    retry._put_back_at.clear()


@pytest.fixture(autouse=True, scope="session")
def known_workers() -> Iterator[None]:
    """Note which workers run in this process."""
    run = Worker.run

    def noted(worker: Worker, **options: Any) -> Any:
        _RUNNING.add(worker)
        try:
            return run(worker, **options)
        finally:
            _RUNNING.discard(worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "run", noted)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have the collector pass over the modules and the tests, which stay: it took a sixth of the time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Hypothesis, which the summary imports, searches for referrers


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, Any, Any]:
    """Stop the workers that a failed test has left in threads.

    They would disturb all later tests, and keep the process from its end.
    """
    for worker in list(_RUNNING):
        worker.stop()
        worker.stop()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates in the log of a test.

    A report with one cannot be sent to the process that gathers the reports, and would end the whole run.
    """
    return _without_surrogates((yield))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value if value.isascii() else value.encode(errors="backslashreplace").decode()
        case dict():
            return {key: _without_surrogates(inner) for key, inner in value.items()}
        case list() | tuple():
            return type(value)(_without_surrogates(inner) for inner in value)
        case _:
            return value


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The PostgreSQL of this test run: one of the tests' own, or the one SQLQ_TEST_POSTGRESQL_URL names."""
    if url := os.environ.get("SQLQ_TEST_POSTGRESQL_URL"):
        somebodys = PostgreSQL(make_url(url))
        yield somebodys
        somebodys.leave()
    else:
        with own_postgresql() as server:
            yield server


@pytest.fixture(scope="session")
def restartable_postgresql(postgresql: PostgreSQL) -> Iterator[OwnPostgreSQL]:
    """A server that may be stopped and crashed: the session's, unless that is somebody else's."""
    if isinstance(postgresql, OwnPostgreSQL):
        yield postgresql
    else:
        with own_postgresql() as server:
            yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The MariaDB of this test run."""
    with own_mariadb() as server:
        yield server


@pytest.fixture(scope="session")
def restartable_mariadb(mariadb: MariaDB) -> Iterator[OwnMariaDB]:
    """A server that may be stopped and crashed: the session's, unless that is somebody else's."""
    if isinstance(mariadb, OwnMariaDB):
        yield mariadb
    else:
        server = OwnMariaDB()
        yield server
        server.close()


@pytest.fixture
def restartable_server(request: pytest.FixtureRequest, database_url: str) -> OwnPostgreSQL | OwnMariaDB:
    """The server of the test's database, which may be stopped and crashed."""
    kind = make_url(database_url).get_backend_name()
    server: OwnPostgreSQL | OwnMariaDB = request.getfixturevalue(f"restartable_{kind}")
    return server


@pytest.fixture(params=DATABASES)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with nothing in it: a file that does not exist yet, or a new database of the
    server."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "empty.db")
    elif request.param == "mariadb":
        with fresh_database(request.getfixturevalue("mariadb")) as url:
            yield url
    else:
        with fresh_database(request.getfixturevalue("postgresql")) as url:
            yield url


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with sqlq's tables and no jobs, for this test alone."""
    if request.param == "sqlite":
        file = tmp_path / "sqlq.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), file)
        yield sqlite_url(file)
    elif request.param == "mariadb":
        with fresh_database(request.getfixturevalue("mariadb")) as url:
            _migrate(url)
            yield url
    else:
        with fresh_database(
            request.getfixturevalue("postgresql"), template=request.getfixturevalue("migrated_postgresql")
        ) as url:
            yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A user's engine: made as they would, without anything of sqlq's."""
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def app(database_url: str) -> Iterator[sqlq.App]:
    """An App on the test's database."""
    app = sqlq.App(database_url)
    yield app
    app.close()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with sqlq's tables, to be copied."""
    file = tmp_path_factory.mktemp("migrated") / "sqlq.db"
    _migrate(sqlite_url(file))
    assert [path.name for path in file.parent.iterdir()] == [file.name], (
        "a log beside the file means that a copy of it lacks something"
    )
    return file


@pytest.fixture(scope="session")
def migrated_postgresql(postgresql: PostgreSQL) -> Iterator[str]:
    """The URL of a database with sqlq's tables, to be a template."""
    with fresh_database(postgresql) as url:
        _migrate(url)
        yield url


def sqlite_url(file: Path) -> str:
    """Return the URL of a SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string()


@contextmanager
def fresh_database(server: PostgreSQL | MariaDB, template: str | None = None) -> Iterator[str]:
    """Make a database while the block lasts, empty or as a template; yields its URL."""
    url = server.create_database(template) if isinstance(server, PostgreSQL) else server.create_database()
    try:
        yield url
    finally:
        server.drop_database(url)


def _migrate(url: str) -> None:
    app = sqlq.App(url)
    app.migrate()
    app.close()
