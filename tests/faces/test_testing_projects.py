"""sqlq's pytest plugin in real projects: each runs in a process of its own."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, inspect, make_url

import sqlq
from sqlq.testing.database import _into
from tests.kit import execute, needs
from tests.kit.databases import sqlite_url
from tests.kit.flows import RealShop, rows
from tests.kit.preloaded import ROOT, environment, preloaded

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


def run_pytest(project: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    # the plugin is named, since other plugins of this environment are left out
    command = ["python", "-m", "pytest", "-p", "sqlq.testing.fixtures", "-p", "no:cacheprovider", "-q"]
    own = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **settings)
    return preloaded("pytest").run(command, project, own, timeout=120)


@pytest.fixture
def real(app: sqlq.App, database_url: str, engine: Engine) -> Iterator[str]:
    """The URL of a database with something in every table, all of which is there afterwards as it was."""
    RealShop(app).fill()
    app.close()
    before = rows(database_url)
    yield database_url
    assert rows(database_url) == before
    schemas = inspect(engine).get_schema_names()
    assert not [name for name in schemas if re.fullmatch(r"sqlq_test_[0-9a-f]{12}", name)]


def test_the_fixture_beside_a_real_database(project: Path, real: str) -> None:
    done = run_pytest(project, SQLQ_TEST_DATABASE_URL=real if not real.startswith("sqlite") else "")
    assert done.returncode == 0, done.stdout + done.stderr


OWN_TABLES = """
import os
import pytest
import shop
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlq.testing import assert_enqueued, drain

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


@needs("postgresql")
def test_an_applications_own_tables_are_in_the_tests_schema(project: Path, real: str) -> None:
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
@needs("file")
def test_the_fixture_refuses_a_file_with_rows_of_sqlq(project: Path, real: str) -> None:
    held = Path(str(make_url(real).database)).read_bytes()
    tables = {"jobs": 2, "failed_jobs": 1, "finished_jobs": 1, "sqlq_queues": 1}
    for cleared, (table, number) in enumerate(tables.items()):
        copy = project / f"{cleared}.db"
        copy.write_bytes(held)
        with closing(sqlite3.connect(copy, isolation_level=None)) as conn:
            for each in list(tables)[:cleared]:
                conn.execute(f"DELETE FROM {each}")
        left = copy.read_bytes()
        done = run_pytest(project, SQLQ_TEST_DATABASE_URL=sqlite_url(copy))
        assert (done.returncode, f"{number} in {table}" in done.stdout) == (1, True)
        assert copy.read_bytes() == left


@pytest.mark.parametrize("refused", ["orders", "depot.parcels"])
def test_tables_that_may_be_no_tests_are_not_dropped(project: Path, refused: str) -> None:
    url = sqlite_url(project / "own.db")
    engine = create_engine(url)
    execute(engine, "CREATE TABLE orders (id INTEGER)")
    schema, _, name = refused.rpartition(".")
    (project / "conftest.py").write_text(
        "import pytest, sqlalchemy\nmetadata = sqlalchemy.MetaData()\n"
        f"sqlalchemy.Table({name!r}, metadata, schema={schema or None!r})\n"
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


LIGHT = """
import sys, pytest
before = {*sys.modules}
import sqlq.testing.fixtures
print(({*sys.modules} - before) & {"alembic", "asyncio", "sqlalchemy", "sqlq.app"})
"""


def test_the_plugin_is_light_and_registered(project: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    (project / "test_shop.py").write_text("def test_without_sqlq(): pass")
    (project / "pyproject.toml").unlink()
    assert run_pytest(project).returncode == 0
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert declared == {"sqlq": "sqlq.testing.fixtures"}
