"""Where the database is found, the sentence for a URL that leads to none, commands that name it, and
[tool.sqlq] in pyproject.toml."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

import sqlq
from sqlq.cli.context import Context
from sqlq.config import pyproject, urls
from sqlq.config.command_hint import command, word
from sqlq.database.dialects import dialect_at
from sqlq.errors import ConfigurationError, UnsupportedDatabaseError
from sqlq.testing import inline, on_database
from tests.kit import for_each


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without settings."""
    for name in ("DATABASE_URL", "LISTEN_URL", "SCHEMA"):
        monkeypatch.delenv(f"SQLQ_{name}", raising=False)


def test_the_argument_comes_before_environment_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert urls.database_url() == make_url(urls.DEFAULT_URL)
    monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///from_environment.db")
    assert urls.database_url().database == "from_environment.db"
    assert urls.database_url("sqlite:///given.db").database == "given.db"
    monkeypatch.setenv("SQLQ_DATABASE_URL", "")
    assert urls.database_url() == make_url(urls.DEFAULT_URL)


@for_each(
    ("given", "driver"),
    [
        ("postgresql://h/d", "postgresql+psycopg"),
        ("postgres://h/d", "postgresql+psycopg"),
        ("postgresql+asyncpg://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg_async://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg2"),
        ("sqlite+aiosqlite:///a.db", "sqlite"),
    ],
)
def test_sqlq_connects_synchronously(given: str, driver: str) -> None:
    assert urls.database_url(given).drivername == driver


def test_the_url_to_listen_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert urls.listen_url() is None
    monkeypatch.setenv("SQLQ_LISTEN_URL", "postgresql://direct/d")
    assert str(urls.listen_url()) == "postgresql+psycopg://direct/d"
    assert str(urls.listen_url("postgres://given/d")) == "postgresql+psycopg://given/d"
    refused = r"the URL to listen at is .*, so it has the form postgresql://"
    for wrong in ("sqlite:///y.db", "postgresql+psycopg2://h/d"):
        with pytest.raises(ConfigurationError, match=refused):
            sqlq.App("postgresql://h/d", listen_url=wrong)


def test_tcp_timeouts_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)

    def ends(url: URL, seconds: int) -> dict[str, Any]:
        return dialect_at(url).driver.ends(url, seconds)

    keepalives = {"keepalives_idle": 10, "keepalives_interval": 3, "keepalives_count": 3}
    given = ends(urls.database_url("postgresql://h/d"), 3)
    assert given == {"connect_timeout": 3, **keepalives, "tcp_user_timeout": 10_000}
    assert ends(urls.database_url("postgresql://h/d?connect_timeout=9&tcp_user_timeout=1"), 3) == keepalives
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "7")
    assert "connect_timeout" not in ends(urls.database_url("postgresql://h/d"), 3)
    assert ends(urls.database_url("postgresql://h/d?service=shop"), 3) == {}
    assert ends(urls.database_url("sqlite:///shop.db"), 3) == {}
    assert ends(urls.database_url("mariadb://h/d"), 3)["connect_timeout"] == 3
    assert "connect_timeout" not in ends(urls.database_url("mariadb://h/d?connect_timeout=9"), 3)


def test_a_file_is_found_when_the_url_has_an_empty_host(tmp_path: Path) -> None:
    url = URL.create("sqlite", username="", host="", database=str(tmp_path / "shop.db"))
    sqlq.App(url).migrate()
    assert (tmp_path / "shop.db").exists()


LIST = "postgresql://u@/shop?host=a:5433&host=b&target_session_attrs=read-write"


@for_each(
    ("given", "tried"),
    [
        (LIST, ["a:5433", "b:5432"]),
        ("postgresql://u@/shop?host=a,b&port=5433,5434", ["a:5433", "b:5434"]),
        ("postgresql://u@a,b:5433/shop", ["a:5433", "b:5433"]),
        ("postgresql://u@a,b/shop", ["a:5432", "b:5432"]),
        ("postgresql://u@a/shop", ["a:5432"]),
    ],
)
def test_a_list_of_hosts_is_read_in_each_of_its_forms(given: str, tried: list[str]) -> None:
    url = urls.database_url(given)
    assert urls.hosts(url) == tried
    options = url.get_dialect()().create_connect_args(url)[1]
    names, ports = options["host"].split(","), str(options.get("port", "")).split(",")
    ports = ports * len(names) if len(ports) == 1 else ports
    assert [f"{name}:{port or 5432}" for name, port in zip(names, ports, strict=True)] == tried


