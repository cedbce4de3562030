"""sqlq's tables inside a host project's own Alembic, from its first migration to its autogenerate."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import create_async_engine

import sqlq.alembic
from sqlq.database import migrate, standing
from sqlq.errors import ConfigurationError, SchemaVersionError, UnsupportedDatabaseError
from sqlq.schema import version
from tests.kit import execute, needs
from tests.kit.postgresql import async_database_url
from tests.migrations.catalogue import own_names, run_script

pytestmark = pytest.mark.each_database

INI = """
[alembic]
script_location = {directory}
"""

ENV = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, NullPool, Table, create_engine

url = context.config.attributes["url"]
options = context.config.attributes["options"]
metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True), Column("total", Integer))

if context.is_offline_mode():
    context.configure(url=url, target_metadata=metadata, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection, target_metadata=metadata, **options)
        with context.begin_transaction():
            context.run_migrations()
"""

ORDERS = """
import sqlalchemy as sa
import sqlq.alembic
from alembic import context, op

revision = "a1"
down_revision = None


def upgrade():
    op.create_table("orders", sa.Column("id", sa.Integer, primary_key=True))
    sqlq.alembic.upgrade(op, {up})
    op.add_column("orders", sa.Column("total", sa.Integer))
    {then}
    assert context.get_context() is op.get_context()


def downgrade():
    sqlq.alembic.downgrade(op, {down})
    op.drop_table("orders")
"""

MAKO = """
from alembic import op
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades}
"""


class Host:
    """A project with an Alembic of its own, whose first migration also builds sqlq's tables."""

    def __init__(
        self,
        directory: Path,
        url: str,
        up: str = '"0001"',
        down: str = '"base"',
        then: str = "pass",
        **options: Any,
    ) -> None:
        (directory / "versions").mkdir(parents=True)
        (directory / "env.py").write_text(ENV)
        (directory / "script.py.mako").write_text(MAKO)
        (directory / "versions" / "a1_orders.py").write_text(ORDERS.format(up=up, down=down, then=then))
        (directory / "alembic.ini").write_text(INI.format(directory=directory))
        self.output = io.StringIO()
        self.config = Config(str(directory / "alembic.ini"), stdout=io.StringIO(), output_buffer=self.output)
        self.config.attributes |= {"url": url, "options": options}

    def autogenerate(self) -> str:
        """Return the body of the migration that Alembic proposes."""
        script = command.revision(self.config, autogenerate=True)
        assert script is not None
        assert not isinstance(script, list)
        return Path(script.path).read_text()


@pytest.fixture
def engine(empty: Engine) -> Engine:
    """An engine on the host's database, empty at first."""
    return empty


@pytest.fixture
def make_host(tmp_path: Path, empty_database_url: str) -> Callable[..., Host]:
    """A host on that database; options are those of its `context.configure`."""
    return partial(Host, tmp_path / "host", empty_database_url)


