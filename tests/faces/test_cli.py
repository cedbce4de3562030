"""The command line: help, migrate and enqueue, and its errors for bad input."""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys

import pytest
from sqlalchemy import make_url

import sqlq
from sqlq.cli import STAYING, main
from sqlq.cli.root import sqlq as command_line
from tests.kit import needs
from tests.kit.command import Command

COMMANDS = [
    *("init", "migrate", "work", "enqueue"),
    *("status", "jobs", "show", "why", "failed"),
    *("retry", "cancel", "reschedule", "change", "delete", "replay", "prune"),
    *("queues", "workers", "flows", "limits", "schedules"),
    *("web", "audit", "keys", "grants", "doctor", "health", "metrics", "demo"),
]
"""Each command, in the order of the help."""

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
    assert re.findall(r"^  (\w+)  ", done.stdout.split("Commands:")[1], re.MULTILINE) == COMMANDS
    for name in ("SQLQ_DATABASE_URL", "SQLQ_APP", "sqlite:///sqlq.db"):
        assert name in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    for group in ([], ["schedules"]):
        commands = bare.ok(*group, "--help", env={"COLUMNS": "80"}).split("Commands:")[1]
        assert "..." not in commands
        assert max(map(len, commands.splitlines())) <= 80
    assert bare.ok("--version").strip() == f"sqlq, version {sqlq.__version__}"


# -- migrate -------------------------------------------------------------------------------------------------


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


# -- where the database is -----------------------------------------------------------------------------------


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
    assert "check the host in the URL" in said("postgresql://u:secret@host.invalid/x")
    assert "create it first, as with createdb nodb" in said(
        url.set(database="nodb").render_as_string(hide_password=False)
    )
    assert "check the user" in said(
        url.set(username="nobody_here", password="secret").render_as_string(hide_password=False)
    )


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