def test_a_list_of_hosts_is_shown_as_it_was_written_and_leads_to_the_database_of_each() -> None:
    assert urls.masked(urls.database_url(LIST)) == LIST.replace("postgresql:", "postgresql+psycopg:")
    assert command("status", urls.database_url(LIST)).count("host=a:5433&host=b&") == 1
    with pytest.raises(ConfigurationError, match=r"database\?host=a:5432&host=b:5432&target_"):
        urls.database_url("postgresql://u@a:5433,b:5432/shop")
    named = urls.database_url(LIST)
    assert urls.is_same_database(named, urls.database_url("postgresql://other@b/shop"))
    for other in ("postgresql://u@a/shop", "postgresql://u@b/other", "mariadb://u@b:5432/shop"):
        assert not urls.is_same_database(named, urls.database_url(other)), other


@for_each(
    ("given", "reason"),
    [
        ("mysql+pymysql://u:secret@h/d", "not on MySQL.*: for MariaDB write mariadb\\+pymysql://u:"),
        ("mysql://u:secret@h/d", "not on MySQL.*: for MariaDB write mariadb://u:"),
        ("oracle+cx_oracle://u:secret@h/d", "sqlq runs on PostgreSQL, MariaDB and SQLite, not on 'oracle'"),
        ("postgresql+pg99://u:secret@h/d", "by psycopg or psycopg2, not by 'postgresql\\+pg99'"),
        ("sqlite+sqlite99:///a.db", "by sqlite3, not by 'sqlite\\+sqlite99'"),
        ("postgresql+pg8000://u:secret@h/d", "by psycopg or psycopg2, not by 'postgresql\\+pg8000'"),
        ("mariadb+mysqlconnector://u:secret@h/d", "pymysql or mysqldb.*: give the App mariadb\\+pymysql://"),
    ],
)
def test_unsupported_databases_and_drivers(given: str, reason: str) -> None:
    with pytest.raises(UnsupportedDatabaseError, match=reason) as refusal:
        sqlq.App(given)
    assert "secret" not in str(refusal.value)


@for_each(
    "given",
    [
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+aiosqlite:///:memory:"),
        "sqlite:///file:x?mode=memory&cache=shared&uri=true",
        "sqlite:///file::memory:?cache=shared&uri=true",
    ],
)
def test_a_database_in_memory_is_refused_when_a_connection_is_needed(given: str) -> None:
    async_engine = given.startswith("sqlite+aiosqlite")
    engine: Any = (create_async_engine if async_engine else create_engine)(given, poolclass=StaticPool)
    refused = r"in memory is seen by one connection only, .* name a file, as in sqlite:///sqlq\.db"
    for app in (sqlq.App(given), sqlq.App(engine=engine)):
        app.close()
        for use in (
            *(app.migrate, app.jobs.list, app.queues.list, app.worker().run, app.worker(drain=True).run),
            lambda app=app: app.enqueue(sqlq.NewJob("t", "{}", "default", 1)),
            lambda app=app: app.database.engine.connect(),
        ):
            with pytest.raises(ConfigurationError, match=refused):
                use()


def test_asyncpg_parameters_are_translated_for_psycopg() -> None:
    url = urls.database_url(
        "postgresql+asyncpg://h/d?ssl=require&prepared_statement_cache_size=0&application_name=shop"
    )
    assert url.query == {"sslmode": "require", "application_name": "shop"}


SPELLINGS = (
    *("u:SEKRET@h/d", "u@h/d?password=SEKRET", "u:x@h/d?password=SEKRET", "u@h/d?password=a&password=SEKRET"),
    *("u@h/d?sslpassword=SEKRET", "u@h/d?passfile=/SEKRET", "u@h/d?oauth_client_secret=SEKRET"),
    *("u@h/d?scram_client_key=SEKRET", "u:SEKRET@h/d?sslpassword=SEKRET", "/d?PASSWORD=SEKRET"),
)


@for_each("driver", ["postgresql", "postgresql+psycopg2", "postgresql+asyncpg"])
@for_each("spelling", SPELLINGS)
def test_no_spelling_of_a_password_is_shown(spelling: str, driver: str) -> None:
    given = f"{driver}://{spelling}"
    url = urls.database_url(given)
    assert "SEKRET" in url.render_as_string(hide_password=False)
    app = sqlq.App(given)
    beside = sqlq.App(given, listen_url=given.replace("psycopg2", "psycopg"))
    shown = (app, beside, app._connected.address, app.database, beside._connected.address)
    told = [*map(repr, shown), urls.masked(url), urls.masked(make_url(given))]
    told += [command("status", url), command("status", make_url(given))]
    told += [str(Context(database_url=given)), *Context(database_url=given).options(needs_app=False)]
    with pytest.raises(UnsupportedDatabaseError) as raised:
        urls.database_url(f"mysql://{spelling}")
    told.append(str(raised.value))
    assert not [said for said in told if "SEKRET" in said]
    assert "***" in urls.masked(make_url(given))