def columns_of_orders(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT * FROM orders")).keys())


# ── Migrations ──────────────────────────────────────────────────────────────────────────────────────────────


def test_up_and_down_inside_the_hosts_migration(make_host: Callable[..., Host], engine: Engine) -> None:
    host = make_host()
    command.upgrade(host.config, "head")
    assert standing.check(engine, None).standing == "up to date"
    assert columns_of_orders(engine) == ["id", "total"], "the host's op was usable before and after"
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["a1"]
    command.downgrade(host.config, "base")
    assert own_names(engine) == set()
    command.upgrade(host.config, "head")
    assert standing.check(engine, None).standing == "up to date"


def test_a_failed_host_migration_rolls_back_sqlqs_tables(
    make_host: Callable[..., Host], engine: Engine
) -> None:
    host = make_host(then="raise RuntimeError('the host failed')")
    with pytest.raises(RuntimeError, match="the host failed"):
        command.upgrade(host.config, "head")
    # on MariaDB each statement has committed, and the host's next try finds sqlq's tables made
    made = standing.OWN_NAMES if engine.dialect.name == "mariadb" else set()
    assert own_names(engine) == made
    in_a_context(engine, sqlq.alembic.upgrade)
    assert standing.check(engine, None).standing == "up to date"


@needs("schemas", empty=True)
def test_a_schema_by_argument_or_by_setting(
    make_host: Callable[..., Host], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host(up='schema="queueing"', down='"base", schema="queueing"')
    command.upgrade(host.config, "head")
    assert standing.check(engine, "queueing").standing == "up to date"
    command.downgrade(host.config, "base")
    assert standing.check(engine, "queueing").standing == "missing"
    monkeypatch.setenv("SQLQ_SCHEMA", "configured")
    in_a_context(engine, sqlq.alembic.upgrade)
    assert standing.check(engine, "configured").standing == "up to date"
    assert own_names(engine) == set()


def test_foreign_and_newer_tables_are_refused(engine: Engine) -> None:
    execute(engine, "CREATE TABLE jobs (id INTEGER)")
    with pytest.raises(ConfigurationError, match="holds jobs already, not made by sqlq"):
        in_a_context(engine, sqlq.alembic.upgrade)
    execute(engine, "DROP TABLE jobs")
    migrate.upgrade(engine, None)
    execute(engine, "UPDATE sqlq_version SET version_num = '0099'")
    with pytest.raises(SchemaVersionError, match="newer than"):
        in_a_context(engine, sqlq.alembic.upgrade)


def test_an_asynchronous_hosts_connection_serves(empty_database_url: str, engine: Engine) -> None:
    def build(connection: Connection) -> None:
        sqlq.alembic.upgrade(Operations(MigrationContext.configure(connection)))

    async def host() -> None:
        asynchronous = create_async_engine(async_database_url(empty_database_url))
        async with asynchronous.begin() as connection:
            await connection.run_sync(build)
        await asynchronous.dispose()

    asyncio.run(host())
    assert standing.check(engine, None).standing == "up to date"


def in_a_context(engine: Engine, work: Callable[[Operations], None]) -> None:
    with engine.begin() as connection:
        work(Operations(MigrationContext.configure(connection)))


# ── Offline ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hosts_offline_sql_holds_sqlqs(make_host: Callable[..., Host], engine: Engine) -> None:
    host = make_host()
    command.upgrade(host.config, "head", sql=True)
    assert own_names(engine) == set()
    run_script(engine, host.output.getvalue())
    assert standing.check(engine, None).standing == "up to date"
    assert columns_of_orders(engine) == ["id", "total"]


def test_an_offline_downgrade_needs_both_revisions(make_host: Callable[..., Host], engine: Engine) -> None:
    host = make_host()
    with pytest.raises(ConfigurationError, match="give both revisions, as in '0001:base'"):
        command.downgrade(host.config, "a1:base", sql=True)


def test_a_migration_for_another_database_is_refused_in_one_sentence() -> None:
    host = MigrationContext.configure(dialect_name="mysql", opts={"as_sql": True})
    with pytest.raises(
        UnsupportedDatabaseError, match="PostgreSQL, MariaDB and SQLite; this migration is for mysql"
    ):
        sqlq.alembic.upgrade(Operations(host))


def test_an_offline_downgrade_with_both_revisions_drops_the_tables(
    make_host: Callable[..., Host], engine: Engine
) -> None:
    host = make_host(down=f'"{version.HEAD}:base"')
    command.upgrade(host.config, "head")
    command.downgrade(host.config, "a1:base", sql=True)
    run_script(engine, host.output.getvalue())
    assert own_names(engine) == set()


# ── Autogenerate ────────────────────────────────────────────────────────────────────────────────────────────


def test_autogenerate_with_include_name_leaves_sqlqs_tables(
    make_host: Callable[..., Host], engine: Engine
) -> None:
    host = make_host(include_name=sqlq.alembic.include_name)
    command.upgrade(host.config, "head")
    command.check(host.config)
    execute(engine, "CREATE TABLE stray (id INTEGER)")
    proposed = host.autogenerate()
    assert "op.drop_table('stray')" in proposed
    assert proposed.count("op.drop") == 1


@needs("schemas", empty=True)
def test_include_name_knows_sqlqs_schema_from_the_hosts(
    make_host: Callable[..., Host], engine: Engine
) -> None:
    include_name = partial(sqlq.alembic.include_name, schema="queueing")
    host = make_host(up='schema="queueing"', include_schemas=True, include_name=include_name)
    command.upgrade(host.config, "head")
    command.check(host.config)
    execute(engine, "CREATE TABLE jobs (id INTEGER)")
    proposed = host.autogenerate()
    assert "op.drop_table('jobs')" in proposed, "the host's own jobs is the host's"
    assert "queueing" not in proposed


@needs("schemas", empty=True)
@pytest.mark.parametrize("given", ["app", None])
@pytest.mark.parametrize("schemas", [False, True])
def test_include_name_knows_the_default_schema_by_its_name(
    make_host: Callable[..., Host], engine: Engine, given: str | None, schemas: bool
) -> None:
    """Alembic gives None for the schema that a search_path begins with."""
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA app"))
        connection.execute(text(f"ALTER DATABASE {engine.url.database} SET search_path = app"))
    include_name = partial(sqlq.alembic.include_name, schema=given)
    host = make_host(up=f"schema={given!r}", include_schemas=schemas, include_name=include_name)
    command.upgrade(host.config, "head")
    command.check(host.config)
    execute(engine, "CREATE TABLE public.jobs (id INTEGER)")
    assert ("op.drop_table('jobs', schema='public')" in host.autogenerate()) is schemas


@needs("file", empty=True)
def test_include_name_knows_that_sqlite_has_one_schema(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLQ_SCHEMA", "queueing")
    host = make_host(include_name=sqlq.alembic.include_name)
    command.upgrade(host.config, "head")
    assert "op." not in host.autogenerate()
