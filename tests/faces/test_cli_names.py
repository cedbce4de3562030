"""How commands find the App and the database: options on either side, pyproject.toml, factories; and commands
in messages, which can be pasted."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from sqlalchemy import make_url

from sqlq.cli.context import Context
from sqlq.config import command_hint
from sqlq.config.command_hint import command
from tests.kit import for_each, needs
from tests.kit.command import Command

# -- options before and after the command --------------------------------------------------------------------


LOOKS = (
    *("status", "doctor", "queues", "workers", "jobs", "failed", "schedules", "flows", "limits", "audit"),
    *("show 1", "why 1", "workers pause --all", "workers restart --all"),
)


@for_each("words", LOOKS)
def test_a_command_that_looks_goes_on_without_an_app_that_is_broken(bare: Command, words: str) -> None:
    named = {"SQLQ_APP": "shop:app", "SQLQ_DATABASE_URL": "sqlite:///a.db"}
    if not (bare.directory / "a.db").exists():
        bare.ok("migrate", "-d", "sqlite:///a.db")
        bare.ok("enqueue", "shop.where", env=named)
        (bare.directory / "shop.py").write_text("import nowhere")
    done = bare(*words.split(), env=named)
    assert done.out
    (line,) = done.err.splitlines()
    assert line.startswith("sqlq: the App's module 'shop' cannot be imported: ModuleNotFoundError")
    assert line.endswith(f"; going on without the App, with sqlite:///{bare.directory}/a.db")
    assert done.code == (words == "doctor"), "it has found that no worker is alive"
    assert bare(*words.split(), "-d", "sqlite:///a.db", env=named).err == ""


@for_each("words", ["cancel 1", "queues pause mail", "retry 1", "prune --finished 1d"])
def test_a_command_that_acts_wants_its_database_where_the_app_is_broken(bare: Command, words: str) -> None:
    """The App may have another database than the variable."""
    (bare.directory / "shop.py").write_text("import nowhere")
    named = {"SQLQ_APP": "shop:app", "SQLQ_DATABASE_URL": "sqlite:///a.db"}
    assert bare(*words.split(), env=named).sentence().endswith("name its database with -d")
    assert bare("status", env={"SQLQ_APP": "shop:app"}).sentence().endswith("name its database with -d")
    assert "cannot be imported" in bare("work", env=named).err
    assert "name its database" not in bare("work", env=named).err


def test_commands_leave_out_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url("postgresql+psycopg://u:secret@h/shop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLQ_DATABASE_URL", url.render_as_string(hide_password=False))
    assert command("work", url, needs_app=True) == "sqlq work -a module:attribute"
    monkeypatch.setenv("SQLQ_APP", "shop:app")
    assert command("work", url, needs_app=True) == "sqlq work"
    assert command("status", url.set(database="other")).endswith("@h/other' sqlq status")
    for typed, standing, words in (
        ("shop:app", "shop:app", "work"),
        ("other:app", "shop:app", "work -a other:app"),
        (None, "shop:app", "work"),
    ):
        monkeypatch.setenv("SQLQ_APP", standing)
        monkeypatch.setattr(command_hint, "current", Context(app_option=typed))
        assert command("work", needs_app=True) == f"sqlq {words}"
    monkeypatch.delenv("SQLQ_APP")
    for typed, words in (("sqlite:///a.db", "status"), ("sqlite:///b.db", "status -d sqlite:///b.db")):
        monkeypatch.setenv("SQLQ_DATABASE_URL", "sqlite:///a.db")
        monkeypatch.setattr(command_hint, "current", Context(database_url=typed))
        assert command("status") == f"sqlq {words}"


# -- pyproject.toml ------------------------------------------------------------------------------------------

STRANGE = """
import pathlib, sqlq
pathlib.Path("ran").touch()
app = sqlq.App()
"""
NEEDING_NO_CODE = (
    "migrate",
    "migrate --check",
    "status",
    "jobs",
    "why 1",
    "doctor",
    "workers",
    "jobs --state failed",
    "retry --all",
    "flows",
    "limits",
    "schedules",
    "queues pause mail",
    "queues resume mail",
    "cancel --queue mail",
    "prune --finished 1d",
    "metrics",
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
    assert done.err.count("is passed over") == 1
    assert (
        f"[tool.sqlq] in {file} is passed over: {file} belongs to another user (uid 65534); chown it"
        in done.err
    )
    assert not (bare.directory / "ran").exists()
    assert (bare.directory / "sqlq.db").exists()
    assert not (file.parent / "theirs.db").exists()


# -- commands that can be pasted -----------------------------------------------------------------------------


def pasted(said: str) -> list[str]:
    """The arguments of the command that a message names."""
    found = re.search(r"sqlq (migrate[^`;\n]*)", said)
    assert found, said
    return shlex.split(found[1])


WAYS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "app in the environment": ((), {"SQLQ_APP": "own:app"}),
    "app and a variable that does not count": (
        ("-a", "own:app"),
        {"SQLQ_DATABASE_URL": "sqlite:///wrong.db"},
    ),
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


# -- passwords -----------------------------------------------------------------------------------------------

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
    away = there.replace(f":{url.port}/", ":1/")
    told = []
    for place in (there, away):
        env = {"SQLQ_DATABASE_URL": place}
        for words in (
            "status",
            "status --json",
            "doctor",
            "doctor --json",
            "migrate",
            "limits",
        ):
            told += [bare(*words.split(), "-d", place), bare(*words.split(), env=env)]
        told += [
            bare("enqueue", "-a", "shop:app", "shop.where", env=env),
            bare("grants", "x", "--as", "reader", "--apply", env=env),
        ]
    told.append(bare("work", "--drain", "-a", "shop:app", "--log-level", "debug", "-d", there))
    assert not [done for done in told if "SEKRET" in done.out + done.err]
    assert any("***" in done.out + done.err for done in told)
