"""Commands and what they print: the files in transcripts/, whose form `tests.kit.transcript` explains."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

import sqlq
from tests import kit
from tests.kit.command import Command
from tests.kit.flows import Shop
from tests.kit.transcript import Transcript

FILES = {file.stem: file for file in sorted(Path(__file__).with_name("transcripts").rglob("*.txt"))}
BARE = [name for name, file in FILES.items() if file.parent.name == "bare"]
ON_TABLES = [name for name in FILES if name not in BARE]


@pytest.mark.parametrize("name", ON_TABLES)
def test_commands_print_what_their_transcript_shows(
    sqlq_: Command, app: sqlq.App, engine: Engine, name: str
) -> None:
    @app.task(name="send", max_attempts=1)
    def send(n: int = 0) -> None:
        if n < 0:
            raise ValueError(f"no van {n}")

    names = vars(kit) | {"sqlq": sqlq, "sqlq_": sqlq_, "app": app, "engine": engine, "send": send}
    Transcript(FILES[name]).run(sqlq_, names | {"shop": Shop(app)})


@pytest.mark.parametrize("name", BARE)
def test_commands_without_a_database_print_what_their_transcript_shows(bare: Command, name: str) -> None:
    Transcript(FILES[name]).run(bare, {"directory": bare.directory})
