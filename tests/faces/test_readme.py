"""Every block of the README and of the pages in docs/ is run: commands as processes, Python and SQL on each
database.

A comment before a block names it: `<!-- sql: question -->`. Most blocks run in a transcript of
`transcripts/pages/` or `transcripts/commands/`, where their output stands: `run("session")` runs Python,
`sql("question")` prints rows, `sh("why")` prints what commands print.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib
import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from contextvars import ContextVar, copy_context
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import django
import prometheus_client
import pytest
import sqlalchemy
import werkzeug.test
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import Connection, Engine, MetaData, NullPool, create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

import sqlq
from sqlq.model.outcome import Outcome, settlement
from sqlq.payload.encryption import Key
from sqlq.schema import version
from sqlq.store.jobs import settle
from sqlq.store.workers import workers
from sqlq.testing import drain
from sqlq.web import User
from sqlq.web.serve import ByPassword
from tests import kit
from tests.kit import claim_on, needs
from tests.kit.pages import BLOCK, BLOCKS, PAGES, README, ROOT, Desk, block, commands, headings, run_python
from tests.kit.postgresql import async_database_url
from tests.kit.transcript import Transcript

TRANSCRIPTS = sorted(Path(__file__).with_name("transcripts").rglob("*.txt"))
SHOWN = {f"{file.parent.name}/{file.stem}": file for file in TRANSCRIPTS}
SHOWN = {name: file for name, file in SHOWN.items() if name.startswith(("pages/", "commands/"))}
LINKED = sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")})
"""Pages whose relative URLs must exist."""
LONGEST_README, WIDEST = 250, 140


def test_every_block_is_run_by_a_test() -> None:
    fences = sum(text.count("\n```") for text in PAGES.values())
    assert len(BLOCKS) == fences / 2, "a fence is not closed, or not at the start of its line"
    beside = (
        Path(__file__).with_name(f"test_{name}.py") for name in ("readme", "cookbook", "moved", "grants")
    )
    source = "\n".join(path.read_text() for path in (*beside, *SHOWN.values()))
    names = {b.name for b in BLOCKS if b.kind == "output"}
    unused = [b.where for b in BLOCKS if not b.name or (f'"{b.name}"' not in source and b.name not in names)]
    assert not unused, f"no test takes these blocks: {unused}"


def test_targets_of_relative_urls_in_pages_exist() -> None:
    nowhere: list[tuple[Path, str]] = []
    for page in LINKED:
        for target in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text())):
            if target.startswith(("http:", "https:")):
                continue
            path, _, heading = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or (heading and heading not in headings(there)):
                nowhere.append((page.relative_to(ROOT), target))
    assert nowhere == []


def test_a_page_is_easy_to_read() -> None:
    assert len(list(filter(None, block("quickstart", "shop.py").splitlines()))) <= 15
    assert len(commands("sh", "quickstart")) == 3
    assert PAGES[README].count("\n") <= LONGEST_README, "more than an introduction belongs into docs/"
    for page, content in PAGES.items():
        # a table's row cannot be wrapped
        lines = [line for line in BLOCK.sub("", content).splitlines() if not line.startswith("|")]
        assert not [line for line in lines if len(line) > WIDEST], page.relative_to(ROOT)


def test_pyproject_names_the_app_and_the_database(desk: Desk) -> None:
    (desk.directory / "pyproject.toml").write_text(block("toml", "project"))
    assert f"sqlite:///{desk.directory}/shop.db" in desk.run("sqlq migrate")
    (desk.directory / "pyproject.toml").write_text(block("toml", "project_database"))
    (desk.directory / "shop.py").write_text("import sqlq\napp = sqlq.App()\n")
    assert f"sqlite:///{desk.directory}/dev.db" in desk.run("mkdir below && cd below && sqlq migrate")


def test_each_of_the_two_commands_is_one_line_and_installs_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "test" in extras
    for name, package, last in (("demo", ".", "sqlq demo"), ("tests", "-e .[test]", "python -m pytest")):
        (line,) = block("install", name).splitlines()
        assert (
            " ".join(shlex.split(line))
            == f"python3 -m venv .venv && .venv/bin/pip install {package} && .venv/bin/{last}"
        )


def test_the_tables_come_and_go_by_the_commands_of_a_deploy(desk: Desk) -> None:
    up, check, sql, down = commands("migrate")
    desk.run(check, ends_with=1)
    desk.run(up)
    desk.run(check)
    assert "CREATE TABLE jobs" in desk.run(sql)
    assert "sqlq_database_up 1.0" in desk.run(block("sh", "metrics"))
    desk.run(down)
    desk.run(check, ends_with=1)


@contextlib.contextmanager
def started(desk: Desk, words: list[str], **environment: str) -> Iterator[Any]:
    """Run a command meanwhile, until Ctrl-C."""
    names = desk.environment | environment
    with subprocess.Popen(words, cwd=desk.directory, env=names, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


def test_the_dashboard_opens(desk: Desk) -> None:
    desk.run("sqlq --app shop:app migrate")
    words = [*shlex.split(block("sh", "web"), comments=True), "--port", "0"]
    with started(desk, words) as web:
        link = web.stderr.readline().split()[-1]
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(link, timeout=30) as page:
            assert "No jobs wait, run or have failed." in page.read().decode()
    assert web.returncode in (0, 130)


def test_a_line_of_the_users_file_lets_in(desk: Desk) -> None:
    # without a terminal, where getpass would prompt
    desk.process("sh", "-c", block("sh", "users"), input="a:secret\n", start_new_session=True)
    login = ByPassword(desk.directory / "users")
    request = werkzeug.Request(werkzeug.test.EnvironBuilder(auth=("ada", "a:secret")).get_environ())
    assert login(request) == User("ada", "operator")


def test_a_key_leaves_the_ring_when_its_rows_are_gone(desk: Desk) -> None:
    (old,), (new,) = (desk.run(block("sh", "keys")).split() for _ in range(2))
    desk.run("sqlq --app shop:app migrate")
    desk.run("sqlq --app shop:app enqueue shop.send_receipt 7", SQLQ_KEYS=old)
    asked = block("sql", "keys").replace("3f9a2c41", Key(old, "").id)
    with closing(sqlite3.connect(desk.directory / "shop.db")) as conn:
        assert conn.execute(asked).fetchone() == (1,)
    ring = f"{new} {old}"
    desk.run("sqlq --app shop:app work --drain", SQLQ_KEYS=ring)
    desk.run("sqlq --app shop:app prune --finished 0s", SQLQ_KEYS=ring)
    with closing(sqlite3.connect(desk.directory / "shop.db")) as conn:
        assert conn.execute(asked).fetchone() == (0,)


TESTS = ("test_shop.py", "test_unittest.py", "test_memory.py", "test_schedules.py", "test_mocks.py")


def run_tests(desk: Desk, command: str = "python -m pytest") -> str:
    """Run the tests of a page."""
    return desk.run(
        f"{command} -p sqlq.testing.fixtures -p no:cacheprovider -q",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        SQLQ_TEST_DATABASE_URL="",
    )


def test_testing(desk: Desk) -> None:
    for name in ("pyproject.toml", *TESTS):
        (desk.directory / name).write_text(block("testing", name))
    assert "8 passed" in run_tests(desk)


@pytest.mark.slow
def test_a_django_project(desk: Desk) -> None:
    (desk.directory / "shop.py").unlink()
    desk.run("python -m django startproject site_of_shop . && python -m django startapp shop")
    written = {
        "shop/models.py": "from django.db import models\n\n\nclass Order(models.Model):\n    pass\n",
        "site_of_shop/urls.py": "from django.urls import path\nfrom shop.views import place_order\n\n"
        'urlpatterns = [path("orders/", place_order)]\n' + block("django", "dashboard_urls.py"),
        **{f"shop/{name}": block("django", name) for name in ("tasks.py", "views.py", "tests.py")},
    }
    settings = (desk.directory / "site_of_shop" / "settings.py").read_text() + (
        "\nINSTALLED_APPS += ['shop']\n"
        "DATABASES['default']['OPTIONS'] = {'transaction_mode': 'IMMEDIATE'}\n"
        "DATABASES['default']['TEST'] = {'NAME': 'test.sqlite3'}\n"
        + block("django", "settings.py")
        + block("django", "sqlq_settings.py")
    )
    if django.VERSION >= (6,):
        settings += block("django", "backend_settings.py") + "SQLQ['task_modules'] += ['django_tasks']\n"
        written["shop/django_tasks.py"] = block("django", "django_tasks.py")
    for name, content in {**written, "site_of_shop/settings.py": settings}.items():
        (desk.directory / name).write_text(content)
    desk.run("python manage.py makemigrations shop")
    migrate, work, status = commands("sh", "django")
    desk.run(migrate)
    desk.run(
        "DJANGO_SETTINGS_MODULE=site_of_shop.settings python -c 'import django; django.setup()\n"
        "from django.test import Client\n"
        'browser = Client(headers={"host": "localhost"})\n'
        'assert browser.get("/orders/").content == b"1"\n'
        'assert browser.get("/sqlq/jobs").url == "/accounts/login/?next=/sqlq/jobs"\n\''
    )
    if django.VERSION >= (6,):
        desk.run("python manage.py shell -c 'from shop.django_tasks import resize; resize.enqueue(7)'")
    assert "sending the receipt of order 1" in desk.run(work)
    assert "no jobs wait" in desk.run(status)
    assert "no issues" in desk.run("python manage.py check")
    desk.run("python manage.py test")
    from sqlq.django.configuration import Configuration

    shown: dict[str, Any] = {}
    exec(block("django", "sqlq_settings.py"), shown)
    assert Configuration.of(shown["SQLQ"] | {"task_modules": ("tasks",)}) == Configuration()


def test_deploying(desk: Desk) -> None:
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block("deploy", "systemd"))
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[0] == "/srv/shop/.venv/bin/sqlq"
    assert int(unit["Service"]["TimeoutStopSec"]) > 25 + 10
    dockerfile = block("deploy", "container")
    (command,) = re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)
    (app,) = re.findall(r"^ENV SQLQ_APP=(.+)$", dockerfile, re.MULTILINE)
    assert "PRIVATE" not in dockerfile
    desk.run("sqlq --app shop:app migrate")
    for program in (["sqlq", *words[1:]], json.loads(command)):
        assert program[0] == "sqlq"
        with started(desk, [sys.executable, "-m", *program], SQLQ_APP=app) as process:
            assert "working on" in process.stderr.readline()
            process.terminate()
            assert process.wait(30) == 0


def test_a_worker_serves_one_app_of_a_dict(desk: Desk) -> None:
    page = block("apps", "shards.py")
    url = "postgresql+psycopg://shop@db-{name}/shop"
    assert url in page
    (desk.directory / "shards.py").write_text(page.replace(url, "sqlite:///{name}.db"))
    migrate, enqueue, work = commands("apps")
    desk.run(migrate)
    assert "enqueued job 1: greet" in desk.run(enqueue)
    assert "Hello Ada" in desk.run(work + " --drain")


def test_troubleshooting_quotes_the_reasons_of_why() -> None:
    page = PAGES[ROOT / "docs" / "troubleshooting.md"]
    quoted = re.findall(r'^\| "(.+?)" \|', page, re.MULTILINE)
    source = "".join((ROOT / "sqlq" / path).read_text() for path in ("admin/why.py", "store/blockers.py"))
    assert len(quoted) > 10
    assert not [words for words in quoted if words not in source]


EXAMPLES = {
    "flask_view": "flask/shop/orders.py",
    "flask_worker": "flask/worker.py",
    "fastapi_view": "fastapi/shop.py",
    "fastapi_fixtures": "fastapi/conftest.py",
    "fastapi_tests": "fastapi/test_shop.py",
    "sqlmodel_view": "sqlmodel/shop.py",
    "pyramid_worker": "pyramid/worker.py",
    "pyramid_handler": "pyramid/shop/jobs.py",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_quoted_parts_of_examples_match_their_files(name: str) -> None:
    file = (ROOT / "examples" / EXAMPLES[name]).read_text()
    missing = [part for part in block("example", name).split("\n\n\n") if part.strip() not in file]
    assert not missing


@pytest.mark.parametrize("name", [name for name in SHOWN if name.startswith("commands/")])
def test_the_commands_of_a_page_print_what_is_shown(desk: Desk, name: str) -> None:
    def sh(name: str, kind: str = "sh") -> None:
        for line in commands(name, kind):
            done = desk.end_of(line)
            # all is well with each check of the doctor that is left out, in words that differ by the machine
            out = re.sub(r"(?ms)^    File .*?\n(?=  \S)", "", done.stdout)
            said = [line for line in out.splitlines() if not line.startswith("ok ")]
            code = [f"[exit {done.returncode}]"] if done.returncode else []
            print(f"  $ {line}", *said, *code, sep="\n")

    engine = create_engine(f"sqlite:///{desk.directory}/shop.db", poolclass=NullPool)
    Transcript(SHOWN[name]).run(desk, {"sh": sh, "engine": engine, "execute": kit.execute, "sqlq_": desk})


MODULES = ("asyncio", "asyncpg", "contextlib", "fastapi", "flask", "io", "prometheus_client", "psycopg")
BESIDE = {
    **{name: importlib.import_module(name) for name in (*MODULES, "sqlite3", "werkzeug")},
    **{name: getattr(sqlalchemy, name) for name in ("BigInteger", "Column", "Integer", "String", "Table")},
    **{each.__name__: each for each in (Decimal, MetaData, Path, SimpleNamespace, scoped_session)},
    **{each.__name__: each for each in (sessionmaker, sqlq.testing.tick, timedelta)},
}


class Page:
    """The names of a transcript of blocks of Python and SQL."""

    def __init__(self, names: dict[str, Any], stack: ExitStack) -> None:
        self.names = vars(kit) | names
        self.engine: Engine = names["engine"]
        self.names |= {name: getattr(self, name) for name in ("run", "sql", "rows", "left", "refused")}
        self.names |= {"meanwhile": stack.enter_context, "block": block}

    def run(self, name: str, **names: Any) -> None:
        self.names |= names
        (kind,) = {b.kind for b in BLOCKS if b.name == name and b.kind in ("python", "recipe")}
        run_python(name, self.names, kind)

    def rows(self, statement: str, **parameters: Any) -> list[Any]:
        with self.engine.begin() as conn:
            done = conn.execute(text(re.sub(r":(?!id|token)", r"\\:", statement)), parameters)
            return list(done) if done.returns_rows else []

    def sql(self, name: str, **parameters: Any) -> None:
        for each in [b.text for b in BLOCKS if (b.kind, b.name) == ("sql", name)]:
            for row in self.rows(each, **parameters):
                values = ("SPAN" if isinstance(value, float | Decimal) else value for value in row)
                print(re.sub(r"20\d\d-\d\d-\d\d[ T]\d\d\b(?!:)", "HOUR", "  ".join(map(str, values))))
            print("--")

    def left(self) -> None:
        """Show the jobs that blocks have left, and take them away."""
        for job in reversed(self.names["app"].jobs.list()):
            print(job.queue, job.state, job.payload)
        kit.execute(self.engine, "DELETE FROM jobs")

    def refused(self, call: Any) -> None:
        try:
            call()
        except sqlq.errors.SqlqError as error:
            print(error)
        else:
            raise AssertionError("it was not refused")


@pytest.fixture
def told(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Run a transcript with blocks of Python and SQL."""
    app, engine = names["app"], names["engine"]
    url = engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("SQLQ_DATABASE_URL", url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    providers: list[Any] = []  # the one of the process can be set once
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", providers.append)
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda *args: providers[0].get_tracer(*args[:2]))

    def module(name: str, **names: Any) -> None:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**names))

    def worker_at_work(id: str, host: str, pid: int) -> None:
        with app.database.begin() as conn:
            workers.register(conn, id=id, host=host, pid=pid, version="1", queues=None, concurrency=1)
            claim_on(conn, ["mail"], limit=1, owner=id, lease_ms=60_000)

    def ends(outcome: Outcome, queue: str = "default") -> None:
        with app.database.begin() as conn:
            (held,) = claim_on(conn, [queue], limit=1)
            settle.settle(conn, [settlement(held, outcome)])

    more = {"url": url, "module": module, "worker_at_work": worker_at_work, "ends": ends}
    more["async_engine"] = create_async_engine(async_database_url(url), poolclass=NullPool)
    more["plain_url"] = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    more["exporter"] = InMemorySpanExporter()
    with ExitStack() as stack:
        page = Page(BESIDE | names | more, stack)
        yield lambda name: Transcript(SHOWN[f"pages/{name}"]).run(Desk(tmp_path), page.names)
        page.names["app"].close()


