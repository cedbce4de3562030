"""The command line: help, migrate and enqueue, and its errors for bad input."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, make_url, text

import sqlq
from sqlq.cli import STAYING, main
from sqlq.cli.root import sqlq as command_line
from sqlq.schema.version import HEAD
from tests.kit import execute, for_each, needs
from tests.kit.command import Command

# -- help ----------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_imports_nothing_heavy(bare: Command) -> None:
    program = """
import sys
from sqlq.cli import main
sys.argv = ["sqlq", "--help"]
try:
    main()
finally:
    heavy = ("sqlalchemy", "rich", "alembic", "psycopg", "asyncio")
    print([m for m in heavy if m in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=bare.environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert re.findall(r"^  (\w+)  ", done.stdout.split("Commands:")[1], re.MULTILINE) == [
        "init",
        "migrate",
        "work",
        "enqueue",
        "status",
        "jobs",
        "show",
        "why",
        "failed",
        "retry",
        "cancel",
        "reschedule",
        "change",
        "delete",
        "replay",
        "prune",
        "queues",
        "workers",
        "flows",
        "limits",
        "schedules",
        "web",
        "audit",
        "keys",
        "grants",
        "doctor",
        "health",
        "metrics",
        "demo",
    ], "this list has each command, in the order of the help"
    for name in ("SQLQ_DATABASE_URL", "SQLQ_APP", "sqlite:///sqlq.db"):
        assert name in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@for_each(
    "command",
    [
        "migrate",
        "work",
        "enqueue",
        "status",
        "jobs",
        "show",
        "why",
        "failed",
        "demo",
        "retry",
        "queues pause",
        "schedules add",
    ],
)
def test_every_command_has_help(bare: Command, command: str) -> None:
    assert bare.ok(*command.split(), "--help").startswith(f"Usage: sqlq {command} ")


def test_version(bare: Command) -> None:
    assert bare.ok("--version").strip() == f"sqlq, version {sqlq.__version__}"


# -- migrate -------------------------------------------------------------------------------------------------


def test_migrate_up_look_and_down(tmp_path: Path, empty_database_url: str) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=empty_database_url)
    assert run("migrate", "--check").code == 1
    assert run("status").code == 1
    assert run.ok("migrate").startswith("created sqlq's tables at revision ")
    assert f"at revision {HEAD}, the one needed" in run.ok("migrate")
    assert run("migrate", "--check").code == 0
    assert run.shop("enqueue", "shop.send", "7").code == 0
    assert "still holds jobs" in run("migrate", "--down", "base").sentence()
    assert "removed" in run.ok("migrate", "--down", "base", "--force")
    assert run("migrate", "--check").code == 1
    engine = create_engine(empty_database_url)
    assert "jobs" not in inspect(engine).get_table_names()
    engine.dispose()


def test_migrate_prints_sql_that_makes_the_tables_and_connects_to_nothing(bare: Command) -> None:
    script = bare.ok("-d", "sqlite:///never.db", "migrate", "--sql")
    assert not (bare.directory / "never.db").exists()
    import sqlite3

    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    assert connection.execute("SELECT COUNT(*) FROM job_states").fetchone() == (0,)
    connection.close()
    assert "CREATE TABLE shop_jobs.jobs" in bare.ok(
        "-d", "postgresql://nobody@nowhere.invalid/none", "migrate", "--sql", env={"SQLQ_SCHEMA": "shop_jobs"}
    )


@pytest.mark.parametrize("options", [("--sql", "--check"), ("--check", "--down", "base"), ("--force",)])
def test_migrate_refuses_options_that_do_not_go_together(bare: Command, options: tuple[str, ...]) -> None:
    assert bare("migrate", *options).code == 2
    assert not (bare.directory / "sqlq.db").exists()


def test_newer_tables_are_used_unless_they_are_too_new(sqlq_: Command, app: sqlq.App) -> None:
    """A pod of the release before that starts again after `sqlq migrate` of the new one."""

    def change(columns: str) -> None:
        with app.database.begin() as conn:
            conn.execute(
                text(
                    f"UPDATE {app.database.schema + '.' if app.database.schema else ''}sqlq_version SET "
                    f"{columns}"
                )
            )

    change("version_num = '0098'")
    assert sqlq_("migrate", "--check").code == 0
    assert "at revision 0098, newer than the" in sqlq_.ok("migrate")
    assert "which works with them" in sqlq_.shop("work", "--drain").err
    change("version_num = '0099', oldest_code = '0098'")
    for command in (
        ["migrate"],
        ["migrate", "--check"],
        ["work", "--drain"],
        ["enqueue", "shop.send", "7"],
        ["status"],
    ):
        done = sqlq_.shop(*command)
        assert done.code == 1
        assert "install the newer sqlq here" in done.out + done.err


def test_migrate_refuses_an_unknown_revision(sqlq_: Command) -> None:
    assert "'4711'" in sqlq_("migrate", "--down", "4711").sentence()
    for nothing in ("", "@"):
        said = sqlq_("migrate", f"--down={nothing}").sentence()
        assert f'to revision {nothing!r}: give the number of a revision, or "base"' in said


def test_migrate_down_prints_the_result(sqlq_: Command) -> None:
    assert f"are at revision {HEAD} already" in sqlq_.ok("migrate", "--down", "head")
    back = sqlq_.ok("migrate", "--down=-1")
    assert back.startswith("removed" if HEAD == "0001" else "took")


# -- where the database is -----------------------------------------------------------------------------------


def test_the_option_then_the_app_then_the_variable_choose_the_database(bare: Command) -> None:
    """-d, then the App's own, then SQLQ_DATABASE_URL, then sqlq.db here."""
    for name in ("option", "app", "variable", "sqlq"):
        bare.ok("-d", f"sqlite:///{name}.db", "migrate")
    (bare.directory / "own.py").write_text(
        "from sqlq import App\napp = App('sqlite:///app.db')\n@app.task\ndef t() -> None: ...\n"
    )
    variable = {"SQLQ_DATABASE_URL": "sqlite:///variable.db"}

    def enqueue(*options: str, env: dict[str, str] | None = None, task: str = "own.t") -> None:
        bare.ok(*options, "enqueue", task, env=env)

    enqueue("-d", "sqlite:///option.db", "-a", "own:app", env=variable)
    for _ in range(2):
        enqueue("-a", "own:app", env=variable)
    for _ in range(3):
        enqueue("-a", "shop:app", env=variable, task="shop.where")
    for _ in range(4):
        enqueue("-a", "shop:app", task="shop.where")
    for _ in range(5):
        enqueue("-d", "sqlite:///option.db", task="shop.where", env={**variable, "SQLQ_APP": "shop:app"})
    counts = {}
    for name in ("option", "app", "variable", "sqlq"):
        (queue,) = json.loads(bare.ok("-d", f"sqlite:///{name}.db", "status", "--json"))["queues"]
        counts[name] = queue["available"]
    assert counts == {"option": 6, "app": 2, "variable": 3, "sqlq": 4}


CANNOT_BE_USED = {
    "nonsense": "the database URL cannot be read",
    "postgresql://u:secret@h:port/x": "the database URL cannot be read",
    "mysql://u:secret@h/x": "for MariaDB write mariadb://u:***@h/x",
    "sqlite://": "an SQLite database in memory",
    "sqlite:///:memory:": "an SQLite database in memory",
    "postgresql+pg8000://u:secret@h/x": "by psycopg or psycopg2, not by 'postgresql+pg8000'",
    "postgresql://u:secret@host.invalid/x": "check the host in the URL",
    "sqlite:///missing.db": "create it with sqlq migrate -d sqlite:///missing.db",
    "sqlite:///shop.py": "not a database",
    "sqlite:////": "unable to open database file",
}


@for_each("url", CANNOT_BE_USED)
def test_a_database_that_cannot_be_used_is_reported_in_one_sentence(bare: Command, url: str) -> None:
    said = bare("-d", url, "status").sentence()
    assert CANNOT_BE_USED[url] in said
    assert "secret" not in said
    assert not (bare.directory / "missing.db").exists()


@needs("roles")
def test_a_missing_server_database_or_role_is_reported_in_one_sentence(
    bare: Command, database_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = make_url(database_url)

    def said(changed: str) -> str:
        return bare("-d", changed, "status").sentence()

    assert "start the server, or check host and port" in said(f"postgresql://u:secret@127.0.0.1:{port}/x")
    assert "create it first, as with createdb nodb" in said(
        url.set(database="nodb").render_as_string(hide_password=False)
    )
    assert "check the user" in said(
        url.set(username="nobody_here", password="secret").render_as_string(hide_password=False)
    )


def test_an_unmigrated_database_is_one_sentence_for_every_command(
    tmp_path: Path, empty_database_url: str
) -> None:
    run = Command(tmp_path, SQLQ_DATABASE_URL=empty_database_url)
    if empty_database_url.startswith("sqlite"):
        engine = create_engine(empty_database_url)
        execute(engine, "CREATE TABLE something_else (id INTEGER)")
        engine.dispose()
    commands = (
        ["status"],
        ["jobs", "--state", "failed"],
        ["show", "1"],
        ["retry", "--all"],
        ["work"],
        ["enqueue", "shop.send", "7"],
    )
    for command in commands:
        done = run.shop(*command)
        assert "create them with `sqlq migrate -a shop:app`" in done.sentence()


# -- the App -------------------------------------------------------------------------------------------------

APPS = {
    "nowhere:app": (None, "there is no module 'nowhere' in"),
    "broken:app": (
        "import json\nfrom shop import nothing_there\n",
        "ImportError: cannot import name 'nothing_there'",
        "/broken.py, line 2)",
    ),
    "needs:app": (
        "import not_installed_at_all\n",
        "No module named 'not_installed_at_all'",
        "/needs.py, line 1)",
    ),
    "odd:app": ("def f(:\n", "SyntaxError", "(odd.py, line 1)"),
    "quits:app": ("raise SystemExit(3)\n", "SystemExit: 3", "/quits.py, line 1)"),
    "twice:app": (
        "import sqlq\napp = sqlq.App()\n@app.task(name='x')\ndef a(): ...\n@app.task(name='x')\ndef b(): "
        "...\n",
        "two tasks are named 'x'",
        "/twice.py, line 5)",
    ),
    "none:app": ("import sqlq\napp = sqlq.App()\n", "the App none:app has no tasks"),
    "other:app": ("import sqlq\njobs = sqlq.App()\n", "has no 'app'; did you mean other:jobs?"),
    "text:app": ("app = 'app'\n", "is of type str, not a sqlq.App"),
    "deep:app": ("from shop import app\nfrom inner import x\n", "ZeroDivisionError", "/inner.py, line 2)"),
}


@for_each("path", APPS)
def test_an_app_that_cannot_be_imported_is_reported_in_one_sentence(bare: Command, path: str) -> None:
    source, *expected = APPS[path]
    (bare.directory / "inner.py").write_text("x = 1\nx = x / 0\n")
    if source is not None:
        (bare.directory / f"{path.partition(':')[0]}.py").write_text(source)
    said = bare("-a", path, "work").sentence()
    for words in expected:
        assert words is not None
        assert words in said


@pytest.mark.parametrize("path", ["shop:", ":app", ""])
def test_an_app_is_written_as_module_and_attribute(bare: Command, path: str) -> None:
    done = bare("-a", path, "work")
    assert done.code == 2
    assert "module:attribute" in done.err


def test_work_needs_the_app(sqlq_: Command) -> None:
    assert "name the App with --app module:attribute" in sqlq_("work").misuse()


# -- enqueue -------------------------------------------------------------------------------------------------


def test_enqueue_reads_arguments_as_json_or_else_as_text(sqlq_: Command, app: sqlq.App) -> None:
    cases = {
        ("7",): {"args": [7]},
        ("7", "true"): {"args": [7, True]},
        ("7", "false", "plain text"): {"args": [7, False, "plain text"]},
        ("7", "false", '"7"'): {"args": [7, False, "7"]},
        ("7", "false", "NaN"): {"args": [7, False, "NaN"]},
        ("7", "--kwargs", '{"copy": true, "note": "ü"}'): {
            "args": [7],
            "kwargs": {"copy": True, "note": "ü"},
        },
        ("--", "-5"): {"args": [-5]},
    }
    for args, payload in cases.items():
        done = sqlq_.shop("enqueue", "--json", "shop.send", *args).json()
        assert done.keys() == {"id", "queue", "task", "state", "created"}
        assert app.jobs.get(done["id"]).payload == payload


def test_enqueue_finds_a_task_by_its_alias(sqlq_: Command) -> None:
    assert sqlq_.shop("enqueue", "mail.send", "7", "--json").json()["task"] == "shop.send"


def test_enqueue_takes_the_options_of_a_job(sqlq_: Command, app: sqlq.App) -> None:
    options = (
        "--queue",
        "later",
        "--delay",
        "1h",
        "--priority",
        "-3",
        "--max-attempts",
        "9",
        "--unique-key",
        "k",
    )
    first = sqlq_.shop("enqueue", "shop.send", "7", *options, "--json").json()
    job = app.jobs.get(first["id"])
    assert first == {
        "id": job.id,
        "queue": "later",
        "task": "shop.send",
        "state": "scheduled",
        "created": True,
    }
    assert (job.priority, job.max_attempts, job.unique_key) == (-3, 9, "k")
    again = sqlq_.shop("enqueue", "shop.send", "7", *options, "--json")
    assert (json.loads(again.out), again.code) == ({**first, "created": False}, 3)
    again = sqlq_.shop("enqueue", "shop.send", "7", *options)
    assert f"nothing enqueued: job {job.id} " in again.out
    assert again.code == 3
    at = sqlq_.shop(
        "enqueue", "shop.send", "7", "--available-at", "2999-01-31T08:00:00+01:00", "--json"
    ).json()
    assert str(app.jobs.get(at["id"]).available_at).startswith("2999-01-31 0")
    said = sqlq_.shop("enqueue", "shop.send", "7").out
    assert re.fullmatch(r"enqueued job \d+: shop.send in queue mail, available\n", said)


REFUSED = {
    ("shop.sned", "7"): "no task is named 'shop.sned'; did you mean shop.send",
    ("shop.send",): "missing a required argument: 'order_id'",
    ("shop.send", "1", "2", "3", "4"): "too many positional arguments",
    ("shop.send", "null"): "order_id is None",
    ("shop.send", "7", "--delay", "1h", "--available-at", "2030-01-01T00:00Z"): "both delay and available_at",
    ("shop.send", "abc"): 'order_id is "abc": the task takes int there',
    ("shop.send", "true"): "order_id is true: the task takes int there",
    ("shop.send", "7", "--kwargs", '{"copy": 1}'): "copy is 1: the task takes bool there",
    ("shop.send", "7", "true", "7"): "note is 7: the task takes str there; text that looks like JSON",
}


@pytest.mark.parametrize("args", REFUSED, ids=" ".join)
@needs("cheap")
def test_enqueue_refuses_arguments_that_do_not_fit_the_task(
    sqlq_: Command, app: sqlq.App, args: tuple[str, ...]
) -> None:
    assert REFUSED[args] in sqlq_.shop("enqueue", *args).sentence()
    assert app.jobs.list() == []


WRONG_USAGE = {
    ("shop.send", "7", "--priority", "500"): "--priority is 500",
    ("shop.send", "7", "--delay", "5"): "--delay is '5': write it as in",
    ("shop.send", "7", "--queue", ""): "--queue is ''",
    ("shop.send", "7", "--queue", "a,b"): "--queue is 'a,b': a comma separates queues",
    ("shop.send", "7", "--max-attempts", "0"): "--max-attempts is 0",
    ("shop.send", "7", "--kwargs", "[1]"): "not a JSON object",
    ("shop.send", "7", "--kwargs", "{copy: 1}"): "not JSON",
    ("shop.send", "7", "--kwargs", '{"copy": NaN}'): "NaN is not JSON",
    ("shop.send", "7", "--available-at", "tomorrow"): "is not a time like",
    ("shop.send", "7", "--available-at", "2030-01-01T00:00"): "has no time zone",
    ("shop.send", "-5"): "No such option '-5'",
    ("shop.send", "7", "--prioriti", "3"): "Did you mean",
}


@pytest.mark.parametrize("args", WRONG_USAGE, ids=" ".join)
@needs("cheap")
def test_enqueue_refuses_a_wrong_command_line(sqlq_: Command, app: sqlq.App, args: tuple[str, ...]) -> None:
    done = sqlq_.shop("enqueue", *args)
    assert done.code == 2
    assert WRONG_USAGE[args] in done.err
    assert app.jobs.list() == []


# -- pipes ---------------------------------------------------------------------------------------------------


def test_a_closed_reader_ends_a_command_quietly(bare: Command) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [sys.executable, "-m", "sqlq", "migrate", "--sql"]
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            arguments,
            cwd=bare.directory,
            env=bare.environment,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == ""


# -- Ctrl-C --------------------------------------------------------------------------------------------------

INTERRUPTED_AT = """
import importlib.abc, os, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "module",
    ["click", "sqlq.cli.context", "sqlq.cli.commands.status", "sqlq.app", "sqlalchemy.engine", "shop"],
)
def test_ctrl_c_in_the_middle_of_an_import_is_quiet(bare: Command, module: str) -> None:
    bare.ok("migrate")
    (bare.directory / "sitecustomize.py").write_text(INTERRUPTED_AT)
    path = os.pathsep.join((str(bare.directory), bare.environment["PYTHONPATH"]))
    done = bare("status", "-a", "shop:app", env={"INTERRUPT_AT": module, "PYTHONPATH": path})
    assert (done.code, done.out, done.err.strip()) == (130, "", "")


def test_the_list_of_commands_fits_a_terminal(bare: Command) -> None:
    for group in ([], ["schedules"]):
        commands = bare.ok(*group, "--help", env={"COLUMNS": "80"}).split("Commands:")[1]
        assert "..." not in commands
        assert max(map(len, commands.splitlines())) <= 80


def test_a_command_leaves_no_log_of_sqlite_behind(bare: Command) -> None:
    """The process ends without looking through its memory, so it has to close what is open."""
    for command in ("migrate", "status"):
        bare.ok("-d", "sqlite:///jobs.db", command, env={"PYTHONUNBUFFERED": "1"})
        assert [path.name for path in bare.directory.glob("jobs.db*")] == ["jobs.db"]


@pytest.mark.parametrize(
    ("words", "threshold"),
    [("status", 1_000_000), *((name, 50_000) for name in sorted(STAYING))],
)
def test_only_long_running_commands_collect_garbage(
    words: str, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = gc.get_threshold(), list[int]()
    monkeypatch.setattr(sys, "argv", ["sqlq", *words.split()])
    monkeypatch.setattr("sqlq.cli.root.run", lambda: seen.append(gc.get_threshold()[0]))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    try:
        main()
    finally:
        gc.set_threshold(*before)
    assert seen == [threshold]
    assert command_line.commands.keys() >= STAYING
