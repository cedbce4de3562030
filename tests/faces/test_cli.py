"""The command line: help, migrate, the demo; the App and the database; commands that can be pasted."""

from __future__ import annotations

import gc
import os
import re
import shlex
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import make_url

import sqlq
from sqlq.cli import STAYING, main
from sqlq.cli.context import Context
from sqlq.cli.root import sqlq as command_line
from sqlq.config import command_hint
from tests.kit import needs
from tests.kit.command import Command

COMMANDS = [
    *("init", "migrate", "work", "enqueue", "status", "jobs", "show", "why", "failed", "retry", "cancel"),
    *("reschedule", "change", "delete", "replay", "signal", "prune", "queues", "workers", "flows", "limits"),
    *("schedules", "web", "audit", "keys", "grants", "doctor", "health", "metrics", "demo"),
]
"""Each command, in the order of the help."""


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
    done = bare.process(sys.executable, "-c", program)
    assert (done.code, done.err.strip()) == (0, "[]")
    assert re.findall(r"^  (\w+)  ", done.out.split("Commands:")[1], re.MULTILINE) == COMMANDS
    for name in ("SQLQ_DATABASE_URL", "SQLQ_APP", "sqlite:///sqlq.db"):
        assert name in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    for group in ([], ["schedules"]):
        commands = bare.ok(*group, "--help", env={"COLUMNS": "80"}).split("Commands:")[1]
        assert "..." not in commands
        assert max(map(len, commands.splitlines())) <= 80
    assert bare.ok("--version").strip() == f"sqlq, version {sqlq.__version__}"


def test_migrate_prints_sql_that_makes_the_tables_and_connects_to_nothing(bare: Command) -> None:
    script = bare.ok("-d", "sqlite:///never.db", "migrate", "--sql")
    assert not (bare.directory / "never.db").exists()
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script)
        assert connection.execute("SELECT COUNT(*) FROM job_states").fetchone() == (0,)
    assert "CREATE TABLE shop_jobs.jobs" in bare.ok(
        "-d", "postgresql://nobody@nowhere.invalid/none", "migrate", "--sql", env={"SQLQ_SCHEMA": "shop_jobs"}
    )