def test_a_password_among_the_parameters_is_the_one_that_counts() -> None:
    assert urls.masked(URL.create("postgresql", "u", "s", "h", 5432, "d")) == "postgresql://u:***@h:5432/d"
    url = urls.database_url("postgresql://u:other@h/d?password=a%20b&sslmode=require")
    assert (url.password, dict(url.query)) == ("a b", {"sslmode": "require"})


def test_the_schema_is_a_plain_identifier(monkeypatch: pytest.MonkeyPatch) -> None:
    assert urls.schema_name() is None
    monkeypatch.setenv("SQLQ_SCHEMA", "queue_1")
    assert urls.schema_name() == "queue_1"
    assert urls.schema_name("other") == "other"
    for wrong in ("Queue", "a-b", "1a", "", 'a"b', "x" * 42, "a.b"):
        with pytest.raises(ConfigurationError, match="a schema is named by lower-case letters"):
            urls.schema_name(wrong)
    with pytest.raises(ConfigurationError, match=r"^schema is 'A B': a schema is named by"):
        sqlq.App("postgresql://localhost/shop", schema="A B")
    monkeypatch.setenv("SQLQ_SCHEMA", "A B")
    with pytest.raises(ConfigurationError, match=r"^SQLQ_SCHEMA is 'A B'"):
        sqlq.App("postgresql://localhost/shop")


def test_a_schema_means_nothing_on_sqlite(tmp_path: Path) -> None:
    app = sqlq.App(f"sqlite:///{tmp_path}/sqlq.db", schema="queue")
    app.migrate()
    assert app.jobs.list() == []
    app.use("postgresql://localhost/shop")
    assert app.database.requested_schema == "queue"
    with on_database(app, f"sqlite:///{tmp_path}/test.db"):
        assert app.jobs.list() == []


def test_the_url_to_listen_at_goes_with_its_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SQLQ_LISTEN_URL", "postgresql://env/shop")
    app = sqlq.App("postgresql://pooler/shop", listen_url="postgresql://direct/shop")

    def host() -> str | None:
        url = app._connected.address.listen_url
        return url and url.host

    assert host() == "direct"
    with on_database(app, f"sqlite:///{tmp_path}/test.db"):
        assert host() is None
    assert host() == "direct"
    app.use("postgresql://pooler/other")
    assert host() == "env"


def test_use_keeps_settings_that_are_not_given() -> None:
    """This holds in a factory, too, which knows the session alone."""
    engine = create_engine("postgresql+psycopg://pooler/shop")
    given = {"schema": "queue", "listen_url": "postgresql://direct/shop"}

    def at(app: sqlq.App) -> tuple[Any, ...]:
        there = app._connected.address
        url = app.database.engine.url
        return url.host, url.database, there.schema, there.listen_url and there.listen_url.host

    for app in (sqlq.App(engine=engine, **given), sqlq.App(engine.url, **given)):  # type: ignore[arg-type]
        database = app.database
        session = scoped_session(sessionmaker(engine))
        app.use(session=session)
        getter: Any = app._session
        assert (getter(), app.database) == (session, database), "nothing was closed"
        assert at(app) == ("pooler", "shop", "queue", "direct")
        app.use(schema="other")
        assert at(app) == ("pooler", "shop", "other", "direct")
        assert app._connected.address.engine in (engine, None)
        app.use(listen_url=None)
        assert at(app) == ("pooler", "shop", "other", None)
        app.use(engine=create_engine("postgresql+psycopg://next/shop"), listen_url="postgresql://by/shop")
        assert at(app) == ("next", "shop", "other", "by")
        app.use("postgresql://last/shop")
        assert at(app) == ("last", "shop", "other", "by")
        app.use("postgresql://last/other", schema=None)
        assert at(app) == ("last", "other", None, None), "which leads to another database"
        assert getter() is session
        app.close()


def test_use_with_nothing_is_refused_and_a_wrong_use_changes_nothing() -> None:
    app = sqlq.App("sqlite:///shop.db")
    before = app._connected.address
    wrong: Any = sessionmaker
    tries: list[tuple[Callable[[], Any], str]] = [
        (app.use, "^use\\(\\) says nothing"),
        (lambda: app.use(session=None), "^use\\(\\) says nothing"),
        (lambda: app.use("sqlite:///x.db", session=wrong), "give a scoped_session, or a function"),
        (lambda: app.use("mysql://h/d", session=lambda: None), "sqlq runs on MariaDB, not on MySQL"),
    ]
    for refused, why in tries:
        with pytest.raises(ConfigurationError, match=why):
            refused()
        assert (app._connected.address, app._session) == (before, None)


