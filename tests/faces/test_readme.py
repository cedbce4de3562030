"""Every block of the README and of the pages in docs/ is run: commands as processes, Python and SQL on each
database. GRANTs are run with real roles.

A comment before a block, invisible on the page, names the test that runs it: `<!-- sql: question -->`. A
block without one fails a test. test_cookbook.py runs the recipes, test_moved.py the applications that
moved here.
"""

from __future__ import annotations

import asyncio
import configparser
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import django
import fastapi
import flask
import prometheus_client
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    NullPool,
    String,
    create_engine,
    event,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from werkzeug import Request
from werkzeug.test import Client, EnvironBuilder

import sqlq
from sqlq.admin.doctor.doctor import examine
from sqlq.model.outcome import ErrorText, Failed, Finished, Released, Retried, Settlement, settlement
from sqlq.model.schedule import Declared, Schedule
from sqlq.payload.encryption import Key, new_key
from sqlq.schema import version
from sqlq.store import rights, schedules
from sqlq.store.flows import unblock
from sqlq.store.jobs import lease, operate, settle
from sqlq.store.limits import admit
from sqlq.store.workers import look as workers_look
from sqlq.store.workers import notify
from sqlq.store.workers import workers as workerss
from sqlq.testing import drain, tick
from sqlq.web import User
from sqlq.web.serve import ByPassword
from tests.kit import claim_on, execute, needs, working
from tests.kit.command import grant
from tests.kit.pages import (
    BLOCK,
    BLOCKS,
    PAGES,
    README,
    ROOT,
    Desk,
    Order,
    block,
    commands,
    headings,
    run_python,
)
from tests.kit.postgresql import PostgreSQL, async_database_url

