"""Commands in messages, where no command line runs: they name the database."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import make_url

from sqlq.config.command_hint import command, word


def test_a_command_names_the_database_by_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("migrate", make_url("sqlite:///my shop.db")) == (
        f"sqlq migrate -d 'sqlite:///{tmp_path}/my shop.db'"
    )
    assert command("migrate", make_url("postgresql+psycopg://u@h/shop"), schema="queue") == (
        "SQLQ_SCHEMA=queue sqlq migrate -d postgresql+psycopg://u@h/shop"
    )


def test_a_password_is_not_shown() -> None:
    assert command("migrate", make_url("postgresql+psycopg://u:secret@h/shop")) == (
        "SQLQ_DATABASE_URL='postgresql+psycopg://u:***@h/shop' sqlq migrate"
    )


def test_a_command_that_needs_an_app_names_the_option() -> None:
    assert command("work -q mail", needs_app=True) == "sqlq work -q mail -a module:attribute"


def test_a_word_of_a_command_is_escaped_when_it_could_steer_a_terminal() -> None:
    assert word("q\x1b[2J\n") == r"'q\u001b[2J\n'"