def test_a_url_of_none_is_refused_in_the_place_of_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    app = sqlq.App()
    for refused in (
        lambda: sqlq.App(os.environ.get("NO_SUCH_VARIABLE")),
        lambda: sqlq.App(url=None),
        lambda: app.use(None),
        lambda: app.use(url=None, schema="queue"),
    ):
        with pytest.raises(ConfigurationError, match=r"the database URL is None, as of os\.environ\.get"):
            refused()
    monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///of_the_environment.db")
    with pytest.raises(ConfigurationError, match="the database URL is None"):
        sqlq.App(None)
    assert sqlq.App()._connected.address.url.database == str(Path("of_the_environment.db").absolute())
    engine = create_engine("sqlite:///shop.db")
    assert sqlq.App(None, engine=engine)._connected.address.engine is engine, "a database is named"


def inlined(app: sqlq.App, job: Any, eager: Any) -> None:
    with inline(app):
        app.enqueue(job, eager=eager)


@for_each("wrong", ["no", "0", "", "false", 0, 1, "commits", []])
def test_eager_takes_no_text(wrong: Any) -> None:
    """For example that of an environment variable, which is true whatever its value."""
    app = sqlq.App("sqlite:///shop.db")
    job = app.named("t").new()
    sentence = f"^eager is {re.escape(repr(wrong))}: it is True or "
    for refused in (
        lambda: sqlq.App("sqlite:///shop.db", eager=wrong),
        lambda: app.enqueue(job, eager=wrong),
        lambda: app.enqueue_many([job], eager=wrong),
        lambda: asyncio.run(app.aenqueue(job, eager=wrong)),
        lambda: asyncio.run(app.aenqueue_many([job], eager=wrong)),
        lambda: inlined(app, job, wrong),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            refused()


def test_another_database_drops_the_listen_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SQLQ_LISTEN_URL", "postgresql://env/shop")
    monkeypatch.setenv("SQLQ_DATABASE_URL", "")  # the command sets it
    monkeypatch.syspath_prepend(tmp_path)
    app = "sqlq.App('postgresql://pooler/shop', schema='q', listen_url='postgresql://direct/shop')"
    for n, (name, host) in enumerate({"shop?application_name=x": "direct", "other": "env"}.items()):
        (tmp_path / f"listening_{n}.py").write_text(f"import sqlq\napp = {app}\n")
        url = f"postgresql://pooler/{name}"
        address = Context(database_url=url, app_option=f"listening_{n}:app").app()._connected.address
        assert (address.url, address.schema) == (urls.database_url(url), "q")
        assert address.listen_url is not None
        assert address.listen_url.host == host


# -- commands in messages ------------------------------------------------------------------------------------


def test_a_command_names_database_schema_and_app_and_steers_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, server = make_url("sqlite:///my shop.db"), "postgresql+psycopg://u@h/shop"
    assert command("migrate", file) == f"sqlq migrate -d 'sqlite:///{tmp_path}/my shop.db'"
    assert command("migrate", make_url(server), schema="q") == f"SQLQ_SCHEMA=q sqlq migrate -d {server}"
    assert command("migrate", make_url(server.replace("@", ":secret@"))) == (
        "SQLQ_DATABASE_URL='postgresql+psycopg://u:***@h/shop' sqlq migrate"
    )
    assert command("work -q mail", needs_app=True) == "sqlq work -q mail -a module:attribute"
    assert word("q\x1b[2J\n") == r"'q\u001b[2J\n'"


# -- pyproject.toml ------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a project, two levels below its pyproject.toml, as the current one."""
    table = '[tool.sqlq]\napp = "shop:app"\ndatabase-url = "sqlite:///dev.db"\n'
    (tmp_path / "pyproject.toml").write_text(table)
    inner = tmp_path / "src" / "shop"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


def test_the_nearest_pyproject_with_the_table_counts(here: Path, tmp_path: Path) -> None:
    for other in (None, '[project]\nname = "x"\n', "# [tool.sqlq] is in the file above\n"):
        if other is not None:
            (here / "pyproject.toml").write_text(other)
        found = pyproject.Project(tmp_path / "pyproject.toml", "shop:app", "sqlite:///dev.db")
        assert pyproject.find() == found
    (here.parent / "pyproject.toml").write_text('[tool.sqlq]\napp = "other:app"\n')
    assert pyproject.find() == pyproject.Project(here.parent / "pyproject.toml", "other:app")


def test_no_pyproject_is_found_without_a_table_or_a_directory(here: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("this is no TOML [[[")
    assert pyproject.find() is None
    assert urls.database_url().database == "sqlq.db"
    here.rmdir()
    assert pyproject.find() is None


def test_the_url_of_pyproject_is_relative_to_it_and_comes_last(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert urls.database_url().database == sqlq.App().database.engine.url.database == str(tmp_path / "dev.db")
    (tmp_path / "pyproject.toml").write_text('[tool.sqlq]\ndatabase-url = "postgresql://u@h/shop"\n')
    assert urls.database_url().render_as_string() == "postgresql+psycopg://u@h/shop", "unchanged"
    assert urls.database_url("sqlite:///mine.db").database == "mine.db"
    monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///variable.db")
    assert urls.database_url().database == "variable.db"


WRONG = {
    "[tool.sqlq]\ndefaults = 7\n": 'tool.sqlq.defaults is 7: it must be like {"timeout": "5m"}',
    "[tool.sqlq.queues]\nmail = 7\n": "tool.sqlq.queues.mail is 7: it maps options to values",
    '[tool.sqlq.defaults]\ndelay = "1s"\n': "tool.sqlq.defaults has no option 'delay'",
    "[tool.sqlq]\nretention = 7\n": "tool.sqlq.retention is 7: it must be like",
    "[tool.sqlq]\napp = 7\n": 'tool.sqlq.app is 7: it must be like "shop.tasks:app"',
    '[tool.sqlq]\napp = ""\n': "tool.sqlq.app is '': it must be like",
    "[tool.sqlq]\nlease = 30\n": 'tool.sqlq.lease is 30: it must be like "1m"',
    "[tool.sqlq]\nprocesses = true\n": "tool.sqlq.processes is True: it must be like 2",
    '[tool.sqlq]\ndatabase_url = "sqlite:///x.db"\n': "[tool.sqlq] has no key 'database_url'; it has app,",
    "[tool.sqlq]\napp = \n": "cannot be read as TOML",
    '[[tool.sqlq]]\napp = "shop:app"\n': "tool.sqlq is [{'app': 'shop:app'}]: it must be a table",
    f"[tool.sqlq]\napp = {'7' * 5000}\n": "cannot be read as TOML: Exceeds the limit",
    f"[tool.sqlq]\napp = {'[' * 5000}\n": "cannot be read as TOML",
    '[tool.sqlq]\napp = "caf\udce9:app"\n': "cannot be read as TOML: 'utf-8' codec can't decode byte 0xe9",
    '[tool.sqlq]\ndatabase-url = "nonsense"\n': "cannot be read: it has the form postgresql://",
}


@for_each("text", WRONG)
def test_a_wrong_table_in_pyproject_is_refused(here: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(sqlq.errors.ConfigurationError) as raised:
        sqlq.App()
    assert WRONG[text] in str(raised.value)
    assert str(file) in str(raised.value)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
NOBODY = 65534


@needs_root
@pytest.mark.parametrize("owned", ["the file", "its directory", "a link to it"])
def test_a_pyproject_of_another_user_is_passed_over(
    here: Path, tmp_path: Path, owned: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = here / "pyproject.toml"
    if owned == "a link to it":
        (tmp_path / "mine.toml").write_text('[tool.sqlq]\napp = "evil:app"\n')
        file.symlink_to(tmp_path / "mine.toml")
    else:
        file.write_text('[tool.sqlq]\napp = "evil:app"\n')
    assert pyproject.find() == pyproject.Project(file, "evil:app")
    path = here if owned == "its directory" else file
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for _ in range(2):
        found = pyproject.find()
        assert found is not None
        assert found.file == tmp_path / "pyproject.toml"
    assert sqlq.App().database.engine.url.database == str(tmp_path / "dev.db")
    (said,) = caplog.messages
    assert said.startswith(
        f"[tool.sqlq] in {file} is passed over: {path} belongs to another user (uid 65534)"
    )
    assert "chown it, or name App and database by -a and -d" in said


@needs_root
def test_a_pyproject_of_the_sudo_user_or_of_root_is_used(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.geteuid", lambda: NOBODY)
        assert pyproject.find() is not None
    os.chown(tmp_path / "pyproject.toml", NOBODY, NOBODY)
    assert pyproject.find() is None
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    assert pyproject.find() is not None