LINKED = sorted(
    {*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")}
)
"""Pages whose relative URLs must exist."""
LONGEST_README, WIDEST = 250, 140


ELSEWHERE = {
    # which test runs a kind of block; tests take theirs through `block` and `blocks`, which note what was
    # taken
    "quickstart": "test_quick_start",
    "install": "test_the_two_commands",
    "python": "TestPython, test_a_block_enqueues_its_jobs, test_a_block_prints_the_output_below_it",
    "output": "test_a_block_prints_the_output_below_it",
    "sh": "test_quick_start, test_commands, test_each_command_of_a_block_prints_what_is_said_there, "
    "test_a_key_leaves_the_ring_when_its_rows_are_gone, test_the_dashboard_opens",
    "testing": "test_testing",
    "sql": "test_enqueue_in_sql, test_a_follow_up_in_sql, test_a_look_in_sql, test_questions, TestGrants, "
    "test_accounts_of_mariadb, test_statements_on_how_it_works_run",
    "recipe": "test_a_recipe",
    "alembic": "test_inside_an_alembic_of_ones_own",
    "deploy": "test_deploying",
    "moved": "test_an_application_that_moved, test_a_django_application_that_moved",
    "peer": "test_an_application_that_moved, test_a_django_application_that_moved, "
    "test_an_application_prints_the_same_with_its_peer",
    "django": "test_a_django_project",
    "example": "test_quoted_parts_of_examples_match_their_files",
    "tutorial": "test_the_tutorial",
    "apps": "test_a_worker_serves_one_app_of_a_dict",
    "toml": "test_pyproject_names_the_app_and_the_database",
}


def test_every_block_is_run_by_a_test() -> None:
    fences = sum(text.count("\n```") for text in PAGES.values())
    assert len(BLOCKS) == fences / 2, "a fence is not closed, or not at the start of its line"
    assert not [b.where for b in BLOCKS if b.kind not in ELSEWHERE]
    beside = ("test_readme.py", "test_cookbook.py", "test_moved.py")
    source = "\n".join(Path(__file__).with_name(name).read_text() for name in beside)
    shown = {b.name for b in BLOCKS if b.kind == "output"}
    unused = [b.where for b in BLOCKS if f'"{b.name}"' not in source and b.name not in shown]
    assert not unused, f"no test takes these blocks: {unused}"
    for tests in ELSEWHERE.values():
        for name in tests.split(", "):
            assert re.search(rf"^(def|class) {name}", source, re.MULTILINE)


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
    assert PAGES[README].count("\n") <= LONGEST_README, (
        "what is more than an introduction belongs into a page of docs/"
    )
    for page, content in PAGES.items():
        # a table's row cannot be wrapped
        wide = [
            line
            for line in BLOCK.sub("", content).splitlines()
            if len(line) > WIDEST and not line.startswith("|")
        ]
        assert not wide, f"{page.relative_to(ROOT)}: {wide}"


# -- commands ------------------------------------------------------------------------------------------------


def test_quick_start(desk: Desk) -> None:
    lines = block("quickstart", "sh").splitlines()
    said = [desk.run(line) for line in lines]
    assert "sending the receipt of order 1" in said[2]
    program = block("quickstart", "shop.py").splitlines()
    assert len(list(filter(None, program))) <= 15, "it no longer fits a screen"
    assert len(lines) == 3
    status, listed, shown = [desk.run(line) for line in commands("look")]
    assert "no jobs wait" in status
    assert re.search(r"^ ?1  finished  mail +shop\.send_receipt +1/5 ", listed, re.MULTILINE), listed
    assert shown.startswith("job 1: finished\n")


def test_pyproject_names_the_app_and_the_database(desk: Desk) -> None:
    (desk.directory / "pyproject.toml").write_text(block("toml", "project"))
    assert f"sqlite:///{desk.directory}/shop.db" in desk.run("sqlq migrate")
    (desk.directory / "pyproject.toml").write_text(block("toml", "project_database"))
    (desk.directory / "shop.py").write_text("import sqlq\napp = sqlq.App()\n")
    assert f"sqlite:///{desk.directory}/dev.db" in desk.run("mkdir below && cd below && sqlq migrate")


def test_the_two_commands() -> None:
    """Each is one line, installs an extra of pyproject.toml, and runs an existing command.

    .ci/run tests installing, and the demo has tests of its own.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, package, last in (
        ("demo", ".", [".venv/bin/sqlq", "demo"]),
        ("tests", "-e .[test]", [".venv/bin/python", "-m", "pytest"]),
    ):
        (line,) = block("install", name).splitlines()
        make, install, run = (shlex.split(part) for part in line.split(" && "))
        assert make == ["python3", "-m", "venv", ".venv"]
        assert install == [".venv/bin/pip", "install", *package.split()]
        assert run == last
    assert "test" in extras
    collected = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "tests/unit/test_pipe.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr


def test_commands(desk: Desk) -> None:
    up, check, sql, down = commands("migrate")
    desk.run(check, ends_with=1)
    desk.run(up)
    desk.run(check)
    assert "CREATE TABLE jobs" in desk.run(sql)
    engine = create_engine(f"sqlite:///{desk.directory}/shop.db")
    execute(
        engine, "INSERT INTO jobs (queue, task, payload) VALUES ('mail', 'shop.send_receipt', 'not JSON')"
    )
    engine.dispose()
    assert "enqueued job 2: shop.send_receipt in queue mail, scheduled" in desk.run(block("sh", "enqueue"))
    desk.run("sqlq --app shop:app work --drain")
    listing, by_error, show, retry, forget = commands("failed")
    assert "shop.send_receipt" in desk.run(listing)
    assert re.search(r"^ +1  .*  shop\.send_receipt ", desk.run(by_error), re.MULTILINE)
    assert "the payload is not JSON" in desk.run(show)
    assert "retried 1 job" in desk.run(retry)
    desk.run("sqlq --app shop:app work --drain")
    assert "deleted 1 job" in desk.run(forget)
    operate = commands("operate")
    why, workers, pause, cancel, move, resume, prune, audit, doctor = operate
    assert "no worker is running" in desk.run(workers)
    assert "paused mail" in desk.run(pause)
    engine = create_engine(f"sqlite:///{desk.directory}/shop.db")
    execute(engine, "INSERT INTO jobs (id, queue, task) VALUES (1, 'mail', 'shop.send_receipt')")
    engine.dispose()
    assert "its queue is paused" in desk.run(why)
    assert "cancelled 1 job: 1" in desk.run(cancel)
    assert "rescheduled 1 job in queue mail" in desk.run(move)
    assert "resumed mail" in desk.run(resume)
    assert "pruned 0 finished jobs and 0 failed jobs" in desk.run(prune)
    assert "queues resume mail" in desk.run(audit)
    assert "0 things to do" in desk.run(doctor)
    (desk.directory / "flow.py").write_text(
        "import sqlq\nfrom shop import app, send_receipt\n"
        "app.enqueue(sqlq.chain(send_receipt.new(7), send_receipt.new(8)))\n"
    )
    desk.run("python flow.py")
    listed, shown, retried, cancelled = commands("flows")
    assert "1 available, 1 blocked" in desk.run(listed).replace(
        "1 blocked, 1 available", "1 available, 1 blocked"
    )
    assert "sqlq cancel --flow 1 -a shop:app" in desk.run(shown)
    assert "no jobs of flow 1 retried" in desk.run(retried)
    assert "cancelled 2 jobs of flow 1" in desk.run(cancelled)
    assert "sqlq_database_up 1.0" in desk.run(block("sh", "metrics"))
    desk.run(down)
    desk.run(check, ends_with=1)


def test_the_dashboard_opens(desk: Desk) -> None:
    desk.run("sqlq --app shop:app migrate")
    words = [*shlex.split(block("sh", "web"), comments=True), "--port", "0"]
    with subprocess.Popen(
        words, cwd=desk.directory, env=desk.environment, stderr=subprocess.PIPE, text=True
    ) as web:
        assert web.stderr is not None
        try:
            link = web.stderr.readline().split()[-1]
            with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(
                link, timeout=30
            ) as page:
                assert "No jobs wait, run or have failed." in page.read().decode()
        finally:
            web.send_signal(signal.SIGINT)
        assert web.wait(30) in (0, 130)


def test_a_line_of_the_users_file_lets_in(desk: Desk) -> None:
    subprocess.run(
        block("sh", "users"),
        shell=True,
        cwd=desk.directory,
        env=desk.environment,
        input="a:secret\n",
        text=True,
        start_new_session=True,  # without a terminal, where getpass would prompt
        check=True,
    )
    login = ByPassword(desk.directory / "users")
    request = Request(EnvironBuilder(auth=("ada", "a:secret")).get_environ())
    assert login(request) == User("ada", "operator")


ENQUEUED = "sqlq --app shop:app enqueue shop.send_receipt 7"
CONSOLE: dict[str, tuple[list[str], list[str]]] = {
    "replay": (
        [ENQUEUED, "sqlq --app shop:app work --drain"],
        [
            r"shop\.send_receipt",
            r"^replayed 1 job of task shop\.send_receipt since 2h as 2$",
            r"^replayed 1 job as 3$",
            r"^no jobs in queue mail since 2026-.* until 1m replayed$",
        ],
    ),
    "schedule": (
        [],
        [
            r"^added nightly: 0 3 \* \* \* Europe/Berlin, next",
            "^nightly  active",
            "^paused nightly$",
            "^resumed nightly$",
            r"^enqueued job 1: shop\.send_receipt",
            "^schedule nightly: active$",
            "^removed nightly$",
        ],
    ),
    "workers": (
        [],
        [*["no worker is running"] * 5, "paused all queues for 10m", "resumed all queues"],
    ),
    "why": (
        [ENQUEUED],
        ["no worker serves its queue", "no worker is alive, and 1 job is due", "no worker is running"],
    ),
}
"""Blocks of commands: what was run before, and what each of them prints."""


@pytest.mark.parametrize("name", CONSOLE)
def test_each_command_of_a_block_prints_what_is_said_there(desk: Desk, name: str) -> None:
    before, printed = CONSOLE[name]
    for line in ["sqlq --app shop:app migrate", *before]:
        desk.run(line)
    for line, pattern in zip(commands(name), printed, strict=True):
        assert re.search(pattern, desk.run(line, ends_with="doctor" in line), re.MULTILINE), line


def test_a_key_leaves_the_ring_when_its_rows_are_gone(desk: Desk) -> None:
    old, new = (desk.run(block("sh", "keys")).split()[0] for _ in range(2))
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


def test_testing(desk: Desk) -> None:
    for name in (
        *("pyproject.toml", "test_shop.py", "test_unittest.py", "test_memory.py", "test_schedules.py"),
        "test_mocks.py",
    ):
        (desk.directory / name).write_text(block("testing", name))
    said = desk.run(
        "python -m pytest -p sqlq.testing.fixtures -p no:cacheprovider -q",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        SQLQ_TEST_DATABASE_URL="",
    )
    assert "8 passed" in said


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
    started = shlex.split(unit["Service"]["ExecStart"])
    assert started[0] == "/srv/shop/.venv/bin/sqlq"
    assert int(unit["Service"]["TimeoutStopSec"]) > 25 + 10
    dockerfile = block("deploy", "container")
    (command,) = re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)
    (app,) = re.findall(r"^ENV SQLQ_APP=(.+)$", dockerfile, re.MULTILINE)
    assert "PRIVATE" not in dockerfile
    desk.run("sqlq --app shop:app migrate")
    for program in (["sqlq", *started[1:]], json.loads(command)):
        assert program[0] == "sqlq"
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=desk.directory,
            env=desk.environment | {"SQLQ_APP": app},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr
        assert "working on" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0, said


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
    """tests/faces/test_examples.py runs them."""
    file = (ROOT / "examples" / EXAMPLES[name]).read_text()
    missing = [part for part in block("example", name).split("\n\n\n") if part.strip() not in file]
    assert not missing


# -- Python --------------------------------------------------------------------------------------------------


class More(DeclarativeBase):
    pass


class Coupon(More):
    __tablename__ = "coupons"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    campaign: Mapped[str] = mapped_column(String(40))


def found(app: sqlq.App) -> list[tuple[str, str, object]]:
    return [(job.queue, job.state.value, job.payload) for job in reversed(app.jobs.list())]


def mail(*ids: int) -> list[tuple[str, str, object]]:
    return [("mail", "available", {"args": [id]}) for id in ids]


SCHEDULED = ("mail", "scheduled", {"args": [7]})
LEFT = {
    "session": mail(1),
    "connection": mail(7, 8),
    "options": [*mail(7), ("later", "scheduled", {"args": [7]}), SCHEDULED],
    "by_name": mail(7),
    "unique": mail(7),
    "newest": [SCHEDULED],
}
"""Blocks of Python, and the jobs that they leave."""


@pytest.mark.parametrize("name", LEFT)
def test_a_block_enqueues_its_jobs(names: dict[str, Any], name: str) -> None:
    run_python(name, names)
    assert found(names["app"]) == LEFT[name]


@pytest.mark.parametrize("name", [b.name for b in BLOCKS if b.kind == "output"])
def test_a_block_prints_the_output_below_it(
    names: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, and by the jobs that it has enqueued."""
    url = names["engine"].url.render_as_string(hide_password=False)
    monkeypatch.setenv("SQLQ_DATABASE_URL", url)
    names["ContextVar"] = ContextVar
    copy_context().run(run_python, name, names)
    drain(names["app"])
    names["app"].close()
    assert capsys.readouterr().out == block("output", name)


class TestPython:
    def test_encryption(
        self, names: dict[str, Any], database_url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = names | {"url": database_url, "new_key": new_key(), "old_key": new_key()}
        run_python("encryption", given)
        given["app"].close()
        assert re.fullmatch("charged 4111-1111 encrypted with key [0-9a-f]{8}\n", capsys.readouterr().out)

    def test_after(self, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        run_python("after", names)
        app = names["app"]
        assert drain(app).finished == 3
        assert capsys.readouterr().out == "order 7 was paid\n"
        failing = app.enqueue(names["charge_card"].new(9))
        with app.database.begin() as conn:
            (held,) = claim_on(conn, limit=1)
            failed = Failed("error", ErrorText("CardError", "declined"))
            settle.settle(conn, [settlement(held, failed)])
        drain(app)
        assert capsys.readouterr().out == f"shop.charge_card {failing.id} failed after 1 attempts: declined\n"

    def test_limits(self, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        run_python("limits", names)
        assert drain(names["app"]).finished == 5
        lines = capsys.readouterr().out.splitlines()
        assert sorted(lines) == ["booked -20", "booked 50", "charged 7", "charged 8", "sent to example.com"]
        assert lines.index("booked 50") < lines.index("booked -20")

    def test_async(self, names: dict[str, Any], database_url: str) -> None:
        names["async_engine"] = create_async_engine(async_database_url(database_url), poolclass=NullPool)
        run_python("async", names)
        assert found(names["app"]) == mail(7)

    @needs("file")
    def test_savepoints(self, names: dict[str, Any], database_url: str) -> None:
        assert 'create_engine("sqlite:///shop.db")' in block("python", "savepoints")
        names["create_engine"] = lambda url: create_engine(database_url)
        run_python("savepoints", names)
        assert found(names["app"]) == []
        names["engine"].dispose()

    def test_arguments(self, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        names |= {"dataclass": dataclass, "date": date, "Decimal": Decimal, "UUID": UUID, "uuid4": uuid4}
        shop = ModuleType("shop")
        shop.__dict__.update(names)
        monkeypatch.setitem(sys.modules, "shop", shop)
        run_python("arguments", names)
        app, job = names["app"], names["job"]
        (id, *rest) = app.jobs.get(job.id).payload["args"]
        assert rest == ["2030-01-31", [{"item": "Blue teapot", "price": "24.50"}]]
        drain(app)
        assert app.result(job) == {UUID(id): Decimal("24.50")}

    def test_enqueue_middleware(self, names: dict[str, Any]) -> None:
        names["request"] = SimpleNamespace(id="r-7")
        run_python("before_enqueue", names)
        app: sqlq.App = names["app"]
        assert app.jobs.get(app.enqueue(names["send_receipt"].new(7)).id).headers == {"request_id": "r-7"}
        names["request"] = None
        assert app.jobs.get(app.enqueue(names["send_receipt"].new(7)).id).headers == {}

    def test_progress(self, names: dict[str, Any]) -> None:
        run_python("progress", names)
        app: sqlq.App = names["app"]
        id = app.enqueue(names["convert"].new(4)).id
        drain(app)
        assert str(app.jobs.get(id).progress) == "4 of 4 (100%): page 4"
        with names["engine"].connect() as connection:
            query = block("sql", "progress")
            assert connection.exec_driver_sql(query).all() == []
            ended = query.replace("'running'", "'finished'")
            assert tuple(connection.exec_driver_sql(ended).one()) == (id, None, 100, "page 4")

    def test_layers(self, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        url = names["app"].database.engine.url
        monkeypatch.setenv("SQLQ_DATABASE_URL", url.render_as_string(hide_password=False))
        run_python("layers", names)
        app, task = names["app"], names["send_invoice"]
        assert (task.timeout_ms, task.max_attempts, task.retry.wait_ms(2)) == (30_000, 3, 60_000)
        (job,) = app.jobs.list(queue="mail")
        assert (job.timeout_ms, job.retention_ms, job.headers) == (0, 3_600_000, {"service": "shop"})
        app.close()
        (tmp_path / "pyproject.toml").write_text(block("toml", "layers"))
        monkeypatch.chdir(tmp_path)
        app = sqlq.App()
        assert app._retention_ms == 30 * 86_400_000
        assert app.task(name="t", queue="mail")(lambda: None).max_attempts == 10
        assert app.task(name="u")(lambda: None).timeout_ms == 300_000

    def test_queues(self, names: dict[str, Any]) -> None:
        run_python("queues", names)
        listed = {(job.queue, job.priority) for job in names["app"].jobs.list()}
        assert listed == {("thumbnails", -10), ("urgent", 50)}

    def test_isolated(self, names: dict[str, Any]) -> None:
        run_python("isolated", names)
        job = names["app"].enqueue(names["render"].new(7))
        drain(names["app"])
        assert names["app"].result(job) == "report-7.pdf"

    def test_services(self, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        url = names["app"].database.engine.url
        monkeypatch.setenv("SQLQ_DATABASE_URL", url.render_as_string(hide_password=False))
        names["app"].enqueue(names["app"].named("billing.charge").new(7).set(queue="billing"))
        run_python("services", names)
        app = names["app"]
        assert drain(app).finished == 2
        assert sorted(job.queue for job in app.jobs.list()) == ["billing", "shop", "shop-images"]
        app.close()

    def test_schedules(self, names: dict[str, Any]) -> None:
        run_python("schedules", names)
        noon = datetime(2026, 3, 28, 12, tzinfo=UTC)  # a Saturday
        found = tick(names["app"], noon + timedelta(days=3), since=noon)
        assert [(job.schedule, job.scheduled_for) for job in found] == [
            ("shop.clean_up", datetime(2026, 3, 31, 3, tzinfo=UTC)),
            ("report north", datetime(2026, 3, 31, 4, 30, tzinfo=UTC)),
            ("poll", datetime(2026, 3, 31, 12, tzinfo=UTC)),
        ]
        names["app"].jobs.cancel(task="shop.poll")
        assert drain(names["app"]).finished == 2
        assert names["app"].result(found[1].id) == "north for 31 March"

    def test_run_time(self, names: dict[str, Any]) -> None:
        run_python("schedules", names)
        run_python("run_time", names)
        assert len(names["upcoming"]) == 10
        assert names["app"].jobs.get(names["job"].id).schedule == "report south"
        assert names["app"].schedules.list() == []

    def test_results(self, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        names["Decimal"] = Decimal
        with working(names["app"]):
            for name in ("result", "outcomes", "several", "batch", "pruned", "hard_to_guess"):
                run_python(name, names)
        assert names["price"] == Decimal("24.50")
        assert [job.batch_key for job in names["app"].jobs.list(batch="import-42")] == ["import-42"] * 2
        assert (names["job"].args, len(names["key"])) == (["ink"], 43)
        assert names["prices"] == [Decimal("24.50")] * 2
        assert capsys.readouterr().out.count("24.50") == 2

    def test_calls(self, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        run_python("direct_calls", names)
        task = names["app"].task(name="t")(lambda: 7)
        with pytest.raises(sqlq.errors.ConfigurationError, match="t was called as a function"):
            task()
        assert task.handler() == 7

    def test_spread(self, names: dict[str, Any]) -> None:
        run_python("spread", names)
        first, second, *_, last = (names["app"].jobs.get(job.id).available_at for job in names["polls"])
        assert ((second - first).total_seconds(), (last - first).total_seconds()) == (1, 299)

    def test_expires(self, names: dict[str, Any]) -> None:
        run_python("start_within", names)
        late, soon = names["app"].jobs.list()
        assert (soon.start_by - soon.available_at).total_seconds() == 90
        assert (late.start_by - late.created_at).total_seconds() == 70 * 60

    def test_complete(self, names: dict[str, Any]) -> None:
        run_python("complete", names)
        app: sqlq.App = names["app"]
        with names["engine"].begin() as connection:
            id = connection.execute(
                text("INSERT INTO orders (item) VALUES ('teapot') RETURNING id")
            ).scalar_one()
        job = app.enqueue(names["pay_out"].new(id))
        drain(app)
        assert app.jobs.get(job.id).state == "finished"
        with names["engine"].connect() as connection:
            assert (
                connection.execute(text("SELECT item FROM orders WHERE id = :id"), {"id": id}).scalar_one()
                == "paid"
            )

    def test_long_jobs(self, names: dict[str, Any]) -> None:
        app, engine = names["app"], names["engine"]
        if engine.dialect.name == "sqlite":
            sqlq.configure_sqlite(engine, immediate=True)
        Coupon.metadata.create_all(engine)
        names |= {"Coupon": Coupon, "select": select, "func": func}
        with Session(engine) as session, session.begin():
            session.add_all(Order(item="Teapot") for _ in range(3))
        for name in ("checkpoint", "snoozing", "steps"):
            run_python(name, names)
        done = []
        for new in (
            names["give_coupons"].new("spring"),
            names["reindex"].new(),
            names["close_month"].new("05"),
        ):
            done.append(app.enqueue(new).id)
            counts = drain(app)
            assert (counts.finished, counts.released) == (1, 2 if new.task == "shop.reindex" else 0)
        assert [app.jobs.get(id).cursor for id in done[:2]] == [3, 3]
        assert app.jobs.get(done[2]).cursor == {"sqlq.steps": {"bill": True, "tidy": True}}
        with Session(engine) as session:
            assert session.scalars(select(Coupon.order_id).order_by(Coupon.order_id)).all() == [1, 2, 3]
            assert sorted(session.scalars(select(Order.item))) == ["BILL OF 05"] + ["TEAPOT"] * 3

    def test_look(self, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        app: sqlq.App = names["app"]
        app.enqueue(names["send_receipt"].new(7))
        app.enqueue(app.task(name="shop.bad", queue="mail", max_attempts=1)(lambda: 1 / 0).new())
        drain(app)
        run_python("look", names)
        first, second = capsys.readouterr().out.splitlines()
        assert first == "finished 1 None"
        assert re.fullmatch(r"2 shop\.bad \d{4}-.* ZeroDivisionError: division by zero", second)

    def test_replay(self, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        app: sqlq.App = names["app"]
        app.enqueue(names["send_receipt"].new(7))
        drain(app)
        run_python("history", names)
        assert capsys.readouterr().out.startswith("1 finished 20")
        run_python("replay", names)
        assert capsys.readouterr().out == "{1: 2}\n"
        assert app.jobs.get(3).payload == {"args": [8]}, "the filter leaves out job 1, whose copy is kept"

    def test_idempotency(self, names: dict[str, Any]) -> None:
        charged: dict[str, int] = {}
        names["payments"] = SimpleNamespace(
            charge=lambda order_id, idempotency_key: charged.update({idempotency_key: order_id})
        )
        run_python("idempotency", names)
        job = names["app"].enqueue(names["charge"].new(7))
        drain(names["app"])
        assert charged == {f"job-{job.id}": 7}

    def test_factory(self, names: dict[str, Any], database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///of-no-use.db")
        run_python("factory", names)
        names["create_app"](names["engine"])
        queue: sqlq.App = names["queue"]
        with closing(queue):
            queue.enqueue(names["remind"].new(7))
            assert drain(queue).finished == 1

    @pytest.mark.parametrize("name", ["flask", "translate", "django", "correlation"])
    def test_middleware(self, names: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []

        @contextmanager
        def scope() -> Iterator[SimpleNamespace]:
            events.append("before")
            yield SimpleNamespace()
            events.append("after")

        def close() -> None:
            events.append("close")

        class RateLimited(Exception):  # noqa: N818
            pass

        for module in (
            SimpleNamespace(__name__="django"),
            SimpleNamespace(__name__="django.db", close_old_connections=close),
        ):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        names |= {"web": SimpleNamespace(app_context=scope), "RateLimited": RateLimited}
        run_python(name, names)
        app: sqlq.App = names["app"]

        @app.task(name="shop.look")
        def look() -> str:
            if name == "translate" and sqlq.current_job().attempt == 1:
                raise RateLimited
            return str(names["correlation_id"].get()) if name == "correlation" else ""

        job = app.enqueue(look.new())
        counts = drain(app)
        assert (counts.finished, counts.retried) == ((0, 1) if name == "translate" else (1, 0))
        expected = {"flask": ["before", "after"], "django": ["close", "close"]}
        assert events == expected.get(name, [])
        if name == "correlation":
            assert app.jobs.get(job.id).result == f"job-{job.id}"

    def test_lifespan(self, names: dict[str, Any]) -> None:
        told = []

        class Client:
            async def __aenter__(self) -> Client:
                return self

            async def __aexit__(self, *error: object) -> None:
                told.append("closed")

            async def get(self, url: str) -> SimpleNamespace:
                told.append(url)
                return SimpleNamespace(status_code=200)

        run_python("lifespan", names | {"httpx": SimpleNamespace(AsyncClient=Client)})
        app: sqlq.App = names["app"]
        job = app.enqueue(app.tasks["shop.fetch"].new("https://example.org"))
        assert drain(app).finished == 1
        assert app.jobs.get(job.id).result == 200
        assert told == ["https://example.org", "closed"]

    def test_events(self, names: dict[str, Any]) -> None:
        told: list[Any] = []
        names["metrics"] = SimpleNamespace(increment=lambda name, **labels: told.append(labels))
        names["pager"] = SimpleNamespace(send=told.append)
        run_python("events", names)
        app: sqlq.App = names["app"]

        @app.task(name="shop.fail", max_attempts=1)
        def fail() -> None:
            raise ValueError("no paper")

        job = app.enqueue(fail.new())
        app.enqueue(names["send_receipt"].new(7))
        drain(app)
        assert {"event": "finished", "task": "shop.send_receipt"} in told
        assert {"event": "failed", "task": "shop.fail"} in told
        assert f"shop.fail, job {job.id}: error (no paper)" in told
        assert len(told) == 3

    def test_metrics(self, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        registry = prometheus_client.CollectorRegistry()
        monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
        run_python("metrics", names)
        assert registry.get_sample_value("sqlq_database_up") == 1.0

    def test_dashboard(self, names: dict[str, Any]) -> None:
        run_python("dashboard", names)
        user = names["staff"](SimpleNamespace(environ={"REMOTE_USER": "ada"}))
        assert user is not None
        assert names["staff"](SimpleNamespace(environ={})) is None

    def test_mounts(self, names: dict[str, Any]) -> None:
        names |= {"api": fastapi.FastAPI(), "web": flask.Flask("shop")}
        names["web"].secret_key = "of a test"
        run_python("mounts", names)
        session = {"asgi.scope": {"session": {"name": "ada"}}}
        assert names["staff"](SimpleNamespace(environ=session)).role == "operator"
        assert Client(names["web"].wsgi_app).get("/sqlq/").status_code == 403
        assert [route.path for route in names["api"].routes][-1] == "/sqlq"

    def test_traces(self, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """But for making the provider that of the whole process, which can be done once."""
        exporter = InMemorySpanExporter()
        kept: list[Any] = []
        monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", kept.append)
        monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda *args: kept[0].get_tracer(*args[:2]))
        names["exporter"] = exporter
        run_python("otel", names)
        names["app"].enqueue(names["send_receipt"].new(7))
        with names["engine"].begin() as conn:
            conn.execute(text(block("sql", "traced").replace(":", r"\:")))
        drain(names["app"])
        kept[0].shutdown()
        create, *attempts = exporter.get_finished_spans()
        assert [span.name for span in (create, *attempts)] == ["create mail", "process mail", "process mail"]
        contexts = [span.get_span_context() for span in (create, *attempts)]
        first, *others = [f"{context.trace_id:032x}" for context in contexts if context is not None]
        assert set(others) == {first, "0af7651916cd43dd8448eb211c80319c"}

    def test_tables(self, names: dict[str, Any]) -> None:
        class Base(DeclarativeBase):
            pass

        class Parcel(Base):
            __tablename__ = "parcels"
            id: Mapped[int] = mapped_column(primary_key=True)
            item: Mapped[str] = mapped_column(String(40))
            job_id: Mapped[int]

        Base.metadata.create_all(names["engine"])
        job = names["app"].enqueue(names["send_receipt"].new(7))
        with Session(names["engine"]) as session, session.begin():
            session.add(Parcel(item="Blue teapot", job_id=job.id))
        names["Order"] = Parcel
        run_python("tables", names)
        assert names["states"] == {"Blue teapot": "available"}
        assert not {"job_states", "failed_jobs"} & Base.metadata.tables.keys()

    def test_at_commit(self, names: dict[str, Any], database_url: str) -> None:
        app: sqlq.App = names["app"]
        run_python("at_commit", names)
        engine = create_async_engine(async_database_url(database_url), poolclass=NullPool)

        async def requests() -> None:
            session = AsyncSession(engine)
            for id, end in enumerate((session.rollback, session.commit, session.close), 1):
                names["enqueue_at_commit"](session, names["send_receipt"].new(id))
                await session.execute(text("SELECT 1"))
                await end()
                await session.commit()  # of nothing

        try:
            asyncio.run(requests())
        finally:
            event.remove(Session, "before_commit", names["enqueue_jobs"])
            event.remove(Session, "after_transaction_end", names["forget_jobs"])
        assert found(app) == mail(2)

    @needs("postgresql")
    def test_psycopg(self, names: dict[str, Any], database_url: str) -> None:
        plain = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
        names["psycopg"] = SimpleNamespace(connect=lambda given: psycopg.connect(plain))
        run_python("psycopg", names)
        assert found(names["app"]) == mail(7)

    @needs("file")
    def test_sqlite3(self, names: dict[str, Any], database_url: str) -> None:
        file = make_url(database_url).database or ""
        names["sqlite3"] = SimpleNamespace(connect=lambda given: sqlite3.connect(file))
        run_python("sqlite3", names)
        names["connection"].close()
        assert found(names["app"]) == mail(7)

    @needs("postgresql")
    def test_asyncpg(self, names: dict[str, Any], database_url: str) -> None:
        plain = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
        names["asyncpg"] = SimpleNamespace(connect=lambda database: asyncpg.connect(plain))
        run_python("asyncpg", names)
        assert found(names["app"]) == mail(7)

    def test_statement(self, names: dict[str, Any]) -> None:
        with closing(names["engine"].raw_connection()) as connection:
            kind, names["cursor"] = names["engine"].dialect.name, connection.cursor()
            names["paramstyle"] = {"postgresql": "pyformat", "mariadb": "format", "sqlite": "qmark"}[kind]
            run_python("statement", names)
            connection.commit()
            assert found(names["app"]) == mail(7)
            assert names["row"] == (names["app"].jobs.list()[0].id,)
            run_python("statement", names)
            assert names["row"] == ((names["app"].jobs.list()[0].id,) if kind == "mariadb" else None)
            connection.commit()
        assert drain(names["app"]).finished == 1

    def test_app_session(self, names: dict[str, Any]) -> None:
        names |= {"scoped_session": scoped_session, "sessionmaker": sessionmaker}
        run_python("of_now", names)
        names["sessions"].remove()
        assert found(names["app"]) == mail(7, 8)

    def test_eager(self, names: dict[str, Any]) -> None:
        ran: list[int] = []
        names["send_receipt"] = names["app"].task(name="t")(ran.append)
        run_python("eager", names)
        assert (ran, found(names["app"])) == ([7], [])

    @pytest.mark.parametrize(
        ("answer", "state", "attempts", "waits"),
        [
            ("closed", "scheduled", 0, 3600),
            ("gone", "cancelled", 1, None),
            ("busy", "scheduled", 1, 30),
            ("down", "scheduled", 1, 10),
            ("nonsense", "failed", 1, None),
            ("12", "finished", 1, None),
        ],
    )
    def test_retries(
        self, names: dict[str, Any], answer: str, state: str, attempts: int, waits: float | None
    ) -> None:
        names["ask"] = lambda warehouse: answer
        run_python("retries", names)
        app: sqlq.App = names["app"]
        id = app.enqueue(names["sync_stock"].new("north")).id
        drain(app)
        job = app.jobs.get(id)
        assert (job.state, job.attempts, job.max_attempts) == (state, attempts, 8)
        if waits:
            assert job.available_at is not None
            assert job.available_at.timestamp() == pytest.approx(datetime.now(UTC).timestamp() + waits, abs=9)
        if answer == "12":
            assert job.result == {"items": 12}


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

        scope = {
            "context": SimpleNamespace(configure=configure),
            "connection": connection,
            "target_metadata": MetaData(),
            "sqlq": sqlq,
        }
        exec(block("alembic", "env"), scope)
        assert compare_metadata(contexts[0], MetaData()) == []
        assert compare_metadata(MigrationContext.configure(connection), MetaData()) != [], (
            "without include_name it would drop tables"
        )
    with engine.begin() as connection:
        namespace["op"] = Operations(MigrationContext.configure(connection))
        namespace["downgrade"]()
        assert version.read(connection, None) is None
    engine.dispose()


# -- SQL -----------------------------------------------------------------------------------------------------


def test_enqueue_in_sql(names: dict[str, Any]) -> None:
    app: sqlq.App = names["app"]
    unique = {name: block("sql", name) for name in ("unique", "unique_mariadb")}
    with names["engine"].begin() as conn:
        conn.exec_driver_sql(block("sql", "enqueue"))
        for _ in range(2):
            conn.exec_driver_sql(unique["unique_mariadb" if conn.dialect.name == "mariadb" else "unique"])
    assert found(app) == [*mail(7), ("mail", "available", {"kwargs": {"order_id": 7}})]
    assert drain(app).finished == 2


def test_a_follow_up_in_sql(names: dict[str, Any]) -> None:
    app: sqlq.App = names["app"]
    with names["engine"].begin() as conn:
        conn.exec_driver_sql(block("sql", "followed"))
    with app.database.begin() as conn:
        (held,) = claim_on(conn, ["mail"], limit=1)
        settle.settle(conn, [settlement(held, Failed("error", ErrorText("MailError", "refused")))])
    (follow_up,) = app.jobs.list(task="shop.alarm")
    assert follow_up.queue == "ops"
    assert follow_up.payload["args"][0]["message"] == "refused"


@pytest.fixture
def history(names: dict[str, Any]) -> dict[str, int]:
    """A database with a job in every state; the ids by state."""
    app: sqlq.App = names["app"]

    @app.task(name="shop.bad", queue="exports", backoff="1h")
    def bad() -> None:
        raise LookupError("no such order")

    receipt = names["send_receipt"]
    ids = {"finished": app.enqueue(receipt.new(1)).id}
    ids["failed"] = app.enqueue(bad.new().set(max_attempts=1)).id
    ids["retried"] = app.enqueue(bad.new().set(max_attempts=3)).id
    for i in range(2, 39):  # after a batch MariaDB would leave out some ids
        app.enqueue(receipt.new(i))
    drain(app)
    ids["running"] = app.enqueue(receipt.new(41)).id
    with app.database.begin() as conn:
        workerss.register(conn, id="w1", host="larch", pid=7, version="1", queues=None, concurrency=1)
        claim_on(conn, ["mail"], limit=1, owner="w1", lease_ms=60_000)
    ids["waiting"] = app.enqueue(receipt.new(42)).id
    ids["newer"] = app.enqueue(receipt.new(43)).id
    ids["scheduled"] = app.enqueue(receipt.new(44).set(delay="1h")).id
    assert ids["waiting"] == 42
    return ids


ANSWERS: Sequence[Callable[[list[dict[str, Any]], dict[str, int]], Any]] = [
    lambda rows, ids: (
        [(r["queue"], r["available"], r["scheduled"], r["running"], r["failed"]) for r in rows]
        == [("exports", 0, 1, 0, 1), ("mail", 2, 1, 1, 0)]
    ),
    lambda rows, ids: (
        [(r["id"], r["host"], r["pid"]) for r in rows] == [(ids["running"], "larch", 7)] and rows[0]["since"]
    ),
    lambda rows, ids: (
        [(r["id"], r["error"]) for r in rows] == [(ids["failed"], "LookupError: no such order")]
    ),
    lambda rows, ids: [r["id"] for r in rows] == [ids["waiting"]],
    lambda rows, ids: (
        [(r["id"], r["state"], r["task"]) for r in rows] == [(42, "available", "shop.send_receipt")]
    ),
    lambda rows, ids: (
        sum(r["done"] for r in rows) == 38
        and all(re.fullmatch(r"\d{4}-\d\d-\d\d[T ]\d\d", r["hour"]) for r in rows)
    ),
    lambda rows, ids: [tuple(r.values()) for r in rows] == [("shop.bad", 1, 1), ("shop.send_receipt", 0, 38)],
    lambda rows, ids: [r["id"] for r in rows] == [ids["retried"], ids["scheduled"]],
    lambda rows, ids: (
        [(r["queue"], r["jobs"]) for r in rows] == [("exports", 1), ("mail", 39)]
        and all(r["average"] >= 0 for r in rows)
    ),
    lambda rows, ids: [(r["id"], r["attempts"]) for r in rows] == [(ids["retried"], 1)],
]


def test_a_look_in_sql(names: dict[str, Any], history: dict[str, int]) -> None:
    with names["engine"].connect() as conn:
        rows = conn.exec_driver_sql(block("sql", "look")).mappings().all()
    assert [row["id"] for row in rows[:2]] == [history["scheduled"], history["newer"]]
    assert len(rows) == 10


def questions() -> list[str]:
    return [b.text for b in BLOCKS if (b.kind, b.name) == ("sql", "question")]


def test_questions(names: dict[str, Any], history: dict[str, int]) -> None:
    assert len(questions()) == len(ANSWERS) == 10
    with names["engine"].connect() as conn:
        for question, is_right in zip(questions(), ANSWERS, strict=True):
            rows = [dict(row) for row in conn.exec_driver_sql(question).mappings()]
            assert is_right(rows, history), f"{question}\n{rows}"


HOW_IT_WORKS = ("how_enqueue", "how_claim", "how_heartbeat", "how_settle", "how_rescue")


@needs("postgresql")
def test_statements_on_how_it_works_run(names: dict[str, Any]) -> None:
    """The five statements of the page take two jobs from enqueue to their ends."""
    app: sqlq.App = names["app"]
    assert tuple(b.name for b in BLOCKS if b.name.startswith("how_")) == HOW_IT_WORKS
    enqueue, claiming, heartbeat, settling, rescue = [text(block("sql", name)) for name in HOW_IT_WORKS]
    with names["engine"].begin() as conn:
        first, second = conn.execute(enqueue).scalar_one(), conn.execute(enqueue).scalar_one()
    with names["engine"].begin() as conn:
        claimed = conn.execute(claiming).all()
        assert [(id, task) for id, _, task, _ in claimed] == [
            (id, "shop.send_receipt") for id in (first, second)
        ]
        mine, late = {"id": first, "token": claimed[0].lease_token}, {"id": first, "token": 99}
        assert conn.execute(heartbeat, mine).one() == (first, None)
        assert conn.execute(heartbeat, late).all() == conn.execute(settling, late).all() == []
        assert conn.execute(settling, mine).scalar_one() == first
    with names["engine"].begin() as conn:
        assert conn.execute(rescue).all() == []
        conn.execute(text("UPDATE jobs SET lease_expires_at = now() - interval '1 s'"))
        assert conn.execute(rescue).scalars().all() == [second]
    assert [app.jobs.get(id).state for id in (first, second)] == ["finished", "available"]


@pytest.mark.integration
def test_the_tutorial(desk: Desk) -> None:
    for name in ("models.py", "bank.py", "jobs.py", "views.py", "pyproject.toml", "test_shop.py"):
        (desk.directory / name).write_text(block("tutorial", name))
    tables, migrate, serve = commands("serve", "tutorial")
    desk.run(tables)
    desk.run(migrate)
    with subprocess.Popen(
        [sys.executable, "-m", *shlex.split(serve), "--port", "0"],
        cwd=desk.directory,
        env=desk.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        try:
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
        finally:
            server.terminate()
    test = block("tutorial", "test").strip()
    said = desk.run(
        f"{test} -p sqlq.testing.fixtures -p no:cacheprovider -q",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        SQLQ_TEST_DATABASE_URL="",
    )
    assert "3 passed" in said


# -- GRANTs --------------------------------------------------------------------------------------------------


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


KINDS = dict(re.findall(r"^sqlq grants (\w+) --as ([\w-]+) --apply$", block("sh", "grants"), re.MULTILINE))
"""The page's roles, and of which kind each is."""


@pytest.fixture
def roles(postgresql: PostgreSQL, database_url: str) -> Iterator[tuple[Engine, dict[str, str]]]:
    """The owner's engine, and for each of the page's roles the URL of a real one, under a name nobody else
    uses."""
    owner = create_engine(database_url)
    mark = uuid4().hex[:12]
    urls = {}
    with owner.begin() as conn:
        for role in KINDS:
            conn.exec_driver_sql(f"CREATE ROLE {role}_{mark} LOGIN PASSWORD '{mark}'")
            urls[role] = (
                make_url(database_url)
                .set(username=f"{role}_{mark}", password=mark)
                .render_as_string(hide_password=False)
            )
    for role, kind in KINDS.items():
        grant(database_url, f"{role}_{mark}", kind)
    yield owner, urls
    with owner.begin() as conn:
        for role in KINDS:
            conn.exec_driver_sql(f"DROP OWNED BY {role}_{mark}; DROP ROLE {role}_{mark}")
    owner.dispose()


def enqueue_as(url: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    with closing(sqlq.App(url)) as app:
        task = app.task(name="shop.note")(lambda text: text)
        (first, _) = app.enqueue_many([task.new("a"), task.new("b")])
        assert app.jobs.get(first.id).state == "available"
        app.enqueue(sqlq.chain(task.new("in a flow").set(delay="1h"), task))
        app.enqueue(task.new("in line").set(limit=sqlq.Limit("one", running=1), delay="1h"))
        app.enqueue(task.new("in time").set(unique_key="e", unique_until="pruned", start_within="1h"))
        with Session(engine) as session, session.begin():
            key = str(uuid4())
            assert app.enqueue(task.new("c").set(unique_key=key), session=session).created
            assert not app.enqueue(task.new("d").set(unique_key=key), session=session).created
    with engine.begin() as conn:
        conn.exec_driver_sql("INSERT INTO jobs (task) VALUES ('shop.note')")


def enqueue_plainly_as(url: str) -> None:
    """Enqueue with all options of a plain job, one at a time and several."""
    said: dict[str, Any] = {
        "priority": 3,
        "timeout": "5s",
        "max_attempts": 2,
        "backoff": "1s",
        "retention": "1h",
    }
    said |= {"headers": {"a": 1}, "label": "l", "start_within": "1h"}
    with closing(sqlq.App(url)) as app:
        new = app.task(name="shop.note")(lambda text: text).new("a")
        for options in (
            {},
            said,
            {**said, "delay": "1h"},
            {"available_at": datetime(2031, 1, 1, tzinfo=UTC)},
        ):
            app.enqueue(new.set(**options))
            app.enqueue_many([new.set(**options)])
        app.enqueue_many([new, new.set(**said)])


def enqueue_all_as(url: str) -> None:
    enqueue_as(url)
    enqueue_plainly_as(url)


def replace_as(url: str) -> None:
    enqueue_all_as(url)
    with closing(sqlq.App(url)) as app:
        task = app.task(name="shop.note")(lambda text: text)
        ways: list[dict[str, Any]] = [
            {"on_conflict": "replace"},
            {"on_conflict": "debounce", "max_wait": "2h"},
        ]
        for options in ways:
            key = str(uuid4())
            for _ in range(2):
                app.enqueue(task.new("a").set(unique_key=key, delay="1h", **options))


def work_as(url: str) -> None:
    """Everything a worker writes, each by its own statement."""
    error = ErrorText("Error", "text")
    with closing(sqlq.App(url)) as app:
        database = app.database
        with database.begin() as conn:
            version.require(conn, database.schema)
            workerss.register(
                conn, id=f"w-{uuid4()}"[:36], host="h", pid=1, version="1", queues=None, concurrency=1
            )
            workerss.seen(conn, "w")
            workerss.leave(conn, "w")
            workerss.sweep(conn, silent_ms=1)
            admit.forget_unused(conn, unused_ms=1, limit=10)
            notify.wake_others(conn)
            workerss.write_state(conn, "w", "paused")
            workerss.end_pauses(conn)
        workers_look.due_in(database, workers_look.KnownQueues())
        task = app.task(name="shop.note")(lambda text: text)
        app.enqueue_many([task.new(str(i)).set(max_attempts=1 + i % 2) for i in range(6)])
        for outcome in (Finished("1"), Failed("error", error), Retried(0, error), Released(0)):
            with database.begin() as conn:
                (job,) = claim_on(conn, limit=1, owner="w", lease_ms=1000)
                lease.extend(conn, [(job.id, job.lease_token)], lease_ms=1000)
                settle.settle(conn, [Settlement(job.id, job.lease_token, job.attempts, outcome)])
                lease.states_of(conn, [(job.id, job.lease_token)])
        with database.begin() as conn:
            claim_on(conn, limit=10, owner="w", lease_ms=0)
        with database.begin() as conn:
            settle.rescue(conn)
        new = Declared(f"n-{uuid4()}", Schedule(every="1h"), task.new("x"))
        schedules.follow(database, {new.name: new}, None, app.tasks, lambda: 0)
        schedules.tick(database, at=datetime(2031, 1, 1, tzinfo=UTC))
        app.enqueue(
            sqlq.chain(task.new("in a flow").set(queue="flows"), task.new("after").set(queue="flows"))
        )
        for _ in range(2):
            complete_all(app, "flows")
            unblock.sweep_recent(database, 60_000)
        app.enqueue(task.new("in line").set(limit=sqlq.Limit("one", running=1), queue="limits"))
        assert admit.look(database).number == 1
        admit.sweep(database, "")
        complete_all(app, "limits")
        with database.begin() as conn:
            operate.prune(conn, older_than_ms=0, limit=100)
            operate.prune_expired(conn, limit=100)


def complete_all(app: sqlq.App, queue: str) -> None:
    with app.database.begin() as conn:
        held = claim_on(conn, [queue], limit=10, owner="w", lease_ms=60_000)
        done = [Settlement(job.id, job.lease_token, job.attempts, Finished()) for job in held]
        assert len(settle.settle(conn, done)) == len(held) > 0


def operate_as(url: str) -> None:
    """Everything an operator's commands do; what they find was put there by the database's owner."""
    with closing(sqlq.App(url)) as app:
        running, waiting = (
            sorted(job.id for job in app.jobs.list(state="running")),
            sorted(job.id for job in app.jobs.list(state="available")),
        )
        assert app.jobs.cancel(running[:1]) == {running[0]: "requested"}
        assert app.jobs.cancel([running[0]], force=True) == {running[0]: "cancelled"}
        assert app.jobs.cancel([waiting[0]]) == {waiting[0]: "cancelled"}
        queue = f"q-{uuid4()}"
        assert app.queues.pause(queue)
        assert not app.queues.pause(queue)
        assert app.queues.resume(queue)
        assert app.queues.list()
        assert app.queues.list(exact=True)
        assert app.limits.set("one", running=2).set_at is not None
        assert app.limits.clear("one").set_at is None
        app.workers.list()
        app.audit.list()
        (first, second) = sorted(job.id for job in app.jobs.list(state="failed"))
        assert app.jobs.retry([first]) == [first]
        assert app.jobs.delete([second]) == [second]
        assert app.jobs.replay(waiting[0])
        app.jobs.prune(finished="0s", failed="0s")
        schedule = f"s-{uuid4()}"
        app.schedules.add(schedule, app.named("shop.note").new(), every="1h")
        app.schedules.pause(schedule)
        app.schedules.run(schedule)
        app.schedules.remove(schedule)
        look_in(app)
        unseen = [finding for finding in examine(app.database) if finding.said.startswith("could not look: ")]
        assert not unseen, unseen


def look_as(url: str) -> None:
    with closing(sqlq.App(url)) as app:
        look_in(app)


def look_in(app: sqlq.App) -> None:
    """Everything that changes nothing."""
    app.jobs.list()
    app.workers.list()
    app.flows.list()
    app.limits.list()
    app.jobs.failures()
    app.queues.list()
    app.queues.list(exact=True)
    app.queues._vitals()
    app.audit.list()
    app.schedules.list()
    with app.database.engine.connect() as conn:
        for question in questions():
            conn.exec_driver_sql(question)
        conn.exec_driver_sql("SELECT 1 FROM sqlq_edges")


def fill(owner: Engine) -> None:
    """Put jobs in each state for an operator."""
    with closing(sqlq.App(engine=owner)) as app:
        task = app.task(name="shop.note")(lambda text="": text)
        app.enqueue_many([task.new() for _ in range(5)])
        with app.database.begin() as conn:
            *failing, _ = claim_on(conn, limit=3, owner="w", lease_ms=60_000)
            settle.settle(
                conn,
                [
                    Settlement(job.id, job.lease_token, 1, Failed("error", ErrorText("E", "e")))
                    for job in failing
                ],
            )
        app.enqueue(sqlq.chain(task.new().set(queue="flows")))
        complete_all(app, "flows")


def rights_of(kind: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield each right of a kind of role: its name, the columns it is for, none for all, and the table."""
    for each in rights.RIGHTS[kind]:
        said, tables = each.split(" ON ")
        for right, columns in re.findall(r"([A-Z]+)(?: \((.+?)\))?", said):
            for table in tables.split(", "):
                yield right, columns.split(", ") if columns else [], table


def is_refused(flow: Callable[[str], None], url: str) -> bool:
    try:
        flow(url)
    except (ProgrammingError, sqlq.errors.SchemaVersionError) as error:
        return "permission denied" in str(error) or "may not read" in str(error)
    return False


@needs("roles")
class TestGrants:
    def test_each_role_can_do_its_work(self, roles: tuple[Engine, dict[str, str]]) -> None:
        owner, urls = roles
        enqueue_as(urls["shop_web"])
        work_as(urls["shop_worker"])
        with owner.begin() as conn:
            conn.exec_driver_sql("DELETE FROM jobs; DELETE FROM finished_jobs; DELETE FROM failed_jobs")
        enqueue_as(urls["shop_web"])
        app = sqlq.App(urls["shop_worker"])

        @app.task(name="shop.note", backoff="1h")
        def note(text: str = "") -> None:
            if text == "a":
                raise LookupError(text)
            if text == "b":
                app.enqueue(note.new("from a handler"))

        assert drain(app) == sqlq.testing.Counts(finished=5, retried=1)
        app.close()
        with closing(sqlq.App(urls["shop_reader"])) as looking:
            assert [(q.queue, q.scheduled, q.blocked) for q in looking.queues.list()] == [("default", 2, 2)]
            assert [job.state for job in looking.jobs.list(state="scheduled")] == ["scheduled"] * 2
            assert not [f for f in examine(looking.database) if "permission" in f.said]
        look_as(urls["shop_reader"])

    def test_an_operators_role_can_do_all_that_operators_do(
        self, roles: tuple[Engine, dict[str, str]]
    ) -> None:
        owner, urls = roles
        fill(owner)
        operate_as(urls["shop_operator"])

    def test_a_workers_role_may_retry_and_delete(self, roles: tuple[Engine, dict[str, str]]) -> None:
        with closing(sqlq.App(roles[1]["shop_worker"])) as app:
            bad = app.task(name="shop.bad", max_attempts=1)(lambda: 1 / 0)
            app.enqueue_many([bad.new(), bad.new()])
            assert drain(app).failed == 2
            first, second = (job.id for job in app.jobs.list())
            assert app.jobs.retry([first]) == [first]
            assert app.jobs.delete([second]) == [second]

    def test_a_workers_role_may_run_every_service(self, roles: tuple[Engine, dict[str, str]]) -> None:
        """A drain ends before some services. Each is run twice, since some begin with a wait."""
        with closing(sqlq.App(roles[1]["shop_worker"])) as app:
            services = list(app.worker()._maintenance._due)
            assert {type(service).__name__ for service in services} > {"Rescue", "Prune"}
            for service in services * 2:
                service.run()

    def test_replacing_needs_the_replacing_producer_role(self, roles: tuple[Engine, dict[str, str]]) -> None:
        owner, urls = roles
        replace_as(urls["shop_admin"])
        with pytest.raises(SQLAlchemyError, match="permission denied") as refused:
            replace_as(urls["shop_web"])
        name = make_url(urls["shop_web"]).username
        (said,) = refused.value.__notes__
        assert f"sqlq grants {name} --as replacing-producer`" in said
        grant(owner.url.render_as_string(hide_password=False), str(name), "replacing-producer")
        replace_as(urls["shop_web"])

    def test_a_form_role_may_enqueue_plain_jobs_alone(self, roles: tuple[Engine, dict[str, str]]) -> None:
        enqueue_plainly_as(url := roles[1]["shop_form"])
        with closing(sqlq.App(url)) as app:
            task = app.task(name="shop.note")(lambda text: text)
            new = task.new("a")
            for refused in (
                new.set(unique_key="k"),
                new.set(limit=sqlq.Limit("one", running=1)),
                new.set(on_success=app.task(name="shop.after")(lambda ended: None)),
                sqlq.chain(new, task),
            ):
                with pytest.raises(SQLAlchemyError, match="permission denied") as raised:
                    app.enqueue(refused)
                (said,) = raised.value.__notes__
                assert " --as producer` prints" in said

    def test_and_nothing_else(self, roles: tuple[Engine, dict[str, str]]) -> None:
        for role, statement in (
            ("shop_web", "UPDATE jobs SET priority = 1"),
            ("shop_web", "DELETE FROM jobs"),
            ("shop_web", "SELECT * FROM sqlq_workers"),
            ("shop_web", "DROP TABLE jobs"),
            ("shop_worker", "UPDATE sqlq_version SET version_num = '0'"),
            ("shop_worker", "ALTER TABLE jobs ADD COLUMN x int"),
            ("shop_operator", "INSERT INTO failed_jobs DEFAULT VALUES"),
            ("shop_operator", "DELETE FROM sqlq_queues"),
            ("shop_operator", "DELETE FROM sqlq_workers"),
            ("shop_operator", "DROP TABLE jobs"),
            ("shop_reader", "UPDATE jobs SET priority = 1"),
            ("shop_reader", "INSERT INTO jobs (task) VALUES ('x')"),
        ):
            engine = create_engine(roles[1][role])
            with (
                engine.connect() as conn,
                pytest.raises(ProgrammingError, match=r"permission denied|must be owner"),
            ):
                conn.exec_driver_sql(statement)
            engine.dispose()

    @pytest.mark.slow
    @pytest.mark.parametrize("role", KINDS)
    def test_every_one_of_them_is_needed(self, roles: tuple[Engine, dict[str, str]], role: str) -> None:
        owner, urls = roles
        flows = {"shop_web": enqueue_all_as, "shop_form": enqueue_plainly_as, "shop_admin": replace_as}
        flows |= {"shop_worker": work_as, "shop_operator": operate_as}
        flows |= {"shop_reader": look_as}
        name = make_url(urls[role]).username
        for right, columns, table in rights_of(KINDS[role]):
            if table == "sqlq_audit" and right != "SELECT":
                continue  # an action that cannot be recorded is done
            for column in columns or [""]:
                what = f"{right} ({column}) ON {table}" if column else f"{right} ON {table}"
                with owner.begin() as conn:
                    conn.exec_driver_sql(f"REVOKE {what} FROM {name}")
                    conn.exec_driver_sql(
                        "DELETE FROM jobs; DELETE FROM finished_jobs; DELETE FROM failed_jobs"
                    )
                if role == "shop_operator":
                    fill(owner)
                assert is_refused(flows[role], urls[role]), f"{role} does not need {what}"
                with owner.begin() as conn:
                    conn.exec_driver_sql(f"GRANT {what} TO {name}")
