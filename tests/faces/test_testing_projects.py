"""sqlq's pytest plugin, and what unittest needs, in real projects: each run in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, make_url, text

import sqlq
from sqlq.testing.database import _into
from tests.kit import execute
from tests.kit.beside import Shop, rows
from tests.kit.databases import DATABASES, sqlite_url
from tests.kit.mariadb import MariaDB
from tests.kit.postgresql import PostgreSQL
from tests.kit.preloaded import preloaded

ROOT = Path(__file__).parents[2]

PROJECT = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\nfilterwarnings = ["error"]\n{ini}\n',
    "shop.py": """
import sqlq
from sqlalchemy import text

app = sqlq.App("postgresql://nobody@nowhere.invalid/production")

@app.task(queue="mail")
def send_receipt(order_id: int) -> int:
    return order_id

def place_order(session, order_id):
    session.execute(text("SELECT 1"))
    app.enqueue(send_receipt.new(order_id), session=session)
""",
    "test_shop.py": """
import pytest
import shop
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlq.testing import assert_enqueued, assert_not_enqueued, drain, inline

@pytest.fixture
def session(sqlq_app):
    engine = create_engine(sqlq_app.database.engine.url)
    with Session(engine) as session:
        yield session
    engine.dispose()

def test_a_rolled_back_session_leaves_nothing(sqlq_app, session):
    shop.place_order(session, 7)
    assert_enqueued(shop.send_receipt, args=[7], session=session)
    session.rollback()
    assert_not_enqueued(shop.send_receipt)

@pytest.mark.parametrize("again", range(2))
def test_each_test_begins_with_nothing(sqlq_app, session, again):
    assert_not_enqueued(shop.send_receipt)
    shop.place_order(session, again)
    session.commit()
    assert_enqueued(shop.send_receipt, args=[again], queue="mail")
    assert drain(sqlq_app).finished == 1

def test_inline(sqlq_app, session):
    with inline(sqlq_app) as ran:
        shop.place_order(session, 9)
    assert ran.jobs[0].result == 9
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, content in PROJECT.items():
        (tmp_path / name).write_text(content.replace("{ini}", 'sqlq_app = "shop:app"'))
    return tmp_path


def run(project: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))}
    names = own | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)} | environment
    return preloaded("pytest").run(["python", "-m", *command], project, names, timeout=120)


