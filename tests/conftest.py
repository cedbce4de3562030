"""What every test can ask for: servers, databases and an App on each kind of database.

`database_url`, and what rests on it (`engine`, `app`), gives every test twice, once for SQLite and once for
PostgreSQL. A test for one of them alone says so:

    @pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)

A database that cannot be had is a failure, never a skip.
"""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, make_url

import sqlq
from tests.servers import OwnPostgreSQL, PostgreSQL, own_postgresql

DATABASES = ["sqlite", "postgresql"]


def pytest_configure() -> None:
    """Forget what the shell says of sqlq's settings, so that no test sees, or touches, the database they
    name, and of Ctrl-C."""
    for name in [
        name for name in os.environ if name.startswith("SQLQ_") and not name.startswith("SQLQ_TEST_")
    ]:
        del os.environ[name]
    # what is started in the background ignores Ctrl-C, and so would each process that a test interrupts
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Two processes a core: half of the time a test waits for processes, leases and timeouts."""
    return 2 * (os.cpu_count() or 1)


SAME_ON_BOTH = (
    "faces/",
    *(f"worker/test_{what}.py" for what in ("around", "bounds", "control", "eager", "events", "isolates")),
    *(f"worker/test_{what}.py" for what in ("lifespan", "named", "starting", "stamp", "typed")),
    *(f"faults/test_{what}.py" for what in ("flows_survive", "follow_ups", "limits", "nothing_is_lost")),
    *(f"faults/test_{what}.py" for what in ("operated", "schedules", "slices", "supervisor", "zombies")),
)
"""Folders and files of tests of what is above the database, most of which start processes: the statements
below have tests of their own on each kind. The command of the scorecard runs them all on both."""
BOTH = "SQLQ_TEST_BOTH"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have a test of what is above the database run on one kind of it, chosen by the test's name, unless it
    is asked for by name or SQLQ_TEST_BOTH is set."""
    if os.environ.get(BOTH) or any("::" in argument for argument in config.args):
        return
    twins: dict[object, list[pytest.Item]] = {}
    for item in items:
        if (key := _but_for_the_database(item)) is not None:
            twins.setdefault(key, []).append(item)
    left_out: list[pytest.Item] = []
    for key, found in twins.items():
        if len(found) == len(DATABASES):
            left_out.append(found[zlib.crc32(repr(key).encode()) % len(found)])
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def _but_for_the_database(item: pytest.Item) -> object:
    """Return what tells a test from all others but its twin on the other kind of database; None for one that
    has none, or needs to run on both."""
    if not item.path.relative_to(Path(__file__).parent).as_posix().startswith(SAME_ON_BOTH):
        return None
    indices: dict[str, int] = getattr(getattr(item, "callspec", None), "indices", {})
    kinds = {"database_url", "empty_database_url"}
    if not indices.keys() & kinds:
        return None
    name, _, _ = item.nodeid.partition("[")
    return name, tuple(sorted((each, place) for each, place in indices.items() if each not in kinds))


def pytest_sessionstart() -> None:
    """Compile sqlq once: a thousand processes that the tests start import it, and write nothing."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compileall.compile_dir(Path(sqlq.__file__).parent, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates in what a test logged: a report with one cannot be sent to the process that
    gathers the reports, and would end the whole run."""
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


@pytest.fixture(params=DATABASES)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with nothing in it: a file that does not exist yet, or a new database of the
    server."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "empty.db")
    else:
        with _fresh(request.getfixturevalue("postgresql")) as url:
            yield url


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with sqlq's tables and no jobs, for this test alone."""
    if request.param == "sqlite":
        file = tmp_path / "sqlq.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), file)
        yield sqlite_url(file)
    else:
        with _fresh(
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
    with _fresh(postgresql) as url:
        _migrate(url)
        yield url


def sqlite_url(file: Path) -> str:
    """Return the URL of a SQLite file."""
    return URL.create("sqlite", database=str(file)).render_as_string()


@contextmanager
def _fresh(server: PostgreSQL, template: str | None = None) -> Iterator[str]:
    url = server.create_database(template)
    try:
        yield url
    finally:
        server.drop_database(url)


def _migrate(url: str) -> None:
    app = sqlq.App(url)
    app.migrate()
    app.close()
