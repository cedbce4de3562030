"""Commands and what they print: the files in transcripts/, whose form `tests.kit.transcript` explains."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

import sqlq
from sqlq.admin.doctor.doctor import examine
from tests import kit
from tests.kit.command import Command
from tests.kit.flows import Shop
from tests.kit.transcript import Transcript

FOLDER = Path(__file__).with_name("transcripts")
ON_TABLES = {file.stem: file for file in sorted(FOLDER.glob("*.txt"))}
BARE = {file.stem: file for file in sorted(FOLDER.glob("bare/*.txt"))}


@pytest.mark.parametrize("name", ON_TABLES)
def test_commands_print_what_their_transcript_shows(
    sqlq_: Command, app: sqlq.App, engine: Engine, name: str
) -> None:
    @app.task(name="send", max_attempts=1)
    def send(n: int = 0) -> None:
        if n < 0:
            raise ValueError(f"no van {n}")

    def says(check: str) -> list[str]:
        return [each.said for each in examine(app.database) if each.check == check]

    names = vars(kit) | {"sqlq": sqlq, "sqlq_": sqlq_, "app": app, "engine": engine, "send": send}
    Transcript(ON_TABLES[name]).run(sqlq_, names | {"shop": Shop(app), "says": says})


@pytest.mark.parametrize("name", BARE)
def test_commands_without_a_database_print_what_their_transcript_shows(bare: Command, name: str) -> None:
    Transcript(BARE[name]).run(bare, {"directory": bare.directory, "sqlq_": bare})