def run_pytest(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # the plugin is named, so that this works in a checkout that is not installed, and other plugins of this
    # environment are left out
    plugins = ("-p", "sqlq.testing.fixtures", "-p", "no:cacheprovider")
    return run(project, "pytest", *plugins, "-q", *arguments, **environment)


def test_the_fixture_in_a_project(project: Path) -> None:
    done = run_pytest(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.fixture(params=DATABASES)
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with something in every table, all of which is there afterwards as it was."""
    server: PostgreSQL | MariaDB | None = None
    if request.param != "sqlite":
        server = request.getfixturevalue(request.param)
    url = sqlite_url(tmp_path / "real.db") if server is None else server.create_database()
    app = sqlq.App(url)
    app.migrate()
    Shop(app).fill()
    app.close()
    before = rows(url)
    yield url
    assert rows(url) == before
    if server is not None:
        engine = create_engine(url)
        with engine.connect() as conn:
            assert not [
                name
                for name in inspect(conn).get_schema_names()
                if re.fullmatch(r"sqlq_test_[0-9a-f]{12}", name)
            ]
        engine.dispose()
        server.drop_database(url)


on_postgresql = pytest.mark.parametrize("real", ["postgresql"], indirect=True)
on_sqlite = pytest.mark.parametrize("real", ["sqlite"], indirect=True)


def test_the_fixture_beside_a_real_database(project: Path, real: str) -> None:
    """On PostgreSQL in the very database, on SQLite in a file of the test's own."""
    done = run_pytest(project, SQLQ_TEST_DATABASE_URL=real if not real.startswith("sqlite") else "")
    assert done.returncode == 0, done.stdout + done.stderr


FACTORY = {
    "shop.py": """
import os
import re
import sqlq
from sqlalchemy import create_engine

app = sqlq.App(os.environ["DATABASE_URL"])
done = []

@app.task
def send_receipt(order_id: int) -> None:
    done.append(order_id)

def create_app(url):
    app.use(engine=create_engine(url))

worker = app.worker(drain=True)
""",
    "test_shop.py": """
import os
import re
import pytest
import shop
import sqlq
from sqlq.testing import assert_enqueued, assert_not_enqueued, drain

def place_and_run_an_order():
    shop.done.clear()
    shop.app.migrate()
    assert_not_enqueued(shop.send_receipt)
    shop.app.enqueue(shop.send_receipt.new(7))
    shop.app.enqueue(shop.send_receipt.new(8).set(delay="1h"))
    assert_enqueued(shop.send_receipt, args=[7])
    assert drain(shop.app) == sqlq.testing.Counts(finished=1)
    assert shop.done == [7]

def test_made_for_the_test(sqlq_app):
    shop.create_app(sqlq_app.database.engine.url)
    place_and_run_an_order()

def test_made_from_the_environment(sqlq_app):
    shop.create_app(os.environ["DATABASE_URL"])
    place_and_run_an_order()

def test_made_before(sqlq_app):
    with pytest.raises(sqlq.errors.ConfigurationError, match="a test database is open"):
        shop.worker.run()
    place_and_run_an_order()
""",
}


@pytest.mark.variants
@pytest.mark.parametrize("on_the_server", [False, True])
def test_an_application_factory_does_not_move_the_test_database(
    project: Path, real: str, on_the_server: bool
) -> None:
    for name, content in FACTORY.items():
        (project / name).write_text(content)
    environment = {"DATABASE_URL": real}
    if on_the_server:
        other = sqlite_url(project / "test.db")
        environment["SQLQ_TEST_DATABASE_URL"] = real if not real.startswith("sqlite") else other
    done = run_pytest(project, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


OWN_TABLES = """
import os
import re
import pytest
import shop
from sqlalchemy import create_engine, func, inspect, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlq.testing import assert_enqueued, assert_not_enqueued, drain

class Base(DeclarativeBase): ...

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)

@pytest.fixture
def engine(sqlq_app):
    engine = create_engine(sqlq_app.database.engine.url)
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()

@pytest.mark.parametrize("again", range(2))
def test_they_live_beside_sqlqs(sqlq_app, engine, again):
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Order)) == 0
        session.add(Order(id=5))
        shop.place_order(session, 5)
        session.commit()
    assert_enqueued(shop.send_receipt, args=[5])
    assert drain(sqlq_app).finished == 1

@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_with_an_asynchronous_engine(sqlq_app, engine, driver):
    import asyncio

    async def main():
        url = sqlq_app.database.engine.url
        if driver == "psycopg":
            engine = create_async_engine(url)
        else:
            engine = create_async_engine(
                url.set(drivername="postgresql+asyncpg").difference_update_query(["options"]),
                connect_args={"server_settings": {"search_path": sqlq_app.schema}},
            )
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(id=6))
            await sqlq_app.aenqueue(shop.send_receipt.new(6), session=session)
        await engine.dispose()

    asyncio.run(main())
    assert_enqueued(shop.send_receipt, args=[6])
    with Session(engine) as session:
        assert session.get(Order, 6)

def test_those_made_beforehand_are_seen_by_the_servers_own_url(sqlq_app):
    engine = create_engine(os.environ["SQLQ_TEST_DATABASE_URL"])
    with Session(engine) as session:
        assert session.get(Order, 1)
        shop.place_order(session, 1)
        session.commit()
    engine.dispose()
    assert_enqueued(shop.send_receipt, args=[1])
    assert drain(sqlq_app).finished == 1
"""


@on_postgresql
def test_an_applications_own_tables_are_in_the_tests_schema(project: Path, real: str) -> None:
    """`create_all` and `drop_all` in it, while tables of the same names are in `public`."""
    (project / "test_shop.py").write_text(OWN_TABLES)
    done = run_pytest(project, SQLQ_TEST_DATABASE_URL=real)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fixture_keeps_options_of_the_servers_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGOPTIONS", raising=False)

    def options(url: str) -> object:
        return _into(make_url(url), "mine").query.get("options")

    assert options("postgresql+psycopg://h/d") == "-csearch_path=mine"
    assert options("postgresql+psycopg2://h/d?options=-cjit%3Doff") == "-cjit=off -csearch_path=mine"
    monkeypatch.setenv("PGOPTIONS", "-cwork_mem=8MB")
    assert options("postgresql+psycopg://h/d") == "-cwork_mem=8MB -csearch_path=mine"
    assert options("postgresql+asyncpg://h/d") is None


@pytest.mark.slow
@on_sqlite
def test_the_fixture_refuses_a_file_with_rows_of_sqlq(project: Path, real: str) -> None:
    held = (project / "real.db").read_bytes()
    tables = ("jobs", "failed_jobs", "finished_jobs", "sqlq_queues")
    for cleared, said in enumerate(
        ("2 in jobs", "1 in failed_jobs", "1 in finished_jobs", "1 in sqlq_queues")
    ):
        copy = project / f"{cleared}.db"
        copy.write_bytes(held)
        engine = create_engine(sqlite_url(copy))
        with engine.begin() as conn:
            for table in tables[:cleared]:
                conn.execute(text(f"DELETE FROM {table}"))
        engine.dispose()
        left = copy.read_bytes()
        done = run_pytest(project, SQLQ_TEST_DATABASE_URL=sqlite_url(copy))
        assert done.returncode == 1
        assert said in done.stdout
        assert copy.read_bytes() == left


@pytest.mark.parametrize(
    ("definition", "refused"),
    [
        ("sqlalchemy.Table('orders', metadata)", "orders"),
        ("sqlalchemy.Table('parcels', metadata, schema='depot')", "depot.parcels"),
    ],
)
def test_tables_that_may_be_no_tests_are_not_dropped(project: Path, definition: str, refused: str) -> None:
    url = sqlite_url(project / "own.db")
    engine = create_engine(url)
    execute(engine, "CREATE TABLE orders (id INTEGER)")
    (project / "conftest.py").write_text(
        f"import pytest, sqlalchemy\nmetadata = sqlalchemy.MetaData()\n{definition}\n"
        "@pytest.fixture\ndef sqlq_metadata():\n    return metadata\n"
    )
    done = run_pytest(project, SQLQ_TEST_DATABASE_URL=url)
    assert done.returncode == 1
    assert f"or name a schema: {refused}; sqlq_app drops" in done.stdout
    assert inspect(engine).has_table("orders")
    engine.dispose()


@pytest.mark.variants
@pytest.mark.parametrize(
    ("ini", "said"),
    [
        ("", "the fixture sqlq_app does not know your App"),
        ('sqlq_app = "shop"', "is not a sqlq.App, but a module"),
        ('sqlq_app = "shoppe:app"', "No module named 'shoppe'"),
        ('sqlq_app = "shop:place_order"', "is not a sqlq.App, but a function"),
    ],
)
def test_an_app_that_cannot_be_found_is_reported_in_one_sentence(project: Path, ini: str, said: str) -> None:
    (project / "pyproject.toml").write_text(PROJECT["pyproject.toml"].replace("{ini}", ini))
    done = run_pytest(project)
    assert done.returncode == 1
    assert said in done.stdout


def test_the_plugin_is_light_and_registered(project: Path) -> None:
    def loaded_with(module: str) -> str:
        program = (
            f"import sys, {module}; print([m for m in ('alembic', 'asyncio', 'sqlalchemy', "
            "'sqlq.app') if m in sys.modules])"
        )
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    assert loaded_with("sqlq.testing.fixtures") == loaded_with("pytest")
    (project / "test_shop.py").write_text("def test_without_sqlq(): pass")
    (project / "pyproject.toml").unlink()
    assert run_pytest(project).returncode == 0


UNITTEST = """
import asyncio
import tempfile
import unittest
import shop
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlq.testing import assert_enqueued, assert_not_enqueued, create_tables, drain, inline, on_database

class TestOrders(unittest.TestCase):
    def setUp(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(on_database(shop.app, f"sqlite:///{folder}/test.db"))

    def test_an_order_sends_a_receipt(self):
        engine = create_engine(shop.app.database.engine.url)
        with Session(engine) as session:
            shop.place_order(session, 7)
            assert_enqueued(shop.send_receipt, args=[7], session=session)
            session.commit()
        engine.dispose()
        assert_enqueued(shop.send_receipt, args=[7])
        self.assertEqual(drain(shop.app).finished, 1)

    def test_each_test_begins_with_nothing(self):
        assert_not_enqueued(shop.send_receipt)

class TestInline(unittest.TestCase):
    def setUp(self):
        self.ran = self.enterContext(inline(shop.app))

    def test_an_order_sends_a_receipt(self):
        shop.app.enqueue(shop.send_receipt.new(7))
        self.assertEqual([job.result for job in self.ran.jobs], [7])

class TestAsync(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.enterContext(on_database(shop.app, f"sqlite:///{folder.name}/test.db"))

    async def asyncSetUp(self):
        url = shop.app.database.engine.url.set(drivername="sqlite+aiosqlite")
        self.engine = create_async_engine(url)
        self.addAsyncCleanup(self.engine.dispose)

    async def test_an_order_sends_a_receipt(self):
        async with AsyncSession(self.engine) as session, session.begin():
            await shop.app.aenqueue(shop.send_receipt.new(7), session=session)
        await shop.app.aenqueue(shop.asend_receipt.new(8))
        assert_enqueued(shop.send_receipt, args=[7])
        self.assertEqual((await asyncio.to_thread(drain, shop.app)).finished, 2)

    async def test_inline_at_commit(self):
        with inline(shop.app, at="commit") as ran:
            async with AsyncSession(self.engine) as session, session.begin():
                await shop.app.aenqueue(shop.asend_receipt.new(7), session=session)
        self.assertEqual([job.result for job in ran.jobs], [7])

class TestInMemory(unittest.TestCase):
    def test_tables_in_memory(self):
        engine = create_engine("sqlite://")
        with on_database(shop.app, "sqlite://"), Session(engine) as session:
            create_tables(session)
            shop.place_order(session, 7)
            assert_enqueued(shop.send_receipt, args=[7], session=session)
        engine.dispose()
"""


def test_unittest(project: Path) -> None:
    (project / "test_shop.py").write_text(UNITTEST)
    with (project / "shop.py").open("a") as module:
        module.write("\n@app.task\nasync def asend_receipt(order_id: int) -> int:\n    return order_id\n")
    done = run(project, "unittest", "-v", PYTHONWARNINGS="error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 6 tests" in done.stderr