ON_EACH = sorted(
    {path.stem for path in SHOWN.values() if path.parent.name == "pages"}
    - {"postgresql", "sqlite", "statement"}
)


@pytest.mark.parametrize("name", ON_EACH)
def test_blocks_do_what_their_transcript_shows(told: Callable[[str], None], name: str) -> None:
    told(name)


@needs("postgresql")
def test_blocks_for_postgresql_do_what_their_transcript_shows(told: Callable[[str], None]) -> None:
    told("postgresql")


@needs("file")
@pytest.mark.parametrize("name", ["sqlite", "statement"])
def test_blocks_for_sqlite_do_what_their_transcript_shows(told: Callable[[str], None], name: str) -> None:
    told(name)


@pytest.mark.parametrize("name", [b.name for b in BLOCKS if b.kind == "output"])
def test_a_block_prints_the_output_below_it(
    names: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = names["engine"].url.render_as_string(hide_password=False)
    monkeypatch.setenv("SQLQ_DATABASE_URL", url)
    names["ContextVar"] = ContextVar
    copy_context().run(run_python, name, names)
    drain(names["app"])
    names["app"].close()
    assert capsys.readouterr().out == block("output", name)


@pytest.mark.parametrize("empty_database_url", ["sqlite", "postgresql"], indirect=True)
def test_inside_an_alembic_of_ones_own(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        namespace: dict[str, Any] = {}
        exec(block("alembic", "migration"), namespace)
        namespace["op"] = Operations(MigrationContext.configure(connection))
        namespace["upgrade"]()
    with engine.begin() as connection:
        version.require(connection, None)
        contexts = []

        def configure(*, connection: Connection, **options: Any) -> None:
            contexts.append(MigrationContext.configure(connection, opts=options))

        scope = {"connection": connection, "target_metadata": MetaData(), "sqlq": sqlq}
        exec(block("alembic", "env"), scope | {"context": SimpleNamespace(configure=configure)})
        assert compare_metadata(contexts[0], MetaData()) == []
        # without include_name it would drop tables
        assert compare_metadata(MigrationContext.configure(connection), MetaData()) != []
    with engine.begin() as connection:
        namespace["op"] = Operations(MigrationContext.configure(connection))
        namespace["downgrade"]()
        assert version.read(connection, None) is None
    engine.dispose()


@pytest.mark.integration
def test_the_tutorial(desk: Desk) -> None:
    for name in ("models.py", "bank.py", "jobs.py", "views.py", "pyproject.toml", "test_shop.py"):
        (desk.directory / name).write_text(block("tutorial", name))
    tables, migrate, serve = commands("serve", "tutorial")
    desk.run(tables)
    desk.run(migrate)
    with started(desk, [sys.executable, "-m", *shlex.split(serve), "--port", "0"]) as server:
        place = next(found[0] for line in server.stderr if (found := re.findall(r"http://[\d.:]+", line)))
        good, bad, work, show = commands("order", "tutorial")
        said, url = re.findall(r'curl -d "(.+?)" http://127.0.0.1:5000(\S+)', good)[0]
        with urllib.request.urlopen(place + url, said.replace(" ", "+").encode(), timeout=30) as page:
            assert json.load(page) == {"order": 1}
        said, url = re.findall(r'curl -d "(.+?)" http://127.0.0.1:5000(\S+)', bad)[0]
        with pytest.raises(urllib.error.HTTPError, match="409"):
            urllib.request.urlopen(place + url, said.encode(), timeout=30)
        desk.run(work)
        shown = desk.run(show)
        assert "the bank is closed" in shown
        assert "sqlq reschedule 1" in shown
        again, work, listing = commands("again", "tutorial")
        desk.run(again)
        assert "sending the receipt of order 1" in desk.run(work)
        assert desk.run(listing).count("finished") == 2
        with urllib.request.urlopen(f"{place}/orders/1", timeout=30) as page:
            assert json.load(page) == {"state": "paid"}
    assert "3 passed" in run_tests(desk, block("tutorial", "test").strip())


@needs("mariadb")
def test_accounts_of_mariadb(database_url: str, app: sqlq.App, engine: Engine) -> None:
    def as_account(name: str) -> sqlq.App:
        return sqlq.App(make_url(database_url).set(username=name + mark, password=mark))

    mark, grants = uuid4().hex[:12], block("sql", "mariadb_grants")
    accounts = re.findall(r" TO (\w+);", grants)
    with engine.connect() as conn:
        for name in accounts:
            conn.exec_driver_sql(f"CREATE USER {name}{mark} IDENTIFIED BY '{mark}'")
        for grant in re.sub(r"(?<= TO )(\w+)", rf"\g<1>{mark}", grants).splitlines():
            conn.exec_driver_sql(grant.replace("ON shop.", f"ON {make_url(database_url).database}."))
    web, reader = (as_account(name) for name in accounts)
    with closing(web), closing(reader):
        once = web.task(name="t")(lambda: 7).new().set(unique_key="k")
        job = web.enqueue(once)
        assert web.enqueue(once).id == job.id
        assert drain(web).finished == 1
        assert reader.result(job) == 7
        with pytest.raises(SQLAlchemyError, match="INSERT command denied"):
            reader.enqueue(once)
    with engine.connect() as conn:
        for name in accounts:
            conn.exec_driver_sql(f"DROP USER {name}{mark}")