@needs("roles")
def test_a_missing_server_database_or_role_is_reported_in_one_sentence(
    bare: Command, database_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = make_url(database_url)
    for changes, words in (
        ({"username": "u", "host": "127.0.0.1", "port": port}, "start the server, or check host and port"),
        ({"username": "u", "host": "host.invalid"}, "check the host in the URL"),
        ({"database": "nodb"}, "create it first, as with createdb nodb"),
        ({"username": "nobody_here", "password": "secret"}, "check the user"),
    ):
        changed = url.set(**changes).render_as_string(hide_password=False)
        assert words in bare("-d", changed, "status").sentence()


def test_a_closed_reader_ends_a_command_quietly(bare: Command) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        assert bare.process(sys.executable, "-m", "sqlq", "migrate", "--sql", stdout=pipe).err == ""


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


def test_the_demo_needs_nothing_and_leaves_nothing(bare: Command) -> None:
    elsewhere = bare.directory / "temporary"
    elsewhere.mkdir()
    before = sorted(bare.directory.iterdir())
    away = "postgresql://nobody@nowhere.invalid/none"
    output = bare.ok("demo", env={"TMPDIR": str(elsewhere), "SQLQ_DATABASE_URL": away})
    assert "40 transactions committed an order each" in output
    assert "one more order and its job were rolled back: 40 orders and 40 jobs are there" in output
    assert re.search(r"demo.charge_card .*attempt 1 of 5\) failed .*TimeoutError", output)
    assert re.search(r"demo.charge_card .*attempt 2 of 5\) finished", output)
    assert re.search(r"demo.ship_abroad .*attempt 2 of 2\) failed for good", output)
    assert "1 failed, 41 finished" in output
    assert re.search(r"^default( +0){4} +1 +- +no worker$", output, re.MULTILINE), "as sqlq status has it"
    assert len(output.splitlines()) <= 60
    assert sorted(bare.directory.iterdir()) == before
    assert list(elsewhere.iterdir()) == []


def test_commands_leave_out_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url("postgresql+psycopg://u:secret@h/shop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLQ_DATABASE_URL", url.render_as_string(hide_password=False))
    assert command_hint.command("work", url, needs_app=True) == "sqlq work -a module:attribute"
    monkeypatch.setenv("SQLQ_APP", "shop:app")
    assert command_hint.command("work", url, needs_app=True) == "sqlq work"
    assert command_hint.command("status", url.set(database="other")).endswith("@h/other' sqlq status")
    for typed, standing, words in (
        ("shop:app", "shop:app", "work"),
        ("other:app", "shop:app", "work -a other:app"),
        (None, "shop:app", "work"),
    ):
        monkeypatch.setenv("SQLQ_APP", standing)
        monkeypatch.setattr(command_hint, "current", Context(app_option=typed))
        assert command_hint.command("work", needs_app=True) == f"sqlq {words}"
    monkeypatch.delenv("SQLQ_APP")
    for typed, words in (("sqlite:///a.db", "status"), ("sqlite:///b.db", "status -d sqlite:///b.db")):
        monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///a.db")
        monkeypatch.setattr(command_hint, "current", Context(database_url=typed))
        assert command_hint.command("status") == f"sqlq {words}"


STRANGE = """
import pathlib, sqlq
pathlib.Path("ran").touch()
app = sqlq.App()
"""
NEEDING_NO_CODE = (
    *("migrate", "migrate --check", "status", "jobs", "why 1", "doctor", "workers", "jobs --state failed"),
    *("retry --all", "flows", "limits", "schedules", "queues pause mail", "queues resume mail"),
    *("cancel --queue mail", "prune --finished 1d", "metrics"),
)


def test_commands_with_a_database_alone_import_no_code(bare: Command) -> None:
    ran = bare.directory / "ran"
    (bare.directory / "pyproject.toml").write_text('[tool.sqlq]\napp = "strange:app"\n')
    (bare.directory / "strange.py").write_text(STRANGE)
    for words in NEEDING_NO_CODE:
        done = bare(*words.split(), "-d", "sqlite:///a.db", env={"SQLQ_APP": "strange:app"})
        assert done.code == 0 or words in ("doctor", "why 1"), done
        assert not ran.exists(), words
    bare.ok("status", "-d", "sqlite:///a.db", "-a", "strange:app")
    assert ran.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_pyproject_of_another_user_is_not_used(bare: Command) -> None:
    file = bare.directory / "pyproject.toml"
    file.write_text('[tool.sqlq]\napp = "strange:app"\ndatabase-url = "sqlite:///theirs.db"\n')
    (bare.directory / "strange.py").write_text(STRANGE)
    os.chown(file, 65534, 65534)
    bare.directory /= "below"
    bare.directory.mkdir()
    done = bare("migrate")
    said = f"[tool.sqlq] in {file} is passed over: {file} belongs to another user (uid 65534); chown it"
    assert (said in done.err, done.err.count("is passed over")) == (True, 1)
    assert not (bare.directory / "ran").exists()
    assert (bare.directory / "sqlq.db").exists()
    assert not (file.parent / "theirs.db").exists()


def pasted(said: str) -> list[str]:
    """The arguments of the command that a message names."""
    found = re.search(r"sqlq (migrate[^`;\n]*)", said)
    assert found, said
    return shlex.split(found[1])


WAYS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "app in the environment": ((), {"SQLQ_APP": "own:app"}),
    "app, and a variable in vain": (("-a", "own:app"), {"SQLQ_DATABASE_URL": "sqlite:///wrong.db"}),
    "both": (("-a", "shop:app", "-d", "sqlite:///the own.db"), {}),
    "app that takes the variable": (("-a", "shop:app"), {"SQLQ_DATABASE_URL": "sqlite:///the own.db"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_command_in_an_error_mends_it(bare: Command, way: str) -> None:
    (bare.directory / "own.py").write_text("import sqlq\napp = sqlq.App('sqlite:///the own.db')\n")
    options, env = WAYS[way]
    said = bare("status", *options, env=env).sentence()
    bare.ok(*pasted(said), env=env)
    assert not env.keys() & {"SQLQ_APP"} or "-a" not in pasted(said)
    assert [file.name for file in bare.directory.glob("*.db")] == ["the own.db"]
    assert "no jobs wait" in bare.ok("status", *options, env=env)


SECRETS = ("password=SEKRET", "sslpassword=SEKRET", "passfile=/SEKRET", "sslmode=wrong&password=SEKRET")


@pytest.mark.integration
@pytest.mark.variants
@needs("postgresql")
@pytest.mark.parametrize("secret", [None, *SECRETS])
def test_no_output_shows_a_password(bare: Command, database_url: str, secret: str | None) -> None:
    """The database answers, or does not; its URL is an option, or a variable."""
    url = make_url(database_url)
    if secret is None:
        url = url.set(password="SEKRET")
    there = url.render_as_string(hide_password=False) + (f"?{secret}" if secret else "")
    told = []
    for place in (there, there.replace(f":{url.port}/", ":1/")):
        env = {"SQLQ_DATABASE_URL": place}
        for words in ("status", "status --json", "doctor", "doctor --json", "migrate", "limits"):
            told += [bare(*words.split(), "-d", place), bare(*words.split(), env=env)]
        told.append(bare("enqueue", "-a", "shop:app", "shop.where", env=env))
        told.append(bare("grants", "x", "--as", "reader", "--apply", env=env))
    told.append(bare("work", "--drain", "-a", "shop:app", "--log-level", "debug", "-d", there))
    assert not [done for done in told if "SEKRET" in done.out + done.err]
    assert any("***" in done.out + done.err for done in told)
